// test_simt.cpp - the faithful CPU build itself: its collectives compute what a GPU's do, and it catches
// mistakes in kernels: a missing barrier, threads that diverge, threads that never meet.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/simt.h"
#include "test/kernel_test.h"

#if !defined(SIMT_LANES) || SIMT_LANES != 32
#error "a test of the faithful build: compile with -DSIMT_LANES=32"
#endif

namespace {

using simt::Order;

const simt::Config kConfigs[] = {{Order::Forward, 1, true},
                                 {Order::Reverse, 1, true},
                                 {Order::Random, 1, true},
                                 {Order::Random, 2, true},
                                 {Order::Random, 3, true}};

// Sets simt::config for a scope.
struct WithConfig {
    simt::Config before = simt::config;
    explicit WithConfig(const simt::Config& c) { simt::config = c; }
    ~WithConfig() { simt::config = before; }
};

__global__ void warp_kernel(float* sum, float* maximum, float* from_lane_5, float* neighbour,
                            const float* x) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    sum[i] = warp_sum(x[i]);
    maximum[i] = warp_max(x[i]);
    from_lane_5[i] = __shfl_sync(~0u, x[i], 5);
    neighbour[i] = __shfl_xor_sync(~0u, x[i], 1);
}

TEST(Warp, SumMaximumAndShuffles) {
    const unsigned blocks = 3, threads = 96, n = blocks * threads;
    std::vector<float> x(n), sum(n), maximum(n), from_lane_5(n), neighbour(n);
    for (unsigned i = 0; i < n; i++)
        x[i] = static_cast<float>(static_cast<int>(i * 37 % 101) - 150);  // exact sums
    for_each_order([&] {
        launch<warp_kernel>(blocks, threads, 0, Stream{}, sum.data(), maximum.data(), from_lane_5.data(),
                            neighbour.data(), x.data());
        return bytes_of(sum, maximum, from_lane_5, neighbour);
    });
    for (unsigned i = 0; i < n; i++) {
        const auto first = x.begin() + i / 32 * 32;
        EXPECT_EQ(sum[i], std::accumulate(first, first + 32, 0.f));
        EXPECT_EQ(maximum[i], *std::max_element(first, first + 32));
        EXPECT_EQ(from_lane_5[i], first[5]);
        EXPECT_EQ(neighbour[i], x[i ^ 1]);
    }
}

// Two sums, one right after the other, use the same shared memory.
__global__ void block_kernel(float* sum, float* maximum, float* last, const float* x) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    sum[i] = block_sum(x[i]);
    last[i] = block_sum(threadIdx.x + 1 == blockDim.x ? x[i] : 0.f);
    maximum[i] = block_max(x[i]);
}

TEST(Block, SumAndMaximum) {
    for (unsigned threads : {32u, 64u, 256u, 1024u}) {
        const unsigned blocks = 2, n = blocks * threads;
        std::vector<float> sum(n), maximum(n), last(n), x = random_values<float>(n, 1, threads);
        for (float& v : x) v -= 10.f;
        for_each_order([&] {
            launch<block_kernel>(blocks, threads, 0, Stream{}, sum.data(), maximum.data(), last.data(),
                                 x.data());
            return bytes_of(sum, maximum, last);
        });
        for (unsigned i = 0; i < n; i++) {
            const auto first = x.begin() + i / threads * threads;
            const double want = std::accumulate(first, first + threads, 0.0);
            ASSERT_NEAR(sum[i], want, 1e-6 * std::abs(want));
            ASSERT_EQ(maximum[i], *std::max_element(first, first + threads));
            ASSERT_EQ(last[i], first[threads - 1]);
        }
    }
}

enum class Missing { None, BeforeTree, InTree, BeforeReuse };

// Sums over the block by a tree in shared memory, twice in the same memory, with one barrier left out.
template <Missing kMissing>
__global__ void tree_kernel(float* out, const float* x) {
    DYNAMIC_SHARED(float, shared);
    for (unsigned turn = 0; turn < 2; turn++) {
        const unsigned i = (blockIdx.x * 2 + turn) * blockDim.x + threadIdx.x;
        shared[threadIdx.x] = x[i];
        if constexpr (kMissing != Missing::BeforeTree) __syncthreads();
        for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
            if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
            if constexpr (kMissing != Missing::InTree) __syncthreads();
        }
        out[i] = shared[0];
        if constexpr (kMissing != Missing::BeforeReuse) __syncthreads();
    }
}

