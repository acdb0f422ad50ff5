// plan_choice.h - answers what options leave open before a run starts: --memory, --batch auto, --chunk-rows
// auto, --zero auto, --seq-len auto, prompts at a time and --epochs; and what --plan --gpu may choose for a
// GPU that need not be in this machine. It asks trials (step.h): steps that are rehearsed and never started.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "llmc/dataset.h"
#include "llmc/run_config.h"
#include "llmc/plan.h"
#include "llmc/plan_fit.h"
#include "llmc/plan_free_memory.h"
#include "llmc/plan_report.h"
#include "llmc/plan_settings.h"
#include "llmc/run_inputs_check.h"
#include "llmc/step.h"

// ---- settings
//
// Chooses the settings that options leave open: --memory, --batch auto, and the auto of --chunk-rows.

// The memory that a run may take: --memory or, without it, most of what is free. Fails if there is no device
// to ask.
inline FreeMemory memory_for(const RunConfig& o) {
    if (!o.memory.empty()) return {budget_of(o.memory, o.rank).bytes, "--memory"};
    check_device(o);
    FreeMemory free = with_reserve(memory_free_for(o), context_bytes_of(o));
    free.at_most(least_of_ranks.device.bytes, least_of_ranks.device.limit);
    return free;
}

// True if the plan should choose settings for the whole memory of the GPU of --gpu: without --memory, and
// unless an option asks for something that --memory would choose.
inline bool fills_planned_gpu(const RunConfig& o) {
    const bool places_some_inputs = o.offloaded_inputs > 0;
    return o.planned_gpu && o.memory.empty() && o.open.recompute && o.steps > 0 && o.batch > 0 &&
           o.bench.empty() && !places_some_inputs;
}

// The options with the GPU's memory as --memory; `with_host`: and with unlimited memory of its host.
inline RunConfig filling_planned_gpu(RunConfig o, bool with_host) {
    o.fills_gpu = true;
    o.memory = format("%zuMiB", usable_memory_of(*o.planned_gpu).bytes >> 20);
    if (with_host) o.host_memory = kAnyHostMemory;
    return o;
}

// Calls choose(way) for each way in which several devices may share what is trained without changing other
// options, and returns the answer of which size(answer) is largest; the first of those. Fails if all do.
template <class Choose, class Size>
auto largest_of_ways(const RunConfig& given, Choose&& choose, Size&& size) {
    std::optional<decltype(choose(given))> best;
    std::string why;
    for (const RunConfig& way : ways_to_share_alone(given)) {
        try {
            auto answer = choose(way);
            if (!best || size(answer) > size(*best)) best = std::move(answer);
        } catch (const UserError& error) {
            why = error.what();
        }
    }
    if (!best) throw UserError(why);
    return *best;
}

// What several devices share if neither --zero nor --memory says it: the first of ways_to_share_alone() that
// fits what is free, because it sends the least. Returns the given options if none fits, and for the plan of
// a GPU that may not be here.
inline RunConfig with_way_that_fits(const RunConfig& given, RunInputs& inputs) {
    const std::vector<RunConfig> ways = ways_to_share_alone(given);
    if (ways.size() == 1 || (given.plan && !kHostIsDevice)) return given;
    for (size_t i = 0; i < ways.size(); i++) {
        RunConfig way = ways[i];
        Trial trial(way, inputs);
        if (trial.rehearse(Offsets::None).total() > memory_for(way).bytes) continue;
        if (i == 0) break;  // --zero auto means this way: nothing is to be remembered
        way.settings["--zero"] = {way.zero};
        return way;
    }
    return given;
}

// The options with all open settings chosen for the memory that they name, or for what is free.
inline RunConfig with_setting_for_memory(const RunConfig& given, RunInputs& inputs, Choices& choices) {
    if (kHostIsDevice) measure_free_memory();
    const bool has_budget = !given.memory.empty();
    if (!has_budget && given.batch > 0 && given.head_rows >= 0 && given.mlp_rows >= 0 &&
        given.attention_rows >= 0)
        return with_way_that_fits(given, inputs);
    RunConfig chosen = given;
    if (has_budget && given.batch > 0) {
        chosen = given.with(fit_memory(given, inputs, choices));
    } else if (given.batch > 0) {
        chosen = with_way_that_fits(given.with(Rehearsals(given, inputs).with_rows(given)), inputs);
    } else {
        std::optional<uint64_t> epoch;  // a step has as many sequences of each micro-batch
        if (inputs.data) epoch = inputs.sequences_per_epoch / static_cast<uint64_t>(given.grad_accum);
        const auto choose_batch = [&](const RunConfig& way) {
            Rehearsals rehearsals(way, inputs);
            std::string why;
            const MemorySetting s =
                fit_batch(way, memory_for(way), batch_cap(way.seq_len, epoch), rehearsals, why);
            return std::pair(s, why);
        };
        MemorySetting s;
        std::tie(s, choices.batch) =
            largest_of_ways(given, choose_batch, [](const auto& answer) { return answer.first.batch; });
        chosen = with_way_that_fits(given.with(s), inputs);
    }
    remember_choice(given, chosen);
    return chosen;
}

