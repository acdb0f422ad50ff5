// memory_setting.h - the settings that may be chosen to make a run fit: reads them from options, and writes
// them into options and into those that a save remembers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llmc/options.h"
#include "llmc/options_placement.h"
#include "llmc/recompute.h"

// The settings that may be chosen. The sequences of a step, batch * grad_accum, stay the same.
struct MemorySetting {
    int batch, grad_accum;
    int64_t head_rows, mlp_rows, attention_rows;
    std::string master, adam_m, adam_v;
    std::vector<int> levels = {};  // recompute levels, by layer

    bool same_state(const MemorySetting& other) const {
        return master == other.master && adam_m == other.adam_m && adam_v == other.adam_v;
    }
};

inline MemorySetting setting_of(const Options& o) {
    return {o.batch, o.grad_accum, o.head_rows, o.mlp_rows, o.attention_rows, o.master, o.adam_m, o.adam_v};
}

// Writes a setting into the options.
inline void apply_setting(const MemorySetting& s, Options& o) {
    o.batch = s.batch;
    o.grad_accum = s.grad_accum;
    o.head_rows = s.head_rows;
    o.mlp_rows = s.mlp_rows;
    o.attention_rows = s.attention_rows;
    o.master = s.master, o.adam_m = s.adam_m, o.adam_v = s.adam_v;
    o.recompute = levels_text(s.levels, recompute_names());
}

// Replaces the budget by the choice in the options that a save remembers, so that a resumed run makes no
// other choice. `given`: the options before choosing.
inline void remember_choice(const Options& given, Options& o) {
    auto remember = [&](const char* option, const std::string& value) { o.given[option] = {value}; };
    if (o.steps > 0) remember("--chunk-rows.head", std::to_string(o.head_rows));
    if (given.mlp_rows != o.mlp_rows) remember("--chunk-rows.mlp", std::to_string(o.mlp_rows));
    if (given.attention_rows != o.attention_rows)
        remember("--chunk-rows.attention", std::to_string(o.attention_rows));
    if (given.batch > 0 && !o.has("--memory")) return;
    remember("--batch", std::to_string(o.batch));
    remember("--grad-accum", std::to_string(o.grad_accum));
    remember("--recompute", o.recompute);
    if (o.allow_8bit) {
        remember("--state-formats.master", o.master);
        if (o.optimizer == "adamw") {
            remember("--state-formats.m", o.adam_m);
            remember("--state-formats.v", o.adam_v);
        }
    }
    for (const Placement& p : kPlacements)
        if (p.value(o) != p.value(given)) remember(p.setting().c_str(), p.value(o));
    if (o.prefetch != given.prefetch) remember("--prefetch", std::to_string(o.prefetch));
    if (o.by_block != given.by_block) remember("--by-block", "true");
    for (const char* budget : {"--memory", "--memory.host", "--state-formats"}) o.given.erase(budget);
}
