// trainer.h - a training run, as train_gpt.cu defines it: its parts, and what it does with them. Look here
// for what a member of Trainer is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "llmc/batches.h"             // Batches: feeds the micro-batches of each step
#include "llmc/ranks_exchange.h"      // Exchange: between the ranks of several devices
#include "llmc/run_export.h"          // ModelExport: the model as a GGUF file
#include "llmc/gpt.h"                 // Gpt: the model
#include "llmc/graph.h"               // StepGraphs: CUDA graphs of steps
#include "llmc/learning_rate.h"       // learning_rate()
#include "llmc/loss_by_position.cuh"  // LossByPosition, add_position_losses()
#include "llmc/run_merge.h"           // AdapterMerge: an adapter and its model in one
#include "llmc/metrics.h"             // Metrics: losses and norms of steps
#include "llmc/offload_memory.h"      // OffloadedMemory: all that is outside the device
#include "llmc/plan.h"                // Plans: of all that runs in the arena
#include "llmc/ranks_agree.h"         // check_ranks_agree()
#include "llmc/run_model.h"           // RunModel: the states of the model and adapter
#include "llmc/run_saves.h"           // RunSaves: saves, and resumes from them
#include "llmc/run_start.h"           // remark_what_a_run_needs()
#include "llmc/sample.h"              // Sampler: draws and prints texts
#include "llmc/signals.h"             // interrupted, asked_to_save
#include "llmc/updates.h"             // Updates: norms, clipping, the optimizer

// A run on a device: the model's state, the batches, the arena with its plans, and the loop over the steps.
class Trainer {
  public:
    using Element = floatX;  // of the weights

    // Allocates nothing on the device yet.
    Trainer(const Options& options, RunInputs& inputs, Choices choices = {});

    // Connects this rank to the others. Without it, steps of several ranks can only be rehearsed. Call it
    // after rehearse(): it compares the ranks' options and plans, and fails if they differ.
    void connect(RankEngine& engine) {
        exchange_.connect(engine);
        check_ranks_agree(exchange_, o_.rank, facts_of(o_, in_, report_, plans_));
    }
    void run();
    void bench();
    void print_plan() const {
        ::print_plan(o_, report_, plans_.update, rates_);
        if (o_.plan) remark_what_a_run_needs(o_, in_);
    }

    // Applies a setting that the search in plan_choice.h tries.
    void apply(const MemorySetting& s);
    // The plan of a step's pass that begins with this micro-batch, and that of a batch of validation.
    Plan rehearse_training(int first_micro_batch, Offsets offsets);
    Plan rehearse_validation(Offsets offsets);
    // Rehearses every step that the run may take; `offsets` is for the training step.
    const MemoryReport& rehearse(Offsets offsets = Offsets::Planned);

  private:
    // The loop and the step.
    void train();
    bool train_step();
    StepPass pass_from(int first_micro_batch) const;
    void forward_backward_pass(const StepPass& pass, float loss_scale);
    template <class Operations>
    void run_step(Plan& plan, Operations&& operations, bool exchanges = false);
    void say_where();
    bool agree_to_stop();

    // Between steps.
    void validate_and_sample_if_due();
    std::optional<double> validate();
    void evaluate_batch(float loss_scale);
    void validate_and_log();
    void sample();
    void save() {
        updates_.wait_for_all_weights();
        saves_.save(step_, batches_.sequences_after(step_), evaluated_, validated_step_ == step_);
        metrics_.records().report.save();
    }
    // Processes the results of all steps, and waits until this rank has all updated weights. Call it before
    // anything but a step uses the weights.
    void finish_steps() {
        metrics_.finish();
        updates_.wait_for_all_weights();
    }
    void save_if_asked();
    void finish();
    void stop();

    // Before the first step, and the bench.
    void open_device();
    void connect_streams();
    void prepare();
    void choose_algorithms();
    void answer_as_many_as_fit();
    void take_memory();
    void load();
    void forward_step();

    // With --zero 3: what the ranks gather.
    DividedBlocks divided_blocks() const {
        return {model_.state, model_.adapter ? pointer_to(model_.quantized) : nullptr};
    }
    // True if this rank takes part in samples: the first one draws them. Blocks that are gathered need all
    // ranks, which then draw the same; what the others print is not shown.
    bool samples_here() const { return o_.rank.is_first() || o_.slices_weights(); }
    // True if a signal has asked to stop. Ranks that sample together must end together.
    bool sampling_stops() { return o_.slices_weights() ? agree_to_stop() : interrupted != 0; }
    bool agree_to_sample() { return samples_here() && in_.samples() && !sampling_stops(); }
    bool is_time(int64_t every) const { return every > 0 && step_ > 0 && step_ % every == 0; }
    bool trains() const { return o_.steps > 0 && o_.bench.empty(); }
    int micro_batches_per_pass() const { return o_.micro_batches_together(); }
    double step_flops(bool forward_only = false) const {
        return batches_.tokens_of_step() * model_.flops_of_token(batches_.attended(), forward_only);
    }
    // The device memory that this run has taken.
    size_t taken_bytes() const { return std::max(device_bytes_in_use(), used_before_) - used_before_; }
    // True if steps run as graphs. With offloaded keys a graph would grow with the square of the sequence.
    bool replays() const { return StepGraphs::kReplays && replays_ && offloaded_.key_chunk_rows() == 0; }

    // This run's own copy: a setting, --epochs and the prompts at a time change it. RunInputs keeps the
    // options that it was made with; nothing that it is asked later depends on what changes here.
    Options o_;
    RunInputs& in_;
    const ModelConfig& config_;
    // Members are destroyed in the reverse of this order, and destructors wait for transfers that a failed
    // run has left under way. So an owner of transfers is declared after the memory that these use: the model
    // and the exchange after the arena, offloaded_ after the updates.
    std::optional<OwnStream> own_stream_;
    Stream stream_ = nullptr;  // own_stream_, from open_device() on
    Arena arena_;
    RunModel model_;
    Gpt gpt_;
    Batches batches_;
    MicroBatchOptions micro_;                 // how the next micro-batch is run
    const SquareSums square_sums_;            // the layout of the sums from which the norm is computed
    const Slices slices_;                     // what each of several ranks has of a unit
    Exchange exchange_;                       // between them
    std::optional<GatheredBlocks> gathered_;  // with --zero 3
    Metrics metrics_;
    RunSaves saves_;
    LossByPosition loss_by_position_;  // of validations
    Sampler<Gpt> sampler_;
    AdapterMerge merge_;
    ModelExport export_;
    Plans plans_;
    MemoryReport report_;
    const Choices choices_;
    const Rates rates_;  // for estimates of time
    Updates updates_;
    OffloadedMemory<floatX> offloaded_;
    StepGraphs graphs_;
    bool replays_;                 // --advanced graph=on
    size_t used_before_ = 0;       // device memory in use before this run
    int64_t step_ = 0;             // the number of the next step, from 0
    int64_t first_step_ = 0;       // that of this run's first one: not 0 after a resume
    int64_t validated_step_ = -1;  // the last one that was validated
    bool evaluated_ = false;       // the validation and sample due at this step are done
};
