// model.h - the parameters of a model: where each tensor of its family's table (family.h) is in memory, and
// views of a unit's tensors by their purpose. Loading, saving, counting, initializing, weight decay and
// reports are all based on this.
//
// The model is a sequence of units: the embeddings, each block, the head. In memory a unit's tensors are
// together. Those with weight decay come first, so one number says where decay ends. A stage numbers its
// units as the whole model does; the units of other stages are empty.
#pragma once

#include <algorithm>
#include <cassert>
#include <climits>
#include <span>
#include <string>
#include <vector>

#include "llmc/families.h"
#include "llmc/quant_matrix.h"
#include "llmc/random.h"
#include "llmc/tensor.h"

// What LoRA adds to a linear layer. The matrix A has the rows of all parts, one part after the other; each
// part has its own range of the layer's outputs.
template <class T>
struct Adapter {
    struct Part {
        Tensor<T> b;  // (outputs, rank)
        int64_t first_output;
        float scale;
    };
    Tensor<T> a;  // (sum of the parts' ranks, inputs)
    std::vector<Part> parts;
    uint64_t place = 0;  // distinguishes this adapter from others in dropout's random numbers
    explicit operator bool() const { return !parts.empty(); }
};

// A range of a linear layer's outputs, from first_output on, whose matrix is stored in a format of its own.
struct QuantizedPart {
    QuantizedView matrix;  // (outputs, inputs); a single part has the orientation of the weight
    int64_t first_output;
};

// out = in weight [+ bias] [+ adapter]. Tensors that do not exist are absent. A quantized weight is
// dequantized when a product reads it.
template <class T>
struct Linear {
    Tensor<T> weight, bias;
    bool by_outputs = false;  // the weight is stored (outputs, inputs), else (inputs, outputs)
    Adapter<T> adapter = {};
    std::vector<QuantizedPart> quantized = {};
    bool floats = false;         // the parts are floats from a model's folder, used as they are
    Tensor<T> dequantized = {};  // the dequantized parts, if they are used by several products

    int64_t outputs() const {
        if (quantized.empty()) return by_outputs ? weight.rows() : weight.columns();
        const QuantizedPart& last = quantized.back();
        return last.first_output + (by_outputs ? last.matrix.rows : last.matrix.columns);
    }
    int64_t inputs() const {
        if (quantized.empty()) return by_outputs ? weight.columns() : weight.rows();
        return by_outputs ? quantized[0].matrix.columns : quantized[0].matrix.rows;
    }
    // The shape of the weight as it is stored.
    Shape shape() const { return by_outputs ? Shape{outputs(), inputs()} : Shape{inputs(), outputs()}; }
    // True if the parts together have the memory layout of a whole weight in this format: all are in the
    // format, and there is no padding between them.
    bool lies_as(const WeightFormat& format) const {
        for (const auto& [matrix, first] : quantized) {
            const bool last = &matrix == &quantized.back().matrix;
            if (matrix.format != &format) return false;
            if (!last && matrix.elements() * format.block_bytes % kQuantizedAlignment != 0) return false;
        }
        return true;
    }
};

template <class T>
struct Norm {
    Tensor<T> weight, bias;
};

template <class T>
struct Block {
    Norm<T> norm_1;  // absent in families that only have norms behind attention and MLP
    Linear<T> qkv;
    Norm<T> query_norm, key_norm;  // of each head, before rotation
    Linear<T> projection;          // the projection of attention's output
    Norm<T> norm_2;
    Linear<T> up, down;
    Norm<T> attention_norm = {},
            mlp_norm = {};  // of what attention and MLP add to the residual stream, if any
};

template <class T>
struct Embeddings {
    Tensor<T> token, position;
    Norm<T> norm;
    Tensor<T> prompt = {};  // soft prompt: vectors before every sequence
};

template <class T>
struct Head {
    Norm<T> norm;
    Linear<T> logits;  // (outputs, inputs); absent if the head is the token embedding
};

// Tensors start at a multiple of this many elements. So they are aligned for vectors and for the libraries in
// any precision, and no block of 8-bit optimizer state (state_formats.h) is part of two tensors.
constexpr int64_t kParameterAlignment = 256;

// One tensor of the model and its place in memory.
struct Parameter {
    struct Part {
        std::string name;  // whole name in files
        Shape shape;       // in files
        int64_t offset;    // in elements, from the start of the parameter
    };
    std::string name;  // in our own files
    Field field;
    std::vector<Part> parts;  // the model's files' tensors that it consists of, one after the other
    Shape shape;              // of all parts together
    Shape memory;             // shape in memory, where rows may be padded
    int64_t offset;           // in elements, from the start of all parameters
    Init init;
    bool decays;
    LoraRole lora;
    // Where the next tensor may start.
    int64_t end() const {
        return offset + (memory.size() + kParameterAlignment - 1) / kParameterAlignment * kParameterAlignment;
    }
};

