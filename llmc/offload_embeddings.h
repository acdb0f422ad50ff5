// offload_embeddings.h - a frozen model's token embedding and head if they stay in its files or in host
// memory (--offload embeddings=). Of the embedding, only the rows of a batch's tokens are fetched to the
// device. The head is streamed in slices of the vocabulary: one is fetched while the one before it is used.
//
// If the two are one matrix, it is stored once.
#pragma once

#include <algorithm>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "llmc/offload_blocks.h"
#include "llmc/quant_weights.h"
#include "llmc/ranks_host_memory.h"

// The rows of the vocabulary in a product of a head that is dequantized or streamed.
constexpr int64_t kHeadSlice = 4096;
// Prefetch distance of streamed slices.
constexpr int kSlicesAhead = 1;

class OffloadedEmbeddings {
  public:
    // format_of(field, part) returns the format of a matrix; `part` has its name and shape in files.
    // Allocates nothing yet.
    template <class FormatOf>
    OffloadedEmbeddings(const ModelConfig& c, Placement placement, FormatOf&& format_of)
        : placement_(placement), rows_(c.vocabulary), columns_(c.channels) {
        for (const Field field : fields(c)) {
            const std::string name = name_in_files(c, field);
            const WeightFormat* const format = format_of(field, Parameter::Part{name, {rows_, columns_}, 0});
            matrices_.push_back({field, name, format, bytes_});
            bytes_ += static_cast<size_t>(quantized_bytes(*format, rows_ * columns_));
        }
    }
    // The fields of these matrices: the token embedding, and the head unless it is tied.
    static std::vector<Field> fields(const ModelConfig& c) {
        if (c.tied) return {Field::TokenEmbedding};
        return {Field::TokenEmbedding, Field::HeadWeight};
    }

    Placement placement() const { return placement_; }
    Route route() const { return route_from(placement_); }
    // The bytes of all matrices.
    size_t bytes() const { return bytes_; }
    // The pinned host memory that they take beside a GPU.
    size_t pinned_bytes() const {
        if (kHostIsDevice) return 0;
        return placement_ == Placement::Host ? bytes_ : DiskBlockSource::bytes(slice_bytes(0), buffers());
    }
    // Adds the memory that they take outside the device. `shared`: the ranks of a machine have it once.
    void add_to(OutsideDevice& report, bool shared) const {
        if (placement_ == Placement::Disk) report.on_disk += bytes_;
        report.pinned += pinned_bytes();
        if (placement_ == Placement::Host && shared) report.shared += bytes_;
    }

    // The head's slices: how many there are, the first row of each, and the bytes of each.
    int slices() const { return static_cast<int>(ceil_div(rows_, kHeadSlice)); }
    int64_t first_row(int slice) const { return slice * kHeadSlice; }
    std::vector<size_t> streamed_bytes() const {
        std::vector<size_t> all;
        for (int s = 0; s < slices(); s++) all.push_back(slice_bytes(s));
        return all;
    }
    // A view of a slice that was fetched to `at`.
    QuantizedView slice(int number, const char* at) const {
        return {matrices_.back().format, reinterpret_cast<const unsigned char*>(at), rows_in(number),
                columns_};
    }

    // Allocates host memory for the matrices, if they are there, and the buffers that fetching them needs.
    // The ranks of a machine have the matrices once, in `shared`, if that is not null.
    void allocate(const SharedHostMemory* shared) {
        if (placement_ == Placement::Disk) {
            source_ = std::make_unique<DiskBlockSource>(slice_bytes(0), buffers());
        } else {
            host_ = pinned_buffer(bytes_, shared);
            source_ = std::make_unique<PinnedPieces>([this](int slice) {
                const Matrix& head = matrices_.back();
                char* const all = host_->data() + head.at;
                return std::span(all + row_bytes(head) * first_row(slice), slice_bytes(slice));
            });
        }
    }
    // The source of streamed slices; null before allocate().
    PieceSource* source() const { return source_.get(); }

