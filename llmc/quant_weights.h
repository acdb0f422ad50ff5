// quant_weights.h - the matrices of a frozen model's linear layers, or of its head, if they are stored in
// formats of their own (quant_matrix.h): which format each has, where they are, and how they are loaded.
// linear.h computes with them.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "llmc/adapter.h"
#include "llmc/checkpoint.h"
#include "llmc/gguf_model.h"
#include "llmc/offload_blocks.h"
#include "llmc/quant_formats.h"
#include "llmc/quant_nf4_files.h"
#include "llmc/ranks_host_memory.h"
#include "llmc/ranks_slices.h"

// ---- the format of each matrix
//
// Chooses the format in which each matrix of a frozen model's linear layers is stored, as --base says: a
// format with fewer bits than the build computes with is widened when a product reads the matrix.

// The formats' names in --base.
inline constexpr std::pair<const char*, const WeightFormat*> kStorable[] = {{"fp32", &kStoredF32},
                                                                            {"bf16", &kStoredBf16},
                                                                            {"8bit", &kQ8_0},
                                                                            {"nf4", &kNf4},
                                                                            {"nf4-double", &kNf4Double}};

// A format's name in options, or else in messages.
inline const char* stored_name(const WeightFormat& format) {
    for (const auto& [name, storable] : kStorable)
        if (storable == &format) return name;
    return format.name;
}

// One part of --base, such as "mlp=bf16".
struct StoredAs {
    std::string target;  // names as in the model's files, "attention", "mlp" or "all"
    const WeightFormat* format;
};

// Parses the parts of --base. Fails if a text is not of this form.
inline std::vector<StoredAs> parse_stored(const std::vector<std::string>& texts) {
    std::vector<StoredAs> all;
    for (const std::string& text : texts) {
        const size_t equals = text.find('=');
        const std::string name = equals == text.npos ? "" : text.substr(equals + 1);
        const WeightFormat* format = nullptr;
        for (const auto& [known, candidate] : kStorable)
            if (name == known) format = candidate;
        if (!format || equals == 0)
            fail(
                "--base %s: there is no such format; formats are %s, for all linear layers, or for some, as "
                "in mlp=bf16",
                printable(text), joined(kStorable, ", ", [](const auto& stored) { return stored.first; }));
        all.push_back({text.substr(0, equals), format});
    }
    return all;
}

// The format of a layer's matrix: that of the last text that names the layer, else the build's own. Fails if
// the format has more bits than the build computes with.
inline const WeightFormat* stored_format(const std::vector<StoredAs>& stored, const ModelConfig& c,
                                         const LinearModule& m) {
    const WeightFormat* format = &kStored<floatX>;
    for (const StoredAs& s : stored)
        if (is_among(c, m, s.target)) format = s.format;
    if (format == &kStoredF32 && !std::is_same_v<floatX, float>)
        fail("--base: this build computes in bf16, and %s would be stored in fp32: make PRECISION=fp32",
             m.name);
    return format;
}

// Fails if a text names no layer, or if a format's blocks do not divide the rows of a matrix.
inline void check_stored(const std::vector<StoredAs>& stored, const ModelConfig& c) {
    for (const StoredAs& s : stored) {
        bool found = false;
        for (const LinearModule& m : linear_modules(c)) {
            if (!is_among(c, m, s.target)) continue;
            found = true;
            if (s.format == &kQ8_0 && m.inputs % Q8_0::kElements != 0)
                fail("--base %s=8bit: blocks of %d do not divide the %ld columns of %s; use nf4", s.target,
                     Q8_0::kElements, m.inputs, m.name);
        }
        if (!found) fail_no_layer("--base", s.target, c);
    }
}

// ---- the matrices
//
// The model's other tensors are in a State whose layout lacks these matrices.
//
// The matrices are on the device, or in host memory or on disk (offload_blocks.h), from where they are
// streamed block by block; or each of several devices has a slice of every block (ranks_exchange.h). Streamed
// matrices may also be the floats of a model's folder, in the files' own format.

