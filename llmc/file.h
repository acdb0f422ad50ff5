// file.h - reads, parses and writes files so that a crash or a full disk loses nothing.
//
// A save is atomic if it is written under another name (FileWriter), synced (finish) and then renamed
// (replace_file).
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "llmc/error.h"
#include "llmc/text.h"

// Opens those standard streams that were closed, so that no file of ours gets their descriptor numbers.
inline void open_standard_streams() {
    while (true) {
        const int file = open("/dev/null", O_RDWR);
        if (file > 2) close(file);
        if (file < 0 || file > 2) return;
    }
}

// The largest file that ulimit -f allows, in bytes; RLIM_INFINITY if there is no limit.
inline rlim_t file_size_limit() {
    rlimit limit{};
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

// Describes the error of a failed write. If the file would exceed ulimit -f, names that limit.
inline std::string write_error(int error) {
    if (error != EFBIG || file_size_limit() == RLIM_INFINITY) return std::strerror(error);
    return format("%s (ulimit -f allows %llu bytes)", std::strerror(error),
                  static_cast<unsigned long long>(file_size_limit()));
}

// Opens a file for writing and creates it if it is missing. `more` are further flags of open(2). A FIFO must
// have a process that reads it; otherwise open(2) would wait forever. Fails naming the file.
inline int open_output(const std::string& path, int more) {
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | more, 0666);
    if (fd < 0) {
        const int error = errno;
        struct stat info;
        if (error == ENXIO && stat(path.c_str(), &info) == 0 && S_ISFIFO(info.st_mode))
            fail("%s is a FIFO that no process reads", path.c_str());
        fail("%s: cannot open: %s", path.c_str(), std::strerror(error));
    }
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    return fd;
}

// An open file descriptor, closed at the end of its scope. Fails naming the file if it cannot be opened.
class OpenFile {
  public:
    OpenFile(const std::string& path, int flags) : fd_(open(path.c_str(), flags | O_CLOEXEC, 0666)) {
        if (fd_ < 0) fail("%s: cannot open: %s", path.c_str(), std::strerror(errno));
    }
    // Takes over a descriptor that is already open.
    explicit OpenFile(int fd) : fd_(fd) {}
    OpenFile(const OpenFile&) = delete;
    OpenFile& operator=(const OpenFile&) = delete;
    ~OpenFile() {
        if (fd_ >= 0) close(fd_);
    }
    int fd() const { return fd_; }
    // Closes the file now and returns whether that succeeded; some file systems report a failed write only
    // here.
    bool close_now() { return close(std::exchange(fd_, -1)) == 0; }

  private:
    int fd_;
};

