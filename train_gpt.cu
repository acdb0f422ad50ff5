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
#include "llmc/global_norm.cuh"
#include "llmc/graph.h"
#include "llmc/layernorm.cuh"
#include "llmc/matmul.h"
#include "llmc/matmul_search.h"
#include "llmc/optimizer.cuh"
#include "llmc/options.h"
#include "llmc/recompute.h"
#include "llmc/report.h"
#include "llmc/residual.cuh"
#include "llmc/sampler.h"
#include "llmc/schedule.h"
#include "llmc/state.h"
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

// The tensors of one block's forward, in the order they are written. (B, T, C) unless said otherwise.
struct BlockActivations {
    TensorX input;                 // the residual stream at the block's start
    TensorF ln_1_mean, ln_1_rstd;  // (B, T)
    TensorX ln_1;
    TensorX qkv;                   // (B, T, 3C)
    TensorX attention;             // before the projection
    TensorF lse;                   // (B, heads, T), the log of each softmax's denominator
    TensorX middle;                // the residual stream after attention
    TensorF ln_2_mean, ln_2_rstd;  // (B, T)
    TensorX ln_2;
    TensorX up;    // (B, T, 4C), before GELU
    TensorX gelu;  // (B, T, 4C)
};

// The last layernorm and the logits of some rows.
struct HeadActivations {
    TensorF mean, rstd;  // (rows)
    TensorX ln_f;        // (rows, C)
    TensorX logits;      // (rows, padded vocabulary)
};

