// batches.h - the micro-batches of a run: which sequences each of them has, how much their losses weigh, and
// when they are sent to the device. Read it to see what a step is trained on.
//
// The sequences that a run reads are numbered from 0 on, across its steps and its resumes: micro-batch k of a
// step has the next --batch of them. The order of the data behind these numbers is in dataset.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "llmc/data_feeder.h"
#include "llmc/dataset.h"
#include "llmc/dropout.cuh"
#include "llmc/loss_by_position.cuh"
#include "llmc/run_config.h"
#include "llmc/random.h"
#include "llmc/rows.h"
#include "llmc/run_inputs.h"

// 1 / count, or 0 if nothing has a loss.
inline float mean_scale(uint64_t losses) { return losses > 0 ? 1.f / static_cast<float>(losses) : 0.f; }

constexpr uint64_t kBenchStream = (uint64_t{1} << 62) + 1;  // counters of random_bits() for its tokens

// Fills a batch with random tokens, for a bench without data.
inline void fill_random(std::span<int> inputs, std::span<int> targets, uint64_t seed, uint64_t batch,
                        int vocabulary) {
    const auto draw = [&](uint64_t i) {
        return static_cast<int>(random_uniform(seed, kBenchStream, batch, i) * vocabulary);
    };
    for (size_t i = 0; i < inputs.size(); i++) inputs[i] = draw(2 * i), targets[i] = draw(2 * i + 1);
}

class Batches {
  public:
    Batches(const RunConfig& o, const RunInputs& in, const Stream& stream)
        : o_(o), in_(in), stream_(stream) {}
    Batches(const Batches&) = delete;

    // Takes the sizes from the options, before allocate().
    void set_sizes() {
        feeders_.resize(static_cast<size_t>(o_.micro_batches_together()));
        for (Feeder& f : feeders_) f.set_sizes(o_.batch, o_.seq_len, in_.config.vocabulary, in_.packs());
    }
    void allocate() {
        for (Feeder& f : feeders_)
            if (in_.uses_batches()) f.allocate();
        if (drops()) dropout_memory_ = DeviceBuffer(dropout_keys() * sizeof(uint64_t), "the dropout's keys");
    }
    // Opens the data. Fails if a validation would have no loss.
    void open() {
        if (in_.data) loader_.emplace(*in_.data, o_.seq_len, o_.seed, true);
        if (!in_.val_data) return;
        val_loader_.emplace(*in_.val_data, o_.seq_len, o_.seed, false);
        if (val_loader_->tokens_with_loss(0, validation_sequences()) == 0)
            fail(
                "%s: the %lu sequences that a validation reads have no token with a loss; give other data, "
                "or more --eval-batches",
                in_.val_data->option(), validation_sequences());
    }
    // A resumed run begins after `step` steps, which read `sequences` sequences.
    void begin_at(int64_t step, int64_t sequences) { first_step_ = step, first_sequence_ = sequences; }

    // The micro-batches that go through the model together, where they are on the device.
    std::vector<const DeviceBatch*> on_device() const {
        std::vector<const DeviceBatch*> all;
        for (const Feeder& f : feeders_) all.push_back(&f.batch());
        return all;
    }
    const DeviceBatch& first_on_device() const { return feeders_[0].batch(); }
    // Their buffers, or null if the run reads no batches.
    const std::vector<Feeder>* feeders() const { return in_.uses_batches() ? &feeders_ : nullptr; }
    // The data, or null.
    const SequenceLoader* training() const { return loader_ ? &*loader_ : nullptr; }
    const SequenceLoader* validation() const { return val_loader_ ? &*val_loader_ : nullptr; }

    // How many sequences all steps before `step` read, also those before a resume.
    int64_t sequences_after(int64_t step) const {
        return first_sequence_ + (step - first_step_) * o_.batch * o_.grad_accum;
    }
    double tokens_of_step() const { return static_cast<double>(o_.batch) * o_.seq_len * o_.grad_accum; }
    // How many tokens of a step have a loss.
    uint64_t tokens_with_loss(int64_t step) const {
        if (!loader_) return static_cast<uint64_t>(tokens_of_step());
        return loader_->tokens_with_loss(first_of(step, 0), batch() * static_cast<uint64_t>(o_.grad_accum));
    }
    // How many tokens a token attends to, as FLOPs are counted.
    double attended() const { return loader_ ? loader_->attended() : static_cast<double>(o_.seq_len); }

