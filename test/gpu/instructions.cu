// instructions.cu - what single PTX instructions do on the emulated GPU, compared with the PTX ISA's own
// words: the places of matrices' elements, swizzles, rounding, NaNs. Expected values are computed from the
// element's side (which lane and register has it), while test/gpu goes from the lane's side, so that both
// must have read the same.
//
//   instructions     exits with 0 if all is right; otherwise a line names the first difference. Instructions
//                    of compute capability 9.0 run if the GPU has it.
#include <cmath>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <vector>

#include "llmc/hopper.cuh"
#include "test/kernel_test.h"

namespace {

int checked = 0;
void expect(const char* what, size_t at, double got, double want) {
    checked++;
    if (got == want || (std::isnan(got) && std::isnan(want))) return;
    fprintf(stderr, "%s: %zu is %.9g, not %.9g\n", what, at, got, want);
    exit(1);
}
void expect_bits(const char* what, size_t at, uint32_t got, uint32_t want) {
    checked++;
    if (got == want) return;
    fprintf(stderr, "%s: %zu is %08x, not %08x\n", what, at, got, want);
    exit(1);
}
template <class T>
uint32_t bits_of(T x) {
    uint32_t bits = 0;
    memcpy(&bits, &x, sizeof x);
    return bits;
}
// Whole numbers from -8 to 8, whose products and sums are exact.
float whole(int i) { return static_cast<float>(mix64(static_cast<uint64_t>(i)) % 17) - 8; }
bf16 narrow(int i) { return from_float<bf16>(whole(i)); }
uint32_t pair(bf16 low, bf16 high) { return bits_of(low) | bits_of(high) << 16; }

// --- Matrices of a warp ("Matrix Fragments for mma.m16n8k16", "ldmatrix").

template <bool kTransposed>
__global__ void __launch_bounds__(32) load_four(uint32_t* out) {
    __shared__ __align__(16) uint16_t rows[32 * 8];
    for (int e = 0; e < 8; e++) rows[threadIdx.x * 8 + e] = static_cast<uint16_t>(threadIdx.x * 8 + e);
    __syncwarp();
    uint32_t r[4];
    load_matrices<kTransposed>(r[0], r[1], r[2], r[3],
                               reinterpret_cast<const bf16*>(rows + (threadIdx.x ^ 5) * 8));
    for (int m = 0; m < 4; m++) out[threadIdx.x * 4 + m] = r[m];
}
void check_ldmatrix() {
    const DeviceArray<uint32_t> straight(128), transposed(128);
    load_four<false><<<1, 32>>>(straight.data());
    load_four<true><<<1, 32>>>(transposed.data());
    const auto a = straight.download(), b = transposed.download();
    for (size_t m = 0; m < 4; m++)  // element (i, j) of matrix m; lane 8 m + i has the address of row i
        for (size_t i = 0; i < 8; i++)
            for (size_t j = 0; j < 8; j++) {
                const uint32_t want = static_cast<uint32_t>(((8 * m + i) ^ 5) * 8 + j);
                expect_bits("ldmatrix", m, a[(4 * i + j / 2) * 4 + m] >> (j % 2 * 16) & 0xffff, want);
                expect_bits("ldmatrix.trans", m, b[(4 * j + i / 2) * 4 + m] >> (i % 2 * 16) & 0xffff, want);
            }
}

__global__ void __launch_bounds__(32)
    multiply_once(float* d, const uint32_t* a, const uint32_t* b, const float* c) {
    const unsigned l = threadIdx.x;
    FragmentA<bf16> fa[1] = {{{a[4 * l], a[4 * l + 1], a[4 * l + 2], a[4 * l + 3]}}};
    const FragmentB<bf16> fb[1] = {{{b[2 * l], b[2 * l + 1]}}};
    float sum[1][1][4];
    for (int e = 0; e < 4; e++) sum[0][0][e] = c[4 * l + e];
    mma_tiles(sum, fa, fb);
    for (int e = 0; e < 4; e++) d[4 * l + e] = sum[0][0][e];
}
void check_mma() {
    const auto a_of = [](size_t i, size_t k) { return narrow(static_cast<int>(16 * i + k)); };
    const auto b_of = [](size_t k, size_t j) { return narrow(static_cast<int>(1000 + 8 * k + j)); };
    std::vector<uint32_t> a(128), b(64);
    std::vector<float> c(128);
    for (size_t i = 0; i < 16; i++)
        for (size_t k = 0; k < 16; k += 2)
            a[(i % 8 * 4 + k % 8 / 2) * 4 + i / 8 + k / 8 * 2] = pair(a_of(i, k), a_of(i, k + 1));
    for (size_t k = 0; k < 16; k += 2)
        for (size_t j = 0; j < 8; j++) b[(j * 4 + k % 8 / 2) * 2 + k / 8] = pair(b_of(k, j), b_of(k + 1, j));
    for (size_t i = 0; i < 128; i++) c[i] = whole(2000 + static_cast<int>(i));
    const DeviceArray<float> d(128);
    multiply_once<<<1, 32>>>(d.data(), DeviceArray<uint32_t>(a).data(), DeviceArray<uint32_t>(b).data(),
                             DeviceArray<float>(c).data());
    const auto got = d.download();
    for (size_t i = 0; i < 16; i++)
        for (size_t j = 0; j < 8; j++) {
            const size_t at = (i % 8 * 4 + j / 2) * 4 + i / 8 * 2 + j % 2;
            double want = c[at];
            for (size_t k = 0; k < 16; k++)
                want += double{to_float(a_of(i, k))} * double{to_float(b_of(k, j))};
            expect("mma.m16n8k16", at, got[at], want);
        }
}

// --- Numbers.

std::vector<float> numbers() {
    constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInf = INFINITY;
    std::vector<float> x = {
        0.f,     -0.f,     1.f,    -1.f,        kInf,        -kInf,        kNaN,
        3.4e38f, -3.4e38f, 1e-45f, -1e-45f,     1.2e-38f,    -126.f,       -127.f,
        -149.5f, 127.5f,   128.f,  1.00390625f, 1.01171875f, -1.00390625f, 0x1.fffffep127f};
    for (int i = 0; i < 2000; i++)
        x.push_back(std::bit_cast<float>(static_cast<uint32_t>(mix64(static_cast<uint64_t>(i)))));
    for (int i = 0; i < 500; i++) x.push_back(whole(i) * 3.3f + whole(i + 7) * 0.01f);
    return x;
}
// The nearest bf16, ties to even, found by comparing distances.
uint32_t rounded(float x) {
    if (std::isnan(x)) return 0x7fff;
    const uint32_t below = bits_of(x) >> 16;  // towards zero
    if (std::isinf(x)) return below;
    const auto value = [](uint32_t bits) { return double{std::bit_cast<float>(bits << 16)}; };
    // For rounding, the number after the largest one is 2^128.
    const uint32_t above = below + 1;
    const double far =
        std::abs(std::isinf(value(above)) ? std::copysign(std::ldexp(1., 128), x) - x : value(above) - x);
    const double near = std::abs(x - value(below));
    return near < far || (near == far && below % 2 == 0) ? below : above;
}
__global__ void __launch_bounds__(32)
    compute(const float* x, const float* y, const float* z, int n, uint32_t* pairs, uint32_t* singles,
            float* powers, float* least, float* most, float* fused) {
    for (int i = static_cast<int>(threadIdx.x); i < n; i += 32) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pairs[i]) : "f"(x[i]), "f"(y[i]));
        unsigned short one;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(one) : "f"(x[i]));
        singles[i] = one;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(powers[i]) : "f"(x[i]));
        least[i] = fminf(x[i], y[i]);
        most[i] = fmaxf(x[i], y[i]);
        fused[i] = x[i] * y[i] + z[i];
    }
}
void check_numbers() {
    const std::vector<float> x = numbers();
    const size_t n = x.size();
    std::vector<float> y(n), z(n);
    for (size_t i = 0; i < n; i++) {
        y[i] = x[(i * 7 + 3) % n];
        z[i] = i % 3 ? -x[i] * y[i] : x[(i * 11 + 5) % n];  // cancels all but the product's rounding error
    }
    const DeviceArray<uint32_t> pairs(n), singles(n);
    const DeviceArray<float> powers(n), least(n), most(n), fused(n);
    compute<<<1, 32>>>(DeviceArray<float>(x).data(), DeviceArray<float>(y).data(),
                       DeviceArray<float>(z).data(), static_cast<int>(n), pairs.data(), singles.data(),
                       powers.data(), least.data(), most.data(), fused.data());
    const auto p = pairs.download(), s = singles.download();
    const auto e = powers.download(), low = least.download(), high = most.download(), f = fused.download();
    for (size_t i = 0; i < n; i++) {
        expect_bits("cvt.rn.bf16x2, whose first operand is the upper half", i, p[i],
                    rounded(x[i]) << 16 | rounded(y[i]));
        expect_bits("cvt.rn.bf16", i, s[i], rounded(x[i]));
        const bool tiny = std::abs(x[i]) < 0x1p-126f;
        const double want = std::exp2(tiny ? 0 : double{x[i]});
        if (std::isnan(x[i]) || want >= 0x1p128 || want == 0)
            expect("ex2.approx.ftz", i, e[i], want >= 0x1p128 ? INFINITY : want);
        else if (want < 0x1p-126)
            expect("ex2.approx.ftz", i, e[i] == 0 || want > 0x1.fffffp-127, 1);
        else
            expect("ex2.approx.ftz", i, std::abs(e[i] - want) <= 0x1p-22 * want, 1);
        const bool first_nan = std::isnan(x[i]), second_nan = std::isnan(y[i]),
                   zeros = x[i] == 0 && y[i] == 0;
        const bool lower = zeros ? std::signbit(x[i]) : x[i] < y[i];
        if (first_nan || second_nan) {
            expect("min of a NaN", i, low[i], first_nan ? y[i] : x[i]);
            expect("max of a NaN", i, high[i], first_nan ? y[i] : x[i]);
        } else if (x[i] != y[i] || zeros) {
            expect_bits("min", i, bits_of(low[i]),
                        bits_of(lower || (zeros && std::signbit(y[i]) == std::signbit(x[i])) ? x[i] : y[i]));
            expect_bits("max", i, bits_of(high[i]),
                        bits_of(lower                         ? y[i]
                                : zeros && std::signbit(y[i]) ? x[i]
                                                              : x[i]));
        }
        expect("x * y + z, which is fused,", i, f[i], std::fma(x[i], y[i], z[i]));
    }
}

