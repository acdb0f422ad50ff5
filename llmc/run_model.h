// run_model.h - the model of a run in memory: its parameters, those matrices of a frozen model that are
// quantized or kept in files or host memory, the adapter that is trained, and the factors of positions; and
// how these are loaded.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "llmc/checkpoint.h"
#include "llmc/gguf_model.h"
#include "llmc/model_positions.h"
#include "llmc/offload_blocks.h"
#include "llmc/offload_embeddings.h"
#include "llmc/run_config.h"
#include "llmc/quant_formats.h"
#include "llmc/quant_weights.h"
#include "llmc/run_inputs.h"
#include "llmc/safetensors.h"
#include "llmc/state.h"
#include "llmc/tensor.h"
#include "llmc/weights.h"

// Fails if a float in a model's files is not finite, the scales of NF4 included. Weights that are loaded are
// checked while loading; these are the checks of weights that are streamed from the files, which are made
// only when a loss is not finite.
inline void check_files_finite(const SafetensorsFolder& files) {
    for (const auto& [name, entry] : files.entries())
        if (const WeightFormat* const format = stored_floats(entry->dtype))
            check_blocks_finite(*format, *entry->file, entry->offset, entry->bytes, name);
}
inline void check_files_finite(const GgufFile& file) {
    for (const GgufTensor& t : file.tensors())
        if (const WeightFormat* format = find_ggml_format(t.type->number))
            check_blocks_finite(*format, *t.file, t.offset, t.bytes, t.name);
}

// The options of the state that a run keeps from step to step. Fails if weights of type T cannot use what was
// asked for.
template <class T>
StateOptions state_options(const RunConfig& o) {
    if (std::is_same_v<T, float> && o.steps > 0 && o.master != "fp32")
        fail(
            "--state-formats master=%s completes bf16 weights, and this build's are fp32: make "
            "PRECISION=bf16",
            o.master);
    StateOptions s;
    s.training = o.steps > 0;
    s.gradients = !o.update_in_backward;
    s.optimizer = named<Optimizer>(kOptimizerNames, o.optimizer);
    s.master = named<Master>(kMasterNames, o.master);
    s.m = named<Moment>(kMomentNames, o.adam_m);
    s.v = named<Moment>(kMomentNames, o.adam_v);
    if (o.steps == 0) return s;
    s.block_gradients = named<Placement>(kPlacementNames, o.gradients);
    s.updated = named<Placement>(kPlacementNames, o.state);
    if (o.slices_state()) s.slices = slices_of(o.rank);
    s.slices_gradients = o.slices_gradients();
    s.slices_blocks = o.slices_weights() && !o.trains_adapter();
    return s;
}

// The Layout of everything that is trained in a stage: the model's tensors, or the adapter's. It has as many
// units as the model; units of an adapter may be empty.
inline Layout trained_layout(const ModelConfig& c, const AdapterConfig& adapter, Stage stage = {}) {
    if (!adapter) return Layout(c, stage);
    const auto table = [&](int unit) { return adapter_table(adapter, c, unit); };
    return Layout(c, kPeftPrefix + std::string(c.family->prefix), table, stage);
}

// What an optional contains, or null.
template <class T>
const T* pointer_to(const std::optional<T>& optional) {
    return optional ? &*optional : nullptr;
}
template <class T>
T* pointer_to(std::optional<T>& optional) {
    return optional ? &*optional : nullptr;
}

class RunModel {
  public:
    const Layout whole;  // of all parameters that the model's files have
    // Matrices of a frozen model that `state` does not have: those of its linear layers, its head, and its
    // embeddings and head outside the device.
    std::optional<QuantizedWeights> quantized, quantized_head;
    std::optional<OffloadedEmbeddings> embeddings;
    State<floatX> state;
    std::optional<State<floatX>> adapter;

    // Allocates nothing yet. The formats of the state may change until allocate(): call apply_formats(). A
    // stage that is not the whole model has no soft prompt, and no embedding or head in a format of its own.
    RunModel(const RunConfig& o, RunInputs& in, Stage stage = {})
        : whole(in.config),
          quantized(frozen_matrices(o, in, stage)),
          quantized_head(in.quantized_head()),
          embeddings(in.offloaded_embeddings(o.embeddings)),
          state(layout_without(in.config, quantized.has_value(), fields_not_in_state(in.config), stage),
                state_options_of_model(o, in)),
          o_(o),
          in_(in) {
        assert(state.layout.blocks() == in.config.layers ||
               (!quantized_head && !embeddings && in.adapter.kind != Trained::Prompt));
        if (in.adapter)
            adapter.emplace(trained_layout(in.config, in.adapter, stage), state_options<floatX>(o));
    }
    RunModel(const RunModel&) = delete;

