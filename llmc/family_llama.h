// family_llama.h - Llama 2 to 3.2 (Touvron et al., arXiv:2307.09288; Dubey et al., arXiv:2407.21783),
// TinyLlama, SmolLM2: RMSNorm, rotary positions, grouped key/value heads, SwiGLU, no biases, with or without
// a tied head. Mistral is a Llama with a sliding window. Qwen differs only in details too (family_qwen.h).
#pragma once

#include <algorithm>
#include <iterator>

#include "llmc/family.h"

namespace llama {
// Values for keys that a config.json lacks: those of the family's class in `transformers`.
struct Defaults {
    TokenDefaults tokens;
    int mlp_width, positions;
    int kv_heads = 0;   // 0: as many as heads
    int head_size = 0;  // 0: channels / heads
    double theta = 10000, epsilon = 1e-6;
    bool tied = false;
    int original_positions = 0;  // those of training before they were scaled; 0: as many as `positions`
    bool may_rotate_partly = false, may_have_biases = false;
    int layers = 32, channels = 4096, heads = 32;
    bool has_silu = true;          // else the family checks its activation itself
    const char* rope_layers = "";  // the type of layers whose rotary parameters are the model's
};

constexpr double kTiny = 1e-30, kHuge = 1e30;  // fp32 has no powers outside this range

// The number of positions that the model was trained with. It may be in `p`, the rotary parameters, or in
// `r`, the whole config.json, which `transformers` looks at first; without it, it is the model's.
inline int read_original_positions(const ConfigReader& r, const ConfigReader& p, int positions) {
    const char* const key = "original_max_position_embeddings";
    const int original = p.has(key) ? p.size(key, INT32_MAX) : r.size(key, positions, INT32_MAX);
    r.must_be(key, {original});
    return original;
}

inline void read_llama3(const ConfigReader& r, const ConfigReader& p, int positions, RopeScaling& rope) {
    rope.factor = p.number("factor", 0, kHuge);
    rope.low_freq_factor = p.number("low_freq_factor", 0, kHuge);
    rope.high_freq_factor = p.number("high_freq_factor", 0, kHuge);
    rope.original_max_position_embeddings = read_original_positions(r, p, positions);
    if (rope.high_freq_factor <= rope.low_freq_factor)
        fail("%s: 'high_freq_factor' %g must be above 'low_freq_factor' %g", p.file(), rope.high_freq_factor,
             rope.low_freq_factor);
}

// A factor that is null means the model's positions divided by those of its training.
inline void read_yarn(const ConfigReader& r, const ConfigReader& p, int positions, RopeScaling& rope) {
    // In `transformers` zero means that the key is not set.
    const auto number = [&](const char* key, double otherwise) {
        return p.has(key) && p.json()[key] == 0 ? otherwise : p.number(key, otherwise, kTiny, kHuge);
    };
    rope.original_max_position_embeddings = read_original_positions(r, p, positions);
    rope.factor = p.json().contains("factor") && !p.has("factor")
                      ? double(positions) / rope.original_max_position_embeddings
                      : p.number("factor", kTiny, kHuge);
    rope.beta_fast = number("beta_fast", 32);
    rope.beta_slow = number("beta_slow", 1);
    rope.attention_factor = p.number("attention_factor", 0, kTiny, kHuge);
    rope.mscale = number("mscale", 0);
    rope.mscale_all_dim = number("mscale_all_dim", 0);
    rope.truncate = p.truth("truncate", true);
    if (rope.beta_fast < rope.beta_slow)
        fail("%s: 'beta_fast' %g must not be below 'beta_slow' %g", p.file(), rope.beta_fast, rope.beta_slow);
}

// Each list has a number for each pair of channels that is rotated.
inline void read_longrope(const ConfigReader& p, int positions, int pairs, RopeScaling& rope) {
    rope.factor = p.number("factor", double(positions) / rope.original_max_position_embeddings, 0, kHuge);
    rope.attention_factor = p.number("attention_factor", 0, kTiny, kHuge);
    rope.short_factor = p.numbers("short_factor", pairs, kTiny, kHuge);
    rope.long_factor = p.numbers("long_factor", pairs, kTiny, kHuge);
}

// The keys of rotary positions, in the form of `transformers` 4 (rope_scaling) or 5 (rope_parameters). If a
// file has both, the older one counts, as in `transformers`.
inline ConfigReader rope_parameters(const ConfigReader& r) {
    const bool older = r.has("rope_scaling") && !r.json()["rope_scaling"].empty();
    return r.object(older ? "rope_scaling" : "rope_parameters");
}

// Reads the scaling of rotary positions for heads of `head_size` channels. `layer_type` names the layers, if
// those of each type have parameters of their own.
inline RopeScaling read_rope(const ConfigReader& r, const Defaults& d, int positions, int head_size,
                             const char* layer_type = "") {
    const ConfigReader all = rope_parameters(r);
    const ConfigReader p = all.has(layer_type) ? all.object(layer_type) : all;
    for (const auto& [key, value] : p.json().items())
        if (value.is_object()) p.refuse(key, "one value for all layers");
    RopeScaling rope;
    for (const ConfigReader* reader : {&r, &p}) {
        if (!d.may_rotate_partly) reader->must_be("partial_rotary_factor", {1.0});
        if (reader->has("partial_rotary_factor"))
            rope.partial_rotary_factor = reader->number("partial_rotary_factor", 0, 1 + kTiny);
    }
    if (rope.rotated(head_size) == 0)
        (p.has("partial_rotary_factor") ? p : r)
            .refuse("partial_rotary_factor", "two channels of a head or more");
    rope.theta = (p.has("rope_theta") ? p : r).number("rope_theta", d.theta, 1, kHuge);
    const std::string type = p.text(p.either("rope_type", "type"), "default");
    const auto known = std::find(std::begin(kRopeNames), std::end(kRopeNames), type);
    if (known == std::end(kRopeNames))
        fail("%s: the rotary scaling \"%s\" is not supported; %s are", p.file(), printable(type),
             joined(kRopeNames, ", "));
    rope.type = static_cast<RopeType>(known - std::begin(kRopeNames));
    if (rope.type == RopeType::kLinear) rope.factor = p.number("factor", 0, kHuge);
    if (rope.type == RopeType::kLlama3) read_llama3(r, p, positions, rope);
    if (rope.type == RopeType::kYarn) read_yarn(r, p, positions, rope);
    if (rope.type == RopeType::kLongrope) {
        // A class that has a value of its own does not look into the rotary parameters.
        rope.original_max_position_embeddings =
            d.original_positions > 0
                ? r.size("original_max_position_embeddings", d.original_positions, INT32_MAX)
                : read_original_positions(r, p, positions);
        read_longrope(p, positions, rope.rotated(head_size) / 2, rope);
    }
    if (rope.type == RopeType::kDynamic) {
        rope.factor = p.number("factor", 0, kHuge);
        rope.original_max_position_embeddings = positions;
        if (head_size <= 2) fail("%s: \"dynamic\" cannot scale heads of %d channels", p.file(), head_size);
    }
    return rope;
}

// Writes what read_rope() reads; null if there is no scaling.
inline nlohmann::json rope_json(const RopeScaling& rope) {
    if (rope.type == RopeType::kDefault) return {};
    const char* const name = kRopeNames[static_cast<int>(rope.type)];
    nlohmann::json json = {{"rope_type", name}, {"factor", rope.factor}};
    if (rope.type != RopeType::kLlama3) json["type"] = name;  // for tools that only know the older key
    const bool is_longrope = rope.type == RopeType::kLongrope;
    if (is_longrope) json.update({{"short_factor", rope.short_factor}, {"long_factor", rope.long_factor}});
    if (rope.type == RopeType::kLlama3 || rope.type == RopeType::kYarn || is_longrope)
        json["original_max_position_embeddings"] = rope.original_max_position_embeddings;
    if (rope.type == RopeType::kLlama3)
        json.update({{"low_freq_factor", rope.low_freq_factor}, {"high_freq_factor", rope.high_freq_factor}});
    if (rope.attention_factor > 0) json["attention_factor"] = rope.attention_factor;
    if (rope.type != RopeType::kYarn) return json;
    json.update({{"beta_fast", rope.beta_fast}, {"beta_slow", rope.beta_slow}});
    if (!rope.truncate) json["truncate"] = false;
    if (rope.mscale > 0) json["mscale"] = rope.mscale;
    if (rope.mscale_all_dim > 0) json["mscale_all_dim"] = rope.mscale_all_dim;
    return json;
}

// Reads the keys that all families of this kind have.
inline void read_with(const ConfigReader& r, ModelConfig& c, const Defaults& d) {
    if (d.has_silu) r.must_be("hidden_act", {"silu", "swish"});
    if (!d.may_have_biases) r.must_be("attention_bias", {false});
    c.attention_bias = r.truth("attention_bias", false);
    r.must_be("mlp_bias", {false});
    c.vocabulary = r.size("vocab_size", d.tokens.vocabulary, kMostVocabulary);
    c.positions = r.size("max_position_embeddings", d.positions, kMostPositions);
    c.layers = r.size("num_hidden_layers", d.layers, kMostLayers);
    c.channels = r.size("hidden_size", d.channels, kMostChannels);
    c.heads = r.size("num_attention_heads", d.heads, kMostChannels);
    // If the key is null, there are as many key/value heads as heads; if it is missing, the class's default.
    const int kv_heads = r.json().contains("num_key_value_heads") || d.kv_heads == 0 ? c.heads : d.kv_heads;
    c.kv_heads = r.size("num_key_value_heads", kv_heads, kMostChannels);
    const int share = c.channels % c.heads == 0 ? c.channels / c.heads : 0;
    c.head_size = r.size("head_dim", d.head_size > 0 ? d.head_size : share, kMostHeadSize);
    if (c.head_size == 0)
        fail("%s: hidden_size %d is not a multiple of num_attention_heads %d", r.file(), c.channels, c.heads);
    if (c.head_size % 2 != 0)
        fail("%s: heads of %d channels cannot be rotated in pairs", r.file(), c.head_size);
    c.mlp_width = r.size("intermediate_size", d.mlp_width, kMostMlpWidth);
    c.norm_epsilon = r.number("rms_norm_eps", d.epsilon, 0, 1);
    c.tied = r.truth("tie_word_embeddings", d.tied);
    c.rope = read_rope(r, d, c.positions, c.head_size, d.rope_layers);
}

inline constexpr TokenDefaults kTokens = {32000, 1, 2};

inline void read(const ConfigReader& r, ModelConfig& c) {
    read_with(r, c, {.tokens = kTokens, .mlp_width = 11008, .positions = 2048, .may_have_biases = true});
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
                 {"rope_scaling", rope_json(c.rope)}});
    if (c.attention_bias) json["attention_bias"] = true;
    if (c.rope.partial_rotary_factor != 1) json["partial_rotary_factor"] = c.rope.partial_rotary_factor;
}

