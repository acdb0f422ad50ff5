// attention_hopper.cuh - causal attention as in attention.cuh, for the tensor cores of compute
// capability 9.0. It also runs in the faithful CPU build.
//
// A block has one producer and several consumers, of four warps each (Shah et al. 2024, FlashAttention-3).
// The producer starts TMA copies that fill rings of tiles. Each consumer multiplies its 64 rows with them by
// wgmma, which reads shared memory directly. The formulas, and what is rounded, are those of attention.cuh.
//
//                       stays    passes by
//   forward             Q        K, V       S = Q K^T                        out += P V
//   backward, keys      K, V     Q, dout    S^T = K Q^T, dP^T = V dout^T     dV += P^T dout, dK += dS^T Q
//   backward, queries   Q, dout  K, V       S = Q K^T,   dP = dout V^T       dQ += dS K
//
// The products in the left column sum over the columns of both tiles (K-major). Those in the right column
// have their left operand in registers, where the scores are, and sum over the rows of a passing tile
// (MN-major).
#pragma once

#include "llmc/attention_input.h"
#include "llmc/attention_scores.cuh"
#include "llmc/hopper.cuh"

// Whether this build has these kernels for T. The Makefile defines LLMC_HOPPER if it compiles for sm_90a.
#if defined(LLMC_HOPPER) || defined(LLMC_PLANNER) || defined(SIMT_FAITHFUL)
template <class T>
constexpr bool kHopperAttention = std::is_same_v<T, bf16>;
#else
template <class T>
constexpr bool kHopperAttention = false;
#endif
inline bool hopper_attention_supports(int head_size) { return head_size == 64 || head_size == 128; }

constexpr int kWarpgroup = 128;  // threads

// Sizes of forward. A consumer has registers for the output, the scores and the rounded scores.
template <int kHead>
struct HopperForward {
    static constexpr int kConsumers = kHead == 64 ? 3 : 2, kThreads = kWarpgroup * (1 + kConsumers);
    // Registers per thread. An SM has 65536, and threads start with 65536 / kThreads each, rounded down to a
    // multiple of 8; then the producer gives some to the consumers.
    static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
    static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;
    static constexpr int kRows = 64 * kConsumers, kKeys = 128;
    using QTile = SwizzledTile<kRows, kHead>;
    using KvTile = SwizzledTile<kKeys, kHead>;
    static constexpr int kSlots = 2;  // in the ring of K, and in that of V
    // Shared memory holds Q, K's slots, V's slots, and the barriers of Q and of the rings.
    static constexpr uint32_t kKeyTiles = QTile::kBytes, kValueTiles = kKeyTiles + kSlots * KvTile::kBytes;
    static constexpr uint32_t kBarriers = kValueTiles + kSlots * KvTile::kBytes;
    static constexpr uint32_t kKeyRing = kBarriers + 8, kValueRing = kKeyRing + 8 * 2 * kSlots;
    static constexpr size_t kSharedBytes = 1024 + kValueRing + 8 * 2 * kSlots;
};

// Sizes of both kernels of backward: two tiles stay, and two tiles of the other side pass by at a time.
template <int kHead>
struct HopperBackward {
    static constexpr int kConsumers = 2, kThreads = kWarpgroup * (1 + kConsumers);
    static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
    static constexpr int kRows = 64 * kConsumers, kPassing = 64;
    using StayingTile = SwizzledTile<kRows, kHead>;
    using PassingTile = SwizzledTile<kPassing, kHead>;
    static constexpr int kSlots = 4;  // of the ring: two tiles and, in the keys' kernel, lse and delta
    static constexpr uint32_t kPassingTiles = 2 * StayingTile::kBytes;  // where they begin
    static constexpr uint32_t kStatistics = kPassingTiles + kSlots * 2 * PassingTile::kBytes;
    static constexpr uint32_t kBarriers =
        kStatistics + kSlots * 2 * kPassing * 4;  // of the staying tiles, then of the ring
    static constexpr size_t kSharedBytes = 1024 + kBarriers + 8 + 8 * 2 * kSlots;
    // Heads of 64 leave a consumer registers for its rows of the staying tiles: then shared memory delivers
    // only the passing ones. In the kernel for keys they also leave registers for the scores of a tile beside
    // the gradients' products of the previous one.
    static constexpr bool kRegistersLeft = kHead == 64;

