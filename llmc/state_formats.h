// state_formats.h - the formats in which a State keeps fp32 values in fewer bytes: 8-bit codes with a scale,
// for the optimizer's moments; and the low bits that extend a bf16 weight to its fp32 master weight.
// gradient_sums.cuh uses such low bits too.
#pragma once

#include <bit>
#include <cstring>

#include "llmc/simt.h"

// ---- fp32 in two parts
//
// An fp32 value in two parts: its rounding to bf16, and the following bits as a small signed difference.
//
// With 16 low bits the pair is exactly the value: a master copy of a bf16 weight that takes two bytes more.
// With 4 low bits it carries a running sum more precisely than bf16. The parts are those of the bit pattern,
// which grows with the magnitude, so a carry from the low part correctly changes bf16's exponent.

template <int kLowBits>
struct Split {
    static_assert(1 < kLowBits && kLowBits <= 16);
    bf16 high;  // the nearest bf16; of two equally near ones the larger magnitude
    int low;    // in [-2^(kLowBits - 1), 2^(kLowBits - 1))
};

// x rounded to kLowBits more bits than bf16 has. x must be finite.
template <int kLowBits>
SIMT_HOST_DEVICE Split<kLowBits> split(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if constexpr (kLowBits < 16) u = (u + (1u << (15 - kLowBits))) >> (16 - kLowBits);
    const uint32_t high = (u + (1u << (kLowBits - 1))) >> kLowBits;
    const uint16_t bits = static_cast<uint16_t>(high);
    Split<kLowBits> s;
    memcpy(static_cast<void*>(&s.high), &bits, 2);
    s.low = static_cast<int>(u - (high << kLowBits));
    return s;
}

// The value that has these parts.
template <int kLowBits>
SIMT_HOST_DEVICE float join(bf16 high, int low) {
    uint16_t bits;
    memcpy(&bits, &high, 2);
    const uint32_t u = ((uint32_t{bits} << kLowBits) + static_cast<uint32_t>(low)) << (16 - kLowBits);
    float x;
    memcpy(&x, &u, 4);
    return x;
}

// ---- 8 bits
//
// 256 values as 8-bit codes and one fp32 scale: the largest magnitude among them.
//
// The codes are dense near the largest and still reach far below it (dynamic quantization: Dettmers et al.,
// arXiv:2110.02861). Code 0 is zero; code 2^i + j, 0 <= j < 2^i, is 10^(i - top) (0.1 + 0.9 (j + 0.5) / 2^i):
// a decade has half the codes of the decade above it. All values are divided by that of the last code, so
// that the last is exactly 1 and a block's largest element is restored to the bit. Coding uses compares and
// selects, no search.

constexpr int kQuantizedBlock = 256;  // elements that share a scale

// The codes of kBits bits by octaves: code k in [2^i, 2^(i + 1)) is base[i] + step[i] k. A step has 16
// significant bits, so that its product with a code is exact and a decoded value has the same bits
// everywhere, with or without fused multiply-add.
template <int kBits>
struct DynamicMap {
    float base[kBits] = {}, step[kBits] = {};
    float inverse[kBits] = {};  // of the steps
    float from[kBits] = {};     // values from here on are nearer to octave i than to the one below it

    constexpr DynamicMap() {
        const double largest = 1 - 0.45 / (1 << (kBits - 1));
        double power = 1 / largest, first_above = 0;
        for (int i = kBits - 1; i >= 0; i--, power /= 10) {
            const int codes = 1 << i;
            const float exact = static_cast<float>(power * 0.9 / codes);
            step[i] = std::bit_cast<float>((std::bit_cast<uint32_t>(exact) + 0x80u) & 0xffffff00u);
            inverse[i] = 1 / step[i];
            const double first = power * (0.1 + 0.45 / codes), last = power * (1 - 0.45 / codes);
            base[i] = static_cast<float>(last - static_cast<double>(step[i]) * (2 * codes - 1));
            if (i + 1 < kBits) from[i + 1] = static_cast<float>((last + first_above) / 2);
            first_above = first;
        }
        from[0] = static_cast<float>(first_above / 2);
    }
};

