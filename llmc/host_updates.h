// host_updates.h - a state that lives in host memory beside a GPU, updated there by the host's cores: only
// gradients go to it, and weights come back, where all of the state would cross the link twice.
//
// Chunks of gradients are copied to a ring of pinned rooms, as many as a block has. The host updates a chunk
// when its room is needed for another, or at the end: the GPU then computes the next block. What lives in
// host memory already, weights or gradients, stays there.
#pragma once

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "llmc/arena.h"
#include "llmc/elsewhere.h"
#include "llmc/graph.h"
#include "llmc/optimizer.cuh"
#include "llmc/state_ring.h"
#include "llmc/work.h"

// As optimizer_update() of arrays and factors in the host's memory (update_on_host.cpp).
#if defined(SIMT_GPU)
extern "C" void update_on_host(const void* arrays, const void* factors, float norm);
#else
inline void update_on_host(const void*, const void*, float) { bug("a CPU's host is the device"); }
#endif

// Where a unit's weights or gradients are: on the device, or in host memory. Null in a rehearsal.
template <class E>
struct UnitMemory {
    E* at;
    bool on_host;
};

template <class T>
class HostUpdates {
  public:
    HostUpdates(Arena& arena, const Stream& stream) : arena_(arena), stream_(stream) {}

    // The pinned memory of the rooms.
    static size_t pinned_bytes(const State<T>& state) { return rooms_of(state) * kRoomBytes; }
    // Takes it. `place` is where the state's chunks are.
    void allocate(const State<T>& state, const Elsewhere& place) {
        place_ = &place;
        link_ = std::make_unique<Link>(rooms_of(state));
    }
    // What the updates from here on are by.
    void use(const OptimizerStep& step) { factors_ = factors_of(step); }

    // Has a unit updated until give_back(), with the norm (1) on the device, in the stream's order: its
    // gradients on the device may be overwritten by what the stream is given from here on.
    void update(const State<T>& state, int unit, UnitMemory<T> weights, UnitMemory<const T> gradients,
                const Tensor<float>& norm) {
        updates_under_way_ = true;
        host_act([this, &state, unit, weights, gradients, norm = norm.view()] {
            const Waiting waiting(Transfer::State);  // for rooms, and until all has gone
            if (!arena_.rehearsing()) link_->asked.record(stream_), link_->asked.block(link_->stores.get());
            const auto of_unit = state.chunks_of(unit);
            for (size_t c = of_unit.first; c < of_unit.end; c++) begin(state, c, weights, gradients, norm);
            if (arena_.rehearsing()) return wait_for(last_to_host_);
            link_->gone.record(link_->stores.get());
            link_->gone.block(stream_);
        });
    }
    // Has all that are under way done for what the stream is given from here on.
    void give_back() {
        if (!std::exchange(updates_under_way_, false)) return;
        if (arena_.rehearsing()) {
            wait_for(updates_.back());
            wait_for(std::exchange(transfers_, 0) - 1);
            return updates_.clear();
        }
        host_act([this] {
            const Waiting waiting(Transfer::State);
            while (done_ < begun_) finish();
            link_->came.block(stream_);
        });
    }

  private:
    // Gradients, weights, and behind them the norm.
    static constexpr size_t kPart = static_cast<size_t>(kStateChunk) * sizeof(T);
    static constexpr size_t kRoomBytes = 2 * kPart + kSector;
    struct Room {
        char* at = nullptr;
        UpdateArrays<T> arrays = {};
        T* weights = nullptr;  // on the device, where they go back to
        Event arrived, came;
    };
    // What the copies are made with, of which a rehearsal has none.
    struct Link {
        PinnedBuffer memory;
        std::vector<Room> rooms;
        OwnStream stores, fetches;
        Event asked, gone, came;  // before a unit's copies; behind them; behind what came back last
        explicit Link(size_t count) : memory(count * kRoomBytes), rooms(count) {
            for (size_t i = 0; i < count; i++) rooms[i].at = memory.data() + i * kRoomBytes;
        }
    };
    static size_t rooms_of(const State<T>& state) { return StateRing::most_rooms(state, -1); }
    // Whether an update reads the weights that it writes.
    static bool reads_weights(const StateOptions& s) {
        return std::is_same_v<T, float> || s.master != Master::Fp32;
    }

