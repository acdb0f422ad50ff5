// gguf_export.cpp - the types, tensors and keys of an export, as llama.cpp's tools choose them.
#include "llmc/gguf_export.h"

#include <cmath>

#include "llmc/model_positions.h"

constexpr ExportType kExportTypes[] = {
    {"f32", 0, "F32", false},     {"f16", 1, "F16", false},     {"bf16", 32, "BF16", false},
    {"q8_0", 7, "Q8_0", false},   {"q4_0", 2, "Q4_0", true},    {"q4_1", 3, "Q4_1", true},
    {"q5_0", 8, "Q5_0", true},    {"q5_1", 9, "Q5_1", true},    {"iq4_nl", 25, "IQ4_NL", true},
    {"q4_k_s", 14, "Q4_K", true}, {"q4_k_m", 15, "Q4_K", true}, {"q5_k_s", 16, "Q5_K", true},
    {"q5_k_m", 17, "Q5_K", true}, {"q6_k", 18, "Q6_K", true},
};
const ExportType* find_export_type(std::string_view name) {
    for (const ExportType& type : kExportTypes)
        if (name == type.name) return &type;
    return nullptr;
}

// The type with more bits that attn_v and ffn_down of a layer get in files of `type`; null if they get none.
static const char* more_bits(std::string_view type, const ModelConfig& c, int layer, bool is_down) {
    const int eighth = c.layers / 8;
    if (type.ends_with("_k_m"))  // the first and the last eighth, and every third layer between them
        return layer < eighth || layer >= 7 * c.layers / 8 || (layer - eighth) % 3 == 2 ? "Q6_K" : nullptr;
    if (type == "q4_k_s") return layer < (is_down ? eighth : 4) ? "Q5_K" : nullptr;
    if (type == "iq4_nl") return (is_down ? layer < eighth : c.heads / c.kv_heads >= 4) ? "Q5_K" : nullptr;
    return nullptr;
}

const GgufType& export_type_of(const ExportType& type, const ModelConfig& c, const std::string& name,
                               int layer, int64_t columns) {
    const auto has = [&](const char* part) { return name.find(part) != name.npos; };
    const auto fits = [&](std::string_view matrix) { return columns % gguf_type(matrix).block == 0; };
    const bool is_head =
        name == "output.weight" || (c.tied && name == "token_embd.weight");  // a tied one too
    std::string_view chosen = type.matrices;
    if (type.is_mixed && is_head)
        chosen = fits("Q6_K") ? "Q6_K" : "Q8_0";
    else if (has("attn_v.") || has("attn_qkv.") || has("ffn_down."))
        if (const char* more = more_bits(type.name, c, layer, has("ffn_down."))) chosen = more;
    // Rows that are no whole blocks get a type with smaller blocks.
    if (!fits(chosen)) chosen = chosen == "Q4_K" ? "Q5_0" : chosen == "Q5_K" ? "Q5_1" : "Q8_0";
    return gguf_type(fits(chosen) ? chosen : "F16");
}

size_t export_buffers(const ModelConfig& c, int64_t chunk_elements) {
    const size_t chunk = static_cast<size_t>(chunk_elements) * 3 * sizeof(float) + (size_t{1} << 20);
    const auto matrix = static_cast<size_t>(int64_t{c.mlp_width} * c.channels) * sizeof(float);
    return chunk + (c.family->by_outputs ? 0 : matrix);
}

// A number of parameters as llama.cpp labels sizes: "135M", "1.2B".
static std::string size_label(int64_t parameters) {
    constexpr std::pair<double, const char*> units[] = {{1e12, "T"}, {1e9, "B"}, {1e6, "M"}, {1e3, "K"}};
    const auto n = static_cast<double>(parameters);
    auto [unit, letter] = units[3];
    for (const auto& larger : {units[2], units[1], units[0]})
        if (n > larger.first) unit = larger.first, letter = larger.second;
    const double scaled = n / unit, whole = std::nearbyint(scaled);
    return format("%.*f%s", whole >= 10 ? 0 : whole >= 1 ? 1 : 2, scaled, letter);
}

