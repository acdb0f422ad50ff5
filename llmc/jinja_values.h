// jinja_values.h - the values that a chat template computes with, which behave as Python's do: how they are
// compared, printed and written as JSON. jinja.h runs templates; read this to know what a value is.
//
// Values are immutable and shared, so copying one is cheap. What a template may make is bounded: each value
// is paid for from the template's Work, and values nest at most kDeepestValue deep.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>
#include <utf8proc.h>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/jinja_strings.h"
#include "llmc/utf8.h"

namespace jinja {

// How much a template may still do. A step costs 1, and so do 16 bytes that are made. Templates that go on
// for ever, or make more and more text, are ended with an error.
class Work {
  public:
    // For a template that is given `bytes` of input.
    explicit Work(size_t bytes) : left_(kMostSteps + 64 * bytes) {}

    void spend(size_t bytes = 0) {
        const uint64_t cost = 1 + bytes / 16;
        if (cost > left_)
            fail("does too much: more than %lu million steps, where 16 bytes of text count as one",
                 kMostSteps / 1'000'000);
        left_ -= cost;
    }
    uint64_t left() const { return left_; }

    static constexpr uint64_t kMostSteps = 20'000'000;

  private:
    uint64_t left_;
};

constexpr int kDeepestValue = 200;

class Value;
using Values = std::vector<Value>;
struct DictEntry;
using Entries = std::vector<DictEntry>;  // in the order in which they were added; each key once

enum class Kind {
    Undefined,
    None,
    Bool,
    Int,
    Float,
    String,
    List,
    Tuple,
    View,  // what keys(), values(), items() and range() give: its items are a list's, and it is no list
    Dict,
    Generator,  // what filters like map and select give: a list that is gone through once
    Namespace,  // namespace(): the only value that a template can change
    Loop,       // the variable `loop`
    Method,     // of a string, list or dict, as in `text.strip`
    Function    // a macro or one of the functions that every template has
};

// What a value has beside its kind, if that is more than a number.
struct Object {
    int depth = 0;  // how deeply values nest in this one
    virtual ~Object() = default;
};

class Value {
  public:
    Value() = default;  // undefined
    static Value none() { return Value(Kind::None); }
    static Value boolean(bool b) { return Value(Kind::Bool, b); }
    static Value integer(int64_t i) { return Value(Kind::Int, i); }
    static Value real(double d) { return Value(d); }
    static Value string(std::string text);
    // A value that is not defined; `why` is the message of the error that using it gives.
    static Value undefined(std::string why);
    static Value list(Values items, Kind kind = Kind::List);
    static Value dict(Entries entries);
    static Value object(Kind kind, std::shared_ptr<const Object> object) {
        Value v(kind);
        v.object_ = std::move(object);
        return v;
    }
    static Value from_json(const nlohmann::ordered_json& json, int depth = 0);

    Kind kind() const { return kind_; }
    bool is(Kind kind) const { return kind_ == kind; }
    bool is_string() const { return kind_ == Kind::String; }
    bool is_undefined() const { return kind_ == Kind::Undefined; }
    bool is_list() const { return kind_ == Kind::List || kind_ == Kind::Tuple; }
    bool has_items() const { return is_list() || kind_ == Kind::View; }
    // Python's True and False are the numbers 1 and 0 too.
    bool is_integer() const { return kind_ == Kind::Int || kind_ == Kind::Bool; }
    bool is_number() const { return is_integer() || kind_ == Kind::Float; }

    int64_t integer() const { return integer_; }
    double number() const { return kind_ == Kind::Float ? real_ : static_cast<double>(integer_); }
    const std::string& text() const;  // of a string
    const std::string& why() const;   // of an undefined value
    const Values& items() const;      // of a list, tuple, view or generator
    const Entries& entries() const;   // of a dict
    const Object* object() const { return object_.get(); }
    template <class T>
    const T& as() const {
        return static_cast<const T&>(*object_);
    }
    // Text that the filter `safe` marked: added to other text, it makes that be escaped as HTML.
    bool is_safe() const { return is_safe_; }
    Value as_safe() const {
        Value v = *this;
        v.is_safe_ = true;
        return v;
    }
    int depth() const { return object_ ? object_->depth : 0; }

    bool truth() const;
    const Value* find(Work& work, const Value& key) const;  // in a dict; null if it has no such key
    const Value* find(std::string_view key) const;

  private:
    explicit Value(Kind kind, int64_t integer = 0) : kind_(kind), integer_(integer) {}
    explicit Value(double real) : kind_(Kind::Float), real_(real) {}

