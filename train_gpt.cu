// train_gpt.cu - the training of a GPT, top to bottom: the model's forward and backward, the step, sampling,
// the loop.
//
// Every piece of the step takes its tensors from the arena (llmc/arena.h), where they are first written, and
// lets go of them where they are last read. What a block lets go of in forward, backward makes again: that is
// all there is to recompute. The kernels are in llmc/*.cuh, each with its launcher; matrix products in
// llmc/matmul.h.

#include <fcntl.h>
#include <omp.h>
#include <unistd.h>

#include <csignal>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>

#include "llmc/arena.h"
#include "llmc/attention.cuh"
#include "llmc/bench.h"
#include "llmc/checkpoint.h"
#include "llmc/clock.h"
#include "llmc/cross_entropy.cuh"
#include "llmc/dataset.h"
#include "llmc/embedding.cuh"
#include "llmc/feeder.h"
#include "llmc/fit.h"
#include "llmc/enough_memory.h"
#include "llmc/global_norm.cuh"
#include "llmc/graph.h"
#include "llmc/head_norm.cuh"
#include "llmc/head_rows.h"
#include "llmc/matmul.h"
#include "llmc/matmul_search.h"
#include "llmc/norm.h"
#include "llmc/optimizer.cuh"
#include "llmc/options.h"
#include "llmc/outputs.h"
#include "llmc/positions.h"
#include "llmc/recompute.h"
#include "llmc/report.h"
#include "llmc/residual.cuh"
#include "llmc/resume.h"
#include "llmc/rope.cuh"
#include "llmc/sampler.h"
#include "llmc/schedule.h"
#include "llmc/state.h"
#include "llmc/step_lines.h"
#include "llmc/swiglu.cuh"
#include "llmc/terminal.h"
#include "llmc/threads.h"
#include "llmc/timeline.h"
#include "llmc/tokenizer.h"
#include "llmc/wide_sum.cuh"

#ifdef LLMC_BF16
using floatX = bf16;
constexpr const char* kPrecision = "bf16";
#else
using floatX = float;
constexpr const char* kPrecision = "fp32";
#endif
#ifdef SIMT_GPU
constexpr const char* kDevice = "cuda";
#else
constexpr const char* kDevice = "cpu";
#endif
using TensorX = Tensor<floatX>;
using TensorF = Tensor<float>;

using NormedX = Normed<floatX>;

// The tensors of one block's forward, in the order they are written. (B, T, C) unless said otherwise.
struct BlockActivations {
    TensorX input;  // the residual stream at the block's start
    NormedX norm_1;
    TensorX qkv;        // (B, T, qkv_width()), as attention reads it
    TensorX raw_qkv;    // the same before its heads were normalised, where they are
    TensorX attention;  // (B, T, query_width()), before the projection
    TensorF lse;        // (B, heads, T), the log of each softmax's denominator
    TensorX middle;     // the residual stream after attention
    NormedX norm_2;
    TensorX up;         // before the activation; the gate's half first where there is one
    TensorX activated;  // (B, T, mlp_width)
};

// The last norm and the logits of some rows.
struct HeadActivations {
    NormedX norm;    // (rows, C)
    TensorX logits;  // (rows, padded vocabulary)
};

// What the tensors of a norm are called.
struct NormNames {
    const char *mean, *rstd, *out;
};
constexpr NormNames kNorm1 = {"ln_1_mean", "ln_1_rstd", "ln_1"}, kNorm2 = {"ln_2_mean", "ln_2_rstd", "ln_2"},
                    kLastNorm = {"ln_f_mean", "ln_f_rstd", "ln_f"},
                    kEmbeddingNorm = {"embedding_mean", "embedding_rstd", "residual"};

// The keys and values of a sequence so far, a (positions, 2 kv_width()) tensor a layer, and how many
// positions are filled.
struct KvCache {
    std::vector<TensorX> layers;
    int length = 0;
};

// How a micro-batch is run.
struct MicroBatchOptions {
    int64_t head_rows = 0;   // rows that have logits at one time; 0: all
    std::vector<Keep> keep;  // of each layer
    bool adds = false;       // to the gradients of micro-batches before: else they are written
};

// The model: its parameters, seen through views, and the operations of a step on them. Nothing here owns
// memory; the parameters lie in a State, all else in the arena.
class Gpt {
  public:
    // Called with the number of a unit of the Layout and its gradients, as soon as they are complete.
    using Consume = std::function<void(int unit, const floatX* gradients)>;

    // The stream may be made later, before the first run.
    Gpt(Arena& arena, const Stream& stream, const State<floatX>& state, bool hopper_attention)
        : arena_(arena),
          stream_(stream),
          state_(state),
          layout_(state.layout),
          config_(layout_.config()),
          family_(*config_.family),
          hopper_attention_(hopper_attention) {
        bind();
    }
    // Points the views at the state's memory, and at position_factors() on the device: again after these were
    // allocated.
    void bind(float* position_factors_at = nullptr) {
        position_factors_ =
            TensorF(position_factors_at, {static_cast<int64_t>(position_factors(config_).size())});
        const auto unit = [&](int number) { return unit_of(StatePart::Weights, number).data(); };
        weights_.embeddings = layout_.embeddings(unit(layout_.embeddings_unit()));
        weights_.blocks.clear();
        for (int l = 0; l < config_.layers; l++) weights_.blocks.push_back(layout_.block(unit(l + 1), l));
        weights_.head = layout_.head(unit(layout_.head_unit()));
        if (config_.tied) weights_.head.logits.weight = weights_.embeddings.token.view();
    }

    void forward_backward(const DeviceBatch& batch, const MicroBatchOptions& options, float loss_scale,
                          TensorF& loss, const Consume& consume = {});
    void evaluate(const DeviceBatch& batch, const MicroBatchOptions& options, float loss_scale,
                  TensorF& loss);
    template <class Choose>
    void generate(const std::vector<int>& prompt, int new_tokens, Choose&& choose);

  private:
    TensorX take(const char* name, Shape shape) { return arena_.take<floatX>(name, shape); }
    TensorX take_gradient(const char* name, Shape shape) {
        return arena_.take<floatX>(name, shape, "gradient");
    }
    TensorF take_float(const char* name, Shape shape) { return arena_.take<float>(name, shape); }
    template <class T>
    void zero(Tensor<T>& t) {
        device_fill(t.data(), 0, static_cast<size_t>(t.bytes()), stream_);
    }
    // A norm's tensors for x (.., C), not filled yet.
    NormedX take_normed(const NormNames& names, const TensorX& x) {
        Shape rows = x.shape();
        rows.count--;
        TensorF mean = family_.norm == NormKind::Layer ? take_float(names.mean, rows) : TensorF();
        TensorF rstd = take_float(names.rstd, rows);
        return {std::move(mean), std::move(rstd), take(names.out, x.shape())};
    }
    Tensor<int> take_input(const char* name, Shape shape, const std::vector<int>& values);
    float epsilon() const { return static_cast<float>(config_.norm_epsilon); }
    // The columns of a packed qkv where the keys and the values begin.
    int64_t keys_at() const { return family_.heads_together ? config_.head_size : config_.query_width(); }
    int64_t values_at() const {
        return keys_at() + (family_.heads_together ? config_.head_size : config_.kv_width());
    }

    // The parts of a block, forward.
    NormedX norm(const NormNames& names, const TensorX& x, const Norm<floatX>& w);
    NormedX add_and_norm(const NormNames& names, TensorX& sum, const TensorX& a, const TensorX& b,
                         const Norm<floatX>& w);
    TensorX normalized(NormedX& n, const NormNames& names, const TensorX& x, const Norm<floatX>& w);
    TensorX linear(const char* name, const TensorX& x, const Linear<floatX>& w, bool gelu = false);
    TensorX activate(const TensorX& up);
    template <class MakeX>
    void make_qkv(BlockActivations& a, MakeX&& make_x, const Block<floatX>& w, bool for_backward,
                  int first_position);
    void make_qkv_backward(TensorX& d_qkv, BlockActivations& a, const Block<floatX>& w, Block<floatX>& g);
    AttentionInput<floatX> attention_of(const TensorX& qkv) const;
    void attend(BlockActivations& a, Keep keep, KvCache* cache, int layer);

    TensorX embed(const Tensor<int>& tokens, int first_position);
    void forward_attention(int layer, BlockActivations& a, Keep keep, KvCache* cache);
    TensorX forward_mlp(int layer, BlockActivations& a, Keep keep);
    TensorX forward_block(int layer, BlockActivations& a, Keep keep, KvCache* cache = nullptr);
    TensorX forward_only(const Tensor<int>& tokens, KvCache* cache);
    TensorX forward_cached(const std::vector<int>& tokens, KvCache& cache);
    HeadActivations forward_head(const TensorX& x);
    template <class Chunk>
    void for_each_head_chunk(int64_t rows, int64_t head_rows, Chunk&& chunk);

    // A unit's elements of the State.
    TensorX unit_of(StatePart part, int unit) const {
        const Unit& u = layout_.units()[static_cast<size_t>(unit)];
        return TensorX(state_.template data<floatX>(part, u.offset), {u.size});
    }

    // The same, backward.
    template <class Gradient>
    void norm_backward(TensorX& d_x, Norm<Gradient>& g, const TensorX& d_out, const TensorX& x,
                       const NormedX& n, const Norm<floatX>& w);
    template <class MakeX>
    TensorX linear_backward(const char* name, Linear<floatX>& g, MakeX&& make_x, const TensorX& d_out,
                            const Linear<floatX>& w, bool adds, const TensorX* gelu_input = nullptr);

    // Where the gradients of a unit go: into the State's, or into room of their own.
    struct UnitGradients {
        TensorX room, all;
    };
    UnitGradients take_unit_gradients(int unit, const MicroBatchOptions& options, const Consume& consume);
    void zero_added(int unit, const TensorX& gradients);
    void complete(int unit, UnitGradients& gradients, const Consume& consume);
    template <class T>
    void add_head_product(Tensor<T>& d_weight, Tensor<uint8_t>& low, const Tensor<T>& d_logits,
                          const Tensor<T>& x, bool adds);
    void head(TensorX& stream, const Tensor<int>& targets, const MicroBatchOptions& options, float loss_scale,
              TensorF& loss, Head<floatX>& g);
    void backward_mlp(const Block<floatX>& w, Block<floatX>& g, BlockActivations& a, TensorX& d_stream,
                      bool adds);
    void backward_attention(int layer, Block<floatX>& g, BlockActivations& a, TensorX& d_stream, bool adds);
    void backward_embeddings(Embeddings<floatX>& g, TensorX& d_stream, const DeviceBatch& batch);
    void backward_block(int layer, BlockActivations& a, TensorX& d_stream, const MicroBatchOptions& options,
                        const Consume& consume);

