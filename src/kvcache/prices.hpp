// What the allocator knows of pages, for the host and for kernels: what a demotion costs, and in
// which order doubles are added, so that both choose the same tiers.
#pragma once

#include <cstdint>

#include "formats/bits.hpp"
#include "formats/hd.hpp"

namespace qattn::kv {

struct Candidate {
  float importance = 0;
  std::uint8_t tier = 0;   ///< 0: still in 16 bits and about to be quantised
  std::uint8_t path = 0;   ///< tiers that its codes went through, bit i - 1 for tier i
  std::uint16_t kind = 0;  ///< what an append on a device makes of the page
};

struct Prices {
  static constexpr int most_tiers = 7;
  std::int32_t tiers = 0;
  std::int64_t bytes[most_tiers] = {};  ///< of a page of tier i + 1, its table entry included
  double distortion[most_tiers] = {};
  double anchored = 1;  ///< 1 + hysteresis

  QATTN_HD std::int64_t bytes_of(int tier) const { return bytes[tier - 1]; }

  /// Expected squared error with the page in `tier`: importance times distortion. Codes that went
  /// through other tiers carry those errors too; a page that was demoted before is held where it is
  /// by the hysteresis.
  QATTN_HD double error(const Candidate& page, int tier) const {
    double d = 0;
    int passed = 0;
    for (int i = 0; i < tiers; ++i) {
      const bool was_there = (page.path >> i & 1) != 0;
      passed += was_there ? 1 : 0;
      if (was_there || i + 1 == tier) d = formats::add_rn(d, distortion[i]);
    }
    const double expected = formats::mul_rn(static_cast<double>(page.importance), d);
    return formats::mul_rn(expected, passed > 1 ? anchored : 1.0);
  }

  /// The next step down the lower convex hull of a page that would lie in tier `at`: its price
  /// (error a byte freed) and its end, 0 where there is none. Of equal prices the farthest.
  QATTN_HD int next(const Candidate& page, int at, double& price) const {
    int end = 0;
    const double here = error(page, at);
    for (int to = at + 1; to <= tiers; ++to) {
      const std::int64_t freed = bytes_of(at) - bytes_of(to);
      if (freed <= 0) continue;
      const double p = formats::add_rn(error(page, to), -here) / static_cast<double>(freed);
      if (end != 0 && p > price) continue;
      price = p;
      end = to;
    }
    return end;
  }
};

/// Importances of a layer's pages, those that are known, in lanes by their place in their table;
/// lanes are added in halves.
inline constexpr int importance_lanes = 512;

/// Keys that a mean is of, in lanes by their position's block of 16 tokens; likewise.
inline constexpr int mean_lanes = 16;

/// Squares of a page's keys, in lanes by their channel; likewise.
inline constexpr int norm_lanes = 16;

/// lane[i * step] for all i, added in halves into lane[0].
template <int Lanes>
QATTN_HD void add_in_halves(double* lane, int step) {
  for (int half = Lanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      lane[i * step] = formats::add_rn(lane[i * step], lane[(i + half) * step]);
    }
  }
}

}  // namespace qattn::kv
