// test_wide_sum.cpp - sums of many terms into bf16 lose no more than one rounding would.
#include "llmc/gradient_sums.cuh"

#include <gtest/gtest.h>

#include "test/kernel_test.h"

namespace {

// The exact sums, the wide sums with their low bits, and sums that are rounded to bf16 after every term.
struct Sums {
    std::vector<double> exact;
    std::vector<bf16> wide, plain;
    std::vector<uint8_t> low;
};

// `terms` terms of mean `drift` and deviation 1, added to a start of the same distribution.
Sums add_up(size_t n, int terms, double drift) {
    Sums s;
    const auto term = [&](int i) {
        std::vector<float> t = random_values<float>(n, 1, 100 + static_cast<uint64_t>(i));
        for (float& x : t) x += static_cast<float>(drift);
        return t;
    };
    std::vector<bf16> start;
    for (float x : term(-1)) start.push_back(from_float<bf16>(x));
    for_each_order([&] {
        DeviceArray<bf16> sum(start);
        DeviceArray<uint8_t> low(std::vector<uint8_t>(n / 2, 0));
        Tensor<bf16> t_sum = sum.tensor({static_cast<int64_t>(n)});
        Tensor<uint8_t> t_low = low.tensor({static_cast<int64_t>(n / 2)});
        for (int i = 0; i < terms; i++) {
            DeviceArray<float> t(term(i));
            wide_sum_add(t_sum, t_low, t.tensor({static_cast<int64_t>(n)}), Stream{});
        }
        s.wide = sum.download();
        s.low = low.download();
        return bytes_of(s.wide, s.low);
    });
    s.exact = to_doubles(start);
    s.plain = start;
    for (int i = 0; i < terms; i++) {
        const std::vector<float> t = term(i);
        for (size_t j = 0; j < n; j++) {
            s.exact[j] += double{t[j]};
            s.plain[j] = from_float<bf16>(to_float(s.plain[j]) + t[j]);
        }
    }
    return s;
}

double one_rounding(const std::vector<double>& exact) {
    std::vector<bf16> rounded;
    for (double x : exact) rounded.push_back(from_float<bf16>(static_cast<float>(x)));
    return relative_error(rounded, exact);
}

TEST(WideSum, LosesNoMoreThanOneRounding) {
    for (size_t n : {size_t{kVectorSize<bf16>}, size_t{128 * 75}})
        for (double drift : {0.0, 1.0})
            for (int terms : {1, 16, kSmallShapes ? 20 : 256}) {
                SCOPED_TRACE(testing::Message() << n << " elements, " << terms << " terms about " << drift);
                const Sums s = add_up(n, terms, drift);
                EXPECT_LT(relative_error(s.wide, s.exact), 2 * one_rounding(s.exact));
            }
}

TEST(WideSum, APlainSumWouldLoseMore) {
    const Sums s = add_up(9600, 64, 0);
    EXPECT_GT(relative_error(s.plain, s.exact), 3 * one_rounding(s.exact));
}

// The bits that bf16 lacks are kept: with them the sum is more exact by almost four bits.
TEST(WideSum, KeepsTheLowBits) {
    const Sums s = add_up(9600, 2, 0);
    constexpr size_t N = kVectorSize<bf16>;
    std::vector<float> joined;
    for (size_t i = 0; i < s.wide.size(); i++) {
        const size_t k = i % N;
        const int byte = static_cast<int8_t>(s.low[(i - k) / 2 + k % (N / 2)]);
        joined.push_back(
            join<kWideSumBits>(s.wide[i], k < N / 2 ? static_cast<int8_t>(byte << 4) >> 4 : byte >> 4));
    }
    EXPECT_LT(relative_error(joined, s.exact), one_rounding(s.exact) / 8);
}

TEST(WideSum, ANaNStays) {
    constexpr size_t n = 640;
    const std::vector<float> ones(n, 1.f);
    std::vector<float> terms = ones;
    for (size_t i = 0; i < n; i += 9) terms[i] = std::numeric_limits<float>::quiet_NaN();
    DeviceArray<bf16> sum(std::vector<bf16>(n, from_float<bf16>(1.f)));
    DeviceArray<uint8_t> low(std::vector<uint8_t>(n / 2, 0));
    Tensor<bf16> t_sum = sum.tensor({n});
    Tensor<uint8_t> t_low = low.tensor({n / 2});
    for (const bool nan : {true, false})
        wide_sum_add(t_sum, t_low, DeviceArray<float>(nan ? terms : ones).tensor({n}), Stream{});
    const std::vector<bf16> sums = sum.download();
    for (size_t i = 0; i < sums.size(); i++)
        EXPECT_EQ(std::isnan(to_float(sums[i])), std::isnan(terms[i])) << i;
}

// Products of chunks, in slices whose last vector is not full: what is behind the gradient stays zero,
// whatever the slice's buffer contained before.
TEST(ChunkSums, LeaveWhatIsBehindTheGradient) {
    const auto size_of = [](int64_t rows, int64_t columns) { return static_cast<size_t>(rows * columns); };
    for (const auto& [rows, m, n] : {std::array<int64_t, 3>{5, 3, 7}, {33, 5, 9}, {3, 1, 1}, {4, 2051, 3}}) {
        SCOPED_TRACE(testing::Message() << rows << " rows, " << m << " x " << n);
        const auto a = random_values<bf16>(size_of(rows, m), 1, 1),
                   b = random_values<bf16>(size_of(rows, n), 1, 2);
        std::vector<double> want(size_of(m, n));
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < n; j++)
                for (int64_t l = 0; l < rows; l++)
                    want[size_of(1, i * n + j)] += 2 * double{to_float(a[size_of(1, l * m + i)])} *
                                                   double{to_float(b[size_of(1, l * n + j)])};
        const size_t size = want.size(), padded = size_of(1, whole_vectors(m * n));
        const DeviceArray<bf16> device_a(a), device_b(b), gradient(padded);
        Tensor<bf16> d_weight(gradient.data(), {m, n});
        Arena arena;
        const auto add_two_chunks = [&] {
            Tensor<float> before = arena.take<float>("before", {4 * static_cast<int64_t>(padded)});
            device_fill(before.data(), 0xff, static_cast<size_t>(before.bytes()), Stream{});  // NaNs
            before.drop();
            Tensor<uint8_t> low = take_low_bits(arena, Stream{}, "low", d_weight);
            for (int chunk = 0; chunk < 2; chunk++)
                add_product(arena, Stream{}, d_weight, low, device_a.tensor({rows, m}),
                            device_b.tensor({rows, n}), true);
        };
        Plan plan = arena.rehearse(add_two_chunks);
        arena.allocate({&plan});
        arena.run(plan, add_two_chunks);
        std::vector<bf16> got = gradient.download();
        for (size_t i = size; i < padded; i++)
            EXPECT_EQ(to_float(got[i]), 0.f) << i - size << " behind the end";
        got.resize(size);
        EXPECT_LT(relative_error(got, want), tolerance<bf16>());
    }
}

TEST(Split, JoinsToWhatItWas) {
    std::vector<float> values = random_values<float>(10000, 3, 7);
    for (size_t i = 0; i < values.size(); i += 3) values[i] *= 1e-38f;  // down to the denormals
    for (float x : {0.f, -0.f, 1.f, 1.00390625f, -1.01171875f, 0.99999994f, 3e38f, 1e-45f, -1e-45f})
        values.push_back(x);
    for (float x : values) {
        const auto s = split<16>(x);
        const float again = join<16>(s.high, s.low);
        EXPECT_EQ(0, memcmp(&x, &again, 4)) << x;
        EXPECT_LE(std::abs(to_float(s.high) - x), std::abs(to_float(from_float<bf16>(x)) - x)) << x;
        const auto few = split<4>(x);
        EXPECT_GE(few.low, -8);
        EXPECT_LT(few.low, 8);
        EXPECT_LE(std::abs(join<4>(few.high, few.low) - x), std::ldexp(std::abs(x), -12) + 1e-40f) << x;
    }
}
}  // namespace
