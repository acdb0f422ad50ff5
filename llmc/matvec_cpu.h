// matvec_cpu.h - products of one row, or of a few, with a matrix in the fast CPU build: decoding one text, or
// one row of each of several.
//
// Each weight is read once for all rows, and a row's result has the same bits for any number of rows and of
// threads.
//
// Memory is the limit. It is fastest to read the matrix from its first byte to its last, a few rows side by
// side; strips of columns were measured at half the rate. So if a row of the matrix has all outputs, a worker
// adds up whole rows for a part of the inputs, and the parts are added afterwards, in order. The row x and
// all sums are fp32.
#pragma once

#include <algorithm>
#include <type_traits>

#include "llmc/arena.h"
#include "llmc/elementwise.cuh"
#include "llmc/simt.h"
#include "llmc/simt_vector.h"

// Elements that are processed at a time.
constexpr int kMatvecRun = 16;
using MatvecRun = Packed<float, kMatvecRun>;

// Whether a core has AVX-512's 32 wide registers for the sums of dots(). In 16 registers of half their width
// only the sums of three rows stay, and eight rows would take nearly as long as eight products of one row.
#ifdef __AVX512F__
constexpr bool kManyRegisters = true;
#else
constexpr bool kManyRegisters = false;
#endif

template <class T>
SIMT_DEVICE MatvecRun load_widened(const T* p) {
    const Packed<T, kMatvecRun> x = load<kMatvecRun>(p);
    MatvecRun r;
    for (int i = 0; i < kMatvecRun; i++) r.v[i] = to_float(x.v[i]);
    return r;
}

// a * b + c, rounded once. Where dot() and dots() must give the same bits, the compiler must not choose
// between one rounding and two.
inline float fused_sum(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// The dot product of x and y (n).
template <class T>
float dot(const float* x, const T* y, int64_t n) {
    Vector16 sums[1] = {}, odd = {};  // two, because an addition waits for the one before
    const auto add = [&](Vector16& to, int64_t at) SIMT_INLINE {
        Vector16 a, b;
        load_floats(a, x + at), load_floats(b, y + at);
        to += a * b;
    };
    int64_t c = 0;
    for (; c + 2 * kMatvecRun <= n; c += 2 * kMatvecRun) add(sums[0], c), add(odd, c + kMatvecRun);
    if (c + kMatvecRun <= n) add(sums[0], c), c += kMatvecRun;
    sums[0] += odd;
    float sum[1];
    sums_of_vectors(sum, sums);
    for (; c < n; c++) sum[0] = fused_sum(x[c], to_float(y[c]), sum[0]);
    return sum[0];
}

// Widens `rows` rows of x (rows, n) and puts them into the order in which dots() reads them: a run of each
// row, then the next run of each. What does not fill a run stays behind.
template <class T>
void pack_rows(float* packed, const T* x, int64_t rows, int64_t n) {
    for (int64_t c = 0; c + kMatvecRun <= n; c += kMatvecRun)
        for (int64_t r = 0; r < rows; r++, packed += kMatvecRun) store(packed, load_widened(x + r * n + c));
}

// sums[o][r] = dot() of row r of x (kRows, n) with row o of y (kOutputs, n), with the same bits. `packed` is
// pack_rows() of x.
template <int kOutputs, int kRows, class T>
void dots(float (&sums)[kOutputs][kRows], const float* packed, const T* x, const T* y, int64_t n) {
    Vector16 even[kOutputs][kRows], odd[kOutputs][kRows];
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; o++)
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++) even[o][r] = odd[o][r] = Vector16{};
    const auto add = [&](Vector16(&to)[kOutputs][kRows], int64_t at) SIMT_INLINE {
        constexpr int kAhead = 2048;  // bytes
        Vector16 b[kOutputs];
#pragma GCC unroll 8
        for (int o = 0; o < kOutputs; o++) {
            __builtin_prefetch(reinterpret_cast<const char*>(y + o * n + at) + kAhead);
            load_floats(b[o], y + o * n + at);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++) {
            Vector16 a;
            load_floats(a, packed + at * kRows + r * kMatvecRun);
#pragma GCC unroll 8
            for (int o = 0; o < kOutputs; o++) to[o][r] += a * b[o];
        }
    };
    int64_t c = 0;
    for (; c + 2 * kMatvecRun <= n; c += 2 * kMatvecRun) add(even, c), add(odd, c + kMatvecRun);
    if (c + kMatvecRun <= n) add(even, c), c += kMatvecRun;
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; o++) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++) even[o][r] += odd[o][r];
        sums_of_vectors(sums[o], even[o]);
        for (int r = 0; r < kRows; r++)
            for (int64_t rest = c; rest < n; rest++)
                sums[o][r] = fused_sum(to_float(x[r * n + rest]), to_float(y[o * n + rest]), sums[o][r]);
    }
}

