// options.h - the command line: long options, their ranges, and which of them may not be combined.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "llmc/adapter.h"
#include "llmc/attention_input.h"
#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/recompute.h"
#include "llmc/state.h"

constexpr int64_t kMostTokens = 1 << 30;  // in a micro-batch

// The highest learning rate if none is given: for a new model, for a trained model (which the first rate
// would spoil), for a LoRA, and for a soft prompt.
constexpr double kNewRate = 1e-3, kFineTuningRate = 5e-5, kLoraRate = 2e-4, kPromptRate = 3e-3;

// True if the library for matrix products lets us choose its algorithms.
#if defined(SIMT_GPU)
constexpr bool kSearchesAlgorithms = true;
#else
constexpr bool kSearchesAlgorithms = false;
#endif

// True if that library has TF32 for this build's operands.
#if defined(SIMT_GPU) && !defined(LLMC_BF16)
constexpr bool kHasTf32 = true;
#else
constexpr bool kHasTf32 = false;
#endif

struct Options {
    std::string model = "d2";
    std::vector<std::string> data, val_data;
    std::string train = "all", adapter, merge, base, head, save_base;
    int lora_rank = 16;
    double lora_alpha = 32, lora_dropout = 0;
    std::vector<std::string> lora_targets = {"all"}, store;
    int soft_prompt = 20;
    double dropout = 0;
    std::string soft_prompt_text;
    std::string rope_scaling;
    int positions = 0;  // 0: the model's
    int batch = 8,      // 0: auto
        seq_len = 128, grad_accum = 1;
    std::string context;          // "auto", or empty
    bool chose_length = false;    // not an option: --context auto tries lengths, or has chosen one
    bool plans_examples = false;  // not an option: a plan without data is for examples that share sequences
    std::string loss_on = "completions", chat_format = "auto";
    int64_t steps = 1500;
    double lr = 0, min_lr = 0;  // lr: if not given, it depends on what is trained
    int64_t warmup = 30;
    std::string schedule = "cosine";
    double weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, clip = 1.0;
    uint64_t seed = 1337;
    bool clip_per_block = false;
    std::string optimizer = "adamw", master = "fp32", adam_m = "fp32", adam_v = "fp32";
    std::string weights = "device", embeddings = "device", gradients = "device", state = "device",
                updates = "device";
    int prefetch = 1;      // prefetch distance, in blocks
    int state_rooms = 32;  // chunks; -1: as many as a block has
    int park = 0;          // number of layers; -1: all
    bool park_keys = false;
    std::string recompute = "gelu";
    int64_t head_rows = -1, mlp_rows = 0, attention_rows = 0;  // 0: all, -1: auto
    bool update_in_backward = false, by_block = false;
    std::string memory, host_memory;
    bool allow_8bit = false;
    bool plan = false, json = false;
    std::string bench;  // "step" or "forward"; empty: no bench
    int bench_warmup = 2, bench_steps = 10;
    bool profile_ops = false;
    std::string timeline;
    std::string rates, calibrate;
    std::string log, loss_by_position;
    int64_t print_every = 0, eval_every = 0;
    int eval_batches = 8;
    int64_t sample_every = 0;
    int sample_tokens = 200;
    std::string prompt;
    double temperature = 0.8;
    int top_k = 50;
    std::string out;
    int64_t save_every = 0;
    int keep = 2;
    std::string resume;
    std::string attention = "auto";
    int threads = 0;
    std::string graph = "on";
    std::string matmul_algorithms;
    bool tf32 = false;

    // The options given on the command line, by name and as they were written. A save stores them for a
    // resumed run.
    std::map<std::string, std::vector<std::string>> given;
    std::set<std::string> saved;  // those of them that came from the resumed save,
    std::string directory;        // and the folder that their relative names count from
    bool any_base = false;        // --base none: use the model as it is, whatever its adapter's base was
    bool has(const std::string& name) const { return given.count(name) > 0; }
    const char* first(const std::string& name) const { return given.at(name).at(0).c_str(); }
    // True if the run saves in --out.
    bool saves() const { return !out.empty() && !plan && bench.empty(); }
    // The number of micro-batches that go through the model together.
    int micro_batches_together() const { return by_block ? grad_accum : 1; }
    bool trains_adapter() const { return train != "all" || !adapter.empty(); }
};

// The options of a save, by name: as they were written, and with relative names that are valid here.
struct SavedOptions {
    nlohmann::json written, here;
    std::string directory;  // the folder that the written names count from
};

// Accepts a number from low to high; unlike CLI::Range, it refuses "nan".
inline CLI::Validator between(double low, double high) {
    return CLI::Validator(
        [=](const std::string& text) -> std::string {
            char* end = nullptr;
            const double value = strtod(text.c_str(), &end);
            const bool octal = text.size() > 1 && text[0] == '0' && isdigit(text[1]);  // to CLI11
            if (octal) return text + " begins with a zero";
            if (!text.empty() && *end == '\0' && value >= low && value <= high) return "";
            return format("%s is not a number from %g to %g", text.c_str(), low, high);
        },
        "");
}

