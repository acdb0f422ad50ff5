// plan_report.h - the memory report: what every buffer takes, when it is born and when it dies, as text or as
// JSON.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "llmc/arena.h"
#include "llmc/device.h"
#include "llmc/model.h"
#include "llmc/rates.h"
#include "llmc/rates_device.h"
#include "llmc/temporary_file.h"
#include "llmc/text.h"

// A configuration that --memory chose or could have chosen.
struct MemoryChoice {
    std::string recompute, formats;  // by layer; the state's formats as options, unless given
    std::string placements;          // placements as options, unless given
    int64_t head_rows, mlp_rows, attention_rows;
    int batch, grad_accum;
    size_t bytes;    // in all
    double seconds;  // of a step, by estimate
    double slower;   // than the fastest configuration there is: 0.1 is 10%

    std::string text() const {
        std::string rows = format("--chunk-rows head=%lld", static_cast<long long>(head_rows));
        if (mlp_rows > 0) rows += format(",mlp=%lld", static_cast<long long>(mlp_rows));
        if (attention_rows > 0) rows += format(",attention=%lld", static_cast<long long>(attention_rows));
        return format("--recompute %s %s --batch %d --grad-accum %d%s%s", recompute.c_str(), rows.c_str(),
                      batch, grad_accum, formats.c_str(), placements.c_str());
    }
};

inline const Plan kNoPlan;

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

// Host memory for what a run reads: what the tokenizer and the data hold, and the most that reading the data
// took.
struct InputBytes {
    size_t tokenizer = 0, data = 0, reading = 0;
};

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

