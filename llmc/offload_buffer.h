// offload_buffer.h - a buffer in the arena whose contents are offloaded and fetched again, piece by piece
// (offload_inputs.h, offload_keys.h). One exchange is under way at a time; until it is joined, the buffer
// must not be used.
#pragma once

#include <optional>
#include <utility>

#include "llmc/arena.h"
#include "llmc/graph.h"
#include "llmc/offload_storage.h"
#include "llmc/work.h"

// Where offloaded activations are stored: in host memory beside a GPU, on a CPU in a file.
constexpr Placement kActivationPlacement = kHostIsDevice ? Placement::Disk : Placement::Host;

class OffloadBuffer {
  public:
    OffloadBuffer(Arena& arena, const Stream& stream, Transfer::Of of)
        : arena_(arena), stream_(stream), of_(of) {}

    // The bytes that a piece of `bytes` bytes takes where it is stored, and in the buffer.
    static size_t piece_bytes(size_t bytes) { return whole_sectors(bytes); }
    // Takes the buffer, until release(), for pieces of `bytes` bytes that are stored in `place`, which may
    // be null in a dry run.
    void take(const char* name, size_t bytes, OffloadStorage* place, const char* kind = "activation") {
        bytes_ = piece_bytes(bytes);
        place_ = place;
        memory_ = arena_.take<uint8_t>(name, {static_cast<int64_t>(bytes_ + kStorageAlignment)}, kind);
    }
    void release() {
        join();
        memory_ = {};
    }
    template <class T>
    T* data() const {
        return reinterpret_cast<T*>(aligned_buffer(memory_.data()));
    }
    // Starts storing the buffer as piece `to`, and then fetching piece `from` into it; either may be absent.
    void exchange(std::optional<int64_t> to, std::optional<int64_t> from) {
        join();
        under_way_ = true;
        if (arena_.rehearsing()) {
            const auto bytes = static_cast<double>(bytes_);
            if (to) note_transfer({of_, false, route_back(kRoute), bytes});
            if (from) note_transfer({of_, false, kRoute, bytes});
            return;
        }
        const auto at = [this](std::optional<int64_t> piece) {
            return piece ? std::optional(static_cast<uint64_t>(*piece) * bytes_) : std::nullopt;
        };
        host_act([this, to = at(to), from = at(from), bytes = bytes_, buffer = data<char>()] {
            exchange_ = place_->exchange(buffer, bytes, to, from, stream_);
        });
    }
    // Work queued on the stream from here on runs after the exchange, if one is under way.
    void join() {
        if (!std::exchange(under_way_, false)) return;
        if (arena_.rehearsing()) return note_wait(of_);
        host_act([this] {
            const Waiting waiting(of_);
            place_->join(exchange_, stream_);
        });
    }

  private:
    static constexpr Route kRoute = route_from(kActivationPlacement);

    Arena& arena_;
    const Stream& stream_;
    const Transfer::Of of_;
    OffloadStorage* place_ = nullptr;
    Tensor<uint8_t> memory_ = {};
    size_t bytes_ = 0;
    bool under_way_ = false;
    size_t exchange_ = 0;  // its number
};
