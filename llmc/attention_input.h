// attention_input.h - the arguments of causal multi-head attention: shapes, strides, masks. Read this before
// any of the attention kernels.
#pragma once

#include <algorithm>
#include <cmath>

#include "llmc/dropout.cuh"
#include "llmc/simt.h"
#include "llmc/simt_vector.h"

// Query i of `queries` is at the position of key all_keys() - queries + i; with a KV cache there are more
// keys than queries. It sees that key and the keys before it; with a sliding window, only the last `window`
// of these.
//
// Backward can process a sequence in chunks of queries, from the last chunk to the first: see dk_sums. For
// each chunk the keys can come in pieces, from the first piece to the last: see `later`.
//
// Grouped-query attention (Ainslie et al. 2023): each head of keys and values serves group() consecutive
// query heads.
//
// ALiBi (Press et al. 2022) adds slope * (key - query) to a head's scores. BLOOM adds slope * key, which
// gives the same softmax. The distance is small where a probability is large, so nothing is lost in fp32.
//
// A sequence may hold several documents one after the other. Then a query sees no key of an earlier document.
//
// Strides of rows, of batch entries and of heads are in elements, so q, k and v may be columns of one packed
// tensor: all heads of q, then those of k, then those of v; or q, k and v of each head together.

// Keys of a piece are a multiple of this, which is a multiple of every kernel's tile. So keys are summed in
// the same order as without pieces, and results have the same bits. The exception is a window or documents:
// tiles then begin at other keys than without pieces.
constexpr int kKeyPiece = key_piece(kFastCpu);
// Numbers that describe a row's softmax so far: its largest score, and the partial sums of exponentials of
// the four lanes that share it (a CPU has one sum).
constexpr int kCarriedStatistics = 5;

template <class T>
struct AttentionInput {
    int batch, heads, head_size, queries, keys;
    const T *q, *k, *v;
    int64_t q_row, kv_row, q_batch, kv_batch;
    int kv_heads = heads;  // of keys and values; divides heads
    int64_t q_head = head_size, kv_head = head_size;
    int window = 0;                // most keys that a query sees, its own included; 0: no window
    const float* alibi = nullptr;  // a slope for each query head, or null
    bool hopper = false;           // allows attention_hopper.cuh's kernels, where they support the input
    // positions (batch, queries): how many rows of its document come before a query. document_ends (batch,
    // keys): the sequence's row after the last row of a key's document. Both are null where a sequence is one
    // document.
    const int *positions = nullptr, *document_ends = nullptr;
    Dropout dropout = {};   // of probabilities, in training
    float given_scale = 0;  // the factor of scores; 0: 1 / sqrt(head_size)
    // A soft cap of scores, before they are masked (Gemma 2): a score x becomes cap * tanh(x / cap). 0: none.
    // Families with a cap have no ALiBi.
    float cap = 0;
    // Strides of the gradients of k and v.
    int64_t dkv_row = kv_row, dkv_batch = kv_batch, dkv_head = kv_head;
    // For a chunk, which has only some queries of a sequence, in a batch of 1. `length`: rows of the
    // sequence. `left_out`: how many of them come before the first key here. `entry`: the sequence's index in
    // the batch. `in_chunks`: the sequence is processed in chunks, so a chunk of a single query uses the same
    // kernel as the others.
    //
    // dk_sums, dv_sums: fp32 sums of the gradients of keys and values, in rows of kv_heads * head_size from
    // the first key here on. Backward adds to the sums of keys before the first query. The gradients of the
    // other keys are complete after this chunk, as no earlier query sees them: for these it writes the sums
    // plus what these queries add to dk and dv, whose first row belongs to the first query's key.
    int length = keys, left_out = 0, entry = 0;
    bool in_chunks = false;
    float *dk_sums = nullptr, *dv_sums = nullptr;
    // For keys that come in pieces, each a multiple of kKeyPiece except the last. `later`: how many keys
    // follow this piece, up to the last query's own key. `continues`: this is not the first piece. `carried`:
    // the state of the queries between pieces. All pieces but the first start from it, and all but the last
    // leave it for the next. In forward it is the sums of values (heads, queries, head_size) and then the
    // statistics (heads, queries, kCarriedStatistics); in backward it is dq.
    int later = 0;
    bool in_pieces = false, continues = false;
    float* carried = nullptr;
    GridPart part = {};  // the part of all heads and tiles of rows that this launch runs

    // A block's position in the whole grid: its head, counted over all batch entries, and its tile of rows,
    // counted from the first or from the last.
    SIMT_DEVICE unsigned block_head() const { return static_cast<unsigned>(part.x) + blockIdx.x; }
    // Its head in a launch of launch_in_groups().
    SIMT_DEVICE unsigned grouped_head() const { return block_head() + blockIdx.z * gridDim.x; }
    SIMT_DEVICE int block_tile() const { return part.y + static_cast<int>(blockIdx.y); }
    SIMT_DEVICE int block_tile_from_last() const { return part.whole_y - 1 - block_tile(); }

