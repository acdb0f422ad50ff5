// adapter.cpp - new adapters, their tables of tensors, and the models that they are of.
#include "llmc/adapter.h"

#include <filesystem>

#include "llmc/model_names.h"
#include "llmc/save_folder.h"

std::optional<AdapterBase> read_adapter_base(const std::string& folder) {
    const std::string path = folder + "/" + kAdapterBaseFile;
    if (!file_exists(path)) return std::nullopt;
    const nlohmann::json json = read_json(path);
    AdapterBase base;
    const auto text = [&](const nlohmann::json& value) {
        if (!value.is_string()) fail("%s: formats are texts", path);
        return value.get<std::string>();
    };
    const bool good = json.is_object() && json.contains("linear_layers") && json["linear_layers"].is_object();
    if (!good) fail("%s: \"linear_layers\" must be an object", path);
    for (const auto& [layers, format] : json["linear_layers"].items())
        base.linear_layers[layers] = text(format);
    if (json.contains("head")) base.head = text(json["head"]);
    if (json.contains("gguf")) base.gguf = text(json["gguf"]);
    return base;
}

std::string find_adapter_model(const std::string& folder) {
    const std::string path = resolve_save(folder) + "/" + kAdapterConfigFile;
    const nlohmann::json json = read_json(path);
    const auto text = [&](const char* key) -> std::string {
        return json.is_object() && json.contains(key) && json[key].is_string() ? json[key] : "";
    };
    const std::string name = text("base_model_name_or_path"), revision = text("revision");
    const auto is_model = [](const std::string& model) {
        return file_exists(model + "/config.json") || (model.ends_with(".gguf") && file_exists(model));
    };
    const std::optional<AdapterBase> base = read_adapter_base(resolve_save(folder));
    if (base && is_model(base->gguf)) return base->gguf;
    if (!name.empty())
        for (const std::string& model : {name, (std::filesystem::path(folder) / name).string()})
            if (is_model(model)) return model;
    if (is_hub_name(name) && !hub_snapshot(name, revision).empty())
        return find_on_hub("--model", name, false, revision);
    fail(
        "--model %s is an adapter, and the model that it is of, '%s'%s, is no folder here%s: give that as "
        "--model and this as --adapter",
        folder, printable(name), revision.empty() ? "" : format(" of revision '%s'", printable(revision)),
        is_hub_name(name) ? format(", and not in %s", hub_cache()) : "");
}

bool is_quantized_model(const std::string& model) {
    if (model.ends_with(".gguf")) return true;
    const nlohmann::json config = read_json(model + "/config.json");
    return config.is_object() && config.contains("quantization_config");
}

std::vector<LinearModule> linear_modules(const ModelConfig& c) {
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

Table adapter_table(const AdapterConfig& adapter, const ModelConfig& c, int unit) {
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

bool is_among(const ModelConfig& c, const LinearModule& m, const std::string& target) {
    return target == "all" || (target == "attention" && is_in_attention(m.field)) ||
           (target == "mlp" && !is_in_attention(m.field)) || is_target(full_name(c, m), target);
}

AdapterConfig new_prompt(const ModelConfig& c, int tokens, const std::string& text, const std::string& base) {
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

void check_rank(const LinearModule& m, int64_t rank, const std::string& where) {
    const int64_t most = std::max(m.inputs, m.outputs);
    if (rank < 1 || rank > most)
        fail("%s: rank %ld at %s, whose matrix is %ld x %ld: 1 to %ld", where, rank, m.name, m.outputs,
             m.inputs, most);
}

AdapterConfig new_lora(const ModelConfig& c, const LoraOptions& o, const std::string& base) {
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
        if (std::ranges::find(names, m.name) == names.end()) names.push_back(m.name);
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

bool AdapterBase::has_options() const {
    for (const auto& [layers, format] : linear_layers)
        if (format != "nf4" && format != "nf4-double" && format != "8bit") return false;
    return true;
}

bool AdapterBase::is_nf4() const {
    return linear_layers.size() == 1 && linear_layers.contains("all") && linear_layers.at("all") != "8bit";
}

std::string AdapterBase::layers_text() const {
    return joined(linear_layers, ",", [](const auto& item) { return item.first + "=" + item.second; });
}

std::string AdapterBase::option_value() const {
    std::string text = is_nf4() ? linear_layers.at("all") : layers_text();
    if (!head.empty()) text += (text.empty() ? "" : ",") + ("head=" + (head == "nf4-double" ? "nf4" : head));
    return text;
}

std::string AdapterBase::text() const {
    if (!is_quantized()) return "that is not quantized";
    const std::string layers = layers_text();
    std::string text = "with " + (layers.size() > 60 ? layers.substr(0, 60) + "..." : layers);
    if (!head.empty()) text = linear_layers.empty() ? "with head=" + head : text + ",head=" + head;
    return text;
}
