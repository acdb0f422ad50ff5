// family_qwen.h - Qwen2, Qwen2.5 and Qwen3, which differ from Llama in a few lines: read Qwen3 for the
// shortest example of a family.
#pragma once

#include "llmc/family_llama.h"

// ---- Qwen2 and Qwen2.5 (Yang et al., arXiv:2407.10671)
//
// Llama with biases on queries, keys and values, and an optional sliding window.

namespace qwen2 {
inline constexpr TokenDefaults kTokens = {151936};

// The window is used only if use_sliding_window is true, and then from layer max_window_layers on.
inline void read_window(const ConfigReader& r, ModelConfig& c) {
    // Null means no window; a missing key means the class's default.
    const int set = r.json().contains("sliding_window") ? 0 : 4096;
    const int window = r.truth("use_sliding_window", false) ? r.size("sliding_window", set, INT32_MAX) : 0;
    const int first = r.has("max_window_layers") ? r.integer("max_window_layers", 0, INT32_MAX) : 28;
    mistral::read_windows(r, c, window, [&](int layer) { return layer >= first; });
}
inline void write_window(const ModelConfig& c, nlohmann::json& json) {
    const int window = c.shortest_window();
    json["use_sliding_window"] = window > 0;
    json["sliding_window"] = window > 0 ? nlohmann::json(window) : nlohmann::json();
    json["max_window_layers"] = c.window > 0 ? 0 : c.layers;
    if (!c.uneven.empty()) json["layer_types"] = mistral::layer_types(c);
}

inline void read(const ConfigReader& r, ModelConfig& c) {
    llama::read_with(r, c, {.tokens = kTokens, .mlp_width = 22016, .positions = 32768, .kv_heads = 32});
    read_window(r, c);
}
inline void write(const ModelConfig& c, nlohmann::json& json) {
    llama::write(c, json);
    write_window(c, json);
}

inline Table block(const ModelConfig& c, const LayerConfig& layer) {
    Table table = llama::block(c, layer);
    table.push_back(llama::qkv_bias(layer));
    return table;
}
}  // namespace qwen2

constexpr Family kQwen2 = [] {
    Family family = kLlama;
    family.name = "qwen2";
    family.gguf.rotary_pairs = false;
    family.architecture = "Qwen2ForCausalLM";
    family.tokens = qwen2::kTokens;
    family.read = qwen2::read;
    family.write = qwen2::write;
    family.block = qwen2::block;
    return family;
}();

// ---- Qwen3 (Yang et al., arXiv:2505.09388)
//
// Llama with an RMSNorm of each head's queries and keys before they are rotated, and a head size of its own.

namespace qwen3 {
inline void read(const ConfigReader& r, ModelConfig& c) {
    llama::read_with(r, c,
                     {.tokens = qwen2::kTokens,
                      .mlp_width = 22016,
                      .positions = 32768,
                      .kv_heads = 32,
                      .head_size = 128,
                      .may_have_biases = true});
    qwen2::read_window(r, c);
}

inline Table block(const ModelConfig& c, const LayerConfig& layer) {
    Table table = llama::block(c, layer);
    llama::add_query_key_norms(table, layer.head_size, layer.head_size, Init::One);
    return table;
}
}  // namespace qwen3

constexpr Family kQwen3 = [] {
    Family family = kQwen2;
    family.name = "qwen3";
    family.architecture = "Qwen3ForCausalLM";
    family.read = qwen3::read;
    family.block = qwen3::block;
    return family;
}();
