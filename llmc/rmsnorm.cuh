// rmsnorm.cuh - normalization of rows by their root mean square (Zhang, Sennrich, arXiv:1910.07467): forward,
// forward fused with the residual addition before it, backward, and recomputation from saved statistics.
//
// Families multiply the normalized row with the weight in three ways (RmsProduct), each rounded as in
// `transformers`.
//
// Qwen3's norm of each head's queries and keys is here too.
#pragma once

#include <algorithm>

#include "llmc/column_sums.cuh"
#include "llmc/simt_vector.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

// How a normalized row is multiplied with the weight. Llama rounds the row to T first; OLMo and Gemma
// multiply in fp32 and round once. Gemma multiplies with 1 + weight. So a weight's value is 0 there where it
// is 1 in others, and its gradient is the same.
struct RmsProduct {
    bool rounds_row = true;
    float added = 0.f;  // to the weight
};

// Writes the output of a vector of a row. All kernels use this code, so that a recomputed output has the same
// bits.
template <int N, class T>
SIMT_DEVICE void rms_normalize(T* out, const Packed<T, N>& x, float rstd, const T* weight,
                               RmsProduct product) {
    const Packed<T, N> w = load<N>(weight);
    float normalized[N], o[N];
    for (int k = 0; k < N; k++) normalized[k] = x[k] * rstd;
    if (product.rounds_row) {
        const Packed<T, N> n = rounded<T>(normalized);
        for (int k = 0; k < N; k++) normalized[k] = n[k];
    }
    for (int k = 0; k < N; k++) o[k] = normalized[k] * (w[k] + product.added);
    store(out, o);
}
// Writes the output of a row of C elements. Lanes take every `step`-th element from their `first` on.
template <int N, class T>
SIMT_DEVICE void rms_normalize(T* out, const T* x, float rstd, const T* weight, RmsProduct product, int C,
                               int first, int step) {
    for (int c = first; c < C; c += step)
        rms_normalize<N>(out + c, load<N>(x + c), rstd, weight + c, product);
}

// One warp per row. With kResidual the row is a + b, rounded to T: the rounded row is stored in `sum` and
// normalized. At least one block a multiprocessor: without this bound ptxas spills to fit more blocks on
// sm_100.
template <class T, int N, int kKept, bool kResidual>
__global__ void __launch_bounds__(kBlockThreads, 1)
    rmsnorm_forward_kernel(T* out, float* rstd, T* sum, const T* a, const T* b, const T* weight, int rows,
                           int C, int64_t apart, float epsilon, RmsProduct product) {
    const int row = blockIdx.x * warps_per_block() + warp();
    if (row >= rows) return;
    const int64_t start = row * apart;
    LaneRow<T, N, kKept> x(a + start, C);
    const LaneRow<T, N, kKept> other(kResidual ? b + start : nullptr, kResidual ? C : 0);
    Accumulator<N> squares;
    for_each_lane_vector<N, kKept>(C, [&](int v, int c) SIMT_INLINE {
        Packed<T, N> p = x.at(v, c);
        if constexpr (kResidual) {
            const Packed<T, N> q = other.at(v, c);
            float both[N];
            for (int k = 0; k < N; k++) both[k] = p[k] + q[k];
            p = rounded<T>(both);
            store(sum + start + c, p);
            x.replace(v, p);
        }
        // fmaf: left to compilers, the forms of this kernel might round differently.
        for (int k = 0; k < N; k++) squares[k] = fmaf(p[k], p[k], squares[k]);
    });
    if constexpr (kResidual) x.replaced_by(sum + start);
    const float r = rsqrtf(warp_sum(sum_of(squares.v)) / C + epsilon);
    x.next_pass();
    for_each_lane_vector<N, kKept>(C, [&](int v, int c) SIMT_INLINE {
        rms_normalize<N>(out + start + c, x.at(v, c), r, weight + c, product);
    });
    if (lane() == 0) rstd[row] = r;
}

