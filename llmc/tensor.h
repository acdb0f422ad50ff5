// tensor.h - a tensor: a pointer to its elements, their type, and a shape.
//
// A tensor may own memory in the arena (arena.h), which it gives back where its life ends; or it is a view of
// memory that something else owns. It can be moved but not copied: view() makes a second handle.
//
// The type of weights and activations in this build, bf16 or float, is here too.
#pragma once

#include <cassert>
#include <type_traits>
#include <utility>

#include "llmc/build.h"
#include "llmc/simt.h"
#include "llmc/step_plan.h"

template <class T>
constexpr const char* dtype_name() {
    if constexpr (std::is_same_v<T, float>)
        return "fp32";
    else if constexpr (std::is_same_v<T, bf16>)
        return "bf16";
    else if constexpr (std::is_same_v<T, int>)
        return "int32";
    else if constexpr (std::is_same_v<T, int16_t>)
        return "int16";
    else
        return "byte";
}

class Arena;
void arena_give_back(Arena& arena, int take);

template <class T>
class Tensor {
  public:
    Tensor() = default;
    Tensor(T* data, Shape shape) : data_(data), shape_(shape), live_(true) {}
    Tensor(T* data, Shape shape, Arena* arena, int take)
        : data_(data), shape_(shape), live_(true), arena_(arena), take_(take) {}
    Tensor(Tensor&& other) noexcept { *this = std::move(other); }
    Tensor& operator=(Tensor&& other) noexcept {
        if (this == &other) return *this;
        drop();
        data_ = std::exchange(other.data_, nullptr);
        shape_ = other.shape_;
        live_ = std::exchange(other.live_, false);
        arena_ = std::exchange(other.arena_, nullptr);
        take_ = other.take_;
        return *this;
    }
    ~Tensor() { drop(); }

    // Ends the tensor's life: gives its memory back if it owns it.
    void drop() {
        if (arena_) arena_give_back(*arena_, take_);
        arena_ = nullptr;
        data_ = nullptr;
        live_ = false;
    }
    // A view, which owns nothing; absent if this is.
    Tensor view() const { return live_ ? Tensor(data_, shape_) : Tensor(); }
    // The same elements in another shape of the same size.
    Tensor view(Shape shape) const {
        assert(shape.size() == shape_.size());
        return Tensor(data_, shape);
    }

    // A view of `count` rows from `first` on.
    Tensor rows_at(int64_t first, int64_t count) const {
        assert(first + count <= rows());
        return Tensor(at(first * columns()), {count, columns()});
    }

    T* data() const { return data_; }
    // The address of element `i`; null in a dry run, which has no data.
    T* at(int64_t i) const { return data_ ? data_ + i : nullptr; }
    const Shape& shape() const { return shape_; }
    int64_t size() const { return shape_.size(); }
    int64_t bytes() const { return size() * static_cast<int64_t>(sizeof(T)); }
    int64_t rows() const { return shape_.rows(); }
    int64_t columns() const { return shape_.columns(); }
    // Whether it holds something: it is not default-constructed, moved from or dropped. Also true in a dry
    // run, without data.
    explicit operator bool() const { return live_; }

  private:
    T* data_ = nullptr;
    Shape shape_;
    bool live_ = false;
    Arena* arena_ = nullptr;
    int take_ = 0;
};

// ---- the precision of this build
//
// Weights and activations are bf16 with -DLLMC_BF16, else float.

#ifdef LLMC_BF16
using floatX = bf16;
#else
using floatX = float;
#endif
// Each object of a program that includes this header defines it: weakly, so that they may be several.
extern __attribute__((weak)) const Build kBuild;
const Build kBuild = {kHostIsDevice, kFastCpu, std::is_same_v<floatX, bf16>};
using TensorX = Tensor<floatX>;
using TensorF = Tensor<float>;
