// family_gemma.h - Gemma 1 and 3 (Google, arXiv:2403.08295, arXiv:2503.19786): Llama with a scaled embedding,
// norms that multiply with 1 + weight, and a GeGLU. Gemma 3 also has norms behind attention and MLP, norms of
// heads, and windows in most layers.
#pragma once

#include <cmath>

#include "llmc/family_llama.h"

// ---- Gemma 1

namespace gemma {
inline constexpr TokenDefaults kTokens = {256000, 2, 1, 0};

inline void read_with(const ConfigReader& r, ModelConfig& c, const llama::Defaults& d) {
    llama::read_with(r, c, d);
    r.must_be("use_bidirectional_attention", {false});
    c.scales.embedding = std::sqrt(c.channels);
}

inline void read(const ConfigReader& r, ModelConfig& c) {
    read_with(r, c,
              {.tokens = kTokens,
               .mlp_width = 24576,
               .positions = 8192,
               .kv_heads = 16,
               .head_size = 256,
               .tied = true,
               .layers = 28,
               .channels = 3072,
               .heads = 16,
               .has_silu = false});
    r.must_be("hidden_act", {"gelu_pytorch_tanh", "gelu"});  // older files say gelu and mean its tanh form
}

inline void write(const ModelConfig& c, nlohmann::json& json) {
    llama::write(c, json);
    json["hidden_act"] = "gelu_pytorch_tanh";
}

inline void begin(ModelConfig& c) {
    llama::begin(c);
    c.scales.embedding = std::sqrt(c.channels);
}

// The gains of a table of Llama's begin at 0 here, because norms add 1.
inline Table with_gains_from_0(Table table) {
    for (Row& row : table)
        if (row.init == Init::One) row.init = Init::Zero;
    return table;
}
inline Table block(const ModelConfig& c, const LayerConfig& layer) {
    return with_gains_from_0(llama::block(c, layer));
}
inline Table head(const ModelConfig& c) { return with_gains_from_0(llama::head(c)); }
}  // namespace gemma

constexpr Family kGemma = [] {
    Family family = kLlama;
    family.name = "gemma";
    family.architecture = "GemmaForCausalLM";
    family.tokens = gemma::kTokens;
    family.norm = NormKind::RmsPlusOne;
    family.mlp = MlpKind::GeGlu;
    family.read = gemma::read;
    family.write = gemma::write;
    family.begin = gemma::begin;
    family.block = gemma::block;
    family.head = gemma::head;
    return family;
}();

// ---- Gemma 3

namespace gemma3 {
inline constexpr TokenDefaults kTokens = {262208, 2, 1, 0};
constexpr int kPattern = 6;  // every sixth layer attends to all tokens

// Layers with a window rotate by frequencies of their own, which are not scaled.
inline RopeScaling read_local_rope(const ConfigReader& r, const llama::Defaults& d, const ModelConfig& c) {
    if (llama::rope_parameters(r).has("sliding_attention"))
        return llama::read_rope(r, d, c.positions, c.head_size, "sliding_attention");
    RopeScaling rope;
    rope.theta = r.number("rope_local_base_freq", 10000, 1, llama::kHuge);
    return rope;
}

// Sets the layers that attend to `window` tokens, and how these rotate.
template <class Slides>
void set_windows(ModelConfig& c, int window, const RopeScaling& local, Slides&& slides) {
    std::vector<LayerConfig> layers(static_cast<size_t>(c.layers), c);
    for (int l = 0; l < c.layers; l++)
        if (slides(l))
            layers[static_cast<size_t>(l)].window = window, layers[static_cast<size_t>(l)].rope = local;
    c.set_layers(std::move(layers));
}

inline void read(const ConfigReader& r, ModelConfig& c) {
    llama::Defaults d = {.tokens = kTokens,
                         .mlp_width = 9216,
                         .positions = 131072,
                         .kv_heads = 4,
                         .head_size = 256,
                         .theta = 1e6,
                         .tied = true,
                         .layers = 26,
                         .channels = 2304,
                         .heads = 8,
                         .has_silu = false,
                         .rope_layers = "full_attention"};
    gemma::read_with(r, c, d);
    r.must_be("hidden_activation", {"gelu_pytorch_tanh"});
    for (const char* cap : {"attn_logit_softcapping", "final_logit_softcapping"}) r.must_be(cap, {nullptr});
    c.scales.attention = 1 / std::sqrt(r.size("query_pre_attn_scalar", 256, 1 << 20));
    d.theta = 10000;
    const RopeScaling local = read_local_rope(r, d, c);
    if (local.type != RopeType::kDefault) r.refuse("rope_parameters", "not scaled in layers with a window");
    const int pattern = r.size("sliding_window_pattern", kPattern, INT32_MAX);
    const std::vector<bool> slides =
        mistral::sliding_layers(r, c, [&](int layer) { return (layer + 1) % pattern != 0; });
    set_windows(c, r.size("sliding_window", 4096, INT32_MAX), local,
                [&](int layer) { return slides[static_cast<size_t>(layer)]; });
}

inline void write(const ModelConfig& c, nlohmann::json& json) {
    llama::write(c, json);
    json.erase("hidden_act");
    json["hidden_activation"] = "gelu_pytorch_tanh";
    json["query_pre_attn_scalar"] = std::lround(1 / (c.scales.attention * c.scales.attention));
    json["layer_types"] = nlohmann::json::array();
    for (int l = 0; l < c.layers; l++) {
        const LayerConfig& layer = c.layer(l);
        json["layer_types"].push_back(layer.window > 0 ? "sliding_attention" : "full_attention");
        if (layer.window == 0) continue;
        json["sliding_window"] = layer.window;
        json["rope_local_base_freq"] = layer.rope.theta;
    }
}

inline void begin(ModelConfig& c) {
    gemma::begin(c);
    c.scales.attention = 1 / std::sqrt(c.head_size);
    const RopeScaling local = c.rope;
    c.rope.theta = 1e6;
    set_windows(c, 512, local, [](int layer) { return (layer + 1) % kPattern != 0; });
}

// The norm before the MLP has another name than Llama's, whose name is that of the norm behind attention.
inline Table four_norms(Table table, int64_t channels) {
    for (Row& row : table)
        if (row.field == Field::Norm2Weight) row.parts[0].name = "pre_feedforward_layernorm.weight";
    table.push_back(
        row(Field::AttentionNormWeight, "post_attention_layernorm.weight", {channels}, Init::Zero));
    table.push_back(row(Field::MlpNormWeight, "post_feedforward_layernorm.weight", {channels}, Init::Zero));
    return table;
}
inline Table block(const ModelConfig& c, const LayerConfig& layer) {
    Table table = four_norms(gemma::block(c, layer), c.channels);
    table.push_back(row(Field::QueryNormWeight, "self_attn.q_norm.weight", {layer.head_size}, Init::Zero));
    table.push_back(row(Field::KeyNormWeight, "self_attn.k_norm.weight", {layer.head_size}, Init::Zero));
    return table;
}
}  // namespace gemma3

constexpr Family kGemma3 = [] {
    Family family = kGemma;
    family.name = "gemma3_text";
    family.architecture = "Gemma3ForCausalLM";
    family.tokens = gemma3::kTokens;
    family.read = gemma3::read;
    family.write = gemma3::write;
    family.begin = gemma3::begin;
    family.block = gemma3::block;
    return family;
}();
