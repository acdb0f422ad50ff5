// data_other_formats.h - examples as other tools' data have them, rewritten as conversations: ShareGPT's,
// Alpaca's, and pairs of a question and an answer. Read it to see what a field of such data becomes.
#pragma once

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "llmc/data_json_lines.h"
#include "llmc/error.h"
#include "llmc/text.h"

// What is asked and what is answered, by the names of fields. The first pair that an example has counts. In
// Alpaca's format, the first of them, `input` or `context` is what the instruction is about.
struct AskedAndAnswered {
    const char *asked, *answered;
};
inline constexpr AskedAndAnswered kAskedAndAnswered[] = {
    {"instruction", "output"}, {"instruction", "response"}, {"prompt", "response"},
    {"question", "answer"},    {"question", "response"},    {"query", "response"}};

// ShareGPT's names of those who speak, and the roles of chat templates.
inline constexpr std::pair<const char*, const char*> kShareGptRoles[] = {
    {"human user", "user"},
    {"gpt chatgpt bing bard model assistant", "assistant"},
    {"system", "system"},
    {"tool observation function_response", "tool"}};

// The fields that mean something in some format: those that ask, and those that are answers or say how good
// an answer is. If an example has one that its own format does not read, the run says so.
inline constexpr const char* kAskingFields =
    "messages conversations chat_template_kwargs tools documents functions system history instruction input "
    "context question query prompt";
inline constexpr const char* kAnswerFields =
    "output response answer completion chosen rejected rejected_response rejected_messages label kto_tag "
    "score scores reward rewards rating weight train";

// True if a field is there and neither null nor empty.
inline bool has_field(const OrderedJson& object, const std::string& name) {
    const auto found = object.find(name);
    return found != object.end() && !found->empty() && *found != "";
}

// Takes a field out of an example, and leaves null there: what is not null in the end was not read.
inline OrderedJson take(OrderedJson& object, const char* name) {
    const auto found = object.find(name);
    return found == object.end() ? OrderedJson() : std::exchange(*found, nullptr);
}
// A field that is a text; "" if the example lacks it or it is null.
inline std::string take_text(OrderedJson& object, const char* name, const std::string& where) {
    OrderedJson value = take(object, name);
    if (value.is_null()) return "";
    if (!value.is_string()) fail("%s: \"%s\" is not a text", where, name);
    return std::move(value.get_ref<std::string&>());
}

// Adds to `unread` the fields among `names` that an example has and that were not read.
inline void add_unread(const OrderedJson& object, const char* names, std::set<std::string>& unread) {
    for (const std::string& name : words_of(names))
        if (has_field(object, name)) unread.insert(name);
}

// A message of ShareGPT's, {"from": ..., "value": ...}, as templates read it; others as they are. Other
// fields of the message stay.
inline OrderedJson of_sharegpt(OrderedJson message, const std::string& place) {
    if (!message.is_object() || !message.contains("from") || message.contains("role")) return message;
    const std::string from = take_text(message, "from", place);
    const auto known =
        std::ranges::find_if(kShareGptRoles, [&](const auto& pair) { return has_word(pair.first, from); });
    if (known == std::end(kShareGptRoles))
        fail("%s: \"from\" is \"%s\", where \"system\", \"human\", \"gpt\" and \"tool\" are known", place,
             printable(from));
    if (message.contains("value")) message["content"] = take(message, "value");
    message["role"] = known->second;
    for (const char* name : {"from", "value"}) message.erase(name);
    return message;
}

inline bool has_role(const OrderedJson& message, const char* role) {
    return message.is_object() && message.contains("role") && message["role"] == role;
}

// The messages of {"instruction": ..., "output": ...} and the like: earlier questions and answers, the
// question with what it is about on a line of its own, and the answer, unless its name is null.
inline OrderedJson messages_of_pair(OrderedJson& object, const AskedAndAnswered& pair,
                                    const std::string& where) {
    OrderedJson messages = OrderedJson::array();
    if (const OrderedJson history = take(object, "history"); !history.empty()) {
        const auto is_turn = [](const OrderedJson& turn) {
            return turn.is_array() && turn.size() == 2 && turn[0].is_string() && turn[1].is_string();
        };
        if (!history.is_array() || !std::ranges::all_of(history, is_turn))
            fail("%s: \"history\" is not a list of questions with their answers", where);
        for (const OrderedJson& turn : history) {
            messages.push_back(said("user", turn[0].get<std::string>()).object);
            messages.push_back(said("assistant", turn[1].get<std::string>()).object);
        }
    }
    std::string asked = take_text(object, pair.asked, where);
    for (const char* more : {"input", "context"})
        if (const std::string text = take_text(object, more, where); !text.empty())
            asked += (asked.empty() ? "" : "\n") + text;
    messages.push_back(said("user", asked).object);
    if (!pair.answered) return messages;
    const std::string answer = take_text(object, pair.answered, where);
    if (answer.empty()) fail("%s: \"%s\" is empty", where, pair.answered);
    messages.push_back(said("assistant", answer).object);
    return messages;
}

