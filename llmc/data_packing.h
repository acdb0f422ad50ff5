// data_packing.h - packs training examples into sequences, so that little of a sequence is padding: decides
// which examples share a sequence, and keeps the list of them on disk.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "llmc/temporary_file.h"

// Packs examples into sequences of `space` rows, one example after the other, by best fit (Johnson 1974). Of
// several sequences with equally few rows left, it takes the first. dev/reference.py does the same.
class BestFit {
  public:
    // Every example has at least `shortest` rows.
    BestFit(uint32_t space, uint32_t shortest) : buffer_(space), shortest_(shortest) {}

    // Returns the number of the sequence in which an example of `rows` rows (1 to `space`) is placed.
    uint32_t place(uint32_t rows) {
        assert(shortest_ <= rows && rows <= buffer_);
        uint32_t left = buffer_, sequence = sequences_;
        if (const auto best = open_.lower_bound(rows); best != open_.end()) {
            left = best->first;
            sequence = best->second.front();
            std::pop_heap(best->second.begin(), best->second.end(), std::greater<>());
            best->second.pop_back();
            if (best->second.empty()) open_.erase(best);
            open_count_--;
        } else {
            sequences_++;
        }
        left -= rows;
        if (left < shortest_) return sequence;
        std::vector<uint32_t>& others = open_[left];
        others.push_back(sequence);
        std::push_heap(others.begin(), others.end(), std::greater<>());
        most_open_ = std::max(most_open_, ++open_count_);
        return sequence;
    }

    uint32_t sequences() const { return sequences_; }
    // Estimates the most memory that it took; its vectors may be half empty.
    size_t held_bytes() const { return 2 * sizeof(uint32_t) * most_open_; }

  private:
    const uint32_t buffer_, shortest_;
    uint32_t sequences_ = 0;
    std::map<uint32_t, std::vector<uint32_t>> open_;  // by rows left: a min-heap of sequences
    size_t open_count_ = 0, most_open_ = 0;
};

// An example, or a part of a long text: the place of its first token among all tokens of the data's files,
// the number of its tokens, which fit into a sequence, and how many of them have a loss.
struct Example {
    uint64_t begin;
    uint32_t count, with_loss;
};

// The examples, packed into sequences. The list of them is kept on disk, because there may be more than fit
// in memory.
class PackedExamples {
  public:
    // Packs the examples that for_each(use) passes to use(), in their order, into sequences of `seq_len`
    // rows; with `apart`, each into a sequence of its own. An example of n tokens has n - 1 rows: at least
    // `shortest`, at most `seq_len`.
    template <class ForEach>
    PackedExamples(const std::string& holds, uint32_t seq_len, uint32_t shortest, bool apart,
                   ForEach&& for_each)
        : entries_(holds), sequences_(holds) {
        BestFit fit(seq_len, shortest);
        double rows = 0, squares = 0;
        for_each([&](const Example& e) {
            const double n = e.count - 1;
            rows += n;
            squares += n * n;
            entries_.append({apart ? entries_.count() : fit.place(e.count - 1), e});
        });
        entries_.finish_sorted();
        Sequence last{};
        uint64_t number = 0;
        entries_.for_each(0, entries_.count(), [&](const Placed& placed) {
            if (placed.sequence != number) {
                sequences_.append(last);
                number = placed.sequence;
                last.with_loss = 0;
            }
            last.end++;
            last.with_loss += placed.example.with_loss;
            with_loss_ += placed.example.with_loss;
        });
        sequences_.append(last);
        sequences_.finish();
        packing_bytes_ = fit.held_bytes();
        const double space = static_cast<double>(sequences_.count()) * seq_len;
        padding_ = 1 - rows / space;
        attended_ = squares / space;
    }

    uint64_t sequences() const { return sequences_.count(); }
    // The examples of a sequence, in the order of the data.
    std::vector<Example> of_sequence(uint64_t number) const {
        const uint64_t begin = number > 0 ? sequences_[number - 1].end : 0;
        std::vector<Example> all;
        entries_.for_each(begin, sequences_[number].end - begin,
                          [&](const Placed& placed) { all.push_back(placed.example); });
        return all;
    }
    // How many tokens have a loss, in one sequence and in all.
    uint64_t with_loss(uint64_t number) const { return sequences_[number].with_loss; }
    uint64_t with_loss() const { return with_loss_; }
    // padding: the share of rows that hold no example. attended: the rows of a row's example, averaged over
    // all rows.
    double padding() const { return padding_; }
    double attended() const { return attended_; }
    // Estimates the most memory that packing took, without buffers of fixed size.
    size_t packing_bytes() const { return packing_bytes_; }

    void drop_pages() const {
        entries_.drop_pages();
        sequences_.drop_pages();
    }

  private:
    struct Placed {
        uint64_t sequence;
        Example example;
        bool operator<(const Placed& other) const {
            return sequence != other.sequence ? sequence < other.sequence
                                              : example.begin < other.example.begin;
        }
    };
    struct Sequence {
        uint64_t end, with_loss;  // the index in entries_ at which the sequence ends
    };

    RecordFile<Placed> entries_;  // the examples of one sequence after the other
    RecordFile<Sequence> sequences_;
    uint64_t with_loss_ = 0;
    double padding_ = 0, attended_ = 0;
    size_t packing_bytes_ = 0;
};
