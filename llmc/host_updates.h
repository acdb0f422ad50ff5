// host_updates.h - updates by the host's cores (--offload updates=host), for optimizer state in host memory beside a
// GPU or on its disk. Only gradients are copied to the host (and weights, if the update reads them), and
// weights are copied back. An update on the GPU would move the whole state across the link twice.
//
// Chunks of gradients are copied to a ring of pinned buffers, as many as a block has chunks. The host updates
// a chunk when its buffer is needed for another one, or at the end; by then the GPU computes the next block.
// Weights or gradients that are in host memory already stay there. State on a disk is read into the chunk's
// buffer while its gradients are copied, and written back as soon as it is updated.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "llmc/arena.h"
#include "llmc/elsewhere.h"
#include "llmc/graph.h"
#include "llmc/optimizer.cuh"
#include "llmc/state_ring.h"
#include "llmc/work.h"

// optimizer_update() for arrays and factors in host memory (update_on_host.cpp).
#if defined(SIMT_GPU)
extern "C" void update_on_host(const void* arrays, const void* factors, float norm);
#else
inline void update_on_host(const void*, const void*, float) { bug("a CPU's host is the device"); }
#endif

// Address of a unit's weights or gradients, on the device or in host memory. Null in a dry run.
template <class E>
struct UnitMemory {
    E* at;
    bool on_host;
};

template <class T>
class HostUpdates {
  public:
    HostUpdates(Arena& arena, const Stream& stream) : arena_(arena), stream_(stream) {}

    // The pinned memory of the buffers, in bytes.
    static size_t pinned_bytes(const State<T>& state) {
        return rooms_of(state) * room_bytes(state) + (is_on_disk(state) ? kElsewhereAlignment : 0);
    }
    // Allocates it. `place` has the state's chunks. If it is on a disk, it must not be staged, so that its
    // join() makes the host wait; and it must end before this does, since its transfers use the buffers.
    void allocate(const State<T>& state, Elsewhere& place) {
        place_ = &place;
        link_ = std::make_unique<Link>(state);
    }
    // Sets the optimizer step of the updates from here on.
    void use(const OptimizerStep& step) { factors_ = factors_of(step); }

    // Starts the update of a unit, which ends at the latest in give_back(). `norm` (1) is on the device. Work
    // queued on the stream from here on may overwrite the unit's gradients on the device.
    void update(const State<T>& state, int unit, UnitMemory<T> weights, UnitMemory<const T> gradients,
                const Tensor<float>& norm) {
        updates_under_way_ = true;
        state_bytes_ = is_on_disk(state) ? state.chunk_bytes() : 0;
        host_act([this, &state, unit, weights, gradients, norm = norm.view()] {
            const Waiting waiting(Transfer::State);  // for buffers, and for the copies to the host
            if (!arena_.rehearsing()) link_->asked.record(stream_), link_->asked.block(link_->stores.get());
            const auto of_unit = state.chunks_of(unit);
            for (size_t c = of_unit.first; c < of_unit.end; c++) begin(state, c, weights, gradients, norm);
            if (arena_.rehearsing()) return note_wait(Transfer::State, last_to_host_);
            link_->gone.record(link_->stores.get());
            link_->gone.block(stream_);
        });
    }
    // Completes all updates under way. Work queued on the stream from here on finds the new weights.
    void give_back() {
        if (!std::exchange(updates_under_way_, false)) return;
        if (arena_.rehearsing()) return note_end();
        host_act([this] {
            const Waiting waiting(Transfer::State);
            size_t last = 0;
            while (done_ < begun_) {
                Room& room = finish();
                if (state_bytes_ > 0) last = exchange(room, {});
            }
            link_->came.block(stream_);
            if (state_bytes_ > 0) place_->join(last, stream_);
        });
    }

  private:
    // A buffer's layout: gradients, weights, the norm, and, if the state is on a disk, the state in whole
    // sectors.
    static constexpr size_t kPart = static_cast<size_t>(kStateChunk) * sizeof(T);
    static constexpr size_t kNormAt = 2 * kPart, kStateAt = kNormAt + kSector;
    static_assert(kStateAt % kElsewhereAlignment == 0);
    struct Room {
        char* at = nullptr;
        UpdateArrays<T> arrays = {};
        T* weights = nullptr;  // on the device, to which they are copied back
        Event arrived, came;
        std::optional<uint64_t> state_at = {};  // offset on the disk of the state that is in the buffer,
        size_t exchange = 0;                    // and the exchange that fetched it
    };
    // What the copies need. A dry run has none.
    struct Link {
        PinnedBuffer memory;
        std::vector<Room> rooms;
        OwnStream stores, fetches;
        Event asked, gone, came;  // before a unit's copies to the host; after them; after the last copy back
        explicit Link(const State<T>& state) : memory(pinned_bytes(state)), rooms(rooms_of(state)) {
            char* at = is_on_disk(state) ? aligned_room(memory.data()) : memory.data();
            for (Room& room : rooms) room.at = std::exchange(at, at + room_bytes(state));
        }
    };
    static size_t rooms_of(const State<T>& state) { return StateRing::most_rooms(state, -1); }
    static bool is_on_disk(const State<T>& state) { return state.options.updated == Home::Disk; }
    static size_t room_bytes(const State<T>& state) {
        return kStateAt + (is_on_disk(state) ? state.chunk_bytes() : 0);
    }
    // True if an update reads the weights that it writes.
    static bool reads_weights(const StateOptions& s) {
        return std::is_same_v<T, float> || s.master != Master::Fp32;
    }

