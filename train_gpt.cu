// train_gpt.cu - the training of a language model, from top to bottom: the loop and the step, a micro-batch,
// a block's forward and backward, the head and the loss. Then come blocks in chunks of rows, forward alone,
// what happens between steps and before the first one, the bench, and main().
//
// Each piece of the step takes its tensors from the arena (llmc/arena.h) where they are first written and
// drops them where they are last read. Whatever a block drops in forward, backward computes again: that is
// all there is to recomputation. Before anything is allocated, the step is rehearsed: a dry run of the same
// code, from which the arena plans where each tensor lives.
//
// The members of Gpt, Step and Trainer are explained in llmc/gpt.h, llmc/step.h and llmc/trainer.h. The
// kernels are in llmc/*.cuh, each with its launcher; matrix products are in llmc/matmul.h.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/bench.h"             // BenchReport
#include "llmc/elementwise.cuh"     // residual_forward()
#include "llmc/gpt.h"               // Gpt: the model
#include "llmc/linear.h"            // linear_forward(), linear_backward(), with LoRA
#include "llmc/loss.h"              // Loss: which rows count, and with which weight
#include "llmc/matmul_search.h"     // use_algorithms_for(): the fastest products
#include "llmc/plan_free_memory.h"  // require_memory()
#include "llmc/ranks_launch.h"      // launch_ranks(), begin_rank()
#include "llmc/rates_calibrate.h"   // calibrate()
#include "llmc/rates_device.h"      // device_peak_flops(), rates_of(): how fast the device is
#include "llmc/resolve.h"           // Resolved: from what was asked for to what a run is
#include "llmc/options.h"           // RunOptions: from the command line, and from a save
#include "llmc/run_start.h"         // print_data(), print_start()
#include "llmc/threads.h"           // start_threads()
#include "llmc/trainer.h"           // Trainer: a training run
#include "llmc/validation.h"        // validation_loss(), report_validation()

// ---- the loop

void Trainer::run() {
    open_device();
    prepare();
    if (!run_.save_base.empty() && !file_exists(run_.save_base)) {  // a resumed run has saved it already
        model_.save_base(run_.save_base, stream_);
        print(run_.notes(), "saved the base in %s\n", run_.save_base);
    }
    stop_on_signals(run_.saves());
    print_start(run_, in_, first_step_, run_.saves());
    try {
        train();
    } catch (const RecoverableError&) {
        // What was trained until then is good. One of several ranks cannot save: it needs the others.
        if (exchange_.is_alone() && run_.saves() && done_ > first_step_ && !saves_.has(done_)) save();
        saves_.remove_fallback();
        throw;
    }
    step_.finish();
    if (agree_to_stop())
        stop();
    else
        finish();
    metrics_.records.end(interrupted != 0);
}

void Trainer::train() {
    // After the first step all device memory is taken; with graphs after the second, which records them.
    const int64_t steps_until_report = std::min<int64_t>(run_.steps, first_step_ + (step_.replays() ? 2 : 1));
    // Between micro-batches a step can be abandoned; a save made there is of the state before the step.
    const auto stops = [this] {
        if (agree_to_stop()) return true;
        save_if_asked();
        return false;
    };
    for (done_ = first_step_; done_ < run_.steps && !agree_to_stop(); done_++, evaluated_ = false) {
        save_if_asked();
        if (!evaluated_) validate_and_sample_if_due();
        if (agree_to_stop() || metrics_.ends_early(run_.early_stopping)) break;
        if (done_ > first_step_ && !saves_.has(done_) && (is_time(run_.save_every) || saves_.is_best(done_)))
            save();
        metrics_.records.check();
        say_where();
        if (!exchange_.is_alone())
            metrics_.compare_ranks(exchange_.gather(std::vector{metrics_.waited_for_ranks()}));
        if (!step_.train(done_, rate_of_step(done_), stops)) break;
        if (done_ + 1 == steps_until_report) {
            metrics_.finish();
            print_taken(report_, taken_bytes());
        }
    }
}

// One training step.
bool Step::train(int64_t number, double rate, const std::function<bool()>& stops) {
    Range range("step");
    metrics_.step_begins(number);
    const float loss_scale = mean_scale(batches_.tokens_with_loss(number));
    if (loss_scale == 0) {
        metrics_.finish();
        // The update is still made: weight decay and momentum act.
        print(stdout, "step %5ld: no token has a loss, so the gradient is zero\n", number + 1);
    }
    updates_.begin_step(number, rate);
    fill_zero(metrics_.loss(), stream_);
    for (int first = 0; first < run_.own_micro_batches(); first += micro_batches_per_pass()) {
        if (first > 0 && stops()) return false;
        for (int k = first; k < first + micro_batches_per_pass(); k++) batches_.feed(number, k, loss_scale);
        const StepPass pass = pass_from(first);
        const bool exchanges = pass.is_last && !exchange_.is_alone();
        run_in(
            pass.accumulate ? plans_.add : plans_.train, [&] { forward_backward_pass(pass, loss_scale); },
            exchanges);
    }
    if (!run_.update_in_backward) run_in(plans_.update, [&] { updates_.update_all(); });
    metrics_.step_ends(number, rate, stream_);
    return true;
}

// The pass of a step that begins with this micro-batch. Only the last pass needs the sums of squares. But
// passes that run the same plan must take the same memory, so every pass that adds to gradients computes the
// sums. On several devices the first pass computes them too, so that its plan, which the report shows, has
// the buffers of the exchange.
StepPass Step::pass_from(int first_micro_batch) const {
    const bool accumulate = first_micro_batch > 0;
    const bool is_last = first_micro_batch + micro_batches_per_pass() >= run_.own_micro_batches();
    return {.accumulate = accumulate,
            .sums_squares = accumulate || is_last || !exchange_.is_alone(),
            .is_last = is_last};
}

// Forward and backward of a pass; also the update, with --update-in-backward.
void Step::forward_backward_pass(const StepPass& pass, float loss_scale) {
    updates_.begin_pass(pass);
    gpt_.forward_backward(batches_.on_device(), micro_, pass, loss_scale, metrics_.loss());
    updates_.end_pass();
}

