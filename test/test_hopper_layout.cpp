// test_hopper_layout.cpp - the tiles of attention_hopper.cuh: TMA's swizzle and the way wgmma reads it, each
// written again here from the PTX ISA, must meet at the right elements; and an SM must have what the kernels
// need.

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/attention_hopper.cuh"

namespace {

constexpr uint32_t kSharedBytes = 227 * 1024, kSharedRegisters = 64 * 1024;  // compute capability 9.0

// Shared memory in units of 16 bytes, each of which holds 8 elements. An element is stored as its index in
// the tile.
class SharedMemory {
  public:
    // cuTensorMapEncodeTiled's SWIZZLE_128B: 16-byte unit u of a 128-byte line l is stored at unit u ^ l % 8,
    // with lines counted from a multiple of 1024 bytes.
    void write_box(uint32_t address, int rows, int columns_of_tile, int first_column) {
        ASSERT_EQ(address % 1024, 0u);
        for (int row = 0; row < rows; row++)
            for (int column = 0; column < 64; column++) {
                const uint32_t line = address / 128 + static_cast<uint32_t>(row);
                const uint32_t unit = static_cast<uint32_t>(column) / 8 ^ line % 8;
                at(line * 8 + unit, column % 8) = row * columns_of_tile + first_column + column;
            }
    }
    // Element (i, k) of the operand, i along M or N and k < 16: the canonical layouts of "Asynchronous
    // Warpgroup Level Matrix Shared Memory Layout", with T = 8 elements of 16 bits in a unit of 128 bits:
    // K-major ((8, m), (T, 2)) : ((8 T, SBO), (1, T)), MN-major ((T, 8, m), (8, 2)) : ((1, T, LBO), (8 T,
    // SBO)).
    int operand(uint64_t descriptor, bool mn_major, int i, int k) const {
        const auto bits = [&](int low, int high) { return descriptor << (63 - high) >> (63 - high + low); };
        EXPECT_EQ(bits(62, 63), 1u) << "not swizzled by 128 bytes";
        EXPECT_EQ(bits(49, 51), 0u) << "a base offset";
        EXPECT_EQ(bits(14, 15) | bits(30, 31) | bits(46, 48) | bits(52, 61), 0u) << "reserved bits";
        const int64_t leading = static_cast<int64_t>(bits(16, 29)) * 8,
                      stride = static_cast<int64_t>(bits(32, 45)) * 8;
        const int64_t element = mn_major
                                    ? i % 8 + i / 8 % 8 * 8 + i / 64 * leading + k % 8 * 64 + k / 8 * stride
                                    : i % 8 * 64 + i / 8 * stride + k % 8 + k / 8 * 8;
        const uint64_t linear = bits(0, 13) * 8 + static_cast<uint64_t>(element);
        const uint64_t unit = linear / 8;
        return at(static_cast<uint32_t>(unit ^ unit / 8 % 8), static_cast<int>(linear % 8));
    }

  private:
    int& at(uint32_t unit, int element) { return elements_.at(unit * 8 + static_cast<uint32_t>(element)); }
    int at(uint32_t unit, int element) const {
        return elements_.at(unit * 8 + static_cast<uint32_t>(element));
    }
    std::vector<int> elements_ = std::vector<int>(kSharedBytes / 2, -1);
};

// Every operand that a kernel can take from the tile: any 64 rows or all rows, by columns; all columns, by
// rows.
template <int kRows, int kColumns>
void check_tile(uint32_t address) {
    SCOPED_TRACE(testing::Message() << kRows << " x " << kColumns << " at " << address);
    using Tile = SwizzledTile<kRows, kColumns>;
    SharedMemory shared;
    for (int panel = 0; panel < kColumns / 64; panel++)
        shared.write_box(address + static_cast<uint32_t>(panel * kRows) * 128, kRows, kColumns, panel * 64);
    EXPECT_EQ(Tile::kBytes, static_cast<uint32_t>(kRows * kColumns * 2));
    int wrong = 0;
    for (int first = 0; first < kRows; first += 64)
        for (int step = 0; step < kColumns / 16; step++)
            for (int i = 0; i < (first == 0 ? kRows : 64); i++)
                for (int k = 0; k < 16; k++)
                    wrong += shared.operand(Tile::by_rows(address, first, step), false, i, k) !=
                             (first + i) * kColumns + 16 * step + k;
    EXPECT_EQ(wrong, 0) << "by rows";
    for (int step = 0; step < kRows / 16; step++)
        for (int i = 0; i < kColumns; i++)
            for (int k = 0; k < 16; k++)
                wrong += shared.operand(Tile::by_columns(address, step), true, i, k) !=
                         (16 * step + k) * kColumns + i;
    EXPECT_EQ(wrong, 0) << "by columns";
}
template <class>
struct Sizes;
template <int kRows, int kColumns>
struct Sizes<SwizzledTile<kRows, kColumns>> {
    static void check(uint32_t address) { check_tile<kRows, kColumns>(address); }
};

template <class F>
void check_forward() {
    Sizes<typename F::QTile>::check(1024);
    for (int slot = 0; slot < 2 * F::kSlots; slot++)
        Sizes<typename F::KvTile>::check(2048 + F::kKeyTiles + slot * F::KvTile::kBytes);
}
template <class B>
void check_backward() {
    for (int i = 0; i < 2; i++) Sizes<typename B::StayingTile>::check(1024 + i * B::StayingTile::kBytes);
    for (int i = 0; i < 2 * B::kSlots; i++)
        Sizes<typename B::PassingTile>::check(3072 + B::kPassingTiles + i * B::PassingTile::kBytes);
}
TEST(HopperLayout, DescriptorsFindWhatTmaWrote) {
    check_forward<HopperForward<64>>();
    check_forward<HopperForward<128>>();
    check_backward<HopperBackward<64>>();
    check_backward<HopperBackward<128>>();
}

template <class K>
void check_resources() {
    EXPECT_LE(K::kSharedBytes, kSharedBytes);
    EXPECT_EQ(K::kBarriers % 8, 0u);
    const int started =
        static_cast<int>(kSharedRegisters) / K::kThreads / 8 * 8;  // per thread, by __launch_bounds__
    EXPECT_LE(K::kProducerRegisters, started);
    EXPECT_GE(K::kConsumerRegisters, started);
    EXPECT_LE(K::kProducerRegisters + K::kConsumers * K::kConsumerRegisters, (K::kConsumers + 1) * started)
        << "consumers would wait for registers for ever";
    for (const int registers : {K::kProducerRegisters, K::kConsumerRegisters}) {
        EXPECT_EQ(registers % 8, 0) << "setmaxnreg";
        EXPECT_GE(registers, 24);
        EXPECT_LE(registers, 256);
    }
}
TEST(HopperLayout, KernelsFitAnSm) {
    check_resources<HopperForward<64>>();
    check_resources<HopperForward<128>>();
    check_resources<HopperBackward<64>>();
    check_resources<HopperBackward<128>>();
}

}  // namespace
