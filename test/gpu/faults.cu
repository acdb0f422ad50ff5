// faults.cu - programs with one fault each, which the emulator must find and name, and the same programs
// without it.
//
//   faults NAME right|wrong     exits with 0 if the result is right, 1 if it is wrong; a fault that the
//                               emulator finds ends the process with a line of its own
#include <cublasLt.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "llmc/hopper.cuh"
#include "llmc/mma.cuh"
#include "test/kernel_test.h"

namespace {

// Device memory with floats 0, 1, 2, ...
template <class T>
T* numbers(int count) {
    std::vector<T> host(static_cast<size_t>(count));
    for (int i = 0; i < count; i++) host[static_cast<size_t>(i)] = from_float<T>(static_cast<float>(i % 97));
    T* p = nullptr;
    CUDA_CHECK(cudaMalloc(&p, host.size() * sizeof(T)));
    CUDA_CHECK(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}
template <class T>
T* room(int count) {
    T* p = nullptr;
    CUDA_CHECK(cudaMalloc(&p, static_cast<size_t>(count) * sizeof(T)));
    return p;
}
std::vector<float> floats_of(const float* p, int count) {
    std::vector<float> host(static_cast<size_t>(count));
    CUDA_CHECK(cudaMemcpy(host.data(), p, host.size() * sizeof(float), cudaMemcpyDeviceToHost));
    return host;
}
bool is(const float* p, int count, const std::function<float(int)>& expected) {
    const std::vector<float> found = floats_of(p, count);
    for (int i = 0; i < count; i++)
        if (found[static_cast<size_t>(i)] != expected(i)) return false;
    return true;
}

template <class Kernel>
bool of_threads(Kernel kernel, int blocks, int threads, const std::function<float(int)>& expected,
                int count) {
    float* out = room<float>(count);
    kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads)>>>(out);
    return is(out, count, expected);
}
float itself(int i) { return static_cast<float>(i); }

// --- Threads of a block.

template <bool kWrong>
__global__ void warp_exchange(float* out) {
    __shared__ float part[32];
    part[threadIdx.x] = static_cast<float>(threadIdx.x);
    if (!kWrong) __syncwarp();
    out[threadIdx.x] = part[threadIdx.x ^ 1];
}
template <bool kWrong>
__global__ void block_exchange(float* out) {
    __shared__ float part[128];
    part[threadIdx.x] = static_cast<float>(threadIdx.x);
    if (!kWrong) __syncthreads();
    out[threadIdx.x] = part[threadIdx.x ^ 64];
}
// The second use of a buffer begins before all have read the first.
template <bool kWrong>
__global__ void reused_buffer(float* out) {
    __shared__ float part[64];
    float sum = 0;
    for (int round = 0; round < 2; round++) {
        part[threadIdx.x] = static_cast<float>(threadIdx.x + round);
        __syncthreads();
        sum += part[threadIdx.x ^ 32];
        if (!kWrong) __syncthreads();
    }
    out[threadIdx.x] = sum;
}
template <bool kWrong>
__global__ void barrier_in_a_branch(float* out) {
    if (!kWrong || threadIdx.x < 16) __syncthreads();
    __syncthreads();
    out[threadIdx.x] = 1;
}
template <bool kWrong>
__global__ void shuffle_of_some(float* out) {
    float x = static_cast<float>(threadIdx.x);
    if (threadIdx.x < 16) x = __shfl_sync(0x0000ffffu, x, kWrong ? 20 : 4);
    out[threadIdx.x] = x;
}
template <bool kWrong>
__global__ void blocks_share(float* out) {
    if (threadIdx.x == 0) out[kWrong ? 0 : blockIdx.x] = static_cast<float>(blockIdx.x);
}
template <bool kWrong>
__global__ void never_written(float* out, const float* in) {
    if (!kWrong || threadIdx.x < 31) out[threadIdx.x] = in[threadIdx.x];
    __syncwarp();
    out[threadIdx.x] += 1;
}
template <bool kWrong>
__global__ void past_the_end(float* out, const float* in, int n) {
    const int i = static_cast<int>(threadIdx.x) + 1;
    out[threadIdx.x] = kWrong || i < n ? in[i] : 0;
}
template <bool kWrong>
__global__ void vector_load(float* out, const float* in) {
    const float4 v = *reinterpret_cast<const float4*>(in + 4 * threadIdx.x + (kWrong ? 2 : 0));
    out[threadIdx.x] = v.x;
}
template <bool kWrong>
__global__ void copy_of_threads(float* out, const float* in) {
    __shared__ __align__(16) float part[128];
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(part + 4 * threadIdx.x));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(in + 4 * threadIdx.x) : "memory");
    if (!kWrong) asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    out[threadIdx.x] = part[4 * (threadIdx.x ^ 1)];
}
__global__ void shared_of(float* out) {
    DYNAMIC_SHARED(float, part);
    part[threadIdx.x] = 1;
    out[threadIdx.x] = part[threadIdx.x];
}

