// simt_fibers.h - the faithful CPU build: a block's threads as fibers, in warps of 32, for the tests.
//
// A CUDA thread runs until it must wait: at a barrier, or in a warp collective, where all 32 lanes bring
// their values and the last to arrive computes for all. One fiber runs thread after thread until one of them
// waits; then the next thread gets a fiber of its own. Threads and blocks start in forward, reverse or random
// order. After a wait, reverse order continues with the thread that was released last, so that a warp runs
// far ahead of the others, and random order with any. So a missing barrier shows as a wrong number in some
// order. Dynamic shared memory can be filled with NaN first. Threads that meet at different barriers, or
// leave others waiting, abort the program.
//
// hopper_cpu.h adds the units of a Hopper. Sanitizers are told of the fibers. For ThreadSanitizer each CUDA
// thread of a block is a thread of its own, and only the block's start and end, barriers and collectives
// order them. So what it reports is a race in the kernel.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>

#if !defined(__x86_64__)
#error "the faithful build switches fibers in x86-64 assembly"
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif
#ifdef SIMT_VALGRIND
#include <valgrind/valgrind.h>
#endif

// The scheduler itself is not instrumented: it passes stacks between threads on purpose.
#define SIMT_RUNTIME __attribute__((no_sanitize("thread", "address")))

namespace simt {

enum class Order { Forward, Reverse, Random };
struct Config {
    Order order = Order::Forward;
    unsigned seed = 1;
    bool poison = false;  // fill dynamic shared memory with NaN before each block
};
inline Config config;

constexpr unsigned kMaxThreads = 1024;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kStackBytes = 256 * 1024;
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif
// Not a power of two: else the tops of all stacks share one cache set, and a switch costs double.
constexpr size_t kStackStride = kStackBytes + 64 * 13;
#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadPerFiber = true;
#else
constexpr bool kThreadPerFiber = false;
#endif

[[noreturn]] inline void die(const char* what) {
    fprintf(stderr, "simt: %s (block %u,%u,%u thread %u,%u,%u)\n", what, blockIdx.x, blockIdx.y, blockIdx.z,
            threadIdx.x, threadIdx.y, threadIdx.z);
    abort();
}

struct Fiber {
    void* stack_pointer = nullptr;
    Fiber* next = nullptr;
    unsigned thread = 0;         // its linear index in the block
    char* stack = nullptr;       // its lowest address; null for the OS thread's own
    void* fake_stack = nullptr;  // AddressSanitizer's
    void* tsan = nullptr;
};

struct Queue {
    Fiber *head = nullptr, *tail = nullptr;
    unsigned count = 0;
    SIMT_RUNTIME void push(Fiber* f) {
        f->next = nullptr;
        (head ? tail->next : head) = f;
        tail = f;
        count++;
    }
    SIMT_RUNTIME void push_front(Fiber* f) {
        f->next = head;
        if (!head) tail = f;
        head = f;
        count++;
    }
    SIMT_RUNTIME Fiber* pop(unsigned at) {
        Fiber** link = &head;
        Fiber* before = nullptr;
        for (; at > 0; at--) before = *link, link = &before->next;
        Fiber* f = *link;
        *link = f->next;
        if (tail == f) tail = before;
        count--;
        return f;
    }
};

// Where the threads of a warp or a block meet.
struct Meeting {
    Queue waiting;
    unsigned expected = 0;       // threads that have not returned
    const void* what = nullptr;  // the barrier or collective
    void* brought[32];           // by lane, in a warp's collective
    char sync[2];                // ThreadSanitizer's handles, by parity of `round`
    unsigned round = 0;
};

// One OS thread that runs blocks.
struct Worker {
    Fiber main;
    Fiber* current = nullptr;
    Fiber* idle = nullptr;     // fibers that can be reused
    Fiber* retired = nullptr;  // under ThreadSanitizer: used in this block, reused after its end
    Queue ready;
    unsigned started = 0, threads = 0, live = 0, fibers = 0, random = 1;
    unsigned order[kMaxThreads];
    Meeting block, warps[kMaxThreads / 32];
    char* stacks = nullptr;
    SharedMemory shared;
    struct HopperUnits* hopper = nullptr;  // hopper_cpu.h's
    void (*body)(const void*) = nullptr;
    const void* argument = nullptr;
    char sync[2];  // ThreadSanitizer: the block's start and end
};
inline __thread Worker* this_worker;

// Sets each field: a struct that is copied right after its fields were stored stalls the load (28 ns a
// thread).
SIMT_RUNTIME inline void set_thread_index(unsigned i) {
    threadIdx.x = i % blockDim.x;
    threadIdx.y = i / blockDim.x % blockDim.y;
    threadIdx.z = i / (blockDim.x * blockDim.y);
}

#ifdef __AVX512F__
#define SIMT_CLOBBER_512                                                                                 \
    , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", \
        "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", "k7"
#else
#define SIMT_CLOBBER_512
#endif

// Saves the current state in `from` and continues in `to`. Every register is a clobber, so the compiler saves
// those in use; only the stack and frame pointers are saved here. Skips the red zone first.
SIMT_RUNTIME __attribute__((always_inline)) inline void switch_stacks(Fiber* from, Fiber* to) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->stack ? kStackBytes : 0);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(to->tsan, __tsan_switch_to_fiber_no_sync);
#endif
    void** save = &from->stack_pointer;
    void* load = to->stack_pointer;
    asm volatile(
        "lea -128(%%rsp), %%rsp\n\t"
        "push %%rbp\n\t"
        "lea 1f(%%rip), %%rax\n\t"
        "push %%rax\n\t"
        "mov %%rsp, (%0)\n\t"
        "mov %1, %%rsp\n\t"
        "pop %%rax\n\t"
        "jmp *%%rax\n"
        "1:\tpop %%rbp\n\t"
        "lea 128(%%rsp), %%rsp"
        : "+D"(save), "+S"(load)::"rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14",
          "r15", "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
          "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15" SIMT_CLOBBER_512);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
}

