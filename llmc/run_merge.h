// run_merge.h - saves a model with its adapter merged into its weights (--merge): first all other tensors,
// from the State, then each matrix as soon as it is merged. What a merge and an export (run_export.h) share
// is here too: the order of a model's tensors, and how they are read.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/checkpoint.h"
#include "llmc/embedding_and_head.h"
#include "llmc/gguf_export.h"
#include "llmc/run_model.h"

// The tensors of a unit of the model.
inline std::vector<ExportTensor> export_tensors(const Layout& layout, int unit, const ExportType& type) {
    const ModelConfig& c = layout.config();
    std::vector<ExportTensor> tensors;
    for (const Parameter& p : layout.parameters_of(unit)) {
        int64_t row = 0;
        for (const Parameter::Part& part : p.parts) {
            ExportTensor t = {gguf::name_of(*c.family, part.name),
                              part.name,
                              p.field,
                              unit,
                              {},
                              &gguf_type("F32"),
                              row,
                              rows_order(c, part.name),
                              !c.family->by_outputs && is_linear(p.field)};
            t.shape = file_shape(part.shape);
            if (t.is_transposed) std::swap(t.shape[0], t.shape[1]);
            // Vectors and learned positions stay in fp32.
            if (t.shape.size() == 2 && p.field != Field::PositionEmbedding)
                t.type = &export_type_of(type, c, t.name, layout.is_block(unit) ? unit - 1 : -1, t.shape[1]);
            row += t.rows();
            tensors.push_back(t);
        }
    }
    return tensors;
}

// The tensors of a whole model in the order in which they are written: unit by unit those that are in the
// State, then the matrices of its linear layers that are not, and at the end embeddings and head that are
// not.
inline std::vector<ExportTensor> tensors_in_order(const Layout& whole, const ExportType& type,
                                                  bool matrices_outside, const std::vector<Field>& outside) {
    std::vector<ExportTensor> all, last;
    const auto is_outside = [&](const ExportTensor& t) {
        return std::ranges::find(outside, t.field) != outside.end();
    };
    for (int unit = 0; unit < static_cast<int>(whole.units().size()); unit++) {
        std::vector<ExportTensor> matrices;
        for (const ExportTensor& t : export_tensors(whole, unit, type))
            (is_outside(t) ? last : matrices_outside && is_linear(t.field) ? matrices : all).push_back(t);
        for (const Field field : kLinearFields)
            for (const ExportTensor& t : matrices)
                if (t.field == field) all.push_back(t);
    }
    all.insert(all.end(), last.begin(), last.end());
    return all;
}

// Copies rows of a tensor to the host, as the model's files have them.
template <class T>
using ReadRows = std::function<void(int64_t first, int64_t count, T* host)>;

// Encodes values of a tensor, some at a time, and appends them to a file.
using WriteFloats = std::function<void(const ExportTensor& t, const std::vector<float>& values)>;

// Reads the tensors of a file in their order and passes them on, in the order of the file's rows.
template <class T>
class TensorCopier {
  public:
    // Without `write` (on a rank that does not write) it only reads.
    TensorCopier(WriteFloats write, const ModelConfig& c) : write_(std::move(write)), config_(c) {}

    // Appends a whole tensor.
    void append(const ExportTensor& t, const ReadRows<T>& read) {
        if (t.is_transposed) return append_transposed(t, read);
        const int64_t rows = t.rows(), columns = t.columns();
        const int64_t group = t.order == GgufPart::Rows::Same ? std::max<int64_t>(1, kChunkElements / columns)
                                                              : config_.head_size;
        for (int64_t first = 0; first < rows; first += group) {
            const int64_t count = std::min(group, rows - first);
            rows_.resize(static_cast<size_t>(count * columns));
            read(first_row_in_model(t, first), count, rows_.data());
            for (int64_t row = 0; row < count; row++)
                add(t, rows_.data() + row_in_model(t, row) * columns, columns);
        }
        flush(t);
    }
    // Appends rows of a tensor that comes in several calls, in its own order. Call flush() after the last.
    void append_rows(const ExportTensor& t, const T* rows, int64_t count) {
        add(t, rows, count * t.columns());
    }
    // Passes on what was added.
    void flush(const ExportTensor& t) {
        if (write_ && !values_.empty()) write_(t, values_);
        values_.clear();
    }