// d (16 x 8) = a (16 x 16) b (16 x 8), b stored [k][n].
enum class Planted { None, NotTransposed, FragmentsSwapped };
template <Planted kFault>
__global__ void small_product(float* d, const bf16* a, const bf16* b) {
    __shared__ __align__(16) bf16 tile_a[16 * 24], tile_b[16 * 24];
    for (int i = lane(); i < 256; i += 32) {
        tile_a[i / 16 * 24 + i % 16] = a[i];
        tile_b[i / 16 * 24 + i % 16] = b[i];
    }
    __syncwarp();
    FragmentA<bf16> fa[1] = {load_a(tile_a, 24)};
    if (kFault == Planted::FragmentsSwapped) {
        const uint32_t r = fa[0].r[1];
        fa[0].r[1] = fa[0].r[2];
        fa[0].r[2] = r;
    }
    uint32_t r0, r1, r2, r3;
    load_matrices<kFault != Planted::NotTransposed>(r0, r1, r2, r3,
                                                    tile_b + lane() % 16 * 24 + lane() / 16 * 8);
    float sum[1][1][4] = {};
    const FragmentB<bf16> fb[1] = {{{r0, r1}}};
    mma_tiles(sum, fa, fb);
    const int g = lane() / 4, t = lane() % 4;
    for (int e = 0; e < 4; e++) d[(g + 8 * (e >> 1)) * 8 + 2 * t + (e & 1)] = sum[0][0][e];
}
template <Planted kFault>
bool product_is_right() {
    bf16 *a = numbers<bf16>(256), *b = numbers<bf16>(256);
    float* d = room<float>(128);
    small_product<kFault><<<1, 32>>>(d, a, b);
    return is(d, 128, [](int i) {
        float sum = 0;
        for (int k = 0; k < 16; k++)
            sum += static_cast<float>((i / 8 * 16 + k) % 97) * static_cast<float>((k * 16 + i % 8) % 97);
        return sum;
    });
}

// --- Hopper.