// A unit of the model, which one optimizer launch updates.
struct Unit {
    std::string name;
    int64_t offset, size;  // in elements, padding included
    int64_t decayed;       // how many elements, from the start, get weight decay
};

// A stage of a model: the blocks from `first` up to, but not including, `end`. The first block comes with the
// embeddings, the last one with the head.
struct Stage {
    int first = 0, end = INT_MAX;
    bool has_block(int layer) const { return layer >= first && layer < end; }
};

// Where every tensor of a model, or of an adapter, is in memory. The same layout holds for weights, gradients
// and optimizer state.
class Layout {
  public:
    // Layout of the model's own tensors.
    explicit Layout(const ModelConfig& config, Stage stage = {})
        : Layout(
              config, config.family->prefix, [&](int unit) { return family_table(config, unit); }, stage) {}
    // Layout of the tensors in other tables: table(unit) may be empty. Their names in files begin with
    // `prefix`.
    template <class Tables>
    Layout(const ModelConfig& config, const std::string& prefix, Tables&& table, Stage stage = {})
        : config_(config), stage_{stage.first, std::min(stage.end, config.layers)} {
        assert(stage_.first >= 0 && stage_.first < stage_.end);
        assert(!config.tied || (has_embeddings() && has_head()));  // a tied matrix is in one stage
        add_unit("embeddings", prefix, "", has_embeddings() ? table(0) : Table());
        for (int l = 0; l < config.layers; l++)
            add_unit("block " + std::to_string(l), prefix, block_prefix(*config.family, l),
                     has_block(l) ? table(l + 1) : Table());
        add_unit("head", prefix, "", has_head() ? table(config.layers + 1) : Table());
    }
    const ModelConfig& config() const { return config_; }
    const Stage& stage() const { return stage_; }
    bool has_embeddings() const { return stage_.first == 0; }
    bool has_head() const { return stage_.end == config_.layers; }
    bool has_block(int layer) const { return stage_.has_block(layer); }
    // How many blocks the stage has, and the number of a layer's block among them.
    int blocks() const { return stage_.end - stage_.first; }
    int block_of(int layer) const { return layer - stage_.first; }
    const std::vector<Parameter>& parameters() const { return parameters_; }
    const std::vector<Unit>& units() const { return units_; }
    // The numbers of the units that are not blocks; block l is unit l + 1.
    int embeddings_unit() const { return 0; }
    int head_unit() const { return config_.layers + 1; }
    static int block_unit(int layer) { return layer + 1; }
    static int layer_of(int unit) { return unit - 1; }  // of a block's unit
    bool is_block(int unit) const { return has_block(layer_of(unit)); }
    std::span<const Parameter> parameters_of(int unit) const {
        const size_t first = first_parameter_[static_cast<size_t>(unit)];
        const bool last = unit + 1 == static_cast<int>(units_.size());
        const size_t end = last ? parameters_.size() : first_parameter_[static_cast<size_t>(unit) + 1];
        return std::span(parameters_).subspan(first, end - first);
    }
    // Number of elements in a buffer of all parameters, padding included.
    int64_t size() const { return size_; }
    // The number of parameters as usually counted: without padding.
    int64_t count() const {
        int64_t n = 0;
        for (const Parameter& p : parameters_) n += p.shape.size();
        return n;
    }
    // The parameters that each token is multiplied with: all but embeddings that are only looked up.
    int64_t multiplied() const {
        int64_t n = count();
        for (const Parameter& p : parameters_of(embeddings_unit()))
            if (p.field == Field::PositionEmbedding || (p.field == Field::TokenEmbedding && !config_.tied))
                n -= p.shape.size();
        return n;
    }

