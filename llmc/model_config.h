// model_config.h - the sizes of a GPT-2, from a Hugging Face config.json or from a depth.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "llmc/error.h"

struct GptConfig {
    int vocabulary = 0;  // tokens that exist; the rows of wte are padded_vocabulary()
    int positions = 0;   // the longest sequence
    int layers = 0, heads = 0, channels = 0;
    // The tokens that begin and end a text: what a folder says of them is kept for saves.
    int begin_of_text = -1, end_of_text = -1;

    int padded_vocabulary() const { return (vocabulary + 127) / 128 * 128; }
    int head_size() const { return channels / heads; }
    // Whether the sizes are the same.
    bool operator==(const GptConfig& o) const {
        return vocabulary == o.vocabulary && positions == o.positions && layers == o.layers &&
               heads == o.heads && channels == o.channels;
    }
};

constexpr int kMostPositions = 1 << 21;  // whose tiles of attention fit a grid's height

// Fails unless the trainer can run a model of these sizes. `where` opens the message.
inline void check_config(const GptConfig& c, const std::string& where) {
    auto positive = [&](const char* name, int value, int most) {
        if (value < 1 || value > most)
            fail("%s: %s is %d, but must be 1 to %d", where.c_str(), name, value, most);
    };
    positive("vocab_size", c.vocabulary, 1 << 24);
    positive("n_positions", c.positions, kMostPositions);
    positive("n_layer", c.layers, 10000);
    positive("n_embd", c.channels, 1 << 20);
    positive("n_head", c.heads, c.channels);
    if (c.channels % c.heads != 0)
        fail("%s: n_embd %d is not a multiple of n_head %d", where.c_str(), c.channels, c.heads);
    if (c.head_size() > 128)
        fail("%s: heads of %d channels; at most 128 are supported", where.c_str(), c.head_size());
}

// Reads the sizes from a parsed config.json; fails on what is missing, of the wrong type, or not GPT-2's
// arithmetic.
inline GptConfig parse_config(const nlohmann::json& json, const std::string& file) {
    if (!json.is_object()) fail("%s: not a JSON object", file.c_str());
    auto integer = [&](const char* name, int64_t otherwise) -> int {
        const auto it = json.find(name);
        if (it == json.end() && otherwise >= 0) return static_cast<int>(otherwise);
        if (it == json.end()) fail("%s: '%s' is missing", file.c_str(), name);
        if (!it->is_number_integer()) fail("%s: '%s' is not an integer", file.c_str(), name);
        const int64_t value =
            it->is_number_unsigned() && it->get<uint64_t>() > INT32_MAX ? INT64_MAX : it->get<int64_t>();
        if (value < 0 || value > INT32_MAX) fail("%s: '%s' is out of range", file.c_str(), name);
        return static_cast<int>(value);
    };
    // A setting that changes GPT-2's arithmetic may only have the value that we compute.
    auto must_be = [&](const char* name, std::initializer_list<nlohmann::json> allowed) {
        const auto it = json.find(name);
        if (it == json.end() || it->is_null()) return;
        for (const nlohmann::json& value : allowed)
            if (*it == value) return;
        fail("%s: '%s' is %s; only %s is supported", file.c_str(), name, it->dump().substr(0, 60).c_str(),
             allowed.begin()->dump().c_str());
    };
    must_be("model_type", {"gpt2"});
    must_be("activation_function", {"gelu_new", "gelu_pytorch_tanh"});
    must_be("layer_norm_epsilon", {1e-5});
    must_be("scale_attn_weights", {true});
    must_be("scale_attn_by_inverse_layer_idx", {false});
    must_be("add_cross_attention", {false});
    must_be("tie_word_embeddings", {true});
    GptConfig c;
    c.layers = integer("n_layer", -1);
    c.heads = integer("n_head", -1);
    c.channels = integer("n_embd", -1);
    c.vocabulary = integer("vocab_size", -1);
    c.positions = json.contains("n_positions") ? integer("n_positions", -1) : integer("n_ctx", -1);
    check_config(c, file);
    must_be("n_inner", {4 * c.channels});
    const auto token = [&](const char* key) {
        const bool is_one = json.contains(key) && json[key].is_number_unsigned() &&
                            json[key].get<uint64_t>() < static_cast<uint64_t>(c.vocabulary);
        return is_one ? json[key].get<int>() : -1;
    };
    c.begin_of_text = token("bos_token_id");
    c.end_of_text = token("eos_token_id");
    return c;
}

// What parse_config() reads back, with what `transformers` wants beside it.
inline nlohmann::json config_json(const GptConfig& c, const char* dtype) {
    const int usual = c.vocabulary == 50257 ? 50256 : 0;
    return {{"architectures", {"GPT2LMHeadModel"}},
            {"model_type", "gpt2"},
            {"activation_function", "gelu_new"},
            {"vocab_size", c.vocabulary},
            {"n_positions", c.positions},
            {"n_ctx", c.positions},
            {"n_embd", c.channels},
            {"n_layer", c.layers},
            {"n_head", c.heads},
            {"n_inner", nullptr},
            {"layer_norm_epsilon", 1e-5},
            {"initializer_range", 0.02},
            {"scale_attn_weights", true},
            {"tie_word_embeddings", true},
            {"attn_pdrop", 0.0},
            {"embd_pdrop", 0.0},
            {"resid_pdrop", 0.0},
            {"bos_token_id", c.begin_of_text < 0 ? usual : c.begin_of_text},
            {"eos_token_id", c.end_of_text < 0 ? usual : c.end_of_text},
            {"torch_dtype", dtype}};
}

// The model dN, N layers deep, with llm.c's widths: up to 12 layers 64 N channels in N heads; beyond, GPT-2's
// sizes. Fails with what is known when N is not.
inline GptConfig config_of_depth(int layers, int vocabulary, int positions) {
    int channels = 0, heads = 0;
    if (layers >= 1 && layers <= 12) channels = 64 * layers, heads = layers;
    if (layers == 24) channels = 1024, heads = 16;
    if (layers == 36) channels = 1280, heads = 20;
    if (layers == 48) channels = 1600, heads = 25;
    if (channels == 0) fail("--model d%d: known depths are d1 to d12, d24, d36 and d48", layers);
    return {vocabulary, positions, layers, heads, channels};
}
