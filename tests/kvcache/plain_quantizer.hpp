// The KV cache's quantiser and layout stated a second time for the tests: from the text of
// docs/internals/kv-cache.md, in the plainest way, sharing nothing with src/.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/numbers.hpp"

namespace qattn::test {

struct PlainRow {
  std::vector<int> codes;  ///< from 0
  float scale = 0;         ///< an f16 value, or NaN
  int bits = 0;

  double value(std::size_t i) const {
    return (codes[i] - std::ldexp(1.0, bits - 1) + 0.5) * static_cast<double>(scale);
  }
};

inline PlainRow quantize_plainly(const std::vector<float>& x, int bits) {
  PlainRow row{std::vector<int>(x.size(), 0), std::numeric_limits<float>::quiet_NaN(), bits};
  const float half = std::ldexp(1.0f, bits - 1);
  float amax = 0;
  for (const float v : x) {
    if (!std::isfinite(v)) return row;
    amax = std::max(amax, std::abs(v));
  }
  const auto grid = [&](float v, float scale) {
    const float inverse = 1.0f / scale;
    return std::min(std::max(std::floor(v * inverse), -half), half - 1) + 0.5f;
  };
  const auto candidate = [&](int i) {
    const float factor = (17.0f + static_cast<float>(i)) / 32.0f / half;
    return static_cast<float>(round_f16(static_cast<double>(amax * factor)));
  };
  if (std::isinf(candidate(15))) return row;
  float best = 0, least = std::numeric_limits<float>::infinity();
  for (int i = 0; i < 16; ++i) {
    const float scale = candidate(i);
    if (scale == 0) continue;
    std::array<float, 16> sum{};
    for (std::size_t j = 0; j < x.size(); ++j) {
      const float inverse = 1.0f / scale;
      const float y = x[j] * inverse;
      const float e = y - grid(x[j], scale);
      const float square = e * e;
      sum[j % 16] += square;
    }
    for (std::size_t width = 8; width > 0; width /= 2) {
      for (std::size_t j = 0; j < width; ++j) sum[j] += sum[j + width];
    }
    const float error = scale * scale * sum[0];
    if (error < least) {
      least = error;
      best = scale;
    }
  }
  row.scale = best;
  for (std::size_t j = 0; j < x.size(); ++j) {
    row.codes[j] =
        best == 0 ? static_cast<int>(half) : static_cast<int>(grid(x[j], best) - 0.5f + half);
  }
  return row;
}

/// Bytes of a panel of codes, each code's bits put where docs/internals/kv-cache.md says.
inline std::vector<std::uint8_t> pack_plainly(const std::vector<int>& panel, int bits) {
  const std::size_t n = panel.size();
  std::vector<std::uint8_t> bytes(n * static_cast<std::size_t>(bits) / 8, 0);
  const auto put = [&](std::size_t at, int value, std::size_t shift) {
    bytes[at] = static_cast<std::uint8_t>(bytes[at] + (value << shift));
  };
  for (std::size_t x = 0; x < n; ++x) {
    if (bits == 8) put(x, panel[x], 0);
    if (bits == 4) put(x % (n / 2), panel[x], x / (n / 2) * 4);
    if (bits == 2 || bits == 3) put(x % (n / 4), panel[x] % 4, x / (n / 4) * 2);
    if (bits == 3) put(n / 4 + x % (n / 8), panel[x] / 4, x / (n / 8));
  }
  return bytes;
}

}  // namespace qattn::test
