// Number formats in float64, written from their definitions and not from src/formats: rounding and
// decoding for the semantic model and for filling test tensors.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "qattn/format.hpp"

namespace qattn::test {

/// Nearest value with `fraction` fraction bits, ties to even, exponents from `min_exponent`
/// (below it the grid is uniform), magnitude clamped to `max`.
inline double round_float(double x, int fraction, int min_exponent, double max) {
  if (std::isnan(x) || x == 0) return x;
  if (std::isinf(x)) return std::copysign(max, x);
  std::uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int exponent = static_cast<int>(bits >> 52 & 0x7ff) - 1023;  // of |x|, in [2^e, 2^(e+1))
  const int of_step = std::max(exponent, min_exponent) - fraction;
  const auto power = [](int e) {
    const std::uint64_t code = static_cast<std::uint64_t>(e + 1023) << 52;
    double two;
    std::memcpy(&two, &code, sizeof two);
    return two;
  };
  constexpr double whole = 0x1.8p52;  // what is added to it is rounded to a whole number
  const double rounded = ((x * power(-of_step) + whole) - whole) * power(of_step);
  return std::copysign(std::min(std::abs(rounded), max), x);
}

inline constexpr double unbounded = std::numeric_limits<double>::infinity();

inline double round_f16(double x) {
  const double r = round_float(x, 10, -14, unbounded);
  return std::abs(r) > 65504 ? std::copysign(unbounded, r) : r;
}
inline double round_bf16(double x) { return round_float(x, 7, -126, unbounded); }
inline double round_e4m3(double x) { return round_float(x, 3, -6, 448); }
inline double round_e2m1(double x) { return round_float(x, 1, 0, 6); }

/// To an input format (f32, f16, bf16).
inline double round_real(double x, Format format) {
  if (format == Format::f16) return round_f16(x);
  if (format == Format::bf16) return round_bf16(x);
  return static_cast<float>(x);
}

/// Bits of a value that round_f16 gave.
inline std::uint16_t encode_f16(double x) {
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return 0x7E00;
  const double a = std::abs(x);
  if (a > 65504) return sign | 0x7C00;
  if (a < std::ldexp(1.0, -14)) return sign | static_cast<std::uint16_t>(std::ldexp(a, 24));
  int exponent;
  const double mantissa = std::frexp(a, &exponent);  // in [0.5, 1)
  const int fraction = static_cast<int>(std::ldexp(mantissa, 11)) - 1024;
  return sign | static_cast<std::uint16_t>(((exponent + 14) << 10) + fraction);
}

inline std::uint16_t encode_bf16(double x) {
  const float value = static_cast<float>(x);
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>(bits >> 16);
}

/// A sign, `exponent_bits`, `fraction_bits` number without special values.
inline double decode_float(std::uint32_t code, int exponent_bits, int fraction_bits, int bias) {
  const int fraction = static_cast<int>(code & ((1u << fraction_bits) - 1));
  const int exponent = static_cast<int>(code >> fraction_bits) & ((1 << exponent_bits) - 1);
  const double sign = (code >> (exponent_bits + fraction_bits)) & 1 ? -1.0 : 1.0;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
}

/// One code of an 8-bit or narrower format, or of f16, bf16.
inline double decode(Format format, std::uint32_t code) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  switch (format) {
    case Format::s8:
      return static_cast<std::int8_t>(code);
    case Format::u8:
      return code & 0xFF;
    case Format::e4m3:
    case Format::mxfp8:
      return (code & 0x7F) == 0x7F ? nan : decode_float(code, 4, 3, 7);
    case Format::e4m3fnuz:
      return code == 0x80 ? nan : decode_float(code, 4, 3, 8);
    case Format::e5m2:
      if ((code & 0x7F) > 0x7C) return nan;
      if ((code & 0x7F) == 0x7C) return code & 0x80 ? -unbounded : unbounded;
      return decode_float(code, 5, 2, 15);
    case Format::mxfp4:
    case Format::nvfp4:
      return decode_float(code & 0xF, 2, 1, 1);
    case Format::ue8m0:
      return code == 0xFF ? nan : std::ldexp(1.0, static_cast<int>(code) - 127);
    case Format::f16:
      if ((code & 0x7C00) == 0x7C00) {
        return code & 0x3FF ? nan : (code & 0x8000 ? -unbounded : unbounded);
      }
      return decode_float(code, 5, 10, 15);
    case Format::bf16: {
      const std::uint32_t wide = code << 16;
      float value;
      std::memcpy(&value, &wide, sizeof value);
      return value;
    }
    default:
      return nan;
  }
}

}  // namespace qattn::test
