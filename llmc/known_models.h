// known_models.h - the shapes of well-known models by their names, for plans of models that are not here.
// Read this to add one.
//
// The sizes are those of the config.json that the makers publish on Hugging Face. test_known_models.py
// compares the numbers of parameters with those that they publish.
#pragma once

#include <algorithm>
#include <cctype>
#include <string>
#include <vector>

#include "llmc/families.h"
#include "llmc/hub_cache.h"

struct KnownModel {
    const char* name;
    const Family* family;
    int layers, channels, heads, kv_heads, head_size, mlp_width, vocabulary, positions;
    double theta = 0;       // of rotary positions
    bool tied = false;      // the head is the token embedding; always so in GPT-2 and BLOOM
    int llama3_factor = 0;  // of Llama 3.1's scaling of rotary positions; 0: none
    int window = 0;         // of attention; 0: none
};

// A Llama 3.1 or later, whose context was extended to 131072 tokens.
constexpr KnownModel llama3(const char* name, int layers, int channels, int heads, int head_size,
                            int mlp_width, int factor, bool tied = false) {
    return {name,      &kLlama, layers, channels, heads, 8,     head_size,
            mlp_width, 128256,  131072, 5e5,      tied,  factor};
}
// Qwen2 and Qwen2.5 with the context of their instruct models; that of some base models is 131072.
constexpr KnownModel qwen25(const char* name, int layers, int channels, int heads, int kv_heads,
                            int mlp_width, int vocabulary, bool tied) {
    return {name,      &kQwen2,    layers, channels, heads, kv_heads, channels / heads,
            mlp_width, vocabulary, 32768,  1e6,      tied};
}
constexpr KnownModel qwen3_of(const char* name, int layers, int channels, int heads, int mlp_width,
                              bool tied) {
    return {name, &kQwen3, layers, channels, heads, 8, 128, mlp_width, 151936, 40960, 1e6, tied};
}
constexpr KnownModel gpt2_of(const char* name, int layers, int channels, int heads) {
    return {name, &kGpt2, layers, channels, heads, heads, channels / heads, 4 * channels, 50257, 1024};
}
constexpr KnownModel bloom_of(const char* name, int layers, int channels, int heads) {
    return {name,  &kBloom,          layers,       channels, heads,
            heads, channels / heads, 4 * channels, 250880,   kMostPositions};
}

