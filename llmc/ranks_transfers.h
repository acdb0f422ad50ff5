// ranks_transfers.h - moves device memory between the ranks of a run on several devices, beside the
// computation: between GPUs by NCCL, on a stream of its own; between CPUs by MPI (ranks.h). ranks_exchange.h
// decides what is moved.
//
// NCCL is loaded when a run has several GPUs, so that a run on one neither needs it nor has its memory. It
// only moves bytes: with ncclSend and ncclRecv each rank sends a part to every other and receives one from
// each.
#pragma once

#include <omp.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "llmc/device.h"
#include "llmc/ranks.h"
#include "llmc/ranks_slices.h"
#include "llmc/text.h"
#include "llmc/work.h"

// What a rank sends in an exchange to ranks on its own machine, and to others.
struct SentBytes {
    size_t to_ranks = 0, to_machines = 0;
};
inline SentBytes sent_bytes(const std::vector<ExchangeRound>& rounds, const Slices& slices) {
    SentBytes sent;
    for (const ExchangeRound& round : rounds)
        for (int r = 0; r < slices.ranks; r++) {
            if (r == slices.rank) continue;
            const bool here = slices.machine_of(r) == slices.machine_of(slices.rank);
            (here ? sent.to_ranks : sent.to_machines) += round.send[static_cast<size_t>(r)].bytes;
        }
    return sent;
}
inline void count_sent(const SentBytes& sent) {
    count_moved(Route::ToRanks, sent.to_ranks);
    count_moved(Route::ToMachines, sent.to_machines);
}

// A round in which nothing is sent or received.
inline ExchangeRound empty_round(const Slices& slices) {
    const std::vector<Part> nothing(static_cast<size_t>(slices.ranks));
    return {nothing, nothing};
}

// The rounds in which every rank gets the parts of all. The rank's own is at `own`, and arrives(r) is where
// that of rank r shall be. A part crosses the network once for each other machine: to the rank that has the
// same place there, which passes it on to the others of its machine while it receives the next one.
template <class Arrives>
std::vector<ExchangeRound> gather_rounds(const Slices& all, const Part& own, Arrives&& arrives) {
    const Slices slices = all.for_rounds();
    const int rank = slices.rank, machines = slices.machines(), here = slices.machine_of(rank);
    std::vector<ExchangeRound> rounds;
    for (int k = 0; k < machines; k++) {
        ExchangeRound& round = rounds.emplace_back(empty_round(slices));
        // Inside the machine: the parts of the k-th machine before this one.
        const int passed = (here - k + machines) % machines;
        for (int place = 0; place < slices.ranks_of_a_machine(); place++) {
            const int other = slices.same_place_on(here, place);
            if (other == rank && k > 0) continue;
            round.send[static_cast<size_t>(other)] =
                k > 0 ? arrives(slices.same_place_on(passed, rank)) : own;
            round.receive[static_cast<size_t>(other)] = arrives(slices.same_place_on(passed, other));
        }
        if (k + 1 == machines) continue;
        const int to = slices.same_place_on((here + k + 1) % machines, rank),
                  from = slices.same_place_on((here - k - 1 + machines) % machines, rank);
        round.send[static_cast<size_t>(to)] = own;
        round.receive[static_cast<size_t>(from)] = arrives(from);
    }
    return rounds;
}

constexpr const char* kNcclChannels = "NCCL_MAX_P2P_NCHANNELS";  // the environment's variable

// How many NCCL channels carry what a GPU sends to one other: the environment's number if there is one;
// otherwise 16, halved until channels times peers is at most 32, because each channel has a buffer for each
// peer. A channel takes a multiprocessor while it works.
inline int nccl_channels(int ranks) {
    if (const auto given = number_in_environment(kNcclChannels)) return std::max(1, *given);
    int channels = 16;
    while (channels > 1 && channels * (ranks - 1) > 32) channels /= 2;
    return channels;
}
// This process's clock, in seconds.
inline double exchange_clock() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Bytes of a GPU that NCCL's buffers take: 12 MiB for each channel and peer, which is what NCCL 2.26
// allocates on 8 x H100 (github.com/NVIDIA/nccl, issue 1685). Not measured here.
inline size_t nccl_bytes(int ranks) {
    if (kHostIsDevice || ranks == 1) return 0;
    return static_cast<size_t>(ranks - 1) * static_cast<size_t>(nccl_channels(ranks)) * (size_t{12} << 20);
}

