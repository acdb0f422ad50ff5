// text.h - small functions of text: lists and letters; numbers of bytes, written and read; and names from
// files in messages.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/error.h"

// ---- lists and letters

// The items of a list, as the texts that text_of() makes of them, with `between` between them.
template <class List, class TextOf>
std::string joined(const List& list, const char* between, TextOf&& text_of) {
    std::string text;
    bool is_first = true;
    for (const auto& item : list) {
        if (!std::exchange(is_first, false)) text += between;
        text += text_of(item);
    }
    return text;
}
template <class List>
std::string joined(const List& list, const char* between) {
    return joined(list, between, std::identity());
}

// The words of a list, and whether it has one. They have one space, or another character, between them.
std::vector<std::string> words_of(const std::string& list, char between = ' ');
inline bool has_word(const std::string& list, const std::string& word) {
    return word.find(' ') == word.npos && (" " + list + " ").find(" " + word + " ") != word.npos;
}

// True if all of a short text matches a regular expression, in which small letters are large ones too.
bool matches(const std::string& text, const char* pattern);

// A text with small ASCII letters.
std::string lower(std::string text);

// Makes a name from a file fit for a one-line message: safe_text() of its first 80 bytes, without newlines,
// tabs and quotes.
std::string printable(std::string_view text);

// The name that `text` is probably meant to be; "" if it is near none.
std::string nearest_name(const std::string& text, const std::vector<std::string>& names);

// ---- numbers of bytes

constexpr double mebibytes(size_t bytes) { return static_cast<double>(bytes) / 1048576.0; }
constexpr double gibibytes(size_t bytes) { return static_cast<double>(bytes) / 1073741824.0; }
// "8.03 GB", "803 GB".
inline std::string gigabytes(double bytes) {
    return bytes < 100e9 ? format("%.3g GB", bytes / 1e9) : format("%.0f GB", bytes / 1e9);
}
// A number of seconds: "0.0123 s", "2.28 s", "2279 s".
inline std::string seconds_text(double s) { return s < 1000 ? format("%.3g s", s) : format("%.0f s", s); }
// A number of bytes, in the largest of three units: "300 bytes", "12.5 KiB", "2048.0 MiB".
std::string size_text(size_t bytes);

// The bytes of "8GiB", "1.5GB" or "300MiB". Fails, naming `option` and the text, on anything else.
size_t parse_bytes(const std::string& text, const char* option);

// The bytes/s of "50GB/s", "12.5GiB/s" or "100Gbit/s"; 0 if it is no rate.
double rate_of(const std::string& text);
