// residence.h - where a frozen model's matrices live when they are not on the device, and how a block's are
// lent to it: fetched into a room of the arena while the block before is computed.
//
// A residence is one file: residence_disk.h, residence_host.h. It fetches a block's bytes into a room, and
// knows nothing of the step; BlockLoans takes the rooms, so that the plan has them, and decides what is
// fetched when. A copy under way owns its room until it is joined in the order of the program.
#pragma once

#include <cstdint>
#include <utility>

#include "llmc/arena.h"

// Where the matrices of a model's blocks live.
enum class Home { Device, Host, Disk };
inline constexpr const char* kHomeNames[] = {"device", "host", "disk"};

class Residence {
  public:
    virtual ~Residence() = default;
    // Begins to fetch a block's bytes to `room` on the device, which what the stream was given so far may
    // still use. One block is on its way at a time.
    virtual void start(int layer, char* room, Stream stream) = 0;
    // Has what the stream is given from here on find them there. Fails where they cannot be had.
    virtual void finish(Stream stream) = 0;
    // How long the host has waited for that, in all.
    double seconds_waited = 0;
};

// Blocks of a pass over the model, each lent while the next is on its way: in two rooms, which the pass has
// from its first loan to give_back(), so that all its blocks find the same memory left.
class BlockLoans {
  public:
    BlockLoans(Arena& arena, const Stream& stream) : arena_(arena), stream_(stream) {}

    // Where blocks come from, and the bytes of the largest. Before that nothing can be borrowed; a rehearsal
    // needs no residence.
    void lend(size_t room_bytes, Residence* residence) {
        room_bytes_ = static_cast<int64_t>(room_bytes);
        residence_ = residence;
    }
    // The bytes of block `layer`, there for what the stream is given until another is borrowed or all are
    // given back. Block `next` is on its way then; negative: none. Null in a rehearsal.
    const char* borrow(int layer, int next) {
        for (Room& room : rooms_)
            if (!room.bytes) room = {kNone, arena_.take<uint8_t>("lent_block", {room_bytes_}, "weights")};
        if (layer != rooms_[held_].layer) {
            if (layer != other().layer) fetch(layer);
            join();
            held_ = 1 - held_;
        }
        if (next >= 0 && next != layer && next != other().layer) fetch(next);
        return reinterpret_cast<const char*>(rooms_[held_].bytes.data());
    }
    void give_back() {
        join();
        for (Room& room : rooms_) room = {};
    }

  private:
    static constexpr int kNone = -1;
    struct Room {
        int layer = kNone;
        Tensor<uint8_t> bytes = {};
    };
    // The room whose block is not held, but on its way or nobody's.
    Room& other() { return rooms_[1 - held_]; }
    void fetch(int layer) {
        join();
        other().layer = layer;
        if (arena_.rehearsing()) return;
        residence_->start(layer, reinterpret_cast<char*>(other().bytes.data()), stream_);
        under_way_ = true;
    }
    void join() {
        if (under_way_) residence_->finish(stream_);
        under_way_ = false;
    }

    Arena& arena_;
    const Stream& stream_;
    Residence* residence_ = nullptr;
    int64_t room_bytes_ = 0;
    Room rooms_[2];
    int held_ = 0;
    bool under_way_ = false;
};
