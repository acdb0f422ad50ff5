// enough_memory.h - the plan beside what is free: what a run may not exceed, and how much --batch auto takes.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "llmc/device.h"
#include "llmc/report.h"
#include "llmc/solver.h"

// What --batch auto takes at most: as many tokens as train well in one micro-batch, and as many sequences of
// the data as leave ten steps to an epoch.
constexpr int64_t kMostAutoTokens = 1 << 16;
constexpr int64_t kLeastStepsOfAnEpoch = 10;

// The most sequences that --batch auto may choose, and why no more.
struct BatchCap {
    int64_t sequences;
    const char* why;
};

// `epoch`: the data's sequences, where there are data.
inline BatchCap batch_cap(int64_t seq_len, std::optional<uint64_t> epoch) {
    const int64_t by_tokens = kMostAutoTokens / seq_len;
    const int64_t by_data =
        epoch ? static_cast<int64_t>(std::min<uint64_t>(*epoch / kLeastStepsOfAnEpoch, INT32_MAX))
              : INT32_MAX;
    const BatchCap cap = by_data < by_tokens ? BatchCap{by_data, "a tenth of the data"}
                                             : BatchCap{by_tokens, "64 Ki tokens, the most that it takes"};
    return {std::max<int64_t>(1, cap.sequences), cap.why};
}

// What there is for a plan at the first call: before a search over settings, whose own memory serves the run
// later. On a CPU that is what is free and what the process has already, as a plan counts all of that.
inline const std::vector<MemoryLimit>& limits_at_start() {
    static const std::vector<MemoryLimit> limits = memory_limits();
    return limits;
}
inline const FreeMemory& memory_free_at_start() {
    static const FreeMemory free =
        kHostIsDevice ? host_memory_in_all(limits_at_start()) : device_memory_free();
    return free;
}

// What --memory may choose within: as many bytes as it says, or what is left of them here.
inline FreeMemory budget_of(const std::string& memory) {
    const size_t bytes = parse_bytes(memory, "--memory");
    if (!kHostIsDevice) return {bytes, ""};
    return available_of(bytes, limits_at_start());
}

// Where that is less, says so.
inline std::string describe_budget(const std::string& memory, const FreeMemory& budget) {
    if (budget.limit.empty()) return memory;
    return format("%s, of which %zu MiB are left (%s)", memory.c_str(), budget.bytes >> 20,
                  budget.limit.c_str());
}

// What is free with some room left, of a device that has lent `context` to this process already.
inline FreeMemory with_reserve(const FreeMemory& free, size_t context) {
    return {free.bytes / 20 * 19 + context, "95% of what is free: " + free.limit};
}

// What a run is still to take of what memory_free_at_start() says: a context is there when a GPU is asked.
inline size_t still_to_take(const MemoryReport& r) { return r.total() - r.context; }

inline std::string describe_shortage(const MemoryReport& r, const FreeMemory& free) {
    return format("the plan takes %.1f MiB and %.1f are free (%s)", mebibytes(still_to_take(r)),
                  mebibytes(free.bytes), free.limit.c_str());
}

// Fails where the plan takes more than is free; beside a GPU also where it pins more than the host has.
inline void require_memory(const MemoryReport& r, const FreeMemory& free, bool trains) {
    if (!kHostIsDevice) {
        const FreeMemory host = host_memory_free();
        if (r.all_pinned() > host.bytes)
            fail(
                "the plan pins %.1f MiB of host memory and %.1f are free (%s); smaller: --batch or "
                "--seq-len, or more that stays on the device or goes to a disk",
                mebibytes(r.all_pinned()), mebibytes(host.bytes), host.limit.c_str());
    }
    if (still_to_take(r) <= free.bytes) return;
    const size_t budget = with_reserve(free, r.context).bytes;
    const std::string chosen =
        trains && budget > r.process ? format("--memory %zuMiB chooses what fits, or ", budget >> 20) : "";
    fail("%s; smaller: %sa smaller %s", describe_shortage(r, free).c_str(), chosen.c_str(),
         r.train->takes.empty() ? "--model" : "--batch, --seq-len or --model");
}

// The same for a plan that is only asked about: a remark.
inline void remark_shortage(const MemoryReport& r) {
    if (!kHostIsDevice) return;  // a plan needs no GPU
    const FreeMemory& free = memory_free_at_start();
    if (still_to_take(r) > free.bytes) fprintf(stderr, "here %s\n", describe_shortage(r, free).c_str());
}
