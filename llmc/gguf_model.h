// gguf_model.h - reads a model from a GGUF file as written by llama.cpp's convert_hf_to_gguf.py: its
// configuration, and its tensors under the names and in the order that Hugging Face's files have.
//
// Two tensors have another order of rows in a GGUF; as only whole rows move, quantized rows need no
// conversion. First, in each head of Llama's queries and keys, the two elements that rotate together are
// neighbours (2i, 2i + 1); Hugging Face has them at i and i + head_size / 2. Second, BLOOM has all queries,
// then all keys, then all values; Hugging Face has the three of each head together.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "llmc/families.h"
#include "llmc/gguf.h"
#include "llmc/safetensors.h"

// A tensor of the model in a GGUF file.
struct GgufPart {
    enum class Rows { Same, RotaryPairs, QueriesKeysValues };

    const GgufTensor* tensor;
    Rows order;
    int64_t head_size;  // rows of a head
    int64_t heads;

    // The row of the file's tensor that is row number `row` of the model's tensor.
    int64_t file_row(int64_t row) const {
        if (order == Rows::Same) return row;
        const int64_t head = row / head_size, i = row % head_size;
        if (order == Rows::RotaryPairs)
            return head * head_size + (i < head_size / 2 ? 2 * i : 2 * i - head_size + 1);
        return (head % 3 * heads + head / 3) * head_size + i;
    }

    // Reads `count` rows from `first` on in runs that are contiguous in the file: calls use(offset, bytes,
    // at) for each, with its offset in the file and its offset `at` in the output.
    template <class Use>
    void for_each_run(int64_t first, int64_t count, Use&& use) const {
        const size_t row_bytes = tensor->row_bytes();
        for (int64_t done = 0; done < count;) {
            const int64_t start = file_row(first + done);
            int64_t together = 1;
            if (order == Rows::Same) together = count - done;
            while (done + together < count && file_row(first + done + together) == start + together)
                together++;
            use(tensor->offset + static_cast<uint64_t>(start) * row_bytes,
                static_cast<size_t>(together) * row_bytes, static_cast<size_t>(done) * row_bytes);
            done += together;
        }
    }

    // Reads rows as bytes of the tensor's type; each element of a vector is a row.
    void read_rows(int64_t first, int64_t count, void* out) const {
        for_each_run(first, count, [&](uint64_t offset, size_t bytes, size_t at) {
            tensor->file->read(offset, bytes, static_cast<char*>(out) + at);
        });
    }

    // True if its elements are F32, F16 or BF16.
    bool has_floats() const { return tensor->type->block == 1; }
    // Reads rows of such a tensor as floats, without loss.
    void read_floats(int64_t first, int64_t count, float* out) const {
        const auto n =
            static_cast<size_t>(count) * tensor->row_bytes() / static_cast<size_t>(tensor->type->block_bytes);
        if (tensor->type->block_bytes == 4) return read_rows(first, count, out);
        std::vector<uint16_t> bits(n);
        read_rows(first, count, bits.data());
        widen(bits, std::string_view(tensor->type->name) == "F16", out);
    }
};

namespace gguf {
// Translates "model.layers.3.self_attn.q_proj.weight" to "blk.3.attn_q.weight"; empty if there is no such
// name.
std::string name_of(const Family& family, std::string_view name);

// The number by which Llama 3.1's scaling divides each rotary frequency, which a GGUF stores in
// rope_freqs.weight; in the order of operations of llama.cpp's converter, for the same bits.
std::vector<float> llama3_divisors(int head_size, const RopeScaling& s);
}  // namespace gguf

// The architecture's name in llama.cpp.
const char* gguf_architecture(const Family& family);
// The order of the rows of the tensor that has this name in Hugging Face's files.
GgufPart::Rows rows_order(const ModelConfig& c, const std::string& name);

// The name on Hugging Face's hub of the model that a GGUF file is of, ORG/NAME; `otherwise` if its keys do
// not say it. general.base_model.0 may also be the model that it was fine-tuned from: that has another name
// than the file.
std::string published_name(const nlohmann::json& keys, const std::string& otherwise);

class GgufModel {
  public:
    // Opens the file and reads its configuration. Fails in one line that names the file and the key or tensor
    // if the architecture is another one, if keys or tensors would change the arithmetic in an unknown way,
    // or if a tensor is missing.
    explicit GgufModel(const std::string& path);

    const GgufFile& file() const { return file_; }
    const ModelConfig& config() const { return config_; }
    // The chat template; empty if there is none.
    std::string chat_template() const { return reader_.text("tokenizer.chat_template", ""); }

    // The tensor that has this name in Hugging Face's files. Fails if it is missing or has another shape.
    GgufPart get(const std::string& name, const std::vector<int64_t>& shape) const;

  private:
    std::string key(const char* name) const { return arch_ + "." + name; }
    void refuse_other_keys() const;
    int vocabulary() const;
    nlohmann::json config_json() const;
    void add_positions(nlohmann::json& json, int channels, int heads) const;
    void add_longrope(nlohmann::json& json) const;
    void add_marks(nlohmann::json& json) const;
    void read_rope_divisors();
    void check_tied_head() const;
    void check_tensors() const;

    GgufFile file_;
    ConfigReader reader_;
    std::string arch_;
    const Family* family_ = nullptr;  // of this architecture; a Llama may turn out to be a Mistral
    ModelConfig config_;
};
