// Scores of the mma.sync prefill kernels: the product of Q and K, and what smooth_q took from it.
#pragma once

#include <utility>

#include "kernels/attention/common/score.hpp"
#include "kernels/attention/common/work_tile.cuh"
#include "kernels/attention/mma/shape.hpp"

namespace qattn::kernels {

/// Calls f with constants 0 to N - 1.
template <int N, class Function>
QATTN_DEVICE void unroll(Function f) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

/// ue8m0's 1, four times.
inline constexpr std::uint32_t unit_scales = 0x7f7f7f7f;

inline namespace QATTN_TARGET {

/// Which of its sequence's means belongs to a row of the work; to one behind the end, the last.
QATTN_DEVICE int mean_of(const AttentionParams& p, const WorkTile& work, int row) {
  const int length = static_cast<int>(work.q.length);
  return (row < length ? row : length - 1) / p.q_mean.block;
}

/// The scores of a mean of the work's sequence with the keys from `tile` on.
QATTN_DEVICE const float* mean_scores(const AttentionParams& p, const WorkTile& work, int mean,
                                      int tile) {
  return p.q_mean.scores + (work.head * p.q_mean.most + mean) * p.q_mean.key_slots + work.k_slot +
         tile;
}

/// The product of Q and K of a tile. `Kernel`: MmaRows.
template <class Kernel>
struct MmaProduct {
  using S = typename Kernel::Shape;
  using F = typename S::Fragment;
  using K = typename S::KeyFragment;
  using Scores = typename Kernel::Scores;
  static constexpr int M = Kernel::M, R = Kernel::R;

  Kernel& k;

  using Products = isa::Accumulator<S::qk>[M][S::n_tiles][4];

  QATTN_DEVICE void multiply_queries(Scores& scores, int tile) const {
    static_assert(!isa::is_integer(S::qk) || S::d * 128 * 128 <= 1 << 22);
    isa::Accumulator<S::qk> acc[M][S::n_tiles][4];
    if constexpr (S::qk_scaled) {
      multiply_scaled(acc, tile);
    } else {
      multiply_plain(acc);
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < S::n_tiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] = isa::to_float_22(acc[m][n][i]);
      }
    }
  }

  /// Where K of the tile is. Where there are two buffers, the other one is being filled.
  QATTN_DEVICE int k_at() const {
    return S::k_at + (S::k_buffers == 2 ? S::Keys::bytes - k.copies.k_buffer : 0);
  }

  /// 32 bytes of each row, as A and B operands.
  QATTN_DEVICE void load_step(int step, std::uint32_t (&a)[M][4],
                              std::uint32_t (&b)[S::n_tiles][2]) const {
    using Keys = typename S::Keys;
    const SharedAddress from = Keys::place(k.at_stage(k_at()), k.map.lane % 8 + k.map.lane / 16 * 8,
                                           k.map.lane / 8 % 2 * 16);
    std::uint32_t pair[S::n_tiles / 2][4];
    SharedAddress b_row[S::n_tiles / 2];
#pragma unroll
    for (int n = 0; n < S::n_tiles / 2; ++n) {
      b_row[n] = Keys::along(from + n * 16 * Keys::stride, step * 32);
    }
    if constexpr (S::ring) {
#pragma unroll
      for (int i = 0; i < 4 * M; ++i) a[i / 4][i % 4] = k.queries[step][i / 4][i % 4];
    } else {
      load_queries(step, a);
    }
    isa::load_matrix<S::n_tiles / 2>(pair, b_row);
#pragma unroll
    for (int n = 0; n < S::n_tiles; ++n) {
      b[n][0] = pair[n / 2][n % 2 * 2], b[n][1] = pair[n / 2][n % 2 * 2 + 1];
    }
  }
  QATTN_DEVICE void load_queries(int step, std::uint32_t (&a)[M][4]) const {
    using Q = typename S::Queries;
    const int row = k.map.warp * S::warp_rows + k.map.lane % 16;
    const SharedAddress q = Q::place(k.base + S::q_at, row, k.map.lane / 16 * 16);
    SharedAddress a_row[M];
#pragma unroll
    for (int m = 0; m < M; ++m) a_row[m] = Q::along(q + m * 16 * Q::stride, step * 32);
    isa::load_matrix<M>(a, a_row);
  }

  QATTN_DEVICE void multiply_plain(Products& acc) const {
#pragma unroll
    for (int step = 0; step < S::qk_bytes / 32; ++step) {
      std::uint32_t a[M][4], b[S::n_tiles][2];
      load_step(step, a, b);
      if (step == 0) {
        isa::mma_zero<S::qk, S::qk, M, S::n_tiles>(acc, a, b);
      } else {
        isa::mma<S::qk, S::qk, M, S::n_tiles>(acc, a, b);
      }
    }
  }

