// jinja_strings.h - Python's functions of strings that chat templates use: white space, characters, case,
// splitting. All texts are valid UTF-8, and positions are counted in characters, as in Python.
#pragma once

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <utf8proc.h>

#include "llmc/error.h"
#include "llmc/utf8.h"

namespace jinja {

// What str.isspace() and str.strip() take as white space: Unicode's, and four control characters.
inline bool is_space(int32_t c) { return ::is_space(c) || (c >= 0x1c && c <= 0x1f); }

inline size_t count_characters(std::string_view text) {
    return text.size() - static_cast<size_t>(std::ranges::count_if(text, continues_character));
}

// The byte at which a character begins; the end of the text if it has fewer.
inline size_t byte_of(std::string_view text, size_t character) {
    size_t at = 0;
    while (character > 0 && at < text.size()) {
        at++;
        while (at < text.size() && continues_character(text[at])) at++;
        character--;
    }
    return at;
}

inline std::vector<std::string_view> characters(std::string_view text) {
    std::vector<std::string_view> all;
    for (size_t at = 0, length; at < text.size(); at += length) {
        length = first_character(text.substr(at)).length;
        all.push_back(text.substr(at, length));
    }
    return all;
}

// Removes white space, or any of the given characters, from the sides of a text.
inline std::string_view strip(std::string_view text, const std::optional<std::string>& chars = {},
                              bool left = true, bool right = true) {
    const auto goes = [&](std::string_view character) {
        if (!chars) return is_space(first_character(character).code);
        return chars->find(character) != chars->npos;
    };
    while (left && !text.empty()) {
        const size_t length = first_character(text).length;
        if (!goes(text.substr(0, length))) break;
        text.remove_prefix(length);
    }
    while (right && !text.empty()) {
        const size_t start = last_character_start(text);
        if (!goes(text.substr(start))) break;
        text = text.substr(0, start);
    }
    return text;
}

// str.split(): at white space, or at each `separator`; at most `most` times if not negative.
inline std::vector<std::string> split(std::string_view text, const std::optional<std::string>& separator,
                                      int64_t most) {
    std::vector<std::string> parts;
    if (separator) {
        for (size_t at; most != 0 && (at = text.find(*separator)) != text.npos; most--) {
            parts.emplace_back(text.substr(0, at));
            text.remove_prefix(at + separator->size());
        }
        parts.emplace_back(text);
        return parts;
    }
    for (text = strip(text, {}, true, false); !text.empty(); text = strip(text, {}, true, false)) {
        if (most-- == 0) {
            parts.emplace_back(text);
            break;
        }
        size_t end = 0;
        while (end < text.size() && !is_space(first_character(text.substr(end)).code))
            end += first_character(text.substr(end)).length;
        parts.emplace_back(text.substr(0, end));
        text.remove_prefix(end);
    }
    return parts;
}
// str.splitlines(). `keeps` leaves the line ends in the lines.
inline std::vector<std::string> split_lines(std::string_view text, bool keeps) {
    std::vector<std::string> lines;
    size_t begin = 0;
    for (size_t at = 0; at < text.size();) {
        const auto [code, length] = first_character(text.substr(at));
        const bool ends = (code >= 0x0a && code <= 0x0d) || (code >= 0x1c && code <= 0x1e) || code == 0x85 ||
                          code == 0x2028 || code == 0x2029;
        const size_t end = at;
        at += length;
        if (!ends) continue;
        if (code == '\r' && at < text.size() && text[at] == '\n') at++;
        lines.emplace_back(text.substr(begin, (keeps ? at : end) - begin));
        begin = at;
    }
    if (begin < text.size()) lines.emplace_back(text.substr(begin));
    return lines;
}

// str.replace(), at most `most` times if that is not negative.
inline std::string replaced(std::string_view text, std::string_view from, std::string_view to, int64_t most) {
    std::string out;
    if (from.empty()) {  // before each character and at the end
        for (const std::string_view c : characters(text)) {
            if (most != 0) most--, out += to;
            out += c;
        }
        return most != 0 ? out.append(to) : out;
    }
    return with_replaced(text, from, to, most);
}

// ---- case

// Fails for a character whose upper, lower or title case is not one character, or depends on its neighbours:
// Python's tables for these are not here.
inline void check_case(int32_t c, bool lower) {
    struct Range {
        int32_t first, last;
    };
    static constexpr Range kLonger[] = {
        {0xdf, 0xdf},     {0x149, 0x149},   {0x1c4, 0x1cc},   {0x1f0, 0x1f3},   {0x390, 0x390},
        {0x3b0, 0x3b0},   {0x587, 0x587},   {0x10d0, 0x10ff}, {0x1e96, 0x1e9a}, {0x1f50, 0x1f56},
        {0x1f80, 0x1faf}, {0x1fb2, 0x1fbc}, {0x1fc2, 0x1fcc}, {0x1fd2, 0x1fd7}, {0x1fe2, 0x1fe7},
        {0x1ff2, 0x1ffc}, {0xfb00, 0xfb17},
    };
    const auto in = [c](const Range& r) { return c >= r.first && c <= r.last; };
    const bool known = lower ? c != 0x130 && c != 0x3a3 : std::ranges::none_of(kLonger, in);
    if (!known) fail("the case of the character U+%04X cannot be changed", static_cast<unsigned>(c));
}

inline void append_code(std::string& out, int32_t code) {
    utf8proc_uint8_t bytes[4];
    const auto count = utf8proc_encode_char(code, bytes);
    out.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(count));
}

