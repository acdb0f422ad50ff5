// offload_storage.h - data outside the device that is fetched to buffers on the device, and stored again,
// while the device computes: sources of pieces of data, and working memory of a training in a file, which a
// GPU reaches through buffers in host memory, or in pinned host memory beside a GPU. The other offload_
// headers keep in it what they store and fetch again.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "llmc/device.h"
#include "llmc/disk.h"
#include "llmc/file.h"
#include "llmc/temporary_file.h"
#include "llmc/work.h"

// ---- the interface

// Pieces of data outside the device, by number. A source transfers them to and from buffers, and knows
// nothing of the step.
class PieceSource {
  public:
    virtual ~PieceSource() = default;
    // Starts storing the bytes of `buffer` as piece `to`, and after that fetching piece `from` into it;
    // either may be absent. Both run after the work queued on the stream so far. Returns a number for
    // finish(). At most as many transfers may be under way as there are buffers.
    virtual size_t start(char* buffer, std::optional<int> to, std::optional<int> from, Stream stream) = 0;
    // Work queued on the stream from here on runs after this transfer and all that started before it. Fails
    // if a transfer failed.
    virtual void finish(size_t number, Stream stream) = 0;
};

// Alignment of the pieces in working memory, and of the buffers: a disk transfers whole sectors.
constexpr size_t kStorageAlignment = kSector;

// The bytes to take for a buffer of a piece, and the aligned part of what was taken, which transfers use.
// Null in a dry run.
constexpr size_t aligned_buffer_bytes(size_t piece_bytes) { return piece_bytes + kStorageAlignment; }
inline char* aligned_buffer(void* taken) {
    const auto address = reinterpret_cast<uintptr_t>(taken);
    return reinterpret_cast<char*>((address + kStorageAlignment - 1) / kStorageAlignment * kStorageAlignment);
}

// Working memory: pieces of the same size, one after another.
class OffloadStorage : public PieceSource {
  public:
    explicit OffloadStorage(size_t piece_bytes) : piece_bytes_(piece_bytes) {}
    // Copy any range of bytes to or from the host, synchronously. No transfer may be under way.
    virtual void read(uint64_t at, size_t bytes, void* host) const = 0;
    virtual void write(uint64_t at, size_t bytes, const void* host) = 0;
    // The address of a piece; null if this memory is not in host memory.
    virtual char* address(int /*piece*/) const { return nullptr; }

  protected:
    uint64_t offset_of(int piece) const { return static_cast<uint64_t>(piece) * piece_bytes_; }

    const size_t piece_bytes_;
};

// ---- in a file
//
// The file has no name. Transfers bypass the page cache: the disk reads and writes the buffers themselves.

class DiskStorage : public OffloadStorage {
  public:
    // Makes the file in `folder`, of `bytes` bytes, all zero. Messages name `option`, which asked for it.
    // Fails if the disk lacks the space, or if the file system has no such files.
    DiskStorage(const std::string& folder, uint64_t bytes, size_t piece_bytes, const char* option)
        : OffloadStorage(piece_bytes), folder_(folder), option_(option), file_(make()), queue_(nullptr) {
        if (const int error = posix_fallocate(file_.fd(), 0, static_cast<off_t>(whole_sectors(bytes))); error)
            fail("%s: %s cannot be had in %s (TMPDIR names another folder): %s", option, size_text(bytes),
                 folder, write_error(error));
        taken_ = stamp_of(file_.fd(), folder).bytes;
        working_file_bytes += taken_;
    }
    ~DiskStorage() override { working_file_bytes -= taken_; }

    void read(uint64_t at, size_t bytes, void* host) const override {
        char* to = static_cast<char*>(host);
        for_each_piece(at, bytes, [&](uint64_t sector, size_t length, size_t begin, size_t count) {
            read_sectors(sector, length, bounce_.get());
            std::memcpy(to, bounce_.get() + begin, count);
            to += count;
        });
    }
    void write(uint64_t at, size_t bytes, const void* host) override {
        const char* from = static_cast<const char*>(host);
        for_each_piece(at, bytes, [&](uint64_t sector, size_t length, size_t begin, size_t count) {
            if (count < length) read_sectors(sector, length, bounce_.get());
            std::memcpy(bounce_.get() + begin, from, count);
            write_sectors(sector, length, bounce_.get());
            from += count;
        });
    }

