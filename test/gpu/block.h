// block.h - a thread block of an emulated GPU: its warps' registers and program counters, its shared memory,
// its barriers, and the scheduler, which runs warps in an order that a seed decides.
//
// A warp's lanes run together while they are at the same instruction. Lanes that diverge form groups. The
// group that is furthest behind runs first, so that groups meet again; now and then the seed chooses another.
// An instruction that needs certain lanes at one place holds those that are there until the others have come.
#pragma once

#include <algorithm>
#include <bit>
#include <deque>
#include <functional>
#include <random>
#include <unordered_set>

#include "test/gpu/memory.h"
#include "test/gpu/program.h"

namespace gpu {

constexpr int kAsync = kMostWarps;  // TMA copies, which use a warp's place in clocks

void wgmma(Warp& w, const Instruction& i, uint32_t lanes);
inline const Execute wgmma_execute = wgmma;  // only wgmma may touch registers of other wgmmas

// A word of shared memory, and who has accessed it since it was last written.
struct SharedWord {
    uint32_t write_clock = 0;
    uint8_t write_warp = 0, write_lane = 0, write_bytes = 0, written = 0;
    bool pending = false;  // a copy to it is under way
    bool barrier = false;  // an mbarrier is there
    uint32_t readers = 0;  // a set of warps, each with a SharedRead
};
// A warp's last read of a word.
struct SharedRead {
    uint32_t clock, reads_done;
    uint8_t lane;  // kManyLanes: more than one
    uint8_t bytes;
};
constexpr uint8_t kManyLanes = 255;

struct Counters {
    uint64_t launches = 0, instructions = 0, lanes = 0;
    uint64_t global_requests = 0, global_sectors = 0, global_bytes = 0;
    uint64_t shared_requests = 0, shared_passes = 0;  // a pass serves each bank once
    uint64_t branches = 0, divergent = 0;
    uint64_t distinct_sectors = 0;  // sectors that a launch reads, and those that it writes, each once
    uint64_t tensor_flops = 0;
    uint64_t threads = 0, shared_bytes = 0;  // the most of any block
};

struct Launch {
    const Program* program;
    const Work* work;
    std::array<uint32_t, 3> grid, block;
    size_t dynamic_bytes = 0;
    std::vector<char> parameters;
    DeviceMemory* memory;
    Counters* counters;
    uint64_t seed = 0;
    bool check_races = true;
    std::unordered_set<uint64_t>* touched = nullptr;  // sectors; null if requests are not counted
};

class Block;

// Lanes of a warp that are at the same instruction.
struct Group {
    int pc;
    uint32_t lanes;
    uint32_t needs = 0;  // lanes that must come to this place first; 0: the group may run
};

struct Warp {
    Block* block;
    int index;
    uint32_t lanes;  // that the block has
    uint32_t live;   // that have not returned
    char* registers = nullptr;
    std::vector<Group> groups;  // waiting ones; the group that runs is taken out
    bool at_barrier = false;
    uint32_t clock = 1;
    // A shuffle passes values that other lanes computed from what they read before. So their reads are done,
    // but not their writes.
    uint32_t reads_done = 1;
    WarpClock after{};             // what it knows of the other warps
    uint32_t proxy_fence = 0;      // its clock at its last fence.proxy.async
    uint32_t barrier_fence = 0;    // its clock at the last fence that makes mbarriers known to copies
    uint32_t register_count = 0;   // of a thread
    uint32_t registers_asked = 0;  // by a waiting setmaxnreg.inc
    struct Copy {                  // cp.async
        uint32_t to;
        std::array<char, 16> bytes;
        uint8_t count, lane;
        int group;  // -1: not committed
    };
    std::vector<Copy> copies;
    int copy_groups = 0;
    struct Product {  // a wgmma that nobody has waited for
        const Instruction* instruction;
        int group;  // -1: not committed
        bool done;
        uint64_t a, b;  // its descriptors
        bool add;
    };
    std::vector<Product> products;
    int product_groups = 0;
    // For programs with wgmma, by a register's place. dirty: written since the last wgmma.fence; locked: a
    // product owns it.
    std::vector<uint8_t> dirty, locked;
    void lock(const Product& p, bool on) {
        for (const std::vector<Slot>* slots : {&p.instruction->more, &p.instruction->sources})
            for (const Slot& s : *slots)
                if (!s.constant) locked[s.offset / 64] = on;
    }
    bool yields = false;  // the warp waits for others
    // The address of a register or a constant of the running instruction.
    template <class T>
    T* at(Slot s) {
        return reinterpret_cast<T*>((s.constant ? constants : registers) + s.offset);
    }
    char* constants = nullptr;
};

// An mbarrier, and what its current phase still waits for.
struct Barrier {
    uint32_t expected = 0, arrivals = 0, phase = 0;  // arrivals: that are missing
    int64_t bytes = 0;                               // that are missing
    int maker = 0;                                   // the warp that made it, and its clock then
    uint32_t made_at = 0;
    WarpClock arriving{}, complete{};
};

// The host's memory for a block, which the blocks after it use again: to get as much from the system and to
// return it takes longer than a small block runs.
struct BlockMemory {
    std::vector<char> shared, registers;
    std::vector<SharedWord> words;
    std::vector<SharedRead> reads;
};

class Block {
  public:
    Block(const Launch& launch, std::array<uint32_t, 3> id, uint32_t number, BlockMemory& memory)
        : launch_(launch),
          program_(*launch.program),
          id_(id),
          number_(number),
          random_(launch.seed * 1000003 + number),
          shared_(memory.shared),
          words_(memory.words),
          reads_(memory.reads) {
        shared_bytes_ = program_.static_shared + launch.dynamic_bytes;
        shared_.assign(shared_bytes_, static_cast<char>(0xff));
        words_.assign((shared_bytes_ + 3) / 4, {});
        const uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];
        const size_t warps = (threads + 31) / 32;
        memory.registers.assign(warps * program_.register_bytes, static_cast<char>(0xff));
        for (uint32_t first = 0; first < threads; first += 32)
            add_warp(first, std::min(32u, threads - first),
                     memory.registers.data() + warps_.size() * program_.register_bytes);
        if (reads_.size() < words_.size() * warps) reads_.resize(words_.size() * warps);
    }
    Block(const Block&) = delete;

