// elsewhere.h - working memory of a training outside the device: a file (elsewhere_disk.h), which a GPU
// reaches through buffers in host memory (elsewhere_staged.h), or pinned host memory beside a GPU
// (elsewhere_host.h).
//
// Its contents are fetched to buffers in the arena and stored again while the device computes. Optimizer
// state on a disk that a GPU's host updates itself is fetched to buffers in host memory (host_updates.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "llmc/device.h"
#include "llmc/disk_request.h"

// Alignment of the offsets in this memory, and of the buffers: a disk transfers whole sectors.
constexpr size_t kElsewhereAlignment = kSector;

// The aligned buffer in memory that was taken with kElsewhereAlignment additional bytes. Null in a dry run.
inline char* aligned_room(void* take) {
    const auto address = reinterpret_cast<uintptr_t>(take);
    return reinterpret_cast<char*>((address + kElsewhereAlignment - 1) / kElsewhereAlignment *
                                   kElsewhereAlignment);
}

class Elsewhere {
  public:
    virtual ~Elsewhere() = default;
    // Copy any range of bytes to or from the host, synchronously. No exchange may be under way.
    virtual void read(uint64_t at, size_t bytes, void* host) const = 0;
    virtual void write(uint64_t at, size_t bytes, const void* host) = 0;
    // The host address of offset `at`; null if this memory is not in host memory.
    virtual char* address(uint64_t /*at*/) const { return nullptr; }
    // Starts storing the bytes of the buffer `room` at offset `to`, and after that fetching as many from
    // offset `from` into it; either may be absent. Both run after the work queued on the stream so far.
    // Returns a number for join().
    virtual size_t exchange(char* room, size_t bytes, std::optional<uint64_t> to,
                            std::optional<uint64_t> from, Stream stream) = 0;
    // Work queued on the stream from here on runs after this exchange and all that started before it. Fails
    // if a transfer failed.
    virtual void join(size_t number, Stream stream) = 0;
};