struct Maps {
    TensorMap map;
};
enum class Tile { Right, NoPhase, NoFence, NoProxyFence, NoBarrierFence, NoWait };
// One warpgroup: s (64 x 64) = a a^T of a 64 x 64 tile, which TMA loads, or which its threads copy.
template <Tile kFault>
__global__ void __launch_bounds__(128)
    tile_product(float* out, const bf16* a, const __grid_constant__ Maps maps) {
#if defined(HOPPER_CODE)
    using Square = SwizzledTile<64, 64>;
    DYNAMIC_SHARED(unsigned char, shared);
    const uint32_t tile = (shared_address(shared) + 1023) / 1024 * 1024, barrier = tile + Square::kBytes;
    if (kFault == Tile::NoProxyFence) {  // by threads, laid out as TMA would
        unsigned char* bytes = shared + (tile - shared_address(shared));
        for (int i = static_cast<int>(threadIdx.x); i < 64 * 8; i += 128)
            *reinterpret_cast<uint4*>(bytes + (i / 8 * 128 + (i % 8 ^ i / 8 % 8) * 16)) =
                *reinterpret_cast<const uint4*>(a + i * 8);
        __syncthreads();
    } else {
        if (threadIdx.x == 0) {
            barrier_init(barrier, 1);
            if (kFault != Tile::NoBarrierFence) barriers_are_made();
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            barrier_arrive_expecting(barrier, Square::kBytes);
            start_load<Square>(tile, maps.map, barrier, 0, 0, 0);
        }
        barrier_wait(barrier, kFault == Tile::NoPhase ? 1 : 0);
    }
    float s[1][8][4];
    UNROLL for (int j = 0; j < 8; j++) UNROLL for (int e = 0; e < 4; e++) s[0][j][e] =
        static_cast<float>(threadIdx.x) * out[0];
    fence_registers(s);
    if (kFault != Tile::NoFence) wgmma_fence();
    UNROLL for (int k = 0; k < 4; k++)
        wgmma_by_rows(s, Square::by_rows(tile, 0, k), Square::by_rows(tile, 0, k), true);
    wgmma_commit();
    if (kFault != Tile::NoWait) wgmma_wait<0>();
    const int g = lane() / 4, t = lane() % 4;
    UNROLL for (int j = 0; j < 8; j++) UNROLL for (int e = 0; e < 4; e++)
        out[1 + (16 * warp() + g + 8 * (e >> 1)) * 64 + 8 * j + 2 * t + (e & 1)] = s[0][j][e];
    if (kFault == Tile::NoWait) wgmma_wait<0>();
#endif
}
template <Tile kFault>
bool tile_is_right() {
    bf16* a = numbers<bf16>(64 * 64);
    float* out = room<float>(1 + 64 * 64);
    CUDA_CHECK(cudaMemset(out, 0, (1 + 64 * 64) * sizeof(float)));
    const Maps maps = {tensor_map(a, 64, 64, 1, 64, 64 * 64, 64)};
    tile_product<kFault><<<1, 128, 10 * 1024>>>(out, a, maps);
    return is(out + 1, 64 * 64, [](int i) {
        float sum = 0;
        for (int k = 0; k < 64; k++)
            sum += static_cast<float>((i / 64 * 64 + k) % 97) * static_cast<float>((i % 64 * 64 + k) % 97);
        return sum;
    });
}

// Two warpgroups take the registers that a third one releases, as in the attention kernels: from 168 per
// thread, one goes to 24 and two go to 240.
enum class Registers { Right, NotGivenBack, TooMany, OneWarp };
template <Registers kFault>
__global__ void __launch_bounds__(384, 1) moved_registers(float* out) {
#if defined(HOPPER_CODE)
    if (threadIdx.x >= 128)
        setmaxnreg_inc<kFault == Registers::TooMany ? 248 : 240>();
    else if (kFault != Registers::NotGivenBack && (kFault != Registers::OneWarp || threadIdx.x < 32))
        setmaxnreg_dec<24>();
    out[threadIdx.x] = static_cast<float>(threadIdx.x);
#endif
}
template <Registers kFault>
bool registers_are_right(bool wrong) {
    return of_threads(wrong ? moved_registers<kFault> : moved_registers<Registers::Right>, 1, 384, itself,
                      384);
}

// --- The host.

__global__ void add_one(float* x) { x[threadIdx.x] += 1; }

