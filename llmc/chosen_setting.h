// chosen_setting.h - chooses the settings that options leave open: --memory, --batch auto, and the auto of
// --chunk-rows.
//
// The choice is made by trials: trainers that never run. A Trial is made from options and inputs, which must
// outlive it. use() gives it a setting, and rehearse(), rehearse_training() and rehearse_validation() say
// what a run with this setting takes. Trial::Element is the type of its weights.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "llmc/chunk_rows.h"
#include "llmc/dataset.h"
#include "llmc/enough_memory.h"
#include "llmc/fit.h"
#include "llmc/memory_setting.h"
#include "llmc/options.h"
#include "llmc/plans.h"
#include "llmc/rates_file.h"
#include "llmc/residences.h"
#include "llmc/run_inputs.h"

// The memory that a run may take: --memory or, without it, most of what is free. Fails if there is no device
// to ask.
inline FreeMemory memory_for(const Options& o) {
    if (o.has("--memory")) return {budget_of(o.memory).bytes, "--memory"};
    check_device(o);
    return with_reserve(memory_free_at_start(), context_bytes());
}

// The questions that the choosers ask of a trial. A run without training chooses its chunks of rows by a
// validation.
template <class Trial>
Rehearsals rehearsals_of(Trial& trial, const Options& o, const RunInputs& inputs, int64_t most_sequences) {
    using T = typename Trial::Element;
    return {.layers = static_cast<size_t>(inputs.config.layers),
            .heads = inputs.config.heads,
            .seq_len = inputs.feeds() ? o.seq_len : 0,
            .most_sequences = most_sequences,
            .rates = rates_of<T>(o.rates),
            .report = [&](const MemorySetting& s) { return trial.apply(s), trial.rehearse(); },
            .outline = [&](const MemorySetting& s) { return trial.apply(s), trial.rehearse(false); },
            .training =
                [&](const MemorySetting& s) { return trial.apply(s), trial.rehearse_training(false, false); },
            .chunk_seconds =
                [&, rates = rates_of<T>(o.rates, kChunkThreads)](const MemorySetting& s) {
                    trial.apply(s);
                    return seconds_without_update(o.steps > 0 ? trial.rehearse_training(false, false)
                                                              : trial.rehearse_validation(false),
                                                  rates);
                }};
}

// The options with all open settings chosen; how they were chosen goes to `choices`.
template <class Trial>
Options with_chosen_setting(const Options& given, RunInputs& inputs, Choices& choices) {
    using T = typename Trial::Element;
    if (kHostIsDevice) memory_free_at_start();
    const bool budget = given.has("--memory");
    if (!budget && given.batch > 0 && given.head_rows >= 0 && given.mlp_rows >= 0 &&
        given.attention_rows >= 0)
        return given;
    int64_t most = kMostTokens / given.seq_len;
    std::optional<uint64_t> epoch;
    if (inputs.data) {
        epoch = SequenceLoader(*inputs.data, given.seq_len, given.seed, true).sequences_per_epoch();
        most = std::min(most, static_cast<int64_t>(*epoch));
    }
    Options chosen = given;
    if (budget && given.batch > 0) {
        const auto mixes = [&](bool with_files) {
            return residences_to_try(given, movable<T>(given, inputs, with_files));
        };
        const auto fit = [&](const Options& mix, const BesideDevice& room, const Fit* best) {
            Trial trial(mix, inputs);
            return fit_settings(mix, std::is_same_v<T, bf16>, rehearsals_of(trial, given, inputs, most), room,
                                best);
        };
        chosen = fit_memory(given, mixes, fit, choices.memory);
    } else {
        Trial trial(given, inputs);
        const Rehearsals rehearsals = rehearsals_of(trial, given, inputs, most);
        MemorySetting s = setting_of(given);
        s.levels = parse_levels(given.recompute, recompute_names(), inputs.config.layers, "--recompute");
        s = given.batch > 0
                ? rehearsals.with_rows(s)
                : fit_batch(s, memory_for(given), batch_cap(given.seq_len, epoch), rehearsals, choices.batch);
        apply_setting(s, chosen);
    }
    remember_choice(given, chosen);
    return chosen;
}