// The field with the matrix that the head multiplies by.
inline Field head_field(const ModelConfig& c) { return c.tied ? Field::TokenEmbedding : Field::HeadWeight; }

// The layout of a model without the matrices of its blocks' linear layers (if `matrices`) and without the
// fields `others`.
inline Layout layout_without(const ModelConfig& c, bool matrices, const std::vector<Field>& others,
                             Stage stage = {}) {
    const auto table_of = [&](int unit) {
        Table table = family_table(c, unit);
        std::erase_if(table, [&](const Row& row) {
            return (matrices && is_linear(row.field)) || std::ranges::find(others, row.field) != others.end();
        });
        return table;
    };
    return Layout(c, c.family->prefix, table_of, stage);
}

class QuantizedWeights {
  public:
    // FloatsOfFiles: all matrices are floats, in the format and the order of the model's files.
    enum class Values { Quantized, FloatsOfFiles };

    // The matrices of the linear layers of a stage. format_of(module, name) returns the format of a matrix,
    // given its layer and its name in files. Streaming transfers a whole block at a time. Blocks are counted
    // from the stage's first. Allocates nothing yet.
    template <class FormatOf>
    QuantizedWeights(const ModelConfig& c, Stage stage, Placement placement, Values values,
                     FormatOf&& format_of)
        : first_layer_(stage.first),
          placement_(placement),
          floats_(values == Values::FloatsOfFiles),
          by_outputs_(!floats_ || c.family->by_outputs) {
        for (LinearModule& m : linear_modules(c)) {
            if (!stage.has_block(m.layer)) continue;
            const std::string name = full_name(c, m) + ".weight";
            while (static_cast<int>(blocks_.size()) <= block_of(m)) blocks_.push_back(bytes_);
            add(name, m, format_of(m, name));
        }
        blocks_.push_back(bytes_);
    }
    // The matrix of a model's head, (vocabulary, channels), which may also be the token embedding.
    QuantizedWeights(const ModelConfig& c, const WeightFormat& format) {
        for (const Table& table : {c.family->embeddings(c), c.family->head(c)})
            for (const Row& row : table)
                if (row.field == head_field(c)) {
                    const FileTensor& t = row.parts[0];
                    LinearModule m;
                    m.field = row.field, m.inputs = c.channels, m.outputs = c.vocabulary;
                    add((t.has_prefix ? c.family->prefix : "") + t.name, m, &format);
                }
    }

    // The bytes of all matrices.
    size_t bytes() const { return bytes_; }
    int64_t elements() const {
        int64_t n = 0;
        for (const Matrix& m : matrices_) n += m.module.outputs * m.module.inputs;
        return n;
    }
    Placement placement() const { return placement_; }
    // Leaves each of several ranks its slice of every block; call it before allocate().
    void divide(const Rank& rank) {
        constexpr int64_t kStretch = 4096;  // bytes
        slices_ = slices_of(rank, kStretch);
        own_starts_ = {0};
        for (const size_t bytes : streamed_bytes()) {
            const int64_t own = slices_.own(static_cast<int64_t>(bytes)).count;
            own_starts_.push_back(own_starts_.back() +
                                  static_cast<size_t>(ceil_div(own, kStretch) * kStretch));
        }
    }
    bool is_divided() const { return slices_.ranks > 1; }
    // True if a block is fetched into a buffer when it is used.
    bool is_streamed() const { return placement_ != Placement::Device || is_divided(); }
    // The bytes that they take on the device: of divided ones, those of the rank's own slices.
    size_t bytes_on_device() const {
        if (placement_ != Placement::Device) return 0;
        return is_divided() ? own_starts_.back() : bytes_;
    }
    DividedBytes divided_block(int number) const {
        const auto l = static_cast<size_t>(number);
        return {static_cast<int64_t>(blocks_[l + 1] - blocks_[l]), slices_,
                memory_.data() ? memory_.data() + own_starts_[l] : nullptr};
    }
    // are_floats: they are floats as in the files. by_outputs: they are stored (out, in).
    bool are_floats() const { return floats_; }
    bool by_outputs() const { return by_outputs_; }
    // Allocates their memory; on disk they need none. In host memory the ranks of a machine have them once,
    // in `shared`, if that is not null.
    void allocate(const SharedHostMemory* shared) {
        if (placement_ == Placement::Device)
            memory_ = DeviceBuffer(bytes_on_device(), "the quantized weights");
        if (placement_ == Placement::Host) host_ = pinned_buffer(bytes_, shared);
    }

