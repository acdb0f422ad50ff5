// disk_reader.h - reads pieces of files into memory while the program computes: straight from the disk
// (O_DIRECT), so that the page cache takes no memory beside the plan, several requests at a time.
//
// A read from a disk is of whole sectors; pieces begin and end anywhere. So a request reads sectors into a
// thread's own staging memory, and its pieces are copied from there to where they belong.
#pragma once

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/file.h"

// So many bytes of a file, and where they belong: `at` bytes behind the address that a read is given.
struct FilePiece {
    const FileReader* file;
    uint64_t offset;
    size_t bytes, at;
};

// What a block of a model is made of: pieces of files, and numbers that no file has as they are needed.
struct BlockOnDisk {
    std::vector<FilePiece> pieces;
    std::vector<std::pair<size_t, float>> numbers;  // where each belongs
    size_t bytes = 0;
};

constexpr size_t kSector = 4096;           // of every disk that is about, or a multiple of its own
constexpr size_t kRequestBytes = 2 << 20;  // that a request reads at most
constexpr int kDiskThreads = 4;            // and requests under way at a time

// A file that is read past the page cache.
class DirectFile {
  public:
    // Fails where its file system has no such reads.
    explicit DirectFile(const FileReader& file)
        : path_(file.path()), stamp_(file.stamp()), fd_(open_direct()) {
        if (stamp() != stamp_) fail_changed();
    }
    // Reads sectors to memory that is aligned to them; behind the file's end there is nothing. Fails where
    // fewer than `needed` bytes come.
    void read(uint64_t first, size_t bytes, size_t needed, char* out) const {
        const ssize_t got = read_at(fd_.fd(), first, bytes, out);
        if (got < 0) fail("%s: cannot read: %s", path_.c_str(), std::strerror(errno));
        if (static_cast<size_t>(got) < needed) fail_changed();
    }
    // Fails where the file was written to since it was opened.
    void check_unchanged() const {
        if (stamp() != stamp_) fail_changed();
    }

  private:
    int open_direct() const {
        const int fd = open(path_.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
        if (fd < 0 && errno == EINVAL)
            fail("%s: its file system cannot be read past the page cache (O_DIRECT): copy it to one that can",
                 path_.c_str());
        if (fd < 0) fail("%s: cannot open: %s", path_.c_str(), std::strerror(errno));
        return fd;
    }
    FileStamp stamp() const {
        struct stat info;
        if (fstat(fd_.fd(), &info) != 0) fail("%s: cannot stat: %s", path_.c_str(), std::strerror(errno));
        return {info.st_dev, info.st_ino, static_cast<uint64_t>(info.st_size),
                int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec};
    }
    [[noreturn]] void fail_changed() const {
        fail("%s: was changed since it was opened, and is still read from", path_.c_str());
    }

    std::string path_;
    FileStamp stamp_;
    OpenFile fd_;
};

// What is read together: the requests for some pieces.
class DiskReads {
  public:
    DiskReads() = default;
    // `direct` opens each file once.
    template <class Direct>
    DiskReads(std::vector<FilePiece> pieces, Direct&& direct) {
        std::sort(pieces.begin(), pieces.end(), [](const FilePiece& a, const FilePiece& b) {
            return std::pair(a.file, a.offset) < std::pair(b.file, b.offset);
        });
        const FileReader* last = nullptr;
        for (const FilePiece& p : pieces) {
            const DirectFile* file = direct(*p.file);
            for (size_t done = 0; done < p.bytes;) {
                const uint64_t from = p.offset + done;
                const bool goes_on = p.file == last && from >= requests_.back().first &&
                                     from <= requests_.back().end() + kSector &&
                                     from < requests_.back().first + kRequestBytes;
                if (!goes_on) requests_.push_back({file, from / kSector * kSector, 0, {}});
                last = p.file;
                Request& r = requests_.back();
                const size_t at = from - r.first, count = std::min(p.bytes - done, kRequestBytes - at);
                r.copies.push_back({at, count, p.at + done});
                r.needed = std::max(r.needed, at + count);
                done += count;
            }
        }
    }
    size_t count() const { return requests_.size(); }
    // Bytes of whole sectors.
    size_t bytes() const {
        size_t sum = 0;
        for (const Request& r : requests_) sum += r.bytes();
        return sum;
    }
    // Runs request number i by way of `staging`, of kRequestBytes.
    void run(size_t i, char* staging, char* to) const {
        const Request& r = requests_[i];
        r.file->read(r.first, r.bytes(), r.needed, staging);
        for (const Copy& c : r.copies) std::memcpy(to + c.to, staging + c.from, c.bytes);
    }
    // Fails where a file was changed.
    void check() const {
        const DirectFile* last = nullptr;
        for (const Request& r : requests_)
            if (r.file != last) (last = r.file)->check_unchanged();
    }

  private:
    struct Copy {
        size_t from, bytes, to;
    };
    struct Request {
        const DirectFile* file;
        uint64_t first;
        size_t needed;  // bytes from there on
        std::vector<Copy> copies;
        size_t bytes() const { return (needed + kSector - 1) / kSector * kSector; }
        uint64_t end() const { return first + needed; }
    };
    std::vector<Request> requests_;
};

// Threads that read. One start() at a time, and a wait() for it.
class DiskReader {
  public:
    static constexpr size_t kStagingBytes = kDiskThreads * kRequestBytes;

    // `staging` has kStagingBytes, aligned to sectors, and stays.
    explicit DiskReader(char* staging) {
        sigset_t all, before;  // signals are the main thread's
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        for (int i = 0; i < kDiskThreads; i++)
            threads_.emplace_back([this, room = staging + i * kRequestBytes] { work(room); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    DiskReader(const DiskReader&) = delete;
    ~DiskReader() {
        {
            std::lock_guard lock(mutex_);
            ends_ = true;
            if (reads_) next_ = reads_->count();
        }
        wake_.notify_all();
        for (std::thread& t : threads_) t.join();
    }

    // Begins to read to `to`; reads and memory stay until wait().
    void start(const DiskReads& reads, char* to) {
        std::lock_guard lock(mutex_);
        reads_ = &reads, to_ = to;
        next_ = done_ = 0;
        wake_.notify_all();
    }
    // Waits until all is there. Fails with the first request that failed.
    void wait() {
        std::unique_lock lock(mutex_);
        if (!reads_) return;
        all_done_.wait(lock, [&] { return done_ == reads_->count(); });
        const DiskReads& reads = *std::exchange(reads_, nullptr);
        if (const auto error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
        reads.check();
    }

  private:
    void work(char* staging) {
        std::unique_lock lock(mutex_);
        while (true) {
            wake_.wait(lock, [&] { return ends_ || (reads_ && next_ < reads_->count()); });
            if (ends_) return;
            const size_t i = next_++;
            const DiskReads& reads = *reads_;
            char* const to = to_;
            lock.unlock();
            std::exception_ptr error;
            try {
                reads.run(i, staging, to);
            } catch (...) {
                error = std::current_exception();
            }
            lock.lock();
            if (error && !error_) error_ = error;
            if (++done_ == reads.count()) all_done_.notify_all();
        }
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_, all_done_;
    const DiskReads* reads_ = nullptr;
    char* to_ = nullptr;
    size_t next_ = 0, done_ = 0;  // requests that were begun, and that are done
    std::exception_ptr error_;
    bool ends_ = false;
};