  private:
    // The model's row from which a group of rows of the file is read, if the file's group begins at `first`.
    int64_t first_row_in_model(const ExportTensor& t, int64_t first) const {
        if (t.order != GgufPart::Rows::QueriesKeysValues) return first;
        const int64_t group = first / config_.head_size;
        return (group % config_.heads * 3 + group / config_.heads) * config_.head_size;
    }
    // The row in its group that is row `row` of the file's group.
    int64_t row_in_model(const ExportTensor& t, int64_t row) const {
        if (t.order != GgufPart::Rows::RotaryPairs) return row;
        return row / 2 + row % 2 * (config_.head_size / 2);
    }
    void add(const ExportTensor& t, const T* values, int64_t count) {
        const size_t before = values_.size();
        values_.resize(before + static_cast<size_t>(count));
        for (int64_t i = 0; i < count; i++)
            values_[before + static_cast<size_t>(i)] = t.factor * to_float(values[i]);
        // Whole rows, so whole blocks.
        if (static_cast<int64_t>(values_.size()) >= kChunkElements) flush(t);
    }
    // A tensor whose matrix is (columns, rows) in the model.
    void append_transposed(const ExportTensor& t, const ReadRows<T>& read) {
        const int64_t rows = t.rows(), columns = t.columns();
        rows_.resize(static_cast<size_t>(rows * columns));
        read(0, columns, rows_.data());
        std::vector<T> row(static_cast<size_t>(columns));
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t c = 0; c < columns; c++)
                row[static_cast<size_t>(c)] = rows_[static_cast<size_t>(c * rows + r)];
            add(t, row.data(), columns);
        }
        flush(t);
    }

    const WriteFloats write_;
    const ModelConfig& config_;
    std::vector<T> rows_;
    std::vector<float> values_;
};

// Fails if a value that is about to be written is not finite.
inline void check_written(const std::vector<float>& values, const std::string& tensor) {
    for (const float value : values)
        if (!std::isfinite(value))
            fail("%s has %g, and a weight must be a finite number", tensor, double{value});
}

// The model of a run at its end, as a merge and an export write it.
class FinishedModel {
  public:
    FinishedModel(const RunConfig& o, const RunInputs& in, const RunModel& model, Arena& arena,
                  const Stream& stream, Weights& weights, EmbeddingAndHead& ends)
        : o_(o), in_(in), model_(model), arena_(arena), stream_(stream), weights_(weights), ends_(ends) {}
    FinishedModel(const FinishedModel&) = delete;

    Plan rehearse() {
        return arena_.rehearse([&] { for_each_merged([](int, Field, const TensorX&) {}); });
    }

  protected:
    // Calls visit(layer, field, matrix) for the matrix of each linear layer with its adapter merged into it,
    // W + scale B A, in the layout of W: (in, out) or, if by outputs or quantized, (out, in). Then calls it
    // for the rows of embeddings and head that the State does not have, some at a time, with the number of
    // blocks as the layer.
    template <class Visit>
    void for_each_merged(Visit&& visit) {
        Range range("merge");
        weights_.expect_blocks();
        for (int l = 0; l < in_.config.layers; l++) {
            weights_.fetch(l);
            for (const auto& [w, field] : linears(weights_.block(l))) {
                const int64_t outputs = w->outputs(), inputs = w->inputs();
                TensorX matrix = arena_.take<floatX>(
                    "merged", w->by_outputs ? Shape{outputs, inputs} : Shape{inputs, outputs});
                const TensorX weight = weight_of(arena_, stream_, *w);
                copy_rows_on_device(matrix.data(), inputs, weight.data(), inputs, inputs, outputs, stream_);
                merge_lora(arena_, stream_, matrix, w->adapter, w->by_outputs);
                visit(l, field, matrix);
            }
        }
        weights_.release();
        ends_.for_each_frozen_row_slice(
            [&](Field field, const TensorX& rows) { visit(in_.config.layers, field, rows); });
    }
    // True if the matrices of linear layers are made as (out, in) in all families.
    bool makes_by_outputs() const { return model_.quantized && model_.quantized->by_outputs(); }

