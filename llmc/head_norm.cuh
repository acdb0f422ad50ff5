// head_norm.cuh - Qwen3's normalization of queries and keys: RMSNorm over each head of a packed qkv, with one
// weight for all heads of queries and one for all heads of keys.
//
// Backward reads qkv, forward's input, and nothing else of forward: it sums the squares of a head again. So
// no statistics are kept, and forward's output can be recomputed with the same bits. Bound by memory: forward
// reads and writes qkv once; backward reads queries and keys, and reads and writes their gradients. A warp
// has a row, and does as many heads side by side as fit in its lanes.
#pragma once

#include <algorithm>

#include "llmc/columns.cuh"
#include "llmc/rmsnorm.cuh"
#include "llmc/warp_rows.h"

// out = qkv with its queries and keys normalized; values are copied, unless out is qkv.
template <class T, int N>
__global__ void __launch_bounds__(kBlockThreads)
    head_norm_forward_kernel(T* out, const T* qkv, const T* q_weight, const T* k_weight, int rows, int heads,
                             int kv_heads, int head_size, float epsilon) {
    const int row = blockIdx.x * warps_per_block() + warp();
    if (row >= rows) return;
    const HeadLanes share = HeadLanes::of<N>(head_size);
    const int step = share.lanes * N, normalized = heads + kv_heads;
    const int64_t start = int64_t{row} * (normalized + kv_heads) * head_size;
    for (int h = 0; h < normalized; h += share.heads) {
        const int head = h + share.head, size = head < normalized ? head_size : 0;
        const int64_t at = start + int64_t{head} * head_size;
        Accumulator<N> squares;
        for (int c = share.first; c < size; c += step) {
            const Packed<T, N> p = load<N>(qkv + at + c);
            for (int k = 0; k < N; k++) squares[k] += p[k] * p[k];
        }
        const float r = rsqrtf(share.sum(sum_of(squares.v)) / head_size + epsilon);
        rms_normalize<N>(out + at, qkv + at, r, head < heads ? q_weight : k_weight, size, share.first, step);
    }
    if (out == qkv) return;
    const int64_t values = start + int64_t{normalized} * head_size;
    for (int c = lane() * N; c < kv_heads * head_size; c += kLanes * N)
        store(out + values + c, load<N>(qkv + values + c));
}

// Computes the gradients of queries and keys in place, for a chunk of rows; with kWeights also the sums of
// the weights' gradients over the chunk.
template <class T, int N, bool kWeights>
__global__ void __launch_bounds__(kBlockThreads)
    head_norm_backward_kernel(T* d_qkv, float* partial, const T* qkv, const T* q_weight, const T* k_weight,
                              int rows, int rows_per_chunk, int heads, int kv_heads, int head_size,
                              float epsilon) {
    DYNAMIC_SHARED(float, shared);  // (warps * heads at a time, queries and keys, head_size)
    const HeadLanes share = HeadLanes::of<N>(head_size);
    const int step = share.lanes * N, normalized = heads + kv_heads;
    float* const sums = shared + (warp() * share.heads + share.head) * 2 * head_size;
    if constexpr (kWeights) {
        for (int c = share.first; c < head_size; c += step) {
            store(sums + c, Accumulator<N>().v);
            store(sums + head_size + c, Accumulator<N>().v);
        }
    }
    const int chunk_end = (blockIdx.x + 1) * rows_per_chunk, end = chunk_end < rows ? chunk_end : rows;
    for (int row = blockIdx.x * rows_per_chunk + warp(); row < end; row += warps_per_block()) {
        const int64_t start = int64_t{row} * (normalized + kv_heads) * head_size;
        for (int h = 0; h < normalized; h += share.heads) {
            const int head = h + share.head, size = head < normalized ? head_size : 0;
            const int64_t at = start + int64_t{head} * head_size;
            const T* const weight = head < heads ? q_weight : k_weight;
            Accumulator<N> squares, products;
            for (int c = share.first; c < size; c += step) {
                const Packed<T, N> d = load<N>(d_qkv + at + c), p = load<N>(qkv + at + c),
                                   w = load<N>(weight + c);
                for (int k = 0; k < N; k++) {
                    squares[k] += p[k] * p[k];
                    products[k] += d[k] * w[k] * p[k];
                }
            }
            const float r = rsqrtf(share.sum(sum_of(squares.v)) / head_size + epsilon);
            const float mean_gx = share.sum(sum_of(products.v)) * r / head_size;
            for (int c = share.first; c < size; c += step) {
                const Packed<T, N> d = load<N>(d_qkv + at + c), p = load<N>(qkv + at + c),
                                   w = load<N>(weight + c);
                float o[N];
                for (int k = 0; k < N; k++) o[k] = r * (d[k] * w[k] - p[k] * r * mean_gx);
                store(d_qkv + at + c, o);
                if constexpr (kWeights) {
                    float* const sum = sums + (head < heads ? 0 : head_size) + c;
                    const Packed<float, N> before = load<N>(sum);
                    float s[N];
                    for (int k = 0; k < N; k++) s[k] = before[k] + d[k] * (p[k] * r);
                    store(sum, s);
                }
            }
        }
    }
    if constexpr (kWeights) {
        __syncthreads();
        for (int c = threadIdx.x; c < 2 * head_size; c += blockDim.x) {
            float total = 0.f;
            for (int i = 0; i < kBlockWarps * share.heads; i++) total += shared[i * 2 * head_size + c];
            partial[int64_t{blockIdx.x} * 2 * head_size + c] = total;
        }
    }
}

