// ranks_mpi.cpp - the ranks' engine over MPI (ranks.h). It has a file of its own because only it includes
// mpi.h, which a build may lack. The library is loaded when ranks are connected, so that a run on one device
// neither needs it nor has its memory.
#include "llmc/ranks.h"

#ifdef LLMC_MPI

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <dlfcn.h>
#include <mpi.h>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <mutex>
#include <thread>

namespace {

#ifdef OPEN_MPI
constexpr const char* kLibraries[] = {"libmpi.so.40", "libmpi.so"};
#else
constexpr const char* kLibraries[] = {"libmpich.so.12", "libmpi.so.12", "libmpich.so", "libmpi.so"};
#endif

class MpiEngine : public RankEngine {
  public:
    explicit MpiEngine(const Rank& rank) : rank_(rank) {
        for (const char* name : kLibraries)
            if (!library_) library_ = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
        if (!library_) fail("--devices: MPI cannot be loaded: %s", dlerror());
        const auto init = function<decltype(&MPI_Init_thread)>("MPI_Init_thread");
        isend_ = function<decltype(&MPI_Isend)>("MPI_Isend");
        irecv_ = function<decltype(&MPI_Irecv)>("MPI_Irecv");
        wait_all_ = function<decltype(&MPI_Waitall)>("MPI_Waitall");
        abort_ = function<decltype(&MPI_Abort)>("MPI_Abort");
        finalize_ = function<decltype(&MPI_Finalize)>("MPI_Finalize");
#ifdef OPEN_MPI  // its handles are addresses in the library
        world_ = reinterpret_cast<MPI_Comm>(dlsym(library_, "ompi_mpi_comm_world"));
        byte_ = reinterpret_cast<MPI_Datatype>(dlsym(library_, "ompi_mpi_byte"));
#else
        world_ = MPI_COMM_WORLD;
        byte_ = MPI_BYTE;
#endif
        int threads = MPI_THREAD_SINGLE;  // two threads call MPI, never at the same time
        if (init(nullptr, nullptr, MPI_THREAD_SERIALIZED, &threads) != MPI_SUCCESS)
            fail("--devices: MPI does not start");
        if (threads < MPI_THREAD_SERIALIZED) fail("--devices: this MPI is for programs of one thread");
        int number = -1, count = 0;
        function<decltype(&MPI_Comm_rank)>("MPI_Comm_rank")(world_, &number);
        function<decltype(&MPI_Comm_size)>("MPI_Comm_size")(world_, &count);
        MPI_Comm here;
        function<decltype(&MPI_Comm_split_type)>("MPI_Comm_split_type")(world_, MPI_COMM_TYPE_SHARED, 0,
                                                                        info_null(), &here);
        function<decltype(&MPI_Comm_size)>("MPI_Comm_size")(here, &on_this_machine_);
        if (number != rank.number || count != rank.count)
            fail(
                "--devices: MPI calls this rank %d of %d, and the environment %d of %d: was this built with "
                "another MPI than the one that started it?",
                number, count, rank.number, rank.count);
    }
    MpiEngine(const MpiEngine&) = delete;
    ~MpiEngine() override {
        if (worker_.joinable()) {
            set_state(State::Ends);
            worker_.join();
        }
        finalize_();
    }

