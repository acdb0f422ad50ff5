// model_positions.h - the positions of a model: the factors that are on the device beside its weights; and
// its extension to longer sequences than it was trained on (--rope-scaling, --positions).
#pragma once

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdlib>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/families.h"

// ---- the factors of a model
//
// The numbers by which attention knows positions: inverse frequencies of rotary positions, or the slopes of
// ALiBi, attention with linear biases (Press et al. 2022), as in BLOOM. They are on the device beside the
// weights, but are not weights. The kernels that use them are rope.cuh and attention.cuh.

// The factor of cosines and sines: 1, except for `yarn`, whose 0.1 ln(factor) + 1 sharpens the softmax of
// long contexts (Peng et al., arXiv:2309.00071, section 3.4), and for `longrope` (Ding et al.,
// arXiv:2402.13753).
inline double attention_factor(const RopeScaling& s) {
    if (s.type != RopeType::kYarn && s.type != RopeType::kLongrope) return 1;
    if (s.attention_factor > 0) return s.attention_factor;
    if (s.type == RopeType::kLongrope)
        return s.factor > 1 ? std::sqrt(1 + std::log(s.factor) / std::log(s.original_max_position_embeddings))
                            : 1;
    const auto of = [&](double mscale) { return s.factor > 1 ? 0.1 * mscale * std::log(s.factor) + 1 : 1; };
    return s.mscale > 0 && s.mscale_all_dim > 0 ? of(s.mscale) / of(s.mscale_all_dim) : of(1);
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

// The angle, in radians, by which each position turns pair i of the head's pairs: theta^(-2i / channels that
// are rotated). `linear` divides it by the factor. `llama3` (Llama 3.1's apply_scaling) does so only for
// wavelengths that are long compared with the original context. `yarn` (arXiv:2309.00071, section 3.2) does
// so with a ramp over the pairs. `dynamic` uses a theta that grows with the length of the sequences, in
// tokens. `longrope` has a list of divisors for short sequences and another for long ones. The power and its
// inverse are rounded to fp32 as in `transformers`, because checkpoints were trained that way; at position
// 4000 the rounding changes the fourth digit of an angle.
inline std::vector<float> inverse_frequencies(int head_size, const RopeScaling& s, int length = 0) {
    head_size = s.rotated(head_size);
    const std::vector<double>& divisors =
        length <= s.original_max_position_embeddings ? s.short_factor : s.long_factor;
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
        if (s.type == RopeType::kLongrope)
            scaled = double{1.f / (static_cast<float>(divisors[static_cast<size_t>(i)]) * power)};
        frequencies.push_back(static_cast<float>(scaled));
    }
    return frequencies;
}

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

// How many channels of each head are rotated in a layer: none with other kinds of positions.
inline int rotated_channels(const ModelConfig& c, const LayerConfig& layer) {
    return c.family->position == PositionKind::Rotary ? layer.rope.rotated(layer.head_size) : 0;
}

// The factors of positions: an inverse frequency for each pair of channels that is rotated, (heads) slopes,
// or nothing for learned positions. If layers differ, those of each layer follow one another. `length` is the
// length of the run's sequences in tokens; only the scalings `dynamic` and `longrope` depend on it.
inline std::vector<float> position_factors(const ModelConfig& c, int length = 0) {
    std::vector<float> all;
    for (int l = 0; l < (c.uneven.empty() ? 1 : c.layers); l++) {
        std::vector<float> of_layer;
        if (c.family->position == PositionKind::Rotary)
            of_layer = inverse_frequencies(c.layer(l).head_size, c.layer(l).rope, length);
        if (c.family->position == PositionKind::Alibi) of_layer = alibi_slopes(c.layer(l).heads);
        all.insert(all.end(), of_layer.begin(), of_layer.end());
    }
    return all;
}
// Where the factors of a layer are among them: the first one, and how many.
inline std::pair<int64_t, int64_t> position_factors_of(const ModelConfig& c, int layer) {
    const auto count = [&](int l) -> int64_t {
        if (c.family->position == PositionKind::Rotary) return rotated_channels(c, c.layer(l)) / 2;
        return c.family->position == PositionKind::Alibi ? c.layer(l).heads : 0;
    };
    int64_t first = 0;
    for (int l = 0; !c.uneven.empty() && l < layer; l++) first += count(l);
    return {first, count(layer)};
}

// ---- longer sequences
//
// Extends a model to longer sequences than it was trained on: by scaling its rotary positions
// (--rope-scaling), or by adding learned ones (--positions).

// The length, in tokens, of the sequences that a model was trained on before its rotary positions were
// scaled. Files with `linear` only have that length times the factor.
inline int unscaled_positions(const ModelConfig& c) {
    const RopeType type = c.rope.type;
    if (type == RopeType::kLinear) return std::max(1, static_cast<int>(c.positions / c.rope.factor));
    const bool named = type == RopeType::kLlama3 || type == RopeType::kYarn || type == RopeType::kLongrope;
    return named ? c.rope.original_max_position_embeddings : c.positions;
}

// The factor of --rope-scaling, a power of two unless that is too much, that gives a model `positions`.
inline int64_t factor_for(const ModelConfig& c, int64_t positions) {
    int64_t factor = 2;
    while (factor * unscaled_positions(c) < positions) factor *= 2;
    return std::min<int64_t>(factor, kMostPositions / unscaled_positions(c));
}

