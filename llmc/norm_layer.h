// norm_layer.h - the norms of a model, forward and backward: takes their tensors from the arena and calls the
// kernels (norm_of_family.h).
#pragma once

#include "llmc/arena.h"
#include "llmc/gradient_sums.h"
#include "llmc/precision.h"

using NormedX = Normed<floatX>;

// The names of a norm's tensors in plans.
struct NormNames {
    const char *mean, *rstd, *out;
};
constexpr NormNames kNorm1 = {"ln_1_mean", "ln_1_rstd", "ln_1"}, kNorm2 = {"ln_2_mean", "ln_2_rstd", "ln_2"},
                    kLastNorm = {"ln_f_mean", "ln_f_rstd", "ln_f"},
                    kEmbeddingNorm = {"embedding_mean", "embedding_rstd", "residual"};

class NormLayer {
  public:
    NormLayer(Arena& arena, const Stream& stream, const ModelConfig& config)
        : arena_(arena),
          stream_(stream),
          kind_(config.family->norm),
          epsilon_(static_cast<float>(config.norm_epsilon)) {}

    // The norm of x (rows, C).
    NormedX forward(const NormNames& names, const TensorX& x, const Norm<floatX>& w) const {
        NormedX n = take(names, x);
        norm_forward(kind_, n, x, w, epsilon_, stream_);
        return n;
    }
    // sum (rows, C) = a + b, and its norm.
    NormedX add_and_forward(const NormNames& names, TensorX& sum, const TensorX& a, const TensorX& b,
                            const Norm<floatX>& w) const {
        NormedX n = take(names, a);
        residual_norm_forward(kind_, sum, n, a, b, w, epsilon_, stream_);
        return n;
    }
    // A norm's output: the one that forward kept, or recomputed from the saved statistics, to the same bits.
    TensorX output(NormedX& n, const NormNames& names, const TensorX& x, const Norm<floatX>& w) const {
        if (n.out) return std::move(n.out);
        TensorX out = arena_.take<floatX>(names.out, x.shape());
        normalize(kind_, out, x, n, w, stream_);
        return out;
    }
    // From d_out (rows, C), adds the gradient of the norm's input x to d_x (rows, C), and those of its
    // parameters to g.
    void backward(TensorX& d_x, NormGradient<floatX>& g, const TensorX& d_out, const TensorX& x,
                  const NormedX& n, const Norm<floatX>& w) const {
        TensorF scratch;
        if (g.view.weight)
            scratch = arena_.take<float>("column_sums",
                                         column_sums_scratch(x.rows(), x.columns(), norm_sums(kind_)));
        g.with([&](auto& to) { norm_backward(kind_, d_x, to, scratch, d_out, x, n, w, stream_); });
    }

  private:
    // The tensors for x (.., C), not filled yet.
    NormedX take(const NormNames& names, const TensorX& x) const {
        Shape rows = x.shape();
        rows.count--;
        TensorF mean = kind_ == NormKind::Layer ? arena_.take<float>(names.mean, rows) : TensorF();
        TensorF rstd = arena_.take<float>(names.rstd, rows);
        return {std::move(mean), std::move(rstd), arena_.take<floatX>(names.out, x.shape())};
    }

    Arena& arena_;
    const Stream& stream_;
    const NormKind kind_;
    const float epsilon_;
};
