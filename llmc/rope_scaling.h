// rope_scaling.h - the inverse frequencies of rotary position embedding, as a model's configuration scales
// them.
#pragma once

#include <cassert>
#include <cmath>
#include <numbers>
#include <vector>

enum class RopeType { kDefault, kLinear, kLlama3 };

// As `rope_parameters` of a config.json has it; the factors are those of Llama 3.1. Lengths are in tokens.
struct RopeScaling {
    RopeType type = RopeType::kDefault;
    double theta = 10000;
    double factor = 8;  // linear, llama3: how many times as long as that of training a context may be
    double low_freq_factor = 1, high_freq_factor = 4;  // llama3 alone, as is the length
    int original_max_position_embeddings = 8192;

    bool operator==(const RopeScaling&) const = default;
};

// The angle, in radians, by which each position turns pair i of the head_size / 2: theta^(-2i / head_size),
// by `linear` divided by the factor, by `llama3` (Llama 3.1's apply_scaling) only where the wavelength is
// long beside the original context. The power and its inverse are rounded to fp32 as in `transformers`, with
// which checkpoints were trained: at position 4000 an angle feels it in its fourth digit.
inline std::vector<float> inverse_frequencies(int head_size, const RopeScaling& s) {
    assert(head_size % 2 == 0);
    std::vector<float> frequencies;
    for (int i = 0; i < head_size / 2; i++) {
        const float exponent = static_cast<float>(2 * i) / static_cast<float>(head_size);
        const double inverse = 1.f / static_cast<float>(std::pow(s.theta, double{exponent}));
        double scaled = inverse;
        if (s.type == RopeType::kLinear) scaled = inverse / s.factor;
        if (s.type == RopeType::kLlama3) {
            const double waves = s.original_max_position_embeddings * inverse / (2 * std::numbers::pi);
            const double smooth = (waves - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
            if (waves < s.low_freq_factor)
                scaled = inverse / s.factor;
            else if (waves <= s.high_freq_factor)
                scaled = (1 - smooth) * inverse / s.factor + smooth * inverse;
        }
        frequencies.push_back(static_cast<float>(scaled));
    }
    return frequencies;
}
