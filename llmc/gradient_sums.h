// gradient_sums.h - where the gradients of a layer go, and how: they overwrite what is there, are added to
// it, or are summed over chunks of rows, between begin_chunks() and end_chunks().
//
// Chunks lose no more precision than one product of all rows would. In fp32 a plain sum over chunks is as
// good. A bf16 matrix has additional low bits beside it during the chunks (wide_sum.cuh). Small gradients, of
// a bias or a norm's gains, are summed in fp32 and rounded once.
#pragma once

#include <vector>

#include "llmc/matmul.h"
#include "llmc/model.h"
#include "llmc/norm_of_family.h"
#include "llmc/wide_sum.cuh"

// How many rows of a gradient (m, n) are computed in fp32 at a time, from a chunk of `chunk` rows. On a GPU
// each such slice takes two launches, so slices are larger there: up to an eighth of the bytes of the chunk's
// operand (chunk, m).
inline int64_t wide_rows(int64_t chunk, int64_t m, int64_t n) {
    constexpr int64_t kFew = 2048;
    const int64_t buffer = chunk * m * static_cast<int64_t>(sizeof(bf16)) / 8;
    const int64_t fit = buffer / (n * static_cast<int64_t>(sizeof(float))) / kFew * kFew;
    return std::min(m, kFastCpu ? kFew : std::max(kFew, fit));
}

// The number of elements, rounded up to whole vectors.
inline int64_t whole_vectors(int64_t elements) {
    return ceil_div(elements, kVectorSize<bf16>) * kVectorSize<bf16>;
}

// The low bits of a gradient's sum, zero before the first chunk; absent in fp32.
template <class T>
Tensor<uint8_t> take_low_bits(Arena& arena, Stream stream, const char* name, const Tensor<T>& gradient) {
    if (!gradient || !std::is_same_v<T, bf16>) return {};
    const int64_t bytes = whole_vectors(gradient.size()) / 2;
    Tensor<uint8_t> low = arena.take<uint8_t>(name, {bytes}, "gradient");
    fill_zero(low, stream);
    return low;
}

// d_weight (m, n) [+]= a^T b, for a (rows, m) and b (rows, n). These may be columns of wider tensors, whose
// rows are a_row and b_row elements apart. With `low` the product is always added, as a term of a wide sum.
// The last vector of a slice may then extend into the padding after d_weight, which stays zero.
template <class T>
void add_product(Arena& arena, Stream stream, Tensor<T>& d_weight, Tensor<uint8_t>& low, const Tensor<T>& a,
                 const Tensor<T>& b, bool adds, int64_t a_row = 0, int64_t b_row = 0) {
    if (!low)
        return matmul(arena, stream, d_weight, a, b,
                      {.transpose_a = true, .accumulate = adds, .a_row = a_row, .b_row = b_row});
    if constexpr (std::is_same_v<T, bf16>) {
        const int64_t m = d_weight.rows(), n = d_weight.columns(), slice = wide_rows(a.rows(), m, n);
        Tensor<float> buffer = arena.take<float>("d_weight_product", {whole_vectors(slice * n)});
        for (int64_t first = 0; first < m; first += slice) {
            const int64_t count = std::min(slice, m - first), size = count * n, padded = whole_vectors(size);
            Tensor<float> product(buffer.data(), {count, n}), term(buffer.data(), {padded});
            if (padded > size)
                device_fill(buffer.at(size), 0, static_cast<size_t>(padded - size) * sizeof(float), stream);
            const Tensor<T> columns(a.at(first), {a.rows(), count});
            matmul(arena, stream, product, columns, b,
                   {.transpose_a = true, .a_row = a_row ? a_row : a.columns(), .b_row = b_row});
            Tensor<T> sum(d_weight.at(first * n), {padded});
            Tensor<uint8_t> sum_low(low.at(first * n / 2), {padded / 2});
            wide_sum_add(sum, sum_low, term, stream);
        }
    }
}

// Where the gradients of a linear layer and its adapter go. Frozen parameters have absent gradients.
template <class T>
struct LinearGradient {
    Linear<T> view;  // of the unit's gradients
    // If false, the first product overwrites a matrix's gradient. A bias's gradient is always added to.
    bool adds;
    bool in_chunks = false;
    Tensor<uint8_t> weight_low = {}, a_low = {};  // low bits, in chunks
    std::vector<Tensor<uint8_t>> b_low = {};
    Tensor<float> bias_sum = {};

    // From here to end_chunks(), chunks of rows add their terms.
    void begin_chunks(Arena& arena, Stream stream) {
        const auto begin = [&](Tensor<T>& gradient) {
            if (gradient && !adds) fill_zero(gradient, stream);
            return take_low_bits(arena, stream, "d_weight_low_bits", gradient);
        };
        weight_low = begin(view.weight);
        a_low = begin(view.adapter.a);
        for (auto& part : view.adapter.parts) b_low.push_back(begin(part.b));
        if (view.bias) {
            bias_sum = arena.take<float>("d_bias_sum", view.bias.shape());
            fill_zero(bias_sum, stream);
        }
        in_chunks = adds = true;
    }
    void end_chunks(Stream stream) {
        if (view.bias)
            add_chunks(ColumnOutputs<T, 1>{{view.bias.data()}}, bias_sum, 1,
                       static_cast<int>(view.bias.size()), stream);
        weight_low = {}, a_low = {}, bias_sum = {};
        b_low.clear();
        in_chunks = false;
    }

