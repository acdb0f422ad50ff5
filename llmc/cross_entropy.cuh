// cross_entropy.cuh - softmax and cross-entropy of logits: loss and gradient in one kernel, in place; the
// probabilities are never stored. A block has a row, and computes its maximum and its sum of exponentials in
// one pass (Milakov, Gimelshein, arXiv:1805.02867).
#pragma once

#include "llmc/simt_vector.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

// The factor of each row's loss: a number, or one in the device's memory, which may change between replays of
// a graph.
struct LossScale {
    float value = 1;
    const float* at = nullptr;
    SIMT_DEVICE float get() const { return at ? *at : value; }
};

// Columns from V to stride are padding of the vocabulary: no probability, zero gradient. A row with a
// negative target is ignored: no loss, zero gradient. `stride` is a multiple of the vector. If logits have a
// soft cap, `fraction` is 1 / cap, and the gradient is that of the logits before they were capped; else 0.
template <class T, bool kGradient>
__global__ void __launch_bounds__(kBlockThreads)
    cross_entropy_kernel(T* logits, float* losses, const int* targets, LossScale loss_scale, int V,
                         int stride, float fraction) {
    constexpr int N = kVectorSize<T>;
    T* row = logits + int64_t{blockIdx.x} * stride;
    const int target = targets[blockIdx.x];
    const int first = threadIdx.x * N, step = blockDim.x * N;
    float most = -INFINITY;
    Accumulator<N> sums;
    for (int c = first; c < V; c += step) {
        const Packed<T, N> p = load_ahead<N>(row + c);
        float x[N];
        for (int k = 0; k < N; k++) x[k] = p[k];
        if (c + N > V)
            for (int k = 0; k < N; k++) x[k] = c + k < V ? x[k] : -INFINITY;
        int above = 0;
        for (int k = 0; k < N; k++) above |= x[k] > most;
        if (above) {  // seldom, after a row's first vectors
            const float high = largest_of(x), shrink = fast_exp(most - high);
            for (int k = 0; k < N; k++) sums[k] *= shrink;
            most = high;
        }
        for (int k = 0; k < N; k++) sums[k] += fast_exp(x[k] - most);
    }
    const float maximum = block_max(most);
    const float total = block_sum(first < V ? sums.sum() * fast_exp(most - maximum) : 0.f);
    if (threadIdx.x == 0)
        losses[blockIdx.x] = target < 0 ? 0.f : logf(total) + maximum - to_float(row[target]);
    if constexpr (kGradient) {
        __syncthreads();  // the loss has read the target's logit, which is overwritten now
        const float scale = loss_scale.get(), factor = target < 0 ? 0.f : scale / total;
        const auto slope = [fraction](float x) { return 1.f - (x * fraction) * (x * fraction); };
        for (int c = first; c < stride; c += step) {
            const Packed<T, N> p = load_ahead<N>(row + c);
            float o[N];
            for (int k = 0; k < N; k++) o[k] = fast_exp(p[k] - maximum) * factor * slope(p[k]);
            if (c + N > V)
                for (int k = 0; k < N; k++) o[k] = c + k < V ? o[k] : 0.f;
            if (target >= c && target < c + N) {
                const float x = to_float(row[target]);
                const float one = (fast_exp(x - maximum) * factor - scale) * slope(x);
                for (int k = 0; k < N; k++)
                    if (c + k == target) o[k] = one;
            }
            store(row + c, o);
        }
    }
}

// a * b, rounded before anything is added to it: so ranks can compute such terms apart (ranks_exchange.h).
SIMT_DEVICE float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    const volatile float product = a * b;
    return product;
#endif
}

// *total += scale * the sum of losses, by one block.
__global__ void __launch_bounds__(kBlockThreads)
    add_losses_kernel(float* total, const float* losses, int rows, LossScale scale) {
    float sum = 0.f;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) sum += losses[i];
    sum = block_sum(sum);
    if (threadIdx.x != 0) return;
    *total += rounded_product(scale.get(), sum);
}

// losses[row] = -log softmax(logits[row])[target] over the first V columns. logits (rows, padded V) are
// overwritten with d(scale * sum of losses)/dlogits; if they have a soft cap, with the gradient of what was
// capped. Targets are in [0, V), or negative for a row that does not count.
template <class T>
void cross_entropy_forward_backward(Tensor<T>& logits, Tensor<float>& losses, const Tensor<int>& targets,
                                    LossScale scale, int V, Stream stream, double cap = 0) {
    const Operation operation("cross_entropy_forward_backward", 0, pass_bytes(logits, logits, logits));
    launch<cross_entropy_kernel<T, true>>(static_cast<unsigned>(logits.rows()), kBlockThreads, 0, stream,
                                          logits.data(), losses.data(), targets.data(), scale, V,
                                          static_cast<int>(logits.columns()),
                                          cap > 0 ? static_cast<float>(1 / cap) : 0.f);
}

// Computes the losses alone; logits do not change.
template <class T>
void cross_entropy_forward(const Tensor<T>& logits, Tensor<float>& losses, const Tensor<int>& targets, int V,
                           Stream stream) {
    const Operation operation("cross_entropy_forward", 0, pass_bytes(logits));
    launch<cross_entropy_kernel<T, false>>(static_cast<unsigned>(logits.rows()), kBlockThreads, 0, stream,
                                           logits.data(), losses.data(), targets.data(), LossScale(), V,
                                           static_cast<int>(logits.columns()), 0.f);
}

// total (1) += scale * the sum of losses (rows).
inline void add_losses(Tensor<float>& total, const Tensor<float>& losses, LossScale scale, Stream stream) {
    const Operation operation("add_losses", 0, pass_bytes(losses));
    launch<add_losses_kernel>(1, kBlockThreads, 0, stream, total.data(), losses.data(),
                              static_cast<int>(losses.size()), scale);
}
