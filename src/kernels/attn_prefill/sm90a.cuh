// Prefill attention for Hopper: wgmma and TMA, warp-specialised, persistent.
//
// A block is one producer thread and two or three consumer warpgroups that own 64 query rows each
// and take turns: while one multiplies, another is in its softmax. In a step a consumer multiplies
// P of the tile before with its V, then Q with K of the tile at hand.
//
// u8 P is relative to the maximum of its own row and tile, so products with s8 V are exact in int32
// and no running maximum lies on the critical path. e4m3 P is relative to the running maximum. Both
// products start from zero in each tile and join the float32 output while Q K^T still runs: FP8
// accumulators are narrow (docs/ISA_CONFORMANCE.md). 16-bit P accumulates in the output itself.
#pragma once

#include <type_traits>

#include "kernels/attn_prefill/sm90a_check.cuh"
#include "kernels/attn_prefill/sm90a_encode.cuh"
#include "kernels/attn_prefill/sm90a_load.cuh"
#include "kernels/attn_prefill/sm90a_online.cuh"
#include "kernels/attn_prefill/sm90a_softmax.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <Sm90Config C>
using Sm90AnySoftmax = std::conditional_t<C.pv == isa::Element::u8, Sm90Softmax<C>, Sm90Online<C>>;

template <Sm90Config C>
struct Sm90Consumer : Sm90AnySoftmax<C> {
  using S = Sm90Shape<C>;
  using Base = Sm90AnySoftmax<C>;
  using Base::R, Base::codes, Base::lane, Base::out, Base::sum, Base::work;
  using typename Base::Plain, typename Base::Products, typename Base::Scales;
  /// P V of a tile and a part of the channels, that does not go straight to the output.
  static constexpr int part_end(int part) {
    return part + 1 < S::v_parts ? (part + 1) * S::part_channels : S::v_channels;
  }
  template <int Part>
  using Values =
      isa::Accumulator<C.pv>[S::wide_pv ? 1 : (part_end(Part) - Part * S::part_channels) / 2];

  SharedAddress base;
  int group;   ///< this warpgroup among the consumers
  int buffer;  ///< Q's
  RingPlace<S::stages>& place;
  std::uint64_t q_descriptor, k_descriptor, v_descriptor;  ///< the ring's: of stage 0

  QATTN_DEVICE Sm90Consumer(const Sm90Params& a, const PrefillWork& w, int q_buffer,
                            RingPlace<S::stages>& ring)
      : Base(a, w, isa::thread() / 32 - 4, q_buffer),
        base(isa::shared_base()),
        group(q_buffer % S::consumers),
        buffer(q_buffer),
        place(ring),
        q_descriptor(isa::matrix_descriptor(base + S::q_at + buffer * S::q_bytes, 16, S::qk_stride,
                                            S::qk_swizzle)),
        k_descriptor(
            isa::matrix_descriptor(base + S::ring_at + S::k_at, 16, S::qk_stride, S::qk_swizzle)),
        v_descriptor(isa::matrix_descriptor(
            base + S::ring_at + S::v_at, S::wide_pv ? S::v_bytes : 16, S::v_stride, S::v_swizzle)),
        walk(a, w, S::keys) {}

  // ---- The ring -------------------------------------------------------------------------------

  QATTN_DEVICE SharedAddress stage() const {
    return base + S::ring_at + place.stage * S::stage_bytes;
  }
  QATTN_DEVICE void wait_full() {
    isa::mbarrier_wait(base + S::full + 8 * place.stage, place.parity);
  }
  /// This thread reads the stage no more. One arrival a warp behind its barrier is no faster
  /// (H200), and compute-sanitizer does not follow it.
  QATTN_DEVICE void release() {
    isa::mbarrier_arrive(base + S::empty + 8 * place.stage);
    place.advance();
  }

  // ---- Products -------------------------------------------------------------------------------

  QATTN_DEVICE void multiply_keys(Products& s) {
    const std::uint64_t k = k_descriptor + place.stage * (S::stage_bytes / 16);
#pragma unroll
    for (int step = 0; step < S::qk_row / 32; ++step) {
      const int panel = 32 * step / S::qk_panel, in_panel = 2 * step - panel * S::qk_panel / 16;
      isa::wgmma<C.qk, C.qk, S::keys>(s, q_descriptor + panel * S::q_panel_bytes / 16 + in_panel,
                                      k + panel * S::k_panel_bytes / 16 + in_panel, step > 0);
    }
    isa::wgmma_commit();
  }

