// simt_vector.h - what a lane has of a row: a vector of elements, which it loads, computes on and stores at a
// time; and how a warp shares a row among its lanes.
//
// On the GPU a full vector is 16 bytes, and its address must be a multiple of that; on the CPU it is as wide
// as the build's registers, at any address. Rows whose length is no multiple of a full vector use vectors of
// one element: launchers choose, with vector_fits().
#pragma once

#include <numeric>
#include <type_traits>

#include "llmc/simt.h"

// Elements of T in a full vector.
template <class T>
constexpr int kVectorSize = kVectorBytes / static_cast<int>(sizeof(T));

template <class T>
constexpr bool vector_fits(int64_t columns) {
    return columns % kVectorSize<T> == 0;
}

template <class T, int N = kVectorSize<T>>
struct alignas(N * sizeof(T)) Packed {
    static constexpr int size = N;
    T v[N];
    SIMT_DEVICE float operator[](int i) const { return to_float(v[i]); }
};

template <int N, class T>
SIMT_DEVICE Packed<T, N> load(const T* p) {
    Packed<T, N> r;
#if defined(SIMT_GPU)
    constexpr int bytes = N * static_cast<int>(sizeof(T));
    if constexpr (bytes % 16 == 0) {
#pragma unroll
        for (int i = 0; i < bytes / 16; i++)
            reinterpret_cast<int4*>(&r)[i] = reinterpret_cast<const int4*>(p)[i];
    } else if constexpr (bytes == 4) {
        reinterpret_cast<int&>(r) = *reinterpret_cast<const int*>(p);
    } else if constexpr (bytes == 8) {
        reinterpret_cast<int2&>(r) = *reinterpret_cast<const int2*>(p);
    } else {
        static_assert(N == 1);
        r.v[0] = *p;
    }
#else
    memcpy(&r, p, sizeof r);
#endif
    return r;
}

// load() for a thread that reads far more than a page from beginning to end: a CPU does not prefetch beyond a
// page by itself.
template <int N, class T>
SIMT_DEVICE Packed<T, N> load_ahead(const T* p) {
#if !defined(SIMT_GPU)
    constexpr int kPage = 4096;
    if constexpr (kFastCpu) __builtin_prefetch(reinterpret_cast<const char*>(p) + kPage);
#endif
    return load<N>(p);
}

template <class T, int N>
SIMT_DEVICE void store(T* p, const Packed<T, N>& x) {
#if defined(SIMT_GPU)
    constexpr int bytes = N * static_cast<int>(sizeof(T));
    if constexpr (bytes % 16 == 0) {
#pragma unroll
        for (int i = 0; i < bytes / 16; i++)
            reinterpret_cast<int4*>(p)[i] = reinterpret_cast<const int4*>(&x)[i];
    } else if constexpr (bytes == 4) {
        *reinterpret_cast<int*>(p) = reinterpret_cast<const int&>(x);
    } else if constexpr (bytes == 8) {
        *reinterpret_cast<int2*>(p) = reinterpret_cast<const int2&>(x);
    } else {
        static_assert(N == 1);
        *p = x.v[0];
    }
#else
    memcpy(p, &x, sizeof x);
#endif
}

// Rounds N floats to T.
template <class T, int N>
SIMT_DEVICE Packed<T, N> rounded(const float (&x)[N]) {
    Packed<T, N> r;
    from_floats(r.v, x);
    return r;
}
template <class T, int N>
SIMT_DEVICE void store(T* p, const float (&x)[N]) {
    store(p, rounded<T>(x));
}

// Loads or stores N elements of an array of n, from index i on. Elements beyond its end are loaded as zeros
// and not stored.
template <int N, class T>
SIMT_DEVICE Packed<T, N> load_within(const T* p, int64_t i, int64_t n) {
    if (i + N <= n) return load<N>(p + i);
    Packed<T, N> r;
    for (int k = 0; k < N; k++) r.v[k] = k < N - 1 && i + k < n ? p[i + k] : T{};  // the last one never is
    return r;
}
template <class T, int N>
SIMT_DEVICE void store_within(T* p, int64_t i, int64_t n, const Packed<T, N>& x) {
    if (i + N <= n) return store(p + i, x);
    for (int k = 0; k < N - 1; k++)
        if (i + k < n) p[i + k] = x.v[k];
}