#if defined(SIMT_GPU)

#include <dlfcn.h>
#include <glob.h>

// NCCL's functions that are used here, declared so that the build does not need its header (NCCL 2.7 to 2.28
// have them in this form).
struct NcclId {
    char bytes[128];
};
struct NcclCommunicator;
struct Nccl {
    static constexpr int kSuccess = 0, kInProgress = 7, kBytes = 1;  // kBytes: the data type ncclUint8

    void* const library = load();
    int (*const get_unique_id)(NcclId*) = function("ncclGetUniqueId");
    int (*const comm_init_rank)(NcclCommunicator**, int, NcclId, int) = function("ncclCommInitRank");
    int (*const comm_destroy)(NcclCommunicator*) = function("ncclCommDestroy");
    int (*const comm_abort)(NcclCommunicator*) = function("ncclCommAbort");
    int (*const comm_get_async_error)(NcclCommunicator*, int*) = function("ncclCommGetAsyncError");
    int (*const group_start)() = function("ncclGroupStart");
    int (*const group_end)() = function("ncclGroupEnd");
    int (*const send)(const void*, size_t, int, int, NcclCommunicator*, cudaStream_t) = function("ncclSend");
    int (*const receive)(void*, size_t, int, int, NcclCommunicator*, cudaStream_t) = function("ncclRecv");
    const char* (*const error_text)(int) = function("ncclGetErrorString");

    void check(int result, const char* what) const {
        if (const std::string fault = fault_text(result, what); !fault.empty()) fail("%s", fault);
    }
    // What a result that is an error means, for `what`; an empty text if it is none.
    std::string fault_text(int result, const char* what) const {
        if (result == kSuccess || result == kInProgress) return "";
        return format("NCCL: %s: %s (NCCL_DEBUG=INFO prints more)%s", what, error_text(result),
                      remark_on_shared_memory());
    }

  private:
    // Loads NCCL: the file that NCCL_LIBRARY names; else from the loader's path, the CUDA Toolkit's folder,
    // or the active Python environment.
    static void* load() {
        std::string reason;
        for (const std::string& path : places()) {
            if (void* const found = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return found;
            if (reason.empty()) reason = dlerror();
        }
        fail(
            "--devices: NCCL cannot be loaded: %s: install libnccl2, or nvidia-nccl-cu%d by pip, and set "
            "NCCL_LIBRARY to the path of libnccl.so.2 if it is in no usual place",
            reason, CUDART_VERSION / 1000);
    }
    LoadedFunction function(const char* name) const {
        const LoadedFunction found = {dlsym(library, name)};
        if (!found.at) fail("--devices: this NCCL has no %s: it needs to be 2.7 or later", name);
        return found;
    }
    static std::vector<std::string> places() {
        if (const char* named = getenv("NCCL_LIBRARY")) return {named};
        std::vector<std::string> all = {"libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2"};
        if (const char* environment = getenv("VIRTUAL_ENV")) {
            const std::string pattern =
                std::string(environment) + "/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2";
            glob_t found;
            if (glob(pattern.c_str(), 0, nullptr, &found) == 0) all.emplace_back(found.gl_pathv[0]);
            globfree(&found);
        }
        return all;
    }
};

// Makes this process see one GPU: the rank's own among those of the machine. Call it before anything uses
// CUDA.
inline void see_own_gpu(const Rank& rank) {
    std::vector<std::string> visible;
    if (const char* given = getenv("CUDA_VISIBLE_DEVICES")) {
        visible = words_of(given, ',');
        if (visible.size() == 1) return;  // what started the ranks gave each of them a GPU
        if (rank.number_on_this_machine >= static_cast<int>(visible.size()))
            fail("CUDA_VISIBLE_DEVICES=%s names %zu GPUs, and this machine has at least %d ranks", given,
                 visible.size(), rank.number_on_this_machine + 1);
        setenv("CUDA_VISIBLE_DEVICES", visible[static_cast<size_t>(rank.number_on_this_machine)].c_str(), 1);
    } else {
        setenv("CUDA_VISIBLE_DEVICES", std::to_string(rank.number_on_this_machine).c_str(), 1);
    }
}

// Fails if this machine has fewer GPUs than a run is to have ranks.
inline void check_gpus_for_ranks(int ranks) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count >= ranks)
        return;  // enough GPUs; or none, which check_device() reports
    const char* const visible = getenv("CUDA_VISIBLE_DEVICES");
    fail("--devices %d: this machine has %d GPU%s%s%s", ranks, count, count == 1 ? "" : "s",
         visible ? " in CUDA_VISIBLE_DEVICES=" : "", visible ? visible : "");
}

