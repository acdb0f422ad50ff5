// run_start.h - what a run prints before its first step: what its data are, how much of them it will read,
// and what a user might not expect of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "llmc/batches.h"
#include "llmc/data_files.h"
#include "llmc/data_tokens.h"
#include "llmc/dataset.h"
#include "llmc/error.h"
#include "llmc/model_positions.h"
#include "llmc/run_config.h"
#include "llmc/run_inputs.h"
#include "llmc/learning_rate.h"
#include "llmc/text.h"

// Says on stderr what of the inputs is not read, not followed or not learnt: fields of examples or prompts;
// settings of generation_config.json that change answers; what ends answers.
inline void remark_inputs(const RunConfig& o, const RunInputs& in) {
    if (!in.unread.empty()) print(stderr, "fields that are not read: %s\n", joined(in.unread, ", "));
    if (o.steps > 0 && in.chat && o.loss_on != "all" && in.chat->end_of_answer() < 0)
        if (const int end = in.chat->end_of_answer(true); end >= 0)
            print(stderr,
                  "the chat template writes %s behind answers, outside of {%% generation %%}: the model "
                  "does not learn to end them\n",
                  in.tokenizer->decode(end));
    // Settings that 0 turns off, and settings that 1 does.
    constexpr const char* kOffAt0 =
        "max_length max_new_tokens min_length min_new_tokens max_time no_repeat_ngram_size bad_words_ids "
        "encoder_no_repeat_ngram_size sequence_bias suppress_tokens begin_suppress_tokens top_h "
        "epsilon_cutoff eta_cutoff forced_bos_token_id forced_eos_token_id watermarking_config "
        "exponential_decay_length_penalty token_healing";
    constexpr const char* kOffAt1 =
        "typical_p num_beams num_return_sequences guidance_scale encoder_repetition_penalty";
    std::vector<std::string> settings;
    for (const auto& [key, value] : in.config.generation.items())
        if (!value.empty() && value != false &&
            ((has_word(kOffAt0, key) && value != 0) || (has_word(kOffAt1, key) && value != 1)))
            settings.push_back(key + " " + printable(value.dump()));
    if (!settings.empty() && o.steps == 0 && (o.only_answers() || !o.prompt.empty()))
        print(stderr, "generation_config.json: not followed: %s\n", joined(settings, ", "));
}

// Prints what is known of the data before the first step. Returns the part about their size, and how much of
// them is read until the last step, or by one validation.
inline std::string print_data(const RunConfig& o, const RunInputs& in, const Batches& batches,
                              int64_t first_step) {
    if (!in.chat_used.description.empty()) print(stdout, "chats: written by %s\n", in.chat_used.description);
    if (in.chat_used.guesses)
        print(stderr,
              "the chat template asks for an answer in another way than it writes one: what is learnt begins "
              "where they differ; --show-example N shows it\n");
    for (const std::string& field : in.chat_used.unwritten)
        print(stderr,
              "chats have \"%s\", but the chat template writes nothing of it (tried with the first such "
              "chat)\n",
              field);
    const SequenceLoader& training = *batches.training();
    const uint64_t epoch = training.sequences_per_epoch();
    const Dataset& data = *in.data;
    std::string text = format("%lu tokens in %lu sequences of %d", data.token_count(), epoch, o.seq_len);
    if (data.is_examples())
        text =
            format("%lu examples, %lu tokens, %lu of them with loss, in %lu sequences of %d, %.1f%% padding",
                   data.example_count(), data.token_count(), training.tokens_with_loss(0, epoch), epoch,
                   o.seq_len, 100 * training.padding());
    const int64_t steps = std::max(o.steps, first_step);
    const auto read = static_cast<double>(batches.sequences_after(steps));
    text += format("; %ld steps read %.0f sequences, %.2f epochs", steps, read,
                   read / static_cast<double>(epoch));
    if (data.is_examples() && o.open.steps && o.epochs == 0) text += " (--epochs or --steps change that)";
    if (batches.validation())
        text += format("; a validation reads %lu of %lu", batches.validation_sequences(),
                       batches.validation()->sequences_per_epoch());
    print(stdout, "data: %s\n", text);
    for (const Dataset* d : {in.data.get(), in.val_data.get()}) {
        if (d && d->texts_parted() > 0)
            print(stdout, "%s: %lu texts are longer than a sequence and go on in others\n", d->stream_name(0),
                  d->texts_parted());
        if (d && d->examples_cut() > 0)
            print(stdout,
                  "%s: %lu examples are longer than --seq-len %d: their ends are cut off and not learnt%s\n",
                  d->stream_name(0), d->examples_cut(), o.seq_len,
                  d->longer_length(o.seq_len, in.most_tokens()));
    }
    return text;
}

// A text of an example with what is learnt of it between two marks.
inline std::string marked_text(const std::vector<int32_t>& tokens, const Tokenizer& tokenizer) {
    std::string text;
    Tokenizer::Decoder decoder(tokenizer, false);
    bool learnt = false;
    for (const int32_t token : tokens) {
        if ((token >= 0) != learnt) text += learnt ? "\u27e7" : "\u27e6";
        learnt = token >= 0;
        text += decoder.next(token_of(token));
    }
    return text + (learnt ? "\u27e7" : "");
}

