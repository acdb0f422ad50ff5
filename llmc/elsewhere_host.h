// elsewhere_host.h - memory beside the device's in pinned host memory, beside a GPU: copied on a stream of
// its own.
#pragma once

#include <array>
#include <cstring>

#include "llmc/elsewhere.h"
#include "llmc/work.h"

class HostElsewhere : public Elsewhere {
  public:
    // Takes the memory, zeroed.
    explicit HostElsewhere(size_t bytes) : memory_(bytes) { std::memset(memory_.data(), 0, bytes); }

    void read(uint64_t at, size_t bytes, void* host) const override {
        std::memcpy(host, memory_.data() + at, bytes);
    }
    void write(uint64_t at, size_t bytes, const void* host) override {
        std::memcpy(memory_.data() + at, host, bytes);
    }
    size_t exchange(char* room, size_t bytes, std::optional<uint64_t> to, std::optional<uint64_t> from,
                    Stream stream) override {
        if (to) count_moved(Way::ToHost, bytes);
        if (from) count_moved(Way::FromHost, bytes);
        before_.record(stream);
        before_.block(copies_.get());
        if (to) copy_async(memory_.data() + *to, room, bytes, copies_.get());
        if (from) copy_async(room, memory_.data() + *from, bytes, copies_.get());
        done_[next_ % done_.size()].record(copies_.get());
        return next_++;
    }
    // Of those that are too long ago to tell apart, the next is waited for.
    void join(size_t number, Stream stream) override {
        const size_t known = next_ < done_.size() ? number : std::max(number, next_ - done_.size());
        done_[known % done_.size()].block(stream);
    }

  private:
    PinnedBuffer memory_;
    OwnStream copies_;
    Event before_;
    std::array<Event, 64> done_;
    size_t next_ = 0;
};
