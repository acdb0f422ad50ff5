// adapter_files.cpp - reads adapters as PEFT saves them: which settings of an adapter_config.json are
// followed, refused or without effect, and whether the tensors of an adapter are those that it names.
#include "llmc/adapter.h"

#include <cctype>
#include <cmath>
#include <memory>
#include <set>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "llmc/safetensors.h"
#include "llmc/save_folder.h"

// ---- adapter_config.json
//
// Interprets a LoRA's adapter_config.json as PEFT does: which linear layers have a LoRA, with which rank and
// scale, and which settings are refused. Read this when PEFT gets a new field.

// A regular expression that PEFT passes to Python's `re`. It must match a layer's whole name.
class NamePattern {
  public:
    // Compiles `before` + pattern + `after`. Fails naming the setting if the pattern is not a regular
    // expression of Python's. PCRE2 knows all of Python's syntax and more; the rest is refused: verbs such as
    // "(*ACCEPT)", recursion such as "(?R)", and further escapes.
    NamePattern(const std::string& pattern, const std::string& file, const char* setting,
                const char* before = "", const char* after = "")
        : where_(format("%s: '%s' has \"%s\"", file, setting, printable(pattern))) {
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
                                  PCRE2_ANCHORED | PCRE2_ENDANCHORED, &error, &at, nullptr),
                    pcre2_code_free);
        if (!code_) refuse();
    }

    bool matches(const std::string& name) const {
        const std::shared_ptr<pcre2_match_data> match(pcre2_match_data_create(1, nullptr),
                                                      pcre2_match_data_free);
        const int result = pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(name.data()), name.size(), 0,
                                       0, match.get(), nullptr);
        if (result < 0 && result != PCRE2_ERROR_NOMATCH)
            fail("%s, which takes too long to match with %s", where_, name);
        return result != PCRE2_ERROR_NOMATCH;
    }

  private:
    [[noreturn]] void refuse() const { fail("%s, which is no regular expression of Python's", where_); }

    std::string where_;
    std::shared_ptr<pcre2_code> code_;
};

// The names in a setting that is null, one text or a list of texts. In target_modules and exclude_modules,
// PEFT reads one text as a regular expression.
static std::vector<std::string> setting_names(const ConfigReader& r, const char* setting) {
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
        if (!r.has("target_modules")) fail("%s: 'target_modules' is missing", r.file());
        all_linear_ = is_text(r, "target_modules") && lower(targets_.names[0]) == "all-linear";
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

    // Reads layers_to_transform, one number or several, and layers_pattern, the name of the list of blocks.
    void read_layers(const ConfigReader& r) {
        const bool has_layers = r.has("layers_to_transform");
        const std::vector<std::string> lists = setting_names(r, "layers_pattern");
        for (const char* setting : {"layers_to_transform", "layers_pattern"})
            if (r.has(setting) && targets_.pattern)
                fail("%s: '%s' is for a list of 'target_modules', and these are one expression", r.file(),
                     setting);
        if (!lists.empty() && !lists[0].empty() && !has_layers)
            fail("%s: 'layers_pattern' needs 'layers_to_transform'", r.file());
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
            keys_.emplace_back(NamePattern(key, r.file(), setting, "(.*\\.)?(", ")"), key);
    }
    // The first key in the file that matches a module; null if none does.
    const char* key_of(const std::string& module) const {
        for (const auto& [pattern, key] : keys_)
            if (pattern.matches(module)) return key.c_str();
        return nullptr;
    }

  private:
    std::vector<std::pair<NamePattern, std::string>> keys_;
};

// Fails if one of these settings is not null, false or empty.
static void must_be_unset(const ConfigReader& r, const char* settings) {
    for (const std::string& name : words_of(settings)) {
        if (!r.has(name.c_str())) continue;
        const nlohmann::json& value = r.json()[name];
        if (value != false && !((value.is_array() || value.is_object()) && value.empty()))
            r.refuse(name, "null: it is not supported");
    }
}

// Reports keys that PEFT does not know. PEFT ignores them too.
static void remark_unknown(const ConfigReader& r, std::initializer_list<const char*> known) {
    for (const auto& item : r.json().items()) {
        const auto has_key = [&](const char* fields) { return has_word(fields, item.key()); };
        if (std::ranges::none_of(known, has_key))
            print(stderr, "%s: '%s' is not known, and left out\n", r.file(), printable(item.key()));
    }
}

