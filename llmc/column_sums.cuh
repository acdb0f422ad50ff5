// column_sums.cuh - sums over the rows of a matrix, for the gradients of biases and of layernorm's weights;
// and a bias added to every row.
//
// Deterministic, without atomics: the rows are cut into chunks, a block sums a stripe of columns of one
// chunk, and a second kernel adds the chunks to the gradient in order.
#pragma once

#include <algorithm>

#include "llmc/simt_vector.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

// Vectors of columns that a lane sums. On the CPU these are several, so that a row's stripe is more than one
// cache line.
constexpr int kColumnVectors = kFastCpu ? 4 : 1;
constexpr int kColumnRows = kBlockWarps * 16;  // the fewest rows worth a chunk
constexpr int kColumnChunks = 64;              // the most chunks

inline int column_chunks(int64_t rows) {
    return static_cast<int>(std::min<int64_t>(kColumnChunks, ceil_div(rows, kColumnRows)));
}

// The shape of the fp32 scratch for `sums` column sums of a (rows, C) matrix.
inline Shape column_sums_scratch(int64_t rows, int64_t C, int sums) { return {column_chunks(rows), sums, C}; }

// The layout in shared memory of a warp's sums, N columns of each lane, without bank conflicts: neither when
// lanes write 16 bytes at a time nor when neighbouring threads read neighbouring columns. First come the
// first 4 sums of all lanes, then the next 4.
template <int N>
struct SumsRow {
    static constexpr int kGroup = N < 4 ? N : 4;
    static constexpr int kGroups = N / kGroup, kStride = kLanes * kGroup + (kGroups > 1 ? 16 : 0);
    static constexpr int kFloats = kGroups * kStride;
    SIMT_DEVICE static void write(float* row, const Accumulator<N>& sums) {
#pragma unroll
        for (int g = 0; g < kGroups; g++) {
            Packed<float, kGroup> x;
            for (int k = 0; k < kGroup; k++) x.v[k] = sums.v[g * kGroup + k];
            store(row + g * kStride + lane() * kGroup, x);
        }
    }
    // The sum of column j of the stripe.
    SIMT_DEVICE static float read(const float* row, int j) {
        const int k = j % N;
        return row[k / kGroup * kStride + j / N * kGroup + k % kGroup];
    }
};

// Adds the sums of all warps of a block and stores them. A lane has N columns; at most `columns` are stored.
template <int N>
SIMT_DEVICE void store_block_sums(float* out, const Accumulator<N>& sums, int columns) {
    if constexpr (kFastCpu) {
        if (columns > 0) store(out, sums.v);
    } else {
        using Row = SumsRow<N>;
        DYNAMIC_SHARED(float, shared);  // (warps, Row::kFloats)
        Row::write(shared + warp() * Row::kFloats, sums);
        __syncthreads();
        for (int j = threadIdx.x; j < kLanes * N && j < columns; j += kBlockThreads) {
            float total = 0.f;
            for (int w = 0; w < kBlockWarps; w++) total += Row::read(shared + w * Row::kFloats, j);
            out[j] = total;
        }
        __syncthreads();
    }
}

template <class T, int N, class Columns>
__global__ void __launch_bounds__(kBlockThreads, 2)  // otherwise loads wait for each other, to save registers
    column_sums_kernel(float* partial, Columns columns, int rows, int C, int64_t apart, int rows_per_chunk) {
    constexpr int kSums = Columns::kSums;
    const int chunk_end = (blockIdx.y + 1) * rows_per_chunk, end = chunk_end < rows ? chunk_end : rows;
    const int base = (blockIdx.x * kLanes * kColumnVectors + lane()) * N;
    Accumulator<N> sums[kColumnVectors][kSums];
    struct Parts {
        typename Columns::template Part<N> v[kColumnVectors];
    };
    const auto parts = [&](int row) {
        Parts of_row;
#pragma unroll
        for (int v = 0; v < kColumnVectors; v++) {
            const int c = base + v * kLanes * N;  // column 0 instead of one beyond the end: no branch
            of_row.v[v] = columns.template part<N>(row, row * apart + (c < C ? c : 0));
        }
        return of_row;
    };
    const auto add = [&](const Parts& of_row) {
#pragma unroll
        for (int v = 0; v < kColumnVectors; v++)
            if (base + v * kLanes * N < C) columns.template add<N>(sums[v], of_row.v[v]);
    };
    for_each_row(blockIdx.y * rows_per_chunk + warp(), end, warps_per_block(), parts, add);
#pragma unroll
    for (int v = 0; v < kColumnVectors; v++) {
#pragma unroll
        for (int s = 0; s < kSums; s++) {
            const int first = (blockIdx.x * kColumnVectors + v) * kLanes * N;
            store_block_sums(partial + (int64_t{blockIdx.y} * kSums + s) * C + first, sums[v][s], C - first);
        }
    }
}

