// lora.cuh - LoRA (Hu et al., arXiv:2106.09685) at a linear layer: y += scale B A dropout(x), its backward,
// and the merge into the layer's matrix. adapter_files.cpp reads adapters, checkpoint.h writes them.
//
// A (ranks, inputs) holds the A of all parts that share the input, such as q, k and v; the columns A x of the
// parts lie beside each other, each scaled by its own number. Each part's B (outputs, rank) makes its own
// columns of the layer's output.
#pragma once

#include "llmc/arena.h"
#include "llmc/gradient_sums.cuh"
#include "llmc/matmul.h"
#include "llmc/rows.h"
#include "llmc/simt_vector.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

// The most parts of a layer: q, k and v.
constexpr int kMostLoraParts = 3;

// Columns from ends[i - 1] up to, but not including, ends[i] are multiplied by scales[i].
struct ColumnScales {
    int ends[kMostLoraParts];
    float scales[kMostLoraParts];
};

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    scale_columns_kernel(T* x, ColumnScales s, int64_t n, int columns) {
    for_each_vector<T>(n, are_aligned(x), [&]<int N>(int64_t i, std::integral_constant<int, N>) SIMT_INLINE {
        const Packed<T, N> p = load<N>(x + i);
        float o[N];
        for (int k = 0; k < N; k++) {
            const int c = s.ends[0] == columns ? 0 : static_cast<int>((i + k) % columns);
            o[k] = p[k] * (c < s.ends[0] ? s.scales[0] : c < s.ends[1] ? s.scales[1] : s.scales[2]);
        }
        store(x + i, o);
    });
}

// Multiplies each element of x (rows, columns) by its column's scale.
template <class T>
void scale_columns(Tensor<T>& x, const ColumnScales& s, Stream stream) {
    const Operation operation("scale_columns", 0, pass_bytes(x, x));
    launch<scale_columns_kernel<T>>(elementwise_blocks<T>(x.size()), kBlockThreads, 0, stream, x.data(), s,
                                    x.size(), static_cast<int>(x.columns()));
}

// The input x (rows, inputs) as the adapter sees it: after the adapter's dropout, in training.
inline TensorX lora_input(Arena& arena, Stream stream, const TensorX& x, const Adapter<floatX>& adapter,
                          const Rows& rows) {
    const Dropout d = rows.lora_dropout(adapter.place, adapter.a.columns());
    if (!d) return x.view();
    TensorX seen = arena.take<floatX>("lora_input", x.shape());
    dropout(seen, x, d, stream);
    return seen;
}

// Multiplies the columns (rows, ranks) of each part by its scale.
inline void scale_lora(TensorX& columns, const Adapter<floatX>& adapter, Stream stream) {
    ColumnScales s;
    std::fill_n(s.ends, kMostLoraParts, static_cast<int>(columns.columns()));
    std::fill_n(s.scales, kMostLoraParts, adapter.parts[0].scale);
    int end = 0;
    bool same = true;
    for (size_t i = 0; i < adapter.parts.size(); i++) {
        s.ends[i] = end += static_cast<int>(adapter.parts[i].b.columns());
        s.scales[i] = adapter.parts[i].scale;
        same = same && s.scales[i] == s.scales[0];
    }
    if (same) s.ends[0] = end;
    if (!same || s.scales[0] != 1) scale_columns(columns, s, stream);
}

// x A^T (rows, ranks), scaled. x is lora_input().
inline TensorX lora_columns(Arena& arena, Stream stream, const TensorX& x, const Adapter<floatX>& adapter,
                            int64_t rows_alone = 0) {
    TensorX columns = arena.take<floatX>("lora_columns", {x.rows(), adapter.a.rows()});
    matmul(arena, stream, columns, x, adapter.a, {.transpose_b = true, .rows_alone = rows_alone});
    scale_lora(columns, adapter, stream);
    return columns;
}

