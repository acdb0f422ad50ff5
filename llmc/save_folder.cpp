// save_folder.cpp - locks, saves and links, by the calls of the system; trainer_state.json, by one list of
// its keys; and the tokenizer's files.
#include "llmc/save_folder.h"

#include <sys/stat.h>
#include <sys/statvfs.h>

#include <filesystem>
#include <map>
#include <system_error>

#include "llmc/tokenizer_settings.h"

using nlohmann::json;

FileLock::FileLock(const std::string& path, int flags, Kind kind)
    : file_(std::make_shared<OpenFile>(open(path.c_str(), flags | O_CLOEXEC, 0666))),
      error_(fd() < 0 ? errno : 0) {
    if (fd() < 0) return;
    int status;
    while ((status = flock(fd(), kind | LOCK_NB)) != 0 && errno == EINTR) continue;
    if (status != 0 && errno == EWOULDBLOCK) {
        outcome_ = Busy;
    } else if (status == 0 || errno != ESTALE) {
        struct stat ours, there;
        const bool same = fstat(fd(), &ours) == 0 && stat(path.c_str(), &there) == 0 &&
                          ours.st_dev == there.st_dev && ours.st_ino == there.st_ino;
        outcome_ = !same ? Gone : status == 0 ? Held : Unsupported;
    }
}

std::vector<std::string> missing_folders(const std::string& path) {
    std::vector<std::string> missing;
    for (std::string folder = path; !file_exists(folder); folder = folder_above(folder))
        missing.push_back(folder);
    return missing;
}

void make_folders(const std::string& path) {
    const std::vector<std::string> missing = missing_folders(path);
    for (size_t i = missing.size(); i-- > 0;) {
        check_call(mkdir(missing[i].c_str(), 0777) == 0 || errno == EEXIST, missing[i], "make the folder");
        sync_directory(folder_above(missing[i]));
    }
}

void remove_folder(const std::string& path) {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    if (error) fail("%s: cannot remove: %s", path, error.message());
}

