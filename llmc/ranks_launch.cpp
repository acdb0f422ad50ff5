// ranks_launch.cpp - the starter, and what the ranks tell it.
#include "llmc/ranks_launch.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/signals.h"

// ---- the page

struct RunPage {
    char where[1024];
    std::atomic<pid_t> ranks[4096];  // 0: not started yet, or ended
    std::atomic<bool> any_has_begun;
    std::atomic<int> exit_code;  // of a rank that has ended by itself and not well
    // Signals that the starter was asked to send to all ranks, for ranks that begin after that.
    std::atomic<bool> stop, save;
    // How many files the ranks have noted that they share in /dev/shm, and their paths. Ranks that note at
    // the same moment may note the same file twice.
    std::atomic<unsigned> shared_files;
    char shared_file[1024][256];
};
static_assert(std::atomic<pid_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);
static RunPage* run_page = nullptr;

// Maps the page into this process. Without it run_page stays null.
static void map_run_page(int fd) {
    void* const at = mmap(nullptr, sizeof(RunPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) run_page = static_cast<RunPage*>(at);
}

// In the starter: makes the page.
static void make_run_page() {
    const int fd = memfd_create("ranks", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, sizeof(RunPage)) == 0) map_run_page(fd);
    if (!run_page) fail("--devices: no memory for the ranks to share: %s", strerror(errno));
    snprintf(run_page->where, sizeof run_page->where, "before the first step");
    setenv(kStarterVariable, format("/proc/%d/fd/%d", getpid(), fd).c_str(), 1);
}

// In a rank: its entry. It is cleared before the process ends, because another may get its number.
static std::atomic<pid_t>* own_entry = nullptr;
static void clear_own_entry() {
    if (own_entry) *own_entry = 0;
}

// In a rank: opens the page, if a starter has made one.
static void open_run_page() {
    const char* const path = getenv(kStarterVariable);
    if (run_page || !path) return;
    const OpenFile file(open(path, O_RDWR | O_CLOEXEC));
    if (file.fd() >= 0) map_run_page(file.fd());
}

// In a rank: says which process this rank is. Signals that were sent to all ranks before that reach it now.
static void tell_starter_of(const Rank& rank) {
    open_run_page();
    if (!run_page) return;
    if (rank.number >= static_cast<int>(std::size(run_page->ranks))) return;
    own_entry = &run_page->ranks[rank.number];
    before_exit = clear_own_entry;
    atexit(clear_own_entry);
    *own_entry = getpid();
    run_page->any_has_begun = true;
    if (run_page->save) raise(SIGUSR1);
    if (run_page->stop) raise(kStopRanks);
}

// In a rank, when MPI has begun and the data are not yet open: notes the files in /dev/shm that it shares
// with other processes.
static void tell_starter_shared_files() {
    if (!run_page) return;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        const std::string path = line.substr(std::min(line.find('/'), line.size()));
        const bool is_shared = line.find("s ") == line.find(' ') + 4;  // of "rw-s", for example
        if (!is_shared || !path.starts_with("/dev/shm/") || path.ends_with(" (deleted)")) continue;
        const auto noted = std::min<unsigned>(run_page->shared_files, std::size(run_page->shared_file));
        const auto is_path = [&](const char* other) { return path == other; };
        if (std::any_of(run_page->shared_file, run_page->shared_file + noted, is_path)) continue;
        const unsigned number = run_page->shared_files++;
        if (number < std::size(run_page->shared_file) && path.size() < sizeof run_page->shared_file[0])
            memcpy(run_page->shared_file[number], path.c_str(), path.size());
    }
}

// In the starter, when the ranks have ended: removes those files. OpenMPI's launcher does it too, but not
// always if it is told to end.
static void remove_shared_files() {
    for (const auto& path : run_page->shared_file)
        if (*path) unlink(path);
}

void tell_starter_where(const std::string& where) {
    if (run_page) snprintf(run_page->where, sizeof run_page->where, "%s", where.c_str());
}

// ---- what a rank tells

