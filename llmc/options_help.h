// options_help.h - what --help and --version print: the usual options, all of them, or those of one group, in
// lines of at most 100 columns; and which program this is and what it was built with. Also the manual page
// and the completions of shells, which `make install` writes with --help man, --help bash and --help zsh.
#pragma once

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cctype>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/options.h"
#include "llmc/options_words.h"
#include "llmc/text.h"

constexpr size_t kHelpColumns = 100, kHelpIndent = 30;
constexpr char kNoBreak = '\x01';  // a space at which no line ends

// What the recipes of the README and of scripts/ use, and what a run then needs next: the options, and keys
// of options, that --help alone shows, each with the beginning of its help.
constexpr const char* kUsualOptions =
    "--model --data --val-data --seq-len --batch --grad-accum --steps --epochs --lr --min-lr --warmup "
    "--schedule --weight-decay --train --base --lora-rank --lora-alpha --soft-prompt --merge --memory --plan "
    "--gpu --recompute --chunk-rows --state-formats --log --eval-every --eval-batches --prompt --chat "
    "--sample --sample.every --sample.tokens --sample.temperature --out --save-every --resume --config "
    "--help --version";

constexpr const char* kHelpExamples = R"(Examples:
  ./train --data book.txt --steps 500 --out out/book
  ./train --model DIR --train lora --base nf4-double --data chats.json --out out/chat
  ./train --plan --gpu "RTX 4090" --model llama-3.1-8b --train lora --batch 1 --seq-len 4096
)";

constexpr const char* kHelpNotes = R"(Exit codes:
  0 done; 1 a bug; 2 a mistake, which one line names; 128 + N stopped by signal N (Ctrl-C: 130).
Signals:
  SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGPIPE stop the run after the current micro-batch, and it
  saves if there is --out. A second Ctrl-C stops it at once, without saving. SIGUSR1, as from
  Slurm's --signal=USR1@120, saves in --out and continues. Signals that were ignored from the start,
  as by nohup, stay ignored.
)";

// A text wrapped between two columns; the first line begins after `lead`.
inline std::string wrapped(const std::string& lead, const std::string& text, size_t indent) {
    std::string lines, line = lead;
    line.resize(std::max(indent, lead.size() + 2), ' ');
    bool is_empty = true;
    for (size_t start = 0; start < text.size();) {
        const size_t end = std::min(text.find(' ', start), text.size());
        if (!is_empty && line.size() + 1 + (end - start) > kHelpColumns) {
            lines += line + "\n";
            line = std::string(indent, ' '), is_empty = true;
        }
        line += (is_empty ? "" : " ") + text.substr(start, end - start);
        is_empty = false;
        start = end + 1;
    }
    return lines + line + "\n";
}

// The end of a text's first sentence, without its full stop.
inline size_t end_of_sentence(const std::string& text) {
    return std::min(text.find(". "), text.find_last_not_of('.') + 1);
}

// What an option does, or the beginning of that, and its default.
inline std::string described(const CLI::Option& option, bool briefly = false) {
    std::string text = option.get_description(), standard = option.get_default_str();
    if (briefly) text = text.substr(0, end_of_sentence(text)) + ".";
    if (const size_t end = text.find_first_of(";:"); briefly && text.size() > 75 && end != text.npos)
        text = text.substr(0, end) + ".";
    const bool has_default = !standard.empty() && standard != "[]" && standard != "{}" && standard != "false";
    return has_default ? text + " (default " + standard + ")" : text;
}

// The lines of one option, or of one key of an option.
inline std::string help_of(const CLI::Option& option, bool briefly) {
    const std::string name = option.get_name(), value = option.get_type_name();
    const size_t dot = name.find('.');
    const std::string lead = dot == name.npos ? "  " + name + (value.empty() ? "" : " " + value)
                                              : "    " + name.substr(dot + 1) + "=" + value;
    std::string text = described(option, briefly);
    // A short default stays in one line.
    const size_t shown = text.rfind("(default ");
    if (shown != text.npos && text.size() - shown < kHelpColumns / 3)
        std::replace(text.begin() + static_cast<std::ptrdiff_t>(shown), text.end(), ' ', kNoBreak);
    std::string lines = wrapped(lead, text, kHelpIndent);
    std::ranges::replace(lines, kNoBreak, ' ');
    return lines;
}

