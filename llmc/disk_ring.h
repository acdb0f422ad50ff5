// disk_ring.h - disk requests with io_uring: the kernel works on several at a time, and one thread collects
// finished ones and submits the next.
#pragma once

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include <liburing.h>

#include "llmc/device.h"
#include "llmc/disk_batches.h"
#include "llmc/disk_request.h"
#include "llmc/error.h"

class DiskRing {
  public:
    // `staging` is as in DiskThreads.
    explicit DiskRing(char* staging) : works_(open()) {
        for (int i = 0; i < kDiskRequests; i++)
            slots_[i].staging = staging ? staging + i * kRequestBytes : nullptr;
        if (!works_) return;
        sigset_t all, before;  // only the main thread handles signals
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            thread_ = std::thread([this] { run(); });
        } catch (const std::system_error&) {  // DiskThreads will report that no thread can start
            io_uring_queue_exit(&ring_);
            works_ = false;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
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
