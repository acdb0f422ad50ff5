// fuzz_tokenizer.cpp - libFuzzer target: opens any bytes as a tokenizer.json, encodes a text with it and
// decodes that again.
//
// Input: the file up to the first NUL, then the text.

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/tokenizer.h"
#include "llmc/tokenizer_encoder.h"
#include "llmc/tokenizer_json.h"
#include "test/fuzz.h"

namespace {

// The tokens of a text that is fed in parts of `size` bytes, or nothing if the tokenizer's regex takes too
// long.
std::optional<std::vector<int>> encode(const TokenizerParts& parts, std::string_view text, size_t size) {
    std::optional<std::vector<int>> tokens;
    parse_or_refuse([&] {
        std::vector<int> all;
        TextEncoder encoder(parts.steps);
        for (std::string_view rest = text; !rest.empty(); rest.remove_prefix(std::min(size, rest.size())))
            encoder.feed(rest.substr(0, size), all);
        encoder.finish(all);
        tokens = all;
    });
    return tokens;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size) {
    const std::string_view whole(reinterpret_cast<const char*>(input), size);
    const size_t cut = std::min(whole.find('\0'), size);
    const std::string path = fuzz_file(whole.substr(0, cut), "-tokenizer.json");
    const std::string_view text = whole.substr(std::min(cut + 1, size)).substr(0, 200);
    parse_or_refuse([&] {
        SpeltModel spelt(path, path, "merge");
        const nlohmann::json file = read_spelt_json(path, {"model", "vocab"}, {"model", "merges"}, spelt);
        TokenizerParts parts = TokenizerJsonReader(file, std::move(spelt), path).take();
        const auto tokens = encode(parts, text, text.size()), same = encode(parts, text, 1);
        if (tokens && same && *tokens != *same) __builtin_trap();
        if (!tokens) return;
        for (const int token : *tokens)
            if (!parts.steps.vocabulary->has(token)) __builtin_trap();
        const Tokenizer tokenizer(std::move(parts));
        tokenizer.decode(*tokens);
    });
    return 0;
}
