// quant_nf4.cuh - NF4, the 4-bit format of QLoRA (Dettmers et al., arXiv:2305.14314), as bitsandbytes
// computes it.
//
// A matrix is cut into blocks of 64 elements, row-major, across the ends of rows; the last may be shorter. A
// block has a scale, its largest magnitude. An element is stored as the number of one of 16 values: the one
// that, times the scale, is nearest. With double quantization ("nf4-double") the scales are stored as 8-bit
// codes of their differences from their mean, in blocks of 256 that share a scale of their own. In memory the
// parts follow one another, each as in bitsandbytes' files (quant_nf4_files.h) and aligned to 16 bytes:
//
//     codes          ceil(n / 2)       two elements a byte, the first in its high half
//     absmax         ceil(n / 64)      fp32; nf4-double: an 8-bit code of nested_map
//     quant_map      16                fp32: the values
//     nested_absmax  ceil(n / 16384)   fp32; this and what follows for nf4-double alone
//     nested_map     256               fp32: the values of the scales' codes
//     nested_offset  1                 fp32: the mean of the scales
#pragma once

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <vector>

#include "llmc/quant_matrix.h"

constexpr int kNf4Block = 64, kNf4NestedBlock = 256, kNf4NestedValues = 256;

// The values: quantiles of the normal distribution, one of them zero, scaled to [-1, 1].
inline constexpr std::array<float, 16> kNf4Values = {-1.f,
                                                     -0.6961928009986877f,
                                                     -0.5250730514526367f,
                                                     -0.39491748809814453f,
                                                     -0.28444138169288635f,
                                                     -0.18477343022823334f,
                                                     -0.09105003625154495f,
                                                     0.f,
                                                     0.07958029955625534f,
                                                     0.16093020141124725f,
                                                     0.24611230194568634f,
                                                     0.33791524171829224f,
                                                     0.44070982933044434f,
                                                     0.5626170039176941f,
                                                     0.7229568362236023f,
                                                     1.f};

// Where the parts of a matrix of n elements begin, in bytes from its start.
struct Nf4Parts {
    int64_t blocks, nested_blocks;
    int64_t codes = 0, absmax, quant_map, nested_absmax, nested_map, nested_offset, end;

    Nf4Parts(int64_t n, bool is_double)
        : blocks(ceil_div(n, kNf4Block)), nested_blocks(is_double ? ceil_div(blocks, kNf4NestedBlock) : 0) {
        absmax = aligned_part(ceil_div(n, 2));
        quant_map = absmax + aligned_part(blocks * (is_double ? 1 : 4));
        nested_absmax = quant_map + aligned_part(sizeof kNf4Values);
        nested_map = nested_absmax + aligned_part(nested_blocks * 4);
        nested_offset = nested_map + (is_double ? kNf4NestedValues * 4 : 0);
        end = nested_offset + (is_double ? aligned_part(4) : 0);
    }
};

template <bool kDouble>
struct Nf4Decoder {
    const unsigned char* codes;
    const float* values;
    const void* absmax;
    const float *nested_absmax, *nested_values, *nested_offset;

    explicit Nf4Decoder(const QuantizedView& w) {
        const Nf4Parts parts(w.elements(), kDouble);
        const auto part = [&](int64_t at) { return w.data ? w.data + at : nullptr; };
        const auto floats = [&](int64_t at) { return reinterpret_cast<const float*>(part(at)); };
        codes = part(parts.codes), values = floats(parts.quant_map), absmax = part(parts.absmax);
        nested_absmax = floats(parts.nested_absmax), nested_values = floats(parts.nested_map);
        nested_offset = floats(parts.nested_offset);
    }

    static int64_t bytes(int64_t elements) { return Nf4Parts(elements, kDouble).end; }

    // The scale of a block, with the same bits as in bitsandbytes.
    SIMT_DEVICE float scale(int64_t block) const {
        if constexpr (kDouble)
            return product_then_sum(nested_values[static_cast<const unsigned char*>(absmax)[block]],
                                    nested_absmax[divided(block, kNf4NestedBlock)], *nested_offset);
        else
            return static_cast<const float*>(absmax)[block];
    }

