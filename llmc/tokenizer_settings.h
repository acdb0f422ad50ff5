// tokenizer_settings.h - what the files beside a vocabulary say of a tokenizer, as transformers 5 reads them:
// special and added tokens, and the class, which may replace components of a tokenizer.json. The readers of
// vocabularies need it, and whoever asks for the special tokens that a chat template names.
//
// dev/guide/data.md lists the settings that are followed, refused, and without effect.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/tokenizer_vocabulary.h"

// ---- what the files say

// A text, or the "content" of a token that is described by an object; else "".
inline std::string content_of(const nlohmann::json& token) {
    const nlohmann::json text = token.is_object() ? token.value("content", nlohmann::json()) : token;
    return text.is_string() ? text.get<std::string>() : "";
}

// A setting that is true or false; `usual` if it is missing.
inline bool truth_of(const nlohmann::json& settings, const char* key, bool usual) {
    return settings.value(key, nlohmann::json(usual)) == true;
}

// The object in a JSON file of a folder, empty if there is no such file. Fails if it is no object.
inline nlohmann::json read_object(const std::string& folder, const char* name) {
    const std::string path = folder + "/" + name;
    nlohmann::json file = file_exists(path) ? read_json(path) : nlohmann::json::object();
    if (!file.is_object()) fail("%s is not a JSON object", path);
    return file;
}

inline constexpr const char* kSpecialTokens[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                                 "pad_token", "cls_token", "mask_token"};

// True for classes that have components of their own, whatever a tokenizer.json says.
inline bool replaces_components(const std::string& tokenizer_class) {
    return tokenizer_class == "LlamaTokenizer" || tokenizer_class == "Qwen2Tokenizer" ||
           tokenizer_class == "GPT2Tokenizer";
}

// The class that reads a folder's tokenizer, by its tokenizer_config.json and config.json: GPT2Tokenizer,
// LlamaTokenizer, Qwen2Tokenizer, or another, which takes the vocabulary's file as it is.
inline std::string tokenizer_class_of(const std::string& folder, const nlohmann::json& settings,
                                      const nlohmann::json& config) {
    const std::string type = content_of(config.value("model_type", nlohmann::json()));
    std::string name =
        content_of(settings.value("tokenizer_class", config.value("tokenizer_class", nlohmann::json())));
    if (name.ends_with("Fast")) name.resize(name.size() - 4);
    if (type == "qwen2" || (type == "qwen3" && name.empty())) return "Qwen2Tokenizer";
    if (type == "gpt2" && name.empty()) return "GPT2Tokenizer";
    const std::string file = folder + "/tokenizer.json";
    const bool is_whole = file_exists(file);
    if (type == "mistral" ||
        (name == "LlamaTokenizer" && is_whole && read_text(file).find("\"ByteLevel\"") != std::string::npos))
        return "TokenizersBackend";
    const bool says_nothing = name.empty() || name == "PreTrainedTokenizer" || name == "TokenizersBackend";
    return says_nothing && !is_whole && file_exists(folder + "/vocab.json") ? "GPT2Tokenizer" : name;
}