    Kind kind_ = Kind::Undefined;
    bool is_safe_ = false;
    union {
        int64_t integer_ = 0;
        double real_;
    };
    std::shared_ptr<const Object> object_;
};

struct DictEntry {
    Value key, value;
};

struct TextObject : Object {
    explicit TextObject(std::string t) : text(std::move(t)) {}
    const std::string text;
};
struct ListObject : Object {
    Values items;
    mutable bool is_used = false;  // a generator that was gone through
};
struct DictObject : Object {
    Entries entries;
};
// A namespace belongs to the run of the template; values only refer to it.
struct Namespace {
    Entries attributes;
};
struct NamespaceObject : Object {
    explicit NamespaceObject(Namespace* n) : space(n) {}
    Namespace* const space;
};
struct MethodObject : Object {
    MethodObject(Value v, std::string n) : self(std::move(v)), name(std::move(n)) {
        depth = self.depth() + 1;
    }
    const Value self;
    const std::string name;
};

inline void check_depth(int depth) {
    if (depth > kDeepestValue) fail("lists and dicts nest more than %d deep", kDeepestValue);
}
// Notes that an object holds a value. Loops and methods are only used directly: in a list, `loop` could come
// to contain itself.
inline void hold(Object& object, const Value& v) {
    if (v.is(Kind::Loop) || v.is(Kind::Method))
        fail("a list or dict that holds a %s is not supported", v.is(Kind::Loop) ? "loop" : "method");
    object.depth = std::max(object.depth, v.depth() + 1);
    check_depth(object.depth);
}

inline Value Value::string(std::string text) {
    return object(Kind::String, std::make_shared<TextObject>(std::move(text)));
}
inline Value Value::undefined(std::string why) {
    return object(Kind::Undefined, std::make_shared<TextObject>(std::move(why)));
}
inline Value Value::list(Values items, Kind kind) {
    auto made = std::make_shared<ListObject>();
    for (const Value& item : items) hold(*made, item);
    made->items = std::move(items);
    return object(kind, std::move(made));
}
inline Value Value::dict(Entries entries) {
    auto made = std::make_shared<DictObject>();
    for (const DictEntry& e : entries) hold(*made, e.key), hold(*made, e.value);
    made->entries = std::move(entries);
    return object(Kind::Dict, std::move(made));
}

inline const std::string& Value::text() const { return as<TextObject>().text; }
inline const std::string& Value::why() const {
    static const std::string unnamed = "a value is undefined";
    return object_ ? as<TextObject>().text : unnamed;
}
inline const Values& Value::items() const { return as<ListObject>().items; }
inline const Entries& Value::entries() const { return as<DictObject>().entries; }

inline Value Value::from_json(const nlohmann::ordered_json& json, int depth) {
    check_depth(depth);
    if (json.is_null()) return none();
    if (json.is_boolean()) return boolean(json.get<bool>());
    if (json.is_string()) return string(json.get<std::string>());
    if (json.is_number_float()) return real(json.get<double>());
    if (json.is_number_unsigned() && json.get<uint64_t>() > INT64_MAX) fail("has a number of 2^63 or more");
    if (json.is_number()) return integer(json.get<int64_t>());
    if (json.is_array()) {
        Values items;
        items.reserve(json.size());
        for (const auto& item : json) items.push_back(from_json(item, depth + 1));
        return list(std::move(items));
    }
    Entries entries;
    entries.reserve(json.size());
    for (const auto& [key, value] : json.items())
        entries.push_back({string(key), from_json(value, depth + 1)});
    return dict(std::move(entries));
}

inline bool Value::truth() const {
    switch (kind_) {
        case Kind::Undefined:
        case Kind::None:
            return false;
        case Kind::Bool:
        case Kind::Int:
            return integer_ != 0;
        case Kind::Float:
            return real_ != 0;
        case Kind::String:
            return !text().empty();
        case Kind::List:
        case Kind::Tuple:
        case Kind::View:
            return !items().empty();
        case Kind::Dict:
            return !entries().empty();
        default:
            return true;
    }
}

// Python's ==. Values of different kinds differ, except numbers, and True and False, which are 1 and 0.
// Values are shared, so a small template can make one that takes for ever to go through: each step is paid.
inline bool equal(Work& work, const Value& a, const Value& b) {
    work.spend();
    if (a.is_integer() && b.is_integer()) return a.integer() == b.integer();
    if (a.is_number() && b.is_number()) return a.number() == b.number();
    if (a.kind() != b.kind()) return false;
    switch (a.kind()) {
        case Kind::Undefined:
        case Kind::None:
            return true;
        case Kind::String:
            if (a.text().size() != b.text().size()) return false;
            work.spend(a.text().size());
            return a.text() == b.text();
        case Kind::List:
        case Kind::Tuple: {
            const Values &x = a.items(), &y = b.items();
            const auto same = [&](const Value& one, const Value& other) { return equal(work, one, other); };
            return x.size() == y.size() && std::equal(x.begin(), x.end(), y.begin(), same);
        }
        case Kind::Dict: {
            if (a.entries().size() != b.entries().size()) return false;
            for (const DictEntry& e : a.entries())
                if (const Value* other = b.find(work, e.key); !other || !equal(work, e.value, *other))
                    return false;
            return true;
        }
        case Kind::View:
            fail("a view of keys(), items() or range() is not compared: put | list after it");
        default:
            return a.object() == b.object();
    }
}

inline const Value* Value::find(Work& work, const Value& key) const {
    for (const DictEntry& e : entries())
        if (equal(work, e.key, key)) return &e.value;
    return nullptr;
}
inline const Value* Value::find(std::string_view key) const {
    for (const DictEntry& e : entries())
        if (e.key.is_string() && e.key.text() == key) return &e.value;
    return nullptr;
}

// Adds an entry, or replaces the value of a key that is there.
inline void put(Work& work, Entries& entries, const Value& key, const Value& value) {
    for (DictEntry& e : entries)
        if (equal(work, e.key, key)) {
            e.value = value;
            return;
        }
    entries.push_back({key, value});
}
inline void put(Entries& entries, std::string_view key, const Value& value) {
    for (DictEntry& e : entries)
        if (e.key.is_string() && e.key.text() == key) {
            e.value = value;
            return;
        }
    entries.push_back({Value::string(std::string(key)), value});
}

// The name of a value's type, as Python's error messages give it.
inline const char* type_name(const Value& v) {
    static constexpr const char* kNames[] = {"Undefined", "NoneType",  "bool",
                                             "int",       "float",     "str",
                                             "list",      "tuple",     "view of keys(), items() or range()",
                                             "dict",      "generator", "namespace",
                                             "loop",      "function",  "function"};
    static_assert(std::size(kNames) == static_cast<size_t>(Kind::Function) + 1);
    return kNames[static_cast<size_t>(v.kind())];
}

// Fails if a value is undefined. Returns it.
inline const Value& defined(const Value& v) {
    if (v.is_undefined()) fail("%s", printable(v.why().substr(0, 200)));
    return v;
}

// ---- printing

// A float as Python prints it: the fewest digits that give the same number.
inline std::string float_text(double d) {
    if (std::isnan(d)) return "nan";
    if (std::isinf(d)) return d < 0 ? "-inf" : "inf";
    const double size = std::abs(d);
    const bool is_fixed = d == 0 || (size >= 1e-4 && size < 1e16);
    char digits[64];
    const auto style = is_fixed ? std::chars_format::fixed : std::chars_format::scientific;
    const std::string text(digits, std::to_chars(digits, std::end(digits), d, style).ptr);
    return is_fixed && text.find('.') == text.npos ? text + ".0" : text;
}

// True for the characters that Python's repr() writes as they are.
inline bool is_printable(int32_t c) {
    const std::string_view category = utf8proc_category_string(c);
    return c == ' ' || (category[0] != 'C' && category[0] != 'Z');
}

// A text in quotes. escape(code) gives what stands for a character, or "" for the character itself.
template <class Escape>
std::string quoted(std::string_view text, char quote, Escape&& escape) {
    std::string out(1, quote);
    for (const std::string_view c : characters(text)) {
        const std::string escaped = c[0] == quote || c[0] == '\\' ? "\\" + std::string(c)
                                    : c[0] == '\n'                ? "\\n"
                                    : c[0] == '\r'                ? "\\r"
                                    : c[0] == '\t'                ? "\\t"
                                                                  : escape(first_character(c).code);
        out += escaped.empty() ? c : escaped;
    }
    return out + quote;
}

// A string as Python's repr() writes it.
inline std::string repr_of_text(std::string_view text) {
    const bool has_single = text.find('\'') != text.npos, has_double = text.find('"') != text.npos;
    return quoted(text, has_single && !has_double ? '"' : '\'', [](int32_t code) -> std::string {
        const auto c = static_cast<unsigned>(code);
        if (is_printable(code)) return "";
        return c < 0x100 ? format("\\x%02x", c) : c < 0x10000 ? format("\\u%04x", c) : format("\\U%08x", c);
    });
}

// How to write JSON, as in Python's json.dumps().
struct JsonStyle {
    bool ascii = false, sorts_keys = false, breaks_lines = false;
    std::string indent, item_separator = ", ", key_separator = ": ";
};

inline std::string json_string(std::string_view text, bool ascii) {
    return quoted(text, '"', [&](int32_t code) -> std::string {
        const auto c = static_cast<unsigned>(code);
        if (c == '\f' || c == '\b') return c == '\f' ? "\\f" : "\\b";
        if (c < 0x20 || (ascii && c >= 0x7f && c < 0x10000)) return format("\\u%04x", c);
        if (!ascii || c < 0x10000) return "";
        return format("\\u%04x\\u%04x", 0xd800 + ((c - 0x10000) >> 10), 0xdc00 + (c & 0x3ff));
    });
}

// Writes values as JSON in a style, or without one as Python's repr().
class ValueWriter {
  public:
    explicit ValueWriter(Work& work, const JsonStyle* json = nullptr)
        : work_(work), is_json_(json), style_(json ? *json : JsonStyle()) {}

