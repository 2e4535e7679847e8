// Between the product of Q and K and the softmax: softcap, biases and masks of single scores, in
// the order of docs/NUMERICS.md. Used by the general variants of the kernels.
#pragma once

#include <cmath>
#include <cstdint>

#include "isa/fragment.hpp"
#include "isa/isa.hpp"
#include "kernels/attention/common/params.hpp"
#include "kernels/operand/numbers.hpp"
#include "kernels/operand/visible_keys.hpp"

namespace qattn::kernels {

/// log2 of u8 P's largest code.
inline constexpr float log2_255 = 7.99435343685885793f;

}  // namespace qattn::kernels

namespace qattn::tile {

inline namespace QATTN_TARGET {

inline constexpr float largest = 0x1.fffffep127f;

/// x + bias. Numbers that leave the floats together stay the largest: -infinity means masked.
QATTN_DEVICE float add_bias(float x, float bias) {
  const float sum = x + bias;
  const bool far = fabsf(sum) == infinity() && is_finite(bias);
  return far ? copysignf(largest, sum) : sum;
}

// Scores in units of log2 are half as large again, which the largest floats have no room for, nor
// differences of them. Beyond 2^125 an eighth of what a number is larger keeps the order.
inline constexpr float squeezed_from = 0x1p125f, squeezed_by = 0.125f;

/// -infinity and NaN stay what they are.
QATTN_DEVICE float squeeze(float x) {
  const float base = copysignf(squeezed_from * (1 - squeezed_by), x);
  return fabsf(x) > squeezed_from ? fmaf(x, squeezed_by, base) : x;
}
QATTN_DEVICE float unsqueeze(float x) {
  const float base = copysignf(squeezed_from * (1 - squeezed_by), x);
  const float wide = add_bias((x - base) * (1 / squeezed_by), 0.0f);
  return fabsf(x) > squeezed_from ? wide : x;
}

/// Does a query whose scores are all -infinity see a key? Then these lie below the floats. Where
/// there is a mask, kernels have made such scores NaN.
QATTN_DEVICE bool sees_key(const kernels::AttentionParams& p, int b, int head, int query, int shift,
                           int keys) {
  int key = kernels::visible_begin(p.window_left, query + shift);
  const int end = kernels::visible_end(p.window_right, query + shift, keys);
  key = key < 0 ? 0 : key;
  if (p.mask.data != nullptr) return false;
  if (p.block_mask.data == nullptr) return key < end;
  const std::int64_t row = b * p.block_mask.stride[0] + head * p.block_mask.stride[1] +
                           query / p.block_mask_q * p.block_mask.stride[2];
#pragma unroll 1
  for (; key < end; key = (key / p.block_mask_k + 1) * p.block_mask_k) {
    const auto* blocks = static_cast<const std::uint8_t*>(p.block_mask.data) + row;
    if (isa::load_global(blocks + key / p.block_mask_k * p.block_mask.stride[3]) != 0) return true;
  }
  return false;
}

/// c tanh(x / c); `inverse` = 1 / c. The exponential form loses digits near 0, where a series takes
/// over; both are computed and one is chosen.
QATTN_DEVICE float soft_cap(float x, float c, float inverse) {
  const float y = x * inverse;
  const float a = fminf(fabsf(y), 44.0f), s = a * a;
  const float series = a * fmaf(s, fmaf(s, fmaf(s, -17.0f / 315, 2.0f / 15), -1.0f / 3), 1.0f);
  const float exponential = fmaf(-2.0f, isa::reciprocal(isa::exp2(2.0f * log2_e * a) + 1.0f), 1.0f);
  const float t = c * (a < 0.0625f ? series : exponential);
  return is_nan(x) ? x : y < 0 ? -t : t;
}

/// What one thread knows of one of its query rows.
struct ScoreRow {
  std::int32_t i = 0;         ///< row in its sequence
  std::int32_t head = 0;      ///< query head
  std::int32_t begin = 0;     ///< first visible key
  std::int32_t end = 0;       ///< one past the last
  std::int32_t diagonal = 0;  ///< i + Sk - Sq
};

/// Calls f(r, key, x) for every score that a lane has in fragments F: row r of the lane's, `key` of
/// the tile.
template <class F, int M, int N, class Function>
QATTN_DEVICE void each_score(float (&x)[M][N][F::elements], Function f) {
  const int column = F::lane_column(isa::lane());
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < F::elements; ++i) {
        const int r = m * F::rows + isa::row_of_element<F>(i);
        const int place = isa::column_of_tile<F>(n) + F::element_column(isa::place_in_row<F>(i));
        f(r, column + place, x[m][n][i]);
      }
    }
  }
}

/// Adds a mask tensor, or turns what it forbids into -infinity. Keys outside a row's bounds are not
/// looked up: the tensor need not have them. `OfScores`: what is forbidden is chosen among scores,
/// not among sums. That is the same, and makes ptxas order Hopper's hot loops of 16 bits better (4
/// to 6 % at D 128, H200); portable kernels spill more by it, and those of u8 P above D 128.
template <class F, bool OfScores, int M, int N>
QATTN_DEVICE void apply_mask(const kernels::BroadcastView& mask, int b,
                             const ScoreRow (&rows)[F::rows * M], int tile,
                             float (&x)[M][N][F::elements]) {
  std::int64_t base[F::rows * M];
#pragma unroll
  for (int r = 0; r < F::rows * M; ++r) {
    base[r] = b * mask.stride[0] + rows[r].head * mask.stride[1] + rows[r].i * mask.stride[2];
  }
  const auto at = [&](int r, int j) { return base[r] + j * mask.stride[3]; };
  const auto inside = [&](int r, int j) { return j >= rows[r].begin && j < rows[r].end; };
  if (mask.format == Format::b1) {  // two keys of a lane lie in one byte
    const auto* data = static_cast<const std::uint8_t*>(mask.data);
    each_score<F>(x, [&](int r, int key, float& s) {
      const int j = tile + key;
      if (!inside(r, j)) return;
      if ((isa::load_global(data + (at(r, j) >> 3)) >> (j & 7) & 1) == 0) s = -infinity();
    });
    return;
  }
  if (mask.format == Format::b8) {
    const auto* data = static_cast<const std::uint8_t*>(mask.data);
    each_score<F>(x, [&](int r, int key, float& s) {
      if (inside(r, tile + key) && isa::load_global(data + at(r, tile + key)) == 0) s = -infinity();
    });
    return;
  }
  const auto add = [](float& s, float bias) {
    const bool hidden = bias == -infinity();
    s = OfScores ? add_bias(hidden ? 0.0f : s, bias) : hidden ? bias : add_bias(s, bias);
  };
  if (mask.format == Format::f32) {
    const auto* data = static_cast<const float*>(mask.data);
    each_score<F>(x, [&](int r, int key, float& s) {
      if (inside(r, tile + key)) add(s, isa::load_global(data + at(r, tile + key)));
    });
    return;
  }
  const auto* data = static_cast<const std::uint16_t*>(mask.data);
  const bool half = mask.format == Format::f16;
  each_score<F>(x, [&](int r, int key, float& s) {
    if (!inside(r, tile + key)) return;
    const std::uint32_t bits = isa::load_global(data + at(r, tile + key));
    add(s, half ? isa::unpack_f16(bits).lo : isa::unpack_bf16(bits).lo);
  });
}

}  // namespace QATTN_TARGET
}  // namespace qattn::tile
