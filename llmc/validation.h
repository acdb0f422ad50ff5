// validation.h - the loss over the validation data, and what is printed and logged of it. Several ranks share
// the batches; then the sum is made in the order of the batches, so it has the bits of one device's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <vector>

#include "llmc/batches.h"
#include "llmc/device.h"
#include "llmc/error.h"
#include "llmc/ranks_exchange.h"
#include "llmc/metrics.h"
#include "llmc/run_config.h"
#include "llmc/run_model.h"
#include "llmc/tensor.h"

// The sum of the losses that evaluate(number) adds to `loss` (1), over `count` batches. Nothing if the run is
// to stop before the last one.
template <class Evaluate, class Stopping>
std::optional<double> validation_loss(const RunConfig& o, Exchange& exchange, TensorF& loss, Stream stream,
                                      uint64_t count, Evaluate&& evaluate, Stopping&& stopping) {
    const auto loss_on_host = [&] {
        float sum = 0;
        copy_to_host(&sum, loss.data(), sizeof sum, stream);
        return sum;
    };
    fill_zero(loss, stream);
    std::vector<float> losses(count);  // if ranks share the batches: the losses of those that are this rank's
    // Losses by position are added batch by batch, so then every rank evaluates all batches.
    const bool ranks_share = !exchange.is_alone() && !o.validates_by_position;
    const auto ranks = static_cast<uint64_t>(ranks_share ? o.devices : 1);
    for (uint64_t first = 0; first < count; first += ranks) {
        if (stopping()) return std::nullopt;
        const uint64_t number = first + (ranks_share ? static_cast<uint64_t>(o.rank.number) : 0);
        // Blocks that are gathered need all ranks, so a rank without a batch evaluates the last one again.
        if (number >= count && !o.slices_weights()) continue;
        if (ranks_share) fill_zero(loss, stream);
        evaluate(std::min(number, count - 1));
        if (ranks_share && number < count) losses[number] = loss_on_host();
    }
    if (ranks_share) return double{exchange.sum_in_turn(losses)};
    // The ranks decide by it, so they take that of the first one: unlike GPUs may have other last bits.
    const float loss_here = loss_on_host();
    return double{exchange.is_alone() ? loss_here : exchange.gather(std::vector{loss_here})[0]};
}

// Prints and logs the validation loss after `step`. `is_due` says that --eval-every asked for it there, so
// that it counts for --early-stopping. Fails if it is not finite.
inline void report_validation(int64_t step, double loss, bool is_due, const RunConfig& o,
                              const Batches& batches, Metrics& metrics, RunModel& model) {
    if (!std::isfinite(loss)) {
        if (o.steps > 0)
            throw StepError(format("step %ld: the validation loss is %g; the last good save: %s", step, loss,
                                   metrics.last_save));
        model.check_streamed_finite();
        fail("the validation loss is %g", loss);
    }
    if (o.steps > 0)
        print(stdout, "step %5ld validation loss %.6f\n", step, loss);
    else
        print(stdout, "validation loss %.6f, perplexity %.4f: %lu sequences of %d tokens\n", loss,
              std::exp(loss), batches.validation_sequences(), o.seq_len);
    metrics.compare_validation(step, loss, is_due);
    metrics.records.write({{"step", step}, {"val_loss", loss}});
}
