// bench.h - what a step takes, phase by phase and operation by operation, compared with what the device can
// do.
//
// A StepWatch is told of the ranges and the operations of steps as they run, and sets a mark in the stream at
// each boundary: on a GPU an event, so that measuring does not delay the step. The cost of an operation was
// counted in the dry run (work.h); the device's rates are measured just before. A step that is replayed as a
// graph has no such boundaries: phases are those of steps without graphs, and replayed steps are timed as a
// whole.
#pragma once

#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/bench_ranks.h"
#include "llmc/options.h"
#include "llmc/plan_report.h"
#include "llmc/rates_device.h"
#include "llmc/work.h"

// Operations are identified by name, products also by shape and form.
using OperationKey = std::pair<std::string_view, Product>;

struct OperationTime {
    double seconds = 0;  // without nested operations
    int64_t calls = 0;
};

// How long the device has waited at one place of the step for transfers, in seconds by Transfer::Of.
struct Waits {
    std::string place;
    std::array<double, Transfer::kKinds> seconds = {};
    double total() const { return std::accumulate(seconds.begin(), seconds.end(), 0.0); }
};

// What one step took, in seconds: the range "step" and, by name, the ranges directly in it; and the bytes
// that it moved, by Route.
struct StepTimes {
    std::map<std::string, double> ranges;
    std::map<OperationKey, OperationTime> operations;
    std::vector<Waits> waits = {};  // in the order of the step
    std::array<double, kRoutes> moved = {};
    std::vector<ExchangeTime> exchanges = {};  // with other ranks
    Waits& waits_at(const std::string& place) {
        const auto at = std::find_if(waits.rbegin(), waits.rend(), [&](auto& w) { return w.place == place; });
        return at != waits.rend() ? *at : waits.emplace_back(Waits{place});
    }
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
class StepWatch : RangeListener, OperationListener, WaitListener {
  public:
    // Listens to operations only if asked for.
    StepWatch(Stream stream, bool operations) : marks_(stream) {
        range_listener = this;
        wait_listener = this;
        if (operations) operation_listener = this;
    }
    ~StepWatch() {
        range_listener = nullptr;
        wait_listener = nullptr;
        operation_listener = nullptr;
    }

    // The times of the step that ran since the last call.
    StepTimes take() {
        marks_.finish();
        for (const Span& s : spans_) times_.ranges[s.name] += marks_.seconds(s.from, s.to);
        for (size_t i = 0; i + 1 < turns_.size(); i++)
            if (turns_[i].running)
                turns_[i].running->seconds += marks_.seconds(turns_[i].mark, turns_[i + 1].mark);
        for (const Wait& w : waits_) times_.waits_at(w.place).seconds[w.of] += marks_.seconds(w.from, w.to);
        for (size_t route = 0; route < kRoutes; route++)
            times_.moved[route] = bytes_moved[route] - moved_before_[route];
        moved_before_ = bytes_moved;
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
        OperationTime& time = times_.operations[{name, product}];
        time.calls++;
        running_.push_back(&time);
        turns_.push_back({marks_.set(), &time});
    }
    void operation_ends() override {
        running_.pop_back();
        turns_.push_back({marks_.set(), running_.empty() ? nullptr : running_.back()});
    }
    void wait_begins(Transfer::Of of) override {
        waits_.push_back({place_in_step(Range::path()), of, marks_.set(), 0});
    }
    void wait_ends() override { waits_.back().to = marks_.set(); }

    Marks marks_;
    StepTimes times_;
    Span open_[kDepth] = {};
    int depth_ = 0;
    std::vector<Span> spans_;
    std::vector<Turn> turns_;
    std::vector<OperationTime*> running_;  // the innermost last
    std::vector<Wait> waits_;
    std::array<double, kRoutes> moved_before_ = bytes_moved;
};

// ---- the report

struct Statistics {
    double mean, std, median, min;  // std: of the sample, by n - 1; 0 for one value
};

inline Statistics statistics(std::vector<double> values) {
    assert(!values.empty());
    std::sort(values.begin(), values.end());
    const size_t n = values.size();
    double sum = 0, squares = 0;
    for (double v : values) sum += v;
    const double mean = sum / static_cast<double>(n);
    for (double v : values) squares += (v - mean) * (v - mean);
    return {mean, n > 1 ? std::sqrt(squares / static_cast<double>(n - 1)) : 0,
            (values[(n - 1) / 2] + values[n / 2]) / 2, values[0]};
}

// A line of the table of operations: all calls of one kind in a step.
struct OperationLine {
    std::string name;
    double calls = 0, seconds = 0, flops = 0, bytes = 0;
    double roofline = 0;  // the seconds at the device's measured rates
};

struct BenchReport {
    const MemoryReport& memory;  // the model, the batch and what was planned
    bool forward_only, profiled;
    int threads, warmup;
    std::vector<std::pair<const Plan*, int>> plans;  // of a step, and how often each runs in it
    double tokens, flops;                            // of a step
    double matmul_peak, copy_peak;                   // measured: FLOP/s, bytes/s
    std::array<double, kRoutes> limits = kNoLimits;  // bytes/s of a link alone, from --rates; else infinite
    size_t taken_bytes = 0;
    StepTimes cold = {};
    std::vector<StepTimes> steps = {};
    std::vector<double> replayed = {};  // seconds of whole steps, if a training replays them as graphs
    std::vector<RankTimes> ranks = {};  // of several devices