  /// V of the tile before, which lies in this stage.
  template <int Part>
  QATTN_DEVICE void multiply_values(Values<Part>& pv) {
    constexpr int first = Part * S::part_channels, channels = part_end(Part) - first;
    const std::uint64_t v =
        v_descriptor + place.stage * (S::stage_bytes / 16) + first * S::v_row / 16;
    if constexpr (S::wide_pv) {
      auto& sums = reinterpret_cast<float(&)[S::d / 2]>(out);
#pragma unroll
      for (int step = 0; step < S::keys / 16; ++step) {
        isa::wgmma<C.pv, C.pv, S::d, true>(sums, codes[step], v + step * 16 * S::v_row / 16, true);
      }
    } else {
#pragma unroll
      for (int step = 0; step < S::keys / 32; ++step) {
        const int at = step / 2 * S::v_bytes + step % 2 * 32;
        isa::wgmma<C.pv, S::v_element, channels>(pv, codes[step], v + at / 16, step > 0);
      }
    }
    isa::wgmma_commit();
  }

  /// What must happen to the output before P V joins it in the matrix unit.
  QATTN_DEVICE void shrink_output() {
    if constexpr (S::wide_pv) {
#pragma unroll
      for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[0][n][i] *= this->shrink[i / 2];
      }
    }
  }

  /// Joins P V to the output, and to the row sums what its product has of them.
  template <int Part>
  QATTN_DEVICE void add_values(const Values<Part>& pv) {
    static_assert(!S::wide_pv);
    constexpr int first = Part * S::part_channels / 8, tiles = S::part_channels / 8;
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = out[0][first + n][i];
        const auto product = static_cast<float>(pv[4 * n + i]);
        if constexpr (S::u8) {
          x = fmaf(product, this->share[i / 2], x);
        } else {
          x = fmaf(x, this->shrink[i / 2], product);
        }
      }
    }
    if constexpr (S::e4m3_pv && Part + 1 == S::v_parts) {
      // Columns 0 and 1 behind the channels lie in lane t = 0; only 0 is not zero.
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const auto* total = pv + 4 * tiles + 2 * r;
        sum[r] = fmaf(sum[r], this->shrink[r], total[0] + total[1]);
      }
    }
  }

  /// P V of the tile before, a part of the channels after the other.
  template <int Part = 0>
  QATTN_DEVICE void join_parts() {
    static_assert(S::v_parts > 1);
    Values<Part> pv;
    isa::wgmma_fence();
    multiply_values<Part>(pv);
    isa::wgmma_wait<0>();
    add_values<Part>(pv);
    if constexpr (Part + 1 < S::v_parts) join_parts<Part + 1>();
  }

  // ---- Turns ----------------------------------------------------------------------------------

  QATTN_DEVICE void take_turn() {
    if constexpr (S::turns) isa::barrier_sync(turn_of(group), turn_threads);
  }
  QATTN_DEVICE void give_turn() {
    if constexpr (S::turns) {
      isa::barrier_arrive(turn_of(group + 1 < S::consumers ? group + 1 : 0), turn_threads);
    }
  }
  /// A barrier of those who have the turn and those who get it.
  QATTN_DEVICE static int turn_of(int group) { return 1 + group; }
  static constexpr int turn_threads = 256;

  // ---- The tiles ------------------------------------------------------------------------------

  /// What the next step must know of its tile, if that is there already. Without a branch, because
  /// ptxas moves nothing across one and so would bunch the exponentials in front of it; at worst a
  /// piece of Q is read instead, and forgotten.
  QATTN_DEVICE void foresee() {
    ready = walk.mask == nullptr && walk.tile - S::keys >= walk.begin &&
            isa::mbarrier_test(base + S::full + 8 * place.stage, place.parity);
    constexpr int tables = S::stage_bytes - S::tail_at;
    static_assert(tables == 0 || S::q_bytes >= tables);
    const SharedAddress harmless = base + S::q_at + buffer * S::q_bytes - S::tail_at;
    scales = this->load_scales(ready ? stage() : harmless);
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
    constexpr std::uint32_t room = (1u << Base::hidden_at) - 1;
    scales.flags = (scales.flags & room) | walk.hidden << Base::hidden_at;
  }

  /// P V of the tile before, if there is one, and Q K^T of this tile. P V joins the output while
  /// Q K^T still runs. The turn is still ours then, unless there are three consumers.
  template <bool First>
  QATTN_DEVICE void multiply(Products& s) {
    if constexpr (S::v_parts > 1) {
      take_turn();
      if constexpr (!First) join_parts();
      isa::wgmma_fence();
      multiply_keys(s);
      if constexpr (S::three) give_turn();
      isa::wgmma_wait<0>();
      return;
    }
    Values<0> pv;
    if constexpr (!First) shrink_output();
    take_turn();
    isa::wgmma_fence();
    if constexpr (!First) multiply_values<0>(pv);
    multiply_keys(s);
    if constexpr (!First && !S::wide_pv) {
      isa::wgmma_wait<1>();
      add_values<0>(pv);
      isa::sync_warp();  // or ptxas moves the additions behind the next wait
    }
    isa::wgmma_wait<0>();
  }

  /// This tile and all that follow it up to one that is not plain. From the products to the end of
  /// the exponentials there is no branch.
  QATTN_DEVICE void attend_plain_tiles(Products& s) {
    while (true) {
      Plain t;
      t.x = scales;
      release();
      this->take_maxima(s, 0, t);
      if constexpr (S::halves > 1) this->take_maxima(s, 1, t);
      this->row_maxima(t.top);
      if constexpr (!S::u8) this->begin_plain(t);
      const auto meanwhile = [&](int g) {
        if (g == S::give_after) give_turn();
        if (g == S::look_after) foresee();
      };
      this->attend_plain(s, 0, t, meanwhile);
      if constexpr (S::halves > 1) this->attend_plain(s, 1, t, meanwhile);
      this->end_plain(t);
      next_tile();
      if (!this->is_plain(walk.tile, scales)) return;  // or there is none
      multiply<false>(s);
    }
  }

  /// Any other tile.
  QATTN_DEVICE void attend_other_tile(const Products& s) {
    if constexpr (!S::three) give_turn();
    Scales now = scales;
    if (this->is_edge(walk.tile, stage(), now)) {
      release();
      this->attend_edge(s, now, walk.tile);
    } else {
      this->attend_special(s, now, walk.tile, stage());
      release();
    }
    ready = false;
    next_tile();
  }

  /// Marks this warp's rows of 16-bit Q that are not finite. Two lanes share a row, and take its
  /// chunks in turns that spare banks.
  QATTN_DEVICE void check_queries() {
    const SharedAddress row = base + S::q_at + buffer * S::q_bytes +
                              (this->warp % 4 * S::warp_rows + lane / 2) * S::qk_panel;
    constexpr int chunks = S::qk_panel / 32;
    bool bad = false;
#pragma unroll
    for (int n = 0; n < S::qk_panels; ++n) {
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        const int chunk = lane % 2 * chunks + (c + lane / 2) % chunks;
        bad |= not_finite<C.qk>(
            isa::load_shared<isa::Words4>(row + n * S::q_panel_bytes + 16 * chunk));
      }
    }
    const std::uint32_t rows = isa::ballot(bad);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int at = lane / 4 + 8 * r;
      if ((rows >> 2 * at & 3) != 0) this->bad_rows |= 1u << r;
    }
  }

  /// The tiles of a warpgroup without rows: what the others wait for.
  QATTN_DEVICE void pass_tiles() {
    while (true) {
      wait_full();
      take_turn();
      give_turn();
      release();
      if (walk.tile < 0) break;  // that stage had V of the last
      walk.advance(S::keys);
    }
    return_queries(buffer);
  }

  QATTN_DEVICE void run_tiles() {
    if (this->query_of(64 * group) >= work.q.length) {
      pass_tiles();
      return;
    }
    if constexpr (S::wide_qk) check_queries();
    this->start_rows();
    Products s;
    wait_full();
    load_facts();
    multiply<true>(s);
    while (true) {
      if (this->is_plain(walk.tile, scales)) {
        attend_plain_tiles(s);
      } else {
        attend_other_tile(s);
      }
      if (walk.tile < 0) break;
      multiply<false>(s);
    }
    if constexpr (!S::wide_qk) this->take_offsets();
    return_queries(buffer);
    multiply_last();
  }

  /// P V of the last tile.
  QATTN_DEVICE void multiply_last() {
    Values<0> pv;
    shrink_output();
    take_turn();
    if constexpr (S::v_parts > 1) {
      join_parts();
      give_turn();
      release();
      if constexpr (S::e4m3_pv) this->scale_all_channels();
    } else {
      isa::wgmma_fence();
      multiply_values<0>(pv);
      if constexpr (S::e4m3_pv) {
        typename Base::template ChannelScales<S::d_tiles> scale;  // they arrive meanwhile
        this->load_channel_scales(0, scale);
        isa::wgmma_wait<0>();
        give_turn();
        release();
        add_values<0>(pv);
        this->scale_channels(0, scale);
      } else {
        isa::wgmma_wait<0>();
        give_turn();
        release();
        if constexpr (S::u8) add_values<0>(pv);
      }
    }
    if constexpr (S::u8) {
#pragma unroll
      for (int r = 0; r < R; ++r) sum[r] += this->poison;
    }
  }

  /// Q and the work that came with it are read no more.
  QATTN_DEVICE static void return_queries(int buffer) {
    isa::mbarrier_arrive(isa::shared_base() + S::q_empty + 8 * buffer);
  }

  TileWalk walk;
  Scales scales;       ///< of walk.tile
  bool ready = false;  ///< foreseen
};

