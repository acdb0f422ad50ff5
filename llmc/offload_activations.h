// offload_activations.h - offloads what grows with the sequence from forward until backward needs it: the
// inputs of blocks (--offload inputs=), and keys and values with the sums of their gradients (--offload
// keys=). They are stored in host memory beside a GPU, or on a CPU in a file (offload_storage.h).
#pragma once

#include <algorithm>
#include <optional>
#include <utility>

#include "llmc/offload_buffer.h"
#include "llmc/rows.h"

// ---- inputs of blocks
//
// Whole inputs: the device has two slots. Forward copies a block's input into one of them; the block reads it
// there while it is stored. Backward reads an input in a slot too, to which it was fetched while the input
// before it was used. With one micro-batch at a time, the last two inputs are still in the slots. The slots
// are held throughout, so every block finds the same memory left, however many inputs are offloaded.
//
// In chunks, for attention that takes rows in chunks: the two slots have one chunk each. Forward copies each
// chunk of a block's input into one of them, and it is stored from there. Backward reads a chunk in one slot
// while the next is fetched into the other; it reads the chunks of a sequence from the last to the first, as
// often as the block needs. So the memory on the device does not grow with the sequence.

class OffloadedInputs {
  public:
    OffloadedInputs(Arena& arena, const Stream& stream)
        : arena_(arena),
          stream_(stream),
          slots_{{.buffer = {arena, stream, OffloadBuffer::WaitsFor::Latest}},
                 {.buffer = {arena, stream, OffloadBuffer::WaitsFor::Latest}}} {}
    OffloadedInputs(const OffloadedInputs&) = delete;

    // Offloads the inputs of the first `layers` layers to `store`, which may be null in a dry run: in chunks
    // of chunk_rows rows of a sequence, or whole (0). `micro_batches` go through a layer before any goes
    // through the next.
    void use(PieceSource* store, int layers, int micro_batches, int64_t chunk_rows) {
        store_ = store, layers_ = layers, micro_batches_ = micro_batches, chunk_rows_ = chunk_rows;
    }
    bool offloads(int layer) const { return layer < layers_; }

    // How many whole inputs leave the device, and the bytes that one takes where it is stored.
    static int stored(int layers, int micro_batches) {
        return micro_batches > 1 ? layers * micro_batches : std::max(0, layers - 2);
    }
    static size_t stored_bytes(Shape input) {
        return whole_sectors(static_cast<size_t>(input.size()) * sizeof(floatX));
    }
    // The number of chunks of an input (B, T, C), and the bytes of one.
    static int64_t chunks(Shape input, int64_t rows) { return input.dims[0] * ceil_div(input.dims[1], rows); }
    static size_t chunk_bytes(Shape input, int64_t rows) {
        return whole_sectors(static_cast<size_t>(rows * input.dims[2]) * sizeof(floatX));
    }

    // Takes the slots, until release(), for inputs of this shape (B, T, C).
    void take_slots(Shape shape) {
        if (layers_ == 0) return;
        shape_ = shape;
        piece_bytes_ = in_chunks() ? chunk_bytes(shape, chunk_rows_) : stored_bytes(shape);
        for (Slot& slot : slots_) {
            slot.buffer.take(in_chunks() ? "offloaded_input_rows" : "offloaded_input",
                             aligned_buffer_bytes(piece_bytes_), "activation",
                             {Transfer::Offloaded, route_from(kActivationPlacement), store_});
            if (!in_chunks()) slot.input = TensorX(slot.buffer.aligned<floatX>(), shape);
        }
        if (in_chunks())
            chunks_of_sequence_ = ceil_div(shape.dims[1], chunk_rows_),
            chunks_of_input_ = chunks(shape, chunk_rows_);
    }
    void release() {
        for (Slot& slot : slots_) {
            slot.buffer.release();
            slot.number = kNone, slot.input = {};
        }
    }

