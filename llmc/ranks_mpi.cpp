// ranks_mpi.cpp - the ranks' engine over MPI (ranks.h). It has a file of its own because only it includes
// mpi.h, which a build may lack. The library is loaded when ranks are connected, so that a run on one device
// neither needs it nor has its memory.
#include "llmc/ranks.h"
#include "llmc/signals.h"

#ifdef LLMC_MPI

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <dlfcn.h>
#include <fcntl.h>
#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace {

#ifdef OPEN_MPI
constexpr const char* kLibraries[] = {"libmpi.so.40", "libmpi.so"};
#else
constexpr const char* kLibraries[] = {"libmpich.so.12", "libmpi.so.12", "libmpich.so", "libmpi.so"};
#endif

// MPI's functions that are used here, and its handles.
struct Mpi {
    void* const library = load();
    decltype(&MPI_Init_thread) const init = function("MPI_Init_thread");
    decltype(&MPI_Isend) const isend = function("MPI_Isend");
    decltype(&MPI_Irecv) const irecv = function("MPI_Irecv");
    decltype(&MPI_Test) const test = function("MPI_Test");
    decltype(&MPI_Testall) const test_all = function("MPI_Testall");
    decltype(&MPI_Cancel) const cancel = function("MPI_Cancel");
    decltype(&MPI_Abort) const abort = function("MPI_Abort");
    decltype(&MPI_Finalize) const finalize = function("MPI_Finalize");
#ifdef OPEN_MPI  // its handles are addresses in the library
    MPI_Comm const world = reinterpret_cast<MPI_Comm>(dlsym(library, "ompi_mpi_comm_world"));
    MPI_Datatype const byte = reinterpret_cast<MPI_Datatype>(dlsym(library, "ompi_mpi_byte"));
    MPI_Request const no_request = reinterpret_cast<MPI_Request>(dlsym(library, "ompi_request_null"));
    MPI_Info const no_info = reinterpret_cast<MPI_Info>(dlsym(library, "ompi_mpi_info_null"));
#else
    MPI_Comm const world = MPI_COMM_WORLD;
    MPI_Datatype const byte = MPI_BYTE;
    MPI_Request const no_request = MPI_REQUEST_NULL;
    MPI_Info const no_info = MPI_INFO_NULL;
#endif

    LoadedFunction function(const char* name) const {
        const LoadedFunction found = {dlsym(library, name)};
        if (!found.at) fail("--devices: MPI lacks %s: %s", name, dlerror());
        return found;
    }

  private:
    static void* load() {
        for (const char* name : kLibraries)
            if (void* const library = dlopen(name, RTLD_NOW | RTLD_GLOBAL)) return library;
        fail("--devices: MPI cannot be loaded: %s", dlerror());
    }
};

using Clock = std::chrono::steady_clock;

// Signs of life, which each rank sends to all others while it runs, whether it computes, waits or saves. A
// rank from which none comes for `patience` seconds is lost: it was stopped, or the network to it was cut.
class SignsOfLife {
  public:
    SignsOfLife(const Mpi& mpi, const Rank& rank) : mpi_(mpi), rank_(rank) {}

    static constexpr std::chrono::milliseconds kTick{20};

