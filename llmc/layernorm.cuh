// layernorm.cuh - layer normalization over the last dimension (Ba, Kiros, Hinton, arXiv:1607.06450): forward,
// forward fused with the residual addition before it, backward, and recomputation from saved statistics.
#pragma once

#include "llmc/column_sums.cuh"
#include "llmc/simt_vector.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

constexpr float kLayernormEpsilon = 1e-5f;  // GPT-2's and BLOOM's

// A warp writes the output of a row of C elements. All kernels use this code and its fixed rounding, so that
// a recomputed output has the same bits.
template <class T, int N, int kKept>
SIMT_DEVICE void normalize_row(T* out, const LaneRow<T, N, kKept>& x, float mean, float rstd, const T* weight,
                               const T* bias, int C) {
    for_each_lane_vector<N, kKept>(C, [&](int v, int c) SIMT_INLINE {
        const Packed<T, N> p = x.at(v, c), w = load<N>(weight + c), s = load<N>(bias + c);
        float o[N];
        for (int k = 0; k < N; k++) o[k] = fmaf((p[k] - mean) * rstd, w[k], s[k]);
        store(out + c, o);
    });
}

// One warp per row. With kResidual the row is a + b, rounded to T: the rounded row is stored in `sum` and
// normalized, because it is what backward will see.
template <class T, int N, int kKept, bool kResidual>
__global__ void __launch_bounds__(kBlockThreads)
    layernorm_forward_kernel(T* out, float* mean, float* rstd, T* sum, const T* a, const T* b,
                             const T* weight, const T* bias, int rows, int C, float epsilon) {
    const int row = blockIdx.x * warps_per_block() + warp();
    if (row >= rows) return;
    const int64_t start = int64_t{row} * C;
    LaneRow<T, N, kKept> x(a + start, C);
    const LaneRow<T, N, kKept> other(kResidual ? b + start : nullptr, kResidual ? C : 0);
    Accumulator<N> total;
    for_each_lane_vector<N, kKept>(C, [&](int v, int c) SIMT_INLINE {
        Packed<T, N> p = x.at(v, c);
        if constexpr (kResidual) {
            const Packed<T, N> q = other.at(v, c);
            float both[N];
            for (int k = 0; k < N; k++) both[k] = p[k] + q[k];
            p = rounded<T>(both);
            store(sum + start + c, p);
            x.replace(v, p);
        }
        for (int k = 0; k < N; k++) total[k] += p[k];
    });
    if constexpr (kResidual) x.replaced_by(sum + start);
    const float m = warp_sum(total.sum()) / C;
    x.next_pass();
    Accumulator<N> squares;
    for_each_lane_vector<N, kKept>(C, [&](int v, int c) SIMT_INLINE {
        const Packed<T, N> p = x.at(v, c);
        for (int k = 0; k < N; k++) squares[k] += (p[k] - m) * (p[k] - m);
    });
    const float r = rsqrtf(warp_sum(squares.sum()) / C + epsilon);
    x.next_pass();
    normalize_row(out + start, x, m, r, weight, bias, C);
    if (lane() == 0) mean[row] = m, rstd[row] = r;
}

template <class T, int N>
__global__ void __launch_bounds__(kBlockThreads)
    layernorm_normalize_kernel(T* out, const T* x, const float* mean, const float* rstd, const T* weight,
                               const T* bias, int rows, int C) {
    const int row = blockIdx.x * warps_per_block() + warp();
    if (row >= rows) return;
    const int64_t start = int64_t{row} * C;
    normalize_row(out + start, LaneRow<T, N, 0>(x + start, C), mean[row], rstd[row], weight, bias, C);
}

// dx += rstd (g - mean(g) - xhat mean(g xhat)) with g = dout weight. One warp per row, which it reads once if
// kKept vectors of it are kept in registers. The sums have the same order in any case.
template <class T, int N, int kKept>
__global__ void __launch_bounds__(kBlockThreads)
    layernorm_backward_input_kernel(T* dx, const T* dout, const T* x, const float* mean, const float* rstd,
                                    const T* weight, int rows, int C) {
    const int row = blockIdx.x * warps_per_block() + warp();
    if (row >= rows) return;
    const int64_t start = int64_t{row} * C;
    const float m = mean[row], r = rstd[row];
    LaneRow<T, N, kKept> d_row(dout + start, C), x_row(x + start, C);
    Accumulator<N> sum_g, sum_gx;
    for_each_lane_vector<N, kKept>(C, [&](int v, int c) SIMT_INLINE {
        const Packed<T, N> d = d_row.at(v, c), p = x_row.at(v, c), w = load<N>(weight + c);
        for (int k = 0; k < N; k++) {
            const float g = d[k] * w[k];
            sum_g[k] += g;
            sum_gx[k] += g * ((p[k] - m) * r);
        }
    });
    const float mean_g = warp_sum(sum_g.sum()) / C, mean_gx = warp_sum(sum_gx.sum()) / C;
    d_row.next_pass();
    x_row.next_pass();
    for_each_lane_vector<N, kKept>(C, [&](int v, int c) SIMT_INLINE {
        const Packed<T, N> d = d_row.at(v, c), p = x_row.at(v, c), w = load<N>(weight + c);
        const Packed<T, N> before = load<N>(dx + start + c);
        float o[N];
        for (int k = 0; k < N; k++) o[k] = before[k] + r * (d[k] * w[k] - mean_g - (p[k] - m) * r * mean_gx);
        store(dx + start + c, o);
    });
}

