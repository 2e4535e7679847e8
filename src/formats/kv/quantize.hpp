// Quantiser of one row for the KV cache: the half-step grid of kv.hpp under one f16 scale, chosen
// among sixteen by squared error. A row is a token of one head or, where K's scales are per
// channel, a channel of a page's tokens (repeated in order up to a multiple of kv_lanes).
//
//   candidates  scale_i = f16(amax * ((17 + i) / 32) * 2^(1 - bits)), i = 0 .. 15
//   grid        g = clamp(floor(x * (1 / scale)), -2^(bits - 1), 2^(bits - 1) - 1) + 0.5
//   error       scale^2 * sum (x / scale - g)^2, in sixteen sums of every sixteenth element that
//               are added in halves; the smallest wins, the first of equals
//
// Every product and sum is rounded by itself, so that codes and scales are the same bits on every
// backend. A row with NaN or Inf, or whose scale f16 cannot hold, gets the scale NaN. A row
// whose largest candidate rounds to zero (amax below 2^(bits - 26)) gets scale 0.
#pragma once

#include <cstdint>

#include "formats/f16.hpp"
#include "formats/kv/codes.hpp"
#include "formats/scale.hpp"

namespace qattn::formats {

inline constexpr int kv_candidates = 16;
inline constexpr int kv_lanes = 16;  ///< partial sums; rows are multiples of it
inline constexpr std::uint16_t kv_nan_scale = 0x7e00;
inline constexpr std::uint16_t kv_infinite_scale = 0x7c00;  ///< and codes above it

/// What a row's largest magnitude is multiplied with for candidate i; exact.
QATTN_HD float kv_factor(int bits, int i) {
  return static_cast<float>(17 + i) / static_cast<float>(16 << bits);
}
/// Scale of candidate i as an f16 code; finite amax.
QATTN_HD std::uint16_t kv_candidate(float amax, int bits, int i) {
  return F16::encode(mul_rn(amax, kv_factor(bits, i)));
}

/// The largest number of the window's rows.
QATTN_HD float largest_16bit(bool bf16) { return bf16 ? 0x1.fep127f : 65504.0f; }

/// Does f16 hold the scale of a row with this largest magnitude? Not that of NaN and Inf.
QATTN_HD bool kv_holds(float amax, int bits) {
  return is_finite(amax) && kv_candidate(amax, bits, kv_candidates - 1) < kv_infinite_scale;
}

/// Squared error of a row under one positive scale.
QATTN_HD float kv_error(const float* x, int n, int bits, float scale) {
  const float inverse = reciprocal(scale);
  float sum[kv_lanes] = {};
  for (int i = 0; i < n; ++i) {
    const float y = mul_rn(x[i], inverse);
    const float e = add_rn(y, -kv_grid(y, bits));
    sum[i % kv_lanes] = add_rn(sum[i % kv_lanes], mul_rn(e, e));
  }
  for (int step = kv_lanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) sum[i] = add_rn(sum[i], sum[i + step]);
  }
  return mul_rn(mul_rn(scale, scale), sum[0]);
}

/// The f16 code of a row's scale; n is a multiple of kv_lanes.
QATTN_HD std::uint16_t kv_row_scale(const float* x, int n, int bits) {
  float amax = 0.0f;
  for (int i = 0; i < n; ++i) amax = fold_amax(amax, x[i]);
  // The largest decides whether f16 holds the row at all; smaller ones may vanish.
  if (!kv_holds(amax, bits)) return kv_nan_scale;
  std::uint16_t best = kv_candidate(amax, bits, kv_candidates - 1);
  if (best == 0) return 0;
  float least = float_of(kInfBits);
  for (int i = 0; i < kv_candidates; ++i) {
    const std::uint16_t code = kv_candidate(amax, bits, i);
    if (code == 0) continue;
    const float error = kv_error(x, n, bits, F16::decode(code));
    if (error < least) {
      least = error;
      best = code;
    }
  }
  return best;
}

/// Mean squared error of an element of K that the grid has rounded, in units of scale^2: of N(0,1)
/// rows at D = 128 (tests/kvcache/quantizer_test.cpp). That of 8 bits is taken for nothing.
QATTN_HD float kv_noise(int bits) {
  return bits == 2 ? 0.116f : bits == 3 ? 0.101f : bits == 4 ? 0.090f : 0.0f;
}

/// What a row's elements are multiplied with before the grid; scale 0 gives zeros.
QATTN_HD float kv_inverse(std::uint16_t scale) {
  return scale == 0 || scale == kv_nan_scale ? 0.0f : reciprocal(F16::decode(scale));
}

/// Code of one element under its row's scale; codes under a NaN scale say nothing.
QATTN_HD std::uint8_t kv_encode(float x, float inverse, int bits) {
  const float y = mul_rn(x, inverse);
  return is_nan(y) ? std::uint8_t{0} : kv_code(kv_grid(y, bits), bits);
}

/// Value of a code: at most one rounding, and none in practice (9 by 11 significant bits).
QATTN_HD float kv_decode(std::uint8_t code, std::uint16_t scale, int bits) {
  return mul_rn(kv_value(code, bits), F16::decode(scale));
}

}  // namespace qattn::formats