    // Begins to receive them. `hosts` has the names of all ranks' hosts.
    void begin(std::vector<std::string> hosts) {
        hosts_ = std::move(hosts);
        peers_.resize(hosts_.size());
        for_each_peer([&](Peer& p, int r) {
            p.sent = mpi_.no_request;
            receive(p, r);
        });
    }
    // Sends them ten times in the time after which a rank is lost, but at most ten times a second, and
    // receives those of others. Call it at least every kTick; returns true if a rank is lost. A long gap
    // between two calls counts as little silence: this process itself was stopped, or got no core.
    bool exchange(double patience) {
        const auto now = Clock::now();
        if (now - looked_ < kTick) return false;
        const double gap = std::chrono::duration<double>(now - looked_).count();
        looked_ = now;
        unsent_ += gap;
        const bool is_time = unsent_ >= std::max(0.1, patience / 10);
        if (is_time) unsent_ = 0;
        bool lost = false;
        for_each_peer([&](Peer& p, int r) {
            p.silent += std::min({gap, 1.0, patience / 10});
            while (!p.has_ended && is_complete(p.received)) {
                p.silent = 0;
                p.has_ended = p.sign == kEnds;
                if (!p.has_ended) receive(p, r);
            }
            const bool is_taken = is_complete(p.sent);
            if (p.has_ended && is_taken) p.silent = 0;  // it sends no more, and waits for this rank to end
            if (is_time && !ends_ && is_taken) send(p, r, &kAlive);
            p.is_lost = p.silent > patience;
            lost |= p.is_lost;
        });
        return lost;
    }
    // The lost ranks, as "rank 2 (host b)".
    std::string lost_ranks() {
        std::string all;
        for_each_peer([&](const Peer& p, int r) {
            if (p.is_lost)
                all +=
                    format("%srank %d (host %s)", all.empty() ? "" : ", ", r, hosts_[static_cast<size_t>(r)]);
        });
        return all;
    }
    // True if this rank is the first of those that are not lost.
    bool is_first_alive() {
        bool is_first = true;
        for_each_peer([&](const Peer& p, int r) { is_first &= r > rank_.number || p.is_lost; });
        return is_first;
    }
    // Tells the others that no more will come, and waits until all have said so: MPI must end with no message
    // on its way. Returns true if a rank is lost; if it turns out that it is not, call it again.
    bool end(double patience) {
        ends_ = true;
        for (;;) {
            bool all_ended = true;
            for_each_peer([&](Peer& p, int r) {
                bool is_taken = is_complete(p.sent);
                if (is_taken && !p.is_told) {
                    send(p, r, &kEnds);
                    p.is_told = true;
                    is_taken = is_complete(p.sent);
                }
                all_ended &= is_taken && p.has_ended;
            });
            if (all_ended) return false;
            if (exchange(patience)) return true;
            usleep(1000);
        }
    }

  private:
    // Another rank: a sign that is received from it, and one that is sent to it; for how many seconds none
    // has come, or, if it has ended, the latest sign was not taken; and whether it is told that this rank
    // ends.
    struct Peer {
        MPI_Request received, sent;
        char sign = 0;
        double silent = 0;
        bool has_ended = false, is_lost = false, is_told = false;
    };
    static constexpr int kTag = 1;
    static constexpr char kAlive = 'a', kEnds = 'e';

    // Calls f(peer, its number) for each other rank.
    template <class F>
    void for_each_peer(F&& f) {
        for (int r = 0; r < static_cast<int>(peers_.size()); r++)
            if (r != rank_.number) f(peers_[static_cast<size_t>(r)], r);
    }
    void receive(Peer& p, int r) { mpi_.irecv(&p.sign, 1, mpi_.byte, r, kTag, mpi_.world, &p.received); }
    void send(Peer& p, int r, const char* sign) {
        mpi_.isend(sign, 1, mpi_.byte, r, kTag, mpi_.world, &p.sent);
    }
    bool is_complete(MPI_Request& request) const {
        int complete = 0;
        mpi_.test(&request, &complete, MPI_STATUS_IGNORE);
        return complete;
    }

    const Mpi& mpi_;
    const Rank rank_;
    std::vector<std::string> hosts_;
    std::vector<Peer> peers_;                  // by rank
    Clock::time_point looked_ = Clock::now();  // for signs
    double unsent_ = 0;                        // seconds since signs were sent
    bool ends_ = false;                        // no more are sent
};

// Exchanges that go on one after another.
struct Lane {
    using Exchange = std::vector<ExchangeRound>;

    const int tag;                           // of its messages
    std::deque<Exchange> exchanges = {};     // that are not complete
    std::vector<MPI_Request> requests = {};  // of the round that is under way
    size_t round = 0;                        // of the first exchange
    bool is_under_way = false;
};

// While this lives, stdout and stderr go to MPI's launcher (LauncherStreams). It works once in a process.
class PrintsToLauncher {
  public:
    PrintsToLauncher() {
        const LauncherStreams to = std::exchange(launcher_streams, {});
        own_ = {fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3), fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3)};
        if (to.is_open() && own_.is_open()) dup2(to.output, STDOUT_FILENO), dup2(to.errors, STDERR_FILENO);
        to.close();
    }
    PrintsToLauncher(const PrintsToLauncher&) = delete;
    ~PrintsToLauncher() {
        fflush(stdout);
        if (own_.is_open()) dup2(own_.output, STDOUT_FILENO), dup2(own_.errors, STDERR_FILENO);
        own_.close();
    }

  private:
    LauncherStreams own_;
};

