// hopper.cuh - what only a GPU of compute capability 9.0 has: TMA, barriers in shared memory, wgmma.
//
// Thin wrappers of PTX instructions; names in quotes are sections of the PTX ISA. In the faithful CPU build
// hopper_cpu.h replaces them. Kernels may use them only where HOPPER_CODE is defined, because they are
// compiled for other architectures too.
#pragma once

#include "llmc/mma.cuh"
#if defined(SIMT_GPU)
#include <cuda.h>
#elif defined(SIMT_FAITHFUL)
#include "llmc/hopper_cpu.h"
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(SIMT_FAITHFUL)
#define HOPPER_CODE 1  // sm_90a, by nvcc's name, or the faithful CPU build
#endif

// The descriptor of an operand of wgmma in shared memory that is swizzled by 128 bytes ("Matrix Descriptor
// Format"). In units of 16 bytes, bits 0-13 are the start address, 16-29 the leading and 32-45 the stride
// byte offset. Bits 62-63 are the swizzle, 1 for 128 bytes. Bits 49-51, the base offset, are 0 because the
// pattern repeats at multiples of 1024 bytes. The operand begins `offset` bytes after `address`; the offset
// is added last, so that one address serves many operands.
SIMT_HOST_DEVICE constexpr uint64_t swizzled_operand(uint32_t address, uint32_t offset, uint32_t leading,
                                                     uint32_t stride) {
    const uint32_t low = ((address & 0x3ffff) >> 4 | leading >> 4 << 16) + (offset >> 4);
    return uint64_t{stride >> 4 | 1u << 30} << 32 | low;
}

// A tile of kRows x kColumns bf16 in shared memory, as TMA writes it; it begins at a multiple of 1024 bytes.
// Panels of 64 columns follow one another, and a panel's rows are 128 bytes. In row r, the 16-byte chunk c is
// stored at chunk c ^ r % 8 ("Swizzling modes"). The hardware swizzles the whole address: bits 4-6 ^= bits
// 7-9.
template <int kRows, int kColumns>
struct SwizzledTile {
    static_assert(kRows % 8 == 0 && kColumns % 64 == 0);
    static constexpr int kHeight = kRows, kPanels = kColumns / 64;
    static constexpr uint32_t kPanelBytes = kRows * 128, kBytes = kPanels * kPanelBytes;

    // The operand whose rows (M or N) are the tile's rows from `row` on, for the sum over columns 16 k .. 16
    // k + 15: K-major. The stride offset, from 8 rows to the next 8, is 1024 bytes. 16 columns are 32 of a
    // row's 128 bytes, so each k moves the start address by 32. The leading offset is not used ("Strides").
    SIMT_HOST_DEVICE static constexpr uint64_t by_rows(uint32_t tile, int row, int k) {
        return swizzled_operand(tile + row * 128, k / 4 * kPanelBytes + k % 4 * 32, 16, 1024);
    }
    // The operand whose columns (N) are the tile's columns, for the sum over rows 16 k .. 16 k + 15:
    // MN-major. The leading offset, from 64 columns to the next 64, is a panel; the stride offset, from 8
    // rows to the next 8, is 1024 bytes.
    SIMT_HOST_DEVICE static constexpr uint64_t by_columns(uint32_t tile, int k) {
        return swizzled_operand(tile, k * 16 * 128, kPanelBytes, 1024);
    }
    // Where an element is, in bytes from the tile's begin.
    SIMT_HOST_DEVICE static constexpr uint32_t offset(int row, int column) {
        const int chunk = column % 64 / 8 ^ row % 8;
        return static_cast<uint32_t>(column / 64) * kPanelBytes +
               static_cast<uint32_t>(row * 128 + chunk * 16 + column % 8 * 2);
    }
};

#if defined(SIMT_GPU)
using TensorMap = CUtensorMap;

// Whether the current device runs code for sm_90a.
inline bool device_is_hopper() {
    int device = 0, major = 0, minor = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
           major == 9 && minor == 0;
}

