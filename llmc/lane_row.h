// lane_row.h - a row that a warp goes over more than once, kept in the registers of its lanes where it fits.
#pragma once

#include "llmc/columns.cuh"
#include "llmc/packed.h"

// The most vectors of a row that a lane keeps: rows of 8 KiB, of 4096 elements in bf16. A CPU's core has them
// in its cache.
constexpr int kMostKept = kFastCpu ? 0 : 16;

// Calls f(v, c) for a lane's vectors of N elements of a row of C, in order: c is the first element of vector
// v. With kKept, of which there must be as many, v is known at compile time.
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

// A lane's part of a row of T: kept in kKept vectors, or with 0 read again from where it lies.
template <class T, int N, int kKept>
class LaneRow {
  public:
    // Of C elements: what is kept is loaded at once.
    SIMT_DEVICE LaneRow(const T* row, int C) : row_(row) {
        if constexpr (kKept > 0)
            for_each_lane_vector<N, kKept>(C, [&](int v, int c) SIMT_INLINE { keep(v, load<N>(row_ + c)); });
    }
    // By the numbers that for_each_lane_vector() gives.
    SIMT_DEVICE Packed<T, N> at(int v, int c) const {
        if constexpr (kKept == 0) return load<N>(row_ + c);
        Packed<T, N> x;
        memcpy(static_cast<void*>(&x), kept_[v], sizeof x);
        return x;
    }
    // Another row of as many elements takes its place, which is being stored: vector by vector, and then as a
    // whole.
    SIMT_DEVICE void replace(int v, const Packed<T, N>& x) {
        if constexpr (kKept > 0) keep(v, x);
    }
    SIMT_DEVICE void replaced_by(const T* row) { row_ = row; }
    // Between two passes: has the compiler keep these registers, and not what it has made of them in fp32.
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

// Calls f with a vector size that rows of C elements allow and how many of them a lane keeps, as integral
// constants.
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
