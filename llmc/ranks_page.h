// ranks_page.h - a page of memory that the process of --devices shares with the ranks that it starts
// (ranks_launch.h). They write there which process is which rank, and where the run is. If a rank ends
// without a word, the launching process says from that what was lost.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string>

#include "llmc/error.h"
#include "llmc/ranks.h"

struct RunPage {
    char where[1024];
    pid_t ranks[4096];
};
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
// In a rank: opens the page, and says which process this rank is.
inline void tell_launcher_of(const Rank& rank) {
    const char* const path = getenv(kPageVariable);
    const int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void* const at = mmap(nullptr, sizeof(RunPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) return;
    run_page = static_cast<RunPage*>(at);
    if (rank.number < static_cast<int>(std::size(run_page->ranks))) run_page->ranks[rank.number] = getpid();
}
// In the first rank: says where the run is.
inline void tell_launcher(const std::string& where) {
    if (run_page) snprintf(run_page->where, sizeof run_page->where, "%s", where.c_str());
}
