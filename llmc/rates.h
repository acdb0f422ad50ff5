// rates.h - how fast the device does each kind of operation: by nominal rates, or by a table of measured ones
// (rates_calibrate.h, rates_file.cpp); and how long a plan then takes, phase by phase, and what limits it.
//
// A product's rate is looked up in a grid of shapes, every other operation's by its name and its bytes,
// attention's by its length. Between measured sizes the logarithms of rates are interpolated.
#pragma once

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "llmc/build.h"
#include "llmc/step_plan.h"

// What a device can do: FLOP/s, bytes/s, and the seconds that each launch takes besides. Products in TF32
// have FLOP/s of their own, and so has attention unless they are 0.
struct DeviceRates {
    double flops, bandwidth, latency, tf32_flops = 0, attention_flops = 0;

    double flops_of(const Work& work) const {
        if (work.product.tf32) return tf32_flops;
        return work.variant.length > 0 && attention_flops > 0 ? attention_flops : flops;
    }
};

// The seconds of an operation by the roofline model: for its FLOPs or for its bytes, whichever take longer.
inline double seconds_of(const Work& work, const DeviceRates& rates) {
    return std::max(work.flops / rates.flops_of(work), work.bytes / rates.bandwidth) +
           rates.latency * work.calls;
}

// Where a size is among measured sizes, which rise: between sizes[low] and the next, at the share `part` of
// the distance of their logarithms. Outside of them at the nearest.
struct Between {
    size_t low;
    double part;
};
inline Between between_sizes(const std::vector<double>& sizes, double size) {
    if (size <= sizes.front() || sizes.size() == 1) return {0, 0};
    if (size >= sizes.back()) return {sizes.size() - 2, 1};
    const auto above = std::upper_bound(sizes.begin(), sizes.end(), size);
    const auto low = static_cast<size_t>(above - sizes.begin()) - 1;
    return {low, std::log(size / sizes[low]) / std::log(sizes[low + 1] / sizes[low])};
}

// The rates of one operation at some sizes.
struct RateCurve {
    std::vector<double> sizes, rates;

    // Adds the rate at a size. If there is one already, the better one stays.
    void put(double size, double rate) {
        const auto at = std::lower_bound(sizes.begin(), sizes.end(), size);
        const auto index = at - sizes.begin();
        if (at != sizes.end() && *at == size) {
            double& best = rates[static_cast<size_t>(index)];
            best = std::max(best, rate);
            return;
        }
        sizes.insert(at, size);
        rates.insert(rates.begin() + index, rate);
    }
    double at(double size) const {
        const auto [low, part] = between_sizes(sizes, size);
        if (part == 0) return rates[low];
        return std::exp((1 - part) * std::log(rates[low]) + part * std::log(rates[low + 1]));
    }
};

// The FLOP/s of products (m, n, k) of one form, for a grid of shapes.
struct ProductRates {
    std::array<std::vector<double>, 3> sizes;  // of m, n and k
    std::vector<double> rates;                 // the index of k varies fastest

    double& of(size_t m, size_t n, size_t k) {
        return rates[(m * sizes[1].size() + n) * sizes[2].size() + k];
    }
    size_t shapes() const { return sizes[0].size() * sizes[1].size() * sizes[2].size(); }
    double rate(const std::array<double, 3>& shape) const {
        Between at[3];
        for (size_t d = 0; d < 3; d++) at[d] = between_sizes(sizes[d], shape[d]);
        double rate = 0;  // its logarithm
        for (int corner = 0; corner < 8; corner++) {
            double share = 1;
            size_t index = 0;
            for (size_t d = 0; d < 3; d++) {
                const bool high = corner >> d & 1;
                share *= high ? at[d].part : 1 - at[d].part;
                index = index * sizes[d].size() + std::min(at[d].low + high, sizes[d].size() - 1);
            }
            if (share > 0) rate += share * std::log(rates[index]);
        }
        return std::exp(rate);
    }
    // The seconds of a product. One that is thinner than all measured ones takes as long as the thinnest. One
    // of columns of a wider matrix is no faster than with all of its columns, as its rows are as far apart.
    double seconds(const Product& p) const {
        std::array<double, 3> shape = {static_cast<double>(p.m), static_cast<double>(p.n),
                                       static_cast<double>(p.k)};
        for (size_t d = 0; d < 3; d++) shape[d] = std::max(shape[d], sizes[d].front());
        std::array<double, 3> wide = shape;
        double& columns = wide[p.transpose_a ? 0 : 2];
        columns = std::max(columns, static_cast<double>(p.a_row));
        wide[1] = std::max(wide[1], static_cast<double>(p.out_row));
        return 2 * shape[0] * shape[1] * shape[2] / std::min(rate(shape), rate(wide));
    }
};

