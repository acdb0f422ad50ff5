// file.h - files in and out: mapped, read, parsed, and written so that a crash or a full disk loses nothing.
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
#include <sys/mman.h>
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

// An open file descriptor, closed with its scope. Fails naming the file when it cannot be opened.
class OpenFile {
  public:
    OpenFile(const std::string& path, int flags) : fd_(open(path.c_str(), flags | O_CLOEXEC, 0666)) {
        if (fd_ < 0) fail("%s: cannot open: %s", path.c_str(), std::strerror(errno));
    }
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

// A whole file, mapped read only; an empty file has size 0 and no data. Fails when the file is missing,
// unreadable or not a regular file. The file must not be shortened while it is mapped.
class MappedFile {
  public:
    explicit MappedFile(const std::string& path) : path_(path) {
        const OpenFile file(path, O_RDONLY);
        struct stat info;
        if (fstat(file.fd(), &info) != 0) fail("%s: cannot stat: %s", path.c_str(), std::strerror(errno));
        if (S_ISDIR(info.st_mode)) fail("%s: is a directory where a file is needed", path.c_str());
        if (!S_ISREG(info.st_mode)) fail("%s: is not a regular file", path.c_str());
        if (info.st_size == 0) return;
        const auto size = static_cast<size_t>(info.st_size);
        void* address = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.fd(), 0);
        if (address == MAP_FAILED) fail("%s: cannot map: %s", path.c_str(), std::strerror(errno));
        data_ = static_cast<const unsigned char*>(address);
        size_ = size;
    }
    MappedFile(MappedFile&& other) noexcept
        : path_(std::move(other.path_)),
          data_(std::exchange(other.data_, nullptr)),
          size_(std::exchange(other.size_, 0)) {}
    MappedFile& operator=(MappedFile&& other) noexcept {
        std::swap(path_, other.path_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~MappedFile() {
        if (data_) munmap(const_cast<unsigned char*>(data_), size_);
    }

    // Tells the system that reads will jump about, so that it does not fetch megabytes around each of them.
    void expect_random_reads() const {
        if (data_) madvise(const_cast<unsigned char*>(data_), size_, MADV_RANDOM);
    }

    const std::string& path() const { return path_; }
    const unsigned char* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    std::string path_;
    const unsigned char* data_ = nullptr;
    size_t size_ = 0;
};

// Whether something has that name.
inline bool file_exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

// The bytes of a file. Fails when it is missing, unreadable or a directory.
inline std::string read_text(const std::string& path) {
    const OpenFile file(path, O_RDONLY);
    std::string text;
    std::vector<char> chunk(1 << 16);
    for (;;) {
        const ssize_t got = read(file.fd(), chunk.data(), chunk.size());
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) fail("%s: cannot read: %s", path.c_str(), std::strerror(errno));
        if (got == 0) return text;
        text.append(chunk.data(), static_cast<size_t>(got));
    }
}

// Parses JSON text that came from `file`. Fails in one line that names the file and the position of the
// error. A key given twice in one object is an error too: JSON leaves open which one counts.
inline nlohmann::json parse_json(std::string_view text, const std::string& file) {
    using nlohmann::json;
    std::vector<std::set<std::string>> keys;  // of the objects that are open
    const auto note_keys = [&](int, json::parse_event_t event, json& parsed) {
        if (event == json::parse_event_t::object_start) keys.emplace_back();
        if (event == json::parse_event_t::object_end) keys.pop_back();
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

// parse_json of a whole file.
inline nlohmann::json read_json(const std::string& path) { return parse_json(read_text(path), path); }

// Writes a new file, or over an old one, through a buffer. Every error of the system, a full disk first among
// them, fails naming the file. Without finish() the file is incomplete.
class FileWriter {
  public:
    explicit FileWriter(const std::string& path) : path_(path), file_(path, O_WRONLY | O_CREAT | O_TRUNC) {
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
        if (fsync(file_.fd()) != 0) fail_to("sync");
        if (!file_.close_now()) fail_to("close");
    }

  private:
    static constexpr size_t kBufferBytes = 1 << 20;

    void flush() {
        write_through(buffer_.data(), buffer_.size());
        buffer_.clear();
    }

    void write_through(const char* data, size_t bytes) {
        while (bytes > 0) {
            const ssize_t done = ::write(file_.fd(), data, bytes);
            if (done < 0 && errno == EINTR) continue;
            if (done < 0) fail_to("write");
            data += done;
            bytes -= static_cast<size_t>(done);
        }
    }

    [[noreturn]] void fail_to(const char* action) const {
        fail("%s: cannot %s: %s", path_.c_str(), action, std::strerror(errno));
    }

    std::string path_;
    OpenFile file_;
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
