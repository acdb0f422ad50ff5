// hopper.h - instructions that only Hopper has: mbarriers, copies of whole tiles by TMA, and products by a
// warpgroup.
#pragma once

#include "test/gpu/instructions.h"

namespace gpu {

// The content of a CUtensorMap here, as cuTensorMapEncodeTiled writes it, for bf16 in three dimensions.
struct TensorMapBits {
    static constexpr uint64_t kMagic = 0x70616d2d61746d74;
    uint64_t magic;
    uint64_t data;
    uint64_t sizes[3], strides[2];  // elements; bytes
    uint32_t box[3];
};
static_assert(sizeof(TensorMapBits) <= 128);

// With a swizzle of 128 bytes, bits 4 to 6 of an address are exclusive-ored with bits 7 to 9.
inline uint64_t swizzled(uint64_t address) { return address ^ (address >> 7 & 7) << 4; }

inline void make_mbarrier(Warp& w, const Instruction& i, uint32_t lanes) {
    for_lanes(lanes, [&](int lane) {
        const uint32_t arrivals = w.at<uint32_t>(i.s[1])[lane];
        if (!arrivals || arrivals >= 1u << 20) throw Fault("an mbarrier is for 1 to 2^20 - 1 arrivals");
        w.block->make_mbarrier(w, lane, address_of(w, i, lane), arrivals);
    });
}
// What lanes did since their warp was last together, only they themselves release.
inline void arrive_lanes(Warp& w, const Instruction& i, uint32_t lanes, bool expects) {
    for_lanes(lanes, [&](int lane) {
        Barrier& b = w.block->mbarrier(w, address_of(w, i, lane));
        if (expects) w.block->expect_bytes(b, w.at<uint32_t>(i.s[1])[lane]);
        w.block->arrive(b, 1, w.after, w.index, w.clock - (lanes != w.live));
    });
    Block::release(w);
}
inline void arrive_at_mbarrier(Warp& w, const Instruction& i, uint32_t lanes) {
    arrive_lanes(w, i, lanes, false);
}
inline void arrive_expecting(Warp& w, const Instruction& i, uint32_t lanes) {
    arrive_lanes(w, i, lanes, true);
}
inline void try_wait_parity(Warp& w, const Instruction& i, uint32_t lanes) {
    uint32_t complete = 0;
    for_lanes(lanes, [&](int lane) {
        Barrier& b = w.block->mbarrier(w, address_of(w, i, lane));
        complete |= static_cast<uint32_t>(w.block->phase_complete(w, b, w.at<uint32_t>(i.s[1])[lane]))
                    << lane;
    });
    uint32_t& d = *w.at<uint32_t>(i.d);
    d = (d & ~lanes) | (complete & lanes);
    if (complete != lanes) w.block->waits_in_vain(w);
}
inline void fence_proxy(Warp& w, const Instruction&, uint32_t) {
    Block::release(w);
    w.proxy_fence = w.barrier_fence = w.clock;
}
// Makes mbarriers, and nothing else, known to copies. CUTLASS has this fence alone after mbarrier.init, the
// CUDA Programming Guide has the fence of proxies.
inline void fence_mbarrier_init(Warp& w, const Instruction&, uint32_t) {
    Block::release(w);
    w.barrier_fence = w.clock;
}
inline void give_registers(Warp& w, const Instruction& i, uint32_t) { w.block->give_registers(w, i.option); }

// cp.async.bulk.tensor: copies a box, with rows of 128 bytes, into shared memory, with zeros for what is
// beyond the tensor. An mbarrier counts its bytes.
inline void copy_tensor(Warp& w, const Instruction& i, uint32_t lanes) {
    for_lanes(lanes, [&](int lane) {
        Block& block = *w.block;
        const uint64_t map_at = w.at<uint64_t>(i.s[1])[lane];
        const std::vector<char>& parameters = block.launch().parameters;
        const uint64_t parameters_at = reinterpret_cast<uint64_t>(parameters.data());
        if (map_at < parameters_at || map_at + 128 > parameters_at + parameters.size() ||
            (map_at - parameters_at) % 64)
            throw Fault("a tensor map is a __grid_constant__ parameter, at a multiple of 64 bytes");
        TensorMapBits map;
        memcpy(&map, reinterpret_cast<const void*>(map_at), sizeof map);
        if (map.magic != TensorMapBits::kMagic) throw Fault("there is no tensor map");
        const uint64_t to = address_of(w, i, lane);
        if (to % 128) throw Fault("TMA copies to multiples of 128 bytes");
        int64_t at[3];
        for (size_t n = 0; n < 3; n++) at[n] = static_cast<int32_t>(w.at<uint32_t>(i.sources[n])[lane]);
        const Slot& b_slot = i.s[2];
        const uint64_t barrier = b_slot.wide ? w.at<uint64_t>(b_slot)[lane] : w.at<uint32_t>(b_slot)[lane];
        block.check_fence(block.mbarrier(w, barrier));
        const size_t row_bytes = map.box[0] * 2, bytes = row_bytes * map.box[1];
        WarpClock after = w.after;
        after[static_cast<size_t>(w.index)] = w.clock;
        block.begin_async_write(after, to, bytes);
        const uint32_t clock = block.next_async_clock();
        block.add_async([=, &block] {
            std::vector<char> box(bytes, 0);
            const auto inside = [&](size_t n) {
                return at[n] >= 0 && at[n] < static_cast<int64_t>(map.sizes[n]);
            };
            for (uint32_t row = 0; row < map.box[1]; row++) {
                const int64_t r = at[1] + row;
                if (r < 0 || r >= static_cast<int64_t>(map.sizes[1]) || !inside(2) || !inside(0)) continue;
                const uint64_t elements =
                    std::min<uint64_t>(map.box[0], map.sizes[0] - static_cast<uint64_t>(at[0]));
                const char* from = reinterpret_cast<const char*>(map.data) + at[0] * 2 +
                                   r * static_cast<int64_t>(map.strides[0]) +
                                   at[2] * static_cast<int64_t>(map.strides[1]);
                DeviceMemory& memory = *block.launch().memory;
                memory.reads(block.copying_accessor(clock, after), from, elements * 2);
                const char* bits = memory.bytes_at(from);
                for (size_t k = 0; k < elements * 2; k += 16)
                    memcpy(box.data() + (swizzled(to + row * row_bytes + k) - to), bits + k,
                           std::min<size_t>(16, elements * 2 - k));
            }
            block.end_async_write(clock, to, box.data(), bytes);
            block.bytes_came(block.mbarrier_at(barrier), static_cast<int64_t>(bytes), clock);
        });
    });
}

// --- wgmma: a warp's 16 rows of D (64 x N) += A (64 x 16) B (16 x N).

struct Operand {  // "Matrix Descriptor Format"
    uint64_t start, leading, stride;
    explicit Operand(uint64_t bits)
        : start((bits & 0x3fff) << 4),
          leading((bits >> 16 & 0x3fff) << 4),
          stride((bits >> 32 & 0x3fff) << 4) {
        if (bits >> 62 != 1) throw Fault("wgmma with a swizzle that is not of 128 bytes");
    }
    // 8 elements along k, of a row of a K-major operand.
    uint64_t by_rows(uint64_t row, uint64_t k) const {
        return swizzled(start + row / 8 * stride + row % 8 * 128 + k * 2);
    }
    // 8 elements along n, of row k of an MN-major operand.
    uint64_t by_columns(uint64_t k, uint64_t n) const {
        return swizzled(start + n / 64 * leading + k / 8 * stride + k % 8 * 128 + n % 64 * 2);
    }
};

inline void multiply(Warp& w, const Instruction& i) {
    const int n = static_cast<int>(i.option);
    const bool a_in_registers = !i.sources.empty();
    float a[16][16], b[16][256];
    const auto eight = [&](float* to, size_t step, uint64_t address) {
        const char* from = w.block->read_shared_async(w, address, 16);
        for (size_t k = 0; k < 8; k++) {
            uint16_t bits;
            memcpy(&bits, from + 2 * k, 2);
            to[k * step] = from_bf16(bits);
        }
    };
    if (a_in_registers) {
        gather_a(a, [&](int r, int lane) { return w.at<uint32_t>(i.sources[static_cast<size_t>(r)])[lane]; });
    } else {
        const Operand from(w.at<uint64_t>(i.s[0])[0]);
        for (uint64_t row = 0; row < 16; row++)
            for (uint64_t k = 0; k < 16; k += 8)
                eight(&a[row][k], 1, from.by_rows(static_cast<uint64_t>(w.index % 4) * 16 + row, k));
    }
    const Operand from(w.at<uint64_t>(i.s[1])[0]);
    if (i.is_signed) {
        for (uint64_t k = 0; k < 16; k++)
            for (uint64_t c = 0; c < static_cast<uint64_t>(n); c += 8)
                eight(&b[k][c], 1, from.by_columns(k, c));
    } else {
        for (uint64_t c = 0; c < static_cast<uint64_t>(n); c++)
            for (uint64_t k = 0; k < 16; k += 8) eight(&b[k][c], 256, from.by_rows(c, k));
    }
    const bool add = *w.at<uint32_t>(i.s[2]) & 1;
    float d[16][256];
    for (int lane = 0; lane < 32; lane++)
        for (int j = 0; j < n / 8; j++)
            for (int e = 0; e < 4; e++)
                d[lane / 4 + 8 * (e >> 1)][8 * j + 2 * (lane % 4) + (e & 1)] =
                    add ? w.at<float>(i.more[static_cast<size_t>(4 * j + e)])[lane] : 0.f;
    for (int m = 0; m < 16; m++)
        for (int k = 15; k >= 0; k--)  // in another order than mma, as on real GPUs
            for (int c = 0; c < n; c++) d[m][c] += a[m][k] * b[k][c];
    for (int lane = 0; lane < 32; lane++)
        for (int j = 0; j < n / 8; j++)
            for (int e = 0; e < 4; e++)
                w.at<float>(i.more[static_cast<size_t>(4 * j + e)])[lane] =
                    d[lane / 4 + 8 * (e >> 1)][8 * j + 2 * (lane % 4) + (e & 1)];
}
// Operands are read, and D is written, at any time until the product is waited for: here either at once, or
// at the end. The values of the instruction's own registers are kept until then, so that both do the same.
inline void wgmma(Warp& w, const Instruction& i, uint32_t) {
    for (const std::vector<Slot>* slots : {&i.more, &i.sources})
        for (const Slot& s : *slots)
            if (!s.constant && w.dirty[s.offset / 64])
                throw Fault("wgmma's registers were written, and no wgmma.fence followed");
    const uint64_t n = 2 * i.more.size();  // columns: a lane has N / 2 numbers of its warp's 16 rows
    w.block->launch().counters->tensor_flops += 2 * 16 * n * 16;
    Warp::Product p;
    p.instruction = &i;
    p.group = -1;
    // In program order: a product that adds to the result of an unfinished one comes after it.
    p.done =
        w.products.empty() ? w.block->random()() & 1 : w.products.back().done && (w.block->random()() & 1);
    if (p.done)
        multiply(w, i);
    else if (i.sources.empty())
        p.a = w.at<uint64_t>(i.s[0])[0];
    p.b = w.at<uint64_t>(i.s[1])[0];
    p.add = *w.at<uint32_t>(i.s[2]) & 1;
    w.products.push_back(p);
    w.lock(p, true);
}
inline void wgmma_fence(Warp& w, const Instruction&, uint32_t) {
    std::fill(w.dirty.begin(), w.dirty.end(), 0);
}
inline void wgmma_commit(Warp& w, const Instruction&, uint32_t) {
    for (Warp::Product& p : w.products)
        if (p.group < 0) p.group = w.product_groups;
    w.product_groups++;
}
inline void wgmma_wait(Warp& w, const Instruction& i, uint32_t) {
    while (!w.products.empty() && w.products.front().group >= 0 &&
           w.products.front().group < w.product_groups - i.offset) {
        Warp::Product p = w.products.front();
        w.products.erase(w.products.begin());
        if (!p.done) {
            // The descriptors and the predicate as they were when it began.
            const Instruction& x = *p.instruction;
            uint32_t& add = *w.at<uint32_t>(x.s[2]);
            const uint32_t add_now = add;
            uint64_t *a = x.sources.empty() ? w.at<uint64_t>(x.s[0]) : nullptr, *b = w.at<uint64_t>(x.s[1]);
            const uint64_t a_now = a ? *a : 0, b_now = *b;
            add = p.add;
            if (a) *a = p.a;
            *b = p.b;
            multiply(w, x);
            if (a) *a = a_now;
            *b = b_now;
            add = add_now;
        }
        w.lock(p, false);
        for (const Warp::Product& other : w.products) w.lock(other, true);
    }
}

}  // namespace gpu
