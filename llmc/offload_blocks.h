// offload_blocks.h - streams a model's blocks that are not on the device: each is fetched into a buffer in
// the arena while the blocks before it compute. weights.h and gradients.h use it; read this to see how the
// device waits for a block, and no longer than it must.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "llmc/arena.h"
#include "llmc/disk_reader.h"
#include "llmc/graph.h"
#include "llmc/offload_storage.h"
#include "llmc/work.h"

// ---- streaming blocks in order
//
// A block is what is streamed as a whole: a block, a slice of the head (offload_embeddings.h), or a block's
// gradients. Blocks are numbered in the order of the model.
//
// A BlockSource is a source of blocks. HostBlockSource and DiskBlockSource have the matrices of a frozen
// model; TrainedBlockSource has blocks that are trained, and stores them again when they have changed. A
// BlockSource transfers bytes to and from a buffer, and knows nothing of the step. BlockStream takes the
// buffers, so that the plan contains them, and decides what is fetched when. While a transfer is under way,
// nothing else may use its buffer, until the program joins the transfer.

constexpr int kNoBlock = -1;

class BlockSource {
  public:
    virtual ~BlockSource() = default;
    // Starts fetching a block's bytes to `buffer` on the device. Work queued on the stream so far
    // may still use the buffer. If `changed` is not kNoBlock, the buffer has this block, changed, which is
    // stored first; then `block` may be kNoBlock. Only TrainedBlockSource can store. Returns a number for
    // finish(). At most as many transfers may be under way as there are buffers.
    virtual size_t start(int block, char* buffer, Stream stream, int changed) = 0;
    // Work queued on the stream from here on runs after this transfer and all that started before it. Fails
    // if a transfer failed.
    virtual void finish(size_t number, Stream stream) = 0;
};

// What is streamed: the kind of its transfers, and the name and the kind of its buffers in the plan.
struct StreamedKind {
    Transfer::Of of;
    const char *buffers, *kind;
};
constexpr StreamedKind kStreamedBlocks = {Transfer::StreamedBlock, "streamed_block", "weights"},
                       kStreamedVocabulary = {Transfer::Vocabulary, "streamed_vocabulary", "weights"},
                       kStreamedGradients = {Transfer::Gradients, "streamed_gradients", "parameter_gradient"};

// The numbers of `count` blocks, from the first to the last, or back.
inline std::vector<int> numbers_in_order(int count, bool back = false) {
    std::vector<int> blocks(static_cast<size_t>(count));
    std::iota(blocks.begin(), blocks.end(), 0);
    if (back) std::reverse(blocks.begin(), blocks.end());
    return blocks;
}

// How many buffers `blocks` blocks need with a prefetch distance of `ahead`.
inline size_t buffers_for(int ahead, size_t blocks) {
    return std::min(static_cast<size_t>(ahead) + 1, blocks);
}

// Streams the blocks that sweeps over the model use: while one is used, the next ones are prefetched. The
// buffers are held from expect() to release(), so that all blocks find the same memory left.
class BlockStream {
  public:
    BlockStream(Arena& arena, const Stream& stream, const StreamedKind& kind)
        : arena_(arena), stream_(stream), kind_(kind) {}

