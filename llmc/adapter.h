// adapter.h - what is trained beside a frozen model: LoRA's matrices at its linear layers (Hu et al.,
// arXiv:2106.09685), or a soft prompt's vectors before its tokens (Lester et al., arXiv:2104.08691). This
// file lists these tensors, gives them PEFT's names, makes the table for their Layout (model.h), and
// describes the frozen model. The computation is in lora.cuh; checkpoint.h writes the files.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/families.h"

// ---- the model that it was trained with
//
// adapter_config.json names its folder. adapter_base.json, a file of our own that PEFT ignores, says how its
// matrices were quantized, and which GGUF file it was, if any:
//
//     {"linear_layers": {"all": "nf4"}, "head": "8bit", "gguf": "/models/llama.gguf"}
//
// Layers and formats have the names of --base, as in messages. What is not quantized is not listed.

struct AdapterBase {
    std::map<std::string, std::string> linear_layers;  // format by layers
    std::string head, gguf;

    bool is_quantized_as(const AdapterBase& o) const {
        return linear_layers == o.linear_layers && head == o.head;
    }
    bool is_quantized() const { return !linear_layers.empty() || !head.empty(); }
    // True if there are options that quantize a model this way.
    bool has_options() const;
    // True if all linear layers are in NF4.
    bool is_nf4() const;
    // The formats as text: "mlp=8bit,attention=nf4".
    std::string layers_text() const;
    // The value of --base that quantizes a model this way: "nf4,head=nf4". A head has the name nf4 for both
    // forms of NF4.
    std::string option_value() const;
    // A description for messages.
    std::string text() const;
    nlohmann::json json() const {
        nlohmann::json json = {{"linear_layers", linear_layers}};
        if (!head.empty()) json["head"] = head;
        if (!gguf.empty()) json["gguf"] = gguf;
        return json;
    }
};

// Reads how the model of a folder's adapter was quantized; nothing if the folder does not say. Fails if the
// file is damaged.
std::optional<AdapterBase> read_adapter_base(const std::string& folder);

// The folder or GGUF file of the model that the adapter in a folder names. A relative name is looked for in
// the current folder first, as PEFT does, then in the adapter's folder, and then among the models that were
// downloaded from Hugging Face. Fails if there is no such model.
std::string find_adapter_model(const std::string& folder);

// True if a model's files say that the model is quantized.
bool is_quantized_model(const std::string& model);

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

constexpr bool is_in_attention(Field field) {
    return field == Field::QkvWeight || field == Field::AttentionWeight;
}

// All linear layers of the model's blocks, in the order of the blocks and of their tables.
std::vector<LinearModule> linear_modules(const ModelConfig& c);

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
Table adapter_table(const AdapterConfig& adapter, const ModelConfig& c, int unit);

// True if PEFT's target_modules entry `target` means this linear layer: it is the layer's whole name, or its
// end after a dot.
inline bool is_target(const std::string& full_name, const std::string& target) {
    return full_name == target || full_name.ends_with("." + target);
}

// True if `target` means this linear layer: it is a name as in the model's files, or "attention", "mlp" or
// "all".
bool is_among(const ModelConfig& c, const LinearModule& m, const std::string& target);
// Fails because the name in an option means no layer.
[[noreturn]] inline void fail_no_layer(const char* option, const std::string& target, const ModelConfig& c) {
    fail("%s %s is no linear layer of this %s; \"all\", \"attention\", \"mlp\" or names as %s", option,
         printable(target), c.family->name, linear_modules(c)[0].name);
}

// A new soft prompt of `tokens` tokens. Their initial values are the embeddings of `text`, if it is not
// empty.
AdapterConfig new_prompt(const ModelConfig& c, int tokens, const std::string& text, const std::string& base);

// The LoRA that the user asks for.
struct LoraOptions {
    int rank = 16;
    double alpha = 32, dropout = 0;
    std::vector<std::string> targets = {"all"};  // names as in the model's files, "attention", "mlp" or "all"
};

// Fails unless the rank is from 1 to the larger dimension of the layer's matrix. From the smaller one on, a
// LoRA has no fewer directions than the matrix, but keys and values of few heads get such ranks beside wider
// layers.
void check_rank(const LinearModule& m, int64_t rank, const std::string& where);

// Reads the adapter in a folder, as PEFT saves it, for a model. Fails naming what is missing, belongs to
// another model, or is not supported.
AdapterConfig read_adapter(const std::string& folder, const ModelConfig& c);

// A new LoRA for a model. `base` is the model's folder, which PEFT wants to know. Fails naming a target that
// is not a linear layer.
AdapterConfig new_lora(const ModelConfig& c, const LoraOptions& o, const std::string& base);
