// exchange.h - what the ranks of a run on several devices send each other in a step: gradients to be summed,
// updated weights, the terms of the norm and of the loss, and whether to stop. Engines only move bytes
// (ranks.h); the sums are our own (rank_sums.cuh).
//
// A sum of gradients is divided: each rank receives the others' gradients of its own slice, and adds them. So
// each rank sends and receives (ranks - 1) / ranks of the bytes. Gathering the updated slices takes as much.
#pragma once

#include <algorithm>
#include <vector>

#include "llmc/arena.h"
#include "llmc/graph.h"
#include "llmc/rank_sums.cuh"
#include "llmc/ranks.h"
#include "llmc/slices.h"
#include "llmc/work.h"

class Exchange {
  public:
    // Divides by `slices`, which may change until the first use.
    Exchange(Arena& arena, const Stream& stream, const Slices& slices)
        : arena_(arena), stream_(stream), slices_(slices) {}
    Exchange(const Exchange&) = delete;

    // Sets the engine, which a dry run does not need.
    void connect(RankEngine* engine) { engine_ = engine; }
    bool is_alone() const { return slices_.ranks == 1; }

    // The rank's own slice of x, a unit's `size` elements, becomes the sum over all ranks.
    template <class T>
    void sum_slices(T* x, int64_t size) {
        const int64_t length = slices_.length(size), own = slices_.own(size).count;
        const int64_t columns = std::min(length, piece<T>());
        const Tensor<T> parts = arena_.take<T>("ranks_gradients", {slices_.ranks, columns}, "exchange");
        for (int64_t first = 0; first < length; first += columns) {
            const auto count = [&](int64_t of_slice) {
                return std::clamp<int64_t>(of_slice - first, 0, columns);
            };
            exchange<T>(
                [&](int rank) {
                    const Slice s = slices_.of(size, rank);
                    return std::pair(x + s.first + first, count(s.count));
                },
                [&](int rank) { return std::pair(parts.at(rank * columns), count(own)); });
            sum_ranks(Tensor<T>(x + slices_.own(size).first + first, {count(own)}), parts, stream_);
        }
    }
    // Every rank gets the other ranks' slices of x, a unit's `size` elements.
    template <class T>
    void gather_slices(T* x, int64_t size) {
        const int64_t length = slices_.length(size);
        for (int64_t first = 0; first < length; first += piece<T>()) {
            const auto part = [&](int rank) {
                const Slice s = slices_.of(size, rank);
                return std::pair(x + s.first + first, std::clamp<int64_t>(s.count - first, 0, piece<T>()));
            };
            exchange<T>([&](int) { return part(slices_.rank); }, part);
        }
    }
    // x (n) becomes its sum over all ranks, on every rank.
    void sum(const Tensor<float>& x) {
        const int64_t n = x.size(), columns = ceil_div(n, int64_t{kVectorSize<float>}) * kVectorSize<float>;
        const Tensor<float> parts = arena_.take<float>("ranks_sums", {slices_.ranks, columns}, "exchange");
        exchange<float>([&](int) { return std::pair(x.data(), n); },
                        [&](int rank) { return std::pair(parts.at(rank * columns), n); });
        const Tensor<float> sum(parts.data(), {n});  // in place, because x may not be aligned
        sum_ranks(sum, parts, stream_);
        copy_rows_on_device(x.data(), n, sum.data(), n, n, 1, stream_);
    }

    // What all ranks do next must be the same, so what only some of them know is agreed on: the largest of
    // the ranks' numbers.
    int agree(int number) {
        const auto all = gather(std::vector<int>{number});
        return *std::max_element(all.begin(), all.end());
    }
    // The sum, in order, of terms that the ranks computed in turn: term i is that of rank i % ranks.
    float sum_in_turn(const std::vector<float>& own) {
        const std::vector<float> all = gather(own);
        float sum = 0;
        for (size_t i = 0; i < own.size(); i++)
            sum += all[i % static_cast<size_t>(slices_.ranks) * own.size() + i];
        return sum;
    }
    // The ranks' vectors, which have the same length, one after another.
    template <class T>
    std::vector<T> gather(const std::vector<T>& own) {
        std::vector<T> all(own.size() * static_cast<size_t>(slices_.ranks));
        const size_t bytes = own.size() * sizeof(T);
        std::vector<Part> send(static_cast<size_t>(slices_.ranks), {const_cast<T*>(own.data()), bytes}),
            receive;
        for (int r = 0; r < slices_.ranks; r++)
            receive.push_back({all.data() + static_cast<size_t>(r) * own.size(), bytes});
        engine_->exchange(send, receive);
        return all;
    }

    // On the first rank, completes bytes of which every rank has a part: part(r) is where that of rank r is.
    // All ranks must call it.
    template <class PartOf>
    void gather_on_first(PartOf&& part) {
        const auto ranks = static_cast<size_t>(slices_.ranks);
        std::vector<Part> send(ranks), receive(ranks);
        if (slices_.rank > 0) send[0] = part(slices_.rank);
        for (int r = 1; r < slices_.ranks && slices_.rank == 0; r++)
            receive[static_cast<size_t>(r)] = part(r);
        engine_->exchange(send, receive);
    }

  private:
    // The most elements of a rank that are received at a time.
    template <class T>
    int64_t piece() const {
        return std::max<int64_t>(
            4096, (int64_t{32} << 20) / static_cast<int64_t>(sizeof(T)) / slices_.ranks / 256 * 256);
    }
    // Exchanges elements: send(rank) and receive(rank) return where they are and how many there are.
    template <class T, class Send, class Receive>
    void exchange(Send&& send, Receive&& receive) {
        std::vector<Part> sent, received;
        size_t bytes = 0;
        const auto add = [](std::vector<Part>& parts, const auto& elements) {
            parts.push_back({elements.first, static_cast<size_t>(elements.second) * sizeof(T)});
        };
        for (int rank = 0; rank < slices_.ranks; rank++) {
            add(sent, send(rank)), add(received, receive(rank));
            if (rank != slices_.rank) bytes += sent.back().bytes;
        }
        if (arena_.rehearsing()) {
            note_transfer({Transfer::Ranks, false, Route::ToRanks, static_cast<double>(bytes)});
            return note_wait(Transfer::Ranks);
        }
        host_act([this, sent, received, bytes] {
            const Waiting waiting(Transfer::Ranks);
            count_moved(Route::ToRanks, bytes);
            engine_->exchange(sent, received);
        });
    }

    Arena& arena_;
    const Stream& stream_;
    const Slices& slices_;
    RankEngine* engine_ = nullptr;
};
