// tokenizer.cpp - what tokenizer.h declares: opens the tokenizer of a folder or of a GGUF file, encodes and
// decodes.
#include "llmc/tokenizer.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/tokenizer_encoder.h"
#include "llmc/tokenizer_gguf.h"
#include "llmc/tokenizer_json.h"
#include "llmc/tokenizer_sentencepiece.h"
#include "llmc/tokenizer_settings.h"
#include "llmc/tokenizer_vocabulary.h"

// ---- opening

Tokenizer::Tokenizer(TokenizerParts parts, int begin_of_text, int end_of_text)
    : parts_(std::make_shared<const TokenizerParts>(std::move(parts))),
      begin_of_text_(begin_of_text),
      end_of_text_(end_of_text) {
    for (const char* usual : {"<|endoftext|>", "<|begin_of_text|>"})
        if (usual_start_ < 0) usual_start_ = find_spelling(usual);
    start_tag_ = find_spelling("<s>");
}

namespace {
// Reads a folder's tokenizer.json or, if there is none, vocab.json and merges.txt.
TokenizerParts read_json_files(const std::string& folder, const nlohmann::json& settings) {
    nlohmann::json file;
    SpeltModel spelt = read_vocabulary(folder, settings, file);
    TokenizerParts parts = TokenizerJsonReader(file, std::move(spelt), vocabulary_file(folder)).take();
    if (file_exists(folder + "/tokenizer.json")) return parts;  // which says itself what is put around a text
    const auto around = [&](const char* flag, const char* key) -> std::vector<int32_t> {
        for (const nlohmann::json& token : file["added_tokens"])
            if (truth_of(settings, flag, false) &&
                content_of(token) == content_of(settings.value(key, nlohmann::json())))
                return {token["id"].get<int32_t>()};
        return {};
    };
    parts.before = around("add_bos_token", "bos_token");
    parts.after = around("add_eos_token", "eos_token");
    return parts;
}
}  // namespace

std::optional<Tokenizer> Tokenizer::open(const std::string& folder) {
    const auto has = [&](const char* name) { return file_exists(folder + "/" + name); };
    const bool is_json = has("tokenizer.json") || has("vocab.json") || has("merges.txt");
    const std::string model = folder + "/tokenizer.model";
    if (!is_json && !file_exists(model)) return std::nullopt;
    const nlohmann::json settings = tokenizer_settings(folder);
    Tokenizer tokenizer(is_json ? read_json_files(folder, settings)
                                : read_sentencepiece(read_text(model), model, settings, folder));
    tokenizer.read_ends(folder, settings);
    return tokenizer;
}

Tokenizer Tokenizer::bytes() {
    TokenizerParts parts;
    auto bpe = std::make_unique<Bpe>();
    std::iota(bpe->byte_tokens.begin(), bpe->byte_tokens.end(), 0);
    parts.steps.byte_tokens = bpe->byte_tokens;
    parts.steps.vocabulary = std::make_shared<Vocabulary>();
    for (int byte = 0; byte < 256; byte++)
        parts.steps.vocabulary->add(byte, std::string(1, static_cast<char>(byte)), false);
    parts.steps.words = std::move(bpe);
    return Tokenizer(std::move(parts));
}

// Finds the tokens that begin and end a text. The begin: what the tokenizer's files name, else the first
// token that it puts before a text. The end: what they name, else a usual name. Only if there is no end, the
// model's files are asked for both: some name a begin that their tokenizer does not use.
void Tokenizer::read_ends(const std::string& folder, const nlohmann::json& settings) {
    nlohmann::json model = read_object(folder, "generation_config.json");
    if (model.empty()) model = read_object(folder, "config.json");
    const auto named = [&](const char* key) {
        const std::string spelling = content_of(settings.value(key, nlohmann::json()));
        return spelling.empty() ? -1 : find_spelling(spelling);
    };
    const auto numbered = [&](const char* key) {
        const nlohmann::json value = model.value(key, nlohmann::json());
        std::vector<int> tokens;
        for (const nlohmann::json& number : value.is_array() ? value : nlohmann::json::array({value}))
            if (number.is_number_unsigned() && number.get<uint64_t>() < static_cast<uint64_t>(size()))
                tokens.push_back(number.get<int>());
        return tokens;
    };
    begin_of_text_ = named("bos_token");
    if (begin_of_text_ < 0 && !parts_->before.empty()) begin_of_text_ = parts_->before[0];
    end_of_text_ = named("eos_token");
    for (const char* usual : {"<|endoftext|>", "<|end_of_text|>", "</s>"})
        if (end_of_text_ < 0) end_of_text_ = find_spelling(usual);
    if (end_of_text_ >= 0) return;
    const auto begins = numbered("bos_token_id"), ends = numbered("eos_token_id");
    if (begin_of_text_ < 0 && !begins.empty()) begin_of_text_ = begins[0];
    if (!ends.empty()) end_of_text_ = ends[0];
}

// Goes through the whole vocabulary.
int Tokenizer::find_spelling(std::string_view spelling) const {
    const Vocabulary& vocabulary = *parts_->steps.vocabulary;
    for (int token = 0; token < vocabulary.size(); token++)
        if (vocabulary.has(token) && vocabulary[token] == spelling) return token;
    return -1;
}

// ---- encoding

