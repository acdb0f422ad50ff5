// state.h - the state that training keeps from step to step: weights, gradients, and the optimizer's state in
// the formats that the run chose. It is a table of buffers, from which memory, the report and saves are
// derived.
//
// A buffer has the elements of the Layout (model.h) in their order, or one element for each group of them
// (the scales of 8-bit codes). Some parts can be in host memory or on disk (offload_storage.h) instead of the
// device: the weights of blocks and their gradients, block by block, and all that only updates need. The
// latter is divided into chunks: a chunk has its part of every such buffer, so that it is transferred as one.
#pragma once

#include <algorithm>
#include <iterator>

#include "llmc/device.h"
#include "llmc/model.h"
#include "llmc/offload_storage.h"
#include "llmc/ranks_slices.h"
#include "llmc/state_formats.h"
#include "llmc/work.h"

static_assert(kParameterAlignment % kQuantizedBlock == 0);

struct StateOptions {
    bool training = true;   // false: only the weights
    bool gradients = true;  // a buffer of all gradients; false: each unit's are in the arena until its update
    Optimizer optimizer = Optimizer::AdamW;
    Master master = Master::Fp32;
    Moment m = Moment::Fp32, v = Moment::Fp32;
    Placement blocks = Placement::Device;           // where the weights of blocks are
    Placement block_gradients = Placement::Device;  // where the gradients of blocks are
    Placement updated = Placement::Device;  // where moments and master weights are, which only updates need
    Slices slices = {};                     // the only part of moments and master weights that this rank has
    bool slices_gradients = false;          // true if this rank has only this part of the gradients too
    bool slices_blocks = false;             // true if it has only this part of the weights of blocks

    // Whether blocks' weights, or their gradients, are streamed to the device.
    bool streams_blocks() const { return blocks != Placement::Device; }
    bool streams_block_gradients() const { return block_gradients != Placement::Device; }
    // The options that choose this, for messages and saves.
    std::string text() const {
        std::string s = std::string("--optimizer ") + kOptimizerNames[static_cast<int>(optimizer)] +
                        " --state-formats master=" + kMasterNames[static_cast<int>(master)];
        if (optimizer == Optimizer::AdamW)
            s += std::string(",m=") + kMomentNames[static_cast<int>(m)] +
                 ",v=" + kMomentNames[static_cast<int>(v)];
        return s;
    }
};

// Converts a master weight to a weight. In bf16 this is the upper half of its split, also if the master is a
// full copy, so that both give the same bits. A NaN stays NaN.
template <class T>
SIMT_HOST_DEVICE T narrow_master(float x) {
    if constexpr (std::is_same_v<T, float>)
        return x;
    else
        return x == x ? split<16>(x).high : from_float<bf16>(x);
}

enum class StatePart { Weights, Gradients, M, MScale, V, VScale, Master };

// A part of a buffer: it stores the model's elements from `first` on, and begins at byte `at` of its memory,
// which is on the device, in host memory or on disk.
struct StatePiece {
    int64_t first, count;
    uint64_t at;
    int64_t end() const { return first + count; }
};
// Finds the last piece that begins at or before element `at` of the model. The pieces are in order.
inline std::vector<StatePiece>::const_iterator piece_at(const std::vector<StatePiece>& pieces, int64_t at) {
    return std::upper_bound(pieces.begin(), pieces.end(), at,
                            [](int64_t element, const StatePiece& p) { return element < p.first; }) -
           1;
}

// Elements of the model whose optimizer state is transferred together.
struct StateChunk {
    int unit;
    int64_t first, count;
};
constexpr int64_t kStateChunk = int64_t{1} << 18;  // maximum number of elements in a chunk
static_assert(kStateChunk % kParameterAlignment == 0);

// A row of the table: one buffer.
struct StateBuffer {
    StatePart part;
    const char* name;                     // in the report
    const char* kind;                     // the line of the report's totals in which it is counted
    const char* prefix;                   // of its parameters' names in a save; null: not saved
    const char* dtype;                    // as dtype_name() returns it
    size_t width;                         // bytes of an element
    int span;                             // how many elements of the model one of its elements stores
    int64_t elements = 0;                 // number of elements on the device
    DeviceBuffer memory = {};             // empty before allocate()
    std::vector<StatePiece> pieces = {};  // elements that are not on the device, in order without gaps
    OffloadStorage* place = nullptr;      // where the pieces are
    // A slice of each unit, if these are all that the buffer has, and where they are in `memory`.
    std::vector<StatePiece> slices = {};

