// family_phi3.h - Phi-3, 3.5, 4 and 4-mini (Abdin et al., arXiv:2404.14219): Llama with fewer and larger
// tensors in its files, an optional sliding window, rotation of a part of each head, and the scaling
// `longrope`.
#pragma once

#include "llmc/family_llama.h"

namespace phi3 {
inline constexpr TokenDefaults kTokens = {32064, 1, 32000, 32000};

inline constexpr GgufName kGgufTensors[] = {{"self_attn.qkv_proj", "attn_qkv"},
                                            {"mlp.gate_up_proj", "ffn_up"}};

inline void read(const ConfigReader& r, ModelConfig& c) {
    llama::read_with(r, c,
                     {.tokens = kTokens,
                      .mlp_width = 8192,
                      .positions = 4096,
                      .epsilon = 1e-5,
                      .original_positions = 4096,
                      .may_rotate_partly = true});
    for (const char* dropout : {"embd_pdrop", "resid_pdrop"}) r.must_be(dropout, {0.0});
    if (c.rope.type != RopeType::kDefault && c.rope.type != RopeType::kLongrope)
        fail("%s: the rotary scaling \"%s\" is not that of a phi3: default and longrope are", r.file(),
             kRopeNames[static_cast<int>(c.rope.type)]);
    c.window = r.has("sliding_window") ? r.size("sliding_window", INT32_MAX) : 0;
}

inline void write(const ModelConfig& c, nlohmann::json& json) {
    llama::write(c, json);
    if (c.query_width() == c.channels) json.erase("head_dim");  // the class has no such key
    json["sliding_window"] = c.window > 0 ? nlohmann::json(c.window) : nlohmann::json();
    if (c.rope.type == RopeType::kLongrope)
        json["original_max_position_embeddings"] = c.rope.original_max_position_embeddings;
}

// Phi's files have queries, keys and values in one tensor, and gate and up in another.
inline Table block(const ModelConfig& c, const LayerConfig& layer) {
    Table table = llama::block(c, layer);
    for (Row& row : table)
        if (row.parts.size() > 1) {
            int64_t outputs = 0;
            for (const FileTensor& part : row.parts) outputs += part.shape.rows();
            row.parts = {{row.name, {outputs, c.channels}}};
        }
    return table;
}
}  // namespace phi3

constexpr Family kPhi3 = [] {
    Family family = kLlama;
    family.name = "phi3";
    family.gguf = {.tensors = phi3::kGgufTensors, .states_no_window = true};
    family.architecture = "Phi3ForCausalLM";
    family.tokens = phi3::kTokens;
    family.read = phi3::read;
    family.write = phi3::write;
    family.block = phi3::block;
    return family;
}();
