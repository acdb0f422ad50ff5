// mlp_layer.h - a block's MLP, forward and backward: the second half of a block, from the residual stream
// after attention to that after the block. It is the norm, a product, GELU, SwiGLU or GeGLU, a second
// product, and the addition to the residual stream. All rows go at once or, with --chunk-rows mlp=, chunk by
// chunk; then its tensors exist for one chunk at a time.
#pragma once

#include <utility>

#include "llmc/elementwise.cuh"
#include "llmc/gradient_sums.cuh"
#include "llmc/linear.h"
#include "llmc/norm_layer.h"
#include "llmc/recompute.h"
#include "llmc/rows.h"
#include "llmc/weights.h"

// The tensors of the MLP's forward, for all rows or a chunk of them.
struct MlpActivations {
    NormedX norm;
    TensorX up;              // before the activation; the gate's half first if there is a gate
    TensorX activated;       // (.., mlp_width)
    BranchNorm norm_behind;  // the norm of the output, if there is one
};

class MlpLayer {
  public:
    MlpLayer(Arena& arena, const Stream& stream, const ModelConfig& config, Weights& weights,
             const NormLayer& norm)
        : arena_(arena),
          stream_(stream),
          config_(config),
          family_(*config.family),
          weights_(weights),
          norm_(norm) {}
    MlpLayer(const MlpLayer&) = delete;

    // Sets how many rows a chunk has; 0: all.
    void set_chunk_rows(int64_t rows) { chunk_rows_ = rows; }
    int64_t chunk_rows() const { return chunk_rows_; }
    // True if these are too many rows to go at once.
    bool goes_in_chunks(int64_t rows) const { return go_in_chunks(rows, chunk_rows_); }

    // Returns the block's output, from the residual stream x (.., C) after attention. If all rows go at once,
    // `m` may have x's norm already, and it keeps for backward what `keep` says. In chunks nothing is kept,
    // and the output overwrites x, unless `keep` says to keep that.
    TensorX forward(int layer, MlpActivations& m, TensorX& x, const Rows& rows, Keep keep) {
        if (!goes_in_chunks(x.rows())) {
            TensorX output = forward_rows("residual", layer, m, x, rows, keep);
            residual_forward(output, output, x, stream_);
            return output;
        }
        Block<floatX>& w = weights_.block(layer);
        const DequantizedScope dequantized(arena_, stream_, {&w.up, &w.down});
        const TensorX in = x.view();
        TensorX output = keep.middle ? arena_.take<floatX>("residual", in.shape()) : std::move(x);
        Keep nothing = kKeepNothing;
        nothing.backward = keep.backward;  // the same kernels as when backward recomputes this
        for_each_chunk(
            arena_, rows, in.rows(), chunk_rows_, [&](const Rows& chunk, int64_t first, int64_t count) {
                MlpActivations of_chunk;
                const TensorX x_chunk = in.rows_at(first, count);
                TensorX to = output.rows_at(first, count);
                const TensorX added = forward_rows("mlp_output", layer, of_chunk, x_chunk, chunk, nothing);
                residual_forward(to, added, x_chunk, stream_);
            });
        return output;
    }

    // d_residual, the gradient of the block's output, becomes that of x. Writes or adds the gradients of the
    // MLP's parameters in g. What `m` does not have is recomputed.
    void backward(int layer, BlockGradient<floatX>& g, MlpActivations& m, const TensorX& x, const Rows& rows,
                  TensorX& d_residual) {
        if (!goes_in_chunks(d_residual.rows())) return backward_rows(layer, g, m, x, rows, d_residual);
        Block<floatX>& w = weights_.block(layer);
        const DequantizedScope dequantized(arena_, stream_, {&w.up, &w.down});
        g.begin_mlp_chunks(arena_, stream_);
        backward_in_chunks(layer, g, x, rows, d_residual);
        g.end_mlp_chunks(stream_);
    }
    // backward() of one chunk of rows after the other. The caller has prepared g to sum over chunks.
    void backward_in_chunks(int layer, BlockGradient<floatX>& g, const TensorX& x, const Rows& rows,
                            TensorX& d_residual) {
        for_each_chunk(arena_, rows, x.rows(), chunk_rows_,
                       [&](const Rows& chunk, int64_t first, int64_t count) {
                           const TensorX x_chunk = x.rows_at(first, count);
                           TensorX d_chunk = d_residual.rows_at(first, count);
                           MlpActivations m;
                           m.norm = norm_.forward(kNorm2, x_chunk, weights_.block(layer).norm_2);
                           backward_rows(layer, g, m, x_chunk, chunk, d_chunk);
                       });
    }

