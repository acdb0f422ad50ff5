// cudart.cpp - the CUDA runtime's calls that the trainer and its tests make, on the emulated device. Loaded
// in place of libcudart, libcublasLt and libnccl, it runs an unchanged program from its own PTX.
//
// What CUDA forbids, and what it leaves undefined, ends the process with a line that begins with "GPU:" and
// exit code 70. The environment:
//
//   GPU=A100|4090|H100|B200|5090   the device
//   GPU_NAME=NAME                  another name for it
//   GPU_MEMORY=MiB                 makes its memory smaller
//   GPU_INTEGRATED=1               its memory is the host's
//   GPU_SEED=N, GPU_ORDER=late|early|random   the order of everything that has none
//   GPU_CHECK=bounds               does not look for races
//   GPU_ERROR=N                    waiting for a stream ends with this error
//   GPU_COUNT=N                    how many devices the machine has; CUDA_VISIBLE_DEVICES chooses among them,
//                                  and only the first of those can be used. 0: no device answers;
//                                  GPU_COUNT_ERROR=N: for this reason
//   GPU_DRIVER=12020               a driver with CUDA 12.2; 0: no driver
//   GPU_COUNTERS, GPU_COVERAGE     files for what was counted
//   GPU_ENQUEUED                   a file for how much the host gave to streams: copies, launches, whole
//                                  graphs, events and waits for them
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <sstream>

#include "test/gpu/assemble.h"
#include "test/gpu/device.h"

using namespace gpu;

