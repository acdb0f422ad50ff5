// memory.h - the emulated device's memory: what is allocated, which bytes were written, and who accessed each
// word last. With that a race is found when the next one accesses the word.
//
// Addresses are those that the program sees. It cannot access the memory there, as on a real machine; the
// emulator has the same bytes at other addresses.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "test/gpu/fault.h"

namespace gpu {

constexpr int kMostStreams = 16;
constexpr int kMostWarps = 32;

// How far each stream's work is known to be done.
using StreamClock = std::array<uint32_t, kMostStreams>;
inline void join(StreamClock& a, const StreamClock& b) {
    for (int i = 0; i < kMostStreams; i++) a[i] = std::max(a[i], b[i]);
}

// A piece of a stream's work: a kernel, a copy, a product. It comes after everything that its clock knows.
struct Work {
    int stream = 0;
    uint32_t number = 0;  // in its stream, from 1
    StreamClock after{};
    std::string name;
};

// How far the work of each warp of a block is known to be done. The last number is for TMA copies.
using WarpClock = std::array<uint32_t, kMostWarps + 1>;
inline void join(WarpClock& a, const WarpClock& b) {
    for (size_t i = 0; i < a.size(); i++) a[i] = std::max(a[i], b[i]);
}

// Who accesses: a thread of a block of a kernel, or a whole copy or product, which has no block.
struct Accessor {
    const Work* work;
    uint32_t block;       // kNoBlock
    uint32_t clock;       // the warp's own
    uint32_t reads_done;  // increases when what its lanes have read is complete
    uint8_t warp, lane;
    const WarpClock* after;  // what the warp knows of the other warps
};
constexpr uint32_t kNoBlock = ~0u;

class DeviceMemory {
  public:
    explicit DeviceMemory(size_t bytes) : bytes_(bytes) {
        const int file = memfd_create("device", 0);
        if (file < 0 || ftruncate(file, static_cast<off_t>(bytes))) throw Fault("the emulator has no memory");
        device_ = map(bytes, PROT_NONE, MAP_SHARED, file);
        host_ = map(bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file);
        words_ = reinterpret_cast<Word*>(
            map(bytes / 4 * sizeof(Word), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1));
        close(file);
    }

    // Null if there is not enough memory. Allocations are at least 1024 bytes apart, so that an index that is
    // too large hits none.
    void* allocate(size_t bytes) {
        size_t at = 0;
        for (const auto& [start, allocation] : live_) {
            if (start >= at + bytes + 1024) break;
            at = (start + allocation.bytes + 1024 + 4095) / 4096 * 4096;
        }
        if (at + bytes + 512 > limit()) return nullptr;
        live_[at].bytes = bytes;
        used_ += bytes;
        return device_ + at;
    }
    void free(void* p) {
        const auto it = live_.find(offset_of(p));
        if (!is_device(p) || it == live_.end()) throw Fault("cudaFree of what was not allocated");
        empty(p, it->second.bytes);
        used_ -= it->second.bytes;
        live_.erase(it);
        last_bytes_ = 0;
    }
    size_t used() const { return used_; }
    size_t limit() const { return bytes_; }
    bool is_device(const void* p) const {
        return static_cast<const char*>(p) >= device_ && static_cast<const char*>(p) < device_ + bytes_;
    }
    // Host memory that may be copied from and to asynchronously, and that kernels may read. What the host
    // writes meanwhile is not noticed. What a program has mapped itself may be shared: other processes write
    // to it too.
    void add_pinned(void* p, size_t bytes, bool may_be_shared = false) {
        pinned_[static_cast<char*>(p)] = {bytes, may_be_shared};
    }
    // Bytes of all pinned memory.
    size_t pinned() const {
        size_t bytes = 0;
        for (const auto& [at, pinned] : pinned_) bytes += pinned.bytes;
        return bytes;
    }
    bool remove_pinned(void* p) { return pinned_.erase(static_cast<char*>(p)); }
    bool is_pinned(const void* p, size_t bytes) const { return find_pinned(p, bytes) != nullptr; }
    bool may_be_shared(const void* p) const {
        const Pinned* const pinned = find_pinned(p, 1);
        return pinned && pinned->may_be_shared;
    }
    // The emulator's own address of what a program calls p.
    char* bytes_at(const void* p) const { return host_ + offset_of(p); }

