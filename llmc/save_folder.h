// save_folder.h - the folder of a run's saves, written, switched and cleaned up so that it shows a complete
// save at every moment; the lock that keeps other runs out of it; the tokenizer's files in it; and a check
// that there is enough space. What is in a save is in checkpoint.h.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/tokenizer_settings.h"

// ---- locks
//
// File locks that the kernel releases when the process ends, however it ends: flock(2).

// A lock of a file or folder. Tries once and does not wait.
class FileLock {
  public:
    enum Kind { Shared = LOCK_SH, Exclusive = LOCK_EX };
    enum Outcome {
        Held,
        Busy,        // another process has the lock
        Gone,        // `path` cannot be opened (error() says why), or no longer names the locked file
        Unsupported  // the file system has no locks
    };

    // `flags` are those of open(2). On NFS an exclusive lock needs a file that is open for writing.
    FileLock(const std::string& path, int flags, Kind kind)
        : fd_(open(path.c_str(), flags | O_CLOEXEC, 0666)), error_(fd_ < 0 ? errno : 0) {
        if (fd_ < 0) return;
        int status;
        while ((status = flock(fd_, kind | LOCK_NB)) != 0 && errno == EINTR) continue;
        if (status != 0 && errno == EWOULDBLOCK) {
            outcome_ = Busy;
        } else if (status == 0 || errno != ESTALE) {
            struct stat ours, there;
            const bool same = fstat(fd_, &ours) == 0 && stat(path.c_str(), &there) == 0 &&
                              ours.st_dev == there.st_dev && ours.st_ino == there.st_ino;
            outcome_ = !same ? Gone : status == 0 ? Held : Unsupported;
        }
    }
    FileLock(FileLock&& other) noexcept
        : fd_(std::exchange(other.fd_, -1)), error_(other.error_), outcome_(other.outcome_) {}
    FileLock& operator=(FileLock&& other) noexcept {
        std::swap(fd_, other.fd_);
        std::swap(error_, other.error_);
        std::swap(outcome_, other.outcome_);
        return *this;
    }
    ~FileLock() {
        if (fd_ >= 0) close(fd_);
    }

    int fd() const { return fd_; }
    int error() const { return error_; }
    Outcome outcome() const { return outcome_; }
    // True if it keeps others out, as far as the file system allows.
    bool good() const { return outcome_ == Held || outcome_ == Unsupported; }

  private:
    int fd_, error_;
    Outcome outcome_ = Gone;
};

// ---- the folder
//
//   OUT/step-00000200/       a save (checkpoint.h)
//   OUT/latest            -> step-00000200, the last good save
//   OUT/model.safetensors -> latest/model.safetensors, and the same for each other file of the save
//   OUT/.lock                while a run saves there (outputs.h)
//
// A save is written as step-*.tmp, synced, and renamed. Then `latest` is replaced by renaming, which switches
// every file of OUT at once. If the process is killed or the machine stops at any moment, OUT points to a
// complete save.
//
// A save is good if its last loss is not far above that of the run's first step and the gradient is not zero
// (Metrics::is_good()). The last good save is kept even if newer ones push it out, and OUT shows it, so that
// a resumed run continues from it. While a run has no good save, OUT shows the newest. That loss is of the
// weights before the last update, which may have destroyed them. So the good save before it, if there is one,
// stays until the next step: if that step is bad, the newer save is not good after all.

// Fails naming the file if a system call failed.
inline void check_call(bool good, const std::string& path, const char* action) {
    if (!good) fail("%s: cannot %s: %s", path.c_str(), action, std::strerror(errno));
}

inline std::string folder_above(const std::string& path) {
    const std::string above = std::filesystem::path(path).parent_path().string();
    return above.empty() ? "." : above;
}

// A folder's name without slashes at its end.
inline std::string without_last_slashes(std::string path) {
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    return path;
}

// Creates a folder and its missing parent folders, durably.
inline void make_folders(const std::string& path) {
    if (file_exists(path)) return;
    make_folders(folder_above(path));
    check_call(mkdir(path.c_str(), 0777) == 0 || errno == EEXIST, path, "make the folder");
    sync_directory(folder_above(path));
}

// Removes a folder and everything in it, if it exists.
inline void remove_folder(const std::string& path) {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    if (error) fail("%s: cannot remove: %s", path.c_str(), error.message().c_str());
}