    // Adds the terms of x (rows, inputs) and d_out (rows, outputs) to the gradients of weight and bias.
    void add(Arena& arena, Stream stream, const Tensor<T>& x, const Tensor<T>& d_out, bool by_outputs) {
        if (!in_chunks && !by_outputs)  // the product computes the bias's too
            return matmul(
                arena, stream, view.weight, x, d_out,
                {.transpose_a = true, .accumulate = adds, .bias_gradient = view.bias ? &view.bias : nullptr});
        add_product(arena, stream, view.weight, weight_low, by_outputs ? d_out : x, by_outputs ? x : d_out,
                    adds);
        if (!view.bias) return;
        in_chunks ? add_bias_gradient(arena, stream, bias_sum, d_out)
                  : add_bias_gradient(arena, stream, view.bias, d_out);
    }
    // Adds the term of d_columns (rows, ranks) and x (rows, inputs) to the gradient of an adapter's A.
    void add_a(Arena& arena, Stream stream, const Tensor<T>& d_columns, const Tensor<T>& x) {
        add_product(arena, stream, view.adapter.a, a_low, d_columns, x, adds);
    }
    // Adds the term of d_out (rows, outputs of the part) and `columns` (rows, rank) to the gradient of an
    // adapter part's B. Both are columns of wider tensors.
    void add_b(Arena& arena, Stream stream, size_t part, const Tensor<T>& d_out, int64_t d_out_row,
               const Tensor<T>& columns, int64_t columns_row) {
        Tensor<uint8_t> none;
        add_product(arena, stream, view.adapter.parts[part].b, in_chunks ? b_low[part] : none, d_out, columns,
                    adds, d_out_row, columns_row);
    }
};

// Where the gradients of a norm go: they are always added. Frozen parameters have absent gradients.
template <class T>
struct NormGradient {
    Norm<T> view;            // of the unit's gradients
    Tensor<float> all = {};  // in chunks: the sums, (1, norm_sums(), C),
    Norm<float> sums = {};   // and views of them

    void begin_chunks(Arena& arena, Stream stream, const char* name) {
        if (!view.weight) return;
        all = arena.take<float>(name, {1, view.bias ? 2 : 1, view.weight.size()});
        fill_zero(all, stream);
        sums.weight = all.rows_at(0, 1);
        if (view.bias) sums.bias = all.rows_at(1, 1);
    }
    void end_chunks(Stream stream) {
        if (view.weight) add_norm_sums(view, all, stream);
        all = {}, sums = {};
    }
    // Calls use(gradient) with the Norm that terms are added to now: in chunks the fp32 sums, else `view`.
    template <class Use>
    void with(Use&& use) {
        all ? use(sums) : use(view);
    }
};

// Where the gradients of a block go.
template <class T>
struct BlockGradient {
    NormGradient<T> norm_1;
    LinearGradient<T> qkv;
    NormGradient<T> query_norm, key_norm;
    LinearGradient<T> attention;
    NormGradient<T> norm_2;
    LinearGradient<T> up, down;

    // `view` has views of the block's gradients. `adds`: add to what is there; else matrices are overwritten.
    BlockGradient(Block<T> view, bool adds)
        : norm_1{std::move(view.norm_1)},
          qkv{std::move(view.qkv), adds},
          query_norm{std::move(view.query_norm)},
          key_norm{std::move(view.key_norm)},
          attention{std::move(view.attention), adds},
          norm_2{std::move(view.norm_2)},
          up{std::move(view.up), adds},
          down{std::move(view.down), adds} {}

    void begin_mlp_chunks(Arena& arena, Stream stream) {
        norm_2.begin_chunks(arena, stream, "d_ln_2_sums");
        up.begin_chunks(arena, stream);
        down.begin_chunks(arena, stream);
    }
    void end_mlp_chunks(Stream stream) {
        norm_2.end_chunks(stream);
        up.end_chunks(stream);
        down.end_chunks(stream);
    }
    void begin_chunks(Arena& arena, Stream stream) {
        norm_1.begin_chunks(arena, stream, "d_ln_1_sums");
        query_norm.begin_chunks(arena, stream, "d_query_norm_sums");
        key_norm.begin_chunks(arena, stream, "d_key_norm_sums");
        qkv.begin_chunks(arena, stream);
        attention.begin_chunks(arena, stream);
        begin_mlp_chunks(arena, stream);
    }
    void end_chunks(Stream stream) {
        norm_1.end_chunks(stream);
        query_norm.end_chunks(stream);
        key_norm.end_chunks(stream);
        qkv.end_chunks(stream);
        attention.end_chunks(stream);
        end_mlp_chunks(stream);
    }
};

// Where the gradients of the last norm and of the head's matrix go. Rows of logits add their terms between
// begin() and end(), in one chunk or several.
template <class T>
struct HeadGradient {
    NormGradient<T> norm;
    Tensor<T> weight;  // absent if the head is frozen
    // If false, the first product overwrites the matrix's gradient.
    bool adds;
    Tensor<uint8_t> weight_low = {};  // low bits, in several chunks

    // `head` has views of the unit's gradients.
    HeadGradient(const Head<T>& head, bool adds)
        : norm{{head.norm.weight.view(), head.norm.bias.view()}},
          weight(head.logits.weight.view()),
          adds(adds) {}

    void begin(Arena& arena, Stream stream, bool in_chunks) {
        norm.begin_chunks(arena, stream, "d_ln_f_sums");
        if (!in_chunks) return;
        if (weight && !adds) fill_zero(weight, stream);
        weight_low = take_low_bits(arena, stream, "d_wte_low_bits", weight);
        adds = true;
    }
    void end(Stream stream) {
        weight_low = {};
        norm.end_chunks(stream);
    }
    // Adds the terms of the logits' gradient (rows, padded vocabulary) and of x (rows, C), the norm's output.
    void add(Arena& arena, Stream stream, const Tensor<T>& d_logits, const Tensor<T>& x) {
        if (weight) add_product(arena, stream, weight, weight_low, d_logits, x, adds);
    }
};
