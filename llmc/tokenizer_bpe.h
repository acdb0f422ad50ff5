// tokenizer_bpe.h - byte pair encoding (Sennrich et al. 2016): turns a word into tokens.
//
// A word starts as one symbol per byte (as in GPT-2) or one symbol per character (as in SentencePiece, where
// a character that is not in the vocabulary becomes the tokens of its bytes). Then, again and again, the pair
// of neighbouring symbols that is first in the list of merges is joined into one symbol.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/tokenizer_vocabulary.h"
#include "llmc/utf8.h"

// A hash table whose keys are pairs of non-negative numbers. Its size is fixed when it is made.
template <class Value>
class PairTable {
  public:
    explicit PairTable(size_t most = 0) : places_(most + most / 3 + 1) {}

    // Stores a value, replacing an earlier one of that pair.
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
        int32_t left = -1, right = -1;  // left -1: this entry is free
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
    int32_t rank, token;  // the merge of lowest rank is applied first; the token that the pair becomes
};
using Merges = PairTable<Merge>;

// Tells which pairs of neighbouring characters a merge can join across. Text may be cut between two
// characters that no merge joins, because no token would reach over the cut. This splits text into words when
// the tokenizer has no pre-tokenizer.
class Joints {
  public:
    using Pairs = std::vector<std::pair<int32_t, int32_t>>;

    // The list may contain a pair several times.
    explicit Joints(Pairs pairs) {
        std::ranges::sort(pairs);
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

// Buffers for encoding a word, reused from word to word.
struct WordScratch {
    struct Symbol {
        int32_t token;            // -1: it was joined with the one before it
        uint32_t previous, next;  // places in the list
    };
    std::vector<Symbol> symbols;
    std::vector<uint64_t> queue;
    std::vector<int32_t> tokens;
};

// Turns words into tokens.
class WordModel {
  public:
    virtual ~WordModel() = default;
    // Appends the tokens of a word of valid UTF-8.
    virtual void encode(std::string_view word, WordScratch& scratch, std::vector<int32_t>& tokens) const = 0;
    virtual size_t bytes() const = 0;
    // Words up to this many bytes are encoded in little memory.
    virtual size_t longest_word() const { return SIZE_MAX; }
};

class Bpe final : public WordModel {
  public:
    bool by_bytes = true;       // start with one symbol per byte; else one per character
    bool whole_words = false;   // a word that is in the vocabulary becomes that token without merging
                                // ("ignore_merges")
    int unknown = -1;           // stands for what has no token; -1: leave that out
    bool fuse_unknown = false;  // one unknown token for several unknown characters in a row
    std::array<int32_t, 256> byte_tokens;  // -1: the byte has no token
    Merges merges;
    std::shared_ptr<const Vocabulary> vocabulary;  // to look up characters and whole words

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
        for (const Symbol& symbol : scratch.symbols)
            if (symbol.token >= 0) tokens.push_back(symbol.token);
    }

    size_t bytes() const override { return sizeof *this + merges.bytes(); }

  private:
    using Symbol = WordScratch::Symbol;

    void start_symbols(std::string_view word, std::vector<Symbol>& symbols) const {
        symbols.clear();
        const auto append = [&](int32_t token) {
            const auto at = static_cast<uint32_t>(symbols.size());
            symbols.push_back({token, at - 1, at + 1});
        };
        // Hugging Face's tokenizers append the unknown token only before a character that has a token of its
        // own, not before bytes.
        bool waits = false;
        const auto append_unknown = [&] {
            if (std::exchange(waits, false)) append(unknown);
        };
        while (!word.empty()) {
            const std::string_view unit = word.substr(0, by_bytes ? 1 : first_character(word).length);
            word.remove_prefix(unit.size());
            const auto byte_token = [&](char c) { return byte_tokens[static_cast<unsigned char>(c)]; };
            const auto has_none = [&](char c) { return byte_token(c) < 0; };
            const int32_t token = by_bytes ? byte_token(unit[0]) : vocabulary->find(unit);
            if (token >= 0) {
                append_unknown();
                append(token);
            } else if (!by_bytes && std::ranges::none_of(unit, has_none)) {
                for (const char c : unit) append(byte_token(c));
            } else if (unknown >= 0) {
                if (!fuse_unknown) append_unknown();
                waits = true;
            }
        }
        append_unknown();
    }

    // Joins the pair of lowest rank, leftmost first, until no pair has a merge. The queue may also have pairs
    // that have been joined with others by now; these are skipped.
    void join(WordScratch& scratch) const {
        std::vector<Symbol>& symbols = scratch.symbols;
        std::vector<uint64_t>& queue = scratch.queue;
        const auto merge_at = [&](size_t left) {
            const auto [token, previous, right] = symbols[left];
            const bool is_pair = token >= 0 && right < symbols.size();
            return is_pair ? merges.find(token, symbols[right].token) : nullptr;
        };
        // A pair's key: the rank of its merge in the upper half, the place of its left symbol in the lower.
        const auto add = [&](size_t left) {
            const Merge* const merge = merge_at(left);
            if (merge) queue.push_back(static_cast<uint64_t>(merge->rank) << 32 | left);
            return merge;
        };
        queue.clear();
        for (size_t left = 0; left < symbols.size(); left++) add(left);
        std::make_heap(queue.begin(), queue.end(), std::greater<>());
        while (!queue.empty()) {
            const uint64_t key = queue.front();
            std::pop_heap(queue.begin(), queue.end(), std::greater<>());
            queue.pop_back();
            const size_t left = key & UINT32_MAX;
            const Merge* const merge = merge_at(left);
            if (!merge || static_cast<uint64_t>(merge->rank) != key >> 32) continue;
            Symbol& joined = symbols[left];
            Symbol& right = symbols[joined.next];
            joined = {merge->token, joined.previous, right.next};
            right.token = -1;
            if (joined.next < symbols.size()) symbols[joined.next].previous = static_cast<uint32_t>(left);
            if (left > 0 && add(joined.previous))
                std::push_heap(queue.begin(), queue.end(), std::greater<>());
            if (add(left)) std::push_heap(queue.begin(), queue.end(), std::greater<>());
        }
    }
};

// The tokens of recent words. Its memory is bounded: when it is full, it forgets everything and starts again.
class WordCache {
  public:
    static constexpr size_t kLongestWord = 64, kMostWords = 16 << 10;

    // The tokens of a word if they are known, valid until the next put(); else null.
    const std::vector<int32_t>* find(std::string_view word) const {
        const auto known = tokens_.find(word);
        return known == tokens_.end() ? nullptr : &known->second;
    }
    // Remembers a word that is not in the cache yet, unless it is long.
    void put(std::string_view word, std::span<const int32_t> tokens) {
        if (word.size() > kLongestWord) return;
        if (tokens_.size() == kMostWords) tokens_.clear();
        tokens_.emplace(word, std::vector(tokens.begin(), tokens.end()));
    }

  private:
    struct Hash : std::hash<std::string_view> {
        using is_transparent = void;
    };
    std::unordered_map<std::string, std::vector<int32_t>, Hash, std::equal_to<>> tokens_;
};
