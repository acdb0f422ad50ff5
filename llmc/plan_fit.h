// plan_fit.h - chooses options that make training fit into memory: --memory by the solver, --batch auto by
// trying; and says what is needed if nothing fits.
#pragma once

#include <climits>
#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/run_config.h"
#include "llmc/plan_free_memory.h"
#include "llmc/plan_report.h"
#include "llmc/plan_settings.h"
#include "llmc/plan_solver.h"
#include "llmc/rates_device.h"
#include "llmc/recompute.h"
#include "llmc/step.h"
#include "llmc/text.h"

// Dry runs of a configuration with one setting after another.
class Rehearsals {
  public:
    // The inputs must outlive it.
    Rehearsals(const RunConfig& o, RunInputs& inputs)
        : run(o),
          config(inputs.config),
          most_sequences(
              std::min<int64_t>(kMostTokens / o.seq_len,
                                inputs.data ? static_cast<int64_t>(inputs.sequences_per_epoch) : INT64_MAX)),
          rates(rates_of<floatX>(o)),
          seq_len_(inputs.uses_batches() ? o.seq_len : 0),
          chunk_rates_(rates_of<floatX>(o, kChunkThreads)),
          trial_(o, inputs) {}

    const RunConfig run;
    const ModelConfig& config;
    const int64_t most_sequences;  // that a micro-batch may have
    const Rates rates;

    // The report of everything that the run may do. outline() does not place the tensors in memory.
    MemoryReport report(const MemorySetting& s) { return trial_of(s).rehearse(); }
    MemoryReport outline(const MemorySetting& s) { return trial_of(s).rehearse(Offsets::None); }
    // The plan of one micro-batch alone, whose tensors are not placed in memory.
    Plan training(const MemorySetting& s) { return trial_of(s).rehearse_training(0, Offsets::None); }
    // The setting with its automatic numbers of rows chosen; without training, by a validation.
    MemorySetting with_rows(const MemorySetting& setting) {
        return with_chosen_rows(setting, seq_len_, config.heads, [&](const MemorySetting& s) {
            return seconds_without_update(
                run.steps > 0 ? training(s) : trial_of(s).rehearse_validation(Offsets::None), chunk_rates_);
        });
    }

  private:
    Trial& trial_of(const MemorySetting& s) {
        trial_.apply(s);
        return trial_;
    }

    const int64_t seq_len_;  // of batches; 0 if there are none
    const Rates chunk_rates_;
    Trial trial_;
};

// The formats of the optimizer's state to try: the given ones first, then smaller ones if they are allowed,
// lossless ones before lossy ones.
inline std::vector<MemorySetting> formats_to_try(const RunConfig& o) {
    MemorySetting s = o;
    std::vector<MemorySetting> all = {s};
    if (std::is_same_v<floatX, bf16> && o.open.master) s.master = "split";
    if (!s.same_state(all.back())) all.push_back(s);
    if (o.open.adam_m) s.adam_m = "8bit";
    if (o.open.adam_v) s.adam_v = "8bit";
    if (!s.same_state(all.back())) all.push_back(s);
    return all;
}