struct MemoryReport {
    // A buffer outside the arena, alive for the whole run. `kind` is also its line in the totals.
    struct Buffer {
        std::string name, kind, shape_text;
        std::vector<int64_t> shape;
        const char* dtype;
        size_t bytes;
    };
    std::string model, device, precision, recompute;
    int64_t parameters = 0, trained = 0;
    int vocabulary = 0;
    std::string vocabulary_of;  // why it is this size, if neither data nor a file say it
    bool reads_bytes = false;   // a new model that has no tokenizer
    int batch = 0, seq_len = 0, grad_accum = 1;
    RanksReport ranks;  // the report is about one of them
    int64_t head_rows = 0, mlp_rows = 0, attention_rows = 0;
    double seconds = 0;                // of a step, by estimate
    double update_seconds = 0;         // of the update in it
    PhaseTimes phases;                 // its time by phases,
    std::string rates;                 // the file of these rates; empty: nominal rates,
    std::string gpu;                   // of this GPU; empty on a CPU
    std::string budget;                // --memory
    std::vector<MemoryChoice> choice;  // the configuration for that, and its neighbours
    std::string batch_choice;          // what --batch auto chose, and why no more
    std::string length_choice;         // what --seq-len auto chose, and its cost in time
    std::vector<Buffer> buffers;
    // What a process takes beside the buffers: code that libraries compile or load, threads' stacks, a
    // tokenizer.
    size_t process = 0;
    size_t tokenizer = 0;  // part of process, if known
    size_t data = 0;       // part of process: what the data hold, if many files
    size_t reading = 0;    // the most that reading the data took, before the buffers
    size_t context = 0;    // part of process: a GPU's context
    size_t nccl = 0;       // part of process: NCCL's buffers, with several GPUs
    size_t pinned = 0;     // host memory beside a GPU: pinned, for what is placed there or passes through it;
    size_t shared = 0;     // part of pinned: weights that a machine has once, however many ranks use them;
    size_t staged = 0;     // pinned too, for batches and metrics in transfer,
    size_t unpinned = 0;   // and not pinned, for a tokenizer and the data; any other is not known
    size_t on_disk = 0;    // matrices that are read from their files when used
    size_t offloaded = 0;  // offloaded inputs of blocks, and keys, in a file; or pinned by a GPU
    size_t working = 0;    // what is trained in a file
    size_t narrower = 0;   // bytes saved by matrices in fewer bits than the build's
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
    // The arena without the libraries' workspace.
    size_t activations() const { return std::max(train->bytes, activations_of_others()); }
    size_t activations_of_others() const {
        size_t bytes = 0;
        for (const auto& [name, plan] : others) bytes = std::max(bytes, plan->bytes);
        return bytes;
    }
    // What takes more of the arena than training does, and the most of it; "" if nothing does.
    const char* largest_other() const {
        const char* name = "";
        size_t most = train->bytes;
        for (const auto& [other, plan] : others)
            if (plan->bytes > most) most = plan->bytes, name = other;
        return name;
    }
    // The largest of the buffers, the arena and the process. The arena is named by its largest user if that
    // is not training.
    std::pair<std::string, size_t> largest() const {
        std::pair<std::string, size_t> most{"activations", train->bytes};
        for (const auto& [name, plan] : others)
            if (plan->bytes > most.second) most = {name, plan->bytes};
        for (const Buffer& b : buffers)
            if (b.bytes > most.second) most = {b.name, b.bytes};
        if (process > most.second) most = {"the process itself", process};
        return most;
    }
    size_t of_kind(const std::string& kind) const {
        size_t bytes = 0;
        for (const Buffer& b : buffers)
            if (b.kind == kind) bytes += b.bytes;
        return bytes;
    }
    size_t allocated() const {
        size_t bytes = activations() + workspace();
        for (const Buffer& b : buffers)
            if (b.kind != "workspace") bytes += b.bytes;
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

// The costs of operations by their names.
inline nlohmann::ordered_json operations_json(const OperationCosts& costs) {
    auto all = nlohmann::ordered_json::array();
    for (const auto& [name, c] : costs)
        all.push_back({{"name", name},
                       {"calls", c.calls},
                       {"flops", c.flops},
                       {"bytes", c.bytes},
                       {"seconds", c.seconds}});
    return all;
}

// Seconds of a step, phase by phase, as PhaseTime has them.
inline nlohmann::ordered_json phases_json(const PhaseTimes& phases) {
    auto all = nlohmann::ordered_json::array();
    for (const PhaseTime& p : phases) {
        nlohmann::ordered_json j = {{"name", p.name}, {"seconds", p.total()}};
        j["bound_by"] = kCostNames[static_cast<size_t>(p.bound())];
        for (size_t c = 0; c < kCosts; c++) j[kCostNames[c]] = p.seconds[c];
        all.push_back(std::move(j));
    }
    return all;
}

inline nlohmann::ordered_json ranks_json(const RanksReport& r) {
    nlohmann::ordered_json j = {{"devices", r.devices},
                                {"machines", r.devices / r.on_a_machine},
                                {"zero", r.zero},
                                {"sent_bytes", r.all_sent()}};
    for (size_t i = 0; i < r.sent.size(); i++) j["sent"][kExchanged[i]] = r.sent[i];
    j["link"] = {{"bytes_per_second", r.link_rate}, {"of", r.links.link_is_nominal ? "nominal" : "measured"}};
    if (r.on_a_machine < r.devices)
        j["network"] = {{"bytes_per_second", r.links.network},
                        {"of", r.links.network_of},
                        {"sent_by_a_machine", r.sent_to_machines * r.on_a_machine}};
    j["exchange_seconds"] = r.seconds;
    j["waited_seconds"] = r.waited_seconds;
    return j;
}

inline nlohmann::ordered_json report_json(const MemoryReport& r, const OperationCosts& operations) {
    nlohmann::ordered_json j = {
        {"model", r.model},           {"parameters", r.parameters}, {"trained", r.trained},
        {"vocabulary", r.vocabulary}, {"device", r.device},         {"precision", r.precision},
        {"batch", r.batch},           {"seq_len", r.seq_len},       {"grad_accum", r.grad_accum},
        {"head_rows", r.head_rows},   {"mlp_rows", r.mlp_rows},     {"attention_rows", r.attention_rows},
        {"recompute", r.recompute}};
    if (r.ranks.devices > 1) {
        j["ranks"] = ranks_json(r.ranks);
        j["ranks"]["nccl_bytes"] = r.nccl;
    }
    auto& totals = j["totals"];
    for (const char* kind : {"weights", "gradients", "optimizer_m", "optimizer_v", "master", "input"})
        totals[kind] = r.of_kind(kind);
    totals["activations"] = r.activations();
    totals["workspace"] = r.workspace();
    totals["process"] = r.process;
    if (r.reading > 0) totals["reading"] = r.reading;
    totals["total"] = r.total();
    j["outside_device"] = {{"pinned_host", r.pinned},
                           {"on_disk", r.on_disk},
                           {"offloaded", r.offloaded},
                           {"working_file", r.working}};
    j["host"] = {{"pinned", r.all_pinned()}, {"unpinned", r.unpinned}};
    if (r.shared > 0) j["host"]["shared"] = r.shared;
    if (r.narrower > 0) j["stored"] = {{"saved_bytes", r.narrower}, {"widening_seconds", r.widening_seconds}};
    j["activations_lower_bound"] = r.train->lower_bound;
    j["peak_at"] = r.train->peak_at;
    for (size_t route = 0; route < kRoutes; route++)
        if (r.moved[route] > 0) j["moved"][kRouteNames[route]] = r.moved[route];
    j["estimated_seconds"] = r.seconds;
    j["tokens_per_second"] = r.seconds > 0 ? r.tokens() / r.seconds : 0;
    j["rates"] = r.rates.empty() ? "nominal" : r.rates;
    if (!r.gpu.empty()) j["gpu"] = r.gpu;
    j["phases"] = phases_json(r.phases);
    j["operations"] = operations_json(operations);
    for (const MemoryChoice& c : r.choice)
        j["choice"].push_back({{"recompute", c.recompute},
                               {"head_rows", c.head_rows},
                               {"mlp_rows", c.mlp_rows},
                               {"attention_rows", c.attention_rows},
                               {"batch", c.batch},
                               {"grad_accum", c.grad_accum},
                               {"formats", c.formats},
                               {"placements", c.placements},
                               {"bytes", c.bytes},
                               {"seconds", c.seconds},
                               {"slower", c.slower}});
    auto& buffers = j["buffers"] = nlohmann::ordered_json::array();
    const int end =
        static_cast<int>(2 * r.train->takes.size());  // the clock of takes and releases stops there
    auto add = [&](const std::string& name, const std::string& kind, const std::vector<int64_t>& shape,
                   const char* dtype, size_t bytes, nlohmann::ordered_json offset, int born, int dies) {
        buffers.push_back({{"name", name},
                           {"kind", kind},
                           {"shape", shape},
                           {"dtype", dtype},
                           {"bytes", bytes},
                           {"offset", offset},
                           {"born", born},
                           {"dies", dies}});
    };
    for (const auto& b : r.buffers) add(b.name, b.kind, b.shape, b.dtype, b.bytes, nullptr, 0, end);
    const size_t library = r.workspace() - r.of_kind("workspace");
    add("library", "workspace", {static_cast<int64_t>(library)}, "byte", library, nullptr, 0, end);
    for (const Take& t : r.train->takes)
        add(t.name, t.kind, {t.shape.dims, t.shape.dims + t.shape.count}, t.dtype, t.bytes, t.offset, t.born,
            t.dies);
    return j;
}

// One line of the table for all takes of a name: they differ only in the layer.
struct TableLine {
    std::string name, shape, dtype, kind, born, dies;
    size_t bytes = 0;
    int count = 0;
};

// The table of every buffer, in the order in which they are first taken.
inline std::vector<TableLine> table_of(const MemoryReport& r) {
    std::vector<TableLine> table;
    std::map<std::string, size_t> places;
    for (const auto& b : r.buffers)
        table.push_back({b.name, b.shape_text, b.dtype, b.kind, "start", "end", b.bytes, 1});
    for (const Take& t : r.train->takes) {
        const auto [place, is_new] = places.try_emplace(t.name, table.size());
        if (is_new)
            table.push_back({t.name, t.shape.text(), t.dtype, t.kind, std::string(t.born_at), "", 0, 0});
        TableLine& line = table[place->second];
        if (line.shape != t.shape.text()) line.shape = "several shapes";
        line.dies = t.dies_at;
        line.bytes += t.bytes;
        line.count++;
    }
    return table;
}

// True if a neighbour of what --memory chose is worth a line: if it is faster, or smaller, by a tenth of a
// percent.
inline bool is_worth_showing(const MemoryChoice& neighbour, const MemoryChoice& chosen) {
    constexpr double kLess = 1 - 1e-3;
    return neighbour.seconds < chosen.seconds
               ? neighbour.seconds < kLess * chosen.seconds
               : static_cast<double>(neighbour.bytes) < kLess * static_cast<double>(chosen.bytes);
}

// Prints what --memory chose, what that costs, and its neighbours.
inline void print_choice(FILE* to, const MemoryReport& r) {
    for (size_t i = 0; i < r.choice.size(); i++) {
        const MemoryChoice &c = r.choice[i], &chosen = r.choice[0];
        const double mib = mebibytes(c.bytes), relative = c.seconds / chosen.seconds;
        if (i == 0)
            print(to,
                  "--memory %s: %s\n  takes %.1f MiB; by estimate %.1f%% slower than the fastest there is\n",
                  r.budget.c_str(), c.text().c_str(), mib, 100 * c.slower);
        else if (is_worth_showing(c, chosen))
            print(to, "  next %s: %s\n    takes %.1f MiB; %.2f%% %s\n", relative < 1 ? "faster" : "smaller",
                  c.text().c_str(), mib, 100 * std::abs(relative - 1), relative < 1 ? "faster" : "slower");
    }
}

// Prints about ten lines on what a run takes; `verb` begins them. Beside the sum it says what is free, if
// that is known.
inline void print_summary(FILE* to, const MemoryReport& r, const char* verb, const FreeMemory& free = {}) {
    print_choice(to, r);
    const std::string trained = r.trained == r.parameters
                                    ? ""
                                    : format(", %lld trained beside them", static_cast<long long>(r.trained));
    const auto rows = [](const char* name, int64_t n) {
        return n > 0 ? format("%s %lld", name, static_cast<long long>(n)) : "";
    };
    print(to,
          "%s: %lld parameters%s; %s, %s\nvocabulary %d%s, batch %d, seq_len %d, recompute %s, head_rows "
          "%lld%s%s%s\n",
          r.model.c_str(), static_cast<long long>(r.parameters), trained.c_str(), r.device.c_str(),
          r.precision.c_str(), r.vocabulary,
          r.vocabulary_of.empty() ? "" : format(" (%s)", r.vocabulary_of.c_str()).c_str(), r.batch, r.seq_len,
          r.recompute.c_str(), static_cast<long long>(r.head_rows), rows(", mlp_rows", r.mlp_rows).c_str(),
          rows(", attention_rows", r.attention_rows).c_str(),
          r.ranks.devices > 1
              ? format("; each of %d devices, --zero %s", r.ranks.devices, r.ranks.zero.c_str()).c_str()
              : "");
    if (r.reads_bytes)
        print(to, "text is read as bytes: --tokenizer gives a new model tokens, such as GPT-2's 50257\n");
    print(to, "%s, in MiB:\n", verb);
    const auto line = [&](size_t bytes, const std::string& what) {
        if (bytes > 0) print(to, "%12.2f  %s\n", mebibytes(bytes), what.c_str());
    };
    const char* const others = r.largest_other();
    const std::string for_others =
        *others && !r.train->takes.empty() ? format(", which %s needs", others) : "";
    line(r.activations(), r.train->takes.empty()
                              ? "activations"
                              : format("activations%s; a step's peak is %.2f (%s)", for_others.c_str(),
                                       mebibytes(r.train->lower_bound), r.train->peak_at.c_str()));
    for (const auto& [kind, what] :
         {std::pair{"weights", "parameters"}, std::pair{"gradients", "parameter gradients"},
          std::pair{"optimizer_m", "AdamW optimizer state m"},
          std::pair{"optimizer_v", "AdamW optimizer state v"}, std::pair{"master", "master copy of params"},
          std::pair{"input", "batch"}})
        line(r.of_kind(kind), what);
    line(r.workspace(), "workspace");
    const std::string of_it = format("; %.2f of it the tokenizer", mebibytes(r.tokenizer));
    line(r.process, "the process itself (about)" + (r.tokenizer >= 1 << 20 ? of_it : "") +
                        (r.data > 0 ? format("; %.2f of the data or the prompts", mebibytes(r.data)) : "") +
                        (r.nccl > 0 ? format("; %.2f NCCL's buffers", mebibytes(r.nccl)) : ""));
    line(r.reading, "taken for reading the data before that, and given back");
    line(r.total(), free.known() ? format("in all; %.0f are free", mebibytes(free.bytes)) : "in all");
    line(r.narrower, format("less than matrices in %s would take; widening them takes %.3g s of a step",
                            r.precision.c_str(), r.widening_seconds));
    line(r.all_pinned(), "pinned host memory beside that" +
                             (r.shared > 0 ? format("; the %d ranks of a machine share %.2f of it",
                                                    r.ranks.on_a_machine, mebibytes(r.shared))
                                           : ""));
    line(r.unpinned, "host memory that is not pinned beside that, of the tokenizer and of reading the data");
    line(r.on_disk, "of matrices beside that, read from the disk when they are used");
    line(r.offloaded, "of inputs of blocks, or of keys and values, beside that, in a file");
    line(r.working, "of what is trained beside that, in a file of the run's own");
}

// Prints what a step should take, and what limits its phases.
inline void print_phases(FILE* to, const MemoryReport& r) {
    if (r.seconds <= 0) return;
    std::string rates = r.rates;
    if (rates.empty()) {
        rates = "nominal rates";
        if (!r.gpu.empty()) rates += " of the GPU " + r.gpu;
        if (!r.gpu.empty() && !gpu_named(r.gpu))
            rates += planned_gpu ? ", at its highest clock" : ", computed from what it reports";
        rates += " (--calibrate measures them)";
    }
    print(to, "a step takes %.4g s by %s, %.4g tokens/s:\n", r.seconds, rates.c_str(),
          r.tokens() / r.seconds);
    for (const PhaseTime& p : r.phases) {
        const auto bound = static_cast<size_t>(p.bound());
        print(to, "%12.4f  %s, bound by %s", p.total(), p.name.c_str(), kCostNames[bound]);
        for (size_t c = 0; c < kCosts; c++)
            if (p.seconds[c] > 0)
                print(to, "; %.0f%% %s%s", 100 * p.seconds[c] / p.total(),
                      c < kComputing ? "" : "lost to the ", kCostNames[c]);
        print(to, "\n");
    }
}

// Prints what ranks send each other in a step, over what, and how long a step waits for it.
inline void print_ranks(FILE* to, const RanksReport& r) {
    if (r.devices == 1) return;
    print(to, "each device sends %.2f MB in a step, and receives as much:", r.all_sent() / 1e6);
    for (size_t i = 0; i < r.sent.size(); i++)
        print(to, "%s %s %.2f", i > 0 ? "," : "", kExchanged[i], r.sent[i] / 1e6);
    print(to, "\n  over %s of %.4g GB/s each way, %s\n",
          r.links.over_host_link ? "its link to the host" : "a link", r.link_rate / 1e9,
          r.links.link_is_nominal ? "a nominal rate (--devices N --calibrate measures it)" : "as measured");
    if (r.on_a_machine < r.devices)
        print(to,
              "  %.0f%% of it leaves the machine, whose %d devices share a network of %.4g GB/s each way "
              "(%s)\n",
              100 * r.sent_to_machines / r.all_sent(), r.on_a_machine, r.links.network / 1e9,
              r.links.network_of);
    print(to, "  that takes %.4g s, of which a step waits for %.4g s\n", r.seconds, r.waited_seconds);
}

// Prints the summary, a table of every buffer, and the sum again, which a long table has moved out of sight.
inline void print_report(FILE* to, const MemoryReport& r) {
    print_summary(to, r, "takes");
    print_phases(to, r);
    print_ranks(to, r.ranks);
    print(to, "\n%-22s %-12s %-22s %-5s %10s %6s  %-28s %s\n", "buffer", "kind", "shape", "dtype", "MiB",
          "count", "born (first)", "dies (last)");
    for (const TableLine& t : table_of(r))
        print(to, "%-22s %-12s %-22s %-5s %10.2f %6d  %-28s %s\n", t.name.c_str(), t.kind.c_str(),
              t.shape.c_str(), t.dtype.c_str(), mebibytes(t.bytes), t.count, t.born.c_str(), t.dies.c_str());
    if (!r.others.empty()) print(to, "\n");
    for (const auto& [name, plan] : r.others)
        print(to, "%s uses %.2f MiB of the same arena\n", name, mebibytes(plan->bytes));
    print(to, "\nin all: %.2f MiB\n", mebibytes(r.total()));
}

// Prints what a run has taken beside what was planned: `bytes` of the device, pinned host memory, and files.
inline void print_taken(const MemoryReport& r, size_t bytes) {
    print(stdout, "taken from the device: %.1f MiB; planned: %.1f MiB\n", mebibytes(bytes),
          mebibytes(r.total() - r.context));
    const auto print_memory = [](const char* what, size_t taken, size_t planned) {
        if (taken + planned > 0)
            print(stdout, "%s: %.1f MiB; planned: %.1f MiB\n", what, mebibytes(taken), mebibytes(planned));
    };
    print_memory("pinned in host memory", pinned_bytes_allocated, r.all_pinned());
    print_memory("taken in files", working_file_bytes, r.in_files());
}