// Fields of all kinds of adapters that do not change what a loaded adapter computes.
constexpr const char* kPeftFields =
    "peft_type auto_mapping peft_version base_model_name_or_path revision task_type inference_mode";

// Fields that are followed: by check_lora_config(), TargetModules, or read_lora_modules().
constexpr const char* kLoraFields =
    "r lora_alpha lora_dropout use_rslora rank_pattern alpha_pattern target_modules exclude_modules "
    "layers_to_transform layers_pattern init_lora_weights bias";

// Fields that change nothing. PEFT corrects fan_in_fan_out by the layer's class. Settings for initial values
// do not matter, because the file has the tensors. Others belong to a field that is refused, or matter only
// when PEFT trains.
constexpr const char* kIdleLoraFields =
    "fan_in_fan_out megatron_core loftq_config eva_config corda_config lora_ga_config qalora_group_size "
    "runtime_config ensure_weight_tying";

// Fields that change the arithmetic and are not supported.
constexpr const char* kRefusedLoraFields =
    "modules_to_save trainable_token_indices use_dora velora_config alora_invocation_tokens use_qalora "
    "monteclora_config layer_replication lora_bias target_parameters use_bdlora arrow_config kasa_config "
    "megatron_config";

// Fails on settings that change an adapter's arithmetic and are not supported.
static void check_lora_config(const ConfigReader& r) {
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
constexpr const char* kPromptFields =
    "num_virtual_tokens token_dim num_transformer_submodules modules_to_save";
constexpr const char* kIdlePromptFields =
    "num_attention_heads num_layers prompt_tuning_init prompt_tuning_init_text tokenizer_name_or_path "
    "tokenizer_kwargs";

static void check_prompt_config(const ConfigReader& r, const ModelConfig& c) {
    if (r.text("task_type", "") != "CAUSAL_LM")  // without a task_type PEFT ignores the prompt
        r.refuse("task_type", "\"CAUSAL_LM\"");
    r.must_be("num_transformer_submodules", {1});
    must_be_unset(r, "modules_to_save");
    r.must_be("token_dim", {c.channels});
    r.must_be("prompt_tuning_init", {"TEXT", "SAMPLE_VOCAB", "RANDOM"});
    remark_unknown(r, {kPeftFields, kPromptFields, kIdlePromptFields});
}

// ---- the tensors

// Fails if target_modules names a module that cannot have a LoRA here: embeddings, norms, the head.
static void check_other_targets(const TargetModules& targets, const ConfigReader& r, const ModelConfig& c) {
    const auto check = [&](const std::string& module, int layer) {
        if (!targets.left_out_by(module, layer, false))
            fail(
                "%s: 'target_modules' has %s, which is no linear layer of a block: only those have a LoRA "
                "here",
                r.file(), module);
    };
    for_each_tensor(c, [&](const std::string& name, const FileTensor&, Field field, int layer) {
        if (!is_linear(field) && name.ends_with(".weight")) check(name.substr(0, name.rfind('.')), layer);
    });
    check("lm_head", -1);  // no table lists a tied head
}

// Returns whether a module has a LoRA. Fails unless adapter_config.json and the tensors in the file agree on
// that.
static bool has_lora(const TargetModules& targets, const ConfigReader& r, const std::string& name, int layer,
                     const SafetensorsFile& file) {
    const std::string a = kPeftPrefix + name + ".lora_A.weight", b = kPeftPrefix + name + ".lora_B.weight";
    const bool there = file.find(a) || file.find(b);
    const char* const left_out_by = targets.left_out_by(name, layer, true);
    if (there && left_out_by)
        fail("%s: '%s' leaves out %s, but %s has tensors for it", r.file(), left_out_by, name, file.path());
    if (!there && !left_out_by)
        fail("%s: 'target_modules' has %s, but %s has no tensors for it", r.file(), name, file.path());
    return there;
}

// The linear layers with a LoRA in a file, with their ranks and scales. `r` reads the configuration `config`.
static std::vector<LinearModule> read_lora_modules(const SafetensorsFile& file,
                                                   const nlohmann::ordered_json& config,
                                                   const ConfigReader& r, const ModelConfig& c) {
    const TargetModules targets(r);
    const ValuePatterns ranks(config, r, "rank_pattern"), alphas(config, r, "alpha_pattern");
    const int rank_of_all = r.has("r") ? r.integer("r", 1, INT32_MAX) : 8;
    const double alpha_of_all = r.number("lora_alpha", 8, 0, 1e9);
    const bool by_root = r.truth("use_rslora", false);
    check_other_targets(targets, r, c);
    std::vector<LinearModule> modules;
    std::set<std::string> used;
    for (LinearModule& m : linear_modules(c)) {
        const std::string module = full_name(c, m);
        if (!has_lora(targets, r, module, m.layer, file)) continue;
        const char* const rank_key = ranks.key_of(module);
        m.rank = rank_key ? r.object("rank_pattern").integer(rank_key, 1, INT32_MAX) : rank_of_all;
        const std::string a_name = kPeftPrefix + module + ".lora_A.weight";
        const std::string b_name = kPeftPrefix + module + ".lora_B.weight";
        const SafetensorsEntry* const a = file.find(a_name);
        if (a && a->shape.size() == 2 && a->shape[0] != m.rank)
            fail("%s: '%s' says rank %d for %s, and its lora_A in %s has %ld", r.file(),
                 rank_key ? "rank_pattern" : "r", m.rank, module, file.path(), a->shape[0]);
        check_rank(m, m.rank, file.path());
        file.get(a_name, {m.rank, m.inputs});
        file.get(b_name, {m.outputs, m.rank});
        const char* const alpha_key = alphas.key_of(module);
        const double alpha = alpha_key ? r.object("alpha_pattern").number(alpha_key, 0, 1e9) : alpha_of_all;
        m.scale = alpha / (by_root ? std::sqrt(static_cast<double>(m.rank)) : static_cast<double>(m.rank));
        used.insert({a_name, b_name});
        modules.push_back(std::move(m));
    }
    for (const SafetensorsEntry& entry : file.entries())
        if (!used.contains(entry.name))
            fail("%s: tensor \"%s\" is of no LoRA at a linear layer of this %s", file.path(),
                 printable(entry.name), c.family->name);
    if (modules.empty())
        fail("%s: 'target_modules', %s, has no linear layer of this %s", r.file(),
             printable(r.json()["target_modules"].dump()), c.family->name);
    return modules;
}

AdapterConfig read_adapter(const std::string& folder, const ModelConfig& c) {
    const std::string path = folder + "/" + kAdapterConfigFile;
    if (!file_exists(folder))
        fail("%s is no adapter: there is no such folder; --train lora begins a new one", folder);
    if (!file_exists(path)) fail("%s is no adapter: it has no %s", folder, kAdapterConfigFile);
    const nlohmann::ordered_json config = read_ordered_json(path);
    const nlohmann::json json = config;
    const ConfigReader r(json, path);
    const std::string type = r.text("peft_type", "");
    if (type != "LORA" && type != "PROMPT_TUNING")
        fail("%s: 'peft_type' is \"%s\"; LORA and PROMPT_TUNING are supported", path, printable(type));
    const std::string weights = folder + "/" + kAdapterWeightsFile;
    if (!file_exists(weights)) fail("%s has no %s", folder, kAdapterWeightsFile);
    const SafetensorsFile file(weights);
    AdapterConfig adapter;
    adapter.json = config;
    adapter.base = read_adapter_base(folder);
    if (type == "LORA") {
        adapter.kind = Trained::Lora;
        check_lora_config(r);
        adapter.modules = read_lora_modules(file, config, r, c);
        adapter.dropout = r.has("lora_dropout") ? r.number("lora_dropout", -1e-9, 1) : 0;
    } else {
        adapter.kind = Trained::Prompt;
        check_prompt_config(r, c);
        adapter.prompt_tokens = r.size("num_virtual_tokens", kMostPositions);
        file.get("prompt_embeddings", {adapter.prompt_tokens, c.channels});
        for (const SafetensorsEntry& entry : file.entries())
            if (entry.name != "prompt_embeddings")
                fail("%s: tensor \"%s\" is of no soft prompt", weights, printable(entry.name));
    }
    return adapter;
}
