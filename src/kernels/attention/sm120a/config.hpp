// Everything that selects code of the kernels for GeForce Blackwell, and what follows from it.
#pragma once

#include <type_traits>

#include "kernels/attention/mma/ring_params.hpp"
#include "kernels/attention/mma/shape.hpp"

namespace qattn::kernels {

struct Sm120Config {
  int d = 128;  ///< padded head dimension of Q, K and V
  /// Elements of Q and K, and how many share a scale of the products; 0: e4m3 and s8 with scales
  /// beside them.
  isa::Element qk = isa::Element::e2m1;
  int qk_group = 16;
  isa::Element pv = isa::Element::e2m1;  ///< P and V
  int pv_group = 16;
  bool general = false;  ///< MmaConfig
  bool operator==(const Sm120Config&) const = default;
};

/// Eight warps of 16 rows: beside the products of one, a second one of its scheduler rounds P.
constexpr MmaConfig mma_config(const Sm120Config& c) {
  MmaConfig m{c.d, c.qk, c.pv, c.general};
  m.qk_group = c.qk_group, m.pv_group = c.pv_group;
  m.m_tiles = 1, m.rows = 128;
  m.scaled_fp8 = true;
  m.ring = m.lane_sums = !c.general;
  return m;
}

/// What a kernel is told.
template <Sm120Config C>
using Sm120Params = std::conditional_t<mma_config(C).ring, RingParams, AttentionParams>;

}  // namespace qattn::kernels
