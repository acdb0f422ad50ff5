// closed_memory.h - memory that may be touched and memory that may not, told to AddressSanitizer. Elsewhere
// all of this does nothing.
#pragma once

#include <cstddef>

#if defined(__has_feature)  // clang's way
#if __has_feature(address_sanitizer)
#define LLMC_ASAN 1
#endif
#elif defined(__SANITIZE_ADDRESS__) && !defined(__CUDACC__)
#define LLMC_ASAN 1
#endif
#ifdef LLMC_ASAN
#include <sanitizer/asan_interface.h>
#endif

// Opens memory to reads and writes, or closes it.
inline void open_memory([[maybe_unused]] const void* p, [[maybe_unused]] size_t bytes) {
#ifdef LLMC_ASAN
    __asan_unpoison_memory_region(p, bytes);
#endif
}
inline void close_memory([[maybe_unused]] const void* p, [[maybe_unused]] size_t bytes) {
#ifdef LLMC_ASAN
    __asan_poison_memory_region(p, bytes);
#endif
}

// Stops the program where a byte of it is closed: for libraries, into which AddressSanitizer does not see.
inline void check_open([[maybe_unused]] const void* p, [[maybe_unused]] size_t bytes) {
#ifdef LLMC_ASAN
    if (const void* closed = __asan_region_is_poisoned(const_cast<void*>(p), bytes))
        static_cast<void>(*static_cast<const volatile char*>(closed));
#endif
}
