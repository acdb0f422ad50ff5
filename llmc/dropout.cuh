// dropout.cuh - dropout (Srivastava et al., JMLR 15, 2014): elements become zero with a given probability,
// and those that are kept are scaled by 1 / (1 - probability).
//
// Whether an element is kept depends only on a key in the device's memory, on the place in the model and on
// the element's index. So a recomputed block has the same zeros, and no mask is stored. 16 random bits decide
// on an element, so that probabilities are multiples of 1/65536.
#pragma once

#include <cmath>

#include "llmc/random.h"
#include "llmc/simt_vector.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

// Dropout at one place of the model, in one micro-batch.
struct Dropout {
    const uint64_t* key = nullptr;  // on the device: the micro-batch's key
    uint64_t place = 0;
    uint32_t dropped = 0;  // of 65536
    float scale = 1;
    int64_t first = 0;  // index of the tensor's first element in the larger tensor that it is part of

    SIMT_HOST_DEVICE explicit operator bool() const { return dropped > 0; }
    // The key of this place in this micro-batch.
    SIMT_DEVICE uint64_t here() const { return mix64(*key ^ place); }
    // Whether element i is kept; `here` is the key of its place.
    SIMT_DEVICE bool keeps(uint64_t here, int64_t i) const {
        const uint64_t bits = random_bits_of(here, static_cast<uint64_t>(i / 4)) >> (i % 4 * 16);
        return (bits & 0xffffu) >= dropped;
    }
    // The factor of element i: 0 or the scale.
    SIMT_DEVICE float factor(uint64_t here, int64_t i) const { return keeps(here, i) ? scale : 0.f; }
};

// Dropout of a tensor that is a part of a larger one, from its element `first` on.
inline Dropout from_element(Dropout d, int64_t first) {
    d.first = first;
    return d;
}

inline Dropout dropout_at(const uint64_t* key, uint64_t place, double probability) {
    const auto dropped = static_cast<uint32_t>(std::lround(probability * 65536));
    return {.key = key,
            .place = place,
            .dropped = dropped,
            .scale = 65536.f / static_cast<float>(65536 - dropped)};
}

template <class T, bool kAdds>
__global__ void __launch_bounds__(kBlockThreads) dropout_kernel(T* out, const T* x, Dropout d, int64_t n) {
    const uint64_t key = d.here();
    const bool aligned = are_aligned(out, x);
    for_each_vector<T>(n, aligned, [&]<int N>(int64_t i, std::integral_constant<int, N>) SIMT_INLINE {
        const Packed<T, N> p = load<N>(x + i);
        float o[N];
        const auto drop = [&](int64_t first) SIMT_INLINE {
            for (int k = 0; k < N; k++) o[k] = p[k] * d.factor(key, first + i + k);
        };
        // If the compiler knows that it is a multiple of 4, it computes random bits only for every fourth
        // element.
        d.first % 4 == 0 ? drop(d.first / 4 * 4) : drop(d.first);
        if constexpr (kAdds) {
            const Packed<T, N> before = load<N>(out + i);
            for (int k = 0; k < N; k++) o[k] += before[k];
        }
        store(out + i, o);
    });
}

// out = x with elements dropped, elementwise; out may be x. Applied to gradients it is its own backward.
template <class T>
void dropout(Tensor<T>& out, const Tensor<T>& x, const Dropout& d, Stream stream) {
    const Operation operation("dropout", 0, pass_bytes(out, x));
    launch<dropout_kernel<T, false>>(elementwise_blocks<T>(x.size()), kBlockThreads, 0, stream, out.data(),
                                     x.data(), d, x.size());
}

// out += x with elements dropped.
template <class T>
void dropout_add(Tensor<T>& out, const Tensor<T>& x, const Dropout& d, Stream stream) {
    const Operation operation("dropout_add", 0, pass_bytes(out, out, x));
    launch<dropout_kernel<T, true>>(elementwise_blocks<T>(x.size()), kBlockThreads, 0, stream, out.data(),
                                    x.data(), d, x.size());
}

__global__ void __launch_bounds__(1) set_dropout_key_kernel(uint64_t* to, uint64_t key) { *to = key; }

// Sets the key of the micro-batch that follows on the stream, from a seed and the index of its first
// sequence.
inline void set_dropout_key(uint64_t* to, uint64_t seed, uint64_t sequence, Stream stream) {
    launch<set_dropout_key_kernel>(1, 1, 0, stream, to, random_key(seed, name_hash("dropout"), sequence));
}
