// test_arena.cpp - the memory plan: the step follows it to the byte, tensors that live together do not
// overlap, it is nearly as small as possible, and a step that departs from its rehearsal is stopped by an
// error that names the tensor.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/arena.h"
#include "llmc/random.h"
#include "test/file_helpers.h"

namespace {

using Bytes = Tensor<char>;
using Step = std::function<void()>;

Bytes take(Arena& arena, const char* name, int64_t bytes) { return arena.take<char>(name, {bytes}); }

void expect_no_overlap(const Plan& plan) {
    int overlaps = 0, beyond = 0, unaligned = 0;
    for (const Take& a : plan.takes) {
        beyond += a.offset + a.bytes > plan.bytes;
        unaligned += a.offset % kArenaAlignment != 0;
        for (const Take& b : plan.takes) {
            const bool together = &a != &b && a.born < b.dies && b.born < a.dies;
            overlaps += together && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
        }
    }
    EXPECT_EQ(overlaps, 0);
    EXPECT_EQ(beyond, 0);
    EXPECT_EQ(unaligned, 0);
    EXPECT_GE(plan.bytes, plan.lower_bound);
}

// Where the plan puts take i of a step that runs.
char* planned_address(Arena& arena, const Plan& plan, size_t i) {
    return static_cast<char*>(arena.workspace(0)) + arena_align(plan.workspace) + plan.takes[i].offset;
}

// A step of random takes and releases. When it runs, each tensor is filled with a byte of its own, which must
// still be there when the tensor is dropped.
class RandomStep {
  public:
    RandomStep(Arena& arena, uint64_t seed, int takes) : arena_(arena), seed_(seed), takes_(takes) {}

    void operator()() {
        std::vector<Bytes> live;
        std::vector<char> filled;
        addresses.clear();
        for (uint64_t i = 0; i < static_cast<uint64_t>(takes_); i++) {
            const auto size =
                static_cast<int64_t>(random_bits(seed_, i, 0) % (random_bits(seed_, i, 1) % 20000 + 1));
            live.push_back(take(arena_, "random", size));
            filled.push_back(static_cast<char>(i % 251));
            addresses.push_back(live.back().data());
            if (!arena_.rehearsing()) memset(live.back().data(), filled.back(), static_cast<size_t>(size));
            while (!live.empty() && random_bits(seed_, i, 2 + live.size()) % 5 < 2) {
                const size_t at = random_bits(seed_, i, 1000 + live.size()) % live.size();
                check(live[at], filled[at]);
                live.erase(live.begin() + static_cast<ptrdiff_t>(at));
                filled.erase(filled.begin() + static_cast<ptrdiff_t>(at));
            }
        }
        while (!live.empty()) {
            check(live.back(), filled.back());
            live.pop_back();
            filled.pop_back();
        }
    }
    std::vector<char*> addresses;  // of the takes, in order
    int damaged = 0;               // tensors that were overwritten

