// matmul_onednn.h - matmul() on a CPU: a product is given to oneDNN in pieces where that is faster, or takes
// less scratch, than the whole.
//
// Measured with oneDNN 2.6 on two cores of a Xeon with AMX, in GFLOP/s: gradients of 1024 rows of logits, of
// 250,880 columns, times bf16 weights of 384 columns 690 whole and 1500 in 4096 summands at a time; in fp32
// 290 and 350. In fp32 1024 rows times (768, 3072), as it lies, 160 whole and 360 in 1024 columns at a time:
// it takes no scratch there, so that it seems to read the matrix in place, whose rows meet in the same lines
// of a cache.
#pragma once

#include "llmc/matvec_cpu.h"
#include "llmc/onednn.h"

// The rows, columns and summands of a product that oneDNN is given at a time.
struct OnednnPiece {
    int64_t rows, columns, summands;
};

// The bytes of scratch that a product may take where fewer rows at a time take less: oneDNN's for columns of
// a wider matrix is as large as what it makes, twice; or sums of pieces in fp32.
constexpr size_t kMostScratch = size_t{16} << 20;

constexpr int64_t kManySummands = 16384, kSummands = 4096;
constexpr int64_t kManyColumns = 2304, kColumns = 1024;

// The length of equal parts of n that are about as long as `wanted`, whole tiles of oneDNN's.
inline int64_t equal_parts(int64_t n, int64_t wanted) {
    constexpr int64_t kTile = 64;
    return ceil_div(ceil_div(n, ceil_div(n, wanted)), kTile) * kTile;
}

// So many of m rows that `bytes`, which all of them take, are no more than a product may take.
inline int64_t rows_within(int64_t m, double bytes) {
    if (bytes <= kMostScratch) return m;
    return std::max<int64_t>(64,
                             static_cast<int64_t>(static_cast<double>(m) * kMostScratch / bytes) / 64 * 64);
}

template <class T, class Out>
OnednnPiece piece_of(const OnednnProduct& p) {
    OnednnPiece piece = {p.m, p.n, p.k};
    if (p.k > kManySummands && !p.bias && !p.gelu) piece.summands = equal_parts(p.k, kSummands);
    if (std::is_same_v<T, float> && p.b_column == 1 && p.n > kManyColumns)
        piece.columns = equal_parts(p.n, kColumns);
    if (piece.summands < p.k && sizeof(Out) < sizeof(float))
        piece.rows = rows_within(p.m, static_cast<double>(p.m * p.n) * sizeof(float));
    else if (p.a_column == 1)
        piece.rows = rows_within(p.m, static_cast<double>(onednn_scratch_bytes<T, Out>(p)));
    return piece;
}

// c (m, n), whose rows are c_row apart, [+]= sums (m, n).
template <class Out>
__global__ void round_sums_kernel(Out* c, int64_t c_row, const float* sums, int64_t n, bool accumulate) {
    constexpr int N = kVectorSize<Out>;
    c += blockIdx.x * c_row, sums += blockIdx.x * n;
    for (int64_t i = int64_t{threadIdx.x} * N; i < n; i += int64_t{blockDim.x} * N) {
        const Packed<float, N> sum = load_within<N>(sums, i, n);
        const Packed<Out, N> before = accumulate ? load_within<N>(c, i, n) : Packed<Out, N>{};
        float o[N];
        for (int k = 0; k < N; k++) o[k] = sum[k] + before[k];
        store_within(c, i, n, rounded<Out>(o));
    }
}

// Calls f with each piece of a product: its columns and summands, and of both the first one's number.
template <class F>
void for_each_piece(OnednnProduct p, const OnednnPiece& piece, F&& f) {
    const OnednnProduct whole = p;
    for (int64_t k = 0; k < whole.k; k += piece.summands)
        for (int64_t n = 0; n < whole.n; n += piece.columns) {
            p.n = std::min(piece.columns, whole.n - n), p.k = std::min(piece.summands, whole.k - k);
            p.accumulate = whole.accumulate || k > 0;
            f(p, n, k);
        }
}

