// matmul_cublaslt.h - matmul.h on a GPU: cuBLASLt with bias, GELU and its gradient fused into the product.
//
// cuBLASLt thinks column-major: row-major out = a b is column-major out^T = b^T a^T, so b comes first. The
// algorithm is the first that the library's heuristics name for a shape and alignment, looked up once and
// kept, so that the same product has the same bits every time.
#pragma once

#include <cublasLt.h>

#include <array>
#include <map>

inline void cublas_check(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS) fail("cuBLASLt: %s: %s", what, cublasLtGetStatusString(status));
}
#define CUBLAS_CHECK(call) cublas_check((call), #call)

constexpr size_t kCublasWorkspace = 32 << 20;  // what NVIDIA advises for Hopper

namespace cublaslt {
inline cublasLtHandle_t handle() {
    static const cublasLtHandle_t h = [] {
        cublasLtHandle_t created;
        CUBLAS_CHECK(cublasLtCreate(&created));
        return created;
    }();
    return h;
}

template <class T>
constexpr cudaDataType_t dtype = std::is_same_v<T, float> ? CUDA_R_32F : CUDA_R_16BF;

// The largest power of two up to 256 that divides the address: heuristics may use it for wider loads.
inline uint32_t alignment(const void* p) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(p);
    return static_cast<uint32_t>(std::min<uintptr_t>(256, address & (~address + 1)));
}

// A product described to the library, with the algorithm chosen for it.
struct Described {
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t b, a, out;
    cublasLtMatmulAlgo_t algorithm;
};

template <class V>
void set(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t attribute, const V& value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(d, attribute, &value, sizeof value));
}

inline cublasLtMatrixLayout_t layout(cudaDataType_t type, int64_t rows, int64_t columns, int64_t leading) {
    cublasLtMatrixLayout_t l;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&l, type, static_cast<uint64_t>(rows),
                                            static_cast<uint64_t>(columns), leading));
    return l;
}

inline cublasLtEpilogue_t epilogue(bool bias, bool gelu, bool dgelu) {
    if (dgelu) return CUBLASLT_EPILOGUE_DGELU;
    if (gelu) return bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

template <class T, class Out>
Described describe(const MatmulShape& s, const MatmulOptions<T>& o, bool dgelu,
                   const std::array<uint32_t, 4>& aligned) {
    Described d;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&d.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(d.operation, CUBLASLT_MATMUL_DESC_TRANSA, o.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(d.operation, CUBLASLT_MATMUL_DESC_TRANSB, o.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(d.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue(o.bias != nullptr, o.gelu, dgelu));
    if (o.bias) set(d.operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, dtype<T>);
    if (dgelu) {
        set(d.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, s.n);
        set(d.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, dtype<T>);
    }
    const int64_t a_row = o.a_row ? o.a_row : o.transpose_a ? s.m : s.k;
    d.b = o.transpose_b ? layout(dtype<T>, s.k, s.n, s.k) : layout(dtype<T>, s.n, s.k, s.n);
    d.a = o.transpose_a ? layout(dtype<T>, s.m, s.k, a_row) : layout(dtype<T>, s.k, s.m, a_row);
    d.out = layout(dtype<Out>, s.n, s.m, s.n);

    cublasLtMatmulPreference_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kCublasWorkspace);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, aligned[0]);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, aligned[1]);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, aligned[2]);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, aligned[2]);
    cublasLtMatmulHeuristicResult_t found = {};
    int count = 0;
    CUBLAS_CHECK(cublasLtMatmulAlgoGetHeuristic(handle(), d.operation, d.b, d.a, d.out, d.out, preference, 1,
                                                &found, &count));
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    if (count == 0)
        fail("cuBLASLt has no algorithm for a product of %lld x %lld x %lld", static_cast<long long>(s.m),
             static_cast<long long>(s.n), static_cast<long long>(s.k));
    d.algorithm = found.algo;
    return d;
}
}  // namespace cublaslt

template <class T, class Out>
void matmul(Arena& arena, Stream stream, Tensor<Out>& out, const Tensor<T>& a, const Tensor<T>& b,
            const MatmulOptions<T>& options) {
    using namespace cublaslt;
    const MatmulShape s = matmul_shape(out, a, b, options);
    const Operation operation = matmul_operation(s, options);
    void* workspace = arena.workspace(kCublasWorkspace);
    // The fused gradient wants rows of its input at 16-byte steps; other widths go through the kernel.
    const bool dgelu = options.gelu_input && s.n * static_cast<int64_t>(sizeof(T)) % 16 == 0;
    if (!simt::launches_off) {
        const std::array<uint32_t, 4> aligned = {alignment(b.data()), alignment(a.data()),
                                                 alignment(out.data()),
                                                 options.bias ? alignment(options.bias->data()) : 256};
        using Key = std::array<int64_t, 14>;
        static std::map<Key, Described> known;
        const Key key = {s.m,
                         s.n,
                         s.k,
                         options.transpose_a,
                         options.transpose_b,
                         options.accumulate,
                         options.bias != nullptr,
                         options.gelu,
                         dgelu,
                         options.a_row,
                         aligned[0],
                         aligned[1],
                         aligned[2],
                         aligned[3]};
        auto it = known.find(key);
        if (it == known.end()) it = known.emplace(key, describe<T, Out>(s, options, dgelu, aligned)).first;
        Described& d = it->second;
        if (options.bias)
            set(d.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                static_cast<const void*>(options.bias->data()));
        if (dgelu)
            set(d.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                static_cast<const void*>(options.gelu_input->data()));
        const float alpha = 1.f, beta = options.accumulate ? 1.f : 0.f;
        CUBLAS_CHECK(cublasLtMatmul(handle(), d.operation, &alpha, b.data(), d.b, a.data(), d.a, &beta,
                                    out.data(), d.out, out.data(), d.out, &d.algorithm, workspace,
                                    kCublasWorkspace, stream));
    }
    if constexpr (std::is_same_v<T, Out>)
        if (options.gelu_input && !dgelu) gelu_backward(out, out, *options.gelu_input, stream);
}
