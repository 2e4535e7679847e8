// Importance of pages from rows of values a block, as the host's page_weight() has it.
#pragma once

#include "kernels/kv_append/params.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

inline constexpr float most_importance = 1e15f;  ///< its square is a float, too

/// Mean over a page's blocks of value(block); blocks at and behind `blocks` do not count. A value
/// that is not from 0 to 1e15 sets `bad`.
template <class Value>
QATTN_DEVICE float page_weight(const kv::DeviceCache& cache, std::int64_t first,
                               std::int64_t blocks, bool& bad, Value value) {
  const std::int64_t begin = first / formats::kv_block_tokens;
  std::int64_t end = begin + cache.blocks_per_page();
  end = end < blocks ? end : blocks;
  float sum = 0.0f;
  for (std::int64_t n = begin; n < end; ++n) {
    const float x = value(n);
    bad |= !(x >= 0.0f && x <= most_importance);
    sum = formats::add_rn(sum, x);
  }
  return end > begin ? formats::div_rn(sum, static_cast<float>(end - begin)) : 0.0f;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