SIMT_RUNTIME inline unsigned next_random(Worker& w) {  // xorshift32
    w.random ^= w.random << 13;
    w.random ^= w.random >> 17;
    w.random ^= w.random << 5;
    return w.random;
}

SIMT_RUNTIME inline Fiber* make_fiber(Worker& w) {
    if (!w.stacks) {
        void* p = mmap(nullptr, kStackStride * kMaxThreads, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) die("no memory for the stacks of fibers");
        w.stacks = static_cast<char*>(p);
    }
    Fiber* f = new Fiber();
    f->stack = w.stacks + kStackStride * w.fibers++;
#ifdef SIMT_VALGRIND
    VALGRIND_STACK_REGISTER(f->stack, f->stack + kStackBytes);
#endif
    return f;
}

SIMT_RUNTIME void run_threads();

// A fiber that will start the next threads of the block.
SIMT_RUNTIME inline Fiber* starting_fiber(Worker& w) {
    Fiber* f = w.idle;
    if (f)
        w.idle = f->next;
    else
        f = make_fiber(w);
    void** top =
        reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(f->stack + kStackBytes - 64) & ~uintptr_t{63});
    *--top = nullptr;  // no return address: run_threads never returns; the stack is aligned as after a call
    *--top = reinterpret_cast<void*>(&run_threads);
    f->stack_pointer = top;
    return f;
}

// Chooses who runs next: a fiber that waited and may continue, or one that starts the next thread.
SIMT_RUNTIME inline Fiber* choose(Worker& w) {
    const bool can_start = w.started < w.threads;
    if (w.ready.count + can_start == 0) die("deadlock: a barrier is not reached by all live threads");
    unsigned at = 0;
    if (config.order == Order::Random) at = next_random(w) % (w.ready.count + can_start);
    return at < w.ready.count ? w.ready.pop(at) : starting_fiber(w);
}

SIMT_RUNTIME inline void yield_to(Worker& w, Fiber* self, Fiber* to) {
    if (to == self) return;
    w.current = to;
    switch_stacks(self, to);
    set_thread_index(self->thread);
}