// The settings in a folder: tokenizer_config.json, and what only special_tokens_map.json and
// added_tokens.json say, with "tokenizer_class" as above and the model's "vocab_size" if there is one.
// "added_tokens" lists tokens as a tokenizer.json does; those without an "id" are special tokens that the
// files name. "of_class" lists the keys of special tokens that only the class names. Fails naming a file that
// is damaged.
inline nlohmann::json tokenizer_settings(const std::string& folder) {
    using nlohmann::json;
    json settings = read_object(folder, "tokenizer_config.json");
    if (truth_of(settings, "split_special_tokens", false))
        fail(
            "%s/tokenizer_config.json: \"split_special_tokens\" true is not supported: chats would have no "
            "special tokens; set it to false",
            folder);
    const json config = read_object(folder, "config.json");
    const std::string name = tokenizer_class_of(folder, settings, config);
    settings["tokenizer_class"] = name;
    settings["vocab_size"] = config.value("vocab_size", json());
    if (settings.contains("add_prefix_space") && settings["add_prefix_space"].is_null())
        settings.erase("add_prefix_space");
    const bool is_complete = settings.contains("added_tokens_decoder");
    if (!is_complete) settings.update(read_object(folder, "special_tokens_map.json"));
    json usual = json::object();  // for the class
    if (name == "LlamaTokenizer")
        usual = {{"bos_token", "<s>"}, {"eos_token", "</s>"}, {"unk_token", "<unk>"}};
    else if (replaces_components(name))
        for (const char* key :
             {"eos_token", "unk_token", name == "GPT2Tokenizer" ? "bos_token" : "pad_token"})
            usual[key] = "<|endoftext|>";
    json of_class = json::array();
    for (const auto& [key, token] : usual.items())
        if (!settings.contains(key)) of_class.push_back(key);
    usual.update(settings);
    settings = std::move(usual);
    settings["of_class"] = of_class;

    json special = json::array(), numbered = is_complete ? settings["added_tokens_decoder"] : json::object();
    const auto add = [&](json token) {
        if (content_of(token).empty()) return;
        // Qwen2Tokenizer reads of such a token only the spelling.
        if (token.is_string() || name == "Qwen2Tokenizer") token = {{"content", content_of(token)}};
        token.erase("__type");
        token["special"] = true;
        special.push_back(token);
    };
    for (const char* key : kSpecialTokens) add(settings.value(key, json()));
    for (const auto& [key, token] : settings.items())
        if (key.ends_with("_token") && std::ranges::find(kSpecialTokens, key) == std::end(kSpecialTokens))
            add(token);
    json extra = settings.value("extra_special_tokens", json());
    if (extra.empty()) extra = settings.value("additional_special_tokens", json());
    for (const json& token : extra) add(token);

    if (!is_complete)
        for (const auto& [content, id] :
             read_object(folder, "added_tokens.json").get<std::map<std::string, json>>())
            numbered[id.dump()] = {
                {"content", content},
                {"special", std::ranges::find(special, content, content_of) != special.end()}};
    std::map<uint64_t, json> sorted;
    for (const auto& [number, token] : numbered.items()) {
        char* end = nullptr;
        const uint64_t id = strtoull(number.c_str(), &end, 10);
        if (number.empty() || *end || !token.is_object() || content_of(token).empty())
            fail("%s/%s: added token \"%s\" is not a number with \"content\"", folder,
                 is_complete ? "tokenizer_config.json" : "added_tokens.json", printable(number));
        sorted[id] = token;
        sorted[id]["id"] = id;
    }
    settings["added_tokens"] = json::array();
    for (const auto& [id, token] : sorted) settings["added_tokens"].push_back(token);
    settings["added_tokens"].insert(settings["added_tokens"].end(), special.begin(), special.end());
    return settings;
}

// Adds the tokens of tokenizer_settings() to `list`, the "added_tokens" that come with a vocabulary, as
// transformers does: a token that is there keeps its number; one that is not gets the next, unless the model
// has no embedding for it. `find` gives the number of a spelling in the vocabulary, or -1, and `size` is the
// vocabulary's. Fails if a file gives a token another number than these.
inline void complete_added_tokens(nlohmann::json& list, const nlohmann::json& settings,
                                  const std::function<int(const std::string&)>& find, uint64_t size,
                                  const std::string& folder) {
    if (!list.is_array() && !list.is_null()) return;  // its reader says what is wrong, here and below
    const auto number = [](const nlohmann::json& token) {
        const bool has = token.is_object() && token.contains("id") && token["id"].is_number_unsigned();
        return has ? token["id"].get<uint64_t>() : 0;
    };
    for (const nlohmann::json& token : list) size = std::max(size, number(token) + 1);
    const nlohmann::json rows = settings.value("vocab_size", nlohmann::json());
    for (nlohmann::json token : settings.value("added_tokens", nlohmann::json::array())) {
        const std::string content = content_of(token);
        const auto same = std::ranges::find(list, content, content_of);
        const int known = same != list.end() ? static_cast<int>(number(*same)) : find(content);
        const uint64_t id = known >= 0 ? static_cast<uint64_t>(known) : size;
        const bool is_named_only = !token.contains("id");
        if (is_named_only && rows.is_number_unsigned() && id >= rows) continue;
        if (!is_named_only && token["id"] != id)
            fail("%s: added token %s \"%s\": its number must be %lu", folder, token["id"].dump(),
                 printable(content), id);
        size = std::max(size, id + 1);
        token["id"] = id;
        if (same == list.end())
            list.push_back(token);
        else if (!is_named_only)
            *same = token;
    }
}

