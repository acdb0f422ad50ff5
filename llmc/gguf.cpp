// gguf.cpp - checks the header of a GGUF file while reading it, and encodes keys and the table of tensors.
#include "llmc/gguf.h"

#include <bit>
#include <cassert>
#include <charconv>
#include <limits>

#include "llmc/utf8.h"

// Types that cannot be read, for messages.
constexpr const char* kOtherGgufTypes =
    "9:Q8_1 15:Q8_K 16:IQ2_XXS 17:IQ2_XS 18:IQ3_XXS 19:IQ1_S 21:IQ3_S 22:IQ2_S "
    "23:IQ4_XS 24:I8 25:I16 26:I32 27:I64 28:F64 29:IQ1_M 34:TQ1_0 35:TQ2_0 39:MXFP4 "
    "40:NVFP4 41:Q1_0";

const GgufType* find_gguf_type(uint32_t number) {
    for (const GgufType& type : kGgufTypes)
        if (type.number == number) return &type;
    return nullptr;
}

const GgufType& gguf_type(std::string_view name) {
    return *std::ranges::find(kGgufTypes, name, &GgufType::name);
}

// The types of values. Without a name here: 64-bit numbers, which are only read.
enum ValueType : uint32_t { kU8, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kString, kList, kU64, kI64, kF64 };

// ---- reading

// Reads what is before the data of a file into the members of its GgufFile.
class HeaderReader {
  public:
    HeaderReader(const FileReader& file, nlohmann::json& metadata, std::vector<GgufTensor>& tensors,
                 std::map<std::string, size_t>& index)
        : file_(file), metadata_(metadata), tensors_(tensors), index_(index) {
        const auto [tensor_count, key_count] = read_start();
        for (uint64_t i = 0; i < key_count; i++) read_key();
        for (uint64_t i = 0; i < tensor_count; i++) read_tensor();
        read_alignment();
        place_tensors();
    }

  private:
    static constexpr size_t kLongestKey = 65535, kLongestName = 64, kMostDimensions = 4;
    static constexpr uint64_t kLongestList = 1 << 24;
    static constexpr size_t kWindow = 1 << 20;

    template <class... A>
    [[noreturn]] void refuse(PatternFor<A...> pattern, const A&... args) const {
        fail("%s: %s", file_.path(), format<A...>(pattern, args...));
    }
    template <class... A>
    [[noreturn]] void refuse_tensor(const std::string& name, PatternFor<A...> pattern,
                                    const A&... args) const {
        refuse("tensor \"%s\": %s", printable(name), format<A...>(pattern, args...));
    }

    uint64_t left() const { return file_.size() - at_; }

    // The next bytes of the header, valid until the next call.
    const char* take(uint64_t bytes) {
        if (bytes > left())
            refuse("its header goes on for %lu bytes at byte %lu, and %lu are left: cut short?", bytes, at_,
                   left());
        if (at_ < window_start_ || at_ + bytes > window_start_ + window_.size()) {
            window_start_ = at_;
            window_.resize(
                static_cast<size_t>(std::min<uint64_t>(left(), std::max<uint64_t>(bytes, kWindow))));
            file_.read(at_, window_.size(), window_.data());
        }
        const char* const taken = window_.data() + (at_ - window_start_);
        at_ += bytes;
        return taken;
    }
    template <class T>
    T number() {
        T value;
        std::memcpy(&value, take(sizeof value), sizeof value);
        return value;
    }
    std::string string(const char* what, uint64_t longest) {
        const auto length = number<uint64_t>();
        if (length > longest || length > left())
            refuse("%s at byte %lu announces %lu bytes, over the limit of %lu", what, at_, length,
                   std::min(longest, left()));
        const std::string text(take(length), static_cast<size_t>(length));
        if (valid_utf8(text) != text.size()) refuse("%s \"%s\" is not UTF-8", what, printable(text));
        return text;
    }

