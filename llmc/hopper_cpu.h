// hopper_cpu.h - hopper.cuh for the faithful CPU build: its kernels run as fibers, without such a GPU.
//
// It follows the PTX ISA and does everything as late, or as early, as that allows, so that code that touches
// something too soon gets wrong numbers. A product is computed only when a warp waits for its group. TMA's
// copies are made at once if threads run in forward order; otherwise only when a thread waits at a barrier,
// the latest copy first or in random order. A barrier that is never completed stops the program.
#pragma once

#include <atomic>
#include <cassert>

#include "llmc/mma.cuh"

// A tensor that tensor_map() describes. It asserts the conditions of cuTensorMapEncodeTiled.
struct TensorMap {
    const bf16* data;
    int64_t columns, rows, batch, row, batch_row;
    int box_rows;
};
inline TensorMap tensor_map(const bf16* data, int64_t columns, int64_t rows, int64_t batch, int64_t row,
                            int64_t batch_row, int box_rows) {
    const auto in_steps = [](int64_t elements) { return elements > 0 && elements * 2 % 16 == 0; };
    assert(reinterpret_cast<uintptr_t>(data) % 16 == 0 && in_steps(row) && in_steps(batch_row));
    assert(columns > 0 && rows > 0 && batch > 0 && 0 < box_rows && box_rows <= 256);
    return {data, columns, rows, batch, row, batch_row, box_rows};
}
inline bool device_is_hopper() { return true; }

// Shared memory begins at an address that is no multiple of 1024, as it may on a GPU.
constexpr uint32_t kSharedBegin = 640;
SIMT_DEVICE uint32_t shared_address(const void* p) {
    return kSharedBegin + static_cast<uint32_t>(static_cast<const unsigned char*>(p) - simt::dynamic_shared);
}
namespace simt {
SIMT_RUNTIME inline unsigned char* shared_pointer(uint32_t address) {
    return dynamic_shared + (address - kSharedBegin);
}
// The bf16 at an address of a tile that is swizzled by 128 bytes: bits 7-9 change bits 4-6.
SIMT_RUNTIME inline bf16* swizzled_element(uint32_t address) {
    return reinterpret_cast<bf16*>(shared_pointer(address ^ (address >> 7 & 7) << 4));
}
SIMT_RUNTIME inline float widened(bf16 x) { return __builtin_bit_cast(float, uint32_t{x.bits} << 16); }

// A product that a lane started: its d has 8 * n columns; a is in registers, or in shared memory if null.
struct Wgmma {
    float* d;
    const FragmentA<bf16>* a;  // or null
    uint64_t a_descriptor, b_descriptor;
    int n;
    bool add, columns;  // d += rather than d =; b is MN-major
};
struct WgmmaQueue {
    Wgmma started[64];
    int count = 0, groups = 0, end[64];  // of each group, in `started`
    bool fenced = false;                 // by wgmma_fence(), since the last wait
};
// A box that TMA has to copy.
struct Copy {
    TensorMap map;
    uint32_t to, barrier;
    int column, row, batch;
};
// The units of one OS thread, and so of the block that it runs.
struct HopperUnits {
    WgmmaQueue products[kMaxThreads];
    Copy copies[64];
    unsigned copies_count = 0;
};
SIMT_RUNTIME inline HopperUnits& hopper_units() {
    HopperUnits*& units = this_worker->hopper;
    if (!units) units = new HopperUnits;
    return *units;
}
}  // namespace simt

template <int>
SIMT_DEVICE void setmaxnreg_dec() {}
template <int>
SIMT_DEVICE void setmaxnreg_inc() {}

// --- Barriers

namespace simt {
struct Barrier {
    uint32_t parity : 1;     // of the current phase
    uint32_t arrivals : 15;  // that a phase needs
    uint32_t pending : 16;   // that the current phase still needs
    int32_t bytes;           // that are expected and have not arrived
};
static_assert(sizeof(Barrier) == 8);
SIMT_RUNTIME inline Barrier& barrier_at(uint32_t address) {
    return *reinterpret_cast<Barrier*>(shared_pointer(address));
}
SIMT_RUNTIME inline void change(uint32_t address, int arrivals, int bytes) {
    Barrier& b = barrier_at(address);
    if (static_cast<int>(b.pending) < arrivals) die("more threads arrive at a barrier than it was made for");
#if defined(__SANITIZE_THREAD__)
    __tsan_release(&b);
#endif
    b.pending -= static_cast<uint32_t>(arrivals);
    b.bytes += bytes;
    if (b.pending == 0 && b.bytes == 0) b.pending = b.arrivals, b.parity ^= 1;
}
}  // namespace simt

