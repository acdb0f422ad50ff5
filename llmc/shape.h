// shape.h - the shape of a tensor.
#pragma once

#include <cassert>
#include <cstdint>
#include <initializer_list>
#include <string>

struct Shape {
    static constexpr int kMaxDims = 4;
    int64_t dims[kMaxDims] = {};
    int count = 0;

    Shape() = default;
    Shape(std::initializer_list<int64_t> list) {
        assert(list.size() <= kMaxDims);
        for (int64_t d : list) dims[count++] = d;
    }
    int64_t size() const {
        int64_t n = 1;
        for (int i = 0; i < count; i++) n *= dims[i];
        return n;
    }
    // The last dimension, and the product of all others.
    int64_t columns() const { return count ? dims[count - 1] : 1; }
    int64_t rows() const { return columns() ? size() / columns() : 0; }
    bool operator==(const Shape& other) const {
        for (int i = 0; i < kMaxDims; i++)
            if (dims[i] != other.dims[i]) return false;
        return count == other.count;
    }
    std::string text() const {
        std::string s;
        for (int i = 0; i < count; i++) s += (i ? " x " : "") + std::to_string(dims[i]);
        return s;
    }
};
