// family_smollm3.h - SmolLM3 (Hugging Face, 2025): Llama without rotation in every fourth layer.
#pragma once

#include "llmc/family_llama.h"

namespace smollm3 {
inline constexpr TokenDefaults kTokens = {128256, 128000, 128001, 128004};

// Leaves the rotation out of the layers for which rotates() is false.
template <class Rotates>
void set_rotating_layers(ModelConfig& c, Rotates&& rotates) {
    const RopeScaling rope = c.rope;
    c.change_layers([&](int l, LayerConfig& layer) {
        if (!rotates(l)) layer.rope.type = RopeType::kNone;
    });
    c.rope = rope;  // of the layers that rotate, even if the first one does not
}

// 1 in 'no_rope_layers' says that the layer rotates, 0 that it does not. Without the list, every layer whose
// number, counted from 1, is a multiple of 'no_rope_layer_interval' does not.
inline void read_rotating_layers(const ConfigReader& r, ModelConfig& c) {
    const int interval = r.size("no_rope_layer_interval", 4, INT32_MAX);
    std::vector<bool> rotates;
    for (int l = 0; l < c.layers; l++) rotates.push_back((l + 1) % interval != 0);
    if (r.has("no_rope_layers")) {
        const nlohmann::json& list = r.json()["no_rope_layers"];
        const auto is_flag = [](const nlohmann::json& x) { return x == 0 || x == 1; };
        if (!list.is_array() || list.size() != rotates.size() || !std::ranges::all_of(list, is_flag))
            r.refuse("no_rope_layers", format("a list of %d zeros and ones", c.layers));
        for (size_t l = 0; l < rotates.size(); l++) rotates[l] = list[l] == 1;
    }
    if (std::ranges::find(rotates, true) == rotates.end()) r.refuse("no_rope_layers", "1 for some layer");
    set_rotating_layers(c, [&](int l) { return rotates[static_cast<size_t>(l)]; });
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
    set_rotating_layers(c, [](int l) { return (l + 1) % 4 != 0; });
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