    // Sends this rank's micro-batch k of a step: sequences of the data, or random tokens if a bench has none.
    // Also sets its dropout key. Each loss weighs loss_scale. Each rank has a run of micro-batches, so that
    // the ranks' gradients, added in their order, are those of one device.
    void feed(int64_t step, int k, float loss_scale) {
        feed(step, k, loss_scale, k % o_.micro_batches_together());
    }
    // Sends it in the place of the first micro-batch, which a forward alone reads.
    void feed_first(int64_t step, int k, float loss_scale) { feed(step, k, loss_scale, 0); }

    // A validation reads the first sequences of its data: as many as --eval-batches steps would.
    uint64_t validation_sequences() const {
        const uint64_t most =
            batch() * static_cast<uint64_t>(o_.grad_accum) * static_cast<uint64_t>(o_.eval_batches);
        return std::min(val_loader_->sequences_per_epoch(), most);
    }
    float validation_loss_scale() const {
        return mean_scale(val_loader_->tokens_with_loss(0, validation_sequences()));
    }
    // Sends validation sequences from number `first` on, up to a whole batch; rows after the last one have no
    // loss. Counts their tokens in `positions`.
    void feed_validation(uint64_t first, float loss_scale, LossByPosition& positions) {
        const Feeder::Slot slot = feeders_[0].slot();
        fill(slot, *val_loader_, first, std::min(batch(), validation_sequences() - first), loss_scale);
        positions.count(slot.targets, slot.positions);
        feeders_[0].send(stream_);
    }

    // The dropout of the training. Each micro-batch has its own random key, on the device.
    bool drops() const { return o_.dropout > 0 || in_.adapter.dropout > 0; }
    size_t dropout_keys() const { return drops() ? static_cast<size_t>(o_.micro_batches_together()) : 0; }
    DropoutOptions dropout() const {
        return {o_.dropout, in_.adapter.dropout, reinterpret_cast<const uint64_t*>(dropout_memory_.data())};
    }

  private:
    void feed(int64_t step, int k, float loss_scale, int place) {
        const uint64_t first = first_of(step, o_.rank.number * o_.own_micro_batches() + k);
        Feeder& feeder = feeders_[static_cast<size_t>(place)];
        const Feeder::Slot slot = feeder.slot();
        if (loader_)
            fill(slot, *loader_, first, batch(), loss_scale);
        else
            fill_random(slot.inputs, slot.targets, o_.seed, first, in_.config.vocabulary);
        feeder.send(stream_);
        if (drops())
            set_dropout_key(reinterpret_cast<uint64_t*>(dropout_memory_.data()) + place, o_.seed, first,
                            stream_);
    }
    uint64_t batch() const { return static_cast<uint64_t>(o_.batch); }
    // The number of the first sequence of micro-batch k of a step.
    uint64_t first_of(int64_t step, int k) const {
        return static_cast<uint64_t>(sequences_after(step)) + static_cast<uint64_t>(k) * batch();
    }
    static void fill(const Feeder::Slot& slot, SequenceLoader& loader, uint64_t first, uint64_t count,
                     float loss_scale) {
        loader.fill_batch(first, count, slot.inputs, slot.targets, slot.positions, slot.ends);
        if (slot.loss_scale) *slot.loss_scale = loss_scale;
    }

    const RunConfig& o_;
    const RunInputs& in_;
    const Stream& stream_;
    std::vector<Feeder> feeders_;  // one for each of the micro-batches that go through the model together
    std::optional<SequenceLoader> loader_, val_loader_;
    DeviceBuffer dropout_memory_;
    int64_t first_step_ = 0, first_sequence_ = 0;
};
