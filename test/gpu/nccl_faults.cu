// nccl_faults.cu - two ranks with one fault each in what they send each other, which the emulator must find
// and name, and the same ranks without it.
//
//   nccl_faults NAME right|wrong     exits with 0 if the result is right on both ranks, 1 if it is wrong; a
//                                    fault that the emulator finds ends the process with a line of its own
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "llmc/ranks_transfers.h"

namespace {

// Bytes between the hosts of the two ranks.
class SocketEngine : public RankEngine {
  public:
    SocketEngine(int rank, int socket) : rank_(rank), socket_(socket) {}
    void set_patience(double) override {}
    void set_where(const std::string&) override {}
    std::string where() const override { return ""; }
    void watch(std::function<std::string()>) override {}
    void exchange(std::span<const Part> send, std::span<const Part> receive) override {
        const auto own = static_cast<size_t>(rank_), other = 1 - own;
        if (send[own].bytes) memcpy(receive[own].at, send[own].at, send[own].bytes);
        if (write(socket_, send[other].at, send[other].bytes) != static_cast<ssize_t>(send[other].bytes))
            bug("the sockets do not take a part at once");
        for (size_t done = 0; done < receive[other].bytes;)
            done += static_cast<size_t>(
                read(socket_, static_cast<char*>(receive[other].at) + done, receive[other].bytes - done));
    }
    void start(std::vector<ExchangeRound>) override {}
    void finish(size_t) override {}
    void end_all(int code) override { _exit(code); }
    Rank rank() const override { return {rank_, 2, 2, rank_}; }

  private:
    const int rank_, socket_;
};

constexpr int kCount = 64;  // floats of a part

__global__ void fill(float* x, float value) { x[threadIdx.x] = value; }
__global__ void add(float* sum, const float* x) { sum[threadIdx.x] += x[threadIdx.x]; }

// One of the two ranks: streams, a vector to send and one to receive, filled by the stream `computes`.
struct Side {
    Side(int number, RankEngine& e) : rank{number, 2, 2, number}, engine(e) {
        for (float** p : {&sent, &received, &sum}) {
            CUDA_CHECK(cudaMalloc(p, kCount * sizeof(float)));
            set(*p, 0);
        }
        set(sent, own());
    }
    void set(float* x, float value) const { fill<<<1, kCount, 0, computes.get()>>>(x, value); }
    float own() const { return static_cast<float>(rank.number + 1); }
    float others() const { return static_cast<float>(2 - rank.number); }
    bool is(const float* x, float value) const {
        float host[kCount];
        CUDA_CHECK(cudaMemcpy(host, x, sizeof host, cudaMemcpyDeviceToHost));
        return std::all_of(host, host + kCount, [=](float h) { return h == value; });
    }
    int other() const { return 1 - rank.number; }

    const Rank rank;
    RankEngine& engine;
    const OwnStream computes, beside;
    float *sent, *received, *sum;
};

// --- NCCL's contract.

// A communicator used by itself.
struct Calls : Side {
    Calls(int number, RankEngine& e) : Side(number, e) {
        NcclId id{}, first{};
        if (rank.is_first()) nccl.check(nccl.get_unique_id(&id), "");
        const Part nothing, mine{id.bytes, rank.is_first() ? sizeof id : 0},
            theirs{first.bytes, sizeof first};
        const std::vector<Part> send = {mine, mine}, receive = {theirs, nothing};
        e.exchange(send, receive);
        nccl.check(nccl.comm_init_rank(&communicator, 2, first, number), "");
    }
    ~Calls() {
        if (communicator) nccl.comm_destroy(communicator);
    }
    void send(int bytes = kCount * 4, int type = Nccl::kBytes, const Stream* stream = nullptr) const {
        nccl.send(sent, static_cast<size_t>(bytes), type, other(), communicator,
                  stream ? *stream : computes.get());
    }
    void receive(int bytes = kCount * 4) const {
        nccl.receive(received, static_cast<size_t>(bytes), Nccl::kBytes, other(), communicator,
                     computes.get());
    }
    template <class Parts>
    void group(Parts&& parts) const {
        nccl.group_start();
        parts();
        nccl.group_end();
    }
    void exchange() const {
        group([&] { send(), receive(); });
    }
    bool arrived() const { return is(received, others()); }

