// residual.cuh - the addition to the residual stream.
#pragma once

#include "llmc/packed.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    residual_forward_kernel(T* out, const T* a, const T* b, int64_t n) {
    for_each_vector<T>(n, [&]<int N>(int64_t i, std::integral_constant<int, N>) SIMT_INLINE {
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
