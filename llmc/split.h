// split.h - an fp32 value in two parts: its rounding to bf16, and the following bits as a small signed
// difference.
//
// With 16 low bits the pair is exactly the value: a master copy of a bf16 weight that takes two bytes more.
// With 4 low bits it carries a running sum more precisely than bf16. The parts are those of the bit pattern,
// which grows with the magnitude, so a carry from the low part correctly changes bf16's exponent.
#pragma once

#include <cstring>

#include "llmc/simt.h"

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
