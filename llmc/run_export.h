// run_export.h - writes the model of a run at its end, with its adapter merged into it, as a model of its own
// (--merge) or as a GGUF file (--export), which may also have the adapter alone. gguf_export.h says what such
// a file contains.
//
// Weights that are in the State are read as saves read them: some at a time, wherever they are, and of
// several ranks each contributes its slices. Matrices of a frozen model that are quantized, streamed, or have
// an adapter are made one after the other in the arena. Host memory has a chunk of rows at a time; for GPT-2,
// whose matrices are transposed, a matrix.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "llmc/checkpoint.h"
#include "llmc/gguf_export.h"
#include "llmc/gpt.h"
#include "llmc/quant_ggml_encode.h"
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
            t.added = added_in_gguf(*c.family, p.field);
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
    std::vector<ExportTensor> all;
    for (int unit = 0; unit < static_cast<int>(whole.units().size()); unit++)
        for (ExportTensor& t : export_tensors(whole, unit, type)) all.push_back(std::move(t));
    std::ranges::stable_sort(all, {}, [&](const ExportTensor& t) {
        const bool is_outside = std::ranges::find(outside, t.field) != outside.end();
        const bool is_matrix = matrices_outside && is_linear(t.field);
        return std::tuple(is_outside, t.unit,
                          is_matrix ? std::ranges::find(kLinearFields, t.field) : nullptr);
    });
    return all;
}

// Copies rows of a tensor to the host, as the model's files have them.
using ReadRows = std::function<void(int64_t first, int64_t count, floatX* host)>;

// Encodes values of a tensor, some at a time, and appends them to a file.
using WriteFloats = std::function<void(const ExportTensor& t, const std::vector<float>& values)>;

// Reads the tensors of a file in their order and passes them on, in the order of the file's rows.
class TensorCopier {
  public:
    // Without `write` (on a rank that does not write) it only reads.
    TensorCopier(WriteFloats write, const ModelConfig& c) : write_(std::move(write)), config_(c) {}

    // Appends the next `rows` rows of a tensor: all of them, unless they have the same order in the model. A
    // tensor that is (columns, rows) in the model is read as a whole.
    void append(const ExportTensor& t, int64_t rows, const ReadRows& read) {
        const int64_t columns = t.columns(), stride = t.is_transposed ? rows : 1;
        const int64_t group = t.is_transposed ? rows
                              : t.order == GgufPart::Rows::Same
                                  ? std::max<int64_t>(1, kChunkElements / columns)
                                  : config_.head_size;
        for (int64_t first = 0; first < rows; first += group) {
            const int64_t count = std::min(group, rows - first);
            host_.resize(static_cast<size_t>(count * columns));
            read(first_row_in_model(t, first), t.is_transposed ? columns : count, host_.data());
            for (int64_t row = 0; row < count; row++) {
                const floatX* const at =
                    &host_[static_cast<size_t>(t.is_transposed ? row : row_in_model(t, row) * columns)];
                for (int64_t c = 0; c < columns; c++) values_.push_back(t.factor * to_float(at[c * stride]));
                // Whole rows, so whole blocks.
                if (static_cast<int64_t>(values_.size()) >= kChunkElements) flush(t);
            }
        }
        flush(t);
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
    void flush(const ExportTensor& t) {
        if (t.added != 0)  // a zero would turn -0 into 0
            for (float& x : values_) x += t.added;
        if (write_ && !values_.empty()) write_(t, values_);
        values_.clear();
    }

    const WriteFloats write_;
    const ModelConfig& config_;
    std::vector<floatX> host_;
    std::vector<float> values_;
};

// Fails if a value that is about to be written is not finite.
inline void check_written(const std::vector<float>& values, const std::string& tensor) {
    for (const float value : values)
        if (!std::isfinite(value))
            fail("%s has %g, and a weight must be a finite number", tensor, double{value});
}

// The model of a run at its end.
class FinishedModel {
  public:
    FinishedModel(const RunConfig& o, const RunInputs& in, const RunModel& model, Arena& arena,
                  const Stream& stream, Gpt& gpt)
        : o_(o), in_(in), model_(model), arena_(arena), stream_(stream), gpt_(gpt) {}
    FinishedModel(const FinishedModel&) = delete;

    Plan rehearse() {
        return arena_.rehearse([&] { for_each_merged([](int, Field, const TensorX&) {}); });
    }

    // Saves the merged model in the new folder that --merge names. All ranks must call it; the first writes.
    // If that fails, the adapter is not lost: `trained` says that this run has trained it, and `latest` is
    // the save that has it.
    void merge(Plan& plan, bool trained, const std::string& latest) {
        // If the ranks divide the model, the first one needs the others' slices of each block.
        if (!o_.rank.is_first() && model_.is_divided())
            arena_.run(plan, [&] { for_each_merged([](int, Field, const TensorX&) {}); });
        if (!o_.rank.is_first()) return;
        try {
            write_folder(o_.merge, [&](const std::string& temporary) { write_merged(temporary, plan); });
        } catch (const UserError& error) {
            fail_and_keep(format("--merge %s: %s", o_.merge, error.what()), "--merge DIR merges it",
                          "the adapter", without_last_slashes(o_.merge), trained, latest);
        }
        print(o_.notes(), "merged the adapter into a model in %s\n", o_.merge);
    }