// Describes a tensor of (batch, rows, columns) bf16 to TMA, which copies boxes of box_rows x 64 of one batch
// entry. Rows beyond the end of an entry read as zeros. Strides are in elements; in bytes they, and `data`,
// must be multiples of 16.
inline TensorMap tensor_map(const bf16* data, int64_t columns, int64_t rows, int64_t batch, int64_t row,
                            int64_t batch_row, int box_rows) {
    static const auto encode = [] {  // the driver's function, without linking with the driver
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                    cudaEnableDefault, &found));
#else  // without a version it finds the toolkit's own, and the function has only one
        CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found));
#endif
        if (found != cudaDriverEntryPointSuccess) fail("the CUDA driver has no cuTensorMapEncodeTiled");
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    const auto number = [](int64_t n) { return static_cast<cuuint64_t>(n); };
    const cuuint64_t sizes[3] = {number(columns), number(rows), number(batch)};
    const cuuint64_t strides[2] = {number(row) * sizeof(bf16), number(batch_row) * sizeof(bf16)};
    const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(box_rows), 1}, steps[3] = {1, 1, 1};
    TensorMap map;
    const CUresult status =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<bf16*>(data), sizes, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) fail("CUDA: cuTensorMapEncodeTiled: error %d", static_cast<int>(status));
    return map;
}

SIMT_DEVICE uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Sets the registers per thread of a warpgroup, a multiple of 8; every warp of it must call this.
// setmaxnreg_dec() keeps fewer than the kernel started with; setmaxnreg_inc() takes more, and waits until
// others have released theirs.
template <int kRegisters>
SIMT_DEVICE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
SIMT_DEVICE void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- Barriers, 8 bytes of shared memory each ("mbarrier"). A phase is complete when `arrivals` threads have
// arrived and the bytes that they expect have been copied; then the next phase begins. Phases are numbered
// from 0.

SIMT_DEVICE void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Call it after the last barrier_init() and before a __syncthreads(). TMA uses another proxy than ordinary
// accesses ("Async proxy") and must see what those wrote.
SIMT_DEVICE void barriers_are_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
SIMT_DEVICE void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
SIMT_DEVICE void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Waits until the latest phase of this parity (phase number % 2) is complete. The phase before the first, of
// parity 1, counts as complete.
SIMT_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t complete = 0;
    while (!complete)
        asm volatile(
            "{\n"
            ".reg .pred complete;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
            "selp.u32 %0, 1, 0, complete;\n"
            "}"
            : "=r"(complete)
            : "r"(barrier), "r"(parity)
            : "memory");
}

// --- TMA ("cp.async.bulk.tensor"): one thread starts the copy of a whole tile. The barrier counts its bytes,
// including the zeros for what is beyond the tensor.

template <class Tile>
SIMT_DEVICE void start_load(uint32_t tile, const TensorMap& map, uint32_t barrier, int column, int row,
                            int batch) {
    UNROLL for (int panel = 0; panel < Tile::kPanels; panel++) asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(tile + panel * Tile::kPanelBytes),
        "l"(&map), "r"(barrier), "r"(column + 64 * panel), "r"(row), "r"(batch) : "memory");
}

// --- Products by a warpgroup, four warps ("wgmma.mma_async"): D (64 x N, fp32) += A (64 x 16) B (16 x N).
//
// Warp w of the four has rows 16 w .. 16 w + 15 of D, and of A if that is in registers. Its lanes own the
// elements that they own in mma.cuh ("Register Fragments"). Products run asynchronously. Before the first of
// several, wgmma_fence() makes earlier writes to registers visible to them; wgmma_commit() closes a group.
// Until wgmma_wait() reports that a group is complete, nothing may touch its registers or its tiles.