// The keys and values of a sequence so far, a (positions, 2C) tensor a layer, and how many positions are
// filled.
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
    // Takes the gradients of a unit of the Layout, by number, as soon as they are complete, and its weights.
    using Consume = std::function<void(int unit, const floatX* gradients)>;

    // The stream may be made later, before the first run.
    Gpt(Arena& arena, const Stream& stream, const State<floatX>& state, bool hopper_attention)
        : arena_(arena),
          stream_(stream),
          state_(state),
          layout_(state.layout),
          config_(layout_.config()),
          hopper_attention_(hopper_attention) {
        bind();
    }
    // Points the views at the state's memory: again after it was allocated.
    void bind() {
        weights_ = {layout_.embeddings(state_.weights()), {}, layout_.last_layernorm(state_.weights())};
        for (int l = 0; l < config_.layers; l++)
            weights_.blocks.push_back(layout_.block(state_.weights(), l));
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
    Tensor<int> take_input(const char* name, Shape shape, const std::vector<int>& values);

    TensorX embed(const Tensor<int>& tokens, int first_position);
    AttentionInput<floatX> attention_of(const TensorX& qkv) const;
    void attend(BlockActivations& a, Keep keep, KvCache* cache, int layer);
    void forward_attention(int layer, BlockActivations& a, Keep keep, KvCache* cache);
    TensorX forward_mlp(int layer, BlockActivations& a, Keep keep);
    TensorX forward_block(int layer, BlockActivations& a, Keep keep, KvCache* cache = nullptr);
    TensorX forward_only(const Tensor<int>& tokens, KvCache* cache);
    TensorX forward_cached(const std::vector<int>& tokens, KvCache& cache);
    template <class Chunk>
    void for_each_head_chunk(int64_t rows, int64_t head_rows, Chunk&& chunk);

    // Where the gradients of a unit go: into the State's, or into room of their own. Offsets in the Layout
    // count from `base`.
    struct UnitGradients {
        TensorX room;
        floatX* base;
    };
    UnitGradients take_unit_gradients(int unit, const MicroBatchOptions& options, const Consume& consume);
    void zero_added(int unit, floatX* base);
    void complete(int unit, UnitGradients& gradients, const Consume& consume);
    HeadActivations forward_head(const TensorX& x);
    template <class T>
    void add_head_product(Tensor<T>& d_wte, Tensor<uint8_t>& low, const Tensor<T>& d_logits,
                          const Tensor<T>& ln_f, bool adds);
    void head(TensorX& stream, const Tensor<int>& targets, const MicroBatchOptions& options, float loss_scale,
              TensorF& loss, TensorX& d_wte, LastLayernorm<floatX>& d_last);
    TensorX normalized(TensorX& kept, const char* name, const TensorX& x, const TensorF& mean,
                       const TensorF& rstd, const TensorX& weight, const TensorX& bias);
    void backward_linear(TensorX& d_weight, TensorX& d_bias, const TensorX& in, const TensorX& d_out,
                         bool adds);
    template <class Gradient>
    void backward_norm(TensorX& d_stream, Tensor<Gradient>& d_weight, Tensor<Gradient>& d_bias,
                       const TensorX& d_out, const TensorX& x, const TensorF& mean, const TensorF& rstd,
                       const TensorX& weight);
    void backward_mlp(const Block<floatX>& w, Block<floatX>& g, BlockActivations& a, TensorX& d_stream,
                      bool adds);
    void backward_attention(int layer, Block<floatX>& g, BlockActivations& a, TensorX& d_stream, bool adds);
    void backward_block(int layer, BlockActivations& a, TensorX& d_stream, const MicroBatchOptions& options,
                        const Consume& consume);

    Arena& arena_;
    const Stream& stream_;
    const State<floatX>& state_;
    const Layout& layout_;
    const GptConfig& config_;
    const bool hopper_attention_;
    struct {
        Embeddings<floatX> embeddings;
        std::vector<Block<floatX>> blocks;
        LastLayernorm<floatX> last;
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

TensorX Gpt::embed(const Tensor<int>& tokens, int first_position) {
    TensorX x = take("residual", {tokens.rows(), tokens.columns(), config_.channels});
    embedding_forward(x, tokens, weights_.embeddings.wte, weights_.embeddings.wpe, first_position, stream_);
    return x;
}

// The attention of a packed qkv (B, T, 3C) with itself.
AttentionInput<floatX> Gpt::attention_of(const TensorX& qkv) const {
    const int B = static_cast<int>(qkv.shape().dims[0]), T = static_cast<int>(qkv.shape().dims[1]);
    const int64_t C = config_.channels, row = 3 * C;
    return {.batch = B,
            .heads = config_.heads,
            .head_size = config_.head_size(),
            .queries = T,
            .keys = T,
            .q = qkv.data(),
            .k = qkv.data() + C,
            .v = qkv.data() + 2 * C,
            .q_row = row,
            .kv_row = row,
            .q_batch = T * row,
            .kv_batch = T * row,
            .hopper = hopper_attention_};
}

// a.attention (B, T, C) = causal attention of a.qkv (B, T, 3C); with a cache, of it and of all that came
// before.
void Gpt::attend(BlockActivations& a, Keep keep, KvCache* cache, int layer) {
    AttentionInput<floatX> in = attention_of(a.qkv);
    const int B = in.batch, T = in.queries;
    const int64_t C = config_.channels;
    if (cache) {
        floatX* kv = cache->layers[static_cast<size_t>(layer)].data();
        copy_rows_on_device(kv + cache->length * 2 * C, 2 * C, in.k, 3 * C, 2 * C, T, stream_);
        in.keys = cache->length + T;
        in.k = kv;
        in.v = kv + C;
        in.kv_row = 2 * C;
        in.kv_batch = in.keys * 2 * C;
    }
    a.attention = take("attention", {B, T, C});
    if (keep.backward) a.lse = take_float("attention_lse", {B, config_.heads, T});
    attention_forward(a.attention.data(), a.lse.data(), in, stream_);
}

// From a.input to a.middle and its layernorm.
void Gpt::forward_attention(int layer, BlockActivations& a, Keep keep, KvCache* cache) {
    const Block<floatX>& w = weights_.blocks[static_cast<size_t>(layer)];
    const Shape btc = a.input.shape();
    const int64_t B = btc.dims[0], T = btc.dims[1], C = btc.dims[2];

    a.ln_1_mean = take_float("ln_1_mean", {B, T});
    a.ln_1_rstd = take_float("ln_1_rstd", {B, T});
    a.ln_1 = take("ln_1", btc);
    layernorm_forward(a.ln_1, a.ln_1_mean, a.ln_1_rstd, a.input, w.ln_1_weight, w.ln_1_bias, stream_);
    a.qkv = take("qkv", {B, T, 3 * C});
    matmul(arena_, stream_, a.qkv, a.ln_1, w.qkv_weight, {.bias = &w.qkv_bias});
    if (!keep.norm) a.ln_1.drop();
    attend(a, keep, cache, layer);
    if (!keep.qkv) a.qkv.drop();
    TensorX projected = take("attention_projected", btc);
    matmul(arena_, stream_, projected, a.attention, w.attention_weight, {.bias = &w.attention_bias});
    if (!keep.attention) a.attention.drop(), a.lse.drop();

    a.middle = take("residual_middle", btc);
    a.ln_2_mean = take_float("ln_2_mean", {B, T});
    a.ln_2_rstd = take_float("ln_2_rstd", {B, T});
    a.ln_2 = take("ln_2", btc);
    residual_layernorm_forward(a.middle, a.ln_2, a.ln_2_mean, a.ln_2_rstd, a.input, projected, w.ln_2_weight,
                               w.ln_2_bias, stream_);
}

// From a.middle and its layernorm to the block's output.
TensorX Gpt::forward_mlp(int layer, BlockActivations& a, Keep keep) {
    const Block<floatX>& w = weights_.blocks[static_cast<size_t>(layer)];
    const Shape btc = a.middle.shape(), bt4c = {btc.dims[0], btc.dims[1], 4 * btc.dims[2]};
    if (keep.backward) {
        a.up = take("up", bt4c);
        matmul(arena_, stream_, a.up, a.ln_2, w.up_weight, {.bias = &w.up_bias});
        if (!keep.norm) a.ln_2.drop();
        a.gelu = take("gelu", bt4c);
        gelu_forward(a.gelu, a.up, stream_);
        if (!keep.up) a.up.drop();
    } else {  // nobody reads the input of GELU again: it stays inside the product
        a.gelu = take("gelu", bt4c);
        matmul(arena_, stream_, a.gelu, a.ln_2, w.up_weight, {.bias = &w.up_bias, .gelu = true});
        a.ln_2.drop();
    }
    TensorX output = take("residual", btc);
    matmul(arena_, stream_, output, a.gelu, w.down_weight, {.bias = &w.down_bias});
    if (!keep.gelu) a.gelu.drop();
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
    const int64_t rows = x.rows();
    HeadActivations a{take_float("ln_f_mean", {rows}), take_float("ln_f_rstd", {rows}),
                      take("ln_f", {rows, config_.channels}),
                      take("logits", {rows, config_.padded_vocabulary()})};
    layernorm_forward(a.ln_f, a.mean, a.rstd, x, weights_.last.weight, weights_.last.bias, stream_);
    matmul(arena_, stream_, a.logits, a.ln_f, weights_.embeddings.wte, {.transpose_b = true});
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
    UnitGradients g{{}, state_.gradients()};
    if (consume) {
        const Unit& u = layout_.units()[static_cast<size_t>(unit)];
        g.room = arena_.take<floatX>("unit_gradients", {u.size}, "parameter_gradient");
        g.base = g.room.data() ? g.room.data() - u.offset : nullptr;
    }
    if (!options.adds) zero_added(unit, g.base);
    return g;
}

// Zeroes what a unit's first gradients are added to: its vectors, and the room between tensors. Matrices are
// written whole, by a product.
void Gpt::zero_added(int unit, floatX* base) {
    int64_t from = 0, end = 0;
    auto flush = [&] {
        if (end > from)
            device_fill(base + from, 0, static_cast<size_t>(end - from) * sizeof(floatX), stream_);
    };
    for (const Parameter& p : layout_.parameters_of(unit)) {
        const int64_t start = p.offset + (p.decayed() ? p.memory.size() : 0);
        if (start != end) flush(), from = start;
        end = p.end();
    }
    flush();
}

void Gpt::complete(int unit, UnitGradients& gradients, const Consume& consume) {
    if (consume) consume(unit, gradients.room.data());
    gradients.room.drop();
}

// d_weight (K, N) [+]= in^T d_out and d_bias (N) += the column sums of d_out (rows, N), for out = in (rows,
// K) weight + bias. Without `adds` d_bias must be zero: the product may write it.
void Gpt::backward_linear(TensorX& d_weight, TensorX& d_bias, const TensorX& in, const TensorX& d_out,
                          bool adds) {
    matmul(arena_, stream_, d_weight, in, d_out,
           {.transpose_a = true, .accumulate = adds, .bias_gradient = &d_bias});
}

// Adds to d_stream (rows, C), d_weight (C) and d_bias (C) what d_out (rows, C) sends back through the
// layernorm of x (rows, C).
template <class Gradient>
void Gpt::backward_norm(TensorX& d_stream, Tensor<Gradient>& d_weight, Tensor<Gradient>& d_bias,
                        const TensorX& d_out, const TensorX& x, const TensorF& mean, const TensorF& rstd,
                        const TensorX& weight) {
    TensorF scratch = take_float("column_sums", column_sums_scratch(x.rows(), x.columns(), 2));
    layernorm_backward(d_stream, d_weight, d_bias, scratch, d_out, x, mean, rstd, weight, stream_);
}

// A layernorm's output (rows, C) as forward kept it, or made again from the saved statistics: the same bits.
TensorX Gpt::normalized(TensorX& kept, const char* name, const TensorX& x, const TensorF& mean,
                        const TensorF& rstd, const TensorX& weight, const TensorX& bias) {
    if (kept) return std::move(kept);
    TensorX out = take(name, x.shape());
    layernorm_normalize(out, x, mean, rstd, weight, bias, stream_);
    return out;
}

// The rows of the vocabulary whose gradient of one chunk is in fp32 at a time.
constexpr int64_t kWideRows = 2048;

// d_wte (V, C) [+]= d_logits^T ln_f, of a chunk of rows. In bf16 `low` carries what the sum of several chunks
// would lose, and it is added always.
template <class T>
void Gpt::add_head_product(Tensor<T>& d_wte, Tensor<uint8_t>& low, const Tensor<T>& d_logits,
                           const Tensor<T>& ln_f, bool adds) {
    if (!low) {
        matmul(arena_, stream_, d_wte, d_logits, ln_f, {.transpose_a = true, .accumulate = adds});
        return;
    }
    if constexpr (std::is_same_v<T, bf16>) {
        const int64_t V = d_wte.rows();
        TensorF room = take_float("d_wte_product", {std::min(kWideRows, V), d_wte.columns()});
        for (int64_t first = 0; first < V; first += kWideRows) {
            const int64_t count = std::min(kWideRows, V - first);
            TensorF product = room.rows_at(0, count);
            const Tensor<T> columns(d_logits.data() + first, {d_logits.rows(), count});
            matmul(arena_, stream_, product, columns, ln_f, {.transpose_a = true, .a_row = V});
            Tensor<T> sum = d_wte.rows_at(first, count);
            Tensor<uint8_t> sum_low = low.rows_at(first / 2, count / 2);  // V is even, padded
            wide_sum_add(sum, sum_low, product, stream_);
        }
    }
}

// The head of some rows after others, each forward and at once back, so that no more logits exist than a
// chunk's. `stream` (B, T, C), the last block's output, becomes its own gradient.
void Gpt::head(TensorX& stream, const Tensor<int>& targets, const MicroBatchOptions& options,
               float loss_scale, TensorF& loss, TensorX& d_wte, LastLayernorm<floatX>& d_last) {
    const int64_t rows = stream.rows(), C = config_.channels, V = config_.padded_vocabulary();
    const bool chunks = options.head_rows > 0 && options.head_rows < rows;
    TensorF losses = take_float("losses", {rows, 1});
    TensorF d_last_sums = take_float("d_ln_f_sums", {1, 2, C});
    zero(d_last_sums);
    TensorF d_weight(d_last_sums.data(), {C}), d_bias(d_last_sums.data() + C, {C});
    if (chunks && !options.adds) zero(d_wte);
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
        add_head_product(d_wte, low, a.logits, a.ln_f, chunks || options.adds);
        TensorX d_ln_f = std::move(a.ln_f);
        matmul(arena_, stream_, d_ln_f, a.logits, weights_.embeddings.wte);
        a.logits.drop();
        zero(part);
        backward_norm(part, d_weight, d_bias, d_ln_f, x, a.mean, a.rstd, weights_.last.weight);
    });
    add_losses(loss, losses, loss_scale, stream_);
    add_chunks(ColumnOutputs<floatX, 2>{{d_last.weight.data(), d_last.bias.data()}}, d_last_sums, 1,
               static_cast<int>(C), stream_);
}

