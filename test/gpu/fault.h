// fault.h - the exception of the emulator, for what CUDA or PTX do not allow, or do not define.
#pragma once

#include <stdexcept>
#include <string>

namespace gpu {
struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};
}  // namespace gpu
