// threads.h - starts the CPU's threads once, at the beginning, and counts them.
//
// OpenMP may give a parallel region fewer threads than asked for (OMP_THREAD_LIMIT, OMP_DYNAMIC,
// OMP_MAX_ACTIVE_LEVELS), and oneDNN computes only a part of a product if it runs with fewer threads than the
// product was made for. So we count the threads that a region gets, and never ask for more from then on.
#pragma once

#include <malloc.h>
#include <omp.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "llmc/free_memory.h"
#include "llmc/ranks.h"
#include "llmc/signals.h"

// Stack size of OpenMP's threads. It is less than the usual 8 MiB, which would count if address space is
// limited, and more than oneDNN's deepest calls need, which crash below about 24 KiB.
constexpr size_t kStackBytes = size_t{1} << 20;

// Only on a CPU. libgomp reads its environment before main, so this sets the environment and starts the
// program a second time. By default, threads that wait for others spin for milliseconds; on a machine with
// other work that makes a step up to ten times slower. Here they sleep after some microseconds.
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
    if (!complete) execv("/proc/self/exe", argv);  // without /proc we go on with the environment as it is
#endif
}

// Fails unless `count` threads, including the caller, can run at the same time: libgomp would end the process
// if it could not start one.
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

// The number of malloc heaps: one per thread, so that a thread reuses what it freed itself. If address space
// is limited, one in all, because each heap reserves 64 MiB.
inline size_t heaps_of(size_t threads) { return limited_address_space() ? 1 : threads; }

// How much freed memory a heap keeps depends on what happened before, so large blocks are returned to the
// system at once. oneDNN's copies of operands, up to 1.5 MB, stay in the heap: with new pages for each
// product, products with 50304 summands were a fifth slower.
inline void keep_heaps_small(size_t threads) {
    mallopt(M_ARENA_MAX, static_cast<int>(heaps_of(threads)));
    mallopt(M_MMAP_THRESHOLD, 8 << 20);
    mallopt(M_TRIM_THRESHOLD, 16 << 20);
}

// A search over settings makes and discards large lists. Keeps their memory in the process, so that it is not
// taken from the system again each time; for a process that ends with the plan.
inline void keep_memory_of_lists() {
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, INT32_MAX);
    mallopt(M_TOP_PAD, 64 << 20);
}

// Starts OpenMP's threads: `asked`; if that is 0, as many as OpenMP chooses, or for one of several ranks its
// share of the cores. If OpenMP gives fewer, prints that.
// From then on, a parallel region gets omp_get_max_threads() threads. Fails if the system cannot start them.
inline void start_threads(int asked, const Rank& rank = {}) {
    omp_set_dynamic(0);
    if (asked == 0 && !rank.is_alone() && !getenv("OMP_NUM_THREADS"))
        asked = rank.own_cores(omp_get_num_procs());
    if (asked > 0) omp_set_num_threads(asked);
    const int most = std::min(omp_get_max_threads(), omp_get_thread_limit());
    keep_heaps_small(static_cast<size_t>(most));
    require_threads(most);
    require_memory_for(1 << 20, "OpenMP");
    int granted = 1;
    {
        const SignalsBlocked blocked;
#pragma omp parallel
#pragma omp single
        granted = omp_get_num_threads();
    }
    omp_set_num_threads(granted);
    if (granted < asked)
        print(stderr, "--threads %d: OpenMP grants %d (OMP_THREAD_LIMIT, OMP_MAX_ACTIVE_LEVELS)\n", asked,
              granted);
}
