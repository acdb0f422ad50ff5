// family_gemma.h - Gemma 1 to 3 (Google, arXiv:2403.08295, arXiv:2408.00118, arXiv:2503.19786): Llama with a
// scaled embedding, norms that multiply with 1 + weight, and a GeGLU. Since Gemma 2 there are also norms
// behind attention and MLP, windows in some layers, and soft caps (Gemma 2) or norms of heads (Gemma 3).
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
    family.gguf = {};
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

// ---- Gemma 2

namespace gemma2 {
constexpr llama::Defaults kSizes = {.tokens = gemma::kTokens,
                                    .mlp_width = 9216,
                                    .positions = 8192,
                                    .kv_heads = 4,
                                    .head_size = 256,
                                    .tied = true,
                                    .layers = 26,
                                    .channels = 2304,
                                    .heads = 8,
                                    .has_silu = false};

// A soft cap: none if the key is null, `otherwise` if it is missing.
inline double read_cap(const ConfigReader& r, const char* key, double otherwise) {
    if (r.json().contains(key) && !r.has(key)) return 0;
    return r.has(key) ? r.number(key, llama::kTiny, llama::kHuge) : otherwise;
}
inline void read_with(const ConfigReader& r, ModelConfig& c, const llama::Defaults& d, double logit_cap) {
    gemma::read_with(r, c, d);
    r.must_be("hidden_activation", {"gelu_pytorch_tanh"});
    c.scales.attention = 1 / std::sqrt(r.size("query_pre_attn_scalar", 256, 1 << 20));
    c.scales.logit_cap = read_cap(r, "final_logit_softcapping", logit_cap);
}

// Every second layer has a window, the first one too.
inline bool slides(int layer) { return layer % 2 == 0; }

inline void read(const ConfigReader& r, ModelConfig& c) {
    read_with(r, c, kSizes, 30);
    c.scales.attention_cap = read_cap(r, "attn_logit_softcapping", 50);
    mistral::read_windows(r, c, r.size("sliding_window", 4096, INT32_MAX), slides);
}

inline void write(const ModelConfig& c, nlohmann::json& json) {
    llama::write(c, json);
    mistral::write_windows(c, json);
    const auto cap = [](double x) { return x > 0 ? nlohmann::json(x) : nlohmann::json(); };
    json.erase("hidden_act");
    json.update({{"hidden_activation", "gelu_pytorch_tanh"},
                 {"query_pre_attn_scalar", std::lround(1 / (c.scales.attention * c.scales.attention))},
                 {"attn_logit_softcapping", cap(c.scales.attention_cap)},
                 {"final_logit_softcapping", cap(c.scales.logit_cap)}});
}

// Sets the window of those layers that have one.
template <class Slides>
void begin_with(ModelConfig& c, int window, Slides&& slides, double theta_of_others) {
    gemma::begin(c);
    c.scales.attention = 1 / std::sqrt(c.head_size);
    c.change_layers([&](int l, LayerConfig& layer) {
        if (slides(l))
            layer.window = window;
        else
            layer.rope.theta = theta_of_others;
    });
}
inline void begin(ModelConfig& c) {
    begin_with(c, 4096, slides, c.rope.theta);
    c.scales.attention_cap = 50;
    c.scales.logit_cap = 30;
}

inline constexpr GgufName kGgufTensors[] = {{"post_attention_layernorm", "post_attention_norm"},
                                            {"pre_feedforward_layernorm", "ffn_norm"},
                                            {"post_feedforward_layernorm", "post_ffw_norm"}};
inline constexpr GgufName kGgufKeys[] = {{"/attn_logit_softcapping", "attn_logit_softcapping"},
                                         {"/final_logit_softcapping", "final_logit_softcapping"}};

// llama.cpp knows the 27B, whose scale of scores differs, by its number of layers. Where a file names no cap,
// it takes the family's, and so does read().
inline void add_implied(nlohmann::json& json, int layers_of_27b) {
    const int channels = json["hidden_size"], heads = json["num_attention_heads"];
    json["query_pre_attn_scalar"] =
        json["num_hidden_layers"] == layers_of_27b ? channels / heads : json["head_dim"].get<int>();
    for (const char* cap : {"attn_logit_softcapping", "final_logit_softcapping"})
        if (json.contains(cap) && json[cap].is_null()) json.erase(cap);
}
inline void add_implied(nlohmann::json& json) { add_implied(json, 46); }

// The norm before the MLP has another name than Llama's, whose name is that of the norm behind attention.
inline Table block(const ModelConfig& c, const LayerConfig& layer) {
    Table table = gemma::block(c, layer);
    for (Row& row : table)
        if (row.field == Field::Norm2Weight) row.parts[0].name = "pre_feedforward_layernorm.weight";
    table.push_back(
        row(Field::AttentionNormWeight, "post_attention_layernorm.weight", {c.channels}, Init::Zero));
    table.push_back(row(Field::MlpNormWeight, "post_feedforward_layernorm.weight", {c.channels}, Init::Zero));
    return table;
}
}  // namespace gemma2

