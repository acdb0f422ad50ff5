// optimizer.cuh - the update of the weights: AdamW (Loshchilov, Hutter, arXiv:1711.05101), or SGD with the
// same decoupled decay; one kernel for all the formats in which the optimizer's state may be kept (state.h).
//
// A warp updates a block of 256 elements, so that the scale of a block of 8-bit moments is computed within a
// warp. The format is a branch that all lanes take alike. Sums of products call fmaf() by name, so that
// compilers have nothing to fuse: a GPU and its host's cores (offload_optimizer.h) compute the same bits.
#pragma once

#include <array>
#include <map>
#include <string>

#include "llmc/random.h"
#include "llmc/simt_vector.h"
#include "llmc/state.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

// One step of the optimizer. SGD uses lr, weight_decay and clip.
struct OptimizerStep {
    float lr, beta1, beta2, epsilon, weight_decay;
    float clip;         // the largest global norm of the gradient; 0: no limit
    int step;           // from 1, for the bias correction
    uint64_t seed = 0;  // of stochastic rounding
};

// One of AdamW's moments: fp32, bf16, or 8-bit codes and their scales. Null if there is none.
struct MomentArray {
    Moment format = Moment::Fp32;
    void* data = nullptr;
    float* scales = nullptr;
};

// n elements of the model and their state.
template <class T>
struct UpdateArrays {
    T* weights;
    const T* gradients;
    Optimizer optimizer = Optimizer::AdamW;
    Master master_format = Master::Fp32;
    void* master = nullptr;  // fp32, or the low 16 bits, for bf16 weights
    MomentArray m, v;
    int64_t decayed = 0;  // how many elements decay, from the first on
    int64_t n = 0;
    int64_t first = 0;  // the index of element 0 in the model, for stochastic rounding
};

// What the kernel needs beside the arrays, bias corrections included. It reads them from the device's memory,
// so that the launches of every step's update are the same.
struct UpdateFactors {
    float lr, beta1, beta2, epsilon, weight_decay, clip, m_correction, v_correction;
    uint64_t random_key;
};

constexpr uint64_t kRoundingStream = uint64_t{1} << 63;  // counters of random_bits() for rounding

// A lane's elements of a block of 256: on a GPU 8, in registers; on the fast CPU all 256, in loops that
// vectorize.
constexpr int kLaneElements = kQuantizedBlock / kLanes;
// A lane's elements are groups of this many neighbours; between two groups are those of the other lanes. So
// what the lanes of a warp access at a time, 16 bytes each in fp32, is contiguous.
constexpr int kLaneGroup = kFastCpu ? kLaneElements : 4;
constexpr int kGroupStride = kLanes * kLaneGroup;
// The distance of a lane's element k from its first.
SIMT_HOST_DEVICE constexpr int lane_offset(int k) {
    return kFastCpu ? k : k / kLaneGroup * kGroupStride + k % kLaneGroup;
}
constexpr int kUpdateBlocks = kFastCpu ? 16 : 1;  // blocks that a warp updates

// A lane's elements as fp32: on a GPU in registers. On the fast CPU, elements that are fp32 in memory are
// updated in place.
struct LaneRegisters {
    float v[kLaneElements];
    SIMT_DEVICE bool point_at(const void*) { return false; }
    SIMT_DEVICE bool is_at(const void*) const { return false; }
};
struct LaneMemory {
    float buffer[kLaneElements];
    float* v = buffer;
    SIMT_DEVICE bool point_at(const float* p) {
        v = const_cast<float*>(p);
        return true;
    }
    SIMT_DEVICE bool point_at(const bf16*) { return false; }
    SIMT_DEVICE bool is_at(const float* p) const { return v == p; }
};
using LaneFloats = std::conditional_t<kFastCpu, LaneMemory, LaneRegisters>;
struct LaneRandom {
    uint64_t bits[kLaneElements];  // of an element: 16 for the weight, 16 for m, 16 for v
};