    Arena& arena_;
    const Stream& stream_;
    const State<floatX>& state_;
    const Layout& layout_;
    const ModelConfig& config_;
    const Family& family_;
    const bool hopper_attention_;
    TensorF position_factors_;
    struct {
        Embeddings<floatX> embeddings;
        std::vector<Block<floatX>> blocks;
        Head<floatX> head;  // its logits' weight is the token embedding where that is tied
    } weights_;
};

// ---- forward

// Takes a tensor and fills it from the host, waiting until it is there.
Tensor<int> Gpt::take_input(const char* name, Shape shape, const std::vector<int>& values) {
    Tensor<int> t = arena_.take<int>(name, shape, "input");
    assert(static_cast<int64_t>(values.size()) == t.size());
    copy_to_device(t.data(), values.data(), values.size() * sizeof(int), stream_);
    return t;
}

// The norm of x (rows, C).
NormedX Gpt::norm(const NormNames& names, const TensorX& x, const Norm<floatX>& w) {
    NormedX n = take_normed(names, x);
    norm_forward(family_.norm, n, x, w, epsilon(), stream_);
    return n;
}

// sum (rows, C) = a + b, and its norm.
NormedX Gpt::add_and_norm(const NormNames& names, TensorX& sum, const TensorX& a, const TensorX& b,
                          const Norm<floatX>& w) {
    NormedX n = take_normed(names, a);
    residual_norm_forward(family_.norm, sum, n, a, b, w, epsilon(), stream_);
    return n;
}

// A norm's output as forward kept it, or made again from the saved statistics: the same bits.
TensorX Gpt::normalized(NormedX& n, const NormNames& names, const TensorX& x, const Norm<floatX>& w) {
    if (n.out) return std::move(n.out);
    TensorX out = take(names.out, x.shape());
    normalize(family_.norm, out, x, n, w, stream_);
    return out;
}

// x (.., inputs) W [+ bias], (.., outputs); then GELU if asked.
TensorX Gpt::linear(const char* name, const TensorX& x, const Linear<floatX>& w, bool gelu) {
    Shape shape = x.shape();
    shape.dims[shape.count - 1] = w.outputs();
    TensorX out = take(name, shape);
    matmul(arena_, stream_, out, x, w.weight,
           {.transpose_b = w.by_outputs, .bias = w.bias ? &w.bias : nullptr, .gelu = gelu});
    return out;
}

// The activation of the MLP (.., mlp_width), of what its first product made.
TensorX Gpt::activate(const TensorX& up) {
    Shape shape = up.shape();
    shape.dims[shape.count - 1] = config_.mlp_width;
    TensorX out = take(family_.mlp == MlpKind::Gelu ? "gelu" : "swiglu", shape);
    if (family_.mlp == MlpKind::Gelu)
        gelu_forward(out, up, stream_);
    else
        swiglu_forward(out, up, stream_);
    return out;
}

TensorX Gpt::embed(const Tensor<int>& tokens, int first_position) {
    const Embeddings<floatX>& w = weights_.embeddings;
    TensorX x =
        take(w.norm.weight ? "embedded" : "residual", {tokens.rows(), tokens.columns(), config_.channels});
    embedding_forward(x, tokens, w.token, w.position, first_position, stream_);
    return w.norm.weight ? std::move(norm(kEmbeddingNorm, x, w.norm).out) : std::move(x);
}

// a.qkv (B, T, qkv_width()) as attention reads it: the product of the block's normalised input, its heads
// normalised and rotated as the family has it. Where heads are normalised, a backward needs the product too:
// a.raw_qkv is that, and where it was kept, no product is made again. make_x() hands over the input.
template <class MakeX>
void Gpt::make_qkv(BlockActivations& a, MakeX&& make_x, const Block<floatX>& w, bool for_backward,
                   int first_position) {
    const bool norms = static_cast<bool>(w.query_norm.weight);
    if (norms && for_backward) {
        if (!a.raw_qkv) a.raw_qkv = linear("qkv", make_x(), w.qkv);
        a.qkv = take("normed_qkv", a.raw_qkv.shape());
    } else {
        a.qkv = linear("qkv", make_x(), w.qkv);
    }
    if (norms)
        head_norm_forward(a.qkv, a.raw_qkv ? a.raw_qkv : a.qkv, w.query_norm.weight, w.key_norm.weight,
                          config_.heads, config_.kv_heads, stream_, epsilon());
    if (family_.position == PositionKind::Rotary)
        rope_forward(a.qkv, position_factors_, config_.heads + config_.kv_heads, first_position, stream_);
}

// Turns d_qkv, the gradient of a.qkv, into that of the product which make_qkv() began with.
void Gpt::make_qkv_backward(TensorX& d_qkv, BlockActivations& a, const Block<floatX>& w, Block<floatX>& g) {
    if (family_.position == PositionKind::Rotary)
        rope_backward(d_qkv, position_factors_, config_.heads + config_.kv_heads, 0, stream_);
    if (!w.query_norm.weight) return;
    TensorF scratch = take_float("column_sums", head_norm_scratch(d_qkv.rows(), config_.head_size));
    head_norm_backward(d_qkv, g.query_norm.weight, g.key_norm.weight, scratch, a.raw_qkv, w.query_norm.weight,
                       w.key_norm.weight, config_.heads, config_.kv_heads, stream_, epsilon());
    a.raw_qkv.drop();
}

// The attention of a packed qkv (B, T, qkv_width()) with itself.
AttentionInput<floatX> Gpt::attention_of(const TensorX& qkv) const {
    const int B = static_cast<int>(qkv.shape().dims[0]), T = static_cast<int>(qkv.shape().dims[1]);
    const int64_t row = config_.qkv_width(), size = config_.head_size;
    const bool together = family_.heads_together;
    return {.batch = B,
            .heads = config_.heads,
            .head_size = config_.head_size,
            .queries = T,
            .keys = T,
            .q = qkv.data(),
            .k = qkv.at(keys_at()),
            .v = qkv.at(values_at()),
            .q_row = row,
            .kv_row = row,
            .q_batch = T * row,
            .kv_batch = T * row,
            .kv_heads = config_.kv_heads,
            .q_head = together ? 3 * size : size,
            .kv_head = together ? 3 * size : size,
            .window = config_.window,
            .alibi = family_.position == PositionKind::Alibi ? position_factors_.data() : nullptr,
            .hopper = hopper_attention_};
}

// a.attention (B, T, query_width()) = causal attention of a.qkv; with a cache, of it and of all that came
// before.
void Gpt::attend(BlockActivations& a, Keep keep, KvCache* cache, int layer) {
    AttentionInput<floatX> in = attention_of(a.qkv);
    const int B = in.batch, T = in.queries;
    if (cache) {
        // A row of the cache has all keys, then all values; or of each head its key and its value.
        const int64_t row = 2 * config_.kv_width(), size = config_.head_size;
        const bool together = family_.heads_together;
        const TensorX& kv = cache->layers[static_cast<size_t>(layer)];
        floatX* end = kv.at(cache->length * row);
        if (together)
            copy_rows_on_device(end, 2 * size, in.k, 3 * size, 2 * size, T * in.heads, stream_);
        else
            copy_rows_on_device(end, row, in.k, in.kv_row, row, T, stream_);
        in.keys = cache->length + T;
        in.k = kv.data();
        in.v = kv.at(together ? size : config_.kv_width());
        in.kv_row = row;
        in.kv_head = together ? 2 * size : size;
        in.kv_batch = in.keys * row;
    }
    a.attention = take("attention", {B, T, config_.query_width()});
    if (keep.backward) a.lse = take_float("attention_lse", {B, config_.heads, T});
    attention_forward(a.attention.data(), a.lse.data(), in, stream_);
}

// From a.input to a.middle and its norm.
void Gpt::forward_attention(int layer, BlockActivations& a, Keep keep, KvCache* cache) {
    const Block<floatX>& w = weights_.blocks[static_cast<size_t>(layer)];
    a.norm_1 = norm(kNorm1, a.input, w.norm_1);
    auto normed = [&] { return a.norm_1.out.view(); };
    make_qkv(a, normed, w, keep.backward, cache ? cache->length : 0);
    if (!keep.norm) a.norm_1.out.drop();
    attend(a, keep, cache, layer);
    if (!keep.qkv) a.raw_qkv.drop();
    if (!keep.qkv || (a.raw_qkv && !keep.norm)) a.qkv.drop();
    TensorX projected = linear("attention_projected", a.attention, w.attention);
    if (!keep.attention) a.attention.drop(), a.lse.drop();
    a.middle = take("residual_middle", a.input.shape());
    a.norm_2 = add_and_norm(kNorm2, a.middle, a.input, projected, w.norm_2);
}

// From a.middle and its norm to the block's output.
TensorX Gpt::forward_mlp(int layer, BlockActivations& a, Keep keep) {
    const Block<floatX>& w = weights_.blocks[static_cast<size_t>(layer)];
    if (!keep.backward && family_.mlp == MlpKind::Gelu) {  // its input stays inside the product
        a.activated = linear("gelu", a.norm_2.out, w.up, true);
        a.norm_2.out.drop();
    } else {
        a.up = linear("up", a.norm_2.out, w.up);
        if (!keep.norm) a.norm_2.out.drop();
        a.activated = activate(a.up);
        if (!keep.up) a.up.drop();
    }
    TensorX output = linear("residual", a.activated, w.down);
    if (!keep.gelu) a.activated.drop();
    residual_forward(output, output, a.middle, stream_);
    return output;
}

// One block, from the residual stream in a.input to the one returned.
TensorX Gpt::forward_block(int layer, BlockActivations& a, Keep keep, KvCache* cache) {
    Range range("block", layer);
    forward_attention(layer, a, keep, cache);
    if (!keep.backward) a.input.drop();
    TensorX output = forward_mlp(layer, a, keep);
    if (!keep.middle && keep.backward) {
        TensorX input = std::move(a.input);
        a = {};
        a.input = std::move(input);
    }
    return output;
}

// The last block's output for `tokens` (B, T), keeping nothing. With a cache the tokens follow what it holds.
TensorX Gpt::forward_only(const Tensor<int>& tokens, KvCache* cache) {
    TensorX stream = embed(tokens, cache ? cache->length : 0);
    for (int l = 0; l < config_.layers; l++) {
        BlockActivations a;
        a.input = std::move(stream);
        stream = forward_block(l, a, kKeepNothing, cache);
    }
    return stream;
}

HeadActivations Gpt::forward_head(const TensorX& x) {
    HeadActivations a{norm(kLastNorm, x, weights_.head.norm), {}};
    a.logits = linear("logits", a.norm.out, weights_.head.logits);
    return a;
}

// Calls chunk(first, count) for all rows, head_rows at a time; 0 means all at once.
template <class Chunk>
void Gpt::for_each_head_chunk(int64_t rows, int64_t head_rows, Chunk&& chunk) {
    const int64_t count = head_rows > 0 ? std::min(head_rows, rows) : rows;
    int64_t first = 0;
    arena_.repeat(static_cast<int>(rows / count), [&] {
        chunk(first, count);
        first += count;
        return true;
    });
    if (rows % count) chunk(rows / count * count, rows % count);
}

