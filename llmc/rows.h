// rows.h - says which rows of a micro-batch an operation works on; positions in documents and dropout's masks
// are computed from that. A Rows is passed beside the tensors of these rows. The loops over chunks of rows
// are here too; without chunks, all rows are one chunk.
#pragma once

#include <algorithm>

#include "llmc/arena.h"
#include "llmc/dropout.cuh"
#include "llmc/elementwise.cuh"
#include "llmc/tensor.h"

// For a batch of B sequences of T tokens. All are absent if each sequence is one document.
struct Documents {
    Tensor<int> positions;         // (B, T): how many tokens of its document come before a token
    Tensor<int> ends;              // (B, T): the place in the sequence after the document's last token
    Tensor<int> rows_by_position;  // (B * T), with
    Tensor<int> position_starts;   // (T + 1): group_tokens() of the positions (data_feeder.h)
};

// The dropout of a training; none by default.
struct DropoutOptions {
    double activations = 0;         // the share of activations that becomes zero
    double lora_inputs = 0;         // the share of an adapter's inputs
    const uint64_t* key = nullptr;  // on the device: the micro-batch's random key
};

// Where dropout acts in each layer. Its random bits depend on these numbers. The LoRA inputs of the four
// linear layers come first. The embedding's dropout acts in the layer after the last.
enum DropoutPlace {
    kEmbeddingPlace = 0,
    kLoraPlaces = 0,
    kAttentionPlace = 4,
    kProjectedPlace,
    kOutputPlace,
    kPlacesOfLayer = 16
};

// Each sequence is one document.
inline const Documents kWholeSequences{};

struct Rows {
    int64_t first = 0;  // the number of the first row in the micro-batch
    const Documents* documents = &kWholeSequences;
    DropoutOptions dropout = {};
    // If not 0, each row continues another text (decoding.h), and only the first `rows_of_texts` rows are in
    // use: see MatmulOptions::rows_alone.
    int64_t rows_of_texts = 0;

    // How many of `all` rows a product with a quantized matrix computes directly from the codes; 0: the
    // matrix is dequantized first. Directly go rows that continue texts; on a GPU at most 16, because the
    // kernel for few rows does not use tensor cores.
    int64_t rows_from_codes(int64_t all) const {
        constexpr int64_t kMostOnGpu = 16;
        return kFastCpu || all <= kMostOnGpu ? rows_of_texts : 0;
    }

    // These rows without the first `row` of them.
    Rows from(int64_t row) const {
        Rows later = *this;
        later.first += row;
        return later;
    }
    // The positions of the first `count` of these rows in their documents; absent if each sequence is one
    // document.
    Tensor<int> positions(int64_t count) const {
        const Tensor<int>& all = documents->positions;
        return all ? Tensor<int>(all.at(first), {count}) : Tensor<int>();
    }
    // Dropout of activations (rows, columns) at a place of a layer. Pass 0 columns for attention's
    // probabilities, for which attention counts the rows itself.
    Dropout dropout_at(int layer, DropoutPlace place, int64_t columns) const {
        return dropout_of(static_cast<uint64_t>(layer) * kPlacesOfLayer + place, dropout.activations,
                          columns);
    }
    // Dropout of an adapter's inputs (rows, columns).
    Dropout lora_dropout(uint64_t place, int64_t columns) const {
        return dropout_of(place, dropout.lora_inputs, columns);
    }

  private:
    Dropout dropout_of(uint64_t place, double share, int64_t columns) const {
        if (share == 0) return {};
        return from_element(::dropout_at(dropout.key, place, share), first * columns);
    }
};

// `count` rows of x (B, T, C), of one sequence, from the first of `rows` on: (1, count, C).
template <class T>
Tensor<T> rows_of_sequence(const Tensor<T>& x, const Rows& rows, int64_t count) {
    return Tensor<T>(x.at(rows.first * x.columns()), {1, count, x.columns()});
}

// Which chunks come first.
enum class From { First, Last };

// True if for_each_chunk() divides `count` rows into several chunks.
inline bool go_in_chunks(int64_t count, int64_t at_a_time) { return at_a_time > 0 && at_a_time < count; }

// Calls chunk(rows, first, n) for all `count` rows, `at_a_time` (0: all) at a time. `first` counts from the
// first of these rows. A dry run executes one chunk of full size, halfway between the first and the last,
// whose attention costs the average.
template <class Chunk>
void for_each_chunk(Arena& arena, const Rows& rows, int64_t count, int64_t at_a_time, Chunk&& chunk,
                    From from = From::First) {
    const int64_t size = at_a_time > 0 ? std::min(at_a_time, count) : count;
    const int64_t turns = count / size, rest = count % size;
    const auto call = [&](int64_t first, int64_t n) {
        Rows part = rows.from(first);
        // A chunk whose texts have all ended works as in the dry run, on one of them.
        if (rows.rows_of_texts > 0)
            part.rows_of_texts = std::clamp<int64_t>(rows.rows_of_texts - first, 1, n);
        chunk(part, first, n);
    };
    const bool down = from == From::Last;
    if (down && rest) call(turns * size, rest);
    int64_t turn = 0;
    arena.repeat(static_cast<int>(turns), [&] {
        const int64_t first = (down ? turns - 1 - turn : turn) * size;
        call(arena.rehearsing() ? (turns - 1) * size / 2 : first, size);
        turn++;
        return true;
    });
    if (!down && rest) call(turns * size, rest);
}

// Calls sequence(rows, entry, T) for each sequence of x (B, T, C).
template <class T, class Sequence>
void for_each_sequence(Arena& arena, const Tensor<T>& x, const Rows& rows, Sequence&& sequence) {
    const auto use = [&](const Rows& of_sequence, int64_t first, int64_t length) {
        sequence(of_sequence, static_cast<int>(first / length), length);
    };
    for_each_chunk(arena, rows, x.rows(), x.shape().dims[1], use);
}

// Calls use(chunk) with chunks (1, count, C) of at most `at_a_time` rows of each sequence of x (B, T, C).
template <class T, class Use>
void for_each_rows_of_sequence(Arena& arena, const Tensor<T>& x, int64_t at_a_time, From from, Use&& use) {
    for_each_sequence(arena, x, {}, [&](const Rows& sequence, int, int64_t length) {
        const auto chunk = [&](const Rows& rows, int64_t, int64_t count) {
            use(rows_of_sequence(x, rows, count));
        };
        for_each_chunk(arena, sequence, length, at_a_time, chunk, from);
    });
}

// The gradient of what attention or an MLP computed, from d_sum, that of the residual stream to which it was
// added after a dropout and times a factor. It is a view of d_sum if nothing is dropped and the factor is 1.
inline TensorX branch_backward(Arena& arena, Stream stream, const TensorX& d_sum, const Dropout& d,
                               double factor) {
    if (!d && factor == 1) return d_sum.view();
    TensorX d_out = arena.take<floatX>("d_branch", d_sum.shape(), "gradient");
    if (d) dropout(d_out, d_sum, d, stream);
    scale(d_out, d ? d_out : d_sum, factor, stream);
    return d_out;
}
