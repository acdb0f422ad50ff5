// lane_row.h - a row that a warp reads more than once, kept in the registers of its lanes if it fits.
#pragma once

#include "llmc/columns.cuh"
#include "llmc/packed.h"

// The most vectors of a row that a lane keeps: enough for rows of 8 KiB, 4096 elements in bf16. On a CPU the
// row stays in the core's cache instead.
constexpr int kMostKept = kFastCpu ? 0 : 16;

// Calls f(v, c) for each vector of N elements that a lane has of a row of C elements, in order; c is the
// vector's first element. With kKept, which must be at least the number of vectors, v is the vector's index
// and known at compile time; without, it is 0.
template <int N, int kKept, class F>
SIMT_DEVICE void for_each_lane_vector(int C, F f) {
    if constexpr (kKept > 0) {
#pragma unroll
        for (int v = 0; v < kKept; v++)
            if (const int c = (v * kLanes + lane()) * N; c < C) f(v, c);
    } else {
        for (int c = lane() * N; c < C; c += kLanes * N) f(0, c);
    }
}

// A lane's part of a row of T: in registers as kKept vectors, or with kKept = 0 read from memory again.
template <class T, int N, int kKept>
class LaneRow {
  public:
    // Loads what is kept of a row of C elements.
    SIMT_DEVICE LaneRow(const T* row, int C) : row_(row) {
        if constexpr (kKept > 0)
            for_each_lane_vector<N, kKept>(C, [&](int v, int c) SIMT_INLINE { keep(v, load<N>(row_ + c)); });
    }
    // Vector v, which begins at element c: the numbers that for_each_lane_vector() gives.
    SIMT_DEVICE Packed<T, N> at(int v, int c) const {
        if constexpr (kKept == 0) return load<N>(row_ + c);
        Packed<T, N> x;
        memcpy(static_cast<void*>(&x), kept_[v], sizeof x);
        return x;
    }
    // Replaces the row by another of the same length that is being stored: call replace() for each vector,
    // then replaced_by() once.
    SIMT_DEVICE void replace(int v, const Packed<T, N>& x) {
        if constexpr (kKept > 0) keep(v, x);
    }
    SIMT_DEVICE void replaced_by(const T* row) { row_ = row; }
    // Call it between two passes over the row. The compiler then keeps these registers, and not their values
    // in fp32.
    SIMT_DEVICE void next_pass() {
#if defined(SIMT_GPU)
#pragma unroll
        for (int v = 0; v < kKept; v++)
#pragma unroll
            for (int i = 0; i < kWords; i++) asm volatile("" : "+r"(kept_[v][i]));
#endif
    }

  private:
    static constexpr int kWords = kKept > 0 ? N* static_cast<int>(sizeof(T)) / 4 : 1;

    SIMT_DEVICE void keep(int v, const Packed<T, N>& x) {
        memcpy(kept_[v], static_cast<const void*>(&x), sizeof x);
    }

    const T* row_;
    unsigned kept_[kKept > 0 ? kKept : 1][kWords];
};

// Calls f with the vector size that rows of C elements allow and the number of vectors that a lane keeps, as
// integral constants.
template <class T, class F>
void with_lane_rows(int64_t C, F&& f) {
    with_vector_size<T>(C, [&]<int N>(std::integral_constant<int, N> size) {
        const int64_t vectors = ceil_div(C, int64_t{kLanes} * N);
        if constexpr (N > 1 && kMostKept > 0) {
            if (vectors <= 4) return f(size, std::integral_constant<int, 4>());
            if (vectors <= 8) return f(size, std::integral_constant<int, 8>());
            if (vectors <= kMostKept) return f(size, std::integral_constant<int, kMostKept>());
        }
        f(size, std::integral_constant<int, 0>());
    });
}
