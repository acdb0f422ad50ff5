// plan_gpu.h - the answer to "will it fit my card?": --plan --gpu NAME. Whether a run fits a GPU that need
// not be in this machine, and what would; how fast it would be; and what that costs.
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

// The memory that a run may take of the GPU that plans are for: a display and other programs keep 5%.
inline FreeMemory usable_memory_of(const KnownGpu& gpu) {
    return with_reserve(free_memory_of(gpu), cuda_context_bytes(gpu));
}

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

// " with 12.3 GiB of the host's memory", if a run takes more than a little of it.
inline std::string with_host_memory(size_t pinned) {
    return pinned > size_t{1} << 30 ? format(" with %.1f GiB of the host's memory", gibibytes(pinned)) : "";
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
        several ? format("%d GPUs", given.devices).c_str() : "the GPU", gpu.name,
        several ? "each one's" : "its", gpu.memory, gibibytes(usable_memory_of(gpu).bytes), gibibytes(least),
        options.c_str(), what_takes_less(given, smallest).c_str(),
        others.empty()
            ? ""
            : format(" GPUs that have room%s: %s.", with_host_memory(pinned).c_str(), others.c_str())
                  .c_str());
}

// What is paid for fitting, in words. A machine has the host memory, files and disk of all its ranks; each
// GPU has a link of its own.
inline std::string costs_of_fitting(const MemoryReport& r, int ranks_on_a_machine) {
    const auto ranks = static_cast<size_t>(ranks_on_a_machine);
    std::string costs;
    const auto add = [&](const std::string& cost) { costs += (costs.empty() ? "" : "; ") + cost; };
    const auto moved = [&](Route route) { return r.moved[route]; };
    if (!r.choice.empty()) {
        const double slower = r.choice[0].slower;
        add(slower < 0.001 ? "a step takes no longer than if the GPU could keep everything"
            : slower < 1
                ? format("a step takes %.1f%% longer than if the GPU could keep everything", 100 * slower)
                : format("a step takes %.1f times as long as if the GPU could keep everything", 1 + slower));
    }
    const auto add_gib = [&](size_t bytes, const char* of) {
        if (const std::string n = format("%.1f", gibibytes(bytes)); n != "0.0") add(n + " GiB of " + of);
    };
    add_gib(r.pinned_on_a_machine(), ranks > 1 ? "each host's memory, pinned" : "the host's memory, pinned");
    add_gib(ranks * r.in_files(), ranks > 1 ? "files on each host" : "files");
    if (const double link = moved(Route::FromHost) + moved(Route::ToHost); link > 0)
        add(gigabytes(link) + (ranks > 1 ? " over each GPU's link" : " over the link") +
            " to the host in each step");
    const auto all_ranks = [&](Route route) { return static_cast<double>(ranks) * moved(route); };
    if (moved(Route::DiskRead) > 0)
        add(gigabytes(all_ranks(Route::DiskRead)) + " read from the disk in each step");
    if (moved(Route::DiskWrite) > 0) add(gigabytes(all_ranks(Route::DiskWrite)) + " written to it");
    return costs;
}

// Prints the lines with which the plan for a named GPU begins: whether it fits; for a training, how fast it
// is; and what fitting costs, if anything was chosen.
inline void print_gpu_answer(FILE* to, const RunConfig& o, const MemoryReport& r) {
    const size_t room = usable_memory_of(*o.planned_gpu).bytes;
    const bool fits = r.total() <= room;
    const char* const trains = o.steps == 0          ? "a validation"
                               : o.train == "lora"   ? "LoRA"
                               : o.train == "prompt" ? "a soft prompt"
                               : o.trains_adapter()  ? "training the adapter"
                                                     : "full training";
    const std::string gpu = o.devices > 1 ? format("each of %d GPUs %s", o.devices, o.planned_gpu->name)
                                          : format("the %s", o.planned_gpu->name);
    print(to, "%s %s: %s with %d x %d tokens at a time takes %.2f GiB of the %.2f that a run may use",
          fits ? "fits" : "does not fit", gpu.c_str(), trains, r.batch, r.seq_len, gibibytes(r.total()),
          gibibytes(room));
    const size_t pinned = r.pinned_on_a_machine();
    if (fits && pinned > size_t{1} << 30)
        print(to, ", and %.1f GiB of %s host's memory", gibibytes(pinned), o.machines > 1 ? "each" : "the");
    if (const std::string others = fits ? "" : gpus_with_room(r.total() - r.context, r.all_pinned());
        !others.empty())
        print(to, "; GPUs that have room%s: %s", with_host_memory(r.all_pinned()).c_str(), others.c_str());
    if (!fits && o.steps > 0 && !o.open.recompute)
        print(to, "; without --recompute, the plan chooses what to recompute and to offload");
    print(to, "\n");
    if (r.seconds > 0)
        print(to, "about %.*f tokens/s, %s for a step of %.0f tokens, by the GPU's nominal rates\n",
              r.tokens() / r.seconds < 10 ? 2 : 0, r.tokens() / r.seconds, seconds_text(r.seconds).c_str(),
              r.tokens());
    if (const std::string costs = costs_of_fitting(r, o.devices / o.machines); !costs.empty())
        print(to, "cost of fitting: %s\n", costs.c_str());
    print(to, "\n");
}

// What --plan json says of the named GPU: its memory, how much of that a run may use, and whether this run
// fits.
inline nlohmann::ordered_json gpu_answer_json(const KnownGpu& gpu, const MemoryReport& r) {
    const size_t room = usable_memory_of(gpu).bytes;
    return {
        {"name", gpu.name}, {"bytes", memory_of(gpu)}, {"usable_bytes", room}, {"fits", r.total() <= room}};
}
