// tokenizer_vocabulary.h - the spellings of a tokenizer's tokens: stores them compactly, finds a token by its
// spelling, and finds added tokens, such as the special tokens of chats, in a text.
#pragma once

#include <algorithm>
#include <array>
#include <bitset>
#include <cassert>
#include <charconv>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/error.h"
#include "llmc/tokenizer.h"
#include "llmc/utf8.h"

// Maps a hash to one of `places` entries of a table, evenly, for sizes that need not be powers of two.
inline size_t table_place(uint64_t hash, size_t places) {
    return static_cast<size_t>(static_cast<unsigned __int128>(hash) * places >> 64);
}

// Stores the spelling of each token compactly, and finds a token by its spelling.
class Vocabulary {
  public:
    static constexpr int kLargestToken = (1 << 22) - 1;  // a larger number means that the file is damaged

    bool has(int token) const {
        return token >= 0 && token < size() && spans_[static_cast<size_t>(token)].length != kNone;
    }

    // Adds a token that is not there yet. find() does not find it unless it is `findable`.
    void add(int token, std::string_view spelling, bool findable = true) {
        assert(token >= 0 && token <= kLargestToken && !has(token));
        const auto at = static_cast<size_t>(token);
        if (text_.size() + spelling.size() >= kNone) fail("a vocabulary has 4 GB of spellings or more");
        if (at >= spans_.size()) spans_.resize(at + 1, {0, kNone});
        spans_[at] = {static_cast<uint32_t>(text_.size()), static_cast<uint32_t>(spelling.size())};
        text_ += spelling;
        if (!findable) return;
        if (++findable_ > places_.size() / 4 * 3) rehash(2 * findable_ + 8);
        place(token);
    }

    // The spelling of an existing token, valid until the next add().
    std::string_view operator[](int token) const {
        assert(has(token));
        const Span span = spans_[static_cast<size_t>(token)];
        return std::string_view(text_).substr(span.start, span.length);
    }

    // The token with this spelling, or -1.
    int find(std::string_view spelling) const {
        if (places_.empty()) return -1;
        for (size_t at = table_place(hash(spelling), places_.size());;
             at = at + 1 < places_.size() ? at + 1 : 0)
            if (places_[at] < 0 || (*this)[places_[at]] == spelling) return places_[at];
    }

    // Frees the memory reserved for further tokens.
    void shrink() {
        text_.shrink_to_fit();
        spans_.shrink_to_fit();
        if (findable_ > 0) rehash(findable_ / 3 * 4 + 4);
    }

    // One more than the largest token.
    int size() const { return static_cast<int>(spans_.size()); }
    // The memory that it takes.
    size_t bytes() const {
        return text_.capacity() + spans_.capacity() * sizeof(Span) + places_.capacity() * sizeof(int32_t);
    }

  private:
    struct Span {
        uint32_t start, length;
    };
    static constexpr uint32_t kNone = UINT32_MAX;  // the length of a token that does not exist

    static uint64_t hash(std::string_view spelling) { return std::hash<std::string_view>()(spelling); }

    void place(int token) {
        size_t at = table_place(hash((*this)[token]), places_.size());
        while (places_[at] >= 0) at = at + 1 < places_.size() ? at + 1 : 0;
        places_[at] = token;
    }

    void rehash(size_t places) {
        std::vector<int32_t> old(places, -1);
        std::swap(old, places_);
        for (const int32_t token : old)
            if (token >= 0) place(token);
    }

    std::string text_;
    std::vector<Span> spans_;      // by token
    std::vector<int32_t> places_;  // open addressing: the findable tokens, -1 between them
    size_t findable_ = 0;
};

// Byte-level vocabularies spell each byte as a character below U+0144, so that the files are readable: a
// printable byte as itself, the others as characters from U+0100 on (Radford et al. 2019).
inline const std::array<int, 256>& byte_characters() {
    static const std::array<int, 256> characters = [] {
        std::array<int, 256> result;
        int next = 256;
        for (int byte = 0; byte < 256; byte++) {
            const bool prints = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte != 0xad);
            result[static_cast<size_t>(byte)] = prints ? byte : next++;
        }
        return result;
    }();
    return characters;
}

// The spelling of a byte, and the bytes that a spelling stands for; false if it is not such a spelling.
inline std::string spell_byte(int byte) {
    const int character = byte_characters()[static_cast<size_t>(byte)];
    if (character < 0x80) return {static_cast<char>(character)};
    return {static_cast<char>(0xc0 | character >> 6), static_cast<char>(0x80 | (character & 0x3f))};
}

inline bool read_spelling(std::string_view spelling, std::string& bytes) {
    static const std::array<int, 0x144> byte_of = [] {
        std::array<int, 0x144> result;
        result.fill(-1);
        for (int byte = 0; byte < 256; byte++)
            result[static_cast<size_t>(byte_characters()[static_cast<size_t>(byte)])] = byte;
        return result;
    }();
    bytes.clear();
    for (size_t i = 0; i < spelling.size(); i++) {
        auto character = static_cast<size_t>(static_cast<unsigned char>(spelling[i]));
        if (character >= 0x80) {  // two bytes of valid UTF-8, or not the spelling of a byte
            if (character >= 0xe0 || i + 1 == spelling.size()) return false;
            character = (character & 0x1f) << 6 | (static_cast<unsigned char>(spelling[++i]) & 0x3f);
        }
        if (character >= byte_of.size() || byte_of[character] < 0) return false;
        bytes += static_cast<char>(byte_of[character]);
    }
    return true;
}

// SentencePiece's vocabularies spell a space as U+2581,
inline constexpr const char* kSpaceSymbol = "\xe2\x96\x81";
// and a byte as "<0x0A>"; -1 if this is not a byte's spelling.
inline int read_byte_spelling(std::string_view spelling) {
    if (spelling.size() != 6 || !spelling.starts_with("<0x") || spelling[5] != '>') return -1;
    unsigned byte = 0;
    return std::from_chars(&spelling[3], &spelling[5], byte, 16).ptr == &spelling[5] ? static_cast<int>(byte)
                                                                                     : -1;
}

// Finds added tokens in a text: tokens such as <s>, which a tokenizer looks for by their whole spelling
// before it does anything else with the text. The leftmost match wins; of several at one place, the longest.
// The rules are those of "added_tokens" in Hugging Face's tokenizers.
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
        if (std::ranges::find(lengths_, spelling.size()) == lengths_.end()) {
            lengths_.push_back(spelling.size());
            std::sort(lengths_.rbegin(), lengths_.rend());
        }
        any_strips_left_ |= token.strips_left;
    }

    // Finds the first match in text[from..]. The caller knows already that none starts before `search`. With
    // `more`, further text will follow, and find() reports nothing that this text could still change.
    // `after_word`: a letter stood before the text. Inside the spelling of a special token that is
    // plain text, nothing is matched.
    Found find(std::string_view text, size_t from, size_t search, bool more, bool after_word,
               Spellings spellings = Spellings::Special) const {
        const auto undecided = [&](size_t at) {
            return Found{std::nullopt, any_strips_left_ ? before_spaces(text, from, at) : at, at};
        };
        for (size_t at = std::max(from, search); at < text.size(); at++) {
            if (!first_bytes_[static_cast<unsigned char>(text[at])]) continue;
            if (more && text.size() - at < lengths_[0]) return undecided(at);
            const Token* token = longest_at(text.substr(at));
            if (!token) continue;
            const size_t end = at + token->length;
            if (token->special && spellings == Spellings::PlainText) {
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
