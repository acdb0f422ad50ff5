// kernel_test.h - shared code of the kernel tests: arrays on the device, inputs, errors, and runs in every
// order of threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/arena.h"  // defines arena_give_back()
#include "llmc/random.h"
#include "llmc/tensor.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#if defined(SIMT_LANES) && SIMT_LANES == 32
constexpr bool kFaithful = true;
#else
constexpr bool kFaithful = false;
#endif
#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif
// Smaller shapes where everything is slow: with ThreadSanitizer, and under compute-sanitizer
// (dev/gpu_check.sh).
inline const bool kSmallShapes = kThreadSanitizer || getenv("SMALL_SHAPES");

// Elements in device memory. On a CPU AddressSanitizer sees accesses right before and right after them. On a
// GPU they are an allocation of their own, without a guard, and compute-sanitizer's memcheck and test/gpu see
// such accesses.
template <class T>
class DeviceArray {
  public:
    explicit DeviceArray(size_t size) : size_(size), buffer_(bytes() + 2 * kGuard, "a test") {
#if defined(__SANITIZE_ADDRESS__)
        __asan_poison_memory_region(buffer_.data(), kGuard);
        __asan_poison_memory_region(buffer_.data() + kGuard + bytes(), kGuard);
#endif
    }
    explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
        copy_to_device(data(), host.data(), bytes(), Stream{});
    }
    DeviceArray(const DeviceArray&) = delete;
#if defined(__SANITIZE_ADDRESS__)
    ~DeviceArray() { __asan_unpoison_memory_region(buffer_.data(), buffer_.bytes()); }
#endif

    T* data() const { return reinterpret_cast<T*>(buffer_.data() + kGuard); }
    size_t size() const { return size_; }
    std::vector<T> download() const {
        std::vector<T> host(size_);
        copy_to_host(host.data(), data(), bytes(), Stream{});
        return host;
    }
    Tensor<T> tensor(Shape shape) const {
        assert(shape.size() == static_cast<int64_t>(size_));
        return Tensor<T>(data(), shape);
    }

  private:
#if defined(SIMT_GPU)
    static constexpr size_t kGuard = 0;
#else
    static constexpr size_t kGuard = 256;
#endif
    size_t bytes() const { return size_ * sizeof(T); }
    size_t size_;
    DeviceBuffer buffer_;
};

// n normal numbers of standard deviation `scale`.
template <class T>
std::vector<T> random_values(size_t n, double scale, uint64_t seed) {
    std::vector<T> values(n);
    for (size_t i = 0; i < n; i++)
        values[i] = from_float<T>(static_cast<float>(scale * random_normal(seed, i)));
    return values;
}

// n NaNs, for outputs: they show elements that are not written, or that are read before they are written.
template <class T>
std::vector<T> poisoned(size_t n) {
    return std::vector<T>(n, from_float<T>(std::numeric_limits<float>::quiet_NaN()));
}

template <class T>
std::vector<double> to_doubles(const std::vector<T>& values) {
    std::vector<double> doubles(values.size());
    for (size_t i = 0; i < values.size(); i++) doubles[i] = double{to_float(values[i])};
    return doubles;
}

// The relative error |got - want| / |want| by the Euclidean norm, |got| if `want` is all zeros. A NaN in
// either gives a NaN, which is below no tolerance.
template <class T>
double relative_error(const std::vector<T>& got, const std::vector<double>& want) {
    if (got.size() != want.size()) return std::numeric_limits<double>::infinity();
    double difference = 0, size = 0;
    for (size_t i = 0; i < want.size(); i++) {
        const double d = double{to_float(got[i])} - want[i];
        difference += d * d;
        size += want[i] * want[i];
    }
    return std::sqrt(size == 0 ? difference : difference / size);
}

// The relative error that can come from rounding inputs and outputs to T.
template <class T>
constexpr double tolerance() {
    return std::is_same_v<T, float> ? 1e-5 : 1e-2;
}

struct MatrixSize {
    int rows, C;
};

// Sizes for kernels that work on rows: rows of whole vectors and not, shorter than a warp's and longer.
inline std::vector<MatrixSize> matrix_sizes() {
    if (kSmallShapes) return {{1, 1}, {3, 100}, {37, 72}};
    std::vector<MatrixSize> sizes;
    for (int rows : {1, 3, 37, 300})
        for (int C : {1, 7, 64, 72, 100, 768, 1000}) sizes.push_back({rows, C});
    // A lane has many elements, and many vectors: as many as it keeps in registers, or more.
    for (int C : {403, 1600, 2072, 4104}) sizes.push_back({2, C});
    return sizes;
}

// Sizes of arrays for elementwise kernels, in fp32 and in bf16. The tail falls to each of the vectors that a
// thread processes.
constexpr int kTailSizes[] = {1027, 2051, 3075, 4099, 6149};

inline std::string text(const MatrixSize& s) { return std::to_string(s.rows) + " x " + std::to_string(s.C); }

// The bytes of several vectors, one after the other.
template <class... T>
std::vector<unsigned char> bytes_of(const std::vector<T>&... values) {
    std::vector<unsigned char> bytes;
    auto append = [&bytes](const auto& v) {
        const auto* first = reinterpret_cast<const unsigned char*>(v.data());
        bytes.insert(bytes.end(), first, first + v.size() * sizeof(v[0]));
    };
    (append(values), ...);
    return bytes;
}

// Calls run(), which launches kernels and returns the bytes of what they wrote. The faithful build calls it
// again with the threads in other orders and dynamic shared memory poisoned: the bytes must be the same.
template <class Run>
void for_each_order(Run&& run) {
#if defined(SIMT_LANES) && SIMT_LANES == 32
    using simt::Order;
    const simt::Config before = simt::config;
    simt::config = {Order::Forward, 1, true};
    const std::vector<unsigned char> first = run();
    EXPECT_FALSE(first.empty());
    simt::config = {Order::Reverse, 1, true};
    EXPECT_TRUE(run() == first) << "other bits when threads run in reverse order";
    for (unsigned seed = 1; seed <= 3; seed++) {
        simt::config = {Order::Random, seed, true};
        EXPECT_TRUE(run() == first) << "other bits when threads run in random order " << seed;
    }
    simt::config = before;
#else
    EXPECT_FALSE(run().empty());
#endif
}