  private:
    void check(const Bytes& t, char want) {
        if (!arena_.rehearsing())
            damaged += !std::all_of(t.data(), t.data() + t.size(), [=](char c) { return c == want; });
    }
    Arena& arena_;
    uint64_t seed_;
    int takes_;
};

TEST(Arena, RandomStepsGetTheirPlannedAddressesAndNeverOverlap) {
    for (uint64_t seed = 1; seed <= 20; seed++) {
        SCOPED_TRACE(seed);
        Arena arena;
        RandomStep step(arena, seed, 300);
        Plan plan = arena.rehearse(step);
        ASSERT_EQ(plan.takes.size(), 300u);
        EXPECT_EQ(step.addresses, std::vector<char*>(300, nullptr));
        expect_no_overlap(plan);
        arena.allocate({&plan});
        EXPECT_EQ(arena.bytes(), plan.bytes);
        for (int turn = 0; turn < 2; turn++) {
            arena.run(plan, step);
            for (size_t i = 0; i < 300; i++) ASSERT_EQ(step.addresses[i], planned_address(arena, plan, i));
        }
        EXPECT_EQ(step.damaged, 0);
    }
}

// The takes of a training step of GPT-2, in the order of a forward and backward pass, in bf16.
struct GptStep {
    int layers;
    int64_t C;
    bool keep_norm, keep_gelu;
    int64_t rows = 4 * 1024, vocabulary = 50304;
};

struct GptBlock {
    Bytes ln_1, qkv, attention, middle, ln_2, up, gelu, residual, statistics;
};

void forward(Arena& arena, const GptStep& s, GptBlock& b) {
    const int64_t n = s.rows * s.C * 2;
    b.statistics = take(arena, "statistics", s.rows * 20);
    b.ln_1 = take(arena, "ln_1", n);
    b.qkv = take(arena, "qkv", 3 * n);
    if (!s.keep_norm) b.ln_1.drop();
    b.attention = take(arena, "attention", n);
    {
        Bytes projected = take(arena, "projected", n);
        b.middle = take(arena, "middle", n);
        b.ln_2 = take(arena, "ln_2", n);
    }
    b.up = take(arena, "up", 4 * n);
    if (!s.keep_norm) b.ln_2.drop();
    b.gelu = take(arena, "gelu", 4 * n);
    Bytes down = take(arena, "down", n);
    if (!s.keep_gelu) b.gelu.drop();
    b.residual = take(arena, "residual", n);
}

void backward(Arena& arena, const GptStep& s, GptBlock& b) {
    const int64_t n = s.rows * s.C * 2;
    auto again = [&](Bytes& t, const char* name, int64_t bytes) {
        if (!t) t = take(arena, name, bytes);
        Bytes sums = take(arena, "column_sums", s.C * 64 * 4);
    };
    b.residual.drop();
    again(b.gelu, "gelu", 4 * n);
    b.gelu.drop();
    Bytes d_up = take(arena, "d_up", 4 * n);
    b.up.drop();
    again(b.ln_2, "ln_2", n);
    b.ln_2.drop();
    Bytes d_ln_2 = take(arena, "d_ln_2", n);
    d_up.drop();
    d_ln_2.drop();
    b.middle.drop();
    Bytes d_attention = take(arena, "d_attention", n), d_qkv = take(arena, "d_qkv", 3 * n);
    d_attention.drop();
    b.attention.drop();
    b.qkv.drop();
    again(b.ln_1, "ln_1", n);
    Bytes d_ln_1 = take(arena, "d_ln_1", n);
}

void gpt_step(Arena& arena, const GptStep& s) {
    std::vector<GptBlock> blocks(static_cast<size_t>(s.layers));
    Bytes input = take(arena, "input", s.rows * s.C * 2), d_stream;
    for (GptBlock& b : blocks) forward(arena, s, b);
    {
        Range range("head");
        Bytes ln_f = take(arena, "ln_f", s.rows * s.C * 2),
              logits = take(arena, "logits", s.rows * s.vocabulary * 2);
        Bytes losses = take(arena, "losses", s.rows * 4);
        d_stream = take(arena, "d_stream", s.rows * s.C * 2);
    }
    while (!blocks.empty()) {
        backward(arena, s, blocks.back());
        blocks.pop_back();
    }
}

TEST(Arena, GptStepsTakeAtMostOnePercentMoreThanTheBound) {
    for (const GptStep& s :
         {GptStep{12, 768, true, true}, GptStep{12, 768, true, false}, GptStep{12, 768, false, false},
          GptStep{48, 1600, true, true}, GptStep{48, 1600, false, false}}) {
        SCOPED_TRACE(std::to_string(s.layers) + " layers, norm " + std::to_string(s.keep_norm) + ", gelu " +
                     std::to_string(s.keep_gelu));
        Arena arena;
        const Plan plan = arena.rehearse([&] { gpt_step(arena, s); });
        EXPECT_GT(plan.lower_bound, static_cast<size_t>(s.layers * s.rows * s.C * 2 * 10));
        EXPECT_LE(static_cast<double>(plan.bytes), 1.01 * static_cast<double>(plan.lower_bound));
        expect_no_overlap(plan);
    }
}

Take interval(size_t bytes, int born, int dies) {
    Take t;
    t.name = std::to_string(born);
    t.bytes = bytes;
    t.born = born;
    t.dies = dies;
    return t;
}

// Compared with a scan of all stays, which finds the smallest gap by definition.
TEST(Occupancy, FindsTheSmallestGapOfAll) {
    struct Stay {
        int from, to;
        size_t begin, end;
    };
    int in_gaps = 0;
    for (uint64_t seed = 1; seed <= 30; seed++) {
        const uint64_t times = 1 + random_bits(seed, 0, 0) % 400,
                       longest = 1 + random_bits(seed, 0, 1) % times;
        Occupancy occupied(static_cast<int>(times));
        std::vector<Stay> stays;  // by rising offset
        for (uint64_t i = 1; i <= 300; i++) {
            const int from = static_cast<int>(random_bits(seed, i, 0) % times),
                      to = std::min(static_cast<int>(times),
                                    from + 1 + static_cast<int>(random_bits(seed, i, 1) % longest));
            const size_t bytes = 256 * (1 + random_bits(seed, i, 2) % 9);
            size_t end = 0, want = 0, smallest = SIZE_MAX;
            for (const Stay& s : stays) {
                if (s.from >= to || from >= s.to) continue;
                if (s.begin >= end + bytes && s.begin - end < smallest) smallest = s.begin - end, want = end;
                end = std::max(end, s.end);
            }
            if (smallest == SIZE_MAX) want = end;
            ASSERT_EQ(occupied.find(from, to, bytes), want) << "seed " << seed << ", stay " << i;
            occupied.add(from, to, want, bytes);
            in_gaps += smallest != SIZE_MAX;
            const Stay stay{from, to, want, want + bytes};
            stays.insert(std::upper_bound(stays.begin(), stays.end(), stay,
                                          [](const Stay& a, const Stay& b) { return a.begin < b.begin; }),
                         stay);
        }
    }
    EXPECT_GT(in_gaps, 1000);
}

TEST(FindPeak, AgreesWithCountingAtEveryTime) {
    for (uint64_t seed = 1; seed <= 100; seed++) {
        Plan plan;
        const uint64_t takes = 1 + random_bits(seed, 0) % 40;
        for (uint64_t i = 1; i <= takes; i++) {
            const int born = static_cast<int>(random_bits(seed, i, 0) % 50);
            const int dies = born + 1 + static_cast<int>(random_bits(seed, i, 1) % 20);
            plan.takes.push_back(interval(random_bits(seed, i, 2) % 5000, born, dies));
        }
        size_t most = 0;
        int most_at = 0;
        for (int time = 0; time < 100; time++) {
            size_t live = 0;
            for (const Take& t : plan.takes)
                live += t.born <= time && time < t.dies ? arena_align(t.bytes) : 0;
            if (live > most) most = live, most_at = time;
        }
        find_peak(plan);
        ASSERT_EQ(plan.lower_bound, most);
        ASSERT_EQ(plan.peak_time, most_at);
        place(plan);
        expect_no_overlap(plan);
    }
}

TEST(FindPeak, NamesTheRangeAndTheTensor) {
    Arena arena;
    const Plan plan = arena.rehearse([&] {
        Range outer("backward");
        Bytes a = take(arena, "small", 100);
        {
            Range inner("block", 11);
            Bytes b = take(arena, "large", 1000);
        }
        Bytes c = take(arena, "other", 500);
    });
    EXPECT_EQ(plan.peak_at, "backward block 11, large");
    EXPECT_EQ(plan.lower_bound, 256u + 1024u);
    EXPECT_EQ(plan.takes[1].born_at, "backward block 11");
    EXPECT_EQ(plan.takes[2].dies_at, "backward");
}

// Steps that differ from the one that was rehearsed: that takes a, b, drops a, takes c, loops twice over d,
// takes e.
class Departures : public testing::Test {
  protected:
    void rehearsed() {
        Bytes a = take(arena, "a", 600), b = take(arena, "b", 300);
        a.drop();
        Bytes c = take(arena, "c", 600);
        loop();
        Bytes e = take(arena, "e", 10);
    }
    void loop() {
        arena.repeat(2, [&] { return bool(take(arena, "d", 50)); });
    }
    void expect_stopped(const Step& step, std::initializer_list<std::string> parts) {
        expect_bug([&] { arena.run(plan, step); }, parts);
        EXPECT_FALSE(simt::launches_off);
        arena.run(plan, [&] { rehearsed(); });  // nothing is left of the failed step
    }
    void SetUp() override {
        plan = arena.rehearse([&] { rehearsed(); });
        arena.allocate({&plan});
    }
    Arena arena;
    Plan plan;
};

TEST_F(Departures, AnotherName) {
    expect_stopped([&] { Bytes a = take(arena, "x", 600); }, {"'x' (600)", "rehearsal took 'a' (600)"});
}

TEST_F(Departures, AnotherSize) {
    expect_stopped([&] { Bytes a = take(arena, "a", 601); }, {"'a' (601)", "rehearsal took 'a' (600)"});
}

TEST_F(Departures, AnotherOrder) {
    expect_stopped([&] { Bytes b = take(arena, "b", 300), a = take(arena, "a", 600); },
                   {"'b'", "rehearsal took 'a'"});
}

TEST_F(Departures, OneMore) {
    expect_stopped(
        [&] {
            rehearsed();
            Bytes f = take(arena, "f", 7);
        },
        {"'f' (7)", "which its rehearsal did not"});
}

TEST_F(Departures, OneFewer) {
    expect_stopped(
        [&] {
            Bytes a = take(arena, "a", 600), b = take(arena, "b", 300);
            a.drop();
            Bytes c = take(arena, "c", 600);
            loop();
        },
        {"'c' is let go at another moment"});
    expect_stopped([&] {}, {"ends before it takes 'a'"});
}

TEST_F(Departures, LetGoTooLate) {
    expect_stopped(
        [&] {
            Bytes a = take(arena, "a", 600), b = take(arena, "b", 300);
            Bytes c = take(arena, "c", 600);
        },
        {"'c' is taken at another moment"});
}

// As many takes and releases as planned, but a still lives when c gets its memory.
TEST_F(Departures, AnotherIsLetGo) {
    ASSERT_EQ(plan.takes[2].offset, plan.takes[0].offset);
    expect_stopped(
        [&] {
            Bytes a = take(arena, "a", 600), b = take(arena, "b", 300);
            b.drop();
            Bytes c = take(arena, "c", 600);
        },
        {"'b' is let go at another moment"});
}

TEST_F(Departures, OneOutlivesTheStep) {
    Bytes kept;
    const Step keeping = [&] { kept = take(arena, "f", 10); };
    plan = arena.rehearse([&] { Bytes f = take(arena, "f", 10); });
    expect_bug([&] { arena.run(plan, keeping); }, {"'f' outlives the step"});
    kept.drop();
    expect_bug([&] { arena.rehearse(keeping); }, {"'f' outlives the step"});
    kept.drop();
    EXPECT_FALSE(simt::launches_off);
}

TEST_F(Departures, OneMoreLoop) {
    Plan no_loop = arena.rehearse([&] { arena.repeat(0, [] { return true; }); });
    expect_bug([&] { arena.run(no_loop, [&] { loop(); }); }, {"a loop that its rehearsal did not"});
}

TEST_F(Departures, AFailingStepLeavesTheArenaReady) {
    const Step failing = [&] {
        Bytes a = take(arena, "a", 600);
        fail("a mistake of the user's");
    };
    expect_user_error([&] { arena.run(plan, failing); }, {"a mistake"});
    arena.run(plan, [&] { rehearsed(); });
    expect_user_error([&] { arena.rehearse(failing); }, {"a mistake"});
    EXPECT_FALSE(simt::launches_off);
    EXPECT_FALSE(arena.rehearsing());
}

TEST(ArenaDeathTest, APlanThatWasNotAllocatedDoesNotRun) {
    Arena arena;
    Plan plan = arena.rehearse([&] { Bytes a = take(arena, "a", 600); });
    EXPECT_DEATH(arena.run(plan, [&] { Bytes a = take(arena, "a", 600); }), "plan.bytes <= memory_.bytes");
}

TEST(Arena, RehearsesWithoutLaunching) {
    Arena arena;
    Plan plan = arena.rehearse([&] {
        EXPECT_TRUE(simt::launches_off);
        EXPECT_TRUE(arena.rehearsing());
        Bytes a = take(arena, "a", 600);
        device_fill(a.data(), 1, 600, Stream{});  // would write to a null pointer
    });
    EXPECT_FALSE(simt::launches_off);
    EXPECT_EQ(arena.bytes(), 0u);
    arena.allocate({&plan});
    arena.run(plan, [&] {
        EXPECT_FALSE(simt::launches_off);
        EXPECT_FALSE(arena.rehearsing());
        Bytes a = take(arena, "a", 600);
    });
}

// Each turn of an outer loop runs the inner loops as they were rehearsed, and their work counts for all
// turns.
TEST(Repeat, LoopsNest) {
    Arena arena;
    std::vector<char*> seen;
    const Step step = [&] {
        arena.repeat(3, [&] {
            Bytes outer = take(arena, "outer", 700);
            for (const int turns : {2, 4})
                arena.repeat(turns, [&] {
                    const Operation operation("inner", 1, 2);
                    Bytes inner = take(arena, "inner", 300 * turns);
                    seen.push_back(inner.data());
                    return true;
                });
            Bytes end = take(arena, "end", 100);
            return true;
        });
        Bytes after = take(arena, "after", 50);
        arena.repeat(2, [&] { return bool(take(arena, "last", 60)); });
    };
    Plan plan = arena.rehearse(step);
    EXPECT_EQ(plan.takes.size(), 6u);
    expect_no_overlap(plan);
    ASSERT_EQ(plan.work.size(), 2u);
    EXPECT_EQ(plan.work[0].calls, 6);
    EXPECT_EQ(plan.work[1].flops, 12);
    arena.allocate({&plan});
    seen.clear();
    arena.run(plan, step);
    char *const of_first = planned_address(arena, plan, 1), *const of_second =
                                                                planned_address(arena, plan, 2);
    std::vector<char*> turn(2, of_first), want;
    turn.insert(turn.end(), 4, of_second);
    for (int i = 0; i < 3; i++) want.insert(want.end(), turn.begin(), turn.end());
    EXPECT_EQ(seen, want);
}

TEST(Repeat, EveryTurnHasTheAddressesOfTheRehearsedOne) {
    Arena arena;
    int first_turns = 3, stop_after = 100, turns_run = 0;
    std::vector<std::vector<char*>> seen;
    const Step step = [&] {
        Bytes before = take(arena, "before", 400);
        arena.repeat(first_turns, [&] {
            if (turns_run == stop_after) return false;
            Bytes x = take(arena, "x", 1000), y = take(arena, "y", 2000);
            seen.push_back({x.data(), y.data()});
            turns_run++;
            return true;
        });
        Bytes between = take(arena, "between", 3000);
        arena.repeat(2, [&] { return bool(take(arena, "z", 500)); });
        Bytes after = take(arena, "after", 800);
        seen.push_back({before.data(), between.data(), after.data()});
    };
    Plan plan = arena.rehearse(step);
    EXPECT_EQ(turns_run, 1);
    EXPECT_EQ(plan.takes.size(), 6u);
    expect_no_overlap(plan);
    arena.allocate({&plan});
    const std::vector<char*> turn{planned_address(arena, plan, 1), planned_address(arena, plan, 2)};
    const std::vector<char*> around{planned_address(arena, plan, 0), planned_address(arena, plan, 3),
                                    planned_address(arena, plan, 5)};
    for (int stop : {100, 2, 1, 0}) {
        SCOPED_TRACE(stop);
        seen.clear();
        turns_run = 0;
        stop_after = stop;
        arena.run(plan, step);
        std::vector<std::vector<char*>> want(static_cast<size_t>(std::min(stop, first_turns)), turn);
        want.push_back(around);
        EXPECT_EQ(seen, want);
    }
}

TEST(Arena, SeveralPlansShareOneAllocation) {
    Arena arena;
    char *first = nullptr, *second = nullptr;
    const Step large = [&] {
        Bytes a = take(arena, "a", 10000);
        arena.workspace(100);
        first = a.data();
    };
    const Step small = [&] {
        arena.workspace(1000);
        Bytes b = take(arena, "b", 500);
        second = b.data();
    };
    Plan large_plan = arena.rehearse(large), small_plan = arena.rehearse(small);
    const Plan empty;
    arena.allocate({&large_plan, &small_plan, &empty});
    EXPECT_EQ(arena.bytes(), 1024u + arena_align(10000));
    for (int i = 0; i < 2; i++) {
        arena.run(large_plan, large);
        arena.run(small_plan, small);
        EXPECT_EQ(first, static_cast<char*>(arena.workspace(0)) + 1024);
        EXPECT_EQ(second, first);
    }
}

TEST(Arena, WorkspaceIsTheLargestAskedForAndApartFromTensors) {
    Arena arena;
    std::vector<int64_t> asked = {300, 5000, 40};
    std::vector<void*> got;
    bool intact = true;
    const Step step = [&] {
        Bytes a = take(arena, "a", 2000);
        if (!arena.rehearsing()) memset(a.data(), 1, 2000);
        for (int64_t bytes : asked) {
            got.push_back(arena.workspace(static_cast<size_t>(bytes)));
            if (!arena.rehearsing()) memset(got.back(), 2, static_cast<size_t>(bytes));
        }
        if (!arena.rehearsing())
            intact = std::all_of(a.data(), a.data() + 2000, [](char c) { return c == 1; });
    };
    Plan plan = arena.rehearse(step);
    EXPECT_EQ(plan.workspace, 5000u);
    arena.allocate({&plan});
    got.clear();
    arena.run(plan, step);
    EXPECT_TRUE(intact);
    EXPECT_EQ(got, std::vector<void*>(3, arena.workspace(0)));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(got[0]) % kArenaAlignment, 0u);
    asked[1] = 6000;
    expect_bug([&] { arena.run(plan, step); }, {"more scratch than in the rehearsal"});
}

