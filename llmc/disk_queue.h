// disk_queue.h - reads and writes files past the page cache (O_DIRECT), whose memory the plan does not count,
// several requests at a time while the program computes: by io_uring, or by threads if the kernel does not
// allow that. disk_reader.h and offload_storage.h use it.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <liburing.h>

#include "llmc/device.h"
#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/signals.h"

// ---- a request: whole sectors, and memory that is aligned to sectors

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

// ---- batches of requests
//
// Keeps batches in the order in which they were asked for, and lets callers wait for a batch.

// All calls must be made under the owner's lock.
template <class Work>
class DiskBatches {
  public:
    struct Batch {
        Work work;
        size_t count, next = 0, done = 0;  // numbers of requests: all, started, done
        std::exception_ptr error = nullptr;
    };

    // Adds a batch and returns its number, for wait().
    size_t add(Work work, size_t requests) {
        batches_.push_back({std::move(work), requests});
        return first_ + batches_.size() - 1;
    }
    // The first batch with a request to start, or null. Its address stays valid, because others are only
    // added and removed at the ends.
    Batch* to_begin() {
        for (Batch& b : batches_)
            if (b.next < b.count) return &b;
        return nullptr;
    }
    // Call it when a request of the batch is done or has failed.
    void finish(Batch& batch, const std::exception_ptr& error) {
        if (error && !batch.error) batch.error = error;
        if (++batch.done == batch.count) done_.notify_all();
    }
    // Waits until this batch and all before it are done. Fails with the first error among them.
    void wait(std::unique_lock<std::mutex>& lock, size_t number) {
        while (first_ <= number && !batches_.empty()) {
            done_.wait(lock, [&] { return batches_.front().done == batches_.front().count; });
            const std::exception_ptr error = batches_.front().error;
            batches_.pop_front();
            first_++;
            if (error) std::rethrow_exception(error);
        }
    }

  private:
    std::condition_variable done_;
    std::deque<Batch> batches_;  // batches that nobody has waited for yet
    size_t first_ = 0;           // the number of the first of them
};

// ---- served by io_uring
//
// The kernel works on several requests at a time; one thread collects finished ones and submits the next.

class DiskRing {
  public:
    // `staging` is as in DiskThreads.
    explicit DiskRing(char* staging) : works_(open()) {
        for (int i = 0; i < kDiskRequests; i++)
            slots_[i].staging = staging ? staging + i * kRequestBytes : nullptr;
        if (!works_) return;
        const SignalsBlocked blocked;
        try {
            thread_ = std::thread([this] { run(); });
        } catch (const std::system_error&) {  // DiskThreads will report that no thread can start
            io_uring_queue_exit(&ring_);
            works_ = false;
        }
    }
    DiskRing(const DiskRing&) = delete;
    // Waits for requests that were started; the others are dropped.
    ~DiskRing() {
        if (!works_) return;
        {
            std::lock_guard lock(mutex_);
            ends_ = true;
            if (under_way_ == 0) wake();
        }
        thread_.join();
        io_uring_queue_exit(&ring_);
    }
    // True if the kernel allows io_uring.
    bool works() const { return works_; }

    // As in DiskThreads.
    size_t start(size_t requests, std::shared_ptr<const DiskWork> work) {
        std::lock_guard lock(mutex_);
        const size_t number = batches_.add(std::move(work), requests);
        begin();
        return number;
    }
    void wait(size_t number) {
        std::unique_lock lock(mutex_);
        batches_.wait(lock, number);
    }

  private:
    using Batches = DiskBatches<std::shared_ptr<const DiskWork>>;
    struct Slot {
        char* staging;
        Batches::Batch* batch = nullptr;  // null: free
        size_t number = 0;                // number of its request in the batch
        DiskRequest request = {};
        size_t done = 0;  // bytes moved so far, of the write or of the read
        uint64_t span = 0;
        bool writes() const { return request.write.has_value(); }
        const DiskRequest::Sectors& sectors() const { return writes() ? *request.write : *request.read; }
        char* memory() const { return request.memory ? request.memory : staging; }
    };

