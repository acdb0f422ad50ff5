// test_residence.cpp - loans (streamed data) in any order, with any prefetch distance: each has arrived when
// it is borrowed, what was changed is stored, and nothing is fetched that is there already.

#include <algorithm>
#include <deque>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/offload_blocks.h"

namespace {

// Loans of one number each. A transfer arrives when it is waited for, and not before.
class Numbers : public Residence {
  public:
    explicit Numbers(int loans) : values(static_cast<size_t>(loans)) {
        std::iota(values.begin(), values.end(), 100);
    }
    size_t start(int loan, char* room, Stream, int changed) override {
        int* const at = reinterpret_cast<int*>(room);
        if (changed != kNoLoan) values[static_cast<size_t>(changed)] = *at, stored++;
        *at = -1;
        coming_.push_back({loan, at});
        fetched += loan != kNoLoan;
        most_under_way = std::max(most_under_way, coming_.size());
        return begun_++;
    }
    void finish(size_t number, Stream) override {
        ASSERT_LT(number, begun_);
        for (; begun_ - coming_.size() <= number; coming_.pop_front())
            if (const auto [loan, room] = coming_.front(); loan != kNoLoan)
                *room = values[static_cast<size_t>(loan)];
    }

    std::vector<int> values;
    int fetched = 0, stored = 0;
    size_t most_under_way = 0;

  private:
    struct Coming {
        int loan;
        int* room;
    };
    std::deque<Coming> coming_;
    size_t begun_ = 0;
};

constexpr Lent kNumbers = {Transfer::Loan, "number", "weights"};

// A program that streams numbers: rehearsed, and then run as often as asked for.
struct Lending {
    Numbers numbers;
    Arena arena;
    const Stream stream = {};
    Loans loans{arena, stream, kNumbers};
    Plan plan;