    const char* whole() const { return forward_only ? "forward" : "step"; }
    // The ranges that were measured, in order; the update is missing if backward contains it.
    std::vector<std::string> phases() const {
        std::vector<std::string> names;
        for (const char* name : {"forward", "head", "backward", "update", "step"})
            if (steps[0].ranges.count(name) && (!forward_only || name == std::string_view("forward")))
                names.push_back(name);
        return names;
    }
    Statistics of(const std::string& phase) const {
        std::vector<double> seconds;
        for (const StepTimes& s : steps) seconds.push_back(s.ranges.at(phase));
        return statistics(std::move(seconds));
    }
    // What is reported, by name: the phases, and last the whole as a training runs it. If that is replayed,
    // the step that the phases belong to is "plain".
    std::vector<std::pair<std::string, Statistics>> times() const {
        std::vector<std::pair<std::string, Statistics>> all;
        for (const std::string& phase : phases()) all.emplace_back(phase, of(phase));
        if (!replayed.empty()) {
            all.back().first = std::string("plain_") + whole();
            all.emplace_back(whole(), statistics(replayed));
        }
        return all;
    }
    double seconds() const { return times().back().second.median; }
    double flops_per_second() const { return flops / seconds(); }
    double bytes_per_second() const {
        double bytes = 0;
        for (const auto& [plan, runs] : plans)
            for (const Work& w : plan->work) bytes += runs * w.bytes;
        return bytes / seconds();
    }
    std::vector<OperationLine> operations() const;
    // Means over the steps: waits() has the waits place by place and last their sum, moved() the bytes of a
    // link.
    std::vector<Waits> waits() const;
    double moved(size_t route) const {
        double bytes = 0;
        for (const StepTimes& s : steps) bytes += s.moved[route];
        return bytes / static_cast<double>(steps.size());
    }
    // Collects the times of all ranks; each of them must call it.
    void gather_ranks(Exchange& exchange) {
        std::vector<double> seconds;
        std::vector<std::vector<ExchangeTime>> exchanges;
        for (const StepTimes& s : steps)
            seconds.push_back(s.ranges.at(whole())), exchanges.push_back(s.exchanges);
        ranks = gather_rank_times(exchange, seconds, exchanges);
    }
    // Whether anything is placed outside the device.
    bool moves() const {
        return std::any_of(steps.begin(), steps.end(), [](auto& s) { return s.waits.size() > 0; });
    }
};

inline std::vector<Waits> BenchReport::waits() const {
    StepTimes sums;
    Waits all{"all"};
    for (const StepTimes& s : steps)
        for (const Waits& w : s.waits)
            for (size_t of = 0; of < Transfer::kKinds; of++) {
                const double mean = w.seconds[of] / static_cast<double>(steps.size());
                sums.waits_at(w.place).seconds[of] += mean;
                all.seconds[of] += mean;
            }
    sums.waits.push_back(all);
    return sums.waits;
}

// The operations of a step, the longest first: their costs from the dry run, their mean times as measured.
inline std::vector<OperationLine> BenchReport::operations() const {
    std::map<OperationKey, OperationLine> lines;
    const DeviceRates rates = {matmul_peak, copy_peak, 0, matmul_peak};
    for (const auto& [plan, runs] : plans)
        for (const Work& w : plan->work) {
            OperationLine& line = lines[{w.name, w.product}];
            line.name = w.text();
            line.calls += runs * w.calls;
            line.flops += runs * w.flops;
            line.bytes += runs * w.bytes;
            line.roofline += runs * seconds_of(w, rates);
        }
    std::map<OperationKey, OperationTime> times;
    for (const StepTimes& s : steps)
        for (const auto& [key, time] : s.operations) {
            times[key].calls += time.calls;
            times[key].seconds += time.seconds;
        }
    const double count = static_cast<double>(steps.size());
    std::vector<OperationLine> sorted;
    for (auto& [key, line] : lines) {
        assert(static_cast<double>(times[key].calls) == line.calls * count);  // the plan is the program
        line.seconds = times[key].seconds / count;
        sorted.push_back(line);
    }
    assert(times.size() == lines.size());
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const OperationLine& a, const OperationLine& b) { return a.seconds > b.seconds; });
    return sorted;
}