// What a phase's time is spent on. Exchange: between the ranks of several devices.
namespace costs {  // Cost::Products indexes arrays
enum Cost : size_t { Products, Attention, Passes, Disk, Link, Host, Exchange };
}
using costs::Cost;
constexpr size_t kCosts = 7, kComputing = 3;  // the first of them compute, the others move data
inline constexpr const char* kCostNames[kCosts] = {"products", "attention", "memory passes", "disk",
                                                   "link",     "host",      "exchange"};

inline Cost cost_of(const Work& work) {
    if (work.product.m > 0) return Cost::Products;
    return work.variant.length > 0 ? Cost::Attention : Cost::Passes;
}

inline Cost cost_of(Route route) {
    if (route == Route::HostUpdate) return Cost::Host;
    if (is_exchange(route)) return Cost::Exchange;
    return is_disks(route) ? Cost::Disk : Cost::Link;
}

// The name under which a table has an operation's rates, with the operation's form if that matters.
inline std::string rate_name(const Work& w) {
    std::string name = w.name;
    const int head_size = w.variant.head_size;
    if (head_size > 0) name += head_size <= 80 ? " 64" : head_size <= 128 ? " 128" : " 256";
    if (*w.variant.form) name += std::string(" ") + w.variant.form;
    return name;
}
inline std::string product_form(const Product& p) {
    return std::string(p.transpose_a ? "T" : "N") + (p.transpose_b ? "T" : "N") +
           (p.widened ? " to fp32" : "");
}

// The name of the rate for operations that have none of their own: that of a copy.
inline constexpr const char* kCopyRate = "copy";

// An array that has this number for every Route.
constexpr std::array<double, kRoutes> for_all_routes(double number) {
    std::array<double, kRoutes> all = {};
    all.fill(number);
    return all;
}
// Bytes/s by Route if transfers take no time.
constexpr double kFree = std::numeric_limits<double>::infinity();
constexpr std::array<double, kRoutes> kNoLimits = for_all_routes(kFree);
// The share of its speed that computing keeps, by Route, if transfers do not slow it down.
constexpr std::array<double, kRoutes> kUndisturbed = for_all_routes(1);

// What RankLinks::network_of is if the network's rate was measured.
inline constexpr std::string_view kMeasured = "measured";

// How a rank reaches the others. It has a link of its own to those on its machine, with the rate of
// Route::ToRanks. The ranks of a machine share its network equally: a rank's share is the rate of
// Route::ToMachines.
struct RankLinks {
    int on_a_machine = 1;         // ranks
    double network = kFree;       // bytes/s of a machine, each way
    bool over_host_link = false;  // a GPU reaches the other ranks over its link to the host
    bool link_is_nominal = true;  // else measured
    const char* network_of = "";  // where its rate is from: "nominal", "measured", "--network"
};

struct Rates {
    DeviceRates nominal;
    std::map<std::string, ProductRates> products = {};  // by product_form()
    std::map<std::string, RateCurve> operations = {};   // by rate_name(): FLOP/s of attention, else bytes/s
    std::array<double, kRoutes> transfers = kNoLimits;  // bytes/s, by Route
    std::array<double, kRoutes> beside = kUndisturbed;  // share of its speed that computing keeps meanwhile
    RankLinks ranks = {};

