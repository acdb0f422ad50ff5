// data_json_lines.h - reads training examples, one JSON object per line or in a JSON list. An example is a
// text, a prompt with its completion, or the messages of a conversation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/data_json_strings.h"
#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/free_memory.h"
#include "llmc/utf8.h"

struct Message {
    std::string role, content;
    bool counts = true;  // false: none of it has a loss, because its "weight" is 0 or its "train" is false
};

// The example of a line: messages if there are any, else a completion, which has a loss, after a prompt,
// which may be empty.
struct JsonExample {
    std::string prompt, completion;
    std::vector<Message> messages;
    bool is_text = false;           // {"text": ...}: `completion` is the text,
    std::string_view text_in_line;  // or this, if it was decoded inside the line's buffer
    size_t bytes = 0;               // estimated memory that reading it takes beside the line

    std::string_view text() const { return text_in_line.data() ? text_in_line : completion; }
};

// Fails if reading a line takes more memory than is free. Short lines are not checked.
inline void require_memory_for(size_t bytes, const std::string& where) {
    if (bytes < 4 << 20) return;
    const FreeMemory free = host_memory_free();
    if (bytes > free.bytes)
        fail("%s: reading it takes %.1f MiB, and %.1f are free (%s); divide it into shorter lines",
             where.c_str(), static_cast<double>(bytes) / 1048576, static_cast<double>(free.bytes) / 1048576,
             free.limit.c_str());
}

// A string field that an object must have. Fails naming the line and the field.
inline std::string text_field(const nlohmann::json& object, const char* name, const std::string& where) {
    const auto field = object.find(name);
    if (field == object.end()) fail("%s: has no \"%s\"", where.c_str(), name);
    if (!field->is_string()) fail("%s: \"%s\" is not a text", where.c_str(), name);
    return field->get<std::string>();
}

// Fails if one of these fields is not empty: a chat template would write it into the conversation, which is
// not supported.
inline void refuse_fields(const nlohmann::json& object, std::initializer_list<const char*> names,
                          const std::string& where) {
    for (const char* name : names) {
        const auto field = object.find(name);
        if (field == object.end() || field->empty() || *field == "") continue;  // null is empty too
        fail("%s: \"%s\" is not supported: leave the field out, or the example", where.c_str(), name);
    }
}

// False if the message's "weight" is 0 or its "train" is false: then none of it has a loss.
inline bool message_counts(const nlohmann::json& message, const std::string& where) {
    const nlohmann::json weight = message.value("weight", nlohmann::json());
    const nlohmann::json train = message.value("train", nlohmann::json());
    if (!weight.is_null() && !(weight.is_number() && (weight == 0 || weight == 1)))
        fail("%s: \"weight\" is %s, where 0 and 1 are supported", where.c_str(),
             weight.dump(-1, ' ', true).c_str());
    if (!train.is_null() && !train.is_boolean())
        fail("%s: \"train\" is %s, where true and false are supported", where.c_str(),
             train.dump(-1, ' ', true).c_str());
    return weight != 0 && train != false;
}

// A data format of other tools: the fields of its examples that identify it, and what to write instead.
struct OtherFormat {
    std::vector<const char*> fields;
    const char* said;
};
inline const OtherFormat kOtherFormats[] = {
    {{"chosen", "rejected"},
     R"(is preference data ("chosen" and "rejected"), which is not trained on; to train on the chosen )"
     R"(answers alone, rename "chosen" to "messages" if it is a list, and to "completion" after a "prompt")"},
    {{"conversations"},
     R"(looks like ShareGPT's format: rename "conversations" to "messages", "from" to "role" and "value" )"
     R"(to "content", and the roles human to user and gpt to assistant)"},
    {{"instruction", "output"},
     R"(looks like Alpaca's format: write {"messages": [{"role": "user", "content": INSTRUCTION and INPUT}, )"
     R"({"role": "assistant", "content": OUTPUT}]})"},
};

// Fails with what to write instead if an object has the fields of another format.
inline void refuse_other_formats(const nlohmann::json& object, const std::string& where) {
    for (const OtherFormat& other : kOtherFormats)
        if (std::ranges::all_of(other.fields, [&](const char* field) { return object.contains(field); }))
            fail("%s: %s", where.c_str(), other.said);
}