inline constexpr KnownModel kKnownModels[] = {
    {"llama-2-7b", &kLlama, 32, 4096, 32, 32, 128, 11008, 32000, 4096, 1e4},
    {"llama-2-13b", &kLlama, 40, 5120, 40, 40, 128, 13824, 32000, 4096, 1e4},
    {"llama-2-70b", &kLlama, 80, 8192, 64, 8, 128, 28672, 32000, 4096, 1e4},
    {"llama-3-8b", &kLlama, 32, 4096, 32, 8, 128, 14336, 128256, 8192, 5e5},
    {"llama-3-70b", &kLlama, 80, 8192, 64, 8, 128, 28672, 128256, 8192, 5e5},
    llama3("llama-3.1-8b", 32, 4096, 32, 128, 14336, 8),
    llama3("llama-3.1-70b", 80, 8192, 64, 128, 28672, 8),
    llama3("llama-3.1-405b", 126, 16384, 128, 128, 53248, 8),
    llama3("llama-3.2-1b", 16, 2048, 32, 64, 8192, 32, true),
    llama3("llama-3.2-3b", 28, 3072, 24, 128, 8192, 32, true),
    llama3("llama-3.3-70b", 80, 8192, 64, 128, 28672, 8),
    {"tinyllama-1.1b", &kLlama, 22, 2048, 32, 4, 64, 5632, 32000, 2048, 1e4},
    {"smollm2-135m", &kLlama, 30, 576, 9, 3, 64, 1536, 49152, 8192, 1e5, true},
    {"smollm2-360m", &kLlama, 32, 960, 15, 5, 64, 2560, 49152, 8192, 1e5, true},
    {"smollm2-1.7b", &kLlama, 24, 2048, 32, 32, 64, 8192, 49152, 8192, 130000, true},
    {"mistral-7b", &kMistral, 32, 4096, 32, 8, 128, 14336, 32768, 32768, 1e6},
    {"mistral-7b-v0.1", &kMistral, 32, 4096, 32, 8, 128, 14336, 32000, 32768, 1e4, false, 0, 4096},
    {"mistral-7b-v0.2", &kMistral, 32, 4096, 32, 8, 128, 14336, 32000, 32768, 1e6},
    {"mistral-7b-v0.3", &kMistral, 32, 4096, 32, 8, 128, 14336, 32768, 32768, 1e6},
    {"mistral-nemo-12b", &kMistral, 40, 5120, 32, 8, 128, 14336, 131072, 131072, 1e6},
    {"mistral-small-24b", &kMistral, 40, 5120, 32, 8, 128, 32768, 131072, 32768, 1e8},
    qwen25("qwen2-0.5b", 24, 896, 14, 2, 4864, 151936, true),
    qwen25("qwen2-1.5b", 28, 1536, 12, 2, 8960, 151936, true),
    qwen25("qwen2-7b", 28, 3584, 28, 4, 18944, 152064, false),
    qwen25("qwen2-72b", 80, 8192, 64, 8, 29568, 152064, false),
    qwen25("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151936, true),
    qwen25("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151936, true),
    qwen25("qwen2.5-3b", 36, 2048, 16, 2, 11008, 151936, true),
    qwen25("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, false),
    qwen25("qwen2.5-14b", 48, 5120, 40, 8, 13824, 152064, false),
    qwen25("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064, false),
    qwen25("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064, false),
    qwen3_of("qwen3-0.6b", 28, 1024, 16, 3072, true),
    qwen3_of("qwen3-1.7b", 28, 2048, 16, 6144, true),
    qwen3_of("qwen3-4b", 36, 2560, 32, 9728, true),
    {"qwen3-4b-2507", &kQwen3, 36, 2560, 32, 8, 128, 9728, 151936, 262144, 5e6, true},
    qwen3_of("qwen3-8b", 36, 4096, 32, 12288, false),
    qwen3_of("qwen3-14b", 40, 5120, 40, 17408, false),
    qwen3_of("qwen3-32b", 64, 5120, 64, 25600, false),
    gpt2_of("distilgpt2", 6, 768, 12),
    gpt2_of("gpt2", 12, 768, 12),
    gpt2_of("gpt2-medium", 24, 1024, 16),
    gpt2_of("gpt2-large", 36, 1280, 20),
    gpt2_of("gpt2-xl", 48, 1600, 25),
    bloom_of("bloom-560m", 24, 1024, 16),
    bloom_of("bloom-1b1", 24, 1536, 16),
    bloom_of("bloom-1b7", 24, 2048, 16),
    bloom_of("bloom-3b", 30, 2560, 32),
    bloom_of("bloom-7b1", 30, 4096, 32),
    bloom_of("bloom-176b", 70, 14336, 112),
};

// A model's name as the table writes it: "meta-llama/Meta-Llama-3.1-8B-Instruct" becomes "llama-3.1-8b".
inline std::string plain_model_name(std::string name) {
    name.erase(0, name.rfind('/') + 1);
    for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    if (name.starts_with("meta-")) name.erase(0, 5);
    if (name == "bloom") return "bloom-176b";
    // Versions of one shape: "mistral-nemo-base-2407" has that of Mistral Nemo.
    const std::vector<std::string> kVersions = {"instruct", "chat", "base", "hf",  "it",
                                                "thinking", "2407", "2501", "v1.0"};
    std::vector<std::string> words;
    for (size_t begin = 0; begin <= name.size();) {
        const size_t end = std::min(name.find('-', begin), name.size());
        const std::string word = name.substr(begin, end - begin);
        if (std::find(kVersions.begin(), kVersions.end(), word) == kVersions.end()) words.push_back(word);
        begin = end + 1;
    }
    std::string plain;
    for (const std::string& word : words) plain += (plain.empty() ? "" : "-") + word;
    if (plain == "mistral-nemo") plain += "-12b";
    return plain;
}

// The known model of this name, with or without an organisation of the hub before it; or null.
inline const KnownModel* find_known_model(const std::string& name) {
    if (name.find('/') != name.npos && !is_hub_name(name)) return nullptr;
    const std::string plain = plain_model_name(name);
    for (const KnownModel& known : kKnownModels)
        if (plain == known.name) return &known;
    return nullptr;
}

// The known model of this name if it is not here: neither a file or folder, nor in the hub's cache.
inline const KnownModel* known_shape(const std::string& name) {
    const KnownModel* known = find_known_model(name);
    if (!known || file_exists(name)) return nullptr;
    const std::string cached = is_hub_name(name) ? hub_snapshot(name) : "";
    return !cached.empty() && file_exists(cached + "/config.json") ? nullptr : known;
}

// The configuration of a known model, as far as its shape goes.
inline ModelConfig config_of(const KnownModel& known) {
    ModelConfig c;
    c.family = known.family;
    c.vocabulary = known.vocabulary;
    c.positions = known.positions;
    c.layers = known.layers, c.channels = known.channels;
    c.heads = known.heads, c.kv_heads = known.kv_heads, c.head_size = known.head_size;
    c.mlp_width = known.mlp_width;
    c.tied = known.tied || c.family == &kGpt2 || c.family == &kBloom;
    c.window = known.window;
    if (known.theta > 0) c.rope.theta = known.theta;
    if (known.llama3_factor > 0) c.rope.type = RopeType::kLlama3, c.rope.factor = known.llama3_factor;
    return c;
}
