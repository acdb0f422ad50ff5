// attention_cpu.h - causal attention of the fast CPU build: attention.cuh's algorithm in tiles large enough
// for oneDNN.
//
// A worker computes whole tiles by itself. In backward it computes a whole head of keys and values. Where
// there are too few heads for all workers, they share one head at a time: each takes a tile of keys, and they
// add to dq in the order of the tiles. So results do not depend on the number of workers. The scores,
// probabilities and accumulators of a tile are in the worker's scratch and stay in its cache. dq of the query
// heads that share the keys is summed in fp32, in memory that grows with the sequence length.
#pragma once

#include <algorithm>
#include <atomic>
#include <new>
#include <thread>

#include "llmc/attention_input.h"
#include "llmc/matmul_onednn.h"
#include "llmc/matvec_cpu.h"

// Queries and keys in a tile of scores.
constexpr int kForwardQueries = 128, kForwardKeys = 256;
constexpr int kBackwardQueries = 256, kBackwardKeys = 128;
// In decoding, the heads of a group read this many keys one head after the other: only the first head reads
// them from memory, the others find them in the cache.
constexpr int kDecodeKeys = 128;

// Rows of scores are processed in runs of this many columns, and the width of a tile is a multiple of it.
constexpr int kScoreRun = 16;
using ScoreRun = Packed<float, kScoreRun>;

// An operand of a matrix product, with its strides in elements.
template <class T>
struct StridedMatrix {
    const T* data;
    int64_t row, column = 1;
    StridedMatrix transposed() const { return {data, column, row}; }
};

// c (m, n) = a (m, k) b (k, n), or c += a b if `accumulate`.
template <class T>
void tile_product(float* c, int64_t c_row, StridedMatrix<T> a, StridedMatrix<T> b, int m, int n, int k,
                  bool accumulate) {
    static thread_local simt::SharedMemory scratch;
    const OnednnProduct product{m, n, k, a.row, a.column, b.row, b.column, c_row, accumulate};
    onednn::Operands& kept = onednn::operands<T, float>(product);
    onednn_matmul(kept, product, c, a.data, b.data, static_cast<const T*>(nullptr),
                  scratch.grow(kept.product->scratch_bytes));
}

// Hands out parts of a worker's scratch, one after the other. With a null `base` it only counts bytes.
struct ScratchParts {
    unsigned char* base;
    size_t bytes = 0;
    template <class T>
    T* take(int64_t n) {
        T* p = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + bytes);
        bytes += ceil_div(n * sizeof(T), 64) * 64;
        return p;
    }
    // Memory for `scores` as `T`s: the scores themselves if T is float, else memory of its own.
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

// A worker's scratch in backward.
template <class T>
struct BackwardScratch {
    float *scores, *dp, *dk, *dv;
    T *p, *ds;
    size_t bytes;
    BackwardScratch(unsigned char* base, int head_size) {
        ScratchParts parts{base};
        scores = parts.take<float>(kBackwardQueries * kBackwardKeys);
        p = parts.take_beside<T>(scores, kBackwardQueries * kBackwardKeys);
        dp = parts.take<float>(kBackwardQueries * kBackwardKeys);
        ds = parts.take_beside<T>(dp, kBackwardQueries * kBackwardKeys);
        dk = parts.take<float>(kBackwardKeys * head_size);
        dv = parts.take<float>(kBackwardKeys * head_size);
        bytes = parts.bytes;
    }
};

// Writes n floats, times factor, as T.
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

// The columns of a tile that a row sees, and the whole runs that contain them.
struct SeenColumns {
    int begin, end;
    bool none() const { return begin >= end; }
    int runs_begin() const { return begin / kScoreRun * kScoreRun; }
    int runs_end() const { return static_cast<int>(ceil_div(end, kScoreRun)) * kScoreRun; }
};
// The columns that query `query` of batch entry b sees among the `width` columns from `key` on.
template <class T>
SeenColumns seen_columns(const AttentionInput<T>& in, int b, int query, int key, int width) {
    return {std::max(in.first_key(b, query) - key, 0), std::min(in.position(query) + 1 - key, width)};
}

// Adds ALiBi's term to the scores of query `query` from `key` on. The scores are not yet multiplied with
// `scale`.
template <class T>
void add_alibi(float* s, SeenColumns seen, const AttentionInput<T>& in, int h, int query, int key,
               float scale) {
    if (!in.alibi) return;
    const float slope = in.slope(h, scale);
    const int distance = key - in.position(query);
    for (int j = seen.begin; j < seen.end; j++) s[j] += slope * static_cast<float>(distance + j);
}

