// adapter_base.h - the model that an adapter was trained with. adapter_config.json names its folder.
// adapter_base.json, a file of our own that PEFT ignores, says how its matrices were quantized:
//
//     {"linear_layers": {"all": "nf4"}, "head": "8bit"}
//
// Layers and formats have the names of --base, as in messages. What is not quantized is not
// listed.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <system_error>

#include <nlohmann/json.hpp>

#include "llmc/file.h"
#include "llmc/save_folder.h"

constexpr const char* kAdapterConfigFile = "adapter_config.json";
constexpr const char* kAdapterWeightsFile = "adapter_model.safetensors";
constexpr const char* kAdapterBaseFile = "adapter_base.json";

// True if a folder has an adapter, not a model.
inline bool is_adapter_folder(const std::string& folder) {
    return file_exists(folder + "/" + kAdapterConfigFile);
}

struct AdapterBase {
    std::map<std::string, std::string> linear_layers;  // format by layers
    std::string head;

    bool operator==(const AdapterBase&) const = default;
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
    return base;
}

// The folder or GGUF file of the model that the adapter in a folder names. A relative name is looked for in
// the current folder first, as PEFT does, and then in the adapter's folder. Fails if there is no such model,
// for example because it is a name on a hub.
inline std::string find_adapter_model(const std::string& folder) {
    const std::string path = resolve_save(folder) + "/" + kAdapterConfigFile;
    const nlohmann::json json = read_json(path);
    const bool named = json.is_object() && json.contains("base_model_name_or_path") &&
                       json["base_model_name_or_path"].is_string();
    const std::string name = named ? json["base_model_name_or_path"].get<std::string>() : "";
    const auto is_model = [](const std::string& model) {
        return file_exists(model + "/config.json") || (model.ends_with(".gguf") && file_exists(model));
    };
    if (!name.empty())
        for (const std::string& model : {name, (std::filesystem::path(folder) / name).string()})
            if (is_model(model)) return model;
    fail(
        "--model %s: is an adapter, and the model that it is of, '%s', is no folder here: give that as "
        "--model and "
        "this as --adapter",
        folder.c_str(), printable(name).c_str());
}

// True if a model's files say that the model is quantized.
inline bool is_quantized_model(const std::string& model) {
    if (model.ends_with(".gguf")) return true;
    const nlohmann::json config = read_json(model + "/config.json");
    return config.is_object() && config.contains("quantization_config");
}
