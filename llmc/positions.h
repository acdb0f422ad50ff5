// positions.h - the numbers by which a model's attention knows positions: the inverse frequencies of rotary
// ones, or ALiBi's slopes. They lie on the device beside the weights, and are no weights.
#pragma once

#include "llmc/alibi.h"
#include "llmc/families.h"

// (head_size / 2) inverse frequencies, (heads) slopes, or none where positions are learned. `length` is that
// of the run's sequences, in tokens, by which alone the scaling `dynamic` goes.
inline std::vector<float> position_factors(const ModelConfig& c, int length = 0) {
    if (c.family->position == PositionKind::Rotary) return inverse_frequencies(c.head_size, c.rope, length);
    if (c.family->position == PositionKind::Alibi) return alibi_slopes(c.heads);
    return {};
}
