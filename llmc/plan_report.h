// plan_report.h - the memory report: what every buffer takes, when it is born and when it dies, as text or as
// JSON; and the answer of --plan --gpu: whether a run fits a GPU, how fast it is, and what that costs.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/free_memory.h"
#include "llmc/gpus.h"
#include "llmc/rates.h"
#include "llmc/run_config.h"
#include "llmc/step_plan.h"

// A setting that --memory chose or could have chosen, with what it changes of the given options, as options.
struct MemoryChoice : MemorySetting {
    std::string formats, placements;  // of the state; of what is offloaded and shared
    size_t bytes;                     // in all
    double seconds;                   // of a step, by estimate
    double slower;                    // than the fastest configuration there is: 0.1 is 10%

    std::string text() const;
};

// What was chosen for a run, as its report prints it: by --memory, followed by its neighbours; by --batch
// auto; by --seq-len auto.
struct Choices {
    std::vector<MemoryChoice> memory;
    std::string batch, length;
    bool length_needs_offloading = false;         // more than the options ask for
    std::optional<RunConfig> smallest;            // if nothing fits --memory: the options that take the least
    std::shared_ptr<const RunConfig> for_length;  // what --seq-len auto has chosen for the length already
};

// Memory that a run takes, or may take, beside the device's: pinned host memory, and files of its own.
struct BesideDevice {
    size_t pinned = SIZE_MAX, files = SIZE_MAX;
    bool fits(const BesideDevice& space) const { return pinned <= space.pinned && files <= space.files; }
};

// The cost of all calls of one kind of operation, in a micro-batch and in the update; for estimates on paper.
struct OperationCost {
    double calls = 0, flops = 0, bytes = 0, seconds = 0;
};
using OperationCosts = std::map<std::string, OperationCost>;

inline void add_costs(OperationCosts& costs, const std::vector<Work>& work, const Rates& rates) {
    for (const Work& w : work) {
        OperationCost& of = costs[w.text()];
        of.calls += w.calls;
        of.flops += w.flops;
        of.bytes += w.bytes;
        of.seconds += rates.seconds(w);
    }
}

// What a rank of several devices sends to the others in a step, and receives from them; and how long that
// takes by estimate.
struct RanksReport {
    int devices = 1, on_a_machine = 1;
    std::string zero;                                     // what each of them keeps
    std::array<double, std::size(kExchanged)> sent = {};  // bytes, by content
    double sent_to_machines = 0;                          // how many of these leave the machine
    RankLinks links;
    double link_rate = 0;                    // bytes/s of the link of a rank
    double seconds = 0, waited_seconds = 0;  // of exchanges, and those of them that a step waits for

    double all_sent() const { return std::accumulate(sent.begin(), sent.end(), 0.0); }
};

struct MemoryReport : OutsideDevice, MemorySetting {
    std::string model, device, precision;
    int64_t parameters = 0, trained = 0;
    int vocabulary = 0;
    std::string vocabulary_of;  // why it is this size, if neither data nor a file say it
    bool reads_bytes = false;   // a new model that has no tokenizer
    int seq_len = 0;
    RanksReport ranks;                 // the report is about one of them
    double seconds = 0;                // of a step, by estimate
    double update_seconds = 0;         // of the update in it
    PhaseTimes phases;                 // the step's time by phases
    std::string rates;                 // the file of the rates; empty if they are nominal
    std::string gpu;                   // the GPU that nominal rates are of; empty on a CPU
    std::string gpu_rates;             // where they are from, if not simply from the table of GPUs
    std::string budget;                // --memory
    std::vector<MemoryChoice> choice;  // the configuration for that, and its neighbours
    std::string batch_choice;          // what --batch auto chose, and why no more
    std::string length_choice;         // what --seq-len auto chose, and its cost in time
    std::vector<Take> buffers;  // outside the arena, for the whole run; their kinds are those of totals
    // What a process takes beside the buffers: code that libraries compile or load, threads' stacks, a
    // tokenizer.
    size_t process = 0;
    size_t tokenizer = 0;                    // part of process, if known
    size_t data = 0;                         // part of process: what the data hold, if many files
    size_t reading = 0;                      // the most that reading the data took, before the buffers
    size_t context = 0;                      // part of process: a GPU's context
    size_t nccl = 0;                         // part of process: NCCL's buffers, with several GPUs
    size_t staged = 0;                       // pinned host memory for batches and metrics in transfer
    size_t unpinned = 0;                     // host memory of the tokenizer and the data, if it is known
    size_t narrower = 0;                     // bytes saved by matrices in fewer bits than the build's
    double widening_seconds = 0;             // the part of a step that dequantizes these
    std::array<double, kRoutes> moved = {};  // bytes that a step moves, by Route
    // The plans of a micro-batch, and of what uses the arena at other times. They are the trainer's own, as
    // it last rehearsed them.
    const Plan *train = &kNoPlan, *update = &kNoPlan;
    const Plan* last = &kNoPlan;  // of a step's last micro-batch, in which ranks exchange gradients
    std::vector<std::pair<const char*, const Plan*>> others;