// Adds the waits and the transfers.
inline void add_waits(nlohmann::ordered_json& j, const BenchReport& r) {
    for (const Waits& w : r.waits()) {
        nlohmann::ordered_json line = {{"place", w.place}, {"ms", 1e3 * w.total()}};
        for (size_t of = 0; of < Transfer::kKinds; of++)
            line[std::string(Transfer::kNames[of]) + "_ms"] = 1e3 * w.seconds[of];
        j["waits"].push_back(line);
    }
    for (size_t route = 0; route < kRoutes; route++)
        if (r.moved(route) > 0) {
            nlohmann::ordered_json& link = j["links"][kRouteNames[route]];
            link = {{"bytes", r.moved(route)}, {"bytes_per_second", r.moved(route) / r.seconds()}};
            if (std::isfinite(r.limits[route])) link["limit"] = r.limits[route];
        }
}

inline nlohmann::ordered_json bench_json(const BenchReport& r) {
    const MemoryReport& m = r.memory;
    nlohmann::ordered_json j = {{"model", m.model},
                                {"device", m.device},
                                {"precision", m.precision},
                                {"batch", m.batch},
                                {"seq_len", m.seq_len},
                                {"grad_accum", m.grad_accum},
                                {"recompute", m.recompute},
                                {"threads", r.threads},
                                {"warmup", r.warmup},
                                {"steps", r.steps.size()},
                                {"cold_ms", 1e3 * r.cold.ranges.at(r.whole())}};
    for (const auto& [name, s] : r.times())
        j[name + "_ms"] = {
            {"mean", 1e3 * s.mean}, {"std", 1e3 * s.std}, {"median", 1e3 * s.median}, {"min", 1e3 * s.min}};
    j["tokens_per_second"] = r.tokens / r.seconds();
    j["flops_per_second"] = r.flops_per_second();
    j["matmul_peak"] = r.matmul_peak;
    j["matmul_share"] = r.flops_per_second() / r.matmul_peak;
    j["copy_peak"] = r.copy_peak;
    j["bytes_per_second"] = r.bytes_per_second();
    j["planned_bytes"] = m.total();
    j["taken_bytes"] = r.taken_bytes;
    if (r.moves()) add_waits(j, r);
    for (size_t number = 0; number < r.ranks.size(); number++) {
        const RankTimes& t = r.ranks[number];
        j["ranks"].push_back({{"rank", number},
                              {"computing_ms", 1e3 * t.computing},
                              {"exchange_hidden_ms", 1e3 * t.hidden},
                              {"exchange_not_hidden_ms", 1e3 * t.not_hidden},
                              {"waiting_ms", 1e3 * t.waiting}});
    }
    if (!r.profiled) return j;
    for (const OperationLine& o : r.operations())
        j["operations"].push_back({{"name", o.name},
                                   {"calls", static_cast<int64_t>(o.calls)},
                                   {"ms", 1e3 * o.seconds},
                                   {"flops", o.flops},
                                   {"bytes", o.bytes},
                                   {"roofline_ms", 1e3 * o.roofline}});
    return j;
}

// Prints a line for each operation, and one for the rest: fills, copies, and waits for the host.
inline void print_operations(FILE* to, const BenchReport& r) {
    const double whole = r.of(r.whole()).mean;
    double inside = 0;
    print(to, "\n%-58s %6s %10s %7s %8s %9s %12s %6s\n", "operation", "calls", "ms", "share", "GB/s",
          "GFLOP/s", "roofline ms", "ratio");
    for (const OperationLine& o : r.operations()) {
        inside += o.seconds;
        print(to, "%-58s %6.0f %10.3f %6.1f%% %8.1f %9.1f %12.3f %6.1f\n", o.name.c_str(), o.calls,
              1e3 * o.seconds, 100 * o.seconds / whole, o.bytes / o.seconds / 1e9, o.flops / o.seconds / 1e9,
              1e3 * o.roofline, o.seconds / o.roofline);
    }
    print(to, "%-58s %6s %10.3f %6.1f%%\n", "outside of operations", "", 1e3 * (whole - inside),
          100 * (whole - inside) / whole);
}