TEST(TensorHandle, OwnsOnceAndViewsOwnNothing) {
    Arena arena;
    const Plan plan = arena.rehearse([&] {
        Bytes a = take(arena, "a", 600);
        Bytes view = a.view({2, 300});
        EXPECT_EQ(view.rows(), 2);
        Bytes moved = std::move(a);
        EXPECT_TRUE(moved && view);
        EXPECT_FALSE(a);
        a.drop();
        moved.drop();
        moved.drop();
        EXPECT_FALSE(moved);
        Bytes b = take(arena, "b", 100);
        b = take(arena, "c", 100);  // the second is taken before the first is dropped
    });
    ASSERT_EQ(plan.takes.size(), 3u);
    EXPECT_EQ(plan.takes[0].dies, 1);
    EXPECT_EQ(plan.takes[1].dies, 4);
    EXPECT_EQ(plan.lower_bound, 768u);
}

TEST(DeviceMemory, AForbiddenAllocationNamesTheBuffer) {
    const DeviceBuffer before(1000, "the first");
    forbid_device_allocation();
    expect_bug([] { DeviceBuffer late(4096, "the second"); }, {"the second", "4096", "start of the run"});
    Arena arena;
    Plan plan = arena.rehearse([&] { Bytes a = take(arena, "a", 600); });
    expect_bug([&] { arena.allocate({&plan}); }, {"the activation arena"});
    forbid_device_allocation(false);
    arena.allocate({&plan});
    EXPECT_EQ(arena.bytes(), arena_align(600));
}

