// adapter.h - what is trained beside a frozen model: LoRA's matrices at its linear layers (Hu et al.,
// arXiv:2106.09685), or a soft prompt's vectors before its tokens (Lester et al., arXiv:2104.08691). This
// file lists these tensors, gives them PEFT's names, makes the table for their Layout (model.h), and
// describes the frozen model. The computation is in lora.cuh, the files are in adapter_files.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/file.h"
#include "llmc/model_names.h"
#include "llmc/model.h"
#include "llmc/save_folder.h"

// ---- the model that it was trained with
//
// The model that an adapter was trained with. adapter_config.json names its folder. adapter_base.json, a file
// of our own that PEFT ignores, says how its matrices were quantized, and which GGUF file it was, if any:
//
//     {"linear_layers": {"all": "nf4"}, "head": "8bit", "gguf": "/models/llama.gguf"}
//
// Layers and formats have the names of --base, as in messages. What is not quantized is not listed.

constexpr const char* kAdapterConfigFile = "adapter_config.json";
constexpr const char* kAdapterWeightsFile = "adapter_model.safetensors";
constexpr const char* kAdapterBaseFile = "adapter_base.json";

// True if a folder has an adapter, not a model.
inline bool is_adapter_folder(const std::string& folder) {
    return file_exists(folder + "/" + kAdapterConfigFile);
}

struct AdapterBase {
    std::map<std::string, std::string> linear_layers;  // format by layers
    std::string head, gguf;

    bool is_quantized_as(const AdapterBase& o) const {
        return linear_layers == o.linear_layers && head == o.head;
    }
    bool is_quantized() const { return !linear_layers.empty() || !head.empty(); }
    // True if there are options that quantize a model this way.
    bool has_options() const {
        for (const auto& [layers, format] : linear_layers)
            if (format != "nf4" && format != "nf4-double" && format != "8bit") return false;
        return true;
    }
    // True if all linear layers are in NF4.
    bool is_nf4() const {
        return linear_layers.size() == 1 && linear_layers.contains("all") &&
               linear_layers.at("all") != "8bit";
    }
    // The formats as text: "mlp=8bit,attention=nf4".
    std::string layers_text() const {
        std::string text;
        for (const auto& [layers, format] : linear_layers)
            text += (text.empty() ? "" : ",") + layers + "=" + format;
        return text;
    }
    // The value of --base that quantizes a model this way: "nf4,head=nf4". A head has the name nf4 for both
    // forms of NF4.
    std::string option_value() const {
        std::string text = is_nf4() ? linear_layers.at("all") : layers_text();
        if (!head.empty())
            text += (text.empty() ? "" : ",") + ("head=" + (head == "nf4-double" ? "nf4" : head));
        return text;
    }
    // A description for messages.
    std::string text() const {
        if (!is_quantized()) return "that is not quantized";
        const std::string layers = layers_text();
        std::string text = "with " + (layers.size() > 60 ? layers.substr(0, 60) + "..." : layers);
        if (!head.empty()) text = linear_layers.empty() ? "with head=" + head : text + ",head=" + head;
        return text;
    }
    nlohmann::json json() const {
        nlohmann::json json = {{"linear_layers", nlohmann::json::object()}};
        for (const auto& [layers, format] : linear_layers) json["linear_layers"][layers] = format;
        if (!head.empty()) json["head"] = head;
        if (!gguf.empty()) json["gguf"] = gguf;
        return json;
    }
};

// Reads how the model of a folder's adapter was quantized; nothing if the folder does not say. Fails if the
// file is damaged.
inline std::optional<AdapterBase> read_adapter_base(const std::string& folder) {
    const std::string path = folder + "/" + kAdapterBaseFile;
    if (!file_exists(path)) return std::nullopt;
    const nlohmann::json json = read_json(path);
    AdapterBase base;
    const auto text = [&](const nlohmann::json& value) {
        if (!value.is_string()) fail("%s: formats are texts", path.c_str());
        return value.get<std::string>();
    };
    const bool good = json.is_object() && json.contains("linear_layers") && json["linear_layers"].is_object();
    if (!good) fail("%s: \"linear_layers\" must be an object", path.c_str());
    for (const auto& [layers, format] : json["linear_layers"].items())
        base.linear_layers[layers] = text(format);
    if (json.contains("head")) base.head = text(json["head"]);
    if (json.contains("gguf")) base.gguf = text(json["gguf"]);
    return base;
}

// The folder or GGUF file of the model that the adapter in a folder names. A relative name is looked for in
// the current folder first, as PEFT does, then in the adapter's folder, and then among the models that were
// downloaded from Hugging Face. Fails if there is no such model.
inline std::string find_adapter_model(const std::string& folder) {
    const std::string path = resolve_save(folder) + "/" + kAdapterConfigFile;
    const nlohmann::json json = read_json(path);
    const bool named = json.is_object() && json.contains("base_model_name_or_path") &&
                       json["base_model_name_or_path"].is_string();
    const std::string name = named ? json["base_model_name_or_path"].get<std::string>() : "";
    const auto is_model = [](const std::string& model) {
        return file_exists(model + "/config.json") || (model.ends_with(".gguf") && file_exists(model));
    };
    const std::optional<AdapterBase> base = read_adapter_base(resolve_save(folder));
    if (base && is_model(base->gguf)) return base->gguf;
    if (!name.empty())
        for (const std::string& model : {name, (std::filesystem::path(folder) / name).string()})
            if (is_model(model)) return model;
    const bool has_revision = json.is_object() && json.contains("revision") && json["revision"].is_string();
    const std::string revision = has_revision ? json["revision"].get<std::string>() : "";
    if (is_hub_name(name) && !hub_snapshot(name, revision).empty())
        return find_on_hub("--model", name, false, revision);
    fail(
        "--model %s is an adapter, and the model that it is of, '%s'%s, is no folder here%s: give that as "
        "--model and this as --adapter",
        folder.c_str(), printable(name).c_str(),
        revision.empty() ? "" : format(" of revision '%s'", printable(revision).c_str()).c_str(),
        is_hub_name(name) ? format(", and not in %s", hub_cache().c_str()).c_str() : "");
}

// True if a model's files say that the model is quantized.
inline bool is_quantized_model(const std::string& model) {
    if (model.ends_with(".gguf")) return true;
    const nlohmann::json config = read_json(model + "/config.json");
    return config.is_object() && config.contains("quantization_config");
}

// ---- the adapter's tensors

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
    for (int l = 0; l < c.layers; l++)
        for (const Row& row : c.family->block(c, c.layer(l))) {
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
    fail("%s %s is no linear layer of this %s; \"all\", \"attention\", \"mlp\" or names as %s", option,
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

// Fails unless the rank is from 1 to the larger dimension of the layer's matrix. From the smaller one on, a
// LoRA has no fewer directions than the matrix, but keys and values of few heads get such ranks beside wider
// layers.
inline void check_rank(const LinearModule& m, int64_t rank, const std::string& where) {
    const int64_t most = std::max(m.inputs, m.outputs);
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