// Runs operations in the memory of their plan. On a GPU the second run records them as a graph, and later
// ones replay it. A plan has one graph, and another in which ranks exchange gradients. All runs of a graph
// must enqueue the same operations: whatever changes is in device memory or is done by the host (host_act()).
// A graph keeps the loss scale with which it was recorded. That is right, because the scale is the same in
// all steps; only packed batches have different ones, which are in device memory.
template <class Operations>
void Step::run_in(Plan& plan, Operations&& operations, bool exchanges) {
    const auto run = [&] { arena_.run(plan, operations); };
    if (replays())
        graphs_.run({&plan, exchanges}, stream_, run);
    else
        run();
}

// ---- a micro-batch

void Gpt::forward_backward(const std::vector<const DeviceBatch*>& batches, const MicroBatchOptions& options,
                           const StepPass& pass, float loss_scale, TensorF& total_loss) {
    std::vector<MicroBatch> micro_batches = micro_batches_of(batches, options, pass);
    std::optional<Range> range(std::in_place, "forward");  // emplace() ends it and begins the next
    weights_.wait_for_ranks(layout_.embeddings_unit());
    for (MicroBatch& m : micro_batches) m.residual = first_residual(m.batch.inputs, m.rows, 0);
    offloaded_inputs_.take_slots(micro_batches[0].residual.shape());
    forward_blocks(micro_batches, options.keep);

    range.emplace("head");
    weights_.wait_for_ranks(layout_.head_unit());
    EmbeddingAndHeadGradients gradients(gradients_, stream_, trained_.layout,
                                        config_.tied && !weights_.is_frozen(), pass);
    const Head<floatX>& d_head = gradients.take_head();
    for (MicroBatch& m : micro_batches)
        if (layout_.has_head())
            m.d_residual = embedding_and_head_.with_prompt(
                head_and_loss(m, options.head_rows, loss_scale, total_loss, d_head));
        else
            send(Neighbor::Next, m.residual);
    gradients.complete_head();
    for (MicroBatch& m : micro_batches)
        if (!layout_.has_head()) m.d_residual = receive(Neighbor::Next, std::move(m.residual));
    weights_.expect_blocks_for_backward();  // and starts fetching the last of them

    range.emplace("backward");
    backward_blocks(micro_batches, pass);
    Embeddings<floatX>& d_embeddings = gradients.take_embeddings();
    for (MicroBatch& m : micro_batches) {
        // With LoRA nothing before the first block is trained.
        if (!layout_.has_embeddings())
            send(Neighbor::Previous, m.d_residual);
        else if (!weights_.is_frozen() || d_embeddings.prompt)
            embedding_and_head_.embed_backward(d_embeddings, m.d_residual, m.batch, m.rows);
        m.d_residual.drop();
    }
    gradients.complete_embeddings();
}

// The residual stream (B, T, C) before the first block: of embedded tokens, or from the previous stage.
TensorX Gpt::first_residual(const Tensor<int>& tokens, const Rows& rows, int first_position) {
    if (layout_.has_embeddings()) return embedding_and_head_.embed(tokens, rows, first_position);
    return receive(Neighbor::Previous, take("residual", {tokens.rows(), tokens.columns(), config_.channels}));
}

// The micro-batches of a pass before the first block. Only the first one may overwrite gradients.
std::vector<MicroBatch> Gpt::micro_batches_of(const std::vector<const DeviceBatch*>& batches,
                                              const MicroBatchOptions& options, const StepPass& pass) const {
    std::vector<MicroBatch> all;
    for (size_t k = 0; k < batches.size(); k++) {
        MicroBatch m = {.batch = *batches[k],
                        .number = static_cast<int>(k),
                        .accumulate = pass.accumulate || k > 0,
                        .rows = rows_of(*batches[k]),
                        .blocks = {}};
        m.rows.dropout = options.dropout;
        if (options.dropout.key) m.rows.dropout.key += k;
        m.blocks.resize(static_cast<size_t>(config_.layers));
        all.push_back(std::move(m));
    }
    return all;
}

// All micro-batches go through a block before any goes through the next one, so that the weights of a block
// that is streamed are fetched once.
void Gpt::forward_blocks(std::vector<MicroBatch>& micro_batches, const std::vector<Keep>& keep) {
    weights_.expect_blocks();
    for (int l = layout_.stage().first; l < layout_.stage().end; l++) {
        Range range("block", l);
        weights_.wait_for_ranks(Layout::block_unit(l));
        weights_.fetch(l);
        for (MicroBatch& m : micro_batches) {
            BlockActivations& a = m.blocks[static_cast<size_t>(l)];
            a.input = std::move(m.residual);
            const Keep kept = keep[static_cast<size_t>(l)];
            // An input that is offloaded in chunks is stored by chunks of attention if attention has them.
            const bool by_chunk = !kept.middle && attention_goes_in_chunks(a.input);
            offloaded_inputs_.begin_forward(layout_.block_of(l), m.number, a.input, by_chunk);
            m.residual = forward_block(l, a, m.rows, kept);
            offloaded_inputs_.end_forward(layout_.block_of(l), a.input);
        }
    }
    // The last blocks stay in their buffers for backward, unless a streamed head needs the room.
    if (embedding_and_head_.streams_head()) weights_.release();
}

void Gpt::backward_blocks(std::vector<MicroBatch>& micro_batches, const StepPass& pass) {
    gradients_.begin_backward(pass);
    for (int l = layout_.stage().end - 1; l >= layout_.stage().first; l--) {
        Range range("block", l);
        Gradients::OfUnit gradients = gradients_.take(Layout::block_unit(l), pass.accumulate);
        weights_.fetch(l);
        for (MicroBatch& m : micro_batches) {
            BlockActivations& a = m.blocks[static_cast<size_t>(l)];
            // The input is fetched by chunks of attention if backward recomputes the block.
            const bool by_chunk = !a.middle;
            offloaded_inputs_.begin_backward(layout_.block_of(l), m.number, a.input, by_chunk);
            BlockGradient<floatX> g(trained_.layout.block(gradients.all.data(), l), m.accumulate);
            backward_block(l, g, a, m.rows, m.d_residual);
        }
        gradients_.complete(Layout::block_unit(l), gradients);
    }
    weights_.release();
    gradients_.end_backward();
    offloaded_inputs_.release();
}

