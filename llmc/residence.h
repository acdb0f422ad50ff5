// residence.h - where a model's blocks live when they are not on the device, and how one is lent to it:
// fetched into a room of the arena while what comes before it is computed.
//
// A residence is one file: residence_disk.h and residence_host.h of a frozen model's matrices,
// residence_trained.h of blocks that are trained, and go back changed. It fetches a loan's bytes into a
// room, and knows nothing of the step; Loans takes the rooms, so that the plan has them, and decides
// what is fetched when. A copy under way owns its room until it is joined in the order of the program.
//
// A loan is a block, or one of a frozen block's halves: its attention or its MLP; or a slice of the head
// (embeddings_elsewhere.h); or a block's gradients. Loans have numbers, in the order of the model.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "llmc/arena.h"
#include "llmc/graph.h"
#include "llmc/work.h"

constexpr int kNoLoan = -1;

class Residence {
  public:
    virtual ~Residence() = default;
    // Begins to fetch a loan's bytes to `room` on the device, which what the stream was given so far may
    // still use. One is on its way at a time. `changed` is what is in the room, where that must be stored
    // first, which only a residence of what is trained can; then `loan` may be none.
    virtual void start(int loan, char* room, Stream stream, int changed) = 0;
    // Has what the stream is given from here on find them there. Fails where they cannot be had.
    virtual void finish(Stream stream) = 0;
};

// What is lent: what its transfers are of, and its rooms in the plan.
struct Lent {
    Transfer::Of of;
    const char *rooms, *kind;
};
constexpr Lent kLentBlocks = {Transfer::Loan, "lent_block", "weights"},
               kLentVocabulary = {Transfer::Vocabulary, "lent_vocabulary", "weights"},
               kLentGradients = {Transfer::Gradients, "lent_gradients", "parameter_gradient"};

// The loans of a pass over the model, each there while the next is on its way: in two rooms, which the pass
// has from its first loan to give_back(), so that all its blocks find the same memory left.
class Loans {
  public:
    Loans(Arena& arena, const Stream& stream, const Lent& lent)
        : arena_(arena), stream_(stream), lent_(lent) {}

    // Where loans come from, and the bytes of each. Before that nothing can be borrowed; a rehearsal needs no
    // residence.
    void lend(Way way, std::vector<size_t> bytes, Residence* residence) {
        way_ = way;
        bytes_ = std::move(bytes);
        residence_ = residence;
    }
    // Whether loans come with what they have, as they do unless this says otherwise, or are to be written.
    void come_with_contents(bool contents) { contents_ = contents; }
    // A loan's bytes, there for what the stream is given until a third is borrowed, or another fetched with
    // it, or all are given back. Loan `next` is on its way then; negative: none. Null in a rehearsal.
    char* borrow(int loan, int next) {
        take_rooms();
        if (loan != rooms_[held_].loan) {
            if (loan != other().loan) fetch(loan);
            join();
            held_ = 1 - held_;
        }
        if (next >= 0 && next != loan && next != other().loan) fetch(next);
        if (next < 0 && other().changed) fetch(kNoLoan);
        return reinterpret_cast<char*>(rooms_[held_].bytes.data());
    }
    // Takes the rooms, before anything is borrowed.
    void take_rooms() {
        for (Room& room : rooms_)
            if (!room.bytes)
                room = {kNoLoan, false, arena_.take<uint8_t>(lent_.rooms, {room_bytes()}, lent_.kind)};
    }
    // Has a loan on its way that is borrowed next.
    void expect(int loan) {
        take_rooms();
        fetch(loan);
    }
    // Whether a loan was borrowed last, and not given back.
    bool holds(int loan) const { return loan == rooms_[held_].loan; }
    // What was borrowed last, to be changed: it is stored before its room is used again.
    char* change() {
        rooms_[held_].changed = true;
        return reinterpret_cast<char*>(rooms_[held_].bytes.data());
    }
    void give_back() {
        for (int i = 0; i < 2; i++, held_ = 1 - held_)
            if (other().changed) fetch(kNoLoan);
        join();
        for (Room& room : rooms_) room = {};
    }

  private:
    struct Room {
        int loan = kNoLoan;
        bool changed = false;
        Tensor<uint8_t> bytes = {};
    };
    int64_t room_bytes() const {
        return static_cast<int64_t>(*std::max_element(bytes_.begin(), bytes_.end()));
    }
    double bytes_of(int loan) const { return static_cast<double>(bytes_[static_cast<size_t>(loan)]); }
    // The room that is not held: its loan is on its way, or was held before.
    Room& other() { return rooms_[1 - held_]; }
    void fetch(int loan) {
        join();
        const int changed = std::exchange(other().changed, false) ? other().loan : kNoLoan;
        other().loan = loan;
        const int comes = contents_ ? loan : kNoLoan;
        if (changed == kNoLoan && comes == kNoLoan) return;
        under_way_ = true;
        if (!arena_.rehearsing())
            return host_act([this, comes, changed, room = reinterpret_cast<char*>(other().bytes.data())] {
                residence_->start(comes, room, stream_, changed);
            });
        if (changed != kNoLoan) note_transfer({lent_.of, false, way_back(way_), bytes_of(changed)});
        if (comes != kNoLoan) note_transfer({lent_.of, false, way_, bytes_of(comes)});
    }
    void join() {
        if (!std::exchange(under_way_, false)) return;
        if (arena_.rehearsing()) return note_transfer({lent_.of, true});
        host_act([this] {
            const Waiting waiting(lent_.of);
            residence_->finish(stream_);
        });
    }

    Arena& arena_;
    const Stream& stream_;
    const Lent lent_;
    Residence* residence_ = nullptr;
    Way way_ = Way::DiskRead;
    std::vector<size_t> bytes_;
    Room rooms_[2];
    int held_ = 0;
    bool under_way_ = false, contents_ = true;
};
