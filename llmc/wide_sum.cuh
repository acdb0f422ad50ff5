// wide_sum.cuh - a bf16 sum of many terms that keeps its low bits: while terms are added, four more bits of
// each element are kept beside it. A plain bf16 sum of n terms would round n times to 8 bits; this one rounds
// n times to 12, and once to 8 when the low bits are dropped.
#pragma once

#include "llmc/simt_vector.h"
#include "llmc/state_formats.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

constexpr int kWideSumBits = 4;

// sum += term, N elements each. `parts` are the sum's low parts; they become those of the new sum. Each step
// is a loop of its own, so that the CPU build vectorizes it.
template <int N>
SIMT_DEVICE void add_with_parts(bf16* sum, const float* term, int (&parts)[N]) {
    Packed<bf16, N> s = load_ahead<N>(sum);
    const Packed<float, N> t = load_ahead<N>(term);
    float x[N];
    for (int k = 0; k < N; k++) x[k] = join<kWideSumBits>(s.v[k], parts[k]) + t.v[k];
    for (int k = 0; k < N; k++) parts[k] = split<kWideSumBits>(x[k]).low;
    for (int k = 0; k < N; k++)
        s.v[k] = x[k] == x[k] ? split<kWideSumBits>(x[k]).high : from_float<bf16>(x[k]);  // a NaN stays one
    store(sum, s);
}

// The low part in half a byte, with its sign.
SIMT_DEVICE int low_part(int half) { return ((half & 15) ^ 8) - 8; }

// The sum in whole vectors. A vector's N low parts are N / 2 bytes: byte k has element k's part in its lower
// half and element k + N / 2's in its upper half.
SIMT_DEVICE void wide_sum_vectors(bf16* sum, uint8_t* low, const float* term, int64_t n) {
    constexpr int N = kVectorSize<bf16>, H = N / 2;
    const int64_t first = int64_t{blockIdx.x} * blockDim.x * kElementwiseRun + threadIdx.x;
    for (int j = 0; j < kElementwiseRun; j++) {
        const int64_t i = (first + int64_t{j} * blockDim.x) * N;
        if (i >= n) return;
        Packed<uint8_t, H> l = load<H>(low + i / 2);
        int parts[N];
        for (int k = 0; k < H; k++) parts[k] = low_part(l.v[k]);
        for (int k = 0; k < H; k++) parts[k + H] = low_part(l.v[k] >> 4);
        add_with_parts(sum + i, term + i, parts);
        for (int k = 0; k < H; k++) l.v[k] = static_cast<uint8_t>((parts[k] & 15) | (parts[k + H] << 4));
        store(low + i / 2, l);
    }
}

// The sum by warps. A lane takes halves of two vectors, so that the terms that the lanes load at a time, 16
// bytes each, are contiguous: even lanes take lower halves, odd lanes upper halves. Of two lanes that share
// two vectors, each writes the low parts of one.
SIMT_DEVICE void wide_sum_half_vectors(bf16* sum, uint8_t* low, const float* term, int64_t n) {
    constexpr int H = kVectorSize<bf16> / 2;
    static_assert(kFastCpu || H == 4);
    const int shift = lane() % 2 * 4;  // position of its parts in a byte
    const bool upper = shift;
    for (int j = 0; j < kElementwiseRun; j++) {
        const int64_t warps = (int64_t{blockIdx.x} * kElementwiseRun + j) * warps_per_block() + warp();
        const int64_t first = warps * 2 * kLanes * H + lane() * H;
        uint32_t made[2] = {};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int64_t i = first + h * kLanes * H;
            if (i >= n) continue;
            const Packed<uint32_t, 1> word = load<1>(reinterpret_cast<const uint32_t*>(low) + i / (2 * H));
            int parts[H];
            for (int k = 0; k < H; k++) parts[k] = low_part(static_cast<int>(word.v[0] >> (8 * k + shift)));
            add_with_parts(sum + i, term + i, parts);
            for (int k = 0; k < H; k++) made[h] |= static_cast<uint32_t>(parts[k] & 15) << (8 * k + shift);
        }
        const uint32_t others = __shfl_xor_sync(~0u, upper ? made[0] : made[1], 1);
        const int64_t i = first + (upper ? kLanes * H : 0);
        if (i < n) reinterpret_cast<uint32_t*>(low)[i / (2 * H)] = (upper ? made[1] : made[0]) | others;
    }
}

__global__ void __launch_bounds__(kBlockThreads)
    wide_sum_kernel(bf16* sum, uint8_t* low, const float* term, int64_t n) {
    if constexpr (kFastCpu)
        wide_sum_vectors(sum, low, term, n);
    else
        wide_sum_half_vectors(sum, low, term, n);
}

// sum += term (n elements each). `low` (n / 2 bytes, zero before the first term) has the bits that bf16
// lacks. n is a multiple of a vector.
inline void wide_sum_add(Tensor<bf16>& sum, Tensor<uint8_t>& low, const Tensor<float>& term, Stream stream) {
    const int64_t n = sum.size();
    assert(n == term.size() && n == 2 * low.size() && n % kVectorSize<bf16> == 0);
    const Operation operation("wide_sum_add", 0, pass_bytes(sum, sum, low, low, term));
    launch<wide_sum_kernel>(elementwise_blocks<bf16>(n), kBlockThreads, 0, stream, sum.data(), low.data(),
                            term.data(), n);
}
