// fuzz_json.cpp - libFuzzer target: reads any bytes as a model's config.json.

#include <string>

#include "llmc/file.h"
#include "test/fuzz.h"
#if __has_include("llmc/families.h")
#include "llmc/families.h"
#endif

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size) {
    const std::string path = fuzz_file({reinterpret_cast<const char*>(input), size}, ".json");
    parse_or_refuse([&] {
        const nlohmann::json json = read_json(path);
#if __has_include("llmc/families.h")
        parse_config(json, path);
#endif
    });
    return 0;
}
