// matmul_cpu.h - matmul() on a CPU: a product is cut into pieces, and threads take one piece after
// another.
//
// The pieces depend on the product's shape alone, and one thread computes a piece, so that the number of
// threads changes no bit. oneDNN's own division among threads would change bits: for narrow results (weight
// gradients) it divides the summands by the number of threads, and which columns and rows are in a call also
// decides how it orders a sum.
//
// Sizes of pieces were measured with oneDNN 2.6 on two cores with AVX-512 and AMX, on products of 256 and
// 1024 rows of GPT-2 124M and SmolLM2-135M. Beside oneDNN's own division among two threads a step of 1024
// rows takes 0.97 to 1.00 times as long, one of 256 rows 0.97 to 1.04 times. The worst case is 256 x
// 3072 x 576 in fp32 with a transposed b: 175 GFLOP/s. Pieces of 128 x 768 would reach 193 there, but are
// slower for other products.
#pragma once

#include "llmc/matmul_onednn.h"
#include "llmc/matvec_cpu.h"

// The rows, columns and summands of one call of oneDNN.
struct OnednnPiece {
    int64_t rows, columns, summands;
};

// Products with more summands than kManySummands are computed some summands at a time and added up in fp32: a
// gradient of logits of 250,880 columns times bf16 weights runs at 690 GFLOP/s whole and at 1500 in such
// pieces (two cores of a Xeon with AMX).
constexpr int64_t kManySummands = 16384, kSummands = 4096;
// If a product has fewer pieces, they are halved as long as a piece takes a thread 20 microseconds. Only the
// pieces of weight gradients may be halved by columns. Those of other products are halved by rows alone: then
// their columns are cut the same way for any number of rows, and a chunk of rows has the bits that it has
// among all rows.
constexpr int64_t kLeastPieces = 2, kLeastMultiplyAdds = 2'000'000;

// The length of the `parts` equal parts that n is cut into: a multiple of `tile`.
inline int64_t equal_parts(int64_t n, int64_t parts, int64_t tile = 16) {
    return std::min(n, ceil_div(ceil_div(n, parts), tile) * tile);
}
// The length of equal parts of at most about `wanted`. If there are several, their number is even: of three
// parts, one of two threads would compute two.
inline int64_t even_parts(int64_t n, int64_t wanted, int64_t tile = 16) {
    const int64_t parts = ceil_div(n, wanted);
    return equal_parts(n, parts > 1 ? parts + parts % 2 : 1, tile);
}

// The size of a product's pieces; depends on its shape and layout alone. On a CPU without AVX-512, pieces
// have whole groups of rows (onednn::kRowGroup) and no more columns than those groups may have.
inline OnednnPiece piece_of(const OnednnProduct& p) {
    const bool transposed_a = p.a_column != 1, transposed_b = p.b_column != 1;
    const bool groups = onednn::without_avx512();
    const int64_t tile = groups ? 4 * onednn::kRowGroup : 16;
    OnednnPiece piece;
    if (transposed_a)
        piece = {p.m * p.n < 8 * 384 * 768 ? 192 : 384, 768, p.k};
    else if (transposed_b && p.n <= 1024)
        piece = {p.m < 1024 ? 128 : 256, groups ? 768 : 1024, p.k};
    else
        piece = {256, 384, p.k};
    piece.rows = even_parts(p.m, piece.rows, tile), piece.columns = even_parts(p.n, piece.columns);
    const auto pieces = [&] { return ceil_div(p.m, piece.rows) * ceil_div(p.n, piece.columns); };
    while (pieces() < kLeastPieces && piece.rows * piece.columns * p.k >= kLeastMultiplyAdds) {
        int64_t& longer = transposed_a && piece.columns > piece.rows ? piece.columns : piece.rows;
        if (longer < 64) break;
        longer = equal_parts(longer, 2, &longer == &piece.rows ? tile : 16);
    }
    if (p.k > kManySummands && !p.bias && !p.gelu)
        piece.summands = equal_parts(p.k, ceil_div(p.k, kSummands), 64);
    return piece;
}

// A product in pieces. Piece numbers run along the rows first, so that consecutive pieces read the same
// columns of b.
template <class T, class Out>
class PiecesOfProduct {
  public:
    explicit PiecesOfProduct(const OnednnProduct& p)
        : whole_(p),
          piece_(piece_of(p)),
          sums_in_scratch_(sizeof(Out) < sizeof(float) ? piece_.summands < p.k : p.accumulate),
          row_pieces_(static_cast<size_t>(ceil_div(p.m, piece_.rows))) {}

    size_t count() const { return row_pieces_ * static_cast<size_t>(ceil_div(whole_.n, piece_.columns)); }

    // The bytes that a thread needs for any of the pieces: the four corner pieces stand for all.
    OnednnBytes bytes() const {
        OnednnBytes most;
        for (const size_t i : {size_t{0}, row_pieces_ - 1, count() - row_pieces_, count() - 1})
            for_each_call(product(i), [&](const OnednnProduct& call, int64_t) {
                const OnednnBytes b =
                    sums_in_scratch_ ? onednn_bytes<T, float>(call) : onednn_bytes<T, Out>(call);
                most.scratch = std::max(most.scratch, b.scratch);
                most.copied = std::max(most.copied, b.copied);
            });
        most.scratch = sums_bytes() + ceil_div(most.scratch, size_t{64}) * 64;
        return most;
    }

