// file.h - files in and out: read, parsed, and written so that a crash or a full disk loses nothing.
//
// A save is atomic when it is written beside (FileWriter), synced (finish) and renamed (replace_file).
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "llmc/error.h"

// A name found in a file, fit for a one-line message: control characters and quotes escaped, cut at 80 bytes.
inline std::string printable(std::string_view text) {
    constexpr size_t kLongest = 80;
    std::string result;
    for (const char c : text.substr(0, kLongest)) {
        const bool plain = static_cast<unsigned char>(c) >= 0x20 && c != 0x7f && c != '"';
        result += plain ? std::string(1, c) : format("\\x%02x", static_cast<unsigned>(c) & 0xff);
    }
    return text.size() > kLongest ? result + "..." : result;
}

// Files that are opened must not get the numbers of standard streams that were closed.
inline void open_standard_streams() {
    while (true) {
        const int file = open("/dev/null", O_RDWR);
        if (file > 2) close(file);
        if (file < 0 || file > 2) return;
    }
}

// The most bytes that ulimit -f allows a file; RLIM_INFINITY without a limit.
inline rlim_t file_size_limit() {
    rlimit limit{};
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

// The text of an error number after a failed write. Beyond ulimit -f it names that limit.
inline std::string write_error(int error) {
    if (error != EFBIG || file_size_limit() == RLIM_INFINITY) return std::strerror(error);
    return format("%s (ulimit -f allows %llu bytes)", std::strerror(error),
                  static_cast<unsigned long long>(file_size_limit()));
}

// Opens a file to write in, which is made if it is missing; `more` are flags of open(2) beside those. A FIFO
// needs a process that reads it: without one, open(2) would wait for ever. Fails naming the file.
inline int open_output(const std::string& path, int more) {
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | more, 0666);
    if (fd < 0) {
        const int error = errno;
        struct stat info;
        if (error == ENXIO && stat(path.c_str(), &info) == 0 && S_ISFIFO(info.st_mode))
            fail("%s: is a FIFO that no process reads", path.c_str());
        fail("%s: cannot open: %s", path.c_str(), std::strerror(error));
    }
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    return fd;
}

// An open file descriptor, closed with its scope. Fails naming the file when it cannot be opened.
class OpenFile {
  public:
    OpenFile(const std::string& path, int flags) : fd_(open(path.c_str(), flags | O_CLOEXEC, 0666)) {
        if (fd_ < 0) fail("%s: cannot open: %s", path.c_str(), std::strerror(errno));
    }
    // Takes over one that is open.
    explicit OpenFile(int fd) : fd_(fd) {}
    OpenFile(const OpenFile&) = delete;
    OpenFile& operator=(const OpenFile&) = delete;
    ~OpenFile() {
        if (fd_ >= 0) close(fd_);
    }
    int fd() const { return fd_; }
    // Closes now and says whether that went well: some file systems report a failed write only here.
    bool close_now() { return close(std::exchange(fd_, -1)) == 0; }

  private:
    int fd_;
};

// Copies the bytes of an open file from `first` on. How many there were; -1 and errno where they cannot be
// read.
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

// Writes all of the bytes to an open file. Whether that went well; else errno says why not.
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

// What tells a file from any other, and from itself after a change.
struct FileStamp {
    uint64_t device, inode, bytes;
    int64_t written;  // in nanoseconds
    bool operator==(const FileStamp&) const = default;
};

// How an open file stands now; fails naming it.
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

// Whether the page cache keeps what is read of a file. What is large and read once would take memory there
// that no plan has.
enum class Pages { Kept, Dropped };

// So much of a file that is read or written in order is in the page cache before it is dropped. A multiple of
// any page.
constexpr size_t kPagesWindow = 8 << 20;

// Gives back what the page cache holds of an open file.
inline void drop_pages_of(int fd) { posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); }

// A file that is read piece by piece, so that no more of it takes memory than what was asked for. Fails when
// it is missing or unreadable, and for what else has a name: folders, FIFOs, and devices, which may not end.
class FileReader {
  public:
    explicit FileReader(const std::string& path, Pages pages = Pages::Kept)
        : path_(path),
          file_(path, O_RDONLY | O_NONBLOCK),  // the second: not to wait for a FIFO's writer
          pages_(pages) {
        const struct stat info = status_of(file_.fd(), path_);
        if (S_ISDIR(info.st_mode)) fail("%s: is a directory where a file is needed", path.c_str());
        if (!S_ISREG(info.st_mode)) fail("%s: is not a regular file", path.c_str());
        size_ = static_cast<size_t>(info.st_size);
    }
    ~FileReader() {
        if (has_dropped_) drop_pages();  // what is left of other windows
    }

    const std::string& path() const { return path_; }
    // When it was opened.
    size_t size() const { return size_; }
    // As the file is now.
    FileStamp stamp() const { return stamp_of(file_.fd(), path_); }

