// metrics.h - the results of each step: its loss and the norms of its gradients. They are written in device
// memory, read when the step is done, then checked, printed and logged.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "llmc/device.h"
#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/graph.h"
#include "llmc/run_records.h"
#include "llmc/save_progress.h"
#include "llmc/tensor.h"
#include "llmc/terminal_line.h"
#include "llmc/text.h"
#include "llmc/work.h"

// ---- the line of a step
//
// Decides for which steps training prints a line, and prints it.

struct StepFigures {
    int64_t step;  // from 0
    double loss, norm, rate, seconds;
    double waited = -1;  // of these, seconds waiting for streamed data or other ranks; negative: no such
    std::optional<int> slow_rank = {};
};

// The rank that the others wait for, given which share of a step each rank waited for others: at least half
// of the ranks waited a fifth of the step or more, and this one a quarter of that or less.
inline std::optional<int> slow_rank(const std::vector<double>& waited) {
    std::vector<double> sorted = waited;
    std::sort(sorted.begin(), sorted.end());
    const double usual = sorted[sorted.size() / 2];
    if (usual < 0.2 || sorted[0] > usual / 4) return std::nullopt;
    return static_cast<int>(std::min_element(waited.begin(), waited.end()) - waited.begin());
}

// Prints a line for each of the first steps, then one line per second or, if `every` is not 0, one for every
// `every`-th step. A terminal shows one short line instead, which is drawn anew as steps are done; the lines
// that `every` asks for, and that of the last step, stay there. Printed steps are counted from 1 to `steps`.
class StepLines {
  public:
    // A step's tokens and FLOPs. Utilization is relative to peak_flops per second. When a step reaches more,
    // new_peak() prints and returns what it is relative to from then on. `memory`: the bytes that the run
    // takes.
    struct Amounts {
        double tokens, flops, peak_flops;
        size_t memory;
        std::function<double(double reached)> new_peak = [](double reached) { return reached; };
    };
    StepLines(int64_t first_step, int64_t steps, int64_t every, Amounts a_step)
        : first_step_(first_step), steps_(steps), every_(every), a_step_(a_step) {}

    // Tokens of a step.
    double tokens() const { return a_step_.tokens; }
    // A step is done; `now` is the time in seconds on any clock.
    void add(const StepFigures& f, double now) {
        // The first steps are slower, because products are compiled and graphs recorded. The time left is
        // estimated from the others.
        const bool early = f.step - first_step_ < kFirst;
        const bool asked = every_ > 0 && (f.step + 1) % every_ == 0;
        seconds_per_step_ = early ? f.seconds : 0.9 * seconds_per_step_ + 0.1 * f.seconds;
        if (const double reached = a_step_.flops / f.seconds; reached > a_step_.peak_flops)
            a_step_.peak_flops = a_step_.new_peak(reached);
        smoothed_.add(f.loss);
        latest_ = f;
        now_ = now;
        if (is_terminal_)
            show_latest(asked || f.step + 1 == steps_);
        else if (early || (every_ > 0 ? asked : now >= printed_ + 1))
            print_latest();
    }

    // Prints the line of the latest step if it was not printed: before other output, and at the end.
    void print_latest() {
        if (!latest_ || is_terminal_) return;
        const StepFigures f = *std::exchange(latest_, std::nullopt);
        const int64_t done = f.step + 1;
        const int64_t left = seconds_left(f);
        // The device's clock measures the waiting, the host's the step; in very short steps the first may be
        // longer.
        std::string waited =
            f.waited < 0 ? "" : format(" | waited %.1f%%", 100 * std::min(f.waited / f.seconds, 1.0));
        if (f.slow_rank) waited += format(" | rank %d is slow", *f.slow_rank);
        print(stdout,
              "step %5lld/%lld %5.1f%% | loss %.6f | norm %.4f | lr %.3e | %8.2f ms | %8.0f tok/s | MFU "
              "%4.1f%%%s | %lld:%02lld left\n",
              static_cast<long long>(done), static_cast<long long>(steps_),
              100.0 * static_cast<double>(done) / static_cast<double>(steps_), f.loss, f.norm, f.rate,
              f.seconds * 1e3, a_step_.tokens / f.seconds,
              100.0 * a_step_.flops / f.seconds / a_step_.peak_flops, waited.c_str(),
              static_cast<long long>(left / 60), static_cast<long long>(left % 60));
        fflush(stdout);
        printed_ = now_;
    }

  private:
    static constexpr int64_t kFirst = 3;

    int64_t seconds_left(const StepFigures& f) const {
        return static_cast<int64_t>(seconds_per_step_ * static_cast<double>(steps_ - f.step - 1));
    }
    // The latest step's line on a terminal, at most ten times a second unless it stays.
    void show_latest(bool stays) {
        if (!stays && now_ < printed_ + 0.1) return;
        const StepFigures& f = *latest_;
        const auto left = static_cast<long long>(seconds_left(f));
        const double speed = a_step_.tokens / seconds_per_step_;
        const size_t memory = a_step_.memory;
        const std::string line = fitting_line(
            {format("step %lld/%lld", static_cast<long long>(f.step + 1), static_cast<long long>(steps_)),
             format("  loss %.4f", f.loss), format("  smoothed %.4f", smoothed_.value),
             speed < 1e5 ? format("  %.0f tokens/s", speed) : format("  %.0fk tokens/s", speed / 1e3),
             left < 3600 ? format("  %lld:%02lld left", left / 60, left % 60)
                         : format("  %lldh%02lldm left", left / 3600, left / 60 % 60),
             f.slow_rank ? format("  rank %d is slow", *f.slow_rank) : "",
             memory < 1 << 30 ? format("  %.0f MiB", mebibytes(memory))
                              : format("  %.1f GiB", gibibytes(memory))});
        if (stays)
            print(stdout, "%s\n", line.c_str());
        else
            draw_line(line);
        printed_ = now_;
    }

    bool is_terminal_ = is_terminal(STDOUT_FILENO);
    int64_t first_step_, steps_, every_;
    Amounts a_step_;
    double seconds_per_step_ = 0;
    SmoothedLoss smoothed_;
    std::optional<StepFigures> latest_;  // the latest step, if its line was not printed
    double now_ = 0, printed_ = 0;       // when the latest step was done, and the one printed last
};

// ---- the results of a step

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
    RunRecords& records() { return records_; }
    const RunRecords& records() const { return records_; }
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
        print(stdout, "--early-stopping %lld: no validation was better than that of step %lld, %.6f\n",
              static_cast<long long>(most), static_cast<long long>(best->step), best->loss);
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
                    format("step %lld: the loss is %g and the gradient's norm %g; the last good save: %s",
                           static_cast<long long>(step + 1), loss, norm, last_save.c_str()));
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
        records_.write(line);
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
    RunRecords records_;
};
