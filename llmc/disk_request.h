// disk_request.h - what is asked of a disk past the page cache (O_DIRECT): whole sectors, from and to memory
// that is aligned as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

constexpr size_t kSector = 4096;           // of every disk that is about, or a multiple of its own
constexpr size_t kRequestBytes = 2 << 20;  // that a request moves at most
constexpr int kDiskRequests = 4;           // under way at a time

constexpr size_t whole_sectors(size_t bytes) { return (bytes + kSector - 1) / kSector * kSector; }

// Sectors that are written, and then others that are read to the same memory.
struct DiskRequest {
    struct Sectors {
        int fd;
        uint64_t at;
        size_t bytes, needed;  // at least so many must come; behind a file's end there are none
    };
    std::optional<Sectors> write, read;
    char* memory = nullptr;  // null: staging memory of kRequestBytes
};

// Requests that belong together. Called by threads beside the one that starts them.
class DiskWork {
  public:
    virtual ~DiskWork() = default;
    virtual DiskRequest request(size_t i) const = 0;
    // What follows when it was done, in that memory.
    virtual void finish(size_t, const char* /*memory*/) const {}
    // Fails in one line: with an error's number, or 0 where too few bytes were moved.
    [[noreturn]] virtual void fail_at(size_t i, bool writes, int error) const = 0;
};