namespace {

// Answers a call; a fault ends the process.
template <class F>
auto guarded(F&& f) {
    const std::lock_guard lock(device_mutex());
    try {
        return f();
    } catch (const std::exception& e) {
        end_process(e);
    }
}
template <class F>
cudaError_t call(F&& f) {
    return guarded([&]() -> cudaError_t {
        if constexpr (std::is_void_v<decltype(f())>) {
            f();
            return cudaSuccess;
        } else {
            return f();
        }
    });
}

Stream* stream_of(cudaStream_t s) {
    if (s == nullptr || s == cudaStreamLegacy) return device().default_stream();
    return reinterpret_cast<Stream*>(s);
}
Event* event_of(cudaEvent_t e) { return reinterpret_cast<Event*>(e); }

// --- Code.

// Kernels of the program, from its fat binaries.
struct Kernel {
    std::string name;
    std::unique_ptr<Program> program;  // made at the first launch
    const PtxModule* module = nullptr;
    size_t dynamic_shared = 48 << 10;  // that a launch may ask for
    Counters counters;
};
struct FatBinary {
    std::vector<std::pair<int, std::string_view>> ptx;  // by architecture
    PtxModule module;
    bool is_read = false;
};
std::map<const void*, Kernel>& kernels() {
    static auto& all = *new std::map<const void*, Kernel>;
    return all;
}

// The parts of a fat binary that are PTX. Its header has a magic number, a version, its own size and the size
// of what follows. Each part has its kind (1: PTX), its own header's size, its size, and from byte 28 on its
// architecture.
void read_fat_binary(const char* data, FatBinary& to) {
    const auto number = [](const char* p, auto n) {
        memcpy(&n, p, sizeof n);
        return n;
    };
    if (number(data, uint32_t{}) != 0xba55ed50) throw Fault("the program's fat binary is not known");
    const char* at = data + number(data + 6, uint16_t{});
    const char* const last = at + number(data + 8, uint64_t{});
    while (at < last) {
        const uint16_t kind = number(at, uint16_t{});
        const uint32_t header = number(at + 4, uint32_t{});
        const uint64_t bytes = number(at + 8, uint64_t{});
        const uint32_t compressed = number(at + 16, uint32_t{}), arch = number(at + 28, uint32_t{});
        if (kind == 1) {
            if (compressed) throw Fault("the program's PTX is compressed: build it with -no-compress");
            std::string_view text(at + header, bytes);
            to.ptx.emplace_back(arch, text.substr(0, text.find('\0')));
        }
        at += header + bytes;
    }
}
// The PTX that this device uses: the newest that it can run; that for 90a only on a 9.0.
const PtxModule& module_of(FatBinary& f) {
    if (f.is_read) return f.module;
    const std::string_view* best = nullptr;
    int best_arch = 0;
    const int device_arch = 10 * chip().major + chip().minor;
    for (const auto& [arch, text] : f.ptx) {
        const bool own = text.find(".target sm_90a") != std::string_view::npos;
        if (own ? device_arch != arch : arch > device_arch) continue;
        if (!best || arch > best_arch) best = &text, best_arch = arch;
    }
    if (!best) throw Fault("the program has no PTX for this device");
    f.module = read_ptx(*best);
    f.is_read = true;
    return f.module;
}

struct Registered {
    FatBinary* binary;
    std::string name;
};
std::map<const void*, Registered>& registered() {
    static auto& all = *new std::map<const void*, Registered>;
    return all;
}
Kernel& kernel_of(const void* function) {
    const auto it = kernels().find(function);
    if (it != kernels().end()) return it->second;
    const auto r = registered().find(function);
    if (r == registered().end()) throw Fault("a launch of what is no kernel");
    const PtxModule& module = module_of(*r->second.binary);
    const auto text = module.kernels.find(r->second.name);
    if (text == module.kernels.end()) throw Fault("the PTX has no kernel " + r->second.name);
    Kernel& k = kernels()[function];
    k.name = r->second.name;
    k.module = &module;
    k.program = assemble(text->second, module);
    return k;
}

void launch_kernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                   Stream* stream) {
    Kernel& k = kernel_of(function);
    const auto bad = [&](const std::string& what) { throw Fault("launch of " + k.name + ": " + what); };
    const uint64_t threads = uint64_t{block.x} * block.y * block.z;
    if (!threads || threads > 1024 || block.x > 1024 || block.y > 1024 || block.z > 64)
        bad("a block of " + std::to_string(threads) + " threads");
    if (k.program->max_threads && threads > k.program->max_threads)
        bad("more threads than its __launch_bounds__");
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
        bad("a grid that CUDA refuses");
    if (shared > k.dynamic_shared)
        bad(std::to_string(shared) + " bytes of dynamic shared memory, and it was opted in for " +
            std::to_string(k.dynamic_shared));
    if (shared + k.program->static_shared > chip().shared_per_block)
        bad("more shared memory than " + std::string(chip().name) + " has");
    std::vector<char> parameters(k.program->parameter_bytes);
    for (size_t i = 0; i < k.program->parameters.size(); i++)
        memcpy(parameters.data() + k.program->parameters[i].first, arguments[i],
               k.program->parameters[i].second);
    const uint64_t seed = device().next_seed();
    device().queue(
        stream, {k.name, [&k, grid, block, shared, parameters, seed](const Work& work) {
                     Launch l{k.program.get(),
                              &work,
                              {grid.x, grid.y, grid.z},
                              {block.x, block.y, block.z},
                              shared,
                              parameters,
                              &device().memory,
                              &k.counters,
                              seed,
                              device().check_races};
                     std::unordered_set<uint64_t> touched;
                     if (getenv("GPU_COUNTERS")) l.touched = &touched;
                     k.counters.launches++;
                     k.counters.threads = std::max<uint64_t>(k.counters.threads, block.x * block.y * block.z);
                     k.counters.shared_bytes =
                         std::max<uint64_t>(k.counters.shared_bytes, shared + k.program->static_shared);
                     static thread_local BlockMemory memory;
                     const uint32_t blocks = grid.x * grid.y * grid.z;
                     // Blocks run one after the other, beginning with the one that the seed
                     // chooses.
                     const uint32_t first = static_cast<uint32_t>(seed % blocks);
                     for (uint32_t n = 0; n < blocks; n++) {
                         const uint32_t b = (first + n) % blocks;
                         Block(l, {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y}, b, memory).run();
                     }
                     k.counters.distinct_sectors += touched.size();
                 }});
}

