// data_tokens.h - turns training data into tokens: text files, and examples in JSON. It also decides which
// tokens of an example have a loss, and which vocabulary a new model gets. dataset.h then reads the tokens.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/error.h"
#include "llmc/data_chat_template.h"
#include "llmc/data_files.h"
#include "llmc/data_json_lines.h"
#include "llmc/dataset.h"
#include "llmc/families.h"
#include "llmc/jinja_strings.h"
#include "llmc/tokenizer.h"
#include "llmc/utf8.h"

// ---- text
//
// Turns text files of the data into tokens. Each file is a document with the tokenizer's document start
// before it. The spelling of a special token like <s> in a text is plain text. The tokens are the same that
// dev/data/tokenize_text.py writes into shards.

// Reports the progress of tokenizing and at the end the result: on a terminal in one line that is
// overwritten, otherwise in a line every ten seconds. Files of less than 10 MB are reported only after ten
// seconds.
class TokenizingLines {
  public:
    explicit TokenizingLines(const Dataset& data)
        : name_(data.stream_name(0)),
          of_all_(data.has_compressed_examples() ? "" : format(" of %.1f", megabytes(data.file_bytes()))),
          due_(data.file_bytes() >= 10'000'000 ? 0 : kPatience) {}

    void add(uint64_t bytes) {
        done_ += bytes;
        const double now = seconds();
        if (now < due_) return;
        due_ = now + (terminal_ ? 0.2 : kPatience);
        reports_ = true;
        if (terminal_) fputs("\r", stderr);
        print(stderr, "tokenizing %s: %.1f%s MB%s", name_.c_str(), megabytes(done_), of_all_.c_str(),
              terminal_ ? "" : "\n");
    }
    void finish(uint64_t tokens) const {
        if (!reports_) return;
        if (terminal_) fputs("\r\033[K", stderr);
        print(stderr, "tokenized %s: %.1f MB, %llu tokens, %.1f s\n", name_.c_str(), megabytes(done_),
              static_cast<unsigned long long>(tokens), seconds());
    }

  private:
    static constexpr double kPatience = 10;  // seconds

    static double megabytes(uint64_t bytes) { return static_cast<double>(bytes) / 1e6; }
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

    const std::string name_, of_all_;
    const bool terminal_ = isatty(STDERR_FILENO) == 1;
    const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
    double due_;
    bool reports_ = false;
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
            fail("%s is not UTF-8 text: no character has the byte 0x%02x at position %llu",
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
        "%s: the model's folder has no tokenizer (tokenizer.json, vocab.json with merges.txt, or "
        "tokenizer.model); without one, text is read as bytes, a vocabulary of 256, and the model has %d",
        text.stream_name(0).c_str(), vocabulary);
}

// True if a text is so long that even its last tenth surely has more than `tokens` tokens.
inline bool is_long_text(const Dataset& text, uint64_t tokens) { return text.file_bytes() / 1000 >= tokens; }

// Replaces a text's bytes by the tokenizer's tokens, and reports progress on stderr if it takes a while.
// Fails as read_utf8() and Dataset::tokenize() do.
inline void tokenize_text(Dataset& text, const Tokenizer& tokenizer) {
    TokenizingLines lines(text);
    const std::unique_ptr<TextEncoder> encoder = tokenizer.encoder(Spellings::PlainText);
    const int start = tokenizer.document_start();
    std::vector<int32_t> tokens;
    text.tokenize(static_cast<uint32_t>(tokenizer.size()), [&](const FileReader& file, const auto& put) {
        tokens.clear();
        if (start >= 0) tokens.push_back(start);
        read_utf8(file, [&](std::string_view part) {
            naming(file.path(), [&] { encoder->feed(part, tokens); });
            put(tokens);
            tokens.clear();
            lines.add(part.size());
        });
        naming(file.path(), [&] { encoder->finish(tokens); });
        put(tokens);
    });
    lines.finish(text.token_count());
}

// ---- examples
//
// Turns examples in JSON (prompts with completions, conversations, texts) into tokens, and decides which
// tokens have a loss.

// How to read examples: --loss-on and the options of chats, and the chat templates and name of the model. A
// new model, which has no tokenizer with the special tokens of a chat format, cannot read conversations.
struct ExampleOptions {
    ChatOptions chat;
    ChatTemplates templates;
    std::string model;
    bool is_new_model = false;
};

class ExampleEncoder {
  public:
    // The tokenizer must outlive the encoder.
    ExampleEncoder(const Tokenizer& tokenizer, ExampleOptions options)
        : tokenizer_(tokenizer), options_(std::move(options)), encoder_(tokenizer.encoder()) {}

