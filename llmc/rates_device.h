// rates_device.h - the rates that a run plans with: those of --rates, or nominal ones, according to the
// device's maker (gpus.h); and how fast the device is as a matrix product measures it now. Read this to see
// where the rates of a plan without --rates come from.
#pragma once

#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>

#include <nlohmann/json.hpp>

#include "llmc/gpus.h"
#include "llmc/matmul.h"
#include "llmc/run_config.h"
#include "llmc/random.h"
#include "llmc/rates.h"
#include "llmc/simt_vector.h"

// Timed work is enqueued this many times before the host looks at the clock, so that the time to start work
// and to notice its end does not count.
constexpr int kTimedTogether = kFastCpu ? 1 : 8;

// The seconds that the device takes for what queue() enqueues, the best of `times` measurements.
inline double best_seconds(int times, Stream stream, const std::function<void()>& queue) {
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

// The device's name: a GPU's from its driver, a CPU's from the kernel. Empty if none is known.
inline std::string device_name() {
#if defined(SIMT_GPU)
    return gpu_facts().name;
#else
    return cpu_name();
#endif
}

// What rates depend on: they are valid only for the same values.
inline nlohmann::ordered_json measured_on(const char* precision) {
    nlohmann::ordered_json on = {{"device", kDevice}, {"name", device_name()}, {"precision", precision}};
    if (kHostIsDevice) on["threads"] = omp_get_max_threads();
    return on;
}

// The GPU of this machine, if it is in the table; null otherwise.
inline const KnownGpu* known_gpu() { return gpu_named(gpu_facts().name); }

// The GPU that a run is planned for: the one that --gpu names; or else this machine's, from the table or from
// what it reports; an A100 if none answers.
struct NominalGpu : KnownGpu {
    std::string called;  // its name in the table, else its driver's
};
inline NominalGpu gpu_planned_for(const GpuFacts& facts) {
    if (const KnownGpu* known = gpu_named(facts.name)) return {*known, known->name};
    if (facts.multiprocessors > 0 && facts.clock > 0) return {computed_gpu(facts), facts.name};
    return {kA100, kA100.name};
}
inline NominalGpu nominal_gpu(const KnownGpu* planned = nullptr) {
    return planned ? NominalGpu{*planned, planned->name} : gpu_planned_for(gpu_facts());
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
DeviceRates nominal_rates(const KnownGpu& gpu, double threads = omp_get_max_threads()) {
    if (!kFastCpu) return rates_of_gpu<T>(gpu);
    return {threads * (std::is_same_v<T, float> ? 100e9 : 180e9), threads * 12e9, 5e-6};
}

// The nominal rates of transfers beside the operations, in bytes/s by Route. A disk beside a GPU is assumed
// to be an NVMe drive on four lanes of PCI Express 4, which reads 7 GB/s and writes some 5. A CPU's is the
// virtual disk that dev/results/streaming.md was measured on. An update by a GPU's host is assumed to reach
// half of its memory's rate. CPU ranks on one machine exchange some 2 GB/s each through its memory; GPUs
// exchange by NVLink or, without it, over their links to the host. Machines with CPUs are assumed to be
// connected by 10 Gbit/s, those with GPUs by 100; set_rank_links() divides that among a machine's ranks.
constexpr double kNominalRanks = 2e9, kNominalNetwork = kHostIsDevice ? 1.25e9 : 12.5e9;
inline std::array<double, kRoutes> nominal_transfers(const KnownGpu& gpu) {
    if (kHostIsDevice) return {1e9, 1e9, kFree, kFree, kFree, kNominalRanks, kFree};
    const double link = gpu.link * 0.8, nvlink = gpu.nvlink * 0.8;
    return {7e9, 5e9, link, link, gpu.host / 2, nvlink > 0 ? nvlink : link, kFree};
}

// How the ranks of a run are connected. The rates may have what --calibrate has measured of that; the rest is
// nominal.
inline void set_rank_links(Rates& rates, const RunConfig& o, const KnownGpu& gpu) {
    RankLinks& links = rates.ranks;
    double& link = rates.transfers[Route::ToRanks];
    links.link_is_nominal = !rates.measured() || link == 0;
    if (links.link_is_nominal) link = nominal_transfers(gpu)[Route::ToRanks];
    links.over_host_link = !kHostIsDevice && gpu.nvlink == 0;
    links.on_a_machine = std::min(o.devices, o.rank.on_this_machine);
    if (o.devices == links.on_a_machine) return;
    links.network_of = o.network > 0                  ? "--network"
                       : std::isfinite(links.network) ? kMeasured.data()
                                                      : "nominal";
    if (o.network > 0)
        links.network = o.network;
    else if (!std::isfinite(links.network))
        links.network = kNominalNetwork;
    rates.transfers[Route::ToMachines] = links.network / links.on_a_machine;
}

// The rates that a run plans with: those of the file of --rates, or the nominal ones.
template <class T>
Rates rates_of(const RunConfig& o, double threads = omp_get_max_threads()) {
    const NominalGpu gpu = nominal_gpu(o.planned_gpu);
    Rates nominal(nominal_rates<T>(gpu, threads));
    nominal.transfers = nominal_transfers(gpu);
    Rates rates =
        o.rates.empty() ? nominal : read_rates(o.rates, nominal.nominal, measured_on(dtype_name<T>()));
    set_rank_links(rates, o, gpu);
    return rates;
}

// Makes launches split that would take longer than kLongestLaunch by these rates. Products, whose parts may
// use another algorithm, are split by the nominal rates alone: so a run has the same bits with any file.
inline void limit_launches(const Rates& rates, bool tf32) {
    if (kHostIsDevice) return;  // nothing ends a launch there
    const DeviceRates& nominal = rates.nominal;
    double attention = nominal.attention_flops > 0 ? nominal.attention_flops : nominal.flops;
    for (const auto& [name, curve] : rates.operations)
        if (name.starts_with("attention_forward") || name.starts_with("attention_backward"))
            attention = std::min(attention, curve.rates.back());
    longest_attention = kLongestLaunch * attention;
    longest_product = kLongestLaunch * (tf32 ? nominal.tf32_flops : nominal.flops);
}

// The side of a large square product whose three matrices fit `space` bytes: on a GPU a multiple of 256, on a
// CPU an odd multiple of 16, as rows of a power of two would share cache sets.
template <class T>
int64_t square_side(size_t space) {
    const int64_t fits = static_cast<int64_t>(std::sqrt(static_cast<double>(space / sizeof(T) / 3)));
    if (!kFastCpu) return std::clamp<int64_t>(fits / 256, 1, 16) * 256;
    return ((std::clamp<int64_t>(fits / 16, 1, 75) - 1) | 1) * 16;
}

// Measures the FLOP/s of a square product now, the best of several, in no more than about `space` bytes: of
// an arena of its own or, during a run, of the one that is allocated. 0 if that has no room for it.
template <class T>
double measured_matmul_flops(Stream stream, size_t space = SIZE_MAX, Arena* allocated = nullptr) {
    const int64_t n = square_side<T>(space);
    std::vector<T> random(static_cast<size_t>(n));
    Arena own;
    Arena& arena = allocated ? *allocated : own;
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
    if (!allocated) arena.allocate({&plan});
    if (!arena.has_room_for(plan)) return 0;
    arena.run(plan, multiply);
    const double side = static_cast<double>(n);
    return 2 * side * side * side / best;
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads) copy_kernel(T* out, const T* in, int64_t n) {
    for_each_vector<T>(
        n, true, [&]<int N>(int64_t i, std::integral_constant<int, N>) { store(out + i, load<N>(in + i)); });
}

// The bytes per second that a large copy reads and writes, the best of several. On a CPU it is of 128 MiB,
// far more than caches hold. On a GPU the copy grows, up to 512 MiB, until it takes a millisecond.
inline double measured_copy_bandwidth(Stream stream) {
    const int64_t fits = static_cast<int64_t>(device_memory_free().bytes / (4 * sizeof(float)));
    const int64_t most = std::clamp<int64_t>(fits / 1024 * 1024, 1024, int64_t{kFastCpu ? 32 : 128} << 20);
    for (int64_t n = kFastCpu ? most : std::min<int64_t>(most, 1 << 16);; n = std::min(4 * n, most)) {
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
        if (n == most || best >= 1e-3) return 2 * static_cast<double>(bytes) / best;
    }
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

// Prints and returns what MFU is relative to after a step that reached more FLOP/s than that: the square
// product, measured again in the arena's memory, as the first one may have been measured while other programs
// ran; or what the step reached, if that is more or there are several devices.
template <class T>
double new_peak(double reached, int devices, Stream stream, Arena& arena) {
    const double product = devices == 1 ? measured_matmul_flops<T>(stream, arena.bytes() / 2, &arena) : 0;
    print(stdout, "MFU is relative to %.0f GFLOP/s from here on, %s\n",
          std::max(product, reached / devices) / 1e9,
          product > reached ? "the square product measured again" : "what this step has reached");
    return std::max(product, reached);
}
