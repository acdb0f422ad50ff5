// conversions.h - what conversions, comparisons and selections compute.
#pragma once

#include "test/gpu/opcode.h"

namespace gpu {

template <class From, class To>
Execute from_integer() {
    return elementwise<To, From>([](From x) { return static_cast<To>(x); });
}
template <class From>
Execute to_integer(const std::string& to) {
    // In a wider register the sign of the narrower type is extended.
    if (to == "s64" || to == "u64") return from_integer<From, int64_t>();
    if (to == "s32" || to == "u32") return from_integer<From, int32_t>();
    if (to == "s16") return from_integer<From, int16_t>();
    if (to == "u16") return from_integer<From, uint16_t>();
    if (to == "u8")
        return elementwise<uint32_t, From>(
            [](From x) { return static_cast<uint32_t>(static_cast<uint8_t>(x)); });
    if (to == "s8")
        return elementwise<int32_t, From>(
            [](From x) { return static_cast<int32_t>(static_cast<int8_t>(x)); });
    if (to == "f32") return from_integer<From, float>();
    if (to == "f64") return from_integer<From, double>();
    unknown();
}
inline int32_t saturated(float x) {
    if (x != x) return 0;
    if (x >= 2147483648.f) return std::numeric_limits<int32_t>::max();
    if (x < -2147483648.f) return std::numeric_limits<int32_t>::min();
    return static_cast<int32_t>(x);
}

template <class T>
Execute comparison(const std::string& how) {
    if (how == "eq") return compare<T>([](T a, T b) { return a == b; });
    if (how == "ne") return compare<T>([](T a, T b) { return a < b || a > b; });  // false for NaN
    if (how == "lt" || how == "lo") return compare<T>([](T a, T b) { return a < b; });
    if (how == "le" || how == "ls") return compare<T>([](T a, T b) { return a <= b; });
    if (how == "gt" || how == "hi") return compare<T>([](T a, T b) { return a > b; });
    if (how == "ge" || how == "hs") return compare<T>([](T a, T b) { return a >= b; });
    if (how == "equ") return compare<T>([](T a, T b) { return !(a < b || a > b); });
    if (how == "neu") return compare<T>([](T a, T b) { return !(a == b); });
    if (how == "ltu") return compare<T>([](T a, T b) { return !(a >= b); });
    if (how == "leu") return compare<T>([](T a, T b) { return !(a > b); });
    if (how == "gtu") return compare<T>([](T a, T b) { return !(a <= b); });
    if (how == "geu") return compare<T>([](T a, T b) { return !(a < b); });
    if (how == "num") return compare<T>([](T a, T b) { return a == a && b == b; });
    if (how == "nan") return compare<T>([](T a, T b) { return a != a || b != b; });
    unknown();
}

template <class T>
Execute choose() {
    return [](Warp& w, const Instruction& i, uint32_t lanes) {
        const uint32_t p = *w.at<uint32_t>(i.s[2]);
        const auto *a = w.at<T>(i.s[0]), *b = w.at<T>(i.s[1]);
        T* d = w.at<T>(i.d);
#pragma GCC ivdep
        for (int lane = 0; lane < 32; lane++) {
            const T r = p >> lane & 1 ? a[lane] : b[lane];
            d[lane] = lanes >> lane & 1 ? r : d[lane];
        }
    };
}

}  // namespace gpu