    SIMT_HOST_DEVICE int group() const { return heads / kv_heads; }
    // Where one head of one batch entry begins: in q, in k or v, in their gradients, in the output, and in
    // arrays with one number a row.
    SIMT_HOST_DEVICE int64_t q_offset(int b, int h) const { return b * q_batch + h * q_head; }
    SIMT_HOST_DEVICE int64_t kv_offset(int b, int kv) const { return b * kv_batch + kv * kv_head; }
    SIMT_HOST_DEVICE int64_t dkv_offset(int b, int kv) const { return b * dkv_batch + kv * dkv_head; }
    SIMT_HOST_DEVICE int64_t out_row() const { return int64_t{heads} * head_size; }
    SIMT_HOST_DEVICE int64_t out_offset(int b, int h) const {
        return b * queries * out_row() + h * head_size;
    }
    SIMT_HOST_DEVICE int64_t row_offset(int b, int h) const { return (int64_t{b} * heads + h) * queries; }
    // Where `carried` has a head's sums and statistics, from `query` on.
    SIMT_HOST_DEVICE float* carried_rows(int h, int query) const {
        return carried + (int64_t{h} * queries + query) * head_size;
    }
    SIMT_HOST_DEVICE float* carried_statistics(int h, int query) const {
        return carried_rows(heads, 0) + (int64_t{h} * queries + query) * kCarriedStatistics;
    }
    // The number of floats in `carried`.
    static int64_t carried_size(int64_t queries, int heads, int head_size) {
        return queries * heads * (head_size + kCarriedStatistics);
    }
    SIMT_HOST_DEVICE int all_keys() const { return keys + later; }
    // The index of a query's own key.
    SIMT_HOST_DEVICE int position(int query) const { return all_keys() - queries + query; }
    // The number of keys up to the own key of the last query before `query`; at most the keys here.
    SIMT_HOST_DEVICE int keys_before(int query) const {
        const int seen = position(query < queries ? query : queries);
        return seen < keys ? seen : keys;
    }
    // The most keys that a query sees.
    SIMT_HOST_DEVICE int span() const { return 0 < window && window < all_keys() ? window : all_keys(); }
    // The first key that `query` sees; beyond the last query, the first that the last one sees.
    SIMT_HOST_DEVICE int first_key(int query) const {
        const int first = position(query < queries ? query : queries - 1) + 1 - span();
        return first > 0 ? first : 0;
    }
    // The first key of a query's document; `query` must be less than `queries`.
    SIMT_HOST_DEVICE int document_key(int b, int query) const {
        return position(query - positions[int64_t{b} * queries + query]);
    }
    // first_key() in batch entry b, with documents taken into account.
    SIMT_HOST_DEVICE int first_key(int b, int query) const {
        const int first = first_key(query);
        if (!positions) return first;
        const int of_document = document_key(b, query < queries ? query : queries - 1);
        return first > of_document ? first : of_document;
    }
    // Where a kernel begins that needs no key before `first`: at `first`; with pieces at the last multiple of
    // kKeyPiece up to it, as tiles must end where pieces do.
    SIMT_HOST_DEVICE int first_tile(int first) const {
        if (first > keys) first = keys;
        return in_pieces ? first / kKeyPiece * kKeyPiece : first;
    }
    // Whether this is plain causal attention: no window, ALiBi, documents, dropout or cap.
    bool plain() const { return span() == all_keys() && !alibi && !positions && !dropout && cap == 0; }
    // The index of a probability among those of all sequences, for dropout.
    SIMT_HOST_DEVICE int64_t score_number(int b, int h, int query, int key) const {
        const int64_t row = (int64_t{entry + b} * heads + h) * length + left_out + position(query);
        return row * length + left_out + key;
    }
    // Removes the keys before `begin`, which none of the caller's queries sees.
    SIMT_HOST_DEVICE void drop_keys(int begin) {
        k += begin * kv_row;
        v += begin * kv_row;
        keys -= begin;
        left_out += begin;
    }
    // This input without the keys that the window hides from all queries, for a batch of 1.
    AttentionInput without_unseen_keys() const {
        AttentionInput in = *this;
        const int begin = first_tile(first_key(0));
        const int64_t sums = int64_t{begin} * kv_heads * head_size;
        in.drop_keys(begin);
        if (in.document_ends) in.document_ends += begin;
        if (in.dk_sums) in.dk_sums += sums, in.dv_sums += sums;
        return in;
    }
    // The first query that sees `key`, if any does.
    SIMT_HOST_DEVICE int first_query(int key) const {
        const int query = key - position(0);
        return query > 0 ? query : 0;
    }
    // The index after the last query of the document that `key` belongs to.
    SIMT_HOST_DEVICE int document_end(int b, int key) const {
        return document_ends[int64_t{b} * keys + key] - left_out - position(0);
    }
    // The index after the last query that sees any of the keys before `key`.
    SIMT_HOST_DEVICE int queries_before(int key) const {
        const int end = key - 1 + span() - position(0);
        return end < queries ? end : queries;
    }
    // queries_before() in batch entry b, with documents taken into account.
    SIMT_HOST_DEVICE int queries_before(int b, int key) const {
        const int end = queries_before(key);
        if (!document_ends) return end;
        const int of_document = document_end(b, (key < keys ? key : keys) - 1);
        return end < of_document ? end : of_document;
    }
    // The number of a head's scores that are not masked; those on the diagonal count half. Documents are
    // ignored, because only the device knows where they end.
    double seen_scores() const {
        const double first = position(0), end = all_keys();  // positions of queries
        // Scores of the keys here with the queries at positions before `end`, without a window.
        const auto seen_before = [keys = static_cast<double>(keys)](double end) {
            const double inside = std::clamp(end, 0., keys);
            return inside * inside / 2 + std::max(0., end - keys) * keys;
        };
        return seen_before(end) - seen_before(first) -
               (seen_before(end - span()) - seen_before(first - span()));
    }
    // The FLOPs of `products` matrix products of these scores, over all heads.
    double flops(int products) const {
        return 2.0 * (static_cast<double>(batch) * heads) * seen_scores() * head_size * products;
    }
    // The factor of scores.
    float scale() const {
        return given_scale != 0 ? given_scale : 1.f / std::sqrt(static_cast<float>(head_size));
    }
    // The factor with which the softmax takes scores: with a cap they come as fractions of it.
    SIMT_HOST_DEVICE float softmax_scale(float scale) const { return cap > 0 ? cap : scale; }
    // The slope of head h for scores that are not yet multiplied with scale(): slope / scale, computed
    // without a division where it can be.
    SIMT_DEVICE float slope(int h, float scale) const {
        return alibi[h] *
               (given_scale != 0 ? fast_quotient(1.f, scale) : static_cast<float>(head_size) * scale);
    }
};

