// chunk_rows.h - --head-rows auto, --mlp-rows auto and --attention-rows auto: as few rows with logits, in an
// MLP, or in attention, at a time as cost next to nothing.
//
// Each chunk of rows adds to the gradients of matrices, in bf16 in slices of them, and launches all of the
// head, of an MLP or of a block again. That is dear where a step is short, on a GPU above all, and nothing
// where it is long.
//
// How rows are cut changes the rounding of a training. So that a run has the same bits at every level of
// recompute (but for chunks of attention, which only blocks of level block have), with any state and any
// number of threads, none of these has a say: for the head the step is that
// of level none, the shortest, for the others, of which chunks keep nothing, of the level that keeps nothing
// of them either; without its update, and a CPU is taken to have many threads, beside whose rates a launch
// takes longest. What costs little then costs less with others.
#pragma once

#include <algorithm>
#include <bit>
#include <string>

#include "llmc/memory_setting.h"
#include "llmc/solver.h"

// With fewer the CPU's products are far from the rate that estimates take: with 64 rows a step of SmolLM2
// took 13% longer by the clock, with 256 1%.
constexpr int64_t kFewestHeadRows = 256;
// With fewer an H100's products of 4096 channels do not fill it, and a CPU's write and read more of the
// stream than they need.
constexpr int64_t kFewestMlpRows = kFastCpu ? 512 : 2048;
// Attention's thread blocks all take long there: 2048 rows of 32 heads make 512, which an A100 runs in 2.4
// rounds, as slow as 3; 4096 rows take 4.7.
constexpr int64_t kFewestAttentionRows = kFastCpu ? 1024 : 4096;
// Where heads are fewer than 32, as many thread blocks take more rows.
inline int64_t fewest_attention_rows(int heads) {
    if (kFastCpu || heads >= 32) return kFewestAttentionRows;
    return kFewestAttentionRows * static_cast<int64_t>(std::bit_ceil(32u / static_cast<unsigned>(heads)));
}
constexpr double kChunkCost = 0.02;  // of a step
constexpr int kChunkThreads = 64;

// The seconds of a micro-batch's operations but for those of an update in its backward.
inline double seconds_without_update(const Plan& plan, const Rates& rates) {
    double seconds = 0;
    for (const Work& w : plan.work)
        if (w.range.find("update") == std::string::npos) seconds += rates.seconds(w);
    return seconds;
}

// The fewest of `rows`, of the powers of two from `fewest` on, with which a step takes at most 2% longer than
// with all at once, which is 0. seconds(few) estimates a step.
template <class Seconds>
int64_t choose_chunk_rows(int64_t rows, int64_t fewest, Seconds&& seconds) {
    if (rows <= fewest) return 0;
    const double most = (1 + kChunkCost) * seconds(0);
    for (int64_t few = fewest; few < rows; few *= 2)
        if (seconds(few) <= most) return few;
    return 0;
}

// The setting with what is automatic in it chosen, for a model of so many layers and heads and sequences of
// so many tokens, 0 where a run has none. seconds(setting) estimates a step.
template <class Seconds>
MemorySetting with_chosen_rows(MemorySetting s, int64_t seq_len, size_t layers, int heads,
                               Seconds&& seconds) {
    MemorySetting trial = s;
    trial.attention_rows = trial.head_rows = 0;  // until they are chosen too
    const auto choose = [&](int64_t MemorySetting::*rows, int64_t all, int64_t fewest, int level) {
        if (s.*rows < 0) {
            trial.levels.assign(layers, level);
            s.*rows = choose_chunk_rows(all, fewest, [&](int64_t few) {
                trial.*rows = few;
                return seconds(trial);
            });
        }
        trial.*rows = s.*rows;
    };
    choose(&MemorySetting::mlp_rows, s.batch * seq_len, kFewestMlpRows, kLastLevel);
    choose(&MemorySetting::attention_rows, seq_len, fewest_attention_rows(heads), kLastLevel);
    choose(&MemorySetting::head_rows, s.batch * seq_len, kFewestHeadRows, 0);
    return s;
}
