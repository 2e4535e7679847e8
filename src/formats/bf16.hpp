// bfloat16: the upper half of a float32.
#pragma once

#include <cstdint>

#include "formats/bits.hpp"

namespace qattn::formats {

struct Bf16 {
  using Code = std::uint16_t;

  /// Round to nearest even; overflow gives the infinity; NaN stays NaN, quiet and signed.
  static QATTN_HD Code encode(float x) {
    const std::uint32_t bits = bits_of(x);
    // Rounding could carry a NaN's payload away and leave an infinity, so it is only cut off.
    if (is_nan(x)) return static_cast<Code>((bits >> 16) | 0x40u);
    return static_cast<Code>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }

  static QATTN_HD float decode(Code code) {
    return float_of(static_cast<std::uint32_t>(code) << 16);
  }
};

}  // namespace qattn::formats