    State<floatX>& trained() { return adapter ? *adapter : state; }
    const State<floatX>& trained() const { return adapter ? *adapter : state; }
    FrozenWeights frozen_weights() const {
        return {pointer_to(quantized), pointer_to(quantized_head), pointer_to(embeddings)};
    }
    // True if each of several ranks has only a slice of a frozen model's matrices.
    bool is_divided() const { return quantized && quantized->is_divided(); }
    // The embeddings and the head that `state` does not have.
    std::vector<Field> fields_not_in_state() const { return fields_not_in_state(in_.config); }
    // True if a new soft prompt starts as rows of an embedding that `state` does not have.
    bool looks_up_prompt() const {
        return (embeddings || (in_.config.tied && quantized_head)) && !in_.first_prompt.empty();
    }
    // The parameters that are trained, and below the FLOPs of a token: of the whole model.
    int64_t trained_count() const { return adapter ? adapter->layout.count() : whole.count(); }

    // Applies changed formats of the state.
    void apply_formats() {
        state.set_options(state_options_of_model(o_, in_));
        if (adapter) adapter->set_options(state_options<floatX>(o_));
    }
    // Allocates all of it, and copies to the device the position factors for sequences of `length` tokens.
    // What is in host memory is in `shared`, unless that is null.
    void allocate(int length, const SharedHostMemory* shared, Stream stream) {
        state.allocate();
        for (std::optional<QuantizedWeights>* weights : {&quantized, &quantized_head})
            if (*weights) (*weights)->allocate(shared);
        if (embeddings) embeddings->allocate(shared);
        if (adapter) adapter->allocate();
        const std::vector<float> factors = ::position_factors(in_.config, length);
        if (factors.empty()) return;
        const size_t bytes = factors.size() * sizeof(float);
        position_factors_ = DeviceBuffer(bytes, "the positions' factors");
        copy_to_device(position_factors_.data(), factors.data(), bytes, stream);
    }
    // Where the factors are (model_positions.h); null if there are none.
    float* position_factors() const { return reinterpret_cast<float*>(position_factors_.data()); }

    // Initializes a new model, or loads the model from its folder or its GGUF file; the latter in the memory
    // that `plan` has for load_gguf(). `blocks_in_files` streams blocks from the files, or is null.
    void load(Arena& arena, Plan& plan, Stream stream, DiskBlockSource* blocks_in_files) {
        if (parse_new_model(o_.model))
            initialize_weights(state, o_.seed);
        else if (in_.gguf)
            arena.run(plan, [&] { load_gguf(arena, stream, blocks_in_files); });
        else
            load_folder(blocks_in_files);
    }
    // Loads the adapter that the run begins with, or initializes a new one. For a soft prompt whose vectors
    // `state` does not have, token_rows() returns them, in the memory that `plan` has for it.
    template <class TokenRows>
    void begin_adapter(Arena& arena, Plan& plan, Stream stream, TokenRows&& token_rows) {
        if (in_.held_adapter)
            load_adapter(*adapter, in_.held_adapter->path());
        else if (in_.adapter.kind == Trained::Prompt)
            initialize_prompt([&](std::vector<floatX>& rows) {
                arena.run(plan, [&] {
                    const TensorX made = token_rows();
                    copy_to_host(rows.data(), made.data(), rows.size() * sizeof(floatX), stream);
                });
            });
        else
            initialize_weights(*adapter, o_.seed);
    }
    // Loads what a save has, without the state of training.
    void load_save() { adapter ? load_adapter(*adapter, in_.resumed) : load_weights(state, in_.resumed); }
    // FLOPs of a token: 2 for each parameter that is multiplied with, which position embeddings are not, and
    // twice that in backward (Kaplan et al., arXiv:2001.08361); backward computes no gradients of frozen
    // parameters, so these take 2. Causal attention takes 2 layers C `attended` in forward, where `attended`
    // is the length of the sequence, or the mean length of packed examples.
    double flops_of_token(double attended, bool forward_only) const {
        const ModelConfig& config = in_.config;
        int64_t queries = 0;
        for (int l = 0; l < config.layers; l++) queries += config.layer(l).query_width();
        const double attention = static_cast<double>(queries) * attended;
        const double model = static_cast<double>(whole.multiplied());
        const bool has_lora = adapter && in_.adapter.kind == Trained::Lora;
        const double lora = has_lora ? static_cast<double>(adapter->layout.count()) : 0;
        const double forward = 2 * (model + lora + attention);
        const double backward = (adapter ? 2 : 4) * model + 4 * (lora + attention);
        return forward_only ? forward : forward + backward;
    }

