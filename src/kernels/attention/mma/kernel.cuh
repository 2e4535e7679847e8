// Prefill attention by warps that own rows and multiply with mma.sync: the portable kernel, and
// that of GeForce Blackwell.
//
// A block owns some query rows of one head, each warp 16 or 32 of them, and walks the keys in tiles
// of 64 from last to first. V of a tile arrives under the product of Q and K, K of the next under
// softmax and the product with V; another block on the multiprocessor fills what is left. (With a
// ring it is otherwise: ring.cuh.) 32 rows a warp halve the reads of K and V from shared memory,
// which otherwise bind 8-bit products (an ldmatrix.x4 takes 4 clocks, two mma of 8 bits take 3.2).
//
// u8 P (int8_full) is scaled to the maximum of its own tile and row; products with V are exact in
// int32 and join O in float32 tile by tile. Row sums take P before rounding, by 1 / scale of the
// token of V (kernels/quantize/gpu/prepared.hpp).
//
// e4m3 P (int8_fp8, fp8) is relative to the running maximum, and 2^8 times that; the row sum of the
// rounded P comes from eight extra rows of V that hold those weights. P with scales of groups:
// grouped_values.cuh.
#pragma once

#include "kernels/attention/mma/values.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <class S>
struct MmaAttention : MmaValues<S> {
  using Params = AttentionParams;
  using F = typename S::Fragment;
  using Base = MmaValues<S>;
  using Base::M, Base::R, Base::base, Base::channels, Base::map, Base::output, Base::p,
      Base::rules, Base::state, Base::work;
  using typename Base::Scores;
  using Base::Base;

  // ---- The tiles ------------------------------------------------------------------------------

  /// The next tile at or below `tile` that the block mask does not forbid; negative: none is left.
  QATTN_DEVICE int visible_tile(int tile) const {
    if constexpr (S::general) {
      while (p.block_mask.data != nullptr && tile >= work.key_begin) {
        const std::int64_t at = work.b * p.block_mask.stride[0] +
                                work.head * p.block_mask.stride[1] +
                                work.first_row / p.block_mask_q * p.block_mask.stride[2] +
                                tile / p.block_mask_k * p.block_mask.stride[3];
        if (isa::load_global(static_cast<const std::uint8_t*>(p.block_mask.data) + at) != 0) break;
        tile -= S::keys;
      }
    }
    return tile < work.key_begin ? -1 : tile;
  }

