// test_rates.cpp - the time that a plan takes: transfers wait for their medium and for one another.

#include <vector>

#include <gtest/gtest.h>

#include "llmc/rates.h"
#include "llmc/tensor.h"

namespace {

// A disk that reads 10 and writes 5 bytes/s, a link of 20 in and 10 out, updates by the host of 50;
// operations of 1 FLOP/s.
Rates slow_rates() {
    Rates rates(DeviceRates{.flops = 1, .bandwidth = 1e9, .latency = 0});
    rates.transfers = {10, 5, 20, 10, 50};
    return rates;
}

// Transfers that begin after `after` operations, and waits for one.
Transfer begins(Transfer::Of of, Route route, double bytes, size_t after = 0) {
    return {of, false, route, bytes, -1, "forward", after};
}
Transfer waits(Transfer::Of of, int number, size_t after) {
    return {of, true, Route::DiskRead, 0, number, "forward", after};
}

Plan plan_of(std::vector<double> seconds, std::vector<Transfer> transfers) {
    Plan plan;
    for (const double s : seconds) plan.work.push_back({"forward", "work", s, 0});
    plan.transfers = std::move(transfers);
    return plan;
}

double total_seconds(const PhaseTimes& phases) {
    double sum = 0;
    for (const PhaseTime& p : phases) sum += p.total();
    return sum;
}
double total(const Plan& plan) {
    PhaseTimes phases;
    add_phases(phases, plan, 1, slow_rates());
    return total_seconds(phases);
}

TEST(Simulate, ComputingHidesWhatMovesMeanwhile) {
    EXPECT_DOUBLE_EQ(total(plan_of({3, 1}, {begins(Transfer::StreamedBlock, Route::FromHost, 40),
                                            waits(Transfer::StreamedBlock, 0, 1)})),
                     4);
    EXPECT_DOUBLE_EQ(total(plan_of({3, 1}, {begins(Transfer::StreamedBlock, Route::FromHost, 100),
                                            waits(Transfer::StreamedBlock, 0, 1)})),
                     6);
    EXPECT_DOUBLE_EQ(total(plan_of({3, 1}, {begins(Transfer::StreamedBlock, Route::FromHost, 100, 1),
                                            waits(Transfer::StreamedBlock, -1, 2)})),
                     8);
}

TEST(Simulate, ALinkCarriesBothWaysAtOnce) {
    // 4 s out for one kind, 5 s in for another.
    EXPECT_DOUBLE_EQ(
        total(plan_of({}, {begins(Transfer::Offloaded, Route::ToHost, 40),
                           begins(Transfer::StreamedBlock, Route::FromHost, 100),
                           waits(Transfer::StreamedBlock, 0, 0), waits(Transfer::Offloaded, 0, 0)})),
        5);
    // Within a kind, a fetch waits for earlier stores, but a store does not wait for earlier fetches.
    EXPECT_DOUBLE_EQ(
        total(plan_of({}, {begins(Transfer::State, Route::ToHost, 40),
                           begins(Transfer::State, Route::FromHost, 100), waits(Transfer::State, 1, 0)})),
        9);
    EXPECT_DOUBLE_EQ(
        total(plan_of(
            {}, {begins(Transfer::State, Route::ToHost, 40), begins(Transfer::State, Route::FromHost, 100),
                 begins(Transfer::State, Route::ToHost, 40), begins(Transfer::State, Route::FromHost, 20),
                 waits(Transfer::State, 2, 0), waits(Transfer::State, 3, 0)})),
        10);
    // In one direction: first come, first served.
    EXPECT_DOUBLE_EQ(
        total(plan_of({}, {begins(Transfer::StreamedBlock, Route::FromHost, 100),
                           begins(Transfer::State, Route::FromHost, 20), waits(Transfer::State, 0, 0)})),
        6);
}

TEST(Simulate, ADiskDoesOneThingAfterTheOther) {
    EXPECT_DOUBLE_EQ(total(plan_of({}, {begins(Transfer::State, Route::DiskWrite, 20),
                                        begins(Transfer::StreamedBlock, Route::DiskRead, 30),
                                        waits(Transfer::StreamedBlock, 0, 0)})),
                     7);
}

// What a GPU reads from a disk also uses the link.
TEST(Simulate, ADiskBesideAGpuIsBehindTheLink) {
    const Plan plan =
        plan_of({}, {begins(Transfer::StreamedBlock, Route::DiskRead, 100),
                     begins(Transfer::Offloaded, Route::FromHost, 100), waits(Transfer::Offloaded, 0, 0)});
    EXPECT_DOUBLE_EQ(total(plan), kHostIsDevice ? 5 : 10);
}

// A transfer that stays with the host does not cross the link. The host's update waits until it is complete.
TEST(Simulate, WhatStaysWithTheHostCrossesNoLink) {
    Transfer read = begins(Transfer::State, Route::DiskRead, 100), write = read;
    read.stays_with_host = write.stays_with_host = true;
    write.route = Route::DiskWrite;
    EXPECT_DOUBLE_EQ(total(plan_of({}, {read, begins(Transfer::Offloaded, Route::FromHost, 100),
                                        waits(Transfer::Offloaded, 0, 0)})),
                     5);
    EXPECT_DOUBLE_EQ(total(plan_of({}, {write, begins(Transfer::Offloaded, Route::ToHost, 100),
                                        waits(Transfer::Offloaded, 0, 0)})),
                     10);
    EXPECT_DOUBLE_EQ(total(plan_of({}, {read, begins(Transfer::State, Route::HostUpdate, 100),
                                        waits(Transfer::State, 1, 0)})),
                     12);
}

// An exchange is complete when both its parts are, that inside the machine and that over the network, and
// when all exchanges before it are.
TEST(Simulate, ExchangesAreCompleteOneAfterAnother) {
    Rates rates = slow_rates();
    rates.transfers[Route::ToRanks] = 8;
    rates.transfers[Route::ToMachines] = 6;
    const auto seconds = [&](std::vector<Transfer> transfers) {
        PhaseTimes phases;
        add_phases(phases, plan_of({}, std::move(transfers)), 1, rates);
        return total_seconds(phases);
    };
    const Transfer far = begins(Transfer::Ranks, Route::ToMachines, 60),
                   near = begins(Transfer::Ranks, Route::ToRanks, 40);
    EXPECT_DOUBLE_EQ(seconds({far, near, waits(Transfer::Ranks, 1, 0)}), 10);
    EXPECT_DOUBLE_EQ(seconds({near, waits(Transfer::Ranks, 0, 0)}), 5);
    EXPECT_DOUBLE_EQ(seconds({far, near, near, waits(Transfer::Ranks, 2, 0)}), 10);
    EXPECT_DOUBLE_EQ(seconds({near, near, near, waits(Transfer::Ranks, 2, 0)}), 15);
}

// GPUs without NVLink exchange over their links to the host, in both directions at once.
TEST(Simulate, AnExchangeMayShareTheLinkToTheHost) {
    Rates rates = slow_rates();
    rates.transfers[Route::ToRanks] = 10;
    const Plan plan = plan_of(
        {}, {begins(Transfer::StreamedBlock, Route::FromHost, 100),
             begins(Transfer::Ranks, Route::ToRanks, 70), begins(Transfer::Offloaded, Route::ToHost, 30),
             waits(Transfer::Offloaded, 0, 0), waits(Transfer::Ranks, 0, 0)});
    PhaseTimes apart, shared;
    add_phases(apart, plan, 1, rates);
    EXPECT_DOUBLE_EQ(total_seconds(apart), 7);
    EXPECT_DOUBLE_EQ(apart[0].busy[Cost::Exchange], 7);
    EXPECT_DOUBLE_EQ(apart[0].seconds[Cost::Exchange], 4);
    rates.ranks.over_host_link = true;
    add_phases(shared, plan, 1, rates);
    EXPECT_DOUBLE_EQ(total_seconds(shared), 5 + 7 + 3);
}

TEST(DeviceRates, AttentionMayHaveARateOfItsOwn) {
    const Work product = {"", "matmul", 12, 0, 0, 0, {.m = 1}},
               attention = {"", "attention", 12, 0, 0, 0, {}, {"", 8}};
    const DeviceRates one = {.flops = 4, .bandwidth = 1, .latency = 0};
    DeviceRates two = one;
    two.attention_flops = 3;
    for (const Work* w : {&product, &attention}) EXPECT_DOUBLE_EQ(seconds_of(*w, one), 3);
    EXPECT_DOUBLE_EQ(seconds_of(product, two), 3);
    EXPECT_DOUBLE_EQ(seconds_of(attention, two), 4);
}

}  // namespace