    void run() {
        while (true) {
            run_async_sometimes();
            std::vector<Warp*> ready;
            for (Warp& w : warps_)
                if (can_run(w)) ready.push_back(&w);
            if (ready.empty()) {
                if (done()) break;
                if (!async_.empty()) {
                    finish_async(random_() % async_.size());
                    continue;
                }
                stuck();
            }
            run_warp(*ready[random_() % ready.size()]);
        }
        if (!async_.empty())
            throw Fault(where() + "returns while copies into its shared memory are under way");
        for (Warp& w : warps_)
            if (!w.copies.empty()) throw Fault(where() + "returns before its cp.async have arrived");
        for (size_t i = 0; i < warps_.size(); i++)
            if (warps_[i].register_count != warps_[i / 4 * 4].register_count)
                throw Fault(where() + "setmaxnreg by some warps of a warpgroup, and not by all");
    }

    const Launch& launch() const { return launch_; }
    std::mt19937& random() { return random_; }
    Accessor accessor(const Warp& w, int lane) const {
        return {launch_.work,
                number_,
                w.clock,
                w.reads_done,
                static_cast<uint8_t>(w.index),
                static_cast<uint8_t>(lane),
                &w.after};
    }

    // The accessor of a TMA copy: what it has read is known to whoever waits until its bytes have arrived.
    Accessor copying_accessor(uint32_t clock, const WarpClock& after) const {
        return {launch_.work, number_, clock, 0, kAsync, 0, &after};
    }

    // --- Global memory, as a lane sees it.

