// embedding_and_head.h - the two ends of a model, forward and backward: from tokens to the residual stream,
// and from the residual stream to logits. It also has soft prompts, which stand before the embedded tokens,
// and the cases in which an embedding or a head is not on the device as a whole.
//
// A frozen head may be quantized, or streamed from files or host memory: then it is processed in slices of
// the vocabulary. Of an embedding that is not on the device, only the rows of a batch's tokens are fetched.
#pragma once

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "llmc/data_feeder.h"
#include "llmc/embedding.cuh"
#include "llmc/gradients.h"
#include "llmc/linear.h"
#include "llmc/norm_layer.h"
#include "llmc/weights.h"

// Copies the numbers of tokens to the device, (1, count). The host waits for the copy.
inline Tensor<int> tokens_on_device(Arena& arena, Stream stream, const std::vector<int>& tokens) {
    Tensor<int> t = arena.take<int>("inputs", {1, static_cast<int64_t>(tokens.size())}, "input");
    copy_to_device(t.data(), tokens.data(), tokens.size() * sizeof(int), stream);
    return t;
}

class EmbeddingAndHead {
  public:
    EmbeddingAndHead(Arena& arena, const Stream& stream, const ModelConfig& config,
                     const FrozenWeights& frozen, const Weights& weights, const NormLayer& norm)
        : arena_(arena),
          stream_(stream),
          config_(config),
          quantized_(frozen.head),
          offloaded_(frozen.embeddings),
          weights_(weights),
          norm_(norm),
          streamed_(arena, stream, kStreamedVocabulary) {}
    EmbeddingAndHead(const EmbeddingAndHead&) = delete;

    // Sets up the streaming of a head outside the device. Call it after the head was allocated.
    void stream_head() {
        if (offloaded_)
            streamed_.stream_from(offloaded_->route(), offloaded_->streamed_bytes(), kSlicesAhead,
                                  offloaded_->source());
    }
    bool streams_head() const { return offloaded_; }
    // The number of vectors of the soft prompt; 0 without one.
    int64_t prompt_len() const {
        const TensorX& prompt = weights_.embeddings.prompt;
        return prompt ? prompt.rows() : 0;
    }

    // The residual stream (B, prompt_len() + T, C) of tokens (B, T). If first_position is not 0, the tokens
    // follow others and get no soft prompt: (B, T, C).
    TensorX embed(const Tensor<int>& tokens, const Rows& rows, int first_position) {
        const Embeddings<floatX>& w = weights_.embeddings;
        TensorX prompt;
        if (w.prompt && first_position == 0) prompt = w.prompt.view();
        const int64_t length = tokens.columns() + (prompt ? prompt.rows() : 0);
        TensorX x = arena_.take<floatX>(w.norm.weight ? "embedded" : "residual",
                                        {tokens.rows(), length, config_.channels});
        look_up(x, tokens, rows, prompt, first_position);
        if (const Dropout d = dropout_of(rows)) dropout(x, x, d, stream_);
        return w.norm.weight ? std::move(norm_.forward(kEmbeddingNorm, x, w.norm).out) : std::move(x);
    }
    // Adds to the embeddings' gradients g those that follow from d_stream, the gradient of embed()'s output,
    // which it may overwrite.
    void embed_backward(Embeddings<floatX>& g, TensorX& d_stream, const DeviceBatch& batch,
                        const Rows& rows) {
        const Embeddings<floatX>& w = weights_.embeddings;
        if (const Dropout d = dropout_of(rows)) dropout(d_stream, d_stream, d, stream_);
        if (w.norm.weight) {
            TensorX x = arena_.take<floatX>("embedded", d_stream.shape());
            look_up(x, batch.inputs, rows, w.prompt, 0);
            NormedX n = norm_.forward(kEmbeddingNorm, x, w.norm);
            n.out.drop();
            TensorX d_x = arena_.take<floatX>("d_embedded", d_stream.shape(), "gradient");
            fill_zero(d_x, stream_);
            NormGradient<floatX> d_norm{std::move(g.norm)};
            norm_.backward(d_x, d_norm, d_stream, x, n, w.norm);
            g.norm = std::move(d_norm.view);
            d_stream = std::move(d_x);
        }
        embedding_backward(g.token, g.position, d_stream, batch.inputs, batch.rows_by_token,
                           batch.token_starts, *rows.documents, stream_, scales().tokens);
        if (g.prompt) prompt_backward(g.prompt, d_stream, stream_, scales().prompt);
    }

