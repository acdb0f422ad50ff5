// gpt.h - the model, as train_gpt.cu defines it: what a micro-batch and a block have in memory, and the
// operations of a step. Look here for what a member of Gpt is.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "llmc/arena.h"                // Arena: plans a step's memory by a dry run
#include "llmc/attention_layer.h"      // AttentionLayer: qkv, heads, attention
#include "llmc/embedding_and_head.h"   // EmbeddingAndHead and its gradients
#include "llmc/gradient_sums.cuh"      // BlockGradient: where gradients go
#include "llmc/graph.h"                // host_act(): what a graph cannot have
#include "llmc/gradients.h"            // Gradients: of each unit, until the update
#include "llmc/mlp_layer.h"            // MlpLayer: norm, products, activation
#include "llmc/model.h"                // Block, Linear: views of a layer's parameters
#include "llmc/model_positions.h"      // position_factors()
#include "llmc/norm_layer.h"           // NormLayer
#include "llmc/offload_activations.h"  // OffloadedInputs: of blocks, in host memory or a file
#include "llmc/recompute.h"            // Keep: what a block keeps for backward
#include "llmc/rows.h"                 // Rows, for_each_chunk(), branch_backward()
#include "llmc/sequence_keys.h"        // SequenceKeys: keys of rows that went before
#include "llmc/tensor.h"               // floatX, TensorX, TensorF
#include "llmc/weights.h"              // Weights: of each block, wherever they are kept

// How a micro-batch is run.
struct MicroBatchOptions {
    int64_t head_rows = 0;   // rows that have logits at a time; 0: all
    std::vector<Keep> keep;  // what each layer keeps for backward
    DropoutOptions dropout;  // its key is the first micro-batch's; the keys of the others follow in memory
};

// The tensors of a block's forward, in the order in which they are written. The residual streams and the
// norms' outputs are (B, T, C). A tensor that forward has dropped is absent. If the MLP goes in chunks, `mlp`
// is empty.
struct BlockActivations {
    TensorX input;  // the residual stream at the block's start
    NormedX norm_1;
    AttentionActivations attention;
    TensorX middle;  // the residual stream after attention
    MlpActivations mlp;
};

// The last norm and the logits of some rows.
struct HeadActivations {
    NormedX norm;    // (rows, C)
    TensorX logits;  // (rows, padded vocabulary)
};

// A micro-batch in the model.
struct MicroBatch {
    const DeviceBatch& batch;
    int number;       // among those that go through the model together
    bool accumulate;  // adds to the gradients of earlier micro-batches
    Rows rows;        // all of the batch
    std::vector<BlockActivations> blocks;
    TensorX residual = {};    // the residual stream (B, T, C) after the latest block
    TensorX d_residual = {};  // backward: its gradient
};

// How a stage of a model exchanges residual streams (B, T, C) and their gradients with the stages before and
// after it. Both sides take micro-batches in the same order. Work that is queued on the stream after send()
// may overwrite the rows.
enum class Neighbor { Previous, Next };
class StageLinks {
  public:
    virtual ~StageLinks() = default;
    virtual void send(Neighbor to, const TensorX& rows, Stream stream) = 0;
    virtual void receive(Neighbor from, TensorX& rows, Stream stream) = 0;
};

// The model, or a stage of it: views of its parameters, and the operations of a step. It owns no memory:
// parameters are in a State (llmc/state.h), everything else is in the arena. The trained parameters are this
// State, or that of an adapter; then the model is frozen.
class Gpt {
  public:
    // The stream may be created later, before the first run.
    Gpt(Arena& arena, const Stream& stream, const State<floatX>& model, const FrozenWeights& frozen,
        const State<floatX>& trained, bool hopper_attention)
        : arena_(arena),
          stream_(stream),
          layout_(model.layout),
          config_(model.layout.config()),
          trained_(trained),
          weights_(arena, stream, model, frozen, trained),
          gradients_(arena, stream, trained),
          norm_(arena, stream, config_),
          mlp_(arena, stream, config_, weights_, norm_),
          attention_(arena, stream, config_, hopper_attention),
          embedding_and_head_(arena, stream, config_, frozen, weights_, norm_),
          offloaded_inputs_(arena, stream) {}

    // Forward and backward of one micro-batch, or of several that go through each block together
    // (--by-block). Adds loss_scale, or the batch's own scale, times the sum of its losses to `total_loss`
    // (1).
    void forward_backward(const std::vector<const DeviceBatch*>& batches, const MicroBatchOptions& options,
                          const StepPass& pass, float loss_scale, TensorF& total_loss);
    // Runs forward only, with the logits of `head_rows` rows at a time (0: all), and adds the losses to
    // `total_loss` as forward_backward() does. If position_losses (T) is given, adds the loss of each
    // position to it.
    void evaluate(const DeviceBatch& batch, int64_t head_rows, float loss_scale, TensorF& total_loss,
                  TensorF position_losses = {});
    // The last block's output for `tokens` (B, T), without backward. With a cache the tokens follow the
    // cache->length that it has. Their keys and values are written there; the caller adds to cache->length.
    TensorX forward_only(const Tensor<int>& tokens, const Rows& rows, KvCache* cache);
    // The logits (1, padded vocabulary) of the last row of x (.., C), which is the last block's output.
    TensorX last_logits(const TensorX& x) {
        return logits_of(x.rows_at(x.rows() - 1, 1), Rows{.rows_of_texts = 1});
    }
    // The logits (rows, padded vocabulary) of x (.., C). A head in slices leaves the padding unwritten.
    TensorX logits_of(const TensorX& x, const Rows& rows);
    int64_t prompt_len() const { return embedding_and_head_.prompt_len(); }
    // Connects a stage to its neighbors. Without it, steps of a stage can only be rehearsed.
    void connect(StageLinks& links) { links_ = &links; }

