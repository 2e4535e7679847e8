// Codes of the KV cache's tiers: a uniform grid of 2^Bits levels that is symmetric about zero and
// steps over it, so no level is wasted on one side.
#pragma once

#include <cstdint>

#include "formats/bits.hpp"

namespace qattn::formats {

/// clamp(floor(y), -2^(bits - 1), 2^(bits - 1) - 1) + 0.5: the value that y is coded as, in units
/// of the scale. y is no NaN.
QATTN_HD float kv_grid(float y, int bits) {
  const float low = -static_cast<float>(1 << (bits - 1));
  const float high = add_rn(-low, -1.0f);
  float f = __builtin_floorf(y);
  f = f < low ? low : f;
  f = f > high ? high : f;
  return add_rn(f, 0.5f);
}

/// The value of a code in units of the scale: code - 2^(bits - 1) + 0.5; exact.
QATTN_HD float kv_value(std::uint8_t code, int bits) {
  return add_rn(static_cast<float>(static_cast<int>(code) - (1 << (bits - 1))), 0.5f);
}

/// The code of a grid point.
QATTN_HD std::uint8_t kv_code(float grid, int bits) {
  return static_cast<std::uint8_t>(static_cast<int>(add_rn(grid, -0.5f)) + (1 << (bits - 1)));
}

template <int Bits>
struct Kv {
  static_assert(Bits == 2 || Bits == 3 || Bits == 4 || Bits == 8);
  using Code = std::uint8_t;
  static constexpr int levels = 1 << Bits;

  /// clamp(floor(x / scale) + 2^(Bits - 1)). NaN has no code and gives 0: the scale carries it.
  static QATTN_HD Code encode(float x_over_scale) {
    return is_nan(x_over_scale) ? Code{0} : kv_code(kv_grid(x_over_scale, Bits), Bits);
  }

  /// The value in units of the scale; exact.
  static QATTN_HD float decode(Code code) { return kv_value(code, Bits); }
};

}  // namespace qattn::formats