// Calls f with min(rows, 8) as an integral constant.
template <int kRows = 8, class F>
void with_row_count(int64_t rows, F&& f) {
    if constexpr (kRows > 1)
        if (rows < kRows) return with_row_count<kRows - 1>(rows, std::forward<F>(f));
    f(std::integral_constant<int, kRows>());
}

// Calls use(first row, constants of how many rows and outputs) for groups of the rows of x (rows, n) that
// dots() takes at a time: with few registers up to 3 rows; else up to 8 rows if 8 fit a core's first cache;
// otherwise up to 4, and 3 outputs that share what is loaded of them.
template <class Use>
void for_each_row_group(int64_t rows, int64_t n, Use&& use) {
    constexpr int64_t kCached = 24 << 10;  // bytes
    const bool fits = 8 * n * static_cast<int64_t>(sizeof(float)) <= kCached;
    const int64_t most = !kManyRegisters ? 3 : fits ? 8 : 4;
    int64_t row = 0;
    while (row < rows)
        with_row_count(std::min(rows - row, most), [&]<int kRows>(std::integral_constant<int, kRows> count) {
            constexpr int kOutputs = kManyRegisters && kRows <= 4 ? 3 : 1;
            if (fits)
                use(row, count, std::integral_constant<int, 1>());
            else
                use(row, count, std::integral_constant<int, kOutputs>());
            row += kRows;
        });
}

// sums (n) += x (kRows) times kRows rows of n. A sum stays in a register for all these rows: one row at a
// time, loading and storing the sums would take longer than reading the matrix.
template <int kRows, class T>
void add_rows_times(float* sums, const T* x, const T* rows, int64_t n) {
    float factors[kRows];
    for (int r = 0; r < kRows; r++) factors[r] = to_float(x[r]);
    int64_t c = 0;
    for (; c + kMatvecRun <= n; c += kMatvecRun) {
        MatvecRun s = load<kMatvecRun>(sums + c);
        for (int r = 0; r < kRows; r++) {
            const MatvecRun row = load_widened(rows + r * n + c);
            for (int i = 0; i < kMatvecRun; i++) s.v[i] += factors[r] * row.v[i];
        }
        store(sums + c, s);
    }
    for (; c < n; c++)
        for (int r = 0; r < kRows; r++) sums[c] += factors[r] * to_float(rows[r * n + c]);
}

// out (rows, n) = x (rows, k) times `weights`, which are stored (n, k) if by_outputs and (k, n) otherwise;
// plus bias (n) unless null; then GELU if asked.
template <class T, class Out>
struct Matvec {
    Out* out;
    const T *x, *weights, *bias;
    int64_t rows, n, k;
    bool by_outputs, gelu;

    SIMT_DEVICE void finish(int64_t row, int64_t j, float sum) const {
        if (bias) sum += to_float(bias[j]);
        if (gelu) sum = 0.5f * sum * (1.f + gelu_tanh(sum));
        out[row * n + j] = from_float<Out>(sum);
    }
};

constexpr int64_t kMatvecOutputs = 32;   // by outputs: outputs of a block
constexpr int64_t kMatvecInputs = 64;    // otherwise: inputs of a block,
constexpr int kMatvecRows = 4;           // rows that it adds at a time,
constexpr int64_t kMatvecColumns = 256;  // and columns of a block that adds the parts

