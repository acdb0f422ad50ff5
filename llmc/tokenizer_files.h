// tokenizer_files.h - copies the tokenizer's files from the model into each save, so that a save can be used
// on its own.
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/file.h"
#include "llmc/save_folder.h"

inline constexpr const char* kTokenizerFiles[] = {
    "tokenizer.json",          "vocab.json",        "merges.txt",          "tokenizer.model",
    "tokenizer.model.v3",      "tekken.json",       "qwen.tiktoken",       "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"};
// For tokenizers with several chat templates: this folder has the further ones, as NAME.jinja.
inline constexpr const char* kTemplateFolder = "additional_chat_templates";

// Where the tokenizer of a save comes from: a folder to copy from, or a GGUF file, for which `write` makes
// the files in a folder. If both are empty, the save gets no tokenizer.
struct TokenizerSource {
    TokenizerSource(std::string from) : folder(std::move(from)) {}
    TokenizerSource(const char* from) : folder(from) {}
    TokenizerSource(std::function<void(const std::string& to)> writer) : write(std::move(writer)) {}

    std::string folder;
    std::function<void(const std::string& to)> write;
};

// Copies a file, part by part.
inline void copy_file(const std::string& from, const std::string& to) {
    constexpr uint64_t kPart = 1 << 18;
    const FileReader in(from);
    FileWriter out(to);
    std::vector<char> part;
    for (uint64_t at = 0; at < in.size(); at += part.size()) {
        part.resize(std::min(kPart, in.size() - at));
        in.read(at, part.size(), part.data());
        out.write(part.data(), part.size());
    }
    out.finish();
}

// Writes the tokenizer's files into a folder.
inline void write_tokenizer(const TokenizerSource& from, const std::string& to) {
    if (from.write) return from.write(to);
    if (from.folder.empty()) return;
    for (const std::string name : kTokenizerFiles)
        if (file_exists(from.folder + "/" + name)) copy_file(from.folder + "/" + name, to + "/" + name);
    const std::string templates = from.folder + "/" + kTemplateFolder, copies = to + "/" + kTemplateFolder;
    struct stat info;
    if (stat(templates.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) return;
    check_call(mkdir(copies.c_str(), 0777) == 0, copies, "make the folder");
    for (const std::string& name : list_folder(templates))
        if (name.ends_with(".jinja")) copy_file(templates + "/" + name, copies + "/" + name);
    sync_directory(copies);
}
