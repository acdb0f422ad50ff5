// exchange.h - what the ranks of a run on several devices send each other in a step: gradients to be summed,
// updated weights, the terms of the norm and of the loss, and whether to stop. Engines only move bytes
// (ranks.h); the sums are our own (rank_sums.cuh). Every rank must make the same calls in the same order.
//
// A sum of gradients is divided: each rank receives the others' gradients of its own slice, and adds them. So
// each rank sends and receives (ranks - 1) / ranks of the bytes. Gathering the updated slices takes as much.
// A unit's gradients are exchanged while backward computes those of the next unit.
#pragma once

#include <algorithm>
#include <cassert>
#include <optional>
#include <utility>
#include <vector>

#include "llmc/arena.h"
#include "llmc/graph.h"
#include "llmc/rank_sums.cuh"
#include "llmc/ranks_transfers.h"
#include "llmc/slices.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

class Exchange {
  public:
    // `slices`: what each rank has of a unit.
    Exchange(Arena& arena, const Stream& stream, const Slices& slices)
        : arena_(arena), stream_(stream), slices_(slices) {}
    Exchange(const Exchange&) = delete;

    // Sets the engine, which a dry run does not need. From then on vectors can be gathered.
    void connect(RankEngine& engine) { engine_ = &engine; }
    // Connects the devices, after which tensors can be exchanged. All ranks must call it together.
    void connect_devices(const Rank& rank) { transfers_.emplace(*engine_, rank); }
    bool is_alone() const { return slices_.ranks == 1; }
    // What connect_devices() connected, for a class that moves something else.
    RankTransfers& transfers() { return *transfers_; }

    // Says where this rank is, for messages.
    void set_where(const std::string& where) {
        if (engine_) engine_->set_where(where);
    }

    // While inactive, exchanges of tensors take their memory as planned, and move and add nothing:
    // micro-batches before the last share its plan.
    void set_active(bool active) { active_ = active; }

    // The rank's own slice of x, a unit's `size` elements, becomes the sum over all ranks: between the two
    // calls the exchange goes on beside the computation, which must not touch x. One sum can be under way.
    void start_sum(floatX* x, int64_t size) {
        assert(!summed_);
        const int64_t columns = std::min(slices_.length(size), most_elements());
        summed_.emplace(
            Sum{x, size, arena_.take<floatX>("ranks_gradients", {slices_.ranks, columns}, "exchange")});
        const auto [sent, received] = parts_of_sum(0);
        start(sent, received, "gradients");
    }
    // Finishes that sum, if one is under way: writes it to `to`, or to x if that is null. Slices that are
    // longer than the receiving memory are completed now, piece by piece.
    void finish_sum(floatX* to = nullptr) {
        if (!summed_) return;
        const int64_t length = slices_.length(summed_->size);
        const Slice own = slices_.own(summed_->size);
        if (!to) to = summed_->x + own.first;
        for (int64_t first = 0; first < length; first += summed_->parts.columns()) {
            if (first > 0) {
                const auto [sent, received] = parts_of_sum(first);
                start(sent, received, "gradients");
            }
            join();
            const Tensor<floatX> sum(to + first, {count_from(first, own.count)});
            if (active_) sum_ranks(sum, summed_->parts, stream_);
        }
        summed_.reset();
    }
    // Every rank gets the other ranks' slices of x, a unit's `size` elements: of its weights or gradients.
    void gather_slices(floatX* x, int64_t size, const char* content) {
        const int64_t length = slices_.length(size), most = most_elements();
        for (int64_t first = 0; first < length; first += most) {
            const auto part = [&](int rank) {
                const Slice s = slices_.of(size, rank);
                return part_of(x + s.first + first, std::clamp<int64_t>(s.count - first, 0, most));
            };
            Parts sent, received;
            for (int rank = 0; rank < slices_.ranks; rank++)
                sent.push_back(part(slices_.rank)), received.push_back(part(rank));
            start(sent, received, content);
            join();
        }
    }
    // x (n) becomes its sum over all ranks, on every rank.
    void sum(const Tensor<float>& x) {
        const int64_t n = x.size(), columns = ceil_div(n, int64_t{kVectorSize<float>}) * kVectorSize<float>;
        const Tensor<float> parts = arena_.take<float>("ranks_sums", {slices_.ranks, columns}, "exchange");
        Parts sent, received;
        for (int rank = 0; rank < slices_.ranks; rank++)
            sent.push_back(part_of(x.data(), n)), received.push_back(part_of(parts.at(rank * columns), n));
        start(sent, received, "sums");
        join();
        if (!active_) return;
        const Tensor<float> sum(parts.data(), {n});  // in place, because x may not be aligned
        sum_ranks(sum, parts, stream_);
        copy_rows_on_device(x.data(), n, sum.data(), n, n, 1, stream_);
    }

