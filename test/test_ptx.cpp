// test_ptx.cpp - the instructions of test/gpu's emulated GPU, with values for which PTX's rules are easy to
// get wrong; and lanes that diverge and meet again.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "test/gpu/assemble.h"

namespace {
using namespace gpu;

// Runs a kernel of one block, whose parameter is the address of `memory`.
template <class T>
void run_kernel(const std::string& body, std::vector<T>& memory, uint32_t threads = 32, uint64_t seed = 1) {
    const PtxModule module = read_ptx(R"(
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 k_param_0)
{
.reg .pred %p<9>;
.reg .b16 %h<9>;
.reg .b32 %r<29>;
.reg .f32 %f<19>;
.reg .b64 %d<29>;
.shared .align 16 .b8 tile[1024];
ld.param.u64 %d1, [k_param_0];
mov.u32 %r1, %tid.x;
)" + body + "\nret;\n}\n");
    const auto program = assemble(module.kernels.at("k"), module);
    DeviceMemory device(1 << 20);
    const size_t bytes = memory.size() * sizeof(T);
    void* const at = device.allocate(bytes);
    Work work{.stream = 0, .number = 1, .after = {}, .name = "k"};
    WarpClock nobody{};
    const Accessor host{&work, kNoBlock, 0, 0, 0, 0, &nobody};
    device.writes(host, at, bytes);
    memcpy(device.bytes_at(at), memory.data(), bytes);
    Work kernel{.stream = 0, .number = 2, .after = {}, .name = "k"};
    kernel.after[0] = 1;
    Counters counters;
    Launch launch{program.get(), &kernel,   {1, 1, 1}, {threads, 1, 1}, 0, std::vector<char>(8),
                  &device,       &counters, seed};
    memcpy(launch.parameters.data(), &at, 8);
    BlockMemory of_block;
    Block(launch, {0, 0, 0}, 0, of_block).run();
    memcpy(memory.data(), device.bytes_at(at), bytes);
}

// d = op a, b, c of 32-bit values: lane i has the operands values[i % n].
std::vector<uint32_t> result_of(const std::string& op, const std::vector<std::array<uint32_t, 3>>& values,
                                int operands) {
    std::vector<uint32_t> memory(4 * 32);
    for (size_t lane = 0; lane < 32; lane++)
        for (size_t k = 0; k < 3; k++) memory[4 * lane + k] = values[lane % values.size()][k];
    const std::string s[] = {"%r2", "%r2, %r3", "%r2, %r3, %r4"};
    run_kernel(R"(
mul.wide.u32 %d2, %r1, 16;
add.s64 %d3, %d1, %d2;
ld.global.v4.u32 {%r2, %r3, %r4, _}, [%d3];
)" + op + " %r5, " +
                   s[operands - 1] + ";\nst.global.u32 [%d3+12], %r5;",
               memory);
    std::vector<uint32_t> results;
    for (size_t i = 0; i < values.size(); i++) results.push_back(memory[4 * i + 3]);
    return results;
}
uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }

TEST(Ptx, IntegersAtTheirEnds) {
    const uint32_t least = 0x80000000, most = 0x7fffffff;
    using R = std::vector<uint32_t>;
    EXPECT_EQ(result_of("add.s32", {{most, 1}, {least, least}}, 2), (R{least, 0}));
    EXPECT_EQ(result_of("mul.hi.s32", {{least, 2}, {3, 5}}, 2), (R{~0u, 0}));
    EXPECT_EQ(result_of("mul.hi.u32", {{least, 2}, {~0u, ~0u}}, 2), (R{1, ~1u}));
    EXPECT_EQ(result_of("mad.lo.s32", {{~0u, 5, 3}}, 3), (R{~1u}));
    EXPECT_EQ(result_of("div.s32", {{~6u, 2}, {7, ~1u}}, 2), (R{~2u, ~2u}));  // towards 0
    EXPECT_EQ(result_of("rem.s32", {{~6u, 2}, {least, ~0u}}, 2), (R{~0u, 0}));
    EXPECT_EQ(result_of("shl.b32", {{1, 31}, {1, 32}, {1, 1000}}, 2), (R{least, 0, 0}));
    EXPECT_EQ(result_of("shr.s32", {{least, 31}, {least, 32}, {most, 99}}, 2), (R{~0u, ~0u, 0}));
    EXPECT_EQ(result_of("shr.u32", {{least, 31}, {least, 32}}, 2), (R{1, 0}));
    EXPECT_EQ(result_of("min.s32", {{least, 1}}, 2), (R{least}));
    EXPECT_EQ(result_of("min.u32", {{least, 1}}, 2), (R{1}));
    EXPECT_EQ(result_of("abs.s32", {{least}, {~4u}}, 1), (R{least, 5}));
    EXPECT_EQ(result_of("prmt.b32", {{0x33221100, 0x77665544, 0x7531}, {0x80, 0, 0x8888}}, 3),
              (R{0x77553311, ~0u}));
    EXPECT_EQ(result_of("bfe.u32", {{0xabcd1234, 8, 8}, {~0u, 40, 4}, {~0u, 0, 40}}, 3), (R{0x12, 0, ~0u}));
}

TEST(Ptx, FloatsThatAreNoNumbers) {
    const float nan = std::numeric_limits<float>::quiet_NaN(),
                infinity = std::numeric_limits<float>::infinity();
    using R = std::vector<uint32_t>;
    EXPECT_EQ(result_of("max.f32", {{bits(nan), bits(1)}, {bits(-0.f), bits(0.f)}}, 2),
              (R{bits(1), bits(0.f)}));
    EXPECT_EQ(result_of("min.f32", {{bits(2), bits(nan)}, {bits(0.f), bits(-0.f)}}, 2),
              (R{bits(2), bits(-0.f)}));
    EXPECT_EQ(result_of("cvt.rzi.s32.f32", {{bits(nan)}, {bits(-2.7f)}, {bits(3e9f)}, {bits(-infinity)}}, 1),
              (R{0, ~1u, 0x7fffffff, 0x80000000}));
    EXPECT_EQ(result_of("cvt.rmi.f32.f32", {{bits(-2.5f)}, {bits(2.5f)}}, 1), (R{bits(-3), bits(2)}));
    EXPECT_EQ(result_of("fma.rn.f32", {{bits(1 + 0x1p-12f), bits(1 + 0x1p-12f), bits(-1 - 0x1p-11f)}}, 3),
              (R{bits(0x1p-24f)}));
    EXPECT_EQ(result_of("ex2.approx.ftz.f32", {{bits(-130)}, {bits(3)}}, 1), (R{0, bits(8)}));
    // Rounds to the nearest, ties to even; the first operand goes to the upper half.
    EXPECT_EQ(result_of("cvt.rn.bf16x2.f32", {{bits(1 + 0x1p-8f), bits(1 + 0x1p-7f + 0x1p-8f)}}, 2),
              (R{0x3f803f82}));
}

// With a NaN, setp's unordered forms are true; its ordered forms are false, and .ne is false too.
TEST(Ptx, ComparisonsWithNaN) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const auto& [how, expected] : std::map<std::string, bool>{{"eq", false},
                                                                   {"ne", false},
                                                                   {"lt", false},
                                                                   {"ge", false},
                                                                   {"equ", true},
                                                                   {"neu", true},
                                                                   {"ltu", true},
                                                                   {"geu", true},
                                                                   {"num", false},
                                                                   {"nan", true}}) {
        std::vector<uint32_t> memory(32, bits(nan));
        run_kernel("mul.wide.u32 %d2, %r1, 4;\nadd.s64 %d3, %d1, %d2;\nld.global.f32 %f1, [%d3];\nsetp." +
                       how +
                       ".f32 %p1, %f1, 0f3F800000;\nselp.u32 %r2, 1, 0, %p1;\nst.global.u32 [%d3], %r2;",
                   memory);
        EXPECT_EQ(memory[7], expected) << how;
    }
}

