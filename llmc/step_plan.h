// step_plan.h - the plan of a step, as plain values: what a dry run (arena.h) has recorded of its tensors,
// its operations (work.h) and its transfers. Whatever reports, estimates and searches are made of it needs no
// device.
#pragma once

#include <cassert>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/error.h"

// ---- operations

// What distinguishes one matrix product from another: its shape and its form. All zero for other operations.
struct Product {
    int64_t m = 0, n = 0, k = 0;
    int64_t a_row = 0, b_row = 0, out_row = 0;  // as in MatmulOptions
    bool transpose_a = false, transpose_b = false, accumulate = false, bias = false, gelu = false,
         gelu_backward = false;
    bool bias_gradient = false;  // b's columns are summed too, into zeros: a library may fuse that
    bool widened = false;        // out is fp32, the operands are not
    bool tf32 = false;           // fp32 operands may be rounded to TF32, for tensor cores
    auto operator<=>(const Product&) const = default;

    double flops() const {
        return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
    }

    // "512 x 768 x 3072 NT accumulate": m x n x k, whether a and b are transposed, and its other options.
    std::string text() const {
        std::string t = std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k);
        t += transpose_a ? " T" : " N";
        t += transpose_b ? "T" : "N";
        if (bias) t += " bias";
        if (accumulate) t += " accumulate";
        if (gelu) t += " gelu";
        if (gelu_backward) t += " gelu_backward";
        if (bias_gradient) t += " bias_gradient";
        if (widened) t += " to fp32";
        if (tf32) t += " tf32";
        if (a_row) t += format(" rows of %ld", a_row);
        if (b_row) t += format(" b's rows of %ld", b_row);
        if (out_row) t += format(" out's rows of %ld", out_row);
        return t;
    }
};

// What an operation's speed depends on beside its name and its bytes: for decoding and updates the format,
// for attention the number of keys that a query sees and the size of a head.
struct Variant {
    const char* form = "";
    double length = 0;
    int head_size = 0;
};

// A launch or library call, or several equal ones in a loop. Bytes are those read and written if every
// operand is accessed once.
struct Work {
    std::string_view range;  // where it happens: Range::place()
    const char* name;
    double flops, bytes;  // of all calls
    double calls = 1;
    int time = 0;  // takes and releases before it
    Product product = {};
    Variant variant = {};

    // Its kind, for tables: "matmul 512 x 768 x 3072 NT".
    std::string text() const { return product.m ? name + (" " + product.text()) : name; }
};

// ---- choices of a run that its plan depends on

enum class Optimizer { AdamW, Sgd };
// What extends bf16 weights to fp32: a full copy, or the 16 missing bits (state_formats.h), or nothing; then
// updates use stochastic rounding. fp32 weights need none of it.
enum class Master { Fp32, Split, None };
// The format of one of AdamW's moments. Bf16 uses stochastic rounding; Bits8 has codes in blocks with a scale
// (state_formats.h).
enum class Moment { Fp32, Bf16, Bits8 };

// Their names in options and saves, in the order of the values.
inline constexpr const char* kOptimizerNames[] = {"adamw", "sgd"};
inline constexpr const char* kMasterNames[] = {"fp32", "split", "none"};
inline constexpr const char* kMomentNames[] = {"fp32", "bf16", "8bit"};

// The value with this name, which must be one of them.
template <class Value, size_t count>
Value named(const char* const (&names)[count], const std::string& name) {
    const auto found = std::find(std::begin(names), std::end(names), name);
    assert(found != std::end(names));
    return static_cast<Value>(found - std::begin(names));
}

// ---- transfers

// Placement: where weights and their state are, and where offloaded inputs of blocks wait.
enum class Placement { Device, Host, Disk };
inline constexpr const char* kPlacementNames[] = {"device", "host", "disk"};

// Transfer directions, between the device and other placements, while operations run (offload_blocks.h,
// offload_activations.h). A HostUpdate is no transfer: a host's cores update weights meanwhile
// (offload_optimizer.h), and its bytes are an update's. ToRanks is what a rank sends to others on its machine
// while it receives as much (ranks_exchange.h), and ToMachines what it sends to ranks on other machines.
namespace routes {  // Route::DiskRead indexes arrays
enum Route : size_t { DiskRead, DiskWrite, FromHost, ToHost, HostUpdate, ToRanks, ToMachines };
}
using routes::Route;
constexpr size_t kRoutes = 7;
inline constexpr const char* kRouteNames[kRoutes] = {"disk_read",   "disk_write", "from_host",  "to_host",
                                                     "host_update", "to_ranks",   "to_machines"};

