// onednn.h - matrix products on the CPU by oneDNN, on raw pointers with strides, made once per shape and
// kept.
//
// A product is made per calling thread: called inside a parallel region it runs on that thread alone, as the
// tiles of attention do; called outside it uses all threads. oneDNN allocates nothing: its scratch comes from
// the caller.
#pragma once

#include <omp.h>

#include <array>
#include <map>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>
#include <type_traits>
#include <unordered_map>

#include "llmc/simt.h"
#include "llmc/watch.h"

// c (m, n) = a (m, k) b (k, n) [+ c] [+ bias (n)], then GELU if asked. Strides are in elements; of each
// matrix one of the two strides must be 1.
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

// One product made for one thread, its memory objects kept so that a call only sets pointers.
struct Made {
    dnnl::matmul::primitive_desc description;
    dnnl::matmul product;  // compiled at the first call
    memory a, b, c, bias, scratch;
    std::unordered_map<int, memory> arguments;
};

// A product of operands that lie as these say; a bias is of type `in`. Throws dnnl::error where oneDNN has
// none.
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
inline dnnl::matmul::primitive_desc describe(const OnednnProduct& p, memory::data_type in,
                                             memory::data_type out) {
    return describe(p, in, memory::desc({p.m, p.k}, in, memory::dims{p.a_row, p.a_column}),
                    memory::desc({p.k, p.n}, in, memory::dims{p.b_row, p.b_column}),
                    memory::desc({p.m, p.n}, out, memory::dims{p.c_row, 1}));
}

template <class In, class Out>
Made& made(const OnednnProduct& p) {
    using Key = std::array<int64_t, 12>;
    static thread_local std::map<Key, std::unique_ptr<Made>> known;
    const int threads = omp_in_parallel() ? 1 : omp_get_max_threads();
    const Key key{p.m,        p.n,     p.k,          p.a_row, p.a_column, p.b_row,
                  p.b_column, p.c_row, p.accumulate, p.bias,  p.gelu,     threads};
    std::unique_ptr<Made>& slot = known[key];
    if (!slot) {
        auto made = std::make_unique<Made>();
        try {
            made->description = describe(p, dtype<In>, dtype<Out>);
        } catch (const dnnl::error& e) {
            fail("oneDNN has no such product for this CPU (%s)%s", e.what(),
                 std::is_same_v<In, float> ? "" : "; bf16 takes AVX-512: make PRECISION=fp32");
        }
        slot = std::move(made);
    }
    return *slot;
}

inline void compile(Made& m) {
    m.product = dnnl::matmul(m.description);
    auto argument = [&](int which, memory& at, const memory::desc& shape) {
        at = memory(shape, cpu(), nullptr);
        m.arguments[which] = at;
    };
    argument(DNNL_ARG_SRC, m.a, m.description.src_desc());
    argument(DNNL_ARG_WEIGHTS, m.b, m.description.weights_desc());
    argument(DNNL_ARG_DST, m.c, m.description.dst_desc());
    if (m.description.bias_desc().get_size() > 0) argument(DNNL_ARG_BIAS, m.bias, m.description.bias_desc());
    argument(DNNL_ARG_SCRATCHPAD, m.scratch, m.description.scratchpad_desc());
}
}  // namespace onednn

// Bytes of scratch that onednn_matmul() wants for this product when called from here.
template <class In, class Out>
size_t onednn_scratch_bytes(const OnednnProduct& p) {
    return onednn::made<In, Out>(p).description.scratchpad_desc().get_size();
}

// Computes the product. `scratch` is 64-byte aligned and has onednn_scratch_bytes(); bias may be null if
// unused.
template <class In, class Out>
void onednn_matmul(const OnednnProduct& p, Out* c, const In* a, const In* b, const In* bias, void* scratch) {
    static thread_local dnnl::stream stream(onednn::cpu());
    onednn::Made& made = onednn::made<In, Out>(p);
    if (!made.product) onednn::compile(made);
    check_open(a, ((p.m - 1) * p.a_row + (p.k - 1) * p.a_column + 1) * sizeof(In));
    check_open(b, ((p.k - 1) * p.b_row + (p.n - 1) * p.b_column + 1) * sizeof(In));
    check_open(c, ((p.m - 1) * p.c_row + p.n) * sizeof(Out));
    if (p.bias) check_open(bias, p.n * sizeof(In));
    check_open(scratch, made.description.scratchpad_desc().get_size());
    made.a.set_data_handle(const_cast<In*>(a));
    made.b.set_data_handle(const_cast<In*>(b));
    made.c.set_data_handle(c);
    if (p.bias) made.bias.set_data_handle(const_cast<In*>(bias));
    made.scratch.set_data_handle(scratch);
    made.product.execute(stream, made.arguments);
    stream.wait();
}