// A model's name from its folder's: "SmolLM2-135M-instruct" becomes "SmolLM2 135M Instruct".
static std::string title_of(std::string folder) {
    std::ranges::replace(folder, '-', ' ');
    std::string title;
    for (std::string& word : words_of(folder)) {
        const auto has = [&](int (*kind)(int)) {
            return std::ranges::any_of(word, [&](unsigned char c) { return kind(c) != 0; });
        };
        const bool is_version =
            word.size() > 1 && word[0] == 'v' && word.find_first_not_of("0123456789.", 1) == word.npos;
        const bool is_number = !word.empty() && std::isdigit(static_cast<unsigned char>(word[0]));
        const bool gets_capitals = has(std::islower) && !has(std::isupper) && !is_version && !is_number;
        bool begins = true;
        for (char& letter : word) {
            const auto c = static_cast<unsigned char>(letter);
            if (gets_capitals && begins) letter = static_cast<char>(std::toupper(c));
            begins = !std::isalpha(c);
        }
        if (!word.empty()) title += (title.empty() ? "" : " ") + word;
    }
    return title;
}

// What llama.cpp's converter reads from a model's name, "SmolLM2-135M-Instruct": the other names are empty if
// the name does not tell.
struct NameParts {
    std::string basename, finetune, version, size_label;
};

// Reads a model's name as gguf's Metadata.get_model_id_components() does. A size counts only if it is near
// the model's number of parameters; else it is probably a context length.
static NameParts parts_of_name(const std::string& name, int64_t parameters) {
    enum Kind { None, Version, Type, Size, Finetune, Base };
    std::vector<std::pair<std::string, Kind>> parts;
    for (size_t at = 0; at <= name.size() && name.find(' ') == name.npos;) {
        const size_t end = std::min(name.find('-', at), name.size());
        if (end > at) parts.emplace_back(name.substr(at, end - at), None);
        at = end + 1;
    }
    for (size_t i = 0; i < parts.size(); i++) {
        auto& [part, kind] = parts[i];
        if (matches(part, "(v|iter)?\\d+([.]\\d+)*")) {
            kind = Version;
        } else if (matches(part, "i?q\\d(_\\w)*|b?fp?(16|32)")) {
            kind = Type;
        } else if (i > 0 &&
                   matches(part, "(A|\\d+x)?\\d+([._]\\d+)?[KMBT]\\d?|small|mini|medium|large|x?xl")) {
            std::ranges::replace(part, '_', '.');
            const auto digit = [&part = part](size_t from_end) {
                return part.size() >= from_end &&
                       std::isdigit(static_cast<unsigned char>(part[part.size() - from_end]));
            };
            if (digit(1))  // 7b1
                part = part.substr(0, part.size() - 2) + "." + part.back() + part[part.size() - 2];
            if (digit(2))
                part.back() = static_cast<char>(std::toupper(static_cast<unsigned char>(part.back())));
            kind = Size;
            char* rest = nullptr;
            const double number = strtod(part.c_str(), &rest), total = static_cast<double>(parameters);
            const size_t unit = std::string_view(" KMBT").find(part.back());
            if (rest + 1 == part.c_str() + part.size() && unit != std::string_view::npos &&
                std::abs(number * std::pow(1000, unit) - total) > std::floor(7 * total / 8)) {
                kind = Finetune;
                part.back() = static_cast<char>(std::tolower(static_cast<unsigned char>(part.back())));
            }
        } else if (i > 0 && matches(part, "chat|instruct|vision|lora")) {
            kind = Finetune;
        }
    }
    const auto has_digit = [](const std::string& text) {
        return text.find_first_of("0123456789") != text.npos;
    };
    const bool numbered =
        std::ranges::any_of(parts, [&](const auto& p) { return p.second == Size && has_digit(p.first); });
    // The base name is at the start. It includes versions, except at the end of the whole name.
    size_t base = 0;
    for (auto& [part, kind] : parts)
        if (kind == Size && numbered && !has_digit(part)) kind = None;
    while (base < parts.size() &&
           (parts[base].second == Version ||
            (parts[base].second == None && std::isalpha(static_cast<unsigned char>(parts[base].first[0])))))
        base++;
    size_t end = base;
    while (base == parts.size() && end > 0 && parts[end - 1].second == Version) end--;
    NameParts found;
    const auto join = [](std::string& to, const std::string& part) { to += (to.empty() ? "" : "-") + part; };
    for (size_t i = 0; i < parts.size(); i++) {
        const auto& [part, kind] = parts[i];
        if (i < end)
            join(found.basename, part);
        else if (kind == Version)
            join(found.version, part);
        else if (kind == Size && ("-" + found.size_label + "-").find("-" + part + "-") == std::string::npos)
            join(found.size_label, part);
        else if (kind == Finetune || kind == None)
            join(found.finetune, part);
    }
    if (found.size_label.empty() && found.finetune.empty() && found.version.empty()) found.basename.clear();
    return found;
}