    // Its parts, which are connected to what is outside the arena (OffloadedMemory::connect()).
    Weights& weights() { return weights_; }
    Gradients& gradients() { return gradients_; }
    EmbeddingAndHead& embedding_and_head() { return embedding_and_head_; }
    OffloadedInputs& offloaded_inputs() { return offloaded_inputs_; }
    SequenceKeys& keys() { return attention_.keys(); }
    // Sets the sizes of chunks: rows of the batch in an MLP, queries of a sequence in attention. 0: all.
    void set_chunk_rows(int64_t mlp, int64_t attention) {
        mlp_.set_chunk_rows(mlp);
        attention_rows_ = attention;
    }
    // Points the views at the states' memory, and at the position factors' on the device. Call it when these
    // are allocated.
    void bind(float* position_factors_at) {
        keys().bind(TensorF(position_factors_at, {static_cast<int64_t>(position_factors(config_).size())}));
        weights_.bind();
    }

  private:
    // A pass of micro-batches.
    std::vector<MicroBatch> micro_batches_of(const std::vector<const DeviceBatch*>& batches,
                                             const MicroBatchOptions& options, const StepPass& pass) const;
    // All rows of a batch. With a soft prompt each sequence has one example, so there are no documents.
    Rows rows_of(const DeviceBatch& batch) const {
        return {.documents = prompt_len() == 0 ? &batch.documents : &kWholeSequences};
    }
    TensorX first_residual(const Tensor<int>& tokens, const Rows& rows, int first_position);
    void forward_blocks(std::vector<MicroBatch>& micro_batches, const std::vector<Keep>& keep);
    void backward_blocks(std::vector<MicroBatch>& micro_batches, const StepPass& pass);
    void send(Neighbor to, const TensorX& rows) {
        if (arena_.rehearsing()) return;
        host_act([this, to, sent = rows.view()] { links_->send(to, sent, stream_); });
    }
    TensorX receive(Neighbor from, TensorX into) {
        if (arena_.rehearsing()) return into;
        host_act(
            [this, from, received = into.view()]() mutable { links_->receive(from, received, stream_); });
        return into;
    }
    TensorX head_and_loss(MicroBatch& m, int64_t head_rows, float loss_scale, TensorF& total_loss,
                          const Head<floatX>& d_head);
    HeadActivations forward_head(const TensorX& x, const Rows& rows = {});

    // A block.
    TensorX forward_block(int layer, BlockActivations& a, const Rows& rows, Keep keep, KvRows* kv = nullptr);
    void forward_attention(int layer, BlockActivations& a, const Rows& rows, Keep keep, KvRows* kv);
    void forward_attention_rows(int layer, BlockActivations& a, const Rows& rows, Keep keep, KvRows* kv);
    TensorX attention_projection(int layer, const TensorX& attended, const Rows& rows, BranchNorm* kept);
    void add_attention_projection(TensorX& middle, const TensorX& x, const TensorX& attended, int layer,
                                  const Rows& rows, BranchNorm* kept = nullptr);
    void backward_block(int layer, BlockGradient<floatX>& g, BlockActivations& a, const Rows& rows,
                        TensorX& d_residual);
    void backward_attention(int layer, BlockGradient<floatX>& g, BlockActivations& a, const Rows& rows,
                            TensorX& d_residual, KvRows* kv = nullptr);

    // A block in chunks of rows.
    bool attention_goes_in_chunks(const TensorX& x) const {
        return go_in_chunks(x.shape().dims[1], attention_rows_);
    }
    TensorX forward_attention_in_chunks(int layer, BlockActivations& a, const Rows& rows, Keep keep);
    void add_projection_in_chunks(TensorX& middle, const TensorX& x, const TensorX& attended, int layer,
                                  const Rows& rows);
    void backward_block_in_chunks(int layer, BlockGradient<floatX>& g, const TensorX& x, const Rows& rows,
                                  TensorX& d_residual);

    TensorX take(const char* name, Shape shape) { return arena_.take<floatX>(name, shape); }

    Arena& arena_;
    const Stream& stream_;
    const Layout& layout_;  // of the model, or the stage
    const ModelConfig& config_;
    const State<floatX>& trained_;
    StageLinks* links_ = nullptr;
    Weights weights_;
    Gradients gradients_;
    const NormLayer norm_;
    MlpLayer mlp_;
    AttentionLayer attention_;
    EmbeddingAndHead embedding_and_head_;  // from tokens to the residual stream, and from there to logits
    OffloadedInputs offloaded_inputs_;     // of blocks
    int64_t attention_rows_ = 0;           // a chunk's queries of a sequence; 0: all
};
