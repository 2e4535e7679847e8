// First half of the mma.sync prefill kernel (kernel.cuh): the product of Q and K, and what happens
// to scores before the softmax.
#pragma once

#include <utility>

#include "kernels/attention/common/check.cuh"
#include "kernels/attention/common/row_parts.cuh"
#include "kernels/attention/mma/copies.cuh"
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

template <class S>
struct MmaScores : RowParts<S> {
  using F = typename S::Fragment;
  using K = typename S::KeyFragment;
  using V = typename S::Values;
  using Base = RowParts<S>;
  using Base::M, Base::R, Base::map, Base::output, Base::p, Base::state, Base::work;
  using typename Base::Scores;

  SharedAddress base = isa::shared_base();
  SharedAddress stage = base, marks = base;  ///< of a ring: where the tile's K and V are
  int means_at = 0;  ///< find_means()
  static constexpr int qk_steps = S::qk_bytes / 32;
  std::uint32_t queries[S::ring ? qk_steps : 1][M][4];  ///< with a ring Q stays in registers
  TileCopies<S> copies{Base::p, Base::work, base};

  QATTN_DEVICE MmaScores(const AttentionParams& params, const WorkTile& w)
      : Base(params, w, isa::thread() / 32) {}

  /// Of what lies so far behind the beginning of the tile's stage.
  QATTN_DEVICE SharedAddress at_stage(int offset) const {
    return (S::ring ? stage : base) + offset;
  }

  /// All warps that own rows, those without rows at other places of the code (pass_tiles()).
  QATTN_DEVICE static void meet() { isa::barrier_sync_anywhere(1, S::threads); }

  /// Does none of this warp's rows exist?
  QATTN_DEVICE bool idle() const {
    return map.query_of(map.warp * S::warp_rows) >= work.q.length;
  }

  // ---- Product of Q and K ---------------------------------------------------------------------

  using Products = isa::Accumulator<S::qk>[M][S::n_tiles][4];

  QATTN_DEVICE void multiply_queries(Scores& scores, int tile) {
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
    return S::k_at + (S::k_buffers == 2 ? S::Keys::bytes - copies.k_buffer : 0);
  }

  /// 32 bytes of each row, as A and B operands.
  QATTN_DEVICE void load_step(int step, std::uint32_t (&a)[M][4],
                              std::uint32_t (&b)[S::n_tiles][2]) const {
    using Keys = typename S::Keys;
    const SharedAddress k =
        Keys::place(at_stage(k_at()), map.lane % 8 + map.lane / 16 * 8, map.lane / 8 % 2 * 16);
    std::uint32_t pair[S::n_tiles / 2][4];
    SharedAddress b_row[S::n_tiles / 2];
#pragma unroll
    for (int n = 0; n < S::n_tiles / 2; ++n) {
      b_row[n] = Keys::along(k + n * 16 * Keys::stride, step * 32);
    }
    if constexpr (S::ring) {
#pragma unroll
      for (int i = 0; i < 4 * M; ++i) a[i / 4][i % 4] = queries[step][i / 4][i % 4];
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
    const int row = map.warp * S::warp_rows + map.lane % 16;
    const SharedAddress q = Q::place(base + S::q_at, row, map.lane / 16 * 16);
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
    const int row = map.warp * S::warp_rows + map.lane / 4 + map.lane % 2 * 8;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      s[m] = S::qk_groups ? isa::load_shared<std::uint32_t>(
                                base + S::q_groups_at + (row + 16 * m) * S::qk_group_bytes +
                                4 * word)
                          : unit_scales;
    }
  }
  QATTN_DEVICE void load_key_scales(int word, std::uint32_t (&s)[S::n_tiles]) const {
#pragma unroll
    for (int n = 0; n < S::n_tiles; ++n) {
      const int row = map.lane / 4 + 8 * n;
      s[n] = S::qk_groups ? isa::load_shared<std::uint32_t>(at_stage(S::k_groups_at) +
                                                            row * S::qk_group_bytes + 4 * word)
                          : unit_scales;
    }
  }