    // Calls put(tokens, last) with an example's tokens; those of a long text come in several parts. Tokens
    // without a loss are marked by without_loss(). A text gets the tokenizer's document start before it and
    // its end-of-text token after it; a conversation is written in its chat format. Of a conversation, and of
    // a prompt with its completion, tokens after the first `most` may be missing. A special token's spelling,
    // like <s>, is that token wherever it stands in a text, as in transformers. Fails naming `where`.
    template <class Put>
    void encode(const JsonExample& example, const std::string& where, size_t most, Put&& put) {
        tokens_.clear();
        text_bytes_ = length_ = 0;
        if (example.is_text) return encode_text(example.text(), where, put);
        if (!example.conversation.messages.empty()) {
            if (question_.empty() && example.bytes <= kLongestQuestion)
                question_ = question_of(example.conversation.messages);
            const Chat& used = chat(where);
            const auto kept = [&](const std::string& text) { return bytes_of_first(text, most); };
            append_chat(naming(where, [&] { return used.render(example.conversation, kept); }), where, most);
        } else {
            append({{example.prompt, Learnt::WithPrompts}, {example.completion, Learnt::Always}}, where,
                   most);
            const size_t without_marks = tokens_.size();
            begin_document();
            end_text();
            if (length_ > 0) length_ += tokens_.size() - without_marks;
        }
        if (tokens_.size() < 2) fail("%s has fewer than two tokens", where.c_str());
        put(tokens_, true);
    }

    // The chat template, if there were conversations so far; else null.
    const Chat* chat() const { return chat_ ? &*chat_ : nullptr; }
    // The first conversation up to its first answer, for samples; empty if there was none. One that takes
    // much memory is passed over.
    const std::vector<Message>& question() const { return question_; }
    // How many tokens the latest example has, including those after the first `most`. 0: it is a text, or so
    // long that its end was not counted.
    size_t length() const { return length_; }
    // The size of the text that the latest example was written as, if it was a conversation.
    size_t text_bytes() const { return text_bytes_; }

  private:
    // Reads the chat template at the first conversation.
    const Chat& chat(const std::string& where) {
        if (options_.is_new_model)
            fail(
                "%s is a conversation, and a new model knows no chat format: give the folder of a trained "
                "model, --model DIR, or one with a chat template as --tokenizer",
                where.c_str());
        if (!chat_) chat_.emplace(options_.chat, options_.templates, options_.model, tokenizer_);
        return *chat_;
    }

    // A token as it is stored: marked if it has no loss.
    int32_t kept(int32_t token, Learnt learnt) const {
        const bool has_loss =
            learnt == Learnt::Always || (learnt == Learnt::WithPrompts && options_.chat.loss_on == "all");
        return has_loss ? token : without_loss(token);
    }

    static std::vector<Message> question_of(const std::vector<Message>& messages) {
        const auto answer = std::ranges::find(messages, "assistant", &Message::role);
        return {messages.begin(), answer};
    }

    static constexpr size_t kPart = 256 << 10;  // a longer text is encoded in parts of this many bytes
    static constexpr size_t kLongestQuestion = 16 << 20;

    void begin_document() {
        const int begin = tokenizer_.document_start();
        if (begin >= 0 && (tokens_.empty() || token_of(tokens_.front()) != begin))
            tokens_.insert(tokens_.begin(), kept(begin, Learnt::WithPrompts));
    }
    void end_text() {
        const int end = tokenizer_.end_of_text();
        if (end >= 0 && (tokens_.empty() || token_of(tokens_.back()) != end)) tokens_.push_back(end);
    }

    // Encodes a text and puts its tokens, all of which have a loss.
    template <class Put>
    void encode_text(std::string_view text, const std::string& where, Put&& put) {
        size_t count = 0;
        int32_t latest = -1;
        const auto pass_on = [&](bool last) {
            if (count == 0 && (last || !tokens_.empty())) begin_document();
            if (!tokens_.empty()) latest = tokens_.back();
            const int end = tokenizer_.end_of_text();
            if (last && end >= 0 && token_of(latest) != end) tokens_.push_back(end);
            for (int32_t& token : tokens_) token = token_of(token);
            count += tokens_.size();
            if (last && count < 2) fail("%s has fewer than two tokens", where.c_str());
            put(tokens_, last);
            tokens_.clear();
        };
        if (text.size() <= kPart) {
            naming(where, [&] { encoder_->encode(text, tokens_); });
            return pass_on(true);
        }
        for (; !text.empty(); text.remove_prefix(std::min(kPart, text.size()))) {
            naming(where, [&] { encoder_->feed(text.substr(0, kPart), tokens_); });
            pass_on(false);
        }
        naming(where, [&] { encoder_->finish(tokens_); });
        pass_on(true);
    }