    // Call around the forward of a layer of micro-batch k. A whole input becomes a view of its slot. An input
    // in chunks is stored at once; or, if `by_chunk`, the block calls store() for each chunk in order.
    // Afterwards the input is not on the device.
    void begin_forward(int layer, int k, TensorX& input, bool by_chunk) {
        if (!offloads(layer)) return;
        if (!in_chunks()) return store_whole(layer, k, input);
        begin_chunks(layer, k, chunks_of_input_);
        stores_by_chunk_ = by_chunk;
        if (!by_chunk)
            for_each_rows_of_sequence(arena_, input, chunk_rows_, From::First,
                                      [&](TensorX rows) { store(rows); });
    }
    void end_forward(int layer, TensorX& input) {
        if (!offloads(layer)) return;
        input.drop();
        stores_by_chunk_ = false;
    }
    // True if the block that goes forward now must call store() for each chunk (1, rows, C) of its input.
    bool stores_by_chunk() const { return stores_by_chunk_; }
    void store(const TensorX& chunk) {
        OffloadBuffer& buffer = slots_[next_ % 2].buffer;
        buffer.join();
        copy(buffer.aligned<floatX>(), chunk);
        buffer.exchange(piece(first_ + next_), {});
        next_++;
    }

    // Call before the backward of a layer of micro-batch k: its input is on the device again. In chunks, if
    // `by_chunk`, the block calls fetch() instead: twice for all chunks of a sequence, from the last to the
    // first, then for those of the next sequence.
    void begin_backward(int layer, int k, TensorX& input, bool by_chunk) {
        if (!offloads(layer)) return;
        if (!in_chunks()) return fetch_whole(layer, k, input);
        sweeps_ = by_chunk ? 2 : 1;
        begin_chunks(layer, k, sweeps_ * chunks_of_input_);
        for (Slot& slot : slots_) slot.buffer.join();
        load_chunk();
        if (by_chunk) return;
        input = arena_.take<floatX>("residual", shape_);
        for_each_rows_of_sequence(arena_, input, chunk_rows_, From::Last,
                                  [&](TensorX rows) { copy(rows.data(), fetch(rows.rows())); });
    }
    // The next chunk (1, rows, C), valid until the next call.
    TensorX fetch(int64_t rows) {
        OffloadBuffer& buffer = slots_[next_ % 2].buffer;
        buffer.join();
        next_++;
        if (next_ < end_ || arena_.rehearsing()) load_chunk();
        return TensorX(buffer.aligned<floatX>(), {1, rows, shape_.dims[2]});
    }

  private:
    static constexpr int kNone = -1;
    struct Slot {
        int number = kNone;  // of the whole input in it: layer * micro_batches_ + k
        OffloadBuffer buffer;
        TensorX input = {};  // a view of the slot, for whole inputs
    };
    bool in_chunks() const { return chunk_rows_ > 0; }
    OffloadBuffer::Piece piece(int64_t number) const { return {static_cast<int>(number), piece_bytes_}; }
    int number_of(int layer, int k) const { return layer * micro_batches_ + k; }
    void copy(floatX* to, const TensorX& rows) {
        const int64_t C = rows.columns();
        copy_rows_on_device(to, C, rows.data(), C, C, rows.rows(), stream_);
    }

    void store_whole(int layer, int k, TensorX& input) {
        join();
        held_ = 1 - held_;
        Slot& slot = slots_[held_];
        copy(slot.input.data(), input);
        slot.number = number_of(layer, k);
        input = slot.input.view();
        if (slot.number < stored(layers_, micro_batches_)) slot.buffer.exchange(piece(slot.number), {});
    }
    // Also starts fetching the next input: the next micro-batch's, or that of the layer below.
    void fetch_whole(int layer, int k, TensorX& input) {
        if (slots_[held_].number != number_of(layer, k)) {
            load_whole(number_of(layer, k));
            held_ = 1 - held_;
        }
        join();
        input = slots_[held_].input.view();
        if (k + 1 < micro_batches_)
            load_whole(number_of(layer, k + 1));
        else if (layer > 0)
            load_whole(number_of(layer - 1, 0));
    }
    // Starts fetching a whole input into the slot that is not in use, unless it is there already.
    void load_whole(int number) {
        Slot& slot = slots_[1 - held_];
        if (slot.number == number) return;
        join();
        slot.number = number;
        slot.buffer.exchange({}, piece(number));
    }
    // Waits for the exchange under way. With whole inputs at most one slot has one.
    void join() {
        for (Slot& slot : slots_) slot.buffer.join();
    }

