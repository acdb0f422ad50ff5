// chips.h - the GPUs that can be emulated: what CUDA reports of each, and the limits of a launch. The figures
// are from the CUDA C++ Programming Guide's table of compute capabilities and from NVIDIA's datasheets.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <string>

#include "test/gpu/fault.h"

namespace gpu {

struct Chip {
    const char *key, *name;
    int major, minor, multiprocessors;
    size_t memory, shared_per_block, shared_per_multiprocessor;
    int ptx;  // the newest PTX of a build that it runs; it runs code for 90a only if it is a 9.0
    int clock, memory_clock;  // kHz
    int bus_bits;
};
inline constexpr Chip kChips[] = {
    {"A100", "NVIDIA A100 80GB PCIe", 8, 0, 108, size_t{80} << 30, 166912, 167936, 80, 1410000, 1512000,
     5120},
    {"4090", "NVIDIA GeForce RTX 4090", 8, 9, 128, size_t{24} << 30, 101376, 102400, 89, 2520000, 10501000,
     384},
    {"H100", "NVIDIA H100 80GB HBM3", 9, 0, 132, size_t{80} << 30, 232448, 233472, 90, 1980000, 2619000,
     5120},
    {"B200", "NVIDIA B200", 10, 0, 148, size_t{180} << 30, 232448, 233472, 100, 1965000, 3996000, 8192},
    {"5090", "NVIDIA GeForce RTX 5090", 12, 0, 170, size_t{32} << 30, 101376, 102400, 120, 2407000, 14001000,
     512},
};

// The GPU that the environment's GPU names; by default an A100.
inline const Chip& chip() {
    static const Chip& chosen = []() -> const Chip& {
        const char* name = getenv("GPU");
        for (const Chip& c : kChips)
            if (std::string(name ? name : "A100") == c.key) return c;
        throw Fault(std::string("GPU=") + name + ": there are A100, 4090, H100, B200 and 5090");
    }();
    return chosen;
}

// The name that the driver reports: the environment's GPU_NAME if that is set, for a GPU that nobody knows.
inline const char* chip_name() {
    const char* name = getenv("GPU_NAME");
    return name ? name : chip().name;
}

// Bytes of its memory: the environment's GPU_MEMORY in MiB if that is set.
inline size_t chip_memory() {
    static const size_t bytes = [] {
        const char* mib = getenv("GPU_MEMORY");
        return mib ? strtoull(mib, nullptr, 10) << 20 : chip().memory;
    }();
    return bytes;
}

// Bytes of host memory that may be pinned beside it: the environment's GPU_PINNED if that is set.
inline size_t most_pinned() {
    static const size_t bytes = [] {
        const char* most = getenv("GPU_PINNED");
        return most ? strtoull(most, nullptr, 10) : SIZE_MAX;
    }();
    return bytes;
}

}  // namespace gpu
