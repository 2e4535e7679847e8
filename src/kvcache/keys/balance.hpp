// Loud channels of K: a scale a token gives all channels the steps of the loudest. What is
// quantised is K, without its mean, over powers of two of its channels, and Q is multiplied by
// them; scores are the same. Where no channel is loud they are all 1.
//
//   r_j  root mean square of K - mean over the keys that a mean is of, and over channels j and
//        j + D / 2, which rotary embeddings turn into each other
//   c_j  2^round(13/16 log2(r_j / median r)), at most 2^15, and 1 where that is below 8
//
// A bias is turned, and has not come far when a mean is made: it becomes louder. Later pages have
// another set then (drift.hpp), in which r_j is of K - the mean before, if that is more. To
// peek_next_tile it would be wrong where queries listen to such a pair.
//
// 13/16: where queries are as loud as elsewhere 1/2 is best and 1 as good as nothing; where they
// are smaller as keys are louder, as in Qwen2.5, 1 is best.
#pragma once

#include <cstdint>

#include "formats/bits.hpp"
#include "formats/hd.hpp"

namespace qattn::kv {

inline constexpr int most_key_shift = 15;
/// Where keys are little louder than elsewhere queries need not be smaller: below 8, powers of two
/// doubled what 4 bits cost SmolLM2.
inline constexpr int least_key_shift = 3;

/// The power of two of a pair of channels; energies: sums of squares, or means of them.
QATTN_HD int key_shift(double energy, double median) {
  // 2^(32 / 13 (i - 1 / 2)): where 13/32 log2(energy / median) passes i - 1/2.
  constexpr double first = 2.3469209200092527, step = 5.508037804777078;
  int shift = 0;
  double least = formats::mul_rn(median, first);
  while (shift < most_key_shift && median > 0 && energy >= least) {
    ++shift;
    least = formats::mul_rn(least, step);
  }
  return shift < least_key_shift ? 0 : shift;
}

/// Sums over the keys that count, of a channel.
struct KeySums {
  double x = 0, xx = 0;

  QATTN_HD void add(double value) {
    x = formats::add_rn(x, value);
    xx = formats::add_rn(xx, formats::mul_rn(value, value));
  }
};

/// Of a channel or, added up, of a pair: sums of squares of x, and of x from its mean if `smooth`.
struct KeyEnergy {
  double whole = 0, own = 0;

  KeyEnergy() = default;
  QATTN_HD KeyEnergy(const KeySums& s, double count, bool smooth) {
    if (count == 0) return;
    whole = own = s.xx;
    if (!smooth) return;
    own = formats::add_rn(s.xx, -formats::mul_rn(s.x, s.x / count));
    own = own > 0 ? own : 0.0;
  }
};

/// Is a pair the lower median of the energies of `pairs` pairs: that of rank (pairs - 1) / 2?
template <class Energy>
QATTN_HD bool is_median(int pair, int pairs, Energy energy) {
  const double mine = energy(pair);
  int before = 0;
  for (int i = 0; i < pairs; ++i) {
    const double other = energy(i);
    before += other < mine || (other == mine && i < pair) ? 1 : 0;
  }
  return before == (pairs - 1) / 2;
}

/// 2^shift and 2^-shift.
QATTN_HD float key_factor(int shift) {
  return formats::float_of(static_cast<std::uint32_t>(127 + shift) << 23);
}

/// Does V of a head lose its mean? `of_means`, `own`: energies of the keys' means and of what is
/// left of all channels. What chance makes of as few as 32 tokens is less.
QATTN_HD bool is_far(double of_means, double own) { return 16 * of_means > own; }

/// What K or V of a head is moved by before it is quantised; null: not at all.
struct Frame {
  const float* mean = nullptr;          ///< [channels]
  const std::uint8_t* shift = nullptr;  ///< [channels] exponents of c
};
struct Frames {
  Frame k, v;
};

}  // namespace qattn::kv
