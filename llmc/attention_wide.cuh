// attention_wide.cuh - attention.cuh's kernels for heads of more than 128 columns, on all GPUs and in the
// faithful CPU build.
//
// A warp has no registers for 16 rows of such a head's results, and several tiles of rows do not fit into
// shared memory. So the columns of a head are divided among 4 or 8 warps, 64 for each. A warp keeps its
// columns of the rows that stay in registers, as operands of products; only the rows that pass by are in
// shared memory. Scores sum over all columns: each warp multiplies its own, and the warps add up these parts
// in shared memory, always in the same order. Then each of them has all scores of the rows that they share,
// and goes on as in attention.cuh. There is one form, for plain attention too.
#pragma once

#include "llmc/attention_input.h"
#include "llmc/attention_scores.cuh"

constexpr int kWideThreads = 256, kWideColumns = 64;  // of a block; of a warp

// Sizes for heads of up to kHead columns. kForward and kBackwardQueries keep rows of queries, kBackwardKeys
// keeps keys.
enum class WideKernel { kForward, kBackwardKeys, kBackwardQueries };
template <class T, int kHead, WideKernel kKernel>
struct WideTiles {
    static constexpr int kSharers = kHead / kWideColumns;             // warps that share rows
    static constexpr int kGroups = kWideThreads / kLanes / kSharers;  // of warps that share rows
    // How many times 16 rows a group has. Two sums of 32 rows, or rows in fp32, would take too many
    // registers.
    static constexpr int kParts = kKernel != WideKernel::kBackwardKeys && std::is_same_v<T, bf16> ? 2 : 1;
    static constexpr int kRows = 16 * kParts * kGroups;  // that stay in a block
    static constexpr int kProducts = kParts * (kKernel == WideKernel::kForward ? 1 : 2);
    // A row has 16 bytes more than its columns, as in AttentionTiles.
    static constexpr int kVector = 16 / sizeof(T), kStride = kHead + kVector;
    static constexpr int kRowBytes = kHead * sizeof(T);
    static constexpr int kPassing = kRowBytes <= 512 && kProducts <= 2 ? 32 : 16;  // rows of a passing tile
    static constexpr int kBuffers = kRowBytes <= 1024 ? 2 : 1;  // of two passing tiles each
    static constexpr int kScores = kPassing / 8;                // accumulators of scores have 8 columns each
    static constexpr int kPassingSize = kPassing * kStride, kTilesSize = 2 * kBuffers * kPassingSize;
    // The parts of a group's scores: of each warp, of each lane.
    static constexpr int kPartSize = kProducts * kScores * 4 * kLanes, kPartsSize = kSharers * kPartSize;
    static constexpr size_t kSharedBytes = kTilesSize * sizeof(T) + kGroups * kPartsSize * sizeof(float);
    static_assert(kSharedBytes <= 99 << 10 && kRows * kStride <= kTilesSize);
};

// Where a warp works: its number among those that share its rows, its first row within the block, its first
// column, and its group's memory for parts of scores.
template <class Tiles>
struct WideWarp {
    int sharer, row, column;
    float* parts;
    template <class T>
    SIMT_DEVICE explicit WideWarp(T* shared) {
        const int warp = uniform_warp(), group = warp / Tiles::kSharers;
        sharer = warp % Tiles::kSharers;
        row = group * 16 * Tiles::kParts;
        column = sharer * kWideColumns;
        parts = reinterpret_cast<float*>(shared + Tiles::kTilesSize) + group * Tiles::kPartsSize;
    }
};

// Starts to copy kRows rows of head_size columns to a tile, or `rows` if there are fewer. The rest of the
// tile becomes zero.
template <class Tiles, int kRows, class T>
SIMT_DEVICE void load_wide(T* tile, const T* from, int64_t row_stride, int rows, int head_size,
                           bool vectors) {
    constexpr int kStride = Tiles::kStride, kHead = kStride - Tiles::kVector;
    if (vectors) {
        constexpr int kOfRow = kHead / Tiles::kVector, kStep = kWideThreads / kOfRow;
        static_assert(kWideThreads % kOfRow == 0 && kRows % kStep == 0);
        const int row = threadIdx.x / kOfRow, column = threadIdx.x % kOfRow * Tiles::kVector;
        const int left = column < head_size ? rows - row : 0;
        tile += row * kStride + column, from += row * row_stride + column;
        UNROLL for (int i = 0; i < kRows; i += kStep, from += kStep * row_stride)
            copy_to_shared<16>(tile + i * kStride, from, i < left);
    } else {
#pragma unroll 4
        for (int i = threadIdx.x; i < kRows * kHead; i += kWideThreads) {
            const int row = i / kHead, column = i % kHead;
            const bool valid = row < rows && column < head_size;
            tile[row * kStride + column] = valid ? from[row * row_stride + column] : from_float<T>(0.f);
        }
    }
}

