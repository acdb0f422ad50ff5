// step.h - a step of training, as train_gpt.cu defines it: the model with all that its forward, backward and
// update need, planned to the byte and then run; and a batch of validation. It does not save, and prints
// only that a step has no loss; what a run does between steps is in trainer.h. Look here for what a member of
// Step is.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "llmc/arena.h"               // Arena: plans a step's memory by a dry run
#include "llmc/batches.h"             // Batches: feeds the micro-batches of each step
#include "llmc/gpt.h"                 // Gpt: the model
#include "llmc/graph.h"               // StepGraphs: CUDA graphs of steps
#include "llmc/loss_by_position.cuh"  // LossByPosition, add_position_losses()
#include "llmc/metrics.h"             // Metrics: losses and norms of steps
#include "llmc/offload_memory.h"      // OffloadedMemory: all that is outside the device
#include "llmc/plan.h"                // Plans: of all that runs in the arena
#include "llmc/ranks_exchange.h"      // Exchange: between the ranks of several devices
#include "llmc/run_model.h"           // RunModel: the states of the model and adapter
#include "llmc/updates.h"             // Updates: norms, clipping, the optimizer

class Step {
  public:
    // A step of the model, or of the stage that `model` has: neither norms nor losses are added up over
    // stages. Allocates nothing on the device yet. The stream may be created before start(). What rehearse()
    // plans is in `plans`. The arguments passed by reference must outlive this, and not change.
    Step(const RunConfig& run, const RunInputs& in, Arena& arena, const Stream& stream, RunModel& model,
         Plans& plans);
    Step(const Step&) = delete;

    // ---- the plan
    // The plan of a pass that begins with this micro-batch of the rank, and that of a batch of validation.
    Plan rehearse_training(int first_micro_batch, Offsets offsets);
    Plan rehearse_validation(Offsets offsets);
    // Plans the steps, a validation, and loading; the plans of what else uses the model must be there
    // already. `offsets` is for the training step.
    MemoryReport rehearse(const Choices& choices, const Rates& rates, Offsets offsets = Offsets::Planned);

    // ---- the set-up
    // Connects this rank to the others. Without it, steps of several ranks can only be rehearsed.
    void connect(RankEngine& engine) { exchange_.connect(engine); }
    // Connects a stage of the model to its neighbors. Without it, a stage can only be rehearsed.
    void connect(StageLinks& links) { gpt_.connect(links); }
    // Allocates all device memory of the run: what the report says, to the byte.
    void start(const MemoryReport& report);
    void load();

    // ---- the work
    // Makes step `number`, counted from 0. Returns false if stops() said so between two micro-batches; their
    // gradients are then discarded.
    bool train(int64_t number, double rate, const std::function<bool()>& stops);
    // Adds the losses of the validation sequences from `first` on, a batch of them, to metrics().loss().
    void evaluate(uint64_t first, float loss_scale);
    // The forward of step `number` alone, as a validation runs it.
    void forward(int64_t number);
    // Processes the results of all steps, and waits until this rank has all updated weights. Call it before
    // anything but a step uses the weights.
    void finish() {
        metrics_.finish();
        updates_.wait_for_all_weights();
    }

    // ---- its parts, for what else a run does
    Arena& arena() { return arena_; }
    const Stream& stream() const { return stream_; }
    RunModel& model() { return model_; }
    Gpt& gpt() { return gpt_; }
    Batches& batches() { return batches_; }
    Metrics& metrics() { return metrics_; }
    Exchange& exchange() { return exchange_; }
    Updates& updates() { return updates_; }
    LossByPosition& loss_by_position() { return loss_by_position_; }
    Plans& plans() { return plans_; }
    // True if steps run as graphs. With offloaded keys a graph would grow with the square of the sequence.
    bool replays() const { return StepGraphs::kReplays && replays_ && offloaded_.key_chunk_rows() == 0; }
    void set_replays(bool replays) { replays_ = replays; }
    double flops(bool forward_only = false) const {
        return batches_.tokens_of_step() * model_.flops_of_token(batches_.attended(), forward_only);
    }

  private:
    StepPass pass_from(int first_micro_batch) const;
    void forward_backward_pass(const StepPass& pass, float loss_scale);
    void evaluate_batch(float loss_scale);
    template <class Operations>
    void run_in(Plan& plan, Operations&& operations, bool exchanges = false);
    void connect_streams();
    int micro_batches_per_pass() const { return run_.micro_batches_together(); }

    const RunConfig& run_;
    const RunInputs& in_;
    // Members are destroyed in the reverse of this order, and destructors wait for transfers that a failed
    // run has left under way. So an owner of transfers is declared after the memory that these use: the
    // exchange after the arena, offloaded_ after the updates.
    Arena& arena_;
    const Stream& stream_;
    RunModel& model_;
    Plans& plans_;
    Gpt gpt_;
    Batches batches_;
    MicroBatchOptions micro_;       // how the next micro-batch is run
    const SquareSums square_sums_;  // the layout of the sums from which the norm is computed
    const Slices slices_;           // what each of several ranks has of a unit
    Exchange exchange_;             // between them
    GatheredBlocks gathered_{model_.state, model_.adapter ? pointer_to(model_.quantized) : nullptr,
                             exchange_};  // with --zero 3
    Metrics metrics_;
    LossByPosition loss_by_position_;  // of validations
    Updates updates_;
    OffloadedMemory offloaded_;
    StepGraphs graphs_;
    bool replays_;  // --advanced graph=on
};

// Plans what a run does with the model beside its steps, in `step.plans()`: samples, a merge, an export.
// No setting that a search tries changes these plans, so what is planned already stays.
void rehearse_services(const RunConfig& run, const RunInputs& in, Step& step);

// What the search for a setting asks (plan_choice.h): the steps of a run, with one setting after another.
class Trial {
  public:
    // The inputs must outlive it.
    Trial(const RunConfig& run, RunInputs& in)
        : run_(run), in_(in), rates_(rates_of<floatX>(run)), model_(run_, in) {}
    Trial(const Trial&) = delete;

    void apply(const MemorySetting& s) {
        step_.reset();
        const bool same_state = run_.same_state(s);
        run_ = run_.with(s);
        if (!same_state) {
            model_.apply_formats();
            plans_.update = {};
            plans_.update_phases.reset();
        }
        if (run_.only_answers()) plans_.sample = {};  // its size is the batch
    }
    MemoryReport rehearse(Offsets offsets = Offsets::Planned) {
        rehearse_services(run_, in_, step());
        return step().rehearse({}, rates_, offsets);
    }
    Plan rehearse_training(int first_micro_batch, Offsets offsets) {
        return step().rehearse_training(first_micro_batch, offsets);
    }
    Plan rehearse_validation(Offsets offsets) { return step().rehearse_validation(offsets); }

  private:
    Step& step() {
        if (!step_) step_.emplace(run_, in_, arena_, stream_, model_, plans_);
        return *step_;
    }

    RunConfig run_;
    RunInputs& in_;
    const Rates rates_;
    const Stream stream_ = nullptr;
    Arena arena_;
    RunModel model_;
    Plans plans_;
    std::optional<Step> step_;
};