// ---- backward

// Where a unit's gradients are consumed as soon as they are complete, they lie in the arena until then.
Gpt::UnitGradients Gpt::take_unit_gradients(int unit, const MicroBatchOptions& options,
                                            const Consume& consume) {
    UnitGradients g{{}, unit_of(StatePart::Gradients, unit)};
    if (consume) {
        g.room = arena_.take<floatX>("unit_gradients", g.all.shape(), "parameter_gradient");
        g.all = g.room.view();
    }
    if (!options.adds) zero_added(unit, g.all);
    return g;
}

// Zeroes what a unit's first gradients are added to, and the room between tensors. The matrices of linear
// layers are not: a product writes them. What else is added to a matrix zeroes it itself (head(),
// forward_backward()).
void Gpt::zero_added(int unit, const TensorX& gradients) {
    const int64_t unit_start = layout_.units()[static_cast<size_t>(unit)].offset;
    int64_t from = 0, end = 0;
    auto flush = [&] {
        if (end > from)
            device_fill(gradients.at(from), 0, static_cast<size_t>(end - from) * sizeof(floatX), stream_);
    };
    for (const Parameter& p : layout_.parameters_of(unit)) {
        const int64_t start = p.offset - unit_start + (p.memory.count == 2 ? p.memory.size() : 0);
        if (start != end) flush(), from = start;
        end = p.end() - unit_start;
    }
    flush();
}

void Gpt::complete(int unit, UnitGradients& gradients, const Consume& consume) {
    if (consume) consume(unit, gradients.room.data());
    gradients.room.drop();
}

// Backward of linear(): the weight's and bias' gradients from x (rows, inputs), which make_x() hands over and
// which is let go of then, and the returned gradient of x, times gelu' of gelu_input if given. Without `adds`
// the weight's gradient is written, and the bias' must be zero. An absent gradient is frozen: no product, and
// x is not made.
template <class MakeX>
TensorX Gpt::linear_backward(const char* name, Linear<floatX>& g, MakeX&& make_x, const TensorX& d_out,
                             const Linear<floatX>& w, bool adds, const TensorX* gelu_input) {
    if (g.weight) {
        const TensorX x = make_x();
        if (w.by_outputs) {
            matmul(arena_, stream_, g.weight, d_out, x, {.transpose_a = true, .accumulate = adds});
            if (g.bias) add_bias_gradient(arena_, stream_, g.bias, d_out);
        } else {
            matmul(arena_, stream_, g.weight, x, d_out,
                   {.transpose_a = true, .accumulate = adds, .bias_gradient = g.bias ? &g.bias : nullptr});
        }
    }
    Shape shape = d_out.shape();
    shape.dims[shape.count - 1] = w.inputs();
    TensorX d_x = take_gradient(name, shape);
    matmul(arena_, stream_, d_x, d_out, w.weight, {.transpose_b = !w.by_outputs, .gelu_input = gelu_input});
    return d_x;
}

// Adds to d_x (rows, C) and to the gradients what d_out (rows, C) sends back through the norm of x.
template <class Gradient>
void Gpt::norm_backward(TensorX& d_x, Norm<Gradient>& g, const TensorX& d_out, const TensorX& x,
                        const NormedX& n, const Norm<floatX>& w) {
    const int sums = norm_sums(family_.norm);
    TensorF scratch = take_float("column_sums", column_sums_scratch(x.rows(), x.columns(), sums));
    ::norm_backward(family_.norm, d_x, g, scratch, d_out, x, n, w, stream_);
}

// The rows of the vocabulary whose gradient of one chunk is in fp32 at a time.
constexpr int64_t kWideRows = 2048;

// d_weight (V, C) [+]= d_logits^T x, of a chunk of rows. In bf16 `low` carries what the sum of several chunks
// would lose, and it is added always.
template <class T>
void Gpt::add_head_product(Tensor<T>& d_weight, Tensor<uint8_t>& low, const Tensor<T>& d_logits,
                           const Tensor<T>& x, bool adds) {
    if (!low) {
        matmul(arena_, stream_, d_weight, d_logits, x, {.transpose_a = true, .accumulate = adds});
        return;
    }
    if constexpr (std::is_same_v<T, bf16>) {
        const int64_t V = d_weight.rows();
        TensorF room = take_float("d_wte_product", {std::min(kWideRows, V), d_weight.columns()});
        for (int64_t first = 0; first < V; first += kWideRows) {
            const int64_t count = std::min(kWideRows, V - first);
            TensorF product = room.rows_at(0, count);
            const Tensor<T> columns(d_logits.at(first), {d_logits.rows(), count});
            matmul(arena_, stream_, product, columns, x, {.transpose_a = true, .a_row = V});
            Tensor<T> sum = d_weight.rows_at(first, count);
            Tensor<uint8_t> sum_low = low.rows_at(first / 2, count / 2);  // V is even, padded
            wide_sum_add(sum, sum_low, product, stream_);
        }
    }
}

// The head of some rows after others, each forward and at once back, so that no more logits exist than a
// chunk's. `stream` (B, T, C), the last block's output, becomes its own gradient.
void Gpt::head(TensorX& stream, const Tensor<int>& targets, const MicroBatchOptions& options,
               float loss_scale, TensorF& loss, Head<floatX>& g) {
    const int64_t rows = stream.rows(), C = config_.channels, V = config_.padded_vocabulary();
    const bool chunks = options.head_rows > 0 && options.head_rows < rows;
    TensorF losses = take_float("losses", {rows, 1});
    TensorF sums_of_norm = take_float("d_ln_f_sums", {1, norm_sums(family_.norm), C});
    zero(sums_of_norm);
    Norm<float> g_norm{sums_of_norm.rows_at(0, 1), {}};
    if (g.norm.bias) g_norm.bias = sums_of_norm.rows_at(1, 1);
    if (chunks && !options.adds) zero(g.logits.weight);
    Tensor<uint8_t> low;
    if (chunks && std::is_same_v<floatX, bf16>) {
        low = arena_.take<uint8_t>("d_wte_low_bits", {V / 2, C}, "gradient");
        zero(low);
    }
    for_each_head_chunk(rows, options.head_rows, [&](int64_t first, int64_t count) {
        TensorX part = stream.rows_at(first, count), x = take("head_input", {count, C});
        copy_rows_on_device(x.data(), C, part.data(), C, C, count, stream_);
        HeadActivations a = forward_head(x);
        TensorF part_losses = losses.rows_at(first, count);
        cross_entropy_forward_backward(a.logits, part_losses, targets.view({rows, 1}).rows_at(first, count),
                                       loss_scale, config_.vocabulary, stream_);
        add_head_product(g.logits.weight, low, a.logits, a.norm.out, chunks || options.adds);
        TensorX d_norm = std::move(a.norm.out);
        matmul(arena_, stream_, d_norm, a.logits, weights_.head.logits.weight);
        a.logits.drop();
        zero(part);
        norm_backward(part, g_norm, d_norm, x, a.norm, weights_.head.norm);
    });
    add_losses(loss, losses, loss_scale, stream_);
    add_norm_sums(g.norm, sums_of_norm, stream_);
}

// The MLP half: d_stream, the gradient of the block's output, becomes that of a.middle. What is made again is
// let go of as soon as it was read once, where it costs no product.
void Gpt::backward_mlp(const Block<floatX>& w, Block<floatX>& g, BlockActivations& a, TensorX& d_stream,
                       bool adds) {
    auto make_norm_2 = [&] { return normalized(a.norm_2, kNorm2, a.middle, w.norm_2); };
    if (!a.up) a.up = linear("up", make_norm_2(), w.up);
    auto make_activated = [&] { return a.activated ? std::move(a.activated) : activate(a.up); };
    TensorX d_up;
    if (family_.mlp == MlpKind::Gelu) {
        d_up = linear_backward("d_up", g.down, make_activated, d_stream, w.down, adds, &a.up);
        a.up.drop();
    } else {
        const TensorX d = linear_backward("d_swiglu", g.down, make_activated, d_stream, w.down, adds);
        d_up = std::move(a.up);
        swiglu_backward(d_up, d, d_up, stream_);
    }
    TensorX d_norm = linear_backward("d_ln_2", g.up, make_norm_2, d_up, w.up, adds);
    d_up.drop();
    norm_backward(d_stream, g.norm_2, d_norm, a.middle, a.norm_2, w.norm_2);
}

// The attention half: d_stream, the gradient of a.middle, becomes that of a.input.
void Gpt::backward_attention(int layer, Block<floatX>& g, BlockActivations& a, TensorX& d_stream, bool adds) {
    const Block<floatX>& w = weights_.blocks[static_cast<size_t>(layer)];
    auto make_norm_1 = [&] { return normalized(a.norm_1, kNorm1, a.input, w.norm_1); };
    if (!a.qkv) make_qkv(a, make_norm_1, w, true, 0);
    if (!a.attention) attend(a, {}, nullptr, layer);

    auto attention = [&] { return a.attention.view(); };
    TensorX d_attention = linear_backward("d_attention", g.attention, attention, d_stream, w.attention, adds);
    TensorX d_qkv = take_gradient("d_qkv", a.qkv.shape());
    TensorF delta = take_float("attention_delta", a.lse.shape());
    attention_backward(d_qkv.data(), d_qkv.at(keys_at()), d_qkv.at(values_at()), d_attention.data(),
                       a.attention.data(), a.lse.data(), delta.data(), attention_of(a.qkv), stream_);
    delta.drop();
    d_attention.drop();
    a.attention.drop();
    a.lse.drop();
    a.qkv.drop();
    make_qkv_backward(d_qkv, a, w, g);

    TensorX d_norm = linear_backward("d_ln_1", g.qkv, make_norm_1, d_qkv, w.qkv, adds);
    d_qkv.drop();
    norm_backward(d_stream, g.norm_1, d_norm, a.input, a.norm_1, w.norm_1);
}

// Writes or adds the block's gradients; d_stream (B, T, C), the gradient of its output, becomes that of its
// input.
void Gpt::backward_block(int layer, BlockActivations& a, TensorX& d_stream, const MicroBatchOptions& options,
                         const Consume& consume) {
    Range range("block", layer);
    UnitGradients gradients = take_unit_gradients(layer + 1, options, consume);
    Block<floatX> g = layout_.block(gradients.all.data(), layer);
    if (!a.middle) forward_attention(layer, a, {.norm = false}, nullptr);
    backward_mlp(weights_.blocks[static_cast<size_t>(layer)], g, a, d_stream, options.adds);
    a.middle.drop();
    backward_attention(layer, g, a, d_stream, options.adds);
    a = {};
    complete(layer + 1, gradients, consume);
}

