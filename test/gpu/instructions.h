// instructions.h - what each PTX instruction does, for all lanes of a warp at once (PTX ISA 9.0). An
// instruction that is missing here is an error that names it.
#pragma once

#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "test/gpu/block.h"

namespace gpu {

// --- Values of lanes.

template <class T>
using Cell = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
template <class T>
T from_cell(Cell<T> x) {
    if constexpr (sizeof(T) == 2)
        return std::bit_cast<T>(static_cast<uint16_t>(x));
    else if constexpr (sizeof(T) == 1)
        return std::bit_cast<T>(static_cast<uint8_t>(x));
    else
        return std::bit_cast<T>(x);
}
template <class T>
Cell<T> to_cell(T x) {
    if constexpr (sizeof(T) == 2)
        return std::bit_cast<uint16_t>(x);
    else if constexpr (sizeof(T) == 1)
        return std::bit_cast<uint8_t>(x);
    else
        return std::bit_cast<Cell<T>>(x);
}
inline float from_bf16(uint32_t bits) { return std::bit_cast<float>(bits << 16); }
inline uint16_t to_bf16(float x) {
    uint32_t bits = std::bit_cast<uint32_t>(x);
    if (x != x) return 0x7fff;
    bits += 0x7fff + (bits >> 16 & 1);
    return static_cast<uint16_t>(bits >> 16);
}
inline float flushed(float x) {
    return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x;
}

// d = f(s...) for each lane.
template <class D, class... S, class F>
Execute elementwise(F) {
    return [](Warp& w, const Instruction& i, uint32_t lanes) {
        auto* d = w.at<Cell<D>>(i.d);
        [&]<size_t... N>(std::index_sequence<N...>) {
            const std::tuple<const Cell<S>*...> s{w.at<Cell<S>>(i.s[N])...};
#pragma GCC ivdep
            for (int lane = 0; lane < 32; lane++) {
                const Cell<D> r = to_cell<D>(F{}(from_cell<S>(std::get<N>(s)[lane])...));
                d[lane] = lanes >> lane & 1 ? r : d[lane];
            }
        }
        (std::index_sequence_for<S...>{});
    };
}
// The predicate d = f(a, b) for each lane.
template <class T, class F>
Execute compare(F) {
    return [](Warp& w, const Instruction& i, uint32_t lanes) {
        const auto *a = w.at<Cell<T>>(i.s[0]), *b = w.at<Cell<T>>(i.s[1]);
        uint32_t result = 0;
        for (int lane = 0; lane < 32; lane++)
            result |= static_cast<uint32_t>(F{}(from_cell<T>(a[lane]), from_cell<T>(b[lane]))) << lane;
        uint32_t& d = *w.at<uint32_t>(i.d);
        d = (d & ~lanes) | (result & lanes);
    };
}
// The predicate d = f(s...), as masks.
template <class F>
Execute predicates(F) {
    return [](Warp& w, const Instruction& i, uint32_t lanes) {
        const uint32_t result = F{}(*w.at<uint32_t>(i.s[0]), *w.at<uint32_t>(i.s[1]));
        uint32_t& d = *w.at<uint32_t>(i.d);
        d = (d & ~lanes) | (result & lanes);
    };
}

// --- Memory.

enum Space : uint32_t { kGlobal, kShared };

template <class F>
void for_lanes(uint32_t lanes, F&& f) {
    for (; lanes; lanes &= lanes - 1) f(std::countr_zero(lanes));
}
inline uint64_t address_of(Warp& w, const Instruction& i, int lane) {
    const Slot& base = i.s[0];
    const uint64_t offset = static_cast<uint64_t>(i.offset);
    // A 32-bit register holds an address of shared memory; the sum wraps around.
    if (!base.wide) return static_cast<uint32_t>(w.at<uint32_t>(base)[lane] + offset);
    return w.at<uint64_t>(base)[lane] + offset;
}
// Counts the sectors of 32 bytes that a request touches, and the passes in which the 32 banks of shared
// memory serve it.
inline void count_request(Warp& w, const Instruction& i, uint32_t lanes, size_t bytes, bool stores = false) {
    if (!w.block->launch().touched) return;
    Counters& c = *w.block->launch().counters;
    uint64_t at[32];
    int count = 0;
    if (i.option == kGlobal) {
        for_lanes(lanes, [&](int lane) {
            const uint64_t sector = address_of(w, i, lane) / 32;
            for (int k = 0; k < count; k++)
                if (at[k] == sector) return;
            at[count++] = sector;
        });
        for (int k = 0; k < count; k++) w.block->launch().touched->insert(2 * at[k] + stores);
        c.global_requests++;
        c.global_sectors += static_cast<uint64_t>(count);
        c.global_bytes += bytes * static_cast<uint64_t>(std::popcount(lanes));
    } else if (i.option == kShared) {
        // 4 bytes per bank and pass: vectors are served 8 or 16 lanes at a time.
        const int together = bytes == 16 ? 8 : bytes == 8 ? 16 : 32;
        for (int first = 0; first < 32; first += together) {
            std::array<std::array<uint64_t, 32>, 32> rows;
            std::array<int, 32> used{};
            for (int lane = first; lane < first + together; lane++) {
                if (!(lanes >> lane & 1)) continue;
                const uint64_t word = address_of(w, i, lane) / 4;
                for (uint64_t k = word; k < word + (bytes + 3) / 4; k++) {
                    auto& bank = rows[k % 32];
                    int& n = used[k % 32];
                    if (std::find(bank.begin(), bank.begin() + n, k) == bank.begin() + n && n < 32)
                        bank[static_cast<size_t>(n++)] = k;
                }
            }
            const int passes = *std::max_element(used.begin(), used.end());
            c.shared_passes += static_cast<uint64_t>(passes);
            c.shared_requests += passes > 0;
        }
    }
}
// Value k of a load that found `from`.
inline uint64_t loaded(const Instruction& i, size_t k, const char* from) {
    uint64_t bits = 0;
    memcpy(&bits, from + k * i.bytes, i.bytes);
    if (!i.is_signed || i.bytes == 8) return bits;
    const int unused = 64 - 8 * i.bytes;
    return static_cast<uint64_t>(static_cast<int64_t>(bits << unused) >> unused);
}
inline void set_lane(Warp& w, const Slot& d, int lane, uint64_t bits) {
    if (d.wide)
        w.at<uint64_t>(d)[lane] = bits;
    else
        w.at<uint32_t>(d)[lane] = static_cast<uint32_t>(bits);
}
// If no register is part of the address, all lanes load the same.
inline void load_parameter(Warp& w, const Instruction& i, uint32_t lanes) {
    const std::vector<char>& parameters = w.block->launch().parameters;
    while (lanes) {
        const int first = std::countr_zero(lanes);
        const uint32_t same = i.s[0].constant ? lanes : 1u << first;
        const uint64_t at = address_of(w, i, first);
        if (at + size_t{i.bytes} * i.count > parameters.size()) throw Fault("reads beyond the parameters");
        for (size_t k = 0; k < i.count; k++) {
            const uint64_t bits = loaded(i, k, parameters.data() + at);
            if (!i.more[k].sink) for_lanes(same, [&](int lane) { set_lane(w, i.more[k], lane, bits); });
        }
        lanes &= ~same;
    }
}
inline void load(Warp& w, const Instruction& i, uint32_t lanes) {
    const size_t total = size_t{i.bytes} * i.count;
    count_request(w, i, lanes, total);  // first: a value may overwrite a register with an address
    for_lanes(lanes, [&](int lane) {
        const uint64_t at = address_of(w, i, lane);
        const char* const from = i.option == kGlobal ? w.block->read_global(w, lane, at, total)
                                                     : w.block->read_shared(w, lane, at, total);
        for (size_t k = 0; k < i.count; k++)
            if (!i.more[k].sink) set_lane(w, i.more[k], lane, loaded(i, k, from));
    });
}
inline void store(Warp& w, const Instruction& i, uint32_t lanes) {
    const size_t total = size_t{i.bytes} * i.count;
    for_lanes(lanes, [&](int lane) {
        const uint64_t at = address_of(w, i, lane);
        char* to = i.option == kGlobal ? w.block->write_global(w, lane, at, total)
                                       : w.block->write_shared(w, lane, at, total);
        for (size_t k = 0; k < i.count; k++) {
            const Slot& s = i.sources[k];
            const uint64_t bits = s.wide ? w.at<uint64_t>(s)[lane] : w.at<uint32_t>(s)[lane];
            memcpy(to + k * i.bytes, &bits, i.bytes);
        }
    });
    count_request(w, i, lanes, total, true);
}

// cp.async: writes `bytes` bytes to shared memory: the first s[2] of them from global memory, then zeros.
inline void copy_async(Warp& w, const Instruction& i, uint32_t lanes) {
    for_lanes(lanes, [&](int lane) {
        const Slot& from_slot = i.s[1];
        const uint64_t from = w.at<uint64_t>(from_slot)[lane] + static_cast<uint64_t>(i.option);
        const uint32_t count = i.count ? w.at<uint32_t>(i.s[2])[lane] : i.bytes;
        if (count > i.bytes) throw Fault("cp.async of more bytes than it copies");
        if (from % i.bytes)
            throw Fault("cp.async from an address that is no multiple of " + std::to_string(i.bytes));
        const char* bytes =
            count ? w.block->read_global(w, lane, from, std::bit_ceil(count) == count ? count : 1) : nullptr;
        w.block->begin_copy(w, lane, static_cast<uint32_t>(address_of(w, i, lane)), bytes, count, i.bytes);
    });
}
inline void copy_async_commit(Warp& w, const Instruction&, uint32_t lanes) {
    w.block->commit_copies(w, lanes);
}
inline void copy_async_wait(Warp& w, const Instruction& i, uint32_t lanes) {
    w.block->wait_copies(w, lanes, static_cast<int>(i.offset));
}

// --- Exchange between lanes of a warp.

// shfl.sync.MODE.b32 d|p, a, b, c, mask
enum ShuffleMode : uint32_t { kUp, kDown, kXor, kIndex };
template <ShuffleMode kMode>
void shuffle(Warp& w, const Instruction& i, uint32_t lanes) {
    w.reads_done++;
    uint32_t values[32], result[32];
    int from[32], ok[32];
    memcpy(values, w.at<uint32_t>(i.s[0]), sizeof values);
    const uint32_t *bs = w.at<uint32_t>(i.s[1]), *cs = w.at<uint32_t>(i.s[2]);
    for (int lane = 0; lane < 32; lane++) {
        const int b = static_cast<int>(bs[lane] & 31), segment = static_cast<int>(cs[lane] >> 8 & 31),
                  clamp = static_cast<int>(cs[lane] & 31);
        const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
        const int j = kMode == kUp     ? lane - b
                      : kMode == kDown ? lane + b
                      : kMode == kXor  ? lane ^ b
                                       : least | (b & ~segment);
        ok[lane] = kMode == kUp ? j >= most : j <= most;
        from[lane] = ok[lane] ? j : lane;
    }
    uint32_t in_range = 0, taken = 0;
    for (int lane = 0; lane < 32; lane++) {
        result[lane] = values[from[lane]];
        in_range |= static_cast<uint32_t>(ok[lane]) << lane;
        if (lanes >> lane & 1) taken |= 1u << from[lane];
    }
    if (taken & ~lanes) throw Fault("a shuffle reads a lane that does not take part");
    if (!i.d.sink) {
        uint32_t* d = w.at<uint32_t>(i.d);
        for (int lane = 0; lane < 32; lane++) d[lane] = lanes >> lane & 1 ? result[lane] : d[lane];
    }
    if (!i.more[0].sink) {
        uint32_t& p = *w.at<uint32_t>(i.more[0]);
        p = (p & ~lanes) | (in_range & lanes);
    }
}
inline void vote_ballot(Warp& w, const Instruction& i, uint32_t lanes) {
    const uint32_t ballot = *w.at<uint32_t>(i.s[0]) & lanes;
    for_lanes(lanes, [&](int lane) { w.at<uint32_t>(i.d)[lane] = ballot; });
}
inline void sync_warp(Warp& w, const Instruction&, uint32_t) { Block::release(w); }

// --- Tensor cores.

// ldmatrix.x4[.trans]: lane 8 m + r has the address of matrix m's row r; lane l gets elements 2 (l % 4) and 2
// (l % 4) + 1 of row l / 4.
inline void load_matrix(Warp& w, const Instruction& i, uint32_t lanes) {
    const int matrices = i.count;
    uint16_t tiles[4][8][8];
    for (int lane = 0; lane < 8 * matrices; lane++) {
        const uint64_t at = address_of(w, i, lane);
        memcpy(tiles[lane / 8][lane % 8], w.block->read_shared(w, lane, at, 16), 16);
    }
    for (int m = 0; m < matrices; m++) {
        uint32_t* d = w.at<uint32_t>(i.more[static_cast<size_t>(m)]);
        for_lanes(lanes, [&](int lane) {
            const int r = lane / 4, c = 2 * (lane % 4);
            const uint32_t low = i.is_signed ? tiles[m][c][r] : tiles[m][r][c];
            const uint32_t high = i.is_signed ? tiles[m][c + 1][r] : tiles[m][r][c + 1];
            d[lane] = low | high << 16;
        });
    }
    count_request(w, i, lanes, 16);
}

// The 16 x 16 operand A, or this warp's rows of a 64 x 16 one, from registers, as floats.
template <class Get>
void gather_a(float (&a)[16][16], Get&& get) {
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, t = lane % 4;
        for (int r = 0; r < 4; r++) {
            const uint32_t pair = get(r, lane);
            const int row = g + 8 * (r & 1), column = 2 * t + 8 * (r >> 1);
            a[row][column] = from_bf16(pair & 0xffff);
            a[row][column + 1] = from_bf16(pair >> 16);
        }
    }
}
// mma.m16n8k16, bf16: d = a b + c in fp32.
inline void mma_16_8_16(Warp& w, const Instruction& i, uint32_t) {
    w.block->launch().counters->tensor_flops += 2 * 16 * 8 * 16;
    float a[16][16], b[16][8], d[16][8];
    gather_a(a, [&](int r, int lane) { return w.at<uint32_t>(i.sources[static_cast<size_t>(r)])[lane]; });
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, t = lane % 4;
        for (int r = 0; r < 2; r++) {
            const uint32_t pair = w.at<uint32_t>(i.sources[static_cast<size_t>(4 + r)])[lane];
            b[2 * t + 8 * r][g] = from_bf16(pair & 0xffff);
            b[2 * t + 8 * r + 1][g] = from_bf16(pair >> 16);
        }
        for (int r = 0; r < 4; r++)
            d[g + 8 * (r >> 1)][2 * t + (r & 1)] = w.at<float>(i.sources[static_cast<size_t>(6 + r)])[lane];
    }
    for (int m = 0; m < 16; m++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 8; n++) d[m][n] += a[m][k] * b[k][n];
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, t = lane % 4;
        for (int r = 0; r < 4; r++)
            w.at<float>(i.more[static_cast<size_t>(r)])[lane] = d[g + 8 * (r >> 1)][2 * t + (r & 1)];
    }
}

}  // namespace gpu
