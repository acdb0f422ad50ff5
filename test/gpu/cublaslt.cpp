// cublaslt.cpp - cuBLASLt's matrix products on the emulated device, as far as matmul_cublaslt.h uses them:
// bf16 and fp32, also in TF32, added up in fp32, with epilogues. What the documentation calls unsupported is
// refused in the way that it says, and what it leaves undefined is a fault.
//
// GPU_REFUSE=bias,gelu,dgelu,bgrad,plain names epilogues for which it has no algorithm.
#include <cublasLt.h>
#include <dnnl.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>

#include "test/gpu/device.h"
#include "test/gpu/hopper.h"

using namespace gpu;

namespace {

struct Layout {
    cudaDataType type;
    uint64_t rows, columns;
    int64_t leading;
    size_t element() const { return type == CUDA_R_32F ? 4 : 2; }
};
struct Description {
    cublasOperation_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    const void* bias = nullptr;
    const void* aux = nullptr;
    int64_t aux_leading = 0;
    int bias_type = -1;
    bool tf32 = false;
};
struct Preference {
    size_t workspace = 0;
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
    uint32_t aligned[4] = {256, 256, 256, 256};  // A, B, C, D
};
// The content of a cublasLtMatmulAlgo_t here.
struct Algorithm {
    static constexpr uint64_t kMagic = 0x6d68746972676c61;
    uint64_t magic, problem, workspace;
    uint32_t aligned[4];
    uint32_t splits;  // parts of k that are added up one after the other
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

template <class F>
cublasStatus_t guarded(F&& f) {
    const std::lock_guard lock(device_mutex());
    try {
        return f();
    } catch (const std::exception& e) {
        end_process(Fault(std::string("cuBLASLt: ") + e.what()));
    }
}

// Everything that an algorithm is made for: it is refused for another problem.
struct Problem {
    const Description& d;
    const Layout &a, &b, &c, &out;
    uint64_t m = 0, n = 0, k = 0;

