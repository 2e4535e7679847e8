// A warp of the Hopper prefill kernel that owns rows: its parts, and its way through the tiles.
#pragma once

#include <type_traits>

#include "kernels/attention/rows/epilogue.cuh"
#include "kernels/attention/sm90a/check.cuh"
#include "kernels/attention/sm90a/mma.cuh"
#include "kernels/attention/sm90a/softmax/running_max.cuh"
#include "kernels/attention/sm90a/softmax/tile_max.cuh"
#include "kernels/attention/sm90a/write.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// The softmax of a kernel's consumers.
template <class Kernel>
using Sm90Softmax =
    std::conditional_t<Kernel::S::u8, TileMaxSoftmax<Kernel>, RunningMaxSoftmax<Kernel>>;

/// A warp that owns rows.
template <Sm90Config C>
struct Sm90Consumer {
  using S = Sm90Shape<C>;
  using F = typename S::Fragment;
  using Scores = typename ScoreRules<S>::Scores;
  using Weights = std::conditional_t<S::u8, TileMaxWeights<S>, RunningMaxWeights<S>>;
  using Scales = typename Weights::Scales;
  using Unmasked = typename Weights::Unmasked;
  static constexpr int R = F::rows * S::m_tiles;
  /// S as wgmma leaves it: element 4n + i is element i of score tile n.
  using Products = isa::Accumulator<S::qk>[S::keys / 2];
  using Softmax = Sm90Softmax<Sm90Consumer>;
  template <int Part>
  using Values = Sm90Values<S, Part>;

  const AttentionParams& p;
  const WorkTile& work;
  RowMap<S> map;
  RegisterOutput<S> output;
  RowState<S> state;
  ScoreRules<S> rules;
  const Sm90Params& params;
  /// The tiles that every row sees whole: the first, and how far behind it the last is.
  int unmasked_first;
  unsigned unmasked_span;
  Weights weights;
  SharedAddress base = isa::shared_base();
  int group;   ///< this warpgroup among the consumers
  int buffer;  ///< Q's
  RingPlace<S::stages>& place;
  std::uint64_t q_descriptor, p_descriptor;
  std::uint64_t k_descriptor, v_descriptor;  ///< of stage 0
  TileWalk walk;
  Scales scales;            ///< of walk.tile
  bool ready = false;       ///< foreseen
  bool plain_next = false;  ///< ready, and plain

  QATTN_DEVICE Sm90Consumer(const Sm90Params& a, const WorkTile& w, const TileRange& facts,
                            int q_buffer, RingPlace<S::stages>& ring)
      : p(a),
        work(w),
        map(a, w, isa::thread() / 32 - 4),
        state(a),
        params(a),
        unmasked_first(facts.unmasked_first),
        unmasked_span(static_cast<unsigned>(facts.unmasked_span)),
        group(q_buffer % S::consumers),
        buffer(q_buffer),
        place(ring),
        q_descriptor(isa::matrix_descriptor(base + S::q_at + buffer * S::q_bytes, 16, S::qk_stride,
                                            S::qk_swizzle)),
        p_descriptor(isa::matrix_descriptor(base + S::p_at + group * S::p_group_bytes, 16,
                                            8 * sm90_panel, isa::Swizzle::bytes128)),
        k_descriptor(
            isa::matrix_descriptor(base + S::ring_at + S::k_at, 16, S::qk_stride, S::qk_swizzle)),
        v_descriptor(isa::matrix_descriptor(
            base + S::ring_at + S::v_at, S::pv_16bit ? S::v_bytes : 16, S::v_stride, S::v_swizzle)),
        walk(a, w, S::keys) {
    map.exist = facts.exist;
    rules.scales_at = isa::shared_base() + S::facts_at + buffer * S::fact_bytes +
                      4 * S::warp_rows * (map.warp % 4);
    rules.dots_at = rules.scales_at + S::dots_at;
  }

