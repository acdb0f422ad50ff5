// options_declare.h - declares the options, group by group: name, field, range, help and default. The names
// with a dot are the keys of the option before the dot (options_words.h).
#pragma once

#include <CLI/CLI.hpp>
#include <cmath>
#include <ctime>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "llmc/options.h"
#include "llmc/options_placement.h"
#include "llmc/recompute.h"
#include "llmc/step_plan.h"
#include "llmc/text.h"

// The highest learning rate if none is given: for a new model, for a trained model (which the first rate
// would spoil), for a LoRA, and for a soft prompt.
constexpr double kNewRate = 1e-3, kFineTuningRate = 5e-5, kLoraRate = 2e-4, kPromptRate = 3e-3;

constexpr int kMostCount = 1 << 30;  // of tokens, sequences, saves

// A number for messages; a whole one has all its digits.
inline std::string number_text(double value) {
    const bool has_all_digits = value == std::floor(value) && std::abs(value) < 1e20;
    return has_all_digits ? format("%.0f", value) : format("%.9g", value);
}

// What an option accepts: what is wrong with a text, or "". It may replace the text by what it means.
using Accepts = std::function<std::string(std::string&)>;

// A number from low to high; unlike CLI::Range, it refuses "nan".
inline Accepts between(double low, double high) {
    return [=](const std::string& text) -> std::string {
        char* end = nullptr;
        const double value = strtod(text.c_str(), &end);
        const bool octal = text.size() > 1 && text[0] == '0' && isdigit(text[1]);  // to CLI11
        if (octal) return text + " begins with a zero";
        if (!text.empty() && *end == '\0' && value >= low && value <= high) return "";
        return (text.empty() ? "''" : text) + " is not a number from " + number_text(low) + " to " +
               number_text(high);
    };
}

// A whole number from low to high. It may have an exponent: 1e3, 1.5e4.
inline Accepts whole(double low, double high) {
    return [=](std::string& text) -> std::string {
        const std::string wrong = between(low, high)(text);
        if (!wrong.empty()) return wrong;
        const double value = strtod(text.c_str(), nullptr);
        const bool has_exponent = text.find_first_of("eE") != text.npos;
        if (value != std::floor(value) || (has_exponent && value > 0x1p53))
            return text + " is not a whole number";
        if (has_exponent) text = format("%.0f", value);
        return "";
    };
}

// A whole number from low to high, or the word `word`, which it replaces by `meant`.
inline Accepts whole_or(const char* word, const char* meant, double low, double high) {
    return [=](std::string& text) {
        return text == word ? text = meant, std::string() : whole(low, high)(text);
    };
}

// A number of rows at a time: 0 or `all`, `auto`, or a whole number.
inline std::string rows_at_a_time(std::string& text) {
    if (text == "all") text = "0";
    return whole_or("auto", "-1", 0, kMostCount)(text);
}

// One of the names.
inline Accepts one_of(std::vector<std::string> names) {
    return [names](const std::string& text) {
        const bool is_one = std::ranges::find(names, text) != names.end();
        return is_one ? std::string() : "'" + printable(text) + "' is none of " + joined(names, ", ");
    };
}

// A date as YYYY-MM-DD.
inline std::string date(const std::string& text) {
    std::tm date{};
    const char* const end = strptime(text.c_str(), "%Y-%m-%d", &date);
    const std::tm given = date;
    timegm(&date);  // makes another date of one that does not exist
    const bool is_date = text.size() == 10 && end && !*end && date.tm_mday == given.tm_mday;
    return is_date ? "" : "'" + printable(text) + "' is no date like 2025-01-31";
}

// A type of GGUF files, also in the capitals of llama.cpp.
inline std::string export_type(std::string& text) {
    std::string small = lower(text);
    const std::string wrong = one_of({"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl",
                                      "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k"})(small);
    if (wrong.empty()) text = small;
    return wrong;
}

// Declares the options of one group. `value` is what a value looks like in the help, and `standard` what the
// help says of the default, if that is not the field's value.
class OptionGroup {
  public:
    OptionGroup(CLI::App& app, const char* name) : app_(app), name_(name) {}

