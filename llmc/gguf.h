// gguf.h - reads GGUF files, the format of llama.cpp and ggml (docs/gguf.md there), versions 2 and 3; and
// writes them, in version 3. gguf_model.h and gguf_export.h say what a model's file contains.
//
// A file has: "GGUF"; a u32 version; two u64 counts, of tensors and of keys; the keys, each with a string
// (u64 length, bytes), a u32 type and a value; the table of tensors, each with a name, a u32 number of
// dimensions, the dimensions (u64, the fastest-varying first), a u32 type and a u64 offset; then padding and
// the data. Offsets count from the start of the data. All numbers are little endian. Everything is checked
// when the file is opened, so a tensor that is found can be read without further checks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/file.h"

// A type of tensors.
struct GgufType {
    uint32_t number;
    const char* name;
    int block, block_bytes;  // elements of a block, and its bytes
};

inline constexpr GgufType kGgufTypes[] = {
    {0, "F32", 1, 4},       {1, "F16", 1, 2},       {2, "Q4_0", 32, 18},    {3, "Q4_1", 32, 20},
    {6, "Q5_0", 32, 22},    {7, "Q5_1", 32, 24},    {8, "Q8_0", 32, 34},    {10, "Q2_K", 256, 84},
    {11, "Q3_K", 256, 110}, {12, "Q4_K", 256, 144}, {13, "Q5_K", 256, 176}, {14, "Q6_K", 256, 210},
    {20, "IQ4_NL", 32, 18}, {30, "BF16", 1, 2},
};
// The type of this number; null if it cannot be read.
const GgufType* find_gguf_type(uint32_t number);
// The type of this name, which must be one of these.
const GgufType& gguf_type(std::string_view name);

struct GgufTensor {
    std::string name;
    const GgufType* type;
    std::vector<int64_t> shape;  // slowest dimension first, as in the rest of the program
    const FileReader* file;      // the file that has the tensor's data
    uint64_t offset;             // position of the data in the file
    size_t bytes;                // size of the data

    // The length of the first dimension: a matrix's rows, or a vector's elements.
    int64_t rows() const { return shape[0]; }
    size_t row_bytes() const { return bytes / static_cast<size_t>(shape[0]); }
};

// An open GGUF file. It must not move, and its tensors are valid while it lives.
class GgufFile {
  public:
    // Fails in one line that names the file, and the key or tensor, if anything violates the format or a
    // tensor's type is not supported.
    explicit GgufFile(const std::string& path);
    GgufFile(const GgufFile&) = delete;
    GgufFile& operator=(const GgufFile&) = delete;

    const std::string& path() const { return file_.path(); }
    // Drops the file's pages from the page cache.
    void drop_pages() const { file_.drop_pages(); }
    // The keys and their values: an object of numbers, strings, and lists of them. A 32-bit float is
    // converted to the double that its shortest decimal spelling names.
    const nlohmann::json& metadata() const { return metadata_; }
    // Estimates the memory that the keys and values take.
    size_t held_bytes() const;
    const std::vector<GgufTensor>& tensors() const { return tensors_; }
    // The tensor of this name, or null.
    const GgufTensor* find(const std::string& name) const;

  private:
    FileReader file_;
    nlohmann::json metadata_ = nlohmann::json::object();
    std::vector<GgufTensor> tensors_;
    std::map<std::string, size_t> index_;
};

// A value that is written. Doubles are written as F32.
using GgufValue = std::variant<uint32_t, int32_t, double, bool, std::string, std::vector<std::string>,
                               std::vector<int32_t>, std::vector<float>>;

// The keys of a file and their values, encoded in the order in which they are added.
class GgufKeys {
  public:
    void add(const std::string& key, const GgufValue& value);
    void append(const GgufKeys& others);

    bool has(const std::string& key) const { return std::ranges::find(names_, key) != names_.end(); }
    uint64_t count() const { return names_.size(); }
    const std::string& bytes() const { return bytes_; }

  private:
    std::string bytes_;
    std::vector<std::string> names_;
};

// Writes a file. First declare every tensor, then append their data in the same order, in pieces of any size,
// then call finish(). Each tensor's data start at a multiple of 32 bytes.
class GgufWriter {
  public:
    // Shapes have the slowest dimension first, as in the rest of the
    // program.
    void declare(const std::string& name, const GgufType& type, const std::vector<int64_t>& shape);
    // The size of the file with these keys.
    uint64_t file_bytes(const GgufKeys& keys) const;
    // Writes everything before the data. Call it after the last declare().
    void open(const std::string& path, const GgufKeys& keys);
    void append(const void* data, size_t bytes);
    // Syncs and closes. All declared bytes must have been appended.
    void finish();

  private:
    void pad(uint64_t bytes);

    std::string table_;              // of tensors, encoded
    std::vector<uint64_t> tensors_;  // the bytes of each
    uint64_t data_bytes_ = 0;        // with padding
    std::optional<FileWriter> file_;
    size_t tensor_ = 0;      // the one that is being appended,
    uint64_t appended_ = 0;  // and how much of it
};
