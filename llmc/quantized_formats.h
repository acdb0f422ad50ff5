// quantized_formats.h - the list of all quantized formats, and how to find one by its name or GGUF type.
#pragma once

#include <cstring>
#include <string_view>

#include "llmc/ggml_formats.cuh"
#include "llmc/nf4.cuh"
#include "llmc/stored_formats.cuh"

inline constexpr const WeightFormat* kWeightFormats[] = {
    &kNf4, &kNf4Double, &kQ4_0, &kQ4_1, &kQ8_0, &kQ4_K, &kQ6_K, &kStoredF32, &kStoredF16, &kStoredBf16};

// The format of that name, or null.
inline const WeightFormat* find_weight_format(std::string_view name) {
    for (const WeightFormat* format : kWeightFormats)
        if (name == format->name) return format;
    return nullptr;
}

// The first block in host memory with a float, or a scale in fp16, that is not finite; -1 if there is none.
// Not for NF4, whose scales are in other tensors (nf4_files.h): always -1.
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

// The format with this type number in GGUF files, or null.
inline const WeightFormat* find_ggml_format(uint32_t type) {
    for (const WeightFormat* format : kWeightFormats)
        if (format->ggml_type >= 0 && static_cast<uint32_t>(format->ggml_type) == type) return format;
    return nullptr;
}
