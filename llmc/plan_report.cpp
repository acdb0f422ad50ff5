// plan_report.cpp - writes the report of a plan, as text or as JSON.
#include "llmc/plan_report.h"

#include <cmath>
#include <span>

#include "llmc/error.h"
#include "llmc/text.h"

using nlohmann::ordered_json;

// The kinds of buffers that the totals list, and what they are called there.
constexpr std::pair<const char*, const char*> kKinds[] = {{"weights", "parameters"},
                                                          {"gradients", "parameter gradients"},
                                                          {"optimizer_m", "AdamW optimizer state m"},
                                                          {"optimizer_v", "AdamW optimizer state v"},
                                                          {"master", "master copy of params"},
                                                          {"input", "batch"}};

std::string MemoryChoice::text() const {
    std::string rows = format("--chunk-rows head=%ld", head_rows);
    if (mlp_rows > 0) rows += format(",mlp=%ld", mlp_rows);
    if (attention_rows > 0) rows += format(",attention=%ld", attention_rows);
    return format("--recompute %s %s --batch %d --grad-accum %d%s%s", recompute, rows, batch, grad_accum,
                  formats, placements);
}

static ordered_json operations_json(const OperationCosts& costs) {
    auto all = ordered_json::array();
    for (const auto& [name, c] : costs)
        all.push_back({{"name", name},
                       {"calls", c.calls},
                       {"flops", c.flops},
                       {"bytes", c.bytes},
                       {"seconds", c.seconds}});
    return all;
}

// Seconds of a step, phase by phase, as PhaseTime has them.
static ordered_json phases_json(const PhaseTimes& phases) {
    auto all = ordered_json::array();
    for (const PhaseTime& p : phases) {
        ordered_json j = {{"name", p.name}, {"seconds", p.total()}};
        j["bound_by"] = kCostNames[p.bound()];
        for (size_t c = 0; c < kCosts; c++) j[kCostNames[c]] = p.seconds[c];
        all.push_back(std::move(j));
    }
    return all;
}