    const char* read_global(Warp& w, int lane, uint64_t address, size_t bytes) {
        check_aligned(address, bytes);
        const void* p = reinterpret_cast<const void*>(address);
        if (!launch_.memory->is_device(p) && launch_.memory->is_pinned(p, bytes))
            return static_cast<const char*>(p);
        if (launch_.check_races)
            launch_.memory->reads(accessor(w, lane), p, bytes);
        else
            launch_.memory->check_bounds(p, bytes);
        return launch_.memory->bytes_at(p);
    }
    char* write_global(Warp& w, int lane, uint64_t address, size_t bytes) {
        check_aligned(address, bytes);
        const void* p = reinterpret_cast<const void*>(address);
        if (launch_.check_races)
            launch_.memory->writes(accessor(w, lane), p, bytes);
        else
            launch_.memory->check_bounds(p, bytes);
        return launch_.memory->bytes_at(p);
    }

    // --- Shared memory.

    const char* read_shared(Warp& w, int lane, uint64_t address, size_t bytes) {
        check_shared(address, bytes);
        if (launch_.check_races)
            each_word(address, bytes,
                      [&](SharedWord& word, uint8_t mask) { note_read(w, lane, word, mask, address); });
        return shared_.data() + address;
    }
    char* write_shared(Warp& w, int lane, uint64_t address, size_t bytes) {
        check_shared(address, bytes);
        if (launch_.check_races)
            each_word(address, bytes, [&](SharedWord& word, uint8_t mask) {
                check_write(w.index, lane, w.clock, w.reads_done, w.after, word, mask, address);
                set_written(word, mask, w.index, lane, w.clock);
            });
        return shared_.data() + address;
    }
    // An operand that a product of the tensor cores reads, through the async proxy.
    const char* read_shared_async(Warp& w, uint64_t address, size_t bytes) {
        check_shared(address, bytes);
        if (launch_.check_races)
            each_word(address, bytes, [&](SharedWord& word, uint8_t mask) {
                note_read(w, 0, word, mask, address);
                check_proxy(word, address);
            });
        return shared_.data() + address;
    }
    // Begins a TMA copy: nobody may touch the bytes until they have arrived.
    void begin_async_write(const WarpClock& after, uint64_t address, size_t bytes) {
        check_shared(address, bytes);
        if (launch_.check_races)
            each_word(address, bytes, [&](SharedWord& word, uint8_t mask) {
                check_write(kAsync, 0, async_clock_, 0, after, word, mask, address);
                check_proxy(word, address);
                word.pending = true;
            });
    }
    void end_async_write(uint32_t clock, uint64_t address, const char* from, size_t bytes) {
        memcpy(shared_.data() + address, from, bytes);
        each_word(address, bytes, [&](SharedWord& word, uint8_t mask) {
            word.pending = false;
            set_written(word, mask, kAsync, 0, clock);
        });
    }

    // cp.async: copies the bytes as they are now. They are in place after the lane has waited for them.
    void begin_copy(Warp& w, int lane, uint32_t to, const char* from, size_t from_bytes, size_t bytes) {
        check_shared(to, bytes);
        Warp::Copy copy{to, {}, static_cast<uint8_t>(bytes), static_cast<uint8_t>(lane), -1};
        if (from_bytes) memcpy(copy.bytes.data(), from, from_bytes);
        if (launch_.check_races)
            each_word(to, bytes, [&](SharedWord& word, uint8_t mask) {
                check_write(w.index, lane, w.clock, w.reads_done, w.after, word, mask, to);
                word.pending = true;
            });
        if (random_() & 1) memcpy(shared_.data() + to, copy.bytes.data(), bytes);  // it may be there at once
        w.copies.push_back(copy);
    }
    void commit_copies(Warp& w, uint32_t lanes) {
        for (Warp::Copy& c : w.copies)
            if (c.group < 0 && (lanes >> c.lane & 1)) c.group = w.copy_groups;
        w.copy_groups++;
    }
    // Waits until at most `most` of the groups are under way; most < 0: until all copies are done, committed
    // or not.
    void wait_copies(Warp& w, uint32_t lanes, int most) {
        const auto done = [&](const Warp::Copy& c) {
            return (lanes >> c.lane & 1) && (most < 0 || (c.group >= 0 && c.group < w.copy_groups - most));
        };
        for (const Warp::Copy& c : w.copies) {
            if (!done(c)) continue;
            memcpy(shared_.data() + c.to, c.bytes.data(), c.count);
            each_word(c.to, c.count, [&](SharedWord& word, uint8_t mask) {
                word.pending = false;
                set_written(word, mask, w.index, c.lane, w.clock);
            });
        }
        std::erase_if(w.copies, done);
    }