template <Sm90Config C>
struct Sm90Prefill {
  using Params = Sm90Params;
  using S = Sm90Shape<C>;
  static constexpr int threads = S::threads, min_blocks = 1, shared_bytes = S::shared_bytes;
  static constexpr bool dependent = true;

  static QATTN_DEVICE void init_barriers(SharedAddress base) {
    if (isa::thread() == 0) {
      if constexpr (S::raw_queries) isa::mbarrier_init(base + S::raw_full, 1);
      for (int n = 0; n < S::q_buffers; ++n) {
        isa::mbarrier_init(base + S::q_full + 8 * n,
                           S::raw_queries ? 1 + S::encoders * S::encoder_rows : 1);
        isa::mbarrier_init(base + S::q_empty + 8 * n, 128);
      }
      for (int n = 0; n < S::stages; ++n) {
        isa::mbarrier_init(base + S::full + 8 * n, S::wide_pv ? 2 : 1);
        isa::mbarrier_init(base + S::empty + 8 * n, 32 * S::row_warps + S::checkers);
        isa::mbarrier_init(base + S::unclean + 8 * n, 1);
      }
      isa::fence_mbarrier_init();
    }
    isa::sync_threads();
  }

  /// Does the portable kernel have to look at this warp's rows? A token of V that is not finite
  /// spoils rows that must not see it, since 0 times that is NaN.
  static QATTN_DEVICE void report(const Params& p, int index, int row_warp, bool doubtful) {
    if constexpr (S::wide_pv) {
      static_assert(S::row_warps == doubt_warps);
      const bool any = isa::any(doubtful);
      if (isa::lane() == 0) doubt(p, index, row_warp, any);
    }
  }

