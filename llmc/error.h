// error.h - how errors are reported, and how whatever else is printed reaches a terminal safely.
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
#include <string_view>
#include <utility>

#include "llmc/utf8.h"

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
inline std::string format_list(const char* pattern, va_list args) {
    va_list again;
    va_copy(again, args);
    std::string text(static_cast<size_t>(vsnprintf(nullptr, 0, pattern, args)), '\0');
    vsnprintf(text.data(), text.size() + 1, pattern, again);
    va_end(again);
    return text;
}
__attribute__((format(printf, 1, 2))) inline std::string format(const char* pattern, ...) {
    va_list args;
    va_start(args, pattern);
    std::string text = format_list(pattern, args);
    va_end(args);
    return text;
}

// Escapes bytes that arrive in pieces for a terminal: each byte of a control character (except newline and
// tab) and each byte that is not UTF-8 becomes \x1b or the like. Other characters stay as they are.
class TerminalText {
  public:
    // `hidden_too`: also escapes the characters of is_hidden().
    explicit TerminalText(bool hidden_too = false) : hidden_too_(hidden_too) {}
    // What can be shown so far. The start of an incomplete character is held back until the rest arrives.
    std::string add(std::string_view bytes) {
        held_ += bytes;
        std::string shown;
        std::string_view rest = held_;
        while (const int count = whole_character(rest)) {
            const std::string_view character = rest.substr(0, static_cast<size_t>(std::max(count, 1)));
            const int32_t code = count < 0 ? -1 : first_character(character).code;
            const bool bad = code < 0 || is_control(code) || (hidden_too_ && is_hidden(code));
            shown += bad ? escaped(character) : character;
            rest.remove_prefix(character.size());
        }
        held_.erase(0, held_.size() - rest.size());
        return shown;
    }
    // The escaped bytes of a character that stayed incomplete.
    std::string finish() { return escaped(std::exchange(held_, {})); }

  private:
    static bool is_control(int32_t c) {
        return (c < 0x20 && c != '\n' && c != '\t') || (c >= 0x7f && c < 0xa0);
    }
    // Characters that turn the direction of a line, end it, or take no place in it. Not those that words of
    // some scripts are written with: joiners, soft hyphens, variation selectors.
    static bool is_hidden(int32_t c) {
        return c == 0x61c || c == 0x200b || c == 0x200e || c == 0x200f || (c >= 0x2028 && c <= 0x202e) ||
               (c >= 0x2060 && c <= 0x206f) || c == 0xfeff || (c >= 0xfff9 && c <= 0xfffb) ||
               (c >= 0xe0000 && c <= 0xe007f);
    }
    static std::string escaped(std::string_view bytes) {
        std::string text;
        for (const char c : bytes) text += format("\\x%02x", static_cast<unsigned>(c) & 0xff);
        return text;
    }

    bool hidden_too_;
    std::string held_;
};

// A text as TerminalText shows it, without hidden characters.
inline std::string safe_text(std::string_view text) {
    TerminalText terminal(true);
    const std::string shown = terminal.add(text);
    return shown + terminal.finish();
}

// What print() calls first, if anything: it erases a line that is drawn on the terminal (terminal_line.h).
inline void (*before_print)() = nullptr;

// printf of a safe_text(). Whatever the program prints goes this way, except what a model writes (TextOutput)
// and texts of the program's own: a file may have chosen any part of it.
__attribute__((format(printf, 2, 3))) inline void print(FILE* to, const char* pattern, ...) {
    if (before_print) before_print();
    va_list args;
    va_start(args, pattern);
    fputs(safe_text(format_list(pattern, args)).c_str(), to);
    va_end(args);
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
        print(to, "%s: %s\n", who.c_str(), line.c_str());
        return 2;
    } catch (const std::bad_alloc&) {
        for (const char* part : {who.c_str(), ": out of host memory\n"})
            fputs(part, to);  // allocates nothing
        return 2;
    } catch (const std::exception& e) {
        print(to, "%s: this is a bug: %s\n", who.c_str(), e.what());
        return 1;
    }
}
