// From a maximum magnitude to a scale. A scale is a multiplier: x is about code * scale, and
// code = round(x * reciprocal(scale)).
#pragma once

#include <cstdint>

#include "formats/bits.hpp"
#include "formats/e2m1.hpp"
#include "formats/e4m3.hpp"
#include "formats/ue8m0.hpp"

namespace qattn::formats {

/// May a caller give this scale? Positive and finite: zeros, negative numbers, Inf, NaN are none.
QATTN_HD bool is_scale(float x) { return bits_of(x) - 1u < kInfBits - 1u; }

/// max(acc, |x|), starting from acc = 0. NaN and infinities in x become NaN and stay. As unsigned
/// integers the bits of magnitudes are ordered like the magnitudes, with NaN on top.
QATTN_HD float fold_amax(float acc, float x) {
  const std::uint32_t seen = magnitude_bits(acc);
  const std::uint32_t magnitude = magnitude_bits(x);
  const std::uint32_t next = magnitude >= kInfBits ? kNanBits : magnitude;
  return float_of(seen > next ? seen : next);
}

/// amax * (1 / qmax) in one float32 multiplication, at least 2^-126 so that zeros and subnormals
/// give codes 0 and a positive finite scale with a finite reciprocal. NaN and infinities give NaN.
QATTN_HD float amax_scale(float amax, float qmax) {
  if (!is_finite(amax)) return quiet_nan();
  const float scale = mul_rn(amax, reciprocal(qmax));
  return scale < kMinNormal ? kMinNormal : scale;
}

/// Granularity per_thread of V: the maximum that a token is coded for, from its own and that of the
/// finite tokens of its group. The group's, unless that is more than four times its own; NaN stays.
QATTN_HD float joint_amax(float amax, float group) {
  return mul_rn(amax, 4.0f) >= group ? group : amax;
}

/// Scale code of an MXFP8 or MXFP4 group; element_emax is E4m3::emax, E2m1::emax, ...
QATTN_HD std::uint8_t mx_scale_code(float amax, int element_emax) {
  return Ue8m0::floor_encode(amax, element_emax);
}

/// The float32 scale of a whole NVFP4 tensor: it brings the largest group scale to e4m3's 448.
QATTN_HD float nvfp4_global(float tensor_amax) {
  return amax_scale(tensor_amax, E2m1::max * E4m3::max);
}

/// Scale code of an NVFP4 group: e4m3((amax * (1/6)) * (1/global)), each factor rounded to float32;
/// saturating, ties to even, 0 for a group too small for the tensor's scale. The scale has no sign,
/// so NaN is 0x7f; it comes from a NaN or infinity in amax or global.
QATTN_HD std::uint8_t nvfp4_scale_code(float amax, float global) {
  if (!is_finite(amax) || !is_finite(global)) return E4m3::nan;
  const float scale = mul_rn(mul_rn(amax, reciprocal(E2m1::max)), reciprocal(global));
  return E4m3::encode(scale) & 0x7fu;
}

}  // namespace qattn::formats
