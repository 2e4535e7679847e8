// Sums over rows on the host: lanes added as kernels add them, and what K is divided by.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

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

/// KeySums of all channels and lanes, in rows that a compiler can add at once.
class LaneSums {
 public:
  LaneSums(int lanes, int channels)
      : channels_(channels), sums_(static_cast<std::size_t>(3 * lanes * channels)) {}

  void add(int lane, const float* row, double time) {
    double* const x = at(lane, 0);
    double* const xx = at(lane, 1);
    double* const tx = at(lane, 2);
    for (int c = 0; c < channels_; ++c) {
      const auto value = static_cast<double>(row[c]);
      x[c] += value;
      xx[c] += value * value;
      tx[c] += time * value;
    }
  }
  void clear() { std::fill(sums_.begin(), sums_.end(), 0.0); }
  /// All lanes, in halves.
  KeySums of(int channel) {
    const int lanes = static_cast<int>(sums_.size()) / 3 / channels_;
    for (int half = lanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) {
        for (int which = 0; which < 3; ++which) {
          at(i, which)[channel] += at(i + half, which)[channel];
        }
      }
    }
    return {at(0, 0)[channel], at(0, 1)[channel], at(0, 2)[channel]};
  }

 private:
  double* at(int lane, int which) { return sums_.data() + (3 * lane + which) * channels_; }

  int channels_;
  std::vector<double> sums_;
};

/// Lanes into the first, in halves.
inline void add_lanes(KeyTimes* lanes) {
  for (int half = mean_lanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      KeyTimes& to = lanes[i];
      const KeyTimes& from = lanes[i + half];
      to = {to.count + from.count, to.t + from.t, to.tt + from.tt};
    }
  }
}

}  // namespace qattn::kv
