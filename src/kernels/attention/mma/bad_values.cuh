// Values that are not numbers, for the mma.sync prefill kernels: which rows see them, and that only
// these become NaN.
#pragma once

#include "kernels/attention/common/check.cuh"
#include "kernels/attention/common/score.hpp"
#include "kernels/attention/mma/shape.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// What a tile, or Q, holds that is not a number. `Kernel`: MmaRows.
template <class Kernel>
struct MmaBadValues {
  using S = typename Kernel::Shape;
  using K = typename S::KeyFragment;
  using V = typename S::Values;
  using Scores = typename Kernel::Scores;
  static constexpr int M = Kernel::M, R = Kernel::R;

  Kernel& k;

  /// Is V's token at this key of the tile flagged by clean_values()?
  QATTN_DEVICE bool bad_value(int key) const {
    return isa::load_shared<std::uint32_t>(flag_address(key)) != 0;
  }
  QATTN_DEVICE SharedAddress flag_address(int key) const {
    if constexpr (S::ring) return k.marks + 4 * key;
    return V::place(k.at_stage(S::v_at), key, S::v_bytes);  // in the padding of V's row
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
    return k.p.k8.scale + prepared_row(k.p.k8, k.work.kv_head, k.work.k_slot + tile);
  }

  /// Does a key of the tile hold what is not a number? `scale`: key_scale().
  QATTN_DEVICE bool has_bad_keys(int tile, float scale) const {
    if constexpr (S::qk_groups) {
      const std::int64_t at =
          prepared_row(k.p.k8, k.work.kv_head, k.work.k_slot + tile) / slot_tile;
      return (isa::load_global(k.p.k8.flags + at) & tile_has_bad) != 0;
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

  /// Marks this warp's rows of Q that are not finite.
  QATTN_DEVICE void check_queries() const {
    bool bad = false;
    const int row = k.map.warp * S::warp_rows + k.map.lane % S::warp_rows;
#pragma unroll 4
    for (int c = 0; c < S::qk_bytes; c += 16) {
      const SharedAddress at = S::Queries::place(k.base + S::q_at, row, c);
      bad |= not_finite<S::qk>(isa::load_shared<isa::Words4>(at));
    }
    const std::uint32_t rows = isa::ballot(bad);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row_of_warp = k.map.local_row(r) - k.map.warp * S::warp_rows;
      k.state.bad_rows |= (rows >> row_of_warp & 1) != 0 ? 1u << r : 0u;
    }
  }

  /// This block's share of the tests of Q and K.
  QATTN_DEVICE void check_operands() const {
    check_queries();
    if (k.p.bad_keys == nullptr) return;
    KeyCheck<S::qk, S::qk_bytes, S::threads>{k.p, k.work, k.copies.k_source, isa::thread()}.run(
        S::rows);
  }

  /// 16-bit V: zeros in the place of tokens that hold NaN or Inf, and a flag in each row's padding.
  /// Needed only where some row must not see such a token. Returns whether there was one.
  QATTN_DEVICE bool clean_values() const {
    const SharedAddress any =
        S::ring ? flag_address(S::keys) : k.base + S::k_at + S::qk_bytes;  // in K's first padding
    if (isa::thread() < S::keys) isa::store_shared(flag_address(isa::thread()), 0u);
    if (isa::thread() == 0) isa::store_shared(any, 0u);
    k.meet();
    constexpr int chunks = S::v_bytes / 16;
    for (int n = isa::thread(); n < S::keys * chunks; n += S::threads) {
      const auto v =
          isa::load_shared<isa::Words4>(V::place(k.at_stage(S::v_at), n / chunks, n % chunks * 16));
      if (not_finite<S::pv>(v)) {
        isa::atomic_max_shared(flag_address(n / chunks), 1u);
        isa::atomic_max_shared(any, 1u);
      }
    }
    k.meet();
    if (isa::load_shared<std::uint32_t>(any) == 0) return false;
    for (int n = isa::thread(); n < S::keys * chunks; n += S::threads) {
      if (bad_value(n / chunks)) {
        isa::store_shared(V::place(k.at_stage(S::v_at), n / chunks, n % chunks * 16),
                          isa::Words4{});
      }
    }
    if constexpr (S::ring) isa::fence_async_proxy();  // TMA writes there next
    k.meet();
    return true;
  }

  /// TileFlags of the V tile in shared memory, as far as they matter here.
  QATTN_DEVICE std::uint32_t value_flags() const {
    if constexpr (S::pv_16bit) return 0;
    return isa::load_shared<std::uint32_t>(k.at_stage(S::tail_at) + 8 * S::keys) & tile_has_bad;
  }

  /// NaN in the place of what rows see of bad tokens of V: codes are zeros there, 1 / scale NaN.
  QATTN_DEVICE void spoil_rows(Scores& s) const {
    tile::each_score<K>(s, [&](int, int key, float& x) {
      if (x != -tile::infinity() && tile::is_nan(isa::load_shared<float>(weight_address(key)))) {
        x = tile::quiet_nan();
      }
    });
    if constexpr (S::u8) clear_bad_weights();
  }
  /// Where 1 / scale of a token of V is.
  QATTN_DEVICE SharedAddress weight_address(int key) const {
    return k.at_stage(S::tail_at) + 4 * (S::keys + key);
  }
  /// Zeros in the place of NaN, for rows that do not see such tokens.
  QATTN_DEVICE void clear_bad_weights() const {
    k.meet();  // all have seen the NaN
    if (isa::thread() < S::keys) {
      const SharedAddress at = weight_address(isa::thread());
      if (tile::is_nan(isa::load_shared<float>(at))) isa::store_shared(at, 0.0f);
    }
    if constexpr (S::ring) isa::fence_async_proxy();  // a bulk copy writes there next
    k.meet();
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
