// sample.h - samples of a model's text: chooses the next token from the logits, writes the text as it is
// drawn, and continues a prompt token by token with a KV cache. Sampler does all of it for a run.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/embedding_and_head.h"
#include "llmc/error.h"
#include "llmc/random.h"
#include "llmc/run_inputs.h"
#include "llmc/sequence_keys.h"
#include "llmc/signals.h"
#include "llmc/tensor.h"

// ---- the next token

// Draws an index from softmax(logits / temperature) over the top_k likeliest (0: all), with the random number
// `uniform` in [0, 1). Temperature 0 gives the likeliest. Of equal logits the lower index counts as likelier.
inline int sample_token(const std::vector<float>& logits, double temperature, int top_k, double uniform) {
    std::vector<int> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    const auto likelier = [&](int a, int b) {
        const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
        return x != y ? x > y : a < b;
    };
    size_t kept = top_k > 0 ? std::min<size_t>(static_cast<size_t>(top_k), order.size()) : order.size();
    if (temperature <= 0) kept = 1;
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                      likelier);
    if (kept == 1) return order[0];
    std::vector<double> weights(kept);
    const double most = logits[static_cast<size_t>(order[0])];
    double total = 0;
    for (size_t i = 0; i < kept; i++)
        total += weights[i] = std::exp((logits[static_cast<size_t>(order[i])] - most) / temperature);
    double left = uniform * total;
    for (size_t i = 0; i < kept; i++)
        if ((left -= weights[i]) < 0) return order[i];
    return order[kept - 1];
}

// ---- writing text
//
// Writes a model's text. On a terminal, control characters are escaped, because the terminal would obey them;
// pipes and files get the bytes unchanged.

// The number of bytes of the first character in a text, by the table of well-formed UTF-8 (Unicode 15.0,
// table 3-7); 0 if more bytes are needed to tell, -1 if the first byte begins no character.
inline int whole_character(std::string_view text) {
    if (text.empty()) return 0;
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
    const int lead = byte(0), count = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (count > 1 && (lead < 0xc2 || lead > 0xf4)) return -1;
    for (size_t i = 1; i < static_cast<size_t>(count); i++) {
        if (i == text.size()) return 0;
        int low = 0x80, high = 0xbf;
        if (i == 1 && lead == 0xe0) low = 0xa0;  // not longer than necessary
        if (i == 1 && lead == 0xf0) low = 0x90;
        if (i == 1 && lead == 0xed) high = 0x9f;  // no surrogates
        if (i == 1 && lead == 0xf4) high = 0x8f;  // up to U+10FFFF
        if (byte(i) < low || byte(i) > high) return -1;
    }
    return count;
}

// Escapes bytes that arrive in pieces for a terminal: each byte of a control character (except newline and
// tab) and each byte that is not UTF-8 becomes \x1b or the like. Other characters stay as they are.
class TerminalText {
  public:
    // What can be shown so far. The start of an incomplete character is held back until the rest arrives.
    std::string add(std::string_view bytes) {
        held_ += bytes;
        std::string shown;
        size_t at = 0;
        while (const int count = whole_character(std::string_view(held_).substr(at))) {
            const auto character =
                std::string_view(held_).substr(at, static_cast<size_t>(std::max(count, 1)));
            shown += count < 0 || is_control(character) ? escaped(character) : character;
            at += character.size();
        }
        held_.erase(0, at);
        return shown;
    }
    // The escaped bytes of a character that stayed incomplete.
    std::string finish() { return escaped(std::exchange(held_, {})); }

  private:
    static bool is_control(std::string_view character) {
        const unsigned char first = static_cast<unsigned char>(character[0]);
        if (character.size() == 1) return (first < 0x20 && first != '\n' && first != '\t') || first == 0x7f;
        return first == 0xc2 && static_cast<unsigned char>(character[1]) < 0xa0;  // U+0080 to U+009F
    }
    static std::string escaped(std::string_view bytes) {
        std::string text;
        for (const char c : bytes) text += format("\\x%02x", static_cast<unsigned>(c) & 0xff);
        return text;
    }

    std::string held_;
};

// Writes text to a file piece by piece, without delay.
class TextOutput {
  public:
    explicit TextOutput(FILE* to) : to_(to), terminal_(isatty(fileno(to)) == 1) {}
    void write(std::string_view bytes) {
        if (terminal_)
            put(text_.add(bytes));
        else
            put(bytes);
    }
    // Ends the text and writes what follows it.
    void finish(std::string_view ending) { put(text_.finish()), put(ending); }

  private:
    void put(std::string_view bytes) {
        fwrite(bytes.data(), 1, bytes.size(), to_);
        fflush(to_);
    }

    FILE* to_;
    bool terminal_;
    TerminalText text_;
};

// ---- a sample

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
            wrote_ = true, output_.write(decoder_ ? decoder_->next(token) : std::to_string(token) + " ");
        tokens_.push_back(token);
        return ended() ? -1 : token;
    }
    bool ended() const { return drawn_ >= o_.sample_tokens; }
    // The prompt and the tokens drawn so far.
    const std::vector<int>& tokens() const { return tokens_; }

    void finish() {
        output_.finish(o_.steps > 0 ? "\n---\n" : "\n");
        if (wrote_ || o_.steps > 0 || !ended()) return;
        fprintf(stderr,
                "the model ended its text at once; a model of chats needs the tokens of its chat format in "
                "--prompt (dev/guide/data.md)\n");
    }

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
    bool wrote_ = false;  // a token after the prompt
    TextOutput output_{stdout};
    std::optional<Tokenizer::Decoder> decoder_;
};

