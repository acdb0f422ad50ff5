// updates.h - the optimizer's part of a step: the norm of the gradients, and the update of each unit's
// weights, after all backward passes or, with --update-in-backward, as soon as a unit's gradients are
// complete.
//
// All units of a run are updated in one way: each in one launch if the whole state is on the device; chunk by
// chunk if the state is streamed from host memory or a disk; or by the host's cores. The latter two are in
// offload_optimizer.h.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "llmc/ranks_exchange.h"
#include "llmc/global_norm.cuh"
#include "llmc/gradients.h"
#include "llmc/metrics.h"
#include "llmc/offload_memory.h"
#include "llmc/offload_optimizer.h"
#include "llmc/run_config.h"
#include "llmc/weights.h"

// The layout of the partial sums of squares from which the norm of all units is computed.
inline SquareSums square_sums_of(const Layout& layout) {
    std::vector<int64_t> sizes;
    for (const Unit& u : layout.units()) sizes.push_back(u.size);
    return square_sums(sizes);
}

// When the squares of a unit's gradients are summed, after its gradients were exchanged if there are several
// ranks, and when the unit is updated:
//
//                                      squares                                    update
//     --update-in-backward             when the unit's gradients are complete     at once
//     gradients of blocks streamed     when they are complete                     in update_all()
//     several ranks                    while backward computes the next unit      in update_all()
//     otherwise                        in update_all()                            in update_all()
class Updates {
  public:
    // `sums`: square_sums_of() for what is trained. Norms and sums are written to `metrics`.
    Updates(const RunConfig& o, Arena& arena, const Stream& stream, const State<floatX>& trained,
            Weights& weights, Gradients& gradients, const OffloadedMemory& places, const SquareSums& sums,
            Metrics& metrics, Exchange& exchange)
        : o_(o),
          stream_(stream),
          trained_(trained),
          weights_(weights),
          gradients_(gradients),
          places_(places),
          sums_(sums),
          metrics_(metrics),
          exchange_(exchange),
          ring_(arena, stream),
          on_host_(arena, stream),
          gathers_(trained.layout.units().size()) {
        if (o_.update_in_backward)
            gradients_.on_complete([this](int unit, Gradients::OfUnit& g) {
                exchange_and_sum(unit, g.all.data());
                update(unit, g.all.data());
            });
        else if (gradients_.streams_blocks())  // on the device now, but not later
            gradients_.on_complete([this](int unit, Gradients::OfUnit& g) {
                if (pass_.sums_squares) exchange_and_sum(unit, g.all.data());
            });
        else if (!exchange_.is_alone())
            gradients_.on_complete([this](int unit, Gradients::OfUnit& g) {
                if (pass_.sums_squares) exchange_beside_backward(unit, g);
            });
    }
    Updates(const Updates&) = delete;

    // Allocates the memory beside the arena. The OffloadedMemory must have been made.
    void allocate() {
        memory_ = DeviceBuffer(sizeof(UpdateFactors), "the step's factors");
        factors_ = reinterpret_cast<UpdateFactors*>(memory_.data());
        ring_.use(places_.updated_state());
        if (updater() == Updater::Host) on_host_.allocate(trained_, places_.updated_state());
    }