void check_rope_for_gguf(const ModelConfig& c, const std::string& where) {
    const RopeScaling& s = c.rope;
    const char* const name = kRopeNames[static_cast<int>(s.type)];
    if (s.type == RopeType::kDynamic) fail("%s: GGUF has no rotary scaling \"%s\"", where, name);
    if (s.type == RopeType::kLlama3 && std::string_view(gguf_architecture(*c.family)) != "llama")
        fail("%s: GGUF has the rotary scaling \"%s\" for llama alone, and this is a %s", where, name,
             c.family->name);
    const bool has_mscale = s.mscale > 0 || s.mscale_all_dim > 0;
    const bool is_written = has_mscale && s.mscale == s.mscale_all_dim && !c.family->gguf.keys.empty();
    if (s.type == RopeType::kYarn && (s.attention_factor > 0 || (has_mscale && !is_written) || !s.truncate))
        fail("%s: GGUF has no keys for \"attention_factor\", \"mscale\" and \"truncate\" of \"%s\"", where,
             name);
}

void check_layers_for_gguf(const ModelConfig& c, const std::string& where) {
    nlohmann::json json = config_json(c, "float32");
    const auto implied = c.family->gguf.add_implied;
    if (c.uneven.empty() && !implied) return;
    for (const char* without_key :
         {"layer_types", "no_rope_layers", "layer_sizes", "query_pre_attn_scalar", "rope_local_base_freq"})
        json.erase(without_key);
    if (implied) implied(json);
    if (!(parse_config(json, where) == c))
        fail(
            "%s: GGUF has no keys for the scale of attention's scores and for how layers differ in a %s, and "
            "this is "
            "none of its published models",
            where, c.family->name);
}

// Adds the keys of rotary positions.
static void add_rope_keys(GgufKeys& keys, const std::string& arch, const RopeScaling& s) {
    if (s.type == RopeType::kLinear || s.type == RopeType::kYarn) {
        keys.add(arch + ".rope.scaling.type", kRopeNames[static_cast<int>(s.type)]);
        keys.add(arch + ".rope.scaling.factor", s.factor);
    }
    if (s.type == RopeType::kLongrope) keys.add(arch + ".rope.scaling.attn_factor", attention_factor(s));
    if (s.type == RopeType::kYarn || s.type == RopeType::kLongrope)
        keys.add(arch + ".rope.scaling.original_context_length",
                 static_cast<uint32_t>(s.original_max_position_embeddings));
    if (s.type == RopeType::kYarn) {
        keys.add(arch + ".rope.scaling.yarn_beta_fast", s.beta_fast);
        keys.add(arch + ".rope.scaling.yarn_beta_slow", s.beta_slow);
    }
    keys.add(arch + ".rope.freq_base", s.theta);
}

// Adds the keys of sampling that generation_config.json asks for.
static void add_sampling_keys(GgufKeys& keys, const nlohmann::json& generation) {
    if (!generation.is_object()) return;
    const auto number = [&](const char* name) {
        const auto found = generation.find(name);
        return found != generation.end() && found->is_number() ? &*found : nullptr;
    };
    if (const auto* k = number("top_k")) keys.add("general.sampling.top_k", k->get<int32_t>());
    constexpr std::pair<const char*, const char*> floats[] = {{"top_p", "top_p"},
                                                              {"min_p", "min_p"},
                                                              {"temperature", "temp"},
                                                              {"repetition_penalty", "penalty_repeat"}};
    for (const auto& [name, key] : floats)
        if (const auto* value = number(name))
            keys.add(std::string("general.sampling.") + key, value->get<double>());
}