    // --- Synchronization.

    // Everything that the warp has done is known to whoever learns of its clock from now on.
    static void release(Warp& w) {
        w.clock++;
        w.reads_done++;
    }

    void arrive_at_block_barrier(Warp& w, uint32_t id, uint32_t threads) {
        if (id >= 16) throw Fault("bar.sync " + std::to_string(id) + ": there are 16 barriers");
        BlockBarrier& b = barriers_[id];
        w.at_barrier = true;
        b.warps.push_back(&w);
        b.threads = threads;
        pass_block_barrier(b);
    }

    Barrier& mbarrier(Warp& w, uint64_t address) {
        check_shared(address, 8);
        const auto it = mbarriers_.find(address);
        if (it == mbarriers_.end()) throw Fault("no mbarrier was made at shared+" + std::to_string(address));
        if (!knows(w, it->second.maker, it->second.made_at))
            throw Fault("race: an mbarrier is used, in no order with its mbarrier.init");
        return it->second;
    }
    void make_mbarrier(Warp& w, int lane, uint64_t address, uint32_t arrivals) {
        write_shared(w, lane, address, 8);
        for (uint64_t at = address; at < address + 8; at += 4) words_[at / 4].barrier = true;
        mbarriers_[address] =
            Barrier{.expected = arrivals, .arrivals = arrivals, .maker = w.index, .made_at = w.clock};
    }
    void arrive(Barrier& b, uint32_t arrivals, const WarpClock& after, int warp, uint32_t clock) {
        if (b.arrivals < arrivals) throw Fault("more arrive at an mbarrier than it was made for");
        b.arrivals -= arrivals;
        join(b.arriving, after);
        b.arriving[static_cast<size_t>(warp)] = std::max(b.arriving[static_cast<size_t>(warp)], clock + 1);
        complete_phase(b);
    }
    void expect_bytes(Barrier& b, int64_t bytes) { b.bytes += bytes; }
    void bytes_came(Barrier& b, int64_t bytes, uint32_t clock) {
        b.bytes -= bytes;
        b.arriving[kAsync] = std::max(b.arriving[kAsync], clock + 1);
        complete_phase(b);
    }
    // Whether the phase of this parity is complete. If so, the warp knows what came before that.
    bool phase_complete(Warp& w, Barrier& b, uint32_t parity) {
        if ((b.phase & 1) == (parity & 1)) return false;
        join(w.after, b.complete);
        return true;
    }

    Barrier& mbarrier_at(uint64_t address) { return mbarriers_.at(address); }
    // Copies work in the async proxy, which sees an mbarrier only after a fence by the warp that made it.
    void check_fence(const Barrier& b) const {
        if (warps_[static_cast<size_t>(b.maker)].barrier_fence <= b.made_at)
            throw Fault("a copy uses an mbarrier, and its maker made no fence since mbarrier.init");
    }

    // setmaxnreg: registers that threads release go to threads of the same block that ask for more, and to
    // nobody else.
    void give_registers(Warp& w, uint32_t count) {
        check_registers(w, count <= w.register_count, count);
        free_registers_ += 32 * (w.register_count - count);
        w.register_count = count;
    }
    // Whether enough registers were free; otherwise the warp waits for them.
    bool take_registers(Warp& w, uint32_t count) {
        check_registers(w, count >= w.register_count, count);
        const uint32_t more = 32 * (count - w.register_count);
        w.registers_asked = more > free_registers_ ? more : 0;
        if (w.registers_asked) return false;
        free_registers_ -= more;
        w.register_count = count;
        return true;
    }
    void waits_in_vain(Warp& w) {
        w.yields = true;
        if (!async_.empty() || ++vain_waits_ <= 10000 * warps_.size()) return;
        const bool asks = std::any_of(warps_.begin(), warps_.end(),
                                      [](const Warp& other) { return other.registers_asked > 0; });
        throw Fault(where() + "nobody can go on: all wait at mbarriers" +
                    (asks ? ", or for registers that nobody gives back" : ""));
    }

