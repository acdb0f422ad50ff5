// options_parse.h - from a command line to checked options, completed by the save that a run resumes and by
// the rank that this process is.
#pragma once

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "llmc/adapter.h"
#include "llmc/model_names.h"
#include "llmc/options.h"
#include "llmc/options_check.h"
#include "llmc/options_declare.h"
#include "llmc/options_help.h"
#include "llmc/options_words.h"
#include "llmc/ranks.h"
#include "llmc/resume.h"
#include "llmc/save_folder.h"
#include "llmc/text.h"

// Sets an option to these words, and remembers that it was given. Fails if its range does not have them.
inline void set_option(CLI::App& app, RunConfig& o, const std::string& name,
                       const std::vector<std::string>& words) {
    CLI::Option* const option = app.get_option(name);
    try {
        option->clear();
        for (const std::string& word : words) option->add_result(word);
        option->run_callback();
    } catch (const CLI::ParseError& e) {
        std::string line = e.what();
        if (line.starts_with(name + ":")) line.replace(0, name.size(), setting_name(name));
        fail("%s", line);
    }
    o.settings[name] = words;
}

// Prints the help, the version or the names of known models and exits, if the settings ask for it.
inline void answer_questions(const CLI::App& app, const Settings& settings) {
    std::string answer;
    if (const auto help = settings.find("--help"); help != settings.end())
        answer = help->second[0] == "man"    ? manual_page(app)
                 : help->second[0] == "bash" ? bash_completion(app)
                 : help->second[0] == "zsh"
                     ? zsh_completion(app)
                     : help_text(app, help->second[0] == "true" ? "" : help->second[0]);
    else if (settings.contains("--version"))
        answer = version_text() + "\n";
    else if (settings.contains("--model") && settings.at("--model")[0] == "list" && !file_exists("list"))
        for (const KnownModel& known : known_models())
            answer += format("%-30s %s\n", known.name, known.family->name);
    if (answer.empty()) return;
    fputs(answer.c_str(), stdout);
    exit(0);
}

// The settings of the command line that differ from those of the save, as in "--lr 1e-4 (was 5e-5)". Those
// that only say where to write, what to print and which machine to use are not among them, nor, with --resume
// auto, those that were chosen when the run began.
inline std::map<std::string, std::string> changed_settings(const CLI::App& app, const Asked& o,
                                                           const SavedOptions& before, bool automatic) {
    constexpr const char* kOfTheRun =
        "--resume --out --log --timeline --loss-by-position --print-every --plan --threads --devices --zero "
        "--machines --network --rates --save-every --keep --prompt --merge --save-base --model --adapter "
        "--raw-prompt --memory --report --report.with --tensorboard";
    std::map<std::string, std::string> all;
    for (const auto& [name, words] : o.settings) {
        if (has_word(kOfTheRun, name) || name.starts_with("--sample.") || name.starts_with("--advanced.") ||
            name.starts_with("--export"))
            continue;
        if (automatic && was_chosen_before(name, o)) continue;
        // What the help says of the default may be more than its value.
        const std::string now = joined(words, " "), said = app.get_option(name)->get_default_str(),
                          standard = said.substr(0, said.find("; with"));
        const bool is_value = standard.find(' ') == standard.npos;
        const auto saved = before.written.find(name);
        std::string was = saved != before.written.end() ? "" : is_value ? standard : "not given";
        if (saved != before.written.end() && saved->is_array())
            for (const nlohmann::json& word : *saved)
                if (word.is_string()) was += (was.empty() ? "" : " ") + word.get<std::string>();
        if (is_same_value(now, was)) continue;
        all[name] = o.spelled(name) + (was.empty() ? "" : " (was " + was + ")");
    }
    return all;
}