// What identifies this rank's GPU: its name and, after a line's end, where it is.
inline std::string own_gpu_text() {
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    char bus[32] = "";
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, 0));
    return format("%s\n%s on %s", properties.name, bus, host_name());
}

// Fails if two ranks have the same GPU; says so on the first rank if their GPUs differ in kind.
inline void check_gpus_differ(RankEngine& engine, const Rank& rank) {
    std::array<char, 512> own = {};
    own_gpu_text().copy(own.data(), own.size() - 1);
    const auto all = engine.gather(own, rank.count);
    const auto gpu = [&](int r) { return words_of(all[static_cast<size_t>(r)].data(), '\n'); };
    for (int r = 0; r < rank.count; r++)
        for (int other = 0; other < r; other++) {
            if (gpu(r)[1] == gpu(other)[1])
                fail("ranks %d and %d have the same GPU (%s): each rank needs its own", other, r, gpu(r)[1]);
        }
    for (int r = 1; r < rank.count && rank.is_first(); r++)
        if (gpu(r)[0] != gpu(0)[0]) {
            print(stderr,
                  "rank %d has a %s and rank 0 a %s: every step takes as long as on the slowest GPU, and "
                  "what fits is what fits on the smallest\n",
                  r, gpu(r)[0], gpu(0)[0]);
            return;
        }
}

// Measures exchanges between GPUs by events in their streams. While there is one, RankTransfers tells it of
// every exchange. It must be there before the RankTransfers, because it numbers the exchanges from the first.
class ExchangeTimer {
  public:
    ExchangeTimer() { now_timing = this; }
    ExchangeTimer(const ExchangeTimer&) = delete;
    ~ExchangeTimer() {
        now_timing = nullptr;
        for (cudaEvent_t event : unused_) cudaEventDestroy(event);
        for (const Exchange& e : exchanges_)
            for (cudaEvent_t event : {e.began, e.complete, e.asked})
                if (event) cudaEventDestroy(event);
    }

    // The next exchange begins after the work that this stream has by now.
    void record_start(Stream stream) {
        exchanges_.push_back({.began = mark(stream)});
        computes_ = stream;
    }
    void record_completion(Stream stream) { exchanges_.back().complete = mark(stream); }
    // Later work of this stream waits for the exchange of this number and for all before.
    void record_wait(size_t number, Stream stream) {
        for (; asked_ <= number; asked_++) exchanges_[asked_ - first_].asked = mark(stream);
        exchanges_[number - first_].ends_wait = true;
    }
    // The times of the exchanges that were waited for since the last call. The stream that began the latest
    // one must have no work left.
    std::vector<ExchangeTime> take() {
        // An event in that stream happens at once, which tells the device's time by the host's clock.
        const cudaEvent_t now = mark(computes_);
        CUDA_CHECK(cudaEventSynchronize(now));
        const double clock = exchange_clock();
        std::vector<ExchangeTime> times;
        for (; first_ < asked_; first_++) {
            const Exchange e = exchanges_.front();
            exchanges_.pop_front();
            const double began = clock - seconds(e.began, now), took = seconds(e.began, e.complete),
                         before_wait = seconds(e.began, e.asked);
            times.push_back(
                {began, began + before_wait, took, e.ends_wait ? std::max(0.0, took - before_wait) : 0.0});
            unused_.insert(unused_.end(), {e.began, e.complete, e.asked});
        }
        unused_.push_back(now);
        return times;
    }

