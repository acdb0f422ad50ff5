// tokenizer_json.h - reads Hugging Face's tokenizer.json, and GPT-2's vocab.json with merges.txt.
//
// A tokenizer.json lists the components that process a text, with their settings. Everything in it is either
// followed or refused by name.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/tokenizer_bpe.h"
#include "llmc/tokenizer_encoder.h"
#include "llmc/tokenizer_settings.h"
#include "llmc/tokenizer_vocabulary.h"

// One component of a tokenizer.json. Its reader asks for fields by name; refuse_others() then refuses every
// field that was not asked for.
class Component {
  public:
    // `what` names the component's place in the file, such as "pre_tokenizer". Fails if it is not an object.
    Component(const nlohmann::json& object, std::string path, std::string what)
        : object_(object), path_(std::move(path)), what_(std::move(what)) {
        if (!object.is_object()) fail("%s: %s is not a JSON object", path_, what_);
        if (const auto type = object.find("type"); type != object.end() && type->is_string())
            type_ = type->get<std::string>(), what_ += " " + printable(type_);
        known_.insert("type");
    }

    const std::string& type() const { return type_; }
    std::string where() const { return path_ + ": " + what_; }

    // The value of a field, or null if there is none.
    const nlohmann::json& get(const char* key) {
        static const nlohmann::json null;
        known_.insert(key);
        const auto found = object_.find(key);
        return found == object_.end() ? null : *found;
    }
    bool flag(const char* key, bool usual) {
        const nlohmann::json& value = get(key);
        if (!value.is_boolean() && !value.is_null()) refuse(key);
        return value.is_null() ? usual : value.get<bool>();
    }
    std::string text(const char* key) {
        const nlohmann::json& value = get(key);
        if (!value.is_string()) refuse(key);
        return value.get<std::string>();
    }
    const nlohmann::json& list(const char* key) {
        const nlohmann::json& value = get(key);
        if (!value.is_array()) refuse(key);
        return value;
    }

    [[noreturn]] void refuse_type() const {
        fail("%s: %s type \"%s\" is not supported", path_, what_.substr(0, what_.find(' ')),
             printable(type_));
    }
    // Fails because a value is missing or not supported, and prints it.
    [[noreturn]] void refuse(const char* key) const {
        const auto found = object_.find(key);
        if (found == object_.end()) fail("%s: %s has no \"%s\"", path_, what_, key);
        const std::string value = found->is_string() ? "\"" + printable(found->get<std::string>()) + "\""
                                                     : printable(found->dump());
        fail("%s: %s: \"%s\" %s is not supported", path_, what_, key, value);
    }
    void refuse_others() const {
        for (const auto& [key, value] : object_.items())
            if (!known_.contains(key)) fail("%s: %s: \"%s\" is not supported", path_, what_, printable(key));
    }

  private:
    const nlohmann::json& object_;
    std::string path_, what_, type_;
    std::set<std::string> known_;
};

// A vocabulary and its merges, spelled as in the files.
class SpeltModel {
  public:
    struct Merge {
        int rank, left, right, joined;  // tokens
        std::string_view left_spelling, right_spelling;
    };

    // Messages about a merge name `merges_path` and the merge's number as a `unit`, such as a "line".
    SpeltModel(std::string path, std::string merges_path, const char* unit)
        : path_(std::move(path)), merges_path_(std::move(merges_path)), unit_(unit) {}

    void add_token(const std::string& spelling, const nlohmann::json& token) {
        if (!token.is_number_unsigned() || token.get<uint64_t>() > Vocabulary::kLargestToken)
            fail("%s: \"%s\" has a token that is not a number from 0 to %d", path_, printable(spelling),
                 Vocabulary::kLargestToken);
        const auto id = token.get<int>();
        if (vocabulary_->has(id) || vocabulary_->find(spelling) >= 0)
            fail("%s: token %d is given twice, here to \"%s\"", path_, id, printable(spelling));
        vocabulary_->add(id, spelling);
    }