    // Where a slot's tiles, or its lse and delta, begin in shared memory.
    SIMT_HOST_DEVICE static constexpr uint32_t passing_tile(int slot) {
        return kPassingTiles + slot * 2 * PassingTile::kBytes;
    }
    SIMT_HOST_DEVICE static constexpr uint32_t statistics(int slot) {
        return kStatistics + slot * 2 * kPassing * 4;
    }
};

#if defined(SIMT_GPU) || defined(SIMT_FAITHFUL)
struct HopperForwardMaps {
    TensorMap q, k, v;
};

// Dynamic shared memory, from its first multiple of 1024 bytes on.
SIMT_DEVICE unsigned char* swizzled_shared_memory() {
    DYNAMIC_SHARED(unsigned char, shared);
    return shared + (1024 - shared_address(shared) % 1024) % 1024;
}

// Rounds scores to left operands of the next product; a[k] has their columns 16 k .. 16 k + 15. The lanes own
// the same elements of both ("Register Fragments"), as with mma.sync.
template <int N>
SIMT_DEVICE void round_scores(FragmentA<bf16> (&a)[N / 2], const AttentionRows<N>& p) {
    UNROLL for (int k = 0; k < N / 2; k++) a[k] = accumulators_as_a<bf16>(p[0][2 * k], p[0][2 * k + 1]);
}

// What a block works on: batch entry b and head h, one of `heads`. `block` is the head's index over all batch
// entries.
struct HopperPlace {
    int b, h;
    SIMT_DEVICE HopperPlace(int block, int heads) : b(block / heads), h(block % heads) {}
};
// What a consumer works on: group_row is its first row within the block, `row` its warp's first row. The
// shuffle tells the compiler that they are the same in all lanes, so that it can use uniform registers.
struct HopperRows : HopperPlace {
    int group_row, row;
    SIMT_DEVICE HopperRows(int block, int heads, int block_row) : HopperPlace(block, heads) {
        const int number = __shfl_sync(~0u, warp(), 0) - kWarpgroup / kLanes;
        group_row = number / 4 * 64;
        row = block_row + number * 16;
    }
};

// The number of consumers that have any of the `rows` rows from their block's first on. The others return at
// once, so that at the end of a sequence they neither multiply nor are waited for.
template <int kConsumers>
SIMT_DEVICE int consumers_with_rows(int rows) {
    const int consumers = (rows + 63) / 64;
    return consumers < kConsumers ? consumers : kConsumers;
}

// The producer of forward, one thread: loads Q, then tiles of keys and values as slots become empty.
template <int kHead>
SIMT_DEVICE void hopper_forward_produce(uint32_t shared, const AttentionInput<bf16>& in,
                                        const HopperForwardMaps& maps, int block_row) {
    using F = HopperForward<kHead>;
    using KvTile = typename F::KvTile;
    const HopperPlace place(in.grouped_head(), in.heads);
    const int q_column = static_cast<int>(in.q_offset(0, place.h));
    const int kv_column = static_cast<int>(in.kv_offset(0, place.h / in.group()));
    const int end = in.keys_before(block_row + F::kRows);
    const uint32_t q_full = shared + F::kBarriers;
    barrier_arrive_expecting(q_full, F::QTile::kBytes);
    start_load<typename F::QTile>(shared, maps.q, q_full, q_column, block_row, place.b);
    Ring<F::kSlots> keys{shared + F::kKeyRing}, values{shared + F::kValueRing};
    const auto load = [&](Ring<F::kSlots>& ring, uint32_t tiles, const TensorMap& map, int key) {
        ring.wait_empty();
        barrier_arrive_expecting(ring.full(), KvTile::kBytes);
        start_load<KvTile>(tiles + ring.slot * KvTile::kBytes, map, ring.full(), kv_column, key, place.b);
        ring.advance();
    };
    for (int key = in.first_key(place.b, block_row); key < end; key += F::kKeys) {
        load(keys, shared + F::kKeyTiles, maps.k, key);
        load(values, shared + F::kValueTiles, maps.v, key);
    }
}