    // Sets the factors of the updates of a step, counted from 0.
    void begin_step(int64_t number, double rate) {
        const OptimizerStep step = {.lr = static_cast<float>(rate),
                                    .beta1 = static_cast<float>(o_.beta1),
                                    .beta2 = static_cast<float>(o_.beta2),
                                    .epsilon = static_cast<float>(o_.eps),
                                    .weight_decay = static_cast<float>(o_.weight_decay),
                                    .clip = static_cast<float>(o_.clip),
                                    .step = static_cast<int>(number + 1),
                                    .seed = o_.seed};
        set_factors(factors_, step, stream_);
        on_host_.use(step);
    }
    // Call before a pass of a step goes forward. In a step's first pass, call wait_for_weights() before a
    // unit's weights are used: ranks gather them while forward computes the units before. With
    // --update-in-backward this takes the buffers of the optimizer state, and starts to fetch it.
    void begin_pass(const StepPass& pass) {
        pass_ = pass;
        if (!pass.accumulate)
            for (const int unit : units_in_order())
                if (gathers_beside_forward(unit))
                    exchange_.note_gather(size_of(unit), gathers_[static_cast<size_t>(unit)]);
        exchange_.set_active(pass.is_last);
        if (o_.update_in_backward) fetch_state(units_in_order(From::Last));
    }
    void wait_for_weights(int unit) {
        if (!pass_.accumulate && gathers_beside_forward(unit))
            exchange_.finish(gathers_[static_cast<size_t>(unit)]);
    }
    // Call it before weights are used by anything else than a step.
    void wait_for_all_weights() {
        for (Exchange::Started& gather : gathers_) exchange_.finish(gather);
    }
    // Call after the pass has gone back.
    void end_pass() {
        if (exchanged_.unit >= 0) {
            Range range("backward");
            end_exchange_under_way();
        }
        if (o_.update_in_backward) compute_norm_and_loss();
        exchange_.set_active(true);
        end_updates();
    }
    // Updates all units, after the last backward pass.
    void update_all() {
        Range range("update");
        const std::vector<int> units = units_in_order();
        const bool are_summed = gradients_.streams_blocks() || !exchange_.is_alone();
        for (const int unit : units)
            if (!are_summed) sum_squares_of(unit, gradients_.of(unit).data());
        compute_norm_and_loss();
        const bool streams_weights = weights_.streams_trained_blocks() && !trained_.options.slices_blocks &&
                                     updater() != Updater::Host;
        fetch_state(units);
        if (streams_weights) weights_.expect_blocks();
        if (!gradients_stay_with_host()) gradients_.expect_update();
        for (const int unit : units) {
            const TensorX gradients = fetch_for_update(unit, streams_weights);
            update(unit, gradients.data());
        }
        weights_.release();
        gradients_.release();
        end_updates();
    }

  private:
    enum class Updater { Device, DeviceByChunk, Host };
    Updater updater() const {
        if (!trained_.in_chunks()) return Updater::Device;
        return places_.updates_on_host() ? Updater::Host : Updater::DeviceByChunk;
    }
    // True if each unit is clipped by the norm of its own gradients.
    bool norm_of_each() const { return o_.clip_per_block; }
    // True if updates use blocks' gradients in host memory, so that they are not fetched to the device.
    bool gradients_stay_with_host() const {
        return updater() == Updater::Host && gradients_.streams_blocks() && !norm_of_each();
    }
    std::vector<int> units_in_order(From from = From::First) const {
        return numbers_in_order(static_cast<int>(trained_.layout.units().size()), from);
    }
    void fetch_state(const std::vector<int>& units) {
        if (updater() != Updater::Host) ring_.take(trained_, units, o_.state_buffers);
    }
    // Fetches what update_all() needs on the device for the update of a unit, and returns its gradients; none
    // if they stay in host memory.
    TensorX fetch_for_update(int unit, bool streams_weights) {
        Range range("update", unit);
        const bool is_block = trained_.layout.is_block(unit);
        if (streams_weights && is_block) weights_.fetch(Layout::layer_of(unit));
        return is_block && gradients_stay_with_host() ? TensorX() : gradients_.of(unit);
    }
    // Waits for updates under way, frees their memory, and gathers weights that the host has updated.
    void end_updates() {
        ring_.release();
        on_host_.release();
        for (const int unit : std::exchange(ungathered_, {})) {
            Range range("update", unit);
            gather_weights(unit, weights_.to_update(unit));
        }
        if (o_.update_in_backward && o_.slices_state()) wait_for_all_weights();
    }
    // Ranks gather a unit's updated weights.
    void gather_weights(int unit, floatX* weights) {
        Exchange::Started& gather = gathers_[static_cast<size_t>(unit)];
        const bool is_beside_forward = gathers_beside_forward(unit);
        if (is_beside_forward && exchange_.rehearsing()) return;  // the plan of forward has it
        exchange_.start_gather(weights, size_of(unit), "weights", gather);
        if (are_in_buffer(unit)) exchange_.finish(gather);
    }

