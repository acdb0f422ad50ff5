// family_uneven.h - a family for tests: a Llama each of whose layers has sizes and a window of its own. No
// published model has it, so no list of families names it.
#pragma once

#include "llmc/family_llama.h"

namespace uneven {
inline void read(const ConfigReader& r, ModelConfig& c) {
    llama::read_with(r, c, {.tokens = llama::kTokens, .mlp_width = 1, .positions = 2048});
    for (const nlohmann::json& sizes : r.json().value("layer_sizes", nlohmann::json::array())) {
        const ConfigReader l(sizes, r.file() + ": layer_sizes");
        c.uneven.push_back({.heads = l.size("heads", kMostChannels),
                            .kv_heads = l.size("kv_heads", kMostChannels),
                            .head_size = l.size("head_size", kMostHeadSize),
                            .mlp_width = l.size("mlp_width", kMostMlpWidth),
                            .window = l.integer("window", 0, INT32_MAX)});
        if (c.uneven.back().head_size % 2 != 0) l.refuse("head_size", "even");
    }
    if (c.uneven.size() != static_cast<size_t>(c.layers))
        fail("%s: 'layer_sizes' must be a list of %d layers", r.file(), c.layers);
}

inline void write(const ModelConfig& c, nlohmann::json& json) {
    llama::write(c, json);
    for (const LayerConfig& l : c.uneven)
        json["layer_sizes"].push_back({{"heads", l.heads},
                                       {"kv_heads", l.kv_heads},
                                       {"head_size", l.head_size},
                                       {"mlp_width", l.mlp_width},
                                       {"window", l.window}});
}
}  // namespace uneven

constexpr Family kUneven = [] {
    Family family = kLlama;
    family.name = "uneven";
    family.architecture = "UnevenForCausalLM";
    family.read = uneven::read;
    family.write = uneven::write;
    return family;
}();
