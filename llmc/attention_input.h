// attention_input.h - what causal multi-head attention reads, and where in memory it lies.
#pragma once

#include <cassert>
#include <cmath>

#include "llmc/packed.h"

// Query i of `queries` sees the keys 0 .. keys - queries + i: with a cache of keys there are more keys than
// queries. Head h has columns h * head_size .. of a row. Distances of rows and of batch entries are in
// elements, so q, k and v may be columns of one packed (batch, time, 3 * channels) tensor.
template <class T>
struct AttentionInput {
    int batch, heads, head_size, queries, keys;
    const T *q, *k, *v;
    int64_t q_row, kv_row, q_batch, kv_batch;
    bool hopper = false;  // attention_hopper.cuh's kernels, where they can

    // Where one head of one batch entry begins: in q and k or v, in the output, and in the statistics of
    // rows.
    SIMT_HOST_DEVICE int64_t q_offset(int b, int h) const { return b * q_batch + h * head_size; }
    SIMT_HOST_DEVICE int64_t kv_offset(int b, int h) const { return b * kv_batch + h * head_size; }
    SIMT_HOST_DEVICE int64_t out_row() const { return int64_t{heads} * head_size; }
    SIMT_HOST_DEVICE int64_t out_offset(int b, int h) const {
        return b * queries * out_row() + h * head_size;
    }
    SIMT_HOST_DEVICE int64_t row_offset(int b, int h) const { return (int64_t{b} * heads + h) * queries; }
    // Keys that the last of the queries before `query` sees.
    SIMT_HOST_DEVICE int keys_before(int query) const {
        return keys - queries + (query < queries ? query : queries);
    }
    // What scores are multiplied with: 1 / sqrt(head_size).
    float scale() const { return 1.f / std::sqrt(static_cast<float>(head_size)); }
};

// Whether attention_forward() and attention_backward() can do heads of this size.
inline bool attention_supports(int head_size) { return 1 <= head_size && head_size <= 128; }