// The group that a word names, as `memory` does "Memory", and `model` and `data` "Model and data"; else that
// of the option of this name, or of the first whose name begins so, as `lora` does --lora-rank; "" if none.
inline std::string group_named(const CLI::App& app, const std::string& word) {
    const std::string wanted = lower(word), option = "--" + wanted;
    for (const std::string& group : app.get_groups()) {
        const std::vector<std::string> words = CLI::detail::split(lower(group), ' ');
        if (lower(group) == wanted || std::ranges::find(words, wanted) != words.end()) return group;
    }
    if (const CLI::Option* named = app.get_option_no_throw(option)) return named->get_group();
    for (const CLI::Option* other : app.get_options())
        if (other->get_name().starts_with(option + "-")) return other->get_group();
    return "";
}

// The aliases of each setting, in a line that begins with the setting.
inline std::string alias_lines() {
    return joined(kAliases, "", [](const Alias& alias) {
        return wrapped("    " + spelled_setting(alias.setting, ""), joined(words_of(alias.names), ", "),
                       kHelpIndent);
    });
}

// The text of --help; `about` is empty, "all", or a group's name. Fails if there is no such group.
inline std::string help_text(const CLI::App& app, const std::string& about) {
    const bool all = about == "all";
    const std::string only = about.empty() || all ? "" : group_named(app, about);
    if (!about.empty() && !all && only.empty()) {
        std::vector<std::string> names = app.get_groups();
        for (std::string& name : names) name = name.substr(0, name.find(' '));
        fail("--help %s: there is no such group: all, or one of %s", printable(about),
             CLI::detail::join(names, ", "));
    }
    std::string text;
    if (only.empty())
        text = "Trains a language model in the memory you have, and says beforehand what it takes.\n";
    for (const std::string& group : app.get_groups()) {
        if (!only.empty() && group != only) continue;
        std::string lines;
        for (const CLI::Option* option : app.get_options()) {
            const bool usual = has_word(kUsualOptions, option->get_name());
            if (option->get_group() != group || (about.empty() && !usual)) continue;
            lines += help_of(*option, about.empty());
        }
        if (!lines.empty()) text += (text.empty() ? "" : "\n") + group + ":\n" + lines;
    }
    if (about.empty())
        return text + "\n" + kHelpExamples +
               "\n--help all says more and lists every option; --help memory and the like those of one "
               "group.\n";
    if (!all) return text;
    text += "\nNames of other tools are understood too, and _ for -:\n" + alias_lines();
    return text + "\n" + kHelpExamples + "\n" + kHelpNotes;
}

// ---- --version

constexpr const char* kVersion = "0.1";

// The commit that was built. The Makefile links it in, so that a new commit compiles nothing again; a build
// without it does not know.
extern "C" __attribute__((weak)) const char llmc_commit[];

// An option, or a key of one, as a shell completes it.
struct Completed {
    std::string name;                  // "--zero"; of a key "--offload"
    std::string key;                   // "weights"
    std::string what;                  // what a value looks like, "DIR"; empty for a flag
    std::vector<std::string> choices;  // "auto", "0", "1"; empty if the value is free
    std::string help;                  // the first sentence

    bool is_key() const { return !key.empty(); }
    bool is_path() const { return what.find("DIR") != what.npos || what.find("FILE") != what.npos; }
};

// The words among which a value like "auto|0|N" lets choose: those without capitals.
inline std::vector<std::string> choices_in(const std::string& value) {
    std::vector<std::string> words;
    for (const std::string& word : CLI::detail::split(value, '|')) {
        const bool plain = std::ranges::all_of(
            word, [](unsigned char c) { return std::islower(c) || std::isdigit(c) || c == '-'; });
        if (plain && !word.empty()) words.push_back(word);
    }
    return words;
}

inline std::vector<Completed> completed_options(const CLI::App& app) {
    std::vector<Completed> all;
    for (const CLI::Option* option : app.get_options()) {
        const std::string name = option->get_name(), text = option->get_description();
        const size_t dot = name.find('.');
        all.push_back({.name = name.substr(0, dot),
                       .key = dot == name.npos ? "" : name.substr(dot + 1),
                       .what = option->get_type_name(),
                       .choices = choices_in(option->get_type_name()),
                       .help = text.substr(0, end_of_sentence(text))});
    }
    return all;
}

