// run_export.h - writes the model of a run as a GGUF file (--export): the weights as they are at its end,
// with an adapter merged into them, or the adapter alone. gguf_export.h says what the file contains.
//
// Weights that are in the State are read as saves read them: some at a time, wherever they are, and of
// several ranks each contributes its slices. Matrices of a frozen model that are quantized, streamed, or have
// an adapter are made one after the other in the arena, as a merge makes them. Host memory has a chunk of
// rows at a time; for GPT-2, whose matrices are transposed, a matrix.
#pragma once

#include <numbers>
#include <string>
#include <vector>

#include "llmc/gguf_export.h"
#include "llmc/quant_ggml_encode.h"
#include "llmc/run_merge.h"

// The divisors of the rotary frequencies by Llama 3.1's scaling, the tensor rope_freqs.weight; in fp32 and in
// the order of operations of llama.cpp's converter, for the same bits.
inline std::vector<float> rope_divisors(int head_size, const RopeScaling& s) {
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

// Exports the model of a run, or its adapter.
class ModelExport : public FinishedModel {
  public:
    using FinishedModel::FinishedModel;

    // True if the run exports.
    bool wanted() const { return !o_.export_file.empty() && !o_.plan && o_.bench.empty(); }
    // True if matrices are made in the arena, for which a plan is needed.
    bool uses_arena() const {
        const bool outside = model_.adapter || model_.quantized || !model_.fields_not_in_state().empty();
        return !o_.export_file.empty() && !is_adapter() && outside;
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
            fail_and_keep(format("--export %s: %s", o_.export_file, error.what()), "--export FILE exports it",
                          "what was trained", o_.export_file, trained, latest);
        }
        if (o_.rank.is_first())
            print(o_.notes(), "exported the %s in %s as %s\n", o_.export_part, type().name, o_.export_file);
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
        auto all = tensors_in_order(model_.whole, type(), uses_arena(), model_.fields_not_in_state());
        for (ExportTensor& t : all)
            if (is_linear(t.field) && makes_by_outputs()) t.is_transposed = false;
        return all;
    }
    bool has_rope_divisors() const { return !is_adapter() && in_.config.rope.type == RopeType::kLlama3; }
    void declare(GgufWriter& writer, const std::vector<ExportTensor>& all) const {
        if (has_rope_divisors())
            writer.declare("rope_freqs.weight", gguf_type("F32"), {in_.config.head_size / 2});
        for (const ExportTensor& t : all) writer.declare(t.name, *t.type, t.shape);
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
        const State<floatX>& state = is_adapter() ? *model_.adapter : model_.state;
        Plan* const made = uses_arena() ? &plan : nullptr;
        if (!o_.rank.is_first()) {
            if (!made || model_.is_divided()) append_all(all, state, made, read_state, nullptr);
            return;
        }
        const std::string temporary = o_.export_file + ".tmp";
        GgufWriter writer;
        declare(writer, all);
        try {
            writer.open(temporary, keys());
            append_rope_divisors(writer);
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
};
