// attention_scores.cuh - what a warp does with its 16 rows of scores in registers: masks, the softmax, the
// output.
//
// A lane has the elements of a product that the tensor cores leave in it (mma.cuh): in rows lane / 4 and lane
// / 4 + 8, and of every 8 columns the two neighbours lane % 4 * 2 and lane % 4 * 2 + 1. This holds after
// mma.sync and after wgmma.
#pragma once

#include "llmc/attention_input.h"
#include "llmc/mma.cuh"

constexpr float kLog2e = 1.44269504f;

// Accumulators of 16 rows by 8 * N columns.
template <int N>
using AttentionRows = float[1][N][4];

// 2^x. For x = -inf it is 0 on a GPU and about 1e-38 on a CPU.
SIMT_DEVICE float exp2_of(float x) {
#if defined(SIMT_GPU)
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return fast_exp(x * 0.693147181f);
#endif
}

// Calls f(s[0][j][e] ..., r, column) for all accumulators of this lane; r = 0, 1 stands for row lane / 4 + 8
// r.
template <int N, class F, class... S>
SIMT_DEVICE void for_each_score(F f, S&... s) {
    UNROLL for (int j = 0; j < N; j++) {
        UNROLL for (int e = 0; e < 4; e++) f(s[0][j][e]..., e / 2, 8 * j + lane() % 4 * 2 + e % 2);
    }
}

// Calls f(x, of_lane, rest) for all accumulators of this lane. of_lane + rest is an accumulator's distance
// from a diagonal: in row i, its column minus (`column` + i). Only of_lane depends on the lane, and rest is a
// compile-time constant; numbers of columns would take a register each.
template <int N, class F>
SIMT_DEVICE void for_each_distance(AttentionRows<N>& s, int column, F f) {
    const int of_lane = lane() % 4 * 2 - lane() / 4 - column;
    UNROLL for (int j = 0; j < N; j++) {
        UNROLL for (int e = 0; e < 4; e++) f(s[0][j][e], of_lane, 8 * j + e % 2 - e / 2 * 8);
    }
}
// s += slope times that distance, which is negative before the diagonal.
template <int N>
SIMT_DEVICE void add_distances(AttentionRows<N>& s, int column, float slope) {
    const auto add = [&](float& x, int of_lane, int rest) {
        x += slope * (static_cast<float>(of_lane) + rest);
    };
    for_each_distance<N>(s, column, add);
}
// s = value after the diagonal (mask_after), or on and before it (mask_up_to): where a query does not see a
// key.
template <int N>
SIMT_DEVICE void mask_after(AttentionRows<N>& s, int column, float value) {
    const auto mask = [&](float& x, int of_lane, int rest) {
        if (of_lane > -rest) x = value;
    };
    for_each_distance<N>(s, column, mask);
}
template <int N>
SIMT_DEVICE void mask_up_to(AttentionRows<N>& s, int column, float value) {
    const auto mask = [&](float& x, int of_lane, int rest) {
        if (of_lane <= -rest) x = value;
    };
    for_each_distance<N>(s, column, mask);
}

// s = tanh(s * factor): scores as fractions of their cap, where `factor` is scale / cap.
template <int N>
SIMT_DEVICE void cap_scores(AttentionRows<N>& s, float factor) {
    const auto cap = [&](float& x, int, int) {
        x = 1.f - fast_quotient(2.f, exp2_of(x * (2 * kLog2e * factor)) + 1.f);
    };
    for_each_score<N>(cap, s);
}
// The derivative of a capped score that is the fraction x of its cap; and the same from the score's
// probability, where the fraction is no longer kept: probability = exp(cap * x - lse).
SIMT_DEVICE float cap_slope(float x) { return 1.f - x * x; }
SIMT_DEVICE float cap_slope(float probability, float lse, float cap) {
#if defined(SIMT_GPU)
    const float log2 = __log2f(probability);
#else
    const float log2 = log2f(probability);
#endif
    const float x = fast_quotient(log2 * (1 / kLog2e) + lse, cap);
    return cap_slope(fmaxf(-1.f, fminf(x, 1.f)));  // a masked score has no logarithm
}

