// chat.h - a conversation in the terminal (--chat): reads what the user says, and shows the model's answers
// as they are drawn.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/data_json_lines.h"
#include "llmc/drawn_text.h"
#include "llmc/error.h"
#include "llmc/line_editor.h"
#include "llmc/run_config.h"
#include "llmc/run_inputs.h"
#include "llmc/signals.h"

constexpr const char* kChatHelp =
    "/reset         forgets the conversation\n"
    "/system TEXT   sets the system message (none without TEXT), and begins anew\n"
    "/help          prints this\n"
    "/exit, Ctrl-D  ends; Ctrl-C stops an answer, or ends where none is written\n";

// The texts of a Decoding with one slot.
class ChatSession : public TextSource {
  public:
    // explain() as for DrawnText.
    ChatSession(const RunConfig& o, const RunInputs& in, std::function<void()> explain)
        : o_(o), in_(in), window_(in.sample_window()), explain_(std::move(explain)) {
        signals_of_conversation();
        if (lines_.is_terminal()) fputs("/help lists the commands, Ctrl-D ends\n", stderr);
    }
    ChatSession(const ChatSession&) = delete;

    // Reads what the user says. Returns the tokens of the conversation up to the model's answer, or nothing
    // at its end.
    std::optional<std::vector<int>> begin_text(int) override {
        while (std::optional<std::string> line = interrupted ? std::nullopt : lines_.read("> ")) {
            const bool is_long = line->size() > in_.longest_text();
            if (is_long) print(stderr, "that is too long: it has more than %zu bytes\n", line->size() - 1);
            if (is_long || (line->starts_with('/') ? !obey(*line) : line->empty())) continue;
            if (line->starts_with('/')) break;
            messages_.push_back(said("user", *line));
            std::vector<int> tokens = tokens_of_conversation();
            if (tokens.empty()) continue;
            const int room = window_ - static_cast<int>(tokens.size());
            const int most = o_.limits_answers ? std::min(o_.sample_tokens, room) : room;
            answer_.emplace(o_, in_, tokens, turn_++, most, false, explain_);
            output_.emplace();
            said_.clear();
            began_ = std::chrono::steady_clock::now();
            stop_answer = 0;
            is_answering = 1;
            return tokens;
        }
        return std::nullopt;
    }

    // The next token of the answer, which is shown as far as it is certain.
    int next_token(int, std::vector<float> logits) override {
        const int token = answer_->next(std::move(logits));
        show(answer_->take());
        if (token >= 0 && !stop_answer && !interrupted) return token;
        end_answer();
        return -1;
    }

  private:
    // Obeys a command. Returns true if it ends the conversation.
    bool obey(const std::string& line) {
        const size_t end = std::min(line.find(' '), line.size());
        const std::string command = line.substr(0, end), rest = line.substr(std::min(end + 1, line.size()));
        if (command == "/exit" || command == "/quit" || command == "/bye") return true;
        if (command == "/reset") {
            begin_again();
        } else if (command == "/system") {
            system_ = rest;
            begin_again();
        } else {
            if (command != "/help") print(stderr, "%s: there is no such command\n", printable(command));
            fputs(kChatHelp, stderr);
        }
        return false;
    }
    void begin_again() {
        messages_.clear();
        if (!system_.empty()) messages_.push_back(said("system", system_));
    }

    // fitting_tokens(). If the format has no such conversation, says so, and forgets the last message.
    std::vector<int> tokens_of_conversation() {
        try {
            return fitting_tokens();
        } catch (const UserError& error) {
            print(stderr, "%s\n", error.what());
            messages_.pop_back();
            return {};
        }
    }
    // The tokens of the conversation. If they leave no room for an answer, the oldest messages are forgotten;
    // if not even the last one fits, that is, and there are no tokens.
    std::vector<int> fitting_tokens() {
        const size_t first = messages_[0].role() == "system";
        for (bool forgot = false;; forgot = true) {
            std::vector<int> tokens = in_.conversation_tokens({messages_});
            const bool fits = static_cast<int>(tokens.size()) < window_;
            if (fits && forgot)
                fputs("(the beginning of the conversation does not fit: forgotten)\n", stderr);
            if (fits) return tokens;
            if (messages_.size() < first + 3) {
                print(stderr, "that is too long: with it the conversation has %zu tokens, and %d have room\n",
                      tokens.size(), window_ - 1);
                messages_.pop_back();
                return {};
            }
            const auto oldest = messages_.begin() + static_cast<std::ptrdiff_t>(first);
            messages_.erase(oldest, oldest + 2);
        }
    }

    void show(std::string text) {
        if (said_.empty()) text.erase(0, std::min(text.find_first_not_of(" \n"), text.size()));
        said_ += text;
        output_->write(text);
    }
    void end_answer() {
        is_answering = 0;
        show(answer_->take_all());
        output_->finish(stop_answer ? "...\n" : "\n");
        messages_.push_back(said("assistant", said_));
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_;
        if (lines_.is_terminal())
            print(stderr, "(%d tokens, %.1f tokens/s)\n", answer_->drawn(), answer_->drawn() / took.count());
    }

    const RunConfig& o_;
    const RunInputs& in_;
    const int window_;  // the most tokens of the conversation
    const std::function<void()> explain_;
    LineReader lines_{in_.longest_text()};
    std::string system_;
    std::vector<Message> messages_;
    std::optional<DrawnText> answer_;
    std::optional<TextOutput> output_;
    std::string said_;  // of the answer
    int turn_ = 0;
    std::chrono::steady_clock::time_point began_;
};