// Ranks write to the starter's stdout and stderr themselves, so that MPI's launcher can neither delay nor mix
// what they print, and its own messages can be told from theirs.
//
// The starter passes on Ctrl-C as kStopRanks (signals.h), because MPI's launchers end all ranks when they get
// SIGINT or SIGTERM themselves.

// The starter gives its stdout and stderr to ranks that connect to this socket, which has an abstract name.
// Their files could not be opened again if they are sockets, or of another user.
constexpr const char* kStreamsVariable = "LLMC_STREAMS";
static sockaddr_un streams_address(const std::string& name, socklen_t& length) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    return address;
}
// A message with two descriptors.
struct StreamsMessage {
    char byte = 0;
    alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
    iovec data = {&byte, 1};
    msghdr header = {};
    StreamsMessage() {
        header.msg_iov = &data, header.msg_iovlen = 1;
        header.msg_control = control, header.msg_controllen = sizeof control;
    }
};
static int listen_for_streams() {
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t length = 0;
    timespec now = {};  // containers may have processes of the same number on one network
    clock_gettime(CLOCK_MONOTONIC, &now);
    const std::string name = format("llmc-%d-%ld", getpid(), now.tv_nsec);
    setenv(kStreamsVariable, name.c_str(), 1);
    const sockaddr_un address = streams_address(name, length);
    if (listener < 0 || bind(listener, reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
        listen(listener, 4096) != 0)
        fail("--devices: no socket for the ranks: %s", strerror(errno));
    return listener;
}
// In the starter: answers a rank that has connected.
static void give_streams(int listener) {
    const int rank = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (rank < 0) return;
    ucred peer = {};
    socklen_t size = sizeof peer;
    if (getsockopt(rank, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid()) {
        StreamsMessage message;
        cmsghdr* const control = CMSG_FIRSTHDR(&message.header);
        control->cmsg_level = SOL_SOCKET, control->cmsg_type = SCM_RIGHTS;
        control->cmsg_len = CMSG_LEN(2 * sizeof(int));
        const int streams[2] = {STDOUT_FILENO, STDERR_FILENO};
        memcpy(CMSG_DATA(control), streams, sizeof streams);
        sendmsg(rank, &message.header, MSG_NOSIGNAL);
    }
    close(rank);
}
// In a rank: takes them. If that fails, they stay connected to MPI's launcher.
static void take_streams(const char* name) {
    socklen_t length = 0;
    const sockaddr_un address = streams_address(name, length);
    const int from = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    StreamsMessage message;
    if (from >= 0 && connect(from, reinterpret_cast<const sockaddr*>(&address), length) == 0 &&
        recvmsg(from, &message.header, MSG_CMSG_CLOEXEC) == 1)
        if (const cmsghdr* const control = CMSG_FIRSTHDR(&message.header);
            control && control->cmsg_type == SCM_RIGHTS && control->cmsg_len == CMSG_LEN(2 * sizeof(int))) {
            int streams[2];
            memcpy(streams, CMSG_DATA(control), sizeof streams);
            launcher_streams = {fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3),
                                fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3)};
            for (int i = 0; i < 2; i++) dup2(streams[i], STDOUT_FILENO + i), close(streams[i]);
        }
    close(from);
}

FILE* open_rank_streams(const Rank& rank) {
    if (const char* const name = getenv(kStreamsVariable)) take_streams(name);
    if (rank.is_first()) return stderr;
    FILE* const errors = fdopen(dup(STDERR_FILENO), "w");
    const int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) dup2(nowhere, fd);
    close(nowhere);
    if (!errors) return stderr;
    setvbuf(errors, nullptr, _IONBF, 0);  // what a rank says must be there when all are ended
    return errors;
}

void tell_starter_exit_code(int code) {
    clear_own_entry();
    open_run_page();
    if (!run_page) return;
    int told = run_page->exit_code;  // an error's goes before a signal's
    while ((told == 0 || (told > 128 && code < 128)) &&
           !run_page->exit_code.compare_exchange_weak(told, code))
        continue;
}

// ---- the starter's side

static volatile std::sig_atomic_t mpirun_pid = 0;                        // MPI's launcher, once it runs
static volatile std::sig_atomic_t stopped_by = 0, stopped_again_by = 0;  // signals that asked to stop

