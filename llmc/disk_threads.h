// disk_threads.h - threads that read and write files while the program computes, several requests at a time,
// each by way of staging memory of its thread: aligned to sectors, as a disk wants it that is used past the
// page cache (O_DIRECT).
#pragma once

#include <condition_variable>
#include <csignal>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

constexpr size_t kSector = 4096;           // of every disk that is about, or a multiple of its own
constexpr size_t kRequestBytes = 2 << 20;  // that a request moves at most
constexpr int kDiskThreads = 4;            // and requests under way at a time

constexpr size_t whole_sectors(size_t bytes) { return (bytes + kSector - 1) / kSector * kSector; }

class DiskThreads {
  public:
    static constexpr size_t kStagingBytes = kDiskThreads * kRequestBytes;
    // Runs request number i by way of kRequestBytes of staging memory; fails as any function does.
    using Request = std::function<void(size_t i, char* staging)>;

    // `staging` has kStagingBytes, aligned to sectors, and stays.
    explicit DiskThreads(char* staging) {
        sigset_t all, before;  // signals are the main thread's
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        for (int i = 0; i < kDiskThreads; i++)
            threads_.emplace_back([this, room = staging + i * kRequestBytes] { work(room); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    DiskThreads(const DiskThreads&) = delete;
    // Waits for requests that are under way; those that were not begun are left.
    ~DiskThreads() {
        {
            std::lock_guard lock(mutex_);
            ends_ = true;
        }
        wake_.notify_all();
        for (std::thread& t : threads_) t.join();
    }

    // Begins so many requests. What they use stays until wait(), which comes before the next start().
    void start(size_t requests, Request run) {
        std::lock_guard lock(mutex_);
        run_ = std::move(run);
        count_ = requests;
        next_ = done_ = 0;
        wake_.notify_all();
    }
    // Waits until all are done. Fails with the first that failed.
    void wait() {
        std::unique_lock lock(mutex_);
        all_done_.wait(lock, [&] { return done_ == count_; });
        if (const auto error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
    }

  private:
    void work(char* staging) {
        std::unique_lock lock(mutex_);
        while (true) {
            wake_.wait(lock, [&] { return ends_ || next_ < count_; });
            if (ends_) return;
            const size_t i = next_++;
            lock.unlock();
            std::exception_ptr error;
            try {
                run_(i, staging);
            } catch (...) {
                error = std::current_exception();
            }
            lock.lock();
            if (error && !error_) error_ = error;
            if (++done_ == count_) all_done_.notify_all();
        }
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_, all_done_;
    Request run_;
    size_t count_ = 0, next_ = 0, done_ = 0;  // requests: all, begun, done
    std::exception_ptr error_;
    bool ends_ = false;
};
