// timeline.h - the bytes that live after each take, release and operation of a training step, as JSON.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "llmc/file.h"
#include "llmc/report.h"

// What happened at one moment, and the live bytes of each kind after it.
struct TimelineEvent {
    std::string range;
    const char* event;  // "take", "release" or "operation"
    std::string name;
    std::vector<size_t> bytes;  // by kind
};

struct Timeline {
    std::vector<std::string> kinds;
    std::vector<TimelineEvent> events;
};

// The kinds of memory of a training: of the state and the batch as the report has them, then of the arena's
// takes.
inline std::vector<std::string> timeline_kinds(const MemoryReport& report, const Plan& update) {
    std::vector<std::string> kinds;
    const auto add = [&](const std::string& kind) {
        if (kind != "workspace" && std::find(kinds.begin(), kinds.end(), kind) == kinds.end())
            kinds.push_back(kind);
    };
    for (const auto& b : report.buffers) add(b.kind);
    for (const char* kind : {"activation", "gradient"}) add(kind);
    for (const Plan* plan : {report.train, &update})
        for (const Take& t : plan->takes) add(t.kind);
    kinds.push_back("workspace");
    return kinds;
}

// Appends a plan's events in order. An operation's time is that of the take or release that follows it. Takes
// count as find_peak() counts them, rounded up to the arena's alignment. Ranges begin with `phase`.
inline void append_plan(Timeline& timeline, const Plan& plan, const std::string& phase,
                        std::vector<size_t> live) {
    struct Moment {
        int time, second;  // an operation comes before what ends it
        size_t index;
        const char* event;
    };
    std::vector<Moment> moments;
    for (size_t i = 0; i < plan.work.size(); i++) moments.push_back({plan.work[i].time, 0, i, "operation"});
    for (size_t i = 0; i < plan.takes.size(); i++) {
        moments.push_back({plan.takes[i].born, 1, i, "take"});
        moments.push_back({plan.takes[i].dies, 1, i, "release"});
    }
    std::stable_sort(moments.begin(), moments.end(), [](const Moment& a, const Moment& b) {
        return a.time != b.time ? a.time < b.time : a.second < b.second;
    });
    for (const Moment& m : moments) {
        std::string range, name;
        if (m.second == 0) {
            range = plan.work[m.index].range;
            name = plan.work[m.index].name;
        } else {
            const Take& t = plan.takes[m.index];
            const bool born = m.time == t.born;
            const auto kind = std::find(timeline.kinds.begin(), timeline.kinds.end(), t.kind);
            size_t& bytes = live[static_cast<size_t>(kind - timeline.kinds.begin())];
            bytes = born ? bytes + arena_align(t.bytes) : bytes - arena_align(t.bytes);
            range = born ? t.born_at : t.dies_at;
            name = t.name;
        }
        if (range.rfind(phase, 0) != 0) range = range.empty() ? phase : phase + " " + range;
        timeline.events.push_back({range, m.event, name, live});
    }
}

// The timeline of one micro-batch and of the update. State, batch and workspace are there all the time.
inline Timeline make_timeline(const MemoryReport& report, const Plan& update) {
    Timeline timeline{timeline_kinds(report, update), {}};
    std::vector<size_t> live;
    for (const std::string& kind : timeline.kinds)
        live.push_back(kind == "workspace" ? report.workspace() : report.of_kind(kind));
    append_plan(timeline, *report.train, "", live);
    append_plan(timeline, update, "update", live);
    return timeline;
}

// Writes it, one operation a line. Fails naming --timeline when the file cannot be written.
inline void write_timeline(const std::string& path, const MemoryReport& report, const Plan& update) {
    using nlohmann::ordered_json;
    const Timeline timeline = make_timeline(report, update);
    const ordered_json head = {{"model", report.model},           {"parameters", report.parameters},
                               {"device", report.device},         {"precision", report.precision},
                               {"batch", report.batch},           {"seq_len", report.seq_len},
                               {"grad_accum", report.grad_accum}, {"head_rows", report.head_rows},
                               {"recompute", report.recompute},   {"kinds", timeline.kinds}};
    try {
        FileWriter file(path);
        std::string text = json_text(head, -1);
        text.pop_back();  // the object goes on
        file.write(text + ",\n\"operations\": [");
        const char* separator = "\n";
        for (const TimelineEvent& e : timeline.events) {
            const ordered_json line = {
                {"range", e.range}, {"event", e.event}, {"name", e.name}, {"bytes", e.bytes}};
            file.write(separator + line.dump());
            separator = ",\n";
        }
        file.write("\n]}\n");
        file.finish();
    } catch (const UserError& error) {
        fail("--timeline %s", error.what());
    }
}