// --show-example N: prints an example as the model sees it.
inline void print_example(const RunConfig& o, const RunInputs& in) {
    const Dataset& data = in.data && in.data->is_examples() ? *in.data : *in.val_data;
    if (!in.tokenizer) fail("--show-example: the model has no tokenizer");
    ExampleEncoder encoder(*in.tokenizer, in.example_options());
    int64_t number = 0;
    const auto use = [&](std::span<char> line, size_t, const std::string& where) {
        if (++number != o.show_example) return;
        std::vector<int32_t> tokens;
        const JsonExample example = read_example(line, where);
        encoder.encode(example, where, SIZE_MAX, [&](std::span<const int32_t> part, bool) {
            tokens.insert(tokens.end(), part.begin(), part.end());
        });
        // A long text goes on in further sequences. Any other example is cut to one sequence, and the token
        // that this predicts last.
        const size_t all = tokens.size(), most = static_cast<size_t>(o.seq_len) + 1;
        const bool is_cut = all > most && !example.is_text;
        if (is_cut) tokens.resize(most);
        const std::string cut = is_cut ? format(", cut to %zu by --seq-len %d", most, o.seq_len) : "";
        const auto learnt = std::ranges::count_if(tokens, [](int32_t token) { return token >= 0; });
        if (encoder.chat()) print(stdout, "chats: written by %s\n", encoder.chat()->description());
        print(stdout, "%s: %zu tokens%s; the %ld between \u27e6 and \u27e7 are learnt:\n%s\n", where, all,
              cut, learnt, marked_text(tokens, *in.tokenizer));
    };
    for (const std::string& path : data.paths()) {
        const FileReader given(path);
        const auto content = unpacked(given);
        const FileReader& file = content ? *content : given;
        data_kind(file) == DataKind::JsonList ? for_each_element(file, use) : for_each_line(file, use);
    }
    if (number < o.show_example)
        fail("--show-example %ld: the data have %ld examples", o.show_example, number);
}

// If text or examples are too short to hold out a validation set, says so on stderr.
inline void remark_no_validation(const RunInputs& in, int seq_len) {
    if (!in.data || !in.data->is_text() || in.val_data) return;
    print(stderr, "no validation: %s, so all of the data are trained on; --val-data gives other data\n",
          in.data->is_examples() ? "too few examples to hold out a tenth of them"
                                 : format("a tenth of the text is less than --seq-len %d", seq_len));
}

// After a plan, says on stderr which inputs a run would need besides: data, or the model's weights.
inline void remark_what_a_run_needs(const RunConfig& o, const RunInputs& in) {
    if (o.planned_gpu || known_shape(o.model)) return;
    if (!in.data && o.steps > 0 && (o.prompt.empty() || !o.open.steps))
        print(stderr, "a run needs --data, and this plan does not\n");
    if (!parse_new_model(o.model) && !in.gguf && (in.resumed.empty() || in.adapter) && !has_weights(in.model))
        print(stderr, "a run needs the weights of %s, and this plan does not\n", o.model);
}

// Prints which settings of a resumed run are not those of the save, and the learning rate before and after.
inline void print_changes(const RunConfig& o, int64_t first_step, std::optional<double> rate_before) {
    if (o.changed.empty()) return;
    print(stdout, "other settings than those of the save: %s\n",
          joined(o.changed, ", ", [](const auto& setting) { return setting.second; }));
    print(stdout,
          "the learning rate goes on as that of a run of %ld steps with these settings: %.3e in step "
          "%ld%s\n",
          o.steps, learning_rate(o.schedule, first_step, o.steps, o.warmup, o.lr, o.min_lr), first_step + 1,
          rate_before ? format("; it was %.3e in the step before", *rate_before) : "");
}

// Prints what a user might not expect of a run that begins after `first_step` steps. `saves`: it saves what
// it trains.
inline void print_start(const RunConfig& o, const RunInputs& in, int64_t first_step, bool saves) {
    const bool has_adapter = static_cast<bool>(in.adapter), trains = o.steps > first_step;
    if (!o.resume.empty() && o.steps > 0 && !trains)
        print(stdout, "%s is at step %ld of %ld: nothing is left to train\n", o.resume, first_step, o.steps);
    else if (o.begins_anew)
        print(stdout, "--resume auto: %s holds no save yet: beginning\n", o.out);
    if (!o.resume.empty() && trains) print_changes(o, first_step, in.progress->rate);
    if (!in.adapter_is_of.empty() && o.rank.is_first())
        print(stderr, "--adapter %s was trained on %s, and this run uses it on %s\n", o.adapter,
              in.adapter_is_of, o.model);
    if (has_adapter || in.resumed.empty())
        print_longer_positions(o.notes(), in.config, o.rope_scaling, has_adapter);
    const bool does_nothing = o.steps == 0 && !in.val_data && !in.samples() && !saves && o.merge.empty() &&
                              !o.merge_is_there && o.export_file.empty() && o.save_base.empty();
    if (does_nothing)
        print(stderr, "--steps 0 without --val-data, --merge, --export, --out or --prompt: nothing to do\n");
    if (!trains) return;
    const bool validates_at_end_alone =
        o.eval_every > 0 && (o.steps - 1) / o.eval_every == first_step / o.eval_every;
    if ((o.keep_best || o.early_stopping > 0) && validates_at_end_alone)
        print(stdout,
              "%s: the only validation is at the end of the run, after step %ld: --eval-every is %ld\n",
              o.keep_best ? "--keep-best" : "--early-stopping", o.steps, o.eval_every);
    if (o.warmup > o.steps && o.bench.empty())
        print(stdout, "--warmup %ld is not over after %ld steps: the learning rate does not reach --lr %g\n",
              o.warmup, o.steps, o.lr);
    if (o.update_in_backward && o.clip > 0)
        print(stdout, "--update-in-backward: the gradient of each block is clipped by its own norm\n");
    if (!saves)
        print(stdout, "nothing will be saved%s: no --out\n",
              !o.merge.empty()         ? " before the merge"
              : !o.export_file.empty() ? " before the export"
                                       : "");
}
