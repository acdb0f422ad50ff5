// save_progress.cpp - reads and writes trainer_state.json by one list of its keys.
#include "llmc/save_progress.h"

#include <filesystem>

using nlohmann::json;

// Makes a text fit for JSON, which must be UTF-8: a text with other bytes becomes {"percent": "caf%E9"}.
static json escape_bytes(const json& text) {
    try {
        static_cast<void>(text.dump());
        return text;
    } catch (const json::type_error&) {
        std::string escaped;
        for (const char c : text.get<std::string>()) {
            const bool plain = c > 0x20 && c < 0x7f && c != '%';
            escaped += plain ? std::string(1, c) : format("%%%02X", static_cast<unsigned>(c) & 0xff);
        }
        return {{"percent", escaped}};
    }
}
// The inverse. Values that escape_bytes() has not made stay as they are.
static json unescape_bytes(const json& value) {
    if (!value.is_object() || value.size() != 1 || !value.contains("percent") ||
        !value["percent"].is_string())
        return value;
    std::string bytes, escaped = value["percent"];
    for (size_t i = 0; i < escaped.size(); i++) {
        unsigned byte = 0;
        if (escaped[i] != '%')
            bytes += escaped[i];
        else if (std::sscanf(escaped.c_str() + i, "%%%2x", &byte) == 1)
            bytes += static_cast<char>(byte), i += 2;
        else
            return value;
    }
    return bytes;
}

// Converts all texts in options, which are lists of texts by name.
static json convert_options(json options, json (*convert)(const json&)) {
    for (json& values : options)
        if (values.is_array())
            for (json& value : values) value = convert(value);
    return options;
}

// ---- a key's value in the file
//
// stored() makes it of a field. load() sets the field, and returns null, or what the value must be.

template <class T>
static json stored(const T& value) {
    return value;
}
static json stored(const std::string& text) { return escape_bytes(text); }
static json stored(const json& options) { return convert_options(options, escape_bytes); }
static json stored(const BestValidation& best) {
    return {{"loss", best.loss}, {"step", best.step}, {"worse_since", best.worse_since}};
}
template <class T>
static json stored(const std::optional<T>& value) {
    return value ? stored(*value) : json();
}

static bool is_count(const json& j) { return j.is_number_unsigned() && j.get<uint64_t>() <= INT64_MAX; }
static bool is_text(const json& j) { return j.is_string(); }

// Sets `to` to a value that is `good`.
template <class T>
static const char* set(T& to, const json& value, bool good, const char* wanted) {
    if (good) to = value.get<T>();
    return good ? nullptr : wanted;
}
static const char* load(const json& j, int64_t& to) { return set(to, j, is_count(j), "a count"); }
static const char* load(const json& j, double& to) { return set(to, j, j.is_number(), "a number"); }
static const char* load(const json& j, bool& to) { return set(to, j, j.is_boolean(), "true or false"); }
static const char* load(const json& j, std::string& to) {
    const json text = unescape_bytes(j);
    return set(to, text, text.is_string(), "a text");
}
static const char* load(const json& j, std::set<int64_t>& to) {
    return set(to, j, j.is_array() && std::ranges::all_of(j, is_count), "counts");
}
static const char* load(const json& j, std::map<std::string, std::string>& to) {
    return set(to, j, j.is_object() && std::ranges::all_of(j, is_text), "texts by name");
}
static const char* load(const json& j, json& options) {
    return set(options, convert_options(j, unescape_bytes), j.is_object(), "an object");
}
static const char* load(const json& j, BestValidation& to) {
    const auto has = [&](const char* key) { return j.is_object() && j.contains(key) && j[key].is_number(); };
    if (!has("loss") || !has("step") || !has("worse_since")) return "a validation";
    to = {j["loss"].get<double>(), j["step"].get<int64_t>(), j["worse_since"].get<int64_t>()};
    return to.step >= 0 && to.worse_since >= 0 ? nullptr : "a validation";
}
template <class T>
static const char* load(const json& j, std::optional<T>& to) {
    return j.is_null() ? nullptr : load(j, to.emplace());
}

// Calls visit(key, field, needed) for each key of the file; older saves lack those that are not needed.
template <class P, class Visit>
static void for_each_key(P& p, Visit&& visit) {
    visit("step", p.step, true);
    visit("sequences", p.sequences, true);
    visit("precision", p.precision, true);
    visit("options", p.options, true);
    visit("evaluated", p.evaluated, false);
    visit("validated", p.validated, false);
    visit("formats", p.formats, false);
    visit("others", p.others, false);
    visit("directory", p.directory, false);
    visit("first_loss", p.first_loss, false);
    visit("rate", p.rate, false);
    visit("last_good", p.last_good, false);
    visit("best", p.best, false);
    visit("data", p.data, false);
}

// ---- the file

// Names the saves in a folder in a message: "OUT has step-00000100, step-00000200"; "" if there are none. Of
// more than eight it names the first and the last.
static std::string list_saves(const std::string& out) {
    if (!std::filesystem::is_directory(out)) return "";
    const std::set<int64_t> steps = saved_steps(out);
    if (steps.empty()) return "";
    if (steps.size() <= 8) return out + " has " + joined(steps, ", ", step_name);
    return format("%s has %zu saves from %s to %s", out.c_str(), steps.size(),
                  step_name(*steps.begin()).c_str(), step_name(*steps.rbegin()).c_str());
}

Progress read_progress(const std::string& folder) {
    const std::string file = resolve_save(folder) + "/trainer_state.json";
    if (!file_exists(file)) {
        if (file_exists(folder)) fail("%s holds no training to resume: no trainer_state.json", folder);
        const std::string saves = list_saves(folder_above(without_last_slashes(folder)));
        fail("%s: there is no such folder%s", folder, saves.empty() ? "" : ("; " + saves));
    }
    const json all = read_json(file);
    Progress p;
    for_each_key(p, [&](const char* key, auto& field, bool needed) {
        if (!all.contains(key) && !needed) return;
        if (!all.contains(key)) fail("%s: \"%s\" is missing", file, key);
        if (const char* const wanted = load(all[key], field)) fail("%s: \"%s\" is not %s", file, key, wanted);
    });
    if (p.precision != "fp32" && p.precision != "bf16")
        fail("%s: \"precision\" is not \"fp32\" or \"bf16\"", file);
    return p;
}

void write_progress(const std::string& save, const Progress& progress) {
    const std::string file = save + "/trainer_state.json", temporary = file + ".tmp";
    json all;
    for_each_key(progress, [&](const char* key, const auto& field, bool) { all[key] = stored(field); });
    write_json(temporary, all);
    replace_file(temporary, file);
}

int64_t newest_bad_save(const std::string& out, int64_t good) {
    int64_t newest = -1;
    for (const int64_t step : saved_steps(out)) {
        if (step <= good) continue;
        try {
            if (read_progress(out + "/" + step_name(step)).last_good == good) newest = step;
        } catch (const UserError&) {  // a damaged save, which this run does not read
        }
    }
    return newest;
}

void remark_newer_bad_save(const char* option, const std::string& folder, const std::string& save) {
    const int64_t good = step_of(std::filesystem::path(save).filename().string());
    if (good < 0 || link_target(folder + "/latest").empty()) return;
    if (const int64_t bad = newest_bad_save(folder, good); bad >= 0)
        print(stderr,
              "%s %s: step %ld was not good when it was saved; going on from the last good save, %s\n",
              option, folder, bad, step_name(good));
}

SaveFolder open_save_folder(const std::string& out, int keep, const std::string& resumed) {
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
        folder.others = saved_steps(out);
    }
    return folder;
}
