// matmul_onednn.h - one matrix product on a CPU, on raw pointers with strides, by oneDNN, which compiles a
// product once for its shape. matmul_cpu.h and attention_cpu.h use it.
//
// A product runs on the thread that calls it. Given several threads, oneDNN would divide a product by their
// number, sums over k included, so that the number of threads would change the result's last bits. A caller
// that wants several threads gives each its own products (matmul_cpu.h, attention_cpu.h). All threads
// share a compiled product. The caller provides scratch; beside it oneDNN may copy operands into heap memory.
//
// On a CPU without AVX-512 a product is made of several calls, in two cases. oneDNN has no products of bf16
// there: the operands are widened to fp32, some summands at a time. And in fp32 it sums the last rows of a
// product in another order than the others: they are computed among rows of zeros.
#pragma once

#include <omp.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <new>
#include <type_traits>
#include <unordered_map>

#include <oneapi/dnnl/dnnl.hpp>

#include "llmc/arena.h"
#include "llmc/free_memory.h"
#include "llmc/simt.h"
#include "llmc/simt_vector.h"

// The version of oneDNN, for --version.
inline std::string products_library() {
    const dnnl_version_t& v = *dnnl_version();
    return format("oneDNN %d.%d.%d", v.major, v.minor, v.patch);
}

// c (m, n) = a (m, k) b (k, n) [+ c] [+ bias (n)], then GELU if asked. Strides are in elements; each matrix
// must have 1 as one of its two strides.
struct OnednnProduct {
    int64_t m, n, k;
    int64_t a_row, a_column, b_row, b_column, c_row;
    bool accumulate = false, bias = false, gelu = false;
};

namespace onednn {
using dnnl::memory;

inline dnnl::engine& cpu() {
    static auto& engine = *new dnnl::engine(dnnl::engine::kind::cpu, 0);
    return engine;
}

template <class T>
constexpr memory::data_type dtype =
    std::is_same_v<T, float> ? memory::data_type::f32 : memory::data_type::bf16;

// Describes a product of operands with these layouts; a bias is of type `in`. Throws dnnl::error if oneDNN
// cannot compute it.
inline dnnl::matmul::primitive_desc describe(const OnednnProduct& p, memory::data_type in,
                                             const memory::desc& a, const memory::desc& b,
                                             const memory::desc& c) {
    const memory::desc bias = p.bias ? memory::desc({1, p.n}, in, memory::dims{p.n, 1}) : memory::desc();
    dnnl::post_ops after;
    if (p.accumulate) after.append_sum(1.f);
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
#if DNNL_VERSION_MAJOR >= 3
    if (p.gelu) after.append_eltwise(dnnl::algorithm::eltwise_gelu_tanh, 0.f, 0.f);
    attributes.set_post_ops(after);
    if (p.bias) return {cpu(), a, b, bias, c, attributes};
    return {cpu(), a, b, c, attributes};
#else
    if (p.gelu) after.append_eltwise(1.f, dnnl::algorithm::eltwise_gelu_tanh, 0.f, 0.f);
    attributes.set_post_ops(after);
    if (p.bias) return {dnnl::matmul::desc(a, b, bias, c), attributes, cpu()};
    return {dnnl::matmul::desc(a, b, c), attributes, cpu()};
#endif
}
// The product with the stride of each dimension of size 1 replaced by the one that a matrix without gaps has.
// Such a stride means nothing, and oneDNN 2.6's cache of compiled products ignores it, but its choice of an
// implementation does not: the cache may return one that needs scratch that was never asked for.
inline OnednnProduct without_idle_strides(OnednnProduct p) {
    if (p.m == 1) {
        p.a_row = p.a_column == 1 ? p.k : 1;
        p.c_row = p.n;
    }
    if (p.k == 1) {
        p.a_column = 1;
        p.b_row = p.b_column == 1 ? p.n : 1;
    }
    if (p.n == 1) p.b_column = 1;
    return p;
}
inline dnnl::matmul::primitive_desc describe(const OnednnProduct& product, memory::data_type in,
                                             memory::data_type out) {
    const OnednnProduct p = without_idle_strides(product);
    return describe(p, in, memory::desc({p.m, p.k}, in, memory::dims{p.a_row, p.a_column}),
                    memory::desc({p.k, p.n}, in, memory::dims{p.b_row, p.b_column}),
                    memory::desc({p.m, p.n}, out, memory::dims{p.c_row, 1}));
}

// While this lives, oneDNN uses the calling thread alone.
class OneThread {
  public:
    OneThread() { omp_set_num_threads(1); }
    ~OneThread() { omp_set_num_threads(before_); }
    OneThread(const OneThread&) = delete;

