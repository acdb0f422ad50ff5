// device_rates.h - how fast the device is: by its maker, and multiplying matrices now; and a clock for that.
#pragma once

#include <omp.h>

#include <array>
#include <cctype>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <string>

#include "llmc/matmul.h"
#include "llmc/random.h"
#include "llmc/solver.h"

class WallClock {
  public:
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

  private:
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

inline void stream_synchronize([[maybe_unused]] Stream stream) {
#if defined(SIMT_GPU)
    CUDA_CHECK(cudaStreamSynchronize(stream));
#endif
}

// The bytes/s of 16 lanes of PCI Express, each way.
constexpr double kPcie4 = 32e9, kPcie5 = 64e9;

// A GPU by its name, with its dense bf16 FLOP/s, its memory's bytes/s and those of its link to the host, each
// way (NVIDIA's data sheets). In TF32 each of these does half as many FLOP/s.
struct KnownGpu {
    const char* name;
    double flops, bandwidth, link;
    // Of the memory of the host that it is thought to be in: eight channels of DDR4-3200, or two of
    // DDR5-5600.
    double host = 205e9;
};
constexpr double kDesktop = 90e9;
constexpr KnownGpu kA100 = {"A100", 312e12, 1.94e12, kPcie4};
constexpr KnownGpu kKnownGpus[] = {  // of two names that fit, the first
    {"GH200 480GB", 989e12, 4.0e12, 450e9},
    {"H200", 989e12, 4.8e12, kPcie5},
    {"H100 PCIe", 756e12, 2.0e12, kPcie5},
    {"H100 NVL", 835e12, 3.9e12, kPcie5},
    {"H100", 989e12, 3.35e12, kPcie5},
    kA100,
    {"L40S", 362e12, 0.864e12, kPcie4},
    {"RTX 4090", 165e12, 1.01e12, kPcie4, kDesktop},
    {"RTX 3090", 71e12, 0.936e12, kPcie4, kDesktop}};

// What is timed goes to the device so many times before the host looks at the clock: what it takes to start
// and to notice the end of work does not count then.
constexpr int kTimedTogether = kFastCpu ? 1 : 8;

// The seconds that the device takes for what queue() gives it, the best of `times`.
template <class Queue>
double best_seconds(int times, Stream stream, Queue&& queue) {
    double best = 1e30;
    for (int i = 0; i < times; i++) {
        const WallClock clock;
        for (int k = 0; k < kTimedTogether; k++) queue();
        stream_synchronize(stream);
        best = std::min(best, clock.seconds() / kTimedTogether);
    }
    return best;
}

// The GPU that a driver calls by this name, if it is a known one; null otherwise. The known name stands in it
// as whole words: an "RTX A1000" is no A100. What follows a GeForce's makes it another one ("Ti", "D",
// "Laptop GPU"); what follows the others' says how it is built in.
inline const KnownGpu* gpu_named(const std::string& name) {
    const auto in_word = [&](size_t i) {
        return i < name.size() && isalnum(static_cast<unsigned char>(name[i]));
    };
    for (const KnownGpu& gpu : kKnownGpus) {
        const std::string known = gpu.name;
        const size_t begin = name.find(known), end = begin + known.size();
        if (begin == std::string::npos || (begin > 0 && in_word(begin - 1)) || in_word(end)) continue;
        if (known.starts_with("RTX") && end < name.size()) continue;
        return &gpu;
    }
    return nullptr;
}

// The GPU of this machine, if it is a known one; null otherwise.
inline const KnownGpu* known_gpu() {
#if defined(SIMT_GPU)
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, 0) == cudaSuccess) return gpu_named(properties.name);
#endif
    return nullptr;
}

// That one, or an A100 where it is unknown, or none.
inline const KnownGpu& nominal_gpu() {
    static const KnownGpu* const known = known_gpu();
    return known ? *known : kA100;
}

