// ranks_host_memory.h - host memory that a machine has once, however many of its ranks use it: weights that
// all ranks read, and write alike (--offload weights=host with several GPUs). Its first rank makes a file in
// memory, the others open it, and each pins its own mapping of it for its GPU.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <span>

#include "llmc/device.h"
#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/ranks.h"

// True if the ranks of this rank's machine share host memory. To a CPU all memory is the device's.
inline bool shares_host_memory(const Rank& rank) {
    return !kHostIsDevice && rank.on_this_machine > 1 && rank.is_grouped_by_machine;
}

class SharedHostMemory {
  public:
    SharedHostMemory(RankEngine& engine, const Rank& rank) : engine_(engine), rank_(rank) {}

    // Maps `bytes` zeroed bytes that all ranks of this machine share, for a PinnedBuffer. All ranks call it
    // together. Fails if a rank cannot open the memory of another.
    std::span<char> map(size_t bytes) const {
        const bool makes_it = rank_.number_on_this_machine == 0;
        const OpenFile made(makes_it ? make(bytes) : -1);
        struct Place {
            pid_t process;
            int file;
        };
        const auto places = engine_.gather(Place{getpid(), made.fd()}, rank_.count);
        const Place& first = places[static_cast<size_t>(rank_.number - rank_.number_on_this_machine)];
        const OpenFile opened(
            open(format("/proc/%d/fd/%d", first.process, first.file).c_str(), O_RDWR | O_CLOEXEC));
        void* const at = opened.fd() < 0 ? MAP_FAILED
                                         : mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE,
                                                MAP_SHARED, opened.fd(), 0);
        const int error = at == MAP_FAILED ? errno : 0;
        engine_.gather(error, rank_.count);  // the first rank closes its file when all have opened it
        if (error)
            fail("--offload: the GPUs of a machine share %s of its memory, and this rank cannot open it: %s",
                 size_text(bytes), std::strerror(error));
        return {static_cast<char*>(at), bytes};
    }

  private:
    static int make(size_t bytes) {
        const int fd = memfd_create("llmc-weights", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)))
            fail("--offload: %s of memory for the GPUs of a machine cannot be made: %s", size_text(bytes),
                 std::strerror(errno));
        return fd;
    }

    RankEngine& engine_;
    const Rank rank_;
};

// Pinned host memory; if `shared` is not null, memory that the ranks of a machine have once.
inline std::unique_ptr<PinnedBuffer> pinned_buffer(size_t bytes, const SharedHostMemory* shared) {
    if (shared) return std::make_unique<PinnedBuffer>(shared->map(bytes));
    return std::make_unique<PinnedBuffer>(bytes);
}
