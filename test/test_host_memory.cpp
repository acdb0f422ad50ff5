// test_host_memory.cpp - free memory: read from made-up files of /proc and /sys, for machines, containers and
// limits; and what follows from it.
#include <sys/mman.h>

#include "llmc/free_memory.h"
#include "llmc/plan_free_memory.h"
#include "llmc/plan_settings.h"
#include "test/file_helpers.h"

namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr const char* kV1 =
    "36 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n";
constexpr const char* kV2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";

// A machine with 1000 MiB available, as files in a folder.
struct Machine {
    TempFolder folder;

    Machine(const std::string& cgroup, const std::string& mounts) {
        write("/proc/meminfo", "MemTotal:  9000000 kB\nMemAvailable:    1024000 kB\n");
        write("/proc/self/status", "Name:\ttrain\nVmSize:\t   40960 kB\nVmData:\t  20480 kB\n");
        write("/proc/self/cgroup", "3:cpuset:/other\n" + cgroup);
        write("/proc/self/mountinfo", "23 1 0:5 / /proc rw - proc proc rw\n" + mounts);
    }
    void write(const std::string& path, const std::string& content) const {
        const std::filesystem::path at(folder.path() + path);
        std::filesystem::create_directories(at.parent_path());
        std::ofstream(at) << content;
    }
    void v1(const std::string& at, const std::string& limit, size_t used, size_t files = 0) const {
        write(at + "/memory.limit_in_bytes", limit);
        write(at + "/memory.usage_in_bytes", std::to_string(used));
        write(at + "/memory.stat", "inactive_file 1\ntotal_inactive_file " + std::to_string(files) + "\n");
    }
    void v2(const std::string& at, const std::string& max, const std::string& high, size_t used,
            size_t files = 0) const {
        write(at + "/memory.max", max + "\n");
        write(at + "/memory.high", high + "\n");
        write(at + "/memory.current", std::to_string(used) + "\n");
        write(at + "/memory.stat", "anon 5\ninactive_file " + std::to_string(files) + "\nactive_file 7\n");
    }
    void expect_free(double mib, const std::string& limit, const ProcessLimits& limits = {}) const {
        const FreeMemory free = host_memory_free(folder.path(), limits);
        EXPECT_DOUBLE_EQ(mebibytes(free.bytes), mib);
        EXPECT_EQ(free.limit, limit);
    }
};

std::string mib(size_t n) { return std::to_string(n * kMiB); }

TEST(HostMemory, OfAMachineWithoutLimits) {
    const Machine none("", ""), v1("4:memory:/\n", kV1), v2("0::/\n", kV2);
    none.expect_free(1000, "this machine's memory");
    v1.v1("/sys/fs/cgroup/memory", "9223372036854771712", 50 * kMiB);
    v1.expect_free(1000, "this machine's memory");
    v2.v2("/sys/fs/cgroup", "max", "max", 50 * kMiB);
    v2.expect_free(1000, "this machine's memory");
    EXPECT_FALSE(host_memory_free("/nowhere", {}).known());
}

TEST(HostMemory, Version1) {
    const Machine m("9:cpu,memory:/slurm/job\n", kV1);
    const std::string at = "/sys/fs/cgroup/memory";
    m.v1(at + "/slurm/job", mib(300), 100 * kMiB, 40 * kMiB);
    m.expect_free(240, at + "/slurm/job/memory.limit_in_bytes");
    m.v1(at + "/slurm", mib(250), 90 * kMiB);  // a parent's limit holds too
    m.expect_free(160, at + "/slurm/memory.limit_in_bytes");
    m.v1(at, mib(80), 90 * kMiB);  // all is used
    m.expect_free(0, at + "/memory.limit_in_bytes");
}

TEST(HostMemory, Version2) {
    const Machine m("0::/user.slice/job\n", kV2);
    const std::string at = "/sys/fs/cgroup/user.slice";
    m.v2(at + "/job", mib(300), "max", 100 * kMiB, 40 * kMiB);
    m.expect_free(240, at + "/job/memory.max");
    m.v2(at + "/job", mib(300), mib(200), 100 * kMiB, 40 * kMiB);
    m.expect_free(140, at + "/job/memory.high");
    m.v2(at, mib(130), "max", 20 * kMiB);
    m.expect_free(110, at + "/memory.max");
}