// Accepts a whole number from low to high. It may have an exponent: 1e3, 1.5e4.
inline CLI::Validator whole(double low, double high) {
    return CLI::Validator(
        [=](std::string& text) -> std::string {
            const std::string wrong = between(low, high)(text);
            if (!wrong.empty() || text.find_first_of("eE") == text.npos) return wrong;
            const double value = strtod(text.c_str(), nullptr);
            if (value != std::floor(value) || value > 0x1p53) return text + " is not a whole number";
            text = format("%.0f", value);
            return "";
        },
        "");
}

// Accepts a whole number from low to high, or the word `word`, which it replaces by `meant`.
inline CLI::Validator whole_or(const char* word, const char* meant, double low, double high) {
    return CLI::Validator(
        [=](std::string& text) -> std::string {
            if (text != word) return whole(low, high)(text);
            text = meant;
            return "";
        },
        "");
}
inline CLI::Validator whole_or_auto(double low, double high, const char* automatic = "0") {
    return whole_or("auto", automatic, low, high);
}

// Accepts one of the names.
template <size_t count>
CLI::IsMember one_of(const char* const (&names)[count]) {
    return CLI::IsMember(std::vector<std::string>(std::begin(names), std::end(names)));
}

constexpr int kMostCount = 1 << 30;  // of tokens, sequences, saves

