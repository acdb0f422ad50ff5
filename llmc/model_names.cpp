// model_names.cpp - the lists of models and of spellings in names. Add a well-known model here, and remove a
// family that is supported now from kOtherFamilies.
#include "llmc/model_names.h"

#include <cctype>
#include <cstdlib>
#include <filesystem>

#include "llmc/jinja_strings.h"
#include "llmc/save_folder.h"

bool is_hub_name(const std::string& text) { return matches(text, R"([\w-][\w.-]*/[\w-][\w.-]*)"); }

std::string hub_cache() {
    constexpr std::pair<const char*, const char*> kPlaces[] = {{"HF_HUB_CACHE", ""},
                                                               {"HUGGINGFACE_HUB_CACHE", ""},
                                                               {"HF_HOME", "/hub"},
                                                               {"XDG_CACHE_HOME", "/huggingface/hub"}};
    for (const auto& [variable, below] : kPlaces)
        if (const char* const value = getenv(variable); value && *value) return with_home(value) + below;
    return with_home("~/.cache/huggingface/hub");
}

std::string hub_snapshot(const std::string& name, const std::string& revision) {
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
        const std::string commit(jinja::strip(read_text(reference)));
        if (const std::string found = snapshot(commit); !found.empty()) return found;
    }
    if (!revision.empty()) return snapshot(revision);
    const std::vector<std::string> all = list_folder(snapshots);
    return all.size() == 1 ? snapshots + "/" + all[0] : "";
}

// The name on the hub of a snapshot in a cache; "" if `folder` is none.
static std::string hub_name_of(const std::string& folder) {
    const std::filesystem::path path(folder), model = path.parent_path().parent_path();
    std::string name = model.filename().string();
    if (path.parent_path().filename() != "snapshots" || !name.starts_with("models--")) return "";
    name.erase(0, 8);
    const size_t dashes = name.find("--");
    return dashes == name.npos ? "" : name.replace(dashes, 2, "/");
}

std::string lasting_name(const std::string& model) {
    const std::string name = hub_name_of(model);
    if (!name.empty()) return name;
    if (!hub_name_of(folder_above(model)).empty()) return std::filesystem::absolute(model).string();
    std::error_code none;
    return std::filesystem::canonical(model, none).string();
}

std::string other_revision(const std::string& folder) {
    const std::string name = hub_name_of(folder);
    std::error_code none;
    if (name.empty() || std::filesystem::equivalent(folder, hub_snapshot(name), none)) return "";
    return std::filesystem::path(folder).filename().string();
}

// ---- well-known models

constexpr const char *kGemma3Long = R"({"rope_scaling": {"rope_type": "linear", "factor": 8}})",
                     *kMinistral3Yarn = R"({"rope_scaling": {"rope_type": "yarn", "factor": 16, "mscale": 1,
    "mscale_all_dim": 1, "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}})",
                     *kGranite2b = R"({"embedding_multiplier": 12, "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625, "logits_scaling": 8})",
                     *kGranite8b = R"({"embedding_multiplier": 12, "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125, "logits_scaling": 16})";

