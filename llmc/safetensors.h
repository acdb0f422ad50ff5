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
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <tuple>
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
inline const FileTypeInfo* find_file_type(const std::string& name) {
    for (const FileTypeInfo& info : kFileTypes)
        if (name == info.name) return &info;
    return nullptr;
}

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
    explicit SafetensorsFile(const std::string& path)
        : file_(std::make_unique<FileReader>(path, Pages::Dropped)) {
        const nlohmann::json header = read_header();
        for (const auto& [name, value] : header.items()) {
            if (name == "__metadata__")
                check_metadata(value);
            else
                entries_.push_back(read_entry(name, value));
        }
        check_cover();
        for (size_t i = 0; i < entries_.size(); i++) index_[entries_[i].name] = i;
    }

    const std::string& path() const { return file_->path(); }
    // The tensors in the order of their data.
    const std::vector<SafetensorsEntry>& entries() const { return entries_; }

    // The tensor of this name, or null.
    const SafetensorsEntry* find(const std::string& name) const {
        const auto found = index_.find(name);
        return found == index_.end() ? nullptr : &entries_[found->second];
    }

    // The tensor of this name. Fails if it is missing or has another shape.
    const SafetensorsEntry& get(const std::string& name, const std::vector<int64_t>& shape) const {
        return require_tensor(find(name), path(), name, shape);
    }

    static const SafetensorsEntry& require_tensor(const SafetensorsEntry* entry, const std::string& path,
                                                  const std::string& name,
                                                  const std::vector<int64_t>& shape) {
        if (!entry) fail("%s: tensor \"%s\" is missing", path.c_str(), name.c_str());
        if (entry->shape != shape)
            fail("%s: tensor \"%s\" has shape %s where %s is needed", path.c_str(),
                 printable(entry->name).c_str(), shape_text(entry->shape).c_str(), shape_text(shape).c_str());
        return *entry;
    }

  private:
    static constexpr uint64_t kLongestHeader = 100'000'000;  // the limit of the reference implementation

    nlohmann::json read_header() {
        const char* path = file_->path().c_str();
        const size_t size = file_->size();
        refuse_lfs_pointer(*file_);
        uint64_t length = 0;
        if (size < sizeof length) fail("%s: %zu bytes are too few for a safetensors file", path, size);
        file_->read(0, sizeof length, &length);
        if (length > kLongestHeader)
            fail("%s: not a safetensors file: it announces a header of %llu bytes, over the limit of %llu",
                 path, static_cast<unsigned long long>(length),
                 static_cast<unsigned long long>(kLongestHeader));
        if (length > size - sizeof length)
            fail("%s: it announces a header of %llu bytes and has %zu after the length: cut short?", path,
                 static_cast<unsigned long long>(length), size - sizeof length);
        std::string text(length, ' ');
        file_->read(sizeof length, text.size(), text.data());
        data_ = sizeof length + length;
        data_bytes_ = size - data_;
        nlohmann::json header = parse_json(text, file_->path());
        if (!header.is_object()) fail("%s: its header is not a JSON object", path);
        return header;
    }

    void check_metadata(const nlohmann::json& value) {
        if (!value.is_object()) fail("%s: \"__metadata__\" is not a JSON object", path().c_str());
        for (const auto& [key, text] : value.items()) {
            if (!text.is_string())
                fail("%s: \"__metadata__\": \"%s\" is not a string", path().c_str(), printable(key).c_str());
        }
    }

    template <class... A>
    [[noreturn]] void fail_tensor(const std::string& name, const char* pattern, A... args) const {
        fail("%s: tensor \"%s\": %s", path().c_str(), printable(name).c_str(),
             format(pattern, args...).c_str());
    }

    SafetensorsEntry read_entry(const std::string& name, const nlohmann::json& value) const {
        for (const char* key : {"dtype", "shape", "data_offsets"})
            if (!value.is_object() || !value.contains(key)) fail_tensor(name, "\"%s\" is missing", key);
        SafetensorsEntry entry{name, "", {}, file_.get(), 0, 0};

        const nlohmann::json& dtype = value["dtype"];
        const FileTypeInfo* type = dtype.is_string() ? find_file_type(dtype.get<std::string>()) : nullptr;
        if (!type) fail_tensor(name, "unknown dtype %s", short_json(dtype).c_str());
        entry.dtype = type->name;

        const nlohmann::json& shape = value["shape"];
        if (!shape.is_array()) fail_tensor(name, "shape %s is not a list", short_json(shape).c_str());
        size_t bytes = type->bytes;
        for (const nlohmann::json& dim : shape) {
            if (!dim.is_number_unsigned() || dim.get<uint64_t>() > INT64_MAX)
                fail_tensor(name, "dimension %s is not a size", short_json(dim).c_str());
            if (__builtin_mul_overflow(bytes, dim.get<uint64_t>(), &bytes))
                fail_tensor(name, "shape %s overflows", short_json(shape).c_str());
            entry.shape.push_back(dim.get<int64_t>());
        }

        const nlohmann::json& offsets = value["data_offsets"];
        const std::string range = short_json(offsets);
        if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
            !offsets[1].is_number_unsigned())
            fail_tensor(name, "data_offsets %s are not [begin, end]", range.c_str());
        const auto begin = offsets[0].get<uint64_t>(), end = offsets[1].get<uint64_t>();
        if (begin > end) fail_tensor(name, "data_offsets %s end before they begin", range.c_str());
        if (end > data_bytes_)
            fail_tensor(name, "data_offsets %s end after the file's %zu bytes of data: cut short?",
                        range.c_str(), data_bytes_);
        if (end - begin != bytes)
            fail_tensor(name, "data_offsets %s hold %llu bytes where %s of shape %s takes %zu", range.c_str(),
                        static_cast<unsigned long long>(end - begin), type->name,
                        shape_text(entry.shape).c_str(), bytes);
        entry.offset = data_ + begin;
        entry.bytes = bytes;
        return entry;
    }

    // A value of the header, for messages. Nested values are only named by their type.
    static std::string short_json(const nlohmann::json& value) {
        const auto nested = [](const nlohmann::json& item) { return item.is_structured(); };
        if (value.is_object() || (value.is_array() && std::any_of(value.begin(), value.end(), nested)))
            return value.type_name();
        return printable(value.dump());
    }

    void check_cover() {
        std::sort(entries_.begin(), entries_.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
            return std::tie(a.offset, a.bytes) < std::tie(b.offset, b.bytes);
        });
        uint64_t covered = data_;
        for (size_t i = 0; i < entries_.size(); i++) {
            const SafetensorsEntry& entry = entries_[i];
            if (entry.offset < covered)
                fail_tensor(entry.name, "its data overlaps that of \"%s\"",
                            printable(entries_[i - 1].name).c_str());
            if (entry.offset > covered)
                fail_tensor(entry.name, "the %zu bytes before its data belong to no tensor",
                            static_cast<size_t>(entry.offset - covered));
            covered += entry.bytes;
        }
        if (const size_t left = data_bytes_ - static_cast<size_t>(covered - data_); left > 0)
            fail("%s: the last %zu bytes belong to no tensor", path().c_str(), left);
    }

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