    size_t workspace() const {
        size_t bytes = arena_align(train->workspace);
        for (const auto& [name, plan] : others) bytes = std::max(bytes, arena_align(plan->workspace));
        return bytes + of_kind("workspace");
    }
    // What takes most of the arena, and how much; without a name if that is training.
    std::pair<const char*, size_t> largest_in_arena() const {
        std::pair<const char*, size_t> most{"", train->bytes};
        for (const auto& [name, plan] : others)
            if (plan->bytes > most.second) most = {name, plan->bytes};
        return most;
    }
    // The arena without the libraries' workspace, and what is not training's part of it.
    size_t activations() const { return largest_in_arena().second; }
    size_t activations_of_others() const {
        size_t bytes = 0;
        for (const auto& [name, plan] : others) bytes = std::max(bytes, plan->bytes);
        return bytes;
    }
    // The largest of the buffers, the arena and the process. The arena is named by its largest user if that
    // is not training.
    std::pair<std::string, size_t> largest() const {
        std::pair<std::string, size_t> most = largest_in_arena();
        if (most.first.empty()) most.first = "activations";
        for (const Take& b : buffers)
            if (b.bytes > most.second) most = {b.name, b.bytes};
        if (process > most.second) most = {"the process itself", process};
        return most;
    }
    size_t of_kind(const std::string& kind) const {
        size_t bytes = 0;
        for (const Take& b : buffers)
            if (kind == b.kind) bytes += b.bytes;
        return bytes;
    }
    size_t allocated() const {
        size_t bytes = activations() + workspace();
        for (const Take& b : buffers)
            if (b.kind != std::string_view("workspace")) bytes += b.bytes;
        return bytes;
    }
    size_t in_steps() const { return allocated() + process; }
    size_t total() const { return std::max(allocated(), reading) + process; }
    size_t all_pinned() const { return pinned + staged; }
    size_t in_files() const { return offloaded + working; }
    // What all ranks of a machine pin.
    size_t pinned_on_a_machine() const {
        return (all_pinned() - shared) * static_cast<size_t>(ranks.on_a_machine) + shared;
    }
    // A rank's share of that, and its files.
    BesideDevice beside() const {
        const auto here = static_cast<size_t>(ranks.on_a_machine);
        return {(pinned_on_a_machine() + here - 1) / here, in_files()};
    }
    double tokens() const { return static_cast<double>(batch) * seq_len * grad_accum; }  // of a step
};

nlohmann::ordered_json report_json(const MemoryReport& r, const OperationCosts& operations);

// One line of the table for all takes of a name: they differ only in the layer.
struct TableLine {
    std::string name, shape, dtype, kind, born, dies;
    size_t bytes = 0;
    int count = 0;
};

// The table of every buffer, in the order in which they are first taken.
std::vector<TableLine> table_of(const MemoryReport& r);

// Prints about ten lines on what a run takes; `verb` begins them. Beside the sum it says what is free, if
// that is known.
void print_summary(FILE* to, const MemoryReport& r, const char* verb, const FreeMemory& free = {});
// Prints what a step should take, what limits its phases, and what ranks send each other in it.
void print_phases(FILE* to, const MemoryReport& r);
// Prints the summary, a table of every buffer, and the sum again, which a long table has moved out of sight.
void print_report(FILE* to, const MemoryReport& r);

// Prints the lines with which the plan for a named GPU begins: whether it fits; for a training, how fast it
// is; and what fitting costs, if anything was chosen.
void print_gpu_answer(FILE* to, const RunConfig& o, const MemoryReport& r);
// What --plan json says of the named GPU: its memory, how much of that a run may use, and whether this run
// fits.
nlohmann::ordered_json gpu_answer_json(const KnownGpu& gpu, const MemoryReport& r);

// ---- the timeline (plan_timeline.cpp): the bytes that live after each take, release and operation of a step

// What the page of --report shows of a step's memory: the bytes of each kind from moment to moment, and the
// table of buffers with the moments at which each begins and ceases to live. In a long step several events
// are one moment, which has the bytes of the event with the most.
nlohmann::ordered_json timeline_page(const MemoryReport& report, const Plan& update, const Rates& rates);

// Writes the timeline, with one operation per line, and one transfer per line if there are any. Fails, naming
// --timeline, if the file cannot be written.
void write_timeline(const std::string& path, const MemoryReport& report, const Plan& update,
                    const Rates& rates);