inline void declare_model_options(CLI::App& app, Options& o) {
    const std::string group = "Model and data";
    app.add_option(
           "--model", o.model,
           "a Hugging Face folder, or an adapter's, beside the model that it names; or dN: a new GPT-2 of N "
           "layers, llama:dN, qwen3:dN, ...")
        ->group(group);
    app.add_option("--data", o.data,
                   "texts, examples in JSON lines or a JSON list, or token shards (.bin); globs")
        ->group(group);
    app.add_option("--val-data", o.val_data,
                   "the same for validation; else the last tenth of texts and examples")
        ->group(group);
    app.add_option("--loss-on", o.loss_on, "of JSON lines: completions and what assistants say, or all")
        ->check(CLI::IsMember({"completions", "all"}))
        ->group(group);
    app.add_option("--chat-format", o.chat_format, "of messages; auto: that of the model's folder")
        ->check(CLI::IsMember({"auto", "chatml", "llama3", "mistral", "llama2", "zephyr"}))
        ->group(group);
    app.add_option("--batch", o.batch,
                   "sequences in a micro-batch; auto: the most that fit --memory or "
                   "95% of what is free, but no more than 64 Ki tokens or a tenth of the data")
        ->transform(whole_or_auto(1, kMostCount))
        ->group(group);
    app.add_option("--seq-len", o.seq_len, "tokens in a sequence")
        ->transform(whole(1, kMostPositions))
        ->group(group);
    app.add_option("--context", o.context,
                   "auto: the longest --seq-len that fits --memory or 95% of what is free, with --batch 1 "
                   "where none is given")
        ->check(CLI::IsMember({"auto"}))
        ->group(group);
    app.add_option(
           "--rope-scaling", o.rope_scaling,
           "beyond a model's rotary positions: yarn:4 for sequences four times as long as it was trained "
           "on; or dynamic, linear, llama3; in place of a scaling that it has")
        ->group(group);
    app.add_option(
           "--positions", o.positions,
           "learned positions that GPT-2's grow to, the trained ones stretched over them; else its own")
        ->transform(whole(1, kMostPositions))
        ->group(group);
    app.add_option("--grad-accum", o.grad_accum, "micro-batches in a step")
        ->transform(whole(1, kMostCount))
        ->group(group);
    app.add_option("--seed", o.seed, "of initial weights, data order and samples")
        ->transform(whole(0, 0x1.fffffffffffffp63))  // the last number below 2^64 that a double has
        ->group(group);
}
inline void declare_adapter_options(CLI::App& app, Options& o) {
    const std::string group = "Adapters";
    app.add_option("--train", o.train,
                   "all weights; or, beside a frozen model, lora: matrices at its linear layers, "
                   "prompt: vectors before each sequence")
        ->check(one_of(kTrainedNames))
        ->group(group);
    app.add_option(
           "--base", o.base,
           "quantize the linear layers of a model that is not trained: nf4, or nf4-double; none: leave it "
           "as it is, whatever its adapter was trained beside")
        ->check(CLI::IsMember({"nf4", "nf4-double", "none"}))
        ->group(group);
    app.add_option(
           "--store", o.store,
           "formats that such a model's matrices are kept in, and widened from, as in "
           "mlp=bf16,attention=fp32: of all, attention, mlp or names as in the model's files; fp32, bf16, "
           "8bit, nf4 or nf4-double")
        ->delimiter(',')
        ->group(group);
    app.add_option("--head", o.head,
                   "quantize the output matrix of such a model too, with the token embedding where they are "
                   "tied: nf4 (double but with --base nf4), or 8bit")
        ->check(CLI::IsMember({"nf4", "8bit"}))
        ->group(group);
    app.add_option("--lora-rank", o.lora_rank, "columns of each adapter")
        ->transform(whole(1, kMostChannels))
        ->group(group);
    app.add_option("--lora-alpha", o.lora_alpha, "adapters count alpha / rank times")
        ->check(between(1e-6, 1e6))
        ->group(group);
    app.add_option("--lora-targets", o.lora_targets,
                   "linear layers that have one: names as in the model's files, attention, mlp, or all")
        ->delimiter(',')
        ->group(group);
    app.add_option("--lora-dropout", o.lora_dropout,
                   "share of an adapter's inputs that is dropped in training")
        ->check(between(0.0, 0.99))
        ->group(group);
    app.add_option("--soft-prompt", o.soft_prompt,
                   "vectors of a soft prompt; else as many as its text has tokens")
        ->transform(whole(1, kMostPositions))
        ->group(group);
    app.add_option("--soft-prompt-text", o.soft_prompt_text,
                   "what a soft prompt begins as; else random tokens")
        ->group(group);
    app.add_option("--adapter", o.adapter, "begin with an adapter that PEFT or a run has saved")
        ->group(group);
    app.add_option("--merge", o.merge, "at the end, save the model with the adapter in its weights")
        ->group(group);
    app.add_option("--save-base", o.save_base,
                   "before training, save a base in NF4 as bitsandbytes does; the adapter then names it")
        ->group(group);
}
inline void declare_optimizer_options(CLI::App& app, Options& o) {
    const std::string group = "Optimizer";
    app.add_option("--steps", o.steps, "updates in all; 0, as with --prompt and no data, only generates")
        ->transform(whole(0, 1e12))
        ->group(group);
    app.add_option("--lr", o.lr, "the highest learning rate")
        ->check(between(0.0, 1e3))
        ->default_str(format("%g for dN, %g for a folder, %g for LoRA, %g for a soft prompt", kNewRate,
                             kFineTuningRate, kLoraRate, kPromptRate))
        ->group(group);
    app.add_option("--min-lr", o.min_lr, "the rate at the end")->check(between(0.0, 1e3))->group(group);
    app.add_option("--warmup", o.warmup, "steps of rising rate")->transform(whole(0, 1e12))->group(group);
    app.add_option("--schedule", o.schedule, "after the warm-up")
        ->check(CLI::IsMember({"constant", "cosine", "linear", "wsd"}))
        ->group(group);
    app.add_option("--weight-decay", o.weight_decay, "of matrices")->check(between(0.0, 1e3))->group(group);
    app.add_option("--beta1", o.beta1, "AdamW's")->check(between(0.0, 0.999999))->group(group);
    app.add_option("--beta2", o.beta2, "AdamW's")->check(between(0.0, 0.9999999))->group(group);
    app.add_option("--eps", o.eps, "AdamW's")->check(between(1e-20, 1.0))->group(group);
    app.add_option("--clip", o.clip, "the gradient's largest norm; 0: any")
        ->check(between(0.0, 1e30))
        ->group(group);
    app.add_option("--optimizer", o.optimizer, "sgd: without momentum, and without state")
        ->check(one_of(kOptimizerNames))
        ->group(group);
    app.add_option(
           "--dropout", o.dropout,
           "share of activations that is dropped in training, of GPT-2 and BLOOM, as transformers does")
        ->check(between(0.0, 0.99))
        ->group(group);
    app.add_flag("--clip-per-block", o.clip_per_block, "clip each block's gradient by its own norm")
        ->group(group);
}
// Options for what a step keeps and in which formats, what is placed outside the device, and what is planned
// and chosen of that.
inline void declare_memory_options(CLI::App& app, Options& o) {
    const std::string group = "Memory";
    app.add_option("--master", o.master, "what completes bf16 weights; split: the same in half the bytes")
        ->check(one_of(kMasterNames))
        ->group(group);
    app.add_option("--adam-m", o.adam_m, "how AdamW's first moments are kept")
        ->check(one_of(kMomentNames))
        ->group(group);
    app.add_option("--adam-v", o.adam_v, "the same of its second moments")
        ->check(one_of(kMomentNames))
        ->group(group);
    app.add_option("--recompute", o.recompute,
                   "what backward makes again: " + joined(recompute_names(), ", ") +
                       "; or by layers, as in block:4,norm:8")
        ->group(group);
    app.add_option("--head-rows", o.head_rows,
                   "rows of the batch with logits at a time; 0: all; auto: few, for at most 2% of a step")
        ->transform(whole_or_auto(0, kMostCount, "-1"))
        ->default_str("auto")
        ->group(group);
    app.add_option(
           "--mlp-rows", o.mlp_rows,
           "rows of the batch in an MLP at a time, of which nothing is kept; 0: all; auto: few, for at "
           "most 2% of a step")
        ->transform(whole_or_auto(0, kMostCount, "-1"))
        ->group(group);
    app.add_option("--attention-rows", o.attention_rows,
                   "queries of a sequence in attention at a time, in a validation and in blocks at level "
                   "block, whose "
                   "gradients then differ in last bits; 0: all; auto: few, for at most 2% of a step")
        ->transform(whole_or_auto(0, kMostCount, "-1"))
        ->group(group);
    app.add_flag("--update-in-backward", o.update_in_backward,
                 "update each block as soon as its gradient is complete: no gradient of the model is held")
        ->group(group);
}
inline void declare_elsewhere_options(CLI::App& app, Options& o) {
    const std::string group = "Memory";
    app.add_flag("--by-block", o.by_block,
                 "all micro-batches of a step pass a block before the next: it comes, and is updated, once")
        ->group(group);
    app.add_option(
           "--weights", o.weights,
           "where blocks live: each comes to the device when it is used; a frozen model's straight out of "
           "its files, others from a file of the run's own")
        ->check(one_of(kHomeNames))
        ->group(group);
    app.add_option(
           "--prefetch", o.prefetch,
           "blocks that come while another is used: each takes a room on the device beside that one's; with "
           "0 computing waits for each")
        ->check(CLI::Range(0, kMostLayers))
        ->group(group);
    app.add_option(
           "--embeddings", o.embeddings,
           "where a frozen model's token embedding and head live: of one the rows of a batch come to the "
           "device, the other in slices")
        ->check(one_of(kHomeNames))
        ->group(group);
    app.add_option("--gradients", o.gradients,
                   "where the blocks' gradients live: they come to the device to be added to, and to update")
        ->check(one_of(kHomeNames))
        ->group(group);
    app.add_option("--state", o.state,
                   "where the optimizer's moments and the master live: they come to the device to be updated")
        ->check(one_of(kHomeNames))
        ->group(group);
    app.add_option("--updates", o.updates,
                   "beside a GPU, where a state in host memory or on the disk is updated: on the device, to "
                   "which it comes and from which it goes, or on the host's cores, to which gradients go")
        ->check(CLI::IsMember({"device", "host"}))
        ->group(group);
    app.add_option(
           "--state-rooms", o.state_rooms,
           "chunks of it that are on the device at a time, some 3 MB each; block: as many as a block has, "
           "which come while that is computed")
        ->transform(whole_or("block", "-1", 1, kMostCount))
        ->default_str("32")
        ->group(group);
    app.add_option("--park", o.park,
                   std::string("layers whose inputs wait for backward ") +
                       (kHostIsDevice ? "in a file" : "in host memory") + ", or all")
        ->transform(whole_or("all", "-1", 0, kMostLayers))
        ->group(group);
    app.add_flag("--park-keys", o.park_keys,
                 "with --attention-rows, keys and values of the rows before those at hand wait where parked "
                 "inputs do, and so do the sums of their gradients; with windows, and documents that share a "
                 "sequence, last bits differ")
        ->group(group);
}
inline void declare_plan_options(CLI::App& app, Options& o) {
    const std::string group = "Memory";
    app.add_option("--memory", o.memory,
                   "choose --recompute, --head-rows, --mlp-rows, --attention-rows, --batch and --grad-accum "
                   "so that all fits, as in 8GiB; and where that is not enough --weights, "
                   "--prefetch, --embeddings, --gradients, --state, --updates, --state-rooms, --park, "
                   "--park-keys and --by-block")
        ->group(group);
    app.add_option("--host-memory", o.host_memory,
                   "beside a GPU, pinned host memory that --memory may have things wait in")
        ->group(group);
    app.add_flag("--allow-8bit", o.allow_8bit,
                 "--memory may also choose --master split and 8-bit moments, where that is faster")
        ->group(group);
    app.add_flag("--plan", o.plan, "print what every buffer takes, and stop")->group(group);
    app.add_flag("--json", o.json, "the plan, or the bench's figures, as JSON")->group(group);
    app.add_option("--rates", o.rates,
                   "a file of --calibrate: plan, and choose, by what this device was measured to do")
        ->group(group);
    app.add_option("--calibrate", o.calibrate,
                   "measure how fast the device does each kind of operation, into a file, and stop")
        ->group(group);
    app.add_option("--timeline", o.timeline,
                   "a file for the bytes that live after each operation of a step, and what moves")
        ->group(group);
}
inline void declare_run_options(CLI::App& app, Options& o) {
    const std::string group = "Run";
    app.add_option("--log", o.log, "a file of JSON lines, one a step")->group(group);
    app.add_option("--loss-by-position", o.loss_by_position,
                   "a file of JSON lines, one a validation: the loss by the length of its context")
        ->group(group);
    app.add_option("--print-every", o.print_every, "steps between printed lines; 0: a line a second")
        ->transform(whole(0, 1e12))
        ->group(group);
    app.add_option("--eval-every", o.eval_every, "steps between validations; 0: at the end")
        ->transform(whole(0, 1e12))
        ->group(group);
    app.add_option("--eval-batches", o.eval_batches, "steps whose sequences make one")
        ->transform(whole(1, kMostCount))
        ->group(group);
    app.add_option("--attention", o.attention,
                   "kernels; auto: hopper, which are for compute capability 9.0, where they can")
        ->check(CLI::IsMember({"auto", "common", "hopper"}))
        ->group(group);
    app.add_option("--threads", o.threads, "CPU threads; 0: all")->transform(whole(0, 4096))->group(group);
    app.add_option("--graph", o.graph, "replay each step as CUDA graphs; only a GPU has them")
        ->check(CLI::IsMember({"on", "off"}))
        ->group(group);
    app.add_option("--matmul-algorithms", o.matmul_algorithms,
                   "on a GPU, a file of each product's fastest; what it lacks is measured and added")
        ->group(group);
    app.add_flag(
           "--tf32", o.tf32,
           "in fp32 on a GPU, products on tensor cores: of operands rounded to 10 bits behind the point")
        ->group(group);
}
inline void declare_bench_options(CLI::App& app, Options& o) {
    const std::string group = "Bench";
    app.add_option("--bench", o.bench, "measure training steps, or the forward alone; nothing is kept")
        ->expected(0, 1)
        ->default_str("step")
        ->check(CLI::IsMember({"step", "forward"}))
        ->group(group);
    app.add_option("--bench-warmup", o.bench_warmup, "steps before those that count, after a cold one")
        ->transform(whole(0, 1e6))
        ->group(group);
    app.add_option("--bench-steps", o.bench_steps, "steps that count")
        ->transform(whole(1, 1e6))
        ->group(group);
    app.add_flag("--profile-ops", o.profile_ops, "measure each operation too; implies --bench")->group(group);
}
inline void declare_sampling_options(CLI::App& app, Options& o) {
    const std::string group = "Sampling";
    app.add_option("--sample-every", o.sample_every, "steps between samples; 0: at the end")
        ->transform(whole(0, 1e12))
        ->group(group);
    app.add_option("--sample-tokens", o.sample_tokens, "tokens to sample; 0: none")
        ->transform(whole(0, kMostCount))
        ->group(group);
    app.add_option("--prompt", o.prompt, "what a sample starts with")->group(group);
    app.add_option("--temperature", o.temperature, "0: always the likeliest")
        ->check(between(0.0, 1e3))
        ->group(group);
    app.add_option("--top-k", o.top_k, "sample among the K likeliest; 0: all")
        ->transform(whole(0, kMostCount))
        ->group(group);
}
inline void declare_saving_options(CLI::App& app, Options& o) {
    const std::string group = "Saving";
    app.add_option("--out", o.out, "a folder for saves, in Hugging Face's format")->group(group);
    app.add_option("--save-every", o.save_every, "steps between saves; 0: at the end")
        ->transform(whole(0, 1e12))
        ->group(group);
    app.add_option(
           "--keep", o.keep,
           "saves to keep, beside the last good one, before which the loss was not far above the first and "
           "the gradient not zero; 0: all")
        ->transform(whole(0, kMostCount))
        ->group(group);
    app.add_option("--resume", o.resume,
                   "go on from a save; its options hold unless given; auto: from the one in --out, or begin "
                   "where there "
                   "is none")
        ->group(group);
}

