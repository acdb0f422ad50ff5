// arena_occupancy.h - which bytes of an allocation are occupied at which times, and the gaps between them;
// with it arena.h places tensors.
//
// A stay is a range of bytes that is occupied for an interval of time. Stays are kept in a binary tree over
// time, whose nodes are intervals. A node has the union of the bytes of all stays that touch it, and of those
// that fill it but not its parent. A leaf, an interval of a few times, also lists the stays that touch it but
// do not fill it. So a few nodes tell which bytes are occupied at some time of an interval. If stays are side
// by side, as in a good placement, a union is a few ranges, and the search for a gap does not visit all
// stays.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

class Occupancy {
  public:
    // For the times 0 ... times - 1.
    explicit Occupancy(int times)
        : leaves_(std::bit_ceil(static_cast<size_t>(times / kLeafTimes + 1))),
          touching_(2 * leaves_),
          filling_(2 * leaves_),
          passing_(leaves_) {}

    // Finds `bytes` that are free at all times of [from, to). Returns the begin of the smallest gap that
    // fits, the lowest of equal gaps; or the end of all occupied bytes if no gap fits.
    size_t find(int from, int to, size_t bytes) {
        taken_.clear();
        const auto append = [&](const Ranges& r) { taken_.insert(taken_.end(), r.begin(), r.end()); };
        for_each_node(from, to, [&](size_t node, bool whole) {
            append(whole ? touching_[node] : filling_[node]);
            if (whole || node < leaves_) return;
            for (const Stay& s : passing_[node - leaves_])
                if (s.from < to && from < s.to) taken_.push_back(s.range);
        });
        std::ranges::sort(taken_, [](Range a, Range b) { return a.begin < b.begin; });
        size_t end = 0, best = 0, smallest = SIZE_MAX;
        for (const Range& r : taken_) {
            if (r.begin >= end + bytes && r.begin - end < smallest) smallest = r.begin - end, best = end;
            end = std::max(end, r.end);
        }
        return smallest != SIZE_MAX ? best : end;
    }

    // Occupies `bytes` from `offset` on, at all times of [from, to).
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
    using Ranges = std::vector<Range>;  // disjoint, by rising offset
    struct Stay {
        int from, to;
        Range range;
    };

    // Calls each(node, true) for the largest nodes within [from, to), and each(node, false) for the nodes
    // that it touches only in part.
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

    // Adds a range to a union of ranges.
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
    std::vector<std::vector<Stay>> passing_;  // by leaf: stays that touch it and do not fill it
    Ranges taken_;                            // find()'s, kept to reuse its memory
};
