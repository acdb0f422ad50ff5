// quant_ggml.cuh - the quantized formats of GGUF files, as ggml and PyPI's gguf (gguf/quants.py) read them.
//
// A matrix is stored as nothing but its blocks, as in the file; a row is a whole number of blocks. In bytes:
//
//     Q8_0   32 elements   d (fp16), 32 int8                                       w = d q
//     Q4_0   32            d, 16 bytes of two numbers                              w = d (q - 8)
//     Q4_1   32            d, m (fp16), 16 bytes                                   w = d q + m
//     Q5_0   32            d, 4 bytes of fifth bits, 16 bytes                      w = d (q - 16)
//     Q5_1   32            d, m, 4 bytes of fifth bits, 16 bytes                   w = d q + m
//     IQ4_NL 32            d, 16 bytes of two numbers                              w = d value(q)
//     Q2_K   256           16 bytes of s and t (4 bits), 64 bytes (2 bits), d, m   w = d s q - m t
//     Q3_K   256           32 bytes (high bits), 64 bytes (2 bits), 12 of s, d     w = d (s - 32) (q - 4)
//     Q4_K   256           d, m, 12 bytes of scales s and t (6 bits), 128 bytes    w = d s q - m t
//     Q5_K   256           d, m, 12 of s and t, 32 bytes (fifth bits), 128 bytes   w = d s q - m t
//     Q6_K   256           128 bytes (4 bits), 64 bytes (2 bits), 16 scales s, d   w = d s (q - 32)
//
// All products here are exact in fp32, so results have the same bits with and without fused multiply-add.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "llmc/quant_matrix.h"

// What the decoders have in common: a matrix as blocks.
template <int kBlock, int kBytes>
struct GgmlBlocks {
    static constexpr int kElements = kBlock, kBlockBytes = kBytes;
    static constexpr int kD = 0, kM = -1;  // where d and m are in a block; -1: it has no m
    const unsigned char* data;

    explicit GgmlBlocks(const QuantizedView& w) : data(w.data) {}
    static int64_t bytes(int64_t elements) { return aligned_part(elements / kBlock * kBytes); }

    // The block of element i.
    SIMT_DEVICE const unsigned char* block(int64_t i) const { return data + divided(i, kBlock) * kBytes; }
    const unsigned char* place(int64_t i) const { return block(i); }
};

struct Q8_0 : GgmlBlocks<32, 34> {
    using GgmlBlocks::GgmlBlocks;
    template <int N>
    SIMT_DEVICE void decode(float (&w)[N], int64_t i) const {
        const unsigned char* const b = block(i);
        const float d = half_at(b);
        float q[N];
        load_signed<N>(q, b + 2 + remainder_of(i, 32));
        for (int k = 0; k < N; k++) w[k] = d * q[k];
    }
};

// Loads N of 32 numbers of 4 bits, from number `at` on. The first 16 are the low halves of the 16 bytes, the
// others the high halves.
template <int N>
SIMT_DEVICE void load_halves(float (&q)[N], const unsigned char* bytes, unsigned at) {
    if constexpr (N == 32) {
        load_numbers<16>(q, bytes, 0, 15);
        load_numbers<16>(q + 16, bytes, 4, 15);
    } else {
        load_numbers<N>(q, bytes + at % 16, at / 16 * 4, 15);
    }
}

struct Q4_0 : GgmlBlocks<32, 18> {
    using GgmlBlocks::GgmlBlocks;
    template <int N>
    SIMT_DEVICE void decode(float (&w)[N], int64_t i) const {
        const unsigned char* const b = block(i);
        const float d = half_at(b);
        float q[N];
        load_halves(q, b + 2, remainder_of(i, 32));
        for (int k = 0; k < N; k++) w[k] = d * (q[k] - 8.f);
    }
};

struct Q4_1 : GgmlBlocks<32, 20> {
    using GgmlBlocks::GgmlBlocks;
    static constexpr int kM = 2;
    template <int N>
    SIMT_DEVICE void decode(float (&w)[N], int64_t i) const {
        const unsigned char* const b = block(i);
        const float d = half_at(b), m = half_at(b + 2);
        float q[N];
        load_halves(q, b + 4, remainder_of(i, 32));
        for (int k = 0; k < N; k++) w[k] = d * q[k] + m;
    }
};

