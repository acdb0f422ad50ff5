// rope_scaling.h - the inverse frequencies of rotary position embedding, as a model's configuration scales
// them.
#pragma once

#include <algorithm>
#include <cassert>
#include <cmath>
#include <numbers>
#include <vector>

enum class RopeType { kDefault, kLinear, kLlama3, kYarn, kDynamic };
inline constexpr const char* kRopeNames[] = {"default", "linear", "llama3", "yarn", "dynamic"};

// As `rope_parameters` of a config.json has it; the factors of `llama3` are those of Llama 3.1. Lengths are
// in tokens.
struct RopeScaling {
    RopeType type = RopeType::kDefault;
    double theta = 10000;
    double factor = 8;  // but for the default: how many times as long as that of training a context may be
    double low_freq_factor = 1, high_freq_factor = 4;  // llama3 alone
    // The length of training: of llama3, yarn and dynamic, which files of the last call
    // max_position_embeddings.
    int original_max_position_embeddings = 8192;
    // yarn alone: turns in the original context from which on a pair stays as it is, and below which it is
    // divided by the factor; whether the pairs where that is are rounded to whole ones.
    double beta_fast = 32, beta_slow = 1;
    bool truncate = true;
    // What cosines and sines are multiplied with; 0: as the factor and, where both are set, the two others
    // say.
    double attention_factor = 0, mscale = 0, mscale_all_dim = 0;

    bool operator==(const RopeScaling&) const = default;
};

// What cosines and sines are multiplied with: 1 but for `yarn`, whose 0.1 ln(factor) + 1 sharpens the softmax
// of long contexts (Peng et al., arXiv:2309.00071, section 3.4).
inline double attention_factor(const RopeScaling& s) {
    if (s.type != RopeType::kYarn) return 1;
    if (s.attention_factor > 0) return s.attention_factor;
    const auto of = [&](double mscale) { return s.factor > 1 ? 0.1 * mscale * std::log(s.factor) + 1 : 1; };
    return s.mscale > 0 && s.mscale_all_dim > 0 ? of(s.mscale) / of(s.mscale_all_dim) : of(1);
}

// The longest sequence of a model whose file says max_position_embeddings: yarn's and dynamic's factors reach
// beyond it.
inline double stretched_positions(const RopeScaling& s, int positions) {
    if (s.type != RopeType::kYarn && s.type != RopeType::kDynamic) return positions;
    return std::max<double>(positions, std::floor(s.factor * s.original_max_position_embeddings));
}

// The base by which `dynamic` turns a sequence of so many tokens: the longer it is beyond the length of
// training, the slower the pairs turn. In fp32, as `transformers` has it then.
inline double dynamic_theta(int head_size, const RopeScaling& s, int length) {
    if (length <= s.original_max_position_embeddings) return s.theta;
    const float longer = static_cast<float>(s.factor) * static_cast<float>(length) /
                             static_cast<float>(s.original_max_position_embeddings) -
                         static_cast<float>(s.factor - 1);
    const double power = static_cast<double>(head_size) / (head_size - 2);
    return double{static_cast<float>(s.theta) * static_cast<float>(std::pow(double{longer}, power))};
}

// The share of `yarn`'s pair i that is divided by the factor: from none to all of it between the pairs that
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

// The angle, in radians, by which each position turns pair i of the head_size / 2: theta^(-2i / head_size),
// by `linear` divided by the factor, by `llama3` (Llama 3.1's apply_scaling) only where the wavelength is
// long beside the original context, by `yarn` (arXiv:2309.00071, section 3.2) with a ramp over the pairs; by
// `dynamic` with a theta that grows with the length of the sequences, in tokens. The power and its inverse
// are rounded to fp32 as in `transformers`, with which checkpoints were trained: at position 4000 an angle
// feels it in its fourth digit.
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
