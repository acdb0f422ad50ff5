// wide_sum.cuh - a bf16 sum of many terms that keeps its low bits: four more of each element, beside it, for
// as long as terms come. A bf16 sum of n terms alone would round n times to 8 bits; this one rounds n times
// to 12, and once to 8 when the low bits are let go.
#pragma once

#include "llmc/packed.h"
#include "llmc/split.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

constexpr int kWideSumBits = 4;

// A vector's N low parts are N / 2 bytes: byte k has element k's in its lower half and element k + N / 2's
// in its upper half.
__global__ void __launch_bounds__(kBlockThreads)
    wide_sum_kernel(bf16* sum, uint8_t* low, const float* term, int64_t n) {
    constexpr int N = kVectorSize<bf16>;
    const int64_t first = int64_t{blockIdx.x} * blockDim.x * kElementwiseRun + threadIdx.x;
    for (int j = 0; j < kElementwiseRun; j++) {
        const int64_t i = (first + int64_t{j} * blockDim.x) * N;
        if (i >= n) return;
        Packed<bf16, N> s = load<N>(sum + i);
        Packed<uint8_t, N / 2> l = load<N / 2>(low + i / 2);
        const Packed<float, N> t = load<N>(term + i);
        // One loop a step, so that the CPU build takes each in vectors.
        int parts[N];
        for (int k = 0; k < N / 2; k++) parts[k] = ((l.v[k] & 15) ^ 8) - 8;
        for (int k = 0; k < N / 2; k++) parts[k + N / 2] = ((l.v[k] >> 4) ^ 8) - 8;
        float x[N];
        for (int k = 0; k < N; k++) x[k] = join<kWideSumBits>(s.v[k], parts[k]) + t.v[k];
        for (int k = 0; k < N; k++) parts[k] = split<kWideSumBits>(x[k]).low;
        for (int k = 0; k < N; k++) s.v[k] = split<kWideSumBits>(x[k]).high;
        for (int k = 0; k < N / 2; k++)
            l.v[k] = static_cast<uint8_t>((parts[k] & 15) | (parts[k + N / 2] << 4));
        store(sum + i, s);
        store(low + i / 2, l);
    }
}

// sum += term (n elements each), where `low` (n / 2 bytes, zero before the first term) holds what bf16 lacks.
// n is a multiple of a vector.
inline void wide_sum_add(Tensor<bf16>& sum, Tensor<uint8_t>& low, const Tensor<float>& term, Stream stream) {
    const int64_t n = sum.size();
    assert(n == term.size() && n == 2 * low.size() && n % kVectorSize<bf16> == 0);
    const Operation operation("wide_sum_add", 0, pass_bytes(sum, sum, low, low, term));
    launch<wide_sum_kernel>(elementwise_blocks<bf16>(n), kBlockThreads, 0, stream, sum.data(), low.data(),
                            term.data(), n);
}
