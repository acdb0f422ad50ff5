// gguf_model.cpp - makes a config.json of a GGUF's keys, and checks that its tensors are those of the model.
#include "llmc/gguf_model.h"

#include <cmath>
#include <numbers>
#include <set>

#include "llmc/jinja_strings.h"
#include "llmc/model_names.h"
#include "llmc/model_positions.h"

namespace gguf {
// Hugging Face's names and GGUF's, without their prefixes and without ".weight" or ".bias".
constexpr std::pair<std::string_view, const char*> kNames[] = {
    {"wte", "token_embd"},
    {"wpe", "position_embd"},
    {"ln_1", "attn_norm"},
    {"attn.c_attn", "attn_qkv"},
    {"attn.c_proj", "attn_output"},
    {"ln_2", "ffn_norm"},
    {"mlp.c_fc", "ffn_up"},
    {"mlp.c_proj", "ffn_down"},
    {"embed_tokens", "token_embd"},
    {"word_embeddings", "token_embd"},
    {"word_embeddings_layernorm", "token_embd_norm"},
    {"norm", "output_norm"},
    {"ln_f", "output_norm"},
    {"lm_head", "output"},
    {"input_layernorm", "attn_norm"},
    {"post_attention_layernorm", "ffn_norm"},
    {"self_attn.q_proj", "attn_q"},
    {"self_attn.k_proj", "attn_k"},
    {"self_attn.v_proj", "attn_v"},
    {"self_attn.o_proj", "attn_output"},
    {"self_attn.q_norm", "attn_q_norm"},
    {"self_attn.k_norm", "attn_k_norm"},
    {"self_attention.query_key_value", "attn_qkv"},
    {"self_attention.dense", "attn_output"},
    {"mlp.gate_proj", "ffn_gate"},
    {"mlp.up_proj", "ffn_up"},
    {"mlp.down_proj", "ffn_down"},
    {"mlp.dense_h_to_4h", "ffn_up"},
    {"mlp.dense_4h_to_h", "ffn_down"},
};

std::string name_of(const Family& family, std::string_view name) {
    if (name.starts_with(family.prefix)) name.remove_prefix(std::string_view(family.prefix).size());
    std::string block;
    if (const std::string blocks = std::string(family.blocks) + "."; name.starts_with(blocks)) {
        name.remove_prefix(blocks.size());
        const size_t dot = name.find('.');
        block = "blk." + std::string(name.substr(0, dot)) + ".";
        name.remove_prefix(std::min(name.size(), dot + 1));
    }
    const size_t ending = std::min(name.rfind('.'), name.size());
    for (const auto& [ours, gguf] : family.gguf.tensors)
        if (name.substr(0, ending) == ours) return block + gguf + std::string(name.substr(ending));
    for (const auto& [known, ours] : kNames)
        if (name.substr(0, ending) == known) return block + ours + std::string(name.substr(ending));
    return "";
}

std::vector<float> llama3_divisors(int head_size, const RopeScaling& s) {
    RopeScaling plain = s;
    plain.type = RopeType::kDefault;
    const auto length = static_cast<float>(s.original_max_position_embeddings);
    const auto factor = static_cast<float>(s.factor), low = static_cast<float>(s.low_freq_factor),
               range = static_cast<float>(s.high_freq_factor - s.low_freq_factor);
    std::vector<float> divisors;
    for (const float inverse : inverse_frequencies(head_size, plain)) {
        const float wave = static_cast<float>(2 * std::numbers::pi) / inverse;
        const float smooth = (length / wave - low) / range;
        if (wave < static_cast<float>(s.original_max_position_embeddings / s.high_freq_factor))
            divisors.push_back(1);
        else if (wave > static_cast<float>(s.original_max_position_embeddings / s.low_freq_factor))
            divisors.push_back(factor);
        else
            divisors.push_back(1 / ((1 - smooth) / factor + smooth));
    }
    return divisors;
}

// Finds the settings of Llama 3.1's scaling that give these divisors, and sets them in `rope`; returns
// whether there are any. The lowest frequencies are divided by the whole factor. Only the ratios of the
// original length and of the two frequency factors matter, and all known models have 1 and 4 for the latter.
static bool find_llama3(int head_size, const std::vector<float>& divisors, RopeScaling& rope) {
    rope.factor = double{divisors.back()};
    if (!(rope.factor >= 1 && rope.factor < 1e6)) return false;
    RopeScaling plain = rope;
    plain.type = RopeType::kDefault;
    const std::vector<float> inverse = inverse_frequencies(head_size, plain);
    const auto fits = [&](double length) {
        rope.original_max_position_embeddings = static_cast<int>(std::lround(length));
        if (rope.original_max_position_embeddings < 1) return false;
        const std::vector<float> wanted = llama3_divisors(head_size, rope);
        for (size_t i = 0; i < divisors.size(); i++)
            if (!(std::abs(divisors[i] - wanted[i]) < 1e-3f * wanted[i])) return false;
        return true;
    };
    if (fits(rope.original_max_position_embeddings)) return true;
    // A frequency that is divided by a part of the factor tells the length. Without one, the first that is
    // divided by the whole factor makes less than one turn in it.
    for (size_t i = 0; i < divisors.size(); i++) {
        const double turns = double{inverse[i]} / (2 * std::numbers::pi), divisor = double{divisors[i]};
        const double smooth = (1 / divisor - 1 / rope.factor) / (1 - 1 / rope.factor);
        const bool whole = divisor >= rope.factor * (1 - 1e-6);
        if (divisor > 1 + 1e-6 && fits(whole ? std::floor(1 / turns) : (3 * smooth + 1) / turns)) return true;
    }
    return false;
}

}  // namespace gguf

