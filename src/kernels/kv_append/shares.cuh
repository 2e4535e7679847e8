// Pages that tables of several slots hold. A page counts the tables beyond the first that hold it,
// so that pages that are free or have one holder, nearly all, are taken and given back without a
// look at the counts. A slot holds a page once: its pages' counts lie at different places.
#pragma once

#include "kernels/kv_append/params.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// What is left of a count after one more holder than there were has let go.
inline constexpr std::uint32_t no_holder = ~std::uint32_t{0};

QATTN_DEVICE std::uint32_t* share_count(const kv::AppendState& state, int tier, std::int32_t page) {
  return state.shares[tier] + page;
}
/// Does another table hold the page, too?
QATTN_DEVICE bool is_shared(const kv::AppendState& state, int tier, std::int32_t page) {
  return isa::load_global(share_count(state, tier, page)) != 0;
}

/// Pages that nobody holds any more, to the end of a pool's free ones in the order of the lanes.
/// (warp)
QATTN_DEVICE int push_free(const kv::AppendState& state, int tier, kv::Ring& ring, bool mine,
                           std::int32_t page) {
  const std::uint32_t all = isa::ballot(mine);
  if (mine) {
    const int rank = __builtin_popcount(all & ((1u << isa::lane()) - 1));
    const std::int64_t place = state.ring_place(tier, std::int64_t{ring.head} + ring.count + rank);
    isa::store_global(state.free_pages[tier] + place, page);
  }
  const int pushed = __builtin_popcount(all);
  ring.count += pushed;
  return pushed;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