    // Sets the transfer direction, the bytes of each block, the prefetch distance, and the source, which may
    // be null in a dry run. Call it before anything else.
    void stream_from(Route route, std::vector<size_t> bytes, int ahead, BlockSource* source) {
        route_ = route;
        bytes_ = std::move(bytes);
        source_ = source;
        numbers_.assign(buffers_for(ahead, bytes_.size()), 0);
    }
    // True, the default: blocks are fetched with their contents. False: their buffers will be written, and
    // nothing is fetched.
    void come_with_contents(bool contents) { contents_ = contents; }
    // Says which blocks will be fetched next, after those expected so far, and starts fetching the first of
    // them. Takes the buffers.
    void expect(const std::vector<int>& blocks) {
        while (buffers_.size() < numbers_.size())
            buffers_.push_back({.bytes = arena_.take<uint8_t>(kind_.buffers, {buffer_bytes()}, kind_.kind)});
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
            held_ = kNoBuffer;
            fetch_expected();
            held_ = buffer_of(block);
            expected_.pop_front();
            join(held_);
        }
        return at(held_);
    }
    // True if this block was fetched last and not given back.
    bool holds(int block) const { return block == held(); }
    // The bytes of the block fetched last, for changing them: they are stored before the buffer is reused.
    char* change() {
        buffers_[held_].changed = true;
        return at(held_);
    }
    // Stores what was changed, waits for all transfers and releases the buffers.
    void release() {
        expected_.clear();
        for (size_t i = 0; i < buffers_.size(); i++)
            if (buffers_[i].changed) fetch(kNoBlock, i);
        for (size_t i = 0; i < buffers_.size(); i++) join(i);
        buffers_.clear();
        held_ = kNoBuffer;
    }

  private:
    static constexpr size_t kNoBuffer = SIZE_MAX;
    struct Buffer {
        int block = kNoBlock;
        bool changed = false, under_way = false;
        int noted = -1;  // the number of its last transfer, in a dry run
        Tensor<uint8_t> bytes;
    };
    int64_t buffer_bytes() const {
        return static_cast<int64_t>(*std::max_element(bytes_.begin(), bytes_.end()));
    }
    double bytes_of(int block) const { return static_cast<double>(bytes_[static_cast<size_t>(block)]); }
    char* at(size_t buffer) const { return reinterpret_cast<char*>(buffers_[buffer].bytes.data()); }
    int held() const { return held_ == kNoBuffer ? kNoBlock : buffers_[held_].block; }
    // The number of the buffer that has a block, or kNoBuffer.
    size_t buffer_of(int block) const {
        const auto buffer =
            std::find_if(buffers_.begin(), buffers_.end(), [&](const Buffer& r) { return r.block == block; });
        return buffer == buffers_.end() ? kNoBuffer : static_cast<size_t>(buffer - buffers_.begin());
    }
    // The blocks that should be in the buffers now: the one in use, and the next expected ones.
    std::vector<int> wanted() const {
        std::vector<int> blocks;
        if (held_ != kNoBuffer) blocks.push_back(held());
        for (auto l = expected_.begin(); l != expected_.end() && blocks.size() < buffers_.size(); ++l)
            if (std::find(blocks.begin(), blocks.end(), *l) == blocks.end()) blocks.push_back(*l);
        return blocks;
    }
    // Starts fetching wanted blocks that are in no buffer, and storing changed ones that are not replaced.
    void fetch_expected() {
        const std::vector<int> blocks = wanted();
        const auto is_free = [&](const Buffer& r) {
            return std::find(blocks.begin(), blocks.end(), r.block) == blocks.end();
        };
        for (const int block : blocks)
            if (buffer_of(block) == kNoBuffer)
                fetch(block, static_cast<size_t>(std::find_if(buffers_.begin(), buffers_.end(), is_free) -
                                                 buffers_.begin()));
        for (size_t i = 0; i < buffers_.size(); i++)
            if (buffers_[i].changed && is_free(buffers_[i])) fetch(kNoBlock, i);
    }
    void fetch(int block, size_t buffer) {
        join(buffer);
        Buffer& r = buffers_[buffer];
        const int changed = std::exchange(r.changed, false) ? r.block : kNoBlock;
        r.block = block;
        const int comes = contents_ ? block : kNoBlock;
        if (changed == kNoBlock && comes == kNoBlock) return;
        r.under_way = true;
        if (!arena_.rehearsing())
            return host_act([this, comes, changed, buffer, to = at(buffer)] {
                numbers_[buffer] = source_->start(comes, to, stream_, changed);
            });
        if (changed != kNoBlock)
            r.noted = note_transfer({kind_.of, false, route_back(route_), bytes_of(changed)});
        if (comes != kNoBlock) r.noted = note_transfer({kind_.of, false, route_, bytes_of(comes)});
    }
    void join(size_t buffer) {
        Buffer& r = buffers_[buffer];
        if (!std::exchange(r.under_way, false)) return;
        if (arena_.rehearsing()) return note_wait(kind_.of, r.noted);
        host_act([this, buffer] {
            const Waiting waiting(kind_.of);
            source_->finish(numbers_[buffer], stream_);
        });
    }

    Arena& arena_;
    const Stream& stream_;
    const StreamedKind kind_;
    BlockSource* source_ = nullptr;
    Route route_ = Route::DiskRead;
    std::vector<size_t> bytes_;
    bool contents_ = true;
    std::vector<Buffer> buffers_;
    size_t held_ = kNoBuffer;      // the buffer in use
    std::deque<int> expected_;     // never the same block twice in a row
    std::vector<size_t> numbers_;  // by buffer: its last transfer; each replay of a recording sets it anew
};