std::string published_name(const nlohmann::json& keys, const std::string& otherwise) {
    const auto text = [&](const char* key) {
        const auto found = keys.find(key);
        return found != keys.end() && found->is_string() ? found->get<std::string>() : "";
    };
    constexpr std::string_view kHub = "https://huggingface.co/";
    std::string url = text("general.base_model.0.repo_url"), name = text("general.name");
    std::string found = text("general.base_model.0.organization") + "/" + text("general.base_model.0.name");
    if (url.starts_with(kHub)) found = url.substr(kHub.size());
    std::ranges::replace(found, ' ', '-');
    std::ranges::replace(name, ' ', '-');
    const bool is_it = name.empty() || lower(name) == lower(found.substr(found.find('/') + 1));
    return is_hub_name(found) && is_it ? found : otherwise;
}

const char* gguf_architecture(const Family& family) {
    return family.gguf.architecture ? family.gguf.architecture : family.name;
}

GgufPart::Rows rows_order(const ModelConfig& c, const std::string& name) {
    const auto has = [&](const char* part) { return name.find(part) != name.npos; };
    const bool rotary = has(".q_proj.") || has(".k_proj.");
    if (c.family->gguf.rotary_pairs && rotary) return GgufPart::Rows::RotaryPairs;
    if (c.family->heads_together && has(".query_key_value.")) return GgufPart::Rows::QueriesKeysValues;
    return GgufPart::Rows::Same;
}

GgufModel::GgufModel(const std::string& path) : file_(path), reader_(file_.metadata(), path) {
    arch_ = reader_.text("general.architecture", "");
    std::string known;
    for (const Family* family : kFamilies) {
        const std::string name = gguf_architecture(*family);
        if (name.empty()) continue;
        if (name == arch_ && !family_) family_ = family;
        if (!has_word(known.c_str(), name)) known += (known.empty() ? "" : " ") + name;
    }
    if (!family_)
        fail("%s: 'general.architecture' is \"%s\"; there are %s", path, printable(arch_),
             jinja::replaced(known, " ", ", ", -1));
    const std::string type = reader_.text("general.type", "model");
    if (type != "model") fail("%s: 'general.type' is \"%s\"; a model is needed", path, printable(type));
    refuse_other_keys();
    config_ = parse_config(config_json(), path);
    read_rope_divisors();
    check_tensors();
}

