// family_gpt2.h - GPT-2 (Radford et al., 2019): layernorms, learned positions, GELU, biases everywhere, a
// tied head, and matrices stored (in, out), as in its Conv1D.
#pragma once

#include "llmc/family.h"

namespace gpt2 {
inline void read(const ConfigReader& r, ModelConfig& c) {
    r.must_be("activation_function", {"gelu_new", "gelu_pytorch_tanh"});
    r.must_be("scale_attn_weights", {true});
    r.must_be("scale_attn_by_inverse_layer_idx", {false});
    r.must_be("add_cross_attention", {false});
    r.must_be("tie_word_embeddings", {true});
    c.vocabulary = r.size("vocab_size", kMostVocabulary);
    c.layers = r.size("n_layer", kMostLayers);
    c.heads = c.kv_heads = r.size("n_head", kMostChannels);
    c.channels = r.size("n_embd", kMostChannels);
    c.positions = r.size(r.either("n_positions", "n_ctx"), kMostPositions);
    if (c.channels % c.heads != 0)
        fail("%s: n_embd %d is not a multiple of n_head %d", r.file(), c.channels, c.heads);
    c.head_size = c.channels / c.heads;
    c.mlp_width = 4 * c.channels;
    r.must_be("n_inner", {c.mlp_width});
    c.norm_epsilon = r.number("layer_norm_epsilon", 1e-5, 0, 1);
}

inline void write(const ModelConfig& c, nlohmann::json& json) {
    json.update({{"activation_function", "gelu_new"},
                 {"n_positions", c.positions},
                 {"n_ctx", c.positions},
                 {"n_embd", c.channels},
                 {"n_layer", c.layers},
                 {"n_head", c.heads},
                 {"n_inner", nullptr},
                 {"layer_norm_epsilon", c.norm_epsilon},
                 {"initializer_range", 0.02},
                 {"scale_attn_weights", true},
                 {"attn_pdrop", 0.0},
                 {"embd_pdrop", 0.0},
                 {"resid_pdrop", 0.0}});
}

inline void begin(ModelConfig& c) {
    c.kv_heads = c.heads;
    c.head_size = c.channels / c.heads;
    c.mlp_width = 4 * c.channels;
}

inline Table embeddings(const ModelConfig& c) {
    Row tokens = row(Field::TokenEmbedding, "wte.weight", {c.vocabulary, c.channels}, Init::Normal);
    tokens.padded = true;
    return {tokens, row(Field::PositionEmbedding, "wpe.weight", {c.positions, c.channels}, Init::Normal)};
}

inline Table block(const ModelConfig& c, const LayerConfig&) {
    const int64_t C = c.channels;
    return {
        row(Field::QkvWeight, "attn.c_attn.weight", {C, 3 * C}, Init::Normal),
        row(Field::AttentionWeight, "attn.c_proj.weight", {C, C}, Init::ResidualNormal),
        row(Field::UpWeight, "mlp.c_fc.weight", {C, 4 * C}, Init::Normal),
        row(Field::DownWeight, "mlp.c_proj.weight", {4 * C, C}, Init::ResidualNormal),
        row(Field::Norm1Weight, "ln_1.weight", {C}, Init::One),
        row(Field::Norm1Bias, "ln_1.bias", {C}, Init::Zero),
        row(Field::QkvBias, "attn.c_attn.bias", {3 * C}, Init::Zero),
        row(Field::AttentionBias, "attn.c_proj.bias", {C}, Init::Zero),
        row(Field::Norm2Weight, "ln_2.weight", {C}, Init::One),
        row(Field::Norm2Bias, "ln_2.bias", {C}, Init::Zero),
        row(Field::UpBias, "mlp.c_fc.bias", {4 * C}, Init::Zero),
        row(Field::DownBias, "mlp.c_proj.bias", {C}, Init::Zero),
    };
}

inline Table head(const ModelConfig& c) {
    return {
        row(Field::LastNormWeight, "ln_f.weight", {c.channels}, Init::One),
        row(Field::LastNormBias, "ln_f.bias", {c.channels}, Init::Zero),
    };
}
}  // namespace gpt2

constexpr Family kGpt2 = {.name = "gpt2",
                          .architecture = "GPT2LMHeadModel",
                          .tokens = {50257, 50256, 50256},
                          .prefix = "transformer.",
                          .norm = NormKind::Layer,
                          .position = PositionKind::Learned,
                          .mlp = MlpKind::Gelu,
                          .by_outputs = false,
                          .read = gpt2::read,
                          .write = gpt2::write,
                          .begin = gpt2::begin,
                          .embeddings = gpt2::embeddings,
                          .block = gpt2::block,
                          .head = gpt2::head,
                          .blocks = "h",
                          .drops = true};
