// ranks_blocks.h - the weights of blocks that are divided among the ranks (--zero 3): blocks that are
// trained, or the matrices of a frozen model's. A block is fetched like one from a disk (offload_blocks.h):
// while the blocks before it compute, its slices are gathered from all ranks into a buffer.
#pragma once

#include <cassert>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "llmc/offload_blocks.h"
#include "llmc/quant_weights.h"
#include "llmc/ranks_transfers.h"
#include "llmc/slices.h"
#include "llmc/state.h"
#include "llmc/work.h"

// The block `layer` of a State that has this rank's slices of the blocks' weights.
template <class T>
DividedBytes divided_block(const State<T>& state, int layer) {
    const int unit = Layout::block_unit(layer);
    const OwnWeights<T> own = own_slice_of_weights(state, unit);
    const int64_t size = state.layout.units()[static_cast<size_t>(unit)].size;
    return {size * static_cast<int64_t>(sizeof(T)), state.options.slices.in_bytes(sizeof(T)),
            reinterpret_cast<char*>(own.slice)};
}

// The blocks of a model: of a frozen one its matrices, if they are not null; else those of its State.
class DividedBlocks {
  public:
    DividedBlocks(const State<floatX>& state, const QuantizedWeights* matrices)
        : state_(state), matrices_(matrices) {}

    DividedBytes block(int layer) const {
        return matrices_ ? matrices_->divided_block(layer) : divided_block(state_, layer);
    }
    // The steps in which all ranks gather a block into a buffer, where it begins at `at`.
    std::vector<ExchangeStep> steps(int layer, char* at) const {
        const DividedBytes b = block(layer);
        return gather_steps(b.slices, {b.own, b.own_bytes()}, [&](int rank) -> Part {
            const Slice theirs = b.slices.of(b.all, rank);
            return {at + theirs.first, static_cast<size_t>(theirs.count)};
        });
    }
    // The bytes of each block in its buffer, and those that a rank sends when all gather it.
    std::vector<BlockBytes> bytes() const {
        std::vector<BlockBytes> all;
        for (int l = 0; l < state_.layout.config().layers; l++) {
            const DividedBytes b = block(l);
            const auto size = static_cast<size_t>(b.all);
            const SentBytes sent = sent_bytes(steps(l, nullptr), b.slices);
            all.emplace_back(matrices_ ? size : StoredPieces::buffer_bytes(size), sent.to_ranks,
                             sent.to_machines);
        }
        return all;
    }
    // Where a block begins in its buffer: where Weights looks for it.
    char* in_buffer(char* buffer) const { return matrices_ ? buffer : aligned_buffer(buffer); }

  private:
    const State<floatX>& state_;
    const QuantizedWeights* const matrices_;
};

class GatheredBlocks : public PieceSource {
  public:
    GatheredBlocks(const DividedBlocks& blocks, RankTransfers& transfers)
        : blocks_(blocks), transfers_(transfers) {}

    // Gathers a block into the buffer. Nothing is stored: updates change the rank's own slices, and the next
    // gather brings them.
    size_t start(char* buffer, [[maybe_unused]] std::optional<int> to_store, std::optional<int> layer,
                 Stream stream) override {
        assert(!to_store && layer);
        const auto steps = blocks_.steps(*layer, blocks_.in_buffer(buffer));
        count_sent(sent_bytes(steps, blocks_.block(*layer).slices));
        return transfers_.start(steps, stream);
    }
    void finish(size_t number, Stream stream) override { transfers_.finish(number, stream); }

  private:
    const DividedBlocks blocks_;
    RankTransfers& transfers_;
};
