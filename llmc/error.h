// error.h - what happens when something is wrong that the user can mend.
//
// A user's mistake is one line that names the option or file, the value, and what would be right. Code
// anywhere throws it with fail(); main prints it and exits with code 2. Bugs of our own are asserts; only
// what keeps memory and the device true is checked in every build, and ends a run in the same way.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

struct UserError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// printf into a string.
__attribute__((format(printf, 1, 2))) inline std::string format(const char* pattern, ...) {
    va_list args, again;
    va_start(args, pattern);
    va_copy(again, args);
    std::string text(static_cast<size_t>(vsnprintf(nullptr, 0, pattern, args)), '\0');
    vsnprintf(text.data(), text.size() + 1, pattern, again);
    va_end(args);
    va_end(again);
    return text;
}

// Throws a UserError with a printf-style message: one line, no full stop, no "error:" in front.
template <class... A>
[[noreturn]] inline void fail(const char* pattern, A... args) {
    if constexpr (sizeof...(A) == 0)
        throw UserError(pattern);
    else
        throw UserError(format(pattern, args...));
}