SIMT_RUNTIME inline void barrier_init(uint32_t barrier, int arrivals) {
    const uint32_t n = static_cast<uint32_t>(arrivals);
    simt::barrier_at(barrier) = {0, n & 0x7fff, n & 0xffff, 0};
}
SIMT_DEVICE void barriers_are_made() {}
SIMT_RUNTIME inline void barrier_arrive(uint32_t barrier) { simt::change(barrier, 1, 0); }
SIMT_RUNTIME inline void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
    simt::barrier_at(barrier).bytes += static_cast<int32_t>(bytes);
    simt::change(barrier, 1, 0);
}

// --- TMA

namespace simt {
// Makes one of the pending copies.
SIMT_RUNTIME inline void make_copy(HopperUnits& units, unsigned index) {
    const Copy c = units.copies[index];
    units.copies[index] = units.copies[--units.copies_count];
    for (int r = 0; r < c.map.box_rows; r++)
        for (int e = 0; e < 64; e++) {
            const int64_t column = c.column + e, row = c.row + r;
            const bool inside = 0 <= column && column < c.map.columns && 0 <= row && row < c.map.rows &&
                                0 <= c.batch && c.batch < c.map.batch;
            *swizzled_element(c.to + static_cast<uint32_t>(r * 128 + e * 2)) =
                inside ? c.map.data[c.batch * c.map.batch_row + row * c.map.row + column] : bf16{0};
        }
    change(c.barrier, 0, -c.map.box_rows * 128);
}
}  // namespace simt

template <class Tile>
SIMT_RUNTIME void start_load(uint32_t tile, const TensorMap& map, uint32_t barrier, int column, int row,
                             int batch) {
    simt::HopperUnits& units = simt::hopper_units();
    if (tile % 1024) simt::die("a swizzled tile does not begin at a multiple of 1024 bytes");
    for (int panel = 0; panel < Tile::kPanels; panel++) {
        if (units.copies_count == 64) simt::die("more copies under way than the emulation has room for");
        units.copies[units.copies_count++] = {
            map,  tile + static_cast<uint32_t>(panel) * Tile::kPanelBytes, barrier, column + 64 * panel, row,
            batch};
        if (simt::config.order == simt::Order::Forward) simt::make_copy(units, units.copies_count - 1);
    }
}

// Lets the block's other fibers run until the phase is complete. All threads of the block must have started.
SIMT_RUNTIME __attribute__((noinline)) inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    simt::Worker& w = *simt::this_worker;
    simt::HopperUnits& units = simt::hopper_units();
    for (int turns = 0; simt::barrier_at(barrier).parity == parity; turns++) {
        if (turns == 1'000'000) simt::die("deadlock: a barrier's phase is never complete");
        const unsigned copies = units.copies_count;
        const bool random = simt::config.order == simt::Order::Random;
        if (copies) simt::make_copy(units, random ? simt::next_random(w) % copies : copies - 1);
        simt::Fiber* self = w.current;
        w.ready.push(self);
        simt::yield_to(w, self, simt::choose(w));
    }
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(&simt::barrier_at(barrier));
#endif
}

// --- wgmma

namespace simt {
// The number of products of 16 x 16 by 16 x 8 n that warps have computed, for tests.
inline std::atomic<int64_t> products_made = 0;

SIMT_RUNTIME inline void start(const Wgmma& product) {
    WgmmaQueue& q = hopper_units().products[threadIdx.x];
    if (!q.fenced) die("a product is started without a fence since the last wait");
    if (q.count == 64) die("more products under way than the emulation has room for");
    q.started[q.count++] = product;
}

// Element (i, k) of the operand, i along M or N.
SIMT_RUNTIME inline float operand_element(uint64_t descriptor, bool mn_major, uint32_t i, uint32_t k) {
    const auto field = [&](int bit)
                           SIMT_RUNTIME { return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4; };
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7)) die("only the swizzle by 128 bytes is emulated");
    const uint32_t start = field(0), leading = field(16), stride = field(32);
    const uint32_t at = mn_major ? i / 64 * leading + i % 64 * 2 + k / 8 * stride + k % 8 * 128
                                 : i / 8 * stride + i % 8 * 128 + k * 2;
    return widened(*swizzled_element(start + at));
}

