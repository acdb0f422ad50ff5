// data_json_strings.h - parses the JSON of a line of any length with little memory beside the line. Long
// strings are decoded inside the line's buffer, and a parser reads only the rest; nlohmann's parser alone
// would take five times the memory of a long text.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>
#include <utf8proc.h>

#include "llmc/data_json_lines.h"
#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/free_memory.h"
#include "llmc/utf8.h"

// Fails if reading a line takes more memory than is free. Short lines are not checked.
inline void require_memory_for(size_t bytes, const std::string& where) {
    if (bytes < 4 << 20) return;
    const FreeMemory free = host_memory_free();
    if (bytes > free.bytes)
        fail("%s: reading it takes %.1f MiB, and %.1f are free (%s); divide it into shorter lines", where,
             static_cast<double>(bytes) / 1048576, static_cast<double>(free.bytes) / 1048576, free.limit);
}

// How many values a text in JSON has. A text that is no JSON has at most as many, as far as it is parsed.
struct JsonCounts {
    size_t bytes = 0;
    size_t values = 1, containers = 0, strings = 0, keys = 0;

    explicit JsonCounts(std::string_view json) : bytes(json.size()) {
        for (size_t at = 0; at < json.size(); at++) {
            const char c = json[at];
            if (c == '"') {
                strings++;
                for (at++; at < json.size() && json[at] != '"'; at++)
                    if (json[at] == '\\') at++;
            }
            containers += c == '[' || c == '{';
            values += c == '[' || c == '{' || c == ',';
            keys += c == ':';
        }
    }

    // The most memory that the parsed values take, while they are parsed too: a value has a place in a list
    // that grows; a list, an object or a string has a block of its own, and its text may have another; a key
    // is in its object, whose list grows too, and in the set that finds a second one.
    size_t parsed() const { return 6 * bytes + 64 * values + 32 * containers + 80 * strings + 240 * keys; }
    // The most memory that the same values take as a chat template's (jinja_values.h), with a copy of each
    // list and dict, beside their text.
    size_t of_template() const { return 64 * values + 96 * containers + 112 * strings + 208 * keys; }
};

// Takes what a parser finds in JSON text, and makes the value of it, whose keys keep their order. The
// library's own maker of such values goes through an object's keys before it adds one, and through a list
// after each object in it.
class OrderedJsonMaker {
  public:
    using Json = nlohmann::ordered_json;
    static constexpr size_t kDeepest = 200;  // most lists and objects inside one another

    explicit OrderedJsonMaker(const std::string& where) : where_(where) {}
    Json take() { return std::move(value_); }
    // True if there was a whole number of 19 or more digits. The parser reads such numbers as floats, if they
    // do not fit 64 bits, and their digits are lost.
    bool has_long_number() const { return has_long_number_; }

    bool null() { return add(nullptr); }
    bool boolean(bool value) { return add(value); }
    bool number_integer(Json::number_integer_t value) { return add_whole(value, value <= -kLong); }
    bool number_unsigned(Json::number_unsigned_t value) { return add_whole(value, value >= kLong); }
    bool number_float(Json::number_float_t value, const std::string& text) {
        return add_whole(value, text.find_first_of(".eE") == text.npos);
    }
    bool string(std::string& value) { return add(std::move(value)); }
    bool binary(Json::binary_t&) { return false; }  // JSON text has none

    bool start_array(size_t) { return open(Json::array()); }
    bool end_array() { return close(); }
    bool start_object(size_t) {
        keys_.emplace_back();
        return open(Json::object());
    }
    bool end_object() {
        keys_.pop_back();
        return close();
    }
    bool key(std::string& key) {
        if (!keys_.back().insert(key).second)
            fail("%s: broken JSON: key \"%s\" appears twice", where_, printable(key));
        Json::object_t& object = open_.back()->get_ref<Json::object_t&>();
        if (object.size() == object.capacity()) grow(object);
        object.emplace_back(std::move(key), Json());
        return true;
    }
    bool parse_error(size_t, const std::string&, const nlohmann::json::exception& error) {
        fail_broken_json(where_, error);
    }