    template <class Field>
    CLI::Option* add(const std::string& name, Field& field, const char* value, const std::string& help,
                     const Accepts& range = {}, const std::optional<std::string>& standard = {}) {
        CLI::Option* const option = dress(app_.add_option(name, field), value, help, standard);
        return range ? option->transform(CLI::Validator(range, "")) : option;
    }
    // An option that accepts the words of `value`, "one|or|the other".
    void add_choice(const std::string& name, std::string& field, const char* value, const std::string& help) {
        add(name, field, value, help, one_of(words_of(value, '|')));
    }
    // An option that accepts one of two words. The field becomes true if that is `word`.
    void add_choice(const std::string& name, bool& field, const std::string& word, const char* value,
                    const std::string& help, const char* standard) {
        const auto set = [=, &field, words = one_of(words_of(value, '|'))](std::string text) {
            field = text == word;
            return words(text);
        };
        add_set(name, value, help, set, standard);
    }
    CLI::Option* add_flag(const char* name, bool& field, const std::string& help) {
        return dress(app_.add_flag(name, field), "", help);
    }
    // An option whose value set(value) takes over; set() returns what is wrong with it, or "".
    template <class Set>
    CLI::Option* add_set(const std::string& name, const char* value, const std::string& help, Set&& set,
                         const std::optional<std::string>& standard = {}) {
        const auto check = [name, set](const std::string& given) {
            const std::string wrong = set(given);
            if (wrong.empty()) return;
            const bool is_whole = wrong.starts_with("'") || wrong.starts_with(given);
            throw CLI::ValidationError(name, is_whole ? wrong : "'" + printable(given) + "': " + wrong);
        };
        return dress(app_.add_option_function<std::string>(name, check), value, help, standard);
    }
    // An option that only has keys.
    void add_keyed(const char* name, const std::string& help) {
        add_set(name, "KEY=VALUE,...", help, [](const std::string&) { return std::string(); });
    }

  private:
    CLI::Option* dress(CLI::Option* option, const char* value, const std::string& help,
                       const std::optional<std::string>& standard = {}) {
        if (standard) option->default_str(*standard);
        return option->type_name(value)->description(help)->group(name_);
    }
    CLI::App& app_;
    const char* name_;
};

inline void declare_model_options(CLI::App& app, RunConfig& o) {
    OptionGroup group(app, "Model and data");
    group.add("--model", o.model, "DIR|FILE|ORG/NAME|dN",
              "A folder of a Hugging Face model, a GGUF file, or the folder of an adapter, which names its "
              "model. ORG/NAME is a model that Hugging Face's tools have downloaded. dN, llama:dN, qwen3:dN "
              "and so on make a new model of N layers. list prints the models that --plan knows by name.");
    group.add("--tokenizer", o.tokenizer, "DIR|FILE|ORG/NAME",
              "The tokenizer of a new model, which is saved with it: tokenizer.json, vocab.json with "
              "merges.txt, tokenizer.model, or a GGUF file. Without it, text is read as bytes.");
    group.add("--data", o.data, "FILE...",
              "Texts, examples in JSON lines or a JSON list, or token shards (.bin) to train on; * and ? "
              "match names.");
    group.add("--val-data", o.val_data, "FILE...",
              "The same for validation. Without it, the last tenth of texts and examples is held out.");
    group.add("--seq-len", o.seq_len, "N|auto",
              "Tokens in a sequence. auto takes the longest that fit --memory, or 95% of what is free.",
              whole_or("auto", "0", 1, kMostPositions));
    group.add_choice(
        "--loss-on", o.loss_on, "completions|all|last",
        "What has a loss in JSON examples. completions: completions, and the assistant's messages; all: "
        "everything; last: of a chat only the last answer.");
    group.add(
        "--chat-format", o.chat_format, "NAME",
        "Writes chats as chatml, llama3, mistral, llama2, zephyr or gemma; by default as the chat template "
        "in the model's folder says.",
        one_of({"auto", "chatml", "llama3", "mistral", "llama2", "zephyr", "gemma"}));
    group.add("--chat-date", o.chat_date, "YYYY-MM-DD",
              "The date that chat templates write, instead of today's.", date);
    group.add("--show-example", o.show_example, "N",
              "Prints example N of the data as the model sees it, with what is learnt marked, and stops.",
              whole(1, kMostCount), "");
    group.add("--rope-scaling", o.rope_scaling, "TYPE:FACTOR",
              "Stretches rotary positions: yarn:4 for sequences four times as long as the model was trained "
              "on; or dynamic, linear, llama3. It replaces a scaling that the model has.");
    group.add("--positions", o.positions, "N", "Stretches the learned positions of a GPT-2 over N.",
              whole(1, kMostPositions), "the model's");
    group.add("--seed", o.seed, "N", "Seed of initial weights, data order and samples.",
              whole(0, 0x1.fffffffffffffp63));  // the last number below 2^64 that a double has
}