// Adds to the embeddings' gradients what d_stream (B, T, C), that of the first block's input, sends back.
void Gpt::backward_embeddings(Embeddings<floatX>& g, TensorX& d_stream, const DeviceBatch& batch) {
    const Embeddings<floatX>& w = weights_.embeddings;
    if (w.norm.weight) {
        TensorX x = take("embedded", d_stream.shape());
        embedding_forward(x, batch.inputs, w.token, w.position, 0, stream_);
        NormedX n = norm(kEmbeddingNorm, x, w.norm);
        n.out.drop();
        TensorX d_x = take_gradient("d_embedded", d_stream.shape());
        zero(d_x);
        norm_backward(d_x, g.norm, d_stream, x, n, w.norm);
        d_stream = std::move(d_x);
    }
    embedding_backward(g.token, g.position, d_stream, batch.inputs, batch.rows_by_token, batch.token_starts,
                       stream_);
}

// ---- the steps

// One micro-batch: writes or adds its gradients, or has each unit's consumed, and adds loss_scale times the
// sum of its losses to `loss` (1).
void Gpt::forward_backward(const DeviceBatch& batch, const MicroBatchOptions& options, float loss_scale,
                           TensorF& loss, const Consume& consume) {
    std::vector<BlockActivations> blocks(static_cast<size_t>(config_.layers));
    std::optional<Range> range(std::in_place, "forward");
    TensorX stream = embed(batch.inputs, 0);
    for (size_t l = 0; l < blocks.size(); l++) {
        blocks[l].input = std::move(stream);
        stream = forward_block(static_cast<int>(l), blocks[l], options.keep[l]);
    }

    range.emplace("head");
    const int embeddings_unit = layout_.embeddings_unit(), head_unit = layout_.head_unit();
    UnitGradients of_embeddings;
    Embeddings<floatX> d_embeddings;
    auto take_embeddings = [&] {
        of_embeddings = take_unit_gradients(embeddings_unit, options, consume);
        d_embeddings = layout_.embeddings(of_embeddings.all.data());
        if (!options.adds && d_embeddings.position) zero(d_embeddings.position);
        if (!options.adds && !config_.tied) zero(d_embeddings.token);
    };
    if (config_.tied) take_embeddings();
    UnitGradients of_head = take_unit_gradients(head_unit, options, consume);
    Head<floatX> d_head = layout_.head(of_head.all.data());
    if (config_.tied) d_head.logits.weight = d_embeddings.token.view();
    head(stream, batch.targets, options, loss_scale, loss, d_head);
    complete(head_unit, of_head, consume);

    range.emplace("backward");
    for (int l = config_.layers - 1; l >= 0; l--)
        backward_block(l, blocks[static_cast<size_t>(l)], stream, options, consume);
    if (!config_.tied) take_embeddings();
    backward_embeddings(d_embeddings, stream, batch);
    stream.drop();
    complete(embeddings_unit, of_embeddings, consume);
}

// Adds loss_scale times the sum of the batch's losses to `loss` (1).
void Gpt::evaluate(const DeviceBatch& batch, const MicroBatchOptions& options, float loss_scale,
                   TensorF& loss) {
    Range range("evaluate");
    const TensorX stream = forward_only(batch.inputs, nullptr);
    const int64_t rows = stream.rows();
    TensorF losses = take_float("losses", {rows, 1});
    for_each_head_chunk(rows, options.head_rows, [&](int64_t first, int64_t count) {
        const HeadActivations a = forward_head(stream.rows_at(first, count));
        TensorF part = losses.rows_at(first, count);
        cross_entropy_forward(a.logits, part, batch.targets.view({rows, 1}).rows_at(first, count),
                              config_.vocabulary, stream_);
    });
    add_losses(loss, losses, loss_scale, stream_);
}

// Runs `tokens`, which follow what the cache holds, and appends them to it. The logits (1, V) after the last.
TensorX Gpt::forward_cached(const std::vector<int>& tokens, KvCache& cache) {
    const int T = static_cast<int>(tokens.size());
    Tensor<int> inputs = take_input("inputs", {1, T}, tokens);
    const TensorX stream = forward_only(inputs, &cache);
    cache.length += T;
    return std::move(forward_head(stream.rows_at(T - 1, 1)).logits);
}

// Continues a prompt of at least one token by up to new_tokens: choose(logits) reads the logits (1, V) and
// returns the next token, or a negative one to stop. The cache holds what came before, so that a new token
// costs one row.
template <class Choose>
void Gpt::generate(const std::vector<int>& prompt, int new_tokens, Choose&& choose) {
    Range range("generate");
    KvCache cache;
    for (int l = 0; l < config_.layers; l++)
        cache.layers.push_back(
            take("kv_cache", {static_cast<int64_t>(prompt.size()) + new_tokens, 2 * config_.kv_width()}));
    std::vector<int> next = {choose(forward_cached(prompt, cache))};
    arena_.repeat(new_tokens - 1, [&] {
        // The turn that is rehearsed is the last, of most keys.
        if (arena_.rehearsing()) cache.length = static_cast<int>(prompt.size()) + new_tokens - 2;
        if (next[0] >= 0) next = {choose(forward_cached(next, cache))};
        return next[0] >= 0;
    });
}

// ---- the run

constexpr uint64_t kSampleStream = uint64_t{1} << 62;  // counter space of random_bits() for sampling
constexpr uint64_t kBenchStream = kSampleStream + 1;   // and for the tokens of a bench without data

volatile std::sig_atomic_t interrupted = 0;  // the signal that asked the run to stop
const char* when_interrupted = "";
void on_interrupt(int signal) {
    const int before = errno;
    if (signal == SIGINT) std::signal(SIGINT, SIG_DFL);  // a second Ctrl-C stops at once
    if (!interrupted) {
        interrupted = signal;
        [[maybe_unused]] const ssize_t told =
            write(STDERR_FILENO, when_interrupted, strlen(when_interrupted));
    }
    errno = before;
}

// Has signals stop the run after the micro-batch or token at hand: Ctrl-C, that of a scheduler whose time is
// up, of a terminal that closed, of a reader of the output that is gone. One that was to be ignored
// (nohup) still is.
void stop_on_signals(bool saves) {
    when_interrupted = saves ? "stopping after this micro-batch; Ctrl-C again: at once, without saving\n"
                             : "stopping after this micro-batch; Ctrl-C again: at once\n";
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE})
        if (std::signal(signal, on_interrupt) == SIG_IGN) std::signal(signal, SIG_IGN);
}

// What is trained on where nothing is named: Shakespeare's plays, 1.1 MB.
constexpr const char* kFirstText = "dev/data/tinyshakespeare.txt";

// What the first step takes beside the plan, measured with 1 to 64 threads on a CPU: compiled products and
// host buffers; of each thread its stack and the operands of its products; and what heaps keep of the copies
// that oneDNN makes of attention's tiles. On a GPU not measured yet.
size_t process_bytes() {
#ifdef SIMT_GPU
    return 0;
#else
    const size_t threads = static_cast<size_t>(omp_get_max_threads());
    return (size_t{13} << 20) + threads * (768 << 10) + heaps_of(threads) * (512 << 10);
#endif
}

// The steps that are enqueued before the host looks at what the one before has left, so that the device has
// work while it does.
constexpr size_t kStepsAhead = StepGraphs::kReplays ? 1 : 0;

// Everything a run needs, opened and checked in the order of its members, before any device memory is taken.
class Trainer {
  public:
    // `resumed`: the save that --resume names, held until it is loaded.
    Trainer(Options options, std::optional<HeldSave> resumed);
    void print_plan() const;
    void run();
    void bench();

  private:
    std::unique_ptr<Dataset> open_training_data();
    ModelConfig choose_config() const;
    void open_validation();
    std::optional<Tokenizer> open_tokenizer();
    std::vector<int> first_tokens() const;
    bool samples() const;
    // Where the run says what it does: without training, stdout is for generated text.
    FILE* notes() const { return o_.steps > 0 ? stdout : stderr; }
    int sample_window() const;
    bool feeds() const { return o_.steps > 0 || o_.bench == "forward"; }
    int64_t metrics_count() const { return 1 + static_cast<int64_t>(state_.layout.units().size()); }
    void open_device();
    void use(const MemorySetting& s);
    MemorySetting choose_setting();
    int64_t automatic_head_rows(MemorySetting s);
    Plan rehearse_training(bool adds, bool placed);
    void rehearse_all(bool placed);
    MemoryReport make_report(bool placed = true);
    void point_metrics(float* at);
    void check_data() const;
    void check_resumed_data();
    void check_output_files() const;
    void choose_algorithms();
    void prepare();
    void load();
    double whole_norm(const float* norms) const;
    void read_metrics(size_t ahead);
    void read_metrics();
    template <class Step>
    void run_step(Plan& plan, Step&& step);
    void feed(SequenceLoader& loader, uint64_t first, uint64_t count);
    void feed_training(int64_t step, uint64_t k);
    bool train_step(int64_t step);
    void forward_step(int64_t step);
    uint64_t validation_sequences() const;
    void print_data() const;
    void measure_norm(const floatX* gradients, int64_t n, TensorF& norm);
    void update_unit(int unit, const floatX* gradients);
    void update();
    std::optional<double> validate();
    void sample(int64_t step);
    void save(int64_t steps_done, bool evaluated);
    void log_line(const nlohmann::ordered_json& line);
    double step_tokens() const;
    double step_flops() const;
    void record_step(const StepFigures& figures);
    void bench_phases(BenchReport& r, const std::function<void(int64_t)>& run_one);
    void bench_replays(BenchReport& r, const std::function<void(int64_t)>& run_one);

    Options o_;
    std::optional<HeldSave> held_save_, held_model_;  // until they are loaded:
    std::string resumed_;                             // the save that --resume goes on from; empty without
    std::string model_;                               // the folder that --model names, or the save it shows
    std::optional<Progress> progress_;                // where the save stands, if the run trains on
    std::unique_ptr<Dataset> data_, val_data_;
    ModelConfig config_;
    std::string tokenizer_folder_;  // where the tokenizer was found, for saves; may be empty
    std::optional<Tokenizer> tokenizer_;
    std::optional<SequenceLoader> loader_, val_loader_;
    std::optional<OwnStream> own_stream_;
    Stream stream_ = nullptr;  // that one, from open_device() on
    Arena arena_;
    State<floatX> state_;
    Gpt gpt_;
    Feeder feeder_;
    MicroBatchOptions step_;
    Gpt::Consume consume_;  // with --update-in-backward
    bool norm_of_each_unit_;
    MemoryReport report_;
    std::vector<MemoryChoice> choice_;  // with --memory: the configuration, and its neighbours
    std::string batch_choice_;          // with --batch auto
    Plan train_plan_, add_plan_;        // a step's first micro-batch, and those that add to its gradients
    Plan update_plan_, evaluate_plan_, sample_plan_, slide_plan_;
    StepGraphs graphs_;
    bool replays_ = false;  // whether steps are run through them
    DeviceBuffer metrics_memory_, factors_memory_, positions_memory_;
    TensorF loss_;                      // (1), on the device
    TensorF norms_;                     // (units, 1) there: of each unit's gradient, or in [0] of all
    UpdateFactors* factors_ = nullptr;  // there: of the current step
    struct Pending {
        int64_t step;
        double rate;
    };
    std::deque<Pending> pending_;         // steps that were enqueued and not looked at yet
    std::optional<Readback> metrics_[2];  // of even and of odd steps
    Clock clock_;
    double completed_ = 0;                         // on it: when the latest step that was looked at was done
    int64_t first_step_ = 0, first_sequence_ = 0;  // where a resumed run begins
    bool evaluated_ = false;                       // whether what is due at the next step was made
    SaveFolder saves_;
    std::map<std::string, std::string> data_facts_;  // for saves
    std::string last_save_;
    int64_t saved_step_ = -1;         // of what this run has saved last
    std::optional<StepLines> lines_;  // of a training, from prepare() on
    std::unique_ptr<FILE, int (*)(FILE*)> log_{nullptr, fclose};
};

