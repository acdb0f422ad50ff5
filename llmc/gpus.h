// gpus.h - what GPUs can do: a table by name, formulas for a GPU that is not in it, and the GPU that plans
// are for. Read gpus.cpp, which has the table, to add a GPU.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "llmc/free_memory.h"

// The bytes/s of 16 lanes of PCI Express, each way, and of NVLink between a GPU and its own CPU.
constexpr double kPcie4 = 32e9, kPcie5 = 64e9, kNvlinkC2c = 450e9;
// The bytes/s of the NVLinks of a GPU to the others of its machine, each way, by generation.
constexpr double kNvlink3 = 300e9, kNvlink4 = 450e9, kNvlink5 = 900e9;
// Bytes/s of the memory of the host that a GPU is assumed to be in: eight channels of DDR4-3200, or two of
// DDR5-5600.
constexpr double kServer = 205e9, kDesktop = 90e9;

// Rates are in FLOP/s and bytes/s; those of links are each way.
struct KnownGpu {
    const char* name;  // empty: computed, not in the table
    int multiprocessors;
    // In GiB, as recent drivers report it, rounded down: from PyTorch's messages in public issues, and for
    // GPUs without one 97% of what the maker says.
    double memory;
    double flops, tf32, fp32;  // of dense products in bf16, in TF32, and in fp32 without tensor cores
    double bandwidth;          // of the GPU's memory
    double link;               // to the host
    double host = kServer;     // of the host's memory
    double nvlink = 0;  // to all other GPUs of its machine; 0: they are reached over the link to the host
    bool integrated = false;      // its memory is the host's
    bool for_plans_only = false;  // a device of this name is computed from what it reports

    // Whether its compute capability is 9.0.
    constexpr bool is_hopper() const {
        const std::string_view of(name);
        return of.find("H100") != of.npos || of.find("H20") != of.npos;
    }
};

// What a build plans for if no GPU answers and none is named: one of several that NVLink connects.
extern const KnownGpu kA100;

std::span<const KnownGpu> known_gpus();

// The known GPU that a driver's name refers to; null if there is none. The known name must occur in it as
// whole words: an "RTX A1000" is no A100. A suffix makes an RTX another GPU ("Ti", "D", "Laptop GPU"); for
// others it says how the GPU is built in, or which part of it this is ("MIG 1g.5gb"), which is none of the
// table's.
const KnownGpu* gpu_named(const std::string& name);

// What a device reports of itself.
struct GpuFacts {
    std::string name;
    int major, minor, multiprocessors;
    double clock, memory_clock;  // Hz
    int bus_bits;
    bool integrated;  // its memory is the host's
};

// The rates of a GPU that is not in the table, from what it reports. A module whose memory is its host's may
// report any memory clock, so at least LPDDR5's 6.4 Gbit/s per line is assumed. If no bandwidth is reported,
// an A100's for the same FLOP/s is assumed.
KnownGpu computed_gpu(const GpuFacts& facts);

// ---- the GPU of --plan --gpu

// Bytes of a GPU that a CUDA context takes, by the GPU's multiprocessors. Published: 107 MiB with 34 (RTX
// 4060 Ti) and 555 with 188 (RTX PRO 6000) in llama.cpp's pull request 23604, 426 with 142 (RTX 6000 Ada) in
// unsloth-zoo's 1053. Measured on an H200: 527 with 132 (dev/results/gpu-h200.md).
constexpr size_t cuda_context_bytes(int multiprocessors, bool is_hopper) {
    return static_cast<size_t>(multiprocessors) * ((is_hopper ? 4 : 3) << 20);
}
constexpr size_t cuda_context_bytes(const KnownGpu& gpu) {
    return cuda_context_bytes(gpu.multiprocessors, gpu.is_hopper());
}
constexpr size_t memory_of(const KnownGpu& gpu) { return static_cast<size_t>(gpu.memory * 1073741824.0); }

// What a GPU has that is only planned for, without what a context takes; and what a run may take of it, with
// its context: a display and other programs keep 5%.
FreeMemory free_memory_of(const KnownGpu& gpu);
FreeMemory usable_memory_of(const KnownGpu& gpu);

// "GPUs that have room: A, B, C": the smallest of the table for a run that takes `bytes` of a GPU beside its
// context, and `pinned` of its host; "" if there is none. An integrated GPU has both in the same memory.
std::string gpus_with_room(size_t bytes, size_t pinned);

// How many GPUs a name means, as in "2x RTX 3090", "8xH100", "RTX 3090 x2" or "dual 3090", and the name
// without that number; -1 and the name if it does not say it. A DGX has eight.
std::pair<int, std::string> count_in_name(const std::string& name);

// The GPU that people call by this name. Fails if none is known, and then names those that are like it.
const KnownGpu& find_gpu(const std::string& name);
