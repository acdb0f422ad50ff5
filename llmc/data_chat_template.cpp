// data_chat_template.cpp - finds a model's chat templates, holds our own formats, and finds in what a
// template writes of a conversation the text of each message.
#include "llmc/data_chat_template.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <string_view>

#include <nlohmann/json.hpp>

#include "llmc/data_other_formats.h"
#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/jinja.h"
#include "llmc/jinja_strings.h"
#include "llmc/tokenizer_settings.h"

using SpecialTokens = std::vector<std::pair<std::string, std::string>>;

// ---- the templates of a model

bool ChatTemplates::may_write_date() const {
    return std::ranges::any_of(
        sources, [](const auto& source) { return source.second.find("strftime_now") != std::string::npos; });
}

std::string ChatTemplates::source(bool has_tools) const {
    for (const char* name : {"tool_use", "default"})
        if (const auto found = sources.find(name);
            found != sources.end() && (has_tools || found->first == "default"))
            return found->second;
    return "";
}

// The value of a key in a JSON object, if both are there.
static nlohmann::json member(const nlohmann::json& object, const char* key) {
    return object.is_object() ? object.value(key, nlohmann::json()) : nlohmann::json();
}

// Reads "chat_template" of a JSON file: a text, or a list of texts with names.
static void add_templates_of(const nlohmann::json& file, const std::string& path, ChatTemplates& templates) {
    const nlohmann::json value = member(file, "chat_template");
    if (value.is_null()) return;
    templates.place = path;
    if (value.is_string()) templates.sources["default"] = value.get<std::string>();
    for (const nlohmann::json& one : value.is_array() ? value : nlohmann::json::array()) {
        const nlohmann::json name = member(one, "name"), source = member(one, "template");
        if (!name.is_string() || !source.is_string())
            fail("%s: \"chat_template\" has an entry without \"name\" and \"template\"", path);
        templates.sources[name.get<std::string>()] = source.get<std::string>();
    }
    if (templates.sources.empty())
        fail("%s: \"chat_template\" is neither a text nor a list of texts with names", path);
}

// The special tokens that a folder's files name, and those that transformers has for the tokenizer's class.
// Where no file can name them, those that begin and end a text are the tokenizer's own.
static SpecialTokens special_tokens_of(const std::string& folder, const Tokenizer& tokenizer) {
    const auto has = [&](const char* name) { return file_exists(folder + name); };
    const bool is_named = (has("/tokenizer_config.json") || has("/special_tokens_map.json")) &&
                          (has("/tokenizer.json") || has("/vocab.json"));
    nlohmann::json settings = tokenizer_settings(folder);
    const std::pair<const char*, int> ends[] = {{"bos_token", tokenizer.begin_of_text()},
                                                {"eos_token", tokenizer.end_of_text()}};
    for (const auto& [key, token] : ends)
        if (!is_named && token >= 0 && !settings.contains(key)) settings[key] = tokenizer.decode(token);
    SpecialTokens tokens;
    for (const char* key : kSpecialTokens)
        if (const std::string text = content_of(settings.value(key, nlohmann::json())); !text.empty())
            tokens.emplace_back(key, text);
    return tokens;
}

ChatTemplates chat_templates_of(const std::string& folder, const Tokenizer& tokenizer) {
    ChatTemplates templates;
    const std::string file = folder + "/chat_template.jinja", more = folder + "/additional_chat_templates";
    if (file_exists(file)) {
        templates.sources["default"] = read_text(file);
        templates.place = file;
    }
    std::error_code error;
    if (std::filesystem::is_directory(more, error)) {
        std::filesystem::directory_iterator entry(more, error);
        for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error))
            if (entry->path().extension() == ".jinja") {
                templates.sources[entry->path().stem().string()] = read_text(entry->path().string());
                if (templates.place.empty()) templates.place = more;
            }
        if (error) fail("%s: the folder cannot be read: %s", more, error.message());
    }
    for (const char* name : {"tokenizer_config.json", "chat_template.json"})
        if (templates.sources.empty())
            add_templates_of(read_object(folder, name), folder + "/" + name, templates);
    templates.special_tokens = special_tokens_of(folder, tokenizer);
    return templates;
}