    bool open() {
        if (io_uring_queue_init(kDiskRequests, &ring_, 0) != 0) return false;
        io_uring_probe* const probe = io_uring_get_probe_ring(&ring_);
        const bool knows = probe && io_uring_opcode_supported(probe, IORING_OP_READ) &&
                           io_uring_opcode_supported(probe, IORING_OP_WRITE);
        io_uring_free_probe(probe);
        const bool works = knows && passes_a_request();
        if (!works) io_uring_queue_exit(&ring_);
        return works;
    }
    // True if a request that does nothing goes to the kernel and comes back. A sandbox (seccomp) may allow
    // setting up a ring but not using it.
    bool passes_a_request() {
        io_uring_prep_nop(io_uring_get_sqe(&ring_));
        int error;
        do error = io_uring_submit(&ring_);
        while (error == -EINTR || error == -EAGAIN);
        if (error < 0) return false;
        io_uring_cqe* event = nullptr;
        do error = io_uring_wait_cqe(&ring_, &event);
        while (error == -EINTR || error == -EAGAIN);
        if (error != 0) return false;
        io_uring_cqe_seen(&ring_, event);
        return true;
    }
    // Starts as many requests as there are free slots.
    void begin() {
        for (Slot& slot : slots_) {
            if (slot.batch || ends_) continue;
            Batches::Batch* const batch = batches_.to_begin();
            if (!batch) return;
            slot.batch = batch;
            slot.number = batch->next++;
            slot.request = batch->work->request(slot.number);
            slot.done = 0;
            slot.span = begin_span(slot.writes() ? "disk write" : "disk read");
            under_way_++;
            submit(slot);
        }
    }
    // Submits the part of a slot's write or read that is not done yet.
    void submit(Slot& slot) {
        const DiskRequest::Sectors& s = slot.sectors();
        io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
        if (!entry) bug("io_uring has no entry for a request");
        char* const memory = slot.memory() + slot.done;
        const auto bytes = static_cast<unsigned>(s.bytes - slot.done);
        if (slot.writes())
            io_uring_prep_write(entry, s.fd, memory, bytes, s.at + slot.done);
        else
            io_uring_prep_read(entry, s.fd, memory, bytes, s.at + slot.done);
        io_uring_sqe_set_data(entry, &slot);
        send();
    }
    void wake() {
        io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
        io_uring_prep_nop(entry);
        io_uring_sqe_set_data(entry, nullptr);
        send();
    }
    void send() {
        int sent;
        do sent = io_uring_submit(&ring_);
        while (sent == -EINTR || sent == -EAGAIN || sent == -EBUSY);
        if (sent < 0) bug("io_uring takes no request: error %d", -sent);
    }

    // The thread's function. If the kernel stops serving the ring, requests may still write to their memory,
    // so the process must end.
    void run() {
        try {
            take_back();
        } catch (...) {
            std::_Exit(report_error());
        }
    }
    // Collects finished operations. For each it submits the part that is missing, or the request's next
    // operation, or another request.
    void take_back() {
        while (true) {
            io_uring_cqe* event = nullptr;
            if (const int error = io_uring_wait_cqe(&ring_, &event); error != 0) {
                if (error == -EINTR || error == -EAGAIN) continue;
                bug("io_uring gives nothing back: error %d", -error);
            }
            Slot* const slot = static_cast<Slot*>(io_uring_cqe_get_data(event));
            const int moved = event->res;
            io_uring_cqe_seen(&ring_, event);
            { const std::lock_guard lock(mutex_); }  // the thread that started it has written the slot
            std::exception_ptr error;
            bool more = false;
            try {
                more = slot && advance(*slot, moved);
            } catch (...) {
                error = std::current_exception();
            }
            std::lock_guard lock(mutex_);
            if (more) {
                submit(*slot);
                continue;
            }
            if (slot) finish(*slot, error);
            begin();
            if (ends_ && under_way_ == 0) return;
        }
    }
    // Processes the result of an operation: `moved` is a number of bytes, or a negative error number. Returns
    // true if the slot has more to submit. Fails with the work's fail_at().
    static bool advance(Slot& slot, int moved) {
        const DiskWork& work = *slot.batch->work;
        if (moved == -EINTR || moved == -EAGAIN) return true;
        if (moved < 0) work.fail_at(slot.number, slot.writes(), -moved);
        slot.done += static_cast<size_t>(moved);
        const DiskRequest::Sectors s = slot.sectors();
        const bool ended = moved == 0 || slot.done % kSector != 0;  // the file ended
        if (slot.done < s.bytes && !ended) return true;
        if (slot.done < (slot.writes() ? s.bytes : s.needed)) work.fail_at(slot.number, slot.writes(), 0);
        if (slot.writes()) {
            slot.request.write.reset();
            slot.done = 0;
            if (slot.request.read) return true;
        }
        work.finish(slot.number, slot.memory());
        return false;
    }
    void finish(Slot& slot, const std::exception_ptr& error) {
        end_span(slot.span);
        under_way_--;
        batches_.finish(*std::exchange(slot.batch, nullptr), error);
    }

