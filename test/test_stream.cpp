// test_stream.cpp - what keeps a device busy: micro-batches that are copied to it while it computes, numbers
// that are read back later, and work that is recorded as a graph.

#include <algorithm>
#include <array>
#include <span>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/data_feeder.h"
#include "llmc/graph.h"
#include "test/kernel_test.h"

namespace {

template <class T>
std::vector<T> downloaded(const Tensor<T>& t, Stream stream) {
    std::vector<T> host(static_cast<size_t>(t.size()));
    copy_to_host(host.data(), t.data(), host.size() * sizeof(T), stream);
    return host;
}

// Token i of micro-batch k: of its inputs, or of its targets.
int token(int k, size_t i, int targets, int vocabulary) {
    return static_cast<int>(random_bits(81, static_cast<uint64_t>(2 * k + targets), i) %
                            static_cast<uint64_t>(vocabulary));
}

void feed(Feeder& feeder, Stream stream, int k, int vocabulary) {
    const Feeder::Slot slot = feeder.slot();
    ASSERT_EQ(slot.inputs.size(), slot.targets.size());
    for (size_t i = 0; i < slot.inputs.size(); i++) {
        slot.inputs[i] = token(k, i, 0, vocabulary);
        slot.targets[i] = token(k, i, 1, vocabulary);
    }
    feeder.send(stream);
}

// There are as many numbers as planned, and a batch is complete, whatever was there before.
TEST(Feeder, BringsEachBatchToTheSameAddresses) {
    for (const auto [batch, seq_len, vocabulary] :
         {std::array{1, 1, 1}, std::array{3, 5, 7}, std::array{2, 40, 50257}, std::array{4, 33, 3}}) {
        const int64_t rows = int64_t{batch} * seq_len, groups = std::min<int64_t>(rows, vocabulary);
        const OwnStream stream;
        Feeder feeder;
        feeder.set_sizes(5, 9, 11);  // and then other sizes
        feeder.set_sizes(batch, seq_len, vocabulary);
        EXPECT_EQ(feeder.batch().inputs.data(), nullptr);
        EXPECT_TRUE(feeder.batch().targets.shape() == (Shape{batch, seq_len}));
        EXPECT_EQ(feeder.batch().token_starts.size(), groups + 1);
        const size_t before = device_bytes_allocated;
        feeder.allocate();
        EXPECT_EQ(device_bytes_allocated - before, feeder.bytes());
        EXPECT_EQ(feeder.bytes(), Feeder::kCopies * sizeof(int) * static_cast<size_t>(3 * rows + groups + 1));
        const int* const address = feeder.batch().inputs.data();
        for (int k = 0; k < 4; k++) {
            feed(feeder, stream.get(), k, vocabulary);
            const DeviceBatch& b = feeder.batch();
            EXPECT_EQ(b.inputs.data(), address);
            const std::vector<int> inputs = downloaded(b.inputs, stream.get());
            const std::vector<int> targets = downloaded(b.targets, stream.get());
            for (size_t i = 0; i < inputs.size(); i++) {
                ASSERT_EQ(inputs[i], token(k, i, 0, vocabulary));
                ASSERT_EQ(targets[i], token(k, i, 1, vocabulary));
            }
            std::vector<int> order(inputs.size()), starts(static_cast<size_t>(groups) + 1);
            group_tokens(inputs, vocabulary, order, starts);
            EXPECT_EQ(downloaded(b.rows_by_token, stream.get()), order);
            EXPECT_EQ(downloaded(b.token_starts, stream.get()), starts);
        }
    }
}

// A packed batch also brings its documents and the loss's scale.
TEST(Feeder, BringsDocuments) {
    const OwnStream stream;
    Feeder feeder;
    const int batch = 3, seq_len = 20, vocabulary = 7;
    feeder.set_sizes(batch, seq_len, vocabulary);
    EXPECT_FALSE(feeder.batch().documents.positions);
    const int64_t whole = feeder.count();
    feeder.set_sizes(batch, seq_len, vocabulary, true);
    EXPECT_EQ(feeder.count(), whole + 3 * batch * seq_len + (seq_len + 1) + 1);
    feeder.allocate();
    for (int k = 0; k < 3; k++) {
        const Feeder::Slot slot = feeder.slot();
        std::vector<int> positions, ends;
        for (int i = 0; i < batch * seq_len; i++) {
            slot.inputs[i] = token(k, i, 0, vocabulary);
            slot.targets[i] = token(k, i, 1, vocabulary);
            slot.positions[i] = i % seq_len % (k + 4);
            slot.ends[i] = 1000 * k + i;
            positions.push_back(slot.positions[i]);
            ends.push_back(slot.ends[i]);
        }
        *slot.loss_scale = 0.5f + k;
        feeder.send(stream.get());
        const DeviceBatch& b = feeder.batch();
        EXPECT_EQ(downloaded(b.inputs, stream.get())[5], token(k, 5, 0, vocabulary));
        EXPECT_EQ(downloaded(b.documents.positions, stream.get()), positions);
        EXPECT_EQ(downloaded(b.documents.ends, stream.get()), ends);
        EXPECT_EQ(downloaded(b.loss_scale, stream.get()), std::vector<float>{0.5f + k});
        std::vector<int> order(positions.size()), starts(seq_len + 1);
        group_tokens(positions, seq_len, order, starts);
        EXPECT_EQ(downloaded(b.documents.rows_by_position, stream.get()), order);
        EXPECT_EQ(downloaded(b.documents.position_starts, stream.get()), starts);
    }
}

// The host never waits for what it enqueues; each turn still reads its own batch.
TEST(Feeder, RunsAheadWithoutMixingBatches) {
    const int turns = 40, vocabulary = 1000;
    const OwnStream stream;
    Feeder feeder;
    feeder.set_sizes(4, 512, vocabulary);
    feeder.allocate();
    const size_t rows = 4 * 512;
    const DeviceArray<int> seen(turns * rows);
    for (int k = 0; k < turns; k++) {
        feed(feeder, stream.get(), k, vocabulary);
        copy_async(seen.data() + static_cast<size_t>(k) * rows, feeder.batch().inputs.data(),
                   rows * sizeof(int), stream.get());
    }
    const std::vector<int> all = downloaded(seen.tensor({turns, 4 * 512}), stream.get());
    for (size_t i = 0; i < all.size(); i++)
        ASSERT_EQ(all[i], token(static_cast<int>(i / rows), i % rows, 0, vocabulary)) << i;
}

// Two are under way at a time, each with what the stream had done when it was started.
TEST(Readback, HoldsWhatWasThereWhenItWasStarted) {
    const OwnStream stream;
    const DeviceArray<int> device(3);
    Readback even(3 * sizeof(int)), odd(3 * sizeof(int));
    for (int byte = 0; byte < 6; byte++) {
        device_fill(device.data(), byte, 3 * sizeof(int), stream.get());
        (byte % 2 ? odd : even).start(device.data(), stream.get());
        if (byte == 0) continue;
        const char* before = (byte % 2 ? even : odd).wait();  // after the next was enqueued
        EXPECT_TRUE(std::all_of(before, before + 3 * sizeof(int), [&](char c) { return c == byte - 1; }));
    }
}

// *sum = *sum * 3 + *x
__global__ void fold_kernel(unsigned* sum, const unsigned* x) { *sum = *sum * 3 + *x; }

// A replay reads what memory contains then. Each key has its own work, which the host enqueues twice at most.
TEST(StepGraphs, ReplaysWhatWasEnqueued) {
    const OwnStream stream;
    StepGraphs graphs;
    const DeviceArray<unsigned> sums(std::vector<unsigned>{0, 0}), x(1);
    int calls[2] = {};
    unsigned want[2] = {};
    const int runs = 6;
    for (int i = 0; i < 2 * runs; i++) {
        const int which = i % 2;
        device_fill(x.data(), i, sizeof(unsigned), stream.get());
        graphs.run({&calls[which], false}, stream.get(), [&] {
            calls[which]++;
            for (int k = 0; k < 2; k++)
                launch<fold_kernel>(1, 1, 0, stream.get(), sums.data() + which, x.data());
        });
        for (int k = 0; k < 2; k++) want[which] = want[which] * 3 + static_cast<unsigned>(i) * 0x01010101u;
    }
    const std::vector<unsigned> got = sums.download();
    for (const int which : {0, 1}) {
        EXPECT_EQ(got[static_cast<size_t>(which)], want[which]);
        EXPECT_EQ(calls[which], StepGraphs::kReplays ? 2 : runs);
    }
}

// What the host does between graphs is done each time, in its place. It may enqueue too, and nothing of it is
// recorded.
TEST(StepGraphs, TheHostActsBetweenGraphs) {
    const OwnStream stream;
    StepGraphs graphs;
    const DeviceArray<unsigned> sum(std::vector<unsigned>{0}), x(std::vector<unsigned>{1});
    std::vector<unsigned> seen;
    unsigned want = 0;
    const auto fold = [&] { launch<fold_kernel>(1, 1, 0, stream.get(), sum.data(), x.data()); };
    const auto look = [&] { seen.push_back(sum.download()[0]); };
    for (int i = 0; i < 5; i++) {
        graphs.run({&sum, false}, stream.get(), [&] {
            host_act(look);  // with nothing before it
            fold();
            host_act([&, moved = std::make_unique<int>(2)] {
                for (int k = 0; k < *moved; k++) fold();
                look();
            });
            host_act(look);  // with nothing between
            fold();
        });
        ASSERT_EQ(seen.size(), 3u);
        EXPECT_EQ(seen[0], want);
        for (int k = 0; k < 3; k++) want = 3 * want + 1;
        EXPECT_EQ(seen[1], want);
        EXPECT_EQ(seen[2], want);
        want = 3 * want + 1;
        seen.clear();
    }
    EXPECT_EQ(sum.download()[0], want);
}

// A failure while recording leaves the stream as it was.
TEST(StepGraphs, AFailureIsPassedOn) {
    const OwnStream stream;
    StepGraphs graphs;
    const DeviceArray<unsigned> sum(std::vector<unsigned>{1}), x(std::vector<unsigned>{1});
    for (const bool fails : {false, true, false, false}) {
        auto run = [&] {
            graphs.run({&sum, false}, stream.get(), [&] {
                if (fails) throw std::runtime_error("a test");
                launch<fold_kernel>(1, 1, 0, stream.get(), sum.data(), x.data());
            });
        };
        if (fails)
            EXPECT_THROW(run(), std::runtime_error);
        else
            run();
    }
    EXPECT_EQ(sum.download()[0], 40u);
}

TEST(DeviceMemory, TooMuchIsSaidInALine) {
    try {
        const DeviceBuffer buffer(size_t{1} << 50, "a test");
        ADD_FAILURE() << "no device has that much";
    } catch (const UserError& e) {
        EXPECT_NE(std::string(e.what()).find("memory: a test takes"), std::string::npos) << e.what();
    }
}

}  // namespace