// Declares every option on the parser, bound to `o`.
inline void declare_options(CLI::App& app, Options& o) {
    declare_model_options(app, o);
    declare_adapter_options(app, o);
    declare_optimizer_options(app, o);
    declare_memory_options(app, o);
    declare_elsewhere_options(app, o);
    declare_plan_options(app, o);
    declare_run_options(app, o);
    declare_bench_options(app, o);
    declare_sampling_options(app, o);
    declare_saving_options(app, o);
}

// A bench only measures a run and does not make it: fails on options that only a real run needs.
inline void check_bench_options(const Options& o) {
    if (o.bench.empty()) {
        if (o.has("--bench")) fail("--bench '': step or forward");
        for (const char* name : {"--bench-warmup", "--bench-steps"})
            if (o.has(name)) fail("%s %s is of a measurement: add --bench", name, o.first(name));
        return;
    }
    for (const char* name :
         {"--plan", "--timeline", "--resume", "--out", "--save-base", "--save-every", "--log",
          "--loss-by-position", "--val-data", "--print-every", "--eval-every", "--sample-every", "--prompt"})
        if (o.has(name)) fail("%s %s: a bench only measures; leave it out, or --bench", name, o.first(name));
    if (o.has("--steps")) fail("--steps %s is of a training; a bench has --bench-steps", o.first("--steps"));
    if (o.bench == "forward" && o.has("--memory"))
        fail("--memory %s chooses for training, and --bench forward does none", o.memory.c_str());
}

