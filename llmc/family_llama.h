// family_llama.h - Llama 2 to 3.2 (Touvron et al., arXiv:2307.09288; Dubey et al., arXiv:2407.21783),
// TinyLlama, SmolLM2: RMSNorm, rotary positions, grouped key/value heads, SwiGLU, no biases, a tied or an own
// head. Mistral and Qwen are the same but for details: their files begin with what stands here.
#pragma once

#include "llmc/family.h"

namespace llama {
// What a config.json leaves out: the values of the family's class in `transformers`.
struct Defaults {
    TokenDefaults tokens;
    int mlp_width, positions;
    int kv_heads = 0;   // 0: as many as heads
    int head_size = 0;  // 0: channels / heads
    int window = 0;
    double theta = 10000;
};

// The rotary scaling, as version 4 of `transformers` writes it (rope_theta, rope_scaling) and as 5 does
// (rope_parameters). Where a file has both, `transformers` takes the older.
inline RopeScaling read_rope(const ConfigReader& r, double theta) {
    constexpr double kHuge = 1e30;  // beyond, fp32 has no powers
    const bool older = r.has("rope_scaling") && !r.json()["rope_scaling"].empty();
    const ConfigReader p = r.object(older ? "rope_scaling" : "rope_parameters");
    for (const auto& [key, value] : p.json().items())
        if (value.is_structured()) p.refuse(key, "one value for all layers");
    for (const ConfigReader* reader : {&r, &p}) reader->must_be("partial_rotary_factor", {1.0});
    RopeScaling rope;
    rope.theta = (p.has("rope_theta") ? p : r).number("rope_theta", theta, 1, kHuge);
    const std::string type = p.text(p.either("rope_type", "type"), "default");
    if (type == "default") return rope;
    if (type != "linear" && type != "llama3")
        fail("%s: the rotary scaling \"%s\" is not supported; default, linear and llama3 are",
             p.file().c_str(), printable(type).c_str());
    rope.type = type == "linear" ? RopeType::kLinear : RopeType::kLlama3;
    rope.factor = p.number("factor", 0, kHuge);
    if (rope.type == RopeType::kLinear) return rope;
    rope.low_freq_factor = p.number("low_freq_factor", 0, kHuge);
    rope.high_freq_factor = p.number("high_freq_factor", 0, kHuge);
    rope.original_max_position_embeddings = p.size("original_max_position_embeddings", INT32_MAX);
    r.must_be("original_max_position_embeddings", {rope.original_max_position_embeddings});
    if (rope.high_freq_factor <= rope.low_freq_factor)
        fail("%s: 'high_freq_factor' %g must be above 'low_freq_factor' %g", p.file().c_str(),
             rope.high_freq_factor, rope.low_freq_factor);
    return rope;
}

// What all families of this kind have in their config.json.
inline void read_with(const ConfigReader& r, ModelConfig& c, const Defaults& d) {
    r.must_be("hidden_act", {"silu", "swish"});
    for (const char* bias : {"attention_bias", "mlp_bias"}) r.must_be(bias, {false});
    c.vocabulary = r.size("vocab_size", d.tokens.vocabulary, kMostVocabulary);
    c.positions = r.size("max_position_embeddings", d.positions, kMostPositions);
    c.layers = r.size("num_hidden_layers", 32, kMostLayers);
    c.channels = r.size("hidden_size", 4096, kMostChannels);
    c.heads = r.size("num_attention_heads", 32, kMostChannels);
    // A key that is null means as many as heads; one that is missing, the class' number.
    const int kv_heads = r.json().contains("num_key_value_heads") || d.kv_heads == 0 ? c.heads : d.kv_heads;
    c.kv_heads = r.size("num_key_value_heads", kv_heads, kMostChannels);
    const int share = c.channels % c.heads == 0 ? c.channels / c.heads : 0;
    c.head_size = r.size("head_dim", d.head_size > 0 ? d.head_size : share, kMostHeadSize);
    if (c.head_size == 0)
        fail("%s: hidden_size %d is not a multiple of num_attention_heads %d", r.file().c_str(), c.channels,
             c.heads);
    if (c.head_size % 2 != 0)
        fail("%s: heads of %d channels cannot be rotated in pairs", r.file().c_str(), c.head_size);
    c.mlp_width = r.size("intermediate_size", d.mlp_width, kMostMlpWidth);
    c.norm_epsilon = r.number("rms_norm_eps", 1e-6, 0, 1);
    c.tied = r.truth("tie_word_embeddings", false);
    c.rope = read_rope(r, d.theta);
}

inline constexpr TokenDefaults kTokens = {32000, 1, 2};

inline void read(const ConfigReader& r, ModelConfig& c) {
    read_with(r, c, {.tokens = kTokens, .mlp_width = 11008, .positions = 2048});
}

inline void write(const ModelConfig& c, nlohmann::json& json) {
    json.update({{"hidden_act", "silu"},
                 {"max_position_embeddings", c.positions},
                 {"num_hidden_layers", c.layers},
                 {"hidden_size", c.channels},
                 {"num_attention_heads", c.heads},
                 {"num_key_value_heads", c.kv_heads},
                 {"head_dim", c.head_size},
                 {"intermediate_size", c.mlp_width},
                 {"rms_norm_eps", c.norm_epsilon},
                 {"initializer_range", 0.02},
                 {"attention_dropout", 0.0},
                 {"rope_theta", c.rope.theta},
                 {"rope_scaling", nullptr}});
    if (c.rope.type == RopeType::kLinear)
        json["rope_scaling"] = {{"rope_type", "linear"}, {"type", "linear"}, {"factor", c.rope.factor}};
    if (c.rope.type == RopeType::kLlama3)
        json["rope_scaling"] = {
            {"rope_type", "llama3"},
            {"factor", c.rope.factor},
            {"low_freq_factor", c.rope.low_freq_factor},
            {"high_freq_factor", c.rope.high_freq_factor},
            {"original_max_position_embeddings", c.rope.original_max_position_embeddings}};
}

// Groups of three or two heads, a gated MLP with the parameters of a plain one of four times the channels, a
// tied head.
inline void begin(ModelConfig& c) {
    c.kv_heads = c.heads / (c.heads % 3 == 0 ? 3 : c.heads % 2 == 0 ? 2 : 1);
    c.head_size = c.channels / c.heads;
    c.mlp_width = (8 * c.channels / 3 + 63) / 64 * 64;
}

inline Table embeddings(const ModelConfig& c) {
    Row tokens = row(Field::TokenEmbedding, "embed_tokens.weight", {c.vocabulary, c.channels}, Init::Normal);
    tokens.padded = c.tied;  // only the head's rows have to be
    return {tokens};
}

inline Table block(const ModelConfig& c) {
    const int64_t C = c.channels, Q = c.query_width(), KV = c.kv_width(), F = c.mlp_width;
    return {
        {Field::QkvWeight,
         {{"self_attn.q_proj.weight", {Q, C}},
          {"self_attn.k_proj.weight", {KV, C}},
          {"self_attn.v_proj.weight", {KV, C}}},
         Init::Normal,
         true,
         false,
         "self_attn.qkv_proj.weight"},
        row(Field::AttentionWeight, "self_attn.o_proj.weight", {C, Q}, Init::ResidualNormal),
        {Field::UpWeight,
         {{"mlp.gate_proj.weight", {F, C}}, {"mlp.up_proj.weight", {F, C}}},
         Init::Normal,
         true,
         false,
         "mlp.gate_up_proj.weight"},
        row(Field::DownWeight, "mlp.down_proj.weight", {C, F}, Init::ResidualNormal),
        row(Field::Norm1Weight, "input_layernorm.weight", {C}, Init::One),
        row(Field::Norm2Weight, "post_attention_layernorm.weight", {C}, Init::One),
    };
}

inline Table head(const ModelConfig& c) {
    Table table;
    if (!c.tied) table.push_back(own_head(c));
    table.push_back(row(Field::LastNormWeight, "norm.weight", {c.channels}, Init::One));
    return table;
}
}  // namespace llama

inline constexpr Family kLlama = {.name = "llama",
                                  .architecture = "LlamaForCausalLM",
                                  .tokens = llama::kTokens,
                                  .prefix = "model.",
                                  .norm = NormKind::Rms,
                                  .position = PositionKind::Rotary,
                                  .mlp = MlpKind::SwiGlu,
                                  .by_outputs = true,
                                  .read = llama::read,
                                  .write = llama::write,
                                  .begin = llama::begin,
                                  .embeddings = llama::embeddings,
                                  .block = llama::block,
                                  .head = llama::head,
                                  .blocks = "layers"};
