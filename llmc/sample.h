// sample.h - draws one sample of a model, token by token, and writes its text as it is drawn.
#pragma once

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "llmc/random.h"
#include "llmc/run_inputs.h"
#include "llmc/sampler.h"
#include "llmc/terminal.h"

constexpr uint64_t kSampleStream = uint64_t{1} << 62;  // the part of random_bits()' counters that sampling
                                                       // uses

class Sample {
  public:
    // Writes the prompt. Without a tokenizer, tokens are written as numbers. Token i of the sample after
    // `step` steps uses random number (step, i).
    Sample(const Options& o, const RunInputs& in, int64_t step)
        : o_(o), in_(in), tokens_(in.first_tokens()), step_(step) {
        if (o.steps > 0) printf("--- sample after %lld steps ---\n", static_cast<long long>(step));
        output_.write(o.prompt);
        if (in.tokenizer) decoder_.emplace(*in.tokenizer, o.prompt.empty());
    }

    // Draws the next token from the logits after the last one. Returns -1 if the sample ends here.
    int next(const std::vector<float>& logits) {
        const double uniform = random_uniform(o_.seed, kSampleStream, static_cast<uint64_t>(step_),
                                              static_cast<uint64_t>(drawn_++));
        const int token = sample_token(logits, o_.temperature, o_.top_k, uniform);
        if (in_.ends_text(token))
            drawn_ = o_.sample_tokens;
        else
            output_.write(decoder_ ? decoder_->next(token) : std::to_string(token) + " ");
        tokens_.push_back(token);
        return ended() ? -1 : token;
    }
    bool ended() const { return drawn_ >= o_.sample_tokens; }
    // The prompt and the tokens drawn so far.
    const std::vector<int>& tokens() const { return tokens_; }

    void finish() { output_.finish(o_.steps > 0 ? "\n---\n" : "\n"); }

  private:
    const Options& o_;
    const RunInputs& in_;
    std::vector<int> tokens_;
    int64_t step_;
    int drawn_ = 0;
    TextOutput output_{stdout};
    std::optional<Tokenizer::Decoder> decoder_;
};
