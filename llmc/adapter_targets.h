// adapter_targets.h - interprets a LoRA's adapter_config.json as PEFT does: which linear layers have a LoRA,
// with which rank and scale, and which settings are refused. Read this when PEFT gets a new field.
#pragma once

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/adapter.h"
#include "llmc/model_config.h"

// A regular expression that PEFT passes to Python's `re`. It must match a layer's whole name.
class NamePattern {
  public:
    // Compiles `before` + pattern + `after`. Fails naming the setting if the pattern is not a regular
    // expression of Python's. PCRE2 knows all of Python's syntax and more; the rest is refused: verbs such as
    // "(*ACCEPT)", recursion such as "(?R)", and further escapes.
    NamePattern(const std::string& pattern, const std::string& file, const char* setting,
                const char* before = "", const char* after = "")
        : where_(format("%s: '%s' has \"%s\"", file.c_str(), setting, printable(pattern).c_str())) {
        for (size_t i = 0; i + 1 < pattern.size(); i++) {
            const char c = pattern[i], next = pattern[i + 1];
            const bool bad_group =
                c == '(' && (next == '*' || (next == '?' && i + 2 < pattern.size() &&
                                             !std::strchr(":=!<P>imsxau(", pattern[i + 2])));
            const bool bad_escape = c == '\\' && std::isalpha(static_cast<unsigned char>(next)) &&
                                    !std::strchr("AbBdDsSwWafnrtvx", next);
            if (bad_group || bad_escape) refuse();
            if (c == '\\') i++;
        }
        int error = 0;
        PCRE2_SIZE at = 0;
        const std::string whole = before + pattern + after;
        code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(whole.data()), whole.size(),
                                  PCRE2_ANCHORED | PCRE2_ENDANCHORED, &error, &at, nullptr));
        if (!code_) refuse();
    }

    bool matches(const std::string& name) const {
        const std::unique_ptr<pcre2_match_data, FreeMatch> match(pcre2_match_data_create(1, nullptr));
        const int result = pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(name.data()), name.size(), 0,
                                       0, match.get(), nullptr);
        if (result < 0 && result != PCRE2_ERROR_NOMATCH)
            fail("%s, which takes too long to match with %s", where_.c_str(), name.c_str());
        return result != PCRE2_ERROR_NOMATCH;
    }

  private:
    struct FreeCode {
        void operator()(pcre2_code* code) const { pcre2_code_free(code); }
    };
    struct FreeMatch {
        void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
    };
    [[noreturn]] void refuse() const {
        fail("%s, which is no regular expression of Python's", where_.c_str());
    }

    std::string where_;
    std::unique_ptr<pcre2_code, FreeCode> code_;
};

// The names in a setting that is null, one text or a list of texts. In target_modules and exclude_modules,
// PEFT reads one text as a regular expression.
inline std::vector<std::string> setting_names(const ConfigReader& r, const char* setting) {
    if (!r.has(setting)) return {};
    const nlohmann::json& value = r.json()[setting];
    std::vector<std::string> names;
    for (const nlohmann::json& name : value.is_array() ? value : nlohmann::json::array({value})) {
        if (!name.is_string()) r.refuse(setting, "a text or a list of texts");
        names.push_back(name.get<std::string>());
    }
    return names;
}

// The modules that have a LoRA, according to adapter_config.json.
class TargetModules {
  public:
    explicit TargetModules(const ConfigReader& r)
        : targets_(r, "target_modules"), excluded_(r, "exclude_modules") {
        if (!r.has("target_modules")) fail("%s: 'target_modules' is missing", r.file().c_str());
        all_linear_ = is_text(r, "target_modules") && lowercase(targets_.names[0]) == "all-linear";
        read_layers(r);
    }

