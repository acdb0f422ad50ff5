// fit.h - the options that make a training fit: --memory by the solver, --batch auto by trying.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "llmc/enough_memory.h"
#include "llmc/options.h"
#include "llmc/recompute.h"
#include "llmc/report.h"
#include "llmc/solver.h"

// What a run keeps from step to step. Fails where weights of type T have no use for what was asked.
template <class T>
StateOptions state_options(const Options& o) {
    if (std::is_same_v<T, float> && o.steps > 0 && o.master != "fp32")
        fail("--master %s completes bf16 weights, and this build's are fp32: make PRECISION=bf16",
             o.master.c_str());
    return {.training = o.steps > 0,
            .gradients = !o.update_in_backward,
            .optimizer = named<Optimizer>(kOptimizerNames, o.optimizer),
            .master = named<Master>(kMasterNames, o.master),
            .m = named<Moment>(kMomentNames, o.adam_m),
            .v = named<Moment>(kMomentNames, o.adam_v)};
}

// What may be chosen. The tokens of a step, batch * grad_accum sequences, stay what they are.
struct MemorySetting {
    int batch, grad_accum;
    int64_t head_rows;
    std::string master, adam_m, adam_v;
    std::vector<int> levels = {};  // of recompute, by layer

    bool same_state(const MemorySetting& other) const {
        return master == other.master && adam_m == other.adam_m && adam_v == other.adam_v;
    }
};

// How the chooser learns what a setting takes: by rehearsals.
struct Rehearsals {
    int layers;
    int64_t most_sequences;  // that a micro-batch may have
    DeviceRates rates;
    std::function<MemoryReport(const MemorySetting&)> report;   // of all that the run may do
    std::function<MemoryReport(const MemorySetting&)> outline;  // the same, the training's plan not placed
    std::function<Plan(const MemorySetting&)> training;         // that of a micro-batch alone, not placed
    std::function<int64_t(const MemorySetting&)> head_rows;     // what --head-rows auto chooses
};

// What was chosen for a run, as its report says it: by --memory, with its neighbours; by --batch auto.
struct Choices {
    std::vector<MemoryChoice> memory;
    std::string batch;
};

inline MemorySetting setting_of(const Options& o) {
    return {o.batch, o.grad_accum, o.head_rows, o.master, o.adam_m, o.adam_v};
}

// Writes a setting into the options.
inline void apply_setting(const MemorySetting& s, Options& o) {
    o.batch = s.batch;
    o.grad_accum = s.grad_accum;
    o.head_rows = s.head_rows;
    o.master = s.master, o.adam_m = s.adam_m, o.adam_v = s.adam_v;
    o.recompute = levels_text(s.levels, recompute_names());
}

// Writes what was chosen into the options that a save remembers, in place of the budget: a resumed run shall
// run the same. `given`: the options before that.
inline void remember_choice(const Options& given, Options& o) {
    auto remember = [&](const char* option, const std::string& value) { o.given[option] = {value}; };
    if (o.steps > 0) remember("--head-rows", std::to_string(o.head_rows));
    if (given.batch > 0 && !o.has("--memory")) return;
    remember("--batch", std::to_string(o.batch));
    remember("--grad-accum", std::to_string(o.grad_accum));
    remember("--recompute", o.recompute);
    if (o.allow_8bit) {
        remember("--master", o.master);
        if (o.optimizer == "adamw") remember("--adam-m", o.adam_m), remember("--adam-v", o.adam_v);
    }
    o.given.erase("--memory");
    o.given.erase("--allow-8bit");
}

// The formats of the state: the one there is first, then smaller ones where that is allowed, the harmless
// before the lossy.
inline std::vector<MemorySetting> formats_to_try(const Options& o, bool narrow_weights) {
    MemorySetting s = setting_of(o);
    std::vector<MemorySetting> all = {s};
    if (!o.allow_8bit) return all;
    if (narrow_weights && !o.has("--master")) s.master = "split";
    if (!s.same_state(all.back())) all.push_back(s);
    if (o.optimizer == "adamw" && !o.has("--adam-m")) s.adam_m = "8bit";
    if (o.optimizer == "adamw" && !o.has("--adam-v")) s.adam_v = "8bit";
    if (!s.same_state(all.back())) all.push_back(s);
    return all;
}