// The values that follow an option: its choices, and its keys with an equals sign.
inline std::vector<std::string> completed_values(const std::vector<Completed>& all, const Completed& option) {
    std::vector<std::string> values = option.choices;
    for (const Completed& other : all)
        if (other.is_key() && other.name == option.name) values.push_back(other.key + "=");
    return values;
}

inline std::string bash_completion(const CLI::App& app) {
    const std::vector<Completed> all = completed_options(app);
    std::string names, cases;
    for (const Completed& option : all) {
        if (option.is_key()) continue;
        names += (names.empty() ? "" : " ") + option.name;
        const std::string values = CLI::detail::join(completed_values(all, option), " ");
        if (!values.empty()) cases += "    " + option.name + ") words='" + values + "' ;;\n";
    }
    return "# bash completion of train\n"
           "_train() {\n"
           "  local word=${COMP_WORDS[COMP_CWORD]} words=\n"
           "  case ${COMP_WORDS[COMP_CWORD-1]} in\n" +
           cases +
           "  esac\n"
           "  case $word in -*) words='" +
           names +
           "' ;; esac\n"
           "  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
           "  case ${COMPREPLY[0]} in *=) compopt -o nospace ;; esac\n"
           "}\n"
           "complete -o default -F _train train\n";
}

inline std::string zsh_completion(const CLI::App& app) {
    const auto escaped = [](const std::string& text) {
        std::string written;
        for (const char c : text) {
            if (c == '[' || c == ']' || c == ':' || c == '\\') written += '\\';
            written += c == '\'' ? std::string("'\\''") : std::string(1, c);
        }
        return written;
    };
    const std::vector<Completed> all = completed_options(app);
    std::string text = "#compdef train\n_arguments \\\n";
    for (const Completed& option : all) {
        if (option.is_key()) continue;
        text += "  '" + option.name + "[" + escaped(option.help) + "]";
        const std::string values = CLI::detail::join(completed_values(all, option), " ");
        if (!option.what.empty())
            text += ":" + escaped(option.what) + ":" +
                    (option.is_path() ? "_files"
                     : values.empty() ? ""
                                      : "(" + values + ")");
        text += "' \\\n";
    }
    return text + "  '*:file:_files'\n";
}

// The manual page, as man(7) has it.
inline std::string manual_page(const CLI::App& app) {
    const auto escaped = [](const std::string& text) {
        std::string written;
        for (const char c : text) {
            if (c == '-' || c == '\\') written += '\\';
            written += c == '\\' ? 'e' : c;
        }
        for (size_t line = 0; line != written.npos; line = written.find('\n', line + 1)) {
            const size_t first = line == 0 ? 0 : line + 1;
            if (first < written.size() && (written[first] == '.' || written[first] == '\''))
                written.insert(first, "\\&");
        }
        return written;
    };
    std::string page =
        ".TH TRAIN 1\n.SH NAME\ntrain \\- trains a language model in the memory you have\n"
        ".SH SYNOPSIS\n.B train\n[\\fIoptions\\fR]\n.SH DESCRIPTION\n"
        "Trains and fine\\-tunes GPT\\-2, Llama, Mistral, Qwen and BLOOM, and says beforehand "
        "what that takes, to the byte.\n";
    for (const std::string& group : app.get_groups()) {
        page += ".SH " + escaped(group) + "\n";
        for (const CLI::Option* option : app.get_options()) {
            if (option->get_group() != group) continue;
            const std::string name = option->get_name();
            const size_t dot = name.find('.');
            const std::string lead = dot == name.npos ? name : name.substr(dot + 1) + "=";
            page += std::string(dot == name.npos ? "" : ".RS\n") + ".TP\n\\fB" + escaped(lead) + "\\fR" +
                    (dot == name.npos && !option->get_type_name().empty() ? " " : "") + "\\fI" +
                    escaped(option->get_type_name()) + "\\fR\n" + escaped(described(*option)) + "\n" +
                    (dot == name.npos ? "" : ".RE\n");
        }
    }
    return page + ".SH EXAMPLES AND NOTES\n.nf\n" + escaped(kHelpExamples) + "\n" + escaped(kHelpNotes) +
           ".fi\n";
}
