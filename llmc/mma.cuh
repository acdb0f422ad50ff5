// mma.cuh - products of small tiles by one warp with the tensor cores' m16n8k16, and loads of the operands.
//
// D (16 x 8) += A (16 x 16) B (16 x 8), in float. Lane 4 g + t owns pairs of neighbours, which begin at
// (row, column) (PTX ISA, mma.m16n8k16):
//
//   A  r[0] (g, 2 t)   r[1] (g + 8, 2 t)   r[2] (g, 2 t + 8)   r[3] (g + 8, 2 t + 8)   along k
//   B  r[0] (2 t, g)   r[1] (2 t + 8, g)                                               along k
//   D  d[0], d[1] (g, 2 t)   d[2], d[3] (g + 8, 2 t)                                   along n
//
// bf16 runs on the tensor cores. float has the same ownership and multiplies exactly, by shuffles: it is for
// finding errors, not for speed. In the faithful CPU build the last lane of a warp to arrive computes for the
// whole warp.
#pragma once

#include "llmc/simt_vector.h"

// Arrays that must stay in registers need their loops unrolled; g++ does not know the pragma.
#if defined(SIMT_GPU)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL
#endif

// A pair of neighbours, the first in the lower half.
template <class T>
struct PairOf;
template <>
struct PairOf<float> {
    struct type {
        float x, y;
    };
};
template <>
struct PairOf<bf16> {
    using type = uint32_t;
};
template <class T>
using Pair = typename PairOf<T>::type;

template <class T>
SIMT_DEVICE Pair<T> make_pair_of(float x, float y) {
    if constexpr (std::is_same_v<T, float>) {
        return {x, y};
    } else {
#if defined(SIMT_GPU)
        const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
#else
        const Packed<T, 2> both{{from_float<T>(x), from_float<T>(y)}};
#endif
        Pair<T> bits;
        memcpy(&bits, &both, sizeof bits);
        return bits;
    }
}
template <class T>
SIMT_DEVICE Pair<T> load_pair(const T* p) {
#if defined(SIMT_GPU)
    return *reinterpret_cast<const Pair<T>*>(p);
#else
    Pair<T> both;
    memcpy(&both, p, sizeof both);
    return both;
#endif
}
template <class T>
SIMT_DEVICE void store_pair(T* p, Pair<T> both) {
#if defined(SIMT_GPU)
    *reinterpret_cast<Pair<T>*>(p) = both;
#else
    memcpy(p, &both, sizeof both);
#endif
}

template <class T>
struct FragmentA {
    Pair<T> r[4];
};
template <class T>
struct FragmentB {
    Pair<T> r[2];
};

// Columns 16 k .. 16 k + 15 of a product as the left operand of the next one, rounded to T. Lanes own the
// same elements of both, so nothing moves (FlashAttention-2).
template <class T>
SIMT_DEVICE FragmentA<T> accumulators_as_a(const float (&left)[4], const float (&right)[4]) {
    return {{make_pair_of<T>(left[0], left[1]), make_pair_of<T>(left[2], left[3]),
             make_pair_of<T>(right[0], right[1]), make_pair_of<T>(right[2], right[3])}};
}

// --- Loads from shared memory. `stride` is the distance between rows in elements; rows begin at multiples of
// 16 bytes, and 8 consecutive rows should fall into different banks.

#if defined(SIMT_GPU)
// Loads four 8 x 8 matrices of 16-bit elements; lanes 8 i .. 8 i + 7 pass the addresses of the rows of matrix
// i.
template <bool kTransposed>
SIMT_DEVICE void load_matrices(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, const bf16* row) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    if constexpr (kTransposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                     : "r"(address)
                     : "memory");
}
#endif

// Loads A (16 x 16), stored [m][k].
template <class T>
SIMT_DEVICE FragmentA<T> load_a(const T* tile, int stride) {
    FragmentA<T> a;
#if defined(SIMT_GPU)
    if constexpr (std::is_same_v<T, bf16>) {
        load_matrices<false>(a.r[0], a.r[1], a.r[2], a.r[3], tile + lane() % 16 * stride + lane() / 16 * 8);
        return a;
    }
#endif
    const T* p = tile + lane() / 4 * stride + lane() % 4 * 2;
    a.r[0] = load_pair(p);
    a.r[1] = load_pair(p + 8 * stride);
    a.r[2] = load_pair(p + 8);
    a.r[3] = load_pair(p + 8 * stride + 8);
    return a;
}