// What a run keeps from step to step. Fails where this build's weights have no use for what was asked.
StateOptions state_options(const Options& o) {
    if (std::is_same_v<floatX, float> && o.steps > 0 && o.master != "fp32")
        fail("--master %s completes bf16 weights, and this build's are fp32: make PRECISION=bf16",
             o.master.c_str());
    return {.training = o.steps > 0,
            .gradients = !o.update_in_backward,
            .optimizer = named<Optimizer>(kOptimizerNames, o.optimizer),
            .master = named<Master>(kMasterNames, o.master),
            .m = named<Moment>(kMomentNames, o.adam_m),
            .v = named<Moment>(kMomentNames, o.adam_v)};
}

// Fails where --attention hopper asks for kernels that this build or this model's heads have not.
void check_attention(const Options& o, const ModelConfig& config) {
    if (o.attention != "hopper") return;
    if (!kHopperAttention<floatX>)
        fail(
            "--attention hopper: this build has no such kernels; make DEVICE=cuda PRECISION=bf16 with 90a in "
            "CUDA_ARCH does, and --attention common is in each");
    if (!hopper_attention_supports(config.head_size))
        fail(
            "--attention hopper does heads of 64 and 128 channels, and the model's have %d: --attention "
            "common",
            config.head_size);
}

std::unique_ptr<Dataset> open_data(const std::vector<std::string>& files, const char* option) {
    return std::make_unique<Dataset>(expand_files(files, option), option);
}

// The sizes of the model, from the save, the folder or the depth that the options name.
ModelConfig Trainer::choose_config() const {
    std::optional<ModelConfig> saved;
    if (!resumed_.empty()) saved = read_model_config(resumed_, "--resume");
    ModelConfig config;
    if (const NewModel made = parse_new_model(o_.model)) {
        int vocabulary = data_ ? data_->vocabulary() : o_.has("--model") ? 50257 : 256;
        if (saved) vocabulary = saved->vocabulary;
        config = new_config(made, vocabulary, vocabulary == 256 ? o_.seq_len : std::max(1024, o_.seq_len));
        if (saved) config.positions = saved->positions;
    } else if (saved && !std::filesystem::exists(model_)) {
        config = *saved;  // the folder that a run started from may be gone
    } else {
        config = read_model_config(model_, "--model");
    }
    if (saved && !(config == *saved))
        fail(
            "--resume %s holds another model (%d layers, %d channels, %d heads) than --model %s (%d, %d, %d)",
            o_.resume.c_str(), saved->layers, saved->channels, saved->heads, o_.model.c_str(), config.layers,
            config.channels, config.heads);
    return config;
}

Trainer::Trainer(Options options, std::optional<HeldSave> resumed)
    : o_(std::move(options)),
      held_save_(std::move(resumed)),
      held_model_(o_.model),
      resumed_(held_save_ ? held_save_->path() : ""),
      model_(held_model_->path()),
      data_(open_training_data()),
      config_(choose_config()),
      tokenizer_(open_tokenizer()),
      state_(config_, state_options(o_)),
      gpt_(arena_, stream_, state_, o_.attention == "hopper"),
      norm_of_each_unit_(o_.clip_per_block || o_.update_in_backward) {
    if (held_save_ && o_.steps > 0) progress_ = read_progress(resumed_);
    check_attention(o_, config_);
    if (!o_.has("--seq-len")) o_.seq_len = std::min(o_.seq_len, config_.positions);
    if (o_.seq_len > config_.positions)
        fail("--seq-len %d is more than the model's %d positions", o_.seq_len, config_.positions);
    if (data_) {
        if (o_.bench.empty()) open_validation();
        check_data();
        if (o_.bench.empty() && !o_.plan) check_resumed_data();
    }
    check_output_files();
    if (o_.update_in_backward)
        consume_ = [this](int unit, const floatX* gradients) { update_unit(unit, gradients); };
    replays_ = o_.graph == "on";
    point_metrics(nullptr);
    const Options given = o_;
    use(choose_setting());
    remember_choice(given, o_);
    report_ = make_report();
}

// Fails unless there is a device for this binary, and for the attention that was asked for.
void check_device([[maybe_unused]] const Options& o) {
#ifdef SIMT_GPU
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0)
        fail("this ./train is built for a GPU and none answers (%s); for the CPU: make DEVICE=cpu",
             status == cudaSuccess ? "no device" : cudaGetErrorString(status));
    if (o.attention == "hopper" && !device_is_hopper())
        fail(
            "--attention hopper is for GPUs of compute capability 9.0, which this one is not: --attention "
            "common");
#endif
}

// The device, there to be used.
void Trainer::open_device() {
    check_device(o_);
    stream_ = own_stream_.emplace().get();
}

// Sets up the step, its batch and the state's formats as a setting says.
void Trainer::use(const MemorySetting& s) {
    apply_setting(s, o_);
    state_.choose(state_options(o_));
    feeder_.choose(s.batch, o_.seq_len, config_.vocabulary);
    step_ = {s.head_rows, {}};
    for (int level : s.levels) step_.keep.push_back(kRecomputeLevels[level].keep);
}

// The setting that the options name, or that --memory or --batch auto choose.
MemorySetting Trainer::choose_setting() {
    if (kHostIsDevice) memory_free_at_start();
    int64_t most = kMostTokens / o_.seq_len;
    if (data_) {
        const SequenceLoader loader(*data_, o_.seq_len, o_.seed, true);
        most = std::min(most, static_cast<int64_t>(loader.sequences_per_epoch()));
    }
    const Rehearsals rehearsals{
        config_.layers,
        most,
        nominal_rates<floatX>(),
        [this](const MemorySetting& s) { return use(s), make_report(); },
        [this](const MemorySetting& s) { return use(s), make_report(false); },
        [this](const MemorySetting& s) { return use(s), rehearse_training(false, false); },
        [this](const MemorySetting& s) { return automatic_head_rows(s); }};
    const bool budget = o_.has("--memory");
    const Options given = o_;
    if (budget && o_.batch > 0) return fit_memory(given, std::is_same_v<floatX, bf16>, rehearsals, choice_);
    MemorySetting s = setting_of(o_);
    s.levels = parse_levels(o_.recompute, recompute_names(), config_.layers, "--recompute");
    if (o_.batch > 0) {
        if (s.head_rows < 0) s.head_rows = automatic_head_rows(s);
        return s;
    }
    if (!budget) check_device(o_);
    const FreeMemory room = budget ? FreeMemory{parse_bytes(o_.memory, "--memory"), "--memory"}
                                   : with_reserve(memory_free_at_start());
    std::optional<uint64_t> epoch;
    if (data_) epoch = static_cast<uint64_t>(most);
    return fit_batch(s, room, batch_cap(o_.seq_len, epoch), rehearsals, batch_choice_);
}

// What --head-rows auto chooses for a setting: by a step, or by a validation where there is no training.
int64_t Trainer::automatic_head_rows(MemorySetting s) {
    if (o_.steps == 0 && !val_data_ && o_.bench != "forward") return 0;
    s.levels.assign(static_cast<size_t>(config_.layers), 0);
    const DeviceRates rates = nominal_rates<floatX>(kHeadRowsThreads);
    return choose_head_rows(int64_t{s.batch} * o_.seq_len, [&](int64_t rows) {
        s.head_rows = rows;
        use(s);
        const auto evaluate = [&] { gpt_.evaluate(feeder_.batch(), step_, 1, loss_); };
        return seconds_without_update(
            o_.steps > 0 ? rehearse_training(false, false) : arena_.rehearse(evaluate, false), rates);
    });
}

// Where the step leaves its loss and norms; nowhere, as long as it is only rehearsed.
void Trainer::point_metrics(float* at) {
    loss_ = TensorF(at, {1});
    norms_ = TensorF(at ? at + 1 : nullptr, {metrics_count() - 1, 1});
}

// What --data names, or the first text; nothing where no training is asked for.
std::unique_ptr<Dataset> Trainer::open_training_data() {
    if (o_.data.empty()) {
        if (o_.plan || o_.steps == 0 || !o_.bench.empty()) return nullptr;
        if (!std::filesystem::exists(kFirstText))
            fail("--data is missing, and %s, which is trained on without it, is not in this folder",
                 kFirstText);
        o_.data = {kFirstText};
        o_.given["--data"] = o_.data;
    }
    return open_data(o_.data, "--data");
}

// What --val-data names, or a part of the text that is long enough for a sequence.
void Trainer::open_validation() {
    if (!o_.val_data.empty())
        val_data_ = open_data(o_.val_data, "--val-data");
    else if (data_->is_text())
        val_data_ = data_->hold_out(static_cast<uint64_t>(o_.seq_len) + 1);
    if (o_.eval_every > 0 && !val_data_)
        fail("--eval-every %lld: there is nothing to validate on; give --val-data",
             static_cast<long long>(o_.eval_every));
}

// Fails when the data cannot feed the model: other vocabulary, too few tokens, tokens beyond the vocabulary.
void Trainer::check_data() const {
    for (const Dataset* d : {data_.get(), val_data_.get()})
        if (d && d->is_text() && config_.vocabulary != 256)
            fail(
                "%s is text, read as bytes (vocabulary 256), but the model's vocabulary is %d: "
                "dev/data/tokenize_text.py makes tokens of it",
                d->stream_name(0).c_str(), config_.vocabulary);
    for (Dataset* d : {data_.get(), val_data_.get()})
        if (d) d->check_tokens(config_.vocabulary);
    const SequenceLoader loader(*data_, o_.seq_len, o_.seed, true);
    if (o_.batch > 0 && loader.sequences_per_epoch() < static_cast<uint64_t>(o_.batch))
        fail("--batch %d is more than the data's %llu sequences of %d tokens", o_.batch,
             static_cast<unsigned long long>(loader.sequences_per_epoch()), o_.seq_len);
    if (val_data_) SequenceLoader(*val_data_, o_.seq_len, o_.seed, false);
}

