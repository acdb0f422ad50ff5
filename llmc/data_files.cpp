// data_files.cpp - unpacks files that gzip has compressed, and tells text from JSON examples.
#include "llmc/data_files.h"

#include <strings.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "llmc/error.h"

// The first bytes of a file, at most `most`.
static std::string first_bytes(const FileReader& file, size_t most) {
    std::string start(std::min<uint64_t>(file.size(), most), '\0');
    file.read(0, start.size(), start.data());
    return start;
}

bool is_gzip(const FileReader& file) { return first_bytes(file, 3) == "\x1f\x8b\x08"; }

namespace {
// Reads what a gzip file contains, from its start on.
class GzipReader {
  public:
    explicit GzipReader(const FileReader& file) : path_(file.path()) {
        const int fd = file.duplicate();
        if (fd >= 0 && lseek(fd, 0, SEEK_SET) == 0) file_ = gzdopen(fd, "rb");
        if (file_) return;
        const int error = errno;
        if (fd >= 0) close(fd);
        fail("%s: cannot open: %s", path_, std::strerror(error));
    }
    ~GzipReader() { gzclose(file_); }
    GzipReader(const GzipReader&) = delete;

    // Copies the next bytes, at most `most`, and returns how many there were: 0 at the end. Fails naming the
    // file if it is damaged or ends early.
    size_t read(char* out, unsigned most) {
        const int count = gzread(file_, out, most);
        int error = Z_OK;
        std::string_view what = gzerror(file_, &error);
        if (error == Z_ERRNO) fail("%s: cannot read: %s", path_, std::strerror(errno));
        if (count < 0 || error != Z_OK) {
            what.remove_prefix(std::min(what.size(), what.find(": ") + 2));  // "<fd:3>: "
            fail("%s is a damaged gzip file: %s", path_, std::string(what));
        }
        return static_cast<size_t>(count);
    }

  private:
    const std::string path_;
    gzFile file_ = nullptr;
};
}  // namespace

// The first bytes of a data file's content, at most `most`.
static std::string start_of_data(const FileReader& file, unsigned most) {
    if (!is_gzip(file)) return first_bytes(file, most);
    std::string start(most, '\0');
    start.resize(GzipReader(file).read(start.data(), most));
    return start;
}

uint64_t unpack(const FileReader& file, TemporaryFile& to) {
    const FileStamp before = file.stamp();
    GzipReader packed(file);
    std::vector<char> part(256 << 10);
    uint64_t bytes = 0;
    while (const size_t count = packed.read(part.data(), static_cast<unsigned>(part.size())))
        to.append(part.data(), count), bytes += count;
    to.finish();
    file.drop_pages();
    if (file.stamp() != before) fail("%s was written to while it was read", file.path());
    return bytes;
}

std::unique_ptr<const FileReader> unpacked(const FileReader& file) {
    if (!is_gzip(file)) return nullptr;
    TemporaryFile content("what " + file.path() + " contains");
    const uint64_t bytes = unpack(file, content);
    return content.part(file.path(), 0, bytes);
}

// ---- text or examples

std::string name_extension(std::string_view path) {
    std::string_view name = path.substr(path.rfind('/') + 1);
    if (name.size() > 3 && strncasecmp(name.data() + name.size() - 3, ".gz", 3) == 0) name.remove_suffix(3);
    const size_t dot = name.rfind('.');
    return lower(std::string(dot == name.npos ? "" : name.substr(dot + 1)));
}

static bool is_json_lines_extension(std::string_view extension) {
    return extension == "jsonl" || extension == "ndjson" || extension == "jsonlines" ||
           extension == "json-lines";
}
bool is_json_name(std::string_view path) {
    const std::string extension = name_extension(path);
    return extension == "json" || is_json_lines_extension(extension);
}

// Fails if a file is a table or an archive, judged by its extension or by how its content begins.
static void refuse_tables(const std::string& path, const std::string& extension, std::string_view start) {
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
                path, f.name);
    for (const Format& f : archives)
        if (is(f)) fail("%s is packed (%s): unpack it first", path, f.name);
}

DataKind data_kind(const FileReader& file) {
    const std::string& path = file.path();
    const std::string start = start_of_data(file, 4096);
    const std::string extension = name_extension(path);
    if (extension == "txt" || extension == "text") return DataKind::Text;
    refuse_lfs_pointer(path, start);
    refuse_tables(path, extension, start);
    std::string_view rest = start;
    if (rest.starts_with("\xef\xbb\xbf")) rest.remove_prefix(3);  // a byte order mark
    // The next character that is none of these.
    const auto next = [&](const char* spaces) {
        rest.remove_prefix(std::min(rest.find_first_not_of(spaces), rest.size()));
        const char c = rest.empty() ? '\0' : rest[0];
        rest.remove_prefix(rest.empty() ? 0 : 1);
        return c;
    };
    constexpr const char *kSpaces = " \t\r\n", *kInLine = " \t";
    const char first = next(kSpaces);
    if (is_json_lines_extension(extension)) return first == '[' ? DataKind::JsonList : DataKind::JsonLines;
    if (extension == "json") {
        if (first == '[') return DataKind::JsonList;
        const char second = next(kInLine);
        const bool ends_line = second == '\n' || (second == '\r' && rest.starts_with('\n'));
        if (first == '{' && !ends_line) return DataKind::JsonLines;
        fail(
            "%s is neither a JSON list of examples nor an example a line; a file that ends in .txt is read "
            "as text",
            path);
    }
    if (first == '{' && next(kInLine) == '"') return DataKind::JsonLines;
    if (first == '[' && next(kSpaces) == '{' && next(kSpaces) == '"') return DataKind::JsonList;
    return DataKind::Text;
}