    Lending(int count, int ahead) : numbers(count) {
        loans.lend(Way::DiskRead, std::vector<size_t>(static_cast<size_t>(count), sizeof(int)), ahead,
                   &numbers);
    }
    template <class Pass>
    void rehearse(Pass&& pass) {
        plan = arena.rehearse(pass);
        arena.allocate({&plan});
    }
    int* borrow(int loan) { return reinterpret_cast<int*>(loans.borrow(loan)); }
    // How many fetches, or stores, the rehearsal recorded.
    int noted(Way way) const {
        const auto is_one = [way](const Transfer& t) { return !t.waits && t.way == way; };
        return static_cast<int>(std::count_if(plan.transfers.begin(), plan.transfers.end(), is_one));
    }
};

// Forward and backward of a training. Between them, as many loans stay as there are buffers.
TEST(Loans, ForwardAndBack) {
    constexpr int kLoans = 7;
    for (const int ahead : {0, 1, 2, 5, 6, 40}) {
        Lending l(kLoans, ahead);
        const int rooms = std::min(ahead + 1, kLoans);
        const auto pass = [&] {
            for (const auto& way : {loans_in_order(kLoans), loans_in_order(kLoans, true)}) {
                l.loans.expect(way);
                for (const int loan : way) {
                    const int* const at = l.borrow(loan);
                    if (!l.arena.rehearsing()) {
                        ASSERT_EQ(*at, 100 + loan);
                    }
                    ASSERT_TRUE(l.loans.holds(loan));
                }
            }
            l.loans.give_back();
        };
        l.rehearse(pass);
        EXPECT_EQ(static_cast<int>(l.plan.takes.size()), rooms);
        l.arena.run(l.plan, pass);
        EXPECT_EQ(l.numbers.fetched, 2 * kLoans - rooms) << ahead;
        EXPECT_EQ(l.noted(Way::DiskRead), l.numbers.fetched);
        EXPECT_EQ(static_cast<int>(l.numbers.most_under_way), rooms);
    }
}

// While one is used, the next `ahead` ones are being fetched, and no others.
TEST(Loans, ComeSoFarAhead) {
    for (const int ahead : {0, 1, 3}) {
        Lending l(10, ahead);
        const auto pass = [&] {
            l.loans.expect(loans_in_order(10));
            if (!l.arena.rehearsing()) {
                EXPECT_EQ(l.numbers.fetched, ahead + 1);
            }
            for (int loan = 0; loan < 10; loan++) {
                l.borrow(loan);
                if (!l.arena.rehearsing()) {
                    EXPECT_EQ(l.numbers.fetched, std::min(loan + ahead + 1, 10));
                }
            }
            l.loans.give_back();
        };
        l.rehearse(pass);
        l.arena.run(l.plan, pass);
    }
}

// Loans that are only written are not fetched first, but are stored.
TEST(Loans, WithoutContents) {
    Lending l(5, 1);
    l.loans.come_with_contents(false);
    const auto pass = [&] {
        l.loans.expect(loans_in_order(5, true));
        for (const int loan : loans_in_order(5, true)) {
            l.borrow(loan);
            int* const at = reinterpret_cast<int*>(l.loans.change());
            if (!l.arena.rehearsing()) *at = 7 * loan;
        }
        l.loans.give_back();
    };
    l.rehearse(pass);
    l.arena.run(l.plan, pass);
    EXPECT_EQ(l.numbers.values, std::vector<int>({0, 7, 14, 21, 28}));
    EXPECT_EQ(l.numbers.fetched, 0);
    EXPECT_EQ(l.numbers.stored, 5);
    EXPECT_EQ(l.noted(Way::DiskWrite), 5);
}

// Any order, announced in parts, with loans that are borrowed several times and changed now and then. Run
// twice, as something recorded is.
TEST(Loans, InAnyOrder) {
    for (unsigned seed = 0; seed < 200; seed++) {
        std::mt19937 random(seed);
        const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
        const int count = 1 + below(6), ahead = below(8);
        struct Use {
            int loan, times;
            bool changes;
        };
        std::vector<std::vector<Use>> parts(static_cast<size_t>(1 + below(4)));
        for (std::vector<Use>& part : parts)
            for (int n = below(12); n > 0; n--) part.push_back({below(count), 1 + below(2), below(3) == 0});
        Lending l(count, ahead);
        std::vector<int> expected = l.numbers.values;
        const auto pass = [&] {
            for (const std::vector<Use>& part : parts) {
                std::vector<int> order;
                for (const Use& use : part) order.push_back(use.loan);
                l.loans.expect(order);
                for (const Use& use : part)
                    for (int time = 0; time < use.times; time++) {
                        int* at = l.borrow(use.loan);
                        int& value = expected[static_cast<size_t>(use.loan)];
                        if (!l.arena.rehearsing()) {
                            ASSERT_EQ(*at, value) << seed;
                        }
                        if (!use.changes) continue;
                        at = reinterpret_cast<int*>(l.loans.change());
                        if (!l.arena.rehearsing()) *at = ++value;
                    }
            }
            l.loans.give_back();
        };
        l.rehearse(pass);
        for (int run = 1; run <= 2; run++) {
            l.arena.run(l.plan, pass);
            EXPECT_EQ(l.numbers.values, expected) << seed;
            EXPECT_EQ(l.numbers.fetched, run * l.noted(Way::DiskRead)) << seed;
            EXPECT_EQ(l.numbers.stored, run * l.noted(Way::DiskWrite)) << seed;
        }
        EXPECT_LE(l.numbers.most_under_way, rooms_for(ahead, static_cast<size_t>(count))) << seed;
    }
}

// A rehearsal records what each wait is for, not just what was begun last.
TEST(Loans, WaitForTheirOwn) {
    Lending l(4, 2);
    const auto pass = [&] {
        l.loans.expect(loans_in_order(4));
        for (const int loan : loans_in_order(4)) l.borrow(loan);
        l.loans.give_back();
    };
    l.rehearse(pass);
    std::vector<int> waits;
    for (const Transfer& t : l.plan.transfers)
        if (t.waits) waits.push_back(t.number);
    EXPECT_EQ(waits, loans_in_order(4));
}

}  // namespace
