// What prefill kernels do to scores before the softmax, and its state. How rows end: epilogue.cuh.
#pragma once

#include "kernels/attention/common/row_map.cuh"

namespace qattn::kernels {

inline constexpr float log2_255 = 7.99435343685885793f;

inline namespace QATTN_TARGET {

/// `S` gives Fragment, KeyFragment, rows, keys, dv, m_tiles, warp_rows, n_tiles, d_tiles,
/// out_channels, out_row, p_log2, qk_16bit, pv_16bit, u8, tile_p: is P relative to its own tile?
/// whole_references: is it to powers of two, which seldom move, and update_max() has the choice?
/// does_blocks_again: may it be asked for what Hopper's kernel has left?
/// direct_sums: is P V of u8 in units of 2^-149? two_row_ends: is there a quick way to end usual
/// rows? divides: by a division? masks_scores: apply_mask()'s OfScores; and staged_rows: has a
/// producer put what belongs to Q's rows into shared memory?
template <class S>
struct AttentionRows {
  using F = typename S::Fragment;
  using K = typename S::KeyFragment;  ///< of scores: the same, but for which column is which key
  static constexpr int M = S::m_tiles, R = F::rows * M;
  using Scores = float[M][S::n_tiles][F::elements];

  const AttentionParams& p;
  const WorkTile& work;
  RowMap<S> map;
  float out[M][S::d_tiles][F::elements] = {};
  float max[R], sum[R] = {};
  float excess[R] = {};      ///< add_excess()
  float exact[R] = {};       ///< Hopper: the same of P before rounding, times value_unit
  float peak[R];             ///< whole references: this lane's largest exponent of P
  float row_scale[R];        ///< from a row's products to scores in units of log2: Q's scale and
                             ///< softmax_scale * log2 e
  float lse_offset[R] = {};  ///< what smooth_k took from all scores, in units of log2
  /// Staged rows: this warp's part of Q's scales, and of q . mu.
  SharedAddress scales_at = 0, dots_at = 0;
  unsigned bad_rows = 0;  ///< bit r: row r of this thread is NaN
  /// 16-bit V: a row has met NaN or Inf there, and may not have seen it.
  bool needs_fallback = false;

  QATTN_DEVICE AttentionRows(const AttentionParams& params, const WorkTile& w, int row_warp)
      : p(params), work(w), map(params, w, row_warp) {
#pragma unroll
    for (int r = 0; r < R; ++r) max[r] = unseen, peak[r] = -tile::infinity();
  }

  // ---- Scores ---------------------------------------------------------------------------------

  /// Are the numbers that belong to rows staged? Those of packed heads lie apart.
  QATTN_DEVICE bool has_staged() const { return S::staged_rows && p.pack_gqa == 1; }
  /// One that belongs to row r, which exists.
  template <bool Staged>
  QATTN_DEVICE float row_fact(int r, const float* table, SharedAddress staged) const {
    if constexpr (Staged) {
      return isa::load_shared<float>(staged + 4 * (map.local_row(r) - map.warp * S::warp_rows));
    } else {
      return isa::load_global(table + prepared_row(p.q8, map.head(r), work.q_slot + map.query(r)));
    }
  }

  /// softmax_scale q . mu, what smooth_k took from every score of the row.
  QATTN_DEVICE float mean_dot(int r) const {
    if (!map.exists(r)) return 0.0f;
    return p.scale * (has_staged() ? row_fact<true>(r, p.q8.dot_mean, dots_at)
                                   : row_fact<false>(r, p.q8.dot_mean, dots_at));
  }

  /// Before write(), and before staged rows go.
  QATTN_DEVICE void take_offsets() {
    if (p.q8.dot_mean == nullptr || p.softcap > 0) return;
#pragma unroll
    for (int r = 0; r < R; ++r) lse_offset[r] = mean_dot(r) * tile::log2_e;
  }

  /// Q's scale of the row, 1 for one that is bad (bad_rows) or does not exist.
  template <bool Staged = false>
  QATTN_DEVICE float query_scale(int r) {
    if constexpr (S::qk_16bit) return 1.0f;
    if (!map.exists(r)) return 1.0f;
    const float s = row_fact<Staged>(r, p.q8.scale, scales_at);
    if (tile::is_nan(s)) bad_rows |= 1u << r;
    return tile::is_nan(s) ? 1.0f : s;
  }

  /// The bounds of a tile that not every row sees whole. `bad_value(key)`: V's token there turns
  /// the rows that see it into NaN.
  template <class BadValue>
  QATTN_DEVICE void mask_edge(Scores& s, int tile, BadValue bad_value) {
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
  QATTN_DEVICE void finish_scores(Scores& s, int tile, KeyScale key_scale, Add add,
                                  BadValue bad_value) {
    tile::ScoreRow rows[R];
    float factor[R], offset[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      rows[r] = map.score_row(r);
      if (!map.exists(r)) rows[r].end = 0;  // masks have no row for it
      factor[r] = row_scale[r] * tile::ln_2;
      if (p.q8.dot_mean != nullptr) offset[r] = mean_dot(r);
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
        slope[r] = tile::load_number(p.alibi.data, p.alibi.format,
                                     work.b * p.alibi.stride[0] + rows[r].head * p.alibi.stride[1]);
      }
      tile::each_score<K>(s, [&](int r, int key, float& x) {
        const float distance = fabsf(static_cast<float>(tile + key - rows[r].diagonal));
        x = tile::add_bias(x, tile::add_bias(-slope[r] * distance, 0.0f));
      });
    }
    if (p.mask.data != nullptr) {
      tile::apply_mask<K, S::masks_scores>(p.mask, work.b, rows, tile, s);
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
  QATTN_DEVICE void bring_near(Scores& s, float (&far)[R]) const {
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

  // ---- Softmax --------------------------------------------------------------------------------

  /// Tokens of a tile of zeros join the sums as if V's scale were 2^-90, times the slack: 2^98.
  static constexpr float slack = S::tile_p || S::whole_references ? 8.0f : 0.0f;
  /// Does it do blocks again that Hopper's kernel has left? Then P rounds as there, relative to the
  /// maximum: what made it leave them must not show in their other rows.
  QATTN_DEVICE bool refers_to_maximum() const {
    if constexpr (!S::whole_references) {
      return true;
    } else if constexpr (S::does_blocks_again) {
      return p.fallback_flags != nullptr;
    } else {
      return false;
    }
  }
  QATTN_DEVICE float reach() const {
    return S::whole_references && refers_to_maximum() ? 0.0f : slack;
  }
  /// The reference for rows that reach `top`. To powers of two floats round alike: which of them it
  /// is, does not matter.
  QATTN_DEVICE float reference_for(float top) const {
    return refers_to_maximum() ? top : ceilf(top);
  }

  /// The reference before a key was seen. Powers of two are subtracted as they are: it lies below
  /// all scores, but lets those that are masked be 0.
  static constexpr float unseen = S::whole_references ? -0x1p127f : -__builtin_huge_valf();

  /// Takes the tile's maxima into the references; what was accumulated shrinks accordingly. Where P
  /// is relative to its own tile, or to powers of two, any reference serves that keeps exponentials
  /// in range: it moves only when a maximum is far above it, which is rare.
  QATTN_DEVICE void update_max(const float (&top)[R]) {
    float rescale[R];
    bool changed = false;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float next = top[r] > max[r] + reach() ? reference_for(top[r]) : max[r];
      rescale[r] = max[r] == unseen ? 0.0f : isa::exp2(max[r] - next);
      // Nothing has joined the output before the first reference.
      changed |= next != max[r] && max[r] != unseen;
      max[r] = next;
      sum[r] *= rescale[r];
      if constexpr (S::u8) excess[r] *= rescale[r], exact[r] *= rescale[r];
    }
    if (!isa::any(changed)) return;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
        for (int i = 0; i < F::elements; ++i) {
          out[m][n][i] *= rescale[F::rows * m + isa::row_of_element<F>(i)];
        }
      }
    }
  }

  /// Takes a tile's largest exponents of P, to the bit what P itself is made of, from the lanes'
  /// own scores `top`, times `scale`. They ask one another for maxima only when a reference has to
  /// move: beside the key that moves it older exponents are forgotten.
  QATTN_DEVICE void take_peaks(const float (&top)[R], const float (&scale)[R]) {
    float near[R];
    bool above = false;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      near[r] = fmaf(top[r], scale[r], -max[r]);
      above |= near[r] > reach();
    }
    if (isa::any(above)) {
      float row_top[R], before[R];
#pragma unroll
      for (int r = 0; r < R; ++r) row_top[r] = top[r] * scale[r], before[r] = max[r];
      isa::row_maxima<F>(row_top);
      update_max(row_top);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (max[r] != before[r]) peak[r] = -tile::infinity();
        near[r] = fmaf(top[r], scale[r], -max[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) peak[r] = fmaxf(peak[r], near[r]);
  }

  /// The reference that is subtracted in exponents: 0 where nothing was seen, so that masked scores
  /// give 0 and not NaN.
  QATTN_DEVICE static float reference(float top) { return top == -tile::infinity() ? 0.0f : top; }

  /// update_max() after bring_near(): maxima of far rows leave V's scales out, which they have no
  /// bits for. `ref`: what is subtracted in exponents of near scores.
  QATTN_DEVICE void update_far_max(const float (&top)[R], const float (&far)[R], float (&ref)[R]) {
    float raised[R];
#pragma unroll
    for (int r = 0; r < R; ++r) raised[r] = far[r] != 0.0f ? far[r] : top[r];
    update_max(raised);
#pragma unroll
    for (int r = 0; r < R; ++r) ref[r] = reference(max[r]) - far[r];
  }

  // ---- u8 P times V ---------------------------------------------------------------------------

  // V's codes are 128 too large (PreparedTiles), so that products with P are never negative, and
  // those of 128 keys stay below 2^23. Such an int32 is a float as it lies there, of 2^-149 for
  // each 1, and joins the output without a conversion, which are scarce: a multiprocessor of
  // Hopper makes 64 a clock, 34 beside products (H200). The output is in other units then, and
  // holds an excess for the 128; rows end without either.

  /// What the matrix unit left, in units of 2^-149.
  QATTN_DEVICE static float as_float(std::int32_t product) {
    static_assert(S::keys * 255 * 255 < 1 << 24);
    return __builtin_bit_cast(float, product);
  }
  /// What a tile's weight is multiplied with to join P V, and what the output then with.
  static constexpr float share_unit = 0x1p90f, value_unit = 0x1p59f;

  /// What the 128 add to each channel, the part of this lane. `count`: its sums of a tile's P;
  /// `share`: the tile's weight, times share_unit. (With the sums of all four lanes a channel of
  /// zeros would end as exactly 0; their shuffles cost 5 % at D 64, 1 % at D 128, H200.)
  QATTN_DEVICE void add_excess(const std::uint32_t (&count)[R], const float (&share)[R]) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      excess[r] = fmaf(as_float(static_cast<std::int32_t>(count[r])), share[r], excess[r]);
    }
  }
  /// Takes that off, where rows are not ended.
  QATTN_DEVICE void end_values() {
    isa::add_rows<F>(excess);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float less = excess[r] * (-value_offset * value_unit);
#pragma unroll
      for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
        for (int e = 0; e < F::row_elements; ++e) {
          float& x = map.element(out, r, n, e);
          x = fmaf(x, value_unit, less);
        }
      }
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