    // True if the run exports.
    bool exports() const { return !o_.export_file.empty() && !o_.plan && o_.bench.empty(); }
    // True if it then makes matrices in the arena, for which a plan is needed.
    bool export_uses_arena() const {
        const bool outside = model_.adapter || model_.quantized || !model_.fields_not_in_state().empty();
        return !o_.export_file.empty() && !is_adapter() && outside;
    }
    // The size of its file.
    size_t export_bytes() const {
        GgufWriter writer;
        declare(writer, exported_tensors());
        return writer.file_bytes(exported_keys());
    }
    // Says what llama.cpp will do differently.
    void remark_export() const {
        if (!exports() || is_adapter() || !o_.rank.is_first()) return;
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
    void write_export(Plan& plan, const ReadBuffer& read_state, bool trained, const std::string& latest) {
        try {
            write_file(plan, read_state);
        } catch (const UserError& error) {
            fail_and_keep(format("--export %s: %s", o_.export_file, error.what()), "--export FILE exports it",
                          "what was trained", o_.export_file, trained, latest);
        }
        if (o_.rank.is_first())
            print(o_.notes(), "exported the %s in %s as %s\n", o_.export_part, type().name, o_.export_file);
    }

  private:
    // Calls visit(layer, field, matrix) for the matrix of each linear layer with its adapter merged into it,
    // W + scale B A, in the layout of W: (in, out) or, if by outputs or quantized, (out, in). Then calls it
    // for the rows of embeddings and head that the State does not have, some at a time, with the number of
    // blocks as the layer.
    template <class Visit>
    void for_each_merged(Visit&& visit) {
        Range range("merge");
        Weights& weights = gpt_.weights();
        weights.expect_blocks();
        for (int l = 0; l < in_.config.layers; l++) {
            weights.fetch(l);
            for (const auto& [w, field] : linears(weights.block(l))) {
                const int64_t outputs = w->outputs(), inputs = w->inputs();
                TensorX matrix = arena_.take<floatX>(
                    "merged", w->by_outputs ? Shape{outputs, inputs} : Shape{inputs, outputs});
                const TensorX weight = weight_of(arena_, stream_, *w);
                copy_rows_on_device(matrix.data(), inputs, weight.data(), inputs, inputs, outputs, stream_);
                merge_lora(arena_, stream_, matrix, w->adapter, w->by_outputs);
                visit(l, field, matrix);
            }
        }
        weights.release();
        gpt_.embedding_and_head().for_each_frozen_row_slice(
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
        TensorCopier to(std::move(write), in_.config);
        size_t next = 0;
        // Appends the tensors of the State up to the next one that it does not have.
        const auto append_state = [&] {
            for (; next < all.size(); next++) {
                const ExportTensor& t = all[next];
                if (plan && is_linear(t.field)) return;
                const std::optional<int64_t> place = place_in(state, t);
                if (!place) return;
                const int64_t columns = t.columns_in_model();
                to.append(t, t.rows(), [&](int64_t first, int64_t count, floatX* host) {
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
                append_state();
                for (; next < all.size() && all[next].field == field; next++) {
                    const ExportTensor& t = all[next];  // the matrix, a part of it, or what has these rows
                    const int64_t rows = layer < in_.config.layers ? t.rows() : matrix.rows();
                    to.append(t, rows, [&](int64_t first, int64_t count, floatX* host) {
                        const int64_t columns = t.columns_in_model();
                        copy_to_host(host, matrix.at((t.first_row + first) * columns),
                                     static_cast<size_t>(count * columns) * sizeof(floatX), stream_);
                    });
                    rows_done += rows;
                    if (rows_done < t.rows()) return;
                    rows_done = 0;
                }
            });
        });
        append_state();
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
                write_model(folder, model_.trained(), in_.saved_tokenizer(), in_.adapter);
            });
        const std::string named = model_.adapter ? o_.model + " --adapter " + kept : kept;
        fail("%s; %s is saved: --model %s --steps 0 %s", failed, what, named, again);
    }

    // ---- the merged model