#if SIMT_LANES == 1

// Fills the dynamic shared memory with the block's number, waits until all workers have, and counts the bytes
// that another block has overwritten.
__global__ void keep_apart_kernel(std::atomic<int>* at_work, int workers, std::atomic<int>* overwritten,
                                  const unsigned char** address, int bytes) {
    DYNAMIC_SHARED(unsigned char, shared);
    const auto mine = static_cast<unsigned char>(blockIdx.x + 1);
    std::fill(shared, shared + bytes, mine);
    for (++*at_work; *at_work < workers;) std::this_thread::yield();
    *overwritten += static_cast<int>(bytes - std::count(shared, shared + bytes, mine));
    address[blockIdx.x] = shared;
}

TEST(Arena, LendsTheWorkersOfALaunchTheirSharedMemory) {
    const int before = omp_get_max_threads(), workers = 3, bytes = 1000;
    omp_set_num_threads(workers);
    Arena arena;
    std::atomic<int> at_work = 0, overwritten = 0;
    const unsigned char* address[3] = {};
    const Step step = [&] {
        launch<keep_apart_kernel>(workers, 1, bytes, Stream{}, &at_work, workers, &overwritten, address,
                                  bytes);
    };
    Plan plan = arena.rehearse(step);
    EXPECT_EQ(at_work, 0);
    EXPECT_EQ(plan.workspace, workers * 1024u);
    arena.allocate({&plan});
    arena.run(plan, step);
    EXPECT_EQ(at_work, workers);
    EXPECT_EQ(overwritten, 0);
    const auto* lent = static_cast<const unsigned char*>(arena.workspace(0));
    for (const unsigned char* p : address) EXPECT_TRUE(lent <= p && p + bytes <= lent + plan.workspace);
    omp_set_num_threads(before);
}

