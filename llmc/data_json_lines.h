// data_json_lines.h - reads training examples, one JSON object per line or in a JSON list. An example is a
// text, a prompt with its completion, or the messages of a conversation.
#pragma once

#include <functional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/file.h"

using OrderedJson = nlohmann::ordered_json;  // whose objects keep the order of their keys

struct Message {
    OrderedJson object;  // as the line has it; the chat template reads its fields
    bool counts = true;  // false: none of it has a loss, because its "weight" is 0 or its "train" is false

    const std::string& role() const { return object["role"].get_ref<const std::string&>(); }
    // The content if it is a text, or the texts of a list; else "".
    std::string text() const;
};
// A message that has only a role and a content.
inline Message said(const std::string& role, const std::string& content) {
    return {OrderedJson{{"role", role}, {"content", content}}};
}

// The messages of a conversation, and what else the chat template reads: tools, documents and
// chat_template_kwargs.
struct Conversation {
    std::vector<Message> messages;
    OrderedJson variables = OrderedJson::object();
    size_t bytes = 0;  // of the line
};

// The example of a line: messages if there are any, else a completion, which has a loss, after a prompt,
// which may be empty.
struct JsonExample {
    std::string prompt, completion;
    Conversation conversation;
    bool is_text = false;           // {"text": ...}: `completion` is the text,
    std::string_view text_in_line;  // or this, if it was decoded inside the line's buffer
    size_t bytes = 0;               // estimated memory that reading it takes beside the line

    std::string_view text() const { return text_in_line.data() ? text_in_line : completion; }
};

// How many copies of a line's text, or of what a chat template writes of it, can be in memory beside the
// line: as messages, as the chat template's values and what it writes, and as pieces of that.
constexpr size_t kCopiesOfLine = 10;

// Reads the example of a line: from "messages" if there are any or another format becomes such
// (data_other_formats.h), else from "prompt" and "completion", else from "text". `where` names the line in
// messages. Fails if the line is no such example or has nothing to learn. Overwrites the line; a long text
// stays in its buffer. Adds the fields that were not read to `unread`.
JsonExample read_example(std::span<char> line, const std::string& where,
                         std::set<std::string>* unread = nullptr);

// A line of --prompts.
struct JsonPrompt {
    OrderedJson line;
    std::string text;           // of a prompt that is continued as it is
    bool has_messages = false;  // the line has "messages"
    Conversation conversation;  // the messages of a prompt in a chat, also of one that is only a text
    size_t bytes = 0;           // estimated memory that the line takes
};

// Reads a line of --prompts: an object with a "prompt", or with "messages" of a conversation. `is_chat`: the
// prompt is written in a chat format; else it is a text. Adds the fields that were not read to `unread`.
JsonPrompt read_prompt(std::span<char> line, const std::string& where, bool is_chat,
                       std::set<std::string>& unread);

using UseLine = std::function<void(std::span<char> line, size_t bytes, const std::string& where)>;
// Calls use(line, bytes, where) for each line of a file that is not blank. `line` may be overwritten; `bytes`
// is the line's size in the file, with the blank lines before it; `where` names it in messages. Fails naming
// a line of more than kLargestText bytes, or one that there is too little memory for.
void for_each_line(const FileReader& file, const UseLine& use);

// Does the same for the elements of a file that is one JSON list. Fails naming the line if it is not one.
void for_each_element(const FileReader& file, const UseLine& use);
