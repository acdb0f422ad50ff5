// residence_disk.h - streams a frozen model's blocks from its own files: each is read straight from the disk
// (disk_reader.h) whenever it is needed. On a CPU it is read into its buffer; beside a GPU it is read into
// pinned memory and copied from there on a separate stream.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "llmc/disk_reader.h"
#include "llmc/residence.h"

class DiskResidence : public Residence {
  public:
    // The bytes that it takes for `rooms` buffers: on a CPU of the device's memory, beside a GPU of pinned
    // host memory.
    static size_t bytes(size_t largest_loan, size_t rooms) {
        return DiskQueue::kStagingBytes + (kHostIsDevice ? 0 : rooms * largest_loan);
    }

    // Allocates that memory.
    DiskResidence(size_t largest_loan, size_t rooms)
        : reads_(rooms), memory_(bytes(largest_loan, rooms)), queue_(memory_.data()) {
        if (kHostIsDevice) return;
        char* next = memory_.data() + DiskQueue::kStagingBytes;
        for (Read& r : reads_) r.pinned = std::exchange(next, next + largest_loan);
    }

    // Adds the next loan, in the order of their numbers. Fails if a file cannot be read past the page cache.
    void add(const LoanOnDisk& loan) {
        const auto direct = [&](const FileReader& file) { return &open(file); };
        loans_.push_back({DiskReads(loan.pieces, direct), loan.numbers, loan.bytes});
    }
    // Opens a file at the first call, and returns the open file at later ones.
    const DirectFile& open(const FileReader& file) {
        std::unique_ptr<DirectFile>& opened = files_[file.path()];
        if (!opened) opened = std::make_unique<DirectFile>(file);
        return *opened;
    }

    size_t start(int loan, char* room, Stream stream, [[maybe_unused]] int changed) override {
        assert(changed == kNoLoan);
        return start(loans_[static_cast<size_t>(loan)], room, stream);
    }
    // Reads something else to the buffer `room`, at most as many bytes as the largest loan. Work queued on
    // the stream from here on finds it there. No loan may be under way.
    void read(DiskReads reads, size_t bytes, char* room, Stream stream) {
        now_ = {std::move(reads), {}, bytes};
        finish(start(now_, room, stream), stream);
    }
    void finish(size_t number, [[maybe_unused]] Stream stream) override {
        for (; finished_ <= number; finished_++) {
            Read& r = read(finished_);
            queue_.wait(r.number);
            r.loan->reads.check();
            char* const to = kHostIsDevice ? r.room : r.pinned;
            for (const auto& [at, value] : r.loan->numbers) std::memcpy(to + at, &value, sizeof value);
            if (kHostIsDevice) continue;
            r.free.block(copies_.get());
            move_async(Way::FromHost, r.room, r.pinned, r.loan->bytes, copies_.get());
            r.copied.record(copies_.get());
        }
        if (!kHostIsDevice) read(number).copied.block(stream);
    }

  private:
#if defined(SIMT_GPU)
    using Memory = PinnedBuffer;
#else
    struct Memory : DeviceBuffer {
        explicit Memory(size_t bytes) : DeviceBuffer(bytes, "what is read from the disk") {}
    };
#endif
    struct Loan {
        DiskReads reads;
        std::vector<std::pair<size_t, float>> numbers;
        size_t bytes;
    };

    // A read that is under way, or the last one in its slot.
    struct Read {
        const Loan* loan = nullptr;
        char *room = nullptr, *pinned = nullptr;  // on the device; beside a GPU, what the disk is read to
        size_t number = 0;                        // in the queue
        Event free, copied;
    };
    Read& read(size_t number) { return reads_[number % reads_.size()]; }

    size_t start(const Loan& loan, char* room, [[maybe_unused]] Stream stream) {
        assert(begun_ - finished_ < reads_.size());
        Read& r = read(begun_);
        count_moved(Way::DiskRead, loan.bytes);
        r.loan = &loan;
        r.room = room;
        if (!kHostIsDevice) {
            r.copied.wait();
            r.free.record(stream);
        }
        r.number = queue_.start(loan.reads.count(),
                                std::make_shared<DiskRead>(loan.reads, kHostIsDevice ? room : r.pinned));
        return begun_++;
    }

    std::map<std::string, std::unique_ptr<DirectFile>> files_;
    std::vector<Loan> loans_;
    Loan now_;
    OwnStream copies_;
    std::vector<Read> reads_;
    size_t begun_ = 0, finished_ = 0;
    Memory memory_;
    DiskQueue queue_;  // declared last, so that it ends before the memory does
};
