// bpe.h - byte pair encoding (Sennrich et al. 2016): the tokens of a word.
//
// A word starts as one symbol for each byte (GPT-2's kind) or each character (SentencePiece's kind, where a
// character that the vocabulary lacks becomes the tokens of its bytes). Then the pair of neighbours that
// comes first in the list of merges is joined, again and again.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/utf8.h"
#include "llmc/vocabulary.h"

// A table by pairs of numbers from 0 on, of a size that is known beforehand.
template <class Value>
class PairTable {
  public:
    explicit PairTable(size_t most = 0) : places_(most + most / 3 + 1) {}

    // Puts a value in, over an earlier one of that pair.
    void put(int32_t left, int32_t right, Value value) {
        places_[find_place(left, right)] = {left, right, value};
    }

    const Value* find(int32_t left, int32_t right) const {
        const Place& place = places_[find_place(left, right)];
        return place.left < 0 ? nullptr : &place.value;
    }

    size_t bytes() const { return places_.capacity() * sizeof(Place); }

  private:
    struct Place {
        int32_t left = -1, right = -1;  // left -1: free
        [[no_unique_address]] Value value{};
    };

    size_t find_place(int32_t left, int32_t right) const {
        const uint64_t key =
            static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
        // Two rounds of multiplying and folding (Steele et al. 2014, SplitMix64).
        uint64_t hash = (key ^ key >> 30) * 0xbf58476d1ce4e5b9;
        hash = (hash ^ hash >> 27) * 0x94d049bb133111eb;
        size_t at = table_place(hash, places_.size());
        while (places_[at].left >= 0 && (places_[at].left != left || places_[at].right != right))
            at = at + 1 < places_.size() ? at + 1 : 0;
        return at;
    }

    std::vector<Place> places_;
};

struct Merge {
    int32_t rank, token;  // less is sooner; what the two become
};
using Merges = PairTable<Merge>;

// Which pairs of neighbouring characters a merge can join across. Text may be cut where none can: no token
// of the whole would reach over the cut. That makes words of text that no pre-tokenizer has split.
class Joints {
  public:
    using Pairs = std::vector<std::pair<int32_t, int32_t>>;

    // Pairs may come several times.
    explicit Joints(Pairs pairs) {
        std::sort(pairs.begin(), pairs.end());
        pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());
        pairs_ = PairTable<Nothing>(pairs.size());
        for (const auto& [left, right] : pairs) pairs_.put(left, right, {});
    }
    bool joins(int32_t left, int32_t right) const { return pairs_.find(left, right); }
    size_t bytes() const { return pairs_.bytes(); }

  private:
    struct Nothing {};
    PairTable<Nothing> pairs_;
};

// Room that encoding a word needs, kept from word to word.
struct WordScratch {
    struct Symbol {
        int32_t token, previous, next;  // token -1: joined to the one before; next -1: the last
    };
    std::vector<Symbol> symbols;
    std::vector<uint64_t> queue;
    std::vector<int32_t> tokens;
};

// What makes tokens of a word.
class WordModel {
  public:
    virtual ~WordModel() = default;
    // Appends the tokens of a word of valid UTF-8.
    virtual void encode(std::string_view word, WordScratch& scratch, std::vector<int32_t>& tokens) const = 0;
    virtual size_t bytes() const = 0;
};

class Bpe final : public WordModel {
  public:
    bool by_bytes = true;       // else by characters
    bool whole_words = false;   // a word that is a token becomes it, whatever the merges ("ignore_merges")
    int unknown = -1;           // for what has no token; -1: that is left out
    bool fuse_unknown = false;  // one for several in a row
    std::array<int32_t, 256> byte_tokens;  // -1: none
    Merges merges;
    std::shared_ptr<const Vocabulary> vocabulary;  // finds characters and whole words

    Bpe() { byte_tokens.fill(-1); }

    void encode(std::string_view word, WordScratch& scratch, std::vector<int32_t>& tokens) const override {
        if (whole_words)
            if (const int token = vocabulary->find(word); token >= 0) {
                tokens.push_back(token);
                return;
            }
        if (word.size() > INT32_MAX)
            fail("a text has a word of %zu bytes, which is too long to tokenize", word.size());
        start_symbols(word, scratch.symbols);
        join(scratch);
        for (const auto& symbol : scratch.symbols)
            if (symbol.token >= 0) tokens.push_back(symbol.token);
    }

    size_t bytes() const override { return sizeof *this + merges.bytes(); }

  private:
    using Symbols = std::vector<WordScratch::Symbol>;

    static void append(Symbols& symbols, int32_t token) {
        const auto count = static_cast<int32_t>(symbols.size());
        if (count > 0) symbols.back().next = count;
        symbols.push_back({token, count - 1, -1});
    }