    // The bytes of a block where the weights are stored in memory; null before allocate(), and on disk.
    std::span<char> block(int number) const {
        char* const all = host_ ? host_->data() : memory_.data();
        return {all ? all + start_of(number) : nullptr, start_of(number + 1) - start_of(number)};
    }
    // The size of each transfer: of a whole block.
    std::vector<size_t> streamed_bytes() const {
        std::vector<size_t> bytes;
        for (size_t i = 0; i + 1 < blocks_.size(); i++) bytes.push_back(blocks_[i + 1] - blocks_[i]);
        return bytes;
    }
    size_t largest_streamed() const {
        const std::vector<size_t> bytes = streamed_bytes();
        return *std::ranges::max_element(bytes);
    }

    // The parts of a linear layer. Its transfer begins at `block` on the device, or is not there yet (null).
    // Each part has a range of the layer's outputs.
    std::vector<QuantizedPart> parts(int layer, Field field, const char* block) const {
        std::vector<QuantizedPart> found;
        for (const Matrix& m : matrices_)
            if (m.module.layer == layer && m.module.field == field)
                found.push_back({view(m, block ? block + (m.offset - start_of(block_of(m.module))) : nullptr),
                                 m.module.first_output});
        return found;
    }

    // The matrix, if there is only one.
    QuantizedView view() const { return view(matrices_[0], memory_.data()); }

    // Loads the matrices from a model's folder. NF4 matrices are read as they are in the files; others are
    // quantized here, one matrix at a time. The tensors that were read are added to `used`.
    void load(const SafetensorsFolder& files, const ModelConfig& config,
              std::set<const SafetensorsEntry*>& used) {
        load_each([&](Matrix& m, unsigned char* to) {
            if (floats_) {
                const SafetensorsEntry& entry = find_floats(files, config, m, used);
                const Slice own = own_bytes_of(m, static_cast<int64_t>(entry.bytes));
                const auto bytes = static_cast<size_t>(own.count);
                entry.read(static_cast<uint64_t>(own.first), bytes, to + own.first);
                return check_blocks_finite(*m.format, to + own.first, bytes, entry.name, files.folder());
            }
            if (Nf4File::has(files, m.name))
                find_nf4(files, m, used).read(to);
            else
                quantize(files, m, config, to, used);
        });
    }
    // Finds each transfer's bytes in those files, for `source` to stream them from disk.
    void find(const SafetensorsFolder& files, const ModelConfig& config,
              std::set<const SafetensorsEntry*>& used, DiskBlockSource& source) {
        find_each(source, [&](Matrix& m, BlockOnDisk& block, size_t at) {
            if (!floats_) return find_nf4(files, m, used).find(block, at);
            const SafetensorsEntry& entry = find_floats(files, config, m, used);
            block.pieces.push_back({entry.file, entry.offset, entry.bytes, at});
        });
    }
    // Does the same for a GGUF file.
    void find(const GgufModel& file, DiskBlockSource& source) {
        find_each(source, [&](const Matrix& m, BlockOnDisk& block, size_t at) {
            const GgufPart part = file.get(m.name, {m.module.outputs, m.module.inputs});
            part.for_each_run(0, m.module.outputs, [&](uint64_t offset, size_t bytes, size_t from) {
                block.pieces.push_back({part.tensor->file, offset, bytes, at + from});
            });
        });
    }
    // Adds the matrices to the tensors of a file. All must be in NF4.
    void add_to(FileTensors& file) const {
        for (const Matrix& m : matrices_) {
            const char* const device = memory_.data() + m.offset;
            const int64_t rows = m.module.outputs, columns = m.module.inputs;
            Nf4State state = {m.format == &kNf4Double, m.dtype, rows, columns};
            if (state.is_double)
                copy_to_host(&state.nested_offset, device + Nf4Parts(rows * columns, true).nested_offset, 4,
                             {});
            file.add(m.name, state, device);
        }
    }
    bool are_double() const { return matrices_[0].format == &kNf4Double; }

