// hub_cache.h - models that Hugging Face's tools have downloaded, found by their names on the hub, ORG/NAME.
// Nothing is downloaded here.
//
// The cache has a folder for each model (https://huggingface.co/docs/huggingface_hub/guides/manage-cache):
//
//     models--ORG--NAME/refs/main           the commit that `main` was when it was downloaded
//     models--ORG--NAME/refs/NAME           the same of another branch, or of a tag
//     models--ORG--NAME/snapshots/COMMIT/   the files of that commit, as links
#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/save_folder.h"

// True if a text may be the name of a model on the hub: ORG/NAME, of letters, digits, '-', '_' and '.'.
inline bool is_hub_name(const std::string& text) {
    const size_t slash = text.find('/');
    if (slash == text.npos || text.find('/', slash + 1) != text.npos) return false;
    const auto is_part = [](const std::string& part) {
        return !part.empty() && part[0] != '.' && part[0] != '~' &&
               std::all_of(part.begin(), part.end(), [](unsigned char c) {
                   return c < 128 && (std::isalnum(c) || c == '-' || c == '_' || c == '.');
               });
    };
    return is_part(text.substr(0, slash)) && is_part(text.substr(slash + 1));
}

// Where huggingface_hub keeps what it downloads.
inline std::string hub_cache() {
    const auto variable = [](const char* name) {
        const char* const value = getenv(name);
        return std::string(value ? value : "");
    };
    for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"})
        if (!variable(name).empty()) return variable(name);
    if (!variable("HF_HOME").empty()) return variable("HF_HOME") + "/hub";
    const std::string caches = variable("XDG_CACHE_HOME");
    return (caches.empty() ? variable("HOME") + "/.cache" : caches) + "/huggingface/hub";
}

// The folder of a model in the cache: the snapshot of `revision`, which is a branch, a tag or a commit.
// Without a revision: that of `main`, or the only one. "" if it was not downloaded.
inline std::string hub_snapshot(const std::string& name, const std::string& revision = "") {
    std::string folder = "models--" + name;
    folder.replace(folder.find('/'), 1, "--");
    folder = hub_cache() + "/" + folder;
    const std::string snapshots = folder + "/snapshots";
    std::error_code none;
    if (!std::filesystem::is_directory(snapshots, none)) return "";
    const auto snapshot = [&](const std::string& commit) {
        const std::string found = snapshots + "/" + commit;
        const bool is_name = !commit.empty() && commit[0] != '.' && commit.find('/') == commit.npos;
        return is_name && std::filesystem::is_directory(found, none) ? found : "";
    };
    const std::string reference = folder + "/refs/" + (revision.empty() ? "main" : revision);
    if (revision.find("..") == revision.npos && file_exists(reference)) {
        std::string commit = read_text(reference);
        while (!commit.empty() && std::isspace(static_cast<unsigned char>(commit.back()))) commit.pop_back();
        if (const std::string found = snapshot(commit); !found.empty()) return found;
    }
    if (!revision.empty()) return snapshot(revision);
    const std::vector<std::string> all = list_folder(snapshots);
    return all.size() == 1 ? snapshots + "/" + all[0] : "";
}

// The name on the hub of a snapshot in a cache; "" if `folder` is none.
inline std::string hub_name_of(const std::string& folder) {
    const std::filesystem::path path(folder), model = path.parent_path().parent_path();
    std::string name = model.filename().string();
    if (path.parent_path().filename() != "snapshots" || !name.starts_with("models--")) return "";
    name.erase(0, 8);
    const size_t dashes = name.find("--");
    return dashes == name.npos ? "" : name.replace(dashes, 2, "/");
}

// How an adapter names the model that it is of: by its name on the hub, if a cache has it, else by its path,
// where links are followed except those of a cache, which lead to files without extensions.
inline std::string lasting_name(const std::string& model) {
    const std::string name = hub_name_of(model);
    if (!name.empty()) return name;
    if (!hub_name_of(folder_above(model)).empty()) return std::filesystem::absolute(model).string();
    std::error_code none;
    return std::filesystem::canonical(model, none).string();
}

// The commit of a snapshot in a cache, unless it is the one that the model's name alone leads to; else "".
inline std::string other_revision(const std::string& folder) {
    const std::string name = hub_name_of(folder);
    std::error_code none;
    if (name.empty() || std::filesystem::equivalent(folder, hub_snapshot(name), none)) return "";
    return std::filesystem::path(folder).filename().string();
}

// What an option like --model names: `text` itself, unless that is no file here and has the form of a name on
// the hub. Then the model's folder in the cache, or its file if it has a single GGUF and no config.json.
// Fails if the cache has no such model.
// A resumed run's model may have been removed: `resumes` returns its name then.
inline std::string find_on_hub(const char* option, const std::string& text, bool resumes = false,
                               const std::string& revision = "") {
    if (!is_hub_name(text) || file_exists(text)) return text;
    const std::string folder = hub_snapshot(text, revision);
    if (folder.empty() && resumes) return text;
    if (folder.empty() && (text.ends_with(".gguf") || file_exists(text.substr(0, text.find('/')))))
        fail("%s %s: there is no such file or folder", option, text.c_str());
    if (folder.empty())
        fail(
            "%s %s: there is no such folder, and no such model in %s: `hf download %s` gets it if Hugging "
            "Face has it",
            option, text.c_str(), hub_cache().c_str(), text.c_str());
    if (file_exists(folder + "/config.json") || file_exists(folder + "/adapter_config.json")) return folder;
    std::vector<std::string> ggufs;
    for (const std::string& file : list_folder(folder))
        if (file.ends_with(".gguf")) ggufs.push_back(file);
    std::sort(ggufs.begin(), ggufs.end());
    if (ggufs.size() == 1) return folder + "/" + ggufs[0];
    if (ggufs.empty()) fail("%s %s: %s has no config.json", option, text.c_str(), folder.c_str());
    fail("%s %s: %s has %zu GGUF files: give the path of one, such as %s/%s", option, text.c_str(),
         folder.c_str(), ggufs.size(), folder.c_str(), ggufs[0].c_str());
}
