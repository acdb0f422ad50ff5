// tokenizer_encoder.h - the steps of a tokenizer, and the encoder that applies them: finds added tokens,
// normalizes the text between them, splits it into words, turns each word into tokens. The readers of
// tokenizer files (tokenizer_json.h, tokenizer_sentencepiece.h, tokenizer_gguf.h) make the steps; tokenizer.h
// is what others use.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/tokenizer.h"
#include "llmc/tokenizer_bpe.h"
#include "llmc/tokenizer_pretokenizer.h"
#include "llmc/tokenizer_vocabulary.h"
#include "llmc/utf8.h"

// The steps that the encoder applies.
struct TextSteps {
    AddedTokens added[2];              // looked for in the original text, and in normalized text
    Normalizer normalizers[2];         // applied to the text between them
    std::vector<TextSplit> splits;     // each splits the pieces that the one before it made
    std::unique_ptr<WordModel> words;  // turns the last pieces into tokens
    // Tells where pieces may be cut into words; without it they may not be cut. Unless knows_all (all
    // characters have tokens), no cut is made next to a character without a token.
    std::optional<Joints> joints;
    bool knows_all = false;
    std::array<int32_t, 256> byte_tokens;  // for bytes that are not UTF-8; -1: none
    int unknown = -1;                      // for those without a token; -1: leave them out
    std::shared_ptr<Vocabulary> vocabulary;

    TextSteps() { byte_tokens.fill(-1); }

    // The most bytes that normalizing makes of one byte of text.
    size_t longest_replacement() const {
        return normalizers[0].longest_replacement() * normalizers[1].longest_replacement();
    }

    // The memory that all of this takes.
    size_t bytes() const {
        size_t sum = sizeof *this + added[0].bytes() + added[1].bytes() + vocabulary->bytes();
        for (const TextSplit& split : splits) sum += sizeof split + split.pattern.bytes();
        return sum + (joints ? joints->bytes() : 0) + (words ? words->bytes() : 0);
    }
};

// How tokens are turned back into text.
struct DecodingRules {
    bool space_symbol = false;         // U+2581 in a token means a space
    bool byte_tokens = false;          // a token "<0x0A>" means that byte
    size_t strips_spaces = 0;          // remove this many spaces at the start of a text,
    bool strips_symbols = false;       // or every U+2581 in its first token
    std::map<int, std::string> texts;  // of tokens whose text differs from their spelling
};

// A tokenizer, as its files describe it.
struct TokenizerParts {
    TextSteps steps;
    DecodingRules decoding;
    std::vector<bool> special;           // by token: true if it is a special token, not text
    std::vector<int32_t> before, after;  // special tokens added around a text on request
};

// ---- the encoder
//
// A text of any size is processed in parts. Each step takes from the front of its input only what later text
// cannot change, returns how much it took, and gets the rest again with more text after it. So the tokens are
// those of the whole text, and memory is bounded by a part and the longest word. Text that would take more
// memory is refused; it is never cut where that could change its tokens.

// The longest piece of text, in bytes, that the tokenizer may leave undivided. The memory to encode a piece
// is proportional to its length: at most about 40 bytes per byte.
inline constexpr size_t kLongestPiece = 256 << 10;

// Encodes one text after the other. A text may arrive in parts: feed() and finish() append the same tokens as
// encode() of the whole text. Keeps a reference to the steps, which must outlive it.
class TextEncoder {
  public:
    // A text with a piece longer than `longest_piece` is refused, naming the byte.
    explicit TextEncoder(const TextSteps& steps, Spellings spellings = Spellings::Special,
                         size_t longest_piece = kLongestPiece)
        : steps_(steps),
          spellings_(spellings),
          longest_piece_(longest_piece),
          block_(kBlock / steps.longest_replacement()) {}

    // Appends the tokens of a text's next part, as far as no later part can change them. A part may end
    // anywhere, even inside a character.
    void feed(std::string_view part, std::vector<int32_t>& tokens) {
        waiting_ += part;
        if (waiting_.size() < retry_) return;
        const size_t done = take(waiting_, true, tokens);
        waiting_.erase(0, done);
        taken_ += done;
        raw_ = waiting_;
        refuse_longer(waiting_);
        retry_ = done > 0 ? 0 : 2 * waiting_.size();
    }

