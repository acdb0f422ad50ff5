// plan_timeline.cpp - replays a step's plan event by event, for --timeline and the page of --report.
#include "llmc/plan_report.h"

#include <algorithm>

#include "llmc/file.h"

using nlohmann::ordered_json;

// What happened at one moment, and the live bytes of each kind after it.
struct TimelineEvent {
    std::string range;
    const char* event;  // "take", "release" or "operation"
    std::string name;
    std::vector<size_t> bytes;  // by kind
};

// A transfer, from one position in the list of events to another: 4.5 is in the middle of event 4.
struct TimelineBar {
    std::string range;
    Transfer transfer;
    double begins, ends;
    double seconds = 0, waited = 0;  // its time, and how long computing waits for it; 0 if not known
};

struct Timeline {
    std::vector<std::string> kinds;
    std::vector<TimelineEvent> events;
    std::vector<TimelineBar> bars;
};

// The kinds of memory of a training: those of the state and the batch as in the report, then those of the
// arena's takes.
static std::vector<std::string> timeline_kinds(const MemoryReport& report, const Plan& update) {
    std::vector<std::string> kinds;
    const auto add = [&](const std::string& kind) {
        if (kind != "workspace" && std::ranges::find(kinds, kind) == kinds.end()) kinds.push_back(kind);
    };
    for (const auto& b : report.buffers) add(b.kind);
    for (const char* kind : {"activation", "gradient"}) add(kind);
    for (const Plan* plan : {report.last, &update})
        for (const Take& t : plan->takes) add(t.kind);
    kinds.push_back("workspace");
    return kinds;
}

// The range, with its phase in front.
static std::string range_in(const std::string& phase, std::string_view range) {
    if (range.starts_with(phase)) return std::string(range);
    return range.empty() ? phase : phase + " " + std::string(range);
}

// Appends a plan's events in order. An operation's time is that of the take or release that follows it. Takes
// count as in find_peak(), rounded up to the arena's alignment. Ranges begin with `phase`. `live` are the
// bytes of each kind before the plan. Returns the indices of the operations' events.
static std::vector<size_t> append_plan(Timeline& timeline, const Plan& plan, const std::string& phase,
                                       std::vector<size_t> live) {
    struct Moment {
        int time, second;  // an operation comes before the take or release that ends it
        size_t index;
        const char* event;
    };
    std::vector<Moment> moments;
    for (size_t i = 0; i < plan.work.size(); i++) moments.push_back({plan.work[i].time, 0, i, "operation"});
    for (size_t i = 0; i < plan.takes.size(); i++) {
        moments.push_back({plan.takes[i].born, 1, i, "take"});
        moments.push_back({plan.takes[i].dies, 1, i, "release"});
    }
    std::ranges::stable_sort(moments, [](const Moment& a, const Moment& b) {
        return a.time != b.time ? a.time < b.time : a.second < b.second;
    });
    std::vector<size_t> operations;
    for (const Moment& m : moments) {
        std::string range, name;
        if (m.second == 0) {
            operations.push_back(timeline.events.size());
            range = plan.work[m.index].range;
            name = plan.work[m.index].name;
        } else {
            const Take& t = plan.takes[m.index];
            const bool born = m.time == t.born;
            const auto kind = std::ranges::find(timeline.kinds, t.kind);
            size_t& bytes = live[static_cast<size_t>(kind - timeline.kinds.begin())];
            bytes = born ? bytes + arena_align(t.bytes) : bytes - arena_align(t.bytes);
            range = born ? t.born_at : t.dies_at;
            name = t.name;
        }
        timeline.events.push_back({range_in(phase, range), m.event, name, live});
    }
    return operations;
}