// Computes product number `index` of each lane's queue, by the whole warp: the warp's 16 rows of D.
SIMT_RUNTIME inline void multiply(void** brought, int index) {
    const auto of = [&](int l) SIMT_RUNTIME -> const Wgmma& {
        return static_cast<WgmmaQueue*>(brought[l])->started[index];
    };
    const Wgmma& first = of(0);
    products_made.fetch_add(1, std::memory_order_relaxed);
    float a[16][16], b[16][256];
    const uint32_t warp_row = threadIdx.x / 32 % 4 * 16;
    for (uint32_t k = 0; k < 16; k++) {
        for (uint32_t j = 0; j < static_cast<uint32_t>(8 * first.n); j++)
            b[k][j] = operand_element(first.b_descriptor, first.columns, j, k);
        for (uint32_t i = 0; i < 16 && !first.a; i++)
            a[i][k] = operand_element(first.a_descriptor, false, warp_row + i, k);
    }
    for (int l = 0; l < 32 && first.a; l++)
        for (int q = 0; q < 4; q++) {
            float* to = &a[l / 4 + q % 2 * 8][l % 4 * 2 + q / 2 * 8];
            spread(of(l).a->r[q], to[0], to[1]);
        }
    for (int l = 0; l < 32; l++)
        for (int e = 0; e < 4 * first.n; e++) {
            const int i = l / 4 + e % 4 / 2 * 8, j = e / 4 * 8 + l % 4 * 2 + e % 2;
            float sum = first.add ? of(l).d[e] : 0.f;
            for (int k = 0; k < 16; k++) sum += a[i][k] * b[k][j];
            of(l).d[e] = sum;
        }
}

// Computes the products of all but the latest `groups` groups.
SIMT_RUNTIME inline void complete_groups(void** brought, int groups) {
    const WgmmaQueue& first = *static_cast<WgmmaQueue*>(brought[0]);
    const int done = first.groups - groups;
    if (done <= 0) return;
    const int products = first.end[done - 1];
    for (int i = 0; i < products; i++) multiply(brought, i);
    for (int l = 0; l < 32; l++) {
        WgmmaQueue& q = *static_cast<WgmmaQueue*>(brought[l]);
        for (int i = products; i < q.count; i++) q.started[i - products] = q.started[i];
        for (int g = done; g < q.groups; g++) q.end[g - done] = q.end[g] - products;
        q.count -= products;
        q.groups -= done;
    }
}
inline const char kWgmmaWait = 0;
}  // namespace simt

SIMT_RUNTIME __attribute__((noinline)) inline void wgmma_fence() {
    simt::hopper_units().products[threadIdx.x].fenced = true;
}
SIMT_RUNTIME __attribute__((noinline)) inline void wgmma_commit() {
    simt::WgmmaQueue& q = simt::hopper_units().products[threadIdx.x];
    q.end[q.groups++] = q.count;
}
template <int kGroups>
SIMT_RUNTIME __attribute__((noinline)) void wgmma_wait() {
    simt::warp_collective(&simt::kWgmmaWait, &simt::hopper_units().products[threadIdx.x],
                          [](void** brought) SIMT_RUNTIME { simt::complete_groups(brought, kGroups); });
    simt::hopper_units().products[threadIdx.x].fenced = false;
}
template <class Registers>
SIMT_DEVICE void fence_registers(Registers&) {}

template <int N>
SIMT_RUNTIME __attribute__((noinline)) void wgmma_by_rows(float (&d)[1][N][4], uint64_t a, uint64_t b,
                                                          bool add) {
    simt::start({&d[0][0][0], nullptr, a, b, N, add, false});
}
template <int N>
SIMT_RUNTIME __attribute__((noinline)) void wgmma_by_rows(float (&d)[1][N][4], const FragmentA<bf16>& a,
                                                          uint64_t b, bool add) {
    simt::start({&d[0][0][0], &a, 0, b, N, add, false});
}
template <int N>
SIMT_RUNTIME __attribute__((noinline)) void wgmma_by_columns(float (&d)[1][N][4], const FragmentA<bf16>& a,
                                                             uint64_t b) {
    simt::start({&d[0][0][0], &a, 0, b, N, true, true});
}
