// offload_memory.h - the memory that a run has outside the device: what it is for, where it is, and how much.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "llmc/offload_activations.h"
#include "llmc/offload_blocks.h"
#include "llmc/offload_optimizer.h"
#include "llmc/offload_storage.h"
#include "llmc/run_config.h"
#include "llmc/options_placement.h"
#include "llmc/quant_weights.h"
#include "llmc/ranks_host_memory.h"
#include "llmc/state.h"

// One such memory.
struct Place {
    const char* option;          // the option that asks for it
    Placement placement;         // counts only if bytes are not 0
    size_t bytes;                // 0: there is no such memory
    size_t piece_bytes;          // the bytes of a transfer,
    size_t buffers;              // and how many transfers are under way at a time
    bool with_host = false;      // the host works on the data itself: none of it is fetched to the device
    bool may_be_shared = false;  // all ranks store the same bytes: in host memory they share it

    // The pinned host memory that it takes: all of it, or beside a GPU the buffers of a file.
    size_t pinned() const {
        if (placement == Placement::Host || bytes == 0) return bytes;
        return is_staged() ? StagedStorage::pinned_bytes(piece_bytes, buffers) : 0;
    }
    // The part of that which the ranks of a machine have together.
    size_t shared() const { return may_be_shared && placement == Placement::Host ? pinned() : 0; }
    // True if a file's data passes through pinned host memory.
    bool is_staged() const { return !kHostIsDevice && !with_host; }
    // The bytes that it takes in a file of the run's own.
    size_t in_file() const { return placement == Placement::Disk ? whole_sectors(bytes) : 0; }

    // Allocates the memory, zeroed; null if there is none. `shared_memory` may be null unless ranks share it.
    // Fails if there is too little memory.
    std::unique_ptr<OffloadStorage> make(const SharedHostMemory* shared_memory = nullptr) const {
        if (bytes == 0) return nullptr;
        if (shared() > 0) return std::make_unique<HostStorage>(shared_memory->map(bytes), piece_bytes);
        if (placement == Placement::Host) return std::make_unique<HostStorage>(bytes, piece_bytes);
        auto file = std::make_unique<DiskStorage>(temporary_folder(), bytes, piece_bytes, option);
        if (!is_staged()) return file;
        return std::make_unique<StagedStorage>(std::move(file), piece_bytes, buffers);
    }
};

// All memory of a run outside the device: for the blocks' matrices or weights, for their gradients, for
// optimizer state that only updates need, for blocks' inputs between forward and backward, and for a
// sequence's keys and values in one block. Embeddings have their own (offload_embeddings.h).
class OffloadedMemory {
  public:
    // The arguments passed by reference must outlive this. They may change until make().
    OffloadedMemory(const RunConfig& o, int prompt_tokens, const State<floatX>& model, State<floatX>& trained,
                    const QuantizedWeights* matrices)
        : o_(o),
          prompt_tokens_(prompt_tokens),
          model_(model),
          trained_(trained),
          matrices_(matrices && matrices->placement() != Placement::Device ? matrices : nullptr) {}

    // True if the trained blocks are not on the device, but streamed.
    bool streams_trained() const { return model_.options.streams_blocks(); }
    // True if the host's cores do the updates.
    bool updates_on_host() const {
        return o_.updates == "host" && host_can_update(o_) && trained_.in_chunks();
    }
    // The bytes of each streamed block, and of the gradients of each.
    std::vector<size_t> streamed_block_bytes() const {
        if (streams_trained()) return streamed_gradient_bytes();
        return matrices_ ? matrices_->streamed_bytes() : std::vector<size_t>();
    }
    std::vector<size_t> streamed_gradient_bytes() const {
        return std::vector<size_t>(blocks_of_stage(), aligned_buffer_bytes(model_.block_bytes()));
    }
    // How many layers' inputs are offloaded; and how many rows of a sequence at a time, as attention takes
    // them (0: all).
    int offloaded_layers() const {
        const int all = model_.layout.blocks();
        return o_.offloaded_inputs < 0 ? all : std::min(o_.offloaded_inputs, all);
    }
    int64_t input_chunk_rows() const {
        return go_in_chunks(length(), o_.attention_rows) ? o_.attention_rows : 0;
    }
    // How many rows of keys and values are offloaded at a time; 0: they stay on the device.
    int64_t key_chunk_rows() const { return o_.offload_keys ? input_chunk_rows() : 0; }

