// What a warp of the mma.sync prefill kernels does with its rows in one tile of keys, however that
// came to shared memory.
#pragma once

#include "kernels/attention/mma/values.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <class S>
struct MmaRows : MmaValues<S> {
  using Base = MmaValues<S>;
  using Base::Base;
  using Base::R, Base::map, Base::p, Base::rules, Base::state;
  using typename Base::Scores;

  /// From products to scores.
  QATTN_DEVICE void scale_queries() {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      rules.row_scale[r] = rules.query_scale(map, r, state) * p.scale * tile::log2_e;
    }
  }

  /// Is there more to do to the tile's scores than to scale them?
  QATTN_DEVICE bool special(int tile, float k_scale) const {
    return S::general || !map.whole(tile) || this->has_bad_keys(tile, k_scale) ||
           this->value_flags() != 0;
  }
  /// Does that.
  QATTN_DEVICE void mend_scores(Scores& s, int tile, float k_scale) {
    const bool edge = !map.whole(tile);
    const bool bad_values = S::pv_16bit && (edge || p.mask.data != nullptr) && this->clean_values();
    if constexpr (S::general) {
      this->finish_scores(s, tile, bad_values);
    } else {
      this->mask_edge(s, tile, bad_values);
      if (this->has_bad_keys(tile, k_scale)) this->spoil_scores(s, tile);
    }
    if (this->value_flags() != 0) this->spoil_rows(s);
    if constexpr (S::e2m1_pv) GroupedValues<MmaValues<S>>{*this}.note_bad(s);
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
      this->attend_16bit(s, scale);
    } else if constexpr (S::u8) {
      this->attend_u8(s, scale);
    } else if constexpr (S::e2m1_pv) {
      GroupedValues<MmaValues<S>>{*this}.attend_e2m1(s, scale);
    } else if constexpr (S::pv_groups) {
      GroupedValues<MmaValues<S>>{*this}.attend_mxfp8(s, scale);
    } else {
      this->attend_e4m3(s, scale);
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

  /// The same of a warp without rows: its share of what all do. `cleans`: of clean_values(), too.
  QATTN_DEVICE void pass_tile(bool cleans) {
    if (S::pv_16bit && cleans) this->clean_values();
    if (S::u8 && this->value_flags() != 0) this->clear_bad_weights();
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