class MpiEngine : public RankEngine {
  public:
    MpiEngine(const Rank& rank, OnLost on_lost)
        : rank_(rank), on_lost_(std::move(on_lost)), signs_(mpi_, rank) {
        // OpenMPI moves a long message over TCP when its receiver asks for it. That request waits in the
        // socket behind the message that goes the other way, so the two would go one after the other, in
        // twice the time. Without requests ("put") they go at the same time.
        setenv("OMPI_MCA_btl_tcp_flags", "send,inplace", 0);
        // What OpenMPI itself prints goes here: to stderr until the first step. Later it would only say,
        // beside our line, that a rank which is lost does not answer.
        printed_ = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
        setenv("OPAL_OUTPUT_STDERR_FD", std::to_string(printed_).c_str(), 0);
        int threads = MPI_THREAD_SINGLE;  // the worker calls MPI, and the main thread only while it does not
        const int result = [&] {
            const PrintsToLauncher prints;
            return mpi_.init(nullptr, nullptr, MPI_THREAD_SERIALIZED, &threads);
        }();
        if (result != MPI_SUCCESS) fail("--devices: MPI does not start");
        if (threads < MPI_THREAD_SERIALIZED) fail("--devices: this MPI is for programs of one thread");
        check_numbers();
        signs_.begin(gather_hosts());
        rank_.is_grouped_by_machine = are_grouped_by_machine();
        start_worker();
    }
    MpiEngine(const MpiEngine&) = delete;
    ~MpiEngine() override {
        change([this] { ends_ = true; });
        worker_.join();
        mpi_.finalize();
    }

    void exchange(std::span<const Part> send, std::span<const Part> receive) override {
        change([&] {
            control_.exchanges.push_back({{{send.begin(), send.end()}, {receive.begin(), receive.end()}}});
        });
        wait_until([this] { return control_.exchanges.empty(); });
    }
    void start(std::vector<ExchangeRound> rounds) override {
        times_[started_++ % times_.size()].began = Clock::now();
        change([&] { data_.exchanges.push_back(std::move(rounds)); });
    }
    void finish(size_t number) override {
        wait_until([&] { return done_ > number; });
    }
    void set_patience(double seconds) override { patience_ = seconds; }
    void set_where(const std::string& where) override {
        change([&] { where_ = where; });
        if (printed_ < 0) return;
        const int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
        dup3(nowhere, printed_, O_CLOEXEC);
        close(nowhere);
        printed_ = -1;
    }
    std::string where() const override {
        const std::lock_guard lock(mutex_);
        return where_;
    }
    void watch(std::function<std::string()> fault) override {
        change([&] { fault_ = std::move(fault); });
    }
    double seconds_of(size_t number) const override {
        const Times& t = times_[number % times_.size()];
        return std::chrono::duration<double>(t.ended - t.began).count();
    }
    void end_all(int code) override {
        alarm(10);  // in case that MPI waits for ranks that cannot be reached
        const int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
        dup2(nowhere, STDERR_FILENO);  // the error was reported; MPICH says that there was one
        if (is_worker_) abort(code);
        end_code_ = code;  // the worker may be inside MPI: it ends all when it is not
        for (int i = 0; i < 2000 && !is_aborting_; i++) usleep(1000);
        abort(code);
    }
    Rank rank() const override { return rank_; }

  private:
    // Fails if MPI does not see the ranks that the environment says.
    void check_numbers() {
        int number = -1, count = 0;
        const decltype(&MPI_Comm_size) size = mpi_.function("MPI_Comm_size");
        const decltype(&MPI_Comm_rank) rank = mpi_.function("MPI_Comm_rank");
        const decltype(&MPI_Comm_split_type) split_type = mpi_.function("MPI_Comm_split_type");
        rank(mpi_.world, &number);
        size(mpi_.world, &count);
        MPI_Comm here;
        split_type(mpi_.world, MPI_COMM_TYPE_SHARED, 0, mpi_.no_info, &here);
        size(here, &rank_.on_this_machine);
        rank(here, &rank_.number_on_this_machine);
        if (number != rank_.number || count != rank_.count)
            fail(
                "--devices: MPI calls this rank %d of %d, and the environment %d of %d: was this built with "
                "another MPI than the one that started it?",
                number, count, rank_.number, rank_.count);
    }
    // The ranks' values, in order.
    template <class T>
    std::vector<T> gather_values(T own) {
        std::vector<T> all(static_cast<size_t>(rank_.count));
        const std::vector<Part> send(all.size(), {&own, sizeof own});
        std::vector<Part> receive;
        for (T& value : all) receive.push_back({&value, sizeof value});
        std::vector<MPI_Request> requests;
        post(requests, send, receive, 0);
        while (!are_complete(requests)) look_around();
        return all;
    }
    std::vector<std::string> gather_hosts() {
        std::array<char, 64> own = {};
        host_name().copy(own.data(), own.size() - 1);
        std::vector<std::string> hosts;
        for (const auto& name : gather_values(own)) hosts.emplace_back(name.data());
        return hosts;
    }
    bool are_grouped_by_machine() {
        const int here = rank_.on_this_machine;
        const bool fits = rank_.count % here == 0 && rank_.number % here == rank_.number_on_this_machine;
        const auto all = gather_values(fits ? here : 0);
        return std::ranges::all_of(all, [&](int theirs) { return theirs == here && fits; });
    }

