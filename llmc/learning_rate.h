// learning_rate.h - the schedule of the learning rate.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#ifdef LLMC_COMMON
#error "compiled once for all builds, with other flags, a rate may have other bits"
#endif

// The learning rate at `step` of `steps`, counted from 0. It rises linearly to `peak` over `warmup` steps and
// then follows the schedule: "constant"; "cosine" or "linear", falling to `least` at the end; "wsd"
// (warm-up-stable-decay, Hu et al., arXiv:2404.06395), constant until the last fifth of the steps and then
// falling linearly.
inline double learning_rate(const std::string& schedule, int64_t step, int64_t steps, int64_t warmup,
                            double peak, double least) {
    if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
    int64_t start = warmup;
    if (schedule == "wsd") start = std::max(warmup, steps - std::max<int64_t>(1, steps / 5));
    if (schedule == "constant" || step < start) return peak;
    const double done =
        static_cast<double>(step - start) / static_cast<double>(std::max<int64_t>(1, steps - start));
    const double left = schedule == "cosine" ? 0.5 * (1.0 + std::cos(M_PI * done)) : 1.0 - done;
    return least + left * (peak - least);
}