// ---- a block

// A block's forward, from the residual stream in a.input to the one that is returned. `keep` says which
// tensors stay in `a` for backward. `kv` has the keys and values of earlier rows of the sequence.
TensorX Gpt::forward_block(int layer, BlockActivations& a, const Rows& rows, Keep keep, KvRows* kv) {
    forward_attention(layer, a, rows, keep, kv);
    if (!keep.backward) a.input.drop();
    TensorX output = mlp_.forward(layer, a.mlp, a.middle, rows, keep);
    if (!keep.middle && keep.backward) {  // backward recomputes all from the input
        TensorX input = std::move(a.input);
        a = {};
        a.input = std::move(input);
    }
    return output;
}

// From a.input to a.middle. If nothing of it is kept and there is no cache, a long sequence goes in chunks of
// rows. Otherwise all rows go through attention at once. The projection then goes in the MLP's chunks, if
// there are any; if not, the kernel that adds it to the residual stream also computes the MLP's norm.
void Gpt::forward_attention(int layer, BlockActivations& a, const Rows& rows, Keep keep, KvRows* kv) {
    if (!keep.middle && !kv && attention_goes_in_chunks(a.input)) {
        a.middle = forward_attention_in_chunks(layer, a, rows, keep);
        return;
    }
    forward_attention_rows(layer, a, rows, keep, kv);
    const auto drop_attention = [&] {
        if (!keep.attention) a.attention.out.drop(), a.attention.lse.drop();
    };
    if (mlp_.goes_in_chunks(a.input.rows())) {
        // If it is not kept, the block's output overwrites it, so it has that tensor's name.
        a.middle = take(keep.middle ? "residual_middle" : "residual", a.input.shape());
        add_projection_in_chunks(a.middle, a.input, a.attention.out, layer, rows);
        return drop_attention();
    }
    const TensorX projection =
        attention_projection(layer, a.attention.out, rows, keep.attention ? &a.attention.norm : nullptr);
    drop_attention();
    a.middle = take("residual_middle", a.input.shape());
    a.mlp.norm = norm_.add_and_forward(kNorm2, a.middle, a.input, projection, weights_.block(layer).norm_2);
}

// From a.input to a.attention.out, of all rows or a chunk.
void Gpt::forward_attention_rows(int layer, BlockActivations& a, const Rows& rows, Keep keep, KvRows* kv) {
    const Block<floatX>& w = weights_.block(layer);
    a.norm_1 = norm_.forward(kNorm1, a.input, w.norm_1);
    auto normed = [&] { return a.norm_1.out.view(); };
    attention_.make_qkv(layer, a.attention, normed, w, rows, keep.backward, kv ? kv->rows_before : 0);
    if (!keep.norm || !weights_.backward_reads_input(w.qkv)) a.norm_1.out.drop();
    attention_.forward(layer, a.attention, rows, keep.backward, kv);
    if (!keep.qkv) a.attention.raw_qkv.drop();
    // With norms of heads, qkv can be recomputed from raw_qkv without a product, so it is kept only where the
    // outputs of norms are.
    if (!keep.qkv || (a.attention.raw_qkv && !keep.norm)) a.attention.qkv.drop();
}

// The projection of attention's output (.., query_width()), normalized if the family does that. `kept`, if
// given, gets what backward of this norm needs.
TensorX Gpt::attention_projection(int layer, const TensorX& attended, const Rows& rows, BranchNorm* kept) {
    const Block<floatX>& w = weights_.block(layer);
    TensorX projected = linear_forward(arena_, stream_, "attention_projected", attended, w.projection, rows);
    TensorX out = norm_.of_branch(kAttentionNorm, std::move(projected), w.attention_norm, kept);
    if (const Dropout d = rows.dropout_at(layer, kProjectedPlace, config_.channels))
        dropout(out, out, d, stream_);
    scale(out, out, config_.scales.residual, stream_);
    return out;
}

// middle = x + the projection of attention's output.
void Gpt::add_attention_projection(TensorX& middle, const TensorX& x, const TensorX& attended, int layer,
                                   const Rows& rows, BranchNorm* kept) {
    residual_forward(middle, x, attention_projection(layer, attended, rows, kept), stream_);
}

// A block's backward. Recomputes what forward dropped, and writes or adds the block's gradients. d_residual
// (B, T, C), the gradient of the block's output, becomes that of its input: it is itself the gradient along
// the skip connections, and each half adds the gradient that comes through its norm.
void Gpt::backward_block(int layer, BlockGradient<floatX>& g, BlockActivations& a, const Rows& rows,
                         TensorX& d_residual) {
    if (!a.middle && attention_goes_in_chunks(d_residual)) {
        backward_block_in_chunks(layer, g, a.input, rows, d_residual);
    } else {
        if (!a.middle) forward_attention(layer, a, rows, kRecomputed, nullptr);
        mlp_.backward(layer, g, a.mlp, a.middle, rows, d_residual);
        a.middle.drop();
        backward_attention(layer, g, a, rows, d_residual);
    }
    a = {};
}

