// adamw.cuh - the update: AdamW (Loshchilov, Hutter, arXiv:1711.05101) and the global norm of the gradient.
#pragma once

#include "llmc/packed.h"
#include "llmc/tensor.h"

struct AdamW {
    float lr, beta1, beta2, epsilon, weight_decay;
    float clip;  // the largest global norm of the gradient; 0 for any
    int step;    // from 1, for the bias correction
};

// What the kernel needs beside the arrays: bias corrections included.
struct AdamWFactors {
    float lr, beta1, beta2, epsilon, weight_decay, clip, m_correction, v_correction;
};

// One vector of fp32 state a turn. Without a master copy (null) the weights are fp32 and their own master.
// Asked for four blocks at once, ptxas does not save registers for a sixth, and does not spill.
template <class T>
__global__ void __launch_bounds__(kBlockThreads, 4)
    adamw_kernel(T* weights, float* master, const T* gradients, float* m, float* v, const float* norm,
                 AdamWFactors f, int64_t decayed, int64_t n) {
    const float total = *norm;
    const float scale = f.clip > 0.f && total > f.clip ? f.clip / total : 1.f;
    for_each_vector<float>(n, [&]<int N>(int64_t i, std::integral_constant<int, N>) {
        Packed<float, N> pm = load<N>(m + i), pv = load<N>(v + i), w;
        T g[N];
        for (int k = 0; k < N; k++) g[k] = gradients[i + k];
        if constexpr (std::is_same_v<T, float>)
            w = load<N>(weights + i);
        else
            w = load<N>(master + i);
        for (int k = 0; k < N; k++) {
            const float grad = to_float(g[k]) * scale;
            const float a = pm.v[k] = f.beta1 * pm.v[k] + (1.f - f.beta1) * grad;
            const float b = pv.v[k] = f.beta2 * pv.v[k] + (1.f - f.beta2) * grad * grad;
            const float decay = i + k < decayed ? f.weight_decay : 0.f;
            w.v[k] -= f.lr * (a * f.m_correction / (sqrtf(b * f.v_correction) + f.epsilon) + decay * w.v[k]);
        }
        store(m + i, pm);
        store(v + i, pv);
        if constexpr (std::is_same_v<T, float>) {
            store(weights + i, w);
        } else {
            store(master + i, w);
            for (int k = 0; k < N; k++) weights[i + k] = from_float<T>(w.v[k]);
        }
    });
}

// One step of AdamW on n parameters, the first `decayed` of which decay. m, v fp32; `master` is the fp32 copy
// behind bf16 weights, null for fp32 ones. The gradient is first scaled to a norm of at most `clip`; norm (1)
// is on the device.
template <class T>
void adamw_update(const AdamW& options, T* weights, float* master, const T* gradients, float* m, float* v,
                  const Tensor<float>& norm, int64_t decayed, int64_t n, Stream stream) {
    assert(master || (std::is_same_v<T, float>) || simt::launches_off);
    AdamWFactors f{
        options.lr, options.beta1, options.beta2, options.epsilon, options.weight_decay, options.clip, 0, 0};
    f.m_correction = static_cast<float>(1.0 / (1.0 - std::pow(double{options.beta1}, options.step)));
    f.v_correction = static_cast<float>(1.0 / (1.0 - std::pow(double{options.beta2}, options.step)));
    launch<adamw_kernel<T>>(elementwise_blocks<float>(n), kBlockThreads, 0, stream, weights, master,
                            gradients, m, v, norm.data(), f, decayed, n);
}

constexpr int kNormBlocks = 1024;  // partial sums of the global norm

// Each block sums the squares of one contiguous stretch.
template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    squares_kernel(float* partial, const T* x, int64_t n, int64_t per_block) {
    constexpr int N = kVectorSize<T>;
    const int64_t first = blockIdx.x * per_block, end = first + per_block < n ? first + per_block : n;
    Accumulator<N> sums;
    for (int64_t i = first + int64_t{threadIdx.x} * N; i < end; i += int64_t{blockDim.x} * N) {
        if (i + N <= end) {
            const Packed<T, N> p = load<N>(x + i);
            for (int k = 0; k < N; k++) sums[k] += p[k] * p[k];
        } else {
            for (int64_t k = i; k < end; k++) sums[0] += to_float(x[k]) * to_float(x[k]);
        }
    }
    const float total = block_sum(sums.sum());
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kBlockThreads) norm_kernel(float* norm, const float* partial, int count) {
    float sum = 0.f;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *norm = sqrtf(sum);
}

// norm (1) = the square root of the sum of squares of x (n, aligned to a vector). scratch: (kNormBlocks).
template <class T>
void global_norm(Tensor<float>& norm, Tensor<float>& scratch, const T* x, int64_t n, Stream stream) {
    assert(scratch.size() == kNormBlocks);
    const int64_t per_block = ceil_div(ceil_div(n, kVectorSize<T>), kNormBlocks) * kVectorSize<T>;
    launch<squares_kernel<T>>(kNormBlocks, kBlockThreads, 0, stream, scratch.data(), x, n, per_block);
    launch<norm_kernel>(1, kBlockThreads, 0, stream, norm.data(), scratch.data(), kNormBlocks);
}
