// attention_cpu.h - causal attention of the fast CPU build: attention.cuh's algorithm in tiles large enough
// for oneDNN.
//
// A worker does whole tiles by itself, in backward all of a head's, so results do not depend on how many
// there are. Scores, probabilities and accumulators of a tile are the worker's scratch and stay in its cache;
// backward's dq of the head, in fp32, is too, and grows with the length.
#pragma once

#include <algorithm>

#include "llmc/attention_input.h"
#include "llmc/onednn.h"

// Rows and columns of a tile of scores.
constexpr int kForwardQueries = 128, kForwardKeys = 256;
constexpr int kBackwardQueries = 256, kBackwardKeys = 128;

// Rows of scores are worked on in runs, and tiles are whole runs wide.
constexpr int kScoreRun = 16;
using ScoreRun = Packed<float, kScoreRun>;

// A matrix to multiply with, and its strides.
template <class T>
struct StridedMatrix {
    const T* data;
    int64_t row, column = 1;
    StridedMatrix transposed() const { return {data, column, row}; }
};

// c (m, n) = a (m, k) b (k, n), or += if asked.
template <class T>
void tile_product(float* c, int64_t c_row, StridedMatrix<T> a, StridedMatrix<T> b, int m, int n, int k,
                  bool accumulate) {
    static thread_local simt::SharedMemory scratch;
    const OnednnProduct product{m, n, k, a.row, a.column, b.row, b.column, c_row, accumulate};
    onednn_matmul<T, float>(product, c, a.data, b.data, static_cast<const T*>(nullptr),
                            scratch.grow(onednn_scratch_bytes<T, float>(product)));
}

// Hands out parts of a worker's scratch; from nullptr it only counts bytes.
struct ScratchParts {
    unsigned char* base;
    size_t bytes = 0;
    template <class T>
    T* take(int64_t n) {
        T* p = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + bytes);
        bytes += ceil_div(n * sizeof(T), 64) * 64;
        return p;
    }
    // Scores that become `T`s in place if they are floats.
    template <class T>
    T* take_beside(float* scores, int64_t n) {
        if constexpr (std::is_same_v<T, float>)
            return scores;
        else
            return take<T>(n);
    }
};

template <class T>
struct ForwardScratch {
    float *scores, *out, *largest, *sum;
    T* p;
    size_t bytes;
    ForwardScratch(unsigned char* base, int head_size) {
        ScratchParts parts{base};
        scores = parts.take<float>(kForwardQueries * kForwardKeys);
        p = parts.take_beside<T>(scores, kForwardQueries * kForwardKeys);
        out = parts.take<float>(kForwardQueries * head_size);
        largest = parts.take<float>(kForwardQueries);
        sum = parts.take<float>(kForwardQueries);
        bytes = parts.bytes;
    }
};

template <class T>
struct BackwardScratch {
    float *scores, *dp, *dk, *dv, *dq;
    T *p, *ds;
    size_t bytes;
    BackwardScratch(unsigned char* base, int head_size, int queries) {
        ScratchParts parts{base};
        scores = parts.take<float>(kBackwardQueries * kBackwardKeys);
        p = parts.take_beside<T>(scores, kBackwardQueries * kBackwardKeys);
        dp = parts.take<float>(kBackwardQueries * kBackwardKeys);
        ds = parts.take_beside<T>(dp, kBackwardQueries * kBackwardKeys);
        dk = parts.take<float>(kBackwardKeys * head_size);
        dv = parts.take<float>(kBackwardKeys * head_size);
        dq = parts.take<float>(int64_t{queries} * head_size);
        bytes = parts.bytes;
    }
};

// n floats times factor, rounded to T.
template <class T>
void write_row(T* to, const float* from, int n, float factor) {
    int i = 0;
    for (; i + kScoreRun <= n; i += kScoreRun) {
        ScoreRun x = load<kScoreRun>(from + i);
        for (float& e : x.v) e *= factor;
        store(to + i, x.v);
    }
    for (; i < n; i++) to[i] = from_float<T>(from[i] * factor);
}

// The largest of n scores, whole runs. In g++'s own vectors: it leaves a loop of maxima scalar.
inline float largest_score(const float* s, int n) {
    typedef float Vector __attribute__((vector_size(sizeof(ScoreRun))));
    Vector most, x;
    memcpy(&most, s, sizeof most);
    for (int j = kScoreRun; j < n; j += kScoreRun) {
        memcpy(&x, s + j, sizeof x);
        most = x > most ? x : most;
    }
    ScoreRun run;
    memcpy(&run, &most, sizeof run);
    return largest_of(run.v);
}

