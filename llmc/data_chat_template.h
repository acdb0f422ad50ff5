// data_chat_template.h - writes conversations as a model reads them, by running the chat template of the
// model's folder or one of a few formats of our own, and tells what of the text is learnt. The text is the
// one that transformers' apply_chat_template() gives; jinja.h runs the template.
#pragma once

#include <ctime>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "llmc/data_json_lines.h"
#include "llmc/jinja.h"
#include "llmc/tokenizer.h"

// The chat templates of a model.
struct ChatTemplates {
    std::map<std::string, std::string> sources;  // by name; "default" and "tool_use" are chosen by themselves
    std::string place;                           // the file that they come from
    std::vector<std::pair<std::string, std::string>> special_tokens;  // bos_token and so on, for templates

    // True if a template may write today's date.
    bool may_write_date() const;
    // The template of a conversation with or without tools, as in transformers; empty if there is none.
    std::string source(bool has_tools) const;
};

// The chat templates in a model's folder: chat_template.jinja and additional_chat_templates/NAME.jinja if
// there are any, else those of tokenizer_config.json, else that of chat_template.json.
ChatTemplates chat_templates_of(const std::string& folder, const Tokenizer& tokenizer);
// The chat templates and special tokens in the metadata of the GGUF file at `path`.
ChatTemplates chat_templates_of(const nlohmann::json& metadata, const std::string& path);

// When a piece of text has a loss: always (an answer), only with --loss-on all (a prompt), or never (a
// message with weight 0).
enum class Learnt { Always, WithPrompts, Never };

struct Piece {
    std::string text;
    Learnt learnt;
};

// What the user says about chats: --loss-on, --chat-format, --chat-date (empty: today).
struct ChatOptions {
    std::string loss_on = "completions", format = "auto", date;
};

// Today's date, or the one that is given as YYYY-MM-DD.
std::tm chat_date(const std::string& given);

// A model's chat template, or one of our formats, with the tokenizer for which it writes.
class Chat {
  public:
    // Fails, naming the model, if there is neither a template nor a known format, or if the tokenizer lacks
    // the format's special tokens.
    Chat(ChatOptions options, ChatTemplates templates, const std::string& model, const Tokenizer& tokenizer);

    // True if the template asks for an answer in another way than it writes one, so that where an answer
    // begins had to be guessed so far.
    bool guesses() const { return guesses_; }
    // Fields of conversations of which the template writes nothing, so that nothing of them is learnt.
    const std::vector<std::string>& unwritten() const { return unwritten_; }
    // Says what writes chats: "the chat template of FILE" or "the chat format NAME".
    const std::string& description() const { return description_; }
    // The template of one of our formats, which a saved model needs; empty if the folder's own is used.
    const std::string& own_source() const { return own_source_; }

    // The token that ends an assistant's answer; -1 if none does in a short conversation. `behind`: the
    // special token that the template writes behind what is learnt of an answer.
    int end_of_answer(bool behind = false) const;
    // The text of a conversation that asks for the assistant's next answer, ready to be tokenized.
    std::string prompt(const Conversation& conversation) const;
    // Writes a conversation as text, in pieces that say what has a loss. kept(text) is how many bytes of the
    // text matter; answers after them may be missing. Fails if the template refuses it, or if what to learn
    // cannot be told, or only with too many steps of the template.
    using Kept = std::function<size_t(const std::string& text)>;
    std::vector<Piece> render(const Conversation& conversation, const Kept& kept) const;

  private:
    struct Prepared;  // a conversation as the template sees it
    class MessageFinder;
    using Spans = std::vector<std::pair<jinja::Span, Learnt>>;

    const jinja::Template& template_for(const Conversation& conversation) const {
        return with_tools_ && conversation.variables.contains("tools") ? *with_tools_ : *chat_;
    }
    // Adds a field to unwritten() if the template writes the same text without it. Each field is tried once,
    // with the first conversation that has it. Long ones are passed over, because a copy takes memory.
    void note_unwritten(const Conversation& conversation, const std::string& text) const;
    // The messages whose answers are learnt: the assistant's, or with --loss-on last only the last of them.
    std::vector<size_t> answers(const Conversation& conversation) const;
    // What the template encloses in {% generation %}. If some answers are not learnt, each must be enclosed
    // once, so that it is known which these are.
    Spans generated(const Conversation& conversation, const jinja::Rendered& whole) const;
    // What is found by writing parts of the conversation. Each part takes as long as what comes before it, so
    // in a long conversation nothing is looked for where no token is kept.
    Spans found(const Conversation& conversation, const Prepared& chat, const std::string& whole,
                const Kept& kept) const;

    ChatOptions options_;
    ChatTemplates templates_;
    std::tm date_;
    const Tokenizer& tokenizer_;
    std::string description_, own_source_;
    std::optional<jinja::Template> chat_, with_tools_;
    mutable bool guesses_ = false;
    mutable std::set<std::string> tried_;  // the fields that were tried for unwritten()
    mutable std::vector<std::string> unwritten_;
};