  // ---- From scores to units of log2 -----------------------------------------------------------

  /// Is V's token at this key of the tile flagged by clean_values()?
  QATTN_DEVICE bool bad_value(int key) const {
    return isa::load_shared<std::uint32_t>(flag_address(key)) != 0;
  }
  QATTN_DEVICE SharedAddress flag_address(int key) const {
    if constexpr (S::ring) return marks + 4 * key;
    return V::place(at_stage(S::v_at), key, S::v_bytes);  // in the padding of V's row
  }

  /// The bounds of a tile that not every row sees whole. `bad_values`: flagged tokens of V turn the
  /// rows that see them into NaN.
  QATTN_DEVICE void mask_edge(Scores& s, int tile, bool bad_values) {
    this->rules.mask_edge(map, s, tile, [&](int key) {
      return S::pv_16bit && bad_values && bad_value(key);
    });
  }

  /// Everything that may happen to a score; leaves units of log2.
  QATTN_DEVICE void finish_scores(Scores& s, int tile, bool bad_values) {
    const auto key_scale = [&](int key) {
      return S::qk_16bit ? 1.0f : isa::load_shared<float>(base + S::k_scale_at + 4 * key);
    };
    const auto add = [&](Scores& scores) {
      if constexpr (!S::qk_16bit && !S::qk_groups) {
        if (p.q_mean.scores != nullptr) add_query_mean(scores, tile);
      }
    };
    this->rules.finish_scores(map, s, tile, key_scale, add,
                              [&](int key) { return S::pv_16bit && bad_values && bad_value(key); });
  }

  // ---- smooth_q: what Q's means took from the scores ------------------------------------------

  /// Those of row r's mean and the keys of the tile. Blocks are multiples of eight.
  QATTN_DEVICE const float* row_means(int r, int tile) const {
    return mean_scores(p, work, mean_of(p, work, map.query_of(map.local_row(r))), tile);
  }

  /// The lane's scores of column tile n, of two neighbouring keys.
  QATTN_DEVICE int mean_key(int n) const {
    return K::lane_column(map.lane) + isa::column_of_tile<K>(n);
  }

  /// Products of codes with groups begin with them, in the same units.
  QATTN_DEVICE void begin_with_means(Products& acc, int tile) const {
    if (p.q_mean.scores == nullptr) return;
    static_assert(F::row_elements == 2 && K::element_column(1) == 1);
    constexpr int apart = S::ring ? R : 1;  // rows of a ring's warp share a mean
#pragma unroll
    for (int r = 0; r < R; r += apart) {
      const float* from = S::ring ? nullptr : row_means(r, tile);
#pragma unroll
      for (int n = 0; n < S::n_tiles; ++n) {
        isa::Words2 pair;
        if constexpr (S::ring) {
          pair = isa::load_shared<isa::Words2>(stage + means_at + 4 * mean_key(n));
        } else {
          pair = isa::load_global(reinterpret_cast<const isa::Words2*>(from + mean_key(n)));
        }
#pragma unroll
        for (int i = 0; i < 2 * apart; ++i) {
          map.element(acc, r + i / 2, n, i % 2) = formats::float_of(pair.w[i % 2]);
        }
      }
    }
  }
  /// A ring: where a stage has those of this warp, whose rows share a mean.
  QATTN_DEVICE void find_means() {
    if (p.q_mean.scores == nullptr) return;
    const int before = mean_of(p, work, work.first_row + map.warp * S::warp_rows) -
                       mean_of(p, work, work.first_row);
    means_at = S::mean_at + before * 4 * S::keys;
  }

  /// All others add them.
  QATTN_DEVICE void add_query_mean(Scores& s, int tile) const {
    const float* from[R];
#pragma unroll
    for (int r = 0; r < R; ++r) from[r] = row_means(r, tile);
    tile::each_score<K>(s, [&](int r, int key, float& x) {
      x += isa::load_global(from[r] + key);
    });
  }

