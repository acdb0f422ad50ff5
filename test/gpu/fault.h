// fault.h - what the emulator throws when a program does what CUDA or PTX do not allow, or does not define.
#pragma once

#include <stdexcept>
#include <string>

namespace gpu {
struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};
}  // namespace gpu
