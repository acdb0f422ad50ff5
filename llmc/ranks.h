// ranks.h - the processes of a run on several devices: each device has one, its rank. MPI starts them
// (ranks_launch.h) and carries what they send each other; what they send in a step is in ranks_exchange.h. A
// run on one device has one rank, and needs none of this.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/file.h"

inline std::string host_name() {
    char name[256] = "";
    gethostname(name, sizeof name - 1);
    return name;
}

// A function of a loaded library (dlsym()), as whatever pointer to a function it initializes.
struct LoadedFunction {
    void* at;
    template <class Function>
    operator Function*() const {
        return reinterpret_cast<Function*>(at);
    }
};

// One process of a run.
struct Rank {
    int number = 0, count = 1;
    int on_this_machine = 1;         // how many of them run on this machine
    int number_on_this_machine = 0;  // among those
    // Whether each machine has as many ranks as the others, and their numbers follow one another.
    bool is_grouped_by_machine = true;

    bool is_first() const { return number == 0; }
    bool is_alone() const { return count == 1; }
    // This rank's share of the cores that it may run on. If what started it bound it to some of the machine's
    // cores, these are its own.
    int own_cores(int cores) const {
        const auto all = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
        return cores * on_this_machine <= all ? cores : std::max(1, cores / on_this_machine);
    }
    // "rank 3 (host b)", for messages.
    std::string text() const { return format("rank %d (host %s)", number, host_name()); }
};

// A whole number in an environment variable; nothing if there is none.
inline std::optional<int> number_in_environment(const char* name) {
    const char* const text = getenv(name);
    if (!text || !*text) return std::nullopt;
    char* end = nullptr;
    const long value = strtol(text, &end, 10);
    return *end ? std::nullopt : std::optional(static_cast<int>(value));
}