// Every micro-batch that divides the step's sequences, each with every number of head rows, from large to
// small.
inline std::vector<MemorySetting> settings_to_try(MemorySetting s, const Options& o, int64_t most_sequences) {
    const int64_t sequences = int64_t{o.batch} * o.grad_accum;
    std::vector<int64_t> batches;
    for (int64_t d = 1; d * d <= sequences; d++) {
        if (sequences % d) continue;
        batches.push_back(d);
        if (d != sequences / d) batches.push_back(sequences / d);
    }
    std::sort(batches.rbegin(), batches.rend());
    std::vector<MemorySetting> all;
    for (int64_t batch : batches) {
        const int64_t tokens = batch * o.seq_len, accumulated = sequences / batch;
        if (batch > most_sequences || accumulated > INT32_MAX || (o.update_in_backward && accumulated > 1))
            continue;
        s.batch = static_cast<int>(batch), s.grad_accum = static_cast<int>(accumulated);
        for (int64_t rows : {0, 4096, 1024, 256, 64}) {
            s.head_rows = rows;
            if (o.head_rows < 0 && rows < tokens) all.push_back(s);
        }
        s.head_rows = o.head_rows;
        if (o.head_rows >= 0) all.push_back(s);
    }
    return all;
}

// What each setting takes in memory and time, by rehearsals with all layers at one level. The rows of the
// head change only what is between the blocks.
inline std::vector<Profile> profiles_of(std::vector<MemorySetting> settings, const Rehearsals& rehearsals) {
    const size_t layers = static_cast<size_t>(rehearsals.layers);
    std::vector<Profile> all;
    double update_seconds = 0;
    for (size_t i = 0; i < settings.size(); i++) {
        MemorySetting& s = settings[i];
        s.levels.assign(layers, 0);
        const MemoryReport report = rehearsals.outline(s);
        const std::vector<Segment> keeps_all = segments_of(*report.train, rehearsals.rates);
        const bool same_blocks = i > 0 && s.batch == settings[i - 1].batch && s.same_state(settings[i - 1]);
        Profile p = same_blocks ? all.back() : Profile();
        if (same_blocks) {
            for (std::vector<Segment>& level : p.levels) level[layers].after = keeps_all[layers].after;
        } else {
            p.levels.push_back(keeps_all);
            for (size_t level = 1; level < std::size(kRecomputeLevels); level++) {
                s.levels.assign(layers, static_cast<int>(level));
                p.levels.push_back(segments_of(rehearsals.training(s), rehearsals.rates));
            }
        }
        p.runs = s.grad_accum;
        p.fixed_bytes = report.total() - report.activations();
        p.arena_floor = report.activations_of_others();
        // A smaller state is not chosen for a faster update, which on a CPU it does not have, but for what
        // else its room is good for.
        if (all.empty()) update_seconds = report.update_seconds;
        // What adding to gradients takes longer than writing them is the same at every level.
        const double added = report.seconds - report.update_seconds -
                             s.grad_accum * seconds_of(report.train->work, rehearsals.rates);
        p.fixed_seconds = update_seconds + added;
        all.push_back(std::move(p));
    }
    return all;
}

