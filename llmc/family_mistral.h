// family_mistral.h - Mistral (Jiang et al., arXiv:2310.06825): Llama with a sliding window.
#pragma once

#include "llmc/family_llama.h"

namespace mistral {
// The attention window of all layers. Layer i has a window of `window` tokens if its layer type says so or,
// without layer types, if slides(i). Fails if layers differ, because all blocks are alike here.
template <class Slides>
int window_of_layers(const ConfigReader& r, const ModelConfig& c, int window, Slides&& slides) {
    const nlohmann::json& types = r.has("layer_types") ? r.json()["layer_types"] : nlohmann::json();
    if (!types.is_null() && (!types.is_array() || types.size() != static_cast<size_t>(c.layers)))
        r.refuse("layer_types", format("a list of %d layers", c.layers));
    int sliding = 0;
    for (int l = 0; l < c.layers; l++) {
        if (types.is_null()) {
            sliding += window > 0 && slides(l);
            continue;
        }
        const nlohmann::json& type = types[static_cast<size_t>(l)];
        if (type != "full_attention" && type != "sliding_attention")
            fail("%s: 'layer_types' has %s; full_attention and sliding_attention are supported",
                 r.file().c_str(), printable(type.dump()).c_str());
        sliding += type == "sliding_attention";
    }
    if (sliding != 0 && sliding != c.layers)
        fail("%s: %d of %d layers have a sliding window; only all or none is supported", r.file().c_str(),
             sliding, c.layers);
    if (sliding > 0 && window == 0)
        fail("%s: 'layer_types' has sliding_attention, and no 'sliding_window' is set", r.file().c_str());
    return sliding > 0 ? window : 0;
}

inline void read(const ConfigReader& r, ModelConfig& c) {
    llama::read_with(r, c,
                     {.tokens = llama::kTokens, .mlp_width = 14336, .positions = 131072, .kv_heads = 8});
    // Null means no window; a missing key means the window of the first Mistral.
    const int window = r.json().contains("sliding_window") ? r.size("sliding_window", 0, INT32_MAX) : 4096;
    c.window = window_of_layers(r, c, window, [](int) { return true; });
    // `transformers` ignores layer_types here.
    if (c.window != window)
        fail("%s: 'layer_types' is full_attention, and 'sliding_window' %d", r.file().c_str(), window);
}

inline void write(const ModelConfig& c, nlohmann::json& json) {
    llama::write(c, json);
    json["sliding_window"] = c.window > 0 ? nlohmann::json(c.window) : nlohmann::json();
}
}  // namespace mistral

inline constexpr Family kMistral = [] {
    Family family = kLlama;
    family.name = "mistral";
    family.architecture = "MistralForCausalLM";
    family.read = mistral::read;
    family.write = mistral::write;
    return family;
}();
