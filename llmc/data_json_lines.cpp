// data_json_lines.cpp - checks an example's fields, and finds the lines of a file or the elements of a list.
#include "llmc/data_json_lines.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "llmc/data_json_strings.h"
#include "llmc/data_other_formats.h"
#include "llmc/error.h"

std::string Message::text() const {
    const auto content = object.find("content");
    if (content == object.end()) return "";
    if (content->is_string()) return content->get<std::string>();
    std::string all;
    if (content->is_array())
        for (const OrderedJson& part : *content) all += part.value("text", "");
    return all;
}

// A string field that an object must have. Fails naming the line and the field.
static std::string text_field(const OrderedJson& object, const char* name, const std::string& where) {
    const auto field = object.find(name);
    if (field == object.end()) fail("%s has no \"%s\"", where, name);
    if (!field->is_string()) fail("%s: \"%s\" is not a text", where, name);
    return field->get<std::string>();
}

// Fails if one of these fields is not empty: a chat template would write it into the conversation, which is
// not supported.
static void refuse_fields(const OrderedJson& object, std::initializer_list<const char*> names,
                          const std::string& where) {
    for (const char* name : names)
        if (has_field(object, name))
            fail("%s: \"%s\" is not supported: leave the field out, or the example", where, name);
}

// False if a message's "weight" is 0, or its "train" (or "training" or "loss", as other tools have it) is
// false: then none of it has a loss.
static bool message_counts(const OrderedJson& message, const std::string& where) {
    bool counts = true;
    for (const std::string& name : words_of("weight train training loss")) {
        const OrderedJson value = message.value(name, OrderedJson());
        const bool is_weight = name == "weight";
        if (!value.is_null() && !(is_weight ? value == 0 || value == 1 : value.is_boolean()))
            fail("%s: \"%s\" is %s, where %s are supported", where, name, value.dump(-1, ' ', true),
                 is_weight ? "0 and 1" : "true and false");
        counts = counts && value != 0 && value != false;
    }
    return counts;
}

// Fails unless a message's content is a text or a list of texts. A message that calls tools may have none.
static void check_content(const OrderedJson& message, const std::string& place) {
    const auto content = message.find("content");
    const auto calls = message.find("tool_calls");
    const bool calls_tools = calls != message.end() && calls->is_array() && !calls->empty();
    if (calls_tools && (content == message.end() || content->is_null())) return;
    if (content == message.end() || !content->is_array())
        return static_cast<void>(text_field(message, "content", place));
    for (const OrderedJson& part : *content) {
        if (!part.is_object()) fail("%s: \"content\" has a part that is not a JSON object", place);
        const OrderedJson type = part.value("type", OrderedJson());
        if (type != "text")
            fail("%s: \"content\" has a part of the type %s, where \"text\" is supported", place,
                 printable(type.dump(-1, ' ', true)));
        text_field(part, "text", place);
    }
}

// True if an assistant's message has something to learn.
static bool says_something(const OrderedJson& message) {
    const auto fields = {"content", "tool_calls", "reasoning_content", "thinking", "reasoning"};
    return std::ranges::any_of(fields, [&](const char* field) { return has_field(message, field); });
}

// Reads the messages of a conversation. `answered`: at least one must be the assistant's; else the last one
// must not be, because the model answers it.
static std::vector<Message> read_messages(OrderedJson list, const std::string& where, bool answered = true) {
    // Roles that chat templates know; another one is probably a misspelling.
    constexpr const char* kRoles =
        "system developer user assistant tool tools function ipython observation environment context "
        "documents tool_response";
    if (!list.is_array() || list.empty()) fail("%s: \"messages\" is not a list of messages", where);
    std::vector<Message> messages;
    messages.reserve(list.size());
    bool answers = false;
    for (OrderedJson& item : list) {
        const std::string place = format("%s: message %zu", where, messages.size() + 1);
        if (!item.is_object()) fail("%s is not a JSON object", place);
        refuse_fields(item, {"function_call"}, place);
        const std::string role = text_field(item, "role", place);
        check_content(item, place);
        if (!has_word(kRoles, role))
            fail(
                "%s: \"role\" is \"%s\", where \"system\", \"developer\", \"user\", \"assistant\" and "
                "\"tool\" are known",
                place, printable(role));
        const bool assistant = role == "assistant";
        answers |= assistant;
        const bool counts = message_counts(item, place);
        if (assistant && counts && !says_something(item)) fail("%s: the assistant says nothing", place);
        messages.push_back({std::move(item), counts});
    }
    if (answered && !answers) fail("%s: none of the messages is the assistant's", where);
    if (!answered && messages.back().role() == "assistant")
        fail("%s: the last message is the assistant's, which is not continued", where);
    return messages;
}