GgufKeys model_keys(const ModelConfig& c, const ExportType& type, const std::string& name,
                    int64_t parameters) {
    const std::string arch = gguf_architecture(*c.family), own = arch + ".";
    const auto size = [&](GgufKeys& keys, const char* key, int64_t value) {
        keys.add(own + key, static_cast<uint32_t>(value));
    };
    GgufKeys keys;
    keys.add("general.architecture", arch);
    keys.add("general.type", "model");
    add_sampling_keys(keys, c.generation);
    const NameParts parts = parts_of_name(name, parameters);
    keys.add("general.name", title_of(name));
    if (!parts.version.empty()) keys.add("general.version", parts.version);
    if (!parts.finetune.empty()) keys.add("general.finetune", parts.finetune);
    if (!parts.basename.empty()) keys.add("general.basename", parts.basename);
    keys.add("general.size_label", parts.size_label.empty() ? size_label(parameters) : parts.size_label);
    size(keys, "block_count", c.layers);
    // llama.cpp takes no longer texts. For a BLOOM that states no length, its converter writes the channels.
    const int length = c.stated_length > 0 ? c.stated_length : c.channels;
    size(keys, "context_length", c.family == &kBloom ? length : c.positions);
    size(keys, "embedding_length", c.channels);
    size(keys, "feed_forward_length", c.mlp_width);
    size(keys, "attention.head_count", c.heads);
    if (c.family != &kGpt2) size(keys, "attention.head_count_kv", c.kv_heads);
    if (c.family->norm == NormKind::Layer) {
        keys.add(own + "attention.layer_norm_epsilon", c.norm_epsilon);
    } else {
        add_rope_keys(keys, arch, c.rope);
        keys.add(own + "attention.layer_norm_rms_epsilon", c.norm_epsilon);
        size(keys, "attention.key_length", c.head_size);
        size(keys, "attention.value_length", c.head_size);
    }
    if (const int window = c.shortest_window(); window > 0 || c.family->gguf.states_no_window)
        size(keys, "attention.sliding_window", window);
    keys.add("general.file_type", type.file_type);
    if (c.family->gguf.rotary_pairs) size(keys, "vocab_size", c.vocabulary);
    const int rotated = rotated_channels(c, c);
    if (c.family->gguf.rotary_pairs || (rotated > 0 && rotated != c.head_size))
        size(keys, "rope.dimension_count", rotated);
    const nlohmann::json settings = config_json(c, "float32");
    for (const auto& [place, key] : c.family->gguf.keys)
        if (const nlohmann::json::json_pointer at(place);
            settings.contains(at) && !settings[at].is_null() && !keys.has(own + key))
            keys.add(own + key, settings[at].get<double>());
    keys.add("general.quantization_version", uint32_t{2});
    return keys;
}

std::vector<ExportTensor> adapter_tensors(const ModelConfig& c, const std::vector<LinearModule>& modules,
                                          const ExportType& type, double alpha) {
    std::vector<ExportTensor> tensors;
    for (const LinearModule& m : modules) {
        const std::string layer = full_name(c, m), name = gguf::name_of(*c.family, layer + ".weight");
        const auto add = [&](const char* end, const char* peft, int64_t rows,
                             int64_t columns) -> ExportTensor& {
            const GgufType& own = gguf_type(type.matrices);
            const GgufType& chosen = columns % own.block == 0 ? own : gguf_type("F16");
            tensors.push_back({name + end,
                               kPeftPrefix + layer + peft,
                               m.field,
                               m.layer + 1,
                               {rows, columns},
                               &chosen,
                               0,
                               GgufPart::Rows::Same,
                               false});
            return tensors.back();
        };
        add(".lora_a", ".lora_A.weight", m.rank, m.inputs);
        ExportTensor& b = add(".lora_b", ".lora_B.weight", m.outputs, m.rank);
        b.order = rows_order(c, layer + ".weight");
        b.factor = static_cast<float>(m.scale * m.rank / alpha);
    }
    return tensors;
}

GgufKeys adapter_keys(const ModelConfig& c, const std::string& name, double alpha) {
    GgufKeys keys;
    keys.add("general.architecture", gguf_architecture(*c.family));
    keys.add("general.type", "adapter");
    keys.add("adapter.type", "lora");
    keys.add("general.name", title_of(name));
    keys.add("adapter.lora.alpha", alpha);
    keys.add("general.quantization_version", uint32_t{2});
    return keys;
}
