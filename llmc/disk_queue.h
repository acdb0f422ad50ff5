// disk_queue.h - reads and writes files past the page cache (O_DIRECT), whose memory the plan does not count,
// several requests at a time while the program computes: threads make them. (io_uring would be no faster:
// dev/results/streaming.md.) disk_reader.h and offload_storage.h use it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/device.h"
#include "llmc/error.h"
#include "llmc/signals.h"

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
                 error.code().message().c_str());
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