    // The numbers of tensors and keys.
    std::pair<uint64_t, uint64_t> read_start() {
        refuse_lfs_pointer(file_);
        if (file_.size() < 24) refuse("%zu bytes are too few for a GGUF file", file_.size());
        if (std::string_view(take(4), 4) != "GGUF") refuse("is no GGUF file");
        const auto version = number<uint32_t>();
        if (version != 2 && version != 3)
            refuse("%s %u; versions 2 and 3, little endian, are supported",
                   version % 65536 == 0 ? "is big endian, or its GGUF version is" : "its GGUF version is",
                   version);
        const auto tensors = number<uint64_t>(), keys = number<uint64_t>();
        // A tensor takes at least 24 bytes of the header, a key at least 13.
        if (tensors > left() / 24 || keys > left() / 13)
            refuse("announces %lu tensors and %lu keys, more than its %zu bytes can hold", tensors, keys,
                   file_.size());
        return {tensors, keys};
    }

    void read_key() {
        const std::string key = string("a key", kLongestKey);
        if (key.empty() || metadata_.contains(key))
            refuse("key \"%s\" %s", printable(key), key.empty() ? "is empty" : "appears twice");
        metadata_[key] = read_value(key, number<uint32_t>());
    }

    // The least number of bytes that a value of this type takes; 0 if the type is unknown.
    static uint64_t least_bytes(uint32_t type) {
        constexpr uint64_t bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8};
        return type < std::size(bytes) ? bytes[type] : 0;
    }

    nlohmann::json read_value(const std::string& key, uint32_t type) {
        if (type == kU8) return number<uint8_t>();
        if (type == kI8) return number<int8_t>();
        if (type == kU16) return number<uint16_t>();
        if (type == kI16) return number<int16_t>();
        if (type == kU32) return number<uint32_t>();
        if (type == kI32) return number<int32_t>();
        if (type == kU64) return number<uint64_t>();
        if (type == kI64) return number<int64_t>();
        if (type == kF64) return number<double>();
        if (type == kF32) return shortest(number<float>());
        if (type == kString) return string("a string", std::numeric_limits<uint64_t>::max());
        if (type == kList) return read_list(key);
        if (type != kBool) refuse("key \"%s\" has the unknown type %u", printable(key), type);
        const auto truth = number<uint8_t>();
        if (truth > 1) refuse("key \"%s\" is %u, but must be true or false", printable(key), truth);
        return truth == 1;
    }

    nlohmann::json read_list(const std::string& key) {
        const auto type = number<uint32_t>();
        const auto count = number<uint64_t>();
        if (least_bytes(type) == 0)
            refuse("key \"%s\" is a list of the unknown type %u", printable(key), type);
        if (type == kList) refuse("key \"%s\" is a list of lists, which is not supported", printable(key));
        if (count > kLongestList || count > left() / least_bytes(type))
            refuse("key \"%s\" announces %lu elements, and %lu bytes are left: cut short?", printable(key),
                   count, left());
        nlohmann::json::array_t list;
        list.reserve(static_cast<size_t>(count));
        for (uint64_t i = 0; i < count; i++) list.push_back(read_value(key, type));
        return list;
    }

    // Converts 1e-5f to 1e-5; a plain conversion gives 9.99999974737875e-06.
    static double shortest(float x) {
        char text[32];
        const auto end = std::to_chars(text, text + sizeof text, x).ptr;
        double value = x;
        std::from_chars(text, end, value);
        return value;
    }

    void read_tensor() {
        GgufTensor tensor{string("a tensor's name", kLongestName), nullptr, {}, &file_, 0, 0};
        const std::string& name = tensor.name;
        const auto count = number<uint32_t>();
        if (count < 1 || count > kMostDimensions)
            refuse_tensor(name, "%u dimensions where 1 to %zu are supported", count, kMostDimensions);
        size_t elements = 1;
        for (uint32_t i = 0; i < count; i++) {
            const auto dim = number<uint64_t>();
            if (dim == 0 || dim > INT64_MAX || __builtin_mul_overflow(elements, dim, &elements))
                refuse_tensor(name, "dimension %lu is not a size, or too large", dim);
            tensor.shape.insert(tensor.shape.begin(), static_cast<int64_t>(dim));
        }
        const auto type = number<uint32_t>();
        tensor.type = find_gguf_type(type);
        if (!tensor.type) refuse_type(name, type);
        if (tensor.shape.back() % tensor.type->block != 0)
            refuse_tensor(name, "rows of %ld elements are not whole blocks of %s, %d", tensor.shape.back(),
                          tensor.type->name, tensor.type->block);
        if (__builtin_mul_overflow(elements / static_cast<size_t>(tensor.type->block),
                                   static_cast<size_t>(tensor.type->block_bytes), &tensor.bytes))
            refuse_tensor(name, "%zu elements overflow", elements);
        tensor.offset = number<uint64_t>();
        if (!index_.emplace(name, tensors_.size()).second) refuse_tensor(name, "%s", "appears twice");
        tensors_.push_back(tensor);
    }

    [[noreturn]] void refuse_type(const std::string& tensor, uint32_t type) const {
        const std::string known = joined(kGgufTypes, ", ", [](const GgufType&t) { return t.name; }),
                          number = std::to_string(type) + ":";
        for (const std::string& other : words_of(kOtherGgufTypes))
            if (other.starts_with(number))
                refuse_tensor(tensor, "type %s is not supported; %s are", other.c_str() + number.size(),
                              known);
        refuse_tensor(tensor, "unknown type %u", type);
    }

    void read_alignment() {
        const auto given = metadata_.find("general.alignment");
        if (given == metadata_.end()) return;
        if (!given->is_number_unsigned() || !std::has_single_bit(given->get<uint64_t>()) ||
            given->get<uint64_t>() > kWindow)
            refuse("'general.alignment' is %s, but must be a power of two", printable(given->dump()));
        alignment_ = given->get<uint64_t>();
    }

    // Makes the tensors' offsets count from the start of the file. Checks that their data are inside the file
    // and do not overlap.
    void place_tensors() {
        const uint64_t start = (at_ + alignment_ - 1) / alignment_ * alignment_;
        const uint64_t size = file_.size() < start ? 0 : file_.size() - start;
        std::vector<const GgufTensor*> ordered;
        for (GgufTensor& tensor : tensors_) {
            if (tensor.offset % alignment_ != 0)
                refuse_tensor(tensor.name, "its offset %lu is not a multiple of %lu", tensor.offset,
                              alignment_);
            if (tensor.offset > size || tensor.bytes > size - tensor.offset)
                refuse_tensor(tensor.name,
                              "its %zu bytes at offset %lu end after the file's %lu bytes of data: "
                              "cut short?",
                              tensor.bytes, tensor.offset, size);
            tensor.offset += start;
            ordered.push_back(&tensor);
        }
        std::ranges::sort(ordered,
                          [](const GgufTensor* a, const GgufTensor* b) { return a->offset < b->offset; });
        for (size_t i = 1; i < ordered.size(); i++)
            if (ordered[i - 1]->offset + ordered[i - 1]->bytes > ordered[i]->offset)
                refuse_tensor(ordered[i]->name, "its data overlap those of \"%s\"",
                              printable(ordered[i - 1]->name));
    }

    const FileReader& file_;
    nlohmann::json& metadata_;
    std::vector<GgufTensor>& tensors_;
    std::map<std::string, size_t>& index_;
    uint64_t at_ = 0;  // bytes of the header read so far
    std::string window_;
    uint64_t window_start_ = 0;
    uint64_t alignment_ = 32;
};