// All settings to try, for every micro-batch that divides the step's sequences: the MLP on all rows at once,
// in the smallest chunks that cost little, and in a quarter of these; then attention in chunks, if sequences
// are long. Each of these is tried with every number of head rows, from large to small.
inline std::vector<MemorySetting> settings_to_try(MemorySetting s, Rehearsals& rehearsals) {
    const RunConfig& o = rehearsals.run;
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
        if (batch > rehearsals.most_sequences || accumulated > INT32_MAX || accumulated % o.devices) continue;
        // Several micro-batches add to gradients that are kept.
        const bool keeps_none = o.update_in_backward || o.slices_gradients();
        if (keeps_none && !o.by_block && accumulated > o.devices) continue;
        s.batch = static_cast<int>(batch), s.grad_accum = static_cast<int>(accumulated);
        s.head_rows = 0;
        s.mlp_rows = o.open.mlp_rows ? -1 : o.mlp_rows;
        s.attention_rows = o.attention_rows;
        const MemorySetting given = rehearsals.with_rows(s);
        std::vector<std::pair<int64_t, int64_t>> rows_of_both = {{given.mlp_rows, given.attention_rows}};
        if (o.open.mlp_rows && given.mlp_rows > 0)
            rows_of_both = {{0, given.attention_rows},
                            {given.mlp_rows, given.attention_rows},
                            {given.mlp_rows / 4, given.attention_rows}};
        if (o.open.attention_rows)
            for (int64_t rows = 4 * fewest_attention_rows(rehearsals.config.heads);
                 rows > kFewestAttentionRows;) {
                rows = std::max(rows / 4, kFewestAttentionRows);
                if (o.seq_len > 2 * rows) rows_of_both.push_back({rows_of_both.back().first, rows});
            }
        for (const auto& [of_mlp, of_attention] : rows_of_both) {
            s.mlp_rows = of_mlp, s.attention_rows = of_attention;
            for (int64_t rows : {0, 4096, 1024, 256, 64}) {
                s.head_rows = rows;
                if (o.head_rows < 0 && rows < tokens) all.push_back(s);
            }
            s.head_rows = o.head_rows;
            if (o.head_rows >= 0) all.push_back(s);
        }
    }
    return all;
}

constexpr size_t kTooMuchOffloaded = SIZE_MAX;  // of a setting that does not fit outside the device

// One configuration of placements (`configuration`), the settings that were tried with it, and the fastest
// setting that fits.
struct Fit {
    RunConfig configuration;
    BesideDevice space;  // that it may take outside the device
    std::vector<MemorySetting> settings = {};
    double update_seconds = 0;  // counted for every setting, see profiles_of()
    Solution solution = {};  // its seconds come from rehearsals: sums do not know the waits of mixed levels
    // If nothing fits, for solution.least: its largest buffer, and what it has outside the device.
    std::pair<std::string, size_t> largest = {};
    BesideDevice beside = {};
    // True if settings were not tried, because two rehearsals showed that none fits or none is faster than
    // what is known; then solution.least has only its bytes, a few too many.
    bool is_estimate = false;

    MemorySetting setting(const Choice& c) const {
        MemorySetting s = settings[c.profile];
        s.recompute = levels_text(c.levels, recompute_names());
        s.updates = configuration.updates;
        return s;
    }
    double step_seconds(const MemoryReport& r) const { return r.seconds - r.update_seconds + update_seconds; }
    // Sets what the choice takes by a rehearsal of its own, whose report it returns.
    MemoryReport refine(Choice& c, Rehearsals& rehearsals) const {
        MemoryReport r = rehearsals.report(setting(c));
        c.exact = r.beside().fits(space) ? r.total() : kTooMuchOffloaded;
        c.seconds = step_seconds(r);
        return r;
    }
    // True if this should be chosen over `other`, which was tried before: then it must be 1% faster.
    bool is_better_than(const Fit& other) const {
        const Solution &a = solution, &b = other.solution;
        if (!b.chosen) return a.chosen || a.least.exact < b.least.exact;
        return a.chosen && a.chosen->seconds < 0.99 * b.chosen->seconds;
    }
};