  private:
    const int before_ = omp_get_max_threads();
};

// More than oneDNN needs to describe and compile a product. It crashes if it cannot allocate what it needs.
constexpr size_t kMemoryToCompile = size_t{8} << 20;

// Calls oneDNN, and turns its out-of-memory error into std::bad_alloc.
template <class Call>
auto with_buffer(Call&& call) {
    try {
        return call();
    } catch (const dnnl::error& e) {
        if (e.status == dnnl_out_of_memory) throw std::bad_alloc();
        throw;
    }
}

// How a product is computed: in one call of oneDNN, or by one of the functions further below.
enum class How { kOneCall, kWidened, kRowGroups };

// One product, which any thread may execute.
struct CompiledProduct {
    How how = How::kOneCall;
    size_t scratch_bytes = 0;
    dnnl::matmul::primitive_desc description;  // for kOneCall alone, as is the product,
    dnnl::matmul product;                      // which the first call compiles
};

// One thread's operands for calls of a product, kept so that a call only sets pointers.
struct Operands {
    CompiledProduct* product = nullptr;
    memory a, b, c, bias, scratch;
    std::unordered_map<int, memory> arguments;
};

using Key = std::array<int64_t, 11>;
inline Key key_of(const OnednnProduct& p) {
    return {p.m, p.n, p.k, p.a_row, p.a_column, p.b_row, p.b_column, p.c_row, p.accumulate, p.bias, p.gelu};
}

// Whether this is an x86 CPU for which oneDNN has no kernels with AVX-512.
inline bool without_avx512() {
#ifdef __x86_64__
    constexpr auto kAvx512 = static_cast<unsigned>(dnnl::cpu_isa::avx512_core);
    static const bool is = (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & kAvx512) != kAvx512;
    return is;
#else
    return false;
#endif
}

// oneDNN's fp32 kernels for AVX2 compute six rows at a time, and sum the rows that are left in another order.
// Measured with oneDNN 2.6: of products of whole groups of 12 rows, and of at most 384 rows and 768 columns,
// no bit of a row depends on which other rows there are.
constexpr int64_t kRowGroup = 12;

// The most bytes of its operands that a product may copy into heap memory: 384 summands of both in fp32, or
// 768 in bf16. Not all of oneDNN's implementations copy, but which one it uses changes with the shape.
inline size_t copied_bytes(const OnednnProduct& p) {
    const int64_t rows = without_avx512() ? ceil_div(p.m, kRowGroup) * kRowGroup : p.m;
    return static_cast<size_t>((rows + p.n) * std::min<int64_t>(p.k, 384)) * sizeof(float);
}

inline std::recursive_mutex describing;  // held by the thread that describes or compiles

// Whether oneDNN multiplies matrices of bf16 on this CPU.
inline bool multiplies_bf16() {
    static const bool does = [] {
        const OneThread alone;
        try {
            describe({16, 16, 16, 16, 1, 16, 1, 16}, memory::data_type::bf16, memory::data_type::f32);
            return true;
        } catch (const dnnl::error& e) {
            if (e.status == dnnl_unimplemented) return false;
            throw;
        }
    }();
    return does;
}
template <class In>
How how_to_multiply(const OnednnProduct& p) {
    if (!std::is_same_v<In, float> && !multiplies_bf16()) return How::kWidened;
    if (p.m % kRowGroup > 0 && without_avx512()) return How::kRowGroups;
    return How::kOneCall;
}
template <class Out>
size_t widened_bytes(const OnednnProduct& p);
template <class In, class Out>
size_t row_groups_bytes(const OnednnProduct& p);

template <class In, class Out>
CompiledProduct& find_or_describe(const OnednnProduct& p, const Key& key) {
    static auto& known = *new std::map<Key, CompiledProduct>();
    const std::lock_guard lock(describing);
    const auto [at, is_new] = known.try_emplace(key);
    if (!is_new) return at->second;
    const OneThread alone;
    try {
        require_memory_for(kMemoryToCompile, "a product");
        CompiledProduct& m = at->second;
        m.how = how_to_multiply<In>(p);
        if (m.how == How::kWidened) {
            m.scratch_bytes = widened_bytes<Out>(p);
        } else if (m.how == How::kRowGroups) {
            m.scratch_bytes = row_groups_bytes<In, Out>(p);
        } else {
            m.description = with_buffer([&] { return describe(p, dtype<In>, dtype<Out>); });
            m.scratch_bytes = m.description.scratchpad_desc().get_size();
        }
        return m;
    } catch (const dnnl::error& e) {
        known.erase(at);
        fail("oneDNN has no such product for this CPU (%s)", e.what());
    } catch (...) {
        known.erase(at);
        throw;
    }
}

inline void compile(CompiledProduct& m) {
    const std::lock_guard lock(describing);
    if (m.product) return;
    const OneThread alone;
    require_memory_for(kMemoryToCompile, "a product");
    m.product = with_buffer([&] { return dnnl::matmul(m.description); });
}

inline void make_operands(Operands& o) {
    const dnnl::matmul::primitive_desc& description = o.product->description;
    auto argument = [&](int which, memory& at, const memory::desc& shape) {
        at = memory(shape, cpu(), nullptr);
        o.arguments[which] = at;
    };
    argument(DNNL_ARG_SRC, o.a, description.src_desc());
    argument(DNNL_ARG_WEIGHTS, o.b, description.weights_desc());
    argument(DNNL_ARG_DST, o.c, description.dst_desc());
    if (description.bias_desc().get_size() > 0) argument(DNNL_ARG_BIAS, o.bias, description.bias_desc());
    if (o.product->scratch_bytes > 0) argument(DNNL_ARG_SCRATCHPAD, o.scratch, description.scratchpad_desc());
}

// The calling thread's operands of a product, which point to the shared description.
template <class In, class Out>
Operands& operands(const OnednnProduct& p) {
    static thread_local std::map<Key, Operands> known;
    const Key key = key_of(p);
    Operands& o = known[key];
    if (!o.product) o.product = &find_or_describe<In, Out>(p, key);
    return o;
}
}  // namespace onednn