  /// Is there more to do to the tile's scores than to scale them?
  QATTN_DEVICE bool special(int tile, float k_scale) const {
    return S::general || !map.whole(tile) || this->has_bad_keys(tile, k_scale) ||
           this->value_flags() != 0;
  }
  /// Does that.
  QATTN_DEVICE void mend_scores(Scores& s, int tile, float k_scale) {
    const bool edge = !map.whole(tile);
    const bool bad_values =
        S::pv_16bit && (edge || p.mask.data != nullptr) && this->clean_values();
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

  QATTN_DEVICE void start_next_keys(int next) {
    if (next >= 0) this->copies.start_keys(next);
    isa::copy_async_commit();
  }
  /// Before the product of Q and K: V of the tile starts.
  QATTN_DEVICE void start_tile(int tile, int next) {
    this->copies.start_values(tile);
    this->copies.start_key_scales(tile);
    isa::copy_async_commit();
    if constexpr (S::k_buffers == 2) {
      this->copies.k_buffer = S::Keys::bytes - this->copies.k_buffer;
      start_next_keys(next);
    }
  }
  /// Behind it: V is there, and nobody reads K any more.
  QATTN_DEVICE void await_values(int next) {
    isa::copy_async_wait<S::k_buffers - 1>();
    this->meet();
    if constexpr (S::k_buffers == 1) start_next_keys(next);
  }

  QATTN_DEVICE void run_tile(int tile, int next) {
    start_tile(tile, next);
    const float k_scale = this->key_scale(tile);
    Scores s;
    this->multiply_queries(s, tile);
    await_values(next);
    if constexpr (S::general) {
      if (!S::pv_16bit && p.v8.channel_scale != nullptr) channels = this->channel_scales(tile);
    }
    if (special(tile, k_scale)) {
      mend_scores(s, tile, k_scale);
      if constexpr (S::attends_twice) attend<true>(s, k_scale);
    } else {
      if constexpr (S::attends_twice) attend<false>(s, k_scale);
    }
    if constexpr (!S::attends_twice) attend<true>(s, k_scale);
  }

  /// The tiles of a warp without rows: its share of what all threads do.
  QATTN_DEVICE void pass_tiles(int tile) {
    while (tile >= 0) {
      const int next = visible_tile(tile - S::keys);
      isa::copy_async_wait<0>();
      this->meet();
      start_tile(tile, next);
      await_values(next);
      if (S::pv_16bit && (!map.whole(tile) || p.mask.data != nullptr)) this->clean_values();
      if (S::u8 && this->value_flags() != 0) this->clear_bad_weights();
      tile = next;
    }
  }

  QATTN_DEVICE void run_tiles() {
    const int none = work.key_end <= work.key_begin;
    int tile = none ? -1 : visible_tile((work.key_end - 1) / S::keys * S::keys);
    if (tile < 0) return;
    this->copies.set_sources();
    this->copies.start_queries();
    this->copies.start_keys(tile);
    isa::copy_async_commit();
    this->copies.clear_missing_channels();
    if (this->idle()) {
      pass_tiles(tile);
      tile = -1;
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      rules.row_scale[r] = rules.query_scale(map, r, state) * p.scale * tile::log2_e;
    }
    while (tile >= 0) {
      const int next = visible_tile(tile - S::keys);
      isa::copy_async_wait<0>();
      this->meet();  // K is there, and nobody reads V any more
      run_tile(tile, next);
      tile = next;
    }
    isa::copy_async_wait<0>();
  }

  // ---- Entry ----------------------------------------------------------------------------------

  /// Rows from `first` on of block `index` of `block_rows`.
  static QATTN_DEVICE void run_block(const Params& p, int index, int block_rows, int first) {
    WorkTile work = locate_work(p, index, block_rows, S::keys);
    work.first_row += first;
    if ((work.q.bad || work.k.bad) && isa::thread() == 0) {
      isa::atomic_or_global(p.error, tile::error_sequence);
    }
    if (work.first_row >= work.q.rows) return;
    MmaAttention self(p, work);
    self.run_tiles();
    if constexpr (S::qk_16bit && !S::general) {
      if (work.key_begin < work.key_end) self.check_operands();
    }
    if constexpr (S::scales_channels && !S::general) self.scale_channels();
    self.rules.take_offsets(self.map, self.state);
    isa::sync_threads();  // the rows leave through the same shared memory
    self.epilogue().write(self.base, work.split >= 0);
  }

  /// Did a warp of the Hopper kernel meet in block `index` what it cannot do?
  static QATTN_DEVICE bool has_fallback_flag(const Params& p, int index) {
    std::uint32_t any = 0;
#pragma unroll
    for (int w = 0; w < fallback_checkers + (S::qk_16bit ? 2 : 0); ++w) {
      any |= isa::load_global(p.fallback_flags + index * std::int64_t{fallback_stride} + w);
    }
    return any != 0;
  }

  /// All blocks of rows; with fallback_flags those that a warp of the Hopper kernel set. Both call
  /// run_block() here, because each call is a copy of the kernel: two were half of the general
  /// kernels' code, and more than half of their compilation.
  static QATTN_DEVICE void run_blocks(const Params& p) {
    const bool again = p.fallback_flags != nullptr;
    const int block_rows = again ? fallback_rows : S::rows;
    for (std::int64_t work = isa::block().x; work < p.work_tiles; work += isa::grid().x) {
      const int index = static_cast<int>(work);
      if (again && !has_fallback_flag(p, index)) continue;
      // Above 128 channels a tile has fewer rows than the block that the note is about.
      for (int first = 0; first < block_rows; first += S::rows) {
        isa::sync_threads();  // the rows before have left shared memory
        run_block(p, index, block_rows, first);
      }
    }
  }

  static QATTN_DEVICE void run(const Params& p) {
    if constexpr (S::general) {
      run_blocks(p);
    } else {
      run_block(p, isa::block().x, S::rows, 0);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
