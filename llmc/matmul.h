// matmul.h - matrix products of tensors by the device's library: cuBLASLt on a GPU, oneDNN on a CPU.
#pragma once

#include "llmc/arena.h"
#include "llmc/gelu.cuh"

template <class T>
struct MatmulOptions {
    bool transpose_a = false, transpose_b = false;  // the operand is stored transposed
    bool accumulate = false;                        // out += the product
    const Tensor<T>* bias = nullptr;                // (N), added to every row
    bool gelu = false;                              // then gelu
    const Tensor<T>* gelu_input = nullptr;          // or then times gelu'(this), of out's shape
    int64_t a_row = 0;  // elements from a row of a to the next, where a is columns of a wider matrix
};

// The product as the libraries see it: row-major out (m, n) [+]= op(a) (m, k) op(b) (k, n).
struct MatmulShape {
    int64_t m, n, k;
};

// Computes out (M, N) = a (M, K) b (K, N) with the options. Leading dimensions of a tensor count as rows.
// Products are summed in fp32, and rounded once, to out's type. Scratch comes from the arena's workspace.
template <class T, class Out>
void matmul(Arena& arena, Stream stream, Tensor<Out>& out, const Tensor<T>& a, const Tensor<T>& b,
            const MatmulOptions<T>& options = {});

// The product as an operation, with its FLOPs and the bytes of its operands.
template <class T>
Operation matmul_operation(const MatmulShape& s, const MatmulOptions<T>& o) {
    const int64_t elements =
        s.m * s.k + s.k * s.n + s.m * s.n * (1 + o.accumulate + (o.gelu_input != nullptr));
    return Operation("matmul",
                     2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k),
                     static_cast<double>(elements) * sizeof(T),
                     {s.m, s.n, s.k, o.transpose_a, o.transpose_b, o.accumulate, o.bias != nullptr, o.gelu,
                      o.gelu_input != nullptr});
}

template <class T, class Out>
MatmulShape matmul_shape(const Tensor<Out>& out, const Tensor<T>& a, const Tensor<T>& b,
                         const MatmulOptions<T>& o) {
    const MatmulShape s{out.rows(), out.columns(), o.transpose_a ? a.rows() : a.columns()};
    assert(a.size() == s.m * s.k && b.size() == s.k * s.n);
    assert((o.transpose_b ? b.columns() : b.rows()) == s.k && !(o.gelu && o.gelu_input));
    assert(!o.bias || o.bias->size() == s.n);
    return s;
}

#if defined(SIMT_GPU)
#include "llmc/matmul_cublaslt.h"
#else
#include "llmc/onednn.h"

template <class T, class Out>
void matmul(Arena& arena, Stream stream, Tensor<Out>& out, const Tensor<T>& a, const Tensor<T>& b,
            const MatmulOptions<T>& options) {
    const MatmulShape s = matmul_shape(out, a, b, options);
    const int64_t a_row = options.a_row ? options.a_row : a.columns();
    const OnednnProduct product{s.m,
                                s.n,
                                s.k,
                                options.transpose_a ? 1 : a_row,
                                options.transpose_a ? a_row : 1,
                                options.transpose_b ? 1 : s.n,
                                options.transpose_b ? s.k : 1,
                                s.n,
                                options.accumulate,
                                options.bias != nullptr,
                                options.gelu};
    const Operation operation = matmul_operation(s, options);
    void* scratch = arena.workspace(onednn_scratch_bytes<T, Out>(product));
    if (!simt::launches_off)
        onednn_matmul<T, Out>(product, out.data(), a.data(), b.data(),
                              options.bias ? options.bias->data() : nullptr, scratch);
    if constexpr (std::is_same_v<T, Out>)
        if (options.gelu_input) gelu_backward(out, out, *options.gelu_input, stream);
}
#endif