// The memory and time of each setting, from rehearsals with all layers at one recompute level. Settings that
// differ only in the rows of the head share their blocks' numbers, because the head changes only what happens
// between the blocks. With --by-block, one rehearsal covers all micro-batches. A separate update is counted
// with the time of the first setting's update: a smaller state should be chosen for the memory that it saves
// and not for a faster update, which a CPU does not have. A level's workspace beyond that of the smallest
// level is added to its blocks' peaks. This is an estimate; the chosen configuration is rehearsed.
inline std::vector<Profile> profiles_of(Fit& fit, Rehearsals& rehearsals) {
    const auto layers = static_cast<size_t>(rehearsals.config.layers);
    std::vector<MemorySetting> settings = fit.settings;
    std::vector<Profile> all;
    size_t least_workspace = 0;  // of all levels
    for (size_t i = 0; i < settings.size(); i++) {
        MemorySetting& s = settings[i];
        s.recompute = kRecomputeLevels[0].name;
        const MemoryReport report = rehearsals.outline(s);
        const std::vector<Segment> keeps_all = segments_of(*report.train, rehearsals.rates);
        const bool same_blocks =
            i > 0 && s.batch == settings[i - 1].batch && s.mlp_rows == settings[i - 1].mlp_rows &&
            s.attention_rows == settings[i - 1].attention_rows && s.same_state(settings[i - 1]);
        Profile p = same_blocks ? all.back() : Profile();
        if (same_blocks) {
            for (std::vector<Segment>& level : p.levels) level[layers].after = keeps_all[layers].after;
        } else {
            p.levels.push_back(keeps_all);
            std::vector<size_t> workspaces = {report.train->workspace};
            for (size_t level = 1; level < std::size(kRecomputeLevels); level++) {
                s.recompute = kRecomputeLevels[level].name;
                const Plan plan = rehearsals.training(s);
                p.levels.push_back(segments_of(plan, rehearsals.rates));
                workspaces.push_back(plan.workspace);
                if (level == kLastLevel) p.waited_seconds = seconds_waited(phases_of(plan, rehearsals.rates));
            }
            least_workspace = *std::ranges::min_element(workspaces);
            for (size_t level = 0; level < workspaces.size(); level++)
                for (Segment& part : p.levels[level])
                    if (!part.block.empty())
                        part.inside.peak += static_cast<int64_t>(arena_align(workspaces[level]) -
                                                                 arena_align(least_workspace));
        }
        p.runs = fit.configuration.by_block ? 1 : s.grad_accum / fit.configuration.devices;
        p.fixed_bytes = report.in_steps() - report.activations() -
                        (arena_align(report.train->workspace) - arena_align(least_workspace));
        p.arena_floor = report.activations_of_others();
        if (all.empty()) fit.update_seconds = report.update_seconds;
        // Accumulating into gradients takes longer than writing them. That difference, and the time that a
        // separate update waits, are the same at every level.
        const double added = report.seconds - seconds_waited(report.phases) - report.update_seconds -
                             p.runs * seconds_of(report.train->work, rehearsals.rates);
        p.fixed_seconds = fit.update_seconds + added + seconds_waited(report.phases, "update");
        all.push_back(std::move(p));
    }
    return all;
}

// Mixed levels hardly ever save more of a plan than this, against all blocks at the last level.
constexpr double kMostSaved = 1.05;

// Rules a configuration out with one to three rehearsals, and returns the least memory that it takes; nothing
// if all its settings must be tried. It is ruled out if its first setting, the fastest, is slower than `best`
// even with all blocks at the first level. It is also ruled out if its smallest setting, with all blocks at
// the last level, does not fit outside the device, or takes more of the device than mixed levels would save.
inline std::optional<size_t> least_if_ruled_out(std::vector<MemorySetting> settings, size_t budget,
                                                const Fit& best, Rehearsals& rehearsals,
                                                const BesideDevice& space) {
    const auto outline = [&](MemorySetting& s, int level) {
        s.recompute = kRecomputeLevels[level].name;
        return rehearsals.outline(s);
    };
    if (best.solution.chosen)
        if (const MemoryReport fastest = outline(settings.front(), 0);
            fastest.seconds > best.solution.chosen->seconds)
            return fastest.total();
    const MemoryReport smallest = outline(settings.back(), kLastLevel);
    if (!smallest.beside().fits(space)) return kTooMuchOffloaded;
    size_t least = smallest.total();
    // Where a sequence is barely longer than a chunk, attention in chunks takes more than it saves.
    const auto unchunked = std::find_if(settings.rbegin(), settings.rend(), [&](const MemorySetting& s) {
        return s.attention_rows == settings.front().attention_rows;
    });
    if (unchunked != settings.rbegin()) least = std::min(least, outline(*unchunked, kLastLevel).total());
    if (static_cast<double>(least) > kMostSaved * static_cast<double>(budget)) return least;
    return std::nullopt;
}

