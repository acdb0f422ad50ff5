// nccl.cpp - the part of NCCL that the trainer uses, for emulated devices: sends and receives in groups,
// between processes of this machine that have one emulated device each. The ranks meet in shared memory.
//
// It ends the process with a fault when a program does what NCCL forbids or leaves undefined: parts that
// differ in size or type on the two sides, a part that only one side knows, a send outside of a group, two
// streams for one communicator, a call while a stream is captured, a communicator that was aborted.
//
// NCCL_BREAKS=RANK:N makes the network of a rank fail when it runs its N-th group: like a kernel of NCCL, the
// group waits for ever, and ncclCommGetAsyncError() tells who asks. With RANK:N:queued it fails when the host
// has queued that group, so that the host asks before it waits for the device.
//
// A group is a piece of work in its stream, which waits for other ranks when it runs. A real device gets
// there without its host; here a thread runs the stream's work for other ranks that wait.
// Without NCCL's header the library has no NCCL, and tests of several GPUs are skipped.
#if __has_include(<nccl.h>)

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>
#include <set>
#include <thread>

#include "test/gpu/device.h"

using namespace gpu;

namespace {

constexpr int kMostRanks = 16;
constexpr size_t kMostBytes = size_t{64} << 20;  // that a rank sends to another in a group

// What one rank sends to another. Parts are numbered from 1 and are there one at a time. Begins as zeros.
struct Mail {
    std::atomic<uint64_t> to_send, to_receive;  // parts that the two ranks have enqueued
    std::atomic<uint64_t> sent, taken;          // parts that have been copied
    std::atomic<uint64_t> want_sent;            // the part that the receiver waits for
    std::atomic<uint64_t> want_taken;           // the part that the sender waits for the receiver to take
    int type;                                   // of the part that was sent last
    size_t count;
};
struct Shared {
    std::atomic<int> attached;
    Mail mail[kMostRanks][kMostRanks];  // by sender and receiver
};

// How long a rank waits for another, in milliseconds: the environment's GPU_PATIENCE in seconds.
double patience() {
    static const double seconds = atof(environment("GPU_PATIENCE", "60").c_str());
    return 1e3 * seconds;
}

// Bytes of the device that NCCL takes for each peer when it first sends to it: 12 MiB a channel.
size_t buffer_bytes() {
    return static_cast<size_t>(atoi(environment("NCCL_MAX_P2P_NCHANNELS", "32").c_str())) * (12 << 20);
}

// Where a rank's network fails.
struct Break {
    int group = 0;        // 0: nowhere
    bool queued = false;  // when the group is queued, rather than when it runs
};
Break break_of(int rank) {
    int broken_rank = -1, group = 0;
    char when[8] = "";
    sscanf(environment("NCCL_BREAKS", "").c_str(), "%d:%d:%7s", &broken_rank, &group, when);
    return broken_rank == rank ? Break{group, !strcmp(when, "queued")} : Break{};
}

struct Operation {
    bool sends;
    void* at;
    size_t count;
    ncclDataType_t type;
    int peer;
    uint64_t number = 0;  // among the parts that one of the two ranks sends to the other
};
size_t bytes_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8:
        case ncclUint8:
            return 1;
        case ncclFloat16:
        case ncclBfloat16:
            return 2;
        case ncclInt32:
        case ncclUint32:
        case ncclFloat32:
            return 4;
        default:
            throw Fault("NCCL: a data type that the emulator does not know");
    }
}

}  // namespace

