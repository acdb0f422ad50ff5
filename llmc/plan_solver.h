// plan_solver.h - finds the fastest configuration that fits a memory budget.
//
// A step is rehearsed (arena.h) once per recompute level, with all its blocks at that level. What a level
// changes stays inside the ranges of its block ("forward block 3", "backward block 3"). So the memory and the
// time of any configuration, which has a level for each block, can be composed from these rehearsals: a
// stretch of the step is described by its peak and by what it leaves, both relative to what lives when it
// begins, and stretches follow one another.
//
// The search is exact for any sequence of blocks, alike or not. It goes from the last block to the first. The
// rest of a step, from a block's place to the end of the backward of the blocks behind it, has a peak Q and a
// time. A block before it that needs f bytes at the peak of its forward, keeps e, and needs b at the peak of
// its backward, where the rest has left m bytes, makes the peak Q' = max(f, e + max(Q, m + b)). m is the same
// at all levels, and Q' never falls as Q rises. So of two rests of the same blocks, one that is both larger
// and slower can be dropped, whatever comes before it. What remains for each number of blocks is a short
// list, from small and slow to large and fast: some hundreds of configurations for 48 layers. Only a list
// that is far longer is thinned out (thin()).
//
// Neighbours that are alike need fewer tries, because the order of their levels is known. Let r = max(f - e,
// m + b), what a block needs for a while beyond what it keeps; then Q' = e + max(Q, r). Of two neighbours
// with r1 >= r2, the first in front needs e1 + max(r1, e2 + max(r2, Q)). In the other order they need e2 +
// max(r2, e1 + max(r1, Q)), which is no less, because e2 + e1 + r1 is in it and e2 >= 0. So the order by
// falling r is best: the blocks that recompute most come first, where few others have kept anything. (This is
// Jackson's rule for the largest lateness.) It holds if blocks keep at least nothing and their backward
// releases what they kept, so that m is the same for all of them. Blocks for which it does not hold are each
// a run alone.
#pragma once

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <strings.h>
#include <utility>
#include <vector>

#include "llmc/arena.h"
#include "llmc/error.h"
#include "llmc/rates.h"

// A part of the step: the most bytes that live in it and those that live after it, relative to those before.
struct Stretch {
    int64_t peak = 0, end = 0;
    double seconds = 0;

    Stretch then(const Stretch& next) const {
        return {std::max(peak, end + next.peak), end + next.end, seconds + next.seconds};
    }
    bool operator==(const Stretch&) const = default;
};

// What happens in the range of a block, and after it until the next one begins.
struct Segment {
    std::string block;  // "forward block 3"; empty for what comes before the first
    Stretch inside, after;
};

// A path up to the number of the block that it is in, without what is nested in the block; empty outside of
// blocks.
inline std::string_view block_range(std::string_view path) {
    const std::string_view word = "block ";
    for (size_t at = path.find(word); at != std::string::npos; at = path.find(word, at + 1)) {
        const size_t number = at + word.size(),
                     end = std::min(path.find_first_not_of("0123456789", number), path.size());
        if ((at == 0 || path[at - 1] == ' ') && end > number && (end == path.size() || path[end] == ' '))
            return path.substr(0, end);
    }
    return {};
}

// block_range(), which remembers its last answer: a plan's paths are Range::place()s, and neighbours are
// mostly the same one.
class BlockRange {
  public:
    std::string_view operator()(std::string_view path) {
        if (path.data() != path_.data() || path.size() != path_.size())
            path_ = path, block_ = block_range(path);
        return block_;
    }

  private:
    std::string_view path_, block_;
};