// Fails when the data are not those that the save was trained on, unless they were chosen for this run.
void Trainer::check_resumed_data() {
    const auto check = [&](const char* option, const Dataset& data, bool chosen) {
        const std::string& facts = data_facts_[option] = data_facts(data);
        if (progress_) check_same_data(option, data.stream_name(0), facts, *progress_, o_.resume, chosen);
    };
    const bool chosen = !o_.saved.contains("--data");
    const bool val_chosen = o_.has("--val-data") && !o_.saved.contains("--val-data");
    check("--data", *data_, chosen || val_chosen);  // without --val-data its last tenth is not for training
    if (!o_.val_data.empty()) check("--val-data", *val_data_, val_chosen);
}

// Fails when something that the run would write cannot be written, or is something that must stay.
void Trainer::check_output_files() const {
    std::vector<Output> files = {{"--timeline", o_.timeline, "{\"model\":"}};
    if (!o_.plan) {
        files.push_back({"--log", o_.log, "{\"step\":"});
        files.push_back({"--matmul-algorithms", o_.matmul_algorithms, ""});
    }
    for (const Output& file : files)
        for (const Dataset* d : {data_.get(), val_data_.get()})
            if (d && d->reads(file.path))
                fail("%s %s: is a file of the data", file.option, file.path.c_str());
    std::vector<std::string> inputs;
    if (!parse_new_model(o_.model)) inputs.push_back(o_.model);
    if (!o_.resume.empty()) inputs.push_back(o_.resume);
    check_outputs(files, o_.plan ? "" : o_.out, inputs);
}

// From the model's folder, or beside the shards; a vocabulary of 256 is bytes.
std::optional<Tokenizer> Trainer::open_tokenizer() {
    std::vector<std::string> folders;
    if (!resumed_.empty()) folders.push_back(resumed_);
    if (!parse_new_model(o_.model)) folders.push_back(model_);
    if (data_ && !data_->is_text()) {
        const auto parent = std::filesystem::path(data_->stream_name(0)).parent_path();
        folders.push_back(parent.empty() ? "." : parent.string());
    }
    for (const std::string& folder : folders) {
        auto t = Tokenizer::open(folder);
        if (t && t->size() > config_.vocabulary && (folder == resumed_ || folder == o_.model))
            fail("%s: its tokenizer has %d tokens and its model %d", folder.c_str(), t->size(),
                 config_.vocabulary);
        if (!t || t->size() > config_.vocabulary) continue;
        tokenizer_folder_ = folder;
        return t;
    }
    if (config_.vocabulary == 256) return Tokenizer::bytes();
    return std::nullopt;
}

// What a sample starts from: the prompt, else the begin of a text or the end of one before, else a line's
// end.
std::vector<int> Trainer::first_tokens() const {
    if (!o_.prompt.empty()) {
        if (!tokenizer_)
            fail(
                "--prompt: no tokenizer.json, vocab.json with merges.txt, or tokenizer.model in the model's "
                "folder or beside the data to read it with");
        auto tokens = tokenizer_->encode(o_.prompt, true);
        if (tokens.empty())
            fail("--prompt: its tokenizer has no token for any of \"%s\"", printable(o_.prompt).c_str());
        return tokens;
    }
    if (tokenizer_ && tokenizer_->begin_of_text() >= 0) return {tokenizer_->begin_of_text()};
    if (tokenizer_ && tokenizer_->end_of_text() >= 0) return {tokenizer_->end_of_text()};
    return {config_.vocabulary == 50257 ? 50256 : config_.vocabulary == 256 ? '\n' : 0};
}

// Whether the run samples: not where it only initialises, nor without room for a token after the first.
bool Trainer::samples() const {
    if (o_.sample_tokens == 0 || (o_.steps == 0 && o_.prompt.empty())) return false;
    const int prompt = static_cast<int>(first_tokens().size());
    if (prompt >= config_.positions && !o_.prompt.empty())
        fail("--prompt has %d tokens, which leaves no room in the model's %d positions", prompt,
             config_.positions);
    return prompt < config_.positions;
}

// The positions that a sample uses: those that are trained, and room after the prompt.
int Trainer::sample_window() const {
    const int trained = o_.steps > 0 ? o_.seq_len : config_.positions;
    return std::min(config_.positions, std::max(trained, static_cast<int>(first_tokens().size()) + 1));
}

Plan Trainer::rehearse_training(bool adds, bool placed) {
    step_.adds = adds;
    return arena_.rehearse([&] { gpt_.forward_backward(feeder_.batch(), step_, 1, loss_, consume_); },
                           placed);
}

// Rehearses every step that the run may take. A micro-batch of the training is placed if asked.
void Trainer::rehearse_all(bool placed) {
    if (o_.steps > 0) {
        train_plan_ = rehearse_training(false, placed);
        // The same takes, other products.
        add_plan_ = o_.grad_accum > 1 ? rehearse_training(true, placed) : Plan();
        train_plan_.workspace = std::max(train_plan_.workspace, add_plan_.workspace);
        if (!consume_) update_plan_ = arena_.rehearse([&] { update(); });
    }
    if (val_data_ || o_.bench == "forward")
        evaluate_plan_ = arena_.rehearse([&] { gpt_.evaluate(feeder_.batch(), step_, 1, loss_); });
    if (samples() && sample_plan_.takes.empty()) {  // once: no setting changes these
        const auto any = [](const TensorX&) { return 0; };
        const auto first = first_tokens();
        const int rest = sample_window() - static_cast<int>(first.size()), half = sample_window() / 2;
        sample_plan_ = arena_.rehearse([&] { gpt_.generate(first, rest, any); });
        slide_plan_ =
            arena_.rehearse([&] { gpt_.generate(std::vector<int>(half), sample_window() - half, any); });
    }
}

// What the rehearsed steps and the state need, in one report.
MemoryReport Trainer::make_report(bool placed) {
    rehearse_all(placed);
    MemoryReport r;
    r.model = o_.model;
    r.device = kDevice;
    r.precision = kPrecision;
    r.recompute = o_.recompute;
    r.parameters = state_.layout.count();
    r.batch = o_.batch;
    r.seq_len = o_.seq_len;
    r.grad_accum = o_.grad_accum;
    r.head_rows = o_.head_rows;
    r.process = process_bytes();
    if (kHostIsDevice && tokenizer_) r.process += r.tokenizer = tokenizer_->held_bytes();
    const auto add_buffer = [&](const char* name, const char* kind, Shape shape, const char* dtype,
                                size_t bytes) {
        r.buffers.push_back({name, kind, shape.text(), {shape.dims, shape.dims + shape.count}, dtype, bytes});
    };
    for (const StateBuffer& b : state_.buffers())
        add_buffer(b.name, b.kind, {b.elements}, b.dtype, b.bytes());
    if (feeds())
        add_buffer("batch", "input", {Feeder::kCopies, feeder_.count()}, dtype_name<int>(), feeder_.bytes());
    const int64_t metrics = metrics_count(), factors = sizeof(UpdateFactors);
    add_buffer("metrics", "workspace", {metrics}, "fp32", static_cast<size_t>(metrics) * sizeof(float));
    add_buffer("step_factors", "workspace", {factors}, "byte", sizeof(UpdateFactors));
    if (const int64_t positions = static_cast<int64_t>(position_factors(config_).size()))
        add_buffer("position_factors", "workspace", {positions}, "fp32",
                   static_cast<size_t>(positions) * sizeof(float));
    r.train = &train_plan_;
    for (const auto& [name, plan] : {std::pair{"the update", &update_plan_},
                                     {"validation", &evaluate_plan_},
                                     {"sampling", &sample_plan_},
                                     {"a sample's continuation", &slide_plan_}})
        if (!plan->takes.empty()) r.others.emplace_back(name, plan);
    const DeviceRates rates = nominal_rates<floatX>();
    r.update_seconds = seconds_of(update_plan_.work, rates);
    r.seconds = seconds_of(train_plan_.work, rates) +
                (o_.grad_accum - 1) * seconds_of(add_plan_.work, rates) + r.update_seconds;
    r.budget = o_.memory;
    r.choice = choice_;
    r.batch_choice = batch_choice_;
    return r;
}

void Trainer::print_plan() const {
    if (!o_.timeline.empty()) write_timeline(o_.timeline, report_, update_plan_);
    if (o_.json)
        printf("%s\n", json_text(report_json(report_)).c_str());
    else if (o_.plan)
        print_report(stdout, report_);
    else
        print_summary(stdout, report_, "allocating", memory_free_at_start());
    if (o_.plan) remark_shortage(report_);
}

// With --matmul-algorithms: has every product that the run will make take its algorithm from the file. The
// steps are rehearsed again, as a product may now make a bias's gradient too: other operations, in the same
// memory.
void Trainer::choose_algorithms() {
#ifdef SIMT_GPU
    if (o_.matmul_algorithms.empty()) return;
    std::set<Product> products;
    for (const Plan* plan : {&train_plan_, &add_plan_, &evaluate_plan_, &sample_plan_, &slide_plan_})
        for (const Work& w : plan->work)
            if (w.product.m > 0) products.insert(w.product);
    search_matmul_algorithms<floatX>(o_.matmul_algorithms, products, stream_);
    report_ = make_report();
#endif
}

// Checks what can be checked, takes the memory, and loads or initialises the model.
void Trainer::prepare() {
    if (!o_.out.empty()) {
        saves_ = open_save_folder(o_.out, o_.keep, resumed_);
        remove_unfinished(o_.out);
        check_room(o_.out, state_, o_.steps > 0);
        if (!saves_.others.empty())
            fprintf(stderr,
                    "%s holds saves of another run, up to step %lld: they stay, but for steps that are saved "
                    "again\n",
                    o_.out.c_str(), static_cast<long long>(*saves_.others.rbegin()));
    }
    if (data_ && data_->is_text() && !val_data_ && o_.bench.empty())
        fprintf(stderr, "no validation: the text's last tenth is no sequence of %d; it is trained on too\n",
                o_.seq_len);
    const bool trains = o_.steps > 0 && o_.bench.empty();
    PeakRate peak = {};
    if (trains) print_plan();
    require_memory(report_, memory_free_at_start(), trains);
    if (trains) {
        peak = device_peak_flops<floatX>(stream_, report_.allocated());
        printf("MFU is relative to %.0f GFLOP/s, %s\n", peak.flops / 1e9, peak.of);
    }
    choose_algorithms();
    arena_.allocate({&train_plan_, &add_plan_, &update_plan_, &evaluate_plan_, &sample_plan_, &slide_plan_});
    metrics_memory_ = DeviceBuffer(static_cast<size_t>(metrics_count()) * sizeof(float), "the metrics");
    point_metrics(reinterpret_cast<float*>(metrics_memory_.data()));
    for (auto& metrics : metrics_) metrics.emplace(metrics_memory_.bytes());
    factors_memory_ = DeviceBuffer(sizeof(UpdateFactors), "the step's factors");
    factors_ = reinterpret_cast<UpdateFactors*>(factors_memory_.data());
    if (feeds()) feeder_.allocate();
    state_.allocate();
    if (const std::vector<float> positions = position_factors(config_); !positions.empty()) {
        const size_t bytes = positions.size() * sizeof(float);
        positions_memory_ = DeviceBuffer(bytes, "the positions' factors");
        copy_to_device(positions_memory_.data(), positions.data(), bytes, stream_);
    }
    gpt_.bind(reinterpret_cast<float*>(positions_memory_.data()));
    if (device_bytes_allocated != report_.allocated())
        bug("%zu bytes were allocated where %zu were planned", device_bytes_allocated, report_.allocated());
    forbid_device_allocation();
    load();
    if (trains)
        lines_.emplace(stdout, first_step_, o_.steps, o_.print_every,
                       StepLines::Amounts{step_tokens(), step_flops(), peak.flops});
    if (!o_.log.empty()) {
        log_.reset(fopen(o_.log.c_str(), o_.resume.empty() ? "w" : "a"));
        if (!log_) fail("--log %s: %s", o_.log.c_str(), strerror(errno));
    }
    if (data_) loader_.emplace(*data_, o_.seq_len, o_.seed, true);
    if (val_data_) val_loader_.emplace(*val_data_, o_.seq_len, o_.seed, false);
    if (loader_ && o_.steps > 0 && o_.bench.empty()) print_data();
}

