// family_ministral3.h - Ministral 3 (Mistral AI, 2025): Mistral whose queries grow with their position, and
// whose rotary positions are scaled by `yarn`.
#pragma once

#include "llmc/family_llama.h"

namespace ministral3 {
inline constexpr TokenDefaults kTokens = {131072, 1, 2, 11};

// llama.cpp takes mscale to be mscale_all_dim.
inline constexpr GgufName kGgufKeys[] = {
    {"/rope_scaling/mscale_all_dim", "rope.scaling.yarn_log_multiplier"},
    {"/rope_scaling/mscale", "rope.scaling.yarn_log_multiplier"},
    {"/rope_scaling/llama_4_scaling_beta", "attention.temperature_scale"}};

inline void read(const ConfigReader& r, ModelConfig& c) {
    llama::read_with(r, c,
                     {.tokens = kTokens,
                      .mlp_width = 14336,
                      .positions = 262144,
                      .kv_heads = 8,
                      .head_size = 128,
                      .theta = 1e6,
                      .epsilon = 1e-5});
    const ConfigReader rope = llama::rope_parameters(r);
    if (c.rope.type != RopeType::kYarn || !rope.has("llama_4_scaling_beta"))
        fail("%s: a ministral3 has the rotary scaling \"yarn\" with a 'llama_4_scaling_beta'", r.file());
    c.rope.llama_4_scaling_beta = rope.number("llama_4_scaling_beta", -1, 1e6);
    const int window = r.has("sliding_window") ? r.size("sliding_window", INT32_MAX) : 0;
    mistral::read_same_windows(r, c, window);
}

inline void write(const ModelConfig& c, nlohmann::json& json) {
    mistral::write(c, json);
    json["rope_scaling"]["llama_4_scaling_beta"] = c.rope.llama_4_scaling_beta;
}

// The scaling of Ministral 3's own models.
inline void begin(ModelConfig& c) {
    llama::begin(c);
    c.rope = {.type = RopeType::kYarn,
              .theta = 1e6,
              .factor = 16,
              .original_max_position_embeddings = std::max(1, c.positions / 16),
              .mscale = 1,
              .mscale_all_dim = 1,
              .llama_4_scaling_beta = 0.1};
}
}  // namespace ministral3

constexpr Family kMinistral3 = [] {
    Family family = kMistral;
    family.name = "ministral3";
    family.gguf = {"mistral3", true, {}, ministral3::kGgufKeys};
    family.architecture = "Ministral3ForCausalLM";
    family.tokens = ministral3::kTokens;
    family.read = ministral3::read;
    family.write = ministral3::write;
    family.begin = ministral3::begin;
    return family;
}();
