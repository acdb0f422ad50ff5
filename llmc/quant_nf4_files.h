// quant_nf4_files.h - reads and writes models with matrices in NF4 (quant_nf4.cuh), as bitsandbytes and
// `transformers` write them in safetensors files.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/checkpoint.h"
#include "llmc/disk.h"
#include "llmc/quant_formats.h"
#include "llmc/quant_nf4.cuh"
#include "llmc/safetensors.h"

// ---- reading
//
// A matrix "m.weight" (out, in) of n elements is stored as several tensors:
//
//     m.weight                                  U8 (ceil(n / 2), 1): the codes; or the same bytes as another
//                                               type (bnb_4bit_quant_storage)
//     m.weight.absmax                           F32 (ceil(n / 64)); with double quantization U8
//     m.weight.quant_map                        F32 (16)
//     m.weight.nested_absmax, .nested_quant_map F32 (ceil(n / 16384)), (256); only with double quantization
//     m.weight.quant_state.bitsandbytes__nf4    U8: JSON, {"quant_type": "nf4", "blocksize": 64,
//         "dtype": "bfloat16", "shape": [out, in]}, and with double quantization "nested_blocksize": 256,
//         "nested_dtype": "float32", "nested_offset": a number

// The content of the JSON.
struct Nf4State {
    bool is_double = false;
    std::string dtype;  // type of the matrix before it was quantized: "bfloat16", "float16" or "float32"
    int64_t rows = 0, columns = 0;
    float nested_offset = 0;
};

// Parses a matrix's JSON. Fails in one line that begins with `where` if anything differs from the format
// above.
inline Nf4State parse_nf4_state(std::string_view text, const std::string& where) {
    const nlohmann::json json = parse_json(text, where);
    if (!json.is_object()) fail("%s is not a JSON object", where);
    const auto value = [&](const char* key) {
        const auto found = json.find(key);
        if (found == json.end()) fail("%s: \"%s\" is missing", where, key);
        return *found;
    };
    const auto require = [&](const char* key, const nlohmann::json& wanted) {
        if (const nlohmann::json is = value(key); is != wanted)
            fail("%s: \"%s\" is %s; only %s is supported", where, key, printable(is.dump()), wanted.dump());
    };
    for (const auto& [key, unused] : json.items()) {
        constexpr const char* kKnown =
            "quant_type blocksize dtype shape nested_blocksize nested_dtype nested_offset";
        if (!has_word(kKnown, key)) fail("%s: \"%s\" is not supported", where, printable(key));
    }
    require("quant_type", "nf4");
    require("blocksize", kNf4Block);
    Nf4State state;
    const nlohmann::json dtype = value("dtype"), shape = value("shape");
    if (dtype != "bfloat16" && dtype != "float16" && dtype != "float32")
        fail("%s: \"dtype\" is %s, but must be \"bfloat16\", \"float16\" or \"float32\"", where,
             printable(dtype.dump()));
    state.dtype = dtype.get<std::string>();
    const auto is_size = [](const nlohmann::json& dim) {
        return dim.is_number_unsigned() && dim.get<uint64_t>() > 0 && dim.get<uint64_t>() <= INT32_MAX;
    };
    if (!shape.is_array() || shape.size() != 2 || !is_size(shape[0]) || !is_size(shape[1]))
        fail("%s: \"shape\" is %s, but must be two sizes", where, printable(shape.dump()));
    state.rows = shape[0].get<int64_t>(), state.columns = shape[1].get<int64_t>();
    for (const char* key : {"nested_blocksize", "nested_dtype", "nested_offset"})
        state.is_double |= json.contains(key);
    if (!state.is_double) return state;
    require("nested_blocksize", kNf4NestedBlock);
    require("nested_dtype", "float32");
    const nlohmann::json offset = value("nested_offset");
    state.nested_offset = offset.is_number() ? offset.get<float>() : NAN;
    if (!std::isfinite(state.nested_offset))
        fail("%s: \"nested_offset\" is %s, but must be a number", where, printable(offset.dump()));
    return state;
}

// Writes the JSON that parse_nf4_state() reads, byte for byte as Python's json.dumps writes bitsandbytes'.
inline std::string nf4_state_json(const Nf4State& state) {
    std::string text = format(R"({"quant_type": "nf4", "blocksize": %d, "dtype": "%s", "shape": [%ld, %ld])",
                              kNf4Block, state.dtype, state.rows, state.columns);
    if (state.is_double)
        text += format(R"(, "nested_blocksize": %d, "nested_dtype": "float32", "nested_offset": %s)",
                       kNf4NestedBlock, nlohmann::json(double{state.nested_offset}).dump());
    return text + "}";
}

// A tensor of a matrix in a file, and the offset of its bytes in the matrix in memory.
struct Nf4Tensor {
    std::string name;
    FileType type;
    std::vector<int64_t> shape;
    int64_t at;
};

