// plan.h - the plans of everything that a run does in the arena; the memory report that is made of them and
// of all that is beside the arena; and the check that the run has taken just that.
#pragma once

#include <omp.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/arena.h"
#include "llmc/batches.h"
#include "llmc/data_feeder.h"
#include "llmc/device.h"
#include "llmc/loss_by_position.cuh"
#include "llmc/metrics.h"
#include "llmc/model_positions.h"
#include "llmc/offload_memory.h"
#include "llmc/optimizer.cuh"
#include "llmc/run_config.h"
#include "llmc/plan_free_memory.h"
#include "llmc/plan_report.h"
#include "llmc/run_records.h"
#include "llmc/quant_weights.h"
#include "llmc/random.h"
#include "llmc/ranks_transfers.h"
#include "llmc/rates_device.h"
#include "llmc/run_inputs.h"
#include "llmc/run_model.h"
#include "llmc/state.h"
#include "llmc/threads.h"

struct Plans {
    Plan train, add;  // a step's first micro-batch, and those that add to its gradients
    Plan update;      // empty if backward contains it
    Plan evaluate;
    Plan sample, slide;  // a sample, and its continuation beyond the model's window
    Plan merge;          // of a model's weights and its adapter
    Plan exported;       // matrices of a frozen model for --export
    Plan load;           // of a GGUF's weights
    Plan first_prompt;   // a new soft prompt's vectors
    // The time of the update by phases; absent until a report has needed it. Where the state of a large model
    // is elsewhere, the update has a million transfers, and few of the settings that are tried change it.
    mutable std::optional<PhaseTimes> update_phases;

    std::array<const Plan*, 10> all() const {
        return {&train, &add, &update, &evaluate, &sample, &slide, &merge, &exported, &load, &first_prompt};
    }
};

// Memory that a process takes beside its buffers. On a CPU the pages of its executable and libraries and,
// measured with 1 to 64 threads: 11.5 MiB for compiled products and host buffers; and for each thread 1.5 MiB
// (its stack, its heap, the operands of attention's products) and `copied`, the bytes that a thread copies
// for the plan's largest product. On a GPU, not measured: the code that is loaded when kernels first run,
// this program's 2.4 MB and some twenty modules of cuBLASLt 13.0, of 1.1 MB as the larger ones are.
inline size_t process_bytes(size_t copied) {
    if constexpr (!kHostIsDevice) return size_t{25} << 20;
    static const size_t libraries = library_bytes();
    const size_t threads = static_cast<size_t>(omp_get_max_threads());
    return libraries + (size_t{23} << 19) + threads * ((1536 << 10) + copied);
}

// The pages of MPI's libraries, which a rank on a CPU has and a plan without ranks counts. As OpenMPI 4.1 has
// them.
inline size_t mpi_bytes(const RunConfig& o) {
    const bool is_plan = kHostIsDevice && o.devices > 1 && rank_of_environment().is_alone();
    return is_plan ? size_t{81} << 18 : 0;
}

// Before ranks are started on this machine: fails if their processes alone need more memory than there is, or
// if data or a model are not there. Says so if they are more than the threads that they share.
inline void check_room_for_ranks(const RunConfig& o) {
    if (!kHostIsDevice) return;
    const Rank rank{0, o.devices, o.devices};
    const int cores = omp_get_num_procs();
    omp_set_num_threads(o.threads > 0 ? o.threads : rank.own_cores(cores));
    const size_t each = process_bytes(0) + mpi_bytes(o);
    const FreeMemory free = memory_of_rank(rank);
    if (each > free.bytes)
        fail(
            "--devices %d: a process needs %.1f MiB without a model, and each may have %.1f (%s): give fewer",
            o.devices, mebibytes(each), mebibytes(free.bytes), free.limit);
    expand_files(o.data, "--data"), expand_files(o.val_data, "--val-data");
    if (!parse_new_model(o.model) && !RunInputs::is_gguf(o.model) && o.resume.empty())
        read_model_config(o.model, "--model");
    if (o.devices > cores && !o.json)
        print(o.notes(), "--devices %d: they share %d thread%s of this machine's CPU\n", o.devices, cores,
              cores == 1 ? "" : "s");
}

// What has memory beside the arena.
struct PartsWithMemory {
    const RunModel& model;
    const OffloadedMemory& offloaded;
    const Batches& batches;
    const Metrics& metrics;
    const LossByPosition& loss_by_position;
};

