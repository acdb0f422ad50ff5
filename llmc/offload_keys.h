// offload_keys.h - offloads the keys and values of a sequence whose rows go through a block in chunks, and in
// backward the sums of their gradients (--offload keys=). They are stored where blocks' inputs are offloaded
// to, in pieces of a chunk's rows.
//
// The device has the keys and values of the current chunk and two buffers for pieces, and in backward two
// buffers for pieces of sums: while queries attend to one piece, the next one is fetched. So the memory that
// keys and values take on the device does not grow with the sequence. The pieces are of one block and one
// sequence at a time.
#pragma once

#include <optional>
#include <utility>

#include "llmc/offload_buffer.h"

template <class T>
class OffloadedKeys {
  public:
    OffloadedKeys(Arena& arena, const Stream& stream)
        : own_(arena, stream, Transfer::Keys), keys_(arena, stream), sums_(arena, stream) {}

    // Sets the rows of a piece (0: keys stay on the device), and the memory for keys and values and for sums.
    void use(int64_t rows, OffloadStorage* keys, OffloadStorage* sums) {
        rows_ = rows, place_ = keys, sums_place_ = sums;
    }
    bool offloads() const { return rows_ > 0; }
    int64_t rows() const { return rows_; }
    // The bytes of a piece of keys and values, and of a piece of sums, for rows of `columns` elements.
    static size_t piece_bytes(int64_t rows, int64_t columns) {
        return OffloadBuffer::piece_bytes(static_cast<size_t>(rows * columns) * sizeof(T));
    }
    static size_t sums_bytes(int64_t rows, int64_t columns) {
        return OffloadBuffer::piece_bytes(static_cast<size_t>(rows * columns) * sizeof(float));
    }

    // Takes the buffers, until release(), for rows of `columns` elements, a row's keys and values together.
    void take(int64_t columns, bool with_sums) {
        if (!offloads()) return;
        columns_ = columns;
        const auto elements = static_cast<size_t>(rows_ * columns);
        own_.take("keys_and_values", elements * sizeof(T), place_);
        for (OffloadBuffer& buffer : keys_.buffers)
            buffer.take("offloaded_keys", elements * sizeof(T), place_);
        if (!with_sums) return;
        for (OffloadBuffer& buffer : sums_.buffers)
            buffer.take("offloaded_key_sums", elements * sizeof(float), sums_place_, "gradient");
    }
    void release() {
        own_.release();
        keys_.release(), sums_.release();
    }
    // Call before the first chunk of another sequence.
    void begin() {
        own_.join();
        keys_.begin(), sums_.begin();
    }
    // own() is the buffer for the current chunk's keys and values (rows, columns). store() stores it as a
    // piece.
    Tensor<T> own(int64_t rows) {
        own_.join();
        return Tensor<T>(own_.template data<T>(), {rows, columns_});
    }
    void store(int64_t piece) { own_.exchange(piece, {}); }
    // A piece (rows, columns). Work queued on the stream may use it until another piece is fetched. `next`
    // is the piece that is likely to be fetched next; it is prefetched.
    Tensor<T> fetch(int64_t piece, int64_t next) {
        return Tensor<T>(keys_.fetch(piece, next, false).template data<T>(), {rows_, columns_});
    }
    // A piece of sums, as fetch() returns a piece: those of the keys, then those of the values, (2 rows,
    // columns / 2). If they change, they are stored again.
    Tensor<float> fetch_sums(int64_t piece, int64_t next, bool change) {
        return Tensor<float>(sums_.fetch(piece, next, change).template data<float>(),
                             {2 * rows_, columns_ / 2});
    }

  private:
    static constexpr int64_t kNone = -1;
    // Two buffers: one is used while the other is fetched.
    struct Ring {
        OffloadBuffer buffers[2];
        int64_t pieces[2] = {kNone, kNone};
        bool changed[2] = {};
        int used = 0;
        Arena& arena;

        Ring(Arena& arena, const Stream& stream)
            : buffers{{arena, stream, Transfer::Keys}, {arena, stream, Transfer::Keys}}, arena(arena) {}
        void begin() {
            for (int i = 0; i < 2; i++) {
                buffers[i].join();
                pieces[i] = kNone, changed[i] = false;
            }
        }
        void release() {
            for (OffloadBuffer& buffer : buffers) buffer.release();
            begin();
        }
        // A dry run executes one turn of a loop: it waits for a prefetched piece and prefetches the next one.
        OffloadBuffer& fetch(int64_t piece, int64_t next, bool change) {
            const bool rehearsed = arena.rehearsing();
            if (rehearsed) changed[0] = changed[1] = change;
            if (pieces[used] != piece || rehearsed) {
                used = 1 - used;
                if (pieces[used] != piece && !rehearsed) fetch(used, piece);
            }
            buffers[used].join();
            changed[used] = change;
            if ((next != piece && next != pieces[1 - used]) || rehearsed) fetch(1 - used, next);
            return buffers[used];
        }
        void fetch(int buffer, int64_t piece) {
            const bool stores = std::exchange(changed[buffer], false);
            buffers[buffer].exchange(stores ? std::optional(pieces[buffer]) : std::nullopt, piece);
            pieces[buffer] = piece;
        }
    };

    int64_t rows_ = 0, columns_ = 0;
    OffloadStorage *place_ = nullptr, *sums_place_ = nullptr;
    OffloadBuffer own_;
    Ring keys_, sums_;
};
