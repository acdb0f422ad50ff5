// simt_cuda.h - simt.h on a GPU: CUDA itself, launch(), and what CUDA's errors tell the user.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cctype>
#include <cstdlib>
#include <fstream>
#include <string>
#include <type_traits>

#include "llmc/error.h"

// ---- CUDA's errors
//
// Turns CUDA's errors into one line that tells the user what to do. Read this to give another error a line of
// its own.

// "13.0" for CUDA's 13000.
inline std::string cuda_version(int number) { return format("%d.%d", number / 1000, number % 1000 / 10); }

// The oldest NVIDIA driver that runs a program of this CUDA Toolkit: the first of its major version (CUDA
// Toolkit release notes, "CUDA Minor Version Compatibility").
inline std::string oldest_driver(int toolkit) {
    const int major = toolkit / 1000;
    const int driver = major == 12 ? 525 : major == 13 ? 580 : 0;
    return driver ? format("driver %d or later", driver) : format("a driver with CUDA %d.0 or later", major);
}

// The CUDA version of the installed driver, or 0 if there is none.
inline int driver_cuda_version() {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

// ", driver 535.104.05" if the kernel module reports its number; under WSL2 it does not.
inline std::string driver_number() {
    std::ifstream file("/proc/driver/nvidia/version");
    for (std::string word; file >> word;)
        if (isdigit(word[0]) && word.find('.') != std::string::npos &&
            word.find_first_not_of("0123456789.") == std::string::npos)
            return ", driver " + word;
    return "";
}

// " (compute capability 8.9)" if a GPU answers.
inline std::string gpu_capability() {
    int major = 0, minor = 0;
    const bool known = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
                       cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0) == cudaSuccess;
    return known ? format(" (compute capability %d.%d)", major, minor) : "";
}

// Fails if no GPU answers, and says what is missing and what to do about it.
inline void check_gpu() {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaSuccess && count > 0) return;
    const int driver = driver_cuda_version();
    const std::string needs = oldest_driver(CUDART_VERSION);
    if (driver == 0)
        fail(
            "this ./train is built for a GPU, and there is no NVIDIA driver here: install %s; for the CPU: "
            "make DEVICE=cpu",
            needs);
    if (status == cudaErrorInsufficientDriver)
        fail(
            "the NVIDIA driver is too old: it has CUDA %s%s, and this ./train, built with CUDA %s, needs %s: "
            "update the driver (under WSL2 that of Windows), or build with an older CUDA Toolkit, "
            "NVCC=/path/to/nvcc",
            cuda_version(driver), driver_number(), cuda_version(CUDART_VERSION), needs);
    if (status == cudaErrorSystemDriverMismatch)
        fail(
            "the NVIDIA driver's library and its kernel module are of different versions, as after an "
            "update: restart the machine");
    const char* const visible = getenv("CUDA_VISIBLE_DEVICES");
    fail(
        "this ./train is built for a GPU and none answers (%s; the driver has CUDA %s%s%s%s); for the CPU: "
        "make DEVICE=cpu",
        status == cudaSuccess ? "no device" : cudaGetErrorString(status), cuda_version(driver),
        driver_number(), visible ? "; CUDA_VISIBLE_DEVICES is " : "", visible ? visible : "");
}

// What the user can do about an error: empty if the error says enough, null if it is a bug.
inline const char* advice_about(cudaError_t status) {
    switch (status) {
        case cudaErrorLaunchTimeout:
            return ": the driver ends what runs for seconds on a GPU that draws a screen, and under WSL2: "
                   "use a GPU without a screen, close what else uses this one, lower --batch or "
                   "--chunk-rows attention=, or raise the limit (TdrDelay in Windows's registry)";
        case cudaErrorNoKernelImageForDevice:
            return ": this ./train is built for other GPUs: build it on this machine, or for this GPU with "
                   "make CUDA_ARCH=";
        case cudaErrorUnsupportedPtxVersion:
            return ": this ./train has no code for this GPU, and the driver is too old to make it: build on "
                   "this machine, or update the driver";
        case cudaErrorMemoryAllocation:
        case cudaErrorNoDevice:
        case cudaErrorDevicesUnavailable:
        case cudaErrorDeviceUninitialized:
        case cudaErrorInsufficientDriver:
        case cudaErrorSystemDriverMismatch:
        case cudaErrorSystemNotReady:
        case cudaErrorECCUncorrectable:
            return "";
        default:
            return nullptr;
    }
}

