// parking.h - the inputs of blocks, which wait from forward to backward, parked where there is room: in
// host memory beside a GPU, on a CPU in a file (elsewhere.h).
//
// On the device there are two slots. Forward copies a block's input into one, from where the block reads it
// while it is stored. Backward reads it in a slot, where it was loaded while the one before was used; of a
// single micro-batch the last two are still there. So all blocks find the same memory left, whatever waits.
// Where attention takes rows in chunks, so are all inputs parked, without slots (parked_rows.h).
#pragma once

#include <algorithm>
#include <optional>
#include <utility>

#include "llmc/arena.h"
#include "llmc/elsewhere.h"
#include "llmc/graph.h"
#include "llmc/work.h"

// Where what is parked waits.
constexpr Home kParkedHome = kHostIsDevice ? Home::Disk : Home::Host;

template <class T>
class ParkedInputs {
  public:
    ParkedInputs(Arena& arena, const Stream& stream) : arena_(arena), stream_(stream) {}

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
        return whole_sectors(static_cast<size_t>(shape.size()) * sizeof(T));
    }

    // The slots, until give_back(). `shape` is that of an input.
    void take(Shape shape) {
        if (layers_ == 0) return;
        bytes_ = stored_bytes(shape);
        const auto room_bytes = static_cast<int64_t>(bytes_ + kElsewhereAlignment);
        for (Slot& slot : slots_) {
            slot = {kNone, arena_.take<uint8_t>("parked_input", {room_bytes})};
            slot.input = Tensor<T>(reinterpret_cast<T*>(aligned_room(slot.room.data())), shape);
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
        if (slot.number < stored(layers_, passes_)) begin(slot, at(slot.number), {});
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
        join();
        for (Slot& slot : slots_) slot = {};
    }

  private:
    static constexpr int kNone = -1;
    static constexpr Way kWay = way_from(kParkedHome);
    struct Slot {
        int number = kNone;
        Tensor<uint8_t> room = {};
        Tensor<T> input = {};  // in it
    };
    int number(int layer, int pass) const { return layer * passes_ + pass; }
    // Has the slot that is not held get an input, unless it has it.
    void load(int number) {
        Slot& slot = slots_[1 - held_];
        if (slot.number == number) return;
        join();
        slot.number = number;
        begin(slot, {}, at(number));
    }
    uint64_t at(int number) const { return static_cast<uint64_t>(number) * bytes_; }
    void begin(const Slot& slot, std::optional<uint64_t> to, std::optional<uint64_t> from) {
        under_way_ = true;
        if (arena_.rehearsing())
            return note_transfer({Transfer::Parked, false, to ? way_back(kWay) : kWay, bytes()});
        host_act([this, to, from, bytes = bytes_, room = reinterpret_cast<char*>(slot.input.data())] {
            exchange_ = place_->exchange(room, bytes, to, from, stream_);
        });
    }
    double bytes() const { return static_cast<double>(bytes_); }
    void join() {
        if (!std::exchange(under_way_, false)) return;
        if (arena_.rehearsing()) return note_transfer({Transfer::Parked, true});
        host_act([this] {
            const Waiting waiting(Transfer::Parked);
            place_->join(exchange_, stream_);
        });
    }

    Arena& arena_;
    const Stream& stream_;
    Elsewhere* place_ = nullptr;
    int layers_ = 0, passes_ = 1;
    size_t bytes_ = 0;  // of an input, stored
    Slot slots_[2];
    int held_ = 0;
    bool under_way_ = false;
    size_t exchange_ = 0;  // the number of what is under way
};
