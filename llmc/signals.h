// signals.h - signal handling. Some signals ask the run to stop; it checks for them between micro-batches and
// tokens, so that it can save first. SIGUSR1 asks it to save and go on.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

// Set for the ranks of --devices: the file of the memory that they share with the process that started them
// (ranks_launch.h).
constexpr const char* kStarterVariable = "LLMC_PAGE";
// The signal by which that process asks its ranks to stop.
constexpr int kStopRanks = SIGUSR2;

inline volatile std::sig_atomic_t interrupted = 0;  // the signal that asked the run to stop
inline volatile std::sig_atomic_t asked_to_save = 0;
inline const char* when_interrupted = "";
inline const char* when_asked_to_save = "";

// For signal handlers: ends the process at once, after before_exit, if that is set.
inline void (*before_exit)() = nullptr;
[[noreturn]] inline void exit_at_once(int code) {
    if (before_exit) before_exit();
    _exit(code);
}

// Writes a line to stderr; safe in a signal handler.
inline void tell(const char* line) {
    [[maybe_unused]] const ssize_t told = write(STDERR_FILENO, line, strlen(line));
}

inline void on_interrupt(int signal) {
    const int before = errno;
    if (signal == SIGINT) std::signal(SIGINT, SIG_DFL);  // a second Ctrl-C stops at once
    if (!interrupted) {
        interrupted = signal;
        tell(when_interrupted);
    }
    errno = before;
}

inline void on_save_request(int) {
    const int before = errno;
    asked_to_save = 1;
    tell(when_asked_to_save);
    errno = before;
}

// While oneDNN computes a product in fp32, the stack pointer may point into heap memory. Linux would
// overwrite that memory when it calls a handler, so handlers have a stack of their own. It belongs to the
// thread that calls this, the main one; the others start while SignalsBlocked lives. Call it before
// handle_signal().
inline void give_handlers_a_stack() {
    alignas(64) static char memory[64 << 10];
    stack_t stack = {};
    stack.ss_sp = memory;
    stack.ss_size = sizeof memory;
    sigaltstack(&stack, nullptr);
}
// While this lives, no signal reaches the calling thread. Threads that start meanwhile never get any: only
// the main thread handles signals.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    // The signals that were blocked before.
    const sigset_t& before() const { return before_; }

  private:
    sigset_t before_;
};

// Sets a signal's handler, unless the signal was ignored when the program started (nohup): then it stays
// ignored.
inline void handle_signal(int signal, struct sigaction action) {
    struct sigaction before = {};
    action.sa_flags |= SA_ONSTACK;
    sigaction(signal, &action, &before);
    if (before.sa_handler == SIG_IGN) sigaction(signal, &before, nullptr);
}
inline void handle_signal(int signal, void (*handler)(int)) {
    struct sigaction action = {};
    action.sa_flags = SA_RESTART;
    action.sa_handler = handler;
    handle_signal(signal, action);
}

// In a conversation: whether an answer is being written, and whether Ctrl-C has asked to stop it.
inline volatile std::sig_atomic_t is_answering = 0, stop_answer = 0;

// Waits until standard input has something to read, or has ended. Returns false if a signal has asked to
// stop, also one that came before this call.
inline bool wait_for_input() {
    const SignalsBlocked blocked;  // except while ppoll() waits
    pollfd input = {STDIN_FILENO, POLLIN, 0};
    while (!interrupted && ppoll(&input, 1, nullptr, &blocked.before()) < 0 && errno == EINTR) continue;
    return !interrupted;
}

// From here on, Ctrl-C stops an answer; where none is written, it stops the run, as other signals do. A
// signal that stops the run also ends wait_for_input().
inline void signals_of_conversation() {
    when_interrupted = "";
    for (const int signal : {SIGINT, SIGTERM, SIGHUP})
        handle_signal(signal, [](int number) {
            if (is_answering && number == SIGINT)
                stop_answer = 1;
            else
                interrupted = number;
        });
}

// For the whole program: a write beyond ulimit -f fails like any other write instead of killing the process,
// and SIGUSR1, with which schedulers warn, is remembered until there is something to save. Until then,
// kStopRanks ends a rank at once.
inline void prepare_signals() {
    give_handlers_a_stack();
    std::signal(SIGXFSZ, SIG_IGN);
    handle_signal(SIGUSR1, on_save_request);
    if (getenv(kStarterVariable)) handle_signal(kStopRanks, [](int) { exit_at_once(128 + SIGINT); });
}

// From here on, signals stop the run after the current micro-batch or token: from Ctrl-C, a scheduler whose
// time limit is reached, a terminal that closes, or a pipe whose reader is gone.
inline void stop_on_signals(bool saves) {
    when_interrupted = saves ? "stopping after this micro-batch; Ctrl-C again: at once, without saving\n"
                             : "stopping after this micro-batch; Ctrl-C again: at once\n";
    when_asked_to_save = saves ? "" : "SIGUSR1 asks for a save, and there is no --out: going on without\n";
    if (!getenv(kStarterVariable)) {
        for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) handle_signal(signal, on_interrupt);
        return;
    }
    // A rank that --devices started is asked to stop by another signal. Those that somebody sends to this
    // rank alone stop all ranks too; but from MPI's launcher they mean that another rank has died, and end
    // this one at once.
    handle_signal(SIGPIPE, on_interrupt);
    handle_signal(kStopRanks, [](int) { on_interrupt(SIGINT); });
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
        struct sigaction action = {};
        action.sa_flags = SA_RESTART | SA_SIGINFO;
        action.sa_sigaction = [](int number, siginfo_t* info, void*) {
            if (info->si_pid == getppid()) exit_at_once(128 + number);
            on_interrupt(number);
        };
        handle_signal(signal, action);
    }
}