// The buffers beside the arena: those of the model's state and the adapter's, the batch's if the run reads
// data, and what a step's kernels and its metrics need.
inline std::vector<Take> buffers_of(const PartsWithMemory& parts) {
    const RunModel& run = parts.model;
    std::vector<Take> all;
    const auto add = [&](const std::string& name, const char* kind, Shape shape, const char* dtype,
                         size_t bytes) {
        if (bytes > 0) all.push_back({name, kind, shape, dtype, bytes});
    };
    const auto add_bytes = [&](const char* name, size_t bytes, const char* kind = "workspace") {
        add(name, kind, {static_cast<int64_t>(bytes)}, "byte", bytes);
    };
    const auto add_floats = [&](const char* name, int64_t count) {
        add(name, "workspace", {count}, "fp32", static_cast<size_t>(count) * sizeof(float));
    };
    const auto add_state = [&](const std::string& prefix, const auto& state) {
        for (const StateBuffer& b : state.buffers())
            if (b.elements > 0) add(prefix + b.name, b.kind, {b.elements}, b.dtype, b.bytes());
    };
    add_state("", run.state);
    if (run.quantized) add_bytes("quantized_weights", run.quantized->bytes_on_device(), "weights");
    const size_t disks =
        (run.quantized && run.quantized->placement() == Placement::Disk ? 1 : 0) + (run.embeddings ? 1 : 0);
    if (kHostIsDevice) add_bytes("disk_staging", disks * DiskQueue::kStagingBytes);
    if (run.quantized_head) add_bytes("quantized_head", run.quantized_head->bytes_on_device(), "weights");
    if (run.adapter) add_state("adapter_", *run.adapter);
    if (const std::vector<Feeder>* feeders = parts.batches.feeders()) {
        const auto batches = static_cast<int64_t>(feeders->size());
        const Feeder& f = feeders->front();
        add("batch", "input", {batches * Feeder::kCopies, f.count()}, dtype_name<int>(),
            feeders->size() * f.bytes());
    }
    add_floats("metrics", parts.metrics.count());
    add_floats("position_losses", parts.loss_by_position.numbers());
    add_bytes("step_factors", sizeof(UpdateFactors));
    const size_t keys = parts.batches.dropout_keys();
    add("dropout_key", "workspace", {static_cast<int64_t>(keys)}, "byte", keys * sizeof(uint64_t));
    add_floats("position_factors", static_cast<int64_t>(position_factors(run.state.layout.config()).size()));
    return all;
}

// What takes time in a plan, without exchanges between ranks and the sums that complete them.
inline Plan without_exchanges(const Plan& plan) {
    Plan alone;
    alone.work = plan.work;
    for (Work& w : alone.work)
        if (w.name == std::string_view(kSumRanks)) w.flops = w.bytes = w.calls = 0;
    std::copy_if(plan.transfers.begin(), plan.transfers.end(), std::back_inserter(alone.transfers),
                 [](const Transfer& t) { return t.of != Transfer::Ranks; });
    return alone;
}

// A digest of what the ranks exchange in a step, in its order. Ranks that exchanged in different orders would
// wait for each other forever. Their bytes are not in it: the last ranks' slices may be shorter.
inline std::string digest_of_exchanges(const Plans& plans) {
    uint64_t digest = 0;
    const auto add = [&](const std::string& text) { digest = mix64(digest ^ name_hash(text)); };
    for (const Plan* plan : {&plans.train, &plans.add, &plans.update}) {
        add("a plan");
        for (const Transfer& t : plan->transfers)
            if (t.of == Transfer::Ranks)
                add(format("%s %s %d", t.waits ? "wait" : t.content, kRouteNames[t.route], t.number));
    }
    return std::to_string(digest);
}

// The time of a step by phases, in order, if a rank has `micro_batches` passes. Ranks exchange gradients only
// in the last one.
inline PhaseTimes phases_of(const Plans& plans, int micro_batches, const Rates& rates) {
    PhaseTimes phases;
    add_phases(phases, plans.train, 1, rates);
    if (micro_batches > 2) add_phases(phases, without_exchanges(plans.add), micro_batches - 2, rates);
    if (micro_batches > 1) add_phases(phases, plans.add, 1, rates);
    if (!plans.update_phases) plans.update_phases = phases_of(plans.update, rates);
    for (const PhaseTime& of_update : *plans.update_phases) {
        const auto same = std::ranges::find(phases, of_update.name, &PhaseTime::name);
        PhaseTime& p = same == phases.end() ? phases.emplace_back(PhaseTime{of_update.name}) : *same;
        for (size_t c = 0; c < kCosts; c++) {
            p.seconds[c] += of_update.seconds[c];
            p.busy[c] += of_update.busy[c];
        }
    }
    return phases;
}

