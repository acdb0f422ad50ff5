// bench_report.h - what a bench has measured of steps, by phase, by operation, by wait and by rank (bench.h),
// compared with what the device can do; as tables or as JSON (--bench).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/plan_report.h"
#include "llmc/ranks.h"
#include "llmc/rates.h"
#include "llmc/step_plan.h"

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

struct Statistics {
    double mean, std, median, min;  // std: of the sample, by n - 1; 0 for one value
};

Statistics statistics(std::vector<double> values);

// Seconds of a step of one rank, the mean of several.
struct RankTimes {
    double computing = 0, hidden = 0, not_hidden = 0, waiting = 0;
};

constexpr size_t kBarriers = 9;

// The times of `count` ranks from what each of them has measured. `all` has what gather_rank_times()
// collects, one rank after another: the rank's clock at each barrier; then, for each step, the step's seconds
// and the four numbers of each of its exchanges[step] exchanges.
std::vector<RankTimes> rank_times(const std::vector<double>& all, size_t count,
                                  const std::vector<size_t>& exchanges);

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
    std::vector<std::string> phases() const;
    Statistics of(const std::string& phase) const;
    // What is reported, by name: the phases, and last the whole as a training runs it. If that is replayed,
    // the step that the phases belong to is "plain".
    std::vector<std::pair<std::string, Statistics>> times() const;
    double seconds() const { return times().back().second.median; }
    double flops_per_second() const { return flops / seconds(); }
    double bytes_per_second() const;
    // The operations of a step, the longest first: their costs from the dry run, their mean times as
    // measured.
    std::vector<OperationLine> operations() const;
    // Means over the steps: waits() has the waits place by place and last their sum, moved() the bytes of a
    // link.
    std::vector<Waits> waits() const;
    double moved(size_t route) const;
    // Whether anything is placed outside the device.
    bool moves() const {
        return std::ranges::any_of(steps, [](auto& s) { return s.waits.size() > 0; });
    }
};

nlohmann::ordered_json bench_json(const BenchReport& r);
// Prints the report, as tables or as JSON.
void print_bench(const BenchReport& r, bool json);