// A consumer of forward. It starts the scores of a tile before the output of the previous tile: while the
// tensor cores compute that output, it computes the softmax of the scores.
template <int kHead>
SIMT_DEVICE void hopper_forward_consume(uint32_t shared, bf16* out, float* lse,
                                        const AttentionInput<bf16>& in, float scale, int block_row) {
    using F = HopperForward<kHead>;
    using KvTile = typename F::KvTile;
    constexpr int N = F::kKeys / 8;
    const HopperRows place(in.grouped_head(), in.heads, block_row);
    if (block_row + place.group_row >= in.queries) return;
    // Where the keys end that its rows see. It does not release later tiles; these are at most as many as the
    // ring has slots, so no load waits for it.
    static_assert(F::kRows - 64 <= F::kSlots * F::kKeys);
    const int end = in.keys_before(block_row + place.group_row + 64);
    int key = in.first_key(place.b, block_row);
    int first_keys[2] = {};  // of the documents of this lane's queries
    if (in.positions) document_keys(first_keys, in, place.b, place.row);
    Ring<F::kSlots> keys{shared + F::kKeyRing}, values{shared + F::kValueRing};

    AttentionRows<kHead / 8> o = {};
    AttentionRows<N> s;
    FragmentA<bf16> p[N / 2];
    OnlineSoftmax<true> softmax;
    if (in.continues) continue_output<kHead>(o, softmax, in, place.h, place.row, true);
    float correction[2];
    const auto start_scores = [&] {
        start_rows_product<typename F::QTile, KvTile>(s, shared, place.group_row,
                                                      shared + F::kKeyTiles + keys.slot * KvTile::kBytes);
    };
    const auto start_output = [&] {
        values.wait_full();
        start_columns_product<KvTile>(o, p, shared + F::kValueTiles + values.slot * KvTile::kBytes);
    };
    const auto take_softmax = [&] {
        fence_registers(s);
        keys.release();
        keys.advance();
        // The last column that this warp's first query sees.
        const int diagonal = in.position(place.row) - key;
        if (in.alibi) add_distances(s, diagonal, in.slope(place.h, scale));
        if (diagonal < F::kKeys - 1) mask_after(s, diagonal, -INFINITY);
        if (diagonal + 15 >= in.span()) mask_up_to(s, diagonal - in.span(), -INFINITY);
        if (in.positions) mask_before(s, {first_keys[0] - key, first_keys[1] - key}, -INFINITY);
        softmax.step(s, correction, scale * kLog2e);
        fence_registers(s);
        // Waits for the next tile here, because this is a branch: without one, the compiler moves the wait
        // for the output's product before the exponentials.
        if (key + F::kKeys < end) keys.wait_full();
    };
    const auto take_output = [&] {
        fence_registers(o);
        fence_registers(p);
        values.release();
        values.advance();
    };
    barrier_wait(shared + F::kBarriers, 0);  // Q
    // Skips tiles before the windows and documents of its rows.
    for (; key + F::kKeys <= in.first_key(place.b, block_row + place.group_row); key += F::kKeys) {
        keys.pass_over();
        values.pass_over();
    }
    keys.wait_full();
    start_scores();
    wgmma_wait<0>();
    take_softmax();
    if (in.continues) scale_rows(o, correction);
    round_scores<N>(p, s);
    for (key += F::kKeys; key < end; key += F::kKeys) {
        start_scores();
        start_output();
        wgmma_wait<1>();
        take_softmax();
        wgmma_wait<0>();
        take_output();
        if (correction[0] != 1.f || correction[1] != 1.f) scale_rows(o, correction);
        round_scores<N>(p, s);
    }
    start_output();
    wgmma_wait<0>();
    take_output();
    store_output<kHead>(out, lse, o, softmax, in, place.b, place.h, place.row, scale, true);
}

// Computes out and lse of kConsumers * 64 queries of one head. For the grid see launch_in_groups().
// The longest tiles of a group of heads come first.
template <int kHead>
__global__ void __launch_bounds__(HopperForward<kHead>::kThreads, 1)
    hopper_attention_forward_kernel(bf16* out, float* lse, AttentionInput<bf16> in, float scale,
                                    const __grid_constant__ HopperForwardMaps maps) {
#if defined(HOPPER_CODE)
    using F = HopperForward<kHead>;
    const uint32_t shared = shared_address(swizzled_shared_memory());
    const int block_row = in.block_tile_from_last() * F::kRows;
    if (threadIdx.x == 0) {
        barrier_init(shared + F::kBarriers, 1);
        const int consumers = consumers_with_rows<F::kConsumers>(in.queries - block_row);
        Ring<F::kSlots>{shared + F::kKeyRing}.init(1, 4 * consumers);
        Ring<F::kSlots>{shared + F::kValueRing}.init(1, 4 * consumers);
        barriers_are_made();
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
        setmaxnreg_dec<F::kProducerRegisters>();
        if (threadIdx.x == 0) hopper_forward_produce<kHead>(shared, in, maps, block_row);
    } else {
        setmaxnreg_inc<F::kConsumerRegisters>();
        hopper_forward_consume<kHead>(shared, out, lse, in, scale, block_row);
    }
#else
    __trap();  // launched on sm_90a only
#endif
}

