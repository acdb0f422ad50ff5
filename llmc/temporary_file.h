// temporary_file.h - keeps a process's temporary data on disk in a file without a name, so that it is gone
// when the process ends, however it ends; and lists of records in such a file. Use it for data that grow with
// the input and would take memory that the plan does not count.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
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
    // Does the same after change(data) has changed the `bytes` bytes that were appended, in place.
    template <class Change>
    void finish_changed(size_t bytes, Change&& change) {
        if (!writes_.flush()) fail_to("write");
        if (bytes > 0) {
            void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.fd(), 0);
            if (data == MAP_FAILED) fail_to("read");
            change(data);
            munmap(data, bytes);
        }
        if (!writes_.sync()) fail_to("write");
    }
    // Bytes [first, first + bytes) as a file of their own, which messages call `path`.
    std::unique_ptr<const FileReader> part(const std::string& path, uint64_t first, size_t bytes) const {
        const int fd = fcntl(file_.fd(), F_DUPFD_CLOEXEC, 0);
        return std::make_unique<const FileReader>(path, fd, Pages::Dropped, first, bytes);
    }
    void read(uint64_t first, size_t bytes, void* out) const {
        const ssize_t got = read_at(file_.fd(), first, bytes, out);
        if (got < 0) fail_to("read");
        if (static_cast<size_t>(got) < bytes) bug("%s were read beyond their end", holds_);
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
        fail("%s: cannot %s %s there: %s; TMPDIR can name another folder", folder_, action, holds_,
             write_error(errno));
    }

    std::string holds_, folder_;
    OpenFile file_;
    PassingWrites writes_;
};

// ---- records in such a file
//
// Keeps records of one size in a temporary file, for lists that grow with the data and would take memory that
// the plan does not count.

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
    // Call one of these after the last append() and before the first read. The second sorts the records by
    // `<`; while it does, the system keeps in memory as much of the file as there is room for.
    void finish() { file_.finish(); }
    void finish_sorted() {
        file_.finish_changed(count_ * sizeof(Record), [&](void* data) {
            Record* const records = static_cast<Record*>(data);
            std::sort(records, records + count_);
        });
    }

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
