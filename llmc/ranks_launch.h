// ranks_launch.h - starts the ranks of --devices on this machine with MPI's launcher, waits for them, and
// makes the program that a user started behave as one process: signals reach all ranks, the first rank's
// output is its output, and if a rank fails, the user sees one line and one exit code.
#pragma once

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/ranks.h"
#include "llmc/ranks_page.h"
#include "llmc/signals.h"

// Ranks write to the launching process's stdout and stderr themselves, so that MPI's launcher can neither
// delay nor mix what they print, and its own messages can be told from theirs.
//
// The launching process passes on Ctrl-C as kStopRanks (signals.h), because MPI's launchers end all ranks
// when they get SIGINT or SIGTERM themselves.

// The signal by which a rank tells the launching process its exit code.
constexpr int kRankEnds = SIGUSR2;

// In a rank: connects stdout and stderr to those of the launching process, if there is one. Only the first
// rank prints; of the others only errors are shown, which go to the stream that this returns.
inline FILE* open_rank_streams(const Rank& rank) {
    if (const char* const parent = getenv(kParentVariable))
        for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
            const std::string path = format("/proc/%s/fd/%d", parent, fd);
            const int opened = open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
            if (opened < 0) continue;  // it stays connected to MPI's launcher, which passes it on
            dup2(opened, fd);
            close(opened);
        }
    if (rank.is_first()) return stderr;
    FILE* const errors = fdopen(dup(STDERR_FILENO), "w");
    const int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) dup2(nowhere, fd);
    close(nowhere);
    if (!errors) return stderr;
    setvbuf(errors, nullptr, _IONBF, 0);  // what a rank says must be there when all are ended
    return errors;
}

// In a rank that ends by itself and not well: tells the launching process its exit code, which MPI's
// launchers do not pass on reliably. From then on it gets no signals from that process.
inline void tell_parent(int code) {
    clear_own_entry();
    if (const auto parent = number_in_environment(kParentVariable)) {
        sigval value{};
        value.sival_int = code;
        sigqueue(*parent, kRankEnds, value);
    }
}

inline volatile std::sig_atomic_t mpirun_pid = 0;      // MPI's launcher, once it runs
inline volatile std::sig_atomic_t rank_exit_code = 0;  // that a rank has told; of several, an error's

inline void on_exit_code(int, siginfo_t* info, void*) {
    if (info->si_code != SI_QUEUE) return;
    const int code = info->si_value.sival_int;
    if (rank_exit_code == 0 || (rank_exit_code > 128 && code < 128)) rank_exit_code = code;
}

inline volatile std::sig_atomic_t stopped_by = 0, stopped_again_by = 0;  // signals that asked to stop

// Sends kStopRanks or SIGUSR1 to the ranks that have begun; the others see on the page that it was sent.
// Without a page it goes to MPI's launcher, from which OpenMPI's ranks get it.
inline void signal_ranks(int signal) {
    if (!run_page) {
        kill(mpirun_pid, signal);
        return;
    }
    (signal == kStopRanks ? run_page->stop : run_page->save) = true;
    for (const std::atomic<pid_t>& entry : run_page->ranks)
        if (const pid_t rank = entry; rank > 0) kill(rank, signal);
}

