// state_ring.h - streams optimizer state that only updates need and that is not on the device: its chunks are
// fetched to a ring of buffers in the arena, updated there and stored again, while others are under way.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "llmc/arena.h"
#include "llmc/elsewhere.h"
#include "llmc/graph.h"
#include "llmc/state.h"
#include "llmc/work.h"

class StateRing {
  public:
    StateRing(Arena& arena, const Stream& stream) : arena_(arena), stream_(stream) {}

    // Sets where the chunks are; null in a dry run.
    void use(Elsewhere* place) { place_ = place; }

    // The most buffers that there can be if `wanted` are asked for; negative: as many as a block has chunks.
    template <class T>
    static size_t most_rooms(const State<T>& state, int wanted) {
        if (wanted < 0)
            return std::max<size_t>(1, state.chunks_of(1).count());  // a soft prompt's block has 0
        return std::min(static_cast<size_t>(wanted), state.chunks().size());
    }
    // Takes the buffers, until give_back(), for an update of these units of a state in this order, and starts
    // fetching the first chunks.
    template <class T>
    void take(const State<T>& state, const std::vector<int>& units, int wanted) {
        const auto pass = std::make_shared<Pass>(Pass{way_from(state.options.updated), state.chunk_bytes()});
        for (const int unit : units) {
            const auto of_unit = state.chunks_of(unit);
            for (size_t c = of_unit.first; c < of_unit.end; c++) pass->order.push_back(c);
        }
        const auto room_bytes = static_cast<int64_t>(pass->bytes + kElsewhereAlignment);
        for (size_t i = 0; i < std::min(most_rooms(state, wanted), pass->order.size()); i++) {
            memory_.push_back(arena_.take<uint8_t>("state_room", {room_bytes}, "optimizer_state"));
            pass->rooms.push_back({aligned_room(memory_.back().data()), 0});
        }
        pass_ = pass;
        if (pass->rooms.empty()) return;
        host_act([this, pass] {
            pass->next = 0;
            for (size_t i = 0; i < pass->rooms.size(); i++) exchange(*pass, pass->rooms[i], {}, i);
        });
    }
    // Calls update(chunk, buffer) for each chunk of `unit`, the next one in that order. Starts storing each
    // chunk then, and fetching the next one into its buffer.
    template <class T, class Update>
    void update(const State<T>& state, int unit, Update update) {
        host_act([this, &state, unit, pass = pass_, update = std::move(update)] {
            const size_t end = pass->next + state.chunks_of(unit).count();
            for (size_t& i = pass->next; i < end; i++) {
                const StateChunk& chunk = state.chunks()[pass->order[i]];
                assert(chunk.unit == unit);
                Room& room = pass->rooms[i % pass->rooms.size()];
                join(room);
                update(chunk, room.at);
                exchange(*pass, room, i, i + pass->rooms.size());
            }
        });
    }
    // Waits for all transfers and releases the buffers.
    void give_back() {
        if (!memory_.empty())
            host_act([this, pass = pass_] {
                for (const Room& room : pass->rooms) join(room);
            });
        memory_.clear();
    }

  private:
    struct Room {
        char* at;
        size_t number;   // of its exchange,
        int noted = -1;  // and of the last transfer of that, in a dry run
    };
    // An update of units, from take() to give_back().
    struct Pass {
        Way way;                         // of fetches
        size_t bytes;                    // of a chunk
        std::vector<size_t> order = {};  // of the chunks
        std::vector<Room> rooms = {};
        size_t next = 0;  // position in the order of the chunk to be updated next
    };
    // Starts storing the chunk at position `out` of the order from a buffer, and then fetching the one at
    // position `in` into it, if they exist.
    void exchange(Pass& pass, Room& room, std::optional<size_t> out, size_t in) {
        if (arena_.rehearsing()) {
            const auto note = [&](Way way) {
                room.noted = note_transfer({Transfer::State, false, way, static_cast<double>(pass.bytes)});
            };
            if (out) note(way_back(pass.way));
            if (in < pass.order.size()) note(pass.way);
            return;
        }
        const auto at = [&](size_t i) { return uint64_t{pass.order[i]} * pass.bytes; };
        std::optional<uint64_t> to, from;
        if (out) to = at(*out);
        if (in < pass.order.size()) from = at(in);
        room.number = place_->exchange(room.at, pass.bytes, to, from, stream_);
    }
    void join(const Room& room) {
        if (arena_.rehearsing()) return note_wait(Transfer::State, room.noted);
        const Waiting waiting(Transfer::State);
        place_->join(room.number, stream_);
    }

    Arena& arena_;
    const Stream& stream_;
    Elsewhere* place_ = nullptr;
    std::vector<Tensor<uint8_t>> memory_;  // of the buffers
    std::shared_ptr<Pass> pass_;           // the latest; a recording keeps its own
};