    // Appends the tokens of a text; of a long one at least the first `most`.
    void encode_first(std::string_view text, size_t most, std::vector<int32_t>& tokens) {
        if (text.size() <= kPart) return encoder_->encode(text, tokens);
        const std::unique_ptr<TextEncoder> encoder = tokenizer_.encoder();
        while (!text.empty() && tokens.size() < most) {
            encoder->feed(text.substr(0, kPart), tokens);
            text.remove_prefix(std::min(kPart, text.size()));
        }
        if (tokens.size() < most) encoder->finish(tokens);
    }

    // How many bytes of a chat's text its first `most` tokens spell.
    size_t bytes_of_first(const std::string& text, size_t most) {
        std::vector<int32_t> tokens;
        encode_first(text, most, tokens);
        if (tokens.size() <= most) return text.size();
        tokens.resize(most);
        const std::vector<size_t> ends = token_ends(text, tokens);
        return ends.size() < most || most == 0 ? text.size() : ends.back();
    }

    // Appends the tokens of the pieces' joined text, or at least the first `most`. A token that crosses the
    // end of a piece, or that differs from the tokens of the text up to that end, belongs to the next piece.
    void append(const std::vector<Piece>& pieces, const std::string& where, size_t most) {
        std::string text;
        for (const Piece& piece : pieces) text += piece.text;
        std::vector<int32_t> all, front;
        naming(where, [&] { encode_first(text, most, all); });
        if (text.size() <= kPart) length_ = all.size();
        std::string before;
        size_t done = 0;
        for (const Piece& piece : pieces) {
            if (done >= most) break;
            before += piece.text;
            size_t end = all.size();
            if (before.size() < text.size()) {
                front.clear();
                naming(where, [&] { encode_first(before, most, front); });
                end = static_cast<size_t>(
                    std::mismatch(front.begin(), front.end(), all.begin(), all.end()).second - all.begin());
            }
            for (; done < end; done++) tokens_.push_back(kept(all[done], piece.learnt));
        }
    }

    // Appends the tokens of a chat, which are those of the whole text, or at least the first `most`. A token
    // that crosses the border of an answer is learnt with it, as in transformers' assistant masks.
    void append_chat(const std::vector<Piece>& pieces, const std::string& where, size_t most) {
        std::string text;
        for (const Piece& piece : pieces) text += piece.text;
        text_bytes_ = text.size();
        std::vector<int32_t> all;
        naming(where, [&] { encode_first(text, most, all); });
        if (text.size() <= kPart) length_ = all.size();
        const std::vector<size_t> ends = token_ends(text, all);
        if (ends.size() < all.size()) return append(pieces, where, most);
        size_t piece = 0, piece_end = pieces.empty() ? 0 : pieces[0].text.size(), begin = 0;
        for (size_t i = 0; i < std::min(all.size(), most); i++) {
            while (piece + 1 < pieces.size() && piece_end <= begin) piece_end += pieces[++piece].text.size();
            Learnt learnt = pieces[piece].learnt;
            for (size_t k = piece + 1, at = piece_end; k < pieces.size() && at < ends[i]; k++) {
                learnt = pieces[k].learnt == Learnt::Always ? Learnt::Always : learnt;
                at += pieces[k].text.size();
            }
            tokens_.push_back(kept(all[i], learnt));
            begin = ends[i];
        }
    }

    // Where each token ends in the text, found by spelling out the tokens. A tokenizer may put a space before
    // the text, or leave out white space beside special tokens. If the tokens spell another text, because the
    // tokenizer changes characters, the result ends before that token.
    std::vector<size_t> token_ends(std::string_view text, const std::vector<int32_t>& tokens) const {
        std::vector<size_t> ends;
        size_t at = 0;
        for (const int32_t token : tokens) {
            const std::string spelling = tokenizer_.decode(token);
            std::string_view rest = text.substr(at);
            if (rest.starts_with(spelling)) {
                at += spelling.size();
            } else if (spelling.starts_with(' ') && rest.starts_with(std::string_view(spelling).substr(1))) {
                at += spelling.size() - 1;
            } else {
                rest = jinja::strip(rest, {}, true, false);
                if (!rest.starts_with(spelling)) break;
                at = text.size() - rest.size() + spelling.size();
            }
            ends.push_back(at);
        }
        return ends;
    }

    const Tokenizer& tokenizer_;
    const ExampleOptions options_;
    std::unique_ptr<TextEncoder> encoder_;
    std::optional<Chat> chat_;  // made at the first conversation
    std::vector<Message> question_;
    std::vector<int32_t> tokens_;
    size_t text_bytes_ = 0, length_ = 0;
};

