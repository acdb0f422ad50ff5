// plan_free_memory.h - compares a plan with the free memory: how much a run may take, and the upper limits of
// --batch auto.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "llmc/device.h"
#include "llmc/plan_report.h"
#include "llmc/plan_solver.h"
#include "llmc/ranks.h"
#include "llmc/run_config.h"
#include "llmc/text.h"

// The limits of --batch auto: the most tokens that train well in one micro-batch, and the fewest steps that
// an epoch should have.
constexpr int64_t kMostAutoTokens = 1 << 16;
constexpr int64_t kLeastStepsOfAnEpoch = 10;

// The most sequences that --batch auto may choose, and the reason for this limit.
struct BatchCap {
    int64_t sequences;
    const char* why;
};

// `epoch`: the number of the data's sequences, if there are data.
inline BatchCap batch_cap(int64_t seq_len, std::optional<uint64_t> epoch) {
    const int64_t by_tokens = kMostAutoTokens / seq_len;
    const int64_t by_data =
        epoch ? static_cast<int64_t>(std::min<uint64_t>(*epoch / kLeastStepsOfAnEpoch, INT32_MAX))
              : INT32_MAX;
    const BatchCap cap = by_data < by_tokens ? BatchCap{by_data, "a tenth of the data"}
                                             : BatchCap{by_tokens, "64 Ki tokens, the most that it takes"};
    return {std::max<int64_t>(1, cap.sequences), cap.why};
}

// The memory that a plan may use, as found by the first call. Call it before a search over settings, whose
// own memory is later reused by the run. On a CPU it includes what the process already has, because a plan
// counts all of that.
inline const std::vector<MemoryLimit>& limits_at_start() {
    static const std::vector<MemoryLimit> limits = memory_limits();
    return limits;
}
inline const FreeMemory& memory_free_at_start() {
    static const FreeMemory free =
        kHostIsDevice ? host_memory_in_all(limits_at_start()) : device_memory_free();
    return free;
}

// If ranks on other machines, or with other GPUs, may use less than this one: how much of the device, and of
// files. The first rank, which chooses for all of them, learns it from them (ranks_agree.h).
struct LeastOfRanks {
    FreeMemory device;
    size_t files = SIZE_MAX;
};
inline LeastOfRanks least_of_ranks;

// Measures now what memory_free_at_start() returns from then on.
inline void measure_free_memory() { memory_free_at_start(); }

// What one of the ranks on this machine may use: an equal share, on a GPU all of its own.
inline FreeMemory memory_of_rank(const Rank& rank) {
    if (!kHostIsDevice || rank.on_this_machine == 1) return memory_free_at_start();
    return host_memory_in_all(shared_limits(limits_at_start(), rank.on_this_machine));
}

// What a run, or the run that is planned, may use, and what its context takes of the device.
inline FreeMemory memory_free_for(const RunConfig& o) {
    return o.planned_gpu ? free_memory_of(*o.planned_gpu) : memory_of_rank(o.rank);
}
inline size_t context_bytes_of(const RunConfig& o) {
    return o.planned_gpu ? cuda_context_bytes(*o.planned_gpu) : context_bytes();
}

// The bytes that --memory allows each rank, or its share of what is left of them on this machine.
inline FreeMemory budget_of(const std::string& memory, const Rank& rank) {
    FreeMemory budget{parse_bytes(memory, "--memory"), ""};
    if (kHostIsDevice)
        budget = available_of(budget.bytes, shared_limits(limits_at_start(), rank.on_this_machine));
    budget.at_most(least_of_ranks.device.bytes, least_of_ranks.device.limit);
    return budget;
}

// If less is left than --memory says, says so.
inline std::string describe_budget(const std::string& memory, const FreeMemory& budget) {
    if (budget.limit.empty()) return memory;
    return format("%s, of which %zu MiB are left (%s)", memory, budget.bytes >> 20, budget.limit);
}

// How much a run will still take of memory_free_at_start(), which was measured when the GPU's context
// existed.
inline size_t still_to_take(const MemoryReport& r) { return r.total() - r.context; }

inline std::string describe_shortage(const MemoryReport& r, const FreeMemory& free) {
    return format("the plan takes %.1f MiB and %.1f are free (%s)", mebibytes(still_to_take(r)),
                  mebibytes(free.bytes), free.limit);
}

// What the message about too little memory suggests: --memory chooses settings of a training only.
enum class Suggest { MemoryOption, SmallerRun };

// Fails if the plan takes more than is free or, with a GPU, pins more memory than the host has free. A GPU
// that uses the host's memory leaves less of it to pin.
inline void require_memory(const MemoryReport& r, const FreeMemory& free, Suggest suggest) {
    if (!kHostIsDevice) {
        FreeMemory host = host_memory_free();
        const size_t pinned = r.pinned_on_a_machine();
        if (gpu_shares_host_memory() && pinned > 0 && still_to_take(r) <= host.bytes) {
            host.bytes -= still_to_take(r);
            host.limit += ", beside what the GPU takes of it";
        }
        if (pinned > host.bytes)
            fail(
                "the plan pins %.1f MiB of host memory%s and %.1f are free (%s); smaller: --batch or "
                "--seq-len, or more that stays on the device or goes to a disk",
                mebibytes(pinned),
                r.ranks.on_a_machine > 1 ? format(" for %d ranks", r.ranks.on_a_machine) : "",
                mebibytes(host.bytes), host.limit);
    }
    if (still_to_take(r) <= free.bytes) return;
    const size_t budget = with_reserve(free, r.context).bytes;
    const std::string chosen = suggest == Suggest::MemoryOption && budget > r.process
                                   ? format("--memory %zuMiB chooses what fits, or ", budget >> 20)
                                   : "";
    fail("%s; smaller: %sa smaller %s", describe_shortage(r, free), chosen,
         r.train->takes.empty() ? "--model" : "--batch, --seq-len or --model");
}

// For a plan that is only printed: says on stderr that it would not fit.
inline void remark_shortage(const MemoryReport& r) {
    if (!kHostIsDevice) return;  // a plan can be printed without a GPU
    const FreeMemory free = memory_of_rank({0, r.ranks.devices, r.ranks.on_a_machine});
    if (still_to_take(r) > free.bytes) print(stderr, "here %s\n", describe_shortage(r, free));
}