// Starts to copy a tile of keys, from `key` on, and that of their values.
template <class Tiles, class T>
SIMT_DEVICE void load_wide_keys(T* tiles, const AttentionInput<T>& in, int b, int kv, int key, bool vectors) {
    const int64_t at = in.kv_offset(b, kv) + key * in.kv_row;
    load_wide<Tiles, Tiles::kPassing>(tiles, in.k + at, in.kv_row, in.keys - key, in.head_size, vectors);
    load_wide<Tiles, Tiles::kPassing>(tiles + Tiles::kPassingSize, in.v + at, in.kv_row, in.keys - key,
                                      in.head_size, vectors);
}

// Loads the `rows` rows of the block into shared memory, and from there the warp's part into registers: its
// columns of its own rows. Ends with a __syncthreads().
template <class Tiles, int M, class T>
SIMT_DEVICE void keep_rows(FragmentA<T> (&kept)[M][kWideColumns / 16], T* shared, const T* from,
                           int64_t row_stride, int rows, int head_size, bool vectors,
                           const WideWarp<Tiles>& warp) {
    load_wide<Tiles, Tiles::kRows>(shared, from, row_stride, rows, head_size, vectors);
    wait_for_copies();
    __syncthreads();
    UNROLL for (int m = 0; m < M; m++) {
        UNROLL for (int k = 0; k < kWideColumns / 16; k++) kept[m][k] =
            load_a(shared + (warp.row + 16 * m) * Tiles::kStride + warp.column + 16 * k, Tiles::kStride);
    }
    __syncthreads();
}

// Calls load(i, tiles) and use(i, tiles) for i = 0 ... count - 1: the i-th tiles are loaded while those
// before are used, where there are two buffers. All threads of the block must call it.
template <class Tiles, class T, class Load, class Use>
SIMT_DEVICE void for_passing_tiles(T* shared, int count, Load load, Use use) {
    if (Tiles::kBuffers == 2 && count > 0) load(0, shared);
    for (int i = 0; i < count; i++) {
        T* const tiles = shared + i % Tiles::kBuffers * 2 * Tiles::kPassingSize;
        if (Tiles::kBuffers == 1) {
            __syncthreads();  // nobody reads the tiles before any more
            load(i, tiles);
        }
        wait_for_copies();
        __syncthreads();  // these tiles are complete, and nobody reads the other ones any more
        if (Tiles::kBuffers == 2 && i + 1 < count)
            load(i + 1, shared + (i + 1) % 2 * 2 * Tiles::kPassingSize);
        use(i, tiles);
    }
}

// s = A B^T over the warp's columns: its part of the scores.
template <class Tiles, int M, class T>
SIMT_DEVICE void multiply_kept(AttentionRows<Tiles::kScores>* s,
                               const FragmentA<T> (&kept)[M][kWideColumns / 16], const T* b_tile) {
    constexpr int N = Tiles::kScores;
    UNROLL for (int m = 0; m < M; m++) for_each_score<N>([](float& x, int, int) { x = 0.f; }, s[m]);
    UNROLL for (int k = 0; k < kWideColumns / 16; k++) {
        FragmentB<T> b[N];
        load_b(b, b_tile + 16 * k, Tiles::kStride);
        UNROLL for (int m = 0; m < M; m++) {
            const FragmentA<T> a[1] = {kept[m][k]};
            mma_tiles(s[m], a, b);
        }
    }
}

