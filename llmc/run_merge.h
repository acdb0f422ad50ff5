// run_merge.h - saves a model with its adapter merged into its weights (--merge): first all other tensors,
// from the State, then each matrix as soon as it is merged.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/adapter.h"
#include "llmc/checkpoint.h"
#include "llmc/embedding_and_head.h"
#include "llmc/run_model.h"

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

// Calls visit(layer, field, matrix) for the matrix of each linear layer with its adapter merged into it, W +
// scale B A, in the layout of W: (in, out) or, if by outputs or quantized, (out, in). Then calls it for the
// rows of embeddings and head that the State does not have, some at a time, with the number of blocks as the
// layer.
template <class Visit>
void for_each_merged(Arena& arena, Stream stream, const ModelConfig& config, Weights& weights,
                     EmbeddingAndHead& ends, Visit&& visit) {
    Range range("merge");
    weights.expect_blocks();
    for (int l = 0; l < config.layers; l++) {
        weights.fetch(l);
        for (const auto& [w, field] : linears(weights.block(l))) {
            const int64_t outputs = w->outputs(), inputs = w->inputs();
            TensorX matrix =
                arena.take<floatX>("merged", w->by_outputs ? Shape{outputs, inputs} : Shape{inputs, outputs});
            const TensorX weight = weight_of(arena, stream, *w);
            copy_rows_on_device(matrix.data(), inputs, weight.data(), inputs, inputs, outputs, stream);
            merge_lora(arena, stream, matrix, w->adapter, w->by_outputs);
            visit(l, field, matrix);
        }
    }
    weights.release();
    ends.for_each_frozen_row_slice(
        [&](Field field, const TensorX& rows) { visit(config.layers, field, rows); });
}

// Merges the adapter of a run into its model, in memory that was planned for it, and saves the result.
class AdapterMerge {
  public:
    AdapterMerge(const RunConfig& o, const RunInputs& in, const RunModel& model, Arena& arena,
                 const Stream& stream, Weights& weights, EmbeddingAndHead& ends)
        : o_(o), in_(in), model_(model), arena_(arena), stream_(stream), weights_(weights), ends_(ends) {}
    AdapterMerge(const AdapterMerge&) = delete;

    Plan rehearse() {
        return arena_.rehearse([&] { for_each([](int, Field, const TensorX&) {}); });
    }
    // Saves the merged model in the new folder that --merge names. All ranks must call it; the first writes.
    // If that fails, the adapter is not lost: `trained` says that this run has trained it, and `latest` is
    // the save that has it.
    void save(Plan& plan, bool trained, const std::string& latest) {
        if (!o_.rank.is_first()) return help_first_rank(plan);
        try {
            write_folder(o_.merge, [&](const std::string& temporary) { write(temporary, plan); });
        } catch (const UserError& error) {
            report_failure(error.what(), trained, latest);
        }
        print(o_.notes(), "merged the adapter into a model in %s\n", o_.merge.c_str());
    }

  private:
    template <class Visit>
    void for_each(Visit&& visit) {
        for_each_merged(arena_, stream_, in_.config, weights_, ends_, visit);
    }
    // If the ranks divide the model, the first one needs the others' slices of each block.
    void help_first_rank(Plan& plan) {
        if (model_.is_divided()) arena_.run(plan, [&] { for_each([](int, Field, const TensorX&) {}); });
    }
    void write(const std::string& folder, Plan& plan) {
        write_settings<floatX>(folder, in_.config, in_.saved_tokenizer());
        const bool by_outputs = model_.quantized && model_.quantized->by_outputs();
        MergedFile<floatX> file(folder + "/model.safetensors", model_.state, by_outputs,
                                model_.fields_not_in_state(), stream_);
        arena_.run(plan, [&] {
            for_each(
                [&](int layer, Field field, const TensorX& matrix) { file.append(layer, field, matrix); });
        });
        file.finish();
    }
    // Fails with a line that says how to merge again. Without --out, an adapter that was trained is first
    // saved beside the folder that --merge names.
    [[noreturn]] void report_failure(const std::string& why, bool trained, const std::string& latest) const {
        const std::string failed = format("--merge %s: %s", o_.merge.c_str(), why.c_str());
        if (!trained) fail("%s", failed.c_str());
        if (o_.saves())
            fail("%s; the adapter is saved: --resume %s --steps 0 --merge DIR merges it", failed.c_str(),
                 latest.c_str());
        const std::string kept =
            rescue(without_last_slashes(o_.merge) + ".adapter", failed, "the adapter",
                   [&](const std::string& folder) {
                       write_adapter(folder, model_.trained(), in_.adapter, in_.saved_tokenizer());
                   });
        fail("%s; the adapter is saved: --model %s --adapter %s --steps 0 --merge DIR merges it",
             failed.c_str(), o_.model.c_str(), kept.c_str());
    }

    const RunConfig& o_;
    const RunInputs& in_;
    const RunModel& model_;
    Arena& arena_;
    const Stream& stream_;
    Weights& weights_;
    EmbeddingAndHead& ends_;
};
