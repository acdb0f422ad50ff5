// file.h - reads, parses and writes files so that a crash or a full disk loses nothing.
//
// A save is atomic if it is written under another name (FileWriter), synced (finish) and then renamed
// (replace_file).
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "llmc/error.h"
#include "llmc/text.h"

// Opens those standard streams that were closed, so that no file of ours gets their descriptor numbers.
void open_standard_streams();

// The largest file that ulimit -f allows, in bytes; RLIM_INFINITY, the largest number, if there is no limit.
uint64_t file_size_limit();

// Describes the error of a failed write. If the file would exceed ulimit -f, names that limit.
std::string write_error(int error);

// Opens a file for writing and creates it if it is missing. `more` are further flags of open(2). A FIFO must
// have a process that reads it; otherwise open(2) would wait forever. Fails naming the file.
int open_output(const std::string& path, int more);

// An open file descriptor, closed at the end of its scope. Fails naming the file if it cannot be opened.
class OpenFile {
  public:
    OpenFile(const std::string& path, int flags) : fd_(open(path.c_str(), flags | O_CLOEXEC, 0666)) {
        if (fd_ < 0) fail("%s: cannot open: %s", path, std::strerror(errno));
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
ssize_t read_at(int fd, uint64_t first, size_t bytes, void* out);

// Writes all of the bytes to an open file. If that fails, returns false and errno says why.
bool write_all(int fd, const char* data, size_t bytes);

// Identifies a file and its content: it differs between two files, and before and after a change.
struct FileStamp {
    uint64_t device, inode, bytes;
    int64_t written;  // in nanoseconds
    bool operator==(const FileStamp&) const = default;
};
// The stamp of a file now. Fails naming the file.
FileStamp stamp_of(int fd, const std::string& path);

// Whether the page cache keeps what is read of a file. Large files that are read once would take memory there
// that the memory plan does not count.
enum class Pages { Kept, Dropped };

// When a file is read or written in order, this many bytes stay in the page cache before they are dropped. A
// multiple of every page size.
constexpr size_t kPagesWindow = 8 << 20;

// Drops an open file's pages from the page cache.
inline void drop_pages_of(int fd) { posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); }

// The folder of this program's executable; empty without /proc.
std::string program_folder();

// Reads a file piece by piece, so it takes no more memory than the pieces asked for. Fails if the file is
// missing or unreadable, or if it is a folder, a FIFO or a device (which may have no end).
class FileReader {
  public:
    explicit FileReader(const std::string& path, Pages pages = Pages::Kept);
    // Takes over a descriptor, as of open(2), of a file that messages call `path`.
    FileReader(const std::string& path, int fd, Pages pages);
    // Bytes [first, first + bytes) of a file as a file of their own.
    FileReader(const std::string& path, int fd, Pages pages, uint64_t first, size_t bytes)
        : FileReader(path, fd, pages) {
        first_ = first, size_ = bytes;
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
    void read(uint64_t first, size_t bytes, void* out) const;

    // Drops the file's pages from the page cache.
    void drop_pages() const { drop_pages_of(file_.fd()); }
    // Another descriptor of the open file, which the caller closes. Both have one position (lseek).
    int duplicate() const { return fcntl(file_.fd(), F_DUPFD_CLOEXEC, 0); }

  private:
    void read_kept(uint64_t first, size_t bytes, void* out) const;

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
std::optional<size_t> free_disk_bytes(const std::string& folder);

// The largest file that is read as a whole: several times the size of the largest tokenizers.
constexpr size_t kLargestText = 128 << 20;

// Fails if a file is a Git LFS pointer: the short text that stands for a large file until `git lfs pull`
// fetches it. `start` is how the file begins.
void refuse_lfs_pointer(const std::string& path, std::string_view start);
void refuse_lfs_pointer(const FileReader& file);

// Reads a whole file. Fails as FileReader does, if it is a Git LFS pointer, and if the file has more than
// kLargestText bytes.
std::string read_text(const std::string& path);

// Fails naming a file whose JSON a parser of the library refuses.
[[noreturn]] void fail_broken_json(const std::string& file, const std::exception& error);

// Parses JSON text that came from `file`. Fails in one line that names the file and the position of the
// error. A key that appears twice in an object is an error too, because JSON does not define which of them
// counts. `keep`, if any, is called for each parsed part with its nlohmann::json::parse_event_t, and returns
// whether to keep it; it must itself check the keys that it does not keep.
using KeepJson = std::function<bool(int event, const nlohmann::json& parsed)>;
nlohmann::json parse_json(std::string_view text, const std::string& file, const KeepJson& keep = nullptr);
// Parses a whole file; the second keeps the order of its keys.
nlohmann::json read_json(const std::string& path);
nlohmann::ordered_json read_ordered_json(const std::string& path);

// A path whose first part, if it is ~, is the home folder, as a shell writes it.
std::string with_home(const std::string& path);

// JSON as text, for a terminal too: if it has characters that print() would escape, it is written in ASCII
// alone. It may contain names of files in any encoding.
std::string json_text(const nlohmann::ordered_json& json, int indent = 2);

// Writes an open file in order, from its start on, through a buffer. At most two windows of it are in the
// page cache: one is being filled, the other is being written to the disk. A function that fails returns
// false, and errno says why.
class PassingWrites {
  public:
    PassingWrites(int fd, size_t buffer_bytes) : fd_(fd), buffer_bytes_(buffer_bytes) {
        buffer_.reserve(buffer_bytes);
    }
    bool write(const void* data, size_t bytes);
    // Writes out the buffer, and frees its memory. Call it after the last write().
    bool flush();
    // Waits until all is on the disk, and drops the file from the page cache.
    bool sync();

  private:
    bool write_through(const char* data, size_t bytes);
    bool pass_window();
    bool sync_window(uint64_t at, unsigned how) const;

    const int fd_;
    const size_t buffer_bytes_;
    uint64_t written_ = 0;
    std::vector<char> buffer_;
};

// Writes a file through a buffer; a file that exists is overwritten. Fails naming the file on every error of
// the system, such as a full disk. The file is complete only after finish(). None of it stays in the page
// cache.
class FileWriter {
  public:
    explicit FileWriter(const std::string& path);
    void write(const void* data, size_t bytes);
    void write(std::string_view text) { write(text.data(), text.size()); }
    // Writes out the buffer, waits until all is on the disk, and closes the file.
    void finish();

  private:
    [[noreturn]] void fail_to(const char* action) const;

    std::string path_;
    OpenFile file_;
    PassingWrites writes_;
};

// Makes changes to a folder durable: files created in it, renamed or removed.
void sync_directory(const std::string& path);

// The folder that has a file or folder of this name.
std::string folder_above(const std::string& path);

// Gives a finished file its final name in the same file system, replacing a file of that name. After a crash,
// either the old file or the new one is there, complete.
void replace_file(const std::string& finished, const std::string& path);

// Writes a whole file.
void write_text(const std::string& path, const std::string& text);
// Where replace_text() writes a file before it has its name: one name for each process.
std::string name_before(const std::string& path);
// Writes a whole file in place of one that may be there. After a crash, either the old or the new one is
// there, complete.
void replace_text(const std::string& path, const std::string& text);
// As text with an indentation of 2; bytes that are not UTF-8 are replaced.
void write_json(const std::string& path, const nlohmann::ordered_json& json);
void write_json(const std::string& path, const nlohmann::json& json);

// A folder's name without slashes at its end.
std::string without_last_slashes(std::string path);
// The file that a path leads to, even if it does not exist yet: follows links and resolves `a/..`.
std::string resolved(const std::string& path);
// True if two paths lead to the same file, whatever their names and links.
bool same_file(const std::string& a, const std::string& b);
