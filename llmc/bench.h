// bench.h - measures what steps take, phase by phase and operation by operation, and where the time of each
// of several ranks goes (bench_report.h).
//
// A StepWatch is told of the ranges and the operations of steps as they run, and sets a mark in the stream at
// each boundary: on a GPU an event, so that measuring does not delay the step. The cost of an operation was
// counted in the dry run (work.h); the device's rates are measured just before. A step that is replayed as a
// graph has no such boundaries: phases are those of steps without graphs, and replayed steps are timed as a
// whole.
//
// An exchange between ranks is complete only when the last rank has started it. Until then, a rank that waits
// for it waits for others. The clocks of machines differ, so they are compared once: all ranks look at theirs
// when they leave a barrier.
#pragma once

#include <omp.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/bench_report.h"
#include "llmc/run_config.h"
#include "llmc/ranks.h"
#include "llmc/ranks_exchange.h"
#include "llmc/rates_device.h"
#include "llmc/work.h"

// Passes everything on to another engine, and measures it. Exchanges between GPUs, which no engine makes, are
// measured too.
class MeasuredEngine : public RankEngine {
  public:
    explicit MeasuredEngine(RankEngine& engine) : engine_(engine) { now_measured = this; }
    MeasuredEngine(const MeasuredEngine&) = delete;
    ~MeasuredEngine() override { now_measured = nullptr; }

    void exchange(std::span<const Part> send, std::span<const Part> receive) override {
        const double began = exchange_clock();
        engine_.exchange(send, receive);
        const double took = exchange_clock() - began;
        times_.push_back({began, began, took, took});
    }
    void set_patience(double seconds) override { engine_.set_patience(seconds); }
    void set_where(const std::string& where) override { engine_.set_where(where); }
    std::string where() const override { return engine_.where(); }
    void watch(std::function<std::string()> fault) override { engine_.watch(std::move(fault)); }
    void start(std::vector<ExchangeRound> rounds) override {
        began_.push_back(exchange_clock());
        engine_.start(std::move(rounds));
    }
    void finish(size_t number) override {
        const double asked = exchange_clock();
        engine_.finish(number);
        const double ended = exchange_clock();
        for (; finished_ <= number; finished_++) {  // the wait is for the last of these
            const double began = began_.front(), took = engine_.seconds_of(finished_);
            began_.pop_front();
            times_.push_back(
                {began, asked, took < 0 ? ended - began : took, finished_ == number ? ended - asked : 0});
        }
    }
    double seconds_of(size_t number) const override { return engine_.seconds_of(number); }
    void end_all(int code) override { engine_.end_all(code); }
    Rank rank() const override { return engine_.rank(); }

    // Returns the exchanges that were measured since the last call, in order.
    std::vector<ExchangeTime> take() {
        std::vector<ExchangeTime> times = std::exchange(times_, {});
        const std::vector<ExchangeTime> of_gpu = timer_.take();
        times.insert(times.end(), of_gpu.begin(), of_gpu.end());
        return times;
    }

    static inline MeasuredEngine* now_measured = nullptr;  // the one that there is, if any

  private:
    RankEngine& engine_;
    std::vector<ExchangeTime> times_;
    ExchangeTimer timer_;       // of exchanges between GPUs
    std::deque<double> began_;  // of exchanges that are under way
    size_t finished_ = 0;       // how many are not
};

// Where in the step a range is: its phase, and the block in it, or the unit that is updated. For "step
// backward block 3 update 4" that is "backward block 3".
inline std::string place_in_step(const std::string& path) {
    const size_t begin = std::min(path.size(), path.find(' ')) + 1;
    if (begin > path.size()) return path;
    const std::string phase = path.substr(begin, path.find(' ', begin) - begin);
    if (const size_t block = path.find(" block "); block != std::string::npos) {
        const size_t number = block + std::strlen(" block ");
        return phase + path.substr(block, path.find(' ', number) - block);
    }
    const size_t unit = path.rfind(" update ");
    return phase == "update" && unit >= begin && unit != std::string::npos ? path.substr(unit + 1) : phase;
}

// Times the steps that run while it exists.
class StepWatch : StepListener {
  public:
    // Listens to operations only if asked for.
    StepWatch(Stream stream, bool operations) : marks_(stream), operations_(operations) {
        step_listener = this;
    }
    ~StepWatch() { step_listener = nullptr; }