// Converts `count` elements, from number `first` on, to float without loss. Fails naming the tensor if its
// dtype is not F32, F16 or BF16.
inline void read_as_float(const SafetensorsEntry& entry, float* out, size_t first, size_t count) {
    const bool narrow = entry.dtype == "F16" || entry.dtype == "BF16";
    if (!narrow && entry.dtype != "F32")
        fail("tensor \"%s\" has dtype %s where F32, F16 or BF16 is needed", printable(entry.name).c_str(),
             entry.dtype.c_str());
    if (!narrow) return entry.read(first * 4, count * 4, out);
    const bool half = entry.dtype == "F16";
    std::vector<uint16_t> bits(std::min(count, size_t{1} << 15));
    for (size_t done = 0; done < count; done += bits.size()) {
        const size_t n = std::min(bits.size(), count - done);
        entry.read((first + done) * 2, n * 2, bits.data());
        for (size_t i = 0; i < n; i++)
            out[done + i] =
                half ? half_to_float(bits[i]) : std::bit_cast<float>(static_cast<uint32_t>(bits[i]) << 16);
    }
}

// Writes a safetensors file. First declare every tensor, then append their data in the same order, in pieces
// of any size, then call finish(). If wider types are declared first, every tensor in the file is aligned.
class SafetensorsWriter {
  public:
    // transformers refuses files whose metadata lacks {"format": "pt"}.
    explicit SafetensorsWriter(const std::string& path,
                               const std::map<std::string, std::string>& metadata = {{"format", "pt"}})
        : file_(path) {
        header_["__metadata__"] = metadata;
    }

    void declare(const std::string& name, FileType type, const std::vector<int64_t>& shape) {
        assert(!header_.contains(name) && !header_written_);
        size_t bytes = file_type_info(type).bytes;
        for (const int64_t dim : shape) bytes *= static_cast<size_t>(dim);
        header_[name]["dtype"] = file_type_info(type).name;
        header_[name]["shape"] = shape;
        header_[name]["data_offsets"] = {declared_, declared_ + bytes};
        declared_ += bytes;
    }

