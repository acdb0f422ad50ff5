// fuzz_config.cpp - libFuzzer target: a config.json of each family with keys overwritten. What is read must
// be written and read back the same; a model of few layers must have a layout, and its rotary frequencies
// must be numbers.
//
// Input: a byte that picks the family, then changes: a byte that picks the key, a byte that says where the
// key is set and whether the value is wrapped in a list, and the value as JSON up to a newline.

#include <cmath>
#include <string>
#include <string_view>

#include "llmc/model.h"
#include "llmc/model_positions.h"
#include "test/fuzz.h"

namespace {
using nlohmann::json;

// All keys that a family reads, and keys that are refused.
constexpr const char* kKeys[] = {"model_type",
                                 "vocab_size",
                                 "n_layer",
                                 "num_hidden_layers",
                                 "n_head",
                                 "num_attention_heads",
                                 "num_key_value_heads",
                                 "n_embd",
                                 "n_embed",
                                 "hidden_size",
                                 "head_dim",
                                 "intermediate_size",
                                 "n_inner",
                                 "n_positions",
                                 "n_ctx",
                                 "max_position_embeddings",
                                 "layer_norm_epsilon",
                                 "rms_norm_eps",
                                 "tie_word_embeddings",
                                 "activation_function",
                                 "hidden_act",
                                 "attention_bias",
                                 "mlp_bias",
                                 "scale_attn_weights",
                                 "add_cross_attention",
                                 "apply_residual_connection_post_layernorm",
                                 "sliding_window",
                                 "use_sliding_window",
                                 "max_window_layers",
                                 "layer_types",
                                 "rope_theta",
                                 "rope_scaling",
                                 "rope_parameters",
                                 "rope_type",
                                 "type",
                                 "factor",
                                 "low_freq_factor",
                                 "high_freq_factor",
                                 "original_max_position_embeddings",
                                 "partial_rotary_factor",
                                 "short_factor",
                                 "long_factor",
                                 "attention_factor",
                                 "mscale",
                                 "mscale_all_dim",
                                 "llama_4_scaling_beta",
                                 "no_rope_layers",
                                 "no_rope_layer_interval",
                                 "embedding_multiplier",
                                 "residual_multiplier",
                                 "attention_multiplier",
                                 "logits_scaling",
                                 "hidden_activation",
                                 "query_pre_attn_scalar",
                                 "attn_logit_softcapping",
                                 "final_logit_softcapping",
                                 "rope_local_base_freq",
                                 "sliding_window_pattern",
                                 "use_bidirectional_attention",
                                 "full_attention",
                                 "sliding_attention",
                                 "pad_token_id",
                                 "bos_token_id",
                                 "eos_token_id",
                                 "quantization_config",
                                 "num_local_experts"};

json changed(json config, std::string_view changes) {
    while (changes.size() >= 2) {
        const auto key = static_cast<unsigned char>(changes[0]),
                   where = static_cast<unsigned char>(changes[1]);
        const std::string_view text = changes.substr(2, changes.find('\n', 2) - 2);
        changes.remove_prefix(std::min(changes.size(), text.size() + 3));
        json value = json::parse(text, nullptr, false);
        if (value.is_discarded()) value = "text";
        if (where & 4) value = json::array({value, value});
        const char* const objects[] = {"", "rope_scaling", "rope_parameters", "quantization_config"};
        json* object = &config;
        if (where & 3) object = &config[objects[where & 3]];
        if (!object->is_object()) *object = json::object();
        (*object)[kKeys[key % std::size(kKeys)]] = value;
    }
    return config;
}

// The trainer's own file must not be refused.
ModelConfig read_back(const ModelConfig& c) {
    try {
        return parse_config(json::parse(config_json(c, "float32").dump()), "written");
    } catch (const UserError&) {
        __builtin_trap();
    }
}

void check(const json& config) {
    const ModelConfig c = parse_config(config, "config.json"), again = read_back(c);
    if (!(again == c) || again.begin_of_text != c.begin_of_text || again.end_of_text != c.end_of_text)
        __builtin_trap();
    for (const float frequency : inverse_frequencies(c.head_size / 2 * 2, c.rope))
        if (!std::isfinite(frequency) || frequency < 0) __builtin_trap();
    if (c.layers > 20) return;
    const Layout layout(c);
    if (layout.count() < 1 || layout.size() < layout.count() || layout.multiplied() > layout.count())
        __builtin_trap();
}
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size) {
    if (size < 1) return 0;
    const Family* family = kFamilies[input[0] % std::size(kFamilies)];
    const json good = config_json(new_config({family, 6}, 300, 128), "float32");
    parse_or_refuse([&] { check(changed(good, {reinterpret_cast<const char*>(input) + 1, size - 1})); });
    return 0;
}