  static QATTN_DEVICE void consume(const Params& p) {
    const int row_warp = isa::warp() - 4, group = row_warp / 4;
    RingPlace<S::stages> place;
    RingPlace<S::q_stages> queries;
    const SharedAddress base = isa::shared_base();
    static_assert(sizeof(PrefillWork) <= S::work_bytes);
    // The first consumer's first turn is nobody's gift.
    using Consumer = Sm90Consumer<C>;
    if (S::turns && group == S::consumers - 1) {
      isa::barrier_arrive(Consumer::turn_of(0), Consumer::turn_threads);
    }
    for (int index = isa::block().x; index < p.works; index += isa::grid().x) {
      const int buffer = queries.stage * S::consumers + group;
      isa::mbarrier_wait(base + S::q_full + 8 * buffer, queries.parity);
      queries.advance();
      const PrefillWork work = take_work(base + S::work_at + buffer * S::work_bytes);
      if ((work.q.bad || work.k.bad) && isa::thread() == 128) {
        isa::atomic_or_global(p.error, tile::error_sequence);
      }
      if (work.first_row >= work.q.rows) {
        Sm90Consumer<C>::return_queries(buffer);
        report(p, index, row_warp, false);
        continue;
      }
      Sm90Consumer<C> self(p, work, buffer, place);
      if (self.walk.tile >= 0) {
        self.run_tiles();
      } else {
        Sm90Consumer<C>::return_queries(buffer);
      }
      self.write(base + S::out_at);
      report(p, index, row_warp, self.doubtful);
    }
    if (S::turns && group == 0) isa::barrier_sync(Consumer::turn_of(0), Consumer::turn_threads);
  }

  static QATTN_DEVICE void run(const Params& p) {
    if constexpr (!isa::has_wgmma) return;  // sm_90a alone runs it, others need not compile it
    init_barriers(isa::shared_base());
    isa::grid_dependency_wait();  // for codes, scales and means
    if (isa::thread() < 128) {
      isa::registers_decrease<S::producer_registers>();
      const int warp = isa::warp();
      if (warp == 0) {
        if (isa::elect()) Sm90Producer<C>{p}.run();
      } else if (S::raw_queries) {
        Sm90Encoder<C>{p}.run();
      } else if (warp == 1) {
        Sm90Cleaner<C>{p}.run();
      } else {
        Sm90Checker<C>{p}.run();
      }
    } else {
      isa::registers_increase<S::consumer_registers>();
      consume(p);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