std::vector<int> Tokenizer::encode(std::string_view text, Ends ends) const {
    std::vector<int> tokens;
    if (ends == Ends::Add) tokens = parts_->before;
    TextEncoder(parts_->steps, Spellings::Special, SIZE_MAX).encode(text, tokens);
    if (ends == Ends::Add) tokens.insert(tokens.end(), parts_->after.begin(), parts_->after.end());
    return tokens;
}

std::shared_ptr<TextEncoder> Tokenizer::encoder(Spellings spellings) const {
    return std::make_shared<TextEncoder>(parts_->steps, spellings);
}

// ---- decoding

std::string Tokenizer::decode(std::span<const int> tokens) const {
    Decoder decoder(*this);
    std::string text;
    for (const int token : tokens) text += decoder.next(token);
    return text;
}

Tokenizer::Decoder::Decoder(const Tokenizer& tokenizer, bool begins)
    : tokenizer_(tokenizer), first_(begins), strips_(begins ? tokenizer.parts_->decoding.strips_spaces : 0) {}

std::string Tokenizer::Decoder::next(int token) {
    const bool strips_symbols = std::exchange(first_, false) && tokenizer_.parts_->decoding.strips_symbols;
    std::string text = tokenizer_.text_of(token, strips_symbols ? "" : " ");
    const size_t spaces = std::min(text.find_first_not_of(' '), text.size());
    const size_t stripped = std::min(spaces, strips_);
    text.erase(0, stripped);
    strips_ = text.empty() ? strips_ - stripped : 0;
    return text;
}

std::string Tokenizer::text_of(int token, std::string_view space) const {
    const Vocabulary& vocabulary = *parts_->steps.vocabulary;
    const DecodingRules& rules = parts_->decoding;
    if (!vocabulary.has(token)) return "";
    const auto other = rules.texts.find(token);
    std::string text(other == rules.texts.end() ? vocabulary[token] : other->second);
    if (rules.byte_tokens)
        if (const int byte = read_byte_spelling(text); byte >= 0)
            return std::string(1, static_cast<char>(byte));
    return rules.space_symbol ? with_replaced(text, kSpaceSymbol, space) : text;
}

// ---- what it is

bool Tokenizer::is_special(int token) const {
    const auto& special = parts_->special;
    return token >= 0 && static_cast<size_t>(token) < special.size() && special[static_cast<size_t>(token)];
}
int Tokenizer::size() const { return parts_->steps.vocabulary->size(); }
size_t Tokenizer::held_bytes() const { return parts_->steps.bytes(); }

// ---- GGUF

bool has_gguf_tokenizer(const nlohmann::json& metadata, const std::string& path) {
    return ConfigReader(metadata, path).text("tokenizer.ggml.model", "none") != "none";
}

Tokenizer read_gguf_tokenizer(const nlohmann::json& metadata, const std::string& path) {
    const std::string model = ConfigReader(metadata, path).text("tokenizer.ggml.model", "");
    if (model != "gpt2" && model != "llama")
        fail("%s: 'tokenizer.ggml.model' is \"%s\"; gpt2 and llama are supported", path, printable(model));
    const gguf::TokenizerKeys keys(metadata, path);
    if (metadata.contains("tokenizer.ggml.precompiled_charsmap"))
        fail("%s: 'tokenizer.ggml.precompiled_charsmap' is not supported", path);
    TokenizerParts parts =
        model == "gpt2" ? gguf::read_byte_level(keys) : gguf::read_sentencepiece_keys(keys);
    return Tokenizer(std::move(parts), keys.mark("bos_token_id"), keys.mark("eos_token_id"));
}

void write_gguf_tokenizer(const nlohmann::json& metadata, const std::string& path, int longest,
                          const std::string& folder) {
    const gguf::TokenizerKeys keys(metadata, path);
    const bool by_bytes = keys.text("model") == "gpt2";
    nlohmann::json settings = by_bytes ? nlohmann::json::object() : gguf::sentencepiece_config(keys);
    settings["tokenizer_class"] = "PreTrainedTokenizerFast";
    settings["clean_up_tokenization_spaces"] = false;
    settings["model_max_length"] = longest;
    if (!by_bytes) settings["legacy"] = true;
    // One template is a text, several are a list of texts with names.
    const std::string prefix = "tokenizer.chat_template", only = keys.reader().text(prefix.c_str(), "");
    nlohmann::json templates = nlohmann::json::array();
    if (!only.empty()) templates.push_back({{"name", "default"}, {"template", only}});
    for (const auto& [key, value] : metadata.items())
        if (key.starts_with(prefix + ".") && value.is_string())
            templates.push_back({{"name", key.substr(prefix.size() + 1)}, {"template", value}});
    if (templates.size() > 1 || (only.empty() && !templates.empty()))
        settings["chat_template"] = templates;
    else if (!only.empty())
        settings["chat_template"] = only;
    const std::pair<const char*, const char*> marks[] = {{"bos_token_id", "bos_token"},
                                                         {"eos_token_id", "eos_token"},
                                                         {"unknown_token_id", "unk_token"},
                                                         {"padding_token_id", "pad_token"}};
    for (const auto& [key, name] : marks)
        if (const int token = keys.mark(key); token >= 0)
            settings[name] = keys.token(static_cast<size_t>(token));
    if (by_bytes)
        gguf::write_tokenizer_json(keys, folder + "/tokenizer.json");
    else
        write_text(folder + "/tokenizer.model", gguf::sentencepiece_model(keys));
    write_json(folder + "/tokenizer_config.json", settings);
}
