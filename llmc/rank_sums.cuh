// rank_sums.cuh - sums of what several ranks have computed (ranks_exchange.h). The terms are added in the
// order of the ranks, in fp32, and rounded once: so every engine, and every order of arrival, gives the same
// bits. In fp32 these are the bits of one device that adds one micro-batch after another. With several ranks
// on each of several machines, the terms are the sums of the machines, in fp32.
#pragma once

#include "llmc/simt_vector.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

template <class Sum, class T>
__global__ void __launch_bounds__(kBlockThreads)
    sum_ranks_kernel(Sum* out, const T* parts, int ranks, int64_t stride, int64_t n) {
    for_each_vector<T>(n, true, [&]<int N>(int64_t i, std::integral_constant<int, N>) SIMT_INLINE {
        float sum[N];
        const Packed<T, N> first = load_ahead<N>(parts + i);
        for (int k = 0; k < N; k++) sum[k] = first[k];
        for (int r = 1; r < ranks; r++) {
            const Packed<T, N> term = load_ahead<N>(parts + r * stride + i);
            for (int k = 0; k < N; k++) sum[k] += term[k];
        }
        store(out + i, sum);
    });
}

// out (n) = the sum of the first n elements of each row of `parts` (ranks, columns). Both are aligned to
// vectors, and `columns` is a multiple of one.
// It may run beside the step's operations, so it is no Operation by itself.
template <class Sum, class T>
void sum_ranks(const Tensor<Sum>& out, const Tensor<T>& parts, Stream stream) {
    const int64_t ranks = parts.rows(), n = out.size();
    assert(parts.columns() % kVectorSize<T> == 0 && n <= parts.columns());
    if (n == 0) return;
    launch<sum_ranks_kernel<Sum, T>>(elementwise_blocks<T>(n), kBlockThreads, 0, stream, out.data(),
                                     parts.data(), static_cast<int>(ranks), parts.columns(), n);
}
