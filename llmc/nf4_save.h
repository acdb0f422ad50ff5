// nf4_save.h - writes model.safetensors of a model with matrices in NF4, byte for byte as `transformers`
// saves it.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "llmc/checkpoint.h"
#include "llmc/nf4_files.h"

// Collects the tensors of a file and writes them. Each is in device memory or is a text. They are written in
// the order of safetensors' own library: the widest elements first, so that all are aligned, then by name.
class FileTensors {
  public:
    void add(const std::string& name, FileType type, const std::vector<int64_t>& shape, const void* device) {
        all_.push_back({name, type, shape, static_cast<const char*>(device), ""});
    }
    // Adds the weights of a State.
    template <class T>
    void add(const State<T>& state) {
        const StateBuffer& weights = *state.find(StatePart::Weights);
        for (const SavedTensor& t : saved_tensors(weights, state.layout))
            add(t.name, file_type(weights), t.shape, weights.at(t.at));
    }
    // Adds an NF4 matrix in device memory at `device`.
    void add(const std::string& name, const Nf4State& state, const char* device) {
        for (const Nf4Tensor& t : nf4_tensors(name, state)) add(t.name, t.type, t.shape, device + t.at);
        const std::string text = nf4_state_json(state);
        const std::vector<int64_t> shape = {static_cast<int64_t>(text.size())};
        all_.push_back({name + Nf4File::kStateEnding, FileType::U8, shape, nullptr, text});
    }

    // Writes and syncs the file.
    void write(const std::string& path, Stream stream) {
        std::sort(all_.begin(), all_.end(), [](const Saved& a, const Saved& b) {
            const size_t a_width = file_type_info(a.type).bytes, b_width = file_type_info(b.type).bytes;
            return a_width != b_width ? a_width > b_width : a.name < b.name;
        });
        SafetensorsWriter file(path);
        for (const Saved& t : all_) file.declare(t.name, t.type, t.shape);
        std::vector<char> host;
        for (const Saved& t : all_) {
            if (!t.device) {
                file.append(t.text.data(), t.text.size());
                continue;
            }
            auto bytes = static_cast<int64_t>(file_type_info(t.type).bytes);
            for (const int64_t dim : t.shape) bytes *= dim;
            for_each_chunk(bytes, [&](int64_t first, int64_t count) {
                host.resize(static_cast<size_t>(count));
                copy_to_host(host.data(), t.device + first, host.size(), stream);
                file.append(host.data(), host.size());
            });
        }
        file.finish();
    }

  private:
    struct Saved {
        std::string name;
        FileType type;
        std::vector<int64_t> shape;
        const char* device;
        std::string text;
    };
    std::vector<Saved> all_;
};

// The "quantization_config" in such a model's config.json, as `transformers` writes it. `dtype` is the type
// that its matrices are computed with, "bfloat16" or "float32".
inline nlohmann::json nf4_config(bool is_double, const char* dtype) {
    return {{"quant_method", "bitsandbytes"},
            {"load_in_4bit", true},
            {"load_in_8bit", false},
            {"bnb_4bit_quant_type", "nf4"},
            {"bnb_4bit_use_double_quant", is_double},
            {"bnb_4bit_compute_dtype", dtype},
            {"bnb_4bit_quant_storage", "uint8"},
            {"llm_int8_skip_modules", nullptr},
            {"llm_int8_threshold", 6.0},
            {"llm_int8_enable_fp32_cpu_offload", false},
            {"llm_int8_has_fp16_weight", false}};
}
