// gradient_sums.cuh - how a backward pass writes the gradients of one layer: they overwrite what is there,
// are added to it, or are summed over chunks of rows, between begin_chunks() and end_chunks().
//
// Chunks lose no more precision than one product of all rows would. In fp32 a plain sum over chunks is as
// good. A bf16 matrix has additional low bits beside it during the chunks. Small gradients, of a bias or a
// norm's gains, are summed in fp32 and rounded once.
#pragma once

#include <vector>

#include "llmc/column_sums.cuh"
#include "llmc/matmul.h"
#include "llmc/model.h"
#include "llmc/simt_vector.h"
#include "llmc/state_formats.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

// ---- a bf16 sum that keeps its low bits
//
// While terms are added, four more bits of each element are kept beside it. A plain bf16 sum of n terms
// would round n times to 8 bits; this one rounds n times to 12, and once to 8 when the low bits are dropped.

constexpr int kWideSumBits = 4;

// sum += term, N elements each. `parts` are the sum's low parts; they become those of the new sum. Each step
// is a loop of its own, so that the CPU build vectorizes it.
template <int N>
SIMT_DEVICE void add_with_parts(bf16* sum, const float* term, int (&parts)[N]) {
    Packed<bf16, N> s = load_ahead<N>(sum);
    const Packed<float, N> t = load_ahead<N>(term);
    float x[N];
    for (int k = 0; k < N; k++) x[k] = join<kWideSumBits>(s.v[k], parts[k]) + t.v[k];
    for (int k = 0; k < N; k++) parts[k] = split<kWideSumBits>(x[k]).low;
    for (int k = 0; k < N; k++)
        s.v[k] = x[k] == x[k] ? split<kWideSumBits>(x[k]).high : from_float<bf16>(x[k]);  // a NaN stays one
    store(sum, s);
}

// The low part in half a byte, with its sign.
SIMT_DEVICE int low_part(int half) { return ((half & 15) ^ 8) - 8; }

// The sum in whole vectors. A vector's N low parts are N / 2 bytes: byte k has element k's part in its lower
// half and element k + N / 2's in its upper half.
SIMT_DEVICE void wide_sum_vectors(bf16* sum, uint8_t* low, const float* term, int64_t n) {
    constexpr int N = kVectorSize<bf16>, H = N / 2;
    const int64_t first = int64_t{blockIdx.x} * blockDim.x * kElementwiseRun + threadIdx.x;
    for (int j = 0; j < kElementwiseRun; j++) {
        const int64_t i = (first + int64_t{j} * blockDim.x) * N;
        if (i >= n) return;
        Packed<uint8_t, H> l = load<H>(low + i / 2);
        int parts[N];
        for (int k = 0; k < H; k++) parts[k] = low_part(l.v[k]);
        for (int k = 0; k < H; k++) parts[k + H] = low_part(l.v[k] >> 4);
        add_with_parts(sum + i, term + i, parts);
        for (int k = 0; k < H; k++) l.v[k] = static_cast<uint8_t>((parts[k] & 15) | (parts[k + H] << 4));
        store(low + i / 2, l);
    }
}

// The sum by warps. A lane takes halves of two vectors, so that the terms that the lanes load at a time, 16
// bytes each, are contiguous: even lanes take lower halves, odd lanes upper halves. Of two lanes that share
// two vectors, each writes the low parts of one.
SIMT_DEVICE void wide_sum_half_vectors(bf16* sum, uint8_t* low, const float* term, int64_t n) {
    constexpr int H = kVectorSize<bf16> / 2;
    static_assert(kFastCpu || H == 4);
    const int shift = lane() % 2 * 4;  // position of its parts in a byte
    const bool upper = shift;
    for (int j = 0; j < kElementwiseRun; j++) {
        const int64_t warps = (int64_t{blockIdx.x} * kElementwiseRun + j) * warps_per_block() + warp();
        const int64_t first = warps * 2 * kLanes * H + lane() * H;
        uint32_t made[2] = {};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int64_t i = first + h * kLanes * H;
            if (i >= n) continue;
            const Packed<uint32_t, 1> word = load<1>(reinterpret_cast<const uint32_t*>(low) + i / (2 * H));
            int parts[H];
            for (int k = 0; k < H; k++) parts[k] = low_part(static_cast<int>(word.v[0] >> (8 * k + shift)));
            add_with_parts(sum + i, term + i, parts);
            for (int k = 0; k < H; k++) made[h] |= static_cast<uint32_t>(parts[k] & 15) << (8 * k + shift);
        }
        const uint32_t others = __shfl_xor_sync(~0u, upper ? made[0] : made[1], 1);
        const int64_t i = first + (upper ? kLanes * H : 0);
        if (i < n) reinterpret_cast<uint32_t*>(low)[i / (2 * H)] = (upper ? made[1] : made[0]) | others;
    }
}

