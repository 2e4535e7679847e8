// Loud channels of K: a scale a token gives all channels the steps of the loudest. What is
// quantised is K, without its mean, over powers of two of its channels, and Q is multiplied by
// them; scores are the same. Where no channel is loud they are all 1.
//
//   r_j  root mean square of K - mean over the keys that a mean is of, and over channels j and
//        j + D / 2, which rotary embeddings turn into each other. A pair that is far from 0 and
//        moves is as loud as it will be: a bias is turned, and has not come far by then.
//   c_j  2^round(13/16 log2(r_j / median r)), at most 2^15, and 1 where that is below 4
//
// 13/16: where queries are as loud as elsewhere 1/2 is best and 1 as good as nothing; where they
// are smaller as keys are louder, as in Qwen2.5, 1 is best.
#pragma once

#include <cstdint>

#include "formats/bits.hpp"
#include "formats/hd.hpp"

namespace qattn::kv {

inline constexpr int most_key_shift = 15;
/// Where keys are little louder than elsewhere queries need not be smaller: halves of them cost
/// MiniLM's attention 4 % at 4 bits.
inline constexpr int least_key_shift = 2;

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

/// Sums over the keys that count, of a channel's values x and of the keys' times t, their positions
/// in blocks of 16 tokens.
struct KeySums {
  double x = 0, xx = 0, tx = 0;

  QATTN_HD void add(double value, double t) {
    x = formats::add_rn(x, value);
    xx = formats::add_rn(xx, formats::mul_rn(value, value));
    tx = formats::add_rn(tx, formats::mul_rn(t, value));
  }
};
struct KeyTimes {
  double count = 0, t = 0, tt = 0;

  QATTN_HD void add(double time) {
    count += 1;
    t = formats::add_rn(t, time);
    tt = formats::add_rn(tt, formats::mul_rn(time, time));
  }
  /// Sum of the squares of times from their mean.
  QATTN_HD double spread() const { return formats::add_rn(tt, -formats::mul_rn(t, t / count)); }
};

/// Of a channel or, added up, of a pair: sums of squares of x, of x from its mean, and of what a
/// straight line in t explains of that.
struct KeyEnergy {
  double whole = 0, own = 0, line = 0;

  KeyEnergy() = default;
  QATTN_HD KeyEnergy(const KeySums& s, const KeyTimes& times, bool smooth) {
    if (times.count == 0) return;
    const double mean = s.x / times.count;
    whole = own = s.xx;
    if (!smooth) return;
    own = formats::add_rn(s.xx, -formats::mul_rn(s.x, mean));
    own = own > 0 ? own : 0.0;
    const double spread = times.spread();
    const double slope = formats::add_rn(s.tx, -formats::mul_rn(times.t, mean));
    line = spread > 0 ? formats::mul_rn(slope, slope / spread) : 0.0;
    line = line < own ? line : own;
  }
  QATTN_HD KeyEnergy operator+(const KeyEnergy& other) const {
    KeyEnergy sum;
    sum.whole = formats::add_rn(whole, other.whole);
    sum.own = formats::add_rn(own, other.own);
    sum.line = formats::add_rn(line, other.line);
    return sum;
  }

  /// What `own` will be when keys have gone on along the line for so many blocks, or have turned
  /// round: of a pair that is far from 0 and whose line is no chance.
  QATTN_HD double later(const KeyTimes& times, double median) const {
    constexpr double blocks = 2048, far = 64, sure = 12;
    const double rest = formats::add_rn(own, -line);
    const bool goes = whole >= formats::mul_rn(far, median) &&
                      formats::mul_rn(line, times.count) > formats::mul_rn(sure, rest);
    if (!goes) return own;
    const double reach = formats::mul_rn(times.count, blocks * blocks) / times.spread();
    const double then = formats::mul_rn(line, reach);
    const double most = then < whole ? then : whole;
    return most > own ? most : own;
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