    // Starts copying a chunk's gradients, and whatever else the host needs, to a buffer.
    void begin(const State<T>& state, size_t number, UnitMemory<T> weights, UnitMemory<const T> gradients,
               const Tensor<float>& norm) {
        const StateChunk& chunk = state.chunks()[number];
        const Unit& unit = state.layout.units()[static_cast<size_t>(chunk.unit)];
        const size_t bytes = static_cast<size_t>(chunk.count) * sizeof(T);
        const bool gradients_go = !gradients.on_host;
        const bool weights_go = !weights.on_host && reads_weights(state.options);
        if (arena_.rehearsing()) {
            const size_t to_host = sizeof(float) + (gradients_go ? bytes : 0) + (weights_go ? bytes : 0);
            if (noted_.size() == rooms_of(state)) note_finish();
            const int read = state_bytes_ > 0 ? note_state(Way::DiskRead) : 0;
            const UpdateArrays<T> arrays = arrays_of_chunk<T>(state, unit, chunk, nullptr, nullptr, nullptr);
            last_to_host_ = note(Way::ToHost, static_cast<double>(to_host));
            noted_.push_back({read, note(Way::HostUpdate, update_bytes(arrays))});
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
        const uint64_t state_at = uint64_t{number} * state.chunk_bytes();
        if (state_bytes_ > 0) room.exchange = exchange(room, state_at);
        char* const state_here = state_bytes_ > 0 ? room.at + kStateAt : place_->address(state_at);
        room.arrays = arrays_of_chunk<T>(state, unit, chunk, state_here, weights.at, gradients.at);
        room.weights = weights.on_host ? nullptr : room.arrays.weights;
        if (gradients_go) move_async(Way::ToHost, gradients_here, room.arrays.gradients, bytes, stores);
        if (weights_go) move_async(Way::ToHost, weights_here, room.weights, bytes, stores);
        if (gradients_go) room.arrays.gradients = gradients_here;
        if (!weights.on_host) room.arrays.weights = weights_here;
        move_async(Way::ToHost, room.at + kNormAt, norm.data(), sizeof(float), stores);
        room.arrived.record(stores);
    }
    // Updates the first chunk that is not done, and returns its buffer.
    Room& finish() {
        Room& room = link_->rooms[done_++ % link_->rooms.size()];
        room.arrived.wait();
        if (state_bytes_ > 0) place_->join(room.exchange, stream_);
        count_moved(Way::HostUpdate, static_cast<size_t>(update_bytes(room.arrays)));
        update_on_host(&room.arrays, &factors_, *reinterpret_cast<const float*>(room.at + kNormAt));
        if (!room.weights) return room;
        const size_t bytes = static_cast<size_t>(room.arrays.n) * sizeof(T);
        move_async(Way::FromHost, room.weights, room.arrays.weights, bytes, link_->fetches.get());
        room.came.record(link_->fetches.get());
        link_->came.record(link_->fetches.get());
        return room;
    }
    // Starts writing the updated state in a buffer, if any, back to the disk, and then reading the state at
    // offset `from`, if given. Returns the number for join().
    size_t exchange(Room& room, std::optional<uint64_t> from) {
        const std::optional<uint64_t> to = std::exchange(room.state_at, from);
        return place_->exchange(room.at + kStateAt, state_bytes_, to, from, stream_);
    }

    // In a dry run: records that a transfer starts, and returns its number.
    int note(Way way, double bytes) {
        last_ = note_transfer({.of = Transfer::State,
                               .waits = false,
                               .way = way,
                               .bytes = bytes,
                               .stays_with_host = is_disks(way)});
        return last_;
    }
    int note_state(Way way) { return note(way, static_cast<double>(state_bytes_)); }
    // In a dry run: records what finish() does, and that the chunk's state is written back.
    void note_finish() {
        const Noted chunk = noted_.front();
        noted_.pop_front();
        if (state_bytes_ > 0) note_wait(Transfer::State, chunk.read);
        note_wait(Transfer::State, chunk.update);
        if (state_bytes_ > 0) note_state(Way::DiskWrite);
    }
    // In a dry run: records what give_back() does.
    void note_end() {
        const int last = last_;
        if (state_bytes_ == 0) noted_.erase(noted_.begin(), noted_.end() - 1);  // the last ends last
        while (!noted_.empty()) note_finish();
        note_wait(Transfer::State, last);
        if (state_bytes_ > 0) note_wait(Transfer::State, last_);
    }

    Arena& arena_;
    const Stream& stream_;
    Elsewhere* place_ = nullptr;
    UpdateFactors factors_ = {};
    std::unique_ptr<Link> link_;
    bool updates_under_way_ = false;
    size_t begun_ = 0, done_ = 0;  // chunks
    size_t state_bytes_ = 0;       // of a chunk's state if that is on a disk, else 0
    // In a dry run, the numbers of transfers: the last, the last to the host, and those of chunks in buffers.
    struct Noted {
        int read, update;
    };
    int last_ = 0, last_to_host_ = 0;
    std::deque<Noted> noted_;
};
