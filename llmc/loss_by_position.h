// loss_by_position.h - --loss-by-position: sums up a validation's losses by position on the device and writes
// them as a line to a file.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "llmc/device.h"
#include "llmc/metrics.h"
#include "llmc/position_losses.cuh"
#include "llmc/tensor.h"

class LossByPosition {
  public:
    // For sequences of `seq_len` tokens; 0 if no file was asked for.
    explicit LossByPosition(int64_t seq_len) : seq_len_(seq_len) {}

    // How many numbers it needs on the device, and the tensor of them: (seq_len), or nothing.
    int64_t numbers() const { return seq_len_; }
    Tensor<float> sums() const {
        return seq_len_ > 0 ? Tensor<float>(reinterpret_cast<float*>(memory_.data()), {seq_len_})
                            : Tensor<float>();
    }
    void allocate() {
        const size_t bytes = static_cast<size_t>(seq_len_) * sizeof(float);
        if (bytes > 0) memory_ = DeviceBuffer(bytes, "the losses by position");
    }
    void open(const std::string& path, bool append) { file_.open(path, append, "--loss-by-position"); }

    // Fails if a line could not be written.
    void check() const { file_.check(); }

    // begin() starts a validation, count() counts the tokens with a loss in each of its batches, and end()
    // writes the line; `loss` is the validation's mean loss.
    void begin(Stream stream) {
        Tensor<float> sums = this->sums();
        if (sums) device_fill(sums.data(), 0, static_cast<size_t>(sums.bytes()), stream);
        counts_.assign(static_cast<size_t>(seq_len_), 0);
    }
    void count(std::span<const int> targets, std::span<const int> positions) {
        if (!counts_.empty()) count_positions(counts_, targets, positions);
    }
    void end(int64_t step, double loss, Stream stream) {
        if (counts_.empty()) return;
        std::vector<float> sums(counts_.size());
        copy_to_host(sums.data(), this->sums().data(), sums.size() * sizeof(float), stream);
        file_.write({{"step", step},
                     {"val_loss", loss},
                     {"seq_len", seq_len_},
                     {"contexts", position_losses_json(sums, counts_)}});
    }

  private:
    const int64_t seq_len_;
    DeviceBuffer memory_;
    std::vector<uint64_t> counts_;
    LogFile file_;
};