inline void declare_training_options(CLI::App& app, RunConfig& o) {
    OptionGroup group(app, "Training");
    group.add(
        "--batch", o.batch, "N|auto",
        "Sequences in a micro-batch. auto takes the most that fit --memory, or 95% of what is free, but "
        "at most 64 Ki tokens or a tenth of the data.",
        whole_or("auto", "0", 1, kMostCount));
    group.add("--grad-accum", o.grad_accum, "N", "Micro-batches in a step. With --devices, N by default.",
              whole(1, kMostCount));
    group.add("--devices", o.devices, "N",
              "Trains on N devices, which share the micro-batches of each step: N processes on this machine. "
              "On several machines, start ./train with mpirun or srun.",
              whole(1, 4096));
    group.add_choice(
        "--zero", o.zero, "auto|0|1|2|3",
        "What each of several devices keeps: 0: a copy of everything; 1: its slice of the optimizer's "
        "state; 2: also of the gradients, with one micro-batch a device or --by-block; 3: also of the "
        "blocks' weights, frozen ones too. auto: the first of 1, 2 and 3 that fits what is free, or what "
        "--memory, --batch auto or --seq-len auto choose.");
    group.add("--machines", o.machines, "M",
              "For --plan: how many machines the devices are in. A run knows where its ranks are.",
              whole(1, 4096));
    group.add_set(
        "--network", "RATE",
        "What a machine sends to the others and receives from them, as in 50GB/s or 100Gbit/s. Only "
        "estimates of time use it.",
        [&o](const std::string& text) -> std::string {
            o.network = rate_of(text);
            return o.network > 0 ? "" : "a rate is needed, as in 50GB/s or 100Gbit/s";
        },
        "10Gbit/s on CPUs, 100Gbit/s with GPUs");
    group.add("--steps", o.steps, "N",
              "Training steps. 0: no training, only --val-data, --merge, --export or --prompt; that is the "
              "default with --prompt, --prompts or --chat and no --data. With --bench, the steps to measure.",
              whole(0, 1e12), format("%ld; with --bench %d", o.steps, o.bench_steps));
    group.add("--epochs", o.epochs, "X", "Trains until the data were read X times, instead of --steps.",
              between(1e-6, 1e6), format("%g for JSON examples, if --steps is not given", kExampleEpochs));
    group.add("--lr", o.lr, "RATE", "The highest learning rate.", between(0.0, 1e3),
              format("%g for a new model, %g for a trained one, %g for LoRA, %g for a soft prompt", kNewRate,
                     kFineTuningRate, kLoraRate, kPromptRate));
    group.add("--min-lr", o.min_lr, "RATE", "The learning rate to which the schedule falls.",
              between(0.0, 1e3));
    group.add("--warmup", o.warmup, "N",
              "Steps in which the learning rate rises. With --bench, steps before those that are measured.",
              whole(0, 1e12), format("%ld; with --bench %d", o.warmup, o.bench_warmup));
    group.add(
        "--schedule", o.schedule, "NAME",
        "Learning rate after the warmup: cosine, linear, constant, or wsd, which falls in the last fifth.",
        one_of({"constant", "cosine", "linear", "wsd"}));
    group.add("--weight-decay", o.weight_decay, "X", "Weight decay of matrices.", between(0.0, 1e3));
    group.add("--clip", o.clip, "NORM",
              "Largest norm of the gradient; 0 does not clip. With --update-in-backward, each block has its "
              "own norm.",
              between(0.0, 1e30));
    group.add("--optimizer", o.optimizer, "NAME,KEY=VALUE,...",
              "adamw; or sgd, which has no momentum and no state.",
              one_of({std::begin(kOptimizerNames), std::end(kOptimizerNames)}));
    group.add("--optimizer.beta1", o.beta1, "X", "AdamW's decay of first moments.", between(0.0, 0.999999));
    group.add("--optimizer.beta2", o.beta2, "X", "AdamW's decay of second moments.", between(0.0, 0.9999999));
    group.add("--optimizer.eps", o.eps, "X", "AdamW's epsilon.", between(1e-20, 1.0));
    group.add("--dropout", o.dropout, "SHARE",
              "Share of activations that GPT-2 and BLOOM drop in training, as in transformers.",
              between(0.0, 0.99));
}

