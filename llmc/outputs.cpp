// outputs.cpp - tries whether files can be written, and compares paths as the system resolves them.
#include "llmc/outputs.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "llmc/save_folder.h"
#include "llmc/temporary_file.h"

// True if a model's folder or a save may have a file of this name.
static bool is_model_file(std::string_view name) {
    for (const char* tokenizer : kTokenizerFiles)
        if (name == tokenizer) return true;
    for (const char* adapter : {kAdapterConfigFile, kAdapterBaseFile})
        if (name == adapter) return true;
    return name == "config.json" || name == "generation_config.json" || name == "trainer_state.json" ||
           name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
}

// True if `path` is, or would become, a file of the model, the save or the saves in `folder`.
static bool is_part_of(const std::string& path, const std::string& folder) {
    namespace fs = std::filesystem;
    const fs::path way = fs::path(resolved(path)).lexically_relative(resolved(folder));
    const std::string first = way.begin() == way.end() ? "" : way.begin()->string();
    std::string name = first;  // without .tmp and .old, with which a file begins or ends its life
    for (const std::string_view end : {".tmp", ".old"})
        if (name.ends_with(end)) name.resize(name.size() - end.size());
    const bool has_saves = !link_target(folder + "/latest").empty() || !file_exists(folder + "/config.json");
    if (name == "best" && has_saves) return true;
    if (name == "latest" || name == ".lock" || step_of(name) >= 0) return true;
    if (way == first && is_model_file(name)) return true;
    std::error_code none;
    if (!fs::is_directory(folder, none)) return false;
    for (const std::string& name : list_folder(folder))
        if (is_model_file(name) && same_file(path, folder + "/" + name)) return true;
    return false;
}

// True if `path` is the folder, or in it.
static bool is_in_folder(const std::string& path, const std::string& folder) {
    const std::filesystem::path way =
        std::filesystem::path(resolved(path)).lexically_relative(resolved(folder));
    return !way.empty() && *way.begin() != "..";
}

// Fails if something is at the place of an unfinished folder that no killed run can have left there.
static void check_unfinished_folder(const char* option, const std::string& path) {
    const std::string folder = unfinished_folder(path);
    struct stat info;
    if (lstat(folder.c_str(), &info) != 0) return;
    bool is_ours = S_ISDIR(info.st_mode);
    if (is_ours)
        for (const std::string& name : list_folder(folder)) {
            const std::string complete = name.ends_with(".tmp") ? name.substr(0, name.size() - 4) : name;
            is_ours = is_ours && (complete == kTemplateFolder || is_model_file(complete));
        }
    if (!is_ours)
        fail("%s %s: it is written as %s, and something else is there: choose another name", option, path,
             folder);
}

// Fails unless write_folder() can make the folder, which must not exist yet. Leaves nothing behind.
static void check_new_folder(const char* option, const std::string& path) {
    const std::string folder = without_last_slashes(path), temporary = unfinished_folder(path);
    struct stat info;
    if (lstat(folder.c_str(), &info) == 0)
        fail("%s %s is there already; name a folder that is not", option, path);
    check_unfinished_folder(option, path);
    std::vector<std::string> wanted = missing_folders(folder_above(folder)), made;  // innermost first
    wanted.insert(wanted.begin(), temporary);
    int error = 0;
    for (size_t i = wanted.size(); i-- > 0 && error == 0;)
        if (mkdir(wanted[i].c_str(), 0777) == 0)
            made.insert(made.begin(), wanted[i]);
        else if (i > 0 || errno != EEXIST)  // a killed merge may have left the last one
            error = errno;
    for (const std::string& path : made) rmdir(path.c_str());
    if (error) fail("%s %s: cannot make the folder: %s", option, path, std::strerror(error));
}

// True if a file can be made in the folder; else errno says why. /proc refuses new files even to root, which
// access() does not tell.
static bool can_make_file_in(const std::string& folder) {
    const int fd = make_nameless_file(folder, 0);
    return fd >= 0 && close(fd) == 0;
}

void check_output_file(const Output& o) {
    struct stat info;
    const char* path = o.path.c_str();
    std::string above = folder_above(resolved(o.path));
    const auto check = [&](bool good) {
        if (!good) fail("%s %s: %s", o.option, path, std::strerror(errno));
    };
    if (stat(path, &info) != 0) {
        check(errno == ENOENT);
        while (o.kind == Output::InFolder && !file_exists(above) && above != folder_above(above))
            above = folder_above(above);
        check(access(above.c_str(), W_OK | X_OK) == 0);
        return check(can_make_file_in(above));
    }
    check(access(path, W_OK) == 0);
    if (S_ISDIR(info.st_mode)) fail("%s %s: %s", o.option, path, std::strerror(EISDIR));
    if (o.kind == Output::Replaced) {
        if (!S_ISREG(info.st_mode)) fail("%s %s is not a regular file", o.option, path);
        check(access(above.c_str(), W_OK | X_OK) == 0);
    }
    if (!S_ISREG(info.st_mode) || info.st_size == 0) return;
    const FileReader file(o.path);
    std::string start(std::min(file.size(), std::strlen(o.begins)), ' ');
    file.read(0, start.size(), start.data());
    if (!std::string_view(o.begins).starts_with(start))
        fail("%s %s is there and is no file that %s writes: choose another name", o.option, path, o.option);
}

void check_outputs(const std::vector<Output>& files, const std::string& out,
                   const std::vector<std::string>& inputs) {
    std::vector<std::string> folders;
    for (const std::string& input : inputs) {
        const std::string save = resolve_save(input), above = folder_above(save);
        folders.insert(folders.end(), {input, save});
        if (!link_target(above + "/latest").empty()) folders.push_back(above);
    }
    const auto check_apart = [&](const Output& o) {
        for (const std::string& folder : folders)
            if (is_part_of(o.path, folder))
                fail("%s %s is a part of %s: choose another name", o.option, o.path, folder);
    };
    // An unfinished folder must not be, or contain, what the run reads or writes besides.
    const auto check_place_of = [&](const Output& o, const std::string& other, const char* what) {
        if (o.kind == Output::Folder && is_in_folder(other, unfinished_folder(o.path)))
            fail("%s %s: it is written as %s, which has %s", o.option, o.path, unfinished_folder(o.path),
                 what);
    };
    std::vector<Output> before;
    if (!out.empty()) {
        before.push_back({"--out", out, ""});
        check_apart(before[0]);
        folders.push_back(out);
    }
    for (const Output& o : files) {
        if (o.path.empty()) continue;
        check_apart(o);
        for (const std::string& input : inputs) check_place_of(o, input, input.c_str());
        for (const Output& other : before) {
            if (same_file(o.path, other.path)) fail("%s %s is %s too", o.option, o.path, other.option);
            check_place_of(o, other.path, other.option);
            check_place_of(other, o.path, o.option);
        }
        if (o.kind == Output::Folder)
            check_new_folder(o.option, o.path);
        else
            check_output_file(o);
        before.push_back(o);
    }
}