GgufFile::GgufFile(const std::string& path) : file_(path, Pages::Dropped) {
    HeaderReader(file_, metadata_, tensors_, index_);
}

const GgufTensor* GgufFile::find(const std::string& name) const {
    const auto found = index_.find(name);
    return found == index_.end() ? nullptr : &tensors_[found->second];
}

static size_t bytes_of(const nlohmann::json& value) {
    constexpr size_t kOfAllocation = 16, kLongestInside = 15;  // glibc's heap, libstdc++'s strings
    size_t sum = sizeof value;
    if (value.is_string()) {
        const size_t length = value.get_ref<const std::string&>().size();
        sum += sizeof(std::string) + kOfAllocation;
        if (length > kLongestInside) sum += length + kOfAllocation;
    }
    if (value.is_structured())
        for (const nlohmann::json& item : value) sum += bytes_of(item);
    return sum;
}
size_t GgufFile::held_bytes() const { return bytes_of(metadata_); }

// ---- writing

constexpr uint64_t kAlignment = 32, kStart = 24;  // kStart: bytes before the keys

static uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
template <class T>
static void put(std::string& to, T value) {
    to.append(reinterpret_cast<const char*>(&value), sizeof value);
}
static void put(std::string& to, const std::string& text) {
    put(to, uint64_t{text.size()});
    to += text;
}