    // A unit's gradients of the step are complete on this rank: sums them over the ranks, and computes the
    // unit's partial sums of squares.
    void exchange_and_sum(int unit, floatX* gradients) {
        if (size_of(unit) == 0) return;
        if (!exchange_.is_alone()) {
            start_exchange(unit, gradients);
            end_exchange();
        }
        sum_squares_of(unit, gradients);
    }
    // As exchange_and_sum(); the gradients are exchanged while backward computes those of the next unit.
    void exchange_beside_backward(int unit, Gradients::OfUnit& g) {
        end_exchange_under_way();
        Range range(kExchangeRange, unit);
        start_exchange(unit, g.all.data());
        exchanged_ = {unit, g.all.data(), std::move(g.buffer)};
    }
    // With --zero 0 the sums are gathered too.
    void start_exchange(int unit, floatX* gradients) {
        exchange_.start_sum(gradients, size_of(unit), kept_slice(unit));
        if (gathers_gradients())
            exchange_.start_gather(gradients, size_of(unit), "gradients", gathered_gradients_);
    }
    void end_exchange() {
        exchange_.finish_sum();
        if (gathers_gradients() && exchange_.is_active()) exchange_.finish(gathered_gradients_);
    }
    // Ends the exchange that goes on beside backward, if there is one.
    void end_exchange_under_way() {
        if (exchanged_.unit < 0) return;
        Range range(kExchangeRange, exchanged_.unit);
        end_exchange();
        sum_squares_of(exchanged_.unit, exchanged_.gradients);
        exchanged_ = {};
    }
    // Computes the partial sums of the squares of a unit's gradients. With --zero 1 to 3 they are those of
    // the rank's own slice.
    void sum_squares_of(int unit, floatX* gradients) {
        const int64_t size = size_of(unit);
        if (size == 0) return;
        floatX* const kept = kept_slice(unit);
        TensorF all = sums_of(unit);
        const Slice own = trained_.options.slices.own(size);
        if (own.count < size) fill_zero(all, stream_);  // the other ranks have the others
        if (own.count > 0) {
            const TensorF sums = all.rows_at(own.first / sums_.stretch, ceil_div(own.count, sums_.stretch));
            sum_squares(sums, kept ? kept : gradients + own.first, own.count, sums_.stretch, stream_);
        }
        if (norm_of_each()) compute_norm(unit, sums_of(unit));
    }
    // With --zero 2 and 3: where the State has the rank's slice of a unit's gradients; else null.
    floatX* kept_slice(int unit) const {
        return kept_slice(trained_.layout.units()[static_cast<size_t>(unit)]);
    }
    floatX* kept_slice(const Unit& u) const {
        if (!trained_.options.slices_gradients) return nullptr;
        return trained_.template data<floatX>(StatePart::Gradients, u.offset + trained_.own_slice(u).first);
    }
    int64_t size_of(int unit) const { return trained_.layout.units()[static_cast<size_t>(unit)].size; }
    TensorF sums_of(int unit) const {
        const auto u = static_cast<size_t>(unit);
        return metrics_.sums().rows_at(sums_.first[u], sums_.first[u + 1] - sums_.first[u]);
    }
    // Computes a norm from partial sums of squares, which are always added in the same order, in whatever
    // order the units were updated. With --zero 1 to 3 each rank has some of the sums.
    void compute_norm(int number, const TensorF& sums) {
        if (o_.slices_state()) exchange_.sum(sums);
        TensorF norm = metrics_.norms().rows_at(number, 1);
        norm_of_sums(norm, sums, stream_);
    }
    // Computes the norm of the whole gradient, unless each unit has its own norm, and adds up the losses of
    // all ranks' micro-batches.
    void compute_norm_and_loss() {
        if (!norm_of_each()) compute_norm(0, metrics_.sums());
        if (!exchange_.is_alone()) exchange_.sum(metrics_.loss());
    }
    // Updates a unit's weights. With --update-in-backward and without clipping, the norm that it reads is
    // still that of the step before, which it ignores.
    void update(int unit, const floatX* gradients) {
        Range range("update", unit);
        const Unit& u = trained_.layout.units()[static_cast<size_t>(unit)];
        if (u.size == 0) return;
        const TensorF norm = metrics_.norms().rows_at(norm_of_each() ? unit : 0, 1);
        gradients = counted_from_unit(u, gradients);
        if (updater() == Updater::Host) return update_on_host(unit, u, gradients, norm);
        floatX* const weights = weights_.to_update(unit);
        updater() == Updater::Device ? update_on_device(u, weights, gradients, norm)
                                     : update_by_chunk(unit, u, weights, gradients, norm);
        if (gathers_weights(unit)) gather_weights(unit, weights);
    }
    // With --zero 2 and 3 only this rank's slice of the gradients is kept, and updates reach no others. The
    // address is where the whole unit's would begin.
    const floatX* counted_from_unit(const Unit& u, const floatX* gradients) const {
        const floatX* const kept = kept_slice(u);
        return kept ? kept - trained_.own_slice(u).first : gradients;
    }
    // With --zero 0 every rank updates everything.
    bool gathers_gradients() const { return !exchange_.is_alone() && !o_.slices_state(); }
    // True if ranks send each other a unit's weights when they are updated.
    bool gathers_weights(int unit) const {
        const bool stay_in_slices = trained_.options.slices_blocks && trained_.layout.is_block(unit);
        return o_.slices_state() && !stay_in_slices;
    }
    // True if a unit's weights are in a buffer now, which is stored elsewhere next.
    bool are_in_buffer(int unit) const {
        return trained_.layout.is_block(unit) && weights_.streams_trained_blocks();
    }
    // True if the gather goes on beside the next forward pass. With --update-in-backward it goes on beside
    // backward.
    bool gathers_beside_forward(int unit) const {
        return gathers_weights(unit) && !are_in_buffer(unit) && !o_.update_in_backward;
    }
    // The host's cores update the elements whose state this rank has. The weights are back, and can be
    // gathered, when all updates are complete (finish()).
    void update_on_host(int unit, const Unit& u, const floatX* gradients, const TensorF& norm) {
        // to_update() would mark a streamed block as changed; the host itself writes the block's memory.
        floatX* const on_device = trained_.options.slices_blocks
                                      ? weights_.to_update(unit)
                                      : trained_.template data<floatX>(StatePart::Weights, u.offset);
        on_host_.update(trained_, unit, places_.weights_of(unit, on_device),
                        places_.gradients_of(unit, gradients, gradients_stay_with_host()), norm);
        if (gathers_weights(unit)) ungathered_.push_back(unit);
    }
    // The device updates the elements whose state this rank has, in one launch or chunk by chunk.
    void update_on_device(const Unit& u, floatX* weights, const floatX* gradients, const TensorF& norm) {
        if (trained_.own_slice(u).count == 0) return;
        optimizer_update(factors_, arrays_of_unit(trained_, u, weights, gradients), norm, stream_);
    }
    void update_by_chunk(int unit, const Unit& u, floatX* weights, const floatX* gradients,
                         const TensorF& norm) {
        if (trained_.own_slice(u).count == 0) return;
        ring_.update(trained_, unit,
                     [=, this, &u, norm = norm.view()](const StateChunk& chunk, char* buffer) {
                         const auto arrays = arrays_of_chunk(trained_, u, chunk, buffer, weights, gradients);
                         optimizer_update(factors_, arrays, norm, stream_);
                     });
    }

    const RunConfig& o_;
    const Stream& stream_;
    const State<floatX>& trained_;
    Weights& weights_;
    Gradients& gradients_;
    const OffloadedMemory& places_;
    const SquareSums& sums_;
    Metrics& metrics_;
    Exchange& exchange_;
    StateRing ring_;
    HostUpdates on_host_;
    std::vector<Exchange::Started> gathers_;  // of weights, by unit
    Exchange::Started gathered_gradients_;    // with --zero 0
    std::vector<int> ungathered_;  // units that the host updates, and whose weights ranks then gather
    DeviceBuffer memory_;
    UpdateFactors* factors_ = nullptr;  // on the device: of the current step
    StepPass pass_;                     // the current one
    // The unit whose gradients are being exchanged, and the buffer if they are in one.
    struct {
        int unit = -1;
        floatX* gradients = nullptr;
        TensorX buffer = {};
    } exchanged_;
};
