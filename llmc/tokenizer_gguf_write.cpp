// tokenizer_gguf_write.cpp - the keys of byte-level tokenizers and of SentencePiece's, and their special
// tokens.
#include "llmc/tokenizer_gguf_write.h"

#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/family.h"
#include "llmc/tokenizer_gguf.h"

namespace gguf {

// The tokens of a vocabulary, with their types and, for SentencePiece, their scores.
struct TokenTable {
    std::vector<std::string> tokens;
    std::vector<int32_t> types;
    std::vector<float> scores;

    // A table of the model's size; tokens that the tokenizer lacks are named as llama.cpp's converter does.
    TokenTable(size_t size, float score) : types(size, kUnused), scores(size, score) {
        for (size_t i = 0; i < size; i++) tokens.push_back("[PAD" + std::to_string(i) + "]");
    }
    void set(size_t i, const std::string& token, int type) { tokens[i] = token, types[i] = type; }
};

// True if a token that was added to a vocabulary controls something, although its file does not say so.
static bool looks_special(const std::string& token) {
    const auto is_between = [&](const char* begin, const char* end) {
        return token.starts_with(begin) && token.ends_with(end);
    };
    return token == "<pad>" || token == "<mask>" || token == "<2mass>" || token == "[@BOS@]" ||
           is_between("<|", "|>") || is_between("<\uff5c", "\uff5c>") || is_between("<unused", ">");
}

// The type of an added token, and its spelling.
static void set_added(TokenTable& table, size_t i, const std::string& token, bool special) {
    const bool control = special || looks_special(token);
    table.set(i, control ? token : with_replaced(token, kSpaceSymbol, " "),
              control ? kControl : kUserDefined);
}

// The files of a tokenizer's folder, as the trainer reads them.
struct TokenizerFiles {
    std::string folder;
    nlohmann::json settings;          // tokenizer_settings()
    nlohmann::json config;            // the model's config.json; null if missing
    nlohmann::json tokenizer;         // tokenizer.json, or what vocab.json stands for; null if missing
    std::optional<SpeltModel> spelt;  // its vocabulary and merges
    nlohmann::json added_tokens = nlohmann::json::array();  // to the vocabulary, as a tokenizer.json has them