// Of `visible` scores s: the exponentials relative to the largest so far (also of tiles before) to p, then
// zeros up to `columns`. Updates the row's largest score and sum, and returns what the sum so far was
// multiplied with.
template <class T>
float softmax_row(T* p, float* s, int visible, int columns, float scale, float& largest, float& sum) {
    if (visible <= 0) {
        std::fill(p, p + columns, from_float<T>(0.f));
        return 1.f;
    }
    const int end = static_cast<int>(ceil_div(visible, kScoreRun)) * kScoreRun;
    std::fill(s + visible, s + end, -INFINITY);
    const float top = std::max(largest, largest_score(s, end));
    Accumulator<kScoreRun> sums;
    for (int j = 0; j < end; j += kScoreRun) {
        ScoreRun x = load<kScoreRun>(s + j);
        for (int i = 0; i < kScoreRun; i++) x.v[i] = fast_exp((x.v[i] - top) * scale);
        for (int i = 0; i < kScoreRun; i++) sums[i] += x.v[i];
        store(p + j, x.v);
    }
    std::fill(p + visible, p + columns, from_float<T>(0.f));
    const float correction = largest == -INFINITY ? 0.f : fast_exp((largest - top) * scale);
    largest = top;
    sum = sum * correction + sums.sum();
    return correction;
}

// out and lse of kForwardQueries queries of one head. Grid (tiles of queries, heads, batch).
template <class T>
__global__ void attention_forward_cpu_kernel(T* out, float* lse, AttentionInput<T> in, float scale) {
    const ForwardScratch<T> scratch(simt::dynamic_shared, in.head_size);
    const int h = blockIdx.y, b = blockIdx.z, first = blockIdx.x * kForwardQueries;
    const int rows = std::min(kForwardQueries, in.queries - first), columns = in.head_size;
    const int end = in.keys_before(first + rows);
    const StridedMatrix<T> q{in.q + in.q_offset(b, h) + first * in.q_row, in.q_row};
    std::fill(scratch.out, scratch.out + rows * columns, 0.f);
    std::fill(scratch.largest, scratch.largest + rows, -INFINITY);
    std::fill(scratch.sum, scratch.sum + rows, 0.f);
    for (int key = 0; key < end; key += kForwardKeys) {
        const int width = std::min(kForwardKeys, end - key);
        const int64_t at = in.kv_offset(b, h) + key * in.kv_row;
        const StridedMatrix<T> k{in.k + at, in.kv_row}, v{in.v + at, in.kv_row};
        tile_product(scratch.scores, kForwardKeys, q, k.transposed(), rows, width, columns, false);
        for (int i = 0; i < rows; i++) {
            const int visible = std::min(width, in.keys_before(first + i + 1) - key);
            const float correction =
                softmax_row(scratch.p + i * kForwardKeys, scratch.scores + i * kForwardKeys, visible, width,
                            scale, scratch.largest[i], scratch.sum[i]);
            for (int c = 0; c < columns; c++) scratch.out[i * columns + c] *= correction;
        }
        tile_product(scratch.out, columns, StridedMatrix<T>{scratch.p, kForwardKeys}, v, rows, columns, width,
                     true);
    }
    for (int i = 0; i < rows; i++) {
        T* to = out + in.out_offset(b, h) + (first + i) * in.out_row();
        write_row(to, scratch.out + i * columns, columns, 1.f / scratch.sum[i]);
        if (lse) lse[in.row_offset(b, h) + first + i] = scratch.largest[i] * scale + logf(scratch.sum[i]);
    }
}

template <class T>
float dot(const float* x, const T* y, int n) {
    Accumulator<kScoreRun> sums;
    int c = 0;
    for (; c + kScoreRun <= n; c += kScoreRun)
        for (int i = 0; i < kScoreRun; i++) sums[i] += x[c + i] * to_float(y[c + i]);
    float sum = sums.sum();
    for (; c < n; c++) sum += x[c] * to_float(y[c]);
    return sum;
}

// One query of one head against all keys, as in decoding: no product is worth a call. Grid (heads, batch).
template <class T>
__global__ void attention_decode_cpu_kernel(T* out, float* lse, AttentionInput<T> in, float scale) {
    DYNAMIC_SHARED(float, scores);
    const int h = blockIdx.x, b = blockIdx.y, columns = in.head_size;
    float q[128], sums[128] = {};
    for (int c = 0; c < columns; c++) q[c] = to_float(in.q[in.q_offset(b, h) + c]);
    const T* const k = in.k + in.kv_offset(b, h);
    const T* const v = in.v + in.kv_offset(b, h);
    for (int j = 0; j < in.keys; j++) scores[j] = dot(q, k + j * in.kv_row, columns);
    float largest = -INFINITY, sum = 0.f;
    softmax_row(scores, scores, in.keys, in.keys, scale, largest, sum);
    for (int j = 0; j < in.keys; j++)
        for (int c = 0; c < columns; c++) sums[c] += scores[j] * to_float(v[j * in.kv_row + c]);
    T* const to = out + in.out_offset(b, h);
    for (int c = 0; c < columns; c++) to[c] = from_float<T>(sums[c] / sum);
    if (lse) lse[in.row_offset(b, h)] = largest * scale + logf(sum);
}