  private:
    // By itself, a list of pairs with constant keys would copy the values when it grows.
    static void grow(Json::object_t& object) {
        Json::object_t larger;
        larger.reserve(std::max<size_t>(1, 2 * object.size()));
        for (auto& [key, value] : object) larger.emplace_back(key, std::move(value));
        object.swap(larger);
    }
    Json& place(Json value) {
        if (open_.empty()) return value_ = std::move(value);
        if (open_.back()->is_object())
            return open_.back()->get_ref<Json::object_t&>().back().second = std::move(value);
        return open_.back()->get_ref<Json::array_t&>().emplace_back(std::move(value));
    }
    bool add(Json value) {
        place(std::move(value));
        return true;
    }
    bool add_whole(Json value, bool is_long) {
        has_long_number_ |= is_long;
        return add(std::move(value));
    }
    bool open(Json value) {
        if (open_.size() == kDeepest) fail("%s nests more than %zu deep", where_, kDeepest);
        open_.push_back(&place(std::move(value)));
        return true;
    }
    bool close() {
        open_.pop_back();
        return true;
    }

    static constexpr int64_t kLong = 1'000'000'000'000'000'000;  // has 19 digits

    const std::string& where_;
    bool has_long_number_ = false;
    Json value_;
    std::vector<Json*> open_;                  // a list or an object, and those inside it up to the innermost
    std::vector<std::set<std::string>> keys_;  // the keys so far of each object among them
};

class LineJson {
  public:
    // `line` is overwritten. Fails naming the line and the column of an error, also of a byte that is not
    // UTF-8, and if parsing it takes more memory than is free.
    LineJson(std::span<char> line, const std::string& where) : line_(line), where_(where) {
        if (const size_t valid = valid_utf8({line.data(), line.size()}); valid < line.size())
            fail("%s is not UTF-8 text: no character has the byte 0x%02x in column %zu", where,
                 static_cast<unsigned char>(line[valid]), valid + 1);
        take_strings();
        counts_ = JsonCounts(rest_);
        require_memory_for(bytes(), where);
        try {
            OrderedJsonMaker maker(where);
            nlohmann::ordered_json::sax_parse(rest_, &maker);
            json_ = maker.take();
            has_long_number_ = maker.has_long_number();
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
    // Replaces the placeholders in a value by their strings.
    void restore(nlohmann::ordered_json& value) const {
        if (value.is_string())
            value = std::string(this->value(value));
        else if (value.is_structured())
            for (nlohmann::ordered_json& part : value) restore(part);
    }
    // Fails if the line has a number whose digits may be lost.
    void refuse_long_numbers() const {
        if (has_long_number_)
            fail("%s has a number of 19 or more digits: in a chat, write it as a text", where_);
    }
    // The most memory that the object takes beside the line, and that a conversation or a prompt takes.
    size_t bytes() const { return counts_.parsed() + strings_.capacity() * kBytesOfTaken; }
    size_t bytes_as_chat() const { return bytes() + kCopiesOfLine * line_.size() + counts_.of_template(); }

  private:
    static constexpr size_t kShort = 256;                                   // longer strings are taken out
    static constexpr size_t kBytesOfTaken = sizeof(std::string_view) + 16;  // and a Move
    static constexpr std::string_view kNul = "\\u0000";                     // a placeholder begins with this

    [[noreturn]] void refuse(size_t at, const char* what) const {
        fail("%s: broken JSON: at column %zu: %s", where_, at + 1, what);
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
        const char *const from = &line_[at], *const to = from + std::min<size_t>(4, end - at);
        if (std::from_chars(from, to, code, 16).ptr != from + 4)
            refuse(start, "an escape \\u without four hexadecimal digits");
        at += 4;
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
    JsonCounts counts_{""};  // of rest_
    std::vector<std::string_view> strings_;
    std::vector<Move> moves_;
    nlohmann::ordered_json json_;
    bool has_long_number_ = false;
};