// The number of orders in which some sum is wrong.
template <Missing kMissing>
int orders_that_fail() {
    const unsigned blocks = 3, threads = 128, n = blocks * 2 * threads;
    std::vector<float> x(n), out(n), want(n);
    for (unsigned i = 0; i < n; i++) x[i] = static_cast<float>(i % 97);
    for (unsigned i = 0; i < n; i++) {
        const auto first = x.begin() + i / threads * threads;
        want[i] = std::accumulate(first, first + threads, 0.f);
    }
    int failures = 0;
    for (const simt::Config& c : kConfigs) {
        const WithConfig scope(c);
        std::fill(out.begin(), out.end(), 0.f);
        launch<tree_kernel<kMissing>>(blocks, threads, threads * sizeof(float), Stream{}, out.data(),
                                      x.data());
        failures += out != want;
    }
    return failures;
}

TEST(Orders, ACorrectTreeIsRightInAll) { EXPECT_EQ(orders_that_fail<Missing::None>(), 0); }

TEST(Orders, AMissingBarrierIsAWrongNumber) {
    if (kThreadSanitizer) GTEST_SKIP() << "race_probe.cpp shows that ThreadSanitizer finds one";
    EXPECT_GT(orders_that_fail<Missing::BeforeTree>(), 0);
    EXPECT_GT(orders_that_fail<Missing::InTree>(), 0);
    EXPECT_GT(orders_that_fail<Missing::BeforeReuse>(), 0);
}

__global__ void count_kernel(int* turn, std::atomic<int>* counter) { turn[threadIdx.x] = (*counter)++; }

// When each thread started, by thread.
std::vector<int> starts_under(const simt::Config& c) {
    const WithConfig scope(c);
    std::vector<int> turn(64);
    std::atomic<int> counter{0};
    launch<count_kernel>(1, 64, 0, Stream{}, turn.data(), &counter);
    return turn;
}

TEST(Orders, StartThreadsAsTheySay) {
    std::vector<int> ascending(64);
    std::iota(ascending.begin(), ascending.end(), 0);
    EXPECT_EQ(starts_under({Order::Forward, 1, false}), ascending);
    EXPECT_EQ(starts_under({Order::Reverse, 1, false}),
              std::vector<int>(ascending.rbegin(), ascending.rend()));
    const std::vector<int> random = starts_under({Order::Random, 1, false});
    EXPECT_TRUE(std::is_permutation(random.begin(), random.end(), ascending.begin()));
    EXPECT_NE(random, ascending);
    EXPECT_EQ(random, starts_under({Order::Random, 1, false}));
    EXPECT_NE(random, starts_under({Order::Random, 2, false}));
}

__global__ void read_shared_kernel(float* out) {
    DYNAMIC_SHARED(float, shared);
    out[blockIdx.x * blockDim.x + threadIdx.x] = shared[threadIdx.x];
    shared[threadIdx.x] = 1.f;
}

TEST(Poison, SharedMemoryThatWasNotWrittenIsNaNInEveryBlock) {
    const WithConfig scope({Order::Forward, 1, true});
    std::vector<float> out(4 * 32);
    launch<read_shared_kernel>(4, 32, 32 * sizeof(float), Stream{}, out.data());
    EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float v) { return std::isnan(v); }));
}

// A grid and blocks of three dimensions: each thread writes where it is.
__global__ void place_kernel(int* out) {
    const dim3 g(gridDim.x, gridDim.y, gridDim.z), b(blockDim.x, blockDim.y, blockDim.z);
    const unsigned block = (blockIdx.z * g.y + blockIdx.y) * g.x + blockIdx.x;
    const unsigned thread = (threadIdx.z * b.y + threadIdx.y) * b.x + threadIdx.x;
    out[block * b.x * b.y * b.z + thread] += static_cast<int>(block * 1000 + thread);
}

TEST(Launch, RunsEveryThreadOfEveryBlockOnce) {
    std::vector<int> out(2 * 3 * 4 * 60);
    launch<place_kernel>(dim3(2, 3, 4), dim3(3, 4, 5), 0, Stream{}, out.data());
    for (int i = 0; i < static_cast<int>(out.size()); i++) ASSERT_EQ(out[i], i / 60 * 1000 + i % 60);
    const std::vector<int> before = out;
    launch<place_kernel>(dim3(2, 0, 4), dim3(3, 4, 5), 0, Stream{}, out.data());
    simt::launches_off = true;
    launch<place_kernel>(dim3(2, 3, 4), dim3(3, 4, 5), 0, Stream{}, out.data());
    simt::launches_off = false;
    EXPECT_EQ(out, before);
}

__global__ void early_return_kernel(int* out) {
    if (threadIdx.x % 3 == 0) return;
    __syncthreads();
    out[threadIdx.x] = 1;
}

TEST(Barrier, DoesNotWaitForThreadsThatReturned) {
    for (const simt::Config& c : kConfigs) {
        const WithConfig scope(c);
        std::vector<int> out(64);
        launch<early_return_kernel>(1, 64, 0, Stream{}, out.data());
        for (int i = 0; i < 64; i++) EXPECT_EQ(out[i], i % 3 != 0);
    }
}

