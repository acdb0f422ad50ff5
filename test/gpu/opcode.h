// opcode.h - the words of a PTX opcode, such as "mul.wide.s32", and the types among them.
#pragma once

#include "test/gpu/instructions.h"

namespace gpu {

using Words = std::vector<std::string>;

inline Words split(const std::string& opcode) {
    Words words;
    size_t start = 0;
    for (size_t i = 0; i <= opcode.size(); i++)
        if (i == opcode.size() || opcode[i] == '.') {
            words.push_back(opcode.substr(start, i - start));
            start = i + 1;
        }
    return words;
}
inline size_t type_bytes(const std::string& t) {
    const size_t digits = t.find_first_of("0123456789");
    const int bits = digits == std::string::npos ? 0 : atoi(t.c_str() + digits);
    if (bits % 8 || bits < 8 || bits > 64) throw Fault("type " + t + " is not known");
    return static_cast<size_t>(bits) / 8;
}
inline bool has(const Words& words, const char* w) {
    return std::find(words.begin(), words.end(), w) != words.end();
}
[[noreturn]] inline void unknown() { throw Fault("this instruction is not known"); }

// Calls `make` for an integer type (integer), or for an integer or float type (number).
template <class F>
Execute integer(const std::string& t, F make) {
    if (t == "s32") return make.template operator()<int32_t>();
    if (t == "u32" || t == "b32") return make.template operator()<uint32_t>();
    if (t == "s64") return make.template operator()<int64_t>();
    if (t == "u64" || t == "b64") return make.template operator()<uint64_t>();
    if (t == "s16") return make.template operator()<int16_t>();
    if (t == "u16" || t == "b16") return make.template operator()<uint16_t>();
    unknown();
}
template <class F>
Execute number(const std::string& t, F make) {
    if (t == "f32") return make.template operator()<float>();
    if (t == "f64") return make.template operator()<double>();
    return integer(t, make);
}

}  // namespace gpu
