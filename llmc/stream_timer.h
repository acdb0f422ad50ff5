// stream_timer.h - measures the time between points of a stream's work (with CUDA events on a GPU, with the
// clock on a CPU), and how long a step waits for transfers.
#pragma once

#include <chrono>
#include <utility>
#include <vector>

#include "llmc/rates_device.h"
#include "llmc/work.h"

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

// Measures how long the device waits in a step for data that is streamed from host or disk. Measures nothing
// while another listener does.
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
    // The counted waits in seconds. The stream must have passed them.
    double seconds() const {
        double sum = 0;
        for (const auto& [from, to] : waits_) sum += marks_.seconds(from, to);
        return sum;
    }

  private:
    void wait_begins(Transfer::Of) override { waits_.push_back({marks_.set(), 0}); }
    void wait_ends() override { waits_.back().second = marks_.set(); }

    Marks marks_;
    std::vector<std::pair<int, int>> waits_;
};
