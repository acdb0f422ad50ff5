// data_chat_format.h - the usual chat formats: how a conversation is written as text for a model, and which
// format a model expects. Each format writes what Hugging Face's chat template for it writes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/data_json_lines.h"
#include "llmc/file.h"
#include "llmc/tokenizer.h"

// One turn of a conversation: the text before it, the text with which the speaker's part opens and closes,
// and the text after it. With an assistant's turn, `opens`, the content and `closes` have a loss. "{bos}" and
// "{eos}" stand for the tokenizer's special tokens.
struct ChatTurn {
    const char *before, *opens, *closes, *after;
};

struct ChatFormat {
    const char* name;                          // its name in --chat-format
    std::vector<const char*> marks;            // special tokens that the tokenizer must have
    const char* begin;                         // before the first turn
    ChatTurn system, user, assistant;          // if `system` is empty, the system message is put into the
                                               // first
    const char *system_before, *system_after;  // user message, between these two; else they are null
    bool trims;                                // strip white space around each message
};

// If several formats have one name, the first whose special tokens the tokenizer has is used.
inline const std::vector<ChatFormat>& chat_formats() {
    static const std::vector<ChatFormat> formats = {
        {"chatml",
         {"<|im_start|>", "<|im_end|>"},
         "",
         {"<|im_start|>system\n", "", "<|im_end|>", "\n"},
         {"<|im_start|>user\n", "", "<|im_end|>", "\n"},
         {"<|im_start|>assistant\n", "", "<|im_end|>", "\n"},
         nullptr,
         nullptr,
         false},
        {"llama3",  // of Llama 3; the template of 3.1 adds dates to the system message
         {"{bos}", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
         "{bos}",
         {"<|start_header_id|>system<|end_header_id|>\n\n", "", "<|eot_id|>", ""},
         {"<|start_header_id|>user<|end_header_id|>\n\n", "", "<|eot_id|>", ""},
         {"<|start_header_id|>assistant<|end_header_id|>\n\n", "", "<|eot_id|>", ""},
         nullptr,
         nullptr,
         true},
        {"mistral",  // since v0.3, where [INST] is a token
         {"{bos}", "{eos}", "[INST]", "[/INST]"},
         "{bos}",
         {},
         {"", "[INST] ", "[/INST]", ""},
         {"", " ", "{eos}", ""},
         "",
         "\n\n",
         false},
        {"mistral",  // v0.1 and v0.2
         {"{bos}", "{eos}"},
         "{bos}",
         {},
         {"", " [INST] ", " [/INST]", ""},
         {"", " ", "{eos}", ""},
         "",
         "\n\n",
         false},
        {"llama2",
         {"{bos}", "{eos}"},
         "",
         {},
         {"{bos}", "[INST] ", " [/INST]", ""},
         {"", " ", " {eos}", ""},
         "<<SYS>>\n",
         "\n<</SYS>>\n\n",
         true},
        {"zephyr",
         {"{eos}"},
         "",
         {"<|system|>\n", "", "{eos}", "\n"},
         {"<|user|>\n", "", "{eos}", "\n"},
         {"<|assistant|>\n", "", "{eos}", "\n"},
         nullptr,
         nullptr,
         false},
    };
    return formats;
}

// When a piece of text has a loss: always (an answer), only with --loss-on all (a prompt), or never (a
// message with weight 0).
enum class Learnt { Always, WithPrompts, Never };

struct Piece {
    std::string text;
    Learnt learnt;
};

// The chat template in a model's folder; empty if there is none. If there are several, the default one.
inline std::string chat_template_of(const std::string& folder) {
    const std::string file = folder + "/chat_template.jinja", config = folder + "/tokenizer_config.json";
    if (file_exists(file)) return read_text(file);
    if (!file_exists(config)) return "";
    const nlohmann::json json = read_json(config);
    const auto found = json.find("chat_template");
    if (!json.is_object() || found == json.end()) return "";
    if (found->is_string()) return found->get<std::string>();
    if (found->is_array())
        for (const nlohmann::json& item : *found)
            if (item.is_object() && item.value("name", nlohmann::json()) == "default" &&
                item.value("template", nlohmann::json()).is_string())
                return item["template"].get<std::string>();
    return "";
}

// A chat format together with the tokenizer whose special tokens it uses.
class Chat {
  public:
    // `name` is a format's name as in --chat-format, or "auto": then the format is recognized by the model's
    // chat template or, if that is empty, by the tokenizer's special tokens. Fails, naming the model, if the
    // format is not recognized or the tokenizer lacks its special tokens.
    Chat(const std::string& name, const std::string& chat_template, const std::string& model,
         const Tokenizer& tokenizer)
        : tokenizer_(tokenizer) {
        const std::string wanted = name == "auto" ? recognize(chat_template, model) : name;
        std::string missing;
        for (const ChatFormat& format : chat_formats()) {
            if (format.name != wanted) continue;
            missing = first_missing(format);
            if (!missing.empty()) continue;
            format_ = &format;
            break;
        }
        if (!format_)
            fail("--chat-format %s: the tokenizer of %s has no %s", wanted.c_str(), model.c_str(),
                 missing.c_str());
        if (wanted == "chatml") usual_system_ = usual_system(chat_template);
    }

    const char* name() const { return format_->name; }
    // The token that ends an assistant's answer.
    int end_of_answer() const { return tokenizer_.encode(with_marks(format_->assistant.closes)).back(); }

    // Writes a conversation as text, in parts that can be tokenized independently. `where` names the
    // conversation in messages. Fails if the format requires users and assistants to take turns and they do
    // not.
    std::vector<std::vector<Piece>> render(const std::vector<Message>& messages,
                                           const std::string& where) const {
        std::vector<std::vector<Piece>> parts(1);
        add_format(parts, format_->begin, Learnt::WithPrompts);
        const bool joins = format_->system_before;
        const bool has_system = messages[0].role == "system";
        std::string system = has_system ? messages[0].content : usual_system_;
        const bool system_counts = !has_system || messages[0].counts;
        if (!system.empty() && !joins)
            add_turn(parts, format_->system, system, system_counts ? Learnt::WithPrompts : Learnt::Never);
        bool user_next = true;
        for (size_t i = has_system; i < messages.size(); i++) {
            const bool assistant = messages[i].role == "assistant";
            if (joins && assistant == user_next)
                fail("%s: message %zu: in the format %s users and assistants take turns, the user first",
                     where.c_str(), i + 1, format_->name);
            user_next = assistant;
            std::string content = messages[i].content;
            bool counts = messages[i].counts;
            if (joins && !assistant && !system.empty()) {
                content = format_->system_before + system + format_->system_after + content;
                counts = counts && system_counts;
                system.clear();
            }
            add_turn(parts, assistant ? format_->assistant : format_->user, content,
                     !counts     ? Learnt::Never
                     : assistant ? Learnt::Always
                                 : Learnt::WithPrompts);
        }
        return parts;
    }

    // The conversation so far, which must not be empty, up to where the assistant's next answer begins.
    std::string prompt(const std::vector<Message>& messages) const {
        std::string text;
        for (const std::vector<Piece>& part : render(messages, "the conversation"))
            for (const Piece& piece : part) text += piece.text;
        return text + with_marks(format_->assistant.before);
    }

  private:
    static std::string trimmed(const std::string& text) {
        constexpr const char* kSpaces = " \t\n\v\f\r";
        const size_t begin = text.find_first_not_of(kSpaces);
        return begin == text.npos ? "" : text.substr(begin, text.find_last_not_of(kSpaces) + 1 - begin);
    }

    void add_turn(std::vector<std::vector<Piece>>& parts, const ChatTurn& turn, const std::string& content,
                  Learnt learnt) const {
        const Learnt around = learnt == Learnt::Always ? Learnt::WithPrompts : learnt;
        add_format(parts, turn.before, around);
        add_format(parts, turn.opens, learnt);
        add(parts, format_->trims ? trimmed(content) : content, learnt);
        add_format(parts, turn.closes, learnt);
        add_format(parts, turn.after, around);
    }

    // Adds text that belongs to the format. Only here do placeholders become special tokens; in a message
    // they are plain text. Text that begins with a special token starts a new part, because its tokens do not
    // depend on the text before it.
    void add_format(std::vector<std::vector<Piece>>& parts, const char* text, Learnt learnt) const {
        const std::string written = with_marks(text);
        const bool apart = learnt != Learnt::Always && begins_with_mark(written);
        if (apart && !parts.back().empty()) parts.emplace_back();
        add(parts, written, learnt);
    }
    static void add(std::vector<std::vector<Piece>>& parts, const std::string& text, Learnt learnt) {
        if (text.empty()) return;
        std::vector<Piece>& part = parts.back();
        if (!part.empty() && part.back().learnt == learnt)
            part.back().text += text;
        else
            part.push_back({text, learnt});
    }
    bool begins_with_mark(std::string_view text) const {
        for (const char* mark : format_->marks)
            if (text.starts_with(with_marks(mark))) return true;
        return false;
    }

    // Replaces the placeholders in a format's text by the tokenizer's special tokens.
    std::string with_marks(std::string_view text) const {
        std::string written;
        while (!text.empty()) {
            const bool begins = text.starts_with("{bos}");
            if (!begins && !text.starts_with("{eos}")) {
                written += text[0];
                text.remove_prefix(1);
                continue;
            }
            const int token = begins ? tokenizer_.begin_of_text() : tokenizer_.end_of_text();
            if (token >= 0) written += tokenizer_.decode(token);
            text.remove_prefix(5);
        }
        return written;
    }

    // Names the format's first special token that the tokenizer lacks; empty if it has all.
    std::string first_missing(const ChatFormat& format) const {
        for (const char* mark : format.marks) {
            const std::string spelling = with_marks(mark);
            if (spelling.empty()) return "token that begins or ends a text";
            if (tokenizer_.encode(spelling).size() != 1) return "token \"" + printable(spelling) + "\"";
        }
        return "";
    }

    std::string recognize(const std::string& chat_template, const std::string& model) const {
        const auto says = [&](const char* text) { return chat_template.find(text) != chat_template.npos; };
        const auto knows = [&](const char* mark) {
            const std::vector<int> tokens = tokenizer_.encode(mark);
            return tokens.size() == 1 && tokenizer_.is_special(tokens[0]);
        };
        if (chat_template.empty()) {
            if (knows("<|im_start|>") && knows("<|im_end|>")) return "chatml";
            if (knows("<|start_header_id|>") && knows("<|eot_id|>")) return "llama3";
            if (knows("[INST]") && knows("[/INST]")) return "mistral";
            fail("%s has no chat template, and no marks of a chat format that is known: give --chat-format",
                 model.c_str());
        }
        if (says("<|im_start|>")) return "chatml";
        if (says("<|start_header_id|>")) return "llama3";
        if (says("<<SYS>>")) return "llama2";
        if (says("[INST]")) return "mistral";
        if (says("<|user|>") && says("<|assistant|>") && says("eos_token")) return "zephyr";
        fail("%s: its chat template (\"%s\") is of no format that is known: give --chat-format",
             model.c_str(), printable(chat_template.substr(0, 40)).c_str());
    }

    // The system message that a ChatML template adds to conversations without one, if it is written there as
    // plain text.
    static std::string usual_system(const std::string& chat_template) {
        constexpr std::string_view kBegin = "<|im_start|>system", kEnd = "<|im_end|>";
        for (size_t at = 0; (at = chat_template.find(kBegin, at)) != chat_template.npos;) {
            at += kBegin.size();
            const std::string_view rest = std::string_view(chat_template).substr(at);
            const size_t skip = rest.starts_with("\\n") ? 2 : rest.starts_with("\n") ? 1 : 0;
            const size_t end = rest.find(kEnd);
            if (skip == 0 || end == rest.npos) continue;
            const std::string_view text = rest.substr(skip, end - skip);
            if (text.find_first_of("'\"{}\\") == text.npos) return std::string(text);
        }
        return "";
    }

    const Tokenizer& tokenizer_;
    const ChatFormat* format_ = nullptr;
    std::string usual_system_;
};
