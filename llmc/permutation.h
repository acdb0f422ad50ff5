// permutation.h - a shuffle that is computed, not stored: where each of n numbers goes is a function of a
// key.
//
// A Feistel network (Luby, Rackoff 1988) on two digits: `low` below a power of two, `high` below what it
// takes for n numbers high * 2^k + low. A round adds to each digit what the other one and the key say.
// However random that is, it can be taken away again: so no two numbers become the same. A number that leaves
// 0 ... n
// - 1 is sent through again until it is back ("cycle walking", Black, Rogaway 2002), which keeps that true.
#pragma once

#include <cassert>
#include <cstdint>

#include "llmc/random.h"

class Permutation {
  public:
    // Of 0 ... n - 1, n from 1 to 2^62; the key is one of random_key(). dev/reference.py computes the same.
    Permutation(uint64_t n, uint64_t key) : n_(n), key_(key) {
        assert(n >= 1 && n <= uint64_t{1} << 62);
        while (lows_ * lows_ < n) lows_ *= 2;
        highs_ = (n + lows_ - 1) / lows_;
    }

    uint64_t operator()(uint64_t i) const {
        assert(i < n_);
        do i = mixed(i);
        while (i >= n_);
        return i;
    }

  private:
    // With 8 the orders of eight numbers can still be told from random ones, if one looks at a hundred
    // thousand of them; each round more makes that four times harder.
    static constexpr uint64_t kRounds = 12;

    uint64_t mixed(uint64_t i) const {
        uint64_t low = i % lows_, high = i / lows_;
        for (uint64_t round = 0; round < kRounds; round++) {
            low = (low + random_bits_of(key_, 2 * round << 56 | high)) % lows_;  // 2^64 is a multiple of it
            high = (high + random_bits_of(key_, (2 * round + 1) << 56 | low) % highs_) % highs_;
        }
        return high * lows_ + low;
    }

    const uint64_t n_, key_;
    uint64_t lows_ = 1, highs_ = 1;  // how many values the digits have
};
