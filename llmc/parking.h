// parking.h - the inputs of blocks, which wait from forward to backward, parked where there is room: in
// host memory beside a GPU, on a CPU in a file (elsewhere.h).
//
// On the device there are two slots. Forward copies a block's input into one, from where the block reads it
// while it is stored. Backward reads it in a slot, where it was loaded while the one before was used; of a
// single micro-batch the last two are still there. So all blocks find the same memory left, whatever waits.
// Where attention takes rows in chunks, so are all inputs parked, without slots (parked_rows.h).
#pragma once

#include <algorithm>

#include "llmc/parked_room.h"

template <class T>
class ParkedInputs {
  public:
    ParkedInputs(Arena& arena, const Stream& stream)
        : stream_(stream),
          slots_{{.room = {arena, stream, Transfer::Parked}}, {.room = {arena, stream, Transfer::Parked}}} {}

    // How many layers' inputs are parked, from the first on, of how many micro-batches that pass a layer
    // before the next. A rehearsal needs no place.
    void use(int layers, int passes, Elsewhere* place) { layers_ = layers, passes_ = passes, place_ = place; }
    bool parks(int layer) const { return layer < layers_; }
    // How many inputs leave the device. Each has the number layer * passes + pass.
    static int stored(int layers, int passes) {
        return passes > 1 ? layers * passes : std::max(0, layers - 2);
    }
    // What one of that shape takes there.
    static size_t stored_bytes(Shape shape) {
        return ParkedRoom::piece_bytes(static_cast<size_t>(shape.size()) * sizeof(T));
    }

    // The slots, until give_back(). `shape` is that of an input.
    void take(Shape shape) {
        if (layers_ == 0) return;
        for (Slot& slot : slots_) {
            slot.room.take("parked_input", stored_bytes(shape), place_);
            slot.input = Tensor<T>(slot.room.template data<T>(), shape);
        }
    }
    // Before a layer's forward: its input becomes a view of its slot.
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
    // Before its backward: its input again, a view of its slot, and the next one on its way: that of the next
    // pass, or of the layer below.
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
        Tensor<T> input = {};  // in it
    };
    int number(int layer, int pass) const { return layer * passes_ + pass; }
    // Has the slot that is not held get an input, unless it has it.
    void load(int number) {
        Slot& slot = slots_[1 - held_];
        if (slot.number == number) return;
        join();
        slot.number = number;
        slot.room.exchange({}, number);
    }
    // One exchange is under way at a time, of either slot.
    void join() {
        for (Slot& slot : slots_) slot.room.join();
    }

    const Stream& stream_;
    Elsewhere* place_ = nullptr;
    int layers_ = 0, passes_ = 1;
    Slot slots_[2];
    int held_ = 0;
};
