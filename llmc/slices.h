// slices.h - how a unit's elements (model.h) are divided among the ranks of a run on several devices: rank r
// has the r-th slice. The norm of the gradient is the sum of partial sums (global_norm.cuh), each over a
// stretch of elements. Slices are cut between stretches, so the partial sums are the same for any number of
// ranks; and a stretch consists of whole blocks of 8-bit optimizer state.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "llmc/state_formats.h"

constexpr int kNormBlocks = 1024;  // partial sums of the global norm

// Elements in a stretch when n elements are cut into kNormBlocks stretches, or fewer.
inline int64_t norm_stretch(int64_t n) {
    constexpr int64_t kAll = int64_t{kQuantizedBlock} * kNormBlocks;
    return (std::max<int64_t>(n, 1) + kAll - 1) / kAll * kQuantizedBlock;
}

// Elements [first, first + count) of a unit.
struct Slice {
    int64_t first = 0, count = 0;
};

struct Slices {
    int rank = 0, ranks = 1;
    int64_t stretch = 1;  // elements

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
    // These slices in bytes instead of elements, where an element has `width` bytes.
    Slices in_bytes(size_t width) const { return {rank, ranks, stretch * static_cast<int64_t>(width)}; }
};

// Bytes that are divided among the ranks, such as a block's weights: how many there are in all, where the
// slices are, and the address of this rank's slice, or null before it is allocated.
struct DividedBytes {
    int64_t all;
    Slices slices;
    char* own;
    size_t own_bytes() const { return static_cast<size_t>(slices.own(all).count); }
};