    const Nccl nccl;
    NcclCommunicator* communicator = nullptr;
};

bool part_sizes(int rank, RankEngine& e, bool wrong) {
    const Calls c(rank, e);
    c.group([&] { c.send(), c.receive(wrong && rank == 1 ? 128 : 256); });
    return c.arrived();
}
bool part_types(int rank, RankEngine& e, bool wrong) {
    const Calls c(rank, e);
    constexpr int kFloats = 7;  // ncclFloat32
    c.group([&] {
        if (wrong)
            c.send(kCount, kFloats);
        else
            c.send();
        c.receive();
    });
    return c.arrived();
}
bool another_order(int rank, RankEngine& e, bool wrong) {
    const Calls c(rank, e);
    for (const int bytes : wrong&& rank == 1 ? std::vector{128, 256} : std::vector{256, 128})
        c.group([&] { c.send(bytes), c.receive(bytes); });
    return c.arrived();
}
bool nobody_receives(int rank, RankEngine& e, bool wrong) {
    const Calls c(rank, e);
    c.group([&] {
        c.send();
        if (!wrong || rank == 0) c.receive();
    });
    return wrong || c.arrived();
}
bool nobody_sends(int rank, RankEngine& e, bool wrong) {
    const Calls c(rank, e);
    c.group([&] {
        if (!wrong || rank == 0) c.send();
        c.receive();
    });
    return c.arrived();
}
bool outside_of_a_group(int rank, RankEngine& e, bool wrong) {
    const Calls c(rank, e);
    if (wrong)
        c.send(), c.receive();
    else
        c.exchange();
    return c.arrived();
}
bool two_streams(int rank, RankEngine& e, bool wrong) {
    const Calls c(rank, e);
    c.exchange();
    const Stream beside = c.beside.get();
    c.group([&] {
        if (wrong)
            c.nccl.send(c.sent, 256, Nccl::kBytes, c.other(), c.communicator, beside),
                c.nccl.receive(c.sum, 256, Nccl::kBytes, c.other(), c.communicator, beside);
        else
            c.send(), c.receive();
    });
    return c.arrived();
}
bool captured(int rank, RankEngine& e, bool wrong) {
    const Calls c(rank, e);
    if (wrong) CUDA_CHECK(cudaStreamBeginCapture(c.computes.get(), cudaStreamCaptureModeThreadLocal));
    c.exchange();
    return c.arrived();
}
bool after_abort(int rank, RankEngine& e, bool wrong) {
    Calls c(rank, e);
    c.exchange();
    const bool right = c.arrived();
    if (wrong) {
        c.nccl.comm_abort(c.communicator);
        c.exchange();
    }
    return right;
}
bool asked_after_abort(int rank, RankEngine& e, bool wrong) {
    Calls c(rank, e);
    c.exchange();
    const bool right = c.arrived();
    if (wrong) c.nccl.comm_abort(c.communicator);
    int status = 0;
    c.nccl.comm_get_async_error(c.communicator, &status);
    return right && status == Nccl::kSuccess;
}
bool after_destroy(int rank, RankEngine& e, bool wrong) {
    Calls c(rank, e);
    c.exchange();
    const bool right = c.arrived();
    if (wrong) {
        c.nccl.comm_destroy(c.communicator);
        c.exchange();
    }
    return right;
}
bool never_connects(int rank, RankEngine& e, bool wrong) {
    if (wrong && rank == 1) pause();
    const Calls c(rank, e);
    c.exchange();
    return c.arrived();
}
bool two_streams_in_a_group(int rank, RankEngine& e, bool wrong) {
    const Calls c(rank, e);
    const Stream beside = c.beside.get();
    c.group([&] { c.send(256, Nccl::kBytes, wrong ? &beside : nullptr), c.receive(); });
    return c.arrived();
}
bool another_stream_captured(int rank, RankEngine& e, bool wrong) {
    const Calls c(rank, e);
    if (wrong) CUDA_CHECK(cudaStreamBeginCapture(c.beside.get(), cudaStreamCaptureModeThreadLocal));
    c.exchange();
    return c.arrived();
}
bool end_without_start(int rank, RankEngine& e, bool wrong) {
    const Calls c(rank, e);
    c.exchange();
    if (wrong) c.nccl.group_end();
    return c.arrived();
}
// An exchange whose part goes to this peer.
bool sends_to(int peer, int rank, RankEngine& e) {
    const Calls c(rank, e);
    c.group([&] {
        c.nccl.send(c.sent, 256, Nccl::kBytes, peer, c.communicator, c.computes.get());
        c.receive();
    });
    return c.arrived();
}
bool unknown_peer(int rank, RankEngine& e, bool wrong) { return sends_to(wrong ? 2 : 1 - rank, rank, e); }
bool part_for_itself(int rank, RankEngine& e, bool wrong) {
    return sends_to(wrong ? rank : 1 - rank, rank, e);
}
bool two_parts_for_a_peer(int rank, RankEngine& e, bool wrong) {
    const Calls c(rank, e);
    c.group([&] {
        c.send(), c.receive();
        if (wrong) c.send(), c.receive();
    });
    return c.arrived();
}
bool behind_the_end(int rank, RankEngine& e, bool wrong) {
    const Calls c(rank, e);
    const int bytes = wrong ? 260 : 256;
    c.group([&] { c.send(bytes), c.receive(bytes); });
    return c.arrived();
}
bool nobody_wrote(int rank, RankEngine& e, bool wrong) {
    Calls c(rank, e);
    float* unwritten = nullptr;
    CUDA_CHECK(cudaMalloc(&unwritten, kCount * sizeof(float)));
    if (wrong) c.sent = unwritten;
    c.exchange();
    return c.arrived();
}
bool no_memory_for_a_peer(int rank, RankEngine& e, bool wrong) {
    const Calls c(rank, e);
    if (wrong) setenv(kNcclChannels, "100000", 1);
    c.exchange();
    return c.arrived();
}
bool host_memory(int rank, RankEngine& e, bool wrong) {
    Calls c(rank, e);
    static float on_host[kCount];
    if (wrong) c.received = on_host;
    c.exchange();
    return c.arrived();
}

// --- The order of exchanges and computation, with the class that the trainer uses.

struct Exchanges : Side {
    Exchanges(int number, RankEngine& e) : Side(number, e), transfers(e, rank) {}
    // Starts to exchange `sent` for `received`, after the work of a stream.
    size_t start(const OwnStream& stream) {
        std::vector<Part> send(2), receive(2);
        send[static_cast<size_t>(other())] = {sent, kCount * sizeof(float)};
        receive[static_cast<size_t>(other())] = {received, kCount * sizeof(float)};
        return transfers.start({{send, receive}}, stream.get());
    }
    void sum_received() const { add<<<1, kCount, 0, computes.get()>>>(sum, received); }