  private:
    // What the MLP adds to x (.., C), for all rows or a chunk: a tensor called `name`.
    TensorX forward_rows(const char* name, int layer, MlpActivations& m, const TensorX& x, const Rows& rows,
                         Keep keep) {
        const Block<floatX>& w = weights_.block(layer);
        if (!m.norm.rstd) m.norm = norm_.forward(kNorm2, x, w.norm_2);
        if (!keep.backward && family_.mlp == MlpKind::Gelu) {  // GELU's input is not needed
            m.activated = linear_forward(arena_, stream_, "gelu", m.norm.out, w.up, rows, true);
            m.norm.out.drop();
        } else {
            m.up = linear_forward(arena_, stream_, "up", m.norm.out, w.up, rows);
            if (!keep.norm || !weights_.backward_reads_input(w.up)) m.norm.out.drop();
            m.activated = activate(m.up);
            if (!keep.up) m.up.drop();
        }
        const char* const product = w.mlp_norm.weight ? "mlp_product" : name;
        TensorX raw = linear_forward(arena_, stream_, product, m.activated, w.down, rows);
        if (!keep.gelu || !weights_.backward_reads_input(w.down)) m.activated.drop();
        TensorX output = norm_.of_branch({kMlpNorm.mean, kMlpNorm.rstd, name}, std::move(raw), w.mlp_norm,
                                         keep.up ? &m.norm_behind : nullptr);
        if (const Dropout d = rows.dropout_at(layer, kOutputPlace, config_.channels))
            dropout(output, output, d, stream_);
        scale(output, output, config_.scales.residual, stream_);
        return output;
    }

    // Backward for all rows or a chunk: adds to d_residual the gradient that comes through the MLP, so that
    // it becomes the gradient of x. The norm and the activation cost no matrix product, so they are dropped
    // after each use and computed again for the next.
    void backward_rows(int layer, BlockGradient<floatX>& g, MlpActivations& m, const TensorX& x,
                       const Rows& rows, TensorX& d_residual) {
        const Block<floatX>& w = weights_.block(layer);
        auto make_norm = [&] { return norm_.take_output(m.norm, kNorm2, x, w.norm_2); };
        if (!m.up) m.up = linear_forward(arena_, stream_, "up", make_norm(), w.up, rows);
        auto make_activated = [&] { return m.activated ? std::move(m.activated) : activate(m.up); };
        const auto back = [&](const char* name, LinearGradient<floatX>& to, auto& make_x, const TensorX& d,
                              const Linear<floatX>& layer_w, const TensorX* gelu_input = nullptr) {
            return linear_backward(arena_, stream_, name, to, make_x, d, layer_w, rows, gelu_input);
        };
        TensorX d_output =
            branch_backward(arena_, stream_, d_residual,
                            rows.dropout_at(layer, kOutputPlace, config_.channels), config_.scales.residual);
        auto make_output = [&] {
            const TensorX activated = m.activated ? m.activated.view() : activate(m.up);
            return linear_forward(arena_, stream_, "mlp_product", activated, w.down, rows);
        };
        d_output = norm_.backward_of_branch(kMlpNorm, g.mlp_norm, std::move(d_output), m.norm_behind,
                                            make_output, w.mlp_norm);
        TensorX d_up;
        if (family_.mlp == MlpKind::Gelu) {
            d_up = back("d_up", g.down, make_activated, d_output, w.down, &m.up);  // through GELU too
            m.up.drop();
        } else {
            const TensorX d = back("d_swiglu", g.down, make_activated, d_output, w.down);
            d_up = std::move(m.up);  // in place: it becomes its gradient
            family_.mlp == MlpKind::GeGlu ? geglu_backward(d_up, d, d_up, stream_)
                                          : swiglu_backward(d_up, d, d_up, stream_);
        }
        d_output.drop();
        TensorX d_norm = back("d_norm_2", g.up, make_norm, d_up, w.up);
        d_up.drop();
        norm_.backward(d_residual, g.norm_2, d_norm, x, m.norm, w.norm_2);
    }

    // The activation (.., mlp_width) of the first product.
    TensorX activate(const TensorX& up) {
        const MlpKind kind = family_.mlp;
        Shape shape = up.shape();
        if (kind != MlpKind::Gelu) shape.dims[shape.count - 1] /= 2;  // the gate's half
        const char* const names[] = {"gelu", "swiglu", "geglu"};
        TensorX out = arena_.take<floatX>(names[static_cast<int>(kind)], shape);
        if (kind == MlpKind::Gelu) gelu_forward(out, up, stream_);
        if (kind == MlpKind::SwiGlu) swiglu_forward(out, up, stream_);
        if (kind == MlpKind::GeGlu) geglu_forward(out, up, stream_);
        return out;
    }

    Arena& arena_;
    const Stream& stream_;
    const ModelConfig& config_;
    const Family& family_;
    Weights& weights_;
    const NormLayer& norm_;
    int64_t chunk_rows_ = 0;
};
