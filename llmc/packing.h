// packing.h - decides which examples share a sequence: each goes whole into the fullest sequence that it
// fits.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

// Packs examples into sequences of `room` rows, one example after the other, by best fit (Johnson 1974). Of
// several sequences with equally few rows left, it takes the first. dev/reference.py does the same.
class BestFit {
  public:
    // Every example has at least `shortest` rows.
    BestFit(uint32_t room, uint32_t shortest) : room_(room), shortest_(shortest) {}

    // Returns the number of the sequence in which an example of `rows` rows (1 to `room`) is placed.
    uint32_t place(uint32_t rows) {
        assert(shortest_ <= rows && rows <= room_);
        uint32_t left = room_, sequence = sequences_;
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
    const uint32_t room_, shortest_;
    uint32_t sequences_ = 0;
    std::map<uint32_t, std::vector<uint32_t>> open_;  // by rows left: a min-heap of sequences
    size_t open_count_ = 0, most_open_ = 0;
};
