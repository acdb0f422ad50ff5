// jinja_builtins.h - what chat templates can do with values: operators, attributes and subscripts, methods of
// strings, lists and dicts, filters and tests. They give what Jinja's and Python's give, or fail in one line.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/jinja_strings.h"
#include "llmc/jinja_values.h"

namespace jinja {

// The arguments of a call.
struct Arguments {
    Values positional;
    std::vector<std::pair<std::string, Value>> named;
};

// The arguments of a call by the parameters' names. Fails if there are too many, or one that is unknown.
class Parameters {
  public:
    Parameters(const Arguments& arguments, std::initializer_list<const char*> names, size_t required = 0)
        : values_(names.size()) {
        if (arguments.positional.size() > names.size())
            fail("takes at most %zu argument%s", names.size(), names.size() == 1 ? "" : "s");
        for (size_t i = 0; i < arguments.positional.size(); i++) values_[i] = arguments.positional[i];
        for (const auto& [name, value] : arguments.named) {
            const auto found = std::ranges::find(names, name);
            if (found == names.end()) fail("has no parameter \"%s\"", printable(name.substr(0, 60)));
            values_[static_cast<size_t>(found - names.begin())] = value;
        }
        for (size_t i = 0; i < required; i++)
            if (!values_[i]) fail("misses its argument \"%s\"", names.begin()[i]);
    }

    bool has(size_t i) const { return values_[i].has_value(); }
    // True if the argument is given and is not None.
    bool is_set(size_t i) const { return has(i) && !values_[i]->is(Kind::None); }
    const Value& operator[](size_t i) const { return *values_[i]; }
    bool truth(size_t i) const { return has(i) && values_[i]->truth(); }
    int64_t integer(size_t i, int64_t otherwise) const {
        if (!is_set(i)) return otherwise;
        if (!values_[i]->is_integer())
            fail("'%s' object cannot be interpreted as an integer", type_name(*values_[i]));
        return values_[i]->integer();
    }
    const std::string& text(size_t i) const {
        if (!values_[i]->is_string()) fail("an argument must be str, not %s", type_name(*values_[i]));
        return values_[i]->text();
    }
    std::optional<std::string> optional_text(size_t i) const {
        if (!is_set(i)) return std::nullopt;
        return text(i);
    }