// Grouped key/value heads (3 or 2 heads per group if that divides them), a gated MLP with as many parameters
// as a plain one of four times the channels, and a tied head.
inline void begin(ModelConfig& c) {
    c.kv_heads = c.heads / (c.heads % 3 == 0 ? 3 : c.heads % 2 == 0 ? 2 : 1);
    c.head_size = c.channels / c.heads;
    c.mlp_width = (8 * c.channels / 3 + 63) / 64 * 64;
}

inline Table embeddings(const ModelConfig& c) {
    Row tokens = row(Field::TokenEmbedding, "embed_tokens.weight", {c.vocabulary, c.channels}, Init::Normal);
    tokens.padded = c.tied;  // only the head needs padded rows
    return {tokens};
}

// The biases of queries, keys and values.
inline Row qkv_bias(const LayerConfig& layer) {
    const int64_t Q = layer.query_width(), KV = layer.kv_width();
    return {
        Field::QkvBias,
        {{"self_attn.q_proj.bias", {Q}}, {"self_attn.k_proj.bias", {KV}}, {"self_attn.v_proj.bias", {KV}}},
        Init::Zero,
        false,
        false,
        "self_attn.qkv_proj.bias"};
}

inline Table block(const ModelConfig& c, const LayerConfig& layer) {
    const int64_t C = c.channels, Q = layer.query_width(), KV = layer.kv_width(), F = layer.mlp_width;
    Table table = {
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
    if (c.attention_bias) {
        table.push_back(qkv_bias(layer));
        table.push_back(row(Field::AttentionBias, "self_attn.o_proj.bias", {C}, Init::Zero));
    }
    return table;
}

// Adds the norms of queries and keys, whose weights have these sizes.
inline void add_query_key_norms(Table& table, int64_t query, int64_t key, Init init) {
    table.push_back(row(Field::QueryNormWeight, "self_attn.q_norm.weight", {query}, init));
    table.push_back(row(Field::KeyNormWeight, "self_attn.k_norm.weight", {key}, init));
}

inline Table head(const ModelConfig& c) {
    Table table;
    if (!c.tied) table.push_back(own_head(c));
    table.push_back(row(Field::LastNormWeight, "norm.weight", {c.channels}, Init::One));
    return table;
}
}  // namespace llama

