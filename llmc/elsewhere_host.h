// elsewhere_host.h - working memory of a training in pinned host memory, beside a GPU. It has one stream for
// each direction, since a link carries data both ways at the same time at full speed.
#pragma once

#include <array>
#include <cstring>

#include "llmc/elsewhere.h"
#include "llmc/work.h"

class HostElsewhere : public Elsewhere {
  public:
    // Allocates the memory, zeroed.
    explicit HostElsewhere(size_t bytes) : memory_(bytes) { std::memset(memory_.data(), 0, bytes); }

    void read(uint64_t at, size_t bytes, void* host) const override {
        std::memcpy(host, memory_.data() + at, bytes);
    }
    void write(uint64_t at, size_t bytes, const void* host) override {
        std::memcpy(memory_.data() + at, host, bytes);
    }
    char* address(uint64_t at) const override { return memory_.data() + at; }
    size_t exchange(char* room, size_t bytes, std::optional<uint64_t> to, std::optional<uint64_t> from,
                    Stream stream) override {
        before_.record(stream);
        if (to) {
            before_.block(stores_.get());
            move_async(Way::ToHost, memory_.data() + *to, room, bytes, stores_.get());
            stored_.record(stores_.get());
            stored_.block(fetches_.get());
        } else {
            before_.block(fetches_.get());
        }
        if (from) move_async(Way::FromHost, room, memory_.data() + *from, bytes, fetches_.get());
        done_[next_ % done_.size()].record(fetches_.get());
        return next_++;
    }
    // Only the latest done_.size() exchanges have an event each. Instead of an older one, it waits for the
    // oldest of these.
    void join(size_t number, Stream stream) override {
        const size_t known = next_ < done_.size() ? number : std::max(number, next_ - done_.size());
        done_[known % done_.size()].block(stream);
    }

  private:
    PinnedBuffer memory_;
    OwnStream stores_, fetches_;  // a fetch runs after the stores that started before it
    Event before_, stored_;
    std::array<Event, 64> done_;
    size_t next_ = 0;
};
