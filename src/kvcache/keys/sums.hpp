// Sums over rows on the host: lanes added as kernels add them, and what K is divided by.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "core/operand.hpp"
#include "kvcache/keys/balance.hpp"
#include "kvcache/keys/size.hpp"
#include "kvcache/prices.hpp"

namespace qattn::kv {

/// How many keys have each size.
class KeySizes {
 public:
  void add(int size) { ++counts_[size]; }
  int largest() const {
    return largest_key_size([&](int n) {
      std::int64_t keys = 0;
      for (int i = 1; i <= n; ++i) keys += counts_[i];
      return keys;
    });
  }

 private:
  std::int64_t counts_[key_sizes] = {};
};

/// f(token) of live bits.
template <class F>
void for_tokens(std::uint64_t live, F f) {
  for (; live != 0; live &= live - 1) f(std::countr_zero(live));
}

inline constexpr int most_key_pairs = most_key_channels / 2;

/// Of each channel, from the energies of all.
inline void set_key_shifts(const KeyEnergy* energy, int d, std::uint8_t* shift) {
  const int pairs = d / 2;
  const auto of_pair = [&](int j) { return energy[j].own + energy[j + pairs].own; };
  double own[most_key_pairs];
  for (int j = 0; j < pairs; ++j) own[j] = of_pair(j);
  double* const middle = own + (pairs - 1) / 2;
  std::nth_element(own, middle, own + pairs);
  const double median = *middle;
  for (int j = 0; j < pairs; ++j) {
    const int s = key_shift(of_pair(j), median);
    shift[j] = shift[j + pairs] = static_cast<std::uint8_t>(s);
  }
}

/// KeySums of all channels and lanes, in rows that a compiler can add at once. Lanes to which
/// nothing was added are zeros, and not touched.
class LaneSums {
 public:
  /// Room for so many channels.
  explicit LaneSums(int channels)
      : sums_(static_cast<std::size_t>(2 * mean_lanes) * static_cast<std::size_t>(channels)) {}

  void clear(int channels) {
    channels_ = channels;
    used_ = 0;
  }
  void add(int lane, const float* row) {
    if (!used(lane)) std::fill_n(at(lane, 0), 2 * channels_, 0.0);
    used_ |= 1u << lane;
    double* const x = at(lane, 0);
    double* const xx = at(lane, 1);
    for (int c = 0; c < channels_; ++c) {
      const auto value = static_cast<double>(row[c]);
      x[c] += value;
      xx[c] += value * value;
    }
  }
  /// All lanes, in halves; then of(channel) may be asked.
  void add_up() {
    for (int half = mean_lanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) {
        if (!used(lane + half)) continue;
        const double* from = at(lane + half, 0);
        double* const to = at(lane, 0);
        if (!used(lane)) {
          std::copy_n(from, 2 * channels_, to);
        } else {
          for (int i = 0; i < 2 * channels_; ++i) to[i] += from[i];
        }
        used_ |= 1u << lane;
      }
    }
  }
  KeySums of(int channel) const {
    if (!used(0)) return {};
    const double* const first = sums_.data() + channel;
    return {first[0], first[channels_]};
  }

 private:
  bool used(int lane) const { return (used_ >> lane & 1) != 0; }
  double* at(int lane, int which) { return sums_.data() + (2 * lane + which) * channels_; }

  int channels_ = 0;
  std::uint32_t used_ = 0;
  std::vector<double> sums_;
};

}  // namespace qattn::kv
