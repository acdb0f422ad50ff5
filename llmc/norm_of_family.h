// norm_of_family.h - the norm that a model family uses: layernorm, or RMSNorm, which has no mean and no bias.
#pragma once

#include "llmc/layernorm.cuh"
#include "llmc/model.h"
#include "llmc/rmsnorm.cuh"

// A norm's output (.., C), and the statistics of its rows, from which it can be recomputed. RMSNorm has no
// mean.
template <class T>
struct Normed {
    Tensor<float> mean, rstd;  // (..)
    Tensor<T> out;
};

// n = the norm of x (.., C).
template <class T>
void norm_forward(NormKind kind, Normed<T>& n, const Tensor<T>& x, const Norm<T>& w, float epsilon,
                  Stream stream) {
    if (kind == NormKind::Rms)
        rmsnorm_forward(n.out, n.rstd, x, w.weight, stream, epsilon);
    else
        layernorm_forward(n.out, n.mean, n.rstd, x, w.weight, w.bias, stream, epsilon);
}

// sum (.., C) = a + b, and n = the norm of sum.
template <class T>
void residual_norm_forward(NormKind kind, Tensor<T>& sum, Normed<T>& n, const Tensor<T>& a,
                           const Tensor<T>& b, const Norm<T>& w, float epsilon, Stream stream) {
    if (kind == NormKind::Rms)
        residual_rmsnorm_forward(sum, n.out, n.rstd, a, b, w.weight, stream, epsilon);
    else
        residual_layernorm_forward(sum, n.out, n.mean, n.rstd, a, b, w.weight, w.bias, stream, epsilon);
}

// Recomputes out (.., C) = the norm of x from the statistics in n: the same bits.
template <class T>
void normalize(NormKind kind, Tensor<T>& out, const Tensor<T>& x, const Normed<T>& n, const Norm<T>& w,
               Stream stream) {
    if (kind == NormKind::Rms)
        rmsnorm_normalize(out, x, n.rstd, w.weight, stream);
    else
        layernorm_normalize(out, x, n.mean, n.rstd, w.weight, w.bias, stream);
}

// How many column sums norm_backward() computes: for the weight's gradient, and for the bias's if there is
// one.
constexpr int norm_sums(NormKind kind) { return kind == NormKind::Rms ? 1 : 2; }

// Adds the gradients through the norm of x, from d_out (.., C), to d_x (.., C) and to g. Those that are
// absent in g are not computed. scratch: column_sums_scratch(rows, C, norm_sums(kind)).
template <class T, class Gradient>
void norm_backward(NormKind kind, Tensor<T>& d_x, Norm<Gradient>& g, Tensor<float>& scratch,
                   const Tensor<T>& d_out, const Tensor<T>& x, const Normed<T>& n, const Norm<T>& w,
                   Stream stream) {
    if (kind == NormKind::Rms)
        rmsnorm_backward(d_x, g.weight, scratch, d_out, x, n.rstd, w.weight, stream);
    else
        layernorm_backward(d_x, g.weight, g.bias, scratch, d_out, x, n.mean, n.rstd, w.weight, stream);
}

// Adds gradients of a norm that are summed already, (1, norm_sums(), C), to g.
template <class T>
void add_norm_sums(Norm<T>& g, const Tensor<float>& sums, Stream stream) {
    const int C = static_cast<int>(sums.columns());
    if (g.bias)
        add_chunks(ColumnOutputs<T, 2>{{g.weight.data(), g.bias.data()}}, sums, 1, C, stream);
    else
        add_chunks(ColumnOutputs<T, 1>{{g.weight.data()}}, sums, 1, C, stream);
}