// out (rows, outputs) += scale B A dropout(x), x (rows, inputs).
inline void add_lora(Arena& arena, Stream stream, TensorX& out, const TensorX& x,
                     const Adapter<floatX>& adapter, const Rows& rows) {
    const TensorX columns =
        lora_columns(arena, stream, lora_input(arena, stream, x, adapter, rows), adapter, rows.rows_of_texts);
    int64_t first = 0;
    for (const auto& part : adapter.parts) {
        const int64_t rank = part.b.columns();
        TensorX to(out.at(part.first_output), {out.rows(), part.b.rows()});
        matmul(
            arena, stream, to, TensorX(columns.at(first), {columns.rows(), rank}), part.b,
            {.transpose_b = true, .accumulate = true, .a_row = columns.columns(), .out_row = out.columns()});
        first += rank;
    }
}

// The gradients of A and B from the layer's input x (rows, inputs) and d_out (rows, outputs). Returns the
// gradient of A x, (rows, ranks). The columns A x are recomputed.
inline TensorX lora_backward(Arena& arena, Stream stream, LinearGradient<floatX>& g, const TensorX& x,
                             const TensorX& d_out, const Adapter<floatX>& adapter, const Rows& rows) {
    const TensorX seen = lora_input(arena, stream, x, adapter, rows);
    const int64_t count = seen.rows(), ranks = adapter.a.rows();
    TensorX columns = lora_columns(arena, stream, seen, adapter);
    TensorX d_columns = arena.take<floatX>("d_lora_columns", {count, ranks}, "gradient");
    int64_t first = 0;
    for (size_t i = 0; i < adapter.parts.size(); i++) {
        const auto& part = adapter.parts[i];
        const int64_t rank = part.b.columns();
        const TensorX d_part(d_out.at(part.first_output), {count, part.b.rows()});
        g.add_b(arena, stream, i, d_part, d_out.columns(), TensorX(columns.at(first), {count, rank}), ranks);
        TensorX to(d_columns.at(first), {count, rank});
        matmul(arena, stream, to, d_part, part.b, {.a_row = d_out.columns(), .out_row = ranks});
        first += rank;
    }
    columns.drop();
    scale_lora(d_columns, adapter, stream);
    g.add_a(arena, stream, d_columns, seen);
    return d_columns;
}

// d_x (rows, inputs) += the gradient that d_columns (rows, ranks) sends through A and the dropout.
inline void add_lora_input_gradient(Arena& arena, Stream stream, TensorX& d_x, const TensorX& d_columns,
                                    const Adapter<floatX>& adapter, const Rows& rows) {
    const Dropout d = rows.lora_dropout(adapter.place, adapter.a.columns());
    if (!d) return matmul(arena, stream, d_x, d_columns, adapter.a, {.accumulate = true});
    TensorX d_seen = arena.take<floatX>("d_lora_input", d_x.shape(), "gradient");
    matmul(arena, stream, d_seen, d_columns, adapter.a);
    dropout_add(d_x, d_seen, d, stream);
}

// Adds scale B A to a layer's matrix, which is (outputs, inputs) if by_outputs, else (inputs, outputs).
inline void merge_lora(Arena& arena, Stream stream, TensorX& matrix, const Adapter<floatX>& adapter,
                       bool by_outputs) {
    int64_t first = 0;
    for (const auto& part : adapter.parts) {
        const int64_t outputs = part.b.rows(), rank = part.b.columns();
        TensorX b = arena.take<floatX>("scaled_lora_B", {outputs, rank});
        copy_rows_on_device(b.data(), rank, part.b.data(), rank, rank, outputs, stream);
        const int all = static_cast<int>(rank);
        scale_columns(b, {{all, all, all}, {part.scale, part.scale, part.scale}}, stream);
        const TensorX a = adapter.a.rows_at(first, rank);
        if (by_outputs) {
            TensorX to = matrix.rows_at(part.first_output, outputs);
            matmul(arena, stream, to, b, a, {.accumulate = true});
        } else {
            TensorX to(matrix.at(part.first_output), {matrix.rows(), outputs});
            matmul(
                arena, stream, to, a, b,
                {.transpose_a = true, .transpose_b = true, .accumulate = true, .out_row = matrix.columns()});
        }
        first += rank;
    }
}
