// options_words.h - reads the words of a command line, or of a config file, into settings by name.
//
// Most options are a setting of the same name: --lr 3 sets "--lr". An option with keys has a setting for each
// of them: --offload weights=disk,state=host sets "--offload.weights" and "--offload.state". Such an option
// may be given several times, and so may --base and --bench; of another setting that is given twice, the
// last value counts.
#pragma once

#include <fcntl.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/config_toml.h"
#include "llmc/error.h"
#include "llmc/file.h"

using Settings = std::map<std::string, std::vector<std::string>>;

// The options with keys. A word without "=" is the value of the settings in `alone`, if there are any.
struct KeyedOption {
    const char* name;
    std::vector<const char*> alone;
};
inline const KeyedOption kKeyedOptions[] = {
    {"--optimizer", {"--optimizer"}},
    {"--memory", {"--memory"}},
    {"--chunk-rows", {"--chunk-rows.head", "--chunk-rows.mlp", "--chunk-rows.attention"}},
    {"--state-formats", {"--state-formats"}},
    {"--offload", {}},
    {"--sample", {}},
    {"--export", {"--export"}},
    {"--report", {"--report"}},
    {"--advanced", {}},
};

// Names that transformers, trl, peft, axolotl, torchtune, llama.cpp and llm.c have for the same settings.
struct Alias {
    const char *setting, *names;  // the names, with spaces between them
};
inline constexpr Alias kAliases[] = {
    {"--model", "--model-name-or-path --model-name"},
    {"--tokenizer", "--tokenizer-name --tokenizer-path"},
    {"--data", "--train-file --train-data --input-bin"},
    {"--val-data", "--validation-file --input-val-bin --val-file --eval-data"},
    {"--seq-len",
     "--seq-length --sequence-length --max-length --max-seq-length --block-size --model-max-length "
     "--cutoff-len --sequence-len"},
    {"--batch", "--batch-size --micro-batch-size --per-device-train-batch-size --train-batch-size"},
    {"--grad-accum", "--gradient-accumulation-steps --gradient-accumulation --grad-acc-steps"},
    {"--steps", "--max-steps --num-iterations --max-iters --num-train-steps"},
    {"--epochs", "--num-epochs --num-train-epochs"},
    {"--lr", "--learning-rate"},
    {"--warmup", "--warmup-steps --warmup-iters"},
    {"--schedule", "--lr-scheduler-type"},
    {"--clip", "--max-grad-norm --grad-clip --clip-grad-norm --max-norm"},
    {"--optimizer", "--optim"},
    {"--optimizer.beta1", "--adam-beta1"},
    {"--optimizer.beta2", "--adam-beta2"},
    {"--optimizer.eps", "--adam-epsilon"},
    {"--lora-rank", "--lora-r"},
    {"--lora-targets", "--lora-target-modules --target-modules"},
    {"--soft-prompt", "--num-virtual-tokens"},
    {"--sample.tokens", "--max-new-tokens --n-predict --predict --num-predict"},
    {"--sample.temperature", "--temp --temperature"},
    {"--sample.top-k", "--top-k"},
    {"--sample.top-p", "--top-p"},
    {"--sample.min-p", "--min-p"},
    {"--sample.repetition-penalty", "--repetition-penalty --repeat-penalty"},
    {"--sample.stop", "--stop --stop-strings"},
    {"--chat", "--interactive --conversation"},
    {"--prompts", "--prompt-file"},
    {"--out", "--output-dir --output"},
    {"--save-every", "--save-steps --checkpoint-every --save-interval"},
    {"--keep", "--save-total-limit"},
    {"--keep-best", "--load-best-model-at-end"},
    {"--early-stopping", "--early-stopping-patience"},
    {"--resume", "--resume-from-checkpoint"},
    {"--print-every", "--logging-steps --log-interval --log-every"},
    {"--report.with", "--report-with"},
    {"--eval-every", "--eval-steps --eval-interval --val-loss-every --val-every"},
    {"--threads", "--num-threads"},
    {"--eval-batches", "--eval-iters"},
    {"--seed", "--random-state"},
    {"--zero", "--zero-stage"},
};

