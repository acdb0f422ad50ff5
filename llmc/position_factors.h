// position_factors.h - the numbers by which attention knows positions: the inverse frequencies of rotary
// positions, and the slopes of ALiBi. The kernels that use them are rope.cuh and attention.cuh.
#pragma once

#include <algorithm>
#include <cassert>
#include <cmath>
#include <numbers>
#include <vector>

// ---- rotary positions
//
// The inverse frequencies of rotary position embedding, with the scaling in a model's configuration.

enum class RopeType { kDefault, kLinear, kLlama3, kYarn, kDynamic };
inline constexpr const char* kRopeNames[] = {"default", "linear", "llama3", "yarn", "dynamic"};

// The fields are named as in `rope_parameters` of a config.json. The defaults for `llama3` are those of Llama
// 3.1. Lengths are in tokens.
struct RopeScaling {
    RopeType type = RopeType::kDefault;
    double theta = 10000;
    double factor = 8;  // maximum context length over that of training; not for kDefault
    double low_freq_factor = 1, high_freq_factor = 4;  // only llama3
    // Only llama3, yarn and dynamic: the context length of training, which files with `dynamic` call
    // max_position_embeddings.
    int original_max_position_embeddings = 8192;
    // Only yarn. A pair that makes more than beta_fast turns in the original context is not scaled, and one
    // that makes fewer than beta_slow is divided by the factor. truncate: round these limits to whole pairs.
    double beta_fast = 32, beta_slow = 1;
    bool truncate = true;
    // Cosines and sines are multiplied by attention_factor; if it is 0, it follows from factor and, if both
    // are set, from mscale and mscale_all_dim.
    double attention_factor = 0, mscale = 0, mscale_all_dim = 0;

    bool operator==(const RopeScaling&) const = default;
};

// The factor of cosines and sines: 1, except for `yarn`, whose 0.1 ln(factor) + 1 sharpens the softmax of
// long contexts (Peng et al., arXiv:2309.00071, section 3.4).
inline double attention_factor(const RopeScaling& s) {
    if (s.type != RopeType::kYarn) return 1;
    if (s.attention_factor > 0) return s.attention_factor;
    const auto of = [&](double mscale) { return s.factor > 1 ? 0.1 * mscale * std::log(s.factor) + 1 : 1; };
    return s.mscale > 0 && s.mscale_all_dim > 0 ? of(s.mscale) / of(s.mscale_all_dim) : of(1);
}

// The longest sequence of a model whose file has `positions` as max_position_embeddings. The factors of yarn
// and dynamic extend it.
inline double stretched_positions(const RopeScaling& s, int positions) {
    if (s.type != RopeType::kYarn && s.type != RopeType::kDynamic) return positions;
    return std::max<double>(positions, std::floor(s.factor * s.original_max_position_embeddings));
}

// The base of the angles that `dynamic` uses for sequences of `length` tokens. The more they exceed the
// length of training, the slower the pairs turn. Computed in fp32 as in `transformers`.
inline double dynamic_theta(int head_size, const RopeScaling& s, int length) {
    if (length <= s.original_max_position_embeddings) return s.theta;
    const float longer = static_cast<float>(s.factor) * static_cast<float>(length) /
                             static_cast<float>(s.original_max_position_embeddings) -
                         static_cast<float>(s.factor - 1);
    const double power = static_cast<double>(head_size) / (head_size - 2);
    return double{static_cast<float>(s.theta) * static_cast<float>(std::pow(double{longer}, power))};
}

// The share of `yarn`'s pair i that is divided by the factor: it grows from 0 to 1 between the pairs that
// turn beta_fast and beta_slow times in the original context.
inline float yarn_ramp(int head_size, const RopeScaling& s, int i) {
    const auto pair_of = [&](double turns) {
        return head_size * std::log(s.original_max_position_embeddings / (turns * 2 * std::numbers::pi)) /
               (2 * std::log(s.theta));
    };
    double low = pair_of(s.beta_fast), high = pair_of(s.beta_slow);
    if (s.truncate) low = std::floor(low), high = std::ceil(high);
    low = std::max(low, 0.0), high = std::min(high, head_size - 1.0);
    if (low == high) high += 0.001;
    return std::clamp((static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.f,
                      1.f);
}

// The angle, in radians, by which each position turns pair i of the head_size / 2 pairs: theta^(-2i /
// head_size). `linear` divides it by the factor. `llama3` (Llama 3.1's apply_scaling) does so only for
// wavelengths that are long compared with the original context. `yarn` (arXiv:2309.00071, section 3.2) does
// so with a ramp over the pairs. `dynamic` uses a theta that grows with the length of the sequences, in
// tokens. The power and its inverse are rounded to fp32 as in `transformers`, because checkpoints were
// trained that way; at position 4000 the rounding changes the fourth digit of an angle.
inline std::vector<float> inverse_frequencies(int head_size, const RopeScaling& s, int length = 0) {
    assert(head_size % 2 == 0);
    const double theta = s.type == RopeType::kDynamic ? dynamic_theta(head_size, s, length) : s.theta;
    std::vector<float> frequencies;
    for (int i = 0; i < head_size / 2; i++) {
        const float exponent = static_cast<float>(2 * i) / static_cast<float>(head_size);
        const float power = static_cast<float>(std::pow(theta, double{exponent}));
        const double inverse = 1.f / power;
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
        if (s.type == RopeType::kYarn) {
            const float kept = 1.f - yarn_ramp(head_size, s, i);
            const float divided = 1.f / (static_cast<float>(s.factor) * power);
            scaled = double{divided * (1.f - kept)} + double{1.f / power * kept};
        }
        frequencies.push_back(static_cast<float>(scaled));
    }
    return frequencies;
}

// ---- ALiBi
//
// The slopes of ALiBi, attention with linear biases (Press et al. 2022), as in BLOOM.

// The slope of each head. With n the largest power of two up to `heads`, the first n slopes are the powers of
// 2^(-8/n) from the first to the n-th. Further heads have the odd powers of 2^(-4/n), which are between those
// (transformers' build_alibi_tensor).
inline std::vector<float> alibi_slopes(int heads) {
    int n = 1;
    while (2 * n <= heads) n *= 2;
    std::vector<float> slopes;
    for (int h = 0; h < heads; h++)
        slopes.push_back(static_cast<float>(h < n ? std::exp2(-8. * (h + 1) / n)
                                                  : std::exp2(-4. * (2 * (h - n) + 1) / n)));
    return slopes;
}