// The largest of N floats, N a power of two, by halves: the CPU's compiler does not vectorize a chain of
// maxima.
template <int N>
SIMT_DEVICE float largest_of(const float (&x)[N]) {
    float m[N];
    for (int k = 0; k < N; k++) m[k] = x[k];
    for (int half = N / 2; half > 0; half /= 2)
        for (int k = 0; k < half; k++) m[k] = m[k + half] > m[k] ? m[k + half] : m[k];
    return m[0];
}

// The sum of N floats, N a power of two, by halves.
template <int N>
SIMT_DEVICE float sum_of(const float (&x)[N]) {
    float m[N];
    for (int k = 0; k < N; k++) m[k] = x[k];
    for (int half = N / 2; half > 0; half /= 2)
        for (int k = 0; k < half; k++) m[k] += m[k + half];
    return m[0];
}

// An accumulator for a vector's elements: N floats. A kernel may keep several of them in registers for a row.
template <int N>
struct Accumulator {
    float v[N];
    SIMT_DEVICE Accumulator(float x = 0.f) {
        for (int i = 0; i < N; i++) v[i] = x;
    }
    SIMT_DEVICE float& operator[](int i) { return v[i]; }
    SIMT_DEVICE float sum() const {
        float s = 0.f;
        for (int i = 0; i < N; i++) s += v[i];
        return s;
    }
};

// Calls add(part(row)) for the rows first, first + step, ... before `end`, in order. On a GPU the parts of
// four rows are loaded before they are added, as the loads of one row at a time would not keep the memory
// busy.
template <class Part, class Add>
SIMT_DEVICE void for_each_row(int first, int end, int step, Part part, Add add) {
    int row = first;
    if constexpr (!kFastCpu)
        for (; row + 3 * step < end; row += 4 * step) {
            decltype(part(row)) parts[4];
#pragma unroll
            for (int i = 0; i < 4; i++) parts[i] = part(row + i * step);
#pragma unroll
            for (int i = 0; i < 4; i++) add(parts[i]);
        }
#pragma unroll 1  // at most three rows are left
    for (; row < end; row += step) add(part(row));
}

// In elementwise kernels a thread does kElementwiseRun vectors; neighbouring threads have neighbouring
// vectors.
constexpr int kElementwiseRun = kFastCpu ? 128 : 4;

template <class T>
unsigned elementwise_blocks(int64_t n) {
    return static_cast<unsigned>(ceil_div(n, int64_t{kVectorSize<T>} * kBlockThreads * kElementwiseRun));
}

// Whether full vectors may be loaded from these arrays and stored to them. A view that begins at a later row
// of a tensor is not aligned if a row is not a whole number of vectors. A CPU loads vectors from anywhere.
template <class... T>
SIMT_DEVICE bool are_aligned(const T*... arrays) {
    return kFastCpu || ((reinterpret_cast<uintptr_t>(arrays) % kVectorBytes == 0) && ...);
}

// Calls f(i, count) for this thread's share of n elements. `count` is an integral constant: a full vector or
// 1, which it is in the tail, and everywhere if the arrays that f accesses are not all aligned.
template <class T, class F>
SIMT_DEVICE void for_each_vector(int64_t n, bool aligned, F f) {
    constexpr int N = kVectorSize<T>;
    const int64_t first = int64_t{blockIdx.x} * blockDim.x * kElementwiseRun + threadIdx.x;
    for (int j = 0; j < kElementwiseRun; j++) {
        const int64_t i = (first + int64_t{j} * blockDim.x) * N;
        if (aligned && i + N <= n)
            f(i, std::integral_constant<int, N>());
        else
#pragma unroll 1
            for (int64_t k = i; k < n && k < i + N; k++) f(k, std::integral_constant<int, 1>());
    }
}

