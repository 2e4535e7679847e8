// What a block of the mma.sync prefill kernel (kernel.cuh) holds, and where in shared memory.
#pragma once

#include "isa/fragment.hpp"
#include "isa/gpu.hpp"
#include "kernels/attention/mma/tile_rows.hpp"
#include "kernels/operand/prepared.hpp"

namespace qattn::kernels {

/// Everything that selects code of the kernel.
struct MmaConfig {
  int d = 128;                           ///< padded head dimension of Q, K and V
  isa::Element qk = isa::Element::bf16;  ///< Q and K
  isa::Element pv = isa::Element::bf16;  ///< P and V
  /// false: dense or packed sequences, causal or none, scale > 0, one K scale a tile, V's scale per
  /// token (s8) or one a channel (e4m3). true: everything.
  bool general = false;
  int qk_group = 0, pv_group = 0;  ///< elements that share a scale of the products; 0: none do
  int m_tiles = 2;                 ///< row tiles of a warp
  int rows = 128;                  ///< of a block
  bool scaled_fp8 = false;         ///< e4m3 without groups takes products with scales of 1
  bool lane_sums = false;          ///< lanes add up rows of 16-bit P, not the matrix unit
  /// K and V come by TMA, from a warp of its own, to a ring (ring.cuh). Not general.
  bool ring = false;
  bool operator==(const MmaConfig&) const = default;
};

/// The product with scales for groups of `group` of the element.
constexpr isa::Scaled scaled_product(isa::Element e, int group) {
  return e == isa::Element::e4m3 ? isa::Scaled::mxfp8
         : group == 16           ? isa::Scaled::nvfp4
                                 : isa::Scaled::mxfp4;
}

template <MmaConfig C>
struct MmaShape {
  using Element = isa::Element;
  using Fragment = isa::MmaFragment;
  static constexpr Element qk = C.qk, pv = C.pv;
  static constexpr bool general = C.general, ring = C.ring;
  static constexpr bool qk_16bit = isa::is_16bit(C.qk), pv_16bit = isa::is_16bit(C.pv);
  static constexpr int qk_group = C.qk_group, pv_group = C.pv_group;
  static constexpr bool qk_groups = qk_group > 0, pv_groups = pv_group > 0;
  /// Are there scales in the products, be they all 1?
  static constexpr bool qk_scaled = qk_groups || (C.scaled_fp8 && C.qk == Element::e4m3);
  static constexpr bool pv_scaled = pv_groups || (C.scaled_fp8 && C.pv == Element::e4m3);
  static constexpr isa::Scaled qk_product = scaled_product(C.qk, C.qk_group);
  static constexpr isa::Scaled pv_product = scaled_product(C.pv, C.pv_group);
  /// 4-bit P lies in registers in the order of the keys: K's rows were dealt out for that.
  static constexpr KeyOrder key_order = C.pv == Element::e2m1 ? KeyOrder::fp4 : KeyOrder::natural;
  using KeyFragment =
      std::conditional_t<key_order == KeyOrder::fp4, isa::MmaFragmentOfEights, Fragment>;
  /// In general kernels the second one costs registers: 1196 bytes of spills at D 256 on sm_100.
  static constexpr bool two_row_ends = !C.general, divides = C.general, staged_rows = false;
  static constexpr bool masks_scores = false;
  static constexpr bool u8 = C.pv == Element::u8, e2m1_pv = C.pv == Element::e2m1;
  static constexpr bool e4m3_pv = C.pv == Element::e4m3, lane_sums = C.lane_sums;
  /// Has V a scale a channel for the end, of a sequence?
  static constexpr bool scales_channels = e2m1_pv ? pv_group == 16 : e4m3_pv && !pv_groups;
  static constexpr bool tile_p = u8 || e2m1_pv;  ///< P is relative to its own tile
  static constexpr bool whole_references = pv_16bit, does_blocks_again = C.general;
  /// P V joins the output as floats that it is already (u8_sum_as_float()). Not where
  /// scales per channel stand between: of such small numbers these would cost bits.
  static constexpr bool direct_sums = u8 && !C.general;
  /// Does what follows mended scores have code of its own? Where that was faster on an H100
  /// (docs/experiments/late-references.md).
  static constexpr bool attends_twice = pv_16bit && qk == Element::s8 && C.d == 128 && !C.general;
  /// log2 of what P is scaled by: e4m3's largest code is 448, and below 2^-6 it loses bits.
  static constexpr float p_log2 = e4m3_pv && !pv_groups ? 8.0f : 0.0f;
  static constexpr int d = C.d, dv = d, keys = 64, rows = C.rows;
  static constexpr int m_tiles = C.m_tiles, warp_rows = 16 * m_tiles;
  static constexpr int warps = rows / warp_rows, threads = 32 * warps;
  /// With the warpgroup that fills the ring. Registers go from it to the others, which begin with
  /// 168 each and are threads of two warps a scheduler.
  static constexpr int block_threads = threads + (ring ? 128 : 0);
  static constexpr int producer_registers = 72, row_registers = 216;
  static_assert(!ring || threads == 256);
  static_assert(2 * row_registers + producer_registers <= 3 * 168);
  static constexpr int thread_rows = 2 * m_tiles;  ///< query rows that a thread holds parts of
  static constexpr int n_tiles = keys / 8, d_tiles = C.d / 8;

