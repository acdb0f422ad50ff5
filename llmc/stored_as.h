// stored_as.h - chooses the format in which each matrix of a frozen model's linear layers is stored, as
// --base says: a format with fewer bits than the build computes with is widened when a product
// reads the matrix.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/adapter.h"
#include "llmc/quantized_formats.h"

// The formats' names in --base.
inline constexpr std::pair<const char*, const WeightFormat*> kStorable[] = {{"fp32", &kStoredF32},
                                                                            {"bf16", &kStoredBf16},
                                                                            {"8bit", &kQ8_0},
                                                                            {"nf4", &kNf4},
                                                                            {"nf4-double", &kNf4Double}};

// A format's name in options, or else in messages.
inline const char* stored_name(const WeightFormat& format) {
    for (const auto& [name, storable] : kStorable)
        if (storable == &format) return name;
    return format.name;
}

// One part of --base, such as "mlp=bf16".
struct StoredAs {
    std::string target;  // names as in the model's files, "attention", "mlp" or "all"
    const WeightFormat* format;
};

// Parses the parts of --base. Fails if a text is not of this form.
inline std::vector<StoredAs> parse_stored(const std::vector<std::string>& texts) {
    std::vector<StoredAs> all;
    for (const std::string& text : texts) {
        const size_t equals = text.find('=');
        const std::string name = equals == text.npos ? "" : text.substr(equals + 1);
        const WeightFormat* format = nullptr;
        std::string names;
        for (const auto& [known, candidate] : kStorable) {
            names += std::string(names.empty() ? "" : ", ") + known;
            if (name == known) format = candidate;
        }
        if (!format || equals == 0)
            fail("--base %s: needs a format, as in mlp=bf16; formats are %s", printable(text).c_str(),
                 names.c_str());
        all.push_back({text.substr(0, equals), format});
    }
    return all;
}

// The format of a layer's matrix: that of the last text that names the layer, else T's own. Fails if the
// format has more bits than a build with weights of type T computes with.
template <class T>
const WeightFormat* stored_format(const std::vector<StoredAs>& stored, const ModelConfig& c,
                                  const LinearModule& m) {
    const WeightFormat* format = &kStored<T>;
    for (const StoredAs& s : stored)
        if (is_among(c, m, s.target)) format = s.format;
    if (format == &kStoredF32 && !std::is_same_v<T, float>)
        fail("--base: this build computes in bf16, and %s would be stored in fp32: make PRECISION=fp32",
             m.name.c_str());
    return format;
}

// Fails if a text names no layer, or if a format's blocks do not divide the rows of a matrix.
inline void check_stored(const std::vector<StoredAs>& stored, const ModelConfig& c) {
    for (const StoredAs& s : stored) {
        bool found = false;
        for (const LinearModule& m : linear_modules(c)) {
            if (!is_among(c, m, s.target)) continue;
            found = true;
            if (s.format == &kQ8_0 && m.inputs % Q8_0::kElements != 0)
                fail("--base %s=8bit: blocks of %d do not divide the %lld columns of %s; use nf4",
                     s.target.c_str(), Q8_0::kElements, static_cast<long long>(m.inputs), m.name.c_str());
        }
        if (!found) fail_no_layer("--base", s.target, c);
    }
}
