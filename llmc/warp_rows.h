// warp_rows.h - how a warp shares a row among its lanes: kept in their registers, if it is read more than
// once, or as several heads side by side. Kernels of norms and attention use it.
#pragma once

#include "llmc/columns.cuh"
#include "llmc/simt.h"
#include "llmc/simt_vector.h"

// ---- rows kept in registers
//
// A row that a warp reads more than once, kept in the registers of its lanes if it fits.

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

// ---- heads side by side
//
// Divides the lanes of a warp among the heads of a row: as many heads side by side as fit.

// Each group of `lanes` neighbouring lanes, a power of two, has one head; the warp does `heads` heads at a
// time.
struct HeadLanes {
    int lanes, heads;
    int head, first;  // of this lane: which of those heads, and its first element in it
    template <int N>
    static SIMT_HOST_DEVICE int lanes_for(int head_size) {
        int lanes = 1;
        while (lanes < kLanes && lanes * N < head_size) lanes *= 2;
        return lanes;
    }
    template <int N>
    static SIMT_DEVICE HeadLanes of(int head_size) {
        const int lanes = lanes_for<N>(head_size);
        return {lanes, kLanes / lanes, lane() / lanes, lane() % lanes * N};
    }
    // The sum of v over the lanes that share a head; every lane of the warp must call it.
    SIMT_DEVICE float sum(float v) const {
        for (int m = lanes / 2; m > 0; m /= 2) v += __shfl_xor_sync(~0u, v, m);
        return v;
    }
};