__global__ void throw_kernel(unsigned block) {
    if (blockIdx.x == block) fail("block %u has a mistake", block);
}

TEST(Launch, ThrowsWhatABlockThrows) {
    for (const unsigned block : {0u, 77u, 99u})
        expect_user_error([&] { launch<throw_kernel>(100, 1, 0, Stream{}, block); }, {"has a mistake"});
}

#endif

#ifdef LLMC_ASAN

const char* const kCaught = "ERROR: AddressSanitizer";

char read(const char* p) { return *const_cast<const volatile char*>(p); }
void write(char* p) { *const_cast<volatile char*>(p) = 1; }

// Runs the step in the memory of its plan.
void run_planned(Arena& arena, const Step& step) {
    Plan plan = arena.rehearse(step);
    arena.allocate({&plan});
    arena.run(plan, step);
}

TEST(WatchedDeathTest, ATensorThatWasLetGo) {
    Arena arena;
    run_planned(arena, [&] {
        Bytes a = take(arena, "a", 600);
        char* p = a.data();
        const Bytes view = a.view();
        if (!arena.rehearsing()) write(p), write(p + 599);
        a.drop();
        if (arena.rehearsing()) return;
        EXPECT_DEATH(read(p), kCaught);
        EXPECT_DEATH(write(p + 599), kCaught);
        EXPECT_DEATH(read(view.data()), kCaught);
        EXPECT_DEATH(device_fill(p, 0, 600, Stream{}), kCaught);
    });
}