constexpr Family kGemma2 = [] {
    Family family = kGemma;
    family.name = "gemma2";
    family.gguf = {
        .tensors = gemma2::kGgufTensors, .keys = gemma2::kGgufKeys, .add_implied = gemma2::add_implied};
    family.architecture = "Gemma2ForCausalLM";
    family.read = gemma2::read;
    family.write = gemma2::write;
    family.begin = gemma2::begin;
    family.block = gemma2::block;
    return family;
}();

// ---- Gemma 3

namespace gemma3 {
inline constexpr TokenDefaults kTokens = {262208, 2, 1, 0};
constexpr int kPattern = 6;  // every sixth layer attends to all tokens

inline void read(const ConfigReader& r, ModelConfig& c) {
    llama::Defaults d = gemma2::kSizes;
    d.tokens = kTokens;
    d.positions = 131072;
    d.theta = 1e6;
    d.rope_layers = "full_attention";
    gemma2::read_with(r, c, d, 0);
    r.must_be("attn_logit_softcapping", {nullptr});
    const RopeScaling local =
        mistral::read_local_rope(r, r.number("rope_local_base_freq", 10000, 1, llama::kHuge));
    const int pattern = r.size("sliding_window_pattern", kPattern, INT32_MAX);
    const auto slides = [&](int layer) { return (layer + 1) % pattern != 0; };
    mistral::read_windows(r, c, r.size("sliding_window", 4096, INT32_MAX), slides, &local);
}

inline void write(const ModelConfig& c, nlohmann::json& json) {
    gemma2::write(c, json);
    for (int l = 0; l < c.layers; l++)
        if (c.layer(l).window > 0) json["rope_local_base_freq"] = c.layer(l).rope.theta;
}

inline void begin(ModelConfig& c) {
    gemma2::begin_with(
        c, 512, [](int layer) { return (layer + 1) % kPattern != 0; }, 1e6);
}

// Without a window all layers attend to all tokens.
inline void add_implied(nlohmann::json& json) {
    gemma2::add_implied(json, 62);
    if (!json.contains("sliding_window")) json["sliding_window_pattern"] = 1;
}

inline Table block(const ModelConfig& c, const LayerConfig& layer) {
    Table table = gemma2::block(c, layer);
    llama::add_query_key_norms(table, layer.head_size, layer.head_size, Init::Zero);
    return table;
}
}  // namespace gemma3

constexpr Family kGemma3 = [] {
    Family family = kGemma2;
    family.name = "gemma3_text";
    family.gguf.architecture = "gemma3";
    family.gguf.add_implied = gemma3::add_implied;
    family.architecture = "Gemma3ForCausalLM";
    family.tokens = gemma3::kTokens;
    family.read = gemma3::read;
    family.write = gemma3::write;
    family.begin = gemma3::begin;
    family.block = gemma3::block;
    return family;
}();