SIMT_RUNTIME inline void release(Worker& w, Meeting& m) {
    m.round++;
    while (m.waiting.count) {
        Fiber* f = m.waiting.pop(0);
        if (config.order == Order::Reverse)
            w.ready.push_front(f);
        else
            w.ready.push(f);
    }
}

// Waits until all threads of the meeting have arrived; the last one runs last() before any continues. `what`
// identifies the collective, so that threads that meet in different ones are caught.
template <class Last>
SIMT_RUNTIME inline void meet(Worker& w, Meeting& m, const void* what, Last&& last) {
    Fiber* self = w.current;
    if (m.waiting.count == 0)
        m.what = what;
    else if (m.what != what)
        die("threads meet in different collectives");
    [[maybe_unused]] char* sync = &m.sync[m.round & 1];
#if defined(__SANITIZE_THREAD__)
    __tsan_release(sync);
#endif
    if (m.waiting.count + 1 == m.expected) {
        last();
        release(w, m);
        if (config.order == Order::Random) {
            w.ready.push(self);
            yield_to(w, self, choose(w));
        }
    } else {
        m.waiting.push(self);
        yield_to(w, self, choose(w));
    }
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(sync);
#endif
}

inline const char kBarrier = 0;

// A thread that has returned is no longer expected anywhere. With that, all threads at a barrier may have
// arrived.
SIMT_RUNTIME inline void thread_returned(Worker& w, unsigned thread) {
    w.live--;
    for (Meeting* m : {&w.block, &w.warps[thread / 32]}) {
        m->expected--;
        if (m->waiting.count == 0) continue;
        if (m->what != &kBarrier) die("a thread returned while others wait in a collective");
        if (m->waiting.count == m->expected) release(w, *m);
    }
}

// What a fiber does: it starts one thread after another until one of them has had to wait for others, and
// leaves.
SIMT_RUNTIME __attribute__((noinline)) inline void run_threads() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
    Worker& w = *this_worker;
    Fiber* self = w.current;
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(&w.sync[0]);
#endif
    while (w.started < w.threads) {
        self->thread = w.order[w.started++];
        set_thread_index(self->thread);
        w.body(w.argument);
        thread_returned(w, self->thread);
        if (kThreadPerFiber || w.ready.count) break;
    }
    Fiber* to = w.live ? choose(w) : &w.main;
    Fiber*& list = kThreadPerFiber ? w.retired : w.idle;
    self->next = list;
    list = self;
#if defined(__SANITIZE_THREAD__)
    __tsan_release(&w.sync[1]);
#endif
    w.current = to;
    switch_stacks(self, to);
    __builtin_unreachable();
}

SIMT_RUNTIME inline void run_block(Worker& w, unsigned threads) {
    w.started = 0;
    w.threads = w.live = w.block.expected = threads;
    for (unsigned i = 0; i * 32 < threads; i++) w.warps[i].expected = std::min(threads - i * 32, 32u);
    for (unsigned i = 0; i < threads; i++) w.order[i] = config.order == Order::Reverse ? threads - 1 - i : i;
    if (config.order == Order::Random)
        for (unsigned i = threads - 1; i > 0; i--) std::swap(w.order[i], w.order[next_random(w) % (i + 1)]);
#if defined(__SANITIZE_THREAD__)
    // A thread of ThreadSanitizer is slow to create (0.1 ms), so a fiber keeps its own. The start and the end
    // of blocks order what it does.
    while (w.fibers < threads) {
        Fiber* f = make_fiber(w);
        f->tsan = __tsan_create_fiber(0);
        f->next = w.idle;
        w.idle = f;
    }
    w.main.tsan = __tsan_get_current_fiber();
    __tsan_release(&w.sync[0]);
#endif
    w.current = starting_fiber(w);
    switch_stacks(&w.main, w.current);
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(&w.sync[1]);
    while (Fiber* r = w.retired) {
        w.retired = r->next;
        r->next = w.idle;
        w.idle = r;
    }
#endif
}

// Workers outlive launches, to keep their stacks. Launches do not overlap.
inline Worker& worker(size_t i) {
    static auto& workers = *new std::vector<Worker*>();
    while (workers.size() <= i) workers.push_back(new Worker());
    return *workers[i];
}