    size_t bytes() const { return static_cast<size_t>(elements) * width; }
    size_t bytes_of(int64_t count) const {
        return static_cast<size_t>(ceil_div(count, int64_t{span})) * width;
    }
    bool is_on_device(int64_t at) const {
        return pieces.empty() || at < pieces.front().first || at >= offloaded_end();
    }
    // The address of what stores element `at` of the model; null if that is not on the device.
    char* at(int64_t at) const {
        if (!memory.data() || !is_on_device(at)) return nullptr;
        if (!slices.empty()) {
            const StatePiece& s = *piece_at(slices, at);
            return at < s.end() ? memory.data() + s.at + bytes_of(at - s.first) : nullptr;
        }
        if (!pieces.empty() && at >= offloaded_end()) at -= offloaded_end() - pieces.front().first;
        return memory.data() + static_cast<size_t>(at / span) * width;
    }
    // Copies what stores `count` elements of the model to or from the host, wherever it is. All of them must
    // be in one unit. Of elements that the buffer does not have, nothing is copied.
    void read(int64_t at, int64_t count, void* host) const {
        for_own(at, count, [&](int64_t first, int64_t n) {
            read_own(first, n, static_cast<char*>(host) + bytes_of(first - at));
        });
    }
    void write(int64_t at, int64_t count, const void* host) const {
        for_own(at, count, [&](int64_t first, int64_t n) {
            write_own(first, n, static_cast<const char*>(host) + bytes_of(first - at));
        });
    }

  private:
    // Calls f(first, n) with those of these elements that the buffer has.
    template <class F>
    void for_own(int64_t at, int64_t count, F&& f) const {
        if (slices.empty()) return f(at, count);
        for (const StatePiece& s : slices) {
            const int64_t first = std::max(at, s.first), end = std::min(at + count, s.end());
            if (first < end) f(first, end - first);
        }
    }
    void read_own(int64_t at, int64_t count, void* host) const {
        if (is_on_device(at)) return copy_to_host(host, this->at(at), bytes_of(count), {});
        for_each_piece(at, count, [&](uint64_t from, size_t first, size_t bytes) {
            place->read(from, bytes, static_cast<char*>(host) + first);
        });
    }
    void write_own(int64_t at, int64_t count, const void* host) const {
        if (is_on_device(at)) return copy_to_device(this->at(at), host, bytes_of(count), {});
        for_each_piece(at, count, [&](uint64_t to, size_t first, size_t bytes) {
            place->write(to, bytes, static_cast<const char*>(host) + first);
        });
    }
    int64_t offloaded_end() const { return pieces.back().end(); }
    // Calls f(at, first, bytes) for each piece's part of these elements; that part begins `first` bytes after
    // the first element.
    template <class F>
    void for_each_piece(int64_t from, int64_t count, F&& f) const {
        auto piece = piece_at(pieces, from);
        for (size_t done = 0; count > 0; piece++) {
            const int64_t here = std::min(count, piece->first + piece->count - from);
            f(piece->at + bytes_of(from - piece->first), done, bytes_of(here));
            done += bytes_of(here);
            from += here;
            count -= here;
        }
    }
};

