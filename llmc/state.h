// state.h - what a training keeps from step to step: weights, gradients, and the optimizer's state in the
// formats the run chose. A table of buffers, from which memory, the report and saves follow.
//
// A buffer holds the elements of the Layout (model.h) in its order, or one element for each stretch of
// them: the scales of 8-bit codes.
#pragma once

#include <algorithm>
#include <iterator>

#include "llmc/device.h"
#include "llmc/model.h"
#include "llmc/quantize8.cuh"
#include "llmc/split.h"

static_assert(kParameterAlignment % kQuantizedBlock == 0);

enum class Optimizer { AdamW, Sgd };
// What completes bf16 weights to fp32: a copy, or the 16 missing bits (split.h), or nothing: then updates
// round at random. fp32 weights need none of it.
enum class Master { Fp32, Split, None };
// How one of AdamW's moments is kept: bf16 is rounded at random, Bits8 in blocks with a scale
// (quantize8.cuh).
enum class Moment { Fp32, Bf16, Bits8 };

// Their names in options and saves, in the order of the values.
inline constexpr const char* kOptimizerNames[] = {"adamw", "sgd"};
inline constexpr const char* kMasterNames[] = {"fp32", "split", "none"};
inline constexpr const char* kMomentNames[] = {"fp32", "bf16", "8bit"};

// The value of a name; the name must be one of them.
template <class Value, size_t count>
Value named(const char* const (&names)[count], const std::string& name) {
    const auto found = std::find(std::begin(names), std::end(names), name);
    assert(found != std::end(names));
    return static_cast<Value>(found - std::begin(names));
}

struct StateOptions {
    bool training = true;   // without it, only the weights
    bool gradients = true;  // a buffer of all gradients; without it they are somebody else's
    Optimizer optimizer = Optimizer::AdamW;
    Master master = Master::Fp32;
    Moment m = Moment::Fp32, v = Moment::Fp32;

    // As the options that ask for it, for messages and saves.
    std::string text() const {
        std::string s = std::string("--optimizer ") + kOptimizerNames[static_cast<int>(optimizer)] +
                        " --master " + kMasterNames[static_cast<int>(master)];
        if (optimizer == Optimizer::AdamW)
            s += std::string(" --adam-m ") + kMomentNames[static_cast<int>(m)] + " --adam-v " +
                 kMomentNames[static_cast<int>(v)];
        return s;
    }
};

// The weight of a master's value: in bf16 the upper half of its split, whether the rest is kept so or in
// full, so that both give the same bits. A NaN stays one.
template <class T>
SIMT_HOST_DEVICE T narrow_master(float x) {
    if constexpr (std::is_same_v<T, float>)
        return x;
    else
        return x == x ? split<16>(x).high : from_float<bf16>(x);
}

enum class StatePart { Weights, Gradients, M, MScale, V, VScale, Master };

// A row of the table.
struct StateBuffer {
    StatePart part;
    const char* name;    // in the report
    const char* kind;    // the line of the report's totals where it counts
    const char* prefix;  // of its parameters' names in a save; null: not saved
    const char* dtype;   // as dtype_name() has it
    size_t width;        // bytes of an element
    int span;            // elements of the model that one of its elements stands for
    int64_t elements = 0;
    DeviceBuffer memory = {};  // empty before allocate()

    size_t bytes() const { return static_cast<size_t>(elements) * width; }
    // The element that stands for element `at` of the model.
    char* at(int64_t at) const {
        return memory.data() ? memory.data() + static_cast<size_t>(at / span) * width : nullptr;
    }
};

template <class T>
class State {
  public:
    State(Layout where, const StateOptions& state_options) : layout(std::move(where)) {
        choose(state_options);
    }
    // Writes the table; takes no memory yet.
    void choose(const StateOptions& state_options) {
        options = state_options;
        buffers_.clear();
        const bool adamw = options.optimizer == Optimizer::AdamW;
        add<T>(StatePart::Weights, "weights", "weights", "");
        if (options.training && options.gradients)
            add<T>(StatePart::Gradients, "gradients", "gradients", nullptr);
        if (options.training && adamw) {
            add_moment(StatePart::M, options.m, "m", "m_scale", "optimizer_m", "m.", "m_scale.");
            add_moment(StatePart::V, options.v, "v", "v_scale", "optimizer_v", "v.", "v_scale.");
        }
        if (options.training && !std::is_same_v<T, float>) {
            if (options.master == Master::Fp32) add<float>(StatePart::Master, "master", "master", "master.");
            if (options.master == Master::Split)
                add<int16_t>(StatePart::Master, "master_low", "master", "master_low.");
        }
    }

    // Takes the memory, zeroed.
    void allocate() {
        for (StateBuffer& b : buffers_) b.memory = DeviceBuffer(b.bytes(), b.name);
    }

    const std::vector<StateBuffer>& buffers() const { return buffers_; }
    const StateBuffer* find(StatePart part) const {
        for (const StateBuffer& b : buffers_)
            if (b.part == part) return &b;
        return nullptr;
    }
    // Where element `at` of the model is in that buffer. Null before allocate(), and where there is none.
    template <class E>
    E* data(StatePart part, int64_t at = 0) const {
        const StateBuffer* b = find(part);
        assert(!b || std::is_void_v<E> || b->dtype == dtype_name<E>());
        return b ? reinterpret_cast<E*>(b->at(at)) : nullptr;
    }
    T* weights() const { return data<T>(StatePart::Weights); }
    T* gradients() const { return data<T>(StatePart::Gradients); }

    const Layout layout;
    StateOptions options;  // as choose() was told

  private:
    template <class E>
    void add(StatePart part, const char* name, const char* kind, const char* prefix, int span = 1) {
        buffers_.push_back(
            {part, name, kind, prefix, dtype_name<E>(), sizeof(E), span, layout.size() / span});
    }
    void add_moment(StatePart part, Moment format, const char* name, const char* scale_name, const char* kind,
                    const char* prefix, const char* scale_prefix) {
        if (format == Moment::Fp32) add<float>(part, name, kind, prefix);
        if (format == Moment::Bf16) add<bf16>(part, name, kind, prefix);
        if (format == Moment::Bits8) {
            add<uint8_t>(part, name, kind, prefix);
            add<float>(part == StatePart::M ? StatePart::MScale : StatePart::VScale, scale_name, kind,
                       scale_prefix, kQuantizedBlock);
        }
    }

    std::vector<StateBuffer> buffers_;
};
