// gradients.h - where the gradients of a whole unit are, from backward until the update: in the State;
// streamed from host memory or files; or, if each unit is updated as soon as its gradients are complete, in
// the arena until then.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "llmc/offload_blocks.h"
#include "llmc/state.h"
#include "llmc/tensor.h"

// One pass of a training step: a micro-batch, or several together (--by-block), go forward and back.
struct StepPass {
    bool accumulate = false;   // adds to the gradients of the passes before it; the first overwrites
    bool sums_squares = true;  // of each unit's gradients, for their norm
    bool is_last = true;       // completes the gradients of the step; several ranks then exchange them
};

class Gradients {
  public:
    // A unit's gradients `all`. If they are in the arena, `buffer` owns their memory.
    struct OfUnit {
        TensorX buffer, all;
    };
    // Called with the number of a unit and its gradients, as soon as these are complete. It may take the
    // buffer, to keep them longer.
    using OnComplete = std::function<void(int unit, OfUnit& gradients)>;

    Gradients(Arena& arena, const Stream& stream, const State<floatX>& trained)
        : arena_(arena), stream_(stream), trained_(trained), streamed_(arena, stream, kStreamedGradients) {}
    Gradients(const Gradients&) = delete;

    void on_complete(OnComplete call) { on_complete_ = std::move(call); }
    // Says where streamed blocks' gradients are, the bytes of each, and how many are prefetched.
    void stream_blocks_from(PieceSource* source, std::vector<size_t> bytes, int prefetch) {
        streamed_.stream_from(route_from(trained_.options.block_gradients), std::move(bytes), prefetch,
                              source);
    }
    bool streams_blocks() const { return trained_.options.streams_block_gradients(); }

    // Begins a backward pass, which takes the blocks from the last to the first. If it adds to the gradients
    // that are there, these are prefetched.
    void begin_backward(const StepPass& pass) {
        if (!streams_blocks()) return;
        const auto contents =
            pass.accumulate ? BlockStream::Contents::Fetched : BlockStream::Contents::Overwritten;
        streamed_.expect(numbers_in_order(trained_.layout.blocks(), From::Last), contents);
    }
    // A unit's gradients, for backward to write or add to. Those of a streamed block are stored before their
    // buffer is reused.
    OfUnit take(int unit, bool accumulate) {
        OfUnit g{{}, of(unit)};
        if (g.all.size() == 0) return g;
        if (trained_.layout.is_block(unit) && streams_blocks()) streamed_.change();
        const bool are_kept = trained_.options.gradients && !trained_.options.slices_gradients;
        if (on_complete_ && !are_kept) {
            g.buffer = arena_.take<floatX>("unit_gradients", g.all.shape(), "parameter_gradient");
            g.all = g.buffer.view();
        }
        if (!accumulate) zero_added(unit, g.all);
        return g;
    }
    // The unit's gradients of this backward pass are complete.
    void complete(int unit, OfUnit& g) {
        if (on_complete_ && g.all.size() > 0) on_complete_(unit, g);
        g.buffer.drop();
    }
    void end_backward() { release(); }

    // Begins an update of all units in order: prefetches the first blocks' gradients.
    void expect_update() {
        if (streams_blocks()) streamed_.expect(numbers_in_order(trained_.layout.blocks()));
    }
    // A unit's gradients. A streamed block's are on the device until another block's are asked for.
    TensorX of(int unit) {
        TensorX gradients = unit_of(trained_, StatePart::Gradients, unit);
        if (!trained_.layout.is_block(unit) || !streams_blocks()) return gradients;
        char* const buffer = streamed_.fetch(trained_.layout.block_of(Layout::layer_of(unit)));
        return TensorX(reinterpret_cast<floatX*>(aligned_buffer(buffer)), gradients.shape());
    }
    void release() { streamed_.release(); }

  private:
    // Zeroes those gradients that even a step's first backward adds to, and the padding between tensors. It
    // leaves the matrices of linear layers, because the first product overwrites them; code that adds
    // something else to a matrix zeroes it itself.
    void zero_added(int unit, const TensorX& gradients) {
        const int64_t unit_start = trained_.layout.units()[static_cast<size_t>(unit)].offset;
        int64_t from = 0, end = 0;
        const auto flush = [&] {
            if (end > from)
                device_fill(gradients.at(from), 0, static_cast<size_t>(end - from) * sizeof(floatX), stream_);
        };
        for (const Parameter& p : trained_.layout.parameters_of(unit)) {
            const int64_t start = p.offset - unit_start + (p.memory.count == 2 ? p.memory.size() : 0);
            if (start != end) flush(), from = start;
            end = p.end() - unit_start;
        }
        flush();
    }

    Arena& arena_;
    const Stream& stream_;
    const State<floatX>& trained_;
    OnComplete on_complete_;
    BlockStream streamed_;
};