__global__ void __launch_bounds__(kBlockThreads)
    wide_sum_kernel(bf16* sum, uint8_t* low, const float* term, int64_t n) {
    if constexpr (kFastCpu)
        wide_sum_vectors(sum, low, term, n);
    else
        wide_sum_half_vectors(sum, low, term, n);
}

// sum += term (n elements each). `low` (n / 2 bytes, zero before the first term) has the bits that bf16
// lacks. n is a multiple of a vector.
inline void wide_sum_add(Tensor<bf16>& sum, Tensor<uint8_t>& low, const Tensor<float>& term, Stream stream) {
    const int64_t n = sum.size();
    assert(n == term.size() && n == 2 * low.size() && n % kVectorSize<bf16> == 0);
    const Operation operation("wide_sum_add", 0, pass_bytes(sum, sum, low, low, term));
    launch<wide_sum_kernel>(elementwise_blocks<bf16>(n), kBlockThreads, 0, stream, sum.data(), low.data(),
                            term.data(), n);
}

// ---- the gradients of a layer

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
                 const Tensor<T>& b, bool accumulate, int64_t a_row = 0, int64_t b_row = 0) {
    if (!low)
        return matmul(arena, stream, d_weight, a, b,
                      {.transpose_a = true, .accumulate = accumulate, .a_row = a_row, .b_row = b_row});
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
    bool accumulate;
    bool in_chunks = false;
    Tensor<uint8_t> weight_low = {}, a_low = {};  // low bits, in chunks
    std::vector<Tensor<uint8_t>> b_low = {};
    Tensor<float> bias_sum = {};

    // From here to end_chunks(), chunks of rows add their terms.
    void begin_chunks(Arena& arena, Stream stream) {
        const auto begin = [&](Tensor<T>& gradient) {
            if (gradient && !accumulate) fill_zero(gradient, stream);
            return take_low_bits(arena, stream, "d_weight_low_bits", gradient);
        };
        weight_low = begin(view.weight);
        a_low = begin(view.adapter.a);
        for (auto& part : view.adapter.parts) b_low.push_back(begin(part.b));
        if (view.bias) {
            bias_sum = arena.take<float>("d_bias_sum", view.bias.shape());
            fill_zero(bias_sum, stream);
        }
        in_chunks = accumulate = true;
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
            return matmul(arena, stream, view.weight, x, d_out,
                          {.transpose_a = true,
                           .accumulate = accumulate,
                           .bias_gradient = view.bias ? &view.bias : nullptr});
        add_product(arena, stream, view.weight, weight_low, by_outputs ? d_out : x, by_outputs ? x : d_out,
                    accumulate);
        if (!view.bias) return;
        in_chunks ? add_bias_gradient(arena, stream, bias_sum, d_out)
                  : add_bias_gradient(arena, stream, view.bias, d_out);
    }
    // Adds the term of d_columns (rows, ranks) and x (rows, inputs) to the gradient of an adapter's A.
    void add_a(Arena& arena, Stream stream, const Tensor<T>& d_columns, const Tensor<T>& x) {
        add_product(arena, stream, view.adapter.a, a_low, d_columns, x, accumulate);
    }
    // Adds the term of d_out (rows, outputs of the part) and `columns` (rows, rank) to the gradient of an
    // adapter part's B. Both are columns of wider tensors.
    void add_b(Arena& arena, Stream stream, size_t part, const Tensor<T>& d_out, int64_t d_out_row,
               const Tensor<T>& columns, int64_t columns_row) {
        Tensor<uint8_t> none;
        add_product(arena, stream, view.adapter.parts[part].b, in_chunks ? b_low[part] : none, d_out, columns,
                    accumulate, d_out_row, columns_row);
    }
};

