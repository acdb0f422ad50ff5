// model.h - the parameters of a GPT-2: one table describes a block, one what is around the blocks. Loading,
// saving, counting, initialising, decaying and reporting follow from them.
//
// In memory a unit's tensors lie together: first the embeddings, then each block, then the last layernorm.
// Inside a unit the decayed ones (the matrices) come first, so that one number says where decay ends.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "llmc/model_config.h"
#include "llmc/random.h"
#include "llmc/tensor.h"

enum class Init { Normal, ResidualNormal, Zero, One };

// A row of a table: the field, its name in Hugging Face's files, its shape there, and how it starts. Matrices
// decay.
template <class Fields, class T>
struct TableRow {
    using Field = Tensor<T> Fields::*;
    Field field;
    const char* name;
    Shape shape;
    Init init;
};
template <class Fields, class T>
using Table = std::vector<TableRow<Fields, T>>;

template <class T>
struct Block {
    Tensor<T> qkv_weight, attention_weight, up_weight, down_weight;
    Tensor<T> ln_1_weight, ln_1_bias, qkv_bias, attention_bias, ln_2_weight, ln_2_bias, up_bias, down_bias;

    static Table<Block, T> table(const GptConfig& g) {
        const int64_t C = g.channels;
        return {
            {&Block::qkv_weight, "attn.c_attn.weight", {C, 3 * C}, Init::Normal},
            {&Block::attention_weight, "attn.c_proj.weight", {C, C}, Init::ResidualNormal},
            {&Block::up_weight, "mlp.c_fc.weight", {C, 4 * C}, Init::Normal},
            {&Block::down_weight, "mlp.c_proj.weight", {4 * C, C}, Init::ResidualNormal},
            {&Block::ln_1_weight, "ln_1.weight", {C}, Init::One},
            {&Block::ln_1_bias, "ln_1.bias", {C}, Init::Zero},
            {&Block::qkv_bias, "attn.c_attn.bias", {3 * C}, Init::Zero},
            {&Block::attention_bias, "attn.c_proj.bias", {C}, Init::Zero},
            {&Block::ln_2_weight, "ln_2.weight", {C}, Init::One},
            {&Block::ln_2_bias, "ln_2.bias", {C}, Init::Zero},
            {&Block::up_bias, "mlp.c_fc.bias", {4 * C}, Init::Zero},
            {&Block::down_bias, "mlp.c_proj.bias", {C}, Init::Zero},
        };
    }
};

template <class T>
struct Embeddings {
    Tensor<T> wte, wpe;
    static Table<Embeddings, T> table(const GptConfig& g) {
        const int64_t C = g.channels;
        return {
            {&Embeddings::wte, "wte.weight", {g.vocabulary, C}, Init::Normal},
            {&Embeddings::wpe, "wpe.weight", {g.positions, C}, Init::Normal},
        };
    }
};

template <class T>
struct LastLayernorm {
    Tensor<T> weight, bias;
    static Table<LastLayernorm, T> table(const GptConfig& g) {
        const int64_t C = g.channels;
        return {
            {&LastLayernorm::weight, "ln_f.weight", {C}, Init::One},
            {&LastLayernorm::bias, "ln_f.bias", {C}, Init::Zero},
        };
    }
};

// Tensors start at a multiple of this many elements: aligned for vectors and for the libraries, in any
// precision, and no block of quantized state (quantize8.cuh) spans two of them.
constexpr int64_t kParameterAlignment = 256;

// One tensor of the model and where it lies.
struct Parameter {
    std::string name;  // in Hugging Face's files, without the prefix "transformer."
    Shape shape;       // there
    Shape memory;      // here: wte's rows are padded
    int64_t offset;    // in elements, from the start of all parameters
    Init init;
    bool decayed() const { return shape.count == 2; }
    // Where the next tensor may start.
    int64_t end() const {
        return offset + (memory.size() + kParameterAlignment - 1) / kParameterAlignment * kParameterAlignment;
    }
};

