// test_block_stream.cpp - blocks are streamed in any order, with any prefetch distance: each has arrived when
// it is fetched, what was changed is stored, and nothing is fetched that is there already.

#include <algorithm>
#include <deque>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/offload_blocks.h"

namespace {

// Blocks of one number each. A transfer arrives when it is waited for, and not before.
class Numbers : public PieceSource {
  public:
    explicit Numbers(int blocks) : values(static_cast<size_t>(blocks)) {
        std::iota(values.begin(), values.end(), 100);
    }
    size_t start(char* buffer, std::optional<int> to, std::optional<int> from, Stream) override {
        int* const at = reinterpret_cast<int*>(buffer);
        if (to) values[static_cast<size_t>(*to)] = *at, stored++;
        *at = -1;
        coming_.push_back({from, at});
        fetched += from.has_value();
        most_under_way = std::max(most_under_way, coming_.size());
        return begun_++;
    }
    void finish(size_t number, Stream) override {
        ASSERT_LT(number, begun_);
        for (; begun_ - coming_.size() <= number; coming_.pop_front())
            if (const auto [block, buffer] = coming_.front(); block)
                *buffer = values[static_cast<size_t>(*block)];
    }

    std::vector<int> values;
    int fetched = 0, stored = 0;
    size_t most_under_way = 0;

  private:
    struct Coming {
        std::optional<int> block;
        int* buffer;
    };
    std::deque<Coming> coming_;
    size_t begun_ = 0;
};

constexpr StreamedKind kNumbers = {Transfer::StreamedBlock, "number", "weights"};

// A program that streams numbers: rehearsed, and then run as often as asked for.
struct Streamed {
    Numbers numbers;
    Arena arena;
    const Stream stream = {};
    BlockStream blocks{arena, stream, kNumbers};
    Plan plan;

