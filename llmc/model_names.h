// model_names.h - what a --model names if it is no folder: a model that Hugging Face's tools have downloaded,
// or a well-known one, whose shape plans know without its files. Add a well-known model here.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/families.h"
#include "llmc/file.h"
#include "llmc/save_folder.h"

// ---- downloaded models
//
// They are found by their names on the hub, ORG/NAME. Nothing is downloaded here.
//
// The cache has a folder for each model (https://huggingface.co/docs/huggingface_hub/guides/manage-cache):
//
//     models--ORG--NAME/refs/main           the commit that `main` was when it was downloaded
//     models--ORG--NAME/refs/NAME           the same of another branch, or of a tag
//     models--ORG--NAME/snapshots/COMMIT/   the files of that commit, as links

// True if a text may be the name of a model on the hub: ORG/NAME, of letters, digits, '-', '_' and '.'.
inline bool is_hub_name(const std::string& text) {
    const size_t slash = text.find('/');
    if (slash == text.npos || text.find('/', slash + 1) != text.npos) return false;
    const auto is_part = [](const std::string& part) {
        return !part.empty() && part[0] != '.' && part[0] != '~' &&
               std::all_of(part.begin(), part.end(), [](unsigned char c) {
                   return c < 128 && (std::isalnum(c) || c == '-' || c == '_' || c == '.');
               });
    };
    return is_part(text.substr(0, slash)) && is_part(text.substr(slash + 1));
}

// Where huggingface_hub keeps what it downloads.
inline std::string hub_cache() {
    const auto variable = [](const char* name) {
        const char* const value = getenv(name);
        return with_home(value ? value : "");
    };
    for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"})
        if (!variable(name).empty()) return variable(name);
    if (!variable("HF_HOME").empty()) return variable("HF_HOME") + "/hub";
    const std::string caches = variable("XDG_CACHE_HOME");
    return (caches.empty() ? variable("HOME") + "/.cache" : caches) + "/huggingface/hub";
}

// The folder of a model in the cache: the snapshot of `revision`, which is a branch, a tag or a commit.
// Without a revision: that of `main`, or the only one. "" if it was not downloaded.
inline std::string hub_snapshot(const std::string& name, const std::string& revision = "") {
    std::string folder = "models--" + name;
    folder.replace(folder.find('/'), 1, "--");
    folder = hub_cache() + "/" + folder;
    const std::string snapshots = folder + "/snapshots";
    std::error_code none;
    if (!std::filesystem::is_directory(snapshots, none)) return "";
    const auto snapshot = [&](const std::string& commit) {
        const std::string found = snapshots + "/" + commit;
        const bool is_name = !commit.empty() && commit[0] != '.' && commit.find('/') == commit.npos;
        return is_name && std::filesystem::is_directory(found, none) ? found : "";
    };
    const std::string reference = folder + "/refs/" + (revision.empty() ? "main" : revision);
    if (revision.find("..") == revision.npos && file_exists(reference)) {
        std::string commit = read_text(reference);
        while (!commit.empty() && std::isspace(static_cast<unsigned char>(commit.back()))) commit.pop_back();
        if (const std::string found = snapshot(commit); !found.empty()) return found;
    }
    if (!revision.empty()) return snapshot(revision);
    const std::vector<std::string> all = list_folder(snapshots);
    return all.size() == 1 ? snapshots + "/" + all[0] : "";
}

// The name on the hub of a snapshot in a cache; "" if `folder` is none.
inline std::string hub_name_of(const std::string& folder) {
    const std::filesystem::path path(folder), model = path.parent_path().parent_path();
    std::string name = model.filename().string();
    if (path.parent_path().filename() != "snapshots" || !name.starts_with("models--")) return "";
    name.erase(0, 8);
    const size_t dashes = name.find("--");
    return dashes == name.npos ? "" : name.replace(dashes, 2, "/");
}

// How an adapter names the model that it is of: by its name on the hub, if a cache has it, else by its path,
// where links are followed except those of a cache, which lead to files without extensions.
inline std::string lasting_name(const std::string& model) {
    const std::string name = hub_name_of(model);
    if (!name.empty()) return name;
    if (!hub_name_of(folder_above(model)).empty()) return std::filesystem::absolute(model).string();
    std::error_code none;
    return std::filesystem::canonical(model, none).string();
}

// The commit of a snapshot in a cache, unless it is the one that the model's name alone leads to; else "".
inline std::string other_revision(const std::string& folder) {
    const std::string name = hub_name_of(folder);
    std::error_code none;
    if (name.empty() || std::filesystem::equivalent(folder, hub_snapshot(name), none)) return "";
    return std::filesystem::path(folder).filename().string();
}

// What an option like --model names: `text` itself, unless that is no file here and has the form of a name on
// the hub. Then the model's folder in the cache, or its file if it has a single GGUF and no config.json.
// Fails if the cache has no such model.
// A resumed run's model may have been removed: `resumes` returns its name then.
inline std::string find_on_hub(const char* option, const std::string& text, bool resumes = false,
                               const std::string& revision = "") {
    if (!is_hub_name(text) || file_exists(text)) return text;
    const std::string folder = hub_snapshot(text, revision);
    if (folder.empty() && resumes) return text;
    if (folder.empty() && (text.ends_with(".gguf") || file_exists(text.substr(0, text.find('/')))))
        fail("%s %s: there is no such file or folder", option, text.c_str());
    if (folder.empty())
        fail(
            "%s %s: there is no such folder, and no such model in %s: `hf download %s` gets it if Hugging "
            "Face has it",
            option, text.c_str(), hub_cache().c_str(), text.c_str());
    if (file_exists(folder + "/config.json") || file_exists(folder + "/adapter_config.json")) return folder;
    std::vector<std::string> ggufs;
    for (const std::string& file : list_folder(folder))
        if (file.ends_with(".gguf")) ggufs.push_back(file);
    std::sort(ggufs.begin(), ggufs.end());
    if (ggufs.size() == 1) return folder + "/" + ggufs[0];
    if (ggufs.empty()) fail("%s %s: %s has no config.json", option, text.c_str(), folder.c_str());
    fail("%s %s: %s has %zu GGUF files: give the path of one, such as %s/%s", option, text.c_str(),
         folder.c_str(), ggufs.size(), folder.c_str(), ggufs[0].c_str());
}

// ---- well-known models
//
// The sizes are those of the config.json that the makers publish on Hugging Face. test_gpu_plans.py compares
// the numbers of parameters with those that they publish.

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
    name = lower(name.substr(name.rfind('/') + 1));
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
    std::string plain = joined(words, "-");
    if (plain == "mistral-nemo") plain += "-12b";
    return plain;
}

// For a message: the known model whose name is nearest to this one, but for hyphens and dots; "" if none is.
inline std::string known_name_like(const std::string& name) {
    const auto letters = [](std::string text) {
        std::erase_if(text, [](unsigned char c) { return !std::isalnum(c); });
        return text;
    };
    std::vector<std::string> names;
    for (const KnownModel& known : kKnownModels) names.push_back(letters(known.name));
    const std::string nearest = nearest_name(letters(plain_model_name(name)), names);
    for (const KnownModel& known : kKnownModels)
        if (letters(known.name) == nearest) return format("; a plan knows %s by its name", known.name);
    return "";
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
