// sample_token.h - chooses the next token of a text from the model's logits, as generate() of `transformers`
// does: a penalty for tokens that the text has already, then temperature, top-k, top-p and min-p, in this
// order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <vector>

struct Sampling {
    double temperature = 0.8;       // 0: always the likeliest token
    int top_k = 50;                 // draws among the likeliest; 0: among all
    double top_p = 1;               // among the likeliest that have this probability together
    double min_p = 0;               // among those with this share of the likeliest one's probability
    double repetition_penalty = 1;  // of tokens that the text has
};

// Makes tokens that are in the text less likely (or more, if the penalty is below 1): divides a positive
// logit by the penalty, and multiplies another with it.
inline void penalize_repetition(std::vector<float>& logits, const std::vector<int>& text, double penalty) {
    if (penalty == 1) return;
    const float factor = static_cast<float>(penalty);
    std::vector<bool> done(logits.size());
    for (const int token : text) {
        const auto i = static_cast<size_t>(token);
        if (token < 0 || i >= logits.size() || done[i]) continue;
        logits[i] = logits[i] < 0 ? logits[i] * factor : logits[i] / factor;
        done[i] = true;
    }
}

// A token that may be drawn. Its weight is its probability over the likeliest token's.
struct Candidate {
    int token;
    float logit;  // over the temperature
    double weight;
};

// The tokens among which the next one is drawn, likeliest first; of equal logits the lower token comes first.
// All tokens whose logit equals that of the last one of the top_k are kept, as in `transformers`.
inline std::vector<Candidate> candidates(const std::vector<float>& logits, const Sampling& s) {
    const auto likelier = [](const Candidate& a, const Candidate& b) {
        return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
    };
    if (s.temperature <= 0) {
        const auto most = std::ranges::max_element(logits);
        return {{static_cast<int>(most - logits.begin()), *most, 1}};
    }
    std::vector<float> scaled(logits);
    for (float& logit : scaled) logit /= static_cast<float>(s.temperature);
    float least = -INFINITY;
    if (s.top_k > 0 && static_cast<size_t>(s.top_k) < scaled.size()) {
        std::vector<float> sorted(scaled);
        const auto last = sorted.begin() + s.top_k - 1;
        std::nth_element(sorted.begin(), last, sorted.end(), std::greater<float>());
        least = *last;
    }
    std::vector<Candidate> kept;
    for (size_t i = 0; i < scaled.size(); i++)
        if (scaled[i] >= least) kept.push_back({static_cast<int>(i), scaled[i], 0});
    std::ranges::sort(kept, likelier);
    double total = 0;
    for (Candidate& c : kept) total += c.weight = std::exp(double{c.logit} - double{kept[0].logit});
    double left_out = 0;
    while (s.top_p < 1 && kept.size() > 1) {
        left_out += kept.back().weight;
        if (left_out > (1 - s.top_p) * total) break;
        kept.pop_back();
    }
    while (kept.size() > 1 && kept.back().weight < s.min_p) kept.pop_back();
    return kept;
}

// Draws a token with the random number `uniform` in [0, 1).
inline int sample_token(const std::vector<float>& logits, const Sampling& s, double uniform) {
    const std::vector<Candidate> kept = candidates(logits, s);
    double left = 0;
    for (const Candidate& c : kept) left += c.weight;
    left *= uniform;
    for (const Candidate& c : kept)
        if ((left -= c.weight) < 0) return c.token;
    return kept.back().token;
}
