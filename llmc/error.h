// error.h - how errors are reported.
//
// A user's mistake is reported in one line that names the option or file, the value, and what would be right.
// Any code throws it with fail(); main prints it and exits with code 2. Our own bugs are caught by asserts.
// Checks that protect memory are made in every build and throw with bug(), which ends with exit code 1.
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

// An error in the middle of training that leaves the training so far intact. If the run saves, it does so
// before it ends.
struct RecoverableError : UserError {
    using UserError::UserError;
};

// An error whose text says where the run was: report_error() adds nothing.
struct StepError : UserError {
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

// Throws a UserError with a printf-style message: one line, no full stop, no "error:" at the start.
template <class... A>
[[noreturn]] inline void fail(const char* pattern, A... args) {
    if constexpr (sizeof...(A) == 0)
        throw UserError(pattern);
    else
        throw UserError(format(pattern, args...));
}

// Calls use(). If it fails, puts `what` before the message: the file, line or option that it is about.
template <class Use>
decltype(auto) naming(const std::string& what, Use&& use) {
    try {
        return use();
    } catch (const UserError& error) {
        throw UserError(what + ": " + error.what());
    }
}

// Throws a std::logic_error with a message like fail()'s. The mistake is ours, not the user's.
template <class... A>
[[noreturn]] inline void bug(const char* pattern, A... args) {
    if constexpr (sizeof...(A) == 0)
        throw std::logic_error(pattern);
    else
        throw std::logic_error(format(pattern, args...));
}

// Call it in a catch block: prints the exception in one line and returns the exit code. `where` ends the line
// of an error that does not say where it was.
inline int report_error(FILE* to = stderr, const std::string& who = "train", const std::string& where = "") {
    try {
        throw;
    } catch (const UserError& e) {
        std::string line = e.what();
        if (!dynamic_cast<const StepError*>(&e)) line += where;
        std::replace(line.begin(), line.end(), '\n', ' ');  // names of files may contain newlines
        fprintf(to, "%s: %s\n", who.c_str(), line.c_str());
        return 2;
    } catch (const std::bad_alloc&) {
        fprintf(to, "%s: out of host memory\n", who.c_str());
        return 2;
    } catch (const std::exception& e) {
        fprintf(to, "%s: this is a bug: %s\n", who.c_str(), e.what());
        return 1;
    }
}
