// decoding.h - continues several texts at a time. Each has a KV cache in a slot of its own. A new text is
// processed in pieces of fixed sizes, so that one dry run plans texts of any length; then all texts go on
// together, a row of a batch for each. When one ends, the next one takes its slot. If a text begins like the
// one before it in its slot, as the next turn of a conversation does, what is cached of that is kept; if it
// begins like a text in another slot, that is copied. --prompts answers a file's prompts that way, in JSON
// lines (AnsweredPrompts).
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/arena.h"
#include "llmc/drawn_text.h"
#include "llmc/gpt.h"
#include "llmc/model_config.h"
#include "llmc/run_config.h"
#include "llmc/run_inputs.h"
#include "llmc/sequence_keys.h"
#include "llmc/signals.h"
#include "llmc/tensor.h"

// Runs `tokens`, which follow those in the cache, and adds them to it. Returns the last block's output.
inline TensorX append_tokens(Arena& arena, Stream stream, Gpt& model, const std::vector<int>& tokens,
                             KvCache& cache) {
    const Tensor<int> inputs = tokens_on_device(arena, stream, tokens);
    Rows rows;
    // A soft prompt's rows go before the first token.
    const bool has_prompt_rows = cache.length == 0 && model.prompt_len() > 0;
    if (tokens.size() == 1 && !has_prompt_rows) rows.rows_of_texts = 1;
    TensorX x = model.forward_only(inputs, rows, &cache);
    cache.length += static_cast<int>(x.rows());
    return x;
}

class Decoding {
  public:
    // `texts` at a time, each of at most `positions` tokens: its prompt and what is drawn.
    Decoding(Arena& arena, const Stream& stream, const ModelConfig& config, Gpt& model, int texts,
             int positions)
        : arena_(arena),
          stream_(stream),
          config_(config),
          model_(model),
          slots_(static_cast<size_t>(texts)),
          rows_(model.prompt_len() + positions) {}

    // Continues all texts until there are no more of them. Runs inside the arena. A dry run needs no texts.
    void run(TextSource* texts) {
        Range range("generate");
        texts_ = texts;
        take_caches();
        arena_.repeat(INT_MAX, [&] {
            auto slot = slots_.begin();
            arena_.repeat(static_cast<int>(slots_.size()), [&] {
                fill(*slot++);
                return true;
            });
            if (!arena_.rehearsing() && std::ranges::none_of(slots_, &Slot::goes_on)) return false;
            arena_.repeat(INT_MAX, [&] { return slots_.size() == 1 ? step_alone() : step_together(); });
            return true;
        });
    }

  private:
    struct Slot {
        KvCache cache;
        std::vector<int> tokens;   // in the cache
        std::vector<int> pending;  // those that follow; empty if the text has ended
        bool goes_on() const { return !pending.empty(); }
    };

    // Rows of a piece, the largest first. The last piece of a text is padded.
    static constexpr std::array kPieces = {512, 256, 128, 64, 32, 16, 8};
    // Each piece reads all weights once, which takes about as long as this many rows.
    static constexpr size_t kRowsToReadWeights = 16;
    // Whether a piece of kPieces[i] rows comes next if `left` tokens are left: if it is full, or if
    // padding it takes no longer than smaller pieces do.
    static bool is_next_piece(size_t i, size_t left) {
        const auto rows = static_cast<size_t>(kPieces[i]);
        return left > 0 && (left >= rows || i + 1 == kPieces.size() ||
                            rows + kRowsToReadWeights <= rows_to_process(i + 1, left));
    }
    // What pieces of kPieces[i] and fewer rows take for `left` tokens.
    static size_t rows_to_process(size_t i, size_t left) {
        if (left == 0) return 0;
        if (!is_next_piece(i, left)) return rows_to_process(i + 1, left);
        const auto rows = static_cast<size_t>(kPieces[i]);
        return rows + kRowsToReadWeights + rows_to_process(i, left - std::min(left, rows));
    }