ChatTemplates chat_templates_of(const nlohmann::json& metadata, const std::string& path) {
    ChatTemplates templates;
    templates.place = path;
    constexpr std::string_view kKey = "tokenizer.chat_template";
    for (const auto& [key, value] : metadata.items()) {
        if (!value.is_string() || !key.starts_with(kKey)) continue;
        const std::string rest = key.substr(kKey.size());
        if (rest.empty() || rest[0] == '.')
            templates.sources[rest.empty() ? "default" : rest.substr(1)] = value.get<std::string>();
    }
    const nlohmann::json tokens = member(metadata, "tokenizer.ggml.tokens");
    const std::pair<const char*, const char*> names[] = {{"bos_token", "bos_token_id"},
                                                         {"eos_token", "eos_token_id"},
                                                         {"unk_token", "unknown_token_id"},
                                                         {"sep_token", "seperator_token_id"},
                                                         {"pad_token", "padding_token_id"}};
    for (const auto& [name, key] : names) {
        const nlohmann::json id = member(metadata, (std::string("tokenizer.ggml.") + key).c_str());
        const nlohmann::json token =
            id.is_number_unsigned() && id < tokens.size() ? tokens[id.get<size_t>()] : "";
        if (const std::string text = content_of(token); !text.empty())
            templates.special_tokens.emplace_back(name, text);
    }
    return templates;
}

// ---- our own formats

// A format of --chat-format, for folders without a template. Such a template is saved with the model.
struct ChatFormat {
    const char* name;
    std::vector<const char*> marks;  // special tokens that the tokenizer must have
    const char* source;
};

// Asks for an answer.
#define LLMC_ASK(TEXT) "{%- if add_generation_prompt %}{{ '" TEXT "' }}{% endif %}\n"
// Writes a content, which may be a list of texts.
#define LLMC_TEXT                  \
    "{%- macro text(content) %}\n" \
    "{{- content if content is string else content | map(attribute='text') | join }}{%- endmacro %}\n"
// A format whose conversations go user, assistant, user..., with the system's text put before the first
// user's. USER and ANSWER are what it writes of a message's `content`.
#define LLMC_TURNS(NAME, SYSTEM_BEGIN, SYSTEM_END, USER, ANSWER)                     \
    LLMC_TEXT                                                                        \
    "{%- set first = 1 if messages[0].role == 'system' else 0 %}\n"                  \
    "{%- set system = text(messages[0].content) if first else '' %}\n"               \
    "{%- for message in messages[first:] %}\n"                                       \
    "{%- if message.role != ('user' if loop.index0 is even else 'assistant') %}\n"   \
    "{{- raise_exception('message ' ~ (loop.index + first) ~ ': in the format " NAME \
    " users and assistants take turns, the user first') }}{%- endif %}\n"            \
    "{%- set content = text(message.content) %}\n"                                   \
    "{%- if loop.first and system %}\n"                                              \
    "{%- set content = '" SYSTEM_BEGIN "' + system + '" SYSTEM_END                   \
    "' + content %}{% endif %}\n"                                                    \
    "{%- if message.role == 'assistant' %}{{ " ANSWER " }}{% else %}{{ " USER        \
    " }}{% endif %}\n"                                                               \
    "{%- endfor %}\n"
