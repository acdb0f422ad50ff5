// run_memory.h - the memory of a run: the report of what it will take, made of its plans and of all that is
// beside them, and the check that it has taken just that.
#pragma once

#include <cstdio>

#include "llmc/batches.h"
#include "llmc/device.h"
#include "llmc/loss_by_position.cuh"
#include "llmc/metrics.h"
#include "llmc/offload_memory.h"
#include "llmc/options.h"
#include "llmc/plan.h"
#include "llmc/plan_free_memory.h"
#include "llmc/plan_gpu.h"
#include "llmc/plan_report.h"
#include "llmc/plan_timeline.h"
#include "llmc/run_inputs.h"
#include "llmc/run_model.h"

// What has memory beside the arena.
struct PartsWithMemory {
    const RunModel& model;
    const OffloadedMemory<floatX>& offloaded;
    const Batches& batches;
    const Metrics& metrics;
    const LossByPosition& loss_by_position;
};

// What a run with these plans and parts takes, and how long a step should take. The report points to the
// plans, which must outlive it.
inline MemoryReport report_of_run(const Options& o, const RunInputs& in, const Plans& plans,
                                  const PartsWithMemory& parts, const Choices& choices, const Rates& rates) {
    const RunModel& model = parts.model;
    const std::vector<Feeder>* const feeders = parts.batches.feeders();
    MemoryReport report = make_report<floatX>(o, plans, in.bytes(), choices, rates);
    parts.offloaded.add_to(report);
    if (model.embeddings) model.embeddings->add_to(report, shares_host_memory(o.rank));
    report.staged = parts.metrics.pinned_bytes();
    if (feeders) report.staged += feeders->size() * feeders->front().pinned_bytes();
    if (model.quantized) add_stored<floatX>(report, *model.quantized, plans, o.own_micro_batches(), rates);
    report.parameters = model.whole.count();
    report.trained = model.trained_count();
    report.vocabulary = in.config.vocabulary;
    report.vocabulary_of = in.assumed_vocabulary();
    report.buffers =
        buffers_of(model.state, pointer_to(model.quantized), pointer_to(model.quantized_head),
                   model.embeddings.has_value(), pointer_to(model.adapter), feeders, parts.metrics.count(),
                   parts.batches.dropout_keys(), parts.loss_by_position.numbers());
    return report;
}

// Prints the report as the options ask: for --plan in full or as JSON, otherwise in short before the run
// allocates. Also writes --timeline.
inline void print_plan(const Options& o, const MemoryReport& report, const Plan& update, const Rates& rates) {
    if (const KnownModel* known = o.plan ? known_shape(o.model) : nullptr; known && o.model != known->name)
        fprintf(stderr, "%s is not here: the plan is for the shape of %s\n", o.model.c_str(), known->name);
    if (!o.timeline.empty()) write_timeline(o.timeline, report, update, rates);
    if (o.json) {
        OperationCosts operations;
        for (const Plan* plan : {report.train, report.update}) add_costs(operations, plan->work, rates);
        nlohmann::ordered_json json = report_json(report, operations);
        if (planned_gpu) json["planned_gpu"] = gpu_answer_json(report);
        printf("%s\n", json_text(json).c_str());
    } else if (o.plan) {
        if (planned_gpu) print_gpu_answer(stdout, o, report);
        print_report(stdout, report);
    } else {
        print_summary(stdout, report, "allocating", memory_of_rank(o.rank));
    }
    if (o.plan) remark_shortage(report);
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
