// text_encoder.h - the way from text to tokens, as Hugging Face's tokenizers go it: added tokens are found,
// the text between them is normalized, added tokens are found in that, what is left is split into words, and
// each word becomes tokens.
//
// A text of any size passes through in parts. Each step takes as much from the front of what it is given as
// no later text can change, says how much that was, and is given the rest again with more behind it. So the
// tokens are those of the whole text, and memory is bounded: a part, and the longest word.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/added_tokens.h"
#include "llmc/bpe.h"
#include "llmc/normalizer.h"
#include "llmc/pretokenizer.h"
#include "llmc/tokenizer_parts.h"
#include "llmc/utf8.h"

// Encodes one text after the other. It refers to the steps, which must live as long.
class TextEncoder {
  public:
    // Without `specials` a mark like <s> that stands in a text is text.
    explicit TextEncoder(const TextSteps& steps, bool specials = true) : steps_(steps), specials_(specials) {}

    // Appends the tokens of a text's next part, as far as no later part can change them. Parts may end
    // anywhere.
    void feed(std::string_view part, std::vector<int32_t>& tokens) {
        waiting_ += part;
        if (waiting_.size() < retry_) return;
        const size_t done = take(waiting_, true, tokens);
        waiting_.erase(0, done);
        retry_ = done > 0 ? 0 : 2 * waiting_.size();
    }

    // Appends the tokens of the rest. The next part is of another text.
    void finish(std::vector<int32_t>& tokens) {
        encode(waiting_, tokens);
        waiting_.clear();
        retry_ = 0;
    }

    // Appends the tokens of a whole text.
    void encode(std::string_view text, std::vector<int32_t>& tokens) {
        take(text, false, tokens);
        segments_ = {};
    }

  private:
    static constexpr size_t kBlock = 1 << 16;  // bytes that are normalized at a time

    // Where a text without added tokens between stands, at each of the two steps that find them.
    struct Segment {
        std::string normalized;   // and not taken by the next step yet
        size_t retry = 0;         // how long it must be before that is tried again
        bool begun = false;       // whether some of it was normalized
        size_t searched = 0;      // so much of the rest has no added tokens
        bool after_word = false;  // whether what was taken of it ends with a letter
        bool at_origin = true;    // whether nothing came before it
        bool continues = false;   // whether a byte that is not UTF-8 did
    };

    // Bytes that are not UTF-8 become their own tokens; behind them the text goes on as if nothing had been.
    size_t take(std::string_view text, bool more, std::vector<int32_t>& tokens) {
        tokens_ = &tokens;
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
            const auto found = added.find(text, at, segment.searched, more, segment.after_word, specials_);
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
            const size_t cut = normalizer.cut(rest, std::max(kBlock, segment.normalized.size()), more);
            if (cut > 0) {
                const bool begins = !segment.begun && !segment.continues;
                normalizer.append(rest.substr(0, cut), begins, segment.at_origin, segment.normalized);
                segment.begun = true;
                segment.at_origin = segment.continues = false;
            }
            at += cut;
            const bool ends = !more && at == text.size();
            if (ends || segment.normalized.size() >= segment.retry) {
                const size_t done = next(segment.normalized, !ends);
                segment.normalized.erase(0, done);
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
        if (const auto known = cache_.find(word)) {
            tokens_->insert(tokens_->end(), known->begin(), known->end());
            return;
        }
        const size_t before = tokens_->size();
        steps_.words->encode(word, scratch_, *tokens_);
        cache_.put(word, std::span(*tokens_).subspan(before));
    }

    const TextSteps& steps_;
    const bool specials_;
    std::string waiting_;  // of a text that comes in parts
    size_t retry_ = 0;     // how much there must be before it is tried again
    std::array<Segment, 2> segments_;
    WordCache cache_;
    WordScratch scratch_;
    Pattern::Match match_ = Pattern::make_match();
    std::vector<int32_t>* tokens_ = nullptr;  // where tokens go now
};
