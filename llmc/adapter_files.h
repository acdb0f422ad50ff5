// adapter_files.h - an adapter on disk, as PEFT saves it: adapter_config.json and adapter_model.safetensors.
#pragma once

#include <regex>
#include <set>
#include <string>
#include <vector>

#include "llmc/adapter.h"
#include "llmc/safetensors.h"

constexpr const char* kAdapterConfigFile = "adapter_config.json";
constexpr const char* kAdapterWeightsFile = "adapter_model.safetensors";

// Whether a folder holds an adapter, and no model.
inline bool is_adapter_folder(const std::string& folder) {
    return file_exists(folder + "/" + kAdapterConfigFile);
}

// The value that a pattern of PEFT's has for a linear layer: {"regular expression of the name's end": value}.
// Fails where an expression is none.
inline double pattern_value(const ConfigReader& config, const char* pattern, const std::string& module,
                            double otherwise) {
    const ConfigReader values = config.object(pattern);
    for (const auto& [key, value] : values.json().items()) {
        bool matches = false;
        try {
            matches = std::regex_match(module, std::regex("(.*\\.)?(" + key + ")"));
        } catch (const std::regex_error&) {
            fail("%s: '%s' has \"%s\", which is no regular expression", config.file().c_str(), pattern,
                 printable(key).c_str());
        }
        if (matches) return values.number(key.c_str(), 0, 1e9);
    }
    return otherwise;
}

// Fails on what changes an adapter's arithmetic and is not computed here.
inline void check_lora_config(const ConfigReader& r) {
    r.must_be("bias", {"none"});
    for (const char* name : {"use_dora", "lora_bias", "use_qalora", "use_bdlora"}) r.must_be(name, {false});
    for (const char* name : {"modules_to_save", "layer_replication", "trainable_token_indices",
                             "target_parameters", "alora_invocation_tokens", "arrow_config"})
        r.must_be(name, {nlohmann::json::array()});
    // Other ways to begin change the model's own weights too, and an adapter is then of those.
    if (r.has("init_lora_weights") && !r.json()["init_lora_weights"].is_boolean())
        r.must_be("init_lora_weights", {"gaussian", "eva", "orthogonal"});
}

// The LoRA in a file: the linear layers that it has tensors for, with their ranks.
inline std::vector<LinearModule> read_lora_modules(const SafetensorsFile& file, const ConfigReader& r,
                                                   const ModelConfig& c) {
    const double alpha = r.number("lora_alpha", 8, 0, 1e9);
    const bool by_root = r.truth("use_rslora", false);
    std::vector<LinearModule> modules;
    std::set<std::string> used;
    for (LinearModule& m : linear_modules(c)) {
        const std::string module = full_name(c, m);
        const std::string a_name = kPeftPrefix + module + ".lora_A.weight";
        const std::string b_name = kPeftPrefix + module + ".lora_B.weight";
        const SafetensorsEntry* a = file.find(a_name);
        if (!a && !file.find(b_name)) continue;
        if (a && a->shape.size() != 2)
            fail("%s: tensor \"%s\" is no matrix", file.path().c_str(), a_name.c_str());
        const int64_t rank = a ? a->shape[0] : 0;
        file.get(a_name, {rank, m.inputs});
        check_rank(m, rank, file.path());
        file.get(b_name, {m.outputs, rank});
        m.rank = static_cast<int>(rank);
        const double scaled = pattern_value(r, "alpha_pattern", module, alpha);
        m.scale = scaled / (by_root ? std::sqrt(static_cast<double>(rank)) : static_cast<double>(rank));
        used.insert({a_name, b_name});
        modules.push_back(std::move(m));
    }
    for (const SafetensorsEntry& entry : file.entries())
        if (!used.contains(entry.name))
            fail("%s: tensor \"%s\" is of no LoRA at a linear layer of this %s", file.path().c_str(),
                 printable(entry.name).c_str(), c.family->name);
    if (modules.empty()) fail("%s: holds no tensors", file.path().c_str());
    return modules;
}

// The adapter in a folder, for a model. Fails naming what is missing, is of another model, or is not computed
// here.
inline AdapterConfig read_adapter(const std::string& folder, const ModelConfig& c) {
    const std::string path = folder + "/" + kAdapterConfigFile;
    if (!file_exists(path)) fail("%s: is no adapter: has no %s", folder.c_str(), kAdapterConfigFile);
    const nlohmann::json json = read_json(path);
    const ConfigReader r(json, path);
    const std::string type = r.text("peft_type", "");
    if (type != "LORA" && type != "PROMPT_TUNING")
        fail("%s: 'peft_type' is \"%s\"; LORA and PROMPT_TUNING are supported", path.c_str(),
             printable(type).c_str());
    const std::string weights = folder + "/" + kAdapterWeightsFile;
    if (!file_exists(weights)) fail("%s: has no %s", folder.c_str(), kAdapterWeightsFile);
    const SafetensorsFile file(weights);
    AdapterConfig adapter;
    adapter.json = json;
    if (type == "LORA") {
        adapter.kind = Trained::Lora;
        check_lora_config(r);
        adapter.modules = read_lora_modules(file, r, c);
        adapter.dropout = r.has("lora_dropout") ? r.number("lora_dropout", -1e-9, 1) : 0;
    } else {
        adapter.kind = Trained::Prompt;
        r.must_be("num_transformer_submodules", {1});
        adapter.prompt_tokens = r.size("num_virtual_tokens", kMostPositions);
        file.get("prompt_embeddings", {adapter.prompt_tokens, c.channels});
        for (const SafetensorsEntry& entry : file.entries())
            if (entry.name != "prompt_embeddings")
                fail("%s: tensor \"%s\" is of no soft prompt", weights.c_str(),
                     printable(entry.name).c_str());
    }
    return adapter;
}
