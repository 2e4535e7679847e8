// Float bit patterns, and the few float32 operations whose rounding the formats rely on.
#pragma once

#include <cstdint>

#include "formats/hd.hpp"

namespace qattn::formats {

QATTN_HD std::uint32_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }

QATTN_HD float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline constexpr std::uint32_t kSignBit = 0x80000000u;
inline constexpr std::uint32_t kInfBits = 0x7f800000u;  // larger magnitudes are NaN
inline constexpr std::uint32_t kNanBits = 0x7fc00000u;
inline constexpr float kMinNormal = 0x1p-126f;

QATTN_HD std::uint32_t magnitude_bits(float x) { return bits_of(x) & ~kSignBit; }

QATTN_HD bool is_finite(float x) { return magnitude_bits(x) < kInfBits; }

QATTN_HD bool is_nan(float x) { return magnitude_bits(x) > kInfBits; }

/// Bits of x that are 1.
QATTN_HD int popcount(std::uint32_t x) {
  x -= x >> 1 & 0x55555555u;
  x = (x & 0x33333333u) + (x >> 2 & 0x33333333u);
  x = (x + (x >> 4)) & 0x0f0f0f0fu;
  return static_cast<int>(x * 0x01010101u >> 24);
}

QATTN_HD float quiet_nan() { return float_of(kNanBits); }

// nvcc fuses a product and a sum into one FMA unless either names its rounding; the host side is
// compiled with -ffp-contract=off.
QATTN_HD float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#elif defined(__clang__)
#pragma clang fp contract(off)
  return a + b;
#else
  return a + b;
#endif
}

QATTN_HD float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#elif defined(__clang__)
#pragma clang fp contract(off)
  return a * b;
#else
  return a * b;
#endif
}

QATTN_HD double add_rn(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dadd_rn(a, b);
#elif defined(__clang__)
#pragma clang fp contract(off)
  return a + b;
#else
  return a + b;
#endif
}

QATTN_HD double mul_rn(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#elif defined(__clang__)
#pragma clang fp contract(off)
  return a * b;
#else
  return a * b;
#endif
}

QATTN_HD float div_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

QATTN_HD float sqrt_rn(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

/// 1.5 * 2^23. Of a sum with x, |x| < 2^22, the ulp is 1: the addition rounds x to the nearest
/// integer, ties to even, and the low bits of the sum are its own.
inline constexpr float whole_numbers = 12582912.0f;

/// 1 / x, correctly rounded also where the compiler is allowed a fast division.
QATTN_HD float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  return __frcp_rn(x);
#else
  return 1.0f / x;
#endif
}

}  // namespace qattn::formats
