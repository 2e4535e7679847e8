// Codes of the KV cache's tiers: a uniform grid of 2^Bits levels that is symmetric about zero and
// steps over it, so no level is wasted on one side.
#pragma once

#include <cstdint>

#include "formats/bits.hpp"

namespace qattn::formats {

template <int Bits>
struct Kv {
  static_assert(Bits == 2 || Bits == 3 || Bits == 4 || Bits == 8);
  using Code = std::uint8_t;
  static constexpr int levels = 1 << Bits;
  static constexpr int half = levels / 2;

  /// clamp(floor(x / scale) + 2^(Bits - 1)). NaN has no code and gives 0: the scale carries it.
  static QATTN_HD Code encode(float x_over_scale) {
    const float bound = static_cast<float>(half);
    if (!(x_over_scale >= -bound)) return 0;
    if (x_over_scale >= bound) return static_cast<Code>(levels - 1);
    const int truncated = static_cast<int>(x_over_scale);
    const int floored = truncated - (x_over_scale < static_cast<float>(truncated) ? 1 : 0);
    return static_cast<Code>(floored + half);
  }

  /// The value in units of the scale: (code - 2^(Bits - 1) + 0.5); exact.
  static QATTN_HD float decode(Code code) {
    return add_rn(static_cast<float>(static_cast<int>(code) - half), 0.5f);
  }
};

}  // namespace qattn::formats
