// norm_layer.h - the norms of a model, forward and backward: layernorm, or RMSNorm, which has no mean and no
// bias. NormLayer takes the tensors from the arena and calls the kernels of the family's norm (layernorm.cuh,
// rmsnorm.cuh).
#pragma once

#include "llmc/arena.h"
#include "llmc/elementwise.cuh"
#include "llmc/gradient_sums.cuh"
#include "llmc/layernorm.cuh"
#include "llmc/model.h"
#include "llmc/rmsnorm.cuh"
#include "llmc/tensor.h"

// ---- the kernels of either norm

// A norm's output (.., C), and the statistics of its rows, from which it can be recomputed. RMSNorm has no
// mean.
template <class T>
struct Normed {
    Tensor<float> mean, rstd;  // (..)
    Tensor<T> out;
};

// How the kinds of RMSNorm multiply with the weight.
constexpr RmsProduct rms_product(NormKind kind) {
    return {.rounds_row = kind == NormKind::Rms, .added = kind == NormKind::RmsPlusOne ? 1.f : 0.f};
}

// n = the norm of x (.., C).
template <class T>
void norm_forward(NormKind kind, Normed<T>& n, const Tensor<T>& x, const Norm<T>& w, float epsilon,
                  Stream stream) {
    if (kind == NormKind::Layer)
        layernorm_forward(n.out, n.mean, n.rstd, x, w.weight, w.bias, stream, epsilon);
    else
        rmsnorm_forward(n.out, n.rstd, x, w.weight, stream, epsilon, rms_product(kind));
}

// sum (.., C) = a + b, and n = the norm of sum.
template <class T>
void residual_norm_forward(NormKind kind, Tensor<T>& sum, Normed<T>& n, const Tensor<T>& a,
                           const Tensor<T>& b, const Norm<T>& w, float epsilon, Stream stream) {
    if (kind == NormKind::Layer)
        residual_layernorm_forward(sum, n.out, n.mean, n.rstd, a, b, w.weight, w.bias, stream, epsilon);
    else
        residual_rmsnorm_forward(sum, n.out, n.rstd, a, b, w.weight, stream, epsilon, rms_product(kind));
}

// Recomputes out (.., C) = the norm of x from the statistics in n: the same bits.
template <class T>
void normalize(NormKind kind, Tensor<T>& out, const Tensor<T>& x, const Normed<T>& n, const Norm<T>& w,
               Stream stream) {
    if (kind == NormKind::Layer)
        layernorm_normalize(out, x, n.mean, n.rstd, w.weight, w.bias, stream);
    else
        rmsnorm_normalize(out, x, n.rstd, w.weight, stream, rms_product(kind));
}

// How many column sums norm_backward() computes: for the weight's gradient, and for the bias's if there is
// one.
constexpr int norm_sums(NormKind kind) { return kind == NormKind::Layer ? 2 : 1; }

// Adds the gradients through the norm of x, from d_out (.., C), to d_x (.., C) and to g. Those that are
// absent in g are not computed. scratch: column_sums_scratch(rows, C, norm_sums(kind)).
template <class T, class Gradient>
void norm_backward(NormKind kind, Tensor<T>& d_x, Norm<Gradient>& g, Tensor<float>& scratch,
                   const Tensor<T>& d_out, const Tensor<T>& x, const Normed<T>& n, const Norm<T>& w,
                   Stream stream) {
    if (kind == NormKind::Layer)
        layernorm_backward(d_x, g.weight, g.bias, scratch, d_out, x, n.mean, n.rstd, w.weight, stream);
    else
        rmsnorm_backward(d_x, g.weight, scratch, d_out, x, n.rstd, w.weight, stream, rms_product(kind));
}

// ---- the norms of a model

using NormedX = Normed<floatX>;

