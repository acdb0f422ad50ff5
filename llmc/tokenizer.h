// tokenizer.h - turns text into tokens and back, as the tokenizer files in a model's folder say; or with one
// token per byte, for models that were trained on plain bytes.
#pragma once

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
#include "llmc/tokenizer_json.h"
#include "llmc/tokenizer_sentencepiece.h"
#include "llmc/tokenizer_vocabulary.h"

class Tokenizer {
  public:
    // begin_of_text and end_of_text are tokens, or -1 if there are none.
    explicit Tokenizer(TokenizerParts parts, int begin_of_text = -1, int end_of_text = -1)
        : parts_(std::make_shared<const TokenizerParts>(std::move(parts))),
          begin_of_text_(begin_of_text),
          end_of_text_(end_of_text) {
        for (const char* usual : {"<|endoftext|>", "<|begin_of_text|>", "<s>"})
            if (usual_start_ < 0) usual_start_ = find_spelling(usual);
    }

    // Reads a folder's tokenizer.json or, if there is none, vocab.json and merges.txt (as for GPT-2) or else
    // tokenizer.model. Returns nothing if the folder has none of them. The tokens that begin and end a text
    // come from tokenizer_config.json, special_tokens_map.json, generation_config.json and config.json. Fails
    // naming the file if one is damaged or has an unsupported component.
    static std::optional<Tokenizer> open(const std::string& folder) {
        const auto path = [&](const char* name) { return folder + "/" + name; };
        const auto has = [&](const char* name) { return file_exists(path(name)); };
        std::optional<Tokenizer> tokenizer;
        if (has("tokenizer.json")) {
            tokenizer = Tokenizer(TokenizerJsonReader(path("tokenizer.json")).take());
        } else if (has("vocab.json") || has("merges.txt")) {
            refuse_other_classes(path("tokenizer_config.json"));
            tokenizer = Tokenizer(read_gpt2_files(path("vocab.json"), path("merges.txt")));
        } else if (has("tokenizer.model")) {
            const std::string file = path("tokenizer.model");
            tokenizer = Tokenizer(
                read_sentencepiece(read_text(file), file, read_object(path("tokenizer_config.json"))));
        }
        if (tokenizer) tokenizer->read_ends(folder);
        return tokenizer;
    }

