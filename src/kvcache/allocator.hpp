// Which pages go to which tier. The expected squared error of the output is the sum over pages of
// importance * distortion, and pages only move to worse tiers. An error of one token's V, or of its
// score, enters the output times its probability: were importance what queries to come put on a
// page, its square would count. It is what earlier ones put there, a guess, and the guess itself
// predicts better than its square (docs/NUMERICS.md). Starting from where every page is, the
// allocator demotes by the least error a byte freed until the bytes fit, taking steps of each
// page's lower convex hull: the best possible up to the last step. Ties go to the page that comes
// first.
//
// Pure functions of numbers, without the cache: the same on a device.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvcache/prices.hpp"
#include "qattn/kv_cache.hpp"

namespace qattn::kv {

/// Mean squared error of a tier on N(0,1) values, K's and V's added (docs/NUMERICS.md).
double distortion(const KvTier& tier);

/// page_bytes[i]: of a page of tier i + 1, what its table entry takes included; descending.
Prices make_prices(std::span<const KvTier> tiers, std::span<const std::int64_t> page_bytes,
                   float hysteresis);

struct Allocation {
  std::vector<std::uint8_t> tier;  ///< for every candidate; never below its own
  std::int64_t bytes = 0;          ///< of all candidates in these tiers
  bool fits = false;
};

/// With `allowed` < 0 there is no budget. Candidates of tier 0 move to tier 1 at least.
Allocation allocate(std::span<const Candidate> pages, std::span<const KvTier> tiers,
                    std::span<const std::int64_t> page_bytes, std::int64_t allowed,
                    float hysteresis);

}  // namespace qattn::kv