// Reads --base: a format for all linear layers, LAYERS=FORMAT for some, head=FORMAT for the head. Returns
// what is wrong, or "".
inline std::string set_base(RunConfig& o, const std::vector<std::string>& texts) {
    o.base.clear(), o.store.clear(), o.head.clear(), o.any_base = false;
    std::vector<std::string> parts;
    for (const std::string& text : texts)
        for (const std::string& part : CLI::detail::split(text, ',')) parts.push_back(part);
    for (const std::string& part : parts) {
        if (part == "none")
            o.any_base = true;
        else if (part.starts_with("head="))
            o.head = part.substr(5);
        else if (part == "nf4" || part == "nf4-double")
            o.base = part;
        else
            o.store.push_back((part == "fp32" || part == "bf16" || part == "8bit" ? "all=" : "") + part);
    }
    if (o.any_base && parts.size() > 1) return "none leaves the model as it is: leave the rest out";
    if (o.head == "nf4-double") o.head = "nf4";
    if (!o.head.empty() && o.head != "nf4" && o.head != "8bit") return "a head is kept in nf4 or 8bit";
    if (!o.base.empty() && !o.store.empty()) {  // the one for all layers comes first, so that others count
        o.store.insert(o.store.begin(), "all=" + o.base);
        o.base.clear();
    }
    return "";
}

inline void declare_adapter_options(CLI::App& app, RunConfig& o) {
    OptionGroup group(app, "Adapters");
    group.add_choice("--train", o.train, "all|lora|prompt",
                     "What is trained: all weights; or, beside a frozen model, a LoRA or a soft prompt.");
    app.add_option_function<std::vector<std::string>>(
           "--base",
           [&o](const std::vector<std::string>& texts) {
               const std::string wrong = set_base(o, texts);
               if (!wrong.empty()) throw CLI::ValidationError("--base", joined(texts, ",") + ": " + wrong);
           })
        ->expected(1)
        ->type_name("FORMAT|LAYERS=FORMAT,...")
        ->description(
            "Formats of a frozen model's matrices, which are quantized when they are loaded: nf4 or "
            "nf4-double for all linear layers, or mlp=bf16,attention=8bit, of fp32, bf16, 8bit, nf4 and "
            "nf4-double; layers may also be named as in the model's files. head=nf4 or head=8bit quantizes "
            "the output matrix too. none takes the model as it is, whatever its adapter was trained with.")
        ->group("Adapters");
    group.add("--lora-rank", o.lora_rank, "N", "Rank of the LoRA.", whole(1, kMostChannels));
    group.add("--lora-alpha", o.lora_alpha, "X", "The LoRA's scale is alpha / rank.", between(1e-6, 1e6));
    group
        .add("--lora-targets", o.lora_targets, "NAME,...",
             "Linear layers that have a LoRA: attention, mlp, all, or names as in the model's files.", {},
             "all")
        ->delimiter(',');
    group.add("--lora-dropout", o.lora_dropout, "SHARE",
              "Share of a LoRA's inputs that is dropped in training.", between(0.0, 0.99));
    group.add_set(
        "--soft-prompt", "N|TEXT|N:TEXT",
        "Length of a soft prompt in tokens, or the text that its vectors begin as, or both: 20:TEXT "
        "repeats or cuts the text to 20 tokens. Without a text they begin as random tokens.",
        [&o](const std::string& text) -> std::string {
            const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
            const bool counts = digits > 0 && (digits == text.size() || text[digits] == ':');
            o.soft_prompt = 0, o.soft_prompt_text = text;
            if (!counts) return text.empty() ? "a number or a text is needed" : "";
            const double count = strtod(text.substr(0, digits).c_str(), nullptr);
            if (count < 1 || count > kMostPositions)
                return format("its length is a number from 1 to %d", kMostPositions);
            o.soft_prompt = static_cast<int>(count);
            o.soft_prompt_text = text.substr(std::min(text.size(), digits + 1));
            return "";
        },
        std::to_string(o.soft_prompt));
    group.add("--adapter", o.adapter, "DIR", "Starts from an adapter that PEFT or a run has saved.");
    group.add("--merge", o.merge, "DIR", "At the end, saves the model with the adapter merged into it.");
    group.add("--save-base", o.save_base, "DIR",
              "Before training, saves the base in NF4 as bitsandbytes does; the adapter then names it.");
}