// ---- the components that a name stands for

// Adds the pre-tokenizer (and for qwen2 the normalizer) that `pre` names, as a tokenizer.json has it.
inline void add_pre_tokenizer(nlohmann::json& file, const std::string& pre, const char* path) {
    using nlohmann::json;
    const auto by_bytes = [](bool use_regex) -> json {
        return {{"type", "ByteLevel"},
                {"add_prefix_space", false},
                {"trim_offsets", true},
                {"use_regex", use_regex}};
    };
    const auto sequence = [&](const json& first, bool use_regex) -> json {
        return {{"type", "Sequence"}, {"pretokenizers", {first, by_bytes(use_regex)}}};
    };
    const auto split = [&](const std::string& regex) {
        const json pattern = {{"Regex", regex}};
        return sequence(
            {{"type", "Split"}, {"pattern", pattern}, {"behavior", "Isolated"}, {"invert", false}}, false);
    };
    // Llama 3's and Qwen's regexes differ in how many digits a piece may have.
    const std::string words = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|)";
    const std::string others = R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
    if (pre == "gpt-2") {
        file["pre_tokenizer"] = by_bytes(true);
    } else if (pre == "smollm") {
        file["pre_tokenizer"] = sequence({{"type", "Digits"}, {"individual_digits", true}}, true);
    } else if (pre == "llama-bpe") {
        file["pre_tokenizer"] = split(words + R"(\p{N}{1,3})" + others);
        file["model"]["ignore_merges"] = true;
    } else if (pre == "qwen2") {
        file["pre_tokenizer"] = split(words + R"(\p{N})" + others);
        file["normalizer"] = {{"type", "NFC"}};
    } else if (pre == "bloom") {
        file["pre_tokenizer"] = split(" ?[^(\\s|.,!?…。，、।۔،)]+");
    } else {
        fail("%s: 'tokenizer.ggml.pre' is \"%s\"; gpt-2, smollm, llama-bpe, qwen2 and bloom are supported",
             path, printable(pre));
    }
}

// A byte-level tokenizer.json without a vocabulary, merges and a pre-tokenizer.
inline nlohmann::json empty_byte_level_json() {
    return nlohmann::json::parse(
        R"({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                  "ignore_merges": false, "vocab": {}, "merges": []}})");
}

// Gives a tokenizer.json the components of the class that reads it, if that has some of its own.
inline void use_components_of_class(nlohmann::json& file, const nlohmann::json& settings) {
    using nlohmann::json;
    const std::string name = settings["tokenizer_class"];
    const bool llama = name == "LlamaTokenizer", qwen = name == "Qwen2Tokenizer";
    if (!replaces_components(name) || !file.is_object() || !file["model"].is_object()) return;
    const bool adds_space = truth_of(settings, "add_prefix_space", llama);
    json components = empty_byte_level_json();
    if (llama) {
        components["pre_tokenizer"] = json::parse(
            R"({"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never", "split": false})");
        components["decoder"] = json::parse(R"({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 0}]})");
        components["model"]["fuse_unk"] = components["model"]["byte_fallback"] = true;
        components["decoder"]["decoders"][3]["start"] = adds_space ? 1u : 0u;
        if (adds_space)
            components["pre_tokenizer"]["prepend_scheme"] =
                truth_of(settings, "legacy", false) ? "always" : "first";
    } else {
        add_pre_tokenizer(components, qwen ? "qwen2" : "gpt-2", "");
        json& part = components["pre_tokenizer"];
        (qwen ? part["pretokenizers"][1] : part)["add_prefix_space"] = adds_space;
    }
    for (const char* part : {"normalizer", "pre_tokenizer", "decoder"}) file[part] = components[part];
    for (const char* key : {"unk_token", "fuse_unk", "byte_fallback", "ignore_merges"})
        file["model"][key] = components["model"][key];
    if (settings.contains("added_tokens_decoder")) file["added_tokens"] = json::array();
}