// Parses --rope-scaling, as in "yarn:4". Everything except type and factor has its default. Fails if it is
// not of this form.
inline RopeScaling parse_rope_scaling(const std::string& asked) {
    const char* const given = asked.c_str();
    const size_t colon = std::min(asked.find(':'), asked.size());
    const std::string name = asked.substr(0, colon);
    RopeScaling rope;
    for (const RopeType type : {RopeType::kLinear, RopeType::kLlama3, RopeType::kYarn, RopeType::kDynamic})
        if (name == kRopeNames[static_cast<int>(type)]) rope.type = type;
    char* end = nullptr;
    rope.factor = strtod(given + std::min(colon + 1, asked.size()), &end);
    if (rope.type == RopeType::kDefault || *end || !(rope.factor > 1 && rope.factor <= 1e6))
        fail("--rope-scaling %s is yarn, dynamic, linear or llama3 with a factor above 1, as in yarn:4",
             given);
    return rope;
}

// Replaces a model's scaling by the one in `asked`. The factor is the maximum length of sequences divided by
// the length that the model was trained on without scaling. Fails if that is no longer than now, or if the
// model's positions are not rotary.
inline void scale_rope(ModelConfig& c, const std::string& asked) {
    const char* const given = asked.c_str();
    RopeScaling rope = parse_rope_scaling(asked);
    if (c.family->position != PositionKind::Rotary)
        fail("--rope-scaling %s: a %s has no rotary positions; %s", given, c.family->name,
             c.family->position == PositionKind::Learned ? "--positions N adds to learned ones"
                                                         : "its own, ALiBi's, have no end");
    if (c.rope.type == rope.type && c.rope.factor == rope.factor) return;
    const int unscaled = unscaled_positions(c);
    const double longest = std::floor(rope.factor * unscaled);
    if (longest > kMostPositions)
        fail("--rope-scaling %s: of the model's %d positions that makes more than 2^21", given, unscaled);
    if (longest <= c.longest() && c.rope.type != RopeType::kDefault)
        fail(
            "--rope-scaling %s: the model has %s:%g, %d positions, already; a factor counts from the %d "
            "before",
            given, kRopeNames[static_cast<int>(c.rope.type)], c.rope.factor, c.longest(), unscaled);
    if (rope.type == RopeType::kDynamic && c.head_size <= 2)
        fail("--rope-scaling %s: dynamic cannot scale heads of %d channels", given, c.head_size);
    rope.theta = c.rope.theta;
    rope.partial_rotary_factor = c.rope.partial_rotary_factor;
    rope.llama_4_scaling_beta = c.rope.llama_4_scaling_beta;
    if (rope.type != RopeType::kLinear) rope.original_max_position_embeddings = unscaled;
    // Layers of another rotation, such as those with a window in Gemma 3, keep it.
    for (LayerConfig& layer : c.uneven)
        if (layer.rope == c.rope) layer.rope = rope;
    c.rope = rope;
    // The factor of `dynamic` multiplies the positions in the file.
    c.positions = rope.type == RopeType::kDynamic ? unscaled : static_cast<int>(longest);
}

// Extends a model's learned positions to `positions`. Fails if it has more, or if its positions are not
// learned.
inline void grow_positions(ModelConfig& c, int positions) {
    if (c.family->position != PositionKind::Learned)
        fail("--positions %d: a %s has no learned positions; %s", positions, c.family->name,
             c.family->position == PositionKind::Rotary ? "--rope-scaling yarn:4 stretches rotary ones"
                                                        : "its own, ALiBi's, have no end");
    if (positions < c.positions)
        fail("--positions %d: the model has %d, and none is taken away", positions, c.positions);
    if (positions == c.positions) return;
    c.grown_from = c.positions;
    c.positions = positions;
}

// Applies --rope-scaling (empty: not given) and --positions (0: not given) to the model of a folder or file.
// A new model may have neither.
inline void lengthen(ModelConfig& c, const std::string& rope_scaling, int positions, bool is_new) {
    if (is_new && (!rope_scaling.empty() || positions > 0))
        fail("%s is for a model that was trained; a new one has the positions of its --seq-len",
             rope_scaling.empty() ? format("--positions %d", positions) : ("--rope-scaling " + rope_scaling));
    if (!rope_scaling.empty()) scale_rope(c, rope_scaling);
    if (positions > 0) grow_positions(c, positions);
}

// Reports how sequences are longer than in the model's files. `beside`: an adapter is trained and saved.
inline void print_longer_positions(FILE* to, const ModelConfig& c, const std::string& rope_scaling,
                                   bool beside) {
    if (!rope_scaling.empty())
        print(to, "--rope-scaling %s: sequences of up to %d tokens\n", rope_scaling, c.longest());
    if (c.grown_from > 0)
        print(to,
              "--positions %d: row j of the learned positions is that at j x %d / %d of the %d trained, "
              "linear between two\n",
              c.positions, c.grown_from - 1, c.positions - 1, c.grown_from);
    if (beside && (!rope_scaling.empty() || c.grown_from > 0))
        print(to, "an adapter's folder cannot say that: give the option with the adapter again\n");
}

// Row j of the `rows` rows that `trained` (M, columns) is stretched to: interpolated linearly between the
// trained rows around j (M - 1) / (rows - 1). The first and the last row stay the same.
inline std::vector<float> stretched_row(const std::vector<float>& trained, int64_t columns, int64_t j,
                                        int64_t rows) {
    const int64_t last = static_cast<int64_t>(trained.size()) / columns - 1;
    const int64_t low = j * last / (rows - 1), high = std::min(low + 1, last);
    const double share = static_cast<double>(j * last % (rows - 1)) / static_cast<double>(rows - 1);
    std::vector<float> row(static_cast<size_t>(columns));
    for (int64_t c = 0; c < columns; c++) {
        const double a = trained[static_cast<size_t>(low * columns + c)];
        const double b = trained[static_cast<size_t>(high * columns + c)];
        row[static_cast<size_t>(c)] = static_cast<float>(a + share * (b - a));
    }
    return row;
}