    // Computes piece number i of c. If it is computed some summands at a time, these are added up in fp32, in
    // scratch if c is narrower, and rounded once. If a product is added to fp32 numbers, its sums are made in
    // scratch too, and added once: so gradients of several micro-batches are the same bits whether one device
    // adds them in turn or several devices each compute one.
    void multiply(size_t i, Out* c, const T* a, const T* b, const T* bias, unsigned char* scratch) const {
        const OnednnProduct p = product(i);
        const int64_t row = row_of(i), column = column_of(i);
        c += row * whole_.c_row + column, a += row * p.a_row, b += column * p.b_column;
        if (p.bias) bias += column;
        if (!sums_in_scratch_) return add_up(p, c, a, b, bias, scratch);
        auto* const sums = reinterpret_cast<float*>(scratch);
        add_up(p, sums, a, b, bias, scratch + sums_bytes());
        round_sums(c, whole_.c_row, sums, p.m, p.n, whole_.accumulate);
    }

  private:
    int64_t row_of(size_t i) const { return static_cast<int64_t>(i % row_pieces_) * piece_.rows; }
    int64_t column_of(size_t i) const { return static_cast<int64_t>(i / row_pieces_) * piece_.columns; }
    size_t sums_bytes() const {
        return sums_in_scratch_ ? static_cast<size_t>(ceil_div(piece_.rows * piece_.columns, 16) * 64) : 0;
    }
    OnednnProduct product(size_t i) const {
        OnednnProduct p = whole_;
        p.m = std::min(piece_.rows, whole_.m - row_of(i));
        p.n = std::min(piece_.columns, whole_.n - column_of(i));
        if (sums_in_scratch_) p.c_row = p.n, p.accumulate = false;
        return p;
    }
    // Calls f with each of a piece's calls of oneDNN and the index of the call's first summand.
    template <class F>
    void for_each_call(OnednnProduct p, F&& f) const {
        const bool accumulate = p.accumulate;
        for (int64_t k = 0; k < whole_.k; k += piece_.summands) {
            p.k = std::min(piece_.summands, whole_.k - k);
            p.accumulate = accumulate || k > 0;
            f(p, k);
        }
    }
    template <class To>
    void add_up(const OnednnProduct& p, To* to, const T* a, const T* b, const T* bias, void* scratch) const {
        for_each_call(p, [&](const OnednnProduct& call, int64_t k) {
            onednn_matmul<T, To>(call, to, a + k * p.a_column, b + k * p.b_row, bias, scratch);
        });
    }

    const OnednnProduct whole_;
    const OnednnPiece piece_;
    const bool sums_in_scratch_;  // sums are kept in scratch, not in c
    const size_t row_pieces_;     // pieces along the rows
};

// bytes() of a product, computed once: every step asks for it.
template <class T, class Out>
OnednnBytes bytes_of_product(const OnednnProduct& p) {
    static thread_local std::map<onednn::Key, OnednnBytes> known;
    const auto [at, is_new] = known.try_emplace(onednn::key_of(p));
    if (is_new) at->second = PiecesOfProduct<T, Out>(p).bytes();
    return at->second;
}

// The product as oneDNN describes it.
template <class T>
OnednnProduct onednn_product(const Product& p, const Tensor<T>& a, const Tensor<T>& b,
                             const MatmulOptions<T>& o) {
    const int64_t a_row = o.a_row ? o.a_row : a.columns(), b_row = o.b_row ? o.b_row : b.columns();
    return {.m = p.m,
            .n = p.n,
            .k = p.k,
            .a_row = o.transpose_a ? 1 : a_row,
            .a_column = o.transpose_a ? a_row : 1,
            .b_row = o.transpose_b ? 1 : b_row,
            .b_column = o.transpose_b ? b_row : 1,
            .c_row = o.out_row ? o.out_row : p.n,
            .accumulate = o.accumulate,
            .bias = o.bias != nullptr,
            .gelu = o.gelu};
}

template <class T, class Out>
void matmul(Arena& arena, Stream stream, Tensor<Out>& out, const Tensor<T>& a, const Tensor<T>& b,
            const MatmulOptions<T>& options) {
    const Product p = matmul_product(out, a, b, options);
    matmul_bias_gradient(arena, stream, b, options, false);
    if constexpr (kFastCpu)
        if (options.rows_alone > 0 && !p.transpose_a && !p.accumulate && !p.gelu_backward && !p.b_row &&
            !p.a_row && !p.out_row) {
            const Operation operation = matmul_operation<T, Out>(p, false);
            const T* const bias = options.bias ? options.bias->data() : nullptr;
            return matvec_on_cpu<T, Out>(
                arena,
                {out.data(), a.data(), b.data(), bias, options.rows_alone, p.n, p.k, p.transpose_b, p.gelu},
                p.m, stream);
        }
    const OnednnProduct product = onednn_product(p, a, b, options);
    const PiecesOfProduct<T, Out> pieces(product);
    const Operation operation = matmul_operation<T, Out>(p, false);
    const OnednnBytes bytes = bytes_of_product<T, Out>(product);
    arena.counts_copies(bytes.copied);
    auto* const scratch =
        static_cast<unsigned char*>(arena.workspace(simt::workers_for(pieces.count(), 1) * bytes.scratch));
    const T* const bias = options.bias ? options.bias->data() : nullptr;
    if (!simt::launches_off)
        simt::run_on_threads(pieces.count(), 1, [&](size_t worker, size_t i, size_t) {
            pieces.multiply(i, out.data(), a.data(), b.data(), bias, scratch + worker * bytes.scratch);
        });
    if constexpr (std::is_same_v<T, Out>)
        if (options.gelu_input) gelu_backward(out, out, *options.gelu_input, stream);
}
