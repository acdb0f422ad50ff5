// bench_report.cpp - summarizes what a bench has measured, and prints it.
#include "llmc/bench_report.h"

#include <cmath>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/text.h"

using nlohmann::ordered_json;

Statistics statistics(std::vector<double> values) {
    assert(!values.empty());
    std::ranges::sort(values);
    const size_t n = values.size();
    double sum = 0, squares = 0;
    for (double v : values) sum += v;
    const double mean = sum / static_cast<double>(n);
    for (double v : values) squares += (v - mean) * (v - mean);
    return {mean, n > 1 ? std::sqrt(squares / static_cast<double>(n - 1)) : 0,
            (values[(n - 1) / 2] + values[n / 2]) / 2, values[0]};
}

std::vector<RankTimes> rank_times(const std::vector<double>& all, size_t count,
                                  const std::vector<size_t>& exchanges) {
    const size_t row = all.size() / count;
    std::vector<double> ahead(count);  // by how much each clock is ahead of the first rank's
    for (size_t r = 0; r < count; r++) {
        std::vector<double> differences;
        for (size_t b = 0; b < kBarriers; b++) differences.push_back(all[r * row + b] - all[b]);
        std::nth_element(differences.begin(), differences.begin() + kBarriers / 2, differences.end());
        ahead[r] = differences[kBarriers / 2];
    }
    std::vector<RankTimes> ranks(count);
    std::vector<double> ended(count);  // when a rank's exchanges so far were complete, by its clock
    size_t at = kBarriers;
    for (const size_t of_step : exchanges) {
        for (size_t r = 0; r < count; r++) ranks[r].computing += all[r * row + at];
        at++;
        for (size_t e = 0; e < of_step; e++, at += 4) {
            double last = all[at];  // when the last rank started it
            for (size_t r = 1; r < count; r++) last = std::max(last, all[r * row + at] - ahead[r]);
            for (size_t r = 0; r < count; r++) {
                const double* const t = &all[r * row + at];
                const double began = t[0] - ahead[r], asked = t[1] - ahead[r], took = t[2], waited = t[3];
                const double waiting = std::clamp(last - asked, 0.0, waited);
                ranks[r].computing -= waited;
                ranks[r].waiting += waiting;
                ranks[r].not_hidden += waited - waiting;
                // It began when the last rank had started it, and those before it were complete. Control
                // messages do not wait for those.
                const bool is_control = waited == took && asked == began;
                const double end = began + took, first = is_control ? last : std::max(last, ended[r]);
                ranks[r].hidden += std::max(0.0, end - first) - (waited - waiting);
                if (!is_control) ended[r] = std::max(ended[r], end);
            }
        }
    }
    for (RankTimes& r : ranks) {
        r.hidden = std::max(0.0, r.hidden);
        for (double* seconds : {&r.computing, &r.hidden, &r.not_hidden, &r.waiting})
            *seconds /= static_cast<double>(exchanges.size());
    }
    return ranks;
}

// ---- what a step took

std::vector<std::string> BenchReport::phases() const {
    std::vector<std::string> names;
    for (const char* name : {"forward", "head", "backward", "update", "step"})
        if (steps[0].ranges.count(name) && (!forward_only || name == std::string_view("forward")))
            names.push_back(name);
    return names;
}

Statistics BenchReport::of(const std::string& phase) const {
    std::vector<double> seconds;
    for (const StepTimes& s : steps) seconds.push_back(s.ranges.at(phase));
    return statistics(std::move(seconds));
}

std::vector<std::pair<std::string, Statistics>> BenchReport::times() const {
    std::vector<std::pair<std::string, Statistics>> all;
    for (const std::string& phase : phases()) all.emplace_back(phase, of(phase));
    if (!replayed.empty()) {
        all.back().first = std::string("plain_") + whole();
        all.emplace_back(whole(), statistics(replayed));
    }
    return all;
}

double BenchReport::bytes_per_second() const {
    double bytes = 0;
    for (const auto& [plan, runs] : plans)
        for (const Work& w : plan->work) bytes += runs * w.bytes;
    return bytes / seconds();
}

