// arena.h - memory for a step's activations and workspaces: planned by a dry run of the step, then used by
// it.
//
// All activations and workspaces are in one allocation. A step is ordinary code that takes a tensor where it
// is first written and drops it where its variable ends. rehearse() is a dry run: it runs the step with
// launches switched off and records every take: name, shape, bytes, when it is born and when it dies. Then
// the takes are placed, so that tensors that never live together share addresses. run() runs the same code,
// which takes the same tensors in the same order and gets their planned addresses. A step that departs from
// its rehearsal stops with an error that names the tensor. So the plan always matches the program, because
// the program makes it.
//
// Under AddressSanitizer an access to memory that no live tensor owns stops the program: to a tensor that was
// dropped, or to the gap between a tensor's end and the next.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "llmc/arena_occupancy.h"
#include "llmc/device.h"
#include "llmc/step_plan.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

// ---- what AddressSanitizer is told
//
// Which memory may be accessed. In other builds these functions do nothing.

#if defined(__has_feature)  // in clang
#if __has_feature(address_sanitizer)
#define LLMC_ASAN 1
#endif
#elif defined(__SANITIZE_ADDRESS__) && !defined(__CUDACC__)
#define LLMC_ASAN 1
#endif
#ifdef LLMC_ASAN
#include <sanitizer/asan_interface.h>
#endif

// Allows reads and writes of memory, or forbids them.
inline void open_memory([[maybe_unused]] const void* p, [[maybe_unused]] size_t bytes) {
#ifdef LLMC_ASAN
    __asan_unpoison_memory_region(p, bytes);
#endif
}
inline void close_memory([[maybe_unused]] const void* p, [[maybe_unused]] size_t bytes) {
#ifdef LLMC_ASAN
    __asan_poison_memory_region(p, bytes);
#endif
}

// Stops the program if a byte of this memory is closed. For libraries, which AddressSanitizer does not check.
inline void check_open([[maybe_unused]] const void* p, [[maybe_unused]] size_t bytes) {
#ifdef LLMC_ASAN
    if (const void* closed = __asan_region_is_poisoned(const_cast<void*>(p), bytes))
        static_cast<void>(*static_cast<const volatile char*>(closed));
#endif
}

// ---- the plan and its memory

// Places takes in the given order, each into the smallest gap that fits, so that takes that live
// together do not overlap. Returns the bytes that this needs.
inline size_t place_in_order(const std::vector<Take*>& order) {
    int times = 0;
    for (const Take* t : order) times = std::max(times, t->dies);
    Occupancy occupied(times);
    size_t bytes = 0;
    for (Take* t : order) {
        const size_t need = arena_align(t->bytes);
        t->offset = occupied.find(t->born, t->dies, need);
        occupied.add(t->born, t->dies, t->offset, need);
        bytes = std::max(bytes, t->offset + need);
    }
    return bytes;
}

// Places the plan's takes. Tries the largest first, which on most GPT-2 steps reaches the lower
// bound; otherwise also those that live longest first, and those with the most bytes times life first. Keeps
// the best.
inline void place(Plan& plan) {
    std::vector<Take*> order;
    for (Take& t : plan.takes) order.push_back(&t);
    const auto life = [](const Take* t) { return static_cast<double>(t->dies - t->born); };
    const auto size = [](const Take* t) { return static_cast<double>(t->bytes); };
    using Key = std::function<std::pair<double, double>(const Take*)>;
    const Key keys[] = {[&](const Take* t) { return std::pair(size(t), life(t)); },
                        [&](const Take* t) { return std::pair(life(t), size(t)); },
                        [&](const Take* t) { return std::pair(size(t) * life(t), size(t)); }};
    std::vector<size_t> best;
    for (const Key& key : keys) {
        std::ranges::stable_sort(order, [&](const Take* a, const Take* b) { return key(a) > key(b); });
        const size_t bytes = place_in_order(order);
        if (!best.empty() && bytes >= plan.bytes) continue;
        plan.bytes = bytes;
        best.clear();
        for (const Take& t : plan.takes) best.push_back(t.offset);
        if (bytes == plan.lower_bound) break;
    }
    for (size_t i = 0; i < best.size(); i++) plan.takes[i].offset = best[i];
}

// The number of times at which takes are born and die: these are 0 ... count_times() - 1.
inline int count_times(const Plan& plan) {
    int times = 0;
    for (const Take& t : plan.takes) times = std::max(times, t.dies + 1);
    return times;
}

