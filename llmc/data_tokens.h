// data_tokens.h - turns training data into tokens: text files, and examples in JSON. It also decides which
// tokens of an example have a loss, and which vocabulary a new model gets. dataset.h then reads the tokens.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/data_chat_template.h"
#include "llmc/data_json_lines.h"
#include "llmc/dataset.h"
#include "llmc/families.h"
#include "llmc/tokenizer.h"

// ---- text
//
// Turns text files of the data into tokens. Each file is a document with the tokenizer's document start
// before it. The spelling of a special token like <s> in a text is plain text. The tokens are the same that
// dev/data/tokenize_text.py writes into shards.

// Calls use(part) with the text of a file, in parts of whole characters. Fails if it is not UTF-8, naming the
// file and the position.
void read_utf8(const FileReader& file, const std::function<void(std::string_view part)>& use);

// Fails if the model has no tokenizer and its vocabulary is not that of bytes, 256.
void check_bytes(const Dataset& text, int vocabulary);

// True if a text is so long that even its last tenth surely has more than `tokens` tokens.
inline bool is_long_text(const Dataset& text, uint64_t tokens) { return text.file_bytes() / 1000 >= tokens; }

// Replaces a text's bytes by the tokenizer's tokens, and reports progress on stderr if it takes a while.
// Fails as read_utf8() and Dataset::tokenize() do.
void tokenize_text(Dataset& text, const Tokenizer& tokenizer);

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

    using Put = std::function<void(std::span<const int32_t> tokens, bool last)>;
    // Calls put(tokens, last) with an example's tokens; those of a long text come in several parts. Tokens
    // without a loss are marked by without_loss(). A text gets the tokenizer's document start before it and
    // its end-of-text token after it; a conversation is written in its chat format. Of a conversation, and of
    // a prompt with its completion, tokens after the first `most` may be missing. A special token's spelling,
    // like <s>, is that token wherever it stands in a text, as in transformers. Fails naming `where`.
    void encode(const JsonExample& example, const std::string& where, size_t most, const Put& put);

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
    const Chat& chat(const std::string& where);
    // A token as it is stored: marked if it has no loss.
    int32_t kept(int32_t token, Learnt learnt) const;
    void begin_document();
    void end_text();
    // Encodes a text and puts its tokens, all of which have a loss.
    void encode_text(std::string_view text, const std::string& where, const Put& put);
    // Appends the tokens of a text; of a long one at least the first `most`.
    void encode_first(std::string_view text, size_t most, std::vector<int32_t>& tokens);
    // How many bytes of a chat's text its first `most` tokens spell.
    size_t bytes_of_first(const std::string& text, size_t most);

    // Appends the tokens of the pieces' joined text, or at least the first `most`. A token that crosses the
    // end of a piece, or that differs from the tokens of the text up to that end, belongs to the next piece.
    void append(const std::vector<Piece>& pieces, const std::string& where, size_t most);

    // Appends the tokens of a chat, which are those of the whole text, or at least the first `most`. A token
    // that crosses the border of an answer is learnt with it, as in transformers' assistant masks.
    void append_chat(const std::vector<Piece>& pieces, const std::string& where, size_t most);

    // Where each token ends in the text, found by spelling out the tokens. A tokenizer may put a space before
    // the text, or leave out white space beside special tokens. If the tokens spell another text, because the
    // tokenizer changes characters, the result ends before that token.
    std::vector<size_t> token_ends(std::string_view text, const std::vector<int32_t>& tokens) const;

    const Tokenizer& tokenizer_;
    const ExampleOptions options_;
    std::shared_ptr<TextEncoder> encoder_;
    std::optional<Chat> chat_;  // made at the first conversation
    std::vector<Message> question_;
    std::vector<int32_t> tokens_;
    size_t text_bytes_ = 0, length_ = 0;
};

// What wrote the conversations of the data.
struct ChatUsed {
    std::string description;  // empty if there were no conversations
    std::string own_source;   // Chat::own_source()
    int end_of_answer = -1;
    bool guesses = false;                // Chat::guesses()
    std::vector<std::string> unwritten;  // Chat::unwritten()
    std::vector<Message> question;       // the first one up to its first answer, for samples
};

// Turns the examples in the files into tokens, at most seq_len + 1 for each (Dataset::tokenize_examples), and
// adds to `unread` the fields that were not read (add_unread()). Reports progress on stderr if it takes a
// while. Fails naming the line if it is not an example. Returns what wrote conversations, if there were any.
ChatUsed tokenize_examples(Dataset& lines, const Tokenizer& tokenizer, const ExampleOptions& options,
                           int seq_len, int most_len = kMostPositions,
                           std::set<std::string>* unread = nullptr);

// ---- the vocabulary of a new model
//
// It is chosen to fit the data that the model will be trained on.

// The folder of the shards, where their tokenizer is expected.
std::string tokenizer_folder(const Dataset& shards);

// The configuration of a new model, with the vocabulary of a given tokenizer. Without one, text is bytes, and
// shards have that of their folder's tokenizer; without data it is the family's default, or bytes if `bytes`.
ModelConfig new_config_for(const NewModel& model, const Dataset* data, bool bytes, int seq_len,
                           std::optional<Tokenizer> tokenizer);
