// adapter_files.h - reads and writes adapters as PEFT saves them: adapter_config.json and
// adapter_model.safetensors. Our own saves also have adapter_base.json (adapter_base.h).
#pragma once

#include <set>
#include <string>
#include <vector>

#include "llmc/adapter.h"
#include "llmc/adapter_targets.h"
#include "llmc/safetensors.h"

// Fails if target_modules names a module that cannot have a LoRA here: embeddings, norms, the head.
inline void check_other_targets(const TargetModules& targets, const ConfigReader& r, const ModelConfig& c) {
    const auto check = [&](const std::string& module, int layer) {
        if (!targets.left_out_by(module, layer, false))
            fail(
                "%s: 'target_modules' has %s, which is no linear layer of a block: only those have a LoRA "
                "here",
                r.file().c_str(), module.c_str());
    };
    const Layout layout(c);
    for (int unit = 0; unit < static_cast<int>(layout.units().size()); unit++)
        for (const Parameter& p : layout.parameters_of(unit))
            for (const Parameter::Part& part : p.parts)
                if (!is_linear(p.field) && part.name.ends_with(".weight"))
                    check(part.name.substr(0, part.name.rfind('.')),
                          unit == 0 || unit > c.layers ? -1 : unit - 1);
    check("lm_head", -1);  // the layout does not list a tied head
}

// Returns whether a module has a LoRA. Fails unless adapter_config.json and the tensors in the file agree on
// that.
inline bool has_lora(const TargetModules& targets, const ConfigReader& r, const std::string& name, int layer,
                     const SafetensorsFile& file) {
    const std::string a = kPeftPrefix + name + ".lora_A.weight", b = kPeftPrefix + name + ".lora_B.weight";
    const bool there = file.find(a) || file.find(b);
    const char* const left_out_by = targets.left_out_by(name, layer, true);
    if (there && left_out_by)
        fail("%s: '%s' leaves out %s, but %s has tensors for it", r.file().c_str(), left_out_by, name.c_str(),
             file.path().c_str());
    if (!there && !left_out_by)
        fail("%s: 'target_modules' has %s, but %s has no tensors for it", r.file().c_str(), name.c_str(),
             file.path().c_str());
    return there;
}

// The linear layers with a LoRA in a file, with their ranks and scales. `r` reads the configuration `config`.
inline std::vector<LinearModule> read_lora_modules(const SafetensorsFile& file,
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
            fail("%s: '%s' says rank %d for %s, and its lora_A in %s has %lld", r.file().c_str(),
                 rank_key ? "rank_pattern" : "r", m.rank, module.c_str(), file.path().c_str(),
                 static_cast<long long>(a->shape[0]));
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
            fail("%s: tensor \"%s\" is of no LoRA at a linear layer of this %s", file.path().c_str(),
                 printable(entry.name).c_str(), c.family->name);
    if (modules.empty())
        fail("%s: 'target_modules', %s, has no linear layer of this %s", r.file().c_str(),
             printable(r.json()["target_modules"].dump()).c_str(), c.family->name);
    return modules;
}

// Reads adapter_config.json and keeps the order of its keys: of two keys of a pattern, the first counts.
inline nlohmann::ordered_json read_adapter_config(const std::string& path) {
    const std::string text = read_text(path);
    parse_json(text, path);  // fails if it is not valid JSON
    return nlohmann::ordered_json::parse(text);
}

// Writes adapter_config.json with its keys in their order.
inline void write_adapter_config(const std::string& path, const nlohmann::ordered_json& config) {
    FileWriter file(path);
    file.write(config.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
    file.finish();
}

// Reads the adapter in a folder, for a model. Fails naming what is missing, belongs to another model, or is
// not supported.
inline AdapterConfig read_adapter(const std::string& folder, const ModelConfig& c) {
    const std::string path = folder + "/" + kAdapterConfigFile;
    if (!file_exists(path)) fail("%s: is no adapter: has no %s", folder.c_str(), kAdapterConfigFile);
    const nlohmann::ordered_json config = read_adapter_config(path);
    const nlohmann::json json = config;
    const ConfigReader r(json, path);
    const std::string type = r.text("peft_type", "");
    if (type != "LORA" && type != "PROMPT_TUNING")
        fail("%s: 'peft_type' is \"%s\"; LORA and PROMPT_TUNING are supported", path.c_str(),
             printable(type).c_str());
    const std::string weights = folder + "/" + kAdapterWeightsFile;
    if (!file_exists(weights)) fail("%s: has no %s", folder.c_str(), kAdapterWeightsFile);
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
                fail("%s: tensor \"%s\" is of no soft prompt", weights.c_str(),
                     printable(entry.name).c_str());
    }
    return adapter;
}
