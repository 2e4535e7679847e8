// Reads one element of a tensor as float64. Written from the formats' definitions and on purpose
// not shared with src/formats: a defect there must not hide in the judge.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "qattn/tensor_view.hpp"

namespace qattn::reference {

/// IEEE 754 binary16: 1 sign, 5 exponent (bias 15), 10 fraction bits.
inline double decode_f16(std::uint16_t bits) {
  const double sign = (bits & 0x8000) ? -1.0 : 1.0;
  const int exponent = (bits >> 10) & 0x1F;
  const int fraction = bits & 0x3FF;
  if (exponent == 0x1F) {
    return fraction ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

/// The upper half of a binary32.
inline double decode_bf16(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

template <class T>
T load(const TensorView& view, std::int64_t element) {
  T value;
  std::memcpy(&value, static_cast<const T*>(view.data) + element, sizeof value);
  return value;
}

/// Element at `element` (an offset in elements) of an f32, f16 or bf16 tensor.
inline double load_real(const TensorView& view, std::int64_t element) {
  switch (view.format) {
    case Format::f32:
      return load<float>(view, element);
    case Format::f16:
      return decode_f16(load<std::uint16_t>(view, element));
    case Format::bf16:
      return decode_bf16(load<std::uint16_t>(view, element));
    default:
      return std::numeric_limits<double>::quiet_NaN();
  }
}

}  // namespace qattn::reference
