// resume.h - the options of a run that resumes from a save: which of the save's options still hold, and the
// files that they name, even if the run starts elsewhere or files were moved.
#pragma once

#include <glob.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/options.h"
#include "llmc/options_placement.h"
#include "llmc/save_folder.h"

// ---- which options hold

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
inline bool holds_in_a_resume(const std::string& name, const nlohmann::json& values, const Asked& o) {
    if (has_word("--resume --timeline --show-example", name)) return false;  // what this run was asked for
    if (name == "--save-base") return false;                                 // the adapter names its base
    if (name == "--rates") return false;                                     // of the first run's machine
    if (name == "--advanced.algorithms") return searches_algorithms();
    if (name == "--advanced.tf32") return has_tf32();
    if (name == "--steps" && o.has("--epochs")) return false;
    if (name == "--epochs" && o.has("--steps")) return false;
    if (is_chosen_anew(name) && o.has("--memory") && o.batch != 0) return false;
    for (const PlacementOption& p : kPlacements)
        if (name == p.setting() && p.of_training_only && o.steps == 0) return o.trains_adapter();
    // A run that only generates needs no data, and must not touch the training's outputs.
    constexpr const char* kOfTraining =
        "--data --val-data --loss-on --log --loss-by-position --report --report.with --tensorboard --out "
        "--save-every --keep-best --early-stopping --eval-every --merge --export --export.type --export.part";
    if (has_word(kOfTraining, name)) return o.steps > 0;
    if (has_word("--prompt --raw-prompt --sample.every", name) && o.only_answers()) return false;
    // A prompt asks for a sample.
    if (name == "--sample.tokens")
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

// A resumed run goes on with the tokenizer and the adapter of the save. Fails if the command line gives
// another value to --tokenizer, or to an option that says what an adapter is made of.
inline void check_saved_parts(const SavedOptions& before, const Asked& o) {
    const auto saved = [&](const char* name, std::vector<std::string> standard) {
        std::vector<std::string> words;
        try {
            words = before.written.value(name, std::move(standard));
        } catch (const nlohmann::json::exception&) {  // reported below
        }
        if (words.empty()) fail("--resume %s: its %s is no list of texts", o.resume, name);
        return words;
    };
    const auto check = [&](const char* name, std::vector<std::string> standard) {
        if (!o.has(name)) return;
        const std::vector<std::string> was = saved(name, std::move(standard)), &now = o.settings.at(name);
        if (!std::equal(was.begin(), was.end(), now.begin(), now.end(), is_same_value))
            fail("%s %s: --resume %s goes on with %s %s: leave %s out", name, now[0], o.resume, name, was[0],
                 name);
    };
    const Asked standard;
    check("--tokenizer", {"its own"});
    if (before.written.contains("--adapter")) return;  // check_adapter_options() refuses these options
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
inline void resume_what_is_there(Asked& o) {
    if (o.out.empty()) fail("--resume auto is for the save in --out: give --out DIR");
    o.resume = file_exists(o.out + "/latest/trainer_state.json") ? o.out : save_without_link(o.out);
    if (!o.resume.empty()) o.allow_8bit = false;
}

// True if the command line leaves this setting to be chosen and the save has what was chosen, so that the
// same command resumes with it.
inline bool was_chosen_before(const std::string& name, const Asked& o) {
    if (name == "--seq-len") return o.seq_len == 0;
    if (o.has("--memory")) return false;
    return (name == "--batch" && o.batch == 0) || (name == "--chunk-rows.head" && o.head_rows < 0) ||
           (name == "--chunk-rows.mlp" && o.mlp_rows < 0) ||
           (name == "--chunk-rows.attention" && o.attention_rows < 0);
}

// ---- names of files

// True if a file has this name, or matches this glob(3) pattern.
inline bool names_something(const std::string& pattern) {
    if (file_exists(pattern)) return true;
    glob_t found;
    const bool matches = glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found) == 0;
    globfree(&found);
    return matches;
}

// A file name or glob(3) pattern, relative to a folder.
inline std::string name_from(const std::string& folder, const std::string& name) {
    if (std::filesystem::path(name).is_absolute()) return name;
    const std::string whole = (std::filesystem::path(folder) / name).lexically_normal().string();
    constexpr const char* kSpecial = "*?[\\";
    if (file_exists(whole) || name.find_first_of(kSpecial) == name.npos) return whole;
    std::string plain;  // special characters in the folder's own name are escaped
    for (const char c : folder) plain += (std::strchr(kSpecial, c) ? "\\" : "") + std::string(1, c);
    return plain + "/" + name;
}

// The options whose values are names of files or folders.
constexpr const char* kNameOptions =
    "--data --val-data --model --tokenizer --log --out --advanced.algorithms --adapter --merge --export "
    "--save-base --loss-by-position --rates --report --report.with --tensorboard";

inline bool is_list_of_texts(const nlohmann::json& options, const std::string& name) {
    const auto it = options.find(name);
    const auto is_text = [](const nlohmann::json& value) { return value.is_string(); };
    return it != options.end() && it->is_array() && std::all_of(it->begin(), it->end(), is_text);
}

// The folder that the relative names in a save's options count from now. Candidates are the folder where the
// run was started, the same folder if it was moved along with OUT, and the current folder; the first in which
// the data are found is taken.
inline std::string folder_of_names(const Progress& saved, const std::string& save) {
    namespace fs = std::filesystem;
    std::error_code none;
    const std::string here = fs::current_path(none).string();
    if (saved.directory.empty()) return here;
    const auto texts = [&](const char* name) {
        return is_list_of_texts(saved.options, name) ? saved.options[name].get<std::vector<std::string>>()
                                                     : std::vector<std::string>();
    };
    std::vector<std::string> folders = {saved.directory};
    for (const std::string& out : texts("--out")) {
        const fs::path before = (fs::path(saved.directory) / out).lexically_normal();
        const fs::path way = fs::path(saved.directory).lexically_relative(before);
        folders.push_back((fs::absolute(folder_above(save), none) / way).lexically_normal().string());
    }
    folders.push_back(here);
    std::erase_if(folders, [&](const std::string& folder) { return !fs::is_directory(folder, none); });
    for (const std::string& folder : folders) {
        bool found = true;
        for (const char* option : {"--data", "--val-data"})
            for (const std::string& name : texts(option))
                found = found && names_something(name_from(folder, name));
        if (found) return folder;
    }
    return folders.empty() ? here : folders.front();
}

// Makes names in an option count from `folder`.
inline void count_names_from(const std::string& folder, const std::string& option,
                             std::vector<std::string>& names) {
    for (std::string& name : names)
        if (option != "--model" || !parse_new_model(name)) name = name_from(folder, name);
}

// The options of the run that made a save. Its --out becomes the folder of saves that has this save now, even
// if that was moved.
inline SavedOptions saved_options(const std::string& save) {
    namespace fs = std::filesystem;
    const Progress progress = read_progress(save);
    const bool is_of_old_options = progress.formats.find(" --master ") != std::string::npos;
    if (is_of_old_options)
        fail(
            "--resume %s: an earlier version, whose options had other names, has saved this: --model %s "
            "trains on from its weights",
            save, save);
    SavedOptions options = {progress.options, progress.options, folder_of_names(progress, save)};
    std::error_code none;
    if (!fs::equivalent(options.directory, ".", none)) {
        for (const std::string& option : words_of(kNameOptions)) {
            if (!is_list_of_texts(options.here, option)) continue;
            auto names = options.here[option].get<std::vector<std::string>>();
            count_names_from(options.directory, option, names);
            options.here[option] = names;
        }
    }
    const std::string out = folder_above(save);
    if (!options.here.contains("--out") || link_target(out + "/latest").empty()) return options;
    const nlohmann::json& before = options.here["--out"];
    if (before.size() == 1 && is_list_of_texts(options.here, "--out") &&
        fs::equivalent(before[0].get<std::string>(), out, none))
        return options;
    options.here["--out"] = {out};
    options.written["--out"] = {fs::absolute(out, none).string()};
    return options;
}

// The inverse: stores a run's options in `progress`, with names that count from progress.directory.
inline void remember_options(const RunConfig& o, Progress& progress) {
    std::error_code none;
    const std::string here = std::filesystem::current_path(none).string();
    auto given = o.settings;
    // A save is the same whatever devices made it, and is resumed on any.
    for (const char* of_machine : {"--devices", "--zero", "--network", "--advanced.patience"})
        given.erase(of_machine);
    progress.directory = o.directory.empty() ? here : o.directory;
    if (!std::filesystem::equivalent(progress.directory, ".", none))
        for (const std::string& option : words_of(kNameOptions))
            if (given.contains(option) && !o.of_save.contains(option))
                count_names_from(here, option, given[option]);
    progress.options = given;
}