// --- Shuffles: within segments of `width` lanes; a lane that would reach beyond keeps its own value.

__global__ void __launch_bounds__(32) shuffle_all(int* out) {
    const int l = static_cast<int>(threadIdx.x);
    int* to = out + l;
    const auto put = [&](int x) {
        *to = x;
        to += 32;
    };
    put(__shfl_up_sync(~0u, l, 3));
    put(__shfl_down_sync(~0u, l, 5));
    put(__shfl_xor_sync(~0u, l, 9));
    put(__shfl_sync(~0u, l, l * 7));
    put(__shfl_up_sync(~0u, l, 3, 8));
    put(__shfl_down_sync(~0u, l, 5, 8));
    put(__shfl_xor_sync(~0u, l, 9, 16));
    put(__shfl_sync(~0u, l, l * 3 + 1, 4));
}
void check_shuffles() {
    const DeviceArray<int> out(8 * 32);
    shuffle_all<<<1, 32>>>(out.data());
    const auto got = out.download();
    for (int l = 0; l < 32; l++) {
        const int in_8 = l % 8;
        const int want[] = {
            l >= 3 ? l - 3 : l,    l + 5 < 32 ? l + 5 : l,   l ^ 9, l * 7 % 32,
            in_8 >= 3 ? l - 3 : l, in_8 + 5 < 8 ? l + 5 : l, l ^ 9, l / 4 * 4 + (l * 3 + 1) % 4};
        for (int k = 0; k < 8; k++)
            expect("shfl", static_cast<size_t>(32 * k + l), got[static_cast<size_t>(32 * k + l)], want[k]);
    }
}

