// IEEE 754 binary16: 1 sign, 5 exponent, 10 fraction bits.
#pragma once

#include <cstdint>

#include "formats/minifloat.hpp"

namespace qattn::formats {

struct F16 {
  using Code = std::uint16_t;

  /// Round to nearest even; overflow gives the infinity. NaN stays NaN: quiet, with its sign and
  /// the top of its payload, as the conversion instructions of x86 and Arm have it.
  static QATTN_HD Code encode(float x) {
    const std::uint32_t sign = bits_of(x) >> 31 << 15;
    const std::uint32_t magnitude = magnitude_bits(x);
    if (magnitude > kInfBits) {
      return static_cast<Code>(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
    }
    // The infinity's pattern rounds to a code above 0x7c00 like any other overflow.
    const std::uint32_t code = Shape::round(magnitude);
    return static_cast<Code>(sign | (code > 0x7c00u ? 0x7c00u : code));
  }

  static QATTN_HD float decode(Code code) {
    const std::uint32_t sign = static_cast<std::uint32_t>(code >> 15) << 31;
    const std::uint32_t rest = code & 0x7fffu;
    if (rest > 0x7c00u) return float_of(sign | kNanBits | ((rest & 0x3ffu) << 13));
    if (rest == 0x7c00u) return float_of(sign | kInfBits);
    return float_of(sign | bits_of(Shape::widen(rest)));
  }

 private:
  using Shape = MiniFloat<10, 15>;
};

}  // namespace qattn::formats
