// rope.cuh - rotary position embedding (Su et al., arXiv:2104.09864) of the queries and keys in a packed qkv,
// in place; and its inverse, which is its backward.
//
// In a head, elements i and i + rotated/2 are a pair (Hugging Face's order, not Meta's), where `rotated` is
// head_size or, with a partial rotation, fewer: the other channels stay as they are. Position p rotates
// it by the angle p * inverse_frequency[i]. As in `transformers` that product is rounded to fp32. Its cosine
// and sine stay fp32 here, while `transformers` rounds them to T. They are computed for each row and then
// used for all its heads: that costs 4 / heads of the arithmetic and no memory, whereas a table would have to
// be read beside q and k.
#pragma once

#include <numeric>

#include "llmc/column_sums.cuh"
#include "llmc/simt_vector.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

// The cosine and sine of x, 0 <= x <= 2^21, within 1e-7, without a branch. Subtracts n quarter turns, with
// pi/2 in two parts, so that this rounds only once. The product that n is computed from is rounded too, so
// the rest may be as large as 1: therefore Taylor's terms up to x^10.
SIMT_DEVICE void cos_sin(float x, float& cosine, float& sine) {
    const float n = floorf(x * 0.636619772f + 0.5f);
    const float r = fmaf(-n, -4.37113883e-8f, fmaf(-n, 1.57079637f, x)), r2 = r * r;
    float s = 1.f / 362880;
    s = s * r2 - 1.f / 5040;
    s = s * r2 + 1.f / 120;
    s = s * r2 - 1.f / 6;
    s = s * r2 * r + r;
    float c = -1.f / 3628800;
    c = c * r2 + 1.f / 40320;
    c = c * r2 - 1.f / 720;
    c = c * r2 + 1.f / 24;
    c = c * r2 - 0.5f;
    c = c * r2 + 1.f;
    const int quarter = static_cast<int>(n);
    const float turned_c = quarter & 1 ? s : c, turned_s = quarter & 1 ? c : s;
    cosine = (quarter + 1) & 2 ? -turned_c : turned_c;
    sine = quarter & 2 ? -turned_s : turned_s;
}

// How the heads of a layer are rotated.
struct Rotation {
    int heads, kv_heads, head_size;
    int rotated;      // channels of a head, the first ones, that are rotated; even
    float scale = 1;  // of the rotated channels
    // If beta is not 0, queries at position p are also multiplied by 1 + beta ln(1 + floor(p / original)).
    float beta = 0;
    int original = 1;

    int turned_heads() const { return heads + kv_heads; }
    SIMT_DEVICE float of_queries(int position) const {
        const int turns = position / original;
        return beta == 0.f ? 1.f : 1.f + beta * logf(1.f + static_cast<float>(turns));
    }
};

// One warp per row. A lane keeps the cosines and sines of its pairs for every head that it rotates.
template <class T, int N, bool kInverse>
__global__ void __launch_bounds__(kBlockThreads)
    rope_kernel(T* qkv, const float* frequencies, const int* positions, int rows, int row_length, Rotation of,
                int seq_len, int first_position) {
    const int row = blockIdx.x * warps_per_block() + warp();
    if (row >= rows) return;
    const int position = positions ? positions[row] : first_position + row % seq_len;
    const float of_queries = of.of_queries(position);
    const int half = of.rotated / 2, heads = of.heads + of.kv_heads;
    const int vectors = half / N, span = vectors < kLanes ? vectors : kLanes;  // lanes that share a head
    const int heads_at_once = kLanes / span;
    if (lane() >= heads_at_once * span) return;
    for (int v = lane() % span; v < vectors; v += span) {
        const Packed<float, N> frequency = load<N>(frequencies + v * N);
        float cosine[N], sine[N];
        for (int k = 0; k < N; k++) {
            cos_sin(static_cast<float>(position) * frequency[k], cosine[k], sine[k]);
            cosine[k] *= of.scale;
            sine[k] *= kInverse ? -of.scale : of.scale;
        }
        T* const first = qkv + int64_t{row} * row_length + v * N;
        for (int head = lane() / span; head < heads; head += heads_at_once) {
            T *const low = first + head * of.head_size, *const high = low + half;
            const float factor = head < of.heads ? of_queries : 1.f;
            const Packed<T, N> a = load<N>(low), b = load<N>(high);
            float turned_a[N], turned_b[N];
            for (int k = 0; k < N; k++) {
                turned_a[k] = factor * (a[k] * cosine[k] - b[k] * sine[k]);
                turned_b[k] = factor * (b[k] * cosine[k] + a[k] * sine[k]);
            }
            store(low, turned_a);
            store(high, turned_b);
        }
    }
}

template <class T, bool kInverse>
void rope_launch(const char* name, Tensor<T>& qkv, const Tensor<float>& frequencies, const Rotation& of,
                 int first_position, const Tensor<int>& positions, Stream stream) {
    const int rows = static_cast<int>(qkv.rows()), seq_len = static_cast<int>(qkv.shape().dims[1]);
    const int row_length = static_cast<int>(qkv.columns());
    assert(qkv.shape().count == 3 && row_length == (of.turned_heads() + of.kv_heads) * of.head_size);
    assert(int64_t{first_position} + seq_len <= 1 << 21);
    const Operation operation(name, 0, 2.0 * rows * of.turned_heads() * of.rotated * sizeof(T));
    with_vector_size<T>(std::gcd(of.rotated / 2, of.head_size), [&]<int N>(std::integral_constant<int, N>) {
        launch<rope_kernel<T, N, kInverse>>(blocks_of_rows(rows), kBlockThreads, 0, stream, qkv.data(),
                                            frequencies.data(), positions.data(), rows, row_length, of,
                                            seq_len, first_position);
    });
}

// Rotates the queries and the keys of each row of qkv (batch, seq_len, all heads * head_size) by the row's
// position: that in `positions` (batch, seq_len), or first_position + t if these are absent. Positions are
// below 2^21. inverse_frequencies (rotated / 2) is a copy on the device of what model_positions.h computes.
template <class T>
void rope_forward(Tensor<T>& qkv, const Tensor<float>& inverse_frequencies, const Rotation& of,
                  int first_position, const Tensor<int>& positions, Stream stream) {
    rope_launch<T, false>("rope_forward", qkv, inverse_frequencies, of, first_position, positions, stream);
}

// Rotates the gradients of queries and keys back, times the same factors.
template <class T>
void rope_backward(Tensor<T>& d_qkv, const Tensor<float>& inverse_frequencies, const Rotation& of,
                   int first_position, const Tensor<int>& positions, Stream stream) {
    rope_launch<T, true>("rope_backward", d_qkv, inverse_frequencies, of, first_position, positions, stream);
}
