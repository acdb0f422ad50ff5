// save_folder.h - the folder of a run's saves, written, switched and cleaned up so that it shows a complete
// save at every moment; the lock that keeps other runs out of it; the run's progress and the tokenizer's
// files in each save; and a check that there is enough space. What else is in a save is in checkpoint.h.
#pragma once

#include <sys/file.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/error.h"
#include "llmc/file.h"

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
    FileLock(const std::string& path, int flags, Kind kind);
    int fd() const { return file_->fd(); }
    int error() const { return error_; }
    Outcome outcome() const { return outcome_; }
    // True if it keeps others out, as far as the file system allows.
    bool good() const { return outcome_ == Held || outcome_ == Unsupported; }

  private:
    std::shared_ptr<const OpenFile> file_;
    int error_;
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
    if (!good) fail("%s: cannot %s: %s", path, action, std::strerror(errno));
}

// The folders of a path that do not exist, the innermost first.
std::vector<std::string> missing_folders(const std::string& path);
// Creates a folder and its missing parent folders, durably.
void make_folders(const std::string& path);

// Removes a folder and everything in it, if it exists.
void remove_folder(const std::string& path);

// Gives a finished folder its final name, durably. If a folder has that name already, the two are exchanged
// in one step, so there is never a moment without one. File systems that cannot do that (NFS) have the old
// one as `path`.old for a moment.
void replace_folder(const std::string& finished, const std::string& path);

// Makes `path` a symbolic link, replacing an earlier one, durably.
void replace_link(const std::string& target, const std::string& path);

// The names of everything in a folder.
std::vector<std::string> list_folder(const std::string& path);

// The target of a symbolic link, or "" if it is not a link.
std::string link_target(const std::string& path);

// "step-00000123", and its inverse: -1 if a name is not of that form.
inline std::string step_name(int64_t step) { return format("step-%08ld", step); }
int64_t step_of(const std::string& name);
// The steps of the saves in a folder.
std::set<int64_t> saved_steps(const std::string& out);

// Where write_folder() (checkpoint.h) writes a folder before it is complete. What it finds there it removes.
inline std::string unfinished_folder(const std::string& path) { return without_last_slashes(path) + ".tmp"; }

// The newest save in OUT, if a run was killed before `latest` led to its first one; else "".
std::string save_without_link(const std::string& out);

// The save that a folder of saves shows now; any other folder is returned as it is. Read files that belong
// together from the returned folder, because `latest` may switch in between.
std::string resolve_save(const std::string& folder);

// A save that is being read. While it is held, the run that made it does not remove it (remove_old_saves()).
class HeldSave {
  public:
    // Holds the save that a folder of saves shows, or the folder itself if it is of another kind. Does not
    // fail if there is none: the code that reads it will.
    explicit HeldSave(const std::string& folder);
    const std::string& path() const { return path_; }

  private:
    std::string path_;
    std::optional<FileLock> lock_;
};

// Makes OUT show the save `name`. Links for new files are made first; they lead nowhere until `latest` is
// switched, so that all files appear at once. Links of files that this save lacks are removed last.
void publish(const std::string& out, const std::string& name);

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

// Removes unfinished saves; `old_too`: and saves that others have replaced. Only for a run that has locked
// OUT.
void remove_unfinished(const std::string& out, bool old_too = false);

// Removes what killed saves left behind, and all of the run's saves but `keep`. Kept are the save of `step`,
// then the latest before it, then the latest after it (which are there if a run was resumed from an earlier
// step), and besides them the last good ones. A save that is being read (HeldSave) stays until the next call.
void remove_old_saves(const SaveFolder& folder, int64_t step);

// Fails unless OUT can be created (if it does not exist), written to and can have links, and has no files
// where a save's links must go. Leaves nothing behind.
void check_writable(const std::string& out);