    size_t start(char* buffer, std::optional<int> to, std::optional<int> from, Stream) override {
        char* const at = aligned_buffer(buffer);
        const size_t all = whole_sectors(piece_bytes_);
        if (to) count_moved(Route::DiskWrite, piece_bytes_);
        if (from) count_moved(Route::DiskRead, piece_bytes_);
        return queue_.start((all + kRequestBytes - 1) / kRequestBytes, [=, this](size_t i, char*) {
            const size_t first = i * kRequestBytes, count = std::min(kRequestBytes, all - first);
            if (to) write_sectors(offset_of(*to) + first, count, at + first);
            if (from) read_sectors(offset_of(*from) + first, count, at + first);
        });
    }
    void finish(size_t number, Stream) override { queue_.wait(number); }

  private:
    static constexpr size_t kBounceBytes = 1 << 20;  // the buffer of read() and write()
    struct Free {
        void operator()(char* p) const { free(p); }
    };

    int make() const {
        const int fd = make_nameless_file(folder_, O_DIRECT);
        if (fd < 0)
            fail("%s: no file past the page cache can be made in %s (TMPDIR names another folder): %s",
                 option_, folder_, std::strerror(errno));
        return fd;
    }
    // Cuts the range of `bytes` bytes at `at` into pieces, each in whole sectors. Calls f(sector, length,
    // begin, count) for each: the sectors are `length` bytes at offset `sector` of the file, and the piece is
    // `count` bytes from byte `begin` of these on.
    template <class F>
    void for_each_piece(uint64_t at, size_t bytes, F&& f) const {
        if (!bounce_) bounce_.reset(static_cast<char*>(std::aligned_alloc(kSector, kBounceBytes)));
        while (bytes > 0) {
            const uint64_t sector = at / kSector * kSector;
            const size_t begin = at - sector, count = std::min(bytes, kBounceBytes - begin);
            f(sector, whole_sectors(begin + count), begin, count);
            at += count;
            bytes -= count;
        }
    }
    void read_sectors(uint64_t at, size_t bytes, char* to) const {
        if (read_at(file_.fd(), at, bytes, to) != static_cast<ssize_t>(bytes)) fail_to("read");
    }
    void write_sectors(uint64_t at, size_t bytes, const char* from) const {
        for (size_t done = 0; done < bytes;) {
            const ssize_t n = pwrite(file_.fd(), from + done, bytes - done, static_cast<off_t>(at + done));
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) fail_to("written");
            done += static_cast<size_t>(n);
        }
    }
    [[noreturn]] void fail_to(const char* action) const {
        fail("%s: what %s keeps there cannot be %s: %s", folder_, option_, action, std::strerror(errno));
    }

    const std::string folder_;
    const char* const option_;
    OpenFile file_;
    uint64_t taken_ = 0;  // bytes on the disk
    mutable std::unique_ptr<char, Free> bounce_;
    DiskQueue queue_;  // declared last, so that it ends before the file is closed
};

// ---- in pinned host memory, beside a GPU

// Pieces in pinned host memory. Each direction has a stream of its own, since a link carries data both ways
// at the same time at full speed.
class PinnedPieces : public PieceSource {
  public:
    // bytes_of(piece) returns where a piece is.
    explicit PinnedPieces(std::function<std::span<char>(int piece)> bytes_of)
        : bytes_of_(std::move(bytes_of)) {}

    size_t start(char* buffer, std::optional<int> to, std::optional<int> from, Stream stream) override {
        before_.record(stream);
        if (to) {
            const std::span<char> piece = bytes_of_(*to);
            before_.block(stores_.get());
            move_async(Route::ToHost, piece.data(), buffer, piece.size(), stores_.get());
            stored_.record(stores_.get());
            stored_.block(fetches_.get());
        } else {
            before_.block(fetches_.get());
        }
        if (from) {
            const std::span<char> piece = bytes_of_(*from);
            move_async(Route::FromHost, buffer, piece.data(), piece.size(), fetches_.get());
        }
        done_[next_ % done_.size()].record(fetches_.get());
        return next_++;
    }
    // Only the latest done_.size() transfers have an event each. Instead of an older one, it waits for the
    // oldest of these.
    void finish(size_t number, Stream stream) override {
        const size_t known = next_ < done_.size() ? number : std::max(number, next_ - done_.size());
        done_[known % done_.size()].block(stream);
    }

  private:
    std::function<std::span<char>(int)> bytes_of_;
    OwnStream stores_, fetches_;  // a fetch runs after the stores that started before it
    Event before_, stored_;
    std::array<Event, 64> done_;
    size_t next_ = 0;
};

class HostStorage : public OffloadStorage {
  public:
    // Allocates the memory, zeroed.
    HostStorage(size_t bytes, size_t piece_bytes) : OffloadStorage(piece_bytes), memory_(bytes) {
        std::memset(memory_.data(), 0, bytes);
    }
    // Takes over a mapping of zeroed memory.
    HostStorage(std::span<char> mapping, size_t piece_bytes)
        : OffloadStorage(piece_bytes), memory_(mapping) {}