// With --resume auto the command says again with which adapter the run began, as --adapter or as --model. The
// run goes on with that of the save instead.
inline void forget_first_adapter(Asked& o, const SavedOptions& before) {
    const auto saved = before.here.find("--adapter");
    if (saved == before.here.end() || !saved->is_array() || saved->empty() || !(*saved)[0].is_string())
        return;
    const std::string first = (*saved)[0].get<std::string>();
    if (o.has("--adapter") && same_file(o.adapter, first)) o.settings.erase("--adapter"), o.adapter.clear();
    if (o.has("--model") && !parse_new_model(o.model) && same_file(o.model, first))
        o.settings.erase("--model");
}

// Takes from a save what holds in the run that resumes from it. `automatic`: --resume auto.
inline void set_saved(CLI::App& app, Asked& o, const SavedOptions& before, bool automatic) {
    if (automatic) forget_first_adapter(o, before);
    check_saved_parts(before, o);
    o.directory = before.directory;
    o.changed = changed_settings(app, o, before, automatic);
    std::vector<std::string> taken;
    for (const auto& [name, values] : before.here.items()) {
        const CLI::Option* const option = app.get_option_no_throw(name);
        if (!option) fail("--resume %s: its option %s is unknown", o.resume, printable(name));
        if (!holds_in_a_resume(name, values, o)) continue;
        // --memory may have divided the sequences of a step in another way than the command: it does so anew.
        const bool divides = name == "--batch" || name == "--grad-accum";
        if (automatic && divides && o.has("--memory") && (o.has("--batch") || o.has("--grad-accum")))
            continue;
        if (o.has(name) && !(automatic && was_chosen_before(name, o))) continue;
        taken.push_back(name);
    }
    for (const std::string& name : taken) {
        o.of_save.insert(name);
        try {
            set_option(app, o, name, before.here[name].get<std::vector<std::string>>());
        } catch (const nlohmann::json::exception&) {
            fail("--resume %s: its %s is no list of texts", o.resume, name);
        }
        o.settings[name] = before.written[name].get<std::vector<std::string>>();
    }
    // With --seq-len auto, a resumed run keeps the length that was chosen when it began.
    if (automatic && o.seq_len == 0) o.seq_len = Asked().seq_len, o.settings.erase("--seq-len");
}

// --model ORG/NAME and --adapter ORG/NAME become the folders that Hugging Face's tools have downloaded.
inline void open_from_hub(Asked& o) {
    const auto open = [&](const char* option, std::string& value) {
        const std::string found = find_on_hub(option, value, o.of_save.contains(option));
        if (found != value) value = found, o.settings[option] = {found};
    };
    const KnownModel* const planned = o.plan && !parse_new_model(o.model) ? known_shape(o.model) : nullptr;
    const bool nf4 = planned && !o.has("--base") && spelling_in(words_of_model(o.model), "-nf4- -q4-") != "";
    if (nf4) o.base = "nf4";
    if (planned && o.model != planned->name)
        print(stderr, "%s is not here: the plan is for the shape of %s%s\n", o.model, planned->name,
              nf4 ? " with --base nf4, as the name says 4 bits" : "");
    if (!parse_new_model(o.model) && !planned) open("--model", o.model);
    open("--adapter", o.adapter);
    open("--tokenizer", o.tokenizer);
}

// If --model is an adapter's folder, replaces it by the model that the adapter belongs to and makes the
// folder the value of --adapter. Unless options say otherwise, the model is quantized as it was when the
// adapter was trained.
inline void open_adapter_as_model(Asked& o) {
    const std::string folder = o.model;
    if (parse_new_model(folder) || !is_adapter_folder(resolve_save(folder))) return;
    if (!o.adapter.empty())
        fail("--model %s is an adapter, and so is --adapter %s: give the model that they are of as --model",
             folder, o.adapter);
    o.model = find_adapter_model(folder), o.adapter = folder;
    o.settings["--model"] = {o.model}, o.settings["--adapter"] = {o.adapter};
    const std::optional<AdapterBase> base = read_adapter_base(resolve_save(folder));
    if (o.has("--base") || !base || is_quantized_model(o.model) || !base->has_options()) return;
    if (!base->is_quantized()) return;
    o.settings["--base"] = {base->option_value()};
    const std::string wrong = set_base(o, o.settings["--base"]);
    if (!wrong.empty()) fail("%s: %s: %s", folder, kAdapterBaseFile, wrong);
}