    // Fails unless all of the bytes are in one allocation.
    void check_bounds(const void* p, size_t bytes) {
        const size_t at = offset_of(p);
        if (at - last_start_ < last_bytes_ && at - last_start_ + bytes <= last_bytes_) return;
        auto it = is_device(p) ? live_.upper_bound(at) : live_.begin();
        if (it == live_.begin()) throw Fault("an address in no allocation: " + text(p));
        --it;
        if (at + bytes > it->first + it->second.bytes)
            throw Fault(std::to_string(bytes) + " bytes at " + text(p) + ", which is " +
                        std::to_string(at - it->first) + " bytes into an allocation of " +
                        std::to_string(it->second.bytes));
        last_start_ = it->first;
        last_bytes_ = it->second.bytes;
        last_ = it->second;
        it->second.touched = true;
    }
    // Zeroes a whole allocation at little cost: by `work`, or if that is null, before there is any work.
    // Earlier accesses are forgotten.
    bool zero_whole(const Work* work, const void* p, size_t bytes) {
        const auto it = live_.find(offset_of(p));
        if (it == live_.end() || it->second.bytes != bytes || (!work && it->second.touched)) return false;
        if (it->second.touched) empty(p, bytes);
        it->second.filled = true;
        it->second.filled_in = work ? work->stream : 0;
        it->second.filled_at = work ? work->number : 0;
        last_bytes_ = 0;
        return true;
    }
    // Call it after check_bounds().
    void check_written(const void* p, size_t bytes) const {
        if (last_.filled) return;
        for (size_t at = offset_of(p), end = at + bytes; at < end; at++)
            if (!(words_[at / 4].written >> (at % 4) & 1))
                throw Fault("reads " + text(device_ + at) + ", which nobody wrote");
    }

    // One thread reads or writes some bytes.
    void reads(const Accessor& who, const void* p, size_t bytes) {
        check_bounds(p, bytes);
        check_fill(who, p);
        each_word(p, bytes, [&](Word& word, uint8_t mask) {
            if ((word.written & mask) != mask) check_written(p, bytes);
            if (word.write.bytes & mask) check_order(who, word.write, "writes", "reads", p);
            remember_read(who, word, mask);
        });
    }
    void writes(const Accessor& who, const void* p, size_t bytes) {
        check_bounds(p, bytes);
        check_fill(who, p);
        each_word(p, bytes, [&](Word& word, uint8_t mask) {
            if (word.write.bytes & mask) check_order(who, word.write, "writes", "writes", p);
            for (Access& read : word.read)
                if (read.bytes & mask && !(same_warp(who, read) && read.reads_done < who.reads_done))
                    check_order(who, read, "reads", "writes", p);
            if (mask == 15) word.read[0].bytes = word.read[1].bytes = 0;
            word.write = access(who, mask);
            word.written |= mask;
        });
    }
    std::string text(const void* p) const {
        char t[40];
        snprintf(t, sizeof t, "device+0x%zx", offset_of(p));
        return t;
    }

  private:
    struct Access {
        uint32_t number, block, clock, reads_done;
        uint8_t stream, warp, lane, bytes;  // bytes: which of the word's, 0: nobody
    };
    struct Word {
        Access write, read[2];
        uint8_t written;
    };