// A calibration measures the device, independent of any training: fails on options for more than that.
inline void check_calibration(const Options& o) {
    if (o.calibrate.empty()) return;
    for (const auto& [name, values] : o.given)
        if (name != "--calibrate" && name != "--threads")
            fail("--calibrate %s measures the device and stops: leave %s out", o.calibrate.c_str(),
                 name.c_str());
}

// Fails on options of adapters that this run does not use.
inline void check_adapter_options(const Options& o) {
    for (const char* name : {"--lora-rank", "--lora-alpha", "--lora-targets", "--lora-dropout"}) {
        if (!o.has(name)) continue;
        if (o.train != "lora") fail("%s %s is of an adapter: add --train lora", name, o.first(name));
        if (!o.adapter.empty() && name != std::string("--lora-dropout"))
            fail("%s %s: --adapter %s has its own", name, o.first(name), o.adapter.c_str());
    }
    for (const char* name : {"--soft-prompt", "--soft-prompt-text"}) {
        if (!o.has(name)) continue;
        if (o.train != "prompt") fail("%s %s: add --train prompt", name, o.first(name));
        if (!o.adapter.empty())
            fail("%s %s: --adapter %s has its own", name, o.first(name), o.adapter.c_str());
    }
    if (o.has("--adapter") && !o.resume.empty() && !o.saved.contains("--adapter"))
        fail("--adapter %s: --resume %s goes on with its own", o.adapter.c_str(), o.resume.c_str());
    if (!o.merge.empty() && !o.trains_adapter() && o.resume.empty())
        fail("--merge %s: there is no adapter to merge; give --train lora or --adapter", o.merge.c_str());
    if (o.trains_adapter() && parse_new_model(o.model) && o.bench.empty())
        fail("--model %s: is a new one, and an adapter belongs to a trained model: give its folder",
             o.model.c_str());
}