// Copies bytes of an open file, from position `first` on. Returns how many there were, or -1 with errno if
// they cannot be read.
inline ssize_t read_at(int fd, uint64_t first, size_t bytes, void* out) {
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

// Writes all of the bytes to an open file. If that fails, returns false and errno says why.
inline bool write_all(int fd, const char* data, size_t bytes) {
    while (bytes > 0) {
        const ssize_t done = ::write(fd, data, bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return false;
        data += done;
        bytes -= static_cast<size_t>(done);
    }
    return true;
}

// Identifies a file and its content: it differs between two files, and before and after a change.
struct FileStamp {
    uint64_t device, inode, bytes;
    int64_t written;  // in nanoseconds
    bool operator==(const FileStamp&) const = default;
};

// The file's status now; fails naming the file.
inline struct stat status_of(int fd, const std::string& path) {
    struct stat info;
    if (fstat(fd, &info) != 0) fail("%s: cannot stat: %s", path.c_str(), std::strerror(errno));
    return info;
}
inline FileStamp stamp_of(int fd, const std::string& path) {
    const struct stat info = status_of(fd, path);
    return {info.st_dev, info.st_ino, static_cast<uint64_t>(info.st_size),
            int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec};
}

// Whether the page cache keeps what is read of a file. Large files that are read once would take memory there
// that the memory plan does not count.
enum class Pages { Kept, Dropped };

// When a file is read or written in order, this many bytes stay in the page cache before they are dropped. A
// multiple of every page size.
constexpr size_t kPagesWindow = 8 << 20;

// Drops an open file's pages from the page cache.
inline void drop_pages_of(int fd) { posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); }

// The folder of this program's executable; empty without /proc.
inline std::filesystem::path program_folder() {
    std::error_code none;
    return std::filesystem::read_symlink("/proc/self/exe", none).parent_path();
}

// Reads a file piece by piece, so it takes no more memory than the pieces asked for. Fails if the file is
// missing or unreadable, or if it is a folder, a FIFO or a device (which may have no end).
class FileReader {
  public:
    // O_NONBLOCK: a FIFO would wait for its writer.
    explicit FileReader(const std::string& path, Pages pages = Pages::Kept)
        : FileReader(path, open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC), pages) {}
    // Bytes [first, first + bytes) of a file as a file of their own, which messages call `path`. Takes over
    // the descriptor.
    FileReader(const std::string& path, int fd, Pages pages, uint64_t first, size_t bytes)
        : FileReader(path, fd, pages) {
        first_ = first, size_ = bytes;
    }
    // Takes over a descriptor, as of open(2), of a file that messages call `path`.
    FileReader(const std::string& path, int fd, Pages pages) : path_(path), file_(fd), pages_(pages) {
        if (fd < 0) fail("%s: cannot open: %s", path.c_str(), std::strerror(errno));
        const struct stat info = status_of(file_.fd(), path_);
        if (S_ISDIR(info.st_mode)) fail("%s is a directory where a file is needed", path.c_str());
        if (!S_ISREG(info.st_mode)) fail("%s is not a regular file", path.c_str());
        size_ = static_cast<size_t>(info.st_size);
    }
    ~FileReader() {
        if (has_dropped_) drop_pages();  // also of windows that were read only in part
    }

    const std::string& path() const { return path_; }
    // The size when the file was opened.
    size_t size() const { return size_; }
    // The stamp of the file as it is now.
    FileStamp stamp() const { return stamp_of(file_.fd(), path_); }

    // Copies `bytes` bytes from position `first` on. Fails if they cannot be read or the file has become
    // shorter.
    void read(uint64_t first, size_t bytes, void* out) const {
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

    // Drops the file's pages from the page cache.
    void drop_pages() const { drop_pages_of(file_.fd()); }
    // Another descriptor of the open file, which the caller closes. Both have one position (lseek).
    int duplicate() const { return fcntl(file_.fd(), F_DUPFD_CLOEXEC, 0); }

  private:
    void read_kept(uint64_t first, size_t bytes, void* out) const {
        const ssize_t got = read_at(file_.fd(), first, bytes, out);
        if (got < 0) fail("%s: cannot read: %s", path_.c_str(), std::strerror(errno));
        if (static_cast<size_t>(got) < bytes)
            fail("%s ends at byte %llu and had %zu when it was opened: it was changed meanwhile",
                 path_.c_str(), static_cast<unsigned long long>(first) + static_cast<size_t>(got), size_);
    }

    std::string path_;
    OpenFile file_;
    const Pages pages_;
    uint64_t first_ = 0;
    size_t size_ = 0;
    mutable bool has_dropped_ = false;
};

// True if a file or anything else has this name.
inline bool file_exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

// The bytes that are free on the disk that has this folder; nothing, with errno, if it does not tell.
inline std::optional<size_t> free_disk_bytes(const std::string& folder) {
    struct statvfs disk;
    if (statvfs(folder.c_str(), &disk) != 0) return std::nullopt;
    return static_cast<size_t>(disk.f_bavail) * disk.f_frsize;
}

// The largest file that is read as a whole: several times the size of the largest tokenizers.
constexpr size_t kLargestText = 128 << 20;

// Fails if a file is a Git LFS pointer: the short text that stands for a large file until `git lfs pull`
// fetches it. `start` is how the file begins.
inline void refuse_lfs_pointer(const std::string& path, std::string_view start) {
    if (start.starts_with("version https://git-lfs.github.com/spec/v1"))
        fail("%s is a Git LFS pointer and not the file itself: run `git lfs pull` in its folder",
             path.c_str());
}
inline void refuse_lfs_pointer(const FileReader& file) {
    std::string start(std::min<size_t>(file.size(), 64), '\0');
    file.read(0, start.size(), start.data());
    refuse_lfs_pointer(file.path(), start);
}

// Reads a whole file. Fails as FileReader does, if it is a Git LFS pointer, and if the file has more than
// kLargestText bytes.
inline std::string read_text(const std::string& path) {
    const FileReader file(path);
    if (file.size() > kLargestText)
        fail("%s has %zu bytes, and such a file may have %zu MiB", path.c_str(), file.size(),
             kLargestText >> 20);
    std::string text(file.size(), '\0');
    file.read(0, text.size(), text.data());
    refuse_lfs_pointer(path, text);
    return text;
}

// Fails naming a file whose JSON a parser of the library refuses.
[[noreturn]] inline void fail_broken_json(const std::string& file, const nlohmann::json::exception& error) {
    // The library's message starts with "[json.exception.parse_error.101] " and then gives line and column.
    std::string_view what = error.what();
    if (const size_t end = what.find("] "); end != what.npos) what.remove_prefix(end + 2);
    std::string line(what.substr(0, 300));
    std::replace_if(
        line.begin(), line.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
    fail("%s: broken JSON: %s", file.c_str(), line.c_str());
}

// Parses JSON text that came from `file`. Fails in one line that names the file and the position of the
// error. A key that appears twice in an object is an error too, because JSON does not define which of them
// counts. `keep` is called for each parsed part, like the callback of nlohmann's parser, and returns whether
// to keep it; it must itself check the keys that it does not keep.
template <class Json = nlohmann::json, class Keep>
Json parse_json(std::string_view text, const std::string& file, Keep&& keep) {
    using nlohmann::json;
    std::vector<std::set<std::string>> keys;  // the keys so far of each open object
    const auto note_keys = [&](int depth, json::parse_event_t event, Json& parsed) {
        // The library copies and writes values recursively.
        if (depth > 200) fail("%s: broken JSON: it nests more than 200 deep", file.c_str());
        if (event == json::parse_event_t::object_start) keys.emplace_back();
        if (event == json::parse_event_t::object_end) keys.pop_back();
        if (!keep(event, parsed)) return false;
        if (event == json::parse_event_t::key) {
            const auto& key = parsed.template get_ref<const std::string&>();
            if (!keys.back().insert(key).second)
                fail("%s: broken JSON: key \"%s\" appears twice", file.c_str(), printable(key).c_str());
        }
        return true;
    };
    try {
        return Json::parse(text.begin(), text.end(), note_keys);
    } catch (const json::exception& error) {
        fail_broken_json(file, error);
    }
}
template <class Json = nlohmann::json>
Json parse_json(std::string_view text, const std::string& file) {
    return parse_json<Json>(text, file, [](auto, const Json&) { return true; });
}

// Parses a whole file with parse_json.
inline nlohmann::json read_json(const std::string& path) { return parse_json(read_text(path), path); }

// A path whose first part, if it is ~, is the home folder, as a shell writes it.
inline std::string with_home(const std::string& path) {
    const char* const home = getenv("HOME");
    return home && (path == "~" || path.starts_with("~/")) ? home + path.substr(1) : path;
}

// JSON as text, for a terminal too: if it has characters that print() would escape, it is written in ASCII
// alone. It may contain names of files in any encoding.
inline std::string json_text(const nlohmann::ordered_json& json, int indent = 2) {
    constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
    const std::string text = json.dump(indent, ' ', false, kReplace);
    return text == safe_text(text) ? text : json.dump(indent, ' ', true, kReplace);
}

// Writes an open file in order, from its start on. At most two windows of it are in the page cache: one is
// being filled, the other is being written to the disk. After a failure, errno says why.
class PassingWrites {
  public:
    explicit PassingWrites(int fd) : fd_(fd) {}

    bool write(const char* data, size_t bytes) {
        while (bytes > 0) {
            const size_t count = std::min<uint64_t>(bytes, kPagesWindow - written_ % kPagesWindow);
            if (!write_all(fd_, data, count)) return false;
            data += count, bytes -= count, written_ += count;
            if (written_ % kPagesWindow == 0 && !pass_window()) return false;
        }
        return true;
    }
    // Waits until all is on the disk, and drops the file from the page cache. FIFOs and devices cannot be
    // synced (EINVAL); that is no error.
    bool finish() {
        if (fsync(fd_) != 0 && errno != EINVAL) return false;
        drop_pages_of(fd_);
        return true;
    }

  private:
    // Starts writing the full window to the disk, waits until the window before it is there, and drops that
    // one.
    bool pass_window() {
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
    bool sync_window(uint64_t at, unsigned how) const {
        return sync_file_range(fd_, static_cast<off_t>(at), kPagesWindow, how) == 0 || errno == ENOSYS ||
               errno == EINVAL || errno == ESPIPE;
    }

    const int fd_;
    uint64_t written_ = 0;
};

// Writes a file through a buffer; a file that exists is overwritten. Fails naming the file on every error of
// the system, such as a full disk. The file is complete only after finish(). None of it stays in the page
// cache.
class FileWriter {
  public:
    explicit FileWriter(const std::string& path)
        : path_(path), file_(open_output(path, O_TRUNC)), writes_(file_.fd()) {
        buffer_.reserve(kBufferBytes);
    }

    void write(const void* data, size_t bytes) {
        if (buffer_.size() + bytes > kBufferBytes) flush();
        const char* first = static_cast<const char*>(data);
        if (bytes > kBufferBytes)
            write_through(first, bytes);
        else
            buffer_.insert(buffer_.end(), first, first + bytes);
    }
    void write(std::string_view text) { write(text.data(), text.size()); }

    // Writes out the buffer, waits until all is on the disk, and closes the file.
    void finish() {
        flush();
        if (!writes_.finish()) fail_to("sync");
        if (!file_.close_now()) fail_to("close");
    }

  private:
    static constexpr size_t kBufferBytes = 1 << 20;

    void flush() {
        write_through(buffer_.data(), buffer_.size());
        buffer_.clear();
    }
    void write_through(const char* data, size_t bytes) {
        if (!writes_.write(data, bytes)) fail_to("write");
    }

    [[noreturn]] void fail_to(const char* action) const {
        fail("%s: cannot %s: %s", path_.c_str(), action, write_error(errno).c_str());
    }

    std::string path_;
    OpenFile file_;
    PassingWrites writes_;
    std::vector<char> buffer_;
};

// Makes changes to a folder durable: files created in it, renamed or removed.
inline void sync_directory(const std::string& path) {
    const OpenFile folder(path, O_RDONLY | O_DIRECTORY);
    // EINVAL: the file system does not support this.
    if (fsync(folder.fd()) != 0 && errno != EINVAL)
        fail("%s: cannot sync: %s", path.c_str(), std::strerror(errno));
}

// Gives a finished file its final name in the same file system, replacing a file of that name. After a crash,
// either the old file or the new one is there, complete.
inline void replace_file(const std::string& finished, const std::string& path) {
    if (std::rename(finished.c_str(), path.c_str()) != 0)
        fail("%s: cannot rename to %s: %s", finished.c_str(), path.c_str(), std::strerror(errno));
    const auto folder = std::filesystem::path(path).parent_path();
    sync_directory(folder.empty() ? "." : folder.string());
}

// Writes a whole file.
inline void write_text(const std::string& path, const std::string& text) {
    FileWriter file(path);
    file.write(text);
    file.finish();
}
// Where replace_text() writes a file before it has its name: one name for each process.
inline std::string name_before(const std::string& path) { return path + ".new-" + std::to_string(getpid()); }
// Writes a whole file in place of one that may be there. After a crash, either the old or the new one is
// there, complete.
inline void replace_text(const std::string& path, const std::string& text) {
    write_text(name_before(path), text);
    replace_file(name_before(path), path);
}
// As text with an indentation of 2; bytes that are not UTF-8 are replaced.
inline void write_json(const std::string& path, const nlohmann::json& json) {
    write_text(path, json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}
