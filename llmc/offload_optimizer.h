// offload_optimizer.h - updates of optimizer state that is not on the device. Either its chunks are streamed
// to the device, updated there and stored again; or the host's cores update it where it is (--offload
// updates=host). updates.h decides which; read this when optimizer state is in host memory or on a disk.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "llmc/arena.h"
#include "llmc/graph.h"
#include "llmc/offload_buffer.h"
#include "llmc/offload_storage.h"
#include "llmc/optimizer.cuh"
#include "llmc/state.h"
#include "llmc/work.h"

// ---- updates on the device, chunk by chunk
//
// Streams optimizer state that only updates need and that is not on the device: its chunks are fetched to a
// ring of buffers in the arena, updated there and stored again, while others are under way.

class StateRing {
  public:
    StateRing(Arena& arena, const Stream& stream) : arena_(arena), stream_(stream) {}

    // Sets where the chunks are; null in a dry run.
    void use(PieceSource* chunks) { chunks_ = chunks; }

    // The most buffers that there can be if `wanted` are asked for; negative: as many as a block has chunks.
    static size_t most_buffers(const State<floatX>& state, int wanted) {
        if (wanted < 0) return std::max<size_t>(1, state.most_chunks_of(1));  // a soft prompt's block has 0
        size_t all = 0;
        for (size_t unit = 0; unit < state.layout.units().size(); unit++)
            all += state.most_chunks_of(static_cast<int>(unit));
        return std::min(static_cast<size_t>(wanted), all);
    }
    // Takes the buffers, until release(), for an update of these units of a state in this order, and starts
    // fetching the first chunks.
    void take(const State<floatX>& state, const std::vector<int>& units, int wanted) {
        const auto pass = std::make_shared<Pass>(Pass{state.chunk_bytes()});
        size_t most = 0;
        for (const int unit : units) {
            most += state.most_chunks_of(unit);
            const auto of_unit = state.chunks_of(unit);
            for (size_t c = of_unit.first; c < of_unit.end; c++) pass->order.push_back(c);
        }
        const Pieces pieces = {Transfer::State, route_from(state.options.updated), chunks_};
        for (size_t i = 0; i < std::min(most_buffers(state, wanted), most); i++)
            pass->buffers.emplace_back(arena_, stream_)
                .take("streamed_state", aligned_buffer_bytes(pass->bytes), "optimizer_state", pieces);
        pass_ = pass;
        if (pass->buffers.empty()) return;
        host_act([pass] {
            pass->next = 0;
            for (size_t i = 0; i < pass->buffers.size(); i++) pass->buffers[i].exchange({}, pass->piece(i));
        });
    }
    // Calls update(chunk, buffer) for each chunk of `unit`, the next one in that order. Starts storing each
    // chunk then, and fetching the next one into its buffer.
    template <class Update>
    void update(const State<floatX>& state, int unit, Update update) {
        host_act([&state, unit, pass = pass_, update = std::move(update)] {
            const size_t end = pass->next + state.chunks_of(unit).count();
            for (size_t& i = pass->next; i < end; i++) {
                const StateChunk& chunk = state.chunks()[pass->order[i]];
                assert(chunk.unit == unit);
                OffloadBuffer& buffer = pass->buffers[i % pass->buffers.size()];
                buffer.join();
                update(chunk, buffer.aligned<char>());
                buffer.exchange(pass->piece(i), pass->piece(i + pass->buffers.size()));
            }
        });
    }
    // Waits for all transfers and releases the buffers.
    void release() {
        if (!pass_ || pass_->buffers.empty() || !pass_->buffers[0].is_taken()) return;
        host_act([pass = pass_] {
            for (OffloadBuffer& buffer : pass->buffers) buffer.join();
        });
        for (OffloadBuffer& buffer : pass_->buffers) buffer.release();
    }

  private:
    // An update of units, from take() to release(). A recording keeps its own.
    struct Pass {
        size_t bytes;                    // of a chunk
        std::vector<size_t> order = {};  // of the chunks
        std::vector<OffloadBuffer> buffers = {};
        size_t next = 0;  // position in the order of the chunk to be updated next

        // The chunk at position i of the order, if there is one.
        std::optional<OffloadBuffer::Piece> piece(size_t i) const {
            if (i >= order.size()) return std::nullopt;
            return {{static_cast<int>(order[i]), bytes}};
        }
    };

    Arena& arena_;
    const Stream& stream_;
    PieceSource* chunks_ = nullptr;
    std::shared_ptr<Pass> pass_;  // the latest
};

// ---- updates by the host's cores
//
// Updates by the host's cores (--offload updates=host), for optimizer state in host memory beside a GPU or on
// its disk. Only gradients are copied to the host (and weights, if the update reads them), and weights are
// copied back. An update on the GPU would move the whole state across the link twice.
//
// Chunks of gradients are copied to a ring of pinned buffers, as many as a block has chunks. The host updates
// a chunk when its buffer is needed for another one, or at the end; by then the GPU computes the next block.
// Weights or gradients that are in host memory already stay there. State on a disk is read into the chunk's
// buffer while its gradients are copied, and written back as soon as it is updated.

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