    // Adds work that the block's copy engine does later.
    void add_async(std::function<void()> f) { async_.push_back(std::move(f)); }
    uint32_t next_async_clock() { return async_clock_++; }

    std::string where() const {
        return program_.name + ", block (" + std::to_string(id_[0]) + ", " + std::to_string(id_[1]) + ", " +
               std::to_string(id_[2]) + "): ";
    }

  private:
    struct BlockBarrier {
        std::vector<Warp*> warps;
        uint32_t threads = 0;
    };

    void add_warp(uint32_t first, uint32_t count, char* registers) {
        Warp& w = warps_.emplace_back();
        w.block = this;
        w.index = static_cast<int>(warps_.size()) - 1;
        if (w.index >= kMostWarps) throw Fault("a block of more than 1024 threads");
        w.lanes = w.live = count == 32 ? ~0u : (1u << count) - 1;
        w.registers = registers;
        w.constants = const_cast<char*>(program_.constants.data());
        w.register_count = program_.registers;
        if (program_.has_wgmma) {
            w.dirty.assign(program_.register_bytes / 64 + 1, 0);
            w.locked.assign(program_.register_bytes / 64 + 1, 0);
        }
        w.groups.push_back({0, w.lanes});
        for (uint32_t lane = 0; lane < 32; lane++) {
            const uint32_t t = first + lane;
            const uint32_t values[] = {t % launch_.block[0],
                                       t / launch_.block[0] % launch_.block[1],
                                       t / launch_.block[0] / launch_.block[1],
                                       launch_.block[0],
                                       launch_.block[1],
                                       launch_.block[2],
                                       id_[0],
                                       id_[1],
                                       id_[2],
                                       launch_.grid[0],
                                       launch_.grid[1],
                                       launch_.grid[2],
                                       lane};
            for (size_t i = 0; i < std::size(values); i++)
                w.at<uint32_t>(program_.special[i])[lane] = values[i];
        }
    }
    bool can_run(const Warp& w) const {
        if (w.at_barrier || w.registers_asked > free_registers_) return false;
        for (const Group& g : w.groups)
            if ((g.needs & w.live & ~lanes_at(w, g.pc)) == 0) return true;
        return false;
    }
    static uint32_t lanes_at(const Warp& w, int pc) {
        uint32_t lanes = 0;
        for (const Group& g : w.groups)
            if (g.pc == pc) lanes |= g.lanes;
        return lanes;
    }
    bool done() const {
        return std::all_of(warps_.begin(), warps_.end(), [](const Warp& w) { return w.live == 0; });
    }
    [[noreturn]] void stuck() const {
        std::string t = where() + "nobody can go on:";
        for (const Warp& w : warps_)
            for (const Group& g : w.groups)
                t += " warp " + std::to_string(w.index) + " lanes " + hex(g.lanes) + " wait at line " +
                     std::to_string(program_.code[static_cast<size_t>(g.pc)].line) +
                     (w.at_barrier        ? " (barrier)"
                      : w.registers_asked ? " (registers that nobody gives back)"
                                          : "") +
                     ';';
        throw Fault(t);
    }
    static std::string hex(uint32_t x) {
        char t[16];
        snprintf(t, sizeof t, "%08x", x);
        return t;
    }
    void run_warp(Warp& w);
    void run_group(Warp& w, Group g, int& quantum);
    static uint32_t needed_lanes(Warp& w, const Instruction& i, uint32_t lanes);
    void check_locks(const Warp& w, const Instruction& i) const;