struct ncclComm {
    ncclComm(const std::string& name, int rank_number, int rank_count)
        : rank(rank_number), ranks(rank_count) {
        if (ranks > kMostRanks) throw Fault("NCCL: more ranks than the emulator knows");
        const size_t bytes = sizeof(Shared) + kMostRanks * kMostRanks * kMostBytes;
        const int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
        if (file < 0 || ftruncate(file, static_cast<off_t>(bytes))) throw Fault("NCCL: no shared memory");
        void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
        ::close(file);
        if (p == MAP_FAILED) throw Fault("NCCL: no address space");
        shared = static_cast<Shared*>(p);
        shared->attached++;
        // Even if the others never come, or one of them ends at once and all with it.
        const auto forget_name = [&](const void*) { shm_unlink(name.c_str()); };
        const std::unique_ptr<const void, decltype(forget_name)> named(p, forget_name);
        wait_until([&] { return shared->attached >= ranks; }, "the other ranks to connect");
        helper = std::thread([this] { answer(); });
    }
    char* data(int from, int to) const {
        return reinterpret_cast<char*>(shared + 1) + static_cast<size_t>(from * kMostRanks + to) * kMostBytes;
    }
    template <class Condition>
    void wait_until(Condition condition, const std::string& what) const {
        const double start = Device::now();
        while (!condition()) {
            usleep(50);
            if (Device::now() - start > patience())
                throw Fault("NCCL: rank " + std::to_string(rank) + " waited too long for " + what);
        }
    }
    Mail& mail(const Operation& o) const {
        return o.sends ? shared->mail[rank][o.peer] : shared->mail[o.peer][rank];
    }
    // Enqueues a group.
    void enqueue(std::vector<Operation> operations, ::Stream* stream_of_group) {
        if (ended) throw Fault("NCCL: a communicator that was aborted or destroyed");
        if (stream_of_group->recording) throw Fault("NCCL: an exchange while its stream is captured");
        device().not_while_recording("NCCL: an exchange");
        if (stream && stream != stream_of_group)
            throw Fault("NCCL: a communicator on two streams, whose order is not known");
        stream = stream_of_group;
        for (Operation& o : operations) {
            if (o.peer < 0 || o.peer >= ranks) throw Fault("NCCL: a peer that does not exist");
            if (o.peer == rank) throw Fault("NCCL: a part for the rank itself");
            if (o.count * bytes_of(o.type) > kMostBytes)
                throw Fault("NCCL: a part that is larger than the emulator allows");
            for (const Operation& other : operations)
                if (&other != &o && other.sends == o.sends && other.peer == o.peer)
                    throw Fault("NCCL: two parts for one peer in a group");
            if (!device().memory.is_device(o.at)) throw Fault("NCCL: a part that is not on the device");
            device().memory.check_bounds(o.at, o.count * bytes_of(o.type));
            if (connected.insert(o.peer).second && !device().memory.allocate(buffer_bytes()))
                throw Fault("NCCL: no memory for the buffers of a peer");
            o.number = (o.sends ? mail(o).to_send : mail(o).to_receive) + 1;
        }
        // The other ranks must know of the parts first, because the group may run as soon as it is queued.
        for (const Operation& o : operations) {
            (o.sends ? sends : receives)[o.peer].push_back(stream->queued + 1);
            (o.sends ? mail(o).to_send : mail(o).to_receive)++;
        }
        if (++groups_queued == breaks.group && breaks.queued) broken = true;
        device().queue(stream, {"ncclGroup", [=, this](const Work& work) { run(operations, work); }, nullptr,
                                [=, this] { return is_ready(operations); }});
    }
    // Whether the other sides of these have been enqueued.
    bool is_ready(const std::vector<Operation>& operations) const {
        return std::all_of(operations.begin(), operations.end(), [&](const Operation& o) {
            return (o.sends ? mail(o).to_receive : mail(o).to_send) >= o.number;
        });
    }
    void run(const std::vector<Operation>& operations, const Work& work) {
        if (++groups_run == breaks.group) {
            broken = true;
            for (;;) pause();
        }
        const auto text = [](uint64_t number) { return "part " + std::to_string(number); };
        for (const Operation& o : operations) {
            if (!o.sends) continue;
            const size_t bytes = o.count * bytes_of(o.type);
            Mail& m = mail(o);
            m.want_taken = o.number - 1;
            wait_until([&] { return m.sent == m.taken; },
                       "rank " + std::to_string(o.peer) + " to receive " + text(o.number - 1));
            device().reads(work, o.at, bytes);
            memcpy(data(rank, o.peer), device().memory.bytes_at(o.at), bytes);
            m.type = o.type;
            m.count = o.count;
            m.sent++;
        }
        for (const Operation& o : operations) {
            if (o.sends) continue;
            const std::string peer = "rank " + std::to_string(o.peer);
            Mail& m = mail(o);
            m.want_sent = o.number;
            wait_until([&] { return m.sent >= o.number; }, peer + " to send " + text(o.number));
            if (m.type != o.type || m.count != o.count)
                throw Fault("NCCL: " + peer + " sends " + std::to_string(m.count) + " of type " +
                            std::to_string(m.type) + " as its " + text(o.number) + ", and rank " +
                            std::to_string(rank) + " receives " + std::to_string(o.count) + " of type " +
                            std::to_string(o.type));
            const size_t bytes = o.count * bytes_of(o.type);
            device().writes(work, o.at, bytes);
            memcpy(device().memory.bytes_at(o.at), data(o.peer, rank), bytes);
            m.taken++;
        }
    }
    // Runs this rank's stream for ranks that wait for it.
    void answer() {
        while (!ended) {
            for (int peer = 0; peer < ranks; peer++) {
                const Mail &to = shared->mail[rank][peer], &from = shared->mail[peer][rank];
                if (to.want_sent > to.sent) run_for_others(sends[peer], to.want_sent);
                if (from.want_taken > from.taken) run_for_others(receives[peer], from.want_taken);
            }
            usleep(100);
        }
    }
    void run_for_others(const std::vector<uint32_t>& tasks, uint64_t number) const {
        const std::lock_guard lock(device_mutex());
        if (ended || number > tasks.size()) return;
        try {
            device().run_if_ready(stream, tasks[number - 1]);
        } catch (const std::exception& e) {
            end_process(e);
        }
    }
    // Waits until the others have received all that was sent, and ends.
    void finish() {
        for (int peer = 0; peer < ranks; peer++) {
            const Mail &to = shared->mail[rank][peer], &from = shared->mail[peer][rank];
            wait_until([&] { return to.taken == to.to_send; },
                       "rank " + std::to_string(peer) + " to receive what was sent");
            if (from.sent > from.taken)
                throw Fault("NCCL: rank " + std::to_string(rank) + " did not receive what rank " +
                            std::to_string(peer) + " sent");
        }
        end();
    }
    void end() {
        ended = true;
        helper.join();
    }

