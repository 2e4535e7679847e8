// The products of the Hopper prefill kernel's consumers, and what they wait for: stages of the ring
// and turns.
#pragma once

#include "kernels/attention/common/ring.hpp"
#include "kernels/attention/rows/register_output.cuh"
#include "kernels/attention/sm90a/shape.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Where a part of V's channels ends.
template <class S>
QATTN_CONSTEXPR int part_end(int part) {
  return part + 1 < S::v_parts ? (part + 1) * S::part_channels : S::v_channels;
}
/// P V of a tile and a part of the channels, that does not go straight to the output.
template <class S, int Part>
using Sm90Values =
    isa::Accumulator<S::pv>[S::pv_16bit ? 1 : (part_end<S>(Part) - Part * S::part_channels) / 2];

/// `Kernel`: Sm90Consumer.
template <class Kernel>
struct Sm90Products {
  using S = typename Kernel::S;
  using Products = typename Kernel::Products;
  static constexpr int R = Kernel::R;
  template <int Part>
  using Values = Sm90Values<S, Part>;

  Kernel& k;

  // ---- The ring -------------------------------------------------------------------------------

  QATTN_DEVICE SharedAddress stage() const {
    return k.base + S::ring_at + k.place.stage * S::stage_bytes;
  }
  QATTN_DEVICE void wait_full() {
    isa::mbarrier_wait(k.base + S::full + 8 * k.place.stage, k.place.parity);
  }
  /// This thread reads the stage no more. One arrival a warp behind its barrier is no faster
  /// (H200), and compute-sanitizer does not follow it.
  QATTN_DEVICE void release() {
    isa::mbarrier_arrive(k.base + S::empty + 8 * k.place.stage);
    k.place.advance();
  }

  // ---- Operands -------------------------------------------------------------------------------

  /// Descriptors of what a step multiplies.
  struct Operands {
    std::uint64_t q, k, p, v;
  };
  /// A descriptor of what lies 16 n bytes behind. Only its low half changes, and additions without
  /// a carry are fewer. Kernels with P in registers were not measured so.
  QATTN_DEVICE static std::uint64_t behind(std::uint64_t descriptor, int n) {
    if constexpr (!S::p_in_smem) return descriptor + n;
    return descriptor >> 32 << 32 |
           (static_cast<std::uint32_t>(descriptor) + static_cast<std::uint32_t>(n));
  }
  QATTN_DEVICE static std::uint64_t opaque(std::uint64_t descriptor) {
    const int low = isa::opaque(static_cast<int>(static_cast<std::uint32_t>(descriptor)));
    return descriptor >> 32 << 32 | static_cast<std::uint32_t>(low);
  }
  /// Those of stage 0. Opaque, or they are worked out again between one product and the next, where
  /// each instruction waits 20 to 35 clocks for the other consumer's (H100, sampled): 2 to 3 %.
  QATTN_DEVICE Operands first_operands() const {
    return {opaque(k.q_descriptor), opaque(k.k_descriptor), opaque(k.p_descriptor),
            opaque(k.v_descriptor)};
  }
  /// Those of this stage.
  QATTN_DEVICE Operands operands(const Operands& first) const {
    const int at = k.place.stage * (S::stage_bytes / 16);
    return {first.q, behind(first.k, at), first.p, behind(first.v, at)};
  }
  QATTN_DEVICE Operands operands() const {
    return operands({k.q_descriptor, k.k_descriptor, k.p_descriptor, k.v_descriptor});
  }

  // ---- Products -------------------------------------------------------------------------------

  QATTN_DEVICE void multiply_keys(Products& s) { multiply_keys(s, operands()); }
  QATTN_DEVICE void multiply_keys(Products& s, const Operands& from) {
#pragma unroll
    for (int step = 0; step < S::qk_row / 32; ++step) {
      const int panel = 32 * step / S::qk_panel, in_panel = 2 * step - panel * S::qk_panel / 16;
      isa::wgmma<S::qk, S::qk, S::keys>(s, behind(from.q, panel * S::q_panel_bytes / 16 + in_panel),
                                        behind(from.k, panel * S::k_panel_bytes / 16 + in_panel),
                                        step > 0);
    }
    isa::wgmma_commit();
  }

