// Everything that selects code of the Hopper kernel.
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

}  // namespace qattn::kernels
