// address_sanitizer.h - tells AddressSanitizer which memory may be accessed. In other builds all of this does
// nothing.
#pragma once

#include <cstddef>

#if defined(__has_feature)  // in clang
#if __has_feature(address_sanitizer)
#define LLMC_ASAN 1
#endif
#elif defined(__SANITIZE_ADDRESS__) && !defined(__CUDACC__)
#define LLMC_ASAN 1
#endif
#ifdef LLMC_ASAN
#include <sanitizer/asan_interface.h>
#endif

// Allows reads and writes of memory, or forbids them.
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

// Stops the program if a byte of this memory is closed. For libraries, which AddressSanitizer does not check.
inline void check_open([[maybe_unused]] const void* p, [[maybe_unused]] size_t bytes) {
#ifdef LLMC_ASAN
    if (const void* closed = __asan_region_is_poisoned(const_cast<void*>(p), bytes))
        static_cast<void>(*static_cast<const volatile char*>(closed));
#endif
}
