// text.cpp - lists, names in messages, and numbers of bytes as text.
#include "llmc/text.h"

#include <strings.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <regex>
#include <sstream>

std::vector<std::string> words_of(const std::string& list, char between) {
    std::vector<std::string> words;
    std::istringstream stream(list);
    for (std::string word; std::getline(stream, word, between);) words.push_back(word);
    return words;
}

bool matches(const std::string& text, const char* pattern) {
    constexpr size_t kMost = 200;  // because the library matches recursively
    return text.size() < kMost && std::regex_match(text, std::regex(pattern, std::regex::icase));
}

std::string lower(std::string text) {
    for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return text;
}

std::string printable(std::string_view text) {
    constexpr size_t kLongest = 80;
    TerminalText terminal(true);
    std::string shown = terminal.add(text.substr(0, kLongest)), result;  // no half of a character
    shown += text.size() > kLongest ? "..." : terminal.finish();
    for (const char c : shown)
        result += c == '\n' ? "\\x0a" : c == '\t' ? "\\x09" : c == '"' ? "\\x22" : std::string(1, c);
    return result;
}

// The fewest characters to insert, delete, replace or swap with the next one that make one text the other.
static size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); j++) row[j] = j;
    for (size_t i = 1; i <= a.size(); i++) {
        before = std::exchange(above, row);
        row[0] = i;
        for (size_t j = 1; j <= b.size(); j++) {
            row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1])});
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                row[j] = std::min(row[j], before[j - 2] + 1);
        }
    }
    return row[b.size()];
}

std::string nearest_name(const std::string& text, const std::vector<std::string>& names) {
    std::string nearest;
    // A short name has many neighbours, so it may differ in one letter only.
    const size_t letters = text.size() - std::min(text.size(), text.find_first_not_of('-'));
    size_t least = (letters < 6 ? 1 : std::min<size_t>(3, text.size() / 3)) + 1;
    for (const std::string& name : names)
        if (const size_t distance = edit_distance(text, name); distance < least)
            least = distance, nearest = name;
    return nearest;
}

std::string size_text(size_t bytes) {
    if (bytes < 1024) return format("%zu byte%s", bytes, bytes == 1 ? "" : "s");
    const double kib = static_cast<double>(bytes) / 1024;
    return kib < 1024 ? format("%.1f KiB", kib) : format("%.1f MiB", kib / 1024);
}

size_t parse_bytes(const std::string& text, const char* option) {
    const std::pair<const char*, double> units[] = {{"B", 1},        {"KiB", 0x1p10}, {"MiB", 0x1p20},
                                                    {"GiB", 0x1p30}, {"TiB", 0x1p40}, {"KB", 1e3},
                                                    {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12}};
    const char* const digits = "0123456789";
    size_t end = std::min(text.find_first_not_of(digits), text.size());
    const bool number = end > 0;
    if (number && end < text.size() && text[end] == '.') {
        const size_t fraction = std::min(text.find_first_not_of(digits, end + 1), text.size());
        if (fraction > end + 1) end = fraction;
    }
    for (const auto& [unit, bytes] : units) {
        if (!number || strcasecmp(text.c_str() + end, unit) != 0) continue;
        const double value = std::strtod(text.substr(0, end).c_str(), nullptr) * bytes;
        if (value >= 0x1p64) fail("%s %s is more bytes than there are addresses", option, text);
        return static_cast<size_t>(value);
    }
    // Other tools disagree on whether 16G is 16GiB or 16GB.
    std::string example = "8GiB";
    const std::string value = text.substr(0, end), unit = text.substr(end);
    for (const std::string letter : {"K", "M", "G", "T"})
        if (number && (strcasecmp(unit.c_str(), letter.c_str()) == 0 ||
                       strcasecmp(unit.c_str(), (letter + "i").c_str()) == 0))
            example = value + letter + "iB or " + value + letter + "B";
    fail("%s '%s' is no number of bytes with a unit (B, KiB, MiB, GiB, TiB, KB, MB, GB, TB), as in %s",
         option, text, example);
}

double rate_of(const std::string& text) {
    char* end = nullptr;
    const double value = strtod(text.c_str(), &end);
    const std::string unit = end;
    if (text.empty() || !isdigit(static_cast<unsigned char>(text[0])) || !(value > 0) || value > 1e9)
        return 0;
    constexpr const char* kLetters = "KMGT";
    for (int i = 0; i < 4; i++) {
        const std::string letter(1, kLetters[i]);
        const double decimal = std::pow(1e3, i + 1);
        if (unit == letter + "B/s") return value * decimal;
        if (unit == letter + "iB/s") return value * std::pow(1024, i + 1);
        if (unit == letter + "bit/s" || (i == 0 && unit == "kbit/s")) return value * decimal / 8;
    }
    return 0;
}