// Reads the messages of a conversation. `answered`: at least one must be the assistant's.
inline std::vector<Message> read_messages(const nlohmann::json& list, const std::string& where,
                                          bool answered = true) {
    if (!list.is_array() || list.empty()) fail("%s: \"messages\" is not a list of messages", where.c_str());
    std::vector<Message> messages;
    bool answers = false;
    for (const nlohmann::json& item : list) {
        const std::string place = format("%s: message %zu", where.c_str(), messages.size() + 1);
        if (!item.is_object()) fail("%s is not a JSON object", place.c_str());
        refuse_fields(
            item,
            {"tool_calls", "tool_call_id", "function_call", "reasoning_content", "reasoning", "thinking"},
            place);
        if (item.contains("from") && !item.contains("role"))
            fail(
                R"(%s has "from", as in ShareGPT's format: rename "from" to "role" and "value" to "content", )"
                R"(and the roles human to user and gpt to assistant)",
                place.c_str());
        const Message message{text_field(item, "role", place), text_field(item, "content", place),
                              message_counts(item, place)};
        const bool assistant = message.role == "assistant";
        if (!assistant && message.role != "user" && message.role != "system")
            fail("%s: \"role\" is \"%s\", where \"system\", \"user\" and \"assistant\" are known",
                 place.c_str(), printable(message.role).c_str());
        if (message.role == "system" && !messages.empty())
            fail("%s: \"role\" is \"system\", which only the first may be", place.c_str());
        if (assistant && message.content.empty()) fail("%s: the assistant says nothing", place.c_str());
        answers |= assistant;
        messages.push_back(message);
    }
    if (answered && !answers) fail("%s: none of the messages is the assistant's", where.c_str());
    return messages;
}

// How many copies of a line's text can be in memory beside the line, for a conversation or a prompt with its
// completion: as JSON, as messages, as the pieces of the chat format, as a whole, and as the part before a
// piece.
constexpr size_t kCopiesOfLine = 6;

// Reads the example of a line: from "messages" if there are any, else from "prompt" and "completion", else
// from "text". Fields that no chat template reads are ignored. `where` names the line in messages. Fails if
// the line is no such example or has nothing to learn. Overwrites the line; a long text stays in its buffer.
inline JsonExample read_example(std::span<char> line, const std::string& where) {
    const std::string_view bytes(line.data(), line.size());
    if (const size_t valid = valid_utf8(bytes); valid < line.size())
        fail("%s: is not UTF-8 text: no character has the byte 0x%02x in column %zu", where.c_str(),
             static_cast<unsigned char>(line[valid]), valid + 1);
    LineJson parsed(line, where);
    nlohmann::json& object = parsed.json();
    if (!object.is_object()) fail("%s: is not a JSON object", where.c_str());
    JsonExample example;
    example.bytes = parsed.bytes();
    const bool has_example =
        object.contains("messages") || object.contains("completion") || object.contains("text");
    if (!has_example) refuse_other_formats(object, where);
    const bool is_text =
        !object.contains("messages") && !object.contains("prompt") && !object.contains("completion");
    if (!is_text) {
        example.bytes += kCopiesOfLine * line.size();
        require_memory_for(example.bytes, where);
        for (const char* field : {"messages", "prompt", "completion"})
            if (const auto found = object.find(field); found != object.end()) parsed.restore(*found);
    }
    if (object.contains("messages")) {
        refuse_fields(object, {"tools", "functions", "documents", "chat_template_kwargs"}, where);
        example.messages = read_messages(object["messages"], where);
    } else if (object.contains("prompt") || object.contains("completion")) {
        example.prompt = text_field(object, "prompt", where);
        example.completion = text_field(object, "completion", where);
        if (example.completion.empty()) fail("%s: \"completion\" is empty", where.c_str());
    } else if (object.contains("text")) {
        example.is_text = true;
        example.completion = text_field(object, "text", where);
        if (example.completion.empty()) fail("%s: \"text\" is empty", where.c_str());
        if (parsed.was_taken(example.completion)) example.text_in_line = parsed.value(object["text"]);
    } else {
        fail("%s: has neither \"messages\", nor \"prompt\" and \"completion\", nor \"text\"", where.c_str());
    }
    return example;
}

// The number of bytes from `at` to the end of the line, with its line end.
inline uint64_t rest_of_line(const FileReader& file, uint64_t at) {
    std::vector<char> part(256 << 10);
    for (uint64_t from = at; from < file.size(); from += part.size()) {
        part.resize(std::min<uint64_t>(part.size(), file.size() - from));
        file.read(from, part.size(), part.data());
        if (const auto end = std::find(part.begin(), part.end(), '\n'); end != part.end())
            return from + static_cast<uint64_t>(end - part.begin()) + 1 - at;
    }
    return file.size() - at;
}