// Describes the input to TMA as (batch, rows, columns up to the last head's), in boxes of box_rows rows.
inline TensorMap map_of_queries(const AttentionInput<bf16>& in, const bf16* q, int box_rows) {
    return tensor_map(q, in.q_offset(0, in.heads - 1) + in.head_size, in.queries, in.batch, in.q_row,
                      in.q_batch, box_rows);
}
inline TensorMap map_of_keys(const AttentionInput<bf16>& in, const bf16* k, int box_rows) {
    return tensor_map(k, in.kv_offset(0, in.kv_heads - 1) + in.head_size, in.keys, in.batch, in.kv_row,
                      in.kv_batch, box_rows);
}

// attention_forward() for the head sizes of hopper_attention_supports() and rows of whole, aligned 16 bytes.
template <int kHead>
void hopper_forward(bf16* out, float* lse, const AttentionInput<bf16>& in, Stream stream) {
    using F = HopperForward<kHead>;
    const HopperForwardMaps maps{map_of_queries(in, in.q, F::kRows), map_of_keys(in, in.k, F::kKeys),
                                 map_of_keys(in, in.v, F::kKeys)};
    const dim3 grid(in.batch * in.heads, ceil_div(in.queries, F::kRows));
    launch_in_groups(grid, in, 2, [&](dim3 part, const AttentionInput<bf16>& of_part) {
        launch<hopper_attention_forward_kernel<kHead>>(part, F::kThreads, F::kSharedBytes, stream, out, lse,
                                                       of_part, in.scale(), maps);
    });
}
inline void hopper_attention_forward(bf16* out, float* lse, const AttentionInput<bf16>& in, Stream stream) {
    in.head_size == 64 ? hopper_forward<64>(out, lse, in, stream) : hopper_forward<128>(out, lse, in, stream);
}

struct HopperBackwardMaps {
    TensorMap staying[2], passing[2];
};

// Initializes the barriers of a block that has `rows` rows from its first one on; ends with a
// __syncthreads(). Returns where the tiles begin.
template <int kHead>
SIMT_DEVICE unsigned char* hopper_backward_begin(int full_arrivals, int rows) {
    using B = HopperBackward<kHead>;
    unsigned char* const shared = swizzled_shared_memory();
    const uint32_t staying_full = shared_address(shared) + B::kBarriers;
    if (threadIdx.x == 0) {
        barrier_init(staying_full, 1);
        Ring<B::kSlots>{staying_full + 8}.init(full_arrivals, 4 * consumers_with_rows<B::kConsumers>(rows));
        barriers_are_made();
    }
    __syncthreads();
    return shared;
}