  /// V of the tile before, which lies in this stage.
  template <int Part>
  QATTN_DEVICE void multiply_values(Values<Part>& pv) {
    multiply_values<Part>(pv, operands());
  }
  template <int Part>
  QATTN_DEVICE void multiply_values(Values<Part>& pv, const Operands& operands) {
    constexpr int first = Part * S::part_channels, channels = part_end<S>(Part) - first;
    const std::uint64_t v = behind(operands.v, first * S::v_row / 16);
    if constexpr (S::pv_16bit) {
      auto& sums = reinterpret_cast<float (&)[S::dv / 2]>(k.output.o);
#pragma unroll
      for (int step = 0; step < S::keys / 16; ++step) {
        const std::uint64_t from = behind(v, step * 16 * S::v_row / 16);
        if constexpr (S::p_in_smem) {
          isa::wgmma<S::pv, S::pv, S::dv, false, true>(sums, p_step(operands.p, step), from, true);
        } else {
          isa::wgmma<S::pv, S::pv, S::dv, true>(sums, k.weights.codes[step], from, true);
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < S::keys / 32; ++step) {
        const std::uint64_t from = behind(v, (step / 2 * S::v_bytes + step % 2 * 32) / 16);
        if constexpr (S::p_in_smem) {
          isa::wgmma<S::pv, S::pv, channels>(pv, p_step(operands.p, step), from, step > 0);
        } else {
          isa::wgmma<S::pv, S::pv, channels>(pv, k.weights.codes[step], from, step > 0);
        }
      }
    }
    isa::wgmma_commit();
  }

  // ---- P in shared memory (S::p_in_smem) --------------------------------------------------------

  /// This warpgroup's P.
  QATTN_DEVICE SharedAddress p_base() const {
    return k.base + S::p_at + k.group * S::p_group_bytes;
  }
  /// The 32 bytes of its rows that one product takes.
  QATTN_DEVICE static std::uint64_t p_step(std::uint64_t p, int step) {
    return behind(p, step / 4 * (S::p_panel_bytes / 16) + step % 4 * 2);
  }
  /// Takes P of a tile to where products read it, once the warpgroup has met in pingpong_wait();
  /// none that read the P before may be under way.
  QATTN_DEVICE void store_codes() const {
    if constexpr (S::p_in_smem) {
      constexpr int steps = S::p_row / 32;
      const int row = k.map.warp % 4 * S::warp_rows + k.map.lane % 16, half = k.map.lane / 16;
      const SharedAddress first = p_base() + row * sm90_panel + ((half ^ row % 8) << 4);
      SharedAddress to[steps];
#pragma unroll
      for (int i = 0; i < steps; ++i) to[i] = (first ^ i % 4 << 5) + i / 4 * S::p_panel_bytes;
      isa::store_matrix(to, k.weights.codes);
    }
  }
  /// Waits until the warpgroup's products have ended in all its warps: rows leave where P was. The
  /// barrier is the one behind those of turns.
  QATTN_DEVICE void end_products() const {
    if constexpr (S::p_in_smem && S::p_over_out) {
      isa::barrier_sync(turn_of(S::consumers + k.group), 128);
    }
  }

  // ---- P V and the output ---------------------------------------------------------------------

  /// What must happen to the output before P V joins it in the matrix unit.
  QATTN_DEVICE void rescale_o() {
    if constexpr (S::pv_16bit) rescale_tiles(0, S::d_tiles);
  }
  QATTN_DEVICE void rescale_tiles(int from, int to) {
#pragma unroll
    for (int n = from; n < to; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) k.output.o[0][n][i] *= k.weights.rescale[i / 2];
    }
  }

  /// Joins P V to the output, and to the row sums what its product has of them.
  template <int Part>
  QATTN_DEVICE void add_values(const Values<Part>& pv) {
    add_tiles<Part>(0, S::part_channels / 8, pv);
  }
  /// That of some of the part's tiles of eight channels.
  template <int Part>
  QATTN_DEVICE void add_tiles(int from, int to, const Values<Part>& pv) {
    static_assert(!S::pv_16bit);
    constexpr int first = Part * S::part_channels / 8, tiles = S::part_channels / 8;
#pragma unroll
    for (int n = from; n < to; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = k.output.o[0][first + n][i];
        if constexpr (S::u8) {
          x = fmaf(u8_sum_as_float<S>(pv[4 * n + i]), k.weights.share[i / 2], x);
        } else {
          x = fmaf(x, k.weights.rescale[i / 2], isa::to_float(pv[4 * n + i]));
        }
      }
    }
    if constexpr (S::e4m3_pv && Part + 1 == S::v_parts) {
      // Columns 0 and 1 behind the channels lie in lane t = 0; only 0 is not zero.
      if (to < tiles) return;
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const auto* total = pv + 4 * tiles + 2 * r;
        k.state.sum[r] = fmaf(k.state.sum[r], k.weights.rescale[r], total[0] + total[1]);
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

  /// Where P lies in shared memory this is also the barrier between its stores and its product.
  QATTN_DEVICE void pingpong_wait() {
    if constexpr (S::p_in_smem) isa::fence_async_proxy();
    if constexpr (S::tuning.pingpong) isa::barrier_sync(turn_of(k.group), turn_threads);
  }
  /// `zero`: no_sign().
  QATTN_DEVICE void pingpong_arrive(std::uint32_t zero = 0) {
    if constexpr (S::tuning.pingpong) {
      const int next = turn_of(k.group + 1 < S::consumers ? k.group + 1 : 0);
      isa::barrier_arrive(next + static_cast<int>(zero), turn_threads);
    }
  }
  /// A barrier of those who have the turn and those who get it.
  QATTN_DEVICE static int turn_of(int group) { return 1 + group; }
  static constexpr int turn_threads = 256;
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