// Matrix products of the scores' size in backward on a GPU: in the kernel for dK and dV, and in that for dQ.
constexpr int kProductsForKeys = 4, kProductsForQueries = 3;

// Calls launch_part(grid, in) for each part of a launch that computes `products` products of the scores. The
// grid is (heads of all batch entries, tiles of rows).
template <class T, class F>
void launch_in_parts(dim3 grid, AttentionInput<T> in, int products, F launch_part) {
    for_each_part(grid, in.flops(products), longest_attention, [&](dim3 part_grid, const GridPart& part) {
        in.part = part;
        launch_part(part_grid, in);
    });
}

// How many of n heads, a divisor of n, are processed at a time: all tiles of rows of these heads come before
// those of the next heads. Each tile of a head reads keys and values, or queries and gradients, that the
// head's other tiles read too: bytes_of_head. A GPU whose L2 cache has less than cached_attention gains
// nothing.
inline unsigned heads_at_a_time(unsigned n, double bytes_of_head) {
    constexpr unsigned kMostGroups = 65535;  // a grid's third dimension
    unsigned heads =
        static_cast<unsigned>(std::clamp(cached_attention / bytes_of_head, 1., static_cast<double>(n)));
    while (n % heads) heads--;
    return n / heads <= kMostGroups ? heads : n;
}

// launch_in_parts() by groups of heads: the grid of a launch is (heads at a time, tiles of rows, groups of so
// many heads). Of Hopper's kernels only: the others have no register left for it on every GPU.
template <class T, class F>
void launch_in_groups(dim3 grid, const AttentionInput<T>& in, int products, F launch_part) {
    // In the kernel for keys the queries of all heads that share the keys pass; elsewhere these heads share
    // what passes.
    const double rows =
        products == kProductsForKeys ? 1. * in.queries * in.group() : 1. * in.keys / in.group();
    const double bytes_of_head = 2.0 * sizeof(T) * rows * in.head_size;
    launch_in_parts(grid, in, products, [&](dim3 part, const AttentionInput<T>& of_part) {
        const unsigned heads = heads_at_a_time(part.x, bytes_of_head);
        launch_part(dim3(heads, part.y, part.x / heads), of_part);
    });
}

// Whether attention_forward() and attention_backward() support heads of this size.
inline bool attention_supports(int head_size) { return 1 <= head_size && head_size <= 512; }
