// plan_settings.h - what may be chosen to make a run fit into memory: the settings, the rows that are
// processed at a time, and the placements outside the device. plan_fit.h chooses among them; read this to
// give it another choice.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "llmc/attention.cuh"
#include "llmc/run_config.h"
#include "llmc/options_placement.h"
#include "llmc/plan_free_memory.h"
#include "llmc/plan_solver.h"
#include "llmc/recompute.h"
#include "llmc/run_inputs.h"
#include "llmc/temporary_file.h"
#include "llmc/text.h"

// ---- a setting

// Replaces the budget by the choice in the options that a save remembers, so that a resumed run makes no
// other choice. `given`: the options before choosing.
inline void remember_choice(const RunConfig& given, RunConfig& o) {
    auto remember = [&](const char* option, const std::string& value) { o.settings[option] = {value}; };
    if (o.steps > 0) remember("--chunk-rows.head", std::to_string(o.head_rows));
    if (given.mlp_rows != o.mlp_rows) remember("--chunk-rows.mlp", std::to_string(o.mlp_rows));
    if (given.attention_rows != o.attention_rows)
        remember("--chunk-rows.attention", std::to_string(o.attention_rows));
    if (given.batch > 0 && given.memory.empty()) return;
    remember("--batch", std::to_string(o.batch));
    remember("--grad-accum", std::to_string(o.grad_accum));
    remember("--recompute", o.recompute);
    if (o.allow_8bit) {
        remember("--state-formats.master", o.master);
        if (o.optimizer == "adamw") {
            remember("--state-formats.m", o.adam_m);
            remember("--state-formats.v", o.adam_v);
        }
    }
    for (const PlacementOption& p : kPlacements)
        if (p.value(o) != p.value(given)) remember(p.setting().c_str(), p.value(o));
    if (o.zero != given.zero) remember("--zero", o.zero);
    if (o.prefetch != given.prefetch) remember("--prefetch", std::to_string(o.prefetch));
    if (o.by_block != given.by_block) remember("--by-block", "true");
    for (const char* budget : {"--memory", "--memory.host", "--state-formats"}) o.settings.erase(budget);
}

// ---- rows at a time
//
// Chooses the rows of --chunk-rows auto: the fewest rows that the head, an MLP or attention may process at a
// time without making a step noticeably slower.
//
// Smaller chunks of rows need less memory. But each chunk adds to the gradients of matrices again (in bf16,
// slice by slice) and launches all operations of the head, the MLP or the block again. That is expensive if a
// step is short, above all on a GPU, and negligible if it is long.
//
// How rows are cut into chunks changes the rounding. A run shall have the same bits at every recompute level,
// in every format of the optimizer state and with any number of threads, so the choice depends on none of
// these. (Chunks of attention are an exception: only blocks of level block have them.) The step whose time is
// estimated is always the one in which chunks cost most:
// - For the head it has level none, which makes the shortest step. For MLP and attention it has the last
//   level, which keeps none of their activations; chunks keep none either.
// - It has no update.
// - A CPU is taken to have many threads (kChunkThreads), because a launch then takes longest compared with
//   the work.
// Chunks that cost little there cost less in other settings.

// With fewer rows the CPU's matrix products are much slower than the estimates assume: a measured step of
// SmolLM2 took 13% longer with 64 rows, and 1% longer with 256.
constexpr int64_t kFewestHeadRows = 256;
// With fewer rows, products of 4096 channels do not fill an H100, and a CPU's products read and write more of
// the stream than they need.
constexpr int64_t kFewestMlpRows = kFastCpu ? 512 : 2048;
// All thread blocks of a chunk's attention take long, so that a partly filled last wave costs as much as a
// full one: 2048 rows of 32 heads make 512 thread blocks, which are 2.4 waves on an A100 and as slow as 3;
// 4096 rows make 4.7 waves.
constexpr int64_t kFewestAttentionRows = kFastCpu ? 1024 : 4096;
// With fewer than 32 heads, it takes more rows to make as many thread blocks.
inline int64_t fewest_attention_rows(int heads) {
    if (kFastCpu || heads >= 32) return kFewestAttentionRows;
    return kFewestAttentionRows * static_cast<int64_t>(std::bit_ceil(32u / static_cast<unsigned>(heads)));
}
constexpr double kChunkCost = 0.02;  // the share of a step's time that chunks may add
constexpr int kChunkThreads = 64;

// The estimated seconds of a micro-batch's operations, without those of updates during its backward.
inline double seconds_without_update(const Plan& plan, const Rates& rates) {
    double seconds = 0;
    for (const Work& w : plan.work)
        if (w.range.find("update") == std::string::npos) seconds += rates.seconds(w);
    return seconds;
}

// Returns the fewest rows at a time (`fewest` times a power of two) with which a step takes at most 2% longer
// than with all `rows` at once, or 0 if there are none such. seconds(few) estimates a step with `few` rows at
// a time; 0: all.
template <class Seconds>
int64_t choose_chunk_rows(int64_t rows, int64_t fewest, Seconds&& seconds) {
    if (rows <= fewest) return 0;
    const double most = (1 + kChunkCost) * seconds(0);
    for (int64_t few = fewest; few < rows; few *= 2)
        if (seconds(few) <= most) return few;
    return 0;
}