// The options with all open settings chosen; how they were chosen goes to `choices`. For a GPU that --gpu
// names, first with everything on it; if that does not fit, also with its host's memory.
inline RunConfig with_chosen_setting(const RunConfig& given, RunInputs& inputs, Choices& choices) {
    if (choices.for_length) return *choices.for_length;
    if (fills_planned_gpu(given)) {
        const bool host_has_its_own = !given.planned_gpu->integrated;
        try {
            return with_setting_for_memory(filling_planned_gpu(given, false), inputs, choices);
        } catch (const UserError&) {
            if (!host_has_its_own) throw;
            return with_setting_for_memory(filling_planned_gpu(given, true), inputs, choices);
        }
    }
    return with_setting_for_memory(given, inputs, choices);
}

// Halves the number of prompts that are answered at a time, if --batch does not say it, until the run fits.
inline RunConfig answering_as_many_as_fit(RunConfig run, RunInputs& inputs) {
    if (run.prompts.empty() || !run.open.batch || run.plan) return run;
    check_device(run);
    Trial trial(run, inputs);
    while (run.batch > 1 && still_to_take(trial.rehearse()) > memory_free_for(run).bytes) {
        run.batch /= 2;
        trial.apply(run);
    }
    return run;
}

// Turns --epochs into a number of steps, also those before a resume; at least one step is left of a new run.
// Examples are trained on three times if neither was given. A warmup that was not given then takes at most a
// tenth of the steps.
inline RunConfig with_steps_of_epochs(RunConfig run, const RunInputs& in) {
    if (!in.data || run.steps == 0 || run.plan || !run.bench.empty() || !run.open.steps) return run;
    if (run.epochs == 0 && !in.data->is_examples()) return run;
    const double epochs = run.epochs > 0 ? run.epochs : kExampleEpochs,
                 all = epochs * static_cast<double>(in.sequences_per_epoch),
                 left = all - (in.progress ? static_cast<double>(in.progress->sequences) : 0),
                 of_step = static_cast<double>(run.batch) * run.grad_accum;
    const int64_t first = in.progress ? in.progress->step : 0;
    run.steps = first + std::max<int64_t>(first > 0 ? 0 : 1, std::llround(std::ceil(left / of_step - 1e-6)));
    if (run.open.warmup) run.warmup = std::min(run.warmup, (run.steps + 9) / 10);
    return run;
}

// ---- the longest sequences
//
// --seq-len auto: finds the longest sequences that fit, from plans of runs without data.

constexpr int kLengthStep = 64;

// The longest sequences for which fits(tokens) is true: a multiple of 64 tokens, or `most`. The caller has
// checked that the shortest ones fit.
template <class Fits>
int fit_length(int most, Fits&& fits) {
    const auto tokens = [&](int64_t steps) {
        return static_cast<int>(std::min<int64_t>(most, steps * kLengthStep));
    };
    return tokens(largest_that_fits(ceil_div(most, kLengthStep), [&](int64_t n) { return fits(tokens(n)); }));
}

// The longest sequences that fit, if those of `most` tokens do not; `fewest` if none do. fits(options,
// tokens) says whether sequences of this length fit with these options, or with null for all that --memory
// may choose. That takes long, so the length is found with the options that take the least memory for the
// longest sequences, if they are known, and only the answer is compared with all others.
template <class Fits>
int longest_of_smallest(int most, int fewest, const std::optional<RunConfig>& smallest, Fits&& fits) {
    const auto with_all = [&](int tokens) { return fits(nullptr, tokens); };
    std::optional<RunConfig> fixed = smallest;
    if (fixed) {  // nothing is left to choose
        fixed->memory.clear(), fixed->host_memory.clear();
        fixed->open.recompute = false;
        if (fits(&*fixed, fewest)) {
            const int longest = fit_length(most, [&](int tokens) { return fits(&*fixed, tokens); });
            // The search among all need not find these options, whose estimate may have been too high.
            if (with_all(longest) && (longest + kLengthStep >= most || !with_all(longest + kLengthStep)))
                return longest;
        }
    }
    return with_all(fewest) ? fit_length(most, with_all) : fewest;
}

