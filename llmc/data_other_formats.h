// data_other_formats.h - examples as other tools' data have them, rewritten as conversations: ShareGPT's,
// Alpaca's, and pairs of a question and an answer. Read it to see what a field of such data becomes.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/error.h"

// What is asked and what is answered, by the names of fields. The first pair that an example has counts.
struct AskedAndAnswered {
    const char *asked, *answered;
};
inline constexpr AskedAndAnswered kAskedAndAnswered[] = {
    {"instruction", "output"},  // Alpaca; `input` or `context` is what the instruction is about
    {"instruction", "response"}, {"prompt", "response"}, {"question", "answer"},
    {"question", "response"},    {"query", "response"},
};

// ShareGPT's names of those who speak, and the roles of chat templates.
inline constexpr std::pair<const char*, const char*> kShareGptRoles[] = {
    {"human", "user"},     {"user", "user"},      {"gpt", "assistant"},    {"chatgpt", "assistant"},
    {"bing", "assistant"}, {"bard", "assistant"}, {"model", "assistant"},  {"assistant", "assistant"},
    {"system", "system"},  {"tool", "tool"},      {"observation", "tool"}, {"function_response", "tool"},
};

// The fields that may belong to an example.
inline constexpr const char* kExampleFields[] = {"messages", "conversations", "chat_template_kwargs",
                                                 "tools",    "documents",     "system",
                                                 "history",  "instruction",   "input",
                                                 "context",  "output",        "response",
                                                 "question", "answer",        "query",
                                                 "prompt",   "completion"};

// The text of a field; "" if the example lacks it or it is null.
inline std::string text_or_none(const nlohmann::ordered_json& object, const char* name,
                                const std::string& where) {
    const auto found = object.find(name);
    if (found == object.end() || found->is_null()) return "";
    if (!found->is_string()) fail("%s: \"%s\" is not a text", where.c_str(), name);
    return found->get<std::string>();
}

inline nlohmann::ordered_json chat_message(const char* role, const std::string& content) {
    return {{"role", role}, {"content", content}};
}

// A message of ShareGPT's, {"from": ..., "value": ...}, as templates read it; others as they are. Other
// fields of the message stay.
inline nlohmann::ordered_json of_sharegpt(nlohmann::ordered_json message, const std::string& place) {
    if (!message.is_object() || !message.contains("from") || message.contains("role")) return message;
    const std::string from = text_or_none(message, "from", place);
    const auto known = std::ranges::find(kShareGptRoles, from, [](const auto& pair) { return pair.first; });
    if (known == std::end(kShareGptRoles))
        fail("%s: \"from\" is \"%s\", where \"system\", \"human\", \"gpt\" and \"tool\" are known",
             place.c_str(), printable(from).c_str());
    nlohmann::ordered_json written = nlohmann::ordered_json::object();
    auto& entries = written.get_ref<nlohmann::ordered_json::object_t&>();
    entries.reserve(message.size());
    entries.emplace_back("role", known->second);
    for (auto& [name, value] : message.get_ref<nlohmann::ordered_json::object_t&>()) {
        if (name == "value" || name == "content")
            written["content"] = std::move(value);
        else if (name != "from")
            entries.emplace_back(name, std::move(value));
    }
    return written;
}