// The producer of backward, one warp: loads the staying tiles, from block_row on, and the passing ones, from
// `begin` to before `end`. With kKeysStay, the queries of all heads that share the keys pass, head after
// head; each lane also copies some of their lse, times log2(e), and delta, and arrives at the ring's barrier.
// Otherwise the queries of one head stay, and keys pass.
template <int kHead, bool kKeysStay>
SIMT_DEVICE void hopper_backward_produce(unsigned char* shared, const AttentionInput<bf16>& in,
                                         const HopperBackwardMaps& maps, int block_row, int begin, int end,
                                         const float* lse, const float* delta) {
    using B = HopperBackward<kHead>;
    using Staying = typename B::StayingTile;
    using Passing = typename B::PassingTile;
    const HopperPlace place(in.grouped_head(), kKeysStay ? in.kv_heads : in.heads);
    const int group = in.group(), kv = kKeysStay ? place.h : place.h / group;
    const int first_head = kKeysStay ? kv * group : place.h, heads_end = first_head + (kKeysStay ? group : 1);
    // The column where a head begins in the i-th tensor: in K or V, or for head h in Q or dout.
    const auto column = [&](bool of_keys, int h, int i) {
        if (of_keys) return static_cast<int>(in.kv_offset(0, kv));
        return i == 0 ? static_cast<int>(in.q_offset(0, h)) : h * kHead;
    };
    const uint32_t at = shared_address(shared), staying_full = at + B::kBarriers;
    if (lane() == 0) {
        barrier_arrive_expecting(staying_full, 2 * Staying::kBytes);
        for (int i = 0; i < 2; i++)
            start_load<Staying>(at + i * Staying::kBytes, maps.staying[i], staying_full,
                                column(kKeysStay, first_head, i), block_row, place.b);
    }
    Ring<B::kSlots> ring{staying_full + 8};
    for (int h = first_head; h < heads_end; h++)
        for (int row = begin; row < end; row += B::kPassing, ring.advance()) {
            ring.wait_empty();
            if (lane() == 0) {
                const uint32_t to = at + B::passing_tile(ring.slot);
                barrier_arrive_expecting(ring.full(), 2 * Passing::kBytes);
                for (int i = 0; i < 2; i++)
                    start_load<Passing>(to + i * Passing::kBytes, maps.passing[i], ring.full(),
                                        column(!kKeysStay, h, i), row, place.b);
            }
            if constexpr (kKeysStay) {
                float* const to = reinterpret_cast<float*>(shared + B::statistics(ring.slot));
                const int64_t from = in.row_offset(place.b, h) + row;
                for (int i = lane(); i < B::kPassing; i += kLanes) {
                    to[i] = row + i < end ? lse[from + i] * kLog2e : 0.f;
                    to[B::kPassing + i] = row + i < end ? delta[from + i] : 0.f;
                }
                barrier_arrive(ring.full());
            }
        }
}