// What to write instead of names of other tools that have no equivalent option here.
struct Hint {
    const char *said, *names;
};
inline constexpr Hint kHints[] = {
    {"the warm-up is counted in steps: --warmup N", "--warmup-ratio"},
    {"write --base nf4-double", "--load-in-4bit"},
    {"write --base all=8bit", "--load-in-8bit"},
    {"write --train lora --base nf4-double", "--qlora"},
    {"write --base nf4-double, or --base nf4", "--bnb-4bit-quant-type"},
    {"write --train lora", "--lora --use-lora --use-peft"},
    {"the build decides: make PRECISION=bf16 or fp32",
     "--bf16 --fp16 --torch-dtype --dtype --fp32 --precision --mixed-precision"},
    {"the build decides: make DEVICE=cuda or cpu", "--device --no-cuda"},
    {"write --recompute block, or --memory SIZE, which chooses",
     "--gradient-checkpointing --use-gradient-checkpointing --enable-activation-checkpointing "
     "--activation-checkpointing"},
    {"examples are always packed",
     "--packing --sample-packing --pad-to-sequence-len --group-by-length --eval-sample-packing"},
    {"nothing is downloaded: --data FILE", "--dataset-name"},
    {"write --eval-every N", "--eval-strategy --evaluation-strategy --evals-per-epoch"},
    {"--keep-best and --early-stopping compare validation losses", "--metric-for-best-model"},
    {"answers alone are learnt; --loss-on all learns all", "--train-on-inputs"},
    {"that is the default; --loss-on all learns all",
     "--train-on-responses-only --assistant-only-loss --completion-only-loss"},
    {"write --model DIR", "--base-model --init-from"},
    {"write --data FILE", "--datasets"},
    {"a tenth of the data is held out; --val-data FILE gives other data", "--val-set-size"},
    {"that is the default; --lora-targets names layers", "--lora-target-linear"},
    {"attention is always computed in tiles, as FlashAttention does",
     "--flash-attention --attn-implementation --use-flash-attn --flash-attn --flash-attn-2 "
     "--flash-attention-2"},
    {"write --tensorboard DIR for TensorBoard; --log FILE for W&B or trackio, to which "
     "scripts/log_to_wandb.py and scripts/log_to_trackio.py send it; --report FILE for a page",
     "--wandb-project --report-to --logging-dir --wandb --wandb-log --wandb-run-name --run-name"},
    {"write --seq-len N", "--ctx-size --ctx --n-ctx --context-length --context-size --num-ctx"},
    {"write --offload, or --memory SIZE, which chooses",
     "--n-gpu-layers --deepspeed --ngl --gpu-layers --cpu-offload --mlock --no-mmap"},
    {"write --save-every N", "--save-strategy --saves-per-epoch"},
    {"leave it out: --steps N trains", "--do-train"},
    {"leave it out: --val-data FILE and --eval-every N validate", "--do-eval"},
    {"leave it out: another run's saves stay in --out", "--overwrite-output-dir"},
    {"leave it out: validations use --batch", "--per-device-eval-batch-size"},
    {"the model's own is used; --chat-format chooses another format", "--chat-template"},
    {"leave it out: the program is compiled already", "--compile --torch-compile --jit"},
    {"there is no DoRA: --train lora", "--use-dora --dora"},
    {"--lora-alpha X sets the scale, which is alpha / rank", "--use-rslora"},
    {"there is no noise in embeddings: leave it out", "--neftune-noise-alpha"},
    {"nothing is uploaded: --out DIR", "--push-to-hub --hub-model-id"},
    {"write it as the first message of a chat for --prompts FILE, or /system in --chat",
     "--system-prompt --system"},
    {"write --devices N; CUDA_VISIBLE_DEVICES says which GPUs",
     "--gpus --num-gpus --n-gpus --num-devices --nproc-per-node --num-processes"},
    {"write --devices N --zero 3", "--fsdp --ddp"},
    {"there is no training by preferences or rewards: --data has answers to learn",
     "--dpo --orpo --kto --simpo --grpo --ppo --rlhf --reward-model"},
    {"write --base nf4-double for a base in 4 bits, --export FILE,type=q4_k_m for a GGUF in 4 bits",
     "--quantize --quantization --quant --quantization-bit"},
    {"write --export FILE,type=q4_k_m; --model FILE reads a GGUF",
     "--outtype --quantization-method --save-gguf --gguf --outfile"},
    {"write --offload inputs=auto, or --memory SIZE, which chooses",
     "--enable-activation-offloading --activation-offloading"},
    {"write --update-in-backward", "--optimizer-in-bwd --fused-backward"},
    {"a step reads --batch x --grad-accum sequences: write --grad-accum N",
     "--total-batch-size --global-batch-size --effective-batch-size"},
    {"write --min-lr RATE", "--learning-rate-decay-frac --min-lr-rate --lr-min"},
    {"write --model dN for a new GPT-2 of N layers, or --model DIR",
     "--n-layer --n-head --n-embd --num-layers"},
    {"leave it out: --data recognises the fields of its lines, and is read beside the training",
     "--dataset-text-field --dataset-format --dataset-prepared-path --dataset-num-proc "
     "--dataloader-num-workers"},
    {"nothing is downloaded: --model ORG/NAME finds what Hugging Face's tools have downloaded",
     "--hf-repo --hf-model-repo-id --download"},
};

