// tokenizer.h - turns text into tokens and back, as the tokenizer files in a model's folder say; or with one
// token per byte, for models that were trained on plain bytes.
//
// tokenizer.cpp has what this declares; the readers of files and the steps of encoding are in tokenizer_*.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

struct TokenizerParts;
class TextEncoder;  // tokenizer_encoder.h

// Whether the tokens that the tokenizer puts before and after a text are added.
enum class Ends { None, Add };
// What the spelling of a special token like <s> in a text is.
enum class Spellings { Special, PlainText };

class Tokenizer {
  public:
    // begin_of_text and end_of_text are tokens, or -1 if there are none.
    explicit Tokenizer(TokenizerParts parts, int begin_of_text = -1, int end_of_text = -1);

    // Reads a folder's tokenizer.json or, if there is none, vocab.json and merges.txt (as for GPT-2) or else
    // tokenizer.model. Returns nothing if the folder has none of them. The tokens that begin and end a text
    // come from tokenizer_config.json and special_tokens_map.json, else from the tokenizer itself, else from
    // generation_config.json or config.json. Fails
    // naming the file if one is damaged or has an unsupported component.
    static std::optional<Tokenizer> open(const std::string& folder);
    // The byte tokenizer: every byte is its own token, 0 to 255.
    static Tokenizer bytes();

    // The tokens of a text, which may have any bytes. A byte that is not UTF-8 becomes one token, or none if
    // the vocabulary has none for it. Special tokens ("<s>") in the text are found, unless the tokenizer
    // comes from a vocab.json; there their spelling is plain text.
    std::vector<int> encode(std::string_view text, Ends ends = Ends::None) const;
    // For a text that arrives in parts; the tokenizer must outlive it. A text with a piece that is longer
    // than kLongestPiece (tokenizer_encoder.h) is refused, naming the byte.
    std::shared_ptr<TextEncoder> encoder(Spellings spellings = Spellings::Special) const;
    // The token that goes before each document of the data: the usual one, else the one that begins a text,
    // else <s>, else the one that ends a text; -1 if there is none of them.
    int document_start() const {
        if (usual_start_ >= 0) return usual_start_;
        if (begin_of_text_ >= 0) return begin_of_text_;
        return start_tag_ >= 0 ? start_tag_ : end_of_text_;
    }

    // The bytes that a token stands for in the middle of a text; they need not be whole characters. Empty if
    // there is no such token: models may have more rows than the vocabulary has tokens.
    std::string decode(int token) const { return text_of(token, " "); }
    // Decodes a whole text.
    std::string decode(std::span<const int> tokens) const;

    // Decodes a text token by token. If `begins`, the tokens start a text, and what the tokenizer puts before
    // a text is removed.
    class Decoder {
      public:
        explicit Decoder(const Tokenizer& tokenizer, bool begins = true);

        // The text that this token adds.
        std::string next(int token);

      private:
        const Tokenizer& tokenizer_;
        bool first_;
        size_t strips_;  // how many more spaces to remove
    };

    // True for special tokens like <s>, which are not text.
    bool is_special(int token) const;
    // The tokens that begin and end a text, or -1.
    int begin_of_text() const { return begin_of_text_; }
    int end_of_text() const { return end_of_text_; }
    // One more than the largest token.
    int size() const;
    // The memory that it takes.
    size_t held_bytes() const;

  private:
    std::string text_of(int token, std::string_view space) const;
    void read_ends(const std::string& folder, const nlohmann::json& settings);
    int find_spelling(std::string_view spelling) const;

    std::shared_ptr<const TokenizerParts> parts_;
    int begin_of_text_ = -1, end_of_text_ = -1;
    int usual_start_ = -1;  // <|endoftext|> or <|begin_of_text|>; -1: neither
    int start_tag_ = -1;    // <s>; in Gemma it is a tag of HTML
};

// ---- The tokenizer of a GGUF file, which is in the file's metadata. `path` names the file in errors.

// True if the file has a tokenizer.
bool has_gguf_tokenizer(const nlohmann::json& metadata, const std::string& path);
// Reads the tokenizer. Fails naming the file and the key if one is missing, damaged or not supported.
Tokenizer read_gguf_tokenizer(const nlohmann::json& metadata, const std::string& path);
// Writes that tokenizer's files into a folder: tokenizer.json for a byte-level one or tokenizer.model for
// SentencePiece's, and tokenizer_config.json. `longest` is the longest text that the model takes, in tokens.
void write_gguf_tokenizer(const nlohmann::json& metadata, const std::string& path, int longest,
                          const std::string& folder);
