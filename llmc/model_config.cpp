// model_config.cpp - reads the keys of a config.json, and refuses in one line what is wrong.
#include "llmc/model_config.h"

#include <algorithm>
#include <climits>
#include <cmath>

// The longest sequence of a model whose file has `positions` as max_position_embeddings. The factors of yarn
// and dynamic extend it.
static double stretched_positions(const RopeScaling& s, int positions) {
    if (s.type != RopeType::kYarn && s.type != RopeType::kDynamic) return positions;
    return std::max<double>(positions, std::floor(s.factor * s.original_max_position_embeddings));
}

// A value for messages, shortened.
static std::string shown(const nlohmann::json& value) {
    const std::string text = value.dump(-1, ' ', true);
    return text.size() > 60 ? text.substr(0, 60) + "..." : text;
}

int ModelConfig::longest() const {
    return static_cast<int>(std::min<double>(kMostPositions, stretched_positions(rope, positions)));
}

void ModelConfig::set_layers(std::vector<LayerConfig> all) {
    const auto reach = [](const LayerConfig& l) { return l.window > 0 ? l.window : INT_MAX; };
    static_cast<LayerConfig&>(*this) = *std::ranges::max_element(all, {}, reach);
    const bool differ = std::ranges::any_of(all, [&](const LayerConfig& l) { return l != all[0]; });
    uneven = differ ? std::move(all) : std::vector<LayerConfig>();
}

int ModelConfig::shortest_window() const {
    int shortest = window;
    for (const LayerConfig& l : uneven)
        if (l.window > 0 && (shortest == 0 || l.window < shortest)) shortest = l.window;
    return shortest;
}

bool ConfigReader::has(const std::string& name) const {
    const auto it = json_.find(name);
    return it != json_.end() && !it->is_null();
}

int ConfigReader::integer(const std::string& name, int least, int most) const {
    const nlohmann::json& value = required(name);
    const bool huge = value.is_number_unsigned() && value.get<uint64_t>() > INT32_MAX;
    if (!value.is_number_integer() || huge || value.get<int64_t>() < least || value.get<int64_t>() > most)
        refuse(name, format("an integer from %d to %d", least, most));
    return value.get<int>();
}

double ConfigReader::number(const std::string& name, double low, double high) const {
    const nlohmann::json& value = required(name);
    if (!value.is_number() || !(value.get<double>() > low && value.get<double>() < high))
        refuse(name, format("a number above %g and below %g", low, high));
    return value.get<double>();
}

std::vector<double> ConfigReader::numbers(const std::string& name, int count, double low, double high) const {
    const nlohmann::json& list = required(name);
    const auto fits = [&](const nlohmann::json& x) {
        return x.is_number() && x.get<double>() > low && x.get<double>() < high;
    };
    if (!list.is_array() || list.size() != static_cast<size_t>(count) || !std::ranges::all_of(list, fits))
        refuse(name, format("a list of %d numbers above %g and below %g", count, low, high));
    return list.get<std::vector<double>>();
}

bool ConfigReader::truth(const std::string& name, bool otherwise) const {
    if (!has(name)) return otherwise;
    if (!json_[name].is_boolean()) refuse(name, "true or false");
    return json_[name].get<bool>();
}

std::string ConfigReader::text(const std::string& name, const char* otherwise) const {
    if (!has(name)) return otherwise;
    if (!json_[name].is_string()) refuse(name, "a string");
    return json_[name].get<std::string>();
}

void ConfigReader::must_be(const std::string& name, std::initializer_list<nlohmann::json> allowed) const {
    if (!has(name)) return;
    for (const nlohmann::json& value : allowed)
        if (json_[name] == value) return;
    fail("%s: '%s' is %s; only %s is supported", file_, name, shown(json_[name]), allowed.begin()->dump());
}

void ConfigReader::refuse(const std::string& name, const std::string& needed) const {
    const std::string value = json_.contains(name) ? shown(json_[name]) : "missing";
    fail("%s: '%s' is %s, but must be %s", file_, printable(name), value, needed);
}

std::vector<int> ConfigReader::tokens(const std::string& name, int vocabulary) const {
    std::vector<int> all;
    if (!has(name)) return all;
    const nlohmann::json& value = json_[name];
    for (const nlohmann::json& token : value.is_array() ? value : nlohmann::json::array({value})) {
        if (!token.is_number_integer()) refuse(name, "a token's number or a list of them");
        const auto id = token.get<int64_t>();
        if (id >= 0 && id < vocabulary) all.push_back(static_cast<int>(id));
    }
    return all;
}

ConfigReader ConfigReader::object(const std::string& name) const {
    static const nlohmann::json none = nlohmann::json::object();
    if (has(name) && !json_[name].is_object()) refuse(name, "an object");
    return ConfigReader(has(name) ? json_[name] : none, file_ + ": " + name);
}

const nlohmann::json& ConfigReader::required(const std::string& name) const {
    if (!has(name)) fail("%s: '%s' is missing", file_, name);
    return json_[name];
}
