// device.h - the device's memory, streams and events: CUDA's on a GPU, plain ones on a CPU; and named ranges
// of a step.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>

#include "llmc/free_memory.h"
#include "llmc/gpus.h"
#include "llmc/simt.h"
#include "llmc/step_plan.h"
#include "llmc/text.h"

#if defined(SIMT_GPU) || __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define LLMC_NVTX 1
#endif

// After this, allocating device memory is an error: a run allocates all that it needs before its first step.
inline bool device_allocation_forbidden = false;
inline void forbid_device_allocation(bool forbidden = true) { device_allocation_forbidden = forbidden; }

inline size_t device_bytes_allocated = 0;  // by this process, now
inline size_t pinned_bytes_allocated = 0;  // host memory that is pinned for a GPU

// Allocates `bytes` of device memory, zeroed. If there is not enough, the error says how much is free.
inline void* device_allocate(size_t bytes, const char* what) {
    if (device_allocation_forbidden)
        bug("%s: %zu bytes are allocated after the start of the run, where all is to be allocated", what,
            bytes);
    void* p = nullptr;
#if defined(SIMT_GPU)
    const cudaError_t status = cudaMalloc(&p, bytes ? bytes : 1);
    if (status == cudaErrorMemoryAllocation) {
        size_t free_bytes = 0, total = 0;
        cudaMemGetInfo(&free_bytes, &total);
        fail("out of device memory: %s takes %s, and %s of %s are free; --memory chooses what fits", what,
             size_text(bytes), size_text(free_bytes), size_text(total));
    }
    CUDA_CHECK(status);
    CUDA_CHECK(cudaMemset(p, 0, bytes));
#else
    p = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        fail("out of memory: %s takes %s; --memory chooses what fits", what, size_text(bytes));
    madvise(p, bytes, MADV_HUGEPAGE);
#endif
    device_bytes_allocated += bytes;
    return p;
}

inline void device_free(void* p, size_t bytes) {
    if (!p) return;
    device_bytes_allocated -= bytes;
#if defined(SIMT_GPU)
    cudaFree(p);
#else
    munmap(p, bytes ? bytes : 1);
#endif
}

constexpr const char* kDevice = kHostIsDevice ? "cpu" : "cuda";

// Copies and fills, in order with the stream's kernels. copy_to_device() and copy_to_host() wait until the
// copy is done; they are for set-up and sampling. The step uses copy_async().
inline void copy_to_device(void* device, const void* host, size_t bytes, [[maybe_unused]] Stream stream) {
    if (simt::launches_off) return;
#if defined(SIMT_GPU)
    CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
#else
    memcpy(device, host, bytes);
#endif
}
inline void copy_to_host(void* host, const void* device, size_t bytes, [[maybe_unused]] Stream stream) {
    if (simt::launches_off) return;
#if defined(SIMT_GPU)
    CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
#else
    memcpy(host, device, bytes);
#endif
}
// An asynchronous copy between pinned memory and the device, or on the device.
inline void copy_async(void* to, const void* from, size_t bytes, [[maybe_unused]] Stream stream) {
#if defined(SIMT_GPU)
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
#else
    memcpy(to, from, bytes);
#endif
}
// Copies `rows` rows of `columns` elements on the device, with row lengths in elements.
template <class T>
void copy_rows_on_device(T* to, int64_t to_row, const T* from, int64_t from_row, int64_t columns,
                         int64_t rows, [[maybe_unused]] Stream stream) {
    if (simt::launches_off) return;
#if defined(SIMT_GPU)
    constexpr int64_t kLongestPitch = INT32_MAX;  // in bytes: cudaDevAttrMaxPitch
    if (to_row == columns && from_row == columns)
        CUDA_CHECK(cudaMemcpyAsync(to, from, rows * columns * sizeof(T), cudaMemcpyDeviceToDevice, stream));
    else if (std::max(to_row, from_row) > kLongestPitch / static_cast<int64_t>(sizeof(T)))
        for (int64_t i = 0; i < rows; i++)
            CUDA_CHECK(cudaMemcpyAsync(to + i * to_row, from + i * from_row, columns * sizeof(T),
                                       cudaMemcpyDeviceToDevice, stream));
    else
        CUDA_CHECK(cudaMemcpy2DAsync(to, to_row * sizeof(T), from, from_row * sizeof(T), columns * sizeof(T),
                                     rows, cudaMemcpyDeviceToDevice, stream));
#else
    for (int64_t i = 0; i < rows; i++)
        memcpy(to + i * to_row, from + i * from_row, static_cast<size_t>(columns) * sizeof(T));
#endif
}
inline void device_fill(void* device, int byte, size_t bytes, [[maybe_unused]] Stream stream) {
    if (simt::launches_off) return;
#if defined(SIMT_GPU)
    CUDA_CHECK(cudaMemsetAsync(device, byte, bytes, stream));
#else
    memset(device, byte, bytes);
#endif
}