template <class T>
class State {
  public:
    State(Layout where, const StateOptions& state_options) : layout(std::move(where)) {
        set_options(state_options);
    }
    // Makes the table; allocates nothing yet.
    void set_options(const StateOptions& state_options) {
        options = state_options;
        buffers_.clear();
        const bool adamw = options.optimizer == Optimizer::AdamW;
        add<T>(StatePart::Weights, "weights", "weights", "");
        if (options.training && options.gradients)
            add<T>(StatePart::Gradients, "gradients", "gradients", nullptr);
        if (options.training && adamw) {
            add_moment(StatePart::M, options.m, "m", "m_scale", "optimizer_m", "m.", "m_scale.");
            add_moment(StatePart::V, options.v, "v", "v_scale", "optimizer_v", "v.", "v_scale.");
        }
        if (options.training && !std::is_same_v<T, float>) {
            if (options.master == Master::Fp32) add<float>(StatePart::Master, "master", "master", "master.");
            if (options.master == Master::Split)
                add<int16_t>(StatePart::Master, "master_low", "master", "master_low.");
        }
        place_blocks(StatePart::Weights, options.blocks);
        place_blocks(StatePart::Gradients, options.block_gradients);
        int64_t elements = 0;
        for (const Unit& u : layout.units()) elements += u.size;
        options.slices.stretch = norm_stretch(elements);
        if (options.slices.ranks > 1) keep_slices();
        place_chunks();
    }
    // The elements of a unit whose state this rank updates, counted from the unit's first.
    Slice own_slice(const Unit& unit) const { return options.slices.own(unit.size); }
    // Sets where the parts that are not on the device are stored. `blocks` and `block_gradients` have the
    // weights and gradients of one block after another, block_bytes() each: as the largest needs; `chunks`
    // has the chunks, chunk_bytes() each.
    void lie_in(OffloadStorage* blocks, OffloadStorage* block_gradients, OffloadStorage* chunks) {
        for (StateBuffer& b : buffers_)
            if (!b.pieces.empty())
                b.place = b.part == StatePart::Weights     ? blocks
                          : b.part == StatePart::Gradients ? block_gradients
                                                           : chunks;
    }
    size_t block_bytes() const {
        int64_t largest = 0;
        for (int l = 0; l < layout.config().layers; l++)
            largest = std::max(largest, layout.units()[static_cast<size_t>(Layout::block_unit(l))].size);
        return whole_sectors(static_cast<size_t>(largest) * sizeof(T));
    }
    const std::vector<StateChunk>& chunks() const { return chunks_; }  // in the order of the units
    // The numbers of a unit's chunks: from `first` up to, but not including, `end`.
    struct ChunkNumbers {
        size_t first, end;
        size_t count() const { return end - first; }
    };
    ChunkNumbers chunks_of(int unit) const {
        if (chunks_.empty()) return {0, 0};
        const auto u = static_cast<size_t>(unit);
        return {first_chunks_[u], first_chunks_[u + 1]};
    }
    size_t chunk_bytes() const { return chunk_bytes_; }
    // True if what only updates need is in chunks, and not on the device. A rank with empty slices has no
    // chunks, and this is still true.
    bool in_chunks() const { return chunk_bytes_ > 0; }
    // How many chunks a unit has on the rank that has the most, the first one. All ranks plan for these.
    size_t most_chunks_of(int unit) const {
        if (!in_chunks()) return 0;
        const Slice longest = options.slices.of(layout.units()[static_cast<size_t>(unit)].size, 0);
        return static_cast<size_t>(ceil_div(longest.count, kStateChunk));
    }
    // Where a part begins in a chunk; null in a rehearsal, or if the state has no such part.
    template <class E>
    E* in_chunk(StatePart part, char* chunk) const {
        const StateBuffer* b = find(part);
        return b && chunk ? reinterpret_cast<E*>(chunk + b->pieces.front().at) : nullptr;
    }

    // Allocates the memory, filled with zeros.
    void allocate() {
        for (StateBuffer& b : buffers_)
            if (b.elements > 0 || b.pieces.empty()) b.memory = DeviceBuffer(b.bytes(), b.name);
    }

    const std::vector<StateBuffer>& buffers() const { return buffers_; }
    const StateBuffer* find(StatePart part) const {
        for (const StateBuffer& b : buffers_)
            if (b.part == part) return &b;
        return nullptr;
    }
    // Where element `at` of the model is in the buffer of this part. Null before allocate(), or if there is
    // none.
    template <class E>
    E* data(StatePart part, int64_t at = 0) const {
        const StateBuffer* b = find(part);
        assert(!b || std::is_void_v<E> || b->dtype == dtype_name<E>());
        return b ? reinterpret_cast<E*>(b->at(at)) : nullptr;
    }
    T* weights() const { return data<T>(StatePart::Weights); }

    const Layout layout;
    StateOptions options;  // as given to set_options()