// Turns the scores of a row's visible runs into fractions of their cap, by tanh.
template <class T>
void cap_row(float* s, SeenColumns seen, const AttentionInput<T>& in, float scale) {
    if (!(in.cap > 0)) return;
    const float factor = 2 * scale / in.cap;
    for (int j = seen.runs_begin(); j < seen.end; j += kScoreRun) {
        ScoreRun x = load<kScoreRun>(s + j);
        for (float& e : x.v) e = 1.f - 2.f / (fast_exp(e * factor) + 1.f);
        store(s + j, x.v);
    }
}

// Sets x to `value` in those of the columns first ... last - 1 that the row does not see.
template <class T>
void fill_unseen(T* x, SeenColumns seen, int first, int last, float value) {
    if (seen.none()) seen = {last, last};
    std::fill(x + first, x + seen.begin, from_float<T>(value));
    std::fill(x + seen.end, x + last, from_float<T>(value));
}

// The largest of n scores, whole runs. Uses g++'s vector type, because g++ does not vectorize a loop of
// maxima.
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

// Writes to p the exponentials of the visible scores relative to the row's largest score so far, earlier
// tiles included, and zero in the other columns. Updates the row's largest score and its sum, and returns the
// factor that the earlier sum was multiplied with.
template <class T>
float softmax_row(T* p, float* s, SeenColumns seen, int columns, float scale, float& largest, float& sum) {
    if (seen.none()) {
        fill_unseen(p, seen, 0, columns, 0.f);
        return 1.f;
    }
    const int begin = seen.runs_begin(), end = seen.runs_end();
    fill_unseen(s, seen, begin, end, -INFINITY);
    const float top = std::max(largest, largest_score(s + begin, end - begin));
    Accumulator<kScoreRun> sums;
    for (int j = begin; j < end; j += kScoreRun) {
        ScoreRun x = load<kScoreRun>(s + j);
        for (int i = 0; i < kScoreRun; i++) x.v[i] = fast_exp((x.v[i] - top) * scale);
        for (int i = 0; i < kScoreRun; i++) sums[i] += x.v[i];
        store(p + j, x.v);
    }
    fill_unseen(p, seen, 0, columns, 0.f);
    const float correction = largest == -INFINITY ? 0.f : fast_exp((largest - top) * scale);
    largest = top;
    sum = sum * correction + sums.sum();
    return correction;
}

// Applies dropout to x, a row of probabilities or of their gradients, for the keys from `key` on.
template <class X, class T>
void drop_row(X* x, const AttentionInput<T>& in, int b, int h, int query, int key, int columns) {
    if (!in.dropout) return;
    const uint64_t here = in.dropout.here();
    const int64_t first = in.score_number(b, h, query, key);
    for (int j = 0; j < columns; j++)
        x[j] = from_float<X>(to_float(x[j]) * in.dropout.factor(here, first + j));
}

