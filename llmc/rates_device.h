// rates_device.h - how fast the device is: according to its maker, and as a matrix product measures it now.
// Read this to add a GPU, or to see where the rates of a plan without --rates come from.
#pragma once

#include <omp.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <string>

#include "llmc/matmul.h"
#include "llmc/plan_solver.h"
#include "llmc/random.h"
#include "llmc/simt_vector.h"

// ---- what GPUs can do
//
// A table by name, and formulas for a GPU that is not in it. The figures are from NVIDIA's data sheets and
// architecture white papers (GA100, GA102, AD102, GH100, Blackwell and RTX Blackwell), for dense operands
// and at the boost clock. Products of bf16 add in fp32, which a GeForce's tensor cores do at half the rate
// of the same chip on a workstation's card. A laptop's clock depends on the power that its maker allows:
// laptops are computed from the clock that the device reports.

// The bytes/s of 16 lanes of PCI Express, each way, and of NVLink between a GPU and its own CPU.
constexpr double kPcie4 = 32e9, kPcie5 = 64e9, kNvlinkC2c = 450e9;
// The bytes/s of the NVLinks of a GPU to the others of its machine, each way, by generation.
constexpr double kNvlink3 = 300e9, kNvlink4 = 450e9, kNvlink5 = 900e9;
// Bytes/s of the memory of the host that a GPU is assumed to be in: eight channels of DDR4-3200, or two of
// DDR5-5600.
constexpr double kServer = 205e9, kDesktop = 90e9;

// FLOP/s of dense products in bf16, in TF32 and in fp32 without tensor cores; bytes/s of the GPU's memory, of
// its link to the host, each way, of the host's memory, and of NVLink to all other GPUs of its machine, each
// way; without that they reach each other over the link to the host.
struct KnownGpu {
    const char* name;  // empty: computed, not in the table
    double flops, tf32, fp32, bandwidth, link, host = kServer, nvlink = 0;
};

// A GeForce from its fp32 TFLOP/s and GB/s: products in bf16 have twice that rate, in TF32 the same.
constexpr KnownGpu geforce(const char* name, double fp32, double bandwidth, double link) {
    return {name, 2e12 * fp32, 1e12 * fp32, 1e12 * fp32, 1e9 * bandwidth, link, kDesktop};
}
// A workstation's or a server's card with the same chips: four times that rate in bf16, and twice in TF32.
constexpr KnownGpu workstation(const char* name, double fp32, double bandwidth, double link) {
    return {name, 4e12 * fp32, 2e12 * fp32, 1e12 * fp32, 1e9 * bandwidth, link};
}

// What a build plans for if no GPU answers: one of several that NVLink connects.
constexpr KnownGpu kA100 = {"A100", 312e12, 156e12, 19.5e12, 1.94e12, kPcie4, kServer, kNvlink3};