    const unsigned char* place(int64_t i) const { return codes + i / 2; }
    template <int N>
    SIMT_DEVICE void decode(float (&w)[N], int64_t i) const {
        const float s = scale(divided(i, kNf4Block));
        const unsigned char* const p = codes + divided(i, 2);
        if constexpr (N == 1) {
            w[0] = values[i & 1 ? *p & 15 : *p >> 4] * s;
            return;
        }
#if defined(SIMT_AVX512)
        if constexpr (N % 16 == 0) {
            const __m512 table = _mm512_loadu_ps(values), scales = _mm512_set1_ps(s);
            const __m128i mask = _mm_set1_epi8(15);
            for (int k = 0; k < N; k += 16) {
                const __m128i two = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + k / 2));
                const __m128i high = _mm_and_si128(_mm_srli_epi16(two, 4), mask);
                const __m128i numbers = _mm_unpacklo_epi8(high, _mm_and_si128(two, mask));
                const __m512i wide = _mm512_maskz_cvtepu8_epi32(0xffff, numbers);
                _mm512_storeu_ps(w + k,
                                 _mm512_mul_ps(_mm512_maskz_permutexvar_ps(0xffff, wide, table), scales));
            }
            return;
        }
#endif
        if constexpr (N > 1) {
            int two[N / 2];
            load_bytes(two, p);
            for (int k = 0; k < N; k++) w[k] = values[k & 1 ? two[k / 2] & 15 : two[k / 2] >> 4] * s;
        }
    }
};

inline constexpr WeightFormat kNf4 = quantized_format<Nf4Decoder<false>>("nf4", "nf4", -1, kNf4Block, 0);
inline constexpr WeightFormat kNf4Double =
    quantized_format<Nf4Decoder<true>>("nf4-double", "nf4", -1, kNf4Block, 0);

namespace nf4 {
// Where elements are divided by a scale, it is at least this.
constexpr float kLeastScale = 1e-38f;

// Writes the codes of a block of n <= 64 elements and returns its scale. If n is odd, the code of zero fills
// the last byte. As in bitsandbytes, a whole block is multiplied with the inverse of its scale, but a shorter
// last block is divided by its scale, which is then at least kLeastScale.
template <class T>
float quantize_block(unsigned char* codes, const T* x, int n) {
    float block[kNf4Block] = {};
    for (int k = 0; k < n; k++) block[k] = to_float(x[k]);
    float largest = 0;
    for (int k = 0; k < kNf4Block; k++) largest = std::max(largest, std::fabs(block[k]));
    const float least = std::max(largest, kLeastScale);
    const bool whole = n == kNf4Block;
    const float inverse = whole ? 1 / least : 1, scale = whole ? 1 : least;
    for (int k = 0; k < kNf4Block; k++) block[k] = block[k] * inverse / scale;
    // Counts the values whose upper neighbour is nearer to an element. Halfway, the lower value is taken.
    int numbers[kNf4Block] = {};
    for (size_t i = 0; i + 1 < kNf4Values.size(); i++) {
        const float halfway = (kNf4Values[i] + kNf4Values[i + 1]) / 2;
        for (int k = 0; k < kNf4Block; k++) numbers[k] += block[k] > halfway ? 1 : 0;
    }
    for (int k = 0; k < n; k += 2)
        codes[k / 2] = static_cast<unsigned char>(numbers[k] << 4 | numbers[k + 1]);
    return whole ? largest : least;
}

// bitsandbytes' dynamic map of signed 8-bit codes, sorted: by octaves as in state_formats.h, but with 1 and
// without -1. Boundaries are rounded once, as PyTorch's linspace rounds them.
inline std::vector<float> make_dynamic_map() {
    std::vector<float> map = {0, 1};
    for (int octave = 0; octave < 7; octave++) {
        const int steps = 1 << octave;
        const float step = (1.f - 0.1f) / static_cast<float>(steps);
        const auto boundary = [&](int i) {
            return i < (steps + 1) / 2 ? std::fma(step, static_cast<float>(i), 0.1f)
                                       : std::fma(-step, static_cast<float>(steps - i), 1.f);
        };
        const auto power = static_cast<float>(std::pow(10., octave - 6));
        for (int i = 0; i < steps; i++) {
            const float mean = (boundary(i) + boundary(i + 1)) / 2;
            map.push_back(power * mean), map.push_back(-power * mean);
        }
    }
    std::ranges::sort(map);
    return map;
}

// The mean, with the additions in PyTorch's order on one thread: four vectors of eight sums side by side, in
// four levels. After a fixed number of steps the sums of a level are added to the level above it
// (aten/src/ATen/native/cpu/SumKernel.cpp).
inline float mean(const float* x, int64_t n) {
    constexpr int kSums = 32, kLevels = 4;
    const int64_t rows = n / kSums;
    const int log = rows > 1 ? std::bit_width(static_cast<uint64_t>(rows - 1)) : 0;
    const int power = std::max(4, log / kLevels);
    float sums[kLevels][kSums] = {};
    const auto add = [&](float* to, const float* from) {
        for (int k = 0; k < kSums; k++) to[k] += from[k];
    };
    int64_t row = 0;
    while (row + (int64_t{1} << power) <= rows) {
        for (const int64_t end = row + (int64_t{1} << power); row < end; row++) add(sums[0], x + row * kSums);
        for (int level = 1; level < kLevels; level++) {
            add(sums[level], sums[level - 1]);
            std::fill_n(sums[level - 1], kSums, 0.f);
            if (row & ((int64_t{1} << power) - 1) << (level * power)) break;
        }
    }
    for (; row < rows; row++) add(sums[0], x + row * kSums);
    for (int level = 1; level < kLevels; level++) add(sums[0], sums[level]);
    float* const s = sums[0];
    int64_t i = rows * kSums;
    for (; i + 8 <= n; i += 8)
        for (int k = 0; k < 8; k++) s[k] += x[i + k];
    for (int k = 8; k < kSums; k++) s[k % 8] += s[k];
    float sum = 0;
    for (; i < n; i++) sum += x[i];
    for (int k = 0; k < 8; k++) sum += s[k];
    return sum / static_cast<float>(n);
}

// The number of the value of a sorted map that is nearest to x in [-1, 1]. bitsandbytes looks x up in a table
// of 65536 steps from -1 to 1, so x is rounded to the nearest step first.
inline unsigned char nearest(const std::vector<float>& map, float x) {
    constexpr float kLast = 65535;
    const float step = std::floor((std::clamp(x, -1.f, 1.f) + 1) * 0.5f * kLast + 0.5f);
    const float rounded = -1 + 2 * step / kLast;
    const auto above = std::lower_bound(map.begin() + 1, map.end(), rounded);  // the first not below
    if (above == map.end()) return kNf4NestedValues - 1;
    const auto number = static_cast<int>(above - map.begin());
    return static_cast<unsigned char>(0.5f * (above[-1] + *above) < rounded ? number : number - 1);
}

// Writes the codes of the scales, and the parts from which the scales are decoded.
inline void quantize_scales(unsigned char* out, const Nf4Parts& parts, const std::vector<float>& scales) {
    auto* const nested_absmax = reinterpret_cast<float*>(out + parts.nested_absmax);
    const std::vector<float> map = make_dynamic_map();
    std::copy(map.begin(), map.end(), reinterpret_cast<float*>(out + parts.nested_map));
    const float offset = mean(scales.data(), parts.blocks);
    *reinterpret_cast<float*>(out + parts.nested_offset) = offset;
    for (int64_t b = 0; b < parts.nested_blocks; b++) {
        const int64_t first = b * kNf4NestedBlock, end = std::min(first + kNf4NestedBlock, parts.blocks);
        float largest = 0;
        for (int64_t i = first; i < end; i++) largest = std::max(largest, std::fabs(scales[i] - offset));
        nested_absmax[b] = largest;
        const float inverse = 1 / largest;
        for (int64_t i = first; i < end && largest > 0; i++)  // else the codes are 0
            out[parts.absmax + i] = nearest(map, (scales[i] - offset) * inverse);
    }
}
}  // namespace nf4