// The MLP half: d_stream, the gradient of the block's output, becomes that of a.middle. What is made again is
// let go of as soon as it was read once, where it costs no product.
void Gpt::backward_mlp(const Block<floatX>& w, Block<floatX>& g, BlockActivations& a, TensorX& d_stream,
                       bool adds) {
    const Shape btc = a.middle.shape(), bt4c = {btc.dims[0], btc.dims[1], 4 * btc.dims[2]};
    auto make_ln_2 = [&] {
        return normalized(a.ln_2, "ln_2", a.middle, a.ln_2_mean, a.ln_2_rstd, w.ln_2_weight, w.ln_2_bias);
    };
    if (!a.up) {
        const TensorX ln_2 = make_ln_2();
        a.up = take("up", bt4c);
        matmul(arena_, stream_, a.up, ln_2, w.up_weight, {.bias = &w.up_bias});
    }
    TensorX gelu = std::move(a.gelu);
    if (!gelu) {
        gelu = take("gelu", bt4c);
        gelu_forward(gelu, a.up, stream_);
    }
    backward_linear(g.down_weight, g.down_bias, gelu, d_stream, adds);
    gelu.drop();
    TensorX d_up = take_gradient("d_up", bt4c);
    matmul(arena_, stream_, d_up, d_stream, w.down_weight, {.transpose_b = true, .gelu_input = &a.up});
    a.up.drop();

    TensorX ln_2 = make_ln_2();
    backward_linear(g.up_weight, g.up_bias, ln_2, d_up, adds);
    ln_2.drop();
    TensorX d_ln_2 = take_gradient("d_ln_2", btc);
    matmul(arena_, stream_, d_ln_2, d_up, w.up_weight, {.transpose_b = true});
    d_up.drop();
    backward_norm(d_stream, g.ln_2_weight, g.ln_2_bias, d_ln_2, a.middle, a.ln_2_mean, a.ln_2_rstd,
                  w.ln_2_weight);
}

