// data_feeder.h - brings micro-batches to the device.
//
// The step reads its batch at fixed addresses. On a GPU the host writes a micro-batch into pinned memory, and
// a stream of its own copies it to a second device buffer while the micro-batch before it computes. When its
// turn comes, the main stream copies it to where the step reads. Only the host ever waits: before it
// overwrites pinned memory that has not been copied yet. So the host is at most two micro-batches ahead. On a
// CPU the host writes the batch itself.
#pragma once

#include <algorithm>
#include <cassert>
#include <memory>
#include <span>
#include <vector>

#include "llmc/device.h"
#include "llmc/rows.h"
#include "llmc/tensor.h"

// The most groups that the tokens of `rows` rows can form.
constexpr int64_t most_token_groups(int64_t rows, int vocabulary) {
    return std::min<int64_t>(rows, vocabulary);
}

// Groups the rows of `tokens`, all in [0, vocabulary), by counting: O(rows + vocabulary). Group g is the rows
// order[starts[g]] .. order[starts[g + 1] - 1], in ascending order. starts has at least most_token_groups() +
// 1 numbers; groups that are not needed are empty.
inline void group_tokens(std::span<const int> tokens, int vocabulary, std::span<int> order,
                         std::span<int> starts) {
    assert(order.size() == tokens.size());
    std::vector<int> next(static_cast<size_t>(vocabulary) + 1, 0);
    for (int t : tokens) next[static_cast<size_t>(t) + 1]++;
    size_t groups = 0;
    for (size_t v = 0; v < static_cast<size_t>(vocabulary); v++) {
        if (next[v + 1] > 0) starts[groups++] = next[v];
        next[v + 1] += next[v];
    }
    assert(groups < starts.size());
    std::fill(starts.begin() + static_cast<ptrdiff_t>(groups), starts.end(), static_cast<int>(tokens.size()));
    for (size_t row = 0; row < tokens.size(); row++)
        order[static_cast<size_t>(next[static_cast<size_t>(tokens[row])]++)] = static_cast<int>(row);
}

// A micro-batch on the device: B sequences of T tokens, and the token that follows each. A packed one also
// has the place of its documents and the factor of its tokens' losses in the step (1 number); others have
// neither.
struct DeviceBatch {
    Tensor<int> inputs, targets;  // (B, T); a negative target has no loss
    Tensor<int> rows_by_token;    // (B * T), with
    Tensor<int> token_starts;     // (groups + 1): group_tokens() of the inputs
    Documents documents;
    Tensor<float> loss_scale;
};

class Feeder {
  public:
    // How many buffers there are on the device. On a GPU two: one for the batch that computes, one for the
    // next.
    static constexpr int kCopies = kHostIsDevice ? 1 : 2;

    // Sets the sizes and whether batches are packed. Allocates nothing yet: batch() has its shapes, but no
    // data.
    void set_sizes(int batch, int seq_len, int vocabulary, bool packed = false) {
        rows_ = int64_t{batch} * seq_len;
        starts_ = most_token_groups(rows_, vocabulary) + 1;
        vocabulary_ = vocabulary;
        seq_len_ = seq_len;
        packed_ = packed;
        point_at(nullptr);
    }
    // How many numbers one batch has, and the device memory of all its buffers.
    int64_t count() const { return 3 * rows_ + starts_ + (packed_ ? 3 * rows_ + seq_len_ + 2 : 0); }
    size_t bytes() const { return kCopies * copy_bytes(); }
    // Pinned host memory, in bytes.
    size_t pinned_bytes() const { return kHostIsDevice ? 0 : copy_bytes(); }

    void allocate() {
        current_ = DeviceBuffer(copy_bytes(), "the batch");
        point_at(reinterpret_cast<int*>(current_.data()));
#if defined(SIMT_GPU)
        lane_ = std::make_unique<Lane>(copy_bytes());
#endif
    }

