// state.h - what a training keeps from step to step: weights, their gradients, AdamW's m and v, and behind
// bf16 weights an fp32 master copy. One buffer each, all in the order of the Layout (model.h).
#pragma once

#include "llmc/device.h"
#include "llmc/model.h"

template <class T>
class State {
  public:
    static constexpr bool kHasMaster = !std::is_same_v<T, float>;

    explicit State(const GptConfig& config) : layout(config) {}

    // Takes the memory, zeroed. Without training only the weights.
    void allocate(bool training, bool gradients = true) {
        const size_t n = static_cast<size_t>(layout.size());
        weights_ = DeviceBuffer(n * sizeof(T), "the weights");
        if (!training) return;
        if (gradients) gradients_ = DeviceBuffer(n * sizeof(T), "the gradients");
        m_ = DeviceBuffer(n * sizeof(float), "AdamW's m");
        v_ = DeviceBuffer(n * sizeof(float), "AdamW's v");
        if (kHasMaster) master_ = DeviceBuffer(n * sizeof(float), "the master weights");
    }

    // Null before allocate(), and where there is none.
    T* weights() const { return reinterpret_cast<T*>(weights_.data()); }
    T* gradients() const { return reinterpret_cast<T*>(gradients_.data()); }
    float* m() const { return reinterpret_cast<float*>(m_.data()); }
    float* v() const { return reinterpret_cast<float*>(v_.data()); }
    float* master() const { return reinterpret_cast<float*>(master_.data()); }

    const Layout layout;

  private:
    DeviceBuffer weights_, gradients_, m_, v_, master_;
};