// A consumer of the kernel for keys. If registers are left, it starts the scores of a tile before it waits
// for the gradients' products with the previous tile, so that the tensor cores have work while it computes
// probabilities.
template <int kHead>
SIMT_DEVICE void hopper_keys_consume(unsigned char* shared, bf16* dk, bf16* dv,
                                     const AttentionInput<bf16>& in, float scale, int block_row) {
    using B = HopperBackward<kHead>;
    using Staying = typename B::StayingTile;
    using Passing = typename B::PassingTile;
    constexpr int N = B::kPassing / 8;
    const HopperRows place(in.grouped_head(), in.kv_heads, block_row);
    if (block_row + place.group_row >= in.keys) return;
    const uint32_t k_tile = shared_address(shared), v_tile = k_tile + Staying::kBytes;
    Ring<B::kSlots> ring{k_tile + B::kBarriers + 8};
    const int end = in.queries_before(place.b, block_row + B::kRows);
    const int begin = in.first_query(block_row), group_key = block_row + place.group_row;
    const int seen_begin = in.first_query(group_key);  // queries that see any of its keys
    const int seen_end = in.queries_before(place.b, group_key + 64);
    int ends[2] = {};  // of the documents of this lane's keys
    if (in.positions) document_ends(ends, in, place.b, place.row);

    AttentionRows<kHead / 8> dk_rows = {}, dv_rows = {};
    AttentionRows<N> p, ds;
    FragmentA<bf16> p_rounded[N / 2] = {}, ds_rounded[N / 2] = {};
    const auto q_tile = [&] { return k_tile + B::passing_tile(ring.slot); };
    FragmentA<bf16> k_rows[4 * Staying::kPanels], v_rows[4 * Staying::kPanels];
    const auto start_scores = [&] {
        const uint32_t tile = q_tile();
        ring.wait_full();
        if constexpr (B::kRegistersLeft) {
            start_rows_product<Passing>(p, k_rows, tile);
            start_rows_product<Passing>(ds, v_rows, tile + Passing::kBytes);
        } else {
            start_rows_product<Staying, Passing>(p, k_tile, place.group_row, tile);
            start_rows_product<Staying, Passing>(ds, v_tile, place.group_row, tile + Passing::kBytes);
        }
    };
    const auto start_values = [&] {
        start_columns_product<Passing>(dv_rows, p_rounded, q_tile() + Passing::kBytes);
    };
    // Makes the rounded scores from the products p, which are complete, and ds, which may still run.
    const auto take_scores = [&](int h, int query) {
        const float* const lse_of = reinterpret_cast<const float*>(shared + B::statistics(ring.slot));
        const float* const delta_of = lse_of + B::kPassing;
        // The first column that sees this warp's first key.
        const int diagonal = place.row - in.position(query);
        fence_registers(p);
        if (in.alibi) add_distances(p, diagonal, -in.slope(h, scale));
        const auto to_probability = [&](float& x, int, int column) {
            x = exp2_of(x * (scale * kLog2e) - lse_of[column]);
        };
        for_each_score<N>(to_probability, p);
        // A branch before the wait, as in forward.
        if (diagonal + 15 > 0) mask_up_to(p, diagonal - 1, 0.f);
        if (diagonal + in.span() < B::kPassing) mask_after(p, diagonal + in.span() - 1, 0.f);
        if (in.positions) mask_from(p, {ends[0] - query, ends[1] - query}, 0.f);
        round_scores<N>(p_rounded, p);
        wgmma_wait<0>();
        fence_registers(ds);
        if constexpr (B::kRegistersLeft)
            fence_registers(v_rows);
        else
            start_values();
        const auto gradient = [&](float& x, float probability, int, int column) {
            x = probability * (x - delta_of[column]);
        };
        for_each_score<N>(gradient, ds, p);
        round_scores<N>(ds_rounded, ds);
    };
    const auto start_gradients = [&] {
        if constexpr (B::kRegistersLeft) start_values();
        start_columns_product<Passing>(dk_rows, ds_rounded, q_tile());
    };
    const auto take_gradients = [&](const Ring<B::kSlots>& tile) {
        fence_registers(dv_rows);
        fence_registers(dk_rows);
        fence_registers(p_rounded);
        fence_registers(ds_rounded);
        tile.release();
    };
    barrier_wait(k_tile + B::kBarriers, 0);
    if constexpr (B::kRegistersLeft) {
        load_rows<Staying>(k_rows, shared, place.row - block_row);
        load_rows<Staying>(v_rows, shared + Staying::kBytes, place.row - block_row);
    }
    const int first_head = place.h * in.group(), heads_end = first_head + in.group();
    for (int h = first_head; h < heads_end; h++) {
        int query = begin;
        for (; query < end && query + B::kPassing <= seen_begin; query += B::kPassing) ring.pass_over();
        if constexpr (!B::kRegistersLeft) {
            for (; query < seen_end; query += B::kPassing) {
                start_scores();
                wgmma_wait<1>();
                take_scores(h, query);
                start_gradients();
                wgmma_wait<0>();
                take_gradients(ring);
                ring.advance();
            }
        } else if (query < seen_end) {
            start_scores();
            wgmma_wait<1>();
            take_scores(h, query);
            for (query += B::kPassing; query < seen_end; query += B::kPassing) {
                const Ring<B::kSlots> before = ring;
                start_gradients();
                ring.advance();
                start_scores();
                wgmma_wait<1>();
                take_gradients(before);
                take_scores(h, query);
            }
            start_gradients();
            wgmma_wait<0>();
            take_gradients(ring);
            ring.advance();
        }
        for (; query < end; query += B::kPassing) ring.pass_over();
    }
    store_key_rows<kHead>(dk, in.dk_sums, dk_rows, scale, in, place.b, place.h, place.row, true);
    store_key_rows<kHead>(dv, in.dv_sums, dv_rows, 1.f, in, place.b, place.h, place.row, true);
}

// Computes dK and dV of 128 keys of one head. For the grid see launch_in_groups().
// The longest tiles of a group of heads come first.
template <int kHead>
__global__ void __launch_bounds__(HopperBackward<kHead>::kThreads, 1)
    hopper_attention_backward_keys_kernel(bf16* dk, bf16* dv, const float* lse, const float* delta,
                                          AttentionInput<bf16> in, float scale,
                                          const __grid_constant__ HopperBackwardMaps maps) {
#if defined(HOPPER_CODE)
    using B = HopperBackward<kHead>;
    const int block_row = in.block_tile() * B::kRows, b = in.grouped_head() / in.kv_heads;
    unsigned char* const shared = hopper_backward_begin<kHead>(1 + kLanes, in.keys - block_row);
    if (threadIdx.x < kWarpgroup) {
        setmaxnreg_dec<B::kProducerRegisters>();
        if (warp() == 0)
            hopper_backward_produce<kHead, true>(shared, in, maps, block_row, in.first_query(block_row),
                                                 in.queries_before(b, block_row + B::kRows), lse, delta);
    } else {
        setmaxnreg_inc<B::kConsumerRegisters>();
        hopper_keys_consume<kHead>(shared, dk, dv, in, scale, block_row);
    }
#else
    __trap();  // launched on sm_90a only
#endif
}