// Loads N neighbouring B (16 x 8), stored [n][k]: b[j] is rows 8 j .. 8 j + 7.
template <class T, int N>
SIMT_DEVICE void load_b(FragmentB<T> (&b)[N], const T* tile, int stride) {
    static_assert(N % 2 == 0);
#if defined(SIMT_GPU)
    if constexpr (std::is_same_v<T, bf16>) {
        const T* row = tile + (lane() % 8 + lane() / 16 * 8) * stride + lane() / 8 % 2 * 8;
        UNROLL for (int j = 0; j < N; j += 2)
            load_matrices<false>(b[j].r[0], b[j].r[1], b[j + 1].r[0], b[j + 1].r[1], row + 8 * j * stride);
        return;
    }
#endif
    const T* p = tile + lane() / 4 * stride + lane() % 4 * 2;
    UNROLL for (int j = 0; j < N; j++) {
        b[j].r[0] = load_pair(p + 8 * j * stride);
        b[j].r[1] = load_pair(p + 8 * j * stride + 8);
    }
}

// Loads N neighbouring B (16 x 8), stored [k][n]: b[j] is columns 8 j .. 8 j + 7.
template <class T, int N>
SIMT_DEVICE void load_b_transposed(FragmentB<T> (&b)[N], const T* tile, int stride) {
    static_assert(N % 2 == 0);
#if defined(SIMT_GPU)
    if constexpr (std::is_same_v<T, bf16>) {
        const T* row = tile + lane() % 16 * stride + lane() / 16 * 8;
        UNROLL for (int j = 0; j < N; j += 2)
            load_matrices<true>(b[j].r[0], b[j].r[1], b[j + 1].r[0], b[j + 1].r[1], row + 8 * j);
        return;
    }
#endif
    const T* p = tile + lane() % 4 * 2 * stride + lane() / 4;
    UNROLL for (int j = 0; j < 2 * N; j++) {
        const T* q = p + j % 2 * 8 * stride + j / 2 * 8;
        b[j / 2].r[j % 2] = make_pair_of<T>(to_float(q[0]), to_float(q[stride]));
    }
}

// Copies kBytes (4 or 16, aligned to that) to shared memory, or writes zeros if not `valid`. On a GPU the
// copy is asynchronous: a thread's copies are complete after it has called wait_for_copies().
template <int kBytes, class T>
SIMT_DEVICE void copy_to_shared(T* to, const T* from, bool valid) {
#if defined(SIMT_GPU)
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    const int bytes = valid ? kBytes : 0;  // the rest is filled with zeros
    if constexpr (kBytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(bytes)
                     : "memory");
#else
    if (valid)
        memcpy(to, from, kBytes);
    else
        memset(to, 0, kBytes);
#endif
}
SIMT_DEVICE void wait_for_copies() {
#if defined(SIMT_GPU)
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// --- The product: d[i][j] += a[i] b[j], by all lanes of a warp together.

#if defined(SIMT_GPU)
template <int M, int N>
SIMT_DEVICE void mma_tiles(float (&d)[M][N][4], const FragmentA<bf16> (&a)[M],
                           const FragmentB<bf16> (&b)[N]) {
    UNROLL for (int i = 0; i < M; i++) {
        const auto& x = a[i].r;
        UNROLL for (int j = 0; j < N; j++) {
            float(&c)[4] = d[i][j];
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(b[j].r[0]), "r"(b[j].r[1]));
        }
    }
}

