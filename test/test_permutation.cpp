// test_permutation.cpp - the computed shuffle: a permutation for any n, and as random as a drawn one.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/random.h"

namespace {

std::vector<uint64_t> all_of(uint64_t n, uint64_t key) {
    const Permutation permutation(n, key);
    std::vector<uint64_t> out(n);
    for (uint64_t i = 0; i < n; i++) out[i] = permutation(i);
    return out;
}

TEST(Permutation, HitsEachNumberOnce) {
    for (uint64_t n = 1; n <= 1100; n++) {
        for (const uint64_t seed : {0, 1, 2}) {
            std::vector<uint64_t> out = all_of(n, random_key(seed, n, 0));
            std::sort(out.begin(), out.end());
            for (uint64_t i = 0; i < n; i++) ASSERT_EQ(out[i], i) << n;
        }
    }
    for (const uint64_t n : {(1u << 18) - 1, (1u << 18) + 1, 300'007u}) {
        std::vector<bool> hit(n);
        const Permutation permutation(n, random_key(n, 0, 0));
        for (uint64_t i = 0; i < n; i++) {
            const uint64_t out = permutation(i);
            ASSERT_LT(out, n);
            ASSERT_FALSE(hit[out]) << n;
            hit[out] = true;
        }
    }
}

// The inverse of the network, from its definition.
uint64_t inverse(uint64_t n, uint64_t key, uint64_t out) {
    uint64_t lows = 1;
    while (lows * lows < n) lows *= 2;
    const uint64_t highs = n / lows + (n % lows != 0);
    do {
        uint64_t low = out % lows, high = out / lows;
        for (uint64_t half = 24; half-- > 0;) {
            const uint64_t of = half % 2 ? low : high, base = half % 2 ? highs : lows;
            uint64_t& digit = half % 2 ? high : low;
            digit = (digit + base - random_bits_of(key, half * (uint64_t{1} << 56) + of) % base) % base;
        }
        out = high * lows + low;
    } while (out >= n);
    return out;
}

// If each place can be mapped back to where it came from, all places differ.
TEST(Permutation, IsOneToOneForManyNumbers) {
    for (const uint64_t n : {uint64_t{77}, uint64_t{1} << 33, (uint64_t{1} << 33) + 1,
                             uint64_t{10'000'000'019}, (uint64_t{1} << 62) - 5, uint64_t{1} << 62}) {
        for (uint64_t i = 0; i < 2000; i++) {
            const uint64_t key = random_key(i % 7, n, 3), from = random_bits(n, i) % n;
            const uint64_t out = Permutation(n, key)(from);
            ASSERT_LT(out, n);
            ASSERT_EQ(inverse(n, key, out), from);
            ASSERT_EQ(Permutation(n, key)(inverse(n, key, from)), from);
        }
    }
}

// How many standard deviations a chi-squared statistic is too high, for counts that should all be equal.
double off(const std::vector<double>& counts) {
    const double expected =
        std::accumulate(counts.begin(), counts.end(), 0.0) / static_cast<double>(counts.size());
    double sum = 0;
    for (const double count : counts) sum += (count - expected) * (count - expected) / expected;
    const double freedom = static_cast<double>(counts.size()) - 1;
    return (sum - freedom) / std::sqrt(2 * freedom);
}

// Over many keys: the contents of two places, near and far ones, and the distances of neighbours. For truly
// random permutations the result is below 4.
TEST(Permutation, PlacesAreIndependent) {
    for (const uint64_t n : {3, 5, 6, 7, 8, 12, 17, 33, 64, 100, 257}) {
        const uint64_t keys = 40000;
        for (const uint64_t other : {uint64_t{1}, n / 2, n - 1}) {
            std::vector<double> pairs(n * n);
            for (uint64_t k = 0; k < keys; k++) {
                const Permutation permutation(n, random_key(1337, k, n));
                pairs[permutation(0) * n + permutation(other)]++;
            }
            for (uint64_t i = n; i-- > 0;) {  // two places never have the same number
                ASSERT_EQ(pairs[i * n + i], 0);
                pairs.erase(pairs.begin() + static_cast<ptrdiff_t>(i * n + i));
            }
            EXPECT_LT(off(pairs), 5) << n << ", places 0 and " << other;
        }
        std::vector<double> distances(n - 1);
        for (uint64_t k = 0; k < keys; k += 10) {
            const std::vector<uint64_t> out = all_of(n, random_key(7, k, n));
            for (uint64_t i = 1; i < n; i++) distances[(out[i] + n - out[i - 1]) % n - 1]++;
        }
        EXPECT_LT(off(distances), 5) << n;
    }
}

// Every order of a few numbers occurs, each as often as any other.
TEST(Permutation, OrdersAreEquallyLikely) {
    for (const uint64_t n : {2, 3, 4, 5, 6}) {
        std::vector<uint64_t> order(n);
        std::iota(order.begin(), order.end(), 0);
        std::vector<std::vector<uint64_t>> orders;
        do orders.push_back(order);
        while (std::next_permutation(order.begin(), order.end()));
        std::vector<double> seen(orders.size());
        for (uint64_t k = 0; k < 50000; k++) {
            const auto at = std::lower_bound(orders.begin(), orders.end(), all_of(n, random_key(k, 5, n)));
            seen[static_cast<size_t>(at - orders.begin())]++;
        }
        EXPECT_LT(off(seen), 5) << n;
    }
}

// One order of many numbers: a number's place says nothing about where it or its neighbours were before, and
// orders of keys that differ in one bit have nothing in common.
TEST(Permutation, LeavesNoTraceOfTheOrderBefore) {
    for (const uint64_t n : {10'000, 65'536, 100'003}) {
        const std::vector<uint64_t> a = all_of(n, 42), b = all_of(n, 43);
        const double middle = (static_cast<double>(n) - 1) / 2,
                     variance = (static_cast<double>(n) * static_cast<double>(n) - 1) / 12;
        const auto correlation = [&](auto left, auto right) {  // in standard deviations
            double sum = 0;
            for (uint64_t i = 0; i < n; i++)
                sum += (static_cast<double>(left(i)) - middle) * (static_cast<double>(right(i)) - middle);
            return sum / variance / std::sqrt(static_cast<double>(n));
        };
        const auto itself = [](uint64_t i) { return i; };
        const auto of_a = [&](uint64_t i) { return a[i]; };
        const auto of_b = [&](uint64_t i) { return b[i]; };
        EXPECT_LT(std::abs(correlation(itself, of_a)), 4) << n;
        EXPECT_LT(std::abs(correlation(of_b, of_a)), 4) << n;
        for (const uint64_t lag : {1, 2, 3, 64, 256, 317}) {
            const auto later = [&](uint64_t i) { return a[(i + lag) % n]; };
            EXPECT_LT(std::abs(correlation(of_a, later)), 4) << n << ", " << lag << " later";
        }
        uint64_t same = 0, neighbours = 0;
        for (uint64_t i = 0; i < n; i++) same += a[i] == b[i];
        for (uint64_t i = 1; i < n; i++) neighbours += a[i] == a[i - 1] + 1;
        EXPECT_LT(same, 8u) << n;  // one is expected
        EXPECT_LT(neighbours, 8u) << n;
    }
}

}  // namespace
