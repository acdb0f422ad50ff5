// simt_cuda.h - simt.h on a GPU: CUDA itself, and launch().
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "llmc/cuda_errors.h"

#define SIMT_GPU 1
#define SIMT_DEVICE __device__ __forceinline__
#define SIMT_HOST_DEVICE __host__ __device__ __forceinline__
#define SIMT_INLINE                         // for a lambda in a kernel
#define SIMT_ASSUME(x) __builtin_assume(x)  // always true: no code for the other case

// Names the block's dynamic shared memory. One base for all kernels: C++ allows one type per extern array.
#define DYNAMIC_SHARED(T, name)                                           \
    extern __shared__ __align__(128) unsigned char simt_dynamic_shared[]; \
    T* name = reinterpret_cast<T*>(simt_dynamic_shared)

constexpr int kLanes = 32;
constexpr int kVectorBytes = 16;
constexpr int kBlockWarps = 8;
constexpr bool kFastCpu = false;

using Stream = cudaStream_t;
using bf16 = __nv_bfloat16;

SIMT_HOST_DEVICE float to_float(float x) { return x; }
SIMT_HOST_DEVICE float to_float(bf16 x) { return __bfloat162float(x); }
template <class T>
SIMT_HOST_DEVICE T from_float(float x) {
    if constexpr (std::is_same_v<T, float>)
        return x;
    else
        return __float2bfloat16(x);
}

// Rounds N floats to T, bf16 two at a time.
template <class T, int N>
SIMT_DEVICE void from_floats(T (&to)[N], const float (&x)[N]) {
    if constexpr (std::is_same_v<T, bf16> && N % 2 == 0) {
#pragma unroll
        for (int k = 0; k < N; k += 2)
            reinterpret_cast<__nv_bfloat162&>(to[k]) = __floats2bfloat162_rn(x[k], x[k + 1]);
    } else {
#pragma unroll
        for (int k = 0; k < N; k++) to[k] = from_float<T>(x[k]);
    }
}

SIMT_DEVICE float fast_exp(float x) { return __expf(x); }

namespace simt {
template <class... P, class... A>
void launch_function(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, Stream stream,
                     A&&... args) {
    if (shared_bytes > 48 * 1024)
        CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared_bytes)));
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...));
}
}  // namespace simt

// Runs `kernel` over the grid on the stream. An empty grid runs nothing.
template <auto kernel, class... A>
void launch(dim3 grid, dim3 block, size_t shared_bytes, Stream stream, A&&... args) {
    if (simt::launches_off || grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    simt::launch_function(kernel, grid, block, shared_bytes, stream, std::forward<A>(args)...);
}