    // Begins to move the bytes of a step: the requests are in `requests`.
    void post(std::vector<MPI_Request>& requests, std::span<const Part> send, std::span<const Part> receive,
              int tag) {
        requests.clear();
        const auto call = [&](auto function, const Part& part, int peer) {
            for (size_t first = 0; first < part.bytes; first += kMostBytes) {
                const auto bytes = static_cast<int>(std::min(part.bytes - first, kMostBytes));
                function(static_cast<char*>(part.at) + first, bytes, mpi_.byte, peer, tag, mpi_.world,
                         &requests.emplace_back());
            }
        };
        for (int peer = 0; peer < rank_.count; peer++)
            if (peer != rank_.number) call(mpi_.irecv, receive[static_cast<size_t>(peer)], peer);
        for (int peer = 0; peer < rank_.count; peer++)
            if (peer != rank_.number) call(mpi_.isend, send[static_cast<size_t>(peer)], peer);
        const auto own = static_cast<size_t>(rank_.number);
        if (send[own].bytes > 0 && send[own].at != receive[own].at)
            std::memcpy(receive[own].at, send[own].at, send[own].bytes);
    }
    bool are_complete(std::vector<MPI_Request>& requests) {
        int done = 0;
        mpi_.test_all(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE);
        return done;
    }
    // While the main thread computes, this thread must sleep: one that only yields gets a core again when the
    // other has used up its time slice, and by then the network has long been idle.
    void pause_between_calls() const {
        if (is_waited_for_)
            sched_yield();
        else
            usleep(20);
    }
    // What is done between MPI's calls: ends all ranks if the main thread asks for that, exchanges signs of
    // life, and looks for faults.
    void look_around() {
        abort_if_asked();
        if (signs_.exchange(patience_)) lose();
        look_for_fault();
    }
    // A fault ends all ranks. Several notice it, so one of a higher number speaks later, and all of them
    // after their main threads, which notice it too unless they wait for the device.
    void look_for_fault() {
        const auto now = Clock::now();
        if (now - looked_for_fault_ < SignsOfLife::kTick) return;
        looked_for_fault_ = now;
        const std::lock_guard lock(mutex_);
        const std::string fault = fault_ ? fault_() : "";
        if (fault.empty()) {
            last_without_fault_ = now;
            return;
        }
        if (now - last_without_fault_ > (1 + std::min(rank_.number, 10)) * std::chrono::milliseconds(300))
            on_lost_(*this, format("%s, %s", fault, where_text(where_)));
    }
    void abort_if_asked() {
        if (const int code = end_code_; code != kGoesOn) abort(code);
    }
    // If another thread does it already, waits until it, or the alarm, has ended this process.
    [[noreturn]] void abort(int code) {
        while (is_aborting_.exchange(true)) pause();
        mpi_.abort(mpi_.world, code);
        _exit(code);
    }
    // Ranks are lost. The first of the others says so. The rest give it time to end them, longer than its
    // alarm. If all that were lost have come back by then, they were only slow.
    void lose() {
        if (!signs_.is_first_alive())
            for (const auto until = Clock::now() + std::chrono::seconds(12); Clock::now() < until;) {
                abort_if_asked();
                signs_.exchange(patience_);
                usleep(1000);
            }
        const std::string lost = signs_.lost_ranks();
        if (lost.empty()) return;
        const std::lock_guard lock(mutex_);
        on_lost_(*this, format("no sign of life from %s for %.0f s (--advanced patience), %s", lost,
                               patience_.load(), where_text(where_)));
    }

