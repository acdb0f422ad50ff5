// state_ring.h - what only updates need of a training's state, where that does not live on the device: its
// chunks come to a ring of rooms in the arena, are updated there, and go back, while others are on their way.
#pragma once

#include <algorithm>
#include <vector>

#include "llmc/arena.h"
#include "llmc/elsewhere.h"
#include "llmc/state.h"
#include "llmc/work.h"

class StateRing {
  public:
    StateRing(Arena& arena, const Stream& stream) : arena_(arena), stream_(stream) {}

    // Where the chunks are. A rehearsal needs none.
    void use(Elsewhere* place) { place_ = place; }

    // How many rooms there are at the most where so many are wanted: negative, as many as a block has chunks.
    template <class T>
    static size_t most_rooms(const State<T>& state, int wanted) {
        if (wanted < 0) return std::max<size_t>(1, state.chunks_of(1).count());  // a soft prompt's block has 0
        return std::min(static_cast<size_t>(wanted), state.chunks().size());
    }
    // Takes the rooms, until give_back(), for an update of all units of a state in the given order, and has
    // the first chunks come.
    template <class T>
    void take(const State<T>& state, const std::vector<int>& units, int wanted) {
        order_.clear();
        way_ = way_from(state.options.updated);
        bytes_ = state.chunk_bytes();
        begun_ = 0;
        for (const int unit : units) {
            const auto of_unit = state.chunks_of(unit);
            for (size_t c = of_unit.first; c < of_unit.end; c++) order_.push_back(c);
        }
        next_ = 0;
        for (size_t i = 0; i < std::min(most_rooms(state, wanted), order_.size()); i++) {
            const auto room_bytes = static_cast<int64_t>(bytes_ + kElsewhereAlignment);
            rooms_.push_back({arena_.take<uint8_t>("state_room", {room_bytes}, "optimizer_state"), 0});
            exchange(rooms_.back(), {}, i);
        }
    }
    // Calls update(chunk, room) for each chunk of the next unit, and has it stored.
    template <class T, class Update>
    void update(const State<T>& state, int unit, Update&& update) {
        for (size_t left = state.chunks_of(unit).count(); left > 0; left--, next_++) {
            assert(state.chunks()[order_[next_]].unit == unit);
            Room& room = rooms_[next_ % rooms_.size()];
            join(room);
            update(state.chunks()[order_[next_]], aligned_room(room.memory.data()));
            exchange(room, next_, next_ + rooms_.size());
        }
    }
    void give_back() {
        for (Room& room : rooms_) join(room);
        rooms_.clear();
    }

  private:
    struct Room {
        Tensor<uint8_t> memory;
        size_t number;  // of its exchange
    };
    // Has the chunk that is number `out` of the order go from a room, and number `in` come, if there are
    // such.
    void exchange(Room& room, std::optional<size_t> out, size_t in) {
        if (arena_.rehearsing()) {
            const auto note = [&](Way way) {
                note_transfer({Transfer::State, false, way, static_cast<double>(bytes_)});
                room.number = begun_++;
            };
            if (out) note(way_back(way_));
            if (in < order_.size()) note(way_);
            return;
        }
        const auto at = [&](size_t i) { return uint64_t{order_[i]} * bytes_; };
        std::optional<uint64_t> to, from;
        if (out) to = at(*out);
        if (in < order_.size()) from = at(in);
        room.number = place_->exchange(aligned_room(room.memory.data()), bytes_, to, from, stream_);
    }
    void join(const Room& room) {
        if (arena_.rehearsing())
            return note_transfer({Transfer::State, true, way_, 0, static_cast<int>(room.number)});
        const Waiting waiting(Transfer::State);
        place_->join(room.number, stream_);
    }

    Arena& arena_;
    const Stream& stream_;
    Elsewhere* place_ = nullptr;
    Way way_ = Way::DiskRead;    // of what comes
    size_t bytes_ = 0;           // of a chunk
    size_t begun_ = 0;           // transfers of a rehearsal
    std::vector<size_t> order_;  // of the chunks
    size_t next_ = 0;            // in it: to be updated
    std::vector<Room> rooms_;
};