TEST(WatchedDeathTest, TheRoomBehindATensor) {
    for (const int64_t size : {600, 601, 607, 1, 255}) {
        SCOPED_TRACE(size);
        Arena arena;
        run_planned(arena, [&] {
            Bytes a = take(arena, "a", size), b = take(arena, "b", 100);
            if (arena.rehearsing()) return;
            for (int64_t i = 0; i < size; i++) write(a.data() + i);
            EXPECT_DEATH(read(a.data() + size), kCaught);
            EXPECT_DEATH(read(a.data() + arena_align(static_cast<size_t>(size)) - 1), kCaught);
        });
    }
}

TEST(WatchedDeathTest, MemoryThatIsNotTakenYetOrNoMore) {
    Arena arena;
    char* p = nullptr;
    run_planned(arena, [&] {
        Bytes a = take(arena, "a", 600);
        p = a.data();
        if (!arena.rehearsing()) {
            EXPECT_DEATH(read(p + arena_align(600)), kCaught);
        }
        Bytes b = take(arena, "b", 300);
    });
    EXPECT_DEATH(read(p), kCaught);  // the step is over
}

TEST(WatchedDeathTest, AStepThatFailedLeavesNothingOpen) {
    Arena arena;
    char* p = nullptr;
    Plan plan = arena.rehearse([&] { Bytes a = take(arena, "a", 600); });
    arena.allocate({&plan});
    expect_user_error(
        [&] {
            arena.run(plan, [&] {
                Bytes a = take(arena, "a", 600);
                p = a.data();
                fail("a mistake of the user's");
            });
        },
        {"a mistake"});
    EXPECT_DEATH(read(p), kCaught);
}

