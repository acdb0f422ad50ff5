// residence_trained.h - streams blocks of a model that is trained, or their gradients, from memory outside
// the device (elsewhere.h): a block that was changed is stored there before its buffer is reused.
#pragma once

#include <optional>

#include "llmc/elsewhere.h"
#include "llmc/residence.h"

class TrainedResidence : public Residence {
  public:
    // The bytes of a buffer for a block, including what aligning it takes.
    static size_t room_bytes(size_t block_bytes) { return block_bytes + kElsewhereAlignment; }

    // The blocks are in `place`, one after another.
    TrainedResidence(Elsewhere& place, size_t block_bytes) : place_(place), block_bytes_(block_bytes) {}

    size_t start(int loan, char* room, Stream stream, int changed) override {
        const auto at = [&](int number) -> std::optional<uint64_t> {
            if (number == kNoLoan) return std::nullopt;
            return static_cast<uint64_t>(number) * block_bytes_;
        };
        return place_.exchange(aligned_room(room), block_bytes_, at(changed), at(loan), stream);
    }
    void finish(size_t number, Stream stream) override { place_.join(number, stream); }

  private:
    Elsewhere& place_;
    const size_t block_bytes_;
};
