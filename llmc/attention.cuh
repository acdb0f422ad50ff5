// attention.cuh - causal multi-head attention without the (T, T) matrix of scores: FlashAttention-2.
//
//   S = Q K^T scale, masked   P = softmax(S) by row   out = P V   lse = log sum exp(S) by row
//   dS = P * (dout V^T - delta)   delta = rowsum(dout * out)
//   dV = P^T dout   dK = dS^T Q scale   dQ = dS K scale
//
// With a soft cap S = cap tanh(Q K^T scale / cap), masked, and dS is multiplied with 1 - (S / cap)^2.
//
// A block keeps 64 or 128 rows of one side, queries or keys, in shared memory; each of its 4 or 8 warps has
// 16 or 32 of them. The rows of the other side pass by in tiles, and the next tiles are copied while the
// current ones are used. Scores stay in the registers in which the product left them; P and dS are rounded to
// T there for the next product. Forward computes the softmax online (Milakov and Gimelshein 2018; Dao 2023).
// Backward recomputes P from lse, once for dK and dV and once for dQ, so that no sum needs atomics; query
// heads that share keys are processed one after the other by the block that keeps these keys. Tiles outside a
// window or of other documents are skipped. In the fast CPU build attention_cpu.h does the same with oneDNN.
//
// Heads of more than 128 columns have kernels of their own, in attention_wide.cuh.
//
// Each kernel has two forms. The plain one has no branches for windows, ALiBi, documents, dropout and caps,
// and its rows must be made of whole aligned 16 bytes.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "llmc/attention_hopper.cuh"
#include "llmc/attention_input.h"
#include "llmc/attention_scores.cuh"
#include "llmc/attention_wide.cuh"
#include "llmc/simt_vector.h"
#include "llmc/work.h"
#if !defined(SIMT_GPU) && SIMT_LANES == 1
#include "llmc/attention_cpu.h"
#endif

// Tile sizes for heads of up to kHead columns, a multiple of 16. Columns from head_size on are zero.
//
// kSmall: tiles for GPUs with 100 KiB of shared memory per multiprocessor, where the other tiles would leave
// room for one block of 4 warps. With small tiles 8 warps run at a time, with 16 rows each: two blocks of 4
// for heads of up to 64 columns, one block of 8 for larger heads. In backward the passing tiles are half as
// large, which changes no bits of the results. In forward each passing tile is a step of the softmax, so they
// keep their size.
template <class T, int kHead, bool kSmall = false, bool kBackward = false>
struct AttentionTiles {
    static constexpr int kThreads = kSmall && kHead > 64 ? 256 : 128;
    static constexpr int kStaying = kThreads / 32 * 16;  // rows that stay in a block if a warp has 16
    // Rows that pass by at a time, at most 64: 8 KiB of them, or 4 KiB.
    static constexpr int kBytes = kSmall && kBackward ? 4096 : 8192;
    static constexpr int kPassing = kBytes / (kHead * sizeof(T)) < 64 ? kBytes / (kHead * sizeof(T)) : 64;
    // A row has 16 bytes more than its columns, so that 8 consecutive rows fall into different banks.
    static constexpr int kStride = kHead + 16 / sizeof(T);
    static constexpr int kStayingSize = kStaying * kStride;
    static constexpr int kPassingSize = kPassing * kStride;
    // Blocks for which an SM must have registers. Left to itself, the compiler aims for more blocks and
    // spills.
    static constexpr int kBlocksAtOnce = kSmall ? 256 / kThreads : kHead <= 64 ? 3 : 2;
    // Whether 8 warps fit when a block uses this much shared memory; CUDA reserves 1 KiB more for each block.
    static constexpr bool fits(size_t shared_bytes) {
        return !kSmall || 256 / kThreads * (shared_bytes + 1024) <= 100 << 10;
    }
};

// Loads tiles of kRows rows from kTiles tensors; the tiles are adjacent in shared memory. A thread copies the
// same places of every tile, one column of every kStep-th row, so it finds each next place by additions
// alone.
template <int kTiles, int kRows, int kHead, class T, int kThreads = 128>
struct TileLoader {
    static constexpr int kStride = AttentionTiles<T, kHead>::kStride;
    using Strides = int64_t[kTiles];  // distances between rows
    const T* from[kTiles];            // the first element that this thread copies of the next tile
    int to;                           // where in the tile it goes
    bool vectors;                     // whether rows are made of whole aligned 16 bytes

    template <int kElements>  // elements per copy
    struct ThreadPlace {
        static constexpr int kColumns = kHead / kElements, kStep = kThreads / kColumns;
        static_assert(kThreads % kColumns == 0 && kRows % kStep == 0);
        const int row = threadIdx.x / kColumns, column = threadIdx.x % kColumns * kElements;

        SIMT_DEVICE void begin(TileLoader& loader, const T* const (&tensors)[kTiles],
                               const Strides& strides) const {
            UNROLL for (int t = 0; t < kTiles; t++) loader.from[t] = tensors[t] + row * strides[t] + column;
            loader.to = row * kStride + column;
        }
        // How many rows are left in the thread's column, from its first one on.
        SIMT_DEVICE int left(int rows, int head_size) const { return column < head_size ? rows - row : 0; }
    };
    using Vectors = ThreadPlace<16 / sizeof(T)>;
    using Elements = ThreadPlace<1>;