    const DeviceBatch& batch() const { return batch_; }

    // Where the host writes the next micro-batch, B * T numbers in each span. positions, ends and loss_scale
    // are only for packed batches. slot() waits until the micro-batch before it has left the pinned memory.
    struct Slot {
        std::span<int> inputs, targets, positions, ends;
        float* loss_scale;
    };
    Slot slot() {
#if defined(SIMT_GPU)
        lane_->copied.wait();
#endif
        const size_t rows = static_cast<size_t>(rows_);
        Slot slot{numbers().subspan(0, rows), numbers().subspan(rows, rows), {}, {}, nullptr};
        if (packed_) {
            slot.positions = documents().subspan(0, rows);
            slot.ends = documents().subspan(rows, rows);
            slot.loss_scale = reinterpret_cast<float*>(&numbers().back());
        }
        return slot;
    }

    // Makes what was written into the slot the batch of all work that is queued on the stream from here on.
    void send([[maybe_unused]] Stream stream) {
        const size_t rows = static_cast<size_t>(rows_);
        group_tokens(numbers().subspan(0, rows), vocabulary_, numbers().subspan(2 * rows, rows),
                     numbers().subspan(3 * rows, static_cast<size_t>(starts_)));
        if (packed_)
            group_tokens(documents().subspan(0, rows), seq_len_, documents().subspan(2 * rows, rows),
                         documents().subspan(3 * rows, static_cast<size_t>(seq_len_) + 1));
#if defined(SIMT_GPU)
        Lane& l = *lane_;
        l.taken.block(l.stream.get());
        copy_async(l.next.data(), l.staging.data(), copy_bytes(), l.stream.get());
        l.copied.record(l.stream.get());
        l.copied.block(stream);
        copy_async(current_.data(), l.next.data(), copy_bytes(), stream);
        l.taken.record(stream);
#endif
    }

  private:
#if defined(SIMT_GPU)
    struct Lane {  // copies from the host to the device
        explicit Lane(size_t bytes) : staging(bytes), next(bytes, "the next batch") {}
        PinnedBuffer staging;
        DeviceBuffer next;
        OwnStream stream;
        Event copied,  // from staging to next
            taken;     // from next to the batch
    };
    std::unique_ptr<Lane> lane_;
#endif

    size_t copy_bytes() const { return static_cast<size_t>(count()) * sizeof(int); }
    // Places the tensors of the batch one after the other, from `at` on.
    void point_at(int* at) {
        const auto next = [&](Shape shape) {
            int* const begin = at;
            if (at) at += shape.size();
            return Tensor<int>(begin, shape);
        };
        const Shape matrix{rows_ / seq_len_, seq_len_};
        batch_.inputs = next(matrix);
        batch_.targets = next(matrix);
        batch_.rows_by_token = next({rows_});
        batch_.token_starts = next({starts_});
        batch_.documents = {};
        batch_.loss_scale.drop();
        if (!packed_) return;
        batch_.documents.positions = next(matrix);
        batch_.documents.ends = next(matrix);
        batch_.documents.rows_by_position = next({rows_});
        batch_.documents.position_starts = next({seq_len_ + 1});
        batch_.loss_scale = Tensor<float>(reinterpret_cast<float*>(at), {1});
    }
    // The numbers of the batch that the host writes, in the order of point_at().
    std::span<int> numbers() const {
#if defined(SIMT_GPU)
        char* at = lane_->staging.data();
#else
        char* at = current_.data();
#endif
        return {reinterpret_cast<int*>(at), static_cast<size_t>(count())};
    }

    // The part of numbers() that only packed batches have.
    std::span<int> documents() const { return numbers().subspan(static_cast<size_t>(3 * rows_ + starts_)); }

    int64_t rows_ = 0, starts_ = 0;
    int vocabulary_ = 0, seq_len_ = 1;
    bool packed_ = false;
    DeviceBuffer current_;
    DeviceBatch batch_;
};
