// weights.h - the weights that a step computes with: views of tensors on the device, wherever a block is
// kept.
//
// A block in host memory, in files, or in slices on several devices is streamed: expect_blocks() prefetches
// the blocks in order, and fetch() waits for the one it is asked for. With all blocks on the device both cost
// nothing. Matrices of a frozen model may be quantized; linear.h dequantizes them where a product reads them.
#pragma once

#include <array>
#include <cassert>
#include <functional>
#include <utility>
#include <vector>

#include "llmc/offload_blocks.h"
#include "llmc/offload_embeddings.h"
#include "llmc/quant_weights.h"
#include "llmc/rows.h"
#include "llmc/state.h"
#include "llmc/tensor.h"

// Weights of a frozen model that its State does not have. A pointer is null where the State has them.
struct FrozenWeights {
    const QuantizedWeights* matrices;       // quantized or streamed matrices of the linear layers
    const QuantizedWeights* head;           // quantized; it may be the token embedding too
    const OffloadedEmbeddings* embeddings;  // token embedding and head in files or in host memory
};

// A block's linear layers, with the field of each one's matrix.
inline std::array<std::pair<Linear<floatX>*, Field>, 4> linears(Block<floatX>& block) {
    return {{{&block.qkv, Field::QkvWeight},
             {&block.projection, Field::AttentionWeight},
             {&block.up, Field::UpWeight},
             {&block.down, Field::DownWeight}}};
}

class Weights {
  public:
    Embeddings<floatX> embeddings;
    Head<floatX> head;  // a tied head's matrix is the token embedding

    // `trained` is what is trained: the model itself, or the adapter of a frozen model.
    Weights(Arena& arena, const Stream& stream, const State<floatX>& model, const FrozenWeights& frozen,
            const State<floatX>& trained)
        : model_(model), trained_(trained), frozen_(frozen), streamed_(arena, stream, kStreamedBlocks) {
        bind();
    }
    Weights(const Weights&) = delete;

    // Points the views at the States' memory. Call it again after that memory was allocated.
    void bind() {
        const Layout& layout = model_.layout;
        const auto unit = [&](int number) { return unit_of(model_, StatePart::Weights, number).data(); };
        embeddings = layout.embeddings(unit(layout.embeddings_unit()));
        head = layout.head(unit(layout.head_unit()));
        const bool has_head = !frozen_.head && !frozen_.embeddings;
        if (layout.config().tied && has_head) head.logits.weight = embeddings.token.view();
        blocks_.clear();
        for (int l = 0; l < layout.config().layers; l++)
            blocks_.push_back(layout.block(unit(Layout::block_unit(l)), l));
        for (int l = layout.stage().first; frozen_.matrices && l < layout.stage().end; l++)
            bind_matrices(l, streams_blocks() ? nullptr : frozen_.matrices->block(layout.block_of(l)).data());
        if (is_frozen()) bind_adapter();
    }
    // Says where streamed blocks come from, the bytes of each, and how many are prefetched.
    template <class Bytes>
    void stream_blocks_from(PieceSource* source, Route route, const std::vector<Bytes>& bytes, int prefetch) {
        streamed_.stream_from(route, bytes, prefetch, source);
    }

    // Says what waits until the other ranks' updates of a unit have arrived.
    void wait_for_ranks_with(std::function<void(int unit)> wait) { wait_for_ranks_ = std::move(wait); }
    // A step's forward pass calls it before it fetches or uses a unit's weights.
    void wait_for_ranks(int unit) const {
        if (wait_for_ranks_) wait_for_ranks_(unit);
    }

    // True if the model is frozen, and only an adapter is trained.
    bool is_frozen() const { return &trained_ != &model_; }
    // True if backward reads the input of this layer: for the gradient of its matrix, or of its adapter.
    bool backward_reads_input(const Linear<floatX>& w) const { return !is_frozen() || w.adapter; }
    bool streams_trained_blocks() const {
        return model_.options.streams_blocks() || model_.options.slices_blocks;
    }
    bool streams_blocks() const {
        return streams_trained_blocks() || (frozen_.matrices && frozen_.matrices->is_streamed());
    }

