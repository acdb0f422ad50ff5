// attention_layer.h - the self-attention of a block, forward and backward, between its two linear layers'
// inputs and outputs: the qkv product, the norm and the rotation of heads if the family has them, and causal
// attention. The kernels are in attention.cuh, rmsnorm.cuh and rope.cuh; sequence_keys.h says which keys
// the rows attend to.
#pragma once

#include <utility>

#include "llmc/gradient_sums.cuh"
#include "llmc/linear.h"
#include "llmc/model_positions.h"
#include "llmc/norm_layer.h"
#include "llmc/rope.cuh"
#include "llmc/sequence_keys.h"

// The tensors of attention's forward.
struct AttentionActivations {
    TensorX qkv;                   // (B, T, qkv_width()), as attention reads it
    TensorX raw_qkv;               // the product, if heads are normalized after it
    TensorF query_rstd, key_rstd;  // statistics of that, if all heads are normalized together
    TensorX out;                   // (B, T, query_width()), before the projection
    TensorF lse;                   // (B, heads, T), the log of each softmax's denominator
    BranchNorm norm;               // the norm of the projection, if there is one
};

class AttentionLayer {
  public:
    // `hopper`: use the kernels for compute capability 9.0 where they apply.
    AttentionLayer(Arena& arena, const Stream& stream, const ModelConfig& config, bool hopper)
        : arena_(arena),
          stream_(stream),
          config_(config),
          family_(*config.family),
          keys_(arena, stream, config, hopper) {}
    AttentionLayer(const AttentionLayer&) = delete;

    SequenceKeys& keys() { return keys_; }

    // Computes a.qkv: the product of x, its heads normalized and rotated if the family does that. make_x()
    // returns x; it is not called if backward recomputes a.qkv from the a.raw_qkv that forward kept. The
    // rows' first position is `first_position`.
    template <class MakeX>
    void make_qkv(int layer, AttentionActivations& a, MakeX&& make_x, const Block<floatX>& w,
                  const Rows& rows, bool for_backward, int first_position) {
        const LayerConfig& c = config_.layer(layer);
        const bool norms = static_cast<bool>(w.query_norm.weight);
        const auto product = [&] { return linear_forward(arena_, stream_, "qkv", make_x(), w.qkv, rows); };
        if (norms && for_backward) {
            if (!a.raw_qkv) a.raw_qkv = product();
            a.qkv = arena_.take<floatX>("normed_qkv", a.raw_qkv.shape());
        } else {
            a.qkv = product();
        }
        if (norms && normalizes_each_head(c, w))
            head_norm_forward(a.qkv, a.raw_qkv ? a.raw_qkv : a.qkv, w.query_norm.weight, w.key_norm.weight,
                              c.heads, c.kv_heads, stream_, epsilon(), rms_product(family_.norm));
        else if (norms)
            normalize_together(c, a, w);
        if (const Rotation of = rotation(c); of.rotated > 0)
            rope_forward(a.qkv, keys_.factors_of(layer), of, first_position, rows.positions(a.qkv.rows()),
                         stream_);
    }

    // Computes a.out and, for backward, a.lse. Without `kv`, each sequence of a.qkv attends to itself. With
    // it, rows of one sequence attend to themselves, after they were appended to kv, and to the rows before;
    // or, in decoding several texts, each row to those of its own text.
    void forward(int layer, AttentionActivations& a, const Rows& rows, bool for_backward, KvRows* kv) {
        const int64_t B = a.qkv.shape().dims[0], T = a.qkv.shape().dims[1];
        if (kv && kv->each.empty()) keys_.append(a.qkv, *kv);
        const LayerConfig& c = config_.layer(layer);
        a.out = arena_.take<floatX>("attention", {B, T, c.query_width()});
        if (for_backward) a.lse = arena_.take<float>("attention_lse", {B, c.heads, T});
        const auto forward = [&](const AttentionInput<floatX>& in) {
            attention_forward(a.out.data(), a.lse.data(), in, stream_);
        };
        if (kv && !kv->each.empty()) return forward_each(layer, a, *kv);
        keys_.for_seen_keys(a.qkv, layer, rows, kv, for_backward ? KeysFor::Recomputation : KeysFor::Forward,
                            forward);
    }