// Replaces a warp's parts of scores by the sums over all warps that share its rows. Each warp adds up some of
// the scores. All threads of the block must call it.
template <class Tiles>
SIMT_DEVICE void add_parts(AttentionRows<Tiles::kScores> (&s)[Tiles::kProducts],
                           const WideWarp<Tiles>& warp) {
    constexpr int N = Tiles::kScores, kSize = Tiles::kPartSize, kOwn = kSize / Tiles::kSharers;
    static_assert(kOwn % kLanes == 0);
    const auto lanes_part = [&](float* part, int m, int j)
                                SIMT_INLINE { return part + ((m * N + j) * kLanes + lane()) * 4; };
    UNROLL for (int m = 0; m < Tiles::kProducts; m++) {
        UNROLL for (int j = 0; j < N; j++)
            store(lanes_part(warp.parts + warp.sharer * kSize, m, j), s[m][0][j]);
    }
    __syncthreads();
    UNROLL for (int i = 0; i < kOwn; i += kLanes) {
        float* const at = warp.parts + warp.sharer * kOwn + i + lane();
        float sum = *at;
        UNROLL for (int part = 1; part < Tiles::kSharers; part++) sum += at[part * kSize];
        *at = sum;  // only this warp reads it before the barrier
    }
    __syncthreads();
    UNROLL for (int m = 0; m < Tiles::kProducts; m++) {
        UNROLL for (int j = 0; j < N; j++) {
            const Packed<float, 4> sums = load<4>(lanes_part(warp.parts, m, j));
            UNROLL for (int e = 0; e < 4; e++) s[m][0][j][e] = sums.v[e];
        }
    }
}

// Computes out and lse of kRows queries of one head. Grid (batch * heads, tiles of queries), the longest
// first.
template <class T, int kHead>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_attention_forward_kernel(T* out, float* lse, AttentionInput<T> in, float scale, bool vectors) {
    using Tiles = WideTiles<T, kHead, WideKernel::kForward>;
    constexpr int kPassing = Tiles::kPassing, kParts = Tiles::kParts;
    DYNAMIC_SHARED(T, shared);
    const WideWarp<Tiles> warp(shared);
    const int h = in.block_head() % in.heads, b = in.block_head() / in.heads, kv = h / in.group();
    const int block_row = in.block_tile_from_last() * Tiles::kRows, row = block_row + warp.row;
    in.drop_keys(in.first_tile(in.first_key(b, block_row)));
    const int end = in.keys_before(block_row + Tiles::kRows);
    const float softmax_scale = in.softmax_scale(scale);
    int first_keys[kParts][2] = {};  // of the documents of this lane's queries
    AttentionRows<kWideColumns / 8> o[kParts] = {};
    OnlineSoftmax<> softmax[kParts];
    UNROLL for (int m = 0; m < kParts; m++) {
        if (in.positions) document_keys(first_keys[m], in, b, row + 16 * m);
        if (in.continues)
            continue_output<kWideColumns>(o[m], softmax[m], in, h, row + 16 * m, vectors, warp.column);
    }
    FragmentA<T> q[kParts][kWideColumns / 16];
    keep_rows(q, shared, in.q + in.q_offset(b, h) + block_row * in.q_row, in.q_row, in.queries - block_row,
              in.head_size, vectors, warp);
    const auto load_keys = [&](int i, T* tiles) SIMT_INLINE {
        load_wide_keys<Tiles>(tiles, in, b, kv, i * kPassing, vectors);
    };
    const auto use_keys = [&](int i, const T* tiles) SIMT_INLINE {
        const int key = i * kPassing;
        AttentionRows<Tiles::kScores> s[kParts];
        multiply_kept<Tiles>(s, q, tiles + warp.column);
        add_parts(s, warp);
        // The last column of this tile that the warp's first query sees.
        const int diagonal = in.position(row) - key;
        if (diagonal + 16 * kParts <= 0) return;  // only other warps see these keys
        UNROLL for (int m = 0; m < kParts; m++) {
            const int last = diagonal + 16 * m;
            if (in.cap > 0) cap_scores(s[m], fast_quotient(scale, in.cap));
            if (in.alibi) add_distances(s[m], last, in.slope(h, scale));
            if (last < kPassing - 1) mask_after(s[m], last, -INFINITY);
            if (last + 15 >= in.span()) mask_up_to(s[m], last - in.span(), -INFINITY);
            if (in.positions) mask_before(s[m], {first_keys[m][0] - key, first_keys[m][1] - key}, -INFINITY);
            float correction[2];
            softmax[m].step(s[m], correction, softmax_scale * kLog2e);
            scale_rows(o[m], correction);
            if (in.dropout) drop_scores(s[m], in, b, h, row + 16 * m, key);
        }
        multiply_columns<kWideColumns>(o, s, tiles + Tiles::kPassingSize + warp.column, Tiles::kStride);
    };
    for_passing_tiles<Tiles>(shared, (end + kPassing - 1) / kPassing, load_keys, use_keys);
    UNROLL for (int m = 0; m < kParts; m++) store_output<kWideColumns>(
        out, lse, o[m], softmax[m], in, b, h, row + 16 * m, softmax_scale, vectors, warp.column);
}

