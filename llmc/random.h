// random.h - counted random numbers: a value is a pure function of (seed, where it is used), never of how
// many numbers were drawn before it. So a resumed run needs no generator state, and order of evaluation is
// free.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define RANDOM_HOST_DEVICE __host__ __device__
#else
#define RANDOM_HOST_DEVICE
#endif

// The finaliser of splitmix64 (Steele, Lea, Flood 2014), a bijection of 64 bits with good avalanche.
RANDOM_HOST_DEVICE inline uint64_t mix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// What all counters (a, b, any) under a seed have in common.
inline uint64_t random_key(uint64_t seed, uint64_t a, uint64_t b) {
    return mix64(mix64(mix64(seed) ^ a) ^ b);
}

// 64 random bits for the last part of a counter; kernels get the key of the rest.
RANDOM_HOST_DEVICE inline uint64_t random_bits_of(uint64_t key, uint64_t c) { return mix64(key ^ c); }

// 64 random bits for the counter (a, b, c) under a seed. dev/reference.py computes the same.
inline uint64_t random_bits(uint64_t seed, uint64_t a, uint64_t b = 0, uint64_t c = 0) {
    return random_bits_of(random_key(seed, a, b), c);
}

// Uniform in [0, 1), 53 bits.
inline double random_uniform(uint64_t seed, uint64_t a, uint64_t b = 0, uint64_t c = 0) {
    return static_cast<double>(random_bits(seed, a, b, c) >> 11) * 0x1p-53;
}

// Standard normal by Box and Muller, from two uniforms of the same counter.
inline double random_normal(uint64_t seed, uint64_t a, uint64_t b = 0) {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - random_uniform(seed, a, b, 0)));
    return radius * std::cos(2.0 * M_PI * random_uniform(seed, a, b, 1));
}