// Finds the best of a configuration's settings with at most `most` micro-batches on a device, with no more
// than `space` outside the device. Smaller formats of the state are chosen only if they are 1% faster than
// larger ones. If the configuration cannot be better than `best`, what is returned is an estimate of the
// least memory that it takes. If no setting is possible, the Fit has none.
inline Fit fit_settings_of(Rehearsals& rehearsals, int most, const BesideDevice& space, const Fit* best) {
    const RunConfig& o = rehearsals.run;
    const size_t budget = budget_of(o.memory, o.rank).bytes;
    Fit fit{.configuration = o, .space = space};
    std::vector<size_t> ends;  // where each format's settings end
    for (const MemorySetting& format : formats_to_try(o)) {
        for (const MemorySetting& s : settings_to_try(format, rehearsals))
            if (s.grad_accum / o.devices <= most) fit.settings.push_back(s);
        ends.push_back(fit.settings.size());
    }
    if (fit.settings.empty()) return fit;
    if (best)
        if (const auto least = least_if_ruled_out(fit.settings, budget, *best, rehearsals, space)) {
            fit.solution.least.exact = *least;
            fit.is_estimate = true;
            return fit;
        }
    const std::vector<Profile> profiles = profiles_of(fit, rehearsals);
    const auto refine = [&](Choice& c) { fit.refine(c, rehearsals); };
    Solution& solution = fit.solution;
    for (size_t end : ends) {
        std::vector<Profile> allowed(profiles.begin(), profiles.begin() + static_cast<ptrdiff_t>(end));
        Solution more = solve(allowed, budget, refine);
        // How long a configuration of levels waits is only known after its rehearsal. So we solve twice, with
        // no waiting and with the waiting of the last level, and take the faster solution.
        bool waits_anywhere = false;
        for (Profile& p : allowed) {
            p.fixed_seconds += p.runs * p.waited_seconds;
            waits_anywhere |= p.waited_seconds > 0;
        }
        if (waits_anywhere) {
            Solution waits = solve(allowed, budget, refine);
            if (waits.chosen && (!more.chosen || waits.chosen->seconds < more.chosen->seconds))
                more = std::move(waits);
        }
        if (!solution.chosen || (more.chosen && more.chosen->seconds < 0.99 * solution.chosen->seconds))
            solution = std::move(more);
    }
    if (!best) solution.fastest.seconds = fit.step_seconds(rehearsals.outline(fit.setting(solution.fastest)));
    if (solution.chosen) return fit;
    const MemoryReport r = fit.refine(solution.least, rehearsals);
    fit.largest = r.largest();
    fit.beside = r.beside();
    return fit;
}

// Finds the best setting of a configuration, as fit_settings_of() does. With --by-block all micro-batches
// are in memory together, so that smaller ones save little, and a rehearsal takes longer the more there are.
// So more than 8 of them are tried only if nothing else fits. Fails if no micro-batch is possible.
inline Fit fit_settings(const RunConfig& o, RunInputs& inputs, const BesideDevice& space, const Fit* best) {
    Rehearsals rehearsals(o, inputs);
    constexpr int kFewMicroBatches = 8;
    const auto fit_with = [&](int most) { return fit_settings_of(rehearsals, most, space, best); };
    if (o.by_block && int64_t{o.batch} * o.grad_accum / o.devices > kFewMicroBatches) {
        Fit few = fit_with(kFewMicroBatches);
        const bool is_enough = few.solution.chosen || (best && best->solution.chosen);
        if (is_enough && !few.settings.empty()) return few;
    }
    Fit all = fit_with(INT_MAX);
    if (all.settings.empty())
        fail("--memory %s: of --batch %d x --grad-accum %d sequences no part can be a micro-batch", o.memory,
             o.batch, o.grad_accum);
    return all;
}

// A buffer's name in a sentence.
inline std::string in_words(const std::string& name) {
    if (name == "m" || name == "v") return "the optimizer's state " + name;
    if (name == "master") return "the master copy of the weights";
    std::string words = name;
    std::ranges::replace(words, '_', ' ');
    return words;
}

