// test_random.cpp - normal numbers of random.h: they have the right distribution, whichever counter is
// incremented, and in bulk are the same as one by one.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "llmc/random.h"

namespace {

double below(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

// The index of the interval that has a normal number, of `count` equally likely intervals.
size_t interval(double x, size_t count) {
    return std::min(count - 1, static_cast<size_t>(below(x) * static_cast<double>(count)));
}

// Which counter is incremented: seed, stream or index.
enum class Moves { Seed, Stream, Index };
std::vector<double> draws(Moves moves, size_t count, uint64_t start = 0) {
    std::vector<double> x(count);
    for (size_t i = 0; i < count; i++) {
        const uint64_t at = start + i;
        x[i] = moves == Moves::Seed     ? random_normal(at, 5, 11)
               : moves == Moves::Stream ? random_normal(1337, at, 11)
                                        : random_normal(1337, 5, at);
    }
    return x;
}

class Normals : public testing::TestWithParam<Moves> {};
INSTANTIATE_TEST_SUITE_P(Counters, Normals, testing::Values(Moves::Seed, Moves::Stream, Moves::Index));

constexpr double kSigmas = 5;  // a test with this limit fails by chance once in two million times

TEST_P(Normals, HaveTheMomentsOfTheDistribution) {
    const double n = 1 << 21;
    double sums[4] = {};
    for (const double x : draws(GetParam(), 1 << 21))
        for (int k = 0; k < 4; k++) sums[k] += std::pow(x, k + 1);
    // The variance of x^k's mean is (E x^2k - (E x^k)^2) / n.
    EXPECT_NEAR(sums[0] / n, 0, kSigmas * std::sqrt(1 / n));
    EXPECT_NEAR(sums[1] / n, 1, kSigmas * std::sqrt(2 / n));
    EXPECT_NEAR(sums[2] / n, 0, kSigmas * std::sqrt(15 / n));
    EXPECT_NEAR(sums[3] / n, 3, kSigmas * std::sqrt(96 / n));
}

TEST_P(Normals, FillEqualIntervalsEqually) {
    constexpr size_t kCells = 4096;
    std::vector<double> count(kCells);
    const double n = 1 << 21;
    for (const double x : draws(GetParam(), 1 << 21)) count[interval(x, kCells)]++;
    double chi2 = 0;
    for (const double c : count) chi2 += (c - n / kCells) * (c - n / kCells) / (n / kCells);
    EXPECT_NEAR(chi2, kCells - 1, kSigmas * std::sqrt(2.0 * (kCells - 1)));
}

// Tests neighbours, their squares, and the cells of pairs.
TEST_P(Normals, OfNeighboursAreIndependent) {
    const std::vector<double> x = draws(GetParam(), 1 << 20, uint64_t{1} << 33);
    for (const size_t lag : {1, 2, 3, 4, 7, 8, 16, 64, 256, 512, 4096}) {
        const double n = static_cast<double>(x.size() - lag);
        double product = 0, squares = 0;
        std::vector<double> count(32 * 32);
        for (size_t i = 0; i + lag < x.size(); i++) {
            product += x[i] * x[i + lag];
            squares += (x[i] * x[i] - 1) * (x[i + lag] * x[i + lag] - 1);
            count[32 * interval(x[i], 32) + interval(x[i + lag], 32)]++;
        }
        EXPECT_NEAR(product / n, 0, kSigmas * std::sqrt(1 / n)) << lag;
        EXPECT_NEAR(squares / n, 0, kSigmas * std::sqrt(4 / n)) << lag;
        double chi2 = 0;
        for (const double c : count) chi2 += (c - n / 1024) * (c - n / 1024) / (n / 1024);
        EXPECT_NEAR(chi2, 1023, kSigmas * std::sqrt(2.0 * 1023)) << lag;
    }
}

TEST(Normals, HaveTails) {
    constexpr size_t kPiece = 1 << 16, kPieces = 1 << 10;
    const double n = double{kPiece} * kPieces;
    std::vector<float> x(kPiece);
    double above[6] = {}, under[6] = {}, beyond_the_layers = 0;
    for (uint64_t piece = 0; piece < kPieces; piece++) {
        random_normals(7, piece % 16, piece * kPiece, x);
        for (const float value : x) {
            for (int k = 1; k <= 5; k++) above[k] += value > k, under[k] += value < -k;
            beyond_the_layers += std::abs(value) > 3.6541528853610088f;
        }
    }
    for (int k = 1; k <= 5; k++) {
        const double expected = n * below(-k);
        EXPECT_NEAR(above[k], expected, kSigmas * std::sqrt(expected)) << k;
        EXPECT_NEAR(under[k], expected, kSigmas * std::sqrt(expected)) << k;
    }
    const double expected = 2 * n * below(-3.6541528853610088);
    EXPECT_NEAR(beyond_the_layers, expected, kSigmas * std::sqrt(expected));
}

TEST(Normals, InBulkAreThoseOneByOne) {
    for (const uint64_t first : {uint64_t{0}, uint64_t{3}, uint64_t{1} << 40, ~uint64_t{0} - 5000}) {
        for (const size_t count : {0, 1, 511, 512, 513, 1700, 5000}) {
            std::vector<float> x(count + 1, -77.f);
            random_normals(42, first ^ 9, first, std::span(x).first(count));
            size_t wrong = 0;
            for (size_t i = 0; i < count; i++)
                wrong += x[i] != static_cast<float>(random_normal(42, first ^ 9, first + i));
            EXPECT_EQ(wrong, 0) << first << " " << count;
            EXPECT_EQ(x[count], -77.f);
        }
    }
}

}  // namespace