// Calls f with the vector size that rows of C elements allow, as an integral constant.
template <class T, class F>
void with_vector_size(int64_t C, F&& f) {
    if (vector_fits<T>(C))
        f(std::integral_constant<int, kVectorSize<T>>());
    else
        f(std::integral_constant<int, 1>());
}

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
// integral constants. The rows begin `apart` elements apart, or C if that is 0.
template <class T, class F>
void with_lane_rows(int64_t C, F&& f, int64_t apart = 0) {
    with_vector_size<T>(std::gcd(C, apart), [&]<int N>(std::integral_constant<int, N> size) {
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

#if !defined(SIMT_GPU) && !defined(LLMC_PLANNER)
// ---- sixteen floats at a time, on a CPU

#ifdef __AVX512F__
// g++ keeps such a vector in a register also if it is an element of an array.
using Vector16 = float __attribute__((vector_size(16 * sizeof(float))));

// Sixteen elements as floats. They write to a reference, because g++ warns of functions that return a vector
// of this size without AVX-512.
SIMT_DEVICE void load_floats(Vector16& x, const float* from) { __builtin_memcpy(&x, from, sizeof x); }
SIMT_DEVICE void load_floats(Vector16& x, const bf16* from) {
    using Halves = uint16_t __attribute__((vector_size(16 * sizeof(uint16_t))));
    using Bits = uint32_t __attribute__((vector_size(16 * sizeof(uint32_t))));
    Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    const Bits bits = __builtin_convertvector(halves, Bits) << 16;
    __builtin_memcpy(&x, &bits, sizeof x);
}

// The sums of several vectors' elements, each added in the order of sum_of(): first the elements that are 8
// apart, then those 4, 2 and 1 apart. Four vectors share these additions.
template <int kRows>
SIMT_DEVICE void sums_of_vectors(float (&sums)[kRows], const Vector16 (&x)[kRows]) {
    constexpr int kFours = (kRows + 3) / 4;
#pragma GCC unroll 2
    for (int four = 0; four < kFours; four++) {
        const int r = 4 * four;
        const Vector16 none = {};
        const Vector16 &a = x[r], &b = r + 1 < kRows ? x[r + 1] : none, &c = r + 2 < kRows ? x[r + 2] : none,
                       &d = r + 3 < kRows ? x[r + 3] : none;
        const Vector16 ab =
            __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
            __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        const Vector16 cd =
            __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
            __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        const Vector16 all =
            __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
            __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
        const Vector16 pairs =
            all + __builtin_shufflevector(all, all, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
        const Vector16 sum = pairs + __builtin_shufflevector(pairs, pairs, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11,
                                                             10, 13, 12, 15, 14);
        for (int i = 0; i < 4 && r + i < kRows; i++) sums[r + i] = sum[4 * i];
    }
}
#else
// Two vectors of eight: g++ would keep a vector that is wider than the CPU's registers in memory.
using Vector8 = float __attribute__((vector_size(8 * sizeof(float))));
struct Vector16 {
    Vector8 low = {}, high = {};

    SIMT_INLINE friend Vector16 operator*(const Vector16& a, const Vector16& b) {
        return {a.low * b.low, a.high * b.high};
    }
    SIMT_INLINE Vector16& operator+=(const Vector16& b) {
        low += b.low, high += b.high;
        return *this;
    }
};

// Sixteen elements as floats, loaded and widened in registers: memcpy() may go through memory in smaller
// parts, for which each load would then wait.
SIMT_DEVICE void load_floats(Vector16& x, const float* from) {
    using Unaligned = float __attribute__((vector_size(sizeof(Vector8)), aligned(alignof(float)), may_alias));
    x.low = *reinterpret_cast<const Unaligned*>(from);
    x.high = *reinterpret_cast<const Unaligned*>(from + 8);
}
SIMT_DEVICE void load_floats(Vector16& x, const bf16* from) {
    using Halves =
        uint16_t __attribute__((vector_size(8 * sizeof(uint16_t)), aligned(alignof(bf16)), may_alias));
    using Bits = uint32_t __attribute__((vector_size(8 * sizeof(uint32_t))));
    const auto* const halves = reinterpret_cast<const Halves*>(from);
    x.low = reinterpret_cast<Vector8>(__builtin_convertvector(halves[0], Bits) << 16);
    x.high = reinterpret_cast<Vector8>(__builtin_convertvector(halves[1], Bits) << 16);
}

// The sums of several vectors' elements, each added in the order of sum_of().
template <int kRows>
SIMT_DEVICE void sums_of_vectors(float (&sums)[kRows], const Vector16 (&x)[kRows]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
        float elements[16];
        __builtin_memcpy(elements, &x[r], sizeof elements);
        sums[r] = sum_of(elements);
    }
}
#endif
#endif
