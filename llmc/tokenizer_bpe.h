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
#include <optional>
#include <span>
#include <string>
#include <string_view>
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

// The symbols of a word in one array, which has one entry for each symbol that the word starts with. The
// first entry of a symbol is its token. A symbol that was joined from n others covers n entries: its second
// and its last entry are -n, and those between are negative too.
class SymbolRow {
  public:
    void clear() { places_.clear(); }
    void reserve(size_t count) { places_.reserve(count); }
    void append(int32_t token) { places_.push_back(token); }
    size_t size() const { return places_.size(); }

    // True if a symbol begins at this entry.
    bool begins(size_t at) const { return places_[at] >= 0; }
    // The token of the symbol that begins at `at`, and the entry where the next symbol begins.
    int32_t token(size_t at) const { return places_[at]; }
    size_t next(size_t at) const {
        const bool joined = at + 1 < places_.size() && places_[at + 1] < 0;
        return at + (joined ? static_cast<size_t>(-places_[at + 1]) : 1);
    }
    // The entry where the symbol before `at` begins; `at` is not 0.
    size_t previous(size_t at) const {
        const int32_t last = places_[at - 1];
        return at - (last < 0 ? static_cast<size_t>(-last) : 1);
    }
    // Joins the symbol at `left` with its right neighbour, which begins at `right`.
    void join(size_t left, size_t right, int32_t token) {
        const size_t end = next(right);
        const auto count = static_cast<int32_t>(end - left);
        places_[right] = -1;
        places_[left] = token;
        places_[left + 1] = places_[end - 1] = -count;
    }

  private:
    std::vector<int32_t> places_;
};

// Buffers for encoding a word, reused from word to word.
struct WordScratch {
    SymbolRow symbols;
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
        const SymbolRow& symbols = scratch.symbols;
        for (size_t at = 0; at < symbols.size(); at = symbols.next(at)) tokens.push_back(symbols.token(at));
    }

    size_t bytes() const override { return sizeof *this + merges.bytes(); }

  private:
    // find_pairs() keeps this many pairs in the queue, which may grow to twice as many.
    static constexpr size_t kQueued = 64 << 10;
    static constexpr uint64_t kNoMerge = UINT64_MAX;

    void start_symbols(std::string_view word, SymbolRow& symbols) const {
        symbols.clear();
        symbols.reserve(word.size());
        // Hugging Face's tokenizers append the unknown token only before a character that has a token of its
        // own, not before bytes.
        bool waits = false;
        const auto append_unknown = [&] {
            if (std::exchange(waits, false)) symbols.append(unknown);
        };
        while (!word.empty()) {
            const std::string_view unit = word.substr(0, by_bytes ? 1 : first_character(word).length);
            word.remove_prefix(unit.size());
            const auto byte_token = [&](char c) { return byte_tokens[static_cast<unsigned char>(c)]; };
            const auto has_none = [&](char c) { return byte_token(c) < 0; };
            const int32_t token = by_bytes ? byte_token(unit[0]) : vocabulary->find(unit);
            if (token >= 0) {
                append_unknown();
                symbols.append(token);
            } else if (!by_bytes && std::none_of(unit.begin(), unit.end(), has_none)) {
                for (const char c : unit) symbols.append(byte_token(c));
            } else if (unknown >= 0) {
                if (!fuse_unknown) append_unknown();
                waits = true;
            }
        }
        append_unknown();
    }

    // The merge of the symbol that begins at `left` with the next one; null if there is none.
    const Merge* merge_at(const SymbolRow& symbols, size_t left) const {
        if (!symbols.begins(left)) return nullptr;
        const size_t right = symbols.next(left);
        if (right >= symbols.size()) return nullptr;
        return merges.find(symbols.token(left), symbols.token(right));
    }
    // The queue's key of a pair: the rank of its merge in the upper half, the start of its left symbol in the
    // lower.
    static uint64_t key_of(const Merge* merge, size_t left) {
        return merge ? static_cast<uint64_t>(merge->rank) << 32 | left : kNoMerge;
    }

    // Fills the queue with the smallest keys of all pairs. Returns a bound: the queue has all keys below it.
    uint64_t find_pairs(const SymbolRow& symbols, std::vector<uint64_t>& queue) const {
        uint64_t bound = kNoMerge;
        queue.clear();
        for (size_t left = 0; left < symbols.size(); left = symbols.next(left)) {
            const uint64_t key = key_of(merge_at(symbols, left), left);
            if (key >= bound) continue;
            queue.push_back(key);
            if (queue.size() < 2 * kQueued) continue;
            std::nth_element(queue.begin(), queue.begin() + kQueued, queue.end());
            bound = queue[kQueued];
            queue.resize(kQueued);
        }
        std::make_heap(queue.begin(), queue.end(), std::greater<>());
        return bound;
    }

    // Joins the pair of lowest rank, leftmost first, until no pair has a merge. The queue has all keys below
    // a bound. It may also have keys of pairs that have been joined with others or have another rank by now;
    // these are skipped. When the queue is empty or too long, find_pairs() fills it again, so it stays short
    // however long the word is.
    void join(WordScratch& scratch) const {
        SymbolRow& symbols = scratch.symbols;
        std::vector<uint64_t>& queue = scratch.queue;
        uint64_t bound = 0;
        const auto consider = [&](size_t left) {
            const uint64_t key = key_of(merge_at(symbols, left), left);
            if (key >= bound) return;
            queue.push_back(key);
            std::push_heap(queue.begin(), queue.end(), std::greater<>());
        };
        while (bound != kNoMerge) {
            bound = find_pairs(symbols, queue);
            while (!queue.empty()) {
                const uint64_t key = queue.front();
                std::pop_heap(queue.begin(), queue.end(), std::greater<>());
                queue.pop_back();
                const size_t left = key & UINT32_MAX;
                const Merge* merge = merge_at(symbols, left);
                if (key_of(merge, left) != key) continue;
                symbols.join(left, symbols.next(left), merge->token);
                if (left > 0) consider(symbols.previous(left));
                consider(left);
                if (queue.size() < 2 * kQueued) continue;
                bound = 0;  // search the pairs again
                break;
            }
        }
    }
};

// The tokens of recent words. Its memory is bounded: when it is full, it forgets everything and starts again.
class WordCache {
  public:
    static constexpr size_t kLongestWord = 64, kMostWords = 48 << 10, kMostBytes = 2 << 20;

    // The tokens of a word if they are known, valid until the next put().
    std::optional<std::span<const int32_t>> find(std::string_view word) const {
        if (places_.empty()) return std::nullopt;
        const Place& place = places_[find_place(word)];
        if (place.length == 0) return std::nullopt;
        return std::span(tokens_).subspan(place.tokens, place.count);
    }

    // Remembers a word that is not in the cache yet, unless it is long.
    void put(std::string_view word, std::span<const int32_t> tokens) {
        if (word.empty() || word.size() > kLongestWord || tokens.size() > UINT16_MAX) return;
        if (words_ == kMostWords || text_.size() + sizeof tokens_[0] * tokens_.size() > kMostBytes) {
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
        uint16_t length = 0, count = 0;  // length 0: this entry is free
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
