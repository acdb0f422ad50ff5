// family_qwen3.h - Qwen3 (Yang et al., arXiv:2505.09388): Llama with an RMSNorm of each head's queries and
// keys before they are rotated, and a head size of its own.
#pragma once

#include "llmc/family_qwen2.h"

namespace qwen3 {
inline void read(const ConfigReader& r, ModelConfig& c) {
    llama::read_with(
        r, c,
        {.tokens = qwen2::kTokens, .mlp_width = 22016, .positions = 32768, .kv_heads = 32, .head_size = 128});
    qwen2::read_window(r, c);
}

inline Table block(const ModelConfig& c) {
    Table table = llama::block(c);
    table.push_back(row(Field::QueryNormWeight, "self_attn.q_norm.weight", {c.head_size}, Init::One));
    table.push_back(row(Field::KeyNormWeight, "self_attn.k_norm.weight", {c.head_size}, Init::One));
    return table;
}
}  // namespace qwen3

inline constexpr Family kQwen3 = [] {
    Family family = kQwen2;
    family.name = "qwen3";
    family.architecture = "Qwen3ForCausalLM";
    family.read = qwen3::read;
    family.block = qwen3::block;
    return family;
}();