    void run_async_sometimes() {
        while (!async_.empty() && random_() % 4 == 0) finish_async(random_() % async_.size());
    }
    void finish_async(size_t i) {
        const std::function<void()> f = std::move(async_[i]);
        async_.erase(async_.begin() + static_cast<long>(i));
        f();
    }
    void pass_block_barrier(BlockBarrier& b) {
        uint32_t threads = 0;
        threads = 32 * static_cast<uint32_t>(b.warps.size());
        uint32_t needed = b.threads;
        if (!needed)
            for (const Warp& w : warps_) needed += w.live || w.at_barrier ? 32 : 0;
        if (threads > needed) throw Fault(where() + "more threads come to a barrier than it is for");
        if (threads < needed) return;
        WarpClock all{};
        for (Warp* w : b.warps) {
            release(*w);
            join(all, w->after);
            all[static_cast<size_t>(w->index)] = std::max(all[static_cast<size_t>(w->index)], w->clock);
        }
        for (Warp* w : b.warps) {
            join(w->after, all);
            w->at_barrier = false;
        }
        b.warps.clear();
    }
    void complete_phase(Barrier& b) {
        vain_waits_ = 0;
        if (b.arrivals || b.bytes) return;
        b.phase++;
        b.arrivals = b.expected;
        join(b.complete, b.arriving);
    }

    void check_registers(const Warp& w, bool in_order, uint32_t count) const {
        if (!w.register_count) throw Fault("setmaxnreg in a kernel without __launch_bounds__");
        if (launch_.block[0] * launch_.block[1] * launch_.block[2] % 128)
            throw Fault("setmaxnreg in a block that is not made of whole warpgroups");
        if (!in_order)
            throw Fault("from " + std::to_string(w.register_count) + " registers to " +
                        std::to_string(count));
    }
    static void check_aligned(uint64_t address, size_t bytes) {
        if (address % bytes)
            throw Fault(std::to_string(bytes) + " bytes at an address that is no multiple of that");
    }
    void check_shared(uint64_t address, size_t bytes) const {
        if (address + bytes > shared_bytes_)
            throw Fault(std::to_string(bytes) + " bytes at shared+" + std::to_string(address) +
                        ", and the block has " + std::to_string(shared_bytes_));
        if (bytes <= 16) check_aligned(address, bytes);
    }
    template <class F>
    void each_word(uint64_t address, size_t bytes, F&& f) {
        uint64_t at = address;
        const uint64_t end = at + bytes;
        while (at < end) {
            const uint64_t next = std::min(end, (at / 4 + 1) * 4);
            f(words_[at / 4], static_cast<uint8_t>(((1u << (next - at)) - 1) << (at % 4)));
            at = next;
        }
    }
    static bool knows(const Warp& w, int warp, uint32_t clock) {
        return warp == w.index || w.after[static_cast<size_t>(warp)] > clock;
    }
    static std::string text(int warp, int lane) {
        return warp == kAsync ? "a TMA copy"
                              : "warp " + std::to_string(warp) + ", lane " + std::to_string(lane);
    }
    static void set_written(SharedWord& word, uint8_t mask, int warp, int lane, uint32_t clock) {
        word.write_warp = static_cast<uint8_t>(warp);
        word.write_lane = static_cast<uint8_t>(lane);
        word.write_clock = clock;
        word.write_bytes = mask;
        word.written |= mask;
        word.readers = 0;
    }
    // Nobody has set it before the warp is one of the word's readers.
    SharedRead& read_of(const SharedWord& word, int warp) {
        return reads_[static_cast<size_t>(&word - words_.data()) * warps_.size() + static_cast<size_t>(warp)];
    }
    void note_read(Warp& w, int lane, SharedWord& word, uint8_t mask, uint64_t address) {
        if (word.barrier)
            throw Fault("an mbarrier at shared+" + std::to_string(address) + " is read as memory");
        if (word.pending)
            throw Fault("shared+" + std::to_string(address) +
                        " is read before the copy to it was waited for");
        if ((word.written & mask) != mask)
            throw Fault("reads shared+" + std::to_string(address) + ", which nobody wrote");
        if (word.write_bytes & mask) {
            const bool ordered = word.write_warp == w.index
                                     ? word.write_lane == lane || word.write_clock < w.clock
                                     : w.after[word.write_warp] > word.write_clock;
            if (!ordered)
                throw Fault("race in shared memory: reads shared+" + std::to_string(address) + ", which " +
                            text(word.write_warp, word.write_lane) + " writes in no order");
        }
        SharedRead& read = read_of(word, w.index);
        const bool again = (word.readers >> w.index & 1) && read.reads_done == w.reads_done;
        read = {w.clock, w.reads_done, again && read.lane != lane ? kManyLanes : static_cast<uint8_t>(lane),
                static_cast<uint8_t>(again ? read.bytes | mask : mask)};
        word.readers |= 1u << w.index;
    }
    void check_write(int warp, int lane, uint32_t clock, uint32_t reads_done, const WarpClock& after,
                     const SharedWord& word, uint8_t mask, uint64_t address) {
        if (word.barrier)
            throw Fault("an mbarrier at shared+" + std::to_string(address) + " is written as memory");
        if (word.pending)
            throw Fault("shared+" + std::to_string(address) + " is written while a copy to it is under way");
        if (word.write_bytes & mask) {
            const bool ordered = word.write_warp == warp
                                     ? warp == kAsync || word.write_lane == lane || word.write_clock < clock
                                     : after[word.write_warp] > word.write_clock;
            if (!ordered)
                throw Fault("race in shared memory: " + text(warp, lane) + " writes shared+" +
                            std::to_string(address) + ", which " + text(word.write_warp, word.write_lane) +
                            " writes in no order");
        }
        for (uint32_t readers = word.readers; readers; readers &= readers - 1) {
            const int r = std::countr_zero(readers);
            const SharedRead& read = read_of(word, r);
            if (!(read.bytes & mask)) continue;
            const bool ordered = r == warp ? read.lane == lane || read.reads_done < reads_done
                                           : after[static_cast<size_t>(r)] > read.clock;
            if (!ordered)
                throw Fault("race in shared memory: " + text(warp, lane) + " writes shared+" +
                            std::to_string(address) + ", which " + text(r, read.lane) + " reads in no order");
        }
    }
    // The async proxy sees what ordinary accesses wrote only after a fence.proxy.async by the writer.
    void check_proxy(const SharedWord& word, uint64_t address) const {
        if (!word.write_bytes || word.write_warp == kAsync) return;
        const Warp& writer = warps_[word.write_warp];
        if (writer.proxy_fence <= word.write_clock)
            throw Fault("shared+" + std::to_string(address) +
                        " is used by the async proxy, and its writer made no fence.proxy.async since");
    }

