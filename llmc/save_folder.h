// save_folder.h - folders of saves: made, switched and cleared so that every moment shows a whole save.
//
//   OUT/step-00000200/       a save (checkpoint.h)
//   OUT/latest            -> step-00000200
//   OUT/model.safetensors -> latest/model.safetensors, and the same for each other file of the save
//   OUT/.lock                while a run saves there (outputs.h)
//
// A save is written as step-*.tmp, synced, and renamed; then `latest` is renamed over, which switches every
// file of OUT at once. A process killed or a machine stopped at any moment leaves the last save whole, and
// OUT pointing at it.
//
// A save is good when the loss before it is not far above that of the run's first step, and the gradient is
// not zero (Metrics::is_good()). The last good one stays, however few are kept.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "llmc/file.h"
#include "llmc/file_lock.h"

// Fails naming the file when a call of the system did.
inline void check_call(bool good, const std::string& path, const char* action) {
    if (!good) fail("%s: cannot %s: %s", path.c_str(), action, std::strerror(errno));
}

inline std::string folder_above(const std::string& path) {
    const std::string above = std::filesystem::path(path).parent_path().string();
    return above.empty() ? "." : above;
}

// The name of a folder without the slashes that may be behind it.
inline std::string without_last_slashes(std::string path) {
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    return path;
}

// Makes a folder and those above it that are missing, durably.
inline void make_folders(const std::string& path) {
    if (file_exists(path)) return;
    make_folders(folder_above(path));
    check_call(mkdir(path.c_str(), 0777) == 0 || errno == EEXIST, path, "make the folder");
    sync_directory(folder_above(path));
}

// Removes a folder with all in it, if it is there.
inline void remove_folder(const std::string& path) {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    if (error) fail("%s: cannot remove: %s", path.c_str(), error.message().c_str());
}

