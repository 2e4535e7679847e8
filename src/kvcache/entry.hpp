// Page tables, for the host and for kernels.
#pragma once

#include <cstdint>

#include "formats/hd.hpp"
#include "formats/kv/layout.hpp"

namespace qattn::kv {

/// One page of one (sequence, layer, KV head). Entries are ordered by `first`; several may share it
/// in files of earlier versions, which left a page that was cut in a tier as it was (no live bit is
/// in two).
struct Entry {
  std::int32_t page = 0;   ///< in its tier's pool
  std::int32_t first = 0;  ///< position of its first token, a multiple of page_size
  std::uint64_t live = 0;  ///< bit i: token first + i is here and not evicted
  float importance = 0;    ///< mass on a block of 16 tokens; negative: nothing is known
  std::uint8_t tier = 0;   ///< 0: 16 bits; i: options.tiers[i - 1]
  std::uint8_t path = 0;   ///< bit i - 1: its codes went through tier i; of 16 bits: 0
  std::uint8_t guess = 0;  ///< 1: importance is key_norm's, which the first mass replaces
  std::uint8_t set = 0;    ///< of means and powers of two that its codes are of; of 16 bits: 0

  QATTN_HD int tokens() const { return __builtin_popcountll(live); }
};
static_assert(sizeof(Entry) == 24);

/// Blocks of a page that have a token alive.
QATTN_HD int live_blocks(const Entry& e) {
  int blocks = 0;
  for (std::uint64_t live = e.live; live != 0; live >>= formats::kv_block_tokens) {
    blocks += (live & 0xffffu) != 0 ? 1 : 0;
  }
  return blocks;
}

/// Tokens [begin, end) of the page whose first token is page_first, as live bits.
QATTN_HD std::uint64_t live_bits(std::int64_t begin, std::int64_t end, std::int64_t page_first,
                                 std::int64_t page_size) {
  const std::int64_t low = begin > page_first ? begin - page_first : 0;
  const std::int64_t high = end - page_first < page_size ? end - page_first : page_size;
  if (high <= low) return 0;
  const std::uint64_t below = low == 0 ? 0 : ~std::uint64_t{0} >> (64 - low);
  return (~std::uint64_t{0} >> (64 - high)) & ~below;
}

}  // namespace qattn::kv