// o += P B. P is 16 * M rows by 8 * N columns of accumulators, rounded to T; B is the 8 * N rows of kHead
// columns in b_tile, `stride` elements apart. Processes 64 columns at a time, to have few fragments in
// registers.
template <int kHead, int M, int N, class T>
SIMT_DEVICE void multiply_columns(AttentionRows<kHead / 8> (&o)[M], const AttentionRows<N> (&p)[M],
                                  const T* b_tile, int stride) {
    constexpr int kGroup = kHead / 8 < 8 ? kHead / 8 : 8;
    UNROLL for (int k = 0; k < N; k += 2) {
        UNROLL for (int j = 0; j < kHead / 8; j += kGroup) {
            FragmentB<T> b[kGroup];
            load_b_transposed(b, b_tile + 8 * k * stride + 8 * j, stride);
            UNROLL for (int m = 0; m < M; m++) {
                const FragmentA<T> a[1] = {accumulators_as_a<T>(p[m][0][k], p[m][0][k + 1])};
                mma_tiles(reinterpret_cast<AttentionRows<kGroup>&>(o[m][0][j]), a, b);
            }
        }
    }
}

// warp(). The shuffle tells the compiler that the value is the same in all lanes, so it can use uniform
// registers.
SIMT_DEVICE int uniform_warp() { return __shfl_sync(~0u, warp(), 0); }

// document_keys(): the first keys of the documents of this lane's two queries of batch entry b; `row` is the
// warp's first query. document_ends(): where the documents of this lane's two keys end; `row` is the warp's
// first key.
template <class T>
SIMT_DEVICE void document_keys(int (&first)[2], const AttentionInput<T>& in, int b, int row) {
    UNROLL for (int r = 0; r < 2; r++) {
        const int query = row + lane() / 4 + 8 * r;
        first[r] = query < in.queries ? in.document_key(b, query) : 0;
    }
}
template <class T>
SIMT_DEVICE void document_ends(int (&end)[2], const AttentionInput<T>& in, int b, int row) {
    UNROLL for (int r = 0; r < 2; r++) {
        const int key = row + lane() / 4 + 8 * r;
        end[r] = key < in.keys ? in.document_end(b, key) : 0;
    }
}
// s = value before column first[r] in row lane / 4 + 8 r: these are keys of other documents.
template <int N>
SIMT_DEVICE void mask_before(AttentionRows<N>& s, const int (&first)[2], float value) {
    UNROLL for (int j = 0; j < N; j++) {
        UNROLL for (int e = 0; e < 4; e++) if (8 * j + e % 2 < first[e / 2] - lane() % 4 * 2) s[0][j][e] =
            value;
    }
}
// s = value from column end[r] on in row lane / 4 + 8 r: these are queries of other documents.
template <int N>
SIMT_DEVICE void mask_from(AttentionRows<N>& s, const int (&end)[2], float value) {
    UNROLL for (int j = 0; j < N; j++) {
        UNROLL for (int e = 0; e < 4; e++) if (8 * j + e % 2 >= end[e / 2] - lane() % 4 * 2) s[0][j][e] =
            value;
    }
}

// Applies dropout to all accumulators of this lane; the one at (r, column) has the index number(r, column)
// among all scores. The decisions are made in a loop that is not unrolled, and kept as bits: unrolled, the
// compiler would compute the random numbers of many scores at once and run out of registers.
template <int N, class Number>
SIMT_DEVICE void drop_numbered_scores(AttentionRows<N>& s, const Dropout& dropout, Number number) {
    static_assert(4 * N <= 32);
    const uint64_t here = dropout.here();
    uint32_t kept = 0;
#pragma unroll 1
    for (int j = 0; j < N; j++) {
        UNROLL for (int e = 0; e < 4; e++) {
            const bool keeps = dropout.keeps(here, number(e / 2, 8 * j + lane() % 4 * 2 + e % 2));
            kept |= static_cast<uint32_t>(keeps) << (4 * j + e);
        }
    }
    UNROLL for (int j = 0; j < N; j++) {
        UNROLL for (int e = 0; e < 4; e++) s[0][j][e] *= kept >> (4 * j + e) & 1 ? dropout.scale : 0.f;
    }
}
// Applies dropout to s, probabilities or their gradients. Rows are queries from `query` on, columns keys from
// `key` on.
template <int N, class T>
SIMT_DEVICE void drop_scores(AttentionRows<N>& s, const AttentionInput<T>& in, int b, int h, int query,
                             int key) {
    drop_numbered_scores<N>(s, in.dropout, [&](int r, int column) {
        return in.score_number(b, h, query + lane() / 4 + 8 * r, key + column);
    });
}
// Applies dropout where rows are keys and columns are queries.
template <int N, class T>
SIMT_DEVICE void drop_scores_of_keys(AttentionRows<N>& s, const AttentionInput<T>& in, int b, int h,
                                     int query, int key) {
    drop_numbered_scores<N>(s, in.dropout, [&](int r, int column) {
        return in.score_number(b, h, query + column, key + lane() / 4 + 8 * r);
    });
}