// Computes out and lse of kForwardQueries queries of one head. Grid (tiles of queries, heads, batch).
template <class T>
__global__ void attention_forward_cpu_kernel(T* out, float* lse, AttentionInput<T> in, float scale) {
    const ForwardScratch<T> scratch(simt::dynamic_shared, in.head_size);
    const int h = blockIdx.y, b = blockIdx.z, kv = h / in.group(), first = blockIdx.x * kForwardQueries;
    const int rows = std::min(kForwardQueries, in.queries - first), columns = in.head_size;
    in.drop_keys(in.first_tile(in.first_key(b, first)));
    const int end = in.keys_before(first + rows);
    const float softmax_scale = in.softmax_scale(scale);
    const StridedMatrix<T> q{in.q + in.q_offset(b, h) + first * in.q_row, in.q_row};
    if (in.continues) {
        std::copy_n(in.carried_rows(h, first), rows * columns, scratch.out);
        for (int i = 0; i < rows; i++) {
            const float* const statistics = in.carried_statistics(h, first + i);
            scratch.largest[i] = statistics[0], scratch.sum[i] = statistics[1];
        }
    } else {
        std::fill(scratch.out, scratch.out + rows * columns, 0.f);
        std::fill(scratch.largest, scratch.largest + rows, -INFINITY);
        std::fill(scratch.sum, scratch.sum + rows, 0.f);
    }
    for (int key = 0; key < end; key += kForwardKeys) {
        const int width = std::min(kForwardKeys, end - key);
        const int64_t at = in.kv_offset(b, kv) + key * in.kv_row;
        const StridedMatrix<T> k{in.k + at, in.kv_row}, v{in.v + at, in.kv_row};
        tile_product(scratch.scores, kForwardKeys, q, k.transposed(), rows, width, columns, false);
        for (int i = 0; i < rows; i++) {
            float* const scores = scratch.scores + i * kForwardKeys;
            const SeenColumns seen = seen_columns(in, b, first + i, key, width);
            cap_row(scores, seen, in, scale);
            add_alibi(scores, seen, in, h, first + i, key, scale);
            const float correction = softmax_row(scratch.p + i * kForwardKeys, scores, seen, width,
                                                 softmax_scale, scratch.largest[i], scratch.sum[i]);
            drop_row(scratch.p + i * kForwardKeys, in, b, h, first + i, key, width);
            for (int c = 0; c < columns; c++) scratch.out[i * columns + c] *= correction;
        }
        tile_product(scratch.out, columns, StridedMatrix<T>{scratch.p, kForwardKeys}, v, rows, columns, width,
                     true);
    }
    if (in.later > 0) {
        std::copy_n(scratch.out, rows * columns, in.carried_rows(h, first));
        for (int i = 0; i < rows; i++) {
            float* const statistics = in.carried_statistics(h, first + i);
            statistics[0] = scratch.largest[i], statistics[1] = scratch.sum[i];
        }
        return;
    }
    for (int i = 0; i < rows; i++) {
        T* to = out + in.out_offset(b, h) + (first + i) * in.out_row();
        write_row(to, scratch.out + i * columns, columns, 1.f / scratch.sum[i]);
        if (lse)
            lse[in.row_offset(b, h) + first + i] = scratch.largest[i] * softmax_scale + logf(scratch.sum[i]);
    }
}

// out[c] += the sum of p[j] v[j][c] over rows j, in their order, for kRuns runs of columns.
template <int kRuns, class T>
void add_rows(float* out, const float* p, const T* v, int64_t v_row, int rows) {
    ScoreRun sums[kRuns];
    for (int r = 0; r < kRuns; r++) sums[r] = load<kScoreRun>(out + r * kScoreRun);
    for (int j = 0; j < rows; j++)
        for (int r = 0; r < kRuns; r++)
            for (int i = 0; i < kScoreRun; i++)
                sums[r].v[i] += p[j] * to_float(v[j * v_row + r * kScoreRun + i]);
    for (int r = 0; r < kRuns; r++) store(out + r * kScoreRun, sums[r]);
}
// out[c] += the same sum, for any number of columns.
template <class T>
void add_rows(float* out, const float* p, const T* v, int64_t v_row, int rows, int columns) {
    int c = 0;
    for (; c + 4 * kScoreRun <= columns; c += 4 * kScoreRun) add_rows<4>(out + c, p, v + c, v_row, rows);
    for (; c + kScoreRun <= columns; c += kScoreRun) add_rows<1>(out + c, p, v + c, v_row, rows);
    for (; c < columns; c++)
        for (int j = 0; j < rows; j++) out[c] += p[j] * to_float(v[j * v_row + c]);
}

// A worker's scratch in decoding, for the query heads that share keys: q, the scores, their sum of
// exponentials, and the output so far.
struct DecodeScratch {
    float *q, *scores, *sum, *out;
    int64_t scores_row;
    size_t bytes;
    DecodeScratch(unsigned char* base, int group, int head_size, int keys)
        : scores_row(ceil_div(keys, kScoreRun) * kScoreRun) {
        ScratchParts parts{base};
        q = parts.take<float>(group * head_size);
        scores = parts.take<float>(group * scores_row);
        sum = parts.take<float>(group);
        out = parts.take<float>(group * head_size);
        bytes = parts.bytes;
    }
};