constexpr KnownGpu kKnownGpus[] = {
    // if two names fit, the first counts
    {"GB200", 2500e12, 1250e12, 80e12, 8.0e12, kNvlinkC2c, kServer, kNvlink5},
    {"B300", 2250e12, 1125e12, 75e12, 8.0e12, kPcie5, kServer, kNvlink5},
    {"B200", 2250e12, 1125e12, 75e12, 8.0e12, kPcie5, kServer, kNvlink5},
    {"GH200 480GB", 989e12, 494e12, 67e12, 4.0e12, kNvlinkC2c},
    {"GH200 144G HBM3e", 989e12, 494e12, 67e12, 4.9e12, kNvlinkC2c},
    {"H200 NVL", 835e12, 417e12, 60e12, 4.8e12, kPcie5},
    {"H200", 989e12, 494e12, 67e12, 4.8e12, kPcie5, kServer, kNvlink4},
    {"H100 PCIe", 756e12, 378e12, 51e12, 2.0e12, kPcie5},
    {"H100 NVL", 835e12, 417e12, 60e12, 3.9e12, kPcie5},
    {"H100", 989e12, 494e12, 67e12, 3.35e12, kPcie5, kServer, kNvlink4},
    {"H20", 148e12, 74e12, 44e12, 4.0e12, kPcie5, kServer, kNvlink4},
    {"A100-SXM4-80GB", 312e12, 156e12, 19.5e12, 2.039e12, kPcie4, kServer, kNvlink3},
    {"A100-SXM4-40GB", 312e12, 156e12, 19.5e12, 1.555e12, kPcie4, kServer, kNvlink3},
    {"A100-PCIE-40GB", 312e12, 156e12, 19.5e12, 1.555e12, kPcie4},
    {"A100 80GB PCIe", 312e12, 156e12, 19.5e12, 1.94e12, kPcie4},
    kA100,
    {"A30", 165e12, 82e12, 10.3e12, 0.933e12, kPcie4},
    {"A10G", 70e12, 35e12, 35e12, 0.6e12, kPcie4},
    workstation("A40", 37.4, 696, kPcie4),
    workstation("A10", 31.2, 600, kPcie4),
    workstation("A2", 4.5, 200, kPcie4 / 2),
    workstation("L40S", 91.6, 864, kPcie4),
    {"L40", 181e12, 90.5e12, 90.5e12, 0.864e12, kPcie4},
    workstation("L4", 30.3, 300, kPcie4),
    workstation("RTX PRO 6000 Blackwell Workstation Edition", 125, 1792, kPcie5),
    workstation("RTX PRO 6000 Blackwell Max-Q Workstation Edition", 110, 1792, kPcie5),
    workstation("RTX PRO 6000 Blackwell Server Edition", 120, 1597, kPcie5),
    workstation("RTX PRO 5000 Blackwell", 73.7, 1344, kPcie5),
    workstation("RTX PRO 4500 Blackwell", 54.9, 896, kPcie5),
    workstation("RTX PRO 4000 Blackwell", 46.9, 672, kPcie5),
    workstation("RTX 6000 Ada Generation", 91.1, 960, kPcie4),
    workstation("RTX 5000 Ada Generation", 65.3, 576, kPcie4),
    workstation("RTX 4500 Ada Generation", 39.6, 432, kPcie4),
    workstation("RTX 4000 Ada Generation", 26.7, 360, kPcie4),
    workstation("RTX A6000", 38.7, 768, kPcie4),
    workstation("RTX A5500", 34.1, 768, kPcie4),
    workstation("RTX A5000", 27.8, 768, kPcie4),
    workstation("RTX A4500", 23.7, 640, kPcie4),
    workstation("RTX A4000", 19.2, 448, kPcie4),
    geforce("RTX 5090 D", 104.8, 1792, kPcie5),
    geforce("RTX 5090", 104.8, 1792, kPcie5),
    geforce("RTX 5080", 56.3, 960, kPcie5),
    geforce("RTX 5070 Ti", 43.9, 896, kPcie5),
    geforce("RTX 5070", 30.9, 672, kPcie5),
    geforce("RTX 5060 Ti", 23.7, 448, kPcie5 / 2),
    geforce("RTX 5060", 19.2, 448, kPcie5 / 2),
    geforce("RTX 5050", 13.2, 320, kPcie5 / 2),
    geforce("RTX 4090 D", 73.5, 1008, kPcie4),
    {"RTX 4090", 165e12, 82.6e12, 82.6e12, 1.01e12, kPcie4, kDesktop},
    geforce("RTX 4080 SUPER", 52.2, 736, kPcie4),
    geforce("RTX 4080", 48.7, 717, kPcie4),
    geforce("RTX 4070 Ti SUPER", 44.1, 672, kPcie4),
    geforce("RTX 4070 Ti", 40.1, 504, kPcie4),
    geforce("RTX 4070 SUPER", 35.5, 504, kPcie4),
    geforce("RTX 4070", 29.1, 504, kPcie4),
    geforce("RTX 4060 Ti", 22.1, 288, kPcie4 / 2),
    geforce("RTX 4060", 15.1, 272, kPcie4 / 2),
    geforce("RTX 3090 Ti", 40.0, 1008, kPcie4),
    {"RTX 3090", 71e12, 35.6e12, 35.6e12, 0.936e12, kPcie4, kDesktop},
    geforce("RTX 3080 Ti", 34.1, 912, kPcie4),
    geforce("RTX 3080", 29.8, 760, kPcie4),
    geforce("RTX 3070 Ti", 21.7, 608, kPcie4),
    geforce("RTX 3070", 20.3, 448, kPcie4),
    geforce("RTX 3060 Ti", 16.2, 448, kPcie4),
    geforce("RTX 3060", 12.7, 360, kPcie4),
    geforce("RTX 3050", 9.1, 224, kPcie4 / 2),
    // Estimated from NVIDIA's 1 PFLOP/s in sparse FP4: an eighth of that. Its memory is the host's.
    {"GB10", 125e12, 62e12, 31e12, 0.273e12, 0.273e12 / 2, 0.273e12},
    // Likewise from its 2070 TFLOP/s.
    {"Thor", 258e12, 129e12, 8.1e12, 0.273e12, 0.273e12 / 2, 0.273e12},
};

// The known GPU that a driver's name refers to; null if there is none. The known name must occur in it as
// whole words: an "RTX A1000" is no A100. A suffix makes an RTX another GPU ("Ti", "D", "Laptop GPU"); for
// others it says how the GPU is built in.
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

// What a device reports of itself.
struct GpuFacts {
    std::string name;
    int major, minor, multiprocessors;
    double clock, memory_clock;  // Hz
    int bus_bits;
    bool integrated;  // its memory is the host's
};

