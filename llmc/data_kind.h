// data_kind.h - recognizes by its name and first bytes whether a data file is text or JSON examples. Read
// this to know which files are taken as examples, and which are refused because training on them as text
// would be a mistake.
#pragma once

#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>

#include <strings.h>

#include "llmc/data_gzip.h"
#include "llmc/error.h"
#include "llmc/file.h"

// How many of a file's first bytes tell its kind.
constexpr size_t kDataStart = 4096;

enum class DataKind {
    Text,
    JsonLines,  // one example per line
    JsonList    // [example, example, ...]
};

// The part of a file's name after its last dot, in lower case; "" if there is none. An ending .gz does not
// count.
inline std::string name_extension(std::string_view path) {
    std::string_view name = path.substr(path.rfind('/') + 1);
    if (name.size() > 3 && strncasecmp(name.data() + name.size() - 3, ".gz", 3) == 0) name.remove_suffix(3);
    const size_t dot = name.rfind('.');
    std::string extension(dot == name.npos ? "" : name.substr(dot + 1));
    for (char& c : extension) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return extension;
}

inline bool is_json_lines_extension(std::string_view extension) {
    return extension == "jsonl" || extension == "ndjson" || extension == "jsonlines" ||
           extension == "json-lines";
}
// True if the file's name says that it is JSON.
inline bool is_json_name(std::string_view path) {
    const std::string extension = name_extension(path);
    return extension == "json" || is_json_lines_extension(extension);
}

// Fails if a file is a table or an archive, judged by its extension or by how its content begins.
inline void refuse_tables(const std::string& path, const std::string& extension, std::string_view start) {
    struct Format {
        const char* name;
        std::string_view begins;  // its first bytes; "" if they are not recognized
        std::initializer_list<std::string_view> extensions;
    };
    using namespace std::string_view_literals;
    static const Format tables[] = {
        {"a CSV table", "", {"csv"}},
        {"a TSV table", "", {"tsv"}},
        {"a Parquet table", "PAR1", {"parquet", "pq"}},
        {"an Arrow table", "ARROW1", {"arrow", "feather", "ipc"}},
        {"an Arrow table", "\xff\xff\xff\xff"sv, {}},
        {"an ORC table", "", {"orc"}},
        {"a spreadsheet", "", {"xls", "xlsx", "ods"}},
        {"a database", "SQLite format 3"sv, {"sqlite", "sqlite3", "db"}},
    };
    static const Format archives[] = {
        {"twice, by gzip", "\x1f\x8b"sv, {}}, {"tar", "", {"tar", "tgz"}},
        {"zip", "PK\x03\x04", {"zip"}},       {"zstd", "\x28\xb5\x2f\xfd"sv, {"zst"}},
        {"xz", "\xfd\x37zXZ"sv, {"xz"}},      {"bzip2", "", {"bz2"}},
    };
    const auto is = [&](const Format& f) {
        const bool named = std::ranges::find(f.extensions, std::string_view(extension)) != f.extensions.end();
        const bool is_tar = f.name == std::string_view("tar") && start.substr(0, 262).ends_with("ustar");
        return named || is_tar || (!f.begins.empty() && start.starts_with(f.begins));
    };
    for (const Format& f : tables)
        if (is(f))
            fail(
                "%s is %s, which is not read: write its rows as JSON lines, {\"text\": ...} or {\"prompt\": "
                "..., \"completion\": ...}, into a file that ends in .jsonl",
                path.c_str(), f.name);
    for (const Format& f : archives)
        if (is(f)) fail("%s is packed (%s): unpack it first", path.c_str(), f.name);
}

// The kind of a file that is not a token shard, by its name and how its content begins. A name that ends in
// .txt means text; .json, .jsonl or .ndjson means examples: a list if the first character is '[', else lines.
// Any other file is taken as examples if it begins like them, with an object on one line or with a list of
// objects, and as text otherwise. Fails on tables, archives and Git LFS pointers, and on a .json file that is
// neither list nor lines.
inline DataKind data_kind(const std::string& path, std::string_view start) {
    const std::string extension = name_extension(path);
    if (extension == "txt" || extension == "text") return DataKind::Text;
    refuse_lfs_pointer(path, start);
    refuse_tables(path, extension, start);
    std::string_view rest = start;
    if (rest.starts_with("\xef\xbb\xbf")) rest.remove_prefix(3);  // a byte order mark
    const auto skip = [&](const char* spaces) {
        rest.remove_prefix(std::min(rest.find_first_not_of(spaces), rest.size()));
    };
    constexpr const char *kSpaces = " \t\r\n", *kInLine = " \t";
    skip(kSpaces);
    const char first = rest.empty() ? '\0' : rest[0];
    if (!rest.empty()) rest.remove_prefix(1);
    if (is_json_lines_extension(extension)) return first == '[' ? DataKind::JsonList : DataKind::JsonLines;
    if (extension == "json") {
        skip(kInLine);
        if (first == '[') return DataKind::JsonList;
        if (first == '{' && !rest.starts_with('\n') && !rest.starts_with("\r\n")) return DataKind::JsonLines;
        fail(
            "%s is neither a JSON list of examples nor an example a line; a file that ends in .txt is read "
            "as "
            "text",
            path.c_str());
    }
    if (first == '{') {
        skip(kInLine);
        if (rest.starts_with('"')) return DataKind::JsonLines;
    } else if (first == '[') {
        skip(kSpaces);
        if (!rest.starts_with('{')) return DataKind::Text;
        rest.remove_prefix(1);
        skip(kSpaces);
        if (rest.starts_with('"')) return DataKind::JsonList;
    }
    return DataKind::Text;
}
// The kind of a file that is not compressed.
inline DataKind data_kind(const FileReader& file) {
    return data_kind(file.path(), first_bytes(file, kDataStart));
}