// ---- from host memory
//
// Streams a frozen model's blocks from pinned host memory beside a GPU: each is copied to the device, on a
// separate stream, whenever it is needed.

class HostBlockSource : public BlockSource {
  public:
    // For `buffers` buffers. bytes_of(block) returns a block's bytes in pinned memory.
    HostBlockSource(size_t buffers, std::function<std::span<const char>(int block)> bytes_of)
        : bytes_of_(std::move(bytes_of)), arrived_(buffers) {}

    size_t start(int block, char* buffer, Stream stream, [[maybe_unused]] int changed) override {
        assert(changed == kNoBlock);
        const std::span<const char> from = bytes_of_(block);
        free_.record(stream);
        free_.block(copies_.get());
        move_async(Route::FromHost, buffer, from.data(), from.size(), copies_.get());
        arrived_[begun_ % arrived_.size()].record(copies_.get());
        return begun_++;
    }
    void finish(size_t number, Stream stream) override { arrived_[number % arrived_.size()].block(stream); }

  private:
    std::function<std::span<const char>(int)> bytes_of_;
    OwnStream copies_;
    Event free_;
    std::vector<Event> arrived_;
    size_t begun_ = 0;
};

// ---- from the files of a frozen model
//
// Streams a frozen model's blocks from its own files: each is read straight from the disk (disk_reader.h)
// whenever it is needed. On a CPU it is read into its buffer; beside a GPU it is read into pinned memory and
// copied from there on a separate stream.

class DiskBlockSource : public BlockSource {
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

    size_t start(int block, char* buffer, Stream stream, [[maybe_unused]] int changed) override {
        assert(changed == kNoBlock);
        return start(blocks_[static_cast<size_t>(block)], buffer, stream);
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
        r.number = queue_.start(block.reads.count(),
                                std::make_shared<DiskRead>(block.reads, kHostIsDevice ? buffer : r.pinned));
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

// ---- blocks that are trained, and gradients
//
// Streams blocks of a model that is trained, or their gradients, from memory outside the device
// (offload_storage.h): a block that was changed is stored there before its buffer is reused.

class TrainedBlockSource : public BlockSource {
  public:
    // The bytes of a buffer for a block, including what aligning it takes.
    static size_t buffer_bytes(size_t block_bytes) { return block_bytes + kStorageAlignment; }

    // The blocks are in `place`, one after another.
    TrainedBlockSource(OffloadStorage& place, size_t block_bytes)
        : place_(place), block_bytes_(block_bytes) {}

    size_t start(int block, char* buffer, Stream stream, int changed) override {
        const auto at = [&](int number) -> std::optional<uint64_t> {
            if (number == kNoBlock) return std::nullopt;
            return static_cast<uint64_t>(number) * block_bytes_;
        };
        return place_.exchange(aligned_buffer(buffer), block_bytes_, at(changed), at(block), stream);
    }
    void finish(size_t number, Stream stream) override { place_.join(number, stream); }

  private:
    OffloadStorage& place_;
    const size_t block_bytes_;
};
