// attention_input.h - what causal multi-head attention reads, and where in memory it lies.
#pragma once

#include <algorithm>
#include <cassert>
#include <cmath>

#include "llmc/dropout.cuh"
#include "llmc/long_launches.h"
#include "llmc/packed.h"

// Query i of `queries` stands at key keys - queries + i; with a cache there are more keys than queries. It
// sees this key and those before it, with a window only the last `window` of them.
//
// Backward may take some queries of a sequence at a time, the last ones first: see dk_sums. And of those the
// keys in pieces, the first ones first: see `later`.
//
// Each head of keys and values serves group() query heads in a row (Ainslie et al. 2023).
//
// ALiBi (Press et al. 2022) adds slope * (key - query) to a head's scores. The softmax is the same with
// BLOOM's slope * key, but this is small where a probability is large, so nothing is lost in fp32.
//
// A sequence may hold several documents one after the other: then a query sees no key of those before its
// own.
//
// Distances of rows, of batch entries and of heads are in elements, so q, k and v may be columns of one
// packed tensor: all heads of q, then those of k, then those of v; or the three of each head together.

// Pieces of keys are whole tiles of all kernels. So keys are summed as if they came at once; but for windows
// and documents, with which tiles begin otherwise.
constexpr int kKeyPiece = kFastCpu ? 256 : 128;
// What a row's softmax is known by: its largest score, and the sums of exponentials of the lanes that share
// it.
constexpr int kCarriedStatistics = 5;

template <class T>
struct AttentionInput {
    int batch, heads, head_size, queries, keys;
    const T *q, *k, *v;
    int64_t q_row, kv_row, q_batch, kv_batch;
    int kv_heads = heads;  // of keys and values; divides heads
    int64_t q_head = head_size, kv_head = head_size;
    int window = 0;                // keys that a query sees at most, its own included; 0: no window
    const float* alibi = nullptr;  // a slope for each query head, or null
    bool hopper = false;           // attention_hopper.cuh's kernels may do it, where they can
    // How many rows of its document come before a query, (batch, queries), and the sequence's row after the
    // last of a key's document, (batch, keys); or null, where a sequence is one document.
    const int *positions = nullptr, *document_ends = nullptr;
    Dropout dropout = {};  // of probabilities, in training
    // Distances in the gradients of k and v.
    int64_t dkv_row = kv_row, dkv_batch = kv_batch, dkv_head = kv_head;
    // Where the queries are some of a sequence's, in a batch of 1: how many rows that has, of which
    // `left_out` come before the first key here, and which of the batch's it is; whether it goes in chunks,
    // of which one of a single query is done as the others are; and the sums of the gradients of keys and
    // values, rows of kv_heads * head_size from the first key here on. Backward adds to those of keys before
    // the first query. The others' are complete then, as no earlier query sees them: it writes the sums and
    // what these queries add to dk and dv, of which the first query's key is the first row.
    int length = keys, left_out = 0, entry = 0;
    bool in_chunks = false;
    float *dk_sums = nullptr, *dv_sums = nullptr;
    // Where the keys of such queries come in pieces, of multiples of kKeyPiece but the last: how many keys
    // follow those here, up to the last query's own; and what is known of the queries from the pieces before.
    // All but the first piece go on with that, and all but the last leave it for the next: of forward the
    // sums of values (heads, queries, head_size) and kCarriedStatistics (heads, queries, 5), of backward dq.
    int later = 0;
    bool in_pieces = false, continues = false;
    float* carried = nullptr;
    GridPart part = {};  // that the launch makes, of (batch * heads, tiles of rows)

    // Where a block stands in the whole grid: its head among those of all batch entries, and its tile of
    // rows, counted from the first and from the last.
    SIMT_DEVICE unsigned block_head() const { return static_cast<unsigned>(part.x) + blockIdx.x; }
    SIMT_DEVICE int block_tile() const { return part.y + static_cast<int>(blockIdx.y); }
    SIMT_DEVICE int block_tile_from_last() const { return part.whole_y - 1 - block_tile(); }