// Decoding: one query of each head that shares these keys, against all keys that it sees. The products are
// too small to be worth a call of oneDNN. Grid (kv_heads, batch).
template <class T>
__global__ void attention_decode_cpu_kernel(T* out, float* lse, AttentionInput<T> in, float scale) {
    const int b = blockIdx.y, group = in.group(), first_head = blockIdx.x * group, columns = in.head_size;
    in.drop_keys(in.first_key(b, 0));
    const float softmax_scale = in.softmax_scale(scale);
    const DecodeScratch scratch(simt::dynamic_shared, group, columns, in.keys);
    const T* const k = in.k + in.kv_offset(b, blockIdx.x);
    const T* const v = in.v + in.kv_offset(b, blockIdx.x);
    for (int g = 0; g < group; g++)
        for (int c = 0; c < columns; c++)
            scratch.q[g * columns + c] = to_float(in.q[in.q_offset(b, first_head + g) + c]);
    for (int key = 0; key < in.keys; key += kDecodeKeys)
        for (int g = 0; g < group; g++)
            for (int j = key; j < std::min(key + kDecodeKeys, in.keys); j++)
                scratch.scores[g * scratch.scores_row + j] =
                    dot(scratch.q + g * columns, k + j * in.kv_row, columns);
    for (int g = 0; g < group; g++) {
        float* const scores = scratch.scores + g * scratch.scores_row;
        float largest = -INFINITY;
        scratch.sum[g] = 0.f;
        cap_row(scores, {0, in.keys}, in, scale);
        add_alibi(scores, {0, in.keys}, in, first_head + g, 0, 0, scale);
        softmax_row(scores, scores, {0, in.keys}, in.keys, softmax_scale, largest, scratch.sum[g]);
        if (lse) lse[in.row_offset(b, first_head + g)] = largest * softmax_scale + logf(scratch.sum[g]);
    }
    std::fill(scratch.out, scratch.out + group * columns, 0.f);
    for (int key = 0; key < in.keys; key += kDecodeKeys)
        for (int g = 0; g < group; g++)
            add_rows(scratch.out + g * columns, scratch.scores + g * scratch.scores_row + key,
                     v + key * in.kv_row, in.kv_row, std::min(kDecodeKeys, in.keys - key), columns);
    for (int g = 0; g < group; g++) {
        T* const to = out + in.out_offset(b, first_head + g);
        for (int c = 0; c < columns; c++)
            to[c] = from_float<T>(scratch.out[g * columns + c] / scratch.sum[g]);
    }
}

// P and dS of a row, from its scores s, which may be `capped`, and dp = dout V^T. Both are zero in columns
// that the row does not see.
template <class T>
void backward_row(T* p, T* ds, float* s, float* dp, SeenColumns seen, int columns, float scale, float lse,
                  float delta, bool capped) {
    for (int j = seen.runs_begin(); j < seen.end; j += kScoreRun) {
        ScoreRun x = load<kScoreRun>(s + j), y = load<kScoreRun>(dp + j);
        for (int i = 0; i < kScoreRun; i++) y.v[i] -= delta;
        if (capped)
            for (int i = 0; i < kScoreRun; i++) y.v[i] *= 1.f - x.v[i] * x.v[i];
        for (int i = 0; i < kScoreRun; i++) x.v[i] = fast_exp(x.v[i] * scale - lse);
        for (int i = 0; i < kScoreRun; i++) y.v[i] *= x.v[i];
        store(p + j, x.v);
        store(ds + j, y.v);
    }
    fill_unseen(p, seen, 0, columns, 0.f);
    fill_unseen(ds, seen, 0, columns, 0.f);
}

// Writes rows of `columns` floats, times factor, as rows of T.
template <class T>
void write_rows(T* to, int64_t to_row, const float* from, int rows, int columns, float factor) {
    for (int i = 0; i < rows; i++) write_row(to + i * to_row, from + i * columns, columns, factor);
}

// Writes the gradients of `count` keys from `key` on, times factor, to d or to sums, as
// AttentionInput::dk_sums says. Overwrites `gradients` if there are sums.
template <class T>
void write_key_rows(T* d, float* sums, float* gradients, float factor, const AttentionInput<T>& in, int b,
                    int kv, int key, int count) {
    const int columns = in.head_size, first = in.position(0), added = std::clamp(first - key, 0, count);
    const int64_t sums_row = int64_t{in.kv_heads} * columns;
    for (int i = 0; sums && i < count; i++) {
        float* const sum = sums + (key + i) * sums_row + kv * columns;
        float* const from = gradients + i * columns;
        for (int c = 0; c < columns; c++) from[c] = from[c] * factor + sum[c];
        if (i < added) std::copy_n(from, columns, sum);
    }
    write_rows(d + in.dkv_offset(b, kv) + (key + added - first) * in.dkv_row, in.dkv_row,
               gradients + added * columns, count - added, columns, sums ? 1.f : factor);
}

