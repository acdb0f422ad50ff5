// residences.h - the mixes of residences that --memory chooses among: what of a run waits elsewhere than on
// the device, from nothing more than its options say to everything that may.
#pragma once

#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdint>
#include <fcntl.h>
#include <string>
#include <type_traits>
#include <vector>

#include "llmc/chunk_rows.h"
#include "llmc/options.h"
#include "llmc/run_inputs.h"
#include "llmc/solver.h"
#include "llmc/temporary_file.h"

// What a run may move that its options leave open.
struct Movable {
    std::vector<std::string> weights;          // where else blocks' weights may live: names of kHomeNames
    std::vector<std::string> embeddings = {};  // where else a frozen model's embeddings may live
    std::vector<std::string> gradients = {};   // the same of blocks' gradients,
    std::vector<std::string> state;            // and of what only updates need
    bool updates = false;                      // and updates of what lives with the host: --updates host
    bool rooms = false;                        // and its rooms on the device: --state-rooms block
    bool inputs = false;                       // of blocks: --park all
    bool keys = false;                         // and values, beside those: --park-keys
};

// What --memory may have wait elsewhere, where no option says: beside a GPU in host memory, where that is
// offered, else in files. `with_files` all that is trained may be in files there too. Beside a frozen model
// the adapter's own state stays.
template <class T>
Movable movable(const Options& o, const RunInputs& inputs, bool with_files) {
    Movable m;
    const bool frozen = static_cast<bool>(inputs.adapter), offered = o.has("--host-memory");
    const bool moves = kHostIsDevice || offered;
    std::vector<std::string> homes;
    if (!kHostIsDevice) homes.push_back("host");
    if (kHostIsDevice || with_files) homes.push_back("disk");
    const std::string& home = homes.front();
    if (!o.has("--weights") && !frozen && moves) m.weights = homes;
    if (!o.has("--weights")) {
        if (offered && home == "host" && inputs.may_lend_frozen(home)) m.weights = {home};
        if (inputs.may_lend_frozen("disk")) m.weights.push_back("disk");
    }
    if (!o.has("--embeddings") && inputs.may_move_embeddings()) m.embeddings = {offered ? home : "disk"};
    const bool has_state = o.optimizer == "adamw" || (std::is_same_v<T, bf16> && o.master != "none");
    if (!o.has("--gradients") && !frozen && !o.update_in_backward && moves) m.gradients = homes;
    if (!o.has("--state") && !frozen && has_state && moves) m.state = homes;
    m.updates = !kHostIsDevice && !o.has("--updates");
    m.rooms = !o.has("--state-rooms");
    m.inputs = !o.has("--park") && moves;
    // Where attention may go in chunks that are pieces of keys.
    const bool long_enough = !o.has("--attention-rows") && o.seq_len > 2 * kFewestAttentionRows;
    const bool in_pieces = o.attention_rows != 0 && o.attention_rows % kKeyPiece <= 0;
    m.keys = !o.has("--park-keys") && moves && (long_enough || in_pieces);
    return m;
}

// All micro-batches of a step are taken through blocks together only up to so many: each is rehearsed.
constexpr int64_t kMostTogether = 64;

// Whether what the host's cores need for an update is with them, or on the device.
inline bool host_can_update(const Options& o) {
    return o.state != "device" && o.gradients != "disk" && (o.weights != "disk" || o.trains_adapter());
}

// The options with each mix, those given first. Blocks that move may also be passed by all micro-batches of a
// step before the next, as they then come once (GreedySnake, arXiv:2512.17570); state that is updated in
// backward may have the room of a whole block, to come while that is computed.
inline std::vector<Options> residences_to_try(const Options& given, const Movable& movable) {
    std::vector<Options> all = {given};
    // Has each followed by what change(options) makes of it, where that says that it may.
    const auto vary = [&](auto&& change) {
        std::vector<Options> more;
        for (const Options& o : all) {
            more.push_back(o);
            if (Options changed = o; change(changed)) more.push_back(std::move(changed));
        }
        all = std::move(more);
    };
    // Has each followed by itself with something in each of those homes.
    const auto vary_home = [&](std::string Options::*what, const std::vector<std::string>& homes) {
        std::vector<Options> more;
        for (const Options& o : all) {
            more.push_back(o);
            for (const std::string& home : homes) more.emplace_back(o).*what = home;
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
    vary_home(&Options::weights, movable.weights);
    vary_home(&Options::embeddings, movable.embeddings);
    vary_home(&Options::gradients, movable.gradients);
    vary_home(&Options::state, movable.state);
    vary([&](Options& o) { return o.updates = "host", movable.updates && host_can_update(o); });
    vary([&](Options& o) { return o.state_rooms = -1, comes_in_backward(o) && movable.rooms; });
    vary([&](Options& o) { return o.park = -1, movable.inputs; });
    vary([&](Options& o) { return o.park_keys = true, o.park == -1 && movable.keys; });
    vary([&](Options& o) {
        const bool moves_less =
            moves(o) || (o.state != "device" && o.update_in_backward) || o.gradients != "device";
        return o.by_block = true, may_go_together && moves_less;
    });
    return all;
}

// Of some mixes those that lend blocks, with none on its way while another is used: the least that they take.
inline std::vector<Options> without_prefetching(std::vector<Options> mixes) {
    std::erase_if(mixes, [](const Options& o) { return !lends_blocks(o); });
    for (Options& o : mixes) o.prefetch = 0;
    return mixes;
}

// A mix with more of them on their way than by default, and so in rooms: what moves for longer than it is
// computed with gains as many as are there at a step's turn.
inline std::vector<Options> with_more_rooms(const Options& mix) {
    std::vector<Options> all;
    for (const int ahead : {2, 4, 8, 16}) all.emplace_back(mix).prefetch = ahead;
    return all;
}

// Whether something that is trained is in files.
inline bool has_files(const Options& o) {
    return o.weights == "disk" || o.gradients == "disk" || o.state == "disk";
}

// As options, what differs from those given.
inline std::string residences_text(const Options& chosen, const Options& given) {
    std::string text;
    for (const ChosenResidence& r : kChosenResidences) {
        const std::string value = r.value(chosen);
        if (value != r.value(given))
            text += std::string(" ") + r.option + (value == "true" ? "" : " " + value);
    }
    return text;
}

// The bytes that a file of the run's own may have in the folder of such; none where that has no files past
// the page cache.
inline size_t room_on_disk() {
    const std::string folder = temporary_folder();
    const int fd = make_nameless_file(folder, O_DIRECT);
    if (fd < 0) return 0;
    close(fd);
    struct statvfs info;
    if (statvfs(folder.c_str(), &info) != 0) return 0;
    return static_cast<size_t>(info.f_bavail) * info.f_frsize;
}

// What may live elsewhere than on the device because --memory moves it.
inline BesideDevice room_beside_device(const Options& o) {
    BesideDevice room = {.files = room_on_disk()};
    if (o.has("--host-memory")) room.pinned = parse_bytes(o.host_memory, "--host-memory");
    return room;
}