// A unit of the model: what one optimizer launch updates.
struct Unit {
    std::string name;
    int64_t offset, size;  // in elements, padding included
    int64_t decayed;       // how many from the start decay
};

// Where every tensor of a model lies; the same for weights, gradients and optimizer state.
class Layout {
  public:
    explicit Layout(const GptConfig& config) : config_(config) {
        add_unit("embeddings", "", Embeddings<float>::table(config));
        for (int l = 0; l < config.layers; l++)
            add_unit("block " + std::to_string(l), "h." + std::to_string(l) + ".",
                     Block<float>::table(config));
        add_unit("last layernorm", "", LastLayernorm<float>::table(config));
    }
    const GptConfig& config() const { return config_; }
    const std::vector<Parameter>& parameters() const { return parameters_; }
    const std::vector<Unit>& units() const { return units_; }
    std::span<const Parameter> parameters_of(int unit) const {
        const size_t first = first_parameter_[static_cast<size_t>(unit)];
        const bool last = unit + 1 == static_cast<int>(units_.size());
        const size_t end = last ? parameters_.size() : first_parameter_[static_cast<size_t>(unit) + 1];
        return std::span(parameters_).subspan(first, end - first);
    }
    // Elements, with padding: what a buffer of all parameters holds.
    int64_t size() const { return size_; }
    // The number of parameters as the field counts them: without padding.
    int64_t count() const {
        int64_t n = 0;
        for (const Parameter& p : parameters_) n += p.shape.size();
        return n;
    }

    // Views of a buffer of size() elements, by the tables' fields.
    template <class T>
    Embeddings<T> embeddings(T* base) const {
        return fields<Embeddings<T>>(base, 0);
    }
    template <class T>
    Block<T> block(T* base, int layer) const {
        return fields<Block<T>>(base, layer + 1);
    }
    template <class T>
    LastLayernorm<T> last_layernorm(T* base) const {
        return fields<LastLayernorm<T>>(base, config_.layers + 1);
    }

  private:
    template <class Fields>
    void add_unit(const std::string& name, const std::string& prefix, const Table<Fields, float>& table) {
        Unit unit{name, size_, 0, 0};
        first_parameter_.push_back(parameters_.size());
        for (const auto& row : table) {
            Parameter p{prefix + row.name, row.shape, row.shape, size_, row.init};
            if (p.name == "wte.weight") p.memory.dims[0] = config_.padded_vocabulary();
            size_ = p.end();
            if (p.decayed()) unit.decayed = size_ - unit.offset;
            parameters_.push_back(p);
        }
        unit.size = size_ - unit.offset;
        units_.push_back(unit);
    }
    template <class Fields, class T>
    Fields fields(T* base, int unit) const {
        Fields f;
        const Parameter* p = &parameters_[first_parameter_[static_cast<size_t>(unit)]];
        for (const auto& row : Fields::table(config_)) {
            f.*row.field = Tensor<T>(base ? base + p->offset : nullptr, p->memory);
            p++;
        }
        return f;
    }

    GptConfig config_;
    std::vector<Parameter> parameters_;
    std::vector<Unit> units_;
    std::vector<size_t> first_parameter_;  // of each unit
    int64_t size_ = 0;
};

// GPT-2's initial value of element i of parameter number `index`: normal with deviation 0.02, divided by
// sqrt(2 layers) for the two projections into the residual stream; biases 0, gains 1. A function of its
// arguments alone, so the values do not depend on the layout, the device or the precision.
inline float initial_value(const Parameter& p, int index, int64_t i, int layers, uint64_t seed) {
    if (p.init == Init::Zero) return 0.f;
    if (p.init == Init::One) return 1.f;
    const double deviation = p.init == Init::ResidualNormal ? 0.02 / std::sqrt(2.0 * layers) : 0.02;
    return static_cast<float>(deviation *
                              random_normal(seed, static_cast<uint64_t>(index), static_cast<uint64_t>(i)));
}
