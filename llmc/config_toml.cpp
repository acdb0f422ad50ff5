// config_toml.cpp - what config_toml.h declares, by the library toml++.
#include "llmc/config_toml.h"

#include <algorithm>
#include <charconv>

// toml++ asserts what some texts break, such as [é] without quotes. Here a broken assertion throws.
struct BrokenAssertion {};
[[noreturn]] static void break_assertion() { throw BrokenAssertion(); }
#define TOML_ASSERT(holds) ((holds) ? void() : break_assertion())
#define TOML_MAX_NESTED_VALUES 8
#include <toml++/toml.h>

#include "llmc/error.h"
#include "llmc/file.h"

namespace {
// The shortest text that is read as the same number.
std::string text_of(double number) {
    char text[64];
    return {text, std::to_chars(text, std::end(text), number).ptr};
}

class Reader {
  public:
    Reader(const std::string& path, std::vector<ConfigItem>& items) : path_(path), items_(items) {}

    // Adds the items of a table, whose own name is `above`.
    void read(const toml::table& table, const std::vector<std::string>& above) {
        for (const auto& [key, node] : table) {
            std::vector<std::string> name = above;
            name.emplace_back(key.str());
            // No setting's name has more than two parts.
            if (const toml::table* const inner = name.size() < 3 ? node.as_table() : nullptr) {
                read(*inner, name);
                continue;
            }
            ConfigItem item{name, {}, key.source().begin.line};
            if (const toml::array* const list = node.as_array())
                for (const toml::node& each : *list) item.values.push_back(value_of(each, item));
            else
                item.values.push_back(value_of(node, item));
            items_.push_back(std::move(item));
        }
    }

  private:
    std::string value_of(const toml::node& node, const ConfigItem& item) const {
        if (const auto text = node.value_exact<std::string>()) return *text;
        if (const auto number = node.value_exact<int64_t>()) return std::to_string(*number);
        if (const auto number = node.value_exact<double>()) return text_of(*number);
        if (const auto truth = node.value_exact<bool>()) return *truth ? "true" : "false";
        fail("%s:%zu: %s is neither a text, a number, true or false, nor a list of these", path_, item.line,
             item.name());
    }

    const std::string& path_;
    std::vector<ConfigItem>& items_;
};

// The line of the first character that breaks an assertion.
size_t line_of_broken_assertion(const std::string& text) {
    size_t good = 0, bad = text.size();
    while (bad - good > 1) {
        const size_t middle = (good + bad) / 2;
        bool breaks = false;
        try {
            static_cast<void>(toml::parse(std::string_view(text).substr(0, middle)));
        } catch (const toml::parse_error&) {  // such as an end that is missing
        } catch (const BrokenAssertion&) {
            breaks = true;
        }
        (breaks ? bad : good) = middle;
    }
    return 1 + static_cast<size_t>(std::ranges::count(text.substr(0, good), '\n'));
}
}  // namespace

std::vector<ConfigItem> read_toml(const std::string& text, const std::string& path) {
    std::vector<ConfigItem> items;
    try {
        const toml::table table = toml::parse(text);
        Reader(path, items).read(table, {});
    } catch (const toml::parse_error& error) {
        const auto ends = [&](const char* ending) { return path.ends_with(ending); };
        const bool is_other = ends(".yaml") || ends(".yml") || ends(".json");
        fail("%s:%u: %s%s", path, static_cast<unsigned>(error.source().begin.line),
             printable(std::string(error.description())),
             is_other ? " (--config reads TOML, with lines like lr = 1e-4)" : "");
    } catch (const BrokenAssertion&) {
        fail("%s:%zu: no TOML: outside of quotes, names have only ASCII letters, digits, - and _", path,
             line_of_broken_assertion(text));
    }
    std::ranges::stable_sort(items, {}, &ConfigItem::line);
    return items;
}
