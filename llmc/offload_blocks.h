// offload_blocks.h - streams a model's blocks that are not on the device: each is fetched into a buffer in
// the arena while the blocks before it compute. weights.h and gradients.h use it; read this to see how the
// device waits for a block, and no longer than it must.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "llmc/arena.h"
#include "llmc/disk.h"
#include "llmc/offload_buffer.h"
#include "llmc/rows.h"  // From
#include "llmc/work.h"

// ---- streaming blocks in order
//
// In this file a block is whatever is streamed as a whole: a block of the model, its gradients, or a slice of
// the head (offload_embeddings.h). Blocks are numbered in the order of the model.
//
// PinnedPieces and DiskBlockSource have the matrices of a frozen model; an OffloadStorage has blocks that are
// trained, or gradients. BlockStream takes the buffers, so that the plan contains them, and decides what is
// fetched when.

constexpr int kNoBlock = -1;

// What is streamed: the kind of its transfers, and the name and the kind of its buffers in the plan.
struct StreamedKind {
    Transfer::Of of;
    const char *buffers, *kind;
};
constexpr StreamedKind kStreamedBlocks = {Transfer::StreamedBlock, "streamed_block", "weights"},
                       kStreamedVocabulary = {Transfer::Vocabulary, "streamed_vocabulary", "weights"},
                       kStreamedGradients = {Transfer::Gradients, "streamed_gradients", "parameter_gradient"};

// The numbers of `count` blocks, from the first to the last, or back.
inline std::vector<int> numbers_in_order(int count, From from = From::First) {
    std::vector<int> blocks(static_cast<size_t>(count));
    std::iota(blocks.begin(), blocks.end(), 0);
    if (from == From::Last) std::ranges::reverse(blocks);
    return blocks;
}

// How many buffers `blocks` blocks need with a prefetch distance of `ahead`.
inline size_t buffers_for(int ahead, size_t blocks) {
    return std::min(static_cast<size_t>(ahead) + 1, blocks);
}

// The bytes of a block in its buffer, and what one transfer of it moves; if ranks gather it, also what one
// sends to other machines.
struct BlockBytes {
    size_t all, moved, to_machines = 0;
    BlockBytes(size_t bytes) : all(bytes), moved(bytes) {}
    BlockBytes(size_t bytes, size_t transferred, size_t sent_to_machines)
        : all(bytes), moved(transferred), to_machines(sent_to_machines) {}
};

// Streams the blocks that sweeps over the model use: while one is used, the next ones are prefetched. The
// buffers are held from expect() to release(), so that all blocks find the same memory left.
class BlockStream {
  public:
    BlockStream(Arena& arena, const Stream& stream, const StreamedKind& kind)
        : arena_(arena), stream_(stream), kind_(kind) {}

    // Sets the transfer direction, the bytes of each block, the prefetch distance, and the source, which may
    // be null in a dry run. Call it before anything else.
    template <class Bytes>
    void stream_from(Route route, const std::vector<Bytes>& bytes, int ahead, PieceSource* source) {
        pieces_ = {kind_.of, route, source};
        bytes_.assign(bytes.begin(), bytes.end());
        slots_.clear();
        for (size_t i = 0; i < buffers_for(ahead, bytes_.size()); i++)
            slots_.push_back({OffloadBuffer(arena_, stream_)});
    }
    // Whether blocks are fetched with their contents; or the user overwrites them, and nothing is fetched.
    enum class Contents { Fetched, Overwritten };
    // Says which blocks will be fetched next, after those expected so far, and starts fetching the first of
    // them. Takes the buffers. `contents` is of all blocks until release().
    void expect(const std::vector<int>& blocks, Contents contents = Contents::Fetched) {
        contents_ = contents;
        for (Slot& slot : slots_)
            if (!slot.buffer.is_taken()) slot.buffer.take(kind_.buffers, buffer_bytes(), kind_.kind, pieces_);
        for (const int block : blocks) {
            const int before = expected_.empty() ? held() : expected_.back();
            if (block != before) expected_.push_back(block);
        }
        fetch_expected();
    }
    // The bytes of a block. Call in the order given to expect(), or again for the block fetched last. Work
    // queued on the stream may use them until another block is fetched. Null in a dry run.
    char* fetch(int block) {
        if (block != held()) {
            assert(!expected_.empty() && block == expected_.front());
            held_ = kNoSlot;  // so that the slot of the block before it may be used
            fetch_expected();
            held_ = slot_of(block);
            expected_.pop_front();
            slots_[held_].buffer.join();
        }
        return slots_[held_].buffer.at();
    }
    // True if this block was fetched last and not given back.
    bool holds(int block) const { return block == held(); }
    // The bytes of the block fetched last, for changing them: they are stored before the buffer is reused.
    char* change() {
        slots_[held_].changed = true;
        return slots_[held_].buffer.at();
    }
    // Stores what was changed, waits for all transfers and releases the buffers.
    void release() {
        expected_.clear();
        for (Slot& slot : slots_)
            if (slot.changed) fetch(kNoBlock, slot);
        for (Slot& slot : slots_) slot.buffer.release(), slot.block = kNoBlock;
        held_ = kNoSlot;
    }

