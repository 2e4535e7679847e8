// Which keys speak for the others: K's mean and key_norm's guess are made of them. One key that is
// far larger than the rest would be all that a mean is of, and the mean outlives it. So keys have
// sizes, powers of two, and those count that are not far above the median of what is not zero.
#pragma once

#include <cstdint>

#include "formats/bits.hpp"
#include "formats/hd.hpp"

namespace qattn::kv {

inline constexpr int most_key_size = 254;  ///< of finite keys; NaN and Inf give 255
inline constexpr int key_sizes = 256;
/// Sizes above the median's that still count: keys up to 4 to 8 times as large.
inline constexpr int key_size_margin = 2;

/// The exponent of a key's largest magnitude, 0 for zeros and subnormals.
QATTN_HD int key_size(float amax) { return static_cast<int>(formats::bits_of(amax) >> 23 & 0xffu); }

/// The largest size that counts; up_to(n): how many keys have a size from 1 to n.
template <class UpTo>
QATTN_HD int largest_key_size(UpTo up_to) {
  const std::int64_t all = up_to(most_key_size);
  int below = 0, median = most_key_size;
  // Eight steps whatever the sizes are: up_to() of a GPU is collective, and other lanes of the warp
  // have other keys.
  for (int step = 0; step < 8; ++step) {
    const int middle = (below + median) / 2;
    const bool enough = 2 * up_to(middle) >= all;
    if (median - below <= 1) continue;
    (enough ? median : below) = middle;
  }
  if (all == 0) return 0;
  return median + key_size_margin < most_key_size ? median + key_size_margin : most_key_size;
}

}  // namespace qattn::kv