    const Launch& launch_;
    const Program& program_;
    std::array<uint32_t, 3> id_;
    uint32_t number_;
    std::mt19937 random_;
    size_t shared_bytes_ = 0;
    std::vector<char>& shared_;
    std::vector<SharedWord>& words_;
    std::vector<SharedRead>& reads_;
    std::deque<Warp> warps_;
    std::array<BlockBarrier, 16> barriers_;
    std::map<uint64_t, Barrier> mbarriers_;
    std::vector<std::function<void()>> async_;
    uint32_t async_clock_ = 1;
    size_t vain_waits_ = 0;
    uint32_t free_registers_ = 0;  // that threads released
};

inline void Block::run_warp(Warp& w) {
    int quantum = 1 + static_cast<int>(random_() % 256);
    while (quantum > 0 && can_run(w)) {
        // Runs the group that is furthest behind, or now and then any group.
        std::vector<int> places;
        for (const Group& g : w.groups)
            if ((g.needs & w.live & ~lanes_at(w, g.pc)) == 0 &&
                std::find(places.begin(), places.end(), g.pc) == places.end())
                places.push_back(g.pc);
        const int pc = random_() % 16 == 0 ? places[random_() % places.size()]
                                           : *std::min_element(places.begin(), places.end());
        Group running{pc, lanes_at(w, pc)};
        std::erase_if(w.groups, [&](const Group& g) { return g.pc == pc; });
        run_group(w, running, quantum);
    }
}

