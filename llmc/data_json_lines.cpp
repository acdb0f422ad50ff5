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
    if (field == object.end()) fail("%s has no \"%s\"", where.c_str(), name);
    if (!field->is_string()) fail("%s: \"%s\" is not a text", where.c_str(), name);
    return field->get<std::string>();
}

// Fails if one of these fields is not empty: a chat template would write it into the conversation, which is
// not supported.
static void refuse_fields(const OrderedJson& object, std::initializer_list<const char*> names,
                          const std::string& where) {
    for (const char* name : names)
        if (has_field(object, name))
            fail("%s: \"%s\" is not supported: leave the field out, or the example", where.c_str(), name);
}

// False if a message's "weight" is 0, or its "train" (or "training" or "loss", as other tools have it) is
// false: then none of it has a loss.
static bool message_counts(const OrderedJson& message, const std::string& where) {
    bool counts = true;
    for (const std::string& name : words_of("weight train training loss")) {
        const OrderedJson value = message.value(name, OrderedJson());
        const bool is_weight = name == "weight";
        if (!value.is_null() && !(is_weight ? value == 0 || value == 1 : value.is_boolean()))
            fail("%s: \"%s\" is %s, where %s are supported", where.c_str(), name.c_str(),
                 value.dump(-1, ' ', true).c_str(), is_weight ? "0 and 1" : "true and false");
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
        if (!part.is_object()) fail("%s: \"content\" has a part that is not a JSON object", place.c_str());
        const OrderedJson type = part.value("type", OrderedJson());
        if (type != "text")
            fail("%s: \"content\" has a part of the type %s, where \"text\" is supported", place.c_str(),
                 printable(type.dump(-1, ' ', true)).c_str());
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
    if (!list.is_array() || list.empty()) fail("%s: \"messages\" is not a list of messages", where.c_str());
    std::vector<Message> messages;
    messages.reserve(list.size());
    bool answers = false;
    for (OrderedJson& item : list) {
        const std::string place = format("%s: message %zu", where.c_str(), messages.size() + 1);
        if (!item.is_object()) fail("%s is not a JSON object", place.c_str());
        refuse_fields(item, {"function_call"}, place);
        const std::string role = text_field(item, "role", place);
        check_content(item, place);
        if (!has_word(kRoles, role))
            fail(
                "%s: \"role\" is \"%s\", where \"system\", \"developer\", \"user\", \"assistant\" and "
                "\"tool\" are known",
                place.c_str(), printable(role).c_str());
        const bool assistant = role == "assistant";
        answers |= assistant;
        const bool counts = message_counts(item, place);
        if (assistant && counts && !says_something(item))
            fail("%s: the assistant says nothing", place.c_str());
        messages.push_back({std::move(item), counts});
    }
    if (answered && !answers) fail("%s: none of the messages is the assistant's", where.c_str());
    if (!answered && messages.back().role() == "assistant")
        fail("%s: the last message is the assistant's, which is not continued", where.c_str());
    return messages;
}

// Takes what else the chat template reads out of an example. Empty lists are as if they were left out.
static OrderedJson take_chat_variables(OrderedJson& object, const std::string& where) {
    constexpr size_t kMostVariables = 1000;  // a template looks them up one by one
    refuse_fields(object, {"functions", "continue_final_message"}, where);
    OrderedJson variables = OrderedJson::object();
    const OrderedJson more = take(object, "chat_template_kwargs");
    if (!more.empty() && !more.is_object())
        fail("%s: \"chat_template_kwargs\" is not a JSON object", where.c_str());
    if (more.size() > kMostVariables)
        fail("%s: \"chat_template_kwargs\" has %zu fields, and may have %zu", where.c_str(), more.size(),
             kMostVariables);
    variables.get_ref<OrderedJson::object_t&>().reserve(2 + more.size());
    for (const char* name : {"tools", "documents"}) {
        OrderedJson list = take(object, name);
        if (list.empty()) continue;
        const auto is_object = [](const OrderedJson& one) { return one.is_object(); };
        if (!list.is_array() || !std::ranges::all_of(list, is_object))
            fail("%s: \"%s\" is not a list of JSON objects", where.c_str(), name);
        variables[name] = std::move(list);
    }
    for (const auto& [name, value] : more.items()) {
        if (name == "messages" || name == "add_generation_prompt" || name == "continue_final_message")
            fail("%s: \"chat_template_kwargs\" cannot set \"%s\"", where.c_str(), name.c_str());
        variables[name] = value;
    }
    return variables;
}

JsonExample read_example(std::span<char> line, const std::string& where, std::set<std::string>* unread) {
    LineJson parsed(line, where);
    OrderedJson& object = parsed.json();
    if (!object.is_object()) fail("%s is not a JSON object", where.c_str());
    JsonExample example;
    example.bytes = parsed.bytes();
    OrderedJson messages;
    const bool is_text = object.contains("text") && !object.contains("messages") &&
                         !object.contains("conversations") && !object.contains("completion") &&
                         !pair_of(object);
    if (!is_text) {
        example.bytes = parsed.bytes_as_chat();
        require_memory_for(example.bytes, where);
        for (const char* fields : {kAskingFields, kAnswerFields})
            for (const std::string& field : words_of(fields))
                if (const auto found = object.find(field); found != object.end()) parsed.restore(*found);
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
        if (example.completion.empty()) fail("%s: \"completion\" is empty", where.c_str());
    } else if (object.contains("text")) {
        example.is_text = true;
        example.completion = text_field(object, "text", where);
        if (example.completion.empty()) fail("%s: \"text\" is empty", where.c_str());
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
    if (!object.is_object())
        fail("%s is no JSON object, such as {\"prompt\": \"Who are you?\"}", where.c_str());
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

// The number of bytes from `at` to the end of the line, with its line end.
static uint64_t rest_of_line(const FileReader& file, uint64_t at) {
    std::vector<char> part(256 << 10);
    for (uint64_t from = at; from < file.size(); from += part.size()) {
        part.resize(std::min<uint64_t>(part.size(), file.size() - from));
        file.read(from, part.size(), part.data());
        if (const auto end = std::find(part.begin(), part.end(), '\n'); end != part.end())
            return from + static_cast<uint64_t>(end - part.begin()) + 1 - at;
    }
    return file.size() - at;
}

void for_each_line(const FileReader& file, const UseLine& use) {
    constexpr size_t kPart = 256 << 10;
    std::string buffer;
    uint64_t at = 0, number = 0, line_end = 0;
    size_t bytes = 0;
    const auto name = [&](uint64_t line) { return format("%s: line %lu", file.path().c_str(), line); };
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

namespace {
// Finds the elements of a JSON list in text that arrives in parts.
class ListElements {
  public:
    explicit ListElements(const std::string& path) : path_(path) {}

    // Calls use(element, bytes, where) for each element that ends in this part, as for_each_line() does for
    // lines.
    void feed(std::string_view part, const UseLine& use) {
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

    void add_to_element(char c, const UseLine& use) {
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
        return format("%s: example %lu (line %lu)", path_.c_str(), number_, first_line_);
    }
    [[noreturn]] void refuse(char c) const {
        fail("%s: line %lu: \"%s\" where %s is expected in a JSON list", path_.c_str(), line_,
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
    uint64_t number_ = 0, line_ = 1, first_line_ = 1;
    size_t bytes_ = 0;  // since the end of the last element
};
}  // namespace

void for_each_element(const FileReader& file, const UseLine& use) {
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