constexpr Family kLlama = {.name = "llama",
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
                           .blocks = "layers",
                           .gguf = {.rotary_pairs = true}};

// ---- Mistral (Jiang et al., arXiv:2310.06825)

namespace mistral {
// Which layers have a sliding window, as 'layer_types' says; without it, those for which slides(i) is true.
template <class Slides>
std::vector<bool> sliding_layers(const ConfigReader& r, const ModelConfig& c, Slides&& slides) {
    const nlohmann::json& types = r.has("layer_types") ? r.json()["layer_types"] : nlohmann::json();
    if (!types.is_null() && (!types.is_array() || types.size() != static_cast<size_t>(c.layers)))
        r.refuse("layer_types", format("a list of %d layers", c.layers));
    std::vector<bool> sliding;
    for (int l = 0; l < c.layers; l++) {
        if (types.is_null()) {
            sliding.push_back(slides(l));
            continue;
        }
        const nlohmann::json& type = types[static_cast<size_t>(l)];
        if (type != "full_attention" && type != "sliding_attention")
            fail("%s: 'layer_types' has %s; full_attention and sliding_attention are supported", r.file(),
                 printable(type.dump()));
        sliding.push_back(type == "sliding_attention");
    }
    return sliding;
}

// Reads the windows of layers: all have `window`, if it is not 0, or those that slides() or 'layer_types'
// choose. These layers rotate by `local` if it is given.
template <class Slides>
void read_windows(const ConfigReader& r, ModelConfig& c, int window, Slides&& slides,
                  const RopeScaling* local = nullptr) {
    const std::vector<bool> sliding =
        sliding_layers(r, c, [&](int layer) { return window > 0 && slides(layer); });
    c.change_layers([&](int l, LayerConfig& layer) {
        if (!sliding[static_cast<size_t>(l)]) return;
        if (window == 0)
            fail("%s: 'layer_types' has sliding_attention, and no 'sliding_window' is set", r.file());
        layer.window = window;
        if (local) layer.rope = *local;
    });
}
// Reads the windows of a family whose layers all have the same: `transformers` ignores 'layer_types' there.
inline void read_same_windows(const ConfigReader& r, ModelConfig& c, int window) {
    read_windows(r, c, window, [](int) { return true; });
    if (c.window != window || !c.uneven.empty())
        fail("%s: 'layer_types' has full_attention, and 'sliding_window' is %d", r.file(), window);
}

// The list 'layer_types'.
inline nlohmann::json layer_types(const ModelConfig& c) {
    nlohmann::json types = nlohmann::json::array();
    for (int l = 0; l < c.layers; l++)
        types.push_back(c.layer(l).window > 0 ? "sliding_attention" : "full_attention");
    return types;
}

// Where layers with a window have a rotation of their own: it is not scaled, and has `theta` unless
// 'rope_parameters' names another.
inline RopeScaling read_local_rope(const ConfigReader& r, double theta) {
    const ConfigReader p = r.object("rope_parameters").object("sliding_attention");
    p.must_be("rope_type", {"default"});
    RopeScaling rope;
    rope.theta = p.number("rope_theta", theta, 1, llama::kHuge);
    return rope;
}

// Writes each layer's type, and the window of those that have one.
inline void write_windows(const ModelConfig& c, nlohmann::json& json) {
    json["layer_types"] = layer_types(c);
    if (c.shortest_window() > 0) json["sliding_window"] = c.shortest_window();
}

inline void read(const ConfigReader& r, ModelConfig& c) {
    llama::read_with(r, c,
                     {.tokens = llama::kTokens, .mlp_width = 14336, .positions = 131072, .kv_heads = 8});
    // Null means no window; a missing key means the window of the first Mistral.
    const int window = r.json().contains("sliding_window") ? r.size("sliding_window", 0, INT32_MAX) : 4096;
    read_same_windows(r, c, window);
}

inline void write(const ModelConfig& c, nlohmann::json& json) {
    llama::write(c, json);
    json["sliding_window"] = c.window > 0 ? nlohmann::json(c.window) : nlohmann::json();
}
}  // namespace mistral

constexpr Family kMistral = [] {
    Family family = kLlama;
    family.name = "mistral";
    family.gguf.architecture = "llama";
    family.architecture = "MistralForCausalLM";
    family.read = mistral::read;
    family.write = mistral::write;
    return family;
}();