    // Has the gradients of a chunk, and what else the host needs, go to a room.
    void begin(const State<T>& state, size_t number, UnitMemory<T> weights, UnitMemory<const T> gradients,
               const Tensor<float>& norm) {
        const StateChunk& chunk = state.chunks()[number];
        const Unit& unit = state.layout.units()[static_cast<size_t>(chunk.unit)];
        const size_t bytes = static_cast<size_t>(chunk.count) * sizeof(T);
        const bool gradients_go = !gradients.on_host;
        const bool weights_go = !weights.on_host && reads_weights(state.options);
        if (arena_.rehearsing()) {
            const size_t to_host = sizeof(float) + (gradients_go ? bytes : 0) + (weights_go ? bytes : 0);
            if (updates_.size() == rooms_of(state)) wait_for(updates_.front()), updates_.pop_front();
            const UpdateArrays<T> arrays = arrays_of_chunk<T>(state, unit, chunk, nullptr, nullptr, nullptr);
            last_to_host_ = note(Way::ToHost, static_cast<double>(to_host));
            updates_.push_back(note(Way::HostUpdate, update_bytes(arrays)));
            if (!weights.on_host) note(Way::FromHost, static_cast<double>(bytes));
            return;
        }
        std::vector<Room>& rooms = link_->rooms;
        const Stream stores = link_->stores.get();
        if (begun_ - done_ == rooms.size()) finish();
        Room& room = rooms[begun_++ % rooms.size()];
        room.came.wait();
        T* const gradients_here = reinterpret_cast<T*>(room.at);
        T* const weights_here = reinterpret_cast<T*>(room.at + kPart);
        char* const state_here = place_->address(uint64_t{number} * state.chunk_bytes());
        room.arrays = arrays_of_chunk<T>(state, unit, chunk, state_here, weights.at, gradients.at);
        room.weights = weights.on_host ? nullptr : room.arrays.weights;
        if (gradients_go) move_async(Way::ToHost, gradients_here, room.arrays.gradients, bytes, stores);
        if (weights_go) move_async(Way::ToHost, weights_here, room.weights, bytes, stores);
        if (gradients_go) room.arrays.gradients = gradients_here;
        if (!weights.on_host) room.arrays.weights = weights_here;
        move_async(Way::ToHost, room.at + 2 * kPart, norm.data(), sizeof(float), stores);
        room.arrived.record(stores);
    }
    // Updates the first chunk that is not done.
    void finish() {
        Room& room = link_->rooms[done_++ % link_->rooms.size()];
        room.arrived.wait();
        count_moved(Way::HostUpdate, static_cast<size_t>(update_bytes(room.arrays)));
        update_on_host(&room.arrays, &factors_, *reinterpret_cast<const float*>(room.at + 2 * kPart));
        if (!room.weights) return;
        const size_t bytes = static_cast<size_t>(room.arrays.n) * sizeof(T);
        move_async(Way::FromHost, room.weights, room.arrays.weights, bytes, link_->fetches.get());
        room.came.record(link_->fetches.get());
        link_->came.record(link_->fetches.get());
    }
    // In a rehearsal: that a transfer begins, whose number it returns, and the wait for one.
    int note(Way way, double bytes) {
        note_transfer({Transfer::State, false, way, bytes});
        return transfers_++;
    }
    static void wait_for(int number) { note_transfer({Transfer::State, true, Way::FromHost, 0, number}); }

    Arena& arena_;
    const Stream& stream_;
    const Elsewhere* place_ = nullptr;
    UpdateFactors factors_ = {};
    std::unique_ptr<Link> link_;
    bool updates_under_way_ = false;
    size_t begun_ = 0, done_ = 0;  // chunks
    // Of a rehearsal: how many transfers there were, the last to the host, and the updates that have rooms.
    int transfers_ = 0, last_to_host_ = 0;
    std::deque<int> updates_;
};