    Streamed(int count, int ahead) : numbers(count) {
        blocks.stream_from(Route::DiskRead, std::vector<size_t>(static_cast<size_t>(count), sizeof(int)),
                           ahead, &numbers);
    }
    template <class Pass>
    void rehearse(Pass&& pass) {
        plan = arena.rehearse(pass);
        arena.allocate({&plan});
    }
    int* fetch(int block) { return reinterpret_cast<int*>(blocks.fetch(block)); }
    // How many fetches, or stores, the rehearsal recorded.
    int noted(Route route) const {
        const auto is_one = [route](const Transfer& t) { return !t.waits && t.route == route; };
        return static_cast<int>(std::count_if(plan.transfers.begin(), plan.transfers.end(), is_one));
    }
};

// Forward and backward of a training. Between them, as many blocks stay as there are buffers.
TEST(BlockStream, ForwardAndBack) {
    constexpr int kBlocks = 7;
    for (const int ahead : {0, 1, 2, 5, 6, 40}) {
        Streamed l(kBlocks, ahead);
        const int buffers = std::min(ahead + 1, kBlocks);
        const auto pass = [&] {
            for (const auto& route : {numbers_in_order(kBlocks), numbers_in_order(kBlocks, From::Last)}) {
                l.blocks.expect(route);
                for (const int block : route) {
                    const int* const at = l.fetch(block);
                    if (!l.arena.rehearsing()) {
                        ASSERT_EQ(*at, 100 + block);
                    }
                    ASSERT_TRUE(l.blocks.holds(block));
                }
            }
            l.blocks.release();
        };
        l.rehearse(pass);
        EXPECT_EQ(static_cast<int>(l.plan.takes.size()), buffers);
        l.arena.run(l.plan, pass);
        EXPECT_EQ(l.numbers.fetched, 2 * kBlocks - buffers) << ahead;
        EXPECT_EQ(l.noted(Route::DiskRead), l.numbers.fetched);
        EXPECT_EQ(static_cast<int>(l.numbers.most_under_way), buffers);
    }
}

// While one is used, the next `ahead` ones are being fetched, and no others.
TEST(BlockStream, FetchesAheadOfUse) {
    for (const int ahead : {0, 1, 3}) {
        Streamed l(10, ahead);
        const auto pass = [&] {
            l.blocks.expect(numbers_in_order(10));
            if (!l.arena.rehearsing()) {
                EXPECT_EQ(l.numbers.fetched, ahead + 1);
            }
            for (int block = 0; block < 10; block++) {
                l.fetch(block);
                if (!l.arena.rehearsing()) {
                    EXPECT_EQ(l.numbers.fetched, std::min(block + ahead + 1, 10));
                }
            }
            l.blocks.release();
        };
        l.rehearse(pass);
        l.arena.run(l.plan, pass);
    }
}

// Blocks that are only written are not fetched first, but are stored.
TEST(BlockStream, WithoutContents) {
    Streamed l(5, 1);
    const auto pass = [&] {
        l.blocks.expect(numbers_in_order(5, From::Last), BlockStream::Contents::Overwritten);
        for (const int block : numbers_in_order(5, From::Last)) {
            l.fetch(block);
            int* const at = reinterpret_cast<int*>(l.blocks.change());
            if (!l.arena.rehearsing()) *at = 7 * block;
        }
        l.blocks.release();
    };
    l.rehearse(pass);
    l.arena.run(l.plan, pass);
    EXPECT_EQ(l.numbers.values, std::vector<int>({0, 7, 14, 21, 28}));
    EXPECT_EQ(l.numbers.fetched, 0);
    EXPECT_EQ(l.numbers.stored, 5);
    EXPECT_EQ(l.noted(Route::DiskWrite), 5);
}

// Any order, announced in parts, with blocks that are fetched several times and changed now and then. Run
// twice, as something recorded is.
TEST(BlockStream, InAnyOrder) {
    for (unsigned seed = 0; seed < 200; seed++) {
        std::mt19937 random(seed);
        const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
        const int count = 1 + below(6), ahead = below(8);
        struct Use {
            int block, times;
            bool changes;
        };
        std::vector<std::vector<Use>> parts(static_cast<size_t>(1 + below(4)));
        for (std::vector<Use>& part : parts)
            for (int n = below(12); n > 0; n--) part.push_back({below(count), 1 + below(2), below(3) == 0});
        Streamed l(count, ahead);
        std::vector<int> expected = l.numbers.values;
        const auto pass = [&] {
            for (const std::vector<Use>& part : parts) {
                std::vector<int> order;
                for (const Use& use : part) order.push_back(use.block);
                l.blocks.expect(order);
                for (const Use& use : part)
                    for (int time = 0; time < use.times; time++) {
                        int* at = l.fetch(use.block);
                        int& value = expected[static_cast<size_t>(use.block)];
                        if (!l.arena.rehearsing()) {
                            ASSERT_EQ(*at, value) << seed;
                        }
                        if (!use.changes) continue;
                        at = reinterpret_cast<int*>(l.blocks.change());
                        if (!l.arena.rehearsing()) *at = ++value;
                    }
            }
            l.blocks.release();
        };
        l.rehearse(pass);
        for (int run = 1; run <= 2; run++) {
            l.arena.run(l.plan, pass);
            EXPECT_EQ(l.numbers.values, expected) << seed;
            EXPECT_EQ(l.numbers.fetched, run * l.noted(Route::DiskRead)) << seed;
            EXPECT_EQ(l.numbers.stored, run * l.noted(Route::DiskWrite)) << seed;
        }
        EXPECT_LE(l.numbers.most_under_way, buffers_for(ahead, static_cast<size_t>(count))) << seed;
    }
}

// A rehearsal records what each wait is for, not just what was begun last.
TEST(BlockStream, WaitForTheirOwn) {
    Streamed l(4, 2);
    const auto pass = [&] {
        l.blocks.expect(numbers_in_order(4));
        for (const int block : numbers_in_order(4)) l.fetch(block);
        l.blocks.release();
    };
    l.rehearse(pass);
    std::vector<int> waits;
    for (const Transfer& t : l.plan.transfers)
        if (t.waits) waits.push_back(t.number);
    EXPECT_EQ(waits, numbers_in_order(4));
}

}  // namespace
