// stored_formats.cuh - matrices that are kept in a file's float type, whatever the build's: F32, F16, BF16.
// They are formats like the quantized ones (quantized.h), with blocks of one element.
#pragma once

#include "llmc/quantized.h"

// Elements of 2 bytes are fp16 if kHalf, else bf16.
template <int kBytes, bool kHalf>
struct StoredFloats {
    const unsigned char* data;

    explicit StoredFloats(const QuantizedView& w) : data(w.data) {}
    static int64_t bytes(int64_t elements) { return aligned_part(elements * kBytes); }

    template <int N>
    SIMT_DEVICE void decode(float (&w)[N], int64_t i) const {
        for (int k = 0; k < N; k++) {
            const unsigned char* const p = data + (i + k) * kBytes;
            if constexpr (kBytes == 4)
                memcpy(&w[k], p, 4);
            else if constexpr (kHalf)
                w[k] = half_at(p);
            else
                w[k] = to_float(*reinterpret_cast<const bf16*>(p));
        }
    }
};

inline constexpr WeightFormat kStoredF32 = quantized_format<StoredFloats<4, false>>("f32", "F32", 0, 1, 4);
inline constexpr WeightFormat kStoredF16 = quantized_format<StoredFloats<2, true>>("f16", "F16", 1, 1, 2);
inline constexpr WeightFormat kStoredBf16 =
    quantized_format<StoredFloats<2, false>>("bf16", "BF16", 30, 1, 2);

// The format of floats of type T.
template <class T>
inline constexpr const WeightFormat& kStored = kStoredF32;
template <>
inline constexpr const WeightFormat& kStored<bf16> = kStoredBf16;