    explicit TokenizerFiles(std::string from)
        : folder(std::move(from)), settings(tokenizer_settings(folder)) {
        // llama.cpp's converter reads files alone.
        for (const nlohmann::json& key : settings["of_class"]) settings.erase(key.get<std::string>());
        if (has("config.json")) config = read_json(path("config.json"));
        if (has("tokenizer.json") || has("vocab.json")) {
            spelt = read_vocabulary(folder, settings, tokenizer);
            added_tokens = tokenizer["added_tokens"];
        } else {
            const SentencePieceModel model(read_text(path("tokenizer.model")), path("tokenizer.model"));
            const auto find = [&](const std::string& text) {
                const int piece = model.library().PieceToId(text);
                return model.library().IdToPiece(piece) == text ? piece : -1;
            };
            // Pieces have their types already, unless the files list them with their numbers.
            std::erase_if(
                settings["added_tokens"].get_ref<nlohmann::json::array_t&>(),
                [&](const auto& token) { return !token.contains("id") && find(content_of(token)) >= 0; });
            const auto size = static_cast<uint64_t>(model.library().GetPieceSize());
            complete_added_tokens(added_tokens, settings, find, size, folder);
        }
    }
    std::string path(const char* name) const { return folder + "/" + name; }
    bool has(const char* name) const { return file_exists(path(name)); }
    // The spelling of a special token, such as "bos_token"; "" if there is none.
    std::string named(const char* name) const { return content_of(settings.value(name, nlohmann::json())); }
    // The number of an added token of this spelling, or -1.
    int added(const std::string& spelling) const {
        if (spelling.empty()) return -1;
        for (const nlohmann::json& token : added_tokens)
            if (token.value("content", "") == spelling) return token.value("id", -1);
        return -1;
    }
    // A table of the model's size with the tokens of the vocabulary, which have this score.
    TokenTable table(size_t size, float score, float of_others) const {
        TokenTable table(size, of_others);
        const Vocabulary& vocabulary = *spelt->vocabulary();
        for (int i = 0; i < vocabulary.size() && static_cast<size_t>(i) < size; i++)
            if (vocabulary.has(i)) {
                table.set(static_cast<size_t>(i), std::string(vocabulary[i]), kNormal);
                table.scores[static_cast<size_t>(i)] = score;
            }
        return table;
    }
};

// ---- byte-level tokenizers

// The first token of several bytes that no merge makes and that is not found as a whole; "" if there is none.
static std::string token_without_merge(const TokenizerFiles& files) {
    std::set<std::string> made;
    for (const nlohmann::json& token : files.added_tokens) made.insert(token.value("content", ""));
    const Vocabulary& vocabulary = *files.spelt->vocabulary();
    files.spelt->for_each_merge([&](const SpeltModel::Merge& m) { made.emplace(vocabulary[m.joined]); });
    std::string first, bytes;
    for (int i = 0; i < vocabulary.size(); i++)
        if (vocabulary.has(i) && read_spelling(vocabulary[i], bytes) && bytes.size() > 1)
            if (std::string spelling(vocabulary[i]); !made.contains(spelling))
                if (first.empty() || spelling < first) first = std::move(spelling);
    return first;
}

// The name of a byte-level tokenizer's pre-tokenizer in llama.cpp. Fails if it has none that is known here.
static std::string name_of_pre_tokenizer(const TokenizerFiles& files, const std::string& path) {
    const nlohmann::json& tokenizer = files.tokenizer;
    // Components without the fields that do not change how a text is split.
    const auto essence = [](nlohmann::json component) {
        const auto strip = [](auto&& self, nlohmann::json& c) -> void {
            if (c.is_object()) c.erase("trim_offsets");
            // BLOOM's own file has a class in a class, which means the same.
            if (c == " ?[^(\\s|[.,!?…。，、।۔،])]+") c = " ?[^(\\s|.,!?…。，、।۔،)]+";
            if (c.is_object() && c.value("type", "") == "ByteLevel" && !c.contains("use_regex"))
                c["use_regex"] = true;
            if (c.is_structured())
                for (nlohmann::json& part : c) self(self, part);
        };
        strip(strip, component);
        return component;
    };
    const nlohmann::json found = essence(tokenizer.value("pre_tokenizer", nlohmann::json()));
    const nlohmann::json normalizer = tokenizer.value("normalizer", nlohmann::json());
    for (const char* name : {"gpt-2", "smollm", "llama-bpe", "qwen2", "bloom"}) {
        nlohmann::json known = {{"model", nlohmann::json::object()}};
        add_pre_tokenizer(known, name, path.c_str());
        if (essence(known["pre_tokenizer"]) != found) continue;
        // llama.cpp does not normalize. Its converter accepts that for Qwen's NFC alone.
        if (!normalizer.is_null() && (!known.contains("normalizer") || normalizer != known["normalizer"]))
            fail("%s: its normalizer is \"%s\", and llama.cpp has none", path,
                 printable(normalizer.value("type", "")));
        const bool ignores = tokenizer["model"].value("ignore_merges", false);
        if (ignores != known["model"].value("ignore_merges", false))
            if (const std::string token = token_without_merge(files); !token.empty())
                fail(
                    "%s: \"ignore_merges\" is %s, and llama.cpp's %s does otherwise with \"%s\", which no "
                    "merge makes",
                    path, ignores ? "true" : "false", name, printable(token));
        return name;
    }
    fail(
        "%s: its pre-tokenizer is none of those that llama.cpp has and that are known here: gpt-2, smollm, "
        "llama-bpe, qwen2 and bloom",
        path);
}

static void add_model(GgufKeys& keys, const std::string& model, const std::string& pre,
                      const TokenTable& table) {
    keys.add("tokenizer.ggml.model", model);
    keys.add("tokenizer.ggml.pre", pre);
    keys.add("tokenizer.ggml.tokens", table.tokens);
    if (model == "llama") keys.add("tokenizer.ggml.scores", table.scores);
    keys.add("tokenizer.ggml.token_type", table.types);
}

// Sets the tokens that the files add to a vocabulary.
static void set_added_tokens(TokenTable& table, const TokenizerFiles& files) {
    for (const nlohmann::json& token : files.added_tokens)
        if (const auto id = token.value("id", SIZE_MAX); id < table.tokens.size())
            set_added(table, id, token.value("content", ""), token.value("special", false));
}

static void add_byte_level(GgufKeys& keys, const TokenizerFiles& files, size_t size) {
    TokenTable table = files.table(size, 0, 0);
    set_added_tokens(table, files);
    add_model(keys, "gpt2", name_of_pre_tokenizer(files, vocabulary_file(files.folder)), table);
    std::vector<std::string> merges;
    files.spelt->for_each_merge([&](const SpeltModel::Merge& merge) {
        merges.push_back(std::string(merge.left_spelling) + " " + std::string(merge.right_spelling));
    });
    keys.add("tokenizer.ggml.merges", merges);
}

// ---- SentencePiece

static void add_sentencepiece(GgufKeys& keys, const TokenizerFiles& files, size_t size) {
    const std::string path = files.path("tokenizer.model");
    const SentencePieceModel model(read_text(path), path);
    const auto& library = model.library();
    TokenTable table(size, -10000);
    for (int i = 0; i < library.GetPieceSize() && static_cast<size_t>(i) < size; i++) {
        const int type = library.IsUnknown(i)   ? kUnknown
                         : library.IsControl(i) ? kControl
                         : library.IsUnused(i)  ? kUnused
                         : library.IsByte(i)    ? kByte
                                                : kNormal;
        table.set(static_cast<size_t>(i), library.IdToPiece(i), type);
        table.scores[static_cast<size_t>(i)] = library.GetScore(i);
    }
    for (const nlohmann::json& token : files.added_tokens)
        if (const auto i = token.value("id", SIZE_MAX); i < size) {
            set_added(table, i, token.value("content", ""), token.value("special", false));
            table.scores[i] = -1000;
        }
    if (!model.adds_space()) keys.add("tokenizer.ggml.add_space_prefix", false);
    add_model(keys, "llama", "default", table);
}

// Whether a component of a tokenizer.json, or one inside of it, puts a space before a text.
static bool prepends_space(const nlohmann::json& component) {
    if (component.is_object()) {
        const std::string type = component.value("type", "");
        if (type == "Prepend") return !component.value("prepend", "").empty();
        if (type == "Metaspace")
            return component.value("prepend_scheme", "always") != "never" &&
                   component.value("add_prefix_space", true);
    }
    return component.is_structured() && std::ranges::any_of(component, prepends_space);
}

// SentencePiece's tokenizer as a tokenizer.json has it. llama.cpp merges by scores; those that give the order
// of the file's merges are their negative ranks. (Its converter gives all tokens one score, which does not.)
static void add_byte_fallback(GgufKeys& keys, const TokenizerFiles& files, size_t size) {
    TokenTable table = files.table(size, 0, -1000);
    for (size_t i = 0; i < size; i++)
        if (table.types[i] == kNormal && read_byte_spelling(table.tokens[i]) >= 0) table.types[i] = kByte;
    float rank = 0;
    files.spelt->for_each_merge([&](const SpeltModel::Merge& merge) {
        const auto joined = static_cast<size_t>(merge.joined);
        if (joined < size && table.scores[joined] == 0) table.scores[joined] = --rank;
    });
    set_added_tokens(table, files);
    const std::string unknown_token =
        content_of(files.tokenizer["model"].value("unk_token", nlohmann::json()));
    if (const int unknown = files.added(unknown_token.empty() ? files.named("unk_token") : unknown_token);
        unknown >= 0)
        table.types[static_cast<size_t>(unknown)] = kUnknown;
    const auto prepends = [&](const char* part) {
        return prepends_space(files.tokenizer.value(part, nlohmann::json()));
    };
    if (!prepends("normalizer") && !prepends("pre_tokenizer"))
        keys.add("tokenizer.ggml.add_space_prefix", false);
    add_model(keys, "llama", "default", table);
}

// ---- special tokens and the chat template

// Which special tokens a tokenizer.json's post-processor puts around a text.
struct TokensAround {
    std::map<std::string, bool> adds;  // by name: whether it adds "bos", "eos", "sep"
    std::string first, last;           // the spellings of those that it adds
};
static TokensAround tokens_around(const TokenizerFiles& files) {
    TokensAround around;
    if (!files.tokenizer.is_object()) return around;
    const nlohmann::json processor = files.tokenizer.value("post_processor", nlohmann::json());
    if (!processor.is_object()) return around;
    const std::string bos = files.named("bos_token"), eos = files.named("eos_token");
    const auto special = [](const nlohmann::json& part) {
        return part.contains("SpecialToken") ? part["SpecialToken"].value("id", "") : std::string();
    };
    const nlohmann::json alone = nlohmann::json::array({processor});
    for (const nlohmann::json& p : processor.contains("processors") ? processor["processors"] : alone) {
        const std::string type = p.value("type", "");
        if (type == "ByteLevel") around.adds.insert({"bos", false}), around.adds.insert({"eos", false});
        const nlohmann::json single = p.value("single", nlohmann::json::array());
        if (type != "TemplateProcessing" || single.size() < 2) continue;
        around.first = special(single.front()), around.last = special(single.back());
        if (!around.first.empty()) around.adds["bos"] = bos.empty() || around.first == bos;
        if (!around.last.empty()) around.adds["eos"] = eos.empty() || around.last == eos;
        // The tokens between the texts of a pair.
        std::vector<std::string> between;
        bool is_between = false;
        for (const nlohmann::json& part : p.value("pair", nlohmann::json::array())) {
            const std::string sequence = part.contains("Sequence") ? part["Sequence"].value("id", "") : "";
            if (is_between && sequence.empty()) between.push_back(special(part));
            if (!sequence.empty()) is_between = sequence == "A";
        }
        const std::string sep = files.named("sep_token");
        const auto separates = [&](size_t i) {
            return i < between.size() && !between[i].empty() && (between[i] == sep || between[i] == eos);
        };
        if (!between.empty())
            around.adds["sep"] =
                (separates(0) && around.last.empty()) || (between.size() == 2 && separates(1));
    }
    return around;
}

// Adds the numbers of special tokens, and whether they are put around a text. Those that the tokenizer's
// files do not name are those of the model's configuration.
static void add_special_tokens(GgufKeys& keys, const TokenizerFiles& files, const ModelConfig& c) {
    const std::pair<const char*, const char*> names[] = {
        {"bos", "bos"},     {"eos", "eos"}, {"unk", "unknown"}, {"sep", "seperator"},
        {"pad", "padding"}, {"cls", "cls"}, {"mask", "mask"}};
    const TokensAround around = tokens_around(files);
    for (const auto& [name, key] : names) {
        const std::vector<int> none, &configured = name == std::string_view("bos")   ? c.begin_of_text
                                                   : name == std::string_view("eos") ? c.end_of_text
                                                   : name == std::string_view("pad") ? c.padding
                                                                                     : none;
        std::string spelling = files.named((std::string(name) + "_token").c_str());
        if (spelling.empty() && name == std::string_view("bos")) spelling = around.first;
        if (spelling.empty() && name == std::string_view("eos")) spelling = around.last;
        int token = files.added(spelling);
        if (token < 0 && !configured.empty()) token = configured[0];
        const nlohmann::json in_config =
            files.config.is_object() ? files.config.value(std::string(name) + "_token_id", nlohmann::json())
                                     : nlohmann::json();
        if (token < 0 && in_config.is_number_unsigned()) token = in_config.get<int>();
        if (token >= 0 && token < c.vocabulary)
            keys.add(std::string("tokenizer.ggml.") + key + "_token_id", static_cast<uint32_t>(token));
    }
    std::map<std::string, bool> adds = around.adds;
    for (const char* name : {"bos", "eos"}) {
        const std::string setting = std::string("add_") + name + "_token";
        if (files.settings.contains(setting) && files.settings[setting].is_boolean())
            adds.insert({name, files.settings[setting].get<bool>()});
    }
    // llama.cpp's converter: models of the vocabulary of Granite and SmolLM have none.
    if (std::string_view(c.family->name) == "llama" && c.vocabulary == 49152) adds["bos"] = false;
    for (const auto& [name, value] : adds) keys.add("tokenizer.ggml.add_" + name + "_token", value);
}

static void add_chat_templates(GgufKeys& keys, const std::map<std::string, std::string>& templates) {
    std::vector<std::string> names;
    for (const auto& [name, text] : templates) {
        if (name == "default") {
            keys.add("tokenizer.chat_template", text);
        } else {
            keys.add("tokenizer.chat_template." + name, text);
            names.push_back(name);
        }
    }
    if (!names.empty()) keys.add("tokenizer.chat_templates", names);
}

// ---- the whole

// Adds the tokenizer in a folder. Fails naming the file if llama.cpp has no such tokenizer.
static void add_folder_tokenizer(GgufKeys& keys, const std::string& folder, const ModelConfig& c) {
    const TokenizerFiles files(folder);
    const auto size = static_cast<size_t>(c.vocabulary);
    const bool has_json = files.spelt.has_value();
    const bool falls_back = has_json && files.tokenizer["model"].value("byte_fallback", false);
    const bool prefers_pieces = c.family->position == PositionKind::Rotary;  // as llama.cpp's converter
    if (files.has("tokenizer.model") && (prefers_pieces || !has_json))
        add_sentencepiece(keys, files, size);
    else if (falls_back)
        add_byte_fallback(keys, files, size);
    else
        add_byte_level(keys, files, size);
    if (files.settings.contains("add_prefix_space") && files.settings["add_prefix_space"].is_boolean() &&
        std::string_view(c.family->prefix) == "model." && !keys.has("tokenizer.ggml.add_space_prefix"))
        keys.add("tokenizer.ggml.add_space_prefix", files.settings["add_prefix_space"].get<bool>());
    add_special_tokens(keys, files, c);
}

// Adds the tokenizer of a model of bytes: token i is byte i, as GPT-2 spells it.
static void add_bytes_tokenizer(GgufKeys& keys) {
    TokenTable table(256, 0);
    for (int byte = 0; byte < 256; byte++) table.set(static_cast<size_t>(byte), spell_byte(byte), kNormal);
    add_model(keys, "gpt2", "gpt-2", table);
    keys.add("tokenizer.ggml.merges", std::vector<std::string>());
    keys.add("tokenizer.ggml.add_bos_token", false);
}

// Adds the tokenizer's keys of another GGUF file, with the types that llama.cpp's converter gives them; but
// not its chat templates.
static void add_same_tokenizer(GgufKeys& keys, const GgufFile& file) {
    for (const auto& [key, value] : file.metadata().items()) {
        if (!key.starts_with("tokenizer.") || key.starts_with("tokenizer.chat_template") || keys.has(key))
            continue;
        const bool list = value.is_array();
        if (value.is_string()) keys.add(key, value.get<std::string>());
        if (value.is_boolean()) keys.add(key, value.get<bool>());
        if (value.is_number_float()) keys.add(key, value.get<double>());
        if (value.is_number_unsigned())
            keys.add(key, value.get<uint32_t>());
        else if (value.is_number_integer())
            keys.add(key, value.get<int32_t>());
        if (list && key == "tokenizer.ggml.scores") keys.add(key, value.get<std::vector<float>>());
        if (list && !value.empty() && value[0].is_number_integer())
            keys.add(key, value.get<std::vector<int32_t>>());
        if (list && (value.empty() || value[0].is_string()))
            keys.add(key, value.get<std::vector<std::string>>());
    }
}
}  // namespace gguf

GgufKeys tokenizer_keys(const GgufFile* file, const std::string& folder, const ModelConfig& c,
                        const std::map<std::string, std::string>& templates, int end_of_turn) {
    GgufKeys keys;
    if (end_of_turn >= 0) keys.add("tokenizer.ggml.eot_token_id", static_cast<uint32_t>(end_of_turn));
    if (file)
        gguf::add_same_tokenizer(keys, *file);
    else if (!folder.empty())
        gguf::add_folder_tokenizer(keys, folder, c);
    else if (c.vocabulary == 256)
        gguf::add_bytes_tokenizer(keys);
    else
        keys.add("tokenizer.ggml.model", "none");
    gguf::add_chat_templates(keys, templates);
    return keys;
}
