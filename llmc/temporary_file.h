// temporary_file.h - keeps a process's temporary data on disk in a file without a name, so that it is gone
// when the process ends, however it ends; and lists of records in such a file. Use it for data that grow with
// the input and would take memory that the plan does not count.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <queue>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "llmc/file.h"

// ---- a file without a name

// The folder for such files: TMPDIR, else /var/tmp, because /tmp may be in memory.
inline std::string temporary_folder() {
    const char* chosen = std::getenv("TMPDIR");
    return chosen && *chosen ? chosen : "/var/tmp";
}

// Creates a file without a name in `folder`, opened with O_RDWR and `flags`. If that fails, returns a
// negative number and errno says why.
inline int make_nameless_file(const std::string& folder, int flags) {
    const int nameless = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
    if (nameless >= 0 || errno != EOPNOTSUPP) return nameless;
    // On such a file system the file has a name for a moment, which stays if the process is killed then.
    std::string path = folder + "/train-XXXXXX";
    const int fd = mkostemp(path.data(), O_CLOEXEC | flags);
    if (fd >= 0) unlink(path.c_str());
    return fd;
}

// Bytes of such files that this process uses as working memory now.
inline uint64_t working_file_bytes = 0;

class TemporaryFile {
  public:
    // `holds` names the data in messages. The constructor, append() and finish() fail in one line that names
    // the folder.
    explicit TemporaryFile(std::string holds)
        : holds_(std::move(holds)),
          folder_(temporary_folder()),
          file_(make()),
          writes_(file_.fd(), size_t{256} << 10) {}

    void append(const void* data, size_t bytes) {
        if (!writes_.write(data, bytes)) fail_to("write");
    }
    // Makes everything that was appended readable: it is on the disk, and not in the page cache.
    void finish() {
        if (!writes_.flush() || !writes_.sync()) fail_to("write");
    }
    // Bytes [first, first + bytes) as a file of their own, which messages call `path`.
    std::unique_ptr<const FileReader> part(const std::string& path, uint64_t first, size_t bytes) const {
        const int fd = fcntl(file_.fd(), F_DUPFD_CLOEXEC, 0);
        return std::make_unique<const FileReader>(path, fd, Pages::Dropped, first, bytes);
    }
    void read(uint64_t first, size_t bytes, void* out) const {
        const ssize_t got = read_at(file_.fd(), first, bytes, out);
        if (got < 0) fail_to("read");
        if (static_cast<size_t>(got) < bytes) bug("%s were read beyond their end", holds_.c_str());
    }

    // Drops the file's pages from the page cache.
    void drop_pages() const { drop_pages_of(file_.fd()); }

  private:
    int make() const {
        const int fd = make_nameless_file(folder_, 0);
        if (fd < 0) fail_to("keep");
        return fd;
    }
    [[noreturn]] void fail_to(const char* action) const {
        fail("%s: cannot %s %s there: %s; TMPDIR can name another folder", folder_.c_str(), action,
             holds_.c_str(), write_error(errno).c_str());
    }

    std::string holds_, folder_;
    OpenFile file_;
    PassingWrites writes_;
};

// ---- records in such a file
//
// Keeps records of one size in a temporary file, for lists that grow with the data and would take memory that
// the plan does not count; and sorts such lists, also when they do not fit into memory.

template <class Record>
class RecordFile {
    static_assert(std::is_trivially_copyable_v<Record>);

  public:
    // `holds` names the records in error messages.
    explicit RecordFile(std::string holds) : file_(std::move(holds)) {}

    void append(const Record& record) {
        file_.append(&record, sizeof record);
        count_++;
    }
    // Call this after the last append() and before the first read.
    void finish() { file_.finish(); }

    uint64_t count() const { return count_; }
    void read(uint64_t first, std::span<Record> out) const {
        assert(first + out.size() <= count_);
        file_.read(first * sizeof(Record), out.size_bytes(), out.data());
    }
    Record operator[](uint64_t number) const {
        Record record;
        read(number, {&record, 1});
        return record;
    }
    // Calls use(record) for `count` records from `first` on, in order.
    template <class Use>
    void for_each(uint64_t first, uint64_t count, Use&& use) const {
        std::vector<Record> some(std::min<uint64_t>(count, kSome));
        for (const uint64_t end = first + count; first < end; first += some.size()) {
            some.resize(std::min<uint64_t>(some.size(), end - first));
            read(first, some);
            for (const Record& record : some) use(record);
        }
    }
    void drop_pages() const { file_.drop_pages(); }

  private:
    static constexpr uint64_t kSome = 4096;

    TemporaryFile file_;
    uint64_t count_ = 0;
};

// Sorts records by `<`. Sorts as many as fit into a buffer at a time, writes these runs to a file and merges
// them.
template <class Record>
class RecordSorter {
  public:
    explicit RecordSorter(const std::string& holds) : runs_(holds) {}

    void add(const Record& record) {
        if (buffer_.size() == kBuffer) end_run();
        buffer_.push_back(record);
    }

    // Calls use(record) for each record, the smallest first.
    template <class Use>
    void for_each_sorted(Use&& use) {
        if (starts_.empty()) {  // no run was written: all records are in the buffer
            std::sort(buffer_.begin(), buffer_.end());
            for (const Record& record : buffer_) use(record);
            return;
        }
        end_run();
        std::vector<Record>().swap(buffer_);  // frees its memory too
        runs_.finish();
        merge(use);
    }

  private:
    static constexpr size_t kBuffer = 32 << 10;

    // A sorted run, which is read some records at a time.
    struct Run {
        uint64_t next, end;
        std::vector<Record> some;
        size_t at = 0;
    };

    void end_run() {
        std::sort(buffer_.begin(), buffer_.end());
        starts_.push_back(runs_.count());
        for (const Record& record : buffer_) runs_.append(record);
        buffer_.clear();
    }

    template <class Use>
    void merge(Use&& use) const {
        const size_t at_a_time = std::clamp<size_t>(kBuffer / starts_.size(), 8, 1024);
        std::vector<Run> runs;
        for (size_t i = 0; i < starts_.size(); i++)
            runs.push_back({starts_[i], i + 1 < starts_.size() ? starts_[i + 1] : runs_.count(), {}});
        const auto later = [&](size_t a, size_t b) {
            return runs[b].some[runs[b].at] < runs[a].some[runs[a].at];
        };
        std::priority_queue<size_t, std::vector<size_t>, decltype(later)> next(later);
        const auto enter = [&](size_t number) {
            Run& run = runs[number];
            if (run.at == run.some.size()) {
                run.some.resize(std::min<uint64_t>(at_a_time, run.end - run.next));
                runs_.read(run.next, run.some);
                run.next += run.some.size();
                run.at = 0;
            }
            if (!run.some.empty()) next.push(number);
        };
        for (size_t number = 0; number < runs.size(); number++) enter(number);
        while (!next.empty()) {
            const size_t number = next.top();
            next.pop();
            use(std::as_const(runs[number].some[runs[number].at]));
            runs[number].at++;
            enter(number);
        }
    }

    RecordFile<Record> runs_;
    std::vector<uint64_t> starts_;  // where each run starts in the file
    std::vector<Record> buffer_;
};