// Qwen2 and Qwen2.5 have the context of their instruct models, where that of some base models is 131072.
constexpr KnownModel kKnownModels[] = {
    {"llama-2-7b", &kLlama, 32, 4096, 32, 32, 128, 11008, 32000, 4096, 1e4},
    {"llama-2-13b", &kLlama, 40, 5120, 40, 40, 128, 13824, 32000, 4096, 1e4},
    {"llama-2-70b", &kLlama, 80, 8192, 64, 8, 128, 28672, 32000, 4096, 1e4},
    {"llama-3-8b", &kLlama, 32, 4096, 32, 8, 128, 14336, 128256, 8192, 5e5},
    {"llama-3-70b", &kLlama, 80, 8192, 64, 8, 128, 28672, 128256, 8192, 5e5},
    {"llama-3.1-8b", &kLlama, 32, 4096, 32, 8, 128, 14336, 128256, 131072, 5e5, false, 8},
    {"llama-3.1-70b", &kLlama, 80, 8192, 64, 8, 128, 28672, 128256, 131072, 5e5, false, 8},
    {"llama-3.1-405b", &kLlama, 126, 16384, 128, 8, 128, 53248, 128256, 131072, 5e5, false, 8},
    {"llama-3.2-1b", &kLlama, 16, 2048, 32, 8, 64, 8192, 128256, 131072, 5e5, true, 32},
    {"llama-3.2-3b", &kLlama, 28, 3072, 24, 8, 128, 8192, 128256, 131072, 5e5, true, 32},
    {"llama-3.3-70b", &kLlama, 80, 8192, 64, 8, 128, 28672, 128256, 131072, 5e5, false, 8},
    {"tinyllama-1.1b", &kLlama, 22, 2048, 32, 4, 64, 5632, 32000, 2048, 1e4},
    {"smollm2-135m", &kLlama, 30, 576, 9, 3, 64, 1536, 49152, 8192, 1e5, true},
    {"smollm2-360m", &kLlama, 32, 960, 15, 5, 64, 2560, 49152, 8192, 1e5, true},
    {"smollm2-1.7b", &kLlama, 24, 2048, 32, 32, 64, 8192, 49152, 8192, 130000, true},
    {"mistral-7b", &kMistral, 32, 4096, 32, 8, 128, 14336, 32768, 32768, 1e6},
    {"mistral-7b-v0.1", &kMistral, 32, 4096, 32, 8, 128, 14336, 32000, 32768, 1e4, false, 0, 4096},
    {"mistral-7b-v0.2", &kMistral, 32, 4096, 32, 8, 128, 14336, 32000, 32768, 1e6},
    {"mistral-7b-v0.3", &kMistral, 32, 4096, 32, 8, 128, 14336, 32768, 32768, 1e6},
    {"ministral-8b", &kMistral, 36, 4096, 32, 8, 128, 12288, 131072, 32768, 1e8},
    {"mistral-nemo-12b", &kMistral, 40, 5120, 32, 8, 128, 14336, 131072, 131072, 1e6},
    {"mistral-small-24b", &kMistral, 40, 5120, 32, 8, 128, 32768, 131072, 32768, 1e8},
    {"qwen2-0.5b", &kQwen2, 24, 896, 14, 2, 64, 4864, 151936, 32768, 1e6, true},
    {"qwen2-1.5b", &kQwen2, 28, 1536, 12, 2, 128, 8960, 151936, 32768, 1e6, true},
    {"qwen2-7b", &kQwen2, 28, 3584, 28, 4, 128, 18944, 152064, 32768, 1e6},
    {"qwen2-72b", &kQwen2, 80, 8192, 64, 8, 128, 29568, 152064, 32768, 1e6},
    {"qwen2.5-0.5b", &kQwen2, 24, 896, 14, 2, 64, 4864, 151936, 32768, 1e6, true},
    {"qwen2.5-1.5b", &kQwen2, 28, 1536, 12, 2, 128, 8960, 151936, 32768, 1e6, true},
    {"qwen2.5-3b", &kQwen2, 36, 2048, 16, 2, 128, 11008, 151936, 32768, 1e6, true},
    {"qwen2.5-7b", &kQwen2, 28, 3584, 28, 4, 128, 18944, 152064, 32768, 1e6},
    {"qwen2.5-14b", &kQwen2, 48, 5120, 40, 8, 128, 13824, 152064, 32768, 1e6},
    {"qwen2.5-32b", &kQwen2, 64, 5120, 40, 8, 128, 27648, 152064, 32768, 1e6},
    {"qwen2.5-72b", &kQwen2, 80, 8192, 64, 8, 128, 29568, 152064, 32768, 1e6},
    {"deepseek-r1-distill-qwen-1.5b", &kQwen2, 28, 1536, 12, 2, 128, 8960, 151936, 131072, 1e4},
    {"deepseek-r1-distill-qwen-7b", &kQwen2, 28, 3584, 28, 4, 128, 18944, 152064, 131072, 1e4},
    {"deepseek-r1-distill-qwen-14b", &kQwen2, 48, 5120, 40, 8, 128, 13824, 152064, 131072, 1e6},
    {"deepseek-r1-distill-qwen-32b", &kQwen2, 64, 5120, 40, 8, 128, 27648, 152064, 131072, 1e6},
    {"qwen3-0.6b", &kQwen3, 28, 1024, 16, 8, 128, 3072, 151936, 40960, 1e6, true},
    {"qwen3-1.7b", &kQwen3, 28, 2048, 16, 8, 128, 6144, 151936, 40960, 1e6, true},
    {"qwen3-4b", &kQwen3, 36, 2560, 32, 8, 128, 9728, 151936, 40960, 1e6, true},
    {"qwen3-4b-2507", &kQwen3, 36, 2560, 32, 8, 128, 9728, 151936, 262144, 5e6, true},
    {"qwen3-8b", &kQwen3, 36, 4096, 32, 8, 128, 12288, 151936, 40960, 1e6},
    {"qwen3-14b", &kQwen3, 40, 5120, 40, 8, 128, 17408, 151936, 40960, 1e6},
    {"qwen3-32b", &kQwen3, 64, 5120, 64, 8, 128, 25600, 151936, 40960, 1e6},
    {"smollm3-3b", &kSmolLm3, 36, 2048, 16, 4, 128, 11008, 128256, 65536, 5e6, true, 0, 0, "{}"},
    {"gemma-2b", &kGemma, 18, 2048, 8, 1, 256, 16384, 256000, 8192, 1e4, true, 0, 0, "{}"},
    {"gemma-7b", &kGemma, 28, 3072, 16, 16, 256, 24576, 256000, 8192, 1e4, true, 0, 0, "{}"},
    {"gemma-3-270m", &kGemma3, 18, 640, 4, 1, 256, 2048, 262144, 32768, 1e6, true, 0, 512, "{}"},
    {"gemma-3-1b", &kGemma3, 26, 1152, 4, 1, 256, 6912, 262144, 32768, 1e6, true, 0, 512, "{}"},
    {"gemma-3-4b", &kGemma3, 34, 2560, 8, 4, 256, 10240, 262208, 131072, 1e6, true, 0, 1024, kGemma3Long},
    {"gemma-3-12b", &kGemma3, 48, 3840, 16, 8, 256, 15360, 262208, 131072, 1e6, true, 0, 1024, kGemma3Long},
    {"gemma-3-27b", &kGemma3, 62, 5376, 32, 16, 128, 21504, 262208, 131072, 1e6, true, 0, 1024,
     R"({"query_pre_attn_scalar": 168, "rope_scaling": {"rope_type": "linear", "factor": 8}})"},
    {"gemma-2-2b", &kGemma2, 26, 2304, 8, 4, 256, 9216, 256000, 8192, 1e4, true, 0, 4096, "{}"},
    {"gemma-2-9b", &kGemma2, 42, 3584, 16, 8, 256, 14336, 256000, 8192, 1e4, true, 0, 4096, "{}"},
    {"gemma-2-27b", &kGemma2, 46, 4608, 32, 16, 128, 36864, 256000, 8192, 1e4, true, 0, 4096,
     R"({"query_pre_attn_scalar": 144})"},
    {"olmo-2-7b", &kOlmo2, 32, 4096, 32, 32, 128, 11008, 100352, 4096, 5e5},
    {"olmo-2-13b", &kOlmo2, 40, 5120, 40, 40, 128, 13824, 100352, 4096, 5e5},
    {"olmo-3-7b", &kOlmo3, 32, 4096, 32, 32, 128, 11008, 100278, 65536, 5e5, false, 0, 4096, "{}"},
    {"olmo-3-32b", &kOlmo3, 64, 5120, 40, 8, 128, 27648, 100278, 65536, 5e5, false, 0, 4096, "{}"},
    {"phi-3-mini", &kPhi3, 32, 3072, 32, 32, 96, 8192, 32064, 4096, 1e4, false, 0, 2047},
    {"phi-3-medium", &kPhi3, 40, 5120, 40, 10, 128, 17920, 32064, 4096, 1e4, false, 0, 2047},
    {"phi-3.5-mini", &kPhi3, 32, 3072, 32, 32, 96, 8192, 32064, 131072, 1e4},
    {"phi-4", &kPhi3, 40, 5120, 40, 10, 128, 17920, 100352, 16384, 250000},
    {"phi-4-mini", &kPhi3, 32, 3072, 24, 8, 128, 8192, 200064, 131072, 1e4, true, 0, 0,
     R"({"partial_rotary_factor": 0.75})"},
    {"ministral-3-3b", &kMinistral3, 26, 3072, 32, 8, 128, 9216, 131072, 262144, 1e6, true, 0, 0,
     kMinistral3Yarn},
    {"ministral-3-8b", &kMinistral3, 34, 4096, 32, 8, 128, 14336, 131072, 262144, 1e6, false, 0, 0,
     kMinistral3Yarn},
    {"ministral-3-14b", &kMinistral3, 40, 5120, 32, 8, 128, 16384, 131072, 262144, 1e6, false, 0, 0,
     kMinistral3Yarn},
    {"granite-3.3-2b", &kGranite, 40, 2048, 32, 8, 64, 8192, 49159, 131072, 1e7, true, 0, 0, kGranite2b},
    {"granite-3.3-8b", &kGranite, 40, 4096, 32, 8, 128, 12800, 49159, 131072, 1e7, true, 0, 0, kGranite8b},
    {"distilgpt2", &kGpt2, 6, 768, 12, 12, 64, 3072, 50257, 1024},
    {"gpt2", &kGpt2, 12, 768, 12, 12, 64, 3072, 50257, 1024},
    {"gpt2-medium", &kGpt2, 24, 1024, 16, 16, 64, 4096, 50257, 1024},
    {"gpt2-large", &kGpt2, 36, 1280, 20, 20, 64, 5120, 50257, 1024},
    {"gpt2-xl", &kGpt2, 48, 1600, 25, 25, 64, 6400, 50257, 1024},
    {"bloom-560m", &kBloom, 24, 1024, 16, 16, 64, 4096, 250880, kMostPositions},
    {"bloom-1b1", &kBloom, 24, 1536, 16, 16, 96, 6144, 250880, kMostPositions},
    {"bloom-1b7", &kBloom, 24, 2048, 16, 16, 128, 8192, 250880, kMostPositions},
    {"bloom-3b", &kBloom, 30, 2560, 32, 32, 80, 10240, 250880, kMostPositions},
    {"bloom-7b1", &kBloom, 30, 4096, 32, 32, 128, 16384, 250880, kMostPositions},
    {"bloom-176b", &kBloom, 70, 14336, 112, 112, 128, 57344, 250880, kMostPositions},
};
std::span<const KnownModel> known_models() { return kKnownModels; }