GgufPart GgufModel::get(const std::string& name, const std::vector<int64_t>& shape) const {
    const std::string ours = gguf::name_of(*config_.family, name);
    const GgufTensor* tensor = file_.find(ours);
    if (!tensor) fail("%s: tensor \"%s\" is missing, which is %s", file_.path(), ours, name);
    if (tensor->shape != shape)
        fail("%s: tensor \"%s\" has shape %s where %s is needed", file_.path(), ours,
             shape_text(tensor->shape), shape_text(shape));
    return {tensor, rows_order(config_, name), config_.head_size, config_.heads};
}

// Fails on keys that are not read: ignoring them could mean wrong arithmetic.
void GgufModel::refuse_other_keys() const {
    reader_.must_be("split.count", {1, 0});  // the number of files of one model
    constexpr const char* kKnown =
        "vocab_size context_length embedding_length block_count feed_forward_length attention.head_count "
        "attention.head_count_kv attention.key_length attention.value_length "
        "attention.layer_norm_epsilon attention.layer_norm_rms_epsilon attention.sliding_window "
        "rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor "
        "rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.attn_factor "
        "rope.scaling.yarn_beta_fast "
        "rope.scaling.yarn_beta_slow tensor_data_layout";
    for (const auto& [name, value] : file_.metadata().items()) {
        if (!name.starts_with(arch_ + ".")) continue;
        const std::string own = name.substr(arch_.size() + 1);
        const auto is_it = [&](const GgufName& key) { return own == key.gguf; };
        if (!has_word(kKnown, own) && std::ranges::none_of(family_->gguf.keys, is_it))
            fail("%s: '%s' is not supported", file_.path(), printable(name));
    }
}

// The number of rows of the embedding.
int GgufModel::vocabulary() const {
    const GgufTensor* embedding = file_.find("token_embd.weight");
    if (!embedding || embedding->shape.size() != 2 || embedding->rows() > kMostVocabulary)
        fail("%s: tensor \"token_embd.weight\" is missing, or is no embedding", file_.path());
    const auto rows = static_cast<int>(embedding->rows());
    reader_.must_be(key("vocab_size"), {rows});
    return rows;
}

nlohmann::json GgufModel::config_json() const {
    const auto size = [&](const char* name, int most) { return reader_.size(key(name), most); };
    const bool bloom = arch_ == "bloom";
    nlohmann::json json = {{"vocab_size", vocabulary()}, {"model_type", family_->name}};
    const int layers = size("block_count", kMostLayers), channels = size("embedding_length", kMostChannels);
    const int heads = size("attention.head_count", kMostChannels),
              mlp = size("feed_forward_length", kMostMlpWidth);
    add_marks(json);
    if (arch_ == "gpt2" || bloom) {
        json.update(
            {{"n_layer", layers},
             {bloom ? "hidden_size" : "n_embd", channels},
             {"n_head", heads},
             {"n_inner", mlp},
             {"layer_norm_epsilon", reader_.number(key("attention.layer_norm_epsilon"), 1e-5, 0, 1)}});
        if (!bloom || reader_.has(key("context_length")))
            json[bloom ? "seq_length" : "n_positions"] = size("context_length", kMostPositions);
        return json;
    }
    json.update({{"num_hidden_layers", layers},
                 {"hidden_size", channels},
                 {"num_attention_heads", heads},
                 {"intermediate_size", mlp},
                 {"max_position_embeddings", size("context_length", kMostPositions)},
                 {"num_key_value_heads", reader_.size(key("attention.head_count_kv"), heads, kMostChannels)},
                 {"rms_norm_eps", reader_.number(key("attention.layer_norm_rms_epsilon"), 0, 1)},
                 {"tie_word_embeddings", !file_.find("output.weight")}});
    json["attention_bias"] = file_.find("blk.0.attn_output.bias") != nullptr;
    add_positions(json, channels, heads);
    for (const auto& [place, name] : family_->gguf.keys)
        if (reader_.has(key(name)))
            json[nlohmann::json::json_pointer(place)] = reader_.number(key(name), -1e30, 1e30);
    if (family_->gguf.add_implied) family_->gguf.add_implied(json);
    return json;
}

