// config_toml.h - reads the settings in a TOML file (--config). options_words.h turns them into options.
#pragma once

#include <string>
#include <vector>

#include "llmc/text.h"

// A key with its values: "lr = 1e-4", or "weights = ..." below [offload], whose path is {"offload",
// "weights"}.
struct ConfigItem {
    std::vector<std::string> path;
    std::vector<std::string> values;  // several if it is a list
    size_t line;
    std::string name() const { return joined(path, "."); }
};

// The items of a TOML text, in the order of their lines. Fails naming the file and the line if the text is no
// TOML, or if a value is neither a text, a number, true or false, nor a list of these.
std::vector<ConfigItem> read_toml(const std::string& text, const std::string& path);
