// not_finite.h - finds tensors in a model's files with values that are not finite. Weights that are loaded
// are checked while loading. Weights that are streamed from the files are checked only when a loss is not
// finite.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "llmc/gguf_model.h"
#include "llmc/quant_formats.h"
#include "llmc/safetensors.h"

// Fails if a tensor has a value that is not finite. `data` are blocks of a tensor of `file`, in host memory,
// from block number `first` on.
inline void check_blocks_finite(const WeightFormat& format, const unsigned char* data, size_t bytes,
                                const std::string& tensor, const std::string& file, int64_t first = 0) {
    const int64_t block = first_not_finite(format, data, bytes);
    if (block < 0) return;
    const auto number = static_cast<long long>(first + block);
    const std::string where = format.block == 1
                                  ? ::format("as value %lld", number)
                                  : ::format("in block %lld of %d values", number, format.block);
    fail("%s: tensor \"%s\" has a number that is not finite %s", file.c_str(), printable(tensor).c_str(),
         where.c_str());
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

// Checks all floats in a model's folder, which include the scales of NF4.
inline void check_files_finite(const SafetensorsFolder& files) {
    for (const auto& [name, entry] : files.entries())
        for (const WeightFormat* format : {&kStoredF32, &kStoredF16, &kStoredBf16})
            if (entry->dtype == format->file_type)
                check_blocks_finite(*format, *entry->file, entry->offset, entry->bytes, name);
}
inline void check_files_finite(const GgufFile& file) {
    for (const GgufTensor& t : file.tensors())
        if (const WeightFormat* format = find_ggml_format(t.type->number))
            check_blocks_finite(*format, *t.file, t.offset, t.bytes, t.name);
}