// The rates by which operations are compared before any has run. Known ones, not measured: the same command
// must make the same choice every time. A GPU reaches some two thirds of what its maker promises in products,
// half of it in attention (dev/results/gpu-predicted.md, less what the count there is too fast by). The CPU's
// are those of cores with AVX-512, one a thread, through oneDNN.
template <class T>
DeviceRates nominal_rates(double threads = omp_get_max_threads()) {
    constexpr bool narrow = !std::is_same_v<T, float>;
    if (kFastCpu) {
        return {threads * (narrow ? 180e9 : 100e9), threads * 12e9, 5e-6};
    }
    const KnownGpu& gpu = nominal_gpu();
    return {.flops = gpu.flops * (narrow ? 0.65 : 0.05),
            .bandwidth = gpu.bandwidth * 0.8,
            .latency = 3e-6,
            .tf32_flops = gpu.flops / 2 * 0.65,
            .attention_flops = narrow ? gpu.flops * 0.5 : 0};
}

// The same of what moves beside the operations, in bytes/s by Way. A disk beside a GPU is an NVMe drive on
// four lanes of PCI Express 4, which reach 7 GB/s reading and some 5 writing; another is the virtual one that
// dev/results/streaming.md was measured on. An update by a GPU's host is thought to reach half of its
// memory's rate.
inline std::array<double, kWays> nominal_transfers() {
    if (kHostIsDevice) return {1e9, 1e9, kFree, kFree, kFree};
    const double link = nominal_gpu().link * 0.8;
    return {7e9, 5e9, link, link, nominal_gpu().host / 2};
}

// The side of a large square product whose three matrices fit `room` bytes: a multiple of 256 on a GPU, on a
// CPU an odd one of 16, as rows of a power of two would share cache sets.
template <class T>
int64_t square_side(size_t room) {
    const int64_t fits = static_cast<int64_t>(std::sqrt(static_cast<double>(room / sizeof(T) / 3)));
    if (!kFastCpu) return std::clamp<int64_t>(fits / 256, 1, 16) * 256;
    return ((std::clamp<int64_t>(fits / 16, 1, 75) - 1) | 1) * 16;
}

// The FLOP/s of a square product, measured now, the best of several, in no more than about `room` bytes.
template <class T>
double measured_matmul_flops(Stream stream, size_t room = SIZE_MAX) {
    const int64_t n = square_side<T>(room);
    std::vector<T> random(static_cast<size_t>(n));
    Arena arena;
    double best = 0;
    auto multiply = [&] {
        Tensor<T> a = arena.take<T>("a", {n, n}), b = arena.take<T>("b", {n, n}),
                  c = arena.take<T>("c", {n, n});
        uint64_t draws = 0;  // a GPU multiplies zeros with less power, and faster
        for (int64_t i = 0; i < n && !arena.rehearsing(); i++) {
            for (T& x : random) x = from_float<T>(static_cast<float>(random_uniform(0, draws++) - 0.5));
            for (Tensor<T>* t : {&a, &b})
                copy_to_device(t->at(i * n), random.data(), random.size() * sizeof(T), stream);
        }
        if (arena.rehearsing()) return matmul(arena, stream, c, a, b);
        best = best_seconds(kFastCpu ? 12 : 4, stream, [&] { matmul(arena, stream, c, a, b); });
    };
    Plan plan = arena.rehearse(multiply);
    arena.allocate({&plan});
    arena.run(plan, multiply);
    const double side = static_cast<double>(n);
    return 2 * side * side * side / best;
}

// The FLOP/s that a model's utilisation is measured against, and whose they are.
struct PeakRate {
    double flops;
    const char* of;
};

// What the GPU's maker promises for dense products in bf16, where it is known; else a square product's, which
// takes no more than `room` bytes.
template <class T>
PeakRate device_peak_flops(Stream stream, size_t room) {
    if (const KnownGpu* gpu = known_gpu(); gpu && std::is_same_v<T, bf16>)
        return {gpu->flops, "dense products in bf16 by NVIDIA's data sheet"};
    return {measured_matmul_flops<T>(stream, room), "a square product measured now"};
}