    Rates(const DeviceRates& nominal) : nominal(nominal) {}
    bool measured() const { return !operations.empty(); }
    // The bytes/s of transfers, where they were measured.
    std::array<double, kRoutes> measured_transfers() const {
        if (!measured()) return kNoLimits;
        auto all = transfers;
        if (ranks.link_is_nominal) all[Route::ToRanks] = kFree;
        if (ranks.network_of != kMeasured) all[Route::ToMachines] = kFree;
        return all;
    }

    // The seconds of all calls of an operation.
    double seconds(const Work& w) const {
        if (!measured()) return seconds_of(w, nominal);
        if (w.calls == 0) return 0;
        const Product& p = w.product;
        if (p.m > 0) {
            auto form = products.find(product_form(p));
            if (form == products.end()) form = products.find(p.transpose_a ? "TN" : "NN");
            return w.calls * form->second.seconds(p);
        }
        auto curve = operations.find(rate_name(w));
        if (curve == operations.end() && w.variant.head_size > 128) {  // a file that has no wider heads
            Work narrower = w;
            narrower.variant.head_size = 128;
            curve = operations.find(rate_name(narrower));
        }
        if (curve == operations.end()) curve = operations.find(kCopyRate);
        if (w.variant.length > 0) return w.flops / curve->second.at(w.variant.length);
        return w.bytes / curve->second.at(w.bytes / w.calls);
    }
    // The seconds that a transfer takes.
    double seconds(const Transfer& t) const { return seconds_moving(t.bytes, t.route); }
    double seconds_moving(double bytes, Route route) const { return bytes / transfers[route]; }
};

// The mean of two measurements: the geometric mean of each rate.
inline Rates mean_of(const Rates& a, const Rates& b) {
    Rates mean = a;
    const auto average = [](auto& of, const auto& with) {
        assert(of.size() == with.size());
        for (size_t i = 0; i < of.size(); i++) of[i] = std::sqrt(of[i] * with[i]);
    };
    for (auto& [form, p] : mean.products) average(p.rates, b.products.at(form).rates);
    for (auto& [name, curve] : mean.operations) average(curve.rates, b.operations.at(name).rates);
    average(mean.transfers, b.transfers);
    average(mean.beside, b.beside);
    return mean;
}

// Without waits for transfers.
inline double seconds_of(const std::vector<Work>& work, const Rates& rates) {
    double seconds = 0;
    for (const Work& w : work) seconds += rates.seconds(w);
    return seconds;
}

// A phase of a step: forward, head, backward, update.
struct PhaseTime {
    std::string name;
    // By Cost. For transfers: the time they are waited for, and what computing takes longer beside them.
    std::array<double, kCosts> seconds = {};
    std::array<double, kCosts> busy = {};  // by Cost; for transfers: all their time
    double total() const { return std::accumulate(seconds.begin(), seconds.end(), 0.0); }
    // What limits it: transfers if they take longer than what runs meanwhile, otherwise the operations that
    // take longest.
    Cost bound() const {
        const auto moves = busy.begin() + kComputing;
        const auto longest = std::max_element(moves, busy.end());
        const bool waits = *longest > std::accumulate(busy.begin(), moves, 0.0);
        return static_cast<Cost>((waits ? longest : std::max_element(busy.begin(), moves)) - busy.begin());
    }
};

using PhaseTimes = std::vector<PhaseTime>;

// The part of these seconds that transfers cost; only of one phase if that is named.
inline double seconds_waited(const PhaseTimes& phases, std::string_view phase = "") {
    double sum = 0;
    for (const PhaseTime& p : phases)
        if (phase.empty() || p.name == phase)
            sum += std::accumulate(p.seconds.begin() + kComputing, p.seconds.end(), 0.0);
    return sum;
}

