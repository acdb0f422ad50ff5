// elsewhere_staged.h - working memory of a training in a file, beside a GPU. Data passes through buffers of
// pinned host memory: the disk reads or writes one while the link copies another.
//
// Only the host can send requests to the disk, and before a write it must know that the GPU's data is in host
// memory. So exchange() only queues that copy; the first later call that finds it done sends the disk
// request. join() waits for the disk, queues the copy to the GPU, and makes the GPU's stream wait for it.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "llmc/elsewhere.h"
#include "llmc/work.h"

class StagedElsewhere : public Elsewhere {
  public:
    // The pinned memory that it takes, in bytes.
    static size_t pinned_bytes(size_t room_bytes, size_t rooms) {
        return rooms * whole_sectors(room_bytes) + kSector;
    }

    // Allocates that memory for `rooms` exchanges of at most room_bytes: exchange i + rooms may start only
    // after exchange i was joined. The data is in `file`.
    StagedElsewhere(std::unique_ptr<Elsewhere> file, size_t room_bytes, size_t rooms)
        : memory_(pinned_bytes(room_bytes, rooms)), stages_(rooms), file_(std::move(file)) {
        for (size_t i = 0; i < rooms; i++)
            stages_[i].memory = aligned_room(memory_.data()) + i * whole_sectors(room_bytes);
    }

    void read(uint64_t at, size_t bytes, void* host) const override { file_->read(at, bytes, host); }
    void write(uint64_t at, size_t bytes, const void* host) override { file_->write(at, bytes, host); }

    size_t exchange(char* room, size_t bytes, std::optional<uint64_t> to, std::optional<uint64_t> from,
                    Stream stream) override {
        assert(next_ - joined_ < stages_.size());
        Stage& s = stage(next_);
        s.fetched.wait();
        s.room = room, s.bytes = bytes, s.to = to, s.from = from;
        s.asked.record(stream);
        if (to) {
            s.asked.block(stores_.get());
            move_async(Way::ToHost, s.memory, room, bytes, stores_.get());
            s.stored.record(stores_.get());
        }
        next_++;
        begin_what_is_there();
        return next_ - 1;
    }
    void join(size_t number, Stream stream) override {
        begin_what_is_there();
        for (; joined_ <= number; joined_++) {
            Stage& s = stage(joined_);
            if (begun_ == joined_) {
                s.stored.wait();
                begin();
            }
            file_->join(s.number, stream);
            if (s.from) {
                s.asked.block(fetches_.get());
                move_async(Way::FromHost, s.room, s.memory, s.bytes, fetches_.get());
                s.fetched.record(fetches_.get());
                fetched_.record(fetches_.get());
            }
        }
        fetched_.block(stream);
    }

  private:
    // An exchange under way.
    struct Stage {
        char *memory = nullptr, *room = nullptr;
        size_t bytes = 0, number = 0;  // the number is that of the file's exchange
        std::optional<uint64_t> to, from;
        Event asked, stored, fetched;  // at the call; after the copies to and from `memory`
    };
    Stage& stage(size_t number) { return stages_[number % stages_.size()]; }
    // Sends the disk the next exchange that it was not sent yet.
    void begin() {
        Stage& s = stage(begun_++);
        s.number = file_->exchange(s.memory, s.bytes, s.to, s.from, nullptr);
    }
    // Sends it those whose data has arrived in host memory, in order.
    void begin_what_is_there() {
        while (begun_ < next_ && (!stage(begun_).to || stage(begun_).stored.happened())) begin();
    }

    PinnedBuffer memory_;
    OwnStream stores_, fetches_;
    Event fetched_;  // after the latest copy to the GPU
    std::vector<Stage> stages_;
    size_t next_ = 0, begun_ = 0, joined_ = 0;  // how many exchanges were asked for, sent to the disk, joined
    std::unique_ptr<Elsewhere> file_;           // declared last, so that it ends before the memory does
};
