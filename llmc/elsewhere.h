// elsewhere.h - memory beside the device's that a training works in: in a file (elsewhere_disk.h), which a
// GPU reaches through the host (elsewhere_staged.h), or in pinned host memory beside a GPU
// (elsewhere_host.h). What lies there comes to rooms of the arena and goes back while the device computes;
// what a GPU's host updates on its disk comes to rooms of the host (host_updates.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "llmc/device.h"
#include "llmc/disk_request.h"

// What is there begins at multiples of this, and so does a room: a disk moves whole sectors.
constexpr size_t kElsewhereAlignment = kSector;

// Where in a take of kElsewhereAlignment bytes more the room begins. Null in a rehearsal.
inline char* aligned_room(void* take) {
    const auto address = reinterpret_cast<uintptr_t>(take);
    return reinterpret_cast<char*>((address + kElsewhereAlignment - 1) / kElsewhereAlignment *
                                   kElsewhereAlignment);
}

class Elsewhere {
  public:
    virtual ~Elsewhere() = default;
    // Copies any bytes from or to the host, now. Nothing is under way then.
    virtual void read(uint64_t at, size_t bytes, void* host) const = 0;
    virtual void write(uint64_t at, size_t bytes, const void* host) = 0;
    // Where those bytes are in the host's memory; null where they are not.
    virtual char* address(uint64_t /*at*/) const { return nullptr; }
    // Begins to store a room's bytes at `to`, and then to fetch as many from `from` into it; either may be
    // none. Both come behind what the stream was given so far. Returns a number to join it by.
    virtual size_t exchange(char* room, size_t bytes, std::optional<uint64_t> to,
                            std::optional<uint64_t> from, Stream stream) = 0;
    // Has what the stream is given from here on find that, and all that was begun before it, done. Fails
    // where it cannot be.
    virtual void join(size_t number, Stream stream) = 0;
};
