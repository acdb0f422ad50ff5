// quant_ggml_encode.h - quantizes rows of floats into the formats of GGUF files, on the host: F16, BF16
// and those of quant_ggml.cuh, except for Q2_K and Q3_K, which are only read.
//
// The bytes are those of ggml's reference quantizers without an importance matrix, as ggml has them on x86.
// These round every product before it is added to something, so a fused multiply-add would change bits here
// and there. Products that are added later are therefore made by product() or rounded(), which keep the
// compiler from fusing them. Sums go from the first element to the last, because their order changes bits
// too.
#pragma once

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "llmc/quant_formats.h"
#include "llmc/safetensors.h"

namespace ggml {

// ---- arithmetic without fused multiply-adds

// f(0) to f(N - 1). The compiler has to believe that the array may change after that, so it really rounds
// these products.
template <size_t N, class F>
std::array<float, N> rounded(F&& f) {
    std::array<float, N> x;
    for (size_t i = 0; i < N; i++) x[i] = f(i);
    asm("" : "+m"(x));
    return x;
}
// The product, rounded.
inline float product(float a, float b) {
    return rounded<1>([=](size_t) { return a * b; })[0];
}
template <size_t N>
float sum_in_order(const std::array<float, N>& x) {
    float sum = 0;
    for (const float value : x) sum += value;
    return sum;
}
// The sum of f(0) to f(N - 1), each rounded.
template <size_t N, class F>
float sum_rounded(F&& f) {
    return sum_in_order(rounded<N>(f));
}

// The bits of the fp16 nearest to x, ties to even. Beyond fp16's range: an infinity.
inline uint16_t signed_half_bits(float x) {
    return static_cast<uint16_t>(half_bits(std::fabs(x)) | (std::signbit(x) ? 0x8000 : 0));
}
// Writes x as fp16, and returns the value that was written.
inline float put_half(unsigned char* to, float x) {
    const uint16_t bits = signed_half_bits(x);
    std::memcpy(to, &bits, 2);
    return half_to_float(bits);
}
// The nearest integer, ties to even, between `low` and `high`.
inline int nearest(float x, int low, int high) {
    return std::clamp(static_cast<int>(std::nearbyint(x)), low, high);
}
// The element with the largest magnitude, the first of them, with its sign.
template <size_t N>
float largest_of(const float* x) {
    float largest = 0;
    for (size_t i = 0; i < N; i++)
        if (std::fabs(largest) < std::fabs(x[i])) largest = x[i];
    return largest;
}

// ---- blocks of 32

// Writes 32 numbers of `kBits` bits. The first 16 have the low halves of 16 bytes, the others the high
// halves; fifth bits are in 4 bytes before them.
template <int kBits>
void put_numbers(unsigned char* to, const std::array<unsigned, 32>& q) {
    unsigned char* const halves = to + (kBits == 5 ? 4 : 0);
    uint32_t fifth = 0;
    for (unsigned k = 0; k < 16; k++) {
        halves[k] = static_cast<unsigned char>((q[k] & 15) | (q[k + 16] & 15) << 4);
        fifth |= (q[k] >> 4 & 1) << k | (q[k + 16] >> 4 & 1) << (k + 16);
    }
    if constexpr (kBits == 5) std::memcpy(to, &fifth, 4);
}

// Q4_0 and Q5_0: w = d (q - 2^(kBits - 1)). The scale maps the element with the largest magnitude to the
// lowest number.
template <int kBits>
void quantize_block_of_32(unsigned char* to, const float* x) {
    constexpr int kMiddle = 1 << (kBits - 1), kMost = (1 << kBits) - 1;
    const float scale = largest_of<32>(x) / -kMiddle, inverse = scale != 0 ? 1 / scale : 0;
    put_half(to, scale);
    const auto scaled = rounded<32>([&](size_t k) { return x[k] * inverse; });
    std::array<unsigned, 32> q;
    for (size_t k = 0; k < 32; k++) {
        const auto cut = static_cast<int8_t>(static_cast<int>(scaled[k] + (kMiddle + 0.5f)));
        q[k] = static_cast<unsigned>(std::min<int>(kMost, cut));
    }
    put_numbers<kBits>(to + 2, q);
}

// Q4_1 and Q5_1: w = d q + m. The lowest element is m, and the scale maps the highest to the highest number.
template <int kBits>
void quantize_block_with_minimum(unsigned char* to, const float* x) {
    constexpr int kMost = (1 << kBits) - 1;
    const float low = *std::min_element(x, x + 32), high = *std::max_element(x, x + 32);
    const float scale = (high - low) / kMost, inverse = scale != 0 ? 1 / scale : 0;
    put_half(to, scale), put_half(to + 2, low);
    const auto scaled = rounded<32>([&](size_t k) { return (x[k] - low) * inverse; });
    std::array<unsigned, 32> q;
    for (size_t k = 0; k < 32; k++) {
        const auto cut = static_cast<uint8_t>(static_cast<int>(scaled[k] + 0.5f));
        q[k] = std::min<unsigned>(kMost, cut);
    }
    put_numbers<kBits>(to + 4, q);
}

// ---- Q4_K and Q5_K

// A scale and a minimum with x ~ scale q - minimum for 32 elements, and the numbers q.
struct ScaleAndMinimum {
    float scale, minimum;
    std::array<int, 32> q;
};

// The weighted squared error of scale q + low. Larger elements count more.
inline float error_of(const float* x, const std::array<float, 32>& weights, const std::array<int, 32>& q,
                      float scale, float low) {
    const auto scaled = rounded<32>([&](size_t i) { return scale * static_cast<float>(q[i]); });
    return sum_rounded<32>([&](size_t i) {
        const float difference = scaled[i] + low - x[i];
        return weights[i] * (difference * difference);
    });
}

// Sums over the elements that a weighted least-squares fit of x by scale q + low needs.
struct FitSums {
    float q, qq, qx;
    FitSums(const float* x, const std::array<float, 32>& weights, const std::array<int, 32>& numbers) {
        const auto w_q = rounded<32>([&](size_t i) { return weights[i] * static_cast<float>(numbers[i]); });
        q = sum_in_order(w_q);
        qq = sum_rounded<32>([&](size_t i) { return w_q[i] * static_cast<float>(numbers[i]); });
        qx = sum_rounded<32>([&](size_t i) { return w_q[i] * x[i]; });
    }
};

// The weights of 32 elements in the error: larger elements count more.
inline std::array<float, 32> weights_of(const float* x) {
    const float root = std::sqrt(sum_rounded<32>([&](size_t i) { return x[i] * x[i]; }) / 32);
    return rounded<32>([&](size_t i) { return root + std::fabs(x[i]); });
}

// Numbers go up to kMost. Starts from the range of the elements, then tries 21 scales around it, or 16 with
// numbers of 5 bits: fits scale and minimum to the numbers that each gives, and takes the fit with the
// smallest error. A better minimum also counts for later trials.
template <int kMost>
ScaleAndMinimum fit_scale_and_minimum(const float* x) {
    constexpr int kSteps = kMost == 15 ? 20 : 15;
    constexpr float kFirst = kMost == 15 ? -1.f : -0.5f;
    const std::array<float, 32> weights = weights_of(x);
    const float sum_w = sum_in_order(weights);
    const float sum_x = sum_rounded<32>([&](size_t i) { return weights[i] * x[i]; });
    const float highest = *std::max_element(x, x + 32);
    float low = std::min(*std::min_element(x, x + 32), 0.f), scale = 0, least_error = 0;
    std::array<int, 32> numbers = {};
    if (highest == low) return {0, -low, numbers};
    const auto numbers_at = [&](float inverse) {
        std::array<int, 32> q;
        for (size_t i = 0; i < 32; i++) q[i] = nearest(inverse * (x[i] - low), 0, kMost);
        return q;
    };
    const float range_inverse = kMost / (highest - low);
    scale = 1 / range_inverse;
    numbers = numbers_at(range_inverse);
    least_error = error_of(x, weights, numbers, scale, low);
    for (int step = 0; step <= kSteps; step++) {
        const float most = kFirst + product(0.1f, static_cast<float>(step)) + kMost;
        const std::array<int, 32> q = numbers_at(most / (highest - low));
        const FitSums s(x, weights, q);
        const float determinant = product(sum_w, s.qq) - product(s.q, s.q);
        if (!(determinant > 0)) continue;
        float fitted = (product(sum_w, s.qx) - product(sum_x, s.q)) / determinant;
        float fitted_low = (product(s.qq, sum_x) - product(s.q, s.qx)) / determinant;
        if (fitted_low > 0) fitted_low = 0, fitted = s.qx / s.qq;
        const float error = error_of(x, weights, q, fitted, fitted_low);
        if (error < least_error) least_error = error, scale = fitted, low = fitted_low, numbers = q;
    }
    return {scale, -low, numbers};
}

// Writes the 6-bit scales and minimums of the eight parts; Q45_K::decode() describes where they are.
inline void put_scales(unsigned char* to, const std::array<int, 8>& scales,
                       const std::array<int, 8>& minimums) {
    std::memset(to, 0, 12);
    for (size_t j = 0; j < 4; j++) {
        to[j] = static_cast<unsigned char>(scales[j] | scales[j + 4] >> 4 << 6);
        to[j + 4] = static_cast<unsigned char>(minimums[j] | minimums[j + 4] >> 4 << 6);
        to[j + 8] = static_cast<unsigned char>((scales[j + 4] & 15) | (minimums[j + 4] & 15) << 4);
    }
}

template <int kMost>
void quantize_q45_k_block(unsigned char* to, const float* x) {
    std::array<ScaleAndMinimum, 8> parts;
    float largest_scale = 0, largest_minimum = 0;
    for (size_t j = 0; j < 8; j++) {
        parts[j] = fit_scale_and_minimum<kMost>(x + 32 * j);
        largest_scale = std::max(largest_scale, parts[j].scale);
        largest_minimum = std::max(largest_minimum, parts[j].minimum);
    }
    const float of_scales = largest_scale > 0 ? 63 / largest_scale : 0;
    const float of_minimums = largest_minimum > 0 ? 63 / largest_minimum : 0;
    std::array<int, 8> scales, minimums;
    for (size_t j = 0; j < 8; j++) {
        // In ggml a scale below zero, which is rare, becomes a large unsigned byte, and so 63.
        const auto in_63 = [](float value) {
            return std::min<int>(63, static_cast<uint8_t>(std::nearbyint(value)));
        };
        scales[j] = in_63(of_scales * parts[j].scale);
        minimums[j] = in_63(of_minimums * parts[j].minimum);
    }
    const float of_scale = put_half(to, largest_scale / 63),
                of_minimum = put_half(to + 2, largest_minimum / 63);
    put_scales(to + 4, scales, minimums);
    for (size_t j = 0; j < 8; j++) {
        const float scale = of_scale * static_cast<float>(scales[j]);
        if (scale == 0) continue;  // the numbers of the fit stay
        const float minimum = product(of_minimum, static_cast<float>(minimums[j]));
        for (size_t k = 0; k < 32; k++) parts[j].q[k] = nearest((x[32 * j + k] + minimum) / scale, 0, kMost);
    }
    constexpr size_t kNumbers = kMost == 31 ? 48 : 16;
    std::memset(to + 16, 0, kNumbers - 16);
    for (size_t j = 0; j < 8; j += 2)
        for (size_t k = 0; k < 32; k++) {
            const int low = parts[j].q[k], high = parts[j + 1].q[k];
            to[kNumbers + 16 * j + k] = static_cast<unsigned char>((low & 15) | (high & 15) << 4);
            if (kMost == 31) to[16 + k] |= static_cast<unsigned char>((low >> 4 | high >> 4 << 1) << j);
        }
}

// ---- Q6_K

// ggml takes parts whose elements are all smaller than this as zero.
constexpr float kTiny = 1e-15f;

// Sums for the scale of a weighted least-squares fit of 16 elements by scale q, where elements weigh as much
// as their squares.
struct ScaleSums {
    float qx, qq;
    ScaleSums(const float* x, const std::array<float, 16>& q) {
        qx = sum_rounded<16>([&](size_t i) { return x[i] * x[i] * x[i] * q[i]; });
        qq = sum_rounded<16>([&](size_t i) { return x[i] * x[i] * q[i] * q[i]; });
    }
};

// The scale of 16 elements, and their numbers from -32 to 31: the best of 19 scales around the one that maps
// the element with the largest magnitude to -32.
inline float fit_scale(const float* x, int* numbers) {
    const float largest = largest_of<16>(x);
    std::fill(numbers, numbers + 16, -32);  // as ggml has it where all are zero
    if (std::fabs(largest) < kTiny) return 0;
    const auto numbers_at = [&](float inverse) {
        std::array<float, 16> q;
        for (size_t i = 0; i < 16; i++) q[i] = static_cast<float>(nearest(inverse * x[i], -32, 31));
        return q;
    };
    std::array<float, 16> best = numbers_at(-32 / largest);
    const ScaleSums first(x, best);
    float scale = first.qq != 0 ? first.qx / first.qq : 0, gain = scale * first.qx;
    for (int step = -9; step <= 9; step++) {
        if (step == 0) continue;
        const std::array<float, 16> q = numbers_at(-(32 + product(0.1f, static_cast<float>(step))) / largest);
        const ScaleSums s(x, q);
        if (!(s.qq > 0 && s.qx * s.qx > gain * s.qq)) continue;
        scale = s.qx / s.qq, gain = scale * s.qx, best = q;
    }
    for (size_t i = 0; i < 16; i++) numbers[i] = static_cast<int>(best[i]);
    return scale;
}

inline void quantize_q6_k_block(unsigned char* to, const float* x) {
    std::array<float, 16> scales;
    std::array<int, 256> q;
    for (size_t j = 0; j < 16; j++) scales[j] = fit_scale(x + 16 * j, q.data() + 16 * j);
    const float largest = largest_of<16>(scales.data());
    std::memset(to, 0, Q6_K::kBlockBytes);
    if (std::fabs(largest) < kTiny) return;
    const float inverse = -128 / largest;
    const float of_all = put_half(to + 208, 1 / inverse);
    for (size_t j = 0; j < 16; j++) {
        const int scale = std::min(127, static_cast<int>(std::nearbyint(inverse * scales[j])));
        to[192 + j] = static_cast<unsigned char>(static_cast<signed char>(scale));
        const float all = of_all * static_cast<float>(static_cast<signed char>(scale));
        if (all == 0) continue;  // the numbers of the fit stay
        for (size_t k = 16 * j; k < 16 * j + 16; k++) q[k] = nearest(x[k] / all, -32, 31);
    }
    for (size_t half = 0; half < 2; half++)
        for (size_t k = 0; k < 32; k++) {
            unsigned n[4];
            for (size_t quarter = 0; quarter < 4; quarter++)
                n[quarter] = static_cast<unsigned>(q[128 * half + 32 * quarter + k] + 32);
            to[64 * half + k] = static_cast<unsigned char>((n[0] & 15) | (n[2] & 15) << 4);
            to[64 * half + 32 + k] = static_cast<unsigned char>((n[1] & 15) | (n[3] & 15) << 4);
            to[128 + 32 * half + k] =
                static_cast<unsigned char>(n[0] >> 4 | n[1] >> 4 << 2 | n[2] >> 4 << 4 | n[3] >> 4 << 6);
        }
}

// ---- IQ4_NL

// The number of the value nearest to x.
inline unsigned nearest_value(float x) {
    int next = 1;
    while (next < 15 && x >= IQ4_NL::value(next)) next++;
    return static_cast<unsigned>(x - IQ4_NL::value(next - 1) < IQ4_NL::value(next) - x ? next - 1 : next);
}

// Tries the scale that maps the element with the largest magnitude to 127, and 15 that map it to -134 to
// -120, and takes the best fit. Elements weigh as much as their squares.
inline void quantize_iq4_nl_block(unsigned char* to, const float* x) {
    const float largest = largest_of<32>(x), lowest = IQ4_NL::value(0);
    float scale = 0, gain = -1;
    const auto fit = [&](float inverse) {
        std::array<float, 32> w;
        for (size_t i = 0; i < 32; i++) w[i] = IQ4_NL::value(static_cast<int>(nearest_value(inverse * x[i])));
        const float qx = sum_rounded<32>([&](size_t i) { return x[i] * x[i] * w[i] * x[i]; });
        const float qq = sum_rounded<32>([&](size_t i) { return x[i] * x[i] * w[i] * w[i]; });
        if (qq > 0 && qx * qx > gain * qq) scale = qx / qq, gain = scale * qx;
    };
    if (std::fabs(largest) >= kTiny) {
        fit(1 / (-largest / lowest));
        for (int step = -7; step <= 7; step++) fit((static_cast<float>(step) + lowest) / largest);
    }
    put_half(to, scale);
    const float inverse = scale != 0 ? 1 / scale : 0;
    std::array<unsigned, 32> q;
    for (size_t i = 0; i < 32; i++) q[i] = nearest_value(inverse * x[i]);
    put_numbers<4>(to + 2, q);
}

// Calls quantize(to, x) for each block, in parallel.
template <class Blocks, class Quantize>
void for_each_block(unsigned char* out, const float* x, int64_t n, Quantize&& quantize) {
#pragma omp parallel for
    for (int64_t b = 0; b < n / Blocks::kElements; b++)
        quantize(out + b * Blocks::kBlockBytes, x + b * Blocks::kElements);
}
}  // namespace ggml

