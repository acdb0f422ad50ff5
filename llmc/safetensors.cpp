// safetensors.cpp - checks and writes the headers of safetensors files.
#include "llmc/safetensors.h"

#include <filesystem>
#include <system_error>
#include <tuple>

const FileTypeInfo* find_file_type(const std::string& name) {
    for (const FileTypeInfo& info : kFileTypes)
        if (name == info.name) return &info;
    return nullptr;
}

bool has_weights(const std::string& folder) {
    return file_exists(folder + "/model.safetensors") ||
           file_exists(folder + "/model.safetensors.index.json");
}

// The name of a file in a folder that has weights as torch.save() writes them; "" if there is none.
static std::string pickled_weights(const std::string& folder) {
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

SafetensorsFile::SafetensorsFile(const std::string& path)
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

const SafetensorsEntry* SafetensorsFile::find(const std::string& name) const {
    const auto found = index_.find(name);
    return found == index_.end() ? nullptr : &entries_[found->second];
}

// `entry`, the tensor of this name in `path`, if it is there and has this shape.
static const SafetensorsEntry& require_tensor(const SafetensorsEntry* entry, const std::string& path,
                                              const std::string& name, const std::vector<int64_t>& shape) {
    if (!entry) fail("%s: tensor \"%s\" is missing", path, name);
    if (entry->shape != shape)
        fail("%s: tensor \"%s\" has shape %s where %s is needed", path, printable(entry->name),
             shape_text(entry->shape), shape_text(shape));
    return *entry;
}
const SafetensorsEntry& SafetensorsFile::get(const std::string& name,
                                             const std::vector<int64_t>& shape) const {
    return require_tensor(find(name), path(), name, shape);
}
const SafetensorsEntry& SafetensorsFolder::get(const std::string& name,
                                               const std::vector<int64_t>& shape) const {
    return require_tensor(find(name), folder_, name, shape);
}

nlohmann::json SafetensorsFile::read_header() {
    const char* path = file_->path().c_str();
    const size_t size = file_->size();
    refuse_lfs_pointer(*file_);
    uint64_t length = 0;
    if (size < sizeof length) fail("%s: %zu bytes are too few for a safetensors file", path, size);
    file_->read(0, sizeof length, &length);
    if (length > kLongestHeader)
        fail("%s: not a safetensors file: it announces a header of %lu bytes, over the limit of %lu", path,
             length, kLongestHeader);
    if (length > size - sizeof length)
        fail("%s: it announces a header of %lu bytes and has %zu after the length: cut short?", path, length,
             size - sizeof length);
    std::string text(length, ' ');
    file_->read(sizeof length, text.size(), text.data());
    data_ = sizeof length + length;
    data_bytes_ = size - data_;
    nlohmann::json header = parse_json(text, file_->path());
    if (!header.is_object()) fail("%s: its header is not a JSON object", path);
    return header;
}

void SafetensorsFile::check_metadata(const nlohmann::json& value) {
    if (!value.is_object()) fail("%s: \"__metadata__\" is not a JSON object", path());
    for (const auto& [key, text] : value.items())
        if (!text.is_string()) fail("%s: \"__metadata__\": \"%s\" is not a string", path(), printable(key));
}

// A value of the header, for messages. Nested values are only named by their type.
static std::string short_json(const nlohmann::json& value) {
    const auto nested = [](const nlohmann::json& item) { return item.is_structured(); };
    if (value.is_object() || (value.is_array() && std::ranges::any_of(value, nested)))
        return value.type_name();
    return printable(value.dump());
}

SafetensorsEntry SafetensorsFile::read_entry(const std::string& name, const nlohmann::json& value) const {
    for (const char* key : {"dtype", "shape", "data_offsets"})
        if (!value.is_object() || !value.contains(key)) fail_tensor(name, "\"%s\" is missing", key);
    SafetensorsEntry entry{name, "", {}, file_.get(), 0, 0};

    const nlohmann::json& dtype = value["dtype"];
    const FileTypeInfo* type = dtype.is_string() ? find_file_type(dtype.get<std::string>()) : nullptr;
    if (!type) fail_tensor(name, "unknown dtype %s", short_json(dtype));
    entry.dtype = type->name;

    const nlohmann::json& shape = value["shape"];
    if (!shape.is_array()) fail_tensor(name, "shape %s is not a list", short_json(shape));
    size_t bytes = type->bytes;
    for (const nlohmann::json& dim : shape) {
        if (!dim.is_number_unsigned() || dim.get<uint64_t>() > INT64_MAX)
            fail_tensor(name, "dimension %s is not a size", short_json(dim));
        if (__builtin_mul_overflow(bytes, dim.get<uint64_t>(), &bytes))
            fail_tensor(name, "shape %s overflows", short_json(shape));
        entry.shape.push_back(dim.get<int64_t>());
    }

    const nlohmann::json& offsets = value["data_offsets"];
    const std::string range = short_json(offsets);
    if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
        !offsets[1].is_number_unsigned())
        fail_tensor(name, "data_offsets %s are not [begin, end]", range);
    const auto begin = offsets[0].get<uint64_t>(), end = offsets[1].get<uint64_t>();
    if (begin > end) fail_tensor(name, "data_offsets %s end before they begin", range);
    if (end > data_bytes_)
        fail_tensor(name, "data_offsets %s end after the file's %zu bytes of data: cut short?", range,
                    data_bytes_);
    if (end - begin != bytes)
        fail_tensor(name, "data_offsets %s hold %lu bytes where %s of shape %s takes %zu", range, end - begin,
                    type->name, shape_text(entry.shape), bytes);
    entry.offset = data_ + begin;
    entry.bytes = bytes;
    return entry;
}