  private:
    static constexpr size_t kNoSlot = SIZE_MAX;
    struct Slot {
        OffloadBuffer buffer;
        int block = kNoBlock;
        bool changed = false;
    };
    size_t buffer_bytes() const { return std::ranges::max(bytes_, {}, &BlockBytes::all).all; }
    int held() const { return held_ == kNoSlot ? kNoBlock : slots_[held_].block; }
    // The number of the slot that has a block, or kNoSlot.
    size_t slot_of(int block) const {
        const auto slot = std::ranges::find(slots_, block, &Slot::block);
        return slot == slots_.end() ? kNoSlot : static_cast<size_t>(slot - slots_.begin());
    }
    // The blocks that should be in the slots now: the one in use, and the next expected ones.
    std::vector<int> wanted() const {
        std::vector<int> blocks;
        if (held_ != kNoSlot) blocks.push_back(held());
        for (auto l = expected_.begin(); l != expected_.end() && blocks.size() < slots_.size(); ++l)
            if (std::ranges::find(blocks, *l) == blocks.end()) blocks.push_back(*l);
        return blocks;
    }
    // Starts fetching wanted blocks that are in no slot, and storing changed ones that are not replaced.
    void fetch_expected() {
        const std::vector<int> blocks = wanted();
        const auto is_free = [&](const Slot& slot) {
            return std::ranges::find(blocks, slot.block) == blocks.end();
        };
        for (const int block : blocks)
            if (slot_of(block) == kNoSlot) fetch(block, *std::ranges::find_if(slots_, is_free));
        for (Slot& slot : slots_)
            if (slot.changed && is_free(slot)) fetch(kNoBlock, slot);
    }
    void fetch(int block, Slot& slot) {
        const auto piece = [this](int number) -> std::optional<OffloadBuffer::Piece> {
            if (number == kNoBlock) return std::nullopt;
            const BlockBytes& bytes = bytes_[static_cast<size_t>(number)];
            return {{number, bytes.moved, bytes.to_machines}};
        };
        const int changed = std::exchange(slot.changed, false) ? slot.block : kNoBlock;
        slot.block = block;
        slot.buffer.exchange(piece(changed), piece(contents_ == Contents::Fetched ? block : kNoBlock));
    }

    Arena& arena_;
    const Stream& stream_;
    const StreamedKind kind_;
    Pieces pieces_ = {};
    std::vector<BlockBytes> bytes_;
    Contents contents_ = Contents::Fetched;
    std::vector<Slot> slots_;
    size_t held_ = kNoSlot;     // the slot in use
    std::deque<int> expected_;  // never the same block twice in a row
};

// ---- from the files of a frozen model
//
// Streams a frozen model's blocks from its own files: each is read straight from the disk (disk.h)
// whenever it is needed. On a CPU it is read into its buffer; beside a GPU it is read into pinned memory and
// copied from there on a separate stream.

