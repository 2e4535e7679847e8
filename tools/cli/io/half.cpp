#include "io/half.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace qattn::io {

std::uint16_t f16_from(float value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (magnitude >= 65520.0f) return sign | 0x7c00;  // half way from 65504 to 65536
  // A mantissa of 2048 carries into the exponent by itself.
  const int exponent = magnitude == 0 ? -14 : std::max(std::ilogb(magnitude), -14);
  const auto mantissa = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return static_cast<std::uint16_t>(sign + (exponent + 14) * 1024 + mantissa);
}

std::uint16_t bf16_from(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float f16_to_float(std::uint16_t bits) {
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) {
    return sign * (mantissa ? std::numeric_limits<float>::quiet_NaN()
                            : std::numeric_limits<float>::infinity());
  }
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
}

float bf16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

float get(const Array& array, std::int64_t index) {
  if (array.format == Format::f32) {
    float value;
    std::memcpy(&value, array.bytes.data() + index * 4, 4);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, array.bytes.data() + index * 2, 2);
  return array.format == Format::f16 ? f16_to_float(bits) : bf16_to_float(bits);
}

void set(Array& array, std::int64_t index, float value) {
  if (array.format == Format::f32) {
    std::memcpy(array.bytes.data() + index * 4, &value, 4);
    return;
  }
  const std::uint16_t bits = array.format == Format::f16 ? f16_from(value) : bf16_from(value);
  std::memcpy(array.bytes.data() + index * 2, &bits, 2);
}

}  // namespace qattn::io
