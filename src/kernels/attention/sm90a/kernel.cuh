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

#include "kernels/attention/sm90a/check.cuh"
#include "kernels/attention/sm90a/fused_q_quant.cuh"
#include "kernels/attention/sm90a/load.cuh"
#include "kernels/attention/sm90a/mma.cuh"
#include "kernels/attention/sm90a/write.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <Sm90Config C>
struct Sm90Consumer : Sm90Mma<C> {
  using S = Sm90Shape<C>;
  using Base = Sm90Mma<C>;
  using Base::multiply_keys, Base::pingpong_arrive, Base::pingpong_wait, Base::release,
      Base::rescale_o, Base::stage, Base::store_codes, Base::wait_full;
  using Base::R, Base::base, Base::buffer, Base::codes, Base::group, Base::map, Base::output,
      Base::place, Base::state, Base::work;
  using typename Base::Unmasked, typename Base::Products, typename Base::Scales;
  template <int Part>
  using Values = typename Base::template Values<Part>;

  QATTN_DEVICE Sm90Consumer(const Sm90Params& a, const WorkTile& w, const TileRange& facts,
                            int q_buffer, RingPlace<S::stages>& ring)
      : Base(a, w, facts, q_buffer, ring), walk(a, w, S::keys) {}

  // ---- The tiles ------------------------------------------------------------------------------

  /// What the next step must know of its tile, if that is there already. Without a branch, because
  /// ptxas moves nothing across one and so would bunch the exponentials in front of it; at worst a
  /// piece of Q is read instead, and forgotten.
  QATTN_DEVICE void peek_next_tile() {
    ready = walk.mask == nullptr && walk.tile - S::keys >= walk.begin &&
            isa::mbarrier_test(base + S::full + 8 * place.stage, place.parity);
    constexpr int tables = S::stage_bytes - S::tail_at;
    static_assert(tables == 0 || S::q_bytes >= tables);
    const SharedAddress harmless = base + S::q_at + buffer * S::q_bytes - S::tail_at;
    scales = this->load_scales(ready ? stage() : harmless);
    plain_next = ready && this->is_unmasked(walk.tile - S::keys, scales);
  }
  QATTN_DEVICE void next_tile() {
    walk.advance(S::keys);
    if (ready) return;
    wait_full();
    if (walk.tile >= 0) load_facts();
  }
  QATTN_DEVICE void load_facts() {
    scales = this->load_scales(stage());
    // Flags of keys that do not exist hold anything.
    constexpr std::uint32_t room = ~(3u << Base::hidden_at);
    scales.flags = (scales.flags & room) | walk.hidden << Base::hidden_at;
  }

  /// P V of the tile before, if there is one, and Q K^T of this tile. P V joins the output while
  /// Q K^T still runs. The turn is still ours then, unless there are three consumers.
  template <bool First>
  QATTN_DEVICE void multiply(Products& s) {
    if constexpr (S::v_parts > 1) {
      pingpong_wait();
      if constexpr (!First) this->join_parts();
      isa::wgmma_fence();
      multiply_keys(s);
      if constexpr (S::three) pingpong_arrive();
      isa::wgmma_wait<0>();
      return;
    }
    Values<0> pv;
    if constexpr (!First && !S::p_in_smem) rescale_o();
    pingpong_wait();
    isa::wgmma_fence();
    if constexpr (!First) this->template multiply_values<0>(pv);
    multiply_keys(s);
    if constexpr (!First && !S::pv_16bit) {
      isa::wgmma_wait<1>();
      this->template add_values<0>(pv);
      isa::sync_warp();  // or ptxas moves the additions behind the next wait
    }
    isa::wgmma_wait<0>();
  }