// Writes a matrix of n elements in `format`, kNf4 or kNf4Double, to host memory aligned to 16 bytes;
// quantized_bytes() in all. The bytes are those that bitsandbytes 0.50 makes on a CPU with one thread.
class Nf4Quantizer {
  public:
    Nf4Quantizer(unsigned char* out, int64_t n, const WeightFormat& format)
        : out_(out), n_(n), is_double_(&format == &kNf4Double), parts_(n, is_double_) {
        std::fill(out, out + parts_.end, static_cast<unsigned char>(0));
        std::copy(kNf4Values.begin(), kNf4Values.end(), reinterpret_cast<float*>(out + parts_.quant_map));
        if (is_double_) scales_.resize(static_cast<size_t>(parts_.blocks));
    }

    // Quantizes elements from `first` on: whole blocks, except for the matrix's last.
    template <class T>
    void add(int64_t first, const T* w, int64_t count) {
        assert(first % kNf4Block == 0 && (count % kNf4Block == 0 || first + count == n_));
        float* const absmax = is_double_ ? scales_.data() : reinterpret_cast<float*>(out_ + parts_.absmax);
#pragma omp parallel for
        for (int64_t i = 0; i < count; i += kNf4Block) {
            const int block = static_cast<int>(std::min<int64_t>(kNf4Block, count - i));
            absmax[(first + i) / kNf4Block] = nf4::quantize_block(out_ + (first + i) / 2, w + i, block);
        }
    }
    // Call it after all elements.
    void finish() {
        if (is_double_ && n_ > 0) nf4::quantize_scales(out_, parts_, scales_);
    }

  private:
    unsigned char* const out_;
    const int64_t n_;
    const bool is_double_;
    const Nf4Parts parts_;
    std::vector<float> scales_;
};