// Computes dK and dV of kRows keys of one head, from S^T = K Q^T, as attention_backward_keys_kernel does.
// Grid (batch * kv_heads, tiles of keys), the longest first.
template <class T, int kHead>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_attention_backward_keys_kernel(T* dk, T* dv, const T* dout, const float* lse, const float* delta,
                                        AttentionInput<T> in, float scale, bool vectors) {
    using Tiles = WideTiles<T, kHead, WideKernel::kBackwardKeys>;
    constexpr int kPassing = Tiles::kPassing, N = Tiles::kScores;
    DYNAMIC_SHARED(T, shared);
    // Behind the columns of a row of Q is its lse, behind those of dout its delta.
    const auto statistic = [](const T* tile, int row) SIMT_INLINE {
        return reinterpret_cast<float*>(const_cast<T*>(tile) + row * Tiles::kStride + kHead);
    };
    const WideWarp<Tiles> warp(shared);
    const int kv = in.block_head() % in.kv_heads, b = in.block_head() / in.kv_heads;
    const int first_head = kv * in.group();
    const int block_row = in.block_tile() * Tiles::kRows, row = block_row + warp.row;
    const int begin = in.first_query(block_row), end = in.queries_before(b, block_row + Tiles::kRows);
    const int tiles_of_head = begin < end ? (end - begin + kPassing - 1) / kPassing : 0;
    const float softmax_scale = in.softmax_scale(scale);
    FragmentA<T> k[1][kWideColumns / 16], v[1][kWideColumns / 16];
    const int64_t rows_at = in.kv_offset(b, kv) + block_row * in.kv_row;
    keep_rows(k, shared, in.k + rows_at, in.kv_row, in.keys - block_row, in.head_size, vectors, warp);
    keep_rows(v, shared, in.v + rows_at, in.kv_row, in.keys - block_row, in.head_size, vectors, warp);
    int ends[2] = {};  // of the documents of this lane's keys
    if (in.positions) document_ends(ends, in, b, row);
    AttentionRows<kWideColumns / 8> dk_rows[1] = {}, dv_rows[1] = {};

    const auto load_queries = [&](int i, T* tiles) SIMT_INLINE {
        const int h = first_head + i / tiles_of_head, query = begin + i % tiles_of_head * kPassing;
        T* const dout_tile = tiles + Tiles::kPassingSize;
        load_wide<Tiles, kPassing>(tiles, in.q + in.q_offset(b, h) + query * in.q_row, in.q_row, end - query,
                                   in.head_size, vectors);
        load_wide<Tiles, kPassing>(dout_tile, dout + in.out_offset(b, h) + query * in.out_row(), in.out_row(),
                                   end - query, in.head_size, vectors);
        const int to = threadIdx.x % kPassing;
        const bool first = threadIdx.x < kPassing;
        const float* const from = (first ? lse : delta) + in.row_offset(b, h) + query + to;
        if (threadIdx.x < 2 * kPassing)
            copy_to_shared<4>(statistic(first ? tiles : dout_tile, to), from, to < end - query);
    };
    const auto use_queries = [&](int i, const T* q_tile) SIMT_INLINE {
        const int h = first_head + i / tiles_of_head, query = begin + i % tiles_of_head * kPassing;
        const T* const dout_tile = q_tile + Tiles::kPassingSize;
        AttentionRows<N> scores[2];
        AttentionRows<N>(&p)[1] = reinterpret_cast<AttentionRows<N>(&)[1]>(scores[0]);
        AttentionRows<N>(&ds)[1] = reinterpret_cast<AttentionRows<N>(&)[1]>(scores[1]);
        multiply_kept<Tiles>(p, k, q_tile + warp.column);
        multiply_kept<Tiles>(ds, v, dout_tile + warp.column);
        add_parts(scores, warp);
        const int diagonal = row - in.position(query);  // the first column that sees the warp's first key
        if (diagonal >= kPassing) return;               // none of these queries sees the warp's keys
        if (in.cap > 0) cap_scores(p[0], fast_quotient(scale, in.cap));
        if (in.alibi) add_distances(p[0], diagonal, -in.slope(h, scale));
        const auto to_probability = [&](float& x, int, int column) {
            x = exp2_of(x * (softmax_scale * kLog2e) - *statistic(q_tile, column) * kLog2e);
        };
        for_each_score<N>(to_probability, p[0]);
        if (diagonal + 15 > 0) mask_up_to(p[0], diagonal - 1, 0.f);
        if (diagonal + in.span() < kPassing) mask_after(p[0], diagonal + in.span() - 1, 0.f);
        if (in.positions) mask_from(p[0], {ends[0] - query, ends[1] - query}, 0.f);
        if (in.dropout) {
            AttentionRows<N> kept[1];
            const auto copy = [](float& to, float from, int, int) { to = from; };
            for_each_score<N>(copy, kept[0], p[0]);
            drop_scores_of_keys(kept[0], in, b, h, query, row);
            multiply_columns<kWideColumns>(dv_rows, kept, dout_tile + warp.column, Tiles::kStride);
            drop_scores_of_keys(ds[0], in, b, h, query, row);
        } else {
            multiply_columns<kWideColumns>(dv_rows, p, dout_tile + warp.column, Tiles::kStride);
        }
        const auto gradient = [&](float& x, float probability, int, int column) {
            x = probability * (x - *statistic(dout_tile, column));
        };
        for_each_score<N>(gradient, ds[0], p[0]);
        if (in.cap > 0) {
            const auto through_cap = [&](float& x, float probability, int, int column) {
                x *= cap_slope(probability, *statistic(q_tile, column), in.cap);
            };
            for_each_score<N>(through_cap, ds[0], p[0]);
        }
        multiply_columns<kWideColumns>(dk_rows, ds, q_tile + warp.column, Tiles::kStride);
    };
    for_passing_tiles<Tiles>(shared, tiles_of_head * in.group(), load_queries, use_queries);
    store_key_rows<kWideColumns>(dk, in.dk_sums, dk_rows[0], scale, in, b, kv, row, vectors, warp.column);
    store_key_rows<kWideColumns>(dv, in.dv_sums, dv_rows[0], 1.f, in, b, kv, row, vectors, warp.column);
}

