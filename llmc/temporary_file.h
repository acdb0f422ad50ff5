// temporary_file.h - keeps a process's temporary data on disk in a file without a name, so that it is gone
// when the process ends, however it ends.
#pragma once

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <unistd.h>

#include "llmc/file.h"

// The folder for such files: TMPDIR, else /var/tmp, because /tmp may be in memory.
inline std::string temporary_folder() {
    const char* chosen = std::getenv("TMPDIR");
    return chosen && *chosen ? chosen : "/var/tmp";
}

// Creates a file without a name in `folder`, opened with O_RDWR and `flags`. If that fails, returns a
// negative number and errno says why.
inline int make_nameless_file(const std::string& folder, int flags) {
    std::string path = folder + "/train-XXXXXX";
    const int fd = mkostemp(path.data(), O_CLOEXEC | flags);
    if (fd >= 0) unlink(path.c_str());
    return fd;
}

// Bytes of such files that this process uses as working memory now.
inline uint64_t working_file_bytes = 0;

class TemporaryFile {
  public:
    // `holds` names the data in messages. The constructor, append() and finish() fail in one line that names
    // the folder.
    explicit TemporaryFile(std::string holds)
        : holds_(std::move(holds)), folder_(temporary_folder()), file_(make()), writes_(file_.fd()) {
        buffer_.reserve(kBufferBytes);
    }

    void append(const void* data, size_t bytes) {
        const char* first = static_cast<const char*>(data);
        if (buffer_.size() + bytes > kBufferBytes) flush();
        if (bytes > kBufferBytes)
            write(first, bytes);
        else
            buffer_.insert(buffer_.end(), first, first + bytes);
    }
    // Makes everything that was appended readable: it is on the disk, and not in the page cache.
    void finish() {
        flush();
        std::vector<char>().swap(buffer_);  // frees its memory too
        if (!writes_.finish()) fail_to("write");
    }
    void read(uint64_t first, size_t bytes, void* out) const {
        const ssize_t got = read_at(file_.fd(), first, bytes, out);
        if (got < 0) fail_to("read");
        if (static_cast<size_t>(got) < bytes) bug("%s were read beyond their end", holds_.c_str());
    }

    // Drops the file's pages from the page cache.
    void drop_pages() const { drop_pages_of(file_.fd()); }

  private:
    static constexpr size_t kBufferBytes = 256 << 10;

    int make() const {
        const int fd = make_nameless_file(folder_, 0);
        if (fd < 0) fail_to("keep");
        return fd;
    }
    void flush() {
        write(buffer_.data(), buffer_.size());
        buffer_.clear();
    }
    void write(const char* data, size_t bytes) {
        if (!writes_.write(data, bytes)) fail_to("write");
    }
    [[noreturn]] void fail_to(const char* action) const {
        fail("%s: cannot %s %s there: %s; TMPDIR can name another folder", folder_.c_str(), action,
             holds_.c_str(), write_error(errno).c_str());
    }

    std::string holds_, folder_;
    OpenFile file_;
    PassingWrites writes_;
    std::vector<char> buffer_;
};