    // Views of a unit's tensors, by purpose, in a buffer of the unit's size.
    template <class T>
    Embeddings<T> embeddings(T* unit) const {
        const Find<T> at{*this, embeddings_unit(), unit};
        return {at(Field::TokenEmbedding),
                at(Field::PositionEmbedding),
                {at(Field::EmbeddingNormWeight), at(Field::EmbeddingNormBias)},
                at(Field::SoftPrompt)};
    }
    template <class T>
    Block<T> block(T* unit, int layer) const {
        const Find<T> at{*this, layer + 1, unit};
        return {{at(Field::Norm1Weight), at(Field::Norm1Bias)},
                at.linear(Field::QkvWeight, Field::QkvBias),
                {at(Field::QueryNormWeight), {}},
                {at(Field::KeyNormWeight), {}},
                at.linear(Field::AttentionWeight, Field::AttentionBias),
                {at(Field::Norm2Weight), at(Field::Norm2Bias)},
                at.linear(Field::UpWeight, Field::UpBias),
                at.linear(Field::DownWeight, Field::DownBias),
                {at(Field::AttentionNormWeight), {}},
                {at(Field::MlpNormWeight), {}}};
    }
    template <class T>
    Head<T> head(T* unit) const {
        const Find<T> at{*this, head_unit(), unit};
        return {{at(Field::LastNormWeight), at(Field::LastNormBias)}, {at(Field::HeadWeight), {}, true}};
    }

  private:
    // Finds a unit's tensor of a field, as a view at `base`; absent if the unit has none.
    template <class T>
    struct Find {
        const Layout& layout;
        int unit;
        T* base;
        Tensor<T> view(const Parameter& p) const {
            return {base ? base + (p.offset - layout.units_[static_cast<size_t>(unit)].offset) : nullptr,
                    p.memory};
        }
        Tensor<T> operator()(Field field) const {
            for (const Parameter& p : layout.parameters_of(unit))
                if (p.field == field && p.lora.matrix == LoraRole::None) return view(p);
            return {};
        }
        Linear<T> linear(Field weight, Field bias) const {
            Linear<T> l{(*this)(weight), (*this)(bias), layout.config_.family->by_outputs};
            for (const Parameter& p : layout.parameters_of(unit)) {
                if (p.field != weight) continue;
                if (p.lora.matrix == LoraRole::A) l.adapter.a = view(p);
                if (p.lora.matrix == LoraRole::B)
                    l.adapter.parts.push_back({view(p), p.lora.first_output, p.lora.scale});
            }
            return l;
        }
    };

    void add_unit(const std::string& name, const std::string& prefix, const std::string& block,
                  const Table& table) {
        Unit unit{name, size_, 0, 0};
        first_parameter_.push_back(parameters_.size());
        for (const Row& row : table) {
            Parameter p{.name = block + (row.name.empty() ? row.parts[0].name : row.name),
                        .field = row.field,
                        .parts = {},
                        .shape = row.parts[0].shape,
                        .memory = {},
                        .offset = size_,
                        .init = row.init,
                        .decays = row.decays,
                        .lora = row.lora};
            p.shape.dims[0] = 0;
            for (const FileTensor& t : row.parts) {
                const int64_t start = p.shape.size();
                p.parts.push_back({(t.has_prefix ? prefix + block : "") + t.name, t.shape, start});
                p.shape.dims[0] += t.shape.dims[0];
            }
            p.memory = p.shape;
            if (row.padded) p.memory.dims[0] = config_.padded_vocabulary();
            size_ = p.end();
            if (p.decays) unit.decayed = size_ - unit.offset;
            parameters_.push_back(p);
        }
        unit.size = size_ - unit.offset;
        units_.push_back(unit);
    }

    ModelConfig config_;
    Stage stage_;
    std::vector<Parameter> parameters_;
    std::vector<Unit> units_;
    std::vector<size_t> first_parameter_;  // by unit
    int64_t size_ = 0;
};

// The initial values of a parameter from element `first` on, as in GPT-2: normal with standard deviation
// 0.02, divided by sqrt(2 layers) for the two projections into the residual stream; biases 0, gains 1. LoRA's
// A is uniform up to 1/sqrt(its columns), as in PEFT. Each value depends only on the seed, the parameter's
// name and the element, so other parts of the model do not change it.
inline void initial_values(const Parameter& p, int64_t first, int layers, uint64_t seed,
                           std::span<float> out) {
    if (p.init == Init::Zero || p.init == Init::One)
        return std::fill(out.begin(), out.end(), p.init == Init::One ? 1.f : 0.f);
    if (p.init == Init::Uniform) {
        const double bound = 1 / std::sqrt(static_cast<double>(p.shape.columns()));
        for (float& x : out)
            x = static_cast<float>(
                bound * (2 * random_uniform(seed, name_hash(p.name), 0, static_cast<uint64_t>(first++)) - 1));
        return;
    }
    random_normals(seed, name_hash(p.name), static_cast<uint64_t>(first), out);
    const bool residual = p.init == Init::ResidualNormal;
    const float deviation = static_cast<float>(residual ? 0.02 / std::sqrt(2.0 * layers) : 0.02);
    for (float& x : out) x *= deviation;
}
