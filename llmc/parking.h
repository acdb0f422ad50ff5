// parking.h - the inputs of blocks, which wait from forward to backward, parked where there is room: in
// host memory beside a GPU (parking_host.h), on a CPU in a file (parking_disk.h).
//
// On the device there are two slots. Forward copies a block's input into one and goes on; it is stored from
// there. Backward reads it in its slot, where it was loaded while the block behind was computed; the last two
// are still there. So all blocks find the same memory left, whatever waits.
#pragma once

#include <utility>

#include "llmc/arena.h"

// Where inputs are parked. One is on its way at a time.
class ParkingPlace {
  public:
    virtual ~ParkingPlace() = default;
    // Begins to store a slot as a layer's input, or to load it, after what the stream was given so far.
    virtual void store(int layer, const char* slot, Stream stream) = 0;
    virtual void load(int layer, char* slot, Stream stream) = 0;
    // Has what the stream is given from here on find that done. Fails where it cannot be.
    virtual void join(Stream stream) = 0;
    // How long the host has waited for that, in all.
    double seconds_waited = 0;
};

template <class T>
class ParkedInputs {
  public:
    ParkedInputs(Arena& arena, const Stream& stream) : arena_(arena), stream_(stream) {}

    // How many layers' inputs are parked, from the first on; none without. A rehearsal needs no place.
    void use(int layers, ParkingPlace* place) { layers_ = layers, place_ = place; }
    bool parks(int layer) const { return layer < layers_; }

    // The slots, until give_back(). `shape` is that of an input.
    void take(Shape shape) {
        if (layers_ == 0) return;
        for (Slot& slot : slots_) slot = {kNone, arena_.take<T>("parked_input", shape)};
    }
    // After a layer's forward: lets go of its input.
    void park(int layer, Tensor<T>& input) {
        if (!parks(layer)) return;
        join();
        Slot& slot = slots_[layer % 2];
        const int64_t columns = input.columns();
        copy_rows_on_device(slot.room.data(), columns, input.data(), columns, columns, input.rows(), stream_);
        slot.layer = layer;
        input.drop();
        if (arena_.rehearsing() || layer >= layers_ - 2) return;
        place_->store(layer, bytes(slot), stream_);
        under_way_ = true;
    }
    // Before its backward: its input again, a view of its slot, and the layer's below on its way.
    void fetch(int layer, Tensor<T>& input) {
        if (!parks(layer)) return;
        join();
        input = slots_[layer % 2].room.view();
        Slot& next = slots_[1 - layer % 2];
        if (layer == 0 || next.layer == layer - 1) return;
        next.layer = layer - 1;
        if (arena_.rehearsing()) return;
        place_->load(layer - 1, bytes(next), stream_);
        under_way_ = true;
    }
    void give_back() {
        join();
        for (Slot& slot : slots_) slot = {};
    }

  private:
    static constexpr int kNone = -1;
    struct Slot {
        int layer = kNone;
        Tensor<T> room = {};
    };
    static char* bytes(const Slot& slot) { return reinterpret_cast<char*>(slot.room.data()); }
    void join() {
        if (under_way_) place_->join(stream_);
        under_way_ = false;
    }

    Arena& arena_;
    const Stream& stream_;
    ParkingPlace* place_ = nullptr;
    int layers_ = 0;
    Slot slots_[2];
    bool under_way_ = false;
};
