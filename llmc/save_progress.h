// save_progress.h - the progress of a training run: what a run needs besides the tensors to be resumed. Each
// save has it as trainer_state.json.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/save_folder.h"
#include "llmc/state.h"

// The lowest loss of a run's validations.
struct BestValidation {
    double loss = 0;
    int64_t step = 0;
    int64_t worse_since = 0;  // validations after it, none of which was better
};

// What a run needs besides the tensors to be resumed.
struct Progress {
    int64_t step = 0;            // optimizer steps done
    int64_t sequences = 0;       // sequences of the training data read
    std::string precision = {};  // "fp32" or "bf16", of the build that saved; write_save() sets it
    bool evaluated = true;       // the validation and the sample due at this step are done
    bool validated = false;      // the validation is done, whose sample was interrupted
    nlohmann::json options = nlohmann::json::object();  // the run's options; a resumed run takes them over
    std::string formats = {};       // StateOptions::text() of the saved state; write_save() sets it
    std::set<int64_t> others = {};  // steps of another run's saves in the same folder
    std::string directory = {};     // the options' relative names count from here; empty in older saves
    std::optional<double> first_loss = {};  // the loss of the run's first step
    std::optional<double> rate = {};        // the learning rate of the last step
    std::optional<int64_t> last_good = {};  // the step of the last good save (save_folder.h)
    std::optional<BestValidation> best = {};
    std::map<std::string, std::string> data = {};  // by option: data_facts() of its data (resume.h)
};

// Makes a text fit for JSON, which must be UTF-8: a text with other bytes becomes {"percent": "caf%E9"}.
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
// The inverse. Values that escape_bytes() has not made stay as they are.
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

// Converts all texts in options, which are lists of texts by name.
inline nlohmann::json convert_options(nlohmann::json options,
                                      nlohmann::json (*convert)(const nlohmann::json&)) {
    for (nlohmann::json& values : options)
        if (values.is_array())
            for (nlohmann::json& value : values) value = convert(value);
    return options;
}

// Names the saves in a folder in a message: "OUT has step-00000100, step-00000200"; "" if there are none. Of
// more than eight it names the first and the last.
inline std::string list_saves(const std::string& out) {
    if (!std::filesystem::is_directory(out)) return "";
    std::vector<std::string> names = list_folder(out);
    std::erase_if(names, [](const std::string& name) { return step_of(name) < 0; });
    if (names.empty()) return "";
    std::sort(names.begin(), names.end());
    if (names.size() <= 8) return out + " has " + joined(names, ", ");
    return format("%s has %zu saves from %s to %s", out.c_str(), names.size(), names[0].c_str(),
                  names.back().c_str());
}

inline nlohmann::json best_to_json(const std::optional<BestValidation>& best) {
    if (!best) return nullptr;
    return {{"loss", best->loss}, {"step", best->step}, {"worse_since", best->worse_since}};
}
inline std::optional<BestValidation> best_from_json(const nlohmann::json& json, const std::string& file) {
    if (json.is_null()) return std::nullopt;
    try {
        const BestValidation best = {json.at("loss").get<double>(), json.at("step").get<int64_t>(),
                                     json.at("worse_since").get<int64_t>()};
        if (best.step >= 0 && best.worse_since >= 0) return best;
    } catch (const nlohmann::json::exception&) {  // reported below
    }
    fail("%s: \"best\" is not a validation", file.c_str());
}

// Reads trainer_state.json of a save or of a folder of saves. Fails if it is missing or damaged.
inline Progress read_progress(const std::string& folder) {
    const std::string file = resolve_save(folder) + "/trainer_state.json";
    if (!file_exists(file)) {
        if (file_exists(folder))
            fail("%s holds no training to resume: no trainer_state.json", folder.c_str());
        const std::string saves = list_saves(folder_above(without_last_slashes(folder)));
        fail("%s: there is no such folder%s", folder.c_str(), saves.empty() ? "" : ("; " + saves).c_str());
    }
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
    if (json.contains("validated")) p.validated = get("validated", is_truth, "true or false").get<bool>();
    if (json.contains("formats")) p.formats = get("formats", is_text, "a text").get<std::string>();
    if (json.contains("others")) p.others = get("others", are_counts, "counts").get<std::set<int64_t>>();
    if (json.contains("directory")) p.directory = unescape_bytes(get("directory", is_name, "a text"));
    const auto is_number = [](const nlohmann::json& j) { return j.is_number(); };
    const auto has = [&](const char* name) { return json.contains(name) && !json[name].is_null(); };
    if (has("first_loss")) p.first_loss = get("first_loss", is_number, "a number").get<double>();
    if (has("rate")) p.rate = get("rate", is_number, "a number").get<double>();
    if (has("last_good")) p.last_good = get("last_good", is_count, "a count").get<int64_t>();
    if (json.contains("best")) p.best = best_from_json(json["best"], file);
    if (json.contains("data"))
        p.data = get("data", are_texts, "texts by name").get<std::map<std::string, std::string>>();
    return p;
}

// Changes fields of a complete save's trainer_state.json. `fields` is an object.
inline void rewrite_progress(const std::string& save, const nlohmann::json& fields) {
    const std::string file = save + "/trainer_state.json", temporary = file + ".tmp";
    nlohmann::json json = read_json(file);
    json.update(fields);
    write_json(temporary, json);
    replace_file(temporary, file);
}

// The step of the newest save in a folder that was not good, and whose run had its last good save at step
// `good`; -1 if there is none.
inline int64_t newest_bad_save(const std::string& out, int64_t good) {
    int64_t newest = -1;
    for (const std::string& name : list_folder(out)) {
        const int64_t step = step_of(name);
        if (step <= good || step <= newest) continue;
        try {
            if (read_progress(out + "/" + name).last_good == good) newest = step;
        } catch (const UserError&) {  // a damaged save, which this run does not read
        }
    }
    return newest;
}

// Says so if a folder of saves, which an option names, shows the last good one of them instead of the newest.
// `save` is the save that it shows.
inline void remark_newer_bad_save(const char* option, const std::string& folder, const std::string& save) {
    const int64_t good = step_of(std::filesystem::path(save).filename().string());
    if (good < 0 || link_target(folder + "/latest").empty()) return;
    if (const int64_t bad = newest_bad_save(folder, good); bad >= 0)
        print(stderr,
              "%s %s: step %lld was not good when it was saved; going on from the last good save, %s\n",
              option, folder.c_str(), static_cast<long long>(bad), step_name(good).c_str());
}

// The folder OUT for a run that continues from the save `resumed`, or starts anew if that is empty. A run
// owns the saves in OUT only if it continues from one of them, and then only those that the earlier run
// owned.
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
        if (progress.best) folder.best = progress.best->step;
    } else if (!goes_on) {
        for (const std::string& name : list_folder(out))
            if (step_of(name) >= 0) folder.others.insert(step_of(name));
    }
    return folder;
}