constexpr bool is_exchange(Route route) { return route == Route::ToRanks || route == Route::ToMachines; }
constexpr bool is_disks(Route route) { return route == Route::DiskRead || route == Route::DiskWrite; }
constexpr Route route_back(Route route) {
    return route == Route::DiskRead    ? Route::DiskWrite
           : route == Route::DiskWrite ? Route::DiskRead
           : route == Route::FromHost  ? Route::ToHost
                                       : Route::FromHost;
}
// The direction of a transfer to the device from a placement.
constexpr Route route_from(Placement placement) {
    return placement == Placement::Host ? Route::FromHost : Route::DiskRead;
}

// What ranks exchange in a step (ranks_exchange.h).
inline constexpr const char* kExchanged[] = {"gradients", "weights", "sums"};
// The operation that adds what was received.
inline constexpr const char* kSumRanks = "sum_ranks";
// The range of what completes a unit's gradients while backward is in the next unit (updates.h).
inline constexpr const char* kExchangeRange = "exchange";
inline bool is_exchange(std::string_view path) {
    const size_t at = path.rfind(kExchangeRange);
    return at == 0 || (at != path.npos && path[at - 1] == ' ');
}

// The beginning of a transfer, or a wait for one. A wait is also for all earlier ones of its kind.
struct Transfer {
    enum Of { StreamedBlock, Vocabulary, Offloaded, State, Gradients, Keys, Ranks } of;
    static constexpr size_t kKinds = 7;
    static constexpr const char* kNames[kKinds] = {"weights",   "vocabulary", "inputs", "state",
                                                   "gradients", "keys",       "ranks"};
    bool waits;
    Route route = Route::DiskRead;
    double bytes = 0;
    int number = -1;  // of the awaited one among those of its kind, from 0; negative: the last that began
    std::string_view range = {};
    size_t after = 0;              // how many operations were recorded before it
    bool stays_with_host = false;  // between a disk and a GPU's host, which uses it itself
    const char* content = "";      // of what ranks exchange: one of kExchanged
};

// ---- tensors in the arena, and the whole

struct Shape {
    static constexpr int kMaxDims = 4;
    int64_t dims[kMaxDims] = {};
    int count = 0;

    Shape() = default;
    Shape(std::initializer_list<int64_t> list) {
        assert(list.size() <= kMaxDims);
        for (int64_t d : list) dims[count++] = d;
    }
    int64_t size() const {
        int64_t n = 1;
        for (int i = 0; i < count; i++) n *= dims[i];
        return n;
    }
    // The last dimension, and the product of all others.
    int64_t columns() const { return count ? dims[count - 1] : 1; }
    int64_t rows() const { return columns() ? size() / columns() : 0; }
    bool operator==(const Shape& other) const {
        for (int i = 0; i < kMaxDims; i++)
            if (dims[i] != other.dims[i]) return false;
        return count == other.count;
    }
    std::string text() const {
        std::string s;
        for (int i = 0; i < count; i++) s += (i ? " x " : "") + std::to_string(dims[i]);
        return s;
    }
};

// One take of the step. Times count takes and releases from the start of the step; the tensor lives in [born,
// dies).
struct Take {
    std::string name;
    // What it holds, for the report: "activation", "gradient" (of an activation), "parameter_gradient",
    // "input", "weights", "optimizer_state", "exchange" (between ranks).
    const char* kind = "activation";
    Shape shape;
    const char* dtype = "";
    size_t bytes = 0;   // as requested
    size_t offset = 0;  // in the arena, after its workspace
    int born = 0, dies = 0;
    std::string_view born_at = {}, dies_at = {};  // Range::place() at those times
};

struct Plan {
    std::vector<Take> takes;
    size_t lower_bound = 0;  // the most bytes that live at one time
    int peak_time = 0;       // when that is first reached, and in which range
    std::string peak_at;
    size_t bytes = 0;      // of the placement: lower_bound or a little more
    size_t workspace = 0;  // the largest scratch that was asked for
    size_t copied = 0;     // the most bytes that a thread copies for a product, outside the arena
    struct Loop {
        int takes = 0, time = 0, loops = 0;
    };
    std::vector<Loop> loops;          // the counters after one turn of each repeat()
    std::vector<Work> work;           // the operations, in order
    std::vector<Transfer> transfers;  // among the operations

    // True until it is rehearsed. The plan of an update on the host has only transfers.
    bool is_empty() const { return work.empty() && transfers.empty(); }
};

inline const Plan kNoPlan;

// The bytes that a run takes outside the device.
struct OutsideDevice {
    size_t pinned = 0;     // host memory beside a GPU for what is placed there or passes through it
    size_t shared = 0;     // part of pinned: weights that a machine has once, however many ranks use them
    size_t on_disk = 0;    // matrices that are read from their files when used
    size_t offloaded = 0;  // offloaded inputs of blocks, and keys, in a file; or pinned by a GPU
    size_t working = 0;    // what is trained in a file
};

constexpr size_t kArenaAlignment = 256;
constexpr size_t arena_align(size_t bytes) {
    return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}
