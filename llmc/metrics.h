// metrics.h - the results of each step: its loss and the norms of its gradients. They are written in device
// memory, read when the step is done, then checked, printed and logged.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "llmc/device.h"
#include "llmc/error.h"
#include "llmc/graph.h"
#include "llmc/run_records.h"
#include "llmc/save_folder.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

class Metrics {
  public:
    // The gradient's norm is the first of `norms` numbers or, with norm_of_each, the norm of all of them
    // together. `sums` is the number of sums of squares from which the norm is computed.
    Metrics(int64_t norms, bool norm_of_each, int64_t sums)
        : norm_of_each_(norm_of_each), norms_(nullptr, {norms, 1}), sums_(nullptr, {sums, 1}) {}

    // The numbers that a step writes, and their memory.
    Tensor<float>& loss() { return loss_; }    // (1)
    Tensor<float>& norms() { return norms_; }  // (norms, 1)
    Tensor<float>& sums() { return sums_; }    // (sums, 1)
    int64_t count() const { return 1 + norms_.rows() + sums_.rows(); }
    size_t bytes() const { return static_cast<size_t>(count()) * sizeof(float); }
    // The pinned host memory to which a step's results are read.
    size_t pinned_bytes() const { return kHostIsDevice ? 0 : std::size(copies_) * copy_bytes(); }
    void allocate() {
        memory_ = DeviceBuffer(bytes(), "the metrics");
        float* at = reinterpret_cast<float*>(memory_.data());
        loss_ = Tensor<float>(at, {1});
        norms_ = Tensor<float>(at + 1, norms_.shape());
        sums_ = Tensor<float>(at + 1 + norms_.rows(), sums_.shape());
        for (auto& copy : copies_) copy.emplace(copy_bytes());
    }

    // From here on, steps are printed and logged.
    void print_to(const StepLines& lines) { lines_ = lines; }
    RunRecords records;
    // From here on, the lines say how long steps wait for data that is streamed from host or disk, and for
    // other ranks.
    void count_waiting(Stream stream) {
        for (auto& waits : waits_) waits.emplace(stream);
    }
    // Which share of the latest step this rank waited for others; 0 if that is not counted.
    double waited_for_ranks() const { return waited_for_ranks_; }
    // The next lines name the rank that the others wait for, if there is one. `waited` has that share of
    // every rank.
    void compare_ranks(const std::vector<double>& waited) { slow_rank_ = slow_rank(waited); }
    // The last good save, for the message about a loss that is not finite.
    std::string last_save = "none";
    // The loss of the run's first step with a loss. A resumed run takes it from the save.
    std::optional<double> first_loss;
    // The best validation, from the first one on. A resumed run takes it from the save.
    std::optional<BestValidation> best;
    // `counts`: a validation that was no better counts for ends_early().
    void compare_validation(int64_t step, double loss, bool counts) {
        if (!best || loss < best->loss)
            best = {loss, step, 0};
        else if (step != best->step && counts)
            best->worse_since++;
    }
    // True, and says so, if the last `most` validations were no better than the one before them. 0: never.
    bool ends_early(int64_t most) {
        if (most == 0 || !best || best->worse_since < most) return false;
        finish();
        print(stdout, "--early-stopping %ld: no validation was better than that of step %ld, %.6f\n", most,
              best->step, best->loss);
        return true;
    }
    // False if the run resumes from a save that was not good.
    bool began_good = true;
    // True if the state after the latest step is worth saving: its loss is not far above the first one, and
    // its gradient is not zero (as it is when all activations have died). read() has checked that both are
    // finite.
    bool is_good() const { return why_bad().empty(); }
    // What is wrong with the latest step; empty if it is good. Until this run has a step with a loss, its
    // state is as good as the save that it resumes.
    std::string why_bad() const {
        if (!latest_ && !began_good) return "a loss or a gradient that was not good when it was saved before";
        if (!latest_ || !first_loss) return "";
        const double loss = latest_->first, most = *first_loss + std::max(1.0, *first_loss);
        if (loss > most) return format("a loss of %g, far above the %g of the first step", loss, *first_loss);
        return latest_->second == 0 ? "a gradient of zero" : "";
    }
    // Called once, for the first step after a save that has a loss: with what is wrong with it, or with an
    // empty text. It tells whether the update before the save has left good weights.
    std::function<void(const std::string& why_bad)> judge_save;
    // Called before reporting a loss that is not finite, if no step had a finite one yet. Fails if it knows
    // the reason.
    std::function<void()> explain = [] {};

