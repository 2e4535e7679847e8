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
    double scale = std::exp2(std::floor(std::log2(amax)) - 8);
    if (amax / scale > 448) scale *= 2;  // nothing saturates
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

/// u8: codes relative to the tile's largest P times V's token scale `sv` (1 without), which is
/// divided out again, since `value` weighs the dequantised V. The sum takes P unrounded. `codes`:
/// of the tiles before.
void round_to_bytes(TileWeights& w, const Values& p, std::span<const double> sv, LostMass rule,
                    double codes) {
  const auto scale = [&](std::size_t j) { return sv.empty() ? 1.0 : sv[j]; };
  double most = 0;
  for (std::size_t j = 0; j < p.size(); ++j) most = std::max(most, p[j] * scale(j));
  const double unit = most / 255;
  Values code(p.size());
  for (std::size_t j = 0; j < p.size(); ++j) {
    code[j] = std::nearbyint(p[j] * scale(j) / unit);
    w.codes += code[j] * unit;
    w.lost += p[j] * scale(j) - code[j] * unit;
  }
  const bool lossy = w.factor * std::abs(w.lost) > (codes + w.factor * w.codes) / 256;
  for (std::size_t j = 0; j < p.size(); ++j) {
    if (lossy && rule == LostMass::second_byte) {
      const double exact = p[j] * scale(j) / unit;
      code[j] = std::floor(exact) + std::nearbyint(255 * (exact - std::floor(exact))) / 255;
    }
    w.value[j] = code[j] * unit / scale(j);
  }
  w.mass = p;
}

}  // namespace

LostMass lost_mass_of(const std::string& plan) {
  const bool mean = plan.find("\nlost_mass: the mean of V") != std::string::npos;
  return mean ? LostMass::value_mean : LostMass::second_byte;
}

bool has_whole_references(const std::string& plan) {
  return plan.find("\nreferences: powers of two") != std::string::npos;
}

double rounded_off(const PRule& rule, double s, double reference) {
  const double p = std::exp(s - reference);
  return p - round_real(p, rule.p);
}

TileWeights round_p(const PRule& rule, std::span<const double> s, double m_run, double codes,
                    std::span<const double> sv) {
  const double m_tile = *std::max_element(s.begin(), s.end());
  const bool local = rule.p == Format::u8 || rule.p == Format::nvfp4;
  const Values p = probabilities(s, local ? m_tile : m_run);
  TileWeights w;
  w.factor = local ? std::exp(m_tile - m_run) : 1;
  w.value.resize(p.size());
  w.mass.resize(p.size());
  if (rule.p == Format::u8) {
    round_to_bytes(w, p, sv, rule.lost_mass, codes);
    return w;
  }
  if (rule.p == Format::mxfp8) {
    w.value = round_mxfp8(p);
  } else if (rule.p == Format::nvfp4) {
    w.value = round_nvfp4(p);
  } else {
    std::transform(p.begin(), p.end(), w.value.begin(), [&](double x) {
      if (rule.p == Format::e4m3) return round_e4m3(x * 256) / 256;
      return rule.p == Format::f32 ? x : round_real(x, rule.p);
    });
  }
  w.mass = w.value;
  return w;
}

}  // namespace qattn::test
