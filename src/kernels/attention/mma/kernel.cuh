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
// token of V (kernels/operand/prepared.hpp).
//
// e4m3 P (int8_fp8, fp8) is relative to the running maximum, and 2^8 times that; the row sum of the
// rounded P comes from eight extra rows of V that hold those weights. P with scales of groups:
// grouped_values.cuh.
#pragma once

#include "kernels/attention/mma/rows.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <class S>
struct MmaAttention {
  using Params = AttentionParams;

  const Params& p;
  const WorkTile& work;
  MmaRows<S> rows{p, work};

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

  QATTN_DEVICE void start_next_keys(int next) {
    if (next >= 0) rows.copies.start_keys(next);
    isa::copy_async_commit();
  }
  /// Before the product of Q and K: V of the tile starts.
  QATTN_DEVICE void start_tile(int tile, int next) {
    rows.copies.start_values(tile);
    rows.copies.start_key_scales(tile);
    isa::copy_async_commit();
    if constexpr (S::k_buffers == 2) {
      rows.copies.k_buffer = S::Keys::bytes - rows.copies.k_buffer;
      start_next_keys(next);
    }
  }
  /// Behind it: V is there, and nobody reads K any more.
  QATTN_DEVICE void await_values(int next) {
    isa::copy_async_wait<S::k_buffers - 1>();
    rows.meet();
    if constexpr (S::k_buffers == 1) start_next_keys(next);
  }

  QATTN_DEVICE void run_tile(int tile, int next) {
    start_tile(tile, next);
    const float k_scale = rows.bad().key_scale(tile);
    typename MmaRows<S>::Scores s;
    rows.product().multiply_queries(s, tile);
    await_values(next);
    if constexpr (S::general) {
      if (!S::pv_16bit && p.v8.channel_scale != nullptr)
        rows.channels = rows.values().channel_scales(tile);
    }
    rows.attend_tile(s, tile, k_scale);
  }

  /// The tiles of a warp without rows: its share of what all threads do.
  QATTN_DEVICE void pass_tiles(int tile) {
    while (tile >= 0) {
      const int next = visible_tile(tile - S::keys);
      isa::copy_async_wait<0>();
      rows.meet();
      start_tile(tile, next);
      await_values(next);
      rows.pass_tile(!rows.map.whole(tile) || p.mask.data != nullptr);
      tile = next;
    }
  }

  QATTN_DEVICE void run_tiles() {
    const int none = work.key_end <= work.key_begin;
    int tile = none ? -1 : visible_tile((work.key_end - 1) / S::keys * S::keys);
    if (tile < 0) return;
    rows.copies.set_sources();
    rows.copies.start_queries();
    rows.copies.start_keys(tile);
    isa::copy_async_commit();
    rows.copies.clear_missing_channels();
    if (rows.idle()) {
      pass_tiles(tile);
      tile = -1;
    }
    rows.scale_queries();
    while (tile >= 0) {
      const int next = visible_tile(tile - S::keys);
      isa::copy_async_wait<0>();
      rows.meet();  // K is there, and nobody reads V any more
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
    MmaAttention self{p, work};
    self.run_tiles();
    MmaRows<S>& rows = self.rows;
    if constexpr (S::qk_16bit && !S::general) {
      if (work.key_begin < work.key_end) rows.bad().check_operands();
    }
    if constexpr (S::scales_channels && !S::general) rows.values().scale_channels();
    rows.rules.take_offsets(rows.map, rows.state);
    isa::sync_threads();  // the rows leave through the same shared memory
    rows.epilogue().write(rows.base, work.split >= 0);
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
