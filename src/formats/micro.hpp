// Groups of elements that share one built-in scale (MXFP8, MXFP4, NVFP4). An encoder reads `count`
// elements, takes the missing ones of a short group as zeros, writes one code a byte for the whole
// group and returns the group's scale code. A NaN or infinity anywhere in the group makes the scale
// NaN and every code 0, so the group decodes to NaN throughout.
#pragma once

#include <cstdint>

#include "formats/e2m1.hpp"
#include "formats/e4m3.hpp"
#include "formats/scale.hpp"
#include "formats/ue8m0.hpp"

namespace qattn::formats {

inline constexpr int kMxGroup = 32;
inline constexpr int kNvfp4Group = 16;

QATTN_HD float group_amax(const float* x, int count) {
  float amax = 0.0f;
  for (int i = 0; i < count; ++i) amax = fold_amax(amax, x[i]);
  return amax;
}

/// A group's scale code, and what its elements are multiplied by before they are encoded; 0: its
/// codes are zeros.
struct GroupScale {
  std::uint8_t code;
  float inverse;
};

/// MXFP8 and MXFP4, by the format of the elements.
template <class Element>
QATTN_HD GroupScale mx_group_scale(float amax) {
  const std::uint8_t code = mx_scale_code(amax, Element::emax);
  return {code, code == Ue8m0::nan ? 0.0f : reciprocal(Ue8m0::decode(code))};
}

/// `global` is nvfp4_global() of the tensor, or a given scale.
QATTN_HD GroupScale nvfp4_group_scale(float amax, float global) {
  const std::uint8_t code = nvfp4_scale_code(amax, global);
  const float combined = mul_rn(E4m3::decode(code), global);
  // A scale of 0 has no reciprocal, and below 2^-126 it would overflow: such groups are zeros. The
  // comparison is also false for NaN.
  return {code, combined >= kMinNormal ? reciprocal(combined) : 0.0f};
}

template <class Element>
QATTN_HD void encode_scaled(const float* x, int count, int group, float inverse,
                            std::uint8_t* codes) {
  for (int i = 0; i < count; ++i) codes[i] = Element::encode(mul_rn(x[i], inverse));
  for (int i = count; i < group; ++i) codes[i] = 0;
}

template <class Element>
QATTN_HD std::uint8_t encode_group_mx(const float* x, int count, std::uint8_t* codes) {
  const GroupScale scale = mx_group_scale<Element>(group_amax(x, count));
  encode_scaled<Element>(x, scale.inverse > 0.0f ? count : 0, kMxGroup, scale.inverse, codes);
  return scale.code;
}

/// count <= 32; writes 32 codes.
QATTN_HD std::uint8_t encode_group_mxfp8(const float* x, int count, std::uint8_t* codes) {
  return encode_group_mx<E4m3>(x, count, codes);
}

/// count <= 32; writes 32 codes.
QATTN_HD std::uint8_t encode_group_mxfp4(const float* x, int count, std::uint8_t* codes) {
  return encode_group_mx<E2m1>(x, count, codes);
}

/// count <= 16; writes 16 codes.
QATTN_HD std::uint8_t encode_group_nvfp4(const float* x, int count, float global,
                                         std::uint8_t* codes) {
  const GroupScale scale = nvfp4_group_scale(group_amax(x, count), global);
  encode_scaled<E2m1>(x, scale.inverse > 0.0f ? count : 0, kNvfp4Group, scale.inverse, codes);
  return scale.code;
}

QATTN_HD float decode_mxfp8(std::uint8_t code, std::uint8_t scale) {
  return mul_rn(E4m3::decode(code), Ue8m0::decode(scale));
}

QATTN_HD float decode_mxfp4(std::uint8_t code, std::uint8_t scale) {
  return mul_rn(E2m1::decode(code), Ue8m0::decode(scale));
}

/// The product of element and group scale is exact, as in the matrix unit; only `global` rounds.
QATTN_HD float decode_nvfp4(std::uint8_t code, std::uint8_t scale, float global) {
  return mul_rn(mul_rn(E2m1::decode(code), E4m3::decode(scale)), global);
}

}  // namespace qattn::formats
