// family.h - what a family of models is: a value. Its names in Hugging Face's files, which of a few
// alternatives its block takes, how its config.json is read and written, and a table of its tensors. A family
// is one file, family_NAME.h, and one line in families.h.
//
// A row of the table is one tensor in memory: the field of the block, the files' tensors that lie in it one
// after the other, how they start, and whether they decay. Matrices keep the orientation of the files, so
// that a block's bytes in memory are its bytes on disk.
#pragma once

#include <string>
#include <vector>

#include "llmc/model_config.h"
#include "llmc/tensor.h"

enum class NormKind { Layer, Rms };
enum class PositionKind { Learned, Rotary, Alibi };
enum class MlpKind { Gelu, SwiGlu };

// What a tensor is for. Those up to EmbeddingNormBias are of the embeddings, the last three of the head, the
// rest of a block.
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
    Norm2Weight,
    Norm2Bias,
    UpWeight,  // gate and up, one after the other, where there is a gate
    UpBias,
    DownWeight,
    DownBias,
    LastNormWeight,
    LastNormBias,
    HeadWeight,
};

// The linear layers of a block, in the order of their products.
inline constexpr Field kLinearFields[] = {Field::QkvWeight, Field::AttentionWeight, Field::UpWeight,
                                          Field::DownWeight};

enum class Init { Normal, ResidualNormal, Zero, One, Uniform };

// Which of LoRA's two matrices a tensor is, beside the linear layer whose field it has: the layer adds
// scale B (A x) to outputs from first_output on. None of them: the layer's own.
struct LoraRole {
    enum { None, A, B } matrix = None;
    int64_t first_output = 0;
    float scale = 1;
};

// A tensor of the files.
struct FileTensor {
    std::string name;        // behind the family's prefix
    Shape shape;             // as it is there
    bool has_prefix = true;  // its full name begins with the family's prefix
};

struct Row {
    Field field;
    std::vector<FileTensor> parts;  // of the same width; all that is in memory but for padding
    Init init;
    bool decays;
    bool padded = false;  // to padded_vocabulary() rows
    // The row's name in our own files, where it is no tensor of the family's.
    std::string name = {};
    LoraRole lora = {};
};
using Table = std::vector<Row>;

// A row that is one tensor of the files. Matrices decay, vectors do not.
inline Row row(Field field, const char* name, Shape shape, Init init) {
    return {field, {{name, shape}}, init, shape.count == 2};
}

// A head's matrix of its own, where it is not tied to the token embedding.
inline Row own_head(const ModelConfig& c) {
    return {
        Field::HeadWeight, {{"lm_head.weight", {c.vocabulary, c.channels}, false}}, Init::Normal, true, true};
}

// What the family's class in `transformers` takes where a config.json does not say it.
struct TokenDefaults {
    int vocabulary;
    int begin_of_text = -1, end_of_text = -1;  // -1: none
};

struct Family {
    const char* name;          // "model_type" in config.json
    const char* architecture;  // the only one of "architectures"
    TokenDefaults tokens;
    const char* prefix;  // of its tensors' names; files of some tools lack it
    NormKind norm;
    PositionKind position;
    MlpKind mlp;
    bool by_outputs;  // matrices lie (out, in), as PyTorch's Linear has them; else (in, out)
    // Of each head its query, key and value lie together; else all queries, then all keys, then all values.
    bool heads_together = false;
    // Reads the family's own keys into a config; fails on what is missing or is not computed here.
    void (*read)(const ConfigReader&, ModelConfig&);
    // Writes what read() reads back, with what `transformers` wants beside it.
    void (*write)(const ModelConfig&, nlohmann::json&);
    // Completes a new model of which channels, heads and positions are given.
    void (*begin)(ModelConfig&);
    Table (*embeddings)(const ModelConfig&);
    Table (*block)(const ModelConfig&);  // names follow "h.3." or the like
    Table (*head)(const ModelConfig&);
    const char* blocks;  // "h" or "layers": what stands before a block's number
    // Whether the family's class drops activations in training: probabilities of attention and what is added
    // to the residual stream; and with learned positions the embeddings.
    bool drops = false;
};