// What would take less memory than these options, as far as they leave it open; `smallest` are the ones that
// take the least of those that were tried. Devices share the optimizer's state, and a frozen model's weights,
// only where they are on the devices.
inline std::string what_takes_less(const RunConfig& o, const RunConfig& smallest) {
    std::vector<std::string> all;
    const bool share_more =
        smallest.state == "device" && (smallest.weights == "device" || !o.trains_adapter());
    if (!o.trains_adapter() && !parse_new_model(o.model)) all.push_back("--train lora");
    if (o.trains_adapter() && o.base.empty() && !RunInputs::is_gguf(o.model)) all.push_back("--base nf4");
    if (o.batch * o.own_micro_batches() > 1) all.push_back("a smaller --batch");
    if (!o.auto_length) all.push_back("a shorter --seq-len");
    if (share_more && o.zero != "0") all.push_back("more --devices");
    all.push_back("a smaller --model");
    std::string text = all[0];
    for (size_t i = 1; i < all.size(); i++) text += (i + 1 < all.size() ? ", " : " or ") + all[i];
    return text;
}

// Fails because a run that takes `least` bytes of a GPU and `pinned` of its host, with `options`, does not
// fit the one of --gpu. What --memory may choose was all tried; `smallest` is the configuration with the
// least.
[[noreturn]] inline void fail_to_fit_gpu(const RunConfig& given, const RunConfig& smallest, size_t least,
                                         size_t pinned, const std::string& options) {
    const std::string others = gpus_with_room(least - std::min(least, context_bytes_of(given)), pinned);
    const bool several = given.devices > 1;
    const KnownGpu& gpu = *given.planned_gpu;
    fail(
        "this does not fit %s %s: of %s %.1f GiB a run may use %.1f, and this one needs at least %.1f (%s). "
        "Less is needed with %s.%s",
        several ? format("%d GPUs", given.devices) : "the GPU", gpu.name, several ? "each one's" : "its",
        gpu.memory, gibibytes(usable_memory_of(gpu).bytes), gibibytes(least), options,
        what_takes_less(given, smallest), others.empty() ? "" : (" " + others + "."));
}

// Fails because what is offloaded takes more than there is for it outside the device.
[[noreturn]] inline void fail_to_offload(const RunConfig& given, const BesideDevice& beside) {
    const int ranks = given.rank.on_this_machine;
    const std::string each = ranks > 1 ? format("each of %d ", ranks) : "";
    const bool is_host_short = beside.pinned > memory_beside_device(given).pinned;
    if (is_host_short && given.planned_gpu)
        fail("--memory host=%s: what %s %s offloads takes at least %s of its host's memory",
             given.host_memory, ranks > 1 ? (each + "GPUs") : "the", given.planned_gpu->name,
             size_text(beside.pinned));
    if (is_host_short)
        fail("--memory host=%s: what %s offloads takes at least %s of the host's memory", given.host_memory,
             ranks > 1 ? (each + "ranks") : "the run", size_text(beside.pinned));
    fail("--memory %s: the files of %s take at least %s, and their folder, %s, has %s; TMPDIR names another",
         given.memory, ranks > 1 ? (each + "ranks") : "the run", size_text(beside.files), temporary_folder(),
         size_text(space_on_disk()));
}

