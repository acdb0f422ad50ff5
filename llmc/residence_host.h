// residence_host.h - streams a frozen model's blocks from pinned host memory beside a GPU: each is copied to
// the device, on a separate stream, whenever it is needed.
#pragma once

#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "llmc/residence.h"

class HostResidence : public Residence {
  public:
    // For `rooms` buffers. bytes_of(loan) returns a loan's bytes in pinned memory.
    HostResidence(size_t rooms, std::function<std::span<const char>(int loan)> bytes_of)
        : bytes_of_(std::move(bytes_of)), arrived_(rooms) {}

    size_t start(int loan, char* room, Stream stream, [[maybe_unused]] int changed) override {
        assert(changed == kNoLoan);
        const std::span<const char> from = bytes_of_(loan);
        free_.record(stream);
        free_.block(copies_.get());
        move_async(Way::FromHost, room, from.data(), from.size(), copies_.get());
        arrived_[begun_ % arrived_.size()].record(copies_.get());
        return begun_++;
    }
    void finish(size_t number, Stream stream) override { arrived_[number % arrived_.size()].block(stream); }

  private:
    std::function<std::span<const char>(int)> bytes_of_;
    OwnStream copies_;
    Event free_;
    std::vector<Event> arrived_;
    size_t begun_ = 0;
};