// The names of a norm's tensors in plans.
struct NormNames {
    const char *mean, *rstd, *out;
};
constexpr NormNames kNorm1 = {"norm_1_mean", "norm_1_rstd", "norm_1"},
                    kNorm2 = {"norm_2_mean", "norm_2_rstd", "norm_2"},
                    kAttentionNorm = {"attention_norm_mean", "attention_norm_rstd", "attention_norm"},
                    kMlpNorm = {"mlp_norm_mean", "mlp_norm_rstd", "mlp_norm"},
                    kLastNorm = {"norm_f_mean", "norm_f_rstd", "norm_f"},
                    kEmbeddingNorm = {"embedding_mean", "embedding_rstd", "residual"};

// What a norm behind attention or MLP leaves for backward: its input and the statistics of that.
struct BranchNorm {
    TensorX in;
    NormedX norm;
};

// A norm whose weight is absent does nothing: its output is a view of its input.
class NormLayer {
  public:
    NormLayer(Arena& arena, const Stream& stream, const ModelConfig& config)
        : arena_(arena),
          stream_(stream),
          kind_(config.family->norm),
          epsilon_(static_cast<float>(config.norm_epsilon)) {}

    // The norm of x (rows, C).
    NormedX forward(const NormNames& names, const TensorX& x, const Norm<floatX>& w) const {
        if (!w.weight) return {{}, {}, x.view()};
        NormedX n = take(names, x);
        norm_forward(kind_, n, x, w, epsilon_, stream_);
        return n;
    }
    // sum (rows, C) = a + b, and its norm.
    NormedX add_and_forward(const NormNames& names, TensorX& sum, const TensorX& a, const TensorX& b,
                            const Norm<floatX>& w) const {
        if (!w.weight) {
            residual_forward(sum, a, b, stream_);
            return forward(names, sum, w);
        }
        NormedX n = take(names, a);
        residual_norm_forward(kind_, sum, n, a, b, w, epsilon_, stream_);
        return n;
    }
    // A norm's output: the one that forward kept, or recomputed from the saved statistics, to the same bits.
    TensorX take_output(NormedX& n, const NormNames& names, const TensorX& x, const Norm<floatX>& w) const {
        if (!w.weight) return x.view();
        if (n.out) return std::move(n.out);
        TensorX out = arena_.take<floatX>(names.out, x.shape());
        normalize(kind_, out, x, n, w, stream_);
        return out;
    }
    // From d_out (rows, C), adds the gradient of the norm's input x to d_x (rows, C), and those of its
    // parameters to g.
    void backward(TensorX& d_x, NormGradient<floatX>& g, const TensorX& d_out, const TensorX& x,
                  const NormedX& n, const Norm<floatX>& w) const {
        if (!w.weight) return residual_forward(d_x, d_x, d_out, stream_);
        TensorF scratch;
        if (g.view.weight)
            scratch = arena_.take<float>("column_sums",
                                         column_sums_scratch(x.rows(), x.columns(), norm_sums(kind_)));
        g.with([&](auto& to) { norm_backward(kind_, d_x, to, scratch, d_out, x, n, w, stream_); });
    }

    // The norm of what a branch, attention or MLP, adds to the residual stream; that itself without a norm.
    // `kept`, if given, gets what backward_of_branch() needs.
    TensorX of_branch(const NormNames& names, TensorX&& branch, const Norm<floatX>& w,
                      BranchNorm* kept) const {
        if (!w.weight) return std::move(branch);
        NormedX n = forward(names, branch, w);
        TensorX out = std::move(n.out);
        if (kept) *kept = {std::move(branch), std::move(n)};
        return out;
    }
    // From d_out (rows, C), the gradient of the norm's output, returns that of the branch, and adds that of
    // the weight to g. make_branch() computes the branch again if forward did not keep it.
    template <class MakeBranch>
    TensorX backward_of_branch(const NormNames& names, NormGradient<floatX>& g, TensorX&& d_out,
                               BranchNorm& kept, MakeBranch&& make_branch, const Norm<floatX>& w) const {
        if (!w.weight) return std::move(d_out);
        if (!kept.in) of_branch(names, make_branch(), w, &kept);
        TensorX d_branch = arena_.take<floatX>("d_branch", d_out.shape(), "gradient");
        fill_zero(d_branch, stream_);
        backward(d_branch, g, d_out, kept.in, kept.norm, w);
        kept = {};
        return d_branch;
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