// Runs body() for every thread of every block. The blocks run on OS threads that are started here, because
// ThreadSanitizer cannot follow OpenMP's.
template <class Body>
void run_grid(dim3 grid, dim3 block, size_t shared_bytes, Body&& body) {
    const size_t blocks = static_cast<size_t>(grid.x) * grid.y * grid.z;
    const unsigned threads = block.x * block.y * block.z;
    if (threads == 0 || threads > kMaxThreads) die("a block has 1 to 1024 threads");
    std::atomic<size_t> next{0};
    auto work = [&](Worker* w) {
        this_worker = w;
        w->body = [](const void* p) { (*static_cast<const std::remove_reference_t<Body>*>(p))(); };
        w->argument = &body;
        dynamic_shared = w->shared.grow(shared_bytes);
        gridDim = {grid.x, grid.y, grid.z};
        blockDim = {block.x, block.y, block.z};
        for (size_t i; (i = next.fetch_add(1)) < blocks;) {
            const size_t at = config.order == Order::Reverse ? blocks - 1 - i : i;
            blockIdx = {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                        static_cast<unsigned>(at / (static_cast<size_t>(grid.x) * grid.y))};
            w->random = (config.seed * 2654435761u ^ static_cast<unsigned>(at * 40503u)) | 1;
            if (config.poison) memset(dynamic_shared, 0xff, shared_bytes);
            run_block(*w, threads);
        }
    };
    const size_t workers = std::min<size_t>(blocks, static_cast<size_t>(omp_get_max_threads()));
    std::vector<std::thread> others;
    for (size_t i = 1; i < workers; i++) others.emplace_back(work, &worker(i));
    work(&worker(0));
    for (std::thread& t : others) t.join();
}

inline Meeting& this_warp(Worker& w) {
    Meeting& m = w.warps[w.current->thread / 32];
    if (m.expected != 32) die("a warp collective needs 32 live lanes");
    return m;
}

// A warp's collective: every lane brings a pointer to something on its stack, which stays in place while it
// waits, and the last lane to arrive calls last(brought) with all 32. `what` identifies the collective.
template <class Last>
SIMT_RUNTIME __attribute__((noinline)) void warp_collective(const void* what, void* mine, Last&& last) {
    Worker& w = *this_worker;
    Meeting& m = this_warp(w);
    m.brought[w.current->thread % 32] = mine;
    meet(w, m, what, [&] { last(m.brought); });
}

template <class T>
struct Shuffle {
    T value, result;
};
inline const char kShuffle = 0;
template <class T, class Source>
SIMT_RUNTIME inline T shuffle(T v, Source source) {
    Shuffle<T> mine{v, v};
    warp_collective(&kShuffle, &mine, [&](void** brought) SIMT_RUNTIME {
        // This `source` is the last lane's: the whole warp must shuffle alike.
        auto at = [&](int l) SIMT_RUNTIME -> Shuffle<T>& { return *static_cast<Shuffle<T>*>(brought[l]); };
        for (int l = 0; l < 32; l++) at(l).result = at(source(l) & 31).value;
    });
    return mine.result;
}
}  // namespace simt

SIMT_RUNTIME __attribute__((noinline)) inline void __syncthreads() {
    simt::Worker& w = *simt::this_worker;
    simt::meet(w, w.block, &simt::kBarrier, [] {});
}
SIMT_RUNTIME __attribute__((noinline)) inline void __syncwarp() {
    simt::Worker& w = *simt::this_worker;
    simt::meet(w, w.warps[w.current->thread / 32], &simt::kBarrier, [] {});
}
template <class T>
SIMT_RUNTIME inline T __shfl_xor_sync(unsigned, T v, int mask) {
    return simt::shuffle(v, [mask](int l) { return l ^ mask; });
}
// `source` must be the same in the whole warp (a broadcast).
template <class T>
SIMT_RUNTIME inline T __shfl_sync(unsigned, T v, int source) {
    return simt::shuffle(v, [source](int) { return source; });
}
