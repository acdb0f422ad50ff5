// embeddings_elsewhere.h - a frozen model's token embedding and head where they live in its files, or in host
// memory: of the embedding only the rows of a batch come to the device, and the head comes in slices of the
// vocabulary, each while the one before it is used.
//
// Where the two are one matrix it is there once.
#pragma once

#include <algorithm>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "llmc/quantized_weights.h"
#include "llmc/report.h"
#include "llmc/residence_disk.h"
#include "llmc/residence_host.h"

// The rows of the vocabulary that a head's products have at a time where its matrix is made, or comes.
constexpr int64_t kHeadSlice = 4096;
// Of slices that come, how many are on their way while one is used.
constexpr int kSlicesAhead = 1;

class EmbeddingsElsewhere {
  public:
    // format_of(field, part) is that of a matrix, by its name and shape in files. Takes no memory yet.
    template <class FormatOf>
    EmbeddingsElsewhere(const ModelConfig& c, Home home, FormatOf&& format_of)
        : home_(home), rows_(c.vocabulary), columns_(c.channels) {
        for (const Field field : fields(c)) {
            const std::string name = name_in_files(c, field);
            const WeightFormat* const format = format_of(field, Parameter::Part{name, {rows_, columns_}, 0});
            matrices_.push_back({field, name, format, bytes_});
            bytes_ += static_cast<size_t>(quantized_bytes(*format, rows_ * columns_));
        }
    }
    // The token embedding's, and the head's where that is another.
    static std::vector<Field> fields(const ModelConfig& c) {
        if (c.tied) return {Field::TokenEmbedding};
        return {Field::TokenEmbedding, Field::HeadWeight};
    }

    Home home() const { return home_; }
    Way way() const { return way_from(home_); }
    // Of all matrices.
    size_t bytes() const { return bytes_; }
    // The pinned host memory that they take beside a GPU.
    size_t pinned_bytes() const {
        if (kHostIsDevice) return 0;
        return home_ == Home::Host ? bytes_ : DiskResidence::bytes(slice_bytes(0), rooms());
    }
    // What they take of other memory than the device's.
    void add_to(MemoryReport& report) const {
        if (home_ == Home::Disk) report.on_disk += bytes_;
        report.pinned += pinned_bytes();
    }

    // The head's slices: how many there are, where each begins, and what it takes.
    int slices() const { return static_cast<int>(ceil_div(rows_, kHeadSlice)); }
    int64_t first_row(int slice) const { return slice * kHeadSlice; }
    std::vector<size_t> loan_bytes() const {
        std::vector<size_t> all;
        for (int s = 0; s < slices(); s++) all.push_back(slice_bytes(s));
        return all;
    }
    // A slice that was lent to that place.
    QuantizedView slice(int number, const char* at) const {
        return {matrices_.back().format, reinterpret_cast<const unsigned char*>(at), rows_in(number),
                columns_};
    }

    // Takes what memory they need where they live, and beside that what their way to the device needs.
    void allocate() {
        if (home_ == Home::Disk) {
            residence_ = std::make_unique<DiskResidence>(slice_bytes(0), rooms());
        } else {
            host_ = std::make_unique<PinnedBuffer>(bytes_);
            residence_ = std::make_unique<HostResidence>(rooms(), [this](int slice) {
                const Matrix& head = matrices_.back();
                const char* const all = host_->data() + head.at;
                return std::span(all + row_bytes(head) * first_row(slice), slice_bytes(slice));
            });
        }
    }
    // Where slices come from; null before.
    Residence* residence() const { return residence_.get(); }

    // Finds them in a model's folder, or loads them from there. The tensors that were used go to `used`.
    void open(const SafetensorsFolder& files, const ModelConfig& config,
              std::set<const SafetensorsEntry*>& used) {
        for (Matrix& m : matrices_) {
            const SafetensorsEntry& entry = find_part(files, config, m.field, {m.name, {rows_, columns_}, 0});
            used.insert(&entry);
            open(m, *entry.file, entry.offset, entry.name);
        }
    }
    // The same of a GGUF.
    void open(const GgufModel& file) {
        for (Matrix& m : matrices_) {
            const GgufTensor& tensor = *file.get(m.name, {rows_, columns_}).tensor;
            open(m, *tensor.file, tensor.offset, tensor.name);
        }
    }

    // The token embedding, in host memory; no address on the disk.
    QuantizedView embedding() const {
        const char* const all = host_ ? host_->data() : nullptr;
        return {matrices_[0].format, reinterpret_cast<const unsigned char*>(all), rows_, columns_};
    }
    size_t embedding_row_bytes() const { return row_bytes(matrices_[0]); }
    // Has the rows of some tokens (on the device) read from the disk to `to`, one after the other as the file
    // has them, for what the stream is given from here on. No slice is on its way.
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
            static_cast<DiskResidence&>(*residence_)
                .read(DiskReads(std::move(pieces)), count * bytes, to + first * bytes, stream);
        }
    }

  private:
    struct Matrix {
        Field field;
        std::string name;  // in files
        const WeightFormat* format;
        size_t at;                         // in host memory
        const DirectFile* file = nullptr;  // on the disk,
        uint64_t offset = 0;               // and where it begins there
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
    size_t rooms() const { return rooms_for(kSlicesAhead, static_cast<size_t>(slices())); }
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
        auto& disk = static_cast<DiskResidence&>(*residence_);
        m.file = &disk.open(file);
        m.offset = offset;
        if (&m != &matrices_.back()) return;
        for (int s = 0; s < slices(); s++)
            disk.add({{{&file, offset + static_cast<size_t>(first_row(s)) * row_bytes(m), slice_bytes(s), 0}},
                      {},
                      slice_bytes(s)});
    }

    const Home home_;
    const int64_t rows_, columns_;
    std::vector<Matrix> matrices_;  // the last is the head's
    size_t bytes_ = 0;
    std::unique_ptr<PinnedBuffer> host_;
    std::unique_ptr<Residence> residence_;
};
