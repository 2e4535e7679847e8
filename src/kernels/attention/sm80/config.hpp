// Everything that selects code of the portable kernel.
#pragma once

#include "kernels/attention/mma/shape.hpp"

namespace qattn::kernels {

struct Sm80Config {
  int d = 128;                           ///< padded head dimension of Q, K and V
  isa::Element qk = isa::Element::bf16;  ///< Q and K
  isa::Element pv = isa::Element::bf16;  ///< P and V
  bool general = false;                  ///< MmaConfig
  bool operator==(const Sm80Config&) const = default;
};

/// 32 rows a warp, or 16 where 255 registers hold no more.
constexpr MmaConfig mma_config(const Sm80Config& c) {
  MmaConfig m{c.d, c.qk, c.pv, c.general};
  m.m_tiles = c.d > 128 ? 1 : 2;
  m.rows = c.d > 128 ? 64 : 128;
  return m;
}

}  // namespace qattn::kernels