    // Appends the tokens of the rest of the text. The next part belongs to a new text.
    void finish(std::vector<int32_t>& tokens) {
        take(waiting_, false, tokens);
        segments_ = {};
        waiting_.clear();
        retry_ = taken_ = 0;
    }

    // Appends the tokens of a whole text.
    void encode(std::string_view text, std::vector<int32_t>& tokens) {
        segments_ = {};  // left over from a text that was refused
        take(text, false, tokens);
        segments_ = {};
    }

  private:
    static constexpr size_t kBlock = 1 << 16;  // most bytes that one block of text has after normalization

    // The state of a stretch of text between two added tokens, for each of the two steps that find those.
    struct Segment {
        std::string normalized;   // normalized text that the next step has not taken yet
        size_t retry = 0;         // length from which the next step is tried again
        bool begun = false;       // some of the text has been normalized
        size_t searched = 0;      // this many bytes of the rest have no added tokens
        bool after_word = false;  // what was taken so far ends with a letter
        bool at_origin = true;    // nothing came before this text
        bool continues = false;   // a byte that is not UTF-8 came directly before it
    };

    // A byte that is not UTF-8 becomes its own token; the text after it continues as if the byte were not
    // there.
    size_t take(std::string_view text, bool more, std::vector<int32_t>& tokens) {
        tokens_ = &tokens;
        raw_ = text;
        normalized_ = 0;
        size_t at = 0;
        for (;;) {
            const std::string_view rest = text.substr(at);
            const size_t valid = valid_utf8(rest);
            if (valid == rest.size() || (more && rest.size() - valid == unfinished_utf8(rest)))
                return at + find_added(0, rest.substr(0, valid), more);
            find_added(0, rest.substr(0, valid), false);
            const int32_t token = steps_.byte_tokens[static_cast<unsigned char>(rest[valid])];
            emit(token >= 0 ? token : steps_.unknown, true);
            at += valid + 1;
        }
    }

    void emit(int32_t token, bool text_continues) {
        if (token >= 0) tokens_->push_back(token);
        for (Segment& segment : segments_) segment.at_origin = false, segment.continues = text_continues;
    }

    size_t find_added(size_t stage, std::string_view text, bool more) {
        const AddedTokens& added = steps_.added[stage];
        if (added.empty()) return normalize(stage, text, more);
        Segment& segment = segments_[stage];
        for (size_t at = 0;;) {
            const auto found = added.find(text, at, segment.searched, more, segment.after_word, spellings_);
            const std::string_view between = text.substr(at, found.text - at);
            if (!found.match) {
                at += normalize(stage, between, more);
                segment.searched = more ? found.searched - at : 0;
                if (at > 0) segment.after_word = AddedTokens::ends_with_word(text.substr(0, at));
                if (!more) segment.after_word = false;
                return at;
            }
            normalize(stage, between, false);
            emit(found.match->token, false);
            at = found.match->end;
        }
    }

    size_t normalize(size_t stage, std::string_view text, bool more) {
        const Normalizer& normalizer = steps_.normalizers[stage];
        const auto next = [&](std::string_view part, bool follows) {
            return stage == 0 ? find_added(1, part, follows) : split(0, part, follows);
        };
        if (normalizer.empty()) return next(text, more);
        Segment& segment = segments_[stage];
        for (size_t at = 0;;) {
            const std::string_view rest = text.substr(at);
            const size_t cut = normalizer.cut(rest, std::max(block_, segment.normalized.size()), more);
            if (cut > 0) {
                const bool begins = !segment.begun && !segment.continues;
                normalizer.append(rest.substr(0, cut), begins, segment.at_origin, segment.normalized);
                segment.begun = true;
                segment.at_origin = segment.continues = false;
            }
            at += cut;
            if (is_in(rest, raw_)) normalized_ = static_cast<size_t>(text.data() + at - raw_.data());
            const bool ends = !more && at == text.size();
            if (ends || segment.normalized.size() >= segment.retry) {
                const size_t done = next(segment.normalized, !ends);
                segment.normalized.erase(0, done);
                refuse_longer(segment.normalized);
                segment.retry = done > 0 ? 0 : 2 * segment.normalized.size();
            }
            if (ends) segment.begun = false;
            if (cut == 0 || at == text.size()) return at;
        }
    }