// What one element adds to the gradients of layernorm's weight and bias: dout xhat and dout.
template <class T>
struct LayernormColumns {
    static constexpr int kSums = 2;
    const T *dout, *x;
    const float *mean, *rstd;
    template <int N>
    struct Part {
        Packed<T, N> d, p;
        float m, r;
    };
    template <int N>
    SIMT_DEVICE Part<N> part(int row, int64_t at) const {
        return {load<N>(dout + at), load<N>(x + at), mean[row], rstd[row]};
    }
    template <int N>
    SIMT_DEVICE static void add(Accumulator<N> (&sums)[kSums], const Part<N>& of) {
        for (int k = 0; k < N; k++) {
            sums[0][k] += of.d[k] * ((of.p[k] - of.m) * of.r);
            sums[1][k] += of.d[k];
        }
    }
};

template <class T, bool kResidual>
void layernorm_launch(Tensor<T>& out, Tensor<float>& mean, Tensor<float>& rstd, T* sum, const Tensor<T>& a,
                      const T* b, const Tensor<T>& weight, const Tensor<T>& bias, Stream stream,
                      float epsilon) {
    const int rows = static_cast<int>(a.rows()), C = static_cast<int>(a.columns());
    with_lane_rows<T>(
        C, [&]<int N, int kKept>(std::integral_constant<int, N>, std::integral_constant<int, kKept>) {
            launch<layernorm_forward_kernel<T, N, kKept, kResidual>>(
                blocks_of_rows(rows), kBlockThreads, 0, stream, out.data(), mean.data(), rstd.data(), sum,
                a.data(), b, weight.data(), bias.data(), rows, C, epsilon);
        });
}

// out (rows, C) = (x - mean) rstd weight + bias, with the mean and rstd = 1/sqrt(variance + epsilon) of each
// row, which are saved.
template <class T>
void layernorm_forward(Tensor<T>& out, Tensor<float>& mean, Tensor<float>& rstd, const Tensor<T>& x,
                       const Tensor<T>& weight, const Tensor<T>& bias, Stream stream,
                       float epsilon = kLayernormEpsilon) {
    const Operation operation("layernorm_forward", 0, pass_bytes(out, x));
    layernorm_launch<T, false>(out, mean, rstd, nullptr, x, nullptr, weight, bias, stream, epsilon);
}

// sum (rows, C) = a + b, and out = layernorm of sum.
template <class T>
void residual_layernorm_forward(Tensor<T>& sum, Tensor<T>& out, Tensor<float>& mean, Tensor<float>& rstd,
                                const Tensor<T>& a, const Tensor<T>& b, const Tensor<T>& weight,
                                const Tensor<T>& bias, Stream stream, float epsilon = kLayernormEpsilon) {
    const Operation operation("residual_layernorm_forward", 0, pass_bytes(sum, out, a, b));
    layernorm_launch<T, true>(out, mean, rstd, sum.data(), a, b.data(), weight, bias, stream, epsilon);
}

// Recomputes layernorm_forward's output from x and the saved mean and rstd: the same bits, one pass.
template <class T>
void layernorm_normalize(Tensor<T>& out, const Tensor<T>& x, const Tensor<float>& mean,
                         const Tensor<float>& rstd, const Tensor<T>& weight, const Tensor<T>& bias,
                         Stream stream) {
    const Operation operation("layernorm_normalize", 0, pass_bytes(out, x));
    const int rows = static_cast<int>(x.rows()), C = static_cast<int>(x.columns());
    with_vector_size<T>(C, [&]<int N>(std::integral_constant<int, N>) {
        launch<layernorm_normalize_kernel<T, N>>(blocks_of_rows(rows), kBlockThreads, 0, stream, out.data(),
                                                 x.data(), mean.data(), rstd.data(), weight.data(),
                                                 bias.data(), rows, C);
    });
}

// Adds to dx (rows, C), dweight (C) and dbias (C) their gradients through layernorm_forward of x, from dout
// (rows, C). If dweight and dbias are absent, weight and bias are frozen: nothing is computed for them, and
// scratch may be absent too. Otherwise scratch is column_sums_scratch(rows, C, 2).
template <class T, class Gradient>
void layernorm_backward(Tensor<T>& dx, Tensor<Gradient>& dweight, Tensor<Gradient>& dbias,
                        Tensor<float>& scratch, const Tensor<T>& dout, const Tensor<T>& x,
                        const Tensor<float>& mean, const Tensor<float>& rstd, const Tensor<T>& weight,
                        Stream stream) {
    assert(static_cast<bool>(dweight) == static_cast<bool>(dbias));
    const Operation operation("layernorm_backward", 0,
                              pass_bytes(dx, dx, dout, x) + (dweight ? pass_bytes(dout, x) : 0));
    const int rows = static_cast<int>(x.rows()), C = static_cast<int>(x.columns());
    with_lane_rows<T>(
        C, [&]<int N, int kKept>(std::integral_constant<int, N>, std::integral_constant<int, kKept>) {
            launch<layernorm_backward_input_kernel<T, N, kKept>>(
                blocks_of_rows(rows), kBlockThreads, 0, stream, dx.data(), dout.data(), x.data(), mean.data(),
                rstd.data(), weight.data(), rows, C);
        });
    if (!dweight) return;
    const LayernormColumns<T> columns{dout.data(), x.data(), mean.data(), rstd.data()};
    add_column_sums<T>(columns, ColumnOutputs<Gradient, 2>{{dweight.data(), dbias.data()}}, scratch, rows, C,
                       stream);
}