// Backward of one head of keys and values and of the query heads that share it. Their dq is summed in fp32 in
// dq_sums (group, queries, head_size): in scratch, or in `carried` where keys come in pieces.
template <class T>
struct BackwardHead {
    T *dq, *dk, *dv;
    const T* dout;
    const float *lse, *delta;
    AttentionInput<T> in;
    float scale;
    int b, kv;
    float* dq_sums;

    static int64_t sums(const AttentionInput<T>& in) {
        return int64_t{in.group()} * in.queries * in.head_size;
    }
    int first_head() const { return kv * in.group(); }
    float* sum_of(int h, int query) const {
        return dq_sums + (int64_t{h - first_head()} * in.queries + query) * in.head_size;
    }
    // Whether the sums must be zeroed first. If queries see all keys, the first tile of keys writes every sum
    // instead.
    bool adds_to_zero() const { return !in.continues && (in.span() < in.all_keys() || in.positions); }
    bool first_tile_writes() const { return !in.continues && !adds_to_zero(); }
};

// Computes dk and dv of a tile of keys, from `key` on, and adds the tile's part of dq, head after head. Calls
// reach(h, query), which waits, before it adds to rows of head h before `query`, and passed(h, query) after
// it.
template <class T, class Reach, class Passed>
void attention_backward_tile(const BackwardHead<T>& head, const BackwardScratch<T>& scratch, int key,
                             Reach&& reach, Passed&& passed) {
    const AttentionInput<T>& in = head.in;
    const int b = head.b, columns = in.head_size, width = std::min(kBackwardKeys, in.keys - key);
    const int end = in.queries_before(b, key + width);
    const int64_t at = in.kv_offset(b, head.kv) + key * in.kv_row, stride = kBackwardKeys;
    const StridedMatrix<T> k{in.k + at, in.kv_row}, v{in.v + at, in.kv_row};
    const int begin = in.first_query(key);
    bool more = false;  // a tile of queries has been added before
    if (begin >= end)
        for (float* const sums : {scratch.dk, scratch.dv}) std::fill_n(sums, width * columns, 0.f);
    for (int h = head.first_head(); h < head.first_head() + in.group(); h++)
        for (int query = begin; query < end; query += kBackwardQueries, more = true) {
            const int rows = std::min(kBackwardQueries, end - query);
            const int64_t rows_at = in.row_offset(b, h) + query;
            const StridedMatrix<T> q{in.q + in.q_offset(b, h) + query * in.q_row, in.q_row};
            const StridedMatrix<T> d_out{head.dout + in.out_offset(b, h) + query * in.out_row(),
                                         in.out_row()};
            tile_product(scratch.scores, stride, q, k.transposed(), rows, width, columns, false);
            tile_product(scratch.dp, stride, d_out, v.transposed(), rows, width, columns, false);
            for (int i = 0; i < rows; i++) {
                float* const scores = scratch.scores + i * stride;
                const SeenColumns seen = seen_columns(in, b, query + i, key, width);
                cap_row(scores, seen, in, head.scale);
                add_alibi(scores, seen, in, h, query + i, key, head.scale);
                drop_row(scratch.dp + i * stride, in, b, h, query + i, key, width);
                backward_row(scratch.p + i * stride, scratch.ds + i * stride, scores, scratch.dp + i * stride,
                             seen, width, in.softmax_scale(head.scale), head.lse[rows_at + i],
                             head.delta[rows_at + i], in.cap > 0);
                drop_row(scratch.p + i * stride, in, b, h, query + i, key, width);
            }
            const StridedMatrix<T> p{scratch.p, stride}, ds{scratch.ds, stride};
            tile_product(scratch.dv, columns, p.transposed(), d_out, width, columns, rows, more);
            tile_product(scratch.dk, columns, ds.transposed(), q, width, columns, rows, more);
            reach(h, query + rows);
            tile_product(head.sum_of(h, query), columns, ds, k, rows, columns, width,
                         key > 0 || !head.first_tile_writes());
            passed(h, query + rows == end ? in.queries : query + rows);
        }
    write_key_rows(head.dk, in.dk_sums, scratch.dk, head.scale, in, b, head.kv, key, width);
    write_key_rows(head.dv, in.dv_sums, scratch.dv, 1.f, in, b, head.kv, key, width);
}

