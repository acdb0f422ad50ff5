// gguf_export.h - what the GGUF file of a model contains (--export): its tensors with their names, their
// order of rows and their types, and the keys that describe the model. All of it is as llama.cpp's converter
// (convert_hf_to_gguf.py) and its quantizer (llama-quantize) write it. gguf_model.h reads such files;
// gguf.h writes the format; tokenizer_gguf_write.h adds the tokenizer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/adapter.h"
#include "llmc/gguf.h"
#include "llmc/gguf_model.h"

// ---- the types of tensors

// A type of files. Most of its matrices have the type `matrices`, a name of kGgufTypes.
struct ExportType {
    const char* name;
    uint32_t file_type;  // llama.cpp's number, for general.file_type
    const char* matrices;
    bool is_mixed;  // llama-quantize gives some matrices more bits
};
// The type of this name; null if there is none.
const ExportType* find_export_type(std::string_view name);

// The type of a matrix with rows of `columns` elements, by its name in the GGUF. `layer` is -1 outside the
// blocks.
const GgufType& export_type_of(const ExportType& type, const ModelConfig& c, const std::string& name,
                               int layer, int64_t columns);

// ---- the tensors

// A tensor of the file: a part of one of the model's parameters.
struct ExportTensor {
    std::string name;  // in the GGUF
    std::string from;  // in Hugging Face's files
    Field field;
    int unit;
    std::vector<int64_t> shape;
    const GgufType* type;
    int64_t first_row;  // of the parameter's rows
    GgufPart::Rows order;
    bool is_transposed;  // the model's files have (in, out)
    float factor = 1;    // by which values are multiplied
    float added = 0;     // what is added to them then

    int64_t rows() const { return shape[0]; }
    int64_t columns() const { return shape.size() == 1 ? 1 : shape[1]; }
    int64_t columns_in_model() const { return is_transposed ? rows() : columns(); }
};

// The host memory that an export takes: a chunk of elements as they are, as floats and encoded, and the
// file's buffer; a whole matrix where matrices are transposed.
size_t export_buffers(const ModelConfig& c, int64_t chunk_elements);

// ---- the keys

// Fails on a scaling of rotary positions that GGUF has no keys for.
void check_rope_for_gguf(const ModelConfig& c, const std::string& where);

// Fails if layers or the scale of attention's scores are not what llama.cpp takes for granted in the family.
void check_layers_for_gguf(const ModelConfig& c, const std::string& where);

// The keys of a model, without those of its tokenizer. `name` is that of its folder or file.
GgufKeys model_keys(const ModelConfig& c, const ExportType& type, const std::string& name,
                    int64_t parameters);

// ---- adapters

// The tensors of a LoRA: A and B of each linear layer that has one. A file has one alpha, and the scale of a
// layer is alpha / rank. Layers with another scale have it in B.
std::vector<ExportTensor> adapter_tensors(const ModelConfig& c, const std::vector<LinearModule>& modules,
                                          const ExportType& type, double alpha);

// The keys of a LoRA.
GgufKeys adapter_keys(const ModelConfig& c, const std::string& name, double alpha);
