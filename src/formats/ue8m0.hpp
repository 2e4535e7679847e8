// OCP E8M0 scale: code c stands for 2^(c - 127), 255 for NaN. It has no sign and no zero.
#pragma once

#include <cstdint>

#include "formats/bits.hpp"

namespace qattn::formats {

struct Ue8m0 {
  using Code = std::uint8_t;
  static constexpr Code nan = 0xff;

  static QATTN_HD float decode(Code code) {
    if (code == nan) return quiet_nan();
    // 2^-127 is the one value that float32 holds as a subnormal.
    return float_of(code == 0 ? 0x00400000u : static_cast<std::uint32_t>(code) << 23);
  }

  /// The code of 2^(floor(log2 amax) - emax), clamped to [0, 254]: the scale that brings amax into
  /// [2^emax, 2^(emax + 1)) of an element format whose largest power of two is 2^emax, emax >= 0.
  /// amax = 0 gives code 0, positive and finite, so a group of zeros never divides 0 by 0. NaN and
  /// infinities give NaN.
  static QATTN_HD Code floor_encode(float amax, int emax) {
    const std::uint32_t magnitude = magnitude_bits(amax);
    if (magnitude >= kInfBits) return nan;
    // The exponent field is floor(log2 amax) + 127. It is 0 for float32 subnormals, whose true
    // value is clamped to code 0 as well.
    const int code = static_cast<int>(magnitude >> 23) - emax;
    return static_cast<Code>(code < 0 ? 0 : code);
  }
};

}  // namespace qattn::formats
