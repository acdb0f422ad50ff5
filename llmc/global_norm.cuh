// global_norm.cuh - the norm of a gradient over all parameters.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "llmc/simt_vector.h"
#include "llmc/ranks_slices.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

// Each block sums the squares of one contiguous stretch.
template <class T>
__global__ void __launch_bounds__(kBlockThreads, 1)
    squares_kernel(float* partial, const T* x, int64_t n, int64_t per_block) {
    constexpr int N = kVectorSize<T>;
    const int64_t first = blockIdx.x * per_block, end = first + per_block < n ? first + per_block : n;
    const int64_t step = int64_t{blockDim.x} * N;
    Accumulator<N> sums;
    int64_t i = first + int64_t{threadIdx.x} * N;
    // A large model's unit has fewer stretches than a GPU has multiprocessors, so each thread must have many
    // loads under way. For that it needs many registers: a block may have a multiprocessor to itself. The
    // order of the sum does not depend on how many loads these are.
    const auto add_ahead = [&]<int kAhead>(std::integral_constant<int, kAhead>) SIMT_INLINE {
        for (; i + (kAhead - 1) * step + N <= end; i += kAhead * step) {
            Packed<T, N> p[kAhead];
#pragma unroll
            for (int a = 0; a < kAhead; a++) p[a] = load<N>(x + i + a * step);
#pragma unroll
            for (int a = 0; a < kAhead; a++)
                for (int k = 0; k < N; k++) sums[k] += p[a][k] * p[a][k];
        }
    };
    if constexpr (!kFastCpu) {
        add_ahead(std::integral_constant<int, 32>());
        add_ahead(std::integral_constant<int, 4>());
    }
#pragma unroll 1
    for (; i < end; i += step) {
        if (i + N <= end) {
            const Packed<T, N> p = load_ahead<N>(x + i);
            for (int k = 0; k < N; k++) sums[k] += p[k] * p[k];
        } else {
#pragma unroll 1  // less than a vector is left
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

// Partial sums of squares of a whole that is measured unit by unit. All stretches have the same length; unit
// u has the sums first[u] ... first[u + 1] - 1.
struct SquareSums {
    int64_t stretch;
    std::vector<int64_t> first = {0};
};
inline SquareSums square_sums(const std::vector<int64_t>& sizes) {
    int64_t all = 0;
    for (const int64_t n : sizes) all += n;
    SquareSums sums{norm_stretch(all)};
    for (const int64_t n : sizes) sums.first.push_back(sums.first.back() + ceil_div(n, sums.stretch));
    return sums;
}

// sums = the sums of squares of x (n, aligned to a vector), one for each stretch. Sums behind the last
// stretch become zero.
template <class T>
void sum_squares(const Tensor<float>& sums, const T* x, int64_t n, int64_t stretch, Stream stream) {
    assert(sums.size() * stretch >= n);
    const Operation operation("global_norm", 0, static_cast<double>(n) * sizeof(T));
    launch<squares_kernel<T>>(static_cast<unsigned>(sums.size()), kBlockThreads, 0, stream, sums.data(), x, n,
                              stretch);
}

// norm (1) = the square root of the sum of all `sums`.
inline void norm_of_sums(Tensor<float>& norm, const Tensor<float>& sums, Stream stream) {
    launch<norm_kernel>(1, kBlockThreads, 0, stream, norm.data(), sums.data(), static_cast<int>(sums.size()));
}

// norm (1) = the square root of the sum of squares of x (n <= 2^28, aligned to a vector). scratch:
// (kNormBlocks).
template <class T>
void global_norm(Tensor<float>& norm, Tensor<float>& scratch, const T* x, int64_t n, Stream stream) {
    assert(scratch.size() == kNormBlocks);
    const int64_t stretch = norm_stretch(n);
    const Tensor<float> sums(scratch.data(), {std::max<int64_t>(ceil_div(n, stretch), 1)});
    sum_squares(sums, x, n, stretch, stream);
    norm_of_sums(norm, sums, stream);
}