// What a rank sends to the others in a step of `micro_batches` passes, and how long that takes.
inline RanksReport report_ranks(const RunConfig& o, const Plans& plans, int micro_batches,
                                const PhaseTimes& phases, const Rates& rates) {
    RanksReport r;
    r.devices = o.devices;
    r.on_a_machine = rates.ranks.on_a_machine;
    r.zero = o.slices_weights() ? "3" : o.slices_gradients() ? "2" : o.slices_state() ? "1" : "0";
    if (o.devices == 1) return r;
    const auto add = [&](const Plan& plan, int times) {
        for (const Transfer& t : plan.transfers)
            for (size_t i = 0; i < std::size(kExchanged); i++) {
                const bool is_gathered = t.of == Transfer::StreamedBlock;  // a block's weights
                const std::string_view content = is_gathered ? "weights" : t.content;
                if (t.waits || !is_exchange(t.route) || content != kExchanged[i]) continue;
                r.sent[i] += times * t.bytes;
                if (t.route == Route::ToMachines) r.sent_to_machines += times * t.bytes;
            }
    };
    if (micro_batches > 1) add(plans.train, 1);
    if (micro_batches > 2) add(without_exchanges(plans.add), micro_batches - 2);
    add(micro_batches > 1 ? plans.add : plans.train, 1);
    add(plans.update, 1);
    r.links = rates.ranks;
    r.link_rate = rates.transfers[Route::ToRanks];
    for (const PhaseTime& p : phases) {
        r.seconds += p.busy[Cost::Exchange];
        r.waited_seconds += p.seconds[Cost::Exchange];
    }
    return r;
}

// ---- the report of a run

// Adds what is saved by matrices in fewer bits than the build's, and what dequantizing them costs a step.
inline void add_stored(MemoryReport& report, const QuantizedWeights& matrices, const Plans& plans,
                       int grad_accum, const Rates& rates) {
    const size_t whole = static_cast<size_t>(matrices.elements()) * sizeof(floatX);
    report.narrower = whole - std::min(whole, matrices.bytes());
    for (const auto& [plan, runs] : {std::pair{&plans.train, 1}, std::pair{&plans.add, grad_accum - 1}})
        for (const Work& w : plan->work)
            if (w.name == std::string_view("dequantize")) report.widening_seconds += runs * rates.seconds(w);
}

// Adds what the process takes beside its buffers.
inline void add_process(MemoryReport& r, const RunConfig& o, const InputBytes& read, const Plans& plans) {
    if (kHostIsDevice) {
        r.tokenizer = read.tokenizer;
        r.data = read.data;
        r.reading = read.reading;
    } else {
        r.unpinned = read.tokenizer + read.data + read.reading;
    }
    r.context = context_bytes_of(o);
    size_t copied = 0;
    for (const Plan* plan : plans.all()) copied = std::max(copied, plan->copied);
    r.nccl = nccl_bytes(o.devices);
    r.process = process_bytes(copied) + mpi_bytes(o) + r.tokenizer + r.data + r.context + r.nccl;
}

// Adds the plans, and what a step costs by these rates.
inline void add_plans(MemoryReport& r, const RunConfig& o, const Plans& plans, const Rates& rates) {
    r.train = &plans.train;
    r.update = &plans.update;
    const bool adds = o.own_micro_batches() > o.micro_batches_together();
    r.last = o.devices > 1 && adds ? &plans.add : &plans.train;
    for (const auto& [name, plan] :
         {std::pair{"the update", &plans.update}, std::pair{"validation", &plans.evaluate},
          std::pair{"sampling", &plans.sample}, std::pair{"a sample's continuation", &plans.slide},
          std::pair{"merging", &plans.merge}, std::pair{"exporting", &plans.exported},
          std::pair{"loading", &plans.load}, std::pair{"a soft prompt's begin", &plans.first_prompt}})
        if (!plan->takes.empty()) r.others.emplace_back(name, plan);
    const int passes = o.own_micro_batches() / o.micro_batches_together();
    r.phases = phases_of(plans, passes, rates);
    r.ranks = report_ranks(o, plans, passes, r.phases, rates);
    for (const auto& [plan, runs] :
         {std::pair{&plans.train, 1}, std::pair{&plans.add, passes - 1}, std::pair{&plans.update, 1}})
        for (const Transfer& t : plan->transfers)
            if (!t.waits) r.moved[t.route] += runs * t.bytes;
    r.update_seconds = seconds_of(plans.update.work, rates);
    const double adds_seconds = seconds_of(without_exchanges(plans.add).work, rates);
    r.seconds = seconds_of(plans.train.work, rates) + (o.own_micro_batches() - 1) * adds_seconds +
                (seconds_of(plans.add.work, rates) - adds_seconds) + r.update_seconds +
                seconds_waited(r.phases);
    r.rates = o.rates;
    if (!o.rates.empty() || kHostIsDevice) return;
    r.gpu = nominal_gpu(o.planned_gpu).called;
    if (!gpu_named(r.gpu))
        r.gpu_rates = o.planned_gpu ? ", at its highest clock" : ", computed from what it reports";
}

