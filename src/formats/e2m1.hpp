// OCP FP4 E2M1: codes 0..7 stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign.
#pragma once

#include <cstdint>

#include "formats/minifloat.hpp"

namespace qattn::formats {

struct E2m1 {
  using Code = std::uint8_t;
  static constexpr float max = 6.0f;
  static constexpr int emax = 2;  ///< exponent of the largest power of two

  /// Ties to the even code; everything beyond 6, infinities included, saturates to +-6. NaN has no
  /// code and gives 0: the group's scale carries it.
  static QATTN_HD Code encode(float x) {
    if (is_nan(x)) return 0;
    const std::uint32_t sign = bits_of(x) >> 31 << 3;
    const std::uint32_t code = Shape::round(magnitude_bits(x));
    return static_cast<Code>(sign | (code > 7u ? 7u : code));
  }

  /// Only the low four bits are read.
  static QATTN_HD float decode(Code code) {
    const std::uint32_t sign = static_cast<std::uint32_t>((code >> 3) & 1u) << 31;
    return float_of(sign | bits_of(Shape::widen(code & 7u)));
  }

 private:
  using Shape = MiniFloat<1, 1>;
};

}  // namespace qattn::formats
