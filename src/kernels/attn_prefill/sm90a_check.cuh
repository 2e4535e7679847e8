// What the Hopper prefill kernel's producer leaves to the other warps of its warpgroup, where
// operands of 16 bits are read in place.
#pragma once

#include "kernels/attn_prefill/check.cuh"
#include "kernels/attn_prefill/sm90a_load.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// One warp: zeros in the place of rows of V behind a sequence's end. Every stage of the ring waits
/// for it.
template <Sm90Config C>
struct Sm90Cleaner {
  using S = Sm90Shape<C>;

  const Sm90Params& p;
  SharedAddress base = isa::shared_base();
  RingPlace<S::stages> place{};
  RingPlace<1> unclean{};

  QATTN_DEVICE void clean(SharedAddress values, int first_row) {
    isa::mbarrier_wait(base + S::unclean, unclean.parity);
    unclean.advance();
    constexpr int chunks = S::v_row / 16;
    for (int n = first_row * chunks + isa::lane(); n < S::keys * chunks; n += 32) {
#pragma unroll
      for (int panel = 0; panel < S::v_panels; ++panel) {
        isa::store_shared(values + panel * S::v_bytes + 16 * n, isa::Words4{});
      }
    }
    isa::fence_async_proxy();
  }

  QATTN_DEVICE void walk_tiles(const PrefillWork& work) {
    TileWalk walk(p, work, S::keys);
    int before = -1;
    while (walk.tile >= 0 || before >= 0) {
      isa::mbarrier_wait(base + S::empty + 8 * place.stage, place.parity ^ 1);
      if (before >= 0 && needs_cleaning(p, work, before, S::keys)) {
        clean(base + S::ring_at + place.stage * S::stage_bytes + S::v_at,
              static_cast<int>(work.k.length) - before);
      }
      isa::sync_warp();
      if (isa::lane() == 0) isa::mbarrier_arrive(base + S::full + 8 * place.stage);
      place.advance();
      before = walk.tile;
      if (walk.tile >= 0) walk.advance(S::keys);
    }
  }

  QATTN_DEVICE void run() {
    if constexpr (S::wide_pv) {
      for (int index = isa::block().x; index < p.works; index += isa::grid().x) {
        walk_tiles(locate_work(p, index, S::rows, S::keys));
      }
    }
  }
};

/// Two warps: tests of K.
template <Sm90Config C>
struct Sm90Checker {
  using S = Sm90Shape<C>;
  static constexpr int threads = 64;

  const Sm90Params& p;

  QATTN_DEVICE void run() const {
    if constexpr (S::wide_qk) {
      for (int index = isa::block().x; index < p.works; index += isa::grid().x) {
        const PrefillWork work = locate_work(p, index, S::rows, S::keys);
        if (work.key_begin >= work.key_end) continue;
        const tile::RowSource source = tile::row_source(p.k, work.k, work.b, work.kv_head, 2, true);
        KeyCheck<C.qk, S::qk_row, threads>{p, work, source, isa::thread() - 64}.run(S::rows);
      }
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