SIMT_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
SIMT_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until no more than kGroups groups are running.
template <int kGroups>
SIMT_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}
// Keeps the compiler from moving uses of these registers across this line: wgmma uses them asynchronously.
template <int N>
SIMT_DEVICE void fence_registers(float (&d)[1][N][4]) {
    UNROLL for (int j = 0; j < N; j++) {
        UNROLL for (int e = 0; e < 4; e++) asm volatile("" : "+f"(d[0][j][e])::"memory");
    }
}
template <int N>
SIMT_DEVICE void fence_registers(FragmentA<bf16> (&a)[N]) {
    UNROLL for (int k = 0; k < N; k++) {
        UNROLL for (int i = 0; i < 4; i++) asm volatile("" : "+r"(a[k].r[i])::"memory");
    }
}

#define WGMMA_4(j) "+f"(d[0][j][0]), "+f"(d[0][j][1]), "+f"(d[0][j][2]), "+f"(d[0][j][3])
#define WGMMA_32(j)                                                                             \
    WGMMA_4(j), WGMMA_4(j + 1), WGMMA_4(j + 2), WGMMA_4(j + 3), WGMMA_4(j + 4), WGMMA_4(j + 5), \
        WGMMA_4(j + 6), WGMMA_4(j + 7)
#define WGMMA_0_TO_31                                                                                      \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_32_TO_63                                                                                       \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
    "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d = a b, or d += a b if `add`: both operands in shared memory, K-major. 8 * N is 64 or 128 columns.
template <int N>
SIMT_DEVICE void wgmma_by_rows(float (&d)[1][N][4], uint64_t a, uint64_t b, bool add) {
    static_assert(N == 8 || N == 16);
    const int scale_d = add;
    if constexpr (N == 8)
        asm volatile(
            "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_0_TO_31
            "}, %32, %33, add, 1, 1, 0, 0;\n}"
            : WGMMA_32(0)
            : "l"(a), "l"(b), "r"(scale_d));
    else
        asm volatile(
            "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_0_TO_31 WGMMA_32_TO_63
            "}, %64, %65, add, 1, 1, 0, 0;\n}"
            : WGMMA_32(0), WGMMA_32(8)
            : "l"(a), "l"(b), "r"(scale_d));
}

// wgmma_by_rows() with its left operand in registers: d = a b, or d += a b if `add`.
template <int N>
SIMT_DEVICE void wgmma_by_rows(float (&d)[1][N][4], const FragmentA<bf16>& a, uint64_t b, bool add) {
    static_assert(N == 8);
    const int scale_d = add;
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_0_TO_31
        "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}"
        : WGMMA_32(0)
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "l"(b), "r"(scale_d));
}

// d += a b: a in registers, b in shared memory and MN-major, which the last 1 stands for.
template <int N>
SIMT_DEVICE void wgmma_by_columns(float (&d)[1][N][4], const FragmentA<bf16>& a, uint64_t b) {
    static_assert(N == 8 || N == 16);
    if constexpr (N == 8)
        asm volatile(
            "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_0_TO_31
            "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}"
            : WGMMA_32(0)
            : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "l"(b));
    else
        asm volatile(
            "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_0_TO_31 WGMMA_32_TO_63
            "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"
            : WGMMA_32(0), WGMMA_32(8)
            : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "l"(b));
}
#undef WGMMA_4
#undef WGMMA_32
#undef WGMMA_0_TO_31
#undef WGMMA_32_TO_63

#elif !defined(SIMT_FAITHFUL)
inline bool device_is_hopper() { return false; }
#endif

#if defined(SIMT_GPU) || defined(SIMT_FAITHFUL)
// A ring of kSlots tiles that pass from a producer to consumers, and this thread's position in it. A slot has
// two barriers: full() completes when it is filled, empty() when all have released it. The n-th use of a slot
// is phase n of both.
template <int kSlots>
struct Ring {
    uint32_t barriers;
    int slot = 0;
    uint32_t parity = 0;