// Adds the settings of rotary positions and of the attention window.
void GgufModel::add_positions(nlohmann::json& json, int channels, int heads) const {
    const int share = channels % heads == 0 ? channels / heads : 0;
    if (share == 0 && !reader_.has(key("attention.key_length")))
        fail("%s: '%s' is missing, and %d channels are not a multiple of %d heads", file_.path(),
             key("attention.key_length"), channels, heads);
    const int head_size = reader_.size(key("attention.key_length"), share, kMostHeadSize);
    json["head_dim"] = head_size;
    reader_.must_be(key("attention.value_length"), {head_size});
    const int rotated = reader_.size(key("rope.dimension_count"), head_size, head_size);
    if (rotated != head_size) json["partial_rotary_factor"] = double(rotated) / head_size;
    json["rope_theta"] = reader_.number(key("rope.freq_base"), 10000, 1, 1e30);
    const std::string scaling = reader_.text(key("rope.scaling.type"), "none");
    const auto number = [&](const char* name, double otherwise) {
        return reader_.number(key(name), otherwise, 0, 1e30);
    };
    if (scaling == "linear")
        json["rope_scaling"] = {{"rope_type", "linear"},
                                {"factor", reader_.number(key("rope.scaling.factor"), 0, 1e30)}};
    else if (scaling == "yarn")
        json["rope_scaling"] = {{"rope_type", "yarn"},
                                {"factor", number("rope.scaling.factor", 1)},
                                {"original_max_position_embeddings",
                                 reader_.size(key("rope.scaling.original_context_length"), kMostPositions)},
                                {"beta_fast", number("rope.scaling.yarn_beta_fast", 32)},
                                {"beta_slow", number("rope.scaling.yarn_beta_slow", 1)}};
    else if (scaling != "none")
        fail("%s: '%s' is \"%s\"; none, linear and yarn are supported", file_.path(),
             key("rope.scaling.type"), printable(scaling));
    if (file_.find("rope_factors_long.weight")) add_longrope(json);
    if (!reader_.has(key("attention.sliding_window"))) return;
    const int window = reader_.integer(key("attention.sliding_window"), 0, INT32_MAX);
    if (window == 0) return;  // as in Phi-4
    json["sliding_window"] = window;
    if (arch_ == "llama")
        json["model_type"] = "mistral";
    else
        json["use_sliding_window"] = true, json["max_window_layers"] = 0;
}

// Adds the scaling `longrope`, whose lists are tensors.
void GgufModel::add_longrope(nlohmann::json& json) const {
    nlohmann::json& scaling = json["rope_scaling"] = {{"rope_type", "longrope"}};
    for (const char* list : {"long", "short"}) {
        const std::string name = format("rope_factors_%s.weight", list);
        const GgufTensor* tensor = file_.find(name);
        if (!tensor || std::string_view(tensor->type->name) != "F32" || tensor->shape.size() != 1)
            fail("%s: tensor \"%s\" is missing, or is no list of numbers", file_.path(), name);
        std::vector<float> divisors(static_cast<size_t>(tensor->rows()));
        tensor->file->read(tensor->offset, tensor->bytes, divisors.data());
        scaling[format("%s_factor", list)] = divisors;
    }
    scaling["original_max_position_embeddings"] =
        reader_.size(key("rope.scaling.original_context_length"), kMostPositions);
    if (reader_.has(key("rope.scaling.attn_factor")))
        scaling["attention_factor"] = reader_.number(key("rope.scaling.attn_factor"), 0, 1e30);
}

// Adds the tokens that begin and end a text. The token that ends a turn ends a text too.
void GgufModel::add_marks(nlohmann::json& json) const {
    const auto mark = [&](const char* name) {
        const std::string full = std::string("tokenizer.ggml.") + name;
        return reader_.has(full) ? nlohmann::json(reader_.integer(full, 0, kMostVocabulary))
                                 : nlohmann::json();
    };
    json["bos_token_id"] = mark("bos_token_id");
    json["pad_token_id"] = mark("padding_token_id");
    nlohmann::json ends = nlohmann::json::array();
    for (const char* name : {"eos_token_id", "eot_token_id"})
        if (const nlohmann::json end = mark(name); !end.is_null() && (ends.empty() || ends[0] != end))
            ends.push_back(end);
    json["eos_token_id"] = ends;
}