    std::string write(const Value& v) {
        work_.spend(v.is_string() ? v.text().size() : 0);
        switch (v.kind()) {
            case Kind::Undefined:
                if (is_json_) break;
                return "Undefined";
            case Kind::None:
                return is_json_ ? "null" : "None";
            case Kind::Bool:
                return is_json_ ? (v.integer() ? "true" : "false") : (v.integer() ? "True" : "False");
            case Kind::Int:
                return std::to_string(v.integer());
            case Kind::Float:
                if (!is_json_ || std::isfinite(v.number())) return float_text(v.number());
                return std::isnan(v.number()) ? "NaN" : v.number() < 0 ? "-Infinity" : "Infinity";
            case Kind::String:
                return is_json_ ? json_string(v.text(), style_.ascii) : repr_of_text(v.text());
            case Kind::List:
                return list(v.items(), "[", "]");
            case Kind::Tuple:
                if (is_json_) return list(v.items(), "[", "]");
                return list(v.items(), "(", v.items().size() == 1 ? ",)" : ")");
            case Kind::Dict:
                return dict(v.entries());
            default:
                break;
        }
        if (is_json_) fail("tojson: Object of type %s is not JSON serializable", type_name(v));
        if (v.is(Kind::Generator))
            fail("a generator, as filters like map and select give, cannot be printed: put | list after it");
        fail("a %s cannot be printed", type_name(v));
    }