    int number_of(const Slot& slot) const { return static_cast<int>(&slot - slots_.data()); }
    int prompt_len() const { return static_cast<int>(model_.prompt_len()); }

    // Takes the caches, and puts a soft prompt's keys and values into each.
    void take_caches() {
        const auto texts = static_cast<int64_t>(slots_.size());
        for (int l = 0; l < config_.layers; l++)
            caches_.push_back(
                arena_.take<floatX>("kv_cache", {texts * rows_, 2 * config_.layer(l).kv_width()}));
        for (Slot& slot : slots_)
            for (const TensorX& all : caches_)
                slot.cache.layers.push_back(all.rows_at(number_of(slot) * rows_, rows_));
        if (prompt_len() == 0) return;
        append_tokens(arena_, stream_, model_, {0}, slots_[0].cache);  // the token's row is overwritten
        for (Slot& slot : slots_) {
            if (&slot != slots_.data()) copy_keys(slot, slots_[0], prompt_len());
            slot.cache.length = prompt_len();
        }
    }
    // Copies the first rows of a slot's keys and values to another slot.
    void copy_keys(Slot& to, const Slot& from, int64_t rows) {
        for (size_t l = 0; l < caches_.size(); l++) {
            const int64_t columns = caches_[l].columns();
            copy_rows_on_device(to.cache.layers[l].data(), columns, from.cache.layers[l].data(), columns,
                                columns, rows, stream_);
        }
    }

    // Begins texts in a free slot until one goes on after its first tokens, or there are no more.
    void fill(Slot& slot) {
        arena_.repeat(INT_MAX, [&] {
            if (!arena_.rehearsing() && (slot.goes_on() || !begin_text(slot))) return false;
            process_text(slot);
            return true;
        });
    }
    // Gives a slot its next text. Returns false if there is none.
    bool begin_text(Slot& slot) {
        const std::optional<std::vector<int>> text = texts_->begin_text(number_of(slot));
        if (!text) return false;
        // The last token is processed in any case: the next one follows from its logits.
        const auto kept =
            std::mismatch(slot.tokens.begin(), slot.tokens.end(), text->begin(), text->end() - 1).second;
        slot.pending.assign(kept, text->end());
        slot.tokens.assign(text->begin(), kept);
        slot.cache.length = prompt_len() + static_cast<int>(slot.tokens.size());
        return true;
    }

    // Moves `count` pending tokens, which were processed, to those in the cache.
    static void processed(Slot& slot, size_t count) {
        const auto end = slot.pending.begin() + static_cast<std::ptrdiff_t>(count);
        slot.tokens.insert(slot.tokens.end(), slot.pending.begin(), end);
        slot.pending.erase(slot.pending.begin(), end);
    }
    // If all tokens of the text are processed, chooses the next one from row `row` of the logits.
    void choose(Slot& slot, const TensorX& logits, int64_t row) {
        if (arena_.rehearsing() || slot.goes_on()) return;
        const int token =
            texts_->next_token(number_of(slot), logits_on_host(logits, row, config_.vocabulary, stream_));
        if (token >= 0) slot.pending = {token};
    }