// --memory: the setting whose plan fits and is the fastest by estimate, and what it was chosen over: the
// first of `choices`, then its neighbours. Each format of the state must be worth 1% of time over those
// before it. Fails naming the least that would fit.
inline MemorySetting fit_memory(const Options& o, bool narrow_weights, const Rehearsals& rehearsals,
                                std::vector<MemoryChoice>& choices) {
    const size_t budget = parse_bytes(o.memory, "--memory");
    std::vector<MemorySetting> settings;
    std::vector<size_t> ends;  // of each format's settings
    for (const MemorySetting& format : formats_to_try(o, narrow_weights)) {
        for (const MemorySetting& s : settings_to_try(format, o, rehearsals.most_sequences))
            settings.push_back(s);
        ends.push_back(settings.size());
    }
    if (settings.empty())
        fail("--memory %s: of --batch %d x --grad-accum %d sequences no part can be a micro-batch",
             o.memory.c_str(), o.batch, o.grad_accum);
    auto setting = [&](const Choice& c) {
        MemorySetting s = settings[c.profile];
        s.levels = c.levels;
        return s;
    };
    auto exact_total = [&](const Choice& c) { return rehearsals.report(setting(c)).total(); };
    const std::vector<Profile> profiles = profiles_of(settings, rehearsals);
    Solution solution;
    for (size_t end : ends) {
        const std::vector<Profile> allowed(profiles.begin(), profiles.begin() + static_cast<ptrdiff_t>(end));
        Solution more = solve(allowed, budget, exact_total);
        if (!solution.chosen || (more.chosen && more.chosen->seconds < 0.99 * solution.chosen->seconds))
            solution = std::move(more);
    }
    auto described = [&](const Choice& c) {
        const MemorySetting s = setting(c);
        std::string state;
        if (s.master != o.master) state += " --master " + s.master;
        if (s.adam_m != o.adam_m) state += " --adam-m " + s.adam_m;
        if (s.adam_v != o.adam_v) state += " --adam-v " + s.adam_v;
        return MemoryChoice{levels_text(s.levels, recompute_names()),
                            state,
                            s.head_rows,
                            s.batch,
                            s.grad_accum,
                            c.exact,
                            c.seconds,
                            c.seconds / solution.fastest.seconds - 1};
    };
    if (!solution.chosen) {
        const auto [name, bytes] = rehearsals.report(setting(solution.least)).largest();
        fail("--memory %s: the least that this takes is %.1f MiB (%s), %.1f of it for %s", o.memory.c_str(),
             mebibytes(solution.least.exact), described(solution.least).text().c_str(), mebibytes(bytes),
             name.c_str());
    }
    choices = {described(*solution.chosen)};
    if (solution.next_cheaper) choices.push_back(described(*solution.next_cheaper));
    if (solution.next_smaller) choices.push_back(described(*solution.next_smaller));
    return setting(*solution.chosen);
}

// --batch auto: the largest micro-batch within `cap` whose plan fits `room`, all other options as they are,
// and in `said` which it is and why no larger. Fails when not even one sequence fits.
inline MemorySetting fit_batch(MemorySetting s, const FreeMemory& room, const BatchCap& cap,
                               const Rehearsals& rehearsals, std::string& said) {
    const int64_t most = std::min(cap.sequences, rehearsals.most_sequences);
    auto setting = [&](int64_t batch) {
        MemorySetting tried = s;
        tried.batch = static_cast<int>(batch);
        if (s.head_rows < 0) tried.head_rows = rehearsals.head_rows(tried);
        return tried;
    };
    auto total = [&](int64_t batch) { return rehearsals.report(setting(batch)).total(); };
    if (const size_t least = total(1); least > room.bytes)
        fail("--batch auto: a batch of 1 takes %.1f MiB and there are %.1f (%s)", mebibytes(least),
             mebibytes(room.bytes), room.limit.c_str());
    int64_t fits = 1, fails = 2;
    while (fails <= most && total(fails) <= room.bytes) fits = fails, fails *= 2;
    fails = std::min(fails, most + 1);
    while (fails - fits > 1) {
        const int64_t middle = fits + (fails - fits) / 2;
        (total(middle) <= room.bytes ? fits : fails) = middle;
    }
    said = format("%lld sequences, ", static_cast<long long>(fits));
    said += fits == most
                ? cap.why
                : format("the most that fit %.1f MiB (%s)", mebibytes(room.bytes), room.limit.c_str());
    return setting(fits);
}