// The tensors that bitsandbytes saves of a matrix, without the JSON.
inline std::vector<Nf4Tensor> nf4_tensors(const std::string& name, const Nf4State& state) {
    const int64_t n = state.rows * state.columns;
    const Nf4Parts parts(n, state.is_double);
    std::vector<Nf4Tensor> all = {
        {name, FileType::U8, {ceil_div(n, 2), 1}, parts.codes},
        {name + ".absmax", state.is_double ? FileType::U8 : FileType::F32, {parts.blocks}, parts.absmax},
        {name + ".quant_map", FileType::F32, {16}, parts.quant_map}};
    if (!state.is_double) return all;
    all.push_back({name + ".nested_absmax", FileType::F32, {parts.nested_blocks}, parts.nested_absmax});
    all.push_back({name + ".nested_quant_map", FileType::F32, {kNf4NestedValues}, parts.nested_map});
    return all;
}

// An NF4 matrix in a folder's files.
class Nf4File {
  public:
    // `name` is the matrix's whole name, "model.layers.0.mlp.up_proj.weight". Fails in one line that names it
    // if a tensor is missing, a tensor's size or type does not fit the JSON, or the JSON is not supported.
    Nf4File(const SafetensorsFolder& folder, const std::string& name) {
        const auto entry = [&](const char* ending) {
            const SafetensorsEntry* found = folder.find(name + ending);
            if (!found) fail("tensor \"%s\" is missing", printable(name + ending));
            return found;
        };
        const SafetensorsEntry* state = entry(kStateEnding);
        require(*state, "U8", state->bytes);
        if (state->bytes > 4096) fail("%s has %zu bytes", printable(state->name), state->bytes);
        std::string text(state->bytes, '\0');
        state->read(0, text.size(), text.data());
        state_ = parse_nf4_state(text, "tensor \"" + printable(state->name) + "\"");
        for (const Nf4Tensor& t : nf4_tensors("", state_)) {
            const Part part = {entry(t.name.c_str()), t.at, t.type == FileType::F32};
            const FileTypeInfo& type = file_type_info(t.type);
            size_t bytes = type.bytes;
            for (const int64_t dim : t.shape) bytes *= static_cast<size_t>(dim);
            // The codes may be bytes of any type.
            require(*part.entry, t.name.empty() ? part.entry->dtype : type.name, bytes);
            parts_.push_back(part);
        }
        std::array<float, 16> values;
        parts_[2].entry->read(0, sizeof values, values.data());
        if (values != kNf4Values)
            fail("tensor \"%s\": its values are not those of NF4", printable(parts_[2].entry->name));
    }

    // True if the folder has this matrix in NF4. Fails naming the format if it is in another format of
    // bitsandbytes'.
    static bool has(const SafetensorsFolder& folder, const std::string& name) {
        if (folder.find(name + ".quant_state.bitsandbytes__fp4"))
            fail("tensor \"%s\" is quantized as FP4, which is not supported; NF4 is", printable(name));
        if (folder.find(name.substr(0, name.rfind('.')) + ".SCB"))
            fail("tensor \"%s\" is quantized as LLM.int8(), which is not supported; NF4 is", printable(name));
        return folder.find(name + kStateEnding);
    }

    const Nf4State& state() const { return state_; }
    const WeightFormat& format() const { return state_.is_double ? kNf4Double : kNf4; }

    // Reads quantized_bytes() bytes to host memory that is aligned to 16 bytes.
    void read(unsigned char* out) const {
        const Nf4Parts parts = this->parts();
        std::fill(out, out + parts.end, static_cast<unsigned char>(0));
        for (const Part& part : parts_) {
            part.entry->read(0, part.entry->bytes, out + part.at);
            if (part.is_floats) check_finite(*part.entry, out + part.at);
        }
        if (state_.is_double) std::memcpy(out + parts.nested_offset, &state_.nested_offset, 4);
    }

    // Adds to `block` where those bytes are in the files; the matrix begins `at` bytes after the start
    // of the block.
    void find(BlockOnDisk& block, size_t at) const {
        for (const Part& part : parts_)
            block.pieces.push_back(
                {part.entry->file, part.entry->offset, part.entry->bytes, at + static_cast<size_t>(part.at)});
        if (state_.is_double)
            block.numbers.push_back({at + static_cast<size_t>(parts().nested_offset), state_.nested_offset});
    }

    static constexpr const char* kStateEnding = ".quant_state.bitsandbytes__nf4";

  private:
    struct Part {
        const SafetensorsEntry* entry;
        int64_t at;  // offset in memory
        bool is_floats;
    };

    Nf4Parts parts() const { return Nf4Parts(state_.rows * state_.columns, state_.is_double); }

    static void require(const SafetensorsEntry& entry, const std::string& dtype, size_t bytes) {
        if (entry.dtype != dtype || entry.bytes != bytes)
            fail("tensor \"%s\" is %zu bytes of %s where %zu of %s are needed", printable(entry.name),
                 entry.bytes, entry.dtype, bytes, dtype);
    }

    // Fails if a scale is not finite.
    static void check_finite(const SafetensorsEntry& entry, const unsigned char* values) {
        const int64_t first = first_not_finite(kStoredF32, values, entry.bytes);
        if (first >= 0)
            fail("tensor \"%s\" has a scale that is not finite, number %ld", printable(entry.name), first);
    }

    Nf4State state_;
    std::vector<Part> parts_;
};

// ---- writing
//
// Writes model.safetensors of a model with matrices in NF4, byte for byte as `transformers` saves it.

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
        std::ranges::sort(all_, [](const Saved& a, const Saved& b) {
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
