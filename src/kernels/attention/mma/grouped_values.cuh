// P with scales of groups, its rounding and its product with V, for the mma.sync prefill kernel.
//
// e2m1 P (nvfp4) is relative to its own tile: 2688 times itself, so that the scale of a group of 16
// keys, its maximum / 6 in e4m3, reaches at most 448, and codes at most 6: nothing saturates. The
// products of a tile leave for the output times what the tile weighs.
//
// e4m3 P with scales of 32 (mxfp8) is relative to the running maximum; scales are the smallest
// powers of two that bring the group's largest to 448, e4m3's largest code, or below. Products join
// the output in the matrix unit.
#pragma once

#include "formats/e4m3.hpp"
#include "kernels/attention/mma/values.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// `Kernel`: MmaRows.
template <class Kernel>
struct GroupedValues {
  using S = typename Kernel::Shape;
  using F = typename S::Fragment;
  using K = typename S::KeyFragment;
  using V = typename S::Values;
  using Scores = typename Kernel::Scores;
  static constexpr int M = Kernel::M, R = Kernel::R, steps = S::v_bytes / 32;
  /// Channel tiles that are multiplied at a time.
  static constexpr int together = MmaValues<Kernel>::value_chunk;
  using Codes = std::uint32_t[steps][M][4];
  using Scales = std::uint32_t[M];

  Kernel& k;

  QATTN_DEVICE MmaValues<Kernel> values() const { return {k}; }

  // ---- Rounding of P --------------------------------------------------------------------------

  static constexpr float levels = 6 * 448, log2_levels = 11.3923174227787603f;

