// family_bloom.h - BLOOM (Scao et al., arXiv:2211.05100): layernorms, one of them after the embedding, ALiBi,
// GELU, biases everywhere, a tied head, and queries, keys and values stored head by head.
#pragma once

#include "llmc/family.h"

namespace bloom {
inline constexpr TokenDefaults kTokens = {250880, 1, 2};

inline void read(const ConfigReader& r, ModelConfig& c) {
    r.must_be("apply_residual_connection_post_layernorm", {false});
    r.must_be("tie_word_embeddings", {true});
    c.vocabulary = r.size("vocab_size", kTokens.vocabulary, kMostVocabulary);
    c.positions = kMostPositions;  // ALiBi has no limit of positions
    c.stated_length = r.has("seq_length") ? r.size("seq_length", 0, kMostPositions) : 0;
    c.layers = r.size(r.either("n_layer", "num_hidden_layers"), 2, kMostLayers);
    c.channels = r.size(r.either("n_embed", "hidden_size"), 64, kMostChannels);
    c.heads = c.kv_heads = r.size(r.either("n_head", "num_attention_heads"), 8, kMostChannels);
    if (c.channels % c.heads != 0)
        fail("%s: hidden_size %d is not a multiple of n_head %d", r.file(), c.channels, c.heads);
    c.head_size = c.channels / c.heads;
    c.mlp_width = 4 * c.channels;
    r.must_be("n_inner", {c.mlp_width});
    c.norm_epsilon = r.number("layer_norm_epsilon", 1e-5, 0, 1);
}

inline void write(const ModelConfig& c, nlohmann::json& json) {
    json.update({{"n_layer", c.layers},
                 {"hidden_size", c.channels},
                 {"n_head", c.heads},
                 {"layer_norm_epsilon", c.norm_epsilon},
                 {"initializer_range", 0.02},
                 {"apply_residual_connection_post_layernorm", false},
                 {"hidden_dropout", 0.0},
                 {"attention_dropout", 0.0}});
    if (c.stated_length > 0) json["seq_length"] = c.stated_length;
}

inline void begin(ModelConfig& c) {
    c.kv_heads = c.heads;
    c.head_size = c.channels / c.heads;
    c.mlp_width = 4 * c.channels;
    c.positions = kMostPositions;
    c.stated_length = 2048;  // as BLOOM's own models
}

inline Table embeddings(const ModelConfig& c) {
    Row tokens =
        row(Field::TokenEmbedding, "word_embeddings.weight", {c.vocabulary, c.channels}, Init::Normal);
    tokens.padded = true;
    return {tokens,
            row(Field::EmbeddingNormWeight, "word_embeddings_layernorm.weight", {c.channels}, Init::One),
            row(Field::EmbeddingNormBias, "word_embeddings_layernorm.bias", {c.channels}, Init::Zero)};
}

inline Table block(const ModelConfig& c, const LayerConfig&) {
    const int64_t C = c.channels;
    return {
        row(Field::QkvWeight, "self_attention.query_key_value.weight", {3 * C, C}, Init::Normal),
        row(Field::AttentionWeight, "self_attention.dense.weight", {C, C}, Init::ResidualNormal),
        row(Field::UpWeight, "mlp.dense_h_to_4h.weight", {4 * C, C}, Init::Normal),
        row(Field::DownWeight, "mlp.dense_4h_to_h.weight", {C, 4 * C}, Init::ResidualNormal),
        row(Field::Norm1Weight, "input_layernorm.weight", {C}, Init::One),
        row(Field::Norm1Bias, "input_layernorm.bias", {C}, Init::Zero),
        row(Field::QkvBias, "self_attention.query_key_value.bias", {3 * C}, Init::Zero),
        row(Field::AttentionBias, "self_attention.dense.bias", {C}, Init::Zero),
        row(Field::Norm2Weight, "post_attention_layernorm.weight", {C}, Init::One),
        row(Field::Norm2Bias, "post_attention_layernorm.bias", {C}, Init::Zero),
        row(Field::UpBias, "mlp.dense_h_to_4h.bias", {4 * C}, Init::Zero),
        row(Field::DownBias, "mlp.dense_4h_to_h.bias", {C}, Init::Zero),
    };
}

inline Table head(const ModelConfig& c) {
    return {
        row(Field::LastNormWeight, "ln_f.weight", {c.channels}, Init::One),
        row(Field::LastNormBias, "ln_f.bias", {c.channels}, Init::Zero),
    };
}
}  // namespace bloom

constexpr Family kBloom = {.name = "bloom",
                           .architecture = "BloomForCausalLM",
                           .tokens = bloom::kTokens,
                           .prefix = "transformer.",
                           .norm = NormKind::Layer,
                           .position = PositionKind::Alibi,
                           .mlp = MlpKind::Gelu,
                           .by_outputs = true,
                           .heads_together = true,
                           .read = bloom::read,
                           .write = bloom::write,
                           .begin = bloom::begin,
                           .embeddings = bloom::embeddings,
                           .block = bloom::block,
                           .head = bloom::head,
                           .blocks = "h",
                           .drops = true};