  /// Among the exponentials, behind group `g`: waits for that product and joins a share of it to
  /// the output. 16-bit P V is in the output already, which shrinks to this tile's reference.
  QATTN_DEVICE void join_overlapped(int g, const Values<0>& pv) {
    if (g == S::tuning.join_after) {
      isa::wgmma_wait<0>();
      release();
    }
    const int groups = S::tuning.join_until - S::tuning.join_after, at = g - S::tuning.join_after;
    if (at < 0 || at >= groups) return;
    const int from = S::d_tiles * at / groups, to = S::d_tiles * (at + 1) / groups;
    if constexpr (S::pv_16bit) {
      this->rescale_tiles(from, to);
    } else {
      this->template add_tiles<0>(from, to, pv);
    }
  }

  /// A plain tile's maxima.
  QATTN_DEVICE void start_plain(Products& s, Unmasked& t) {
    this->take_maxima(s, 0, t);
    if constexpr (S::halves > 1) this->take_maxima(s, 1, t);
    isa::row_maxima<isa::MmaFragment>(t.top);
    if constexpr (!S::u8) this->begin_unmasked(t);
  }
  /// Its exponentials.
  template <class Meanwhile>
  QATTN_DEVICE void exponentiate(Products& s, Unmasked& t, Meanwhile meanwhile) {
    this->attend_unmasked(s, 0, t, meanwhile);
    if constexpr (S::halves > 1) this->attend_unmasked(s, 1, t, meanwhile);
  }

  /// This tile and all that follow it up to one that is not plain. From the products to the end of
  /// the exponentials there is no branch.
  QATTN_DEVICE void attend_plain_tiles(Products& s) {
    while (true) {
      Unmasked t;
      t.x = scales;
      release();
      start_plain(s, t);
      exponentiate(s, t, [&](int g, std::uint32_t) {
        if (g == S::tuning.give_after) pingpong_arrive();
        if (g == S::tuning.look_after) peek_next_tile();
      });
      this->end_unmasked(t);
      store_codes();
      next_tile();
      if (!this->is_unmasked(walk.tile, scales)) return;  // or there is none
      multiply<false>(s);
    }
  }

  /// As attend_plain_tiles(), with P V of a tile beside the softmax of the next, whose weight and
  /// sums are found while products run.
  QATTN_DEVICE void attend_unmasked_overlapped(Products& s) {
    const auto first = this->first_operands();
    Values<0> pv;  // none is under way
#pragma unroll
    for (auto& x : pv) x = 0;
    this->settle();
    Unmasked t;
    t.x = scales;
    while (true) {
      start_plain(s, t);
      exponentiate(s, t, [&](int g, std::uint32_t zero) {
        if (g == S::tuning.give_after) pingpong_arrive(zero);
        join_overlapped(g, pv);
        if (g == S::tuning.look_after) peek_next_tile();
      });
      store_codes();
      if (plain_next) [[likely]] {
        walk.tile -= S::keys;
      } else {
        next_tile();
        if (!this->is_unmasked(walk.tile, scales)) break;  // or there is none
      }
      const auto from = this->operands(first);
      pingpong_wait();
      isa::wgmma_fence();
      multiply_keys(s, from);
      // Between the products ptxas moves fewer accumulators for it: 2 to 3 % (H200).
      this->end_unmasked(t);
      if constexpr (!S::pv_16bit) isa::wgmma_fence();
      this->template multiply_values<0>(pv, from);
      t.x = scales;
      if constexpr (!S::u8) isa::sync_warp();  // or ptxas moves more of that behind the wait
      isa::wgmma_wait<1>();
    }
    this->end_unmasked(t);
  }

  /// Any other tile.
  QATTN_DEVICE void attend_other_tile(const Products& s) {
    if constexpr (!S::three) pingpong_arrive();
    Scales now = scales;
    if (this->is_edge(walk.tile, stage(), now)) {
      release();
      this->attend_edge(s, now, walk.tile);
    } else {
      this->attend_special(s, now, walk.tile, stage());
      release();
    }
    if constexpr (S::p_in_smem) rescale_o();
    store_codes();
    ready = false;
    next_tile();
  }

