// feeder.h - the micro-batches on their way to the device.
//
// The step reads its batch at addresses that stay the same. On a GPU the host writes a micro-batch into
// pinned memory and a stream of its own copies that to the device while the one before computes; when its
// turn comes, the main stream moves it to where the step reads. Nobody waits but the host, before it writes
// over what has not been copied yet: so it is never more than two micro-batches ahead. On a CPU it writes the
// batch itself.
#pragma once

#include <memory>
#include <span>

#include "llmc/device.h"
#include "llmc/embedding.cuh"

// A micro-batch on the device: B sequences of T tokens and what follows each token.
struct DeviceBatch {
    Tensor<int> inputs, targets;  // (B, T); a negative target does not count
    Tensor<int> rows_by_token;    // (B * T), and
    Tensor<int> token_starts;     // (groups + 1): group_tokens() of the inputs
};

class Feeder {
  public:
    // How often a batch is there: on a GPU the one that computes and the next.
#if defined(SIMT_GPU)
    static constexpr int kCopies = 2;
#else
    static constexpr int kCopies = 1;
#endif

    // Sets the sizes. Takes no memory yet: the batch has shapes, but no data.
    void choose(int batch, int seq_len, int vocabulary) {
        rows_ = int64_t{batch} * seq_len;
        starts_ = most_token_groups(rows_, vocabulary) + 1;
        vocabulary_ = vocabulary;
        batch_.inputs = Tensor<int>(nullptr, {batch, seq_len});
        batch_.targets = batch_.inputs.view();
        batch_.rows_by_token = Tensor<int>(nullptr, {rows_});
        batch_.token_starts = Tensor<int>(nullptr, {starts_});
    }
    // The numbers of one batch, and the device memory of all copies.
    int64_t count() const { return 3 * rows_ + starts_; }
    size_t bytes() const { return kCopies * copy_bytes(); }

    void allocate() {
        current_ = DeviceBuffer(copy_bytes(), "the batch");
        int* at = reinterpret_cast<int*>(current_.data());
        batch_.inputs = Tensor<int>(at, batch_.inputs.shape());
        batch_.targets = Tensor<int>(at + rows_, batch_.targets.shape());
        batch_.rows_by_token = Tensor<int>(at + 2 * rows_, {rows_});
        batch_.token_starts = Tensor<int>(at + 3 * rows_, {starts_});
#if defined(SIMT_GPU)
        lane_ = std::make_unique<Lane>(copy_bytes());
#endif
    }

    const DeviceBatch& batch() const { return batch_; }

    // Makes what fill(inputs, targets) writes, B * T numbers each, the batch of what follows in the stream.
    template <class Fill>
    void feed(Stream stream, Fill&& fill) {
#if defined(SIMT_GPU)
        Lane& l = *lane_;
        l.copied.wait();
        write(l.staging.data(), fill);
        l.taken.block(l.stream.get());
        copy_async(l.next.data(), l.staging.data(), copy_bytes(), l.stream.get());
        l.copied.record(l.stream.get());
        l.copied.block(stream);
        copy_async(current_.data(), l.next.data(), copy_bytes(), stream);
        l.taken.record(stream);
#else
        static_cast<void>(stream);
        write(current_.data(), fill);
#endif
    }

  private:
#if defined(SIMT_GPU)
    struct Lane {  // from the host to the device
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
    // The whole of a batch, its tokens grouped too.
    template <class Fill>
    void write(char* to, Fill& fill) const {
        const std::span<int> all(reinterpret_cast<int*>(to), static_cast<size_t>(count()));
        const size_t rows = static_cast<size_t>(rows_);
        fill(all.subspan(0, rows), all.subspan(rows, rows));
        group_tokens(all.subspan(0, rows), vocabulary_, all.subspan(2 * rows, rows), all.subspan(3 * rows));
    }

    int64_t rows_ = 0, starts_ = 0;
    int vocabulary_ = 0;
    DeviceBuffer current_;
    DeviceBatch batch_;
};