// Adds the products of one k: that of the first or second element of pair `half` in lane `owner` of each
// quad.
template <int M, int N>
SIMT_DEVICE void add_outer_product(float (&d)[M][N][4], const FragmentA<float> (&a)[M],
                                   const FragmentB<float> (&b)[N], int half, int owner, bool second) {
    const int g = lane() / 4, t = lane() % 4;
    const auto from = [&](const Pair<float>& p, int quad) {
        return __shfl_sync(~0u, second ? p.y : p.x, 4 * quad + owner);
    };
    UNROLL for (int i = 0; i < M; i++) {
        const float upper = from(a[i].r[2 * half], g), lower = from(a[i].r[2 * half + 1], g);
        UNROLL for (int j = 0; j < N; j++) {
            const float left = from(b[j].r[half], 2 * t), right = from(b[j].r[half], 2 * t + 1);
            d[i][j][0] = fmaf(upper, left, d[i][j][0]);
            d[i][j][1] = fmaf(upper, right, d[i][j][1]);
            d[i][j][2] = fmaf(lower, left, d[i][j][2]);
            d[i][j][3] = fmaf(lower, right, d[i][j][3]);
        }
    }
}
template <int M, int N>
SIMT_DEVICE void mma_tiles(float (&d)[M][N][4], const FragmentA<float> (&a)[M],
                           const FragmentB<float> (&b)[N]) {
    UNROLL for (int half = 0; half < 2; half++) {
#pragma unroll 1
        for (int owner = 0; owner < 4; owner++) {
            add_outer_product(d, a, b, half, owner, false);
            add_outer_product(d, a, b, half, owner, true);
        }
    }
}

#elif defined(SIMT_FAITHFUL)
namespace simt {
// Pointers to what a lane brings: its registers, which stay in place on its stack while it waits.
template <class T>
struct MmaOperands {
    float* d;
    const FragmentA<T>* a;
    const FragmentB<T>* b;
};

// The two floats of a pair. The functions of the common source cannot be used here: they are instrumented for
// sanitizers, and this runs on behalf of the whole warp.
SIMT_RUNTIME inline void spread(Pair<float> p, float& x, float& y) { x = p.x, y = p.y; }
SIMT_RUNTIME inline void spread(Pair<bf16> p, float& x, float& y) {
    x = __builtin_bit_cast(float, p << 16);
    y = __builtin_bit_cast(float, p & 0xffff0000u);
}

// Gathers B once, then each 16 x 16 A and its rows of D as plain matrices; multiplies them and scatters D.
template <class T, int M, int N>
SIMT_RUNTIME __attribute__((noinline)) void multiply_tiles(void** brought) {
    alignas(64) float a[16][16], b[16][8 * N], d[16][8 * N];
    const auto of = [&](int l) SIMT_RUNTIME { return *static_cast<const MmaOperands<T>*>(brought[l]); };
    for (int l = 0; l < 32; l++)
        for (int j = 0; j < N; j++)
            for (int half = 0; half < 2; half++) {
                const int k = l % 4 * 2 + 8 * half, n = 8 * j + l / 4;
                spread(of(l).b[j].r[half], b[k][n], b[k + 1][n]);
            }
    for (int i = 0; i < M; i++) {
        const auto exchange = [&](auto move) SIMT_RUNTIME {
            for (int l = 0; l < 32; l++)
                for (int e = 0; e < 4 * N; e++)
                    move(of(l).d[4 * N * i + e], d[l / 4 + e % 4 / 2 * 8][e / 4 * 8 + l % 4 * 2 + e % 2]);
        };
        for (int l = 0; l < 32; l++)
            for (int q = 0; q < 4; q++) {
                float* to = &a[l / 4 + q % 2 * 8][l % 4 * 2 + q / 2 * 8];
                spread(of(l).a[i].r[q], to[0], to[1]);
            }
        exchange([](float& lane, float& tile) SIMT_RUNTIME { tile = lane; });
        for (int m = 0; m < 16; m++)
            for (int k = 0; k < 16; k++)
                for (int n = 0; n < 8 * N; n++) d[m][n] += a[m][k] * b[k][n];
        exchange([](float& lane, float& tile) SIMT_RUNTIME { lane = tile; });
    }
}
template <class T, int M, int N>
inline const char kMultiplyTiles = 0;
}  // namespace simt

template <class T, int M, int N>
SIMT_DEVICE void mma_tiles(float (&d)[M][N][4], const FragmentA<T> (&a)[M], const FragmentB<T> (&b)[N]) {
    simt::MmaOperands<T> mine{&d[0][0][0], a, b};
    simt::warp_collective(&simt::kMultiplyTiles<T, M, N>, &mine, simt::multiply_tiles<T, M, N>);
}
#endif
