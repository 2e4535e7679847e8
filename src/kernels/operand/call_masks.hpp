// Which keys rows see, from a call to what a kernel is told: in attention kernels and in the one
// that finds hidden keys.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"
#include "kernels/operand/mask_params.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

inline void tell_masks(const Problem& p, MaskParams& a) {
  const auto window = [](std::int64_t w) {
    return static_cast<std::int32_t>(std::min<std::int64_t>(w, 0x3fffffff));
  };
  a.window_left = window(p.window_left);
  a.window_right = window(p.window_right);
  if (p.mask != MaskKind::none) {
    a.mask.data = p.tensors.mask.data;
    a.mask.format = p.tensors.mask.format;
    std::copy(p.mask_stride.begin(), p.mask_stride.end(), a.mask.stride);
    if (p.mask_stride[2] != 0) a.mask_queries = p.mask_shape[2];
    if (p.mask_stride[3] != 0) a.mask_keys = p.mask_shape[3];
  }
  if (p.block_mask_q > 0) {
    a.block_mask.data = p.tensors.block_mask.data;
    a.block_mask.format = Format::b8;
    std::copy(p.block_mask_stride.begin(), p.block_mask_stride.end(), a.block_mask.stride);
    a.block_mask_q = static_cast<std::int32_t>(p.block_mask_q);
    a.block_mask_k = static_cast<std::int32_t>(p.block_mask_k);
  }
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
