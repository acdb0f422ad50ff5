// quantized_formats.h - the quantized formats that there are.
#pragma once

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

// The format of a type's number in GGUF files, or null.
inline const WeightFormat* find_ggml_format(uint32_t type) {
    for (const WeightFormat* format : kWeightFormats)
        if (format->ggml_type >= 0 && static_cast<uint32_t>(format->ggml_type) == type) return format;
    return nullptr;
}