// --- Compute capability 9.0. Tiles in shared memory are made on the host, byte by byte. A row of 64 columns
// is 128 bytes; its pieces of 16 bytes are numbered by their place exclusive-or (the row modulo 8)
// ("Swizzling modes").

size_t swizzled_place(size_t row, size_t column) {
    return row * 128 + ((column / 8) ^ (row % 8)) * 16 + column % 8 * 2;
}
// The matrix descriptor, with a swizzle of 128 bytes, of an operand that begins at `at`.
[[maybe_unused]] __device__ uint64_t descriptor(uint32_t at, uint32_t leading, uint32_t stride) {
    return uint64_t{1} << 62 | uint64_t{stride / 16} << 32 | uint64_t{leading / 16} << 16 | at / 16;
}
constexpr int kImage = 64 * 128 + 2 * 64 * 128;  // A, 64 x 64; B, two panels of 64 x 64

// d[0] = A B^T, with the rows of A and of B's first panel. d[1] = A B, with B's rows and the columns of both
// panels, and with A in registers.
__global__ void __launch_bounds__(128)
    multiply_tiles(float* d, const unsigned char* image, const uint32_t* a_fragments) {
#if defined(HOPPER_CODE)
    DYNAMIC_SHARED(unsigned char, shared);
    const uint32_t tile = (shared_address(shared) + 1023) / 1024 * 1024;
    for (int i = static_cast<int>(threadIdx.x); i < kImage; i += 128)
        shared[tile - shared_address(shared) + static_cast<uint32_t>(i)] = image[i];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    float s[1][8][4] = {}, o[1][16][4] = {};
    FragmentA<bf16> a[4];
    for (int k = 0; k < 4; k++)
        for (int r = 0; r < 4; r++)
            a[k].r[r] = a_fragments[(k * 128 + static_cast<int>(threadIdx.x)) * 4 + r];
    fence_registers(s);
    fence_registers(o);
    fence_registers(a);
    wgmma_fence();
    UNROLL for (uint32_t k = 0; k < 4; k++) wgmma_by_rows(s, descriptor(tile + 32 * k, 16, 1024),
                                                          descriptor(tile + 8192 + 32 * k, 16, 1024), k > 0);
    UNROLL for (uint32_t k = 0; k < 4; k++)
        wgmma_by_columns(o, a[k], descriptor(tile + 8192 + 2048 * k, 8192, 1024));
    wgmma_commit();
    wgmma_wait<0>();
    fence_registers(s);
    fence_registers(o);
    for (int j = 0; j < 8; j++)
        for (int e = 0; e < 4; e++) d[threadIdx.x * 96 + j * 4 + e] = s[0][j][e];
    for (int j = 0; j < 16; j++)
        for (int e = 0; e < 4; e++) d[threadIdx.x * 96 + 32 + j * 4 + e] = o[0][j][e];
#endif
}
void check_wgmma() {
    const auto a_of = [](size_t i, size_t k) { return narrow(static_cast<int>(64 * i + k)); };
    const auto b_of = [](size_t i, size_t j) { return narrow(static_cast<int>(9000 + 128 * i + j)); };
    std::vector<unsigned char> image(kImage);
    const auto put = [&](size_t at, bf16 x) { memcpy(image.data() + at, &x, 2); };
    std::vector<uint32_t> fragments(4 * 128 * 4);
    for (size_t i = 0; i < 64; i++)
        for (size_t k = 0; k < 64; k++) put(swizzled_place(i, k), a_of(i, k));
    for (size_t i = 0; i < 64; i++)
        for (size_t j = 0; j < 128; j++) put(8192 + j / 64 * 8192 + swizzled_place(i, j % 64), b_of(i, j));
    for (size_t i = 0; i < 64; i++)  // a warp has 16 rows, and its lanes own elements as for mma
        for (size_t k = 0; k < 64; k += 2) {
            const size_t thread = i / 16 * 32 + i % 8 * 4 + k % 8 / 2;
            fragments[(k / 16 * 128 + thread) * 4 + i % 16 / 8 + k % 16 / 8 * 2] =
                pair(a_of(i, k), a_of(i, k + 1));
        }
    const DeviceArray<float> d(128 * 96);
    multiply_tiles<<<1, 128, kImage + 1024>>>(d.data(), DeviceArray<unsigned char>(image).data(),
                                              DeviceArray<uint32_t>(fragments).data());
    const auto got = d.download();
    for (size_t i = 0; i < 64; i++)
        for (size_t j = 0; j < 128; j++) {
            const size_t thread = i / 16 * 32 + i % 8 * 4 + j % 8 / 2,
                         place = j / 8 * 4 + i % 16 / 8 * 2 + j % 2;
            double rows = 0, columns = 0;
            for (size_t k = 0; k < 64; k++) {
                if (j < 64) rows += double{to_float(a_of(i, k))} * double{to_float(b_of(j, k))};
                columns += double{to_float(a_of(i, k))} * double{to_float(b_of(k, j))};
            }
            if (j < 64) expect("wgmma, both operands K-major", i * 64 + j, got[thread * 96 + place], rows);
            expect("wgmma, B MN-major", i * 128 + j, got[thread * 96 + 32 + place], columns);
        }
}

