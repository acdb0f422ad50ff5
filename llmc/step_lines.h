// step_lines.h - decides for which steps training prints a line, and prints it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include "llmc/error.h"

struct StepFigures {
    int64_t step;  // from 0
    double loss, norm, rate, seconds;
    double waited = -1;  // of these, seconds waiting for streamed weights; negative: none are streamed
};

// Prints a line for each of the first steps, then one line per second or, if `every` is not 0, one for every
// `every`-th step. Printed steps are counted from 1, up to `steps`.
class StepLines {
  public:
    // A step's tokens and FLOPs. Utilization is relative to peak_flops per second.
    struct Amounts {
        double tokens, flops, peak_flops;
    };
    StepLines(FILE* to, int64_t first_step, int64_t steps, int64_t every, Amounts a_step)
        : to_(to), first_step_(first_step), steps_(steps), every_(every), a_step_(a_step) {}

    // Tokens of a step.
    double tokens() const { return a_step_.tokens; }
    // A step is done; `now` is the time in seconds on any clock.
    void add(const StepFigures& f, double now) {
        // The first steps are slower, because products are compiled and graphs recorded. The time left is
        // estimated from the others.
        const bool early = f.step < first_step_ + kFirst;
        seconds_per_step_ = early ? f.seconds : 0.9 * seconds_per_step_ + 0.1 * f.seconds;
        latest_ = f;
        now_ = now;
        if (early || (every_ > 0 ? (f.step + 1) % every_ == 0 : now >= printed_ + 1)) print_latest();
    }

    // Prints the line of the latest step if it was not printed: before other output, and at the end.
    void print_latest() {
        if (!latest_) return;
        const StepFigures f = *std::exchange(latest_, std::nullopt);
        const int64_t done = f.step + 1;
        const auto left = static_cast<int64_t>(seconds_per_step_ * static_cast<double>(steps_ - done));
        const std::string waited = f.waited < 0 ? "" : format(" | waited %.1f%%", 100 * f.waited / f.seconds);
        fprintf(to_,
                "step %5lld/%lld %5.1f%% | loss %.6f | norm %.4f | lr %.3e | %8.2f ms | %8.0f tok/s | MFU "
                "%4.1f%%%s | %lld:%02lld left\n",
                static_cast<long long>(done), static_cast<long long>(steps_),
                100.0 * static_cast<double>(done) / static_cast<double>(steps_), f.loss, f.norm, f.rate,
                f.seconds * 1e3, a_step_.tokens / f.seconds,
                100.0 * a_step_.flops / f.seconds / a_step_.peak_flops, waited.c_str(),
                static_cast<long long>(left / 60), static_cast<long long>(left % 60));
        fflush(to_);
        printed_ = now_;
    }

  private:
    static constexpr int64_t kFirst = 3;

    FILE* to_;
    int64_t first_step_, steps_, every_;
    Amounts a_step_;
    double seconds_per_step_ = 0;
    std::optional<StepFigures> latest_;  // the latest step, if its line was not printed
    double now_ = 0, printed_ = 0;       // when the latest step was done, and the one printed last
};
