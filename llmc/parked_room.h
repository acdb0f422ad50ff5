// parked_room.h - a room of the arena that goes to memory elsewhere and comes back from there, piece by piece
// (parking.h, parked_rows.h, parked_keys.h): one exchange is under way at a time, which owns the room until
// it is joined.
#pragma once

#include <optional>
#include <utility>

#include "llmc/arena.h"
#include "llmc/elsewhere.h"
#include "llmc/graph.h"
#include "llmc/work.h"

// Where what is parked waits: in host memory beside a GPU, on a CPU in a file.
constexpr Home kParkedHome = kHostIsDevice ? Home::Disk : Home::Host;

class ParkedRoom {
  public:
    ParkedRoom(Arena& arena, const Stream& stream, Transfer::Of of)
        : arena_(arena), stream_(stream), of_(of) {}

    // What pieces take there, and so the room.
    static size_t piece_bytes(size_t bytes) { return whole_sectors(bytes); }
    // Takes the room, until give_back(): for pieces of so many bytes, of `place`, which a rehearsal does not
    // need.
    void take(const char* name, size_t bytes, Elsewhere* place, const char* kind = "activation") {
        bytes_ = piece_bytes(bytes);
        place_ = place;
        memory_ = arena_.take<uint8_t>(name, {static_cast<int64_t>(bytes_ + kElsewhereAlignment)}, kind);
    }
    void give_back() {
        join();
        memory_ = {};
    }
    template <class T>
    T* data() const {
        return reinterpret_cast<T*>(aligned_room(memory_.data()));
    }
    // Begins to store what is there as piece `to`, and then to have piece `from` come; either may be none.
    void exchange(std::optional<int64_t> to, std::optional<int64_t> from) {
        join();
        under_way_ = true;
        if (arena_.rehearsing()) {
            const auto bytes = static_cast<double>(bytes_);
            if (to) note_transfer({of_, false, way_back(kWay), bytes});
            if (from) note_transfer({of_, false, kWay, bytes});
            return;
        }
        const auto at = [this](std::optional<int64_t> piece) {
            return piece ? std::optional(static_cast<uint64_t>(*piece) * bytes_) : std::nullopt;
        };
        host_act([this, to = at(to), from = at(from), bytes = bytes_, room = data<char>()] {
            exchange_ = place_->exchange(room, bytes, to, from, stream_);
        });
    }
    // Has what the stream is given from here on find that done.
    void join() {
        if (!std::exchange(under_way_, false)) return;
        if (arena_.rehearsing()) return note_wait(of_);
        host_act([this] {
            const Waiting waiting(of_);
            place_->join(exchange_, stream_);
        });
    }

  private:
    static constexpr Way kWay = way_from(kParkedHome);

    Arena& arena_;
    const Stream& stream_;
    const Transfer::Of of_;
    Elsewhere* place_ = nullptr;
    Tensor<uint8_t> memory_ = {};
    size_t bytes_ = 0;
    bool under_way_ = false;
    size_t exchange_ = 0;  // the number of what is
};
