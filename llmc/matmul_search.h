// matmul_search.h - finds the fastest algorithm of each matrix product on a GPU: cuBLASLt's heuristics
// suggest candidates, and each is timed on random operands.
//
// The run itself is not affected: the search comes before the run allocates its memory, and frees what it
// allocates.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "llmc/bench.h"

#if defined(SIMT_GPU)
namespace matmul_search {
constexpr int kCandidates = 16, kWarmups = 3, kRuns = 10;

// The GPU and the library's version. Algorithms are valid for these alone.
inline std::string machine() {
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    return format("%s, cuBLASLt %zu", properties.name, cublasLtGetVersion());
}

// Times what the device does. Before each run it fills a buffer that is larger than the L2 cache. So all runs
// start alike, and the host gets so far ahead that between two marks there is only the device's work.
class Stopwatch {
  public:
    explicit Stopwatch(Stream stream)
        : stream_(stream), marks_(stream), flushed_(size_t{256} << 20, "the search's fill") {}
    // The median of the seconds that the device takes for what queue() enqueues.
    template <class Queue>
    double seconds(Queue&& queue) {
        marks_.clear();
        for (int i = 0; i < kWarmups + kRuns; i++) {
            device_fill(flushed_.data(), 0, flushed_.bytes(), stream_);
            marks_.set();
            queue();
            marks_.set();
        }
        marks_.finish();
        std::vector<double> runs;
        for (int i = kWarmups; i < kWarmups + kRuns; i++) runs.push_back(marks_.seconds(2 * i, 2 * i + 1));
        return statistics(std::move(runs)).median;
    }

  private:
    Stream stream_;
    Marks marks_;
    DeviceBuffer flushed_;
};

// Uniform in [-1/2, 1/2). Zeros would not do: a GPU multiplies them with less power, and faster.
template <class T>
__global__ void __launch_bounds__(kBlockThreads) random_fill_kernel(T* out, int64_t n) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = from_float<T>(static_cast<float>(mix64(static_cast<uint64_t>(i)) >> 40) * 0x1p-24f - 0.5f);
}

// A tensor of random values in memory of its own.
template <class T>
struct RandomTensor {
    DeviceBuffer memory;
    Tensor<T> tensor;
    RandomTensor(Shape shape, Stream stream)
        : memory(static_cast<size_t>(shape.size()) * sizeof(T), "a product that is measured"),
          tensor(reinterpret_cast<T*>(memory.data()), shape) {
        const int64_t n = shape.size();
        launch<random_fill_kernel<T>>(dim3(static_cast<unsigned>(ceil_div(n, kBlockThreads))), kBlockThreads,
                                      0, stream, tensor.data(), n);
    }
};

// A product as the trainer runs it, with operands aligned to 256 bytes.
template <class T>
cublaslt::Key key_of(const Product& p) {
    return {p, cublaslt::dtype<T>, p.widened ? CUDA_R_32F : cublaslt::dtype<T>, {256, 256, 256, 256, 256}};
}

// Operands that have only an alignment, for questions to the library.
inline cublaslt::Operands aligned_operands() {
    void* const p = reinterpret_cast<void*>(uintptr_t{256});
    return {p, p, p, p, p};
}