// Stops with one line if a CUDA call failed. The user can fix it if the GPU is full, gone, or not one that
// this was compiled for; otherwise it is a bug.
inline void cuda_check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    const char* const why = cudaGetErrorString(status);
    const char* const advice = advice_about(status);
    if (!advice) throw std::runtime_error(format("CUDA: %s: %s", what, why));
    const bool of_code =
        status == cudaErrorNoKernelImageForDevice || status == cudaErrorUnsupportedPtxVersion;
    fail("CUDA: %s: %s%s%s", what, why, of_code ? gpu_capability() : "", advice);
}
#define CUDA_CHECK(call) cuda_check((call), #call)

// ---- kernels and launches

#define SIMT_GPU 1
#define SIMT_DEVICE __device__ __forceinline__
#define SIMT_HOST_DEVICE __host__ __device__ __forceinline__
#define SIMT_INLINE                         // for a lambda in a kernel
#define SIMT_ASSUME(x) __builtin_assume(x)  // always true: no code for the other case

// Names the block's dynamic shared memory. One base for all kernels: C++ allows one type per extern array.
#define DYNAMIC_SHARED(T, name)                                           \
    extern __shared__ __align__(128) unsigned char simt_dynamic_shared[]; \
    T* name = reinterpret_cast<T*>(simt_dynamic_shared)

constexpr int kLanes = 32;
constexpr int kVectorBytes = 16;
constexpr int kBlockWarps = 8;
constexpr bool kFastCpu = false;
constexpr bool kPlanner = false;
constexpr bool kHostIsDevice = false;  // whether device memory is host memory

using Stream = cudaStream_t;
using bf16 = __nv_bfloat16;

SIMT_HOST_DEVICE float to_float(float x) { return x; }
SIMT_HOST_DEVICE float to_float(bf16 x) { return __bfloat162float(x); }
template <class T>
SIMT_HOST_DEVICE T from_float(float x) {
    if constexpr (std::is_same_v<T, float>)
        return x;
    else
        return __float2bfloat16(x);
}

// Rounds N floats to T, bf16 two at a time.
template <class T, int N>
SIMT_DEVICE void from_floats(T (&to)[N], const float (&x)[N]) {
    if constexpr (std::is_same_v<T, bf16> && N % 2 == 0) {
#pragma unroll
        for (int k = 0; k < N; k += 2)
            reinterpret_cast<__nv_bfloat162&>(to[k]) = __floats2bfloat162_rn(x[k], x[k + 1]);
    } else {
#pragma unroll
        for (int k = 0; k < N; k++) to[k] = from_float<T>(x[k]);
    }
}

SIMT_DEVICE float fast_exp(float x) { return __expf(x); }

// x / y with at most 2 ulp of error; 0 for |y| above 2^126.
SIMT_DEVICE float fast_quotient(float x, float y) { return __fdividef(x, y); }

namespace simt {
template <class... P, class... A>
void launch_function(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, Stream stream,
                     A&&... args) {
    if (shared_bytes > 48 * 1024)
        CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared_bytes)));
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...));
}
}  // namespace simt

// Runs `kernel` over the grid on the stream. An empty grid runs nothing.
template <auto kernel, class... A>
void launch(dim3 grid, dim3 block, size_t shared_bytes, Stream stream, A&&... args) {
    if (simt::launches_off || grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    simt::launch_function(kernel, grid, block, shared_bytes, stream, std::forward<A>(args)...);
}
