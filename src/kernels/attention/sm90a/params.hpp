// What the Hopper prefill kernel is told, and how its shared memory is laid out.
#pragma once

#include "isa/fragment.hpp"
#include "isa/tensor_map.hpp"
#include "kernels/attention/common/copy.hpp"
#include "kernels/attention/common/params.hpp"
#include "kernels/quantize/overlap/overlap.hpp"

namespace qattn::kernels {

using isa::SharedAddress;

/// A row of 128 bytes is the widest that TMA swizzles and wgmma reads; wider ones lie in panels.
inline constexpr int sm90_panel = 128;
/// Tokens of the smallest pages that TMA reads in place.
inline constexpr int sm90_least_page = 16;

/// Everything that selects code of the Hopper kernel.
struct Sm90Config {
  int d = 128;                         ///< padded head dimension of Q and K: a multiple of 32
  isa::Element qk = isa::Element::s8;  ///< Q and K: s8, e4m3, f16 or bf16
  isa::Element pv = isa::Element::u8;  ///< P and V
  /// Q comes in 16 bits, and the kernel makes its codes, with scales per token. Kernels of their
  /// own, for the code moves ptxas's order of the other warps' loops.
  bool fused_q_quant = false;
  int consumers = 2;      ///< warpgroups of 64 query rows
  bool shared_p = false;  ///< Sm90Shape::shared_p
  int v = 0;              ///< padded head dimension of V; 0: d
  constexpr int dv() const { return v > 0 ? v : d; }
  constexpr int rows() const { return 64 * consumers; }  ///< of a block of work
  /// Of a tile. Wide rows of 16 bits leave room for no more. (Codes of Q and K beside 16-bit V, D
  /// 192 and 128, S 4096, H100: 707 TFLOP/s with 64, 820 with 128.)
  constexpr int keys() const {
    return isa::is_16bit(pv) && (dv() > 128 || (d > 128 && isa::is_16bit(qk))) ? 64 : 128;
  }
  /// Bytes of a row of Q or K, and of the part of one that TMA and wgmma take: what is missing in
  /// the last part is zero, and no product takes it.
  constexpr int qk_row() const { return d * (isa::is_16bit(qk) ? 2 : 1); }
  constexpr int qk_panel() const { return qk_row() <= 64 ? 64 : sm90_panel; }
  bool operator==(const Sm90Config&) const = default;
};

struct Sm90Params : AttentionParams {
  /// Codes: (row bytes, heads * slots). 16 bits, in place: (channels, tokens, heads, sequences).
  /// Boxes of 64 rows of Q and a tile's of K, one panel wide. Q with pack > 1: (row bytes, heads,
  /// slots) and (channels, heads, tokens, sequences), boxes of `pack` heads. Pages of K: (channels,
  /// a page's tokens, heads, pages), boxes of no more tokens than a page has.
  isa::TensorMap q_map, k_map;
  /// Codes: (64 keys, channels, tiles), boxes of one tile. 16 bits: as K.
  isa::TensorMap v_map;
  isa::TensorMap weight_map;  ///< e4m3 V: the eight rows behind the channels
  /// Some feature touches single scores: every tile takes the long way.
  bool general = false;
  isa::Element q_input = isa::Element::bf16;  ///< raw queries, of which q_map is then
  const float* q_factors = nullptr;           ///< theirs: PlainRows::factors
  const std::uint32_t* loud = nullptr;        ///< null: none is balanced
  std::int32_t factor_channels = 0;           ///< padded as codes are, not as this kernel's are
  AwaitedCodes awaited;
};

/// Consumer warpgroups of 64 rows each, one producer; tiles of Sm90Config::keys(). A stage of the
/// ring holds K of a tile with its scales and V's tables, and V of the tile before, which is
/// multiplied in the same step.
template <Sm90Config C>
struct Sm90Shape {
  using Fragment = isa::MmaFragment;
  static constexpr bool qk_16bit = isa::is_16bit(C.qk), pv_16bit = isa::is_16bit(C.pv);
  static constexpr bool staged_rows = !qk_16bit;  ///< Q's scales come with Q
  static constexpr bool u8 = C.pv == isa::Element::u8, e4m3_pv = C.pv == isa::Element::e4m3;
  static constexpr bool direct_sums = u8, two_row_ends = true;
  /// Without the function that divisions call ptxas spills 1024 bytes of u8 P at D 192, not 124 (7
  /// to 11 % slower, H200).
  static constexpr bool divides = u8 && C.dv() == 192;
  /// log2 of what P is scaled by: e4m3's largest code is 448, and below 2^-6 it loses bits.
  static constexpr float p_log2 = e4m3_pv ? 8.0f : 0.0f;
  /// Three consumers hide each other's latencies, in 160 registers each: at D 128 they multiply a
  /// half of V's channels after the other and Q K^T behind both. Then a turn goes on as soon as Q
  /// K^T is under way, and at D 64 nobody waits for one. H200, TFLOP/s beside two consumers, full:
  /// D 64, S 2048, 4096, 16384: u8 P 499 535 598 (474 509 541), e4m3 P 535 573 631 (505 552 589),
  /// and with e4m3 Q and K 584 635 714 (509 579 638); in strict turns 475 508 557, 516 516 566 and
  /// - 578 639. D 128, S 16384: 827 (803), 979 (907), 1018 (971), at 4096 all equal; both halves of
  /// V at once 771 976 968, without turns 834 916 910, and 694 790 840 in strict turns.
  static constexpr bool three = C.consumers > 2, turns = !three || C.d > 64;
  /// P goes to its product through shared memory. A product whose A lies in registers holds its
  /// warp until it has read them; this one runs beside the softmax of the next tile, and joins the
  /// output among its exponentials. No bit differs but for serial_sums. H100, D 128, full, S 1024,
  /// 4096, 16384, TFLOP/s, beside the better of two and three consumers with P in registers: u8 P
  /// 677 818 839 (659 770 814), s8 Q and K with e4m3 P 706 869 887 (680 834 915), e4m3 703 875 897
  /// (695 859 967). 16 bits: host_16bit.cpp.
  static constexpr bool shared_p = C.shared_p;
  /// Rounded P joins a row's sum number by number, not by pairs: with ptxas -O1 bf16 is 6 to 9 %
  /// faster so (H200, D 128, S 4096 and 16384), with P in registers 3 to 10 % slower with -O3.
  static constexpr bool serial_sums = pv_16bit && shared_p;
  /// Maxima of a row's scores as a tree of three-input ones, not a chain: u8 P 2 %, e4m3 P -2 %.
  static constexpr bool tree_maxima = shared_p && u8;
  /// Two groups of exponentials of a row, then two of the other, instead of in turns: u8 P 1 %,
  /// e4m3 1 to 3 %, but e4m3 P beside s8 Q and K -1 to -2 % (H200, D 128, P in shared memory).
  static constexpr bool paired_groups = u8 || (shared_p && C.qk == isa::Element::e4m3);
  /// The groups of exponentials (see exponentiate()) after which the turn is given, and after which
  /// the next tile is looked at. Where ptxas puts these and the rest depends on them, and on all
  /// else: to be tried again after changes. H200, D 128, full, S 4096, TFLOP/s, look after 3, 4, 5,
  /// 6, 7: e4m3 P 905 887 888 (e4m3 Q and K 952 951 899), u8 P 808 809 792 from 5 on. With P in
  /// shared memory the turn after 5 and the look after 10 are best or nearly so but for: u8 P, 6, 8
  /// and join_until 13 beside 8, 11 and 14 (best before V's range was looked at as it is) at S 1024
  /// 2048 4096 16384 1.02 1.02 1.03 1.03, causal 1.005 at 1024, 1.03 at 16384, as are 5 to 7, 8 or
  /// 9, and 12 to 14 nearly (a turn after 9: 0.80 to 0.89); bf16, 5 and 8 beside 4 and 10 causal
  /// 1.01 1.02 1.01 at 1024 2048 4096, full 1.01 at 4096 and 16384; 16-bit P beside codes of Q and
  /// K, where 4 is 1 to 4 % better than 5 to 8. With sums of P before rounding, number by number,
  /// join_until 14 beside 13 is 1.01 of its speed (H100, u8 P, D 128, S 4096 and 16384; 16 more
  /// schedules have 0.75 to 1.0).
  static constexpr int shared_give = u8 && C.d == 128 ? 6 : pv_16bit && !qk_16bit ? 4 : 5;
  static constexpr int give_after = three ? -1 : shared_p ? shared_give : pv_16bit ? 3 : 2;
  /// Three consumers with e4m3 Q and K, after 3, 4, 5, 6, 7, 9: S 8192 892 913 930 936 933 937, S
  /// 16384 965 962 966 973 969 975.
  static constexpr bool late_look = three && C.d == 128 && C.qk == isa::Element::e4m3;
  static constexpr int shared_look = (u8 && C.d == 128) || qk_16bit ? 8 : 10;
  static constexpr int look_after = shared_p       ? shared_look
                                    : pv_16bit     ? 7
                                    : u8 && !three ? 6
                                    : late_look    ? 9
                                                   : 3;
  /// P V of the tile before is waited for behind the first of these groups, if shared_p, and joins
  /// the output among those that follow, up to the last.
  static constexpr int join_after = give_after, join_until = !u8 ? 16 : C.d == 128 ? 14 : 13;
  static_assert(!shared_p || (turns && join_after <= look_after));
  static constexpr int d = C.d, dv = C.dv(), keys = C.keys();
  static constexpr int consumers = C.consumers, rows = C.rows();
  static constexpr int m_tiles = 1, warp_rows = 16, n_tiles = keys / 8, d_tiles = dv / 8;
  static_assert(!shared_p || (look_after < n_tiles && join_until <= n_tiles));
  /// setmaxnreg's; a multiprocessor has 64 Ki.
  static constexpr int consumer_registers = three ? 160 : pv_16bit ? 224 : 240;
  static constexpr int producer_registers = three ? 32 : pv_16bit ? 56 : 24;
  static_assert(128 * (consumers * consumer_registers + producer_registers) <= 65536);
  /// Do consumers learn from the producer when there are no more works, so that blocks may take
  /// what comes? Where other warps have to know, too, all go by the numbers of blocks, and where P
  /// is e4m3, because the loop over tiles is 1 to 3 % slower so (H100, D 128).
  static constexpr bool dynamic_scheduler = u8 && !C.fused_q_quant;
  static_assert(!three || (!pv_16bit && d <= 128));
  static constexpr int threads = 128 * (consumers + 1), row_warps = 4 * consumers;
  static constexpr int checkers = qk_16bit ? 64 : 0;  ///< threads that test K
  static constexpr int halves = keys / slot_tile;     ///< prepared V tiles in one of ours

