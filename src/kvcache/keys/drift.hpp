// Keys and values that have drifted from what pages are moved by. A layer of a sequence may have
// several sets of means and powers of two, and a page names the one that it was quantised with.
// Pages of a head that leave the window take the set, of those that its pages name, under which
// their energy exceeds that under a set of their own least, of K or of V whichever exceeds more.
// Where even that is more than `drift` times as large, a fresh set is made of them and the rows
// behind them, the window's; pages take it if the others exceed that, too, so much: that a few
// tokens are alike is no drift. Noise is relative to the root of the energy, so what is not
// answered costs at most a factor of two.
#pragma once

#include "kvcache/keys/balance.hpp"

namespace qattn::kv {

inline constexpr int most_sets = 8;
inline constexpr double drift = 4;
/// Fewer keys of a page say nothing.
inline constexpr int least_keys = 8;

/// Sum of squares of (x - mean) / 2^shift over so many keys.
QATTN_HD double moved_energy(const KeySums& sums, double keys, float mean, int shift) {
  const auto m = static_cast<double>(mean);
  const double rest = formats::add_rn(2 * sums.x, -formats::mul_rn(keys, m));
  const double energy = formats::add_rn(sums.xx, -formats::mul_rn(m, rest));
  return energy > 0 ? energy * static_cast<double>(key_factor(-2 * shift)) : 0.0;
}

/// How many times as large an energy is as it would be under a fresh set.
QATTN_HD double excess(double energy, double fresh) {
  constexpr double most = 1e300;
  if (!(energy > 0)) return 0;
  const double times = fresh > 0 ? energy / fresh : most;
  return times < most ? times : most;
}

/// Sets that the budget leaves room for where a layer has `sets` and pages leave the window.
QATTN_HD int reserved_sets(int sets, bool quantises, int most) {
  const int after = quantises && sets < most ? sets + 1 : sets;
  return after > 1 ? after : 1;
}

/// What leaves the window in one append, in parts that choose for themselves.
struct DriftParts {
  static constexpr int most = 8;
  std::int64_t first, last, tokens;  ///< positions [first, last), so many a part

  /// From where the window began to where it begins.
  QATTN_HD DriftParts(std::int64_t from, std::int64_t to, std::int64_t sinks, std::int64_t page)
      : first(from > sinks ? from : sinks), last(to > first ? to : first) {
    const std::int64_t pages = (last - first) / page, each = (pages + most - 1) / most;
    tokens = (each > 1 ? each : 1) * page;
  }
  QATTN_HD int count() const { return static_cast<int>((last - first + tokens - 1) / tokens); }
  QATTN_HD int of(std::int64_t position) const {
    return position > first ? static_cast<int>((position - first) / tokens) : 0;
  }
  QATTN_HD std::int64_t begin(int part) const { return first + part * tokens; }
  QATTN_HD std::int64_t end(int part) const {
    return begin(part + 1) < last ? begin(part + 1) : last;
  }
};

/// A set, and how much its energy exceeds another.
struct Choice {
  int set;
  double excess;
};

/// Of the sets in `named`, as bits, the one with the least excess_of(set); `last` among equals.
template <class Excess>
QATTN_HD Choice best_set(std::uint32_t named, int last, Excess excess_of) {
  Choice best{last, excess_of(last)};
  for (int set = 0; set < most_sets; ++set) {
    if (set == last || (named >> set & 1) == 0) continue;
    const double x = excess_of(set);
    if (x < best.excess) best = {set, x};
  }
  return best;
}
/// A number that none of those has; `most`: there is none.
QATTN_HD int spare_set(std::uint32_t named, int most) {
  int set = 0;
  while (set < most && (named >> set & 1) != 0) ++set;
  return set;
}

}  // namespace qattn::kv
