// data_gzip.h - data files that gzip has compressed. Such a file is unpacked into a temporary file, which is
// read in its place, and keeps its name in messages.
#pragma once

#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/temporary_file.h"

// The first bytes of a file, at most `most`.
inline std::string first_bytes(const FileReader& file, size_t most) {
    std::string start(std::min<uint64_t>(file.size(), most), '\0');
    file.read(0, start.size(), start.data());
    return start;
}

inline bool is_gzip(const FileReader& file) { return first_bytes(file, 3) == "\x1f\x8b\x08"; }

// Reads what a gzip file contains, from its start on.
class GzipReader {
  public:
    explicit GzipReader(const FileReader& file) : path_(file.path()) {
        const int fd = file.duplicate();
        if (fd >= 0 && lseek(fd, 0, SEEK_SET) == 0) file_ = gzdopen(fd, "rb");
        if (file_) return;
        const int error = errno;
        if (fd >= 0) close(fd);
        fail("%s: cannot open: %s", path_.c_str(), std::strerror(error));
    }
    ~GzipReader() { gzclose(file_); }
    GzipReader(const GzipReader&) = delete;

    // Copies the next bytes, at most `most`, and returns how many there were: 0 at the end. Fails naming the
    // file if it is damaged or ends early.
    size_t read(char* out, unsigned most) {
        const int count = gzread(file_, out, most);
        int error = Z_OK;
        std::string_view what = gzerror(file_, &error);
        if (error == Z_ERRNO) fail("%s: cannot read: %s", path_.c_str(), std::strerror(errno));
        if (count < 0 || error != Z_OK) {
            what.remove_prefix(std::min(what.size(), what.find(": ") + 2));  // "<fd:3>: "
            fail("%s is a damaged gzip file: %s", path_.c_str(), std::string(what).c_str());
        }
        return static_cast<size_t>(count);
    }

  private:
    const std::string path_;
    gzFile file_ = nullptr;
};

// The first bytes of a data file's content, at most `most`.
inline std::string start_of_data(const FileReader& file, unsigned most) {
    if (!is_gzip(file)) return first_bytes(file, most);
    std::string start(most, '\0');
    start.resize(GzipReader(file).read(start.data(), most));
    return start;
}

// Appends the content of a gzip file to a temporary file, and returns its size. Fails as GzipReader does, if
// the file is changed meanwhile, and if there is no room in the folder for temporary files.
inline uint64_t unpack(const FileReader& file, TemporaryFile& to) {
    const FileStamp before = file.stamp();
    GzipReader packed(file);
    std::vector<char> part(256 << 10);
    uint64_t bytes = 0;
    while (const size_t count = packed.read(part.data(), static_cast<unsigned>(part.size())))
        to.append(part.data(), count), bytes += count;
    to.finish();
    file.drop_pages();
    if (file.stamp() != before) fail("%s was written to while it was read", file.path().c_str());
    return bytes;
}

// The content of a gzip file, in a temporary file that lives as long as the result; of another file, null.
// Fails as unpack() does.
inline std::unique_ptr<const FileReader> unpacked(const FileReader& file) {
    if (!is_gzip(file)) return nullptr;
    TemporaryFile content("what " + file.path() + " contains");
    const uint64_t bytes = unpack(file, content);
    return content.part(file.path(), 0, bytes);
}
