// family_granite.h - Granite 3 and 4 (IBM, 2024): Llama with a constant factor at the embedding, at what
// attention and MLP add to the residual stream, at attention's scores, and at the logits.
#pragma once

#include "llmc/family_llama.h"

namespace granite {
inline constexpr GgufName kGgufKeys[] = {{"/embedding_multiplier", "embedding_scale"},
                                         {"/residual_multiplier", "residual_scale"},
                                         {"/attention_multiplier", "attention.scale"},
                                         {"/logits_scaling", "logit_scale"}};

// Each factor is 1 if its key is missing: that of the scores too.
inline void read(const ConfigReader& r, ModelConfig& c) {
    llama::read_with(
        r, c, {.tokens = llama::kTokens, .mlp_width = 11008, .positions = 2048, .may_have_biases = true});
    const auto factor = [&](const char* key) { return r.number(key, 1, llama::kTiny, llama::kHuge); };
    c.scales.embedding = c.scales.prompt = factor("embedding_multiplier");
    c.scales.residual = factor("residual_multiplier");
    c.scales.attention = factor("attention_multiplier");
    c.scales.logit_divisor = factor("logits_scaling");
}

inline void write(const ModelConfig& c, nlohmann::json& json) {
    llama::write(c, json);
    json.update({{"embedding_multiplier", c.scales.embedding},
                 {"residual_multiplier", c.scales.residual},
                 {"attention_multiplier", c.scales.attention},
                 {"logits_scaling", c.scales.logit_divisor}});
}

// The factors of Granite 3.1 2B, with its scores' for this size of heads.
inline void begin(ModelConfig& c) {
    llama::begin(c);
    c.scales = {
        .embedding = 12, .prompt = 12, .residual = 0.22, .attention = 1. / c.head_size, .logit_divisor = 8};
}
}  // namespace granite

constexpr Family kGranite = [] {
    Family family = kLlama;
    family.name = "granite";
    family.gguf.keys = granite::kGgufKeys;
    family.architecture = "GraniteForCausalLM";
    family.read = granite::read;
    family.write = granite::write;
    family.begin = granite::begin;
    return family;
}();
