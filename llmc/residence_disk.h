// residence_disk.h - loans that live in the model's own files: each is read straight from the disk
// (disk_reader.h) whenever it is borrowed. On a CPU it is read into its room; on a GPU into pinned memory,
// and copied from there on a stream of its own.
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
    // What it takes, of the device or, beside a GPU, of pinned host memory.
    static size_t bytes(size_t largest_loan) {
        return DiskQueue::kStagingBytes + (kHostIsDevice ? 0 : kRooms * largest_loan);
    }

    // Takes that memory.
    explicit DiskResidence(size_t largest_loan)
        : room_bytes_(largest_loan), memory_(bytes(largest_loan)), queue_(memory_.data()) {}

    // The loans, from the first on. Fails where a file cannot be read so.
    void add(const LoanOnDisk& loan) {
        const auto direct = [&](const FileReader& file) { return &open(file); };
        loans_.push_back({DiskReads(loan.pieces, direct), loan.numbers, loan.bytes});
    }
    // A file, opened once.
    const DirectFile& open(const FileReader& file) {
        std::unique_ptr<DirectFile>& opened = files_[file.path()];
        if (!opened) opened = std::make_unique<DirectFile>(file);
        return *opened;
    }

    void start(int loan, char* room, Stream stream, [[maybe_unused]] int changed) override {
        assert(changed == kNoLoan);
        start(loans_[static_cast<size_t>(loan)], room, stream);
    }
    // Has something else at `room` for what the stream is given from here on, no larger than a loan may be.
    // No loan is on its way.
    void read(DiskReads reads, size_t bytes, char* room, Stream stream) {
        now_ = {std::move(reads), {}, bytes};
        start(now_, room, stream);
        finish(stream);
    }
    void finish([[maybe_unused]] Stream stream) override {
        queue_.wait();
        coming_->reads.check();
        for (const auto& [at, number] : coming_->numbers) std::memcpy(to_ + at, &number, sizeof number);
        if (kHostIsDevice) return;
        free_.block(copies_.get());
        move_async(Way::FromHost, room_, to_, coming_->bytes, copies_.get());
        copied_[turn_].record(copies_.get());
        copied_[turn_].block(stream);
    }

  private:
    static constexpr int kRooms = 2;
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

    void start(const Loan& loan, char* room, [[maybe_unused]] Stream stream) {
        coming_ = &loan;
        count_moved(Way::DiskRead, coming_->bytes);
        room_ = to_ = room;
        if (!kHostIsDevice) {
            turn_ = (turn_ + 1) % kRooms;
            copied_[turn_].wait();
            free_.record(stream);
            to_ = memory_.data() + DiskQueue::kStagingBytes + static_cast<size_t>(turn_) * room_bytes_;
        }
        queue_.start(coming_->reads.count(), std::make_shared<DiskRead>(coming_->reads, to_));
    }

    std::map<std::string, std::unique_ptr<DirectFile>> files_;
    std::vector<Loan> loans_;
    Loan now_;
    const size_t room_bytes_;
    const Loan* coming_ = nullptr;
    char *room_ = nullptr, *to_ = nullptr;  // on the device, and where the host reads to
    OwnStream copies_;
    Event free_, copied_[kRooms];
    int turn_ = 0;
    Memory memory_;
    DiskQueue queue_;  // the last: it ends before the memory does
};