  /// One K scale for the whole tile (plain variant).
  QATTN_DEVICE float key_scale(int tile) const {
    if constexpr (S::qk_16bit || S::general) return 1.0f;
    float scale = isa::load_global(key_scales(tile));
    if constexpr (S::qk_groups) {  // the sequence's, which bad tokens do not have
      for (int n = 1; n < S::keys && tile::is_nan(scale); ++n) {
        scale = isa::load_global(key_scales(tile) + n);
      }
    }
    return scale;
  }
  QATTN_DEVICE const float* key_scales(int tile) const {
    return p.k8.scale + prepared_row(p.k8, work.kv_head, work.k_slot + tile);
  }

  /// Does a key of the tile hold what is not a number? `scale`: key_scale().
  QATTN_DEVICE bool has_bad_keys(int tile, float scale) const {
    if constexpr (S::qk_groups) {
      const std::int64_t at = prepared_row(p.k8, work.kv_head, work.k_slot + tile) / slot_tile;
      return (isa::load_global(p.k8.flags + at) & tile_has_bad) != 0;
    }
    return tile::is_nan(scale);
  }
  /// NaN in the place of what rows see of such keys: where keys share a scale, of all.
  QATTN_DEVICE void spoil_scores(Scores& s, int tile) const {
    tile::each_score<K>(s, [&](int, int key, float& x) {
      const bool bad = !S::qk_groups || tile::is_nan(isa::load_global(key_scales(tile) + key));
      x = x == -tile::infinity() || !bad ? x : tile::quiet_nan();
    });
  }

  // ---- Values that are not numbers ------------------------------------------------------------

  /// Marks this warp's rows of Q that are not finite.
  QATTN_DEVICE void check_queries() {
    bool bad = false;
    const int row = map.warp * S::warp_rows + map.lane % S::warp_rows;
#pragma unroll 4
    for (int c = 0; c < S::qk_bytes; c += 16) {
      const SharedAddress at = S::Queries::place(base + S::q_at, row, c);
      bad |= not_finite<S::qk>(isa::load_shared<isa::Words4>(at));
    }
    const std::uint32_t rows = isa::ballot(bad);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row_of_warp = map.local_row(r) - map.warp * S::warp_rows;
      state.bad_rows |= (rows >> row_of_warp & 1) != 0 ? 1u << r : 0u;
    }
  }

  /// This block's share of the tests of Q and K.
  QATTN_DEVICE void check_operands() {
    check_queries();
    if (p.bad_keys == nullptr) return;
    KeyCheck<S::qk, S::qk_bytes, S::threads>{p, work, copies.k_source, isa::thread()}.run(S::rows);
  }

  /// 16-bit V: zeros in the place of tokens that hold NaN or Inf, and a flag in each row's padding.
  /// Needed only where some row must not see such a token. Returns whether there was one.
  QATTN_DEVICE bool clean_values() {
    const SharedAddress any = S::ring ? flag_address(S::keys)
                                      : base + S::k_at + S::qk_bytes;  // in K's first padding
    if (isa::thread() < S::keys) isa::store_shared(flag_address(isa::thread()), 0u);
    if (isa::thread() == 0) isa::store_shared(any, 0u);
    meet();
    constexpr int chunks = S::v_bytes / 16;
    for (int n = isa::thread(); n < S::keys * chunks; n += S::threads) {
      const auto v =
          isa::load_shared<isa::Words4>(V::place(at_stage(S::v_at), n / chunks, n % chunks * 16));
      if (not_finite<S::pv>(v)) {
        isa::atomic_max_shared(flag_address(n / chunks), 1u);
        isa::atomic_max_shared(any, 1u);
      }
    }
    meet();
    if (isa::load_shared<std::uint32_t>(any) == 0) return false;
    for (int n = isa::thread(); n < S::keys * chunks; n += S::threads) {
      if (bad_value(n / chunks)) {
        isa::store_shared(V::place(at_stage(S::v_at), n / chunks, n % chunks * 16), isa::Words4{});
      }
    }
    if constexpr (S::ring) isa::fence_async_proxy();  // TMA writes there next
    meet();
    return true;
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