// Prints a line for each place where the step waits, and one for each link: what it carried on average over
// the whole step.
inline void print_waits(FILE* to, const BenchReport& r) {
    const double whole = r.of(r.whole()).mean;
    print(to, "\n%-20s", "waited, ms");
    for (const char* name : Transfer::kNames) print(to, " %10s", name);
    print(to, " %8s\n", "share");
    for (const Waits& w : r.waits()) {
        print(to, "%-20s", w.place.c_str());
        for (const double seconds : w.seconds) print(to, " %10.3f", 1e3 * seconds);
        print(to, " %7.2f%%\n", 100 * w.total() / whole);
    }
    print(to, "\n%-20s %10s %10s %10s\n", "link", "MB a step", "GB/s", "limit");
    for (size_t route = 0; route < kRoutes; route++)
        if (r.moved(route) > 0) {
            const bool known = std::isfinite(r.limits[route]);
            print(to, "%-20s %10.1f %10.3f %10s\n", kRouteNames[route], r.moved(route) / 1e6,
                  r.moved(route) / r.seconds() / 1e9,
                  known ? format("%.3f", r.limits[route] / 1e9).c_str() : "(--rates)");
        }
}

// Prints a line for each rank: where the time of a step goes.
inline void print_rank_times(FILE* to, const BenchReport& r) {
    print(to, "\n%-13s %10s %16s %20s %16s\n", "ms of a step", "computing", "exchange hidden",
          "exchange not hidden", "waits for others");
    for (size_t number = 0; number < r.ranks.size(); number++) {
        const RankTimes& t = r.ranks[number];
        print(to, "rank %-8zu %10.3f %16.3f %20.3f %16.3f\n", number, 1e3 * t.computing, 1e3 * t.hidden,
              1e3 * t.not_hidden, 1e3 * t.waiting);
    }
}

inline void print_table(FILE* to, const BenchReport& r) {
    const MemoryReport& m = r.memory;
    print(to, "%s: %s, %s, batch %d, seq_len %d, grad_accum %d, recompute %s, %d CPU threads\n",
          m.model.c_str(), m.device.c_str(), m.precision.c_str(), m.batch, m.seq_len, m.grad_accum,
          m.recompute.c_str(), r.threads);
    print(to, "%zu steps, after a cold one of %.2f ms and %d to warm up\n\n", r.steps.size(),
          1e3 * r.cold.ranges.at(r.whole()), r.warmup);
    print(to, "%-13s %10s %10s %10s %10s\n", "ms", "mean", "std", "median", "min");
    for (const auto& [name, s] : r.times())
        print(to, "%-13s %10.3f %10.3f %10.3f %10.3f\n", name.c_str(), 1e3 * s.mean, 1e3 * s.std,
              1e3 * s.median, 1e3 * s.min);
    print(to, "\n%.0f tokens/s\n", r.tokens / r.seconds());
    print(to, "%.1f GFLOP/s: %.1f%% of the %.1f of square products\n", r.flops_per_second() / 1e9,
          100 * r.flops_per_second() / r.matmul_peak, r.matmul_peak / 1e9);
    print(to, "%.1f GB/s: %.1f%% of the %.1f of a large copy\n", r.bytes_per_second() / 1e9,
          100 * r.bytes_per_second() / r.copy_peak, r.copy_peak / 1e9);
    print(to, "%.1f MiB planned, %.1f MiB taken\n", mebibytes(m.total()), mebibytes(r.taken_bytes));
    if (r.moves()) print_waits(to, r);
    if (!r.ranks.empty()) print_rank_times(to, r);
    if (r.profiled) print_operations(to, r);
}

// Prints the report, as tables or as JSON.
inline void print_bench(const BenchReport& r, bool json) {
    if (json)
        print(stdout, "%s\n", json_text(bench_json(r)).c_str());
    else
        print_table(stdout, r);
}

// ---- measuring

// The report of the bench that the options ask for, with the rates of the device, which it measures now. What
// is not in it yet: the plans, tokens and FLOPs of a step, and the steps.
template <class T>
BenchReport begin_bench(const Options& o, const MemoryReport& memory, const Rates& rates, Stream stream) {
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