class HostUpdates {
  public:
    HostUpdates(Arena& arena, const Stream& stream) : arena_(arena), stream_(stream) {}

    // The pinned memory of the buffers, in bytes.
    static size_t pinned_bytes(const State<floatX>& state) {
        return buffers_of(state) * buffer_bytes(state) + (is_on_disk(state) ? kStorageAlignment : 0);
    }
    // Allocates it. `place` has the state's chunks; a rank may have none, and then it is null. If it is on a
    // disk, it must not be staged, so that its finish() makes the host wait; and it must end before this
    // does, since its transfers use the buffers.
    void allocate(const State<floatX>& state, OffloadStorage* place) {
        place_ = place;
        link_ = std::make_unique<Link>(state);
    }
    // Sets the optimizer step of the updates from here on.
    void use(const OptimizerStep& step) { factors_ = factors_of(step); }

    // Starts the update of a unit, which ends at the latest in release(). `norm` (1) is on the device. Work
    // queued on the stream from here on may overwrite the unit's gradients on the device.
    void update(const State<floatX>& state, int unit, UnitMemory<floatX> weights,
                UnitMemory<const floatX> gradients, const Tensor<float>& norm) {
        const auto of_unit = state.chunks_of(unit);
        if (of_unit.first == of_unit.end) return;
        updates_under_way_ = true;
        state_bytes_ = is_on_disk(state) ? state.chunk_bytes() : 0;
        host_act([this, &state, of_unit, weights, gradients, norm = norm.view()] {
            const Waiting waiting(Transfer::State);  // for buffers, and for the copies to the host
            if (!arena_.rehearsing()) link_->asked.record(stream_), link_->asked.block(link_->stores.get());
            for (size_t c = of_unit.first; c < of_unit.end; c++) begin(state, c, weights, gradients, norm);
            if (arena_.rehearsing()) return note_wait(Transfer::State, last_to_host_);
            link_->gone.record(link_->stores.get());
            link_->gone.block(stream_);
        });
    }
    // Completes all updates under way. Work queued on the stream from here on finds the new weights.
    void release() {
        if (!std::exchange(updates_under_way_, false)) return;
        if (arena_.rehearsing()) return note_end();
        host_act([this] {
            const Waiting waiting(Transfer::State);
            size_t last = 0;
            while (done_ < begun_) {
                Buffer& buffer = finish();
                if (state_bytes_ > 0) last = transfer_state(buffer, {});
            }
            link_->came.block(stream_);
            if (state_bytes_ > 0) place_->finish(last, stream_);
        });
    }

  private:
    // A buffer's layout: gradients, weights, the norm, and, if the state is on a disk, the state in whole
    // sectors.
    static constexpr size_t kPart = static_cast<size_t>(kStateChunk) * sizeof(floatX);
    static constexpr size_t kNormAt = 2 * kPart, kStateAt = kNormAt + kSector;
    static_assert(kStateAt % kStorageAlignment == 0);
    struct Buffer {
        char* at = nullptr;
        UpdateArrays<floatX> arrays = {};
        floatX* weights = nullptr;  // on the device, to which they are copied back
        Event arrived, came;
        std::optional<int> chunk = {};  // whose state from the disk is in the buffer,
        size_t transfer = 0;            // and the transfer that fetched it
    };
    // What the copies need. A dry run has none.
    struct Link {
        PinnedBuffer memory;
        std::vector<Buffer> buffers;
        OwnStream stores, fetches;
        Event asked, gone, came;  // before a unit's copies to the host; after them; after the last copy back
        explicit Link(const State<floatX>& state) : memory(pinned_bytes(state)), buffers(buffers_of(state)) {
            char* at = is_on_disk(state) ? aligned_buffer(memory.data()) : memory.data();
            for (Buffer& buffer : buffers) buffer.at = std::exchange(at, at + buffer_bytes(state));
        }
    };
    static size_t buffers_of(const State<floatX>& state) { return StateRing::most_buffers(state, -1); }
    static bool is_on_disk(const State<floatX>& state) { return state.options.updated == Placement::Disk; }
    static size_t buffer_bytes(const State<floatX>& state) {
        return kStateAt + (is_on_disk(state) ? state.chunk_bytes() : 0);
    }
    // True if an update reads the weights that it writes.
    static bool reads_weights(const StateOptions& s) {
        return std::is_same_v<floatX, float> || s.master != Master::Fp32;
    }