    void add_merge(std::string_view left, std::string_view right, size_t number) {
        if (left.empty() || right.empty()) refuse_merge(number, "is not a pair of tokens");
        merges_.push_back({static_cast<uint32_t>(left.size()), static_cast<uint32_t>(right.size()), number});
        merge_text_.append(left).append(right);
    }
    // Adds the merge of a line "left right".
    void add_merge(std::string_view line, size_t number) {
        const size_t space = line.find(' ');
        if (space == line.npos || line.find(' ', space + 1) != line.npos)
            refuse_merge(number, "\"" + printable(line) + "\" is not a pair of tokens");
        add_merge(line.substr(0, space), line.substr(space + 1), number);
    }
    [[noreturn]] void refuse_merge(size_t number, const std::string& why) const {
        fail("%s: %s %zu: %s", merges_path_, unit_, number, why);
    }

    const std::shared_ptr<Vocabulary>& vocabulary() const { return vocabulary_; }
    size_t merge_count() const { return merges_.size(); }

    // Calls use(merge) for each merge. Fails naming a merge with a token that is not in the vocabulary.
    template <class Use>
    void for_each_merge(Use&& use) const {
        std::string_view text = merge_text_;
        for (size_t rank = 0; rank < merges_.size(); rank++) {
            const MergeText& merge = merges_[rank];
            const auto token = [&](std::string_view spelling) {
                const int found = vocabulary_->find(spelling);
                if (found < 0)
                    refuse_merge(merge.number, "\"" + printable(spelling) + "\" is not in the vocabulary");
                return found;
            };
            const std::string_view both = text.substr(0, merge.left + merge.right);
            const std::string_view first = both.substr(0, merge.left), second = both.substr(merge.left);
            use(Merge{static_cast<int>(rank), token(first), token(second), token(both), first, second});
            text.remove_prefix(both.size());
        }
    }

  private:
    struct MergeText {
        uint32_t left, right;  // lengths of the spellings
        size_t number;
    };
    std::string path_, merges_path_;
    const char* unit_;
    std::shared_ptr<Vocabulary> vocabulary_ = std::make_shared<Vocabulary>();
    std::string merge_text_;
    std::vector<MergeText> merges_;
};

// Parses a JSON file. The vocabulary and the merges, found under these keys, are passed to `spelt` while
// parsing and left out of the result: as JSON values they would take ten times the memory.
inline nlohmann::json read_spelt_json(const std::string& path,
                                      const std::vector<std::string>& vocabulary_keys,
                                      const std::vector<std::string>& merges_keys, SpeltModel& spelt) {
    std::string open;               // the open containers: 'o' is an object, 'a' an array
    std::vector<std::string> keys;  // the latest key in each of them
    std::vector<std::string> pair;
    // True if the open containers are objects under the keys `under`, followed by containers of the kinds
    // `inner`.
    const auto stands = [&](const std::vector<std::string>& under, std::string_view inner) {
        return open.size() == under.size() + inner.size() && open.find_first_not_of('o') >= under.size() &&
               open.ends_with(inner) && std::equal(under.begin(), under.end(), keys.begin());
    };
    return parse_json(read_text(path), path, [&](int part, const nlohmann::json& parsed) {
        using Event = nlohmann::json::parse_event_t;
        const auto event = static_cast<Event>(part);
        const bool opens = event == Event::object_start || event == Event::array_start;
        const bool closes = event == Event::object_end || event == Event::array_end;
        const bool in_vocabulary = stands(vocabulary_keys, "o");
        const bool in_merges = stands(merges_keys, "a"), in_pair = stands(merges_keys, "aa");
        const size_t number = spelt.merge_count();
        const bool is_text = event == Event::value && parsed.is_string();
        if ((in_merges && !is_text && event != Event::array_start && !closes) ||
            (in_pair && !is_text && (!closes || pair.size() != 2)))
            spelt.refuse_merge(number, "is not a pair of tokens");
        if (in_vocabulary && (opens || event == Event::value))
            spelt.add_token(keys.back(), opens ? nullptr : parsed);
        if (in_merges && is_text) spelt.add_merge(parsed.get_ref<const std::string&>(), number);
        if (in_pair && is_text) pair.push_back(parsed.get<std::string>());
        if (in_pair && closes) spelt.add_merge(pair[0], pair[1], number);
        if (event == Event::key) keys.back() = parsed.get<std::string>();
        if (opens) {
            open += event == Event::object_start ? 'o' : 'a';
            keys.emplace_back();
            pair.clear();
        }
        if (closes) {
            open.pop_back();
            keys.pop_back();
        }
        return !in_pair && !(in_merges && is_text) && !(in_vocabulary && event == Event::key);
    });
}