// Bytes of the device that are in use now: on a GPU by all processes, on a CPU this process's resident set.
inline size_t device_bytes_in_use() {
#if defined(SIMT_GPU)
    size_t free_bytes = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    return total - free_bytes;
#else
    long pages = 0, resident = 0;
    if (FILE* f = fopen("/proc/self/statm", "r")) {
        if (fscanf(f, "%ld %ld", &pages, &resident) != 2) resident = 0;
        fclose(f);
    }
    return static_cast<size_t>(resident) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
#endif
}

// Bytes of the device that a process takes before it allocates any: on a GPU the CUDA context (an A100's if
// no GPU answers).
inline size_t context_bytes() {
    if (kHostIsDevice) return 0;
#ifdef SIMT_GPU
    int count = 0, major = 0;
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0) == cudaSuccess &&
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess)
        return cuda_context_bytes(count, major == 9);
#endif
    return cuda_context_bytes(kA100);
}

// Whether the device is a GPU whose memory is the host's: what is pinned takes the same memory.
inline bool gpu_shares_host_memory() {
#if defined(SIMT_GPU)
    int integrated = 0;
    return cudaDeviceGetAttribute(&integrated, cudaDevAttrIntegrated, 0) == cudaSuccess && integrated;
#else
    return false;
#endif
}

// The device's memory that this process could allocate now.
inline FreeMemory device_memory_free() {
#if defined(SIMT_GPU)
    // For memory that the GPU shares, CUDA does not count the page cache as free, which would make room.
    if (gpu_shares_host_memory()) return host_memory_free();
    size_t free_bytes = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    return {free_bytes, "the GPU's memory"};
#else
    return host_memory_free();
#endif
}

// A buffer of device memory that lives as long as this object.
class DeviceBuffer {
  public:
    DeviceBuffer() = default;
    DeviceBuffer(size_t bytes, const char* what) : data_(device_allocate(bytes, what)), bytes_(bytes) {}
    DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
    DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~DeviceBuffer() { device_free(data_, bytes_); }
    char* data() const { return static_cast<char*>(data_); }
    size_t bytes() const { return bytes_; }

  private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

// Pinned host memory: a GPU copies from it and to it while the host goes on. Ordinary memory on a CPU. Fails
// if the driver cannot pin more.
class PinnedBuffer {
  public:
    explicit PinnedBuffer(size_t bytes) : bytes_(bytes) {
#if defined(SIMT_GPU)
        if (device_allocation_forbidden)
            bug("%zu bytes are pinned after the start of the run, where all are to be", bytes);
        check_pinned(cudaMallocHost(&data_, bytes ? bytes : 1));
#else
        data_ = ::operator new(bytes);
#endif
    }
    // Pins memory that the caller has mapped, and unmaps it at the end.
    explicit PinnedBuffer(std::span<char> mapping)
        : data_(mapping.data()), bytes_(mapping.size()), is_mapping_(true) {
#if defined(SIMT_GPU)
        check_pinned(cudaHostRegister(data_, bytes_, cudaHostRegisterDefault));
#endif
    }
    PinnedBuffer(const PinnedBuffer&) = delete;
    ~PinnedBuffer() {
#if defined(SIMT_GPU)
        cudaDeviceSynchronize();  // after an error copies may still run
        is_mapping_ ? cudaHostUnregister(data_) : cudaFreeHost(data_);
        pinned_bytes_allocated -= bytes_;
#else
        if (!is_mapping_) ::operator delete(data_);
#endif
        if (is_mapping_) munmap(data_, bytes_);
    }
    char* data() const { return static_cast<char*>(data_); }
    size_t bytes() const { return bytes_; }

  private:
#if defined(SIMT_GPU)
    // Counts the buffer as pinned. Fails if it could not be.
    void check_pinned(cudaError_t status) const {
        if (status == cudaErrorMemoryAllocation)
            fail(
                "%s of host memory cannot be pinned beside %s that are: have less wait there, or raise "
                "what limits it (the host's free memory, ulimit -l)",
                size_text(bytes_), size_text(pinned_bytes_allocated));
        CUDA_CHECK(status);
        pinned_bytes_allocated += bytes_;
    }
#endif
    void* data_ = nullptr;
    const size_t bytes_;
    const bool is_mapping_ = false;
};

// A separate stream: its work runs beside that of other streams, and can be recorded as a graph. It still
// waits for the default stream, in which a model is loaded and saved, and the default stream waits for it.
class OwnStream {
  public:
    OwnStream() {
#if defined(SIMT_GPU)
        CUDA_CHECK(cudaStreamCreate(&stream_));
#endif
    }
    OwnStream(const OwnStream&) = delete;
    ~OwnStream() {
#if defined(SIMT_GPU)
        cudaStreamDestroy(stream_);
#endif
    }
    Stream get() const { return stream_; }

