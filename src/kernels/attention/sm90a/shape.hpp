// What follows from a Hopper kernel's configuration: its formats and sizes, and where everything
// lies in shared memory.
//
// Consumer warpgroups of 64 rows each, one producer; tiles of Sm90Config::keys(). A stage of the
// ring holds K of a tile with its scales and V's tables, and V of the tile before, which is
// multiplied in the same step.
#pragma once

#include "isa/fragment.hpp"
#include "kernels/attention/sm90a/config.hpp"
#include "kernels/operand/copy.hpp"
#include "kernels/operand/prepared.hpp"

namespace qattn::kernels {

/// Formats, sizes and choices, as the common parts of kernels ask for them, too.
template <Sm90Config C>
struct Sm90Sizes {
  using Fragment = isa::MmaFragment;
  using KeyFragment = Fragment;
  static constexpr Sm90Tuning tuning = sm90_tuning(C);
  static constexpr isa::Element qk = C.qk, pv = C.pv;
  static constexpr bool qk_16bit = isa::is_16bit(C.qk), pv_16bit = isa::is_16bit(C.pv);
  static constexpr bool whole_references = false;
  static constexpr bool u8 = C.pv == isa::Element::u8, e4m3_pv = C.pv == isa::Element::e4m3;
  static constexpr bool tile_p = u8;
  static constexpr bool staged_rows = !qk_16bit;  ///< Q's scales come with Q
  static constexpr bool direct_sums = u8, two_row_ends = true, divides = tuning.divides;
  static constexpr bool masks_scores = qk_16bit || (u8 && C.d <= 128);
  /// log2 of what P is scaled by: e4m3's largest code is 448, and below 2^-6 it loses bits.
  static constexpr float p_log2 = e4m3_pv ? 8.0f : 0.0f;
  /// A product whose A lies in registers holds its warp until it has read them. With P in shared
  /// memory it runs beside the softmax of the next tile, and joins the output among its
  /// exponentials. No bit differs but for tuning.serial_sums.
  static constexpr bool p_in_smem = C.p_in_smem;
  static constexpr bool fused_q_quant = C.fused_q_quant;
  static constexpr bool three = C.consumers > 2;

  static constexpr int d = C.d, dv = C.dv(), keys = C.keys();
  static constexpr int consumers = C.consumers, rows = C.rows();
  static constexpr int m_tiles = 1, warp_rows = Fragment::tile_rows;
  static constexpr int n_tiles = keys / Fragment::tile_columns;
  static constexpr int d_tiles = dv / Fragment::tile_columns;
  static constexpr int halves = keys / slot_tile;  ///< prepared V tiles in one of ours
  static constexpr int part_channels = tuning.part_channels;
  static constexpr int v_parts = pv_16bit ? 1 : dv / part_channels;
  static constexpr int out_channels = part_channels;  ///< that leave through shared memory together

  static constexpr int threads = 128 * (consumers + 1), row_warps = 4 * consumers;
  static constexpr int checkers = qk_16bit ? 64 : 0;  ///< threads that test K
  /// Q in 16 bits comes 64 rows at a time, in panels of 64 channels: warps that make its codes, and
  /// rows of each at a time.
  static constexpr int encoders = 3, encoder_rows = 4;
  /// Warps of the producer's warpgroup that take rows from shared memory to the output. Those that
  /// leave in parts would have to wait for them, and Sm90Encoder and Sm90Checker take their warps.
  static constexpr int writers = fused_q_quant || out_channels < dv ? 0 : pv_16bit ? 1 : consumers;

  static_assert(!p_in_smem || (tuning.pingpong && tuning.join_after <= tuning.look_after));
  static_assert(!p_in_smem || (tuning.look_after < n_tiles && tuning.join_until <= n_tiles));
  static_assert(!p_in_smem || (!three && v_parts == 1));
  static_assert(!three || (!pv_16bit && d <= 128));
  static_assert(!fused_q_quant || (!pv_16bit && d <= 128 && !p_in_smem));  // no warps, no room
  static_assert(128 * (consumers * tuning.consumer_registers + tuning.producer_registers) <= 65536);
  static_assert(C.qk_row() % 32 == 0 && dv % 32 == 0);
};

/// Rows, panels and stages in bytes.
template <Sm90Config C>
struct Sm90Panels : Sm90Sizes<C> {
  using Z = Sm90Sizes<C>;

  // A row of Q or K.
  static constexpr int qk_row = C.qk_row(), qk_panel = C.qk_panel();
  static constexpr int qk_panels = (qk_row + qk_panel - 1) / qk_panel;
  static constexpr isa::Swizzle qk_swizzle =
      qk_panel == 64 ? isa::Swizzle::bytes64 : isa::Swizzle::bytes128;
  static constexpr int qk_stride = 8 * qk_panel;  ///< bytes of 8 rows

  // V. Codes: channels are rows of 64 keys; e4m3 has eight more, whose product is the sum of P.
  // 16 bits: keys are rows, in panels of 64 channels.
  static constexpr int v_channels = Z::dv + (Z::e4m3_pv ? 8 : 0);
  static constexpr int v_row = Z::pv_16bit ? sm90_panel : slot_tile;
  static constexpr int v_panels =
      Z::pv_16bit ? (2 * Z::dv + sm90_panel - 1) / sm90_panel : Z::halves;
  static constexpr int v_stride = 8 * v_row;
  static constexpr isa::Swizzle v_swizzle =
      Z::pv_16bit ? isa::Swizzle::bytes128 : isa::Swizzle::bytes64;