// Gives a finished folder its final name, durably. If a folder has that name already, the two are exchanged
// in one step, so there is never a moment without one. File systems that cannot do that (NFS) have the old
// one as `path`.old for a moment.
inline void replace_folder(const std::string& finished, const std::string& path) {
    if (renameat2(AT_FDCWD, finished.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0)
        return sync_directory(folder_above(path));
    if (errno != ENOENT && file_exists(path)) {
        remove_folder(path + ".old");
        check_call(std::rename(path.c_str(), (path + ".old").c_str()) == 0, path, "rename");
    }
    replace_file(finished, path);
}

// Makes `path` a symbolic link, replacing an earlier one, durably.
inline void replace_link(const std::string& target, const std::string& path) {
    const std::string temporary = path + ".tmp";
    check_call(unlink(temporary.c_str()) == 0 || errno == ENOENT, temporary, "remove");
    check_call(symlink(target.c_str(), temporary.c_str()) == 0, temporary, "make the link");
    replace_file(temporary, path);
}

// The names of everything in a folder.
inline std::vector<std::string> list_folder(const std::string& path) {
    std::vector<std::string> names;
    std::error_code error;
    for (std::filesystem::directory_iterator at(path, error), end; !error && at != end; at.increment(error))
        names.push_back(at->path().filename().string());
    if (error) fail("%s: cannot list: %s", path.c_str(), error.message().c_str());
    return names;
}

// The target of a symbolic link, or "" if it is not a link.
inline std::string link_target(const std::string& path) {
    std::error_code none;
    return std::filesystem::read_symlink(path, none).string();
}

// "step-00000123", and its inverse: -1 if a name is not of that form.
inline std::string step_name(int64_t step) { return format("step-%08lld", static_cast<long long>(step)); }
inline int64_t step_of(const std::string& name) {
    long long step = -1;
    return std::sscanf(name.c_str(), "step-%18lld", &step) == 1 && step_name(step) == name ? step : -1;
}

// Where write_folder() (checkpoint.h) writes a folder before it is complete. What it finds there it removes.
inline std::string unfinished_folder(const std::string& path) { return without_last_slashes(path) + ".tmp"; }

// The newest save in OUT, if a run was killed before `latest` led to its first one; else "".
inline std::string save_without_link(const std::string& out) {
    std::error_code none;
    if (!link_target(out + "/latest").empty() || !std::filesystem::is_directory(out, none)) return "";
    int64_t newest = -1;
    for (const std::string& name : list_folder(out))
        if (file_exists(out + "/" + name + "/trainer_state.json")) newest = std::max(newest, step_of(name));
    return newest < 0 ? "" : out + "/" + step_name(newest);
}

// The save that a folder of saves shows now; any other folder is returned as it is. Read files that belong
// together from the returned folder, because `latest` may switch in between.
inline std::string resolve_save(const std::string& folder) {
    const std::string latest = link_target(folder + "/latest");
    return latest.empty() ? folder : (std::filesystem::path(folder) / latest).string();
}

// A save that is being read. While it is held, the run that made it does not remove it (remove_old_saves()).
class HeldSave {
  public:
    // Holds the save that a folder of saves shows, or the folder itself if it is of another kind. Does not
    // fail if there is none: the code that reads it will.
    explicit HeldSave(const std::string& folder) {
        for (int tries = 0; tries < 100; tries++) {
            path_ = resolve_save(folder);
            lock_.emplace(path_, O_RDONLY | O_DIRECTORY, FileLock::Shared);
            if (lock_->good()) return;
            if (lock_->outcome() == FileLock::Busy)
                usleep(1000);  // it is being removed right now
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

// Makes OUT show the save `name`. Links for new files are made first; they lead nowhere until `latest` is
// switched, so that all files appear at once. Links of files that this save lacks are removed last.
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

// Where a run saves: the folder, how many saves it keeps there (0: all), the steps of saves that it never
// removes because they are another run's, and the step of its last good save.
struct SaveFolder {
    std::string path;
    int keep = 0;
    std::set<int64_t> others = {};
    std::optional<int64_t> good = {};
    // The last good save before that one, which stays while no step after `good` has had a loss.
    std::optional<int64_t> fallback = {};
    std::optional<int64_t> best = {};  // the save with the lowest validation loss, which stays too
    // The number of saves in the folder that are not another run's.
    int64_t own_count() const;
    // The name of the save that the folder shows after `step` was saved: the last good one, or that of `step`
    // if none is good.
    std::string shown(int64_t step) const;
};

inline int64_t SaveFolder::own_count() const {
    int64_t count = 0;
    for (const std::string& name : list_folder(path))
        if (const int64_t step = step_of(name); step >= 0 && !others.contains(step)) count++;
    return count;
}

inline std::string SaveFolder::shown(int64_t step) const {
    const bool has_good = good && file_exists(path + "/" + step_name(*good));
    return step_name(has_good ? *good : step);
}

// Removes unfinished saves. Only for a run that has locked OUT.
inline void remove_unfinished(const std::string& out) {
    for (const std::string& name : list_folder(out))
        if (name.ends_with(".tmp") && step_of(name.substr(0, name.size() - 4)) >= 0)
            remove_folder(out + "/" + name);
}

// Removes what killed saves left behind, and all of the run's saves but `keep`. Kept are the save of `step`,
// then the latest before it, then the latest after it (which are there if a run was resumed from an earlier
// step), and besides them the last good ones. A save that is being read (HeldSave) stays until the next call.
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
        const int64_t s = saves[i].second;
        if (s == folder.good || s == folder.fallback || s == folder.best) continue;
        // Renamed first, so that whatever has the name of a save is complete.
        const std::string path = out + "/" + step_name(s);
        const FileLock lock(path, O_RDONLY | O_DIRECTORY, FileLock::Exclusive);
        if (lock.outcome() == FileLock::Busy) continue;
        check_call(std::rename(path.c_str(), (path + ".tmp").c_str()) == 0, path, "rename");
        remove_folder(path + ".tmp");
    }
}

// Fails unless OUT can be created (if it does not exist), written to and can have links, and has no files
// where a save's links must go. Leaves nothing behind.
inline void check_writable(const std::string& out) {
    if (out.empty()) fail("--out is empty where the name of a folder is needed");
    struct stat info;
    std::string nearest = out;  // the closest existing folder above OUT
    while (lstat(nearest.c_str(), &info) != 0) {
        if (errno != ENOENT && errno != ENOTDIR) fail("--out %s: %s", out.c_str(), std::strerror(errno));
        nearest = folder_above(nearest);
    }
    if (stat(nearest.c_str(), &info) != 0 || !S_ISDIR(info.st_mode))
        fail("--out %s: %s is not a folder", out.c_str(), nearest.c_str());
    for (const char* name :
         {"latest", "best", "config.json", "model.safetensors", "adapter_model.safetensors"}) {
        const std::string path = out + "/" + name;
        if (lstat(path.c_str(), &info) == 0 && !S_ISLNK(info.st_mode))
            fail("--out %s has a %s that no save has linked there; choose another folder", out.c_str(), name);
    }
    // A link of one name: if a run is killed here, the next one removes it.
    const std::string probe = nearest + "/.train-probe";
    const bool good =
        symlink("nowhere", probe.c_str()) == 0 || (errno == EEXIST && access(nearest.c_str(), W_OK) == 0);
    const int reason = errno;
    if (link_target(probe) == "nowhere") unlink(probe.c_str());
    if (!good) fail("--out %s: cannot write in %s: %s", out.c_str(), nearest.c_str(), std::strerror(reason));
}

// Locks the folder of saves for this run, by OUT/.lock. Creates the folder if it is missing, and removes it
// again if nothing was saved.
class HeldFolder {
  public:
    // Waits up to `seconds`, because a killed run keeps its lock until all of its memory is freed. Fails
    // naming the run that has the lock. On a file system without locks, says so and goes on.
    explicit HeldFolder(const std::string& out, double seconds = 10) : path_(out + "/.lock") {
        check_writable(out);
        for (std::string folder = out; !file_exists(folder); folder = folder_above(folder))
            made_.push_back(folder);
        for (;; seconds -= 0.05) {
            make_folders(out);
            lock_.emplace(path_, O_RDWR | O_CREAT | O_NOFOLLOW, FileLock::Exclusive);
            if (lock_->good()) break;
            errno = lock_->error();
            if (errno == ELOOP)
                fail("--out %s: %s is a symbolic link: remove it", out.c_str(), path_.c_str());
            check_call(errno == 0 || errno == ENOENT, path_, "open");  // it may just have been removed
            if (seconds <= 0) fail_as_busy(out);
            usleep(50000);
        }
        if (lock_->outcome() == FileLock::Unsupported)
            print(stderr, "--out %s: no locks on this file system: let no other run save there\n",
                  out.c_str());
        char host[256] = "";
        gethostname(host, sizeof host - 1);
        const std::string owner = format("process %d on %s\n", static_cast<int>(getpid()), host);
        const bool told =
            ftruncate(lock_->fd(), 0) == 0 && pwrite(lock_->fd(), owner.data(), owner.size(), 0) > 0;
        static_cast<void>(told);  // only for messages
    }
    HeldFolder(const HeldFolder&) = delete;
    ~HeldFolder() {
        unlink(path_.c_str());
        for (const std::string& folder : made_) rmdir(folder.c_str());  // only removes empty folders
    }

  private:
    [[noreturn]] void fail_as_busy(const std::string& out) const {
        char owner[300];
        const ssize_t length = pread(lock_->fd(), owner, sizeof owner, 0);
        const std::string_view line(owner, length > 0 ? static_cast<size_t>(length) : 0);
        fail("--out %s: another run saves there: %s", out.c_str(),
             printable(line.substr(0, line.find('\n'))).c_str());
    }

    std::string path_;
    std::vector<std::string> made_;  // the folders that were created, innermost first
    std::optional<FileLock> lock_;
};

// ---- the tokenizer's files
//
// Copies the tokenizer's files from the model into each save, so that a save can be used on its own.

inline constexpr const char* kTokenizerFiles[] = {
    "tokenizer.json",          "vocab.json",        "merges.txt",          "tokenizer.model",
    "tokenizer.model.v3",      "tekken.json",       "qwen.tiktoken",       "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"};
// For tokenizers with several chat templates: this folder has the further ones, as NAME.jinja.
inline constexpr const char* kTemplateFolder = "additional_chat_templates";

// Where the tokenizer of a save comes from: a folder to copy from, or a GGUF file, for which `write` makes
// the files in a folder. If both are empty, the save gets no tokenizer.
struct TokenizerSource {
    TokenizerSource(std::string from) : folder(std::move(from)) {}
    TokenizerSource(const char* from) : folder(from) {}
    TokenizerSource(std::function<void(const std::string& to)> writer) : write(std::move(writer)) {}

    std::string folder;
    std::function<void(const std::string& to)> write;
    std::string chat_template;  // replaces those of the folder, if it is not empty
};

// Copies a file, part by part.
inline void copy_file(const std::string& from, const std::string& to) {
    constexpr uint64_t kPart = 1 << 18;
    const FileReader in(from);
    FileWriter out(to);
    std::vector<char> part;
    for (uint64_t at = 0; at < in.size(); at += part.size()) {
        part.resize(std::min(kPart, in.size() - at));
        in.read(at, part.size(), part.data());
        out.write(part.data(), part.size());
    }
    out.finish();
}

// Copies the tokenizer's files from its folder, with its chat templates unless another replaces them.
inline void copy_tokenizer(const TokenizerSource& from, const std::string& to) {
    const bool keeps_templates = from.chat_template.empty();
    for (const std::string name : kTokenizerFiles) {
        const std::string file = from.folder + "/" + name;
        if (file_exists(file) && (keeps_templates || !name.starts_with("chat_template")))
            copy_file(file, to + "/" + name);
    }
    const std::string templates = from.folder + "/" + kTemplateFolder, copies = to + "/" + kTemplateFolder;
    struct stat info;
    const bool has_more = stat(templates.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
    if (!has_more || !keeps_templates) return;
    check_call(mkdir(copies.c_str(), 0777) == 0, copies, "make the folder");
    for (const std::string& name : list_folder(templates))
        if (name.ends_with(".jinja")) copy_file(templates + "/" + name, copies + "/" + name);
    sync_directory(copies);
}

// Removes the chat templates from a tokenizer_config.json, if it is there.
inline void remove_templates(const std::string& path) {
    if (!file_exists(path)) return;
    auto settings = parse_json<nlohmann::ordered_json>(read_text(path), path);
    if (settings.is_object() && settings.erase("chat_template") > 0)
        write_text(path, settings.dump(2) + "\n");
}

// Names the tokenizer's class in a copy of its files, if the copy would be read with another one: the class
// may be decided by a config.json, which an adapter's folder lacks.
inline void keep_tokenizer_class(const std::string& from, const std::string& to) {
    const auto class_in = [](const std::string& folder) -> std::string {
        const std::string name = tokenizer_class_of(folder, read_object(folder, "tokenizer_config.json"),
                                                    read_object(folder, "config.json"));
        return replaces_components(name) ? name : "PreTrainedTokenizerFast";
    };
    const std::string name = class_in(from), path = to + "/tokenizer_config.json";
    const bool has_tokenizer = file_exists(to + "/tokenizer.json") || file_exists(to + "/vocab.json") ||
                               file_exists(to + "/tokenizer.model");
    if (!has_tokenizer || name == class_in(to)) return;
    auto settings = nlohmann::ordered_json::object();
    if (file_exists(path)) settings = parse_json<nlohmann::ordered_json>(read_text(path), path);
    settings["tokenizer_class"] = name;
    write_text(path, settings.dump(2) + "\n");
}

// Writes the tokenizer's files into a folder.
inline void write_tokenizer(const TokenizerSource& from, const std::string& to) {
    if (from.write)
        from.write(to);
    else if (!from.folder.empty())
        copy_tokenizer(from, to), keep_tokenizer_class(from.folder, to);
    if (from.chat_template.empty()) return;
    remove_templates(to + "/tokenizer_config.json");
    write_text(to + "/chat_template.jinja", from.chat_template);
}

// ---- space on the disk
//
// Checks before the first step whether everything that a run will write fits on its disks and under ulimit
// -f. A save that fails after the last step would lose the training.

// The size of several files together, and of the largest of them.
struct WrittenFiles {
    double bytes = 0;
    size_t largest = 0;
    void add(size_t file) {
        bytes += static_cast<double>(file);
        largest = std::max(largest, file);
    }
};

// Files that an option makes a run write.
struct Written {
    const char* option;
    std::string path;  // a folder, which need not exist yet
    const char* what;  // "a save"
    WrittenFiles each;
    double count = 1;  // how many of them exist at the same time
    double bytes() const { return each.bytes * count; }
};

// The disk that has a folder: its device number and its free bytes; negative if the disk does not tell.
struct Disk {
    dev_t number = 0;
    double free = -1;
};
inline Disk disk_of(std::filesystem::path folder) {
    struct stat info;
    while (stat(folder.empty() ? "." : folder.c_str(), &info) != 0 && folder != folder.parent_path())
        folder = folder.parent_path();
    const char* const path = folder.empty() ? "." : folder.c_str();
    struct statvfs disk;
    if (stat(path, &info) != 0 || statvfs(path, &disk) != 0 || disk.f_blocks == 0) return {};
    return {info.st_dev, static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize)};
}

// Fails if the disks have too little space for all of it together, or if a file would be larger than ulimit
// -f allows.
inline void check_disk_room(const std::vector<Written>& all) {
    const auto size = [](double bytes) { return size_text(static_cast<size_t>(bytes)); };
    std::map<dev_t, double> taken;  // by disk: the bytes of the entries before
    for (const Written& w : all) {
        const std::string named = format("%s %s: %s", w.option, w.path.c_str(), w.what);
        if (w.each.largest > file_size_limit())
            fail("%s: a file takes %zu bytes, and ulimit -f allows %llu", named.c_str(), w.each.largest,
                 static_cast<unsigned long long>(file_size_limit()));
        const Disk disk = disk_of(w.path);
        if (disk.free < 0) continue;
        double& before = taken[disk.number];
        if (before + w.bytes() > disk.free) {
            const std::string times =
                w.count > 1 ? format(", %.0f of them %s", w.count, size(w.bytes()).c_str()) : "";
            const std::string others =
                before > 0 ? format(" beside %s of %s", size(before).c_str(), all[0].option) : "";
            fail("%s takes %s%s%s, and %s are free there", named.c_str(), size(w.each.bytes).c_str(),
                 times.c_str(), others.c_str(), size(disk.free).c_str());
        }
        before += w.bytes();
    }
}
