// error.h - what happens when something is wrong.
//
// A user's mistake is one line that names the option or file, the value, and what would be right. Code
// anywhere throws it with fail(); main prints it and exits with code 2. Bugs of our own are asserts; what
// keeps memory true is checked in every build, and thrown with bug(): that ends with code 1.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>

struct UserError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// An error in the middle of a training, after which what was trained so far is good: a run that saves does so
// before it ends.
struct RecoverableError : UserError {
    using UserError::UserError;
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

// A number of bytes in a unit in which it is not 0: "300 bytes", "12.5 KiB", "2048.0 MiB".
inline std::string size_text(size_t bytes) {
    if (bytes < 1024) return format("%zu byte%s", bytes, bytes == 1 ? "" : "s");
    const double kib = static_cast<double>(bytes) / 1024;
    return kib < 1024 ? format("%.1f KiB", kib) : format("%.1f MiB", kib / 1024);
}

// Throws a UserError with a printf-style message: one line, no full stop, no "error:" in front.
template <class... A>
[[noreturn]] inline void fail(const char* pattern, A... args) {
    if constexpr (sizeof...(A) == 0)
        throw UserError(pattern);
    else
        throw UserError(format(pattern, args...));
}

// Calls use(); what it fails with gets `what` in front: the file, line or option that it was about.
template <class Use>
decltype(auto) naming(const std::string& what, Use&& use) {
    try {
        return use();
    } catch (const UserError& error) {
        throw UserError(what + ": " + error.what());
    }
}

// Throws a std::logic_error with a message like fail()'s: what it says is our mistake, not the user's.
template <class... A>
[[noreturn]] inline void bug(const char* pattern, A... args) {
    if constexpr (sizeof...(A) == 0)
        throw std::logic_error(pattern);
    else
        throw std::logic_error(format(pattern, args...));
}

// In a catch: prints what was thrown in one line, and returns the code to exit with.
inline int report_error() {
    try {
        throw;
    } catch (const UserError& e) {
        std::string line = e.what();
        std::replace(line.begin(), line.end(), '\n', ' ');  // names of files may have any
        fprintf(stderr, "train: %s\n", line.c_str());
        return 2;
    } catch (const std::bad_alloc&) {
        fprintf(stderr, "train: out of host memory\n");
        return 2;
    } catch (const std::exception& e) {
        fprintf(stderr, "train: this is a bug: %s\n", e.what());
        return 1;
    }
}