// Loads N of 32 numbers of 5 bits, less `middle`: 4 bytes of fifth bits, then 16 bytes as above.
template <int N>
SIMT_DEVICE void load_with_fifth(float (&q)[N], const unsigned char* bytes, unsigned at, float middle) {
    load_halves(q, bytes + 4, at);
    uint32_t fifth = 0;  // bit k is that of number k
    for (int k = 3; k >= 0; k--) fifth = fifth << 8 | bytes[k];
    for (int k = 0; k < N; k++) q[k] += fifth >> (at + k) & 1 ? 16.f - middle : -middle;
}

struct Q5_0 : GgmlBlocks<32, 22> {
    using GgmlBlocks::GgmlBlocks;
    template <int N>
    SIMT_DEVICE void decode(float (&w)[N], int64_t i) const {
        const unsigned char* const b = block(i);
        const float d = half_at(b);
        float q[N];
        load_with_fifth(q, b + 2, remainder_of(i, 32), 16);
        for (int k = 0; k < N; k++) w[k] = d * q[k];
    }
};

struct Q5_1 : GgmlBlocks<32, 24> {
    using GgmlBlocks::GgmlBlocks;
    static constexpr int kM = 2;
    template <int N>
    SIMT_DEVICE void decode(float (&w)[N], int64_t i) const {
        const unsigned char* const b = block(i);
        const float d = half_at(b), m = half_at(b + 2);
        float q[N];
        load_with_fifth(q, b + 4, remainder_of(i, 32), 0);
        for (int k = 0; k < N; k++) w[k] = d * q[k] + m;
    }
};

struct IQ4_NL : GgmlBlocks<32, 18> {
    using GgmlBlocks::GgmlBlocks;
    // -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89 and 113, closer to each other near
    // zero, where most weights are. As bytes of two constants they take no memory on a GPU.
    static constexpr uint64_t kLow = 0xf6eaddcfbfad9881, kHigh = 0x7159453526190d01;
    SIMT_HOST_DEVICE static float value(int q) {
        return static_cast<float>(static_cast<signed char>((q < 8 ? kLow : kHigh) >> (q & 7) * 8 & 255));
    }
    template <int N>
    SIMT_DEVICE void decode(float (&w)[N], int64_t i) const {
        const unsigned char* const b = block(i);
        const float d = half_at(b);
        float q[N];
        load_halves(q, b + 2, remainder_of(i, 32));
#if defined(SIMT_AVX512)
        if constexpr (N % 16 == 0) {  // g++ would gather
            const __m512i bytes = _mm512_maskz_cvtepi8_epi32(0xffff, _mm_set_epi64x(kHigh, kLow));
            const __m512 table = _mm512_maskz_cvtepi32_ps(0xffff, bytes), scale = _mm512_set1_ps(d);
            for (int k = 0; k < N; k += 16) {
                const __m512i number = _mm512_maskz_cvttps_epi32(0xffff, _mm512_loadu_ps(q + k));
                const __m512 value = _mm512_maskz_permutexvar_ps(0xffff, number, table);
                _mm512_storeu_ps(w + k, _mm512_mul_ps(value, scale));
            }
            return;
        }
#endif
        for (int k = 0; k < N; k++) w[k] = d * value(static_cast<int>(q[k]));
    }
};

// A block is two halves of 128 elements, and a half is four quarters, whose numbers are in the same 32 bytes.
// 16 elements share s and t.
struct Q2_K : GgmlBlocks<256, 84> {
    using GgmlBlocks::GgmlBlocks;
    static constexpr int kD = 80, kM = 82;
    template <int N>
    SIMT_DEVICE void decode(float (&w)[N], int64_t i) const {
        const unsigned char* const b = block(i);
        const unsigned at = remainder_of(i, 256);
        const float d = half_at(b + kD), m = half_at(b + kM);
        float q[N];
        load_numbers<N>(q, b + 16 + at / 128 * 32 + at % 32, at / 32 % 4 * 2, 3);
        for (int first = 0; first < N; first += 16) {
            const int s = b[(at + first) / 16];
            const float scale = d * static_cast<float>(s & 15), low = m * static_cast<float>(s >> 4);
            for (int k = first; k < N && k < first + 16; k++) w[k] = scale * q[k] - low;
        }
    }
};