// Mistakes to make on purpose.
enum Mistake { kReturnsBefore, kReturnsAmid, kOtherCollective, kOtherBarrier };

__global__ void mistaken_kernel(float* out, Mistake mistake) {
    const unsigned i = threadIdx.x;
    if (mistake == kReturnsBefore && i == 0) return;
    if (mistake == kReturnsAmid && i == 5) return;
    if (mistake == kOtherCollective && i >= 16) __syncwarp();
    if (mistake == kOtherBarrier) {
        if (i == 40)
            __syncwarp();
        else
            __syncthreads();
    }
    out[i] = warp_sum(1.f);
}

void run_mistaken(Mistake mistake, unsigned threads = 64) {
    float out[2048];
    launch<mistaken_kernel>(1, threads, 0, Stream{}, out, mistake);
}

TEST(DivergenceDeathTest, StopsAndSaysWhy) {
    if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer does not follow a fork";
    EXPECT_DEATH(run_mistaken(kReturnsBefore),
                 "a warp collective needs 32 live lanes .block 0,0,0 thread 1,0,0");
    EXPECT_DEATH(run_mistaken(kReturnsAmid), "a thread returned while others wait in a collective");
    EXPECT_DEATH(run_mistaken(kOtherCollective), "threads meet in different collectives");
    EXPECT_DEATH(run_mistaken(kOtherBarrier), "deadlock: a barrier is not reached by all live threads");
    EXPECT_DEATH(run_mistaken(kReturnsBefore, 1025), "a block has 1 to 1024 threads");
}

TEST(DivergenceDeathTest, StopsInEveryOrder) {
    if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer does not follow a fork";
    for (const simt::Config& c : kConfigs) {
        const WithConfig scope(c);
        for (Mistake m : {kReturnsBefore, kReturnsAmid, kOtherCollective, kOtherBarrier})
            EXPECT_DEATH(run_mistaken(m), "simt: .*block 0,0,0");
    }
}

TEST(Bf16, RoundsToNearestEven) {
    auto bits_of = [](float f) {
        uint32_t u;
        memcpy(&u, &f, 4);
        return u;
    };
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        const float exact = to_float(bf16{static_cast<uint16_t>(bits)});
        if (std::isnan(exact)) {
            ASSERT_TRUE(std::isnan(to_float(from_float<bf16>(exact))));
            continue;
        }
        ASSERT_EQ(from_float<bf16>(exact).bits, bits);
        if ((bits & 0x7f80u) == 0x7f80u) continue;  // infinite
        const auto near = [&](uint32_t low) {
            const uint32_t u = bits_of(exact) | low;
            float f;
            memcpy(&f, &u, 4);
            return uint32_t{from_float<bf16>(f).bits};
        };
        ASSERT_EQ(near(0x7fff), bits);
        ASSERT_EQ(near(0x8000), bits + (bits & 1));
        ASSERT_EQ(near(0x8001), bits + 1);
    }
    // A NaN whose upper half alone would be an infinity.
    const uint32_t u = 0x7f800001u;
    float nan;
    memcpy(&nan, &u, 4);
    EXPECT_TRUE(std::isnan(to_float(from_float<bf16>(nan))));
}

TEST(FastExp, IsWithinItsErrorAndClamped) {
    double worst = 0;
    for (int i = 0; i < 175000; i++) {
        const float x = static_cast<float>(i) * 1e-3f - 87.f;
        worst = std::max(worst, std::abs(fast_exp(x) / std::exp(double{x}) - 1));
    }
    EXPECT_LT(worst, 2e-7);
    EXPECT_EQ(fast_exp(0.f), 1.f);
    EXPECT_EQ(fast_exp(-1e30f), fast_exp(-87.3f));
    EXPECT_EQ(fast_exp(INFINITY), fast_exp(88.f));
    EXPECT_TRUE(std::isfinite(fast_exp(INFINITY)));
    EXPECT_TRUE(std::isnan(fast_exp(std::numeric_limits<float>::quiet_NaN())));
}

// The power of two is computed without a conversion to an integer, which is undefined for a NaN, and is still
// the same.
TEST(FastExp, HasThePowerOfTwoOfItsArgument) {
    for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 12289) {
        const float x = std::bit_cast<float>(static_cast<uint32_t>(bits)), y = fast_exp(x);
        if (std::isnan(x)) {
            ASSERT_TRUE(std::isnan(y));
            continue;
        }
        const double exact = std::exp(std::clamp(double{x}, double{-87.3f}, 88.));
        ASSERT_NEAR(double{y} / exact, 1, 3e-7) << x;
    }
}

}  // namespace
