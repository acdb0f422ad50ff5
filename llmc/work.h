// work.h - what the operations of a step cost: the FLOPs and bytes that each launcher counts in a dry run of
// the step (arena.h); notices of when each begins and ends, for measurements (bench.h); the same for
// transfers beside them; and the clock of a stream with which such measurements are made.
#pragma once

#include <array>
#include <cassert>
#include <chrono>
#include <compare>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/device.h"

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
        if (a_row) t += format(" rows of %lld", static_cast<long long>(a_row));
        if (b_row) t += format(" b's rows of %lld", static_cast<long long>(b_row));
        if (out_row) t += format(" out's rows of %lld", static_cast<long long>(out_row));
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

// Placement: where weights and their state are, and where offloaded inputs of blocks wait.
enum class Placement { Device, Host, Disk };
inline constexpr const char* kPlacementNames[] = {"device", "host", "disk"};

// Transfer directions, between the device and other placements, while operations run (offload_blocks.h,
// offload_activations.h). A HostUpdate is no transfer: a host's cores update weights meanwhile
// (offload_optimizer.h), and its bytes are an update's. ToRanks is what a rank sends to others on its machine
// while it receives as much (ranks_exchange.h), and ToMachines what it sends to ranks on other machines.
enum class Route { DiskRead, DiskWrite, FromHost, ToHost, HostUpdate, ToRanks, ToMachines };
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
    size_t after = 0;              // how many entries the ledger of work had
    bool stays_with_host = false;  // between a disk and a GPU's host, which uses it itself
    const char* content = "";      // of what ranks exchange: one of kExchanged
};

// During a dry run: where it records its operations and its transfers, and its clock. Null otherwise.
inline std::vector<Work>* work_ledger = nullptr;
inline std::vector<Transfer>* transfer_ledger = nullptr;
inline const int* work_clock = nullptr;

// Is told of the operations of a step as they run, for measurements (bench.h). Operations may nest.
struct OperationListener {
    virtual void operation_begins(const char* name, const Product& product) = 0;
    virtual void operation_ends() = 0;
};
inline OperationListener* operation_listener = nullptr;  // null unless somebody measures

// An operation of the step, from here to the end of the scope; it stands at the top of its launcher. A dry
// run records it, a measured run times it, otherwise nothing happens.
class [[nodiscard]] Operation {
  public:
    Operation(const char* name, double flops, double bytes, const Product& product = {},
              const Variant& variant = {})
        : listener_(work_ledger ? nullptr : operation_listener) {
        if (work_ledger)
            work_ledger->push_back(
                {Range::place(), name, flops, bytes, 1, work_clock ? *work_clock : 0, product, variant});
        if (listener_) listener_->operation_begins(name, product);
    }
    ~Operation() {
        if (listener_) listener_->operation_ends();
    }
    Operation(const Operation&) = delete;

  private:
    OperationListener* listener_;
};

// How many transfers of each kind have begun in a dry run.
inline std::array<int, Transfer::kKinds> transfers_begun = {};

// In a dry run, records that a transfer begins. Returns its number among those of its kind.
inline int note_transfer(Transfer transfer) {
    assert(!transfer.waits);
    if (!transfer_ledger) return -1;
    transfer.range = Range::place();
    transfer.after = work_ledger->size();
    transfer_ledger->push_back(std::move(transfer));
    return transfers_begun[transfer.of]++;
}
// In a dry run, records a wait for a transfer, by its number; negative: for the last that began.
inline void note_wait(Transfer::Of of, int number = -1) {
    if (transfer_ledger)
        transfer_ledger->push_back({.of = of,
                                    .waits = true,
                                    .number = number,
                                    .range = Range::place(),
                                    .after = work_ledger->size()});
}

// The bytes of all transfers that have begun so far, by Route.
inline std::array<double, kRoutes> bytes_moved = {};

inline void count_moved(Route route, size_t bytes) {
    bytes_moved[static_cast<size_t>(route)] += static_cast<double>(bytes);
}
// An asynchronous copy between pinned memory and the device, beside the step.
inline void move_async(Route route, void* to, const void* from, size_t bytes, Stream stream) {
    const EnqueuedRange range(kRouteNames[static_cast<size_t>(route)]);
    count_moved(route, bytes);
    copy_async(to, from, bytes, stream);
}

