// What vocabularies without a better way share: a transpose of four-byte packs, sums. Internal
// linkage: every unit keeps its own copy (see avx512.hpp).
#pragma once

#include <cstdint>
#include <cstring>

namespace qattn::isa {

/// 16 rows of `bytes` (a multiple of 4) to [bytes / 4][16][4]; every pack xor `flip`.
static inline void transpose_packs(const std::uint8_t* const* rows, int bytes, std::uint32_t flip,
                                   std::uint8_t* out) {
  for (int t = 0; t < bytes / 4; ++t) {
    for (int i = 0; i < 16; ++i) {
      std::uint32_t pack;
      std::memcpy(&pack, rows[i] + 4 * t, sizeof pack);
      pack ^= flip;
      std::memcpy(out + (t * 16 + i) * 4, &pack, sizeof pack);
    }
  }
}

/// out[i] = reduce_add(a[i]) of eight.
template <class F>
static inline void reduce_add_8(const F* a, float* out) {
  for (int i = 0; i < 8; ++i) out[i] = reduce_add(a[i]);
}

}  // namespace qattn::isa