template <class T>
static void put(std::string& to, const std::vector<T>& list) {
    put(to, std::is_same_v<T, std::string> ? kString : std::is_same_v<T, float> ? kF32 : kI32);
    put(to, uint64_t{list.size()});
    for (const T& item : list) put(to, item);
}
static void put(std::string& to, double value) { put(to, static_cast<float>(value)); }

void GgufKeys::add(const std::string& key, const GgufValue& value) {
    constexpr ValueType types[] = {kU32, kI32, kF32, kBool, kString, kList, kList, kList};
    names_.push_back(key);
    put(bytes_, key);
    put(bytes_, types[value.index()]);
    std::visit([this](const auto& v) { put(bytes_, v); }, value);
}
void GgufKeys::append(const GgufKeys& others) {
    bytes_ += others.bytes_;
    names_.insert(names_.end(), others.names_.begin(), others.names_.end());
}

void GgufWriter::declare(const std::string& name, const GgufType& type, const std::vector<int64_t>& shape) {
    int64_t elements = 1;
    for (const int64_t dim : shape) elements *= dim;
    assert(shape.back() % type.block == 0);
    const auto bytes = static_cast<uint64_t>(elements / type.block * type.block_bytes);
    put(table_, name);
    put(table_, static_cast<uint32_t>(shape.size()));
    for (size_t i = shape.size(); i-- > 0;) put(table_, static_cast<uint64_t>(shape[i]));
    put(table_, type.number);
    put(table_, data_bytes_);
    tensors_.push_back(bytes);
    data_bytes_ += aligned(bytes);
}

uint64_t GgufWriter::file_bytes(const GgufKeys& keys) const {
    return aligned(kStart + keys.bytes().size() + table_.size()) + data_bytes_;
}

void GgufWriter::open(const std::string& path, const GgufKeys& keys) {
    std::string start = "GGUF";
    put(start, uint32_t{3});
    put(start, uint64_t{tensors_.size()});
    put(start, keys.count());
    file_.emplace(path);
    file_->write(start);
    file_->write(keys.bytes());
    file_->write(table_);
    pad(kStart + keys.bytes().size() + table_.size());
}

void GgufWriter::append(const void* data, size_t bytes) {
    assert(tensor_ < tensors_.size() && appended_ + bytes <= tensors_[tensor_]);
    file_->write(data, bytes);
    appended_ += bytes;
    if (appended_ < tensors_[tensor_]) return;
    pad(appended_);
    appended_ = 0;
    tensor_++;
}

void GgufWriter::finish() {
    assert(tensor_ == tensors_.size());
    file_->finish();
}

void GgufWriter::pad(uint64_t bytes) {
    static constexpr char zeros[kAlignment] = {};
    file_->write(zeros, static_cast<size_t>(aligned(bytes) - bytes));
}
