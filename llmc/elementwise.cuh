// elementwise.cuh - the operations of a block that treat each element by itself: GELU, SwiGLU and GeGLU of
// its MLP, the addition to the residual stream, the multiplication with a number, and a soft cap.
#pragma once

#include "llmc/column_sums.cuh"
#include "llmc/simt_vector.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

// ---- GELU
//
// The Gaussian error linear unit in its tanh form (Hendrycks, Gimpel, arXiv:1606.08415), as in GPT-2: gelu(x)
// = x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3).

constexpr float kGeluScale = 0.7978845608f;
constexpr float kGeluCubic = 0.044715f;

// To 2^-23, absolute.
SIMT_DEVICE float fast_tanh(float x) { return 1.f - fast_quotient(2.f, fast_exp(2.f * x) + 1.f); }
SIMT_DEVICE float gelu_tanh(float x) { return fast_tanh(kGeluScale * (x + kGeluCubic * x * x * x)); }

SIMT_DEVICE float gelu(float x) { return 0.5f * x * (1.f + gelu_tanh(x)); }
// The derivative of gelu(x), with t = gelu_tanh(x).
SIMT_DEVICE float gelu_slope(float x, float t) {
    const float du = kGeluScale * (1.f + 3.f * kGeluCubic * x * x);
    return 0.5f * (1.f + t) + 0.5f * x * (1.f - t * t) * du;
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads) gelu_forward_kernel(T* out, const T* x, int64_t n) {
    const bool aligned = are_aligned(out, x);
    for_each_vector<T>(n, aligned, [&]<int N>(int64_t i, std::integral_constant<int, N>) SIMT_INLINE {
        const Packed<T, N> p = load_ahead<N>(x + i);
        float o[N];
        for (int k = 0; k < N; k++) o[k] = gelu(p[k]);
        store(out + i, o);
    });
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    gelu_backward_kernel(T* dx, const T* dout, const T* x, int64_t n) {
    const bool aligned = are_aligned(dx, dout, x);
    for_each_vector<T>(n, aligned, [&]<int N>(int64_t i, std::integral_constant<int, N>) SIMT_INLINE {
        const Packed<T, N> p = load_ahead<N>(x + i), d = load_ahead<N>(dout + i);
        float o[N];
        for (int k = 0; k < N; k++) o[k] = d[k] * gelu_slope(p[k], gelu_tanh(p[k]));
        store(dx + i, o);
    });
}

// out = gelu(x), elementwise; out may be x.
template <class T>
void gelu_forward(Tensor<T>& out, const Tensor<T>& x, Stream stream) {
    const Operation operation("gelu_forward", 0, pass_bytes(out, x));
    launch<gelu_forward_kernel<T>>(elementwise_blocks<T>(x.size()), kBlockThreads, 0, stream, out.data(),
                                   x.data(), x.size());
}

// dx = dout gelu'(x), elementwise; dx may be dout.
template <class T>
void gelu_backward(Tensor<T>& dx, const Tensor<T>& dout, const Tensor<T>& x, Stream stream) {
    const Operation operation("gelu_backward", 0, pass_bytes(dx, dout, x));
    launch<gelu_backward_kernel<T>>(elementwise_blocks<T>(x.size()), kBlockThreads, 0, stream, dx.data(),
                                    dout.data(), x.data(), x.size());
}

// ---- SwiGLU and GeGLU
//
// Gated linear units (Shazeer, arXiv:2002.05202), where one matrix product has computed [gate | up]:
// silu(gate)
// * up with silu(x) = x sigmoid(x) in Llama's MLP, gelu(gate) * up in Gemma's. The kernels are named after
// the first; with kGelu they compute the second.
//
// Computed in fp32 throughout; `transformers` rounds the gate's activation to the model's type before the
// multiplication. Bound by memory: forward reads two elements and writes one, backward reads three and writes
// two.

SIMT_DEVICE float sigmoid(float x) { return fast_quotient(1.f, 1.f + fast_exp(-x)); }

// Columns of a row that a warp processes.
template <int N>
constexpr int kSwigluColumns = kLanes* N* kElementwiseRun;

template <class T, int N, bool kGelu>
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
        for (int k = 0; k < N; k++) o[k] = (kGelu ? gelu(g[k]) : g[k] * sigmoid(g[k])) * u[k];
        store(out + int64_t{row} * F + c, o);
    }
}

template <class T, int N, bool kGelu>
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
            if constexpr (kGelu) {
                const float t = gelu_tanh(g[k]);
                d_gate[k] = d[k] * u[k] * gelu_slope(g[k], t);
                d_up[k] = d[k] * 0.5f * g[k] * (1.f + t);
            } else {
                const float s = sigmoid(g[k]);
                d_gate[k] = d[k] * u[k] * s * (1.f + g[k] * (1.f - s));
                d_up[k] = d[k] * g[k] * s;
            }
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

