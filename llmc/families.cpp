// families.cpp - has the families' tables; finds a model's family, and checks a configuration.
#include "llmc/families.h"

#include "llmc/family_bloom.h"
#include "llmc/family_gemma.h"
#include "llmc/family_gpt2.h"
#include "llmc/family_granite.h"
#include "llmc/family_llama.h"
#include "llmc/family_ministral3.h"
#include "llmc/family_olmo.h"
#include "llmc/family_phi3.h"
#include "llmc/family_qwen.h"
#include "llmc/family_smollm3.h"
#include "llmc/family_uneven.h"
#include "llmc/text.h"

std::string family_names() {
    return joined(kFamilies, ", ", [](const Family* family) { return family->name; });
}

// The family of this name, or null.
static const Family* find_family(const std::string& name) {
    for (const Family* family : kFamilies)
        if (name == family->name) return family;
    return nullptr;
}

NewModel parse_new_model(const std::string& name) {
    const size_t colon = name.find(':');
    const std::string family = colon == std::string::npos ? kGpt2.name : name.substr(0, colon);
    const std::string depth = colon == std::string::npos ? name : name.substr(colon + 1);
    const bool is_depth = depth.size() >= 2 && depth.size() <= 5 && depth[0] == 'd' &&
                          depth.find_first_not_of("0123456789", 1) == std::string::npos;
    return is_depth ? NewModel{find_family(family), std::stoi(depth.substr(1))} : NewModel();
}

ModelConfig new_config(const NewModel& model, int vocabulary, int positions) {
    const int layers = model.layers;
    ModelConfig c;
    c.family = model.family;
    c.vocabulary = vocabulary;
    c.positions = positions;
    c.layers = layers;
    if (layers >= 1 && layers <= 12) c.channels = 64 * layers, c.heads = layers;
    if (layers == 24) c.channels = 1024, c.heads = 16;
    if (layers == 36) c.channels = 1280, c.heads = 20;
    if (layers == 48) c.channels = 1600, c.heads = 25;
    if (c.channels == 0) fail("--model d%d: known depths are d1 to d12, d24, d36 and d48", layers);
    c.family->begin(c);
    const TokenDefaults& usual = c.family->tokens;
    if (vocabulary == usual.vocabulary && usual.begin_of_text >= 0) c.begin_of_text = {usual.begin_of_text};
    if (vocabulary == usual.vocabulary && usual.end_of_text >= 0) c.end_of_text = {usual.end_of_text};
    c.stops = c.end_of_text;
    return c;
}

void check_config(const ModelConfig& c, const std::string& where) {
    auto positive = [&](const char* name, int value, int most) {
        if (value < 1 || value > most)
            fail("%s: the model has %d %s, but must have 1 to %d", where, value, name, most);
    };
    positive("tokens (vocab_size)", c.vocabulary, kMostVocabulary);
    positive("positions", c.positions, kMostPositions);
    positive("layers", c.layers, kMostLayers);
    positive("channels", c.channels, kMostChannels);
    for (int i = 0; i < (c.uneven.empty() ? 1 : c.layers); i++) {
        const LayerConfig& l = c.layer(i);
        positive("heads", l.heads, c.channels);
        positive("key/value heads", l.kv_heads, l.heads);
        positive("channels in a head", l.head_size, kMostHeadSize);
        positive("channels in the MLP", l.mlp_width, kMostMlpWidth);
        positive("channels in all heads", static_cast<int>(l.query_width()), kMostMlpWidth);
        if (l.heads % l.kv_heads != 0)
            fail("%s: %d heads are not a multiple of %d key/value heads", where, l.heads, l.kv_heads);
    }
}

// Fails unless the quantization_config of a model says NF4.
static void check_quantization(const ConfigReader& r) {
    const std::string method = r.text("quant_method", "unnamed");
    if (method != "bitsandbytes")
        fail("%s is of method \"%s\"; bitsandbytes' NF4 is supported", r.file(), printable(method));
    if (!r.truth("load_in_4bit", false)) r.must_be("load_in_8bit", {false});
    const std::string type = r.text("bnb_4bit_quant_type", "fp4");
    if (type != "nf4")
        fail("%s: 'bnb_4bit_quant_type' is \"%s\"; nf4 is supported", r.file(), printable(type));
}

ModelConfig parse_config(const nlohmann::json& json, const std::string& file) {
    const ConfigReader r(json, file);
    const std::string type = r.text("model_type", "gpt2");
    ModelConfig c;
    c.family = type == kUneven.name ? &kUneven : find_family(type);
    if (!c.family) fail("%s: 'model_type' is \"%s\"; there are %s", file, printable(type), family_names());
    c.has_nf4 = r.has("quantization_config");
    if (c.has_nf4) check_quantization(r.object("quantization_config"));
    // Refuses mixtures of experts under a dense model's name: `transformers` would ignore the experts'
    // tensors.
    for (const char* key : {"num_local_experts", "num_experts", "n_routed_experts"}) r.must_be(key, {0});
    c.family->read(r, c);
    check_config(c, file);
    const auto marks = [&](const char* key, int usual) {
        if (r.json().contains(key)) return r.tokens(key, c.vocabulary);
        return usual >= 0 && usual < c.vocabulary ? std::vector<int>{usual} : std::vector<int>();
    };
    c.begin_of_text = marks("bos_token_id", c.family->tokens.begin_of_text);
    c.stops = c.end_of_text = marks("eos_token_id", c.family->tokens.end_of_text);
    c.padding = marks("pad_token_id", c.family->tokens.padding);
    return c;
}

nlohmann::json tokens_json(const std::vector<int>& tokens) {
    if (tokens.empty()) return {};
    return tokens.size() == 1 ? nlohmann::json(tokens[0]) : nlohmann::json(tokens);
}

nlohmann::json config_json(const ModelConfig& c, const char* dtype) {
    nlohmann::json json = {{"architectures", {c.family->architecture}},
                           {"model_type", c.family->name},
                           {"vocab_size", c.vocabulary},
                           {"tie_word_embeddings", c.tied},
                           {"bos_token_id", tokens_json(c.begin_of_text)},
                           {"eos_token_id", tokens_json(c.end_of_text)},
                           {"torch_dtype", dtype}};
    if (!c.padding.empty() || c.family->tokens.padding >= 0) json["pad_token_id"] = tokens_json(c.padding);
    c.family->write(c, json);
    return json;
}
