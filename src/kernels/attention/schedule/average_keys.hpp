// How many keys rows see, as far as a plan can tell: what costs and splits are reckoned from.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"

namespace qattn::detail {

/// Keys that a block of `rows` queries can see, at most.
inline std::int64_t visible_keys(const Problem& p, std::int64_t rows) {
  if (p.window_left < 0 || p.window_right < 0) return p.max_k;
  // No sum of these overflows: windows are compared with the keys first.
  const std::int64_t left = std::min(p.window_left, p.max_k);
  return std::min(p.max_k, left + std::min(p.window_right, p.max_k) + rows);
}

/// Do most rows see fewer keys than there are, since they end at the diagonal or near it?
inline bool ends_at_diagonal(const Problem& p) {
  return p.window_right >= 0 && p.window_right < p.max_k / 2;
}

/// Keys that a row sees, on average.
inline std::int64_t average_keys(const Problem& p) {
  const std::int64_t average = p.max_k - (ends_at_diagonal(p) ? std::min(p.max_q, p.max_k) / 2 : 0);
  return std::min(average, visible_keys(p, 1));
}

}  // namespace qattn::detail