    // Whether the layouts fit together ("cublasLtMatmul").
    bool is_valid() {
        m = d.transpose_a == CUBLAS_OP_N ? a.rows : a.columns;
        k = d.transpose_a == CUBLAS_OP_N ? a.columns : a.rows;
        n = d.transpose_b == CUBLAS_OP_N ? b.columns : b.rows;
        const uint64_t k_of_b = d.transpose_b == CUBLAS_OP_N ? b.rows : b.columns;
        for (const Layout* l : {&a, &b, &c, &out})
            if (l->leading < static_cast<int64_t>(l->rows) || !l->rows || !l->columns) return false;
        if (k != k_of_b || out.rows != m || out.columns != n || c.rows != m || c.columns != n) return false;
        if (a.type != b.type || c.type != out.type) return false;
        if (out.type != a.type && !(a.type == CUDA_R_16BF && out.type == CUDA_R_32F)) return false;
        const bool has_bias = d.epilogue & CUBLASLT_EPILOGUE_BIAS || d.epilogue == CUBLASLT_EPILOGUE_BGRADA;
        if (has_bias && !d.bias) return false;
        if (d.tf32 && a.type != CUDA_R_32F) return false;
        // The bias has D's type. If D is fp32 and A is not, cuBLASLt allows A's type too, which is refused
        // here.
        const int bias_type = d.bias_type < 0 ? out.type : d.bias_type;
        if (has_bias && bias_type != out.type) return false;
        if (d.epilogue == CUBLASLT_EPILOGUE_DGELU &&
            (!d.aux || d.aux_leading % 8 || d.aux_leading < static_cast<int64_t>(m)))
            return false;
        return true;
    }
    uint64_t number() const {
        uint64_t h = 1469598103934665603u;
        for (uint64_t x : {m, n, k, uint64_t(a.type), uint64_t(out.type), uint64_t(d.transpose_a),
                           uint64_t(d.transpose_b), uint64_t(d.epilogue), uint64_t(a.leading),
                           uint64_t(b.leading), uint64_t(c.leading), uint64_t(out.leading), uint64_t(d.tf32)})
            h = (h ^ x) * 1099511628211u;
        return h;
    }
    bool is_refused() const {
        static const std::string list = "," + environment("GPU_REFUSE", "") + ",";
        const auto refused = [&](const char* name) {
            return list.find("," + std::string(name) + ",") != std::string::npos;
        };
        switch (d.epilogue) {
            case CUBLASLT_EPILOGUE_DEFAULT:
                return refused("plain");
            case CUBLASLT_EPILOGUE_BIAS:
                return refused("bias");
            case CUBLASLT_EPILOGUE_GELU:
            case CUBLASLT_EPILOGUE_GELU_BIAS:
                return refused("gelu");
            case CUBLASLT_EPILOGUE_DGELU:
                return refused("dgelu");
            case CUBLASLT_EPILOGUE_BGRADA:
                return refused("bgrad");
            default:
                return true;
        }
    }
};

// The epilogues use the approximate tanh, with a relative error of up to 2^-11 ("tanh.approx.f32"). Here the
// error is at most half of that, and depends on the value.
float approximate_tanh(float u) {
    const float t = std::tanh(u);
    if (std::fabs(t) == 1) return t;
    uint32_t h = std::bit_cast<uint32_t>(u) * 2654435761u;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    return t * (1 + (static_cast<float>(h) / 4294967296.f - 0.5f) * 0x1p-11f);
}
constexpr float kRoot = 0.7978845608028654f, kCube = 0.044715f;
float gelu(float x) { return 0.5f * x * (1 + approximate_tanh(kRoot * (x + kCube * x * x * x))); }
float gelu_slope(float x) {
    const float t = approximate_tanh(kRoot * (x + kCube * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * kRoot * (1 + 3 * kCube * x * x);
}

float get(const char* p, uint64_t i, cudaDataType type) {
    if (type == CUDA_R_32F) {
        float x;
        memcpy(&x, p + 4 * i, 4);
        return x;
    }
    uint16_t bits;
    memcpy(&bits, p + 2 * i, 2);
    return from_bf16(bits);
}
void put(char* p, uint64_t i, cudaDataType type, float x) {
    if (type == CUDA_R_32F) {
        memcpy(p + 4 * i, &x, 4);
    } else {
        const uint16_t bits = to_bf16(x);
        memcpy(p + 2 * i, &bits, 2);
    }
}

// The part of an operand that TF32 keeps: a mantissa of 10 bits. A library may round to nearest. Here the
// bits that tensor cores do not read are cut off, which loses more.
float in_tf32(float x) { return std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0xffffe000u); }

// A matrix as floats, column by column, read in `work`.
std::vector<float> read_matrix(const Work& work, const void* at, const Layout& l, bool tf32) {
    std::vector<float> x(l.rows * l.columns);
    for (uint64_t j = 0; j < l.columns; j++) {
        const char* column =
            static_cast<const char*>(at) + j * static_cast<uint64_t>(l.leading) * l.element();
        device().reads(work, column, l.rows * l.element());
        const char* bytes = device().memory.bytes_at(column);
        for (uint64_t i = 0; i < l.rows; i++) {
            const float element = get(bytes, i, l.type);
            x[j * l.rows + i] = tf32 ? in_tf32(element) : element;
        }
    }
    return x;
}

// c (n, m) = b (n, k) a (k, m), row-major. With `tb` or `ta` that operand is stored transposed. The rows of
// an operand, as it is stored, are ldb or lda apart.
void multiply_floats(bool tb, bool ta, int64_t n, int64_t m, int64_t k, const float* b, int64_t ldb,
                     const float* a, int64_t lda, float* c) {
#ifdef __AVX512F__
    dnnl_sgemm(tb ? 'T' : 'N', ta ? 'T' : 'N', n, m, k, 1.f, b, ldb, a, lda, 0.f, c, m);
#else
    // Without AVX-512, oneDNN sums the last rows of a product in another order (llmc/matmul_onednn.h). In
    // blocks of 48 rows, filled up with zeros, a row has the same bits among any others.
    constexpr int64_t kBlock = 48;
    std::vector<float> rows(static_cast<size_t>(kBlock * k)), sums(static_cast<size_t>(kBlock * m));
    for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t count = std::min(kBlock, n - first);
        std::fill(rows.begin(), rows.end(), 0.f);
        for (int64_t r = 0; r < count; r++)
            for (int64_t q = 0; q < k; q++)
                rows[static_cast<size_t>(r * k + q)] = tb ? b[q * ldb + first + r] : b[(first + r) * ldb + q];
        dnnl_sgemm('N', ta ? 'T' : 'N', kBlock, m, k, 1.f, rows.data(), k, a, lda, 0.f, sums.data(), m);
        std::copy_n(sums.begin(), count * m, c + first * m);
    }
#endif
}

void multiply(const Work& work, const Description& d, const Layout& la, const Layout& lb, const Layout& lc,
              const Layout& lout, const void* a, const void* b, const void* c, void* out, float beta,
              const Algorithm& algorithm, void* workspace) {
    Problem p{d, la, lb, lc, lout};
    p.is_valid();
    const int64_t m = static_cast<int64_t>(p.m), n = static_cast<int64_t>(p.n), k = static_cast<int64_t>(p.k);
    if (algorithm.workspace) device().writes(work, workspace, algorithm.workspace);
    const std::vector<float> xa = read_matrix(work, a, la, d.tf32), xb = read_matrix(work, b, lb, d.tf32);
    // Row-major, D^T (n, m) = op(B)^T (n, k) op(A)^T (k, m), with k in as many parts as the algorithm has.
    std::vector<float> sum(p.m * p.n, 0.f), part(p.m * p.n);
    const bool ta = d.transpose_a != CUBLAS_OP_N, tb = d.transpose_b != CUBLAS_OP_N;
    for (int64_t s = 0; s < algorithm.splits; s++) {
        const int64_t from = k * s / algorithm.splits, to = k * (s + 1) / algorithm.splits;
        if (from == to) continue;
        const float* pa = xa.data() + (ta ? from : from * m);
        const float* pb = xb.data() + (tb ? from * n : from);
        multiply_floats(tb, ta, n, m, to - from, pb, tb ? n : k, pa, ta ? k : m, part.data());
        for (size_t i = 0; i < sum.size(); i++) sum[i] += part[i];
    }
    const bool has_bias = d.epilogue == CUBLASLT_EPILOGUE_BIAS || d.epilogue == CUBLASLT_EPILOGUE_GELU_BIAS;
    const bool has_gelu = d.epilogue == CUBLASLT_EPILOGUE_GELU || d.epilogue == CUBLASLT_EPILOGUE_GELU_BIAS;
    DeviceMemory& memory = device().memory;
    if (has_bias) device().reads(work, d.bias, p.m * lout.element());
    for (uint64_t j = 0; j < p.n; j++) {
        char* column = static_cast<char*>(out) + j * static_cast<uint64_t>(lout.leading) * lout.element();
        const char* before =
            static_cast<const char*>(c) + j * static_cast<uint64_t>(lc.leading) * lc.element();
        const char* aux =
            static_cast<const char*>(d.aux) + j * static_cast<uint64_t>(d.aux_leading) * lout.element();
        if (beta != 0) device().reads(work, before, p.m * lc.element());
        if (d.epilogue == CUBLASLT_EPILOGUE_DGELU) device().reads(work, aux, p.m * lout.element());
        device().writes(work, column, p.m * lout.element());
        for (uint64_t i = 0; i < p.m; i++) {
            float x = sum[j * p.m + i];
            if (beta != 0) x += beta * get(memory.bytes_at(before), i, lc.type);
            if (has_bias) x += get(memory.bytes_at(d.bias), i, lout.type);
            if (has_gelu) x = gelu(x);
            if (d.epilogue == CUBLASLT_EPILOGUE_DGELU)
                x *= gelu_slope(get(memory.bytes_at(aux), i, lout.type));
            put(memory.bytes_at(column), i, lout.type, x);
        }
    }
    if (d.epilogue == CUBLASLT_EPILOGUE_BGRADA) {  // the sums of op(A) over k
        device().writes(work, d.bias, p.m * lout.element());
        for (uint64_t i = 0; i < p.m; i++) {
            float x = 0;
            for (uint64_t q = 0; q < p.k; q++) x += xa[ta ? i * p.k + q : q * p.m + i];
            put(memory.bytes_at(d.bias), i, lout.type, x);
        }
    }
}

const Layout& layout_of(cublasLtMatrixLayout_t l) { return *reinterpret_cast<const Layout*>(l); }
Description& description_of(cublasLtMatmulDesc_t d) { return *reinterpret_cast<Description*>(d); }
Algorithm algorithm_of(const cublasLtMatmulAlgo_t* algo) {
    Algorithm a;
    memcpy(&a, algo, sizeof a);
    if (a.magic != Algorithm::kMagic) throw Fault("an algorithm that the library did not make");
    return a;
}
template <class V>
void take(V& to, const void* from, size_t bytes) {
    if (bytes != sizeof to) throw Fault("an attribute of another size");
    memcpy(static_cast<void*>(&to), from, bytes);
}

}  // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* h) {
    static int one;
    *h = reinterpret_cast<cublasLtHandle_t>(&one);
    return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
const char* cublasLtGetStatusString(cublasStatus_t s) {
    switch (s) {
        case CUBLAS_STATUS_SUCCESS:
            return "success";
        case CUBLAS_STATUS_INVALID_VALUE:
            return "an invalid value";
        case CUBLAS_STATUS_NOT_SUPPORTED:
            return "not supported";
        default:
            return "a status that the emulator does not name";
    }
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    return guarded([&] {
        const bool tf32 = compute == CUBLAS_COMPUTE_32F_FAST_TF32;
        if ((compute != CUBLAS_COMPUTE_32F && !tf32) || scale != CUDA_R_32F)
            throw Fault("a type of sums that the emulator does not know");
        *d = reinterpret_cast<cublasLtMatmulDesc_t>(new Description{.tf32 = tf32});
        return CUBLAS_STATUS_SUCCESS;
    });
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
    delete reinterpret_cast<Description*>(d);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              size_t bytes) {
    return guarded([&] {
        Description& d = description_of(desc);
        switch (attribute) {
            case CUBLASLT_MATMUL_DESC_TRANSA:
                take(d.transpose_a, value, bytes);
                break;
            case CUBLASLT_MATMUL_DESC_TRANSB:
                take(d.transpose_b, value, bytes);
                break;
            case CUBLASLT_MATMUL_DESC_EPILOGUE:
                take(d.epilogue, value, bytes);
                break;
            case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
                take(d.bias, value, bytes);
                break;
            case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
                take(d.bias_type, value, bytes);
                break;
            case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
                take(d.aux, value, bytes);
                break;
            case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
                take(d.aux_leading, value, bytes);
                break;
            default:
                throw Fault("an attribute of a product that the emulator does not know");
        }
        return CUBLAS_STATUS_SUCCESS;
    });
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t leading) {
    return guarded([&] {
        if (type != CUDA_R_32F && type != CUDA_R_16BF)
            throw Fault("a type of matrices that the emulator does not know");
        *l = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, columns, leading});
        return CUBLAS_STATUS_SUCCESS;
    });
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
    delete reinterpret_cast<Layout*>(l);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) {
    *p = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
    delete reinterpret_cast<Preference*>(p);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
    return guarded([&] {
        Preference& p = *reinterpret_cast<Preference*>(preference);
        switch (attribute) {
            case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
                take(p.workspace, value, bytes);
                break;
            case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
                take(p.reductions, value, bytes);
                break;
            case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
                take(p.aligned[0], value, bytes);
                break;
            case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
                take(p.aligned[1], value, bytes);
                break;
            case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
                take(p.aligned[2], value, bytes);
                break;
            case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
                take(p.aligned[3], value, bytes);
                break;
            default:
                throw Fault("an attribute of a preference that the emulator does not know");
        }
        return CUBLAS_STATUS_SUCCESS;
    });
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out,
                                              cublasLtMatmulPreference_t preference, int asked,
                                              cublasLtMatmulHeuristicResult_t* results, int* count) {
    return guarded([&] {
        *count = 0;
        const Preference& pref = *reinterpret_cast<const Preference*>(preference);
        Problem p{description_of(desc), layout_of(a), layout_of(b), layout_of(c), layout_of(out)};
        if (!p.is_valid()) return CUBLAS_STATUS_INVALID_VALUE;
        if (p.is_refused()) return CUBLAS_STATUS_NOT_SUPPORTED;
        for (uint32_t n = 0; n < 3 && *count < asked; n++) {
            Algorithm algorithm{Algorithm::kMagic, p.number(), n * 4096, {}, n + 1};
            if (algorithm.workspace > pref.workspace ||
                (n && !(pref.reductions & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)))
                continue;
            memcpy(algorithm.aligned, pref.aligned, sizeof algorithm.aligned);
            cublasLtMatmulHeuristicResult_t& r = results[(*count)++];
            memset(static_cast<void*>(&r), 0, sizeof r);
            memcpy(static_cast<void*>(&r.algo), &algorithm, sizeof algorithm);
            r.workspaceSize = algorithm.workspace;
            r.state = CUBLAS_STATUS_SUCCESS;
        }
        return *count ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
    });
}
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                       cublasLtMatrixLayout_t out, const cublasLtMatmulAlgo_t* algo,
                                       cublasLtMatmulHeuristicResult_t* result) {
    return guarded([&] {
        Problem p{description_of(desc), layout_of(a), layout_of(b), layout_of(c), layout_of(out)};
        if (!p.is_valid()) return CUBLAS_STATUS_INVALID_VALUE;
        Algorithm algorithm;
        memcpy(&algorithm, algo, sizeof algorithm);
        if (algorithm.magic != Algorithm::kMagic || algorithm.problem != p.number())
            return CUBLAS_STATUS_NOT_SUPPORTED;
        result->workspaceSize = algorithm.workspace;
        result->state = CUBLAS_STATUS_SUCCESS;
        return CUBLAS_STATUS_SUCCESS;
    });
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t la, const void* b, cublasLtMatrixLayout_t lb,
                              const void* beta, const void* c, cublasLtMatrixLayout_t lc, void* out,
                              cublasLtMatrixLayout_t lout, const cublasLtMatmulAlgo_t* algo, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
    static const int error = atoi(environment("GPU_PRODUCT_ERROR", "0").c_str());
    if (error) return static_cast<cublasStatus_t>(error);
    return guarded([&] {
        Problem p{description_of(desc), layout_of(la), layout_of(lb), layout_of(lc), layout_of(lout)};
        if (!p.is_valid()) return CUBLAS_STATUS_INVALID_VALUE;
        if (*static_cast<const float*>(alpha) != 1)
            throw Fault("alpha is not 1, which the emulator does not know");
        const Algorithm algorithm = algorithm_of(algo);
        if (algorithm.problem != p.number()) throw Fault("an algorithm that was made for another product");
        if (algorithm.workspace > workspace_bytes) throw Fault("less workspace than its algorithm takes");
        if (reinterpret_cast<uintptr_t>(workspace) % 256)
            throw Fault("a workspace that is not aligned to 256 bytes");
        const void* operands[] = {a, b, c, out};
        for (size_t i = 0; i < 4; i++)
            if (reinterpret_cast<uintptr_t>(operands[i]) % algorithm.aligned[i])
                throw Fault("operand " + std::string(1, "ABCD"[i]) +
                            " is aligned worse than its algorithm was told");
        if (c != out && *static_cast<const float*>(beta) != 0)
            throw Fault("C is not D, which the emulator does not know");
        const Description d = p.d;
        const Layout xa = p.a, xb = p.b, xc = p.c, xout = p.out;
        const float scale = *static_cast<const float*>(beta);
        Stream* s = stream ? reinterpret_cast<Stream*>(stream) : device().default_stream();
        device().queue(s, {"cublasLtMatmul", [=](const Work& work) {
                               multiply(work, d, xa, xb, xc, xout, a, b, c, out, scale, algorithm, workspace);
                           }});
        return CUBLAS_STATUS_SUCCESS;
    });
}

}  // extern "C"