// The gradients that the sums are added to.
template <class T, int kSums>
struct ColumnOutputs {
    T* at[kSums];
};

constexpr int kAddRun = kFastCpu ? 64 : 1;  // columns that a thread adds up

// out[s][c] += the sum over chunks of partial[chunk][s][c].
template <class T, int kSums>
__global__ void __launch_bounds__(kBlockThreads)
    add_chunks_kernel(ColumnOutputs<T, kSums> out, const float* partial, int chunks, int C) {
    for (int i = 0; i < kAddRun; i++) {
        const int c = (blockIdx.x * kAddRun + i) * blockDim.x + threadIdx.x;
        if (c >= C) return;
#pragma unroll
        for (int s = 0; s < kSums; s++) {
            float total = 0.f;
            for (int j = 0; j < chunks; j++) total += partial[(int64_t{j} * kSums + s) * C + c];
            out.at[s][c] = from_float<T>(to_float(out.at[s][c]) + total);
        }
    }
}

// out[s] (C) += the sum over chunks of partial (chunks, kSums, C).
template <class T, int kSums>
void add_chunks(ColumnOutputs<T, kSums> out, const Tensor<float>& partial, int chunks, int C, Stream stream) {
    constexpr int64_t per_block = kBlockThreads * kAddRun;
    launch<add_chunks_kernel<T, kSums>>(dim3(static_cast<unsigned>(ceil_div(C, per_block))), kBlockThreads, 0,
                                        stream, out, partial.data(), chunks, C);
}

// out[s] (C) += sums over all rows. columns.part() loads a vector of a row of T, columns.add() adds it to the
// sums. The rows begin `apart` elements apart, or C if that is 0.
template <class T, class Columns, class Out>
void add_column_sums(const Columns& columns, ColumnOutputs<Out, Columns::kSums> out, Tensor<float>& scratch,
                     int rows, int C, Stream stream, int64_t apart = 0) {
    const int chunks = column_chunks(rows);
    assert(scratch.shape() == column_sums_scratch(rows, C, Columns::kSums));
    const int rows_per_chunk = static_cast<int>(ceil_div(rows, chunks));
    with_vector_size<T>(std::gcd(int64_t{C}, apart), [&]<int N>(std::integral_constant<int, N>) {
        const dim3 grid(static_cast<unsigned>(ceil_div(C, int64_t{kLanes} * N * kColumnVectors)),
                        static_cast<unsigned>(chunks));
        const size_t shared_bytes = kFastCpu ? 0 : kBlockWarps * SumsRow<N>::kFloats * sizeof(float);
        launch<column_sums_kernel<T, N, Columns>>(grid, kBlockThreads, shared_bytes, stream, scratch.data(),
                                                  columns, rows, C, apart > 0 ? apart : C, rows_per_chunk);
    });
    add_chunks(out, scratch, chunks, C, stream);
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads) add_bias_kernel(T* out, const T* bias, int64_t n, int C) {
    for_each_vector<T>(n, are_aligned(out), [&]<int N>(int64_t i, std::integral_constant<int, N>) {
        const Packed<T, N> p = load<N>(out + i);
        float o[N];
        for (int k = 0; k < N; k++) o[k] = p[k] + to_float(bias[(i + k) % C]);
        store(out + i, o);
    });
}

// out (rows, C) += bias (C) in every row, for matrix products whose library does not add it.
template <class T>
void add_bias(Tensor<T>& out, const Tensor<T>& bias, Stream stream) {
    launch<add_bias_kernel<T>>(elementwise_blocks<T>(out.size()), kBlockThreads, 0, stream, out.data(),
                               bias.data(), out.size(), static_cast<int>(out.columns()));
}

template <class T>
struct BiasColumns {
    static constexpr int kSums = 1;
    const T* dout;
    template <int N>
    using Part = Packed<T, N>;
    template <int N>
    SIMT_DEVICE Part<N> part(int, int64_t at) const {
        return load<N>(dout + at);
    }
    template <int N>
    SIMT_DEVICE static void add(Accumulator<N> (&sums)[kSums], const Part<N>& of) {
        for (int k = 0; k < N; k++) sums[0][k] += of[k];
    }
};

// dbias (C) += the column sums of dout (rows, C). scratch: column_sums_scratch(rows, C, 1).
template <class T, class Out>
void bias_backward(Tensor<Out>& dbias, Tensor<float>& scratch, const Tensor<T>& dout, Stream stream) {
    const Operation operation("bias_backward", 0, pass_bytes(dout));
    add_column_sums<T>(BiasColumns<T>{dout.data()}, ColumnOutputs<Out, 1>{{dbias.data()}}, scratch,
                       static_cast<int>(dout.rows()), static_cast<int>(dout.columns()), stream);
}
