// fuzz_shards.cpp - libFuzzer target: opens any bytes as a token shard or a text and reads sequences from it.
//
// Input: three bytes of choices (how to build the file, seq_len, seed), then the file. If the first byte is
// odd, the file's first 12 bytes are the start of a shard's header, whose unused rest is filled in, and
// tokens follow.

#include <string>
#include <vector>

#include "llmc/dataset.h"
#include "test/fuzz.h"

namespace {

void deal(const std::string& path, bool split, int seq_len, uint64_t seed) {
    Dataset data({path}, "--data");
    const auto held_out = split && data.is_text() ? data.hold_out(static_cast<uint64_t>(seq_len)) : nullptr;
    const int vocabulary = data.is_text() ? 256 : 50257;
    data.check_tokens(vocabulary);
    if (held_out) SequenceLoader(*held_out, seq_len, seed, false);
    SequenceLoader loader(data, seq_len, seed, seed % 2 == 0);
    const auto T = static_cast<size_t>(seq_len);
    std::vector<int32_t> inputs(3 * T), targets(3 * T);
    for (const uint64_t first : {uint64_t{0}, loader.sequences_per_epoch() - 1, seed << 40}) {
        loader.fill(first, 3, inputs.data(), targets.data());
        for (size_t i = 0; i < 3 * T; i++) {
            const bool successor = i % T == T - 1 || targets[i] == inputs[i + 1];
            const auto valid = [&](int32_t token) { return token >= 0 && token < vocabulary; };
            if (!successor || !valid(inputs[i]) || !valid(targets[i])) __builtin_trap();
        }
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size) {
    if (size < 4) return 0;
    std::string content(reinterpret_cast<const char*>(input) + 3, size - 3);
    if (input[0] & 1 && content.size() >= 12) content.insert(12, 1024 - 12, '\0');
    const bool named_shard = input[0] & 2;
    const bool split = input[0] & 4;
    const std::string path = fuzz_file(content, named_shard ? ".bin" : "");
    parse_or_refuse([&] { deal(path, split, input[1] % 32 + 1, input[2]); });
    return 0;
}
