// ranks_page.h - a page of memory that the process of --devices shares with the ranks that it starts
// (ranks_launch.h). They write there which process is which rank, where the run is, and which files MPI has
// in /dev/shm. If a rank ends without a word, the launching process says from that what was lost.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
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
    std::atomic<unsigned> shared_files;  // how many of these there are, with some more than once
    char shared_file[1024][256];
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
// In a rank, when MPI has begun and the data are not yet open: notes the files in /dev/shm that it shares
// with other processes.
inline void tell_launcher_shared_files() {
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
// In the launching process, when the ranks have ended: removes those files. OpenMPI's launcher does it too,
// but not always if it is told to end.
inline void remove_shared_files() {
    if (!run_page) return;
    for (const auto& path : run_page->shared_file)
        if (*path) unlink(path);
}
// In the first rank: says where the run is.
inline void tell_launcher(const std::string& where) {
    if (run_page) snprintf(run_page->where, sizeof run_page->where, "%s", where.c_str());
}