// Transposes pairs among the four lanes that share rows: v[i] of the t-th lane becomes v[t] of the i-th.
SIMT_DEVICE void transpose_in_quad(uint32_t (&v)[4]) {
    UNROLL for (int step = 1; step <= 2; step *= 2) {
        const bool upper = lane() & step;
        UNROLL for (int i = 0; i < 4; i++) {
            if (i & step) continue;
            const uint32_t got = __shfl_xor_sync(~0u, upper ? v[i] : v[i + step], step);
            v[i] = upper ? got : v[i];
            v[i + step] = upper ? v[i + step] : got;
        }
    }
}

// store_rows() if rows are made of whole, aligned 16 bytes: a lane stores 8 consecutive columns of each 32.
template <int kHead>
SIMT_DEVICE void store_rows_in_vectors(bf16* out, int64_t row_stride, const AttentionRows<kHead / 8>& o,
                                       const float (&factor)[2], int rows, int head_size, int first_row) {
    UNROLL for (int r = 0; r < 2; r++) {
        const int row = lane() / 4 + 8 * r;
        UNROLL for (int j = 0; j < kHead / 8; j += 4) {
            uint32_t pairs[4];
            UNROLL for (int i = 0; i < 4; i++) pairs[i] =
                make_pair_of<bf16>(o[0][j + i][2 * r] * factor[r], o[0][j + i][2 * r + 1] * factor[r]);
            transpose_in_quad(pairs);
            const int column = 8 * (j + lane() % 4);
            if (row < first_row || row >= rows || column >= head_size) continue;
            bf16* const to = out + row * row_stride + column;
#if defined(SIMT_GPU)  // the compiler splits an ordinary store in some places
            __stwb(reinterpret_cast<uint4*>(to), make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
#else
            memcpy(to, pairs, sizeof pairs);
#endif
        }
    }
}

// Writes the rows first_row ... rows - 1 of a warp's 16 rows, times factor[r]. `out` points to the first of
// the 16.
template <int kHead, class T>
SIMT_DEVICE void store_rows(T* out, int64_t row_stride, const AttentionRows<kHead / 8>& o,
                            const float (&factor)[2], int rows, int head_size, bool vectors,
                            int first_row = 0) {
    if constexpr (std::is_same_v<T, bf16> && kHead % 32 == 0)
        if (vectors)
            return store_rows_in_vectors<kHead>(out, row_stride, o, factor, rows, head_size, first_row);
    UNROLL for (int r = 0; r < 2; r++) {
        const int row = lane() / 4 + 8 * r;
        if (row < first_row || row >= rows) continue;
        UNROLL for (int j = 0; j < kHead / 8; j++) {
            const int column = 8 * j + lane() % 4 * 2;
            const float x = o[0][j][2 * r] * factor[r], y = o[0][j][2 * r + 1] * factor[r];
            T* to = out + row * row_stride + column;
            if (vectors) {
                if (column < head_size) store_pair(to, make_pair_of<T>(x, y));
            } else {
                if (column < head_size) to[0] = from_float<T>(x);
                if (column + 1 < head_size) to[1] = from_float<T>(y);
            }
        }
    }
}

// Calls f(x, y, r, at, both) for this lane's pairs of neighbours x, y, without those beyond `rows` or
// head_size. A pair is in row lane / 4 + 8 r; `at` is its place in the rows of floats at `floats`; `both`
// says that y's column exists too.
template <int kHead, class F>
SIMT_DEVICE void for_each_pair(AttentionRows<kHead / 8>& o, float* floats, int64_t row_stride, int rows,
                               int head_size, F f) {
    UNROLL for (int r = 0; r < 2; r++) {
        const int row = lane() / 4 + 8 * r;
        if (row >= rows) continue;
        UNROLL for (int j = 0; j < kHead / 8; j++) {
            const int column = 8 * j + lane() % 4 * 2;
            float* const at = floats + row * row_stride + column;
            if (column < head_size) f(o[0][j][2 * r], o[0][j][2 * r + 1], r, at, column + 1 < head_size);
        }
    }
}
SIMT_DEVICE Packed<float, 2> load_pair(const float* at, bool both, bool vectors) {
    return vectors ? load<2>(at) : Packed<float, 2>{at[0], both ? at[1] : 0.f};
}
SIMT_DEVICE void store_pair(float* at, float x, float y, bool both, bool vectors) {
    if (vectors) return store(at, Packed<float, 2>{x, y});
    at[0] = x;
    if (both) at[1] = y;
}

// o = o * factor + sums, for 16 rows. Rows before `first_row` are also written back to the sums.
template <int kHead>
SIMT_DEVICE void add_sums(AttentionRows<kHead / 8>& o, float factor, float* sums, int64_t row_stride,
                          int rows, int head_size, bool vectors, int first_row) {
    const auto add = [&](float& x, float& y, int r, float* at, bool both) SIMT_INLINE {
        const Packed<float, 2> sum = load_pair(at, both, vectors);
        x = sum.v[0] + x * factor, y = sum.v[1] + y * factor;
        if (lane() / 4 + 8 * r < first_row) store_pair(at, x, y, both, vectors);
    };
    for_each_pair<kHead>(o, sums, row_stride, rows, head_size, add);
}

// In the functions below the warp has kHead columns of a head, from `column` on: all of them, except in
// attention_wide.cuh.

// load_carried() reads what earlier pieces of keys left for the 16 queries from `row` on; store_carried()
// writes it for later pieces.
template <int kHead, class T>
SIMT_DEVICE void load_carried(AttentionRows<kHead / 8>& o, const AttentionInput<T>& in, int h, int row,
                              bool vectors, int column = 0) {
    const auto get = [&](float& x, float& y, int, float* at, bool both) SIMT_INLINE {
        const Packed<float, 2> sum = load_pair(at, both, vectors);
        x = sum.v[0], y = sum.v[1];
    };
    for_each_pair<kHead>(o, in.carried_rows(h, row) + column, in.head_size, in.queries - row,
                         in.head_size - column, get);
}
template <int kHead, class T>
SIMT_DEVICE void store_carried(AttentionRows<kHead / 8>& o, const AttentionInput<T>& in, int h, int row,
                               bool vectors, int column = 0) {
    const auto put = [&](float& x, float& y, int, float* at, bool both)
                         SIMT_INLINE { store_pair(at, x, y, both, vectors); };
    for_each_pair<kHead>(o, in.carried_rows(h, row) + column, in.head_size, in.queries - row,
                         in.head_size - column, put);
}

// Writes the gradients of the 16 keys from `row` on, times `factor`, to d or to sums, as
// AttentionInput::dk_sums says.
template <int kHead, class T>
SIMT_DEVICE void store_key_rows(T* d, float* sums, AttentionRows<kHead / 8>& o, float factor,
                                const AttentionInput<T>& in, int b, int kv, int row, bool vectors,
                                int column = 0) {
    const int first = in.position(0);  // the first key whose gradient is complete
    const int columns = in.head_size - column;
    d += in.dkv_offset(b, kv) + (row - first) * in.dkv_row + column;
    if (sums) {
        const int64_t sums_row = int64_t{in.kv_heads} * in.head_size;
        sums += row * sums_row + kv * in.head_size + column;
        add_sums<kHead>(o, factor, sums, sums_row, in.keys - row, columns, vectors, first - row);
        factor = 1.f;
    }
    store_rows<kHead>(d, in.dkv_row, o, {factor, factor}, in.keys - row, columns, vectors, first - row);
}

// Writes the gradients of the 16 queries from `row` on, times `factor`; if more pieces of keys follow, leaves
// the sums for them instead.
template <int kHead, class T>
SIMT_DEVICE void store_query_rows(T* dq, AttentionRows<kHead / 8>& o, float factor,
                                  const AttentionInput<T>& in, int b, int h, int row, bool vectors,
                                  int column = 0) {
    if (in.later > 0) return store_carried<kHead>(o, in, h, row, vectors, column);
    store_rows<kHead>(dq + in.q_offset(b, h) + row * in.q_row + column, in.q_row, o, {factor, factor},
                      in.queries - row, in.head_size - column, vectors);
}

// The maximum and the sum over the four lanes that share rows.
SIMT_DEVICE float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
    return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
SIMT_DEVICE float quad_sum(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}

// Multiplies this lane's two rows with factor[r].
template <int N>
SIMT_DEVICE void scale_rows(AttentionRows<N>& o, const float (&factor)[2]) {
    UNROLL for (int j = 0; j < N; j++) { UNROLL for (int e = 0; e < 4; e++) o[0][j][e] *= factor[e / 2]; }
}

// Less than any score, but not an infinity: a row may see no key of its first tiles.
constexpr float kNoScore = -1e30f;

// How far, in log2, scores may exceed the base of a lazy softmax. It keeps sums and outputs far from
// overflow.
constexpr float kLazyGrowth = 8.f;

// The state of the softmax of a lane's two rows: the largest score, and this lane's part of the sum of
// exponentials. A lazy softmax keeps its base, here called `largest`, until a score exceeds it by
// kLazyGrowth, so that few steps need a correction (as in FlashAttention-4).
template <bool kLazy = false>
struct OnlineSoftmax {
    float largest[2] = {kNoScore, kNoScore};
    float sum[2] = {0.f, 0.f};

    // Turns scores into exponentials relative to the largest so far. The caller must multiply the output of
    // earlier steps with `correction`, to have the same base.
    template <int N>
    SIMT_DEVICE void step(AttentionRows<N>& s, float (&correction)[2], float scale_log2) {
        float base[2];
        UNROLL for (int r = 0; r < 2; r++) {
            float top = largest[r];
            UNROLL for (int j = 0; j < N; j++) top = fmaxf(top, fmaxf(s[0][j][2 * r], s[0][j][2 * r + 1]));
            top = quad_max(top);
            if (kLazy && !((top - largest[r]) * scale_log2 > kLazyGrowth)) top = largest[r];
            correction[r] = exp2_of((largest[r] - top) * scale_log2);
            largest[r] = top;
            base[r] = top * scale_log2;
            sum[r] *= correction[r];
        }
        const auto exponential = [&](float& x, int r, int) {
            x = exp2_of(x * scale_log2 - base[r]);
            sum[r] += x;
        };
        for_each_score<N>(exponential, s);
    }
};

// Starts from what earlier pieces of keys left for the warp's 16 queries from `row` on.
template <int kHead, class T, bool kLazy>
SIMT_DEVICE void continue_output(AttentionRows<kHead / 8>& o, OnlineSoftmax<kLazy>& softmax,
                                 const AttentionInput<T>& in, int h, int row, bool vectors, int column = 0) {
    load_carried<kHead>(o, in, h, row, vectors, column);
    UNROLL for (int r = 0; r < 2; r++) {
        const int query = row + lane() / 4 + 8 * r;
        if (query >= in.queries) continue;
        const float* const statistics = in.carried_statistics(h, query);
        softmax.largest[r] = statistics[0], softmax.sum[r] = statistics[1 + lane() % 4];
    }
    __syncwarp();  // all lanes have read before one writes
}
// Writes the output of the warp's 16 queries from `row` on, and their lse unless it is null; if more pieces
// of keys follow, leaves the state for them instead.
template <int kHead, class T, bool kLazy>
SIMT_DEVICE void store_output(T* out, float* lse, AttentionRows<kHead / 8>& o,
                              const OnlineSoftmax<kLazy>& softmax, const AttentionInput<T>& in, int b, int h,
                              int row, float scale, bool vectors, int column = 0) {
    const bool writes_statistics = column == 0;
    if (in.later > 0) {
        store_carried<kHead>(o, in, h, row, vectors, column);
        UNROLL for (int r = 0; r < 2; r++) {
            const int query = row + lane() / 4 + 8 * r;
            if (query >= in.queries || !writes_statistics) continue;
            float* const statistics = in.carried_statistics(h, query);
            if (lane() % 4 == 0) statistics[0] = softmax.largest[r];
            statistics[1 + lane() % 4] = softmax.sum[r];
        }
        return;
    }
    float factor[2];
    UNROLL for (int r = 0; r < 2; r++) {
        const float sum = quad_sum(softmax.sum[r]);
        const int query = row + lane() / 4 + 8 * r;
        if (lse && writes_statistics && query < in.queries && lane() % 4 == 0)
            lse[in.row_offset(b, h) + query] = softmax.largest[r] * scale + logf(sum);
        factor[r] = 1.f / sum;
    }
    store_rows<kHead>(out + in.out_offset(b, h) + row * in.out_row() + column, in.out_row(), o, factor,
                      in.queries - row, in.head_size - column, vectors);
}
