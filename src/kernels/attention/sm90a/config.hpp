// Everything that selects code of the Hopper kernel, and its choices that change no result,
// only time (but for `serial_sums`, a rounding).
#pragma once

#include "isa/isa.hpp"

namespace qattn::kernels {

/// A row of 128 bytes is the widest that TMA swizzles and wgmma reads; wider ones lie in panels.
inline constexpr int sm90_panel = 128;
/// Tokens of the smallest pages that TMA reads in place.
inline constexpr int sm90_least_page = 16;
/// Bytes of shared memory that a block may have.
inline constexpr int sm90_shared_bytes = 232448;

struct Sm90Config {
  int d = 128;                         ///< padded head dimension of Q and K: a multiple of 32
  isa::Element qk = isa::Element::s8;  ///< Q and K: s8, e4m3, f16 or bf16
  isa::Element pv = isa::Element::u8;  ///< P and V
  /// Q comes in 16 bits, and the kernel makes its codes, with scales per token. Kernels of their
  /// own, for the code moves ptxas's order of the other warps' loops.
  bool fused_q_quant = false;
  int consumers = 2;       ///< warpgroups of 64 query rows
  bool p_in_smem = false;  ///< P goes to its product through shared memory
  int v = 0;               ///< padded head dimension of V; 0: d
  constexpr int dv() const { return v > 0 ? v : d; }
  constexpr int rows() const { return 64 * consumers; }  ///< of a block of work
  /// Of a tile. Wide rows of 16 bits leave room for no more.
  constexpr int keys() const {
    return isa::is_16bit(pv) && (dv() > 128 || (d > 128 && isa::is_16bit(qk))) ? 64 : 128;
  }
  /// Bytes of a row of Q or K, and of the part of one that TMA and wgmma take: what is missing in
  /// the last part is zero, and no product takes it.
  constexpr int qk_row() const { return d * (isa::is_16bit(qk) ? 2 : 1); }
  constexpr int qk_panel() const { return qk_row() <= 64 ? 64 : sm90_panel; }
  bool operator==(const Sm90Config&) const = default;
};

// ---- Tuning -------------------------------------------------------------------------------------

// Each choice was measured: docs/experiments/schedules-by-the-dozen.md and the pages named below.
// Where ptxas puts a tile's instructions depends on all of them, and on all else: to be tried again
// after changes.

struct Sm90Tuning {
  /// Consumers take turns at the tensor cores. Three at D 64 wait for none (three-consumers.md).
  bool pingpong;
  /// Groups of exponentials (exponentiate()) after which the turn is given, -1: at once, and after
  /// which the next tile is looked at.
  int give_after, look_after;
  /// P in shared memory: P V of the tile before is waited for behind the first of these groups, and
  /// joins the output among those that follow, up to the last (p-in-shared-memory.md).
  int join_after, join_until;
  /// Maxima of a row's scores as a tree of three-input ones, not a chain.
  bool tree_maxima;
  /// Two groups of exponentials of a row, then two of the other, instead of in turns.
  bool paired_groups;
  /// Rounded P joins a row's sum number by number, not by pairs.
  bool serial_sums;
  /// Rows end by divisions. Without the function that these call ptxas spills eight times as much
  /// of u8 P at D 192 (row-ends.md).
  bool divides;
  /// Channels of V that are multiplied at a time: what has room beside the output and P. With more
  /// than one part Q K^T waits for all of them (v-channels-in-parts.md).
  int part_channels;
  /// setmaxnreg's; a multiprocessor has 64 Ki.
  int consumer_registers, producer_registers;
  /// Blocks take work as it comes, and consumers learn from the producer when there is no more.
  /// Where other warps have to know, too, all go by the numbers of blocks, and where P is e4m3,
  /// whose loop over tiles is slower so.
  bool dynamic_scheduler;
};

constexpr Sm90Tuning sm90_tuning(const Sm90Config& c) {
  using isa::Element;
  const bool u8 = c.pv == Element::u8, pv_16bit = isa::is_16bit(c.pv);
  const bool qk_16bit = isa::is_16bit(c.qk), three = c.consumers > 2, smem = c.p_in_smem;
  const bool u8_128 = u8 && c.d == 128, e4m3_three = three && c.d == 128 && c.qk == Element::e4m3;
  Sm90Tuning t{};
  t.pingpong = !three || c.d > 64;
  if (smem) {
    t.give_after = u8_128 ? 7 : pv_16bit && !qk_16bit ? 4 : 5;
    t.look_after = u8_128 || qk_16bit ? 8 : 10;
  } else {
    t.give_after = pv_16bit ? 3 : 2;
    t.look_after = pv_16bit ? 7 : u8 && !three ? 6 : e4m3_three ? 9 : 3;
  }
  if (three) t.give_after = -1;
  t.join_after = t.give_after;
  t.join_until = !u8 ? 16 : 13;
  t.tree_maxima = smem && u8;
  t.paired_groups = u8 || (smem && c.qk == Element::e4m3);
  t.serial_sums = pv_16bit && smem;
  t.divides = u8 && c.dv() == 192;
  t.part_channels = three || (u8 && c.dv() > 128) ? 64 : c.dv() > 128 ? c.dv() / 2 : c.dv();
  t.consumer_registers = three ? 160 : pv_16bit ? 224 : 240;
  t.producer_registers = three ? 32 : pv_16bit ? 56 : 24;
  t.dynamic_scheduler = u8 && !c.fused_q_quant;
#if defined(QATTN_SM90_TUNING)  // tools/tune_sm90.py tries others
  QATTN_SM90_TUNING(t);
#endif
  return t;
}

}  // namespace qattn::kernels