inline Merges make_merges(const SpeltModel& spelt) {
    Merges merges(spelt.merge_count());
    spelt.for_each_merge([&](const SpeltModel::Merge& merge) {
        merges.put(merge.left, merge.right, {merge.rank, merge.joined});
    });
    return merges;
}

// The pairs of characters that merges join across.
inline Joints make_joints(const SpeltModel& spelt) {
    Joints::Pairs pairs;
    spelt.for_each_merge([&](const SpeltModel::Merge& merge) {
        const std::string_view left = merge.left_spelling;
        pairs.emplace_back(first_character(left.substr(last_character_start(left))).code,
                           first_character(merge.right_spelling).code);
    });
    return Joints(std::move(pairs));
}

// Byte pair encoding on bytes, which the vocabulary spells as GPT-2 does.
inline void use_bytes(const SpeltModel& spelt, TextSteps& steps, Bpe& bpe) {
    const Vocabulary& old = *spelt.vocabulary();
    steps.vocabulary = std::make_shared<Vocabulary>();
    std::string bytes;
    for (int token = 0; token < old.size(); token++) {
        if (!old.has(token)) continue;
        const bool by_bytes = read_spelling(old[token], bytes);
        steps.vocabulary->add(token, by_bytes ? bytes : old[token], by_bytes && bpe.whole_words);
    }
    for (int byte = 0; byte < 256; byte++)
        bpe.byte_tokens[static_cast<size_t>(byte)] = old.find(spell_byte(byte));
    bpe.by_bytes = true;
    bpe.merges = make_merges(spelt);
    bpe.vocabulary = steps.vocabulary;
    steps.byte_tokens = bpe.byte_tokens;
}

// Byte pair encoding on characters. With `byte_fallback`, characters without a token use tokens "<0x00>" to
// "<0xFF>".
inline void use_characters(const SpeltModel& spelt, bool byte_fallback, TextSteps& steps, Bpe& bpe) {
    for (int byte = 0; byte < 256 && byte_fallback; byte++)
        bpe.byte_tokens[static_cast<size_t>(byte)] = spelt.vocabulary()->find(format("<0x%02X>", byte));
    bpe.by_bytes = false;
    bpe.merges = make_merges(spelt);
    // With whole_words, a word can become a token without any merges, so merges do not say where to cut.
    if (!bpe.whole_words) steps.joints = make_joints(spelt);
    bpe.vocabulary = steps.vocabulary = spelt.vocabulary();
    steps.byte_tokens = bpe.byte_tokens;
    steps.knows_all = std::ranges::count(bpe.byte_tokens, -1) == 0;
}

// Reads a tokenizer.json. Fails naming the file, and a component or value that is not supported.
class TokenizerJsonReader {
  public:
    // `file` is the tokenizer.json, with the vocabulary and merges in `spelt`.
    TokenizerJsonReader(const nlohmann::json& file, SpeltModel spelt, const std::string& path)
        : path_(path), spelt_(std::move(spelt)) {
        read(file);
    }

    TokenizerParts take() { return std::move(parts_); }

  private:
    struct Added {
        std::string spelling, text;  // text: normalized, if the token is looked for in normalized text
    };

    void read(const nlohmann::json& file) {
        Component top(file, path_, "it");
        if (const auto& version = top.get("version"); !version.is_null() && version != "1.0")
            top.refuse("version");
        top.get("truncation"), top.get("padding");  // these concern the caller, not the tokenizer
        read_model(top.get("model"));
        for_each_in(top, "normalizer", "normalizers", [&](Component& c) { read_normalizer(c); });
        read_added_tokens(top.get("added_tokens"));
        for_each_in(top, "pre_tokenizer", "pretokenizers", [&](Component& c) { read_pre_tokenizer(c); });
        finish_model();
        for_each_in(top, "decoder", "decoders", [&](Component& c) { read_decoder(c); });
        if (!by_bytes_ && top.get("decoder").is_null()) top.refuse("decoder");
        for_each_in(top, "post_processor", "processors", [&](Component& c) { read_post_processor(c); });
        top.refuse_others();
    }