// Locks the folder of saves for this run, by OUT/.lock. Creates the folder if it is missing, and removes it
// again if nothing was saved.
class HeldFolder {
  public:
    // Waits up to `seconds`, because a killed run keeps its lock until all of its memory is freed. Fails
    // naming the run that has the lock. On a file system without locks, says so and goes on.
    explicit HeldFolder(const std::string& out, double seconds = 10);
    HeldFolder(const HeldFolder&) = delete;
    ~HeldFolder();

  private:
    [[noreturn]] void fail_as_busy(const std::string& out) const;

    std::string path_;
    std::vector<std::string> made_;  // the folders that were created, innermost first
    std::optional<FileLock> lock_;
};

// ---- the progress of a run

// The lowest loss of a run's validations.
struct BestValidation {
    double loss = 0;
    int64_t step = 0;
    int64_t worse_since = 0;  // validations after it, none of which was better
};

// What a run needs besides the tensors to be resumed; trainer_state.json of a save.
struct Progress {
    int64_t step = 0;            // optimizer steps done
    int64_t sequences = 0;       // sequences of the training data read
    std::string precision = {};  // "fp32" or "bf16", of the build that saved; write_save() sets it
    bool evaluated = true;       // the validation and the sample due at this step are done
    bool validated = false;      // the validation is done, whose sample was interrupted
    nlohmann::json options = nlohmann::json::object();  // the run's options; a resumed run takes them over
    std::string formats =
        {};  // StateOptions::text() of the saved state; write_save() sets it; empty in older saves
    std::set<int64_t> others = {};  // steps of another run's saves in the same folder
    std::string directory = {};     // the options' relative names count from here; empty in older saves
    std::optional<double> first_loss = {};  // the loss of the run's first step
    std::optional<double> rate = {};        // the learning rate of the last step
    std::optional<int64_t> last_good = {};  // the step of the last good save (save_folder.h)
    std::optional<BestValidation> best = {};
    std::map<std::string, std::string> data = {};  // by option: data_facts() of its data (resume.h)
};

// Reads trainer_state.json of a save or of a folder of saves. Fails if it is missing or damaged.
Progress read_progress(const std::string& folder);
// Writes trainer_state.json of a save, in place of one that may be there.
void write_progress(const std::string& save, const Progress& progress);

// The step of the newest save in a folder that was not good, and whose run had its last good save at step
// `good`; -1 if there is none.
int64_t newest_bad_save(const std::string& out, int64_t good);

// Says so if a folder of saves, which an option names, shows the last good one of them instead of the newest.
// `save` is the save that it shows.
void remark_newer_bad_save(const char* option, const std::string& folder, const std::string& save);

// The folder OUT for a run that continues from the save `resumed`, or starts anew if that is empty. A run
// owns the saves in OUT only if it continues from one of them, and then only those that the earlier run
// owned.
SaveFolder open_save_folder(const std::string& out, int keep, const std::string& resumed);

// ---- an adapter's files

constexpr const char* kAdapterConfigFile = "adapter_config.json";
constexpr const char* kAdapterWeightsFile = "adapter_model.safetensors";
constexpr const char* kAdapterBaseFile = "adapter_base.json";

// True if a folder has an adapter, not a model.
inline bool is_adapter_folder(const std::string& folder) {
    return file_exists(folder + "/" + kAdapterConfigFile);
}

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

// Writes the tokenizer's files into a folder.
void write_tokenizer(const TokenizerSource& from, const std::string& to);

// ---- space on the disk
//
// Checks before the first step whether everything that a run will write fits on its disks and under ulimit
// -f. A save that fails after the last step would lose the training.

// The size of one or more files together, and of the largest of them.
struct WrittenFiles {
    double bytes;
    size_t largest;
    WrittenFiles(size_t file, size_t another = 0)
        : bytes(static_cast<double>(file) + static_cast<double>(another)), largest(std::max(file, another)) {}
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

// The disk that has a folder, which need not exist yet: its device number and its free bytes; negative if the
// disk does not tell.
struct Disk {
    uint64_t number = 0;
    double free = -1;
};
Disk disk_of(std::string folder);

// Fails if the disks have too little space for all of it together, or if a file would be larger than ulimit
// -f allows.
void check_disk_room(const std::vector<Written>& all);