    // The tokens' rows (B, T, C) of a stream (B, prompt_len() + T, C): only these have targets.
    TensorX without_prompt(TensorX stream) {
        const int64_t N = prompt_len(), B = stream.shape().dims[0], C = config_.channels;
        if (N == 0) return stream;
        const int64_t T = stream.shape().dims[1] - N;
        TensorX rows = arena_.take<floatX>("residual", {B, T, C});
        copy_rows_on_device(rows.data(), T * C, stream.at(N * C), (N + T) * C, T * C, B, stream_);
        return rows;
    }
    // The backward of without_prompt(): the gradient (B, prompt_len() + T, C), zero for the soft prompt's
    // rows, which have no loss.
    TensorX with_prompt(TensorX d_tokens) {
        const int64_t N = prompt_len(), B = d_tokens.shape().dims[0], C = config_.channels;
        if (N == 0) return d_tokens;
        const int64_t T = d_tokens.shape().dims[1];
        TensorX d_stream = arena_.take<floatX>("d_residual", {B, N + T, C}, "gradient");
        fill_zero(d_stream, stream_);
        copy_rows_on_device(d_stream.at(N * C), (N + T) * C, d_tokens.data(), T * C, T * C, B, stream_);
        return d_stream;
    }

    // Call around uses of the head: prefetch_head() starts prefetching the slices of a streamed head.
    void prefetch_head() {
        if (offloaded_) streamed_.expect(numbers_in_order(offloaded_->slices()));
    }
    void release_head() { streamed_.release(); }
    // The logits (rows, padded vocabulary) of x (rows, C), the last norm's output. If the head is processed
    // in slices, the padding's columns are not written.
    TensorX logits(const TensorX& x, const Rows& rows) {
        if (!comes_in_slices())
            return linear_forward(arena_, stream_, "logits", x, weights_.head.logits, rows);
        TensorX logits = arena_.take<floatX>("logits", {x.rows(), config_.padded_vocabulary()});
        if (const int64_t few = rows.rows_from_codes(x.rows()); few > 0) {
            const auto multiply = [&](int64_t first, const QuantizedView& slice) {
                const floatX* const no_bias = nullptr;
                multiply_few_rows({logits.at(first), logits.columns(), x.data(), few}, slice, no_bias,
                                  stream_);
            };
            offloaded_ ? for_each_streamed_slice(multiply) : multiply(0, quantized_->view());
            return logits;
        }
        for_each_slice([&](int64_t first, const TensorX& slice) {
            TensorX columns(logits.at(first), {x.rows(), slice.rows()});
            matmul(arena_, stream_, columns, x, slice, {.transpose_b = true, .out_row = logits.columns()});
        });
        return logits;
    }
    // Computes d_x (rows, C) from the gradient of the logits. The terms of slices are added in fp32.
    void logits_backward(TensorX& d_x, const TensorX& d_logits) {
        if (!comes_in_slices()) return matmul(arena_, stream_, d_x, d_logits, weights_.head.logits.weight);
        TensorF sum = arena_.take<float>("d_head_sum", d_x.shape());
        bool accumulate = false;
        for_each_slice([&](int64_t first, const TensorX& slice) {
            const TensorX columns(d_logits.at(first), {d_logits.rows(), slice.rows()});
            matmul(arena_, stream_, sum, columns, slice,
                   {.accumulate = accumulate, .a_row = d_logits.columns()});
            accumulate = true;
        });
        const auto* const bytes = reinterpret_cast<const unsigned char*>(sum.data());
        dequantize(d_x.data(), {&kStoredF32, bytes, sum.rows(), sum.columns()}, stream_);  // rounds
    }

