// family_olmo.h - OLMo 2 and 3 (Ai2, arXiv:2501.00656, arXiv:2512.13961): Llama with norms behind attention
// and MLP in place of those before them, and norms of all queries and of all keys together.
#pragma once

#include "llmc/family_llama.h"

// ---- OLMo 2

namespace olmo2 {
inline constexpr TokenDefaults kTokens = {50304, -1, 50279, 1};

inline void read_with(const ConfigReader& r, ModelConfig& c, double theta, const char* rope_layers) {
    llama::read_with(r, c,
                     {.tokens = kTokens,
                      .mlp_width = 11008,
                      .positions = 2048,
                      .theta = theta,
                      .epsilon = 1e-5,
                      .rope_layers = rope_layers});
}
inline void read(const ConfigReader& r, ModelConfig& c) {
    read_with(r, c, 10000, "");
    r.must_be("use_sliding_window", {false});  // a GGUF of OLMo 3 says that it is an OLMo 2, with a window
}

inline constexpr GgufName kGgufTensors[] = {{"post_attention_layernorm", "post_attention_norm"},
                                            {"post_feedforward_layernorm", "post_ffw_norm"}};

inline Table block(const ModelConfig& c, const LayerConfig& layer) {
    Table table = llama::block(c, layer);
    for (Row& row : table) {
        if (row.field == Field::Norm1Weight) row.field = Field::AttentionNormWeight;
        if (row.field == Field::Norm2Weight) row.field = Field::MlpNormWeight;
        if (row.field == Field::AttentionNormWeight) row.parts[0].name = "post_attention_layernorm.weight";
        if (row.field == Field::MlpNormWeight) row.parts[0].name = "post_feedforward_layernorm.weight";
    }
    llama::add_query_key_norms(table, layer.query_width(), layer.kv_width(), Init::One);
    return table;
}
}  // namespace olmo2

constexpr Family kOlmo2 = [] {
    Family family = kLlama;
    family.name = "olmo2";
    family.gguf = {.tensors = olmo2::kGgufTensors};
    family.architecture = "Olmo2ForCausalLM";
    family.tokens = olmo2::kTokens;
    family.norm = NormKind::RmsFloat;
    family.read = olmo2::read;
    family.block = olmo2::block;
    return family;
}();

// ---- OLMo 3
//
// OLMo 2 with windows in three of four layers. Only the others have scaled positions.

namespace olmo3 {
constexpr int kPattern = 4, kWindow = 4096;
inline bool slides(int layer) { return (layer + 1) % kPattern != 0; }

inline void read(const ConfigReader& r, ModelConfig& c) {
    olmo2::read_with(r, c, 500000, "full_attention");
    const RopeScaling local = mistral::read_local_rope(r, c.rope.theta);
    mistral::read_windows(r, c, r.size("sliding_window", kWindow, INT32_MAX), slides, &local);
}

// The keys rope_theta and rope_scaling are those of full layers. `transformers` 5 takes the others' from
// 'rope_parameters'.
inline void write(const ModelConfig& c, nlohmann::json& json) {
    llama::write(c, json);
    mistral::write_windows(c, json);
    const nlohmann::json full = {{"rope_type", "default"}};
    nlohmann::json local = full;
    local["rope_theta"] = c.layer(0).rope.theta;
    json["rope_parameters"] = {{"full_attention", full}, {"sliding_attention", local}};
}

inline void begin(ModelConfig& c) {
    llama::begin(c);
    c.rope.theta = 500000;
    c.change_layers([](int l, LayerConfig& layer) { layer.window = slides(l) ? kWindow : 0; });
}
}  // namespace olmo3

constexpr Family kOlmo3 = [] {
    Family family = kOlmo2;
    family.name = "olmo3";
    family.gguf.architecture = "";  // a GGUF has it as an OLMo 2, with a list of the layers that have windows
    family.architecture = "Olmo3ForCausalLM";
    family.read = olmo3::read;
    family.write = olmo3::write;
    family.begin = olmo3::begin;
    return family;
}();