    // The largest of all ranks' numbers, so that all take the same decision.
    int largest(int number) {
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
        engine_->gather(own.data(), own.size() * sizeof(T), all.data(), slices_.ranks);
        return all;
    }

    // Collects bytes on the first rank. part(r) is where those of rank r are, on that rank and on the first.
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
    // The most elements of a rank that are exchanged at a time.
    int64_t most_elements() const {
        return std::max<int64_t>(
            4096, (int64_t{32} << 20) / static_cast<int64_t>(sizeof(floatX)) / slices_.ranks / 256 * 256);
    }
    using Parts = std::vector<Part>;
    // A sum of gradients that is under way: the unit's elements, and what was received of the rank's own
    // slice.
    struct Sum {
        floatX* x;
        int64_t size;
        Tensor<floatX> parts;  // (ranks, elements of a slice at a time)
    };
    template <class T>
    static Part part_of(T* at, int64_t elements) {
        return {at, static_cast<size_t>(elements) * sizeof(T)};
    }
    // A slice of `of_slice` elements is exchanged in pieces; returns how many are in the piece that begins at
    // `first`.
    int64_t count_from(int64_t first, int64_t of_slice) const {
        return std::clamp<int64_t>(of_slice - first, 0, summed_->parts.columns());
    }
    // What is sent and received of the slices' elements from `first` on.
    std::pair<Parts, Parts> parts_of_sum(int64_t first) const {
        const auto& [x, size, parts] = *summed_;
        const int64_t own = count_from(first, slices_.own(size).count);
        std::pair<Parts, Parts> both;
        for (int rank = 0; rank < slices_.ranks; rank++) {
            const Slice s = slices_.of(size, rank);
            both.first.push_back(part_of(x + s.first + first, count_from(first, s.count)));
            both.second.push_back(part_of(parts.at(rank * parts.columns()), own));
        }
        return both;
    }

    // start() starts an exchange, which join() waits for.
    void start(const Parts& sent, const Parts& received, const char* content) {
        if (!active_) return;
        size_t bytes = 0;
        for (int rank = 0; rank < slices_.ranks; rank++)
            if (rank != slices_.rank) bytes += sent[static_cast<size_t>(rank)].bytes;
        if (arena_.rehearsing()) {
            noted_ = note_transfer({.of = Transfer::Ranks,
                                    .waits = false,
                                    .route = Route::ToRanks,
                                    .bytes = static_cast<double>(bytes),
                                    .content = content});
            return;
        }
        host_act([this, sent, received, bytes] {
            count_moved(Route::ToRanks, bytes);
            number_ = transfers_->start(sent, received, stream_);
        });
    }
    void join() {
        if (!active_) return;
        if (arena_.rehearsing()) return note_wait(Transfer::Ranks, noted_);
        host_act([this] {
            const Waiting waiting(Transfer::Ranks);
            transfers_->finish(number_, stream_);
        });
    }

    Arena& arena_;
    const Stream& stream_;
    const Slices& slices_;
    RankEngine* engine_ = nullptr;
    std::optional<RankTransfers> transfers_;
    size_t number_ = 0;  // of the latest exchange
    bool active_ = true;
    std::optional<Sum> summed_;
    int noted_ = -1;  // in a dry run: the number of the latest exchange
};
