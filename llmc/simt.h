// simt.h - one kernel source, three ways to run it, and one to plan for a GPU. (SIMT: single instruction,
// multiple threads, as GPUs compute.)
//
// Every kernel is a CUDA __global__ function, written once:
//
//   build            compiler  lanes  vector    a CUDA thread is
//   GPU              nvcc      32     16 bytes  a CUDA thread
//   CPU, fast        g++       1      64 bytes  the only thread of its block, a plain call
//   CPU, faithful    g++       32     16 bytes  a fiber: the same warps, barriers and shuffles as on the GPU
//   planner          g++       32     16 bytes  never run: it only plans what the GPU build would do
//
// The faithful build (-DSIMT_LANES=32) is for tests; simt_fibers.h says what it checks. The same loops
// serve all:
//
//   for (int c = lane() * V::size; c < C; c += kLanes * V::size) ...
//
// The planner (-DLLMC_PLANNER) has the lanes, vectors and tiles of the GPU build. A dry run of a step takes
// the same tensors there, counts the same work and launches nothing, so the plan is the same; kernels need
// only compile. ./train for a CPU runs it, as a program of its own, for `--plan --gpu NAME`: in one program
// its code would count in the memory of every run.
//
// This header has what is common to all builds; the rest is in the header of each.
// Kernels must not use: `extern __shared__` by name, partial warp masks, cooperative groups.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "llmc/error.h"

#ifdef LLMC_COMMON
#error "code that all builds share has no kernels: it includes build.h"
#endif

namespace simt {
// True during a dry run of a step (arena.h): launches and library calls return at once.
inline bool launches_off = false;

// Provides memory that is valid until the next request: the arena does, during a step and its dry run. In the
// fast CPU build a launch's workers have their dynamic shared memory there; without a `source` they use
// memory of their own.
struct Source {
    virtual void* workspace(size_t bytes) = 0;

  protected:
    ~Source() = default;
};
inline Source* source = nullptr;
}  // namespace simt

#if defined(__CUDACC__)
#include "llmc/simt_cuda.h"
#else
#include "llmc/simt_cpu.h"
#endif

// Threads of an ordinary block: kBlockWarps warps of kLanes lanes.
constexpr int kBlockThreads = kBlockWarps * kLanes;

SIMT_DEVICE int lane() { return threadIdx.x % kLanes; }
SIMT_DEVICE int warp() { return threadIdx.x / kLanes; }
SIMT_DEVICE int warps_per_block() { return blockDim.x / kLanes; }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The number of blocks of an ordinary launch that has a warp for each row.
constexpr unsigned blocks_of_rows(int64_t rows) { return static_cast<unsigned>(ceil_div(rows, kBlockWarps)); }

// The sum, or maximum, of v over a warp, in every lane. A butterfly of shuffles: the order of the additions
// is fixed.
SIMT_DEVICE float warp_sum(float v) {
    for (int m = kLanes / 2; m > 0; m /= 2) v += __shfl_xor_sync(~0u, v, m);
    return v;
}
SIMT_DEVICE float warp_max(float v) {
    for (int m = kLanes / 2; m > 0; m /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, m));
    return v;
}

// Reduces v over a block of whole warps. Every thread must call it and gets the result. The first barrier
// guards the reuse of `part`.
template <class Reduce>
SIMT_DEVICE float block_reduce(float v, float identity, Reduce reduce) {
    if constexpr (kLanes == 1) return v;
    __shared__ float part[32];
    v = reduce(v);
    __syncthreads();
    if (lane() == 0) part[warp()] = v;
    __syncthreads();
    return reduce(lane() < warps_per_block() ? part[lane()] : identity);
}
SIMT_DEVICE float block_sum(float v) {
    return block_reduce(v, 0.f, [](float x) { return warp_sum(x); });
}
SIMT_DEVICE float block_max(float v) {
    return block_reduce(v, -INFINITY, [](float x) { return warp_max(x); });
}

// ---- long launches
//
// Splits launches that would take long: on a GPU that drives a display, and under WSL2, the driver ends a
// launch after some seconds. Results keep their bits, because the same blocks do the same work.

// Seconds that no launch is expected to exceed.
constexpr double kLongestLaunch = 0.5;

// The FLOPs that the device is expected to do in that time, in attention and in matrix products. No limit
// until a run with a GPU sets them (limit_launches()).
inline double longest_attention = std::numeric_limits<double>::infinity();
inline double longest_product = std::numeric_limits<double>::infinity();

// Bytes of keys and values, or of queries and gradients, that attention goes through at a time: half of the
// L2 cache of an A100 or of a later large GPU.
inline double cached_attention = 20e6;

// The part of a grid that one launch runs: its first block in x and in y, and how many blocks the whole grid
// has in y.
struct GridPart {
    int x = 0, y = 0, whole_y = 0;
};

// Calls launch_part(grid, part) for parts of a grid that has `work` in all, so that no part has more than
// `most`. All blocks along x have equal work. Blocks along y may have up to twice the mean, as with causal
// attention.
template <class F>
void for_each_part(dim3 grid, double work, double most, F launch_part) {
    const double parts = std::max(1., std::ceil(work / most));
    const auto step = [](unsigned blocks, double parts) {
        return std::max(1u, static_cast<unsigned>(blocks / std::min<double>(parts, blocks)));
    };
    const unsigned by_x = step(grid.x, parts);
    const unsigned by_y = parts > grid.x ? step(grid.y, std::ceil(2 * parts / grid.x)) : grid.y;
    for (unsigned y = 0; y < grid.y; y += by_y)
        for (unsigned x = 0; x < grid.x; x += by_x)
            launch_part(dim3(std::min(by_x, grid.x - x), std::min(by_y, grid.y - y)),
                        GridPart{static_cast<int>(x), static_cast<int>(y), static_cast<int>(grid.y)});
}