    // Processes a text that begins, piece by piece, and chooses the token that follows it. Tokens
    // behind which the cache has no room for the smallest piece stay pending: steps process them one by one.
    void process_text(Slot& slot) {
        take_shared_beginning(slot);
        size_t left = slot.pending.size() > 1 ? slot.pending.size() : 0;
        const bool begins = left > 0;
        TensorX last = arena_.take<floatX>("last_row", {1, config_.channels});  // of the latest piece
        for (size_t i = 0; i < kPieces.size(); i++) {
            const int rows = kPieces[i];
            if (rows > rows_ - prompt_len()) continue;
            arena_.repeat(INT_MAX, [&] {
                if (arena_.rehearsing())
                    slot.cache.length = static_cast<int>(rows_) - rows;
                else if (!is_next_piece(i, left) || slot.cache.length + rows > rows_)
                    return false;
                left -= process_piece(slot, rows, last);
                return true;
            });
        }
        arena_.repeat(1, [&] {
            if (!arena_.rehearsing() && (!begins || slot.goes_on())) return false;
            choose(slot, model_.last_logits(last), 0);
            return true;
        });
    }
    // Processes as many pending tokens as a piece of `rows` has, or all that there are. Returns how many;
    // `last` becomes the last block's output for the last of them.
    size_t process_piece(Slot& slot, int rows, TensorX& last) {
        std::vector<int> tokens(slot.pending);
        const size_t count = std::min(tokens.size(), static_cast<size_t>(rows));
        tokens.resize(static_cast<size_t>(rows));  // the keys of those behind the text will be overwritten
        const int before = slot.cache.length;
        const TensorX x = append_tokens(arena_, stream_, model_, tokens, slot.cache);
        const int64_t C = x.columns();
        copy_rows_on_device(last.data(), C, x.at((static_cast<int64_t>(count) - 1) * C), C, C, 1, stream_);
        slot.cache.length = before + static_cast<int>(count);
        processed(slot, count);
        return count;
    }
    // Copies the keys and values of a text's beginning from another slot, if its text begins in the same way
    // and that leaves less to process: the prompts of a file often share the system's message.
    void take_shared_beginning(Slot& slot) {
        if (slot.pending.size() < 2) return;
        std::vector<int> text = slot.tokens;
        text.insert(text.end(), slot.pending.begin(), slot.pending.end());
        const auto shared_with = [&](const Slot& other) {
            const auto end =
                std::mismatch(text.begin(), text.end() - 1, other.tokens.begin(), other.tokens.end());
            return end.first - text.begin();
        };
        // A single token is left to the next step, and needs no piece.
        const auto to_process = [](size_t left) { return left > 1 ? rows_to_process(0, left) : 0; };
        const auto best = std::ranges::max_element(slots_, {}, shared_with);
        const auto shared = shared_with(*best);
        const auto left = text.size() - static_cast<size_t>(shared);
        if (to_process(left) >= to_process(slot.pending.size())) return;
        copy_keys(slot, *best, prompt_len() + shared);
        slot.tokens.assign(text.begin(), text.begin() + shared);
        slot.pending.assign(text.begin() + shared, text.end());
        slot.cache.length = prompt_len() + static_cast<int>(shared);
    }

    // Continues a single text by one token. Returns whether it goes on.
    bool step_alone() {
        Slot& slot = slots_[0];
        if (arena_.rehearsing()) slot.cache.length = static_cast<int>(rows_) - 1;
        const int token = slot.goes_on() ? slot.pending[0] : 0;
        const TensorX x = append_tokens(arena_, stream_, model_, {token}, slot.cache);
        const TensorX logits = model_.last_logits(x);
        if (arena_.rehearsing()) return false;
        processed(slot, 1);
        choose(slot, logits, 0);
        return slot.goes_on();
    }

    // Continues all texts by one token. Their rows come first; those of free slots follow and are not used.
    // Returns false if a text has ended, whose slot is then free for another one.
    bool step_together() {
        std::vector<Slot*> by_row;
        for (Slot& slot : slots_) by_row.push_back(&slot);
        std::stable_partition(by_row.begin(), by_row.end(), [](const Slot* slot) { return slot->goes_on(); });
        const auto count = std::ranges::count_if(slots_, &Slot::goes_on);
        std::vector<int> tokens, positions;
        KvCache together;
        together.length = 1;  // these tokens follow others
        for (Slot* slot : by_row) {
            if (arena_.rehearsing()) slot->cache.length = static_cast<int>(rows_) - 1;
            tokens.push_back(slot->goes_on() ? slot->pending[0] : 0);
            positions.push_back(slot->cache.length);  // in a free slot nothing reads what is behind its text
            together.each.push_back({&slot->cache, positions.back()});
        }
        const Tensor<int> inputs = tokens_on_device(arena_, stream_, tokens);
        Documents documents;
        documents.positions = tokens_on_device(arena_, stream_, positions);
        Rows rows;
        rows.documents = &documents;
        rows.rows_of_texts = arena_.rehearsing() ? static_cast<int64_t>(slots_.size()) : count;
        const TensorX x = model_.forward_only(inputs, rows, &together);
        const TensorX logits = model_.logits_of(x, rows);
        if (arena_.rehearsing()) return false;
        bool all_go_on = true;
        for (int64_t row = 0; row < count; row++) {
            Slot& slot = *by_row[static_cast<size_t>(row)];
            slot.cache.length++;
            processed(slot, 1);
            choose(slot, logits, row);
            all_go_on = all_go_on && slot.goes_on();
        }
        return all_go_on;
    }