  // A row of Q or K.
  static constexpr int qk_row = C.qk_row(), qk_panel = C.qk_panel();
  static constexpr int qk_panels = (qk_row + qk_panel - 1) / qk_panel;
  static_assert(qk_row % 32 == 0 && dv % 32 == 0);
  static constexpr isa::Swizzle qk_swizzle =
      qk_panel == 64 ? isa::Swizzle::bytes64 : isa::Swizzle::bytes128;
  static constexpr int qk_stride = 8 * qk_panel;  ///< bytes of 8 rows

  // V. Codes: channels are rows of 64 keys; e4m3 has eight more, whose product is the sum of P.
  // 16 bits: keys are rows, in panels of 64 channels.
  static constexpr int v_channels = dv + (e4m3_pv ? 8 : 0);
  /// P V of so many channels, and what comes with the last, has room beside the output and P; with
  /// more than one part Q K^T waits for all of them. H200, S 4096 full and causal, 1024 causal, 64
  /// channels beside half of them: u8 P, D 192 1.10 1.07 1.08, D 256 1.01 1.03 1.07 (ptxas -O3, and
  /// 0.98 0.98 0.96 with -O1); e4m3 P, D 192 0.92 to 0.98, D 256 0.87 to 1.01.
  static constexpr int part_channels = three || (u8 && dv > 128) ? 64
                                       : dv > 128                ? dv / 2
                                                                 : dv,
                       v_parts = pv_16bit ? 1 : dv / part_channels;
  static constexpr int v_row = pv_16bit ? sm90_panel : slot_tile;
  static constexpr int v_panels = pv_16bit ? (2 * dv + sm90_panel - 1) / sm90_panel : halves;
  static constexpr int v_stride = 8 * v_row;
  static constexpr isa::Swizzle v_swizzle =
      pv_16bit ? isa::Swizzle::bytes128 : isa::Swizzle::bytes64;

