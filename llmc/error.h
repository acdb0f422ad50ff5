// error.h - how errors are reported, and how whatever else is printed reaches a terminal safely.
//
// A user's mistake is reported in one line that names the option or file, the value, and what would be right.
// Any code throws it with fail(); main prints it and exits with code 2. Our own bugs are caught by asserts.
// Checks that protect memory are made in every build and throw with bug(), which ends with exit code 1.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>

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

// vprintf, and printf, into a string.
std::string format_list(const char* pattern, va_list args);
__attribute__((format(printf, 1, 2))) std::string format(const char* pattern, ...);

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
__attribute__((format(printf, 2, 3))) void print(FILE* to, const char* pattern, ...);

// Throws a UserError with a printf-style message: one line, no full stop, no "error:" at the start.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* pattern, ...);

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
[[noreturn]] __attribute__((format(printf, 1, 2))) void bug(const char* pattern, ...);

// Call it in a catch block: prints the exception in one line and returns the exit code. `where` ends the line
// of an error that does not say where it was.
int report_error(FILE* to = stderr, const std::string& who = "train", const std::string& where = "");
