// 8-bit integers with a float32 scale beside them.
#pragma once

#include <cstdint>

#include "formats/bits.hpp"

namespace qattn::formats {

/// The integer nearest to x, ties to even, for |x| < 2^22.
QATTN_HD std::int32_t round_half_even(float x) {
  return static_cast<std::int32_t>(bits_of(add_rn(x, whole_numbers))) -
         static_cast<std::int32_t>(bits_of(whole_numbers));
}

/// Symmetric: -128 is never produced, so that a code and its negative both exist. Rounds half to
/// even, then clamps; infinities clamp too. NaN has no code and gives 0: the scale carries it.
struct S8 {
  using Code = std::int8_t;
  static constexpr float max = 127.0f;

  static QATTN_HD Code encode(float x) {
    // The bounds are integers, so clamping first gives the same codes and keeps x in range.
    const float low = x < -127.0f ? -127.0f : x;
    const float clamped = low > 127.0f ? 127.0f : low;
    return is_nan(x) ? Code{0} : static_cast<Code>(round_half_even(clamped));
  }

  static QATTN_HD float decode(Code code) { return static_cast<float>(code); }
};

/// As S8, for values that are not negative (softmax probabilities).
struct U8 {
  using Code = std::uint8_t;
  static constexpr float max = 255.0f;

  static QATTN_HD Code encode(float x) {
    const float low = x < 0.0f ? 0.0f : x;
    const float clamped = low > 255.0f ? 255.0f : low;
    return is_nan(x) ? Code{0} : static_cast<Code>(round_half_even(clamped));
  }

  static QATTN_HD float decode(Code code) { return static_cast<float>(code); }
};

}  // namespace qattn::formats