// The attention half: d_stream, the gradient of a.middle, becomes that of a.input.
void Gpt::backward_attention(int layer, Block<floatX>& g, BlockActivations& a, TensorX& d_stream, bool adds) {
    const Block<floatX>& w = weights_.blocks[static_cast<size_t>(layer)];
    const Shape btc = a.input.shape(), bt3c = {btc.dims[0], btc.dims[1], 3 * btc.dims[2]};
    const int64_t C = config_.channels;
    auto make_ln_1 = [&] {
        return normalized(a.ln_1, "ln_1", a.input, a.ln_1_mean, a.ln_1_rstd, w.ln_1_weight, w.ln_1_bias);
    };
    if (!a.qkv) {
        const TensorX ln_1 = make_ln_1();
        a.qkv = take("qkv", bt3c);
        matmul(arena_, stream_, a.qkv, ln_1, w.qkv_weight, {.bias = &w.qkv_bias});
    }
    if (!a.attention) attend(a, {}, nullptr, layer);

    backward_linear(g.attention_weight, g.attention_bias, a.attention, d_stream, adds);
    TensorX d_attention = take_gradient("d_attention", btc);
    matmul(arena_, stream_, d_attention, d_stream, w.attention_weight, {.transpose_b = true});
    TensorX d_qkv = take_gradient("d_qkv", bt3c);
    TensorF delta = take_float("attention_delta", a.lse.shape());
    floatX* d = d_qkv.data();
    attention_backward(d, d + C, d + 2 * C, d_attention.data(), a.attention.data(), a.lse.data(),
                       delta.data(), attention_of(a.qkv), stream_);
    delta.drop();
    d_attention.drop();
    a.attention.drop();
    a.lse.drop();
    a.qkv.drop();

    TensorX ln_1 = make_ln_1();
    backward_linear(g.qkv_weight, g.qkv_bias, ln_1, d_qkv, adds);
    ln_1.drop();
    TensorX d_ln_1 = take_gradient("d_ln_1", btc);
    matmul(arena_, stream_, d_ln_1, d_qkv, w.qkv_weight, {.transpose_b = true});
    d_qkv.drop();
    backward_norm(d_stream, g.ln_1_weight, g.ln_1_bias, d_ln_1, a.input, a.ln_1_mean, a.ln_1_rstd,
                  w.ln_1_weight);
}

// Writes or adds the block's gradients; d_stream (B, T, C), the gradient of its output, becomes that of its
// input.
void Gpt::backward_block(int layer, BlockActivations& a, TensorX& d_stream, const MicroBatchOptions& options,
                         const Consume& consume) {
    Range range("block", layer);
    UnitGradients gradients = take_unit_gradients(layer + 1, options, consume);
    Block<floatX> g = layout_.block(gradients.base, layer);
    if (!a.middle) forward_attention(layer, a, {.norm = false}, nullptr);
    backward_mlp(weights_.blocks[static_cast<size_t>(layer)], g, a, d_stream, options.adds);
    a.middle.drop();
    backward_attention(layer, g, a, d_stream, options.adds);
    a = {};
    complete(layer + 1, gradients, consume);
}

// ---- the steps

// One micro-batch: writes or adds its gradients, or has each unit's consumed, and adds loss_scale times the
// sum of its losses to `loss` (1).
void Gpt::forward_backward(const DeviceBatch& batch, const MicroBatchOptions& options, float loss_scale,
                           TensorF& loss, const Consume& consume) {
    const int last_unit = config_.layers + 1;
    std::vector<BlockActivations> blocks(static_cast<size_t>(config_.layers));
    std::optional<Range> range(std::in_place, "forward");
    TensorX stream = embed(batch.inputs, 0);
    for (size_t l = 0; l < blocks.size(); l++) {
        blocks[l].input = std::move(stream);
        stream = forward_block(static_cast<int>(l), blocks[l], options.keep[l]);
    }

    range.emplace("head");
    UnitGradients of_embeddings = take_unit_gradients(0, options, consume);
    UnitGradients of_last = take_unit_gradients(last_unit, options, consume);
    Embeddings<floatX> d_embeddings = layout_.embeddings(of_embeddings.base);
    LastLayernorm<floatX> d_last = layout_.last_layernorm(of_last.base);
    if (!options.adds) zero(d_embeddings.wpe);
    head(stream, batch.targets, options, loss_scale, loss, d_embeddings.wte, d_last);
    complete(last_unit, of_last, consume);

    range.emplace("backward");
    for (int l = config_.layers - 1; l >= 0; l--)
        backward_block(l, blocks[static_cast<size_t>(l)], stream, options, consume);
    embedding_backward(d_embeddings.wte, d_embeddings.wpe, stream, batch.inputs, batch.rows_by_token,
                       batch.token_starts, stream_);
    stream.drop();
    complete(0, of_embeddings, consume);
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
            take("kv_cache", {static_cast<int64_t>(prompt.size()) + new_tokens, 2 * config_.channels}));
    std::vector<int> next = {choose(forward_cached(prompt, cache))};
    arena_.repeat(new_tokens - 1, [&] {
        if (next[0] >= 0) next = {choose(forward_cached(next, cache))};
        return next[0] >= 0;
    });
}

// ---- the run

constexpr uint64_t kSampleStream = uint64_t{1} << 62;  // counter space of random_bits() for sampling
constexpr uint64_t kBenchStream = kSampleStream + 1;   // and for the tokens of a bench without data

volatile std::sig_atomic_t interrupted = 0;
void on_interrupt(int) {
    interrupted = 1;
    std::signal(SIGINT, SIG_DFL);  // a second Ctrl-C stops at once
}

const char* const kOwnText[] = {"README.md",  "train_gpt.cu", "llmc/*.h",
                                "llmc/*.cuh", "test/*.cpp",   "dev/*.py"};

// What the first step takes beside the plan, with `heads` in a micro-batch: on a CPU compiled products,
// stacks and host buffers, measured with 2 to 64 threads, and what attention's backward keeps of the heads
// that are worked on (attention_cpu.h); on a GPU not measured yet.
size_t process_bytes([[maybe_unused]] int64_t heads, [[maybe_unused]] int64_t head_floats) {
#ifdef SIMT_GPU
    return 0;
#else
    const int64_t threads = omp_get_max_threads(), workers = std::min(threads, heads);
    return (13 << 20) + (static_cast<size_t>(std::min<int64_t>(32, threads)) * 3 << 18) +
           static_cast<size_t>(workers * head_floats) * sizeof(float);
#endif
}

// The steps that are enqueued before the host looks at what the one before has left, so that the device has
// work while it does.
constexpr size_t kStepsAhead = StepGraphs::kReplays ? 1 : 0;

// Everything a run needs, opened and checked in the order of its members, before any device memory is taken.
class Trainer {
  public:
    explicit Trainer(Options options);
    void print_plan() const;
    void run();
    void bench();

