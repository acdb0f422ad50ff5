// signals.h - what signals ask of a run. Some ask it to stop: they are heard between micro-batches and
// tokens, so that it can save. SIGUSR1 asks it to save and go on.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

inline volatile std::sig_atomic_t interrupted = 0;  // the signal that asked the run to stop
inline volatile std::sig_atomic_t asked_to_save = 0;
inline const char* when_interrupted = "";
inline const char* when_asked_to_save = "";

// Writes a line to stderr, in a signal handler.
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

// Handles a signal, unless it was to be ignored when the program began (nohup): then it still is.
inline void handle_signal(int signal, void (*handler)(int)) {
    if (std::signal(signal, handler) == SIG_IGN) std::signal(signal, SIG_IGN);
}

// For the whole program: a write beyond ulimit -f fails like any other write, instead of killing the process,
// and a scheduler's warning (SIGUSR1) waits until there is something to save.
inline void prepare_signals() {
    std::signal(SIGXFSZ, SIG_IGN);
    handle_signal(SIGUSR1, on_save_request);
}

// From here on signals stop the run after the current micro-batch or token: Ctrl-C, that of a scheduler whose
// time is up, of a terminal that closed, of a reader of the output that is gone.
inline void stop_on_signals(bool saves) {
    when_interrupted = saves ? "stopping after this micro-batch; Ctrl-C again: at once, without saving\n"
                             : "stopping after this micro-batch; Ctrl-C again: at once\n";
    when_asked_to_save = saves ? "" : "SIGUSR1 asks for a save, and there is no --out: going on without\n";
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) handle_signal(signal, on_interrupt);
}