// Is told where a step waits for a transfer, for measurements (bench.h).
struct WaitListener {
    virtual void wait_begins(Transfer::Of of) = 0;
    virtual void wait_ends() = 0;
};
inline WaitListener* wait_listener = nullptr;  // null unless somebody measures

// A wait for a transfer, from here to the end of the scope.
class [[nodiscard]] Waiting {
  public:
    explicit Waiting(Transfer::Of of) : listener_(wait_listener) {
        if (listener_) listener_->wait_begins(of);
    }
    ~Waiting() {
        if (listener_) listener_->wait_ends();
    }
    Waiting(const Waiting&) = delete;

  private:
    WaitListener* listener_;
};

// The bytes of an operation that accesses each of these tensors once.
template <class... Tensors>
double pass_bytes(const Tensors&... tensors) {
    return (static_cast<double>(tensors.bytes()) + ...);
}

// ---- time of a stream
//
// The seconds since it was made.
class WallClock {
  public:
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

  private:
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// The time between points of a stream's work (by CUDA events on a GPU, by the clock on a CPU), and how long a
// step waits for transfers.

inline void stream_synchronize([[maybe_unused]] Stream stream) {
#if defined(SIMT_GPU)
    CUDA_CHECK(cudaStreamSynchronize(stream));
#endif
}

// Points in the stream's work, numbered from 0, and the time between them.
class Marks {
  public:
    explicit Marks(Stream stream) : stream_(stream) {}
    Marks(const Marks&) = delete;
#if defined(SIMT_GPU)
    ~Marks() {
        for (cudaEvent_t event : moments_) cudaEventDestroy(event);
    }
    int set() {  // errors show in finish(): destructors set marks too
        if (count_ == moments_.size()) cudaEventCreate(&moments_.emplace_back());
        cudaEventRecord(moments_[count_], stream_);
        return static_cast<int>(count_++);
    }
    double seconds(int from, int to) const {
        float ms = 0;
        CUDA_CHECK(cudaEventElapsedTime(&ms, moments_[static_cast<size_t>(from)],
                                        moments_[static_cast<size_t>(to)]));
        return ms * 1e-3;
    }
#else
    int set() {
        if (count_ == moments_.size()) moments_.emplace_back();
        moments_[count_] = std::chrono::steady_clock::now();
        return static_cast<int>(count_++);
    }
    double seconds(int from, int to) const {
        return std::chrono::duration<double>(moments_[static_cast<size_t>(to)] -
                                             moments_[static_cast<size_t>(from)])
            .count();
    }
#endif
    // Waits until the stream has passed all marks.
    void finish() const { stream_synchronize(stream_); }
    void clear() { count_ = 0; }

  private:
    Stream stream_;
#if defined(SIMT_GPU)
    std::vector<cudaEvent_t> moments_;
#else
    std::vector<std::chrono::steady_clock::time_point> moments_;
#endif
    size_t count_ = 0;
};

// Measures how long the device waits in a step for data that is streamed from host or disk, and for other
// ranks. Measures nothing while another listener does.
class StepWaits final : WaitListener {
  public:
    explicit StepWaits(Stream stream) : marks_(stream) {}
    ~StepWaits() { stop(); }

    // Counts waits from here to stop().
    void start() {
        marks_.clear();
        waits_.clear();
        if (!wait_listener) wait_listener = this;
    }
    void stop() {
        if (wait_listener == this) wait_listener = nullptr;
    }
    // The counted waits in seconds: all, and those for other ranks. The stream must have passed them.
    double seconds() const {
        return sum([](Transfer::Of) { return true; });
    }
    double seconds_for_ranks() const {
        return sum([](Transfer::Of of) { return of == Transfer::Ranks; });
    }

  private:
    struct Wait {
        Transfer::Of of;
        int from, to;
    };
    template <class Counts>
    double sum(Counts&& counts) const {
        double seconds = 0;
        for (const Wait& w : waits_)
            if (counts(w.of)) seconds += marks_.seconds(w.from, w.to);
        return seconds;
    }
    void wait_begins(Transfer::Of of) override { waits_.push_back({of, marks_.set(), 0}); }
    void wait_ends() override { waits_.back().to = marks_.set(); }

    Marks marks_;
    std::vector<Wait> waits_;
};
