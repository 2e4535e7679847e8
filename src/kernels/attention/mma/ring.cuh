// The mma.sync prefill kernel whose K and V come by TMA.
//
// A thread beside the warps that own rows fills a ring of stages, each with K and V of a tile. Who
// owns rows waits for K, multiplies, gives K's place back, waits for V, and so on: no barrier holds
// the warps together, so that the softmax of one runs under the products of another. They meet
// where one of them changes what all read (clean_values(), clear_bad_weights()): in tiles that not
// every row sees whole, which all warps take for that, and in tiles with bad tokens. Q comes by
// cp.async of all of them, once, to the last stage's place, and stays in registers.
#pragma once

#include "kernels/attention/common/ring.hpp"
#include "kernels/attention/mma/ring_params.hpp"
#include "kernels/attention/mma/rows.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// The first tile that is attended to; negative: there is none.
template <class S>
QATTN_DEVICE int last_tile(const WorkTile& work) {
  return work.key_end <= work.key_begin ? -1 : (work.key_end - 1) / S::keys * S::keys;
}

/// A stage, and its barriers.
template <class S>
struct RingStage : RingPlace<S::stages> {
  SharedAddress base = isa::shared_base();

  QATTN_DEVICE SharedAddress data() const { return base + this->stage * S::stage_bytes; }
  QATTN_DEVICE SharedAddress marks() const {
    return base + S::marks_at + this->stage * S::mark_bytes;
  }
  QATTN_DEVICE SharedAddress barrier(int first) const { return base + first + 8 * this->stage; }

  /// Until what the barriers from `first` on tell is so. Stages begin empty, but for the last,
  /// which holds Q first.
  QATTN_DEVICE void await_full(int first) const {
    isa::mbarrier_wait(barrier(first), this->parity);
  }
  QATTN_DEVICE void await_empty(int first) const {
    const std::uint32_t begins_full = this->stage == S::stages - 1;
    isa::mbarrier_wait(barrier(first), this->parity ^ begins_full ^ 1);
  }
  /// A warp reads it no more.
  QATTN_DEVICE void release(int first) const {
    isa::sync_warp();
    if (isa::lane() == 0) isa::mbarrier_arrive(barrier(first));
  }
  /// Q neither.
  QATTN_DEVICE void release_queries() const {
    RingStage last = *this;
    last.stage = S::stages - 1;
    isa::fence_async_proxy();  // TMA writes there next
    last.release(S::k_empty);
    last.release(S::v_empty);
  }
};

/// Who fills the ring.
template <class S>
struct RingProducer {
  const RingParams& p;
  const WorkTile& work;
  RingStage<S> to = {};

  static constexpr int width = S::qk_16bit ? 2 : 1;  ///< bytes of an element of K

  /// 64 rows of an operand in place, in panels.
  template <class Rows>
  QATTN_DEVICE void load_rows(SharedAddress at, const isa::TensorMap& map, int element_bytes,
                              int token, int batch, SharedAddress full) const {
#pragma unroll
    for (int n = 0; n < Rows::panels; ++n) {
      isa::tma_load<4>(at + n * Rows::panel_bytes, map,
                       {n * Rows::panel / element_bytes, token, work.kv_head, batch}, full);
    }
  }
  /// Where a token lies in a tensor's map.
  QATTN_DEVICE int token(int tile) const { return static_cast<int>(work.k.begin) + tile; }
  QATTN_DEVICE int batch(const tile::Rows& x) const { return x.cu_seqlens != nullptr ? 0 : work.b; }
  /// The first of a tile's slots in all prepared rows.
  QATTN_DEVICE std::int64_t slot(int tile, std::int64_t slots) const {
    return work.kv_head * slots + work.k_slot + tile;
  }

  QATTN_DEVICE void load_keys(int tile) const {
    constexpr int group_bytes = S::keys * S::qk_group_bytes;
    const SharedAddress full = to.barrier(S::k_full);
    const int means = S::qk_groups && p.q_mean.scores != nullptr ? mean_count() : 0;
    isa::mbarrier_arrive_expect(full, S::Keys::bytes + group_bytes + means * 4 * S::keys);
    const bool prepared = p.k.data == nullptr;
    load_rows<typename S::Keys>(to.data() + S::k_at, p.k_map, width,
                                prepared ? static_cast<int>(work.k_slot) + tile : token(tile),
                                prepared ? 0 : batch(p.k), full);
    if constexpr (S::qk_groups) {
      isa::bulk_load(to.data() + S::k_groups_at,
                     p.k8.group_scale + slot(tile, p.k8.slots) * S::qk_group_bytes, group_bytes,
                     full);
      for (int n = 0; n < means; ++n) {
        isa::bulk_load(to.data() + S::mean_at + n * 4 * S::keys,
                       mean_scores(p, work, mean_of(p, work, work.first_row) + n, tile),
                       4 * S::keys, full);
      }
    }
  }
  /// How many means the block's rows have, one or two.
  QATTN_DEVICE int mean_count() const {
    return mean_of(p, work, work.first_row + S::rows - 1) - mean_of(p, work, work.first_row) + 1;
  }

  QATTN_DEVICE void load_values(int tile) const {
    constexpr int group_bytes = S::v_rows * S::v_group_bytes;
    static_assert(group_bytes % 16 == 0);
    const SharedAddress full = to.barrier(S::v_full), at = to.data() + S::v_at;
    isa::mbarrier_arrive_expect(full, S::Values::bytes + S::tail_bytes + group_bytes);
    if constexpr (S::pv_16bit) {
      load_rows<typename S::Values>(at, p.v_map, 2, token(tile), batch(p.v), full);
    } else {
      constexpr TileOffsets record = tile_offsets(S::d, S::v_bits, S::pv_group);
      const std::int64_t index = slot(tile, p.v8.slots) / S::keys;
      const std::uint8_t* from = p.v8.tiles + index * record.bytes;
      isa::tma_load<3>(at, p.v_map, {0, 0, static_cast<int>(index)}, full);
      isa::bulk_load(to.data() + S::tail_at, from + record.log, S::tail_bytes, full);
      if constexpr (S::pv_groups) {
        isa::bulk_load(to.data() + S::v_groups_at, from + record.scales, group_bytes, full);
      }
    }
  }

