// model_config.h - the sizes of a model and other settings that its family (family.h) leaves open, and
// checked reading of a Hugging Face config.json.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/file.h"

// ---- the scaling of rotary positions

enum class RopeType { kDefault, kLinear, kLlama3, kYarn, kDynamic, kLongrope, kNone };
inline constexpr const char* kRopeNames[] = {"default", "linear", "llama3", "yarn", "dynamic", "longrope"};

// The fields are named as in `rope_parameters` of a config.json. The defaults for `llama3` are those of Llama
// 3.1. Lengths are in tokens.
struct RopeScaling {
    RopeType type = RopeType::kDefault;  // kNone: the layer does not rotate queries and keys
    double theta = 10000;
    double partial_rotary_factor = 1;  // the share of a head's channels, the first ones, that is rotated
    double factor = 8;                 // maximum context length over that of training; not for kDefault
    double low_freq_factor = 1, high_freq_factor = 4;  // only llama3
    // Only llama3, yarn, dynamic and longrope: the context length of training, which files with `dynamic`
    // call max_position_embeddings.
    int original_max_position_embeddings = 8192;
    // Only yarn. A pair that makes more than beta_fast turns in the original context is not scaled, and one
    // that makes fewer than beta_slow is divided by the factor. truncate: round these limits to whole pairs.
    double beta_fast = 32, beta_slow = 1;
    bool truncate = true;
    // Cosines and sines are multiplied by attention_factor; if it is 0, it follows from factor and, if both
    // are set, from mscale and mscale_all_dim.
    double attention_factor = 0, mscale = 0, mscale_all_dim = 0;
    // Only longrope: what each frequency is divided by in sequences up to the original length, and in longer
    // ones.
    std::vector<double> short_factor = {}, long_factor = {};
    // Queries at position p are multiplied by 1 + llama_4_scaling_beta ln(1 + floor(p / original length)).
    double llama_4_scaling_beta = 0;

    // How many of a head's channels are rotated: an even number.
    int rotated(int head_size) const {
        return type == RopeType::kNone ? 0 : static_cast<int>(head_size * partial_rotary_factor) / 2 * 2;
    }
    // Whether frequencies depend on the length of a sequence.
    bool goes_by_length() const { return type == RopeType::kDynamic || type == RopeType::kLongrope; }
    bool operator==(const RopeScaling&) const = default;
};

// ---- a model

struct Family;

// What the layers of a model may differ in.
struct LayerConfig {
    int heads = 0, kv_heads = 0;  // of queries; of keys and values, each for heads / kv_heads heads
    int head_size = 0;            // head_size times heads need not equal channels
    int mlp_width = 0;            // of the activation's output
    int window = 0;               // keys that a query attends to, itself included; 0: all before it
    RopeScaling rope = {};        // for rotary positions

    int64_t query_width() const { return int64_t{heads} * head_size; }
    int64_t kv_width() const { return int64_t{kv_heads} * head_size; }
    int64_t qkv_width() const { return query_width() + 2 * kv_width(); }
    bool operator==(const LayerConfig&) const = default;
};

// Constants by which a family multiplies what passes through the model.
struct Scales {
    double embedding = 1;  // of the embedded tokens
    double prompt = 1;     // of a soft prompt's vectors
    double residual = 1;   // of what attention and MLP add to the residual stream
    double attention = 0;  // of the products of queries and keys; 0: 1 / sqrt(head_size)
    double logit_divisor = 1;
    // A soft cap c of the products of queries and keys, and of logits: x becomes c tanh(x / c). 0: none.
    double attention_cap = 0, logit_cap = 0;

    bool operator==(const Scales&) const = default;
};

// The fields of LayerConfig are those of all layers or, if layers differ, of those that attend the furthest:
// use layer(l).
struct ModelConfig : LayerConfig {
    const Family* family = nullptr;
    int vocabulary = 0;  // number of tokens; the embedding has padded_vocabulary() rows
    int positions = 0;   // the longest sequence without extension by `rope`: see longest()
    // The length that a model without a limit of positions states for other programs; 0: none.
    int stated_length = 0;
    // If learned positions are extended (model_positions.h): the rows that the model's files have; else 0.
    int grown_from = 0;
    int layers = 0, channels = 0;
    std::vector<LayerConfig> uneven;  // if layers differ: each of them; else empty
    double norm_epsilon = 1e-5;
    bool tied = true;  // the head's matrix is the token embedding
    // Queries, keys, values and the projection of attention's output have biases, in families whose config
    // leaves that open.
    bool attention_bias = false;
    Scales scales;
    bool has_nf4 = false;  // the model's files have the blocks' matrices in NF4
    // The tokens that begin and end a text, as the model's folder says; they are copied to saves. Generation
    // stops at `stops`, which may be other tokens.
    std::vector<int> begin_of_text, end_of_text, stops;
    std::vector<int> padding;   // the padding token, if any; only copied to saves
    nlohmann::json generation;  // generation_config.json of the model's folder, for saves; null: none

