// permutation.h - a shuffle that is computed, not stored: the new place of each of n numbers is a function of
// a key.
//
// It is a Feistel network (Luby, Rackoff 1988) on two digits, low and high, of the number high * 2^k + low.
// Each round adds to one digit a random function of the other digit and the key. Such a round can be undone
// by subtracting, so two different numbers stay different. A number that ends outside 0 ... n - 1 is sent
// through the network again until it is inside ("cycle walking", Black, Rogaway 2002), which keeps the
// numbers different.
#pragma once

#include <cassert>
#include <cstdint>

#include "llmc/random.h"

class Permutation {
  public:
    // Permutes 0 ... n - 1, for n from 1 to 2^62; the key comes from random_key(). dev/reference.py computes
    // the same.
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
    // With 8 rounds, a hundred thousand orders of eight numbers can still be told from random ones. Each
    // further round makes that four times harder.
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
    uint64_t lows_ = 1, highs_ = 1;  // the number of values of each digit
};