// Adds gradients of a norm that are summed already, (1, 2, C), or (1, 1, C) without a bias, to g.
template <class T>
void add_norm_sums(Norm<T>& g, const Tensor<float>& sums, Stream stream) {
    const int C = static_cast<int>(sums.columns());
    if (g.bias)
        add_chunks(ColumnOutputs<T, 2>{{g.weight.data(), g.bias.data()}}, sums, 1, C, stream);
    else
        add_chunks(ColumnOutputs<T, 1>{{g.weight.data()}}, sums, 1, C, stream);
}

// Where the gradients of a norm go: they are always added. Frozen parameters have absent gradients.
template <class T>
struct NormGradient {
    Norm<T> view;            // of the unit's gradients
    Tensor<float> all = {};  // in chunks: the sums, (1, 1 or 2, C),
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
    LinearGradient<T> projection;
    NormGradient<T> norm_2;
    LinearGradient<T> up, down;
    NormGradient<T> attention_norm, mlp_norm;

    // `view` has views of the block's gradients. `accumulate`: add to what is there; else matrices are
    // overwritten.
    BlockGradient(Block<T> view, bool accumulate)
        : norm_1{std::move(view.norm_1)},
          qkv{std::move(view.qkv), accumulate},
          query_norm{std::move(view.query_norm)},
          key_norm{std::move(view.key_norm)},
          projection{std::move(view.projection), accumulate},
          norm_2{std::move(view.norm_2)},
          up{std::move(view.up), accumulate},
          down{std::move(view.down), accumulate},
          attention_norm{std::move(view.attention_norm)},
          mlp_norm{std::move(view.mlp_norm)} {}

    void begin_mlp_chunks(Arena& arena, Stream stream) {
        norm_2.begin_chunks(arena, stream, "d_norm_2_sums");
        mlp_norm.begin_chunks(arena, stream, "d_mlp_norm_sums");
        up.begin_chunks(arena, stream);
        down.begin_chunks(arena, stream);
    }
    void end_mlp_chunks(Stream stream) {
        norm_2.end_chunks(stream);
        mlp_norm.end_chunks(stream);
        up.end_chunks(stream);
        down.end_chunks(stream);
    }
    void begin_chunks(Arena& arena, Stream stream) {
        norm_1.begin_chunks(arena, stream, "d_norm_1_sums");
        query_norm.begin_chunks(arena, stream, "d_query_norm_sums");
        key_norm.begin_chunks(arena, stream, "d_key_norm_sums");
        attention_norm.begin_chunks(arena, stream, "d_attention_norm_sums");
        qkv.begin_chunks(arena, stream);
        projection.begin_chunks(arena, stream);
        begin_mlp_chunks(arena, stream);
    }
    void end_chunks(Stream stream) {
        norm_1.end_chunks(stream);
        query_norm.end_chunks(stream);
        key_norm.end_chunks(stream);
        attention_norm.end_chunks(stream);
        qkv.end_chunks(stream);
        projection.end_chunks(stream);
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
    bool accumulate;
    Tensor<uint8_t> weight_low = {};  // low bits, in several chunks

    // `head` has views of the unit's gradients.
    HeadGradient(const Head<T>& head, bool accumulate)
        : norm{{head.norm.weight.view(), head.norm.bias.view()}},
          weight(head.logits.weight.view()),
          accumulate(accumulate) {}

    void begin(Arena& arena, Stream stream, bool in_chunks) {
        norm.begin_chunks(arena, stream, "d_norm_f_sums");
        if (!in_chunks) return;
        if (weight && !accumulate) fill_zero(weight, stream);
        weight_low = take_low_bits(arena, stream, "d_wte_low_bits", weight);
        accumulate = true;
    }
    void end(Stream stream) {
        weight_low = {};
        norm.end_chunks(stream);
    }
    // Adds the terms of the logits' gradient (rows, padded vocabulary) and of x (rows, C), the norm's output.
    void add(Arena& arena, Stream stream, const Tensor<T>& d_logits, const Tensor<T>& x) {
        if (weight) add_product(arena, stream, weight, weight_low, d_logits, x, accumulate);
    }
};