// ---- what names say
//
// A name is compared word by word: that of "unsloth/Llama-3.2-1B-Instruct" is "-llama-3.2-1b-instruct-". In
// lists of spellings, a hyphen is where a word begins or ends, and 0 is any number.

// What is not supported in any family.
constexpr const char* kOtherKinds[][2] = {
    {"a mixture of experts", "-a0b- -a0m- -0x0b- -moe moe- mixtral"},
    {"a model of images, sound or video",
     "vl- vl0- vlm- -vision -audio -omni- -ocr -tts- -asr- llava pixtral voxtral multimodal"},
    {"a quantized format other than bitsandbytes' NF4 and GGUF",
     "-awq -gptq -fp8 -fp4 -int0- -0bit- -mlx- -exl0 -nvfp4 -mxfp4 -w0a0 -hqq- -aqlm- -onnx"},
};
// Families that are not supported: remove one that is.
constexpr const char* kOtherFamilies =
    "-qwen3.5 -qwen3.6 -qwen3.8 -qwen3-next gemma-3n gemma3n gemma-4 paligemma t5gemma embeddinggemma "
    "recurrentgemma -gpt-oss -phi-1 -phi1 -phi-2- -phi2 -phi-3-small -phi-4-mini-flash -granite-4 "
    "-olmo-1b -olmo-7b -mistral-small-3.1 -mistral-small-3.2 -mistral-small-4 -devstral-small-2- -llama-4- "
    "-glm -deepseek-v2 -deepseek-v3 -deepseek-r1 -chatglm -kimi -lfm -minimax -nvidia-nemotron -nemotron-h "
    "-seed-oss -exaone -command-r -c4ai -aya- -falcon- -stablelm -stable-code -hunyuan -ernie -internlm "
    "-baichuan -minicpm -starcoder -pythia -gpt-neo -gpt-j -opt- mamba -jamba rwkv bert -t5";