// Sends a signal to the ranks that have begun.
static void signal_ranks(int signal) {
    for (const std::atomic<pid_t>& entry : run_page->ranks)
        if (const pid_t rank = entry; rank > 0) kill(rank, signal);
}

// The first Ctrl-C or SIGTERM stops the ranks after their micro-batch, so that they can save; the second
// ends them.
static void pass_on_signal(int signal) {
    const int before = errno;
    if (mpirun_pid == 0 && signal != SIGUSR1) _exit(128 + signal);
    if (mpirun_pid > 0 && signal == SIGUSR1) {
        run_page->save = true;
        signal_ranks(SIGUSR1);
    } else if (mpirun_pid > 0 && !stopped_by) {
        stopped_by = signal;
        run_page->stop = true;
        signal_ranks(kStopRanks);
    } else if (mpirun_pid > 0) {
        stopped_again_by = signal;
        kill(mpirun_pid, SIGTERM);
    }
    errno = before;
}

struct EndedRank {
    int rank = -1;                  // -1: one of them
    int signal = 0, exit_code = 0;  // one of the two is 0
};
// The rank that a signal has ended, in the words of OpenMPI's launcher ("rank 2 with PID 0 on node a exited
// on signal 9"). MPICH's names no rank: it says "EXIT STRING: Killed (signal 9)", or "EXIT CODE: 1" of a
// rank that has ended by itself.
static std::optional<EndedRank> ended_rank(const std::string& said) {
    EndedRank ended;
    if (const size_t at = said.find("exited on signal"); at != said.npos) {
        if (const size_t name = said.rfind("rank ", at); name != said.npos)
            sscanf(said.c_str() + name, "rank %d", &ended.rank);
        sscanf(said.c_str() + at, "exited on signal %d", &ended.signal);
        return ended;
    }
    if (const size_t text = said.find("EXIT STRING: "); text != said.npos) {
        const size_t at = said.find("(signal ", text);
        if (at != said.npos && sscanf(said.c_str() + at, "(signal %d)", &ended.signal) == 1) return ended;
    }
    const size_t at = said.find("EXIT CODE: ");
    if (at == said.npos || sscanf(said.c_str() + at, "EXIT CODE: %d", &ended.exit_code) != 1)
        return std::nullopt;
    return ended;
}

// " in step 3; the last save: out/step-2", where that is known.
static std::string where_it_was() { return *run_page->where ? std::string(" ") + run_page->where : ""; }
static std::string ended_by(int signal) {
    return format("was ended by signal %d (%s)%s", signal, strsignal(signal), where_it_was());
}

// The first paragraph of what MPI's launcher said, in one line. Rules of dashes, and lines about errors
// inside OpenMPI ("ORTE_ERROR_LOG: ...", "PMIX ERROR: ..."), are no paragraphs unless there is nothing else.
static std::string first_paragraph(const std::string& said) {
    std::string paragraph, internal, line;
    for (std::istringstream lines(said); std::getline(lines, line);) {
        const bool is_blank = line.find_first_not_of("- \t") == line.npos;
        const bool is_internal = line.find("ERROR") != line.npos;
        if (is_internal && internal.empty()) internal = line;
        if ((is_blank || is_internal) && !paragraph.empty()) break;
        if (is_blank || is_internal) continue;
        if (!paragraph.empty()) paragraph += " ";
        paragraph += line.substr(line.find_first_not_of(" \t"));
    }
    return paragraph.empty() ? internal : paragraph;
}

// What MPICH's ranks say if MPI cannot begin: a stack of "function(line)....: text", whose last line is the
// cause. Empty if they have not said this.
static std::string cause_in_error_stack(const std::string& said) {
    const size_t stack = said.find("error stack:");
    if (stack == said.npos) return "";
    std::istringstream lines(said.substr(stack));
    std::string line, cause;
    std::getline(lines, line);
    while (std::getline(lines, line)) {
        const size_t dots = line.find("..:");
        if (dots == line.npos) continue;
        if (const size_t text = line.find_first_not_of(' ', dots + 3); text != line.npos)
            cause = line.substr(text);
    }
    return cause;
}

