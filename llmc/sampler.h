// sampler.h - chooses the next token from logits.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

// Draws an index from softmax(logits / temperature) over the top_k likeliest (0: all), with the random number
// `uniform` in [0, 1). Temperature 0 gives the likeliest. Of equal logits the lower index counts as likelier.
inline int sample_token(const std::vector<float>& logits, double temperature, int top_k, double uniform) {
    std::vector<int> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    const auto likelier = [&](int a, int b) {
        const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
        return x != y ? x > y : a < b;
    };
    size_t kept = top_k > 0 ? std::min<size_t>(static_cast<size_t>(top_k), order.size()) : order.size();
    if (temperature <= 0) kept = 1;
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                      likelier);
    if (kept == 1) return order[0];
    std::vector<double> weights(kept);
    const double most = logits[static_cast<size_t>(order[0])];
    double total = 0;
    for (size_t i = 0; i < kept; i++)
        total += weights[i] = std::exp((logits[static_cast<size_t>(order[i])] - most) / temperature);
    double left = uniform * total;
    for (size_t i = 0; i < kept; i++)
        if ((left -= weights[i]) < 0) return order[i];
    return order[kept - 1];
}