    // The times of the step that ran since the last call.
    StepTimes take() {
        marks_.finish();
        for (const Span& s : spans_) times_.ranges[s.name] += marks_.seconds(s.from, s.to);
        for (size_t i = 0; i + 1 < turns_.size(); i++)
            if (turns_[i].running)
                turns_[i].running->seconds += marks_.seconds(turns_[i].mark, turns_[i + 1].mark);
        for (const Wait& w : waits_) times_.waits_at(w.place).seconds[w.of] += marks_.seconds(w.from, w.to);
        if (MeasuredEngine::now_measured) times_.exchanges = MeasuredEngine::now_measured->take();
        spans_.clear();
        turns_.clear();
        waits_.clear();
        marks_.clear();
        return std::exchange(times_, {});
    }

  private:
    static constexpr int kDepth = 2;  // the step and its phases; ranges nested in phases are not timed
    struct Span {
        const char* name;
        int from, to;
    };
    struct Turn {  // from a mark on this operation runs, or none
        int mark;
        OperationTime* running;
    };
    struct Wait {
        std::string place;
        Transfer::Of of;
        int from, to;
    };

    void range_opens(const char* name) override {
        if (depth_++ < kDepth) open_[depth_ - 1] = {name, marks_.set(), 0};
    }
    void range_closes() override {
        if (--depth_ >= kDepth) return;
        spans_.push_back(open_[depth_]);
        spans_.back().to = marks_.set();
    }
    void operation_begins(const char* name, const Product& product) override {
        if (!operations_) return;
        OperationTime& time = times_.operations[{name, product}];
        time.calls++;
        running_.push_back(&time);
        turns_.push_back({marks_.set(), &time});
    }
    void operation_ends() override {
        if (!operations_) return;
        running_.pop_back();
        turns_.push_back({marks_.set(), running_.empty() ? nullptr : running_.back()});
    }
    void transfer_begins(Route route, size_t bytes) override {
        times_.moved[route] += static_cast<double>(bytes);
    }
    void wait_begins(Transfer::Of of) override {
        waits_.push_back({place_in_step(Range::path()), of, marks_.set(), 0});
    }
    void wait_ends() override { waits_.back().to = marks_.set(); }

    Marks marks_;
    const bool operations_;
    StepTimes times_;
    Span open_[kDepth] = {};
    int depth_ = 0;
    std::vector<Span> spans_;
    std::vector<Turn> turns_;
    std::vector<OperationTime*> running_;  // the innermost last
    std::vector<Wait> waits_;
};

// ---- measuring

// The report of the bench that the options ask for, with the rates of the device, which it measures now. What
// is not in it yet: the plans, tokens and FLOPs of a step, and the steps.
template <class T>
BenchReport begin_bench(const RunConfig& o, const MemoryReport& memory, const Rates& rates, Stream stream) {
    return {.memory = memory,
            .forward_only = o.bench == "forward",
            .profiled = o.profile_ops,
            .threads = omp_get_max_threads(),
            .warmup = o.bench_warmup,
            .plans = {},
            .tokens = 0,
            .flops = 0,
            .matmul_peak = measured_matmul_flops<T>(stream, memory.allocated()),
            .copy_peak = measured_copy_bandwidth(stream),
            .limits = rates.measured_transfers()};
}

// Measures the phases of single steps, or their operations.
template <class RunOne>
void bench_phases(BenchReport& r, Stream stream, int count, RunOne&& run_one) {
    StepWatch watch(stream, r.profiled);
    for (int step = 0; step < 1 + r.warmup + count; step++) {
        run_one(step);
        StepTimes times = watch.take();
        if (step == 0)
            r.cold = std::move(times);
        else if (step > r.warmup)
            r.steps.push_back(std::move(times));
    }
}

// Measures steps that are replayed as graphs, one after the other as a training runs them. At least two steps
// before them do not count: one without recording, and one that is recorded.
template <class RunOne>
void bench_replays(BenchReport& r, Stream stream, int count, RunOne&& run_one) {
    Marks ends(stream);
    const int before = 1 + std::max(1, r.warmup);
    for (int step = 0; step < before + count; step++) {
        run_one(step);
        ends.set();
    }
    ends.finish();
    for (int step = before; step < before + count; step++) r.replayed.push_back(ends.seconds(step - 1, step));
}

// Collects the times of all ranks; each of them must call it, for as many steps.
inline void gather_ranks(BenchReport& r, Exchange& exchange) {
    std::vector<double> own;
    std::vector<size_t> counts;
    for (size_t b = 0; b < kBarriers; b++) {
        exchange.largest(0);
        own.push_back(exchange_clock());
    }
    for (const StepTimes& s : r.steps) {
        own.push_back(s.ranges.at(r.whole()));
        for (const ExchangeTime& e : s.exchanges) own.insert(own.end(), {e.began, e.asked, e.took, e.waited});
        counts.push_back(s.exchanges.size());
    }
    const std::vector<double> all = exchange.gather(own);
    r.ranks = rank_times(all, all.size() / own.size(), counts);
}
