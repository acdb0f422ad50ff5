// elsewhere_staged.h - memory beside a GPU's in a file: what goes there and what comes passes through rooms
// of pinned host memory, which the disk reads and writes while the link copies others.
//
// Only the host can ask the disk, and it must know that a copy has arrived before it does. So what is to be
// written is asked for at the next call that finds its copy done, and join() waits for the disk and then has
// the GPU wait for the copy.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "llmc/elsewhere.h"
#include "llmc/work.h"

class StagedElsewhere : public Elsewhere {
  public:
    // The pinned memory that it takes.
    static size_t pinned_bytes(size_t room_bytes, size_t rooms) {
        return rooms * whole_sectors(room_bytes) + kSector;
    }

    // Takes that memory, for so many exchanges under way at a time: an exchange that many later begins only
    // when its own was joined. `file` holds what lies there.
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
    // An exchange on its way.
    struct Stage {
        char *memory = nullptr, *room = nullptr;
        size_t bytes = 0, number = 0;  // the number of the file's exchange
        std::optional<uint64_t> to, from;
        Event asked, stored, fetched;
    };
    Stage& stage(size_t number) { return stages_[number % stages_.size()]; }
    // Asks the disk for the first exchange that it was not asked for.
    void begin() {
        Stage& s = stage(begun_++);
        s.number = file_->exchange(s.memory, s.bytes, s.to, s.from, nullptr);
    }
    void begin_what_is_there() {
        while (begun_ < next_ && (!stage(begun_).to || stage(begun_).stored.happened())) begin();
    }

    PinnedBuffer memory_;
    OwnStream stores_, fetches_;
    Event fetched_;  // what was fetched last
    std::vector<Stage> stages_;
    size_t next_ = 0, begun_ = 0, joined_ = 0;  // numbers of exchanges: asked for, begun, joined, so far
    std::unique_ptr<Elsewhere> file_;           // the last: it ends before the memory does
};
