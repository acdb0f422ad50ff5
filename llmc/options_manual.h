// options_manual.h - the manual page and the completions of shells, made from the declared options. `make
// install` writes them with --help man, --help bash and --help zsh.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <string>
#include <vector>

#include "llmc/options_help.h"

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
        const bool plain = std::all_of(word.begin(), word.end(), [](unsigned char c) {
            return std::islower(c) || std::isdigit(c) || c == '-';
        });
        if (plain && !word.empty()) words.push_back(word);
    }
    return words;
}

inline std::vector<Completed> completed_options(const CLI::App& app) {
    std::vector<Completed> all;
    for (const CLI::Option* option : app.get_options()) {
        const std::string name = option->get_name(), text = option->get_description();
        const size_t dot = name.find('.'), end = text.find(". ");
        all.push_back({.name = name.substr(0, dot),
                       .key = dot == name.npos ? "" : name.substr(dot + 1),
                       .what = option->get_type_name(),
                       .choices = choices_in(option->get_type_name()),
                       .help = text.substr(0, std::min(end, text.find_last_not_of('.') + 1))});
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