// Writes n elements, whole blocks, to host memory in a format of GGUF files. Returns the first element that
// fp16 cannot hold, if the format is F16; else -1. Elements must be finite.
inline int64_t encode_ggml(const WeightFormat& format, unsigned char* out, const float* x, int64_t n) {
    if (&format == &kStoredF32) {
        std::memcpy(out, x, static_cast<size_t>(n) * 4);
    } else if (&format == &kStoredBf16) {
        for (int64_t i = 0; i < n; i++) {
            const bf16 rounded = from_float<bf16>(x[i]);
            std::memcpy(out + 2 * i, &rounded, 2);
        }
    } else if (&format == &kStoredF16) {
        for (int64_t i = 0; i < n; i++) {
            ggml::put_half(out + 2 * i, x[i]);
            if (std::fabs(x[i]) >= 65520) return i;
        }
    } else if (&format == &kQ8_0) {
        quantize_q8_0(out, x, n);
    } else if (&format == &kQ4_0) {
        ggml::for_each_block<Q4_0>(out, x, n, ggml::quantize_block_of_32<4>);
    } else if (&format == &kQ5_0) {
        ggml::for_each_block<Q5_0>(out, x, n, ggml::quantize_block_of_32<5>);
    } else if (&format == &kQ4_1) {
        ggml::for_each_block<Q4_1>(out, x, n, ggml::quantize_block_with_minimum<4>);
    } else if (&format == &kQ5_1) {
        ggml::for_each_block<Q5_1>(out, x, n, ggml::quantize_block_with_minimum<5>);
    } else if (&format == &kIQ4_NL) {
        ggml::for_each_block<IQ4_NL>(out, x, n, ggml::quantize_iq4_nl_block);
    } else if (&format == &kQ4_K) {
        ggml::for_each_block<Q4_K>(out, x, n, ggml::quantize_q45_k_block<15>);
    } else if (&format == &kQ5_K) {
        ggml::for_each_block<Q5_K>(out, x, n, ggml::quantize_q45_k_block<31>);
    } else {
        assert(&format == &kQ6_K);
        ggml::for_each_block<Q6_K>(out, x, n, ggml::quantize_q6_k_block);
    }
    return -1;
}
