// residences.h - the placements that --memory chooses among: combinations of what is kept outside the device,
// from only what the options ask for up to everything that may be.
#pragma once

#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdint>
#include <fcntl.h>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "llmc/chunk_rows.h"
#include "llmc/options.h"
#include "llmc/options_placement.h"
#include "llmc/run_inputs.h"
#include "llmc/solver.h"
#include "llmc/temporary_file.h"

// What --memory may place outside the device, because the options leave it open.
struct Movable {
    // Values to try, by the key of --offload; what has none stays as given.
    std::map<std::string, std::vector<std::string>> values;
    bool rooms = false;  // tries --offload state=...:block
};

// What --memory may place outside the device where no option says: beside a GPU in host memory, if
// --memory host= offers it, else in files. `with_files`: everything that is trained may be in files beside a
// GPU too. The state of an adapter of a frozen model stays on the device.
template <class T>
Movable movable(const Options& o, const RunInputs& inputs, bool with_files) {
    Movable m;
    const bool frozen = static_cast<bool>(inputs.adapter), offered = o.has("--memory.host");
    const bool moves = kHostIsDevice || offered;
    const auto is_open = [&](const char* key) { return !o.has(placement(key).setting()); };
    std::vector<std::string> homes;
    if (!kHostIsDevice) homes.push_back("host");
    if (kHostIsDevice || with_files) homes.push_back("disk");
    const std::string& home = homes.front();
    if (is_open("weights") && !frozen && moves) m.values["weights"] = homes;
    if (is_open("weights")) {
        if (offered && home == "host" && inputs.may_lend_frozen(home)) m.values["weights"] = {home};
        if (inputs.may_lend_frozen("disk")) m.values["weights"].push_back("disk");
    }
    if (is_open("embeddings") && inputs.may_move_embeddings())
        m.values["embeddings"] = {offered ? home : "disk"};
    const bool has_state = o.optimizer == "adamw" || (std::is_same_v<T, bf16> && o.master != "none");
    if (is_open("gradients") && !frozen && !o.update_in_backward && moves) m.values["gradients"] = homes;
    if (is_open("state") && !frozen && has_state && moves) m.values["state"] = homes;
    if (is_open("updates") && !kHostIsDevice) m.values["updates"] = {"host"};
    const auto state = o.given.find("--offload.state");
    m.rooms = state == o.given.end() || state->second[0].find(':') == std::string::npos;
    if (is_open("inputs") && moves) m.values["inputs"] = {parked_home_name()};
    // Keys can be offloaded only if attention may take rows in chunks of whole pieces of keys.
    const bool long_enough = !o.has("--chunk-rows.attention") && o.seq_len > 2 * kFewestAttentionRows;
    const bool in_pieces = o.attention_rows != 0 && o.attention_rows % kKeyPiece <= 0;
    if (is_open("keys") && moves && (long_enough || in_pieces)) m.values["keys"] = {parked_home_name()};
    return m;
}

// --by-block is tried only with at most this many sequences in a step: a dry run executes each micro-batch.
constexpr int64_t kMostTogether = 64;

// The options with each combination of placements; the given ones come first. Where blocks are streamed, it
// also tries to take all micro-batches of a step through a block before the next block, so that each block is
// fetched once (GreedySnake, arXiv:2512.17570). Where state is updated in backward, it also tries buffers for
// the state of a whole block, which is then fetched while the block computes.
inline std::vector<Options> residences_to_try(const Options& given, const Movable& movable) {
    std::vector<Options> all = {given};
    // After each of the options, inserts a copy changed by change(copy), if that returns true.
    const auto vary = [&](auto&& change) {
        std::vector<Options> more;
        for (const Options& o : all) {
            more.push_back(o);
            if (Options changed = o; change(changed)) more.push_back(std::move(changed));
        }
        all = std::move(more);
    };
    const auto moves = [](const Options& o) { return o.weights != "device"; };
    const auto comes_in_backward = [](const Options& o) {
        const bool with_host = o.updates == "host" && host_can_update(o);
        return o.state != "device" && o.update_in_backward && !with_host;
    };
    const int64_t sequences = int64_t{given.batch} * given.grad_accum;
    const bool may_go_together = !given.by_block && sequences > 1 && sequences <= kMostTogether;
    for (const Placement& p : kPlacements) {
        const auto values = movable.values.find(p.key);
        std::vector<Options> more;
        for (const Options& o : all) {
            more.push_back(o);
            if (values == movable.values.end()) continue;
            for (const std::string& value : values->second) {
                Options changed = o;
                p.set(changed, value);
                if (p.may_try(changed)) more.push_back(std::move(changed));
            }
        }
        all = std::move(more);
        if (p.key == std::string("updates"))
            vary([&](Options& o) { return o.state_rooms = -1, comes_in_backward(o) && movable.rooms; });
    }
    vary([&](Options& o) {
        const bool moves_less =
            moves(o) || (o.state != "device" && o.update_in_backward) || o.gradients != "device";
        return o.by_block = true, may_go_together && moves_less;
    });
    return all;
}

// The combinations that stream blocks, with prefetching turned off: these take the least memory.
inline std::vector<Options> without_prefetching(std::vector<Options> mixes) {
    std::erase_if(mixes, [](const Options& o) { return !lends_blocks(o); });
    for (Options& o : mixes) o.prefetch = 0;
    return mixes;
}

// A combination with larger prefetch distances than the default, and so with more buffers. If transfers take
// longer than the computation, a step gains the blocks that are still in buffers when it turns from forward
// to backward: these are not fetched again.
inline std::vector<Options> with_more_rooms(const Options& mix) {
    std::vector<Options> all;
    for (const int ahead : {2, 4, 8, 16}) all.emplace_back(mix).prefetch = ahead;
    return all;
}

// True if something that is trained is in files.
inline bool has_files(const Options& o) {
    return o.weights == "disk" || o.gradients == "disk" || o.state == "disk";
}

// The bytes that are free for files of the run's own, in the folder for temporary files; 0 if files there
// cannot bypass the page cache.
inline size_t room_on_disk() {
    const std::string folder = temporary_folder();
    const int fd = make_nameless_file(folder, O_DIRECT);
    if (fd < 0) return 0;
    close(fd);
    struct statvfs info;
    if (statvfs(folder.c_str(), &info) != 0) return 0;
    return static_cast<size_t>(info.f_bavail) * info.f_frsize;
}

// How much memory outside the device --memory may use.
inline BesideDevice room_beside_device(const Options& o) {
    BesideDevice room = {.files = room_on_disk()};
    if (o.has("--memory.host")) room.pinned = parse_bytes(o.host_memory, "--memory host=");
    return room;
}
