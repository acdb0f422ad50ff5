// fuzz_json_lines.cpp - libFuzzer target: opens any bytes as JSON lines, tokenizes their examples in one of
// the chat formats, and reads packed sequences of them.
//
// Input: two bytes of choices (format and --loss-on, seq_len), then the file.

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "llmc/data_tokens.h"
#include "test/fuzz.h"

namespace {

// A folder with a tokenizer that has some letters and all special tokens.
struct Folder {
    const std::string path = "/dev/shm/llmc-fuzz-" + std::to_string(getpid()) + "-folder";
    Folder() {
        nlohmann::json vocabulary, added = nlohmann::json::array();
        for (const char c : std::string("abcdefghijklmnopqrstuvwxyz \n<|>[]/ST")) {
            const int token = static_cast<int>(vocabulary.size());
            vocabulary[std::string(1, c)] = token;
        }
        int token = static_cast<int>(vocabulary.size());
        for (const char* mark : {"<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>",
                                 "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]"})
            added.push_back({{"id", token++},
                             {"content", mark},
                             {"single_word", false},
                             {"lstrip", false},
                             {"rstrip", false},
                             {"normalized", false},
                             {"special", true}});
        const nlohmann::json model = {
            {"type", "BPE"}, {"vocab", vocabulary}, {"merges", nlohmann::json::array()}};
        std::filesystem::create_directory(path);
        std::ofstream(path + "/tokenizer.json")
            << nlohmann::json{{"model", model}, {"added_tokens", added}, {"decoder", {{"type", "Fuse"}}}};
        std::ofstream(path + "/tokenizer_config.json") << R"({"bos_token": "<s>", "eos_token": "</s>"})";
    }
    ~Folder() { std::filesystem::remove_all(path); }
};

void deal(const std::string& path, const Tokenizer& tokenizer, const std::string& folder, const char* format,
          bool loss_on_all, int seq_len) {
    Dataset data({path}, "--data");
    const ExampleOptions options = {
        {loss_on_all ? "all" : "completions", format, ""}, chat_templates_of(folder, tokenizer), folder};
    tokenize_examples(data, tokenizer, options, seq_len);
    const auto held_out = data.hold_out(1);
    for (const Dataset* d :
         {static_cast<const Dataset*>(&data), static_cast<const Dataset*>(held_out.get())}) {
        if (!d) continue;
        SequenceLoader loader(*d, seq_len, 3, d == &data);
        const uint64_t sequences = loader.sequences_per_epoch();
        std::vector<int32_t> numbers[4];
        for (std::vector<int32_t>& n : numbers) n.resize(static_cast<size_t>(seq_len));
        auto& [inputs, targets, positions, ends] = numbers;
        uint64_t learnt = 0;
        for (uint64_t i = 0; i < sequences; i++) {
            loader.fill_batch(i, 1, inputs, targets, positions, ends);
            for (int t = 0; t < seq_len; t++) {
                const size_t at = static_cast<size_t>(t);
                learnt += targets[at] >= 0;
                const bool inside =
                    0 <= positions[at] && positions[at] <= t && t < ends[at] && ends[at] <= seq_len;
                const bool successor = targets[at] < 0 || t + 1 == ends[at] || targets[at] == inputs[at + 1];
                if (!inside || !successor || inputs[at] < 0) __builtin_trap();
            }
        }
        if (learnt != loader.tokens_with_loss(0, sequences)) __builtin_trap();
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size) {
    if (size < 3) return 0;
    constexpr const char* kFormats[] = {"auto", "chatml", "llama3", "mistral", "llama2", "zephyr", "gemma"};
    const std::string path = fuzz_file({reinterpret_cast<const char*>(input) + 2, size - 2}, ".jsonl");
    static const Folder folder;  // outside of parse_or_refuse(): it must open
    static const Tokenizer tokenizer = *Tokenizer::open(folder.path);
    parse_or_refuse([&] {
        deal(path, tokenizer, folder.path, kFormats[input[0] % 7], input[0] / 7 % 2, input[1] % 40 + 1);
    });
    return 0;
}
