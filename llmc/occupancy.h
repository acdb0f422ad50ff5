// occupancy.h - which bytes of a room are taken at which times, and the gaps between them.
//
// Stays, each a range of bytes for a stretch of time, are kept in a binary tree over time. A node is a
// stretch; it knows the union of the bytes of all stays that touch it, and of those that fill it but not its
// parent. A leaf, a stretch of a few times, also lists the stays that touch but do not fill it. What is taken
// at some time of a stretch is then known from a few nodes; and where stays lie side by side, as those of a
// good placement do, a union is a few ranges. So looking for a gap does not pass over all stays.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

class Occupancy {
  public:
    // For times from 0 up to, but not including, `times`.
    explicit Occupancy(int times)
        : leaves_(std::bit_ceil(static_cast<size_t>(times / kLeafTimes + 1))),
          touching_(2 * leaves_),
          filling_(2 * leaves_),
          passing_(leaves_) {}

    // Where `bytes` that are free at all times of [from, to) begin: in the smallest gap that holds them, of
    // equal gaps in the lowest; beyond all that is taken then if none does.
    size_t find(int from, int to, size_t bytes) {
        taken_.clear();
        const auto append = [&](const Ranges& r) { taken_.insert(taken_.end(), r.begin(), r.end()); };
        for_each_node(from, to, [&](size_t node, bool whole) {
            append(whole ? touching_[node] : filling_[node]);
            if (whole || node < leaves_) return;
            for (const Stay& s : passing_[node - leaves_])
                if (s.from < to && from < s.to) taken_.push_back(s.range);
        });
        std::sort(taken_.begin(), taken_.end(), [](Range a, Range b) { return a.begin < b.begin; });
        size_t end = 0, best = 0, smallest = SIZE_MAX;
        for (const Range& r : taken_) {
            if (r.begin >= end + bytes && r.begin - end < smallest) smallest = r.begin - end, best = end;
            end = std::max(end, r.end);
        }
        return smallest != SIZE_MAX ? best : end;
    }

    // Takes `bytes` from `offset` on, at all times of [from, to).
    void add(int from, int to, size_t offset, size_t bytes) {
        if (bytes == 0) return;
        const Range range{offset, offset + bytes};
        for_each_node(from, to, [&](size_t node, bool whole) {
            join(touching_[node], range);
            if (whole)
                join(filling_[node], range);
            else if (node >= leaves_)
                passing_[node - leaves_].push_back({from, to, range});
        });
    }

  private:
    static constexpr int kLeafTimes = 32;
    struct Range {
        size_t begin, end;
    };
    using Ranges = std::vector<Range>;  // apart from each other, by rising offset
    struct Stay {
        int from, to;
        Range range;
    };

    // Calls each(node, whole) for the largest nodes within [from, to), whole, and for all others that touch
    // it.
    template <class Each>
    void for_each_node(int from, int to, Each&& each) {
        visit(1, 0, static_cast<int>(leaves_) * kLeafTimes, from, to, each);
    }
    template <class Each>
    void visit(size_t node, int begin, int end, int from, int to, Each& each) {
        if (to <= begin || end <= from) return;
        const bool whole = from <= begin && end <= to;
        each(node, whole);
        if (whole || node >= leaves_) return;
        const int middle = begin + (end - begin) / 2;
        visit(2 * node, begin, middle, from, to, each);
        visit(2 * node + 1, middle, end, from, to, each);
    }

    // Adds a range to a union.
    static void join(Ranges& ranges, Range r) {
        const auto first = std::lower_bound(ranges.begin(), ranges.end(), r.begin,
                                            [](const Range& a, size_t begin) { return a.end < begin; });
        auto last = first;
        for (; last != ranges.end() && last->begin <= r.end; ++last)
            r = {std::min(r.begin, last->begin), std::max(r.end, last->end)};
        if (first == last) {
            ranges.insert(first, r);
        } else {
            *first = r;
            ranges.erase(first + 1, last);
        }
    }

    size_t leaves_;                           // a power of two
    std::vector<Ranges> touching_, filling_;  // by node: 1 is the root, 2 n and 2 n + 1 are the halves of n
    std::vector<std::vector<Stay>> passing_;  // by leaf: that touch it and do not fill it
    Ranges taken_;                            // find()'s, kept for its room
};
