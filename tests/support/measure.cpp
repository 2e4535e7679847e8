#include "support/measure.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <vector>

#include "support/numbers.hpp"

namespace qattn::test {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

}  // namespace

std::int64_t plan_number(const Plan& plan, const std::string& field) {
  const std::string text = plan.to_string(), key = field + ": ";
  const std::size_t at = text.find(key);
  return at == std::string::npos ? 0 : std::atoll(text.c_str() + at + key.size());
}

PlanSplitKv split_kv_of(const Plan& plan) {
  PlanSplitKv spread;
  spread.splits = std::max<std::int64_t>(1, plan_number(plan, "splits"));
  if (plan_number(plan, "pack_gqa") <= 1) spread.tile_rows = plan_number(plan, "\ntile");
  return spread;
}

Distance distance(std::span<const float> out, std::span<const double> want, std::int64_t row,
                  std::int64_t spared) {
  const auto rows = static_cast<std::int64_t>(want.size()) / row;
  if (out.size() != want.size()) return {nan, nan, nan, 0};
  std::vector<double> error(static_cast<std::size_t>(rows), 0.0);
  double norm = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t n = r * row; n < (r + 1) * row; ++n) {
      const double delta = out[n] - want[n];
      if (std::isnan(delta)) return {nan, nan, nan, r};
      error[r] += delta * delta;
      norm += want[n] * want[n];
    }
  }
  Distance d;
  if (rows == 0) return d;
  d.worst_at = std::max_element(error.begin(), error.end()) - error.begin();
  const double worst = error[d.worst_at];
  const auto ratio = [norm](double e) { return e == 0 ? 0.0 : std::sqrt(e / norm); };
  d.nrmse = ratio(std::accumulate(error.begin(), error.end(), 0.0));
  d.worst_row = ratio(worst * static_cast<double>(rows));
  std::sort(error.begin(), error.end());
  const auto kept = std::max<std::int64_t>(rows - spared, 0);
  d.trimmed = ratio(std::accumulate(error.begin(), error.begin() + kept, 0.0));
  return d;
}

double lse_distance(std::span<const float> lse, std::span<const double> want, std::int64_t spared) {
  if (lse.size() != want.size()) return nan;
  std::vector<double> error;
  for (std::size_t n = 0; n < lse.size(); ++n) {
    if (static_cast<double>(lse[n]) == want[n]) continue;  // infinities too
    const double delta = std::abs(lse[n] - want[n]);
    if (std::isnan(delta)) return nan;
    error.push_back(delta);
  }
  std::sort(error.begin(), error.end(), std::greater<>());
  const auto skip = static_cast<std::size_t>(spared);
  return error.size() > skip ? error[skip] : 0.0;
}

std::int64_t spared_rows(const Recipe& resolved, std::int64_t rows) {
  return resolved.p == Format::f32 ? 0 : 1 + rows / 200;
}

std::vector<double> in_format(std::vector<double> out, Format output) {
  if (output == Format::f32) return out;
  for (double& x : out) x = round_real(x, output);
  return out;
}

double resolution(std::span<const double> want, Format output) {
  const double squares = std::inner_product(want.begin(), want.end(), want.begin(), 0.0);
  if (output != Format::f16 || !(squares > 0)) return 0;
  return std::ldexp(1.0, -24) / std::sqrt(squares / static_cast<double>(want.size()));
}

double tight_bound(Format output) { return output == Format::f32 ? 1e-4 : 2e-3; }

double loose_bound(const Recipe& resolved, Format output) {
  const auto of = [](Format format) {
    switch (format) {
      case Format::f32:
        return 1e-5;
      case Format::f16:
        return 2e-3;
      case Format::bf16:
        return 1e-2;
      case Format::s8:
      case Format::u8:
        return 2e-2;
      case Format::nvfp4:
        return 2e-1;
      default:
        return 5e-2;
    }
  };
  return of(resolved.qk) + of(resolved.p) + of(resolved.v) + of(output);
}

}  // namespace qattn::test