    // MPI moves bytes only while a thread is inside one of its calls, so a worker thread makes all of them,
    // while the main thread computes or waits.
    void start_worker() {
        const SignalsBlocked blocked;
        worker_ = std::thread([this] { work(); });
    }
    void work() {
        is_worker_ = true;
        while (!ends_) {
            const Progress of_data = go_on(data_), of_control = go_on(control_);
            look_around();
            if (of_data == Progress::MovedOn || of_control == Progress::MovedOn) continue;
            if (of_data == Progress::Waits || of_control == Progress::Waits) {
                pause_between_calls();
                continue;
            }
            std::unique_lock lock(mutex_);
            changed_.wait_for(lock, SignsOfLife::kTick, [this] {
                return ends_ || !data_.exchanges.empty() || !control_.exchanges.empty();
            });
        }
        while (signs_.end(patience_)) lose();
    }
    // Goes on with a lane's first exchange: begins its next round, or ends it if all has arrived.
    enum class Progress { Idle, Waits, MovedOn };
    Progress go_on(Lane& lane) {
        Lane::Exchange* first = nullptr;
        {
            const std::lock_guard lock(mutex_);
            if (lane.exchanges.empty()) return Progress::Idle;
            first = &lane.exchanges.front();
        }
        if (lane.round < first->size()) {
            const ExchangeRound& round = (*first)[lane.round];
            if (!std::exchange(lane.is_under_way, true))
                post(lane.requests, round.send, round.receive, lane.tag);
            if (!are_complete(lane.requests)) return Progress::Waits;
            if (round.then) round.then();
            lane.is_under_way = false;
            if (++lane.round < first->size()) return Progress::MovedOn;
        }
        lane.round = 0;
        change([&] {
            if (&lane == &data_) times_[done_++ % times_.size()].ended = Clock::now();
            lane.exchanges.pop_front();
        });
        return Progress::MovedOn;
    }
    template <class Change>
    void change(Change&& change) {
        const std::lock_guard lock(mutex_);
        change();
        changed_.notify_all();
    }
    template <class Condition>
    void wait_until(Condition&& condition) {
        std::unique_lock lock(mutex_);
        is_waited_for_ = true;
        changed_.wait(lock, condition);
        is_waited_for_ = false;
    }

    Rank rank_;
    const OnLost on_lost_;
    const Mpi mpi_;
    SignsOfLife signs_;
    int printed_ = -1;  // the file that OpenMPI prints to, until the first step
    static constexpr size_t kMostBytes = size_t{1} << 30;  // of a message
    std::atomic<double> patience_ = 600;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::string where_;
    std::function<std::string()> fault_;
    Clock::time_point looked_for_fault_ = Clock::now(), last_without_fault_ = looked_for_fault_;
    // Control messages (exchange()) overtake the exchanges that start() began.
    Lane data_{0}, control_{2};
    size_t started_ = 0, done_ = 0;
    std::atomic<bool> ends_ = false;
    std::atomic<bool> is_waited_for_ = false;  // the main thread waits
    static constexpr int kGoesOn = -1;
    std::atomic<int> end_code_ = kGoesOn;    // with which the worker shall end all ranks
    std::atomic<bool> is_aborting_ = false;  // a thread ends all ranks
    static inline thread_local bool is_worker_ = false;
    struct Times {
        Clock::time_point began, ended;
    };
    std::array<Times, 256> times_ = {};  // of the latest exchanges, by their numbers
    std::thread worker_;
};

}  // namespace

std::unique_ptr<RankEngine> connect_ranks(const Rank& rank, OnLost on_lost) {
    return std::make_unique<MpiEngine>(rank, std::move(on_lost));
}

MpirunCommand mpirun_command(int count) {
    constexpr size_t kFiles = size_t{16} << 20;  // PMIx's take 4 MiB for a few ranks; MPICH's are in /dev/shm
#ifdef OPEN_MPI
    // In a container the user is root. Ranks may outnumber cores, and each takes the cores that are its
    // share.
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    return {{"mpirun.openmpi", "mpirun"},
            {"-n", std::to_string(count), "--oversubscribe", "--bind-to", "none"},
            getenv("OMPI_MCA_orte_tmpdir_base") ? 0 : kFiles,
            kFiles};
#else
    return {{"mpiexec.hydra", "mpiexec"}, {"-n", std::to_string(count)}, 0, kFiles};
#endif
}

#else

namespace {
constexpr const char* kNoMpi =
    "--devices: this build has no MPI: make deps installs it (libopenmpi-dev, openmpi-bin), then make again";
}
std::unique_ptr<RankEngine> connect_ranks(const Rank&, OnLost) { fail(kNoMpi); }
MpirunCommand mpirun_command(int) { fail(kNoMpi); }

#endif