  /// One thread fills the ring.
  QATTN_DEVICE void run() {
#pragma unroll 1
    for (int tile = last_tile<S>(work); tile >= work.key_begin; tile -= S::keys) {
      to.await_empty(S::k_empty);
      load_keys(tile);
      to.await_empty(S::v_empty);
      load_values(tile);
      to.advance();
    }
  }
};

/// A warp that owns rows.
template <class S>
struct RingAttention {
  const AttentionParams& p;
  const WorkTile& work;
  MmaRows<S> rows{p, work};
  RingStage<S> ring{};

  /// Where the tile is.
  QATTN_DEVICE void find_stage() { rows.stage = ring.data(), rows.marks = ring.marks(); }

  QATTN_DEVICE void run_tile(int tile) {
    find_stage();
    const float k_scale = rows.bad().key_scale(tile);
    ring.await_full(S::k_full);
    typename MmaRows<S>::Scores s;
    rows.product().multiply_queries(s, tile);
    ring.release(S::k_empty);
    ring.await_full(S::v_full);
    rows.attend_tile(s, tile, k_scale);
    ring.release(S::v_empty);
  }

  /// The same of a warp without rows: its share of what all do.
  QATTN_DEVICE void pass_tile(int tile) {
    find_stage();
    ring.await_full(S::k_full);
    ring.release(S::k_empty);
    ring.await_full(S::v_full);
    rows.pass_tile(!rows.map.whole(tile));
    ring.release(S::v_empty);
  }

  QATTN_DEVICE void run_tiles() {
    rows.copies.start_queries();
    isa::copy_async_commit();
    const bool idle = rows.idle();
    rows.scale_queries();
    isa::copy_async_wait<0>();
    rows.meet();
#pragma unroll
    for (int step = 0; step < MmaRows<S>::qk_steps; ++step) {
      rows.product().load_queries(step, rows.queries[step]);
    }
    if constexpr (S::qk_16bit) rows.bad().check_queries();
    if constexpr (S::qk_groups) rows.product().find_means();
    ring.release_queries();
    for (int tile = last_tile<S>(work); tile >= work.key_begin; tile -= S::keys) {
      if (idle) {
        pass_tile(tile);
      } else {
        run_tile(tile);
      }
      ring.advance();
    }
  }

  static QATTN_DEVICE void run(const AttentionParams& p, const WorkTile& work) {
    RingAttention self{p, work};
    if (work.key_begin < work.key_end) self.run_tiles();
    MmaRows<S>& rows = self.rows;
    if constexpr (S::scales_channels) rows.values().scale_channels();
    rows.rules.take_offsets(rows.map, rows.state);
    rows.meet();  // the rows leave through the same shared memory
    rows.epilogue().write(rows.base, work.split >= 0);
  }
};

/// The kernel.
template <class S>
struct RingKernel {
  static QATTN_DEVICE void init_barriers() {
    const SharedAddress base = isa::shared_base();
    if (isa::thread() == 0) {
      for (int n = 0; n < S::stages; ++n) {
        isa::mbarrier_init(base + S::k_full + 8 * n, 1);
        isa::mbarrier_init(base + S::v_full + 8 * n, 1);
        isa::mbarrier_init(base + S::k_empty + 8 * n, S::warps);
        isa::mbarrier_init(base + S::v_empty + 8 * n, S::warps);
      }
      isa::fence_mbarrier_init();
    }
    isa::sync_threads();
  }

  // Each role locates the work for itself: what lies in registers before setmaxnreg is spilled.
  static QATTN_DEVICE WorkTile locate(const RingParams& p) {
    return locate_work(p, isa::block().x, S::rows, S::keys);
  }

  static QATTN_DEVICE void run(const RingParams& p) {
    init_barriers();
    const int warp = isa::warp();
    if (warp < S::warps) {
      isa::registers_increase<S::row_registers>();
      attend(p);
    } else {
      isa::registers_decrease<S::producer_registers>();
      if (warp == S::warps) {
        if (isa::elect()) fill(p);
      } else if constexpr (S::qk_16bit) {
        if (p.bad_keys != nullptr) test_keys(p);
      }
    }
  }

  static QATTN_DEVICE void attend(const RingParams& p) {
    const WorkTile work = locate(p);
    if ((work.q.bad || work.k.bad) && isa::thread() == 0) {
      isa::atomic_or_global(p.error, tile::error_sequence);
    }
    if (work.first_row < work.q.rows) RingAttention<S>::run(p, work);
  }
  static QATTN_DEVICE void fill(const RingParams& p) {
    const WorkTile work = locate(p);
    if (work.first_row < work.q.rows) RingProducer<S>{p, work}.run();
  }
  /// This block's share of the tests of 16-bit K, by the other warps of the producer's warpgroup.
  static QATTN_DEVICE void test_keys(const RingParams& p) {
    const WorkTile work = locate(p);
    if (work.first_row >= work.q.rows || work.key_end <= work.key_begin) return;
    constexpr int before = S::threads + 32;
    const tile::RowSource keys = tile::row_source(p.k, work.k, work.b, work.kv_head, 2, true);
    KeyCheck<S::qk, S::qk_bytes, S::block_threads - before>{p, work, keys, isa::thread() - before}
        .run(S::rows);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