// The seconds that a block's transfers take in a phase, "forward" or "backward": the mean of its blocks, also
// where these differ, because a block is fetched while others compute. A disk either reads or writes; a link
// carries both directions at once.
inline double moving_seconds(const Plan& plan, const std::vector<Segment>& segments, const std::string& phase,
                             const Rates& rates) {
    const auto is_of = [&](std::string_view range) { return range.starts_with(phase); };
    std::array<double, kRoutes> sums = {};
    for (const Transfer& t : plan.transfers)
        if (!t.waits && is_of(t.range)) sums[static_cast<size_t>(t.route)] += rates.seconds(t);
    const auto of = [&](Route route) { return sums[static_cast<size_t>(route)]; };
    const double seconds =
        std::max({of(Route::DiskRead) + of(Route::DiskWrite), of(Route::FromHost), of(Route::ToHost),
                  of(Route::HostUpdate), of(Route::ToRanks), of(Route::ToMachines)});
    const auto blocks = std::ranges::count_if(segments, [&](const Segment& s) { return is_of(s.block); });
    return seconds / static_cast<double>(std::max<ptrdiff_t>(blocks, 1));
}

// True if a take is of a unit's gradients that ranks exchange while backward is in the next unit.
inline bool outlives_its_block(const Take& t) {
    return is_exchange(t.dies_at) && !is_exchange(t.born_at) &&
           !(block_range(t.born_at).empty() && block_range(t.dies_at).empty());
}

// Cuts a rehearsed step at its blocks. A block takes as long as it computes or as its transfers move,
// whichever is longer. Bytes are rounded as in the arena; seconds to 2^-40 (a picosecond), so that their sums
// are exact and the same in any order.
//
// Ranks complete a block's gradients in the range of the next block, so the block that goes backward first
// has less to do than the others. To keep all blocks alike, memory for exchanges does not count here, and
// gradients end with their own block: what is composed is a lower bound, as always. The seconds of their sums
// count at the end.
inline std::vector<Segment> segments_of(const Plan& plan, const Rates& rates) {
    struct Event {
        bool happens = false;
        int64_t bytes = 0;
        std::string_view path = {};
    };
    std::vector<Event> events(static_cast<size_t>(count_times(plan)));  // by time
    std::vector<Take> outlive;
    double exchange_seconds = 0;
    for (const Take& t : plan.takes) {
        if (is_exchange(t.born_at)) continue;
        const int64_t bytes = static_cast<int64_t>(arena_align(t.bytes));
        events[static_cast<size_t>(t.born)] = {true, bytes, t.born_at};
        if (outlives_its_block(t))
            outlive.push_back(t);
        else
            events[static_cast<size_t>(t.dies)] = {true, -bytes, t.dies_at};
    }

    std::vector<Segment> segments(1);
    BlockRange block_of;
    for (const Event& e : events) {
        if (!e.happens) continue;
        const std::string_view block = block_of(e.path);
        if (!block.empty() && block != segments.back().block)
            segments.push_back({std::string(block), {}, {}});
        assert(block.empty() || segments.back().after == Stretch());  // a block's range is entered once
        Stretch& s = block.empty() ? segments.back().after : segments.back().inside;
        s = s.then({std::max<int64_t>(e.bytes, 0), e.bytes, 0});
    }
    for (const Take& t : outlive) {
        const std::string_view block = block_range(t.born_at);
        const auto own = std::ranges::find_if(
            segments, [&](const Segment& s) { return !block.empty() && s.block == block; });
        Stretch& s = own == segments.end() ? segments[segments.size() / 2].after : own->inside;
        s = s.then({0, -static_cast<int64_t>(arena_align(t.bytes)), 0});
    }
    size_t at = 0;
    for (const Work& w : plan.work) {
        if (is_exchange(w.range)) {
            exchange_seconds += rates.seconds(w);
            continue;
        }
        const std::string_view block = block_of(w.range);
        while (!block.empty() && block != segments[at].block) {
            at++;
            assert(at < segments.size());  // a block that works also takes something
        }
        (block.empty() ? segments[at].after : segments[at].inside).seconds += rates.seconds(w);
    }
    segments.back().after.seconds += exchange_seconds;
    for (const char* phase : {"forward", "backward"}) {
        const double moving = moving_seconds(plan, segments, phase, rates);
        for (Segment& s : segments)
            if (s.block.starts_with(phase)) s.inside.seconds = std::max(s.inside.seconds, moving);
    }
    for (Segment& s : segments)
        for (Stretch* part : {&s.inside, &s.after})
            part->seconds = std::round(part->seconds * 0x1p40) * 0x1p-40;
    return segments;
}