    // Calls read(component) for the component of this name: not at all if it is null, for each part if it is
    // a Sequence (which may be nested). Refuses fields that read() did not ask for.
    template <class Read>
    void for_each_in(Component& top, const char* name, const char* list, Read&& read) {
        if (!top.get(name).is_null()) for_each_in(top.get(name), name, list, read);
    }
    template <class Read>
    void for_each_in(const nlohmann::json& object, const char* name, const char* list, Read&& read) {
        Component component(object, path_, name);
        if (component.type() != "Sequence")
            read(component);
        else
            for (const nlohmann::json& part : component.list(list)) for_each_in(part, name, list, read);
        component.refuse_others();
    }

    void read_model(const nlohmann::json& json) {
        const auto has = [&](const char* key) { return json.is_object() && json.contains(key); };
        if (has("type") && json["type"] != "BPE") Component(json, path_, "model").refuse_type();
        if (!has("vocab") || !has("merges")) fail("%s has no BPE model with \"vocab\" and \"merges\"", path_);
        Component model(json, path_, "model");
        if (!model.get("vocab").is_object()) fail("%s: the vocabulary is not a JSON object", path_);
        if (!model.get("merges").is_array()) fail("%s: \"merges\" is not a list", path_);
        const nlohmann::json& dropout = model.get("dropout");
        if (!dropout.is_null() && dropout != 0) model.refuse("dropout");
        for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"})
            if (!model.get(affix).is_null() && model.get(affix) != "") model.refuse(affix);
        bpe_->whole_words = model.flag("ignore_merges", false);
        bpe_->fuse_unknown = model.flag("fuse_unk", false);
        byte_fallback_ = model.flag("byte_fallback", false);
        if (!model.get("unk_token").is_null()) {
            unknown_ = model.text("unk_token");
            bpe_->unknown = spelt_.vocabulary()->find(unknown_);
        }
        model.refuse_others();
    }

    // Called once it is known whether words consist of bytes or characters.
    void finish_model() {
        TextSteps& steps = parts_.steps;
        if (by_bytes_)
            use_bytes(spelt_, steps, *bpe_);
        else
            use_characters(spelt_, byte_fallback_, steps, *bpe_);
        const bool knows_bytes = std::ranges::count(steps.byte_tokens, -1) == 0;
        if (by_bytes_ && byte_fallback_ && !knows_bytes)
            fail("%s: model BPE: \"byte_fallback\" true is not supported with a pre_tokenizer ByteLevel",
                 path_);
        if (!unknown_.empty() && bpe_->unknown < 0 && !knows_bytes)
            fail("%s: model BPE: \"unk_token\" \"%s\" is not in the vocabulary", path_, printable(unknown_));
        steps.unknown = bpe_->unknown;
        add_spellings();
        steps.words = std::move(bpe_);
    }

    void read_normalizer(Component& c) {
        Normalizer& n = parts_.steps.normalizers[0];
        if (c.type() == "NFC") {
            // After another normalizer, NFC would see that one's output, but Normalizer::cut() finds places
            // to cut only in the original text.
            if (!n.empty()) fail("%s: normalizer NFC is not supported after another", path_);
            n.nfc = true;
        } else if (c.type() == "Prepend") {
            n.prefix = c.text("prepend") + n.prefix;
            if (n.prefix.size() > kLongestReplacement) refuse_length(c, "what it puts in front of a text");
        } else if (c.type() == "Replace") {
            const std::string from = read_string_pattern(c), to = c.text("content");
            if (from.empty() || first_character(from).length != from.size()) c.refuse("pattern");
            if (to.empty()) c.refuse("content");
            if (to.size() > kLongestReplacement) refuse_length(c, "\"content\"");
            n.replacements.emplace_back(from, to);
            if (n.replacements.size() > kMostReplacements)
                fail("%s: normalizer: %zu replacements are the most", path_, kMostReplacements);
            if (n.longest_replacement() > kLongestReplacement)
                refuse_length(c, "what this and those before it make of a character");
            n.prefix = with_replaced(n.prefix, from, to);
            if (n.prefix.size() > kLongestReplacement) refuse_length(c, "what is put in front of a text");
        } else if (c.type() == "Strip") {
            for (const char* side : {"strip_left", "strip_right"})
                if (c.flag(side, true)) c.refuse(side);
        } else {
            c.refuse_type();
        }
    }

    // These limits bound the size of normalized text and the time that normalizing takes.
    static constexpr size_t kLongestReplacement = 64, kMostReplacements = 256;
    [[noreturn]] static void refuse_length(const Component& c, const char* what) {
        fail("%s: %s has more than %zu bytes, which are the most", c.where(), what, kLongestReplacement);
    }

