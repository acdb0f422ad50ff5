// examples.h - JSON lines on their way to tokens, each of which is to be learnt or not.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/chat_format.h"
#include "llmc/dataset.h"
#include "llmc/json_lines.h"
#include "llmc/text_tokens.h"
#include "llmc/tokenizer.h"

// How --loss-on and --chat-format have examples read, for a model, by its chat template.
struct ExampleOptions {
    bool loss_on_all;
    std::string chat_format, chat_template, model;
};

class ExampleEncoder {
  public:
    // The tokenizer must live as long.
    ExampleEncoder(const Tokenizer& tokenizer, ExampleOptions options)
        : tokenizer_(tokenizer), options_(std::move(options)), encoder_(tokenizer.encoder()) {}

    // An example's tokens, of which those that are not to be learnt have kNoLoss added. A text begins with
    // the token that begins a document and ends with the one that ends a text; a conversation is as its
    // format has it. Marks like <s> are such where they stand in a text, as in transformers. Fails naming
    // `where`.
    std::vector<int32_t> encode(const JsonExample& example, const std::string& where) {
        tokens_.clear();
        if (!example.messages.empty()) {
            if (!chat_)
                chat_.emplace(options_.chat_format, options_.chat_template, options_.model, tokenizer_);
            for (const std::vector<Piece>& part : chat_->render(example.messages, where)) append(part);
        } else {
            const int begin = tokenizer_.document_start(), end = tokenizer_.end_of_text();
            append({{example.prompt, Learnt::WithPrompts}, {example.completion, Learnt::Always}});
            if (begin >= 0 && (tokens_.empty() || token_of(tokens_.front()) != begin))
                tokens_.insert(tokens_.begin(), kept(begin, Learnt::WithPrompts));
            if (end >= 0 && (tokens_.empty() || token_of(tokens_.back()) != end)) tokens_.push_back(end);
        }
        if (tokens_.size() < 2) fail("%s: has fewer than two tokens", where.c_str());
        if (example.is_text)
            for (int32_t& token : tokens_) token = token_of(token);
        return tokens_;
    }

    // The token that ends an answer in the conversations so far; -1 if there were none.
    int end_of_answer() const { return chat_ ? chat_->end_of_answer() : -1; }

  private:
    // A token as it is kept, by whether it is to be learnt.
    int32_t kept(int32_t token, Learnt learnt) const {
        const bool has_loss =
            learnt == Learnt::Always || (learnt == Learnt::WithPrompts && options_.loss_on_all);
        return has_loss ? token : without_loss(token);
    }

    // Appends the tokens of the pieces' joined text. A token that reaches over the end of a piece, or that
    // the piece alone would not have had, is of the next one.
    void append(const std::vector<Piece>& pieces) {
        std::string text;
        for (const Piece& piece : pieces) text += piece.text;
        std::vector<int32_t> all, front;
        encoder_.encode(text, all);
        std::string before;
        size_t done = 0;
        for (const Piece& piece : pieces) {
            before += piece.text;
            size_t end = all.size();
            if (before.size() < text.size()) {
                front.clear();
                encoder_.encode(before, front);
                end = static_cast<size_t>(
                    std::mismatch(front.begin(), front.end(), all.begin(), all.end()).second - all.begin());
            }
            for (; done < end; done++) tokens_.push_back(kept(all[done], piece.learnt));
        }
    }

    const Tokenizer& tokenizer_;
    const ExampleOptions options_;
    TextEncoder encoder_;
    std::optional<Chat> chat_;  // from the first conversation on
    std::vector<int32_t> tokens_;
};

// Makes tokens of the examples in files, no more than seq_len + 1 in one (Dataset::tokenize_examples), and
// says on stderr how far it is where that takes a while. Fails naming the line where one is no example.
inline int tokenize_examples(Dataset& lines, const Tokenizer& tokenizer, const ExampleOptions& options,
                             int seq_len) {
    TokenizingLines progress(stderr, lines.stream_name(0), lines.file_bytes());
    ExampleEncoder encoder(tokenizer, options);
    lines.tokenize_examples(seq_len, [&](const FileReader& file, const auto& put) {
        const auto use = [&](std::string_view line, size_t bytes, const std::string& where) {
            const JsonExample example = read_example(line, where);
            put(encoder.encode(example, where), example.is_text);
            progress.add(bytes);
        };
        try {
            data_kind(file) == DataKind::JsonList ? for_each_element(file, use) : for_each_line(file, use);
        } catch (const UserError& error) {
            if (is_json_name(file.path())) throw;
            fail("%s (the file begins as JSON; to train on it as text, let its name end in .txt)",
                 error.what());
        }
    });
    progress.finish(lines.token_count());
    return encoder.end_of_answer();
}
