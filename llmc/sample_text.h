// sample_text.h - writes the text of a model piece by piece, as it is drawn: up to a stop string, in whole
// characters, and so that a terminal is not controlled by it.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/utf8.h"

// ---- where a text ends

// A text that arrives in pieces and ends before the first of some stop strings. What may be the beginning of
// a stop string, or of a character, is held back until more is known.
class StoppedText {
  public:
    explicit StoppedText(std::vector<std::string> stops) : stops_(std::move(stops)) {}

    // The text that is certain with this piece.
    std::string add(std::string_view piece) {
        held_ += piece;
        size_t end = std::string::npos, held_back = unfinished_utf8(held_);
        for (const std::string& stop : stops_) {
            end = std::min(end, held_.find(stop));
            held_back = std::max(held_back, begun(stop));
        }
        stopped_ = end != std::string::npos;
        const size_t certain = stopped_ ? end : held_.size() - held_back;
        std::string text = held_.substr(0, certain);
        held_.erase(0, stopped_ ? std::string::npos : certain);
        return text;
    }
    // True if a stop string has come.
    bool stopped() const { return stopped_; }
    // What was held back, at the end of a text without a stop string.
    std::string finish() { return std::exchange(held_, {}); }

  private:
    // The length of the longest beginning of `stop` that the text ends with.
    size_t begun(const std::string& stop) const {
        for (size_t n = std::min(stop.size() - 1, held_.size()); n > 0; n--)
            if (std::string_view(held_).ends_with(std::string_view(stop).substr(0, n))) return n;
        return 0;
    }

    const std::vector<std::string> stops_;
    std::string held_;
    bool stopped_ = false;
};

// ---- writing text
//
// Writes a model's text. On a terminal, control characters are escaped, because the terminal would obey them;
// pipes and files get the bytes unchanged.

// The number of bytes of the first character in a text, by the table of well-formed UTF-8 (Unicode 15.0,
// table 3-7); 0 if more bytes are needed to tell, -1 if the first byte begins no character.
inline int whole_character(std::string_view text) {
    if (text.empty()) return 0;
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
    const int lead = byte(0), count = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (count > 1 && (lead < 0xc2 || lead > 0xf4)) return -1;
    for (size_t i = 1; i < static_cast<size_t>(count); i++) {
        if (i == text.size()) return 0;
        int low = 0x80, high = 0xbf;
        if (i == 1 && lead == 0xe0) low = 0xa0;  // not longer than necessary
        if (i == 1 && lead == 0xf0) low = 0x90;
        if (i == 1 && lead == 0xed) high = 0x9f;  // no surrogates
        if (i == 1 && lead == 0xf4) high = 0x8f;  // up to U+10FFFF
        if (byte(i) < low || byte(i) > high) return -1;
    }
    return count;
}

// Escapes bytes that arrive in pieces for a terminal: each byte of a control character (except newline and
// tab) and each byte that is not UTF-8 becomes \x1b or the like. Other characters stay as they are.
class TerminalText {
  public:
    // What can be shown so far. The start of an incomplete character is held back until the rest arrives.
    std::string add(std::string_view bytes) {
        held_ += bytes;
        std::string shown;
        size_t at = 0;
        while (const int count = whole_character(std::string_view(held_).substr(at))) {
            const auto character =
                std::string_view(held_).substr(at, static_cast<size_t>(std::max(count, 1)));
            shown += count < 0 || is_control(character) ? escaped(character) : character;
            at += character.size();
        }
        held_.erase(0, at);
        return shown;
    }
    // The escaped bytes of a character that stayed incomplete.
    std::string finish() { return escaped(std::exchange(held_, {})); }

  private:
    static bool is_control(std::string_view character) {
        const unsigned char first = static_cast<unsigned char>(character[0]);
        if (character.size() == 1) return (first < 0x20 && first != '\n' && first != '\t') || first == 0x7f;
        return first == 0xc2 && static_cast<unsigned char>(character[1]) < 0xa0;  // U+0080 to U+009F
    }
    static std::string escaped(std::string_view bytes) {
        std::string text;
        for (const char c : bytes) text += format("\\x%02x", static_cast<unsigned>(c) & 0xff);
        return text;
    }

    std::string held_;
};

// Writes text to a file piece by piece, without delay.
class TextOutput {
  public:
    explicit TextOutput(FILE* to) : to_(to), terminal_(isatty(fileno(to)) == 1) {}
    void write(std::string_view bytes) {
        if (terminal_)
            put(text_.add(bytes));
        else
            put(bytes);
    }
    // Ends the text and writes what follows it.
    void finish(std::string_view ending) { put(text_.finish()), put(ending); }

  private:
    void put(std::string_view bytes) {
        fwrite(bytes.data(), 1, bytes.size(), to_);
        fflush(to_);
    }

    FILE* to_;
    bool terminal_;
    TerminalText text_;
};