void SafetensorsFile::check_cover() {
    std::ranges::sort(entries_, [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
        return std::tie(a.offset, a.bytes) < std::tie(b.offset, b.bytes);
    });
    uint64_t covered = data_;
    for (size_t i = 0; i < entries_.size(); i++) {
        const SafetensorsEntry& entry = entries_[i];
        if (entry.offset < covered)
            fail_tensor(entry.name, "its data overlaps that of \"%s\"", printable(entries_[i - 1].name));
        if (entry.offset > covered)
            fail_tensor(entry.name, "the %zu bytes before its data belong to no tensor",
                        static_cast<size_t>(entry.offset - covered));
        covered += entry.bytes;
    }
    if (const size_t left = data_bytes_ - static_cast<size_t>(covered - data_); left > 0)
        fail("%s: the last %zu bytes belong to no tensor", path(), left);
}

void SafetensorsWriter::declare(const std::string& name, FileType type, const std::vector<int64_t>& shape) {
    assert(!header_.contains(name) && !header_written_);
    size_t bytes = file_type_info(type).bytes;
    for (const int64_t dim : shape) bytes *= static_cast<size_t>(dim);
    header_[name]["dtype"] = file_type_info(type).name;
    header_[name]["shape"] = shape;
    header_[name]["data_offsets"] = {declared_, declared_ + bytes};
    declared_ += bytes;
}

void SafetensorsWriter::append(const void* data, size_t bytes) {
    write_header();
    assert(bytes <= declared_ - appended_);
    file_.write(data, bytes);
    appended_ += bytes;
}

void SafetensorsWriter::finish() {
    write_header();
    assert(appended_ == declared_);
    file_.finish();
}

void SafetensorsWriter::write_header() {
    if (header_written_) return;
    std::string text = header_.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const uint64_t length = text.size();
    file_.write(&length, sizeof length);
    file_.write(text);
    header_written_ = true;
}

SafetensorsFolder::SafetensorsFolder(const std::string& folder, const std::string& prefix)
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
                folder, printable(pickled), folder);
        fail("%s has neither model.safetensors nor model.safetensors.index.json", folder);
    }
}

const SafetensorsEntry* SafetensorsFolder::find(const std::string& name) const {
    auto found = entries_.find(name);
    if (found == entries_.end() && !prefix_.empty() && name.starts_with(prefix_))
        found = entries_.find(name.substr(prefix_.size()));
    return found == entries_.end() ? nullptr : found->second;
}

void SafetensorsFolder::open_shards(const std::string& index) {
    const nlohmann::json json = read_json(index);
    if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object())
        fail("%s has no \"weight_map\" object", index);
    std::map<std::string, size_t> shards;  // file name -> index in files_
    for (const auto& [name, file] : json["weight_map"].items()) {
        const std::string shown = printable(name);
        if (!file.is_string() || file.get<std::string>().find('/') != std::string::npos)
            fail("%s: tensor \"%s\": its shard is not the name of a file", index, shown);
        const auto [shard, is_new] = shards.try_emplace(file.get<std::string>(), files_.size());
        if (is_new) files_.emplace_back(folder_ + "/" + shard->first);
        const SafetensorsFile& opened = files_[shard->second];
        entries_[name] = opened.find(name);
        if (!entries_[name])
            fail("%s: tensor \"%s\" is missing, and %s says it is there", opened.path(), shown, index);
    }
}