  private:
    std::vector<std::optional<Value>> values_;
};

// Calls use(). If it fails, puts what name() gives before the message.
template <class Name, class Use>
decltype(auto) about(Name&& name, Use&& use) {
    try {
        return use();
    } catch (const UserError& error) {
        throw UserError(name() + ": " + error.what());
    }
}

// A new string, paid for.
inline Value new_string(Work& work, std::string text) {
    work.spend(text.size());
    return Value::string(std::move(text));
}
inline Value new_list(Work& work, Values items, Kind kind = Kind::List) {
    work.spend(items.size() * sizeof(Value));
    return Value::list(std::move(items), kind);
}
inline Value new_strings(Work& work, const std::vector<std::string>& texts) {
    Values items;
    for (const std::string& text : texts) items.push_back(new_string(work, text));
    return new_list(work, std::move(items));
}

// What a loop over a value goes through: items, a dict's keys, a string's characters. A generator can be used
// once: what Jinja gives after that depends on how much of it was used.
inline Values items_of(Work& work, const Value& v) {
    Values items;
    if (v.has_items()) {
        items = v.items();
    } else if (v.is(Kind::Dict)) {
        for (const DictEntry& e : v.entries()) items.push_back(e.key);
    } else if (v.is_string()) {
        work.spend(64 * v.text().size());
        for (const std::string_view c : characters(v.text())) items.push_back(Value::string(std::string(c)));
    } else if (v.is(Kind::Generator)) {
        if (std::exchange(v.as<ListObject>().is_used, true))
            fail("a generator is used again: put | list after what makes it");
        items = v.items();
    } else if (!v.is_undefined()) {
        fail("'%s' object is not iterable", type_name(v));
    }
    work.spend(items.size() * sizeof(Value));
    return items;
}

inline int64_t length_of(const Value& v) {
    if (v.has_items()) return static_cast<int64_t>(v.items().size());
    if (v.is(Kind::Dict)) return static_cast<int64_t>(v.entries().size());
    if (v.is_string()) return static_cast<int64_t>(count_characters(v.text()));
    if (v.is_undefined()) return 0;
    fail("object of type '%s' has no len()", type_name(v));
}

// ---- operators

// Python's <, for numbers, strings and lists.
inline bool less(Work& work, const Value& a, const Value& b) {
    if (a.is_integer() && b.is_integer()) return a.integer() < b.integer();
    if (a.is_number() && b.is_number()) return a.number() < b.number();
    work.spend(a.is_string() && b.is_string() ? std::min(a.text().size(), b.text().size()) : 0);
    if (a.is_string() && b.is_string()) return a.text() < b.text();
    if (a.is_list() && a.kind() == b.kind()) {
        for (size_t i = 0; i < std::min(a.items().size(), b.items().size()); i++)
            if (!equal(work, a.items()[i], b.items()[i])) return less(work, a.items()[i], b.items()[i]);
        return a.items().size() < b.items().size();
    }
    defined(a), defined(b);
    fail("'<' not supported between instances of '%s' and '%s'", type_name(a), type_name(b));
}

// True if `whole` contains `part`: Python's `in`.
inline bool contains(Work& work, const Value& whole, const Value& part) {
    if (whole.is_string()) {
        if (!part.is_string()) fail("'in <string>' requires string as left operand, not %s", type_name(part));
        work.spend(whole.text().size());
        return whole.text().find(part.text()) != std::string::npos;
    }
    if (whole.is(Kind::Dict)) return whole.find(work, part) != nullptr;
    for (const Value& item : items_of(work, whole))
        if (equal(work, item, part)) return true;
    return false;
}

inline bool compare(Work& work, std::string_view op, const Value& a, const Value& b) {
    work.spend();
    if (op == "==") return equal(work, a, b);
    if (op == "!=") return !equal(work, a, b);
    if (op == "<") return less(work, a, b);
    if (op == ">") return less(work, b, a);
    const bool is_nan = a.is_number() && b.is_number() && (std::isnan(a.number()) || std::isnan(b.number()));
    if (op == "<=") return !is_nan && !less(work, b, a);
    if (op == ">=") return !is_nan && !less(work, a, b);
    return contains(work, b, a) == (op == "in");
}

[[noreturn]] inline void refuse_operator(std::string_view op, const Value& a, const Value& b) {
    defined(a), defined(b);
    fail("unsupported operand type(s) for %s: '%s' and '%s'", std::string(op), type_name(a), type_name(b));
}

inline Value integer_arithmetic(std::string_view op, int64_t a, int64_t b) {
    int64_t result = 0;
    bool overflows = false;
    if (op == "+") overflows = __builtin_add_overflow(a, b, &result);
    if (op == "-") overflows = __builtin_sub_overflow(a, b, &result);
    if (op == "*") overflows = __builtin_mul_overflow(a, b, &result);
    if (op == "/" || op == "//" || op == "%") {
        if (b == 0) fail("division by zero");
        if (op == "/") return Value::real(static_cast<double>(a) / static_cast<double>(b));
        overflows = a == INT64_MIN && b == -1;
        if (!overflows) {
            const int64_t rest = a % b, below = rest != 0 && (rest < 0) != (b < 0);
            result = op == "%" ? rest + below * b : a / b - below;
        }
    }
    if (overflows) fail("a number is too large");
    return Value::integer(result);
}

inline Value float_arithmetic(std::string_view op, double a, double b) {
    if (op == "+") return Value::real(a + b);
    if (op == "-") return Value::real(a - b);
    if (op == "*") return Value::real(a * b);
    if (b == 0) fail("division by zero");
    if (op == "/") return Value::real(a / b);
    double rest = std::fmod(a, b);
    if (rest != 0 && (rest < 0) != (b < 0)) rest += b;
    return Value::real(op == "%" ? rest : std::round((a - rest) / b));
}

inline Value repeated(Work& work, const Value& what, int64_t count) {
    const auto times = static_cast<uint64_t>(std::max<int64_t>(count, 0));
    const uint64_t size = what.is_string() ? what.text().size() : what.items().size() * sizeof(Value);
    if (size > 0 && times > (uint64_t{1} << 40) / size) fail("makes too long a text or list");
    work.spend(size * times);
    std::string text;
    Values items;
    for (uint64_t i = 0; i < (size > 0 ? times : 0); i++)
        if (what.is_string())
            text += what.text();
        else
            items.insert(items.end(), what.items().begin(), what.items().end());
    return what.is_string() ? Value::string(std::move(text)) : Value::list(std::move(items), what.kind());
}

inline Value added(Work& work, const Value& a, const Value& b) {
    if (a.is_string() && b.is_string()) {
        const bool safe = a.is_safe() || b.is_safe();
        const auto part = [&](const Value& v) { return safe && !v.is_safe() ? escaped(v.text()) : v.text(); };
        const Value sum = new_string(work, part(a) + part(b));
        return safe ? sum.as_safe() : sum;
    }
    if (a.is_list() && a.kind() == b.kind()) {
        Values items = a.items();
        items.insert(items.end(), b.items().begin(), b.items().end());
        return new_list(work, std::move(items), a.kind());
    }
    if (a.is_string() && !b.is_undefined())
        fail("can only concatenate str (not \"%s\") to str", type_name(b));
    refuse_operator("+", a, b);
}

// Python's `pattern % values`, with %s, %r, %d, %i and %%.
inline Value formatted(Work& work, const std::string& pattern, const Values& values) {
    std::string out;
    size_t used = 0;
    work.spend(pattern.size());
    for (size_t at = 0; at < pattern.size(); at++) {
        const char kind = pattern[at] != '%' ? '\0' : ++at < pattern.size() ? pattern[at] : ' ';
        if (kind == '\0' || kind == '%') {
            out += pattern[at];
            continue;
        }
        if (std::string_view("srdi").find(kind) == std::string_view::npos)
            fail("the format \"%%%s\" is not supported in `%%`; %%s, %%r, %%d and %%i are",
                 printable(std::string(1, kind)));
        if (used == values.size()) fail("not enough arguments for format string");
        const Value& v = values[used++];
        if (kind == 's' || kind == 'r') {
            out += kind == 's' ? str(work, v) : repr(work, v);
            continue;
        }
        if (!v.is_number())
            fail("%%%c format: a real number is required, not %s", kind, type_name(defined(v)));
        if (!v.is_integer() && !(std::abs(v.number()) < 0x1p63)) fail("a number is too large");
        out += std::to_string(v.is_integer() ? v.integer() : static_cast<int64_t>(v.number()));
    }
    if (used < values.size()) fail("not all arguments converted during string formatting");
    return new_string(work, std::move(out));
}

inline Value arithmetic(Work& work, std::string_view op, const Value& a, const Value& b) {
    work.spend();
    if (a.is_integer() && b.is_integer()) return integer_arithmetic(op, a.integer(), b.integer());
    if (a.is_number() && b.is_number()) return float_arithmetic(op, a.number(), b.number());
    if (op == "+") return added(work, a, b);
    if (op == "*" && (a.is_string() || a.is_list()) && b.is_integer()) return repeated(work, a, b.integer());
    if (op == "*" && (b.is_string() || b.is_list()) && a.is_integer()) return repeated(work, b, a.integer());
    if (op == "%" && a.is_string()) {
        if (a.is_safe()) fail("a format that is marked as safe is not supported");
        return formatted(work, a.text(), b.is(Kind::Tuple) ? b.items() : Values{b});
    }
    refuse_operator(op, a, b);
}

// ---- attributes and subscripts

// The variable `loop`.
struct LoopObject : Object {
    Values items;
    size_t index = 0;
};

inline Value loop_attribute(const LoopObject& loop, const std::string& name) {
    const auto i = static_cast<int64_t>(loop.index), n = static_cast<int64_t>(loop.items.size());
    if (name == "index") return Value::integer(i + 1);
    if (name == "index0") return Value::integer(i);
    if (name == "first") return Value::boolean(i == 0);
    if (name == "last") return Value::boolean(i + 1 == n);
    if (name == "length") return Value::integer(n);
    if (name == "revindex") return Value::integer(n - i);
    if (name == "revindex0") return Value::integer(n - i - 1);
    if (name == "depth") return Value::integer(1);  // as no loop is recursive
    if (name == "depth0") return Value::integer(0);
    if (name == "cycle" || name == "changed") fail("loop.%s() is not supported", name);
    if (name == "previtem")
        return i > 0 ? loop.items[loop.index - 1] : Value::undefined("there is no previous item");
    if (name == "nextitem")
        return i + 1 < n ? loop.items[loop.index + 1] : Value::undefined("there is no next item");
    return Value::undefined("'loop' has no attribute '" + name + "'");
}

inline bool is_method(const Value& v, std::string_view name) {
    static const std::set<std::string_view> strings = {
        "strip",       "lstrip",   "rstrip",     "split",     "rsplit",       "splitlines",   "startswith",
        "endswith",    "replace",  "upper",      "lower",     "title",        "capitalize",   "find",
        "rfind",       "index",    "rindex",     "count",     "join",         "isdigit",      "isalpha",
        "isalnum",     "isspace",  "isupper",    "islower",   "removeprefix", "removesuffix", "partition",
        "rpartition",  "zfill",    "ljust",      "rjust",     "center",       "format",       "encode",
        "casefold",    "swapcase", "expandtabs", "isdecimal", "isnumeric",    "isidentifier", "istitle",
        "isprintable", "isascii",  "translate",  "maketrans", "format_map"};
    static const std::set<std::string_view> dicts = {"get", "items", "keys", "values", "copy", "fromkeys"};
    static const std::set<std::string_view> lists = {"index", "count", "copy"};
    if (v.is_string()) return strings.contains(name);
    if (v.is(Kind::Dict)) return dicts.contains(name);
    return v.is_list() && lists.contains(name);
}

// True for methods that change a list or dict, which Jinja's sandbox hides.
inline bool is_hidden_method(const Value& v, std::string_view name) {
    static const std::set<std::string_view> dicts = {"clear", "pop", "popitem", "setdefault", "update"};
    static const std::set<std::string_view> lists = {"append", "clear",   "extend", "insert",
                                                     "pop",    "reverse", "remove", "sort"};
    return v.is(Kind::Dict) ? dicts.contains(name) : v.is(Kind::List) && lists.contains(name);
}

inline Value attribute_only(const Value& v, const std::string& name) {
    if (v.is(Kind::View)) fail("parts of a %s are not supported: put | list after it", type_name(v));
    if (is_method(v, name)) return Value::object(Kind::Method, std::make_shared<MethodObject>(v, name));
    if (v.is(Kind::Loop)) return loop_attribute(v.as<LoopObject>(), name);
    if (v.is(Kind::Namespace))
        for (const DictEntry& e : v.as<NamespaceObject>().space->attributes)
            if (e.key.text() == name) return e.value;
    if (is_hidden_method(v, name))
        return Value::undefined(
            format("the method %s.%s() changes its value, which is not allowed", type_name(v), name));
    return Value::undefined(
        format("'%s object' has no attribute '%s'", type_name(v), printable(name.substr(0, 60))));
}

// v.name: a method or attribute, else a dict's entry.
inline Value attribute(Work& work, const Value& v, const std::string& name) {
    work.spend();
    defined(v);
    if (v.is(Kind::Dict) && !is_method(v, name) && !is_hidden_method(v, name)) {
        work.spend(v.entries().size());
        if (const Value* found = v.find(name)) return *found;
    }
    return attribute_only(v, name);
}

// v[key]: an entry or item, else an attribute.
inline Value item(Work& work, const Value& v, const Value& key) {
    work.spend();
    defined(v);
    if (v.is(Kind::Dict)) {
        work.spend(v.entries().size());
        if (const Value* found = v.find(work, key)) return *found;
    } else if (key.is_integer() && (v.is_list() || v.is_string())) {
        if (v.is_string()) work.spend(v.text().size());
        const int64_t length = length_of(v), at = key.integer() + (key.integer() < 0 ? length : 0);
        if (at >= 0 && at < length) {
            if (v.is_list()) return v.items()[static_cast<size_t>(at)];
            const size_t begin = byte_of(v.text(), static_cast<size_t>(at));
            const std::string_view rest = std::string_view(v.text()).substr(begin);
            return new_string(work, std::string(rest.substr(0, first_character(rest).length)));
        }
    }
    if (key.is_string() || v.is(Kind::View)) return attribute_only(v, key.is_string() ? key.text() : "");
    return Value::undefined(format("'%s object' has no element %s", type_name(v),
                                   key.is_number() || key.is(Kind::None) ? repr(work, key) : "of that kind"));
}

// v[start:stop:step]; a value that is None is left out.
inline Value slice(Work& work, const Value& v, const Value& start, const Value& stop, const Value& step) {
    if (!v.is_string() && !v.is_list()) {
        fail("'%s' object cannot be sliced", type_name(defined(v)));
    }
    const auto number = [](const Value& given, int64_t otherwise) {
        if (given.is(Kind::None)) return otherwise;
        if (!given.is_integer()) fail("slice indices must be integers or None");
        return given.integer();
    };
    const int64_t by = number(step, 1), n = length_of(v);
    if (by == 0) fail("slice step cannot be zero");
    // Counts from the end if negative, and stays within the list.
    const auto bounded = [&](int64_t at) {
        if (at < 0) at += n;
        return std::clamp<int64_t>(at, by < 0 ? -1 : 0, by < 0 ? n - 1 : n);
    };
    const int64_t from = start.is(Kind::None) ? (by < 0 ? n - 1 : 0) : bounded(number(start, 0));
    const int64_t to = stop.is(Kind::None) ? (by < 0 ? -1 : n) : bounded(number(stop, 0));
    if (v.is_string() && by == 1) {
        const size_t begin = byte_of(v.text(), static_cast<size_t>(from));
        const std::string_view rest = std::string_view(v.text()).substr(begin);
        return new_string(work, std::string(rest.substr(
                                    0, byte_of(rest, static_cast<size_t>(std::max<int64_t>(to - from, 0))))));
    }
    const Values all = items_of(work, v);
    Values items;
    std::string text;
    for (int64_t at = from; by > 0 ? at < to : at > to; at += by) {
        const Value& one = all[static_cast<size_t>(at)];
        v.is_string() ? static_cast<void>(text += one.text()) : items.push_back(one);
        if (by > n || by < -n) break;
    }
    return v.is_string() ? new_string(work, text) : new_list(work, std::move(items), v.kind());
}

// What filters like map and select go through, which take any value that is not true as empty.
inline Values items_if_any(Work& work, const Value& v) { return v.truth() ? items_of(work, v) : Values(); }

// Follows a path of attributes, as "function.name", which filters like map(attribute=...) take.
inline Value follow(Work& work, Value v, const Value& path) {
    if (path.is_integer()) return item(work, v, path);
    if (!path.is_string()) fail("an attribute's name must be a text");
    for (const std::string& part : split(path.text(), ".", -1)) {
        const bool is_number = all_characters(part, [](int32_t c) { return c >= '0' && c <= '9'; });
        v = item(work, v,
                 is_number && part.size() < 10 ? Value::integer(std::stoll(part)) : Value::string(part));
    }
    return v;
}

// ---- methods

inline std::string join_texts(Work& work, const std::string& separator, const Values& items) {
    std::string out;
    for (size_t i = 0; i < items.size(); i++) {
        if (!items[i].is_string())
            fail("sequence item %zu: expected str instance, %s found", i, type_name(items[i]));
        work.spend(items[i].text().size() + separator.size());
        (out += i > 0 ? separator : "") += items[i].text();
    }
    return out;
}

// Methods that tell something about a string; nothing for others.
inline std::optional<Value> string_question(const Value& self, const std::string& name, const Arguments& a) {
    const std::string& text = self.text();
    const auto number = [](size_t n) { return Value::integer(static_cast<int64_t>(n)); };
    if (name == "startswith" || name == "endswith") {
        const Value affix = Parameters(a, {"prefix"}, 1)[0];
        return Value::boolean(
            std::ranges::any_of(affix.is(Kind::Tuple) ? affix.items() : Values{affix}, [&](const Value& one) {
                if (!one.is_string()) fail("startswith and endswith take a str or a tuple of them");
                return name == "startswith" ? text.starts_with(one.text()) : text.ends_with(one.text());
            }));
    }
    if (name == "find" || name == "rfind" || name == "index" || name == "rindex") {
        const std::string part = Parameters(a, {"sub"}, 1).text(0);
        const size_t at = name[0] == 'r' ? text.rfind(part) : text.find(part);
        if (at != text.npos) return number(count_characters(std::string_view(text).substr(0, at)));
        if (name.ends_with("index")) fail("%s(): substring not found", name);
        return Value::integer(-1);
    }
    if (name == "count") {
        const std::string part = Parameters(a, {"sub"}, 1).text(0);
        if (part.empty()) return number(count_characters(text) + 1);
        return number(split(text, part, -1).size() - 1);
    }
    static const std::map<std::string_view, bool (*)(int32_t)> questions = {
        {"isdigit", is_digit},
        {"isdecimal", is_digit},
        {"isalpha", is_alphabetic},
        {"isspace", is_space},
        {"isalnum", [](int32_t c) { return is_alphabetic(c) || is_digit(c); }}};
    const auto question = questions.find(name);
    if (question == questions.end()) return std::nullopt;
    const Parameters none(a, {});
    return Value::boolean(all_characters(text, question->second));
}

// str.format() with the fields {}, {0} and {name}. Attributes, elements, conversions and formats of fields
// are not supported.
inline std::string formatted_fields(Work& work, const std::string& text, const Arguments& a) {
    std::string out;
    size_t next = 0;  // argument of the next {}
    bool counts = false, numbers = false;
    for (size_t i = 0; i < text.size(); i++) {
        const char c = text[i];
        if (c != '{' && c != '}') {
            out += c;
            continue;
        }
        if (i + 1 < text.size() && text[i + 1] == c) {
            out += c, i++;
            continue;
        }
        const size_t end = text.find('}', i);
        if (c == '}') fail("Single '}' encountered in format string");
        if (end == text.npos) fail("expected '}' before end of string");
        const std::string field = text.substr(i + 1, end - i - 1);
        if (field.find_first_of("{.[!:") != field.npos)
            fail("a field like '%s' is not supported", printable(field.substr(0, 60)));
        i = end;
        const bool is_number = !field.empty() && field.find_first_not_of("0123456789") == field.npos;
        if (field.empty() || is_number) {
            (field.empty() ? counts : numbers) = true;
            if (counts && numbers)
                fail("cannot switch between automatic field numbering and manual field specification");
            const size_t index = field.empty() ? next++ : field.size() > 6 ? SIZE_MAX : std::stoul(field);
            if (index >= a.positional.size()) fail("a replacement index is out of range");
            out += str(work, a.positional[index]);
        } else {
            const auto named = std::ranges::find(a.named, field, &std::pair<std::string, Value>::first);
            if (named == a.named.end()) fail("there is no argument '%s'", printable(field.substr(0, 60)));
            out += str(work, named->second);
        }
        work.spend(out.size());
    }
    return out;
}

inline Value string_method(Work& work, const Value& self, const std::string& name, const Arguments& a) {
    const std::string& text = self.text();
    work.spend(4 * text.size());
    if (self.is_safe() && !a.positional.empty())
        fail("methods of text that is marked as safe are not supported");
    if (const auto answer = string_question(self, name, a)) return *answer;
    if (name.ends_with("strip")) {
        const Parameters p(a, {"chars"});
        return new_string(work,
                          std::string(strip(text, p.optional_text(0), name != "rstrip", name != "lstrip")));
    }
    if (name == "split") {
        const Parameters p(a, {"sep", "maxsplit"});
        if (p.is_set(0) && p.text(0).empty()) fail("empty separator");
        return new_strings(work, split(text, p.optional_text(0), p.integer(1, -1)));
    }
    if (name == "splitlines")
        return new_strings(work, split_lines(text, Parameters(a, {"keepends"}).truth(0)));
    if (name == "format") return new_string(work, formatted_fields(work, text, a));
    if (name == "replace") {
        const Parameters p(a, {"old", "new", "count"}, 2);
        const uint64_t times = p.text(0).empty() ? text.size() + 1 : text.size() / p.text(0).size();
        work.spend(times * p.text(1).size());
        return new_string(work, replaced(text, p.text(0), p.text(1), p.integer(2, -1)));
    }
    if (name == "join")
        return new_string(work, join_texts(work, text, items_of(work, Parameters(a, {"iterable"}, 1)[0])));
    if (name == "removeprefix" || name == "removesuffix") {
        const std::string affix = Parameters(a, {"prefix"}, 1).text(0);
        if (name == "removeprefix")
            return new_string(work, text.starts_with(affix) ? text.substr(affix.size()) : text);
        return new_string(work, text.ends_with(affix) ? text.substr(0, text.size() - affix.size()) : text);
    }
    static const std::map<std::string_view, std::string (*)(std::string_view)> cases = {
        {"upper", upper}, {"lower", lower}, {"title", titled}, {"capitalize", capitalized}};
    const auto changed = cases.find(name);
    if (changed == cases.end()) fail("the method is not supported");
    const Parameters none(a, {});
    return new_string(work, changed->second(text));
}

inline Value dict_method(Work& work, const Value& self, const std::string& name, const Arguments& a) {
    if (name == "get") {
        const Parameters p(a, {"key", "default"}, 1);
        work.spend(self.entries().size());
        if (const Value* found = self.find(work, p[0])) return *found;
        return p.has(1) ? p[1] : Value::none();
    }
    if (name == "fromkeys") fail("the method is not supported");
    const Parameters none(a, {});
    if (name == "copy") return self;
    Values items;
    for (const DictEntry& e : self.entries())
        items.push_back(name == "keys"     ? e.key
                        : name == "values" ? e.value
                                           : Value::list({e.key, e.value}, Kind::Tuple));
    return new_list(work, std::move(items), Kind::View);
}

inline Value list_method(Work& work, const Value& self, const std::string& name, const Arguments& a) {
    if (name == "copy") return self;
    const Parameters p(a, {"value"}, 1);
    int64_t count = 0;
    for (size_t i = 0; i < self.items().size(); i++) {
        if (!equal(work, self.items()[i], p[0])) continue;
        if (name == "index") return Value::integer(static_cast<int64_t>(i));
        count++;
    }
    if (name == "index") fail("the value is not in the list");
    return Value::integer(count);
}

inline Value call_method(Work& work, const MethodObject& method, const Arguments& a) {
    const auto name = [&] { return format("%s.%s()", type_name(method.self), method.name); };
    return about(name, [&] {
        if (method.self.is_string()) return string_method(work, method.self, method.name, a);
        if (method.self.is(Kind::Dict)) return dict_method(work, method.self, method.name, a);
        work.spend(16 * method.self.items().size());
        return list_method(work, method.self, method.name, a);
    });
}

// ---- tests

using Test = bool (*)(Work&, const Value&, const Arguments&);

inline const Value& only(const Arguments& a) {
    if (a.positional.size() != 1 || !a.named.empty()) fail("takes one argument");
    return a.positional[0];
}
inline int64_t whole_number(const Value& v) {
    if (!v.is_integer()) fail("a whole number is needed, not %s", type_name(defined(v)));
    return v.integer();
}

inline const std::map<std::string_view, Test>& tests() {
    using W = Work;
    using V = Value;
    using A = Arguments;
    static const std::map<std::string_view, Test> all = {
        {"defined", [](W&, const V& v, const A&) { return !v.is_undefined(); }},
        {"undefined", [](W&, const V& v, const A&) { return v.is_undefined(); }},
        {"none", [](W&, const V& v, const A&) { return v.is(Kind::None); }},
        {"string", [](W&, const V& v, const A&) { return v.is_string(); }},
        {"mapping", [](W&, const V& v, const A&) { return v.is(Kind::Dict); }},
        {"number", [](W&, const V& v, const A&) { return v.is_number(); }},
        {"integer", [](W&, const V& v, const A&) { return v.is(Kind::Int); }},
        {"float", [](W&, const V& v, const A&) { return v.is(Kind::Float); }},
        {"boolean", [](W&, const V& v, const A&) { return v.is(Kind::Bool); }},
        {"true", [](W&, const V& v, const A&) { return v.is(Kind::Bool) && v.integer(); }},
        {"false", [](W&, const V& v, const A&) { return v.is(Kind::Bool) && !v.integer(); }},
        {"iterable",
         [](W&, const V& v, const A&) {
             return v.is_undefined() || v.has_items() || v.is_string() || v.is(Kind::Dict) ||
                    v.is(Kind::Loop) || v.is(Kind::Generator);
         }},
        {"sequence",
         [](W&, const V& v, const A&) {
             if (v.is(Kind::View)) fail("is not supported of a %s: put | list after it", type_name(v));
             return v.is_undefined() || v.is_list() || v.is_string() || v.is(Kind::Dict);
         }},
        {"callable", [](W&, const V& v, const A&) { return v.is(Kind::Function) || v.is(Kind::Method); }},
        {"odd", [](W&, const V& v, const A&) { return whole_number(v) % 2 != 0; }},
        {"even", [](W&, const V& v, const A&) { return whole_number(v) % 2 == 0; }},
        {"divisibleby",
         [](W&, const V& v, const A& a) {
             const int64_t by = whole_number(only(a));
             if (by == 0) fail("division by zero");
             return by == -1 || whole_number(v) % by == 0;
         }},
        {"in", [](W& w, const V& v, const A& a) { return contains(w, only(a), v); }},
        {"sameas",
         [](W& w, const V& v, const A& a) { return v.kind() == only(a).kind() && equal(w, v, only(a)); }},
    };
    return all;
}
// The operator that a test stands for; "" if it is none.
inline std::string_view operator_of_test(std::string_view name) {
    static const std::map<std::string_view, std::string_view> operators = {
        {"==", "=="}, {"eq", "=="}, {"equalto", "=="},    {"!=", "!="}, {"ne", "!="},
        {"<", "<"},   {"lt", "<"},  {"lessthan", "<"},    {"<=", "<="}, {"le", "<="},
        {">", ">"},   {"gt", ">"},  {"greaterthan", ">"}, {">=", ">="}, {"ge", ">="}};
    const auto found = operators.find(name);
    return found == operators.end() ? "" : found->second;
}
inline bool is_test(std::string_view name) {
    return tests().contains(name) || !operator_of_test(name).empty();
}

inline std::string no_test(const std::string& name) {
    static const std::set<std::string_view> others = {"escaped", "filter", "lower", "test", "upper"};
    return "the test \"" + printable(name.substr(0, 60)) + "\" is " +
           (others.contains(name) ? "not supported" : "unknown");
}

inline bool apply_test(Work& work, const std::string& name, const Value& v, const Arguments& a) {
    if (!is_test(name)) throw UserError(no_test(name));
    work.spend();
    return about([&] { return "the test \"" + name + "\""; },
                 [&] {
                     const std::string_view op = operator_of_test(name);
                     return op.empty() ? tests().at(name)(work, v, a) : compare(work, op, v, only(a));
                 });
}

// ---- filters

using Filter = Value (*)(Work&, const Value&, const Arguments&);
inline Value apply_filter(Work& work, const std::string& name, const Value& v, const Arguments& a);

// Items in the order of what `path` leads to in them, if it is not None. Strings are compared in lower case,
// unless `by_case`.
inline Values sorted(Work& work, const Values& items, const Value& path, bool by_case, bool reverse) {
    std::vector<std::pair<Value, Value>> keyed;
    for (const Value& one : items) {
        const Value key = path.is(Kind::None) ? one : follow(work, one, path);
        keyed.emplace_back(key.is_string() && !by_case ? new_string(work, lower(key.text())) : key, one);
    }
    std::ranges::stable_sort(keyed, [&](const auto& a, const auto& b) {
        work.spend();
        return reverse ? less(work, b.first, a.first) : less(work, a.first, b.first);
    });
    Values out;
    for (auto& [key, one] : keyed) out.push_back(std::move(one));
    return out;
}

inline Value filter_dictsort(Work& work, const Value& v, const Arguments& a) {
    const Parameters p(a, {"case_sensitive", "by", "reverse"});
    if (!v.is(Kind::Dict)) fail("needs a dict, not %s", type_name(defined(v)));
    Values pairs;
    for (const DictEntry& e : v.entries()) pairs.push_back(Value::list({e.key, e.value}, Kind::Tuple));
    const int64_t by = p.has(1) && p.text(1) == "value" ? 1 : 0;
    return new_list(work, sorted(work, pairs, Value::integer(by), p.truth(0), p.truth(2)));
}

inline Value filter_default(Work&, const Value& v, const Arguments& a) {
    const Parameters p(a, {"default_value", "boolean"});
    if (!v.is_undefined() && !(p.truth(1) && !v.truth())) return v;
    return p.has(0) ? p[0] : Value::string("");
}

inline Value filter_join(Work& work, const Value& v, const Arguments& a) {
    const Parameters p(a, {"d", "attribute"});
    const std::string separator = p.has(0) ? str(work, p[0]) : "";
    std::string out;
    bool first = true;
    for (const Value& one : items_of(work, v)) {
        const std::string text = str(work, p.is_set(1) ? follow(work, one, p[1]) : one);
        work.spend(text.size() + separator.size());
        (out += std::exchange(first, false) ? "" : separator) += text;
    }
    return new_string(work, std::move(out));
}

// The arguments behind the first `count` without a name.
inline Arguments without_first(const Arguments& a, size_t count) {
    const auto begin = a.positional.begin() + static_cast<ptrdiff_t>(std::min(count, a.positional.size()));
    return {{begin, a.positional.end()}, a.named};
}

inline Value filter_map(Work& work, const Value& v, const Arguments& a) {
    Values out;
    if (a.positional.empty()) {
        const Parameters p(a, {"attribute", "default"}, 1);
        for (const Value& one : items_if_any(work, v)) {
            const Value got = follow(work, one, p[0]);
            out.push_back(got.is_undefined() && p.has(1) ? p[1] : got);
        }
        return new_list(work, std::move(out), Kind::Generator);
    }
    if (!a.positional[0].is_string()) fail("needs the name of a filter");
    const Arguments rest = without_first(a, 1);
    for (const Value& one : items_if_any(work, v))
        out.push_back(apply_filter(work, a.positional[0].text(), one, rest));
    return new_list(work, std::move(out), Kind::Generator);
}

// select, reject, selectattr, rejectattr: the items that pass a test, or that do not.
inline Value filter_select(Work& work, const Value& v, const Arguments& a, bool by_attribute, bool wanted) {
    const size_t given = a.positional.size(), at = by_attribute ? 1 : 0;  // where the test's name is
    if (by_attribute && given == 0) fail("misses the attribute's name");
    if (given > at && !a.positional[at].is_string()) fail("needs the name of a test");
    const Arguments rest = without_first(a, at + 1);
    Values out;
    for (const Value& one : items_if_any(work, v)) {
        const Value got = by_attribute ? follow(work, one, a.positional[0]) : one;
        const bool passes = given > at ? apply_test(work, a.positional[at].text(), got, rest) : got.truth();
        if (passes == wanted) out.push_back(one);
    }
    return new_list(work, std::move(out), Kind::Generator);
}

inline Value filter_indent(Work& work, const Value& v, const Arguments& a) {
    const Parameters p(a, {"width", "first", "blank"});
    const bool by_text = p.has(0) && p[0].is_string();
    const int64_t width = by_text ? 0 : p.integer(0, 4);
    if (width > 10'000) fail("a width of more than 10000");
    const std::string indent =
        by_text ? p[0].text() : std::string(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
    const std::vector<std::string> lines = split_lines(str(work, v) + "\n", false);
    work.spend(lines.size() * indent.size());
    std::string out = p.truth(1) ? indent : "";
    for (size_t i = 0; i < lines.size(); i++) {
        if (i > 0) out += "\n" + (p.truth(2) || !lines[i].empty() ? indent : "");
        out += lines[i];
    }
    return new_string(work, std::move(out));
}

// Python's int(text) or float(text) of a decimal number; nothing if it is none.
inline std::optional<double> number_in(std::string_view text, bool whole) {
    if (text.find_first_of("\x1c\x1d\x1e\x1f") != text.npos) return std::nullopt;  // no white space here
    std::string digits(strip(text));
    const size_t sign = digits.starts_with('-') || digits.starts_with('+') ? 1 : 0;
    if (digits.size() == sign || digits.size() > 400) return std::nullopt;
    for (size_t i = sign; i < digits.size(); i++)
        if (!std::isdigit(static_cast<unsigned char>(digits[i])) &&
            (whole || std::string_view(".eE+-").find(digits[i]) == std::string_view::npos))
            return std::nullopt;
    char* end = nullptr;
    const double number = std::strtod(digits.c_str(), &end);
    return *end ? std::nullopt : std::optional(number);
}

inline Value filter_int(Work&, const Value& v, const Arguments& a) {
    const Parameters p(a, {"default", "base"});
    if (p.integer(1, 10) != 10) fail("only the base 10 is supported");
    defined(v);
    const Value otherwise = p.has(0) ? p[0] : Value::integer(0);
    if (v.is_integer()) return Value::integer(v.integer());
    if (v.is_string())
        if (const std::string digits(strip(v.text())); number_in(v.text(), true) && digits.size() <= 18)
            return Value::integer(std::stoll(digits));
    const std::optional<double> number = v.is(Kind::Float) ? std::optional(v.number())
                                         : v.is_string()   ? number_in(v.text(), false)
                                                           : std::nullopt;
    if (!number || !std::isfinite(*number)) return otherwise;
    if (std::abs(*number) >= 0x1p53) fail("a number is too large");
    return Value::integer(static_cast<int64_t>(*number));
}

inline Value filter_tojson(Work& work, const Value& v, const Arguments& a) {
    const Parameters p(a, {"ensure_ascii", "indent", "separators", "sort_keys"});
    JsonStyle style;
    style.ascii = p.truth(0);
    style.sorts_keys = p.truth(3);
    if (p.is_set(1)) {
        style.breaks_lines = true;
        style.item_separator = ",";
        const bool by_text = p[1].is_string();
        const int64_t width = by_text ? 0 : std::clamp<int64_t>(p.integer(1, 0), 0, 1000);
        style.indent = by_text ? p[1].text() : std::string(static_cast<size_t>(width), ' ');
    }
    if (p.is_set(2)) {
        if (!p[2].is_list() || p[2].items().size() != 2 || !p[2].items()[0].is_string() ||
            !p[2].items()[1].is_string())
            fail("separators must be two texts");
        style.item_separator = p[2].items()[0].text();
        style.key_separator = p[2].items()[1].text();
    }
    return new_string(work, ValueWriter(work, &style).write(v));
}

inline Value filter_items(Work& work, const Value& v, const Arguments& a) {
    const Parameters none(a, {});
    if (v.is_undefined()) return Value::list({}, Kind::Generator);
    if (!v.is(Kind::Dict)) fail("Can only get item pairs from a mapping.");
    return new_list(work, dict_method(work, v, "items", {}).items(), Kind::Generator);
}

inline Value filter_reverse(Work& work, const Value& v, const Arguments&) {
    Values items = items_of(work, v);
    std::ranges::reverse(items);
    if (v.is_string()) return new_string(work, join_texts(work, "", items));
    return new_list(work, std::move(items), v.is(Kind::Generator) ? Kind::List : Kind::Generator);
}

inline Value filter_replace(Work& work, const Value& v, const Arguments& a) {
    const Parameters p(a, {"old", "new", "count"}, 2);
    Arguments texts{
        {Value::string(str(work, p[0])), Value::string(str(work, p[1])), Value::integer(p.integer(2, -1))},
        {}};
    return string_method(work, Value::string(str(work, v)), "replace", texts);
}

// A filter that makes a text of a text.
template <std::string (*F)(std::string_view)>
Value filter_text(Work& work, const Value& v, const Arguments& a) {
    const Parameters none(a, {});
    const std::string text = str(work, v);
    work.spend(4 * text.size());
    return new_string(work, F(text));
}
inline std::string same_text(std::string_view text) { return std::string(text); }

inline const std::map<std::string_view, Filter>& filters() {
    using W = Work;
    using V = Value;
    using A = Arguments;
    static const Filter length = [](W&, const V& v, const A&) { return V::integer(length_of(v)); };
    static const std::map<std::string_view, Filter> all = {
        {"capitalize", filter_text<capitalized>},
        {"count", length},
        {"d", filter_default},
        {"default", filter_default},
        {"dictsort", filter_dictsort},
        {"first",
         [](W& w, const V& v, const A&) {
             const Values items = items_of(w, v);
             return items.empty() ? V::undefined("No first item, sequence was empty.") : items[0];
         }},
        {"indent", filter_indent},
        {"int", filter_int},
        {"items", filter_items},
        {"join", filter_join},
        {"last",
         [](W& w, const V& v, const A&) {
             if (v.is(Kind::Generator)) fail("'generator' object is not reversible");
             const Values items = items_of(w, v);
             return items.empty() ? V::undefined("No last item, sequence was empty.") : items.back();
         }},
        {"length", length},
        {"list", [](W& w, const V& v, const A&) { return new_list(w, items_of(w, v)); }},
        {"lower", filter_text<lower>},
        {"map", filter_map},
        {"reject", [](W& w, const V& v, const A& a) { return filter_select(w, v, a, false, false); }},
        {"rejectattr", [](W& w, const V& v, const A& a) { return filter_select(w, v, a, true, false); }},
        {"replace", filter_replace},
        {"reverse", filter_reverse},
        {"safe", [](W& w, const V& v, const A&) { return new_string(w, str(w, v)).as_safe(); }},
        {"select", [](W& w, const V& v, const A& a) { return filter_select(w, v, a, false, true); }},
        {"selectattr", [](W& w, const V& v, const A& a) { return filter_select(w, v, a, true, true); }},
        {"sort",
         [](W& w, const V& v, const A& a) {
             const Parameters p(a, {"reverse", "case_sensitive", "attribute"});
             return new_list(w,
                             sorted(w, items_of(w, v), p.has(2) ? p[2] : V::none(), p.truth(1), p.truth(0)));
         }},
        {"string", filter_text<same_text>},
        {"title", filter_text<title_words>},
        {"tojson", filter_tojson},
        {"trim",
         [](W& w, const V& v, const A& a) {
             const Parameters p(a, {"chars"});
             const std::string text = str(w, v);
             return new_string(w, std::string(strip(text, p.optional_text(0))));
         }},
        {"upper", filter_text<upper>},
    };
    return all;
}
inline bool is_filter(std::string_view name) { return filters().contains(name); }

inline std::string no_filter(const std::string& name) {
    static const std::set<std::string_view> others = {
        "abs",       "attr",        "batch",     "center",    "e",      "escape",   "filesizeformat",
        "float",     "forceescape", "format",    "groupby",   "max",    "min",      "pprint",
        "random",    "round",       "slice",     "striptags", "sum",    "truncate", "unique",
        "urlencode", "urlize",      "wordcount", "wordwrap",  "xmlattr"};
    return "the filter \"" + printable(name.substr(0, 60)) + "\" is " +
           (others.contains(name) ? "not supported" : "unknown");
}

inline Value apply_filter(Work& work, const std::string& name, const Value& v, const Arguments& a) {
    const auto filter = filters().find(name);
    if (filter == filters().end()) throw UserError(no_filter(name));
    work.spend();
    return about([&] { return "the filter \"" + name + "\""; }, [&] { return filter->second(work, v, a); });
}

}  // namespace jinja
