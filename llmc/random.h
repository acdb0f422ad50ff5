// random.h - counter-based random numbers: a number depends only on the seed and on where it is used, never
// on how many were drawn before it. So a resumed run needs no generator state, and the order of evaluation
// does not matter. And a shuffle that is computed from them.
#pragma once

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <span>
#include <string_view>

#if defined(__CUDACC__)
#define RANDOM_HOST_DEVICE __host__ __device__
#else
#define RANDOM_HOST_DEVICE
#endif

// The finalizer of splitmix64 (Steele, Lea, Flood 2014), a bijection of 64 bits with good avalanche.
RANDOM_HOST_DEVICE inline uint64_t mix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// The key that all counters (a, b, any) under a seed have in common.
inline uint64_t random_key(uint64_t seed, uint64_t a, uint64_t b) {
    return mix64(mix64(mix64(seed) ^ a) ^ b);
}

// 64 random bits for the last part of a counter. `key` is random_key() of the other parts; kernels are passed
// it.
RANDOM_HOST_DEVICE inline uint64_t random_bits_of(uint64_t key, uint64_t c) { return mix64(key ^ c); }

// A number for a name, as a counter (FNV-1a; Fowler, Noll, Vo).
inline uint64_t name_hash(std::string_view name) {
    uint64_t hash = 0xCBF29CE484222325ull;
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3ull;
    return hash;
}

// 64 random bits for the counter (a, b, c) under a seed. dev/reference.py computes the same.
inline uint64_t random_bits(uint64_t seed, uint64_t a, uint64_t b = 0, uint64_t c = 0) {
    return random_bits_of(random_key(seed, a, b), c);
}

// Uniform in [0, 1), 53 bits.
inline double random_uniform(uint64_t seed, uint64_t a, uint64_t b = 0, uint64_t c = 0) {
    return static_cast<double>(random_bits(seed, a, b, c) >> 11) * 0x1p-53;
}

// Layers of equal area under exp(-x^2 / 2), x >= 0, for Marsaglia and Tsang's ziggurat ("The Ziggurat Method
// for Generating Random Variables", 2000). Layer i > 0 is a rectangle as wide as edge[i], from density[i] up
// to density[i + 1]. Layer 0 is the area below density[1], including everything beyond edge[1]; edge[0] is
// the width of a rectangle of the same area.
struct Ziggurat {
    static constexpr int kLayers = 256;
    double edge[kLayers + 1], density[kLayers + 1];

    Ziggurat() {
        const double tail = 3.6541528853610088;  // for this number of layers the last edge is 0
        const auto f = [](double x) { return std::exp(-0.5 * x * x); };
        const double area = tail * f(tail) + std::sqrt(M_PI / 2) * std::erfc(tail / std::sqrt(2.0));
        edge[0] = area / f(tail);
        edge[1] = tail;
        for (int i = 2; i < kLayers; i++)
            edge[i] = std::sqrt(-2.0 * std::log(area / edge[i - 1] + f(edge[i - 1])));
        edge[kLayers] = 0;
        for (int i = 0; i <= kLayers; i++) density[i] = f(edge[i]);
    }
};
inline const Ziggurat kZiggurat;

// A draw from 64 bits: the lowest 8 choose a layer, the upper 54 a position across it.
struct ZigguratDraw {
    int layer;
    double x;
    explicit ZigguratDraw(uint64_t bits)
        : layer(static_cast<int>(bits % Ziggurat::kLayers)),
          x(static_cast<double>(static_cast<int64_t>(bits) >> 10) * 0x1p-53 * kZiggurat.edge[layer]) {}
    // Whether x is where the whole layer is under the density, as for 98.8% of draws.
    bool inside() const { return std::abs(x) < kZiggurat.edge[layer + 1]; }
};