// When a request to a disk, or to the link between host and device, begins and is done. A disk does one
// request after the other; the link does one in each direction. A fetch begins after all earlier stores of
// its kind, as in offload_storage.h, and so does the host's update. What a GPU gets from a disk crosses the
// link while it is read; what it writes there crosses the link first (offload_storage.h). What stays with the
// host does not cross it. An exchange between ranks may take both directions of that link. Exchanges are
// complete one after another.
class Media {
  public:
    explicit Media(const Rates& rates) : rates_(rates) {}

    struct Span {
        double at, done;
    };
    // The span of a transfer that is requested at `now`.
    Span begin(const Transfer& t, double now) {
        const bool crosses = !kBuild.host_is_device && !t.stays_with_host;
        if (t.route == Route::DiskWrite && crosses) {
            double& link = free_of(Route::ToHost);
            now = link = std::max(now, link) + rates_.seconds_moving(t.bytes, Route::ToHost);
        }
        double &free = free_of(t.route), &stored = stored_[t.of];
        const bool follows = t.route == Route::FromHost || t.route == Route::HostUpdate;
        double at = std::max({now, free, follows ? stored : 0});
        if (is_exchange(t.route) && rates_.ranks.over_host_link) {
            double &in = free_of(Route::FromHost), &out = free_of(Route::ToHost);
            at = std::max({at, in, out});
            in = out = at + rates_.seconds_moving(t.bytes, Route::ToRanks);
        }
        double done = free = at + rates_.seconds(t);
        if (const double share = rates_.beside[t.route]; share < 1)
            disturbs_.push_back({at, done, share, cost_of(t.route)});
        if (is_exchange(t.route)) done = exchanged_ = std::max(done, exchanged_);
        const bool comes_to_host = t.route == Route::DiskRead && t.stays_with_host;
        if (t.route == Route::ToHost || t.route == Route::HostUpdate || comes_to_host)
            stored = std::max(stored, done);
        if (t.route == Route::DiskRead && crosses) {
            double& link = free_of(Route::FromHost);
            link = std::max(at, link) + rates_.seconds_moving(t.bytes, Route::FromHost);
            done = std::max(done, link);
        }
        return {at, done};
    }
    // The time that computing takes from `now` on which takes `seconds` alone, and what makes it longer.
    struct Computing {
        double seconds;
        Cost cause;
    };
    Computing computing(double now, double seconds) {
        if (disturbing_ == disturbs_.size()) return {seconds, Cost::Disk};
        const double begun = now;
        Cost cause = Cost::Disk;
        for (; disturbing_ < disturbs_.size() && seconds > 0; disturbing_++) {
            const Disturbs& d = disturbs_[disturbing_];
            const double alone = std::clamp(d.at - now, 0.0, seconds);
            now += alone, seconds -= alone;
            const double done_beside = std::clamp((d.done - now) * d.share, 0.0, seconds);
            if (done_beside > 0) cause = d.cost;
            now += done_beside / d.share, seconds -= done_beside;
            if (now < d.done) break;
        }
        return {now + seconds - begun, cause};
    }

  private:
    struct Disturbs {
        double at, done, share;
        Cost cost;
    };
    double& free_of(Route route) {
        return free_[static_cast<size_t>(is_disks(route) ? Route::DiskRead : route)];
    }

    const Rates& rates_;
    std::array<double, kRoutes> free_ = {};             // when each is free
    double exchanged_ = 0;                              // when the exchanges between ranks are done
    std::array<double, Transfer::kKinds> stored_ = {};  // when the stores of a kind are done
    std::vector<Disturbs> disturbs_;
    size_t disturbing_ = 0;  // index of the first of those that is not over
};

