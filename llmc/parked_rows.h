// parked_rows.h - the inputs of blocks where attention takes rows in chunks: parked as in parking.h, but
// chunk by chunk.
//
// On the device there are two rooms of a chunk. Forward copies a chunk of a block's input into one, and it is
// stored from there. Backward reads a chunk in a room, while the next one comes to the other: from the last
// chunk of a sequence to the first, and that as often as the block asks for. So what is on the device does
// not grow with the sequence.
#pragma once

#include <optional>
#include <utility>

#include "llmc/parking.h"

template <class T>
class ParkedRows {
  public:
    ParkedRows(Arena& arena, const Stream& stream) : arena_(arena), stream_(stream) {}

    // As ParkedInputs::use(), in chunks of so many rows of a sequence.
    void use(int layers, int passes, int64_t rows, Elsewhere* place) {
        layers_ = layers, passes_ = passes, rows_ = rows, place_ = place;
    }
    bool parks(int layer) const { return layer < layers_; }
    // The chunks of an input (B, T, C), and what one takes.
    static int64_t chunks(Shape input, int64_t rows) { return input.dims[0] * ceil_div(input.dims[1], rows); }
    static size_t chunk_bytes(Shape input, int64_t rows) {
        return whole_sectors(static_cast<size_t>(rows * input.dims[2]) * sizeof(T));
    }

    // The rooms, until give_back(). `shape` is that of an input.
    void take(Shape shape) {
        if (layers_ == 0) return;
        bytes_ = chunk_bytes(shape, rows_);
        columns_ = shape.dims[2];
        of_sequence_ = ceil_div(shape.dims[1], rows_);
        of_input_ = chunks(shape, rows_);
        for (Room& room : rooms_)
            room = {
                arena_.take<uint8_t>("parked_rows", {static_cast<int64_t>(bytes_ + kElsewhereAlignment)})};
    }
    void give_back() {
        for (Room& room : rooms_) join(room), room = {};
    }

    // Begins a layer's forward: store() gets the chunks of its input in their order, (1, rows, C) each.
    void begin_forward(int layer, int pass) { begin(layer, pass, of_input_), stores_ = true; }
    bool stores() const { return stores_; }
    void store(const Tensor<T>& rows) {
        Room& room = rooms_[next_ % 2];
        join(room);
        copy_rows_on_device(room_of(room), columns_, rows.data(), columns_, columns_, rows.rows(), stream_);
        exchange(room, next_, {});
        next_++;
    }
    void end_forward() { stores_ = false; }

    // Begins its backward: fetch() gives the chunks of each sequence from the last to the first, `sweeps`
    // times, and then those of the next. What it gave before is gone then.
    void begin_backward(int layer, int pass, int64_t sweeps) {
        begin(layer, pass, sweeps * of_input_);
        sweeps_ = sweeps;
        for (Room& room : rooms_) join(room);
        load();
    }
    Tensor<T> fetch(int64_t rows) {
        Room& room = rooms_[next_ % 2];
        join(room);
        next_++;
        if (next_ < end_ || arena_.rehearsing()) load();
        return Tensor<T>(room_of(room), {1, rows, columns_});
    }

  private:
    static constexpr Way kWay = way_from(ParkedInputs<T>::kHome);
    struct Room {
        Tensor<uint8_t> memory = {};
        bool under_way = false;
        size_t exchange = 0;  // the number of what is
    };
    static T* room_of(const Room& room) { return reinterpret_cast<T*>(aligned_room(room.memory.data())); }
    void begin(int layer, int pass, int64_t end) {
        first_ = (int64_t{layer} * passes_ + pass) * of_input_;
        next_ = 0, end_ = end;
    }
    // The chunk that backward reads in its turn.
    int64_t chunk_of(int64_t turn) const {
        const int64_t sequence = turn / (sweeps_ * of_sequence_), back = turn % of_sequence_;
        return sequence * of_sequence_ + of_sequence_ - 1 - back;
    }
    void load() { exchange(rooms_[next_ % 2], {}, chunk_of(next_)); }
    void exchange(Room& room, std::optional<int64_t> to, std::optional<int64_t> from) {
        room.under_way = true;
        if (arena_.rehearsing())
            return note_transfer(
                {Transfer::Parked, false, to ? way_back(kWay) : kWay, static_cast<double>(bytes_)});
        const auto at = [this](std::optional<int64_t> chunk) {
            return chunk ? std::optional(static_cast<uint64_t>(first_ + *chunk) * bytes_) : std::nullopt;
        };
        host_act(
            [this, &room, to = at(to), from = at(from), memory = reinterpret_cast<char*>(room_of(room))] {
                room.exchange = place_->exchange(memory, bytes_, to, from, stream_);
            });
    }
    void join(Room& room) {
        if (!std::exchange(room.under_way, false)) return;
        if (arena_.rehearsing()) return note_transfer({Transfer::Parked, true});
        host_act([this, &room] {
            const Waiting waiting(Transfer::Parked);
            place_->join(room.exchange, stream_);
        });
    }

    Arena& arena_;
    const Stream& stream_;
    Elsewhere* place_ = nullptr;
    int layers_ = 0, passes_ = 1;
    int64_t rows_ = 0, columns_ = 0;
    int64_t of_sequence_ = 0, of_input_ = 0;               // chunks
    int64_t first_ = 0, next_ = 0, end_ = 0, sweeps_ = 1;  // the input's first chunk; turns
    size_t bytes_ = 0;                                     // of a chunk
    bool stores_ = false;
    Room rooms_[2];
};