// Runs a group until the quantum is over, or the lanes diverge, wait, return, or come to where others are.
inline void Block::run_group(Warp& w, Group g, int& quantum) {
    Counters& counters = *launch_.counters;
    w.yields = false;
    for (; quantum > 0; quantum--) {
        const Instruction& i = program_.code[static_cast<size_t>(g.pc)];
        uint32_t lanes = g.lanes;
        if (i.guarded) lanes &= i.guard_negated ? ~*w.at<uint32_t>(i.guard) : *w.at<uint32_t>(i.guard);
        try {
            if (!w.products.empty() && i.execute != wgmma_execute) check_locks(w, i);
            if (i.flow == Flow::Together || i.flow == Flow::Barrier || i.flow == Flow::TakeRegisters) {
                const uint32_t needs = lanes ? needed_lanes(w, i, lanes) : 0;
                if (needs & w.live & ~g.lanes) {
                    w.groups.push_back({g.pc, g.lanes, needs});
                    return;
                }
                if (lanes && (needs & w.live & ~lanes)) throw Fault("lanes that it names do not take part");
                if (lanes && i.flow != Flow::Barrier && (lanes & ~needs))
                    throw Fault("a lane takes part that it does not name");
            }
            if (lanes && i.flow == Flow::TakeRegisters && !take_registers(w, i.option)) {
                w.groups.push_back(g);
                return;
            }
            // A branch that no lane takes was still decided on.
            if (lanes || i.flow == Flow::Branch) program_.executed[static_cast<size_t>(g.pc)] = true;
            counters.instructions++;
            counters.lanes += static_cast<uint64_t>(std::popcount(lanes));
            if (i.flow == Flow::Branch) {
                counters.branches++;
                if (lanes == g.lanes) {
                    g.pc = i.target;
                } else if (!lanes) {
                    g.pc++;
                } else {
                    counters.divergent++;
                    w.groups.push_back({i.target, lanes});
                    w.groups.push_back({g.pc + 1, g.lanes & ~lanes});
                    return;
                }
                if (!w.groups.empty()) break;
                continue;
            }
            if (i.flow == Flow::Return) {
                if (lanes && !w.products.empty()) throw Fault("returns while products are under way");
                w.live &= ~lanes;
                g.lanes &= ~lanes;
                if (!g.lanes) {
                    for (BlockBarrier& b : barriers_)
                        if (!b.warps.empty() && !b.threads && !w.live) pass_block_barrier(b);
                    return;
                }
                g.pc++;
                continue;
            }
            if (lanes && i.execute) i.execute(w, i, lanes);
        } catch (const Fault& f) {
            throw Fault(where() + "warp " + std::to_string(w.index) + ", PTX line " + std::to_string(i.line) +
                        " (" + program_.text[static_cast<size_t>(g.pc)] + "): " + f.what());
        }
        if (!w.dirty.empty() && lanes && i.execute != wgmma_execute) {
            if (!i.d.constant) w.dirty[i.d.offset / 64] = 1;
            for (const Slot& s : i.more)
                if (!s.constant) w.dirty[s.offset / 64] = 1;
        }
        g.pc++;
        if (i.flow == Flow::Barrier && lanes) {
            w.groups.push_back(g);
            arrive_at_block_barrier(w, w.at<uint32_t>(i.s[0])[std::countr_zero(lanes)],
                                    w.at<uint32_t>(i.s[1])[std::countr_zero(lanes)]);
            quantum = 0;
            return;
        }
        if (w.yields) quantum = 1;
        if (!w.groups.empty() &&
            std::any_of(w.groups.begin(), w.groups.end(), [&](const Group& o) { return o.pc <= g.pc; })) {
            quantum--;
            break;
        }
    }
    w.groups.push_back(g);
}

// The lanes that an instruction needs at one place.
inline uint32_t Block::needed_lanes(Warp& w, const Instruction& i, uint32_t lanes) {
    if (i.whole_warp) return w.live;
    const Slot& mask = i.sources.empty() ? i.s[0] : i.sources[0];
    return w.at<uint32_t>(mask)[std::countr_zero(lanes)];
}
inline void Block::check_locks(const Warp& w, const Instruction& i) const {
    const auto check = [&](const Slot& s) {
        if (!s.constant && s.offset && w.locked[s.offset / 64])
            throw Fault("touches a register of a wgmma that was not waited for");
    };
    check(i.d);
    for (const Slot& s : i.s) check(s);
    for (const Slot& s : i.more) check(s);
    for (const Slot& s : i.sources) check(s);
}

}  // namespace gpu
