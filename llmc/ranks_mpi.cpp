// ranks_mpi.cpp - the ranks' engine over MPI (ranks.h). It has a file of its own because only it includes
// mpi.h, which a build may lack. The library is loaded when ranks are connected, so that a run on one device
// neither needs it nor has its memory.
#include "llmc/ranks.h"

#ifdef LLMC_MPI

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <dlfcn.h>
#include <mpi.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <deque>
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
            change([this] { ends_ = true; });
            worker_.join();
        }
        finalize_();
    }

    void exchange(std::span<const Part> send, std::span<const Part> receive) override {
        if (started_ > 0) finish(started_ - 1);  // so that the worker is not in a call of MPI
        move(send, receive);
    }
    void start(std::span<const Part> send, std::span<const Part> receive) override {
        if (!worker_.joinable()) start_worker();
        change([&] { waiting_.push_back({{send.begin(), send.end()}, {receive.begin(), receive.end()}}); });
        times_[started_++ % times_.size()].began = Clock::now();
    }
    void finish(size_t number) override {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return done_ > number; });
    }
    double seconds_of(size_t number) const override {
        const Times& t = times_[number % times_.size()];
        return std::chrono::duration<double>(t.ended - t.began).count();
    }
    void end_all(int code) override { abort_(world_, code); }
    int on_this_machine() const override { return on_this_machine_; }

  private:
    void move(std::span<const Part> send, std::span<const Part> receive) {
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
    // MPI moves bytes only while a thread is inside one of its calls, so a worker thread stays in one while
    // the main thread computes.
    template <class Change>
    void change(Change&& change) {
        const std::lock_guard lock(mutex_);
        change();
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
        std::unique_lock lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return ends_ || !waiting_.empty(); });
            if (ends_) return;
            const Parts parts = std::move(waiting_.front());
            waiting_.pop_front();
            lock.unlock();
            move(parts.send, parts.receive);
            lock.lock();
            times_[done_++ % times_.size()].ended = Clock::now();
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
    struct Parts {
        std::vector<Part> send, receive;
    };
    std::deque<Parts> waiting_;  // exchanges that were started and not begun
    size_t started_ = 0, done_ = 0;
    bool ends_ = false;
    using Clock = std::chrono::steady_clock;
    struct Times {
        Clock::time_point began, ended;
    };
    std::array<Times, 256> times_ = {};  // of the latest exchanges, by their numbers
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
