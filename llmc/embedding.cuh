// embedding.cuh - token and position embeddings and soft prompts, forward and backward. Models without
// learned positions have no position embedding.
//
// Many rows may have the same token. So the host first groups the rows by token (group_tokens() in
// data_feeder.h), and in backward a warp sums the rows of a token in a fixed order, for some of the columns:
// the same bits every time, without atomics. A launch does not know how many groups there are; it is made for
// the most that are possible, and the last ones are empty. Where positions restart within a sequence, rows
// are grouped by position and summed in the same way.
#pragma once

#include <climits>

#include "llmc/column_sums.cuh"
#include "llmc/rows.h"
#include "llmc/simt_vector.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

// By what the vectors of tokens and those of a soft prompt are multiplied.
struct EmbeddingScales {
    float tokens = 1, prompt = 1;
};

template <class T, int N, bool kPositions>
__global__ void __launch_bounds__(kBlockThreads)
    embedding_forward_kernel(T* out, const int* tokens, const T* wte, const T* wpe, const T* prompt,
                             const int* positions, int rows, int seq_len, int prompt_len, int first_position,
                             int C, EmbeddingScales scales) {
    const int row = blockIdx.x * warps_per_block() + warp();
    if (row >= rows) return;
    const int t = row % (prompt_len + seq_len), sequence = row / (prompt_len + seq_len);
    const int64_t at = int64_t{sequence} * seq_len + t - prompt_len;  // the token's index
    const T* from = t < prompt_len ? prompt + int64_t{t} * C : wte + (tokens ? tokens[at] : at) * C;
    const float scale = t < prompt_len ? scales.prompt : scales.tokens;
    for (int c = lane() * N; c < C; c += kLanes * N) {
        const Packed<T, N> p = load<N>(from + c);
        float o[N];
        for (int k = 0; k < N; k++) o[k] = scale * p[k];
        if constexpr (kPositions) {
            const int position = positions ? positions[row] : first_position + t;
            const Packed<T, N> q = load<N>(wpe + int64_t{position} * C + c);
            for (int k = 0; k < N; k++) o[k] += q[k];
        }
        store(out + int64_t{row} * C + c, o);
    }
}

// out (batch, prompt_len + seq_len, C) = wte[token] + wpe[position], or wte[token] alone if wpe is absent.
// tokens: (batch, seq_len). The position is read from `positions` (batch, seq_len), or is first_position + t
// if these are absent. Each sequence begins with the rows of `prompt` (prompt_len, C), which may be absent,
// and must be if there are `positions`. If tokens are a shape without data, wte has one row for each token,
// in order. The vectors are multiplied by `scales`.
template <class T>
void embedding_forward(Tensor<T>& out, const Tensor<int>& tokens, const Tensor<T>& wte, const Tensor<T>& wpe,
                       const Tensor<T>& prompt, int first_position, const Tensor<int>& positions,
                       Stream stream, EmbeddingScales scales = {}) {
    const int rows = static_cast<int>(out.rows()), C = static_cast<int>(out.columns());
    const int seq_len = static_cast<int>(tokens.columns());
    const int prompt_len = prompt ? static_cast<int>(prompt.rows()) : 0;
    assert(rows == tokens.rows() * (prompt_len + seq_len) && !(positions && prompt));
    const Operation operation("embedding_forward", 0, pass_bytes(out, out) + (wpe ? pass_bytes(out) : 0));
    with_vector_size<T>(C, [&]<int N>(std::integral_constant<int, N>) {
        auto run = [&]<bool kPositions>(std::bool_constant<kPositions>) {
            launch<embedding_forward_kernel<T, N, kPositions>>(
                blocks_of_rows(rows), kBlockThreads, 0, stream, out.data(), tokens.data(), wte.data(),
                wpe.data(), prompt.data(), positions.data(), rows, seq_len, prompt_len, first_position, C,
                scales);
        };
        wpe ? run(std::true_type()) : run(std::false_type());
    });
}

// A group of more rows than this, a common token's, is summed by all warps of its block. Otherwise they would
// wait for the one warp that sums it.
constexpr int kManyRows = kFastCpu ? INT_MAX : 64;

// sum += columns c .. c + N - 1 of the rows order[first], order[first + step] and so on before order[end].
template <int N, class T>
SIMT_DEVICE void add_rows(Accumulator<N>& sum, const T* dout, const int* order, int first, int end, int step,
                          int C, int c) {
    const auto part = [&](int i) { return load<N>(dout + int64_t{order[i]} * C + c); };
    const auto add = [&](const Packed<T, N>& d) {
        for (int k = 0; k < N; k++) sum[k] += d[k];
    };
    for_each_row(first, end, step, part, add);
}

template <class T, int N>
SIMT_DEVICE void add_to_vector(T* to, Accumulator<N>& sum, float scale) {
    const Packed<T, N> before = load<N>(to);
    for (int k = 0; k < N; k++) sum[k] = before[k] + scale * sum[k];
    store(to, sum.v);
}