    // The token embeddings (count, C) of these tokens, if the State has no token embedding.
    TensorX token_rows(const Tensor<int>& tokens) {
        const int64_t count = tokens.size(), C = config_.channels;
        TensorX rows = arena_.take<floatX>("token_rows", {count, C});
        if (!offloaded_) {
            dequantize_rows(rows.data(), quantized_->view(), tokens.data(), count, stream_);
            return rows;
        }
        const auto row_bytes = static_cast<int64_t>(offloaded_->embedding_row_bytes());
        note_transfer(
            {Transfer::Vocabulary, false, offloaded_->route(), static_cast<double>(count * row_bytes)});
        note_wait(Transfer::Vocabulary);
        QuantizedView matrix = offloaded_->embedding();
        if (offloaded_->placement() == Placement::Host) {  // a GPU reads pinned memory itself
            dequantize_rows(rows.data(), matrix, tokens.data(), count, stream_);
            return rows;
        }
        const bool as_they_are = matrix.format == &kStored<floatX>;
        const Tensor<uint8_t> in_files =
            as_they_are ? Tensor<uint8_t>() : arena_.take<uint8_t>("token_rows_in_files", {count, row_bytes});
        char* const to =
            reinterpret_cast<char*>(as_they_are ? static_cast<void*>(rows.data()) : in_files.data());
        if (!arena_.rehearsing())
            host_act([this, to, tokens = tokens.view()] {
                const Waiting waiting(Transfer::Vocabulary);
                offloaded_->read_rows(tokens, to, stream_);
            });
        if (!as_they_are) dequantize(rows.data(), {matrix.format, in_files.data(), count, C}, stream_);
        return rows;
    }
    TensorX token_rows(const std::vector<int>& tokens) {
        const Tensor<int> numbers = tokens_on_device(arena_, stream_, tokens);
        return token_rows(numbers);
    }
    // Calls visit(field, rows) for all rows of embeddings and head that the State does not have, some rows at
    // a time.
    template <class Visit>
    void for_each_frozen_row_slice(Visit&& visit) {
        for (int64_t first = 0; offloaded_ && first < config_.vocabulary; first += kHeadSlice) {
            std::vector<int> tokens(static_cast<size_t>(std::min(kHeadSlice, config_.vocabulary - first)));
            std::iota(tokens.begin(), tokens.end(), static_cast<int>(first));
            visit(Field::TokenEmbedding, token_rows(tokens));
        }
        if (!quantized_ && (!offloaded_ || config_.tied)) return;
        prefetch_head();
        for_each_slice([&](int64_t, const TensorX& rows) { visit(head_field(config_), rows); });
        release_head();
    }