// Simulates a plan, from time 0: its operations one after the other, and beside them its transfers, until
// each is waited for. Calls
//   computes(work, at, seconds, more, beside), moves(transfer, cost, at, seconds), waits(transfer, which, at,
//   seconds)
// where `more` is the additional time because of transfers, whose cost is `beside`, and `which` the index of
// the awaited transfer among those that moved, from 0.
template <class Computes, class Moves, class Waits>
void simulate(const Plan& plan, const Rates& rates, Computes&& computes, Moves&& moves, Waits&& waits) {
    struct Begun {
        double done;
        size_t which;
    };
    std::array<std::vector<Begun>, Transfer::kKinds> begun;
    size_t count = 0;
    double now = 0;
    Media media(rates);
    const auto transfer = [&](const Transfer& t) {
        std::vector<Begun>& all = begun[t.of];
        if (t.waits) {
            if (all.empty()) return;
            const Begun& b = t.number < 0 ? all.back() : all.at(static_cast<size_t>(t.number));
            const double seconds = std::max(0.0, b.done - now);
            waits(t, b.which, now, seconds);
            now += seconds;
            return;
        }
        const auto [at, done] = media.begin(t, now);
        all.push_back({done, count++});
        moves(t, cost_of(t.route), at, rates.seconds(t));
    };
    auto next = plan.transfers.begin();
    for (size_t i = 0; i <= plan.work.size(); i++) {
        for (; next != plan.transfers.end() && next->after == i; ++next) transfer(*next);
        if (i == plan.work.size()) break;
        const double seconds = rates.seconds(plan.work[i]);
        const auto [with_transfers, beside] = media.computing(now, seconds);
        const double more = with_transfers - seconds;
        computes(plan.work[i], now, seconds, more, beside);
        now += seconds + more;
    }
}

// Adds the times of a plan that runs `runs` times.
inline void add_phases(PhaseTimes& phases, const Plan& plan, double runs, const Rates& rates) {
    // What is in no phase counts with the phase before it. Plans of large models have a million entries, so a
    // range at the same address as the last one is not compared.
    std::string_view last = "forward", last_range;
    size_t current = SIZE_MAX;
    const auto phase = [&](std::string_view range) -> PhaseTime& {
        if (current < phases.size() && (range.empty() || range.data() == last_range.data()))
            return phases[current];
        if (!range.empty()) last_range = range, last = range.substr(0, range.find(' '));
        current = 0;
        while (current < phases.size() && phases[current].name != last) current++;
        if (current == phases.size()) phases.push_back({std::string(last)});
        return phases[current];
    };
    std::vector<Cost> moved;  // of each transfer
    simulate(
        plan, rates,
        [&](const Work& w, double, double seconds, double more, Cost beside) {
            PhaseTime& p = phase(w.range);
            p.seconds[cost_of(w)] += runs * seconds;
            p.busy[cost_of(w)] += runs * seconds;
            p.seconds[beside] += runs * more;
        },
        [&](const Transfer& t, Cost cost, double, double seconds) {
            moved.push_back(cost);
            phase(t.range).busy[cost] += runs * seconds;
        },
        [&](const Transfer& t, size_t which, double, double seconds) {
            phase(t.range).seconds[moved[which]] += runs * seconds;
        });
}
inline PhaseTimes phases_of(const Plan& plan, const Rates& rates) {
    PhaseTimes phases;
    add_phases(phases, plan, 1, rates);
    return phases;
}

// ---- the file of measured rates (rates_file.cpp): JSON that names the device, the precision and the threads
// that it was measured with, and is accepted only if these are the same

// The CPU's name by the kernel; empty if none is known.
std::string cpu_name();

// Fails if a file cannot be written at `path`.
void check_rates_writable(const std::string& path);

// Writes the rates that were measured `on` this device, in place of any file at `path`.
void write_rates(const std::string& path, const Rates& rates, const nlohmann::ordered_json& on);

// Reads a file of rates, measured `on` the same device. `nominal` is for what the file has no rates of. If
// something is wrong with it, fails with one line that says where.
Rates read_rates(const std::string& path, const DeviceRates& nominal, const nlohmann::ordered_json& on);
