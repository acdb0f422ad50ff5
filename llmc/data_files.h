// data_files.h - what a data file is: packed by gzip or not, and by its name and first bytes text or JSON
// examples. Read this to know which files are taken as examples, and which are refused because training on
// them as text would be a mistake.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "llmc/file.h"
#include "llmc/temporary_file.h"

// ---- files that gzip has compressed
//
// Such a file is unpacked into a temporary file, which is read in its place, and keeps its name in messages.

bool is_gzip(const FileReader& file);

// Appends the content of a gzip file to a temporary file, and returns its size. Fails naming the file if it
// is damaged, ends early or is changed meanwhile, and if there is no room in the folder for temporary files.
uint64_t unpack(const FileReader& file, TemporaryFile& to);

// The content of a gzip file, in a temporary file that lives as long as the result; of another file, null.
// Fails as unpack() does.
std::unique_ptr<const FileReader> unpacked(const FileReader& file);

// ---- text or examples

enum class DataKind {
    Text,
    JsonLines,  // one example per line
    JsonList    // [example, example, ...]
};

// The part of a file's name after its last dot, in lower case; "" if there is none. An ending .gz does not
// count.
std::string name_extension(std::string_view path);

// True if the file's name says that it is JSON.
bool is_json_name(std::string_view path);

// The kind of a file that is not a token shard, by its name and how its content begins. A name that ends in
// .txt means text; .json, .jsonl or .ndjson means examples: a list if the first character is '[', else lines.
// Any other file is taken as examples if it begins like them, with an object on one line or with a list of
// objects, and as text otherwise. Fails on tables, archives and Git LFS pointers, and on a .json file that is
// neither list nor lines.
DataKind data_kind(const FileReader& file);
