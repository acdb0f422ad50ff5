// matvec_cpu.h - a matrix product with one row, as in decoding, in the fast CPU build.
//
// Each weight is read once, so memory is the limit, which here means: the matrix is read from its first byte
// Each weight is read once, so memory is the limit. It is fastest to read the matrix from its first byte to
// its last, a few rows side by side; strips of columns were measured at half the rate. So if a row of the
// matrix has all outputs, a worker adds up whole rows for a part of the inputs, and the parts are added
// afterwards, in order. The row x and all sums are fp32; results do not depend on the number of workers.
#pragma once

#include <algorithm>

#include "llmc/arena.h"
#include "llmc/gelu.cuh"
#include "llmc/packed.h"

// Elements that are processed at a time.
constexpr int kMatvecRun = 16;
using MatvecRun = Packed<float, kMatvecRun>;

template <class T>
SIMT_DEVICE MatvecRun load_widened(const T* p) {
    const Packed<T, kMatvecRun> x = load<kMatvecRun>(p);
    MatvecRun r;
    for (int i = 0; i < kMatvecRun; i++) r.v[i] = to_float(x.v[i]);
    return r;
}

// The dot product of x and y (n).
template <class T>
float dot(const float* x, const T* y, int64_t n) {
    MatvecRun even = {}, odd = {};  // two, because an addition waits for the one before
    auto add = [&](MatvecRun& sums, int64_t at) {
        const MatvecRun a = load<kMatvecRun>(x + at), b = load_widened(y + at);
        for (int i = 0; i < kMatvecRun; i++) sums.v[i] += a.v[i] * b.v[i];
    };
    int64_t c = 0;
    for (; c + 2 * kMatvecRun <= n; c += 2 * kMatvecRun) add(even, c), add(odd, c + kMatvecRun);
    if (c + kMatvecRun <= n) add(even, c), c += kMatvecRun;
    for (int i = 0; i < kMatvecRun; i++) even.v[i] += odd.v[i];
    float sum = sum_of(even.v);
    for (; c < n; c++) sum += x[c] * to_float(y[c]);
    return sum;
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

// out (n) = x (k) times `weights`, which are stored (n, k) if by_outputs and (k, n) otherwise; plus bias (n)
// unless null; then GELU if asked.
template <class T, class Out>
struct Matvec {
    Out* out;
    const T *x, *weights, *bias;
    int64_t n, k;
    bool by_outputs, gelu;

    SIMT_DEVICE void finish(int64_t j, float sum) const {
        if (bias) sum += to_float(bias[j]);
        if (gelu) sum = 0.5f * sum * (1.f + gelu_tanh(sum));
        out[j] = from_float<Out>(sum);
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
    for (int64_t l = 0; l < p.k; l++) x[l] = to_float(p.x[l]);
    for (int64_t j = first; j < end; j++) p.finish(j, dot(x, p.weights + j * p.k, p.k));
}

// parts (blocks, n): each block's inputs times their rows of weights.
template <class T, class Out>
__global__ void matvec_by_inputs_kernel(float* parts, Matvec<T, Out> p) {
    const int64_t first = blockIdx.x * kMatvecInputs, end = std::min(first + kMatvecInputs, p.k);
    float* const sums = parts + blockIdx.x * p.n;
    std::fill(sums, sums + p.n, 0.f);
    int64_t l = first;
    for (; l + kMatvecRows <= end; l += kMatvecRows)
        add_rows_times<kMatvecRows>(sums, p.x + l, p.weights + l * p.n, p.n);
    for (; l < end; l++) add_rows_times<1>(sums, p.x + l, p.weights + l * p.n, p.n);
}

template <class T, class Out>
__global__ void matvec_add_parts_kernel(const float* parts, int count, Matvec<T, Out> p) {
    const int64_t first = blockIdx.x * kMatvecColumns, columns = std::min(kMatvecColumns, p.n - first);
    float sums[kMatvecColumns] = {};
    for (int i = 0; i < count; i++)
        for (int64_t c = 0; c < columns; c++) sums[c] += parts[i * p.n + first + c];
    for (int64_t c = 0; c < columns; c++) p.finish(first + c, sums[c]);
}

// Computes the product. Scratch comes from the arena.
template <class T, class Out>
void matvec_on_cpu(Arena& arena, const Matvec<T, Out>& p, Stream stream) {
    const auto blocks = [](int64_t n, int64_t size) { return static_cast<unsigned>(ceil_div(n, size)); };
    if (p.by_outputs) {
        launch<matvec_by_outputs_kernel<T, Out>>(blocks(p.n, kMatvecOutputs), 1,
                                                 static_cast<size_t>(p.k) * sizeof(float), stream, p);
        return;
    }
    const unsigned count = blocks(p.k, kMatvecInputs);
    const Tensor<float> parts = arena.take<float>("matvec_parts", {count, p.n});
    launch<matvec_by_inputs_kernel<T, Out>>(count, 1, 0, stream, parts.data(), p);
    launch<matvec_add_parts_kernel<T, Out>>(blocks(p.n, kMatvecColumns), 1, 0, stream, parts.data(),
                                            static_cast<int>(count), p);
}