    Arena& arena_;
    const Stream& stream_;
    const ModelConfig& config_;
    Gpt& model_;
    TextSource* texts_ = nullptr;
    std::vector<TensorX> caches_;  // of each layer: (texts * rows_, 2 kv_width())
    std::vector<Slot> slots_;
    int64_t rows_;  // of a slot in a cache
};

// The prompts of a file, as a Decoding's source of texts. Answers are written in the order of the prompts,
// each as soon as those before it are; at the end of a run that was interrupted, all that are complete. Token
// i of answer n uses random number (n, i), so that random numbers do not depend on how many prompts are
// answered at a time.
class AnsweredPrompts : public TextSource {
  public:
    // explain() as for DrawnText.
    AnsweredPrompts(const RunConfig& o, const RunInputs& in, std::function<void()> explain)
        : o_(o), in_(in), explain_(std::move(explain)), window_(in.sample_window()) {}
    AnsweredPrompts(const AnsweredPrompts&) = delete;
    ~AnsweredPrompts() override {
        for (const auto& [number, line] : finished_) write(line);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_;
        print(stderr, "%d prompts answered: %d tokens, %.1f tokens/s\n", written_, tokens_,
              tokens_ / took.count());
    }

    std::optional<std::vector<int>> begin_text(int slot) override {
        if (interrupted || begun_ == in_.prompts.size()) return std::nullopt;
        const std::vector<int>& prompt = in_.prompts[begun_].tokens;
        const int room = window_ - static_cast<int>(prompt.size());
        Answer& answer = answers_[slot];
        answer.number = static_cast<int>(begun_++);
        answer.text.emplace(o_, in_, prompt, answer.number, std::min(o_.sample_tokens, room), false,
                            explain_);
        return prompt;
    }
    int next_token(int slot, std::vector<float> logits) override {
        Answer& answer = answers_[slot];
        const int token = answer.text->next(std::move(logits));
        if (token < 0) finish(answer);
        return interrupted ? -1 : token;
    }

  private:
    struct Answer {
        int number = 0;  // of its prompt
        std::optional<DrawnText> text;
    };

    // The prompt's line with the answer in it.
    std::string line_of(Answer& answer) const {
        nlohmann::ordered_json line = in_.prompts[static_cast<size_t>(answer.number)].line;
        line["answer"] = answer.text->take_all();
        line["tokens"] = answer.text->drawn();
        std::string text = line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
        text += '\n';
        return text;
    }
    void finish(Answer& answer) {
        finished_[answer.number] = line_of(answer);
        tokens_ += answer.text->drawn();
        for (auto next = finished_.find(written_); next != finished_.end(); next = finished_.find(written_)) {
            write(next->second);
            finished_.erase(next);
        }
    }
    void write(const std::string& line) {
        fputs(line.c_str(), stdout);
        written_++;
    }

    const RunConfig& o_;
    const RunInputs& in_;
    const std::function<void()> explain_;
    const int window_;                     // of tokens
    size_t begun_ = 0;                     // prompts
    std::map<int, Answer> answers_;        // by slot
    std::map<int, std::string> finished_;  // lines that wait for those before them
    int written_ = 0, tokens_ = 0;
    const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};
