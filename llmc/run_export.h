// run_export.h - writes the model of a run as a GGUF file (--export): the weights as they are at its end,
// with an adapter merged into them, or the adapter alone. gguf_export.h says what the file contains.
//
// Weights that are in the State are read as saves read them: some at a time, wherever they are, and of
// several ranks each contributes its slices. Matrices of a frozen model that are quantized, streamed, or have
// an adapter are made one after the other in the arena, as a merge makes them. Host memory has a chunk of
// rows at a time; for GPT-2, whose matrices are transposed, a matrix.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "llmc/gguf_export.h"
#include "llmc/run_merge.h"
#include "llmc/quant_ggml_encode.h"
#include "llmc/run_model.h"

// Copies rows of a tensor to the host, as the model's files have them.
template <class T>
using ReadRows = std::function<void(int64_t first, int64_t count, T* host)>;

// Appends tensors to a GGUF file, in the order in which they are declared. Without a file (on a rank that
// does not write) it only reads them.
template <class T>
class GgufTensorWriter {
  public:
    // `writer` is open, or null.
    GgufTensorWriter(GgufWriter* writer, const ModelConfig& c) : writer_(writer), config_(c) {}

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
    // Encodes what was added, and appends it to the file.
    void flush(const ExportTensor& t) {
        if (!writer_ || values_.empty()) return values_.clear();
        for (const float value : values_)
            if (!std::isfinite(value))
                fail("%s has %g, and a weight must be a finite number", t.from.c_str(), double{value});
        const auto n = static_cast<int64_t>(values_.size());
        encoded_.resize(static_cast<size_t>(n / t.format->block * t.format->block_bytes));
        const int64_t bad = encode_ggml(*t.format, encoded_.data(), values_.data(), n);
        if (bad >= 0)
            fail("%s has %g, which F16 cannot hold: bf16 or f32 can", t.from.c_str(),
                 double{values_[static_cast<size_t>(bad)]});
        writer_->append(encoded_.data(), encoded_.size());
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

    GgufWriter* const writer_;
    const ModelConfig& config_;
    std::vector<T> rows_;
    std::vector<float> values_;
    std::vector<unsigned char> encoded_;
};

// The tensors of a whole model in the order in which they are written: unit by unit those that are in the
// State, then the matrices of its linear layers that are not, and at the end embeddings and head that are
// not.
inline std::vector<ExportTensor> tensors_in_order(const Layout& whole, const ExportType& type,
                                                  bool matrices_outside, const std::vector<Field>& outside) {
    std::vector<ExportTensor> all, last;
    const auto is_outside = [&](const ExportTensor& t) {
        return std::find(outside.begin(), outside.end(), t.field) != outside.end();
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

// Exports the model of a run, or its adapter.
class ModelExport {
  public:
    ModelExport(const RunConfig& o, const RunInputs& in, const RunModel& model, Arena& arena,
                const Stream& stream, Weights& weights, EmbeddingAndHead& ends)
        : o_(o), in_(in), model_(model), arena_(arena), stream_(stream), weights_(weights), ends_(ends) {}
    ModelExport(const ModelExport&) = delete;

    // True if the run exports.
    bool wanted() const { return !o_.export_file.empty() && !o_.plan && o_.bench.empty(); }
    // True if matrices are made in the arena, for which a plan is needed.
    bool uses_arena() const {
        const bool outside = model_.adapter || model_.quantized || !model_.fields_not_in_state().empty();
        return !o_.export_file.empty() && !is_adapter() && outside;
    }
    Plan rehearse() {
        return arena_.rehearse([&] {
            for_each_merged(arena_, stream_, in_.config, weights_, ends_, [](int, Field, const TensorX&) {});
        });
    }
    // The size of the file.
    size_t bytes() const {
        GgufWriter writer;
        declare(writer, tensors());
        return writer.file_bytes(keys());
    }
    // Says what llama.cpp will do differently.
    void remark() const {
        if (!wanted() || is_adapter() || !o_.rank.is_first()) return;
        const char* const file = o_.export_file.c_str();
        const ModelConfig& c = in_.config;
        if (in_.tokenizer_folder.empty() && c.vocabulary != 256)
            print(stderr,
                  "--export %s: the model has no tokenizer, so llama.cpp can only give it tokens' numbers\n",
                  file);
        if (c.window > 0)
            print(stderr, "--export %s: llama.cpp attends to all earlier tokens in a %s, not only to %d\n",
                  file, c.family->name, c.window);
    }
    // Writes the file. read_state() reads elements of a State; all ranks must call it, and the first writes.
    // If that fails, what was trained is not lost: `trained` says that this run has trained it, and `latest`
    // is the save that has it.
    void save(Plan& plan, const ReadBuffer& read_state, bool trained, const std::string& latest) {
        try {
            write(plan, read_state);
        } catch (const UserError& error) {
            report_failure(error.what(), trained, latest);
        }
        if (o_.rank.is_first())
            print(o_.notes(), "exported the %s in %s as %s\n", o_.export_part.c_str(), type().name,
                  o_.export_file.c_str());
    }

  private:
    bool is_adapter() const { return o_.export_part == "adapter"; }
    const ExportType& type() const {
        const char* const own = std::is_same_v<floatX, float> ? "f32" : "bf16";
        return *find_export_type(o_.export_type.empty() ? own : o_.export_type);
    }
    // LoRA's alpha: that of the first layer.
    double alpha() const { return in_.adapter.modules[0].scale * in_.adapter.modules[0].rank; }
    std::vector<ExportTensor> tensors() const {
        if (is_adapter()) return adapter_tensors(in_.config, in_.adapter.modules, type(), alpha());
        return tensors_in_order(model_.whole, type(), uses_arena(), model_.fields_not_in_state());
    }
    bool has_rope_divisors() const { return !is_adapter() && in_.config.rope.type == RopeType::kLlama3; }
    void declare(GgufWriter& writer, const std::vector<ExportTensor>& all) const {
        if (has_rope_divisors()) writer.declare("rope_freqs.weight", kStoredF32, {in_.config.head_size / 2});
        for (const ExportTensor& t : all) writer.declare(t.name, *t.format, t.shape);
    }
    GgufKeys keys() const {
        if (is_adapter()) return adapter_keys(in_.config, in_.export_name(), alpha());
        const int64_t divisors = has_rope_divisors() ? in_.config.head_size / 2 : 0;
        GgufKeys all = model_keys(in_.config, type(), in_.export_name(), model_.whole.count() + divisors);
        all.append(in_.exported_tokenizer);
        return all;
    }
    void append_rope_divisors(GgufWriter& writer) const {
        if (!has_rope_divisors()) return;
        const std::vector<float> divisors = rope_divisors(in_.config.head_size, in_.config.rope);
        writer.append(divisors.data(), divisors.size() * sizeof(float));
    }

    void write(Plan& plan, const ReadBuffer& read_state) {
        const std::vector<ExportTensor> all = tensors();
        if (!o_.rank.is_first()) {
            if (!uses_arena() || model_.is_divided()) append_all(all, nullptr, plan, read_state);
            return;
        }
        const std::string temporary = o_.export_file + ".tmp";
        GgufWriter writer;
        declare(writer, all);
        try {
            writer.open(temporary, keys());
            append_rope_divisors(writer);
            append_all(all, &writer, plan, read_state);
            writer.finish();
            replace_file(temporary, o_.export_file);
        } catch (...) {
            unlink(temporary.c_str());
            throw;
        }
    }
    // Fails with a line that says how to export again. Without --out, what was trained is first saved beside
    // the file that --export names.
    [[noreturn]] void report_failure(const std::string& why, bool trained, const std::string& latest) const {
        const std::string failed = format("--export %s: %s", o_.export_file.c_str(), why.c_str());
        if (!trained || !o_.rank.is_first()) fail("%s", failed.c_str());
        if (o_.saves())
            fail("%s; what was trained is saved: --resume %s --steps 0 --export FILE exports it",
                 failed.c_str(), latest.c_str());
        if (o_.slices_weights()) fail("%s, and there is no --out that has the model", failed.c_str());
        const std::string kept =
            rescue(o_.export_file + (model_.adapter ? ".adapter" : ".model"), failed, "what was trained",
                   [&](const std::string& folder) { write_trained(folder); });
        const std::string named = model_.adapter ? o_.model + " --adapter " + kept : kept;
        fail("%s; what was trained is saved: --model %s --steps 0 --export FILE exports it", failed.c_str(),
             named.c_str());
    }
    void write_trained(const std::string& folder) const {
        if (model_.adapter) return write_adapter(folder, *model_.adapter, in_.adapter, in_.saved_tokenizer());
        write_settings<floatX>(folder, in_.config, in_.saved_tokenizer());
        write_tensors(folder + "/model.safetensors", model_.state.layout, weight_buffers(model_.state));
    }

    // Where the State has a tensor: the first element. Nothing if it does not have it.
    std::optional<int64_t> place_in_state(const ExportTensor& t) const {
        if (uses_arena() && is_linear(t.field)) return std::nullopt;  // made there, with its adapter
        const Layout& layout = is_adapter() ? model_.adapter->layout : model_.state.layout;
        for (const Parameter& p : layout.parameters_of(t.unit))
            for (const Parameter::Part& part : p.parts)
                if (part.name == t.from) return p.offset + part.offset;
        return std::nullopt;
    }

    void append_all(const std::vector<ExportTensor>& all, GgufWriter* writer, Plan& plan,
                    const ReadBuffer& read_state) {
        const State<floatX>& state = is_adapter() ? *model_.adapter : model_.state;
        const StateBuffer& weights = *state.find(StatePart::Weights);
        GgufTensorWriter<floatX> to(writer, in_.config);
        size_t next = 0;
        // Appends the tensors of the State up to the next one that it does not have.
        const auto append_state = [&] {
            for (; next < all.size(); next++) {
                const ExportTensor& t = all[next];
                const std::optional<int64_t> place = place_in_state(t);
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
        if (!uses_arena()) return;
        int64_t rows_done = 0;  // of a tensor that comes some rows at a time
        arena_.run(plan, [&] {
            for_each_merged(arena_, stream_, in_.config, weights_, ends_,
                            [&](int layer, Field field, const TensorX& matrix) {
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
    // Appends the part of a linear layer's matrix that is a tensor of the file. A quantized matrix is
    // dequantized as (out, in) in all families.
    void append_matrix(GgufTensorWriter<floatX>& to, const ExportTensor& tensor, const TensorX& matrix) {
        ExportTensor t = tensor;
        if (model_.quantized && model_.quantized->by_outputs()) t.is_transposed = false;
        const int64_t columns = t.is_transposed ? t.rows() : t.columns();
        to.append(t, [&](int64_t first, int64_t count, floatX* host) {
            copy_to_host(host, matrix.at((t.first_row + first) * columns),
                         static_cast<size_t>(count * columns) * sizeof(floatX), stream_);
        });
    }
    void append_rows(GgufTensorWriter<floatX>& to, const ExportTensor& t, const TensorX& rows) {
        const int64_t columns = t.columns(), group = std::max<int64_t>(1, kChunkElements / columns);
        std::vector<floatX> host;
        for (int64_t first = 0; first < rows.rows(); first += group) {
            const int64_t count = std::min(group, rows.rows() - first);
            host.resize(static_cast<size_t>(count * columns));
            copy_to_host(host.data(), rows.at(first * columns), host.size() * sizeof(floatX), stream_);
            to.append_rows(t, host.data(), count);
        }
    }

    const RunConfig& o_;
    const RunInputs& in_;
    const RunModel& model_;
    Arena& arena_;
    const Stream& stream_;
    Weights& weights_;
    EmbeddingAndHead& ends_;
};
