// chunk_sums.h - gradients that chunks of rows add to, one after the other, and what they need beside them
// meanwhile, so that no more is lost than in one product of all rows.
//
// In fp32 a sum of chunks is as good as one product. A bf16 matrix keeps low bits beside it (wide_sum.cuh);
// what is small, a bias or a norm's gains, is summed in fp32 and rounded once.
#pragma once

#include <vector>

#include "llmc/matmul.h"
#include "llmc/model.h"
#include "llmc/norm.h"
#include "llmc/wide_sum.cuh"

// The rows of a matrix (m, n) whose product of one chunk of rows is in fp32 at a time: on a GPU, where each
// slice is two launches that are too small for it, as many as take an eighth of the chunk's operand.
inline int64_t wide_rows(int64_t chunk, int64_t m, int64_t n) {
    constexpr int64_t kFew = 2048;
    const int64_t room = chunk * m * static_cast<int64_t>(sizeof(bf16)) / 8;
    const int64_t fit = room / (n * static_cast<int64_t>(sizeof(float))) / kFew * kFew;
    return std::min(m, kFastCpu ? kFew : std::max(kFew, fit));
}

// So many elements rounded up to whole vectors.
inline int64_t whole_vectors(int64_t elements) {
    return ceil_div(elements, kVectorSize<bf16>) * kVectorSize<bf16>;
}

// The low bits of a gradient, zero as before the first chunk; none in fp32.
template <class T>
Tensor<uint8_t> take_low_bits(Arena& arena, Stream stream, const char* name, const Tensor<T>& gradient) {
    if (!gradient || !std::is_same_v<T, bf16>) return {};
    const int64_t bytes = whole_vectors(gradient.size()) / 2;
    Tensor<uint8_t> low = arena.take<uint8_t>(name, {bytes}, "gradient");
    device_fill(low.data(), 0, static_cast<size_t>(bytes), stream);
    return low;
}

// d_weight (m, n) [+]= a^T b, of a (rows, m) and b (rows, n), which may be columns of wider tensors with
// a_row and b_row elements from a row to the next. With `low` it is added always, as a term of a wide sum; a
// slice's last vector may then touch the room behind d_weight, which stays zero.
template <class T>
void add_product(Arena& arena, Stream stream, Tensor<T>& d_weight, Tensor<uint8_t>& low, const Tensor<T>& a,
                 const Tensor<T>& b, bool adds, int64_t a_row = 0, int64_t b_row = 0) {
    if (!low)
        return matmul(arena, stream, d_weight, a, b,
                      {.transpose_a = true, .accumulate = adds, .a_row = a_row, .b_row = b_row});
    if constexpr (std::is_same_v<T, bf16>) {
        const int64_t m = d_weight.rows(), n = d_weight.columns(), slice = wide_rows(a.rows(), m, n);
        Tensor<float> room = arena.take<float>("d_weight_product", {whole_vectors(slice * n)});
        for (int64_t first = 0; first < m; first += slice) {
            const int64_t count = std::min(slice, m - first), size = count * n, padded = whole_vectors(size);
            Tensor<float> product(room.data(), {count, n}), term(room.data(), {padded});
            if (padded > size)
                device_fill(room.at(size), 0, static_cast<size_t>(padded - size) * sizeof(float), stream);
            const Tensor<T> columns(a.at(first), {a.rows(), count});
            matmul(arena, stream, product, columns, b,
                   {.transpose_a = true, .a_row = a_row ? a_row : a.columns(), .b_row = b_row});
            Tensor<T> sum(d_weight.at(first * n), {padded});
            Tensor<uint8_t> sum_low(low.at(first * n / 2), {padded / 2});
            wide_sum_add(sum, sum_low, term, stream);
        }
    }
}

// What the gradients of a linear layer need: low bits of the weight's and of an adapter's, the bias's sum.
template <class T>
struct LinearSums {
    Tensor<uint8_t> weight, a;
    std::vector<Tensor<uint8_t>> b = {};
    Tensor<float> bias = {};
};

// Begins the sums of a layer's gradients g. Those that are not `added` to what is there become zero; that of
// the bias is so already.
template <class T>
LinearSums<T> begin_sums(Arena& arena, Stream stream, Linear<T>& g, bool added) {
    const auto zero = [&]<class U>(Tensor<U>& t) {
        device_fill(t.data(), 0, static_cast<size_t>(t.bytes()), stream);
    };
    const auto begin = [&](Tensor<T>& gradient) {
        if (gradient && !added) zero(gradient);
        return take_low_bits(arena, stream, "d_weight_low_bits", gradient);
    };
    LinearSums<T> sums{begin(g.weight), begin(g.adapter.a)};
    for (auto& part : g.adapter.parts) sums.b.push_back(begin(part.b));
    if (g.bias) zero(sums.bias = arena.take<float>("d_bias_sum", g.bias.shape()));
    return sums;
}

template <class T>
void end_sums(Linear<T>& g, LinearSums<T>& sums, Stream stream) {
    if (g.bias)
        add_chunks(ColumnOutputs<T, 1>{{g.bias.data()}}, sums.bias, 1, static_cast<int>(g.bias.size()),
                   stream);
    sums = {};
}

// The gradients of a norm in fp32, (1, norm_sums(), C), and views of them as such; none where they are
// frozen.
struct NormSums {
    Tensor<float> all;
    Norm<float> norm = {};
};

template <class T>
NormSums begin_sums(Arena& arena, Stream stream, const char* name, const Norm<T>& g) {
    NormSums sums;
    if (!g.weight) return sums;
    const int64_t count = g.bias ? 2 : 1;
    sums.all = arena.take<float>(name, {1, count, g.weight.size()});
    device_fill(sums.all.data(), 0, static_cast<size_t>(sums.all.bytes()), stream);
    sums.norm.weight = sums.all.rows_at(0, 1);
    if (g.bias) sums.norm.bias = sums.all.rows_at(1, 1);
    return sums;
}

template <class T>
void end_sums(Norm<T>& g, NormSums& sums, Stream stream) {
    if (g.weight) add_norm_sums(g, sums.all, stream);
    sums = {};
}
