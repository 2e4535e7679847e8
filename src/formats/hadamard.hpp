// The rotation of Q and K rows: x -> H (s * x), with s a fixed vector of signs and H the normalised
// Hadamard matrix of the largest power of two that divides the row, block by block. It is
// orthonormal, so q.k does not change, and it spreads an outlier channel over its whole block.
#pragma once

#include <cstdint>

#include "formats/bits.hpp"

namespace qattn::formats {

/// +1 or -1 for a channel of the head dimension: the top bit of the 32-bit mix "lowbias32" (two
/// multiplications, three xor-shifts) of channel + seed, the seed being 0x9e3779b9. Part of the
/// format: caches and static scales made with other signs do not fit.
QATTN_HD constexpr float rotation_sign(int channel) {
  std::uint32_t h = static_cast<std::uint32_t>(channel) + 0x9e3779b9u;
  h ^= h >> 16;
  h *= 0x7feb352du;
  h ^= h >> 15;
  h *= 0x846ca68bu;
  h ^= h >> 16;
  return (h & kSignBit) != 0 ? -1.0f : 1.0f;
}

/// The largest power of two that divides dim > 0.
QATTN_HD int rotation_block(int dim) { return dim & -dim; }

/// 1 / sqrt(block) of a power of two, correctly rounded: a power of two, or one times sqrt(1/2).
QATTN_HD float rotation_norm(int block) {
  float norm = 1.0f;
  for (; block >= 4; block /= 4) norm = mul_rn(norm, 0.5f);
  return block == 2 ? mul_rn(norm, 0x1.6a09e6p-1f) : norm;
}

/// H x for every block of x, in place. Butterflies in order of growing distance, then one
/// multiplication: this order defines the result bit for bit.
QATTN_HD void hadamard_blocks(float* x, int dim) {
  const int block = rotation_block(dim);
  for (int distance = 1; distance < block; distance *= 2) {
    for (int start = 0; start < dim; start += 2 * distance) {
      for (int i = start; i < start + distance; ++i) {
        const float a = x[i];
        const float b = x[i + distance];
        x[i] = add_rn(a, b);
        x[i + distance] = add_rn(a, -b);
      }
    }
  }
  const float norm = rotation_norm(block);
  for (int i = 0; i < dim; ++i) x[i] = mul_rn(x[i], norm);
}

/// Signs first, then the Hadamard matrix.
QATTN_HD void rotate(float* x, int dim) {
  for (int i = 0; i < dim; ++i) x[i] = mul_rn(x[i], rotation_sign(i));
  hadamard_blocks(x, dim);
}

/// The inverse of rotate up to rounding: H is its own inverse, and so is a sign.
QATTN_HD void unrotate(float* x, int dim) {
  hadamard_blocks(x, dim);
  for (int i = 0; i < dim; ++i) x[i] = mul_rn(x[i], rotation_sign(i));
}

}  // namespace qattn::formats