    void step_begins(int64_t step) {
        if (pending_.empty()) completed_ = clock_.seconds();
        if (waits_[step % 2]) waits_[step % 2]->start();
    }
    // Queues reading the step's results, then processes the step before, so that the device has work while
    // the host does that.
    void step_ends(int64_t step, double rate, Stream stream) {
        if (waits_[step % 2]) waits_[step % 2]->stop();
        copies_[step % 2]->start(memory_.data(), stream);
        pending_.push_back({step, rate});
        read(kStepsAhead);
    }
    // Processes all steps and prints the line of the latest, so that other output can follow. Nothing of a
    // step is saved before the step was processed.
    void finish() {
        read(0);
        if (lines_) lines_->print_latest();
    }

  private:
    size_t copy_bytes() const { return sizeof(float) * static_cast<size_t>(1 + norms_.rows()); }
    static constexpr size_t kStepsAhead = StepGraphs::kReplays ? 1 : 0;

    // Processes the results of all steps except the latest `ahead`. Fails if they are not finite. A step's
    // time is measured from the end of the step before it to its own end.
    void read(size_t ahead) {
        for (; pending_.size() > ahead; pending_.pop_front()) {
            const auto [step, rate] = pending_.front();
            const float* numbers = reinterpret_cast<const float*>(copies_[step % 2]->wait());
            const double before = std::exchange(completed_, clock_.seconds());
            const double loss = double{numbers[0]}, norm = whole_norm(numbers + 1);
            if (!std::isfinite(loss) || !std::isfinite(norm)) {
                if (!latest_) explain();
                judge(format("a loss of %g and a gradient's norm of %g", loss, norm));
                throw StepError(
                    format("step %ld: the loss is %g and the gradient's norm %g; the last good save: %s",
                           step + 1, loss, norm, last_save));
            }
            if (loss != 0 || norm != 0) {  // else no token had a loss
                if (!first_loss) first_loss = loss;
                latest_ = {loss, norm};
                judge(why_bad());
            }
            const std::optional<StepWaits>& waits = waits_[step % 2];
            const double seconds = completed_ - before;
            if (waits) waited_for_ranks_ = waits->seconds_for_ranks() / seconds;
            if (lines_) record({step, loss, norm, rate, seconds, waits ? waits->seconds() : -1, slow_rank_});
        }
    }
    void judge(const std::string& why_bad) {
        if (judge_save) std::exchange(judge_save, nullptr)(why_bad);
    }
    double whole_norm(const float* norms) const {
        double squares = 0;
        for (int64_t i = 0; i < (norm_of_each_ ? norms_.rows() : 1); i++)
            squares += double{norms[i]} * double{norms[i]};
        return std::sqrt(squares);
    }
    void record(const StepFigures& f) {
        lines_->add(f, clock_.seconds());
        nlohmann::ordered_json line = {{"step", f.step + 1},
                                       {"loss", f.loss},
                                       {"grad_norm", f.norm},
                                       {"lr", f.rate},
                                       {"ms", f.seconds * 1e3}};
        line["tokens_per_second"] = lines_->tokens() / f.seconds;
        if (f.waited >= 0) line["waited_ms"] = f.waited * 1e3;
        records.write(line);
    }

    struct Pending {
        int64_t step;
        double rate;
    };
    bool norm_of_each_;
    Tensor<float> loss_{nullptr, {1}}, norms_, sums_;
    DeviceBuffer memory_;
    std::optional<Readback> copies_[2];  // for even and odd steps
    std::deque<Pending> pending_;        // steps that were queued and not processed yet
    WallClock clock_;
    std::optional<StepWaits> waits_[2];                // for even and odd steps
    std::optional<std::pair<double, double>> latest_;  // loss and norm of the latest step that had a loss
    double completed_ = 0;  // when the latest processed step was done, on the clock
    double waited_for_ranks_ = 0;
    std::optional<int> slow_rank_;
    std::optional<StepLines> lines_;
};
