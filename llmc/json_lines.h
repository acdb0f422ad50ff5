// json_lines.h - examples to learn from, one JSON object a line: a text, a prompt with its completion, or the
// messages of a conversation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/utf8.h"

struct Message {
    std::string role, content;
};

// What a line holds: messages, or else a text, which may be empty, and what is to be learnt behind it.
struct JsonExample {
    std::string prompt, completion;
    std::vector<Message> messages;
    bool is_text = false;  // {"text": ...}: it is the completion
};

// Whether a file is one of JSON lines, by its name.
inline bool is_json_lines(std::string_view path) {
    return path.ends_with(".jsonl") || path.ends_with(".json-lines");
}

// A text that an object must have. Fails naming the line and the field.
inline std::string text_field(const nlohmann::json& object, const char* name, const std::string& where) {
    const auto field = object.find(name);
    if (field == object.end()) fail("%s: has no \"%s\"", where.c_str(), name);
    if (!field->is_string()) fail("%s: \"%s\" is not a text", where.c_str(), name);
    return field->get<std::string>();
}

// The messages of a conversation, at least one of them the assistant's.
inline std::vector<Message> read_messages(const nlohmann::json& list, const std::string& where) {
    if (!list.is_array() || list.empty()) fail("%s: \"messages\" is not a list of messages", where.c_str());
    std::vector<Message> messages;
    bool answers = false;
    for (const nlohmann::json& item : list) {
        const std::string place = format("%s: message %zu", where.c_str(), messages.size() + 1);
        if (!item.is_object()) fail("%s is not a JSON object", place.c_str());
        const Message message{text_field(item, "role", place), text_field(item, "content", place)};
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
    if (!answers) fail("%s: none of the messages is the assistant's", where.c_str());
    return messages;
}

// The JSON of a line. Fails naming the line, and the column of what is broken.
inline nlohmann::json parse_line(std::string_view line, const std::string& where) {
    if (const size_t valid = valid_utf8(line); valid < line.size())
        fail("%s: is not UTF-8 text: no character has the byte 0x%02x in column %zu", where.c_str(),
             static_cast<unsigned char>(line[valid]), valid + 1);
    try {
        return parse_json(line, where);
    } catch (const UserError& error) {
        std::string message = error.what();
        constexpr std::string_view kOnlyLine = "at line 1, column";
        if (const size_t at = message.find(kOnlyLine); at != message.npos)
            message.replace(at, kOnlyLine.size(), "at column");
        throw UserError(message);
    }
}

// The example of a line, which `where` names in messages: of "messages", else of "prompt" and "completion",
// else of "text"; other fields may say what they like. Fails in one line on what is no such thing, and where
// there is nothing to learn.
inline JsonExample read_example(std::string_view line, const std::string& where) {
    const nlohmann::json object = parse_line(line, where);
    if (!object.is_object()) fail("%s: is not a JSON object", where.c_str());
    JsonExample example;
    if (object.contains("messages")) {
        example.messages = read_messages(object["messages"], where);
    } else if (object.contains("prompt") || object.contains("completion")) {
        example.prompt = text_field(object, "prompt", where);
        example.completion = text_field(object, "completion", where);
        if (example.completion.empty()) fail("%s: \"completion\" is empty", where.c_str());
    } else if (object.contains("text")) {
        example.is_text = true;
        example.completion = text_field(object, "text", where);
        if (example.completion.empty()) fail("%s: \"text\" is empty", where.c_str());
    } else {
        fail("%s: has neither \"messages\", nor \"prompt\" and \"completion\", nor \"text\"", where.c_str());
    }
    return example;
}

// Calls use(line, bytes, where) for each line of a file that is not blank: its text, its bytes in the file
// with those of blank lines before it, and how to name it. Fails naming a line of more than kLargestText
// bytes.
template <class Use>
void for_each_line(const FileReader& file, Use&& use) {
    constexpr size_t kPart = 1 << 20;
    std::string buffer;
    uint64_t at = 0, number = 0;
    size_t bytes = 0;
    const auto take = [&](std::string_view line) {
        number++;
        const std::string where =
            format("%s: line %llu", file.path().c_str(), static_cast<unsigned long long>(number));
        if (line.size() > kLargestText)
            fail("%s has %zu bytes, and a line may have %zu MiB", where.c_str(), line.size(),
                 kLargestText >> 20);
        bytes += line.size() + 1;
        if (line.find_first_not_of(" \t\r") == line.npos) return;
        use(line, bytes, where);
        bytes = 0;
    };
    while (at < file.size()) {
        const size_t held = buffer.size(), count = std::min<uint64_t>(kPart, file.size() - at);
        buffer.resize(held + count);
        file.read(at, count, buffer.data() + held);
        at += count;
        size_t begin = 0;
        for (size_t end; (end = buffer.find('\n', std::max(begin, held))) != buffer.npos; begin = end + 1)
            take(std::string_view(buffer).substr(begin, end - begin));
        buffer.erase(0, begin);
        if (buffer.size() > kLargestText) take(buffer);
    }
    if (!buffer.empty()) take(buffer);
}
