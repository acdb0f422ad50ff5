// lora.cuh - the one operation of LoRA that is no matrix product: scales its few columns, one scale for each
// part.
#pragma once

#include "llmc/packed.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

// The most parts that share a linear layer's input: q, k and v.
constexpr int kMostLoraParts = 3;

// The columns before ends[i], from ends[i - 1] on or from 0, are multiplied with scales[i].
struct ColumnScales {
    int ends[kMostLoraParts];
    float scales[kMostLoraParts];
};

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    scale_columns_kernel(T* x, ColumnScales s, int64_t n, int columns) {
    for_each_vector<T>(n, [&]<int N>(int64_t i, std::integral_constant<int, N>) SIMT_INLINE {
        const Packed<T, N> p = load<N>(x + i);
        float o[N];
        for (int k = 0; k < N; k++) {
            const int c = s.ends[0] == columns ? 0 : static_cast<int>((i + k) % columns);
            o[k] = p[k] * (c < s.ends[0] ? s.scales[0] : c < s.ends[1] ? s.scales[1] : s.scales[2]);
        }
        store(x + i, o);
    });
}

// Multiplies each element of x (rows, columns) with its column's scale.
template <class T>
void scale_columns(Tensor<T>& x, const ColumnScales& s, Stream stream) {
    const Operation operation("scale_columns", 0, pass_bytes(x, x));
    launch<scale_columns_kernel<T>>(elementwise_blocks<T>(x.size()), kBlockThreads, 0, stream, x.data(), s,
                                    x.size(), static_cast<int>(x.columns()));
}