    // Starts copying a chunk's gradients, and whatever else the host needs, to a buffer.
    void begin(const State<floatX>& state, size_t number, UnitMemory<floatX> weights,
               UnitMemory<const floatX> gradients, const Tensor<float>& norm) {
        const StateChunk& chunk = state.chunks()[number];
        const Unit& unit = state.layout.units()[static_cast<size_t>(chunk.unit)];
        const size_t bytes = static_cast<size_t>(chunk.count) * sizeof(floatX);
        const bool gradients_go = !gradients.on_host;
        const bool weights_go = !weights.on_host && reads_weights(state.options);
        if (arena_.rehearsing()) {
            const size_t to_host = sizeof(float) + (gradients_go ? bytes : 0) + (weights_go ? bytes : 0);
            if (noted_.size() == buffers_of(state)) note_finish();
            const int read = state_bytes_ > 0 ? note_state(Route::DiskRead) : 0;
            const UpdateArrays<floatX> arrays =
                arrays_of_chunk<floatX>(state, unit, chunk, nullptr, nullptr, nullptr);
            last_to_host_ = note(Route::ToHost, static_cast<double>(to_host));
            noted_.push_back({read, note(Route::HostUpdate, update_bytes(arrays))});
            if (!weights.on_host) note(Route::FromHost, static_cast<double>(bytes));
            return;
        }
        std::vector<Buffer>& buffers = link_->buffers;
        const Stream stores = link_->stores.get();
        if (begun_ - done_ == buffers.size()) finish();
        Buffer& buffer = buffers[begun_++ % buffers.size()];
        buffer.came.wait();
        floatX* const gradients_here = reinterpret_cast<floatX*>(buffer.at);
        floatX* const weights_here = reinterpret_cast<floatX*>(buffer.at + kPart);
        const auto piece = static_cast<int>(number);
        if (state_bytes_ > 0) buffer.transfer = transfer_state(buffer, piece);
        char* const state_here = state_bytes_ > 0 ? buffer.at + kStateAt : place_->address(piece);
        buffer.arrays = arrays_of_chunk<floatX>(state, unit, chunk, state_here, weights.at, gradients.at);
        buffer.weights = weights.on_host ? nullptr : buffer.arrays.weights;
        if (gradients_go) move_async(Route::ToHost, gradients_here, buffer.arrays.gradients, bytes, stores);
        if (weights_go) move_async(Route::ToHost, weights_here, buffer.weights, bytes, stores);
        if (gradients_go) buffer.arrays.gradients = gradients_here;
        if (!weights.on_host) buffer.arrays.weights = weights_here;
        move_async(Route::ToHost, buffer.at + kNormAt, norm.data(), sizeof(float), stores);
        buffer.arrived.record(stores);
    }
    // Updates the first chunk that is not done, and returns its buffer.
    Buffer& finish() {
        Buffer& buffer = link_->buffers[done_++ % link_->buffers.size()];
        buffer.arrived.wait();
        if (state_bytes_ > 0) place_->finish(buffer.transfer, stream_);
        count_moved(Route::HostUpdate, static_cast<size_t>(update_bytes(buffer.arrays)));
        update_on_host(&buffer.arrays, &factors_, *reinterpret_cast<const float*>(buffer.at + kNormAt));
        if (!buffer.weights) return buffer;
        const size_t bytes = static_cast<size_t>(buffer.arrays.n) * sizeof(floatX);
        move_async(Route::FromHost, buffer.weights, buffer.arrays.weights, bytes, link_->fetches.get());
        buffer.came.record(link_->fetches.get());
        link_->came.record(link_->fetches.get());
        return buffer;
    }
    // Starts writing the updated state in a buffer, if any, back to the disk, and then reading that of chunk
    // `from`, if given. Returns the number for finish().
    size_t transfer_state(Buffer& buffer, std::optional<int> from) {
        const std::optional<int> to = std::exchange(buffer.chunk, from);
        return place_->start(buffer.at + kStateAt, to, from, stream_);
    }

    // In a dry run: records that a transfer starts, and returns its number.
    int note(Route route, double bytes) {
        last_ = note_transfer({.of = Transfer::State,
                               .waits = false,
                               .route = route,
                               .bytes = bytes,
                               .stays_with_host = is_disks(route)});
        return last_;
    }
    int note_state(Route route) { return note(route, static_cast<double>(state_bytes_)); }
    // In a dry run: records what finish() does, and that the chunk's state is written back.
    void note_finish() {
        const Noted chunk = noted_.front();
        noted_.pop_front();
        if (state_bytes_ > 0) note_wait(Transfer::State, chunk.read);
        note_wait(Transfer::State, chunk.update);
        if (state_bytes_ > 0) note_state(Route::DiskWrite);
    }
    // In a dry run: records what release() does.
    void note_end() {
        const int last = last_;
        if (state_bytes_ == 0) noted_.erase(noted_.begin(), noted_.end() - 1);  // the last ends last
        while (!noted_.empty()) note_finish();
        note_wait(Transfer::State, last);
        if (state_bytes_ > 0) note_wait(Transfer::State, last_);
    }

    Arena& arena_;
    const Stream& stream_;
    OffloadStorage* place_ = nullptr;
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
