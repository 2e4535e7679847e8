// How loud channels of K are balanced against Q's: by powers of two (docs/NUMERICS.md, "Loud
// channels"). Sums are in float64, each operation rounded by itself: all backends agree to the bit.
#pragma once

#include <cstdint>

#include "formats/bits.hpp"

namespace qattn::formats {

inline constexpr int kBalanceLeast = 4;  ///< fewer tokens tell nothing
/// K is loud if a channel's mean square is so many times the median's.
inline constexpr double kLoudSquare = 16.0;
inline constexpr int kMostBalance = 12;  ///< factors are at most 2^12

/// How many of a sequence's `count` tokens tell how loud its channels are.
QATTN_HD int balance_tokens(std::int64_t count) {
  if (count < 128) return static_cast<int>(count < 8 ? count : 8);
  return static_cast<int>(count < 512 ? count / 16 : 32);
}

/// The i-th of those tokens: one in each equal part of the sequence, at places without a period,
/// since RoPE has periods.
QATTN_HD std::int64_t balance_token(int i, std::int64_t count) {
  const int reversed =
      (i & 1) << 5 | (i & 2) << 3 | (i & 4) << 1 | (i & 8) >> 1 | (i & 16) >> 3 | (i & 32) >> 5;
  return count * (64 * i + reversed) / (64 * balance_tokens(count));
}

/// Sum of squares about the mean; `inverse` is 1 / how many there are.
QATTN_HD double central_squares(double sum, double squares, double inverse) {
  const double central = add_rn(squares, -mul_rn(mul_rn(sum, sum), inverse));
  return central > 0.0 ? central : 0.0;
}

/// round(3/4 log2(r)) for r^2 = `ratio`, from 0 to kMostBalance.
QATTN_HD int balance_exponent(double ratio) {
  if (!(ratio > 1.0)) return 0;
  const auto bits = __builtin_bit_cast(std::uint64_t, ratio);
  const std::uint64_t mantissa = bits & 0xfffffffffffffu;
  // Whole thirds of log2(ratio): the mantissas of 2^(1/3) and 2^(2/3).
  const int thirds = 3 * (static_cast<int>(bits >> 52) - 1023) +
                     (mantissa >= 0x428a2f98d728bu ? 1 : 0) +
                     (mantissa >= 0x965fea53d6e3du ? 1 : 0);
  const int n = (thirds + 4) / 8;
  return n < kMostBalance ? n : kMostBalance;
}

/// 2^n.
QATTN_HD float power_of_two(int n) { return float_of(static_cast<std::uint32_t>(127 + n) << 23); }

}  // namespace qattn::formats
