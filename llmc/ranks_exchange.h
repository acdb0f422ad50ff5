// ranks_exchange.h - what the ranks of a run on several devices send each other in a step: gradients to be
// summed, updated weights, the terms of the norm and of the loss, and whether to stop. Engines only move
// bytes (ranks.h); the sums are our own (rank_sums.cuh). Every rank must make the same calls in the same
// order.
//
// A sum of gradients is divided: each rank receives the others' gradients of its own slice, and adds them. So
// each rank sends and receives (ranks - 1) / ranks of the bytes. Gathering the updated slices takes as much.
// A unit's gradients are exchanged while backward computes those of the next unit.
//
// On several machines with several ranks each, sums are made inside each machine first, and then over the
// machines: so a machine sends each slice once to the machine that needs it, and not once for each rank.
#pragma once

#include <algorithm>
#include <cassert>
#include <optional>
#include <utility>
#include <vector>

#include "llmc/arena.h"
#include "llmc/graph.h"
#include "llmc/offload_blocks.h"
#include "llmc/quant_weights.h"
#include "llmc/rank_sums.cuh"
#include "llmc/ranks_host_memory.h"
#include "llmc/ranks_transfers.h"
#include "llmc/ranks_slices.h"
#include "llmc/state.h"
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

    // Maps host memory that the ranks of this machine share; nothing if they share none.
    std::optional<SharedHostMemory> shared_host_memory(const Rank& rank) const {
        if (!shares_host_memory(rank)) return std::nullopt;
        return std::optional<SharedHostMemory>(std::in_place, *engine_, rank);
    }

    // Says where this rank is, for messages.
    void set_where(const std::string& where) {
        if (engine_) engine_->set_where(where);
    }

    // While inactive, exchanges of tensors take their memory as planned, and move and add nothing:
    // micro-batches before the last share its plan.
    void set_active(bool active) { active_ = active; }

    // The rank's own slice of x, a unit's `size` elements, is summed over all ranks, and the sum is written
    // to `to`, or in its place in x if that is null. Until finish_sum() the exchange goes on beside the
    // computation, which must not touch x. One sum can be under way.
    void start_sum(floatX* x, int64_t size, floatX* to = nullptr) {
        assert(!summed_.parts);
        const Slices s = slices_.for_rounds();
        const int64_t columns = std::min(slices_.length(size), most_elements());
        summed_.parts = take_rows<floatX>(s.ranks_of_a_machine(), columns);
        if (s.machines() > 1) {
            summed_.sent = take_rows<float>(1, columns);
            summed_.received = take_rows<float>(s.machines(), columns);
        }
        if (!to) to = x + slices_.own(size).first;
        std::vector<ExchangeRound> rounds;
        for (int64_t first = 0; first < slices_.length(size); first += columns)
            add_rounds_of_sum(rounds, s, {x, size, first, columns}, to + first);
        start(std::move(rounds), "gradients", sum_);
    }
    // Finishes that sum, if one is under way.
    void finish_sum() {
        if (!summed_.parts) return;
        if (active_) finish(sum_);
        summed_ = {};
    }
    // An exchange that was started, or none. Recordings refer to it, so it must stay at its address.
    struct Started {
        std::optional<size_t> number = {};  // each replay of a recording sets it anew
        int noted = -1;                     // in a dry run
    };
    // Starts to gather: every rank gets the other ranks' slices of x, a unit's `size` elements, of its
    // weights or gradients. Until finish(), x must not be used.
    void start_gather(floatX* x, int64_t size, const char* content, Started& gather) {
        start(rounds_of_gather(x, size), content, gather);
    }
    // In a dry run, records a gather of a unit's weights that was started before this plan begins.
    void note_gather(int64_t size, Started& gather) {
        if (arena_.rehearsing())
            note(sent_bytes(rounds_of_gather(nullptr, size), slices_), "weights", gather);
    }
    bool is_active() const { return active_; }
    bool rehearsing() const { return arena_.rehearsing(); }
    // Waits for what was started, and for all that was started before.
    void finish(Started& started) {
        if (arena_.rehearsing()) {
            const int noted = std::exchange(started.noted, -1);
            if (noted >= 0) note_wait(Transfer::Ranks, noted);
            return;
        }
        host_act([this, &started] {
            if (!started.number) return;
            const Waiting waiting(Transfer::Ranks);
            transfers_->finish(*std::exchange(started.number, std::nullopt), stream_);
        });
    }
    // x (n) becomes its sum over all ranks, on every rank.
    void sum(const Tensor<float>& x) {
        const int64_t n = x.size(), columns = ceil_div(n, int64_t{kVectorSize<float>}) * kVectorSize<float>;
        const Tensor<float> parts = arena_.take<float>("ranks_sums", {slices_.ranks, columns}, "exchange");
        start(gather_rounds(slices_, part_of(x.data(), n),
                            [&](int rank) { return part_of(parts.at(rank * columns), n); }),
              "sums", sum_);
        if (!active_) return;
        finish(sum_);
        const Tensor<float> sum(parts.data(), {n});  // in place, because x may not be aligned
        const Operation operation(kSumRanks, 0, static_cast<double>((slices_.ranks + 1) * n) * sizeof(float));
        sum_ranks(sum, parts, stream_);
        copy_rows_on_device(x.data(), n, sum.data(), n, n, 1, stream_);
    }

    // The largest of all ranks' numbers, so that all take the same decision.
    int largest(int number) {
        const auto all = gather(std::vector<int>{number});
        return *std::ranges::max_element(all);
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

    // The ranks' texts, of any lengths.
    std::vector<std::string> gather_texts(std::string own) {
        const auto lengths = gather(std::vector{own.size()});
        own.resize(*std::max_element(lengths.begin(), lengths.end()));
        const auto all = gather(std::vector<char>(own.begin(), own.end()));
        std::vector<std::string> texts;
        for (const size_t length : lengths)
            texts.emplace_back(all.data() + texts.size() * own.size(), length);
        return texts;
    }

    // Calls act() on the first rank, then on the first rank of every other machine, then on all others: later
    // ones find the files that earlier ones have written. All ranks must call it together.
    template <class Act>
    void in_turn(const Rank& rank, Act&& act) {
        if (is_alone()) return act();
        const int own_turn = rank.is_first() ? 0 : rank.number_on_this_machine == 0 ? 1 : 2;
        for (int turn = 0; turn < 3; turn++) {
            if (turn == own_turn) act();
            engine_->wait_for_all(rank);
        }
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
    template <class T>
    Tensor<T> take_rows(int64_t rows, int64_t columns) {
        return arena_.take<T>("ranks_gradients", {rows, columns}, "exchange");
    }
    // The most elements of a rank that are exchanged at a time.
    int64_t most_elements() const {
        return std::max<int64_t>(
            4096, (int64_t{32} << 20) / static_cast<int64_t>(sizeof(floatX)) / slices_.ranks / 256 * 256);
    }
    template <class T>
    static Part part_of(T* at, int64_t elements) {
        return {at, static_cast<size_t>(elements) * sizeof(T)};
    }
    // The rounds that gather a unit's `size` elements at x, which is null in a dry run.
    std::vector<ExchangeRound> rounds_of_gather(floatX* x, int64_t size) const {
        const auto part = [&](int rank) {
            const Slice s = slices_.of(size, rank);
            return part_of(x ? x + s.first : nullptr, s.count);
        };
        return gather_rounds(slices_, part(slices_.rank), part);
    }
    // The memory of a sum of gradients that is under way: what ranks of this machine have sent, and, if there
    // are others, the machine's sums that are sent there and what was received from there.
    struct Summed {
        Tensor<floatX> parts = {};               // (ranks of a machine, columns)
        Tensor<float> sent = {}, received = {};  // (1, columns), (machines, columns)
    };
    // Elements of each slice of a unit's x that are exchanged at a time: [first, first + columns).
    struct Columns {
        floatX* x;
        int64_t size, first, columns;
        // Where a rank's slice has these elements.
        Part of(const Slices& s, int rank) const {
            const Slice slice = s.of(size, rank);
            return part_of(x + slice.first + first, count(s, rank));
        }
        int64_t count(const Slices& s, int rank) const {
            return std::clamp<int64_t>(s.of(size, rank).count - first, 0, columns);
        }
    };
    // Adds the rounds that sum these columns of all slices. On several machines, each round sums the slices
    // of one machine over the ranks of this one, and sends the sum of the round before to the machine that
    // needs it; that of this machine is the last.
    void add_rounds_of_sum(std::vector<ExchangeRound>& rounds, const Slices& s, const Columns& c,
                           floatX* to) {
        const int machines = s.machines(), here = s.machine_of(s.rank);
        const auto row = [&](const auto& rows, int number) { return rows.at(number * c.columns); };
        // Sums rows, in their order, into n elements at `sum`.
        const auto add = [this](auto* sum, const auto* rows, int64_t n, int64_t count, int64_t columns) {
            using Term = std::remove_const_t<std::remove_pointer_t<decltype(rows)>>;
            sum_ranks(Tensor(sum, {n}), Tensor(const_cast<Term*>(rows), {count, columns}),
                      transfers_->stream());
        };
        for (int k = 1; k <= machines; k++) {
            const int machine = (here + k) % machines;
            const int owner = s.same_place_on(machine, s.rank);  // whose slice this rank sums
            const int64_t n = c.count(s, owner);
            ExchangeRound& round = rounds.emplace_back(empty_round(s));
            for (int place = 0; place < s.ranks_of_a_machine(); place++) {
                const auto other = static_cast<size_t>(s.same_place_on(here, place));
                round.send[other] = c.of(s, s.same_place_on(machine, place));
                round.receive[other] = part_of(row(summed_.parts, place), n);
            }
            if (k > 1) {
                const int next = s.same_place_on((here + k - 1) % machines, s.rank),
                          from = (here - k + 1 + machines) % machines;
                round.send[static_cast<size_t>(next)] = part_of(summed_.sent.data(), c.count(s, next));
                round.receive[static_cast<size_t>(s.same_place_on(from, s.rank))] =
                    part_of(row(summed_.received, from), c.count(s, s.rank));
            }
            const auto parts = [add, rows = summed_.parts.data(), n, count = summed_.parts.rows(),
                                columns = c.columns](auto* sum) { add(sum, rows, n, count, columns); };
            if (machines == 1)
                round.then = [parts, to] { parts(to); };
            else if (k < machines)
                round.then = [parts, sum = summed_.sent.data()] { parts(sum); };
            else
                round.then = [parts, add, to, sum = row(summed_.received, here),
                              rows = summed_.received.data(), n, machines, columns = c.columns] {
                    parts(sum);
                    add(to, rows, n, machines, columns);
                };
        }
    }
    // In a dry run, records an exchange.
    void note(const SentBytes& sent, const char* content, Started& started) const {
        const auto note = [&](Route route, size_t bytes) {
            started.noted = note_transfer({.of = Transfer::Ranks,
                                           .waits = false,
                                           .route = route,
                                           .bytes = static_cast<double>(bytes),
                                           .content = content});
        };
        if (slices_.machines() > 1) note(Route::ToMachines, sent.to_machines);
        if (slices_.ranks_of_a_machine() > 1) note(Route::ToRanks, sent.to_ranks);
    }
    void start(std::vector<ExchangeRound> rounds, const char* content, Started& started) {
        if (!active_) return;
        const SentBytes sent = sent_bytes(rounds, slices_);
        if (arena_.rehearsing()) return note(sent, content, started);
        host_act([this, rounds = std::move(rounds), sent, &started] {
            count_sent(sent);
            started.number = transfers_->start(rounds, stream_);
        });
    }

    Arena& arena_;
    const Stream& stream_;
    const Slices& slices_;
    RankEngine* engine_ = nullptr;
    bool active_ = true;
    Summed summed_;
    Started sum_;                             // the exchange of a sum
    std::optional<RankTransfers> transfers_;  // ends first: exchanges under way use what is above
};

// ---- blocks that are divided among the ranks (--zero 3)
//
// They are trained blocks, or the matrices of a frozen model's. A block is fetched like one from a disk
// (offload_blocks.h): while the blocks before it compute, its slices are gathered from all ranks into a
// buffer.

// The blocks of a stage: of a frozen model its matrices, if they are not null; else those of its State.
class GatheredBlocks : public PieceSource {
  public:
    GatheredBlocks(const State<floatX>& state, const QuantizedWeights* matrices, Exchange& exchange)
        : state_(state), matrices_(matrices), exchange_(exchange) {}

    // The bytes of each block in its buffer, and those that a rank sends when all gather it.
    std::vector<BlockBytes> bytes() const {
        std::vector<BlockBytes> all;
        for (int number = 0; number < state_.layout.blocks(); number++) {
            const DividedBytes b = block(number);
            const auto size = static_cast<size_t>(b.all);
            const SentBytes sent = sent_bytes(rounds(b, nullptr), b.slices);
            all.emplace_back(matrices_ ? size : aligned_buffer_bytes(size), sent.to_ranks, sent.to_machines);
        }
        return all;
    }
    // Gathers a block into the buffer, where Weights looks for it. Nothing is stored: updates change the
    // rank's own slices, and the next gather brings them.
    size_t start(char* buffer, [[maybe_unused]] std::optional<int> to_store, std::optional<int> number,
                 Stream stream) override {
        assert(!to_store && number);
        const DividedBytes b = block(*number);
        const auto all = rounds(b, matrices_ ? buffer : aligned_buffer(buffer));
        count_sent(sent_bytes(all, b.slices));
        return exchange_.transfers().start(all, stream);
    }
    void finish(size_t number, Stream stream) override { exchange_.transfers().finish(number, stream); }

  private:
    DividedBytes block(int number) const {
        if (matrices_) return matrices_->divided_block(number);
        const int unit = Layout::block_unit(state_.layout.stage().first + number);
        const int64_t size = state_.layout.units()[static_cast<size_t>(unit)].size;
        return {size * static_cast<int64_t>(sizeof(floatX)), state_.options.slices.in_bytes(sizeof(floatX)),
                reinterpret_cast<char*>(own_slice_of_weights(state_, unit).slice)};
    }
    // The rounds in which all ranks gather a block to `at`.
    static std::vector<ExchangeRound> rounds(const DividedBytes& b, char* at) {
        return gather_rounds(b.slices, {b.own, b.own_bytes()}, [&](int rank) -> Part {
            const Slice theirs = b.slices.of(b.all, rank);
            return {at + theirs.first, static_cast<size_t>(theirs.count)};
        });
    }

    const State<floatX>& state_;
    const QuantizedWeights* const matrices_;
    Exchange& exchange_;
};