  // Bytes of one copy.
  static constexpr TileOffsets record = tile_offsets(Z::dv);
  static constexpr int q_panel_bytes = 64 * qk_panel, q_bytes = qk_panels * q_panel_bytes;
  static constexpr int k_panel_bytes = Z::keys * qk_panel, k_bytes = qk_panels * k_panel_bytes;
  static constexpr int v_bytes =
      Z::pv_16bit ? Z::keys * v_row : v_channels * slot_tile;  ///< a panel
  /// The tables behind V's codes of 64 keys.
  static constexpr int tail_from = record.log;
  static constexpr int tail_bytes = Z::pv_16bit ? 0 : record.bytes - tail_from;
  static constexpr int scale_bytes = Z::qk_16bit ? 0 : 4 * Z::keys;
  static constexpr int key_bytes = k_bytes + scale_bytes + Z::halves * tail_bytes;

  // Inside a stage.
  static constexpr int k_at = 0, v_at = k_bytes, tail_at = v_at + v_panels * v_bytes;
  static constexpr int scale_at = tail_at + Z::halves * tail_bytes;
  static constexpr int stage_bytes = (scale_at + scale_bytes + 1023) / 1024 * 1024;
  // Inside a tail.
  static constexpr int log_at = record.log - tail_from, inverse_at = record.inverse - tail_from;
  static constexpr int flags_at = record.flags - tail_from;

  static constexpr int out_row = tile::padded_row(2 * Z::out_channels);
  /// Q of the next block of rows arrives while this one's last tiles are at work (row-ends.md), but
  /// there is no room for wide rows. Buffer n is consumer n % consumers's.
  static constexpr int q_stages = Z::d > 128 ? 1 : 2, q_buffers = q_stages * Z::consumers;
  static constexpr int dots_at = 64 * 4;  ///< in facts: q . mu
  static constexpr int fact_bytes =
      Z::qk_16bit ? 0 : 2 * dots_at;      ///< of a buffer: Q's scales first
  static constexpr int work_bytes = 128;  ///< room for a WorkTile and its TileRange
  static constexpr int raw_panels = Z::fused_q_quant ? (Z::d + 63) / 64 : 0;
  static constexpr int raw_panel_bytes = 64 * sm90_panel;
  static constexpr int raw_bytes = raw_panels * raw_panel_bytes;
  static constexpr int staged_bytes = Z::writers > 0 ? 32 * Z::consumers : 0;  ///< StagedRows

  /// P of 64 rows, in panels of 128 bytes of each; where the rows leave, if more stages fit so.
  static constexpr int p_row = Z::keys * (Z::pv_16bit ? 2 : 1), p_panel_bytes = 64 * sm90_panel;
  static constexpr bool p_over_out = (Z::pv_16bit && Z::dv > 64) || Z::d > 128;
  static constexpr int p_group_bytes = 64 * (p_over_out ? out_row : p_row);
  static constexpr int p_bytes = Z::p_in_smem && !p_over_out ? Z::consumers * p_group_bytes : 0;
  static_assert(!Z::p_in_smem || p_group_bytes >= 64 * p_row);
};

/// The whole of it: where things begin in shared memory, one behind the other.
template <Sm90Config C>
struct Sm90Shape : Sm90Panels<C> {
  using B = Sm90Panels<C>;

  static constexpr int room = sm90_shared_bytes - B::q_buffers * B::q_bytes - B::raw_bytes -
                              B::p_bytes - B::rows * B::out_row -
                              B::q_buffers * (B::fact_bytes + B::work_bytes) - B::staged_bytes -
                              256;  // barriers
  static constexpr int stages = room / B::stage_bytes < 4 ? room / B::stage_bytes : 4;

  static constexpr int q_at = 0;
  static constexpr int ring_at = q_at + B::q_buffers * B::q_bytes;
  static constexpr int raw_at = ring_at + stages * B::stage_bytes;
  static constexpr int p_at = raw_at + B::raw_bytes;
  static constexpr int out_at = p_at + B::p_bytes;
  static constexpr int facts_at = out_at + B::rows * B::out_row;
  static constexpr int work_at = facts_at + B::q_buffers * B::fact_bytes;
  static constexpr int staged_at = work_at + B::q_buffers * B::work_bytes;
  // Barriers: Q is there, and read, of each buffer; a stage is full, empty, and its V must be
  // cleaned; Q in 16 bits is there; rows for the output are there, and gone, of each consumer.
  static constexpr int q_full = staged_at + B::staged_bytes;
  static constexpr int q_empty = q_full + 8 * B::q_buffers;
  static constexpr int full = q_empty + 8 * B::q_buffers;
  static constexpr int empty = full + 8 * stages;
  static constexpr int unclean = empty + 8 * stages;
  static constexpr int raw_full = unclean + 8 * stages;
  static constexpr int rows_there = raw_full + (B::fused_q_quant ? 8 : 0);
  static constexpr int rows_gone = rows_there + (B::writers > 0 ? 8 * B::consumers : 0);
  static constexpr int shared_bytes = rows_gone + (B::writers > 0 ? 8 * B::consumers : 0);

  static_assert(shared_bytes <= sm90_shared_bytes && stages >= 2);
  static_assert(!B::p_in_smem || (p_at % 1024 == 0 && B::p_group_bytes % 1024 == 0));
  static_assert(B::q_panel_bytes % 1024 == 0 && B::k_panel_bytes % 1024 == 0 &&
                B::v_bytes % 512 == 0);
};

}  // namespace qattn::kernels