// The bytes of a product beside its operands: scratch that onednn_matmul() wants, and its copies of operands
// in the heap.
struct OnednnBytes {
    size_t scratch = 0, copied = 0;
};
template <class In, class Out>
OnednnBytes onednn_bytes(const OnednnProduct& p) {
    return {onednn::find_or_describe<In, Out>(p, onednn::key_of(p)).scratch_bytes, onednn::copied_bytes(p)};
}

template <class Out>
void multiply_widened(const OnednnProduct& p, Out* c, const bf16* a, const bf16* b, const bf16* bias,
                      void* scratch);
template <class In, class Out>
void multiply_row_groups(const OnednnProduct& p, Out* c, const In* a, const In* b, const In* bias,
                         void* scratch);

// Computes the product with operands that the thread keeps (onednn::operands()), for small products that are
// computed often.
template <class In, class Out>
void onednn_matmul(onednn::Operands& o, const OnednnProduct& p, Out* c, const In* a, const In* b,
                   const In* bias, void* scratch) {
    static thread_local dnnl::stream stream(onednn::cpu());
    check_open(a, ((p.m - 1) * p.a_row + (p.k - 1) * p.a_column + 1) * sizeof(In));
    check_open(b, ((p.k - 1) * p.b_row + (p.n - 1) * p.b_column + 1) * sizeof(In));
    check_open(c, ((p.m - 1) * p.c_row + p.n) * sizeof(Out));
    if (p.bias) check_open(bias, p.n * sizeof(In));
    check_open(scratch, o.product->scratch_bytes);
    if constexpr (!std::is_same_v<In, float>)
        if (o.product->how == onednn::How::kWidened) return multiply_widened(p, c, a, b, bias, scratch);
    if (o.product->how == onednn::How::kRowGroups) return multiply_row_groups(p, c, a, b, bias, scratch);
    if (o.arguments.empty()) {
        onednn::compile(*o.product);
        onednn::make_operands(o);
    }
    o.a.set_data_handle(const_cast<In*>(a));
    o.b.set_data_handle(const_cast<In*>(b));
    o.c.set_data_handle(c);
    if (p.bias) o.bias.set_data_handle(const_cast<In*>(bias));
    if (o.scratch) o.scratch.set_data_handle(scratch);
    const onednn::OneThread alone;
    onednn::with_buffer([&] {
        o.product->product.execute(stream, o.arguments);
        stream.wait();
    });
}