    // Allocates the memory, and tells the state where its parts are. `shared` is null if ranks share none.
    void make(const SharedHostMemory* shared) {
        trained_blocks_ = place_of_trained_blocks().make(shared);
        block_gradients_ = place_of_block_gradients().make();
        updated_state_ = place_of_updated_state().make();
        inputs_ = place_of_inputs().make();
        keys_ = place_of_keys().make();
        key_sums_ = place_of_key_sums().make();
        trained_.lie_in(trained_blocks_.get(), block_gradients_.get(), updated_state());
        if (matrices_ && matrices_->placement() == Placement::Disk)
            frozen_blocks_ =
                std::make_unique<DiskBlockSource>(matrices_->largest_streamed(), buffers_of_matrices());
        else if (matrices_)
            frozen_blocks_ =
                std::make_unique<PinnedPieces>([m = matrices_](int block) { return m->block(block); });
    }
    // The sources of streamed blocks and gradients, and the other memory; null before make(), and if there is
    // none.
    PieceSource* blocks() const { return matrices_ ? frozen_blocks_.get() : trained_blocks_.get(); }
    DiskBlockSource* blocks_in_files() const { return dynamic_cast<DiskBlockSource*>(frozen_blocks_.get()); }
    OffloadStorage* updated_state() const { return updated_state_.get(); }
    bool any() const { return blocks() || block_gradients_ || updated_state_ || inputs_ || keys_; }
    // Where the weights or the gradients of a unit are. `on_device` is their address if they are on the
    // device. `with_host`: blocks' gradients are used in host memory, and not fetched to the device.
    UnitMemory<floatX> weights_of(int unit, floatX* on_device) const {
        return memory_of(unit, on_device, streams_trained(), trained_blocks_.get());
    }
    UnitMemory<const floatX> gradients_of(int unit, const floatX* on_device, bool with_host) const {
        return memory_of(unit, on_device, with_host, block_gradients_.get());
    }
    // Tells the parts of a model what they stream, and where from. The model has weights(), gradients(),
    // embedding_and_head(), offloaded_inputs() and keys(). Call it again after make().
    template <class Model>
    void connect(Model& model) const {
        model.weights().stream_blocks_from(blocks(),
                                           route_from(named<Placement>(kPlacementNames, o_.weights)),
                                           streamed_block_bytes(), o_.prefetch);
        model.gradients().stream_blocks_from(block_gradients_.get(), streamed_gradient_bytes(), o_.prefetch);
        model.embedding_and_head().stream_head();
        model.offloaded_inputs().use(inputs_.get(), offloaded_layers(), o_.micro_batches_together(),
                                     input_chunk_rows());
        model.keys().offload_to(keys_.get(), key_sums_.get(), key_chunk_rows());
    }
    // Adds the memory that they take outside the device.
    void add_to(OutsideDevice& report) const {
        for (const Place& p : {place_of_inputs(), place_of_keys(), place_of_key_sums()}) {
            report.pinned += p.pinned();
            report.offloaded += p.in_file();
        }
        for (const Place& p :
             {place_of_trained_blocks(), place_of_block_gradients(), place_of_updated_state()}) {
            report.pinned += p.pinned();
            report.shared += p.shared();
            report.working += p.in_file();
        }
        if (updates_on_host()) report.pinned += HostUpdates::pinned_bytes(trained_);
        if (!matrices_) return;
        const bool in_files = matrices_->placement() == Placement::Disk;
        if (in_files) report.on_disk += matrices_->bytes();
        if (!kHostIsDevice)
            report.pinned +=
                in_files ? DiskBlockSource::bytes(matrices_->largest_streamed(), buffers_of_matrices())
                         : matrices_->bytes();
        if (!in_files && shares_host_memory(o_.rank)) report.shared += matrices_->bytes();
    }

