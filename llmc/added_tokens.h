// added_tokens.h - finds added tokens in a text: tokens such as <s>, which a tokenizer looks for by their
// whole spelling before it does anything else with the text. The leftmost match wins; of several at one
// place, the longest. The rules are those of "added_tokens" in Hugging Face's tokenizers.
#pragma once

#include <algorithm>
#include <bitset>
#include <optional>
#include <string_view>
#include <vector>

#include "llmc/utf8.h"
#include "llmc/vocabulary.h"

class AddedTokens {
  public:
    struct Token {
        int token;
        bool single_word = false;   // no match with a letter directly before or after it
        bool strips_left = false;   // the match includes white space before it
        bool strips_right = false;  // the match includes white space after it
        bool special = false;       // a special token like <s>; find() can leave these as text
        size_t length = 0;          // of its spelling, in bytes
    };
    struct Match {
        size_t begin, end;
        int token;
    };
    struct Found {
        std::optional<Match> match;
        size_t text;      // the text before this has no added tokens
        size_t searched;  // if there is no match: no token starts before this, whatever text follows
    };

    bool empty() const { return tokens_.empty(); }
    bool has(std::string_view spelling) const { return spellings_.find(spelling) >= 0; }

    // Adds a token. The spelling must not be empty or already present.
    void add(std::string_view spelling, Token token) {
        spellings_.add(static_cast<int>(tokens_.size()), spelling);
        token.length = spelling.size();
        tokens_.push_back(token);
        first_bytes_.set(static_cast<unsigned char>(spelling[0]));
        if (std::find(lengths_.begin(), lengths_.end(), spelling.size()) == lengths_.end()) {
            lengths_.push_back(spelling.size());
            std::sort(lengths_.rbegin(), lengths_.rend());
        }
        any_strips_left_ |= token.strips_left;
    }

    // Finds the first match in text[from..]. The caller knows already that none starts before `search`. With
    // `more`, further text will follow, and find() reports nothing that this text could still change.
    // `after_word`: a letter stood before the text. Without `specials`, the spellings of special tokens are
    // plain text, and nothing is matched inside them.
    Found find(std::string_view text, size_t from, size_t search, bool more, bool after_word,
               bool specials = true) const {
        const auto undecided = [&](size_t at) {
            return Found{std::nullopt, any_strips_left_ ? before_spaces(text, from, at) : at, at};
        };
        for (size_t at = std::max(from, search); at < text.size(); at++) {
            if (!first_bytes_[static_cast<unsigned char>(text[at])]) continue;
            if (more && text.size() - at < lengths_[0]) return undecided(at);
            const Token* token = longest_at(text.substr(at));
            if (!token) continue;
            const size_t end = at + token->length;
            if (token->special && !specials) {
                at = end - 1;
                continue;
            }
            const size_t after = token->strips_right ? after_spaces(text, end) : end;
            if (more && after == text.size() && (token->strips_right || token->single_word))
                return undecided(at);
            if (token->single_word) {
                const bool before = at == 0 ? after_word : ends_with_word(text.substr(0, at));
                if (before || (end < text.size() && is_word(first_character(text.substr(end)).code))) {
                    at = end - 1;
                    continue;
                }
            }
            const size_t begin = token->strips_left ? before_spaces(text, from, at) : at;
            return {Match{begin, after, token->token}, begin, after};
        }
        if (more) return undecided(text.size());
        return {std::nullopt, text.size(), text.size()};
    }

    static bool ends_with_word(std::string_view text) {
        return !text.empty() && is_word(first_character(text.substr(last_character_start(text))).code);
    }

    size_t bytes() const { return spellings_.bytes() + tokens_.capacity() * sizeof(Token); }

  private:
    // The longest token that the text begins with.
    const Token* longest_at(std::string_view text) const {
        for (const size_t length : lengths_)
            if (length <= text.size())
                if (const int found = spellings_.find(text.substr(0, length)); found >= 0)
                    return &tokens_[static_cast<size_t>(found)];
        return nullptr;
    }

    static size_t before_spaces(std::string_view text, size_t from, size_t at) {
        while (at > from) {
            const size_t start = last_character_start(text.substr(0, at));
            if (!is_space(first_character(text.substr(start)).code)) break;
            at = start;
        }
        return at;
    }

    static size_t after_spaces(std::string_view text, size_t at) {
        while (at < text.size()) {
            const Character c = first_character(text.substr(at));
            if (!is_space(c.code)) break;
            at += c.length;
        }
        return at;
    }

    Vocabulary spellings_;  // by index into tokens_
    std::vector<Token> tokens_;
    std::vector<size_t> lengths_;  // of spellings, the longest first
    std::bitset<256> first_bytes_;
    bool any_strips_left_ = false;
};
