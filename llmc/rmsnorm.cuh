// rmsnorm.cuh - normalization of rows by their root mean square (Zhang, Sennrich, arXiv:1910.07467): forward,
// forward fused with the residual addition before it, backward, and recomputation from saved statistics.
//
// Rounded as in `transformers`: the normalized row is rounded to T before it is multiplied with the weight.
#pragma once

#include "llmc/columns.cuh"
#include "llmc/simt_vector.h"
#include "llmc/tensor.h"
#include "llmc/warp_rows.h"
#include "llmc/work.h"

// Writes the output of a vector of a row. All kernels use this code, so that a recomputed output has the same
// bits.
template <int N, class T>
SIMT_DEVICE void rms_normalize(T* out, const Packed<T, N>& x, float rstd, const T* weight) {
    const Packed<T, N> w = load<N>(weight);
    float normalized[N], o[N];
    for (int k = 0; k < N; k++) normalized[k] = x[k] * rstd;
    const Packed<T, N> n = rounded<T>(normalized);
    for (int k = 0; k < N; k++) o[k] = n[k] * w[k];
    store(out, o);
}
// Writes the output of a row of C elements. Lanes take every `step`-th element from their `first` on.
template <int N, class T>
SIMT_DEVICE void rms_normalize(T* out, const T* x, float rstd, const T* weight, int C, int first, int step) {
    for (int c = first; c < C; c += step) rms_normalize<N>(out + c, load<N>(x + c), rstd, weight + c);
}

// One warp per row. With kResidual the row is a + b, rounded to T: the rounded row is stored in `sum` and
// normalized. At least one block a multiprocessor: without this bound ptxas spills to fit more blocks on
// sm_100.
template <class T, int N, int kKept, bool kResidual>
__global__ void __launch_bounds__(kBlockThreads, 1)
    rmsnorm_forward_kernel(T* out, float* rstd, T* sum, const T* a, const T* b, const T* weight, int rows,
                           int C, float epsilon) {
    const int row = blockIdx.x * warps_per_block() + warp();
    if (row >= rows) return;
    const int64_t start = int64_t{row} * C;
    LaneRow<T, N, kKept> x(a + start, C);
    const LaneRow<T, N, kKept> other(kResidual ? b + start : nullptr, kResidual ? C : 0);
    Accumulator<N> squares;
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
        // fmaf: left to compilers, the forms of this kernel might round differently.
        for (int k = 0; k < N; k++) squares[k] = fmaf(p[k], p[k], squares[k]);
    });
    if constexpr (kResidual) x.replaced_by(sum + start);
    const float r = rsqrtf(warp_sum(sum_of(squares.v)) / C + epsilon);
    x.next_pass();
    for_each_lane_vector<N, kKept>(
        C, [&](int v, int c) SIMT_INLINE { rms_normalize<N>(out + start + c, x.at(v, c), r, weight + c); });
    if (lane() == 0) rstd[row] = r;
}

template <class T, int N>
__global__ void __launch_bounds__(kBlockThreads)
    rmsnorm_normalize_kernel(T* out, const T* x, const float* rstd, const T* weight, int rows, int C) {
    const int row = blockIdx.x * warps_per_block() + warp();
    if (row >= rows) return;
    const int64_t start = int64_t{row} * C;
    rms_normalize<N>(out + start, x + start, rstd[row], weight, C, lane() * N, kLanes * N);
}

// dx += rstd (g - xhat mean(g xhat)) with g = dout weight and xhat = x rstd. One warp per row, which it reads
// once if kKept vectors of it are kept in registers. The sum has the same order in any case.
template <class T, int N, int kKept>
__global__ void __launch_bounds__(kBlockThreads)
    rmsnorm_backward_input_kernel(T* dx, const T* dout, const T* x, const float* rstd, const T* weight,
                                  int rows, int C) {
    const int row = blockIdx.x * warps_per_block() + warp();
    if (row >= rows) return;
    const int64_t start = int64_t{row} * C;
    const float r = rstd[row];
    LaneRow<T, N, kKept> d_row(dout + start, C), x_row(x + start, C);
    Accumulator<N> sum_gx;
    for_each_lane_vector<N, kKept>(C, [&](int v, int c) SIMT_INLINE {
        const Packed<T, N> d = d_row.at(v, c), p = x_row.at(v, c), w = load<N>(weight + c);
        for (int k = 0; k < N; k++) sum_gx[k] += d[k] * w[k] * (p[k] * r);
    });
    const float mean_gx = warp_sum(sum_of(sum_gx.v)) / C;
    d_row.next_pass();
    x_row.next_pass();
    for_each_lane_vector<N, kKept>(C, [&](int v, int c) SIMT_INLINE {
        const Packed<T, N> d = d_row.at(v, c), p = x_row.at(v, c), w = load<N>(weight + c);
        const Packed<T, N> before = load<N>(dx + start + c);
        float o[N];
        for (int k = 0; k < N; k++) o[k] = before[k] + r * (d[k] * w[k] - p[k] * r * mean_gx);
        store(dx + start + c, o);
    });
}