template <int kBits>
constexpr DynamicMap<kBits> kDynamicMap{};

// What decode_magnitude() and encode_magnitude() need to know of the octave that holds a code or a value.
// They select it from the lowest octave on. By recursion, not in a loop, so that a loop over elements around
// it is the inner one and vectorises.
template <int kBits, int i = 0>
SIMT_HOST_DEVICE void octave_of_code(float code, float& base, float& step) {
    constexpr float here = kDynamicMap<kBits>.base[i], step_here = kDynamicMap<kBits>.step[i];
    constexpr float from = 1 << i;
    base = code >= from ? here : base;
    step = code >= from ? step_here : step;
    if constexpr (i + 1 < kBits) octave_of_code<kBits, i + 1>(code, base, step);
}
template <int kBits, int i = 0>
SIMT_HOST_DEVICE void octave_of_value(float x, float& base, float& inverse, float& last) {
    constexpr float here = kDynamicMap<kBits>.base[i], inverse_here = kDynamicMap<kBits>.inverse[i];
    constexpr float from = kDynamicMap<kBits>.from[i];
    base = x >= from ? here : base;
    inverse = x >= from ? inverse_here : inverse;
    last = x >= from ? static_cast<float>((2 << i) - 1) : last;
    if constexpr (i + 1 < kBits) octave_of_value<kBits, i + 1>(x, base, inverse, last);
}

// The value of a code, in [0, 1].
template <int kBits>
SIMT_HOST_DEVICE float decode_magnitude(int code) {
    const float number = static_cast<float>(code);
    float base = 0.f, step = 0.f;
    octave_of_code<kBits>(number, base, step);
    return base + step * number;
}

// The code whose value is nearest to x in [0, 1].
template <int kBits>
SIMT_HOST_DEVICE int encode_magnitude(float x) {
    float base = 0.f, inverse = 0.f, last = 0.f;
    octave_of_value<kBits>(x, base, inverse, last);
    const float code = fmaf(x - base, inverse, 0.5f);
    return static_cast<int>(code < last ? code : last);
}

// A block's scale is the largest magnitude in it, so that this one is restored to the bit. If it is
// subnormal, the scale and the block become zero, as the scale must have an inverse.
SIMT_HOST_DEVICE float block_scale(float largest) { return largest < 0x1p-126f ? 0.f : largest; }
SIMT_HOST_DEVICE float inverse_scale(float scale) { return scale > 0.f ? 1.f / scale : 0.f; }

// |x| as a fraction of the scale, in [0, 1] even for a NaN.
SIMT_HOST_DEVICE float fraction_of(float x, float inverse) {
    const float fraction = fabsf(x) * inverse;
    return fraction < 1.f ? fraction : 1.f;
}

// Values of either sign: a sign bit and 7 bits of magnitude.
struct SignedCode {
    // What is coded: the scale is its largest magnitude, and encode() takes it.
    static SIMT_HOST_DEVICE float quantity(float x) { return x; }
    static SIMT_HOST_DEVICE uint8_t encode(float x, float inverse) {
        return static_cast<uint8_t>(encode_magnitude<7>(fraction_of(x, inverse)) + (x < 0.f ? 0x80 : 0));
    }
    static SIMT_HOST_DEVICE float decode(uint8_t code, float scale) {
        return decode_magnitude<7>(code & 0x7f) * (code < 0x80 ? scale : -scale);
    }
};

// Values that are not negative, coded by their square roots, which halves the range in decades. A value that
// is not zero never becomes zero: its root is at least the smallest code.
struct RootCode {
    static SIMT_HOST_DEVICE float quantity(float x) { return sqrtf(x); }
    static SIMT_HOST_DEVICE uint8_t encode(float root, float inverse) {
        const int code = encode_magnitude<8>(fraction_of(root, inverse)), least = root > 0.f ? 1 : 0;
        return static_cast<uint8_t>(code > least ? code : least);
    }
    static SIMT_HOST_DEVICE float decode(uint8_t code, float scale) {
        const float root = decode_magnitude<8>(code) * scale;
        return root * root;
    }
};