// Finds the most bytes that live at once, and where in the step that is.
inline void find_peak(Plan& plan) {
    const int times = count_times(plan);
    std::vector<int64_t> change(static_cast<size_t>(times));  // at each time
    for (const Take& t : plan.takes) {
        const int64_t bytes = static_cast<int64_t>(arena_align(t.bytes));
        change[static_cast<size_t>(t.born)] += bytes;
        change[static_cast<size_t>(t.dies)] -= bytes;
    }
    int64_t live = 0, most = 0;
    for (int time = 0; time < times; time++) {
        live += change[static_cast<size_t>(time)];
        if (live > most) most = live, plan.peak_time = time;
    }
    plan.lower_bound = static_cast<size_t>(most);
    for (const Take& t : plan.takes)
        if (t.born == plan.peak_time) plan.peak_at = std::string(t.born_at) + ", " + t.name;
}

// Whether a plan says where in the arena each tensor is. Callers that only compare plans need no offsets;
// such a plan's bytes are the lower bound.
enum class Offsets { Planned, None };

class Arena : simt::Source {
  public:
    Arena() = default;
    Arena(const Arena&) = delete;
    ~Arena() { open_memory(memory_.data(), memory_.bytes()); }  // for the next user of these addresses

    // Does a dry run of the step and plans its memory. Needs no device.
    template <class Step>
    Plan rehearse(Step&& step, Offsets offsets = Offsets::Planned) {
        Plan plan;
        plan.transfers.reserve(most_.transfers);
        if (offsets == Offsets::None) {  // one of many plans that are alike, and is soon forgotten
            plan.takes.reserve(most_.takes);
            plan.work.reserve(most_.work);
        }
        perform(plan, true, step);
        most_.takes = std::max(most_.takes, plan.takes.size());
        most_.work = std::max(most_.work, plan.work.size());
        most_.transfers = std::max(most_.transfers, plan.transfers.size());
        find_peak(plan);
        plan.bytes = plan.lower_bound;
        if (offsets == Offsets::Planned) place(plan);
        return plan;
    }

    // Allocates device memory for the largest of the plans.
    template <class Plans = std::initializer_list<const Plan*>>
    void allocate(const Plans& plans) {
        size_t bytes = 0;
        workspace_bytes_ = 0;
        for (const Plan* p : plans) {
            bytes = std::max(bytes, p->bytes);
            workspace_bytes_ = std::max(workspace_bytes_, arena_align(p->workspace));
        }
        open_memory(memory_.data(), memory_.bytes());
        memory_ = DeviceBuffer();
        memory_ = DeviceBuffer(workspace_bytes_ + bytes, "the activation arena");
        close_memory(memory_.data(), memory_.bytes());
    }

    // Runs the step in the memory of its plan.
    template <class Step>
    void run(Plan& plan, Step&& step) {
        assert(workspace_bytes_ + plan.bytes <= memory_.bytes());
        perform(plan, false, step);
    }

    // Takes a tensor, uninitialized, that lives until the returned handle ends.
    template <class T>
    Tensor<T> take(const char* name, Shape shape, const char* kind = "activation") {
        const int index = next_++;
        const size_t bytes = static_cast<size_t>(shape.size()) * sizeof(T);
        if (rehearsing_) {
            Take t{name, kind, shape, dtype_name<T>(), bytes, 0, clock_++, -1, Range::place(), ""};
            plan_->takes.push_back(std::move(t));
            live_.push_back(true);
            return Tensor<T>(nullptr, shape, this, index);
        }
        check_releases();
        if (static_cast<size_t>(index) >= plan_->takes.size())
            bug("arena: the step takes '%s' (%s), which its rehearsal did not", name, shape.text());
        const Take& t = plan_->takes[static_cast<size_t>(index)];
        if (t.name != name || t.bytes != bytes)
            bug("arena: the step takes '%s' (%s) where its rehearsal took '%s' (%s)", name, shape.text(),
                t.name, t.shape.text());
        if (t.born != clock_++) bug("arena: '%s' is taken at another moment than in its rehearsal", name);
        live_[static_cast<size_t>(index)] = true;
        open_memory(address(t), t.bytes);
        return Tensor<T>(reinterpret_cast<T*>(address(t)), shape, this, index);
    }

    // Plans the memory outside the arena into which each thread copies `bytes` of a product's operands.
    void counts_copies(size_t bytes) {
        if (plan_) plan_->copied = std::max(plan_->copied, bytes);
    }
    // Scratch for one library call, or for the workers of one launch on a CPU. All calls share it, because
    // the stream runs them one after the other. Only the bytes asked for last may be used.
    void* workspace(size_t bytes) override {
        if (rehearsing_) {
            plan_->workspace = std::max(plan_->workspace, bytes);
            return memory_.data();
        }
        if (bytes > workspace_bytes_)
            bug("arena: a library or a launch wants more scratch than in the rehearsal");
        close_memory(memory_.data(), workspace_bytes_);
        open_memory(memory_.data(), bytes);
        return memory_.data();
    }

