// fuzz_toml.cpp - libFuzzer target: a configuration file (--config), read into options.

#include "llmc/build.h"
#include "llmc/options_parse.h"
#include "test/fuzz.h"

const Build kBuild = {.host_is_device = true, .is_fast_cpu = true, .is_bf16 = false};

namespace {
// The options are declared once, because that takes most of the time.
struct Parser {
    Asked options;
    CLI::App app;
    Parser() { declare_options(app, options); }
};
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size) {
    const std::string path = fuzz_file({reinterpret_cast<const char*>(input), size}, ".toml");
    parse_or_refuse([&] {
        static Parser parser;
        WordReader reader(parser.app);
        reader.config_file(path, [&](const Settings& settings) {
            for (const auto& [name, words] : settings) set_option(parser.app, parser.options, name, words);
        });
    });
    return 0;
}
