// FP8 E4M3 FNUZ, the 8-bit float of gfx942: bias 8, +-240 the largest, no infinities, no negative
// zero, and 0x80 the only NaN.
#pragma once

#include <cstdint>

#include "formats/minifloat.hpp"

namespace qattn::formats {

struct E4m3Fnuz {
  using Code = std::uint8_t;
  static constexpr float max = 240.0f;
  static constexpr int emax = 7;  ///< exponent of the largest power of two
  static constexpr Code nan = 0x80;

  /// Ties to even; finite overflow saturates to +-240; what rounds to zero is +0. +-Inf and NaN
  /// both give NaN: an operand that was broken must never come out as a plausible number.
  static QATTN_HD Code encode(float x) {
    if (!is_finite(x)) return nan;
    const std::uint32_t code = Shape::round(magnitude_bits(x));
    // A sign on a zero would be the NaN.
    const std::uint32_t sign = code == 0 ? 0 : bits_of(x) >> 31 << 7;
    return static_cast<Code>(sign | (code > 0x7fu ? 0x7fu : code));
  }

  static QATTN_HD float decode(Code code) {
    if (code == nan) return quiet_nan();
    const std::uint32_t sign = static_cast<std::uint32_t>(code >> 7) << 31;
    return float_of(sign | bits_of(Shape::widen(code & 0x7fu)));
  }

 private:
  using Shape = MiniFloat<3, 8>;
};

}  // namespace qattn::formats
