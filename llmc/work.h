// work.h - how operations and transfers of a step are recorded in a dry run, with the FLOPs and bytes that
// each launcher counts (step_plan.h), and how measurements are told of them as they run (bench.h); and the
// clock of a stream with which such measurements are made.
#pragma once

#include <array>
#include <cassert>
#include <chrono>
#include <utility>
#include <vector>

#include "llmc/device.h"
#include "llmc/step_plan.h"

// A dry run: where it records its operations and its transfers, its clock, and how many transfers of each
// kind have begun.
struct DryRun {
    Plan& plan;
    const int& clock;
    std::array<int, Transfer::kKinds> begun = {};
};
inline DryRun* dry_run = nullptr;  // null unless there is one

// An operation of the step, from here to the end of the scope; it stands at the top of its launcher. A dry
// run records it, a measured run times it, otherwise nothing happens.
class [[nodiscard]] Operation {
  public:
    Operation(const char* name, double flops, double bytes, const Product& product = {},
              const Variant& variant = {})
        : listener_(dry_run ? nullptr : step_listener) {
        if (dry_run)
            dry_run->plan.work.push_back(
                {Range::place(), name, flops, bytes, 1, dry_run->clock, product, variant});
        if (listener_) listener_->operation_begins(name, product);
    }
    ~Operation() {
        if (listener_) listener_->operation_ends();
    }
    Operation(const Operation&) = delete;

  private:
    StepListener* listener_;
};

// In a dry run, records that a transfer begins. Returns its number among those of its kind.
inline int note_transfer(Transfer transfer) {
    assert(!transfer.waits);
    if (!dry_run) return -1;
    transfer.range = Range::place();
    transfer.after = dry_run->plan.work.size();
    dry_run->plan.transfers.push_back(transfer);
    return dry_run->begun[transfer.of]++;
}
// In a dry run, records a wait for a transfer, by its number; negative: for the last that began.
inline void note_wait(Transfer::Of of, int number = -1) {
    if (dry_run)
        dry_run->plan.transfers.push_back({.of = of,
                                           .waits = true,
                                           .number = number,
                                           .range = Range::place(),
                                           .after = dry_run->plan.work.size()});
}

// Tells measurements of a transfer that begins.
inline void count_moved(Route route, size_t bytes) {
    if (step_listener) step_listener->transfer_begins(route, bytes);
}
// An asynchronous copy between pinned memory and the device, beside the step.
inline void move_async(Route route, void* to, const void* from, size_t bytes, Stream stream) {
    const EnqueuedRange range(kRouteNames[route]);
    count_moved(route, bytes);
    copy_async(to, from, bytes, stream);
}

// A wait for a transfer, from here to the end of the scope.
class [[nodiscard]] Waiting {
  public:
    explicit Waiting(Transfer::Of of) : listener_(step_listener) {
        if (listener_) listener_->wait_begins(of);
    }
    ~Waiting() {
        if (listener_) listener_->wait_ends();
    }
    Waiting(const Waiting&) = delete;

  private:
    StepListener* listener_;
};

// The bytes of an operation that accesses each of these tensors once.
template <class... Tensors>
double pass_bytes(const Tensors&... tensors) {
    return (static_cast<double>(tensors.bytes()) + ...);
}

// ---- time

// The seconds since it was made.
class WallClock {
  public:
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

  private:
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

inline void stream_synchronize([[maybe_unused]] Stream stream) {
#if defined(SIMT_GPU)
    CUDA_CHECK(cudaStreamSynchronize(stream));
#endif
}

// Points in the stream's work, numbered from 0, and the time between them: by CUDA events on a GPU, by the
// clock on a CPU.
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
class StepWaits final : StepListener {
  public:
    explicit StepWaits(Stream stream) : marks_(stream) {}
    ~StepWaits() { stop(); }

    // Counts waits from here to stop().
    void start() {
        marks_.clear();
        waits_.clear();
        if (!step_listener) step_listener = this;
    }
    void stop() {
        if (step_listener == this) step_listener = nullptr;
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