// The low bits are as in Q2_K. Each of the first 32 bytes has the high bits of eight elements, which are 32
// apart. The scales' low 4 bits are in 8 bytes, two in each, and their high 2 bits in 4 bytes, four in each.
struct Q3_K : GgmlBlocks<256, 110> {
    using GgmlBlocks::GgmlBlocks;
    static constexpr int kD = 108;
    template <int N>
    SIMT_DEVICE void decode(float (&w)[N], int64_t i) const {
        const unsigned char *const b = block(i), *const scales = b + 96;
        const unsigned at = remainder_of(i, 256);
        const float d = half_at(b + kD);
        float low[N], high[N];
        load_numbers<N>(low, b + 32 + at / 128 * 32 + at % 32, at / 32 % 4 * 2, 3);
        load_numbers<N>(high, b + at % 32, at / 32, 1);
        for (int first = 0; first < N; first += 16) {
            const unsigned part = (at + first) / 16;
            const int s_low = scales[part % 8] >> part / 8 * 4 & 15;
            const int s_high = scales[8 + part % 4] >> part / 4 * 2 & 3;
            const float scale = d * static_cast<float>(s_low + 16 * s_high - 32);
            for (int k = first; k < N && k < first + 16; k++) w[k] = scale * (low[k] + 4.f * high[k] - 4.f);
        }
    }
};

// Q4_K and Q5_K. A block has eight parts of 32 elements, each with its own scales. Two parts are the low and
// the high halves of 32 bytes. The fifth bits of element k of all parts are in byte k.
template <bool kFifth>
struct Q45_K : GgmlBlocks<256, kFifth ? 176 : 144> {
    using Blocks = GgmlBlocks<256, kFifth ? 176 : 144>;
    using Blocks::Blocks;
    static constexpr int kM = 2;
    template <int N>
    SIMT_DEVICE void decode(float (&w)[N], int64_t i) const {
        const unsigned char *const b = this->block(i), *const scales = b + 4;
        const unsigned at = remainder_of(i, 256), part = at / 32;
        // The first four parts have the low 6 bits of a byte. The last four have 4 bits of another byte, and
        // above them the 2 bits that the first four leave.
        const int s_byte = scales[part % 4], t_byte = scales[4 + part % 4], low = scales[4 + part];
        const bool first = part < 4;
        const int s = first ? s_byte & 63 : s_byte >> 6 << 4 | (low & 15);
        const int t = first ? t_byte & 63 : t_byte >> 6 << 4 | low >> 4;
        const float d = half_at(b) * static_cast<float>(s), m = half_at(b + 2) * static_cast<float>(t);
        float q[N];
        load_numbers<N>(q, b + (kFifth ? 48 : 16) + at / 64 * 32 + at % 32, part % 2 * 4, 15);
        if constexpr (kFifth) {
            float fifth[N];
            load_numbers<N>(fifth, b + 16 + at % 32, part, 1);
            for (int k = 0; k < N; k++) q[k] += 16.f * fifth[k];
        }
        for (int k = 0; k < N; k++) w[k] = d * q[k] - m;
    }
};
using Q4_K = Q45_K<false>;
using Q5_K = Q45_K<true>;