    SIMT_HOST_DEVICE int group() const { return heads / kv_heads; }
    // Where one head of one batch entry begins: in q, in k or v, in their gradients, in the output, and in
    // the statistics of rows.
    SIMT_HOST_DEVICE int64_t q_offset(int b, int h) const { return b * q_batch + h * q_head; }
    SIMT_HOST_DEVICE int64_t kv_offset(int b, int kv) const { return b * kv_batch + kv * kv_head; }
    SIMT_HOST_DEVICE int64_t dkv_offset(int b, int kv) const { return b * dkv_batch + kv * dkv_head; }
    SIMT_HOST_DEVICE int64_t out_row() const { return int64_t{heads} * head_size; }
    SIMT_HOST_DEVICE int64_t out_offset(int b, int h) const {
        return b * queries * out_row() + h * head_size;
    }
    SIMT_HOST_DEVICE int64_t row_offset(int b, int h) const { return (int64_t{b} * heads + h) * queries; }
    // What is carried of a head's queries from `query` on.
    SIMT_HOST_DEVICE float* carried_rows(int h, int query) const {
        return carried + (int64_t{h} * queries + query) * head_size;
    }
    SIMT_HOST_DEVICE float* carried_statistics(int h, int query) const {
        return carried_rows(heads, 0) + (int64_t{h} * queries + query) * kCarriedStatistics;
    }
    // Its elements.
    static int64_t carried_size(int64_t queries, int heads, int head_size) {
        return queries * heads * (head_size + kCarriedStatistics);
    }
    SIMT_HOST_DEVICE int all_keys() const { return keys + later; }
    // The key that a query stands at.
    SIMT_HOST_DEVICE int position(int query) const { return all_keys() - queries + query; }
    // Keys that the last of the queries before `query` sees.
    SIMT_HOST_DEVICE int keys_before(int query) const {
        const int seen = position(query < queries ? query : queries);
        return seen < keys ? seen : keys;
    }
    // Keys that a query sees at most.
    SIMT_HOST_DEVICE int span() const { return 0 < window && window < all_keys() ? window : all_keys(); }
    // The first key that `query` sees, or else the last of the queries.
    SIMT_HOST_DEVICE int first_key(int query) const {
        const int first = position(query < queries ? query : queries - 1) + 1 - span();
        return first > 0 ? first : 0;
    }
    // The first key of the document that a query, one of those there are, belongs to.
    SIMT_HOST_DEVICE int document_key(int b, int query) const {
        return position(query - positions[int64_t{b} * queries + query]);
    }
    // first_key() of batch entry b, where there may be documents.
    SIMT_HOST_DEVICE int first_key(int b, int query) const {
        const int first = first_key(query);
        if (!positions) return first;
        const int of_document = document_key(b, query < queries ? query : queries - 1);
        return first > of_document ? first : of_document;
    }
    // Where kernels begin that need no key before `first`: there, but in pieces with its whole tile, as tiles
    // end where pieces do.
    SIMT_HOST_DEVICE int first_tile(int first) const {
        if (first > keys) first = keys;
        return in_pieces ? first / kKeyPiece * kKeyPiece : first;
    }
    // Whether scores are products alone, and queries see all keys up to their own.
    bool plain() const { return span() == all_keys() && !alibi && !positions && !dropout; }
    // The number of a probability among all of the sequences, for dropout.
    SIMT_HOST_DEVICE int64_t score_number(int b, int h, int query, int key) const {
        const int64_t row = (int64_t{entry + b} * heads + h) * length + left_out + position(query);
        return row * length + left_out + key;
    }
    // Leaves out the keys before `begin`, which none of the queries at hand sees.
    SIMT_HOST_DEVICE void drop_keys(int begin) {
        k += begin * kv_row;
        v += begin * kv_row;
        keys -= begin;
        left_out += begin;
    }
    // The same without the keys that no query sees by its window, of a batch of 1.
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
    // Queries up to the last of the document that `key` belongs to.
    SIMT_HOST_DEVICE int document_end(int b, int key) const {
        return document_ends[int64_t{b} * keys + key] - left_out - position(0);
    }
    // Queries up to the last that sees any of the keys before `key`.
    SIMT_HOST_DEVICE int queries_before(int key) const {
        const int end = key - 1 + span() - position(0);
        return end < queries ? end : queries;
    }
    // The same of batch entry b, where there may be documents.
    SIMT_HOST_DEVICE int queries_before(int b, int key) const {
        const int end = queries_before(key);
        if (!document_ends) return end;
        const int of_document = document_end(b, (key < keys ? key : keys) - 1);
        return end < of_document ? end : of_document;
    }
    // The scores that are seen of a head, those on the diagonal by half. Where documents end is known on the
    // device alone: they are counted as one.
    double seen_scores() const {
        const double first = position(0), end = all_keys();  // positions of queries
        // Of the keys here, how many the queries at positions before `end` would see if all saw those before.
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
    // What scores are multiplied with: 1 / sqrt(head_size).
    float scale() const { return 1.f / std::sqrt(static_cast<float>(head_size)); }
    // The slope of head h for scores that are still to be multiplied with scale(): over it, without a
    // division.
    SIMT_HOST_DEVICE float slope(int h, float scale) const {
        return alibi[h] * (static_cast<float>(head_size) * scale);
    }
};

// Products of the scores that backward makes on a GPU for the gradients of keys, and for those of queries.
constexpr int kProductsForKeys = 4, kProductsForQueries = 3;

// Calls launch_part(grid, in) for each part of a launch that computes `products` products of the scores.
template <class T, class F>
void launch_in_parts(dim3 grid, AttentionInput<T> in, int products, F launch_part) {
    for_each_part(grid, in.flops(products), longest_attention, [&](dim3 part_grid, const GridPart& part) {
        in.part = part;
        launch_part(part_grid, in);
    });
}

// Whether attention_forward() and attention_backward() can do heads of this size.
inline bool attention_supports(int head_size) { return 1 <= head_size && head_size <= 128; }