// Times every candidate for the product. If the product has a bias's gradient, candidates that fuse it are
// timed too, and those that do not are timed together with the kernel that computes it.
template <class T, class Out>
std::vector<MatmulAlgorithm> measure(const Product& p, Stopwatch& stopwatch, void* workspace, Stream stream) {
    const Shape a_shape =
        p.transpose_a ? Shape{p.k, p.a_row ? p.a_row : p.m} : Shape{p.m, p.a_row ? p.a_row : p.k};
    const Shape b_shape =
        p.transpose_b ? Shape{p.n, p.b_row ? p.b_row : p.k} : Shape{p.k, p.b_row ? p.b_row : p.n};
    const RandomTensor<T> a(a_shape, stream), b(b_shape, stream);
    RandomTensor<T> vector({p.n}, stream), gelu_input({p.gelu_backward ? p.m : 0, p.n}, stream);
    RandomTensor<Out> out({p.m, p.out_row ? p.out_row : p.n}, stream);
    RandomTensor<float> scratch(column_sums_scratch(p.k, p.n, 1), stream);
    const cublaslt::Operands at = {a.tensor.data(), b.tensor.data(), vector.tensor.data(),
                                   gelu_input.tensor.data(), out.tensor.data()};
    const cublaslt::Key key = key_of<T>(p);
    std::vector<MatmulAlgorithm> measured;
    for (const bool fused : {false, true}) {
        if (fused && !p.bias_gradient) break;
        const cublaslt::Description description(key, at, fused);
        for (MatmulAlgorithm candidate : description.candidates(kCandidates)) {
            if (description.check(candidate) != CUBLAS_STATUS_SUCCESS ||
                description.run(candidate, at, workspace, stream) != CUBLAS_STATUS_SUCCESS)
                continue;
            candidate.microseconds = 1e6 * stopwatch.seconds([&] {
                if (p.bias_gradient && !fused) bias_backward(vector.tensor, scratch.tensor, b.tensor, stream);
                CUBLAS_CHECK(description.run(candidate, at, workspace, stream));
            });
            measured.push_back(candidate);
        }
    }
    if (measured.empty())
        fail("cuBLASLt does none of the algorithms that it names for a product of %s", key.text());
    return measured;
}
}  // namespace matmul_search

// Makes products take their algorithms from the file, after measuring those that it lacks and writing it.
// Products that the library has no algorithm for are left out. Fails if the library refuses an algorithm of
// the file, or if the file cannot be read or written.
template <class T>
void search_matmul_algorithms(const std::string& path, const std::set<Product>& products, Stream stream) {
    using namespace matmul_search;
    MatmulAlgorithms algorithms(path, machine());
    std::set<Product> missing;
    for (const Product& asked : products) {
        const std::optional<cublaslt::Key> key = cublaslt::doable(key_of<T>(asked), aligned_operands());
        if (!key) continue;
        const MatmulAlgorithm* known = algorithms.find(key->text());
        if (known)
            cublaslt::check_searched(*known, algorithms, *key,
                                     cublaslt::Description(*key, aligned_operands(), known->bias_gradient));
        else
            missing.insert(key->product);
    }
    if (!missing.empty()) {
        algorithms.save();  // fails before the work if the file cannot be written
        print(stderr, "--advanced algorithms=%s: measuring %zu of %zu products\n", path, missing.size(),
              products.size());
        const DeviceBuffer workspace(kCublasWorkspace, "cuBLASLt's workspace");
        Stopwatch stopwatch(stream);
        for (const Product& p : missing) {
            const std::vector<MatmulAlgorithm> measured =
                p.widened ? measure<T, float>(p, stopwatch, workspace.data(), stream)
                          : measure<T, T>(p, stopwatch, workspace.data(), stream);
            algorithms.add(key_of<T>(p).text(), fastest(measured));
        }
        algorithms.save();
    }
    cublaslt::use_algorithms(std::move(algorithms));
}
#endif

// With a file of algorithms (--advanced algorithms=), makes the products of these plans use it, as
// search_matmul_algorithms() says. Returns true if it did; then the plans must be rehearsed again: a product
// may now compute a bias's gradient too, which makes other operations, in the same memory.
template <class T, class Plans>
bool use_algorithms_for([[maybe_unused]] const Plans& plans, [[maybe_unused]] const std::string& path,
                        [[maybe_unused]] Stream stream) {
#if defined(SIMT_GPU)
    if (path.empty()) return false;
    std::set<Product> products;
    for (const Plan* plan : plans)
        for (const Work& w : plan->work)
            if (w.product.m > 0 && w.product.flops() <= longest_product) products.insert(w.product);
    search_matmul_algorithms<T>(path, products, stream);
    return true;
#else
    return false;
#endif
}