// The messages of {"instruction": ..., "output": ...} and the like: the system message if there is one,
// earlier questions and answers, the question with what it is about on a line of its own, and the answer.
inline nlohmann::ordered_json messages_of_pair(const nlohmann::ordered_json& object,
                                               const AskedAndAnswered& pair, const std::string& where) {
    nlohmann::ordered_json messages = nlohmann::ordered_json::array();
    if (const std::string system = text_or_none(object, "system", where); !system.empty())
        messages.push_back(chat_message("system", system));
    if (const auto history = object.find("history"); history != object.end() && !history->empty()) {
        const auto is_turn = [](const nlohmann::ordered_json& turn) {
            return turn.is_array() && turn.size() == 2 && turn[0].is_string() && turn[1].is_string();
        };
        if (!history->is_array() || !std::ranges::all_of(*history, is_turn))
            fail("%s: \"history\" is not a list of questions with their answers", where.c_str());
        for (const nlohmann::ordered_json& turn : *history) {
            messages.push_back(chat_message("user", turn[0].get<std::string>()));
            messages.push_back(chat_message("assistant", turn[1].get<std::string>()));
        }
    }
    std::string asked = text_or_none(object, pair.asked, where);
    for (const char* more : {"input", "context"})
        if (const std::string text = text_or_none(object, more, where); !text.empty())
            asked += (asked.empty() ? "" : "\n") + text;
    messages.push_back(chat_message("user", asked));
    const std::string answer = text_or_none(object, pair.answered, where);
    if (answer.empty()) fail("%s: \"%s\" is empty", where.c_str(), pair.answered);
    messages.push_back(chat_message("assistant", answer));
    return messages;
}

// The pair whose fields an example has; null if there is none.
inline const AskedAndAnswered* pair_of(const nlohmann::ordered_json& object) {
    const auto found = std::ranges::find_if(kAskedAndAnswered, [&](const AskedAndAnswered& pair) {
        return object.contains(pair.asked) && object.contains(pair.answered);
    });
    return found == std::end(kAskedAndAnswered) ? nullptr : &*found;
}

// Takes the messages out of an example, also of one in another tool's format. Returns null for one of a
// "prompt" with its "completion", or of "text". A prompt and a completion that are lists of messages, as TRL
// has them, become one conversation, and only the completion is learnt.
inline nlohmann::ordered_json take_messages(nlohmann::ordered_json& object, const std::string& where) {
    nlohmann::ordered_json messages;
    const char* const name = object.contains("messages") ? "messages" : "conversations";
    if (const auto list = object.find(name); list != object.end()) {
        if (!list->is_array()) fail("%s: \"%s\" is not a list of messages", where.c_str(), name);
        messages = nlohmann::ordered_json::array();
        messages.get_ref<nlohmann::ordered_json::array_t&>().reserve(list->size() + 1);
        if (const std::string system = text_or_none(object, "system", where);
            !system.empty() && !object.contains("messages"))
            messages.push_back(chat_message("system", system));
        for (nlohmann::ordered_json& message : *list)
            messages.push_back(of_sharegpt(std::move(message),
                                           format("%s: message %zu", where.c_str(), messages.size() + 1)));
    } else if (object.contains("completion")) {
        if (!object.contains("prompt") || !object["prompt"].is_array() || !object["completion"].is_array())
            return nullptr;
        messages = std::move(object["prompt"]);
        for (nlohmann::ordered_json& message : messages)
            if (message.is_object() && message.contains("role") && message["role"] == "assistant")
                message["train"] = false;
        for (nlohmann::ordered_json& message : object["completion"]) messages.push_back(std::move(message));
    } else if (const AskedAndAnswered* pair = pair_of(object)) {
        messages = messages_of_pair(object, *pair, where);
    }
    return messages;
}

// Fails because an example has no fields that are read, and names those that it has.
[[noreturn]] inline void fail_unknown_format(const nlohmann::ordered_json& object, const std::string& where) {
    if (object.contains("chosen") && object.contains("rejected"))
        fail(
            R"(%s is preference data ("chosen" and "rejected"), which is not trained on; to train on the )"
            R"(chosen answers alone, rename a list "chosen" to "messages", and a text "chosen" to "completion")",
            where.c_str());
    std::string names;
    for (const auto& [name, value] : object.items()) {
        if (names.size() > 100) {
            names += ", ...";
            break;
        }
        names += (names.empty() ? "\"" : ", \"") + printable(name) + "\"";
    }
    fail(R"(%s has %s, where one of these is read: "messages"; "conversations"; "prompt" and "completion"; )"
         R"("instruction" and "output"; "prompt" and "response"; "question" and "answer"; "text")",
         where.c_str(), names.empty() ? "no fields" : names.c_str());
}