// FLOPs of one multiprocessor per cycle, by compute capability.
struct FlopsACycle {
    double bf16, tf32, fp32;
};
inline FlopsACycle flops_a_cycle(int major, int minor, bool is_geforce) {
    if (major == 8 && minor == 0) return {2048, 1024, 128};
    if (major == 8 && minor == 7) return {2048, 1024, 256};    // Orin
    if (major == 9) return {4096, 2048, 256};                  // Hopper
    if (major == 10 || major == 11) return {8192, 4096, 256};  // Blackwell of servers, and Thor
    return is_geforce ? FlopsACycle{512, 256, 256} : FlopsACycle{1024, 512, 256};  // 8.6, 8.9, 12.x
}

// The rates of a GPU that is not in the table, from what it reports. A module whose memory is its host's may
// report any memory clock, so at least LPDDR5's 6.4 Gbit/s per line is assumed. If no bandwidth is reported,
// an A100's for the same FLOP/s is assumed.
inline KnownGpu computed_gpu(const GpuFacts& facts) {
    const auto [bf16, tf32, fp32] =
        flops_a_cycle(facts.major, facts.minor, facts.name.find("GeForce") != std::string::npos);
    const double cycles = facts.multiprocessors * facts.clock;
    const double transfers = std::max(2 * facts.memory_clock, facts.integrated ? 6.4e9 : 0.0);
    double bandwidth = transfers * facts.bus_bits / 8;
    if (bandwidth <= 0) bandwidth = kA100.bandwidth / kA100.flops * bf16 * cycles;
    KnownGpu gpu = {"", bf16 * cycles, tf32 * cycles, fp32 * cycles, bandwidth, kPcie4};
    if (facts.major >= 9) gpu.link = kPcie5;
    if (facts.name.find("Laptop") != std::string::npos) gpu.link /= 2;  // eight lanes
    if (facts.name.find("RTX") != std::string::npos) gpu.host = kDesktop;
    if (facts.integrated) gpu.link = bandwidth / 2, gpu.host = bandwidth;  // a copy reads and writes
    return gpu;
}

// ---- this device

class WallClock {
  public:
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

  private:
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Timed work is enqueued this many times before the host looks at the clock, so that the time to start work
// and to notice its end does not count.
constexpr int kTimedTogether = kFastCpu ? 1 : 8;

// The seconds that the device takes for what queue() enqueues, the best of `times` measurements.
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

// What the GPU of this machine reports of itself; without a name if none answers.
inline GpuFacts gpu_facts() {
    GpuFacts facts = {};
#if defined(SIMT_GPU)
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) return facts;
    const auto attribute = [](cudaDeviceAttr which) {
        int value = 0;
        return cudaDeviceGetAttribute(&value, which, 0) == cudaSuccess ? value : 0;
    };
    facts = {.name = properties.name,
             .major = properties.major,
             .minor = properties.minor,
             .multiprocessors = properties.multiProcessorCount,
             .clock = 1e3 * attribute(cudaDevAttrClockRate),
             .memory_clock = 1e3 * attribute(cudaDevAttrMemoryClockRate),
             .bus_bits = attribute(cudaDevAttrGlobalMemoryBusWidth),
             .integrated = attribute(cudaDevAttrIntegrated) != 0};
#endif
    return facts;
}

// The GPU of this machine, if it is in the table; null otherwise.
inline const KnownGpu* known_gpu() { return gpu_named(gpu_facts().name); }

// The GPU that a run is planned for: this machine's, from the table or from what it reports; an A100 if none
// answers.
struct NominalGpu : KnownGpu {
    std::string called;  // its name in the table, else its driver's
};
inline NominalGpu gpu_planned_for(const GpuFacts& facts) {
    if (const KnownGpu* known = gpu_named(facts.name)) return {*known, known->name};
    if (facts.multiprocessors > 0 && facts.clock > 0) return {computed_gpu(facts), facts.name};
    return {kA100, kA100.name};
}
inline const NominalGpu& nominal_gpu() {
    static const NominalGpu gpu = gpu_planned_for(gpu_facts());
    return gpu;
}

// The rates that a GPU is assumed to reach. In products on tensor cores, some two thirds of what its maker
// promises; in attention half of that (dev/results/gpu-predicted.md, corrected for what the count there
// overestimates). In fp32, some three quarters of its rate without tensor cores, and a quarter in attention,
// whose lanes exchange operands by shuffles (mma.cuh).
template <class T>
DeviceRates rates_of_gpu(const KnownGpu& gpu) {
    constexpr bool narrow = !std::is_same_v<T, float>;
    return {.flops = narrow ? gpu.flops * 0.65 : gpu.fp32 * 0.75,
            .bandwidth = gpu.bandwidth * 0.8,
            .latency = 3e-6,
            .tf32_flops = gpu.tf32 * 0.65,
            .attention_flops = narrow ? gpu.flops * 0.5 : gpu.fp32 * 0.25};
}

