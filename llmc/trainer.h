// trainer.h - a training run, as train_gpt.cu defines it: its steps, and what it does between them. Look here
// for what a member of Trainer is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "llmc/learning_rate.h"  // learning_rate()
#include "llmc/ranks_agree.h"    // check_ranks_agree()
#include "llmc/run_export.h"     // FinishedModel: the model with its adapter, as a GGUF file too
#include "llmc/run_saves.h"      // RunSaves: saves, and resumes from them
#include "llmc/run_start.h"      // remark_what_a_run_needs()
#include "llmc/sample.h"         // Sampler: draws and prints texts
#include "llmc/signals.h"        // interrupted, asked_to_save
#include "llmc/step.h"           // Step: what the device does

// A run: its steps (llmc/step.h), and its services: saves, samples, a merge, an export, logs, signals.
class Trainer {
  public:
    // Plans everything that the run will do, and allocates nothing on the device yet. `run` is the resolved
    // configuration; `choices` is how its setting was chosen.
    Trainer(const RunConfig& run, RunInputs& inputs, const Choices& choices);

    // Connects this rank to the others, before run() or bench(). Fails if their options or plans differ.
    void connect(RankEngine& engine);
    void run();
    void bench();
    void print_plan() const {
        ::print_plan(run_, report_, plans_.update, rates_);
        if (run_.plan) remark_what_a_run_needs(run_, in_);
    }

  private:
    void train();
    double rate_of_step(int64_t number) const {
        return learning_rate(run_.schedule, number, run_.steps, run_.warmup, run_.lr, run_.min_lr);
    }

    // Between steps.
    void say_where();
    bool agree_to_stop();
    void validate_and_sample_if_due();
    std::optional<double> validate();
    void validate_and_log();
    void sample();
    void save() {
        step_.updates().wait_for_all_weights();
        saves_.save(done_, batches_.sequences_after(done_), evaluated_, validated_step_ == done_);
        metrics_.records.report.save();
    }
    void save_if_asked();
    void finish();
    void stop();

    // Before the first step.
    void rehearse();
    void open_device();
    void prepare();
    void choose_algorithms();
    void load();

    // True if this rank takes part in samples: the first one draws them. Blocks that are gathered need all
    // ranks, which then draw the same; what the others print is not shown.
    bool samples_here() const { return run_.rank.is_first() || run_.slices_weights(); }
    // True if a signal has asked to stop. Ranks that sample together must end together.
    bool sampling_stops() { return run_.slices_weights() ? agree_to_stop() : interrupted != 0; }
    bool agree_to_sample() { return samples_here() && in_.samples() && !sampling_stops(); }
    bool is_time(int64_t every) const { return every > 0 && done_ > 0 && done_ % every == 0; }
    bool trains() const { return run_.steps > 0 && run_.bench.empty(); }
    // The device memory that this run has taken.
    size_t taken_bytes() const { return std::max(device_bytes_in_use(), used_before_) - used_before_; }

    const RunConfig run_;
    RunInputs& in_;
    const Choices choices_;
    const Rates rates_;  // for estimates of time
    // Members are destroyed in the reverse of this order, and destructors wait for transfers that a failed
    // run has left under way. So their owners are declared after the memory that these use.
    std::optional<OwnStream> own_stream_;
    Stream stream_ = nullptr;  // own_stream_, from open_device() on
    Arena arena_;
    RunModel model_;
    Plans plans_;
    Step step_;
    Exchange& exchange_ = step_.exchange();
    Batches& batches_ = step_.batches();
    Metrics& metrics_ = step_.metrics();
    RunSaves saves_;
    Sampler sampler_;
    FinishedModel finished_;
    MemoryReport report_;
    size_t used_before_ = 0;       // device memory in use before this run
    int64_t done_ = 0;             // steps that are done: the number of the next one, from 0
    int64_t first_step_ = 0;       // that of this run's first one: not 0 after a resume
    int64_t validated_step_ = -1;  // the last one that was validated
    bool evaluated_ = false;       // the validation and sample due at this step are done
};
