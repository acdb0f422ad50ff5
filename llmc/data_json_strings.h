// data_json_strings.h - parses the JSON of a line of any length with little memory beside the line. Long
// strings are decoded inside the line's buffer, and a parser reads only the rest; nlohmann's parser alone
// would take five times the memory of a long text.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>
#include <utf8proc.h>

#include "llmc/error.h"
#include "llmc/file.h"

class LineJson {
  public:
    // `line` is valid UTF-8; it is overwritten. Fails naming the line and the column of an error.
    LineJson(std::span<char> line, const std::string& where) : line_(line), where_(where) {
        take_strings();
        try {
            json_ = parse_json<nlohmann::ordered_json>(rest_, where);
        } catch (const UserError& error) {
            throw UserError(with_column_of_line(error.what()));
        }
    }

    // The parsed line, with its keys in their order. A string that was taken out has a placeholder as its
    // value; value() gives the string.
    nlohmann::ordered_json& json() { return json_; }
    static bool was_taken(std::string_view text) { return text.starts_with('\0'); }
    // The value of a string. If it was taken out, this is the text in the line's buffer.
    std::string_view value(const nlohmann::ordered_json& string) const {
        const auto& text = string.get_ref<const std::string&>();
        return was_taken(text) ? strings_[std::stoul(text.substr(1))] : std::string_view(text);
    }
    // Replaces the placeholders in a value by their strings. Fails if it nests too deeply to be copied.
    void restore(nlohmann::ordered_json& value, int depth = 0) const {
        constexpr int kDeepest = 200;
        if (depth > kDeepest) fail("%s nests more than %d deep", where_.c_str(), kDeepest);
        if (value.is_string())
            value = std::string(this->value(value));
        else if (value.is_structured())
            for (nlohmann::ordered_json& part : value) restore(part, depth + 1);
    }
    // True if it has a whole number of 19 or more digits. The parser reads such numbers as floats, if they do
    // not fit 64 bits, and their digits are lost.
    bool has_long_number() const {
        size_t digits = 0;
        bool in_string = false;
        for (size_t at = 0; at < rest_.size(); at++) {
            const char c = rest_[at];
            const bool is_digit = !in_string && c >= '0' && c <= '9';
            if (digits >= 19 && !is_digit && c != '.' && c != 'e' && c != 'E') return true;
            digits = is_digit ? digits + 1 : 0;
            if (!in_string && (c == '.' || c == 'e' || c == 'E'))  // the rest of the number is no whole one
                while (at + 1 < rest_.size() &&
                       std::string_view("0123456789+-").find(rest_[at + 1]) != std::string_view::npos)
                    at++;
            if (in_string && c == '\\')
                at++;
            else if (c == '"')
                in_string = !in_string;
        }
        return false;
    }
    // Estimates the memory that the object takes beside the line.
    size_t bytes() const { return rest_.size() * kBytesOfParsed + strings_.capacity() * sizeof strings_[0]; }

  private:
    static constexpr size_t kShort = 256;                // strings of at most this many bytes are not taken
                                                         // out
    static constexpr size_t kBytesOfParsed = 20;         // at most, per byte of JSON without its long strings
    static constexpr std::string_view kNul = "\\u0000";  // a placeholder begins with this

    [[noreturn]] void refuse(size_t at, const char* what) const {
        fail("%s: broken JSON: at column %zu: %s", where_.c_str(), at + 1, what);
    }

    // Copies the line to rest_ with placeholders for long strings and for strings that look like a
    // placeholder. Keys are never taken out.
    void take_strings() {
        size_t copied = 0;
        for (size_t at = 0; at < line_.size(); at++) {
            if (line_[at] != '"') continue;
            const size_t begin = at + 1;
            for (at = begin; at < line_.size() && line_[at] != '"'; at++)
                if (line_[at] == '\\') at++;
            if (at >= line_.size()) {
                if (line_.size() - begin <= kShort) break;  // the parser reports the error
                refuse(begin - 1, "the string that begins here does not end");
            }
            const std::string_view string(&line_[begin], at - begin);
            if (string.size() <= kShort && !string.starts_with(kNul)) continue;
            if (is_key(at + 1)) {
                if (string.size() > kLongestKey) refuse(begin - 1, "a key of more than 64 KiB begins here");
                continue;
            }
            rest_.append(&line_[copied], begin - copied).append(kNul).append(std::to_string(strings_.size()));
            copied = at;
            moves_.push_back({rest_.size(), at});
            strings_.push_back(decode(begin, at));
        }
        rest_.append(line_.data() + copied, line_.size() - copied);
    }