double BenchReport::moved(size_t route) const {
    double bytes = 0;
    for (const StepTimes& s : steps) bytes += s.moved[route];
    return bytes / static_cast<double>(steps.size());
}
std::vector<Waits> BenchReport::waits() const {
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

std::vector<OperationLine> BenchReport::operations() const {
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
    std::ranges::stable_sort(sorted, std::greater(), &OperationLine::seconds);
    return sorted;
}

// Adds the waits and the transfers.
static void add_waits(ordered_json& j, const BenchReport& r) {
    for (const Waits& w : r.waits()) {
        ordered_json line = {{"place", w.place}, {"ms", 1e3 * w.total()}};
        for (size_t of = 0; of < Transfer::kKinds; of++)
            line[std::string(Transfer::kNames[of]) + "_ms"] = 1e3 * w.seconds[of];
        j["waits"].push_back(line);
    }
    for (size_t route = 0; route < kRoutes; route++)
        if (r.moved(route) > 0) {
            ordered_json& link = j["links"][kRouteNames[route]];
            link = {{"bytes", r.moved(route)}, {"bytes_per_second", r.moved(route) / r.seconds()}};
            if (std::isfinite(r.limits[route])) link["limit"] = r.limits[route];
        }
}

ordered_json bench_json(const BenchReport& r) {
    const MemoryReport& m = r.memory;
    ordered_json j = {{"model", m.model},
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
static void print_operations(FILE* to, const BenchReport& r) {
    const double whole = r.of(r.whole()).mean;
    double inside = 0;
    print(to, "\n%-58s %6s %10s %7s %8s %9s %12s %6s\n", "operation", "calls", "ms", "share", "GB/s",
          "GFLOP/s", "roofline ms", "ratio");
    for (const OperationLine& o : r.operations()) {
        inside += o.seconds;
        print(to, "%-58s %6.0f %10.3f %6.1f%% %8.1f %9.1f %12.3f %6.1f\n", o.name, o.calls, 1e3 * o.seconds,
              100 * o.seconds / whole, o.bytes / o.seconds / 1e9, o.flops / o.seconds / 1e9, 1e3 * o.roofline,
              o.seconds / o.roofline);
    }
    print(to, "%-58s %6s %10.3f %6.1f%%\n", "outside of operations", "", 1e3 * (whole - inside),
          100 * (whole - inside) / whole);
}

// Prints a line for each place where the step waits, and one for each link: what it carried on average over
// the whole step.
static void print_waits(FILE* to, const BenchReport& r) {
    const double whole = r.of(r.whole()).mean;
    print(to, "\n%-20s", "waited, ms");
    for (const char* name : Transfer::kNames) print(to, " %10s", name);
    print(to, " %8s\n", "share");
    for (const Waits& w : r.waits()) {
        print(to, "%-20s", w.place);
        for (const double seconds : w.seconds) print(to, " %10.3f", 1e3 * seconds);
        print(to, " %7.2f%%\n", 100 * w.total() / whole);
    }
    print(to, "\n%-20s %10s %10s %10s\n", "link", "MB a step", "GB/s", "limit");
    for (size_t route = 0; route < kRoutes; route++)
        if (r.moved(route) > 0) {
            const bool known = std::isfinite(r.limits[route]);
            print(to, "%-20s %10.1f %10.3f %10s\n", kRouteNames[route], r.moved(route) / 1e6,
                  r.moved(route) / r.seconds() / 1e9,
                  known ? format("%.3f", r.limits[route] / 1e9) : "(--rates)");
        }
}

// Prints a line for each rank: where the time of a step goes.
static void print_rank_times(FILE* to, const BenchReport& r) {
    print(to, "\n%-13s %10s %16s %20s %16s\n", "ms of a step", "computing", "exchange hidden",
          "exchange not hidden", "waits for others");
    for (size_t number = 0; number < r.ranks.size(); number++) {
        const RankTimes& t = r.ranks[number];
        print(to, "rank %-8zu %10.3f %16.3f %20.3f %16.3f\n", number, 1e3 * t.computing, 1e3 * t.hidden,
              1e3 * t.not_hidden, 1e3 * t.waiting);
    }
}

static void print_table(FILE* to, const BenchReport& r) {
    const MemoryReport& m = r.memory;
    print(to, "%s: %s, %s, batch %d, seq_len %d, grad_accum %d, recompute %s, %d CPU threads\n", m.model,
          m.device, m.precision, m.batch, m.seq_len, m.grad_accum, m.recompute, r.threads);
    print(to, "%zu steps, after a cold one of %.2f ms and %d to warm up\n\n", r.steps.size(),
          1e3 * r.cold.ranges.at(r.whole()), r.warmup);
    print(to, "%-13s %10s %10s %10s %10s\n", "ms", "mean", "std", "median", "min");
    for (const auto& [name, s] : r.times())
        print(to, "%-13s %10.3f %10.3f %10.3f %10.3f\n", name, 1e3 * s.mean, 1e3 * s.std, 1e3 * s.median,
              1e3 * s.min);
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

void print_bench(const BenchReport& r, bool json) {
    if (json)
        print(stdout, "%s\n", json_text(bench_json(r)));
    else
        print_table(stdout, r);
}