    void exchange(std::span<const Part> send, std::span<const Part> receive) override {
        requests_.clear();
        const auto call = [&](auto function, const Part& part, int peer) {
            if (part.bytes == 0) return;
            if (part.bytes > kMostBytes) bug("ranks exchange %zu bytes at a time", part.bytes);
            function(part.at, static_cast<int>(part.bytes), byte_, peer, 0, world_,
                     &requests_.emplace_back());
        };
        for (int peer = 0; peer < rank_.count; peer++)
            if (peer != rank_.number) call(irecv_, receive[static_cast<size_t>(peer)], peer);
        for (int peer = 0; peer < rank_.count; peer++)
            if (peer != rank_.number) call(isend_, send[static_cast<size_t>(peer)], peer);
        const auto own = static_cast<size_t>(rank_.number);
        if (send[own].bytes > 0 && send[own].at != receive[own].at)
            std::memcpy(receive[own].at, send[own].at, send[own].bytes);
        wait_all_(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE);
    }
    void start(std::span<const Part> send, std::span<const Part> receive) override {
        send_.assign(send.begin(), send.end());
        receive_.assign(receive.begin(), receive.end());
        if (!worker_.joinable()) start_worker();
        began_ = Clock::now();
        set_state(State::Works);
    }
    void finish() override {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return state_ == State::Idle; });
    }
    double latest_seconds() const override { return std::chrono::duration<double>(ended_ - began_).count(); }
    void end_all(int code) override { abort_(world_, code); }
    int on_this_machine() const override { return on_this_machine_; }

  private:
    // State of the worker thread. MPI moves bytes only while a thread is inside one of its calls, so the
    // worker stays in one while the main thread computes.
    enum class State { Idle, Works, Ends };
    void set_state(State state) {
        const std::lock_guard lock(mutex_);
        state_ = state;
        changed_.notify_all();
    }
    void start_worker() {
        sigset_t all, before;  // only the main thread handles signals
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        worker_ = std::thread([this] { work(); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    void work() {
        for (;;) {
            {
                std::unique_lock lock(mutex_);
                changed_.wait(lock, [this] { return state_ != State::Idle; });
                if (state_ == State::Ends) return;
            }
            exchange(send_, receive_);
            const std::lock_guard lock(mutex_);
            ended_ = Clock::now();
            if (state_ == State::Works) state_ = State::Idle;
            changed_.notify_all();
        }
    }
    template <class Function>
    Function function(const char* name) const {
        const auto found = reinterpret_cast<Function>(dlsym(library_, name));
        if (!found) fail("--devices: MPI lacks %s: %s", name, dlerror());
        return found;
    }

    MPI_Info info_null() const {
#ifdef OPEN_MPI
        return reinterpret_cast<MPI_Info>(dlsym(library_, "ompi_mpi_info_null"));
#else
        return MPI_INFO_NULL;
#endif
    }

    const Rank rank_;
    int on_this_machine_ = 1;
    void* library_ = nullptr;
    MPI_Comm world_;
    MPI_Datatype byte_;
    std::vector<MPI_Request> requests_;
    std::mutex mutex_;
    std::condition_variable changed_;
    State state_ = State::Idle;
    std::vector<Part> send_, receive_;  // of the exchange under way
    using Clock = std::chrono::steady_clock;
    Clock::time_point began_ = {}, ended_ = {};  // of the latest exchange
    std::thread worker_;
    decltype(&MPI_Isend) isend_;
    decltype(&MPI_Irecv) irecv_;
    decltype(&MPI_Waitall) wait_all_;
    decltype(&MPI_Abort) abort_;
    decltype(&MPI_Finalize) finalize_;
};

}  // namespace

std::unique_ptr<RankEngine> connect_ranks(const Rank& rank) { return std::make_unique<MpiEngine>(rank); }

RankLauncher rank_launcher(int count) {
#ifdef OPEN_MPI
    // In a container the user is root. Ranks may outnumber cores, and each takes the cores that are its
    // share.
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    return {{"mpirun.openmpi", "mpirun"},
            {"-n", std::to_string(count), "--oversubscribe", "--bind-to", "none"}};
#else
    return {{"mpiexec.hydra", "mpiexec"}, {"-n", std::to_string(count)}};
#endif
}

#else

namespace {
constexpr const char* kNoMpi =
    "--devices: this build has no MPI: make deps installs it (libopenmpi-dev, openmpi-bin), then make again";
}
std::unique_ptr<RankEngine> connect_ranks(const Rank&) { fail(kNoMpi); }
RankLauncher rank_launcher(int) { fail(kNoMpi); }

#endif