// Gives a finished folder its final name, durably. One that had the name trades places with it in one step,
// so that no moment is without. Where the file system cannot do that (NFS), it is `path`.old for a moment.
inline void replace_folder(const std::string& finished, const std::string& path) {
    if (renameat2(AT_FDCWD, finished.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0)
        return sync_directory(folder_above(path));
    if (errno != ENOENT && file_exists(path)) {
        remove_folder(path + ".old");
        check_call(std::rename(path.c_str(), (path + ".old").c_str()) == 0, path, "rename");
    }
    replace_file(finished, path);
}

// Makes `path` a symbolic link, in place of the one it may have been, durably.
inline void replace_link(const std::string& target, const std::string& path) {
    const std::string temporary = path + ".tmp";
    check_call(unlink(temporary.c_str()) == 0 || errno == ENOENT, temporary, "remove");
    check_call(symlink(target.c_str(), temporary.c_str()) == 0, temporary, "make the link");
    replace_file(temporary, path);
}

// The names of what is in a folder.
inline std::vector<std::string> list_folder(const std::string& path) {
    std::vector<std::string> names;
    std::error_code error;
    for (std::filesystem::directory_iterator at(path, error), end; !error && at != end; at.increment(error))
        names.push_back(at->path().filename().string());
    if (error) fail("%s: cannot list: %s", path.c_str(), error.message().c_str());
    return names;
}

// Where a symbolic link leads, or "" if it is none.
inline std::string link_target(const std::string& path) {
    std::error_code none;
    return std::filesystem::read_symlink(path, none).string();
}

// "step-00000123", and back; -1 if a name is none.
inline std::string step_name(int64_t step) { return format("step-%08lld", static_cast<long long>(step)); }
inline int64_t step_of(const std::string& name) {
    long long step = -1;
    return std::sscanf(name.c_str(), "step-%18lld", &step) == 1 && step_name(step) == name ? step : -1;
}

// The save that a folder of saves shows now; any other folder is meant itself. Files that belong together are
// to be read from there: `latest` may switch between them.
inline std::string resolve_save(const std::string& folder) {
    const std::string latest = link_target(folder + "/latest");
    return latest.empty() ? folder : (std::filesystem::path(folder) / latest).string();
}

// A save that is being read. As long as it is held, the run that made it does not remove it
// (remove_old_saves()).
class HeldSave {
  public:
    // Of a folder of saves, holds the one that it shows; any other folder is meant itself. Where there is
    // none, whoever reads it says so.
    explicit HeldSave(const std::string& folder) {
        for (int tries = 0; tries < 100; tries++) {
            path_ = resolve_save(folder);
            lock_.emplace(path_, O_RDONLY | O_DIRECTORY, FileLock::Shared);
            if (lock_->good()) return;
            if (lock_->outcome() == FileLock::Busy)
                usleep(1000);  // it is just being removed
            else if (resolve_save(folder) == path_)
                return;
        }
    }
    const std::string& path() const { return path_; }
    void let_go() { lock_.reset(); }

  private:
    std::string path_;
    std::optional<FileLock> lock_;
};

// Makes OUT show the save `name`. Links for new files come first, leading nowhere until `latest` switches, so
// that all appear at once; links of files that this save lacks go last.
inline void publish(const std::string& out, const std::string& name) {
    for (const std::string& file : list_folder(out + "/" + name)) {
        const std::string link = out + "/" + file;
        if (link_target(link).empty() && !file_exists(link)) replace_link("latest/" + file, link);
    }
    replace_link(name, out + "/latest");
    for (const std::string& file : list_folder(out)) {
        const std::string link = out + "/" + file;
        if (link_target(link) == "latest/" + file && !file_exists(link))
            check_call(unlink(link.c_str()) == 0, link, "remove");
    }
}

// Where a run saves: a folder, how many saves it keeps there (0: all), the steps whose saves it does not
// remove, as they are another run's, and the step of its last good save.
struct SaveFolder {
    std::string path;
    int keep = 0;
    std::set<int64_t> others = {};
    std::optional<int64_t> good = {};
    // The saves that are there and not another run's.
    int64_t own_count() const;
};

inline int64_t SaveFolder::own_count() const {
    int64_t count = 0;
    for (const std::string& name : list_folder(path))
        if (const int64_t step = step_of(name); step >= 0 && !others.contains(step)) count++;
    return count;
}

// Removes the saves that were not finished. Only for a run that holds OUT alone.
inline void remove_unfinished(const std::string& out) {
    for (const std::string& name : list_folder(out))
        if (name.ends_with(".tmp") && step_of(name.substr(0, name.size() - 4)) >= 0)
            remove_folder(out + "/" + name);
}

// Removes what killed saves left behind and all but `keep` of the run's saves: that of `step`, and of the
// others the latest before it, then the latest after it, which a run resumed from an earlier step has left
// behind. The last good one stays beside them. One that somebody reads (HeldSave) stays until the next time.
inline void remove_old_saves(const SaveFolder& folder, int64_t step) {
    const std::string& out = folder.path;
    std::vector<std::pair<bool, int64_t>> saves;  // (not after `step`, step)
    for (const std::string& name : list_folder(out)) {
        const int64_t s = step_of(name);
        if (s >= 0 && !folder.others.contains(s)) saves.emplace_back(s <= step, s);
        const bool leftover = name.ends_with(".tmp") || name.ends_with(".old");
        if (leftover && step_of(name.substr(0, name.size() - 4)) >= 0) remove_folder(out + "/" + name);
    }
    std::sort(saves.rbegin(), saves.rend());
    for (size_t i = static_cast<size_t>(folder.keep); folder.keep > 0 && i < saves.size(); i++) {
        if (folder.good == saves[i].second) continue;
        // Renamed first: what has the name of a save is always whole.
        const std::string path = out + "/" + step_name(saves[i].second);
        const FileLock lock(path, O_RDONLY | O_DIRECTORY, FileLock::Exclusive);
        if (lock.outcome() == FileLock::Busy) continue;
        check_call(std::rename(path.c_str(), (path + ".tmp").c_str()) == 0, path, "rename");
        remove_folder(path + ".tmp");
    }
}

// Fails unless OUT, which need not exist, can be made, written and linked in, and holds no files that a
// save's links would have to replace. Leaves nothing behind.
inline void check_writable(const std::string& out) {
    if (out.empty()) fail("--out is empty where the name of a folder is needed");
    struct stat info;
    std::string nearest = out;  // to OUT of what exists
    while (lstat(nearest.c_str(), &info) != 0) {
        if (errno != ENOENT && errno != ENOTDIR) fail("--out %s: %s", out.c_str(), std::strerror(errno));
        nearest = folder_above(nearest);
    }
    if (stat(nearest.c_str(), &info) != 0 || !S_ISDIR(info.st_mode))
        fail("--out %s: %s is not a folder", out.c_str(), nearest.c_str());
    for (const char* name : {"latest", "config.json", "model.safetensors", "adapter_model.safetensors"}) {
        const std::string path = out + "/" + name;
        if (lstat(path.c_str(), &info) == 0 && !S_ISLNK(info.st_mode))
            fail("--out %s: has a %s that no save has linked there; choose another folder", out.c_str(),
                 name);
    }
    std::string probe = nearest + "/.probe-XXXXXX";
    bool good = mkdtemp(probe.data()) != nullptr;
    int reason = errno;
    if (good) {
        const std::string link = probe + "/link";
        good = symlink("nowhere", link.c_str()) == 0;
        reason = errno;
        unlink(link.c_str());
        rmdir(probe.c_str());
    }
    if (!good) fail("--out %s: cannot write in %s: %s", out.c_str(), nearest.c_str(), std::strerror(reason));
}
