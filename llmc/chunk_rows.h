// chunk_rows.h - chooses the rows of --chunk-rows auto: the fewest rows that the head, an MLP or attention may
// process at a time without making a step noticeably slower.
//
// Smaller chunks of rows need less memory. But each chunk adds to the gradients of matrices again (in bf16,
// slice by slice) and launches all operations of the head, the MLP or the block again. That is expensive if a
// step is short, above all on a GPU, and negligible if it is long.
//
// How rows are cut into chunks changes the rounding. A run shall have the same bits at every recompute level,
// in every format of the optimizer state and with any number of threads, so the choice depends on none of
// these. (Chunks of attention are an exception: only blocks of level block have them.) The step whose time is
// estimated is always the one in which chunks cost most:
// - For the head it has level none, which makes the shortest step. For MLP and attention it has the last
//   level, which keeps none of their activations; chunks keep none either.
// - It has no update.
// - A CPU is taken to have many threads (kChunkThreads), because a launch then takes longest compared with
//   the work.
// Chunks that cost little there cost less in other settings.
#pragma once

#include <algorithm>
#include <bit>
#include <string>

#include "llmc/memory_setting.h"
#include "llmc/solver.h"

// With fewer rows the CPU's matrix products are much slower than the estimates assume: a measured step of
// SmolLM2 took 13% longer with 64 rows, and 1% longer with 256.
constexpr int64_t kFewestHeadRows = 256;
// With fewer rows, products of 4096 channels do not fill an H100, and a CPU's products read and write more of
// the stream than they need.
constexpr int64_t kFewestMlpRows = kFastCpu ? 512 : 2048;
// All thread blocks of a chunk's attention take long, so that a partly filled last wave costs as much as a
// full one: 2048 rows of 32 heads make 512 thread blocks, which are 2.4 waves on an A100 and as slow as 3;
// 4096 rows make 4.7 waves.
constexpr int64_t kFewestAttentionRows = kFastCpu ? 1024 : 4096;
// With fewer than 32 heads, it takes more rows to make as many thread blocks.
inline int64_t fewest_attention_rows(int heads) {
    if (kFastCpu || heads >= 32) return kFewestAttentionRows;
    return kFewestAttentionRows * static_cast<int64_t>(std::bit_ceil(32u / static_cast<unsigned>(heads)));
}
constexpr double kChunkCost = 0.02;  // the share of a step's time that chunks may add
constexpr int kChunkThreads = 64;

// The estimated seconds of a micro-batch's operations, without those of updates during its backward.
inline double seconds_without_update(const Plan& plan, const Rates& rates) {
    double seconds = 0;
    for (const Work& w : plan.work)
        if (w.range.find("update") == std::string::npos) seconds += rates.seconds(w);
    return seconds;
}

// Returns the fewest rows at a time (`fewest` times a power of two) with which a step takes at most 2% longer
// than with all `rows` at once, or 0 if there are none such. seconds(few) estimates a step with `few` rows at
// a time; 0: all.
template <class Seconds>
int64_t choose_chunk_rows(int64_t rows, int64_t fewest, Seconds&& seconds) {
    if (rows <= fewest) return 0;
    const double most = (1 + kChunkCost) * seconds(0);
    for (int64_t few = fewest; few < rows; few *= 2)
        if (seconds(few) <= most) return few;
    return 0;
}

// Returns the setting with its automatic numbers of rows chosen, for a model of `layers` layers and `heads`
// heads and sequences of seq_len tokens; 0 if the run has no sequences. seconds(setting) estimates a step.
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
