// matmul_cublaslt.h - matmul.h on a GPU: cuBLASLt with bias, GELU, its gradient and a bias's gradient fused
// into the product.
//
// cuBLASLt's matrices are column-major: row-major out = a b is column-major out^T = b^T a^T, so b is passed
// first. The algorithm of a product is the fastest that a search found (matmul_search.h), or without a search
// the first that the library's heuristics suggest. It is looked up once and kept, so that the same product
// has the same bits every time. What the library cannot fuse into a product, kernels do afterwards. If it has
// no algorithm at all, matmul_tiled.cuh multiplies.
#pragma once

#include <cublasLt.h>

#include <array>
#include <compare>
#include <map>
#include <optional>
#include <set>

#include "llmc/matmul_algorithms.h"
#include "llmc/matmul_tiled.cuh"

inline void cublas_check(cublasStatus_t status, const char* what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    const char* const why = cublasLtGetStatusString(status);
    if (status == CUBLAS_STATUS_ALLOC_FAILED || status == CUBLAS_STATUS_ARCH_MISMATCH)
        fail("cuBLASLt: %s: %s", what, why);
    throw std::runtime_error(format("cuBLASLt: %s: %s", what, why));
}
#define CUBLAS_CHECK(call) cublas_check((call), #call)

// The version of cuBLASLt, for --version.
inline std::string products_library() {
    const size_t v = cublasLtGetVersion();
    const bool is_old = v < 100000;  // 11.x and before count in thousands, as in 11205
    const size_t major = is_old ? v / 1000 : v / 10000, rest = is_old ? v % 1000 : v % 10000;
    return format("cuBLASLt %zu.%zu.%zu", major, rest / 100, rest % 100);
}

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

// The largest power of two up to 256 that divides the address: heuristics may use it for wider loads. In a
// dry run addresses count from the start of a buffer, which is aligned to 256 bytes.
inline uint32_t alignment(const void* p) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(p);
    return address ? static_cast<uint32_t>(std::min<uintptr_t>(256, address & (~address + 1))) : 256;
}

// The addresses of a product's operands; null for those that it does not have. `vector` is the bias or its
// gradient.
struct Operands {
    const void *a, *b, *vector, *gelu_input;
    void* out;
    using Alignments = std::array<uint32_t, 5>;
    Alignments alignments() const {
        return {alignment(b), alignment(a), alignment(out), alignment(vector), alignment(gelu_input)};
    }
};

// What the choice of an algorithm depends on.
struct Key {
    Product product;
    cudaDataType_t in, out;
    Operands::Alignments aligned;
    auto operator<=>(const Key&) const = default;

    // Its name in a file of algorithms.
    std::string text() const {
        std::string t = product.text() + (in == CUDA_R_32F ? ", fp32" : ", bf16") + ", aligned";
        for (uint32_t bytes : aligned) t += format(" %u", bytes);
        return t;
    }
};

