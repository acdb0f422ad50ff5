// sequence_keys.h - the keys and values that the rows of one sequence attend to if not all rows go through a
// block together: those of a KV cache in decoding, or of a long sequence whose rows go in chunks.
//
// Forward takes the chunks of a sequence in order. Chunk i makes its keys and attends to those before it and
// to its own. Backward first recomputes the keys of all chunks, then takes the chunks from the last to the
// first: queries before a chunk do not see its keys, so the chunk's own queries complete their gradients.
//
//     forward              backward: keys again    then the chunks, last first
//     q0 -> k0             k2, k1, k0              q2 -> k0 k1 k2    d_k2 complete
//     q1 -> k0 k1                                  q1 -> k0 k1       d_k1 complete
//     q2 -> k0 k1 k2                               q0 -> k0          d_k0 complete
//
// With offloaded keys (offload_activations.h) only the chunk's own keys stay on the device; those before them
// are fetched in pieces of as many rows, the next one while queries attend to one.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "llmc/attention.cuh"
#include "llmc/model_positions.h"
#include "llmc/offload_activations.h"
#include "llmc/rows.h"
#include "llmc/tensor.h"

// The keys and values of a sequence so far, for decoding.
struct KvCache {
    std::vector<TensorX> layers;  // (positions, 2 kv_width()) each
    int length = 0;               // positions that are filled
    // For decoding several texts, where each row continues another one: these texts, and how long each is.
    // The cache has no layers of its own then.
    std::vector<std::pair<const KvCache*, int>> each;

    struct KvRows rows_of(int layer) const;
};

// The keys and values, in one layer, that some rows attend to. These are of:
//
//                                      `all` has           from row `begin`   `rows`
//     a text that is decoded           the whole cache     0                  the cache's capacity
//     a sequence in chunks             all of its keys     0                  those of the sequence
//     the same, with offloaded keys    the chunk's own     rows_before        those of the sequence
//     a piece of offloaded keys        the piece           the piece's first  those of the sequence
//     several texts that are decoded   `each` has them; the rest is not used
struct KvRows {
    int layer = 0;
    TensorX all;  // (.., 2 kv_width())
    int64_t rows = 0;
    int rows_before = 0;     // how many rows of the sequence come before the current ones
    int entry = 0;           // the number of the sequence in the batch
    bool in_chunks = false;  // a sequence of a batch, whose rows go in chunks; else a text that is decoded
    bool offloaded = false;  // the keys before the current rows are offloaded
    int begin = 0;           // with offloaded keys append() sets it, and `all`
    TensorF dk_sums = {}, dv_sums = {};  // backward: sums of the gradients, (.., kv_width())
    int64_t chunk_rows = 0;              // rows of a chunk
    std::vector<KvRows> each = {};       // in decoding several texts: those of each row
};

// What rows attend to keys for. In backward, a chunk's forward is recomputed before its backward.
enum class KeysFor { Forward, Recomputation, Backward };

// The keys and values of a layer, for rows that follow them.
inline KvRows KvCache::rows_of(int layer) const {
    KvRows of_each;
    for (const auto& [sequence, rows_before] : each) {
        of_each.each.push_back(sequence->rows_of(layer));
        of_each.each.back().rows_before = rows_before;
    }
    if (!each.empty()) return of_each;
    const TensorX& all = layers[static_cast<size_t>(layer)];
    return {.layer = layer, .all = all.view(), .rows = all.rows(), .rows_before = length};
}

class SequenceKeys {
  public:
    SequenceKeys(Arena& arena, const Stream& stream, const ModelConfig& config, bool hopper)
        : arena_(arena),
          stream_(stream),
          config_(config),
          family_(*config.family),
          hopper_(hopper),
          offloaded_(arena, stream) {}
    SequenceKeys(const SequenceKeys&) = delete;

    // Says where keys and values, and the sums of their gradients, are offloaded to, in pieces of `rows`
    // rows; 0: they stay on the device.
    void offload_to(PieceSource* keys, PieceSource* sums, int64_t rows) { offloaded_.use(rows, keys, sums); }

    // The columns of a packed qkv where the keys and the values begin.
    int64_t keys_at(const LayerConfig& c) const {
        return family_.heads_together ? c.head_size : c.query_width();
    }
    int64_t values_at(const LayerConfig& c) const {
        return keys_at(c) + (family_.heads_together ? c.head_size : c.kv_width());
    }