void GgufModel::read_rope_divisors() {
    const GgufTensor* tensor = file_.find("rope_freqs.weight");
    if (!tensor) return;
    const auto refuse = [&](const char* why) {
        fail("%s: tensor \"rope_freqs.weight\" %s", file_.path(), why);
    };
    if (config_.family->position != PositionKind::Rotary) refuse("is in a model without rotary positions");
    if (tensor->shape != std::vector<int64_t>{config_.head_size / 2} ||
        std::string_view(tensor->type->name) != "F32")
        refuse("is not a number for each pair of channels of a head");
    std::vector<float> given(static_cast<size_t>(tensor->rows()));
    tensor->file->read(tensor->offset, tensor->bytes, given.data());
    RopeScaling rope = config_.rope;
    if (rope.type != RopeType::kDefault) refuse("stands beside another scaling of the positions");
    rope.type = RopeType::kLlama3;
    if (!gguf::find_llama3(config_.head_size, given, rope)) refuse("is not the scaling of Llama 3.1");
    if (rope.factor > 1) config_.rope = rope;
}

// Fails if a tied head is in the file and differs from the token embedding. One that has been quantized in
// another way is not compared.
void GgufModel::check_tied_head() const {
    const GgufTensor *head = file_.find("output.weight"), *tokens = file_.find("token_embd.weight");
    if (!head || !tokens) return;
    const auto refuse = [&] {
        fail("%s: tensor \"output.weight\" is not \"token_embd.weight\", as in every %s model", file_.path(),
             config_.family->name);
    };
    if (head->shape != tokens->shape) refuse();
    const GgufPart one{head, GgufPart::Rows::Same, 0, 0}, other{tokens, GgufPart::Rows::Same, 0, 0};
    constexpr int64_t kRows = 256;
    for (int64_t first = 0; first < head->shape[0]; first += kRows) {
        const int64_t count = std::min(kRows, head->shape[0] - first);
        const auto rows = static_cast<size_t>(count);
        if (head->type == tokens->type) {
            std::vector<char> bytes(rows * head->row_bytes()), others(bytes.size());
            one.read_rows(first, count, bytes.data());
            other.read_rows(first, count, others.data());
            if (bytes != others) refuse();
        } else if (one.has_floats() && other.has_floats()) {
            // The narrower of the two types decides how near they must be.
            std::vector<float> x(rows * static_cast<size_t>(head->shape[1])), y(x.size());
            one.read_floats(first, count, x.data());
            other.read_floats(first, count, y.data());
            for (size_t i = 0; i < x.size(); i++)
                if (!(std::fabs(x[i] - y[i]) <= 0x1p-7f * std::fabs(x[i]) + 1e-6f)) refuse();
        }
    }
}

// Checks that all tensors are there and no others. Allowed besides them: the divisors of the frequencies, and
// a copy of the embedding as the head, which converters of GPT-2 and BLOOM wrote.
void GgufModel::check_tensors() const {
    std::set<std::string> known = {"rope_freqs.weight"};
    if (config_.rope.type == RopeType::kLongrope)
        known.insert({"rope_factors_long.weight", "rope_factors_short.weight"});
    if (arch_ == "bloom" || arch_ == "gpt2") {
        known.insert("output.weight");
        check_tied_head();
    }
    for_each_tensor(config_, [&](const std::string& name, const FileTensor& t, Field field, int) {
        std::vector<int64_t> shape(t.shape.dims, t.shape.dims + t.shape.count);
        // A GGUF has all matrices as (out, in).
        if (!config_.family->by_outputs && is_linear(field)) std::swap(shape[0], shape[1]);
        const GgufPart found = get(name, shape);
        const bool is_f32 = std::string_view(found.tensor->type->name) == "F32";
        if (t.shape.count == 1 && !(added_in_gguf(*config_.family, field) == 0 ? found.has_floats() : is_f32))
            fail("%s: tensor \"%s\" has type %s where F32 is needed", file_.path(), found.tensor->name,
                 found.tensor->type->name);
        known.insert(found.tensor->name);
    });
    for (const GgufTensor& tensor : file_.tensors())
        if (!known.contains(tensor.name))
            fail("%s: tensor \"%s\" is not of a %s model as it is known here", file_.path(),
                 printable(tensor.name), config_.family->name);
}