  static constexpr int qk_bytes = C.d * isa::element_bits(C.qk) / 8;
  static constexpr int v_bits = isa::element_bits(C.pv);
  static constexpr int v_bytes = pv_16bit ? 2 * C.d : keys * v_bits / 8;
  static constexpr int v_rows = pv_16bit ? keys : C.d + (u8 ? 0 : 8);
  using Queries = TileRows<qk_bytes, rows, ring>;
  using Keys = TileRows<qk_bytes, keys, ring>;
  using Values = TileRows<v_bytes, v_rows, ring>;
  /// Buffers of K without a ring: with two, K of the next tile starts with V of this one. Where
  /// that was faster on an H100 and two blocks still fit into the 100 KB of sm_89.
  static constexpr int k_buffers = u8 && C.d == 128 && !C.general && !ring ? 2 : 1;
  // Scales of groups: of Q's and K's rows, of V's channels.
  static constexpr int qk_group_bytes = qk_groups ? (C.d / C.qk_group + 3) / 4 * 4 : 0;
  static constexpr int v_group_bytes = pv_groups ? keys / C.pv_group : 0;
  static constexpr int v_groups_bytes = (v_rows * v_group_bytes + 15) / 16 * 16;
  static constexpr int tail_bytes = pv_16bit ? 0 : 8 * keys + 16;

  // Where there is no ring, Q lies at the base, and K of a tile and all else behind it.
  static constexpr int k_at = ring ? 0 : Queries::bytes, v_at = k_at + k_buffers * Keys::bytes;
  static constexpr int tail_at = v_at + Values::bytes;  ///< log, inverse, flags of a V tile
  static constexpr int tail_end = tail_at + tail_bytes;
  static constexpr int k_groups_at = tail_end + (ring ? 0 : rows * qk_group_bytes);  // Q's first
  static constexpr int v_groups_at = k_groups_at + keys * qk_group_bytes;
  static constexpr int k_scale_at = v_groups_at + v_groups_bytes;
  /// A ring: products of the tile's K with the means of two blocks of Q (smooth_q).
  static constexpr int mean_at = v_groups_at + v_groups_bytes;
  static constexpr int mean_bytes = ring && qk_groups ? 2 * 4 * keys : 0;

  // A ring begins at the base, and these are places within a stage. Q comes to the last stage's
  // place and goes on to registers before a tile does. Behind the stages: scales of Q's groups;
  // marks of bad tokens of 16-bit V, and barriers, of each stage: whether K and V are there, and
  // whether they have been read.
  static constexpr int stage_bytes = (mean_at + mean_bytes + 1023) / 1024 * 1024;
  static constexpr int mark_bytes = pv_16bit ? 4 * keys + 16 : 0;
  static constexpr int room = isa::shared_bytes_of(120) - rows * qk_group_bytes - 32 * 4;
  static constexpr int fit = room / (stage_bytes + mark_bytes), stages = fit < 4 ? fit : 4;
  static constexpr int q_at = ring ? (stages - 1) * stage_bytes : 0;
  static constexpr int q_groups_at = ring ? stages * stage_bytes : tail_end;
  static constexpr int marks_at = q_groups_at + rows * qk_group_bytes;
  static constexpr int k_full = marks_at + stages * mark_bytes, v_full = k_full + 8 * stages;
  static constexpr int k_empty = v_full + 8 * stages, v_empty = k_empty + 8 * stages;
  static_assert(!ring || (stages >= 2 && v_at % 1024 == 0 && !C.general));
  static_assert(!ring || Queries::bytes <= stage_bytes);

  static constexpr int used_bytes = ring                     ? v_empty + 8 * stages
                                    : C.general && !qk_16bit ? k_scale_at + 4 * keys
                                                             : k_scale_at;
  static constexpr int out_channels = C.d;  ///< that leave through shared memory together
  static constexpr int out_row = tile::padded_row(2 * out_channels);
  static_assert(!ring || rows * out_row <= k_full);  // rows that leave spare the barriers
  static constexpr int out_bytes = (rows * out_row + 15) / 16 * 16;
  static constexpr int shared_bytes = out_bytes < used_bytes ? used_bytes : out_bytes;
};

}  // namespace qattn::kernels