// Backward of the attention half: d_residual, the gradient of a.middle, becomes that of a.input. With `kv`
// the rows are a chunk of a sequence; the chunks after it went before.
void Gpt::backward_attention(int layer, BlockGradient<floatX>& g, BlockActivations& a, const Rows& rows,
                             TensorX& d_residual, KvRows* kv) {
    const Block<floatX>& w = weights_.block(layer);
    AttentionActivations& attention = a.attention;
    constexpr bool for_backward = true;
    // take_output() moves the norm's output out of a.norm_1. A product that needs it takes it and frees
    // it, and the next one recomputes it, so that it is not in memory between the two.
    auto make_norm = [&] { return norm_.take_output(a.norm_1, kNorm1, a.input, w.norm_1); };
    if (!attention.qkv)
        attention_.make_qkv(layer, attention, make_norm, w, rows, for_backward, kv ? kv->rows_before : 0);
    if (!attention.out) attention_.forward(layer, attention, rows, for_backward, kv);
    auto attended = [&] { return attention.out.view(); };
    TensorX d_projection =
        branch_backward(arena_, stream_, d_residual,
                        rows.dropout_at(layer, kProjectedPlace, config_.channels), config_.scales.residual);
    auto project = [&] {
        return linear_forward(arena_, stream_, "attention_projected", attention.out, w.projection, rows);
    };
    d_projection = norm_.backward_of_branch(kAttentionNorm, g.attention_norm, std::move(d_projection),
                                            attention.norm, project, w.attention_norm);
    TensorX d_attended = linear_backward(arena_, stream_, "d_attention", g.projection, attended, d_projection,
                                         w.projection, rows);
    d_projection.drop();
    TensorX d_qkv = attention_.backward(layer, attention, std::move(d_attended), w, g, rows, kv);
    TensorX d_norm = linear_backward(arena_, stream_, "d_norm_1", g.qkv, make_norm, d_qkv, w.qkv, rows);
    d_qkv.drop();
    norm_.backward(d_residual, g.norm_1, d_norm, a.input, a.norm_1, w.norm_1);
}

// ---- the head and the loss

// The head and the loss, chunk by chunk of rows: each chunk goes forward and at once back, so that only one
// chunk's logits exist. The gradient of m.residual overwrites it chunk by chunk, and is returned, without the
// rows of a soft prompt: these have no logits.
TensorX Gpt::head_and_loss(MicroBatch& m, int64_t head_rows, float loss_scale, TensorF& total_loss,
                           const Head<floatX>& d_head) {
    TensorX residual = embedding_and_head_.without_prompt(std::move(m.residual));
    const int64_t row_count = residual.rows(), C = config_.channels;
    Loss loss(arena_, m.batch, loss_scale, config_.vocabulary, config_.scales.logit_cap);
    HeadGradient<floatX> g(d_head, m.accumulate);
    g.begin(arena_, stream_, go_in_chunks(row_count, head_rows));
    embedding_and_head_.prefetch_head();
    for_each_chunk(arena_, {}, row_count, head_rows, [&](const Rows&, int64_t first, int64_t count) {
        // x is a copy, because the gradient overwrites these rows of the residual stream.
        TensorX d_x = residual.rows_at(first, count), x = take("head_input", {count, C});
        copy_rows_on_device(x.data(), C, d_x.data(), C, C, count, stream_);
        HeadActivations a = forward_head(x);
        loss.forward_backward(a.logits, first, stream_);
        g.add(arena_, stream_, a.logits, a.norm.out);
        TensorX d_norm = std::move(a.norm.out);  // reuses its memory: g.add() was the last to read it
        embedding_and_head_.logits_backward(d_norm, a.logits);
        a.logits.drop();
        scale(d_norm, d_norm, 1 / config_.scales.logit_divisor, stream_);
        fill_zero(d_x, stream_);
        norm_.backward(d_x, g.norm, d_norm, x, a.norm, weights_.head.norm);
    });
    embedding_and_head_.release_head();
    loss.add_to(total_loss, stream_);
    g.end(stream_);
    return residual;
}

// The head is linear, so a factor of the logits is one of its input, which is smaller.
HeadActivations Gpt::forward_head(const TensorX& x, const Rows& rows) {
    HeadActivations a{norm_.forward(kLastNorm, x, weights_.head.norm), {}};
    scale(a.norm.out, a.norm.out, 1 / config_.scales.logit_divisor, stream_);
    a.logits = embedding_and_head_.logits(a.norm.out, rows);
    soft_cap(a.logits, config_.scales.logit_cap, stream_);
    return a;
}

// ---- a block in chunks of rows, for long sequences

// The attention half of a block, from a.input (B, T, C) to a.middle, one chunk of a sequence at a time. Only
// keys and values exist for a whole sequence, or not even these if they are offloaded; nothing else is kept.
// a.middle overwrites a.input, unless backward needs that on the device.
TensorX Gpt::forward_attention_in_chunks(int layer, BlockActivations& a, const Rows& rows, Keep keep) {
    Block<floatX>& w = weights_.block(layer);
    const DequantizedScope dequantized(arena_, stream_, {&w.qkv, &w.projection});
    const bool stores_input = offloaded_inputs_.stores_by_chunk();  // forward_blocks() decided it
    const TensorX x = a.input.view();
    TensorX middle = stores_input || !keep.backward ? std::move(a.input) : take("residual", x.shape());
    SequenceKeys& keys = attention_.keys();
    keys.begin_block(layer);
    for_each_sequence(arena_, x, rows, [&](const Rows& sequence, int entry, int64_t length) {
        KvRows kv = keys.begin_sequence(layer, length, entry, attention_rows_);
        // `position` is the chunk's in its sequence, chunk.first in the batch.
        const auto forward = [&](const Rows& chunk, int64_t position, int64_t count) {
            BlockActivations of_chunk;
            of_chunk.input = rows_of_sequence(x, chunk, count);
            if (stores_input) offloaded_inputs_.store(of_chunk.input);
            keys.begin_chunk(kv, position);
            // Without lse also in training: it changes no bit of attention's output.
            forward_attention_rows(layer, of_chunk, chunk, kKeepNothing, &kv);
            keys.end_chunk(kv, count);
            TensorX to = middle.rows_at(chunk.first, count);
            add_attention_projection(to, of_chunk.input, of_chunk.attention.out, layer, chunk);
        };
        for_each_chunk(arena_, sequence, length, attention_rows_, forward);
    });
    keys.end_block();
    return middle;
}

// add_attention_projection() in chunks of as many rows as the MLP takes, so that the projection of all rows
// is never in memory.
void Gpt::add_projection_in_chunks(TensorX& middle, const TensorX& x, const TensorX& attended, int layer,
                                   const Rows& rows) {
    Linear<floatX>& w = weights_.block(layer).projection;
    const DequantizedScope dequantized(arena_, stream_, {&w});
    const auto project = [&](const Rows& chunk, int64_t first, int64_t count) {
        TensorX to = middle.rows_at(first, count);
        add_attention_projection(to, x.rows_at(first, count), attended.rows_at(first, count), layer, chunk);
    };
    for_each_chunk(arena_, rows, x.rows(), mlp_.chunk_rows(), project);
}

