// clock.h - how long things take, and how fast the device multiplies matrices at its best.
#pragma once

#include <chrono>
#include <string>

#include "llmc/matmul.h"

class Clock {
  public:
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

  private:
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

inline void device_synchronize([[maybe_unused]] Stream stream) {
#if defined(SIMT_GPU)
    CUDA_CHECK(cudaStreamSynchronize(stream));
#endif
}

// The FLOP/s of this device that a model's utilisation is measured against, as a GPU's maker promises them
// for dense products in T, where the GPU is known (NVIDIA's data sheets); else those of a square product,
// measured now.
template <class T>
double device_peak_flops(Stream stream) {
#if defined(SIMT_GPU)
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    const std::pair<const char*, double> promised[] = {{"H200", 989e12},     {"H100", 989e12},
                                                       {"A100", 312e12},     {"L40S", 362e12},
                                                       {"RTX 4090", 165e12}, {"RTX 3090", 71e12}};
    if (std::is_same_v<T, bf16>)
        for (auto [name, flops] : promised)
            if (std::string(properties.name).find(name) != std::string::npos) return flops;
#endif
    const int64_t n = kFastCpu ? 1200 : 4096;  // on a CPU no power of two, whose rows would share cache sets
    Arena arena;
    double best = 1e30;
    auto multiply = [&] {
        Tensor<T> a = arena.take<T>("a", {n, n}), b = arena.take<T>("b", {n, n}),
                  c = arena.take<T>("c", {n, n});
        for (int i = 0; i < (arena.rehearsing() ? 1 : 12); i++) {
            const Clock clock;
            matmul(arena, stream, c, a, b);
            device_synchronize(stream);
            best = std::min(best, clock.seconds());
        }
    };
    Plan plan = arena.rehearse(multiply);
    best = 1e30;
    arena.allocate({&plan});
    arena.run(plan, multiply);
    const double side = static_cast<double>(n);
    return 2 * side * side * side / best;
}