void report() {
    if (const char* path = getenv("GPU_COUNTERS")) {
        std::ofstream f(path, std::ios::app);
        f << "kernel launches instructions lanes global_requests global_sectors global_bytes shared_requests "
             "shared_passes branches divergent distinct_sectors tensor_flops threads shared_bytes\n";
        for (const auto& [function, k] : kernels()) {
            const Counters& c = k.counters;
            f << k.name << ' ' << c.launches << ' ' << c.instructions << ' ' << c.lanes << ' '
              << c.global_requests << ' ' << c.global_sectors << ' ' << c.global_bytes << ' '
              << c.shared_requests << ' ' << c.shared_passes << ' ' << c.branches << ' ' << c.divergent << ' '
              << c.distinct_sectors << ' ' << c.tensor_flops << ' ' << c.threads << ' ' << c.shared_bytes
              << '\n';
        }
    }
    if (const char* path = getenv("GPU_ENQUEUED")) std::ofstream(path) << device().enqueued() << '\n';
    // One line per kernel, launched or not: which of its instructions were executed, as 0 and 1.
    if (const char* path = getenv("GPU_COVERAGE")) {
        std::ofstream f(path, std::ios::app);
        std::ostringstream lines;  // written at once: others may append to the same file
        for (const auto& [function, r] : registered()) {
            const PtxModule& module = module_of(*r.binary);
            const auto text = module.kernels.find(r.name);
            if (text == module.kernels.end()) continue;
            const size_t count = text->second.statements.size();
            std::string executed(count, '0');
            if (const auto k = kernels().find(function); k != kernels().end())
                for (size_t i = 0; i < count; i++) executed[i] = k->second.program->executed[i] ? '1' : '0';
            lines << module.target << ' ' << r.name << ' ' << executed << '\n';
        }
        f << lines.str() << std::flush;
    }
}

// --- Copies.

uint64_t hash(const void* p, size_t bytes) {
    return std::hash<std::string_view>{}(std::string_view(static_cast<const char*>(p), bytes));
}
// Copies rows. Either end may be the host's or the device's memory.
void copy(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t bytes, size_t rows,
          Stream* s, const char* name) {
    if (!bytes || !rows) return;
    DeviceMemory& m = device().memory;
    const bool to_device = m.is_device(to), from_device = m.is_device(from);
    const auto extent = [=](size_t pitch) { return pitch * (rows - 1) + bytes; };
    if (to_device) m.check_bounds(to, extent(to_pitch));
    if (from_device) m.check_bounds(from, extent(from_pitch));
    const bool waits = !(to_device || device().memory.is_pinned(to, extent(to_pitch))) ||
                       !(from_device || device().memory.is_pinned(from, extent(from_pitch)));
    if (s->recording && waits)
        throw Fault(std::string(name) + ": memory that is not pinned, while a stream is captured");
    // Until the host knows that the copy is done, its source must not change, and nobody may use its target.
    const std::string what = name;
    const auto sum = [=] {
        uint64_t h = 0;
        for (size_t r = 0; r < rows; r++)
            h = h * 31 + hash(static_cast<const char*>(from) + r * from_pitch, bytes);
        return h;
    };
    // What the device's own copies write to the host's memory meanwhile is ordered by their streams. Memory
    // that processes share is not checked: this process does not know when the others use it.
    const bool checks_source = !from_device && !m.may_be_shared(from),
               poisons_target = !to_device && !m.may_be_shared(to);
    struct Source {
        uint64_t sum = 0;
        bool known = false;  // since the copy was asked for
        uint64_t read_at = 0;
    };
    const auto source = std::make_shared<Source>();
    const auto compare = [=] {
        if (sum() != source->sum) throw Fault(what + ": the host's memory was changed while it was copied");
    };
    const auto queued = [=](const Work& work) {
        if (checks_source) {
            device().host_read_is_queued(from, extent(from_pitch));
            source->known = !device().is_being_written(from, extent(from_pitch));
            if (source->known) source->sum = sum();
            device().check_when_known(work, [=] {
                if (!device().was_written_since(source->read_at, from, extent(from_pitch))) compare();
            });
        }
        if (poisons_target) {
            const bool is_read = device().is_being_read(to, extent(to_pitch));  // by an earlier copy
            device().host_write_is_queued(to, extent(to_pitch));
            for (size_t r = 0; r < rows && !is_read; r++)
                memset(static_cast<char*>(to) + r * to_pitch, 0xa5, bytes);
        }
    };
    const auto run = [=, &m](const Work& work) {
        if (checks_source) {
            device().host_read_runs(from, extent(from_pitch));
            if (source->known) compare();
            source->sum = sum();
            source->read_at = device().moment();
        }
        if (poisons_target) device().host_write_runs(to, extent(to_pitch));
        for (size_t r = 0; r < rows; r++) {
            const char* f = static_cast<const char*>(from) + r * from_pitch;
            char* t = static_cast<char*>(to) + r * to_pitch;
            if (from_device) device().reads(work, f, bytes);
            if (to_device) device().writes(work, t, bytes);
            memmove(to_device ? m.bytes_at(t) : t, from_device ? m.bytes_at(f) : f, bytes);
        }
    };
    device().queue(s, {name, run, queued});
    if (waits) device().wait(s);
}

}  // namespace

