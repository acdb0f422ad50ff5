// file.cpp - reads, parses and writes files by the calls of POSIX, whose errors it names.
#include "llmc/file.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>

#include <nlohmann/json.hpp>

void open_standard_streams() {
    while (true) {
        const int file = open("/dev/null", O_RDWR);
        if (file > 2) close(file);
        if (file < 0 || file > 2) return;
    }
}

uint64_t file_size_limit() {
    rlimit limit{};
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

std::string write_error(int error) {
    if (error != EFBIG || file_size_limit() == RLIM_INFINITY) return std::strerror(error);
    return format("%s (ulimit -f allows %lu bytes)", std::strerror(error), file_size_limit());
}

int open_output(const std::string& path, int more) {
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | more, 0666);
    if (fd < 0) {
        const int error = errno;
        struct stat info;
        if (error == ENXIO && stat(path.c_str(), &info) == 0 && S_ISFIFO(info.st_mode))
            fail("%s is a FIFO that no process reads", path);
        fail("%s: cannot open: %s", path, std::strerror(error));
    }
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    return fd;
}

ssize_t read_at(int fd, uint64_t first, size_t bytes, void* out) {
    size_t done = 0;
    while (done < bytes) {
        const ssize_t got =
            pread(fd, static_cast<char*>(out) + done, bytes - done, static_cast<off_t>(first + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -1;
        if (got == 0) break;
        done += static_cast<size_t>(got);
    }
    return static_cast<ssize_t>(done);
}

bool write_all(int fd, const char* data, size_t bytes) {
    while (bytes > 0) {
        const ssize_t done = ::write(fd, data, bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return false;
        data += done;
        bytes -= static_cast<size_t>(done);
    }
    return true;
}

// The file's status now; fails naming the file.
static struct stat status_of(int fd, const std::string& path) {
    struct stat info;
    if (fstat(fd, &info) != 0) fail("%s: cannot stat: %s", path, std::strerror(errno));
    return info;
}

FileStamp stamp_of(int fd, const std::string& path) {
    const struct stat info = status_of(fd, path);
    return {info.st_dev, info.st_ino, static_cast<uint64_t>(info.st_size),
            int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec};
}

std::string program_folder() {
    std::error_code none;
    return std::filesystem::read_symlink("/proc/self/exe", none).parent_path().string();
}

FileReader::FileReader(const std::string& path, Pages pages)  // O_NONBLOCK: a FIFO would wait for its writer
    : FileReader(path, open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC), pages) {}

FileReader::FileReader(const std::string& path, int fd, Pages pages) : path_(path), file_(fd), pages_(pages) {
    if (fd < 0) fail("%s: cannot open: %s", path, std::strerror(errno));
    const struct stat info = status_of(file_.fd(), path_);
    if (S_ISDIR(info.st_mode)) fail("%s is a directory where a file is needed", path);
    if (!S_ISREG(info.st_mode)) fail("%s is not a regular file", path);
    size_ = static_cast<size_t>(info.st_size);
}

void FileReader::read(uint64_t first, size_t bytes, void* out) const {
    first += first_;
    if (pages_ == Pages::Kept) return read_kept(first, bytes, out);
    char* to = static_cast<char*>(out);
    for (const uint64_t end = first + bytes; first < end;) {
        const size_t count = std::min<uint64_t>(end - first, kPagesWindow - first % kPagesWindow);
        read_kept(first, count, to);
        first += count, to += count;
        if (first % kPagesWindow > 0) continue;
        posix_fadvise(file_.fd(), static_cast<off_t>(first - kPagesWindow), kPagesWindow,
                      POSIX_FADV_DONTNEED);
        has_dropped_ = true;
    }
}

void FileReader::read_kept(uint64_t first, size_t bytes, void* out) const {
    const ssize_t got = read_at(file_.fd(), first, bytes, out);
    if (got < 0) fail("%s: cannot read: %s", path_, std::strerror(errno));
    if (static_cast<size_t>(got) < bytes)
        fail("%s ends at byte %lu and had %zu when it was opened: it was changed meanwhile", path_,
             first + static_cast<size_t>(got), size_);
}

std::optional<size_t> free_disk_bytes(const std::string& folder) {
    struct statvfs disk;
    if (statvfs(folder.c_str(), &disk) != 0) return std::nullopt;
    return static_cast<size_t>(disk.f_bavail) * disk.f_frsize;
}

void refuse_lfs_pointer(const std::string& path, std::string_view start) {
    if (start.starts_with("version https://git-lfs.github.com/spec/v1"))
        fail("%s is a Git LFS pointer and not the file itself: run `git lfs pull` in its folder", path);
}

void refuse_lfs_pointer(const FileReader& file) {
    std::string start(std::min<size_t>(file.size(), 64), '\0');
    file.read(0, start.size(), start.data());
    refuse_lfs_pointer(file.path(), start);
}

std::string read_text(const std::string& path) {
    const FileReader file(path);
    if (file.size() > kLargestText)
        fail("%s has %zu bytes, and such a file may have %zu MiB", path, file.size(), kLargestText >> 20);
    std::string text(file.size(), '\0');
    file.read(0, text.size(), text.data());
    refuse_lfs_pointer(path, text);
    return text;
}

void fail_broken_json(const std::string& file, const std::exception& error) {
    // The library's message starts with "[json.exception.parse_error.101] " and then gives line and column.
    std::string_view what = error.what();
    if (const size_t end = what.find("] "); end != what.npos) what.remove_prefix(end + 2);
    std::string line(what.substr(0, 300));
    std::replace_if(
        line.begin(), line.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
    fail("%s: broken JSON: %s", file, line);
}

// `keep` gets each parsed part before its key is noted.
template <class Json, class Keep>
static Json parse(std::string_view text, const std::string& file, const Keep& keep) {
    using nlohmann::json;
    std::vector<std::set<std::string>> keys;  // the keys so far of each open object
    const auto note_keys = [&](int depth, json::parse_event_t event, Json& parsed) {
        // The library copies and writes values recursively.
        if (depth > 200) fail("%s: broken JSON: it nests more than 200 deep", file);
        if (event == json::parse_event_t::object_start) keys.emplace_back();
        if (event == json::parse_event_t::object_end) keys.pop_back();
        if (!keep(event, parsed)) return false;
        if (event == json::parse_event_t::key) {
            const auto& key = parsed.template get_ref<const std::string&>();
            if (!keys.back().insert(key).second)
                fail("%s: broken JSON: key \"%s\" appears twice", file, printable(key));
        }
        return true;
    };
    try {
        return Json::parse(text.begin(), text.end(), note_keys);
    } catch (const json::exception& error) {
        fail_broken_json(file, error);
    }
}

nlohmann::json parse_json(std::string_view text, const std::string& file, const KeepJson& keep) {
    return parse<nlohmann::json>(text, file,
                                 [&](nlohmann::json::parse_event_t event, const nlohmann::json& parsed) {
                                     return !keep || keep(static_cast<int>(event), parsed);
                                 });
}
nlohmann::json read_json(const std::string& path) { return parse_json(read_text(path), path); }
nlohmann::ordered_json read_ordered_json(const std::string& path) {
    return parse<nlohmann::ordered_json>(read_text(path), path, [](auto, const auto&) { return true; });
}

std::string with_home(const std::string& path) {
    const char* const home = getenv("HOME");
    return home && (path == "~" || path.starts_with("~/")) ? home + path.substr(1) : path;
}

std::string json_text(const nlohmann::ordered_json& json, int indent) {
    constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
    const std::string text = json.dump(indent, ' ', false, kReplace);
    return text == safe_text(text) ? text : json.dump(indent, ' ', true, kReplace);
}

bool PassingWrites::write(const void* data, size_t bytes) {
    const char* first = static_cast<const char*>(data);
    if (buffer_.size() + bytes > buffer_bytes_) {
        if (!write_through(buffer_.data(), buffer_.size())) return false;
        buffer_.clear();
    }
    if (bytes > buffer_bytes_) return write_through(first, bytes);
    buffer_.insert(buffer_.end(), first, first + bytes);
    return true;
}
bool PassingWrites::flush() {
    const std::vector<char> last = std::move(buffer_);
    return write_through(last.data(), last.size());
}
bool PassingWrites::sync() {
    // FIFOs and devices cannot be synced (EINVAL).
    if (fsync(fd_) != 0 && errno != EINVAL) return false;
    drop_pages_of(fd_);
    return true;
}

bool PassingWrites::write_through(const char* data, size_t bytes) {
    while (bytes > 0) {
        const size_t count = std::min<uint64_t>(bytes, kPagesWindow - written_ % kPagesWindow);
        if (!write_all(fd_, data, count)) return false;
        data += count, bytes -= count, written_ += count;
        if (written_ % kPagesWindow == 0 && !pass_window()) return false;
    }
    return true;
}
// Starts writing the full window to the disk, waits until the window before it is there, and drops that one.
bool PassingWrites::pass_window() {
    if (!sync_window(written_ - kPagesWindow, SYNC_FILE_RANGE_WRITE)) return false;
    if (written_ == kPagesWindow) return true;
    const uint64_t before = written_ - 2 * kPagesWindow;
    if (!sync_window(before,
                     SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER))
        return false;
    posix_fadvise(fd_, static_cast<off_t>(before), kPagesWindow, POSIX_FADV_DONTNEED);
    return true;
}
// A failed write is reported here once; fsync would not report it again. If the system or file lacks this
// call, fsync reports it.
bool PassingWrites::sync_window(uint64_t at, unsigned how) const {
    return sync_file_range(fd_, static_cast<off_t>(at), kPagesWindow, how) == 0 || errno == ENOSYS ||
           errno == EINVAL || errno == ESPIPE;
}

FileWriter::FileWriter(const std::string& path)
    : path_(path), file_(open_output(path, O_TRUNC)), writes_(file_.fd(), size_t{1} << 20) {}
void FileWriter::write(const void* data, size_t bytes) {
    if (!writes_.write(data, bytes)) fail_to("write");
}
void FileWriter::finish() {
    if (!writes_.flush()) fail_to("write");
    if (!writes_.sync()) fail_to("sync");
    if (!file_.close_now()) fail_to("close");
}
void FileWriter::fail_to(const char* action) const {
    fail("%s: cannot %s: %s", path_, action, write_error(errno));
}

void sync_directory(const std::string& path) {
    const OpenFile folder(path, O_RDONLY | O_DIRECTORY);
    // EINVAL: the file system does not support this.
    if (fsync(folder.fd()) != 0 && errno != EINVAL) fail("%s: cannot sync: %s", path, std::strerror(errno));
}

std::string folder_above(const std::string& path) {
    const std::string above = std::filesystem::path(path).parent_path().string();
    return above.empty() ? "." : above;
}

void replace_file(const std::string& finished, const std::string& path) {
    if (std::rename(finished.c_str(), path.c_str()) != 0)
        fail("%s: cannot rename to %s: %s", finished, path, std::strerror(errno));
    sync_directory(folder_above(path));
}

void write_text(const std::string& path, const std::string& text) {
    FileWriter file(path);
    file.write(text);
    file.finish();
}
std::string name_before(const std::string& path) { return path + ".new-" + std::to_string(getpid()); }
void replace_text(const std::string& path, const std::string& text) {
    write_text(name_before(path), text);
    replace_file(name_before(path), path);
}
void write_json(const std::string& path, const nlohmann::json& json) {
    write_text(path, json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}
void write_json(const std::string& path, const nlohmann::ordered_json& json) {
    write_text(path, json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

std::string without_last_slashes(std::string path) {
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    return path;
}

std::string resolved(const std::string& path) {
    namespace fs = std::filesystem;
    std::error_code none;
    fs::path file = fs::absolute(without_last_slashes(path), none);
    for (int links = 0; links < 40 && fs::is_symlink(file, none); links++)
        file = file.parent_path() / fs::read_symlink(file, none);
    return fs::weakly_canonical(file, none).string();
}

bool same_file(const std::string& a, const std::string& b) {
    std::error_code none;
    return resolved(a) == resolved(b) || std::filesystem::equivalent(a, b, none);
}