// Spellings that mean the same for a shape, in pairs; "-" drops a word that only says a version.
constexpr const char* kSameShapes =
    "_ - -meta- - -llama2 -llama-2 -llama3 -llama-3 -llama4 -llama-4 -bloomz- -bloom- "
    "-deepseek-r1-distill-llama-8b- -llama-3.1-8b- -deepseek-r1-distill-llama-70b- -llama-3.3-70b- "
    "-instruct- - -chat- - -base- - -hf- - -it- - -thinking- - -coder- - -2407- - -2501- - -v1.0- - "
    "-1124- - -1025- - -1125- - -granite-3.0- -granite-3.3- -granite-3.1- -granite-3.3- -granite-3.2- "
    "-granite-3.3- "
    "-unsloth- - -gguf- - -bnb-4bit- -nf4- -mistral-nemo- -mistral-nemo-12b-";

std::string words_of_model(const std::string& name) {
    std::string words = "-" + lower(name.substr(name.rfind('/') + 1)) + "-";
    const std::vector<std::string> same = words_of(kSameShapes);
    for (size_t i = 0; i < same.size(); i += 2) words = jinja::replaced(words, same[i], same[i + 1], -1);
    return words;
}

std::string spelling_in(const std::string& words, const char* spellings) {
    std::string numbers;  // the words with 0 for each number
    for (const char c : words) {
        const bool is_number = std::isdigit(static_cast<unsigned char>(c)) || c == '.';
        if (!is_number || !numbers.ends_with('0')) numbers += is_number ? '0' : c;
    }
    for (const std::string& spelling : words_of(spellings))
        if (words.find(spelling) != words.npos || numbers.find(spelling) != numbers.npos)
            return std::string(jinja::strip(spelling, "-"));
    return "";
}

