// What a warp of the mma.sync prefill kernels does with its rows in one tile of keys, however that
// came to shared memory.
#pragma once

#include "kernels/attention/mma/copies.cuh"
#include "kernels/attention/mma/grouped_values.cuh"
#include "kernels/attention/rows/epilogue.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Owns what a warp has of its rows, and of the tile in work.
template <class S>
struct MmaRows {
  using Shape = S;
  using F = typename S::Fragment;
  using Scores = typename ScoreRules<S>::Scores;
  static constexpr int M = S::m_tiles, R = F::rows * M, qk_steps = S::qk_bytes / 32;

  const AttentionParams& p;
  const WorkTile& work;
  RowMap<S> map;
  RegisterOutput<S> output;
  RowState<S> state;
  ScoreRules<S> rules;
  SharedAddress base = isa::shared_base();
  SharedAddress stage = base, marks = base;             ///< of a ring: where the tile's K and V are
  int means_at = 0;                                     ///< MmaProduct::find_means()
  std::uint32_t queries[S::ring ? qk_steps : 1][M][4];  ///< with a ring Q stays in registers
  TileCopies<S> copies{p, work, base};
  const float* channels = nullptr;     ///< V's scales of the tile, where they are per channel
  isa::Accumulator<S::pv> surplus[R];  ///< of u8 P times V, unless S::direct_sums

  QATTN_DEVICE MmaRows(const AttentionParams& params, const WorkTile& w)
      : p(params), work(w), map(params, w, isa::thread() / 32), state(params) {}

  QATTN_DEVICE MmaProduct<MmaRows> product() { return {*this}; }
  QATTN_DEVICE MmaBadValues<MmaRows> bad() { return {*this}; }
  QATTN_DEVICE MmaValues<MmaRows> values() { return {*this}; }
  QATTN_DEVICE GroupedValues<MmaRows> grouped() { return {*this}; }
  QATTN_DEVICE Epilogue<S> epilogue() { return {map, state, output}; }

  /// Of what lies so far behind the beginning of the tile's stage.
  QATTN_DEVICE SharedAddress at_stage(int offset) const {
    return (S::ring ? stage : base) + offset;
  }
  /// All warps that own rows, those without rows at other places of the code.
  QATTN_DEVICE static void meet() { isa::barrier_sync_anywhere(1, S::threads); }
  /// Does none of this warp's rows exist?
  QATTN_DEVICE bool idle() const { return map.query_of(map.warp * S::warp_rows) >= work.q.length; }

  /// The bounds of a tile that not every row sees whole. `bad_values`: flagged tokens of V turn the
  /// rows that see them into NaN.
  QATTN_DEVICE void mask_edge(Scores& s, int tile, bool bad_values) {
    rules.mask_edge(map, s, tile,
                    [&](int key) { return S::pv_16bit && bad_values && bad().bad_value(key); });
  }

  /// Everything that may happen to a score; leaves units of log2.
  QATTN_DEVICE void finish_scores(Scores& s, int tile, bool bad_values) {
    const auto key_scale = [&](int key) {
      return S::qk_16bit ? 1.0f : isa::load_shared<float>(base + S::k_scale_at + 4 * key);
    };
    const auto add = [&](Scores& scores) {
      if constexpr (!S::qk_16bit && !S::qk_groups) {
        if (p.q_mean.scores != nullptr) product().add_query_mean(scores, tile);
      }
    };
    rules.finish_scores(map, s, tile, key_scale, add,
                        [&](int key) { return S::pv_16bit && bad_values && bad().bad_value(key); });
  }

  /// From products to scores.
  QATTN_DEVICE void scale_queries() {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      rules.row_scale[r] = rules.query_scale(map, r, state) * p.scale * tile::log2_e;
    }
  }

  /// Is there more to do to the tile's scores than to scale them?
  QATTN_DEVICE bool special(int tile, float k_scale) {
    return S::general || !map.whole(tile) || bad().has_bad_keys(tile, k_scale) ||
           bad().value_flags() != 0;
  }
  /// Does that.
  QATTN_DEVICE void mend_scores(Scores& s, int tile, float k_scale) {
    const bool edge = !map.whole(tile);
    const bool bad_values = S::pv_16bit && (edge || p.mask.data != nullptr) && bad().clean_values();
    if constexpr (S::general) {
      finish_scores(s, tile, bad_values);
    } else {
      mask_edge(s, tile, bad_values);
      if (bad().has_bad_keys(tile, k_scale)) bad().spoil_scores(s, tile);
    }
    if (bad().value_flags() != 0) bad().spoil_rows(s);
    if constexpr (S::e2m1_pv) grouped().note_bad(s);
  }

  /// Softmax and product with V. `Mended`: mend_scores() may have been at work.
  template <bool Mended>
  QATTN_DEVICE void attend(Scores& s, float k_scale) {
    float scale[R];  // from what `s` holds to units of log2
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float scale_of_keys = Mended && tile::is_nan(k_scale) ? 1.0f : k_scale;
      scale[r] = S::general    ? 1.0f
                 : S::qk_16bit ? p.scale * tile::log2_e
                               : rules.row_scale[r] * scale_of_keys;
      // Of rows and keys that are zeros the product may be: masked scores are -Inf, and stay it.
      if constexpr (Mended && !S::general && !S::qk_16bit) scale[r] = fmaxf(scale[r], 0x1p-126f);
    }
    if constexpr (S::pv_16bit) {
      values().attend_16bit(s, scale);
    } else if constexpr (S::u8) {
      values().attend_u8(s, scale);
    } else if constexpr (S::e2m1_pv) {
      grouped().attend_e2m1(s, scale);
    } else if constexpr (S::pv_groups) {
      grouped().attend_mxfp8(s, scale);
    } else {
      values().attend_e4m3(s, scale);
    }
  }

  /// Everything but the product of Q and K.
  QATTN_DEVICE void attend_tile(Scores& s, int tile, float k_scale) {
    if (special(tile, k_scale)) {
      mend_scores(s, tile, k_scale);
      if constexpr (S::attends_twice) attend<true>(s, k_scale);
    } else {
      if constexpr (S::attends_twice) attend<false>(s, k_scale);
    }
    if constexpr (!S::attends_twice) attend<true>(s, k_scale);
  }

  /// The same of a warp without rows: its share of what all do. `cleans`: of bad().clean_values(),
  /// too.
  QATTN_DEVICE void pass_tile(bool cleans) {
    if (S::pv_16bit && cleans) bad().clean_values();
    if (S::u8 && bad().value_flags() != 0) bad().clear_bad_weights();
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