// The length in tokens that sequences need for the longest training example, at most `most`; less if an epoch
// would otherwise have fewer than `batch` sequences.
inline uint64_t most_tokens_of_examples(const Asked& asked, RunConfig o, int most) {
    const auto batch = static_cast<uint64_t>(o.batch);
    o.plan = true;
    o.seq_len = most;
    o.batch = 1;
    const RunInputs inputs(asked, std::move(o), std::nullopt);
    uint64_t longest = 1, rows = 0;
    inputs.data->for_each_example([&](const Example& e) {
        longest = std::max<uint64_t>(longest, e.count - 1);
        rows += e.count - 1;
    });
    return batch > 1 ? std::min(longest, rows / batch) : longest;
}

// What the data of --data and --val-data allow: which of them are examples, and how long sequences of the
// others can be.
struct DataKinds {
    bool has_examples = false, trains_examples = false;
    uint64_t most = kMostPositions;  // longest possible sequence of the others, `batch` per epoch
};
inline DataKinds kinds_of_data(const RunConfig& o) {
    DataKinds kinds;
    for (const auto& [files, option] : {std::pair{&o.data, "--data"}, std::pair{&o.val_data, "--val-data"}}) {
        if (files->empty()) continue;
        const std::unique_ptr<Dataset> data = open_data(*files, option);
        if (data->is_examples()) {
            kinds.has_examples = true;
            kinds.trains_examples |= files == &o.data;
            continue;
        }
        for (size_t s = 0; s < data->stream_count(); s++)
            kinds.most = std::min(kinds.most, std::max<uint64_t>(2, data->token_count(s)) - 1);
        if (files == &o.data && o.batch > 1)
            kinds.most = std::min(
                kinds.most, data->token_count() / (static_cast<uint64_t>(o.batch) + data->stream_count()));
    }
    return kinds;
}

// The longest sequences that the model and the data allow, and which of them is the limit.
struct LengthLimit {
    int tokens;
    const char* why;
};

// `tried` is `o` without data.
inline LengthLimit length_limit(const Asked& asked, const RunConfig& o, RunConfig tried,
                                const DataKinds& data) {
    tried.seq_len = 1;
    const auto by_model = static_cast<uint64_t>(
        std::min<int64_t>(RunInputs(asked, tried, std::nullopt).most_tokens(), kMostTokens / o.batch));
    uint64_t by_data = data.most;
    if (data.trains_examples)
        by_data = most_tokens_of_examples(asked, o, static_cast<int>(std::min(by_model, by_data)));
    return {static_cast<int>(std::clamp<uint64_t>(by_data, 1, by_model)),
            by_data < by_model ? "as many as the data have" : "all of the model's positions"};
}

