// Rounding of P, one rule a format (docs/NUMERICS.md, "Recipes").
#include <algorithm>
#include <cmath>

#include "support/model.hpp"
#include "support/numbers.hpp"

namespace qattn::test {
namespace {

using Values = std::vector<double>;

Values probabilities(std::span<const double> s, double reference) {
  Values p(s.size());
  for (std::size_t j = 0; j < s.size(); ++j) p[j] = std::exp(s[j] - reference);
  return p;
}

/// Largest value of each group of `size` keys, handed to `round` with the group's range.
template <class Round>
void for_groups(const Values& p, std::size_t size, Round round) {
  for (std::size_t begin = 0; begin < p.size(); begin += size) {
    const std::size_t end = std::min(begin + size, p.size());
    round(begin, end, *std::max_element(p.begin() + begin, p.begin() + end));
  }
}

Values round_mxfp8(const Values& p) {
  Values out(p.size());
  for_groups(p, 32, [&](std::size_t begin, std::size_t end, double amax) {
    if (amax == 0) return;
    const double scale = std::exp2(std::floor(std::log2(amax)) - 8);
    for (std::size_t j = begin; j < end; ++j) out[j] = round_e4m3(p[j] / scale) * scale;
  });
  return out;
}

Values round_nvfp4(const Values& p) {
  constexpr double t = 1.0 / (6 * 448);
  Values out(p.size());
  for_groups(p, 16, [&](std::size_t begin, std::size_t end, double amax) {
    const double scale = round_e4m3(amax / 6 / t) * t;
    if (scale == 0) return;
    for (std::size_t j = begin; j < end; ++j) out[j] = round_e2m1(p[j] / scale) * scale;
  });
  return out;
}

/// V's token scale joins P before rounding; what comes out is divided by it again, since `value`
/// weighs the dequantised V. A token whose V is far smaller than the tile's largest would round to
/// nothing, or one of few values, and take its probability along: its mass stays unrounded.
void round_with_token_scale(TileWeights& w, const Values& p, std::span<const double> sv) {
  double f_max = 0;
  for (std::size_t j = 0; j < p.size(); ++j) f_max = std::max(f_max, p[j] * sv[j]);
  const double floor = *std::max_element(sv.begin(), sv.end()) / 8;
  for (std::size_t j = 0; j < p.size(); ++j) {
    const double code = std::nearbyint(p[j] * sv[j] * 255 / f_max);
    w.value[j] = code * f_max / 255 / sv[j];
    w.mass[j] = sv[j] >= floor ? w.value[j] : p[j];
  }
}

}  // namespace

TileWeights round_p(const PRule& rule, std::span<const double> s, double m_run,
                    std::span<const double> sv) {
  const double m_tile = *std::max_element(s.begin(), s.end());
  const bool local = rule.p == Format::u8 || rule.p == Format::nvfp4;
  const Values p = probabilities(s, local ? m_tile : m_run);
  TileWeights w;
  w.factor = local ? std::exp(m_tile - m_run) : 1;
  w.value.resize(p.size());
  w.mass.resize(p.size());
  if (rule.p == Format::u8 && rule.token_scale) {
    round_with_token_scale(w, p, sv);
    return w;
  }
  if (rule.p == Format::mxfp8) {
    w.value = round_mxfp8(p);
  } else if (rule.p == Format::nvfp4) {
    w.value = round_nvfp4(p);
  } else {
    std::transform(p.begin(), p.end(), w.value.begin(), [&](double x) {
      if (rule.p == Format::u8) return std::nearbyint(x * 255) / 255;
      if (rule.p == Format::e4m3) return round_e4m3(x * 256) / 256;
      return rule.p == Format::f32 ? x : round_real(x, rule.p);
    });
  }
  w.mass = w.value;
  return w;
}

}  // namespace qattn::test
