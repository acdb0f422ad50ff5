// disk_queue.h - disk requests that are served while the program computes, several at a time: with io_uring
// (disk_ring.h), or with threads if the kernel does not allow that (disk_threads.h).
#pragma once

#include <cerrno>
#include <memory>
#include <optional>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include "llmc/disk_ring.h"
#include "llmc/disk_threads.h"
#include "llmc/file.h"

class DiskQueue {
  public:
    static constexpr size_t kStagingBytes = DiskThreads::kStagingBytes;

    // `staging` is kStagingBytes of memory, aligned to sectors, that outlives the queue; null if all requests
    // have memory of their own. With `ring` false, threads are used.
    explicit DiskQueue(char* staging, bool ring = true) {
        if (!ring || !ring_.emplace(staging).works()) {
            ring_.reset();
            threads_.emplace(staging);
        }
    }
    bool has_ring() const { return ring_.has_value(); }

    // As in DiskThreads. The work and everything that it uses must exist until it was waited for.
    size_t start(size_t requests, std::shared_ptr<const DiskWork> work) {
        if (ring_) return ring_->start(requests, std::move(work));
        return threads_->start(
            requests, [work = std::move(work)](size_t i, char* staging) { perform(*work, i, staging); });
    }
    void wait(size_t number) { ring_ ? ring_->wait(number) : threads_->wait(number); }
    void wait() { wait(SIZE_MAX); }

  private:
    // Performs one request, synchronously.
    static void perform(const DiskWork& work, size_t i, char* staging) {
        const DiskRequest r = work.request(i);
        char* const memory = r.memory ? r.memory : staging;
        if (r.write) {
            const DiskRequest::Sectors& s = *r.write;
            for (size_t done = 0; done < s.bytes;) {
                const ssize_t n =
                    pwrite(s.fd, memory + done, s.bytes - done, static_cast<off_t>(s.at + done));
                if (n < 0 && errno == EINTR) continue;
                if (n <= 0) work.fail_at(i, true, n < 0 ? errno : 0);
                done += static_cast<size_t>(n);
            }
        }
        if (r.read) {
            const DiskRequest::Sectors& s = *r.read;
            const ssize_t got = read_at(s.fd, s.at, s.bytes, memory);
            if (got < 0 || static_cast<size_t>(got) < s.needed) work.fail_at(i, false, got < 0 ? errno : 0);
        }
        work.finish(i, memory);
    }

    std::optional<DiskRing> ring_;
    std::optional<DiskThreads> threads_;
};
