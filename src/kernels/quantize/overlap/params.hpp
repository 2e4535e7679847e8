// What the kernel is told that makes codes beside attention on them (operand/overlap.hpp).
#pragma once

#include <cstdint>

#include "isa/tensor_map.hpp"
#include "kernels/operand/overlap.hpp"
#include "kernels/quantize/gpu/plain_params.hpp"

namespace qattn::kernels {

/// Jobs are tiles of 64 tokens of an operand. Those of a unit, which is a KV head of a sequence
/// with its query heads: first sums of K, where it has a mean, then codes, of K last. Sums are made
/// some units ahead, since the last of them is waited for.
struct OverlapParams {
  PlainParams plain;
  isa::TensorMap raw[3];    ///< Q, K, V: (channels, tokens, heads, sequences), boxes of 64 by 64
  float* k_mean = nullptr;  ///< null: nothing is subtracted
  std::int32_t units = 0, ahead = 0, group = 1;
  std::int32_t k_tiles = 0, q_tiles = 0;  ///< of a head of a sequence
  std::int32_t sums = 0, codes = 0;       ///< jobs of a unit
  /// Zeros at first. [0]: chunks of jobs that somebody has taken; [1]: works of attention; then of
  /// each unit: sums that are there, is its mean there? and codes that are there.
  std::uint32_t* progress = nullptr;
  static constexpr int first_word = 4, chunk = 2;
  enum Word { sums_there, mean_there, codes_there };
};

}  // namespace qattn::kernels