// Backward of a block, one chunk of a sequence at a time. Of its forward only the input x (B, T, C) is kept,
// or offloaded. First all keys and values are recomputed. Then each chunk, from the last to the first, goes
// forward again and back. Only the chunk itself and later ones see its keys, so the gradients of its keys are
// complete after its own backward, and d_residual becomes the gradient of x chunk by chunk. The keys are
// recomputed from the last chunk too, because offloaded inputs are fetched in that order.
void Gpt::backward_block_in_chunks(int layer, BlockGradient<floatX>& g, const TensorX& x, const Rows& rows,
                                   TensorX& d_residual) {
    Block<floatX>& w = weights_.block(layer);
    SequenceKeys& keys = attention_.keys();
    const DequantizedScope dequantized(arena_, stream_, {&w.qkv, &w.projection, &w.up, &w.down});
    g.begin_chunks(arena_, stream_);
    keys.begin_block_for_backward(layer);
    const auto input = [&](const Rows& chunk, int64_t count) {
        return x ? rows_of_sequence(x, chunk, count) : offloaded_inputs_.fetch(count);
    };
    for_each_sequence(arena_, d_residual, rows, [&](const Rows& sequence, int entry, int64_t length) {
        KvRows kv = keys.begin_sequence(layer, length, entry, attention_rows_);
        const auto make_kv = [&](const Rows& chunk, int64_t position, int64_t count) {
            BlockActivations a;
            keys.begin_chunk(kv, position);
            a.norm_1 = norm_.forward(kNorm1, input(chunk, count), w.norm_1);
            auto normed = [&] { return a.norm_1.out.view(); };
            constexpr bool for_backward = false;  // only the keys and values are needed
            attention_.make_qkv(layer, a.attention, normed, w, chunk, for_backward, kv.rows_before);
            keys.append(a.attention.qkv, kv);
            keys.end_chunk(kv, count);
        };
        for_each_chunk(arena_, sequence, length, attention_rows_, make_kv, From::Last);
        keys.begin_gradients(kv);
        const auto backward = [&](const Rows& chunk, int64_t position, int64_t count) {
            BlockActivations a;
            a.input = input(chunk, count);
            keys.begin_chunk(kv, position);
            forward_attention_rows(layer, a, chunk, kRecomputed, &kv);
            a.middle = take("residual_middle", a.input.shape());
            add_attention_projection(a.middle, a.input, a.attention.out, layer, chunk, &a.attention.norm);
            TensorX d_chunk = rows_of_sequence(d_residual, chunk, count);
            mlp_.backward_in_chunks(layer, g, a.middle, chunk, d_chunk);
            a.middle.drop();
            backward_attention(layer, g, a, chunk, d_chunk, &kv);
        };
        for_each_chunk(arena_, sequence, length, attention_rows_, backward, From::Last);
    });
    keys.end_block();
    g.end_chunks(stream_);
}

// ---- without backward

void Gpt::evaluate(const DeviceBatch& batch, int64_t head_rows, float loss_scale, TensorF& total_loss,
                   TensorF position_losses) {
    Range range("evaluate");
    TensorX last = forward_only(batch.inputs, rows_of(batch), nullptr);
    if (!layout_.has_head()) return send(Neighbor::Next, last);
    const TensorX residual = embedding_and_head_.without_prompt(std::move(last));
    Loss loss(arena_, batch, loss_scale, config_.vocabulary, config_.scales.logit_cap);
    embedding_and_head_.prefetch_head();
    for_each_chunk(arena_, {}, residual.rows(), head_rows, [&](const Rows&, int64_t first, int64_t count) {
        const HeadActivations a = forward_head(residual.rows_at(first, count));
        loss.forward(a.logits, first, stream_);
    });
    embedding_and_head_.release_head();
    loss.add_to(total_loss, stream_);
    if (position_losses) add_position_losses(position_losses, loss.of_rows(), batch.documents, stream_);
}

TensorX Gpt::forward_only(const Tensor<int>& tokens, const Rows& rows, KvCache* cache) {
    TensorX residual = first_residual(tokens, rows, cache ? cache->length : 0);
    weights_.expect_blocks();
    for (int l = layout_.stage().first; l < layout_.stage().end; l++) {
        Range range("block", l);
        weights_.fetch(l);
        BlockActivations a;
        a.input = std::move(residual);
        KvRows kv;
        if (cache) kv = cache->rows_of(l);
        residual = forward_block(l, a, rows, kKeepNothing, cache ? &kv : nullptr);
    }
    weights_.release();
    return residual;
}

TensorX Gpt::logits_of(const TensorX& x, const Rows& rows) {
    embedding_and_head_.prefetch_head();
    HeadActivations a = forward_head(x, rows);
    embedding_and_head_.release_head();
    return std::move(a.logits);
}

// ---- between the steps

// True if a signal has asked the run, or any of its ranks, to stop. All ranks must call it at the same
// points.
bool Trainer::agree_to_stop() {
    if (exchange_.is_alone()) return interrupted;
    // A signal that arrives meanwhile waits for the next call.
    const int agreed = exchange_.largest(interrupted);
    if (agreed) interrupted = agreed;
    return agreed;
}

// Says where the run is, for the line about an error or a lost rank.
void Trainer::say_where() {
    if (exchange_.is_alone()) return;
    const std::string where = format("in step %ld; the last save: %s", done_ + 1, saves_.last());
    exchange_.set_where(where);
    if (run_.rank.is_first()) tell_starter_where(where);
}

// The mean validation loss. It reads as many sequences as --eval-batches steps would, whatever the size of a
// micro-batch. Nothing if the run is interrupted.
std::optional<double> Trainer::validate() {
    step_.finish();
    step_.loss_by_position().begin(stream_);
    const float scale = batches_.validation_loss_scale();
    const auto batch = static_cast<uint64_t>(run_.batch);
    return validation_loss(
        run_, exchange_, metrics_.loss(), stream_, ceil_div(batches_.validation_sequences(), batch),
        [&](uint64_t number) { step_.evaluate(number * batch, scale); }, [this] { return agree_to_stop(); });
}

