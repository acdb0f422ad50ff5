// matmul_tiled.cuh - matrix products in any layout by a kernel of our own, for those that the GPU's library
// has no algorithm for, such as bf16 with odd row lengths. Correct but slow: it does not use the tensor
// cores.
#pragma once

#include "llmc/simt.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

constexpr int kMatmulTile = 32;  // rows and columns of out that a block computes, and terms at a time
constexpr int kMatmulTileRow = kMatmulTile + 1;  // in shared memory: columns lie in different banks

// A matrix of any row length. Its element (i, j) is data[i * row + j], or data[j * row + i] if it is stored
// transposed.
template <class T>
struct MatrixView {
    const T* data;
    int64_t rows, columns, row;
    bool transposed;

    // Copies the tile that begins at (i, j), with zeros beyond the end of the matrix. Neighbouring threads
    // read neighbours in memory.
    SIMT_DEVICE void copy_tile(float* tile, int64_t i, int64_t j) const {
        for (int at = threadIdx.x; at < kMatmulTile * kMatmulTile; at += blockDim.x) {
            const int far = at / kMatmulTile, near = at % kMatmulTile;
            const int y = transposed ? near : far, x = transposed ? far : near;
            const bool inside = i + y < rows && j + x < columns;
            const int64_t element = transposed ? (j + x) * row + i + y : (i + y) * row + j + x;
            tile[y * kMatmulTileRow + x] = inside ? to_float(data[element]) : 0.f;
        }
    }
};

// Each thread sums every kBlockWarps-th row and kLanes-th column of the tile. A row of out is `across` tiles;
// the launch begins with tile `first`.
template <class T, class Out>
__global__ void __launch_bounds__(kBlockThreads)
    matmul_tiled_kernel(Out* out, int64_t out_row, int64_t first, int64_t across, MatrixView<T> a,
                        MatrixView<T> b, bool accumulate) {
    constexpr int kRows = kMatmulTile / kBlockWarps, kColumns = kMatmulTile / kLanes;
    DYNAMIC_SHARED(float, a_tile);  // and b's behind it
    float* const b_tile = a_tile + kMatmulTile * kMatmulTileRow;
    const int64_t tile = first + blockIdx.x;
    const int64_t first_row = tile / across * kMatmulTile, first_column = tile % across * kMatmulTile;
    float sums[kRows][kColumns] = {};
    for (int64_t k = 0; k < a.columns; k += kMatmulTile) {
        a.copy_tile(a_tile, first_row, k);
        b.copy_tile(b_tile, k, first_column);
        __syncthreads();
        for (int l = 0; l < kMatmulTile; l++)
            for (int y = 0; y < kRows; y++)
                for (int x = 0; x < kColumns; x++)
                    sums[y][x] += a_tile[(warp() + y * kBlockWarps) * kMatmulTileRow + l] *
                                  b_tile[l * kMatmulTileRow + lane() + x * kLanes];
        __syncthreads();
    }
    for (int y = 0; y < kRows; y++)
        for (int x = 0; x < kColumns; x++) {
            const int64_t i = first_row + warp() + y * kBlockWarps, j = first_column + lane() + x * kLanes;
            if (i >= a.rows || j >= b.columns) continue;
            Out& to = out[i * out_row + j];
            to = from_float<Out>(accumulate ? to_float(to) + sums[y][x] : sums[y][x]);
        }
}

// out (m, n) [+]= op(a) (m, k) op(b) (k, n) as `p` describes it, without bias and GELU. Sums are in fp32 in
// the order of k and rounded once. A launch has at most most_flops. The caller records the operation.
template <class T, class Out>
void matmul_tiled(const Product& p, Out* out, const T* a, const T* b, Stream stream,
                  double most_flops = std::numeric_limits<double>::infinity()) {
    const int64_t a_row = p.a_row ? p.a_row : p.transpose_a ? p.m : p.k;
    const int64_t b_row = p.b_row ? p.b_row : p.transpose_b ? p.k : p.n;
    const int64_t down = ceil_div(p.m, kMatmulTile), across = ceil_div(p.n, kMatmulTile);
    const dim3 tiles(static_cast<unsigned>(down * across));
    for_each_part(tiles, p.flops(), most_flops, [&](dim3 grid, const GridPart& part) {
        launch<matmul_tiled_kernel<T, Out>>(
            grid, kBlockThreads, 2 * kMatmulTile * kMatmulTileRow * sizeof(float), stream, out,
            p.out_row ? p.out_row : p.n, part.x, across, MatrixView<T>{a, p.m, p.k, a_row, p.transpose_a},
            MatrixView<T>{b, p.k, p.n, b_row, p.transpose_b}, p.accumulate);
    });
}