// Computes the product. `scratch` is 64-byte aligned and has the scratch of onednn_bytes(); bias may be null
// if unused.
template <class In, class Out>
void onednn_matmul(const OnednnProduct& p, Out* c, const In* a, const In* b, const In* bias, void* scratch) {
    onednn::Operands o;
    o.product = &onednn::find_or_describe<In, Out>(p, onednn::key_of(p));
    onednn_matmul(o, p, c, a, b, bias, scratch);
}

// c (m, n) = sums (m, n), or c += sums if `accumulate`. Rows of c are c_row apart.
template <class Out>
void round_sums(Out* c, int64_t c_row, const float* sums, int64_t m, int64_t n, bool accumulate) {
    constexpr int N = kVectorSize<Out>;
    for (int64_t row = 0; row < m; row++, c += c_row, sums += n)
        for (int64_t i = 0; i < n; i += N) {
            const Packed<float, N> sum = load_within<N>(sums, i, n);
            const Packed<Out, N> before = accumulate ? load_within<N>(c, i, n) : Packed<Out, N>{};
            float o[N];
            for (int k = 0; k < N; k++) o[k] = sum[k] + before[k];
            store_within(c, i, n, rounded<Out>(o));
        }
}

// ---- on CPUs without AVX-512: rows in whole groups

// A product in two: `whole` has all complete groups of rows; `last` has the 1 ... kRowGroup - 1 rows that are
// left, filled up with rows of zeros. For `last`, the rows of a and of c are copied to scratch, without gaps;
// b and the bias are used where they are.
template <class In, class Out>
struct RowGroups {
    OnednnProduct whole, last;
    int64_t left;
    size_t a_bytes, c_bytes;  // in scratch

    explicit RowGroups(const OnednnProduct& p) : whole(p), last(p), left(p.m % onednn::kRowGroup) {
        whole.m = p.m - left;
        last.m = onednn::kRowGroup, last.c_row = p.n;
        last.a_row = by_rows() ? p.k : 1, last.a_column = by_rows() ? 1 : last.m;
        a_bytes = ceil_div(last.m * p.k * sizeof(In), size_t{64}) * 64;
        c_bytes = ceil_div(last.m * p.n * sizeof(Out), size_t{64}) * 64;
    }
    bool by_rows() const { return whole.a_column == 1; }
};
template <class In, class Out>
size_t onednn::row_groups_bytes(const OnednnProduct& p) {
    const RowGroups<In, Out> groups(p);
    size_t most = onednn_bytes<In, Out>(groups.last).scratch;
    if (groups.whole.m > 0) most = std::max(most, onednn_bytes<In, Out>(groups.whole).scratch);
    return groups.a_bytes + groups.c_bytes + most;
}

template <class In, class Out>
void multiply_row_groups(const OnednnProduct& p, Out* c, const In* a, const In* b, const In* bias,
                         void* scratch) {
    const RowGroups<In, Out> groups(p);
    const auto [whole, last, left, a_bytes, c_bytes] = groups;
    auto* const bytes = static_cast<unsigned char*>(scratch);
    auto* const last_a = reinterpret_cast<In*>(bytes);
    auto* const last_c = reinterpret_cast<Out*>(bytes + a_bytes);
    void* const rest = bytes + a_bytes + c_bytes;
    const auto multiply = [&](const OnednnProduct& part, Out* to, const In* rows) {
        onednn_matmul<In, Out>(onednn::operands<In, Out>(part), part, to, rows, b, bias, rest);
    };
    if (whole.m > 0) multiply(whole, c, a);
    a += whole.m * p.a_row, c += whole.m * p.c_row;
    std::fill_n(last_a, last.m * p.k, In{});
    if (groups.by_rows())
        for (int64_t row = 0; row < left; row++) std::copy_n(a + row * p.a_row, p.k, last_a + row * p.k);
    else
        for (int64_t k = 0; k < p.k; k++) std::copy_n(a + k * p.a_column, left, last_a + k * last.m);
    if (p.accumulate) {
        std::fill_n(last_c, last.m * p.n, Out{});
        for (int64_t row = 0; row < left; row++) std::copy_n(c + row * p.c_row, p.n, last_c + row * p.n);
    }
    multiply(last, last_c, last_a);
    for (int64_t row = 0; row < left; row++) std::copy_n(last_c + row * p.n, p.n, c + row * p.c_row);
}