// Takes what else the chat template reads out of an example. Empty lists are as if they were left out.
static OrderedJson take_chat_variables(OrderedJson& object, const std::string& where) {
    constexpr size_t kMostVariables = 1000;  // a template looks them up one by one
    refuse_fields(object, {"functions", "continue_final_message"}, where);
    OrderedJson variables = OrderedJson::object();
    const OrderedJson more = take(object, "chat_template_kwargs");
    if (!more.empty() && !more.is_object()) fail("%s: \"chat_template_kwargs\" is not a JSON object", where);
    if (more.size() > kMostVariables)
        fail("%s: \"chat_template_kwargs\" has %zu fields, and may have %zu", where, more.size(),
             kMostVariables);
    variables.get_ref<OrderedJson::object_t&>().reserve(2 + more.size());
    for (const char* name : {"tools", "documents"}) {
        OrderedJson list = take(object, name);
        if (list.empty()) continue;
        const auto is_object = [](const OrderedJson& one) { return one.is_object(); };
        if (!list.is_array() || !std::ranges::all_of(list, is_object))
            fail("%s: \"%s\" is not a list of JSON objects", where, name);
        variables[name] = std::move(list);
    }
    for (const auto& [name, value] : more.items()) {
        if (name == "messages" || name == "add_generation_prompt" || name == "continue_final_message")
            fail("%s: \"chat_template_kwargs\" cannot set \"%s\"", where, name);
        variables[name] = value;
    }
    return variables;
}

JsonExample read_example(std::span<char> line, const std::string& where, std::set<std::string>* unread) {
    LineJson parsed(line, where);
    OrderedJson& object = parsed.json();
    if (!object.is_object()) fail("%s is not a JSON object", where);
    JsonExample example;
    example.bytes = parsed.bytes();
    OrderedJson messages;
    const bool is_text = object.contains("text") && !object.contains("messages") &&
                         !object.contains("conversations") && !object.contains("completion") &&
                         !pair_of(object);
    if (!is_text) {
        example.bytes = parsed.bytes_as_chat();
        require_memory_for(example.bytes, where);
        parsed.restore(object);
        messages = take_messages(object, where);
        refuse_bad_answer(object, where);
    }
    if (!messages.is_null()) {
        parsed.refuse_long_numbers();
        example.conversation.messages = read_messages(std::move(messages), where);
        example.conversation.variables = take_chat_variables(object, where);
        example.conversation.bytes = line.size();
    } else if (object.contains("completion")) {
        for (const char* name : {"prompt", "completion"}) text_field(object, name, where);
        example.prompt = take_text(object, "prompt", where);
        example.completion = take_text(object, "completion", where);
        if (example.completion.empty()) fail("%s: \"completion\" is empty", where);
    } else if (object.contains("text")) {
        example.is_text = true;
        example.completion = text_field(object, "text", where);
        if (example.completion.empty()) fail("%s: \"text\" is empty", where);
        if (parsed.was_taken(example.completion)) example.text_in_line = parsed.value(object["text"]);
    } else {
        fail_unknown_format(object, where);
    }
    for (const char* fields : {kAskingFields, kAnswerFields})
        if (unread) add_unread(object, fields, *unread);
    return example;
}

JsonPrompt read_prompt(std::span<char> line, const std::string& where, bool is_chat,
                       std::set<std::string>& unread) {
    LineJson parsed(line, where);
    require_memory_for(parsed.bytes_as_chat(), where);
    OrderedJson& object = parsed.json();
    parsed.restore(object);
    if (!object.is_object()) fail("%s is no JSON object, such as {\"prompt\": \"Who are you?\"}", where);
    JsonPrompt prompt;
    prompt.line = object;
    prompt.bytes = parsed.bytes() + 4 * line.size();
    prompt.has_messages = object.contains("messages");
    if (is_chat) {
        OrderedJson messages = take_messages(object, where, true);
        if (messages.is_null()) text_field(object, "prompt", where);  // says that there is none
        parsed.refuse_long_numbers();
        prompt.conversation = {read_messages(std::move(messages), where, false),
                               take_chat_variables(object, where), line.size()};
    } else if (!prompt.has_messages) {
        text_field(object, "prompt", where);
        prompt.text = take_text(object, "prompt", where);
    }
    add_unread(object, kAskingFields, unread);
    return prompt;
}

