// data_tokens.cpp - encodes text files and examples, and reports how far that is.
#include "llmc/data_tokens.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "llmc/data_files.h"
#include "llmc/data_other_formats.h"
#include "llmc/error.h"
#include "llmc/jinja_strings.h"
#include "llmc/tokenizer_encoder.h"
#include "llmc/utf8.h"

static constexpr size_t kPart = 256 << 10;  // a longer text is encoded in parts of this many bytes
static constexpr size_t kLongestQuestion = 16 << 20;

namespace {
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
        print(stderr, "tokenizing %s: %.1f%s MB%s", name_, megabytes(done_), of_all_, terminal_ ? "" : "\n");
    }
    void finish(uint64_t tokens) const {
        if (!reports_) return;
        if (terminal_) fputs("\r\033[K", stderr);
        print(stderr, "tokenized %s: %.1f MB, %lu tokens, %.1f s\n", name_, megabytes(done_), tokens,
              seconds());
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
}  // namespace

void read_utf8(const FileReader& file, const std::function<void(std::string_view part)>& use) {
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
            fail("%s is not UTF-8 text: no character has the byte 0x%02x at position %lu", file.path(),
                 static_cast<unsigned char>(buffer[valid]), at - rest);
        use(std::string_view(buffer).substr(0, valid));
        buffer.erase(0, valid);
    }
}

void check_bytes(const Dataset& text, int vocabulary) {
    if (vocabulary == 256) return;
    fail(
        "%s: the model's folder has no tokenizer (tokenizer.json, vocab.json with merges.txt, or "
        "tokenizer.model); without one, text is read as bytes, a vocabulary of 256, and the model has %d",
        text.stream_name(0), vocabulary);
}

void tokenize_text(Dataset& text, const Tokenizer& tokenizer) {
    TokenizingLines lines(text);
    const std::shared_ptr<TextEncoder> encoder = tokenizer.encoder(Spellings::PlainText);
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

ChatUsed tokenize_examples(Dataset& lines, const Tokenizer& tokenizer, const ExampleOptions& options,
                           int seq_len, int most_len, std::set<std::string>* unread) {
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

std::string tokenizer_folder(const Dataset& shards) {
    const auto parent = std::filesystem::path(shards.stream_name(0)).parent_path();
    return parent.empty() ? "." : parent.string();
}

// The vocabulary size for shards without a tokenizer: the family's default, or more if larger tokens occur.
static int vocabulary_of_shards(const Dataset& shards, const Family& family) {
    constexpr int kMost = 1 << 24;
    const int32_t largest = shards.largest_token();
    if (largest >= kMost)
        fail("%s: token %d is beyond the largest vocabulary, %d", shards.stream_name(0), largest, kMost);
    return std::max(family.tokens.vocabulary, largest + 1);
}

ModelConfig new_config_for(const NewModel& model, const Dataset* data, bool bytes, int seq_len,
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

void ExampleEncoder::encode(const JsonExample& example, const std::string& where, size_t most,
                            const Put& put) {
    tokens_.clear();
    text_bytes_ = length_ = 0;
    if (example.is_text) return encode_text(example.text(), where, put);
    if (!example.conversation.messages.empty()) {
        const std::vector<Message>& messages = example.conversation.messages;
        if (question_.empty() && example.bytes <= kLongestQuestion)
            question_ = {messages.begin(), std::ranges::find(messages, "assistant", &Message::role)};
        const Chat& used = chat(where);
        const auto kept = [&](const std::string& text) { return bytes_of_first(text, most); };
        append_chat(naming(where, [&] { return used.render(example.conversation, kept); }), where, most);
    } else {
        append({{example.prompt, Learnt::WithPrompts}, {example.completion, Learnt::Always}}, where, most);
        const size_t without_marks = tokens_.size();
        begin_document();
        end_text();
        if (length_ > 0) length_ += tokens_.size() - without_marks;
    }
    if (tokens_.size() < 2) fail("%s has fewer than two tokens", where);
    put(tokens_, true);
}

const Chat& ExampleEncoder::chat(const std::string& where) {
    if (options_.is_new_model)
        fail(
            "%s is a conversation, and a new model knows no chat format: give the folder of a trained "
            "model, --model DIR, or one with a chat template as --tokenizer",
            where);
    if (!chat_) chat_.emplace(options_.chat, options_.templates, options_.model, tokenizer_);
    return *chat_;
}

int32_t ExampleEncoder::kept(int32_t token, Learnt learnt) const {
    const bool has_loss =
        learnt == Learnt::Always || (learnt == Learnt::WithPrompts && options_.chat.loss_on == "all");
    return has_loss ? token : without_loss(token);
}

void ExampleEncoder::begin_document() {
    const int begin = tokenizer_.document_start();
    if (begin >= 0 && (tokens_.empty() || token_of(tokens_.front()) != begin))
        tokens_.insert(tokens_.begin(), kept(begin, Learnt::WithPrompts));
}

void ExampleEncoder::end_text() {
    const int end = tokenizer_.end_of_text();
    if (end >= 0 && (tokens_.empty() || token_of(tokens_.back()) != end)) tokens_.push_back(end);
}

void ExampleEncoder::encode_text(std::string_view text, const std::string& where, const Put& put) {
    size_t count = 0;
    int32_t latest = -1;
    const auto pass_on = [&](bool last) {
        if (count == 0 && (last || !tokens_.empty())) begin_document();
        if (!tokens_.empty()) latest = tokens_.back();
        const int end = tokenizer_.end_of_text();
        if (last && end >= 0 && token_of(latest) != end) tokens_.push_back(end);
        for (int32_t& token : tokens_) token = token_of(token);
        count += tokens_.size();
        if (last && count < 2) fail("%s has fewer than two tokens", where);
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

void ExampleEncoder::encode_first(std::string_view text, size_t most, std::vector<int32_t>& tokens) {
    if (text.size() <= kPart) return encoder_->encode(text, tokens);
    const std::shared_ptr<TextEncoder> encoder = tokenizer_.encoder();
    while (!text.empty() && tokens.size() < most) {
        encoder->feed(text.substr(0, kPart), tokens);
        text.remove_prefix(std::min(kPart, text.size()));
    }
    if (tokens.size() < most) encoder->finish(tokens);
}

size_t ExampleEncoder::bytes_of_first(const std::string& text, size_t most) {
    std::vector<int32_t> tokens;
    encode_first(text, most, tokens);
    if (tokens.size() <= most) return text.size();
    tokens.resize(most);
    const std::vector<size_t> ends = token_ends(text, tokens);
    return ends.size() < most || most == 0 ? text.size() : ends.back();
}

void ExampleEncoder::append(const std::vector<Piece>& pieces, const std::string& where, size_t most) {
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

void ExampleEncoder::append_chat(const std::vector<Piece>& pieces, const std::string& where, size_t most) {
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

std::vector<size_t> ExampleEncoder::token_ends(std::string_view text,
                                               const std::vector<int32_t>& tokens) const {
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