template <class T, int N>
__global__ void __launch_bounds__(kBlockThreads)
    rmsnorm_normalize_kernel(T* out, const T* x, const float* rstd, const T* weight, int rows, int C,
                             RmsProduct product) {
    const int row = blockIdx.x * warps_per_block() + warp();
    if (row >= rows) return;
    const int64_t start = int64_t{row} * C;
    rms_normalize<N>(out + start, x + start, rstd[row], weight, product, C, lane() * N, kLanes * N);
}

// dx += rstd (g - xhat mean(g xhat)) with g = dout (weight + added) and xhat = x
// rstd. One warp per row, which it reads once if kKept vectors of it are kept in registers. The sum has the
// same order in any case.
template <class T, int N, int kKept>
__global__ void __launch_bounds__(kBlockThreads)
    rmsnorm_backward_input_kernel(T* dx, const T* dout, const T* x, const float* rstd, const T* weight,
                                  int rows, int C, int64_t apart, float added) {
    const int row = blockIdx.x * warps_per_block() + warp();
    if (row >= rows) return;
    const int64_t start = row * apart;
    const float r = rstd[row];
    LaneRow<T, N, kKept> d_row(dout + start, C), x_row(x + start, C);
    Accumulator<N> sum_gx;
    for_each_lane_vector<N, kKept>(C, [&](int v, int c) SIMT_INLINE {
        const Packed<T, N> d = d_row.at(v, c), p = x_row.at(v, c), w = load<N>(weight + c);
        for (int k = 0; k < N; k++) sum_gx[k] += d[k] * (w[k] + added) * (p[k] * r);
    });
    const float mean_gx = warp_sum(sum_of(sum_gx.v)) / C;
    d_row.next_pass();
    x_row.next_pass();
    for_each_lane_vector<N, kKept>(C, [&](int v, int c) SIMT_INLINE {
        const Packed<T, N> d = d_row.at(v, c), p = x_row.at(v, c), w = load<N>(weight + c);
        const Packed<T, N> before = load<N>(dx + start + c);
        float o[N];
        for (int k = 0; k < N; k++) o[k] = before[k] + r * (d[k] * (w[k] + added) - p[k] * r * mean_gx);
        store(dx + start + c, o);
    });
}

// What one element adds to the weight's gradient: dout xhat.
template <class T>
struct RmsnormColumns {
    static constexpr int kSums = 1;
    const T *dout, *x;
    const float* rstd;
    template <int N>
    struct Part {
        Packed<T, N> d, p;
        float r;
    };
    template <int N>
    SIMT_DEVICE Part<N> part(int row, int64_t at) const {
        return {load<N>(dout + at), load<N>(x + at), rstd[row]};
    }
    template <int N>
    SIMT_DEVICE static void add(Accumulator<N> (&sums)[kSums], const Part<N>& of) {
        for (int k = 0; k < N; k++) sums[0][k] += of.d[k] * (of.p[k] * of.r);
    }
};

template <class T, bool kResidual>
void rmsnorm_launch(Tensor<T>& out, Tensor<float>& rstd, T* sum, const Tensor<T>& a, const T* b,
                    const Tensor<T>& weight, Stream stream, float epsilon, RmsProduct product,
                    int64_t apart) {
    const int rows = static_cast<int>(a.rows()), C = static_cast<int>(a.columns());
    with_lane_rows<T>(
        C,
        [&]<int N, int kKept>(std::integral_constant<int, N>, std::integral_constant<int, kKept>) {
            launch<rmsnorm_forward_kernel<T, N, kKept, kResidual>>(
                blocks_of_rows(rows), kBlockThreads, 0, stream, out.data(), rstd.data(), sum, a.data(), b,
                weight.data(), rows, C, apart > 0 ? apart : C, epsilon, product);
        },
        apart);
}