    // Loads the matrices from a GGUF file, in its formats.
    void load(const GgufModel& file) {
        load_each([&](const Matrix& m, unsigned char* to) {
            const GgufPart part = file.get(m.name, {m.module.outputs, m.module.inputs});
            part.read_rows(0, m.module.outputs, to);
            check_blocks_finite(*m.format, to,
                                part.tensor->row_bytes() * static_cast<size_t>(m.module.outputs),
                                part.tensor->name, file.file().path());
        });
    }

  private:
    struct Matrix {
        std::string name;  // in files
        LinearModule module;
        const WeightFormat* format;
        size_t offset;
        std::string dtype = {};  // of NF4: the type that it was quantized from, by its name in files
    };

    void add(const std::string& name, const LinearModule& m, const WeightFormat* format) {
        matrices_.push_back({name, m, format, bytes_});
        bytes_ += static_cast<size_t>(quantized_bytes(*format, m.outputs * m.inputs));
    }
    int block_of(const LinearModule& m) const { return m.layer - first_layer_; }
    size_t start_of(int block) const { return blocks_[static_cast<size_t>(block)]; }
    // Calls find_matrix(matrix, block, at) for each matrix of a transfer, and adds the block to `source`.
    template <class FindMatrix>
    void find_each(DiskBlockSource& source, FindMatrix&& find_matrix) {
        for (size_t l = 0, i = 0; l + 1 < blocks_.size(); l++) {
            BlockOnDisk block;
            block.bytes = blocks_[l + 1] - blocks_[l];
            for (; i < matrices_.size() && matrices_[i].offset < blocks_[l + 1]; i++)
                find_matrix(matrices_[i], block, matrices_[i].offset - blocks_[l]);
            source.add(block);
        }
    }
    const SafetensorsEntry& find_floats(const SafetensorsFolder& files, const ModelConfig& config,
                                        const Matrix& m, std::set<const SafetensorsEntry*>& used) const {
        const int64_t rows = m.module.outputs, columns = m.module.inputs;
        const Shape shape = by_outputs_ ? Shape{rows, columns} : Shape{columns, rows};
        const SafetensorsEntry& entry = find_part(files, config, m.module.field, {m.name, shape, 0});
        used.insert(&entry);
        return entry;
    }
    // The part of a matrix's first `all` bytes that this rank has: those in its slice of the block. In a file
    // a matrix has fewer bytes than in memory, where it ends at a multiple of 16.
    Slice own_bytes_of(const Matrix& m, int64_t all) const {
        if (!is_divided()) return {0, all};
        const DividedBytes block = divided_block(block_of(m.module));
        const int64_t start = static_cast<int64_t>(m.offset - start_of(block_of(m.module)));
        const Slice own = slices_.own(block.all);
        const int64_t first = std::clamp<int64_t>(own.first - start, 0, all),
                      end = std::clamp<int64_t>(own.first + own.count - start, 0, all);
        return {first, end - first};
    }
    // Where that part is on the device.
    char* own_address_of(const Matrix& m, const Slice& part) const {
        if (!is_divided()) return memory_.data() + m.offset;
        const DividedBytes block = divided_block(block_of(m.module));
        return block.own + static_cast<int64_t>(m.offset - start_of(block_of(m.module))) + part.first -
               slices_.own(block.all).first;
    }
    // Calls fill(matrix, to) to write each matrix's bytes to host memory, and stores those that this rank
    // has; fill() may leave out others.
    template <class Fill>
    void load_each(Fill&& fill) {
        std::vector<unsigned char> bytes;
        for (Matrix& m : matrices_) {
            const auto size = static_cast<size_t>(quantized_bytes(view(m, nullptr)));
            bytes.assign(size + kQuantizedAlignment, 0);
            fill(m, align(bytes.data()));
            const Slice own = own_bytes_of(m, static_cast<int64_t>(size));
            if (host_)
                memcpy(host_->data() + m.offset, align(bytes.data()), size);
            else if (own.count > 0)
                copy_to_device(own_address_of(m, own), align(bytes.data()) + own.first,
                               static_cast<size_t>(own.count), {});
        }
    }
    static unsigned char* align(unsigned char* p) {
        const auto address = reinterpret_cast<uintptr_t>(p);
        return p + (kQuantizedAlignment - address % kQuantizedAlignment) % kQuantizedAlignment;
    }
    QuantizedView view(const Matrix& m, const char* at) const {
        const int64_t outputs = m.module.outputs, inputs = m.module.inputs;
        return {m.format, reinterpret_cast<const unsigned char*>(at), by_outputs_ ? outputs : inputs,
                by_outputs_ ? inputs : outputs};
    }
    static Nf4File find_nf4(const SafetensorsFolder& files, Matrix& m,
                            std::set<const SafetensorsEntry*>& used) {
        Nf4File file(files, m.name);
        const Nf4State& s = file.state();
        if (s.rows != m.module.outputs || s.columns != m.module.inputs || &file.format() != m.format)
            fail(
                "tensor \"%s\": its quant_state is of a %ld x %ld matrix in %s where %ld x %ld in %s are "
                "needed",
                m.name, s.rows, s.columns, file.format().name, m.module.outputs, m.module.inputs,
                m.format->name);
        m.dtype = s.dtype;
        for (const auto& [name, entry] : files.entries())
            if (name == m.name || name.starts_with(m.name + ".")) used.insert(entry);
        return file;
    }
    // Quantizes a matrix. One that the files have as (in, out) is read completely first.
    static void quantize(const SafetensorsFolder& files, Matrix& m, const ModelConfig& config,
                         unsigned char* to, std::set<const SafetensorsEntry*>& used) {
        const int64_t rows = m.module.outputs, columns = m.module.inputs, n = rows * columns;
        const bool by_outputs = config.family->by_outputs || !is_linear(m.module.field);
        const Shape in_file = by_outputs ? Shape{rows, columns} : Shape{columns, rows};
        const SafetensorsEntry& entry = find_part(files, config, m.module.field, {m.name, in_file, 0});
        used.insert(&entry);
        m.dtype = kTorchName<floatX>;
        std::optional<Nf4Quantizer> nf4;
        if (m.format == &kNf4 || m.format == &kNf4Double) nf4.emplace(to, n, *m.format);
        const auto add = [&](int64_t first, const std::vector<floatX>& elements) {
            const auto count = static_cast<int64_t>(elements.size());
            if (nf4) return nf4->add(first, elements.data(), count);
            unsigned char* const at = to + first / m.format->block * m.format->block_bytes;
            if (m.format == &kQ8_0) return quantize_q8_0(at, elements.data(), count);
            if (m.format == &kStored<floatX>)
                std::copy(elements.begin(), elements.end(), reinterpret_cast<floatX*>(at));
            else
                std::transform(elements.begin(), elements.end(), reinterpret_cast<bf16*>(at),
                               [](floatX x) { return from_float<bf16>(to_float(x)); });
        };
        std::vector<floatX> matrix(by_outputs ? 0 : static_cast<size_t>(n));
        read_chunks(entry, n, files.folder(), [&](int64_t first, const std::vector<float>& values) {
            if (by_outputs) matrix.resize(values.size());
            for (size_t k = 0; k < values.size(); k++) {
                const int64_t i = first + static_cast<int64_t>(k);
                const size_t at = by_outputs ? k : static_cast<size_t>(i % rows * columns + i / rows);
                matrix[at] = from_float<floatX>(values[k]);
            }
            if (by_outputs) add(first, matrix);
        });
        if (!by_outputs) add(0, matrix);
        if (nf4) nf4->finish();
    }

