// disk_threads.h - threads that read and write files while the program computes, several requests at a time,
// each with staging memory of its thread.
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
    // Runs request number i by way of kRequestBytes of staging memory; fails as any function does.
    using Request = std::function<void(size_t i, char* staging)>;

    // `staging` has kStagingBytes, aligned to sectors, and stays; null where requests need none.
    explicit DiskThreads(char* staging) {
        sigset_t all, before;  // signals are the main thread's
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
    // Waits for requests that are under way; those that were not begun are left.
    ~DiskThreads() { end(); }

    // Begins so many requests, behind those before them. What they use stays until they were waited for, by
    // the number that is returned.
    size_t start(size_t requests, Request run) {
        std::lock_guard lock(mutex_);
        const size_t number = batches_.add(std::move(run), requests);
        wake_.notify_all();
        return number;
    }
    // Waits until those of that number, and all before them, are done. Fails with the first that failed.
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