static ordered_json ranks_json(const RanksReport& r) {
    ordered_json j = {{"devices", r.devices},
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

ordered_json report_json(const MemoryReport& r, const OperationCosts& operations) {
    ordered_json j = {
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
    for (const auto& [kind, what] : kKinds) totals[kind] = r.of_kind(kind);
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
    auto& buffers = j["buffers"] = ordered_json::array();
    const int end =
        static_cast<int>(2 * r.train->takes.size());  // the clock of takes and releases stops there
    const auto add = [&](const Take& t, const ordered_json& offset, int born, int dies) {
        buffers.push_back({{"name", t.name},
                           {"kind", t.kind},
                           {"shape", std::span(t.shape.dims, static_cast<size_t>(t.shape.count))},
                           {"dtype", t.dtype},
                           {"bytes", t.bytes},
                           {"offset", offset},
                           {"born", born},
                           {"dies", dies}});
    };
    for (const Take& b : r.buffers) add(b, nullptr, 0, end);
    const size_t library = r.workspace() - r.of_kind("workspace");
    add({"library", "workspace", {static_cast<int64_t>(library)}, "byte", library}, nullptr, 0, end);
    for (const Take& t : r.train->takes) add(t, t.offset, t.born, t.dies);
    return j;
}

std::vector<TableLine> table_of(const MemoryReport& r) {
    std::vector<TableLine> table;
    std::map<std::string, size_t> places;
    for (const Take& b : r.buffers)
        table.push_back({b.name, b.shape.text(), b.dtype, b.kind, "start", "end", b.bytes, 1});
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
static bool is_worth_showing(const MemoryChoice& neighbour, const MemoryChoice& chosen) {
    constexpr double kLess = 1 - 1e-3;
    return neighbour.seconds < chosen.seconds
               ? neighbour.seconds < kLess * chosen.seconds
               : static_cast<double>(neighbour.bytes) < kLess * static_cast<double>(chosen.bytes);
}

// Prints what --memory chose, what that costs, and its neighbours.
static void print_choice(FILE* to, const MemoryReport& r) {
    for (size_t i = 0; i < r.choice.size(); i++) {
        const MemoryChoice &c = r.choice[i], &chosen = r.choice[0];
        const double mib = mebibytes(c.bytes), relative = c.seconds / chosen.seconds;
        if (i == 0)
            print(to,
                  "--memory %s: %s\n  takes %.1f MiB; by estimate %.1f%% slower than the fastest there is\n",
                  r.budget, c.text(), mib, 100 * c.slower);
        else if (is_worth_showing(c, chosen))
            print(to, "  next %s: %s\n    takes %.1f MiB; %.2f%% %s\n", relative < 1 ? "faster" : "smaller",
                  c.text(), mib, 100 * std::abs(relative - 1), relative < 1 ? "faster" : "slower");
    }
}

void print_summary(FILE* to, const MemoryReport& r, const char* verb, const FreeMemory& free) {
    print_choice(to, r);
    const std::string trained =
        r.trained == r.parameters ? "" : format(", %ld trained beside them", r.trained);
    const auto rows = [](const char* name, int64_t n) { return n > 0 ? format("%s %ld", name, n) : ""; };
    print(
        to,
        "%s: %ld parameters%s; %s, %s\nvocabulary %d%s, batch %d, seq_len %d, recompute %s, head_rows "
        "%ld%s%s%s\n",
        r.model, r.parameters, trained, r.device, r.precision, r.vocabulary,
        r.vocabulary_of.empty() ? "" : format(" (%s)", r.vocabulary_of), r.batch, r.seq_len, r.recompute,
        r.head_rows, rows(", mlp_rows", r.mlp_rows), rows(", attention_rows", r.attention_rows),
        r.ranks.devices > 1 ? format("; each of %d devices, --zero %s", r.ranks.devices, r.ranks.zero) : "");
    if (r.reads_bytes)
        print(to, "text is read as bytes: --tokenizer gives a new model tokens, such as GPT-2's 50257\n");
    print(to, "%s, in MiB:\n", verb);
    const auto line = [&](size_t bytes, const std::string& what) {
        if (bytes > 0) print(to, "%12.2f  %s\n", mebibytes(bytes), what);
    };
    const char* const others = r.largest_in_arena().first;
    const std::string for_others =
        *others && !r.train->takes.empty() ? format(", which %s needs", others) : "";
    line(r.activations(), r.train->takes.empty()
                              ? "activations"
                              : format("activations%s; a step's peak is %.2f (%s)", for_others,
                                       mebibytes(r.train->lower_bound), r.train->peak_at));
    for (const auto& [kind, what] : kKinds) line(r.of_kind(kind), what);
    line(r.workspace(), "workspace");
    const std::string of_it = format("; %.2f of it the tokenizer", mebibytes(r.tokenizer));
    line(r.process, "the process itself (about)" + (r.tokenizer >= 1 << 20 ? of_it : "") +
                        (r.data > 0 ? format("; %.2f of the data or the prompts", mebibytes(r.data)) : "") +
                        (r.nccl > 0 ? format("; %.2f NCCL's buffers", mebibytes(r.nccl)) : ""));
    line(r.reading, "taken for reading the data before that, and given back");
    line(r.total(), free.known() ? format("in all; %.0f are free", mebibytes(free.bytes)) : "in all");
    line(r.narrower, format("less than matrices in %s would take; widening them takes %.3g s of a step",
                            r.precision, r.widening_seconds));
    line(r.all_pinned(), "pinned host memory beside that" +
                             (r.shared > 0 ? format("; the %d ranks of a machine share %.2f of it",
                                                    r.ranks.on_a_machine, mebibytes(r.shared))
                                           : ""));
    line(r.unpinned, "host memory that is not pinned beside that, of the tokenizer and of reading the data");
    line(r.on_disk, "of matrices beside that, read from the disk when they are used");
    line(r.offloaded, "of inputs of blocks, or of keys and values, beside that, in a file");
    line(r.working, "of what is trained beside that, in a file of the run's own");
}

static void print_seconds(FILE* to, const MemoryReport& r) {
    if (r.seconds <= 0) return;
    std::string rates = r.rates;
    if (rates.empty()) {
        rates = "nominal rates";
        if (!r.gpu.empty()) rates += " of the GPU " + r.gpu + r.gpu_rates;
        rates += " (--calibrate measures them)";
    }
    print(to, "a step takes %.4g s by %s, %.4g tokens/s:\n", r.seconds, rates, r.tokens() / r.seconds);
    for (const PhaseTime& p : r.phases) {
        const auto bound = p.bound();
        print(to, "%12.4f  %s, bound by %s", p.total(), p.name, kCostNames[bound]);
        for (size_t c = 0; c < kCosts; c++)
            if (p.seconds[c] > 0)
                print(to, "; %.0f%% %s%s", 100 * p.seconds[c] / p.total(),
                      c < kComputing ? "" : "lost to the ", kCostNames[c]);
        print(to, "\n");
    }
}

// Prints what ranks send each other in a step, over what, and how long a step waits for it.
static void print_ranks(FILE* to, const RanksReport& r) {
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

void print_phases(FILE* to, const MemoryReport& r) {
    print_seconds(to, r);
    print_ranks(to, r.ranks);
}

void print_report(FILE* to, const MemoryReport& r) {
    print_summary(to, r, "takes");
    print_phases(to, r);
    print(to, "\n%-22s %-12s %-22s %-5s %10s %6s  %-28s %s\n", "buffer", "kind", "shape", "dtype", "MiB",
          "count", "born (first)", "dies (last)");
    for (const TableLine& t : table_of(r))
        print(to, "%-22s %-12s %-22s %-5s %10.2f %6d  %-28s %s\n", t.name, t.kind, t.shape, t.dtype,
              mebibytes(t.bytes), t.count, t.born, t.dies);
    if (!r.others.empty()) print(to, "\n");
    for (const auto& [name, plan] : r.others)
        print(to, "%s uses %.2f MiB of the same arena\n", name, mebibytes(plan->bytes));
    print(to, "\nin all: %.2f MiB\n", mebibytes(r.total()));
}

// ---- the answer of --plan --gpu

// What is paid for fitting, in words. A machine has the host memory, files and disk of all its ranks; each
// GPU has a link of its own.
static std::string costs_of_fitting(const MemoryReport& r, int ranks_on_a_machine) {
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

void print_gpu_answer(FILE* to, const RunConfig& o, const MemoryReport& r) {
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
          fits ? "fits" : "does not fit", gpu, trains, r.batch, r.seq_len, gibibytes(r.total()),
          gibibytes(room));
    const size_t pinned = r.pinned_on_a_machine();
    if (fits && pinned > size_t{1} << 30)
        print(to, ", and %.1f GiB of %s host's memory", gibibytes(pinned), o.machines > 1 ? "each" : "the");
    if (const std::string others = fits ? "" : gpus_with_room(r.total() - r.context, r.all_pinned());
        !others.empty())
        print(to, "; %s", others);
    if (!fits && o.steps > 0 && !o.open.recompute)
        print(to, "; without --recompute, the plan chooses what to recompute and to offload");
    print(to, "\n");
    if (r.seconds > 0)
        print(to, "about %.*f tokens/s, %s for a step of %.0f tokens, by the GPU's nominal rates\n",
              r.tokens() / r.seconds < 10 ? 2 : 0, r.tokens() / r.seconds, seconds_text(r.seconds),
              r.tokens());
    if (const std::string costs = costs_of_fitting(r, o.devices / o.machines); !costs.empty())
        print(to, "cost of fitting: %s\n", costs);
    print(to, "\n");
}

ordered_json gpu_answer_json(const KnownGpu& gpu, const MemoryReport& r) {
    const size_t room = usable_memory_of(gpu).bytes;
    return {
        {"name", gpu.name}, {"bytes", memory_of(gpu)}, {"usable_bytes", room}, {"fits", r.total() <= room}};
}
