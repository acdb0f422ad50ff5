// elsewhere_disk.h - working memory of a training in a file without a name. Transfers bypass the page cache:
// the disk reads and writes the buffers themselves.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <string>

#include "llmc/disk_queue.h"
#include "llmc/elsewhere.h"
#include "llmc/file.h"
#include "llmc/temporary_file.h"
#include "llmc/work.h"

class DiskElsewhere : public Elsewhere {
  public:
    // Makes the file in `folder`, of `bytes` bytes, all zero. Messages name `option`, which asked for it.
    // Fails if the disk lacks the space, or if the file system has no such files. With `ring` false, threads
    // perform the requests.
    DiskElsewhere(const std::string& folder, uint64_t bytes, const char* option, bool ring = true)
        : folder_(folder), option_(option), file_(make()), queue_(nullptr, ring) {
        if (const int error = posix_fallocate(file_.fd(), 0, static_cast<off_t>(whole_sectors(bytes))); error)
            fail("%s: %s cannot be had in %s (TMPDIR names another folder): %s", option,
                 size_text(bytes).c_str(), folder.c_str(), write_error(error).c_str());
        taken_ = stamp_of(file_.fd(), folder).bytes;
        working_file_bytes += taken_;
    }
    ~DiskElsewhere() override { working_file_bytes -= taken_; }

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

    size_t exchange(char* room, size_t bytes, std::optional<uint64_t> to, std::optional<uint64_t> from,
                    Stream) override {
        const size_t all = whole_sectors(bytes);
        if (to) count_moved(Way::DiskWrite, bytes);
        if (from) count_moved(Way::DiskRead, bytes);
        return queue_.start((all + kRequestBytes - 1) / kRequestBytes,
                            std::make_shared<Exchange>(*this, room, all, to, from));
    }
    void join(size_t number, Stream) override { queue_.wait(number); }

  private:
    static constexpr size_t kBounceBytes = 1 << 20;  // the buffer of read() and write()
    struct Free {
        void operator()(char* p) const { free(p); }
    };

    // Writes a buffer to `to`, then reads it anew from `from`; either may be absent.
    struct Exchange : DiskWork {
        const DiskElsewhere& place;
        char* const room;
        const size_t bytes;
        const std::optional<uint64_t> to, from;
        Exchange(const DiskElsewhere& place, char* room, size_t bytes, std::optional<uint64_t> to,
                 std::optional<uint64_t> from)
            : place(place), room(room), bytes(bytes), to(to), from(from) {}
        DiskRequest request(size_t i) const override {
            const size_t first = i * kRequestBytes, count = std::min(kRequestBytes, bytes - first);
            DiskRequest r{{}, {}, room + first};
            if (to) r.write = {place.file_.fd(), *to + first, count, count};
            if (from) r.read = {place.file_.fd(), *from + first, count, count};
            return r;
        }
        [[noreturn]] void fail_at(size_t, bool writes, int error) const override {
            errno = error;
            place.fail_to(writes ? "written" : "read");
        }
    };

    int make() const {
        const int fd = make_nameless_file(folder_, O_DIRECT);
        if (fd < 0)
            fail("%s: no file past the page cache can be made in %s (TMPDIR names another folder): %s",
                 option_, folder_.c_str(), std::strerror(errno));
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
        fail("%s: what %s keeps there cannot be %s: %s", folder_.c_str(), option_, action,
             std::strerror(errno));
    }

    const std::string folder_;
    const char* const option_;
    OpenFile file_;
    uint64_t taken_ = 0;  // bytes on the disk
    mutable std::unique_ptr<char, Free> bounce_;
    DiskQueue queue_;  // declared last, so that it ends before the file is closed
};
