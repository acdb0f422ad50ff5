// disk_batches.h - requests to a disk that belong together, in the order in which they were asked for, and
// who waits for them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <mutex>
#include <utility>

// All calls are made under the owner's lock.
template <class Work>
class DiskBatches {
  public:
    struct Batch {
        Work work;
        size_t count, next = 0, done = 0;  // requests: all, begun, done
        std::exception_ptr error = nullptr;
    };

    // Returns the number by which it is waited for.
    size_t add(Work work, size_t requests) {
        batches_.push_back({std::move(work), requests});
        return first_ + batches_.size() - 1;
    }
    // The first that has a request to begin, or null. It stays where it is: others come and go at the ends.
    Batch* to_begin() {
        for (Batch& b : batches_)
            if (b.next < b.count) return &b;
        return nullptr;
    }
    // One of its requests is done, or has failed.
    void finish(Batch& batch, const std::exception_ptr& error) {
        if (error && !batch.error) batch.error = error;
        if (++batch.done == batch.count) done_.notify_all();
    }
    // Waits until that of that number, and all before it, are done. Fails with the first that failed.
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
    std::deque<Batch> batches_;  // that were not waited for
    size_t first_ = 0;           // the number of the first of them
};
