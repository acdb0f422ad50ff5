// safetensors.h - reads and writes tensors in the safetensors format, which Hugging Face's checkpoints use.
//
// The format (github.com/huggingface/safetensors): a little-endian u64 header length, that many bytes of JSON
// {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {...}}, then
// the data. Offsets count from the end of the header, and the tensors cover the data without overlaps or
// gaps. Everything is checked when a file is opened, so an entry that is found can be read without further
// checks.
#pragma once

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/error.h"
#include "llmc/file.h"

enum class FileType { F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, I32, I16, I8, U64, U32, U16, U8, BOOL };

struct FileTypeInfo {
    FileType type;
    const char* name;  // its name in files
    size_t bytes;      // of one element
};

inline constexpr FileTypeInfo kFileTypes[] = {
    // in the order of FileType
    {FileType::F64, "F64", 8},   {FileType::F32, "F32", 4},         {FileType::F16, "F16", 2},
    {FileType::BF16, "BF16", 2}, {FileType::F8_E4M3, "F8_E4M3", 1}, {FileType::F8_E5M2, "F8_E5M2", 1},
    {FileType::I64, "I64", 8},   {FileType::I32, "I32", 4},         {FileType::I16, "I16", 2},
    {FileType::I8, "I8", 1},     {FileType::U64, "U64", 8},         {FileType::U32, "U32", 4},
    {FileType::U16, "U16", 2},   {FileType::U8, "U8", 1},           {FileType::BOOL, "BOOL", 1},
};

inline const FileTypeInfo& file_type_info(FileType type) { return kFileTypes[static_cast<int>(type)]; }

// The type of this name, or null.
const FileTypeInfo* find_file_type(const std::string& name);

struct SafetensorsEntry {
    std::string name;
    std::string dtype;
    std::vector<int64_t> shape;  // empty for a scalar
    const FileReader* file;      // the file that has the tensor's data
    uint64_t offset;             // position of the data in the file
    size_t bytes;                // size of the data

    // Copies `count` bytes of its data, from byte `first` on.
    void read(size_t first, size_t count, void* out) const {
        assert(first <= bytes && count <= bytes - first);
        file->read(offset + first, count, out);
    }
};

// A shape as text: "[768, 2304]".
inline std::string shape_text(const std::vector<int64_t>& shape) {
    return "[" + joined(shape, ", ", [](int64_t dim) { return std::to_string(dim); }) + "]";
}

// An open safetensors file. Its entries are valid while it lives, even if the object is moved.
class SafetensorsFile {
  public:
    // Fails in one line that names the file and the tensor if anything violates the format.
    explicit SafetensorsFile(const std::string& path);

    const std::string& path() const { return file_->path(); }
    // The tensors in the order of their data.
    const std::vector<SafetensorsEntry>& entries() const { return entries_; }

    // The tensor of this name, or null.
    const SafetensorsEntry* find(const std::string& name) const;
    // The tensor of this name. Fails if it is missing or has another shape.
    const SafetensorsEntry& get(const std::string& name, const std::vector<int64_t>& shape) const;

  private:
    static constexpr uint64_t kLongestHeader = 100'000'000;  // the limit of the reference implementation

    nlohmann::json read_header();
    void check_metadata(const nlohmann::json& value);
    template <class... A>
    [[noreturn]] void fail_tensor(const std::string& name, PatternFor<A...> pattern, const A&... args) const {
        fail("%s: tensor \"%s\": %s", path(), printable(name), format<A...>(pattern, args...));
    }
    SafetensorsEntry read_entry(const std::string& name, const nlohmann::json& value) const;
    void check_cover();

    std::unique_ptr<const FileReader> file_;
    uint64_t data_ = 0;      // position of the data in the file
    size_t data_bytes_ = 0;  // and their size
    std::vector<SafetensorsEntry> entries_;
    std::map<std::string, size_t> index_;
};

// Converts an IEEE 754 half to a float with the same value.
inline float half_to_float(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 1023u;
    if (exponent == 0) {  // zero and subnormals: fraction * 2^-24
        const uint32_t magnitude = std::bit_cast<uint32_t>(static_cast<float>(fraction) * 0x1p-24f);
        return std::bit_cast<float>(sign | magnitude);
    }
    const uint32_t wide = exponent == 31 ? 255 : exponent + (127 - 15);
    return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
}
// Converts F16, or BF16, to float.
inline void widen(const std::vector<uint16_t>& bits, bool is_half, float* out) {
    for (const uint16_t x : bits)
        *out++ = is_half ? half_to_float(x) : std::bit_cast<float>(static_cast<uint32_t>(x) << 16);
}

// Converts `count` elements, from number `first` on, to float without loss. Fails naming the tensor if its
// dtype is not F32, F16 or BF16.
inline void read_as_float(const SafetensorsEntry& entry, float* out, size_t first, size_t count) {
    const bool is_half = entry.dtype == "F16";
    if (entry.dtype == "F32") return entry.read(first * 4, count * 4, out);
    if (!is_half && entry.dtype != "BF16")
        fail("tensor \"%s\" has dtype %s where F32, F16 or BF16 is needed", printable(entry.name),
             entry.dtype);
    std::vector<uint16_t> bits;
    for (size_t done = 0; done < count; done += bits.size()) {
        bits.resize(std::min(size_t{1} << 15, count - done));
        entry.read((first + done) * 2, bits.size() * 2, bits.data());
        widen(bits, is_half, out + done);
    }
}

// Writes a safetensors file. First declare every tensor, then append their data in the same order, in pieces
// of any size, then call finish(). If wider types are declared first, every tensor in the file is aligned.
class SafetensorsWriter {
  public:
    // transformers refuses files whose metadata lacks {"format": "pt"}.
    explicit SafetensorsWriter(const std::string& path) : file_(path) {
        header_["__metadata__"]["format"] = "pt";
    }

    void declare(const std::string& name, FileType type, const std::vector<int64_t>& shape);
    void append(const void* data, size_t bytes);
    // Syncs and closes. All declared bytes must have been appended.
    void finish();

  private:
    void write_header();

    FileWriter file_;
    nlohmann::ordered_json header_;
    size_t declared_ = 0, appended_ = 0;  // bytes
    bool header_written_ = false;
};

// True if a folder has a model's weights.
bool has_weights(const std::string& folder);

// The weights in a checkpoint folder: model.safetensors, or else the shards listed in
// model.safetensors.index.json. A tensor is looked up by its whole name and then by its name without
// `prefix`, because checkpoints with either exist.
class SafetensorsFolder {
  public:
    explicit SafetensorsFolder(const std::string& folder, const std::string& prefix = "");

    const SafetensorsEntry* find(const std::string& name) const;
    // The tensor of this name. Fails if it is missing or has another shape.
    const SafetensorsEntry& get(const std::string& name, const std::vector<int64_t>& shape) const;
    const std::string& folder() const { return folder_; }
    // All tensors, by name.
    const std::map<std::string, const SafetensorsEntry*>& entries() const { return entries_; }

  private:
    void open_shards(const std::string& index);

    std::string folder_, prefix_;
    std::vector<SafetensorsFile> files_;  // entries stay where they are when this vector grows
    std::map<std::string, const SafetensorsEntry*> entries_;
};