  /// 2^(score * scale + offset) of one row in the four column tiles from `n` on.
  QATTN_DEVICE static void exponentials(const Scores& s, int r, int n, float scale, float offset,
                                        float (&e)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = s[r / 2][n + i / 2][r % 2 * 2 + i % 2];
      e[i] = isa::exp2(fmaf(x, scale, offset));
    }
  }
  QATTN_DEVICE static float largest(const float (&e)[8]) {
    const float a = fmaxf(fmaxf(e[0], e[1]), fmaxf(e[2], e[3]));
    return fmaxf(a, fmaxf(fmaxf(e[4], e[5]), fmaxf(e[6], e[7])));
  }

  /// Codes of P in e2m1, with their scales where the product takes them. `offset`: what 2688 times
  /// P has in its exponent beside the score.
  QATTN_DEVICE void round_e2m1(const Scores& s, const float (&scale)[R], const float (&offset)[R],
                               Codes& a, Scales& sa) const {
    const int lane = k.map.lane;
    // Lanes 0 and 1 of four have the first 16 keys of 32, the others the last. Lanes t = 0 and 1
    // hand the product the scales of rows g and g + 8.
    const int place = lane % 4 / 2 * 8;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      std::uint32_t mine = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float e[2][8], top[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          exponentials(s, 2 * m + h, 4 * half, scale[2 * m + h], offset[2 * m + h], e[h]);
          top[h] = largest(e[h]);
          top[h] = fmaxf(top[h], isa::shuffle_xor(top[h], 1)) * (1.0f / 6);
        }
        const std::uint32_t codes = isa::pack_e4m3(top[0], top[1]);
        const isa::Pair by = isa::unpack_f16(isa::unpack_e4m3(static_cast<std::uint16_t>(codes)));
        const float factor[2] = {by.lo > 0.0f ? isa::reciprocal(by.lo) : 0.0f,
                                 by.hi > 0.0f ? isa::reciprocal(by.hi) : 0.0f};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int i = 0; i < 8; ++i) e[h][i] *= factor[h];
          a[0][m][2 * half + h] = isa::pack_e2m1(e[h]);
        }
        mine |= (codes >> lane % 2 * 8 & 0xff) << (place + 16 * half);
      }
      sa[m] = mine | isa::shuffle_xor(mine, 2);
    }
  }

  /// Carries into the exponent of a float whose significand is above 448 / 256.
  static constexpr std::uint32_t above_448 = 0x1fffff;

  /// Codes of P in e4m3 with powers of two for groups of 32 keys.
  QATTN_DEVICE void round_mxfp8(const Scores& s, const float (&scale)[R], const float (&offset)[R],
                                Codes& a, Scales& sa) const {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      std::uint32_t code[2] = {0, 0};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float e[8];
          exponentials(s, 2 * m + h, 4 * half, scale[2 * m + h], offset[2 * m + h], e);
          const float top =
              isa::join_row<F>(largest(e), [](float x, float y) { return fmaxf(x, y); });
          const auto exponent =
              static_cast<std::int32_t>((formats::bits_of(top) + above_448) >> 23) -
              formats::E4m3::emax;
          const std::uint32_t biased = exponent > 0 ? static_cast<std::uint32_t>(exponent) : 0u;
          const float factor = formats::float_of((254 - biased) << 23);
#pragma unroll
          for (int i = 0; i < 8; ++i) e[i] *= factor;
          a[half][m][h] = isa::pack_e4m3(e[0], e[1]) | std::uint32_t{isa::pack_e4m3(e[2], e[3])}
                                                           << 16;
          a[half][m][h + 2] = isa::pack_e4m3(e[4], e[5]) | std::uint32_t{isa::pack_e4m3(e[6], e[7])}
                                                               << 16;
          code[h] |= biased << 8 * half;
        }
      }
      sa[m] = k.map.lane % 2 == 0 ? code[0] : code[1];
    }
  }

  // ---- Products with V ------------------------------------------------------------------------

  /// B operands of N channel tiles from row `first` of V's on, and their scales.
  template <int N>
  QATTN_DEVICE void load_values(int first, std::uint32_t (&b)[steps][N][2],
                                std::uint32_t (&sb)[N]) const {
    const int lane = k.map.lane;
    const SharedAddress v = k.at_stage(S::v_at) + first * V::stride;
    if constexpr (steps == 1) {  // an ldmatrix has two tiles of channels
      std::uint32_t r[(N + 1) / 2][4];
      SharedAddress row[(N + 1) / 2];
#pragma unroll
      for (int n = 0; n < (N + 1) / 2; ++n) {
        const int tile = N == 1 ? 0 : lane / 16;
        row[n] = V::place(v, 8 * tile + lane % 8, lane / 8 % 2 * 16) + 16 * n * V::stride;
      }
      isa::load_matrix<(N + 1) / 2>(r, row);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        b[0][n][0] = r[n / 2][n % 2 * 2], b[0][n][1] = r[n / 2][n % 2 * 2 + 1];
      }
    } else {
      std::uint32_t r[N][4];
      SharedAddress row[N];
#pragma unroll
      for (int n = 0; n < N; ++n) row[n] = V::place(v, lane % 8, lane / 8 * 16) + 8 * n * V::stride;
      isa::load_matrix<N>(r, row);
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i / 2][n][i % 2] = r[n][i];
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const SharedAddress at =
          k.at_stage(S::v_groups_at) + (first + 8 * n + lane / 4) * S::v_group_bytes;
      if constexpr (S::v_group_bytes == 4) {
        sb[n] = isa::load_shared<std::uint32_t>(at);
      } else {
        sb[n] = isa::load_shared<std::uint16_t>(at);
      }
    }
  }

  /// acc += P V of N channel tiles.
  template <int N>
  QATTN_DEVICE void multiply(const Codes& a, const Scales& sa, int first,
                             float (&acc)[M][N][4]) const {
    std::uint32_t b[steps][N][2], sb[N];
    load_values<N>(first, b, sb);
    unroll<steps>([&](auto step) {
      constexpr int byte = step * (S::v_group_bytes / steps);
      isa::mma_scaled<S::pv_product, M, N, byte % 4>(acc, a[step], b[step], sa, sb);
    });
  }

  /// Row sums of the rounded P: an extra row of V holds ones.
  QATTN_DEVICE void add_weights(const Codes& a, const Scales& sa, const float (&share)[R]) const {
    float acc[M][1][4] = {};
    multiply<1>(a, sa, S::d, acc);
#pragma unroll
    for (int r = 0; r < R; ++r) {  // column 0 lies in lane t = 0, the others hold zeros
      const float* x = acc[r / 2][0] + r % 2 * 2;
      k.state.sum[r] = fmaf(x[0] + x[1], share[r], k.state.sum[r]);
    }
  }

  // ---- Softmax and product with V -------------------------------------------------------------

  /// e2m1 has no NaN: rows that meet one have it in their sum. (Scores of infinity make the share
  /// NaN.)
  QATTN_DEVICE void note_bad(const Scores& s) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int n = 0; n < S::n_tiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (tile::is_nan(s[r / 2][n][r % 2 * 2 + e])) k.state.sum[r] = tile::quiet_nan();
        }
      }
    }
  }

  QATTN_DEVICE void attend_e2m1(Scores& s, const float (&scale)[R]) const {
    float top[R], share[R], offset[R];
    values().scaled_maxima(s, scale, top);
    k.state.update_max(top, k.output);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      share[r] = isa::exp2(top[r] - k.state.reference(k.state.max[r])) * (1 / levels);
      offset[r] = log2_levels - k.state.reference(top[r]);
    }
    Codes a;
    Scales sa;
    round_e2m1(s, scale, offset, a, sa);
    add_weights(a, sa, share);
#pragma unroll
    for (int first = 0; first < S::d_tiles; first += together) {
      float acc[M][together][4] = {};
      multiply<together>(a, sa, 8 * first, acc);
#pragma unroll
      for (int n = 0; n < together; ++n) {
        const isa::Pair by =
            S::general ? values().channel_scale(8 * (first + n)) : isa::Pair{1.0f, 1.0f};
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float x = acc[m][n][i];
            if constexpr (S::general) x *= i % 2 == 0 ? by.lo : by.hi;
            float& out = k.output.o[m][first + n][i];
            out = fmaf(x, share[2 * m + i / 2], out);
          }
        }
      }
    }
  }

  QATTN_DEVICE void attend_mxfp8(Scores& s, const float (&scale)[R]) const {
    float top[R], one[R], offset[R];
    values().scaled_maxima(s, scale, top);
    k.state.update_max(top, k.output);
#pragma unroll
    for (int r = 0; r < R; ++r) one[r] = 1.0f, offset[r] = -k.state.reference(k.state.max[r]);
    Codes a;
    Scales sa;
    round_mxfp8(s, scale, offset, a, sa);
    add_weights(a, sa, one);
    values().multiply_in_place([&](int first, float (&acc)[M][together][4]) {
      multiply<together>(a, sa, 8 * first, acc);
    });
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