void Step::evaluate(uint64_t first, float loss_scale) {
    batches_.feed_validation(first, loss_scale, loss_by_position_);
    run_in(plans_.evaluate, [&] { evaluate_batch(loss_scale); });
}

void Step::evaluate_batch(float loss_scale) {
    gpt_.evaluate(batches_.first_on_device(), micro_.head_rows, loss_scale, metrics_.loss(),
                  loss_by_position_.sums());
}

void Trainer::validate_and_log() {
    const std::optional<double> loss = validate();
    if (!loss) return;
    report_validation(done_, *loss, is_time(run_.eval_every), run_, batches_, metrics_, model_);
    step_.loss_by_position().end(done_, *loss, stream_);
    validated_step_ = done_;
    saves_.note_validation(done_);
}

// The validation and the sample that are due before the next step.
void Trainer::validate_and_sample_if_due() {
    if (batches_.validation() && is_time(run_.eval_every) && validated_step_ != done_) validate_and_log();
    if (is_time(run_.sample_every) && agree_to_sample()) sample();
    // A signal may have cut them short. Ranks may see it at different times; agree_to_stop() settles it.
    evaluated_ = !interrupted;
}

void Trainer::sample() {
    step_.finish();
    const auto stops = [this] { return sampling_stops(); };
    const auto explain = [this] {
        if (run_.steps == 0) model_.check_streamed_finite();
    };
    const auto agree = [this](int token) {
        return run_.slices_weights() ? exchange_.gather(std::vector{token})[0] : token;
    };
    const std::string text = sampler_.sample(plans_.sample, plans_.slide, done_, stops, explain, agree);
    metrics_.records.report.add_sample(done_, text);
}

// Saves the last complete step if a signal has asked for it. Before this run has completed a step, the
// request waits.
void Trainer::save_if_asked() {
    if (!run_.saves() || done_ == first_step_) return;
    const int asked = exchange_.is_alone() ? asked_to_save : exchange_.largest(asked_to_save);
    if (!asked) return;
    asked_to_save = 0;
    if (!saves_.has(done_)) save();
}

// The end of a run that was not interrupted: it has made all of its steps, or --early-stopping has ended it.
void Trainer::finish() {
    // True if this run resumed a save in --out and has made no step since.
    const bool is_saved_already = done_ == first_step_ && saves_.goes_on_in_folder();
    // The save comes first, so that a validation that fails loses nothing. The save says already that the
    // validation and the sample are done: a run that resumes it and has steps left does not make them again.
    evaluated_ = true;
    if (run_.saves() && !is_saved_already) save();
    if (batches_.validation() && validated_step_ != done_) validate_and_log();
    saves_.remove_fallback();
    saves_.remark_best(done_);
    saves_.remark_loading();
    if (agree_to_sample()) sample();
    if (finished_.exports() && !agree_to_stop()) {
        metrics_.finish();
        finished_.write_export(plans_.exported, saves_.reader(), done_ > first_step_, saves_.latest());
    }
    if (!run_.merge.empty() && !agree_to_stop()) {
        metrics_.finish();
        finished_.merge(plans_.merge, done_ > first_step_, saves_.latest());
    }
}

// The end of a run that was interrupted.
void Trainer::stop() {
    if (done_ == first_step_)
        print(run_.notes(), "interrupted before step %ld\n", done_ + 1);
    else
        print(stdout, "interrupted after step %ld\n", done_);
    if (run_.saves() && !saves_.has(done_)) save();
    saves_.remove_fallback();
}

// ---- before the first step

Step::Step(const RunConfig& run, const RunInputs& in, Arena& arena, const Stream& stream, RunModel& model,
           Plans& plans)
    : run_(run),
      in_(in),
      arena_(arena),
      stream_(stream),
      model_(model),
      plans_(plans),
      gpt_(arena, stream, model.state, model.frozen_weights(), model.trained(), run.attention != "common"),
      batches_(run, in, stream_),
      square_sums_(square_sums_of(model.trained().layout)),
      slices_(slices_of(run.rank, square_sums_.stretch)),
      exchange_(arena, stream, slices_),
      metrics_(static_cast<int64_t>(model.state.layout.units().size()), run.clip_per_block,
               run.steps == 0 ? 0 : square_sums_.first.back()),
      loss_by_position_(run.loss_by_position.empty() ? 0 : run.seq_len),
      updates_(run, arena, stream, model.trained(), gpt_.weights(), gpt_.gradients(), offloaded_,
               square_sums_, metrics_, exchange_),
      offloaded_(run, in.adapter.prompt_tokens, model.state, model.trained(), pointer_to(model.quantized)),
      replays_(run.graph == "on") {
    batches_.set_sizes();
    micro_ = {.head_rows = run.head_rows, .keep = {}, .dropout = batches_.dropout()};
    for (int level : recompute_levels(run.recompute, in.config.layers))
        micro_.keep.push_back(kRecomputeLevels[level].keep);
    gpt_.set_chunk_rows(run.mlp_rows, run.attention_rows);
    connect_streams();
}

// Tells the model's parts what they stream, and where from.
void Step::connect_streams() {
    offloaded_.connect(gpt_);
    gpt_.weights().wait_for_ranks_with([this](int unit) { updates_.wait_for_weights(unit); });
    if (run_.slices_weights())
        gpt_.weights().stream_blocks_from(&gathered_, Route::ToRanks, gathered_.bytes(), run_.prefetch);
}

Plan Step::rehearse_training(int first_micro_batch, Offsets offsets) {
    const StepPass pass = pass_from(first_micro_batch);
    return arena_.rehearse([&] { forward_backward_pass(pass, 1); }, offsets);
}

Plan Step::rehearse_validation(Offsets offsets) {
    return arena_.rehearse([&] { evaluate_batch(1); }, offsets);
}

