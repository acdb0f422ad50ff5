// matmul.h - matrix products of tensors by the device's library: cuBLASLt on a GPU, oneDNN on a CPU.
#pragma once

#include "llmc/arena.h"
#include "llmc/column_sums.cuh"
#include "llmc/elementwise.cuh"

// Whether products may round fp32 operands to TF32, which has a mantissa of 10 bits: with --advanced tf32=on.
inline bool tf32_products = false;

template <class T>
struct MatmulOptions {
    bool transpose_a = false, transpose_b = false;  // the operand is stored transposed
    bool accumulate = false;                        // out += the product
    const Tensor<T>* bias = nullptr;                // (N), added to every row
    bool gelu = false;                              // then apply gelu
    const Tensor<T>* gelu_input = nullptr;          // or then multiply with gelu'(this), of out's shape
    // Distances between rows in elements, for an operand that is columns of a wider matrix; 0 if rows are
    // adjacent. With a bias or GELU, out's rows must be adjacent.
    int64_t a_row = 0, b_row = 0, out_row = 0;
    // (N) += the sums of b's columns: a bias's gradient, beside its weight's. Without `accumulate` it must be
    // zero before, as the product may overwrite it. b must not be transposed.
    Tensor<T>* bias_gradient = nullptr;
    // If not 0, the rows are few, as in decoding, and only the first `rows_alone` are needed. On a CPU their
    // products are made by matvec_cpu.h: each row has the same bits beside any others, and the rows that are
    // not needed are not computed.
    int64_t rows_alone = 0;
};

// Computes out (M, N) = a (M, K) b (K, N) with the options. Leading dimensions of a tensor count as rows.
// Sums are in fp32 (of operands in TF32 if tf32_products is set). They are rounded to out's type once, or
// once more if the library cannot do what follows the product and a kernel does it. Scratch comes from the
// arena.
template <class T, class Out>
void matmul(Arena& arena, Stream stream, Tensor<Out>& out, const Tensor<T>& a, const Tensor<T>& b,
            const MatmulOptions<T>& options = {});

// The product as the libraries see it: row-major out (m, n) [+]= op(a) (m, k) op(b) (k, n).
template <class T, class Out>
Product matmul_product(const Tensor<Out>& out, const Tensor<T>& a, const Tensor<T>& b,
                       const MatmulOptions<T>& o) {
    const Product p = {.m = out.rows(),
                       .n = out.columns(),
                       .k = o.transpose_a ? a.rows() : a.columns(),
                       .a_row = o.a_row,
                       .b_row = o.b_row,
                       .out_row = o.out_row,
                       .transpose_a = o.transpose_a,
                       .transpose_b = o.transpose_b,
                       .accumulate = o.accumulate,
                       .bias = o.bias != nullptr,
                       .gelu = o.gelu,
                       .gelu_backward = o.gelu_input != nullptr,
                       .bias_gradient = o.bias_gradient && !o.accumulate,
                       .widened = sizeof(Out) > sizeof(T),
                       .tf32 = tf32_products && std::is_same_v<T, float>};
    assert(a.size() == p.m * p.k && b.size() == p.k * p.n);
    assert((o.transpose_b ? b.columns() : b.rows()) == p.k && (!o.bias || o.bias->size() == p.n));
    assert(!o.gelu_input || !(o.gelu || o.bias));
    assert(!o.out_row || !(o.gelu_input || o.gelu || o.bias));
    assert(!p.widened || !(o.gelu_input || o.gelu || o.bias));
    assert(!o.bias_gradient || (o.bias_gradient->size() == p.n && !o.transpose_b && !p.widened && !o.bias &&
                                !o.gelu && !o.gelu_input));
    return p;
}

// The product as an operation (work.h), with its FLOPs and the bytes of its operands, and of GELU's input if
// that is fused.
template <class T, class Out>
Operation matmul_operation(const Product& p, bool fuses_gelu_backward) {
    const int64_t in = p.m * p.k + p.k * p.n, out = p.m * p.n * (1 + p.accumulate + fuses_gelu_backward);
    return Operation("matmul", p.flops(),
                     static_cast<double>(in) * sizeof(T) + static_cast<double>(out) * sizeof(Out), p);
}

// The product with only those of its options that cuBLASLt may fuse. Its GELU uses the hardware's approximate
// tanh, 2^-11 off (PTX ISA, tanh.approx): less than bf16 rounds, far more than fp32 does. For the gradient of
// GELU, its input must have rows of a multiple of 8 elements.
inline Product fusable(Product p, bool fp32) {
    p.gelu &= !fp32;
    p.gelu_backward &= !fp32 && p.n % 8 == 0;
    return p;
}

// Computes the bias's gradient by a kernel of its own, unless the product has done it. The scratch is planned
// in any case, so that the algorithm, which is chosen when a run starts, does not change the plan.
template <class T>
void matmul_bias_gradient(Arena& arena, Stream stream, const Tensor<T>& b, const MatmulOptions<T>& o,
                          bool fused) {
    if (!o.bias_gradient) return;
    Tensor<float> scratch = arena.take<float>("column_sums", column_sums_scratch(b.rows(), b.columns(), 1));
    if (!fused) bias_backward(*o.bias_gradient, scratch, b, stream);
}

// bias (N) += the sums of the columns of b (rows, N), by a kernel of its own.
template <class T, class Out>
void add_bias_gradient(Arena& arena, Stream stream, Tensor<Out>& bias, const Tensor<T>& b) {
    Tensor<float> scratch = arena.take<float>("column_sums", column_sums_scratch(b.rows(), b.columns(), 1));
    bias_backward(bias, scratch, b, stream);
}

#if !defined(SIMT_GPU) && !defined(LLMC_PLANNER)
#include "llmc/matmul_cpu.h"
#else
// ---- on a GPU
//
// What a product takes from the arena, in what order it works, and which part of it the library does; for the
// GPU build and for the planner, which has no library.

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
#else
inline std::string products_library() { return "no library for products"; }
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
#endif