// A setting of everything but the levels: a micro-batch size, the rows of the head, a format of the state.
struct Profile {
    std::vector<std::vector<Segment>> levels;  // segments_of() the rehearsal with all blocks at that level
    int runs = 1;                              // micro-batches in a step
    size_t fixed_bytes = 0;                    // outside the arena: the state, workspace
    size_t arena_floor = 0;                    // what other steps need in the arena anyway
    double fixed_seconds = 0;                  // outside the micro-batches: the update
    double waited_seconds = 0;                 // a micro-batch's waits at the last level, not in stretches

    int layers() const { return static_cast<int>(levels[0].size() - 1) / 2; }
    size_t total(int64_t arena) const {
        return fixed_bytes + std::max(arena_floor, static_cast<size_t>(arena));
    }
    double step(double micro_batch) const { return runs * micro_batch + fixed_seconds; }
};

// A configuration. `bytes` is the lower bound of what it needs and `seconds` the sum of its stretches. If the
// caller can refine a choice (Refine), `exact` is what it really needs, and `seconds` are more accurate.
struct Choice {
    size_t profile = 0;
    std::vector<int> levels;  // by layer
    size_t bytes = 0, exact = 0;
    double seconds = 0;
};

struct Solution {
    std::optional<Choice> chosen;        // the fastest that fits; none if nothing does
    std::optional<Choice> next_faster;   // the smallest that is faster than the chosen one
    std::optional<Choice> next_smaller;  // the fastest that is smaller than the chosen one
    Choice least, fastest;               // the smallest and the fastest of all
};

// What a block takes at one level. A stretch between two forward blocks belongs to the later one, a stretch
// between two backward blocks to the earlier one.
struct BlockStretches {
    Stretch forward, backward;
    bool operator==(const BlockStretches&) const = default;
};

// Neighbouring blocks that are alike at every level, or a single block.
struct BlockRun {
    std::vector<BlockStretches> levels;
    size_t length = 1;
    int64_t left = 0;           // bytes that the rest behind the run leaves
    std::vector<size_t> order;  // the levels from the front of the run to its back

    // Bytes that a block's forward and backward leave together, at any level.
    int64_t carried() const { return levels[0].forward.end + levels[0].backward.end; }
    // True if the order of the levels is known.
    bool may_be_longer() const {
        return carried() == 0 && std::ranges::all_of(levels, [](const BlockStretches& level) {
                   return level.forward.end >= 0;
               });
    }
    void set_order() {
        const auto rank = [&](size_t k) {  // among equals, the one that keeps least comes first
            const auto& [forward, backward] = levels[k];
            return std::pair(-std::max(forward.peak - forward.end, left + backward.peak), forward.end);
        };
        for (size_t k = 0; k < levels.size(); k++) order.push_back(k);
        std::ranges::stable_sort(order, [&](size_t a, size_t b) { return rank(a) < rank(b); });
    }
};

// A profile as the search needs it.
struct Chain {
    Stretch before, middle;      // up to the first block, and between forward and backward
    std::vector<BlockRun> runs;  // from the last blocks to the first; the first block is a run alone

    explicit Chain(const Profile& profile) {
        const size_t layers = static_cast<size_t>(profile.layers());
        before = profile.levels[0][0].after;
        middle = profile.levels[0][layers].after;
        int64_t left = middle.end;
        for (size_t l = layers; l-- > 0;) {
            BlockRun run{.levels = {}, .left = left, .order = {}};
            for (const std::vector<Segment>& s : profile.levels) {
                assert(s.size() == 2 * layers + 1 && s[0].after == before && s[layers].after == middle);
                const Segment& backward = s[2 * layers - l];
                run.levels.push_back({l > 0 ? s[l].after.then(s[l + 1].inside) : s[1].inside,
                                      backward.inside.then(backward.after)});
                assert(run.levels.back().forward.end + run.levels.back().backward.end == run.carried());
            }
            left += run.carried();
            if (l > 0 && !runs.empty() && runs.back().levels == run.levels && run.may_be_longer()) {
                runs.back().length++;
            } else {
                run.set_order();
                runs.push_back(std::move(run));
            }
        }
    }
};

