// Prefill attention for Hopper: wgmma and TMA, warp-specialised, persistent.
//
// A block is one producer thread, warps beside it that test operands or take rows to the output
// (Sm90Shape::writers), and two or three consumer warpgroups that own 64 query rows each and take
// turns: while one multiplies, another is in its softmax. In a step a consumer multiplies P of the
// tile before with its V, then Q with K of the tile at hand. With P in shared memory
// (Sm90Config::p_in_smem) it is the other way round, and P V runs on beside the tile's softmax.
//
// u8 P is relative to the maximum of its own row and tile, so products with s8 V are exact in int32
// and no running maximum lies on the critical path. e4m3 P is relative to the running maximum. Both
// products start from zero in each tile and join the float32 output while Q K^T still runs: FP8
// accumulators are narrow (docs/ISA_CONFORMANCE.md). 16-bit P accumulates in the output itself.
#pragma once

#include "kernels/attention/sm90a/consumer.cuh"
#include "kernels/attention/sm90a/fused_q_quant.cuh"
#include "kernels/attention/sm90a/load.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <Sm90Config C>
struct Sm90Attention {
  using Params = Sm90Params;
  using S = Sm90Shape<C>;
  static constexpr int threads = S::threads, min_blocks = 1, shared_bytes = S::shared_bytes;
  static constexpr bool dependent = true;
  static constexpr isa::Target target = isa::sm_90a;

  static QATTN_DEVICE void init_barriers(SharedAddress base) {
    if (isa::thread() == 0) {
      if constexpr (S::fused_q_quant) isa::mbarrier_init(base + S::raw_full, 1);
      for (int n = 0; n < S::q_buffers; ++n) {
        isa::mbarrier_init(base + S::q_full + 8 * n,
                           S::fused_q_quant ? 1 + S::encoders * S::encoder_rows : 1);
        isa::mbarrier_init(base + S::q_empty + 8 * n, 128);
      }
      for (int n = 0; n < S::stages; ++n) {
        isa::mbarrier_init(base + S::full + 8 * n, 1);
        isa::mbarrier_init(base + S::empty + 8 * n, 32 * S::row_warps + S::checkers);
        isa::mbarrier_init(base + S::unclean + 8 * n, 1);
      }
      for (int n = 0; S::writers > 0 && n < S::consumers; ++n) {
        isa::mbarrier_init(base + S::rows_there + 8 * n, 128);
        isa::mbarrier_init(base + S::rows_gone + 8 * n, 32);
      }
      isa::fence_mbarrier_init();
    }
    isa::sync_threads();
  }

  /// Does the portable kernel have to look at this warp's rows? A token of V that is not finite
  /// spoils rows that must not see it, since 0 times that is NaN.
  static QATTN_DEVICE void report(const Params& p, int index, int row_warp, bool needs_fallback) {
    if constexpr (S::pv_16bit) {
      static_assert(S::row_warps == fallback_warps);
      const bool any = isa::any(needs_fallback);
      if (isa::lane() == 0) flag_fallback(p, index, row_warp, any);
    }
  }

  /// Has a work a split? `index`: of the loop over works. Not WorkTile::split, which ptxas would
  /// keep in a register while the work's tiles run: u8 P lost 2 % (H100).
  static QATTN_DEVICE bool is_part(const Params& p, int index) {
    if (p.parts.out == nullptr) return false;
    if constexpr (S::e4m3_pv) return true;
    // Where blocks take what comes no rows are parts.
    const int at = S::tuning.dynamic_scheduler ? index * isa::grid().x + isa::block().x : index;
    return at >= p.whole;
  }

  static QATTN_DEVICE void consume(const Params& p) {
    const int row_warp = isa::warp() - 4, group = row_warp / 4;
    RingPlace<S::stages> place;
    RingPlace<S::q_stages> queries;
    const SharedAddress base = isa::shared_base();
    static_assert(sizeof(WorkTile) + sizeof(TileRange) <= S::work_bytes);
    Sm90Staging<C> staging{group};
    // The first consumer's first turn is nobody's gift.
    using Turns = Sm90Products<Sm90Consumer<C>>;
    if (S::tuning.pingpong && group == S::consumers - 1) {
      isa::barrier_arrive(Turns::turn_of(0), Turns::turn_threads);
    }
    // A block has all works at most. (ptxas spilled 560 bytes where the loop had no such end.)
    const int first = S::tuning.dynamic_scheduler ? 0 : isa::block().x;
    const int step = S::tuning.dynamic_scheduler ? 1 : isa::grid().x;
    for (int index = first; index < p.work_tiles; index += step) {
      const int buffer = queries.stage * S::consumers + group;
      isa::mbarrier_wait(base + S::q_full + 8 * buffer, queries.parity);
      queries.advance();
      const SharedAddress told = base + S::work_at + buffer * S::work_bytes;
      const auto work = take_shared<WorkTile>(told);
      if (S::tuning.dynamic_scheduler && work.b < 0) break;
      const auto facts = take_shared<TileRange>(told + static_cast<int>(sizeof work));
      if (work.first_row >= work.q.rows) {
        Sm90Consumer<C>::return_queries(buffer);
        report(p, index, row_warp, false);
        continue;
      }
      Sm90Consumer<C> self(p, work, facts, buffer, place);
      if (self.walk.tile >= 0) {
        self.run_tiles(staging);
      } else {
        Sm90Consumer<C>::return_queries(buffer);
      }
      self.products().end_products();
      if constexpr (S::writers == 0) {
        self.epilogue().write(base + S::out_at, is_part(p, index));
      } else if (self.epilogue().end(is_part(p, index))) {
        staging.await_room();
        self.epilogue().stage_rows(base + S::out_at, 0);
        staging.hand_over(work, self.epilogue().rows_in_memory() - 64 * group);
      }
      report(p, index, row_warp, self.state.needs_fallback);
    }
    if (S::tuning.pingpong && group == 0) {
      isa::barrier_sync(Turns::turn_of(0), Turns::turn_threads);
    }
    staging.end();
  }

  static QATTN_DEVICE void run(const Params& p) {
    if constexpr (!isa::has_wgmma) return;  // sm_90a alone runs it, others need not compile it
    init_barriers(isa::shared_base());
    if (!S::tuning.dynamic_scheduler || p.awaited.works == nullptr) {
      isa::grid_dependency_wait();  // for codes, scales and means
    }
    if (isa::thread() < 128) {
      isa::registers_decrease<S::tuning.producer_registers>();
      const int warp = isa::warp();
      if (warp == 0) {
        if (isa::elect()) Sm90Producer<C>{p}.run();
      } else if (S::fused_q_quant) {
        Sm90Encoder<C>{p}.run();
      } else if (warp <= S::writers) {
        Sm90Writer<C>{p, warp - 1}.run();
        if (S::tuning.dynamic_scheduler) isa::grid_dependency_wait();
      } else if (S::tuning.dynamic_scheduler) {
        // Where the kernel before is still making codes this one must not end before it.
        isa::grid_dependency_wait();
      } else if (warp == 2 || (S::qk_16bit && warp == 3)) {
        Sm90Checker<C>{p, warp == 2}.run();
      }
    } else {
      isa::registers_increase<S::tuning.consumer_registers>();
      consume(p);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