  private:
    std::unique_ptr<Dataset> open_data(const std::vector<std::string>& files, const char* option,
                                       Part part) const;
    std::unique_ptr<Dataset> open_training_data();
    GptConfig choose_config() const;
    void open_validation();
    std::optional<Tokenizer> open_tokenizer();
    std::vector<int> first_tokens() const;
    bool samples() const;
    int sample_window() const;
    bool feeds() const { return o_.steps > 0 || o_.bench == "forward"; }
    int64_t metrics_count() const { return 1 + static_cast<int64_t>(state_.layout.units().size()); }
    void open_device();
    void use(const MemorySetting& s);
    MemorySetting choose_setting();
    Plan rehearse_training(bool adds = false);
    void rehearse_all();
    MemoryReport make_report();
    void point_metrics(float* at);
    void check_data() const;
    void choose_algorithms();
    void prepare();
    void load();
    double whole_norm(const float* norms) const;
    void read_metrics(size_t ahead = 0);
    template <class Step>
    void run_step(Plan& plan, Step&& step);
    void feed(SequenceLoader& loader, uint64_t first, uint64_t count);
    void feed_training(int64_t step, uint64_t k);
    void train_step(int64_t step);
    void forward_step(int64_t step);
    void measure_norm(const floatX* gradients, int64_t n, TensorF& norm);
    void update_unit(int unit, const floatX* gradients);
    void update();
    std::optional<double> validate();
    void sample(int64_t step);
    void save(int64_t steps_done, bool evaluated);
    void log_line(const nlohmann::ordered_json& line);
    double step_tokens() const;
    double step_flops() const;
    void print_step(int64_t step, double loss, double norm, double rate, double seconds);
    void bench_phases(BenchReport& r, const std::function<void(int64_t)>& run_one);
    void bench_replays(BenchReport& r, const std::function<void(int64_t)>& run_one);

