// linear.h - a linear layer, forward and backward: the product with its matrix, which may be quantized, the
// bias, and the adapter if it has one.
#pragma once

#include "llmc/elementwise.cuh"
#include "llmc/lora.cuh"

// The matrix as a product reads it: where it is, or dequantized into the arena.
inline TensorX weight_of(Arena& arena, Stream stream, const Linear<floatX>& w) {
    if (w.quantized.empty()) return w.weight.view();
    if (w.dequantized) return w.dequantized.view();
    if (w.lies_as(kStored<floatX>))
        return TensorX(w.quantized[0].matrix.template floats<floatX>(), w.shape());
    TensorX weight = arena.take<floatX>("dequantized", w.shape());
    for (const auto& [matrix, first] : w.quantized) dequantize(weight.at(first * w.inputs()), matrix, stream);
    return weight;
}

// Dequantizes matrices once for the products of several chunks, from here to the end of the scope.
// weight_of() finds them in the Linear.
class DequantizedScope {
  public:
    DequantizedScope(Arena& arena, Stream stream, std::initializer_list<Linear<floatX>*> matrices)
        : matrices_(matrices) {
        for (Linear<floatX>* const w : matrices_)
            if (!w->quantized.empty()) w->dequantized = weight_of(arena, stream, *w);
    }
    ~DequantizedScope() {
        for (Linear<floatX>* const w : matrices_) w->dequantized.drop();
    }
    DequantizedScope(const DequantizedScope&) = delete;

  private:
    const std::vector<Linear<floatX>*> matrices_;
};

// Returns x (.., inputs) W [+ bias] [+ adapter], then GELU if `gelu`: (.., outputs), a tensor called `name`.
// `rows` says which rows these are; if each is of another text, those that do not count may not be written.
inline TensorX linear_forward(Arena& arena, Stream stream, const char* name, const TensorX& x,
                              const Linear<floatX>& w, const Rows& rows, bool gelu = false) {
    Shape shape = x.shape();
    shape.dims[shape.count - 1] = w.outputs();
    TensorX out = arena.take<floatX>(name, shape);
    const int64_t few = rows.rows_from_codes(x.rows());
    const bool reads_codes = !w.quantized.empty() && !w.floats && few > 0;
    const bool gelu_comes_last = w.adapter || reads_codes;  // else the product applies it
    if (reads_codes) {
        for (const auto& [matrix, first] : w.quantized)
            multiply_few_rows({out.at(first), out.columns(), x.data(), few}, matrix,
                              w.bias ? w.bias.at(first) : nullptr, stream);
    } else {
        matmul(arena, stream, out, x, weight_of(arena, stream, w),
               {.transpose_b = w.by_outputs,
                .bias = w.bias ? &w.bias : nullptr,
                .gelu = gelu && !gelu_comes_last,
                .rows_alone = rows.rows_of_texts});
    }
    if (w.adapter) add_lora(arena, stream, out, x, w.adapter, rows);
    if (gelu && gelu_comes_last) gelu_forward(out, out, stream);
    return out;
}

// Computes the layer's gradients g from d_out (rows, outputs), and returns the gradient of its input x (rows,
// inputs), called `name`. make_x() returns x; it is called once for each gradient that needs x: the weight's,
// the adapter's. With gelu_input, x = gelu(gelu_input), and the returned gradient is that of gelu_input.
template <class MakeX>
TensorX linear_backward(Arena& arena, Stream stream, const char* name, LinearGradient<floatX>& g,
                        MakeX&& make_x, const TensorX& d_out, const Linear<floatX>& w, const Rows& rows,
                        const TensorX* gelu_input = nullptr) {
    TensorX d_columns;
    if (g.view.adapter) d_columns = lora_backward(arena, stream, g, make_x(), d_out, w.adapter, rows);
    if (g.view.weight) g.add(arena, stream, make_x(), d_out, w.by_outputs);
    Shape shape = d_out.shape();
    shape.dims[shape.count - 1] = w.inputs();
    TensorX d_x = arena.take<floatX>(name, shape, "gradient");
    matmul(arena, stream, d_x, d_out, weight_of(arena, stream, w),
           {.transpose_b = !w.by_outputs, .gelu_input = d_columns ? nullptr : gelu_input});
    if (!d_columns) return d_x;
    add_lora_input_gradient(arena, stream, d_x, d_columns, w.adapter, rows);
    if (gelu_input) gelu_backward(d_x, d_x, *gelu_input, stream);
    return d_x;
}
