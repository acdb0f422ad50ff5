// error.cpp - formats messages, escapes them for a terminal, and prints them.
#include "llmc/error.h"

#include <algorithm>
#include <cstdarg>
#include <new>
#include <utility>

#include "llmc/utf8.h"

std::string format_unchecked(const char* pattern, ...) {
    va_list args, again;
    va_start(args, pattern);
    va_copy(again, args);
    std::string text(static_cast<size_t>(vsnprintf(nullptr, 0, pattern, args)), '\0');
    vsnprintf(text.data(), text.size() + 1, pattern, again);
    va_end(again);
    va_end(args);
    return text;
}

static bool is_control(int32_t c) { return (c < 0x20 && c != '\n' && c != '\t') || (c >= 0x7f && c < 0xa0); }
// Characters that turn the direction of a line, end it, or take no place in it. Not those that words of some
// scripts are written with: joiners, soft hyphens, variation selectors.
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

std::string TerminalText::add(std::string_view bytes) {
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
std::string TerminalText::finish() { return escaped(std::exchange(held_, {})); }

std::string safe_text(std::string_view text) {
    TerminalText terminal(true);
    const std::string shown = terminal.add(text);
    return shown + terminal.finish();
}

void print_text(FILE* to, const std::string& text) {
    if (before_print) before_print();
    fputs(safe_text(text).c_str(), to);
}

int report_error(FILE* to, const std::string& who, const std::string& where) {
    try {
        throw;
    } catch (const UserError& e) {
        std::string line = e.what();
        if (!dynamic_cast<const StepError*>(&e)) line += where;
        std::ranges::replace(line, '\n', ' ');  // names of files may contain newlines
        print(to, "%s: %s\n", who, line);
        return 2;
    } catch (const std::bad_alloc&) {
        for (const char* part : {who.c_str(), ": out of host memory\n"})
            fputs(part, to);  // allocates nothing
        return 2;
    } catch (const std::exception& e) {
        print(to, "%s: this is a bug: %s\n", who, e.what());
        return 1;
    }
}
