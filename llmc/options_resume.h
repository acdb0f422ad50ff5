// options_resume.h - which options of a save hold in a run that resumes from it.
#pragma once

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "llmc/file.h"
#include "llmc/options.h"
#include "llmc/options_placement.h"
#include "llmc/save_folder.h"

// True if the library for matrix products lets us choose its algorithms.
constexpr bool kSearchesAlgorithms = !kHostIsDevice;

// True if that library has TF32 for this build's operands.
constexpr bool kHasTf32 = !kHostIsDevice && std::is_same_v<floatX, float>;

// The options of a save, by name: as they were written, and with relative names that are valid here.
struct SavedOptions {
    nlohmann::json written, here;
    std::string directory;  // the folder that the written names count from
};

// True if --memory chooses this setting again in a resumed run, whatever the save says. Not among them: the
// formats of the state, which stay, and the micro-batches, whose number of sequences stays.
inline bool is_chosen_anew(const std::string& name) {
    if (name.starts_with("--chunk-rows.") || name.starts_with("--offload.")) return true;
    return name == "--recompute" || name == "--prefetch" || name == "--by-block";
}

// True if a setting of a save also holds in a run that resumes from it. `o` has the command line's settings,
// and `name` is not among these.
inline bool holds_in_a_resume(const std::string& name, const nlohmann::json& values, const Options& o) {
    const auto among = [&](std::initializer_list<const char*> names) {
        return std::find(names.begin(), names.end(), name) != names.end();
    };
    if (among({"--resume", "--timeline", "--show-example"})) return false;  // what this run was asked for
    if (among({"--save-base"})) return false;                               // the adapter names its base
    if (among({"--rates"})) return false;                                   // of the first run's machine
    if (among({"--advanced.algorithms"})) return kSearchesAlgorithms;
    if (among({"--advanced.tf32"})) return kHasTf32;
    if (among({"--steps"}) && o.has("--epochs")) return false;
    if (among({"--epochs"}) && o.has("--steps")) return false;
    if (is_chosen_anew(name) && o.has("--memory") && o.batch != 0) return false;
    for (const PlacementOption& p : kPlacements)
        if (name == p.setting() && p.of_training_only && o.steps == 0) return o.trains_adapter();
    // A run that only generates needs no data, and must not touch the training's outputs.
    if (among({"--data", "--val-data", "--loss-on", "--log", "--loss-by-position", "--out", "--save-every",
               "--keep-best", "--early-stopping", "--eval-every", "--merge", "--export", "--export.type",
               "--export.part"}))
        return o.steps > 0;
    if (among({"--prompt", "--raw-prompt", "--sample.every"}) && o.only_answers()) return false;
    // A prompt asks for a sample.
    if (among({"--sample.tokens"}))
        return !(o.has("--prompt") || o.only_answers()) || values != nlohmann::json::array({"0"});
    return true;
}

// True if two values of an option are the same text, or the same number.
inline bool is_same_value(const std::string& a, const std::string& b) {
    char *end_of_a = nullptr, *end_of_b = nullptr;
    const double x = strtod(a.c_str(), &end_of_a), y = strtod(b.c_str(), &end_of_b);
    const bool are_numbers = !a.empty() && !*end_of_a && !b.empty() && !*end_of_b;
    return a == b || (are_numbers && x == y);
}

// A resumed run goes on with the adapter of the save. Fails if the command line gives another value to an
// option that says what an adapter is made of.
inline void check_saved_adapter(const SavedOptions& before, const Options& o) {
    if (before.written.contains("--adapter")) return;  // check_adapter_options() refuses these options
    const auto saved = [&](const char* name, std::vector<std::string> standard) {
        std::vector<std::string> words;
        try {
            words = before.written.value(name, std::move(standard));
        } catch (const nlohmann::json::exception&) {  // reported below
        }
        if (words.empty()) fail("--resume %s: its %s is no list of texts", o.resume.c_str(), name);
        return words;
    };
    const auto check = [&](const char* name, std::vector<std::string> standard) {
        if (!o.has(name)) return;
        const std::vector<std::string> was = saved(name, std::move(standard)), &now = o.given.at(name);
        if (!std::equal(was.begin(), was.end(), now.begin(), now.end(), is_same_value))
            fail("%s %s: --resume %s goes on with %s %s: leave %s out", name, now[0].c_str(),
                 o.resume.c_str(), name, was[0].c_str(), name);
    };
    const Options standard;
    check("--train", {standard.train});
    const std::string trained = saved("--train", {standard.train})[0];
    if (trained == "prompt") check("--soft-prompt", {std::to_string(standard.soft_prompt)});
    if (trained != "lora") return;
    check("--lora-rank", {std::to_string(standard.lora_rank)});
    check("--lora-alpha", {format("%g", standard.lora_alpha)});
    check("--lora-targets", standard.lora_targets);
}

// For --resume auto: resumes from the save in --out if there is one, else starts a new run. The command is
// the same each time, so what it chose when the run began is not chosen again.
inline void resume_what_is_there(Options& o) {
    if (o.out.empty()) fail("--resume auto is for the save in --out: give --out DIR");
    o.resume = file_exists(o.out + "/latest/trainer_state.json") ? o.out : save_without_link(o.out);
    if (!o.resume.empty()) o.allow_8bit = false;
}

// True if the command line leaves this setting to be chosen and the save has what was chosen, so that the
// same command resumes with it.
inline bool was_chosen_before(const std::string& name, const Options& o) {
    if (name == "--seq-len") return o.seq_len == 0;
    if (o.has("--memory")) return false;
    return (name == "--batch" && o.batch == 0) || (name == "--chunk-rows.head" && o.head_rows < 0) ||
           (name == "--chunk-rows.mlp" && o.mlp_rows < 0) ||
           (name == "--chunk-rows.attention" && o.attention_rows < 0);
}