void replace_folder(const std::string& finished, const std::string& path) {
    if (renameat2(AT_FDCWD, finished.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0)
        return sync_directory(folder_above(path));
    if (errno != ENOENT && file_exists(path)) {
        remove_folder(path + ".old");
        check_call(std::rename(path.c_str(), (path + ".old").c_str()) == 0, path, "rename");
    }
    replace_file(finished, path);
}

void replace_link(const std::string& target, const std::string& path) {
    const std::string temporary = path + ".tmp";
    check_call(unlink(temporary.c_str()) == 0 || errno == ENOENT, temporary, "remove");
    check_call(symlink(target.c_str(), temporary.c_str()) == 0, temporary, "make the link");
    replace_file(temporary, path);
}

std::vector<std::string> list_folder(const std::string& path) {
    std::vector<std::string> names;
    std::error_code error;
    for (std::filesystem::directory_iterator at(path, error), end; !error && at != end; at.increment(error))
        names.push_back(at->path().filename().string());
    if (error) fail("%s: cannot list: %s", path, error.message());
    return names;
}

std::string link_target(const std::string& path) {
    std::error_code none;
    return std::filesystem::read_symlink(path, none).string();
}

int64_t step_of(const std::string& name) {
    int64_t step = -1;
    return std::sscanf(name.c_str(), "step-%18ld", &step) == 1 && step_name(step) == name ? step : -1;
}

std::set<int64_t> saved_steps(const std::string& out) {
    std::set<int64_t> steps;
    for (const std::string& name : list_folder(out))
        if (const int64_t step = step_of(name); step >= 0) steps.insert(step);
    return steps;
}

std::string save_without_link(const std::string& out) {
    std::error_code none;
    if (!link_target(out + "/latest").empty() || !std::filesystem::is_directory(out, none)) return "";
    std::string newest;
    for (const int64_t step : saved_steps(out))
        if (const std::string save = out + "/" + step_name(step); file_exists(save + "/trainer_state.json"))
            newest = save;
    return newest;
}

std::string resolve_save(const std::string& folder) {
    const std::string latest = link_target(folder + "/latest");
    return latest.empty() ? folder : (std::filesystem::path(folder) / latest).string();
}

HeldSave::HeldSave(const std::string& folder) {
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

void publish(const std::string& out, const std::string& name) {
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

int64_t SaveFolder::own_count() const {
    return std::ranges::count_if(saved_steps(path), [&](int64_t step) { return !others.contains(step); });
}

std::string SaveFolder::shown(int64_t step) const {
    const bool has_good = good && file_exists(path + "/" + step_name(*good));
    return step_name(has_good ? *good : step);
}

void remove_unfinished(const std::string& out, bool old_too) {
    for (const std::string& name : list_folder(out))
        if ((name.ends_with(".tmp") || (old_too && name.ends_with(".old"))) &&
            step_of(name.substr(0, name.size() - 4)) >= 0)
            remove_folder(out + "/" + name);
}

void remove_old_saves(const SaveFolder& folder, int64_t step) {
    const std::string& out = folder.path;
    remove_unfinished(out, true);
    std::vector<std::pair<bool, int64_t>> saves;  // (not after `step`, step)
    for (const int64_t s : saved_steps(out))
        if (!folder.others.contains(s)) saves.emplace_back(s <= step, s);
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

void check_writable(const std::string& out) {
    if (out.empty()) fail("--out is empty where the name of a folder is needed");
    struct stat info;
    std::string nearest = out;  // the closest existing folder above OUT
    while (lstat(nearest.c_str(), &info) != 0) {
        if (errno != ENOENT && errno != ENOTDIR) fail("--out %s: %s", out, std::strerror(errno));
        nearest = folder_above(nearest);
    }
    if (stat(nearest.c_str(), &info) != 0 || !S_ISDIR(info.st_mode))
        fail("--out %s: %s is not a folder", out, nearest);
    for (const char* name :
         {"latest", "best", "config.json", "model.safetensors", "adapter_model.safetensors"}) {
        const std::string path = out + "/" + name;
        if (lstat(path.c_str(), &info) == 0 && !S_ISLNK(info.st_mode))
            fail("--out %s has a %s that no save has linked there; choose another folder", out, name);
    }
    // A link of one name: if a run is killed here, the next one removes it.
    const std::string probe = nearest + "/.train-probe";
    const bool good =
        symlink("nowhere", probe.c_str()) == 0 || (errno == EEXIST && access(nearest.c_str(), W_OK) == 0);
    const int reason = errno;
    if (link_target(probe) == "nowhere") unlink(probe.c_str());
    if (!good) fail("--out %s: cannot write in %s: %s", out, nearest, std::strerror(reason));
}

HeldFolder::HeldFolder(const std::string& out, double seconds) : path_(out + "/.lock") {
    check_writable(out);
    made_ = missing_folders(out);
    for (;; seconds -= 0.05) {
        make_folders(out);
        lock_.emplace(path_, O_RDWR | O_CREAT | O_NOFOLLOW, FileLock::Exclusive);
        if (lock_->good()) break;
        errno = lock_->error();
        if (errno == ELOOP) fail("--out %s: %s is a symbolic link: remove it", out, path_);
        check_call(errno == 0 || errno == ENOENT, path_, "open");  // it may just have been removed
        if (seconds <= 0) fail_as_busy(out);
        usleep(50000);
    }
    if (lock_->outcome() == FileLock::Unsupported)
        print(stderr, "--out %s: no locks on this file system: let no other run save there\n", out);
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    const std::string owner = format("process %d on %s\n", static_cast<int>(getpid()), host);
    const bool told =
        ftruncate(lock_->fd(), 0) == 0 && pwrite(lock_->fd(), owner.data(), owner.size(), 0) > 0;
    static_cast<void>(told);  // only for messages
}

void HeldFolder::fail_as_busy(const std::string& out) const {
    char owner[300];
    const ssize_t length = pread(lock_->fd(), owner, sizeof owner, 0);
    const std::string_view line(owner, length > 0 ? static_cast<size_t>(length) : 0);
    fail("--out %s: another run saves there: %s", out, printable(line.substr(0, line.find('\n'))));
}

HeldFolder::~HeldFolder() {
    unlink(path_.c_str());
    for (const std::string& folder : made_) rmdir(folder.c_str());  // only removes empty folders
}

// ---- the progress of a run

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

// Names the saves in a folder in a message: "OUT has step-00000100, step-00000200"; "" if there are none. Of
// more than eight it names the first and the last.
static std::string list_saves(const std::string& out) {
    if (!std::filesystem::is_directory(out)) return "";
    const std::set<int64_t> steps = saved_steps(out);
    if (steps.empty()) return "";
    if (steps.size() <= 8) return out + " has " + joined(steps, ", ", step_name);
    return format("%s has %zu saves from %s to %s", out, steps.size(), step_name(*steps.begin()),
                  step_name(*steps.rbegin()));
}

Progress read_progress(const std::string& folder) {
    const std::string file = resolve_save(folder) + "/trainer_state.json";
    if (!file_exists(file)) {
        if (file_exists(folder)) fail("%s holds no training to resume: no trainer_state.json", folder);
        const std::string saves = list_saves(folder_above(without_last_slashes(folder)));
        fail("%s: there is no such folder%s", folder, saves.empty() ? "" : ("; " + saves).c_str());
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

// ---- the tokenizer's files

// Copies a file, part by part.
static void copy_file(const std::string& from, const std::string& to) {
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
static void copy_tokenizer(const TokenizerSource& from, const std::string& to) {
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
static void remove_templates(const std::string& path) {
    if (!file_exists(path)) return;
    auto settings = read_ordered_json(path);
    if (settings.is_object() && settings.erase("chat_template") > 0) write_json(path, settings);
}

// Names the tokenizer's class in a copy of its files, if the copy would be read with another one: the class
// may be decided by a config.json, which an adapter's folder lacks.
static void keep_tokenizer_class(const std::string& from, const std::string& to) {
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
    if (file_exists(path)) settings = read_ordered_json(path);
    settings["tokenizer_class"] = name;
    write_json(path, settings);
}

void write_tokenizer(const TokenizerSource& from, const std::string& to) {
    if (from.write)
        from.write(to);
    else if (!from.folder.empty())
        copy_tokenizer(from, to), keep_tokenizer_class(from.folder, to);
    if (from.chat_template.empty()) return;
    remove_templates(to + "/tokenizer_config.json");
    write_text(to + "/chat_template.jinja", from.chat_template);
}

Disk disk_of(std::string folder) {
    struct stat info;
    while (stat(folder.c_str(), &info) != 0 && folder != folder_above(folder)) folder = folder_above(folder);
    struct statvfs disk;
    if (stat(folder.c_str(), &info) != 0 || statvfs(folder.c_str(), &disk) != 0 || disk.f_blocks == 0)
        return {};
    return {info.st_dev, static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize)};
}

void check_disk_room(const std::vector<Written>& all) {
    const auto size = [](double bytes) { return size_text(static_cast<size_t>(bytes)); };
    std::map<uint64_t, double> taken;  // by disk: the bytes of the entries before
    for (const Written& w : all) {
        const std::string named = format("%s %s: %s", w.option, w.path, w.what);
        if (w.each.largest > file_size_limit())
            fail("%s: a file takes %zu bytes, and ulimit -f allows %lu", named, w.each.largest,
                 file_size_limit());
        const Disk disk = disk_of(w.path);
        if (disk.free < 0) continue;
        double& before = taken[disk.number];
        if (before + w.bytes() > disk.free) {
            const std::string times =
                w.count > 1 ? format(", %.0f of them %s", w.count, size(w.bytes())) : "";
            const std::string others =
                before > 0 ? format(" beside %s of %s", size(before), all[0].option) : "";
            fail("%s takes %s%s%s, and %s are free there", named, size(w.each.bytes), times, others,
                 size(disk.free));
        }
        before += w.bytes();
    }
}