// Each lane counts to its own number in a loop, and all meet at a shuffle.
TEST(Ptx, LanesPartAndMeet) {
    for (uint64_t seed = 1; seed <= 20; seed++) {
        std::vector<uint32_t> memory(32);
        run_kernel(R"(
mov.u32 %r2, 0;
mov.u32 %r3, 0;
LOOP:
setp.ge.u32 %p1, %r2, %r1;
@%p1 bra DONE;
add.u32 %r3, %r3, %r2;
add.u32 %r2, %r2, 1;
bra LOOP;
DONE:
mov.u32 %r4, 31;
mov.u32 %r5, -1;
mov.u32 %r7, 1;
shfl.sync.bfly.b32 %r6|%p2, %r3, %r7, %r4, %r5;
mul.wide.u32 %d2, %r1, 4;
add.s64 %d3, %d1, %d2;
st.global.u32 [%d3], %r6;)",
                   memory, 32, seed);
        for (uint32_t lane = 0; lane < 32; lane++) {
            const uint32_t other = lane ^ 1;
            EXPECT_EQ(memory[lane], other * (other - 1) / 2 * (other > 0)) << seed;
        }
    }
}

TEST(Ptx, WhatIsNotKnownIsNamed) {
    std::vector<uint32_t> memory(32);
    for (const auto& [text, said] :
         std::map<std::string, std::string>{{"frob.u32 %r2, %r1;", "frob.u32"},
                                            {"add.u32 %r2, %r1, %d1;", "another width"},
                                            {"add.u32 %r2, %nobody, 1;", "%nobody"},
                                            {"bra NOWHERE;", "no such label"}}) {
        try {
            run_kernel(text, memory);
            FAIL() << text;
        } catch (const Fault& f) {
            EXPECT_NE(std::string(f.what()).find(said), std::string::npos) << f.what();
        }
    }
}

// Barriers order blocks of several warps; an odd number of threads has a warp that is not full.
TEST(Ptx, BarriersOrderWarps) {
    for (uint64_t seed = 1; seed <= 20; seed++) {
        std::vector<uint32_t> memory(100);
        run_kernel(R"(
mov.u32 %r9, tile;
shl.b32 %r2, %r1, 2;
add.u32 %r3, %r9, %r2;
st.shared.u32 [%r3], %r1;
bar.sync 0;
mov.u32 %r4, 99;
sub.u32 %r5, %r4, %r1;
shl.b32 %r6, %r5, 2;
add.u32 %r7, %r9, %r6;
ld.shared.u32 %r8, [%r7];
mul.wide.u32 %d2, %r1, 4;
add.s64 %d3, %d1, %d2;
st.global.u32 [%d3], %r8;)",
                   memory, 100, seed);
        for (uint32_t i = 0; i < 100; i++) EXPECT_EQ(memory[i], 99 - i);
    }
}

// -lineinfo adds such lines.
TEST(ReadPtx, LinesOfTheSourceAreNoStatements) {
    const PtxModule module = read_ptx(R"(
.version 8.0
.target sm_80
.address_size 64
.visible .entry k()
{
.loc 1 77 0
mov.u32 %r1, %tid.x;
.loc 2 48 71, function_name $L__info_string0, inlined_at 1 54 5
ret;
}
.file 1 "/llmc/a.cuh"
.file 2 "/llmc/b.cuh"
.section .debug_str
{
$L__info_string0:
.b8 95,90,0
}
.visible .entry l()
{
ret;
}
)");
    EXPECT_EQ(module.kernels.at("k").statements.size(), 2u);
    EXPECT_EQ(module.kernels.at("l").statements.size(), 1u);
}
}  // namespace
