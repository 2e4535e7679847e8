// What prefill kernels do to scores before the softmax.
#pragma once

#include "kernels/attention/rows/row_map.cuh"
#include "kernels/attention/rows/row_state.cuh"

namespace qattn::kernels {

inline namespace QATTN_TARGET {

/// The rules of a thread's rows. `S` gives Fragment, KeyFragment, m_tiles, warp_rows, n_tiles,
/// qk_16bit; masks_scores: apply_mask()'s OfScores; and staged_rows: has a producer put what
/// belongs to Q's rows into shared memory?
template <class S>
struct ScoreRules {
  using F = typename S::Fragment;
  using K = typename S::KeyFragment;  ///< of scores: the same, but for which column is which key
  static constexpr int M = S::m_tiles, R = F::rows * M;
  using Scores = float[M][S::n_tiles][F::elements];
  using Map = RowMap<S>;
  using State = RowState<S>;

  float row_scale[R];  ///< from a row's products to scores in units of log2: Q's scale and
                       ///< softmax_scale * log2 e
  /// Staged rows: this warp's part of Q's scales, and of q . mu.
  SharedAddress scales_at = 0, dots_at = 0;

  /// Are the numbers that belong to rows staged? Those of packed heads lie apart.
  QATTN_DEVICE static bool has_staged(const AttentionParams& p) {
    return S::staged_rows && p.pack_gqa == 1;
  }
  /// One that belongs to row r, which exists.
  template <bool Staged>
  QATTN_DEVICE static float row_fact(const Map& map, int r, const float* table,
                                     SharedAddress staged) {
    if constexpr (Staged) {
      return isa::load_shared<float>(staged + 4 * (map.local_row(r) - map.warp * S::warp_rows));
    } else {
      return isa::load_global(table +
                              prepared_row(map.p.q8, map.head(r), map.work.q_slot + map.query(r)));
    }
  }

  /// softmax_scale q . mu, what smooth_k took from every score of the row.
  QATTN_DEVICE float mean_dot(const Map& map, int r) const {
    if (!map.exists(r)) return 0.0f;
    const float* table = map.p.q8.dot_mean;
    return map.p.scale * (has_staged(map.p) ? row_fact<true>(map, r, table, dots_at)
                                            : row_fact<false>(map, r, table, dots_at));
  }

  /// Before write(), and before staged rows go.
  QATTN_DEVICE void take_offsets(const Map& map, State& state) const {
    if (map.p.q8.dot_mean == nullptr || map.p.softcap > 0) return;
#pragma unroll
    for (int r = 0; r < R; ++r) state.lse_offset[r] = mean_dot(map, r) * tile::log2_e;
  }

  /// Q's scale of the row, 1 for one that is bad (bad_rows) or does not exist.
  template <bool Staged = false>
  QATTN_DEVICE float query_scale(const Map& map, int r, State& state) const {
    if constexpr (S::qk_16bit) return 1.0f;
    if (!map.exists(r)) return 1.0f;
    const float s = row_fact<Staged>(map, r, map.p.q8.scale, scales_at);
    if (tile::is_nan(s)) state.bad_rows |= 1u << r;
    return tile::is_nan(s) ? 1.0f : s;
  }

  /// The bounds of a tile that not every row sees whole. `bad_value(key)`: V's token there turns
  /// the rows that see it into NaN.
  template <class BadValue>
  QATTN_DEVICE static void mask_edge(const Map& map, Scores& s, int tile, BadValue bad_value) {
    tile::ScoreRow rows[R];
#pragma unroll
    for (int r = 0; r < R; ++r) rows[r] = map.score_row(r);
    tile::each_score<K>(s, [&](int r, int key, float& x) {
      const bool visible = tile + key < rows[r].end;
      // An infinity of a 16-bit product must not look like a masked score.
      if (S::qk_16bit && x == -tile::infinity()) x = tile::quiet_nan();
      if (!visible) x = -tile::infinity();
      if (visible && bad_value(key)) x = tile::quiet_nan();
    });
  }

  /// Everything that may happen to a score; leaves units of log2. `key_scale(key)`: K's scale;
  /// `add(scores)`: what else belongs to them, in natural units.
  template <class KeyScale, class Add, class BadValue>
  QATTN_DEVICE void finish_scores(const Map& map, Scores& s, int tile, KeyScale key_scale, Add add,
                                  BadValue bad_value) const {
    const AttentionParams& p = map.p;
    tile::ScoreRow rows[R];
    float factor[R], offset[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      rows[r] = map.score_row(r);
      if (!map.exists(r)) rows[r].end = 0;  // masks have no row for it
      factor[r] = row_scale[r] * tile::ln_2;
      if (p.q8.dot_mean != nullptr) offset[r] = mean_dot(map, r);
    }
    tile::each_score<K>(s, [&](int r, int key, float& x) {
      x *= factor[r] * key_scale(key);
      if (!tile::is_finite(x)) x = tile::quiet_nan();
    });
    add(s);
    if (p.softcap > 0) {
      const float inverse = 1.0f / p.softcap;
      tile::each_score<K>(
          s, [&](int r, int, float& x) { x = tile::soft_cap(x + offset[r], p.softcap, inverse); });
    }
    if (p.alibi.data != nullptr) {
      float slope[R];
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const std::int64_t at = map.work.b * p.alibi.stride[0] + rows[r].head * p.alibi.stride[1];
        slope[r] = tile::load_number(p.alibi.data, p.alibi.format, at);
      }
      tile::each_score<K>(s, [&](int r, int key, float& x) {
        const float distance = fabsf(static_cast<float>(tile + key - rows[r].diagonal));
        x = tile::add_bias(x, tile::add_bias(-slope[r] * distance, 0.0f));
      });
    }
    if (p.mask.data != nullptr) {
      tile::apply_mask<K, S::masks_scores>(p.mask, map.work.b, rows, tile, s);
    }
    tile::each_score<K>(s, [&](int r, int key, float& x) {
      x = tile::squeeze(x) * tile::log2_e;
      const int j = tile + key;
      if (j < rows[r].begin || j >= rows[r].end) x = -tile::infinity();
      if (x != -tile::infinity() && bad_value(key)) x = tile::quiet_nan();
    });
  }

  /// Beyond this size of a row's scores, in units of log2, they leave too few bits for what u8 P
  /// adds to them, log2 of V's scales.
  static constexpr float far_score = 4096.0f;

  /// Takes what all scores of a row have in common where biases make that large: far[r], else 0.
  QATTN_DEVICE static void bring_near(const AttentionParams& p, Scores& s, float (&far)[R]) {
    if (p.mask.data == nullptr && p.alibi.data == nullptr) return;
    float top[R];
#pragma unroll
    for (int r = 0; r < R; ++r) top[r] = -tile::infinity();
    tile::each_score<K>(s, [&](int r, int, float& x) { top[r] = fmaxf(top[r], x); });
    isa::row_maxima<F>(top);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      far[r] = fabsf(top[r]) > far_score && top[r] != -tile::infinity() ? top[r] : 0.0f;
    }
    tile::each_score<K>(s, [&](int r, int, float& x) { x -= far[r]; });
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
