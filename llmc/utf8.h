// utf8.h - reads UTF-8 text character by character, and tells white space and characters of words.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include <utf8proc.h>

struct Character {
    int32_t code;   // -1: not valid UTF-8
    size_t length;  // in bytes; 1 if not valid
};

// The first character of a text, which must not be empty.
inline Character first_character(std::string_view text) {
    const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
    if (bytes[0] < 0x80) return {bytes[0], 1};
    utf8proc_int32_t code;
    const auto length = utf8proc_iterate(bytes, static_cast<utf8proc_ssize_t>(text.size()), &code);
    return length > 0 ? Character{code, static_cast<size_t>(length)} : Character{-1, 1};
}

inline bool continues_character(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }

// The position of the last character in valid UTF-8, which must not be empty.
inline size_t last_character_start(std::string_view text) {
    size_t start = text.size() - 1;
    while (start > 0 && continues_character(text[start])) start--;
    return start;
}

// The number of bytes at the start of the text that are valid UTF-8.
inline size_t valid_utf8(std::string_view text) {
    size_t at = 0;
    while (at < text.size()) {
        uint64_t eight;
        if (text.size() - at >= sizeof eight) {
            std::memcpy(&eight, text.data() + at, sizeof eight);
            if (!(eight & 0x8080808080808080)) {
                at += sizeof eight;
                continue;
            }
        }
        const Character c = first_character(text.substr(at));
        if (c.code < 0) break;
        at += c.length;
    }
    return at;
}

// The number of bytes at the end of the text that may be the start of an incomplete character.
inline size_t unfinished_utf8(std::string_view text) {
    for (size_t back = 1; back <= std::min<size_t>(3, text.size()); back++) {
        const auto byte = static_cast<unsigned char>(text[text.size() - back]);
        if (byte < 0x80) return 0;
        const size_t length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 0;
        if (length > 0) return length > back ? back : 0;
    }
    return 0;
}

// A text with each `from`, which is not empty, replaced; only the first `most` if that is not negative.
inline std::string with_replaced(std::string_view text, std::string_view from, std::string_view to,
                                 int64_t most = -1) {
    std::string result;
    for (size_t at; most != 0 && (at = text.find(from)) != text.npos; most--) {
        result.append(text.substr(0, at)).append(to);
        text.remove_prefix(at + from.size());
    }
    return result.append(text);
}

// True for Unicode's White_Space.
inline bool is_space(int32_t c) {
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
           c == 0x3000;
}

// True for what regular expressions call \w (Unicode TR18, annex C): alphabetic characters, marks, decimal
// digits, connectors and joiners.
inline bool is_word(int32_t c) {
    if ((c >= 0x24b6 && c <= 0x24e9) || (c >= 0x1f130 && c <= 0x1f149) || (c >= 0x1f150 && c <= 0x1f169) ||
        (c >= 0x1f170 && c <= 0x1f189) || c == 0x200c || c == 0x200d)
        return true;  // alphabetic symbols, and joiners
    const std::string_view category = utf8proc_category_string(c);
    return category[0] == 'L' || category[0] == 'M' || category == "Nd" || category == "Nl" ||
           category == "Pc";
}

// The number of bytes of the first character in a text; 0 if more bytes are needed to tell, -1 if the first
// byte begins no character.
inline int whole_character(std::string_view text) {
    if (text.empty()) return 0;
    if (const Character c = first_character(text); c.code >= 0) return static_cast<int>(c.length);
    // Every beginning of a character is completed by the smallest continuations, or by the largest.
    for (const char continuation : {'\x80', '\xbf'})
        for (size_t more = 1; more <= 3; more++) {
            const std::string longer = std::string(text.substr(0, 4)) + std::string(more, continuation);
            if (first_character(longer).length == text.size() + more) return 0;
        }
    return -1;
}
