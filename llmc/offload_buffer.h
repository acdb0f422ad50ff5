// offload_buffer.h - a buffer in the arena whose contents are stored outside the device and fetched again,
// piece by piece. Everything that a step streams goes through such buffers: blocks and their gradients
// (offload_blocks.h), blocks' inputs, keys and values (offload_activations.h), and optimizer
// state (offload_optimizer.h). These headers differ in the order in which they use their buffers.
#pragma once

#include <optional>
#include <utility>

#include "llmc/arena.h"
#include "llmc/graph.h"
#include "llmc/offload_storage.h"
#include "llmc/work.h"

// Where offloaded activations are stored: in host memory beside a GPU, on a CPU in a file.
constexpr Placement kActivationPlacement = kHostIsDevice ? Placement::Disk : Placement::Host;

// The kind of a buffer's transfers, and where its pieces are. `source` may be null in a dry run.
struct Pieces {
    Transfer::Of of;
    Route route;  // of fetches
    PieceSource* source;
};

// One exchange is under way at a time. Until it is joined, the buffer must not be used.
class OffloadBuffer {
  public:
    // A piece, by its number, and what is transferred of it; of what is gathered from other ranks, also what
    // is sent to other machines.
    struct Piece {
        int number;
        size_t bytes;
        size_t to_machines = 0;
    };
    // In a dry run, which of the transfers of its kind join() waits for. A dry run executes one turn of a
    // loop over chunks, so the numbers of transfers are wrong there, and join() waits for the latest one.
    enum class WaitsFor { ItsOwn, Latest };

    OffloadBuffer(Arena& arena, const Stream& stream, WaitsFor waits_for = WaitsFor::ItsOwn)
        : arena_(arena), stream_(stream), waits_for_(waits_for) {}

    // Takes the buffer, until release().
    void take(const char* name, size_t bytes, const char* kind, const Pieces& pieces) {
        pieces_ = pieces;
        memory_ = arena_.take<uint8_t>(name, {static_cast<int64_t>(bytes)}, kind);
        at_ = reinterpret_cast<char*>(memory_.data());
    }
    void release() {
        join();
        memory_ = {};
    }
    bool is_taken() const { return static_cast<bool>(memory_); }
    // The buffer's address, which stays known after release() for replays of a recording. Null in a dry run.
    char* at() const { return at_; }
    // The part of the buffer that working memory transfers.
    template <class T>
    T* aligned() const {
        return reinterpret_cast<T*>(aligned_buffer(at_));
    }

    // Starts storing the buffer as piece `to`, and then fetching piece `from` into it; either may be absent.
    // An exchange of the buffer that is under way is joined first.
    void exchange(std::optional<Piece> to, std::optional<Piece> from) {
        join();
        if (!to && !from) return;
        under_way_ = true;
        if (arena_.rehearsing()) {
            if (to) note(route_back(pieces_.route), to->bytes);
            if (from && from->to_machines > 0) note(Route::ToMachines, from->to_machines);
            if (from) note(pieces_.route, from->bytes);
            return;
        }
        const auto number = [](std::optional<Piece> piece) {
            return piece ? std::optional(piece->number) : std::nullopt;
        };
        host_act([this, source = pieces_.source, to = number(to), from = number(from), buffer = at_] {
            exchange_ = source->start(buffer, to, from, stream_);
        });
    }
    // Work queued on the stream from here on runs after the exchange, if one is under way.
    void join() {
        if (!std::exchange(under_way_, false)) return;
        if (arena_.rehearsing()) return note_wait(pieces_.of, waits_for_ == WaitsFor::ItsOwn ? noted_ : -1);
        host_act([this, source = pieces_.source, of = pieces_.of] {
            const Waiting waiting(of);
            source->finish(exchange_, stream_);
        });
    }

  private:
    void note(Route route, size_t bytes) {
        noted_ = note_transfer({pieces_.of, false, route, static_cast<double>(bytes)});
    }

    Arena& arena_;
    const Stream& stream_;
    const WaitsFor waits_for_;
    Pieces pieces_ = {};
    Tensor<uint8_t> memory_ = {};
    char* at_ = nullptr;
    bool under_way_ = false;
    size_t exchange_ = 0;  // the number of its latest exchange; each replay of a recording sets it anew
    int noted_ = -1;       // the number of its latest transfer, in a dry run
};