    static char* map(size_t bytes, int protection, int flags, int file) {
        void* p = mmap(nullptr, bytes, protection, flags | MAP_NORESERVE, file, 0);
        if (p == MAP_FAILED) throw Fault("the emulator has no address space");
        return static_cast<char*>(p);
    }
    size_t offset_of(const void* p) const {
        return static_cast<size_t>(static_cast<const char*>(p) - device_);
    }
    // Forgets the content: zeros that count as never written.
    void empty(const void* p, size_t bytes) {
        const size_t pages = (bytes + 4095) / 4096 * 4096;
        madvise(host_ + offset_of(p), pages, MADV_REMOVE);
        madvise(words_ + offset_of(p) / 4, pages / 4 * sizeof(Word), MADV_DONTNEED);
    }
    void check_fill(const Accessor& who, const void* p) const {
        if (!last_.filled || who.work->after[static_cast<size_t>(last_.filled_in)] >= last_.filled_at) return;
        throw Fault("race between streams: " + who.work->name + " uses " + text(p) +
                    ", in no order with the fill of its memory");
    }
    static Access access(const Accessor& who, uint8_t mask) {
        return {
            who.work->number, who.block, who.clock, who.reads_done, static_cast<uint8_t>(who.work->stream),
            who.warp,         who.lane,  mask};
    }
    template <class F>
    void each_word(const void* p, size_t bytes, F&& f) {
        size_t at = offset_of(p);
        const size_t end = at + bytes;
        while (at < end) {
            const size_t next = std::min(end, (at / 4 + 1) * 4);
            f(words_[at / 4], static_cast<uint8_t>(((1u << (next - at)) - 1) << (at % 4)));
            at = next;
        }
    }
    static bool same_work(const Accessor& who, const Access& a) {
        return a.number == who.work->number && a.stream == who.work->stream;
    }
    static bool same_warp(const Accessor& who, const Access& a) {
        return same_work(who, a) && a.block == who.block && a.warp == who.warp;
    }
    static bool ordered(const Accessor& who, const Access& a) {
        if (!same_work(who, a)) return who.work->after[a.stream] >= a.number;
        if (a.block != who.block) return false;
        if (who.block == kNoBlock) return true;
        if (a.warp != who.warp) return (*who.after)[a.warp] > a.clock;
        return a.lane == who.lane || a.clock < who.clock;
    }
    void check_order(const Accessor& who, const Access& a, const char* they, const char* we,
                     const void* p) const {
        if (ordered(who, a)) return;
        if (!same_work(who, a))
            throw Fault("race between streams: " + who.work->name + " " + we + " " + text(p) + ", and work " +
                        std::to_string(a.number) + " of stream " + std::to_string(a.stream) + " " + they +
                        " it, in no order");
        throw Fault(std::string("race in global memory: ") + we + " " + text(p) + ", which block " +
                    std::to_string(a.block) + ", warp " + std::to_string(a.warp) + ", lane " +
                    std::to_string(a.lane) + " " + they + " in no order");
    }
    static void remember_read(const Accessor& who, Word& word, uint8_t mask) {
        const Access mine = access(who, mask);
        // Uses its own place, or that of somebody who is done; otherwise the second.
        for (Access& read : word.read) {
            if (!read.bytes || ordered(who, read)) {
                read = mine;
                return;
            }
        }
        word.read[1] = mine;
    }

    size_t bytes_;
    char *device_, *host_;
    Word* words_;
    struct Allocation {
        size_t bytes = 0;
        bool filled = false;  // all of it was zeroed, by a stream's work
        int filled_in = 0;
        uint32_t filled_at = 0;
        bool touched = false;
    };
    std::map<size_t, Allocation> live_;  // by start
    struct Pinned {
        size_t bytes;
        bool may_be_shared;
    };
    const Pinned* find_pinned(const void* p, size_t bytes) const {
        auto it = pinned_.upper_bound(static_cast<char*>(const_cast<void*>(p)));
        if (it == pinned_.begin()) return nullptr;
        --it;
        return static_cast<const char*>(p) + bytes <= it->first + it->second.bytes ? &it->second : nullptr;
    }
    std::map<char*, Pinned> pinned_;
    size_t used_ = 0;
    size_t last_start_ = 0, last_bytes_ = 0;  // the allocation that was looked up last
    Allocation last_;
};

}  // namespace gpu