template <class T, class Out>
__global__ void matvec_by_outputs_kernel(Matvec<T, Out> p) {
    const int64_t first = blockIdx.x * kMatvecOutputs, end = std::min(first + kMatvecOutputs, p.n);
    DYNAMIC_SHARED(float, x);
    for_each_row_group(p.rows, p.k,
                       [&]<int kRows, int kOutputs>(int64_t row, std::integral_constant<int, kRows>,
                                                    std::integral_constant<int, kOutputs>) {
                           const T* const own = p.x + row * p.k;
                           if constexpr (kRows == 1) {
                               for (int64_t l = 0; l < p.k; l++) x[l] = to_float(own[l]);
                               for (int64_t j = first; j < end; j++)
                                   p.finish(row, j, dot(x, p.weights + j * p.k, p.k));
                           } else {
                               pack_rows(x, own, kRows, p.k);
                               const auto outputs = [&]<int kSome>(int64_t j,
                                                                   std::integral_constant<int, kSome>) {
                                   float sums[kSome][kRows];
                                   dots(sums, x, own, p.weights + j * p.k, p.k);
                                   for (int o = 0; o < kSome; o++)
                                       for (int r = 0; r < kRows; r++) p.finish(row + r, j + o, sums[o][r]);
                               };
                               int64_t j = first;
                               for (; j + kOutputs <= end; j += kOutputs)
                                   outputs(j, std::integral_constant<int, kOutputs>());
                               for (; j < end; j++) outputs(j, std::integral_constant<int, 1>());
                           }
                       });
}

// parts (blocks, rows, n): each block's inputs times their rows of weights.
template <class T, class Out>
__global__ void matvec_by_inputs_kernel(float* parts, Matvec<T, Out> p) {
    const int64_t first = blockIdx.x * kMatvecInputs, end = std::min(first + kMatvecInputs, p.k);
    float* const sums = parts + blockIdx.x * p.rows * p.n;
    std::fill(sums, sums + p.rows * p.n, 0.f);
    int64_t l = first;
    for (; l + kMatvecRows <= end; l += kMatvecRows)
        for (int64_t row = 0; row < p.rows; row++)
            add_rows_times<kMatvecRows>(sums + row * p.n, p.x + row * p.k + l, p.weights + l * p.n, p.n);
    for (; l < end; l++)
        for (int64_t row = 0; row < p.rows; row++)
            add_rows_times<1>(sums + row * p.n, p.x + row * p.k + l, p.weights + l * p.n, p.n);
}

template <class T, class Out>
__global__ void matvec_add_parts_kernel(const float* parts, int count, Matvec<T, Out> p) {
    const int64_t first = blockIdx.x * kMatvecColumns, columns = std::min(kMatvecColumns, p.n - first);
    for (int64_t row = 0; row < p.rows; row++) {
        float sums[kMatvecColumns] = {};
        for (int i = 0; i < count; i++)
            for (int64_t c = 0; c < columns; c++) sums[c] += parts[(i * p.rows + row) * p.n + first + c];
        for (int64_t c = 0; c < columns; c++) p.finish(row, first + c, sums[c]);
    }
}

// Computes the product. Scratch comes from the arena; a step always takes what `most_rows` need, as p.rows
// may differ from those of its rehearsal.
template <class T, class Out>
void matvec_on_cpu(Arena& arena, const Matvec<T, Out>& p, int64_t most_rows, Stream stream) {
    const auto blocks = [](int64_t n, int64_t size) { return static_cast<unsigned>(ceil_div(n, size)); };
    if (p.by_outputs) {
        launch<matvec_by_outputs_kernel<T, Out>>(
            blocks(p.n, kMatvecOutputs), 1,
            static_cast<size_t>(std::min<int64_t>(p.rows, 8) * p.k) * sizeof(float), stream, p);
        return;
    }
    const unsigned count = blocks(p.k, kMatvecInputs);
    const Tensor<float> parts = arena.take<float>("matvec_parts", {count, most_rows * p.n});
    launch<matvec_by_inputs_kernel<T, Out>>(count, 1, 0, stream, parts.data(), p);
    launch<matvec_add_parts_kernel<T, Out>>(blocks(p.n, kMatvecColumns), 1, 0, stream, parts.data(),
                                            static_cast<int>(count), p);
}
