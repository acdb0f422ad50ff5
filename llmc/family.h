// family.h - describes a family of models as a value: its names in Hugging Face's files, which alternatives
// its blocks use, how its config.json is read and written, and a table of its tensors. To add a family, write
// one file, family_NAME.h, and add one line to families.h.
//
// A row of the table is one tensor in memory. It has the field of the block, the files' tensors that are
// joined in it one after the other, their initial values, and whether they get weight decay. Matrices keep
// the orientation of the files, so a block has the same bytes in memory as on disk.
#pragma once

#include <algorithm>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "llmc/model_config.h"
#include "llmc/step_plan.h"

enum class NormKind {
    Layer,
    Rms,         // the normalized row is rounded before it is multiplied with the weight
    RmsFloat,    // multiplied in fp32, and rounded once
    RmsPlusOne,  // in fp32 with 1 + weight: a new weight is 0
};
enum class PositionKind { Learned, Rotary, Alibi };
enum class MlpKind { Gelu, SwiGlu, GeGlu };  // GELU in its tanh form

// What a tensor is for. Fields up to EmbeddingNormBias belong to the embeddings, the last three to the head,
// and the others to a block.
enum class Field {
    SoftPrompt,
    TokenEmbedding,
    PositionEmbedding,
    EmbeddingNormWeight,
    EmbeddingNormBias,
    Norm1Weight,
    Norm1Bias,
    QkvWeight,
    QkvBias,
    QueryNormWeight,
    KeyNormWeight,
    AttentionWeight,  // the projection of attention's output
    AttentionBias,
    AttentionNormWeight,  // of what attention adds to the residual stream
    Norm2Weight,
    Norm2Bias,
    UpWeight,  // if there is a gate: gate, then up
    UpBias,
    DownWeight,
    DownBias,
    MlpNormWeight,  // of what the MLP adds to it
    LastNormWeight,
    LastNormBias,
    HeadWeight,
};

// The linear layers of a block, in the order of their products.
inline constexpr Field kLinearFields[] = {Field::QkvWeight, Field::AttentionWeight, Field::UpWeight,
                                          Field::DownWeight};
constexpr bool is_linear(Field field) {
    return std::ranges::find(kLinearFields, field) != std::end(kLinearFields);
}

constexpr bool is_norm_weight(Field field) {
    using enum Field;
    constexpr Field all[] = {Norm1Weight,   Norm2Weight,         QueryNormWeight, KeyNormWeight,
                             MlpNormWeight, AttentionNormWeight, LastNormWeight};
    return std::ranges::find(all, field) != std::end(all);
}

enum class Init { Normal, ResidualNormal, Zero, One, Uniform };

// Which of LoRA's two matrices a tensor is. A linear layer with LoRA adds scale B (A x) to its outputs, from
// first_output on. None: the tensor is the layer's own.
struct LoraRole {
    enum { None, A, B } matrix = None;
    int64_t first_output = 0;
    float scale = 1;
};

// A tensor in the files.
struct FileTensor {
    std::string name;        // without the family's prefix
    Shape shape;             // in the file
    bool has_prefix = true;  // its full name begins with the family's prefix
};

struct Row {
    Field field;
    std::vector<FileTensor> parts;  // of one width; together the tensor in memory, without padding
    Init init;
    bool decays;
    bool padded = false;  // to padded_vocabulary() rows
    // The tensor's name in our own files, if it joins or is none of the family's tensors.
    std::string name = {};
    LoraRole lora = {};
};
using Table = std::vector<Row>;

// A row with one tensor of the files. Matrices get weight decay, vectors do not.
inline Row row(Field field, const char* name, Shape shape, Init init) {
    return {field, {{name, shape}}, init, shape.count == 2};
}

// The head's matrix, if it is not tied to the token embedding.
inline Row own_head(const ModelConfig& c) {
    return {
        Field::HeadWeight, {{"lm_head.weight", {c.vocabulary, c.channels}, false}}, Init::Normal, true, true};
}

// What a GGUF calls something, beside the names that all families share.
struct GgufName {
    const char* ours;  // a tensor's name, without its prefix and ending, or a place in config.json
    const char* gguf;
};

// How a family's models are in a GGUF of llama.cpp.
struct GgufForm {
    const char* architecture = nullptr;  // null: the family's name; "": not read or written here
    // Rows of queries and keys that rotate together are neighbours, as in Meta's files.
    bool rotary_pairs = false;
    std::span<const GgufName> tensors = {}, keys = {};
    bool states_no_window = false;  // models without a window say that it is 0
    // Adds what llama.cpp takes for granted to the config.json that was made of a GGUF's keys.
    void (*add_implied)(nlohmann::json&) = nullptr;
};

// The defaults of the family's class in `transformers`, for keys that a config.json lacks.
struct TokenDefaults {
    int vocabulary;
    int begin_of_text = -1, end_of_text = -1, padding = -1;  // -1: none
};

struct Family {
    const char* name;          // "model_type" in config.json
    const char* architecture;  // the single entry of "architectures"
    TokenDefaults tokens;
    const char* prefix;  // of its tensors' names; some tools write files without it
    NormKind norm;
    PositionKind position;
    MlpKind mlp;
    bool by_outputs;  // matrices are stored (out, in), as in PyTorch's Linear; else (in, out)
    // Query, key and value of each head are stored together; else all queries, then all keys, then all
    // values.
    bool heads_together = false;
    // Reads the family's own keys into a config. Fails on what is missing or not supported.
    void (*read)(const ConfigReader&, ModelConfig&);
    // Writes what read() reads, and further keys that `transformers` wants.
    void (*write)(const ModelConfig&, nlohmann::json&);
    // Fills in a new model's other sizes; channels, heads and positions are given.
    void (*begin)(ModelConfig&);
    Table (*embeddings)(const ModelConfig&);
    Table (*block)(const ModelConfig&, const LayerConfig&);  // the names do not include "h.3." or the like
    Table (*head)(const ModelConfig&);
    const char* blocks;  // "h" or "layers": comes before a block's number in names
    // True if the family's class has dropout in training: of attention probabilities, of what is added to the
    // residual stream, and, with learned positions, of the embeddings.
    bool drops = false;
    GgufForm gguf = {};
};

// What a GGUF adds to the weights of a norm: llama.cpp multiplies with them as they are.
constexpr float added_in_gguf(const Family& family, Field field) {
    return family.norm == NormKind::RmsPlusOne && is_norm_weight(field) ? 1.f : 0.f;
}

// The part of a block's tensor names between the family's prefix and their own names.
inline std::string block_prefix(const Family& family, int layer) {
    return std::string(family.blocks) + "." + std::to_string(layer) + ".";
}

// The tensors of a unit, as the model's family has them.
inline Table family_table(const ModelConfig& c, int unit) {
    if (unit == 0) return c.family->embeddings(c);
    return unit <= c.layers ? c.family->block(c, c.layer(unit - 1)) : c.family->head(c);
}

// Calls visit(name, tensor, field, layer) for each tensor of a model's files, with its whole name. The layer
// is -1 outside of the blocks.
template <class Visit>
void for_each_tensor(const ModelConfig& c, Visit&& visit) {
    for (int unit = 0; unit <= c.layers + 1; unit++) {
        const bool is_block = unit > 0 && unit <= c.layers;
        const std::string prefix = c.family->prefix + (is_block ? block_prefix(*c.family, unit - 1) : "");
        for (const Row& row : family_table(c, unit))
            for (const FileTensor& t : row.parts)
                visit((t.has_prefix ? prefix : "") + t.name, t, row.field, is_block ? unit - 1 : -1);
    }
}