class DiskBlockSource : public PieceSource {
  public:
    // The bytes that it takes for `buffers` buffers: on a CPU of the device's memory, beside a GPU of pinned
    // host memory.
    static size_t bytes(size_t largest_streamed, size_t buffers) {
        return DiskQueue::kStagingBytes + (kHostIsDevice ? 0 : buffers * largest_streamed);
    }

    // Allocates that memory.
    DiskBlockSource(size_t largest_streamed, size_t buffers)
        : reads_(buffers), memory_(bytes(largest_streamed, buffers)), queue_(memory_.data()) {
        if (kHostIsDevice) return;
        char* next = memory_.data() + DiskQueue::kStagingBytes;
        for (Read& r : reads_) r.pinned = std::exchange(next, next + largest_streamed);
    }

    // Adds the next block, in the order of their numbers. Fails if a file cannot be read past the page cache.
    void add(const BlockOnDisk& block) {
        const auto direct = [&](const FileReader& file) { return &open(file); };
        blocks_.push_back({DiskReads(block.pieces, direct), block.numbers, block.bytes});
    }
    // Opens a file at the first call, and returns the open file at later ones.
    const DirectFile& open(const FileReader& file) {
        std::unique_ptr<DirectFile>& opened = files_[file.path()];
        if (!opened) opened = std::make_unique<DirectFile>(file);
        return *opened;
    }

    size_t start(char* buffer, [[maybe_unused]] std::optional<int> to, std::optional<int> block,
                 Stream stream) override {
        assert(!to && block);
        return start(blocks_[static_cast<size_t>(*block)], buffer, stream);
    }
    // Reads something else to `buffer`, at most as many bytes as the largest block. Work queued on
    // the stream from here on finds it there. No block may be under way.
    void read(DiskReads reads, size_t bytes, char* buffer, Stream stream) {
        now_ = {std::move(reads), {}, bytes};
        finish(start(now_, buffer, stream), stream);
    }
    void finish(size_t number, [[maybe_unused]] Stream stream) override {
        for (; finished_ <= number; finished_++) {
            Read& r = read(finished_);
            queue_.wait(r.number);
            r.block->reads.check();
            char* const to = kHostIsDevice ? r.buffer : r.pinned;
            for (const auto& [at, value] : r.block->numbers) std::memcpy(to + at, &value, sizeof value);
            if (kHostIsDevice) continue;
            r.free.block(copies_.get());
            move_async(Route::FromHost, r.buffer, r.pinned, r.block->bytes, copies_.get());
            r.copied.record(copies_.get());
        }
        if (!kHostIsDevice) read(number).copied.block(stream);
    }

  private:
#if defined(SIMT_GPU)
    using Memory = PinnedBuffer;
#else
    struct Memory : DeviceBuffer {
        explicit Memory(size_t bytes) : DeviceBuffer(bytes, "what is read from the disk") {}
    };
#endif
    struct StreamedBlock {
        DiskReads reads;
        std::vector<std::pair<size_t, float>> numbers;
        size_t bytes;
    };

    // A read that is under way, or the last one in its slot.
    struct Read {
        const StreamedBlock* block = nullptr;
        char *buffer = nullptr, *pinned = nullptr;  // on the device; beside a GPU, what the disk is read to
        size_t number = 0;                          // in the queue
        Event free, copied;
    };
    Read& read(size_t number) { return reads_[number % reads_.size()]; }

    size_t start(const StreamedBlock& block, char* buffer, [[maybe_unused]] Stream stream) {
        assert(begun_ - finished_ < reads_.size());
        Read& r = read(begun_);
        count_moved(Route::DiskRead, block.bytes);
        r.block = &block;
        r.buffer = buffer;
        if (!kHostIsDevice) {
            r.copied.wait();
            r.free.record(stream);
        }
        r.number = block.reads.start(queue_, kHostIsDevice ? buffer : r.pinned);
        return begun_++;
    }

    std::map<std::string, std::unique_ptr<DirectFile>> files_;
    std::vector<StreamedBlock> blocks_;
    StreamedBlock now_;
    OwnStream copies_;
    std::vector<Read> reads_;
    size_t begun_ = 0, finished_ = 0;
    Memory memory_;
    DiskQueue queue_;  // declared last, so that it ends before the memory does
};
