// ranks_page.h - a page of memory that the process of --devices shares with the ranks that it starts
// (ranks_launch.h). They write there which process is which rank, and where the run is. If a rank ends
// without a word, the launching process says from that what was lost.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string>

#include "llmc/error.h"
#include "llmc/ranks.h"
#include "llmc/signals.h"

struct RunPage {
    char where[1024];
    std::atomic<pid_t> ranks[4096];  // 0: not begun, or at its end
    // Signals that the launching process was asked to send to all ranks, for ranks that begin after that.
    std::atomic<bool> stop, save;
};
static_assert(std::atomic<pid_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);
constexpr const char* kPageVariable = "LLMC_PAGE";
inline RunPage* run_page = nullptr;

// In the launching process: makes the page. Without it, messages say less.
inline void make_run_page() {
    const int fd = memfd_create("ranks", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, sizeof(RunPage)) != 0) return;
    void* const at = mmap(nullptr, sizeof(RunPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return;
    run_page = static_cast<RunPage*>(at);
    setenv(kPageVariable, format("/proc/%d/fd/%d", getpid(), fd).c_str(), 1);
}
// In a rank: its entry. It is cleared before the process ends, because another may get its number.
inline std::atomic<pid_t>* own_entry = nullptr;
inline void clear_own_entry() {
    if (own_entry) *own_entry = 0;
}
// In a rank: opens the page, and says which process this rank is. Signals that were sent to all ranks before
// that reach it now.
inline void tell_launcher_of(const Rank& rank) {
    const char* const path = getenv(kPageVariable);
    const int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void* const at = mmap(nullptr, sizeof(RunPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) return;
    run_page = static_cast<RunPage*>(at);
    if (rank.number >= static_cast<int>(std::size(run_page->ranks))) return;
    own_entry = &run_page->ranks[rank.number];
    before_exit = clear_own_entry;
    atexit(clear_own_entry);
    *own_entry = getpid();
    if (run_page->save) raise(SIGUSR1);
    if (run_page->stop) raise(kStopRanks);
}
// In the first rank: says where the run is.
inline void tell_launcher(const std::string& where) {
    if (run_page) snprintf(run_page->where, sizeof run_page->where, "%s", where.c_str());
}