// What the data are, and how much of them the run reads.
void Trainer::print_data() const {
    const auto number = [](uint64_t n) { return static_cast<unsigned long long>(n); };
    const uint64_t epoch = loader_->sequences_per_epoch();
    const double read =
        static_cast<double>(first_sequence_) +
        static_cast<double>(std::max<int64_t>(0, o_.steps - first_step_)) * o_.batch * o_.grad_accum;
    printf("data: %llu tokens in %llu sequences of %d; %lld steps read %.0f sequences, %.2f epochs",
           number(data_->token_count()), number(epoch), o_.seq_len, static_cast<long long>(o_.steps), read,
           read / static_cast<double>(epoch));
    if (val_loader_)
        printf("; a validation reads %llu of %llu", number(validation_sequences()),
               number(val_loader_->sequences_per_epoch()));
    printf("\n");
}

void Trainer::load() {
    if (!resumed_.empty() && o_.steps == 0) {
        load_weights(state_, resumed_);
    } else if (!resumed_.empty()) {
        load_training_state(state_, resumed_);
        first_step_ = progress_->step;
        first_sequence_ = progress_->sequences;
        evaluated_ = progress_->evaluated;
        last_save_ = o_.resume;
        printf("resuming %s at step %lld\n", o_.resume.c_str(), static_cast<long long>(first_step_));
    } else if (parse_new_model(o_.model)) {
        initialize_weights(state_, o_.seed);
    } else {
        load_weights(state_, model_);
    }
    held_save_.reset();
    held_model_.reset();
}

// The norm of the whole gradient, of what a step left.
double Trainer::whole_norm(const float* norms) const {
    double squares = 0;
    for (int64_t i = 0; i < (norm_of_each_unit_ ? norms_.rows() : 1); i++)
        squares += double{norms[i]} * double{norms[i]};
    return std::sqrt(squares);
}

// Looks at what the steps have left, but for the latest `ahead` of them: records it, and fails where it is
// not finite. Before anything of a step is kept, it was looked at. A step's time is that between the end of
// the step before and its own.
void Trainer::read_metrics(size_t ahead) {
    for (; pending_.size() > ahead; pending_.pop_front()) {
        const auto [step, rate] = pending_.front();
        const float* metrics = reinterpret_cast<const float*>(metrics_[step % 2]->wait());
        const double before = std::exchange(completed_, clock_.seconds());
        const double loss = double{metrics[0]}, norm = whole_norm(metrics + 1);
        if (!std::isfinite(loss) || !std::isfinite(norm))
            fail("step %lld: the loss is %g and the gradient's norm %g; the last good save: %s",
                 static_cast<long long>(step + 1), loss, norm,
                 last_save_.empty() ? "none" : last_save_.c_str());
        if (lines_) record_step({step, loss, norm, rate, completed_ - before});
    }
}

// Looks at all steps, and prints the line of the latest: what follows is to stand after it.
void Trainer::read_metrics() {
    read_metrics(0);
    if (lines_) lines_->print_latest();
}

// Runs `step` in the memory of its plan, on a GPU as a graph from the second time on. It must be the same
// every time: what changes lies in the device's memory.
template <class Step>
void Trainer::run_step(Plan& plan, Step&& step) {
    const auto run = [&] { arena_.run(plan, step); };
    if (replays_)
        graphs_.run(&plan, stream_, run);
    else
        run();
}

// Feeds `count` sequences from number `first` on; rows beyond them, up to a whole batch, do not count.
void Trainer::feed(SequenceLoader& loader, uint64_t first, uint64_t count) {
    feeder_.feed(stream_, [&](std::span<int> inputs, std::span<int> targets) {
        if (count < static_cast<uint64_t>(o_.batch)) {
            std::fill(inputs.begin(), inputs.end(), 0);
            std::fill(targets.begin(), targets.end(), -1);
        }
        loader.fill(first, static_cast<int>(count), inputs.data(), targets.data());
    });
}

void Trainer::measure_norm(const floatX* gradients, int64_t n, TensorF& norm) {
    TensorF scratch = arena_.take<float>("norm_partials", {kNormBlocks});
    global_norm(norm, scratch, gradients, n, stream_);
}

// Updates the weights of a unit with its gradients, in one launch.
void Trainer::update_unit(int unit, const floatX* gradients) {
    Range range("update", unit);
    const Unit& u = state_.layout.units()[static_cast<size_t>(unit)];
    TensorF norm = norm_of_each_unit_ ? norms_.rows_at(unit, 1) : norms_.rows_at(0, 1);
    if (norm_of_each_unit_) measure_norm(gradients, u.size, norm);
    optimizer_update(factors_, state_, u, gradients, norm, stream_);
}

void Trainer::update() {
    Range range("update");
    TensorF norm = norms_.rows_at(0, 1);
    if (!norm_of_each_unit_) measure_norm(state_.gradients(), state_.layout.size(), norm);
    for (size_t i = 0; i < state_.layout.units().size(); i++)
        update_unit(static_cast<int>(i),
                    state_.data<floatX>(StatePart::Gradients, state_.layout.units()[i].offset));
}

// Feeds micro-batch k of a step: from the data, or random tokens where a bench has none.
void Trainer::feed_training(int64_t step, uint64_t k) {
    const uint64_t batch = static_cast<uint64_t>(o_.batch), micro = static_cast<uint64_t>(o_.grad_accum);
    const uint64_t first = static_cast<uint64_t>(first_sequence_) +
                           (static_cast<uint64_t>(step - first_step_) * micro + k) * batch;
    if (loader_) return feed(*loader_, first, batch);
    feeder_.feed(stream_, [&](std::span<int> inputs, std::span<int> targets) {
        auto draw = [&](uint64_t i) {
            return static_cast<int>(random_uniform(o_.seed, kBenchStream, first, i) * config_.vocabulary);
        };
        for (size_t i = 0; i < inputs.size(); i++) inputs[i] = draw(2 * i), targets[i] = draw(2 * i + 1);
    });
}

// Says whether it made the step: not when the run is interrupted between its micro-batches, of which nothing
// is kept then.
bool Trainer::train_step(int64_t step) {
    Range range("step");
    if (pending_.empty()) completed_ = clock_.seconds();
    const float loss_scale = 1.f / (static_cast<float>(o_.batch) * static_cast<float>(o_.seq_len) *
                                    static_cast<float>(o_.grad_accum));
    const double rate = learning_rate(o_.schedule, step, o_.steps, o_.warmup, o_.lr, o_.min_lr);
    set_factors(factors_,
                {.lr = static_cast<float>(rate),
                 .beta1 = static_cast<float>(o_.beta1),
                 .beta2 = static_cast<float>(o_.beta2),
                 .epsilon = static_cast<float>(o_.eps),
                 .weight_decay = static_cast<float>(o_.weight_decay),
                 .clip = static_cast<float>(o_.clip),
                 .step = static_cast<int>(step + 1),
                 .seed = o_.seed},
                stream_);
    device_fill(loss_.data(), 0, sizeof(float), stream_);
    for (int k = 0; k < o_.grad_accum; k++) {
        if (k > 0 && interrupted) return false;
        feed_training(step, static_cast<uint64_t>(k));
        step_.adds = k > 0;
        run_step(step_.adds ? add_plan_ : train_plan_,
                 [&] { gpt_.forward_backward(feeder_.batch(), step_, loss_scale, loss_, consume_); });
    }
    if (!consume_) run_step(update_plan_, [&] { update(); });
    metrics_[step % 2]->start(metrics_memory_.data(), stream_);
    pending_.push_back({step, rate});
    read_metrics(kStepsAhead);
    return true;
}

// The forward of a step alone, as a validation runs it.
void Trainer::forward_step(int64_t step) {
    Range range("step");
    device_fill(loss_.data(), 0, sizeof(float), stream_);
    for (int k = 0; k < o_.grad_accum; k++) {
        feed_training(step, static_cast<uint64_t>(k));
        Range forward("forward");
        run_step(evaluate_plan_, [&] { gpt_.evaluate(feeder_.batch(), step_, 1, loss_); });
    }
}

double Trainer::step_tokens() const { return static_cast<double>(o_.batch) * o_.seq_len * o_.grad_accum; }

// 6 FLOPs a token and parameter that is multiplied with, which positions are not (Kaplan et al.,
// arXiv:2001.08361), and causal attention's 6 layers C T.
double Trainer::step_flops() const {
    const double attention =
        static_cast<double>(config_.layers * config_.query_width()) * static_cast<double>(o_.seq_len);
    return step_tokens() * (6.0 * static_cast<double>(state_.layout.multiplied()) + 6.0 * attention);
}

void Trainer::record_step(const StepFigures& f) {
    lines_->add(f, clock_.seconds());
    log_line({{"step", f.step},
              {"loss", f.loss},
              {"grad_norm", f.norm},
              {"lr", f.rate},
              {"ms", f.seconds * 1e3},
              {"tokens_per_second", step_tokens() / f.seconds}});
}

void Trainer::log_line(const nlohmann::ordered_json& line) {
    if (!log_) return;
    if (fprintf(log_.get(), "%s\n", line.dump().c_str()) < 0 || fflush(log_.get()) != 0)
        fail("--log %s: %s", o_.log.c_str(), strerror(errno));
}

uint64_t Trainer::validation_sequences() const {
    return std::min(val_loader_->sequences_per_epoch(), static_cast<uint64_t>(o_.batch) *
                                                            static_cast<uint64_t>(o_.grad_accum) *
                                                            static_cast<uint64_t>(o_.eval_batches));
}