    void begin_chunks(int layer, int k, int64_t end) {
        first_ = number_of(layer, k) * chunks_of_input_;
        next_ = 0, end_ = end;
    }
    void load_chunk() { slots_[next_ % 2].buffer.exchange({}, piece(first_ + chunk_of(next_))); }
    // The chunk of the input that backward reads in this turn.
    int64_t chunk_of(int64_t turn) const {
        const int64_t sequence = turn / (sweeps_ * chunks_of_sequence_), back = turn % chunks_of_sequence_;
        return sequence * chunks_of_sequence_ + chunks_of_sequence_ - 1 - back;
    }

    Arena& arena_;
    const Stream& stream_;
    PieceSource* store_ = nullptr;
    size_t piece_bytes_ = 0;
    int layers_ = 0, micro_batches_ = 1;
    int64_t chunk_rows_ = 0;
    Shape shape_ = {};
    Slot slots_[2];
    int held_ = 0;  // whole inputs: the slot in use
    // In chunks: how many a sequence and an input have, the first chunk of the current input, and turns.
    int64_t chunks_of_sequence_ = 0, chunks_of_input_ = 0, first_ = 0, next_ = 0, end_ = 0, sweeps_ = 1;
    bool stores_by_chunk_ = false;
};

// ---- keys and values
//
// Keys and values of a sequence whose rows go through a block in chunks, in pieces of a chunk's rows, of one
// block and one sequence at a time. The device has those of the current chunk and two buffers for pieces,
// and in backward two buffers for pieces of sums: while queries attend to one piece, the next one is
// fetched. So the memory that keys and values take on the device does not grow with the sequence.

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
        return whole_sectors(static_cast<size_t>(rows * columns) * sizeof(floatX));
    }
    static size_t sums_bytes(int64_t rows, int64_t columns) {
        return whole_sectors(static_cast<size_t>(rows * columns) * sizeof(float));
    }

    // Takes the buffers, until release(), for rows of `columns` elements, a row's keys and values together.
    // Pieces are as large as the layer with `most_columns` needs them.
    void take(int64_t columns, int64_t most_columns, bool with_sums) {
        if (!offloads()) return;
        columns_ = columns;
        keys_.piece_bytes = piece_bytes(rows_, most_columns);
        const auto take = [&](OffloadBuffer& buffer, const char* name) {
            buffer.take(name, aligned_buffer_bytes(keys_.piece_bytes), "activation", pieces_in(stored_keys_));
        };
        take(own_, "keys_and_values");
        for (OffloadBuffer& buffer : keys_.buffers) take(buffer, "offloaded_keys");
        if (!with_sums) return;
        sums_.piece_bytes = sums_bytes(rows_, most_columns);
        for (OffloadBuffer& buffer : sums_.buffers)
            buffer.take("offloaded_key_sums", aligned_buffer_bytes(sums_.piece_bytes), "gradient",
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
    TensorX own(int64_t rows) {
        own_.join();
        return TensorX(own_.aligned<floatX>(), {rows, columns_});
    }
    void store(int64_t piece) { own_.exchange(keys_.piece(piece), {}); }
    // A piece (rows, columns). Work queued on the stream may use it until another piece is fetched. `next`
    // is the piece that is likely to be fetched next; it is prefetched.
    TensorX fetch(int64_t piece, int64_t next) {
        return TensorX(keys_.fetch(piece, next, false).aligned<floatX>(), {rows_, columns_});
    }
    // A piece of sums, as fetch() returns a piece: those of the keys, then those of the values, (2 rows,
    // columns / 2). If they change, they are stored again.
    Tensor<float> fetch_sums(int64_t piece, int64_t next, bool change) {
        return Tensor<float>(sums_.fetch(piece, next, change).aligned<float>(), {2 * rows_, columns_ / 2});
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