TEST(WatchedDeathTest, WorkspaceBeyondWhatWasAskedFor) {
    Arena arena;
    run_planned(arena, [&] {
        arena.workspace(5000);
        char* scratch = static_cast<char*>(arena.workspace(100));
        if (arena.rehearsing()) return;
        write(scratch + 99);
        EXPECT_DEATH(read(scratch + 100), kCaught);
        arena.workspace(5000);
        write(scratch + 4999);
        EXPECT_DEATH(read(scratch + 5000), kCaught);
    });
}

// Tensors that live together, one that reuses another's memory, turns of a loop, a second run: all work as
// usual.
TEST(Watched, WhatIsAliveIsOpen) {
    Arena arena;
    const Step step = [&] {
        const auto fill = [&](Bytes t) {
            if (!arena.rehearsing()) memset(t.data(), 7, static_cast<size_t>(t.size()));
            return t;
        };
        Bytes a = fill(take(arena, "a", 601)), b = fill(take(arena, "b", 90));
        const char* buffer = a.data();
        a.drop();
        Bytes c = fill(take(arena, "c", 607));
        EXPECT_EQ(c.data(), buffer);
        arena.repeat(3, [&] { return bool(fill(take(arena, "d", 50))); });
        if (!arena.rehearsing()) {
            EXPECT_EQ(read(b.data() + 89), 7);
        }
    };
    Plan plan = arena.rehearse(step);
    arena.allocate({&plan});
    for (int turn = 0; turn < 2; turn++) arena.run(plan, step);
}

// Others may use the memory of an arena that is gone.
TEST(Watched, MemoryIsOpenWhenItIsGivenBack) {
    void* old = nullptr;
    size_t bytes = 0;
    {
        Arena arena;
        run_planned(arena, [&] { Bytes a = take(arena, "a", 1 << 20); });
        old = arena.workspace(0);
        bytes = arena.bytes();
    }
    EXPECT_EQ(__asan_region_is_poisoned(old, bytes), nullptr);
}

#endif

}  // namespace