    // Call around a block whose rows go in chunks: they take and release the buffers of offloaded keys, and
    // for backward also of the sums of their gradients.
    void begin_block(int layer) { take_offloaded(layer, false); }
    void begin_block_for_backward(int layer) { take_offloaded(layer, true); }
    void end_block() { offloaded_.release(); }
    // Begins sequence `entry` of the batch in a layer, of `rows` rows, none of which has keys yet, in chunks
    // of chunk_rows.
    KvRows begin_sequence(int layer, int64_t rows, int entry, int64_t chunk_rows) {
        KvRows kv{.layer = layer,
                  .all = {},
                  .rows = rows,
                  .entry = entry,
                  .in_chunks = true,
                  .offloaded = offloaded_.offloads(),
                  .chunk_rows = chunk_rows};
        if (kv.offloaded)
            offloaded_.begin();
        else
            kv.all = arena_.take<floatX>("keys_and_values", {rows, kv_columns(layer)});
        return kv;
    }
    // Begins a sequence's backward: zeroes the sums of its keys' and values' gradients. Offloaded sums are
    // fetched with their pieces.
    void begin_gradients(KvRows& kv) {
        if (kv.offloaded) return;
        for (TensorF* const sums : {&kv.dk_sums, &kv.dv_sums}) {
            *sums =
                arena_.take<float>("d_kv_sums", {kv.rows, config_.layer(kv.layer).kv_width()}, "gradient");
            fill_zero(*sums, stream_);
        }
    }
    // Begins a chunk, whose first row is row `first` of the sequence.
    static void begin_chunk(KvRows& kv, int64_t first) { kv.rows_before = static_cast<int>(first); }
    // Ends a chunk of `count` rows: its keys are offloaded, if rows follow that need them.
    void end_chunk(const KvRows& kv, int64_t count) {
        if (kv.offloaded && kv.rows_before + count < kv.rows)
            offloaded_.store(kv.rows_before / offloaded_.rows());
    }

    // Appends the keys and values of qkv (1, T, qkv_width()) to kv.
    void append(const TensorX& qkv, KvRows& kv) {
        const LayerConfig& c = config_.layer(kv.layer);
        const int64_t row = 2 * c.kv_width(), size = c.head_size, T = qkv.rows();
        if (kv.offloaded) kv.all = offloaded_.own(T), kv.begin = kv.rows_before;
        floatX* const end = kv.all.at((kv.rows_before - kv.begin) * row);
        const floatX* const from = qkv.at(keys_at(c));
        if (family_.heads_together)
            copy_rows_on_device(end, 2 * size, from, 3 * size, 2 * size, T * c.heads, stream_);
        else
            copy_rows_on_device(end, row, from, c.qkv_width(), row, T, stream_);
    }

    // What attention reads: a packed qkv (B, T, qkv_width()) attends to itself; with `kv`, rows (1, T, ..) of
    // one sequence attend to themselves and to the rows before them.
    AttentionInput<floatX> input(const TensorX& qkv, int layer, const Rows& rows, const KvRows* kv) const {
        const int B = static_cast<int>(qkv.shape().dims[0]), T = static_cast<int>(qkv.shape().dims[1]);
        const LayerConfig& c = config_.layer(layer);
        const int64_t row = c.qkv_width(), size = c.head_size;
        const bool together = family_.heads_together;
        AttentionInput<floatX> in = {
            .batch = B,
            .heads = c.heads,
            .head_size = c.head_size,
            .queries = T,
            .keys = T,
            .q = qkv.data(),
            .k = qkv.at(keys_at(c)),
            .v = qkv.at(values_at(c)),
            .q_row = row,
            .kv_row = row,
            .q_batch = T * row,
            .kv_batch = T * row,
            .kv_heads = c.kv_heads,
            .q_head = together ? 3 * size : size,
            .kv_head = together ? 3 * size : size,
            .window = c.window,
            .alibi = family_.position == PositionKind::Alibi ? factors_of(layer).data() : nullptr,
            .hopper = hopper_,
            .positions = rows.positions(qkv.rows()).data(),
            .document_ends = rows.documents->ends.data(),
            .dropout = rows.dropout_at(layer, kAttentionPlace, 0),
            .given_scale = static_cast<float>(config_.scales.attention),
            .cap = static_cast<float>(config_.scales.attention_cap)};
        if (!kv) return in;
        // A row of kv has all keys, then all values; or, with heads_together, each head's key and value.
        in.dkv_row = row, in.dkv_head = in.kv_head;  // gradients are laid out as keys and values in qkv
        in.kv_row = 2 * c.kv_width();
        in.in_chunks = kv->in_chunks;
        in.kv_head = together ? 2 * size : size;
        in.k = kv->all.data();
        in.v = kv->all.at(together ? size : c.kv_width());
        const int seen = kv->rows_before + T - kv->begin;  // keys from row `begin` on
        in.keys = static_cast<int>(std::min<int64_t>(kv->all.rows(), seen));
        in.later = seen - in.keys, in.left_out = kv->begin;
        in.kv_batch = in.keys * in.kv_row;
        in.length = static_cast<int>(kv->rows), in.entry = kv->entry;
        if (in.document_ends) in.document_ends += int64_t{in.entry} * in.length + in.left_out;
        in.dk_sums = kv->dk_sums.data(), in.dv_sums = kv->dv_sums.data();
        return in;
    }