// Fails with the least memory that a run would take, the options for that, and what would lower it.
// `short_of_memory`: some configuration failed only because there was too little memory outside the device;
// then suggests more of that.
[[noreturn]] inline void fail_to_fit(const RunConfig& given, const Fit& fit, const std::string& options,
                                     bool short_of_memory) {
    const size_t least = fit.solution.least.exact;
    if (least == kTooMuchOffloaded) fail_to_offload(given, fit.beside);
    if (given.fills_gpu) fail_to_fit_gpu(given, fit.configuration, least, fit.beside.pinned, options);
    const auto& [name, bytes] = fit.largest;
    const auto is_open = [&](const char* key) { return given.open.placements.contains(key); };
    const bool may_move = is_open("weights") || is_open("state") || is_open("inputs");
    std::string less = what_takes_less(given, fit.configuration);
    if (name == "sampling" || name == "a sample's continuation") less = "--sample tokens=0";
    if (name == "gradients") less = "--update-in-backward, which keeps the gradients of one block only";
    if (may_move && !kHostIsDevice && given.host_memory.empty())
        less = "host=SIZE in --memory, which lets more be offloaded to the host's memory";
    if (short_of_memory)
        less = given.planned_gpu ? "a larger host= in --memory"
                                 : format("%sa TMPDIR with more room: %s has %s",
                                          kHostIsDevice ? "" : "a larger host= in --memory, or ",
                                          temporary_folder(), size_text(space_on_disk()));
    std::string on_which;
    if (given.planned_gpu)
        on_which = format(" on %s %s", given.devices > 1 ? "each" : "the", given.planned_gpu->name);
    fail(
        "--memory %s: the least that this takes%s is %.1f MiB (%s). The largest part of that, %s, is for %s. "
        "Less is needed with %s.",
        describe_budget(given.memory, budget_of(given.memory, given.rank)), on_which,
        std::ceil(10 * mebibytes(least)) / 10, options, size_text(bytes), in_words(name), less);
}

// --memory: returns the setting whose plan fits and is the fastest by estimate; `choices` gets this choice
// and then its neighbours. Configurations that stream are tried if nothing fits without streaming, and with
// host= also if they might be faster. With a GPU, trained state goes to files only if the host's memory is
// too small. Streaming without prefetching is tried only if nothing else fits, and longer prefetch distances
// are used if they are faster. What several devices share is tried before anything is streamed.
inline MemorySetting fit_memory(const RunConfig& given, RunInputs& inputs, Choices& choices) {
    const bool offered = !given.host_memory.empty();
    const std::vector<RunConfig> as_given = ways_to_share(given);
    const BesideDevice given_space = offered ? memory_beside_device(given) : BesideDevice();
    Fit best = fit_settings(as_given[0], inputs, given_space, nullptr);
    const double fastest = best.solution.fastest.seconds;
    std::vector<Fit> estimates;
    bool short_of_memory = false;
    const auto try_all = [&](std::span<const RunConfig> all, const BesideDevice& space) {
        for (const RunConfig& configuration : all) {
            Fit more = fit_settings(configuration, inputs, space, &best);
            short_of_memory |= more.solution.least.exact == kTooMuchOffloaded;
            if (more.is_estimate) estimates.push_back(more);
            if (more.is_better_than(best)) best = std::move(more);
        }
    };
    try_all(std::span(as_given).subspan(1), given_space);
    short_of_memory = false;  // more memory would not help: all of that was asked for
    const BesideDevice space = memory_beside_device(given);
    const auto configurations = [&](bool with_files) {
        return placements_to_try(given, movable<floatX>(given, inputs, with_files));
    };
    const auto try_others = [&](bool with_files, bool only_files) {
        std::vector<RunConfig> all = configurations(with_files);
        all.erase(all.begin(), all.begin() + static_cast<ptrdiff_t>(as_given.size()));
        if (only_files) std::erase_if(all, [](const RunConfig& o) { return !has_files(o); });  // tried before
        try_all(all, space);
    };
    if (!best.solution.chosen || (offered && best.solution.chosen->seconds > 1.01 * fastest))
        try_others(kHostIsDevice, false);
    if (!best.solution.chosen && offered && !has_any_host_memory(given)) try_others(true, !kHostIsDevice);
    std::vector<RunConfig> with_other_distances;
    if (given.open.prefetch && !best.solution.chosen) {  // without prefetching, blocks take the least memory
        for (RunConfig& o : configurations(kHostIsDevice || offered))
            if (streams_blocks_of(o)) with_other_distances.emplace_back(o).prefetch = 0;
    } else if (given.open.prefetch && streams_blocks_of(best.configuration)) {
        // If transfers take longer than the computation, a step gains the blocks that are still in buffers
        // when it turns from forward to backward: these are not fetched again.
        for (const int ahead : {2, 4, 8, 16})
            with_other_distances.emplace_back(best.configuration).prefetch = ahead;
    }
    try_all(with_other_distances, space);
    // The least memory that is reported must be exact.
    const auto may_be_least = static_cast<double>(best.solution.least.exact) * kMostSaved;
    for (const Fit& estimate : estimates)
        if (const size_t least = estimate.solution.least.exact;
            !best.solution.chosen && least != kTooMuchOffloaded && static_cast<double>(least) <= may_be_least)
            if (Fit exact = fit_settings(estimate.configuration, inputs, estimate.space, nullptr);
                best.is_estimate || exact.is_better_than(best))
                best = std::move(exact);
    if (best.solution.chosen) {
        Rehearsals rehearsals(best.configuration, inputs);
        refine_neighbours(best.solution, [&](Choice& c) { best.refine(c, rehearsals); });
    }
    if (!host_can_update(best.configuration)) best.configuration.updates = "device";
    auto described = [&](const Choice& c) {
        const MemorySetting s = best.setting(c);
        std::string state;
        const auto add = [&](const char* key, const std::string& format) {
            state += (state.empty() ? " --state-formats " : ",") + (key + ("=" + format));
        };
        if (s.master != given.master) add("master", s.master);
        if (s.adam_m != given.adam_m) add("m", s.adam_m);
        if (s.adam_v != given.adam_v) add("v", s.adam_v);
        return MemoryChoice{s,       state,     placements_text(best.configuration, given),
                            c.exact, c.seconds, std::max(0.0, c.seconds / fastest - 1)};
    };
    const Solution& solution = best.solution;
    if (!solution.chosen) {
        choices.smallest = given.with(best.setting(solution.least));
        fail_to_fit(given, best, described(solution.least).text(), short_of_memory);
    }
    choices.memory = {described(*solution.chosen)};
    for (const std::optional<Choice>& neighbour : {solution.next_faster, solution.next_smaller})
        if (neighbour && neighbour->exact != kTooMuchOffloaded)
            choices.memory.push_back(described(*neighbour));
    return best.setting(*solution.chosen);
}

