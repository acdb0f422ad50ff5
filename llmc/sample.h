// sample.h - samples of a model's text: draws tokens, writes the text as it is drawn, and continues a prompt
// token by token with a KV cache. Sampler does all of it for a run, which may also be a conversation (chat.h)
// or the prompts of a file (decoding.h).
#pragma once

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/decoding.h"
#include "llmc/chat.h"
#include "llmc/drawn_text.h"
#include "llmc/error.h"
#include "llmc/run_inputs.h"
#include "llmc/sequence_keys.h"
#include "llmc/tensor.h"

// ---- a sample

class Sample {
  public:
    // Writes the prompt, or the question in a chat. Without a tokenizer, tokens are written as numbers. Token
    // i of the sample after `step` steps uses random number (step, i). explain() is called before a logit
    // that is not finite is reported; it fails if it knows the reason. agree() as for DrawnText.
    Sample(const RunConfig& o, const RunInputs& in, int64_t step, std::function<void()> explain,
           std::function<int(int)> agree)
        : o_(o),
          in_(in),
          text_(o, in, in.first_tokens(), step, o.sample_tokens, o.prompt.empty() && !in.chat,
                std::move(explain)) {
        text_.agree = std::move(agree);
        if (o.steps > 0) print(stdout, "--- sample after %ld steps ---\n", step);
        if (!in.chat) output_.write(o.prompt);
        if (!in.chat || o.steps == 0) return;
        for (const Message& message : in.question)
            output_.write(message.role() + ": " + message.text() + "\n");
        output_.write("assistant: ");
    }

    // Draws the next token from the logits (1, V) after the last one, which are on the device. Returns -1 if
    // the sample ends here.
    int next(const TensorX& logits, Stream stream) {
        const int token = text_.next(logits_on_host(logits, 0, in_.config.vocabulary, stream));
        output_.write(text_.take());
        return token;
    }
    bool ended() const { return text_.ended(); }
    // The prompt and the tokens drawn so far.
    const std::vector<int>& tokens() const { return text_.tokens(); }

    // Ends the sample and returns its text.
    std::string finish() {
        output_.write(text_.take_all());
        output_.finish(o_.steps > 0 ? "\n---\n" : "\n");
        if (!text_.has_text() && o_.steps == 0 && ended())
            print(stderr, "the model ended its %s\n",
                  in_.chat
                      ? "answer at once"
                      : "text at once; a model of chats needs its chat format: --chat-format NAME, and no "
                        "--raw-prompt (dev/guide/data.md)");
        return output_.written();
    }

  private:
    const RunConfig& o_;
    const RunInputs& in_;
    DrawnText text_;
    TextOutput output_;
};

// ---- a prompt's continuation
//
// Keys and values of the tokens so far are in a KV cache, so that each new token runs one row through the
// model.

// As append_tokens(), but returns the logits (1, V) after the last token.
inline TensorX logits_after(Arena& arena, Stream stream, Gpt& model, const std::vector<int>& tokens,
                            KvCache& cache) {
    return model.last_logits(append_tokens(arena, stream, model, tokens, cache));
}

// A long prompt runs in parts of this many tokens, so that it needs little memory besides its keys and
// values. The last part takes the remainder too, so that no part is too short for the usual matrix products.
constexpr int64_t kPromptRows = 2048;

// Runs a prompt from its first token, part by part. Returns the logits (1, V) after its last token.
inline TensorX logits_after_prompt(Arena& arena, Stream stream, Gpt& model, const std::vector<int>& tokens,
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
template <class Choose>
void generate(Arena& arena, Stream stream, const ModelConfig& config, Gpt& model,
              const std::vector<int>& prompt, int new_tokens, Choose&& choose) {
    Range range("generate");
    KvCache cache;
    const int64_t positions = model.prompt_len() + static_cast<int64_t>(prompt.size()) + new_tokens;
    for (int l = 0; l < config.layers; l++)
        cache.layers.push_back(arena.take<floatX>("kv_cache", {positions, 2 * config.layer(l).kv_width()}));
    std::vector<int> next = {choose(logits_after_prompt(arena, stream, model, prompt, cache))};
    arena.repeat(new_tokens - 1, [&] {
        // A dry run executes the last turn, which has the most keys.
        if (arena.rehearsing()) cache.length = static_cast<int>(positions) - 2;
        if (next[0] >= 0) next = {choose(logits_after(arena, stream, model, next, cache))};
        return next[0] >= 0;
    });
}

// ---- the samples of a run

// Draws samples of a model in memory that was planned for them, or answers in a conversation. A sample that
// is longer than the model's window goes on from the latest half of it.
class Sampler {
  public:
    Sampler(const RunConfig& o, const RunInputs& in, Arena& arena, const Stream& stream, Gpt& model)
        : o_(o), in_(in), arena_(arena), stream_(stream), model_(model) {}
    Sampler(const Sampler&) = delete;

    // Plans a sample and, if it may be longer than the window, its continuation.
    void rehearse(Plan& sample, Plan& slide) {
        if (o_.only_answers()) {
            sample = arena_.rehearse([&] { decoding().run(nullptr); });
            return;
        }
        const auto any = [](const TensorX&) { return 0; };
        sample = arena_.rehearse([&] { fill_window(in_.first_tokens(), any); });
        if (in_.sample_slides())
            slide = arena_.rehearse([&] { fill_window(std::vector<int>(half_window()), any); });
    }
    // Prints the prompt and its continuation by the model after `step` steps. It ends early when stops()
    // returns true. explain() and agree() as for DrawnText. Returns the text of a single sample.
    template <class Stops>
    std::string sample(Plan& sample, Plan& slide, int64_t step, Stops&& stops, std::function<void()> explain,
                       std::function<int(int)> agree) {
        const auto decode = [&](auto&& texts) {
            arena_.run(sample, [&] { decoding().run(&texts); });
            return "";
        };
        if (o_.chat) return decode(ChatSession(o_, in_, explain));
        if (!o_.prompts.empty()) return decode(AnsweredPrompts(o_, in_, explain));
        Sample text(o_, in_, step, std::move(explain), std::move(agree));
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
        return text.finish();
    }

  private:
    // Continues as many texts at a time as this run answers: one in a conversation, up to --batch of
    // --prompts.
    Decoding decoding() {
        const int texts = o_.chat ? 1 : std::min(o_.batch, static_cast<int>(in_.prompts.size()));
        return {arena_, stream_, in_.config, model_, texts, in_.sample_window()};
    }
    int half_window() const { return in_.sample_window() / 2; }
    // Continues a text to the end of the window.
    template <class Choose>
    void fill_window(const std::vector<int>& text, Choose&& choose) {
        const int rest = in_.sample_window() - static_cast<int>(text.size());
        generate(arena_, stream_, in_.config, model_, text, rest, choose);
    }

    const RunConfig& o_;
    const RunInputs& in_;
    Arena& arena_;
    const Stream& stream_;
    Gpt& model_;
};