// Turns the examples in the files into tokens, at most seq_len + 1 for each (Dataset::tokenize_examples), and
// adds to `unread` the fields that were not read (add_unread()). Reports progress on stderr if it takes a
// while. Fails naming the line if it is not an example. Returns what wrote conversations, if there were any.
struct ChatUsed {
    std::string description;  // empty if there were no conversations
    std::string own_source;   // Chat::own_source()
    int end_of_answer = -1;
    bool guesses = false;                // Chat::guesses()
    std::vector<std::string> unwritten;  // Chat::unwritten()
    std::vector<Message> question;       // the first one up to its first answer, for samples
};
inline ChatUsed tokenize_examples(Dataset& lines, const Tokenizer& tokenizer, const ExampleOptions& options,
                                  int seq_len, int most_len = kMostPositions,
                                  std::set<std::string>* unread = nullptr) {
    TokenizingLines progress(lines);
    ExampleEncoder encoder(tokenizer, options);
    size_t most_bytes = 0;
    lines.tokenize_examples(seq_len, most_len, [&](const FileReader& file, const auto& put) {
        const bool is_list = data_kind(file) == DataKind::JsonList;
        const size_t copies = is_list ? 2 : 1;  // an element of a list is copied when its buffer grows
        const auto use = [&](std::span<char> line, size_t bytes, const std::string& where) {
            const JsonExample example = read_example(line, where, unread);
            // Texts are encoded whole. Of others one token more than is kept is encoded, which shows that the
            // example is cut.
            encoder.encode(example, where, static_cast<size_t>(seq_len) + 2,
                           [&](std::span<const int32_t> tokens, bool last) {
                               put(tokens, example.is_text, last, encoder.length());
                           });
            const size_t written = encoder.text_bytes();
            const size_t more = written - std::min(written, line.size());  // that the template added
            most_bytes = std::max(most_bytes, copies * line.size() + example.bytes + kCopiesOfLine * more);
            progress.add(bytes);
        };
        try {
            is_list ? for_each_element(file, use) : for_each_line(file, use);
        } catch (const UserError& error) {
            if (is_json_name(file.path())) throw;
            fail("%s (the file begins as JSON; to train on it as text, let its name end in .txt)",
                 error.what());
        }
    });
    lines.reading_took(most_bytes);
    progress.finish(lines.token_count());
    const Chat* const chat = encoder.chat();
    if (!chat) return {};
    return {chat->description(), chat->own_source(), chat->end_of_answer(),
            chat->guesses(),     chat->unwritten(),  encoder.question()};
}

// ---- the vocabulary of a new model
//
// It is chosen to fit the data that the model will be trained on.

// The folder of the shards, where their tokenizer is expected.
inline std::string tokenizer_folder(const Dataset& shards) {
    const auto parent = std::filesystem::path(shards.stream_name(0)).parent_path();
    return parent.empty() ? "." : parent.string();
}

// The vocabulary size for shards without a tokenizer: the family's default, or more if larger tokens occur.
inline int vocabulary_of_shards(const Dataset& shards, const Family& family) {
    constexpr int kMost = 1 << 24;
    const int32_t largest = shards.largest_token();
    if (largest >= kMost)
        fail("%s: token %d is beyond the largest vocabulary, %d", shards.stream_name(0).c_str(), largest,
             kMost);
    return std::max(family.tokens.vocabulary, largest + 1);
}

// The configuration of a new model, with the vocabulary of a given tokenizer. Without one, text is bytes, and
// shards have that of their folder's tokenizer; without data it is the family's default, or bytes if `bytes`.
inline ModelConfig new_config_for(const NewModel& model, const Dataset* data, bool bytes, int seq_len,
                                  std::optional<Tokenizer> tokenizer) {
    if (data) bytes = data->is_text();
    if (bytes && !tokenizer) return new_config(model, 256, seq_len);
    const int positions = std::max(1024, seq_len);
    if (!data && !tokenizer) return new_config(model, model.family->tokens.vocabulary, positions);
    if (!tokenizer) tokenizer = Tokenizer::open(tokenizer_folder(*data));
    if (!tokenizer) return new_config(model, vocabulary_of_shards(*data, *model.family), positions);
    ModelConfig c = new_config(model, tokenizer->size(), positions);
    if (const int token = tokenizer->begin_of_text(); token >= 0) c.begin_of_text = {token};
    if (const int token = tokenizer->end_of_text(); token >= 0) c.stops = c.end_of_text = {token};
    return c;
}