// A system has both mounted if it has the old controllers, and the new hierarchy for its own purposes.
TEST(HostMemory, Hybrid) {
    const Machine m("4:memory:/a\n0::/b\n",
                    std::string(kV1) + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    m.v1("/sys/fs/cgroup/memory/a", mib(500), 0);
    m.expect_free(500, "/sys/fs/cgroup/memory/a/memory.limit_in_bytes");
    m.v2("/sys/fs/cgroup/unified/b", mib(400), "max", 0);
    m.expect_free(400, "/sys/fs/cgroup/unified/b/memory.max");
}

// A container sees its own cgroup at the root of the mount, but the path as the machine has it.
TEST(HostMemory, InAContainer) {
    const Machine m("4:memory:/docker/0af\n",
                    "36 31 0:32 /docker/0af /sys/fs/my\\040cgroup ro - cgroup cgroup rw,memory\n");
    m.v1("/sys/fs/my cgroup", mib(286), 16 * kMiB);
    m.expect_free(270, "/sys/fs/my cgroup/memory.limit_in_bytes");
    for (const char* path : {"/", "/../../elsewhere", "/docker/0aff/x"}) {
        m.write("/proc/self/cgroup", format("4:memory:%s\n", path));
        m.expect_free(270, "/sys/fs/my cgroup/memory.limit_in_bytes");
    }
}

TEST(HostMemory, LimitsOfTheProcess) {
    const Machine m("", "");
    m.expect_free(60, "ulimit -v 102400", {.address_space = 100 * kMiB});
    m.expect_free(80, "ulimit -d 102400", {.address_space = 900 * kMiB, .data = 100 * kMiB});
    m.expect_free(35, "ulimit -v 102400", {.address_space = 100 * kMiB, .untouched = 25 * kMiB});
    m.expect_free(0, "ulimit -v 30720", {.address_space = 30 * kMiB});
    m.expect_free(1000, "this machine's memory", {.address_space = 9000 * kMiB});
}

// What the process has allocated of its plan is no longer free, but counts for the plan. Its libraries may be
// among the files that the kernel could drop, and are then not counted twice.
TEST(HostMemory, InAll) {
    const Machine m("0::/job\n", kV2);
    const std::string at = "/sys/fs/cgroup/job";
    const OwnMemory own{.anonymous = 30 * kMiB, .resident_files = 9 * kMiB, .libraries = 18 * kMiB};
    const auto in_all = [&](const ProcessLimits& limits = {}) {
        return host_memory_in_all(memory_limits(m.folder.path(), limits, own));
    };
    EXPECT_DOUBLE_EQ(mebibytes(in_all().bytes), 1030);
    m.write(at + "/memory.max", mib(553));
    m.write(at + "/memory.high", "max");
    m.write(at + "/memory.current", mib(41));
    m.write(at + "/memory.stat", "inactive_file 0\nfile_mapped 0\n");  // charged to another cgroup
    EXPECT_DOUBLE_EQ(mebibytes(in_all().bytes), 553 - 41 - 1 - 1 + 30);
    m.write(at + "/memory.stat", format("inactive_file 0\nfile_mapped %zu\n", 9 * kMiB));
    EXPECT_DOUBLE_EQ(mebibytes(in_all().bytes), 553 - 41 - 1 - 1 + 30 + 9);
    const double same = mebibytes(in_all().bytes);
    m.write(at + "/memory.current", mib(61));
    m.write(at + "/memory.stat", format("inactive_file %zu\nfile_mapped %zu\n", 29 * kMiB, 12 * kMiB));
    EXPECT_NEAR(mebibytes(in_all().bytes), same, 0.01);
    EXPECT_DOUBLE_EQ(mebibytes(in_all({.address_space = 100 * kMiB}).bytes), 100 - 40 + 30 + 18);
    EXPECT_EQ(in_all({.address_space = 100 * kMiB}).limit, "ulimit -v 102400");
}

// A budget is reduced if a limit that allows as much has less left; otherwise it stays as it is.
TEST(HostMemory, WhatIsLeftOfABudget) {
    const std::vector<MemoryLimit> limits = {{9000 * kMiB, 0, 1000 * kMiB, "the machine"},
                                             {300 * kMiB, 0, 280 * kMiB + 5, "a cgroup"}};
    const auto left = [&](size_t bytes) { return available_of(bytes, limits); };
    EXPECT_EQ(left(280 * kMiB).bytes, 280 * kMiB);
    EXPECT_EQ(left(280 * kMiB).limit, "");
    EXPECT_EQ(left(300 * kMiB).bytes, 280 * kMiB);
    EXPECT_EQ(left(300 * kMiB).limit, "a cgroup");
    EXPECT_EQ(left(300 * kMiB + 4095).bytes, 280 * kMiB);  // the kernel rounds a cgroup's limit to pages
    EXPECT_EQ(left(400 * kMiB).bytes, 400 * kMiB);
    EXPECT_EQ(left(2000 * kMiB).bytes, 1000 * kMiB);
    EXPECT_EQ(left(2000 * kMiB).limit, "the machine");
    EXPECT_EQ(left(10000 * kMiB).bytes, 10000 * kMiB);
}

// Several processes share what a machine has, but not what limits each of them. A budget that all of them
// together could not have here is meant for another machine.
TEST(HostMemory, RanksShareLimits) {
    const std::vector<MemoryLimit> all = {{9000 * kMiB, 8000 * kMiB, 1000 * kMiB, "the machine"},
                                          {300 * kMiB, 200 * kMiB, 280 * kMiB, "ulimit", true}};
    const auto shared = shared_limits(all, 4);
    EXPECT_EQ(host_memory_in_all(shared).bytes, 250 * kMiB);
    EXPECT_EQ(host_memory_in_all(shared).limit, "the machine, shared by 4 ranks");
    EXPECT_EQ(host_memory_in_all(shared_limits(all, 3)).bytes, 280 * kMiB);
    EXPECT_EQ(host_memory_in_all(shared_limits(all, 1)).limit, "ulimit");
    EXPECT_EQ(available_of(290 * kMiB, shared).bytes, 250 * kMiB);
    EXPECT_EQ(available_of(240 * kMiB, shared).limit, "");
    EXPECT_EQ(available_of(2000 * kMiB, shared).bytes, 250 * kMiB);
    EXPECT_EQ(available_of(2300 * kMiB, shared).bytes, 2300 * kMiB);
}

// Mapped bytes of files with code, without those that are written to. A large file counts only as far as it
// is read.
TEST(HostMemory, Libraries) {
    const Machine m("", "");
    m.write(
        "/proc/self/maps",
        "1000-3000 r--p 00000000 08:01 17 /usr/bin/train\n3000-7000 r-xp 00002000 08:01 17 /usr/bin/train\n"
        "7000-9000 rw-p 00006000 08:01 17 /usr/bin/train\n10000-20000 rw-p 00000000 00:00 0 [heap]\n"
        "30000-50000 r--p 00000000 08:01 99 /data/model.safetensors\n"
        "100000-110000 r-xp 00000000 08:02 17 /usr/lib/lib with blanks.so\n"
        "10000000-18000000 r-xp 00000000 08:01 4 /usr/lib/libdnnl.so\nnonsense\n");
    EXPECT_EQ(library_bytes(m.folder.path()), 0x6000 + 0x10000 + kMostOfALibrary);
    EXPECT_EQ(library_bytes("/nowhere"), 0u);
    const size_t own = library_bytes(), resident = number_in_file("/proc/self/status", "RssFile:").value()
                                                   << 10;
    EXPECT_GE(own, resident);
    EXPECT_LT(own, 64 * kMiB);
}

TEST(Sizes, SaySomething) {
    for (const auto& [bytes, text] : {std::pair<size_t, const char*>{0, "0 bytes"},
                                      {1, "1 byte"},
                                      {1023, "1023 bytes"},
                                      {1024, "1.0 KiB"},
                                      {12900, "12.6 KiB"},
                                      {(1 << 20) - 1, "1024.0 KiB"},
                                      {1 << 20, "1.0 MiB"},
                                      {size_t{5} << 30, "5120.0 MiB"}})
        EXPECT_EQ(size_text(bytes), text);
}

// If the files contain garbage, nothing is read that is not there.
TEST(HostMemory, DamagedFiles) {
    const Machine m("::\n\n:\n4:memory\n0::\n7:x:\n",
                    "\n - \nx - cgroup2\n36 31 0:32 / \\ rw - cgroup c memory\n");
    m.expect_free(1000, "this machine's memory");
    m.write("/proc/meminfo", "MemAvailable: much\n");
    EXPECT_FALSE(host_memory_free(m.folder.path(), {}).known());
}

// The free memory of the machine that this runs on: what is mapped and touched is no longer free.
TEST(HostMemory, HereAndNow) {
    const FreeMemory before = host_memory_free();
    ASSERT_TRUE(before.known());
    EXPECT_GT(before.bytes, kMiB);
    EXPECT_FALSE(before.limit.empty());
    const size_t used = number_in_file("/proc/self/status", "VmSize:").value() << 10;
    const ProcessLimits limits{.address_space = used + 64 * kMiB};
    const auto left = [&] { return host_memory_free("", limits); };
    if (before.bytes < 128 * kMiB) GTEST_SKIP() << "little memory is free here";
    EXPECT_NEAR(mebibytes(left().bytes), 64, 1);
    EXPECT_NE(left().limit.find("ulimit -v"), std::string::npos);
    void* p = mmap(nullptr, 40 * kMiB, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NEAR(mebibytes(left().bytes), 24, 1);
    munmap(p, 40 * kMiB);
}

// A report of `mib` MiB, of a training or of a generation.
MemoryReport report_of(size_t mib, const Plan* train) {
    MemoryReport r;
    r.buffers.push_back({"weights", "weights", {}, "byte", (mib - 10) * kMiB});
    r.process = 10 * kMiB;
    r.train = train;
    return r;
}

TEST(EnoughMemory, RefusesWhatTakesMore) {
    Plan step;
    step.takes.resize(1);
    const FreeMemory free{100 * kMiB, "ulimit -v 5"};
    EXPECT_NO_THROW(require_memory(report_of(100, &step), free, Suggest::MemoryOption));
    EXPECT_NO_THROW(require_memory(report_of(1 << 20, &step), FreeMemory(), Suggest::MemoryOption));
    expect_user_error([&] { require_memory(report_of(101, &step), free, Suggest::MemoryOption); },
                      {"takes 101.0 MiB", "100.0 are free (ulimit -v 5)", "--memory 95MiB", "--batch"});
    expect_user_error([&] { require_memory(report_of(101, &kNoPlan), free, Suggest::SmallerRun); },
                      {"takes 101.0 MiB", "a smaller --model"});
    expect_user_error(
        [&] {
            require_memory(report_of(101, &step), {9 * kMiB, "a limit"}, Suggest::MemoryOption);
        },
        {"9.0 are free (a limit); smaller: a smaller --batch"});  // no budget can be so small
}

// When a GPU is asked what is free, the context exists already; a budget includes the context.
TEST(EnoughMemory, AContextIsTakenOnce) {
    Plan step;
    step.takes.resize(1);
    MemoryReport r = report_of(100, &step);
    r.context = 50 * kMiB;
    r.process += r.context;
    EXPECT_NO_THROW(require_memory(r, {100 * kMiB, "the GPU's memory"}, Suggest::MemoryOption));
    expect_user_error(
        [&] {
            require_memory(r, {99 * kMiB, "the GPU's memory"}, Suggest::MemoryOption);
        },
        {"takes 100.0 MiB", "99.0 are free", "--memory 144MiB"});
    EXPECT_EQ(with_reserve({100 * kMiB, ""}, 50 * kMiB).bytes, 145 * kMiB);
}

TEST(EnoughMemory, AContextIsAsLargeAsPublishedAndMeasured) {
    for (const auto& [multiprocessors, mib] : {std::pair{34, 107}, std::pair{142, 426}, std::pair{188, 555}})
        EXPECT_NEAR(mebibytes(cuda_context_bytes(multiprocessors, false)), mib, 0.06 * mib);
    EXPECT_NEAR(mebibytes(cuda_context_bytes(132, true)), 527, 0.06 * 527);
}

TEST(EnoughMemory, BatchAutoIsCapped) {
    EXPECT_EQ(batch_cap(128, {}).sequences, 512);
    EXPECT_EQ(batch_cap(128, 7841).sequences, 512);
    EXPECT_EQ(batch_cap(128, 5119).sequences, 511);
    EXPECT_STREQ(batch_cap(128, 5119).why, "a tenth of the data");
    EXPECT_EQ(batch_cap(128, 9).sequences, 1);
    EXPECT_EQ(batch_cap(1 << 20, 1000).sequences, 1);
    EXPECT_EQ(batch_cap(1, uint64_t{1} << 60).sequences, 1 << 16);
}

// Compared with a search of all numbers of rows, for times that fall as chunks grow.
TEST(HeadRows, TheFewestThatCostLittle) {
    for (const double launch : {0.0, 1e-4, 1e-3, 1e-2, 1.0})
        for (const int64_t rows : {1, 64, 65, 128, 1000, 4096, 100000}) {
            const auto seconds = [&](int64_t few) {
                return 1 +
                       launch * std::ceil(static_cast<double>(rows) / static_cast<double>(few ? few : rows));
            };
            const int64_t chosen = choose_chunk_rows(rows, kFewestHeadRows, seconds);
            constexpr int64_t kFewest = kFewestHeadRows;
            EXPECT_TRUE(chosen == 0 || (chosen >= kFewest && chosen < rows && (chosen & (chosen - 1)) == 0));
            EXPECT_LE(seconds(chosen), 1.02 * seconds(0));
            const bool fewer = rows > kFewest && chosen != kFewest;
            EXPECT_TRUE(!fewer || seconds(chosen ? chosen / 2 : kFewest) > 1.02 * seconds(0));
        }
}

TEST(HeadRows, TheUpdateHasNoSay) {
    Plan plan;
    plan.work = {{"forward block 0", "matmul", 100, 0}, {"backward update 3", "adamw", 0, 900}};
    EXPECT_DOUBLE_EQ(seconds_without_update(plan, DeviceRates{10, 10, 0}), 10);
    EXPECT_DOUBLE_EQ(seconds_of(plan.work, DeviceRates{10, 10, 0}), 100);
}

}  // namespace