// out (rows, C) = x rstd (weight + product.added), with rstd = 1/sqrt(mean(x^2) + epsilon) of each row, which
// is saved. The rows of out and x begin `apart` elements apart, or C if that is 0. out may be x.
template <class T>
void rmsnorm_forward(Tensor<T>& out, Tensor<float>& rstd, const Tensor<T>& x, const Tensor<T>& weight,
                     Stream stream, float epsilon, RmsProduct product = {}, int64_t apart = 0) {
    const Operation operation("rmsnorm_forward", 0, pass_bytes(out, x));
    rmsnorm_launch<T, false>(out, rstd, nullptr, x, nullptr, weight, stream, epsilon, product, apart);
}

// sum (rows, C) = a + b, and out = rmsnorm of sum.
template <class T>
void residual_rmsnorm_forward(Tensor<T>& sum, Tensor<T>& out, Tensor<float>& rstd, const Tensor<T>& a,
                              const Tensor<T>& b, const Tensor<T>& weight, Stream stream, float epsilon,
                              RmsProduct product = {}) {
    const Operation operation("residual_rmsnorm_forward", 0, pass_bytes(sum, out, a, b));
    rmsnorm_launch<T, true>(out, rstd, sum.data(), a, b.data(), weight, stream, epsilon, product, 0);
}

// Recomputes rmsnorm_forward's output from x and the saved rstd: the same bits, one pass.
template <class T>
void rmsnorm_normalize(Tensor<T>& out, const Tensor<T>& x, const Tensor<float>& rstd, const Tensor<T>& weight,
                       Stream stream, RmsProduct product = {}) {
    const Operation operation("rmsnorm_normalize", 0, pass_bytes(out, x));
    const int rows = static_cast<int>(x.rows()), C = static_cast<int>(x.columns());
    with_vector_size<T>(C, [&]<int N>(std::integral_constant<int, N>) {
        launch<rmsnorm_normalize_kernel<T, N>>(blocks_of_rows(rows), kBlockThreads, 0, stream, out.data(),
                                               x.data(), rstd.data(), weight.data(), rows, C, product);
    });
}

// Adds to dx (rows, C) and dweight (C) their gradients through rmsnorm_forward of x, from dout (rows, C). If
// dweight is absent, the weight is frozen: nothing is computed for it, and scratch may be absent too.
// Otherwise scratch is column_sums_scratch(rows, C, 1). The rows of dx, dout and x begin `apart` elements
// apart, or C if that is 0.
template <class T, class Gradient>
void rmsnorm_backward(Tensor<T>& dx, Tensor<Gradient>& dweight, Tensor<float>& scratch, const Tensor<T>& dout,
                      const Tensor<T>& x, const Tensor<float>& rstd, const Tensor<T>& weight, Stream stream,
                      RmsProduct product = {}, int64_t apart = 0) {
    const Operation operation("rmsnorm_backward", 0,
                              pass_bytes(dx, dx, dout, x) + (dweight ? pass_bytes(dout, x) : 0));
    const int rows = static_cast<int>(x.rows()), C = static_cast<int>(x.columns());
    with_lane_rows<T>(
        C,
        [&]<int N, int kKept>(std::integral_constant<int, N>, std::integral_constant<int, kKept>) {
            launch<rmsnorm_backward_input_kernel<T, N, kKept>>(
                blocks_of_rows(rows), kBlockThreads, 0, stream, dx.data(), dout.data(), x.data(), rstd.data(),
                weight.data(), rows, C, apart > 0 ? apart : C, product.added);
        },
        apart);
    if (!dweight) return;
    const RmsnormColumns<T> columns{dout.data(), x.data(), rstd.data()};
    add_column_sums<T>(columns, ColumnOutputs<Gradient, 1>{{dweight.data()}}, scratch, rows, C, stream,
                       apart);
}