  // Bytes of one copy.
  static constexpr TileOffsets record = tile_offsets(dv);
  static constexpr int q_panel_bytes = 64 * qk_panel, q_bytes = qk_panels * q_panel_bytes;
  static constexpr int k_panel_bytes = keys * qk_panel, k_bytes = qk_panels * k_panel_bytes;
  static constexpr int v_bytes = pv_16bit ? keys * v_row : v_channels * slot_tile;  ///< a panel
  /// The tables behind V's codes of 64 keys.
  static constexpr int tail_from = record.log;
  static constexpr int tail_bytes = pv_16bit ? 0 : record.bytes - tail_from;
  static constexpr int scale_bytes = qk_16bit ? 0 : 4 * keys;
  static constexpr int key_bytes = k_bytes + scale_bytes + halves * tail_bytes;

  // Inside a stage.
  static constexpr int k_at = 0, v_at = k_bytes, tail_at = v_at + v_panels * v_bytes;
  static constexpr int scale_at = tail_at + halves * tail_bytes;
  static constexpr int stage_bytes = (scale_at + scale_bytes + 1023) / 1024 * 1024;
  // Inside a tail.
  static constexpr int log_at = record.log - tail_from, inverse_at = record.inverse - tail_from;
  static constexpr int flags_at = record.flags - tail_from;