// The bytes of scratch that multiply_pieces() wants.
template <class T, class To>
size_t pieces_scratch_bytes(const OnednnProduct& p, const OnednnPiece& piece) {
    size_t bytes = 0;
    for_each_piece(p, piece, [&](const OnednnProduct& part, int64_t, int64_t) {
        bytes = std::max(bytes, onednn_scratch_bytes<T, To>(part));
    });
    return bytes;
}
template <class T, class To>
void multiply_pieces(const OnednnProduct& p, const OnednnPiece& piece, To* to, const T* a, const T* b,
                     const T* bias, void* scratch) {
    for_each_piece(p, piece, [&](const OnednnProduct& part, int64_t n, int64_t k) {
        onednn_matmul<T, To>(part, to + n, a + k * p.a_column, b + k * p.b_row + n * p.b_column,
                             p.bias ? bias + n : nullptr, scratch);
    });
}

// The product of p.m rows of c and a from number `row` on. Summands that come in pieces are added up in fp32,
// beside c where that is not, and rounded once.
template <class T, class Out>
void multiply_rows(Arena& arena, Stream stream, const OnednnProduct& p, const OnednnPiece& piece, int64_t row,
                   Out* c, const T* a, const T* b, const T* bias) {
    const bool beside = sizeof(Out) < sizeof(float) && piece.summands < p.k;
    OnednnProduct summed = p;
    if (beside) summed.c_row = p.n, summed.accumulate = false;
    const size_t sums_bytes = beside ? static_cast<size_t>(ceil_div(p.m * p.n, 16) * 16) * sizeof(float) : 0;
    const size_t scratch_bytes =
        beside ? pieces_scratch_bytes<T, float>(summed, piece) : pieces_scratch_bytes<T, Out>(summed, piece);
    char* const workspace = static_cast<char*>(arena.workspace(sums_bytes + scratch_bytes));
    if (simt::launches_off) return;
    c += row * p.c_row, a += row * p.a_row;
    void* const scratch = workspace + sums_bytes;
    if (!beside) return multiply_pieces(summed, piece, c, a, b, bias, scratch);
    auto* const sums = reinterpret_cast<float*>(workspace);
    multiply_pieces(summed, piece, sums, a, b, bias, scratch);
    launch<round_sums_kernel<Out>>(static_cast<unsigned>(p.m), kBlockThreads, 0, stream, c, p.c_row, sums,
                                   p.n, p.accumulate);
}

template <class T, class Out>
void matmul(Arena& arena, Stream stream, Tensor<Out>& out, const Tensor<T>& a, const Tensor<T>& b,
            const MatmulOptions<T>& options) {
    const Product p = matmul_product(out, a, b, options);
    matmul_bias_gradient(arena, stream, b, options, false);
    if constexpr (kFastCpu)
        if (p.m == 1 && !p.transpose_a && !p.accumulate && !p.gelu_backward && !p.b_row) {
            const Operation operation = matmul_operation<T, Out>(p, false);
            const T* const bias = options.bias ? options.bias->data() : nullptr;
            return matvec_on_cpu<T, Out>(
                arena, {out.data(), a.data(), b.data(), bias, p.n, p.k, p.transpose_b, p.gelu}, stream);
        }
    const int64_t a_row = options.a_row ? options.a_row : a.columns();
    const int64_t b_row = options.b_row ? options.b_row : b.columns();
    const OnednnProduct whole{p.m,
                              p.n,
                              p.k,
                              options.transpose_a ? 1 : a_row,
                              options.transpose_a ? a_row : 1,
                              options.transpose_b ? 1 : b_row,
                              options.transpose_b ? b_row : 1,
                              options.out_row ? options.out_row : p.n,
                              options.accumulate,
                              options.bias != nullptr,
                              options.gelu};
    const Operation operation = matmul_operation<T, Out>(p, false);
    const OnednnPiece piece = piece_of<T, Out>(whole);
    OnednnProduct rows = whole;
    for (int64_t row = 0; row < p.m; row += piece.rows) {
        rows.m = std::min(piece.rows, p.m - row);
        multiply_rows(arena, stream, rows, piece, row, out.data(), a.data(), b.data(),
                      options.bias ? options.bias->data() : nullptr);
    }
    if constexpr (std::is_same_v<T, Out>)
        if (options.gelu_input) gelu_backward(out, out, *options.gelu_input, stream);
}