// ---- a prompt's continuation
//
// Keys and values of the tokens so far are in a KV cache, so that each new token runs one row through the
// model. The functions are templates, so that any model can be used that has
//     TensorX forward_only(const Tensor<int>& tokens, const Rows&, KvCache*)   the last block's output
//     TensorX last_logits(const TensorX& x)                                    (1, V), of the last row of x
//     int64_t prompt_len()                                                     vectors of a soft prompt

// Runs `tokens`, which follow those in the cache, and adds them to it. Returns the last block's output.
template <class Model>
TensorX append_tokens(Arena& arena, Stream stream, Model& model, const std::vector<int>& tokens,
                      KvCache& cache) {
    const Tensor<int> inputs = tokens_on_device(arena, stream, tokens);
    TensorX x = model.forward_only(inputs, {}, &cache);
    cache.length += static_cast<int>(x.rows());
    return x;
}

// As append_tokens(), but returns the logits (1, V) after the last token.
template <class Model>
TensorX logits_after(Arena& arena, Stream stream, Model& model, const std::vector<int>& tokens,
                     KvCache& cache) {
    return model.last_logits(append_tokens(arena, stream, model, tokens, cache));
}

// A long prompt runs in parts of this many tokens, so that it needs little memory besides its keys and
// values. The last part takes the remainder too, so that no part is too short for the usual matrix products.
constexpr int64_t kPromptRows = 2048;

// Runs a prompt from its first token, part by part. Returns the logits (1, V) after its last token.
template <class Model>
TensorX logits_after_prompt(Arena& arena, Stream stream, Model& model, const std::vector<int>& tokens,
                            KvCache& cache) {
    const int64_t parts = static_cast<int64_t>(tokens.size()) / kPromptRows;
    if (parts < 2) return logits_after(arena, stream, model, tokens, cache);
    auto next = tokens.begin();
    const auto append = [&] {
        append_tokens(arena, stream, model, {next, next + kPromptRows}, cache);
        next += kPromptRows;
        return true;
    };
    append();  // a soft prompt stands before this part
    arena.repeat(static_cast<int>(parts - 2), append);
    next = tokens.begin() + (parts - 1) * kPromptRows;
    if (arena.rehearsing()) cache.length = static_cast<int>(model.prompt_len() + (parts - 1) * kPromptRows);
    return logits_after(arena, stream, model, {next, tokens.end()}, cache);
}

// Continues a prompt of at least one token by at most new_tokens tokens. choose(logits) reads the logits (1,
// V) and returns the next token, or a negative number to stop.
template <class Model, class Choose>
void generate(Arena& arena, Stream stream, const ModelConfig& config, Model& model,
              const std::vector<int>& prompt, int new_tokens, Choose&& choose) {
    Range range("generate");
    KvCache cache;
    const int64_t positions = model.prompt_len() + static_cast<int64_t>(prompt.size()) + new_tokens;
    for (int l = 0; l < config.layers; l++)
        cache.layers.push_back(arena.take<floatX>("kv_cache", {positions, 2 * config.kv_width()}));
    std::vector<int> next = {choose(logits_after_prompt(arena, stream, model, prompt, cache))};
    arena.repeat(new_tokens - 1, [&] {
        // A dry run executes the last turn, which has the most keys.
        if (arena.rehearsing()) cache.length = static_cast<int>(positions) - 2;
        if (next[0] >= 0) next = {choose(logits_after(arena, stream, model, next, cache))};
        return next[0] >= 0;
    });
}

// ---- the samples of a run

// Draws samples of a model in memory that was planned for them. A sample that is longer than the model's
// window goes on from the latest half of it. Model as for generate().
template <class Model>
class Sampler {
  public:
    Sampler(const Options& o, const RunInputs& in, Arena& arena, const Stream& stream, Model& model)
        : o_(o), in_(in), arena_(arena), stream_(stream), model_(model) {}
    Sampler(const Sampler&) = delete;

    // Plans a sample and, if it may be longer than the window, its continuation.
    void rehearse(Plan& sample, Plan& slide) {
        const auto any = [](const TensorX&) { return 0; };
        sample = arena_.rehearse([&] { fill_window(in_.first_tokens(), any); });
        if (in_.sample_slides())
            slide = arena_.rehearse([&] { fill_window(std::vector<int>(half_window()), any); });
    }
    // Prints the prompt and its continuation by the model after `step` steps. It ends early when stops()
    // returns true. explain() as for Sample.
    template <class Stops>
    void sample(Plan& sample, Plan& slide, int64_t step, Stops&& stops, std::function<void()> explain) {
        Sample text(o_, in_, step, std::move(explain));
        const auto choose = [&](const TensorX& logits) {
            const int token = text.next(logits, stream_);
            return stops() ? -1 : token;
        };
        const std::vector<int> prompt = text.tokens();
        arena_.run(sample, [&] { fill_window(prompt, choose); });
        while (!text.ended() && !stops()) {
            const std::vector<int> latest(text.tokens().end() - half_window(), text.tokens().end());
            arena_.run(slide, [&] { fill_window(latest, choose); });
        }
        text.finish();
    }

  private:
    int half_window() const { return in_.sample_window() / 2; }
    // Continues a text to the end of the window.
    template <class Choose>
    void fill_window(const std::vector<int>& text, Choose&& choose) {
        const int rest = in_.sample_window() - static_cast<int>(text.size());
        generate(arena_, stream_, in_.config, model_, text, rest, choose);
    }

    const Options& o_;
    const RunInputs& in_;
    Arena& arena_;
    const Stream& stream_;
    Model& model_;
};