// A consumer of the kernel for queries.
template <int kHead>
SIMT_DEVICE void hopper_queries_consume(unsigned char* shared, bf16* dq, const float* lse, const float* delta,
                                        const AttentionInput<bf16>& in, float scale, int block_row) {
    using B = HopperBackward<kHead>;
    using Staying = typename B::StayingTile;
    using Passing = typename B::PassingTile;
    constexpr int N = B::kPassing / 8;
    const HopperRows place(in.grouped_head(), in.heads, block_row);
    if (block_row + place.group_row >= in.queries) return;
    const uint32_t q_tile = shared_address(shared), dout_tile = q_tile + Staying::kBytes;
    Ring<B::kSlots> ring{q_tile + B::kBarriers + 8};
    float row_lse[2], row_delta[2];
    UNROLL for (int r = 0; r < 2; r++) {
        const int query = place.row + lane() / 4 + 8 * r;
        row_lse[r] = query < in.queries ? lse[in.row_offset(place.b, place.h) + query] * kLog2e : 0.f;
        row_delta[r] = query < in.queries ? delta[in.row_offset(place.b, place.h) + query] : 0.f;
    }
    AttentionRows<kHead / 8> dq_rows = {};
    if (in.continues) load_carried<kHead>(dq_rows, in, place.h, place.row, true);
    // As in forward; here the last tile is not released either.
    static_assert(B::kRows - 64 < B::kSlots * B::kPassing);
    const int seen_begin = in.first_key(place.b, block_row + place.group_row);
    const int end = in.keys_before(block_row + place.group_row + 64);
    int first_keys[2] = {};  // as in forward
    if (in.positions) document_keys(first_keys, in, place.b, place.row);

    AttentionRows<N> p, ds;
    FragmentA<bf16> ds_rounded[N / 2] = {};
    int key = in.first_key(place.b, block_row);
    const auto k_tile = [&] { return q_tile + B::passing_tile(ring.slot); };
    FragmentA<bf16> q_rows[4 * Staying::kPanels], dout_rows[4 * Staying::kPanels];
    const auto start_scores = [&] {
        const uint32_t tile = k_tile();
        ring.wait_full();
        if constexpr (B::kRegistersLeft) {
            start_rows_product<Passing>(p, q_rows, tile);
            start_rows_product<Passing>(ds, dout_rows, tile + Passing::kBytes);
        } else {
            start_rows_product<Staying, Passing>(p, q_tile, place.group_row, tile);
            start_rows_product<Staying, Passing>(ds, dout_tile, place.group_row, tile + Passing::kBytes);
        }
    };
    const auto take_scores = [&] {                          // as in the kernel for keys
        const int diagonal = in.position(place.row) - key;  // as in forward
        fence_registers(p);
        if (in.alibi) add_distances(p, diagonal, in.slope(place.h, scale));
        const auto to_probability = [&](float& x, int r, int) {
            x = exp2_of(x * (scale * kLog2e) - row_lse[r]);
        };
        for_each_score<N>(to_probability, p);
        if (diagonal < B::kPassing - 1) mask_after(p, diagonal, 0.f);  // a branch, as above
        if (diagonal + 15 >= in.span()) mask_up_to(p, diagonal - in.span(), 0.f);
        if (in.positions) mask_before(p, {first_keys[0] - key, first_keys[1] - key}, 0.f);
        wgmma_wait<0>();
        fence_registers(ds);
        if constexpr (B::kRegistersLeft) fence_registers(dout_rows);
        const auto gradient = [&](float& x, float probability, int r, int) {
            x = probability * (x - row_delta[r]);
        };
        for_each_score<N>(gradient, ds, p);
        round_scores<N>(ds_rounded, ds);
    };
    const auto start_gradients = [&] { start_columns_product<Passing>(dq_rows, ds_rounded, k_tile()); };
    barrier_wait(q_tile + B::kBarriers, 0);
    if constexpr (B::kRegistersLeft) {
        load_rows<Staying>(q_rows, shared, place.row - block_row);
        load_rows<Staying>(dout_rows, shared + Staying::kBytes, place.row - block_row);
    }
    // Skips tiles before the windows and documents of its rows.
    for (; key + B::kPassing <= seen_begin; key += B::kPassing) ring.pass_over();
    start_scores();
    wgmma_wait<1>();
    take_scores();
    for (key += B::kPassing; key < end; key += B::kPassing) {
        const Ring<B::kSlots> before = ring;
        start_gradients();
        ring.advance();
        start_scores();
        wgmma_wait<1>();
        fence_registers(dq_rows);
        fence_registers(ds_rounded);
        before.release();
        take_scores();
    }
    start_gradients();  // no load waits for the last tile to be released
    wgmma_wait<0>();
    fence_registers(dq_rows);
    fence_registers(ds_rounded);
    // dq may be q: these rows have been copied to shared memory, and no other block reads them.
    store_query_rows<kHead>(dq, dq_rows, scale, in, place.b, place.h, place.row, true);
}