    void start_symbols(std::string_view word, Symbols& symbols) const {
        symbols.clear();
        // Hugging Face's tokenizers append the unknown token only before what has a token of its own, not
        // before bytes.
        bool waits = false;
        const auto append_unknown = [&] {
            if (std::exchange(waits, false)) append(symbols, unknown);
        };
        while (!word.empty()) {
            const std::string_view unit = word.substr(0, by_bytes ? 1 : first_character(word).length);
            word.remove_prefix(unit.size());
            const auto byte_token = [&](char c) { return byte_tokens[static_cast<unsigned char>(c)]; };
            const auto has_none = [&](char c) { return byte_token(c) < 0; };
            const int32_t token = by_bytes ? byte_token(unit[0]) : vocabulary->find(unit);
            if (token >= 0) {
                append_unknown();
                append(symbols, token);
            } else if (!by_bytes && std::none_of(unit.begin(), unit.end(), has_none)) {
                for (const char c : unit) append(symbols, byte_token(c));
            } else if (unknown >= 0) {
                if (!fuse_unknown) append_unknown();
                waits = true;
            }
        }
        append_unknown();
    }

    // Joins the pair of lowest rank, leftmost first, until no pair has a merge. The queue holds (rank, left
    // symbol) of pairs that were neighbours once; one that is no more, or of another rank by now, is passed
    // over.
    void join(WordScratch& scratch) const {
        Symbols& symbols = scratch.symbols;
        std::vector<uint64_t>& queue = scratch.queue;
        queue.clear();
        const auto at = [&](int32_t i) -> WordScratch::Symbol& { return symbols[static_cast<size_t>(i)]; };
        const auto merge_of = [&](int32_t left) -> const Merge* {
            if (left < 0 || at(left).token < 0 || at(left).next < 0) return nullptr;
            return merges.find(at(left).token, at(at(left).next).token);
        };
        const auto candidate = [&](int32_t left, const Merge& merge) {
            return static_cast<uint64_t>(merge.rank) << 32 | static_cast<uint32_t>(left);
        };
        const auto consider = [&](int32_t left) {
            if (const Merge* merge = merge_of(left)) {
                queue.push_back(candidate(left, *merge));
                std::push_heap(queue.begin(), queue.end(), std::greater<>());
            }
        };
        for (int32_t i = 0; i < static_cast<int32_t>(symbols.size()); i++)
            if (const Merge* merge = merge_of(i)) queue.push_back(candidate(i, *merge));
        std::make_heap(queue.begin(), queue.end(), std::greater<>());
        while (!queue.empty()) {
            const auto left = static_cast<int32_t>(queue.front());
            const auto rank = static_cast<int32_t>(queue.front() >> 32);
            std::pop_heap(queue.begin(), queue.end(), std::greater<>());
            queue.pop_back();
            const Merge* merge = merge_of(left);
            if (!merge || merge->rank != rank) continue;
            WordScratch::Symbol& joined = at(left);
            WordScratch::Symbol& gone = at(joined.next);
            joined.token = merge->token;
            gone.token = -1;
            joined.next = gone.next;
            if (gone.next >= 0) at(gone.next).previous = left;
            consider(joined.previous);
            consider(left);
        }
    }
};

// The tokens of words that were seen lately, in bounded memory: it starts anew when it is full.
class WordCache {
  public:
    static constexpr size_t kLongestWord = 64, kMostWords = 48 << 10;

    // The tokens of a word, valid until the next put(), if it is known.
    std::optional<std::span<const int32_t>> find(std::string_view word) const {
        if (places_.empty()) return std::nullopt;
        const Place& place = places_[find_place(word)];
        if (place.length == 0) return std::nullopt;
        return std::span(tokens_).subspan(place.tokens, place.count);
    }

    // Remembers a word that is not known, unless it is long.
    void put(std::string_view word, std::span<const int32_t> tokens) {
        if (word.empty() || word.size() > kLongestWord || tokens.size() > UINT16_MAX) return;
        if (words_ == kMostWords) {
            words_ = 0;
            text_.clear();
            tokens_.clear();
            std::fill(places_.begin(), places_.end(), Place());
        }
        if (++words_ > places_.size() / 4 * 3) grow();
        places_[find_place(word)] = {
            static_cast<uint32_t>(text_.size()), static_cast<uint32_t>(tokens_.size()),
            static_cast<uint16_t>(word.size()), static_cast<uint16_t>(tokens.size())};
        text_ += word;
        tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
    }

  private:
    struct Place {
        uint32_t text = 0, tokens = 0;
        uint16_t length = 0, count = 0;  // length 0: free
    };

    size_t find_place(std::string_view word) const {
        size_t at = table_place(std::hash<std::string_view>()(word), places_.size());
        for (;; at = at + 1 < places_.size() ? at + 1 : 0) {
            const Place& place = places_[at];
            if (place.length == 0 || std::string_view(text_).substr(place.text, place.length) == word)
                return at;
        }
    }

    void grow() {
        std::vector<Place> old(std::max<size_t>(1024, 2 * places_.size()));
        std::swap(old, places_);
        for (const Place& place : old)
            if (place.length > 0)
                places_[find_place(std::string_view(text_).substr(place.text, place.length))] = place;
    }

    std::vector<Place> places_;  // open addressing
    std::string text_;
    std::vector<int32_t> tokens_;
    size_t words_ = 0;
};