// Computes dQ of kRows queries of one head. Grid (batch * heads, tiles of queries), the longest first.
template <class T, int kHead>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_attention_backward_queries_kernel(T* dq, const T* dout, const float* lse, const float* delta,
                                           AttentionInput<T> in, float scale, bool vectors) {
    using Tiles = WideTiles<T, kHead, WideKernel::kBackwardQueries>;
    constexpr int kPassing = Tiles::kPassing, kParts = Tiles::kParts, N = Tiles::kScores;
    DYNAMIC_SHARED(T, shared);
    const WideWarp<Tiles> warp(shared);
    const int h = in.block_head() % in.heads, b = in.block_head() / in.heads, kv = h / in.group();
    const int block_row = in.block_tile_from_last() * Tiles::kRows, row = block_row + warp.row;
    in.drop_keys(in.first_tile(in.first_key(b, block_row)));
    const int end = in.keys_before(block_row + Tiles::kRows);
    const float softmax_scale = in.softmax_scale(scale);
    FragmentA<T> q[kParts][kWideColumns / 16], d_out[kParts][kWideColumns / 16];
    keep_rows(q, shared, in.q + in.q_offset(b, h) + block_row * in.q_row, in.q_row, in.queries - block_row,
              in.head_size, vectors, warp);
    keep_rows(d_out, shared, dout + in.out_offset(b, h) + block_row * in.out_row(), in.out_row(),
              in.queries - block_row, in.head_size, vectors, warp);
    int first_keys[kParts][2] = {};  // as in forward
    float row_lse[kParts][2], row_delta[kParts][2];
    AttentionRows<kWideColumns / 8> dq_rows[kParts] = {};
    UNROLL for (int m = 0; m < kParts; m++) {
        UNROLL for (int r = 0; r < 2; r++) {
            const int query = row + 16 * m + lane() / 4 + 8 * r;
            row_lse[m][r] = query < in.queries ? lse[in.row_offset(b, h) + query] * kLog2e : 0.f;
            row_delta[m][r] = query < in.queries ? delta[in.row_offset(b, h) + query] : 0.f;
        }
        if (in.positions) document_keys(first_keys[m], in, b, row + 16 * m);
        if (in.continues) load_carried<kWideColumns>(dq_rows[m], in, h, row + 16 * m, vectors, warp.column);
    }
    const auto load_keys = [&](int i, T* tiles) SIMT_INLINE {
        load_wide_keys<Tiles>(tiles, in, b, kv, i * kPassing, vectors);
    };
    const auto use_keys = [&](int i, const T* k_tile) SIMT_INLINE {
        const int key = i * kPassing;
        AttentionRows<N> scores[2 * kParts];
        auto& s = reinterpret_cast<AttentionRows<N>(&)[kParts]>(scores[0]);
        auto& ds = reinterpret_cast<AttentionRows<N>(&)[kParts]>(scores[kParts]);
        multiply_kept<Tiles>(s, q, k_tile + warp.column);
        multiply_kept<Tiles>(ds, d_out, k_tile + Tiles::kPassingSize + warp.column);
        add_parts(scores, warp);
        const int diagonal = in.position(row) - key;  // as in forward
        if (diagonal + 16 * kParts <= 0) return;
        UNROLL for (int m = 0; m < kParts; m++) {
            const int last = diagonal + 16 * m;
            if (in.dropout) drop_scores(ds[m], in, b, h, row + 16 * m, key);
            if (in.cap > 0) cap_scores(s[m], fast_quotient(scale, in.cap));
            if (in.alibi) add_distances(s[m], last, in.slope(h, scale));
            const auto subtract = [&](float& x, int r, int) { x -= row_delta[m][r]; };
            for_each_score<N>(subtract, ds[m]);
            if (in.cap > 0) {
                const auto through_cap = [](float& x, float score, int, int) { x *= cap_slope(score); };
                for_each_score<N>(through_cap, ds[m], s[m]);
            }
            const auto gradient = [&](float& x, float score, int r, int) {
                x *= exp2_of(score * (softmax_scale * kLog2e) - row_lse[m][r]);
            };
            for_each_score<N>(gradient, ds[m], s[m]);
            if (last < kPassing - 1) mask_after(ds[m], last, 0.f);
            if (last + 15 >= in.span()) mask_up_to(ds[m], last - in.span(), 0.f);
            if (in.positions) mask_before(ds[m], {first_keys[m][0] - key, first_keys[m][1] - key}, 0.f);
        }
        multiply_columns<kWideColumns>(dq_rows, ds, k_tile + warp.column, Tiles::kStride);
    };
    for_passing_tiles<Tiles>(shared, (end + kPassing - 1) / kPassing, load_keys, use_keys);
    UNROLL for (int m = 0; m < kParts; m++)
        store_query_rows<kWideColumns>(dq, dq_rows[m], scale, in, b, h, row + 16 * m, vectors, warp.column);
}

