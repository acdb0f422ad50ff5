// threads.h - the CPU's threads: counted once, at the start, and there from then on.
//
// OpenMP may grant a parallel region fewer threads than asked for (OMP_THREAD_LIMIT, OMP_DYNAMIC,
// OMP_MAX_ACTIVE_LEVELS), and oneDNN computes a part of a product where it runs on fewer than it was made
// for. So what a region gets is counted, and from then on nobody asks for more.
#pragma once

#include <malloc.h>
#include <omp.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "llmc/room.h"

// Stacks of OpenMP's threads: less than the usual 8 MiB, which count where address space is limited, and more
// than oneDNN's deepest calls need, which crash below some 24 KiB.
constexpr size_t kStackBytes = size_t{1} << 20;

// On a CPU. libgomp reads its environment before main: what it is to find there is set, and the program
// started a second time. By its default, threads that wait for others spin for milliseconds, which on a
// machine with other work makes a step up to ten times slower; after some microseconds they had better sleep.
inline void set_openmp_environment([[maybe_unused]] char** argv) {
#ifndef SIMT_GPU
    bool complete = true;
    const auto set = [&](const char* name, const std::string& value) {
        const char* const now = getenv(name);
        if (now && value == now) return;
        setenv(name, value.c_str(), 1);
        complete = false;
    };
    if (!getenv("GOMP_SPINCOUNT") && !getenv("OMP_WAIT_POLICY")) set("GOMP_SPINCOUNT", "10000");
    set("OMP_STACKSIZE", format("%zuK", kStackBytes >> 10));
    if (!complete) execv("/proc/self/exe", argv);  // where there is no /proc, we go on as we are
#endif
}

// Fails unless `count` threads can be there at once, the caller among them: libgomp ends the process where it
// gets none.
inline void require_threads(int count) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&gate);
    const auto wait = [](void* at) -> void* {
        pthread_mutex_lock(static_cast<pthread_mutex_t*>(at));
        pthread_mutex_unlock(static_cast<pthread_mutex_t*>(at));
        return nullptr;
    };
    std::vector<pthread_t> threads;
    threads.reserve(static_cast<size_t>(count));
    int error = 0;
    while (error == 0 && static_cast<int>(threads.size()) < count - 1) {
        pthread_t thread;
        error = pthread_create(&thread, &attributes, wait, &gate);
        if (error == 0) threads.push_back(thread);
    }
    pthread_mutex_unlock(&gate);
    for (pthread_t thread : threads) pthread_join(thread, nullptr);
    pthread_attr_destroy(&attributes);
    if (error)
        fail("of %d threads only %zu can start (%s): --threads %zu, or a larger ulimit -v or -u", count,
             threads.size() + 1, strerror(error), threads.size() + 1);
}

// The number of heaps: one a thread, so that what a thread frees is what it allocates next. Where address
// space is limited there is one in all, as each reserves 64 MiB.
inline size_t heaps_of(size_t threads) { return limited_address_space() ? 1 : threads; }

// What a heap keeps of freed memory depends on what happened before, so large blocks are returned to the
// system at once. oneDNN's copies of operands, up to 1.5 MB, stay in the heap: new pages for each product
// made products of 50304 summands a fifth slower.
inline void keep_heaps_small(size_t threads) {
    mallopt(M_ARENA_MAX, static_cast<int>(heaps_of(threads)));
    mallopt(M_MMAP_THRESHOLD, 8 << 20);
    mallopt(M_TRIM_THRESHOLD, 16 << 20);
}

// Starts OpenMP's threads: as many as asked for, of 0 as many as OpenMP takes by itself, and fewer where it
// grants fewer, which is said. From then on omp_get_max_threads() is what a parallel region gets. Fails where
// the system does not let them start.
inline void start_threads(int asked) {
    omp_set_dynamic(0);
    if (asked > 0) omp_set_num_threads(asked);
    const int most = std::min(omp_get_max_threads(), omp_get_thread_limit());
    keep_heaps_small(static_cast<size_t>(most));
    require_threads(most);
    require_room(1 << 20, "OpenMP");
    int granted = 1;
#pragma omp parallel
#pragma omp single
    granted = omp_get_num_threads();
    omp_set_num_threads(granted);
    if (granted < asked)
        fprintf(stderr, "--threads %d: OpenMP grants %d (OMP_THREAD_LIMIT, OMP_MAX_ACTIVE_LEVELS)\n", asked,
                granted);
}