  private:
    Stream stream_ = nullptr;
};

// A point in a stream's work that others can wait for. Before the first record() nobody waits. On a CPU all
// work is done as soon as it is requested.
class Event {
  public:
#if defined(SIMT_GPU)
    Event() { CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
    ~Event() { cudaEventDestroy(event_); }
    void record(Stream stream) { CUDA_CHECK(cudaEventRecord(event_, stream)); }
    void block(Stream stream) const { CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0)); }
    void wait() const { CUDA_CHECK(cudaEventSynchronize(event_)); }
    bool happened() const {
        const cudaError_t status = cudaEventQuery(event_);
        if (status == cudaSuccess) return true;
        if (status != cudaErrorNotReady) CUDA_CHECK(status);
        cudaGetLastError();  // "not ready" is no error: clears it
        return false;
    }
#else
    Event() = default;
    void record(Stream) {}
    void block(Stream) const {}  // later work in the stream waits
    void wait() const {}         // the host waits
    bool happened() const { return true; }
#endif
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

  private:
#if defined(SIMT_GPU)
    cudaEvent_t event_ = nullptr;
#endif
};

// An asynchronous copy of some bytes from the device to the host.
class Readback {
  public:
    explicit Readback(size_t bytes) : host_(bytes) {}
    // Starts to copy what the stream's work leaves at `device`, without waiting.
    void start(const void* device, Stream stream) {
        copy_async(host_.data(), device, host_.bytes(), stream);
        arrived_.record(stream);
    }
    // Waits until the copy that was started last has arrived.
    const char* wait() const {
        arrived_.wait();
        return host_.data();
    }

  private:
    PinnedBuffer host_;
    Event arrived_;
};

// Is told of a step as it runs, for measurements (bench.h): of its ranges; of its operations, which may nest;
// of transfers; and of where it waits for them.
struct StepListener {
    virtual void range_opens(const char*) {}
    virtual void range_closes() {}
    virtual void operation_begins(const char*, const Product&) {}
    virtual void operation_ends() {}
    virtual void transfer_begins(Route, size_t) {}
    virtual void wait_begins(Transfer::Of) {}
    virtual void wait_ends() {}
};
inline StepListener* step_listener = nullptr;  // null unless somebody measures

// Begins a span of time in which any thread does something beside the step: an NVTX range for nsys.
// end_span() ends it, by the number that is returned.
inline uint64_t begin_span([[maybe_unused]] const char* name) {
#ifdef LLMC_NVTX
    return nvtxRangeStartA(name);
#else
    return 0;
#endif
}
inline void end_span([[maybe_unused]] uint64_t span) {
#ifdef LLMC_NVTX
    nvtxRangeEnd(span);
#endif
}

// An NVTX range of what this thread enqueues meanwhile: nsys shows it where the device does that work.
class [[nodiscard]] EnqueuedRange {
  public:
    explicit EnqueuedRange([[maybe_unused]] const char* name) {
#ifdef LLMC_NVTX
        nvtxRangePushA(name);
#endif
    }
    ~EnqueuedRange() {
#ifdef LLMC_NVTX
        nvtxRangePop();
#endif
    }
    EnqueuedRange(const EnqueuedRange&) = delete;
};

// A named part of the step: an NVTX range for nsys, and the place that the memory plan names. Ranges nest.
class Range {
  public:
    explicit Range(const char* name, int index = -1)
        : length_before_(path().size()), listener_(step_listener) {
        place_ = std::string_view();
        if (!path().empty()) path() += ' ';
        const size_t start = path().size();
        path() += name;
        if (index >= 0) path().append(" ").append(std::to_string(index));
#ifdef LLMC_NVTX
        nvtxRangePushA(path().c_str() + start);
#else
        (void)start;
#endif
        if (listener_) listener_->range_opens(name);
    }
    ~Range() {
        if (listener_) listener_->range_closes();
        place_ = std::string_view();
        path().resize(length_before_);
#ifdef LLMC_NVTX
        nvtxRangePop();
#endif
    }
    Range(const Range&) = delete;
    // The names of the open ranges, outermost first: "backward block 11".
    static std::string& path() {
        static std::string p;
        return p;
    }
    // path() as it is now, in memory that lives until the process ends. A step has only few different paths.
    static std::string_view place() {
        static std::unordered_set<std::string> places;
        if (!place_.data()) place_ = *places.insert(path()).first;
        return place_;
    }

  private:
    inline static std::string_view place_;  // place(), until a range opens or closes
    size_t length_before_;
    StepListener* listener_;
};
