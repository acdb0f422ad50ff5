// vocabulary.h - stores the spelling of each token compactly, and finds a token by its spelling.
#pragma once

#include <array>
#include <cassert>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/error.h"

// Maps a hash to one of `places` entries of a table, evenly, for sizes that need not be powers of two.
inline size_t table_place(uint64_t hash, size_t places) {
    return static_cast<size_t>(static_cast<unsigned __int128>(hash) * places >> 64);
}

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
    const auto digit = [](char c) {
        return c >= '0' && c <= '9'   ? c - '0'
               : c >= 'A' && c <= 'F' ? c - 'A' + 10
               : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                      : -1;
    };
    if (spelling.size() != 6 || !spelling.starts_with("<0x") || spelling[5] != '>') return -1;
    const int high = digit(spelling[3]), low = digit(spelling[4]);
    return high < 0 || low < 0 ? -1 : 16 * high + low;
}