    // {"String": "..."}
    static std::string read_string_pattern(Component& c) {
        const nlohmann::json& pattern = c.get("pattern");
        if (!pattern.is_object() || pattern.size() != 1 || !pattern.contains("String") ||
            !pattern["String"].is_string())
            c.refuse("pattern");
        return pattern["String"].get<std::string>();
    }

    void read_added_tokens(const nlohmann::json& list) {
        if (list.is_null()) return;
        if (!list.is_array()) fail("%s: \"added_tokens\" is not a list", path_);
        for (const nlohmann::json& each : list) {
            Component c(each, path_, "added token");
            const std::string content = c.text("content");
            const nlohmann::json& id = c.get("id");
            if (!id.is_number_unsigned() || id.get<uint64_t>() > Vocabulary::kLargestToken) c.refuse("id");
            const AddedTokens::Token token{id.get<int>(), c.flag("single_word", false),
                                           c.flag("lstrip", false), c.flag("rstrip", false),
                                           c.flag("special", false)};
            const bool normalized = c.flag("normalized", !token.special);
            c.refuse_others();
            const Vocabulary& vocabulary = *spelt_.vocabulary();
            const int known = vocabulary.find(content);
            const auto refuse = [&](const char* why) {
                fail("%s: added token %d \"%s\": %s", path_, token.token, printable(content), why);
            };
            if (known >= 0 && known != token.token) refuse("has another number in the vocabulary");
            if (known < 0 && vocabulary.has(token.token)) refuse("its number is that of another token");
            if (!added_.emplace(token.token, Added{content, content}).second)
                refuse("its number is given twice");
            const size_t at = static_cast<size_t>(token.token);
            if (at >= parts_.special.size()) parts_.special.resize(at + 1);
            parts_.special[at] = token.special;
            if (content.empty()) continue;
            const std::string pattern = normalized ? parts_.steps.normalizers[0](content) : content;
            if (pattern.empty() || parts_.steps.added[normalized].has(pattern)) refuse("is another one too");
            parts_.steps.added[normalized].add(pattern, token);
            added_[token.token].text = pattern;
        }
    }

    // Adds those added tokens to the vocabulary that the model does not have.
    void add_spellings() {
        Vocabulary& vocabulary = *parts_.steps.vocabulary;
        for (const auto& [token, added] : added_) {
            if (!vocabulary.has(token)) vocabulary.add(token, added.spelling, false);
            if (vocabulary[token] != added.text) parts_.decoding.texts[token] = added.text;
        }
        vocabulary.shrink();
    }

