// swiglu.cuh - the gated linear unit of Llama's MLP (Shazeer, arXiv:2002.05202): silu(gate) * up with silu(x)
// = x sigmoid(x), where one matrix product has computed [gate | up].
//
// Computed in fp32 throughout; `transformers` rounds silu(gate) to the model's type before the
// multiplication. Bound by memory: forward reads two elements and writes one, backward reads three and writes
// two.
#pragma once

#include "llmc/columns.cuh"
#include "llmc/packed.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

SIMT_DEVICE float sigmoid(float x) { return 1.f / (1.f + fast_exp(-x)); }

// Columns of a row that a warp processes.
template <int N>
constexpr int kSwigluColumns = kLanes* N* kElementwiseRun;

template <class T, int N>
__global__ void __launch_bounds__(kBlockThreads)
    swiglu_forward_kernel(T* out, const T* gate_up, int rows, int F) {
    const int row = blockIdx.x * warps_per_block() + warp();
    if (row >= rows) return;
    const T *const gate = gate_up + int64_t{row} * 2 * F, *const up = gate + F;
    const int begin = blockIdx.y * kSwigluColumns<N>;
    const int end = begin + kSwigluColumns<N> < F ? begin + kSwigluColumns<N> : F;
    for (int c = begin + lane() * N; c < end; c += kLanes * N) {
        const Packed<T, N> g = load_ahead<N>(gate + c), u = load_ahead<N>(up + c);
        float o[N];
        for (int k = 0; k < N; k++) o[k] = g[k] * sigmoid(g[k]) * u[k];
        store(out + int64_t{row} * F + c, o);
    }
}

template <class T, int N>
__global__ void __launch_bounds__(kBlockThreads)
    swiglu_backward_kernel(T* d_gate_up, const T* dout, const T* gate_up, int rows, int F) {
    const int row = blockIdx.x * warps_per_block() + warp();
    if (row >= rows) return;
    const int64_t start = int64_t{row} * 2 * F;
    const int begin = blockIdx.y * kSwigluColumns<N>;
    const int end = begin + kSwigluColumns<N> < F ? begin + kSwigluColumns<N> : F;
    for (int c = begin + lane() * N; c < end; c += kLanes * N) {
        const Packed<T, N> g = load_ahead<N>(gate_up + start + c), u = load_ahead<N>(gate_up + start + F + c);
        const Packed<T, N> d = load_ahead<N>(dout + int64_t{row} * F + c);
        float d_gate[N], d_up[N];
        for (int k = 0; k < N; k++) {
            const float s = sigmoid(g[k]);
            d_gate[k] = d[k] * u[k] * s * (1.f + g[k] * (1.f - s));
            d_up[k] = d[k] * g[k] * s;
        }
        store(d_gate_up + start + c, d_gate);
        store(d_gate_up + start + F + c, d_up);
    }
}

// The grid of both kernels: rows by pieces of rows.
template <int N>
dim3 swiglu_blocks(int rows, int F) {
    return dim3(blocks_of_rows(rows), static_cast<unsigned>(ceil_div(F, kSwigluColumns<N>)));
}

// out (rows, F) = silu(gate) * up. A row of gate_up (rows, 2F) has the gates first, then the values that they
// gate.
template <class T>
void swiglu_forward(Tensor<T>& out, const Tensor<T>& gate_up, Stream stream) {
    const Operation operation("swiglu_forward", 0, pass_bytes(out, gate_up));
    const int rows = static_cast<int>(out.rows()), F = static_cast<int>(out.columns());
    assert(gate_up.size() == 2 * out.size() && gate_up.columns() == 2 * F);
    with_vector_size<T>(F, [&]<int N>(std::integral_constant<int, N>) {
        launch<swiglu_forward_kernel<T, N>>(swiglu_blocks<N>(rows, F), kBlockThreads, 0, stream, out.data(),
                                            gate_up.data(), rows, F);
    });
}

// d_gate_up (rows, 2F) = the gradient of swiglu_forward's input gate_up, from dout (rows, F). d_gate_up may
// be gate_up.
template <class T>
void swiglu_backward(Tensor<T>& d_gate_up, const Tensor<T>& dout, const Tensor<T>& gate_up, Stream stream) {
    const Operation operation("swiglu_backward", 0, pass_bytes(d_gate_up, dout, gate_up));
    const int rows = static_cast<int>(dout.rows()), F = static_cast<int>(dout.columns());
    assert(gate_up.columns() == 2 * F && d_gate_up.shape() == gate_up.shape());
    with_vector_size<T>(F, [&]<int N>(std::integral_constant<int, N>) {
        launch<swiglu_backward_kernel<T, N>>(swiglu_blocks<N>(rows, F), kBlockThreads, 0, stream,
                                             d_gate_up.data(), dout.data(), gate_up.data(), rows, F);
    });
}
