// error.h - how errors are reported, and how whatever else is printed reaches a terminal safely.
//
// A user's mistake is reported in one line that names the option or file, the value, and what would be right.
// Any code throws it with fail(); main prints it and exits with code 2. Our own bugs are caught by asserts.
// Checks that protect memory are made in every build and throw with bug(), which ends with exit code 1.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

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

// printf into a string, of arguments that nobody has checked: use format().
std::string format_unchecked(const char* pattern, ...);

// What printf may be given as a T: a text ('s'), a real number ('f'), or a number of 4 or 8 bytes.
template <class T>
constexpr int printf_kind() {
    if constexpr (std::is_same_v<T, std::string> || std::is_convertible_v<T, const char*>) return 's';
    if constexpr (std::is_floating_point_v<T>) return 'f';
    return sizeof(T) > 4 ? 8 : 4;
}

// A printf pattern for these arguments, which are checked when it is compiled. %s also takes a std::string.
template <class... Args>
struct PrintfPattern {
    const char* text;

    consteval PrintfPattern(const char* pattern) : text(pattern) {
        const int kinds[] = {printf_kind<std::decay_t<Args>>()..., 0};
        const int* next = kinds;
        const auto is_in = [](char c, std::string_view all) { return all.find(c) != all.npos; };
        for (const char* c = pattern; *c; c++) {
            if (*c != '%') continue;
            while (is_in(*++c, "-+ #.*0123456789"))
                if (*c == '*' && *next++ != 4) throw "the width is an int";
            const bool is_long = is_in(*c, "lz");
            c += is_long;
            if (*c == '%') continue;
            if (!*c || *next++ != (*c == 's' ? 's' : is_in(*c, "aefg") ? 'f' : is_long ? 8 : 4))
                throw "an argument of another type";
        }
        if (*next) throw "an argument too many";
    }
};
template <class... Args>
using PatternFor = PrintfPattern<std::type_identity_t<Args>...>;

// An argument as printf takes it.
inline const char* printf_value(const std::string& text) { return text.c_str(); }
template <class T>
requires(!std::is_same_v<T, std::string>) const T& printf_value(const T& value) { return value; }

// printf into a string.
template <class... Args>
std::string format(PatternFor<Args...> pattern, const Args&... args) {
    return format_unchecked(pattern.text, printf_value(args)...);
}

// Escapes bytes that arrive in pieces for a terminal: each byte of a control character (except newline and
// tab) and each byte that is not UTF-8 becomes \x1b or the like. Other characters stay as they are.
class TerminalText {
  public:
    // `hidden_too`: also escapes characters that turn a line's direction, end it or cannot be seen.
    explicit TerminalText(bool hidden_too = false) : hidden_too_(hidden_too) {}
    // What can be shown so far. The start of an incomplete character is held back until the rest arrives.
    std::string add(std::string_view bytes);
    // The escaped bytes of a character that stayed incomplete.
    std::string finish();

  private:
    bool hidden_too_;
    std::string held_;
};

// A text as TerminalText shows it, without hidden characters.
std::string safe_text(std::string_view text);

// What print() calls first, if anything: it erases a line that is drawn on the terminal (terminal_line.h).
inline void (*before_print)() = nullptr;

// printf of a safe_text(). Whatever the program prints goes this way, except what a model writes (TextOutput)
// and texts of the program's own: a file may have chosen any part of it.
void print_text(FILE* to, const std::string& text);
template <class... Args>
void print(FILE* to, PatternFor<Args...> pattern, const Args&... args) {
    print_text(to, format_unchecked(pattern.text, printf_value(args)...));
}

// Throws a UserError with a printf-style message: one line, no full stop, no "error:" at the start.
template <class... Args>
[[noreturn]] void fail(PatternFor<Args...> pattern, const Args&... args) {
    throw UserError(format_unchecked(pattern.text, printf_value(args)...));
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
template <class... Args>
[[noreturn]] void bug(PatternFor<Args...> pattern, const Args&... args) {
    throw std::logic_error(format_unchecked(pattern.text, printf_value(args)...));
}

// Call it in a catch block: prints the exception in one line and returns the exit code. `where` ends the line
// of an error that does not say where it was.
int report_error(FILE* to = stderr, const std::string& who = "train", const std::string& where = "");
