// fault.h - what CUDA, PTX or NCCL do not allow, or do not define: the emulator's exception for it, which
// ends the process.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <stdexcept>
#include <string>

namespace gpu {

struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The process's stderr as it was when the emulator was loaded: some programs close theirs.
inline const int first_stderr = dup(STDERR_FILENO);

[[noreturn]] inline void end_process(const std::exception& e) {
    fflush(stdout);
    dprintf(first_stderr, "GPU: %s\n", e.what());
    _exit(70);
}

}  // namespace gpu
