// OCP FP8 E5M2: bias 15, +-57344 the largest finite value, infinities and NaNs as in IEEE 754.
#pragma once

#include <cstdint>

#include "formats/minifloat.hpp"

namespace qattn::formats {

struct E5m2 {
  using Code = std::uint8_t;
  static constexpr float max = 57344.0f;
  static constexpr int emax = 15;  ///< exponent of the largest power of two
  static constexpr Code nan = 0x7f;

  /// Ties to even; finite overflow saturates to +-57344. +-Inf and NaN both give NaN, although the
  /// format has infinities: an operand that was broken must never come out as a plausible number.
  static QATTN_HD Code encode(float x) {
    const std::uint32_t sign = bits_of(x) >> 31 << 7;
    if (!is_finite(x)) return static_cast<Code>(sign | nan);
    const std::uint32_t code = Shape::round(magnitude_bits(x));
    return static_cast<Code>(sign | (code > 0x7bu ? 0x7bu : code));
  }

  /// Reads infinities too, which tensors from elsewhere may hold.
  static QATTN_HD float decode(Code code) {
    const std::uint32_t sign = static_cast<std::uint32_t>(code >> 7) << 31;
    const std::uint32_t rest = code & 0x7fu;
    if (rest > 0x7cu) return float_of(sign | kNanBits);
    if (rest == 0x7cu) return float_of(sign | kInfBits);
    return float_of(sign | bits_of(Shape::widen(rest)));
  }

 private:
  using Shape = MiniFloat<2, 15>;
};

}  // namespace qattn::formats
