// quant_formats.h - the list of all formats in which a frozen model's matrices may be stored, and how to find
// one by its name or GGUF type. A new format gets a file beside quant_nf4.cuh, and a line in this list. The
// check that a file's values are finite is here too, because it depends on the format.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/file.h"
#include "llmc/quant_ggml.cuh"
#include "llmc/quant_matrix.h"
#include "llmc/quant_nf4.cuh"

// ---- the float types of files
//
// Matrices that are kept in a file's float type, whatever the build's: F32, F16, BF16. They are formats like
// the quantized ones (quant_matrix.h), with blocks of one element.

// Elements of 2 bytes are fp16 if kHalf, else bf16.
template <int kBytes, bool kHalf>
struct StoredFloats {
    const unsigned char* data;

    explicit StoredFloats(const QuantizedView& w) : data(w.data) {}
    static int64_t bytes(int64_t elements) { return aligned_part(elements * kBytes); }

    const unsigned char* place(int64_t i) const { return data + i * kBytes; }
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

// The format of floats of this type, by its name in safetensors files; null if that is no type of floats.
inline const WeightFormat* stored_floats(std::string_view file_type) {
    for (const WeightFormat* format : {&kStoredF32, &kStoredF16, &kStoredBf16})
        if (file_type == format->file_type) return format;
    return nullptr;
}

// ---- the list

inline constexpr const WeightFormat* kWeightFormats[] = {
    &kNf4,  &kNf4Double, &kQ4_0, &kQ4_1, &kQ5_0,   &kQ5_1,      &kQ8_0,      &kQ2_K,
    &kQ3_K, &kQ4_K,      &kQ5_K, &kQ6_K, &kIQ4_NL, &kStoredF32, &kStoredF16, &kStoredBf16};

// The format with this type number in GGUF files, or null.
inline const WeightFormat* find_ggml_format(uint32_t type) {
    for (const WeightFormat* format : kWeightFormats)
        if (format->ggml_type >= 0 && static_cast<uint32_t>(format->ggml_type) == type) return format;
    return nullptr;
}

// ---- values that are not finite

// The first block in host memory with a float, or a scale in fp16, that is not finite; -1 if there is none.
// Not for NF4, whose scales are in other tensors (quant_nf4_files.h): always -1.
inline int64_t first_not_finite(const WeightFormat& format, const unsigned char* data, size_t bytes) {
    if (format.block_bytes == 0) return -1;
    const size_t width = static_cast<size_t>(format.block_bytes);
    const bool is_f32 = &format == &kStoredF32, is_bf16 = &format == &kStoredBf16;
    const uint32_t exponent = is_f32 ? 0x7f800000u : is_bf16 ? 0x7f80u : 0x7c00u;  // all ones: not finite
    const bool is_float = is_f32 || is_bf16 || &format == &kStoredF16;
    const int at[2] = {is_float ? 0 : format.halves[0], is_float ? -1 : format.halves[1]};
    for (size_t block = 0; block < bytes / width; block++)
        for (const int offset : at) {
            uint32_t bits = 0;
            if (offset >= 0) memcpy(&bits, data + block * width + offset, is_f32 ? 4 : 2);
            if ((bits & exponent) == exponent) return static_cast<int64_t>(block);
        }
    return -1;
}

// Fails if a tensor has a value that is not finite. `data` are blocks of a tensor of `file`, in host memory,
// from block number `first` on.
inline void check_blocks_finite(const WeightFormat& format, const unsigned char* data, size_t bytes,
                                const std::string& tensor, const std::string& file, int64_t first = 0) {
    const int64_t block = first_not_finite(format, data, bytes);
    if (block < 0) return;
    const auto number = first + block;
    const std::string where = format.block == 1 ? ::format("as value %ld", number)
                                                : ::format("in block %ld of %d values", number, format.block);
    fail("%s: tensor \"%s\" has a number that is not finite %s", file, printable(tensor), where);
}

// Checks a tensor on disk, reading it piece by piece.
inline void check_blocks_finite(const WeightFormat& format, const FileReader& file, uint64_t offset,
                                size_t bytes, const std::string& tensor) {
    const size_t block = static_cast<size_t>(format.block_bytes), piece = (size_t{1} << 20) / block * block;
    std::vector<unsigned char> host;
    for (size_t at = 0; at < bytes; at += piece) {
        host.resize(std::min(piece, bytes - at));
        file.read(offset + at, host.size(), host.data());
        check_blocks_finite(format, host.data(), host.size(), tensor, file.path(),
                            static_cast<int64_t>(at / block));
    }
}
