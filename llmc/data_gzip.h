// data_gzip.h - data files that gzip has compressed. Such a file is unpacked into a temporary file, which is
// read in its place, and keeps its name in messages.
#pragma once

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
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
    explicit GzipReader(const std::string& path) : path_(path), file_(gzopen(path.c_str(), "rbe")) {
        if (!file_) fail("%s: cannot open: %s", path.c_str(), std::strerror(errno));
    }
    ~GzipReader() { gzclose(file_); }
    GzipReader(const GzipReader&) = delete;

    // Copies the next bytes, at most `most`, and returns how many there were: 0 at the end. Fails naming the
    // file if it is damaged or ends early.
    size_t read(char* out, unsigned most) {
        const int count = gzread(file_, out, most);
        int error = Z_OK;
        const char* const what = gzerror(file_, &error);
        if (error == Z_ERRNO) fail("%s: cannot read: %s", path_.c_str(), std::strerror(errno));
        if (count < 0 || error != Z_OK) {
            const std::string_view text = what;  // begins with the path
            const size_t after = text.starts_with(path_) ? path_.size() + 2 : 0;
            fail("%s: is a damaged gzip file: %s", path_.c_str(),
                 std::string(text.substr(std::min(after, text.size()))).c_str());
        }
        return static_cast<size_t>(count);
    }

  private:
    const std::string path_;
    const gzFile file_;
};

// The first bytes of a data file's content, at most `most`.
inline std::string start_of_data(const FileReader& file, unsigned most) {
    if (!is_gzip(file)) return first_bytes(file, most);
    std::string start(most, '\0');
    start.resize(GzipReader(file.path()).read(start.data(), most));
    return start;
}

// The content of a data file: of gzip's, a temporary file that lives as long as the result; of another, null.
// Fails as GzipReader does, and if there is no room in the folder for temporary files.
inline std::unique_ptr<const FileReader> unpacked(const FileReader& file) {
    if (!is_gzip(file)) return nullptr;
    TemporaryFile content("what " + file.path() + " contains");
    GzipReader packed(file.path());
    std::vector<char> part(256 << 10);
    while (const size_t count = packed.read(part.data(), static_cast<unsigned>(part.size())))
        content.append(part.data(), count);
    return content.finish_as(file.path());
}
