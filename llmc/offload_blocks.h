// offload_blocks.h - streams a model's blocks that are not on the device: each is fetched into a buffer in
// the arena while the blocks before it compute. weights.h and gradients.h use it; read this to see how the
// device waits for a block, and no longer than it must.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "llmc/arena.h"
#include "llmc/disk_reader.h"
#include "llmc/graph.h"
#include "llmc/offload_storage.h"
#include "llmc/work.h"

// ---- streaming blocks in order
//
// A loan is what is streamed as a whole: a block, a slice of the head (offload_embeddings.h), or a block's
// gradients. Loans are numbered in the order of the model.
//
// A Residence is a source of loans. HostResidence and DiskResidence have the matrices of a frozen model;
// TrainedResidence has blocks that are trained, and stores them again when they have changed. A Residence
// transfers bytes to and from a buffer, and knows nothing of the step. Loans takes the buffers, so that the
// plan contains them, and decides what is fetched when. While a transfer is under way, nothing else may use
// its buffer, until the program joins the transfer.

constexpr int kNoLoan = -1;

class Residence {
  public:
    virtual ~Residence() = default;
    // Starts fetching a loan's bytes to the buffer `room` on the device. Work queued on the stream so far may
    // still use the buffer. If `changed` is not kNoLoan, the buffer has this loan, changed, which is stored
    // first; then `loan` may be kNoLoan. Only TrainedResidence can store. Returns a number for finish(). At
    // most as many transfers may be under way as there are buffers.
    virtual size_t start(int loan, char* room, Stream stream, int changed) = 0;
    // Work queued on the stream from here on runs after this transfer and all that started before it. Fails
    // if a transfer failed.
    virtual void finish(size_t number, Stream stream) = 0;
};

// What is streamed: the kind of its transfers, and the name and the kind of its buffers in the plan.
struct Lent {
    Transfer::Of of;
    const char *rooms, *kind;
};
constexpr Lent kLentBlocks = {Transfer::Loan, "lent_block", "weights"},
               kLentVocabulary = {Transfer::Vocabulary, "lent_vocabulary", "weights"},
               kLentGradients = {Transfer::Gradients, "lent_gradients", "parameter_gradient"};

// The numbers of `count` loans, from the first to the last, or back.
inline std::vector<int> loans_in_order(int count, bool back = false) {
    std::vector<int> loans(static_cast<size_t>(count));
    std::iota(loans.begin(), loans.end(), 0);
    if (back) std::reverse(loans.begin(), loans.end());
    return loans;
}

// How many buffers `loans` loans need with a prefetch distance of `ahead`.
inline size_t rooms_for(int ahead, size_t loans) { return std::min(static_cast<size_t>(ahead) + 1, loans); }

// Streams the loans that sweeps over the model use: while one is used, the next ones are prefetched. The
// buffers are held from expect() to give_back(), so that all blocks find the same memory left.
class Loans {
  public:
    Loans(Arena& arena, const Stream& stream, const Lent& lent)
        : arena_(arena), stream_(stream), lent_(lent) {}