// The first Ctrl-C or SIGTERM stops the ranks after their micro-batch, so that they can save; the second
// ends them.
inline void pass_on_signal(int signal) {
    const int before = errno;
    if (mpirun_pid == 0 && signal != SIGUSR1) _exit(128 + signal);
    if (mpirun_pid > 0 && signal == SIGUSR1) {
        signal_ranks(SIGUSR1);
    } else if (mpirun_pid > 0 && !stopped_by) {
        stopped_by = signal;
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
// on signal 9"). MPICH's names no rank ("... EXIT STRING: Killed (signal 9)"), and the exit code of one that
// has ended by itself ("EXIT CODE: 1").
inline std::optional<EndedRank> ended_rank(const std::string& said) {
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

// What MPI's launcher, which ended with this exit code, said about a rank that ended without a message of its
// own, in one line.
inline std::string why_ranks_ended(const std::string& said, int code) {
    const std::optional<EndedRank> ended = ended_rank(said);
    if (!ended) {
        for (size_t begin = 0; begin < said.size();) {
            const size_t end = std::min(said.find('\n', begin), said.size());
            const std::string line = said.substr(begin, end - begin);
            if (line.find_first_not_of("- \t") != line.npos) return "MPI's launcher: " + line;
            begin = end + 1;
        }
        return format("the ranks ended with exit code %d and without saying why", code);
    }
    const std::string where = run_page ? run_page->where : "";
    const std::string who = ended->rank < 0 ? "a rank" : format("rank %d", ended->rank);
    const std::string how =
        ended->signal ? format("was ended by signal %d (%s)", ended->signal, strsignal(ended->signal))
                      : format("ended with exit code %d", ended->exit_code);
    return format("%s (host %s) %s%s%s", who.c_str(), host_name().c_str(), how.c_str(),
                  where.empty() ? "" : " ", where.c_str());
}

// In the child process: becomes MPI's launcher, which starts this program again as the ranks.
[[noreturn]] inline void become_launcher(const RankLauncher& launcher, int output, char** argv) {
    setpgid(0, 0);  // Ctrl-C reaches the launching process alone, which passes it on
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    const int nothing = open("/dev/null", O_RDONLY);
    dup2(nothing, STDIN_FILENO);  // the rest of the user's input is not for the ranks
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
    std::array<char, 4096> program{};
    const bool known = readlink("/proc/self/exe", program.data(), program.size() - 1) > 0;
    for (const std::string& name : launcher.names) {
        std::vector<const char*> words = {name.c_str()};
        for (const std::string& word : launcher.arguments) words.push_back(word.c_str());
        words.push_back(known ? program.data() : argv[0]);
        for (char** word = argv + 1; *word; word++) words.push_back(*word);
        words.push_back(nullptr);
        execvp(name.c_str(), const_cast<char**>(words.data()));
    }
    _exit(127);
}

// From here on, signals go to the ranks, and a rank can tell its exit code.
inline void handle_launcher_signals() {
    struct sigaction action = {};
    action.sa_flags = SA_RESTART | SA_SIGINFO;
    action.sa_sigaction = on_exit_code;
    sigaction(kRankEnds, &action, nullptr);
    action.sa_flags = SA_RESTART;
    action.sa_handler = pass_on_signal;
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
        struct sigaction before = {};
        sigaction(signal, &action, &before);
        if (before.sa_handler == SIG_IGN) sigaction(signal, &before, nullptr);
    }
}

// Starts `count` ranks of this program with the same arguments, and returns its exit code when all have
// ended. Fails if they cannot be started, or if one of them ended without a message.
inline int launch_ranks(int count, char** argv) {
    const RankLauncher launcher = rank_launcher(count);
    setenv(kParentVariable, std::to_string(getpid()).c_str(), 1);
    make_run_page();
    int output[2];
    if (pipe2(output, O_CLOEXEC) != 0) fail("--devices: no pipe: %s", strerror(errno));
    handle_launcher_signals();
    const pid_t child = fork();
    if (child < 0) fail("--devices: no process: %s", strerror(errno));
    if (child == 0) become_launcher(launcher, output[1], argv);
    close(output[1]);
    mpirun_pid = child;
    std::string said;
    char buffer[4096];
    for (ssize_t n; (n = read(output[0], buffer, sizeof buffer)) > 0 || (n < 0 && errno == EINTR);)
        if (n > 0 && said.size() < 65536) said.append(buffer, static_cast<size_t>(n));
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    remove_shared_files();
    // The ranks' output went to the same files, beyond where this process's own would go on.
    for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) lseek(fd, 0, SEEK_END);
    if (stopped_again_by) return 128 + stopped_again_by;
    if (rank_exit_code && !(stopped_by && rank_exit_code > 128)) return rank_exit_code;
    const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    if (stopped_by && code) return 128 + stopped_by;
    if (code == 127 && said.empty())
        fail("--devices %d: there is no %s: make deps installs it (openmpi-bin)", count,
             launcher.names.back().c_str());
    if (code) fail("--devices %d: %s", count, why_ranks_ended(said, code).c_str());
    return 0;
}