    // Calls use(input()). With offloaded keys it calls it several times: for each piece of keys that some
    // query sees, and last for the rows' own keys.
    template <class Use>
    void for_seen_keys(const TensorX& qkv, int layer, const Rows& rows, const KvRows* kv, KeysFor purpose,
                       Use&& use) {
        if (!kv || !kv->offloaded) return use(input(qkv, layer, rows, kv));
        for_each_seen_piece(qkv, layer, rows, kv, purpose, use);
    }

    // The position factors of a layer; absent in a dry run before bind(), so that plans count none of their
    // bytes.
    TensorF factors_of(int layer) const {
        if (!position_factors_.data()) return {};
        const auto [first, count] = position_factors_of(config_, layer);
        return TensorF(position_factors_.data() + first, {count});
    }
    // Says where position_factors() are on the device.
    void bind(TensorF position_factors) { position_factors_ = std::move(position_factors); }

  private:
    int64_t kv_columns(int layer) const { return 2 * config_.layer(layer).kv_width(); }
    void take_offloaded(int layer, bool with_sums) {
        offloaded_.take(kv_columns(layer), 2 * config_.most_kv_width(), with_sums);
    }
    template <class Use>
    void for_each_seen_piece(const TensorX& qkv, int layer, const Rows& rows, const KvRows* kv,
                             KeysFor purpose, Use&& use) {
        const bool with_sums = purpose == KeysFor::Backward;  // of the keys' gradients
        const LayerConfig& c = config_.layer(layer);
        const int64_t n = offloaded_.rows(), count = qkv.rows(), window = c.window;
        const auto first_seen = [&](int64_t row) {
            return window > 0 ? std::max<int64_t>(0, row + 1 - window) / n : 0;
        };
        const int64_t first = first_seen(kv->rows_before), own = ceil_div(kv->rows_before, n);
        // The rows of a dry run may begin within a piece: then it takes smaller pieces.
        const int64_t of_piece = arena_.rehearsing() && own > first
                                     ? std::max<int64_t>(1, (kv->rows_before - first * n) / (own - first))
                                     : n;
        // The rows that attend to keys next, from this one on: their first piece is prefetched at the end.
        // After a recomputation they are the same rows.
        int64_t next_row = kv->rows_before;
        if (purpose == KeysFor::Forward) next_row += count;
        if (purpose == KeysFor::Backward) next_row -= kv->chunk_rows;
        // The first chunk in backward that sees a piece zeroes the piece's sums. That is the last chunk of
        // the sequence or, with a window, the last one that reaches back to the piece.
        const bool is_last_chunk = kv->rows_before + count == kv->rows;
        const auto zeroes_sums = [&](int64_t piece) {
            return is_last_chunk || piece < first_seen(kv->rows_before + n);
        };
        TensorF carried = arena_.take<float>(
            "attention_carried", {AttentionInput<floatX>::carried_size(count, c.heads, c.head_size)});
        const auto use_piece = [&](int64_t piece, KvRows& keys) {
            if (with_sums) {
                const int64_t next = piece < own ? piece + 1 : first_seen(next_row);
                TensorF sums = offloaded_.fetch_sums(piece, next, piece < own);
                if (zeroes_sums(piece)) fill_zero(sums, stream_);
                keys.dk_sums = sums.rows_at(0, n);
                keys.dv_sums = sums.rows_at(n, n);
            }
            AttentionInput<floatX> in = input(qkv, layer, rows, &keys);
            in.in_pieces = true, in.continues = piece > first, in.carried = carried.data();
            use(in);
        };
        const auto keys_from = [&](int64_t begin, TensorX all) {
            return KvRows{.layer = layer,
                          .all = std::move(all),
                          .rows = kv->rows,
                          .rows_before = kv->rows_before,
                          .entry = kv->entry,
                          .in_chunks = true,
                          .begin = static_cast<int>(begin)};
        };
        // The next rows may begin with the current rows' own piece, but that is not stored yet.
        const int64_t next_first = std::min(first_seen(next_row), own - 1);
        int64_t piece = first;
        arena_.repeat(static_cast<int>(std::max<int64_t>(1, own - first)), [&] {
            if (piece >= own && !arena_.rehearsing()) return false;
            const TensorX all = offloaded_.fetch(piece, piece + 1 < own ? piece + 1 : next_first);
            KvRows keys = keys_from(piece * n, all.rows_at(0, of_piece));
            use_piece(piece++, keys);
            return true;
        });
        KvRows keys = keys_from(kv->begin, kv->all.view());
        use_piece(own, keys);
    }

    Arena& arena_;
    const Stream& stream_;
    const ModelConfig& config_;
    const Family& family_;
    TensorF position_factors_;
    const bool hopper_;
    OffloadedKeys offloaded_;
};