// A format that writes each message with its role, and asks for an answer with ASK.
#define LLMC_ROLES(NAME, MESSAGE, ASK)                                                                  \
    LLMC_TEXT                                                                                           \
    "{%- for message in messages %}\n"                                                                  \
    "{%- if message.role not in ['system', 'user', 'assistant'] or (message.role == 'system' and not "  \
    "loop.first) %}\n"                                                                                  \
    "{{- raise_exception('message ' ~ loop.index ~ ': \"role\" is \"' ~ message.role ~ '\", where the " \
    "format " NAME                                                                                      \
    " has a system first, users and assistants') }}{%- endif %}\n"                                      \
    "{%- set content = text(message.content) %}\n"                                                      \
    "{{- " MESSAGE                                                                                      \
    " }}\n"                                                                                             \
    "{%- endfor %}\n" LLMC_ASK(ASK)

// If several formats have one name, the first whose special tokens the tokenizer has is used. "{bos}" and
// "{eos}" stand for the tokenizer's.
static const std::vector<ChatFormat>& chat_formats() {
    static const std::vector<ChatFormat> formats = {
        {"chatml",
         {"<|im_start|>", "<|im_end|>"},
         "{%- if usual_system is defined and messages[0].role != 'system' %}\n"
         "{{- '<|im_start|>system\\n' + usual_system + '<|im_end|>\\n' }}\n"
         "{%- endif %}\n" LLMC_ROLES("chatml",
                                     "'<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n'",
                                     "<|im_start|>assistant\\n")},
        {"llama3",
         {"{bos}", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
         "{{- bos_token }}\n" LLMC_ROLES("llama3",
                                         "'<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + "
                                         "content | trim + '<|eot_id|>'",
                                         "<|start_header_id|>assistant<|end_header_id|>\\n\\n")},
        {"mistral",  // since v0.3, where [INST] is a token
         {"{bos}", "{eos}", "[INST]", "[/INST]"},
         "{{- bos_token }}\n" LLMC_TURNS("mistral", "", "\\n\\n", "'[INST] ' + content + '[/INST]'",
                                         "' ' + content + eos_token")},
        {"mistral",  // v0.1 and v0.2
         {"{bos}", "{eos}"},
         "{{- bos_token }}\n" LLMC_TURNS("mistral", "", "\\n\\n", "' [INST] ' + content + ' [/INST]'",
                                         "' ' + content + eos_token")},
        {"llama2",
         {"{bos}", "{eos}"},
         LLMC_TURNS("llama2", "<<SYS>>\\n", "\\n<</SYS>>\\n\\n",
                    "bos_token + '[INST] ' + content | trim + ' [/INST]'",
                    "' ' + content | trim + ' ' + eos_token")},
        {"zephyr",
         {"{eos}"},
         LLMC_ROLES("zephyr", "'<|' + message.role + '|>\\n' + content + eos_token + '\\n'",
                    "<|assistant|>\\n")},
        {"gemma",
         {"{bos}", "<start_of_turn>", "<end_of_turn>"},
         // A system's text keeps its spaces, so a user's text is trimmed before it comes behind that.
         "{{- bos_token }}\n" LLMC_TURNS(
             "gemma", "", "\\n\\n",
             "'<start_of_turn>user\\n' + (system + '\\n\\n' if loop.first and system else '') + "
             "text(message.content) | trim + '<end_of_turn>\\n'",
             "'<start_of_turn>model\\n' + content | trim + '<end_of_turn>\\n'")
             LLMC_ASK("<start_of_turn>model\\n")},
    };
    return formats;
}
#undef LLMC_ASK
#undef LLMC_TEXT
#undef LLMC_TURNS
#undef LLMC_ROLES

// ---- chats

std::tm chat_date(const std::string& given) {
    std::tm date{};
    const std::time_t now = std::time(nullptr);
    localtime_r(&now, &date);
    if (given.empty()) return date;
    date = {};
    const char* const end = strptime(given.c_str(), "%Y-%m-%d", &date);
    const int day = date.tm_mday;
    timegm(&date);  // sets the day of the week and of the year; makes March 1 of February 30
    if (!end || *end || date.tm_mday != day)
        fail("--chat-date %s is no date like 2025-01-31", printable(given));
    return date;
}

// Replaces "{bos}" and "{eos}" by the tokenizer's special tokens.
static std::string spelling(const std::string& mark, const Tokenizer& tokenizer) {
    if (mark != "{bos}" && mark != "{eos}") return mark;
    const int token = mark == "{bos}" ? tokenizer.begin_of_text() : tokenizer.end_of_text();
    return token >= 0 ? tokenizer.decode(token) : "";
}

// Names the format's first special token that the tokenizer lacks; empty if it has all.
static std::string first_missing(const ChatFormat& format, const Tokenizer& tokenizer) {
    for (const char* mark : format.marks) {
        const std::string text = spelling(mark, tokenizer);
        if (text.empty()) return "token that begins or ends a text";
        if (tokenizer.encode(text).size() != 1) return "token \"" + printable(text) + "\"";
    }
    return "";
}

static const ChatFormat& find_format(const std::string& name, const std::string& model,
                                     const Tokenizer& tokenizer) {
    std::string missing;
    for (const ChatFormat& format : chat_formats()) {
        if (format.name != name) continue;
        missing = first_missing(format, tokenizer);
        if (missing.empty()) return format;
    }
    fail("--chat-format %s: the tokenizer of %s has no %s", name, model, missing);
}

// The format of a folder without a template, by the tokenizer's special tokens.
static std::string recognize(const std::string& model, const Tokenizer& tokenizer) {
    const auto knows = [&](const char* mark) {
        const std::vector<int> tokens = tokenizer.encode(mark);
        return tokens.size() == 1 && tokenizer.is_special(tokens[0]);
    };
    if (knows("<|im_start|>") && knows("<|im_end|>")) return "chatml";
    if (knows("<|start_header_id|>") && knows("<|eot_id|>")) return "llama3";
    if (knows("[INST]") && knows("[/INST]")) return "mistral";
    if (knows("<start_of_turn>") && knows("<end_of_turn>")) return "gemma";
    fail("%s has no chat template, and no marks of a chat format that is known: give --chat-format", model);
}

// For --chat-format chatml: the system message that the folder's own template adds to conversations
// without one, if it is written there as plain text. It is kept as a variable at the beginning of the
// format.
static std::string usual_system(const ChatFormat& format, const std::string& own) {
    constexpr std::string_view kBegin = "<|im_start|>system", kEnd = "<|im_end|>";
    if (std::string_view(format.name) != "chatml") return "";
    const std::string ours = "{%- set usual_system = '";
    if (own.starts_with(ours)) return own.substr(0, own.find('\n') + 1);  // a save has this format already
    for (size_t at = 0; (at = own.find(kBegin, at)) != own.npos;) {
        at += kBegin.size();
        const std::string_view rest = std::string_view(own).substr(at);
        const size_t skip = rest.starts_with("\\n") ? 2 : rest.starts_with("\n") ? 1 : 0;
        const size_t end = rest.find(kEnd);
        if (skip == 0 || end == rest.npos) continue;
        const std::string text(rest.substr(skip, end - skip));
        if (text.find_first_of("'\"{}\\") == text.npos && !text.empty()) return ours + text + "' %}\n";
    }
    return "";
}

// Fails if a conversation has what templates may write and our own formats do not.
static void refuse_what_our_formats_lack(const Conversation& conversation, const std::string& description) {
    const auto refuse = [&](const nlohmann::ordered_json& object, const char* name,
                            const std::string& where) {
        if (has_field(object, name) && object[name] != false)
            fail(
                "%s\"%s\" is not written by %s: leave the field out, or give a model with a chat "
                "template",
                where, name, description);
    };
    for (const char* name : {"tools", "documents"}) refuse(conversation.variables, name, "");
    for (size_t i = 0; i < conversation.messages.size(); i++)
        for (const char* name : {"tool_calls", "reasoning_content", "thinking", "reasoning"})
            refuse(conversation.messages[i].object, name, format("message %zu: ", i + 1));
}

// A message as transformers gives it to templates: without fields that are null, and with the thoughts
// under each of their usual names.
static jinja::Value as_transformers(const nlohmann::ordered_json& message) {
    jinja::Entries entries;
    jinja::Value thoughts;
    for (const char* name : {"reasoning_content", "thinking", "reasoning"})
        if (const auto found = message.find(name);
            thoughts.is_undefined() && found != message.end() && !found->is_null())
            thoughts = jinja::Value::from_json(*found);
    if (!thoughts.is_undefined()) entries.push_back({jinja::Value::string("thinking"), thoughts});
    for (const auto& [name, value] : message.items()) {
        if (value.is_null()) continue;
        jinja::Value made = jinja::Value::from_json(value);
        if (name == "thinking")
            jinja::put(entries, name, made);
        else  // no other is there already
            entries.push_back({jinja::Value::string(name), std::move(made)});
    }
    if (!thoughts.is_undefined()) jinja::put(entries, "reasoning_content", thoughts);
    return jinja::Value::dict(std::move(entries));
}

static std::vector<Piece> pieces_of(const std::string& text,
                                    std::vector<std::pair<jinja::Span, Learnt>> spans) {
    std::ranges::sort(spans, {}, [](const auto& span) { return span.first.begin; });
    std::vector<Piece> pieces;
    size_t done = 0;
    const auto add = [&](size_t end, Learnt learnt) {
        if (end > done) pieces.push_back({text.substr(done, end - done), learnt});
        done = std::max(done, end);
    };
    for (const auto& [span, learnt] : spans) {
        add(span.begin, Learnt::WithPrompts);
        add(span.end, learnt);
    }
    add(text.size(), Learnt::WithPrompts);
    return pieces;
}

Chat::Chat(ChatOptions options, ChatTemplates templates, const std::string& model, const Tokenizer& tokenizer)
    : options_(std::move(options)),
      templates_(std::move(templates)),
      date_(chat_date(options_.date)),
      tokenizer_(tokenizer) {
    if (options_.format == "auto" && !templates_.sources.empty()) {
        const auto read = [&](bool has_tools) {
            return naming(templates_.place, [&] { return jinja::Template(templates_.source(has_tools)); });
        };
        if (templates_.source(false).empty())
            fail("%s has several chat templates and none with the name \"default\"", templates_.place);
        description_ = "the chat template of " + templates_.place;
        chat_ = read(false);
        if (templates_.sources.contains("tool_use")) with_tools_ = read(true);
        return;
    }
    const ChatFormat& format = find_format(
        options_.format == "auto" ? recognize(model, tokenizer) : options_.format, model, tokenizer);
    description_ = std::string("the chat format ") + format.name;
    own_source_ = usual_system(format, templates_.source(false)) + format.source;
    chat_.emplace(own_source_);
    templates_.special_tokens = {{"bos_token", spelling("{bos}", tokenizer)},
                                 {"eos_token", spelling("{eos}", tokenizer)}};
}

struct Chat::Prepared {
    Prepared(const Chat& chat, const Conversation& conversation)
        : date(chat.date_), used(chat.template_for(conversation)) {
        for (const auto& [name, text] : chat.templates_.special_tokens)
            variables.emplace_back(name, jinja::Value::string(text));
        if (!chat.own_source_.empty()) refuse_what_our_formats_lack(conversation, chat.description_);
        for (const Message& message : conversation.messages) {
            bytes += 64 + message.text().size();
            messages.push_back(as_transformers(message.object));
        }
        bytes = std::max(bytes, conversation.bytes);
        for (const char* name : {"tools", "documents"})
            if (!conversation.variables.contains(name)) variables.emplace_back(name, jinja::Value::none());
        for (const auto& [name, value] : conversation.variables.items())
            variables.emplace_back(name, jinja::Value::from_json(value));
        variables.emplace_back("add_generation_prompt", jinja::Value());
        variables.emplace_back("messages", jinja::Value());
    }

    jinja::Rendered write(const jinja::Values& some, bool asks) const {
        // The most steps for one conversation, in all the ways that it is written: about a minute's.
        const uint64_t most = 50 * jinja::Work::kMostSteps + 256 * bytes;
        if (steps > most)
            fail(
                "the chat template takes more than %lu million steps to show where the answers of %zu "
                "messages are: divide the conversation, or put {%% generation %%} around answers in the "
                "template",
                most / 1'000'000, messages.size());
        jinja::Variables all = variables;
        all[all.size() - 2].second = jinja::Value::boolean(asks);
        all[all.size() - 1].second = jinja::Value::list(some);
        return used.render(all, bytes, date, &steps);
    }

    const std::tm& date;
    const jinja::Template& used;
    jinja::Variables variables;
    jinja::Values messages;
    size_t bytes = 0;
    mutable uint64_t steps = 0;  // that the template took so far
};

// ---- what is learnt

// Finds in a written conversation the text of each message. The template says only what it writes for a list
// of messages, so the lists that end before a message, and with it, are written too and compared.
class Chat::MessageFinder {
  public:
    MessageFinder(const Prepared& chat, const std::string& whole, const Tokenizer& tokenizer)
        : chat_(chat), messages_(chat.messages), whole_(whole), tokenizer_(tokenizer) {}

    // The answer that a message gives: what the template writes after asking for it, and the mark that ends
    // it, without line ends after that. Fails if the template writes the answer in so different a way when
    // other messages follow that it cannot be found.
    jinja::Span answer(size_t i) const {
        const std::string after = until(i + 1);
        const std::string closed = without_line_ends(after);
        const std::optional<std::string> before = prompt_before(i);
        if (before && whole_.starts_with(closed) && closed.starts_with(*before))
            return {before->size(), closed.size()};
        return answer_by_change(i, after, before);
    }

    // True if the template asks for an answer in another way than it writes one, so that where one begins had
    // to be guessed.
    bool guesses() const { return guesses_; }

    // All that a message adds to the conversation; or, if the template writes it differently when others
    // follow, its content and the mark that ends it.
    jinja::Span turn(size_t i) const {
        const std::string before = i > 0 ? until(i) : "", after = until(i + 1);
        const bool adds = whole_.starts_with(after) && after.starts_with(before);
        return adds ? jinja::Span{before.size(), after.size()} : answer(i);
    }

  private:
    [[noreturn]] static void fail_ambiguous(size_t i) {
        fail(
            "message %zu: the chat template writes it differently when messages follow, so the text to learn "
            "of it cannot be found: end the conversation with this message, or put {%% generation %%} around "
            "answers in the template",
            i + 1);
    }
    static std::string without_line_ends(const std::string& text) {
        return text.substr(0, text.find_last_not_of('\n') + 1);
    }

    jinja::Values first(size_t count) const {
        return {messages_.begin(), messages_.begin() + static_cast<ptrdiff_t>(count)};
    }
    std::string until(size_t count) const {
        return count == messages_.size() ? whole_ : chat_.write(first(count), false).text;
    }
    // The length of the special token that a text begins with; 0 if it begins with another.
    size_t mark(std::string_view text) const {
        const std::vector<int> tokens = tokenizer_.encode(text.substr(0, jinja::byte_of(text, 64)));
        if (tokens.empty() || !tokenizer_.is_special(tokens[0])) return 0;
        const std::string spelling = tokenizer_.decode(tokens[0]);
        return text.starts_with(spelling) ? spelling.size() : 0;
    }
    // What comes before an answer; nothing if the template refuses to ask for it there.
    std::optional<std::string> prompt_before(size_t i) const {
        try {
            std::string text = chat_.write(first(i), true).text;
            if (i == 0 && text.empty()) return std::nullopt;
            return text;
        } catch (const UserError&) {
            return std::nullopt;
        }
    }

    // Where two texts differ: [begin, end) of the first.
    static jinja::Span difference(const std::string& a, const std::string& b) {
        const size_t shorter = std::min(a.size(), b.size());
        size_t begin = 0, tail = 0;
        while (begin < shorter && a[begin] == b[begin]) begin++;
        while (begin > 0 && begin < a.size() && continues_character(a[begin])) begin--;
        while (tail < shorter - begin && a[a.size() - 1 - tail] == b[b.size() - 1 - tail]) tail++;
        while (tail > 0 && continues_character(a[a.size() - tail])) tail--;
        return {begin, a.size() - tail};
    }

    // Finds an answer by writing the conversation with another content in its place. What follows the
    // content, and what comes before it, are taken from the conversation that ends with it.
    jinja::Span answer_by_change(size_t i, const std::string& after,
                                 const std::optional<std::string>& before) const {
        jinja::Values changed = messages_;
        jinja::Entries entries = changed[i].entries();
        jinja::put(entries, "content", jinja::Value::string("\xee\x80\x80"));  // U+E000
        changed[i] = jinja::Value::dict(std::move(entries));
        const std::string other = chat_.write(changed, false).text;
        changed.resize(i + 1);
        const std::string other_after = chat_.write(changed, false).text;
        if (other == whole_ || other_after == after) fail_ambiguous(i);
        const jinja::Span content = difference(whole_, other), alone = difference(after, other_after);
        const std::string closing = without_line_ends(after.substr(alone.end));
        const size_t end =
            content.end + closing_length(i, std::string_view(whole_).substr(content.end), closing);
        if (before && whole_.starts_with(*before) && before->size() <= content.begin)
            return {before->size(), end};
        if (before && after.starts_with(*before) && before->size() <= alone.begin) {
            const std::string opening = after.substr(before->size(), alone.begin - before->size());
            if (whole_.substr(0, content.begin).ends_with(opening))
                return {content.begin - opening.size(), end};
        }
        return {begin_of(i, content.begin, before), end};
    }

    // The length of what ends an answer: the same as where the conversation ends with it, or another special
    // token in the place of one.
    size_t closing_length(size_t i, std::string_view rest, const std::string& closing) const {
        if (rest.starts_with(closing)) return closing.size();
        const size_t length = mark(rest);
        if (length == 0 || mark(closing) != closing.size()) fail_ambiguous(i);
        return length;
    }

    // The template asks for an answer in another way than it writes one, as with an empty thought: the answer
    // begins where the two differ, at the latest with the content.
    size_t begin_of(size_t i, size_t content, const std::optional<std::string>& before) const {
        guesses_ = true;
        const std::string earlier = i > 0 ? until(i) : "";
        if (!before || i == 0 || !whole_.starts_with(earlier)) return content;
        const auto same = std::ranges::mismatch(*before, whole_).in1 - before->begin();
        return std::clamp(static_cast<size_t>(same), std::min(earlier.size(), content), content);
    }

    const Prepared& chat_;
    const jinja::Values& messages_;
    const std::string& whole_;
    const Tokenizer& tokenizer_;
    mutable bool guesses_ = false;
};

// ---- writing

int Chat::end_of_answer(bool behind) const {
    const std::vector<Message> sample = {said("user", "a"), said("assistant", "b")};
    try {
        std::string answer, rest;
        for (const Piece& piece : render({sample, {}, 0}, std::mem_fn(&std::string::size)))
            (piece.learnt == Learnt::Always ? answer : rest) = piece.text;
        const std::vector<int> tokens = tokenizer_.encode(behind ? jinja::strip(rest) : answer);
        const int token = tokens.empty() ? -1 : behind ? tokens.front() : tokens.back();
        return token >= 0 && tokenizer_.is_special(token) ? token : -1;
    } catch (const UserError&) {
        return -1;
    }
}

std::string Chat::prompt(const Conversation& conversation) const {
    const Prepared chat(*this, conversation);
    return chat.write(chat.messages, true).text;
}

std::vector<Piece> Chat::render(const Conversation& conversation, const Kept& kept) const {
    const Prepared chat(*this, conversation);
    const jinja::Rendered whole = chat.write(chat.messages, false);
    note_unwritten(conversation, whole.text);
    return pieces_of(whole.text, chat.used.has_generation() ? generated(conversation, whole)
                                                            : found(conversation, chat, whole.text, kept));
}

void Chat::note_unwritten(const Conversation& conversation, const std::string& text) const {
    constexpr size_t kLong = 1 << 20;
    if (conversation.bytes > kLong) return;
    for (const char* const name :
         {"tools", "documents", "tool_calls", "reasoning_content", "thinking", "reasoning"}) {
        const bool is_there = has_field(conversation.variables, name) ||
                              std::ranges::any_of(conversation.messages, [&](const Message& message) {
                                  return has_field(message.object, name);
                              });
        if (!is_there || !tried_.insert(name).second) continue;
        Conversation without = conversation;
        without.variables.erase(name);
        for (Message& message : without.messages) message.object.erase(name);
        try {
            const Prepared chat(*this, without);
            if (chat.write(chat.messages, false).text == text) unwritten_.push_back(name);
        } catch (const UserError&) {  // the template needs the field
        }
    }
}

std::vector<size_t> Chat::answers(const Conversation& conversation) const {
    std::vector<size_t> all;
    for (size_t i = 0; i < conversation.messages.size(); i++)
        if (conversation.messages[i].role() == "assistant") all.push_back(i);
    if (options_.loss_on == "last" && !all.empty()) all = {all.back()};
    std::erase_if(all, [&](size_t i) { return !conversation.messages[i].counts; });
    return all;
}

Chat::Spans Chat::generated(const Conversation& conversation, const jinja::Rendered& whole) const {
    std::vector<size_t> all;
    for (size_t i = 0; i < conversation.messages.size(); i++)
        if (conversation.messages[i].role() == "assistant") all.push_back(i);
    const std::vector<size_t> learnt = answers(conversation);
    if (learnt.size() < all.size() && whole.generated.size() != all.size())
        fail(
            "the chat template encloses %zu texts in {%% generation %%} for %zu answers, so which "
            "of them not to learn cannot be told",
            whole.generated.size(), all.size());
    Spans spans;
    for (size_t k = 0; k < whole.generated.size(); k++) {
        const bool is_learnt = learnt.size() == all.size() || std::ranges::binary_search(learnt, all[k]);
        const bool counts = learnt.size() == all.size() || conversation.messages[all[k]].counts;
        if (is_learnt || !counts)
            spans.emplace_back(whole.generated[k], is_learnt ? Learnt::Always : Learnt::Never);
    }
    return spans;
}

Chat::Spans Chat::found(const Conversation& conversation, const Prepared& chat, const std::string& whole,
                        const Kept& kept) const {
    constexpr size_t kLong = 32;
    const size_t end = chat.messages.size() < kLong ? whole.size() : kept(whole);
    const MessageFinder finder(chat, whole, tokenizer_);
    Spans spans;
    for (const size_t i : answers(conversation)) {
        spans.emplace_back(finder.answer(i), Learnt::Always);
        if (spans.back().first.begin >= end) break;
    }
    for (size_t i = 0; i < conversation.messages.size() && options_.loss_on == "all"; i++) {
        if (conversation.messages[i].counts) continue;
        spans.emplace_back(finder.turn(i), Learnt::Never);
        if (spans.back().first.begin >= end) break;
    }
    guesses_ = guesses_ || finder.guesses();
    return spans;
}
