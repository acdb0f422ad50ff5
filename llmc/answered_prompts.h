// answered_prompts.h - answers the prompts of a file, several at a time (--prompts), in JSON lines.
#pragma once

#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/drawn_text.h"
#include "llmc/options.h"
#include "llmc/run_inputs.h"
#include "llmc/signals.h"

// Is the source of texts of a Decoding. Answers are written in the order of the prompts, each as soon as
// those before it are. Token i of answer n uses random number (n, i), so that it does not depend on how many
// prompts are answered at a time.
class AnsweredPrompts {
  public:
    // explain() as for DrawnText.
    AnsweredPrompts(const Options& o, const RunInputs& in, std::function<void()> explain)
        : o_(o), in_(in), explain_(std::move(explain)) {}
    AnsweredPrompts(const AnsweredPrompts&) = delete;
    ~AnsweredPrompts() {
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_;
        fprintf(stderr, "%d prompts answered: %d tokens, %.1f tokens/s\n", written_, tokens_,
                tokens_ / took.count());
    }

    std::optional<std::vector<int>> begin_text(int slot) {
        if (interrupted || begun_ == in_.prompts.size()) return std::nullopt;
        const std::vector<int>& prompt = in_.prompts[begun_].tokens;
        const int room = in_.sample_window() - static_cast<int>(prompt.size());
        Answer& answer = answers_[slot];
        answer.number = static_cast<int>(begun_++);
        answer.text.emplace(o_, in_, prompt, answer.number, std::min(o_.sample_tokens, room), false,
                            explain_);
        return prompt;
    }
    int next_token(int slot, std::vector<float> logits) {
        Answer& answer = answers_[slot];
        const int token = answer.text->next(std::move(logits));
        if (interrupted) return -1;
        if (token < 0) finish(answer);
        return token;
    }

  private:
    struct Answer {
        int number = 0;  // of its prompt
        std::optional<DrawnText> text;
    };

    void finish(Answer& answer) {
        nlohmann::ordered_json line = in_.prompts[static_cast<size_t>(answer.number)].line;
        line["answer"] = answer.text->take_all();
        line["tokens"] = answer.text->drawn();
        tokens_ += answer.text->drawn();
        using nlohmann::json;
        finished_[answer.number] = line.dump(-1, ' ', false, json::error_handler_t::replace);
        for (auto next = finished_.find(written_); next != finished_.end(); next = finished_.find(written_)) {
            printf("%s\n", next->second.c_str());
            finished_.erase(next);
            written_++;
        }
    }

    const Options& o_;
    const RunInputs& in_;
    const std::function<void()> explain_;
    size_t begun_ = 0;                     // prompts
    std::map<int, Answer> answers_;        // by slot
    std::map<int, std::string> finished_;  // lines that wait for those before them
    int written_ = 0, tokens_ = 0;
    const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};
