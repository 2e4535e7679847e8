// What the mma.sync prefill kernel is told whose K and V come by TMA.
#pragma once

#include "isa/tensor_map.hpp"
#include "kernels/attention/common/params.hpp"

namespace qattn::kernels {

struct RingParams : AttentionParams {
  /// K, and V of 16 bits: (channels, tokens, heads, sequences), boxes of 64 tokens and a panel
  /// (tile_rows.hpp). Prepared K: the slots are tokens of one sequence. V in codes: (keys, channels
  /// and weights, tiles), boxes of a tile.
  isa::TensorMap k_map, v_map;
};

}  // namespace qattn::kernels
