// fuzz_safetensors.cpp - libFuzzer target: opens any bytes as a safetensors file and reads every tensor.
//
// Input: a byte that says how to build the file. Even: the rest is the file. Odd: the rest is the JSON of the
// header up to the first NUL, then the data; the header's length is put in front, so that mutations reach the
// JSON.

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "llmc/safetensors.h"
#include "test/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size) {
    if (size == 0) return 0;
    std::string content(reinterpret_cast<const char*>(input) + 1, size - 1);
    if (input[0] & 1) {
        const size_t cut = std::min(content.find('\0'), content.size());
        const std::string header = content.substr(0, cut);
        const std::string data = cut < content.size() ? content.substr(cut + 1) : "";
        const uint64_t length = header.size();
        content = std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + data;
    }
    const std::string path = fuzz_file(content, ".safetensors");
    parse_or_refuse([&] {
        const SafetensorsFile file(path);
        for (const SafetensorsEntry& entry : file.entries()) {
            // Memory of just its size, so that the sanitizer sees accesses beyond it.
            std::vector<unsigned char> data(entry.bytes);
            entry.read(0, entry.bytes, data.data());
            if (file.find(entry.name) != &entry) __builtin_trap();
            size_t count = 1;
            for (const int64_t dim : entry.shape) count *= static_cast<size_t>(dim);
            parse_or_refuse([&] {
                std::vector<float> values(count);
                read_as_float(entry, values.data(), 0, count);
            });
        }
    });
    return 0;
}