constexpr int kHeadNormRows = kBlockWarps * 4;  // the fewest rows worth a chunk
constexpr int kHeadNormChunks = 128;            // the most chunks

// The shape of head_norm_backward's fp32 scratch for the weights' gradients.
inline Shape head_norm_scratch(int64_t rows, int64_t head_size) {
    return {std::min<int64_t>(kHeadNormChunks, ceil_div(rows, kHeadNormRows)), 2, head_size};
}

// out = qkv (rows, (heads + 2 kv_heads) * head_size) with each head of the queries and of the keys
// normalized: x rstd weight, rstd = 1/sqrt(mean(x^2) + epsilon), rounded as in rmsnorm.cuh. q_weight and
// k_weight: (head_size). out may be qkv if no backward needs qkv.
template <class T>
void head_norm_forward(Tensor<T>& out, const Tensor<T>& qkv, const Tensor<T>& q_weight,
                       const Tensor<T>& k_weight, int heads, int kv_heads, Stream stream, float epsilon) {
    const int rows = static_cast<int>(qkv.rows()), head_size = static_cast<int>(q_weight.size());
    assert(qkv.columns() == int64_t{heads + 2 * kv_heads} * head_size && out.size() == qkv.size());
    const Operation operation("head_norm_forward", 0, pass_bytes(out, qkv));
    with_vector_size<T>(head_size, [&]<int N>(std::integral_constant<int, N>) {
        launch<head_norm_forward_kernel<T, N>>(blocks_of_rows(rows), kBlockThreads, 0, stream, out.data(),
                                               qkv.data(), q_weight.data(), k_weight.data(), rows, heads,
                                               kv_heads, head_size, epsilon);
    });
}

// Replaces the gradients of head_norm_forward's queries and keys in d_qkv by those of its input qkv, and adds
// to d_q_weight and d_k_weight (head_size) their gradients. If these two are absent, the weights are frozen:
// nothing is computed for them, and scratch may be absent too. Otherwise scratch is head_norm_scratch(rows,
// head_size).
template <class T, class Gradient>
void head_norm_backward(Tensor<T>& d_qkv, Tensor<Gradient>& d_q_weight, Tensor<Gradient>& d_k_weight,
                        Tensor<float>& scratch, const Tensor<T>& qkv, const Tensor<T>& q_weight,
                        const Tensor<T>& k_weight, int heads, int kv_heads, Stream stream, float epsilon) {
    const int rows = static_cast<int>(qkv.rows()), head_size = static_cast<int>(q_weight.size());
    const bool weights = static_cast<bool>(d_q_weight);
    assert(weights == static_cast<bool>(d_k_weight) && d_qkv.size() == qkv.size());
    assert(qkv.columns() == int64_t{heads + 2 * kv_heads} * head_size);
    const Operation operation("head_norm_backward", 0,
                              3.0 * rows * (heads + kv_heads) * head_size * sizeof(T));
    const int chunks =
        static_cast<int>(weights ? head_norm_scratch(rows, head_size).dims[0] : blocks_of_rows(rows));
    const int rows_per_chunk = static_cast<int>(ceil_div(rows, chunks));
    with_vector_size<T>(head_size, [&]<int N>(std::integral_constant<int, N>) {
        const int sums = kBlockWarps * (kLanes / HeadLanes::lanes_for<N>(head_size));
        auto run = [&]<bool kWeights>(std::bool_constant<kWeights>) {
            launch<head_norm_backward_kernel<T, N, kWeights>>(
                static_cast<unsigned>(chunks), kBlockThreads,
                kWeights ? sums * 2 * head_size * sizeof(float) : 0, stream, d_qkv.data(), scratch.data(),
                qkv.data(), q_weight.data(), k_weight.data(), rows, rows_per_chunk, heads, kv_heads,
                head_size, epsilon);
        };
        weights ? run(std::true_type()) : run(std::false_type());
    });
    if (!weights) return;
    assert(scratch.shape() == head_norm_scratch(rows, head_size));
    add_chunks(ColumnOutputs<Gradient, 2>{{d_q_weight.data(), d_k_weight.data()}}, scratch, chunks, head_size,
               stream);
}
