// alibi.h - the slopes of ALiBi, attention with linear biases (Press et al. 2022), as in BLOOM.
#pragma once

#include <cmath>
#include <vector>

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