cudaStream_t new_stream() {
    cudaStream_t s;
    CUDA_CHECK(cudaStreamCreate(&s));
    return s;
}
// Records what `f` does, together with a launch, and replays it.
bool recorded(const std::function<void(cudaStream_t)>& f) {
    float* x = numbers<float>(32);
    const cudaStream_t s = new_stream();
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    CUDA_CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    add_one<<<1, 32, 0, s>>>(x);
    f(s);
    CUDA_CHECK(cudaStreamEndCapture(s, &graph));
    CUDA_CHECK(cudaGraphInstantiateWithFlags(&ready, graph, 0));
    CUDA_CHECK(cudaGraphLaunch(ready, s));
    CUDA_CHECK(cudaStreamSynchronize(s));
    return is(x, 32, [](int i) { return static_cast<float>(i + 1); });
}
bool stale_parameter(bool wrong) {
    float *x = numbers<float>(32), *y = numbers<float>(32);
    const cudaStream_t s = new_stream();
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    CUDA_CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    add_one<<<1, 32, 0, s>>>(x);
    CUDA_CHECK(cudaStreamEndCapture(s, &graph));
    CUDA_CHECK(cudaGraphInstantiateWithFlags(&ready, graph, 0));
    CUDA_CHECK(cudaFree(wrong ? x : y));
    CUDA_CHECK(cudaGraphLaunch(ready, s));
    CUDA_CHECK(cudaStreamSynchronize(s));
    return true;
}
bool pinned_source(bool wrong) {
    float* host = nullptr;
    CUDA_CHECK(cudaMallocHost(&host, 128));
    for (int i = 0; i < 32; i++) host[i] = static_cast<float>(i);
    float* x = room<float>(32);
    const cudaStream_t s = new_stream();
    CUDA_CHECK(cudaMemcpyAsync(x, host, 128, cudaMemcpyHostToDevice, s));
    if (!wrong) CUDA_CHECK(cudaStreamSynchronize(s));
    host[3] = 100;
    CUDA_CHECK(cudaStreamSynchronize(s));
    return is(x, 32, [](int i) { return static_cast<float>(i); });
}
bool two_streams(bool wrong) {
    float* x = numbers<float>(32);
    const cudaStream_t a = new_stream(), b = new_stream();
    cudaEvent_t done;
    CUDA_CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    add_one<<<1, 32, 0, a>>>(x);
    CUDA_CHECK(cudaEventRecord(done, a));
    if (!wrong) CUDA_CHECK(cudaStreamWaitEvent(b, done, 0));
    add_one<<<1, 32, 0, b>>>(x);
    CUDA_CHECK(cudaDeviceSynchronize());
    return is(x, 32, [](int i) { return static_cast<float>(i + 2); });
}
bool freed(bool wrong) {
    float* x = numbers<float>(32);
    if (wrong) CUDA_CHECK(cudaFree(x));
    add_one<<<1, 32>>>(x);
    CUDA_CHECK(cudaDeviceSynchronize());
    return true;
}
// Kernels may use a host's array only if it is pinned. This one is not, and it is not in the device's memory.
bool host_pointer(bool wrong) {
    static float host[32];
    float* x = numbers<float>(32);
    add_one<<<1, 32>>>(wrong ? host : x);
    CUDA_CHECK(cudaDeviceSynchronize());
    return true;
}