namespace gpu {
Device& device() {
    static Device& d = *[] {
        atexit([] { guarded([] { device().wait(); }), report(); });
        return new Device;
    }();
    return d;
}
}  // namespace gpu

extern "C" {

// --- What nvcc's code calls.

void** __cudaRegisterFatBinary(void* wrapper) {
    return guarded([&] {
        struct Wrapper {
            int magic, version;
            const char* data;
            void* file;
        };
        auto* f = new FatBinary;
        read_fat_binary(static_cast<Wrapper*>(wrapper)->data, *f);
        return reinterpret_cast<void**>(f);
    });
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void** handle, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
    registered()[host] = {reinterpret_cast<FatBinary*>(handle), name};
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
    return cudaSuccess;
}
struct Configuration {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};
static thread_local std::vector<Configuration> configurations;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    configurations.push_back({grid, block, shared, stream});
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    const Configuration c = configurations.back();
    configurations.pop_back();
    *grid = c.grid;
    *block = c.block;
    *shared = c.shared;
    *static_cast<cudaStream_t*>(stream) = c.stream;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t stream) {
    return call([&] { launch_kernel(kernel, grid, block, arguments, shared, stream_of(stream)); });
}
cudaError_t cudaLaunchKernel(const void* f, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t stream) {
    return call([&] { launch_kernel(f, grid, block, arguments, shared, stream_of(stream)); });
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** arguments) {
    return call([&] {
        launch_kernel(f, c->gridDim, c->blockDim, arguments, c->dynamicSmemBytes, stream_of(c->stream));
    });
}
cudaError_t cudaFuncSetAttribute(const void* f, cudaFuncAttribute attribute, int value) {
    return call([&] {
        if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
            throw Fault("cudaFuncSetAttribute: an attribute that the emulator does not know");
        Kernel& k = kernel_of(f);
        if (value < 0 || static_cast<size_t>(value) + k.program->static_shared > chip().shared_per_block)
            return cudaErrorInvalidValue;
        k.dynamic_shared = static_cast<size_t>(value);
        return cudaSuccess;
    });
}

// --- The device.