// What MPI's launcher, which ended with this exit code, said about a rank that ended without a message of its
// own, in one line.
static std::string why_ranks_ended(const std::string& said, int code) {
    if (const std::string cause = cause_in_error_stack(said); !cause.empty())
        return "MPI does not start: " + cause + remark_on_shared_memory();
    const std::optional<EndedRank> ended = ended_rank(said);
    if (!ended) {
        const std::string paragraph = first_paragraph(said);
        if (!paragraph.empty()) return "MPI's launcher: " + paragraph;
        return format("the ranks ended with exit code %d and without saying why", code);
    }
    const std::string who = ended->rank < 0 ? "a rank" : format("rank %d", ended->rank);
    const std::string how = ended->signal
                                ? ended_by(ended->signal)
                                : format("ended with exit code %d", ended->exit_code) + where_it_was();
    return format("%s (host %s) %s", who, host_name(), how);
}

// In the child process: becomes MPI's launcher, which starts this program again as the ranks.
[[noreturn]] static void become_mpirun(const MpirunCommand& command, int output, char** argv) {
    setpgid(0, 0);  // Ctrl-C reaches the starter alone, which passes it on
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    const int nothing = open("/dev/null", O_RDONLY);
    dup2(nothing, STDIN_FILENO);  // the rest of the user's input is not for the ranks
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
    std::array<char, 4096> program{};
    const bool known = readlink("/proc/self/exe", program.data(), program.size() - 1) > 0;
    for (const std::string& name : command.names) {
        std::vector<const char*> words = {name.c_str()};
        for (const std::string& word : command.arguments) words.push_back(word.c_str());
        words.push_back(known ? program.data() : argv[0]);
        for (char** word = argv + 1; *word; word++) words.push_back(*word);
        words.push_back(nullptr);
        execvp(name.c_str(), const_cast<char**>(words.data()));
    }
    _exit(127);
}

// True if this process runs; a zombie does not.
static bool is_running(pid_t process) {
    std::ifstream file(format("/proc/%d/stat", process));
    std::string stat;
    std::getline(file, stat);
    const size_t name_ends = stat.rfind(')');  // "PID (NAME) STATE ..."
    return name_ends != stat.npos && name_ends + 2 < stat.size() && !strchr("ZX", stat[name_ends + 2]);
}

// What the page says of the ranks that have begun.
struct RanksNow {
    bool any_runs = false;
    std::optional<int> lost = {};  // a rank that is gone, but has not cleared its entry as at a normal end
};
static RanksNow ranks_now() {
    RanksNow now;
    for (size_t r = 0; r < std::size(run_page->ranks); r++)
        if (const pid_t rank = run_page->ranks[r]; rank > 0) {
            if (is_running(rank))
                now.any_runs = true;
            else if (!now.lost)
                now.lost = static_cast<int>(r);
        }
    return now;
}

// How MPI's launcher has ended.
struct MpirunEnd {
    std::string said;              // what it printed
    int status = 0;                // as waitpid() gives it
    bool was_stuck = false;        // the starter had to end it
    std::optional<int> lost = {};  // a rank that was lost by then
};

// Waits until MPI's launcher has ended. If it has not ended 15 seconds after a rank was lost, or after all
// have ended, the starter kills it and the ranks that are left: OpenMPI 4.1's launcher sometimes deadlocks
// when a rank is killed while it starts.
static MpirunEnd wait_for_mpirun(int output, int listener) {
    MpirunEnd end;
    char buffer[4096];
    for (int seconds_over = 0; !end.was_stuck;) {
        pollfd readable[] = {{output, POLLIN, 0}, {listener, POLLIN, 0}};
        if (const int ready = poll(readable, 2, 1000); ready > 0) {
            if (readable[1].revents) give_streams(listener);
            if (!readable[0].revents) continue;
            const ssize_t n = read(output, buffer, sizeof buffer);
            if (n == 0) break;
            if (n > 0) end.said.append(buffer, static_cast<size_t>(n));
            constexpr size_t kMostKept = 65536;  // the latest: the launcher's own words come last
            if (end.said.size() > kMostKept) end.said.erase(0, end.said.size() - kMostKept);
        } else if (ready == 0) {
            const RanksNow now = ranks_now();
            const bool have_all_ended = run_page->any_has_begun && !now.any_runs;
            const bool is_over = now.lost || have_all_ended || ended_rank(end.said);
            seconds_over = is_over ? seconds_over + 1 : 0;
            end.was_stuck = seconds_over == 15;
            end.lost = now.lost;
        }
    }
    if (end.was_stuck) {
        signal_ranks(SIGKILL);
        kill(mpirun_pid, SIGKILL);
    }
    while (waitpid(mpirun_pid, &end.status, 0) < 0 && errno == EINTR) continue;
    return end;
}