    static inline ExchangeTimer* now_timing = nullptr;  // the one that there is, if any

  private:
    struct Exchange {
        cudaEvent_t began = nullptr, complete = nullptr, asked = nullptr;
        bool ends_wait = false;  // of those that a wait was for, it is the last
    };
    cudaEvent_t mark(Stream stream) {
        cudaEvent_t event = nullptr;
        if (unused_.empty()) {
            CUDA_CHECK(cudaEventCreate(&event));
        } else {
            event = unused_.back();
            unused_.pop_back();
        }
        CUDA_CHECK(cudaEventRecord(event, stream));
        return event;
    }
    static double seconds(cudaEvent_t from, cudaEvent_t to) {
        float ms = 0;
        CUDA_CHECK(cudaEventElapsedTime(&ms, from, to));
        return ms * 1e-3;
    }

    Stream computes_ = {};            // began the latest exchange
    std::deque<Exchange> exchanges_;  // from number first_ on
    size_t first_ = 0, asked_ = 0;
    std::vector<cudaEvent_t> unused_;
};

class RankTransfers {
  public:
    // Connects the GPUs and takes NCCL's buffers. All ranks call it together.
    RankTransfers(RankEngine& engine, const Rank& rank) : engine_(engine), rank_(rank) {
        check_gpus_differ(engine, rank);
        setenv(kNcclChannels, std::to_string(nccl_channels(rank.count)).c_str(), 0);
        NcclId id{};
        if (rank.is_first()) nccl_.check(nccl_.get_unique_id(&id), "no identifier");
        const std::vector<NcclId> ids = engine.gather(id, rank.count);
        nccl_.check(nccl_.comm_init_rank(&communicator_, rank.count, ids[0], rank.number),
                    "the GPUs cannot be connected");
        // If a network fails, NCCL's kernels wait for ever, and with them the main thread.
        engine.watch([this] { return fault(); });
        connect_all();
    }
    RankTransfers(const RankTransfers&) = delete;
    ~RankTransfers() {
        engine_.watch({});
        if (joined_ < started_)
            nccl_.comm_abort(communicator_);
        else
            nccl_.comm_destroy(communicator_);
    }

    // The stream to which a round's `then` adds its work.
    Stream stream() const { return own_.get(); }
    // Starts an exchange after the work that `stream` has by now. Exchanges are made one after another. If
    // kMostUnjoined were started and not passed to finish(), the first of them is finished. Returns the
    // exchange's number.
    size_t start(const std::vector<ExchangeRound>& rounds, Stream stream) {
        if (started_ - joined_ >= kMostUnjoined) finish(joined_, stream);
        ExchangeTimer* const timer = ExchangeTimer::now_timing;
        if (timer) timer->record_start(stream);
        ready_.record(stream);
        ready_.block(own_.get());
        for (const ExchangeRound& round : rounds) {
            move(round.send, round.receive);
            if (round.then) round.then();
        }
        arrived_[started_ % kMostUnjoined].record(own_.get());
        if (timer) timer->record_completion(own_.get());
        return started_++;
    }
    // Makes later work of `stream` wait for this exchange and for all that were started before it. The host
    // does not wait.
    void finish(size_t number, Stream stream) {
        if (const std::string text = fault(); !text.empty()) fail_here(text);
        if (number < joined_) return;
        if (ExchangeTimer* const timer = ExchangeTimer::now_timing) timer->record_wait(number, stream);
        arrived_[number % kMostUnjoined].block(stream);
        joined_ = number + 1;
    }