// Stochastic rounding: one of the two bf16 between which x lies, the nearer one more often, so that the
// expected value is x. `random` has 16 bits.
SIMT_HOST_DEVICE bf16 round_randomly(float x, uint32_t random) {
    uint32_t u;
    memcpy(&u, &x, 4);
    const uint16_t bits = static_cast<uint16_t>((u + random) >> 16);
    bf16 rounded;
    memcpy(static_cast<void*>(&rounded), &bits, 2);
    return x == x ? rounded : from_float<bf16>(x);
}

// Calls f(k, element) for a lane's elements of an array of n; the first has the index i. Those beyond the end
// are zero.
template <class E, class F>
SIMT_DEVICE void read_lane(const E* p, int64_t i, int64_t n, F f) {
    if constexpr (kFastCpu) {
        const int count = static_cast<int>(n - i < kLaneElements ? n - i : kLaneElements);
#pragma omp simd
        for (int k = 0; k < count; k++) f(k, p[i + k]);
        for (int k = count; k < kLaneElements; k++) f(k, E{});
    } else {
#pragma unroll
        for (int g = 0; g < kLaneElements; g += kLaneGroup) {
            const auto x = load_within<kLaneGroup>(p, i + lane_offset(g), n);
            for (int k = 0; k < kLaneGroup; k++) f(g + k, x.v[k]);
        }
    }
}
// Stores f(k) as a lane's elements.
template <class E, class F>
SIMT_DEVICE void write_lane(E* p, int64_t i, int64_t n, F f) {
    if constexpr (kFastCpu) {
        const int count = static_cast<int>(n - i < kLaneElements ? n - i : kLaneElements);
#pragma omp simd
        for (int k = 0; k < count; k++) p[i + k] = f(k);
    } else {
#pragma unroll
        for (int g = 0; g < kLaneElements; g += kLaneGroup) {
            Packed<E, kLaneGroup> x;
            for (int k = 0; k < kLaneGroup; k++) x.v[k] = f(g + k);
            store_within(p, i + lane_offset(g), n, x);
        }
    }
}

template <class T>
SIMT_DEVICE void load_floats(LaneFloats& x, const T* p, int64_t i, int64_t n) {
    if (i + kLaneElements <= n && x.point_at(p + i)) return;
    read_lane(p, i, n, [&](int k, T e) { x.v[k] = to_float(e); });
}
SIMT_DEVICE void store_floats(float* p, int64_t i, int64_t n, const LaneFloats& x) {
    if (x.is_at(p + i)) return;
    write_lane(p, i, n, [&](int k) { return x.v[k]; });
}
SIMT_DEVICE void store_randomly(bf16* p, int64_t i, int64_t n, const LaneFloats& x, const LaneRandom& random,
                                int shift) {
    write_lane(p, i, n, [&](int k) {
        return round_randomly(x.v[k], static_cast<uint32_t>(random.bits[k] >> shift) & 0xffffu);
    });
}

template <class Code>
SIMT_DEVICE void load_moment(LaneFloats& x, const MomentArray& a, int64_t i, int64_t n) {
    if (a.format == Moment::Fp32) return load_floats(x, static_cast<float*>(a.data), i, n);
    if (a.format == Moment::Bf16) return load_floats(x, static_cast<bf16*>(a.data), i, n);
    const float scale = a.scales[i / kQuantizedBlock];
    read_lane(static_cast<const uint8_t*>(a.data), i, n,
              [&](int k, uint8_t code) { x.v[k] = Code::decode(code, scale); });
}

