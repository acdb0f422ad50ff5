// simt_vector.h - a vector of elements: what one lane loads, computes on and stores at a time.
//
// On the GPU a full vector is 16 bytes, and its address must be a multiple of that; on the CPU it is as wide
// as the build's registers, at any address. Rows whose length is no multiple of a full vector use vectors of
// one element: launchers choose, with vector_fits().
#pragma once

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

// Calls f(i, count) for this thread's share of n elements. `count` is an integral constant: a full vector or,
// in the tail, 1. The arrays must be aligned to a full vector.
template <class T, class F>
SIMT_DEVICE void for_each_vector(int64_t n, F f) {
    constexpr int N = kVectorSize<T>;
    const int64_t first = int64_t{blockIdx.x} * blockDim.x * kElementwiseRun + threadIdx.x;
    for (int j = 0; j < kElementwiseRun; j++) {
        const int64_t i = (first + int64_t{j} * blockDim.x) * N;
        if (i + N <= n)
            f(i, std::integral_constant<int, N>());
        else
#pragma unroll 1
            for (int64_t k = i; k < n; k++) f(k, std::integral_constant<int, 1>());
    }
}