    static constexpr size_t kLongestKey = 64 << 10;
    bool is_key(size_t behind) const {
        while (behind < line_.size() &&
               std::string_view(" \t\r\n").find(line_[behind]) != std::string_view::npos)
            behind++;
        return behind < line_.size() && line_[behind] == ':';
    }

    // Decodes the string in [begin, end) of the line, in place.
    std::string_view decode(size_t begin, size_t end) {
        size_t to = begin;
        for (size_t at = begin; at < end;) {
            if (static_cast<unsigned char>(line_[at]) < 0x20) refuse(at, "a control character in a string");
            if (line_[at] == '\\')
                decode_escape(at, end, to);
            else
                line_[to++] = line_[at++];
        }
        return {&line_[begin], to - begin};
    }

    // The decoded character never takes more bytes than its escape, so it can be decoded in place.
    void decode_escape(size_t& at, size_t end, size_t& to) {
        constexpr std::string_view kEscapes = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
        const size_t start = at;
        const char kind = line_[at + 1];
        at += 2;
        if (const size_t found = kEscapes.find(kind); found != kEscapes.npos) {
            line_[to++] = kMeant[found];
            return;
        }
        if (kind != 'u') refuse(start, "an escape that JSON does not have");
        uint32_t code = hex(at, end, start);
        if (code >= 0xd800 && code < 0xdc00) {
            if (end - at < 6 || line_[at] != '\\' || line_[at + 1] != 'u')
                refuse(start, "half a surrogate pair");
            at += 2;
            const uint32_t low = hex(at, end, start);
            if (low < 0xdc00 || low > 0xdfff) refuse(start, "half a surrogate pair");
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        } else if (code >= 0xdc00 && code <= 0xdfff) {
            refuse(start, "half a surrogate pair");
        }
        utf8proc_uint8_t bytes[4];
        const auto count = utf8proc_encode_char(static_cast<utf8proc_int32_t>(code), bytes);
        for (utf8proc_ssize_t i = 0; i < count; i++) line_[to++] = static_cast<char>(bytes[i]);
    }

    uint32_t hex(size_t& at, size_t end, size_t start) const {
        uint32_t code = 0;
        if (end - at < 4) refuse(start, "an escape \\u without four hexadecimal digits");
        for (const size_t last = at + 4; at < last; at++) {
            const char c = line_[at];
            const int digit = c >= '0' && c <= '9'   ? c - '0'
                              : c >= 'a' && c <= 'f' ? c - 'a' + 10
                              : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                     : -1;
            if (digit < 0) refuse(start, "an escape \\u without four hexadecimal digits");
            code = code << 4 | static_cast<uint32_t>(digit);
        }
        return code;
    }

    // Converts the column in the parser's message, which counts in rest_, to a column of the line.
    std::string with_column_of_line(std::string message) const {
        constexpr std::string_view kPlace = "at line 1, column ";
        const size_t at = message.find(kPlace);
        if (at == message.npos) return message;
        const size_t digits = at + kPlace.size();
        const size_t end = std::min(message.find_first_not_of("0123456789", digits), message.size());
        size_t column = std::stoul(message.substr(digits, end - digits));
        const auto behind = [](size_t place, const Move& move) { return place < move.in_rest; };
        if (const auto move = std::upper_bound(moves_.begin(), moves_.end(), column, behind);
            move != moves_.begin())
            column += move[-1].in_line - move[-1].in_rest;
        return message.replace(at, end - at, "at column " + std::to_string(column));
    }

    struct Move {
        size_t in_rest, in_line;  // the same position in both
    };
    const std::span<char> line_;
    const std::string where_;
    std::string rest_;
    std::vector<std::string_view> strings_;
    std::vector<Move> moves_;
    nlohmann::ordered_json json_;
};
