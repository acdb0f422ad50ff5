// generate.h - continues a prompt token by token. Keys and values of the tokens so far are in a KV cache, so
// that each new token runs one row through the model.
//
// The functions are templates, so that any model can be used that has
//     TensorX forward_only(const Tensor<int>& tokens, const Rows&, KvCache*)   the last block's output
//     TensorX last_logits(const TensorX& x)                                    (1, V), of the last row of x
//     int64_t prompt_len()                                                     vectors of a soft prompt
#pragma once

#include <vector>

#include "llmc/embedding_and_head.h"
#include "llmc/sequence_keys.h"

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