template <class T, int N>
__global__ void __launch_bounds__(kBlockThreads, 4)  // otherwise loads wait for each other, to save registers
    token_embedding_backward_kernel(T* dwte, const T* dout, const int* tokens, const int* order,
                                    const int* starts, int groups, int C, float scale) {
    const int block_group = blockIdx.x * warps_per_block(), group = block_group + warp();
    const int c = (blockIdx.y * kLanes + lane()) * N;
    if (group < groups && c < C) {
        const int first = starts[group], end = starts[group + 1];
        if (first < end && end - first <= kManyRows) {
            Accumulator<N> sum;
            add_rows(sum, dout, order, first, end, 1, C, c);
            add_to_vector(dwte + int64_t{tokens[order[first]]} * C + c, sum, scale);
        }
    }
    if constexpr (kFastCpu) return;
    __shared__ float parts[kBlockWarps][N][kLanes];
    for (int g = block_group; g < groups && g < block_group + warps_per_block(); g++) {
        const int first = starts[g], end = starts[g + 1];
        if (end - first <= kManyRows) continue;
        Accumulator<N> sum;
        if (c < C) add_rows(sum, dout, order, first + warp(), end, warps_per_block(), C, c);
        for (int k = 0; k < N; k++) parts[warp()][k][lane()] = sum[k];
        __syncthreads();
        if (warp() == 0 && c < C) {
            for (int w = 1; w < warps_per_block(); w++)
                for (int k = 0; k < N; k++) sum[k] += parts[w][k][lane()];
            add_to_vector(dwte + int64_t{tokens[order[first]]} * C + c, sum, scale);
        }
        __syncthreads();  // before `parts` has those of the next group
    }
}

// Gradients of the first `positions` positions of every sequence.
template <class T, int N>
__global__ void __launch_bounds__(kBlockThreads)
    position_embedding_backward_kernel(T* dwpe, const T* dout, int batch, int seq_len, int positions, int C,
                                       float scale) {
    const int t = blockIdx.x * warps_per_block() + warp();
    if (t >= positions) return;
    for (int c = lane() * N; c < C; c += kLanes * N) {
        Accumulator<N> sum;
        const auto part = [&](int b) { return load<N>(dout + (int64_t{b} * seq_len + t) * C + c); };
        const auto add = [&](const Packed<T, N>& d) {
            for (int k = 0; k < N; k++) sum[k] += d[k];
        };
        for_each_row(0, batch, 1, part, add);
        add_to_vector(dwpe + int64_t{t} * C + c, sum, scale);
    }
}

// Adds to dwte (V, C) and dwpe (positions, C) their gradients, from dout (batch, seq_len, C). order (batch *
// seq_len) and starts (groups + 1) are copies on the device of group_tokens()'s result for the tokens;
// documents are those of the batch. Absent gradients are not computed. `scale` is that of the tokens'
// vectors.
template <class T>
void embedding_backward(Tensor<T>& dwte, Tensor<T>& dwpe, const Tensor<T>& dout, const Tensor<int>& tokens,
                        const Tensor<int>& order, const Tensor<int>& starts, const Documents& documents,
                        Stream stream, float scale = 1) {
    const int C = static_cast<int>(dout.columns()), seq_len = static_cast<int>(tokens.columns());
    const int batch = static_cast<int>(tokens.rows()), groups = static_cast<int>(starts.size()) - 1;
    if (!dwte && !dwpe) return;
    const Operation operation("embedding_backward", 0,
                              (dwte ? pass_bytes(dout, dout, dout) : 0) + (dwpe ? pass_bytes(dout) : 0));
    with_vector_size<T>(C, [&]<int N>(std::integral_constant<int, N>) {
        const auto add_groups = [&](Tensor<T>& to, const Tensor<int>& numbers, const Tensor<int>& rows,
                                    const Tensor<int>& begins, int count, float factor) {
            const dim3 grid(blocks_of_rows(count), static_cast<unsigned>(ceil_div(C, int64_t{kLanes} * N)));
            launch<token_embedding_backward_kernel<T, N>>(grid, kBlockThreads, 0, stream, to.data(),
                                                          dout.data(), numbers.data(), rows.data(),
                                                          begins.data(), count, C, factor);
        };
        if (dwte) add_groups(dwte, tokens, order, starts, groups, scale);
        if (dwpe && documents.positions)
            add_groups(dwpe, documents.positions, documents.rows_by_position, documents.position_starts,
                       seq_len, 1);
        else if (dwpe)
            launch<position_embedding_backward_kernel<T, N>>(blocks_of_rows(seq_len), kBlockThreads, 0,
                                                             stream, dwpe.data(), dout.data(), batch, seq_len,
                                                             seq_len, C, 1.f);
    });
}

// Adds to d_prompt (prompt_len, C) the gradients of the rows before every sequence, from d_out (batch,
// prompt_len + seq_len, C). `scale` is that of the prompt's vectors.
template <class T>
void prompt_backward(Tensor<T>& d_prompt, const Tensor<T>& d_out, Stream stream, float scale = 1) {
    const int positions = static_cast<int>(d_prompt.rows()), C = static_cast<int>(d_prompt.columns());
    const int batch = static_cast<int>(d_out.shape().dims[0]);
    const int seq_len = static_cast<int>(d_out.shape().dims[1]);
    const Operation operation("prompt_backward", 0, pass_bytes(d_prompt, d_prompt) * batch);
    with_vector_size<T>(C, [&]<int N>(std::integral_constant<int, N>) {
        launch<position_embedding_backward_kernel<T, N>>(blocks_of_rows(positions), kBlockThreads, 0, stream,
                                                         d_prompt.data(), d_out.data(), batch, seq_len,
                                                         positions, C, scale);
    });
}