    // Where the State has a tensor: the first element. Nothing if it does not have it.
    static std::optional<int64_t> place_in(const State<floatX>& state, const ExportTensor& t) {
        for (const Parameter& p : state.layout.parameters_of(t.unit))
            for (const Parameter::Part& part : p.parts)
                if (part.name == t.from) return p.offset + part.offset;
        return std::nullopt;
    }

    // Writes these tensors of a State. `plan`, if any: the matrices of linear layers are made in the arena,
    // with their adapters, and so are the embeddings and the head that the State does not have.
    void append_all(const std::vector<ExportTensor>& all, const State<floatX>& state, Plan* plan,
                    const ReadBuffer& read_state, WriteFloats write) {
        const StateBuffer& weights = *state.find(StatePart::Weights);
        TensorCopier<floatX> to(std::move(write), in_.config);
        size_t next = 0;
        // Appends the tensors of the State up to the next one that it does not have.
        const auto append_state = [&] {
            for (; next < all.size(); next++) {
                const ExportTensor& t = all[next];
                if (plan && is_linear(t.field)) return;
                const std::optional<int64_t> place = place_in(state, t);
                if (!place) return;
                const int64_t columns = t.is_transposed ? t.rows() : t.columns();
                to.append(t, [&](int64_t first, int64_t count, floatX* host) {
                    for_each_chunk(count * columns, [&](int64_t at, int64_t n) {
                        read_state(weights, *place + first * columns + at, n, host + at);
                    });
                });
            }
        };
        append_state();
        if (!plan) return;
        int64_t rows_done = 0;  // of a tensor that comes some rows at a time
        arena_.run(*plan, [&] {
            for_each_merged([&](int layer, Field field, const TensorX& matrix) {
                if (layer < in_.config.layers) {
                    append_state();
                    for (; next < all.size() && all[next].field == field; next++)
                        append_matrix(to, all[next], matrix);
                    return;
                }
                append_state();
                const ExportTensor& t = all[next];
                append_rows(to, t, matrix);
                rows_done += matrix.rows();
                if (rows_done < t.rows()) return;
                to.flush(t);
                rows_done = 0;
                next++;
            });
        });
        append_state();
    }
    // Appends the part of a linear layer's matrix that is a tensor of the file.
    void append_matrix(TensorCopier<floatX>& to, const ExportTensor& t, const TensorX& matrix) {
        const int64_t columns = t.is_transposed ? t.rows() : t.columns();
        to.append(t, [&](int64_t first, int64_t count, floatX* host) {
            copy_to_host(host, matrix.at((t.first_row + first) * columns),
                         static_cast<size_t>(count * columns) * sizeof(floatX), stream_);
        });
    }
    void append_rows(TensorCopier<floatX>& to, const ExportTensor& t, const TensorX& rows) {
        const int64_t columns = t.columns(), group = std::max<int64_t>(1, kChunkElements / columns);
        std::vector<floatX> host;
        for (int64_t first = 0; first < rows.rows(); first += group) {
            const int64_t count = std::min(group, rows.rows() - first);
            host.resize(static_cast<size_t>(count * columns));
            copy_to_host(host.data(), rows.at(first * columns), host.size() * sizeof(floatX), stream_);
            to.append_rows(t, host.data(), count);
        }
    }