// What a name says that is not supported in any family; or "".
static std::string other_kind(const std::string& name) {
    for (const auto& [kind, spellings] : kOtherKinds)
        if (spelling_in(words_of_model(name), spellings) != "") return kind;
    return "";
}

const KnownModel* find_known_model(const std::string& name) {
    if ((name.find('/') != name.npos && !is_hub_name(name)) || !other_kind(name).empty()) return nullptr;
    std::string words = words_of_model(name);
    if (words == "-bloom-") words += "176b-";
    const KnownModel* found = nullptr;
    for (const KnownModel& known : kKnownModels) {
        const std::string own = format("-%s-", known.name), others = jinja::replaced(words, own, "--", -1);
        if (others == words || (known.family == &kGpt2 && others != "--")) continue;
        if (spelling_in(others, "-flash- -0k- -1m- -tiny- -random- draft eagle medusa -pruned-") != "")
            continue;
        if (!found || own.size() > strlen(found->name) + 2) found = &known;
    }
    return found;
}

void refuse_unsupported(const char* option, const std::string& name) {
    std::string what = other_kind(name);
    if (what.empty() && !find_known_model(name)) what = spelling_in(words_of_model(name), kOtherFamilies);
    if (what.empty()) return;
    fail("%s %s: %s is not supported; there are %s, and --model list prints the models that a plan knows",
         option, name, what, family_names());
}

std::string find_on_hub(const char* option, const std::string& text, bool resumes,
                        const std::string& revision) {
    if (!is_hub_name(text) || file_exists(text)) return text;
    const std::string folder = hub_snapshot(text, revision);
    if (folder.empty() && resumes) return text;
    if (folder.empty() && (text.ends_with(".gguf") || file_exists(text.substr(0, text.find('/')))))
        fail("%s %s: there is no such file or folder", option, text);
    if (folder.empty() && std::string_view(option) == "--model") refuse_unsupported(option, text);
    if (folder.empty())
        fail(
            "%s %s: there is no such folder, and no such model in %s: `hf download %s` gets it if Hugging "
            "Face has it",
            option, text, hub_cache(), text);
    if (file_exists(folder + "/config.json") || file_exists(folder + "/adapter_config.json")) return folder;
    std::vector<std::string> ggufs;
    for (const std::string& file : list_folder(folder))
        if (file.ends_with(".gguf")) ggufs.push_back(file);
    std::ranges::sort(ggufs);
    if (ggufs.size() == 1) return folder + "/" + ggufs[0];
    if (ggufs.empty()) fail("%s %s: %s has no config.json", option, text, folder);
    fail("%s %s: %s has %zu GGUF files: give the path of one, such as %s/%s", option, text, folder,
         ggufs.size(), folder, ggufs[0]);
}

const KnownModel* known_shape(const std::string& name) {
    const KnownModel* known = find_known_model(name);
    if (!known || file_exists(name)) return nullptr;
    const std::string cached = is_hub_name(name) ? hub_snapshot(name) : "";
    return !cached.empty() && file_exists(cached + "/config.json") ? nullptr : known;
}

// The config.json of a model that its family reads.
static nlohmann::json config_json(const KnownModel& known) {
    nlohmann::json json = {{"model_type", known.family->name},
                           {"num_hidden_layers", known.layers},
                           {"hidden_size", known.channels},
                           {"num_attention_heads", known.heads},
                           {"num_key_value_heads", known.kv_heads},
                           {"head_dim", known.head_size},
                           {"intermediate_size", known.mlp_width},
                           {"vocab_size", known.vocabulary},
                           {"max_position_embeddings", known.positions},
                           {"rope_theta", known.theta},
                           {"tie_word_embeddings", known.tied}};
    if (known.window > 0) json["sliding_window"] = known.window;
    json.update(nlohmann::json::parse(known.settings));
    return json;
}

ModelConfig config_of(const KnownModel& known) {
    if (known.settings) return parse_config(config_json(known), known.name);
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