// The rank of this process, as what started it says in the environment: OpenMPI's mpirun, MPICH's, or Slurm's
// srun with PMIx or PMI-2. A process that none of these started is alone.
inline Rank rank_of_environment() {
    struct Names {
        const char *number, *count, *on_this_machine, *number_on_this_machine;
    };
    for (const Names& names : {Names{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                     "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
                               Names{"PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"},
                               Names{"PMIX_RANK", "SLURM_NTASKS", "", ""}}) {
        const auto number = number_in_environment(names.number), count = number_in_environment(names.count);
        if (!number || !count || *number < 0 || *count < 1) continue;
        const int here = std::max(1, number_in_environment(names.on_this_machine).value_or(*count));
        for (const char* local : {names.number_on_this_machine, "SLURM_LOCALID"})
            if (const auto known = number_in_environment(local)) return {*number, *count, here, *known};
        return {*number, *count, here, *number % here};
    }
    return {};
}

// Bytes of this process that go to another rank, or come from it.
struct Part {
    void* at = nullptr;
    size_t bytes = 0;
};

// One round of an exchange: this rank sends send[r] to rank r and receives receive[r] from it, for every r,
// this rank included. What rank a sends to b must have as many bytes as b receives from a. When all have
// arrived, `then` is called, if it is not empty; the next round begins after it.
struct ExchangeRound {
    std::vector<Part> send, receive;
    std::function<void()> then = {};
};

// An exchange on a rank, in seconds: by the rank's clock, when it started the exchange and when it began to
// wait for it; how long the exchange took, and how long the rank waited.
struct ExchangeTime {
    double began, asked, took, waited;
};

// Moves bytes between the ranks. All ranks make the same calls in the same order.
class RankEngine {
  public:
    virtual ~RankEngine() = default;
    // Makes a round, and returns when it is done. It does not wait for exchanges that were started.
    virtual void exchange(std::span<const Part> send, std::span<const Part> receive) = 0;
    // Gathers as many bytes of each of `count` ranks, one rank after another in `all`.
    void gather(const void* own, size_t bytes, void* all, int count) {
        const std::vector<Part> send(static_cast<size_t>(count), {const_cast<void*>(own), bytes});
        std::vector<Part> receive;
        for (size_t r = 0; r < send.size(); r++)
            receive.push_back({static_cast<char*>(all) + r * bytes, bytes});
        exchange(send, receive);
    }
    // A plain value of each of `count` ranks.
    template <class T>
    std::vector<T> gather(const T& own, int count) {
        std::vector<T> all(static_cast<size_t>(count));
        gather(&own, sizeof own, all.data(), count);
        return all;
    }
    // Returns when all ranks have called it.
    void wait_for_all(const Rank& rank) { gather(char{}, rank.count); }
    // Ranks send each other signs of life. If none comes from a rank for this long, it is lost (see OnLost).
    // A rank that is slow, or waits for a disk, is not lost.
    virtual void set_patience(double seconds) = 0;
    // Where this rank is, as "in step 3; the last save: none", for messages; empty before the first step.
    virtual void set_where(const std::string& where) = 0;
    virtual std::string where() const = 0;
    static std::string where_text(const std::string& where) {
        return where.empty() ? "before the first step" : where;
    }
    // Asks `fault` many times a second, from another thread, whether what else connects the ranks has failed:
    // it returns what happened, or an empty text. If something did, and the main thread does not end the run
    // because of it, the run ends as when a rank is lost. No `fault` ends this.
    virtual void watch(std::function<std::string()> fault) = 0;
    // Starts an exchange, which goes on beside the computation, after those that were started before. A
    // thread of the engine calls the rounds' `then`. finish(n) waits for the n-th exchange that was started,
    // from 0, and for all before it.
    virtual void start(std::vector<ExchangeRound> rounds) = 0;
    virtual void finish(size_t number) = 0;
    // How long an exchange that finish() has waited for took, from start() until it was complete; negative if
    // that is not known.
    virtual double seconds_of([[maybe_unused]] size_t number) const { return -1; }
    // Ends all ranks at once, with this exit code.
    virtual void end_all(int code) = 0;
    // This rank, with what MPI knows of the machines.
    virtual Rank rank() const = 0;
};

// Called when ranks are lost, with a line that names them, or when they can no longer exchange data, by
// another thread than the main one. It must end the process.
using OnLost = std::function<void(RankEngine& engine, const std::string& line)>;

// MPI and NCCL share memory in /dev/shm between the ranks of a machine, and their errors do not say if there
// was too little: Docker gives a container 64 MiB. Returns what to append to such an error; empty if there
// is room.
inline std::string remark_on_shared_memory() {
    const std::optional<size_t> free = free_disk_bytes("/dev/shm");
    if (!free || *free > size_t{256} << 20) return "";
    return format("; /dev/shm has %s free, which may be too little: docker run --shm-size=1g gives more",
                  size_text(*free));
}

// In a rank that --devices has started: stdout and stderr as MPI's launcher made them. What MPI's libraries
// print while they begin goes there, from where the process that the user started takes it into one line.
// (OpenMPI's own messages go to the user's stderr.)
struct LauncherStreams {
    int output = -1, errors = -1;

    bool is_open() const { return output >= 0 && errors >= 0; }
    void close() const {
        for (const int stream : {output, errors})
            if (stream >= 0) ::close(stream);
    }
};
inline LauncherStreams launcher_streams;

// Connects this process to the other ranks. Fails with the reason if this build, or this machine, has no MPI.
std::unique_ptr<RankEngine> connect_ranks(const Rank& rank, OnLost on_lost);
// A command that starts ranks on this machine: the names that mpirun may have, and its arguments, which stand
// before the program's.
struct MpirunCommand {
    std::vector<std::string> names, arguments;
    size_t temporary_bytes = 0;  // that it needs in TMPDIR, or else in /tmp
    size_t largest_file = 0;     // that the ranks' MPI writes, there or in /dev/shm
};
// Fails as connect_ranks() does.
MpirunCommand mpirun_command(int count);
