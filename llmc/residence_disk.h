// residence_disk.h - blocks that live in the model's own files: each is read straight from the disk
// (disk_reader.h) whenever it is borrowed. On a CPU it is read into its room; on a GPU into pinned memory,
// and copied from there on a stream of its own.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "llmc/device_rates.h"
#include "llmc/disk_reader.h"
#include "llmc/residence.h"

class DiskResidence : public Residence {
  public:
    // What it takes, of the device or, beside a GPU, of pinned host memory.
    static size_t bytes(size_t largest_block) {
        return DiskThreads::kStagingBytes + (kHostIsDevice ? 0 : kRooms * largest_block);
    }

    // Takes that memory.
    explicit DiskResidence(size_t largest_block)
        : room_bytes_(largest_block), memory_(bytes(largest_block)), threads_(memory_.data()) {}

    // The blocks, from the first on. Fails where a file cannot be read so.
    void add(const BlockOnDisk& block) {
        const auto direct = [&](const FileReader& file) {
            std::unique_ptr<DirectFile>& opened = files_[file.path()];
            if (!opened) opened = std::make_unique<DirectFile>(file);
            return opened.get();
        };
        blocks_.push_back({DiskReads(block.pieces, direct), block.numbers, block.bytes});
    }

    void start(int layer, char* room, [[maybe_unused]] Stream stream) override {
        coming_ = &blocks_[static_cast<size_t>(layer)];
        room_ = to_ = room;
        if (!kHostIsDevice) {
            turn_ = (turn_ + 1) % kRooms;
            copied_[turn_].wait();
            free_.record(stream);
            to_ = memory_.data() + DiskThreads::kStagingBytes + static_cast<size_t>(turn_) * room_bytes_;
        }
        threads_.start(coming_->reads.count(), [reads = &coming_->reads, to = to_](size_t i, char* staging) {
            reads->run(i, staging, to);
        });
    }
    void finish([[maybe_unused]] Stream stream) override {
        const WallClock clock;
        threads_.wait();
        coming_->reads.check();
        seconds_waited += clock.seconds();
        for (const auto& [at, number] : coming_->numbers) std::memcpy(to_ + at, &number, sizeof number);
        if (kHostIsDevice) return;
        free_.block(copies_.get());
        copy_async(room_, to_, coming_->bytes, copies_.get());
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
    struct Block {
        DiskReads reads;
        std::vector<std::pair<size_t, float>> numbers;
        size_t bytes;
    };

    std::map<std::string, std::unique_ptr<DirectFile>> files_;
    std::vector<Block> blocks_;
    const size_t room_bytes_;
    const Block* coming_ = nullptr;
    char *room_ = nullptr, *to_ = nullptr;  // on the device, and where the host reads to
    OwnStream copies_;
    Event free_, copied_[kRooms];
    int turn_ = 0;
    Memory memory_;
    DiskThreads threads_;  // the last: they end before the memory does
};