// The mean loss over the validation data's first sequences, as many as --eval-batches steps read: the same
// whatever micro-batch was chosen. Nothing when the run is interrupted.
std::optional<double> Trainer::validate() {
    read_metrics();
    const uint64_t batch = static_cast<uint64_t>(o_.batch), sequences = validation_sequences();
    device_fill(loss_.data(), 0, sizeof(float), stream_);
    // The same in every call, as run_step() asks for.
    const float scale = 1.f / (static_cast<float>(sequences) * static_cast<float>(o_.seq_len));
    for (uint64_t first = 0; first < sequences; first += batch) {
        if (interrupted) return std::nullopt;
        feed(*val_loader_, first, std::min(batch, sequences - first));
        run_step(evaluate_plan_, [&] { gpt_.evaluate(feeder_.batch(), step_, scale, loss_); });
    }
    float loss = 0;
    copy_to_host(&loss, loss_.data(), sizeof loss, stream_);
    return double{loss};
}

// Prints the prompt and its continuation, of a training under a header. Token i of the sample after `step`
// draws random number (step, i). A sample longer than the window goes on from its latest half.
void Trainer::sample(int64_t step) {
    read_metrics();
    std::vector<int> text = first_tokens();
    int drawn = 0;
    if (o_.steps > 0) printf("--- sample after %lld steps ---\n", static_cast<long long>(step));
    TextOutput output(stdout);
    output.write(o_.prompt);
    std::optional<Tokenizer::Decoder> decoder;
    if (tokenizer_) decoder.emplace(*tokenizer_, o_.prompt.empty());
    auto choose = [&](const TensorX& device_logits) {
        std::vector<floatX> narrow(static_cast<size_t>(config_.vocabulary));
        copy_to_host(narrow.data(), device_logits.data(), narrow.size() * sizeof(floatX), stream_);
        std::vector<float> logits(narrow.size());
        for (size_t v = 0; v < logits.size(); v++) logits[v] = to_float(narrow[v]);
        const double uniform = random_uniform(o_.seed, kSampleStream, static_cast<uint64_t>(step),
                                              static_cast<uint64_t>(drawn++));
        const int token = sample_token(logits, o_.temperature, o_.top_k, uniform);
        if (tokenizer_ && tokenizer_->ends_text(token))
            drawn = o_.sample_tokens;
        else
            output.write(decoder ? decoder->next(token) : std::to_string(token) + " ");
        text.push_back(token);
        return drawn < o_.sample_tokens && !interrupted ? token : -1;
    };
    const std::vector<int> first = text;
    arena_.run(sample_plan_,
               [&] { gpt_.generate(first, sample_window() - static_cast<int>(first.size()), choose); });
    while (drawn < o_.sample_tokens && !interrupted) {
        const int half = sample_window() / 2;
        const std::vector<int> latest(text.end() - half, text.end());
        arena_.run(slide_plan_, [&] { gpt_.generate(latest, sample_window() - half, choose); });
    }
    output.finish(o_.steps > 0 ? "\n---\n" : "\n");
}

// `evaluated`: whether the validation and the sample that are due at this step were made.
void Trainer::save(int64_t steps_done, bool evaluated) {
    read_metrics();
    const bool folder = !parse_new_model(o_.model) && std::filesystem::exists(o_.model);
    const int64_t read = first_sequence_ + (steps_done - first_step_) * o_.batch * o_.grad_accum;
    const std::string& tokenizer = folder ? o_.model : o_.resume.empty() ? tokenizer_folder_ : o_.resume;
    saves_.others.erase(steps_done);
    Progress progress{.step = steps_done,
                      .sequences = read,
                      .precision = kPrecision,
                      .evaluated = evaluated,
                      .others = saves_.others,
                      .data = data_facts_};
    remember_options(o_, progress);
    save_checkpoint(saves_, state_, progress, tokenizer, o_.steps > 0);
    last_save_ = o_.out;
    saved_step_ = steps_done;
    fprintf(notes(), "saved step %lld in %s\n", static_cast<long long>(steps_done), o_.out.c_str());
}

void Trainer::run() {
    open_device();
    const size_t before = device_bytes_in_use();
    prepare();
    stop_on_signals(!o_.out.empty());
    if (!o_.resume.empty() && o_.steps > 0 && first_step_ >= o_.steps)
        printf("%s is at step %lld: of --steps %lld nothing is left to train\n", o_.resume.c_str(),
               static_cast<long long>(first_step_), static_cast<long long>(o_.steps));
    else if (o_.has("--resume") && o_.resume.empty())
        printf("--resume auto: %s holds no save yet: beginning\n", o_.out.c_str());
    if (o_.steps > first_step_ && o_.out.empty()) printf("nothing will be saved: no --out\n");
    const int settled = StepGraphs::kReplays && replays_ ? 2 : 1;  // steps until graphs are recorded
    int64_t step = first_step_;
    auto validate_and_log = [&] {
        const std::optional<double> loss = validate();
        if (!loss) return;
        printf("step %5lld validation loss %.6f\n", static_cast<long long>(step), *loss);
        log_line({{"step", step}, {"val_loss", *loss}});
    };
    // Runs what reads data. Where they cannot be read on, what was trained until then is saved.
    auto reading = [&](bool evaluated, const auto& action) {
        try {
            action();
        } catch (const DataError&) {
            if (!o_.out.empty() && step > first_step_) save(step, evaluated);
            throw;
        }
    };
    auto is_time = [&](int64_t every) { return every > 0 && step > 0 && step % every == 0; };
    for (; step < o_.steps && !interrupted; step++, evaluated_ = false) {
        if (!evaluated_) {
            if (val_data_ && is_time(o_.eval_every)) reading(false, validate_and_log);
            if (is_time(o_.sample_every) && samples()) sample(step);
            if (interrupted) break;
            evaluated_ = true;
        }
        if (is_time(o_.save_every) && step > first_step_) save(step, true);
        bool whole = true;
        reading(true, [&] { whole = train_step(step); });
        if (!whole) break;
        if (step == std::min(o_.steps, first_step_ + settled) - 1) {
            read_metrics();
            printf("taken from the device: %.1f MiB; planned: %.1f MiB\n",
                   (static_cast<double>(device_bytes_in_use()) - static_cast<double>(before)) / 1048576.0,
                   mebibytes(report_.total()));
        }
    }
    read_metrics();
    if (interrupted) {
        if (step == first_step_)
            fprintf(notes(), "interrupted before step %lld\n", static_cast<long long>(step + 1));
        else
            printf("interrupted after step %lld\n", static_cast<long long>(step));
        if (!o_.out.empty() && saved_step_ != step) save(step, evaluated_);
        return;
    }
    const bool is_saved =
        step == first_step_ && !resumed_.empty() && same_file(folder_above(resumed_), o_.out);
    if (!o_.out.empty() && !is_saved) save(step, true);
    if (val_data_ && o_.steps > 0) validate_and_log();
    if (samples()) sample(step);
}

// Measures the phases of steps, or their operations, one step at a time.
void Trainer::bench_phases(BenchReport& r, const std::function<void(int64_t)>& run_one) {
    StepWatch watch(stream_, o_.profile_ops);
    for (int64_t step = 0; step < 1 + o_.bench_warmup + o_.bench_steps; step++) {
        run_one(step);
        StepTimes times = watch.take();
        if (step == 0)
            r.cold = std::move(times);
        else if (step > o_.bench_warmup)
            r.steps.push_back(std::move(times));
    }
    read_metrics();
}

// Measures steps that are replayed as graphs, one after the other as a training runs them. At least two come
// before those that count: one that runs as ever and one that is recorded.
void Trainer::bench_replays(BenchReport& r, const std::function<void(int64_t)>& run_one) {
    Marks ends(stream_);
    const int before = 1 + std::max(1, o_.bench_warmup);
    for (int step = 0; step < before + o_.bench_steps; step++) {
        run_one(step);
        ends.set();
    }
    read_metrics();
    ends.finish();
    for (int step = before; step < before + o_.bench_steps; step++)
        r.replayed.push_back(ends.seconds(step - 1, step));
}

// --bench: runs steps, or their forwards alone, and prints what they took and reached.
void Trainer::bench() {
    open_device();
    require_memory(report_, memory_free_at_start(), false);
    const bool forward_only = o_.bench == "forward";
    BenchReport r = {.memory = report_,
                     .forward_only = forward_only,
                     .profiled = o_.profile_ops,
                     .threads = omp_get_max_threads(),
                     .warmup = o_.bench_warmup,
                     .plans = {},
                     .tokens = step_tokens(),
                     .flops = step_flops() / (forward_only ? 3 : 1),  // a third is forward's
                     .matmul_peak = measured_matmul_flops<floatX>(stream_, report_.allocated()),
                     .copy_peak = measured_copy_bandwidth(stream_)};
    if (forward_only)
        r.plans = {{&evaluate_plan_, o_.grad_accum}};
    else
        r.plans = {{&train_plan_, 1}, {&add_plan_, o_.grad_accum - 1}, {&update_plan_, 1}};
    const size_t before = device_bytes_in_use();
    prepare();
    const bool graphs = StepGraphs::kReplays && o_.graph == "on" && !o_.profile_ops;
    auto run_one = [&](int64_t step) {
        if (forward_only)
            forward_step(step);
        else
            train_step(step);
    };
    replays_ = false;  // a graph has no phases that could be seen
    bench_phases(r, run_one);
    replays_ = graphs;
    if (graphs) bench_replays(r, run_one);
    r.taken_bytes = std::max(device_bytes_in_use(), before) - before;
    if (o_.json)
        printf("%s\n", json_text(bench_json(r)).c_str());
    else
        print_bench(stdout, r);
}

// Files that are opened must not get the numbers of standard streams that were closed.
void open_standard_streams() {
    while (true) {
        const int file = open("/dev/null", O_RDWR);
        if (file > 2) close(file);
        if (file < 0 || file > 2) return;
    }
}

int main(int argc, char** argv) {
    open_standard_streams();
    set_openmp_environment(argv);
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // a line is there when it is printed, in a file too
    try {
        std::optional<HeldSave> resumed;
        const auto parse = [&] {
            resumed.reset();
            return parse_options(argc, argv, [&](const std::string& folder) {
                return saved_options(resumed.emplace(folder).path());
            });
        };
        Options options = parse();
        std::optional<HeldFolder> out;
        if (options.saves()) {
            out.emplace(options.out);
            if (options.has("--resume")) options = parse();  // the run that held it may have saved since
        }
        start_threads(options.threads);
        Trainer trainer(options, std::move(resumed));
        if (options.plan)
            trainer.print_plan();
        else if (!options.bench.empty())
            trainer.bench();
        else
            trainer.run();
        if (interrupted) return 128 + interrupted;
        if (fflush(stdout) != 0 || ferror(stdout)) fail("what was printed could not all be written");
    } catch (...) {
        return report_error();
    }
    return 0;
}
