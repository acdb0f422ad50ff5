// simt_cpu.h - simt.h on a CPU: macros with which g++ compiles CUDA code, and launch() as a loop over blocks
// on all threads.
//
// In the fast build a block has one thread, so a kernel is a plain function and its vectors are the CPU's
// widest. In the faithful build (SIMT_LANES=32) simt_fibers.h runs the threads of a block as fibers. The
// planner (LLMC_PLANNER) has the GPU's lanes and vectors, and runs nothing.
#pragma once

#include <omp.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#ifdef LLMC_PLANNER
#define SIMT_LANES 32
#endif
#ifndef SIMT_LANES
#define SIMT_LANES 1
#endif
static_assert(SIMT_LANES == 1 || SIMT_LANES == 32, "SIMT_LANES is 1 (fast) or 32 (faithful)");

#define SIMT_DEVICE inline __attribute__((always_inline))
#define SIMT_HOST_DEVICE SIMT_DEVICE
#define SIMT_INLINE __attribute__((always_inline))  // for a lambda in a kernel: g++ might not inline it
#define SIMT_ASSUME(x) assert(x)
#define __global__ static
#define __device__
#define __host__
#define __shared__ static thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(simt::dynamic_shared)

constexpr int kLanes = SIMT_LANES;
constexpr int kVectorBytes = kLanes == 1 ? 64 : 16;
constexpr int kBlockWarps = kLanes == 1 ? 1 : 8;
constexpr bool kFastCpu = kLanes == 1;
#ifdef LLMC_PLANNER
constexpr bool kPlanner = true;
#else
constexpr bool kPlanner = false;
#endif
constexpr bool kHostIsDevice = !kPlanner;  // whether device memory is host memory

using Stream = void*;

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// __thread, not thread_local: such variables are constant-initialized, so that no use calls a wrapper.
inline __thread uint3 blockIdx, gridDim;
#if SIMT_LANES == 1
constexpr uint3 threadIdx{0, 0, 0}, blockDim{1, 1, 1};
#else
inline __thread uint3 threadIdx, blockDim;
#endif

// bfloat16 as its 16 bits; narrowing rounds to nearest even and keeps a NaN a NaN.
struct bf16 {
    uint16_t bits;
};
SIMT_HOST_DEVICE float to_float(float x) { return x; }
SIMT_HOST_DEVICE float to_float(bf16 x) {
    const uint32_t u = static_cast<uint32_t>(x.bits) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
template <class T>
SIMT_HOST_DEVICE T from_float(float x) {
    if constexpr (std::is_same_v<T, float>) {
        return x;
    } else {
        uint32_t u;
        memcpy(&u, &x, 4);
        const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
        const uint32_t nan = (u >> 16) | 0x40u;
        return bf16{static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
    }
}

// Rounds N floats to T. The CPU's own instruction, which g++ does not use by itself, takes a subnormal number
// (less than 1.2e-38) as zero.
template <class T, int N>
SIMT_DEVICE void from_floats(T (&to)[N], const float (&x)[N]) {
#ifdef __AVX512BF16__
    if constexpr (std::is_same_v<T, bf16> && N == 32) {
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x));
        memcpy(to, &both, sizeof both);
        return;
    }
    if constexpr (std::is_same_v<T, bf16> && N == 16) {
        const __m256bh all = _mm512_cvtneps_pbh(_mm512_loadu_ps(x));
        memcpy(to, &all, sizeof all);
        return;
    }
#endif
    for (int k = 0; k < N; k++) to[k] = from_float<T>(x[k]);
}

SIMT_DEVICE float rsqrtf(float x) { return 1.f / sqrtf(x); }

// exp without a branch or a call, so that loops around it vectorize; relative error 2e-7 on [-87, 88],
// clamped outside. Range reduction by ln 2 in two parts and the minimax polynomial of Cephes' expf (Moshier,
// 1992). The bounds are variables: for constants g++ makes a case of each bound, with its own result, instead
// of a minimum and a maximum.
inline float fast_exp_least = -87.3f, fast_exp_most = 88.f;
SIMT_DEVICE float fast_exp(float x) {
    x = x < fast_exp_least ? fast_exp_least : x;
    x = x > fast_exp_most ? fast_exp_most : x;
    const float n = floorf(x * 1.44269504f + 0.5f);
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    // n + 127 is a whole number. Added to 1.5 * 2^23 it is in the low bits of the sum, which become the
    // exponent. Unlike a conversion to an integer this is defined for a NaN too, and p is the NaN then.
    const float shifted = n + (12582912.f + 127.f);
    uint32_t exponent;
    memcpy(&exponent, &shifted, 4);
    exponent <<= 23;
    float scale;
    memcpy(&scale, &exponent, 4);
    return p * scale;
}

SIMT_DEVICE float fast_quotient(float x, float y) { return x / y; }