// Values that transformers, trl and peft have for a setting, and what they are here.
struct ValueAlias {
    const char *setting, *value, *meant;
};
inline constexpr ValueAlias kValueAliases[] = {
    {"--optimizer", "adamw_torch", "adamw"},      {"--optimizer", "adamw_torch_fused", "adamw"},
    {"--optimizer", "adamw_hf", "adamw"},         {"--schedule", "constant_with_warmup", "constant"},
    {"--schedule", "warmup_stable_decay", "wsd"}, {"--lora-targets", "all-linear", "all"},
};

// What to write instead of values of other tools that take more than one option here.
struct ValueHint {
    const char *setting, *values, *said;  // the values, with spaces between them
};
inline constexpr ValueHint kValueHints[] = {
    {"--train", "qlora", "write --train lora --base nf4-double"},
    {"--adapter", "qlora", "write --train lora --base nf4-double"},
    {"--optimizer", "adamw8bit adamw_8bit adamw_bnb_8bit",
     "write --optimizer adamw --state-formats m=8bit,v=8bit"},
    {"--optimizer", "paged_adamw_8bit",
     "write --optimizer adamw --state-formats m=8bit,v=8bit; --memory SIZE offloads what does not fit"},
    {"--optimizer", "paged_adamw_32bit", "write --optimizer adamw; --memory SIZE offloads what does not fit"},
    {"--schedule", "cosine_with_min_lr", "write --schedule cosine --min-lr RATE"},
};

// Reads words into settings that are options of `app`.
class WordReader {
  public:
    explicit WordReader(const CLI::App& app) : app_(app) {}

    // The settings of a command line, without the program's name. Fails on what is no option.
    Settings command_line(const std::vector<std::string>& words) {
        settings_.clear(), replaced_.clear();
        for (size_t i = 0; i < words.size();) {
            std::string name = words[i] == "-h" ? "--help" : words[i], value;
            i++;
            const size_t equals = name.find('=');
            if (!is_name(name))
                fail("%s is no option; their names begin with --, and values follow them", printable(name));
            const bool has_value = equals != name.npos;
            if (has_value) value = name.substr(equals + 1), name.resize(equals);
            const std::string setting = find(name);
            const auto [fewest, most] = counts(setting);
            std::vector<std::string> values;
            if (has_value && most == 0 && value != "true" && value != "false")
                fail("%s takes no value, as in %s", name, words[i - 1]);
            if (has_value) values.push_back(value);
            const auto more = [&](size_t limit) { return values.size() < limit && i < words.size(); };
            while (more(fewest)) values.push_back(words[i++]);
            while (!has_value && more(most) && !is_name(words[i]) && words[i] != "-h")
                values.push_back(words[i++]);
            if (values.size() < fewest) fail("%s: its value is missing", name);
            add(setting, name, values);
        }
        return settings_;
    }