    SIMT_DEVICE TileLoader(const T* const (&tensors)[kTiles], const Strides& strides, bool vectors)
        : vectors(vectors) {
        vectors ? Vectors().begin(*this, tensors, strides) : Elements().begin(*this, tensors, strides);
    }
    // Starts to copy the next kRows rows of head_size columns, or `rows` if there are fewer. The rest of the
    // tiles becomes zero.
    SIMT_DEVICE void load(T* tiles, const Strides& strides, int rows, int head_size) {
        if (vectors) {
            constexpr int kStep = Vectors::kStep;
            const int left = Vectors().left(rows, head_size);
            UNROLL for (int t = 0; t < kTiles; t++) {
                UNROLL for (int i = 0; i < kRows; i += kStep, from[t] += kStep * strides[t])
                    copy_to_shared<16>(tiles + to + (t * kRows + i) * kStride, from[t], i < left);
            }
        } else {
            constexpr int kStep = Elements::kStep;
            const int left = Elements().left(rows, head_size);
            UNROLL for (int t = 0; t < kTiles; t++) {
#pragma unroll 4
                for (int i = 0; i < kRows; i += kStep, from[t] += kStep * strides[t])
                    tiles[to + (t * kRows + i) * kStride] = i < left ? *from[t] : from_float<T>(0.f);
            }
        }
    }
};

// Loads one tile of each tensor.
template <int kHead, int kRows, int kTiles, int kThreads, class T>
SIMT_DEVICE void load_staying(T* tiles, const T* const (&tensors)[kTiles], const int64_t (&strides)[kTiles],
                              int rows, int head_size, bool vectors) {
    TileLoader<kTiles, kRows, kHead, T, kThreads>(tensors, strides, vectors)
        .load(tiles, strides, rows, head_size);
}

// Loads tiles of the keys and values of one head, from the first key on.
template <class Tiles, int kHead, class T>
struct KeyLoader : TileLoader<2, Tiles::kPassing, kHead, T, Tiles::kThreads> {
    using Loader = TileLoader<2, Tiles::kPassing, kHead, T, Tiles::kThreads>;
    SIMT_DEVICE KeyLoader(const AttentionInput<T>& in, int b, int kv, bool vectors)
        : Loader({in.k + in.kv_offset(b, kv), in.v + in.kv_offset(b, kv)}, {in.kv_row, in.kv_row}, vectors) {}
    SIMT_DEVICE void load(T* tiles, const AttentionInput<T>& in, int key) {
        Loader::load(tiles, {in.kv_row, in.kv_row}, in.keys - key, in.head_size);
    }
};

// s = A B^T over kHead columns. A has 16 * M rows in a_tile; B has 8 * N rows in b_tile, each read once for
// all of A.
template <int kHead, int M, int N, class T>
SIMT_DEVICE void multiply_rows(AttentionRows<N> (&s)[M], const T* a_tile, const T* b_tile) {
    constexpr int kStride = AttentionTiles<T, kHead>::kStride;
    UNROLL for (int m = 0; m < M; m++) for_each_score<N>([](float& x, int, int) { x = 0.f; }, s[m]);
    UNROLL for (int k = 0; k < kHead; k += 16) {
        FragmentB<T> b[N];
        load_b(b, b_tile + k, kStride);
        UNROLL for (int m = 0; m < M; m++) {
            const FragmentA<T> a[1] = {load_a(a_tile + 16 * m * kStride + k, kStride)};
            mma_tiles(s[m], a, b);
        }
    }
}
template <int kHead, int N, class T>
SIMT_DEVICE void multiply_rows(AttentionRows<N>& s, const T* a_tile, const T* b_tile) {
    multiply_rows<kHead>(reinterpret_cast<AttentionRows<N>(&)[1]>(s), a_tile, b_tile);
}

// multiply_columns() with a tile of these kernels.
template <int kHead, int M, int N, class T>
SIMT_DEVICE void multiply_columns(AttentionRows<kHead / 8> (&o)[M], const AttentionRows<N> (&p)[M],
                                  const T* b_tile) {
    multiply_columns<kHead>(o, p, b_tile, AttentionTiles<T, kHead>::kStride);
}
template <int kHead, int N, class T>
SIMT_DEVICE void multiply_columns(AttentionRows<kHead / 8>& o, const AttentionRows<N>& p, const T* b_tile) {
    multiply_columns<kHead>(reinterpret_cast<AttentionRows<kHead / 8>(&)[1]>(o),
                            reinterpret_cast<const AttentionRows<N>(&)[1]>(p), b_tile);
}