    // The byte tokenizer: every byte is its own token, 0 to 255.
    static Tokenizer bytes() {
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

    // The tokens of a text, which may have any bytes. A byte that is not UTF-8 becomes one token, or none if
    // the vocabulary has none for it. Added tokens ("<s>") in the text are found if the tokenizer comes from
    // a tokenizer.json; otherwise their spelling is plain text. `specials`: add the tokens that the tokenizer
    // puts before and after a text.
    std::vector<int> encode(std::string_view text, bool specials = false) const {
        std::vector<int> tokens;
        if (specials) tokens = parts_->before;
        TextEncoder(parts_->steps, true, SIZE_MAX).encode(text, tokens);
        if (specials) tokens.insert(tokens.end(), parts_->after.begin(), parts_->after.end());
        return tokens;
    }
    // For a text that arrives in parts: feed() and finish() append the same tokens as encode(). The tokenizer
    // must outlive the encoder. Without `specials`, the spelling of a special token like <s> in the text is
    // plain text.
    TextEncoder encoder(bool specials = true) const { return TextEncoder(parts_->steps, specials); }
    // The token that goes before each document of the data: the usual one, else the one that begins a text,
    // else the one that ends a text; -1 if there is none of them.
    int document_start() const {
        if (usual_start_ >= 0) return usual_start_;
        return begin_of_text_ >= 0 ? begin_of_text_ : end_of_text_;
    }

    // The bytes that a token stands for in the middle of a text; they need not be whole characters. Empty if
    // there is no such token: models may have more rows than the vocabulary has tokens.
    std::string decode(int token) const { return text_of(token, " "); }
    // Decodes a whole text. Without `specials`, special tokens are left out.
    std::string decode(std::span<const int> tokens, bool specials = true) const {
        Decoder decoder(*this, true, specials);
        std::string text;
        for (const int token : tokens) text += decoder.next(token);
        return text;
    }

    // Decodes a text token by token. If `begins`, the tokens start a text, and what the tokenizer puts before
    // a text is removed.
    class Decoder {
      public:
        explicit Decoder(const Tokenizer& tokenizer, bool begins = true, bool specials = true)
            : tokenizer_(tokenizer),
              specials_(specials),
              first_(begins),
              strips_(begins ? tokenizer.parts_->decoding.strips_spaces : 0) {}

        // The text that this token adds.
        std::string next(int token) {
            if (!specials_ && tokenizer_.is_special(token)) return "";
            const bool strips_symbols =
                std::exchange(first_, false) && tokenizer_.parts_->decoding.strips_symbols;
            std::string text = tokenizer_.text_of(token, strips_symbols ? "" : " ");
            const size_t spaces = std::min(text.find_first_not_of(' '), text.size());
            const size_t stripped = std::min(spaces, strips_);
            text.erase(0, stripped);
            strips_ = text.empty() ? strips_ - stripped : 0;
            return text;
        }

      private:
        const Tokenizer& tokenizer_;
        bool specials_, first_;
        size_t strips_;  // how many more spaces to remove
    };

    // True for special tokens like <s>, which are not text.
    bool is_special(int token) const {
        const auto& special = parts_->special;
        return token >= 0 && static_cast<size_t>(token) < special.size() &&
               special[static_cast<size_t>(token)];
    }
    // The tokens that begin and end a text, or -1.
    int begin_of_text() const { return begin_of_text_; }
    int end_of_text() const { return end_of_text_; }
    // One more than the largest token.
    int size() const { return parts_->steps.vocabulary->size(); }
    // The memory that it takes.
    size_t held_bytes() const { return parts_->steps.bytes(); }

  private:
    std::string text_of(int token, std::string_view space) const {
        const Vocabulary& vocabulary = *parts_->steps.vocabulary;
        const DecodingRules& rules = parts_->decoding;
        if (!vocabulary.has(token)) return "";
        const auto other = rules.texts.find(token);
        std::string text(other == rules.texts.end() ? vocabulary[token] : other->second);
        if (rules.byte_tokens)
            if (const int byte = read_byte_spelling(text); byte >= 0)
                return std::string(1, static_cast<char>(byte));
        const std::string_view symbol = kSpaceSymbol;
        if (rules.space_symbol)
            for (size_t at = 0; (at = text.find(symbol, at)) != text.npos; at += space.size())
                text.replace(at, symbol.size(), space);
        return text;
    }

    static nlohmann::json read_object(const std::string& path) {
        if (!file_exists(path)) return nlohmann::json::object();
        nlohmann::json json = read_json(path);
        if (!json.is_object()) fail("%s is not a JSON object", path.c_str());
        return json;
    }

    // Other tokenizers have files of these names too, but split text differently.
    static void refuse_other_classes(const std::string& path) {
        const nlohmann::json name = read_object(path).value("tokenizer_class", nlohmann::json());
        if (!name.is_string()) return;
        for (const char* known :
             {"GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend"})
            if (name == known) return;
        fail(
            "%s: \"tokenizer_class\" \"%s\": vocab.json and merges.txt are read as GPT-2's alone; this one's "
            "tokenizer.json is needed",
            path.c_str(), printable(name.get<std::string>()).c_str());
    }

    // Finds the tokens that begin and end a text: those that the tokenizer's own files name, else those with
    // the usual names, else the numbers in the model's files.
    void read_ends(const std::string& folder) {
        const auto own = {read_object(folder + "/tokenizer_config.json"),
                          read_object(folder + "/special_tokens_map.json")};
        nlohmann::json model = read_object(folder + "/generation_config.json");
        if (model.empty()) model = read_object(folder + "/config.json");
        const auto named = [&](const char* key) {
            for (const nlohmann::json& file : own) {
                nlohmann::json name = file.value(key, nlohmann::json());
                if (name.is_object()) name = name.value("content", nlohmann::json());
                if (name.is_string())
                    if (const int token = find_spelling(name.get<std::string>()); token >= 0) return token;
            }
            return -1;
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
    int find_spelling(std::string_view spelling) const {
        const Vocabulary& vocabulary = *parts_->steps.vocabulary;
        for (int token = 0; token < vocabulary.size(); token++)
            if (vocabulary.has(token) && vocabulary[token] == spelling) return token;
        return -1;
    }

    std::shared_ptr<const TokenizerParts> parts_;
    int begin_of_text_ = -1, end_of_text_ = -1;
    int usual_start_ = -1;  // <|endoftext|>, <|begin_of_text|> or <s>; -1: none of them
};
