// residence.h - where a model's blocks live when they are not on the device, and how they are lent to it:
// each is fetched into a room of the arena while what comes before it is computed.
//
// A residence is one file: residence_disk.h and residence_host.h of a frozen model's matrices,
// residence_trained.h of blocks that are trained, and go back changed. It fetches a loan's bytes into a
// room, and knows nothing of the step; Loans takes the rooms, so that the plan has them, and decides
// what is fetched when. A copy under way owns its room until it is joined in the order of the program.
//
// A loan is a block, or a slice of the head (embeddings_elsewhere.h), or a block's gradients. Loans have
// numbers, in the order of the model.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <deque>
#include <numeric>
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
    // still use. `changed` is what is in the room, where that must be stored first, which only a residence of
    // what is trained can; then `loan` may be none. Returns a number to finish it by. No more are on their
    // way at a time than there are rooms.
    virtual size_t start(int loan, char* room, Stream stream, int changed) = 0;
    // Has what the stream is given from here on find that there, and all that was begun before it. Fails
    // where it cannot be had.
    virtual void finish(size_t number, Stream stream) = 0;
};

// What is lent: what its transfers are of, and its rooms in the plan.
struct Lent {
    Transfer::Of of;
    const char *rooms, *kind;
};
constexpr Lent kLentBlocks = {Transfer::Loan, "lent_block", "weights"},
               kLentVocabulary = {Transfer::Vocabulary, "lent_vocabulary", "weights"},
               kLentGradients = {Transfer::Gradients, "lent_gradients", "parameter_gradient"};

// So many loans, from the first to the last or back.
inline std::vector<int> loans_in_order(int count, bool back = false) {
    std::vector<int> loans(static_cast<size_t>(count));
    std::iota(loans.begin(), loans.end(), 0);
    if (back) std::reverse(loans.begin(), loans.end());
    return loans;
}

// How many rooms so many loans have, where `ahead` of them are on their way while one is used.
inline size_t rooms_for(int ahead, size_t loans) { return std::min(static_cast<size_t>(ahead) + 1, loans); }

// The loans of a pass over the model, each there while those that are used next are on their way: in rooms
// that the pass has until give_back(), so that all its blocks find the same memory left.
class Loans {
  public:
    Loans(Arena& arena, const Stream& stream, const Lent& lent)
        : arena_(arena), stream_(stream), lent_(lent) {}

    // Where loans come from, the bytes of each, and how many are on their way while one is used. Before that
    // nothing can be borrowed; a rehearsal needs no residence.
    void lend(Way way, std::vector<size_t> bytes, int ahead, Residence* residence) {
        way_ = way;
        bytes_ = std::move(bytes);
        residence_ = residence;
        numbers_.assign(rooms_for(ahead, bytes_.size()), 0);
    }
    // Whether loans come with what they have, as they do unless this says otherwise, or are to be written.
    void come_with_contents(bool contents) { contents_ = contents; }
    // Says which loans are borrowed next, behind those expected so far, and has the first come. Takes the
    // rooms.
    void expect(const std::vector<int>& loans) {
        while (rooms_.size() < numbers_.size())
            rooms_.push_back({.bytes = arena_.take<uint8_t>(lent_.rooms, {room_bytes()}, lent_.kind)});
        for (const int loan : loans) {
            const int before = expected_.empty() ? held() : expected_.back();
            if (loan != before) expected_.push_back(loan);
        }
        fetch_expected();
    }
    // The bytes of the loan that is expected first, or of the one that was borrowed last: there for what the
    // stream is given until another is borrowed. Null in a rehearsal.
    char* borrow(int loan) {
        if (loan != held()) {
            assert(!expected_.empty() && loan == expected_.front());
            held_ = kNoRoom;
            fetch_expected();
            held_ = room_of(loan);
            expected_.pop_front();
            join(held_);
        }
        return at(held_);
    }
    // Whether a loan was borrowed last, and not given back.
    bool holds(int loan) const { return loan == held(); }
    // What was borrowed last, to be changed: it is stored before its room is used again.
    char* change() {
        rooms_[held_].changed = true;
        return at(held_);
    }
    void give_back() {
        expected_.clear();
        for (size_t i = 0; i < rooms_.size(); i++)
            if (rooms_[i].changed) fetch(kNoLoan, i);
        for (size_t i = 0; i < rooms_.size(); i++) join(i);
        rooms_.clear();
        held_ = kNoRoom;
    }

