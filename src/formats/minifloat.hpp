// Rounding to and from a small binary floating-point format, shared by the float codecs. Only
// integer operations round, so no compiler flag or rounding mode can change a code.
#pragma once

#include <cstdint>

#include "formats/bits.hpp"

namespace qattn::formats {

/// A format of `MantissaBits` fraction bits and exponent bias `Bias` whose exponent field 0 holds
/// the zeros and subnormals, as in IEEE 754. Signs, special codes and saturation belong to the
/// codecs. Needs Bias < 127, so that its smallest normal value is a normal float32.
template <int MantissaBits, int Bias>
struct MiniFloat {
  static constexpr int kDropped = 23 - MantissaBits;
  static constexpr int kRebias = 127 - Bias;

  /// The code nearest to a finite magnitude, ties to the even code, as if exponents had no upper
  /// end: a result above the format's last finite code means overflow.
  static QATTN_HD std::uint32_t round(std::uint32_t magnitude) {
    const int exponent = static_cast<int>(magnitude >> 23);
    if (exponent > kRebias) {
      // A carry out of the fraction lands in the exponent, which is the next code's right value.
      const std::uint32_t moved = magnitude - (static_cast<std::uint32_t>(kRebias) << 23);
      return shift_even(moved, kDropped);
    }
    const int shift = kDropped + kRebias + 1 - exponent;
    // Beyond 24 the value is below half of the smallest subnormal. That covers float32 subnormals,
    // so the implicit bit is always there for what remains.
    if (shift > 24) return 0;
    return shift_even((magnitude & 0x7fffffu) | 0x800000u, shift);
  }

  /// The magnitude of a code without its sign; exact.
  static QATTN_HD float widen(std::uint32_t code) {
    if ((code >> MantissaBits) != 0) {
      return float_of((code << kDropped) + (static_cast<std::uint32_t>(kRebias) << 23));
    }
    const float ulp = float_of(static_cast<std::uint32_t>(kRebias + 1 - MantissaBits) << 23);
    return mul_rn(static_cast<float>(code), ulp);
  }

 private:
  static QATTN_HD std::uint32_t shift_even(std::uint32_t value, int shift) {
    const std::uint32_t below_half = (1u << (shift - 1)) - 1;
    return (value + below_half + ((value >> shift) & 1u)) >> shift;
  }
};

}  // namespace qattn::formats