  QATTN_DEVICE void multiply_scaled(Products& acc, int tile) const {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < S::n_tiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][n][i] = 0;
      }
    }
    if constexpr (S::qk_groups) begin_with_means(acc, tile);
    std::uint32_t sa[M], sb[S::n_tiles];
    unroll<S::qk_bytes / 32>([&](auto step) {
      // Bytes of scales that a step takes, and where they are in their word.
      constexpr int bytes = S::qk_groups ? 256 / isa::element_bits(S::qk) / S::qk_group : 0;
      constexpr int first = step * bytes, at = first % 4;
      if (at == 0) load_query_scales(first / 4, sa), load_key_scales(first / 4, sb);
      std::uint32_t a[M][4], b[S::n_tiles][2];
      load_step(step, a, b);
      isa::mma_scaled<S::qk_product, M, S::n_tiles, at>(acc, a, b, sa, sb);
    });
  }

  /// Four scales of each row, where the product takes them: lanes t = 0 and 1 have rows g, g + 8.
  QATTN_DEVICE void load_query_scales(int word, std::uint32_t (&s)[M]) const {
    const int row = k.map.warp * S::warp_rows + k.map.lane / 4 + k.map.lane % 2 * 8;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      s[m] = S::qk_groups
                 ? isa::load_shared<std::uint32_t>(k.base + S::q_groups_at +
                                                   (row + 16 * m) * S::qk_group_bytes + 4 * word)
                 : unit_scales;
    }
  }
  QATTN_DEVICE void load_key_scales(int word, std::uint32_t (&s)[S::n_tiles]) const {
#pragma unroll
    for (int n = 0; n < S::n_tiles; ++n) {
      const int row = k.map.lane / 4 + 8 * n;
      s[n] = S::qk_groups ? isa::load_shared<std::uint32_t>(k.at_stage(S::k_groups_at) +
                                                            row * S::qk_group_bytes + 4 * word)
                          : unit_scales;
    }
  }

  // ---- smooth_q: what Q's means took from the scores ------------------------------------------

  /// Those of row r's mean and the keys of the tile. Blocks are multiples of eight.
  QATTN_DEVICE const float* row_means(int r, int tile) const {
    return mean_scores(k.p, k.work, mean_of(k.p, k.work, k.map.query_of(k.map.local_row(r))), tile);
  }

  /// The lane's scores of column tile n, of two neighbouring keys.
  QATTN_DEVICE int mean_key(int n) const {
    return K::lane_column(k.map.lane) + isa::column_of_tile<K>(n);
  }

  /// Products of codes with groups begin with them, in the same units.
  QATTN_DEVICE void begin_with_means(Products& acc, int tile) const {
    if (k.p.q_mean.scores == nullptr) return;
    static_assert(F::row_elements == 2 && K::element_column(1) == 1);
    constexpr int apart = S::ring ? R : 1;  // rows of a ring's warp share a mean
#pragma unroll
    for (int r = 0; r < R; r += apart) {
      const float* from = S::ring ? nullptr : row_means(r, tile);
#pragma unroll
      for (int n = 0; n < S::n_tiles; ++n) {
        isa::Words2 pair;
        if constexpr (S::ring) {
          pair = isa::load_shared<isa::Words2>(k.stage + k.means_at + 4 * mean_key(n));
        } else {
          pair = isa::load_global(reinterpret_cast<const isa::Words2*>(from + mean_key(n)));
        }
#pragma unroll
        for (int i = 0; i < 2 * apart; ++i) {
          k.map.element(acc, r + i / 2, n, i % 2) = formats::float_of(pair.w[i % 2]);
        }
      }
    }
  }
  /// A ring: where a stage has those of this warp, whose rows share a mean.
  QATTN_DEVICE void find_means() const {
    if (k.p.q_mean.scores == nullptr) return;
    const int before = mean_of(k.p, k.work, k.work.first_row + k.map.warp * S::warp_rows) -
                       mean_of(k.p, k.work, k.work.first_row);
    k.means_at = S::mean_at + before * 4 * S::keys;
  }

  /// All others add them.
  QATTN_DEVICE void add_query_mean(Scores& s, int tile) const {
    const float* from[R];
#pragma unroll
    for (int r = 0; r < R; ++r) from[r] = row_means(r, tile);
    tile::each_score<K>(s, [&](int r, int key, float& x) { x += isa::load_global(from[r] + key); });
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