// The largest magnitude of a lane's elements.
SIMT_DEVICE float largest_magnitude(const LaneFloats& x) {
    float largest = 0.f;
#pragma omp simd reduction(max : largest)
    for (int k = 0; k < kLaneElements; k++) {
        const float magnitude = fabsf(x.v[k]);
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

// Stores a lane's part of a block; all lanes of a warp must call it.
template <class Code>
SIMT_DEVICE void store_moment(const MomentArray& a, int64_t i, int64_t n, LaneFloats& x,
                              const LaneRandom& random, int shift) {
    if (a.format == Moment::Fp32) return store_floats(static_cast<float*>(a.data), i, n, x);
    if (a.format == Moment::Bf16) return store_randomly(static_cast<bf16*>(a.data), i, n, x, random, shift);
    for (int k = 0; k < kLaneElements; k++) x.v[k] = Code::quantity(x.v[k]);
    const float scale = block_scale(warp_max(largest_magnitude(x))), inverse = inverse_scale(scale);
    write_lane(static_cast<uint8_t*>(a.data), i, n, [&](int k) { return Code::encode(x.v[k], inverse); });
    if (lane() == 0) a.scales[i / kQuantizedBlock] = scale;
}

template <class T>
SIMT_DEVICE void load_master(LaneFloats& x, const UpdateArrays<T>& a, int64_t i) {
    if constexpr (!std::is_same_v<T, float>) {
        if (a.master_format == Master::Fp32) return load_floats(x, static_cast<float*>(a.master), i, a.n);
        if (a.master_format == Master::Split) {
            bf16 high[kLaneElements];
            read_lane(a.weights, i, a.n, [&](int k, bf16 e) { high[k] = e; });
            return read_lane(static_cast<const int16_t*>(a.master), i, a.n,
                             [&](int k, int16_t low) { x.v[k] = join<16>(high[k], low); });
        }
    }
    load_floats(x, a.weights, i, a.n);
}

template <class T>
SIMT_DEVICE void store_master(const UpdateArrays<T>& a, int64_t i, const LaneFloats& x,
                              const LaneRandom& random) {
    if constexpr (std::is_same_v<T, float>) {
        store_floats(a.weights, i, a.n, x);
    } else if (a.master_format == Master::None) {
        store_randomly(a.weights, i, a.n, x, random, 0);
    } else {
        write_lane(a.weights, i, a.n, [&](int k) { return narrow_master<bf16>(x.v[k]); });
        if (a.master_format == Master::Fp32)
            store_floats(static_cast<float*>(a.master), i, a.n, x);
        else
            write_lane(static_cast<int16_t*>(a.master), i, a.n,
                       [&](int k) { return static_cast<int16_t>(split<16>(x.v[k]).low); });
    }
}

// Updates a lane's elements; those less than `decayed` behind the first decay. `scale` is the gradient's
// factor for clipping. The buffers are at like offsets in their pages, and a CPU then takes a load right
// after a store for one of the same address. So all loads come first, and the pointers are not __restrict__,
// which would let the compiler mix loads and stores.
SIMT_DEVICE void adamw(float* w, float* m, float* v, const float* gradients, const UpdateFactors& f,
                       float scale, int decayed) {
    for (int k = 0; k < kLaneElements; k++) {
        const float grad = gradients[k] * scale;
        const float a = fmaf(f.beta1, m[k], (1.f - f.beta1) * grad);
        const float b = fmaf(f.beta2, v[k], (1.f - f.beta2) * grad * grad);
        const float decay = lane_offset(k) < decayed ? f.weight_decay : 0.f;
        const float step = a * f.m_correction / (sqrtf(b * f.v_correction) + f.epsilon);
        const float updated = fmaf(-f.lr, fmaf(decay, w[k], step), w[k]);
        m[k] = a;
        v[k] = b;
        w[k] = updated;
    }
}
SIMT_DEVICE void sgd(float* w, const float* gradients, const UpdateFactors& f, float scale, int decayed) {
    for (int k = 0; k < kLaneElements; k++) {
        const float decay = lane_offset(k) < decayed ? f.weight_decay : 0.f;
        w[k] = fmaf(-f.lr, fmaf(decay, w[k], gradients[k] * scale), w[k]);
    }
}

// Updates a lane's part of a block; its first element has the index i. `rounds` is rounds_randomly(a).
template <class T>
SIMT_DEVICE void update_lane(const UpdateArrays<T>& a, const UpdateFactors& f, float scale, bool rounds,
                             int64_t i) {
    LaneFloats w, grad, m, v;
    load_master(w, a, i);
    load_floats(grad, a.gradients, i, a.n);
    const bool adam = a.optimizer == Optimizer::AdamW;
    if (adam) {
        load_moment<SignedCode>(m, a.m, i, a.n);
        load_moment<RootCode>(v, a.v, i, a.n);
    }
    const int64_t left = a.decayed - i;
    const int decayed = left <= 0 ? 0 : left < kQuantizedBlock ? static_cast<int>(left) : kQuantizedBlock;
    if (adam)
        adamw(w.v, m.v, v.v, grad.v, f, scale, decayed);
    else
        sgd(w.v, grad.v, f, scale, decayed);
    LaneRandom random;
    if (rounds) {
        for (int k = 0; k < kLaneElements; k++)
            random.bits[k] =
                random_bits_of(f.random_key, static_cast<uint64_t>(a.first + i + lane_offset(k)));
    } else if (!kFastCpu) {  // unused then, but no compiler sees that; in registers this costs nothing
        random = {};
    }
    if (adam) {
        store_moment<SignedCode>(a.m, i, a.n, m, random, 16);
        store_moment<RootCode>(a.v, i, a.n, v, random, 32);
    }
    store_master(a, i, w, random);
}

// Whether anything of an update uses stochastic rounding.
template <class T>
SIMT_HOST_DEVICE bool rounds_randomly(const UpdateArrays<T>& a) {
    return (!std::is_same_v<T, float> && a.master_format == Master::None) ||
           (a.optimizer == Optimizer::AdamW && (a.m.format == Moment::Bf16 || a.v.format == Moment::Bf16));
}

// With four blocks at a time, ptxas would spill.
template <class T>
__global__ void __launch_bounds__(kBlockThreads, 3)
    optimizer_kernel(UpdateArrays<T> a, const UpdateFactors* factors, const float* norm) {
    const UpdateFactors f = *factors;
    const float total = *norm;
    const float scale = f.clip > 0.f && total > f.clip ? f.clip / total : 1.f;
    const bool rounds = rounds_randomly(a);
    const int64_t first = (int64_t{blockIdx.x} * kBlockWarps + warp()) * kUpdateBlocks;
    for (int b = 0; b < kUpdateBlocks; b++) {
        const int64_t block = (first + b) * kQuantizedBlock;
        if (block < a.n) update_lane(a, f, scale, rounds, block + lane() * kLaneGroup);
    }
}

// The bytes that an update reads and writes.
template <class T>
double update_bytes(const UpdateArrays<T>& a) {
    const auto moment = [](Moment format) {  // read and written
        return format == Moment::Fp32 ? 8. : format == Moment::Bf16 ? 4. : 2 + 8. / kQuantizedBlock;
    };
    double bytes = 2 * sizeof(T) + sizeof(T);  // weights, gradients
    if (!std::is_same_v<T, float> && a.master_format == Master::Fp32)
        bytes += 8 - sizeof(T);  // read instead of the weights
    if (!std::is_same_v<T, float> && a.master_format == Master::Split) bytes += 4;
    if (a.optimizer == Optimizer::AdamW) bytes += moment(a.m.format) + moment(a.v.format);
    return bytes * static_cast<double>(a.n);
}

// The formats of an update's state, as "adamw fp32 8bit 8bit": the optimizer, the master, m, v.
template <class T>
const char* update_form(const UpdateArrays<T>& a) {
    static const auto& texts = *new std::map<std::array<int, 4>, std::string>([] {
        std::map<std::array<int, 4>, std::string> all;
        for (int optimizer = 0; optimizer < 2; optimizer++)
            for (int master = 0; master < 3; master++)
                for (int m = 0; m < 3; m++)
                    for (int v = 0; v < 3; v++)
                        all[{optimizer, master, m, v}] =
                            std::string(kOptimizerNames[optimizer]) + " " + kMasterNames[master] +
                            (optimizer ? "" : std::string(" ") + kMomentNames[m] + " " + kMomentNames[v]);
        return all;
    }());
    return texts
        .at({static_cast<int>(a.optimizer), static_cast<int>(a.master_format), static_cast<int>(a.m.format),
             static_cast<int>(a.v.format)})
        .c_str();
}

__global__ void __launch_bounds__(1) set_factors_kernel(UpdateFactors* to, UpdateFactors factors) {
    *to = factors;
}

inline UpdateFactors factors_of(const OptimizerStep& o) {
    const auto correction = [&](float beta) {
        return static_cast<float>(1.0 / (1.0 - std::pow(double{beta}, o.step)));
    };
    return {.lr = o.lr,
            .beta1 = o.beta1,
            .beta2 = o.beta2,
            .epsilon = o.epsilon,
            .weight_decay = o.weight_decay,
            .clip = o.clip,
            .m_correction = correction(o.beta1),
            .v_correction = correction(o.beta2),
            .random_key = random_key(o.seed, kRoundingStream, static_cast<uint64_t>(o.step))};
}
// Writes a step's factors to the device, for the updates that follow on the stream.
inline void set_factors(UpdateFactors* factors, const OptimizerStep& o, Stream stream) {
    launch<set_factors_kernel>(1, 1, 0, stream, factors, factors_of(o));
}

// One step of the optimizer on the arrays, with the factors that set_factors() wrote. The gradient is first
// scaled to a norm of at most `clip`; norm (1) is on the device, as the factors are. Pointers must be aligned
// to 16 bytes. Stochastic rounding depends on nothing but the seed, the step and the element's index.
template <class T>
void optimizer_update(const UpdateFactors* factors, const UpdateArrays<T>& a, const Tensor<float>& norm,
                      Stream stream) {
    const Operation operation("optimizer_update", 0, update_bytes(a), {}, {.form = update_form(a)});
    const int64_t blocks = ceil_div(ceil_div(a.n, kQuantizedBlock), kBlockWarps * kUpdateBlocks);
    launch<optimizer_kernel<T>>(static_cast<unsigned>(blocks), kBlockThreads, 0, stream, a, factors,
                                norm.data());
}

// The arrays of a unit of the model (model.h), or of the slice of it whose state this rank has. Its weights
// and gradients (unit.size) may be anywhere.
template <class T>
UpdateArrays<T> arrays_of_unit(const State<T>& state, const Unit& unit, T* weights, const T* gradients) {
    const Slice own = state.own_slice(unit);
    const int64_t at = unit.offset + own.first;
    const StateOptions& s = state.options;
    return {.weights = weights ? weights + own.first : nullptr,
            .gradients = gradients ? gradients + own.first : nullptr,
            .optimizer = s.optimizer,
            .master_format = s.master,
            .master = state.template data<void>(StatePart::Master, at),
            .m = {s.m, state.template data<void>(StatePart::M, at),
                  state.template data<float>(StatePart::MScale, at)},
            .v = {s.v, state.template data<void>(StatePart::V, at),
                  state.template data<float>(StatePart::VScale, at)},
            .decayed = unit.decayed - own.first,
            .n = own.count,
            .first = at};
}

// The arrays of a chunk of a unit, whose state is in the buffer `buffer` of chunk_bytes().
template <class T>
UpdateArrays<T> arrays_of_chunk(const State<T>& state, const Unit& unit, const StateChunk& chunk,
                                char* buffer, T* unit_weights, const T* unit_gradients) {
    const int64_t at = chunk.first - unit.offset;
    const StateOptions& s = state.options;
    const auto from_chunk = [&](auto* p) { return p ? p + at : p; };  // null in a dry run
    const auto moment = [&](Moment format, StatePart part, StatePart scale) {
        return MomentArray{format, state.template in_chunk<void>(part, buffer),
                           state.template in_chunk<float>(scale, buffer)};
    };
    return {.weights = from_chunk(unit_weights),
            .gradients = from_chunk(unit_gradients),
            .optimizer = s.optimizer,
            .master_format = s.master,
            .master = state.template in_chunk<void>(StatePart::Master, buffer),
            .m = moment(s.m, StatePart::M, StatePart::MScale),
            .v = moment(s.v, StatePart::V, StatePart::VScale),
            .decayed = unit.decayed - at,
            .n = chunk.count,
            .first = chunk.first};
}