// Bytes of a worker's scratch for dq_sums.
template <class T>
size_t bytes_of_sums(const AttentionInput<T>& in) {
    if (in.in_pieces) return 0;
    ScratchParts parts{nullptr};
    parts.take<float>(BackwardHead<T>::sums(in));
    return parts.bytes;
}

// One worker computes backward of a whole head. Grid (kv_heads, batch).
template <class T>
__global__ void attention_backward_cpu_kernel(BackwardHead<T> head) {
    const AttentionInput<T>& in = head.in;
    head.kv = blockIdx.x, head.b = blockIdx.y;
    head.dq_sums =
        in.in_pieces ? in.carried_rows(head.first_head(), 0) : reinterpret_cast<float*>(simt::dynamic_shared);
    const BackwardScratch<T> scratch(simt::dynamic_shared + bytes_of_sums(in), in.head_size);
    const auto alone = [](int, int) {};
    if (head.adds_to_zero()) std::fill_n(head.dq_sums, head.sums(in), 0.f);
    for (int key = 0; key < in.keys; key += kBackwardKeys)
        attention_backward_tile(head, scratch, key, alone, alone);
    if (in.later > 0) return;
    for (int h = head.first_head(); h < head.first_head() + in.group(); h++)
        write_rows(head.dq + in.q_offset(head.b, h), in.q_row, head.sum_of(h, 0), in.queries, in.head_size,
                   head.scale);
}

// What all workers share that compute one head together: dq's sums; the next tile of keys; and for each tile,
// how many rows of dq it is done with, counted over the query heads one after the other. Rows that a tile
// need not add to count as done.
struct SharedHead {
    float* dq_sums;
    std::atomic<int>* next;
    std::atomic<int64_t>* passed;
    size_t bytes;
    template <class T>
    SharedHead(unsigned char* base, const AttentionInput<T>& in) {
        ScratchParts parts{base};
        dq_sums = parts.take<float>(in.in_pieces ? 0 : BackwardHead<T>::sums(in));
        next = parts.take<std::atomic<int>>(1);
        passed = parts.take<std::atomic<int64_t>>(ceil_div(in.length, kBackwardKeys));
        bytes = parts.bytes;
    }
};
// Rows of dq_sums that a block zeroes, or of dq that it writes.
constexpr int kSumRows = 1024;

// Zeroes dq_sums if needed, and the counters. Grid (groups of kSumRows rows).
template <class T>
__global__ void attention_backward_begin_cpu_kernel(BackwardHead<T> head, SharedHead shared) {
    const int64_t rows = int64_t{head.in.group()} * head.in.queries, first = int64_t{blockIdx.x} * kSumRows;
    if (head.adds_to_zero())
        std::fill_n(head.dq_sums + first * head.in.head_size,
                    std::min<int64_t>(kSumRows, rows - first) * head.in.head_size, 0.f);
    if (blockIdx.x > 0) return;
    new (shared.next) std::atomic<int>(0);
    for (int64_t t = 0; t < ceil_div(head.in.keys, kBackwardKeys); t++)
        new (shared.passed + t) std::atomic<int64_t>(0);
}

// Each worker takes the next tile of keys until none is left. Grid (workers), each with `scratch_bytes` of
// `scratches`.
template <class T>
__global__ void attention_backward_shared_cpu_kernel(BackwardHead<T> head, SharedHead shared,
                                                     unsigned char* scratches, size_t scratch_bytes) {
    const AttentionInput<T>& in = head.in;
    const BackwardScratch<T> scratch(scratches + blockIdx.x * scratch_bytes, in.head_size);
    struct Passed {  // also if a product throws: the next tile must not wait forever
        std::atomic<int64_t>& rows;
        ~Passed() { rows.store(INT64_MAX, std::memory_order_release); }
    };
    const int tiles = static_cast<int>(ceil_div(in.keys, kBackwardKeys));
    for (int tile; (tile = shared.next->fetch_add(1)) < tiles;) {
        const Passed mine{shared.passed[tile]};
        const auto rows_to = [&](int h, int query) {
            return int64_t{h - head.first_head()} * in.queries + query;
        };
        attention_backward_tile(
            head, scratch, tile * kBackwardKeys,
            [&](int h, int query) {
                while (tile > 0 &&
                       shared.passed[tile - 1].load(std::memory_order_acquire) < rows_to(h, query))
                    std::this_thread::yield();
            },
            [&](int h, int query) { mine.rows.store(rows_to(h, query), std::memory_order_release); });
    }
}