    // Begins a sweep over the blocks, from the first to the last or for backward from the last to the first,
    // and prefetches the first of the sweep.
    void expect_blocks() { begin_sweep(From::First); }
    void expect_blocks_for_backward() { begin_sweep(From::Last); }
    // Waits for a block's weights, if they are streamed, and lets the next ones of the sweep be prefetched.
    // Call it in the order of the sweep, or again for the same block. The block's views point into a buffer
    // until another block is fetched.
    void fetch(int layer) {
        if (!streams_blocks()) return;
        char* const buffer = streamed_.fetch(model_.layout.block_of(layer));
        if (bound_ == std::pair(layer, buffer)) return;
        bound_ = {layer, buffer};
        if (streams_trained_blocks())
            blocks_[static_cast<size_t>(layer)] =
                model_.layout.block(reinterpret_cast<floatX*>(aligned_buffer(buffer)), layer);
        else
            bind_matrices(layer, buffer);
    }
    // A block's weights. A streamed block must be the one that was fetched last.
    Block<floatX>& block(int layer) {
        assert(!streams_blocks() || streamed_.holds(model_.layout.block_of(layer)));
        return blocks_[static_cast<size_t>(layer)];
    }
    // The weights of a trained unit, for changing them. A streamed block must be the one that was fetched
    // last; its weights are stored before their buffer is reused. Of a block in slices only this rank's
    // elements are there, and the next gather brings what has changed.
    floatX* to_update(int unit) {
        const bool is_block = trained_.layout.is_block(unit);
        if (is_block && trained_.options.slices_blocks) return own_slice_of_weights(trained_, unit).unit;
        if (!is_block || !streams_trained_blocks()) return unit_of(trained_, StatePart::Weights, unit).data();
        assert(streamed_.holds(trained_.layout.block_of(Layout::layer_of(unit))));
        return reinterpret_cast<floatX*>(aligned_buffer(streamed_.change()));
    }
    // Ends the sweeps: stores what was changed and releases the buffers.
    void release() { streamed_.release(); }

  private:
    void begin_sweep(From from) {
        streamed_.expect(numbers_in_order(streams_blocks() ? model_.layout.blocks() : 0, from));
    }
    // Points the matrices of a block at their parts of the bytes at `block`; null if they are not there yet.
    void bind_matrices(int layer, const char* block) {
        for (auto& [w, field] : linears(blocks_[static_cast<size_t>(layer)])) {
            w->quantized = frozen_.matrices->parts(layer, field, block);
            w->floats = frozen_.matrices->are_floats();
            w->by_outputs = frozen_.matrices->by_outputs();
        }
    }
    void bind_adapter() {
        const Layout& layout = trained_.layout;
        const auto unit = [&](int number) { return unit_of(trained_, StatePart::Weights, number).data(); };
        embeddings.prompt = std::move(layout.embeddings(unit(layout.embeddings_unit())).prompt);
        for (int l = layout.stage().first; l < layout.stage().end; l++) {
            Block<floatX> adapter = layout.block(unit(Layout::block_unit(l)), l);
            const auto to = linears(blocks_[static_cast<size_t>(l)]), from = linears(adapter);
            for (size_t i = 0; i < to.size(); i++) {
                to[i].first->adapter = std::move(from[i].first->adapter);
                to[i].first->adapter.place = static_cast<uint64_t>(l) * kPlacesOfLayer + kLoraPlaces + i;
            }
        }
    }

    const State<floatX>& model_;
    const State<floatX>& trained_;
    const FrozenWeights frozen_;
    std::vector<Block<floatX>> blocks_;
    BlockStream streamed_;
    std::function<void(int unit)> wait_for_ranks_;
    // The streamed block whose views point at its bytes, and the address of these.
    std::pair<int, char*> bound_ = {-1, nullptr};
};
