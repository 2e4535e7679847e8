// Eight channels of a row of 16 bits, 16 bytes, to codes: what every kernel without detours does.
#pragma once

#include <cstdint>

#include "formats/int8.hpp"
#include "formats/scale.hpp"
#include "isa/isa.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

using isa::Words2;
using isa::Words4;

/// 1 / scale for codes; 0 where there are none.
QATTN_DEVICE float code_factor(bool usable, float scale) {
  return usable && formats::is_finite(scale) ? formats::reciprocal(scale) : 0.0f;
}

template <isa::Element Input>
struct RowCodes {
  static QATTN_DEVICE isa::Pair unpack(std::uint32_t w) {
    if constexpr (Input == isa::Element::bf16) {
      return isa::unpack_bf16(w);
    } else {
      return isa::unpack_f16(w);
    }
  }

  /// Patterns of max |x| of the channels in low and in high halves: sixteen-bit magnitudes are
  /// ordered like their patterns, Inf and NaN on top.
  static QATTN_DEVICE std::uint32_t pair_magnitude(const Words4& raw) {
    constexpr std::uint32_t mask = 0x7fff7fffu;
    const std::uint32_t three = isa::max3_u16(raw.w[0] & mask, raw.w[1] & mask, raw.w[2] & mask);
    return isa::max3_u16(three, raw.w[3] & mask, 0);
  }
  /// Bits of the larger one.
  static QATTN_DEVICE std::uint32_t larger(std::uint32_t pair) {
    const std::uint32_t low = pair << 16, high = pair & 0xffff0000u;
    return formats::bits_of(unpack(high > low ? high : low).hi);
  }
  /// Bits of max |x|.
  static QATTN_DEVICE std::uint32_t magnitude(const Words4& raw) {
    return larger(pair_magnitude(raw));
  }
  /// Of x - mean.
  static QATTN_DEVICE std::uint32_t magnitude(const Words4& raw, const float (&mean)[8]) {
    return largest(raw, [&](float x, int n) { return formats::add_rn(x, -mean[n]); });
  }
  /// Of (x - mean) * times, which balances channels.
  static QATTN_DEVICE std::uint32_t magnitude(const Words4& raw, const float (&mean)[8],
                                              const float (&times)[8]) {
    return largest(raw, [&](float x, int n) { return balanced(x, mean[n], times[n]); });
  }

  /// The larger of two rows' channels, and the smaller; NaN where one is.
  static QATTN_DEVICE Words4 most(const Words4& a, const Words4& b) {
    return each(a, b, [](std::uint32_t x, std::uint32_t y) {
      return Input == isa::Element::bf16 ? isa::max_bf16(x, y) : isa::max_f16(x, y);
    });
  }
  static QATTN_DEVICE Words4 least(const Words4& a, const Words4& b) {
    return each(a, b, [](std::uint32_t x, std::uint32_t y) {
      return Input == isa::Element::bf16 ? isa::min_bf16(x, y) : isa::min_f16(x, y);
    });
  }

  /// Rounded value as the low byte of a word. |x * factor| is at most 127 and some ulps, so nothing
  /// needs clamping.
  static QATTN_DEVICE std::uint32_t rounded(float x, float factor) {
    return formats::bits_of(formats::add_rn(formats::mul_rn(x, factor), formats::whole_numbers));
  }

  /// s8 or e4m3 of x * factor. A factor of 0 gives zeros, whatever the row holds.
  template <bool E4m3>
  static QATTN_DEVICE Words2 encoded(const Words4& raw, float factor) {
    return convert<E4m3>(raw, factor, [](float x, int) { return x; });
  }
  /// The same of x - mean.
  template <bool E4m3>
  static QATTN_DEVICE Words2 encoded(const Words4& raw, float factor, const float (&mean)[8]) {
    return convert<E4m3>(raw, factor, [&](float x, int n) { return formats::add_rn(x, -mean[n]); });
  }
  /// s8 of (x - mean) * times.
  static QATTN_DEVICE Words2 encoded(const Words4& raw, float factor, const float (&mean)[8],
                                     const float (&times)[8]) {
    return convert<false>(raw, factor,
                          [&](float x, int n) { return balanced(x, mean[n], times[n]); });
  }

 private:
  static QATTN_DEVICE float balanced(float x, float mean, float times) {
    return formats::mul_rn(formats::add_rn(x, -mean), times);
  }
  template <class Of>
  static QATTN_DEVICE std::uint32_t largest(const Words4& raw, Of of) {
    std::uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const isa::Pair x = unpack(raw.w[i]);
      const std::uint32_t lo = formats::magnitude_bits(of(x.lo, 2 * i));
      const std::uint32_t hi = formats::magnitude_bits(of(x.hi, 2 * i + 1));
      top = isa::max3(top, lo, hi);
    }
    return top;
  }
  template <class Of>
  static QATTN_DEVICE Words4 each(const Words4& a, const Words4& b, Of of) {
    return {{of(a.w[0], b.w[0]), of(a.w[1], b.w[1]), of(a.w[2], b.w[2]), of(a.w[3], b.w[3])}};
  }
  template <bool E4m3, class Less>
  static QATTN_DEVICE Words2 convert(const Words4& raw, float factor, Less less) {
    Words2 code;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const isa::Pair a = unpack(raw.w[2 * n]), b = unpack(raw.w[2 * n + 1]);
      float x[4] = {a.lo, a.hi, b.lo, b.hi};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (E4m3) x[j] = formats::add_rn(x[j], 0.0f);  // -0 becomes +0, as on the CPU
        x[j] = less(x[j], 4 * n + j);
      }
      if constexpr (E4m3) {
        const std::uint32_t lo =
            isa::pack_e4m3(formats::mul_rn(x[0], factor), formats::mul_rn(x[1], factor));
        const std::uint32_t hi =
            isa::pack_e4m3(formats::mul_rn(x[2], factor), formats::mul_rn(x[3], factor));
        code.w[n] = lo | hi << 16;
      } else {
        code.w[n] = isa::pack_s8(formats::mul_rn(x[0], factor), formats::mul_rn(x[1], factor),
                                 formats::mul_rn(x[2], factor), formats::mul_rn(x[3], factor));
      }
    }
    if (E4m3 && factor == 0.0f) code = Words2{{0, 0}};  // 0 times a bad value is NaN
    return code;
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