// ---- on CPUs without AVX-512: bf16 by products in fp32

// The summands that are widened at a time: few enough that both operands of a piece stay in a core's cache.
constexpr int64_t kWidenedSummands = 256;

// Calls f(product in fp32, first summand) for each part of a product of bf16. The operands of a part are
// dense, in the order in which they are stored. Its result is p's if Out is float, else dense sums.
template <class Out, class F>
void for_each_widened_part(const OnednnProduct& p, F&& f) {
    constexpr bool kRounds = !std::is_same_v<Out, float>;
    for (int64_t k = 0; k < p.k; k += kWidenedSummands) {
        OnednnProduct part = p;
        part.k = std::min(kWidenedSummands, p.k - k);
        part.a_row = p.a_column == 1 ? part.k : 1, part.a_column = p.a_column == 1 ? 1 : p.m;
        part.b_row = p.b_column == 1 ? p.n : 1, part.b_column = p.b_column == 1 ? 1 : part.k;
        if (kRounds) part.c_row = p.n;
        part.accumulate = k > 0 || (!kRounds && p.accumulate);
        part.bias &= k == 0;
        part.gelu &= k + part.k == p.k;
        f(part, k);
    }
}

// Where the operands and sums of a part stand in scratch; with a null `base`, how many bytes they take.
struct WidenedScratch {
    WidenedScratch(void* base, const OnednnProduct& p, bool rounds) : base_(static_cast<float*>(base)) {
        const int64_t k = std::min(kWidenedSummands, p.k);
        a = take(p.m * k), b = take(k * p.n), bias = take(p.bias ? p.n : 0);
        sums = take(rounds ? p.m * p.n : 0), rest = take(0);
    }
    float *a, *b, *bias, *sums, *rest;  // the rest is the products' own scratch
    size_t bytes() const { return static_cast<size_t>(floats_) * sizeof(float); }

  private:
    float* take(int64_t n) {
        float* const at = base_ ? base_ + floats_ : nullptr;
        floats_ += ceil_div(n, 16) * 16;
        return at;
    }
    float* base_;
    int64_t floats_ = 0;
};
template <class Out>
size_t onednn::widened_bytes(const OnednnProduct& p) {
    size_t most = 0;
    for_each_widened_part<Out>(p, [&](const OnednnProduct& part, int64_t) {
        most = std::max(most, onednn_bytes<float, float>(part).scratch);
    });
    return WidenedScratch(nullptr, p, !std::is_same_v<Out, float>).bytes() + most;
}

// The dense copy of rows that are `stride` elements apart.
inline void widen_rows(float* to, const bf16* from, int64_t rows, int64_t columns, int64_t stride) {
    for (int64_t row = 0; row < rows; row++, to += columns, from += stride)
        for (int64_t i = 0; i < columns; i++) to[i] = to_float(from[i]);
}

template <class Out>
void multiply_widened(const OnednnProduct& p, Out* c, const bf16* a, const bf16* b, const bf16* bias,
                      void* scratch) {
    constexpr bool kRounds = !std::is_same_v<Out, float>;
    const WidenedScratch s(scratch, p, kRounds);
    float* sums = s.sums;
    if constexpr (!kRounds) sums = c;
    if (p.bias) widen_rows(s.bias, bias, 1, p.n, p.n);
    for_each_widened_part<Out>(p, [&](const OnednnProduct& part, int64_t k) {
        if (p.a_column == 1)
            widen_rows(s.a, a + k, p.m, part.k, p.a_row);
        else
            widen_rows(s.a, a + k * p.a_column, part.k, p.m, p.a_column);
        if (p.b_column == 1)
            widen_rows(s.b, b + k * p.b_row, part.k, p.n, p.b_row);
        else
            widen_rows(s.b, b + k, p.n, part.k, p.b_column);
        onednn_matmul<float, float>(onednn::operands<float, float>(part), part, sums, s.a, s.b, s.bias,
                                    s.rest);
    });
    if constexpr (kRounds) round_sums(c, p.c_row, sums, p.m, p.n, p.accumulate);
}
