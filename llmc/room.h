// room.h - checks that the process may allocate more memory, before calls that would crash without it.
#pragma once

#include <sys/mman.h>
#include <sys/resource.h>

#include "llmc/error.h"

inline bool limited_address_space() {
    rlimit limit{};
    return getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
}

// Fails unless `bytes` more bytes can be mapped now. It notices a limit (ulimit -v), but not that physical
// memory is used up. `what`: what needs them, for the message.
inline void require_room(size_t bytes, const char* what) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p != MAP_FAILED) {
        munmap(p, bytes);
        return;
    }
    rlimit limit{};
    getrlimit(RLIMIT_AS, &limit);
    const std::string said =
        limit.rlim_cur == RLIM_INFINITY
            ? "and the system refuses"
            : format("beyond ulimit -v %llu", static_cast<unsigned long long>(limit.rlim_cur >> 10));
    fail("out of memory: %s takes up to %s more, %s", what, size_text(bytes).c_str(), said.c_str());
}