  static constexpr int out_channels = part_channels;  ///< that leave through shared memory together
  static constexpr int out_row = tile::padded_row(2 * out_channels);
  /// Q of the next block of rows arrives while this one's last tiles are at work: with one buffer
  /// the consumers waited 2000 clocks for it (H200), but there is no room for wide rows. Buffer n
  /// is consumer n % consumers's.
  static constexpr int q_stages = d > 128 ? 1 : 2, q_buffers = q_stages * consumers;
  static constexpr int dots_at = 64 * 4;                         ///< in facts: q . mu
  static constexpr int fact_bytes = qk_16bit ? 0 : 2 * dots_at;  ///< of a buffer: Q's scales first
  static constexpr int work_bytes = 128;  ///< room for a WorkTile and its TileRange
  /// Q in 16 bits comes 64 rows at a time, in panels of 64 channels. 16-bit V needs the warps, and
  /// D 256 has no room.
  static constexpr bool fused_q_quant = C.fused_q_quant;
  static_assert(!fused_q_quant || (!pv_16bit && d <= 128 && !shared_p));
  static constexpr int encoders = 3, encoder_rows = 4;  ///< warps; rows of each at a time
  static constexpr int raw_panels = fused_q_quant ? (d + 63) / 64 : 0;
  static constexpr int raw_panel_bytes = 64 * sm90_panel;
  static constexpr int raw_bytes = raw_panels * raw_panel_bytes;
  /// Warps of the producer's warpgroup that take rows from shared memory to the output. Consumers
  /// took 1050 clocks of 22000 at S 1024 (H200, D 128). Those that leave in parts would have to
  /// wait for them, and Sm90Encoder and Sm90Checker take their warps.
  static constexpr int writers = fused_q_quant || out_channels < dv ? 0 : pv_16bit ? 1 : consumers;
  static constexpr int staged_bytes = writers > 0 ? 32 * consumers : 0;  ///< StagedRows
  static constexpr int q_at = 0, ring_at = q_at + q_buffers * q_bytes;
  static constexpr int limit = 232448;  ///< sm_90 has 227 KiB a block
  /// P of 64 rows, in panels of 128 bytes of each; where the rows leave, if more stages fit so.
  static constexpr int p_row = keys * (pv_16bit ? 2 : 1), p_panel_bytes = 64 * sm90_panel;
  static constexpr bool p_over_out = (pv_16bit && dv > 64) || d > 128;
  static constexpr int p_group_bytes = 64 * (p_over_out ? out_row : p_row);
  static constexpr int p_bytes = shared_p && !p_over_out ? consumers * p_group_bytes : 0;
  static_assert(!shared_p || (!three && v_parts == 1 && p_group_bytes >= 64 * p_row));
  static constexpr int room = limit - ring_at - raw_bytes - p_bytes - rows * out_row -
                              q_buffers * (fact_bytes + work_bytes) - staged_bytes - 256;
  static constexpr int stages = room / stage_bytes < 4 ? room / stage_bytes : 4;
  static constexpr int raw_at = ring_at + stages * stage_bytes, p_at = raw_at + raw_bytes;
  static constexpr int out_at = p_at + p_bytes;
  static constexpr int facts_at = out_at + rows * out_row;
  static constexpr int work_at = facts_at + q_buffers * fact_bytes;
  static constexpr int staged_at = work_at + q_buffers * work_bytes;
  static constexpr int barriers_at = staged_at + staged_bytes;
  // Barriers: Q full and empty per buffer; per stage full, empty, V that must be cleaned is there;
  // Q in 16 bits is there; rows for the output are there, and gone.
  static constexpr int q_full = barriers_at, q_empty = q_full + 8 * q_buffers;
  static constexpr int full = q_empty + 8 * q_buffers, empty = full + 8 * stages;
  static constexpr int unclean = empty + 8 * stages;
  static constexpr int raw_full = unclean + 8 * stages;
  static constexpr int rows_there = raw_full + (fused_q_quant ? 8 : 0);  // of each consumer
  static constexpr int rows_gone = rows_there + (writers > 0 ? 8 * consumers : 0);
  static constexpr int shared_bytes = rows_gone + (writers > 0 ? 8 * consumers : 0);
  static_assert(shared_bytes <= limit && stages >= 2);
  static_assert(!shared_p || (p_at % 1024 == 0 && p_group_bytes % 1024 == 0));
  static_assert(q_panel_bytes % 1024 == 0 && k_panel_bytes % 1024 == 0 && v_bytes % 512 == 0);
};

}  // namespace qattn::kernels
