// text_tokens.h - turns text files of the data into tokens. Each file is a document with the tokenizer's
// document start before it. The spelling of a special token like <s> in a text is plain text. The tokens are
// the same that dev/data/tokenize_text.py writes into shards.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include <unistd.h>

#include "llmc/dataset.h"
#include "llmc/tokenizer.h"
#include "llmc/utf8.h"

// Reports the progress of tokenizing and at the end the result: on a terminal in one line that is
// overwritten, otherwise in a line every ten seconds. Prints nothing for less than 10 MB.
class TokenizingLines {
  public:
    TokenizingLines(FILE* to, std::string name, uint64_t bytes)
        : to_(bytes >= 10'000'000 ? to : nullptr),
          name_(std::move(name)),
          bytes_(bytes),
          terminal_(isatty(fileno(to)) == 1) {}

    void add(uint64_t bytes) {
        done_ += bytes;
        const double now = seconds();
        if (!to_ || now < due_) return;
        due_ = now + (terminal_ ? 0.2 : 10);
        fprintf(to_, "%stokenizing %s: %.1f of %.1f MB%s", terminal_ ? "\r" : "", name_.c_str(),
                megabytes(done_), megabytes(bytes_), terminal_ ? "" : "\n");
        fflush(to_);
    }
    void finish(uint64_t tokens) const {
        if (!to_) return;
        fprintf(to_, "%stokenized %s: %.1f MB, %llu tokens, %.1f s\n", terminal_ ? "\r\033[K" : "",
                name_.c_str(), megabytes(bytes_), static_cast<unsigned long long>(tokens), seconds());
    }

  private:
    static double megabytes(uint64_t bytes) { return static_cast<double>(bytes) / 1e6; }
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

    FILE* to_;
    const std::string name_;
    const uint64_t bytes_;
    const bool terminal_;
    const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
    double due_ = 0;
    uint64_t done_ = 0;
};

// Calls use(part) with the text of a file, in parts of whole characters. Fails if it is not UTF-8, naming the
// file and the position.
template <class Use>
void read_utf8(const FileReader& file, Use&& use) {
    constexpr size_t kPart = 256 << 10;
    std::string buffer;
    for (uint64_t at = 0; at < file.size();) {
        const size_t held = buffer.size(), count = std::min<uint64_t>(kPart, file.size() - at);
        buffer.resize(held + count);
        file.read(at, count, buffer.data() + held);
        at += count;
        const size_t valid = valid_utf8(buffer), rest = buffer.size() - valid;
        const bool may_go_on = at < file.size() && rest == unfinished_utf8(buffer);
        if (rest > 0 && !may_go_on)
            fail("%s: is not UTF-8 text: no character has the byte 0x%02x at position %llu",
                 file.path().c_str(), static_cast<unsigned char>(buffer[valid]),
                 static_cast<unsigned long long>(at - rest));
        use(std::string_view(buffer).substr(0, valid));
        buffer.erase(0, valid);
    }
}

// Fails if the model has no tokenizer and its vocabulary is not that of bytes, 256.
inline void check_bytes(const Dataset& text, int vocabulary) {
    if (vocabulary == 256) return;
    fail(
        "%s is text, which is read as bytes (vocabulary 256) where the model's folder has no tokenizer.json, "
        "vocab.json with merges.txt, or tokenizer.model, but its vocabulary is %d",
        text.stream_name(0).c_str(), vocabulary);
}

// True if a text is so long that even its last tenth surely has more than `tokens` tokens.
inline bool is_long_text(const Dataset& text, uint64_t tokens) { return text.file_bytes() / 1000 >= tokens; }

// Replaces a text's bytes by the tokenizer's tokens, and reports progress on stderr if it takes a while.
// Fails as read_utf8() and Dataset::tokenize() do.
inline void tokenize_text(Dataset& text, const Tokenizer& tokenizer) {
    TokenizingLines lines(stderr, text.stream_name(0), text.file_bytes());
    TextEncoder encoder = tokenizer.encoder(false);
    const int start = tokenizer.document_start();
    std::vector<int32_t> tokens;
    text.tokenize(static_cast<uint32_t>(tokenizer.size()), [&](const FileReader& file, const auto& put) {
        tokens.clear();
        if (start >= 0) tokens.push_back(start);
        read_utf8(file, [&](std::string_view part) {
            naming(file.path(), [&] { encoder.feed(part, tokens); });
            put(tokens);
            tokens.clear();
            lines.add(part.size());
        });
        naming(file.path(), [&] { encoder.finish(tokens); });
        put(tokens);
    });
    lines.finish(text.token_count());
}
