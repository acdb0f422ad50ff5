// adapter.h - what is trained beside a frozen model: LoRA's matrices at its linear layers (Hu et al.,
// arXiv:2106.09685), or a soft prompt's vectors before its tokens (Lester et al., arXiv:2104.08691). This
// file lists these tensors, gives them PEFT's names, and makes the table for their Layout (model.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/adapter_base.h"
#include "llmc/model.h"

enum class Trained { All, Lora, Prompt };
inline constexpr const char* kTrainedNames[] = {"all", "lora", "prompt"};

// A linear layer as the model's files have it. It is one field of its block or, if a field joins several
// layers, a part of it.
struct LinearModule {
    int layer = 0;
    std::string name;  // without the block's prefix: "self_attn.q_proj"
    Field field = Field::QkvWeight;
    int64_t inputs = 0, outputs = 0;
    int64_t first_output = 0;  // among the outputs of the field
    int rank = 0;              // of its LoRA
    double scale = 0;          // LoRA scale, alpha / rank
};

constexpr bool is_linear(Field field) {
    for (const Field linear : kLinearFields)
        if (field == linear) return true;
    return false;
}
constexpr bool is_in_attention(Field field) {
    return field == Field::QkvWeight || field == Field::AttentionWeight;
}

// All linear layers of the model's blocks, in the order of the blocks and of their tables.
inline std::vector<LinearModule> linear_modules(const ModelConfig& c) {
    std::vector<LinearModule> all;
    const Table table = c.family->block(c);
    for (int l = 0; l < c.layers; l++)
        for (const Row& row : table) {
            if (!is_linear(row.field)) continue;
            int64_t first = 0;
            for (const FileTensor& t : row.parts) {
                const bool by_outputs = c.family->by_outputs;
                const int64_t outputs = by_outputs ? t.shape.rows() : t.shape.columns();
                all.push_back({.layer = l,
                               .name = t.name.substr(0, t.name.rfind(".weight")),
                               .field = row.field,
                               .inputs = by_outputs ? t.shape.columns() : t.shape.rows(),
                               .outputs = outputs,
                               .first_output = first});
                first += outputs;
            }
        }
    return all;
}

// A layer's whole name in the model's files: "model.layers.0.self_attn.q_proj".
inline std::string full_name(const ModelConfig& c, const LinearModule& m) {
    return c.family->prefix + block_prefix(*c.family, m.layer) + m.name;
}

// What is trained beside a frozen model.
struct AdapterConfig {
    Trained kind = Trained::All;        // All: the model itself is trained, without an adapter
    std::vector<LinearModule> modules;  // the layers with LoRA, in the order of linear_modules()
    double dropout = 0;                 // LoRA's dropout of its inputs
    int prompt_tokens = 0;
    nlohmann::ordered_json json;      // adapter_config.json
    std::optional<AdapterBase> base;  // the model that the adapter was trained with, if known

    explicit operator bool() const { return kind != Trained::All; }
};

constexpr const char* kPeftPrefix = "base_model.model.";

// The rows of the adapter's table for one unit. For each field with LoRA: one A with all its parts, then one
// B for each part.
inline Table adapter_table(const AdapterConfig& adapter, const ModelConfig& c, int unit) {
    Table table;
    if (unit == 0 && adapter.prompt_tokens > 0)
        table.push_back({Field::SoftPrompt,
                         {{"prompt_embeddings", {adapter.prompt_tokens, c.channels}, false}},
                         Init::Normal,
                         true});
    for (size_t i = 0; i < adapter.modules.size();) {
        const LinearModule& first = adapter.modules[i];
        size_t end = i + 1;
        while (end < adapter.modules.size() && adapter.modules[end].layer == first.layer &&
               adapter.modules[end].field == first.field)
            end++;
        if (first.layer + 1 == unit) {
            Row a{first.field, {}, Init::Uniform, true, false, first.name + ".lora_A", {LoraRole::A}};
            for (size_t k = i; k < end; k++)
                a.parts.push_back(
                    {adapter.modules[k].name + ".lora_A.weight", {adapter.modules[k].rank, first.inputs}});
            table.push_back(std::move(a));
            for (size_t k = i; k < end; k++) {
                const LinearModule& m = adapter.modules[k];
                table.push_back({first.field,
                                 {{m.name + ".lora_B.weight", {m.outputs, m.rank}}},
                                 Init::Zero,
                                 true,
                                 false,
                                 m.name + ".lora_B",
                                 {LoraRole::B, m.first_output, static_cast<float>(m.scale)}});
            }
        }
        i = end;
    }
    return table;
}

// The Layout of everything that is trained: the model's tensors, or the adapter's. It has as many units as
// the model; units of an adapter may be empty.
inline Layout trained_layout(const ModelConfig& c, const AdapterConfig& adapter) {
    if (!adapter) return Layout(c);
    return Layout(c, kPeftPrefix + std::string(c.family->prefix),
                  [&](int unit) { return adapter_table(adapter, c, unit); });
}