// Writes dq from its sums. Grid (groups of kSumRows queries, group).
template <class T>
__global__ void attention_backward_end_cpu_kernel(BackwardHead<T> head) {
    const AttentionInput<T>& in = head.in;
    const int h = head.first_head() + blockIdx.y, first = blockIdx.x * kSumRows;
    write_rows(head.dq + in.q_offset(head.b, h) + first * in.q_row, in.q_row, head.sum_of(h, first),
               std::min(kSumRows, in.queries - first), in.head_size, head.scale);
}

// Whether all workers share one head at a time because this leaves fewer of them idle than if each computed
// whole heads. Sharing has a cost too: at the start and the end of a head, a worker waits for the one before
// it. For a chunk of queries the answer does not depend on where in the sequence it is, because the scratch
// must not.
template <class T>
bool shares_heads(const AttentionInput<T>& in, int64_t workers) {
    const int64_t heads = int64_t{in.kv_heads} * in.batch;
    const double whole = static_cast<double>(ceil_div(heads, workers) * workers) / static_cast<double>(heads);
    // The part of the scores that is visible at the end of the sequence.
    const double seen = 1 - in.queries / (2. * in.length);
    const double steps = seen * in.group() * in.queries / kBackwardQueries * in.length / kBackwardKeys;
    return whole > 1 + static_cast<double>(workers * (workers + 1)) / steps;
}

// attention_forward() and attention_backward() of attention.cuh in the fast CPU build; delta is already
// computed.
template <class T>
void attention_forward_on_cpu(T* out, float* lse, const AttentionInput<T>& in, Stream stream) {
    if (in.queries == 1 && !in.dropout && !in.in_chunks)
        launch<attention_decode_cpu_kernel<T>>(
            dim3(in.kv_heads, in.batch), 1, DecodeScratch(nullptr, in.group(), in.head_size, in.span()).bytes,
            stream, out, lse, in, in.scale());
    else
        launch<attention_forward_cpu_kernel<T>>(
            dim3(ceil_div(in.queries, kForwardQueries), in.heads, in.batch), 1,
            ForwardScratch<T>(nullptr, in.head_size).bytes, stream, out, lse, in, in.scale());
}
template <class T>
void attention_backward_on_cpu(T* dq, T* dk, T* dv, const T* dout, const float* lse, const float* delta,
                               const AttentionInput<T>& in, Stream stream) {
    BackwardHead<T> head{dq, dk, dv, dout, lse, delta, in, in.scale(), 0, 0, nullptr};
    const int64_t tiles = ceil_div(in.length, kBackwardKeys), workers = simt::threads_of_a_launch();
    const size_t scratch_bytes = BackwardScratch<T>(nullptr, in.head_size).bytes;
    if (!shares_heads(in, workers)) {
        launch<attention_backward_cpu_kernel<T>>(dim3(in.kv_heads, in.batch), 1,
                                                 bytes_of_sums(in) + scratch_bytes, stream, head);
        return;
    }
    const auto active = static_cast<unsigned>(std::min(workers, tiles));
    const size_t shared_bytes = SharedHead(nullptr, in).bytes;
    auto* const buffer = static_cast<unsigned char*>(simt::workspace(shared_bytes + active * scratch_bytes));
    const SharedHead shared(buffer, in);
    head.dq_sums = shared.dq_sums;
    const auto row_blocks = [](int64_t rows) { return static_cast<unsigned>(ceil_div(rows, kSumRows)); };
    for (head.b = 0; head.b < in.batch; head.b++)
        for (head.kv = 0; head.kv < in.kv_heads; head.kv++) {
            if (in.in_pieces) head.dq_sums = in.carried_rows(head.first_head(), 0);
            launch<attention_backward_begin_cpu_kernel<T>>(row_blocks(int64_t{in.group()} * in.queries), 1, 0,
                                                           stream, head, shared);
            launch<attention_backward_shared_cpu_kernel<T>>(active, 1, 0, stream, head, shared,
                                                            buffer + shared_bytes, scratch_bytes);
            if (in.later > 0) continue;
            launch<attention_backward_end_cpu_kernel<T>>(dim3(row_blocks(in.queries), in.group()), 1, 0,
                                                         stream, head);
        }
}
