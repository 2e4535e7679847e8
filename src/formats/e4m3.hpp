// OCP FP8 E4M3: bias 7, +-448 the largest, no infinities, NaN is 0x7f and 0xff.
#pragma once

#include <cstdint>

#include "formats/minifloat.hpp"

namespace qattn::formats {

struct E4m3 {
  using Code = std::uint8_t;
  static constexpr float max = 448.0f;
  static constexpr int emax = 8;  ///< exponent of the largest power of two
  static constexpr Code nan = 0x7f;

  /// Ties to even; finite overflow saturates to +-448. +-Inf and NaN both give NaN: an operand that
  /// was broken must never come out as a plausible number.
  static QATTN_HD Code encode(float x) {
    const std::uint32_t sign = bits_of(x) >> 31 << 7;
    if (!is_finite(x)) return static_cast<Code>(sign | nan);
    const std::uint32_t code = Shape::round(magnitude_bits(x));
    return static_cast<Code>(sign | (code > 0x7eu ? 0x7eu : code));
  }

  static QATTN_HD float decode(Code code) {
    const std::uint32_t sign = static_cast<std::uint32_t>(code >> 7) << 31;
    const std::uint32_t rest = code & 0x7fu;
    return float_of(sign | (rest == nan ? kNanBits : bits_of(Shape::widen(rest))));
  }

 private:
  using Shape = MiniFloat<3, 7>;
};

}  // namespace qattn::formats