  private:
    size_t blocks_of_stage() const { return static_cast<size_t>(model_.layout.blocks()); }
    int64_t length() const { return o_.seq_len + prompt_tokens_; }
    // As many transfers are under way at a time as there are buffers on the device.
    Place place_of_blocks(const char* option, Placement placement, bool streams) const {
        const size_t bytes = streams ? model_.block_bytes() : 0;
        return {option, placement, blocks_of_stage() * bytes, bytes,
                buffers_for(o_.prefetch, blocks_of_stage())};
    }
    size_t buffers_of_matrices() const {
        return buffers_for(o_.prefetch, matrices_->streamed_bytes().size());
    }
    // With --zero 1, ranks gather the updated weights, so all of them store the same. None stores a block
    // that another still needs as it was: an update waits for the gradients of all ranks.
    Place place_of_trained_blocks() const {
        Place place = place_of_blocks("--offload weights=disk", model_.options.blocks, streams_trained());
        place.may_be_shared = o_.slices_state() && shares_host_memory(o_.rank);
        return place;
    }
    Place place_of_block_gradients() const {
        const bool streams = trained_.options.streams_block_gradients();
        return place_of_blocks("--offload gradients=disk", model_.options.block_gradients, streams);
    }
    Place place_of_updated_state() const {
        return {"--offload state=disk",
                trained_.options.updated,
                trained_.chunks().size() * trained_.chunk_bytes(),
                trained_.chunk_bytes(),
                StateRing::most_buffers(trained_, o_.state_buffers),
                updates_on_host()};
    }
    Place place_of_inputs() const {
        const Shape input = {o_.batch, length(), model_.layout.config().channels};
        const int64_t rows = input_chunk_rows();
        const size_t bytes =
            rows > 0 ? OffloadedInputs::chunk_bytes(input, rows) : OffloadedInputs::stored_bytes(input);
        const int64_t count =
            rows > 0 ? offloaded_layers() * o_.micro_batches_together() * OffloadedInputs::chunks(input, rows)
                     : OffloadedInputs::stored(offloaded_layers(), o_.micro_batches_together());
        return {"--offload inputs=disk", kActivationPlacement,
                o_.steps > 0 ? static_cast<size_t>(count) * bytes : 0, bytes, 2};
    }
    // For one sequence and one block.
    Place place_of_keys() const {
        const bool needed = o_.steps > 0 || !o_.val_data.empty() || o_.bench == "forward";
        return place_of_pieces(needed, OffloadedKeys::piece_bytes(key_chunk_rows(), kv_columns()));
    }
    Place place_of_key_sums() const {
        return place_of_pieces(o_.steps > 0, OffloadedKeys::sums_bytes(key_chunk_rows(), kv_columns()));
    }
    int64_t kv_columns() const { return 2 * model_.layout.config().most_kv_width(); }
    Place place_of_pieces(bool needed, size_t bytes) const {
        const int64_t rows = key_chunk_rows(), count = rows > 0 ? ceil_div(length(), rows) : 0;
        return {"--offload keys=disk", kActivationPlacement, needed ? static_cast<size_t>(count) * bytes : 0,
                bytes, 3};
    }
    template <class E>
    UnitMemory<E> memory_of(int unit, E* on_device, bool offloaded, const OffloadStorage* place) const {
        if (!offloaded || !model_.layout.is_block(unit)) return {on_device, false};
        const int block = model_.layout.block_of(Layout::layer_of(unit));
        return {place ? reinterpret_cast<E*>(place->address(block)) : nullptr, true};
    }

    const RunConfig& o_;
    const int prompt_tokens_;
    const State<floatX>& model_;
    State<floatX>& trained_;
    const QuantizedWeights* const matrices_;  // of a frozen model, if offloaded, or null
    // Null if there is none.
    std::unique_ptr<OffloadStorage> trained_blocks_, block_gradients_, updated_state_, inputs_, keys_,
        key_sums_;
    std::unique_ptr<PieceSource> frozen_blocks_;
};
