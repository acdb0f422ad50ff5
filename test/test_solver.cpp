// test_solver.cpp - the solver: what it composes is what a rehearsal of that configuration finds, what it
// chooses is what trying everything finds, and it is fast.

#include <cmath>
#include <ctime>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/plan_solver.h"
#include "llmc/random.h"
#include "llmc/recompute.h"
#include "test/file_helpers.h"

namespace {

struct Estimate {
    size_t arena = 0;  // the most bytes that live at one time: the placement needs as much or a little more
    size_t total = 0;  // with what is outside the arena
    double seconds = 0;
};

// What the step needs with layer l at levels[l].
Estimate evaluate(const Profile& profile, const std::vector<int>& levels) {
    const size_t layers = levels.size();
    assert(static_cast<int>(layers) == profile.layers());
    Stretch step = profile.levels[0][0].after;
    for (size_t i = 1; i <= 2 * layers; i++) {  // forward from the first to the last, then back
        const size_t layer = i <= layers ? i - 1 : 2 * layers - i;
        const Segment& s = profile.levels[static_cast<size_t>(levels[layer])][i];
        step = step.then(s.inside).then(s.after);
    }
    return {static_cast<size_t>(step.peak), profile.total(step.peak), profile.step(step.seconds)};
}

using Bytes = Tensor<char>;
using Levels = std::vector<int>;

constexpr DeviceRates kRates = {.flops = 1e12, .bandwidth = 1e11, .latency = 2e-6};

// A training step of random blocks. A block computes several tensors, with scratch. A level keeps some of
// them for backward, which recomputes the others: one at a time, or at the last level all at once, in a range
// of its own. The tensors that levels keep are nested from level to level, as in real blocks, or quite
// random.
class RandomStep {
  public:
    RandomStep(uint64_t seed, int layers, int levels, bool nested, int batch = 1)
        : layers(layers), levels(levels), seed_(seed), nested_(nested), batch_(batch) {}

    void operator()(Arena& arena, const Levels& level_of) const {
        std::vector<Block> blocks(static_cast<size_t>(layers));
        for (size_t l = 0; l < kinds.size(); l++) blocks[l].kind = kinds[l];
        Bytes tokens = take(arena, "tokens", 0), d_stream;
        std::vector<Bytes> left;
        {
            std::optional<Range> range("forward");
            Bytes branch;
            blocks[0].input = take(arena, "residual", 1);
            work(1);
            for (int l = 0; l < layers; l++)
                branch = forward(arena, l, level_of[size(l)], blocks[size(l)], std::move(branch));
            Bytes last = take(arena, "last", 1);
            branch.drop();
            range.emplace("head");
            Bytes logits = take(arena, "logits", 2);
            work(2);
            logits.drop();
            d_stream = take(arena, "d_stream", 5);
        }
        Range range("backward");
        for (int l = layers - 1; l >= 0; l--) {
            const int kind = blocks[size(l)].kind;
            backward(arena, l, level_of[size(l)], blocks[size(l)]);
            blocks.pop_back();
            if (leaves) left.push_back(take(arena, "left", 2 + kind));
        }
        Bytes scratch = take(arena, "column_sums", 3);
        work(3);
    }
    Plan rehearse(const Levels& level_of) const {
        Arena arena;
        return arena.rehearse([&] { (*this)(arena, level_of); });
    }
    Profile profile() const {
        Profile p;
        for (int k = 0; k < levels; k++)
            p.levels.push_back(segments_of(rehearse(Levels(size(layers), k)), kRates));
        return p;
    }
    int layers, levels;
    bool leaves = false;     // each block's backward leaves a tensor until the end
    std::vector<int> kinds;  // of the blocks: those of a kind are alike; empty: all are

  private:
    static constexpr int kTensors = 6;
    struct Block {
        Bytes input, made[kTensors];
        int kind = 0;
    };
    static size_t size(int i) { return static_cast<size_t>(i); }

