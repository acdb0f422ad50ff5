// version.h - --version: which program this is and what it was built with.
#pragma once

#include <string>

#if defined(SIMT_GPU)
#include <cublasLt.h>
#else
#include <oneapi/dnnl/dnnl.h>
#endif

#include "llmc/error.h"

constexpr const char* kVersion = "0.1";

// The commit that was built. The Makefile links it in, so that a new commit compiles nothing again; a build
// without it does not know.
extern "C" __attribute__((weak)) const char llmc_commit[];

inline std::string library_versions() {
#if defined(SIMT_GPU)
    const size_t v = cublasLtGetVersion();
    const bool is_old = v < 100000;  // 11.x and before count in thousands, as in 11205
    const size_t major = is_old ? v / 1000 : v / 10000, rest = is_old ? v % 1000 : v % 10000;
    return format("cuBLASLt %zu.%zu.%zu", major, rest / 100, rest % 100);
#else
    const dnnl_version_t& v = *dnnl_version();
    return format("oneDNN %d.%d.%d", v.major, v.minor, v.patch);
#endif
}

inline std::string version_text() {
    const char* const commit = llmc_commit ? llmc_commit : "unknown";
#if defined(SIMT_GPU)
    const char* const device = "cuda";
#else
    const char* const device = "cpu";
#endif
#if defined(LLMC_BF16)
    const char* const precision = "bf16";
#else
    const char* const precision = "fp32";
#endif
    return format("train %s, commit %s, device %s, precision %s, %s", kVersion, commit, device, precision,
                  library_versions().c_str());
}