    // The setting that excludes a module from LoRA; null if the module has a LoRA. `layer` is its block, or
    // -1 if it is in none. `linear`: it is a linear layer.
    const char* left_out_by(const std::string& module, int layer, bool linear) const {
        if (excluded_.has(module)) return "exclude_modules";
        if (all_linear_) return linear ? nullptr : "target_modules";
        if (!targets_.has(module)) return "target_modules";
        const bool by_whole_name =
            !targets_.pattern && std::ranges::find(targets_.names, module) != targets_.names.end();
        if (by_whole_name || layers_.empty()) return nullptr;  // by whole name: PEFT ignores the layer
        const auto has_list = [&](const NamePattern& list) { return list.matches(module); };
        const bool in_list = lists_.empty() || std::ranges::any_of(lists_, has_list);
        return in_list && std::ranges::find(layers_, layer) != layers_.end() ? nullptr
                                                                             : "layers_to_transform";
    }

  private:
    // Either ends of module names, or one regular expression for a whole name.
    struct Names {
        Names(const ConfigReader& r, const char* setting) : names(setting_names(r, setting)) {
            if (is_text(r, setting) && !names[0].empty())
                pattern = std::make_unique<NamePattern>(names[0], r.file(), setting);
        }
        bool has(const std::string& module) const {
            if (pattern) return pattern->matches(module);
            return std::ranges::any_of(names, [&](const std::string& n) { return is_target(module, n); });
        }
        std::vector<std::string> names;
        std::unique_ptr<NamePattern> pattern;
    };
    static bool is_text(const ConfigReader& r, const char* setting) {
        return r.has(setting) && r.json()[setting].is_string();
    }
    static std::string lowercase(std::string text) {
        for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
        return text;
    }

    // Reads layers_to_transform, one number or several, and layers_pattern, the name of the list of blocks.
    void read_layers(const ConfigReader& r) {
        const bool has_layers = r.has("layers_to_transform");
        const std::vector<std::string> lists = setting_names(r, "layers_pattern");
        for (const char* setting : {"layers_to_transform", "layers_pattern"})
            if (r.has(setting) && targets_.pattern)
                fail("%s: '%s' is for a list of 'target_modules', and these are one expression",
                     r.file().c_str(), setting);
        if (!lists.empty() && !lists[0].empty() && !has_layers)
            fail("%s: 'layers_pattern' needs 'layers_to_transform'", r.file().c_str());
        if (!has_layers) return;
        const nlohmann::json& value = r.json()["layers_to_transform"];
        for (const nlohmann::json& layer : value.is_array() ? value : nlohmann::json::array({value})) {
            if (!layer.is_number_integer())
                r.refuse("layers_to_transform", "a layer's number or a list of them");
            layers_.push_back(layer.get<int64_t>());
        }
        for (const std::string& list : lists)
            if (!list.empty())
                lists_.emplace_back(list, r.file(), "layers_pattern", "(?:|.*?\\.)", "\\.\\d+\\..*");
    }

    Names targets_, excluded_;
    bool all_linear_ = false;
    std::vector<int64_t> layers_;  // empty: all layers
    std::vector<NamePattern> lists_;
};

// The keys of rank_pattern or alpha_pattern: {"expression for the end of a name": value}.
class ValuePatterns {
  public:
    ValuePatterns(const nlohmann::ordered_json& config, const ConfigReader& r, const char* setting) {
        r.object(setting);  // fails if it is not an object
        if (!r.has(setting)) return;
        for (const auto& [key, value] : config[setting].items())
            keys_.push_back({NamePattern(key, r.file(), setting, "(.*\\.)?(", ")"), key});
    }
    // The first key in the file that matches a module; null if none does.
    const char* key_of(const std::string& module) const {
        for (const auto& [pattern, key] : keys_)
            if (pattern.matches(module)) return key.c_str();
        return nullptr;
    }

  private:
    struct Key {
        NamePattern pattern;
        std::string key;
    };
    std::vector<Key> keys_;
};

// Fails if one of these settings is not null, false or empty.
inline void must_be_unset(const ConfigReader& r, std::initializer_list<const char*> settings) {
    for (const char* name : settings) {
        if (!r.has(name)) continue;
        const nlohmann::json& value = r.json()[name];
        if (value != false && !((value.is_array() || value.is_object()) && value.empty()))
            r.refuse(name, "null: it is not supported");
    }
}

