// Which keys a query sees by windows, and which queries see a key: the one home of that rule, for
// kernels and for what plans and schedules them. Masks, and whose token it is, come on top.
#pragma once

#include <cstdint>

#include "isa/constexpr.hpp"

namespace qattn::kernels {

// A query's diagonal is i + Sk - Sq: queries end where keys end. Windows are in tokens; a negative
// one is unlimited. Int: where no sum of the arguments overflows.

/// The first key that the query sees; negative: the sequence's first.
template <class Int>
QATTN_CONSTEXPR Int visible_begin(Int window_left, Int diagonal) {
  return window_left < 0 ? 0 : diagonal - window_left;
}

/// One past the last of `keys`; may lie before the first.
template <class Int>
QATTN_CONSTEXPR Int visible_end(Int window_right, Int diagonal, Int keys) {
  const Int end = window_right < 0 ? keys : diagonal + window_right + 1;
  return end < keys ? end : keys;
}

/// Do all queries from diagonal `first` to diagonal `last` see the keys [begin, end), of `keys`?
/// Bounds of the rows instead, or `keys` as an Int, are numbers more that a loop over tiles keeps:
/// they cost the portable kernel spills.
template <class Windows, class Int>
QATTN_CONSTEXPR bool all_visible(const Windows& p, Int first, Int last, Int begin, Int end,
                                 std::int64_t keys) {
  return end <= keys && (p.window_right < 0 || end <= first + p.window_right + 1) &&
         (p.window_left < 0 || begin >= last - p.window_left);
}

/// The first query that sees key `key`; negative: the sequence's first. `shift`: Sk - Sq.
template <class Int>
QATTN_CONSTEXPR Int first_query(Int window_right, Int key, Int shift) {
  return window_right < 0 ? 0 : key - shift - window_right;
}

/// The last of `queries`.
template <class Int>
QATTN_CONSTEXPR Int last_query(Int window_left, Int key, Int shift, Int queries) {
  const Int last = window_left < 0 ? queries : key - shift + window_left;
  return last < queries ? last : queries - 1;
}

}  // namespace qattn::kernels
