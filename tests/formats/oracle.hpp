// What the float formats are, stated a second time for the tests: values from the definition in
// double precision, rounding by search among all values. Shares nothing with the codecs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace qattn::formats::oracle {

/// The magnitudes of a format in ascending order; the index is the code without its sign.
using Levels = std::vector<double>;

/// `count` codes of a format with `mantissa` fraction bits and the exponent bias `bias`.
inline Levels levels(int mantissa, int bias, int count) {
  Levels out;
  for (int code = 0; code < count; ++code) {
    const int exponent = code >> mantissa;
    const double fraction = std::ldexp(code & ((1 << mantissa) - 1), -mantissa);
    out.push_back(exponent == 0 ? std::ldexp(fraction, 1 - bias)
                                : std::ldexp(1.0 + fraction, exponent - bias));
  }
  return out;
}

/// The code whose magnitude is nearest, ties to the even code; the last one beyond the end.
inline std::uint32_t nearest(const Levels& all, double magnitude) {
  const auto above = std::lower_bound(all.begin(), all.end(), magnitude);
  if (above == all.end()) return static_cast<std::uint32_t>(all.size() - 1);
  const auto high = static_cast<std::uint32_t>(above - all.begin());
  if (high == 0 || *above == magnitude) return high;
  const double down = magnitude - all[high - 1];
  const double up = *above - magnitude;
  if (down != up) return down < up ? high - 1 : high;
  return high % 2 == 0 ? high : high - 1;
}

/// Values on and beside every decision of a format: its magnitudes, the halfway points, and their
/// float32 neighbours; both signs.
inline std::vector<float> decisions(const Levels& all) {
  std::vector<float> out;
  const auto add = [&out](double value) {
    const auto x = static_cast<float>(value);
    for (float y : {std::nextafter(x, -1.0f), x, std::nextafter(x, 3e38f)}) {
      out.push_back(y);
      out.push_back(-y);
    }
  };
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i] <= std::numeric_limits<float>::max()) add(all[i]);
    if (i > 0) add(0.5 * (all[i - 1] + all[i]));
  }
  return out;
}

inline float from_bits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

/// Random bit patterns, infinities and NaNs left out: every exponent is as likely as another.
inline std::vector<float> random_bits(int count, std::uint32_t seed) {
  std::mt19937 engine(seed);
  std::vector<float> out;
  while (static_cast<int>(out.size()) < count) {
    const float x = from_bits(static_cast<std::uint32_t>(engine()));
    if (std::isfinite(x)) out.push_back(x);
  }
  return out;
}

}  // namespace qattn::formats::oracle