inline void declare_plan_options(CLI::App& app, RunConfig& o) {
    OptionGroup group(app, "Memory");
    group.add(
        "--memory", o.memory, "SIZE[,host=SIZE]",
        "Chooses --recompute, --chunk-rows, --batch, --grad-accum and --zero so that the run fits, as in "
        "8GiB for each device; and, where that is not enough, --offload, --prefetch and --by-block.");
    group.add("--memory.host", o.host_memory, "SIZE",
              "Pinned host memory that the GPUs of a machine may use, as in 8GiB,host=64GiB.");
    group
        .add_set("--plan", "[table|json]", "Prints what every buffer takes, and stops.",
                 [&o](std::string form) {
                     o.plan = true, o.json = form == "json";
                     return form == "true" ? "" : one_of({"table", "json"})(form);
                 })
        ->expected(0, 1);
    group.add(
        "--gpu", o.gpu, "NAME",
        "Plans for a GPU by its name, as in \"RTX 4090\" or \"4060 Ti 16GB\", whatever this machine has: "
        "whether the run fits, how fast it is, and what that costs. Without --memory, for its memory.");
    group.add("--timeline", o.timeline, "FILE",
              "Writes the bytes that are in use after each operation of a step, and what is copied.");
    group.add("--calibrate", o.calibrate, "FILE",
              "Measures how fast this device does each kind of operation, into a file, and stops. With "
              "--devices also how fast ranks send each other data.");
    group.add("--rates", o.rates, "FILE",
              "A file of --calibrate, by which times are estimated. Without it, by nominal rates.");
}

inline void declare_memory_options(CLI::App& app, RunConfig& o) {
    OptionGroup group(app, "Memory");
    group.add("--recompute", o.recompute, "LEVEL|LEVEL:N,...",
              "What backward computes again instead of keeping it: " + joined(recompute_names(), ", ") +
                  "; or by layers, as in block:4,norm:8.");
    group.add_keyed(
        "--chunk-rows",
        "Processes rows in chunks: N at a time; 0 or all for all of them; auto for as few as cost "
        "at most 2% of a step. The word auto alone is for all three.");
    group.add("--chunk-rows.head", o.head_rows, "N|all|auto", "Rows with logits at a time.", rows_at_a_time,
              "auto");
    group.add("--chunk-rows.mlp", o.mlp_rows, "N|all|auto", "Rows in an MLP at a time.", rows_at_a_time,
              "all");
    group.add("--chunk-rows.attention", o.attention_rows, "N|all|auto",
              "Rows of a sequence in a block at a time, for blocks of level block and in validations. Last "
              "bits of gradients differ.",
              rows_at_a_time, "all");
    group.add_set("--state-formats", "auto|KEY=FORMAT,...",
                  "How the optimizer's state is kept. auto: --memory may also choose master=split and 8-bit "
                  "moments, where that is faster.",
                  [&o](const std::string& word) {
                      o.allow_8bit = true;
                      return word == "auto" ? "" : "auto, or keys such as m=8bit,v=8bit";
                  });
    group.add_choice("--state-formats.master", o.master, "fp32|split|none",
                     "The fp32 copy of bf16 weights; split stores only the 16 bits that they lack.");
    group.add_choice("--state-formats.m", o.adam_m, "fp32|bf16|8bit", "AdamW's first moments.");
    group.add_choice("--state-formats.v", o.adam_v, "fp32|bf16|8bit", "AdamW's second moments.");
    group.add_flag(
        "--update-in-backward", o.update_in_backward,
        "Updates each block as soon as its gradient is complete, so that only one block's gradient "
        "is kept. Each block's gradient is then clipped by its own norm.");
    group.add_flag(
        "--by-block", o.by_block,
        "Takes all micro-batches of a step through a block before the next one, so that a block is "
        "streamed and updated once in a step.");
    group.add_keyed("--offload",
                    "Keeps something in host memory (host) or in files (disk), from where it is streamed to "
                    "the device when it is needed.");
    for (const PlacementOption& p : kPlacements)
        group.add_set(
            p.setting(), p.values, p.help, [&o, &p](const std::string& value) { return p.set(o, value); },
            "device");
    group.add(
        "--prefetch", o.prefetch, "N",
        "Offloaded blocks that are fetched while another one is used; each takes its own buffer. With 0 "
        "the device waits for each block.",
        whole(0, kMostLayers));
}