// Fails if --context auto has nothing to choose, or is combined with options that it would choose.
inline void check_context(const Options& o) {
    if (o.context.empty()) return;
    if (!o.resume.empty())
        fail("--context auto: --resume %s goes on with its own --seq-len", o.resume.c_str());
    const char* const with = o.has("--seq-len") ? "--seq-len" : o.batch == 0 ? "--batch" : nullptr;
    if (with) fail("--context auto: chooses the length by itself: leave %s %s out", with, o.first(with));
    if (o.steps == 0 || o.bench == "forward")
        fail("--context auto is a training's; for a validation alone give --seq-len");
    if (parse_new_model(o.model))
        fail(
            "--context auto: is for a model that was trained; a new one, --model %s, has the positions of "
            "its --seq-len",
            o.model.c_str());
}

// Fails if --host-memory is given and nothing could be chosen with it.
inline void check_host_memory(const Options& o) {
    if (!o.has("--host-memory")) return;
    const char* const size = o.host_memory.c_str();
    if (kHostIsDevice)
        fail("--host-memory %s is beside a GPU; on a CPU the host's memory is what --memory counts", size);
    if (!o.has("--memory")) fail("--host-memory %s is for --memory to choose by: what may wait there", size);
    if (o.batch == 0)
        fail("--host-memory %s: --batch auto leaves everything where it is; give a number", size);
}

// Fails if options that are valid by themselves cannot be combined.
inline void check_options(const Options& o) {
    check_adapter_options(o);
    check_context(o);
    for (const char* name :
         {"--out", "--resume", "--log", "--timeline", "--matmul-algorithms", "--adapter", "--merge",
          "--save-base", "--rope-scaling", "--loss-by-position", "--rates", "--calibrate"})
        if (o.has(name) && !*o.first(name))
            fail("%s is empty where the name of a file or folder is needed", name);
    check_bench_options(o);
    check_calibration(o);
    if (o.mlp_rows > 0 && o.mlp_rows % 8)
        fail("--mlp-rows %lld: a multiple of 8 is needed, 0 or auto", static_cast<long long>(o.mlp_rows));
    if (o.attention_rows > 0 && o.attention_rows % 128)
        fail("--attention-rows %lld: a multiple of 128 is needed, 0 or auto",
             static_cast<long long>(o.attention_rows));
    const bool chose_no_rows = o.saved.contains("--attention-rows");  // by auto, because sequences are short
    if (o.park_keys && o.attention_rows == 0 && !chose_no_rows)
        fail("--park-keys needs --attention-rows, as keys are parked in pieces of so many rows");
    if (o.park_keys && o.attention_rows > 0 && o.attention_rows % kKeyPiece)
        fail(
            "--attention-rows %lld: keys are parked in pieces of as many rows, which must be a multiple of "
            "%d",
            static_cast<long long>(o.attention_rows), kKeyPiece);
    if (o.has("--matmul-algorithms") && !kSearchesAlgorithms)
        fail("--matmul-algorithms %s is for cuBLASLt on a GPU; on the CPU oneDNN chooses for itself",
             o.matmul_algorithms.c_str());
    if (o.tf32 && !kHasTf32)
        fail("--tf32 is for products of fp32 operands on a GPU, and this build is %s",
             kSearchesAlgorithms ? "in bf16: make PRECISION=fp32"
                                 : "for the CPU: make DEVICE=cuda PRECISION=fp32");
    if (o.json && !o.plan && o.bench.empty())
        fail("--json is the format of --plan and --bench; for a training's figures use --log FILE");
    for (const char* moments : {"--adam-m", "--adam-v"})
        if (o.optimizer == "sgd" && o.has(moments))
            fail("%s is AdamW's, and --optimizer sgd keeps no moments", moments);
    if (!o.timeline.empty() && o.steps == 0)
        fail("--timeline %s is of a training step, and --steps 0 has none", o.timeline.c_str());
    if (o.min_lr > o.lr) fail("--min-lr %g is above --lr %g", o.min_lr, o.lr);
    if (o.save_every > 0 && o.out.empty())
        fail("--save-every %lld needs --out DIR", static_cast<long long>(o.save_every));
    if (o.has("--memory") && o.batch != 0 && o.has("--recompute"))
        fail("--memory %s chooses what to recompute itself: leave --recompute %s out", o.memory.c_str(),
             o.recompute.c_str());
    if (o.has("--memory") && o.park > 0)
        fail("--memory %s: chooses among blocks that are alike: --park all, or 0", o.memory.c_str());
    check_host_memory(o);
    if (o.update_in_backward && o.grad_accum > 1 && !o.by_block)
        fail(
            "--update-in-backward consumes gradients at once: with --grad-accum %d it needs --by-block, so "
            "that "
            "a block's are complete",
            o.grad_accum);
    if (o.update_in_backward && o.clip > 0 && !o.clip_per_block)
        fail(
            "--update-in-backward updates blocks before the gradient's norm is known: add --clip-per-block, "
            "or give --clip 0 instead of %g",
            o.clip);
    if (!o.val_data.empty() && o.data.empty() && o.steps > 0)
        fail("--val-data needs --data, or --steps 0: to validate the model as it is");
    if (!o.val_data.empty() && o.batch == 0 && o.steps == 0)
        fail("--batch auto is a training's; for a validation alone give a number");
    if (o.allow_8bit && !o.resume.empty())
        fail("--allow-8bit: a resumed run keeps the formats of --resume %s", o.resume.c_str());
    if (o.allow_8bit && !o.has("--memory"))
        fail("--allow-8bit is for --memory to choose by; for 8-bit moments use --adam-m 8bit --adam-v 8bit");
    if (o.has("--memory") && o.steps == 0)
        fail("--memory %s: there is nothing to choose without training, --steps 0", o.memory.c_str());
    if (int64_t{o.batch} * o.seq_len > kMostTokens)
        fail("--batch %d x --seq-len %d: more than 2^30 tokens in a micro-batch; use --grad-accum", o.batch,
             o.seq_len);
}

