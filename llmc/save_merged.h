// save_merged.h - writes model.safetensors of a model whose adapter was merged into its matrices: first all
// other tensors, from the State, then each matrix as soon as it is merged.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "llmc/adapter.h"
#include "llmc/checkpoint.h"
#include "llmc/quant_weights.h"

template <class T>
class MergedFile {
  public:
    // `transposed`: append() gets matrices as (out, in), whatever the family's files have. `more`: embeddings
    // or head that are not in the State and are appended too.
    MergedFile(const std::string& path, const State<T>& state, bool transposed,
               const std::vector<Field>& more, Stream stream)
        : file_(path),
          stream_(stream),
          layout_(state.layout.config()),
          transposed_(transposed && !layout_.config().family->by_outputs) {
        const StateBuffer& weights = *state.find(StatePart::Weights);
        std::vector<SavedTensor> others;
        for (const SavedTensor& t : saved_tensors(weights, state.layout))
            if (!is_matrix(t.name)) others.push_back(t);
        for (const SavedTensor& t : others) file_.declare(t.name, file_type(weights), t.shape);
        for (int l = 0; l < layout_.config().layers; l++)
            for (const Field field : kLinearFields)
                for (const Parameter::Part& part : parameter(l, field).parts)
                    file_.declare(part.name, file_type(weights), file_shape(part.shape));
        for (const Field field : more)
            for (const Parameter& p : layout_.parameters())
                if (p.field == field) file_.declare(p.parts[0].name, file_type(weights), file_shape(p.shape));
        for (const SavedTensor& t : others)
            for_each_chunk(t.elements,
                           [&](int64_t first, int64_t count) { append(weights.at(t.at + first), count); });
    }

    // Appends the next matrix, from device memory: the linear layers block by block, in the order of
    // kLinearFields, and then rows of the matrices in `more`, for which `layer` is the number of blocks.
    void append(int layer, Field field, const Tensor<T>& matrix) {
        const bool is_other = layer == layout_.config().layers;
        assert(is_other || matrix.size() == parameter(layer, field).shape.size());
        tensor_ = is_other ? "the embedding or the head" : parameter(layer, field).parts[0].name;
        if (!transposed_ || is_other)
            return for_each_chunk(matrix.size(), [&](int64_t first, int64_t count) {
                append(reinterpret_cast<const char*>(matrix.at(first)), count);
            });
        const int64_t rows = matrix.rows(), columns = matrix.columns();
        std::vector<T> by_outputs(static_cast<size_t>(matrix.size())), in_file(by_outputs.size());
        copy_to_host(by_outputs.data(), matrix.data(), by_outputs.size() * sizeof(T), stream_);
        check_finite(by_outputs);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < columns; c++)
                in_file[static_cast<size_t>(c * rows + r)] = by_outputs[static_cast<size_t>(r * columns + c)];
        file_.append(in_file.data(), in_file.size() * sizeof(T));
    }

    void finish() { file_.finish(); }

  private:
    const Parameter& parameter(int layer, Field field) const {
        const auto parameters = layout_.parameters_of(Layout::block_unit(layer));
        return *std::find_if(parameters.begin(), parameters.end(),
                             [&](const Parameter& p) { return p.field == field; });
    }
    bool is_matrix(const std::string& name) const {
        for (const Parameter& p : layout_.parameters())
            for (const Parameter::Part& part : p.parts)
                if (part.name == name) return is_linear(p.field);
        return false;
    }
    void check_finite(const std::vector<T>& values) const {
        for (const T value : values)
            if (!std::isfinite(to_float(value)))
                fail("%s with its adapter has %g, and a weight must be a finite number", tensor_.c_str(),
                     double{to_float(value)});
    }
    void append(const char* device, int64_t count) {
        host_.resize(static_cast<size_t>(count));
        copy_to_host(host_.data(), device, host_.size() * sizeof(T), stream_);
        check_finite(host_);
        file_.append(host_.data(), host_.size() * sizeof(T));
    }

    SafetensorsWriter file_;
    const Stream stream_;
    const Layout layout_;  // of the whole model
    const bool transposed_;
    std::vector<T> host_;
    std::string tensor_ = "the model";  // the tensor that is being appended, for messages
};