inline cublasLtEpilogue_t epilogue(const Product& p, bool fuse_bias_gradient) {
    // The bias's gradient is b summed over k, and b is the library's A.
    if (fuse_bias_gradient) return CUBLASLT_EPILOGUE_BGRADA;
    if (p.gelu_backward) return CUBLASLT_EPILOGUE_DGELU;
    if (p.gelu) return p.bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    return p.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

// A product described to the library: everything but the algorithm.
class Description {
  public:
    // `at` says how the operands are aligned; run() may be given other addresses.
    Description(const Key& key, const Operands& at, bool fuse_bias_gradient);
    Description(const Description&) = delete;
    ~Description() {
        cublasLtMatmulDescDestroy(operation_);
        for (cublasLtMatrixLayout_t l : {a_, b_, out_}) cublasLtMatrixLayoutDestroy(l);
    }

    const Product& product() const { return key_.product; }
    // Up to `most` algorithms that the heuristics suggest, the likeliest to be fast first; none if the
    // library cannot compute the product.
    std::vector<MatmulAlgorithm> candidates(int most) const;
    // The library's verdict on an algorithm for this product, with kCublasWorkspace bytes.
    cublasStatus_t check(const MatmulAlgorithm& a) const;
    // Queues the product.
    cublasStatus_t run(const MatmulAlgorithm& a, const Operands& at, void* workspace, Stream stream) const;

  private:
    template <class V>
    void set(cublasLtMatmulDescAttributes_t attribute, const V& value) const {
        CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation_, attribute, &value, sizeof value));
    }
    void point(const Operands& at) const {
        if (key_.product.bias || fuses_bias_gradient_) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, at.vector);
        if (key_.product.gelu_backward) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, at.gelu_input);
    }
    static cublasLtMatmulAlgo_t as_library(const MatmulAlgorithm& a) {
        cublasLtMatmulAlgo_t algorithm;
        static_assert(sizeof algorithm == sizeof a.data);
        memcpy(&algorithm, a.data.data(), sizeof algorithm);
        return algorithm;
    }
    static cublasLtMatrixLayout_t layout(cudaDataType_t type, int64_t rows, int64_t columns,
                                         int64_t leading) {
        cublasLtMatrixLayout_t l;
        CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&l, type, static_cast<uint64_t>(rows),
                                                static_cast<uint64_t>(columns), leading));
        return l;
    }

    Key key_;
    bool fuses_bias_gradient_;
    cublasLtMatmulDesc_t operation_;
    cublasLtMatrixLayout_t a_, b_, out_;
};

inline Description::Description(const Key& key, const Operands& at, bool fuse_bias_gradient)
    : key_(key), fuses_bias_gradient_(fuse_bias_gradient) {
    const Product& p = key.product;
    const cublasComputeType_t compute = p.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&operation_, compute, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue(p, fuse_bias_gradient));
    if (p.bias) set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, key.in);
    if (p.gelu_backward) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.n);
    point(at);
    const int64_t a_row = p.a_row ? p.a_row : p.transpose_a ? p.m : p.k;
    const int64_t b_row = p.b_row ? p.b_row : p.transpose_b ? p.k : p.n;
    b_ = p.transpose_b ? layout(key.in, p.k, p.n, b_row) : layout(key.in, p.n, p.k, b_row);
    a_ = p.transpose_a ? layout(key.in, p.m, p.k, a_row) : layout(key.in, p.k, p.m, a_row);
    out_ = layout(key.out, p.n, p.m, p.out_row ? p.out_row : p.n);
}

inline std::vector<MatmulAlgorithm> Description::candidates(int most) const {
    cublasLtMatmulPreference_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kCublasWorkspace);
    // Partial sums are added in fp32: the other schemes would round them to out's type in between.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key_.aligned[0]);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key_.aligned[1]);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key_.aligned[2]);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key_.aligned[2]);
    constexpr int kMost = 32;
    cublasLtMatmulHeuristicResult_t found[kMost] = {};
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle(), operation_, b_, a_, out_, out_, preference, std::min(most, kMost), found, &count);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    // The second is returned for epilogues that do not go with the types or the sizes.
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return {};
    cublas_check(status, "cublasLtMatmulAlgoGetHeuristic");
    std::vector<MatmulAlgorithm> algorithms;
    for (int i = 0; i < count; i++) {
        if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
        MatmulAlgorithm& a = algorithms.emplace_back();
        memcpy(a.data.data(), &found[i].algo, sizeof a.data);
        a.bias_gradient = fuses_bias_gradient_;
    }
    return algorithms;
}