    void append(const void* data, size_t bytes) {
        write_header();
        assert(bytes <= declared_ - appended_);
        file_.write(data, bytes);
        appended_ += bytes;
    }

    // Syncs and closes. All declared bytes must have been appended.
    void finish() {
        write_header();
        assert(appended_ == declared_);
        file_.finish();
    }

  private:
    void write_header() {
        if (header_written_) return;
        std::string text = header_.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
        text.resize((text.size() + 7) / 8 * 8, ' ');
        const uint64_t length = text.size();
        file_.write(&length, sizeof length);
        file_.write(text);
        header_written_ = true;
    }

    FileWriter file_;
    nlohmann::ordered_json header_;
    size_t declared_ = 0, appended_ = 0;  // bytes
    bool header_written_ = false;
};

// True if a folder has a model's weights.
inline bool has_weights(const std::string& folder) {
    return file_exists(folder + "/model.safetensors") ||
           file_exists(folder + "/model.safetensors.index.json");
}

// The name of a file in a folder that has weights as torch.save() writes them; "" if there is none.
inline std::string pickled_weights(const std::string& folder) {
    std::string found;
    std::error_code error;
    for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end;
         at.increment(error)) {
        const std::string name = at->path().filename().string();
        const bool has_weights =
            (name.ends_with(".bin") && name != "training_args.bin") || name.ends_with(".pth");
        if (has_weights && (found.empty() || name < found)) found = name;
    }
    return found;
}

// The weights in a checkpoint folder: model.safetensors, or else the shards listed in
// model.safetensors.index.json. A tensor is looked up by its whole name and then by its name without
// `prefix`, because checkpoints with either exist.
class SafetensorsFolder {
  public:
    explicit SafetensorsFolder(const std::string& folder, const std::string& prefix = "")
        : folder_(folder), prefix_(prefix) {
        const std::string single = folder + "/model.safetensors", index = single + ".index.json";
        if (file_exists(single)) {
            files_.emplace_back(single);
            for (const SafetensorsEntry& entry : files_[0].entries()) entries_[entry.name] = &entry;
        } else if (file_exists(index)) {
            open_shards(index);
        } else {
            if (const std::string pickled = pickled_weights(folder); !pickled.empty())
                fail(
                    "%s has %s and no model.safetensors, which is needed; in Python, "
                    "transformers.AutoModelForCausalLM.from_pretrained(\"%s\").save_pretrained(\"DIR\") "
                    "writes it",
                    folder.c_str(), printable(pickled).c_str(), folder.c_str());
            fail("%s has neither model.safetensors nor model.safetensors.index.json", folder.c_str());
        }
    }

    const SafetensorsEntry* find(const std::string& name) const {
        auto found = entries_.find(name);
        if (found == entries_.end() && !prefix_.empty() && name.starts_with(prefix_))
            found = entries_.find(name.substr(prefix_.size()));
        return found == entries_.end() ? nullptr : found->second;
    }

    // The tensor of this name. Fails if it is missing or has another shape.
    const SafetensorsEntry& get(const std::string& name, const std::vector<int64_t>& shape) const {
        return SafetensorsFile::require_tensor(find(name), folder_, name, shape);
    }

    const std::string& folder() const { return folder_; }
    // All tensors, by name.
    const std::map<std::string, const SafetensorsEntry*>& entries() const { return entries_; }

  private:
    void open_shards(const std::string& index) {
        const nlohmann::json json = read_json(index);
        if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object())
            fail("%s has no \"weight_map\" object", index.c_str());
        std::map<std::string, size_t> shards;  // file name -> index in files_
        for (const auto& [name, file] : json["weight_map"].items()) {
            const std::string shown = printable(name);
            if (!file.is_string() || file.get<std::string>().find('/') != std::string::npos)
                fail("%s: tensor \"%s\": its shard is not the name of a file", index.c_str(), shown.c_str());
            const auto [shard, is_new] = shards.try_emplace(file.get<std::string>(), files_.size());
            if (is_new) files_.emplace_back(folder_ + "/" + shard->first);
            const SafetensorsFile& opened = files_[shard->second];
            entries_[name] = opened.find(name);
            if (!entries_[name])
                fail("%s: tensor \"%s\" is missing, and %s says it is there", opened.path().c_str(),
                     shown.c_str(), index.c_str());
        }
    }

    std::string folder_, prefix_;
    std::vector<SafetensorsFile> files_;  // entries stay where they are when this vector grows
    std::map<std::string, const SafetensorsEntry*> entries_;
};