template <bool kGelu, class T>
void glu_forward(const char* name, Tensor<T>& out, const Tensor<T>& gate_up, Stream stream) {
    const Operation operation(name, 0, pass_bytes(out, gate_up));
    const int rows = static_cast<int>(out.rows()), F = static_cast<int>(out.columns());
    assert(gate_up.size() == 2 * out.size() && gate_up.columns() == 2 * F);
    with_vector_size<T>(F, [&]<int N>(std::integral_constant<int, N>) {
        launch<swiglu_forward_kernel<T, N, kGelu>>(swiglu_blocks<N>(rows, F), kBlockThreads, 0, stream,
                                                   out.data(), gate_up.data(), rows, F);
    });
}
template <bool kGelu, class T>
void glu_backward(const char* name, Tensor<T>& d_gate_up, const Tensor<T>& dout, const Tensor<T>& gate_up,
                  Stream stream) {
    const Operation operation(name, 0, pass_bytes(d_gate_up, dout, gate_up));
    const int rows = static_cast<int>(dout.rows()), F = static_cast<int>(dout.columns());
    assert(gate_up.columns() == 2 * F && d_gate_up.shape() == gate_up.shape());
    with_vector_size<T>(F, [&]<int N>(std::integral_constant<int, N>) {
        launch<swiglu_backward_kernel<T, N, kGelu>>(swiglu_blocks<N>(rows, F), kBlockThreads, 0, stream,
                                                    d_gate_up.data(), dout.data(), gate_up.data(), rows, F);
    });
}

// out (rows, F) = silu(gate) * up, or gelu(gate) * up. A row of gate_up (rows, 2F) has the gates first, then
// the values that they gate.
template <class T>
void swiglu_forward(Tensor<T>& out, const Tensor<T>& gate_up, Stream stream) {
    glu_forward<false>("swiglu_forward", out, gate_up, stream);
}
template <class T>
void geglu_forward(Tensor<T>& out, const Tensor<T>& gate_up, Stream stream) {
    glu_forward<true>("geglu_forward", out, gate_up, stream);
}

// d_gate_up (rows, 2F) = the gradient of the input gate_up of swiglu_forward or geglu_forward, from dout
// (rows, F). d_gate_up may be gate_up.
template <class T>
void swiglu_backward(Tensor<T>& d_gate_up, const Tensor<T>& dout, const Tensor<T>& gate_up, Stream stream) {
    glu_backward<false>("swiglu_backward", d_gate_up, dout, gate_up, stream);
}
template <class T>
void geglu_backward(Tensor<T>& d_gate_up, const Tensor<T>& dout, const Tensor<T>& gate_up, Stream stream) {
    glu_backward<true>("geglu_backward", d_gate_up, dout, gate_up, stream);
}

// ---- the residual stream

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    residual_forward_kernel(T* out, const T* a, const T* b, int64_t n) {
    const bool aligned = are_aligned(out, a, b);
    for_each_vector<T>(n, aligned, [&]<int N>(int64_t i, std::integral_constant<int, N>) SIMT_INLINE {
        const Packed<T, N> p = load<N>(a + i), q = load<N>(b + i);
        float o[N];
        for (int k = 0; k < N; k++) o[k] = p[k] + q[k];
        store(out + i, o);
    });
}

// out = a + b, elementwise; out may be a or b.
template <class T>
void residual_forward(Tensor<T>& out, const Tensor<T>& a, const Tensor<T>& b, Stream stream) {
    const Operation operation("residual_forward", 0, pass_bytes(out, a, b));
    launch<residual_forward_kernel<T>>(elementwise_blocks<T>(out.size()), kBlockThreads, 0, stream,
                                       out.data(), a.data(), b.data(), out.size());
}

// ---- multiplication with a number

template <class T>
__global__ void __launch_bounds__(kBlockThreads) scale_kernel(T* out, const T* x, float factor, int64_t n) {
    const bool aligned = are_aligned(out, x);
    for_each_vector<T>(n, aligned, [&]<int N>(int64_t i, std::integral_constant<int, N>) SIMT_INLINE {
        const Packed<T, N> p = load<N>(x + i);
        float o[N];
        for (int k = 0; k < N; k++) o[k] = factor * p[k];
        store(out + i, o);
    });
}

// out = factor x, elementwise; out may be x. Does nothing if x would not change.
template <class T>
void scale(Tensor<T>& out, const Tensor<T>& x, double factor, Stream stream) {
    if (factor == 1 && out.data() == x.data()) return;
    const Operation operation("scale", 0, pass_bytes(out, x));
    launch<scale_kernel<T>>(elementwise_blocks<T>(x.size()), kBlockThreads, 0, stream, out.data(), x.data(),
                            static_cast<float>(factor), x.size());
}

// ---- a soft cap
//
// Gemma 2 keeps its logits below a cap: x becomes y = cap tanh(x / cap). Backward is in cross_entropy.cuh,
// and needs only y: the derivative is 1 - (y / cap)^2.

template <class T>
__global__ void __launch_bounds__(kBlockThreads) soft_cap_kernel(T* x, float cap, int64_t n) {
    const float fraction = 1.f / cap;
    for_each_vector<T>(n, are_aligned(x), [&]<int N>(int64_t i, std::integral_constant<int, N>) SIMT_INLINE {
        const Packed<T, N> p = load_ahead<N>(x + i);
        float o[N];
        for (int k = 0; k < N; k++) o[k] = cap * fast_tanh(p[k] * fraction);
        store(x + i, o);
    });
}

// Caps x in place; not if the cap is 0.
template <class T>
void soft_cap(Tensor<T>& x, double cap, Stream stream) {
    if (cap == 0) return;
    const Operation operation("soft_cap", 0, pass_bytes(x, x));
    launch<soft_cap_kernel<T>>(elementwise_blocks<T>(x.size()), kBlockThreads, 0, stream, x.data(),
                               static_cast<float>(cap), x.size());
}