    // Sets the transfer direction, the bytes of each loan, the prefetch distance, and the source, which may
    // be null in a dry run. Call it before anything else.
    void lend(Way way, std::vector<size_t> bytes, int ahead, Residence* residence) {
        way_ = way;
        bytes_ = std::move(bytes);
        residence_ = residence;
        numbers_.assign(rooms_for(ahead, bytes_.size()), 0);
    }
    // True, the default: loans are fetched with their contents. False: their buffers will be written, and
    // nothing is fetched.
    void come_with_contents(bool contents) { contents_ = contents; }
    // Says which loans will be borrowed next, after those expected so far, and starts fetching the first of
    // them. Takes the buffers.
    void expect(const std::vector<int>& loans) {
        while (rooms_.size() < numbers_.size())
            rooms_.push_back({.bytes = arena_.take<uint8_t>(lent_.rooms, {room_bytes()}, lent_.kind)});
        for (const int loan : loans) {
            const int before = expected_.empty() ? held() : expected_.back();
            if (loan != before) expected_.push_back(loan);
        }
        fetch_expected();
    }
    // The bytes of a loan. Call in the order given to expect(), or again for the loan borrowed last. Work
    // queued on the stream may use them until another loan is borrowed. Null in a dry run.
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
    // True if this loan was borrowed last and not given back.
    bool holds(int loan) const { return loan == held(); }
    // The bytes of the loan borrowed last, for changing them: they are stored before the buffer is reused.
    char* change() {
        rooms_[held_].changed = true;
        return at(held_);
    }
    // Stores what was changed, waits for all transfers and releases the buffers.
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
        int noted = -1;  // the number of its last transfer, in a dry run
        Tensor<uint8_t> bytes;
    };
    int64_t room_bytes() const {
        return static_cast<int64_t>(*std::max_element(bytes_.begin(), bytes_.end()));
    }
    double bytes_of(int loan) const { return static_cast<double>(bytes_[static_cast<size_t>(loan)]); }
    char* at(size_t room) const { return reinterpret_cast<char*>(rooms_[room].bytes.data()); }
    int held() const { return held_ == kNoRoom ? kNoLoan : rooms_[held_].loan; }
    // The number of the buffer that has a loan, or kNoRoom.
    size_t room_of(int loan) const {
        const auto room =
            std::find_if(rooms_.begin(), rooms_.end(), [&](const Room& r) { return r.loan == loan; });
        return room == rooms_.end() ? kNoRoom : static_cast<size_t>(room - rooms_.begin());
    }
    // The loans that should be in the buffers now: the one in use, and the next expected ones.
    std::vector<int> wanted() const {
        std::vector<int> loans;
        if (held_ != kNoRoom) loans.push_back(held());
        for (auto l = expected_.begin(); l != expected_.end() && loans.size() < rooms_.size(); ++l)
            if (std::find(loans.begin(), loans.end(), *l) == loans.end()) loans.push_back(*l);
        return loans;
    }
    // Starts fetching wanted loans that are in no buffer, and storing changed ones that are not replaced.
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
    size_t held_ = kNoRoom;        // the buffer in use
    std::deque<int> expected_;     // never the same loan twice in a row
    std::vector<size_t> numbers_;  // by buffer: its last transfer; each replay of a recording sets it anew
};

// ---- from host memory
//
// Streams a frozen model's blocks from pinned host memory beside a GPU: each is copied to the device, on a
// separate stream, whenever it is needed.

class HostResidence : public Residence {
  public:
    // For `rooms` buffers. bytes_of(loan) returns a loan's bytes in pinned memory.
    HostResidence(size_t rooms, std::function<std::span<const char>(int loan)> bytes_of)
        : bytes_of_(std::move(bytes_of)), arrived_(rooms) {}

    size_t start(int loan, char* room, Stream stream, [[maybe_unused]] int changed) override {
        assert(changed == kNoLoan);
        const std::span<const char> from = bytes_of_(loan);
        free_.record(stream);
        free_.block(copies_.get());
        move_async(Way::FromHost, room, from.data(), from.size(), copies_.get());
        arrived_[begun_ % arrived_.size()].record(copies_.get());
        return begun_++;
    }
    void finish(size_t number, Stream stream) override { arrived_[number % arrived_.size()].block(stream); }

  private:
    std::function<std::span<const char>(int)> bytes_of_;
    OwnStream copies_;
    Event free_;
    std::vector<Event> arrived_;
    size_t begun_ = 0;
};

// ---- from the files of a frozen model
//
// Streams a frozen model's blocks from its own files: each is read straight from the disk (disk_reader.h)
// whenever it is needed. On a CPU it is read into its buffer; beside a GPU it is read into pinned memory and
// copied from there on a separate stream.

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

// ---- blocks that are trained, and gradients
//
// Streams blocks of a model that is trained, or their gradients, from memory outside the device
// (offload_storage.h): a block that was changed is stored there before its buffer is reused.

class TrainedResidence : public Residence {
  public:
    // The bytes of a buffer for a block, including what aligning it takes.
    static size_t room_bytes(size_t block_bytes) { return block_bytes + kElsewhereAlignment; }

    // The blocks are in `place`, one after another.
    TrainedResidence(Elsewhere& place, size_t block_bytes) : place_(place), block_bytes_(block_bytes) {}

    size_t start(int loan, char* room, Stream stream, int changed) override {
        const auto at = [&](int number) -> std::optional<uint64_t> {
            if (number == kNoLoan) return std::nullopt;
            return static_cast<uint64_t>(number) * block_bytes_;
        };
        return place_.exchange(aligned_room(room), block_bytes_, at(changed), at(loan), stream);
    }
    void finish(size_t number, Stream stream) override { place_.join(number, stream); }

  private:
    Elsewhere& place_;
    const size_t block_bytes_;
};
