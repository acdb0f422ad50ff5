// disk_request.h - a disk request past the page cache (O_DIRECT): whole sectors, with memory that is aligned
// to sectors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

constexpr size_t kSector = 4096;           // a multiple of the sector size of every usual disk
constexpr size_t kRequestBytes = 2 << 20;  // the most bytes that a request moves
constexpr int kDiskRequests = 4;           // at the same time

constexpr size_t whole_sectors(size_t bytes) { return (bytes + kSector - 1) / kSector * kSector; }

// Sectors to write, and then others to read to the same memory. Either may be absent.
struct DiskRequest {
    struct Sectors {
        int fd;
        uint64_t at;
        size_t bytes, needed;  // at least `needed` bytes must be moved; a file may end after them
    };
    std::optional<Sectors> write, read;
    char* memory = nullptr;  // null: staging memory of kRequestBytes
};

// Several requests that belong together. Its functions are called from other threads than the one that starts
// it.
class DiskWork {
  public:
    virtual ~DiskWork() = default;
    virtual DiskRequest request(size_t i) const = 0;
    // Called when request i is done, with the memory that it used.
    virtual void finish(size_t, const char* /*memory*/) const {}
    // Fails in one line. `error` is the error's number, or 0 if too few bytes were moved.
    [[noreturn]] virtual void fail_at(size_t i, bool writes, int error) const = 0;
};