    // Reads the settings of a TOML file. Calls check(settings so far) after each item, such as `lr = 1e-4`. A
    // mistake, whether found here or by check(), fails naming the file and the item's line.
    template <class Check>
    void config_file(const std::string& path, Check&& check) {
        settings_.clear(), replaced_.clear();
        const FileReader file("--config " + path, open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC),
                              Pages::Kept);
        constexpr size_t kLargest = 32 << 10;  // keys of many parts would take all of the library's stack
        if (file.size() > kLargest)
            fail("%s is larger than a configuration: %zu bytes at most", file.path(), kLargest);
        std::string text(file.size(), '\0');
        file.read(0, text.size(), text.data());
        for (const ConfigItem& item : read_toml(text, path)) {
            try {
                add_item(item);
                check(settings_);
            } catch (const UserError& error) {
                fail("%s:%zu: %s", path, item.line, error.what());
            }
        }
    }

    // Values that do not count because the setting was given again. They must be valid too.
    const std::vector<std::pair<std::string, std::vector<std::string>>>& replaced() const {
        return replaced_;
    }

  private:
    static bool is_name(const std::string& word) {
        return word.size() > 2 && word.starts_with("--") && std::isalpha(static_cast<unsigned char>(word[2]));
    }

    // The setting of an option's name as it was written. Fails if there is none, with the nearest name.
    std::string find(const std::string& written) const {
        std::string name = written;
        std::ranges::replace(name, '_', '-');
        for (const Alias& alias : kAliases)
            if (has_word(alias.names, name)) return alias.setting;
        if (name.find('.') == name.npos && option(name)) return name;
        if (const size_t dot = name.find('.'); dot != name.npos && option(name))
            fail("%s: did you mean %s %s=...?", printable(written), name.substr(0, dot),
                 name.substr(dot + 1));
        for (const Hint& hint : kHints)
            if (has_word(hint.names, name)) fail("%s: %s", printable(written), hint.said);
        std::vector<std::string> names;
        for (const CLI::Option* known : app_.get_options()) {
            const std::string other = known->get_name();
            const size_t dot = other.find('.');
            if (dot == other.npos)
                names.push_back(other);
            else if (other.substr(dot + 1) == name.substr(2))
                fail("%s: did you mean %s %s=...?", printable(written), other.substr(0, dot),
                     other.substr(dot + 1));
        }
        for (const Alias& alias : kAliases)
            for (const std::string& other : words_of(alias.names)) names.push_back(other);
        const std::string nearest = nearest_name(name, names);
        if (nearest.empty()) fail("%s: there is no such option; --help all lists them", printable(written));
        fail("%s: did you mean %s?", printable(written), nearest);
    }

    const CLI::Option* option(const std::string& name) const { return app_.get_option_no_throw(name); }

    // The fewest and the most values that an option takes.
    std::pair<size_t, size_t> counts(const std::string& setting) const {
        const CLI::Option* const found = option(setting);
        const int fewest = found->get_items_expected_min(), most = found->get_items_expected_max();
        return {static_cast<size_t>(std::max(0, fewest)), static_cast<size_t>(std::max(0, most))};
    }

    // Sets a setting; a value that it had is kept in replaced(). Stop strings are added to those before.
    void set(const std::string& setting, const std::vector<std::string>& words) {
        std::vector<std::string>& now = settings_[setting];
        if (setting == "--sample.stop") {
            if (std::ranges::find(words, "") != words.end())
                fail("--sample stop: an empty text would end every answer at once");
            now.insert(now.end(), words.begin(), words.end());
            return;
        }
        if (!now.empty()) replaced_.emplace_back(setting, now);
        now = words;
        const std::string kind = option(setting)->get_type_name();
        const auto takes = [&](const char* what) { return kind.find(what) != kind.npos; };
        const bool takes_name = takes("DIR") || takes("FILE") || takes("LOG");
        if (words[0].empty() && (takes_name || takes("TYPE:")))
            fail("%s is empty where %s is needed", setting_name(setting), kind);
        // A shell leaves ~ alone in --data=~/x, and a configuration file has no shell.
        if (takes_name) std::ranges::transform(now, now.begin(), with_home);
        for (const ValueHint& hint : kValueHints)
            if (setting == hint.setting && has_word(hint.values, words[0]))
                fail("%s %s: %s", hint.setting, words[0], hint.said);
        for (const ValueAlias& alias : kValueAliases)
            if (setting == alias.setting && words[0] == alias.value) now = {alias.meant};
    }

    // The option with keys of this name, or null.
    static const KeyedOption* keyed_option(const std::string& name) {
        const auto at =
            std::ranges::find_if(kKeyedOptions, [&](const KeyedOption& keyed) { return name == keyed.name; });
        return at == std::end(kKeyedOptions) ? nullptr : &*at;
    }

    // Adds a setting, or those of an option with keys.
    void add(const std::string& setting, const std::string& written, const std::vector<std::string>& values) {
        if (const KeyedOption* const keyed = keyed_option(setting)) {
            for (const std::string& value : values) add_keys(*keyed, written, value);
            return;
        }
        const std::vector<std::string> words = values.empty() ? std::vector<std::string>{"true"} : values;
        const auto before = settings_.find(setting);
        const bool accumulates = setting == "--base" || setting == "--bench";
        if (before == settings_.end() || !accumulates) return set(setting, words);
        before->second[0] += "," + words[0];
    }

    // Reads a value in double quotes, which may have commas, \n, \t and, after a backslash, any character.
    // The text begins behind the first quote; it is cut to what comes behind the last one.
    static std::string take_quoted(const std::string& written, std::string_view& text) {
        std::string value;
        for (size_t i = 0; i < text.size(); i++) {
            if (text[i] == '"') {
                text.remove_prefix(i + 1);
                return value;
            }
            const bool escaped = text[i] == '\\' && i + 1 < text.size();
            const char c = text[escaped ? ++i : i];
            value += !escaped ? c : c == 'n' ? '\n' : c == 't' ? '\t' : c;
        }
        fail("%s: a value begins with a double quote and does not end with one", written);
    }

    // Adds the parts of "key=value,key=value". A value may be in double quotes.
    void add_keys(const KeyedOption& keyed, const std::string& written, const std::string& text) {
        bool has_value_alone = false;
        for (size_t start = 0; start <= text.size();) {
            const size_t end = std::min(text.find(',', start), text.size());
            const std::string part = text.substr(start, end - start);
            const size_t equals = part.find('=');
            if (equals != part.npos && part.substr(equals + 1).starts_with('"')) {
                std::string_view rest = std::string_view(text).substr(start + equals + 2);
                set(find_key(keyed, written, part.substr(0, equals)), {take_quoted(written, rest)});
                if (!rest.empty() && rest[0] != ',')
                    fail("%s: a comma is needed behind a value in double quotes", written);
                start = text.size() - rest.size() + 1;
                continue;
            }
            start = end + 1;
            if (equals != part.npos) {
                set(find_key(keyed, written, part.substr(0, equals)), {part.substr(equals + 1)});
                continue;
            }
            if (keyed.alone.empty())
                fail("%s %s needs a key and a value, as in %s=...", written, printable(text),
                     keys_of(keyed.name)[0]);
            if (std::exchange(has_value_alone, true))
                fail("%s %s: %s has no key; its keys are %s", written, printable(text), printable(part),
                     CLI::detail::join(keys_of(keyed.name), ", "));
            for (const char* setting : keyed.alone) set(setting, {part});
        }
    }
    std::string find_key(const KeyedOption& keyed, const std::string& written, const std::string& key) const {
        std::string name = key;
        std::ranges::replace(name, '_', '-');
        const std::string setting = std::string(keyed.name) + "." + name;
        if (option(setting)) return setting;
        const std::vector<std::string> keys = keys_of(keyed.name);
        const std::string nearest = nearest_name(name, keys);
        if (!nearest.empty()) fail("%s %s: did you mean %s=?", written, printable(key), nearest);
        fail("%s has no key %s; its keys are %s", written, printable(key), CLI::detail::join(keys, ", "));
    }
    std::vector<std::string> keys_of(const std::string& name) const {
        std::vector<std::string> keys;
        for (const CLI::Option* known : app_.get_options())
            if (const std::string other = known->get_name(); other.starts_with(name + "."))
                keys.push_back(other.substr(name.size() + 1));
        return keys;
    }

    // Adds an item of a config file: `lr = 1e-4`, or `weights = "disk"` below [offload].
    void add_item(const ConfigItem& item) {
        const std::string& first = item.path[0];
        const std::string name = first.starts_with("--") ? first : "--" + first;
        if (name == "--config" || name == "--help" || name == "--version" || item.path.size() > 2)
            fail("%s is no setting of a run", printable(item.name()));
        const std::string setting = find(name);
        const KeyedOption* const keyed = keyed_option(setting);
        if (item.path.size() == 1) {
            const auto [fewest, most] = counts(setting);
            if (!keyed && (item.values.size() < fewest || item.values.size() > std::max<size_t>(1, most)))
                fail("%s takes one value", name);
            return add(setting, name, item.values);
        }
        const std::string& key = item.path[1];
        if (!keyed) fail("%s has no keys, such as %s", name, printable(key));
        for (const std::string& value : item.values) set(find_key(*keyed, name, key), {value});
    }

    const CLI::App& app_;
    Settings settings_;
    std::vector<std::pair<std::string, std::vector<std::string>>> replaced_;
};