// A rank learns from what started it how many there are. By default each computes one micro-batch of a step.
inline void complete_devices(Asked& o) {
    if (!o.rank.is_alone()) {
        if (o.has("--devices") && o.devices != o.rank.count)
            fail("--devices %d: %d ranks were started: leave it out, or start as many", o.devices,
                 o.rank.count);
        o.devices = o.rank.count;
    } else if (o.plan) {  // of the first rank
        o.rank = {0, o.devices, std::max(1, o.devices / o.machines)};
    }
    // A save without --grad-accum is of one device and one micro-batch a step, which cannot be shared.
    if (o.devices == 1 || o.has("--grad-accum") || !o.resume.empty()) return;
    o.grad_accum = o.devices;
    o.settings["--grad-accum"] = {
        std::to_string(o.grad_accum)};  // so that a resume on other devices keeps it
}

// Fills in what depends on other options.
inline void complete_options(Asked& o) {
    complete_devices(o);
    if (o.seq_len == 0) o.auto_length = true, o.seq_len = Asked().seq_len;
    if (!o.has("--lr"))
        o.lr = o.train == "prompt"        ? kPromptRate
               : o.trains_adapter()       ? kLoraRate
               : parse_new_model(o.model) ? kNewRate
                                          : kFineTuningRate;
    // A model and a prompt without data generate only.
    if (o.has("--prompt") && o.data.empty() && !o.has("--steps") && !parse_new_model(o.model) && !o.plan &&
        o.bench.empty())
        o.steps = 0, o.settings["--steps"] = {"0"};
    if (o.bench.empty()) return;
    const Asked standard;
    if (o.has("--steps")) o.bench_steps = static_cast<int>(std::min<int64_t>(o.steps, INT32_MAX));
    if (o.has("--warmup")) o.bench_warmup = static_cast<int>(std::min<int64_t>(o.warmup, INT32_MAX));
    o.steps = standard.steps, o.warmup = standard.warmup;
}

// Sets what depends on which options were given.
inline void note_what_is_open(Asked& o, bool automatic) {
    o.is_default_model = !o.has("--model");
    o.begins_anew = automatic && o.resume.empty();
    o.validates_by_position = o.has("--loss-by-position");
    o.limits_answers = o.has("--sample.tokens");
    for (const auto& [name, setting] : o.changed)
        o.validates_otherwise |= has_word("--seq-len --eval-batches --batch --grad-accum", name);
    Open& open = o.open;
    open.length = !o.has("--seq-len");
    open.steps = !o.has("--steps");
    open.warmup = !o.has("--warmup");
    open.batch = !o.has("--batch");
    open.recompute = !o.has("--recompute");
    open.prefetch = !o.has("--prefetch");
    open.mlp_rows = !o.has("--chunk-rows.mlp");
    open.attention_rows = !o.has("--chunk-rows.attention");
    open.master = o.allow_8bit && !o.has("--state-formats.master");
    open.adam_m = o.allow_8bit && o.optimizer == "adamw" && !o.has("--state-formats.m");
    open.adam_v = o.allow_8bit && o.optimizer == "adamw" && !o.has("--state-formats.v");
    for (const PlacementOption& p : kPlacements)
        if (!o.has(p.setting())) open.placements.insert(p.key);
    const auto state = o.settings.find("--offload.state");
    open.state_buffers = state == o.settings.end() || state->second[0].find(':') == std::string::npos;
}

// Runs the planner (simt.h) in place of this program; it is where make or make install puts it.
[[noreturn]] inline void become_planner(const std::string& gpu, char** argv) {
    const std::filesystem::path program = program_folder();
    for (const char* place : {"../planner", "../libexec/train-gpt/planner"})
        execv((program / place).c_str(), argv);
    fail("--gpu %s: there is no %s, which plans for GPUs: make builds it beside this program", gpu,
         (program / "../planner").lexically_normal().string());
}

