// family_smollm3.h - SmolLM3 (Hugging Face, 2025): Llama without rotation in every fourth layer.
#pragma once

#include "llmc/family_llama.h"

namespace smollm3 {
inline constexpr TokenDefaults kTokens = {128256, 128000, 128001, 128004};

// 1 in 'no_rope_layers' says that the layer rotates, 0 that it does not. Without the list, every layer whose
// number, counted from 1, is a multiple of 'no_rope_layer_interval' does not.
inline void read_rotating_layers(const ConfigReader& r, ModelConfig& c) {
    const int interval = r.size("no_rope_layer_interval", 4, INT32_MAX);
    std::vector<LayerConfig> layers(static_cast<size_t>(c.layers), c);
    if (r.has("no_rope_layers")) {
        const nlohmann::json& rotate = r.json()["no_rope_layers"];
        const auto is_flag = [](const nlohmann::json& x) { return x == 0 || x == 1; };
        if (!rotate.is_array() || rotate.size() != layers.size() || !std::ranges::all_of(rotate, is_flag))
            r.refuse("no_rope_layers", format("a list of %d zeros and ones", c.layers));
        for (size_t l = 0; l < layers.size(); l++)
            if (rotate[l] == 0) layers[l].rope.type = RopeType::kNone;
    } else {
        for (int l = interval - 1; l < c.layers; l += interval)
            layers[static_cast<size_t>(l)].rope.type = RopeType::kNone;
    }
    // The layers that rotate come first, so that their scaling is the model's.
    const bool some = std::ranges::any_of(layers, [](auto& l) { return l.rope.type != RopeType::kNone; });
    if (!some) r.refuse("no_rope_layers", "1 for some layer");
    const RopeScaling rope = c.rope;
    c.set_layers(std::move(layers));
    c.rope = rope;
}

inline void read(const ConfigReader& r, ModelConfig& c) {
    llama::read_with(r, c,
                     {.tokens = kTokens,
                      .mlp_width = 11008,
                      .positions = 32768,
                      .kv_heads = 4,
                      .theta = 2e6,
                      .tied = true,
                      .may_have_biases = true});
    r.must_be("use_sliding_window", {false});
    for (const bool slides : mistral::sliding_layers(r, c, [](int) { return false; }))
        if (slides) fail("%s: 'layer_types' has sliding_attention without a window", r.file());
    read_rotating_layers(r, c);
}

inline void write(const ModelConfig& c, nlohmann::json& json) {
    llama::write(c, json);
    json["use_sliding_window"] = false;
    for (int l = 0; l < c.layers; l++)
        json["no_rope_layers"].push_back(c.layer(l).rope.type == RopeType::kNone ? 0 : 1);
}

inline void begin(ModelConfig& c) {
    llama::begin(c);
    std::vector<LayerConfig> layers(static_cast<size_t>(c.layers), c);
    for (size_t l = 3; l < layers.size(); l += 4) layers[l].rope.type = RopeType::kNone;
    c.set_layers(std::move(layers));
}
}  // namespace smollm3

constexpr Family kSmolLm3 = [] {
    Family family = kLlama;
    family.name = "smollm3";
    family.architecture = "SmolLM3ForCausalLM";
    family.tokens = smollm3::kTokens;
    family.read = smollm3::read;
    family.write = smollm3::write;
    family.begin = smollm3::begin;
    return family;
}();