    void read(uint64_t at, size_t bytes, void* host) const override {
        std::memcpy(host, memory_.data() + at, bytes);
    }
    void write(uint64_t at, size_t bytes, const void* host) override {
        std::memcpy(memory_.data() + at, host, bytes);
    }
    char* address(int piece) const override { return memory_.data() + offset_of(piece); }
    size_t start(char* buffer, std::optional<int> to, std::optional<int> from, Stream stream) override {
        return pieces_.start(aligned_buffer(buffer), to, from, stream);
    }
    void finish(size_t number, Stream stream) override { pieces_.finish(number, stream); }

  private:
    PinnedBuffer memory_;
    PinnedPieces pieces_{[this](int piece) { return std::span(address(piece), piece_bytes_); }};
};

// ---- in a file, beside a GPU
//
// Data passes through buffers of pinned host memory: the disk reads or writes one while the link copies
// another.
//
// Only the host can send requests to the disk, and before a write it must know that the GPU's data is in host
// memory. So start() only queues that copy; the first later call that finds it done sends the disk request.
// finish() waits for the disk, queues the copy to the GPU, and makes the GPU's stream wait for it.

class StagedStorage : public OffloadStorage {
  public:
    // The pinned memory that it takes, in bytes.
    static size_t pinned_bytes(size_t piece_bytes, size_t buffers) {
        return buffers * whole_sectors(piece_bytes) + kSector;
    }

    // Allocates that memory for `buffers` transfers: transfer i + buffers may start only after transfer i was
    // finished. The pieces are in `file`.
    StagedStorage(std::unique_ptr<OffloadStorage> file, size_t piece_bytes, size_t buffers)
        : OffloadStorage(piece_bytes),
          memory_(pinned_bytes(piece_bytes, buffers)),
          stages_(buffers),
          file_(std::move(file)) {
        for (size_t i = 0; i < buffers; i++)
            stages_[i].memory = aligned_buffer(memory_.data()) + i * whole_sectors(piece_bytes);
    }

    void read(uint64_t at, size_t bytes, void* host) const override { file_->read(at, bytes, host); }
    void write(uint64_t at, size_t bytes, const void* host) override { file_->write(at, bytes, host); }

    size_t start(char* buffer, std::optional<int> to, std::optional<int> from, Stream stream) override {
        assert(next_ - finished_ < stages_.size());
        Stage& s = stage(next_);
        s.fetched.wait();
        s.buffer = aligned_buffer(buffer), s.to = to, s.from = from;
        s.asked.record(stream);
        if (to) {
            s.asked.block(stores_.get());
            move_async(Route::ToHost, s.memory, s.buffer, piece_bytes_, stores_.get());
            s.stored.record(stores_.get());
        }
        next_++;
        begin_what_is_there();
        return next_ - 1;
    }
    void finish(size_t number, Stream stream) override {
        begin_what_is_there();
        for (; finished_ <= number; finished_++) {
            Stage& s = stage(finished_);
            if (begun_ == finished_) {
                s.stored.wait();
                begin();
            }
            file_->finish(s.number, stream);
            if (s.from) {
                s.asked.block(fetches_.get());
                move_async(Route::FromHost, s.buffer, s.memory, piece_bytes_, fetches_.get());
                s.fetched.record(fetches_.get());
                fetched_.record(fetches_.get());
            }
        }
        fetched_.block(stream);
    }

  private:
    // A transfer under way.
    struct Stage {
        char *memory = nullptr, *buffer = nullptr;
        size_t number = 0;  // of the file's transfer
        std::optional<int> to, from;
        Event asked, stored, fetched;  // at the call; after the copies to and from `memory`
    };
    Stage& stage(size_t number) { return stages_[number % stages_.size()]; }
    // Sends the disk the next transfer that it was not sent yet.
    void begin() {
        Stage& s = stage(begun_++);
        s.number = file_->start(s.memory, s.to, s.from, nullptr);
    }
    // Sends it those whose data has arrived in host memory, in order.
    void begin_what_is_there() {
        while (begun_ < next_ && (!stage(begun_).to || stage(begun_).stored.happened())) begin();
    }

    PinnedBuffer memory_;
    OwnStream stores_, fetches_;
    Event fetched_;  // after the latest copy to the GPU
    std::vector<Stage> stages_;
    size_t next_ = 0, begun_ = 0, finished_ = 0;  // transfers that were asked for, sent to the disk, finished
    std::unique_ptr<OffloadStorage> file_;        // declared last, so that it ends before the memory does
};