    Bytes take(Arena& arena, const char* name, int which) const {
        const int64_t most = which == 2 ? 60000 : 9000;
        return arena.take<char>(
            name, {batch_ * (1 + static_cast<int64_t>(random_bits(seed_, 1, size(which)) % most))});
    }
    void work(int which) const {
        const Operation operation("work", 1e6 * batch_ * random_uniform(2, which),
                                  2e5 * batch_ * random_uniform(3, which));
    }
    double random_uniform(uint64_t a, int b) const {
        return static_cast<double>(random_bits(seed_, a, size(b)) % 1000003) / 1000003.0;
    }
    // What a block of a kind takes of something: kinds differ in all but the residual stream.
    static int of_kind(const Block& b, int which) { return which + 1000 * b.kind; }
    bool keeps(const Block& b, int level, int i) const {
        if (!nested_) return random_bits(seed_, 4, size(of_kind(b, level)), size(i)) % 2 == 0;
        return static_cast<int>(random_bits(seed_, 5, size(of_kind(b, i))) % size(levels + 1)) >= level;
    }
    void make(Arena& arena, int i, Block& b, int scratch) const {
        b.made[i] = take(arena, "made", of_kind(b, 10 + i));
        Bytes temporary = take(arena, "scratch", of_kind(b, scratch));
        work(of_kind(b, 10 + i));
    }

