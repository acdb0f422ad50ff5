// fuzz_gguf.cpp - libFuzzer target: opens any bytes as a GGUF file, reads every tensor, the model and the
// tokenizer. The model's configuration, written as config.json, must read back the same.

#include <string>
#include <vector>

#include "llmc/arena.h"  // defines arena_give_back()
#include "llmc/gguf_model.h"
#include "llmc/tokenizer.h"
#include "test/fuzz.h"

namespace {
void read_model(const std::string& path) {
    const GgufModel model(path);
    const ModelConfig& c = model.config();
    if (!(parse_config(config_json(c, "float32"), "written") == c)) __builtin_trap();
    for (const GgufTensor& tensor : model.file().tensors()) {
        // Memory of just its size, so that the sanitizer sees accesses beyond it.
        std::vector<unsigned char> data(tensor.bytes);
        tensor.file->read(tensor.offset, tensor.bytes, data.data());
    }
    for (const Row& row : c.family->block(c, c.layer(0)))
        for (const FileTensor& part : row.parts) {
            const std::string name = c.family->prefix + std::string(c.family->blocks) + ".0." + part.name;
            const GgufPart found =
                model.get(name, std::vector<int64_t>(part.shape.dims, part.shape.dims + part.shape.count));
            std::vector<unsigned char> data(found.tensor->bytes);
            found.read_rows(0, found.tensor->rows(), data.data());
        }
}
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size) {
    const std::string path = fuzz_file({reinterpret_cast<const char*>(input), size}, ".gguf");
    parse_or_refuse([&] { read_model(path); });
    parse_or_refuse([&] {
        const GgufFile file(path);
        const Tokenizer tokenizer = read_gguf_tokenizer(file.metadata(), path);
        tokenizer.decode(tokenizer.encode(" abc ab'a 1111 <s> ab\n\n  abc", Ends::Add));
    });
    return 0;
}