  private:
    static constexpr size_t kMostUnjoined = 64;

    // What has gone wrong in exchanges; an empty text if nothing has.
    std::string fault() const {
        int status = Nccl::kSuccess;
        const int result = nccl_.comm_get_async_error(communicator_, &status);
        return nccl_.fault_text(result == Nccl::kSuccess ? status : result, "an exchange failed");
    }
    [[noreturn]] void fail_here(const std::string& text) const {
        throw StepError(text + ", " + RankEngine::where_text(engine_.where()));
    }
    void check(int result, const char* what) const {
        if (const std::string text = nccl_.fault_text(result, what); !text.empty()) fail_here(text);
    }
    void move(std::span<const Part> send, std::span<const Part> receive) {
        const auto own = static_cast<size_t>(rank_.number);
        if (send[own].bytes && send[own].at != receive[own].at)
            copy_async(receive[own].at, send[own].at, send[own].bytes, own_.get());
        check(nccl_.group_start(), "an exchange cannot start");
        for (int other = 1; other < rank_.count; other++) {  // each rank begins with another one
            const int to = (rank_.number + other) % rank_.count,
                      from = (rank_.number - other + rank_.count) % rank_.count;
            const Part &sent = send[static_cast<size_t>(to)], &received = receive[static_cast<size_t>(from)];
            if (sent.bytes)
                check(nccl_.send(sent.at, sent.bytes, Nccl::kBytes, to, communicator_, own_.get()),
                      "bytes cannot be sent");
            if (received.bytes)
                check(
                    nccl_.receive(received.at, received.bytes, Nccl::kBytes, from, communicator_, own_.get()),
                    "bytes cannot be received");
        }
        check(nccl_.group_end(), "an exchange cannot start");
    }
    // NCCL allocates buffers for a peer when it first sends to it, so that is done now.
    void connect_all() {
        const auto ranks = static_cast<size_t>(rank_.count);
        const DeviceBuffer buffer(2 * ranks * 16, "NCCL's first exchange");
        std::vector<Part> send, receive;
        for (size_t r = 0; r < ranks; r++) {
            send.push_back({buffer.data() + 16 * r, 16});
            receive.push_back({buffer.data() + 16 * (ranks + r), 16});
        }
        const size_t number = start({{send, receive}}, own_.get());
        finish(number, own_.get());
        arrived_[number].wait();
    }

    RankEngine& engine_;
    const Rank rank_;
    const Nccl nccl_;
    OwnStream own_;
    Event ready_;
    std::array<Event, kMostUnjoined> arrived_;
    NcclCommunicator* communicator_ = nullptr;
    size_t started_ = 0, joined_ = 0;
};

#else

// Exchanges between CPUs are measured as they are made (bench.h).
struct ExchangeTimer {
    static std::vector<ExchangeTime> take() { return {}; }
};

inline void see_own_gpu(const Rank&) {}
inline void check_gpus_for_ranks(int) {}

class RankTransfers {
  public:
    RankTransfers(RankEngine& engine, const Rank&) : engine_(engine) {}
    RankTransfers(const RankTransfers&) = delete;
    // If the run fails while exchanges are under way, their memory must not end before them.
    ~RankTransfers() {
        if (started_ > 0) engine_.finish(started_ - 1);
    }
    Stream stream() const { return {}; }
    size_t start(std::vector<ExchangeRound> rounds, Stream) {
        for (ExchangeRound& round : rounds)
            if (round.then)  // the thread that calls it is beside those that compute
                round.then = [then = std::move(round.then)] {
                    omp_set_num_threads(1);
                    then();
                };
        engine_.start(std::move(rounds));
        return started_++;
    }
    void finish(size_t number, Stream) { engine_.finish(number); }

  private:
    RankEngine& engine_;
    size_t started_ = 0;
};

#endif