// Where a warp of a block of kRows queries works: its batch entry and head, the block's and its own first
// query.
template <int kRows, int kWarpRows>
struct QueryPlace {
    int b, h, block_row, row;
    template <class T>
    SIMT_DEVICE QueryPlace(const AttentionInput<T>& in, int block, int tile, int warp)
        : b(block / in.heads),
          h(block % in.heads),
          block_row((in.part.whole_y - 1 - tile) * kRows),
          row(block_row + warp * kWarpRows) {}
};
// Returns x, but the compiler does not know that it is the same: it recomputes what it needs from the result,
// and keeps nothing in registers that it computed from x before.
SIMT_DEVICE int made_anew(int x) {
#if defined(SIMT_GPU)
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// Tile sizes of forward. The plain form gives a warp 32 queries, so that the keys and values that it reads
// serve twice as many products; shared memory then delivers them as fast as the tensor cores consume them.
// Tensor cores of GPUs with small tiles are half or a quarter as fast, and 16 queries a warp are enough.
template <class T, int kHead, bool kPlain, bool kSmall>
struct ForwardTiles : AttentionTiles<T, kHead, kSmall> {
    using Tiles = AttentionTiles<T, kHead, kSmall>;
    static constexpr int kParts = kPlain && !kSmall && std::is_same_v<T, bf16> ? 2 : 1;  // of 16 queries
    static constexpr int kRows = kParts * Tiles::kStaying;
    static constexpr int kQuerySize = kRows * Tiles::kStride;
    static constexpr size_t kSharedBytes = (kQuerySize + 4 * Tiles::kPassingSize) * sizeof(T);
    static constexpr int kBlocksAtOnce = kParts == 2 ? 2 : Tiles::kBlocksAtOnce;
    static_assert(Tiles::fits(kSharedBytes));
};

// Computes out and lse of kRows queries of one head. Grid (batch * heads, tiles of queries), the longest
// first.
template <class T, int kHead, bool kPlain, bool kSmall>
__global__ void __launch_bounds__(ForwardTiles<T, kHead, kPlain, kSmall>::kThreads,
                                  ForwardTiles<T, kHead, kPlain, kSmall>::kBlocksAtOnce)
    attention_forward_kernel(T* out, float* lse, AttentionInput<T> in, float scale, bool vectors) {
    using Tiles = ForwardTiles<T, kHead, kPlain, kSmall>;
    constexpr int kPassing = Tiles::kPassing, kParts = Tiles::kParts, kRows = Tiles::kRows;
    if (kPlain) vectors = true;
    DYNAMIC_SHARED(T, shared);
    T* const q_tile = shared;
    T* const kv_tiles = q_tile + Tiles::kQuerySize;  // K, V of this step, K, V of the next
    using Place = QueryPlace<kRows, 16 * kParts>;
    const Place place(in, in.block_head(), in.block_tile(), uniform_warp());
    const auto [b, h, block_row, row] = place;
    const int kv = h / in.group(), warp_row = row - block_row;
    if (!kPlain) in.drop_keys(in.first_tile(in.first_key(b, block_row)));
    const int end = in.keys_before(block_row + kRows);
    if (kPlain) SIMT_ASSUME(end > 0);
    const float softmax_scale = kPlain ? scale : in.softmax_scale(scale);
    load_staying<kHead, kRows, 1, Tiles::kThreads, T>(
        q_tile, {in.q + in.q_offset(b, h) + block_row * in.q_row}, {in.q_row}, in.queries - block_row,
        in.head_size, vectors);
    KeyLoader<Tiles, kHead, T> loader(in, b, kv, vectors);
    loader.load(kv_tiles, in, 0);

    int first_keys[2] = {};  // of the documents of this lane's queries
    if (!kPlain && in.positions) document_keys(first_keys, in, b, row);
    AttentionRows<kHead / 8> o[kParts] = {};
    OnlineSoftmax<> softmax[kParts];
    if (in.continues) {
        UNROLL for (int m = 0; m < kParts; m++)
            continue_output<kHead>(o[m], softmax[m], in, h, row + 16 * m, vectors);
    }
    for (int key = 0, buffer = 0; key < end; key += kPassing, buffer ^= 1) {
        wait_for_copies();
        __syncthreads();  // this step's tiles are complete, and nobody reads the other two any more
        // Without made_anew(), here and below, the compiler would keep these numbers in registers of their
        // own.
        if (key + kPassing < end)
            loader.load(kv_tiles + (buffer ^ 1) * 2 * Tiles::kPassingSize, in, made_anew(key + kPassing));
        // The last column of this tile that the warp's first query sees.
        const int diagonal = in.position(row) - key;
        if (diagonal + 16 * kParts <= 0) continue;  // only other warps see these keys
        const T* const k_tile = kv_tiles + buffer * 2 * Tiles::kPassingSize;
        AttentionRows<kPassing / 8> s[kParts];
        multiply_rows<kHead>(s, q_tile + warp_row * Tiles::kStride, k_tile);
        UNROLL for (int m = 0; m < kParts; m++) {
            const int last = diagonal + 16 * m;
            if (!kPlain && in.cap > 0) cap_scores(s[m], fast_quotient(scale, in.cap));
            if (!kPlain && in.alibi) add_distances(s[m], last, in.slope(h, scale));
            if (last < kPassing - 1) mask_after(s[m], made_anew(last), -INFINITY);
            if (!kPlain && last + 15 >= in.span()) mask_up_to(s[m], last - in.span(), -INFINITY);
            if (!kPlain && in.positions)
                mask_before(s[m], {first_keys[0] - key, first_keys[1] - key}, -INFINITY);
            float correction[2];
            softmax[m].step(s[m], correction, softmax_scale * kLog2e);
            scale_rows(o[m], correction);
            if (!kPlain && in.dropout) drop_scores(s[m], in, b, h, row, key);
        }
        multiply_columns<kHead>(o, s, k_tile + Tiles::kPassingSize);
    }
    if (!kPlain && end <= 0) wait_for_copies();  // a piece of keys that none of these queries sees
    // Computed again here: kept over the loop, it would take registers that heads of 128 columns do not have.
    const Place to(in, in.part.x + made_anew(blockIdx.x), in.part.y + made_anew(blockIdx.y),
                   made_anew(threadIdx.x) / kLanes);
    UNROLL for (int m = 0; m < kParts; m++) store_output<kHead>(out, lse, o[m], softmax[m], in, to.b, to.h,
                                                                to.row + 16 * m, softmax_scale, vectors);
}

// delta[b, h, i] = sum of dout * out over the head's columns. One warp for each b and i.
template <class T, int N>
__global__ void __launch_bounds__(kBlockThreads)
    attention_delta_kernel(float* delta, const T* dout, const T* out, AttentionInput<T> in) {
    const int row = blockIdx.x * warps_per_block() + warp();
    if (row >= in.batch * in.queries) return;
    const HeadLanes share = HeadLanes::of<N>(in.head_size);
    const int b = row / in.queries, i = row % in.queries;
    for (int first = 0; first < in.heads; first += share.heads) {
        const int h = first + share.head, size = h < in.heads ? in.head_size : 0;
        const int64_t at = row * in.out_row() + h * in.head_size;
        Accumulator<N> sum;
#pragma unroll 1  // with vectors: a lane has only one, unless a head has more than 128 columns
        for (int c = share.first; c < size; c += share.lanes * N) {
            const Packed<T, N> x = load<N>(dout + at + c), y = load<N>(out + at + c);
            for (int e = 0; e < N; e++) sum[e] += x[e] * y[e];
        }
        const float total = share.sum(sum.sum());
        if (size > 0 && share.first == 0) delta[in.row_offset(b, h) + i] = total;
    }
}

// Computes dK and dV of 64 or 128 keys of one head, from S^T = K Q^T. The queries of all heads that share
// these keys pass by, head after head. Grid (batch * kv_heads, tiles of keys), the longest first.
template <class T, int kHead, bool kPlain, bool kSmall>
__global__ void __launch_bounds__(AttentionTiles<T, kHead, kSmall, true>::kThreads,
                                  // Like kBlocksAtOnce, but with twice as many sums in registers.
                                  256 / AttentionTiles<T, kHead, kSmall, true>::kThreads)
    attention_backward_keys_kernel(T* dk, T* dv, const T* dout, const float* lse, const float* delta,
                                   AttentionInput<T> in, float scale, bool vectors) {
    using Tiles = AttentionTiles<T, kHead, kSmall, true>;
    constexpr int kPassing = Tiles::kPassing;
    if (kPlain) vectors = true;
    DYNAMIC_SHARED(T, shared);
    T* const k_tile = shared;
    T* const v_tile = k_tile + Tiles::kStayingSize;
    T* const passing = v_tile + Tiles::kStayingSize;  // Q, dout of this step, Q, dout of the next
    // Behind the columns of a tile's row is a number of its query: lse in the tile of Q, delta in that of
    // dout.
    const auto statistic = [](const T* tile, int row) {
        return reinterpret_cast<float*>(const_cast<T*>(tile) + row * Tiles::kStride + kHead);
    };
    const int kv = in.block_head() % in.kv_heads, b = in.block_head() / in.kv_heads;
    const int first_head = kv * in.group(), heads_end = first_head + in.group();
    if (kPlain) SIMT_ASSUME(heads_end > first_head);  // in the other form it would make ptxas spill
    const int block_row = in.block_tile() * Tiles::kStaying;
    const int keys_end = block_row + Tiles::kStaying, begin = in.first_query(block_row);
    const int end = kPlain ? in.queries : in.queries_before(b, keys_end);
    const int warp_row = uniform_warp() * 16, row = block_row + warp_row;  // the warp's first key
    const float softmax_scale = kPlain ? scale : in.softmax_scale(scale);
    using Loader = TileLoader<2, kPassing, kHead, T, Tiles::kThreads>;
    const auto loader_of = [&](int h) SIMT_INLINE {
        return Loader(
            {in.q + in.q_offset(b, h) + begin * in.q_row, dout + in.out_offset(b, h) + begin * in.out_row()},
            {in.q_row, in.out_row()}, vectors);
    };
    Loader loader = loader_of(first_head);
    const auto load_queries = [&](int h, int query, int buffer) {
        T* const to = passing + buffer * 2 * Tiles::kPassingSize;
        const int left = end - query;
        loader.load(to, {in.q_row, in.out_row()}, left, in.head_size);
        const int i = threadIdx.x % kPassing;
        const bool first = threadIdx.x < kPassing;
        const float* const from = (first ? lse : delta) + in.row_offset(b, h) + query + i;
        if (threadIdx.x < 2 * kPassing)
            copy_to_shared<4>(statistic(first ? to : to + Tiles::kPassingSize, i), from, i < left);
    };
    const int64_t rows_at = in.kv_offset(b, kv) + block_row * in.kv_row;
    load_staying<kHead, Tiles::kStaying, 2, Tiles::kThreads, T>(k_tile, {in.k + rows_at, in.v + rows_at},
                                                                {in.kv_row, in.kv_row}, in.keys - block_row,
                                                                in.head_size, vectors);
    load_queries(first_head, begin, 0);

    int ends[2] = {};  // of the documents of this lane's keys
    if (!kPlain && in.positions) document_ends(ends, in, b, row);
    AttentionRows<kHead / 8> dk_rows = {}, dv_rows = {};
    int next_head, next_query;
    for (int h = first_head, query = begin, buffer = 0; h < heads_end;
         h = next_head, query = next_query, buffer ^= 1) {
        wait_for_copies();
        __syncthreads();  // as in forward
        const bool same_head = query + kPassing < end;
        next_head = same_head ? h : h + 1;
        next_query = same_head ? query + kPassing : begin;
        if (next_head < heads_end) {
            if (!same_head) loader = loader_of(next_head);
            load_queries(next_head, next_query, buffer ^ 1);
        }
        const int diagonal = row - in.position(query);  // the first column that sees the warp's first key
        if (diagonal >= kPassing) continue;             // none of these queries sees the warp's keys
        const T* const q_tile = passing + buffer * 2 * Tiles::kPassingSize;
        const T* const dout_tile = q_tile + Tiles::kPassingSize;
        AttentionRows<kPassing / 8> p, ds;
        multiply_rows<kHead>(p, k_tile + warp_row * Tiles::kStride, q_tile);
        if (!kPlain && in.cap > 0) cap_scores(p, fast_quotient(scale, in.cap));
        if (!kPlain && in.alibi) add_distances(p, diagonal, -in.slope(h, scale));
        const auto to_probability = [&](float& x, int, int column) {
            x = exp2_of(x * (softmax_scale * kLog2e) - *statistic(q_tile, column) * kLog2e);
        };
        for_each_score<kPassing / 8>(to_probability, p);
        if (diagonal + 15 > 0) mask_up_to(p, diagonal - 1, 0.f);
        if (!kPlain && diagonal + in.span() < kPassing) mask_after(p, diagonal + in.span() - 1, 0.f);
        if (!kPlain && in.positions) mask_from(p, {ends[0] - query, ends[1] - query}, 0.f);
        if (!kPlain && in.dropout) {
            AttentionRows<kPassing / 8> kept;
            const auto copy = [](float& to, float from, int, int) { to = from; };
            for_each_score<kPassing / 8>(copy, kept, p);
            drop_scores_of_keys(kept, in, b, h, query, row);
            multiply_columns<kHead>(dv_rows, kept, dout_tile);
        } else {
            multiply_columns<kHead>(dv_rows, p, dout_tile);
        }
        multiply_rows<kHead>(ds, v_tile + warp_row * Tiles::kStride, dout_tile);
        if (!kPlain && in.dropout) drop_scores_of_keys(ds, in, b, h, query, row);
        const auto gradient = [&](float& x, float probability, int, int column) {
            x = probability * (x - *statistic(dout_tile, column));
        };
        for_each_score<kPassing / 8>(gradient, ds, p);
        if (!kPlain && in.cap > 0) {
            const auto through_cap = [&](float& x, float probability, int, int column) {
                x *= cap_slope(probability, *statistic(q_tile, column), in.cap);
            };
            for_each_score<kPassing / 8>(through_cap, ds, p);
        }
        multiply_columns<kHead>(dk_rows, ds, q_tile);
    }
    store_key_rows<kHead>(dk, in.dk_sums, dk_rows, scale, in, b, kv, row, vectors);
    store_key_rows<kHead>(dv, in.dv_sums, dv_rows, 1.f, in, b, kv, row, vectors);
}

// Tile sizes of backward for queries: as in forward, except for heads of more than 64 columns. With 128
// queries their tiles of Q and of dout would not fit into every GPU's shared memory.
template <class T, int kHead, bool kPlain, bool kDrops, bool kSmall>
struct BackwardTiles : AttentionTiles<T, kHead, kSmall, true> {
    using Tiles = AttentionTiles<T, kHead, kSmall, true>;
    static constexpr int kParts = kHead <= 64 ? ForwardTiles<T, kHead, kPlain, kSmall>::kParts : 1;
    static constexpr int kRows = kParts * Tiles::kStaying;
    static constexpr int kQuerySize = kRows * Tiles::kStride;
    static constexpr size_t kSharedBytes = (2 * kQuerySize + 4 * Tiles::kPassingSize) * sizeof(T);
    static constexpr int kBlocksAtOnce = kParts == 2 || kDrops ? 2 : Tiles::kBlocksAtOnce;
    static_assert(Tiles::fits(kSharedBytes));
};

// Computes dQ of kRows queries of one head. Grid (batch * heads, tiles of queries), the longest first.
// Dropout has a form of its own, because its random numbers take registers.
template <class T, int kHead, bool kPlain, bool kDrops, bool kSmall>
__global__ void __launch_bounds__(BackwardTiles<T, kHead, kPlain, kDrops, kSmall>::kThreads,
                                  BackwardTiles<T, kHead, kPlain, kDrops, kSmall>::kBlocksAtOnce)
    attention_backward_queries_kernel(T* dq, const T* dout, const float* lse, const float* delta,
                                      AttentionInput<T> in, float scale, bool vectors) {
    using Tiles = BackwardTiles<T, kHead, kPlain, kDrops, kSmall>;
    constexpr int kPassing = Tiles::kPassing, kParts = Tiles::kParts, kRows = Tiles::kRows;
    if (kPlain) vectors = true;
    DYNAMIC_SHARED(T, shared);
    T* const q_tile = shared;
    T* const dout_tile = q_tile + Tiles::kQuerySize;
    T* const kv_tiles = dout_tile + Tiles::kQuerySize;  // K, V of this step, K, V of the next
    const int h = in.block_head() % in.heads, b = in.block_head() / in.heads, kv = h / in.group();
    const int block_row = in.block_tile_from_last() * kRows;
    const int warp_row = uniform_warp() * 16 * kParts, row = block_row + warp_row;  // the warp's first query
    if (!kPlain) in.drop_keys(in.first_tile(in.first_key(b, block_row)));
    const int end = in.keys_before(block_row + kRows);
    if (kPlain) SIMT_ASSUME(end > 0);
    const float softmax_scale = kPlain ? scale : in.softmax_scale(scale);
    load_staying<kHead, kRows, 2, Tiles::kThreads, T>(q_tile,
                                                      {in.q + in.q_offset(b, h) + block_row * in.q_row,
                                                       dout + in.out_offset(b, h) + block_row * in.out_row()},
                                                      {in.q_row, in.out_row()}, in.queries - block_row,
                                                      in.head_size, vectors);
    KeyLoader<Tiles, kHead, T> loader(in, b, kv, vectors);
    loader.load(kv_tiles, in, 0);

    float row_lse[kParts][2], row_delta[kParts][2];
    UNROLL for (int m = 0; m < kParts; m++) {
        UNROLL for (int r = 0; r < 2; r++) {
            const int query = row + 16 * m + lane() / 4 + 8 * r;
            row_lse[m][r] = query < in.queries ? lse[in.row_offset(b, h) + query] * kLog2e : 0.f;
            row_delta[m][r] = query < in.queries ? delta[in.row_offset(b, h) + query] : 0.f;
        }
    }
    int first_keys[2] = {};  // as in forward
    if (!kPlain && in.positions) document_keys(first_keys, in, b, row);
    AttentionRows<kHead / 8> dq_rows[kParts] = {};
    if (in.continues) {
        UNROLL for (int m = 0; m < kParts; m++) load_carried<kHead>(dq_rows[m], in, h, row + 16 * m, vectors);
    }
    for (int key = 0, buffer = 0; key < end; key += kPassing, buffer ^= 1) {
        wait_for_copies();
        __syncthreads();  // as in forward
        if (key + kPassing < end)
            loader.load(kv_tiles + (buffer ^ 1) * 2 * Tiles::kPassingSize, in, key + kPassing);
        const int diagonal = in.position(row) - key;  // as in forward
        if (diagonal + 16 * kParts <= 0) continue;
        const T* const k_tile = kv_tiles + buffer * 2 * Tiles::kPassingSize;
        AttentionRows<kPassing / 8> s[kParts], ds[kParts];
        multiply_rows<kHead>(s, q_tile + warp_row * Tiles::kStride, k_tile);
        multiply_rows<kHead>(ds, dout_tile + warp_row * Tiles::kStride, k_tile + Tiles::kPassingSize);
        UNROLL for (int m = 0; m < kParts; m++) {
            const int last = diagonal + 16 * m;
            if (kDrops) drop_scores(ds[m], in, b, h, row, key);
            if (!kPlain && in.cap > 0) cap_scores(s[m], fast_quotient(scale, in.cap));
            if (!kPlain && in.alibi) add_distances(s[m], last, in.slope(h, scale));
            const auto subtract = [&](float& x, int r, int) { x -= row_delta[m][r]; };
            for_each_score<kPassing / 8>(subtract, ds[m]);
            if (!kPlain && in.cap > 0) {
                const auto through_cap = [](float& x, float score, int, int) { x *= cap_slope(score); };
                for_each_score<kPassing / 8>(through_cap, ds[m], s[m]);
            }
            const auto gradient = [&](float& x, float score, int r, int) {
                x *= exp2_of(score * (softmax_scale * kLog2e) - row_lse[m][r]);
            };
            for_each_score<kPassing / 8>(gradient, ds[m], s[m]);
            if (last < kPassing - 1) mask_after(ds[m], last, 0.f);
            if (!kPlain && last + 15 >= in.span()) mask_up_to(ds[m], last - in.span(), 0.f);
            if (!kPlain && in.positions) mask_before(ds[m], {first_keys[0] - key, first_keys[1] - key}, 0.f);
        }
        multiply_columns<kHead>(dq_rows, ds, k_tile);
    }
    if (!kPlain && end <= 0) wait_for_copies();  // as in forward
    UNROLL for (int m = 0; m < kParts; m++)
        store_query_rows<kHead>(dq, dq_rows[m], scale, in, b, h, row + 16 * m, vectors);
}

// Calls f(std::integral_constant) with the number of columns of the tiles for this head size.
template <class F>
void for_head_size(int head_size, F f) {
    assert(head_size <= 128);
    if (head_size <= 16)
        f(std::integral_constant<int, 16>());
    else if (head_size <= 32)
        f(std::integral_constant<int, 32>());
    else if (head_size <= 64)
        f(std::integral_constant<int, 64>());
    else
        f(std::integral_constant<int, 128>());
}
// kHasSmallTiles: whether the plain form exists with small tiles too. device_needs_small_tiles(): whether the
// current device needs them, as multiprocessors of compute capability 8.6, 8.9 and 12.x do, which have 100
// KiB of shared memory.
#if defined(SIMT_GPU)
template <class T, int kHead>
constexpr bool kHasSmallTiles = kHead >= 64 && std::is_same_v<T, bf16>;
inline bool device_needs_small_tiles() {
    static const bool needs = [] {
        int device = 0, bytes = 0;
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
        return bytes <= 100 << 10;
    }();
    return needs;
}
#else
template <class T, int kHead>
constexpr bool kHasSmallTiles = false;
inline bool device_needs_small_tiles() { return false; }
#endif

// Calls f(columns, plain, small) with integral constants: the columns of the tiles, whether the plain form
// applies, and whether with small tiles. `vectors` is attention_vectors().
template <class T, class F>
void for_form(const AttentionInput<T>& in, bool vectors, F f) {
    constexpr std::true_type yes;
    constexpr std::false_type no;
    for_head_size(in.head_size, [&](auto columns) {
        if (!in.plain() || !vectors) return f(columns, no, no);
        if constexpr (kHasSmallTiles<T, columns.value>)
            if (device_needs_small_tiles()) return f(columns, yes, yes);
        f(columns, yes, no);
    });
}

// Whether all rows of these arrays, and of q, k and v, are made of whole, aligned 16 bytes.
template <class T>
bool attention_vectors(const AttentionInput<T>& in, std::initializer_list<const void*> arrays) {
    const auto whole = [](int64_t bytes) { return bytes % 16 == 0; };
    bool all = true;
    for (const int64_t n :
         std::initializer_list<int64_t>{in.head_size, in.q_row, in.kv_row, in.q_batch, in.kv_batch, in.q_head,
                                        in.kv_head, in.dkv_row, in.dkv_batch, in.dkv_head})
        all = all && whole(n * sizeof(T));
    for (const T* p : std::initializer_list<const T*>{in.q, in.k, in.v})
        all = all && whole(reinterpret_cast<intptr_t>(p));
    for (const void* p : arrays) all = all && whole(reinterpret_cast<intptr_t>(p));
    return all;
}

// Whether attention_hopper.cuh's kernels may and can compute this; otherwise those above do.
template <class T>
bool hopper_attention_takes(const AttentionInput<T>& in, std::initializer_list<const void*> arrays) {
    // Hopper's kernels begin at a window or a document, not at a multiple of kKeyPiece: in pieces only the
    // plain form.
    // Every query must see a key: a block waits for its first tile.
    return in.hopper && in.position(0) >= 0 && !in.dropout && in.cap == 0 &&
           hopper_attention_supports(in.head_size) && (!in.in_pieces || in.plain()) &&
           attention_vectors(in, arrays) && device_is_hopper();
}

// The operation that a dry run records (work.h): `products` matrix products of the unmasked scores' size, and
// memory traffic of `passes` passes over arrays as large as q and as large as the visible rows of k and v,
// and of `sum_passes` passes over these rows in fp32.
template <class T>
Operation attention_operation(const char* name, const AttentionInput<T>& in, int products, int passes,
                              int sum_passes = 0) {
    const double heads = static_cast<double>(in.batch) * in.heads;
    const double q_rows = heads * in.queries, kv_rows = heads / in.group() * (in.keys - in.first_key(0));
    const double carried = ((in.continues ? 1 : 0) + (in.later > 0 ? 1 : 0)) * q_rows * sizeof(float);
    return Operation(name, in.flops(products),
                     in.head_size * ((q_rows + kv_rows) * passes * sizeof(T) +
                                     kv_rows * sum_passes * sizeof(float) + carried),
                     {}, {.length = 2 * in.seen_scores() / in.queries, .head_size = in.head_size});
}

// Computes out (batch, queries, heads * head_size) and lse (batch, heads, queries), the logarithm of each
// row's sum of exponentials, which backward needs; lse may be null. Where keys come in pieces, only the call
// for the last piece writes them.
template <class T>
void attention_forward(T* out, float* lse, const AttentionInput<T>& in, Stream stream) {
    assert(attention_supports(in.head_size) && in.queries <= in.all_keys() && in.heads % in.kv_heads == 0 &&
           !(in.cap > 0 && in.alibi));
    assert(!in.positions || in.queries == in.keys || in.batch == 1);
    // A dry run uses a piece of average size, which may be no multiple of kKeyPiece.
    assert(in.later == 0 || (in.batch == 1 && in.in_pieces));
    assert(in.later == 0 || in.keys % kKeyPiece == 0 || simt::launches_off);
    const Operation operation = attention_operation("attention_forward", in, 2, 2);
    if (simt::launches_off && !kFastCpu) return;  // on a CPU the launch plans its workers' scratch
    if constexpr (kPlanner) {
        bug("a planner computes no attention");
    } else if constexpr (kFastCpu) {
        attention_forward_on_cpu(out, lse, in, stream);
    } else {
        if constexpr (kHopperAttention<T>)
            if (hopper_attention_takes(in, {out})) return hopper_attention_forward(out, lse, in, stream);
        const bool vectors = attention_vectors(in, {out});
        if (in.head_size > 256) return wide_forward<T, 512>(out, lse, in, vectors, stream);
        if (in.head_size > 128) return wide_forward<T, 256>(out, lse, in, vectors, stream);
        for_form(in, vectors, [&](auto columns, auto plain, auto small) {
            using Tiles = ForwardTiles<T, columns.value, plain.value, small.value>;
            const dim3 grid(in.batch * in.heads, ceil_div(in.queries, Tiles::kRows));
            launch_in_parts(grid, in, 2, [&](dim3 part, const AttentionInput<T>& of_part) {
                launch<attention_forward_kernel<T, columns.value, plain.value, small.value>>(
                    part, Tiles::kThreads, Tiles::kSharedBytes, stream, out, lse, of_part, in.scale(),
                    vectors);
            });
        });
    }
}

// delta (batch, heads, queries) = the sums of dout * out over each head's columns. Backward needs nothing
// else of out. dout and out are (batch, queries, heads * head_size).
template <class T>
void attention_delta(float* delta, const T* dout, const T* out, const AttentionInput<T>& in, Stream stream) {
    const int rows = in.batch * in.queries;
    const Operation operation("attention_delta", 0,
                              static_cast<double>(rows) * in.heads *
                                  static_cast<double>(2 * sizeof(T) * in.head_size + sizeof(float)));
    const auto run = [&]<int N>(std::integral_constant<int, N>) {
        launch<attention_delta_kernel<T, N>>(blocks_of_rows(rows), kBlockThreads, 0, stream, delta, dout, out,
                                             in);
    };
    if (attention_vectors(in, {dout, out}) && vector_fits<T>(in.head_size))
        run(std::integral_constant<int, kVectorSize<T>>());
    else
        run(std::integral_constant<int, 1>());
}

// Whether attention_backward() may write dk and dv over k and v. On a GPU it may not: the scores are
// recomputed from k for dQ after dk is written.
constexpr bool kOverwritesKeys = kFastCpu;

// Computes dq, with the strides of q, and dk and dv, with the strides dkv_row, dkv_batch and dkv_head, from
// dout, lse of the forward pass and attention_delta(). The queries are those of all keys; with dk_sums and
// dv_sums they may be the last ones only, or follow after the keys. Where keys come in pieces, only the call
// for the last piece writes dq, and every piece must be visible to some query. dq may be q; for dk and dv see
// kOverwritesKeys. Every element of the heads is written. Deterministic.
template <class T>
void attention_backward(T* dq, T* dk, T* dv, const T* dout, const float* lse, const float* delta,
                        const AttentionInput<T>& given, Stream stream) {
    const AttentionInput<T> in = given.queries < given.all_keys() ? given.without_unseen_keys() : given;
    assert(in.heads % in.kv_heads == 0);
    assert(given.queries == given.all_keys() || in.batch == 1);
    assert(in.keys > 0);
    // On a GPU the kernels for keys and for queries each compute the scores and their gradients.
    const Operation operation =
        attention_operation("attention_backward", in, kFastCpu ? 5 : kProductsForKeys + kProductsForQueries,
                            4, in.queries < in.all_keys() ? 4 : 0);
    if (simt::launches_off && !kFastCpu) return;  // on a CPU the launch plans its workers' scratch
    const bool vectors = attention_vectors(in, {dq, dk, dv, dout});
    if constexpr (kPlanner) {
        bug("a planner computes no attention");
    } else if constexpr (kFastCpu) {
        attention_backward_on_cpu(dq, dk, dv, dout, lse, delta, in, stream);
    } else {
        if constexpr (kHopperAttention<T>)
            if (hopper_attention_takes(in, {dq, dk, dv, dout}))
                return hopper_attention_backward(dq, dk, dv, dout, lse, delta, in, stream);
        if (in.head_size > 256)
            return wide_backward<T, 512>(dq, dk, dv, dout, lse, delta, in, vectors, stream);
        if (in.head_size > 128)
            return wide_backward<T, 256>(dq, dk, dv, dout, lse, delta, in, vectors, stream);
        for_form(in, vectors, [&](auto columns, auto plain, auto small) {
            using Tiles = AttentionTiles<T, columns.value, small.value, true>;
            constexpr size_t tiles = (2 * Tiles::kStayingSize + 4 * Tiles::kPassingSize) * sizeof(T);
            static_assert(Tiles::fits(tiles));
            const dim3 key_grid(in.batch * in.kv_heads, ceil_div(in.keys, Tiles::kStaying));
            launch_in_parts(key_grid, in, kProductsForKeys, [&](dim3 part, const AttentionInput<T>& of_part) {
                launch<attention_backward_keys_kernel<T, columns.value, plain.value, small.value>>(
                    part, Tiles::kThreads, tiles, stream, dk, dv, dout, lse, delta, of_part, in.scale(),
                    vectors);
            });
            const auto launch_queries = [&](auto drops) {
                constexpr bool kPlain = plain.value && !drops.value, kSmall = kPlain && small.value;
                using Queries = BackwardTiles<T, columns.value, kPlain, drops.value, kSmall>;
                const dim3 grid(in.batch * in.heads, ceil_div(in.queries, Queries::kRows));
                launch_in_parts(
                    grid, in, kProductsForQueries, [&](dim3 part, const AttentionInput<T>& of_part) {
                        launch<
                            attention_backward_queries_kernel<T, columns.value, kPlain, drops.value, kSmall>>(
                            part, Queries::kThreads, Queries::kSharedBytes, stream, dq, dout, lse, delta,
                            of_part, in.scale(), vectors);
                    });
            };
            in.dropout ? launch_queries(std::true_type()) : launch_queries(std::false_type());
        });
    }
}