    // The tensors of the merged model, with the shapes of its family's files: those of the State, then the
    // matrices of the linear layers, then embeddings and head that the State does not have.
    std::vector<ExportTensor> merged_tensors() const {
        const std::vector<Field> outside = model_.fields_not_in_state();
        std::vector<ExportTensor> all =
            tensors_in_order(model_.whole, *find_export_type("f32"), true, outside);
        for (ExportTensor& t : all) {
            t.name = t.from;
            t.order = GgufPart::Rows::Same;
            t.added = 0;
            if (t.is_transposed) std::swap(t.shape[0], t.shape[1]);
            t.is_transposed = t.is_transposed && makes_by_outputs();
        }
        std::ranges::stable_sort(all, {}, [&](const ExportTensor& t) {
            return is_linear(t.field) ? 1 : std::ranges::find(outside, t.field) != outside.end() ? 2 : 0;
        });
        return all;
    }
    void write_merged(const std::string& folder, Plan& plan) {
        write_settings<floatX>(folder, in_.config, in_.saved_tokenizer());
        const State<floatX>& state = model_.state;
        const std::vector<ExportTensor> all = merged_tensors();
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

    // ---- the GGUF file

    bool is_adapter() const { return o_.export_part == "adapter"; }
    const ExportType& type() const {
        const char* const own = std::is_same_v<floatX, float> ? "f32" : "bf16";
        return *find_export_type(o_.export_type.empty() ? own : o_.export_type);
    }
    // LoRA's alpha: that of the first layer.
    double alpha() const { return in_.adapter.modules[0].scale * in_.adapter.modules[0].rank; }
    std::vector<ExportTensor> exported_tensors() const {
        if (is_adapter()) return adapter_tensors(in_.config, in_.adapter.modules, type(), alpha());
        auto all = tensors_in_order(model_.whole, type(), export_uses_arena(), model_.fields_not_in_state());
        for (ExportTensor& t : all)
            if (is_linear(t.field) && makes_by_outputs()) t.is_transposed = false;
        return all;
    }
    // The tensors of rotary positions, by their names.
    std::vector<std::pair<const char*, std::vector<float>>> rope_divisors() const {
        const RopeScaling& rope = in_.config.rope;
        const auto floats = [](const std::vector<double>& x) {
            return std::vector<float>(x.begin(), x.end());
        };
        if (is_adapter()) return {};
        if (rope.type == RopeType::kLlama3)
            return {{"rope_freqs.weight", gguf::llama3_divisors(in_.config.head_size, rope)}};
        if (rope.type == RopeType::kLongrope)
            return {{"rope_factors_long.weight", floats(rope.long_factor)},
                    {"rope_factors_short.weight", floats(rope.short_factor)}};
        return {};
    }
    void declare(GgufWriter& writer, const std::vector<ExportTensor>& all) const {
        for (const auto& [name, divisors] : rope_divisors())
            writer.declare(name, gguf_type("F32"), {static_cast<int64_t>(divisors.size())});
        for (const ExportTensor& t : all) writer.declare(t.name, *t.type, t.shape);
    }
    GgufKeys exported_keys() const {
        if (is_adapter()) return adapter_keys(in_.config, in_.export_name(), alpha());
        int64_t numbers = model_.whole.count();
        for (const auto& [name, divisors] : rope_divisors()) numbers += static_cast<int64_t>(divisors.size());
        GgufKeys all = model_keys(in_.config, type(), in_.export_name(), numbers);
        all.append(in_.exported_tokenizer);
        return all;
    }
    void write_file(Plan& plan, const ReadBuffer& read_state) {
        const std::vector<ExportTensor> all = exported_tensors();
        const State<floatX>& state = is_adapter() ? *model_.adapter : model_.state;
        Plan* const made = export_uses_arena() ? &plan : nullptr;
        if (!o_.rank.is_first()) {
            if (!made || model_.is_divided()) append_all(all, state, made, read_state, nullptr);
            return;
        }
        const std::string temporary = o_.export_file + ".tmp";
        GgufWriter writer;
        declare(writer, all);
        try {
            writer.open(temporary, exported_keys());
            for (const auto& [name, divisors] : rope_divisors())
                writer.append(divisors.data(), divisors.size() * sizeof(float));
            std::vector<unsigned char> encoded;
            append_all(
                all, state, made, read_state, [&](const ExportTensor& t, const std::vector<float>& values) {
                    check_written(values, t.from);
                    encoded.resize(values.size() / static_cast<size_t>(t.type->block) *
                                   static_cast<size_t>(t.type->block_bytes));
                    const int64_t bad = encode_ggml(*find_ggml_format(t.type->number), encoded.data(),
                                                    values.data(), static_cast<int64_t>(values.size()));
                    if (bad >= 0)
                        fail("%s has %g, which F16 cannot hold: bf16 or f32 can", t.from,
                             double{values[static_cast<size_t>(bad)]});
                    writer.append(encoded.data(), encoded.size());
                });
            writer.finish();
            replace_file(temporary, o_.export_file);
        } catch (...) {
            unlink(temporary.c_str());
            throw;
        }
    }

    const RunConfig& o_;
    const RunInputs& in_;
    const RunModel& model_;
    Arena& arena_;
    const Stream& stream_;
    Gpt& gpt_;
};