MemoryReport Step::rehearse(const Choices& choices, const Rates& rates, Offsets offsets) {
    if (run_.steps > 0) {
        plans_.train = rehearse_training(0, offsets);
        // The last pass takes the same tensors as the first, but its products add.
        const int last = run_.own_micro_batches() - micro_batches_per_pass();
        plans_.add = last > 0 ? rehearse_training(last, offsets) : Plan();
        // The report shows the plan `train` alone, so that has the larger workspace of both.
        plans_.train.workspace = std::max(plans_.train.workspace, plans_.add.workspace);
        // The update depends on the state's formats, and on nothing else that a setting changes.
        if (!run_.update_in_backward && plans_.update.is_empty()) {
            plans_.update = arena_.rehearse([&] { updates_.update_all(); });
            plans_.update_phases.reset();
        }
    }
    if (in_.val_data || run_.bench == "forward") plans_.evaluate = rehearse_validation(Offsets::Planned);
    if (in_.gguf) plans_.load = arena_.rehearse([&] { model_.load_gguf(arena_, stream_, nullptr); });
    if (model_.looks_up_prompt())
        plans_.first_prompt =
            arena_.rehearse([&] { gpt_.embedding_and_head().token_rows(in_.first_prompt); });
    return report_of_run(run_, in_, plans_, {model_, offloaded_, batches_, metrics_, loss_by_position_},
                         choices, rates);
}

void rehearse_services(const RunConfig& run, const RunInputs& in, Step& step) {
    Plans& plans = step.plans();
    Gpt& gpt = step.gpt();
    if (in.samples() && plans.sample.is_empty())
        Sampler(run, in, step.arena(), step.stream(), gpt).rehearse(plans.sample, plans.slide);
    FinishedModel finished(run, in, step.model(), step.arena(), step.stream(), gpt);
    if (!run.merge.empty() && plans.merge.is_empty()) plans.merge = finished.rehearse();
    if (finished.export_uses_arena() && plans.exported.is_empty()) plans.exported = finished.rehearse();
}

void Step::start(const MemoryReport& report) {
    if (!exchange_.is_alone()) exchange_.connect_devices(run_.rank);
    arena_.allocate(plans_.all());
    metrics_.allocate();
    batches_.allocate();
    micro_.dropout = batches_.dropout();  // again: the keys have an address now
    loss_by_position_.allocate();
    const auto shared = exchange_.shared_host_memory(run_.rank);
    model_.allocate(in_.uses_batches() ? run_.seq_len + in_.adapter.prompt_tokens : 0, pointer_to(shared),
                    stream_);
    offloaded_.make(pointer_to(shared));
    connect_streams();
    updates_.allocate();
    if (offloaded_.any() || model_.embeddings || !exchange_.is_alone()) metrics_.count_waiting(stream_);
    gpt_.bind(model_.position_factors());
    check_taken(report);
}

// Loads or initializes what the run begins with, but for a save that it resumes.
void Step::load() {
    // An adapter's model is loaded even on a resume, because the save has only the adapter.
    if (model_.adapter || in_.resumed.empty())
        model_.load(arena_, plans_.load, stream_, offloaded_.blocks_in_files());
    if (in_.resumed.empty() && model_.adapter)
        model_.begin_adapter(arena_, plans_.first_prompt, stream_,
                             [this] { return gpt_.embedding_and_head().token_rows(in_.first_prompt); });
}

Trainer::Trainer(const RunConfig& run, RunInputs& inputs, const Choices& choices)
    : run_(run),
      in_(inputs),
      choices_(choices),
      rates_(rates_of<floatX>(run)),
      model_(run, in_),
      step_(run, in_, arena_, stream_, model_, plans_),
      saves_(run, in_, model_, metrics_, exchange_),
      sampler_(run, in_, arena_, stream_, step_.gpt()),
      finished_(run, in_, model_, arena_, stream_, step_.gpt()) {
    metrics_.explain = [this] { model_.check_streamed_finite(); };
    rehearse();
}

void Trainer::rehearse() {
    rehearse_services(run_, in_, step_);
    report_ = step_.rehearse(choices_, rates_);
}

// Connects this rank to the others. Fails if the ranks' options or plans differ.
void Trainer::connect(RankEngine& engine) {
    step_.connect(engine);
    check_ranks_agree(exchange_, run_.rank, facts_of(run_, in_, report_, plans_));
}

// Opens the device and its stream, and limits how long a launch may take.
void Trainer::open_device() {
    check_device(run_);
    limit_launches(rates_, run_.tf32);
    stream_ = own_stream_.emplace().get();
}

// Checks what can be checked before the first step, allocates the memory, and loads or initializes the model.
void Trainer::prepare() {
    // On a GPU, memory that is in use already is not this run's. On a CPU the plan counts the process too.
    used_before_ = kHostIsDevice ? 0 : device_bytes_in_use();
    if (run_.saves()) saves_.open();
    if (trains()) {
        remark_no_validation(in_, run_.seq_len);
        print_plan();
    }
    require_memory(report_, memory_free_for(run_), trains() ? Suggest::MemoryOption : Suggest::SmallerRun);
    PeakRate peak = {};
    if (trains()) {
        peak = device_peak_flops<floatX>(stream_, report_.allocated());
        print(stdout, "MFU is relative to %.0f GFLOP/s, %s\n", peak.flops / 1e9, peak.of);
    }
    choose_algorithms();
    step_.start(report_);
    batches_.open();
    if (in_.progress) batches_.begin_at(in_.progress->step, in_.progress->sequences);
    saves_.check_room(finished_.exports() && run_.rank.is_first() ? finished_.export_bytes() : 0);
    finished_.remark_export();
    load();
    if (!exchange_.is_alone())
        check_ranks_agree(exchange_, run_.rank,
                          {{"a digest of the weights", digest_of_weights(model_.trained())}});
    if (trains())
        metrics_.print_to(StepLines(
            first_step_, run_.steps, run_.print_every,
            {batches_.tokens_of_step(), step_.flops(), peak.flops * run_.devices, report_.total(),
             [this](double most) { return new_peak<floatX>(most, run_.devices, stream_, arena_); }}));
    std::optional<int64_t> done;
    if (!run_.resume.empty()) done = run_.steps > 0 ? first_step_ : INT64_MAX;
    metrics_.records.open(run_.log, run_.tensorboard, done);
    step_.loss_by_position().open(run_.loss_by_position, done);
    if (!batches_.training() || !trains()) return;
    const std::string data = print_data(run_, in_, batches_, first_step_);
    open_report(metrics_.records.report, run_, report_, plans_.update, rates_, data);
}

