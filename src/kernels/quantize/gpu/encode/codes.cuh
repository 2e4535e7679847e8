// Floats to codes of any 8-bit format, four at a time, and back.
#pragma once

#include "formats/e4m3.hpp"
#include "formats/e4m3fnuz.hpp"
#include "formats/e5m2.hpp"
#include "formats/micro.hpp"
#include "kernels/quantize/gpu/encode/groups.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Codes of one format. `Given`: under a scale that need not fit, whose clipped codes are counted.
/// Formats that have no instruction for that are encoded by one copy of their codec a kernel: where
/// every value had its own these were most of EncodeGeneral's 20000 instructions.
template <CodeKind Kind, bool Given>
struct Codes {
  template <class Codec>
  static QATTN_DEVICE std::uint32_t one(float y, std::uint32_t& clipped) {
    if constexpr (Given) {
      // Up to half a step beyond the largest code is rounding, not clipping.
      float limit = 127.0f;
      if constexpr (Kind == CodeKind::s8) {
        clipped += y >= 127.5f || y <= -127.5f;
      } else {
        const auto top = Codec::encode(Codec::max);
        limit =
            Codec::max + 0.5f * (Codec::max - Codec::decode(static_cast<std::uint8_t>(top - 1)));
        clipped += y > limit || y < -limit;
      }
    }
    return static_cast<std::uint8_t>(Codec::encode(y));
  }

  /// Four codes in a word by the codecs alone, also of NaN.
  static QATTN_DEVICE std::uint32_t exact_word(const float (&y)[4], std::uint32_t& clipped) {
    if constexpr (Kind == CodeKind::s8) return pack<formats::S8>(y, clipped);
    if constexpr (Kind == CodeKind::e4m3) return pack<formats::E4m3>(y, clipped);
    if constexpr (Kind == CodeKind::e5m2) return pack<formats::E5m2>(y, clipped);
    if constexpr (Kind == CodeKind::e4m3fnuz) return pack<formats::E4m3Fnuz>(y, clipped);
  }

  /// Four codes in a word.
  static QATTN_DEVICE std::uint32_t word(const float (&y)[4], std::uint32_t& clipped) {
    if constexpr (Kind == CodeKind::s8) {
      return pack<formats::S8>(y, clipped);
    } else if constexpr (Kind == CodeKind::e4m3fnuz || Given) {
      const Words2 coded = shared_word(y[0], y[1], y[2], y[3]);
      clipped += coded.w[1];
      return coded.w[0];
    } else if constexpr (Kind == CodeKind::e4m3) {
      return isa::pack_e4m3(y[0], y[1]) | static_cast<std::uint32_t>(isa::pack_e4m3(y[2], y[3]))
                                              << 16;
    } else {
      return isa::pack_e5m2(y[0], y[1]) | static_cast<std::uint32_t>(isa::pack_e5m2(y[2], y[3]))
                                              << 16;
    }
  }

 private:
  /// The word, and how many were clipped.
  static QATTN_DEVICE_CALL Words2 shared_word(float a, float b, float c, float d) {
    std::uint32_t clipped = 0;
    const float y[4] = {a, b, c, d};
    const std::uint32_t word = exact_word(y, clipped);
    return {{word, clipped}};
  }

  template <class Codec>
  static QATTN_DEVICE std::uint32_t pack(const float (&y)[4], std::uint32_t& clipped) {
    return low_bytes(one<Codec>(y[0], clipped), one<Codec>(y[1], clipped),
                     one<Codec>(y[2], clipped), one<Codec>(y[3], clipped));
  }
};

/// The scale of a group whose largest magnitude is `amax`.
QATTN_DEVICE formats::GroupScale group_scale(Micro micro, float amax, float global) {
  return micro == Micro::nvfp4   ? formats::nvfp4_group_scale(amax, global)
         : micro == Micro::mxfp8 ? formats::mx_group_scale<formats::E4m3>(amax)
                                 : formats::mx_group_scale<formats::E2m1>(amax);
}

/// Calls body(codes) with the Codes of a format.
template <class Body>
QATTN_DEVICE void with_codes(CodeKind kind, bool given, Body body) {
  switch (kind) {
    case CodeKind::s8:
      given ? body(Codes<CodeKind::s8, true>{}) : body(Codes<CodeKind::s8, false>{});
      break;
    case CodeKind::e4m3:
      given ? body(Codes<CodeKind::e4m3, true>{}) : body(Codes<CodeKind::e4m3, false>{});
      break;
    case CodeKind::e5m2:
      given ? body(Codes<CodeKind::e5m2, true>{}) : body(Codes<CodeKind::e5m2, false>{});
      break;
    case CodeKind::e4m3fnuz:
      given ? body(Codes<CodeKind::e4m3fnuz, true>{}) : body(Codes<CodeKind::e4m3fnuz, false>{});
      break;
  }
}

/// Adds what the threads of a warp have counted.
QATTN_DEVICE void add_clipped(std::uint64_t* to, std::uint32_t clipped) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) clipped += isa::shuffle_xor(clipped, mask);
  if (isa::lane() == 0 && clipped > 0) isa::atomic_add_global(to, std::uint64_t{clipped});
}

QATTN_DEVICE_CALL float decode_code(CodeKind kind, std::uint8_t code) {
  switch (kind) {
    case CodeKind::s8:
      return formats::S8::decode(static_cast<std::int8_t>(code));
    case CodeKind::e4m3:
      return formats::E4m3::decode(code);
    case CodeKind::e5m2:
      return formats::E5m2::decode(code);
    default:
      return formats::E4m3Fnuz::decode(code);
  }
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