  private:
    template <class E>
    void add(StatePart part, const char* name, const char* kind, const char* prefix, int span = 1) {
        buffers_.push_back(
            {part, name, kind, prefix, dtype_name<E>(), sizeof(E), span, layout.size() / span});
    }
    void add_moment(StatePart part, Moment format, const char* name, const char* scale_name, const char* kind,
                    const char* prefix, const char* scale_prefix) {
        if (format == Moment::Fp32) add<float>(part, name, kind, prefix);
        if (format == Moment::Bf16) add<bf16>(part, name, kind, prefix);
        if (format == Moment::Bits8) {
            add<uint8_t>(part, name, kind, prefix);
            add<float>(part == StatePart::M ? StatePart::MScale : StatePart::VScale, scale_name, kind,
                       scale_prefix, kQuantizedBlock);
        }
    }
    // Moves the blocks' elements of a part off the device, if `placement` says so.
    void place_blocks(StatePart part, Placement placement) {
        if (placement == Placement::Device) return;
        for (StateBuffer& b : buffers_) {
            if (b.part != part) continue;
            for (int l = layout.stage().first; l < layout.stage().end; l++) {
                const Unit& u = layout.units()[static_cast<size_t>(Layout::block_unit(l))];
                const auto block = static_cast<uint64_t>(layout.block_of(l));
                b.pieces.push_back({u.offset, u.size, block * block_bytes()});
                b.elements -= u.size;
            }
        }
    }
    static bool only_updates_need(const StateBuffer& b) {
        return b.part != StatePart::Weights && b.part != StatePart::Gradients;
    }
    // Leaves this rank's slices of what only updates need, of gradients, and of the blocks' weights.
    void keep_slices() {
        for (StateBuffer& b : buffers_) {
            const bool has_weights = b.part == StatePart::Weights;
            const bool is_sliced = only_updates_need(b) || (has_weights && options.slices_blocks) ||
                                   (b.part == StatePart::Gradients && options.slices_gradients);
            if (!is_sliced) continue;
            size_t bytes = 0;
            for (size_t unit = 0; unit < layout.units().size(); unit++) {
                const Unit& u = layout.units()[unit];
                const bool is_whole = has_weights && !layout.is_block(static_cast<int>(unit));
                const Slice s = is_whole ? Slice{0, u.size} : own_slice(u);
                b.slices.push_back({u.offset + s.first, s.count, bytes});
                bytes += b.bytes_of(ceil_div(s.count, int64_t{kParameterAlignment}) * kParameterAlignment);
            }
            b.elements = static_cast<int64_t>(bytes / b.width);
        }
    }
    // Moves all that only updates need off the device, in chunks, if the options say so.
    void place_chunks() {
        chunks_.clear();
        first_chunks_ = {0};
        chunk_bytes_ = 0;
        if (options.updated == Placement::Device) return;
        for (size_t u = 0; u < layout.units().size(); u++) {
            const Unit& unit = layout.units()[u];
            const Slice own = own_slice(unit);
            for (int64_t first = 0; first < own.count; first += kStateChunk)
                chunks_.push_back({static_cast<int>(u), unit.offset + own.first + first,
                                   std::min(kStateChunk, own.count - first)});
            first_chunks_.push_back(chunks_.size());
        }
        std::vector<StateBuffer*> moved;
        for (StateBuffer& b : buffers_)
            if (only_updates_need(b)) moved.push_back(&b);
        std::vector<size_t> starts;
        for (const StateBuffer* b : moved) {
            starts.push_back(chunk_bytes_);
            chunk_bytes_ += b->bytes_of(kStateChunk);
        }
        chunk_bytes_ = whole_sectors(chunk_bytes_);
        for (size_t i = 0; i < moved.size(); i++) {
            moved[i]->elements = 0;
            for (size_t c = 0; c < chunks_.size(); c++)
                moved[i]->pieces.push_back(
                    {chunks_[c].first, chunks_[c].count, c * chunk_bytes_ + starts[i]});
        }
        if (moved.empty()) chunks_.clear();
    }

    std::vector<StateBuffer> buffers_;
    std::vector<StateChunk> chunks_;
    std::vector<size_t> first_chunks_;  // the first chunk of each unit; then the number of chunks
    size_t chunk_bytes_ = 0;
};

// This rank's slice of a unit's weights, if it has only that slice. `unit` is the address at which the whole
// unit would begin.
template <class T>
struct OwnWeights {
    T *unit, *slice;
    Slice elements;
};
template <class T>
OwnWeights<T> own_slice_of_weights(const State<T>& state, int unit) {
    const Unit& u = state.layout.units()[static_cast<size_t>(unit)];
    const Slice own = state.own_slice(u);
    T* const slice =
        own.count > 0 ? state.template data<T>(StatePart::Weights, u.offset + own.first) : nullptr;
    return {slice ? slice - own.first : nullptr, slice, own};
}

// A unit's elements of a State's buffer; at no address where there is none.
template <class T>
Tensor<T> unit_of(const State<T>& state, StatePart part, int unit) {
    const Unit& u = state.layout.units()[static_cast<size_t>(unit)];
    return Tensor<T>(state.template data<T>(part, u.offset), {u.size});
}