using Box = SwizzledTile<32, 64>;
struct Maps {
    TensorMap map;
};
__global__ void __launch_bounds__(128)
    copy_box(unsigned char* out, int column, int row, int batch, const __grid_constant__ Maps maps) {
#if defined(HOPPER_CODE)
    DYNAMIC_SHARED(unsigned char, shared);
    const uint32_t tile = (shared_address(shared) + 1023) / 1024 * 1024, barrier = tile + Box::kBytes;
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barriers_are_made();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        barrier_arrive_expecting(barrier, Box::kBytes);
        start_load<Box>(tile, maps.map, barrier, column, row, batch);
    }
    barrier_wait(barrier, 0);
    for (uint32_t i = threadIdx.x; i < Box::kBytes; i += 128)
        out[i] = shared[tile - shared_address(shared) + i];
#endif
}
void check_tma() {
    constexpr size_t kColumns = 136, kRows = 50, kBatch = 3, kRow = 160, kEntry = 60 * kRow;
    std::vector<bf16> values(kBatch * kEntry);
    for (size_t i = 0; i < values.size(); i++) values[i] = from_float<bf16>(static_cast<float>(i % 251 + 1));
    const DeviceArray<bf16> tensor(values);
    const Maps maps = {tensor_map(tensor.data(), kColumns, kRows, kBatch, kRow, kEntry, 32)};
    for (const auto& [column, row, batch] :
         {std::array<size_t, 3>{64, 0, 1}, {128, 32, 2}, {0, 40, 0}, {64, 18, 2}}) {
        const DeviceArray<unsigned char> out(Box::kBytes);
        copy_box<<<1, 128, Box::kBytes + 1024 + 64>>>(out.data(), static_cast<int>(column),
                                                      static_cast<int>(row), static_cast<int>(batch), maps);
        const auto got = out.download();
        for (size_t r = 0; r < 32; r++)
            for (size_t c = 0; c < 64; c++) {
                bf16 x;
                memcpy(&x, got.data() + swizzled_place(r, c), 2);
                const bool there = row + r < kRows && column + c < kColumns;
                const size_t at = batch * kEntry + (row + r) * kRow + column + c;
                expect("cp.async.bulk.tensor", r * 64 + c, to_float(x), there ? to_float(values[at]) : 0);
            }
    }
}

}  // namespace

int main() {
    check_ldmatrix();
    check_mma();
    check_numbers();
    check_shuffles();
    if (device_is_hopper()) {
        check_wgmma();
        check_tma();
    }
    printf("%d results are right\n", checked);
}
