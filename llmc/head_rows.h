// head_rows.h - --head-rows auto: as few rows with logits at a time as cost next to nothing.
//
// Each chunk of rows adds to the gradient of the logits' matrix, in bf16 in slices of it, and launches all of
// the head again. That is dear where a step is short, on a GPU above all, and nothing where it is long.
//
// How the head is cut changes the rounding of a training. So that a run has the same bits at every level of
// recompute, with any state and any number of threads, none of these has a say: the step is that of level
// none, the shortest, without its update, and a CPU is taken to have many threads, beside whose rates a
// launch takes longest. What costs little then costs less with others.
#pragma once

#include <string>

#include "llmc/solver.h"

// With fewer the CPU's products are far from the rate that estimates take: with 64 rows a step of SmolLM2
// took 13% longer by the clock, with 256 1%.
constexpr int64_t kFewestHeadRows = 256;
constexpr double kHeadRowsCost = 0.02;  // of a step
constexpr int kHeadRowsThreads = 64;

// The seconds of a micro-batch's operations but for those of an update in its backward.
inline double seconds_without_update(const Plan& plan, const DeviceRates& rates) {
    double seconds = 0;
    for (const Work& w : plan.work)
        if (w.range.find("update") == std::string::npos) seconds += seconds_of(w, rates);
    return seconds;
}

// The fewest of `rows`, of the powers of two from 256 on, with which a step takes at most 2% longer than with
// all at once, which is 0. seconds(head_rows) estimates a step.
template <class Seconds>
int64_t choose_head_rows(int64_t rows, Seconds&& seconds) {
    if (rows <= kFewestHeadRows) return 0;
    const double most = (1 + kHeadRowsCost) * seconds(0);
    for (int64_t few = kFewestHeadRows; few < rows; few *= 2)
        if (seconds(few) <= most) return few;
    return 0;
}