    // From the gradient of a.out, returns that of the qkv product, and adds those of the heads' norms to g.
    // With `kv` the rows are a chunk: chunks after it went before, and what they add to the gradients of its
    // keys and values is in the sums of kv. Releases the tensors of `a`.
    TensorX backward(int layer, AttentionActivations& a, TensorX&& d_out, const Block<floatX>& w,
                     BlockGradient<floatX>& g, const Rows& rows, KvRows* kv) {
        TensorF delta = arena_.take<float>("attention_delta", a.lse.shape());
        const auto of_queries = keys_.input(a.qkv, layer, rows, nullptr);  // no key is read
        attention_delta(delta.data(), d_out.data(), a.out.data(), of_queries, stream_);
        a.out.drop();
        backward_in_place(a.qkv, d_out, a.lse, delta, layer, rows, kv);
        delta.drop();
        d_out.drop();
        a.lse.drop();
        TensorX d_qkv = std::move(a.qkv);
        const LayerConfig& c = config_.layer(layer);
        if (const Rotation of = rotation(c); of.rotated > 0)
            rope_backward(d_qkv, keys_.factors_of(layer), of, kv ? kv->rows_before : 0,
                          rows.positions(d_qkv.rows()), stream_);
        if (w.query_norm.weight) {
            normalizes_each_head(c, w) ? backward_of_norms(c, d_qkv, a, w, g)
                                       : backward_together(c, d_qkv, a, w, g);
            a.raw_qkv.drop();
        }
        return d_qkv;
    }

  private:
    // Forward of rows of which each continues another text.
    void forward_each(int layer, AttentionActivations& a, KvRows& kv) {
        const LayerConfig& c = config_.layer(layer);
        int64_t number = 0;
        for (KvRows& sequence : kv.each) {
            const TensorX row = a.qkv.rows_at(number, 1).view({1, 1, c.qkv_width()});
            keys_.append(row, sequence);
            attention_forward(a.out.at(number++ * c.query_width()), static_cast<float*>(nullptr),
                              keys_.input(row, layer, {}, &sequence), stream_);
        }
    }

    // How the layer rotates its queries and keys: no channel of them with other kinds of positions.
    Rotation rotation(const LayerConfig& c) const {
        const RopeScaling& rope = c.rope;
        return {.heads = c.heads,
                .kv_heads = c.kv_heads,
                .head_size = c.head_size,
                .rotated = rotated_channels(config_, c),
                .scale = static_cast<float>(attention_factor(rope)),
                .beta = static_cast<float>(rope.llama_4_scaling_beta),
                .original = rope.original_max_position_embeddings};
    }
    float epsilon() const { return static_cast<float>(config_.norm_epsilon); }

    // Replaces qkv (B, T, qkv_width()) by its gradient. Some kernels read k and v after dk and dv are
    // written: for them dk and dv are buffers, which are copied at the end. With `kv`, attention reads keys
    // and values there, and writes dk and dv to qkv.
    void backward_in_place(TensorX& qkv, const TensorX& d_out, const TensorF& lse, const TensorF& delta,
                           int layer, const Rows& rows, KvRows* kv) {
        const auto run = [&](floatX* dq, floatX* dk, floatX* dv, const AttentionInput<floatX>& in) {
            attention_backward(dq, dk, dv, d_out.data(), lse.data(), delta.data(), in, stream_);
        };
        const LayerConfig& c = config_.layer(layer);
        floatX *const k = qkv.at(keys_.keys_at(c)), *const v = qkv.at(keys_.values_at(c));
        if (kv || kOverwritesKeys)
            return keys_.for_seen_keys(qkv, layer, rows, kv, KeysFor::Backward,
                                       [&](const AttentionInput<floatX>& in) { run(qkv.data(), k, v, in); });
        AttentionInput<floatX> in = keys_.input(qkv, layer, rows, nullptr);
        const int64_t count = qkv.rows(), kv_width = c.kv_width();
        TensorX d_k = arena_.take<floatX>("d_keys", {count, kv_width}, "gradient"),
                d_v = arena_.take<floatX>("d_values", {count, kv_width}, "gradient");
        in.dkv_row = kv_width, in.dkv_batch = in.keys * kv_width, in.dkv_head = c.head_size;
        run(qkv.data(), d_k.data(), d_v.data(), in);
        for (const auto& [from, to] : {std::pair{&d_k, k}, std::pair{&d_v, v}}) {
            const int64_t columns = family_.heads_together ? c.head_size : kv_width;
            const int64_t stride = family_.heads_together ? in.kv_head : in.kv_row;
            copy_rows_on_device(to, stride, from->data(), columns, columns, count * kv_width / columns,
                                stream_);
        }
    }

