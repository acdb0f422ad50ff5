// ranks_slices.h - how a unit's elements (model.h) are divided among the ranks of a run on several devices:
// rank r has the r-th slice. And how the ranks are divided among machines: those that follow one another are
// on one. The norm of the gradient is the sum of partial sums (global_norm.cuh), each over a stretch of
// elements. Slices are cut between stretches, so the partial sums are the same for any number of ranks; and a
// stretch consists of whole blocks of 8-bit optimizer state.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "llmc/ranks.h"
#include "llmc/state_formats.h"

// The most partial sums of the global norm: of models up to 2^28 elements, and of larger ones.
constexpr int kNormBlocks = 1024, kMostNormBlocks = 65536;

// The elements of a stretch in a model of n elements. Up to 2^28 elements there are at most 1024 stretches.
// Larger models have up to 65536, so that a block has enough of them to be divided nearly equally among
// ranks.
inline int64_t norm_stretch(int64_t n) {
    constexpr int64_t kLongest = int64_t{1} << 18;
    const auto cut_into = [&](int64_t count) {
        const int64_t all = int64_t{kQuantizedBlock} * count;
        return (std::max<int64_t>(n, 1) + all - 1) / all * kQuantizedBlock;
    };
    return std::min(cut_into(kNormBlocks), std::max(kLongest, cut_into(kMostNormBlocks)));
}

// Elements [first, first + count) of a unit.
struct Slice {
    int64_t first = 0, count = 0;
};

struct Slices {
    int rank = 0, ranks = 1;
    int64_t stretch = 1;   // elements
    int on_a_machine = 0;  // ranks on each machine; 0: all

    int machines() const { return on_a_machine > 0 ? ranks / on_a_machine : 1; }
    int ranks_of_a_machine() const { return ranks / machines(); }
    int machine_of(int number) const { return number / ranks_of_a_machine(); }
    // The rank on a machine that has the same place there as rank `number` has on its own.
    int same_place_on(int machine, int number) const {
        return machine * ranks_of_a_machine() + number % ranks_of_a_machine();
    }
    // The length of a slice of a unit of `size` elements. The last slices may be shorter, or empty.
    int64_t length(int64_t size) const {
        const int64_t stretches = (size + stretch - 1) / stretch;
        return (stretches + ranks - 1) / ranks * stretch;
    }
    Slice of(int64_t size, int number) const {
        const int64_t first = std::min(size, number * length(size));
        return {first, std::min(size - first, length(size))};
    }
    Slice own(int64_t size) const { return ranks == 1 ? Slice{0, size} : of(size, rank); }
    // For the rounds of an exchange: ranks that are alone on their machines send each other everything
    // directly, as if they were on one.
    Slices for_rounds() const {
        Slices s = *this;
        if (ranks_of_a_machine() == 1) s.on_a_machine = 0;
        return s;
    }
    // These slices in bytes instead of elements, where an element has `width` bytes.
    Slices in_bytes(size_t width) const {
        return {rank, ranks, stretch * static_cast<int64_t>(width), on_a_machine};
    }
};

// How a run's ranks divide what has this stretch. Ranks that are not grouped by machine exchange as if
// each had a machine of its own.
inline Slices slices_of(const Rank& rank, int64_t stretch = 1) {
    return {rank.number, rank.count, stretch, rank.is_grouped_by_machine ? rank.on_this_machine : 1};
}

// Bytes that are divided among the ranks, such as a block's weights: how many there are in all, where the
// slices are, and the address of this rank's slice, or null before it is allocated.
struct DividedBytes {
    int64_t all;
    Slices slices;
    char* own;
    size_t own_bytes() const { return static_cast<size_t>(slices.own(all).count); }
};
