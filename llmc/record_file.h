// record_file.h - keeps records of one size in a temporary file, for lists that grow with the data and would
// take memory that the plan does not count; and sorts such lists, also when they do not fit into memory.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <queue>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "llmc/temporary_file.h"

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