// ---- the norm of each head
//
// Qwen3's normalization of queries and keys: RMSNorm over each head of a packed qkv, with one weight for all
// heads of queries and one for all heads of keys.
//
// Backward reads qkv, forward's input, and nothing else of forward: it sums the squares of a head again. So
// no statistics are kept, and forward's output can be recomputed with the same bits. Bound by memory: forward
// reads and writes qkv once; backward reads queries and keys, and reads and writes their gradients. A warp
// has a row, and does as many heads side by side as fit in its lanes.

// out = qkv with its queries and keys normalized; values are copied, unless out is qkv.
template <class T, int N>
__global__ void __launch_bounds__(kBlockThreads, 1)  // as for rmsnorm_forward_kernel
    head_norm_forward_kernel(T* out, const T* qkv, const T* q_weight, const T* k_weight, int rows, int heads,
                             int kv_heads, int head_size, float epsilon, RmsProduct product) {
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
        rms_normalize<N>(out + at, qkv + at, r, head < heads ? q_weight : k_weight, product, size,
                         share.first, step);
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
                              float epsilon, float added) {
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
                    products[k] += d[k] * (w[k] + added) * p[k];
                }
            }
            const float r = rsqrtf(share.sum(sum_of(squares.v)) / head_size + epsilon);
            const float mean_gx = share.sum(sum_of(products.v)) * r / head_size;
            for (int c = share.first; c < size; c += step) {
                const Packed<T, N> d = load<N>(d_qkv + at + c), p = load<N>(qkv + at + c),
                                   w = load<N>(weight + c);
                float o[N];
                for (int k = 0; k < N; k++) o[k] = r * (d[k] * (w[k] + added) - p[k] * r * mean_gx);
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
// normalized: x rstd (weight + product.added), rstd = 1/sqrt(mean(x^2) + epsilon), rounded as in rmsnorm.cuh.
// q_weight and k_weight: (head_size). out may be qkv if no backward needs qkv.
template <class T>
void head_norm_forward(Tensor<T>& out, const Tensor<T>& qkv, const Tensor<T>& q_weight,
                       const Tensor<T>& k_weight, int heads, int kv_heads, Stream stream, float epsilon,
                       RmsProduct product = {}) {
    const int rows = static_cast<int>(qkv.rows()), head_size = static_cast<int>(q_weight.size());
    assert(qkv.columns() == int64_t{heads + 2 * kv_heads} * head_size && out.size() == qkv.size());
    const Operation operation("head_norm_forward", 0, pass_bytes(out, qkv));
    with_vector_size<T>(head_size, [&]<int N>(std::integral_constant<int, N>) {
        launch<head_norm_forward_kernel<T, N>>(blocks_of_rows(rows), kBlockThreads, 0, stream, out.data(),
                                               qkv.data(), q_weight.data(), k_weight.data(), rows, heads,
                                               kv_heads, head_size, epsilon, product);
    });
}

// Replaces the gradients of head_norm_forward's queries and keys in d_qkv by those of its input qkv, and adds
// to d_q_weight and d_k_weight (head_size) their gradients. If these two are absent, the weights are frozen:
// nothing is computed for them, and scratch may be absent too. Otherwise scratch is head_norm_scratch(rows,
// head_size).
template <class T, class Gradient>
void head_norm_backward(Tensor<T>& d_qkv, Tensor<Gradient>& d_q_weight, Tensor<Gradient>& d_k_weight,
                        Tensor<float>& scratch, const Tensor<T>& qkv, const Tensor<T>& q_weight,
                        const Tensor<T>& k_weight, int heads, int kv_heads, Stream stream, float epsilon,
                        RmsProduct product = {}) {
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
                head_size, epsilon, product.added);
        };
        weights ? run(std::true_type()) : run(std::false_type());
    });
    if (!weights) return;
    assert(scratch.shape() == head_norm_scratch(rows, head_size));
    add_chunks(ColumnOutputs<Gradient, 2>{{d_q_weight.data(), d_k_weight.data()}}, scratch, chunks, head_size,
               stream);
}