// P and dS of a row of scores s and of dp = dout V^T, in `columns` columns of which the first `visible` are
// seen.
template <class T>
void backward_row(T* p, T* ds, float* s, float* dp, int visible, int columns, float scale, float lse,
                  float delta) {
    visible = std::max(visible, 0);
    const int end = static_cast<int>(ceil_div(visible, kScoreRun)) * kScoreRun;
    for (int j = 0; j < end; j += kScoreRun) {
        ScoreRun x = load<kScoreRun>(s + j), y = load<kScoreRun>(dp + j);
        for (int i = 0; i < kScoreRun; i++) x.v[i] = fast_exp(x.v[i] * scale - lse);
        for (int i = 0; i < kScoreRun; i++) y.v[i] = x.v[i] * (y.v[i] - delta);
        store(p + j, x.v);
        store(ds + j, y.v);
    }
    std::fill(p + visible, p + columns, from_float<T>(0.f));
    std::fill(ds + visible, ds + columns, from_float<T>(0.f));
}

// Rows of head_size floats, times factor, to rows of T.
template <class T>
void write_rows(T* to, int64_t to_row, const float* from, int rows, int columns, float factor) {
    for (int i = 0; i < rows; i++) write_row(to + i * to_row, from + i * columns, columns, factor);
}

// dq, dk and dv of one head. Grid (heads, batch).
template <class T>
__global__ void attention_backward_cpu_kernel(T* dq, T* dk, T* dv, const T* dout, const float* lse,
                                              const float* delta, AttentionInput<T> in, float scale) {
    const BackwardScratch<T> scratch(simt::dynamic_shared, in.head_size, in.queries);
    const int h = blockIdx.x, b = blockIdx.y, columns = in.head_size;
    const int64_t stride = kBackwardKeys, rows_at = in.row_offset(b, h);
    for (int key = 0; key < in.keys; key += kBackwardKeys) {
        const int width = std::min(kBackwardKeys, in.keys - key);
        const int64_t at = in.kv_offset(b, h) + key * in.kv_row;
        const StridedMatrix<T> k{in.k + at, in.kv_row}, v{in.v + at, in.kv_row};
        for (int query = key; query < in.queries; query += kBackwardQueries) {
            const int rows = std::min(kBackwardQueries, in.queries - query);
            const StridedMatrix<T> q{in.q + in.q_offset(b, h) + query * in.q_row, in.q_row};
            const StridedMatrix<T> d_out{dout + in.out_offset(b, h) + query * in.out_row(), in.out_row()};
            tile_product(scratch.scores, stride, q, k.transposed(), rows, width, columns, false);
            tile_product(scratch.dp, stride, d_out, v.transposed(), rows, width, columns, false);
            for (int i = 0; i < rows; i++)
                backward_row(scratch.p + i * stride, scratch.ds + i * stride, scratch.scores + i * stride,
                             scratch.dp + i * stride, std::min(width, query + i + 1 - key), width, scale,
                             lse[rows_at + query + i], delta[rows_at + query + i]);
            const StridedMatrix<T> p{scratch.p, stride}, ds{scratch.ds, stride};
            const bool more = query > key;
            tile_product(scratch.dv, columns, p.transposed(), d_out, width, columns, rows, more);
            tile_product(scratch.dk, columns, ds.transposed(), q, width, columns, rows, more);
            tile_product(scratch.dq + int64_t{query} * columns, columns, ds, k, rows, columns, width,
                         key > 0);
        }
        write_rows(dk + at, in.kv_row, scratch.dk, width, columns, scale);
        write_rows(dv + at, in.kv_row, scratch.dv, width, columns, 1.f);
    }
    write_rows(dq + in.q_offset(b, h), in.q_row, scratch.dq, in.queries, columns, scale);
}

// attention_forward() and attention_backward() of attention.cuh, delta made.
template <class T>
void attention_forward_on_cpu(T* out, float* lse, const AttentionInput<T>& in, Stream stream) {
    if (in.queries == 1)
        launch<attention_decode_cpu_kernel<T>>(dim3(in.heads, in.batch), 1,
                                               ceil_div(in.keys, kScoreRun) * sizeof(ScoreRun), stream, out,
                                               lse, in, in.scale());
    else
        launch<attention_forward_cpu_kernel<T>>(
            dim3(ceil_div(in.queries, kForwardQueries), in.heads, in.batch), 1,
            ForwardScratch<T>(nullptr, in.head_size).bytes, stream, out, lse, in, in.scale());
}
template <class T>
void attention_backward_on_cpu(T* dq, T* dk, T* dv, const T* dout, const float* lse, const float* delta,
                               const AttentionInput<T>& in, Stream stream) {
    launch<attention_backward_cpu_kernel<T>>(dim3(in.heads, in.batch), 1,
                                             BackwardScratch<T>(nullptr, in.head_size, in.queries).bytes,
                                             stream, dq, dk, dv, dout, lse, delta, in, in.scale());
}