    SIMT_DEVICE void init(int full_arrivals, int empty_arrivals) const {
        for (int s = 0; s < kSlots; s++) {
            barrier_init(barriers + 8 * s, full_arrivals);
            barrier_init(barriers + 8 * (kSlots + s), empty_arrivals);
        }
    }
    SIMT_DEVICE uint32_t full() const { return barriers + 8 * slot; }
    SIMT_DEVICE uint32_t empty() const { return barriers + 8 * (kSlots + slot); }
    SIMT_DEVICE void wait_full() const { barrier_wait(full(), parity); }
    SIMT_DEVICE void wait_empty() const { barrier_wait(empty(), parity ^ 1); }  // until its last use is over
    // A consumer's warp has read all that it needs of the slot: one arrival.
    SIMT_DEVICE void release() const {
        __syncwarp();
        if (lane() == 0) barrier_arrive(empty());
    }
    SIMT_DEVICE void advance() {
        if (++slot == kSlots) slot = 0, parity ^= 1;
    }
    // A consumer's warp skips this tile.
    SIMT_DEVICE void pass_over() {
        wait_full();
        release();
        advance();
    }
};

// Starts s = A B^T as a group of its own. A is 64 rows of tile a from a_row on, B is tile b.
template <class A, class B, int N>
SIMT_DEVICE void start_rows_product(float (&s)[1][N][4], uint32_t a, int a_row, uint32_t b) {
    static_assert(B::kHeight == 8 * N && A::kPanels == B::kPanels);
    fence_registers(s);
    wgmma_fence();
    UNROLL for (int k = 0; k < 4 * A::kPanels; k++)
        wgmma_by_rows(s, A::by_rows(a, a_row, k), B::by_rows(b, 0, k), k > 0);
    wgmma_commit();
}

// Starts s = A B^T as a group of its own, with A in registers: a[k] has columns 16 k .. 16 k + 15 of this
// warp's 16 rows.
template <class B, int kSteps, int N>
SIMT_DEVICE void start_rows_product(float (&s)[1][N][4], FragmentA<bf16> (&a)[kSteps], uint32_t b) {
    static_assert(B::kHeight == 8 * N && 4 * B::kPanels == kSteps);
    fence_registers(s);
    fence_registers(a);
    wgmma_fence();
    UNROLL for (int k = 0; k < kSteps; k++) wgmma_by_rows(s, a[k], B::by_rows(b, 0, k), k > 0);
    wgmma_commit();
}

// Loads a warp's rows row .. row + 15 of a swizzled tile in shared memory: a[k] has columns 16 k .. 16 k
// + 15.
template <class Tile>
SIMT_DEVICE void load_rows(FragmentA<bf16> (&a)[4 * Tile::kPanels], const unsigned char* tile, int row) {
    const auto at = [&](int r, int column) {
        return reinterpret_cast<const bf16*>(tile + Tile::offset(row + r, column));
    };
    UNROLL for (int k = 0; k < 4 * Tile::kPanels; k++) {
#if defined(SIMT_GPU)
        load_matrices<false>(a[k].r[0], a[k].r[1], a[k].r[2], a[k].r[3],
                             at(lane() % 16, 16 * k + lane() / 16 * 8));
#else
        const int r = lane() / 4, column = 16 * k + lane() % 4 * 2;
        a[k].r[0] = load_pair(at(r, column));
        a[k].r[1] = load_pair(at(r + 8, column));
        a[k].r[2] = load_pair(at(r, column + 8));
        a[k].r[3] = load_pair(at(r + 8, column + 8));
#endif
    }
}

// Starts o += P B as a group of its own. p[k] has columns 16 k .. 16 k + 15 of P, B is tile b.
template <class B, int kSteps, int N>
SIMT_DEVICE void start_columns_product(float (&o)[1][N][4], FragmentA<bf16> (&p)[kSteps], uint32_t b) {
    static_assert(B::kHeight == 16 * kSteps && B::kPanels * 8 == N);
    fence_registers(o);
    fence_registers(p);
    wgmma_fence();
    UNROLL for (int k = 0; k < kSteps; k++) wgmma_by_columns(o, p[k], B::by_columns(b, k));
    wgmma_commit();
}
#endif