    int first_layer_ = 0;
    Placement placement_ = Placement::Device;
    bool floats_ = false, by_outputs_ = true;
    std::vector<Matrix> matrices_;
    size_t bytes_ = 0;
    std::vector<size_t> blocks_;      // where each transfer begins among all bytes, and the end of the last
    Slices slices_;                   // of divided blocks
    std::vector<size_t> own_starts_;  // where this rank's slice of each block begins in memory_, and its end
    DeviceBuffer memory_;
    std::unique_ptr<PinnedBuffer> host_;
};

// The format of a tensor of floats, as it is in the file.
inline const WeightFormat& format_of(const SafetensorsEntry& tensor, const std::string& folder) {
    for (const WeightFormat* format : {&kStoredF32, &kStoredF16, &kStoredBf16})
        if (tensor.dtype == format->file_type) return *format;
    fail("%s: tensor \"%s\" has dtype %s where F32, F16 or BF16 is needed", folder, printable(tensor.name),
         tensor.dtype);
}

// The format of a GGUF tensor. Fails if it is not supported.
inline const WeightFormat& format_of(const GgufTensor& tensor) {
    if (const WeightFormat* format = find_ggml_format(tensor.type->number)) return *format;
    fail("%s: tensor \"%s\" is %s, which is not supported", tensor.file->path(), tensor.name,
         tensor.type->name);
}

