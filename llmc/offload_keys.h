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
        : own_(arena, stream, OffloadBuffer::WaitsFor::Latest), keys_(arena, stream), sums_(arena, stream) {}

    // Sets the rows of a piece (0: keys stay on the device), and the memory for keys and values and for sums.
    void use(int64_t rows, PieceSource* keys, PieceSource* sums) {
        rows_ = rows, stored_keys_ = keys, stored_sums_ = sums;
    }
    bool offloads() const { return rows_ > 0; }
    int64_t rows() const { return rows_; }
    // The bytes of a piece of keys and values, and of a piece of sums, for rows of `columns` elements.
    static size_t piece_bytes(int64_t rows, int64_t columns) {
        return whole_sectors(static_cast<size_t>(rows * columns) * sizeof(T));
    }
    static size_t sums_bytes(int64_t rows, int64_t columns) {
        return whole_sectors(static_cast<size_t>(rows * columns) * sizeof(float));
    }

    // Takes the buffers, until release(), for rows of `columns` elements, a row's keys and values together.
    void take(int64_t columns, bool with_sums) {
        if (!offloads()) return;
        columns_ = columns;
        keys_.piece_bytes = piece_bytes(rows_, columns);
        const auto take = [&](OffloadBuffer& buffer, const char* name) {
            buffer.take(name, StoredPieces::buffer_bytes(keys_.piece_bytes), "activation",
                        pieces_in(stored_keys_));
        };
        take(own_, "keys_and_values");
        for (OffloadBuffer& buffer : keys_.buffers) take(buffer, "offloaded_keys");
        if (!with_sums) return;
        sums_.piece_bytes = sums_bytes(rows_, columns);
        for (OffloadBuffer& buffer : sums_.buffers)
            buffer.take("offloaded_key_sums", StoredPieces::buffer_bytes(sums_.piece_bytes), "gradient",
                        pieces_in(stored_sums_));
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
        return Tensor<T>(own_.template aligned<T>(), {rows, columns_});
    }
    void store(int64_t piece) { own_.exchange(keys_.piece(piece), {}); }
    // A piece (rows, columns). Work queued on the stream may use it until another piece is fetched. `next`
    // is the piece that is likely to be fetched next; it is prefetched.
    Tensor<T> fetch(int64_t piece, int64_t next) {
        return Tensor<T>(keys_.fetch(piece, next, false).template aligned<T>(), {rows_, columns_});
    }
    // A piece of sums, as fetch() returns a piece: those of the keys, then those of the values, (2 rows,
    // columns / 2). If they change, they are stored again.
    Tensor<float> fetch_sums(int64_t piece, int64_t next, bool change) {
        return Tensor<float>(sums_.fetch(piece, next, change).template aligned<float>(),
                             {2 * rows_, columns_ / 2});
    }

  private:
    static constexpr int64_t kNone = -1;
    static Pieces pieces_in(PieceSource* store) {
        return {Transfer::Keys, route_from(kActivationPlacement), store};
    }
    // Two buffers: one is used while the other is fetched.
    struct Ring {
        OffloadBuffer buffers[2];
        int64_t pieces[2] = {kNone, kNone};
        bool changed[2] = {};
        int used = 0;
        size_t piece_bytes = 0;
        Arena& arena;

        Ring(Arena& arena, const Stream& stream)
            : buffers{{arena, stream, OffloadBuffer::WaitsFor::Latest},
                      {arena, stream, OffloadBuffer::WaitsFor::Latest}},
              arena(arena) {}
        OffloadBuffer::Piece piece(int64_t number) const { return {static_cast<int>(number), piece_bytes}; }
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
        OffloadBuffer& fetch(int64_t number, int64_t next, bool change) {
            const bool rehearsed = arena.rehearsing();
            if (rehearsed) changed[0] = changed[1] = change;
            if (pieces[used] != number || rehearsed) {
                used = 1 - used;
                if (pieces[used] != number && !rehearsed) fetch(used, number);
            }
            buffers[used].join();
            changed[used] = change;
            if ((next != number && next != pieces[1 - used]) || rehearsed) fetch(1 - used, next);
            return buffers[used];
        }
        void fetch(int buffer, int64_t number) {
            const bool stores = std::exchange(changed[buffer], false);
            buffers[buffer].exchange(stores ? std::optional(piece(pieces[buffer])) : std::nullopt,
                                     piece(number));
            pieces[buffer] = number;
        }
    };

    int64_t rows_ = 0, columns_ = 0;
    PieceSource *stored_keys_ = nullptr, *stored_sums_ = nullptr;
    OffloadBuffer own_;
    Ring keys_, sums_;
};