// What one element adds to the weight's gradient: dout xhat.
template <class T>
struct RmsnormColumns {
    static constexpr int kSums = 1;
    const T *dout, *x;
    const float* rstd;
    template <int N>
    struct Part {
        Packed<T, N> d, p;
        float r;
    };
    template <int N>
    SIMT_DEVICE Part<N> part(int row, int64_t at) const {
        return {load<N>(dout + at), load<N>(x + at), rstd[row]};
    }
    template <int N>
    SIMT_DEVICE static void add(Accumulator<N> (&sums)[kSums], const Part<N>& of) {
        for (int k = 0; k < N; k++) sums[0][k] += of.d[k] * (of.p[k] * of.r);
    }
};

template <class T, bool kResidual>
void rmsnorm_launch(Tensor<T>& out, Tensor<float>& rstd, T* sum, const Tensor<T>& a, const T* b,
                    const Tensor<T>& weight, Stream stream, float epsilon) {
    const int rows = static_cast<int>(a.rows()), C = static_cast<int>(a.columns());
    with_lane_rows<T>(
        C, [&]<int N, int kKept>(std::integral_constant<int, N>, std::integral_constant<int, kKept>) {
            launch<rmsnorm_forward_kernel<T, N, kKept, kResidual>>(
                blocks_of_rows(rows), kBlockThreads, 0, stream, out.data(), rstd.data(), sum, a.data(), b,
                weight.data(), rows, C, epsilon);
        });
}

// out (rows, C) = x rstd weight, with rstd = 1/sqrt(mean(x^2) + epsilon) of each row, which is saved.
template <class T>
void rmsnorm_forward(Tensor<T>& out, Tensor<float>& rstd, const Tensor<T>& x, const Tensor<T>& weight,
                     Stream stream, float epsilon) {
    const Operation operation("rmsnorm_forward", 0, pass_bytes(out, x));
    rmsnorm_launch<T, false>(out, rstd, nullptr, x, nullptr, weight, stream, epsilon);
}

// sum (rows, C) = a + b, and out = rmsnorm of sum.
template <class T>
void residual_rmsnorm_forward(Tensor<T>& sum, Tensor<T>& out, Tensor<float>& rstd, const Tensor<T>& a,
                              const Tensor<T>& b, const Tensor<T>& weight, Stream stream, float epsilon) {
    const Operation operation("residual_rmsnorm_forward", 0, pass_bytes(sum, out, a, b));
    rmsnorm_launch<T, true>(out, rstd, sum.data(), a, b.data(), weight, stream, epsilon);
}

// Recomputes rmsnorm_forward's output from x and the saved rstd: the same bits, one pass.
template <class T>
void rmsnorm_normalize(Tensor<T>& out, const Tensor<T>& x, const Tensor<float>& rstd, const Tensor<T>& weight,
                       Stream stream) {
    const Operation operation("rmsnorm_normalize", 0, pass_bytes(out, x));
    const int rows = static_cast<int>(x.rows()), C = static_cast<int>(x.columns());
    with_vector_size<T>(C, [&]<int N>(std::integral_constant<int, N>) {
        launch<rmsnorm_normalize_kernel<T, N>>(blocks_of_rows(rows), kBlockThreads, 0, stream, out.data(),
                                               x.data(), rstd.data(), weight.data(), rows, C);
    });
}

// Adds to dx (rows, C) and dweight (C) their gradients through rmsnorm_forward of x, from dout (rows, C). If
// dweight is absent, the weight is frozen: nothing is computed for it, and scratch may be absent too.
// Otherwise scratch is column_sums_scratch(rows, C, 1).
template <class T, class Gradient>
void rmsnorm_backward(Tensor<T>& dx, Tensor<Gradient>& dweight, Tensor<float>& scratch, const Tensor<T>& dout,
                      const Tensor<T>& x, const Tensor<float>& rstd, const Tensor<T>& weight, Stream stream) {
    const Operation operation("rmsnorm_backward", 0,
                              pass_bytes(dx, dx, dout, x) + (dweight ? pass_bytes(dout, x) : 0));
    const int rows = static_cast<int>(x.rows()), C = static_cast<int>(x.columns());
    with_lane_rows<T>(
        C, [&]<int N, int kKept>(std::integral_constant<int, N>, std::integral_constant<int, kKept>) {
            launch<rmsnorm_backward_input_kernel<T, N, kKept>>(blocks_of_rows(rows), kBlockThreads, 0, stream,
                                                               dx.data(), dout.data(), x.data(), rstd.data(),
                                                               weight.data(), rows, C);
        });
    if (!dweight) return;
    const RmsnormColumns<T> columns{dout.data(), x.data(), rstd.data()};
    add_column_sums<T>(columns, ColumnOutputs<Gradient, 1>{{dweight.data()}}, scratch, rows, C, stream);
}
