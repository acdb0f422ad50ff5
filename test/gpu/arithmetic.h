// arithmetic.h - what arithmetic and logical opcodes compute, for each type.
#pragma once

#include "test/gpu/opcode.h"

namespace gpu {

template <class T>
using Unsigned = std::make_unsigned_t<T>;
template <class T>
T divided(T a, T b) {
    if (b == 0) return static_cast<T>(~T{0});
    if constexpr (std::is_signed_v<T>)
        if (b == -1) return static_cast<T>(0 - static_cast<Unsigned<T>>(a));
    return static_cast<T>(a / b);
}
template <class T>
T remainder(T a, T b) {
    if (b == 0) return a;
    if constexpr (std::is_signed_v<T>)
        if (b == -1) return 0;
    return static_cast<T>(a % b);
}
// A type that holds the product of two integers.
template <class T>
using Wider = std::conditional_t<
    sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                       std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>>>;

template <class T>
Execute bit_field_insert() {
    return elementwise<T, T, T, uint32_t, uint32_t>([](T a, T b, uint32_t at, uint32_t n) {
        at &= 255, n &= 255;
        if (at >= 8 * sizeof(T) || !n) return b;
        const T ones = n >= 8 * sizeof(T) ? static_cast<T>(~T{0}) : static_cast<T>((T{1} << n) - 1);
        return static_cast<T>((b & ~(ones << at)) | (a & ones) << at);
    });
}

inline Execute floats(const Words& words) {
    const std::string op = words[0];
    const std::string mode = words.size() > 2 ? words[1] : "rn";
    const bool ftz = has(words, "ftz");
    if (ftz && op != "ex2") unknown();
    if (op == "ex2" && mode == "approx")
        return ftz ? elementwise<float, float>([](float x) { return flushed(std::exp2(flushed(x))); })
                   : elementwise<float, float>([](float x) { return std::exp2(x); });
    if (op == "lg2" && mode == "approx")
        return elementwise<float, float>([](float x) { return std::log2(x); });
    if (op == "rsqrt" && mode == "approx")
        return elementwise<float, float>(
            [](float x) { return static_cast<float>(1 / std::sqrt(static_cast<double>(x))); });
    if (op == "sin" && mode == "approx")
        return elementwise<float, float>([](float x) { return std::sin(x); });
    if (op == "cos" && mode == "approx")
        return elementwise<float, float>([](float x) { return std::cos(x); });
    if (op == "min")
        return elementwise<float, float, float>([](float a, float b) {
            return a != a ? b : b != b ? a : b < a || (a == b && std::signbit(b)) ? b : a;
        });
    if (op == "max")
        return elementwise<float, float, float>([](float a, float b) {
            return a != a ? b : b != b ? a : b > a || (a == b && !std::signbit(b)) ? b : a;
        });
    if (op == "neg") return elementwise<float, float>([](float x) { return -x; });
    if (op == "abs") return elementwise<float, float>([](float x) { return std::fabs(x); });
    // For finite divisors beyond 2^126 an approximate division gives 0, or NaN if the dividend is infinite.
    if (op == "div" && mode == "approx")
        return elementwise<float, float, float>([](float a, float b) {
            return std::fabs(b) > 0x1p126f && std::fabs(b) < INFINITY ? a * 0 : a / b;
        });
    if (mode != "rn") unknown();
    if (op == "add") return elementwise<float, float, float>([](float a, float b) { return a + b; });
    if (op == "sub") return elementwise<float, float, float>([](float a, float b) { return a - b; });
    if (op == "mul") return elementwise<float, float, float>([](float a, float b) { return a * b; });
    if (op == "fma")
        return elementwise<float, float, float, float>(
            [](float a, float b, float c) { return std::fma(a, b, c); });
    if (op == "div") return elementwise<float, float, float>([](float a, float b) { return a / b; });
    if (op == "rcp") return elementwise<float, float>([](float x) { return 1 / x; });
    if (op == "sqrt") return elementwise<float, float>([](float x) { return std::sqrt(x); });
    unknown();
}

inline Execute arithmetic(const Words& words) {
    const std::string &op = words[0], &type = words.back();
    if (type == "f32") return floats(words);
    if (op == "add")
        return integer(type, []<class T>() {
            return elementwise<T, T, T>([](T a, T b) {
                return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
            });
        });
    if (op == "sub")
        return integer(type, []<class T>() {
            return elementwise<T, T, T>([](T a, T b) {
                return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
            });
        });
    if (op == "mul" && words[1] == "lo")
        return integer(type, []<class T>() {
            return elementwise<T, T, T>([](T a, T b) { return static_cast<T>(uint64_t(a) * uint64_t(b)); });
        });
    if (op == "mul" && words[1] == "hi")
        return integer(type, []<class T>() {
            return elementwise<T, T, T>(
                [](T a, T b) { return static_cast<T>(Wider<T>(a) * Wider<T>(b) >> (8 * sizeof(T))); });
        });
    if (op == "mad" && words[1] == "lo")
        return integer(type, []<class T>() {
            return elementwise<T, T, T, T>(
                [](T a, T b, T c) { return static_cast<T>(uint64_t(a) * uint64_t(b) + uint64_t(c)); });
        });
    if (op == "mul" && words[1] == "wide") {
        if (type == "s32")
            return elementwise<int64_t, int32_t, int32_t>(
                [](int32_t a, int32_t b) { return int64_t{a} * b; });
        if (type == "u32")
            return elementwise<uint64_t, uint32_t, uint32_t>(
                [](uint32_t a, uint32_t b) { return uint64_t{a} * b; });
    }
    if (op == "mad" && words[1] == "wide") {
        if (type == "s32")
            return elementwise<int64_t, int32_t, int32_t, int64_t>([](int32_t a, int32_t b, int64_t c) {
                return static_cast<int64_t>(static_cast<uint64_t>(int64_t{a} * b) + static_cast<uint64_t>(c));
            });
        if (type == "u32")
            return elementwise<uint64_t, uint32_t, uint32_t, uint64_t>(
                [](uint32_t a, uint32_t b, uint64_t c) { return uint64_t{a} * b + c; });
    }
    if (op == "div")
        return integer(
            type, []<class T>() { return elementwise<T, T, T>([](T a, T b) { return divided(a, b); }); });
    if (op == "rem")
        return integer(
            type, []<class T>() { return elementwise<T, T, T>([](T a, T b) { return remainder(a, b); }); });
    if (op == "min")
        return integer(
            type, []<class T>() { return elementwise<T, T, T>([](T a, T b) { return a < b ? a : b; }); });
    if (op == "max")
        return integer(
            type, []<class T>() { return elementwise<T, T, T>([](T a, T b) { return a > b ? a : b; }); });
    if (op == "and")
        return integer(type, []<class T>() {
            return elementwise<T, T, T>([](T a, T b) { return static_cast<T>(a & b); });
        });
    if (op == "or")
        return integer(type, []<class T>() {
            return elementwise<T, T, T>([](T a, T b) { return static_cast<T>(a | b); });
        });
    if (op == "xor")
        return integer(type, []<class T>() {
            return elementwise<T, T, T>([](T a, T b) { return static_cast<T>(a ^ b); });
        });
    if (op == "not")
        return integer(type,
                       []<class T>() { return elementwise<T, T>([](T a) { return static_cast<T>(~a); }); });
    if (op == "neg")
        return integer(type, []<class T>() {
            return elementwise<T, T>([](T a) { return static_cast<T>(0 - static_cast<Unsigned<T>>(a)); });
        });
    if (op == "abs")
        return integer(type, []<class T>() {
            return elementwise<T, T>([](T a) {
                return static_cast<T>(a < 0 ? 0 - static_cast<Unsigned<T>>(a) : static_cast<Unsigned<T>>(a));
            });
        });
    // Shifts by the number of bits, or by more, leave nothing, or the sign.
    if (op == "shl")
        return integer(type, []<class T>() {
            return elementwise<T, T, uint32_t>([](T a, uint32_t n) {
                return n < 8 * sizeof(T) ? static_cast<T>(static_cast<Unsigned<T>>(a) << n) : T{0};
            });
        });
    if (op == "shr")
        return integer(type, []<class T>() {
            return elementwise<T, T, uint32_t>([](T a, uint32_t n) {
                return static_cast<T>(n < 8 * sizeof(T) ? a >> n : a < 0 ? ~T{0} : T{0});
            });
        });
    if (op == "bfi" && type == "b32") return bit_field_insert<uint32_t>();
    if (op == "bfi" && type == "b64") return bit_field_insert<uint64_t>();
    if (op == "bfe" && type == "u32")
        return elementwise<uint32_t, uint32_t, uint32_t, uint32_t>([](uint32_t a, uint32_t at, uint32_t n) {
            at &= 255, n &= 255;
            return at > 31 || !n ? 0 : n > 31 ? a >> at : a >> at & ((1u << n) - 1);
        });
    if (op == "prmt" && words.size() == 2)
        return elementwise<uint32_t, uint32_t, uint32_t, uint32_t>([](uint32_t a, uint32_t b, uint32_t how) {
            const uint64_t bytes = a | uint64_t{b} << 32;
            uint32_t r = 0;
            for (int k = 0; k < 4; k++) {
                const uint32_t pick = how >> 4 * k & 15;
                uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (pick & 7)) & 255;
                if (pick & 8) byte = byte & 128 ? 255 : 0;
                r |= byte << 8 * k;
            }
            return r;
        });
    if (op == "popc" && type == "b32")
        return elementwise<uint32_t, uint32_t>(
            [](uint32_t a) { return static_cast<uint32_t>(std::popcount(a)); });
    if (op == "clz" && type == "b32")
        return elementwise<uint32_t, uint32_t>(
            [](uint32_t a) { return static_cast<uint32_t>(std::countl_zero(a)); });
    if (op == "brev" && type == "b32")
        return elementwise<uint32_t, uint32_t>([](uint32_t a) {
            uint32_t r = 0;
            for (int k = 0; k < 32; k++) r |= (a >> k & 1) << (31 - k);
            return r;
        });
    if (op == "cvta" && has(words, "global"))
        return elementwise<uint64_t, uint64_t>([](uint64_t a) { return a; });
    if (op == "cvta" && words[1] == "param")
        return [](Warp& w, const Instruction& i, uint32_t lanes) {
            const uint64_t base = reinterpret_cast<uint64_t>(w.block->launch().parameters.data());
            for_lanes(lanes,
                      [&](int lane) { w.at<uint64_t>(i.d)[lane] = base + w.at<uint64_t>(i.s[0])[lane]; });
        };
    unknown();
}

}  // namespace gpu
