// run_config.h - what a run is, in plain values: resolved from what was asked for (options.h). All that comes
// after resolve.h reads this and the inputs (run_inputs.h), and not what was asked for.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <vector>

#include "llmc/gpus.h"
#include "llmc/ranks.h"
#include "llmc/sample_token.h"

constexpr int64_t kMostTokens = 1 << 30;  // in a micro-batch

// The name of a setting as on a command line: "--lr", "--offload weights".
inline std::string setting_name(std::string name) {
    if (const size_t dot = name.find('.'); dot != name.npos) name[dot] = ' ';
    return name;
}
// A setting as on a command line: "--lr 3", "--offload weights=disk".
inline std::string spelled_setting(const std::string& name, const std::string& value) {
    return setting_name(name) + (name.find('.') == name.npos ? " " : "=") + value;
}

// How often JSON examples are trained on, unless --steps or --epochs says otherwise.
constexpr double kExampleEpochs = 3;

// Which values no option gave. It stays true when the run has chosen one: by what it reads, or by the search
// for a setting that fits (--memory).
struct Open {
    bool length = false, steps = false, warmup = false, batch = false;
    bool recompute = false, prefetch = false, mlp_rows = false, attention_rows = false;
    bool master = false, adam_m = false, adam_v = false;  // with --state-formats auto: formats of the state
    bool state_buffers = false;                           // of --offload state=
    std::set<std::string> placements;                     // by their key in --offload
};

// The part of a run's configuration that decides how much memory it takes, and how fast it is: what --memory,
// --batch auto, --chunk-rows auto and --zero auto may choose. A choice keeps the sequences of a step,
// batch * grad_accum, except that of --batch auto.
struct MemorySetting {
    int batch = 8;  // sequences in a micro-batch; 0: auto
    int grad_accum = 1;
    std::string recompute = "gelu";  // levels by layer (recompute.h)
    // Rows of a chunk; 0: all, -1: auto.
    int64_t head_rows = -1, mlp_rows = 0, attention_rows = 0;
    std::string master = "fp32", adam_m = "fp32", adam_v = "fp32";  // formats of the state
    // Placements of --offload (options_placement.h).
    std::string weights = "device", embeddings = "device", gradients = "device", state = "device",
                updates = "device";
    int prefetch = 1;          // prefetch distance, in blocks
    int state_buffers = 32;    // chunks; -1: as many as a block has
    int offloaded_inputs = 0;  // number of layers; -1: all
    bool offload_keys = false;
    std::string zero = "auto";  // what several devices share; auto: as 1, unless another was chosen
    bool by_block = false;      // all micro-batches of a step go through a block together

    bool same_state(const MemorySetting& other) const {
        return master == other.master && adam_m == other.adam_m && adam_v == other.adam_v;
    }
};

// What the run reads.
struct InputConfig {
    std::string model = "d2", tokenizer;
    bool is_default_model = false;  // no --model
    std::string adapter, base, head;
    std::vector<std::string> store;  // --base LAYERS=FORMAT
    bool any_base = false;           // --base none: use the model as it is, whatever its adapter's base was
    std::string resume;
    bool begins_anew = false;  // --resume auto, and there is no save yet
    std::vector<std::string> data, val_data;
    bool plans_examples = false;  // a plan without data is for examples that share sequences
    std::string loss_on = "completions", chat_format = "auto", chat_date;
    int64_t show_example = 0;
    std::string rope_scaling;
    int positions = 0;  // 0: the model's
    int seq_len = 128;
    bool auto_length = false;   // --seq-len auto
    bool chose_length = false;  // --seq-len auto tries lengths, or has chosen one
};

// What is trained, and how.
struct TrainingConfig {
    std::string train = "all";
    int lora_rank = 16;
    double lora_alpha = 32, lora_dropout = 0;
    std::vector<std::string> lora_targets = {"all"};
    int soft_prompt = 20;  // vectors; 0: as many as its text has tokens
    std::string soft_prompt_text;
    double dropout = 0;
    int64_t steps = 1500;
    double epochs = 0;          // 0: `steps` counts
    double lr = 0, min_lr = 0;  // lr: if not given, it depends on what is trained
    int64_t warmup = 30;
    std::string schedule = "cosine", optimizer = "adamw";
    double weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, clip = 1.0;
    bool clip_per_block = false, update_in_backward = false;
    uint64_t seed = 1337;
    int64_t eval_every = 0;
    int eval_batches = 8;
    int64_t early_stopping = 0;  // 0: never
};