    int padded_vocabulary() const { return (vocabulary + 127) / 128 * 128; }
    // The longest sequence, in tokens.
    int longest() const;
    // A layer, from 0 on.
    const LayerConfig& layer(int number) const {
        return uneven.empty() ? *this : uneven[static_cast<size_t>(number)];
    }
    // Sets what each layer is.
    void set_layers(std::vector<LayerConfig> all);
    // Changes the layers, all of which are as the model's fields say: calls change(number, layer) for each.
    template <class Change>
    void change_layers(Change&& change) {
        std::vector<LayerConfig> all(static_cast<size_t>(layers), *this);
        for (int l = 0; l < layers; l++) change(l, all[static_cast<size_t>(l)]);
        set_layers(std::move(all));
    }
    // The shortest window of any layer that has one; 0 if none has.
    int shortest_window() const;
    // The kv_width() of the layer in which it is largest.
    int64_t most_kv_width() const {
        int64_t most = layer(0).kv_width();
        for (const LayerConfig& l : uneven) most = std::max(most, l.kv_width());
        return most;
    }
    // True if the models have the same sizes and settings. The tokens that begin or end a text may differ.
    bool operator==(const ModelConfig& o) const {
        return family == o.family && vocabulary == o.vocabulary && positions == o.positions &&
               layers == o.layers && channels == o.channels && LayerConfig(*this) == LayerConfig(o) &&
               uneven == o.uneven && norm_epsilon == o.norm_epsilon && tied == o.tied &&
               attention_bias == o.attention_bias && scales == o.scales;
    }
};

constexpr int kMostVocabulary = 1 << 24;
constexpr int kMostPositions = 1 << 21;  // so that attention's tiles fit into a grid's height
constexpr int kMostLayers = 10000;
constexpr int kMostChannels = 1 << 20;
constexpr int kMostHeadSize = 512;
constexpr int kMostMlpWidth = 1 << 22;

// Reads the keys of a config.json. Every function fails in one line that names the file, the key and its
// value if the key is missing and has no default, has the wrong type, or is out of range.
class ConfigReader {
  public:
    ConfigReader(const nlohmann::json& json, const std::string& file) : json_(json), file_(file) {
        if (!json.is_object()) fail("%s: not a JSON object", file);
    }
    const std::string& file() const { return file_; }
    // A key that is null counts as absent.
    bool has(const std::string& name) const;
    // For a key with two spellings: the one that is present.
    const char* either(const char* name, const char* other) const { return has(name) ? name : other; }

    // An integer from `least` to `most`.
    int integer(const std::string& name, int least, int most) const;
    // A count of something: at least one.
    int size(const std::string& name, int most) const { return integer(name, 1, most); }
    int size(const std::string& name, int otherwise, int most) const {
        return has(name) ? size(name, most) : otherwise;
    }
    // A number above `low` and below `high`.
    double number(const std::string& name, double low, double high) const;
    double number(const std::string& name, double otherwise, double low, double high) const {
        return has(name) ? number(name, low, high) : otherwise;
    }
    // A list of `count` such numbers.
    std::vector<double> numbers(const std::string& name, int count, double low, double high) const;
    bool truth(const std::string& name, bool otherwise) const;
    std::string text(const std::string& name, const char* otherwise) const;
    // Fails if the key is present with a value that is not allowed, because it would change the arithmetic.
    void must_be(const std::string& name, std::initializer_list<nlohmann::json> allowed) const;
    // Fails naming the key, its value, and what it must be.
    [[noreturn]] void refuse(const std::string& name, const std::string& needed) const;
    // The tokens that a key names, one or a list; those outside the vocabulary are left out. Empty if the key
    // is absent.
    std::vector<int> tokens(const std::string& name, int vocabulary) const;
    // The keys of an object inside this one; empty if it is absent.
    ConfigReader object(const std::string& name) const;
    const nlohmann::json& json() const { return json_; }

  private:
    const nlohmann::json& required(const std::string& name) const;

    const nlohmann::json& json_;
    std::string file_;
};