// Appends a plan's transfers beside its operations, whose events are `operations`. With measured rates a bar
// is where the transfer runs. Without, it goes from where the transfer begins in the program to where it is
// waited for.
static void append_bars(Timeline& timeline, const Plan& plan, const std::string& phase,
                        const std::vector<size_t>& operations, const Rates& rates) {
    struct Computed {
        double at, seconds;
    };
    std::vector<Computed> computed;
    struct Moved {
        double at;
        bool joined = false;
    };
    std::vector<Moved> moved;
    const size_t first = timeline.bars.size();
    const auto event_of = [&](size_t operation) {
        return static_cast<double>(operation < operations.size() ? operations[operation]
                                                                 : timeline.events.size());
    };
    simulate(
        plan, rates,
        [&](const Work&, double at, double seconds, double more, Cost) {
            computed.push_back({at, seconds + more});
        },
        [&](const Transfer& t, Cost, double at, double seconds) {
            moved.push_back({at});
            timeline.bars.push_back(
                {range_in(phase, t.range), t, event_of(t.after), event_of(operations.size()), seconds});
        },
        [&](const Transfer& t, size_t which, double, double seconds) {
            timeline.bars[first + which].waited += seconds;
            for (size_t i = 0; i <= which; i++) {
                TimelineBar& bar = timeline.bars[first + i];
                if (bar.transfer.of == t.of && !std::exchange(moved[i].joined, true))
                    bar.ends = event_of(t.after);
            }
        });
    // The position in the events at a time. While computing waits, it is that of the next operation.
    const auto at_time = [&](double seconds) {
        const auto now =
            std::ranges::find_if(computed, [&](const Computed& c) { return c.at + c.seconds > seconds; });
        const double begun = now == computed.end() ? 0 : std::max(0.0, (seconds - now->at) / now->seconds);
        return event_of(static_cast<size_t>(now - computed.begin())) + begun;
    };
    for (size_t i = 0; i < moved.size(); i++) {
        TimelineBar& bar = timeline.bars[first + i];
        if (!rates.measured()) {
            bar.seconds = bar.waited = 0;
            continue;
        }
        bar.begins = at_time(moved[i].at);
        bar.ends = at_time(moved[i].at + bar.seconds);
    }
}

// The timeline of a step's last micro-batch and of the update. State, batch and workspace live all the time.
static Timeline make_timeline(const MemoryReport& report, const Plan& update, const Rates& rates) {
    Timeline timeline{timeline_kinds(report, update), {}, {}};
    std::vector<size_t> live;
    for (const std::string& kind : timeline.kinds)
        live.push_back(kind == "workspace" ? report.workspace() : report.of_kind(kind));
    append_bars(timeline, *report.last, "", append_plan(timeline, *report.last, "", live), rates);
    append_bars(timeline, update, "update", append_plan(timeline, update, "update", live), rates);
    return timeline;
}

// A transfer as JSON, with its times if they are known.
static ordered_json bar_json(const TimelineBar& bar) {
    const Transfer& t = bar.transfer;
    ordered_json j = {{"range", bar.range},          {"of", Transfer::kNames[t.of]},
                      {"way", kRouteNames[t.route]}, {"bytes", static_cast<int64_t>(t.bytes)},
                      {"begins", bar.begins},        {"ends", bar.ends}};
    if (*t.content) j["content"] = t.content;
    if (bar.seconds > 0) j["seconds"] = bar.seconds, j["waited"] = bar.waited;
    return j;
}

ordered_json timeline_page(const MemoryReport& report, const Plan& update, const Rates& rates) {
    const Timeline timeline = make_timeline(report, update, rates);
    const size_t all = timeline.events.size(), every = 1 + all / 1500;
    ordered_json page = {{"kinds", timeline.kinds}, {"every", every}, {"moments", {}}};
    std::map<std::string, std::vector<size_t>> lives;
    std::map<std::string, int> living;
    std::pair<size_t, size_t> most;  // the bytes of an event, and which it is
    for (size_t i = 0; i < all; i++) {
        const TimelineEvent& e = timeline.events[i];
        std::vector<size_t>& ends = lives[e.name];
        const bool begins = *e.event == 't' && living[e.name]++ == 0;
        if (begins && !ends.empty() && ends.back() + 1 >= i / every)
            ends.pop_back();  // it lives on after a gap that is too short to be seen
        else if (begins || (*e.event == 'r' && --living[e.name] == 0))
            ends.push_back(i / every);
        most = std::max(most, {std::accumulate(e.bytes.begin(), e.bytes.end(), size_t{}), i});
        if ((i + 1) % every > 0 && i + 1 < all) continue;
        const TimelineEvent& shown = timeline.events[most.second];
        page["moments"].push_back({shown.range, shown.name, shown.bytes});
        most = {};
    }
    for (const TableLine& t : table_of(report)) {
        if (t.born == "start") lives[t.name] = {0};
        page["table"].push_back({t.name, t.kind, t.shape, t.dtype, t.bytes, t.count, lives[t.name]});
    }
    return page;
}

void write_timeline(const std::string& path, const MemoryReport& report, const Plan& update,
                    const Rates& rates) {
    const Timeline timeline = make_timeline(report, update, rates);
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
        if (!timeline.bars.empty()) file.write("\n],\n\"transfers\": [");
        for (size_t i = 0; i < timeline.bars.size(); i++)
            file.write((i > 0 ? ",\n" : "\n") + bar_json(timeline.bars[i]).dump());
        file.write("\n]}\n");
        file.finish();
    } catch (const UserError& error) {
        fail("--timeline %s", error.what());
    }
}