  private:
    static constexpr size_t kNoRoom = SIZE_MAX;
    struct Room {
        int loan = kNoLoan;
        bool changed = false, under_way = false;
        int noted = -1;  // the number of its last transfer, in a rehearsal
        Tensor<uint8_t> bytes;
    };
    int64_t room_bytes() const {
        return static_cast<int64_t>(*std::max_element(bytes_.begin(), bytes_.end()));
    }
    double bytes_of(int loan) const { return static_cast<double>(bytes_[static_cast<size_t>(loan)]); }
    char* at(size_t room) const { return reinterpret_cast<char*>(rooms_[room].bytes.data()); }
    int held() const { return held_ == kNoRoom ? kNoLoan : rooms_[held_].loan; }
    // The room of a loan, or kNoRoom.
    size_t room_of(int loan) const {
        const auto room =
            std::find_if(rooms_.begin(), rooms_.end(), [&](const Room& r) { return r.loan == loan; });
        return room == rooms_.end() ? kNoRoom : static_cast<size_t>(room - rooms_.begin());
    }
    // What the rooms are for now: the loan that is held, and those that are expected next.
    std::vector<int> wanted() const {
        std::vector<int> loans;
        if (held_ != kNoRoom) loans.push_back(held());
        for (auto l = expected_.begin(); l != expected_.end() && loans.size() < rooms_.size(); ++l)
            if (std::find(loans.begin(), loans.end(), *l) == loans.end()) loans.push_back(*l);
        return loans;
    }
    // Has those come that are not there, and what was changed be stored where nothing comes.
    void fetch_expected() {
        const std::vector<int> loans = wanted();
        const auto is_free = [&](const Room& r) {
            return std::find(loans.begin(), loans.end(), r.loan) == loans.end();
        };
        for (const int loan : loans)
            if (room_of(loan) == kNoRoom)
                fetch(loan, static_cast<size_t>(std::find_if(rooms_.begin(), rooms_.end(), is_free) -
                                                rooms_.begin()));
        for (size_t i = 0; i < rooms_.size(); i++)
            if (rooms_[i].changed && is_free(rooms_[i])) fetch(kNoLoan, i);
    }
    void fetch(int loan, size_t room) {
        join(room);
        Room& r = rooms_[room];
        const int changed = std::exchange(r.changed, false) ? r.loan : kNoLoan;
        r.loan = loan;
        const int comes = contents_ ? loan : kNoLoan;
        if (changed == kNoLoan && comes == kNoLoan) return;
        r.under_way = true;
        if (!arena_.rehearsing())
            return host_act([this, comes, changed, room, to = at(room)] {
                numbers_[room] = residence_->start(comes, to, stream_, changed);
            });
        if (changed != kNoLoan) r.noted = note_transfer({lent_.of, false, way_back(way_), bytes_of(changed)});
        if (comes != kNoLoan) r.noted = note_transfer({lent_.of, false, way_, bytes_of(comes)});
    }
    void join(size_t room) {
        Room& r = rooms_[room];
        if (!std::exchange(r.under_way, false)) return;
        if (arena_.rehearsing()) return note_wait(lent_.of, r.noted);
        host_act([this, room] {
            const Waiting waiting(lent_.of);
            residence_->finish(numbers_[room], stream_);
        });
    }

    Arena& arena_;
    const Stream& stream_;
    const Lent lent_;
    Residence* residence_ = nullptr;
    Way way_ = Way::DiskRead;
    std::vector<size_t> bytes_;
    bool contents_ = true;
    std::vector<Room> rooms_;
    size_t held_ = kNoRoom;        // the room that is used
    std::deque<int> expected_;     // no two of the same in a row
    std::vector<size_t> numbers_;  // by room, of its last transfer: of each time that a recording runs
};
