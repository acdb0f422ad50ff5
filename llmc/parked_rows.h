// parked_rows.h - offloads the inputs of blocks as parking.h does, but chunk by chunk, for attention that
// takes rows in chunks.
//
// The device has two buffers of a chunk each. Forward copies each chunk of a block's input into one of them,
// and it is stored from there. Backward reads a chunk in one buffer while the next is fetched into the other.
// It reads the chunks of a sequence from the last to the first, as often as the block asks for. So the memory
// on the device does not grow with the sequence.
#pragma once

#include "llmc/parked_room.h"

template <class T>
class ParkedRows {
  public:
    ParkedRows(Arena& arena, const Stream& stream)
        : arena_(arena),
          stream_(stream),
          rooms_{{arena, stream, Transfer::Parked}, {arena, stream, Transfer::Parked}} {}

    // As ParkedInputs::use(), in chunks of `rows` rows of a sequence.
    void use(int layers, int passes, int64_t rows, Elsewhere* place) {
        layers_ = layers, passes_ = passes, rows_ = rows, place_ = place;
    }
    bool parks(int layer) const { return layer < layers_; }
    // The number of chunks of an input (B, T, C), and the bytes of one.
    static int64_t chunks(Shape input, int64_t rows) { return input.dims[0] * ceil_div(input.dims[1], rows); }
    static size_t chunk_bytes(Shape input, int64_t rows) {
        return ParkedRoom::piece_bytes(static_cast<size_t>(rows * input.dims[2]) * sizeof(T));
    }

    // Takes the buffers, until give_back(), for inputs of this shape.
    void take(Shape shape) {
        if (layers_ == 0) return;
        columns_ = shape.dims[2];
        of_sequence_ = ceil_div(shape.dims[1], rows_);
        of_input_ = chunks(shape, rows_);
        for (ParkedRoom& room : rooms_) room.take("parked_rows", chunk_bytes(shape, rows_), place_);
    }
    void give_back() {
        for (ParkedRoom& room : rooms_) room.give_back();
    }

    // Begins a layer's forward: call store() for each chunk of its input in order, (1, rows, C).
    void begin_forward(int layer, int pass) { begin(layer, pass, of_input_), stores_ = true; }
    bool stores() const { return stores_; }
    void store(const Tensor<T>& rows) {
        ParkedRoom& room = rooms_[next_ % 2];
        room.join();
        copy_rows_on_device(room.data<T>(), columns_, rows.data(), columns_, columns_, rows.rows(), stream_);
        room.exchange(first_ + next_, {});
        next_++;
    }
    void end_forward() { stores_ = false; }

    // Begins a layer's backward: fetch() returns the chunks of a sequence from the last to the first,
    // `sweeps` times, and then those of the next sequence. A chunk is valid until the next call of fetch().
    void begin_backward(int layer, int pass, int64_t sweeps) {
        begin(layer, pass, sweeps * of_input_);
        sweeps_ = sweeps;
        for (ParkedRoom& room : rooms_) room.join();
        load();
    }
    Tensor<T> fetch(int64_t rows) {
        ParkedRoom& room = rooms_[next_ % 2];
        room.join();
        next_++;
        if (next_ < end_ || arena_.rehearsing()) load();
        return Tensor<T>(room.data<T>(), {1, rows, columns_});
    }

  private:
    void begin(int layer, int pass, int64_t end) {
        first_ = (int64_t{layer} * passes_ + pass) * of_input_;
        next_ = 0, end_ = end;
    }
    // The number of the chunk that backward reads in this turn.
    int64_t chunk_of(int64_t turn) const {
        const int64_t sequence = turn / (sweeps_ * of_sequence_), back = turn % of_sequence_;
        return sequence * of_sequence_ + of_sequence_ - 1 - back;
    }
    void load() { rooms_[next_ % 2].exchange({}, first_ + chunk_of(next_)); }

    Arena& arena_;
    const Stream& stream_;
    Elsewhere* place_ = nullptr;
    int layers_ = 0, passes_ = 1;
    int64_t rows_ = 0, columns_ = 0;
    int64_t of_sequence_ = 0, of_input_ = 0;               // chunks
    int64_t first_ = 0, next_ = 0, end_ = 0, sweeps_ = 1;  // the input's first chunk; then numbers of turns
    bool stores_ = false;
    ParkedRoom rooms_[2];
};
