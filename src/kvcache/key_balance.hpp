// Loud channels of K: a scale a token gives all channels the steps of the loudest. What is
// quantised is K, without its mean, over powers of two of its channels, and Q is multiplied by
// them; scores are the same. Where no channel is loud they are all 1.
//
//   r_j  root mean square of K - mean over the keys that a mean is of, and over channels j and
//        j + D / 2, which rotary embeddings turn into each other
//   c_j  2^round(13/16 log2(r_j / median r)), at least 1, at most 2^15
//
// 13/16: where queries are as loud as elsewhere 1/2 is best and 1 as good as nothing; where they are
// smaller as keys are louder, as in Qwen2.5, 1 is best.
#pragma once

#include <cstdint>

#include "formats/bits.hpp"
#include "formats/hd.hpp"

namespace qattn::kv {

inline constexpr int most_key_shift = 15;

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
  return shift;
}

/// Sum over `count` keys of the squares of their distance from `mean`, of which `sum` and `square`
/// are the sums of a channel and of its squares.
QATTN_HD double key_energy(double sum, double square, double count, bool smooth) {
  if (!smooth) return square;
  const double of_mean = formats::mul_rn(sum, sum / count);
  const double energy = formats::add_rn(square, -of_mean);
  return energy > 0 ? energy : 0.0;
}

/// The lower median of the energies of `pairs` pairs: that of rank (pairs - 1) / 2.
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

/// What K of a head is moved by before it is quantised; null: not at all.
struct KeyFrame {
  const float* mean = nullptr;          ///< [d]
  const std::uint8_t* shift = nullptr;  ///< [d] exponents of c
};

}  // namespace qattn::kv
