// gguf_writer.h - writes small GGUF files for tests, also malformed ones.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

class GgufBytes {
  public:
    uint32_t version = 3, alignment = 32;
    int64_t claimed_tensors = -1, claimed_keys = -1;  // if not the real counts

    static std::string number(auto value) { return {reinterpret_cast<const char*>(&value), sizeof value}; }
    static std::string string(const std::string& text) { return number(uint64_t{text.size()}) + text; }

    // A key with a value of this type, encoded as in the file.
    void key(const std::string& name, uint32_t type, const std::string& value) {
        keys_ += string(name) + number(type) + value, key_count_++;
    }
    void u32(const std::string& name, uint32_t value) { key(name, 4, number(value)); }
    void f32(const std::string& name, float value) { key(name, 6, number(value)); }
    void text(const std::string& name, const std::string& value) { key(name, 8, string(value)); }
    void texts(const std::string& name, const std::vector<std::string>& values) {
        std::string list = number(uint32_t{8}) + number(uint64_t{values.size()});
        for (const std::string& value : values) list += string(value);
        key(name, 9, list);
    }
    void i32s(const std::string& name, const std::vector<int32_t>& values) {
        std::string list = number(uint32_t{5}) + number(uint64_t{values.size()});
        for (const int32_t value : values) list += number(value);
        key(name, 9, list);
    }

    // A tensor. Its dimensions are as in the file, the fastest first; its data is at `offset`, or at the next
    // one.
    void tensor(const std::string& name, const std::vector<uint64_t>& dims, uint32_t type,
                const std::string& data, int64_t offset = -1) {
        data_.resize((data_.size() + alignment - 1) / alignment * alignment);
        table_ += string(name) + number(static_cast<uint32_t>(dims.size()));
        for (const uint64_t dim : dims) table_ += number(dim);
        table_ += number(type) + number(offset < 0 ? uint64_t{data_.size()} : static_cast<uint64_t>(offset));
        data_ += data, tensor_count_++;
    }
    void floats(const std::string& name, const std::vector<uint64_t>& dims, float first = 0) {
        size_t n = 1;
        for (const uint64_t dim : dims) n *= dim;
        std::string data;
        for (size_t i = 0; i < n; i++) data += number(first + static_cast<float>(i));
        tensor(name, dims, 0, data);
    }

    std::string bytes() const {
        const int64_t tensors = claimed_tensors >= 0 ? claimed_tensors : tensor_count_;
        const int64_t keys = claimed_keys >= 0 ? claimed_keys : key_count_;
        std::string file = "GGUF" + number(version) + number(tensors) + number(keys) + keys_ + table_;
        file.resize((file.size() + alignment - 1) / alignment * alignment);
        return file + data_;
    }

  private:
    std::string keys_, table_, data_;
    int64_t tensor_count_ = 0, key_count_ = 0;
};