// Returns the setting with its automatic numbers of rows chosen, for a model of `heads` heads and
// sequences of seq_len tokens; 0 if the run has no sequences. seconds(setting) estimates a step.
template <class Seconds>
MemorySetting with_chosen_rows(MemorySetting s, int64_t seq_len, int heads, Seconds&& seconds) {
    MemorySetting trial = s;
    trial.attention_rows = trial.head_rows = 0;  // until they are chosen too
    const auto choose = [&](int64_t MemorySetting::*rows, int64_t all, int64_t fewest, int level) {
        if (s.*rows < 0) {
            trial.recompute = kRecomputeLevels[level].name;
            s.*rows = choose_chunk_rows(all, fewest, [&](int64_t few) {
                trial.*rows = few;
                return seconds(trial);
            });
        }
        trial.*rows = s.*rows;
    };
    choose(&MemorySetting::mlp_rows, s.batch * seq_len, kFewestMlpRows, kLastLevel);
    choose(&MemorySetting::attention_rows, seq_len, fewest_attention_rows(heads), kLastLevel);
    choose(&MemorySetting::head_rows, s.batch * seq_len, kFewestHeadRows, 0);
    return s;
}

// ---- placements
//
// The placements that --memory chooses among: combinations of what is kept outside the device, from only what
// the options ask for up to everything that may be.

// The --memory host= that stands for unlimited host memory. Then nothing is put on a disk.
inline constexpr const char* kAnyHostMemory = "1000TiB";
inline bool has_any_host_memory(const RunConfig& o) { return o.host_memory == kAnyHostMemory; }

// What --memory may place outside the device, because the options leave it open.
struct Movable {
    // Values to try, by the key of --offload; what has none stays as given.
    std::map<std::string, std::vector<std::string>> values;
    bool buffers = false;  // tries --offload state=...:block
};

// What --memory may place outside the device where no option says: beside a GPU in host memory, if
// --memory host= offers it, else in files. `with_files`: everything that is trained may be in files beside a
// GPU too. The state of an adapter of a frozen model stays on the device.
template <class T>
Movable movable(const RunConfig& o, const RunInputs& inputs, bool with_files) {
    Movable m;
    const bool frozen = static_cast<bool>(inputs.adapter), offered = !o.host_memory.empty();
    const bool moves = kHostIsDevice || offered;
    if (o.fills_gpu && !offered) return m;  // the first question is whether it fits the GPU alone
    const auto is_open = [&](const char* key) { return o.open.placements.contains(key); };
    std::vector<std::string> placements;
    if (!kHostIsDevice) placements.push_back("host");
    if (kHostIsDevice || (with_files && !has_any_host_memory(o))) placements.push_back("disk");
    const std::string& placement = placements.front();
    if (is_open("weights") && !frozen && moves) m.values["weights"] = placements;
    if (is_open("weights")) {
        if (offered && placement == "host" && inputs.may_stream_frozen(placement))
            m.values["weights"] = {placement};
        if (inputs.may_stream_frozen("disk") && !has_any_host_memory(o))
            m.values["weights"].push_back("disk");
    }
    if (is_open("embeddings") && inputs.may_move_embeddings())
        m.values["embeddings"] = {offered ? placement : "disk"};
    const bool has_state = o.optimizer == "adamw" || (std::is_same_v<T, bf16> && o.master != "none");
    if (is_open("gradients") && !frozen && !o.update_in_backward && !o.slices_gradients() && moves)
        m.values["gradients"] = placements;
    if (is_open("state") && !frozen && has_state && moves) m.values["state"] = placements;
    if (is_open("updates") && !kHostIsDevice) m.values["updates"] = {"host"};
    m.buffers = o.open.state_buffers;
    if (is_open("inputs") && moves) m.values["inputs"] = {activation_placement_name()};
    // Keys can be offloaded only if attention may take rows in chunks of whole pieces of keys.
    const bool long_enough = o.open.attention_rows && o.seq_len > 2 * kFewestAttentionRows;
    const bool in_pieces = o.attention_rows != 0 && o.attention_rows % kKeyPiece <= 0;
    if (is_open("keys") && moves && (long_enough || in_pieces))
        m.values["keys"] = {activation_placement_name()};
    return m;
}

// --by-block is tried only with at most this many sequences in a step: a dry run executes each micro-batch.
constexpr int64_t kMostTogether = 64;

// True if --by-block may be tried: the rank's sequences of a step are few enough, and more than one.
inline bool may_go_by_block(const RunConfig& o) {
    const int64_t sequences = int64_t{o.batch} * o.grad_accum / o.devices;
    return !o.by_block && sequences > 1 && sequences <= kMostTogether;
}

