// Masks as kernels are told of them: those of attention, and the one that finds hidden keys.
#pragma once

#include <cstdint>

#include "qattn/format.hpp"

namespace qattn::kernels {

/// A tensor that broadcasts to (batch, head, query, key), or fewer of these.
struct BroadcastView {
  const void* data = nullptr;
  Format format = Format::none;
  std::int64_t stride[4] = {0, 0, 0, 0};
};

inline constexpr std::int64_t no_limit = std::int64_t{1} << 62;

/// Which keys queries see, and what is added to scores.
struct MaskParams {
  std::int32_t window_left = -1, window_right = -1;  ///< -1: unlimited
  BroadcastView mask;                                ///< b8, b1 or float
  /// Queries and keys that the mask has. cu_seqlens may name longer sequences.
  std::int64_t mask_queries = no_limit, mask_keys = no_limit;
  BroadcastView block_mask;  ///< b8 per (batch, head, query block, key block)
  std::int32_t block_mask_q = 0, block_mask_k = 0;  ///< tokens per block
};

}  // namespace qattn::kernels
