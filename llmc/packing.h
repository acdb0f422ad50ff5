// packing.h - which examples share a sequence: each goes, whole, where it leaves the least room.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

// Packs examples into sequences of `room` rows, one example after the other: best fit (Johnson 1974). Of
// sequences with equally little left it takes the first. dev/reference.py does the same.
class BestFit {
  public:
    // No example has fewer rows than `shortest`.
    BestFit(uint32_t room, uint32_t shortest) : room_(room), shortest_(shortest) {}

    // The number of the sequence of an example with that many rows, 1 to `room`.
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
    // About the most memory that it held: numbers in vectors that may be half empty.
    size_t held_bytes() const { return 2 * sizeof(uint32_t) * most_open_; }

  private:
    const uint32_t room_, shortest_;
    uint32_t sequences_ = 0;
    std::map<uint32_t, std::vector<uint32_t>> open_;  // by the rows that are left: a heap, the first in front
    size_t open_count_ = 0, most_open_ = 0;
};