  private:
    std::string list(const Values& items, const char* open, const char* close) {
        std::string out = open;
        depth_++;
        for (const Value& item : items) {
            begin_item(out);
            out += write(item);
        }
        return end(out, !items.empty(), close);
    }
    std::string dict(Entries entries) {
        if (style_.sorts_keys)
            std::ranges::stable_sort(entries, [&](const DictEntry& a, const DictEntry& b) {
                return json_key(a.key) < json_key(b.key);
            });
        std::string out = "{";
        depth_++;
        for (const DictEntry& e : entries) {
            begin_item(out);
            work_.spend(style_.key_separator.size());
            out += is_json_ ? json_string(json_key(e.key), style_.ascii) : write(e.key);
            out += style_.key_separator + write(e.value);
        }
        return end(out, !entries.empty(), "}");
    }
    // The text of a dict's key in JSON, where keys are strings.
    std::string json_key(const Value& key) {
        work_.spend(key.is_string() ? key.text().size() : 0);
        if (key.is_string()) return key.text();
        if (key.is_number() || key.is(Kind::None)) return write(key);
        fail("tojson: a %s cannot be a key in JSON", type_name(key));
    }
    void begin_item(std::string& out) {
        work_.spend(style_.item_separator.size());
        if (out.size() > 1) out += style_.item_separator;
        break_line(out);
    }
    std::string end(std::string& out, bool any, const char* close) {
        depth_--;
        if (any) break_line(out);
        work_.spend(out.size());
        return out + close;
    }
    void break_line(std::string& out) {
        if (!style_.breaks_lines) return;
        work_.spend(static_cast<size_t>(depth_) * style_.indent.size());
        out += '\n';
        for (int i = 0; i < depth_; i++) out += style_.indent;
    }

    Work& work_;
    const bool is_json_;
    const JsonStyle style_;
    int depth_ = 0;
};

inline std::string repr(Work& work, const Value& v) { return ValueWriter(work).write(v); }

// Python's str(): what `{{ value }}` prints.
inline std::string str(Work& work, const Value& v) {
    if (v.is_undefined()) return "";
    if (!v.is_string()) return repr(work, v);
    work.spend(v.text().size());
    return v.text();
}

}  // namespace jinja