// Makes products use the fastest algorithms, if there is a file of them.
void Trainer::choose_algorithms() {
    if (run_.matmul_algorithms.empty()) return;
    exchange_.in_turn(run_.rank, [this] {
        // An algorithm that was found may compute a bias's gradient too. That changes the operations of a
        // step, from which its time is estimated, but not its memory.
        if (use_algorithms_for<floatX>(plans_.all(), run_.matmul_algorithms, stream_)) rehearse();
    });
}

void Trainer::load() {
    step_.load();
    if (!in_.resumed.empty() && run_.steps == 0) {
        model_.load_save();
    } else if (!in_.resumed.empty()) {
        saves_.resume();
        done_ = first_step_ = in_.progress->step;
        evaluated_ = in_.progress->evaluated;
        if (!evaluated_ && in_.progress->validated) validated_step_ = done_;
    }
    if (run_.rank.is_first()) in_.remark_bad_saves();
    in_.release_files();
}

// ---- the bench

void Step::forward(int64_t number) {
    Range range("step");
    fill_zero(metrics_.loss(), stream_);
    for (int k = 0; k < run_.own_micro_batches(); k++) {
        batches_.feed_first(number, k, 1);
        Range forward("forward");
        run_in(plans_.evaluate, [&] { evaluate_batch(1); });
    }
}

// --bench: runs steps, or their forwards alone, and prints what they took and reached.
void Trainer::bench() {
    open_device();
    // Before begin_bench(), which takes memory to measure.
    require_memory(report_, memory_free_for(run_), Suggest::SmallerRun);
    BenchReport r = begin_bench<floatX>(run_, report_, rates_, stream_);
    r.tokens = batches_.tokens_of_step();
    if (r.forward_only)
        r.plans = {{&plans_.evaluate, run_.own_micro_batches()}};
    else
        r.plans = {{&plans_.train, 1}, {&plans_.add, run_.own_micro_batches() - 1}, {&plans_.update, 1}};
    prepare();
    r.flops = step_.flops(r.forward_only);  // known when the data are open
    const auto run_one = [&](int64_t number) {
        if (r.forward_only)
            step_.forward(number);
        else
            step_.train(number, rate_of_step(number), [] { return false; });
    };
    const bool graphs = step_.replays() && !run_.profile_ops;
    step_.set_replays(false);  // a graph has no phases that could be seen
    bench_phases(r, stream_, run_.bench_steps, run_one);
    step_.updates().wait_for_all_weights();
    if (!exchange_.is_alone()) gather_ranks(r, exchange_);
    metrics_.finish();
    step_.set_replays(graphs);
    if (graphs) bench_replays(r, stream_, run_.bench_steps, run_one);
    step_.finish();
    r.taken_bytes = taken_bytes();
    print_bench(r, run_.json);
}

// ---- the program

// Reports the error that is being handled, ends all ranks if there are several, and returns the exit code.
int end_with_error(FILE* errors, const Rank& rank, RankEngine* engine, const std::string& where = "") {
    if (!rank.is_first()) usleep(300000);  // if the first rank has the same error, it prints it
    if (is_terminal(fileno(errors))) fputs(kEraseLine, errors);  // the first rank may have drawn one
    const int code = report_error(errors, rank.is_first() ? "train" : "train: " + rank.text(),
                                  where.empty() ? "" : ", " + where);
    tell_starter_exit_code(code);
    if (engine) engine->end_all(code);
    return code;
}

std::string library_version() { return products_library(); }

int run(int argc, char** argv, RankEngine* engine, FILE* errors) {
    RunOptions command(argc, argv);
    const Asked& asked = command.asked;
    if (command.starts_ranks()) {
        check_gpus_for_ranks(asked.devices);
        check_room_for_ranks(asked);
        command.resumed.reset();  // the ranks hold it themselves
        return launch_ranks(asked.devices, argv);
    }
    if (engine) engine->set_patience(asked.patience);
    command.begin(engine);
    start_threads(asked.threads, asked.rank);
    if (asked.planned_gpu) keep_memory_of_lists();  // the program ends with its answer
    tf32_products = asked.tf32;
    if (!asked.calibrate.empty()) {
        check_device(asked);
        calibrate<floatX>(asked, engine);
        return 0;
    }
    Resolved resolved(asked, engine, std::move(command.resumed));
    const RunConfig& run = resolved.run;
    if (run.show_example > 0) {
        if (run.rank.is_first()) print_example(run, resolved.inputs);
        return 0;
    }
    std::optional<MeasuredEngine> measured;  // before connect(), so that it sees the first exchange
    if (engine && !run.bench.empty()) engine = &measured.emplace(*engine);
    Trainer trainer(run, resolved.inputs, resolved.choices);
    try {
        if (engine) trainer.connect(*engine);
        if (run.plan)
            trainer.print_plan();
        else if (!run.bench.empty())
            trainer.bench();
        else
            trainer.run();
    } catch (...) {
        // All ranks end while the Trainer is there: its destructor could wait for ranks that wait for this
        // one.
        if (engine) return end_with_error(errors, run.rank, engine, engine->where());
        throw;
    }
    if (interrupted) return 128 + interrupted;
    if (fflush(stdout) != 0 || ferror(stdout)) fail("what was printed could not all be written");
    return 0;
}

int main(int argc, char** argv) {
    open_standard_streams();
    set_openmp_environment(argv);
    prepare_signals();
    const Rank rank = rank_of_environment();
    FILE* const errors = rank.is_alone() ? stderr : open_rank_streams(rank);
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // a line is there when it is printed, in a file too
    std::unique_ptr<RankEngine> engine;
    try {
        if (!rank.is_alone()) {
            see_own_gpu(rank);
            measure_free_memory();  // before any of the ranks takes much
            engine = begin_rank(rank, errors);
        }
        const int code = run(argc, argv, engine.get(), errors);
        if (code) tell_starter_exit_code(code);
        return code;
    } catch (...) {
        return end_with_error(errors, rank, engine.get());
    }
}