// A configuration in the search: of the last blocks, and in the end of all.
struct Mix {
    int64_t bytes;
    double seconds;
    int profile = 0;
    int path = -1;  // what says its levels: see Path, and Search::levels
};

// The levels of some blocks: that of the first one, and the path of the others; -1: there are none.
struct Path {
    int level, rest;
};

// Merges two lists that rise in bytes into one that also falls in seconds: drops what is larger and not
// faster than another; of equals keeps the one in `a`.
inline std::vector<Mix> best_of(const std::vector<Mix>& a, const std::vector<Mix>& b) {
    std::vector<Mix> best;
    for (auto i = a.begin(), j = b.begin(); i != a.end() || j != b.end();) {
        const Mix& next = j == b.end() || (i != a.end() && i->bytes <= j->bytes) ? *i++ : *j++;
        if (!best.empty() && next.seconds >= best.back().seconds) continue;
        if (!best.empty() && next.bytes == best.back().bytes) best.pop_back();
        best.push_back(next);
    }
    return best;
}

// If the bytes and seconds of the levels are on one line but for noise, hardly any configuration beats
// another, and lists would grow to millions. Of a list longer than `most`, only the smallest of
// configurations with nearly the same seconds stays, and the choice may be a little slower than the best.
inline void thin(std::vector<Mix>& list, size_t most) {
    if (list.size() <= most) return;
    const double gap = (list.front().seconds - list.back().seconds) / static_cast<double>(most);
    size_t kept = 1;
    for (size_t i = 1; i < list.size(); i++)
        if (i + 1 == list.size() || list[kept - 1].seconds - list[i].seconds >= gap) list[kept++] = list[i];
    list.resize(kept);
}

constexpr size_t kMixesInAll = size_t{1} << 19;  // in the lists of all lengths: 10,922 for each of 48 layers

// Puts a run of blocks before each of `rests`, and returns the best configurations.
inline std::vector<Mix> with_run(const BlockRun& run, std::vector<Mix>&& rests, std::vector<Path>& paths,
                                 size_t most) {
    std::vector<std::vector<Mix>> best(run.length + 1);  // by length
    best[0] = std::move(rests);
    std::vector<Mix> longer;
    for (auto k = run.order.rbegin(); k != run.order.rend(); ++k) {
        const auto& [forward, backward] = run.levels[*k];
        for (size_t length = 1; length < best.size(); length++) {
            longer = best[length - 1];
            for (Mix& m : longer) {
                m.bytes = std::max(forward.peak, forward.end + std::max(m.bytes, run.left + backward.peak));
                m.seconds += forward.seconds + backward.seconds;
                paths.push_back({static_cast<int>(*k), m.path});
                m.path = static_cast<int>(paths.size()) - 1;
            }
            best[length] = best_of(best[length], longer);
            thin(best[length], most);
        }
    }
    return std::move(best.back());
}

// The configurations that no other beats in both bytes and seconds, from small and slow to large and fast.
class Search {
  public:
    explicit Search(const std::vector<Profile>& profiles) {
        std::vector<Path> paths;
        for (size_t p = 0; p < profiles.size(); p++) {
            paths.clear();
            add(profiles[p], static_cast<int>(p), paths);
            for (Mix& m : best_) {
                if (m.profile != static_cast<int>(p)) continue;
                levels_.emplace_back();
                for (int at = m.path; at >= 0; at = paths[static_cast<size_t>(at)].rest)
                    levels_.back().push_back(paths[static_cast<size_t>(at)].level);
                m.path = static_cast<int>(levels_.size()) - 1;
            }
        }
    }
    const std::vector<Mix>& best() const { return best_; }
    Choice choice(const Mix& m) const {
        const auto bytes = static_cast<size_t>(m.bytes);
        return {static_cast<size_t>(m.profile), levels_[static_cast<size_t>(m.path)], bytes, bytes,
                m.seconds};
    }

