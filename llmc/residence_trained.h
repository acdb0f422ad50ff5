// residence_trained.h - blocks of a model that is trained, in the memory beside the device that it works in:
// a block that was updated goes back there before its room is used again.
#pragma once

#include <optional>

#include "llmc/elsewhere.h"
#include "llmc/residence.h"

class TrainedResidence : public Residence {
  public:
    // What a room takes for a block of that size.
    static size_t room_bytes(size_t block_bytes) { return block_bytes + kElsewhereAlignment; }

    // The blocks lie in `place`, one after another.
    TrainedResidence(Elsewhere& place, size_t block_bytes) : place_(place), block_bytes_(block_bytes) {}

    size_t start(int loan, char* room, Stream stream, int changed) override {
        const auto at = [&](int block) -> std::optional<uint64_t> {
            if (block == kNoLoan) return std::nullopt;
            return static_cast<uint64_t>(block) * block_bytes_;
        };
        return place_.exchange(aligned_room(room), block_bytes_, at(changed), at(loan), stream);
    }
    void finish(size_t number, Stream stream) override { place_.join(number, stream); }

  private:
    Elsewhere& place_;
    const size_t block_bytes_;
};
