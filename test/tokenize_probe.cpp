// tokenize_probe.cpp - tokenizes on request, for tests that compare the tokens with those of other programs.
//
//     tokenize_probe FOLDER COMMAND < INPUTS > OUTPUTS
//
// Inputs and outputs are records: a uint32 length, then that many bytes.
// encode [BYTES]  text to int32 tokens; fed in parts of BYTES bytes if given
// specials        text to int32 tokens, with those that the tokenizer puts around a text
// data            the name of a file to its tokens as training data, of text or of examples
// examples FORMAT a line of JSON lines to its tokens as training data, negative if they have no loss;
//                 FORMAT as of --chat-format; `learn-all FORMAT`, `learn-last FORMAT`: with --loss-on all, or
//                 last
// decode          int32 tokens to text
// time            text to JSON: its bytes and tokens, and the processor seconds that tokenizing it took
// facts           needs no input; JSON: size, end_of_text, begin_of_text, held_bytes
// A mistake of the user's is reported in one line, with exit code 2, as by the trainer.

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>
#include <vector>

#include "llmc/data_tokens.h"
#include "llmc/tokenizer.h"
#include "llmc/tokenizer_encoder.h"

namespace {

std::vector<int32_t> encode_in_parts(const Tokenizer& tokenizer, std::string_view text, size_t bytes) {
    std::vector<int32_t> tokens;
    const std::shared_ptr<TextEncoder> encoder = tokenizer.encoder();
    for (; !text.empty(); text.remove_prefix(std::min(bytes, text.size())))
        encoder->feed(text.substr(0, bytes), tokens);
    encoder->finish(tokens);
    return tokens;
}

std::string record_of(const std::vector<int32_t>& tokens) {
    return {reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof tokens[0]};
}

std::string encode(const Tokenizer& tokenizer, std::string_view text, size_t bytes, Ends ends) {
    return record_of(bytes > 0 ? encode_in_parts(tokenizer, text, bytes) : tokenizer.encode(text, ends));
}

std::string tokens_of_data(const Tokenizer& tokenizer, const std::string& file,
                           const ExampleOptions& options) {
    constexpr int kLongest = 1 << 20;
    Dataset data({file}, "--data");
    if (data.is_examples())
        tokenize_examples(data, tokenizer, options, kLongest);
    else
        tokenize_text(data, tokenizer);
    std::vector<int32_t> tokens(data.token_count());
    data.read(0, 0, tokens.size(), tokens.data());
    return record_of(tokens);
}

std::string tokens_of_example(ExampleEncoder& encoder, std::string& line) {
    std::vector<int32_t> tokens;
    encoder.encode(
        read_example(line, "a line"), "a line", SIZE_MAX,
        [&](std::span<const int32_t> part, bool) { tokens.insert(tokens.end(), part.begin(), part.end()); });
    return record_of(tokens);
}

std::string decode(const Tokenizer& tokenizer, std::string_view input) {
    std::vector<int> tokens(input.size() / sizeof(int));
    input.copy(reinterpret_cast<char*>(tokens.data()), tokens.size() * sizeof(int));
    return tokenizer.decode(tokens);
}

std::string facts(const Tokenizer& t) {
    return format(R"({"size": %d, "end_of_text": %d, "begin_of_text": %d, "held_bytes": %zu})", t.size(),
                  t.end_of_text(), t.begin_of_text(), t.held_bytes());
}

std::string time(const Tokenizer& tokenizer, std::string_view text) {
    const auto start = std::clock();
    const size_t tokens = tokenizer.encode(text).size();
    return format(R"({"bytes": %zu, "tokens": %zu, "seconds": %g})", text.size(), tokens,
                  static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
}

void write_record(const std::string& record) {
    const auto size = static_cast<uint32_t>(record.size());
    fwrite(&size, sizeof size, 1, stdout);
    fwrite(record.data(), 1, size, stdout);
}

void run(const std::string& folder, const std::string& command, const std::string& argument) {
    const size_t bytes = std::strtoul(argument.c_str(), nullptr, 10);
    const auto tokenizer = Tokenizer::open(folder);
    if (!tokenizer) fail("%s: has no tokenizer", folder.c_str());
    if (command == "facts") return write_record(facts(*tokenizer));
    const char* const loss_on = command == "learn-all"    ? "all"
                                : command == "learn-last" ? "last"
                                                          : "completions";
    const ExampleOptions options = {{loss_on, argument.empty() ? "auto" : argument, "2024-07-26"},
                                    chat_templates_of(folder, *tokenizer),
                                    folder};
    ExampleEncoder examples(*tokenizer, options);
    for (uint32_t size; fread(&size, sizeof size, 1, stdin) == 1;) {
        std::string input(size, '\0');
        if (fread(input.data(), 1, size, stdin) != size) fail("a record is cut short");
        if (command == "encode" || command == "specials")
            write_record(encode(*tokenizer, input, bytes, command == "specials" ? Ends::Add : Ends::None));
        else if (command == "data")
            write_record(tokens_of_data(*tokenizer, input, options));
        else if (command == "examples" || command.starts_with("learn-"))
            write_record(tokens_of_example(examples, input));
        else if (command == "decode")
            write_record(decode(*tokenizer, input));
        else if (command == "time")
            write_record(time(*tokenizer, input));
        else
            fail("%s: no command", command.c_str());
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) return 1;
    try {
        run(argv[1], argv[2], argc > 3 ? argv[3] : "");
    } catch (const UserError& error) {
        fprintf(stderr, "%s\n", error.what());
        return 2;
    }
    return 0;
}
