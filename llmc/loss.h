// loss.h - the loss of a batch, as a value: which rows count, and with which weight. The head gives it logits
// by chunks of rows (train_gpt.cu); another loss whose rows do not depend on each other has the same members.
#pragma once

#include "llmc/arena.h"
#include "llmc/cross_entropy.cuh"
#include "llmc/data_feeder.h"
#include "llmc/tensor.h"

// -log softmax(logits)[target] of each row of a batch, in memory of the arena. Rows with a negative target do
// not count. All others have the same weight: the batch's own, if it is packed, else `weight`.
class Loss {
  public:
    // `cap` is the soft cap that logits have; 0: none.
    Loss(Arena& arena, const DeviceBatch& batch, float weight, int vocabulary, double cap)
        : targets_(batch.targets.view({batch.targets.size(), 1})),
          weight_{weight, batch.loss_scale.data()},
          vocabulary_(vocabulary),
          cap_(cap),
          of_rows_(arena.take<float>("losses", {batch.targets.size(), 1})) {}

    // The losses of the rows from `first` on, whose logits (rows, padded vocabulary) these are.
    void forward(const TensorX& logits, int64_t first, Stream stream) {
        TensorF losses = of_rows_.rows_at(first, logits.rows());
        cross_entropy_forward(logits, losses, targets_.rows_at(first, logits.rows()), vocabulary_, stream);
    }
    // The same; and logits become the gradient of the weighted sum of losses, that before the cap.
    void forward_backward(TensorX& logits, int64_t first, Stream stream) {
        TensorF losses = of_rows_.rows_at(first, logits.rows());
        cross_entropy_forward_backward(logits, losses, targets_.rows_at(first, logits.rows()), weight_,
                                       vocabulary_, stream, cap_);
    }
    // Adds the weighted sum of all rows' losses to `total` (1).
    void add_to(TensorF& total, Stream stream) const { add_losses(total, of_rows_, weight_, stream); }
    // The losses (rows, 1), without weights.
    const TensorF& of_rows() const { return of_rows_; }

  private:
    const Tensor<int> targets_;
    const LossScale weight_;
    const int vocabulary_;
    const double cap_;
    TensorF of_rows_;
};
