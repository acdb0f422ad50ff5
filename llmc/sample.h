// sample.h - draws one sample of a model, token by token, and writes its text as it is drawn.
#pragma once

#include <cmath>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/precision.h"
#include "llmc/random.h"
#include "llmc/run_inputs.h"
#include "llmc/sampler.h"
#include "llmc/terminal.h"

constexpr uint64_t kSampleStream = uint64_t{1} << 62;  // the part of random_bits()' counters that sampling
                                                       // uses

class Sample {
  public:
    // Writes the prompt. Without a tokenizer, tokens are written as numbers. Token i of the sample after
    // `step` steps uses random number (step, i). explain() is called before a logit that is not finite is
    // reported; it fails if it knows the reason.
    Sample(const Options& o, const RunInputs& in, int64_t step, std::function<void()> explain)
        : o_(o), in_(in), tokens_(in.first_tokens()), step_(step), explain_(std::move(explain)) {
        if (o.steps > 0) printf("--- sample after %lld steps ---\n", static_cast<long long>(step));
        output_.write(o.prompt);
        if (in.tokenizer) decoder_.emplace(*in.tokenizer, o.prompt.empty());
    }

    // Draws the next token from the logits (1, V) after the last one, which are on the device. Returns -1 if
    // the sample ends here.
    int next(const TensorX& device_logits, Stream stream) {
        std::vector<floatX> narrow(static_cast<size_t>(in_.config.vocabulary));
        copy_to_host(narrow.data(), device_logits.data(), narrow.size() * sizeof(floatX), stream);
        std::vector<float> logits(narrow.size());
        for (size_t v = 0; v < logits.size(); v++) logits[v] = to_float(narrow[v]);
        check_finite(logits);
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
    void check_finite(const std::vector<float>& logits) const {
        for (const float logit : logits) {
            if (std::isfinite(logit)) continue;
            explain_();
            const std::string step =
                o_.steps > 0 ? format("step %lld: ", static_cast<long long>(step_)) : std::string();
            fail("%sa logit of the sample is %g", step.c_str(), double{logit});
        }
    }

    const Options& o_;
    const RunInputs& in_;
    std::vector<int> tokens_;
    int64_t step_;
    std::function<void()> explain_;
    int drawn_ = 0;
    TextOutput output_{stdout};
    std::optional<Tokenizer::Decoder> decoder_;
};