// What the run writes.
struct OutputConfig {
    std::string out;
    int64_t save_every = 0;
    int keep = 2;
    bool keep_best = false;
    std::string merge, save_base;
    bool merge_is_there = false;  // --merge, and the folder has the merged model already
    std::string export_file, export_type, export_part = "model";
    std::string log, loss_by_position, tensorboard, report, report_with, timeline;
    bool validates_by_position = false;  // --loss-by-position, on all ranks
    int64_t print_every = 0;
    // A resumed run validates with other sequences of the data than the run before, so that their losses do
    // not compare.
    bool validates_otherwise = false;
    // The settings that are not those of the resumed save, by name, as in "--lr 1e-4 (was 5e-5)".
    std::map<std::string, std::string> changed;
};

// How texts are continued or answered.
struct AnswerConfig {
    std::string prompt, prompts;  // prompts: a file
    bool chat = false, raw_prompt = false;
    int64_t sample_every = 0;
    int sample_tokens = 200;
    bool limits_answers =
        false;  // --sample tokens= was given: without it, answers of --chat have all positions
    Sampling sampling;
    std::vector<std::string> stops;  // texts at which an answer ends
};

// What the run, or its plan, runs on.
struct DeviceConfig {
    int devices = 1, machines = 1;
    double network = 0;  // bytes/s of a machine, each way; 0: nominal
    int patience = 600;  // seconds without a sign of life after which a rank is lost
    int threads = 0;
    std::string memory, host_memory;  // --memory; empty: what is free
    bool allow_8bit = false;          // --state-formats auto
    bool plan = false, json = false;
    std::string gpu;         // that --plan is for
    bool fills_gpu = false;  // `memory` is that of this GPU, because no --memory was given
    std::string bench;       // "step" or "forward"; empty: no bench
    int bench_warmup = 2, bench_steps = 10;
    bool profile_ops = false;
    std::string rates, calibrate;
    std::string attention = "auto", graph = "on", matmul_algorithms;
    bool tf32 = false;
};

// A run's configuration. A search for a setting makes a copy with() each that it tries.
struct RunConfig : MemorySetting, InputConfig, TrainingConfig, OutputConfig, AnswerConfig, DeviceConfig {
    Open open;
    // The settings that a save stores for a resumed run, by name and as words of a command line: those that
    // were given, and decisions that hold for a resume. Most are an option, "--lr"; an option with keys has
    // one for each key, "--offload.weights".
    std::map<std::string, std::vector<std::string>> settings;
    std::set<std::string> of_save;          // those that came from the resumed save,
    std::string directory;                  // and the folder that their relative names count from
    Rank rank = {};                         // this process among the ranks of --devices
    const KnownGpu* planned_gpu = nullptr;  // that of --gpu, whatever is in this machine; null without it

    RunConfig with(const MemorySetting& setting) const {
        RunConfig run = *this;
        static_cast<MemorySetting&>(run) = setting;
        return run;
    }
    // True if the run saves in --out. Of several ranks the first one writes, and the others send it what it
    // lacks.
    bool saves() const { return !out.empty() && !plan && bench.empty(); }
    // The micro-batches of a step that this rank computes.
    int own_micro_batches() const { return grad_accum / devices; }
    // True if each rank keeps only its slice of the optimizer's state (--zero 1 to 3), and not a copy of all.
    bool slices_state() const { return devices > 1 && zero != "0"; }
    // True if each rank also keeps only its slice of the gradients (--zero 2 and 3).
    bool slices_gradients() const {
        const bool asked = zero == "2" || (slices_weights() && !trains_adapter());
        return devices > 1 && asked && !update_in_backward;
    }
    // True if each rank also keeps only its slice of the blocks' weights (--zero 3): of a frozen model, of
    // the matrices of its blocks' linear layers. An adapter's gradients, which are small, stay whole there.
    bool slices_weights() const { return devices > 1 && zero == "3"; }
    // Where messages go: without training, stdout is for generated text.
    FILE* notes() const { return steps > 0 ? stdout : stderr; }
    // The number of micro-batches that go through the model together.
    int micro_batches_together() const { return by_block ? own_micro_batches() : 1; }
    // True if the run only answers: in a conversation, or a file of prompts.
    bool only_answers() const { return chat || !prompts.empty(); }
    bool trains_adapter() const { return train != "all" || !adapter.empty(); }
};

// True if blocks or their gradients are streamed to the device, or gathered from several.
inline bool streams_blocks_of(const RunConfig& o) {
    return o.weights != "device" || o.gradients != "device" || o.slices_weights();
}

// A setting as JSON; and the rest of a configuration, part by part.
nlohmann::json json_of_setting(const MemorySetting& setting);
nlohmann::json json_of_run(const RunConfig& run);
// What the first of several ranks has chosen, and how another one takes it: the setting, the length, and what
// a save remembers.
std::string choices_text(const RunConfig& run);
void take_choices(RunConfig& run, const std::string& text);