namespace {
// The characters of a file, and how far they were read.
class FileCharacters {
  public:
    explicit FileCharacters(const FileReader& file, uint64_t from = 0) : file_(file), read_(from) {}

    static constexpr int kEnd = -1;
    // The next character, or kEnd.
    int next() {
        if (at_ == part_.size()) {
            read_ += part_.size();
            part_.resize(std::min<uint64_t>(256 << 10, file_.size() - read_));
            file_.read(read_, part_.size(), part_.data());
            at_ = 0;
            if (part_.empty()) return kEnd;
        }
        const char c = part_[at_++];
        line_ += c == '\n';
        return static_cast<unsigned char>(c);
    }
    // The next character that is not white space.
    int next_in_json() {
        int c = next();
        while (c == ' ' || c == '\t' || c == '\r' || c == '\n') c = next();
        return c;
    }
    uint64_t count() const { return read_ + at_; }
    uint64_t line() const { return line_; }

  private:
    const FileReader& file_;
    std::string part_;
    size_t at_ = 0;
    uint64_t read_ = 0;  // before the part
    uint64_t line_ = 1;
};
}  // namespace

void for_each_line(const FileReader& file, const UseLine& use) {
    constexpr size_t kLong = 256 << 10;
    constexpr int kEnd = FileCharacters::kEnd;
    FileCharacters in(file);
    uint64_t used = 0;  // the bytes up to the end of the last line that was not blank
    std::string line;
    for (int c = 0; c != kEnd;) {
        const std::string where = format("%s: line %lu", file.path(), in.line());
        line.clear();
        if (line.capacity() > 4 * kLong) line.shrink_to_fit();
        while ((c = in.next()) != kEnd && c != '\n') {
            if (line.size() ==
                kLong) {  // reserves the memory of a long line at once, so that it is never copied
                FileCharacters rest(file, in.count());
                for (int next = c; next != kEnd && next != '\n';) next = rest.next();
                const size_t size = line.size() + 1 + (rest.count() - in.count());
                if (size > kLargestText)
                    fail("%s has %zu bytes, and a line may have %zu MiB", where, size, kLargestText >> 20);
                require_memory_for(size, where);
                line.reserve(size);
            }
            line += static_cast<char>(c);
        }
        if (line.find_first_not_of(" \t\r") == line.npos) continue;
        use(std::span<char>(line), in.count() - std::exchange(used, in.count()), where);
    }
}

void for_each_element(const FileReader& file, const UseLine& use) {
    constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
    constexpr int kEnd = FileCharacters::kEnd;
    const char* const path = file.path().c_str();
    FileCharacters in(file);
    const auto refuse = [&](int c, const char* expected) {
        if (c == kEnd) fail("%s: its JSON list has no end", path);
        fail("%s: line %lu: \"%s\" where %s is expected in a JSON list", path, in.line(),
             printable(std::string(1, static_cast<char>(c))), expected);
    };
    int c = in.next_in_json();
    while (in.count() <= kByteOrderMark.size() && static_cast<char>(c) == kByteOrderMark[in.count() - 1])
        c = in.next_in_json();
    if (c != '[') refuse(c, "[");
    uint64_t used = 0;  // the bytes up to the end of the last element
    std::string element;
    for (uint64_t number = 1; c != ']'; number++) {
        c = in.next_in_json();
        if (c == ']' && number == 1) break;
        if (c == kEnd || c == ',' || c == ']') refuse(c, "an example");
        const std::string where = format("%s: example %lu (line %lu)", path, number, in.line());
        element.clear();
        int depth = 0;
        bool in_string = false, escaped = false;
        for (; in_string || depth > 0 || (c != ',' && c != ']'); c = in.next()) {
            if (c == kEnd) refuse(c, "");
            if (element.size() == element.capacity()) require_memory_for(2 * element.size(), where);
            element += static_cast<char>(c);
            if (element.size() > kLargestText) fail("%s has more than %zu MiB", where, kLargestText >> 20);
            if (in_string) {
                in_string = escaped || c != '"';
                escaped = !escaped && c == '\\';
                continue;
            }
            in_string = c == '"';
            if (c == '{' || c == '[') depth++;
            if ((c == '}' || c == ']') && depth > 0) depth--;
        }
        use(std::span<char>(element), in.count() - std::exchange(used, in.count()), where);
    }
    if (c = in.next_in_json(); c != kEnd) refuse(c, "nothing more");
}