// Loads the tensors of `state`, those that are not kept quantized, from a GGUF file, dequantizing them piece
// by piece. buffer(bytes) returns unused device memory, aligned to 16 bytes.
template <class Buffer>
void load_weights(State<floatX>& state, const GgufModel& file, Stream stream, Buffer&& buffer) {
    constexpr int64_t kPiece = int64_t{1} << 20;  // bytes
    std::vector<unsigned char> host;
    for (const Parameter& p : state.layout.parameters())
        for (const Parameter::Part& part : p.parts) {
            const GgufPart found = file.get(part.name, file_shape(part.shape));
            const WeightFormat& format = format_of(*found.tensor);
            const auto row_bytes = static_cast<int64_t>(found.tensor->row_bytes());
            const int64_t rows = part.shape.dims[0], columns = part.shape.size() / rows;
            const int64_t most = std::max<int64_t>(1, kPiece / row_bytes);
            for (int64_t first = 0; first < rows; first += most) {
                const int64_t count = std::min(most, rows - first);
                host.resize(static_cast<size_t>(count * row_bytes));
                found.read_rows(first, count, host.data());
                check_blocks_finite(format, host.data(), host.size(), found.tensor->name, file.file().path());
                if (const float added = added_in_gguf(*file.config().family, p.field); added != 0)
                    for (float& x :
                         std::span(reinterpret_cast<float*>(host.data()), host.size() / sizeof(float)))
                        x -= added;
                auto* const device = static_cast<unsigned char*>(buffer(host.size()));
                copy_to_device(device, host.data(), host.size(), stream);
                dequantize(state.weights() + p.offset + part.offset + first * columns,
                           {&format, device, count, columns}, stream);
            }
        }
}