// Computes dQ of 128 queries of one head. For the grid see launch_in_groups().
// The longest tiles of a group of heads come first.
template <int kHead>
__global__ void __launch_bounds__(HopperBackward<kHead>::kThreads, 1)
    hopper_attention_backward_queries_kernel(bf16* dq, const float* lse, const float* delta,
                                             AttentionInput<bf16> in, float scale,
                                             const __grid_constant__ HopperBackwardMaps maps) {
#if defined(HOPPER_CODE)
    using B = HopperBackward<kHead>;
    const int block_row = in.block_tile_from_last() * B::kRows;
    const int end = in.keys_before(block_row + B::kRows);
    unsigned char* const shared = hopper_backward_begin<kHead>(1, in.queries - block_row);
    if (threadIdx.x < kWarpgroup) {
        setmaxnreg_dec<B::kProducerRegisters>();
        if (warp() == 0)
            hopper_backward_produce<kHead, false>(shared, in, maps, block_row,
                                                  in.first_key(in.grouped_head() / in.heads, block_row), end,
                                                  nullptr, nullptr);
    } else {
        setmaxnreg_inc<B::kConsumerRegisters>();
        hopper_queries_consume<kHead>(shared, dq, lse, delta, in, scale, block_row);
    }
#else
    __trap();  // launched on sm_90a only
#endif
}

// Computes dq, dk and dv as attention_backward() does, from delta. The conditions are those of
// hopper_forward().
template <int kHead>
void hopper_backward(bf16* dq, bf16* dk, bf16* dv, const bf16* dout, const float* lse, const float* delta,
                     const AttentionInput<bf16>& in, Stream stream) {
    using B = HopperBackward<kHead>;
    const auto map_of_dout = [&](int box_rows) {
        return tensor_map(dout, in.out_row(), in.queries, in.batch, in.out_row(), in.queries * in.out_row(),
                          box_rows);
    };
    const HopperBackwardMaps keys{{map_of_keys(in, in.k, B::kRows), map_of_keys(in, in.v, B::kRows)},
                                  {map_of_queries(in, in.q, B::kPassing), map_of_dout(B::kPassing)}};
    const HopperBackwardMaps queries{
        {map_of_queries(in, in.q, B::kRows), map_of_dout(B::kRows)},
        {map_of_keys(in, in.k, B::kPassing), map_of_keys(in, in.v, B::kPassing)}};
    const auto tiles = [](int rows) { return static_cast<unsigned>(ceil_div(rows, B::kRows)); };
    const dim3 key_grid(in.batch * in.kv_heads, tiles(in.keys));
    launch_in_groups(key_grid, in, kProductsForKeys, [&](dim3 part, const AttentionInput<bf16>& of_part) {
        launch<hopper_attention_backward_keys_kernel<kHead>>(part, B::kThreads, B::kSharedBytes, stream, dk,
                                                             dv, lse, delta, of_part, in.scale(), keys);
    });
    const dim3 query_grid(in.batch * in.heads, tiles(in.queries));
    launch_in_groups(
        query_grid, in, kProductsForQueries, [&](dim3 part, const AttentionInput<bf16>& of_part) {
            launch<hopper_attention_backward_queries_kernel<kHead>>(
                part, B::kThreads, B::kSharedBytes, stream, dq, lse, delta, of_part, in.scale(), queries);
        });
}
inline void hopper_attention_backward(bf16* dq, bf16* dk, bf16* dv, const bf16* dout, const float* lse,
                                      const float* delta, const AttentionInput<bf16>& in, Stream stream) {
    in.head_size == 64 ? hopper_backward<64>(dq, dk, dv, dout, lse, delta, in, stream)
                       : hopper_backward<128>(dq, dk, dv, dout, lse, delta, in, stream);
}
#endif
