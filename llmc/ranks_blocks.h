// ranks_blocks.h - the weights of blocks that are divided among the ranks (--zero 3). A block is fetched like
// one from a disk (offload_blocks.h): while the blocks before it compute, its slices are gathered from all
// ranks into a buffer.
#pragma once

#include <cassert>
#include <optional>
#include <vector>

#include "llmc/offload_blocks.h"
#include "llmc/ranks_transfers.h"
#include "llmc/state.h"
#include "llmc/work.h"

// The bytes of each block in its buffer, and those that a rank sends when all gather it.
inline std::vector<BlockBytes> gathered_block_bytes(const State<floatX>& state) {
    std::vector<BlockBytes> all;
    for (int l = 0; l < state.layout.config().layers; l++) {
        const Unit& u = state.layout.units()[static_cast<size_t>(Layout::block_unit(l))];
        const auto bytes = [](int64_t elements) { return static_cast<size_t>(elements) * sizeof(floatX); };
        const auto others = static_cast<size_t>(state.options.slices.ranks - 1);
        all.emplace_back(StoredPieces::buffer_bytes(bytes(u.size)), others * bytes(state.own_slice(u).count));
    }
    return all;
}

class GatheredBlocks : public PieceSource {
  public:
    // The State has this rank's slices of the blocks' weights.
    GatheredBlocks(const State<floatX>& state, RankTransfers& transfers)
        : state_(state), transfers_(transfers) {}

    // Gathers a block into the buffer. Nothing is stored: updates change the State's slices, and the next
    // gather brings them.
    size_t start(char* buffer, [[maybe_unused]] std::optional<int> to_store, std::optional<int> layer,
                 Stream stream) override {
        assert(!to_store && layer);
        const int unit = Layout::block_unit(*layer);
        const int64_t size = state_.layout.units()[static_cast<size_t>(unit)].size;
        const Slices& slices = state_.options.slices;
        const OwnWeights<floatX> own = own_slice_of_weights(state_, unit);
        auto* const block = reinterpret_cast<floatX*>(aligned_buffer(buffer));
        const auto part = [](floatX* at, const Slice& s) {
            return Part{at, static_cast<size_t>(s.count) * sizeof(floatX)};
        };
        std::vector<Part> send, receive;
        for (int rank = 0; rank < slices.ranks; rank++) {
            const Slice theirs = slices.of(size, rank);
            send.push_back(part(own.slice, own.elements));
            receive.push_back(part(block + theirs.first, theirs));
        }
        count_moved(Route::ToRanks, static_cast<size_t>(slices.ranks - 1) * send[0].bytes);
        return transfers_.start(send, receive, stream);
    }
    void finish(size_t number, Stream stream) override { transfers_.finish(number, stream); }

  private:
    const State<floatX>& state_;
    RankTransfers& transfers_;
};