inline cublasStatus_t Description::check(const MatmulAlgorithm& a) const {
    const cublasLtMatmulAlgo_t algorithm = as_library(a);
    cublasLtMatmulHeuristicResult_t result = {};
    const cublasStatus_t status =
        cublasLtMatmulAlgoCheck(handle(), operation_, b_, a_, out_, out_, &algorithm, &result);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    return result.workspaceSize <= kCublasWorkspace ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

inline cublasStatus_t Description::run(const MatmulAlgorithm& a, const Operands& at, void* workspace,
                                       Stream stream) const {
    point(at);
    const cublasLtMatmulAlgo_t algorithm = as_library(a);
    const float alpha = 1.f, beta = key_.product.accumulate ? 1.f : 0.f;  // 0: out is not read
    return cublasLtMatmul(handle(), operation_, &alpha, at.b, b_, at.a, a_, &beta, at.out, out_, at.out, out_,
                          &algorithm, workspace, kCublasWorkspace, stream);
}

// A product that has run, or is about to: what the library computes of it (doable()), and the algorithm.
// Without a description the library has no algorithm for it.
struct Known {
    std::optional<Description> description;
    MatmulAlgorithm algorithm = {};
};
inline std::map<Key, Known>& known_products() {
    static auto& known = *new std::map<Key, Known>;  // outlives whatever runs at the program's end
    return known;
}

// The algorithms that a search found, if there was one.
inline std::optional<MatmulAlgorithms>& searched() {
    static std::optional<MatmulAlgorithms> algorithms;
    return algorithms;
}
// From now on products use these algorithms.
inline void use_algorithms(std::optional<MatmulAlgorithms> algorithms) {
    searched() = std::move(algorithms);
    known_products().clear();
}
inline const MatmulAlgorithm* find_searched(const Key& key) {
    return searched() ? searched()->find(key.text()) : nullptr;
}

// Fails with the file's name if the library refuses an algorithm that is in it.
inline void check_searched(const MatmulAlgorithm& a, const MatmulAlgorithms& file, const Key& key,
                           const Description& description) {
    if (const cublasStatus_t status = description.check(a); status != CUBLAS_STATUS_SUCCESS)
        fail("%s: cuBLASLt refuses the algorithm of \"%s\" (%s); without the file, all are measured anew",
             file.path(), key.text(), cublasLtGetStatusString(status));
}

// A product without its bias and GELU.
inline Product bare(Product p) {
    p.bias = p.gelu = p.gelu_backward = false;
    return p;
}

// What the library can compute of a product: all that is fusable; or the product without bias and GELU if it
// has no algorithm that fuses them; or nothing if it has none for that either.
inline std::optional<Key> doable(Key key, const Operands& at) {
    const auto has_algorithm = [&at](const Key& k) {
        return find_searched(k) || !Description(k, at, false).candidates(1).empty();
    };
    key.product = fusable(key.product, key.in == CUDA_R_32F);
    if (has_algorithm(key)) return key;
    if (epilogue(key.product, false) == CUBLASLT_EPILOGUE_DEFAULT) return {};
    key.product = bare(key.product);
    return has_algorithm(key) ? std::optional(key) : std::nullopt;
}

// An estimate of the FLOP/s of matmul_tiled.cuh: shared memory limits it to 51 FLOPs a clock and
// multiprocessor, and clocks are between 1.4 and 2.5 GHz.
inline double tiled_flops() {
    int multiprocessors = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    return multiprocessors * 60e9;
}

// Says once for each shape, for a few shapes, that a product is computed without the library and how long it
// takes.
inline void say_without_library(const Product& p, bool fp32) {
    constexpr size_t kMost = 3;
    static auto& said = *new std::set<std::string>;
    const std::string shape = p.text() + (fp32 ? ", fp32" : ", bf16");
    if (said.size() > kMost || !said.insert(shape).second) return;
    if (said.size() > kMost) {
        print(stderr, "cuBLASLt has no algorithm for other products either\n");
        return;
    }
    print(
        stderr,
        "cuBLASLt has no algorithm for the product %s: a kernel makes it without tensor cores, at about %.0f "
        "TFLOP/s, %.3g ms each time\n",
        shape, tiled_flops() / 1e12, p.flops() / tiled_flops() * 1e3);
}

inline const Known& known_product(const Key& asked, const Operands& at) {
    std::map<Key, Known>& known = known_products();
    if (const auto it = known.find(asked); it != known.end()) return it->second;
    const std::optional<Key> key = doable(asked, at);
    Known& made = known[asked];
    if (!key) return say_without_library(asked.product, asked.in == CUDA_R_32F), made;
    const MatmulAlgorithm* found = find_searched(*key);
    const Description& description = made.description.emplace(*key, at, found && found->bias_gradient);
    if (found) check_searched(*found, *searched(), *key, description);
    made.algorithm = found ? *found : description.candidates(1).at(0);
    return made;
}

// Does in place what `asked`, a fusable product, asks for and `done` does not include: bias and GELU. It is a
// part of the product's operation.
template <class T>
void finish(const Product& asked, const Product& done, Tensor<T>& out, const MatmulOptions<T>& o,
            Stream stream) {
    const unsigned blocks = elementwise_blocks<T>(out.size());
    if (asked.bias && !done.bias) add_bias(out, *o.bias, stream);
    if (asked.gelu && !done.gelu)
        launch<gelu_forward_kernel<T>>(blocks, kBlockThreads, 0, stream, out.data(), out.data(), out.size());
    if (asked.gelu_backward && !done.gelu_backward)
        launch<gelu_backward_kernel<T>>(blocks, kBlockThreads, 0, stream, out.data(), out.data(),
                                        o.gelu_input->data(), out.size());
}
// The product of `rows` of its rows.
inline Product product_of_rows(Product p, int64_t rows) {
    if (rows == p.m) return p;
    if (p.transpose_a && !p.a_row) p.a_row = p.m;
    p.m = rows;
    p.bias_gradient = false;
    return p;
}

// The addresses of the operands of matmul().
template <class T, class Out>
Operands operands_of(const Tensor<Out>& out, const Tensor<T>& a, const Tensor<T>& b,
                     const MatmulOptions<T>& o) {
    const Tensor<T>* vector = o.bias_gradient ? o.bias_gradient : o.bias;
    return {a.data(), b.data(), vector ? vector->data() : nullptr,
            o.gelu_input ? o.gelu_input->data() : nullptr, out.data()};
}

// Whether the product also computes the bias's gradient: only if a search has found that faster.
template <class T, class Out>
bool fuses_bias_gradient(const Product& fused, const Tensor<Out>& out, const Tensor<T>& a, const Tensor<T>& b,
                         const MatmulOptions<T>& o) {
    if (!fused.bias_gradient) return false;
    const MatmulAlgorithm* found =
        find_searched({fused, dtype<T>, dtype<Out>, operands_of(out, a, b, o).alignments()});
    return found && found->bias_gradient;
}

// Computes rows first ... first + rows - 1 of out, of a fusable product, with all that is asked for except a
// bias's gradient that is not fused.
template <class T, class Out>
void make_rows(const Product& whole, int64_t first, int64_t rows, Tensor<Out>& out, const Tensor<T>& a,
               const Tensor<T>& b, MatmulOptions<T> options, void* workspace, Stream stream) {
    const Product p = product_of_rows(whole, rows);
    const int64_t a_row = whole.transpose_a ? 1 : whole.a_row ? whole.a_row : whole.k;
    Tensor<Out> to(out.data() + first * (p.out_row ? p.out_row : p.n), {rows, p.n});
    const T* const from = a.data() + first * a_row;
    Tensor<T> gelu_input;
    if (options.gelu_input) gelu_input = options.gelu_input->rows_at(first, rows);
    options.gelu_input = options.gelu_input ? &gelu_input : nullptr;
    Operands at = operands_of(to, a, b, options);
    at.a = from;
    const Known& known = known_product({p, dtype<T>, dtype<Out>, at.alignments()}, at);
    Product done = bare(p);
    if (known.description) {
        CUBLAS_CHECK(known.description->run(known.algorithm, at, workspace, stream));
        done = known.description->product();
    } else {
        matmul_tiled<T, Out>(p, to.data(), from, b.data(), stream, kLongestLaunch * tiled_flops());
    }
    if constexpr (std::is_same_v<T, Out>) finish(p, done, to, options, stream);
}
}  // namespace cublaslt