    // Calls body() for up to `turns` turns. Every turn must take the same tensors, so a dry run does one
    // turn. body() returns whether to go on. A loop that stops early, even in its first turn, leaves the
    // arena as a whole loop does. Loops may nest.
    template <class Body>
    void repeat(int turns, Body&& body) {
        if (turns <= 0) return;
        const int first = next_, time = clock_;
        if (rehearsing_) {
            const size_t before = plan_->work.size(), moved_before = plan_->transfers.size();
            const size_t loop = plan_->loops.size();
            plan_->loops.emplace_back();
            body();
            for (size_t i = before; i < plan_->work.size(); i++) {
                Work& w = plan_->work[i];
                w.flops *= turns, w.bytes *= turns, w.calls *= turns;
            }
            for (size_t i = moved_before; i < plan_->transfers.size(); i++)
                plan_->transfers[i].bytes *= turns;
            plan_->loops[loop] = {next_, clock_, static_cast<int>(plan_->loops.size())};
            return;
        }
        if (static_cast<size_t>(loop_) >= plan_->loops.size())
            bug("arena: the step repeats a loop that its rehearsal did not");
        const Plan::Loop after = plan_->loops[static_cast<size_t>(loop_)];
        const int inner = loop_ + 1;
        for (int i = 0; i < turns; i++) {
            next_ = first;
            clock_ = time;
            loop_ = inner;
            if (!body()) break;
        }
        next_ = after.takes;
        clock_ = after.time;
        loop_ = after.loops;
    }

    bool rehearsing() const { return rehearsing_; }
    bool has_room_for(const Plan& plan) const {
        return plan.workspace <= workspace_bytes_ && workspace_bytes_ + plan.bytes <= memory_.bytes();
    }
    size_t bytes() const { return memory_.bytes(); }

  private:
    friend void arena_give_back(Arena& arena, int take);

    template <class Step>
    void perform(Plan& plan, bool rehearsing, Step& step) {
        assert(!plan_);
        struct Close {  // also when the step fails
            Arena& arena;
            ~Close() {
                close_memory(arena.memory_.data(), arena.memory_.bytes());
                arena.plan_ = nullptr;
                arena.rehearsing_ = simt::launches_off = false;
                simt::source = nullptr;
                dry_run = nullptr;
            }
        } close{*this};
        plan_ = &plan;
        rehearsing_ = simt::launches_off = rehearsing;
        simt::source = this;
        DryRun dry{plan, clock_};
        dry_run = rehearsing ? &dry : nullptr;
        next_ = clock_ = loop_ = 0;
        live_.assign(plan.takes.size(), false);
        released_wrongly_ = -1;
        step();
        check_releases();
        for (size_t i = 0; i < live_.size(); i++)
            if (live_[i]) bug("arena: '%s' outlives the step", plan.takes[i].name);
        if (static_cast<size_t>(next_) != plan.takes.size())
            bug("arena: the step ends before it takes '%s', which its rehearsal did",
                plan.takes[static_cast<size_t>(next_)].name);
    }
    char* address(const Take& t) const { return memory_.data() + workspace_bytes_ + t.offset; }
    void check_releases() const {
        if (released_wrongly_ >= 0)
            bug("arena: '%s' is let go at another moment than in its rehearsal",
                plan_->takes[static_cast<size_t>(released_wrongly_)].name);
    }

    DeviceBuffer memory_;
    size_t workspace_bytes_ = 0;
    Plan* plan_ = nullptr;
    bool rehearsing_ = false;
    int next_ = 0, clock_ = 0, loop_ = 0;
    struct {
        size_t takes = 0, work = 0, transfers = 0;
    } most_;                     // entries of a rehearsal so far
    std::vector<bool> live_;     // by take
    int released_wrongly_ = -1;  // the first take released at an unplanned moment; destructors cannot fail
};

inline void arena_give_back(Arena& arena, int take) {
    if (!arena.plan_) return;  // the step has failed
    arena.live_[static_cast<size_t>(take)] = false;
    Take& t = arena.plan_->takes[static_cast<size_t>(take)];
    const int now = arena.clock_++;
    if (arena.rehearsing_) {
        t.dies = now;
        t.dies_at = Range::place();
        return;
    }
    close_memory(arena.address(t), arena_align(t.bytes));
    if (t.dies != now && arena.released_wrongly_ < 0) arena.released_wrongly_ = take;
}

// Fills a tensor with zeros.
template <class T>
void fill_zero(Tensor<T>& t, Stream stream) {
    device_fill(t.data(), 0, static_cast<size_t>(t.bytes()), stream);
}
