// gelu.cuh - the Gaussian error linear unit in its tanh form (Hendrycks, Gimpel, arXiv:1606.08415), as in
// GPT-2: gelu(x) = x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3).
#pragma once

#include "llmc/packed.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

constexpr float kGeluScale = 0.7978845608f;
constexpr float kGeluCubic = 0.044715f;

SIMT_DEVICE float gelu_tanh(float x) {
    const float u = kGeluScale * (x + kGeluCubic * x * x * x);
    return 1.f - 2.f / (fast_exp(2.f * u) + 1.f);
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads) gelu_forward_kernel(T* out, const T* x, int64_t n) {
    for_each_vector<T>(n, [&]<int N>(int64_t i, std::integral_constant<int, N>) SIMT_INLINE {
        const Packed<T, N> p = load_ahead<N>(x + i);
        float o[N];
        for (int k = 0; k < N; k++) o[k] = 0.5f * p[k] * (1.f + gelu_tanh(p[k]));
        store(out + i, o);
    });
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    gelu_backward_kernel(T* dx, const T* dout, const T* x, int64_t n) {
    for_each_vector<T>(n, [&]<int N>(int64_t i, std::integral_constant<int, N>) SIMT_INLINE {
        const Packed<T, N> p = load_ahead<N>(x + i), d = load_ahead<N>(dout + i);
        float o[N];
        for (int k = 0; k < N; k++) {
            const float v = p[k], t = gelu_tanh(v);
            const float du = kGeluScale * (1.f + 3.f * kGeluCubic * v * v);
            o[k] = d[k] * (0.5f * (1.f + t) + 0.5f * v * (1.f - t * t) * du);
        }
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