    void read_pre_tokenizer(Component& c) {
        TextSteps& steps = parts_.steps;
        const bool first = steps.splits.empty() && steps.normalizers[1].empty();
        if (by_bytes_) fail("%s: a pre_tokenizer after ByteLevel is not supported", path_);
        const auto add_split = [&](std::string_view regex) -> TextSplit& {
            return steps.splits.emplace_back(TextSplit{Pattern(regex, c.where())});
        };
        if (c.type() == "Split") {
            const nlohmann::json& pattern = c.get("pattern");
            const bool is_regex = pattern.is_object() && pattern.size() == 1 && pattern.contains("Regex") &&
                                  pattern["Regex"].is_string();
            const bool inverted = c.flag("invert", false);
            const std::string behavior = c.text("behavior");
            // Gemma's splits at spaces, but its normalizer has replaced all of them.
            if (behavior == "MergedWithPrevious" && !is_regex && is_replaced(read_string_pattern(c))) return;
            if (behavior != "Isolated" && behavior != "Removed") c.refuse("behavior");
            TextSplit& split =
                add_split(is_regex ? pattern["Regex"].get<std::string>() : literal(read_string_pattern(c)));
            if (behavior == "Removed") (inverted ? split.keeps_rest : split.keeps_matches) = false;
        } else if (c.type() == "Digits") {
            add_split(c.flag("individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)");
        } else if (c.type() == "ByteLevel") {
            by_bytes_ = true;
            c.flag("trim_offsets", true);
            if (c.flag("add_prefix_space", true)) {
                if (!first)
                    fail("%s: \"add_prefix_space\" after another pre_tokenizer is not supported", c.where());
                steps.normalizers[1].prefix = " ";
                steps.normalizers[1].prefix_unless_there = true;
            }
            if (c.flag("use_regex", true)) add_split(kGpt2Split);
        } else if (c.type() == "Metaspace") {
            if (!first) fail("%s is not supported after another pre_tokenizer", c.where());
            const std::string scheme = read_prepend_scheme(c);
            steps.normalizers[1].replacements.emplace_back(" ", kSpaceSymbol);
            if (scheme != "never") {
                steps.normalizers[1].prefix = kSpaceSymbol;
                steps.normalizers[1].prefix_unless_there = true;
                steps.normalizers[1].prefix_at_origin = scheme == "first";
            }
            const std::string space = kSpaceSymbol;
            if (c.flag("split", true)) add_split(space + "[^" + space + "]*");
        } else {
            c.refuse_type();
        }
    }

    // True if a normalizer replaces this text by another, in which it does not occur.
    bool is_replaced(const std::string& text) const {
        return std::ranges::any_of(parts_.steps.normalizers[0].replacements, [&](const auto& replacement) {
            return replacement.first == text && replacement.second.find(text) == std::string::npos;
        });
    }

    static std::string read_prepend_scheme(Component& c) {
        c.get("str_rep");
        if (c.text("replacement") != kSpaceSymbol) c.refuse("replacement");
        const bool prefix = c.flag("add_prefix_space", true);
        const std::string scheme =
            c.get("prepend_scheme").is_null() ? prefix ? "always" : "never" : c.text("prepend_scheme");
        const bool known = scheme == "always" || scheme == "first" || scheme == "never";
        if (!known || (!prefix && scheme != "never")) c.refuse("prepend_scheme");
        return scheme;
    }

    // A regex that matches exactly this text.
    static std::string literal(std::string_view text) {
        std::string regex;
        for (const char c : text) {
            const auto byte = static_cast<unsigned char>(c);
            if (byte < 0x80 && !std::isalnum(byte)) regex += '\\';
            regex += c;
        }
        return regex;
    }

    void read_decoder(Component& c) {
        DecodingRules& rules = parts_.decoding;
        if (c.type() == "ByteLevel") {
            if (!by_bytes_) fail("%s is not supported without a pre_tokenizer ByteLevel", c.where());
            c.get("add_prefix_space"), c.get("trim_offsets"), c.get("use_regex");  // settings of the encoder
        } else if (c.type() == "Replace") {
            if (read_string_pattern(c) != kSpaceSymbol) c.refuse("pattern");
            if (c.text("content") != " ") c.refuse("content");
            rules.space_symbol = !by_bytes_;  // a byte-level vocabulary spells U+2581 differently
        } else if (c.type() == "ByteFallback") {
            rules.byte_tokens = true;
        } else if (c.type() == "Fuse") {
            fused_ = true;
        } else if (c.type() == "Strip") {
            if (!c.get("start").is_number_unsigned()) c.refuse("start");
            if (c.get("stop") != 0) c.refuse("stop");
            const std::string content = c.text("content");
            if (c.get("start") == 0) return;
            if (!fused_) fail("%s is not supported before a Fuse", c.where());
            if (content != " ") c.refuse("content");
            rules.strips_spaces += c.get("start").get<uint32_t>();
        } else if (c.type() == "Metaspace") {
            if (fused_) fail("%s is not supported after a Fuse", c.where());
            rules.strips_symbols = read_prepend_scheme(c) != "never";
            c.get("split");
            rules.space_symbol = true;
        } else {
            c.refuse_type();
        }
        if (by_bytes_ && c.type() == "Metaspace")
            fail("%s is not supported with a pre_tokenizer ByteLevel", c.where());
    }

    // Accepts "$A" with special tokens before and after it; ignores settings for pairs of texts.
    void read_post_processor(Component& c) {
        if (c.type() == "ByteLevel") {
            c.get("add_prefix_space"), c.get("trim_offsets"), c.get("use_regex");  // they only change offsets
            return;
        }
        if (c.type() != "TemplateProcessing") c.refuse_type();
        c.get("pair"), c.get("special_tokens");
        std::vector<int32_t> around[2];
        bool after = false;
        for (const nlohmann::json& item : c.list("single")) {
            const auto is = [&](const char* kind) {
                return item.is_object() && item.size() == 1 && item.contains(kind) &&
                       item[kind].is_object() && item[kind].contains("id") && item[kind]["id"].is_string();
            };
            if (is("Sequence") && !after) {
                after = true;
            } else if (is("SpecialToken")) {
                const auto name = item["SpecialToken"]["id"].get<std::string>();
                const nlohmann::json& all = c.get("special_tokens");
                const bool known = all.is_object() && all.contains(name) && all[name].is_object() &&
                                   all[name].contains("ids") && all[name]["ids"].is_array();
                for (const nlohmann::json& id : known ? all[name]["ids"] : nlohmann::json::array({nullptr})) {
                    if (!id.is_number_unsigned() || id.get<uint64_t>() > Vocabulary::kLargestToken ||
                        !parts_.steps.vocabulary->has(id.get<int>()))
                        fail("%s: special token \"%s\" is no token", c.where(), printable(name));
                    around[after].push_back(id.get<int>());
                }
            } else {
                c.refuse("single");
            }
        }
        if (!after) c.refuse("single");
        parts_.before.insert(parts_.before.begin(), around[0].begin(), around[0].end());
        parts_.after.insert(parts_.after.end(), around[1].begin(), around[1].end());
    }

    std::string path_;
    SpeltModel spelt_;
    TokenizerParts parts_;
    std::unique_ptr<Bpe> bpe_ = std::make_unique<Bpe>();
    bool by_bytes_ = false, byte_fallback_ = false, fused_ = false;
    std::string unknown_;         // the unk_token
    std::map<int, Added> added_;  // by token
};

// Reads a folder's vocab.json into `spelt`, and its merges.txt, which has a line "#version: ..." and then
// "left right" in each line.
inline void read_vocab_and_merges(const std::string& folder, const std::string& tokenizer_class,
                                  SpeltModel& spelt) {
    const std::string vocabulary = folder + "/vocab.json";
    if (tokenizer_class != "GPT2Tokenizer" &&
        tokenizer_class != "Qwen2Tokenizer")  // they split text differently
        fail(
            "%s/tokenizer_config.json: \"tokenizer_class\" \"%s\": vocab.json and merges.txt are read as "
            "GPT-2's or Qwen's alone; this one's tokenizer.json is needed",
            folder, printable(tokenizer_class));
    if (!read_spelt_json(vocabulary, {}, {"no merges here"}, spelt).is_object())
        fail("%s: the vocabulary is not a JSON object", vocabulary);
    const std::string text = read_text(folder + "/merges.txt");
    std::string_view rest = text;
    for (size_t number = 1; !rest.empty(); number++) {
        std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(std::min(rest.size(), line.size() + 1));
        if (line.ends_with('\r')) line.remove_suffix(1);
        if (line.empty() || (number == 1 && line.starts_with("#version"))) continue;
        spelt.add_merge(line, number);
    }
    for (int byte = 0; byte < 256; byte++)
        if (spelt.vocabulary()->find(spell_byte(byte)) < 0)
            fail("%s has no token for the byte 0x%02x", vocabulary, static_cast<unsigned>(byte));
}

// The file with a folder's vocabulary: tokenizer.json or, if there is none, vocab.json.
inline std::string vocabulary_file(const std::string& folder) {
    return folder + (file_exists(folder + "/tokenizer.json") ? "/tokenizer.json" : "/vocab.json");
}
// Reads it as the files beside it say (tokenizer_settings.h). Returns its vocabulary and merges; `file` gets
// what a tokenizer.json has beside them.
inline SpeltModel read_vocabulary(const std::string& folder, const nlohmann::json& settings,
                                  nlohmann::json& file) {
    const std::string path = vocabulary_file(folder);
    const bool is_whole = path.ends_with("tokenizer.json");
    SpeltModel spelt(path, is_whole ? path : folder + "/merges.txt", is_whole ? "merge" : "line");
    if (is_whole)
        file = read_spelt_json(path, {"model", "vocab"}, {"model", "merges"}, spelt);
    else
        read_vocab_and_merges(folder, settings["tokenizer_class"], spelt), file = empty_byte_level_json();
    use_components_of_class(file, settings);
    const Vocabulary& known = *spelt.vocabulary();
    if (file.is_object())
        complete_added_tokens(
            file["added_tokens"], settings, [&](const std::string& text) { return known.find(text); },
            static_cast<uint64_t>(known.size()), folder);
    return spelt;
}