    // Finds the matrices in a model's files, or loads them from there into host memory. Adds the tensors that
    // it used to `used`.
    void open(const SafetensorsFolder& files, const ModelConfig& config,
              std::set<const SafetensorsEntry*>& used) {
        for (Matrix& m : matrices_) {
            const SafetensorsEntry& entry = find_part(files, config, m.field, {m.name, {rows_, columns_}, 0});
            used.insert(&entry);
            open(m, *entry.file, entry.offset, entry.name);
        }
    }
    // Finds or loads the matrices in a GGUF file.
    void open(const GgufModel& file) {
        for (Matrix& m : matrices_) {
            const GgufTensor& tensor = *file.get(m.name, {rows_, columns_}).tensor;
            open(m, *tensor.file, tensor.offset, tensor.name);
        }
    }

    // The token embedding in host memory; a view without an address if it is on the disk.
    QuantizedView embedding() const {
        const char* const all = host_ ? host_->data() : nullptr;
        return {matrices_[0].format, reinterpret_cast<const unsigned char*>(all), rows_, columns_};
    }
    size_t embedding_row_bytes() const { return row_bytes(matrices_[0]); }
    // Reads the embedding's rows of these tokens (on the device) from the disk to `to`, one after another in
    // the file's format. Work queued on the stream from here on finds them there. No slice may be under way.
    void read_rows(const Tensor<int>& tokens, char* to, Stream stream) const {
        std::vector<int> numbers(static_cast<size_t>(tokens.size()));
        copy_to_host(numbers.data(), tokens.data(), numbers.size() * sizeof(int), stream);
        const Matrix& m = matrices_[0];
        const size_t bytes = row_bytes(m), most = std::max<size_t>(1, slice_bytes(0) / bytes);
        for (size_t first = 0; first < numbers.size(); first += most) {
            const size_t count = std::min(most, numbers.size() - first);
            std::vector<DirectPiece> pieces;
            for (size_t i = 0; i < count; i++)
                pieces.push_back(
                    {m.file, m.offset + static_cast<size_t>(numbers[first + i]) * bytes, bytes, i * bytes});
            static_cast<DiskBlockSource&>(*source_).read(DiskReads(std::move(pieces)), count * bytes,
                                                         to + first * bytes, stream);
        }
    }

  private:
    struct Matrix {
        Field field;
        std::string name;  // in files
        const WeightFormat* format;
        size_t at;                         // offset in host memory
        const DirectFile* file = nullptr;  // if it is on the disk,
        uint64_t offset = 0;               // and its offset there
    };

    static std::string name_in_files(const ModelConfig& c, Field field) {
        const Layout all(c);
        for (const Parameter& p : all.parameters())
            if (p.field == field) return p.parts[0].name;
        bug("a model without a token embedding");
    }
    size_t row_bytes(const Matrix& m) const {
        return static_cast<size_t>(columns_ / m.format->block * m.format->block_bytes);
    }
    size_t buffers() const { return buffers_for(kSlicesAhead, static_cast<size_t>(slices())); }
    int64_t rows_in(int slice) const { return std::min(kHeadSlice, rows_ - first_row(slice)); }
    size_t slice_bytes(int slice) const {
        return static_cast<size_t>(rows_in(slice)) * row_bytes(matrices_.back());
    }
    void open(Matrix& m, const FileReader& file, uint64_t offset, const std::string& name) {
        if (host_) {
            const size_t bytes = static_cast<size_t>(rows_) * row_bytes(m);
            file.read(offset, bytes, host_->data() + m.at);
            const auto* const data = reinterpret_cast<const unsigned char*>(host_->data() + m.at);
            return check_blocks_finite(*m.format, data, bytes, name, file.path());
        }
        auto& disk = static_cast<DiskBlockSource&>(*source_);
        m.file = &disk.open(file);
        m.offset = offset;
        if (&m != &matrices_.back()) return;
        for (int s = 0; s < slices(); s++)
            disk.add({{{&file, offset + static_cast<size_t>(first_row(s)) * row_bytes(m), slice_bytes(s), 0}},
                      {},
                      slice_bytes(s)});
    }

    const Placement placement_;
    const int64_t rows_, columns_;
    std::vector<Matrix> matrices_;  // the last is the head's
    size_t bytes_ = 0;
    std::unique_ptr<PinnedBuffer> host_;
    std::unique_ptr<PieceSource> source_;
};