namespace simt {
inline __thread unsigned char* dynamic_shared;

// One OS thread's dynamic shared memory, as large as the largest request so far.
struct SharedMemory {
    unsigned char* data = nullptr;
    size_t capacity = 0;
    unsigned char* grow(size_t bytes) {
        if (bytes > capacity) {
            free(data);
            capacity = (bytes + 4095) / 4096 * 4096;
            data = static_cast<unsigned char*>(aligned_alloc(4096, capacity));
            if (!data) fail("out of host memory: %zu bytes of scratch for a kernel", capacity);
        }
        return data;
    }
};

// The number of threads that the blocks of a launch are divided among.
inline size_t threads_of_a_launch() {
    return omp_in_parallel() ? 1 : static_cast<size_t>(omp_get_max_threads());
}

// Divides items 0 ... items - 1 among threads, `run` neighbours at a time, and returns when all are done.
// Calls work(worker, first, last) for the items first ... last - 1. A worker is a thread that got items,
// numbered from 0; there are at most workers_for(items, run). What an item throws is thrown here, after all
// threads have stopped.
inline size_t workers_for(size_t items, size_t run) {
    return std::min(threads_of_a_launch(), (items + run - 1) / run);
}
template <class Work>
void run_on_threads(size_t items, size_t run, Work&& work) {
    std::atomic<size_t> next{0}, workers{0};
    std::exception_ptr thrown;
    auto take_runs = [&] {
        size_t first = next.fetch_add(run);
        if (first >= items) return;
        const size_t worker = workers.fetch_add(1);
        for (; first < items; first = next.fetch_add(run)) work(worker, first, std::min(first + run, items));
    };
    const size_t threads = threads_of_a_launch();
    if (items <= 1 || threads == 1) return take_runs();
#pragma omp parallel num_threads(threads)
    try {
        take_runs();
    } catch (...) {
        next = items;
#pragma omp critical(thrown_by_an_item)
        thrown = std::current_exception();
    }
    if (thrown) std::rethrow_exception(thrown);
}

// Temporary memory for a function of the fast build, valid until the next request. In a dry run nothing may
// be written there.
inline void* workspace(size_t bytes) {
    static thread_local SharedMemory own;
    return source ? source->workspace(bytes) : own.grow(bytes);
}
}  // namespace simt

#if SIMT_LANES == 32 && !defined(LLMC_PLANNER)
#define SIMT_FAITHFUL 1
#include "llmc/simt_fibers.h"
#else
// A block has one thread or, in the planner, never runs.
inline void __syncthreads() {}
inline void __syncwarp() {}
template <class T>
T __shfl_xor_sync(unsigned, T v, int) {
    return v;
}
template <class T>
T __shfl_sync(unsigned, T v, int) {
    return v;
}
#endif

#if defined(LLMC_PLANNER)
// Does nothing: a planner only makes dry runs.
template <auto kernel, class... A>
void launch(dim3, dim3, size_t, Stream, A&&...) {
    if (!simt::launches_off) bug("a planner has no kernels to launch");
}
#else
#if SIMT_LANES == 1

namespace simt {
// Runs body() once per block. Threads take blocks in runs, so that neighbours in memory stay on one core.
// Each worker has its part of the dynamic shared memory.
template <class Body>
void run_grid(dim3 grid, [[maybe_unused]] dim3 block, size_t shared_bytes, Body&& body) {
    const size_t blocks = static_cast<size_t>(grid.x) * grid.y * grid.z;
    const size_t run = blocks / (threads_of_a_launch() * 16) + 1;
    const size_t part = (shared_bytes + 63) / 64 * 64;
    unsigned char* lent = nullptr;
    if (source && part > 0)
        lent = static_cast<unsigned char*>(source->workspace(workers_for(blocks, run) * part));
    if (launches_off) return;
    run_on_threads(blocks, run, [&](size_t worker, size_t first, size_t last) {
        static thread_local SharedMemory own;
        dynamic_shared = lent ? lent + worker * part : own.grow(part);
        gridDim = {grid.x, grid.y, grid.z};
        uint3 at{static_cast<unsigned>(first % grid.x), static_cast<unsigned>(first / grid.x % grid.y),
                 static_cast<unsigned>(first / (static_cast<size_t>(grid.x) * grid.y))};
        for (size_t i = first; i < last; i++) {
            blockIdx = at;
            body();
            if (++at.x == grid.x) at.x = 0, at.y++;
            if (at.y == grid.y) at.y = 0, at.z++;
        }
    });
}
}  // namespace simt
#endif

namespace simt {
template <auto kernel, class... P, class... A>
void launch_function(void (*)(P...), dim3 grid, dim3 block, size_t shared_bytes, A&&... args) {
    const std::tuple<P...> values(static_cast<P>(args)...);
    run_grid(grid, block, shared_bytes, [&] {
        std::apply(
            [](const P&... p) __attribute__((always_inline)) { kernel(p...); }, values);
    });
}
}  // namespace simt

// Runs `kernel` over the grid, and returns when it is done. The kernel is a template argument, so that it is
// inlined into the loop. An empty grid runs nothing.
template <auto kernel, class... A>
void launch(dim3 grid, dim3 block, size_t shared_bytes, Stream, A&&... args) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    if (simt::launches_off && !kFastCpu) return;
    if (kFastCpu && block.x * block.y * block.z != 1) {
        fprintf(stderr, "simt: a block of the fast CPU build has one thread\n");
        abort();
    }
    simt::launch_function<kernel>(kernel, grid, block, shared_bytes, std::forward<A>(args)...);
}
#endif