// Calls use(line, bytes, where) for each line of a file that is not blank. `line` may be overwritten; `bytes`
// is the line's size in the file, with the blank lines before it; `where` names it in messages. Fails naming
// a line of more than kLargestText bytes, or one that there is too little memory for.
template <class Use>
void for_each_line(const FileReader& file, Use&& use) {
    constexpr size_t kPart = 256 << 10;
    std::string buffer;
    uint64_t at = 0, number = 0, line_end = 0;
    size_t bytes = 0;
    const auto name = [&](uint64_t line) {
        return format("%s: line %llu", file.path().c_str(), static_cast<unsigned long long>(line));
    };
    const auto take = [&](std::span<char> line) {
        number++;
        bytes += line.size() + 1;
        const std::string_view text(line.data(), line.size());
        if (text.find_first_not_of(" \t\r") == text.npos) return;
        use(line, bytes, name(number));
        bytes = 0;
    };
    // Reserves the memory of a long line at once, so that it is never copied.
    const auto expect_long_line = [&] {
        line_end = at + rest_of_line(file, at);
        const size_t size = buffer.size() + (line_end - at);
        if (size > kLargestText)
            fail("%s has %zu bytes, and a line may have %zu MiB", name(number + 1).c_str(), size,
                 kLargestText >> 20);
        require_memory_for(size, name(number + 1));
        buffer.reserve(size + kPart);
    };
    while (at < file.size()) {
        const size_t held = buffer.size(), count = std::min<uint64_t>(kPart, file.size() - at);
        if (held >= kPart && line_end <= at) expect_long_line();
        buffer.resize(held + count);
        file.read(at, count, buffer.data() + held);
        at += count;
        size_t begin = 0;
        for (size_t end; (end = buffer.find('\n', std::max(begin, held))) != buffer.npos; begin = end + 1)
            take(std::span(buffer).subspan(begin, end - begin));
        buffer.erase(0, begin);
        if (begin > 4 * kPart) buffer.shrink_to_fit();
    }
    if (!buffer.empty()) take(buffer);
}

// Finds the elements of a JSON list in text that arrives in parts.
class ListElements {
  public:
    explicit ListElements(const std::string& path) : path_(path) {}

    // Calls use(element, bytes, where) for each element that ends in this part, as for_each_line() does for
    // lines.
    template <class Use>
    void feed(std::string_view part, Use&& use) {
        for (const char c : part) {
            bytes_++;
            if (c == '\n') line_++;
            if (place_ == Place::Element)
                add_to_element(c, use);
            else if (!is_space(c))
                add_between(c);
        }
    }
    void finish() const {
        if (place_ != Place::End) fail("%s: its JSON list has no end", path_.c_str());
    }

  private:
    enum class Place { Begin, BeforeElement, Element, End };

    static bool is_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

    void add_between(char c) {
        constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
        if (place_ == Place::Begin) {
            if (c == '[')
                place_ = Place::BeforeElement;
            else if (bytes_ > kByteOrderMark.size() || c != kByteOrderMark[bytes_ - 1])
                refuse(c);
            return;
        }
        if (place_ == Place::End || c == ',' || (c == ']' && number_ > 0)) refuse(c);
        if (c == ']') {
            place_ = Place::End;
            return;
        }
        place_ = Place::Element;
        number_++;
        first_line_ = line_;
        element_ = c;
        depth_ = c == '{' || c == '[';
        in_string_ = c == '"';
        escaped_ = false;
    }

    template <class Use>
    void add_to_element(char c, Use&& use) {
        if (!in_string_ && depth_ == 0 && (c == ',' || c == ']')) {
            use(std::span<char>(element_), bytes_, where());
            bytes_ = 0;
            place_ = c == ',' ? Place::BeforeElement : Place::End;
            return;
        }
        if (element_.size() == element_.capacity()) require_memory_for(2 * element_.size(), where());
        element_ += c;
        if (element_.size() > kLargestText)
            fail("%s has more than %zu MiB", where().c_str(), kLargestText >> 20);
        if (in_string_) {
            in_string_ = escaped_ || c != '"';
            escaped_ = !escaped_ && c == '\\';
            return;
        }
        in_string_ = c == '"';
        if (c == '{' || c == '[') depth_++;
        if ((c == '}' || c == ']') && depth_ > 0) depth_--;
    }

    std::string where() const {
        return format("%s: example %llu (line %llu)", path_.c_str(), number_, first_line_);
    }
    [[noreturn]] void refuse(char c) const {
        fail("%s: line %llu: \"%s\" where %s is expected in a JSON list", path_.c_str(), line_,
             printable(std::string(1, c)).c_str(),
             place_ == Place::Begin ? "["
             : place_ == Place::End ? "nothing more"
                                    : "an example");
    }

    const std::string path_;
    Place place_ = Place::Begin;
    std::string element_;
    int depth_ = 0;
    bool in_string_ = false, escaped_ = false;
    unsigned long long number_ = 0, line_ = 1, first_line_ = 1;
    size_t bytes_ = 0;  // since the end of the last element
};

// Does the same for the elements of a file that is one JSON list. Fails naming the line if it is not one.
template <class Use>
void for_each_element(const FileReader& file, Use&& use) {
    constexpr uint64_t kPart = 1 << 20;
    ListElements elements(file.path());
    std::string part;
    for (uint64_t at = 0; at < file.size(); at += part.size()) {
        part.resize(std::min(kPart, file.size() - at));
        file.read(at, part.size(), part.data());
        elements.feed(part, use);
    }
    elements.finish();
}
