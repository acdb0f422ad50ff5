// progress.h - how far a training has come, as trainer_state.json in each save says it: what a run needs to
// go on, beside the tensors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "llmc/save_folder.h"
#include "llmc/state.h"

// What a run needs to go on, beside the tensors.
struct Progress {
    int64_t step = 0;            // optimizer steps done
    int64_t sequences = 0;       // sequences of the training data read
    std::string precision = {};  // of the build that saved: "fp32" or "bf16"; a save says its own
    bool evaluated = true;       // the validation and the sample that are due at this step were made
    nlohmann::json options = nlohmann::json::object();  // the run's, which hold for a resumed run too
    std::string formats = {};       // StateOptions::text() of what was saved; a save says its own
    std::set<int64_t> others = {};  // another run's saves in the same folder, by step
    std::string directory = {};     // from where the options' relative names count; empty in older saves
    std::optional<double> first_loss = {};         // that of the run's first step
    std::optional<int64_t> last_good = {};         // the step of the last good save (save_folder.h)
    std::map<std::string, std::string> data = {};  // data_facts() of what each option named (resume.h)
};

inline void write_text(const std::string& path, const std::string& text) {
    FileWriter file(path);
    file.write(text);
    file.finish();
}
inline void write_json(const std::string& path, const nlohmann::json& json) {
    write_text(path, json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

// A text for a file of JSON. Of bytes that are not UTF-8, as JSON's texts must be, {"percent": "caf%E9"}.
inline nlohmann::json escape_bytes(const nlohmann::json& text) {
    try {
        static_cast<void>(text.dump());
        return text;
    } catch (const nlohmann::json::type_error&) {
        std::string escaped;
        for (const char c : text.get<std::string>()) {
            const bool plain = c > 0x20 && c < 0x7f && c != '%';
            escaped += plain ? std::string(1, c) : format("%%%02X", static_cast<unsigned>(c) & 0xff);
        }
        return {{"percent", escaped}};
    }
}
// And back. What escape_bytes() has not written stays what it is.
inline nlohmann::json unescape_bytes(const nlohmann::json& json) {
    if (!json.is_object() || json.size() != 1 || !json.contains("percent") || !json["percent"].is_string())
        return json;
    std::string bytes, escaped = json["percent"];
    for (size_t i = 0; i < escaped.size(); i++) {
        unsigned byte = 0;
        if (escaped[i] != '%')
            bytes += escaped[i];
        else if (std::sscanf(escaped.c_str() + i, "%%%2x", &byte) == 1)
            bytes += static_cast<char>(byte), i += 2;
        else
            return json;
    }
    return bytes;
}

// The same for options: lists of texts, by name.
inline nlohmann::json convert_options(nlohmann::json options,
                                      nlohmann::json (*convert)(const nlohmann::json&)) {
    for (nlohmann::json& values : options)
        if (values.is_array())
            for (nlohmann::json& value : values) value = convert(value);
    return options;
}

// What trainer_state.json holds, in a save or a folder of saves. Fails when there is none or it is damaged.
inline Progress read_progress(const std::string& folder) {
    const std::string file = resolve_save(folder) + "/trainer_state.json";
    if (!file_exists(file)) fail("%s: holds no training to resume: no trainer_state.json", folder.c_str());
    const nlohmann::json json = read_json(file);
    const auto get = [&](const char* name, auto good, const char* wanted) -> const nlohmann::json& {
        if (!json.is_object() || !json.contains(name)) fail("%s: \"%s\" is missing", file.c_str(), name);
        if (!good(json[name])) fail("%s: \"%s\" is not %s", file.c_str(), name, wanted);
        return json[name];
    };
    const auto is_count = [](const nlohmann::json& j) {
        return j.is_number_unsigned() && j.get<uint64_t>() <= INT64_MAX;
    };
    const auto is_precision = [](const nlohmann::json& j) { return j == "fp32" || j == "bf16"; };
    const auto is_object = [](const nlohmann::json& j) { return j.is_object(); };
    const auto is_text = [](const nlohmann::json& j) { return j.is_string(); };
    const auto are_texts = [&](const nlohmann::json& j) {
        return j.is_object() && std::all_of(j.begin(), j.end(), is_text);
    };
    const auto is_name = [&](const nlohmann::json& j) { return unescape_bytes(j).is_string(); };
    const auto is_truth = [](const nlohmann::json& j) { return j.is_boolean(); };
    const auto are_counts = [&](const nlohmann::json& j) {
        return j.is_array() && std::all_of(j.begin(), j.end(), is_count);
    };
    Progress p = {.step = get("step", is_count, "a count").get<int64_t>(),
                  .sequences = get("sequences", is_count, "a count").get<int64_t>(),
                  .precision = get("precision", is_precision, "\"fp32\" or \"bf16\"").get<std::string>(),
                  .options = convert_options(get("options", is_object, "an object"), unescape_bytes),
                  .formats = StateOptions().text()};
    if (json.contains("evaluated")) p.evaluated = get("evaluated", is_truth, "true or false").get<bool>();
    if (json.contains("formats")) p.formats = get("formats", is_text, "a text").get<std::string>();
    if (json.contains("others")) p.others = get("others", are_counts, "counts").get<std::set<int64_t>>();
    if (json.contains("directory")) p.directory = unescape_bytes(get("directory", is_name, "a text"));
    const auto is_number = [](const nlohmann::json& j) { return j.is_null() || j.is_number(); };
    const auto may_be_count = [&](const nlohmann::json& j) { return j.is_null() || is_count(j); };
    if (json.contains("first_loss") && !get("first_loss", is_number, "a number").is_null())
        p.first_loss = json["first_loss"].get<double>();
    if (json.contains("last_good") && !get("last_good", may_be_count, "a count").is_null())
        p.last_good = json["last_good"].get<int64_t>();
    if (json.contains("data"))
        p.data = get("data", are_texts, "texts by name").get<std::map<std::string, std::string>>();
    return p;
}

// The folder OUT for a run that goes on from the save `resumed`, or begins if that is empty. What is there
// now is its own only when it goes on from there, and then what that run has found there still is not.
inline SaveFolder open_save_folder(const std::string& out, int keep, const std::string& resumed) {
    SaveFolder folder = {out, keep};
    std::error_code none;
    const auto canonical = [&](const std::string& path) {
        return std::filesystem::weakly_canonical(path, none);
    };
    if (!file_exists(out)) return folder;
    const bool goes_on = !resumed.empty() && canonical(resumed).parent_path() == canonical(out);
    if (goes_on && file_exists(resumed + "/trainer_state.json")) {
        const Progress progress = read_progress(resumed);
        folder.others = progress.others;
        folder.good = progress.last_good;
    } else if (!goes_on) {
        for (const std::string& name : list_folder(out))
            if (step_of(name) >= 0) folder.others.insert(step_of(name));
    }
    return folder;
}