  private:
    void add(const Profile& profile, int number, std::vector<Path>& paths) {
        const Chain chain(profile);
        const size_t most = kMixesInAll / static_cast<size_t>(profile.layers());
        std::vector<Mix> mixes = {{chain.middle.peak, 0}};
        for (size_t i = 0; i + 1 < chain.runs.size(); i++)
            mixes = with_run(chain.runs[i], std::move(mixes), paths, most);
        // The first block is tried at each level, and only the best of all profiles stay.
        const BlockRun& first = chain.runs.back();
        for (size_t k : chain.runs[chain.runs.size() - std::min<size_t>(2, chain.runs.size())].order) {
            std::vector<Mix> longer = mixes;
            for (Mix& m : longer) {
                const Stretch rest = {m.bytes, first.left, chain.middle.seconds + m.seconds};
                const Stretch step =
                    chain.before.then(first.levels[k].forward).then(rest).then(first.levels[k].backward);
                paths.push_back({static_cast<int>(k), m.path});
                m = {static_cast<int64_t>(profile.total(step.peak)), profile.step(step.seconds), number,
                     static_cast<int>(paths.size()) - 1};
            }
            best_ = best_of(best_, longer);
        }
    }

    std::vector<Mix> best_;
    std::vector<std::vector<int>> levels_;  // by the path of a Mix in best_
};

// Sets a choice's exact bytes, and more accurate seconds if they are known.
using Refine = std::function<void(Choice&)>;
constexpr int kExactTries = 16;

// The fastest configuration of any profile that fits `budget` bytes, and its neighbours. Among equally fast
// ones, the smaller; then the one of the earlier profile.
//
// The planned arena may need a little more than the lower bound. refine(), if given, says what a choice
// really needs, and the chosen one fits by that; the others are as their sums say (see refine_neighbours()).
// If the first try does not fit, the next is smaller by as much as it was over the budget, then by steps that
// double, then halfway between what fits and what does not. (For arenas within 1% of the bound that is a few
// tries.)
inline Solution solve(const std::vector<Profile>& profiles, size_t budget, const Refine& refine = {}) {
    assert(!profiles.empty());
    const Search search(profiles);
    const std::vector<Mix>& best = search.best();
    auto choice = [&](ptrdiff_t i) { return search.choice(best[static_cast<size_t>(i)]); };
    auto refined = [&](ptrdiff_t i) {
        Choice c = choice(i);
        if (refine) refine(c);
        return c;
    };
    auto within = [&](int64_t bytes) {  // how many of `best` have at most these
        return std::upper_bound(best.begin(), best.end(), bytes,
                                [](int64_t b, const Mix& m) { return b < m.bytes; }) -
               best.begin();
    };
    const int64_t most = INT64_MAX / 4;  // refine() may return SIZE_MAX
    auto bytes_of = [&](size_t bytes) { return static_cast<int64_t>(std::min<size_t>(bytes, most)); };
    int64_t limit = bytes_of(budget), step = 0;
    ptrdiff_t fits = -1, fails = within(limit);
    Solution s;
    for (int tries = 0; fails - fits > 1 && (fits < 0 || tries < kExactTries); tries++) {
        const ptrdiff_t next = fits < 0 ? std::max<ptrdiff_t>(within(limit) - 1, 0) : (fits + fails) / 2;
        const Choice c = refined(next);
        if (c.exact <= budget) {
            fits = next;
            s.chosen = c;
        } else {
            fails = next;
            step = std::min(most, std::max(2 * step, bytes_of(c.exact - budget)));
            limit = bytes_of(c.bytes) - step;
        }
    }
    s.least = choice(0);
    s.fastest = search.choice(best.back());
    if (s.chosen && fits > 0) s.next_smaller = choice(fits - 1);
    if (s.chosen && fits + 1 < static_cast<ptrdiff_t>(best.size())) s.next_faster = choice(fits + 1);
    return s;
}

// Refines the neighbours of the chosen one. They are of interest only in the best of the solutions that are
// compared.
inline void refine_neighbours(Solution& s, const Refine& refine) {
    for (std::optional<Choice>* neighbour : {&s.next_faster, &s.next_smaller})
        if (*neighbour) refine(**neighbour);
}
