// positions.h - the numbers by which attention knows positions: inverse frequencies of rotary positions, or
// ALiBi's slopes. They are on the device beside the weights, but are not weights.
#pragma once

#include "llmc/alibi.h"
#include "llmc/families.h"

// (head_size / 2) inverse frequencies, (heads) slopes, or nothing for learned positions. `length` is the
// length of the run's sequences in tokens; only the scaling `dynamic` depends on it.
inline std::vector<float> position_factors(const ModelConfig& c, int length = 0) {
    if (c.family->position == PositionKind::Rotary) return inverse_frequencies(c.head_size, c.rope, length);
    if (c.family->position == PositionKind::Alibi) return alibi_slopes(c.heads);
    return {};
}