// attention_forward() and attention_backward() for these heads. `vectors` is attention_vectors().
template <class T, int kHead>
void wide_forward(T* out, float* lse, const AttentionInput<T>& in, bool vectors, Stream stream) {
    using Tiles = WideTiles<T, kHead, WideKernel::kForward>;
    const dim3 grid(in.batch * in.heads, ceil_div(in.queries, Tiles::kRows));
    launch_in_parts(grid, in, 2, [&](dim3 part, const AttentionInput<T>& of_part) {
        launch<wide_attention_forward_kernel<T, kHead>>(part, kWideThreads, Tiles::kSharedBytes, stream, out,
                                                        lse, of_part, in.scale(), vectors);
    });
}
template <class T, int kHead>
void wide_backward(T* dq, T* dk, T* dv, const T* dout, const float* lse, const float* delta,
                   const AttentionInput<T>& in, bool vectors, Stream stream) {
    using Keys = WideTiles<T, kHead, WideKernel::kBackwardKeys>;
    const dim3 key_grid(in.batch * in.kv_heads, ceil_div(in.keys, Keys::kRows));
    launch_in_parts(key_grid, in, kProductsForKeys, [&](dim3 part, const AttentionInput<T>& of_part) {
        launch<wide_attention_backward_keys_kernel<T, kHead>>(part, kWideThreads, Keys::kSharedBytes, stream,
                                                              dk, dv, dout, lse, delta, of_part, in.scale(),
                                                              vectors);
    });
    using Queries = WideTiles<T, kHead, WideKernel::kBackwardQueries>;
    const dim3 query_grid(in.batch * in.heads, ceil_div(in.queries, Queries::kRows));
    launch_in_parts(query_grid, in, kProductsForQueries, [&](dim3 part, const AttentionInput<T>& of_part) {
        launch<wide_attention_backward_queries_kernel<T, kHead>>(part, kWideThreads, Queries::kSharedBytes,
                                                                 stream, dq, dout, lse, delta, of_part,
                                                                 in.scale(), vectors);
    });
}