    Options o_;
    std::string resumed_;  // the save that --resume goes on from; empty without
    std::unique_ptr<Dataset> data_, val_data_;
    GptConfig config_;
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
    Plan train_plan_, add_plan_;        // a step's first micro-batch, and those that add to its gradients
    Plan update_plan_, evaluate_plan_, sample_plan_, slide_plan_;
    StepGraphs graphs_;
    bool replays_ = false;  // whether steps are run through them
    DeviceBuffer metrics_memory_, factors_memory_;
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
    std::string last_save_;
    double peak_flops_ = 0, seconds_per_step_ = 0;
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
void check_attention(const Options& o, const GptConfig& config) {
    if (o.attention != "hopper") return;
    if (!kHopperAttention<floatX>)
        fail(
            "--attention hopper: this build has no such kernels; make DEVICE=cuda PRECISION=bf16 with 90a in "
            "CUDA_ARCH does, and --attention common is in each");
    if (!hopper_attention_supports(config.head_size()))
        fail(
            "--attention hopper does heads of 64 and 128 channels, and the model's have %d: --attention "
            "common",
            config.head_size());
}

bool is_depth(const std::string& model) {
    return model.size() >= 2 && model.size() <= 5 && model[0] == 'd' &&
           model.find_first_not_of("0123456789", 1) == std::string::npos;
}

std::unique_ptr<Dataset> Trainer::open_data(const std::vector<std::string>& files, const char* option,
                                            Part part) const {
    return std::make_unique<Dataset>(expand_files(files, option), option, part);
}

// The sizes of the model, from the save, the folder or the depth that the options name.
GptConfig Trainer::choose_config() const {
    std::optional<GptConfig> saved;
    if (!resumed_.empty()) saved = read_model_config(resumed_, "--resume");
    GptConfig config;
    if (is_depth(o_.model)) {
        int vocabulary = data_ ? data_->vocabulary() : o_.has("--model") ? 50257 : 256;
        if (saved) vocabulary = saved->vocabulary;
        config = config_of_depth(std::stoi(o_.model.substr(1)), vocabulary,
                                 vocabulary == 256 ? o_.seq_len : std::max(1024, o_.seq_len));
        if (saved) config.positions = saved->positions;
    } else if (saved && !std::filesystem::exists(o_.model)) {
        config = *saved;  // the folder that a run started from may be gone
    } else {
        config = read_model_config(o_.model, "--model");
    }
    if (saved && !(config == *saved))
        fail(
            "--resume %s holds another model (%d layers, %d channels, %d heads) than --model %s (%d, %d, %d)",
            o_.resume.c_str(), saved->layers, saved->channels, saved->heads, o_.model.c_str(), config.layers,
            config.channels, config.heads);
    return config;
}

Trainer::Trainer(Options options)
    : o_(std::move(options)),
      resumed_(o_.resume.empty() ? "" : resolve_save(o_.resume)),
      data_(open_training_data()),
      config_(choose_config()),
      tokenizer_(open_tokenizer()),
      state_(config_, state_options(o_)),
      gpt_(arena_, stream_, state_, o_.attention == "hopper"),
      norm_of_each_unit_(o_.clip_per_block || o_.update_in_backward) {
    check_attention(o_, config_);
    if (!o_.has("--seq-len")) o_.seq_len = std::min(o_.seq_len, config_.positions);
    if (o_.seq_len > config_.positions)
        fail("--seq-len %d is more than the model's %d positions", o_.seq_len, config_.positions);
    if (data_) {
        if (o_.bench.empty()) open_validation();
        check_data();
        for (const auto& [option, file] : {std::pair{"--log", o_.log}, {"--timeline", o_.timeline}})
            for (const Dataset* d : {data_.get(), val_data_.get()})
                if (d && d->reads(file)) fail("%s %s: is a file of the data", option, file.c_str());
    }
    if (o_.update_in_backward)
        consume_ = [this](int unit, const floatX* gradients) { update_unit(unit, gradients); };
    replays_ = o_.graph == "on";
    point_metrics(nullptr);
    const bool choose = o_.has("--memory") || o_.batch == 0;
    use(choose_setting());
    if (choose) remember_choice(o_);
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
    int64_t most = kMostTokens / o_.seq_len;
    if (data_) {
        const SequenceLoader loader(*data_, o_.seq_len, o_.seed, true);
        most = std::min(most, static_cast<int64_t>(loader.sequences_per_epoch()));
    }
    const Rehearsals rehearsals{config_.layers, most, nominal_rates<floatX>(),
                                [this](const MemorySetting& s) { return use(s), make_report(); },
                                [this](const MemorySetting& s) { return use(s), rehearse_training(); }};
    const bool budget = o_.has("--memory");
    const Options given = o_;
    if (budget && o_.batch > 0) return fit_memory(given, std::is_same_v<floatX, bf16>, rehearsals, choice_);
    MemorySetting s = setting_of(o_);
    s.levels = parse_levels(o_.recompute, recompute_names(), config_.layers, "--recompute");
    if (o_.batch > 0) return s;
    if (!budget) check_device(o_);
    const size_t room = budget ? parse_bytes(o_.memory, "--memory") : device_bytes_free() / 20 * 19;
    return fit_batch(s, room, rehearsals);
}

// Where the step leaves its loss and norms; nowhere, as long as it is only rehearsed.
void Trainer::point_metrics(float* at) {
    loss_ = TensorF(at, {1});
    norms_ = TensorF(at ? at + 1 : nullptr, {metrics_count() - 1, 1});
}

// What --data names, or this project's own text; nothing where no training is asked for.
std::unique_ptr<Dataset> Trainer::open_training_data() {
    if (!o_.data.empty()) {
        auto data = open_data(o_.data, "--data", Part::All);
        const bool split = data->is_text() && o_.val_data.empty();
        return split ? open_data(o_.data, "--data", Part::Train) : std::move(data);
    }
    if (o_.plan || o_.steps == 0 || !o_.bench.empty()) return nullptr;
    if (!std::filesystem::exists("train_gpt.cu"))
        fail(
            "--data is missing, and the project's own text (train_gpt.cu and its folder) is not here to "
            "train on");
    o_.data.assign(std::begin(kOwnText), std::end(kOwnText));
    return open_data(o_.data, "--data", Part::Train);
}

void Trainer::open_validation() {
    if (!o_.val_data.empty()) {
        val_data_ = open_data(o_.val_data, "--val-data", Part::All);
    } else if (data_->is_text()) {
        val_data_ = open_data(o_.data, "--data", Part::Validation);
        if (val_data_->token_count() <= static_cast<uint64_t>(o_.seq_len)) val_data_.reset();
    }
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

// From the model's folder, or beside the shards; a vocabulary of 256 is bytes.
std::optional<Tokenizer> Trainer::open_tokenizer() {
    std::vector<std::string> folders;
    if (!resumed_.empty()) folders.push_back(resumed_);
    if (!is_depth(o_.model)) folders.push_back(o_.model);
    if (data_ && !data_->is_text()) {
        const auto parent = std::filesystem::path(data_->stream_name(0)).parent_path();
        folders.push_back(parent.empty() ? "." : parent.string());
    }
    for (const std::string& folder : folders)
        if (auto t = Tokenizer::open(folder); t && static_cast<int>(t->size()) <= config_.vocabulary) {
            tokenizer_folder_ = folder;
            return t;
        }
    if (config_.vocabulary == 256) return Tokenizer::bytes();
    return std::nullopt;
}

// What a sample starts from: the prompt, else the end of a text before, else a line's end.
std::vector<int> Trainer::first_tokens() const {
    if (!o_.prompt.empty()) {
        if (!tokenizer_)
            fail(
                "--prompt: no vocab.json and merges.txt in the model's folder or beside the data to read it "
                "with");
        return tokenizer_->encode(o_.prompt);
    }
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

Plan Trainer::rehearse_training(bool adds) {
    step_.adds = adds;
    return arena_.rehearse([&] { gpt_.forward_backward(feeder_.batch(), step_, 1, loss_, consume_); });
}

// Rehearses every step that the run may take.
void Trainer::rehearse_all() {
    if (o_.steps > 0) {
        train_plan_ = rehearse_training();
        add_plan_ = o_.grad_accum > 1 ? rehearse_training(true) : Plan();  // the same takes, other products
        train_plan_.workspace = std::max(train_plan_.workspace, add_plan_.workspace);
        if (!consume_) update_plan_ = arena_.rehearse([&] { update(); });
    }
    if (val_data_ || o_.bench == "forward")
        evaluate_plan_ = arena_.rehearse([&] { gpt_.evaluate(feeder_.batch(), step_, 1, loss_); });
    if (samples()) {
        const auto any = [](const TensorX&) { return 0; };
        const auto first = first_tokens();
        const int rest = sample_window() - static_cast<int>(first.size()), half = sample_window() / 2;
        sample_plan_ = arena_.rehearse([&] { gpt_.generate(first, rest, any); });
        slide_plan_ =
            arena_.rehearse([&] { gpt_.generate(std::vector<int>(half), sample_window() - half, any); });
    }
}

// What the rehearsed steps and the state need, in one report.
MemoryReport Trainer::make_report() {
    rehearse_all();
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
    r.process = process_bytes(int64_t{o_.batch} * config_.heads, int64_t{o_.seq_len} * config_.head_size());
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
    r.train = train_plan_;
    for (const auto& [name, plan] : {std::pair{"the update", &update_plan_},
                                     {"validation", &evaluate_plan_},
                                     {"sampling", &sample_plan_},
                                     {"a sample's continuation", &slide_plan_}})
        if (!plan->takes.empty()) r.others.emplace_back(name, *plan);
    const DeviceRates rates = nominal_rates<floatX>();
    r.update_seconds = seconds_of(update_plan_.work, rates);
    r.seconds = seconds_of(train_plan_.work, rates) +
                (o_.grad_accum - 1) * seconds_of(add_plan_.work, rates) + r.update_seconds;
    r.budget = o_.memory;
    r.choice = choice_;
    return r;
}

void Trainer::print_plan() const {
    if (!o_.timeline.empty()) write_timeline(o_.timeline, report_, update_plan_);
    if (o_.json)
        printf("%s\n", json_text(report_json(report_)).c_str());
    else
        print_report(stdout, report_);
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
        check_writable(o_.out);
        saves_ = open_save_folder(o_.out, o_.keep, resumed_);
        if (!saves_.others.empty())
            fprintf(stderr,
                    "%s holds saves of another run, up to step %lld: they stay, but for steps that are saved "
                    "again\n",
                    o_.out.c_str(), static_cast<long long>(*saves_.others.rbegin()));
    }
    if (data_ && data_->is_text() && !val_data_ && o_.bench.empty())
        fprintf(stderr, "no validation: the text's last tenth is shorter than a sequence of %d\n",
                o_.seq_len);
    if (o_.steps > 0 && o_.bench.empty()) print_plan();
    if (o_.steps > 0 && o_.bench.empty()) peak_flops_ = device_peak_flops<floatX>(stream_);
    choose_algorithms();
    arena_.allocate({&train_plan_, &add_plan_, &update_plan_, &evaluate_plan_, &sample_plan_, &slide_plan_});
    metrics_memory_ = DeviceBuffer(static_cast<size_t>(metrics_count()) * sizeof(float), "the metrics");
    point_metrics(reinterpret_cast<float*>(metrics_memory_.data()));
    for (auto& metrics : metrics_) metrics.emplace(metrics_memory_.bytes());
    factors_memory_ = DeviceBuffer(sizeof(UpdateFactors), "the step's factors");
    factors_ = reinterpret_cast<UpdateFactors*>(factors_memory_.data());
    if (feeds()) feeder_.allocate();
    state_.allocate();
    gpt_.bind();
    if (device_bytes_allocated != report_.allocated())
        fail("%zu bytes were allocated where %zu were planned", device_bytes_allocated, report_.allocated());
    forbid_device_allocation();
    load();
    if (!o_.log.empty()) {
        const std::string above = folder_above(o_.log);  // made where it is to be OUT or above it
        if (!o_.out.empty() && *std::filesystem::proximate(o_.out, above).begin() != "..")
            make_folders(above);
        log_.reset(fopen(o_.log.c_str(), o_.resume.empty() ? "w" : "a"));
        if (!log_) fail("--log %s: %s", o_.log.c_str(), strerror(errno));
    }
    if (data_) loader_.emplace(*data_, o_.seq_len, o_.seed, true);
    if (val_data_) val_loader_.emplace(*val_data_, o_.seq_len, o_.seed, false);
}

void Trainer::load() {
    if (!resumed_.empty() && o_.steps == 0) {
        load_weights(state_, resumed_);
    } else if (!resumed_.empty()) {
        const Progress progress = read_progress(resumed_);
        load_training_state(state_, resumed_);
        first_step_ = progress.step;
        first_sequence_ = progress.sequences;
        evaluated_ = progress.evaluated;
        last_save_ = o_.resume;
        printf("resuming %s at step %lld\n", o_.resume.c_str(), static_cast<long long>(first_step_));
    } else if (is_depth(o_.model)) {
        initialize_weights(state_, o_.seed);
    } else {
        load_weights(state_, o_.model);
    }
}

// The norm of the whole gradient, of what a step left.
double Trainer::whole_norm(const float* norms) const {
    double squares = 0;
    for (int64_t i = 0; i < (norm_of_each_unit_ ? norms_.rows() : 1); i++)
        squares += double{norms[i]} * double{norms[i]};
    return std::sqrt(squares);
}

// Looks at what the steps have left, but for the latest `ahead` of them: prints and logs it, and fails where
// it is not finite. Before anything of a step is kept, it was looked at. A step's time is that between the
// end of the step before and its own.
void Trainer::read_metrics(size_t ahead) {
    for (; pending_.size() > ahead; pending_.pop_front()) {
        const auto [step, rate] = pending_.front();
        const float* metrics = reinterpret_cast<const float*>(metrics_[step % 2]->wait());
        const double before = std::exchange(completed_, clock_.seconds());
        const double loss = double{metrics[0]}, norm = whole_norm(metrics + 1);
        if (!std::isfinite(loss) || !std::isfinite(norm))
            fail("step %lld: the loss is %g and the gradient's norm %g; the last good save: %s",
                 static_cast<long long>(step), loss, norm, last_save_.empty() ? "none" : last_save_.c_str());
        if (o_.bench.empty()) print_step(step, loss, norm, rate, completed_ - before);
    }
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
        update_unit(static_cast<int>(i), state_.gradients() + state_.layout.units()[i].offset);
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

void Trainer::train_step(int64_t step) {
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
        feed_training(step, static_cast<uint64_t>(k));
        step_.adds = k > 0;
        run_step(step_.adds ? add_plan_ : train_plan_,
                 [&] { gpt_.forward_backward(feeder_.batch(), step_, loss_scale, loss_, consume_); });
    }
    if (!consume_) run_step(update_plan_, [&] { update(); });
    metrics_[step % 2]->start(metrics_memory_.data(), stream_);
    pending_.push_back({step, rate});
    read_metrics(kStepsAhead);
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
    const double multiplied =
        static_cast<double>(report_.parameters - int64_t{config_.positions} * config_.channels);
    return step_tokens() *
           (6.0 * multiplied + 6.0 * config_.layers * config_.channels * static_cast<double>(o_.seq_len));
}

void Trainer::print_step(int64_t step, double loss, double norm, double rate, double seconds) {
    const double tokens = step_tokens();
    // The first steps are slower: products are compiled, graphs recorded. The time left follows the latest.
    seconds_per_step_ = step <= first_step_ + 2 ? seconds : 0.9 * seconds_per_step_ + 0.1 * seconds;
    const int64_t left = static_cast<int64_t>(seconds_per_step_ * static_cast<double>(o_.steps - step - 1));
    printf(
        "step %5lld/%lld %5.1f%% | loss %.6f | norm %.4f | lr %.3e | %8.2f ms | %8.0f tok/s | MFU %4.1f%% | "
        "%lld:%02lld left\n",
        static_cast<long long>(step), static_cast<long long>(o_.steps),
        100.0 * static_cast<double>(step + 1) / static_cast<double>(o_.steps), loss, norm, rate,
        seconds * 1e3, tokens / seconds, 100.0 * step_flops() / seconds / peak_flops_,
        static_cast<long long>(left / 60), static_cast<long long>(left % 60));
    fflush(stdout);
    log_line({{"step", step},
              {"loss", loss},
              {"grad_norm", norm},
              {"lr", rate},
              {"ms", seconds * 1e3},
              {"tokens_per_second", tokens / seconds}});
}

void Trainer::log_line(const nlohmann::ordered_json& line) {
    if (!log_) return;
    if (fprintf(log_.get(), "%s\n", line.dump().c_str()) < 0 || fflush(log_.get()) != 0)
        fail("--log %s: %s", o_.log.c_str(), strerror(errno));
}

// The mean loss over the validation data's first sequences, as many as --eval-batches steps read: the same
// whatever micro-batch was chosen. Nothing when the run is interrupted.
std::optional<double> Trainer::validate() {
    read_metrics();
    const uint64_t batch = static_cast<uint64_t>(o_.batch);
    const uint64_t sequences =
        std::min(val_loader_->sequences_per_epoch(),
                 batch * static_cast<uint64_t>(o_.grad_accum) * static_cast<uint64_t>(o_.eval_batches));
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

// Prints a continuation of the prompt. Token i of the sample after `step` draws random number (step, i). A
// sample longer than the window goes on from its latest half.
void Trainer::sample(int64_t step) {
    read_metrics();
    std::vector<int> text = first_tokens();
    int drawn = 0;
    auto print = [&](int token) {
        const std::string bytes = tokenizer_ ? tokenizer_->decode(token) : std::to_string(token) + " ";
        fwrite(bytes.data(), 1, bytes.size(), stdout);
        fflush(stdout);
    };
    auto choose = [&](const TensorX& device_logits) {
        std::vector<floatX> narrow(static_cast<size_t>(config_.vocabulary));
        copy_to_host(narrow.data(), device_logits.data(), narrow.size() * sizeof(floatX), stream_);
        std::vector<float> logits(narrow.size());
        for (size_t v = 0; v < logits.size(); v++) logits[v] = to_float(narrow[v]);
        const double uniform = random_uniform(o_.seed, kSampleStream, static_cast<uint64_t>(step),
                                              static_cast<uint64_t>(drawn++));
        const int token = sample_token(logits, o_.temperature, o_.top_k, uniform);
        if (tokenizer_ && token == tokenizer_->end_of_text())
            drawn = o_.sample_tokens;
        else
            print(token);
        text.push_back(token);
        return drawn < o_.sample_tokens && !interrupted ? token : -1;
    };
    printf("--- sample after %lld steps ---\n%s", static_cast<long long>(step), o_.prompt.c_str());
    const std::vector<int> first = text;
    arena_.run(sample_plan_,
               [&] { gpt_.generate(first, sample_window() - static_cast<int>(first.size()), choose); });
    while (drawn < o_.sample_tokens && !interrupted) {
        const int half = sample_window() / 2;
        const std::vector<int> latest(text.end() - half, text.end());
        arena_.run(slide_plan_, [&] { gpt_.generate(latest, sample_window() - half, choose); });
    }
    printf("\n---\n");
}

// `evaluated`: whether the validation and the sample that are due at this step were made.
void Trainer::save(int64_t steps_done, bool evaluated) {
    read_metrics();
    const bool folder = !is_depth(o_.model) && std::filesystem::exists(o_.model);
    const int64_t read = first_sequence_ + (steps_done - first_step_) * o_.batch * o_.grad_accum;
    const std::string& tokenizer = folder ? o_.model : o_.resume.empty() ? tokenizer_folder_ : o_.resume;
    saves_.others.erase(steps_done);
    const Progress progress{.step = steps_done,
                            .sequences = read,
                            .precision = kPrecision,
                            .evaluated = evaluated,
                            .options = o_.given,
                            .others = saves_.others};
    save_checkpoint(saves_, state_, progress, tokenizer, o_.steps > 0);
    last_save_ = o_.out;
    printf("saved step %lld in %s\n", static_cast<long long>(steps_done), o_.out.c_str());
}

void Trainer::run() {
    open_device();
    const size_t before = device_bytes_in_use();
    prepare();
    // A scheduler sends SIGTERM when time is up.
    for (int signal : {SIGINT, SIGTERM}) std::signal(signal, on_interrupt);
    const int settled = StepGraphs::kReplays && replays_ ? 2 : 1;  // steps until graphs are recorded
    int64_t step = first_step_;
    auto validate_and_log = [&] {
        const std::optional<double> loss = validate();
        if (!loss) return;
        printf("step %5lld validation loss %.6f\n", static_cast<long long>(step), *loss);
        log_line({{"step", step}, {"val_loss", *loss}});
    };
    auto is_time = [&](int64_t every) { return every > 0 && step > 0 && step % every == 0; };
    for (; step < o_.steps && !interrupted; step++, evaluated_ = false) {
        if (!evaluated_) {
            if (val_data_ && is_time(o_.eval_every)) validate_and_log();
            if (is_time(o_.sample_every) && samples()) sample(step);
            if (interrupted) break;
        }
        if (is_time(o_.save_every) && step > first_step_) save(step, true);
        train_step(step);
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
            printf("interrupted before step %lld\n", static_cast<long long>(step));
        else
            printf("interrupted after step %lld\n", static_cast<long long>(step - 1));
        if (!o_.out.empty()) save(step, evaluated_);
        return;
    }
    if (!o_.out.empty()) save(step, true);
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
    const bool forward_only = o_.bench == "forward";
    BenchReport r = {.memory = report_,
                     .forward_only = forward_only,
                     .profiled = o_.profile_ops,
                     .threads = omp_get_max_threads(),
                     .warmup = o_.bench_warmup,
                     .plans = {},
                     .tokens = step_tokens(),
                     .flops = step_flops() / (forward_only ? 3 : 1),  // a third is forward's
                     .matmul_peak = measured_matmul_flops<floatX>(stream_),
                     .copy_peak = measured_copy_bandwidth(stream_)};
    if (forward_only)
        r.plans = {{&evaluate_plan_, o_.grad_accum}};
    else
        r.plans = {{&train_plan_, 1}, {&add_plan_, o_.grad_accum - 1}, {&update_plan_, 1}};
    const size_t before = device_bytes_in_use();
    prepare();
    const bool graphs = StepGraphs::kReplays && o_.graph == "on" && !o_.profile_ops;
    auto run_one = [&](int64_t step) { forward_only ? forward_step(step) : train_step(step); };
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

// On a CPU, threads that wait for others spin for milliseconds by libgomp's default, which on a machine with
// other work makes a step up to ten times slower; after some microseconds they had better sleep. libgomp
// reads its environment before main, hence the second start.
void spin_briefly([[maybe_unused]] char** argv) {
#ifndef SIMT_GPU
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    setenv("GOMP_SPINCOUNT", "10000", 1);
    execv("/proc/self/exe", argv);  // where there is no /proc, we go on as we are
#endif
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
    spin_briefly(argv);
    try {
        const Options options = parse_options(argc, argv, saved_options);
        if (options.threads > 0) omp_set_num_threads(options.threads);
        Trainer trainer(options);
        if (options.plan)
            trainer.print_plan();
        else if (!options.bench.empty())
            trainer.bench();
        else
            trainer.run();
        if (fflush(stdout) != 0 || ferror(stdout)) fail("what was printed could not all be written");
    } catch (const UserError& e) {
        std::string line = e.what();
        std::replace(line.begin(), line.end(), '\n', ' ');  // names of files may have any
        fprintf(stderr, "train: %s\n", line.c_str());
        return 2;
    } catch (const std::bad_alloc&) {
        fprintf(stderr, "train: out of host memory\n");
        return 2;
    } catch (const std::exception& e) {
        fprintf(stderr, "train: this is a bug: %s\n", e.what());
        return 1;
    }
    return 0;
}