// A block is two halves of 128 elements, and a half is four quarters. A half has 64 bytes, each with the low
// bits of two quarters, and 32 bytes, each with the high bits of all four. 16 elements share a scale.
struct Q6_K : GgmlBlocks<256, 210> {
    using GgmlBlocks::GgmlBlocks;
    static constexpr int kD = 208;
    template <int N>
    SIMT_DEVICE void decode(float (&w)[N], int64_t i) const {
        const unsigned char* const b = block(i);
        const unsigned at = remainder_of(i, 256), half = at / 128, quarter = at / 32 % 4;
        const float d = half_at(b + 208);
        float low[N], high[N];
        load_numbers<N>(low, b + half * 64 + quarter % 2 * 32 + at % 32, quarter / 2 * 4, 15);
        load_numbers<N>(high, b + 128 + half * 32 + at % 32, quarter * 2, 3);
        for (int first = 0; first < N; first += 16) {
            const float scale = d * static_cast<float>(static_cast<signed char>(b[192 + (at + first) / 16]));
            for (int k = first; k < N && k < first + 16; k++) w[k] = scale * (low[k] + 16.f * high[k] - 32.f);
        }
    }
};

template <class Blocks>
constexpr WeightFormat ggml_format(const char* name, const char* file_type, int ggml_type) {
    WeightFormat format =
        quantized_format<Blocks>(name, file_type, ggml_type, Blocks::kElements, Blocks::kBlockBytes);
    format.halves[0] = Blocks::kD, format.halves[1] = Blocks::kM;
    return format;
}
inline constexpr WeightFormat kQ4_0 = ggml_format<Q4_0>("q4_0", "Q4_0", 2);
inline constexpr WeightFormat kQ4_1 = ggml_format<Q4_1>("q4_1", "Q4_1", 3);
inline constexpr WeightFormat kQ5_0 = ggml_format<Q5_0>("q5_0", "Q5_0", 6);
inline constexpr WeightFormat kQ5_1 = ggml_format<Q5_1>("q5_1", "Q5_1", 7);
inline constexpr WeightFormat kQ8_0 = ggml_format<Q8_0>("q8_0", "Q8_0", 8);
inline constexpr WeightFormat kQ2_K = ggml_format<Q2_K>("q2_k", "Q2_K", 10);
inline constexpr WeightFormat kQ3_K = ggml_format<Q3_K>("q3_k", "Q3_K", 11);
inline constexpr WeightFormat kQ4_K = ggml_format<Q4_K>("q4_k", "Q4_K", 12);
inline constexpr WeightFormat kQ5_K = ggml_format<Q5_K>("q5_k", "Q5_K", 13);
inline constexpr WeightFormat kQ6_K = ggml_format<Q6_K>("q6_k", "Q6_K", 14);
inline constexpr WeightFormat kIQ4_NL = ggml_format<IQ4_NL>("iq4_nl", "IQ4_NL", 20);

// The bits of the fp16 nearest to x >= 0, ties to even; an infinity from 65520 on.
inline uint16_t half_bits(float x) {
    if (x < 0x1p-14f) return static_cast<uint16_t>(std::nearbyint(x * 0x1p24f));  // a subnormal
    const auto bits = std::bit_cast<uint32_t>(x);
    return static_cast<uint16_t>(std::min((bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13, 0x7c00u));
}

// 1 / scale, or 0 if that would be an infinity: the scale is 0 in fp16 then.
inline float inverse_of(float scale) {
    const float inverse = 1 / scale;
    return inverse <= std::numeric_limits<float>::max() ? inverse : 0;
}

// Writes n elements, whole blocks, to host memory as Q8_0: the same bytes as PyPI's gguf. The scale is the
// largest magnitude / 127. Elements are divided by it before it is rounded to fp16.
template <class T>
void quantize_q8_0(unsigned char* out, const T* w, int64_t n) {
#pragma omp parallel for
    for (int64_t b = 0; b < n / Q8_0::kElements; b++) {
        const T* const x = w + b * Q8_0::kElements;
        unsigned char* const to = out + b * Q8_0::kBlockBytes;
        float largest = 0;
        for (int k = 0; k < Q8_0::kElements; k++) largest = std::max(largest, std::fabs(to_float(x[k])));
        const float scale = largest / 127, inverse = inverse_of(scale);
        const uint16_t half = half_bits(scale);
        to[0] = static_cast<unsigned char>(half & 255), to[1] = static_cast<unsigned char>(half >> 8);
        for (int k = 0; k < Q8_0::kElements; k++)
            to[2 + k] =
                static_cast<unsigned char>(static_cast<signed char>(std::round(to_float(x[k]) * inverse)));
    }
}
