// loss_by_position.cuh - --loss-by-position: a validation's losses by position, which show how well a model
// uses the length of its context.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/device.h"
#include "llmc/run_records.h"
#include "llmc/rows.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

// ---- the sums
//
// A token's context is what its document has before the target: position p predicts from p + 1 tokens. The
// device sums the losses of each position, one thread per position, row after row: the same bits every time.

// sums[p] += the losses of the rows at position p. These are row b * seq_len + p of each sequence; in a
// packed batch they are the rows of p's group, and `numbers` are the rows' positions.
__global__ void __launch_bounds__(kBlockThreads)
    add_position_losses_kernel(float* sums, const float* losses, const int* numbers, const int* order,
                               const int* starts, int rows, int seq_len) {
    const int group = blockIdx.x * blockDim.x + threadIdx.x;
    if (group >= seq_len) return;
    float sum = 0.f;
    if (numbers) {
        const int begin = starts[group], end = starts[group + 1];
        for (int i = begin; i < end; i++) sum += losses[order[i]];
        if (begin < end) sums[numbers[order[begin]]] += sum;
    } else {
        for (int row = group; row < rows; row += seq_len) sum += losses[row];
        sums[group] += sum;
    }
}

// Adds the losses (B * T, 1) of a batch of B sequences to sums (T), by their positions. Rows without a loss
// have zero.
inline void add_position_losses(Tensor<float>& sums, const Tensor<float>& losses, const Documents& documents,
                                Stream stream) {
    const Operation operation("add_position_losses", 0, pass_bytes(losses));
    const int seq_len = static_cast<int>(sums.size());
    const unsigned blocks = static_cast<unsigned>(ceil_div(seq_len, int64_t{kBlockThreads}));
    launch<add_position_losses_kernel>(blocks, kBlockThreads, 0, stream, sums.data(), losses.data(),
                                       documents.positions.data(), documents.rows_by_position.data(),
                                       documents.position_starts.data(), static_cast<int>(losses.size()),
                                       seq_len);
}

// Counts the tokens with a loss by position. `positions` is empty if each sequence is one document.
inline void count_positions(std::vector<uint64_t>& counts, std::span<const int> targets,
                            std::span<const int> positions) {
    for (size_t row = 0; row < targets.size(); row++)
        if (targets[row] >= 0)
            counts[positions.empty() ? row % counts.size() : static_cast<size_t>(positions[row])]++;
}

// The longest context of the bucket that begins with length `first`. Each length up to 8 has a bucket of its
// own; then each doubling has four buckets.
inline size_t last_of_bucket(size_t first) {
    size_t width = 1;
    while (8 * width < first) width *= 2;
    return first - 1 + width;
}

// The losses by position as a file has them: for each bucket of contexts its first and last length, the
// tokens with a loss there and their mean loss. Buckets without a token are left out.
inline nlohmann::ordered_json position_losses_json(std::span<const float> sums,
                                                   std::span<const uint64_t> counts) {
    nlohmann::ordered_json buckets = nlohmann::ordered_json::array();
    for (size_t first = 1; first <= counts.size();) {
        const size_t last = std::min(last_of_bucket(first), counts.size());
        double loss = 0;
        uint64_t tokens = 0;
        for (size_t p = first - 1; p < last; p++) loss += double{sums[p]}, tokens += counts[p];
        if (tokens > 0)
            buckets.push_back({{"first", first},
                               {"last", last},
                               {"tokens", tokens},
                               {"loss", loss / static_cast<double>(tokens)}});
        first = last + 1;
    }
    return buckets;
}

// ---- the file

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
    // `done` as for LogFile.
    void open(const std::string& path, std::optional<int64_t> done) {
        file_.open("--loss-by-position", path, done);
    }

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