    size_t split(size_t stage, std::string_view text, bool more) {
        if (stage == steps_.splits.size()) return cut_words(text, more);
        const auto& [pattern, keeps_matches, keeps_rest] = steps_.splits[stage];
        size_t at = 0;
        while (at < text.size()) {
            const auto [kind, begin, end] = pattern.find(text, at, more, match_.get());
            const std::string_view between = text.substr(at, begin - at);
            if (kind != Pattern::Found::kMatch)
                return at + (keeps_rest ? split(stage + 1, between, more) : between.size());
            refuse_longer(text.substr(begin, end - begin));
            if (keeps_rest) split(stage + 1, between, false);
            if (keeps_matches) split(stage + 1, text.substr(begin, end - begin), false);
            at = end;
        }
        return at;
    }

    size_t cut_words(std::string_view text, bool more) {
        size_t start = 0;
        if (steps_.joints && !text.empty()) {
            Character left = first_character(text);
            for (size_t at = left.length; at < text.size();) {
                const Character right = first_character(text.substr(at));
                if (!steps_.joints->joins(left.code, right.code) &&
                    knows(text.substr(at - left.length), left) && knows(text.substr(at), right)) {
                    encode_word(text.substr(start, at - start));
                    start = at;
                }
                at += right.length;
                left = right;
            }
        }
        if (more) return start;
        encode_word(text.substr(start));
        return text.size();
    }

    bool knows(std::string_view text, Character character) const {
        return steps_.knows_all || steps_.vocabulary->find(text.substr(0, character.length)) >= 0;
    }

    void encode_word(std::string_view word) {
        if (word.empty()) return;
        if (const std::vector<int32_t>* const known = cache_.find(word)) {
            tokens_->insert(tokens_->end(), known->begin(), known->end());
            return;
        }
        refuse_longer(word, steps_.words->longest_word());
        const size_t before = tokens_->size();
        steps_.words->encode(word, scratch_, *tokens_);
        cache_.put(word, std::span(*tokens_).subspan(before));
    }

    static bool is_in(std::string_view part, std::string_view whole) {
        const std::less_equal<> not_behind;
        return not_behind(whole.data(), part.data()) && not_behind(part.data(), whole.data() + whole.size());
    }

    // The position of a piece in the text; for normalized text an estimate.
    uint64_t position_of(std::string_view piece) const {
        if (is_in(piece, raw_)) return taken_ + static_cast<size_t>(piece.data() - raw_.data());
        size_t behind = 0;  // bytes of normalized text after the piece's start
        for (const Segment& segment : segments_)
            if (is_in(piece, segment.normalized))
                behind =
                    segment.normalized.size() - static_cast<size_t>(piece.data() - segment.normalized.data());
        return taken_ + normalized_ - std::min<uint64_t>(taken_ + normalized_, behind);
    }

    // Fails if a piece is too long.
    void refuse_longer(std::string_view piece, size_t longest = SIZE_MAX) const {
        longest = std::min(longest, longest_piece_);
        if (piece.size() <= longest) return;
        fail(
            "near byte %lu a piece of more than %zu KiB begins that the tokenizer does not divide into "
            "words; "
            "spaces or line ends in it let it do so",
            position_of(piece), longest >> 10);
    }

    const TextSteps& steps_;
    const Spellings spellings_;
    const size_t longest_piece_, block_;
    std::string waiting_;    // the part of the text that has not been taken yet
    uint64_t taken_ = 0;     // how many bytes of the text were taken before it
    size_t retry_ = 0;       // length of waiting_ from which take() is tried again
    std::string_view raw_;   // the text that take() works on, and
    size_t normalized_ = 0;  // how many bytes of it have been normalized
    std::array<Segment, 2> segments_;
    WordCache cache_;
    WordScratch scratch_;
    Pattern::Match match_ = Pattern::make_match();
    std::vector<int32_t>* tokens_ = nullptr;  // the output of the current call
};
