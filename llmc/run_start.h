// run_start.h - what a run prints before its first step: what its data are, how much of them it will read,
// and what a user might not expect of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "llmc/batches.h"
#include "llmc/dataset.h"
#include "llmc/error.h"
#include "llmc/model_positions.h"
#include "llmc/options.h"
#include "llmc/run_inputs.h"

// Prints the size of the data, and how much of them is read until the last step, or by one validation.
inline void print_data(const Options& o, const RunInputs& in, const Batches& batches, int64_t first_step) {
    const auto number = [](uint64_t n) { return static_cast<unsigned long long>(n); };
    const SequenceLoader& training = *batches.training();
    const uint64_t epoch = training.sequences_per_epoch();
    const Dataset& data = *in.data;
    printf("data: ");
    if (data.is_examples())
        printf("%llu examples, %llu tokens, %llu of them with loss, in %llu sequences of %d, %.1f%% padding",
               number(data.example_count()), number(data.token_count()),
               number(training.tokens_with_loss(0, epoch)), number(epoch), o.seq_len,
               100 * training.padding());
    else
        printf("%llu tokens in %llu sequences of %d", number(data.token_count()), number(epoch), o.seq_len);
    const auto read = static_cast<double>(batches.sequences_after(std::max(o.steps, first_step)));
    printf("; %lld steps read %.0f sequences, %.2f epochs", static_cast<long long>(o.steps), read,
           read / static_cast<double>(epoch));
    if (batches.validation())
        printf("; a validation reads %llu of %llu", number(batches.validation_sequences()),
               number(batches.validation()->sequences_per_epoch()));
    printf("\n");
    for (const Dataset* d : {in.data.get(), in.val_data.get()}) {
        if (d && d->texts_parted() > 0)
            printf("%s: %llu texts are longer than a sequence and go on in others\n",
                   d->stream_name(0).c_str(), number(d->texts_parted()));
        if (d && d->examples_cut() > 0)
            printf("%s: %llu examples are longer than --seq-len %d and were cut to %d tokens\n",
                   d->stream_name(0).c_str(), number(d->examples_cut()), o.seq_len, o.seq_len + 1);
    }
}

// If text or examples are too short to hold out a validation set, says so on stderr.
inline void remark_no_validation(const RunInputs& in, int seq_len) {
    if (!in.data || !in.data->is_text() || in.val_data) return;
    fprintf(stderr, "no validation: %s; it is trained on too\n",
            in.data->is_examples() ? "a tenth of each file's examples is none, or has nothing to learn"
                                   : format("the text's last tenth is no sequence of %d", seq_len).c_str());
}

// Prints what a user might not expect of a run that begins after `first_step` steps. `saves`: it saves what
// it trains.
inline void print_start(const Options& o, const RunInputs& in, int64_t first_step, bool saves) {
    const bool has_adapter = static_cast<bool>(in.adapter), trains = o.steps > first_step;
    if (!o.resume.empty() && o.steps > 0 && !trains)
        printf("%s is at step %lld: of --steps %lld nothing is left to train\n", o.resume.c_str(),
               static_cast<long long>(first_step), static_cast<long long>(o.steps));
    else if (o.has("--resume") && o.resume.empty())
        printf("--resume auto: %s holds no save yet: beginning\n", o.out.c_str());
    if (has_adapter || in.resumed.empty())
        print_longer_positions(o.notes(), in.config, o.rope_scaling, has_adapter);
    if (!trains) return;
    if (o.warmup > o.steps && o.bench.empty())
        printf("--warmup %lld is not over after --steps %lld: the learning rate does not reach --lr %g\n",
               static_cast<long long>(o.warmup), static_cast<long long>(o.steps), o.lr);
    if (o.update_in_backward && o.clip > 0)
        printf("--update-in-backward: the gradient of each block is clipped by its own norm\n");
    if (!saves)
        printf("nothing will be saved%s: no --out\n", !o.merge.empty()         ? " before the merge"
                                                      : !o.export_file.empty() ? " before the export"
                                                                               : "");
}
