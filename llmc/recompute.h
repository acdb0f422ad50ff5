// recompute.h - what a block's forward keeps for its backward, by the levels of --recompute; backward
// recomputes the rest. Add a level here.
#pragma once

#include <algorithm>
#include <charconv>
#include <iterator>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/text.h"

// The tensors that a block keeps besides its input. Any subset works; each level below keeps less than the
// one before it. The input of a norm behind the MLP is kept where `up` is, that of one behind attention where
// attention's output is; else one product recomputes it.
struct Keep {
    bool backward = true;   // a backward will follow: this chooses kernels; if false, nothing else is kept
    bool gelu = true;       // the MLP's activation
    bool norm = true;       // the outputs of the block's norms
    bool up = true;         // the activation's input, recomputed by one product
    bool qkv = true;        // recomputed by one product
    bool attention = true;  // attention's output and lse
    bool middle = true;     // the residual stream between attention and MLP; false: keep only the input
};
constexpr Keep kKeepNothing = {false, false, false, false, false, false, false};
// What a block keeps when backward recomputes it: all but the norms' outputs, which are cheap to recompute.
constexpr Keep kRecomputed = {.norm = false};

struct RecomputeLevel {
    const char* name;
    Keep keep;
};
constexpr RecomputeLevel kRecomputeLevels[] = {
    {"none", {}},
    {"gelu", {.gelu = false}},
    {"norm", {.gelu = false, .norm = false}},
    {"ffn", {.gelu = false, .norm = false, .up = false}},
    {"attention", {.gelu = false, .norm = false, .up = false, .qkv = false, .attention = false}},
    {"block", {.gelu = false, .norm = false, .up = false, .qkv = false, .attention = false, .middle = false}},
};
constexpr int kLastLevel = static_cast<int>(std::size(kRecomputeLevels)) - 1;  // keeps the least

inline std::vector<std::string> recompute_names() {
    std::vector<std::string> names;
    for (const RecomputeLevel& level : kRecomputeLevels) names.push_back(level.name);
    return names;
}

// The levels as text: "block:4,norm:8" for twelve layers, from the first on; "norm" if all have that level.
inline std::string levels_text(const std::vector<int>& levels, const std::vector<std::string>& names) {
    std::string text;
    for (size_t i = 0, end; i < levels.size(); i = end) {
        for (end = i; end < levels.size() && levels[end] == levels[i];) end++;
        text += (i ? "," : "") + names[static_cast<size_t>(levels[i])];
        if (end - i < levels.size()) text.append(":").append(std::to_string(end - i));
    }
    return text;
}

// Parses such a text to a level per layer. Fails on anything else, naming `option` and the text.
inline std::vector<int> parse_levels(const std::string& text, const std::vector<std::string>& names,
                                     int layers, const char* option) {
    const std::string known = joined(names, ", ");
    std::vector<int> levels;
    int64_t sum = 0;
    for (size_t start = 0; start <= text.size();) {
        const size_t end = std::min(text.find(',', start), text.size());
        const std::string part = text.substr(start, end - start);
        const size_t colon = part.find(':');
        const std::string name = part.substr(0, colon);
        const bool only = start == 0 && end == text.size() && colon == std::string::npos;
        start = end + 1;
        if (part.empty())
            fail("%s '%s' has an empty part; it takes one of %s, or several with counts, as in %s:1,%s:2",
                 option, text, known, names.front(), names.back());
        const auto level = std::ranges::find(names, name);
        if (level == names.end()) fail("%s %s: no level '%s'; there are %s", option, text, name, known);
        const std::string digits =
            only ? std::to_string(layers) : part.substr(std::min(name.size() + 1, part.size()));
        int count = 0;
        const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), count);
        if (error != std::errc() || stop != digits.data() + digits.size() || count < 1)
            fail("%s %s: '%s' needs a count of layers, a positive integer, as in %s:%d", option, text, part,
                 name, layers);
        sum += count;
        if (sum <= layers)
            levels.insert(levels.end(), static_cast<size_t>(count), static_cast<int>(level - names.begin()));
    }
    if (sum != layers) fail("%s %s is for %ld layers; the model has %d", option, text, sum, layers);
    return levels;
}

// The level of each layer that --recompute says.
inline std::vector<int> recompute_levels(const std::string& text, int layers) {
    return parse_levels(text, recompute_names(), layers, "--recompute");
}
