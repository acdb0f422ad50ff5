// plan_gpu.h - "will it fit my card?": --plan --gpu NAME. What the search may choose for a GPU that need not
// be in this machine, and what is said if nothing fits it. plan_report.h has the answer if something does.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/run_config.h"
#include "llmc/plan_free_memory.h"
#include "llmc/plan_report.h"
#include "llmc/plan_settings.h"
#include "llmc/text.h"

// True if the plan should choose settings for the whole memory of the GPU of --gpu: without --memory, and
// unless an option asks for something that --memory would choose.
inline bool fills_planned_gpu(const RunConfig& o) {
    const bool places_some_inputs = o.offloaded_inputs > 0;
    return o.planned_gpu && o.memory.empty() && o.open.recompute && o.steps > 0 && o.batch > 0 &&
           o.bench.empty() && !places_some_inputs;
}

// The options with the GPU's memory as --memory; `with_host`: and with unlimited memory of its host.
inline RunConfig filling_planned_gpu(RunConfig o, bool with_host) {
    o.fills_gpu = true;
    o.memory = format("%zuMiB", usable_memory_of(*o.planned_gpu).bytes >> 20);
    if (with_host) o.host_memory = kAnyHostMemory;
    return o;
}

// What would take less memory than these options, as far as they leave it open; `smallest` are the ones that
// take the least of those that were tried. Devices share the optimizer's state, and a frozen model's weights,
// only where they are on the devices.
inline std::string what_takes_less(const RunConfig& o, const RunConfig& smallest) {
    std::vector<std::string> all;
    const bool share_more =
        smallest.state == "device" && (smallest.weights == "device" || !o.trains_adapter());
    if (!o.trains_adapter() && !parse_new_model(o.model)) all.push_back("--train lora");
    if (o.trains_adapter() && o.base.empty() && !RunInputs::is_gguf(o.model)) all.push_back("--base nf4");
    if (o.batch * o.own_micro_batches() > 1) all.push_back("a smaller --batch");
    if (!o.auto_length) all.push_back("a shorter --seq-len");
    if (share_more && o.zero != "0") all.push_back("more --devices");
    all.push_back("a smaller --model");
    std::string text = all[0];
    for (size_t i = 1; i < all.size(); i++) text += (i + 1 < all.size() ? ", " : " or ") + all[i];
    return text;
}

// Fails because a run that takes `least` bytes of a GPU and `pinned` of its host, with `options`, does not
// fit the one of --gpu. What --memory may choose was all tried; `smallest` is the configuration with the
// least.
[[noreturn]] inline void fail_to_fit_gpu(const RunConfig& given, const RunConfig& smallest, size_t least,
                                         size_t pinned, const std::string& options) {
    const std::string others = gpus_with_room(least - std::min(least, context_bytes_of(given)), pinned);
    const bool several = given.devices > 1;
    const KnownGpu& gpu = *given.planned_gpu;
    fail(
        "this does not fit %s %s: of %s %.1f GiB a run may use %.1f, and this one needs at least %.1f (%s). "
        "Less is needed with %s.%s",
        several ? format("%d GPUs", given.devices) : "the GPU", gpu.name, several ? "each one's" : "its",
        gpu.memory, gibibytes(usable_memory_of(gpu).bytes), gibibytes(least), options,
        what_takes_less(given, smallest), others.empty() ? "" : (" " + others + "."));
}