    // Loads the model from a folder. `blocks_in_files` streams blocks from the files, or is null.
    void load_folder(DiskBlockSource* blocks_in_files) {
        load_weights(state, in_.model, [&](const SafetensorsFolder& files, auto& used) {
            if (blocks_in_files)
                quantized->find(files, in_.config, used, *blocks_in_files);
            else if (quantized)
                quantized->load(files, in_.config, used);
            if (quantized_head) quantized_head->load(files, in_.config, used);
            if (embeddings) embeddings->open(files, in_.config, used);
        });
    }
    // Loads the model from a GGUF file. What is dequantized now passes through a buffer in the arena.
    void load_gguf(Arena& arena, Stream stream, DiskBlockSource* blocks_in_files) {
        constexpr int64_t kBuffer = int64_t{4} << 20;
        const Tensor<uint8_t> buffer = arena.take<uint8_t>("quantized_rows", {kBuffer});
        if (arena.rehearsing()) return;
        load_weights(state, *in_.gguf, stream, [&](size_t bytes) {
            if (bytes > static_cast<size_t>(kBuffer)) fail("%s: a row of %zu bytes", o_.model, bytes);
            return buffer.data();
        });
        if (embeddings) embeddings->open(*in_.gguf);
        if (blocks_in_files)
            quantized->find(*in_.gguf, *blocks_in_files);
        else
            quantized->load(*in_.gguf);
        in_.gguf->file().drop_pages();  // the file stays open
    }
    // Sets a new soft prompt to the token embeddings of its text, or of tokens drawn at random (Lester et
    // al., arXiv:2104.08691, section 3.1). look_up(rows) copies the rows to the host where `state` has no
    // embedding.
    template <class LookUp>
    void initialize_prompt(LookUp&& look_up) {
        const std::vector<int>& tokens = in_.first_prompt;
        const size_t C = static_cast<size_t>(in_.config.channels);
        std::vector<floatX> rows(tokens.size() * C);
        if (looks_up_prompt()) {
            look_up(rows);
        } else {
            const Parameter& embedding = state.layout.parameters_of(state.layout.embeddings_unit())[0];
            for (size_t i = 0; i < tokens.size(); i++) {
                const int64_t at = embedding.offset + int64_t{tokens[i]} * in_.config.channels;
                copy_to_host(&rows[i * C], state.data<floatX>(StatePart::Weights, at), C * sizeof(floatX),
                             {});
            }
        }
        std::vector<float> values;
        for (const floatX x : rows) values.push_back(to_float(x));
        put_weights(*adapter, 0, values);
    }
    // Fails, naming the tensor, if weights that are streamed from the model's files have a number that is not
    // finite. Loaded weights were checked when they were loaded.
    void check_streamed_finite() const {
        const bool streams = (quantized && quantized->placement() == Placement::Disk) ||
                             (embeddings && embeddings->placement() == Placement::Disk);
        if (!streams) return;
        if (in_.gguf)
            check_files_finite(in_.gguf->file());
        else
            check_files_finite(SafetensorsFolder(in_.model));
    }
    // Saves the base model in NF4.
    void save_base(const std::string& folder, Stream stream) const {
        write_folder(folder, [&](const std::string& temporary) {
            const nlohmann::json format = nf4_config(quantized->are_double(), kTorchName<floatX>);
            write_settings<floatX>(temporary, in_.config, in_.saved_tokenizer(), format);
            FileTensors file;
            file.add(state);
            quantized->add_to(file);
            file.write(temporary + "/model.safetensors", stream);
        });
    }

  private:
    static std::optional<QuantizedWeights> frozen_matrices(const RunConfig& o, const RunInputs& in,
                                                           Stage stage) {
        const bool divided = o.slices_weights() && in.adapter;
        auto matrices = in.quantized_weights(stage, o.weights, divided);
        if (divided) matrices->divide(o.rank);
        return matrices;
    }
    // A frozen model's State has only weights.
    static StateOptions state_options_of_model(const RunConfig& o, const RunInputs& in) {
        if (in.adapter) return {.training = false};
        StateOptions options = state_options<floatX>(o);
        if (o.steps > 0) options.blocks = named<Placement>(kPlacementNames, o.weights);
        return options;
    }
    std::vector<Field> fields_not_in_state(const ModelConfig& config) const {
        if (embeddings) return OffloadedEmbeddings::fields(config);
        return quantized_head ? std::vector{head_field(config)} : std::vector<Field>();
    }

    const RunConfig& o_;
    RunInputs& in_;
    DeviceBuffer position_factors_;
};
