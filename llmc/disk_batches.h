// disk_batches.h - keeps batches of disk requests in the order in which they were asked for, counts the
// finished requests, and lets callers wait for a batch.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <mutex>
#include <utility>

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