    RankTransfers transfers;
};

// Weights are gathered before they have been updated.
bool gather_before_update(int rank, RankEngine& e, bool wrong) {
    Exchanges x(rank, e);
    x.set(x.sent, x.own() + 10);
    const size_t number = x.start(wrong ? x.beside : x.computes);
    x.transfers.finish(number, x.computes.get());
    return x.is(x.received, x.others() + 10);
}
// What was received is summed before it has arrived.
bool sum_before_arrival(int rank, RankEngine& e, bool wrong) {
    Exchanges x(rank, e);
    const size_t number = x.start(x.computes);
    x.transfers.finish(number, wrong ? x.beside.get() : x.computes.get());
    x.sum_received();
    return x.is(x.sum, x.others());
}
// The next part arrives before the last one has been summed.
bool received_before_sum(int rank, RankEngine& e, bool wrong) {
    Exchanges x(rank, e);
    const size_t number = x.start(x.computes);
    x.transfers.finish(number, x.computes.get());
    x.sum_received();
    const size_t next = x.start(wrong ? x.beside : x.computes);
    x.transfers.finish(next, x.computes.get());
    x.sum_received();
    return x.is(x.sum, 2 * x.others());
}
// Gradients are overwritten by the next pass before they have been sent.
bool overwritten_before_sent(int rank, RankEngine& e, bool wrong) {
    Exchanges x(rank, e);
    const size_t number = x.start(x.computes);
    if (!wrong) x.transfers.finish(number, x.computes.get());
    x.set(x.sent, -1);
    if (wrong) x.transfers.finish(number, x.computes.get());
    return x.is(x.received, x.others());
}

using Case = bool (*)(int, RankEngine&, bool);
const std::map<std::string, Case> kCases = {
    {"part_sizes", part_sizes},
    {"part_types", part_types},
    {"another_order", another_order},
    {"nobody_receives", nobody_receives},
    {"nobody_sends", nobody_sends},
    {"outside_of_a_group", outside_of_a_group},
    {"two_streams", two_streams},
    {"captured", captured},
    {"after_abort", after_abort},
    {"asked_after_abort", asked_after_abort},
    {"after_destroy", after_destroy},
    {"never_connects", never_connects},
    {"two_streams_in_a_group", two_streams_in_a_group},
    {"another_stream_captured", another_stream_captured},
    {"end_without_start", end_without_start},
    {"unknown_peer", unknown_peer},
    {"part_for_itself", part_for_itself},
    {"two_parts_for_a_peer", two_parts_for_a_peer},
    {"behind_the_end", behind_the_end},
    {"nobody_wrote", nobody_wrote},
    {"no_memory_for_a_peer", no_memory_for_a_peer},
    {"host_memory", host_memory},
    {"gather_before_update", gather_before_update},
    {"sum_before_arrival", sum_before_arrival},
    {"received_before_sum", received_before_sum},
    {"overwritten_before_sent", overwritten_before_sent},
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        for (const auto& [name, run] : kCases) printf("%s\n", name.c_str());
        return 0;
    }
    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) return 3;
    setenv("GPU_COUNT", "2", 1);
    pid_t ranks[2];
    for (int r = 0; r < 2; r++) {
        ranks[r] = fork();
        if (ranks[r] != 0) continue;
        SocketEngine engine(r, sockets[r]);
        see_own_gpu({r, 2, 2, r});
        const bool right = kCases.at(argv[1])(r, engine, !strcmp(argv[2], "wrong"));
        CUDA_CHECK(cudaDeviceSynchronize());
        if (!right) fprintf(stderr, "the result is wrong\n");
        exit(right ? 0 : 1);
    }
    int code = 0;
    for (int ended = 0; ended < 2; ended++) {
        int status = 0;
        const pid_t pid = wait(&status);
        if (!code) code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        if (code && pid == ranks[0]) kill(ranks[1], SIGKILL);
        if (code && pid == ranks[1]) kill(ranks[0], SIGKILL);
    }
    return code;
}
