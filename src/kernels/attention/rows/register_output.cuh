// O of a prefill kernel in its registers.
#pragma once

#include "isa/fragment.hpp"
#include "kernels/operand/prepared.hpp"

namespace qattn::kernels {

// V's codes are 128 too large (PreparedTiles), so that products with P are never negative, and
// those of 128 keys stay below 2^23. Such an int32 is a float as it lies there, of 2^-149 for
// each 1, and joins the output without a conversion, which are scarce: a multiprocessor of
// Hopper makes 64 a clock, 34 beside products (H200). The output is in other units then, and
// holds an excess for the 128; rows end without either.

/// What a tile's weight is multiplied with to join P V, and the output then with.
inline constexpr float u8_share_unit = 0x1p90f, u8_value_unit = 0x1p59f;

inline namespace QATTN_TARGET {

/// What the matrix unit left of u8 P times V, in units of 2^-149.
template <class S>
QATTN_DEVICE float u8_sum_as_float(std::int32_t product) {
  static_assert(S::keys * 255 * 255 < 1 << 24);
  return __builtin_bit_cast(float, product);
}

/// `S` gives Fragment, m_tiles, d_tiles.
template <class S>
struct RegisterOutput {
  using F = typename S::Fragment;
  static constexpr int M = S::m_tiles, R = F::rows * M;

  float o[M][S::d_tiles][F::elements] = {};

  QATTN_DEVICE void rescale(const float (&by)[R]) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
        for (int i = 0; i < F::elements; ++i) {
          o[m][n][i] *= by[F::rows * m + isa::row_of_element<F>(i)];
        }
      }
    }
  }

  /// Takes the excess off that u8 P has left (RowState::add_excess()), where rows are not ended.
  QATTN_DEVICE void end_values(float (&excess)[R]) {
    isa::add_rows<F>(excess);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float less = excess[r] * (-value_offset * u8_value_unit);
#pragma unroll
      for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
        for (int e = 0; e < F::row_elements; ++e) {
          float& x = o[r / F::rows][n][F::element(r % F::rows, e)];
          x = fmaf(x, u8_value_unit, less);
        }
      }
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
