// global_norm.cuh - the norm of a gradient over all parameters.
#pragma once

#include "llmc/packed.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

constexpr int kNormBlocks = 1024;  // partial sums of the global norm

// Each block sums the squares of one contiguous stretch.
template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    squares_kernel(float* partial, const T* x, int64_t n, int64_t per_block) {
    constexpr int N = kVectorSize<T>;
    const int64_t first = blockIdx.x * per_block, end = first + per_block < n ? first + per_block : n;
    Accumulator<N> sums;
    for (int64_t i = first + int64_t{threadIdx.x} * N; i < end; i += int64_t{blockDim.x} * N) {
        if (i + N <= end) {
            const Packed<T, N> p = load<N>(x + i);
            for (int k = 0; k < N; k++) sums[k] += p[k] * p[k];
        } else {
            for (int64_t k = i; k < end; k++) sums[0] += to_float(x[k]) * to_float(x[k]);
        }
    }
    const float total = block_sum(sums.sum());
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kBlockThreads) norm_kernel(float* norm, const float* partial, int count) {
    float sum = 0.f;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *norm = sqrtf(sum);
}

// norm (1) = the square root of the sum of squares of x (n, aligned to a vector). scratch: (kNormBlocks).
template <class T>
void global_norm(Tensor<float>& norm, Tensor<float>& scratch, const T* x, int64_t n, Stream stream) {
    assert(scratch.size() == kNormBlocks);
    const Operation operation("global_norm", 0, static_cast<double>(n) * sizeof(T));
    const int64_t per_block = ceil_div(ceil_div(n, kVectorSize<T>), kNormBlocks) * kVectorSize<T>;
    launch<squares_kernel<T>>(kNormBlocks, kBlockThreads, 0, stream, scratch.data(), x, n, per_block);
    launch<norm_kernel>(1, kBlockThreads, 0, stream, norm.data(), scratch.data(), kNormBlocks);
}
