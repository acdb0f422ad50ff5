// model_positions.h - the positions of a model: the factors that are on the device beside its weights; and
// its extension to longer sequences than it was trained on (--rope-scaling, --positions).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "llmc/families.h"
#include "llmc/position_factors.h"

// ---- the factors of a model
//
// The numbers by which attention knows positions: inverse frequencies of rotary positions, or ALiBi's slopes.
// They are on the device beside the weights, but are not weights.

// (head_size / 2) inverse frequencies, (heads) slopes, or nothing for learned positions. `length` is the
// length of the run's sequences in tokens; only the scaling `dynamic` depends on it.
inline std::vector<float> position_factors(const ModelConfig& c, int length = 0) {
    if (c.family->position == PositionKind::Rotary) return inverse_frequencies(c.head_size, c.rope, length);
    if (c.family->position == PositionKind::Alibi) return alibi_slopes(c.heads);
    return {};
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
    const bool named = type == RopeType::kLlama3 || type == RopeType::kYarn;
    return named ? c.rope.original_max_position_embeddings : c.positions;
}

// The smallest power of two that, as the factor of --rope-scaling, gives the model `positions` positions.
inline int64_t factor_for(const ModelConfig& c, int64_t positions) {
    int64_t factor = 2;
    while (factor * unscaled_positions(c) < positions) factor *= 2;
    return factor;
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
        fail("--rope-scaling %s: is yarn, dynamic, linear or llama3 with a factor above 1, as in yarn:4",
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
    if (rope.type != RopeType::kLinear) rope.original_max_position_embeddings = unscaled;
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
        fail("%s: is for a model that was trained; a new one has the positions of its --seq-len",
             rope_scaling.empty() ? format("--positions %d", positions).c_str()
                                  : ("--rope-scaling " + rope_scaling).c_str());
    if (!rope_scaling.empty()) scale_rope(c, rope_scaling);
    if (positions > 0) grow_positions(c, positions);
}

// Reports how sequences are longer than in the model's files. `beside`: an adapter is trained and saved.
inline void print_longer_positions(FILE* to, const ModelConfig& c, const std::string& rope_scaling,
                                   bool beside) {
    if (!rope_scaling.empty())
        fprintf(to, "--rope-scaling %s: sequences of up to %d tokens\n", rope_scaling.c_str(), c.longest());
    if (c.grown_from > 0)
        fprintf(to,
                "--positions %d: row j of the learned positions is that at j x %d / %d of the %d trained, "
                "linear between two\n",
                c.positions, c.grown_from - 1, c.positions - 1, c.grown_from);
    if (beside && (!rope_scaling.empty() || c.grown_from > 0))
        fprintf(to, "an adapter's folder cannot say that: give the option with the adapter again\n");
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
