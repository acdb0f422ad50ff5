// test_host.cpp - host code without a file format of its own: schedule, sampling, options, sizes and layout
// of models.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "llmc/arena.h"
#include "llmc/bench.h"
#include "llmc/learning_rate.h"
#include "llmc/metrics.h"
#include "llmc/model.h"
#include "llmc/options_parse.h"
#include "llmc/plan.h"
#include "llmc/ranks.h"
#include "llmc/rates_device.h"
#include "llmc/sample.h"
#include "llmc/updates.h"
#include "test/gpt2_config.h"

namespace {

TEST(Schedule, WarmsUpLinearly) {
    for (const char* name : {"constant", "cosine", "linear", "wsd"})
        for (int step = 0; step < 10; step++)
            EXPECT_DOUBLE_EQ(learning_rate(name, step, 100, 10, 1.0, 0.1), (step + 1) / 10.0) << name;
}

TEST(Schedule, KnownPoints) {
    EXPECT_DOUBLE_EQ(learning_rate("constant", 99, 100, 0, 2.0, 0.0), 2.0);
    EXPECT_DOUBLE_EQ(learning_rate("cosine", 55, 100, 10, 1.0, 0.0), 0.5);
    EXPECT_DOUBLE_EQ(learning_rate("linear", 55, 100, 10, 1.0, 0.2), 0.6);
    EXPECT_DOUBLE_EQ(learning_rate("wsd", 79, 100, 10, 1.0, 0.0), 1.0);
    EXPECT_DOUBLE_EQ(learning_rate("wsd", 90, 100, 10, 1.0, 0.0), 0.5);
    EXPECT_DOUBLE_EQ(learning_rate("wsd", 92, 100, 90, 1.0, 0.0), 0.8);  // decay waits for a long warm-up
    EXPECT_DOUBLE_EQ(learning_rate("cosine", 0, 1, 0, 1.0, 0.0), 1.0);
}

// Reported rates are those of replayed steps if there are any; phases are always those of plain steps.
TEST(Bench, ReplayedStepsAreTheSteps) {
    const MemoryReport memory;
    for (const bool forward_only : {false, true}) {
        const std::string whole = forward_only ? "forward" : "step", plain = "plain_" + whole + "_ms";
        BenchReport r{memory, forward_only, false, 1, 0, {}, 100, 1000, 1, 1};
        r.cold.ranges = {{"forward", 3.}, {"step", 9.}};
        r.steps.assign(3, {{{"forward", 1.}, {"update", 2.}, {"step", 4.}}, {}});
        nlohmann::ordered_json j = bench_json(r);
        EXPECT_FALSE(j.contains(plain));
        EXPECT_EQ(j.contains("update_ms"), !forward_only);
        EXPECT_EQ(j[whole + "_ms"]["median"], forward_only ? 1e3 : 4e3);
        EXPECT_EQ(j["tokens_per_second"], forward_only ? 100 : 25);
        r.replayed = {0.5, 0.25, 1};
        j = bench_json(r);
        EXPECT_EQ(j[plain]["median"], forward_only ? 1e3 : 4e3);
        EXPECT_EQ(j.contains("update_ms"), !forward_only);
        EXPECT_EQ(j[whole + "_ms"]["median"], 500);
        EXPECT_EQ(j[whole + "_ms"]["min"], 250);
        EXPECT_EQ(j["tokens_per_second"], 200);
        EXPECT_EQ(j["flops_per_second"], 2000);
    }
}

// Two steps of two ranks; the second one's clock is 100 s ahead. In the first step that rank comes 3 s late
// to an exchange of 1 s. In the second step the exchange takes 2 s: the first rank computes meanwhile, the
// other one for half of it.
TEST(Bench, WhatAnExchangeTakesAndWhatOthersTake) {
    std::vector<double> all(kBarriers, 50);
    all.insert(all.end(), {10, 5, 5, 4, 4, 8, 20, 23, 2, 0});
    all.insert(all.end(), kBarriers, 150);
    all.insert(all.end(), {10, 108, 108, 1, 1, 8, 120, 121, 2, 1});
    all[kBarriers / 2] = 49;  // a rank that was interrupted
    const std::vector<RankTimes> ranks = rank_times(all, 2, {1, 1});
    EXPECT_EQ(ranks[0].computing, (6 + 8) / 2.);
    EXPECT_EQ(ranks[0].hidden, (0 + 2) / 2.);
    EXPECT_EQ(ranks[0].not_hidden, (1 + 0) / 2.);
    EXPECT_EQ(ranks[0].waiting, (3 + 0) / 2.);
    EXPECT_EQ(ranks[1].computing, (9 + 7) / 2.);
    EXPECT_EQ(ranks[1].hidden, (0 + 1) / 2.);
    EXPECT_EQ(ranks[1].not_hidden, (1 + 1) / 2.);
    EXPECT_EQ(ranks[1].waiting, 0);
}

TEST(DeviceRates, GpusAreKnownByWholeNames) {
    const auto known = [](const char* name) {
        const KnownGpu* gpu = gpu_named(name);
        return std::string(gpu ? gpu->name : "");
    };
    EXPECT_EQ(known("NVIDIA A100-SXM4-80GB"), "A100-SXM4-80GB");
    EXPECT_EQ(known("NVIDIA A100 80GB PCIe"), "A100 80GB PCIe");
    EXPECT_EQ(known("A100-PCIE-40GB"), "A100-PCIE-40GB");
    EXPECT_EQ(known("NVIDIA H100 80GB HBM3"), "H100");
    EXPECT_EQ(known("NVIDIA H100 PCIe"), "H100 PCIe");
    EXPECT_EQ(known("NVIDIA H200 NVL"), "H200 NVL");
    EXPECT_EQ(known("NVIDIA A100-SXM4-40GB MIG 1g.5gb"), "");
    EXPECT_EQ(known("NVIDIA GH200 480GB"), "GH200 480GB");
    EXPECT_EQ(known("NVIDIA GB200"), "GB200");
    EXPECT_EQ(known("NVIDIA GB10"), "GB10");
    EXPECT_EQ(known("NVIDIA A10"), "A10");
    EXPECT_EQ(known("NVIDIA A10G"), "A10G");
    EXPECT_EQ(known("NVIDIA L40S"), "L40S");
    for (const char* rtx : {"RTX 4090", "RTX 4090 D", "RTX 5090", "RTX 3060 Ti", "RTX 4070 Ti SUPER"})
        EXPECT_EQ(known((std::string("NVIDIA GeForce ") + rtx).c_str()), rtx);
    for (const char* rtx :
         {"RTX A6000", "RTX 6000 Ada Generation", "RTX PRO 6000 Blackwell Workstation Edition"})
        EXPECT_EQ(known((std::string("NVIDIA ") + rtx).c_str()), rtx);
    for (const char* other :
         {"NVIDIA RTX A1000", "NVIDIA RTX A1000 Laptop GPU", "NVIDIA A1000", "NVIDIA L400",
          "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX A5000 Laptop GPU", "Orin", ""})
        EXPECT_EQ(known(other), "") << other;
}

TEST(DeviceRates, SomeGpusAreConnectedByNvlink) {
    for (const char* name : {"A100-SXM4-80GB", "A100"}) EXPECT_EQ(gpu_named(name)->nvlink, 300e9);
    for (const char* name : {"H100", "H200"}) EXPECT_EQ(gpu_named(name)->nvlink, 450e9);
    for (const char* name : {"A100 80GB PCIe", "H100 PCIe", "L40S", "RTX 4090"})
        EXPECT_EQ(gpu_named(name)->nvlink, 0);
}

// Each entry is found by its own name, not by an earlier entry's. It has the numbers that a plan divides by,
// and its rates are ordered as the formats are.
TEST(DeviceRates, EveryEntryIsFoundAndWhole) {
    for (const KnownGpu& gpu : known_gpus()) {
        if (gpu.for_plans_only) {
            EXPECT_EQ(gpu_named(std::string("NVIDIA GeForce ") + gpu.name + " GPU"), nullptr) << gpu.name;
        } else {
            ASSERT_NE(gpu_named(gpu.name), nullptr) << gpu.name;
            EXPECT_STREQ(gpu_named(gpu.name)->name, gpu.name);
        }
        EXPECT_STREQ(find_gpu(gpu.name).name, gpu.name);
        EXPECT_GE(gpu.flops, 1.9 * gpu.tf32) << gpu.name;
        EXPECT_GE(gpu.tf32, gpu.fp32) << gpu.name;
        const double least = gpu.integrated && gpu.for_plans_only ? 0.4 : 1;  // an Orin's
        EXPECT_GT(gpu.fp32, least * 4e12) << gpu.name;
        EXPECT_GT(gpu.bandwidth, least * 0.15e12) << gpu.name;
        EXPECT_GE(gpu.link, kPcie4 / 2) << gpu.name;
        EXPECT_GE(gpu.host, kDesktop) << gpu.name;
        EXPECT_TRUE(gpu.nvlink == 0 || gpu.nvlink > 4 * kPcie5) << gpu.name;
        EXPECT_DOUBLE_EQ(rates_of_gpu<float>(gpu).flops, 0.75 * gpu.fp32);
        EXPECT_DOUBLE_EQ(rates_of_gpu<bf16>(gpu).flops, 0.65 * gpu.flops);
    }
}

// The numbers that devices report, as deviceQuery prints them: computed rates come to those of their data
// sheets.
TEST(DeviceRates, AGpuIsComputedFromWhatItReports) {
    for (const GpuFacts& facts : std::initializer_list<GpuFacts>{
             {"NVIDIA A100-SXM4-80GB", 8, 0, 108, 1.410e9, 1.593e9, 5120, false},
             {"NVIDIA GeForce RTX 3060", 8, 6, 28, 1.777e9, 7.501e9, 192, false},
             {"NVIDIA GeForce RTX 3090", 8, 6, 82, 1.695e9, 9.751e9, 384, false},
             {"NVIDIA RTX A6000", 8, 6, 84, 1.800e9, 8.001e9, 384, false},
             {"NVIDIA A10", 8, 6, 72, 1.695e9, 6.251e9, 384, false},
             {"NVIDIA GeForce RTX 4090", 8, 9, 128, 2.520e9, 10.501e9, 384, false},
             {"NVIDIA L4", 8, 9, 58, 2.040e9, 6.251e9, 192, false},
             {"NVIDIA L40S", 8, 9, 142, 2.520e9, 9.001e9, 384, false},
             {"NVIDIA H100 80GB HBM3", 9, 0, 132, 1.980e9, 2.619e9, 5120, false},
             {"NVIDIA B200", 10, 0, 148, 1.965e9, 3.996e9, 8192, false},
             {"NVIDIA Thor", 11, 0, 20, 1.575e9, 4.267e9, 256, true},
             {"NVIDIA GeForce RTX 5090", 12, 0, 170, 2.407e9, 14.001e9, 512, false},
             {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 12, 0, 188, 2.617e9, 14.001e9, 512, false},
             {"NVIDIA GB10", 12, 1, 48, 2.525e9, 4.267e9, 256, true}}) {
        const KnownGpu *table = gpu_named(facts.name), computed = computed_gpu(facts);
        ASSERT_NE(table, nullptr) << facts.name;
        const auto near = [&](double a, double b, double much) {
            EXPECT_NEAR(a / b, 1, much) << facts.name << ": " << a << " beside " << b;
        };
        EXPECT_EQ(table->multiprocessors, facts.multiprocessors) << facts.name;
        // The data sheets of the largest GPUs assume less than the clock that the GPUs report.
        near(computed.flops, table->flops, 0.09);
        near(computed.tf32, table->tf32, 0.09);
        near(computed.fp32, table->fp32, 0.09);
        near(computed.bandwidth, table->bandwidth, 0.03);
        near(computed.link, table->link, 0.01);
        EXPECT_EQ(gpu_planned_for(facts).called, table->name);
        EXPECT_EQ(gpu_planned_for(facts).flops, table->flops);
    }
    // Unknown GPUs are not taken for an A100. A laptop's has eight lanes; a module's memory is its host's.
    GpuFacts laptop = {"NVIDIA GeForce RTX 4090 Laptop GPU", 8, 9, 76, 2.040e9, 9.001e9, 256, false};
    const NominalGpu planned = gpu_planned_for(laptop);
    EXPECT_EQ(planned.called, laptop.name);
    EXPECT_NEAR(planned.flops, 79.4e12, 1e11);
    EXPECT_NEAR(planned.bandwidth, 576e9, 1e9);
    EXPECT_EQ(planned.link, kPcie4 / 2);
    EXPECT_EQ(planned.host, kDesktop);
    const NominalGpu orin = gpu_planned_for({"Orin", 8, 7, 16, 1.3e9, 0.612e9, 256, true});
    EXPECT_NEAR(orin.flops, 42.6e12, 1e11);
    EXPECT_NEAR(orin.bandwidth, 204.8e9, 1e9);
    EXPECT_EQ(orin.host, orin.bandwidth);
    // A GPU that reports no memory clock has an A100's bandwidth for its FLOP/s. If no GPU answers, it is an
    // A100.
    laptop.memory_clock = 0;
    EXPECT_NEAR(gpu_planned_for(laptop).bandwidth, 1.94e12 * 79.4 / 312, 1e9);
    EXPECT_EQ(gpu_planned_for({}).called, "A100");
    EXPECT_EQ(gpu_planned_for({}).bandwidth, kA100.bandwidth);
}

// A user's mistake ends with exit code 2, our own with 1; each prints one line.
TEST(Ranks, AreKnownByWhatStartedThem) {
    using Environment = std::vector<std::pair<const char*, const char*>>;
    const auto in = [](const Environment& environment) {
        for (const auto& [name, value] : environment) setenv(name, value, 1);
        const Rank r = rank_of_environment();
        for (const auto& [name, value] : environment) unsetenv(name);
        return std::vector{r.number, r.count, r.on_this_machine, r.number_on_this_machine};
    };
    const std::vector alone = {0, 1, 1, 0};
    EXPECT_EQ(in({}), alone);
    // OpenMPI's mpirun, MPICH's, srun --mpi=pmi2 and srun --mpi=pmix.
    EXPECT_EQ(in({{"OMPI_COMM_WORLD_RANK", "5"},
                  {"OMPI_COMM_WORLD_SIZE", "8"},
                  {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                  {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}}),
              (std::vector{5, 8, 4, 1}));
    EXPECT_EQ(in({{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}, {"MPI_LOCALNRANKS", "2"}, {"MPI_LOCALRANKID", "0"}}),
              (std::vector{2, 4, 2, 0}));
    EXPECT_EQ(in({{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}}), (std::vector{3, 4, 4, 3}));
    EXPECT_EQ(in({{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}, {"SLURM_LOCALID", "1"}}), (std::vector{5, 8, 8, 1}));
    EXPECT_EQ(in({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "0"}}),
              (std::vector{1, 2, 1, 0}));
    EXPECT_EQ(in({{"PMIX_RANK", "6"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "2"}}),
              (std::vector{6, 8, 8, 2}));
    // A batch job's own shell, srun without MPI, and what is no number.
    EXPECT_EQ(in({{"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "0"}}), alone);
    EXPECT_EQ(in({{"PMI_RANK", "x"}, {"PMI_SIZE", "4"}}), alone);
    EXPECT_EQ(in({{"PMI_RANK", "-1"}, {"PMI_SIZE", "4"}}), alone);
}

// Half of the ranks wait a fifth of the step or more, and this one a quarter of that or less.
TEST(Ranks, OneThatOthersWaitForIsNamed) {
    EXPECT_EQ(slow_rank({0.5, 0.05, 0.6, 0.4}), 1);
    EXPECT_EQ(slow_rank({0.02, 0.45}), 0);
    EXPECT_EQ(slow_rank({0.2, 0.2, 0.05}), 2);
    EXPECT_EQ(slow_rank({0.3, 0.28, 0.31, 0.3}), std::nullopt);  // all wait for the network
    EXPECT_EQ(slow_rank({0.19, 0.19, 0.0}), std::nullopt);       // nobody waits long
    EXPECT_EQ(slow_rank({0.0, 0.0, 0.0, 0.9}), std::nullopt);    // three compute, and one waits
}

TEST(Ranks, ADigestOfTheirExchangesDependsOnTheOrder) {
    const Transfer gradients = {.of = Transfer::Ranks,
                                .waits = false,
                                .route = Route::ToRanks,
                                .bytes = 4096,
                                .content = "gradients"};
    Transfer weights = gradients, wait = gradients, fetch = gradients;
    weights.content = "weights";
    wait.waits = true, wait.number = 0;
    fetch.of = Transfer::StreamedBlock;
    const auto digest = [](std::vector<Transfer> train, std::vector<Transfer> update = {}) {
        Plans plans;
        plans.train.transfers = std::move(train);
        plans.update.transfers = std::move(update);
        return digest_of_exchanges(plans);
    };
    const std::string right = digest({gradients, weights, wait});
    EXPECT_EQ(right, digest({gradients, weights, wait}));
    EXPECT_EQ(right, digest({fetch, gradients, weights, wait}));  // not between ranks
    EXPECT_NE(right, digest({weights, gradients, wait}));
    EXPECT_NE(right, digest({gradients, wait, weights}));
    EXPECT_NE(right, digest({gradients, weights}, {wait}));
    weights.route = Route::ToMachines;
    EXPECT_NE(right, digest({gradients, weights, wait}));
    weights = gradients, weights.content = "weights", weights.bytes /= 2;
    EXPECT_EQ(right, digest({gradients, weights, wait}));
}

TEST(Error, ExitCodes) {
    const auto ends_with = [](auto&& action) {
        testing::internal::CaptureStderr();
        int code = 0;
        try {
            action();
        } catch (...) {
            code = report_error();
        }
        return std::pair(code, testing::internal::GetCapturedStderr());
    };
    using End = std::pair<int, std::string>;
    EXPECT_EQ(ends_with([] { fail("--lr %d\nis much", 7); }), End(2, "train: --lr 7 is much\n"));
    EXPECT_EQ(ends_with([] { throw std::bad_alloc(); }), End(2, "train: out of host memory\n"));
    EXPECT_EQ(ends_with([] { bug("%d bytes too few", 8); }),
              End(1, "train: this is a bug: 8 bytes too few\n"));
    EXPECT_EQ(ends_with([] { bug("100%%"); }), End(1, "train: this is a bug: 100%\n"));
    EXPECT_EQ(ends_with([] { throw std::runtime_error("CUDA"); }), End(1, "train: this is a bug: CUDA\n"));
}

TEST(Sampler, ZeroTemperatureIsTheLikeliest) {
    EXPECT_EQ(sample_token({0.f, 3.f, 3.f, 1.f}, {.temperature = 0, .top_k = 0}, 0.99), 1);
}

TEST(Sampler, DrawsWithSoftmaxProbabilities) {
    const std::vector<float> logits = {1.f, 0.f, -1.f, 2.f};
    std::vector<double> count(4);
    const int draws = 100000;
    for (int i = 0; i < draws; i++)
        count[static_cast<size_t>(
            sample_token(logits, {.temperature = 0.5, .top_k = 0}, (i + 0.5) / draws))]++;
    double total = 0;
    for (float x : logits) total += std::exp(x / 0.5);
    for (size_t v = 0; v < 4; v++) EXPECT_NEAR(count[v] / draws, std::exp(logits[v] / 0.5) / total, 1e-4);
}

TEST(Sampler, TopKDrawsNothingElse) {
    std::set<int> seen;
    for (int i = 0; i < 1000; i++)
        seen.insert(sample_token({1.f, 0.f, -1.f, 2.f}, {.temperature = 5, .top_k = 2}, i / 1000.0));
    EXPECT_EQ(seen, (std::set<int>{0, 3}));
}

// What is printed for the steps from first_step to `steps`, each of `seconds` seconds: the numbers of the
// printed steps, and the text.
std::pair<std::vector<int>, std::string> printed(int first_step, int steps, int every, double seconds,
                                                 const std::set<int>& stops = {}) {
    testing::internal::CaptureStdout();
    StepLines lines(first_step, steps, every, {100, 2e9, 1e12, 0});
    for (int step = first_step; step < steps; step++) {
        lines.add({step, 2.5, 0.5, 1e-3, seconds}, 1000 + seconds * step);
        if (stops.contains(step + 1)) lines.print_latest();
    }
    lines.print_latest();
    lines.print_latest();
    std::pair<std::vector<int>, std::string> result{{}, testing::internal::GetCapturedStdout()};
    int number = 0, read = 0;
    for (const char* at = result.second.c_str(); sscanf(at, "step %d/%*[^\n]\n%n", &number, &read) == 1;
         at += read)
        result.first.push_back(number);
    return result;
}

TEST(StepLines, ALineASecondAndTheFirstAndTheLast) {
    using Numbers = std::vector<int>;
    EXPECT_EQ(printed(0, 1050, 0, 0.0078125).first,
              (Numbers{1, 2, 3, 131, 259, 387, 515, 643, 771, 899, 1027, 1050}));
    EXPECT_EQ(printed(0, 6, 0, 1).first, (Numbers{1, 2, 3, 4, 5, 6}));
    EXPECT_EQ(printed(700, 720, 0, 0.25).first, (Numbers{701, 702, 703, 707, 711, 715, 719, 720}));
    EXPECT_EQ(printed(0, 300, 0, 0.0078125, {2, 100, 101}).first, (Numbers{1, 2, 3, 100, 101, 229, 300}));
    EXPECT_EQ(printed(0, 1, 0, 1e-3).first, Numbers{1});
}

TEST(StepLines, EveryNth) {
    using Numbers = std::vector<int>;
    EXPECT_EQ(printed(0, 25, 10, 60).first, (Numbers{1, 2, 3, 10, 20, 25}));
    EXPECT_EQ(printed(17, 31, 10, 1e-3, {25}).first, (Numbers{18, 19, 20, 25, 30, 31}));
    EXPECT_EQ(printed(0, 300, 1, 1e-3).first.size(), 300);
}

TEST(StepLines, SayHowFarAndHowFast) {
    EXPECT_EQ(
        printed(0, 1, 0, 0.5).second,
        "step     1/1 100.0% | loss 2.500000 | norm 0.5000 | lr 1.000e-03 |   500.00 ms |      200 tok/s | "
        "MFU  0.4% | 0:00 left\n");
    const std::string text = printed(0, 400, 100, 0.5).second;
    EXPECT_NE(text.find("step   100/400  25.0% |"), std::string::npos);
    EXPECT_NE(text.find("| 2:30 left\n"), std::string::npos);
}

TEST(StepLines, AStepThatBeatsItsReferenceGivesANewOne) {
    testing::internal::CaptureStdout();
    std::vector<double> beaten;
    const auto new_peak = [&](double reached) { return beaten.push_back(reached), 2 * reached; };
    StepLines lines(0, 5, 1, {100, 2e9, 1e10, 0, new_peak});
    for (const auto& [step, seconds] :
         {std::pair{0, 0.4}, std::pair{1, 0.1}, std::pair{2, 0.06}, std::pair{3, 0.05}, std::pair{4, 0.02}})
        lines.add({step, 2.5, 0.5, 1e-3, seconds}, step);
    const std::string printed = testing::internal::GetCapturedStdout();
    EXPECT_EQ(beaten.size(), 2);  // 5, 20, 33.3, 40 and 100 GFLOP/s
    EXPECT_DOUBLE_EQ(beaten[0], 2e10);
    EXPECT_DOUBLE_EQ(beaten[1], 1e11);
    for (const char* share : {"MFU 50.0%", "MFU 50.0%", "MFU 83.3%", "MFU 100.0%", "MFU 50.0%"})
        EXPECT_NE(printed.find(share), std::string::npos) << share;
}

TEST(MeasuredMatmul, UsesAnArenaThatIsAllocated) {
    Arena arena;
    Plan plan = arena.rehearse([&] {
        arena.take<float>("activations", {1 << 16});
        arena.workspace(1 << 20);
    });
    arena.allocate({&plan});
    const size_t before = device_bytes_allocated;
    EXPECT_EQ(measured_matmul_flops<float>({}, SIZE_MAX, &arena), 0) << "it has no room";
    EXPECT_GT(measured_matmul_flops<float>({}, 1 << 16, &arena), 0);
    EXPECT_EQ(device_bytes_allocated, before);
}

// What a terminal shows of a text that comes in pieces of `piece` bytes.
std::string shown(std::string_view text, size_t piece) {
    TerminalText terminal;
    std::string result;
    for (size_t at = 0; at < text.size(); at += piece) result += terminal.add(text.substr(at, piece));
    return result + terminal.finish();
}

TEST(Terminal, ShowsCharactersAndEscapesTheRest) {
    const std::pair<std::string, std::string> known[] = {
        {"plain\n\ttext", "plain\n\ttext"},
        {"gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80",
         "gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80"},
        {"\x1b[31mred\r\b\x7f", "\\x1b[31mred\\x0d\\x08\\x7f"},
        {std::string("\0", 1), "\\x00"},
        {"\xc2\x9b"
         "1m \xc2\xa0",
         "\\xc2\\x9b1m \xc2\xa0"},              // a control sequence in one character
        {"\x80\xbfz\xff", "\\x80\\xbfz\\xff"},  // continuations of nothing
        {"\xc0\xaf\xe0\x80\xaf\xf0\x80\x80\xaf",
         "\\xc0\\xaf\\xe0\\x80\\xaf\\xf0\\x80\\x80\\xaf"},  // longer than needed
        {"\xed\xa0\x80", "\\xed\\xa0\\x80"},                // a surrogate
        {"\xed\x9f\xbf\xee\x80\x80", "\xed\x9f\xbf\xee\x80\x80"},
        {"\xf4\x8f\xbf\xbf\xf4\x90\x80\x80",
         "\xf4\x8f\xbf\xbf\\xf4\\x90\\x80\\x80"},  // the last one and beyond
        {"\xe2\x82"
         "a\xe2\x82\xac",
         "\\xe2\\x82"
         "a\xe2\x82\xac"},                            // broken off, then whole
        {"end \xf0\x9f\x98", "end \\xf0\\x9f\\x98"},  // broken off by the end
    };
    for (const auto& [text, expected] : known)
        for (size_t piece = 1; piece <= text.size(); piece++)
            EXPECT_EQ(shown(text, piece), expected) << "in pieces of " << piece;
}

TEST(Terminal, HidesAndTurnsNothingInMessages) {
    const std::pair<std::string, std::string> known[] = {
        {"\xc2\x9b"
         "2J\n\t\r",
         "\\xc2\\x9b2J\n\t\\x0d"},
        {"a\xe2\x80\xae"
         "b\xe2\x81\xa6",
         "a\\xe2\\x80\\xaeb\\xe2\\x81\\xa6"},  // U+202E and U+2066 turn the line
        {"\xe2\x80\x8b\xe2\x80\x8f\xef\xbb\xbf", "\\xe2\\x80\\x8b\\xe2\\x80\\x8f\\xef\\xbb\\xbf"},
        {"\xf3\xa0\x81\x81 \xe2\x80\xa8 \xd8\x9c", "\\xf3\\xa0\\x81\\x81 \\xe2\\x80\\xa8 \\xd8\\x9c"},
        // Joiners, soft hyphens and variation selectors are parts of words.
        {"\xd9\x85\xe2\x80\x8c\xd8\xae \xe2\x80\x8d \xc2\xad \xef\xb8\x8f \xf3\xa0\x84\x80",
         "\xd9\x85\xe2\x80\x8c\xd8\xae \xe2\x80\x8d \xc2\xad \xef\xb8\x8f \xf3\xa0\x84\x80"},
        {"caf\xe9", "caf\\xe9"},
    };
    for (const auto& [text, expected] : known) {
        EXPECT_EQ(safe_text(text), expected);
        char* printed = nullptr;
        size_t size = 0;
        FILE* const to = open_memstream(&printed, &size);
        print(to, "%s|%d\n", text.c_str(), 7);
        fclose(to);
        EXPECT_EQ(std::string(printed, size), expected + "|7\n");
        free(printed);
    }
    // An error is one line.
    char* printed = nullptr;
    size_t size = 0;
    FILE* const to = open_memstream(&printed, &size);
    try {
        fail("a\n%s", "\xe2\x80\xae");
    } catch (...) {
        EXPECT_EQ(report_error(to), 2);
    }
    fclose(to);
    EXPECT_EQ(std::string(printed, size), "train: a \\xe2\\x80\\xae\n");
    free(printed);
}

TEST(Terminal, HoldsBackNoMoreThanACharacter) {
    TerminalText terminal;
    EXPECT_EQ(terminal.add("a\xe2\x82"), "a");
    EXPECT_EQ(terminal.add("\xac"), "\xe2\x82\xac");
    EXPECT_EQ(terminal.add("\xe2("), "\\xe2(");
    EXPECT_EQ(terminal.finish(), "");
}

Asked parse(std::vector<std::string> words, const nlohmann::json& saved = nlohmann::json::object()) {
    words.insert(words.begin(), "train");
    std::vector<char*> argv;
    for (std::string& w : words) argv.push_back(w.data());
    return parse_options(static_cast<int>(argv.size()), argv.data(), [&](const std::string&) {
        return SavedOptions{saved, saved, "/before"};
    });
}
std::string failure(const std::vector<std::string>& words) {
    try {
        parse(words);
    } catch (const UserError& e) {
        return e.what();
    }
    return "";
}

TEST(Options, AResumeTakesTheSavedOnesUnlessGiven) {
    const nlohmann::json saved = {{"--batch", {"3"}}, {"--lr", {"0.5"}}, {"--data", {"a.txt", "b.txt"}}};
    const Asked o = parse({"--resume", "dir", "--lr", "0.25"}, saved);
    EXPECT_EQ(o.batch, 3);
    EXPECT_EQ(o.lr, 0.25);
    EXPECT_EQ(o.data, (std::vector<std::string>{"a.txt", "b.txt"}));
    EXPECT_TRUE(o.has("--batch") && o.has("--lr") && !o.has("--seed"));
    EXPECT_EQ(o.settings.at("--lr"), std::vector<std::string>{"0.25"});
}

TEST(Options, ATrainedModelHasALowerRate) {
    EXPECT_EQ(parse({}).lr, 1e-3);
    EXPECT_EQ(parse({"--model", "d12"}).lr, 1e-3);
    EXPECT_EQ(parse({"--model", "gpt2"}).lr, 5e-5);
    EXPECT_EQ(parse({"--model", "gpt2", "--lr", "1e-3"}).lr, 1e-3);
    EXPECT_EQ(parse({"--resume", "out"}, {{"--model", {"gpt2"}}}).lr, 5e-5);
    EXPECT_EQ(parse({"--resume", "out", "--steps", "9"}, {{"--lr", {"0.5"}}}).lr, 0.5);
    EXPECT_NE(failure({"--model", "gpt2", "--min-lr", "1e-4"}).find("--lr 5e-05"), std::string::npos);
}

TEST(Options, AResumeThatOnlyGeneratesNeedsNothingOfTheTraining) {
    const nlohmann::json saved = {{"--data", {"a"}},         {"--val-data", {"b"}}, {"--log", {"c"}},
                                  {"--out", {"d"}},          {"--seq-len", {"7"}},  {"--save-every", {"2"}},
                                  {"--sample.tokens", {"0"}}};
    Asked o = parse({"--resume", "dir", "--steps", "0", "--prompt", "Hi"}, saved);
    EXPECT_TRUE(o.data.empty() && o.val_data.empty() && o.log.empty() && o.out.empty() && o.save_every == 0);
    EXPECT_EQ(o.seq_len, 7);
    EXPECT_EQ(o.sample_tokens, Asked().sample_tokens);
    EXPECT_EQ(o.of_save, (std::set<std::string>{"--seq-len"}));
    EXPECT_EQ(parse({"--resume", "dir", "--prompt", "Hi", "--sample", "tokens=3"}, saved).sample_tokens, 3);
    o = parse({"--resume", "dir", "--steps", "5"}, saved);
    EXPECT_EQ(o.sample_tokens, 0);
    EXPECT_EQ(o.log, "c");
    EXPECT_EQ(o.directory, "/before");
    EXPECT_TRUE(o.saves() && !parse({"--resume", "dir", "--plan"}, saved).saves());
}

TEST(Options, ResumeAuto) {
    EXPECT_NE(failure({"--resume", "auto"}).find("--out"), std::string::npos);
    EXPECT_EQ(parse({"--resume", "auto", "--out", "/nowhere", "--memory", "1GiB", "--state-formats", "auto"})
                  .resume,
              "");
    EXPECT_NE(failure({"--resume", "dir", "--memory", "1GiB", "--state-formats", "auto"})
                  .find("--state-formats auto"),
              std::string::npos);
}

TEST(Options, HeadRowsMayBeAutomatic) {
    EXPECT_EQ(parse({}).head_rows, -1);
    EXPECT_EQ(parse({"--chunk-rows", "head=auto"}).head_rows, -1);
    EXPECT_EQ(parse({"--chunk-rows", "head=all"}).head_rows, 0);
    EXPECT_EQ(parse({"--resume", "dir"}, {{"--chunk-rows.head", {"512"}}}).head_rows, 512);
    EXPECT_NE(failure({"--chunk-rows", "head=-1"}).find("--chunk-rows head"), std::string::npos);
}

TEST(Options, GraphIsOnOrOff) {
    EXPECT_EQ(parse({}).graph, "on");
    EXPECT_EQ(parse({"--advanced", "graph=off"}).graph, "off");
    EXPECT_NE(failure({"--advanced", "graph=maybe"}).find("--advanced graph"), std::string::npos);
}

TEST(Options, WholeNumbersMayHaveAnExponent) {
    const Asked o =
        parse({"--steps", "1e3", "--batch", "1.5E1", "--seed", "1e15", "--top-k", "20e-1", "--warmup", "7"});
    EXPECT_EQ(o.steps, 1000);
    EXPECT_EQ(o.batch, 15);
    EXPECT_EQ(o.seed, 1000000000000000u);
    EXPECT_EQ(o.sampling.top_k, 2);
    EXPECT_EQ(o.warmup, 7);
    EXPECT_EQ(parse({"--seed", "18446744073709549568"}).seed, 18446744073709549568u);
    for (const char* wrong : {"1.5e0", "1e-1", "1e20", "e3", "1e", "1e3x"})
        EXPECT_NE(failure({"--steps", wrong}).find(std::string("--steps: ") + wrong), std::string::npos)
            << wrong;
    EXPECT_NE(failure({"--batch", "auto3"}), "");
}

TEST(Options, OfAnOptionGivenTwiceTheLastCounts) {
    const Asked o = parse({"--data", "a", "b", "c", "--lr", "1", "--batch", "auto", "--plan", "json",
                           "--data", "d", "e", "--lr=2", "--plan", "table", "--batch", "3"});
    EXPECT_EQ(o.lr, 2);
    EXPECT_EQ(o.batch, 3);
    EXPECT_TRUE(o.plan);
    EXPECT_EQ(o.data, (std::vector<std::string>{"d", "e"}));
    EXPECT_EQ(o.settings.at("--lr"), std::vector<std::string>{"2"});  // what a save remembers
    EXPECT_EQ(o.settings.at("--data"), o.data);
    EXPECT_EQ(o.settings.at("--batch"), std::vector<std::string>{"3"});
    EXPECT_EQ(parse({"--bench", "forward", "--bench", "step"}).bench, "step");
    EXPECT_NE(failure({"--lr", "1", "2", "--lr", "3"}), "");
    EXPECT_NE(failure({"--lr", "x", "--lr", "3"}).find("--lr"), std::string::npos);
    const nlohmann::json saved = {{"--lr", {"0.5"}}, {"--seed", {"1e3"}}};
    EXPECT_EQ(parse({"--resume", "dir", "--lr", "3", "--lr", "4"}, saved).lr, 4);
    EXPECT_EQ(parse({"--resume", "dir"}, saved).seed, 1000u);
}

TEST(Options, MistakesNameTheOption) {
    EXPECT_NE(failure({"--batch", "0"}).find("--batch"), std::string::npos);
    EXPECT_NE(failure({"--schedule", "sinus"}).find("--schedule"), std::string::npos);
    EXPECT_NE(failure({"--no-such"}).find("--no-such"), std::string::npos);
    EXPECT_NE(failure({"--min-lr", "1", "--lr", "0.1"}).find("--min-lr"), std::string::npos);
    EXPECT_NE(failure({"--plan", "xml"}).find("--plan"), std::string::npos);
    EXPECT_NE(failure({"--lr", "nan"}), "");
    EXPECT_EQ(failure({"--batch", "2", "--lr", "1e-3"}), "");
}

TEST(Model, CountsOfGpt2) {
    EXPECT_EQ(Layout(new_config({&kGpt2, 12}, 50257, 1024)).count(), 124439808);
    EXPECT_EQ(Layout(new_config({&kGpt2, 24}, 50257, 1024)).count(), 354823168);
    EXPECT_EQ(Layout(new_config({&kGpt2, 36}, 50257, 1024)).count(), 774030080);
    EXPECT_EQ(Layout(new_config({&kGpt2, 48}, 50257, 1024)).count(), 1557611200);
    EXPECT_THROW(new_config({&kGpt2, 13}, 50257, 1024), UserError);
}

TEST(Model, LayoutTilesTheBufferAndPutsDecayFirst) {
    const Layout layout(gpt2_config(300, 50, 3, 5, 35));
    int64_t end = 0;
    for (const Parameter& p : layout.parameters()) {
        EXPECT_GE(p.offset, end) << p.name;
        EXPECT_LT(p.offset - end, kParameterAlignment) << p.name;
        EXPECT_EQ(p.offset % kParameterAlignment, 0) << p.name;
        end = p.offset + p.memory.size();
    }
    EXPECT_LE(end, layout.size());
    int64_t start = 0;
    for (const Unit& u : layout.units()) {
        EXPECT_EQ(u.offset, start);
        start += u.size;
        for (const Parameter& p : layout.parameters()) {
            const bool inside = p.offset >= u.offset && p.offset < u.offset + u.size;
            EXPECT_TRUE(!inside || p.decays == (p.offset < u.offset + u.decayed)) << p.name;
        }
    }
    EXPECT_EQ(start, layout.size());
    EXPECT_EQ(layout.parameters()[0].memory.dims[0], 384);
}

TEST(Model, FieldsPointWhereTheTableSays) {
    const Layout layout(gpt2_config(256, 16, 2, 2, 8));
    const Unit& unit = layout.units()[2];
    std::vector<float> memory(static_cast<size_t>(unit.size));
    const Block<float> block = layout.block(memory.data(), 1);
    for (const Parameter& p : layout.parameters())
        if (p.name == "h.1.mlp.c_fc.weight") {
            EXPECT_EQ(block.up.weight.data(), memory.data() + (p.offset - unit.offset));
            EXPECT_EQ(block.up.weight.shape(), (Shape{8, 32}));
        }
    EXPECT_EQ(layout.head(memory.data()).norm.bias.size(), 8);
}

TEST(Model, InitialValuesHaveGpt2sDeviation) {
    Parameter normal, residual;
    normal.init = Init::Normal;
    residual.init = Init::ResidualNormal;
    std::vector<float> values(10000), residual_values(10000);
    normal.name = "a", residual.name = "b";
    initial_values(normal, 0, 8, 1, values);
    initial_values(residual, 0, 8, 1, residual_values);
    double sum = 0, squares = 0, residual_squares = 0;
    for (size_t i = 0; i < values.size(); i++) {
        const double x = values[i], y = residual_values[i];
        sum += x, squares += x * x, residual_squares += y * y;
    }
    EXPECT_NEAR(sum / 10000, 0, 1e-3);
    EXPECT_NEAR(std::sqrt(squares / 10000), 0.02, 1e-3);
    EXPECT_NEAR(std::sqrt(residual_squares / 10000), 0.02 / 4, 3e-4);
}

TEST(Config, RefusesWhatItCannotCompute) {
    const nlohmann::json good = config_json(gpt2_config(50257, 1024, 12, 12, 768), "float32");
    EXPECT_EQ(parse_config(good, "f"), gpt2_config(50257, 1024, 12, 12, 768));
    auto message = [&](const char* name, const nlohmann::json& value) -> std::string {
        nlohmann::json j = good;
        j[name] = value;
        try {
            parse_config(j, "f");
        } catch (const UserError& e) {
            return e.what();
        }
        return "";
    };
    for (auto [name, value] : std::initializer_list<std::pair<const char*, nlohmann::json>>{
             {"model_type", "mixtral"},
             {"activation_function", "relu"},
             {"layer_norm_epsilon", "small"},
             {"n_head", 7},
             {"n_layer", -1},
             {"n_embd", "many"},
             {"n_embd", 1e30},
             {"vocab_size", 18446744073709551615ull},
             {"n_inner", 5},
             {"n_head", 1},
             {"tie_word_embeddings", false}})
        EXPECT_NE(message(name, value), "") << name << " " << value;
    nlohmann::json missing = good;
    missing.erase("n_layer");
    EXPECT_THROW(parse_config(missing, "f"), UserError);
    EXPECT_THROW(parse_config(nlohmann::json::array(), "f"), UserError);
}

// NVIDIA's rates without tensor cores, in fp32.
TEST(Gpus, ProductsInFp32AreNotPlannedAtAFractionOfTheirRate) {
    for (const auto& [name, most] : std::initializer_list<std::pair<const char*, double>>{
             {"RTX 4090", 82.6e12}, {"A100", 19.5e12}, {"H100 SXM", 67e12}, {"RTX 3090", 35.6e12}}) {
        const KnownGpu* const gpu = gpu_named(name);
        ASSERT_NE(gpu, nullptr) << name;
        EXPECT_GT(rates_of_gpu<float>(*gpu).flops, 0.7 * most) << name;
        EXPECT_LT(rates_of_gpu<float>(*gpu).flops, 0.8 * most) << name;
        EXPECT_GT(rates_of_gpu<bf16>(*gpu).flops, rates_of_gpu<float>(*gpu).flops) << name;
    }
}
}  // namespace
