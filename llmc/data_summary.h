// data_summary.h - prints, before the first step, what the training data are and how much of them the run
// will read.
#pragma once

#include <cstdint>
#include <cstdio>

#include "llmc/dataset.h"
#include "llmc/error.h"
#include "llmc/options.h"
#include "llmc/run_inputs.h"

// The number of sequences that a run reads. `training` counts repeats when the data are read more than once;
// `validation` is for one validation.
struct SequencesRead {
    double training;
    uint64_t validation;
};

// Prints the size of the data and how much of them is read. `validation` is empty if there is none.
inline void print_data(const Options& o, const RunInputs& inputs, const SequenceLoader& training,
                       const SequenceLoader* validation, const SequencesRead& read) {
    const auto number = [](uint64_t n) { return static_cast<unsigned long long>(n); };
    const uint64_t epoch = training.sequences_per_epoch();
    const Dataset& data = *inputs.data;
    printf("data: ");
    if (data.is_examples())
        printf("%llu examples, %llu tokens, %llu of them with loss, in %llu sequences of %d, %.1f%% padding",
               number(data.example_count()), number(data.token_count()),
               number(training.tokens_with_loss(0, epoch)), number(epoch), o.seq_len,
               100 * training.padding());
    else
        printf("%llu tokens in %llu sequences of %d", number(data.token_count()), number(epoch), o.seq_len);
    printf("; %lld steps read %.0f sequences, %.2f epochs", static_cast<long long>(o.steps), read.training,
           read.training / static_cast<double>(epoch));
    if (validation)
        printf("; a validation reads %llu of %llu", number(read.validation),
               number(validation->sequences_per_epoch()));
    printf("\n");
    for (const Dataset* d : {inputs.data.get(), inputs.val_data.get()}) {
        if (d && d->texts_parted() > 0)
            printf("%s: %llu texts are longer than a sequence and go on in others\n",
                   d->stream_name(0).c_str(), number(d->texts_parted()));
        if (d && d->examples_cut() > 0)
            printf("%s: %llu examples are longer than --seq-len %d and were cut to %d tokens\n",
                   d->stream_name(0).c_str(), number(d->examples_cut()), o.seq_len, o.seq_len + 1);
    }
}

// If text or examples are too short to hold out a validation set, says so on stderr.
inline void remark_no_validation(const RunInputs& inputs, int seq_len) {
    if (!inputs.data || !inputs.data->is_text() || inputs.val_data) return;
    fprintf(stderr, "no validation: %s; it is trained on too\n",
            inputs.data->is_examples()
                ? "a tenth of each file's examples is none, or has nothing to learn"
                : format("the text's last tenth is no sequence of %d", seq_len).c_str());
}