inline bool has_case(int32_t c) {
    const auto category = utf8proc_category(c);
    return category == UTF8PROC_CATEGORY_LU || category == UTF8PROC_CATEGORY_LL ||
           category == UTF8PROC_CATEGORY_LT;
}
// A text in upper case where is_upper(before) says so of a character, by the one before it (-1: none), and in
// lower case elsewhere.
template <class IsUpper>
std::string cased(std::string_view text, IsUpper&& is_upper) {
    std::string out;
    int32_t before = -1;
    for (const std::string_view c : characters(text)) {
        const int32_t code = first_character(c).code;
        const bool upper = is_upper(before);
        check_case(code, !upper);
        append_code(out, upper ? utf8proc_toupper(code) : utf8proc_tolower(code));
        before = code;
    }
    return out;
}
inline std::string lower(std::string_view text) {
    return cased(text, [](int32_t) { return false; });
}
inline std::string upper(std::string_view text) {
    return cased(text, [](int32_t) { return true; });
}
// str.capitalize()
inline std::string capitalized(std::string_view text) {
    return cased(text, [](int32_t before) { return before < 0; });
}
// str.title(): words are letters without anything between them.
inline std::string titled(std::string_view text) {
    return cased(text, [](int32_t before) { return !has_case(before); });
}
// The filter `title`: words begin after white space, a hyphen or a bracket, and only there.
inline std::string title_words(std::string_view text) {
    return cased(text, [](int32_t before) {
        return before < 0 || is_space(before) ||
               std::u32string_view(U"-({[<").find(static_cast<char32_t>(before)) != std::u32string_view::npos;
    });
}

// True if the text is not empty and all its characters are such.
template <class Is>
bool all_characters(std::string_view text, Is&& is) {
    for (const std::string_view c : characters(text))
        if (!is(first_character(c).code)) return false;
    return !text.empty();
}
inline bool is_alphabetic(int32_t c) {
    const auto category = utf8proc_category(c);
    return has_case(c) || category == UTF8PROC_CATEGORY_LM || category == UTF8PROC_CATEGORY_LO;
}
inline bool is_digit(int32_t c) { return utf8proc_category(c) == UTF8PROC_CATEGORY_ND; }
// HTML's special characters escaped, as MarkupSafe does.
inline std::string escaped(std::string_view text) {
    constexpr std::string_view kSpecial = "&<>'\"";
    constexpr const char* kEscapes[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
    std::string out;
    for (const char c : text) {
        const size_t found = kSpecial.find(c);
        found == kSpecial.npos ? out += c : out += kEscapes[found];
    }
    return out;
}

}  // namespace jinja