// What each of several devices may keep, if --zero leaves it open. What takes the least traffic comes first;
// --zero 0 saves none. A device keeps only its slice of the gradients if it has one micro-batch, or all of
// them go through a block together. Another way to share is one more line here.
inline std::vector<RunConfig> ways_to_share(const RunConfig& o) {
    if (o.devices == 1 || o.zero != "auto") return {o};
    std::vector<RunConfig> all;
    const auto add = [&](const char* zero, bool by_block) {
        RunConfig& way = all.emplace_back(o);
        way.zero = zero, way.by_block = by_block;
    };
    add("1", o.by_block);
    const bool exports = !o.export_file.empty() && o.export_part == "model";
    const bool has_files = !parse_new_model(o.model) && o.save_base.empty() && o.merge.empty() && !exports;
    if (o.gradients == "device" && !o.update_in_backward) {
        add("2", o.by_block);
        if (may_go_by_block(o)) add("2", true);
        if (o.weights == "device" && (has_files || !o.trains_adapter())) {
            add("3", o.by_block);
            if (may_go_by_block(o)) add("3", true);
        }
    }
    return all;
}
// Returns the ways of ways_to_share() that keep --by-block as it is and allow the --grad-accum that was
// given.
inline std::vector<RunConfig> ways_to_share_alone(const RunConfig& o) {
    std::vector<RunConfig> all = ways_to_share(o);
    std::erase_if(all, [&](const RunConfig& way) {
        const bool keeps_sums = way.own_micro_batches() > way.micro_batches_together();
        return way.by_block != o.by_block || (way.slices_gradients() && keeps_sums);
    });
    return all;
}

// The options with each combination of placements; the given ones come first. Where blocks are streamed, it
// also tries to take all micro-batches of a step through a block before the next block, so that each block is
// fetched once (GreedySnake, arXiv:2512.17570). Where state is updated in backward, it also tries buffers for
// the state of a whole block, which is then fetched while the block computes. Each combination comes with all
// ways in which several devices may share what is trained.
inline std::vector<RunConfig> placements_to_try(const RunConfig& given, const Movable& movable) {
    std::vector<RunConfig> all = {given};
    // After each of the options, inserts a copy changed by change(copy), if that returns true.
    const auto vary = [&](auto&& change) {
        std::vector<RunConfig> more;
        for (const RunConfig& o : all) {
            more.push_back(o);
            if (RunConfig changed = o; change(changed)) more.push_back(std::move(changed));
        }
        all = std::move(more);
    };
    const auto moves = [](const RunConfig& o) { return o.weights != "device"; };
    const auto comes_in_backward = [](const RunConfig& o) {
        const bool with_host = o.updates == "host" && host_can_update(o);
        return o.state != "device" && o.update_in_backward && !with_host;
    };
    for (const PlacementOption& p : kPlacements) {
        const auto values = movable.values.find(p.key);
        std::vector<RunConfig> more;
        for (const RunConfig& o : all) {
            more.push_back(o);
            if (values == movable.values.end()) continue;
            for (const std::string& value : values->second) {
                RunConfig changed = o;
                p.set(changed, value);
                if (p.may_try(changed)) more.push_back(std::move(changed));
            }
        }
        all = std::move(more);
        if (p.key == std::string("updates"))
            vary([&](RunConfig& o) { return o.state_buffers = -1, comes_in_backward(o) && movable.buffers; });
    }
    vary([&](RunConfig& o) {
        const bool moves_less =
            moves(o) || (o.state != "device" && o.update_in_backward) || o.gradients != "device";
        const bool may = may_go_by_block(o);
        return o.by_block = true, may && moves_less;
    });
    std::vector<RunConfig> shared;
    for (const RunConfig& o : all)
        for (RunConfig& way : ways_to_share(o)) shared.push_back(std::move(way));
    return shared;
}

// True if something that is trained is in files.
inline bool has_files(const RunConfig& o) {
    return o.weights == "disk" || o.gradients == "disk" || o.state == "disk";
}

// The bytes that are free for files of the run's own, in the folder for temporary files; 0 if files there
// cannot bypass the page cache. Asked once: a search and the plan that it leads to see the same space, even
// if other programs write.
inline size_t space_on_disk() {
    static const size_t space = [] {
        const std::string folder = temporary_folder();
        const int fd = make_nameless_file(folder, O_DIRECT);
        return fd >= 0 && close(fd) == 0 ? free_disk_bytes(folder).value_or(0) : 0;
    }();
    return space;
}

// How much memory outside the device --memory may use: a rank's share of what its machine has.
inline BesideDevice memory_beside_device(const RunConfig& o) {
    const auto ranks = static_cast<size_t>(o.rank.on_this_machine);
    // A machine that is only planned for has as much as a run needs.
    const size_t on_disk = o.planned_gpu ? SIZE_MAX : space_on_disk();
    BesideDevice space = {.files = std::min(on_disk / ranks, least_of_ranks.files)};
    if (!o.host_memory.empty()) space.pinned = parse_bytes(o.host_memory, "--memory host=") / ranks;
    return space;
}