// Sets the GPU that plans are for, if --gpu names one, and --devices, if it names several. In a build for a
// CPU this does not return.
inline void plan_for_named_gpu(CLI::App& app, Asked& o, char** argv) {
    if (o.gpu.empty()) return;
    if (!o.rank.is_alone()) fail("--gpu %s: a plan needs one process: without mpirun", o.gpu);
    if (kBuild.host_is_device) become_planner(o.gpu, argv);
    o.planned_gpu = &find_gpu(o.gpu);
    if (const int count = count_in_name(o.gpu).first; count >= 0) {
        if (o.has("--devices") && o.devices != count)
            fail("--gpu %s is %d GPUs, and --devices %d: leave one of these numbers out", o.gpu, count,
                 o.devices);
        set_option(app, o, "--devices", {std::to_string(count)});
    }
    if (o.has("--memory") && parse_bytes(o.memory, "--memory") > memory_of(*o.planned_gpu))
        fail("--memory %s: the %s of --gpu has %.1f GiB", o.memory, o.planned_gpu->name,
             o.planned_gpu->memory);
}

// Sets the options of the command line and of the config file that it names; the command line counts. Values
// that do not count, because an option was given again, must be valid too.
inline void set_given(CLI::App& app, Asked& o, int argc, char** argv) {
    WordReader reader(app);
    Settings settings = reader.command_line(std::vector<std::string>(argv + 1, argv + argc));
    answer_questions(app, settings);
    // The planner allows other values than a build for a CPU, so it is asked before they are read.
    const auto plan_elsewhere = [&](const Settings& of) {
        const auto gpu = of.find("--gpu");
        if (!kBuild.host_is_device || gpu == of.end()) return;
        set_option(app, o, gpu->first, gpu->second);
        plan_for_named_gpu(app, o, argv);
    };
    plan_elsewhere(settings);
    const auto replaced = reader.replaced();
    if (const auto config = settings.find("--config"); config != settings.end()) {
        const std::string path = config->second[0];
        settings.erase(config);
        reader.config_file(path, [&](const Settings& of_file) {
            plan_elsewhere(of_file);
            for (const auto& [name, words] : of_file) {
                const bool says_how_long = name == "--steps" || name == "--epochs";
                const bool is_said = settings.contains("--steps") || settings.contains("--epochs");
                if (!settings.contains(name) && !(says_how_long && is_said)) set_option(app, o, name, words);
            }
        });
    }
    for (const auto& [name, words] : replaced)
        if (name != "--config") set_option(app, o, name, words);
    for (const auto& [name, words] : settings) set_option(app, o, name, words);
}

// Reads the command line. For a resumed run, saved(save) returns that save's SavedOptions; those that were
// not given are taken from there. Prints the help and exits if asked to. Fails on mistakes.
template <class Saved>
Asked parse_options(int argc, char** argv, Saved&& saved) {
    Asked o;
    o.rank = rank_of_environment();
    CLI::App app;
    declare_options(app, o);
    set_given(app, o, argc, argv);
    plan_for_named_gpu(app, o, argv);
    if (o.only_answers() && !o.has("--steps")) o.steps = 0, o.settings["--steps"] = {"0"};
    const bool automatic = o.resume == "auto";
    if (automatic) resume_what_is_there(o);
    if (!o.resume.empty()) set_saved(app, o, saved(o.resume), automatic);
    open_from_hub(o);
    open_adapter_as_model(o);
    complete_options(o);
    check_options(o);
    if (o.update_in_backward && o.clip > 0) o.clip_per_block = true;
    note_what_is_open(o, automatic);
    if (!o.bench.empty()) {
        o.steps = o.bench == "forward" ? 0 : 1 + int64_t{o.bench_warmup} + o.bench_steps;
        o.sample_tokens = 0;
    }
    return o;
}
