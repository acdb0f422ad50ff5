// drawn_text.h - a text that a model continues token by token: where it ends, how it is written so that a
// terminal is not controlled by it, and which token comes next.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/device.h"
#include "llmc/error.h"
#include "llmc/random.h"
#include "llmc/run_inputs.h"
#include "llmc/sample_token.h"
#include "llmc/tensor.h"
#include "llmc/utf8.h"

// ---- where a text ends

// A text that arrives in pieces and ends before the first of some stop strings. What may be the beginning of
// a stop string, or of a character, is held back until more is known.
class StoppedText {
  public:
    explicit StoppedText(std::vector<std::string> stops) : stops_(std::move(stops)) {}

    // The text that is certain with this piece.
    std::string add(std::string_view piece) {
        held_ += piece;
        size_t end = std::string::npos, held_back = unfinished_utf8(held_);
        for (const std::string& stop : stops_) {
            end = std::min(end, held_.find(stop));
            held_back = std::max(held_back, begun(stop));
        }
        stopped_ = end != std::string::npos;
        const size_t certain = stopped_ ? end : held_.size() - held_back;
        std::string text = held_.substr(0, certain);
        held_.erase(0, stopped_ ? std::string::npos : certain);
        return text;
    }
    // True if a stop string has come.
    bool stopped() const { return stopped_; }
    // What was held back, at the end of a text without a stop string.
    std::string finish() { return std::exchange(held_, {}); }

  private:
    // The length of the longest beginning of `stop` that the text ends with.
    size_t begun(const std::string& stop) const {
        for (size_t n = std::min(stop.size() - 1, held_.size()); n > 0; n--)
            if (std::string_view(held_).ends_with(std::string_view(stop).substr(0, n))) return n;
        return 0;
    }

    const std::vector<std::string> stops_;
    std::string held_;
    bool stopped_ = false;
};

// ---- writing text
//
// Writes a model's text. On a terminal, control characters are escaped, because the terminal would obey them;
// pipes and files get the bytes unchanged.

// Writes text to stdout piece by piece, without delay.
class TextOutput {
  public:
    void write(std::string_view bytes) {
        written_ += bytes;
        if (terminal_)
            put(text_.add(bytes));
        else
            put(bytes);
    }
    const std::string& written() const { return written_; }
    // Ends the text and writes what follows it.
    void finish(std::string_view ending) { put(text_.finish()), put(ending); }

  private:
    void put(std::string_view bytes) {
        fwrite(bytes.data(), 1, bytes.size(), stdout);
        fflush(stdout);
    }

    const bool terminal_ = isatty(STDOUT_FILENO) == 1;
    TerminalText text_;
    std::string written_;
};

// ---- drawing it

constexpr uint64_t kSampleStream = uint64_t{1} << 62;  // the part of random_bits()' counters that sampling
                                                       // uses

// Row `row` of logits (rows, V or more), which are on the device.
inline std::vector<float> logits_on_host(const TensorX& logits, int64_t row, int vocabulary, Stream stream) {
    std::vector<floatX> narrow(static_cast<size_t>(vocabulary));
    copy_to_host(narrow.data(), logits.at(row * logits.columns()), narrow.size() * sizeof(floatX), stream);
    std::vector<float> wide(narrow.size());
    for (size_t v = 0; v < wide.size(); v++) wide[v] = to_float(narrow[v]);
    return wide;
}

// Where the texts come from that a Decoding continues, and who chooses their tokens.
class TextSource {
  public:
    virtual ~TextSource() = default;
    // The tokens of the next text for a slot; nothing if there are no more.
    virtual std::optional<std::vector<int>> begin_text(int slot) = 0;
    // The token after these logits (V) in a slot; negative if the text ends here.
    virtual int next_token(int slot, std::vector<float> logits) = 0;
};

class DrawnText {
  public:
    // Continues `prompt` by at most `most` tokens. Token i uses random number (number, i). `begins`: the
    // tokens that are drawn begin a text. Without a tokenizer, tokens are written as numbers. explain() is
    // called before a logit that is not finite is reported; it fails if it knows the reason.
    DrawnText(const RunConfig& o, const RunInputs& in, std::vector<int> prompt, int64_t number, int most,
              bool begins, std::function<void()> explain)
        : o_(o),
          in_(in),
          tokens_(std::move(prompt)),
          number_(number),
          most_(most),
          explain_(std::move(explain)),
          stopped_(o.stops) {
        if (in.tokenizer) decoder_.emplace(*in.tokenizer, begins);
    }

    // Draws the next token from the logits after the last one. Returns -1 if the text ends here.
    int next(std::vector<float> logits) {
        check_finite(logits);
        penalize_repetition(logits, tokens_, o_.sampling.repetition_penalty);
        const double uniform = random_uniform(o_.seed, kSampleStream, static_cast<uint64_t>(number_),
                                              static_cast<uint64_t>(drawn_++));
        const int token = agree(sample_token(logits, o_.sampling, uniform));
        tokens_.push_back(token);
        ended_ = in_.ends_text(token);
        if (!ended_) {
            has_text_ = true;
            text_ += stopped_.add(decoder_ ? decoder_->next(token) : std::to_string(token) + " ");
            ended_ = stopped_.stopped();
        }
        ended_ = ended_ || drawn_ >= most_;
        return ended_ ? -1 : token;
    }
    // If several ranks draw the same text: takes the token that this rank has drawn, and returns the one that
    // the first rank has drawn, with which all go on.
    std::function<int(int)> agree = [](int token) { return token; };

    bool ended() const { return ended_; }
    int drawn() const { return drawn_; }
    // True if a token was drawn that does not end the text.
    bool has_text() const { return has_text_; }
    // The prompt and the tokens drawn so far.
    const std::vector<int>& tokens() const { return tokens_; }
    // What can be shown since the last call; at the end of the text, all of it.
    std::string take() { return std::exchange(text_, {}); }
    std::string take_all() {
        if (!stopped_.stopped()) text_ += stopped_.finish();
        return take();
    }

  private:
    void check_finite(const std::vector<float>& logits) const {
        for (const float logit : logits) {
            if (std::isfinite(logit)) continue;
            explain_();
            const std::string step = o_.steps > 0 ? format("step %ld: ", number_) : std::string();
            fail("%sa logit of the sample is %g", step, double{logit});
        }
    }

    const RunConfig& o_;
    const RunInputs& in_;
    std::vector<int> tokens_;
    int64_t number_;
    int most_, drawn_ = 0;
    std::function<void()> explain_;
    bool ended_ = false, has_text_ = false;
    std::string text_;
    StoppedText stopped_;
    std::optional<Tokenizer::Decoder> decoder_;
};