// True if PEFT's target_modules entry `target` means this linear layer: it is the layer's whole name, or its
// end after a dot.
inline bool is_target(const std::string& full_name, const std::string& target) {
    return full_name == target || full_name.ends_with("." + target);
}

// True if `target` means this linear layer: it is a name as in the model's files, or "attention", "mlp" or
// "all".
inline bool is_among(const ModelConfig& c, const LinearModule& m, const std::string& target) {
    return target == "all" || (target == "attention" && is_in_attention(m.field)) ||
           (target == "mlp" && !is_in_attention(m.field)) || is_target(full_name(c, m), target);
}
// Fails because the name in an option means no layer.
[[noreturn]] inline void fail_no_layer(const char* option, const std::string& target, const ModelConfig& c) {
    fail("%s %s: is no linear layer of this %s; \"all\", \"attention\", \"mlp\" or names as %s", option,
         printable(target).c_str(), c.family->name, linear_modules(c)[0].name.c_str());
}

// A new soft prompt of `tokens` tokens. Their initial values are the embeddings of `text`, if it is not
// empty.
inline AdapterConfig new_prompt(const ModelConfig& c, int tokens, const std::string& text,
                                const std::string& base) {
    AdapterConfig adapter{
        .kind = Trained::Prompt, .modules = {}, .prompt_tokens = tokens, .json = {}, .base = {}};
    nlohmann::json json = {
        {"peft_type", "PROMPT_TUNING"},    {"task_type", "CAUSAL_LM"},
        {"base_model_name_or_path", base}, {"inference_mode", true},
        {"num_virtual_tokens", tokens},    {"token_dim", c.channels},
        {"num_layers", c.layers},          {"num_attention_heads", c.heads},
        {"num_transformer_submodules", 1}, {"prompt_tuning_init", text.empty() ? "SAMPLE_VOCAB" : "TEXT"},
        {"tokenizer_name_or_path", base}};
    if (!text.empty()) json["prompt_tuning_init_text"] = text;
    adapter.json = json;  // sorted, as PEFT writes it
    return adapter;
}

// The LoRA that the user asks for.
struct LoraOptions {
    int rank = 16;
    double alpha = 32, dropout = 0;
    std::vector<std::string> targets = {"all"};  // names as in the model's files, "attention", "mlp" or "all"
};

// Fails unless the rank is from 1 to the smaller dimension of the layer's matrix.
inline void check_rank(const LinearModule& m, int64_t rank, const std::string& where) {
    const int64_t most = std::min(m.inputs, m.outputs);
    if (rank < 1 || rank > most)
        fail("%s: rank %lld at %s, whose matrix is %lld x %lld: 1 to %lld", where.c_str(),
             static_cast<long long>(rank), m.name.c_str(), static_cast<long long>(m.outputs),
             static_cast<long long>(m.inputs), static_cast<long long>(most));
}

// A new LoRA for a model. `base` is the model's folder, which PEFT wants to know. Fails naming a target that
// is not a linear layer.
inline AdapterConfig new_lora(const ModelConfig& c, const LoraOptions& o, const std::string& base) {
    AdapterConfig adapter{.kind = Trained::Lora, .modules = {}, .dropout = o.dropout, .json = {}, .base = {}};
    std::vector<bool> found(o.targets.size());
    std::vector<std::string> names, whole_names;
    for (LinearModule& m : linear_modules(c)) {
        const std::string whole_name = full_name(c, m);
        bool wanted = false;
        for (size_t i = 0; i < o.targets.size(); i++)
            if (is_among(c, m, o.targets[i])) wanted = found[i] = true;
        if (!wanted) continue;
        check_rank(m, o.rank, "--lora-rank " + std::to_string(o.rank));
        m.rank = o.rank;
        m.scale = o.alpha / o.rank;
        if (std::find(names.begin(), names.end(), m.name) == names.end()) names.push_back(m.name);
        whole_names.push_back(whole_name);
        adapter.modules.push_back(std::move(m));
    }
    for (size_t i = 0; i < found.size(); i++)
        if (!found[i]) fail_no_layer("--lora-targets", o.targets[i], c);
    const bool in_each_block = whole_names.size() == names.size() * static_cast<size_t>(c.layers);
    // Sorted, as PEFT writes it.
    const nlohmann::json json = {{"peft_type", "LORA"},
                                 {"task_type", "CAUSAL_LM"},
                                 {"base_model_name_or_path", base},
                                 {"inference_mode", true},
                                 {"r", o.rank},
                                 {"lora_alpha", o.alpha},
                                 {"lora_dropout", o.dropout},
                                 {"target_modules", in_each_block ? names : whole_names},
                                 {"fan_in_fan_out", !c.family->by_outputs},
                                 {"bias", "none"},
                                 {"use_rslora", false},
                                 {"init_lora_weights", true}};
    adapter.json = json;
    return adapter;
}
