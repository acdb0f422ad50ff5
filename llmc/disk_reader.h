// disk_reader.h - reads pieces of files into memory while the program computes (disk_threads.h): straight
// from the disk (O_DIRECT), so that the page cache takes no memory beside the plan.
//
// A read from a disk is of whole sectors; pieces begin and end anywhere. So a request reads sectors into a
// thread's staging memory, and its pieces are copied from there to where they belong.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "llmc/disk_threads.h"
#include "llmc/file.h"

// So many bytes of a file, and where they belong: `at` bytes behind the address that a read is given.
struct FilePiece {
    const FileReader* file;
    uint64_t offset;
    size_t bytes, at;
};

// What a block of a model is made of: pieces of files, and numbers that no file has as they are needed.
struct BlockOnDisk {
    std::vector<FilePiece> pieces;
    std::vector<std::pair<size_t, float>> numbers;  // where each belongs
    size_t bytes = 0;
};

// A file that is read past the page cache.
class DirectFile {
  public:
    // Fails where its file system has no such reads.
    explicit DirectFile(const FileReader& file)
        : path_(file.path()), stamp_(file.stamp()), fd_(open_direct()) {
        if (stamp() != stamp_) fail_changed();
        file.drop_pages();  // of what was read before
    }
    // Reads sectors to memory that is aligned to them; behind the file's end there is nothing. Fails where
    // fewer than `needed` bytes come.
    void read(uint64_t first, size_t bytes, size_t needed, char* out) const {
        const ssize_t got = read_at(fd_.fd(), first, bytes, out);
        if (got < 0) fail("%s: cannot read: %s", path_.c_str(), std::strerror(errno));
        if (static_cast<size_t>(got) < needed) fail_changed();
    }
    // Fails where the file was written to since it was opened.
    void check_unchanged() const {
        if (stamp() != stamp_) fail_changed();
    }

  private:
    int open_direct() const {
        const int fd = open(path_.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
        if (fd < 0 && errno == EINVAL)
            fail("%s: its file system cannot be read past the page cache (O_DIRECT): copy it to one that can",
                 path_.c_str());
        if (fd < 0) fail("%s: cannot open: %s", path_.c_str(), std::strerror(errno));
        return fd;
    }
    FileStamp stamp() const { return stamp_of(fd_.fd(), path_); }
    [[noreturn]] void fail_changed() const {
        fail("%s: was changed since it was opened, and is still read from", path_.c_str());
    }

    std::string path_;
    FileStamp stamp_;
    OpenFile fd_;
};

// What is read together: the requests for some pieces.
class DiskReads {
  public:
    DiskReads() = default;
    // `direct` opens each file once.
    template <class Direct>
    DiskReads(std::vector<FilePiece> pieces, Direct&& direct) {
        std::sort(pieces.begin(), pieces.end(), [](const FilePiece& a, const FilePiece& b) {
            return std::pair(a.file, a.offset) < std::pair(b.file, b.offset);
        });
        const FileReader* last = nullptr;
        for (const FilePiece& p : pieces) {
            const DirectFile* file = direct(*p.file);
            for (size_t done = 0; done < p.bytes;) {
                const uint64_t from = p.offset + done;
                const bool goes_on = p.file == last && from >= requests_.back().first &&
                                     from <= requests_.back().end() + kSector &&
                                     from < requests_.back().first + kRequestBytes;
                if (!goes_on) requests_.push_back({file, from / kSector * kSector, 0, {}});
                last = p.file;
                Request& r = requests_.back();
                const size_t at = from - r.first, count = std::min(p.bytes - done, kRequestBytes - at);
                r.copies.push_back({at, count, p.at + done});
                r.needed = std::max(r.needed, at + count);
                done += count;
            }
        }
    }
    size_t count() const { return requests_.size(); }
    // Runs request number i by way of `staging`, of kRequestBytes.
    void run(size_t i, char* staging, char* to) const {
        const Request& r = requests_[i];
        r.file->read(r.first, r.bytes(), r.needed, staging);
        for (const Copy& c : r.copies) std::memcpy(to + c.to, staging + c.from, c.bytes);
    }
    // Fails where a file was changed meanwhile.
    void check() const {
        const DirectFile* last = nullptr;
        for (const Request& r : requests_)
            if (r.file != last) (last = r.file)->check_unchanged();
    }

  private:
    struct Copy {
        size_t from, bytes, to;
    };
    struct Request {
        const DirectFile* file;
        uint64_t first;
        size_t needed;  // bytes from there on
        std::vector<Copy> copies;
        size_t bytes() const { return whole_sectors(needed); }
        uint64_t end() const { return first + needed; }
    };
    std::vector<Request> requests_;
};
