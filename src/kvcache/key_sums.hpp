// Sums over rows on the host: lanes added as kernels add them, and what K is divided by.
#pragma once

#include <cstdint>

#include "kvcache/key_balance.hpp"
#include "kvcache/prices.hpp"

namespace qattn::kv {

/// Of each channel, from the energies of all.
inline void set_key_shifts(const KeyEnergy* energy, const KeyTimes& times, int d,
                           std::uint8_t* shift) {
  const int pairs = d / 2;
  const auto of_pair = [&](int j) { return energy[j] + energy[j + pairs]; };
  const auto own = [&](int j) { return of_pair(j).own; };
  int median = 0;
  while (!is_median(median, pairs, own)) ++median;
  for (int j = 0; j < pairs; ++j) {
    const int s = key_shift(of_pair(j).later(times, own(median)), own(median));
    shift[j] = shift[j + pairs] = static_cast<std::uint8_t>(s);
  }
}

/// Lanes `stride` apart into the first.
inline void add_lanes(KeySums* lanes, int stride) {
  for (int half = mean_lanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      KeySums& to = lanes[i * stride];
      const KeySums& from = lanes[(i + half) * stride];
      to = {to.x + from.x, to.xx + from.xx, to.tx + from.tx};
    }
  }
}
inline void add_lanes(KeyTimes* lanes, int stride) {
  for (int half = mean_lanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      KeyTimes& to = lanes[i * stride];
      const KeyTimes& from = lanes[(i + half) * stride];
      to = {to.count + from.count, to.t + from.t, to.tt + from.tt};
    }
  }
}

}  // namespace qattn::kv