  /// Marks this warp's rows of 16-bit Q that are not finite. Two lanes share a row, and take its
  /// chunks in turns that spare banks.
  QATTN_DEVICE void check_queries() {
    const SharedAddress row = base + S::q_at + buffer * S::q_bytes +
                              (map.warp % 4 * S::warp_rows + map.lane / 2) * S::qk_panel;
    constexpr int chunks = S::qk_panel / 32;
    bool bad = false;
#pragma unroll
    for (int n = 0; n < S::qk_panels; ++n) {
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        const int chunk = map.lane % 2 * chunks + (c + map.lane / 2) % chunks;
        bad |= not_finite<C.qk>(
            isa::load_shared<isa::Words4>(row + n * S::q_panel_bytes + 16 * chunk));
      }
    }
    const std::uint32_t rows = isa::ballot(bad);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int at = map.lane / 4 + 8 * r;
      if ((rows >> 2 * at & 3) != 0) state.bad_rows |= 1u << r;
    }
  }

  /// The tiles of a warpgroup without rows: what the others wait for.
  QATTN_DEVICE void pass_tiles() {
    while (true) {
      wait_full();
      pingpong_wait();
      pingpong_arrive();
      release();
      if (walk.tile < 0) break;  // that stage had V of the last
      walk.advance(S::keys);
    }
    return_queries(buffer);
  }

  QATTN_DEVICE void run_tiles(Sm90Staging<C>& staging) {
    if (64 * group >= map.exist) {
      pass_tiles();
      return;
    }
    if constexpr (S::qk_16bit) check_queries();
    this->start_rows();
    Products s;
    wait_full();
    load_facts();
    multiply<true>(s);
    if constexpr (S::p_in_smem && S::p_over_out) staging.await_room();  // for P
    while (true) {
      if (this->is_unmasked(walk.tile, scales)) {
        if constexpr (S::p_in_smem) {
          attend_unmasked_overlapped(s);
        } else {
          attend_plain_tiles(s);
        }
      } else {
        attend_other_tile(s);
      }
      if (walk.tile < 0) break;
      multiply<false>(s);
    }
    if constexpr (!S::qk_16bit) this->rules.take_offsets(map, state);
    return_queries(buffer);
    multiply_last();
  }

  /// P V of the last tile.
  QATTN_DEVICE void multiply_last() {
    Values<0> pv;
    if constexpr (!S::p_in_smem) rescale_o();
    pingpong_wait();
    if constexpr (S::v_parts > 1) {
      this->join_parts();
      pingpong_arrive();
      release();
      if constexpr (S::e4m3_pv) this->scale_all_channels();
    } else {
      isa::wgmma_fence();
      this->template multiply_values<0>(pv);
      if constexpr (S::e4m3_pv) {
        typename Base::template ChannelScales<S::d_tiles> scale;  // they arrive meanwhile
        this->load_channel_scales(0, scale);
        isa::wgmma_wait<0>();
        pingpong_arrive();
        release();
        this->template add_values<0>(pv);
        this->scale_channels(0, scale);
      } else {
        isa::wgmma_wait<0>();
        pingpong_arrive();
        release();
        if constexpr (S::u8) this->template add_values<0>(pv);
      }
    }
    if constexpr (S::u8) {
      this->replace_lost();
#pragma unroll
      for (int r = 0; r < R; ++r) state.sum[r] += this->poison;
    }
  }

  /// Q and the work that came with it are read no more.
  QATTN_DEVICE static void return_queries(int buffer) {
    isa::mbarrier_arrive(isa::shared_base() + S::q_empty + 8 * buffer);
  }

  TileWalk walk;
  Scales scales;            ///< of walk.tile
  bool ready = false;       ///< foreseen
  bool plain_next = false;  ///< ready, and plain
};

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
    using Consumer = Sm90Consumer<C>;
    if (S::tuning.pingpong && group == S::consumers - 1) {
      isa::barrier_arrive(Consumer::turn_of(0), Consumer::turn_threads);
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
      self.end_products();
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
      isa::barrier_sync(Consumer::turn_of(0), Consumer::turn_threads);
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