// The exit code of a run whose launcher has ended like this. Fails if a rank ended without a message.
static int exit_code_of_ranks(const MpirunEnd& end, int count, const std::string& mpirun) {
    // A second signal decides; then the error of a rank; then the first signal; then how mpirun ended.
    if (stopped_again_by) return 128 + stopped_again_by;
    if (const int code = run_page->exit_code; code && !(stopped_by && code > 128)) return code;
    if (end.was_stuck && !ended_rank(end.said)) {  // the starter has ended it, so its status tells nothing
        if (end.lost)
            fail("--devices %d: rank %d (host %s) ended without a word%s", count, *end.lost, host_name(),
                 where_it_was());
        return stopped_by ? 128 + stopped_by : 0;
    }
    const int code = WIFSIGNALED(end.status) ? 128 + WTERMSIG(end.status) : WEXITSTATUS(end.status);
    if (stopped_by && code) return 128 + stopped_by;
    if (WIFSIGNALED(end.status) && !end.was_stuck)
        fail("--devices %d: MPI's launcher %s", count, ended_by(WTERMSIG(end.status)));
    if (code == 127 && end.said.empty())
        fail("--devices %d: there is no %s: make deps installs it (openmpi-bin)", count, mpirun);
    if (code) fail("--devices %d: %s", count, why_ranks_ended(end.said, code));
    return 0;
}

// Fails if MPI has no room for its files, or may not write them: it would not say so in one line.
static void check_files_of_mpi(const MpirunCommand& command, int count) {
    if (file_size_limit() < command.largest_file)
        fail("--devices %d: MPI's files take up to %s, and ulimit -f allows %lu bytes", count,
             size_text(command.largest_file), file_size_limit());
    if (command.temporary_bytes == 0) return;
    const char* const named = getenv("TMPDIR");
    const std::string folder = named && *named ? named : "/tmp";
    const std::optional<size_t> free = free_disk_bytes(folder);
    if (!free)
        fail("--devices %d: MPI's launcher has no folder for its files: %s: %s (TMPDIR names another one)",
             count, folder, strerror(errno));
    if (*free < command.temporary_bytes)
        fail("--devices %d: MPI's launcher needs %s in %s, and %s are free (TMPDIR names another folder)",
             count, size_text(command.temporary_bytes), folder, size_text(*free));
}

int launch_ranks(int count, char** argv) {
    const MpirunCommand command = mpirun_command(count);
    check_files_of_mpi(command, count);
    make_run_page();
    int output[2];
    if (pipe2(output, O_CLOEXEC) != 0) fail("--devices: no pipe: %s", strerror(errno));
    const int listener = listen_for_streams();
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) handle_signal(signal, pass_on_signal);
    const pid_t child = fork();
    if (child < 0) fail("--devices: no process: %s", strerror(errno));
    if (child == 0) become_mpirun(command, output[1], argv);
    close(output[1]);
    mpirun_pid = child;
    const MpirunEnd end = wait_for_mpirun(output[0], listener);
    remove_shared_files();
    return exit_code_of_ranks(end, count, command.names.back());
}

std::unique_ptr<RankEngine> begin_rank(const Rank& rank, FILE* errors) {
    tell_starter_of(rank);
    auto engine = connect_ranks(rank, [&rank, errors](RankEngine& lost_by, const std::string& line) {
        print(errors, "train: %s\n", (rank.is_first() ? line : rank.text() + ": " + line));
        tell_starter_exit_code(2);
        lost_by.end_all(2);
        _exit(2);
    });
    tell_starter_shared_files();
    return engine;
}