// The CUDA version of the driver, 0 without one. It must have at least the toolkit's major version.
static int driver_version() {
    static const int version =
        atoi(environment("GPU_DRIVER", std::to_string(CUDART_VERSION).c_str()).c_str());
    return version;
}
// The machine's devices that CUDA_VISIBLE_DEVICES names, up to the first that is not there.
static std::vector<int> visible_devices() {
    const int all = atoi(environment("GPU_COUNT", "1").c_str());
    std::vector<int> visible;
    if (const char* named = getenv("CUDA_VISIBLE_DEVICES")) {
        std::istringstream names(named);
        for (std::string name; std::getline(names, name, ',') && atoi(name.c_str()) < all;)
            visible.push_back(atoi(name.c_str()));
    } else {
        for (int d = 0; d < all; d++) visible.push_back(d);
    }
    return visible;
}
cudaError_t cudaGetDeviceCount(int* count) {
    *count = static_cast<int>(visible_devices().size());
    if (driver_version() / 1000 < CUDART_VERSION / 1000) return *count = 0, cudaErrorInsufficientDriver;
    return *count ? cudaSuccess
                  : static_cast<cudaError_t>(atoi(environment("GPU_COUNT_ERROR", "100").c_str()));
}
cudaError_t cudaGetDevice(int* d) { return *d = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int d) { return d ? cudaErrorInvalidDevice : cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    return call([&] {
        memset(p, 0, sizeof *p);
        snprintf(p->name, sizeof p->name, "%s", chip_name());
        p->major = chip().major;
        p->minor = chip().minor;
        p->multiProcessorCount = chip().multiprocessors;
        p->totalGlobalMem = chip_memory();
        p->sharedMemPerBlock = 48 << 10;
        p->sharedMemPerBlockOptin = chip().shared_per_block;
        p->sharedMemPerMultiprocessor = chip().shared_per_multiprocessor;
        p->warpSize = 32;
        p->maxThreadsPerBlock = 1024;
        p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    });
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    return call([&] {
        switch (attribute) {
            case cudaDevAttrMultiProcessorCount:
                *value = chip().multiprocessors;
                return;
            case cudaDevAttrComputeCapabilityMajor:
                *value = chip().major;
                return;
            case cudaDevAttrComputeCapabilityMinor:
                *value = chip().minor;
                return;
            case cudaDevAttrClockRate:
                *value = chip().clock;
                return;
            case cudaDevAttrMemoryClockRate:
                *value = chip().memory_clock;
                return;
            case cudaDevAttrGlobalMemoryBusWidth:
                *value = chip().bus_bits;
                return;
            case cudaDevAttrIntegrated:
                *value = environment("GPU_INTEGRATED", "0") == "1";
                return;
            case cudaDevAttrMaxSharedMemoryPerBlockOptin:
                *value = static_cast<int>(chip().shared_per_block);
                return;
            case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
                *value = static_cast<int>(chip().shared_per_multiprocessor);
                return;
            default:
                throw Fault("cudaDeviceGetAttribute: an attribute that the emulator does not know: " +
                            std::to_string(attribute));
        }
    });
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
    const std::vector<int> visible = visible_devices();
    if (device >= static_cast<int>(visible.size())) return cudaErrorInvalidDevice;
    snprintf(id, static_cast<size_t>(length), "0000:%02x:00.0", visible[static_cast<size_t>(device)] + 1);
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* v) { return *v = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* v) { return *v = driver_version(), cudaSuccess; }
const char* cudaGetErrorString(cudaError_t e) {
    switch (e) {
        case cudaSuccess:
            return "no error";
        case cudaErrorMemoryAllocation:
            return "out of memory";
        case cudaErrorInvalidValue:
            return "invalid argument";
        case cudaErrorInvalidDevice:
            return "invalid device ordinal";
        default:
            return "an error that the emulator does not name";
    }
}
const char* cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }

static CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                             const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                             const cuuint32_t* steps, CUtensorMapInterleave interleave,
                             CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                             CUtensorMapFloatOOBfill fill) {
    return guarded([&]() -> CUresult {
        // The driver's own conditions (CUDA Driver API, Tensor Map Object Management).
        if (reinterpret_cast<uintptr_t>(map) % 64 || reinterpret_cast<uintptr_t>(data) % 16)
            return CUDA_ERROR_INVALID_VALUE;
        if (type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || rank != 3 ||
            interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || swizzle != CU_TENSOR_MAP_SWIZZLE_128B ||
            fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
            throw Fault("cuTensorMapEncodeTiled: a kind of map that the emulator does not know");
        if (chip().major < 9) return CUDA_ERROR_NOT_SUPPORTED;
        for (cuuint32_t n = 0; n < rank; n++)
            if (!sizes[n] || sizes[n] > uint64_t{1} << 32 || !box[n] || box[n] > 256 || steps[n] != 1)
                return CUDA_ERROR_INVALID_VALUE;
        for (cuuint32_t n = 0; n + 1 < rank; n++)
            if (strides[n] % 16 || strides[n] >= uint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
        if (box[0] * 2 > 128) return CUDA_ERROR_INVALID_VALUE;
        TensorMapBits bits{TensorMapBits::kMagic,
                           reinterpret_cast<uint64_t>(data),
                           {sizes[0], sizes[1], sizes[2]},
                           {strides[0], strides[1]},
                           {box[0], box[1], box[2]}};
        memset(static_cast<void*>(map), 0, sizeof *map);
        memcpy(static_cast<void*>(map), &bits, sizeof bits);
        return CUDA_SUCCESS;
    });
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
    const bool known = std::string(name) == "cuTensorMapEncodeTiled";
    *function = known ? reinterpret_cast<void*>(encode_tiled) : nullptr;
    if (found) *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

// --- Memory.

cudaError_t cudaMalloc(void** p, size_t bytes) {
    return call([&] {
        device().not_while_recording("cudaMalloc");
        *p = device().memory.allocate(bytes);
        return *p ? cudaSuccess : cudaErrorMemoryAllocation;
    });
}
cudaError_t cudaFree(void* p) {
    return call([&] {
        if (!p) return;
        device().wait();  // as CUDA does
        device().memory.free(p);
    });
}
cudaError_t cudaMallocHost(void** p, size_t bytes) {
    return call([&] {
        device().not_while_recording("cudaMallocHost");
        if (device().memory.pinned() + bytes > most_pinned()) return cudaErrorMemoryAllocation;
        *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
        if (!*p) return cudaErrorMemoryAllocation;
        device().memory.add_pinned(*p, bytes);
        return cudaSuccess;
    });
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return cudaMallocHost(p, bytes); }
cudaError_t cudaFreeHost(void* p) {
    return call([&] {
        if (!p) return;
        device().wait();
        if (!device().memory.remove_pinned(p)) throw Fault("cudaFreeHost of what is not pinned");
        free(p);
    });
}
cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned flags) {
    return call([&] {
        device().not_while_recording("cudaHostRegister");
        if (flags != cudaHostRegisterDefault) throw Fault("cudaHostRegister with flags");
        if (device().memory.is_pinned(p, 1)) return cudaErrorHostMemoryAlreadyRegistered;
        if (device().memory.pinned() + bytes > most_pinned()) return cudaErrorMemoryAllocation;
        device().memory.add_pinned(p, bytes, true);
        return cudaSuccess;
    });
}
cudaError_t cudaHostUnregister(void* p) {
    return call([&] {
        device().wait();
        if (!device().memory.remove_pinned(p)) throw Fault("cudaHostUnregister of what is not pinned");
    });
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
    return call([&] {
        *total = chip_memory();
        *free_bytes = chip_memory() - device().memory.used();
    });
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t s) {
    return call([&] { copy(to, bytes, from, bytes, bytes, 1, stream_of(s), "cudaMemcpyAsync"); });
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    return call([&] {
        copy(to, bytes, from, bytes, bytes, 1, device().default_stream(), "cudaMemcpy");
        device().wait(device().default_stream());
    });
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t bytes,
                              size_t rows, cudaMemcpyKind, cudaStream_t s) {
    return call([&] {
        if (bytes > to_pitch || bytes > from_pitch) return cudaErrorInvalidValue;
        if (std::max(to_pitch, from_pitch) > INT32_MAX) return cudaErrorInvalidPitchValue;
        copy(to, to_pitch, from, from_pitch, bytes, rows, stream_of(s), "cudaMemcpy2DAsync");
        return cudaSuccess;
    });
}
cudaError_t cudaMemsetAsync(void* p, int byte, size_t bytes, cudaStream_t s) {
    return call([&] {
        if (!bytes) return;
        device().memory.check_bounds(p, bytes);
        device().queue(stream_of(s), {"cudaMemsetAsync", [=](const Work& work) {
                                          if (!byte && device().memory.zero_whole(&work, p, bytes)) return;
                                          device().writes(work, p, bytes);
                                          memset(device().memory.bytes_at(p), byte, bytes);
                                      }});
    });
}
cudaError_t cudaMemset(void* p, int byte, size_t bytes) {
    if (guarded([&] {
            device().not_while_recording("cudaMemset");
            return !byte && device().memory.zero_whole(nullptr, p, bytes);
        }))
        return cudaSuccess;
    return cudaMemsetAsync(p, byte, bytes, nullptr);
}

// --- Streams, events, graphs.

cudaError_t cudaStreamCreate(cudaStream_t* s) {
    return call([&] { *s = reinterpret_cast<cudaStream_t>(device().create_stream()); });
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {
    return call([&] { device().destroy_stream(stream_of(s)); });
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    static const int error = atoi(environment("GPU_ERROR", "0").c_str());
    if (error) return static_cast<cudaError_t>(error);
    return call([&] { device().wait(stream_of(s)); });
}
cudaError_t cudaDeviceSynchronize() {
    return call([&] { device().wait(); });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    return call([&] { device().wait(stream_of(s), event_of(e)); });
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
    return *e = reinterpret_cast<cudaEvent_t>(new Event), cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
    return call([&] {
        if (event_of(e)->recorded) device().wait(event_of(e));
        delete event_of(e);
    });
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    return call([&] { device().record(event_of(e), stream_of(s)); });
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    return call([&] { device().wait(event_of(e)); });
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
    bool happened = false;
    const cudaError_t status = call([&] { happened = device().has_happened(event_of(e)); });
    return status == cudaSuccess && !happened ? cudaErrorNotReady : status;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t a, cudaEvent_t b) {
    return call([&] {
        device().wait(event_of(a));
        device().wait(event_of(b));
        *milliseconds = static_cast<float>(event_of(b)->milliseconds - event_of(a)->milliseconds);
    });
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
    return call([&] {
        if (stream_of(s) == device().default_stream()) throw Fault("the default stream cannot be captured");
        if (stream_of(s)->recording) throw Fault("a stream is captured twice");
        stream_of(s)->recording = new Recording;
    });
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) {
    return call([&] {
        if (!stream_of(s)->recording) throw Fault("the end of a capture that was not begun");
        *g = reinterpret_cast<cudaGraph_t>(stream_of(s)->recording);
        stream_of(s)->recording = nullptr;
    });
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long) {
    return *e = reinterpret_cast<cudaGraphExec_t>(new Recording(*reinterpret_cast<Recording*>(g))),
           cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t* nodes, size_t* count) {
    return call([&] {
        if (nodes) throw Fault("only how many nodes a graph has is known here");
        *count = reinterpret_cast<Recording*>(g)->tasks.size();
    });
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) {
    delete reinterpret_cast<Recording*>(g);
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) {
    return call([&] {
        device().wait();
        delete reinterpret_cast<Recording*>(e);
    });
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) {
    return call([&] { device().launch(*reinterpret_cast<Recording*>(e), stream_of(s)); });
}

}  // extern "C"