// The options with the longest sequences that fit, for --seq-len auto; the reason for the length goes to
// `choices`.
inline RunConfig with_longest_length(const Asked& asked, const RunConfig& given, Choices& choices) {
    RunConfig chosen = given;
    chosen.chose_length = true;
    if (given.open.batch) chosen.batch = 1;
    if (kHostIsDevice) measure_free_memory();
    const FreeMemory space = memory_for(given);
    const DataKinds data = kinds_of_data(chosen);
    RunConfig tried = chosen;  // as a plan that reads no data
    tried.plan = true;
    tried.data.clear(), tried.val_data.clear();
    tried.eval_every = 0;
    tried.out = tried.resume = tried.timeline = tried.loss_by_position = "";
    tried.plans_examples = data.has_examples;
    struct Planned {
        size_t bytes;
        double seconds;
        std::shared_ptr<const RunConfig> options;
        Choices choices;
    };
    // Even if it fails, `of` has what was chosen.
    const auto planned = [&](RunConfig o, int tokens, Choices& of) {
        o.seq_len = tokens;
        RunInputs inputs(asked, std::move(o), std::nullopt);
        const auto options = std::make_shared<const RunConfig>(with_chosen_setting(inputs.run(), inputs, of));
        Trial trial(*options, inputs);
        const MemoryReport& r = trial.rehearse();
        const size_t more = given.loss_by_position.empty() ? 0 : static_cast<size_t>(tokens) * sizeof(float);
        return Planned{r.total() + more, r.seconds, options, of};
    };
    const auto planned_if_it_fits = [&](const RunConfig& o, int tokens,
                                        Choices& of) -> std::optional<Planned> {
        try {
            if (Planned plan = planned(o, tokens, of); plan.bytes <= space.bytes) return plan;
        } catch (const UserError&) {  // nothing that --memory may choose fits
        }
        return std::nullopt;
    };
    // The plans with all that --memory may choose, by length; nothing for lengths that do not fit.
    std::map<int, std::optional<Planned>> known;
    const auto fits_with_all = [&](int tokens, Choices& of) {
        const auto [it, is_new] = known.try_emplace(tokens, std::nullopt);
        if (is_new) it->second = planned_if_it_fits(tried, tokens, of);
        return it->second.has_value();
    };
    const LengthLimit limit = length_limit(asked, chosen, tried, data);
    const int most = limit.tokens, fewest = std::min(kLengthStep, most);
    Choices of_longest, of_fewest;
    if (fits_with_all(most, of_longest))
        chosen.seq_len = most;
    else
        chosen.seq_len =
            longest_of_smallest(most, fewest, of_longest.smallest, [&](const RunConfig* o, int tokens) {
                Choices of;
                return o ? planned_if_it_fits(*o, tokens, of).has_value() : fits_with_all(tokens, of);
            });
    const auto& found = known[chosen.seq_len];
    const Planned plan = found ? *found : planned(tried, chosen.seq_len, of_fewest);  // or fails, saying why
    if (plan.bytes > space.bytes)
        fail("--seq-len auto: sequences of %d tokens take %.1f MiB and there are %.1f (%s)", fewest,
             mebibytes(plan.bytes), mebibytes(space.bytes), space.limit);
    // A plan for a GPU without data or files would find again what this search has found.
    if (given.planned_gpu && given.plan && given.data.empty() && given.val_data.empty() &&
        given.out.empty() && given.resume.empty() && given.timeline.empty() &&
        given.loss_by_position.empty()) {
        choices = plan.choices;
        choices.for_length = plan.options;
    }
    const std::string why =
        chosen.seq_len < most ? format("the most that fit %.1f MiB (%s)", mebibytes(space.bytes), space.limit)
                              : limit.why;
    choices.length =
        format("%d tokens, %s; a step takes %s by estimate", chosen.seq_len, why, seconds_text(plan.seconds));
    choices.length_needs_offloading = std::ranges::any_of(
        kPlacements, [&](const PlacementOption& p) { return p.value(*plan.options) != p.value(tried); });
    chosen.settings["--seq-len"] = {std::to_string(chosen.seq_len)};
    chosen.settings["--batch"] = {std::to_string(chosen.batch)};
    return chosen;
}

// What is the longest without offloading more than the options ask for, and how long a step then takes.
inline std::string longest_without_offloading(const Asked& asked, RunConfig o) {
    if (fills_planned_gpu(o)) o = filling_planned_gpu(std::move(o), false);
    o.open.placements.clear();
    Choices choices;
    try {
        with_longest_length(asked, o, choices);
    } catch (const UserError&) {
        return format("not even %d tokens fit without offloading", kLengthStep);
    }
    return "without offloading " + choices.length;
}

// Chooses the length of --seq-len auto; without that, returns the given options. With several devices it also
// chooses --zero, so that the longest sequences fit, unless --memory does.
inline RunConfig with_chosen_length(const Asked& given, Choices& choices) {
    if (!given.auto_length) return given;
    const auto choose = [&](const RunConfig& way) {
        Choices of_way = choices;
        RunConfig chosen = with_longest_length(given, way, of_way);
        if (way.zero != given.zero) chosen.settings["--zero"] = {way.zero};
        return std::pair(std::move(chosen), std::move(of_way));
    };
    auto [chosen, of_chosen] =
        !given.memory.empty()
            ? choose(given)
            : largest_of_ways(given, choose, [](const auto& answer) { return answer.first.seq_len; });
    choices = of_chosen;
    if (given.plan && !given.json && choices.length_needs_offloading)
        choices.length = longest_without_offloading(given, given) + "\n  with offloading " + choices.length;
    return chosen;
}
