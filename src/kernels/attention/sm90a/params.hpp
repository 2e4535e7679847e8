// What the Hopper prefill kernel is told.
#pragma once

#include "isa/tensor_map.hpp"
#include "kernels/attention/common/params.hpp"
#include "kernels/attention/sm90a/shape.hpp"
#include "kernels/operand/awaited_codes.hpp"

namespace qattn::kernels {

using isa::SharedAddress;

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

}  // namespace qattn::kernels