    const int rank, ranks;
    Shared* shared = nullptr;
    ::Stream* stream = nullptr;
    std::set<int> connected;  // peers that a buffer was allocated for
    // Where in the stream each part is sent and received, by peer.
    std::vector<uint32_t> sends[kMostRanks], receives[kMostRanks];
    std::atomic<bool> ended = false;
    int groups_queued = 0, groups_run = 0;
    const Break breaks = break_of(rank);
    std::atomic<bool> broken = false;  // the network
    std::thread helper;
};

namespace {

// The group that this thread has opened.
struct OpenGroup {
    int depth = 0;
    ncclComm* communicator = nullptr;
    ::Stream* stream = nullptr;
    std::vector<Operation> operations;
};
thread_local OpenGroup group;

template <class F>
ncclResult_t answered(F&& f, bool locked = true) {
    std::unique_lock lock(device_mutex(), std::defer_lock);
    if (locked) lock.lock();
    try {
        f();
        return ncclSuccess;
    } catch (const std::exception& e) {
        end_process(e);
    }
}

// False if /dev/shm is too small for what NCCL takes there for each of the other ranks: a rank's buffers of
// 9,637,888 bytes, as its log says.
bool has_room_for_connections(int ranks) {
    struct statvfs disk;
    return statvfs("/dev/shm", &disk) == 0 &&
           disk.f_bavail * disk.f_frsize >= static_cast<size_t>(ranks - 1) * 9637888;
}

void add(Operation operation, ncclComm* communicator, cudaStream_t s) {
    if (!group.depth)
        throw Fault("NCCL: a part outside of a group, which may wait for the one behind it for ever");
    auto* const stream = s ? reinterpret_cast<::Stream*>(s) : device().default_stream();
    if (group.communicator && (group.communicator != communicator || group.stream != stream))
        throw Fault("NCCL: a group with two communicators or streams");
    group.communicator = communicator;
    group.stream = stream;
    group.operations.push_back(operation);
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t error) {
    return error == ncclSystemError ? "unhandled system error" : "an error that the emulator does not name";
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/emulated-nccl-%d-%ld", getpid(),
             now.tv_sec * 1000000000 + now.tv_nsec);
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* communicator, int ranks, ncclUniqueId id, int rank) {
    if (!has_room_for_connections(ranks)) return ncclSystemError;
    return answered([&] { *communicator = new ncclComm(id.internal, rank, ranks); }, false);
}
ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
    answered([&] { device().wait(); });
    return answered([&] { communicator->finish(); }, false);
}
ncclResult_t ncclCommAbort(ncclComm_t communicator) {
    return answered([&] { communicator->end(); }, false);
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* error) {
    const auto ask = [&] {
        if (communicator->ended) throw Fault("NCCL: a communicator that was aborted or destroyed");
        *error = communicator->broken ? ncclSystemError : ncclSuccess;
    };
    return answered(ask, false);  // another thread may ask while one waits for the device
}
ncclResult_t ncclGroupStart() { return group.depth++, ncclSuccess; }
ncclResult_t ncclGroupEnd() {
    return answered([&] {
        if (!group.depth) throw Fault("NCCL: the end of a group that was not begun");
        if (--group.depth) return;
        const OpenGroup ended = std::move(group);
        group = {};
        if (ended.communicator) ended.communicator->enqueue(ended.operations, ended.stream);
    });
}
ncclResult_t ncclSend(const void* at, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t s) {
    return answered([&] { add({true, const_cast<void*>(at), count, type, peer}, communicator, s); });
}
ncclResult_t ncclRecv(void* at, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t s) {
    return answered([&] { add({false, at, count, type, peer}, communicator, s); });
}

}  // extern "C"

#endif