// Reports keys that PEFT does not know. PEFT ignores them too.
inline void remark_unknown(const ConfigReader& r,
                           std::initializer_list<std::initializer_list<const char*>> known) {
    for (const auto& item : r.json().items()) {
        const std::string& key = item.key();
        const auto is_key = [&](const char* name) { return key == name; };
        if (std::ranges::none_of(known, [&](const auto& list) { return std::ranges::any_of(list, is_key); }))
            fprintf(stderr, "%s: '%s' is not known, and left out\n", r.file().c_str(),
                    printable(key).c_str());
    }
}

// Fields of all kinds of adapters that do not change what a loaded adapter computes.
inline constexpr std::initializer_list<const char*> kPeftFields = {
    "peft_type", "auto_mapping", "peft_version",  "base_model_name_or_path",
    "revision",  "task_type",    "inference_mode"};

// Fields that are followed: by check_lora_config(), TargetModules, or read_lora_modules() (adapter_files.h).
inline constexpr std::initializer_list<const char*> kLoraFields = {"r",
                                                                   "lora_alpha",
                                                                   "lora_dropout",
                                                                   "use_rslora",
                                                                   "rank_pattern",
                                                                   "alpha_pattern",
                                                                   "target_modules",
                                                                   "exclude_modules",
                                                                   "layers_to_transform",
                                                                   "layers_pattern",
                                                                   "init_lora_weights",
                                                                   "bias"};

// Fields that change nothing. PEFT corrects fan_in_fan_out by the layer's class. Settings for initial values
// do not matter, because the file has the tensors. Others belong to a field that is refused, or matter only
// when PEFT trains.
inline constexpr std::initializer_list<const char*> kIdleLoraFields = {
    "fan_in_fan_out", "megatron_core",     "loftq_config",   "eva_config",         "corda_config",
    "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying"};

// Fields that change the arithmetic and are not supported.
inline constexpr std::initializer_list<const char*> kRefusedLoraFields = {"modules_to_save",
                                                                          "trainable_token_indices",
                                                                          "use_dora",
                                                                          "velora_config",
                                                                          "alora_invocation_tokens",
                                                                          "use_qalora",
                                                                          "monteclora_config",
                                                                          "layer_replication",
                                                                          "lora_bias",
                                                                          "target_parameters",
                                                                          "use_bdlora",
                                                                          "arrow_config",
                                                                          "kasa_config",
                                                                          "megatron_config"};

// Fails on settings that change an adapter's arithmetic and are not supported.
inline void check_lora_config(const ConfigReader& r) {
    r.must_be("task_type", {"CAUSAL_LM"});
    r.must_be("bias", {"none"});
    must_be_unset(r, kRefusedLoraFields);
    // Other methods of initializing also change the model's own weights, and the adapter then fits only
    // those.
    if (r.has("init_lora_weights") && !r.json()["init_lora_weights"].is_boolean())
        r.must_be("init_lora_weights", {"gaussian", "eva", "orthogonal"});
    remark_unknown(r, {kPeftFields, kLoraFields, kIdleLoraFields, kRefusedLoraFields});
}

// A soft prompt's fields: those that are followed, and those that matter only when PEFT trains.
inline constexpr std::initializer_list<const char*> kPromptFields = {
    "num_virtual_tokens", "token_dim", "num_transformer_submodules", "modules_to_save"};
inline constexpr std::initializer_list<const char*> kIdlePromptFields = {
    "num_attention_heads",    "num_layers",      "prompt_tuning_init", "prompt_tuning_init_text",
    "tokenizer_name_or_path", "tokenizer_kwargs"};

inline void check_prompt_config(const ConfigReader& r, const ModelConfig& c) {
    if (r.text("task_type", "") != "CAUSAL_LM")  // without a task_type PEFT ignores the prompt
        r.refuse("task_type", "\"CAUSAL_LM\"");
    r.must_be("num_transformer_submodules", {1});
    must_be_unset(r, {"modules_to_save"});
    r.must_be("token_dim", {c.channels});
    r.must_be("prompt_tuning_init", {"TEXT", "SAMPLE_VOCAB", "RANDOM"});
    remark_unknown(r, {kPeftFields, kPromptFields, kIdlePromptFields});
}
