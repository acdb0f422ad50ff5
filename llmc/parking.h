// parking.h - offloads activations (--offload inputs=): the inputs of blocks are stored in host memory beside a GPU, or
// on a CPU in a file (elsewhere.h), from forward until backward needs them.
//
// The device has two slots. Forward copies a block's input into one of them; the block reads it there while
// it is stored. Backward reads an input in a slot too, to which it was fetched while the input before it was
// used. With one micro-batch at a time, the last two inputs are still in the slots. So every block finds the
// same memory left, however many inputs are offloaded. If attention takes rows in chunks, inputs are
// offloaded in chunks, without slots (parked_rows.h).
#pragma once

#include <algorithm>

#include "llmc/parked_room.h"

template <class T>
class ParkedInputs {
  public:
    ParkedInputs(Arena& arena, const Stream& stream)
        : stream_(stream),
          slots_{{.room = {arena, stream, Transfer::Parked}}, {.room = {arena, stream, Transfer::Parked}}} {}

    // Offloads the inputs of the first `layers` layers to `place`, which may be null in a dry run. `passes`
    // micro-batches go through a layer before any goes through the next.
    void use(int layers, int passes, Elsewhere* place) { layers_ = layers, passes_ = passes, place_ = place; }
    bool parks(int layer) const { return layer < layers_; }
    // How many inputs leave the device. An input's number is layer * passes + pass.
    static int stored(int layers, int passes) {
        return passes > 1 ? layers * passes : std::max(0, layers - 2);
    }
    // The bytes that an input of this shape takes where it is stored.
    static size_t stored_bytes(Shape shape) {
        return ParkedRoom::piece_bytes(static_cast<size_t>(shape.size()) * sizeof(T));
    }

    // Takes the slots, until give_back(), for inputs of this shape.
    void take(Shape shape) {
        if (layers_ == 0) return;
        for (Slot& slot : slots_) {
            slot.room.take("parked_input", stored_bytes(shape), place_);
            slot.input = Tensor<T>(slot.room.template data<T>(), shape);
        }
    }
    // Call before a layer's forward: starts offloading its input, which becomes a view of its slot.
    void park(int layer, int pass, Tensor<T>& input) {
        if (!parks(layer)) return;
        join();
        held_ = 1 - held_;
        Slot& slot = slots_[held_];
        const int64_t columns = input.columns();
        copy_rows_on_device(slot.input.data(), columns, input.data(), columns, columns, input.rows(),
                            stream_);
        slot.number = number(layer, pass);
        input = slot.input.view();
        if (slot.number < stored(layers_, passes_)) slot.room.exchange(slot.number, {});
    }
    // Call before a layer's backward: its input becomes a view of its slot again. Prefetches the next input,
    // that of the next micro-batch, or of the layer below.
    void fetch(int layer, int pass, Tensor<T>& input) {
        if (!parks(layer)) return;
        if (slots_[held_].number != number(layer, pass)) {
            load(number(layer, pass));
            held_ = 1 - held_;
        }
        join();
        input = slots_[held_].input.view();
        if (pass + 1 < passes_)
            load(number(layer, pass + 1));
        else if (layer > 0)
            load(number(layer - 1, 0));
    }
    void give_back() {
        for (Slot& slot : slots_) {
            slot.room.give_back();
            slot.number = kNone, slot.input = {};
        }
    }

  private:
    static constexpr int kNone = -1;
    struct Slot {
        int number = kNone;
        ParkedRoom room;
        Tensor<T> input = {};  // a view of the slot
    };
    int number(int layer, int pass) const { return layer * passes_ + pass; }
    // Starts fetching an input into the slot that is not in use, unless it is there already.
    void load(int number) {
        Slot& slot = slots_[1 - held_];
        if (slot.number == number) return;
        join();
        slot.number = number;
        slot.room.exchange({}, number);
    }
    // Waits for the exchange under way. There is at most one, of either slot.
    void join() {
        for (Slot& slot : slots_) slot.room.join();
    }

    const Stream& stream_;
    Elsewhere* place_ = nullptr;
    int layers_ = 0, passes_ = 1;
    Slot slots_[2];
    int held_ = 0;  // the slot in use
};