// The placements that --memory chooses, besides rows, levels and micro-batches: each option, and its value as
// on a command line. The value of a flag is "true" if it is given, else "false".
struct ChosenResidence {
    const char* option;
    std::string (*value)(const Options&);
};
inline const ChosenResidence kChosenResidences[] = {
    {"--weights", [](const Options& o) { return o.weights; }},
    {"--prefetch", [](const Options& o) { return std::to_string(o.prefetch); }},
    {"--embeddings", [](const Options& o) { return o.embeddings; }},
    {"--gradients", [](const Options& o) { return o.gradients; }},
    {"--state", [](const Options& o) { return o.state; }},
    {"--updates", [](const Options& o) { return o.updates; }},
    {"--state-rooms",
     [](const Options& o) { return o.state_rooms < 0 ? "block" : std::to_string(o.state_rooms); }},
    {"--park", [](const Options& o) { return o.park < 0 ? "all" : std::to_string(o.park); }},
    {"--park-keys", [](const Options& o) { return std::string(o.park_keys ? "true" : "false"); }},
    {"--by-block", [](const Options& o) { return std::string(o.by_block ? "true" : "false"); }},
};

// True if --memory chooses this option again in a resumed run, whatever the save says. Not among them: the
// formats of the state, which stay, and the micro-batches, whose number of sequences stays.
inline bool is_chosen_anew(const std::string& name) {
    for (const char* chosen : {"--recompute", "--head-rows", "--mlp-rows", "--attention-rows"})
        if (name == chosen) return true;
    return std::ranges::any_of(kChosenResidences, [&](const ChosenResidence& r) { return name == r.option; });
}

// True if blocks or their gradients are streamed to the device.
inline bool lends_blocks(const Options& o) { return o.weights != "device" || o.gradients != "device"; }

// True if an option of a save also holds in a run that resumes from it. `o` has the command line's options,
// and `name` is not among these.
inline bool holds_in_a_resume(const std::string& name, const nlohmann::json& values, const Options& o) {
    const auto among = [&](std::initializer_list<const char*> names) {
        return std::find(names.begin(), names.end(), name) != names.end();
    };
    if (among({"--resume", "--timeline", "--save-base"})) return false;  // the adapter names its base
    if (among({"--rates"})) return false;                                // of the first run's machine
    if (among({"--matmul-algorithms"})) return kSearchesAlgorithms;
    if (among({"--tf32"})) return kHasTf32;
    if (is_chosen_anew(name) && o.has("--memory") && o.batch != 0) return false;
    if (among({"--weights", "--embeddings"}) && o.steps == 0)
        return o.trains_adapter();  // otherwise the save has the weights
    // A run that only generates needs no data, and must not touch the training's outputs.
    if (among({"--data", "--val-data", "--loss-on", "--chat-format", "--log", "--loss-by-position", "--out",
               "--save-every", "--merge"}))
        return o.steps > 0;
    // A prompt asks for a sample.
    if (among({"--sample-tokens"})) return !o.has("--prompt") || values != nlohmann::json::array({"0"});
    return true;
}

// For --resume auto: resumes from the save in --out if there is one, else starts a new run. The command is
// the same each time, so what it chose when the run began is not chosen again.
inline void resume_what_is_there(Options& o) {
    if (o.out.empty()) fail("--resume auto is for the save in --out: give --out DIR");
    o.resume = file_exists(o.out + "/latest/trainer_state.json") ? o.out : "";
    if (!o.resume.empty()) o.allow_8bit = false;
}

// True if a run generates without training, because it has a model and a prompt but no data.
inline bool only_generates(const Options& o) {
    return o.has("--prompt") && o.data.empty() && !o.has("--steps") && !parse_new_model(o.model) && !o.plan &&
           o.bench.empty();
}