  private:
    bool comes_in_slices() const { return quantized_ || offloaded_; }
    // Dropout of the sum of token embeddings and learned position embeddings, as in GPT-2.
    Dropout dropout_of(const Rows& rows) const {
        return weights_.embeddings.position
                   ? rows.dropout_at(config_.layers, kEmbeddingPlace, config_.channels)
                   : Dropout();
    }
    // In the weights' type, as `transformers` has the square root by which Gemma multiplies.
    EmbeddingScales scales() const {
        const auto rounded = [](double scale) {
            return to_float(from_float<floatX>(static_cast<float>(scale)));
        };
        return {rounded(config_.scales.embedding), rounded(config_.scales.prompt)};
    }
    // x (B, .., C) = the vectors of `prompt`, if any, then the embeddings of tokens (B, T).
    void look_up(TensorX& x, const Tensor<int>& tokens, const Rows& rows, const TensorX& prompt,
                 int first_position) {
        const Embeddings<floatX>& w = weights_.embeddings;
        const auto from = [&](const Tensor<int>& numbers, const TensorX& vectors) {
            embedding_forward(x, numbers, vectors, w.position, prompt, first_position,
                              rows.documents->positions, stream_, scales());
        };
        if (w.token) return from(tokens, w.token);
        from(Tensor<int>(nullptr, tokens.shape()), token_rows(tokens));
    }
    // Calls use(first, slice) for the slices of a streamed head; `first` is the number of a slice's first
    // row. One call goes from the first slice to the last, the next call goes back, and so on: the slices at
    // both ends are fetched once for two calls.
    template <class Use>
    void for_each_streamed_slice(Use&& use) {
        const int slices = offloaded_->slices();
        const bool goes_back = slices > 1 && streamed_.holds(slices - 1);
        const From from = goes_back ? From::Last : From::First, next = goes_back ? From::First : From::Last;
        streamed_.expect(numbers_in_order(slices, next));
        for (const int slice : numbers_in_order(slices, from))
            use(offloaded_->first_row(slice), offloaded_->slice(slice, streamed_.fetch(slice)));
    }
    // Calls use(first, slice) with slices (rows, C) of the head in the build's precision.
    template <class Use>
    void for_each_slice(Use&& use) {
        const int64_t V = config_.vocabulary, C = config_.channels;
        const bool as_they_are = offloaded_ && offloaded_->slice(0, nullptr).format == &kStored<floatX>;
        const TensorX buffer =
            as_they_are ? TensorX() : arena_.take<floatX>("dequantized_head", {std::min(kHeadSlice, V), C});
        if (offloaded_)
            return for_each_streamed_slice([&](int64_t first, const QuantizedView& slice) {
                if (as_they_are) return use(first, TensorX(slice.template floats<floatX>(), {slice.rows, C}));
                dequantize(buffer.data(), slice, stream_);
                use(first, buffer.rows_at(0, slice.rows));
            });
        for (int64_t first = 0; first < V; first += kHeadSlice) {
            const TensorX slice = buffer.rows_at(0, std::min(kHeadSlice, V - first));
            dequantize_slice(slice.data(), quantized_->view(), first, slice.rows(), stream_);
            use(first, slice);
        }
    }

    Arena& arena_;
    const Stream& stream_;
    const ModelConfig& config_;
    const QuantizedWeights* const quantized_;     // the head's matrix, or null
    const OffloadedEmbeddings* const offloaded_;  // those outside the device, or null
    const Weights& weights_;
    const NormLayer& norm_;
    BlockStream streamed_;  // slices of the head
};

// The gradients of embeddings and head during one backward pass. Tied weights have one gradient, to which
// both add, so the embeddings' unit is taken before the head. Otherwise it is taken after the blocks'
// backward, so that the two are not in memory together.
class EmbeddingAndHeadGradients {
  public:
    // `tied`: embeddings and head are one trained matrix.
    EmbeddingAndHeadGradients(Gradients& gradients, Stream stream, const Layout& layout, bool tied,
                              const StepPass& pass)
        : gradients_(gradients),
          stream_(stream),
          layout_(layout),
          tied_(tied),
          accumulate_(pass.accumulate) {}

    Head<floatX>& take_head() {
        if (tied_) take_embedding_unit();
        of_head_ = gradients_.take(layout_.head_unit(), accumulate_);
        head_ = layout_.head(of_head_.all.data());
        if (tied_) head_.logits.weight = embeddings_.token.view();
        return head_;
    }
    void complete_head() { gradients_.complete(layout_.head_unit(), of_head_); }
    Embeddings<floatX>& take_embeddings() {
        if (!tied_) take_embedding_unit();
        return embeddings_;
    }
    void complete_embeddings() { gradients_.complete(layout_.embeddings_unit(), of_embeddings_); }

  private:
    // The embeddings' backward adds, so that what it adds to is zeroed first. A tied head overwrites.
    void take_embedding_unit() {
        of_embeddings_ = gradients_.take(layout_.embeddings_unit(), accumulate_);
        embeddings_ = layout_.embeddings(of_embeddings_.all.data());
        if (accumulate_) return;
        if (embeddings_.position) fill_zero(embeddings_.position, stream_);
        if (embeddings_.token && !tied_) fill_zero(embeddings_.token, stream_);
        if (embeddings_.prompt) fill_zero(embeddings_.prompt, stream_);
    }

    Gradients& gradients_;
    const Stream stream_;
    const Layout& layout_;
    const bool tied_, accumulate_;
    Gradients::OfUnit of_embeddings_, of_head_;
    Embeddings<floatX> embeddings_;
    Head<floatX> head_;
};