// Continues after a first draw that is not inside(). The counter (stream, n, index) gives the n-th number.
inline double random_normal_outside(uint64_t seed, uint64_t stream, uint64_t index, ZigguratDraw draw) {
    const auto& [edge, density] = kZiggurat;
    uint64_t n = 1;
    const auto uniform = [&] { return random_uniform(seed, stream, n++, index); };
    for (; !draw.inside(); draw = ZigguratDraw(random_bits(seed, stream, n++, index))) {
        const int i = draw.layer;
        if (i == 0) {  // Marsaglia's method beyond the last edge
            double beyond, height;
            do {
                beyond = -std::log(1.0 - uniform()) / edge[1];
                height = -std::log(1.0 - uniform());
            } while (2 * height <= beyond * beyond);
            return std::copysign(edge[1] + beyond, draw.x);
        }
        const double height = density[i] + uniform() * (density[i + 1] - density[i]);
        if (height < std::exp(-0.5 * draw.x * draw.x)) break;
    }
    return draw.x;
}

// A standard normal number; it depends on its arguments alone.
inline double random_normal(uint64_t seed, uint64_t stream, uint64_t index = 0) {
    const ZigguratDraw draw(random_bits(seed, stream, 0, index));
    return draw.inside() ? draw.x : random_normal_outside(seed, stream, index, draw);
}

// Fills `out` with these numbers for the indices from `first` on, rounded to float. Computes them in vectors.
inline void random_normals(uint64_t seed, uint64_t stream, uint64_t first, std::span<float> out) {
    constexpr size_t kBlock = 512;
    const uint64_t key = random_key(seed, stream, 0);
    for (size_t from = 0; from < out.size(); from += kBlock, first += kBlock) {
        const size_t count = std::min(kBlock, out.size() - from);
        uint64_t outside[kBlock];
        for (size_t i = 0; i < count; i++) {
            const ZigguratDraw draw(random_bits_of(key, first + i));
            out[from + i] = static_cast<float>(draw.x);
            outside[i] = !draw.inside();
        }
        for (size_t i = 0; i < count; i++) {
            if (!outside[i]) continue;
            const ZigguratDraw draw(random_bits_of(key, first + i));
            out[from + i] = static_cast<float>(random_normal_outside(seed, stream, first + i, draw));
        }
    }
}

// ---- a shuffle
//
// A shuffle that is computed, not stored: the new place of each of n numbers is a function of a key.
//
// It is a Feistel network (Luby, Rackoff 1988) on two digits, low and high, of the number high * 2^k + low.
// Each round adds to one digit a random function of the other digit and the key. Such a round can be undone
// by subtracting, so two different numbers stay different. A number that ends outside 0 ... n - 1 is sent
// through the network again until it is inside ("cycle walking", Black, Rogaway 2002), which keeps the
// numbers different.

class Permutation {
  public:
    // Permutes 0 ... n - 1, for n from 1 to 2^62; the key comes from random_key(). dev/reference.py computes
    // the same.
    Permutation(uint64_t n, uint64_t key) : n_(n), key_(key) {
        assert(n >= 1 && n <= uint64_t{1} << 62);
        while (lows_ * lows_ < n) lows_ *= 2;
        highs_ = (n + lows_ - 1) / lows_;
    }

    uint64_t operator()(uint64_t i) const {
        assert(i < n_);
        do i = mixed(i);
        while (i >= n_);
        return i;
    }

  private:
    // With 8 rounds, a hundred thousand orders of eight numbers can still be told from random ones. Each
    // further round makes that four times harder.
    static constexpr uint64_t kRounds = 12;

    uint64_t mixed(uint64_t i) const {
        uint64_t low = i % lows_, high = i / lows_;
        for (uint64_t round = 0; round < kRounds; round++) {
            low = (low + random_bits_of(key_, 2 * round << 56 | high)) % lows_;  // 2^64 is a multiple of it
            high = (high + random_bits_of(key_, (2 * round + 1) << 56 | low) % highs_) % highs_;
        }
        return high * lows_ + low;
    }

    const uint64_t n_, key_;
    uint64_t lows_ = 1, highs_ = 1;  // the number of values of each digit
};