// If --model is an adapter's folder, replaces it by the model that the adapter belongs to and makes the
// folder the value of --adapter. Unless options say otherwise, the model is quantized as it was when the
// adapter was trained.
inline void open_adapter_as_model(Options& o) {
    const std::string folder = o.model;
    if (parse_new_model(folder) || !is_adapter_folder(resolve_save(folder))) return;
    if (!o.adapter.empty())
        fail("--model %s: is an adapter, and so is --adapter %s: give the model that they are of as --model",
             folder.c_str(), o.adapter.c_str());
    o.model = find_adapter_model(folder), o.adapter = folder;
    o.given["--model"] = {o.model}, o.given["--adapter"] = {o.adapter};
    const std::optional<AdapterBase> base = read_adapter_base(resolve_save(folder));
    const bool says_how = o.has("--base") || o.has("--store") || o.has("--head");
    if (says_how || !base || is_quantized_model(o.model) || !base->has_options()) return;
    if (base->is_nf4()) {
        o.base = base->linear_layers.at("all");
        o.given["--base"] = {o.base};
    } else if (!base->linear_layers.empty()) {
        for (const auto& [layers, format] : base->linear_layers) o.store.push_back(layers + "=" + format);
        o.given["--store"] = o.store;
    }
    if (base->head.empty()) return;
    o.head = base->head_option();
    o.given["--head"] = {o.head};
}

// Reads the command line. For a resumed run, saved(save) returns that save's SavedOptions; those that were
// not given are taken from there. Prints the help and exits if asked to. Fails on mistakes.
template <class Saved>
Options parse_options(int argc, char** argv, Saved&& saved) {
    Options o;
    CLI::App app("Trains a GPT in the memory you have, and says beforehand what it takes.");
    app.get_formatter()->column_width(28);
    app.set_help_flag("-h,--help", "this list");
    app.footer(
        "Exit code: 0 done; 2 a mistake, which one line names; 1 a bug; 128 + N stopped by signal N (Ctrl-C: "
        "130, SIGTERM: 143).\n"
        "Signals: SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGPIPE stop the run after the current micro-batch, "
        "and "
        "it saves where there is --out; a second Ctrl-C stops it at once, without saving. SIGUSR1, as from "
        "Slurm's --signal=USR1@120, saves in --out and goes on. Those that were ignored from the start "
        "(nohup) "
        "stay ignored.");
    app.option_defaults()->always_capture_default();
    declare_options(app, o);
    for (CLI::Option* option : app.get_options()) option->trigger_on_parse();  // given twice, the last counts
    auto given = [&] {
        for (const CLI::Option* option : app.get_options())
            if (option->count() > 0 && option->get_name() != "--help")
                o.given[option->get_name()] = option->results();
        for (const auto& [option, word] : {std::pair{"--park", "all"}, std::pair{"--state-rooms", "block"}})
            if (o.has(option) && o.given[option][0] == "-1") o.given[option] = {word};
    };
    try {
        app.parse(argc, argv);
        given();
        const bool automatic = o.resume == "auto";
        if (automatic) resume_what_is_there(o);
        if (!o.resume.empty()) {
            const SavedOptions before = saved(o.resume);
            o.directory = before.directory;
            for (CLI::Option* option : app.get_options()) {
                const std::string name = option->get_name();
                const auto it = before.here.find(name);
                if (it == before.here.end() || !holds_in_a_resume(name, *it, o)) continue;
                const bool found =
                    automatic && !o.has("--memory") &&
                    ((name == "--batch" && o.batch == 0) || (name == "--head-rows" && o.head_rows < 0) ||
                     (name == "--mlp-rows" && o.mlp_rows < 0) ||
                     (name == "--attention-rows" && o.attention_rows < 0));
                if (option->count() > 0 && !found) continue;
                if (found) option->clear();
                o.saved.insert(name);
                try {
                    option->add_result(it->get<std::vector<std::string>>());
                } catch (const nlohmann::json::exception&) {
                    fail("--resume %s: its %s is no list of texts", o.resume.c_str(), it.key().c_str());
                }
                option->run_callback();
            }
            given();
            for (const std::string& name : o.saved)
                o.given[name] = before.written[name].get<std::vector<std::string>>();
            // With --context auto, a resumed run keeps the length that was chosen when it began.
            if (automatic) o.context.clear(), o.given.erase("--context");
        }
    } catch (const CLI::CallForHelp&) {
        printf("%s", app.help().c_str());
        exit(0);
    } catch (const CLI::ParseError& e) {
        std::string line = e.what();
        for (char& c : line)
            if (c == '\n') c = ' ';
        fail("%s (--help lists the options)", line.c_str());
    }
    open_adapter_as_model(o);
    o.any_base = o.base == "none";
    if (o.any_base) o.base.clear();
    if (!o.has("--lr"))
        o.lr = o.train == "prompt"        ? kPromptRate
               : o.trains_adapter()       ? kLoraRate
               : parse_new_model(o.model) ? kNewRate
                                          : kFineTuningRate;
    if (o.profile_ops && !o.has("--bench")) o.bench = "step";
    if (only_generates(o)) o.steps = 0, o.given["--steps"] = {"0"};
    check_options(o);
    if (!o.bench.empty()) {
        o.steps = o.bench == "forward" ? 0 : 1 + int64_t{o.bench_warmup} + o.bench_steps;
        o.sample_tokens = 0;
    }
    return o;
}
