// gguf_write.h - writes GGUF files, the format of llama.cpp and ggml; gguf.h describes and reads them.
// gguf_export.h says what a model's file contains.
#pragma once

#include <cassert>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/file.h"
#include "llmc/quant_matrix.h"

// The keys of a file and their values, encoded in the order in which they are added.
class GgufKeys {
  public:
    void add(const std::string& key, uint32_t value) { begin(key, kU32).number(value); }
    void add_signed(const std::string& key, int32_t value) { begin(key, kI32).number(value); }
    void add_float(const std::string& key, double value) {
        begin(key, kF32).number(static_cast<float>(value));
    }
    void add_bool(const std::string& key, bool value) { begin(key, kBool).number(uint8_t{value}); }
    void add(const std::string& key, std::string_view text) { begin(key, kString).string(text); }
    void add(const std::string& key, const char* text) { add(key, std::string_view(text)); }
    void add(const std::string& key, const std::vector<std::string>& texts) {
        begin_list(key, kString, texts.size());
        for (const std::string& text : texts) string(text);
    }
    void add(const std::string& key, const std::vector<int32_t>& numbers) {
        begin_list(key, kI32, numbers.size());
        for (const int32_t value : numbers) number(value);
    }
    void add(const std::string& key, const std::vector<float>& numbers) {
        begin_list(key, kF32, numbers.size());
        for (const float value : numbers) number(value);
    }
    void append(const GgufKeys& others) {
        bytes_ += others.bytes_;
        count_ += others.count_;
    }

    uint64_t count() const { return count_; }
    const std::string& bytes() const { return bytes_; }

  private:
    enum ValueType : uint32_t { kU32 = 4, kI32 = 5, kF32 = 6, kBool = 7, kString = 8, kList = 9 };

    GgufKeys& begin(const std::string& key, ValueType type) {
        count_++;
        string(key);
        number(static_cast<uint32_t>(type));
        return *this;
    }
    void begin_list(const std::string& key, ValueType of, size_t length) {
        begin(key, kList);
        number(static_cast<uint32_t>(of));
        number(static_cast<uint64_t>(length));
    }
    template <class T>
    void number(T value) {
        bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    void string(std::string_view text) {
        number(static_cast<uint64_t>(text.size()));
        bytes_ += text;
    }

    std::string bytes_;
    uint64_t count_ = 0;
};

// Writes a file. First declare every tensor, then append their data in the same order, in pieces of any size,
// then call finish(). Each tensor's data start at a multiple of 32 bytes.
class GgufWriter {
  public:
    // Shapes have the slowest dimension first, as in the rest of the program.
    void declare(const std::string& name, const WeightFormat& format, const std::vector<int64_t>& shape) {
        int64_t elements = 1;
        for (const int64_t dim : shape) elements *= dim;
        assert(shape.back() % format.block == 0);
        const auto bytes = static_cast<uint64_t>(elements / format.block * format.block_bytes);
        number(static_cast<uint64_t>(name.size()));
        table_ += name;
        number(static_cast<uint32_t>(shape.size()));
        for (size_t i = shape.size(); i-- > 0;) number(static_cast<uint64_t>(shape[i]));
        number(static_cast<uint32_t>(format.ggml_type));
        number(data_bytes_);
        tensors_.push_back(bytes);
        data_bytes_ += aligned(bytes);
    }
    // The size of the file with these keys.
    uint64_t file_bytes(const GgufKeys& keys) const {
        return aligned(kStart + keys.bytes().size() + table_.size()) + data_bytes_;
    }

    // Writes everything before the data. Call it after the last declare().
    void open(const std::string& path, const GgufKeys& keys) {
        file_.emplace(path);
        file_->write("GGUF");
        const uint32_t version = 3;
        file_->write(&version, sizeof version);
        const uint64_t counts[2] = {tensors_.size(), keys.count()};
        file_->write(counts, sizeof counts);
        file_->write(keys.bytes());
        file_->write(table_);
        pad(kStart + keys.bytes().size() + table_.size());
    }
    void append(const void* data, size_t bytes) {
        assert(tensor_ < tensors_.size() && appended_ + bytes <= tensors_[tensor_]);
        file_->write(data, bytes);
        appended_ += bytes;
        if (appended_ < tensors_[tensor_]) return;
        pad(appended_);
        appended_ = 0;
        tensor_++;
    }
    // Syncs and closes. All declared bytes must have been appended.
    void finish() {
        assert(tensor_ == tensors_.size());
        file_->finish();
    }

  private:
    static constexpr uint64_t kAlignment = 32, kStart = 24;  // bytes before the keys

    static uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
    void pad(uint64_t bytes) {
        static constexpr char zeros[kAlignment] = {};
        file_->write(zeros, static_cast<size_t>(aligned(bytes) - bytes));
    }
    template <class T>
    void number(T value) {
        table_.append(reinterpret_cast<const char*>(&value), sizeof value);
    }

    std::string table_;              // of tensors, encoded
    std::vector<uint64_t> tensors_;  // the bytes of each
    uint64_t data_bytes_ = 0;        // with padding
    std::optional<FileWriter> file_;
    size_t tensor_ = 0;      // the one that is being appended,
    uint64_t appended_ = 0;  // and how much of it
};