    // Turns d_qkv, the gradient after the heads' norms, into the gradient before them.
    void backward_of_norms(const LayerConfig& c, TensorX& d_qkv, AttentionActivations& a,
                           const Block<floatX>& w, BlockGradient<floatX>& g) {
        TensorF scratch;
        if (g.query_norm.view.weight)
            scratch = arena_.take<float>("column_sums", head_norm_scratch(d_qkv.rows(), c.head_size));
        const auto backward = [&](auto& g_query, auto& g_key) {
            head_norm_backward(d_qkv, g_query, g_key, scratch, a.raw_qkv, w.query_norm.weight,
                               w.key_norm.weight, c.heads, c.kv_heads, stream_, epsilon(),
                               rms_product(family_.norm));
        };
        g.query_norm.all ? backward(g.query_norm.sums.weight, g.key_norm.sums.weight)
                         : backward(g.query_norm.view.weight, g.key_norm.view.weight);
    }

    // OLMo 2 normalizes the queries of a row together, and its keys, with weights for all heads: the rows of
    // these norms are parts of the rows of qkv.
    static bool normalizes_each_head(const LayerConfig& c, const Block<floatX>& w) {
        return w.query_norm.weight.size() == c.head_size;
    }
    void normalize_together(const LayerConfig& c, AttentionActivations& a, const Block<floatX>& w) {
        const TensorX raw = a.raw_qkv ? a.raw_qkv.view() : a.qkv.view();
        const int64_t rows = raw.rows(), row = raw.columns(), values = row - c.kv_width();
        const auto normalize = [&](const char* name, int64_t first, const TensorX& weight) {
            TensorF rstd = arena_.take<float>(name, {rows});
            TensorX out(a.qkv.at(first), {rows, weight.size()});
            const TensorX x(raw.at(first), out.shape());
            rmsnorm_forward(out, rstd, x, weight, stream_, epsilon(), rms_product(family_.norm), row);
            return rstd;
        };
        a.query_rstd = normalize("query_rstd", 0, w.query_norm.weight);
        a.key_rstd = normalize("key_rstd", c.query_width(), w.key_norm.weight);
        if (a.raw_qkv)
            copy_rows_on_device(a.qkv.at(values), row, raw.at(values), row, c.kv_width(), rows, stream_);
    }
    void backward_together(const LayerConfig& c, TensorX& d_qkv, AttentionActivations& a,
                           const Block<floatX>& w, BlockGradient<floatX>& g) {
        const int64_t rows = d_qkv.rows(), row = d_qkv.columns(), values = row - c.kv_width();
        TensorX d_raw = arena_.take<floatX>("d_raw_qkv", d_qkv.shape(), "gradient");
        fill_zero(d_raw, stream_);
        const auto backward = [&](NormGradient<floatX>& to, int64_t first, const TensorX& weight,
                                  TensorF& rstd) {
            const Shape part{rows, weight.size()};
            TensorX d_x(d_raw.at(first), part);
            const TensorX x(a.raw_qkv.at(first), part), d_out(d_qkv.at(first), part);
            TensorF scratch;
            if (to.view.weight)
                scratch = arena_.take<float>("column_sums", column_sums_scratch(rows, weight.size(), 1));
            to.with([&](auto& norm) {
                rmsnorm_backward(d_x, norm.weight, scratch, d_out, x, rstd, weight, stream_,
                                 rms_product(family_.norm), row);
            });
            rstd.drop();
        };
        backward(g.query_norm, 0, w.query_norm.weight, a.query_rstd);
        backward(g.key_norm, c.query_width(), w.key_norm.weight, a.key_rstd);
        copy_rows_on_device(d_raw.at(values), row, d_qkv.at(values), row, c.kv_width(), rows, stream_);
        d_qkv = std::move(d_raw);
    }

    Arena& arena_;
    const Stream& stream_;
    const ModelConfig& config_;
    const Family& family_;
    SequenceKeys keys_;
};