// The rates by which operations are compared before any has run. They are fixed, not measured: the same
// command must make the same choice every time. The CPU's are those of cores with AVX-512, one per thread,
// with oneDNN.
template <class T>
DeviceRates nominal_rates(double threads = omp_get_max_threads()) {
    if (!kFastCpu) return rates_of_gpu<T>(nominal_gpu());
    return {threads * (std::is_same_v<T, float> ? 100e9 : 180e9), threads * 12e9, 5e-6};
}

// The nominal rates of transfers beside the operations, in bytes/s by Route. A disk beside a GPU is assumed
// to be an NVMe drive on four lanes of PCI Express 4, which reads 7 GB/s and writes some 5. A CPU's is the
// virtual disk that dev/results/streaming.md was measured on. An update by a GPU's host is assumed to reach
// half of its memory's rate. CPU ranks on one machine exchange some 2 GB/s each through its memory; GPUs
// exchange by NVLink or, without it, over their links to the host. Machines with CPUs are assumed to be
// connected by 10 Gbit/s, those with GPUs by 100.
constexpr double kNominalRanks = 2e9, kNominalNetwork = kHostIsDevice ? 1.25e9 : 12.5e9;
inline std::array<double, kRoutes> nominal_transfers() {
    if (kHostIsDevice) return {1e9, 1e9, kFree, kFree, kFree, kNominalRanks};
    const double link = nominal_gpu().link * 0.8, nvlink = nominal_gpu().nvlink * 0.8;
    return {7e9, 5e9, link, link, nominal_gpu().host / 2, nvlink > 0 ? nvlink : link};
}

// The side of a large square product whose three matrices fit `space` bytes: on a GPU a multiple of 256, on a
// CPU an odd multiple of 16, as rows of a power of two would share cache sets.
template <class T>
int64_t square_side(size_t space) {
    const int64_t fits = static_cast<int64_t>(std::sqrt(static_cast<double>(space / sizeof(T) / 3)));
    if (!kFastCpu) return std::clamp<int64_t>(fits / 256, 1, 16) * 256;
    return ((std::clamp<int64_t>(fits / 16, 1, 75) - 1) | 1) * 16;
}

// Measures the FLOP/s of a square product now, the best of several, in no more than about `space` bytes.
template <class T>
double measured_matmul_flops(Stream stream, size_t space = SIZE_MAX) {
    const int64_t n = square_side<T>(space);
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

template <class T>
__global__ void __launch_bounds__(kBlockThreads) copy_kernel(T* out, const T* in, int64_t n) {
    for_each_vector<T>(
        n, [&]<int N>(int64_t i, std::integral_constant<int, N>) { store(out + i, load<N>(in + i)); });
}

// The bytes per second that a large copy reads and writes, the best of several.
inline double measured_copy_bandwidth(Stream stream) {
    const int64_t wanted = int64_t{kFastCpu ? 32 : 128} << 20;  // floats: far more than caches hold
    const int64_t fits = static_cast<int64_t>(device_memory_free().bytes / (4 * sizeof(float)));
    const int64_t n = std::clamp<int64_t>(fits / 1024 * 1024, 1024, wanted);
    const size_t bytes = static_cast<size_t>(n) * sizeof(float);
    const DeviceBuffer from(bytes, "what the bench copies"), to(bytes, "the bench's copy");
    device_fill(from.data(), 1, bytes, stream);  // on a CPU, memory has pages only after it was written
    device_fill(to.data(), 1, bytes, stream);
    stream_synchronize(stream);
    const double best = best_seconds(8, stream, [&] {
        launch<copy_kernel<float>>(elementwise_blocks<float>(n), kBlockThreads, 0, stream,
                                   reinterpret_cast<float*>(to.data()),
                                   reinterpret_cast<const float*>(from.data()), n);
    });
    return 2 * static_cast<double>(bytes) / best;
}

// The FLOP/s that a model's utilization is compared with, and where they are from.
struct PeakRate {
    double flops;
    const char* of;
};

// What the GPU's maker promises for dense products in bf16, if that is known; otherwise the rate of a square
// product, which takes no more than `space` bytes.
template <class T>
PeakRate device_peak_flops(Stream stream, size_t space) {
    if (const KnownGpu* gpu = known_gpu(); gpu && std::is_same_v<T, bf16>)
        return {gpu->flops, "dense products in bf16 by NVIDIA's data sheet"};
    return {measured_matmul_flops<T>(stream, space), "a square product measured now"};
}
