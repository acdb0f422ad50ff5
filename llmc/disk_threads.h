// disk_threads.h - threads that read and write files while the program computes, several requests at a time.
// Each thread has its own staging memory.
#pragma once

#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/device.h"
#include "llmc/disk_batches.h"
#include "llmc/disk_request.h"
#include "llmc/error.h"

class DiskThreads {
  public:
    static constexpr size_t kStagingBytes = kDiskRequests * kRequestBytes;
    // Runs request number i with kRequestBytes of staging memory; may throw.
    using Request = std::function<void(size_t i, char* staging)>;

    // `staging` is kStagingBytes of memory, aligned to sectors, that outlives the threads; null if requests
    // need none.
    explicit DiskThreads(char* staging) {
        sigset_t all, before;  // only the main thread handles signals
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (int i = 0; i < kDiskRequests; i++)
                threads_.emplace_back(
                    [this, room = staging ? staging + i * kRequestBytes : nullptr] { work(room); });
        } catch (const std::system_error& error) {
            end();
            fail("the threads that serve the disk cannot start: %s (ulimit -u, ulimit -v)",
                 error.code().message().c_str());
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
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