    // Copies the bytes from `first` on. Fails when they cannot be read or the file has become shorter.
    void read(uint64_t first, size_t bytes, void* out) const {
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

    // Gives back what the page cache holds of it.
    void drop_pages() const { drop_pages_of(file_.fd()); }

  private:
    void read_kept(uint64_t first, size_t bytes, void* out) const {
        const ssize_t got = read_at(file_.fd(), first, bytes, out);
        if (got < 0) fail("%s: cannot read: %s", path_.c_str(), std::strerror(errno));
        if (static_cast<size_t>(got) < bytes)
            fail("%s: ends at byte %llu and had %zu when it was opened: it was changed meanwhile",
                 path_.c_str(), static_cast<unsigned long long>(first) + static_cast<size_t>(got), size_);
    }

    std::string path_;
    OpenFile file_;
    const Pages pages_;
    size_t size_ = 0;
    mutable bool has_dropped_ = false;
};

// Whether something has that name.
inline bool file_exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

// The largest file that is read as a whole: several times the largest tokenizers there are.
constexpr size_t kLargestText = 128 << 20;

// The bytes of a file. Fails as FileReader does, and when there are more than kLargestText.
inline std::string read_text(const std::string& path) {
    const FileReader file(path);
    if (file.size() > kLargestText)
        fail("%s: has %zu bytes, and such a file may have %zu MiB", path.c_str(), file.size(),
             kLargestText >> 20);
    std::string text(file.size(), '\0');
    file.read(0, text.size(), text.data());
    return text;
}

// Parses JSON text that came from `file`. Fails in one line that names the file and the position of the
// error. A key given twice in one object is an error too: JSON leaves open which one counts. `keep` is asked
// whether to keep what has just been parsed, as nlohmann's parser asks its callback; it sees to the keys that
// it does not keep.
template <class Keep>
nlohmann::json parse_json(std::string_view text, const std::string& file, Keep&& keep) {
    using nlohmann::json;
    std::vector<std::set<std::string>> keys;  // of the objects that are open
    const auto note_keys = [&](int, json::parse_event_t event, json& parsed) {
        if (event == json::parse_event_t::object_start) keys.emplace_back();
        if (event == json::parse_event_t::object_end) keys.pop_back();
        if (!keep(event, parsed)) return false;
        if (event == json::parse_event_t::key) {
            const auto& key = parsed.get_ref<const std::string&>();
            if (!keys.back().insert(key).second)
                fail("%s: broken JSON: key \"%s\" appears twice", file.c_str(), printable(key).c_str());
        }
        return true;
    };
    try {
        return json::parse(text.begin(), text.end(), note_keys);
    } catch (const json::exception& error) {
        // The library's text starts with "[json.exception.parse_error.101] ", then gives line and column.
        std::string_view what = error.what();
        if (const size_t end = what.find("] "); end != what.npos) what.remove_prefix(end + 2);
        std::string line(what.substr(0, 300));
        std::replace_if(
            line.begin(), line.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
        fail("%s: broken JSON: %s", file.c_str(), line.c_str());
    }
}
inline nlohmann::json parse_json(std::string_view text, const std::string& file) {
    return parse_json(text, file, [](nlohmann::json::parse_event_t, const nlohmann::json&) { return true; });
}

// parse_json of a whole file.
inline nlohmann::json read_json(const std::string& path) { return parse_json(read_text(path), path); }

// Writes an open file in order, from its begin on. The page cache has at most two windows of it: one that is
// written to, and one that goes to the disk. Where something fails, errno says why.
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
    // Has the disk hold all of it, and the page cache nothing. A FIFO or a device has no disk (EINVAL).
    bool finish() {
        if (fsync(fd_) != 0 && errno != EINVAL) return false;
        drop_pages_of(fd_);
        return true;
    }

  private:
    // Has the window that is full go to the disk, and that before it be there.
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
    // A failed write is said here once, and then no more by fsync. Where there is no such call, fsync does.
    bool sync_window(uint64_t at, unsigned how) const {
        return sync_file_range(fd_, static_cast<off_t>(at), kPagesWindow, how) == 0 || errno == ENOSYS ||
               errno == EINVAL || errno == ESPIPE;
    }

    const int fd_;
    uint64_t written_ = 0;
};

// Writes a new file, or over an old one, through a buffer. Every error of the system, a full disk first among
// them, fails naming the file. Without finish() the file is incomplete. The page cache keeps none of it.
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

    // Writes what is buffered, waits until the disk has it all, and closes.
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

// Makes the names in a folder durable: files created in it, renamed or removed.
inline void sync_directory(const std::string& path) {
    const OpenFile folder(path, O_RDONLY | O_DIRECTORY);
    // EINVAL: a file system that has no such operation.
    if (fsync(folder.fd()) != 0 && errno != EINVAL)
        fail("%s: cannot sync: %s", path.c_str(), std::strerror(errno));
}

// Gives a finished file its final name in the same file system, in place of what had that name, durably:
// after a crash either the old file or the new one is there, whole.
inline void replace_file(const std::string& finished, const std::string& path) {
    if (std::rename(finished.c_str(), path.c_str()) != 0)
        fail("%s: cannot rename to %s: %s", finished.c_str(), path.c_str(), std::strerror(errno));
    const auto folder = std::filesystem::path(path).parent_path();
    sync_directory(folder.empty() ? "." : folder.string());
}