// The largest number from 1 to `most` for which fits() is true, if it is for 1: by doubling, then by halves.
template <class Fits>
int64_t largest_that_fits(int64_t most, Fits&& fits) {
    int64_t fitting = 1, failing = 2;
    while (failing <= most && fits(failing)) fitting = failing, failing *= 2;
    failing = std::min(failing, most + 1);
    while (failing - fitting > 1) {
        const int64_t middle = fitting + (failing - fitting) / 2;
        (fits(middle) ? fitting : failing) = middle;
    }
    return fitting;
}

// --batch auto: the largest micro-batch up to `cap` whose plan fits into `space`, with all other options
// unchanged. `said` gets the choice and the reason for it. Fails if not even one sequence fits.
inline MemorySetting fit_batch(MemorySetting s, const FreeMemory& space, const BatchCap& cap,
                               Rehearsals& rehearsals, std::string& said) {
    const int64_t most = std::min(cap.sequences, rehearsals.most_sequences);
    auto setting = [&](int64_t batch) {
        MemorySetting tried = s;
        tried.batch = static_cast<int>(batch);
        return rehearsals.with_rows(tried);
    };
    auto total = [&](int64_t batch) { return rehearsals.report(setting(batch)).total(); };
    if (const size_t least = total(1); least > space.bytes)
        fail("--batch auto: a batch of 1 takes %.1f MiB and there are %.1f (%s)", mebibytes(least),
             mebibytes(space.bytes), space.limit);
    const int64_t fits = largest_that_fits(most, [&](int64_t batch) { return total(batch) <= space.bytes; });
    said = format("%ld sequences, ", fits);
    said += fits == most ? cap.why
                         : format("the most that fit %.1f MiB (%s)", mebibytes(space.bytes), space.limit);
    said += "; a step takes " + seconds_text(rehearsals.report(setting(fits)).seconds) + " by estimate";
    return setting(fits);
}
