// disk.h - reads and writes files past the page cache (O_DIRECT), whose memory the plan does not count,
// several requests at a time while the program computes: threads make them. (io_uring would be no faster:
// dev/results/streaming.md.) And reads of pieces of a model's files; a run's own files are in
// offload_storage.h.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/device.h"
#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/signals.h"

// ---- the queue of requests

// Such a file is read and written in whole sectors, to and from memory that is aligned to sectors.
constexpr size_t kSector = 4096;           // a multiple of the sector size of every usual disk
constexpr size_t kRequestBytes = 2 << 20;  // the most bytes that a request moves
constexpr int kDiskRequests = 4;           // at the same time

constexpr size_t whole_sectors(size_t bytes) { return (bytes + kSector - 1) / kSector * kSector; }

// Each thread works on one request at a time, and has its own staging memory.
class DiskQueue {
  public:
    static constexpr size_t kStagingBytes = kDiskRequests * kRequestBytes;
    // Performs request number i with kRequestBytes of staging memory; may throw.
    using Perform = std::function<void(size_t i, char* staging)>;

    // `staging` is kStagingBytes of memory, aligned to sectors, that outlives the queue; null if requests
    // need none.
    explicit DiskQueue(char* staging) {
        const SignalsBlocked blocked;
        try {
            for (int i = 0; i < kDiskRequests; i++)
                threads_.emplace_back(
                    [this, buffer = staging ? staging + i * kRequestBytes : nullptr] { work(buffer); });
        } catch (const std::system_error& error) {
            end();
            fail("the threads that serve the disk cannot start: %s (ulimit -u, ulimit -v)",
                 error.code().message());
        }
    }
    DiskQueue(const DiskQueue&) = delete;
    // Waits for requests that were started; the others are dropped.
    ~DiskQueue() { end(); }

    // Queues `requests` requests after those that are queued already. Returns a number for wait(); what the
    // requests use must exist until then.
    size_t start(size_t requests, Perform perform) {
        std::lock_guard lock(mutex_);
        batches_.push_back({std::move(perform), requests});
        wake_.notify_all();
        return first_ + batches_.size() - 1;
    }
    // Waits until the requests with this number and all before them are done; by default, all that were
    // started. Fails with the first error among them.
    void wait(size_t number = SIZE_MAX) {
        std::unique_lock lock(mutex_);
        while (first_ <= number && !batches_.empty()) {
            done_.wait(lock, [&] { return batches_.front().done == batches_.front().count; });
            const std::exception_ptr error = batches_.front().error;
            batches_.pop_front();
            first_++;
            if (error) std::rethrow_exception(error);
        }
    }

  private:
    // Requests that were started together.
    struct Batch {
        Perform perform;
        size_t count, next = 0, done = 0;  // numbers of requests: all, started, done
        std::exception_ptr error = nullptr;
    };

    void end() {
        {
            std::lock_guard lock(mutex_);
            ends_ = true;
        }
        wake_.notify_all();
        for (std::thread& t : threads_) t.join();
    }
    // The first batch with a request to start, or null. Its address stays valid, because others are only
    // added and removed at the ends.
    Batch* to_begin() {
        for (Batch& b : batches_)
            if (b.next < b.count) return &b;
        return nullptr;
    }
    void work(char* staging) {
        std::unique_lock lock(mutex_);
        while (true) {
            wake_.wait(lock, [&] { return ends_ || to_begin(); });
            if (ends_) return;
            Batch& batch = *to_begin();
            const size_t i = batch.next++;
            lock.unlock();
            std::exception_ptr error;
            const uint64_t span = begin_span("disk");
            try {
                batch.perform(i, staging);
            } catch (...) {
                error = std::current_exception();
            }
            end_span(span);
            lock.lock();
            if (error && !batch.error) batch.error = error;
            if (++batch.done == batch.count) done_.notify_all();
        }
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::deque<Batch> batches_;  // that nobody has waited for yet
    size_t first_ = 0;           // the number of the first of them
    bool ends_ = false;
};

// ---- pieces of files
//
// A read must consist of whole sectors, but pieces begin and end anywhere. So a request reads sectors into
// staging memory, and its pieces are copied from there to their destinations. If a request is whole sectors
// of one piece and its destination is aligned to sectors, it is read there directly.

// Bytes of a file and their destination: `at` bytes after the address that is given to the read.
template <class File>
struct PieceOf {
    const File* file;
    uint64_t offset;
    size_t bytes, at;
};
using FilePiece = PieceOf<FileReader>;

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
        fail("%s: cannot read: %s", path_, std::strerror(error));
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
                 path_);
        if (fd < 0) fail("%s: cannot open: %s", path_, std::strerror(errno));
        return fd;
    }
    FileStamp stamp() const { return stamp_of(fd_.fd(), path_); }
    [[noreturn]] void fail_changed() const {
        fail("%s was changed since it was opened, and is still read from", path_);
    }

    std::string path_;
    FileStamp stamp_;
    OpenFile fd_;
};

using DirectPiece = PieceOf<DirectFile>;

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
        std::ranges::sort(pieces, [](const DirectPiece& a, const DirectPiece& b) {
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
