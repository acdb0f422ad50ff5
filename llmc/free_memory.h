// free_memory.h - how much memory this process has, how much it may have, and how much is free; and a check
// before calls that would crash without memory. Read this when a run takes more, or less, than the machine
// seems to have. plan_free_memory.h compares a plan with it.
#pragma once

#include <sys/resource.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// ---- what there is, and what is free
//
// A process may have the least of the machine's memory, the limits of its cgroups (version 1 and 2; Docker
// and Slurm set such limits), and ulimit -v and -d.

// The number of free bytes, and the limit that they come from. SIZE_MAX if unknown.
struct FreeMemory {
    size_t bytes = SIZE_MAX;
    std::string limit;

    bool known() const { return bytes != SIZE_MAX; }
    void at_most(size_t other, const std::string& other_limit) {
        if (other < bytes) bytes = other, limit = other_limit;
    }
};

// The most memory of one library that a run reads. oneDNN has 38 MiB of code and tables for all kinds of
// machines; training, validation and sampling in fp32 and bf16 were measured to read 7.2 MiB of it.
constexpr size_t kMostOfALibrary = size_t{15} << 19;

// The most memory that pages of the executable and its libraries take: pages that are mapped from files with
// code, as listed in /proc/self/maps. Which of them are in memory at the start differs from run to run, so a
// plan counts them all. 0 if there is no /proc.
size_t library_bytes(const std::string& root = "");

// What the process already has of the memory in a plan: memory of its own, pages of its executable and
// libraries that are in memory, and the latter as a plan counts them.
struct OwnMemory {
    size_t anonymous = 0, resident_files = 0, libraries = 0;

    static OwnMemory now(const std::string& root = "");
};

// The soft limits of this process; RLIM_INFINITY means none. `untouched` bytes of what they allow are not
// available to a plan.
struct ProcessLimits {
    rlim_t address_space = RLIM_INFINITY, data = RLIM_INFINITY;
    size_t untouched = 0;

    static ProcessLimits now();
};

// The number after `name` in a file with lines like "MemAvailable:   123 kB". Nothing if there is none.
std::optional<uint64_t> number_in_file(const std::string& path, const std::string& name);

// A memory limit: how much it allows, how much of that is free now, and how much this process may have in
// all, including what it already has.
struct MemoryLimit {
    size_t most, free, in_all;
    std::string name;
    bool of_process = false;  // else all processes on this machine share it
};

// All limits of this process now. Tests put `root` before every path.
std::vector<MemoryLimit> memory_limits(const std::string& root = "",
                                       const ProcessLimits& limits = ProcessLimits::now(),
                                       const OwnMemory& own = OwnMemory::now());

// What is free for this process now, in addition to what it has.
FreeMemory host_memory_free(const std::string& root = "", const ProcessLimits& limits = ProcessLimits::now());

// What this process may have in all, including what it already has: the budget of a plan.
FreeMemory host_memory_in_all(const std::vector<MemoryLimit>& limits);

// The share that each of `ranks` processes has of these limits.
std::vector<MemoryLimit> shared_limits(std::vector<MemoryLimit> limits, int ranks);

// How much of a budget of `bytes` is really available: less if a limit that allows at least `bytes` has less
// left now. Rounded to whole MiB, so that a plan and its run agree. Limits below `bytes` are ignored: such a
// budget is meant for another machine.
FreeMemory available_of(size_t bytes, const std::vector<MemoryLimit>& limits);

// The free memory without a reserve of 5%. `context` is device memory that this process's context already
// takes.
inline FreeMemory with_reserve(const FreeMemory& free, size_t context) {
    return {free.bytes / 20 * 19 + context, "95% of what is free: " + free.limit};
}

// ---- asking before a large allocation

bool limited_address_space();

// Fails unless `bytes` more bytes can be mapped now. It notices a limit (ulimit -v), but not that physical
// memory is used up. `what`: what needs them, for the message.
void require_memory_for(size_t bytes, const char* what);