    // After the file or folder `path` could not be written: fails with a line that says how to do it `again`.
    // Without --out, `what` was trained is first saved beside it. `latest` is the save that has it.
    [[noreturn]] void fail_and_keep(const std::string& failed, const char* again, const char* what,
                                    const std::string& path, bool trained, const std::string& latest) const {
        if (!trained || !o_.rank.is_first()) fail("%s", failed);
        if (o_.saves()) fail("%s; %s is saved: --resume %s --steps 0 %s", failed, what, latest, again);
        if (o_.slices_weights() && !model_.adapter)
            fail("%s, and there is no --out that has the model", failed);
        const std::string kept = rescue(
            path + (model_.adapter ? ".adapter" : ".model"), failed, what, [&](const std::string& folder) {
                if (model_.adapter)
                    return write_adapter(folder, *model_.adapter, in_.adapter, in_.saved_tokenizer());
                write_settings<floatX>(folder, in_.config, in_.saved_tokenizer());
                write_tensors(folder + "/model.safetensors", model_.state.layout,
                              weight_buffers(model_.state));
            });
        const std::string named = model_.adapter ? o_.model + " --adapter " + kept : kept;
        fail("%s; %s is saved: --model %s --steps 0 %s", failed, what, named, again);
    }

    const RunConfig& o_;
    const RunInputs& in_;
    const RunModel& model_;
    Arena& arena_;
    const Stream& stream_;
    Weights& weights_;
    EmbeddingAndHead& ends_;
};

// Merges the adapter of a run into its model, in memory that was planned for it, and saves the result.
class AdapterMerge : public FinishedModel {
  public:
    using FinishedModel::FinishedModel;

    // Saves the merged model in the new folder that --merge names. All ranks must call it; the first writes.
    // If that fails, the adapter is not lost: `trained` says that this run has trained it, and `latest` is
    // the save that has it.
    void save(Plan& plan, bool trained, const std::string& latest) {
        // If the ranks divide the model, the first one needs the others' slices of each block.
        if (!o_.rank.is_first() && model_.is_divided())
            arena_.run(plan, [&] { for_each_merged([](int, Field, const TensorX&) {}); });
        if (!o_.rank.is_first()) return;
        try {
            write_folder(o_.merge, [&](const std::string& temporary) { write(temporary, plan); });
        } catch (const UserError& error) {
            fail_and_keep(format("--merge %s: %s", o_.merge, error.what()), "--merge DIR merges it",
                          "the adapter", without_last_slashes(o_.merge), trained, latest);
        }
        print(o_.notes(), "merged the adapter into a model in %s\n", o_.merge);
    }

  private:
    // The tensors of the merged model, with the shapes of its family's files: those of the State, then the
    // matrices of the linear layers, then embeddings and head that the State does not have.
    std::vector<ExportTensor> tensors() const {
        const std::vector<Field> outside = model_.fields_not_in_state();
        std::vector<ExportTensor> all, matrices, last;
        for (ExportTensor& t : tensors_in_order(model_.whole, *find_export_type("f32"), true, outside)) {
            t.name = t.from;
            t.order = GgufPart::Rows::Same;
            if (t.is_transposed) std::swap(t.shape[0], t.shape[1]);
            t.is_transposed = t.is_transposed && makes_by_outputs();
            const bool is_outside = std::ranges::find(outside, t.field) != outside.end();
            (is_linear(t.field) ? matrices : is_outside ? last : all).push_back(t);
        }
        for (const std::vector<ExportTensor>* more : {&matrices, &last})
            all.insert(all.end(), more->begin(), more->end());
        return all;
    }
    void write(const std::string& folder, Plan& plan) {
        write_settings<floatX>(folder, in_.config, in_.saved_tokenizer());
        const State<floatX>& state = model_.state;
        const std::vector<ExportTensor> all = tensors();
        SafetensorsWriter file(folder + "/model.safetensors");
        for (const ExportTensor& t : all)
            file.declare(t.name, file_type(*state.find(StatePart::Weights)), t.shape);
        std::vector<floatX> host;
        append_all(all, state, &plan, kReadBuffer,
                   [&](const ExportTensor& t, const std::vector<float>& values) {
                       check_written(values, t.from + " with its adapter");
                       host.clear();
                       for (const float value : values) host.push_back(from_float<floatX>(value));
                       file.append(host.data(), host.size() * sizeof(floatX));
                   });
        file.finish();
    }
};