  QATTN_DEVICE Sm90Edges<Sm90Consumer> edges() { return {*this}; }
  QATTN_DEVICE Softmax softmax() { return {*this}; }
  QATTN_DEVICE Sm90Products<Sm90Consumer> products() { return {*this}; }
  QATTN_DEVICE Epilogue<S> epilogue() { return {map, state, output}; }

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
    scales = softmax().load_scales(ready ? products().stage() : harmless);
    plain_next = ready && softmax().is_unmasked(walk.tile - S::keys, scales);
  }
  QATTN_DEVICE void next_tile() {
    walk.advance(S::keys);
    if (ready) return;
    products().wait_full();
    if (walk.tile >= 0) load_facts();
  }
  QATTN_DEVICE void load_facts() {
    scales = softmax().load_scales(products().stage());
    // Flags of keys that do not exist hold anything.
    constexpr std::uint32_t room = ~(3u << hidden_at);
    scales.flags = (scales.flags & room) | walk.hidden << hidden_at;
  }

  /// P V of the tile before, if there is one, and Q K^T of this tile. P V joins the output while
  /// Q K^T still runs. The turn is still ours then, unless there are three consumers.
  template <bool First>
  QATTN_DEVICE void multiply(Products& s) {
    if constexpr (S::v_parts > 1) {
      products().pingpong_wait();
      if constexpr (!First) products().join_parts();
      isa::wgmma_fence();
      products().multiply_keys(s);
      if constexpr (S::three) products().pingpong_arrive();
      isa::wgmma_wait<0>();
      return;
    }
    Values<0> pv;
    if constexpr (!First && !S::p_in_smem) products().rescale_o();
    products().pingpong_wait();
    isa::wgmma_fence();
    if constexpr (!First) products().template multiply_values<0>(pv);
    products().multiply_keys(s);
    if constexpr (!First && !S::pv_16bit) {
      isa::wgmma_wait<1>();
      products().template add_values<0>(pv);
      isa::sync_warp();  // or ptxas moves the additions behind the next wait
    }
    isa::wgmma_wait<0>();
  }

  /// Among the exponentials, behind group `g`: waits for that product and joins a share of it to
  /// the output. 16-bit P V is in the output already, which shrinks to this tile's reference.
  QATTN_DEVICE void join_overlapped(int g, const Values<0>& pv) {
    if (g == S::tuning.join_after) {
      isa::wgmma_wait<0>();
      products().release();
    }
    const int groups = S::tuning.join_until - S::tuning.join_after, at = g - S::tuning.join_after;
    if (at < 0 || at >= groups) return;
    const int from = S::d_tiles * at / groups, to = S::d_tiles * (at + 1) / groups;
    if constexpr (S::pv_16bit) {
      products().rescale_tiles(from, to);
    } else {
      products().template add_tiles<0>(from, to, pv);
    }
  }

  /// A plain tile's maxima.
  QATTN_DEVICE void start_plain(Products& s, Unmasked& t) {
    softmax().take_maxima(s, 0, t);
    if constexpr (S::halves > 1) softmax().take_maxima(s, 1, t);
    isa::row_maxima<isa::MmaFragment>(t.top);
    if constexpr (!S::u8) softmax().begin_unmasked(t);
  }
  /// Its exponentials.
  template <class Meanwhile>
  QATTN_DEVICE void exponentiate(Products& s, Unmasked& t, Meanwhile meanwhile) {
    softmax().attend_unmasked(s, 0, t, meanwhile);
    if constexpr (S::halves > 1) softmax().attend_unmasked(s, 1, t, meanwhile);
  }

  /// This tile and all that follow it up to one that is not plain. From the products to the end of
  /// the exponentials there is no branch.
  QATTN_DEVICE void attend_plain_tiles(Products& s) {
    while (true) {
      Unmasked t;
      t.x = scales;
      products().release();
      start_plain(s, t);
      exponentiate(s, t, [&](int g, std::uint32_t) {
        if (g == S::tuning.give_after) products().pingpong_arrive();
        if (g == S::tuning.look_after) peek_next_tile();
      });
      softmax().end_unmasked(t);
      products().store_codes();
      next_tile();
      if (!softmax().is_unmasked(walk.tile, scales)) return;  // or there is none
      multiply<false>(s);
    }
  }

  /// As attend_plain_tiles(), with P V of a tile beside the softmax of the next, whose weight and
  /// sums are found while products run.
  QATTN_DEVICE void attend_unmasked_overlapped(Products& s) {
    const auto first = products().first_operands();
    Values<0> pv;  // none is under way
#pragma unroll
    for (auto& x : pv) x = 0;
    weights.settle();
    Unmasked t;
    t.x = scales;
    while (true) {
      start_plain(s, t);
      exponentiate(s, t, [&](int g, std::uint32_t zero) {
        if (g == S::tuning.give_after) products().pingpong_arrive(zero);
        join_overlapped(g, pv);
        if (g == S::tuning.look_after) peek_next_tile();
      });
      products().store_codes();
      if (plain_next) [[likely]] {
        walk.tile -= S::keys;
      } else {
        next_tile();
        if (!softmax().is_unmasked(walk.tile, scales)) break;  // or there is none
      }
      const auto from = products().operands(first);
      products().pingpong_wait();
      isa::wgmma_fence();
      products().multiply_keys(s, from);
      // Between the products ptxas moves fewer accumulators for it: 2 to 3 % (H200).
      softmax().end_unmasked(t);
      if constexpr (!S::pv_16bit) isa::wgmma_fence();
      products().template multiply_values<0>(pv, from);
      t.x = scales;
      if constexpr (!S::u8) isa::sync_warp();  // or ptxas moves more of that behind the wait
      isa::wgmma_wait<1>();
    }
    softmax().end_unmasked(t);
  }

  /// Any other tile.
  QATTN_DEVICE void attend_other_tile(const Products& s) {
    if constexpr (!S::three) products().pingpong_arrive();
    Scales now = scales;
    if (softmax().is_edge(walk.tile, products().stage(), now)) {
      products().release();
      softmax().attend_edge(s, now, walk.tile);
    } else {
      softmax().attend_special(s, now, walk.tile, products().stage());
      products().release();
    }
    if constexpr (S::p_in_smem) products().rescale_o();
    products().store_codes();
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
        bad |= not_finite<S::qk>(
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
      products().wait_full();
      products().pingpong_wait();
      products().pingpong_arrive();
      products().release();
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
    edges().start_rows();
    Products s;
    products().wait_full();
    load_facts();
    multiply<true>(s);
    if constexpr (S::p_in_smem && S::p_over_out) staging.await_room();  // for P
    while (true) {
      if (softmax().is_unmasked(walk.tile, scales)) {
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
    if constexpr (!S::qk_16bit) rules.take_offsets(map, state);
    return_queries(buffer);
    multiply_last();
  }

  /// P V of the last tile.
  QATTN_DEVICE void multiply_last() {
    Values<0> pv;
    if constexpr (!S::p_in_smem) products().rescale_o();
    products().pingpong_wait();
    if constexpr (S::v_parts > 1) {
      products().join_parts();
      products().pingpong_arrive();
      products().release();
      if constexpr (S::e4m3_pv) softmax().scale_all_channels();
    } else {
      isa::wgmma_fence();
      products().template multiply_values<0>(pv);
      if constexpr (S::e4m3_pv) {
        typename Softmax::template ChannelScales<S::d_tiles> scale;  // they arrive meanwhile
        softmax().load_channel_scales(0, scale);
        isa::wgmma_wait<0>();
        products().pingpong_arrive();
        products().release();
        products().template add_values<0>(pv);
        softmax().scale_channels(0, scale);
      } else {
        isa::wgmma_wait<0>();
        products().pingpong_arrive();
        products().release();
        if constexpr (S::u8) products().template add_values<0>(pv);
      }
    }
    if constexpr (S::u8) {
      softmax().replace_lost();
#pragma unroll
      for (int r = 0; r < R; ++r) state.sum[r] += weights.poison;
    }
  }

  /// Q and the work that came with it are read no more.
  QATTN_DEVICE static void return_queries(int buffer) {
    isa::mbarrier_arrive(isa::shared_base() + S::q_empty + 8 * buffer);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
