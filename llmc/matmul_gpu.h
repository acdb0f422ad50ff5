// matmul_gpu.h - what a matrix product on a GPU takes from the arena, in what order it works, and which part
// of it the library does; for the GPU build and for the planner, which has no library.
#pragma once

#include "llmc/matmul.h"

constexpr size_t kCublasWorkspace = 32 << 20;  // what NVIDIA recommends for Hopper

// The rows of out that are computed at a time: all, unless that is more work than longest_product. Otherwise
// a multiple of 256, so that operands stay aligned.
inline int64_t rows_at_once(const Product& p) {
    constexpr int64_t kFewest = 256;
    if (!(p.flops() > longest_product)) return p.m;
    const double rows = static_cast<double>(p.m) * longest_product / p.flops();
    return std::max(kFewest, static_cast<int64_t>(rows) / kFewest * kFewest);
}
#if defined(SIMT_GPU)
#include "llmc/matmul_cublaslt.h"
#endif

template <class T, class Out>
void matmul(Arena& arena, Stream stream, Tensor<Out>& out, const Tensor<T>& a, const Tensor<T>& b,
            const MatmulOptions<T>& options) {
    const Product p = matmul_product(out, a, b, options);
    const Product fused = fusable(p, std::is_same_v<T, float>);
    [[maybe_unused]] const int64_t rows = rows_at_once(fused);
    bool fuses_bias_gradient = false;
#if defined(SIMT_GPU)
    fuses_bias_gradient = rows == p.m && cublaslt::fuses_bias_gradient(fused, out, a, b, options);
#endif
    matmul_bias_gradient(arena, stream, b, options, fuses_bias_gradient);
    {
        const Operation operation = matmul_operation<T, Out>(p, fused.gelu_backward);
        [[maybe_unused]] void* const workspace = arena.workspace(kCublasWorkspace);
#if defined(SIMT_GPU)
        for (int64_t first = 0; first < p.m && !simt::launches_off; first += rows)
            cublaslt::make_rows(fused, first, std::min(rows, p.m - first), out, a, b, options, workspace,
                                stream);
#endif
    }
    if constexpr (std::is_same_v<T, Out>) {
        if (p.gelu && !fused.gelu) gelu_forward(out, out, stream);
        if (p.gelu_backward && !fused.gelu_backward) gelu_backward(out, out, *options.gelu_input, stream);
    }
}