inline void declare_logging_options(CLI::App& app, RunConfig& o) {
    OptionGroup group(app, "Logging");
    group.add("--print-every", o.print_every, "N", "Steps between printed lines; 0: a line a second.",
              whole(0, 1e12));
    group.add("--log", o.log, "FILE",
              "Writes a line for each step and each validation: JSON, or CSV if the name ends with .csv.");
    group.add(
        "--report", o.report, "FILE[,with=LOG]",
        "Writes an HTML page that shows the run as it goes, or a plan: losses, rates, memory, samples.");
    group.add("--report.with", o.report_with, "LOG", "Also shows another run: the file of its --log.");
    group.add("--tensorboard", o.tensorboard, "DIR", "Writes event files for TensorBoard.");
    group.add("--eval-every", o.eval_every, "N", "Steps between validations; 0: only one at the end.",
              whole(0, 1e12));
    group.add("--eval-batches", o.eval_batches, "N",
              "A validation reads as many sequences as N training steps.", whole(1, kMostCount));
    group.add("--early-stopping", o.early_stopping, "N",
              "Ends the training when N validations in a row were no better than the best before them; 0: "
              "never.",
              whole(0, kMostCount));
    group.add("--loss-by-position", o.loss_by_position, "FILE",
              "Writes a JSON line for each validation: the mean loss of tokens by how many precede them.");
}

// Reads --bench: "step", "forward", and with them "ops" and "json". Returns what is wrong, or "".
inline std::string set_bench(RunConfig& o, const std::string& text) {
    o.bench = "step", o.profile_ops = o.json = false;
    for (const std::string& word : CLI::detail::split(text, ',')) {
        if (word == "step" || word == "forward" || word == "true")
            o.bench = word == "forward" ? word : "step";
        else if (word == "ops")
            o.profile_ops = true;
        else if (word == "json")
            o.json = true;
        else
            return "step or forward, and with them ops and json";
    }
    return "";
}

inline void declare_output_options(CLI::App& app, RunConfig& o) {
    OptionGroup sampling(app, "Sampling"), saving(app, "Saving");
    sampling.add("--prompt", o.prompt, "TEXT",
                 "The message that a chat model answers, or the text that another model continues.");
    sampling.add_flag("--chat", o.chat, "Opens a conversation in the terminal.");
    sampling.add("--prompts", o.prompts, "FILE",
                 "Answers the prompts of JSON lines, --batch of them at a time, in JSON lines on stdout.");
    sampling.add_flag("--raw-prompt", o.raw_prompt, "Continues prompts as they are, without a chat format.");
    sampling.add_keyed("--sample", "When and how text is generated.");
    sampling.add("--sample.every", o.sample_every, "N", "Steps between samples; 0: only one at the end.",
                 whole(0, 1e12));
    sampling.add("--sample.tokens", o.sample_tokens, "N", "Tokens of a sample; 0: no samples.",
                 whole(0, kMostCount));
    sampling.add("--sample.temperature", o.sampling.temperature, "X", "0 always takes the likeliest token.",
                 between(0.0, 1e3));
    sampling.add("--sample.top-k", o.sampling.top_k, "N",
                 "Samples among the N likeliest tokens; 0: among all.", whole(0, kMostCount));
    sampling.add("--sample.top-p", o.sampling.top_p, "P",
                 "Samples among the likeliest tokens that together have a probability of P.",
                 between(0.0, 1.0));
    sampling.add("--sample.min-p", o.sampling.min_p, "P",
                 "Leaves out tokens with less than P times the likeliest one's probability.",
                 between(0.0, 1.0));
    sampling.add("--sample.repetition-penalty", o.sampling.repetition_penalty, "X",
                 "Makes tokens that the text has already less likely, if above 1, as in transformers.",
                 between(1e-3, 1e3));
    sampling
        .add("--sample.stop", o.stops, "TEXT",
             "Ends the text before these characters; may be given several times. In double quotes it may "
             "have commas and \\n.")
        ->allow_extra_args(false);
    saving.add("--out", o.out, "DIR", "Folder for saves, in Hugging Face's format.");
    saving.add(
        "--export", o.export_file, "FILE[,KEY=VALUE,...]",
        "At the end, writes the model as a GGUF file, for llama.cpp and Ollama; an adapter is merged into "
        "it.");
    saving.add("--export.type", o.export_type, "TYPE",
               "Type of its matrices: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, q4_k_s, q4_k_m, "
               "q5_k_s, q5_k_m or q6_k.",
               export_type, "that of the build's weights, bf16 or f32");
    saving.add_choice("--export.part", o.export_part, "model|adapter", "adapter: writes the LoRA alone.");
    saving.add("--save-every", o.save_every, "N", "Steps between saves; 0: only one at the end.",
               whole(0, 1e12));
    saving.add(
        "--keep", o.keep, "N",
        "How many saves stay; 0: all. The last good one stays too, and --out shows it: its loss was not "
        "far above that of the first step, and its gradient not zero.",
        whole(0, kMostCount));
    saving.add_flag(
        "--keep-best", o.keep_best,
        "Also saves, and keeps, the state with the lowest validation loss: --out's `best` shows it.");
    saving.add("--resume", o.resume, "DIR|auto",
               "Continues from a save, with its options unless others are given. auto: from the last "
               "good save in --out, or from the start where there is none.");
}