// The pair whose fields an example has; null if there is none.
inline const AskedAndAnswered* pair_of(const OrderedJson& object) {
    for (const AskedAndAnswered& pair : kAskedAndAnswered)
        if (object.contains(pair.asked) && object.contains(pair.answered)) return &pair;
    return nullptr;
}

// Takes the messages out of an example, also of one in another tool's format. Returns null for one of a
// "prompt" with its "completion", or of "text". A prompt and a completion that are lists of messages, as TRL
// has them, become one conversation, and only the completion is learnt. `asks`: the example is a prompt to be
// answered; then a "prompt" is a text or a list of messages, and nothing is an answer.
inline OrderedJson take_messages(OrderedJson& object, const std::string& where, bool asks = false) {
    const auto is_list = [&](const char* name) { return object.contains(name) && object[name].is_array(); };
    OrderedJson messages;
    size_t not_learnt = 0;  // of the messages
    const AskedAndAnswered prompt = {"prompt", nullptr}, *const pair = asks ? &prompt : pair_of(object);
    const char* const name = object.contains("messages") ? "messages" : "conversations";
    if (object.contains(name)) {
        if (!is_list(name)) fail("%s: \"%s\" is not a list of messages", where, name);
        messages = take(object, name);
    } else if (is_list("prompt") && (asks || is_list("completion"))) {
        messages = take(object, "prompt");
        not_learnt = messages.size();
        if (!asks)
            for (OrderedJson& message : take(object, "completion")) messages.push_back(std::move(message));
    } else if (pair && object.contains(pair->asked) && (asks || !object.contains("completion"))) {
        messages = messages_of_pair(object, *pair, where);
    } else {
        return nullptr;
    }
    for (size_t i = 0; i < messages.size(); i++) {
        messages[i] = of_sharegpt(std::move(messages[i]), format("%s: message %zu", where, i + 1));
        if (i < not_learnt && has_role(messages[i], "assistant")) messages[i]["train"] = false;
    }
    if (const std::string system = take_text(object, "system", where); !system.empty()) {
        if (!messages.empty() && has_role(messages[0], "system"))
            fail("%s has \"system\" and a message of the system's: leave one of them out", where);
        messages.insert(messages.begin(), said("system", system).object);
    }
    return messages;
}

// Fails if an example's label says that its answer is not to be imitated, as in KTO's data.
inline void refuse_bad_answer(const OrderedJson& object, const std::string& where) {
    for (const char* name : {"label", "kto_tag"})
        if (const auto label = object.find(name);
            label != object.end() && (*label == false || (label->is_number() && *label <= 0)))
            fail(
                "%s: \"%s\" is %s: in KTO's data that marks a bad answer, and these are not trained on; "
                "leave such examples out, or the field if it means something else",
                where, name, label->dump());
}

// Fails because an example has no fields that are read, and names those that it has.
[[noreturn]] inline void fail_unknown_format(const OrderedJson& object, const std::string& where) {
    if (object.contains("chosen") && object.contains("rejected"))
        fail(
            R"(%s is preference data ("chosen" and "rejected"), which is not trained on; to train on the )"
            R"(chosen answers alone, rename a list "chosen" to "messages", and a text "chosen" to "completion")",
            where);
    std::string names =
        joined(object.items(), ", ", [](const auto& field) { return "\"" + printable(field.key()) + "\""; });
    if (names.size() > 100) names = names.substr(0, 100) + "...";
    fail(R"(%s has %s, where one of these is read: "messages"; "conversations"; "prompt" and "completion"; )"
         R"("instruction" and "output"; "prompt" and "response"; "question" and "answer"; "text")",
         where, names.empty() ? "no fields" : names);
}