// What a run with these plans and parts takes, and what a step costs by these rates. The report points to the
// plans, which must outlive it.
inline MemoryReport report_of_run(const RunConfig& o, const RunInputs& in, const Plans& plans,
                                  const PartsWithMemory& parts, const Choices& choices, const Rates& rates) {
    const RunModel& model = parts.model;
    MemoryReport r;
    r.model = o.model;
    r.device = kDevice;
    r.precision = dtype_name<floatX>();
    r.parameters = model.whole.count();
    r.trained = model.trained_count();
    r.vocabulary = in.config.vocabulary;
    r.vocabulary_of = in.assumed_vocabulary();
    r.reads_bytes = parse_new_model(o.model) && in.tokenizer_folder.empty() && in.config.vocabulary == 256;
    static_cast<MemorySetting&>(r) = o;
    r.seq_len = o.seq_len;
    if (!o.memory.empty()) r.budget = describe_budget(o.memory, budget_of(o.memory, o.rank));
    r.choice = choices.memory;
    r.batch_choice = choices.batch;
    r.length_choice = choices.length;
    r.buffers = buffers_of(parts);
    add_process(r, o, in.bytes(), plans);
    add_plans(r, o, plans, rates);
    if (model.quantized) add_stored(r, *model.quantized, plans, o.own_micro_batches(), rates);
    parts.offloaded.add_to(r);
    if (model.embeddings) model.embeddings->add_to(r, shares_host_memory(o.rank));
    r.staged = parts.metrics.pinned_bytes();
    if (const auto* feeders = parts.batches.feeders())
        r.staged += feeders->size() * feeders->front().pinned_bytes();
    return r;
}

// Begins the page of --report for a plan, or for a run on `data` (data_text).
inline void open_report(Report& page, const RunConfig& o, const MemoryReport& report, const Plan& update,
                        const Rates& rates, const std::string& data = "") {
    if (o.report.empty()) return;
    nlohmann::ordered_json about = {
        {"model", report.model}, {"state", o.plan ? "plan" : "running"}, {"steps", o.steps}, {"data", data}};
    char* text = nullptr;
    size_t bytes = 0;
    FILE* const to = open_memstream(&text, &bytes);
    if (o.planned_gpu) print_gpu_answer(to, o, report);
    print_summary(to, report, "takes");
    print_phases(to, report);
    fclose(to);
    about["plan"] = text;
    free(text);
    about["memory"] = timeline_page(report, update, rates);
    for (const auto& [name, values] : o.settings) about["options"][setting_name(name)] = joined(values, " ");
    page.open(o.report, about);
    if (!o.plan && !o.resume.empty() && std::filesystem::is_regular_file(o.log)) page.add_log(o.log);
    if (!o.report_with.empty()) page.add_run(o.report_with);
    page.save();
}

// Prints the report as the options ask: for --plan in full or as JSON, otherwise in short before the run
// allocates. Also writes --timeline and, for --plan, --report.
inline void print_plan(const RunConfig& o, const MemoryReport& report, const Plan& update,
                       const Rates& rates) {
    if (!o.timeline.empty()) write_timeline(o.timeline, report, update, rates);
    if (!o.json && !report.length_choice.empty()) print(stdout, "--seq-len auto: %s\n", report.length_choice);
    if (!o.json && !report.batch_choice.empty()) print(stdout, "--batch auto: %s\n", report.batch_choice);
    if (o.plan && !o.report.empty()) {
        Report page;
        open_report(page, o, report, update, rates);
        page.end("plan");
        if (!page.error.empty()) throw UserError(page.error);
    }
    if (o.json) {
        OperationCosts operations;
        for (const Plan* plan : {report.train, report.update}) add_costs(operations, plan->work, rates);
        nlohmann::ordered_json json = report_json(report, operations);
        if (o.planned_gpu) json["planned_gpu"] = gpu_answer_json(*o.planned_gpu, report);
        json["run"] = json_of_run(o);
        json["memory_setting"] = json_of_setting(o);
        print(stdout, "%s\n", json_text(json));
    } else if (o.plan) {
        if (o.planned_gpu) print_gpu_answer(stdout, o, report);
        print_report(stdout, report);
    } else {
        print_summary(stdout, report, "allocating", memory_free_for(o));
    }
    if (o.plan) remark_shortage(report);
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

// Call it when all memory is allocated: fails if that is not what the report says, to the byte. From then on
// nothing may be allocated on the device.
inline void check_taken(const MemoryReport& report) {
    const auto compare = [](const char* what, size_t taken, size_t planned) {
        if (taken != planned) bug("%zu bytes of %s were taken where %zu were planned", taken, what, planned);
    };
    compare("the device", device_bytes_allocated, report.allocated());
    compare("pinned host memory", pinned_bytes_allocated, report.all_pinned());
    compare("files", working_file_bytes, report.in_files());
    forbid_device_allocation();
}