inline void declare_advanced_options(CLI::App& app, RunConfig& o) {
    OptionGroup advanced(app, "Advanced");
    advanced
        .add_set("--bench", "[step|forward][,ops][,json]",
                 "Measures training steps, or their forward alone, and keeps nothing. ops: each operation "
                 "too. json: for programs.",
                 [&o](const std::string& text) { return set_bench(o, text); })
        ->expected(0, 1);
    advanced.add("--threads", o.threads, "N", "CPU threads; 0: as many as there are cores.", whole(0, 4096));
    advanced.add_keyed("--advanced", "Settings for experts and developers.");
    advanced.add_choice(
        "--advanced.attention", o.attention, "auto|common|hopper",
        "Attention kernels. hopper is for GPUs of compute capability 9.0; auto takes it where it can.");
    advanced.add_choice("--advanced.graph", o.graph, "on|off", "On a GPU, replays each step as CUDA graphs.");
    advanced.add_choice(
        "--advanced.tf32", o.tf32, "on", "on|off",
        "In fp32 on a GPU, multiplies matrices on tensor cores, which round to 10 bits of mantissa.", "off");
    advanced.add("--advanced.algorithms", o.matmul_algorithms, "FILE",
                 "On a GPU, a file of the fastest algorithm of each matrix product. Those that it lacks are "
                 "measured and added.");
    advanced.add("--advanced.patience", o.patience, "SECONDS",
                 "How long one of several devices may give no sign of life before the others end the run.",
                 whole(1, 1e6));
    advanced.add_choice("--advanced.clip", o.clip_per_block, "block", "model|block",
                        "Whether --clip goes by the norm of the whole gradient, or of each block's.",
                        "model");
}

// Declares every option on the parser, bound to `o`. --config, --help and --version are read before.
inline void declare_options(CLI::App& app, RunConfig& o) {
    app.option_defaults()->always_capture_default();
    app.set_help_flag();
    declare_model_options(app, o);
    declare_training_options(app, o);
    declare_adapter_options(app, o);
    declare_plan_options(app, o);
    declare_memory_options(app, o);
    declare_logging_options(app, o);
    declare_output_options(app, o);
    declare_advanced_options(app, o);
    OptionGroup help(app, "Help");
    const auto read_before = [](const std::string&) { return std::string(); };
    help.add_set("--config", "FILE",
                 "Reads options from a TOML file, without their dashes: lr = 1e-4. What the command line "
                 "gives counts instead.",
                 read_before);
    help.add_set("--help", "[all|GROUP]", "Prints the usual options, all of them, or those of a group.",
                 read_before)
        ->expected(0, 1);
    help.add_set("--version", "", "Prints the version, and what this program was built with.", read_before)
        ->expected(0);
}
