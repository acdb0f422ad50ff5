// disk_reader.h - reads pieces of files into memory while the program computes (disk_queue.h). It reads past
// the page cache (O_DIRECT), which would take memory that the plan does not count.
//
// Such a read must consist of whole sectors, but pieces begin and end anywhere. So a request reads sectors
// into staging memory, and its pieces are copied from there to their destinations. If a request is whole
// sectors of one piece and its destination is aligned to sectors, it is read there directly.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "llmc/disk_queue.h"
#include "llmc/file.h"

// Bytes of a file and their destination: `at` bytes after the address that is given to the read.
struct FilePiece {
    const FileReader* file;
    uint64_t offset;
    size_t bytes, at;
};

// What a streamed block consists of: pieces of files, and numbers that the files do not have in this form.
struct BlockOnDisk {
    std::vector<FilePiece> pieces;
    std::vector<std::pair<size_t, float>> numbers;  // with the destination of each
    size_t bytes = 0;
};

// A file that is read past the page cache.
class DirectFile {
  public:
    // Fails if its file system does not support that.
    explicit DirectFile(const FileReader& file)
        : path_(file.path()), stamp_(file.stamp()), fd_(open_direct()) {
        if (stamp() != stamp_) fail_changed();
        file.drop_pages();  // the pages read before
    }
    int fd() const { return fd_.fd(); }
    // Reports that a read failed, with the error's number, or 0 if bytes were missing.
    [[noreturn]] void fail_at(int error) const {
        if (error == 0) fail_changed();
        fail("%s: cannot read: %s", path_.c_str(), std::strerror(error));
    }
    // Fails if the file was written to since it was opened.
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
        fail("%s was changed since it was opened, and is still read from", path_.c_str());
    }

    std::string path_;
    FileStamp stamp_;
    OpenFile fd_;
};

// Like FilePiece, of a file opened for direct reads.
struct DirectPiece {
    const DirectFile* file;
    uint64_t offset;
    size_t bytes, at;
};

// The requests that read some pieces.
class DiskReads {
  public:
    DiskReads() = default;
    // direct(file) opens a file; it is called once for each file.
    template <class Direct>
    DiskReads(const std::vector<FilePiece>& pieces, Direct&& direct) {
        std::map<const FileReader*, const DirectFile*> opened;
        std::vector<DirectPiece> all;
        for (const FilePiece& p : pieces) {
            const DirectFile*& file = opened[p.file];
            if (!file) file = direct(*p.file);
            all.push_back({file, p.offset, p.bytes, p.at});
        }
        add(std::move(all));
    }
    explicit DiskReads(std::vector<DirectPiece> pieces) { add(std::move(pieces)); }
    size_t count() const { return requests_.size(); }
    // Reads request number i to the destinations of its pieces, relative to `to`, by way of `staging`, which
    // has kRequestBytes, or straight.
    void read(size_t i, char* to, char* staging) const {
        const Request& r = requests_[i];
        char* const straight = straight_to(i, to);
        char* const memory = straight ? straight : staging;
        const ssize_t got = read_at(r.file->fd(), r.first, whole_sectors(r.needed), memory);
        if (got < 0 || static_cast<size_t>(got) < r.needed) r.file->fail_at(got < 0 ? errno : 0);
        if (straight) return;
        for (const Copy& c : r.copies) std::memcpy(to + c.to, memory + c.from, c.bytes);
    }
    // If request number i is whole sectors of one piece and its destination is aligned to sectors: the
    // destination. Else null.
    char* straight_to(size_t i, char* to) const {
        const Request& r = requests_[i];
        if (r.copies.size() != 1 || r.copies[0].from > 0 || r.needed % kSector > 0) return nullptr;
        char* const place = to + r.copies[0].to;
        return reinterpret_cast<uintptr_t>(place) % kSector == 0 ? place : nullptr;
    }
    // Starts all requests. This and `to` must exist until they are done.
    size_t start(DiskQueue& queue, char* to) const {
        return queue.start(count(), [this, to](size_t i, char* staging) { read(i, to, staging); });
    }
    // Fails if a file was changed meanwhile.
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
        size_t needed;  // number of bytes needed from `first` on
        std::vector<Copy> copies;
        uint64_t end() const { return first + needed; }
    };

    void add(std::vector<DirectPiece> pieces) {
        std::sort(pieces.begin(), pieces.end(), [](const DirectPiece& a, const DirectPiece& b) {
            return std::pair(a.file, a.offset) < std::pair(b.file, b.offset);
        });
        for (const DirectPiece& p : pieces)
            for (size_t done = 0; done < p.bytes;) {
                const uint64_t from = p.offset + done;
                const bool goes_on =
                    !requests_.empty() && p.file == requests_.back().file && from >= requests_.back().first &&
                    from <= requests_.back().end() + kSector && from < requests_.back().first + kRequestBytes;
                if (!goes_on) requests_.push_back({p.file, from / kSector * kSector, 0, {}});
                Request& r = requests_.back();
                const size_t at = from - r.first, count = std::min(p.bytes - done, kRequestBytes - at);
                r.copies.push_back({at, count, p.at + done});
                r.needed = std::max(r.needed, at + count);
                done += count;
            }
    }

    std::vector<Request> requests_;
};