enum class Call { Right, BiasType, Leading, Workspace, OtherProduct, Alignment };
void cublas(cublasStatus_t status) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    fprintf(stderr, "refused: %s\n", cublasLtGetStatusString(status));
    exit(3);
}
// 32 x 32 bf16 with a bias.
bool product_with_bias(Call fault) {
    bf16 *a = numbers<bf16>(32 * 40), *b = numbers<bf16>(32 * 40), *out = room<bf16>(32 * 40),
         *bias = numbers<bf16>(32);
    char* workspace = room<char>(1 << 20);
    cublasLtHandle_t handle;
    cublas(cublasLtCreate(&handle));
    cublasLtMatmulDesc_t d;
    cublas(cublasLtMatmulDescCreate(&d, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const cudaDataType_t bias_type = fault == Call::BiasType ? CUDA_R_32F : CUDA_R_16BF;
    cublas(cublasLtMatmulDescSetAttribute(d, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    cublas(cublasLtMatmulDescSetAttribute(d, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
    cublas(
        cublasLtMatmulDescSetAttribute(d, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type, sizeof bias_type));
    cublasLtMatrixLayout_t la, lb, lo;
    cublas(cublasLtMatrixLayoutCreate(&la, CUDA_R_16BF, 32, 32, fault == Call::Leading ? 24 : 32));
    cublas(cublasLtMatrixLayoutCreate(&lb, CUDA_R_16BF, 32, 32, 32));
    cublas(cublasLtMatrixLayoutCreate(&lo, CUDA_R_16BF, 32, 32, 32));
    cublasLtMatmulPreference_t preference;
    cublas(cublasLtMatmulPreferenceCreate(&preference));
    const size_t most = 1 << 20;
    cublas(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most,
                                                sizeof most));
    cublasLtMatmulHeuristicResult_t results[4];
    int count = 0;
    cublas(cublasLtMatmulAlgoGetHeuristic(handle, d, la, lb, lo, lo, preference, 4, results, &count));
    const float one = 1, zero = 0;
    if (fault == Call::OtherProduct) cublas(cublasLtMatrixLayoutCreate(&lo, CUDA_R_16BF, 32, 32, 40));
    cublas(cublasLtMatmul(handle, d, &one, a + (fault == Call::Alignment ? 8 : 0), la, b, lb, &zero, out, lo,
                          out, lo, &results[count - 1].algo, workspace + (fault == Call::Workspace ? 16 : 0),
                          most / 2, nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
    return true;
}

template <class Kernel, class... A>
bool of_numbers(Kernel kernel, const std::function<float(int)>& expected, A... more) {
    float *in = numbers<float>(128), *out = room<float>(32);
    kernel<<<1, 32>>>(out, in, more...);
    return is(out, 32, expected);
}
const std::map<std::string, std::function<bool(bool)>> kFaults = {
    {"syncwarp",
     [](bool w) {
         return of_threads(
             w ? warp_exchange<true> : warp_exchange<false>, 1, 32, [](int i) { return itself(i ^ 1); }, 32);
     }},
    {"syncthreads",
     [](bool w) {
         return of_threads(
             w ? block_exchange<true> : block_exchange<false>, 1, 128, [](int i) { return itself(i ^ 64); },
             128);
     }},
    {"reused_buffer",
     [](bool w) {
         return of_threads(
             w ? reused_buffer<true> : reused_buffer<false>, 1, 64,
             [](int i) { return 2 * itself(i ^ 32) + 1; }, 64);
     }},
    {"barrier_in_a_branch",
     [](bool w) {
         return of_threads(
             w ? barrier_in_a_branch<true> : barrier_in_a_branch<false>, 1, 32, [](int) { return 1.f; }, 32);
     }},
    {"shuffle_of_some",
     [](bool w) {
         return of_threads(
             w ? shuffle_of_some<true> : shuffle_of_some<false>, 1, 32,
             [](int i) { return i < 16 ? 4.f : itself(i); }, 32);
     }},
    {"blocks_share",
     [](bool w) { return of_threads(w ? blocks_share<true> : blocks_share<false>, 4, 32, itself, 4); }},
    {"never_written",
     [](bool w) {
         return of_numbers(w ? never_written<true> : never_written<false>,
                           [](int i) { return itself(i) + 1; });
     }},
    {"past_the_end",
     [](bool w) {
         std::vector<float> host(32);
         for (int i = 0; i < 32; i++) host[static_cast<size_t>(i)] = itself(i);
         const DeviceArray<float> in(host);  // as in the tests of kernels
         float* out = room<float>(32);
         (w ? past_the_end<true> : past_the_end<false>)<<<1, 32>>>(out, in.data(), 32);
         return is(out, 32, [](int i) { return i < 31 ? itself(i + 1) : 0; });
     }},
    {"vector_load",
     [](bool w) {
         return of_numbers(w ? vector_load<true> : vector_load<false>,
                           [](int i) { return itself(4 * i % 97); });
     }},
    {"copy_not_waited_for",
     [](bool w) {
         return of_numbers(w ? copy_of_threads<true> : copy_of_threads<false>,
                           [](int i) { return itself(4 * (i ^ 1) % 97); });
     }},
    {"shared_not_opted_in",
     [](bool w) {
         float* out = room<float>(32);
         if (!w)
             CUDA_CHECK(
                 cudaFuncSetAttribute(shared_of, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10));
         shared_of<<<1, 32, 64 << 10>>>(out);
         return is(out, 32, [](int) { return 1.f; });
     }},
    {"not_transposed",
     [](bool w) {
         return w ? product_is_right<Planted::NotTransposed>() : product_is_right<Planted::None>();
     }},
    {"fragments_swapped",
     [](bool w) {
         return w ? product_is_right<Planted::FragmentsSwapped>() : product_is_right<Planted::None>();
     }},
    {"mbarrier_phase",
     [](bool w) { return w ? tile_is_right<Tile::NoPhase>() : tile_is_right<Tile::Right>(); }},
    {"wgmma_fence", [](bool w) { return w ? tile_is_right<Tile::NoFence>() : tile_is_right<Tile::Right>(); }},
    {"proxy_fence",
     [](bool w) { return w ? tile_is_right<Tile::NoProxyFence>() : tile_is_right<Tile::Right>(); }},
    {"barrier_fence",
     [](bool w) { return w ? tile_is_right<Tile::NoBarrierFence>() : tile_is_right<Tile::Right>(); }},
    {"registers_not_given_back", registers_are_right<Registers::NotGivenBack>},
    {"registers_beyond_the_pool", registers_are_right<Registers::TooMany>},
    {"registers_of_one_warp", registers_are_right<Registers::OneWarp>},
    {"wgmma_wait", [](bool w) { return w ? tile_is_right<Tile::NoWait>() : tile_is_right<Tile::Right>(); }},
    {"capture_sync",
     [](bool w) {
         return recorded([w](cudaStream_t s) {
             if (w) cudaStreamSynchronize(s);
         });
     }},
    {"capture_malloc",
     [](bool w) {
         return recorded([w](cudaStream_t) {
             void* p;
             if (w) cudaMalloc(&p, 16);
         });
     }},
    {"capture_default_stream",
     [](bool w) {
         float* x = numbers<float>(32);
         return recorded([w, x](cudaStream_t s) { add_one<<<1, 32, 0, w ? nullptr : s>>>(x); });
     }},
    {"stale_parameter", stale_parameter},
    {"pinned_source", pinned_source},
    {"event_wait", two_streams},
    {"freed", freed},
    {"host_pointer", host_pointer},
    {"bias_type", [](bool w) { return product_with_bias(w ? Call::BiasType : Call::Right); }},
    {"leading_dimension", [](bool w) { return product_with_bias(w ? Call::Leading : Call::Right); }},
    {"workspace", [](bool w) { return product_with_bias(w ? Call::Workspace : Call::Right); }},
    {"other_product", [](bool w) { return product_with_bias(w ? Call::OtherProduct : Call::Right); }},
    {"operand_alignment", [](bool w) { return product_with_bias(w ? Call::Alignment : Call::Right); }},
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        for (const auto& [name, run] : kFaults) printf("%s\n", name.c_str());
        return 0;
    }
    const bool right = kFaults.at(argv[1])(!strcmp(argv[2], "wrong"));
    CUDA_CHECK(cudaDeviceSynchronize());
    if (!right) fprintf(stderr, "the result is wrong\n");
    return right ? 0 : 1;
}