    io_uring ring_ = {};
    bool works_;
    Slot slots_[kDiskRequests] = {};
    std::mutex mutex_;
    Batches batches_;
    int under_way_ = 0;  // number of requests
    bool ends_ = false;
    std::thread thread_;
};

// ---- served by threads
//
// Each thread works on one request at a time, and has its own staging memory.

class DiskThreads {
  public:
    static constexpr size_t kStagingBytes = kDiskRequests * kRequestBytes;
    // Runs request number i with kRequestBytes of staging memory; may throw.
    using Request = std::function<void(size_t i, char* staging)>;

    // `staging` is kStagingBytes of memory, aligned to sectors, that outlives the threads; null if requests
    // need none.
    explicit DiskThreads(char* staging) {
        const SignalsBlocked blocked;
        try {
            for (int i = 0; i < kDiskRequests; i++)
                threads_.emplace_back(
                    [this, buffer = staging ? staging + i * kRequestBytes : nullptr] { work(buffer); });
        } catch (const std::system_error& error) {
            end();
            fail("the threads that serve the disk cannot start: %s (ulimit -u, ulimit -v)",
                 error.code().message().c_str());
        }
    }
    DiskThreads(const DiskThreads&) = delete;
    // Waits for requests that were started; the others are dropped.
    ~DiskThreads() { end(); }

    // Queues `requests` requests after those that are queued already. Returns a number for wait(); what the
    // requests use must exist until then.
    size_t start(size_t requests, Request run) {
        std::lock_guard lock(mutex_);
        const size_t number = batches_.add(std::move(run), requests);
        wake_.notify_all();
        return number;
    }
    // Waits until the requests with this number and all before them are done. Fails with the first error
    // among them.
    void wait(size_t number) {
        std::unique_lock lock(mutex_);
        batches_.wait(lock, number);
    }
    // Waits until all are done.
    void wait() { wait(SIZE_MAX); }

  private:
    void end() {
        {
            std::lock_guard lock(mutex_);
            ends_ = true;
        }
        wake_.notify_all();
        for (std::thread& t : threads_) t.join();
    }
    void work(char* staging) {
        std::unique_lock lock(mutex_);
        while (true) {
            wake_.wait(lock, [&] { return ends_ || batches_.to_begin(); });
            if (ends_) return;
            DiskBatches<Request>::Batch& batch = *batches_.to_begin();
            const size_t i = batch.next++;
            lock.unlock();
            std::exception_ptr error;
            const uint64_t span = begin_span("disk");
            try {
                batch.work(i, staging);
            } catch (...) {
                error = std::current_exception();
            }
            end_span(span);
            lock.lock();
            batches_.finish(batch, error);
        }
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_;
    DiskBatches<Request> batches_;
    bool ends_ = false;
};

// ---- the queue

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