    Bytes forward(Arena& arena, int l, int level, Block& b, Bytes branch) const {
        Range range("block", l);
        if (l > 0) {
            b.input = take(arena, "residual", 1);
            work(4);
            branch.drop();
        }
        for (int i = 0; i < kTensors; i++) {
            make(arena, i, b, nested_ ? 20 : 20 + level);
            if (i > 0 && !keeps(b, level, i - 1)) b.made[i - 1].drop();
        }
        Bytes out = take(arena, "branch", 1);
        if (!keeps(b, level, kTensors - 1)) b.made[kTensors - 1].drop();
        return out;
    }
    void backward(Arena& arena, int l, int level, Block& b) const {
        Range range("block", l);
        auto missing = [&](int i) {
            if (!b.made[i]) make(arena, i, b, nested_ ? 30 : 30 + level);
        };
        if (level == levels - 1) {
            Range again("forward");
            for (int i = 0; i < kTensors; i++) missing(i);
        }
        for (int i = kTensors - 1; i >= 0; i--) {
            missing(i);
            Bytes gradient = take(arena, "gradient", of_kind(b, 10 + i));
            work(of_kind(b, 40 + i));
            if (i != 2) b.made[i].drop();  // that one is dropped after the block's range
        }
    }
    uint64_t seed_;
    bool nested_;
    int64_t batch_;
};

// A kind for each of `layers` layers, of `count` kinds: neighbours are of one kind every second time.
std::vector<int> random_kinds(uint64_t seed, int layers, int count) {
    std::vector<int> kinds;
    for (size_t l = 0; l < static_cast<size_t>(layers); l++) {
        const bool as_before = l > 0 && random_bits(seed, 6, l) % 2 == 0;
        kinds.push_back(as_before ? kinds.back()
                                  : static_cast<int>(random_bits(seed, 7, l) % static_cast<uint64_t>(count)));
    }
    return kinds;
}

// Calls visit() with every way to give each of `layers` layers one of `levels` levels.
template <class Visit>
void each_mix(int layers, int levels, Visit&& visit) {
    Levels mix(static_cast<size_t>(layers), 0);
    for (;;) {
        visit(mix);
        size_t i = 0;
        while (i < mix.size() && ++mix[i] == levels) mix[i++] = 0;
        if (i == mix.size()) return;
    }
}

TEST(Segments, CutAtBlocksOnly) {
    EXPECT_EQ(block_range("forward block 3"), "forward block 3");
    EXPECT_EQ(block_range("backward block 11 forward block 11"), "backward block 11");
    EXPECT_EQ(block_range("block 0"), "block 0");
    for (const char* path :
         {"", "head", "block", "block ", "block x", "block 3x", "subblock 3", "forward blocks 3"})
        EXPECT_EQ(block_range(path), "") << path;
}

TEST(Segments, PeaksAndEndsAreRelative) {
    Arena arena;
    const Plan plan = arena.rehearse([&] {
        Bytes a = arena.take<char>("a", {1000}), b;
        {
            Range range("block", 0);
            b = arena.take<char>("b", {257});
            Bytes c = arena.take<char>("c", {1});
            const Operation one("one", 3e12, 1e11);
            const Operation two("two", 0, 4e11);
        }
        const Operation three("three", 0, 0);
        a.drop();
    });
    const std::vector<Segment> s = segments_of(plan, kRates);
    ASSERT_EQ(s.size(), 2u);
    EXPECT_EQ(s[0].after, (Stretch{1024, 1024, 0}));
    EXPECT_EQ(s[1].block, "block 0");
    EXPECT_EQ(s[1].inside.peak, 768);
    EXPECT_EQ(s[1].inside.end, 512);
    EXPECT_NEAR(s[1].inside.seconds, 7 + 4e-6, 1e-11);
    EXPECT_EQ(s[1].after.end, -1536);
    EXPECT_NEAR(s[1].after.seconds, 2e-6, 1e-12);
}

TEST(Evaluate, EqualsTheRehearsalOfEveryMixInEveryOrder) {
    for (const auto& [seed, layers, levels] :
         {std::tuple{1u, 5, 3}, std::tuple{2u, 4, 4}, std::tuple{3u, 3, 6}, std::tuple{4u, 2, 3},
          std::tuple{5u, 1, 4}})
        for (bool nested : {true, false}) {
            RandomStep step(seed, layers, levels, nested);
            if (seed % 2 == 1) step.kinds = random_kinds(seed, layers, 3);
            Profile profile = step.profile();
            profile.runs = 3;
            profile.fixed_bytes = 1000;
            profile.arena_floor = evaluate(profile, Levels(static_cast<size_t>(layers), levels / 2)).arena;
            profile.fixed_seconds = 0.5;
            int unlike = 0;
            each_mix(layers, levels, [&](const Levels& mix) {
                const Plan plan = step.rehearse(mix);
                double seconds = 0;
                for (const Work& w : plan.work) seconds += seconds_of(w, kRates);
                const Estimate e = evaluate(profile, mix);
                unlike += e.arena != plan.lower_bound ||
                          e.total != std::max(profile.arena_floor, plan.lower_bound) + 1000 ||
                          std::abs(e.seconds - (3 * seconds + 0.5)) > 1e-10;
            });
            EXPECT_EQ(unlike, 0) << "seed " << seed << (nested ? ", nested" : "");
        }
}

// All choices, by trying everything.
std::vector<Choice> all_choices(const std::vector<Profile>& profiles) {
    std::vector<Choice> all;
    for (size_t p = 0; p < profiles.size(); p++)
        each_mix(profiles[p].layers(), static_cast<int>(profiles[p].levels.size()), [&](const Levels& mix) {
            const Estimate e = evaluate(profiles[p], mix);
            all.push_back({p, mix, e.total, e.total, e.seconds});
        });
    return all;
}

bool faster(const Choice& a, const Choice& b) {
    return std::tuple(a.seconds, a.bytes, a.profile) < std::tuple(b.seconds, b.bytes, b.profile);
}
bool smaller(const Choice& a, const Choice& b) {
    return std::tuple(a.bytes, a.seconds, a.profile) < std::tuple(b.bytes, b.seconds, b.profile);
}

// The first of the allowed choices, in the order of `before`.
template <class Before, class Allowed>
std::optional<Choice> first_of(const std::vector<Choice>& all, Before before, Allowed allowed) {
    std::optional<Choice> best;
    for (const Choice& c : all)
        if (allowed(c) && (!best || before(c, *best))) best = c;
    return best;
}

void expect_same(const std::vector<Profile>& profiles, const std::optional<Choice>& got,
                 const std::optional<Choice>& want, const char* what) {
    ASSERT_EQ(got.has_value(), want.has_value()) << what;
    if (!got) return;
    EXPECT_EQ(got->bytes, want->bytes) << what;
    EXPECT_EQ(got->seconds, want->seconds) << what;
    EXPECT_EQ(got->profile, want->profile) << what;
    const Estimate e = evaluate(profiles[got->profile], got->levels);
    EXPECT_EQ(e.total, got->bytes) << what;
    EXPECT_EQ(e.seconds, got->seconds) << what;
}

void expect_solved(const std::vector<Profile>& profiles, const std::vector<Choice>& all, size_t budget) {
    const Solution s = solve(profiles, budget);
    const auto best = first_of(all, faster, [&](const Choice& c) { return c.bytes <= budget; });
    expect_same(profiles, s.chosen, best, "chosen");
    expect_same(profiles, s.least, first_of(all, smaller, [](const Choice&) { return true; }), "least");
    std::optional<Choice> cheaper, less;
    if (best) {
        cheaper = first_of(all, smaller, [&](const Choice& c) { return c.seconds < best->seconds; });
        less = first_of(all, faster, [&](const Choice& c) { return c.bytes < best->bytes; });
    }
    expect_same(profiles, s.next_faster, cheaper, "next_faster");
    expect_same(profiles, s.next_smaller, less, "next_smaller");
}

// Two micro-batch sizes, one of them with two formats of the state, and one profile twice.
std::vector<Profile> random_profiles(uint64_t seed, int layers, int levels, bool nested) {
    std::vector<Profile> profiles = {RandomStep(seed, layers, levels, nested, 1).profile(),
                                     RandomStep(seed, layers, levels, nested, 2).profile()};
    profiles[0].runs = 2;
    profiles[0].fixed_bytes = profiles[1].fixed_bytes = 50000;
    profiles[0].arena_floor = 30000;
    profiles.push_back(profiles[1]);
    profiles[2].fixed_bytes = 20000;
    profiles[2].fixed_seconds = 1e-5;
    profiles.push_back(profiles[1]);
    return profiles;
}

TEST(Solve, EqualsTryingEverything) {
    int solved = 0, fits_none = 0;
    for (const auto& [seed, layers, levels] :
         {std::tuple{11u, 5, 4}, std::tuple{12u, 4, 5}, std::tuple{13u, 3, 6}, std::tuple{14u, 5, 3},
          std::tuple{15u, 4, 4}, std::tuple{16u, 2, 6}, std::tuple{17u, 1, 3}})
        for (bool nested : {true, false}) {
            SCOPED_TRACE("seed " + std::to_string(seed) + (nested ? ", nested" : ""));
            const std::vector<Profile> profiles = random_profiles(seed, layers, levels, nested);
            const std::vector<Choice> all = all_choices(profiles);
            std::vector<size_t> budgets = {0, 1, SIZE_MAX};
            for (const Choice& c : all) {
                const bool uniform = std::count(c.levels.begin(), c.levels.end(), c.levels[0]) == layers;
                if (uniform || random_bits(seed, budgets.size()) % 30 == 0) {
                    budgets.push_back(c.bytes);
                    budgets.push_back(c.bytes - 1);
                }
            }
            for (size_t budget : budgets) {
                solved++;
                expect_solved(profiles, all, budget);
                fits_none += !solve(profiles, budget).chosen;
            }
        }
    EXPECT_GT(solved, 500);
    EXPECT_GT(fits_none, 20);
}

TEST(Solve, OrderMattersAndMixesBeatUniformLevels) {
    int beaten = 0, orders = 0;
    for (uint64_t seed = 21; seed < 51; seed++) {
        const std::vector<Profile> profiles = {RandomStep(seed, 5, 4, true).profile()};
        for (int k = 0; k < 4; k++) {
            const Estimate uniform = evaluate(profiles[0], Levels(5, k));
            const Solution s = solve(profiles, uniform.total + 8000);
            ASSERT_TRUE(s.chosen);
            EXPECT_LE(s.chosen->seconds, uniform.seconds);
            beaten += s.chosen->seconds < uniform.seconds;
            Levels reversed(s.chosen->levels.rbegin(), s.chosen->levels.rend());
            orders += evaluate(profiles[0], reversed).total > s.chosen->bytes;
        }
    }
    EXPECT_GT(beaten, 5);
    EXPECT_GT(orders, 5);
}

// Budgets around the bytes of one in `of` choices, and extremes.
std::vector<size_t> budgets_of(const std::vector<Choice>& all, uint64_t seed, uint64_t of) {
    std::vector<size_t> budgets = {0, SIZE_MAX};
    for (size_t i = 0; i < all.size(); i++)
        if (random_bits(seed, i) % of == 0) {
            budgets.push_back(all[i].bytes);
            budgets.push_back(all[i].bytes - 1);
        }
    return budgets;
}

// Blocks of several kinds in any order: their sizes, times and what their levels keep differ.
TEST(Solve, EqualsTryingEverythingForBlocksOfSeveralKinds) {
    constexpr int kLevelsOf[] = {0, 6, 6, 5, 4, 4, 3, 3, 2, 2, 2};  // by the number of layers
    int solved = 0, runs = 0;
    for (int layers = 1; layers <= 10; layers++)
        for (int kinds = 2; kinds <= 4; kinds++)
            for (const bool leaves : {false, true}) {
                const auto seed = static_cast<uint64_t>(100 * layers + 10 * kinds + leaves);
                SCOPED_TRACE("seed " + std::to_string(seed));
                RandomStep step(seed, layers, kLevelsOf[layers], layers % 2 == 0);
                step.kinds = random_kinds(seed, layers, kinds);
                step.leaves = leaves;
                std::vector<Profile> profiles = {step.profile()};
                if (layers < 6) {  // beside it one with all blocks of the first kind
                    step.kinds.clear();
                    profiles.push_back(step.profile());
                }
                const std::vector<Choice> all = all_choices(profiles);
                for (size_t budget : budgets_of(all, seed, std::max<size_t>(1, all.size() / 20))) {
                    expect_solved(profiles, all, budget);
                    solved++;
                }
                const Chain chain(profiles[0]);
                runs += chain.runs.size() > 2 && chain.runs.size() < static_cast<size_t>(layers);
            }
    EXPECT_GT(solved, 1000);
    EXPECT_GT(runs, 10);
}

TEST(Solve, BlocksThatLeaveSomethingBehindAreCounted) {
    for (uint64_t seed = 31; seed < 36; seed++) {
        RandomStep step(seed, 5, 4, true);
        step.leaves = true;
        const std::vector<Profile> profiles = {step.profile()};
        const std::vector<Choice> all = all_choices(profiles);
        for (int k = 0; k < 4; k++)
            for (size_t more : {0, 8000, 20000}) {
                const size_t budget = evaluate(profiles[0], Levels(5, k)).total + more;
                expect_solved(profiles, all, budget);
                const Solution s = solve(profiles, budget);
                EXPECT_EQ(s.chosen->bytes, step.rehearse(s.chosen->levels).lower_bound);
            }
    }
}

TEST(Solve, IsDeterministic) {
    const std::vector<Profile> profiles = random_profiles(31, 5, 4, false);
    const size_t budget = evaluate(profiles[0], Levels(5, 2)).total;
    const Solution a = solve(profiles, budget), b = solve(profiles, budget);
    ASSERT_TRUE(a.chosen && b.chosen);
    EXPECT_EQ(a.chosen->levels, b.chosen->levels);
    EXPECT_EQ(a.chosen->profile, b.chosen->profile);
}

// The bytes of a choice after placement: up to 1% more, pseudo-random.
size_t placed(const Choice& c) {
    uint64_t mix = c.profile;
    for (int k : c.levels) mix = random_bits(41, mix, static_cast<uint64_t>(k));
    return c.bytes + c.bytes / 100 * (mix % 1000) / 1000;
}

TEST(Solve, WhatIsChosenFitsByTheExactTotal) {
    int beyond = 0;
    for (uint64_t seed = 42; seed < 48; seed++) {
        const std::vector<Profile> profiles = random_profiles(seed, 5, 4, true);
        const std::vector<Choice> all = all_choices(profiles);
        for (const Choice& c : all) {
            if (random_bits(seed, c.bytes) % 100) continue;
            const size_t budget = c.bytes;
            int calls = 0;
            const auto refine = [&](Choice& x) {
                calls++;
                x.exact = placed(x);
            };
            Solution s = solve(profiles, budget, refine);
            EXPECT_LE(calls, kExactTries);
            const auto surely =
                first_of(all, faster, [&](const Choice& x) { return x.bytes * 101 / 100 < budget; });
            if (!s.chosen) {
                EXPECT_GT(placed(s.least), budget);
                EXPECT_FALSE(surely);
                continue;
            }
            EXPECT_EQ(s.chosen->exact, placed(*s.chosen));
            EXPECT_LE(s.chosen->exact, budget);
            calls = 0;
            refine_neighbours(s, refine);
            EXPECT_EQ(calls, s.next_faster.has_value() + s.next_smaller.has_value());
            if (surely) {
                EXPECT_LE(s.chosen->seconds, surely->seconds);
            }
            if (s.next_faster) {
                EXPECT_EQ(s.next_faster->exact, placed(*s.next_faster));
            }
            beyond += placed(*solve(profiles, budget).chosen) > budget;
        }
    }
    EXPECT_GT(beyond, 20);  // where the bound alone would have chosen what does not fit
}

TEST(Solve, AFewTriesFindWhatFitsByTheExactTotal) {
    const std::vector<Profile> profiles = {RandomStep(49, 48, 6, true).profile()};
    const size_t least = solve(profiles, 0).least.bytes, most = solve(profiles, SIZE_MAX).chosen->bytes;
    for (size_t i = 1; i <= 8; i++) {
        const size_t budget = least + (most - least) * i / 8;
        std::vector<size_t> tried;
        const auto refine = [&](Choice& c) {
            tried.push_back(c.bytes);
            c.exact = c.bytes + most / 20 + c.bytes % 1000;  // more than a placement adds
            c.seconds *= 2;
        };
        Solution s = solve(profiles, budget, refine);
        ASSERT_TRUE(s.chosen);
        EXPECT_GT(tried[0] + most / 20, budget);  // the first does not fit
        EXPECT_LE(tried.size(), 12u);
        EXPECT_LE(s.chosen->exact, budget);
        ASSERT_TRUE(s.next_faster);
        refine_neighbours(s, refine);
        EXPECT_GT(s.next_faster->exact, budget);
        EXPECT_EQ(s.chosen->seconds, 2 * solve(profiles, s.chosen->bytes).chosen->seconds);
    }
}

TEST(Solve, NothingIsChosenWhenTheExactTotalNeverFits) {
    const std::vector<Profile> profiles = random_profiles(51, 4, 4, true);
    for (size_t total : {SIZE_MAX, size_t{1} << 40})
        EXPECT_FALSE(solve(profiles, 1 << 30, [&](Choice& c) { c.exact = total; }).chosen);
    const Solution only_least = solve(profiles, 1 << 30, [&](Choice& c) {
        c.exact = c.bytes == solve(profiles, 0).least.bytes ? 1 << 30 : SIZE_MAX;
    });
    ASSERT_TRUE(only_least.chosen);
    EXPECT_EQ(only_least.chosen->bytes, only_least.least.bytes);
    EXPECT_FALSE(only_least.next_smaller);
}

// Profiles like `profile` with other sizes and speeds, as for micro-batches of 1, 2, 3 ... sequences.
std::vector<Profile> scaled(const Profile& profile, int count) {
    std::vector<Profile> profiles;
    for (int i = 1; i <= count; i++) {
        Profile p = profile;
        p.runs = 100 / i;
        p.fixed_bytes = static_cast<size_t>(i % 3) * 1000000;
        for (auto& level : p.levels)
            for (Segment& s : level)
                for (Stretch* part : {&s.inside, &s.after}) {
                    part->peak *= i;
                    part->end *= i;
                    part->seconds = std::round(part->seconds * (i + 0.3) * 0x1p40) * 0x1p-40;
                }
        profiles.push_back(p);
    }
    return profiles;
}

double seconds_to_solve(const std::vector<Profile>& profiles, size_t budget) {
    const std::clock_t start = std::clock();  // processor time: the machine may have other work
    const Solution s = solve(profiles, budget);
    const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    EXPECT_TRUE(s.chosen);
    EXPECT_LE(s.chosen->bytes, budget);
    for (const Profile& p : profiles)
        for (size_t k = 0; k < p.levels.size(); k++) {
            const Estimate e = evaluate(p, Levels(static_cast<size_t>(p.layers()), static_cast<int>(k)));
            if (e.total <= budget) {
                EXPECT_LE(s.chosen->seconds, e.seconds);
            }
        }
    return seconds;
}

TEST(Solve, SixtySettingsOf48LayersAreSolvedAtOnce) {
    for (bool nested : {true, false}) {
        const std::vector<Profile> profiles = scaled(RandomStep(61, 48, 6, nested).profile(), 60);
        EXPECT_LT(seconds_to_solve(profiles, evaluate(profiles[20], Levels(48, 3)).total), 2.0);
    }
}

TEST(Solve, KindsThatAlternateAreSolvedAsFast) {
    RandomStep step(65, 48, 6, true);
    for (int l = 0; l < 48; l++) step.kinds.push_back(l % 6 == 5 ? 2 : l % 2);
    const std::vector<Profile> profiles = scaled(step.profile(), 60);
    EXPECT_LT(seconds_to_solve(profiles, evaluate(profiles[20], Levels(48, 3)).total), 2.0);
}

// Levels whose time falls linearly with their bytes, but for noise: nearly every configuration is the best of
// its size.
TEST(Solve, LevelsOnALineDoNotTakeForever) {
    Profile profile = RandomStep(62, 48, 6, true).profile();
    for (size_t k = 0; k < 6; k++)
        for (size_t i = 1; i < profile.levels[k].size(); i++) {
            const auto kept = 256 * static_cast<int64_t>(400000 * (6 - k) + random_bits(63, k) % 80000);
            const double noise = 1e-7 * static_cast<double>(random_bits(64, k) % 1000) / 1000;
            const double seconds = 0.01 - 1e-11 * static_cast<double>(kept) + noise;
            Segment& s = profile.levels[k][i];
            s.inside = i <= 48 ? Stretch{kept, kept, std::round(seconds * 0x1p40) * 0x1p-40}
                               : Stretch{int64_t{1} << 30, -kept, 0x1p-7};
            if (i != 48) s.after = {};
        }
    const std::vector<Profile> profiles = scaled(profile, 4);
    EXPECT_LT(seconds_to_solve(profiles, evaluate(profiles[1], Levels(48, 3)).total), 2.0);
}

const std::vector<std::string> kNames = {"none", "gelu", "norm", "block"};

TEST(LevelsText, IsReadBack) {
    EXPECT_EQ(levels_text({2, 2, 2}, kNames), "norm");
    EXPECT_EQ(levels_text({2, 2, 3}, kNames), "norm:2,block:1");
    EXPECT_EQ(levels_text({0, 3, 0}, kNames), "none:1,block:1,none:1");
    EXPECT_EQ(parse_levels("norm", kNames, 3, "--recompute"), (Levels{2, 2, 2}));
    EXPECT_EQ(parse_levels("norm:3", kNames, 3, "--recompute"), (Levels{2, 2, 2}));
    each_mix(4, 4, [](const Levels& mix) {
        EXPECT_EQ(parse_levels(levels_text(mix, kNames), kNames, 4, "--recompute"), mix);
    });
}

TEST(ParseLevels, SaysWhatIsWrong) {
    const std::pair<const char*, std::string> cases[] = {
        {"nrom", "'nrom'; there are none, gelu, norm, block"},
        {"norm:8,blok:4", "'blok'; there are none, gelu, norm, block"},
        {":12", "''; there are none"},
        {"norm:0,block:12", "'norm:0' needs a count of layers, a positive integer"},
        {"norm:-4,block:16", "'norm:-4' needs a count"},
        {"norm:x,block:4", "'norm:x' needs a count"},
        {"norm:8x,block:4", "'norm:8x' needs a count"},
        {"norm:+8,block:4", "'norm:+8' needs a count"},
        {"norm: 8,block:4", "'norm: 8' needs a count"},
        {"norm:2.5", "'norm:2.5' needs a count"},
        {"norm:99999999999", "'norm:99999999999' needs a count"},
        {"norm:,block:4", "'norm:' needs a count"},
        {"norm,block:4", "'norm' needs a count"},
        {"norm:8,block:3", "is for 11 layers; the model has 12"},
        {"norm:8,block:2000000000,none:2000000000", "is for 4000000008 layers; the model has 12"},
        {"", "'' has an empty part"},
        {",", "',' has an empty part"},
        {"norm:12,", "'norm:12,' has an empty part"},
        {"norm:6,,block:6", "'norm:6,,block:6' has an empty part"},
    };
    for (const auto& [text, message] : cases) {
        SCOPED_TRACE(text);
        expect_user_error([&] { parse_levels(text, kNames, 12, "--recompute"); },
                          {message, "--recompute", text});
    }
}

TEST(ParseBytes, ReadsNumbersWithUnits) {
    const size_t gib = size_t{1} << 30;
    const std::pair<const char*, size_t> cases[] = {
        {"8GiB", 8 * gib},
        {"8gib", 8 * gib},
        {"0.5GiB", gib / 2},
        {"1.5KiB", 1536},
        {"3B", 3},
        {"2KB", 2000},
        {"2.25MB", 2250000},
        {"7MiB", 7 << 20},
        {"24GB", 24000000000u},
        {"1TiB", 1024 * gib},
        {"16TB", 16000000000000u},
        {"0B", 0},
        {"1000000TiB", 1000000 * (1024 * gib)},
        {"007KiB", 7168},
        {"0.1KB", 100},
    };
    for (const auto& [text, bytes] : cases) EXPECT_EQ(parse_bytes(text, "--budget"), bytes) << text;
}

TEST(ParseBytes, SaysWhatIsWrong) {
    for (const char* text :
         {"3", "8QB", "", "GiB", "-1GiB", "+1GiB", "nanGiB", "infGiB", "8 GiB", "8GiB ", " 8GiB", "1e3GiB",
          "0x10GiB", "1.GiB", ".5GiB", "1.2.3GiB", "8Gi", "8G", "1,5GiB"}) {
        SCOPED_TRACE(text);
        expect_user_error([&] { parse_bytes(text, "--budget"); },
                          {"--budget", format("'%s'", text), "with a unit (B, KiB"});
    }
    // Is it 8 * 2^30 or 8 * 10^9 bytes?
    expect_user_error([&] { parse_bytes("8G", "--budget"); }, {", as in 8GiB or 8GB"});
    expect_user_error([&] { parse_bytes("1.5mi", "--budget"); }, {", as in 1.5MiB or 1.5MB"});
    for (const char* text : {"16777216TiB", "99999999999999999999B", "1000000000000000000000000000000GiB"})
        expect_user_error([&] { parse_bytes(text, "--budget"); }, {"--budget", text, "more bytes than"});
    EXPECT_GT(parse_bytes("16777215TiB", "--budget"), size_t{1} << 63);
}

}  // namespace
