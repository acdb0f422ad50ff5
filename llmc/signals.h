// signals.h - the signals that ask a run to stop: heard between micro-batches and tokens, so that it can
// save.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

inline volatile std::sig_atomic_t interrupted = 0;  // the signal that asked the run to stop
inline const char* when_interrupted = "";

inline void on_interrupt(int signal) {
    const int before = errno;
    if (signal == SIGINT) std::signal(SIGINT, SIG_DFL);  // a second Ctrl-C stops at once
    if (!interrupted) {
        interrupted = signal;
        [[maybe_unused]] const ssize_t told =
            write(STDERR_FILENO, when_interrupted, strlen(when_interrupted));
    }
    errno = before;
}

// Has signals stop the run after the micro-batch or token at hand: Ctrl-C, that of a scheduler whose time is
// up, of a terminal that closed, of a reader of the output that is gone. One that was to be ignored
// (nohup) still is.
inline void stop_on_signals(bool saves) {
    when_interrupted = saves ? "stopping after this micro-batch; Ctrl-C again: at once, without saving\n"
                             : "stopping after this micro-batch; Ctrl-C again: at once\n";
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE})
        if (std::signal(signal, on_interrupt) == SIG_IGN) std::signal(signal, SIG_IGN);
}
